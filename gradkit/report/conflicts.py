"""`conflicts`: which losses have gradients that oppose each other; `History`, its record."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.call import check_option
from gradkit._core.leaf_arithmetic import (
    products,
    real_vector,
    refuse_meta,
    symmetrized,
    with_zeros,
)
from gradkit._core.pytree import PyTree
from gradkit._core.tables import Block, Report, Table, listed, plural, styled
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.report.charts import cosine_text, draw_cosines, draw_history, mean
from gradkit.tree._per_loss import PerLossRows, read_per_loss_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_COLUMNS, _MAX_PAIRS = 8, 6
_CLEAR = 0.05  # unrelated gradients of many entries have smaller cosines, of either sign
_COLUMNS_AT_A_TIME = 1 << 18  # entries of each gradient that are cast to float64 at a time


@dataclass(frozen=True, repr=False, eq=False)
class Conflicts(Report):
    """The norms of the gradients of several losses, and the angles between them.

    Attributes:
        losses: The names of K losses.
        params: The names of the params that at least one loss reaches.
        norms: The Euclidean norm of each loss's gradient.
        cosines: `[K, K]`, the cosines of the angles between them, in float64 on the CPU: 0 where
            one of the two is zero, nan where one is not finite.
        conflicting: The pairs whose cosine is negative, the most opposed first: two names and the
            cosine.
        share: Their share of the pairs of losses whose gradients are finite and not zero.
        modules: With `by="module"`, the same for the parameters below each prefix of their names.
    """

    losses: tuple[str, ...]
    params: tuple[str, ...]
    norms: dict[str, float]
    cosines: Tensor
    conflicting: tuple[tuple[str, str, float], ...]
    share: float
    modules: dict[str, Conflicts] = field(default_factory=dict)

    def cosine(self, a: str, b: str) -> float:
        """Return the cosine of the angle between the gradients of two losses."""
        return float(self.cosines[self.losses.index(a), self.losses.index(b)])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the cosines as colours, red for conflicts, on `ax` of matplotlib or a new figure."""
        return draw_cosines(self.norms, self.cosines, ax)

    def _blocks(self) -> Sequence[Block]:
        wrt = f"with respect to {plural(len(self.params), 'param')}"
        names = f": {listed(self.params)}" if self.params else ""
        compared = f"{plural(len(self.losses), 'loss')} compared, {wrt}{names}."
        tables = [self._module_table()] if self.modules else []
        return [compared, self._loss_table(), self._summary(), *tables]

    def _loss_table(self) -> Table:
        # A matrix of many losses cannot be read; the sentence below names the worst pairs.
        across = self.losses if len(self.losses) <= _MAX_COLUMNS else ()
        rows = [
            [name, f"{norm:.4g}", *(_cosine_cell(self.cosine(name, other)) for other in across)]
            for name, norm in self.norms.items()
        ]
        return Table(["loss", "norm", *across], rows)

    def _summary(self) -> str:
        if not self.conflicting:
            return "No pair of losses conflicts."
        pairs = [f"{a} and {b} {cosine_text(cosine)}" for a, b, cosine in self.conflicting[:4]]
        count = len(self.conflicting)
        share = f"{self.share:.0%} of the pairs of nonzero gradients"
        text = f"{plural(count, 'pair')} in conflict, {share}"
        clear = sum(cosine < -_CLEAR for *_, cosine in self.conflicting)
        if clear < count:
            text += f" ({clear or 'none'} below -{_CLEAR})"
        return f"{text}: {', '.join(pairs)}{f', and {count - 4} more' if count > 4 else ''}."

    def _module_table(self) -> Table:
        losses, rows = self.losses[:_MAX_COLUMNS], []
        for name, inside in self.modules.items():
            norms = (f"{inside.norms[loss]:.4g}" for loss in losses)
            pairs = [[f"{a} and {b}", _cosine_cell(cosine)] for a, b, cosine in inside.conflicting]
            worst = pairs[0] if pairs else ["", ""]
            rows.append([name, *norms, f"{inside.share:.0%}", *worst])
        columns = (*(f"norm {loss}" for loss in losses), "conflicts", "most opposed", "cosine")
        return Table(["module", *columns], rows)


def _cosine_cell(cosine: float, style: str = "") -> str:
    return styled(cosine_text(cosine), "red" if cosine < 0 else style)


