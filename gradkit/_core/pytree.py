"""Trees: the one user of optree.

`None` is a leaf, and dictionaries keep the order in which they were written: losses are added and
gradients are stacked in the caller's order, and optree's own default would sort the keys.
A class becomes a node by `optree.register_pytree_node` in the global namespace or in "gradkit".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import optree
from optree import PyTreeSpec

from gradkit.errors import StructureError, message

PyTree: TypeAlias = Any
Structure: TypeAlias = PyTreeSpec

_NAMESPACE = "gradkit"

# The order of insertion is a mode of the namespace. It is ours alone, so it is entered once and for
# good, which saves some microseconds a call; the name keeps the context from being collected.
_INSERTION_ORDER = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_INSERTION_ORDER.__enter__()


def flatten(tree: PyTree) -> tuple[list[Any], PyTreeSpec]:
    """Return the leaves of `tree` in order, None among them, and its structure."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)


def unflatten(spec: PyTreeSpec, leaves: Iterable[Any]) -> PyTree:
    """Return the tree of structure `spec` with these leaves."""
    return spec.unflatten(leaves)


def path(spec: PyTreeSpec, index: int, root: str) -> str:
    """Return how a caller would write the way to a leaf: `losses['aux'][0]`."""
    return spec.accessors()[index].codify(root)


def labels(spec: PyTreeSpec, lone: str) -> list[str]:
    """Return a short name for every leaf: `aux[0]`, `encoder.weight`, where `path` is for errors.

    Args:
        spec: The structure.
        lone: What a leaf is called that has no name of its own: `loss`, and in a list `loss[0]`.

    Returns:
        Names that differ from each other.
    """
    paths = [accessor.codify("") for accessor in spec.accessors()]
    dotted = [re.sub(r"\['([^'\]]*)'\]", r".\1", path) for path in paths]
    short = [path.removeprefix(".") if path.startswith(".") else f"{lone}{path}" for path in dotted]
    return short if len(set(short)) == len(short) else paths


def flatten_up_to(spec: PyTreeSpec, spec_root: str, tree: PyTree, root: str) -> list[Any]:
    """Return what stands in `tree` at the leaves of `spec`, which must be a prefix of it.

    Args:
        spec: The structure to follow.
        spec_root: The name of the tree that `spec` came from, for the error.
        tree: A tree of that structure, or a deeper one.
        root: The name of `tree`, for the error.

    Returns:
        One subtree, often a leaf, for each leaf of `spec`.

    Raises:
        StructureError: The trees do not match.
    """
    try:
        return cast("list[Any]", spec.flatten_up_to(tree))
    except (ValueError, TypeError):
        raise StructureError(_mismatch(spec_root, spec, root, flatten(tree)[1])) from None


def broadcast_prefix(prefix: PyTree, prefix_root: str, tree: PyTree, root: str) -> list[Any]:
    """Return the leaves of `prefix`, each repeated for the leaves of `tree` below it.

    Args:
        prefix: A tree whose structure begins that of `tree`: a lone leaf, say.
        prefix_root: Its name, for the error.
        tree: The tree to cover.
        root: Its name, for the error.

    Returns:
        One leaf of `prefix` for each leaf of `tree`.

    Raises:
        StructureError: `prefix` is no prefix of `tree`.
    """
    given, prefix_spec = flatten(prefix)
    _, spec = flatten(tree)
    try:
        below = cast("list[Any]", prefix_spec.flatten_up_to(tree))
        # Through a whole tree: optree.broadcast_prefix goes by the order of the prefix's keys.
        parts = [flatten(part) for part in below]
        full = [
            part_spec.unflatten([value] * len(leaves))
            for value, (leaves, part_spec) in zip(given, parts, strict=True)
        ]
        return cast("list[Any]", spec.flatten_up_to(prefix_spec.unflatten(full)))
    except (ValueError, TypeError):
        raise StructureError(_mismatch(root, spec, prefix_root, prefix_spec)) from None


def children(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Return the top level of `tree`, and the function that puts such a level together."""
    spec = top_level(tree)
    return cast("list[Any]", spec.flatten_up_to(tree)), spec.unflatten


def top_level(tree: PyTree) -> PyTreeSpec:
    """Return the structure of the top level of `tree`, whose leaves are what stands below."""
    return optree.tree_structure(
        tree, is_leaf=lambda node: node is not tree, none_is_leaf=True, namespace=_NAMESPACE
    )


def _mismatch(wanted_root: str, wanted: PyTreeSpec, root: str, came: PyTreeSpec) -> str:
    return message(
        root,
        f"the structure of {wanted_root}, {_shown(wanted)}",
        _shown(came),
        f"give {root} the containers and keys of {wanted_root}",
    )


def _shown(spec: PyTreeSpec) -> str:
    text = str(spec).removeprefix("PyTreeSpec(").partition(", NoneIsLeaf")[0]
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


_LONGEST = 120
