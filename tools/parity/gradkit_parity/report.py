"""What `parity` returns: where a layout's gradients differ from one process's, and by what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from gradkit._core.tables import Block, Report, Table, folded, listed, plural, styled

Grads: TypeAlias = Mapping[str, Tensor]  # of float64 or complex128, on the CPU

# A difference is rounding, as sums in another order have it, up to this part of the norm of the
# expected gradient. A factor such as a root of two is far above it.
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
COARSE = 2e-2  # the same for float16 and bfloat16
FLOOR = 1e-3  # a gradient whose norm is below this part of that of all may itself be rounding


@dataclass(frozen=True)
class ParityDifference:
    """How a parameter's gradient in a layout differs from that in one process.

    Attributes:
        kind: A few words: `"zero"`, `"x 2: the world size"`, `"part 0 only"`, `"frozen"`.
        why: A sentence: what gives such a gradient.
        factor: Times which the expected gradient is the one that came; None if it is no multiple.
        relative: The norm of the difference over the norm of the expected gradient.
        ranks: On which ranks.
    """

    kind: str
    why: str
    factor: float | None = None
    relative: float = 1.0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class ParityReport(Report):
    """The gradients of each layout, against those of one process.

    Attributes:
        layouts: The names of those that ran.
        params: The parameters that one process trains, in the order of `named_parameters()`.
        differences: `differences[layout][param]`, where it differs, the first layer first.
        failed: For each layout whose step raised, the error and the rank.
        skipped: For each layout that this machine cannot run, why.
        unreached: The parameters that have no gradient in one process, either.
    """

    layouts: tuple[str, ...]
    params: tuple[str, ...]
    differences: dict[str, dict[str, ParityDifference]]
    failed: dict[str, str]
    skipped: dict[str, str]
    unreached: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether every layout that this machine can run has the gradients of one process."""
        return not self.failed and not any(self.differences.values())

    def _blocks(self) -> Sequence[Block]:
        wrong = [f"{name} ({len(of)})" for name, of in self.differences.items() if of]
        result = f"differ in {listed(wrong, 9)}" if wrong else "the same"
        title = f"{listed(self.layouts, 9)} against one process: {result}"
        if not self.layouts:
            title = "no layout was compared with one process"
        title = f"{plural(len(self.params), 'param')}: {title}"
        blocks: list[Block] = [title, *([self._table()] if wrong else []), *self._reasons()]
        blocks += [f"{name} raised: {error}" for name, error in self.failed.items()]
        blocks += [f"{name} was skipped: {why}" for name, why in self.skipped.items()]
        if self.unreached:
            blocks.append(f"No loss reaches {listed(self.unreached)}, in one process either.")
        return blocks

    def _table(self) -> Table:
        shown = [name for name, of in self.differences.items() if of or name in self.layouts]
        cells = {
            param: tuple(
                styled(of[param].kind, "red")
                if param in (of := self.differences[name])
                else styled("not compared" if name in self.failed else "same", "green")
                for name in shown
            )
            for param in self.params
        }
        rows = [[label, str(len(some)), *row] for label, some, row in folded(cells)]
        return Table(["param", "count", *shown], rows)

    def _reasons(self) -> Iterator[str]:
        for layout, of in self.differences.items():
            names: dict[tuple[str, str], list[str]] = {}
            for param, one in of.items():
                names.setdefault((one.kind, one.why), []).append(param)
            for (kind, why), some in names.items():
                yield f"{layout}, {listed(some)}: {kind}: {why}"


@dataclass(frozen=True)
class Suspects:
    """What a wrong gradient is compared with, beside the expected one."""

    sizes: Mapping[str, int]  # by which it may be multiplied: {"the world size": 2}
    parts: Sequence[Grads] = ()  # of each part of the batch alone, in one process
    losses: Mapping[str, Grads] = field(default_factory=dict)  # of each loss alone
    draws: str = ""  # how the layout drew other random numbers; empty if it did not


