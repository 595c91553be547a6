"""Trees, with optree.

`None` is a leaf. Dictionaries keep their insertion order, where optree's default sorts the keys:
losses are added and gradients are stacked in the caller's order. A class becomes a node by
`optree.register_pytree_node`, in the global namespace or in "gradkit".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import optree
from optree import PyTreeSpec

from gradkit._core.mismatch import Difference, Subtree, first_difference

PyTree: TypeAlias = Any
Structure: TypeAlias = PyTreeSpec

_NAMESPACE = "gradkit"

# The insertion order is a mode of the namespace, which only gradkit uses. Entering it once and for
# all saves some microseconds a call; the name keeps the context from being garbage collected.
_INSERTION_ORDER = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_INSERTION_ORDER.__enter__()


def flatten(tree: PyTree) -> tuple[list[Any], PyTreeSpec]:
    """Return the leaves of `tree` in order, None among them, and its structure."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)


def unflatten(spec: PyTreeSpec, leaves: Iterable[Any]) -> PyTree:
    """Return the tree of structure `spec` with these leaves."""
    return spec.unflatten(leaves)


def path(spec: PyTreeSpec, index: int, root: str) -> str:
    """Return the path of a leaf as a caller would write it: `losses['aux'][0]`."""
    return spec.accessors()[index].codify(root)


def labels(spec: PyTreeSpec, lone: str) -> list[str]:
    """Return short, distinct names of all leaves: `encoder.weight`, or `loss[0]` with a `lone`."""
    paths = [accessor.codify("") for accessor in spec.accessors()]
    dotted = [re.sub(r"\['([^'\]]*)'\]", r".\1", path) for path in paths]
    short = [path.removeprefix(".") if path.startswith(".") else f"{lone}{path}" for path in dotted]
    return short if len(set(short)) == len(short) else paths


def flatten_up_to(spec: PyTreeSpec, spec_root: str, tree: PyTree, root: str) -> list[Any]:
    """Return the subtrees of `tree` at the leaves of `spec`, which must be a prefix of it."""
    try:
        return cast("list[Any]", spec.flatten_up_to(tree))
    except (ValueError, TypeError) as error:
        leaves, tree_spec = flatten(tree)
        difference = first_difference(
            Subtree(spec_root, spec), Subtree(root, tree_spec, leaves), prefix=False
        ) or Difference(root, f"the structure of {spec_root}", str(error))
        raise difference.error(f"give {root} the containers and keys of {spec_root}") from None


def broadcast_prefix(prefix: PyTree, prefix_root: str, tree: PyTree, root: str) -> list[Any]:
    """Return the leaves of `prefix`, each repeated for the leaves of `tree` below it."""
    values, prefix_spec = flatten(prefix)
    spec = flatten(tree)[1]
    try:
        below = cast("list[Any]", prefix_spec.flatten_up_to(tree))
        # Through a whole tree: optree.broadcast_prefix follows the key order of the prefix.
        parts = [flatten(part) for part in below]
        full = [
            part_spec.unflatten([value] * len(leaves))
            for value, (leaves, part_spec) in zip(values, parts, strict=True)
        ]
        return cast("list[Any]", spec.flatten_up_to(prefix_spec.unflatten(full)))
    except (ValueError, TypeError) as error:
        difference = first_difference(
            Subtree(root, spec), Subtree(prefix_root, prefix_spec, values), prefix=True
        ) or Difference(prefix_root, f"a prefix of the structure of {root}", str(error))
        advice = f"give {prefix_root} the containers and keys of {root}, or one value for a branch"
        raise difference.error(advice) from None


def children(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Return the top level of `tree`, and the function that builds such a level."""
    spec = top_level(tree)
    return cast("list[Any]", spec.flatten_up_to(tree)), spec.unflatten


def top_level(tree: PyTree) -> PyTreeSpec:
    """Return the structure of the top level of `tree`."""
    return optree.tree_structure(
        tree, is_leaf=lambda node: node is not tree, none_is_leaf=True, namespace=_NAMESPACE
    )
