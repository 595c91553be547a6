"""Non-reentrant checkpoints inside of a functional call: found, and refused.

Their recomputation runs in the backward pass, when the module has its own parameters back, and so
gives gradients at those, silently [F3].
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat.transforms import differentiated
from gradkit._core import graph, pytree, saved_tensors
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError, message

_MODULE = torch.utils.checkpoint.__name__
_Frame: type = torch.utils.checkpoint._CheckpointFrame


@dataclass(frozen=True)
class Before:
    """What was there before a call.

    Attributes:
        frames: How many checkpoints were waiting to recompute, and a constant.
        nodes: Where the graphs of what the call is given begin: they are not the call's.
        outer: The unpack hook of what is around: of a checkpoint of the whole call, say, which
            recomputes the call and not the module.
    """

    frames: int
    nodes: set[Node]
    outer: object


def before(inputs: PyTree) -> Before | None:
    """Look at what is there before a call; None if no graph is recorded."""
    # Inside of a derivative of torch.func, a checkpoint raises by itself.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or differentiated():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    nodes = {graph.edge(tensor).node for tensor in _live(inputs)}
    return Before(sys.getrefcount(_Frame), nodes, hooks[1] if hooks else None)


def refuse(out: PyTree, was: Before | None) -> None:
    """Raise if a graph that a call has made would be recomputed with other parameters.

    Args:
        out: What the call returns.
        was: What `before` has seen.

    Raises:
        UnsupportedGraphError: A checkpoint of the call waits to recompute.
    """
    if was is None or not _any_alive():
        return
    # One that was made meanwhile is found wherever its output is. If another one went meanwhile,
    # their number tells nothing, and the graph has to be looked at.
    if sys.getrefcount(_Frame) > was.frames or any(
        _recomputes(node, was.outer) for node in graph.nodes_below(_live(out), was.nodes)
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


def _live(tree: PyTree) -> list[Tensor]:
    """Return the tensors of a tree that have a graph or begin one, but for a transform's own."""
    leaves, _ = pytree.flatten(tree)
    live = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [tensor for tensor in live if not _is_wrapped(tensor)]


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _recomputes(node: Node, outer: object) -> bool:
    for name in saved_tensors.saved_names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            hook: Any = getattr(one, "unpack_hook", None)
            if hook is not outer and getattr(hook, "__module__", None) == _MODULE:
                return True
    return False


def _any_alive() -> bool:
    """Return False only if no checkpoint's frame exists, so that no graph has to be walked.

    CPython counts each instance as a reference to its class, so that a class without instances has
    as many as a copy of it.
    """
    return sys.getrefcount(_Frame) > _references_of_idle_class()


@cache
def _references_of_idle_class() -> int:
    members = {k: v for k, v in vars(_Frame).items() if k not in {"__dict__", "__weakref__"}}
    twin = type(_Frame.__name__, _Frame.__bases__, members)
    return sys.getrefcount(twin)
