"""What is not right at degenerate points, and what of it is known."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from gradkit._torch_bugs.table import ROWS
from tests.sweep import table
from tests.sweep.degenerate import SIZES, points_of
from tests.sweep.points import judge
from tests.sweep.programs import Case

# Where torch, and gradkit with it, gives what it documents, or what differences say nothing about.
BY_DESIGN = {
    "to_sparse": "the gradient of an element that is zero is masked, as torch documents",
    "gaussian_nll_loss": "its gradient ignores the clamp of the variance, as torch documents",
    "module nn.GaussianNLLLoss": "the same",
    "cholesky_ex": "of a matrix that is not positive definite there are the first columns only",
    "normalize": "is linear within its eps, which the differences step over",
    "nextafter": "of two equal numbers is a constant",
    "chalf": "rounds",
    "_softmax_backward_data": "is given what no softmax returns",
}
# What forward and reverse mode, or two orders, choose otherwise at a kink.
KINKS = {"prelu", "module nn.PReLU", "fmax", "fmin", "svd", "svd_lowrank", "pca_lowrank"}
# Points at which squares overflow, or a result is smaller than the rounding of what it is of.
OF_ROUNDING = ("huge", "1e-150 beside 1e150", "1e-8 beside 1e8", "1e-20 beside 1", "1e8", "1e-20")
# The same of single operations: an inverse that is zero there but for rounding; a quotient of
# degree zero, for which the differences step over the point.
ALSO_OF_ROUNDING = {"cholesky_inverse": ("far up", "far down"), "corrcoef": ("1e-6", "1e-9")}
# Wrong at every point in eager code, too, which a row of docs/silently_wrong.md says.
WRONG_IN_EAGER_CODE = {"as_strided_scatter"}


@dataclass(frozen=True)
class Finding:
    """A derivative that is not right at a point.

    Attributes:
        operation: The name in gradkit's table.
        where: Which of its calls, and the point.
        program: The derivative; "modes" is whether all ways to one agree that is not there.
        torch: The verdict on what torch gives.
        gradkit: That on what gradkit gives.
    """

    operation: str
    where: str
    program: str
    torch: str
    gradkit: str

    @property
    def is_rounding(self) -> bool:
        """Whether the entries of the point are of very different size, or very large."""
        names = (*OF_ROUNDING, *ALSO_OF_ROUNDING.get(self.operation, ()))
        return any(f" {name} in" in self.where for name in names)

    @property
    def is_seen(self) -> bool:
        """Whether gradkit has a formula, or a refusal, for the operation, or tries it by itself."""
        # What a module gets wrong is one of its operations.
        known = {name for row in ROWS if row.also for name in row.names.split()}
        return self.operation in known | WRONG_IN_EAGER_CODE or self.operation.startswith("module ")

    @property
    def is_new(self) -> bool:
        """Whether a number is wrong, and nothing says so."""
        if self.operation in BY_DESIGN or "wrong" not in (self.torch, self.gradkit):
            return False
        if self.program.startswith("modes"):
            is_kink = self.operation in KINKS or any(f" {name} in" in self.where for name in SIZES)
            return self.gradkit == "wrong" and not is_kink
        if self.gradkit == "wrong":  # in a plain eager call, nothing looks at the operation
            return not (self.program.startswith("eager") and self.is_seen) and not self.is_rounding
        stack = self.program.split()
        known = any(table.holds(stack, row) for row in table.known_stacks(self.operation))
        return not (known or self.is_seen or self.is_rounding or stack[0] in {"eager", "checked"})


@dataclass
class Found:
    """What was tried, and what was not right.

    Attributes:
        operations: How many operations were tried.
        calls: How many calls of them.
        points: How many points.
        judged: At how many of these differences say what is right.
        programs: How many derivatives were compared.
        findings: Those that are not right.
    """

    operations: int = 0
    calls: int = 0
    points: int = 0
    judged: int = 0
    programs: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Add what was found elsewhere."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        numbers = (f"{value} {name}" for name, value in vars(self).items() if name != "findings")
        return f"{', '.join(numbers)}, {sum(f.is_new for f in self.findings)} new wrong numbers"


def at_points(
    cases: Sequence[Case],
    *,
    seconds: float = float("inf"),
    most: int | None = None,
    named: Container[str] | None = None,
) -> Found:
    """Judge the calls of an operation at degenerate points, in turn, for so long or so many."""
    found, start = Found(operations=1, calls=len(cases)), time.monotonic()
    others = {id(case): case.point for case in cases}
    several = zip_longest(*([(case, *one) for one in _shuffled(case)] for case in cases))
    for case, name, at in list(filter(None, chain.from_iterable(several)))[:most]:
        if time.monotonic() - start > seconds:
            break
        if named is not None and name not in named:
            continue
        for relative in SIZES.get(name.partition(" in ")[0], [False]):
            try:
                verdicts = judge(at, others[id(case)], relative=relative)
            except Exception:  # the operation does not take such a point
                continue
            found.points += 1
            found.judged += not verdicts.keys() <= {"modes 1", "modes 2"}
            found.programs += len(verdicts)
            where = f"call {cases.index(case)}, {name}{', relative' if relative else ''}"
            found.findings += [
                Finding(case.operation, where, program, *both)
                for program, both in verdicts.items()
                if both != ("right", "right")
            ]
    return found


def _shuffled(case: Case) -> list[tuple[str, Case]]:
    """Return all points of a case, in an order in which the first ones are of every kind."""
    points = list(points_of(case))
    random.Random(5).shuffle(points)
    return points


def lines(name: str, findings: Iterable[Finding]) -> Iterator[str]:
    """Yield what to print of the findings about an operation."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in findings:
        if "wrong" in (one.torch, one.gradkit) or "not finite" in (one.torch, one.gradkit):
            mark = "NEW " if one.is_new else ""
            groups[mark + one.program, one.torch, one.gradkit].append(one.where)
    for (program, torch, gradkit), places in groups.items():
        yield f"{name} | {program}: torch {torch}, gradkit {gradkit} | {'; '.join(places[:3])}"
