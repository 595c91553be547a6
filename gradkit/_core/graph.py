"""Reading the autograd graph: what is in it, and who reaches what."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def edge(tensor: Tensor) -> GradientEdge:
    """Return the place in the graph where the gradient of `tensor` arrives."""
    return get_gradient_edge(tensor)


def nodes_below(losses: Iterable[Tensor], stop: Iterable[Node] = ()) -> set[Node]:
    """Return every node that a pass from these losses could visit; about 0.4 us a node.

    Args:
        losses: Where the pass starts.
        stop: Nodes that the walk does not enter.

    Returns:
        The nodes of the losses, and all below them.
    """
    barred = set(stop)
    seen = {edge(loss).node for loss in losses} - barred
    stack = list(seen)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen and node not in barred:
                seen.add(node)
                stack.append(node)
    return seen


def leaves_of(nodes: Iterable[Node]) -> set[int]:
    """Return the ids of the leaf tensors whose gradient the nodes accumulate."""
    return {id(_variable(node)) for node in nodes if type(node) is _AccumulateGrad}


def leaf_tensors(nodes: Iterable[Node]) -> dict[int, Tensor]:
    """Return the leaf tensors whose gradient the nodes accumulate, by their ids."""
    found = (_variable(node) for node in nodes if type(node) is _AccumulateGrad)
    return {id(variable): variable for variable in found}


def is_leaf_node(node: Node) -> bool:
    """Return whether a node accumulates the gradient of a leaf tensor."""
    return type(node) is _AccumulateGrad


def _variable(node: Any) -> Tensor:
    return cast("Tensor", node.variable)


def largest_tensor(nodes: Iterable[Node]) -> int:
    """Return the number of elements of the largest gradient that a pass through the nodes makes."""
    metadata = (one for node in nodes for one in _metadata(node))
    return max((torch.Size(one.shape).numel() for one in metadata), default=0)


def _metadata(node: Any) -> list[Any]:
    return list(node._input_metadata)


def leading_to(
    variables: Iterable[Tensor], nodes: set[Node], further: Iterable[Node] = ()
) -> set[Node]:
    """Return those of the nodes that a pass for the gradients of `variables` executes.

    Args:
        variables: The tensors whose gradient is wanted.
        nodes: A graph, from `nodes_below`.
        further: Nodes that are to be reached, too.

    Returns:
        The nodes above one of the variables; not its own, at which the engine only captures.
    """
    parents: dict[Node, list[Node]] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None:
                parents.setdefault(child, []).append(node)
    wanted = {id(variable) for variable in variables}
    stack = [
        node for node in nodes if type(node) is _AccumulateGrad and id(_variable(node)) in wanted
    ]
    stack += [variable.grad_fn for variable in variables if variable.grad_fn is not None]
    stack += further
    leading: set[Node] = set()
    while stack:
        for node in parents.get(stack.pop(), ()):
            if node not in leading:
                leading.add(node)
                stack.append(node)
    return leading


def reached(
    variable: Tensor, losses: Iterable[Tensor], nodes: set[Node], leaves: Collection[int]
) -> bool:
    """Return whether a gradient can arrive at `variable`.

    Args:
        variable: A tensor that requires grad.
        losses: The losses of the pass.
        nodes: `nodes_below(losses)`.
        leaves: `leaves_of(nodes)`.

    Returns:
        True if the variable is one of the losses or stands below one.
    """
    if variable.grad_fn is None:
        return id(variable) in leaves
    here = edge(variable)
    if here.node not in nodes:
        return False
    key = (here.node, here.output_nr)
    return any(edge(loss)[:2] == key for loss in losses) or any(
        key in node.next_functions for node in nodes
    )


def has_another_history(view: Tensor) -> bool:
    """Return whether torch has rebuilt the history of a view, as after a change of its base."""
    node = view.grad_fn
    return view._version > 0 and node is not None and node.name() == "AsStridedBackward0"


def was_used_before_change(variable: Tensor, nodes: set[Node]) -> bool:
    """Return whether an earlier value of a tensor that was changed in place is in a graph [C8]."""
    if variable._is_view():
        return False  # its count of changes is that of all views of the same memory
    node = variable.grad_fn
    for _ in range(min(variable._version, 16)):
        # An in-place operation leads on to the earlier value first.
        if node is None or not node.next_functions:
            return False
        node = node.next_functions[0][0]
        if node in nodes and type(node) is not _AccumulateGrad:
            return True
    return False