def conflicts(
    per_loss: PyTree, *, losses: PyTree = None, by: Literal["module"] | None = None
) -> Conflicts:
    """Return the norms of several losses' gradients, and the angles between them.

    Two losses conflict where the cosine is negative: a step along one gradient increases the other
    loss. None is an exact zero. Printed, the result also says how many cosines are below -0.05: in
    many dimensions, unrelated gradients have a cosine close to zero of either sign.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> losses = {"up": w.sum(), "down": -w[0], "aside": w[0] - w[1]}
        >>> result = gradkit.report.conflicts(gradkit.per_loss_grads(losses, {"w": w}))
        >>> [(a, b, round(cosine, 2)) for a, b, cosine in result.conflicting]
        [('up', 'down', -0.71), ('down', 'aside', -0.71)]
        >>> result.norms["down"], round(result.share, 2)
        (1.0, 0.67)

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure; what
            `gradkit.per_loss_grads` returns.
        losses: A tree with the structure of the losses, where it is deeper; the losses themselves
            where one is no scalar; each of its elements is a row then: `name[0]`, `name[1]`, ...
        by: `"module"`: also measure the parameters below each prefix of their names: `encoder`,
            `encoder.0`. The products of a pair are added up in float64.

    Returns:
        Norms, cosines and conflicting pairs.

    Raises:
        LeafTypeError: A gradient is no tensor, or a loss.
        OptionError: `by` has no such value.
        StructureError: There are no losses, their gradients do not match, or `per_loss` is the
            gradient of one call of `value_and_grads`, as the names of its parameters show.

    Source:
        Conflicting gradients: Yu et al. 2020, "Gradient Surgery for Multi-Task Learning",
        definition 1, https://arxiv.org/abs/2001.06782
    """
    check_option("by", by, (None, "module"))
    rows = read_per_loss_rows(per_loss, losses)
    refuse_meta([x for row in rows.rows for x in row], lambda _: "per_loss")
    _refuse_losses(rows)
    names = _names(per_loss, losses)
    _, spec = pytree.flatten(rows.unflatten(rows.rows[0]))
    labels = pytree.labels(spec, "param")
    params = {labels[leaf]: leaf for leaf in rows.examples()}
    groups: dict[str, list[int]] = {}  # the leaves that are directly in each module
    modules: dict[str, None] = {}
    for label, leaf in params.items():
        parts = label.split(".")[:-1] if by else []
        modules |= dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts)))
        groups.setdefault(".".join(parts), []).append(leaf)
    blocks = [_products([[row[leaf] for leaf in g] for row in rows.rows]) for g in groups.values()]
    if not blocks:
        blocks = [torch.zeros(len(names), len(names), dtype=torch.float64)]
    host = torch.stack([block.to(blocks[0]) for block in blocks]).cpu()
    measured = {"": _norms_and_cosines(host.sum(0))}  # the numbers of all, and of each module
    for module in modules:
        below = [block for g, block in zip(groups, host, strict=True) if _is_in(f"{g}.", module)]
        measured[module] = _norms_and_cosines(torch.stack(below).sum(0))
    numbers = torch.stack(list(measured.values())).tolist()
    total, *of_modules = (
        _describe(names, tuple(p for p in params if _is_in(p, module)), result[:, 1:], row)
        for (module, result), row in zip(measured.items(), numbers, strict=True)
    )
    return replace(total, modules=dict(zip(modules, of_modules, strict=True)))


def _is_in(param: str, module: str) -> bool:
    return not module or param.startswith(f"{module}.")


def _refuse_losses(rows: PerLossRows) -> None:
    """Raise if these are the losses themselves: numbers, each with a graph."""
    leaves = [leaf for row in rows.rows for leaf in row]
    if len(leaves) == len(rows.rows) and all(
        leaf is not None and leaf.dim() == 0 and leaf.requires_grad for leaf in leaves
    ):
        expected, got = "the gradients of several losses", "losses: numbers that carry a graph"
        fix = "conflicts(gradkit.per_loss_grads(losses, params)); detach() what are gradients"
        raise LeafTypeError(message("per_loss", expected, got, fix))


