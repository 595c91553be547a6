"""Many names in few lines: what is alike below a prefix stands as `encoder.*`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def folded(names: Sequence[str], kinds: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """Group dotted names that are of one kind, as far up as all below a prefix is.

    Args:
        names: Names like `encoder.0.weight`, different from each other.
        kinds: Of which kind each is.

    Returns:
        For each group what to call it, and the places of its members; a name by itself stays.
    """
    return _fold("", list(range(len(names))), [name.split(".") for name in names], names, kinds)


def _fold(
    prefix: str,
    members: list[int],
    parts: Sequence[Sequence[str]],
    names: Sequence[str],
    kinds: Sequence[Hashable],
) -> list[tuple[str, list[int]]]:
    if len(members) == 1:
        return [(names[members[0]], members)]
    if len({kinds[member] for member in members}) == 1:
        return [(f"{prefix}*", members)]
    depth = prefix.count(".")
    children: dict[tuple[str, bool], list[int]] = {}
    for member in members:
        # A name that ends here stands for itself, whatever else begins like it.
        is_last = len(parts[member]) == depth + 1
        place = names[member] if is_last else f"{prefix}{parts[member][depth]}."
        children.setdefault((place, is_last), []).append(member)
    return [
        group
        for (place, is_last), below in children.items()
        for group in ([(place, below)] if is_last else _fold(place, below, parts, names, kinds))
    ]


def prefixes(name: str) -> list[str]:
    """Return the modules that a parameter is in, from the outermost: `a.b.w` gives `a`, `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names in a row, the first few of many."""
    shown = [*names[:most], f"{len(names) - most} more"] if len(names) > most else list(names)
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def plural(count: int, noun: str) -> str:
    """Return how many: `1 loss`, `3 losses`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"
