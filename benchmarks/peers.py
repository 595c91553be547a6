"""Libraries to be held against: they may not be there, not run, or come to something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

Made = TypeVar("Made")


def found(
    make: Callable[[], Made], agrees: Callable[[], bool] = lambda: True
) -> tuple[Made | None, str]:
    """Return what a peer makes, and nothing; or None, and why.

    Args:
        make: Makes it.
        agrees: Whether it comes to the same as the others.

    Returns:
        What was made, or None; the reason for None.
    """
    try:
        return (make(), "") if agrees() else (None, "it gives other gradients")
    except ImportError as error:
        return None, f"{error.name or error} is not installed (make bench installs it)"
    except Exception as error:  # whatever a peer fails with is what its row says
        return None, f"{type(error).__name__}: {error}"


def close(ours: Iterable[Tensor], theirs: Iterable[Tensor], rtol: float = 1e-9) -> bool:
    """Return whether tensors are equal to rounding, held against the largest element of each."""
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= rtol * b.abs().max())
        for a, b in zip(ours, theirs, strict=True)
    )
