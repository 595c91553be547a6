"""What a call is to do, before it is known on which engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradkit._autograd.passes import PassResult
from gradkit._core.inputs import Losses, Params, read_losses
from gradkit._core.pytree import PyTree


@dataclass(frozen=True, slots=True)
class DistributedCall:
    """The passes of a call, on this rank.

    Attributes:
        call: The public call, for errors.
        losses: The caller's tree.
        module: The caller's tree.
        run: Runs the passes, from the losses and for the params; with further arguments of
            `gradkit._autograd.passes.run_jointly`.
        scalar: Each loss must have exactly one element.
        create_graph: The caller's option.
        check: Refuses further options that do not go with the losses.
    """

    call: str
    losses: PyTree
    module: PyTree
    run: Callable[..., PassResult]
    scalar: bool
    create_graph: bool
    check: Callable[[Losses], object] = lambda _: None

    def target(self) -> Losses:
        """Return the losses, checked."""
        return read_losses(self.losses, scalar=self.scalar)

    def structure(self, target: Losses, wanted: Params) -> tuple[tuple[str, object], ...]:
        """Return what must be the same on all ranks, by name.

        The gradient of a sum does not tell of how many losses it was; those of every loss do.
        """
        shapes = tuple(tuple(loss.shape) for loss in target.leaves)
        losses = (("losses", str(target.spec)), ("the shapes of losses", shapes))
        return (
            ("the call", self.call),
            *(() if self.scalar else losses),
            ("module", str(wanted.spec)),
            ("create_graph", self.create_graph),
        )
