"""Rules that choose between a pass for each element and one for all, and what they lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import ceil, exp, log
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


# What a rule may look at: the largest gradient, or all that a pass makes; of one pass, of all, or
# for each of them.
FEATURES: dict[str, Callable[[Case], float]] = {
    "largest": lambda case: case.largest,
    "largest * count": lambda case: case.largest * case.count,
    "largest / count": lambda case: case.largest / case.count,
    "total": lambda case: case.total,
    "total * count": lambda case: case.total * case.count,
    "total / count": lambda case: case.total / case.count,
    "total / nodes": lambda case: case.total / case.nodes,
}
_FEW = (2, 4, 8)
_MISSED = 1.05


@dataclass(frozen=True, slots=True)
class Rule:
    """Batch a loss of at least `few` elements whose features are at most `bounds`."""

    few: int
    bounds: tuple[tuple[str, int], ...]

    def batches(self, case: Case) -> bool:
        """Return whether it batches."""
        within = (FEATURES[feature](case) <= bound for feature, bound in self.bounds)
        return case.count >= self.few and all(within)

    def regrets(self, cases: Sequence[Case]) -> list[float]:
        """Return what it chooses over the better strategy."""
        return [
            (case.batched if self.batches(case) else case.sequential) / case.better
            for case in cases
        ]

    def __str__(self) -> str:
        bounds = (f"{feature} <= 2**{bound.bit_length() - 1}" for feature, bound in self.bounds)
        return " and ".join([f"at least {self.few} elements", *bounds])


def said(regrets: Sequence[float]) -> str:
    """Return regrets in words."""
    missed = sum(regret > _MISSED for regret in regrets)
    mean = exp(fmean(map(log, regrets)))
    return f"mean {mean:.3f}, largest {max(regrets):.2f}, {missed} over {_MISSED}"


def best(cases: Sequence[Case]) -> Iterator[Rule]:
    """Yield the rule that loses least of each feature, and last that of any two features."""
    one = [[(feature, bound) for bound in _bounds(feature, cases)] for feature in FEATURES]
    for bounds in one:
        yield _least([(bound,) for bound in bounds], cases)
    pairs = (product(a, b) for a, b in combinations(one, 2))
    yield _least([pair for some in pairs for pair in some], cases)


def _bounds(feature: str, cases: Sequence[Case]) -> list[int]:
    """Return powers of two among the values of a feature: a bound is no more exact than that."""
    values = [FEATURES[feature](case) for case in cases]
    low, high = (max(1, ceil(value)).bit_length() for value in (min(values), max(values)))
    return [1 << power for power in range(low, high + 1)]


def _least(every: Sequence[tuple[tuple[str, int], ...]], cases: Sequence[Case]) -> Rule:
    """Return the rule of least regret on average; of equals, the one that batches less."""
    within = {
        bound: frozenset(i for i, case in enumerate(cases) if FEATURES[bound[0]](case) <= bound[1])
        for bounds in every
        for bound in bounds
    }
    enough = {few: frozenset(i for i, c in enumerate(cases) if c.count >= few) for few in _FEW}
    gains = [log(case.batched / case.sequential) for case in cases]

    def gain(rule: Rule) -> tuple[float, int]:
        chosen = enough[rule.few].intersection(*(within[bound] for bound in rule.bounds))
        return round(sum(map(gains.__getitem__, sorted(chosen))), 6), len(chosen)

    return min((Rule(few, bounds) for bounds in every for few in _FEW), key=gain)
