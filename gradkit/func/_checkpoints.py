"""Non-reentrant checkpoints inside of a functional call: found, and refused.

Their recomputation runs in the backward pass, when the module has its own parameters back, and so
gives gradients at those, silently [F3].
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import Node

from gradkit import _graph, _pytree
from gradkit._pytree import PyTree
from gradkit.errors import UnsupportedGraphError, message

_MODULE = torch.utils.checkpoint.__name__
_Frame: type = torch.utils.checkpoint._CheckpointFrame


def around() -> object:
    """Return the unpack hook of what is around a call: of a checkpoint of the whole call, say."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[1] if hooks else None


def refuse(out: PyTree, inputs: PyTree, outer: object) -> None:
    """Raise if a graph that a call has made would be recomputed with other parameters.

    Args:
        out: What the call returns.
        inputs: What it was given: their graphs are not the call's.
        outer: What `around` returned before the call. That recomputes the call as a whole.

    Raises:
        UnsupportedGraphError: There is a checkpoint between the two.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _any_alive():
        return
    above = {_graph.edge(tensor).node for tensor in _with_graph(inputs)}
    for node in _between([_graph.edge(tensor).node for tensor in _with_graph(out)], above):
        if _recomputes(node, outer):
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


def _with_graph(tree: PyTree) -> list[Tensor]:
    return [x for x in _pytree.flatten(tree)[0] if isinstance(x, Tensor) and x.requires_grad]


def _between(starts: Iterable[Node], stop: set[Node]) -> set[Node]:
    seen = set(starts) - stop
    stack = list(seen)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen and node not in stop:
                seen.add(node)
                stack.append(node)
    return seen


def _recomputes(node: Node, outer: object) -> bool:
    for name in _graph.saved_names(type(node)):
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
