"""Non-reentrant checkpoints inside a functional call, which raise.

Their recomputation runs in the backward pass, when the module has its own parameters back, and so
gives gradients at those, silently [F3].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat import functorch
from gradkit._compat.transforms import differentiated
from gradkit._core import graph, pytree, saved_tensors
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError, message


@dataclass(frozen=True)
class Snapshot:
    """The state before a call.

    Attributes:
        frames: How many checkpoints wait to recompute, plus a constant.
        nodes: The first nodes of the graphs of the call's inputs, which are not the call's.
        outer: The unpack hook around the call: that of a checkpoint of the whole call, say, which
            recomputes the call and not the module.
    """

    frames: int
    nodes: set[Node]
    outer: object


def before(inputs: PyTree) -> Snapshot | None:
    """Return the state before a call; None if no graph is recorded."""
    # Inside a derivative of torch.func, a checkpoint raises by itself.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or differentiated():
        return None
    nodes = {graph.edge(tensor).node for tensor in _differentiable(inputs)}
    return Snapshot(
        sys.getrefcount(functorch.checkpoint_frame()), nodes, functorch.default_unpack_hook()
    )


def refuse(out: PyTree, snapshot: Snapshot | None) -> None:
    """Raise if the graph of a call's result would be recomputed with other parameters."""
    if snapshot is None or not _any_alive():
        return
    # One that was made meanwhile is found wherever its output is. If another one went meanwhile,
    # their number tells nothing, and the graph has to be looked at.
    if sys.getrefcount(functorch.checkpoint_frame()) > snapshot.frames or any(
        _recomputes(node, snapshot.outer)
        for node in graph.nodes_below(_differentiable(out), snapshot.nodes)
    ):
        raise UnsupportedGraphError(
            message(
                "module",
                "a module without checkpoints inside",
                "one with torch.utils.checkpoint: its backward pass would recompute with the "
                "module's own parameters, not the ones of this call",
                "switch it off in the module, and checkpoint the whole call: torch.utils."
                "checkpoint.checkpoint(call, params, buffers, x, use_reentrant=False)",
            )
        )


def _differentiable(tree: PyTree) -> list[Tensor]:
    """Return the tensors of a tree that require grad, without those that a transform wraps."""
    leaves, _ = pytree.flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [tensor for tensor in tensors if not functorch.is_transform_tensor(tensor)]


def _recomputes(node: Node, outer: object) -> bool:
    hooks = (getattr(saved, "unpack_hook", None) for saved in _saved(node))
    module = functorch.checkpoint_frame().__module__
    return any(h is not outer and getattr(h, "__module__", None) == module for h in hooks)


def _saved(node: Node) -> Iterator[Any]:
    for name in saved_tensors.saved_names(type(node)):
        saved = getattr(node, name)
        yield from saved if isinstance(saved, tuple | list) else (saved,)


def _any_alive() -> bool:
    """Return False only if no checkpoint's frame exists, so that no graph has to be walked."""
    # CPython counts each instance as a reference to its class, so that a class without instances
    # has as many as a copy of it.
    return sys.getrefcount(functorch.checkpoint_frame()) > _references_of_idle_class()


@cache
def _references_of_idle_class() -> int:
    frame = functorch.checkpoint_frame()
    members = {k: v for k, v in vars(frame).items() if k not in {"__dict__", "__weakref__"}}
    twin = type(frame.__name__, frame.__bases__, members)
    return sys.getrefcount(twin)
