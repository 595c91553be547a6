"""The fuzzer: programs of each room are right, and what is wrong is seen, named and repeated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

import gradkit
from tests.fuzz.__main__ import main
from tests.fuzz.cases import draw
from tests.fuzz.processes import Plan, fuzz
from tests.fuzz.rooms import ROOMS
from tests.fuzz.runs import HAZARDS, REFUSED, RIGHT, WRONG, Outcome, Summary, room_of, run

pytestmark = pytest.mark.usefixtures("device")
SEED = 0
ROUNDS = 60
# Of steps and sums alone, or by `func.vjp` and `linearize`; most of their programs are refused.
WITHOUT_GRADIENTS = {"scaled losses", "scalers", "means", "captured"}


def first_of(room: str, rounds: int) -> list[int]:
    index = list(ROOMS).index(room)
    return [turn * len(ROOMS) + index for turn in range(rounds)]


@pytest.mark.long
@pytest.mark.parametrize("room", ROOMS)
def test_programs_are_right_or_refused_for_what_they_have(room: str) -> None:
    summary = Summary()
    for number in first_of(room, ROUNDS):
        summary.add(run(SEED, number))
    assert summary.wrong == [], "\n".join(summary.lines(SEED))
    assert summary.right > ROUNDS / 3


def test_rooms_with_hazards_exist() -> None:
    assert HAZARDS.keys() <= ROOMS.keys()


def off_by_one_ulp(grads: Any) -> Any:
    return [
        None if grad is None else torch.nextafter(grad, torch.full_like(grad, torch.inf))
        for grad in grads
    ]


def dropped(grads: Any) -> Any:
    return [*grads[:-1], None]


@pytest.mark.parametrize("spoil", [off_by_one_ulp, dropped])
def test_a_defect_is_seen_and_its_number_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoil: Callable[[Any], Any]
) -> None:
    right = gradkit.value_and_grads

    def wrong(*args: Any, **options: Any) -> Any:
        values, grads = right(*args, **options)
        return values, spoil(grads)

    numbers = first_of("joint", 20)
    with monkeypatch.context() as patch:
        patch.setattr(gradkit, "value_and_grads", wrong)
        summary = Summary()
        for number in numbers:
            summary.add(run(SEED, number))
        assert summary.wrong
        number = summary.wrong[0].number
        assert f"--seed {SEED} --program {number}" in "\n".join(summary.lines(SEED))
        assert main(["--seed", str(SEED), "--program", str(number)]) == 1
        shown = capsys.readouterr().out
        assert "is not tensor" in shown or "shape" in shown or "None is not" in shown
        assert "Program(seed=" in shown
    assert main(["--seed", str(SEED), "--program", str(number)]) == 0


def scaled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with each gradient a little too large."""

    def wrong(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if callable(result):  # of gradkit.func, which takes the function first
            return scaled(result)
        return gradkit.tree.map(lambda leaf: leaf * 1.001, result)

    return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    "room", [room for room in ROOMS if room not in {*HAZARDS, *WITHOUT_GRADIENTS}]
)
def test_every_room_sees_gradients_that_are_a_little_too_large(
    monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    for module in (gradkit, gradkit.func):
        for name in ("value_and_grads", "per_loss_grads"):
            monkeypatch.setattr(module, name, scaled(getattr(module, name)))
    monkeypatch.setattr(gradkit, "vjp", scaled(gradkit.vjp))
    for name in ("per_sample_grads", "hvp"):
        monkeypatch.setattr(gradkit.func, name, scaled(getattr(gradkit.func, name)))
    outcomes = [run(SEED, number) for number in first_of(room, 20)]
    wrong = [outcome.text for outcome in outcomes if outcome.kind == WRONG]
    assert wrong
    assert all("AssertionError" in text for text in wrong)


@pytest.mark.parametrize(
    "error", [gradkit.UnsupportedGraphError("written in place"), RuntimeError("raw")], ids=repr
)
def test_an_error_in_a_program_with_nothing_to_refuse_is_wrong(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    number = next(n for n in first_of("per loss", 20) if run(SEED, n).kind == RIGHT)

    def refuse(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(gradkit, "per_loss_grads", refuse)
    assert run(SEED, number).kind == WRONG


def test_a_refusal_that_names_what_the_program_has_is_counted_by_its_reason() -> None:
    outcomes = [run(SEED, number) for number in first_of("hooks", 60)]
    refused = [outcome.text for outcome in outcomes if outcome.kind == REFUSED]
    reasons = "register_multi_grad_hook", "that no hook has changed"
    assert set(refused) == {f"UnsupportedGraphError: {reason}" for reason in reasons}


def test_seed_and_number_determine_a_program() -> None:
    programs = [draw(Random(f"{seed}/7")).program for seed in (0, 0, 1)]
    assert programs[0] == programs[1] != programs[2]


def test_rooms_take_turns_and_processes_share_the_rounds() -> None:
    assert [room_of(number) for number in range(len(ROOMS) + 1)] == [*ROOMS, next(iter(ROOMS))]
    end = 4 * len(ROOMS)
    shares = [Plan(end=end, jobs=3).numbers(share) for share in range(3)]
    assert sorted(number for share in shares for number in share) == list(range(end))
    only = Plan(end=end, rooms=["threads"])
    assert list(only.numbers(0)) == first_of("threads", 4)
    assert list(only.numbers(0, after=first_of("threads", 2)[-1])) == first_of("threads", 4)[2:]


def dies_or_hangs(seed: int, number: int) -> Outcome:
    if number == 1:
        os._exit(3)
    if number == 2:
        time.sleep(600)
    return Outcome(number, RIGHT)


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_dies_or_hangs_is_wrong_and_the_others_go_on() -> None:
    summary = fuzz(Plan(end=4, hangs=1, runner=dies_or_hangs))
    assert summary.right == 2
    assert [(each.number, each.kind) for each in summary.wrong] == [(1, WRONG), (2, WRONG)]
    assert "exit code 3" in summary.wrong[0].text
    assert "did not end" in summary.wrong[1].text


def ends_at_once(seed: int, number: int) -> Outcome:
    return Outcome(number, RIGHT)


@pytest.mark.slow
@pytest.mark.processes
def test_the_time_counts_from_the_first_program_on() -> None:
    """A process takes longer to start than this."""
    assert fuzz(Plan(seconds=0.2, runner=ends_at_once)).right > 0


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_prints_what_came_of_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    end = str(5 * len(ROOMS))
    assert main(["--programs", end, "--jobs", "2", "--only", "joint"]) == 0
    assert "right 5, refused 0, not seen 0, wrong 0" in capsys.readouterr().out
