"""Warnings that point at the line of the caller's code."""

from __future__ import annotations

import sys
import warnings

from gradkit.errors import GradkitWarning


def warn_fallback(text: str) -> None:
    """Emit a `GradkitWarning` at the line, outside of gradkit and torch, that made the call."""
    warnings.warn(text, GradkitWarning, stacklevel=level_of_the_caller())


def level_of_the_caller() -> int:
    """Return the stack level, seen from the function that warns, of the code that called us."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in {"gradkit", "torch"}
