"""Many names in few lines: params that are alike below a prefix are shown as `encoder.*`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def folded(names: Sequence[str], kinds: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """Group dotted names of one kind by their longest prefix: `(label, indices)` of each group."""
    parts = [name.split(".") for name in names]

    def fold(prefix: str, members: list[int]) -> list[tuple[str, list[int]]]:
        if len(members) == 1:
            return [(names[members[0]], members)]
        if len({kinds[member] for member in members}) == 1:
            return [(f"{prefix}*", members)]
        depth = prefix.count(".")
        children: dict[tuple[str, bool], list[int]] = {}
        for member in members:
            # A name that ends at this depth is a group by itself, whatever else starts like it.
            is_last = len(parts[member]) == depth + 1
            label = names[member] if is_last else f"{prefix}{parts[member][depth]}."
            children.setdefault((label, is_last), []).append(member)
        groups: list[tuple[str, list[int]]] = []
        for (label, is_last), below in children.items():
            groups += [(label, below)] if is_last else fold(label, below)
        return groups

    return fold("", list(range(len(names))))


def prefixes(name: str) -> list[str]:
    """Return the modules that a parameter is in, from the outermost: `a.b.w` gives `a`, `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Return names as `a, b and c`; of many the first few, and how many more there are."""
    shown = [*names[:limit], f"{len(names) - limit} more"] if len(names) > limit else list(names)
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 loss`, `3 losses`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"
