"""The batches of an inner loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, describe, message


def read_batches(batches: Iterable[PyTree]) -> list[PyTree]:
    """Return the data of each step, read before the first."""
    if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise StructureError(
            message(
                "batches",
                "a list with the data of each step",
                describe(batches),
                "list(batches.unbind()), or [batch] * steps",
            )
        )
    data, versions = [], []
    for batch in batches:
        data.append(batch)
        versions += [(x, x._version) for x in pytree.flatten(batch)[0] if _has_version(x)]
    if any(x._version != version for x, version in versions):
        raise StructureError(
            message(
                "batches",
                "data that stays as it is: all of it is read before the first step",
                "a tensor that the iterator overwrites with the data of several steps",
                "(batch.clone() for batch in batches)",
            )
        )
    if not data:
        raise StructureError(
            message("batches", "the data of at least one step", "none", "[batch] * steps")
        )
    return data


def _has_version(leaf: object) -> bool:
    """Return whether torch counts the in-place changes of a leaf."""
    return isinstance(leaf, Tensor) and not leaf.is_inference()
