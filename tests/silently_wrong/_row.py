"""One line of docs/silently_wrong.md, and what shows that it is so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradkit._compat.versions import Release, release
from gradkit_doctor.report import json_value, text
from tests.silently_wrong._issues import ISSUES

# What the rows were run with. A row runs with what is installed, and fails when that has mended it.
VERSIONS = {
    "torch": "2.11 to 2.15",
    "higher": "0.2.1",
    "TorchOpt": "0.7.3",
    "TorchJD": "0.18.0",
    "Opacus": "1.6.0",
    "BackPACK": "1.7.1",
}
D = torch.float64


def nothing() -> Any:
    """Stand for the call of gradkit, or the way round a refusal, where there is none."""
    raise AssertionError("there is no such call")


@dataclass(frozen=True)
class Case:
    """What came out when a row was run.

    Attributes:
        theirs: What torch, or a peer, gives.
        right: The right value, found in another way.
        ours: Calls gradkit.
        instead: Where gradkit refuses, the way that its message names.
    """

    theirs: Any
    right: Any
    ours: Callable[[], Any]
    instead: Callable[[], Any] = nothing


@dataclass(frozen=True)
class Row:
    """One line of the page.

    Attributes:
        input: The call that goes wrong.
        gives: What comes out of it.
        right: What should.
        gradkit: The calls that give the right value, or refuse.
        show: Runs it.
        refuses: The class of the refusal, or None.
        instead: What to do where it refuses, if the case shows that.
        by: Who gets it wrong.
        same: gradkit gives the same wrong value: it cannot see this.
        mended: The first release of torch that gives the right value, or raises by itself.
        tolerance: How far a value may be from what the page says.
    """

    input: str
    gives: Any
    right: Any
    gradkit: str
    show: Callable[[torch.device], Case]
    refuses: type[Exception] | None = None
    instead: str = ""
    by: str = "torch"
    same: bool = False
    mended: Release | None = None
    tolerance: float = 1e-3

    @property
    def id(self) -> str:
        """The name of the row, for a test."""
        return self.show.__name__

    @property
    def line(self) -> str:
        """The line of the page."""
        cells = [
            self.input,
            self._issue(),
            f"`{text(json_value(self.gives))}`",
            f"`{text(json_value(self.right))}`",
            self._answer(),
        ]
        return f"| {' | '.join(cells)} |"

    def _issue(self) -> str:
        """Where it is reported, and the release that mends it; of a peer, its version."""
        if self.by != "torch":
            return f"{self.by} {VERSIONS[self.by]}"
        url = ISSUES.get(self.id)
        reported = f"[{url.rpartition('/')[2]}]({url})" if url else "not reported"
        return f"{reported}; before {'.'.join(map(str, self.mended))}" if self.mended else reported

    @property
    def is_mended(self) -> bool:
        """Whether the torch that is installed is not silently wrong any more."""
        return self.mended is not None and release(torch.__version__) >= self.mended

    def _answer(self) -> str:
        if self.same:
            return f"{self.gradkit}: also wrong"
        if self.refuses is None:
            return f"{self.gradkit}: right"
        way = f"; {self.instead}: right" if self.instead else ""
        return f"{self.gradkit}: `{self.refuses.__name__}`{way}"

    def close(self, got: Any, expected: Any, *, factor: float = 1.0) -> bool:
        """Return whether two values are equal, to rounding and to the digits of the page."""
        return _close(json_value(got), json_value(expected), factor * self.tolerance)


def _close(got: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(
            _close(a, b, tolerance) for a, b in zip(got, expected, strict=True)
        )
    numbers = (int, float)
    if isinstance(got, numbers) and isinstance(expected, numbers):
        return abs(got - expected) <= tolerance * max(1.0, abs(expected))
    return bool(got == expected)
