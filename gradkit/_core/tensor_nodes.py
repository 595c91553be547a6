"""The nodes of a tensor: where its gradient arrives, and what they tell of its history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradkit._compat.autograd import AccumulateGrad
from gradkit._compat.nodes import has_released, saved_names
from gradkit.errors import UnsupportedGraphError, message


def edge(tensor: Tensor) -> GradientEdge:
    """Return the edge of the graph at which the gradient of a tensor arrives."""
    has_views = tensor.layout == torch.strided and not tensor.is_nested
    if has_views or tensor.grad_fn is not None:
        return get_gradient_edge(tensor)
    with torch.enable_grad():  # torch would take a view, which others do not have
        copy = cast("Any", tensor.clone().grad_fn)
    return GradientEdge(copy.next_functions[0][0], 0)


def leaf_tensors(nodes: Iterable[Node]) -> dict[int, Tensor]:
    """Return the leaf tensors whose gradients the nodes accumulate, by id."""
    leaves = map(leaf_of, leaf_nodes(nodes))
    return {id(leaf): leaf for leaf in leaves}


def leaf_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return those of the nodes that accumulate the gradients of leaf tensors."""
    return [node for node in nodes if type(node) is AccumulateGrad]


def is_leaf_node(node: Node) -> bool:
    """Return whether a node accumulates the gradient of a leaf tensor."""
    return type(node) is AccumulateGrad


# The leaf tensor whose gradient an AccumulateGrad node accumulates.
leaf_of: Callable[[Node], Tensor] = attrgetter("variable")


def has_rebuilt_history(view: Tensor) -> bool:
    """Return whether torch has rebuilt the history of a view, as after a change of its base."""
    node = view.grad_fn
    return view._version > 0 and node is not None and node.name() == "AsStridedBackward0"


def refuse_lost_history(tensors: Sequence[Tensor], path: Callable[[int], str]) -> None:
    """Raise if one of some tensors is a view of whose history torch raises, when asked for it."""
    for index, tensor in enumerate(tensors):
        try:
            _ = tensor.grad_fn
        except RuntimeError as error:
            raise UnsupportedGraphError(message(path(index), *_LOST_HISTORY)) from error


OF_LOST_HISTORY = (
    "take the gradients before the write, which an optimizer's step is, too; or take views of a "
    "copy, on which nothing writes: a, b = w.clone()"
)
_LOST_HISTORY = (
    "a value as it was computed",
    "one of several views of a tensor (by iteration, unbind, split or chunk) that was changed in "
    "place since: torch has lost its history",
    OF_LOST_HISTORY,
)


def was_used_before_change(variable: Tensor, nodes: set[Node]) -> bool:
    """Return whether an earlier value of a tensor that was changed in place is in a graph [C8]."""
    if variable._is_view():
        return False  # its version counts the changes of all views of the same memory
    node = variable.grad_fn
    for _ in range(min(variable._version, 16)):
        # The first input of an in-place operation is the earlier value.
        if node is None or not node.next_functions:
            return False
        node = node.next_functions[0][0]
        if node in nodes and not is_leaf_node(node):
            return True
    return False


def is_freed(loss: Tensor) -> bool:
    """Return whether the first node below `loss` that saves tensors has lost one."""
    # This sees a loss that has been differentiated before, in a microsecond or two; not a graph
    # that is freed further down, as a trunk shared with such a loss is.
    node = loss.grad_fn
    for _ in range(8):
        if node is None:
            return False
        if saved_names(type(node)):
            return has_released(node)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False


def metadata(node: Node) -> dict[str, object]:
    """Return the dict of a node in which whoever likes may keep something."""
    return cast("dict[str, object]", node.metadata)
