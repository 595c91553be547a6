"""What a checkpoint of torch.utils.checkpoint that waits to recompute will run.

Run on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Checkpointed(NamedTuple):
    """A checkpoint, and the call that it runs again."""

    frame: object
    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def checkpointed(unpack_hook: Any) -> Checkpointed | None:
    """Return the checkpoint that a hook of saved tensors belongs to; None if it cannot be seen."""
    try:
        frame: Any = _variable(unpack_hook, "frame")
        run = frame.recompute_fn
        return Checkpointed(
            frame, _variable(run, "fn"), frame.get_inputs(), _variable(run, "kwargs")
        )
    except (AttributeError, TypeError, ValueError):
        return None  # a torch that keeps them elsewhere


def _variable(function: Any, name: str) -> Any:
    """Return the value of a variable that a function has from the one around it."""
    index = function.__code__.co_freevars.index(name)
    return function.__closure__[index].cell_contents
