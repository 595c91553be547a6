"""The errors of gradkit, and the form of their messages.

Every error derives from `GradkitError` and from the builtin that torch would raise in its place, so
code that catches the builtin keeps working. What the arguments and the graph show is raised before
the engine runs; what only the gradients show, by the pass that makes them, or right after it. A
call that raises leaves every `.grad` as it was.
"""

from __future__ import annotations

import re
import sys
import warnings

import torch

__all__ = [
    "CollectiveError",
    "DetachedLossError",
    "FreedGraphError",
    "GradientCheckError",
    "GradkitError",
    "GradkitWarning",
    "LeafTypeError",
    "NotScalarLossError",
    "OptionError",
    "StructureError",
    "UnreachedParamError",
    "UnsupportedGraphError",
    "UnsupportedOptimizerError",
]


class GradkitError(Exception):
    """The base of all errors that gradkit raises on purpose."""


class LeafTypeError(GradkitError, TypeError):
    """A leaf of a tree is not a tensor that has a gradient."""


class OptionError(GradkitError, ValueError):
    """An option has a value that it does not take; the message says which values it takes."""


class StructureError(GradkitError, ValueError):
    """Trees do not match, a tree is empty, or a leaf has another shape, device or dtype."""


class NotScalarLossError(GradkitError, ValueError):
    """A loss does not have exactly one element."""


class DetachedLossError(GradkitError, RuntimeError):
    """No loss carries a graph."""


class UnreachedParamError(GradkitError, RuntimeError):
    """No loss reaches a parameter that has to be reached, or any parameter at all."""


class FreedGraphError(GradkitError, RuntimeError):
    """A second pass through a graph whose saved tensors have been freed."""


class UnsupportedGraphError(GradkitError, RuntimeError):
    """The gradients of this graph or module would be silently wrong, zero or local."""


class UnsupportedOptimizerError(GradkitError, TypeError):
    """An optimizer, or one of its hyperparameters, cannot be used or differentiated here."""


class CollectiveError(GradkitError, RuntimeError):
    """A rank of a process group has not taken part in a collective, or there is no group."""


class GradientCheckError(GradkitError, AssertionError):
    """A derivative that torch computes is not that of the function.

    Attributes:
        leaf: The path of the input at which it is wrong, or `args`.
        order: 1 for a gradient, 2 for its derivative, and so on.
        mode: `"reverse"`, `"forward"`, or a succession: `"forward-over-reverse"`.
        difference: By how much it is wrong, along a random direction.
        operation: Where to look: the only custom Function above the leaf, or operation on it.
    """

    def __init__(
        self,
        text: str,
        leaf: str = "args",
        order: int = 1,
        mode: str = "reverse",
        difference: float = 0.0,
        operation: str | None = None,
    ) -> None:
        super().__init__(text)
        self.leaf, self.order, self.mode = leaf, order, mode
        self.difference, self.operation = difference, operation


class _NotInstalledError(GradkitError, ImportError):
    """A package that belongs to gradkit, and is installed by itself, is not installed."""


class GradkitWarning(UserWarning):
    """A fallback that costs time, a solve that has not converged, or a mistake in your code."""


def message(where: str, expected: str, got: str, do: str) -> str:
    """Return an error's text: the path of the leaf, what was expected, what came, what to do."""
    return f"{where}: expected {expected}, got {got}.\n  What to do: {do}"


def not_installed(tool: str) -> GradkitError:
    """Return the error that says how to get a package of `tools/`."""
    fix = f"pip install ./tools/{tool} in a checkout of gradkit"
    return _NotInstalledError(f"gradkit-{tool} is not installed: {fix}")


def describe(value: object) -> str:
    """Return a short description of a value, without the data of a tensor."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_nested and value.layout == torch.strided:  # such a tensor has no shape
            return f"a nested {kind} tensor on {value.device}"
        return f"{with_article(kind)} tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return with_article(type(value).__name__)
    # torch.compile does not trace the repr of a dataclass.
    text = "" if hasattr(type(value), "__dataclass_fields__") else repr(value)
    shown = f" {text}" if 0 < len(text) <= 40 else ""
    return f"the {type(value).__name__}{shown}"


def with_article(name: str) -> str:
    """Return a name behind its article, as it is said: a Linear, an SGD, an int64."""
    is_vowel = re.match(r"[AEIOaeio]|U[a-z]|[FHLMNRSX]([A-Z\d]|$)", name)
    return f"{'an' if is_vowel else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, without all of torch's backends behind it."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return line if len(line) <= 300 else f"{line[:300]}..."


def warn_fallback(text: str) -> None:
    """Emit a `GradkitWarning` at the line, outside of gradkit and torch, that made the call."""
    warnings.warn(text, GradkitWarning, stacklevel=level_of_the_caller())


_NOT_THE_CALLER = {"gradkit", "gradkit_parity", "torch", "contextlib"}  # the last ends our blocks


def level_of_the_caller() -> int:
    """Return the stack level, seen from the function that warns, of the code that called us."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLER:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level
