"""A record of conflicts over training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from gradkit._inputs import check_option
from gradkit.errors import StructureError, message
from gradkit.report._charts import draw_history
from gradkit.report._conflicts import Conflicts
from gradkit.report._page import Block, Report, Table, Toned

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class History(Report):
    """A record of conflicts over training: add what `conflicts` finds, then print or plot it.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> history = gradkit.report.conflicts.History()
        >>> for step in range(3):
        ...     per_loss = gradkit.per_loss_grads({"up": step * w[0] + w[1], "down": -w[1]}, [w])
        ...     history.add_(step, gradkit.report.conflicts(per_loss))
        >>> history.steps, [round(c, 2) for c in history.cosines["up", "down"]]
        ([0, 1, 2], [-1.0, -0.71, -0.45])

    Attributes:
        steps: The steps, in the order in which they were added.
        norms: For each loss the norms of its gradient, one a step.
        cosines: For each pair of losses the cosines, one a step.
        shares: The shares of conflicting pairs, one a step.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.norms: dict[str, list[float]] = {}
        self.cosines: dict[tuple[str, str], list[float]] = {}
        self.shares: list[float] = []

    def add_(self, step: int, found: Conflicts) -> None:
        """Add what was found at a step of training.

        Args:
            step: The number of the step.
            found: What `conflicts` returned, always of the same losses.

        Raises:
            StructureError: The losses are others than before.
        """
        if not self.steps:
            self.norms = {name: [] for name in found.losses}
            self.cosines = {pair: [] for pair in combinations(found.losses, 2)}
        if tuple(self.norms) != found.losses:
            raise StructureError(
                message(
                    "found",
                    f"the losses of the steps before, {', '.join(self.norms)}",
                    ", ".join(found.losses),
                    "keep a History for each set of losses",
                )
            )
        self.steps.append(step)
        self.shares.append(found.share)
        for name, norms in self.norms.items():
            norms.append(found.norms[name])
        for (a, b), cosines in self.cosines.items():
            cosines.append(found.cosine(a, b))

    def plot(
        self, ax: Axes | None = None, *, what: Literal["cosines", "norms"] = "cosines"
    ) -> Axes:
        """Draw the record over the steps: thin lines as measured, thick ones a mean of five.

        Args:
            ax: Axes of matplotlib; None makes a figure.
            what: The cosines of all pairs, or the norms of all losses.

        Returns:
            The axes.

        Raises:
            StructureError: `what` has no such value.
        """
        check_option("what", what, ("cosines", "norms"))
        by_pair = {" · ".join(pair): values for pair, values in self.cosines.items()}
        return draw_history(self.steps, self.norms if what == "norms" else by_pair, ax, what)

    def _blocks(self) -> Sequence[Block]:
        if not self.steps:
            return ["No steps have been added."]
        last = len(self.steps) - 1
        # The first, the last, and between them ever more apart.
        rows = [row for row in range(last + 1) if row & (row - 1) == 0 or row == last]
        columns = ("step", *(f"norm {name}" for name in self.norms))
        pairs = [f"{a} · {b}" for a, b in self.cosines]
        return [Table((*columns, *pairs, "conflict"), tuple(map(self._row, rows)))]

    def _row(self, row: int) -> tuple[str, ...]:
        cosines = (values[row] for values in self.cosines.values())
        return (
            str(self.steps[row]),
            *(f"{values[row]:.3f}" for values in self.norms.values()),
            *(Toned(f"{cosine:+.2f}", "bad" if cosine < 0 else "good") for cosine in cosines),
            f"{self.shares[row]:.0%}",
        )
