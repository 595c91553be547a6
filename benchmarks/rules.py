"""Rules that choose between a pass for each element and one for all, and what they lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Case:
    """A loss, and what both strategies took.

    Attributes:
        kind: Of net.
        size: Of the net.
        count: Elements of the loss.
        nodes: Nodes of its graph.
        largest: Elements of the largest gradient that a pass makes.
        total: Elements of all of them.
        sequential: Milliseconds of a pass for each element.
        batched: Of one pass for all.
        auto: Of what gradkit chooses by itself.
    """

    kind: str
    size: int
    count: int
    nodes: int
    largest: int
    total: int
    sequential: float
    batched: float
    auto: float

    @property
    def better(self) -> float:
        """Milliseconds of the better strategy."""
        return min(self.sequential, self.batched)


# What a rule may look at: the tensors of one pass, of all passes, or of one node on average.
FEATURES: dict[str, Callable[[Case], float]] = {
    "largest": lambda case: case.largest,
    "largest * count": lambda case: case.largest * case.count,
    "total": lambda case: case.total,
    "total * count": lambda case: case.total * case.count,
    "total / nodes": lambda case: case.total / case.nodes,
    "total / nodes * count": lambda case: case.total / case.nodes * case.count,
}
_FEW = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Rule:
    """Batch a loss of at least `few` elements whose feature is at most `bound`."""

    feature: str
    bound: float
    few: int

    def batches(self, case: Case) -> bool:
        """Return whether it batches."""
        return case.count >= self.few and FEATURES[self.feature](case) <= self.bound

    def regrets(self, cases: Sequence[Case]) -> list[float]:
        """Return what it chooses over the better strategy."""
        return [
            (case.batched if self.batches(case) else case.sequential) / case.better
            for case in cases
        ]

    def __str__(self) -> str:
        return f"at least {self.few} elements, {self.feature} <= {self.bound:,.0f}"


def mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return exp(fmean(map(log, ratios)))


def best(cases: Sequence[Case]) -> Iterator[tuple[Rule, list[float]]]:
    """Yield for each feature the rule that loses least on average, and its regrets."""
    for feature, read in FEATURES.items():
        bounds = {-inf, *map(read, cases)}
        rules = [Rule(feature, bound, few) for bound in bounds for few in _FEW]
        rule = min(rules, key=lambda rule: (mean(rule.regrets(cases)), -rule.bound))
        yield rule, rule.regrets(cases)
