"""Modules of the extra `gradkit[plot]`, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def import_extra(name: str) -> Any:
    """Import a module of the extra `gradkit[plot]`; an ImportError names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{package} is needed for this, and is not installed: pip install gradkit[plot]"
        ) from error


def axes_or_new(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the caller's axes, or those of a new pyplot figure of this size in inches."""
    if ax is not None:
        return ax
    figure = import_extra("matplotlib.pyplot").figure(figsize=size, layout="constrained")
    axes: Axes = figure.subplots()
    return axes
