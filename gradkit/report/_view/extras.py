"""What comes from extras, imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def need(name: str) -> Any:
    """Return a module of the extra `gradkit[plot]`.

    Args:
        name: The module.

    Returns:
        The module, imported.

    Raises:
        ImportError: It is not installed; the text names the extra.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{package} is needed for this, and is not installed: pip install gradkit[plot]"
        ) from error


def axes_or_new(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the axes to draw on: the caller's, or those of a new figure of pyplot.

    Args:
        ax: The caller's axes, or None.
        size: Of a new figure, in inches.

    Returns:
        Axes of matplotlib.
    """
    if ax is not None:
        return ax
    figure = need("matplotlib.pyplot").figure(figsize=size, layout="constrained")
    made: Axes = figure.subplots()
    return made
