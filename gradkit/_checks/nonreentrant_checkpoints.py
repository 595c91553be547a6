"""Non-reentrant checkpoints inside a call whose backward pass would recompute them wrongly.

Their recomputation runs in the backward pass, when the module has its own parameters back, and so
gives gradients at those, silently [F3].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat.checkpoints import frame_of, frames_waiting
from gradkit._compat.nodes import hooked_tensors
from gradkit._compat.transforms import default_unpack_hook, differentiated, is_transform_tensor
from gradkit._core import graph, pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError, message


@dataclass(frozen=True)
class StateBeforeCall:
    """The state before a call."""

    frames: int  # how many checkpoints wait to recompute, plus a constant
    nodes: set[Node]  # where the graphs of the call's inputs begin, which are not the call's
    # The unpack hook around it: that of a checkpoint of the whole call, say, which recomputes the
    # call and not the module.
    outer: object


def before(inputs: PyTree) -> StateBeforeCall | None:
    """Return the state before a call; None if no graph is recorded."""
    # Inside a derivative of torch.func, a checkpoint raises by itself.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or differentiated():
        return None
    nodes = {graph.edge(tensor).node for tensor in _differentiable(inputs)}
    return StateBeforeCall(frames_waiting(), nodes, default_unpack_hook())


def refuse(out: PyTree, snapshot: StateBeforeCall | None) -> None:
    """Raise if the graph of a call's result would be recomputed with other parameters."""
    if snapshot is None:
        return
    frames = frames_waiting()
    if frames <= 0:
        return  # there is no checkpoint anywhere, and no graph to walk
    # One that was made meanwhile is seen wherever its output is. If another one went meanwhile,
    # their number tells nothing, and the graph has to be looked at.
    if frames > snapshot.frames or any(
        _recomputes(node, snapshot.outer)
        for node in graph.nodes_below(_differentiable(out), snapshot.nodes)
    ):
        got = (
            "one with torch.utils.checkpoint: its backward pass would recompute with the "
            "module's own parameters, not the ones of this call"
        )
        fix = (
            "switch it off in the module, and checkpoint the whole call: torch.utils."
            "checkpoint.checkpoint(call, params, buffers, x, use_reentrant=False); in meta.unroll, "
            'memory="recompute" does the same'
        )
        expected = "a module without checkpoints inside"
        raise UnsupportedGraphError(message("module", expected, got, fix))


def _differentiable(tree: PyTree) -> list[Tensor]:
    """Return the tensors of a tree that require grad, without those that a transform wraps."""
    leaves, _ = pytree.flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [tensor for tensor in tensors if not is_transform_tensor(tensor)]


def _recomputes(node: Node, outer: object) -> bool:
    hooks = [one.unpack_hook for one in hooked_tensors(node)]
    return any(hook is not outer and frame_of(hook) is not None for hook in hooks)
