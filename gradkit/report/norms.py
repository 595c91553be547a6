"""`norms`: how large the gradients of each parameter or module are, for a table or a logger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ReduceOp

from gradkit._compat.distributed import is_dtensor, local_part, sharding, whole_sums
from gradkit._core import pytree
from gradkit._core.leaf_arithmetic import norms_of_rows, refuse_meta, stored_values, to_common_dtype
from gradkit._core.params import DIFFERENTIABLE
from gradkit._core.pytree import PyTree
from gradkit._core.tables import Block, Report, Table, plural, styled
from gradkit.errors import LeafTypeError, OptionError, StructureError, describe, message
from gradkit.tree._arithmetic import aligned_leaves

_Numbers: TypeAlias = tuple[float, ...]


class GradStats(NamedTuple):
    """The Euclidean norm, the largest magnitude (inf for NaN) and how many entries are inf or NaN.

    `ratio` is the norm divided by that of the parameters; None where they were not passed.
    """

    norm: float
    max_abs: float
    nonfinite: int
    ratio: float | None


@dataclass(frozen=True, repr=False, eq=False)
class Norms(Report):
    """How large gradients are.

    Attributes:
        total: The statistics of all gradients together.
        rows: Those of each parameter or module, by name; None where no gradient has arrived.
    """

    total: GradStats
    rows: dict[str, GradStats | None]

    def to_dict(self, prefix: str = "grad") -> dict[str, float]:
        """Return numbers for a logger: `grad/norm` of all, `grad/norm/encoder.weight` of a row.

        Likewise `max_abs`, `nonfinite`, and `ratio` if there are params. Rows of None are left out.
        """
        stats = {"": self.total} | {f"/{name}": row for name, row in self.rows.items() if row}
        return {
            f"{prefix}/{field}{name}": float(number)
            for name, row in stats.items()
            for field, number in row._asdict().items()
            if number is not None
        }

    def _blocks(self) -> Sequence[Block]:
        missing, nonfinite = list(self.rows.values()).count(None), self.total.nonfinite
        text = f"{plural(len(self.rows), 'row')}, norm {self.total.norm:.4g}"
        text += f"; {missing} without a gradient" if missing else ""
        text += f"; not finite: {plural(nonfinite, 'number')}" if nonfinite else ""
        shown = 4 if self.total.ratio is not None else 3
        rows = [[name, *_cells(row)[:shown]] for name, row in self.rows.items()]
        columns = ("norm", "max abs", "not finite", "norm / param")
        return [f"{text}.", Table(["gradient", *columns[:shown]], rows)]


def _cells(row: GradStats | None) -> list[str]:
    if row is None:
        return ["none", "", "", ""]
    counted = styled(f"{row.nonfinite:,}", "red" if row.nonfinite else "")
    return [f"{row.norm:.4g}", f"{row.max_abs:.4g}", counted, f"{row.ratio or 0:.2e}"]


def norms(
    grads: PyTree,
    *,
    params: PyTree = None,
    scaler: GradScaler | None = None,
    depth: int | None = None,
) -> Norms:
    """Return the norm, the largest magnitude and the count of inf and NaN of each gradient.

    The host waits for the device once. Of DTensors, the numbers are those of the whole tensors, the
    same on every rank: a collective, for which every rank passes the same tree.

    Example:
        >>> import torch, gradkit
        >>> grads = {"body.weight": torch.tensor([3.0, -4.0]), "head.weight": None}
        >>> result = gradkit.report.norms(grads)
        >>> result.rows["body.weight"].norm, result.rows["head.weight"]
        (5.0, None)
        >>> result.to_dict()["grad/max_abs/body.weight"]
        4.0

    Args:
        grads: A tree of tensors or None.
        params: What the gradients are with respect to, a module or a tree like `grads`: adds the
            ratio of their norms, and counts a tied tensor in the total once.
        scaler: Divides by its scale, if these are the gradients of a scaled loss.
        depth: Of how many parts of a dotted name a row is: 1 is one for each module at the top;
            None is one for each parameter.

    Returns:
        The statistics of all and of each row; `print` shows a table, `.to_dict()` is for a logger.

    Raises:
        LeafTypeError: A gradient is no floating-point or complex tensor.
        OptionError: `scaler` is no GradScaler, or `depth` no int of at least 1.
        StructureError: `params` do not match; or of DTensors, as in `gradkit.tree.global_norm`.
    """
    _check(scaler, depth)
    trees = {"grads": grads} if params is None else {"grads": grads, "params": params}
    (leaves, *others), spec = aligned_leaves(trees)
    refuse_meta(leaves, lambda index: pytree.path(spec, index, "grads"))
    for index, leaf in enumerate(leaves):
        if leaf is not None and not (leaf.is_floating_point() or leaf.is_complex()):
            where, fix = pytree.path(spec, index, "grads"), "leave out what is no gradient"
            raise LeafTypeError(message(where, DIFFERENTIABLE, describe(leaf), fix))
        if leaf is not None and others and others[0][index] is None:
            where, fix = pytree.path(spec, index, "params"), "pass what grads are with respect to"
            raise StructureError(message(where, "a tensor, which has a gradient", "None", fix))
    present = [index for index, leaf in enumerate(leaves) if leaf is not None]
    columns = [[column[index] for index in present] for column in (leaves, *others)]
    numbers = dict(zip(present, _numbers(columns, scaler), strict=True))
    rows: dict[str, list[_Numbers]] = {}
    every: dict[int, _Numbers] = {}
    for index, label in enumerate(pytree.labels(spec, "grad")):
        row = rows.setdefault(".".join(label.split(".")[:depth]), [])
        if index in numbers:
            row.append(numbers[index])
            every[id(others[0][index]) if others else index] = numbers[index]
    by_name = {name: _stats(row) if row else None for name, row in rows.items()}
    return Norms(_stats([*every.values()] or [(0.0,) * 3 * len(trees)]), by_name)


def _check(scaler: object, depth: object) -> None:
    if scaler is not None and not isinstance(scaler, GradScaler):
        expected, fix = "a torch.amp.GradScaler or None", "scaler=torch.amp.GradScaler()"
        raise OptionError(message("scaler", expected, describe(scaler), fix))
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise OptionError(message("depth", "an int of at least 1, or None", repr(depth), "depth=1"))


@torch.no_grad()
def _numbers(columns: list[list[Any]], scaler: GradScaler | None) -> list[_Numbers]:
    """Return of each gradient, and of its param, the squared norm, the count and the maximum."""
    if not columns[0]:
        return []
    tables = [_table([leaf.detach() for leaf in column]) for column in columns]
    if scaler is not None:
        scale = scaler.scale(torch.ones_like(tables[0][0, 0]))
        tables[0] /= torch.stack([scale.square(), torch.ones_like(scale), scale])
    return [*map(tuple, torch.cat([table.to(tables[0]) for table in tables], 1).tolist())]


def _table(leaves: list[Tensor]) -> Tensor:
    """Return the squared norm, the count of inf and NaN, and the largest magnitude, [K, 3]."""
    rows = torch.stack(to_common_dtype([_row(local_part(whole_sums(leaf))) for leaf in leaves]))
    if not any(map(is_dtensor, leaves)):
        return rows
    from gradkit._core.shard_sum import Shards

    shards = Shards(map(sharding, leaves))
    maxima = shards.combined(rows[:, 2:], ReduceOp.MAX)
    return torch.cat([shards.combined(rows[:, :2]), maxima], 1)


def _row(leaf: Tensor) -> Tensor:
    x = stored_values(leaf)
    x = x.float() if x.dtype.itemsize == 1 else x  # torch does not tell what is finite in float8
    largest = x.abs().max().nan_to_num(inf, inf) if x.numel() else x.new_zeros(()).abs()
    numbers = norms_of_rows(x[None])[0].double().square(), x.isfinite().logical_not().sum(), largest
    return torch.stack([number.double() for number in numbers])


def _stats(rows: Sequence[_Numbers]) -> GradStats:
    """Return the statistics of several gradients together."""
    squares, counts, maxima, *of_params = zip(*rows, strict=True)
    norm = sqrt(sum(squares))
    size = sqrt(sum(of_params[0])) if of_params else None
    ratio = None if size is None else norm / size if size else inf
    return GradStats(norm, max(maxima), int(sum(counts)), ratio)
