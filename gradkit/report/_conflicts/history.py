"""`History`: conflicts between losses, recorded over training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from gradkit._core.call import check_option
from gradkit.errors import StructureError, message
from gradkit.report._conflicts.conflicts import MAX_PAIRS, Conflicts, cosine_cell
from gradkit.report._view.charts import draw_history, mean
from gradkit.report._view.rendering import Block, Report, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class History(Report):
    """A record of conflicts over training: add results of `conflicts`, then print or plot it.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> history = gradkit.report.History()
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

    def add_(self, step: int, conflicts: Conflicts) -> None:
        """Add the conflicts of a step of training.

        Args:
            step: The number of the step.
            conflicts: What `gradkit.report.conflicts` returned, always for the same losses.

        Raises:
            StructureError: The losses are not those of the steps before.
        """
        if self.steps and tuple(self.norms) != conflicts.losses:
            expected = f"the losses of the steps before, {', '.join(self.norms)}"
            fix = "use one History for each set of losses"
            raise StructureError(message("conflicts", expected, ", ".join(conflicts.losses), fix))
        self.steps.append(step)
        self.shares.append(conflicts.share)
        for name, norm in conflicts.norms.items():
            self.norms.setdefault(name, []).append(norm)
        for pair in combinations(conflicts.losses, 2):
            self.cosines.setdefault(pair, []).append(conflicts.cosine(*pair))

    def plot(
        self, ax: Axes | None = None, *, what: Literal["cosines", "norms"] = "cosines"
    ) -> Axes:
        """Draw the record over the steps: thin lines as measured, thick lines the mean of five.

        Args:
            ax: Axes of matplotlib; None makes a figure.
            what: The cosines of all pairs, or the norms of all losses.

        Returns:
            The axes. Values that are not finite are left out of the mean.

        Raises:
            OptionError: `what` has no such value.
        """
        check_option("what", what, ("cosines", "norms"))
        by_pair = {" · ".join(pair): values for pair, values in self.cosines.items()}
        return draw_history(self.steps, self.norms if what == "norms" else by_pair, ax, what)

    def _blocks(self) -> Sequence[Block]:
        if not self.steps:
            return ["No steps have been added."]
        last = len(self.steps) - 1
        # The first, the last, and steps between them at growing distances.
        rows = [row for row in range(last + 1) if row & (row - 1) == 0 or row == last]
        steps = [str(self.steps[row]) for row in rows]
        norms = {name: [f"{of[row]:.3g}" for row in rows] for name, of in self.norms.items()}
        # Of many pairs, those with the lowest mean cosine.
        worst = sorted(self.cosines, key=lambda pair: mean(self.cosines[pair]))[:MAX_PAIRS]
        cosines = {
            " · ".join(pair): [cosine_cell(values[row], "good") for row in rows]
            for pair, values in self.cosines.items()
            if pair in worst
        }
        shares = {"conflict": [f"{self.shares[row]:.0%}" for row in rows]}
        left = len(self.cosines) - len(cosines)
        more = [f"{left} more pairs are in .cosines."] if left else []
        return [_table(steps, norms), _table(steps, cosines | shares), *more]


def _table(steps: list[str], columns: dict[str, list[str]]) -> Table:
    return Table(["step", *columns], list(zip(steps, *columns.values(), strict=True)))
