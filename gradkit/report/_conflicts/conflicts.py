"""`conflicts`: which losses have gradients that oppose each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.call import check_option
from gradkit._core.leaf_arithmetic import largest
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, message
from gradkit.report._view.charts import cosine_text, draw_cosines
from gradkit.report._view.rendering import Block, Report, Styled, Table, listed, plural, prefixes
from gradkit.tree._per_loss import PerLossRows, gram, read_per_loss_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Rows: TypeAlias = list[list[Tensor | None]]  # of each loss, the gradients of some leaves

_MAX_COLUMNS, MAX_PAIRS = 8, 6
_CLEAR = 0.05  # in many dimensions, gradients that have nothing in common are less opposed
_SMALL, _LARGE = 1e-12, 1e12  # squares of float32 between these, and sums, are far from its limits
_LOWEST = -149  # below this power of two float32 has only zero
_NOTHING = -2200.0  # the power of two of a row of zeros: below every other, so it decides nothing


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
        tables = [self._module_table()] if self.modules else []
        return [self._compared(), self._loss_table(), self._summary(), *tables]

    def _compared(self) -> str:
        wrt = f"with respect to {plural(len(self.params), 'param')}"
        text = f"{plural(len(self.losses), 'loss')} compared, {wrt}"
        return f"{text}: {listed(self.params)}." if self.params else f"{text}."

    def _loss_table(self) -> Table:
        # A matrix of many losses cannot be read; the sentence below names the worst pairs.
        across = self.losses if len(self.losses) <= _MAX_COLUMNS else ()
        rows = []
        for name in self.losses:
            cells = (cosine_cell(self.cosine(name, other)) for other in across)
            rows.append([name, f"{self.norms[name]:.4g}", *cells])
        return Table(["loss", "norm", *across], rows)

    def _summary(self) -> str:
        if not self.conflicting:
            return "No pair of losses conflicts."
        pairs = [f"{a} and {b} {cosine_text(cosine)}" for a, b, cosine in self.conflicting[:4]]
        count = len(self.conflicting)
        text = f"{plural(count, 'pair')} in conflict, {self.share:.0%} of those that have an angle"
        clear = sum(cosine < -_CLEAR for *_, cosine in self.conflicting)
        if clear < count:
            text += f" ({clear or 'none'} below -{_CLEAR})"
        return f"{text}: {', '.join(pairs)}{f', and {count - 4} more' if count > 4 else ''}."

    def _module_table(self) -> Table:
        losses, rows = self.losses[:_MAX_COLUMNS], []
        for name, inside in self.modules.items():
            norms = [f"{inside.norms[loss]:.4g}" for loss in losses]
            worst = ["", ""]
            if inside.conflicting:
                a, b, cosine = inside.conflicting[0]
                worst = [f"{a} and {b}", cosine_cell(cosine)]
            rows.append([name, *norms, f"{inside.share:.0%}", *worst])
        norms_of = [f"norm {loss}" for loss in losses]
        return Table(["module", *norms_of, "conflicts", "most opposed", "cosine"], rows)


def cosine_cell(cosine: float, style: str = "") -> str:
    return Styled(cosine_text(cosine), "bad" if cosine < 0 else style)


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
    _refuse_losses(rows)
    names = _names(per_loss, losses)
    leaves = [leaf for leaf in rows.leaves if rows.example(leaf) is not None]
    _, spec = pytree.flatten(rows.unflatten(rows.rows[0]))
    labels = pytree.labels(spec, "param")
    groups = _by_module(labels, leaves) if by else {"": leaves}
    parts = {
        module: [[row[leaf] for leaf in group] for row in rows.rows]
        for module, group in groups.items()
    }
    cosines, numbers = _measure(parts, [[0] * len(names) for _ in parts])
    powers = [[_power(top) for *_, top in rows] for rows in numbers]
    if any(map(any, powers)):  # seldom: to ask before would be to wait for the device twice
        cosines, numbers = _measure(parts, powers)
    *of_modules, total = map(partial(_describe, names), cosines, numbers)
    params = tuple(labels[leaf] for leaf in leaves)
    modules = {
        name: replace(inside, params=tuple(p for p in params if p.startswith(f"{name}.")))
        for name, inside in zip(filter(None, parts), of_modules, strict=True)
    }
    return replace(total, params=params, modules=modules)


def _refuse_losses(rows: PerLossRows) -> None:
    """Raise for losses in the place of their gradients: numbers, each with a graph."""
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


def _by_module(names: Sequence[str], leaves: Sequence[int]) -> dict[str, list[int]]:
    """Return the leaves that are directly in each module, and at the end those in none."""
    modules = dict.fromkeys(prefix for leaf in leaves for prefix in prefixes(names[leaf]))
    groups: dict[str, list[int]] = {prefix: [] for prefix in (*modules, "")}
    for leaf in leaves:
        groups[names[leaf].rpartition(".")[0]].append(leaf)
    return groups


def _measure(
    parts: dict[str, _Rows], powers: list[list[int]]
) -> tuple[list[Tensor], list[list[list[float]]]]:
    """Return the cosines of each module and of all, and of each row: norm, cosines, largest."""
    blocks = _to_host(
        [_block(*part) for part in zip(parts.values(), powers, strict=True)], len(powers[0])
    )
    products = {
        name: _Products.of_block(block, of_rows)
        for name, block, of_rows in zip(parts, blocks, powers, strict=True)
    }
    modules = [
        [part for name, part in products.items() if f"{name}.".startswith(f"{module}.")]
        for module in filter(None, parts)
    ]
    totals = [_Products.total(below) for below in (*modules, list(products.values()))]
    cosines = [total.cosines() for total in totals]
    norms = [total.norms()[:, None] for total in totals]
    # There are as many totals as parts: the last are that of all, and that in no module.
    numbers = torch.cat([torch.stack(norms), torch.stack(cosines), blocks[..., :1]], 2)
    return cosines, numbers.tolist()


def _describe(names: tuple[str, ...], cosines: Tensor, numbers: list[list[float]]) -> Conflicts:
    norms = [row[0] for row in numbers]
    has_angle = [index for index, norm in enumerate(norms) if 0 < norm < math.inf]
    pairs = [(numbers[i][1 + j], i, j) for i, j in combinations(has_angle, 2)]
    worst = sorted(pair for pair in pairs if pair[0] < 0)
    return Conflicts(
        losses=names,
        params=(),
        norms=dict(zip(names, norms, strict=True)),
        cosines=cosines,
        conflicting=tuple((names[a], names[b], cosine) for cosine, a, b in worst),
        share=len(worst) / max(1, len(pairs)),
    )


@dataclass(frozen=True)
class _Products:
    """`matrix[i, j] * 2**(powers[i] + powers[j])`, of K rows: no square over- or underflows."""

    matrix: Tensor
    powers: Tensor

    @staticmethod
    def of_block(block: Tensor, powers: list[int]) -> _Products:
        """Return the products of rows, from what `_block` returns of them."""
        shown = (
            torch.tensor(powers, dtype=block.dtype) if any(powers) else block.new_zeros(len(block))
        )
        return _Products(block[:, 1:], shown.masked_fill(block[:, 0] == 0, _NOTHING))

    @staticmethod
    def total(parts: Sequence[_Products]) -> _Products:
        """Return the products of rows that consist of parts."""
        powers = torch.stack([part.powers for part in parts]).amax(0)
        matrix = torch.zeros_like(parts[0].matrix)
        for part in parts:
            scale = torch.exp2(part.powers - powers)
            matrix = matrix + part.matrix * scale[:, None] * scale[None, :]
        return _Products(matrix, powers)

    def norms(self) -> Tensor:
        """Return the norm of every row: `[K]`."""
        return self.matrix.diagonal().sqrt() * torch.exp2(self.powers)

    def cosines(self) -> Tensor:
        """Return the cosines between rows: `[K, K]`, 0 where one is zero, nan if not finite."""
        lengths = self.matrix.diagonal().sqrt()
        is_zero = lengths == 0
        lengths = torch.where(is_zero, 1.0, lengths)
        cosines = (self.matrix / (lengths[:, None] * lengths[None, :])).clamp(-1, 1)
        ones = torch.where(lengths.isfinite(), 1.0, cosines.diagonal())
        cosines.diagonal().copy_(ones)
        return cosines.masked_fill(is_zero[:, None] | is_zero[None, :], 0.0)


@torch.no_grad()
def _block(rows: _Rows, powers: list[int]) -> Tensor | None:
    """Return the largest entry of each row, and their products: `[K, 1 + K]`; None of no leaves."""
    if not rows[0]:
        return None
    scaled = [
        [None if leaf is None else _divided(leaf, power) for leaf in row] if power else row
        for row, power in zip(rows, powers, strict=True)
    ]
    matrix = gram(scaled).double()
    tops = [
        largest(row).to(matrix) if any(x is not None for x in row) else matrix.new_zeros(())
        for row in rows
    ]
    return torch.cat([torch.stack(tops)[:, None], matrix], 1)


def _to_host(blocks: list[Tensor | None], count: int) -> Tensor:
    """Return the blocks in one tensor on the CPU, by one copy; zeros for None."""
    present = [block for block in blocks if block is not None]
    if not present:
        return torch.zeros(len(blocks), count, 1 + count, dtype=torch.float64)
    zeros = torch.zeros_like(present[0])
    return torch.stack([zeros if x is None else x.to(zeros.device) for x in blocks]).cpu()


def _power(top: float) -> int:
    """Return the power of two to take out of a row, of which 0 is none."""
    is_kept = top == 0 or _SMALL <= top <= _LARGE or not top < math.inf
    return 0 if is_kept else math.frexp(top)[1]


def _divided(leaf: Tensor, power: int) -> Tensor:
    """Divide by a power of two, in two steps that the range of the dtype allows."""
    if power < _LOWEST and leaf.dtype not in (torch.float64, torch.complex128):
        return leaf  # zeros, next to what only float64 can hold
    half = power // 2
    return leaf * 2.0**-half * 2.0 ** (half - power)
