"""What a call is to do, before it is known on which engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradkit._inputs import Losses, read_losses
from gradkit._passes import Found
from gradkit._pytree import PyTree


@dataclass(frozen=True, slots=True)
class Work:
    """The passes of a call, on this rank.

    Attributes:
        call: The public call, for errors.
        losses: The caller's tree.
        module: The caller's tree.
        run: Runs the passes, from the losses and for the params; with further arguments of
            `gradkit._passes.run_jointly`.
        scalar: Each loss must have exactly one element.
        create_graph: The caller's option.
    """

    call: str
    losses: PyTree
    module: PyTree
    run: Callable[..., Found]
    scalar: bool
    create_graph: bool

    def target(self) -> Losses:
        """Return the losses, checked."""
        return read_losses(self.losses, scalar=self.scalar)
