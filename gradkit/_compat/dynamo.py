"""What torch.compile leaves to the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

_dynamo: Any = torch._C._dynamo.eval_frame
_LEAVE = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)
_REASON = (
    "gradkit's eager calls read the graph of losses that exist already. Call them outside of what "
    "is compiled, or leave out fullgraph=True; gradkit.func is compiled in one graph"
)

F = TypeVar("F", bound=Callable[..., Any])


def disable_compile(function: F) -> F:
    """Let a compiled function call this one as it is, and all that it calls.

    torch.compile would take apart its frames one by one, in seconds and for nothing. What
    `torch.compiler.disable` does, but it would import the compiler, and cost each call a wrapper.

    Args:
        function: A function that reads or runs the autograd graph.

    Returns:
        The same function.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    _dynamo.set_code_exec_strategy(_code(function), _LEAVE)
    return function


def _code(function: Any) -> CodeType:
    """Return the code of a function, or of the generator inside a context manager."""
    code: CodeType = getattr(function, "__wrapped__", function).__code__
    return code
