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
    while frame.f_globals.get("__name__", "").partition(".")[0] in {"gradkit", "torch"}:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level
