"""Programs by number, and what came of them."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import torch

import gradkit
from tests.fuzz.cases import Refused
from tests.fuzz.rooms import ROOMS

RIGHT, REFUSED, WRONG = "right", "refused", "wrong"
NOT_SEEN = "not seen"  # wrong for a reason that docs/silently_wrong.md has a row of
# Rooms with a hazard that gradkit does not always see, and that `gradkit.checked()` repairs.
HAZARDS: dict[str, str] = {
    "writes": "below a sum, a write may be the engine's own",
    "writes under vmap": "the same",
    "traced writes": "the same",
}


class Outcome(NamedTuple):
    """What came of a program, and the reason or the error."""

    number: int
    kind: str
    text: str = ""


def room_of(number: int) -> str:
    """Return the room of a program: they take turns."""
    return list(ROOMS)[number % len(ROOMS)]


def run(seed: int, number: int) -> Outcome:
    """Run one program, which the seed and the number determine."""
    outcome = _run(seed, number)
    if outcome.kind == WRONG and room_of(number) in HAZARDS:
        with gradkit.checked(), warnings.catch_warnings():
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
            again = _run(seed, number)
        if again.kind != WRONG:
            return Outcome(number, NOT_SEEN, room_of(number))
    return outcome


def _run(seed: int, number: int) -> Outcome:
    try:
        ROOMS[room_of(number)](Random(f"{seed}/{number}"))
    except Refused as refusal:
        return Outcome(number, REFUSED, str(refusal))
    except Exception:
        return Outcome(number, WRONG, traceback.format_exc())
    return Outcome(number, RIGHT)


def set_up() -> None:
    """One thread for each process; warnings are errors, as in the tests."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for text in ("`torch.jit.script` is", "Sparse invariant checks are implicitly disabled"):
        warnings.filterwarnings("ignore", text)


@dataclass
class Summary:
    """How many programs were right, refused (by reason), not seen and wrong (each of them)."""

    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    not_seen: Counter[str] = field(default_factory=Counter)
    wrong: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.right += outcome.kind == RIGHT
        self.refused[outcome.text] += outcome.kind == REFUSED
        self.not_seen[outcome.text] += outcome.kind == NOT_SEEN
        if outcome.kind == WRONG:
            self.wrong.append(outcome)

    def total(self) -> int:
        return self.right + self.refused.total() + self.not_seen.total() + len(self.wrong)

    def lines(self, seed: int) -> list[str]:
        """Return the counts by reason, and how to run again what was wrong."""
        counts = (
            f"right {self.right}, refused {self.refused.total()}, "
            f"not seen {self.not_seen.total()}, wrong {len(self.wrong)}"
        )
        reasons = [f"  {number:8} {reason}" for reason, number in (+self.refused).most_common()]
        failures = [
            f"wrong: {room_of(each.number)}, python -m tests.fuzz --seed {seed} "
            f"--program {each.number}\n  {shortest(each.text)}"
            for each in sorted(self.wrong)
        ]
        unseen = [f"  {number:8} not seen: {room}" for room, number in (+self.not_seen).items()]
        return [counts, *reasons, *unseen, *failures]


def shortest(text: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Warning)\b", line)]
    return [text, *lines][-1][:150]