def difference(
    param: str, grad: Tensor | None, expected: Tensor | None, given: Suspects,
    tolerance: float = 1e-9, floor: float = 0.0,
) -> ParityDifference | None:  # fmt: skip
    """Return how a gradient differs from the expected one, and why; None if it does not."""
    # None counts as zero; below `floor`, a norm is rounding.
    some = expected if grad is None else grad
    if some is None:
        return None
    zeros = torch.zeros_like(some)
    got, want = zeros if grad is None else grad, zeros if expected is None else expected

    def equals(other: Tensor) -> bool:
        return bool((got - other).norm() <= tolerance * max(float(other.norm()), floor))

    relative = float((got - want).norm()) / max(float(want.norm()), floor, 1e-300)
    if not (got - want).isfinite().all():
        return ParityDifference("not finite", "an entry is nan or infinite", None, relative)
    if equals(want):
        return None
    if equals(zeros):
        why = "no loss reaches it in this layout, or it is frozen or detached"
        return ParityDifference("zero", why, 0.0, relative)
    if not want.count_nonzero():
        return ParityDifference("not zero", "there is none in one process", None, relative)
    for kind, why, factor, other in _explanations(param, want, given):
        if equals(other):
            return ParityDifference(kind, why, factor, relative)
    if given.draws:
        return ParityDifference("random numbers", given.draws, None, relative)
    fitted = float((got * want.conj()).sum().real / want.norm().square())
    if got.numel() > 1 and equals(fitted * want):
        why = "the whole gradient is scaled: the weight of a loss, a mean or a norm"
        return ParityDifference(f"x {fitted:.4g}", why, fitted, relative)
    why = "no multiple of the expected gradient, nor of what parts or losses give alone"
    return ParityDifference(f"differs by {relative:.2g}", why, None, relative)


_Explanation: TypeAlias = tuple[str, str, float | None, Tensor]  # kind, why, factor, gradient


def _explanations(param: str, want: Tensor, given: Suspects) -> Iterator[_Explanation]:
    """Yield the gradients that known mistakes give, those that are told apart best first."""
    for size, n in given.sizes.items():
        root = n**0.5
        for factor, name, why in (
            (n, size, "a sum where the mean is due, or the same sum twice"),
            (1 / n, f"1 / {size}", "divided once too often, or one summand of all"),
            (root, f"the root of {size}", "a norm that lacks the squares of the others"),
            (1 / root, f"1 / the root of {size}", "a norm that counts the same squares again"),
        ):
            yield f"x {factor:.4g}: {name}", why, factor, factor * want
    # Before the parts, whose steps may have the same mistake: their mean is the gradient then.
    for loss, grads in given.losses.items() if len(given.losses) > 1 else ():
        alone = grads.get(param, 0 * want)
        sizes = dict.fromkeys((*given.sizes.values(), 2))
        for times in (0, *(t for n in sizes for t in (n, 1 / n))):
            kind = f"loss {loss!r} x {times:.4g}" if times else f"without loss {loss!r}"
            why = "this loss does not reach it, or has another weight in this layout"
            yield kind, why, None, want + (times - 1) * alone
    yield from _of_parts(param, want, given)


def _of_parts(param: str, want: Tensor, given: Suspects) -> Iterator[_Explanation]:
    parts = [grads.get(param, torch.zeros_like(want)) for grads in given.parts]
    n = len(parts)
    if n < 2:
        return
    total = torch.stack(parts).sum(0)
    if not given.draws:
        why = "the parts weigh the same, whatever each counts; or each has statistics of its own"
        yield "a mean of means", f"{why}, as of batch norm", None, total / n
        yield "a sum of means", f"{why}, and the sum is not divided", None, total
    for kind, why, alone in (
        ("part {} of {} only", "it is not reduced, or the others are lost", parts),
        ("without part {} of {}", "it is lost", [total - part for part in parts]),
    ):
        for index, one in enumerate(alone):
            for divisor in (1, n - 1, n):
                yield kind.format(index, n), why, None, one / divisor