def _names(per_loss: PyTree, losses: PyTree) -> tuple[str, ...]:
    """Return a name for every row."""
    if losses is None:
        return tuple(pytree.labels(pytree.top_level(per_loss), "loss"))
    given, spec = pytree.flatten(losses)
    names: list[str] = []
    for name, loss in zip(pytree.labels(spec, "loss"), given, strict=True):
        sizes = loss.shape if isinstance(loss, Tensor) else ()
        indices = product(*map(range, sizes))
        names += [f"{name}{list(index)}" if index else name for index in indices]
    return tuple(names)


def _describe(
    losses: tuple[str, ...], params: tuple[str, ...], cosines: Tensor, numbers: list[list[float]]
) -> Conflicts:
    norms = [row[0] for row in numbers]
    has_angle = [index for index, norm in enumerate(norms) if 0 < norm < math.inf]
    pairs = [(numbers[i][1 + j], i, j) for i, j in combinations(has_angle, 2)]
    worst = sorted(pair for pair in pairs if pair[0] < 0)
    return Conflicts(
        losses=losses,
        params=params,
        norms=dict(zip(losses, norms, strict=True)),
        cosines=cosines,
        conflicting=tuple((losses[a], losses[b], cosine) for cosine, a, b in worst),
        share=len(worst) / max(1, len(pairs)),
    )


@torch.no_grad()
def _products(rows: list[list[Tensor | None]]) -> Tensor:
    """Return the inner products of rows of leaves, `[K, K]`, in float64."""
    device = next(x.device for row in rows for x in row if x is not None)
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=device)
    for column in zip(*rows, strict=True):
        vectors = {row: real_vector(x) for row, x in enumerate(column) if x is not None}
        split = (torch.split(vector, _COLUMNS_AT_A_TIME) for vector in vectors.values())
        for parts in zip(*split, strict=True):
            product = products([part.to(total) for part in parts])
            total = total + with_zeros(product, list(vectors), len(rows))
    return symmetrized(total)


def _norms_and_cosines(product: Tensor) -> Tensor:
    """Return norms and cosines, `[K, 1 + K]`, of rows with these inner products."""
    norms = product.diagonal().sqrt()
    is_zero = norms == 0
    divisors = torch.where(is_zero, 1.0, norms)
    cosines = (product / (divisors[:, None] * divisors[None, :])).clamp(-1, 1)
    cosines.diagonal().copy_(torch.where(divisors.isfinite(), 1.0, math.nan))
    cosines = cosines.masked_fill(is_zero[:, None] | is_zero[None, :], 0.0)
    return torch.cat([norms[:, None], cosines], 1)


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
            LeafTypeError: `conflicts` is something else.
            StructureError: The losses are not those of the steps before.
        """
        given: object = conflicts
        if not isinstance(given, Conflicts):
            fix = "history.add_(step, gradkit.report.conflicts(per_loss))"
            what = describe(given)
            raise LeafTypeError(message("conflicts", "what report.conflicts returns", what, fix))
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

    def to_dict(self) -> dict[str, list[float]]:
        """Return the record as columns: one number a step.

        Returns:
            `step`, `share`, `norm/LOSS` of each loss and `cosine/LOSS/OTHER` of each pair.
        """
        norms = {f"norm/{name}": list(values) for name, values in self.norms.items()}
        cosines = {f"cosine/{a}/{b}": list(values) for (a, b), values in self.cosines.items()}
        return {"step": list(self.steps), "share": list(self.shares), **norms, **cosines}

    def to_csv(self, path: str | Path) -> None:
        """Write the columns of `to_dict` to a file, with a row of their names: RFC 4180.

        Args:
            path: The file, which is written anew, in UTF-8.
        """
        columns = self.to_dict()
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])

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
        # The pairs with the lowest mean cosine are shown, if there are many.
        worst = sorted(self.cosines, key=lambda pair: mean(self.cosines[pair]))[:_MAX_PAIRS]
        cosines = {
            " · ".join(pair): [_cosine_cell(values[row], "green") for row in rows]
            for pair, values in self.cosines.items()
            if pair in worst
        }
        shares = {"conflict": [f"{self.shares[row]:.0%}" for row in rows]}
        tables = [
            Table(["step", *columns], list(zip(steps, *columns.values(), strict=True)))
            for columns in (norms, cosines | shares)
        ]
        left = len(self.cosines) - len(cosines)
        return [*tables, f"{left} more pairs are in .cosines."] if left else tables
