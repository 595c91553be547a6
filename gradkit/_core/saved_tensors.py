"""The tensors that graph nodes have saved, and whether these have been released."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import NoReturn, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradkit.errors import FreedGraphError, message


def raise_freed(_: object) -> NoReturn:
    """Raise, as the unpack hook of a saved tensor that has been released."""
    raise FreedGraphError(
        message(
            "a loss",
            "a graph that still holds its saved tensors",
            "one that an earlier gradkit call has freed (Trying to backward through the graph a "
            "second time)",
            "pass retain_graph=True to the earlier call",
        )
    )


def is_freed(loss: Tensor) -> bool:
    """Return whether the first node below `loss` that saves tensors has lost one.

    This sees a loss that has been differentiated before, in a microsecond or two; not a graph that
    is freed further down, as a trunk shared with such a loss is.
    """
    node = loss.grad_fn
    for _ in range(8):
        if node is None:
            return False
        if saved_names(type(node)):
            return has_released(node)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False


def has_released(node: Node) -> bool:
    """Return whether the node has lost a tensor that it saved, and so cannot run again."""
    return any(_is_released(node, name) for name in saved_names(type(node)))


def saved_names(kind: type) -> tuple[str, ...]:
    """Return the attributes by which nodes of a type show the tensors they have saved."""
    if issubclass(kind, BackwardCFunction):
        return ("_raw_saved_tensors",)  # not through the cache, which would keep the class alive
    return _saved_names(cast("Hashable", kind))


@cache
def _saved_names(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _is_released(node: Node, name: str) -> bool:
    try:
        saved = getattr(node, name)
        if getattr(saved, "data", saved) is None:
            if saved.unpack_hook is None:
                # Raises if it is released; an optional tensor that was never saved is None.
                getattr(node, name.replace("_raw_saved_", "_saved_"))
            # One with hooks is not unpacked: that could recompute a checkpoint.
            return saved.unpack_hook is raise_freed
    except RuntimeError:
        return True
    return False
