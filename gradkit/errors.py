"""The errors of gradkit, and how one of their messages is put together.

Every error derives from `GradkitError` and from the builtin that torch would raise in its place,
so code that catches the builtin keeps working. Every refusal comes before the engine has run.
"""

from __future__ import annotations

import torch

__all__ = [
    "CollectiveError",
    "DetachedLossError",
    "FreedGraphError",
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
    """A leaf of a tree is not a tensor that can be differentiated."""


class OptionError(GradkitError, ValueError):
    """An option has no such value; the message lists the values that it takes."""


class StructureError(GradkitError, ValueError):
    """Trees that do not match, or an empty tree."""


class NotScalarLossError(GradkitError, ValueError):
    """A loss has more or less than the one element that is needed."""


class DetachedLossError(GradkitError, RuntimeError):
    """No loss carries a graph."""


class UnreachedParamError(GradkitError, RuntimeError):
    """A parameter that had to be reached is not, or nothing at all is."""


class FreedGraphError(GradkitError, RuntimeError):
    """A second pass through a graph whose saved tensors are gone."""


class UnsupportedGraphError(GradkitError, RuntimeError):
    """A graph, or a module, whose gradients torch would return silently wrong, zero or local."""


class UnsupportedOptimizerError(GradkitError, TypeError):
    """An optimizer, or one of its hyper-parameters, that cannot be differentiated rightly."""


class CollectiveError(GradkitError, RuntimeError):
    """A process of a group did not take part in a collective, or there is no group."""


class GradkitWarning(UserWarning):
    """A fallback that costs time, or a solve that has not converged; never another value unsaid."""


def message(where: str, expected: str, got: str, do: str) -> str:
    """Return the text of an error: where it is, what belongs there, what came, what to do.

    Args:
        where: The path of the leaf, as the caller would write it: `losses['aux']`.
        expected: What belongs there.
        got: What came instead.
        do: The mended call, or the way to it.

    Returns:
        Two lines of text.
    """
    return f"{where}: expected {expected}, got {got}.\n  What to do: {do}"


def describe(value: object) -> str:
    """Return a few words that tell what `value` is, without printing its data.

    Args:
        value: Anything that stood in a tree.

    Returns:
        For a tensor its dtype, shape and device; else its type, with a short value.
    """
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        article = "an" if kind.startswith("int") else "a"
        return f"{article} {kind} tensor of shape {tuple(value.shape)} on {value.device}"
    text = repr(value)
    shown = f" {text}" if len(text) <= 40 else ""
    return f"the {type(value).__name__}{shown}"
