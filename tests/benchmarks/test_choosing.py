"""The sweep over strategies runs, and finds the rule that its figures hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import choosing, rules, vectors
from benchmarks.rules import Case, Rule


def case(count: int, largest: int, batched: float) -> Case:
    return Case(
        "kind", 1, count, 10, largest, 5 * largest, sequential=1.0, batched=batched, auto=1.0
    )


def test_the_best_rule_is_found(device: torch.device) -> None:
    cases = [
        case(count, largest, 0.5 if count >= 4 and largest <= 1000 else 2.0)
        for count in (2, 4, 8)
        for largest in (10, 1000, 3000)
    ]
    first = next(iter(rules.best(cases)))
    assert first == Rule(4, (("largest", 1024),))
    assert first.regrets(cases) == [1.0] * len(cases)
    assert str(first) == "at least 4 elements and largest <= 2**10"
    never = Rule(8, (("largest", 1),))
    assert sorted(set(never.regrets(cases))) == [1.0, 2.0]
    assert rules.said([1.0, 1.21]) == "mean 1.100, largest 1.21, 1 over 1.05"


def test_two_features_can_be_better_than_one(device: torch.device) -> None:
    cases = [
        case(count, largest, 0.5 if largest <= 100 * count and largest <= 1000 else 2.0)
        for count in (4, 8, 32)
        for largest in (100, 700, 1000, 2500)
    ]
    *_, last = rules.best(cases)
    assert len(last.bounds) == 2
    assert last.regrets(cases) == [1.0] * len(cases)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fell back:gradkit.GradkitWarning")
def test_the_sweep_has_a_case_of_each_kind(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cases.json"
    cases = choosing.main(["--quick", "--device", str(device), "--output", str(path)])
    assert [one.kind for one in cases] == list(vectors.KINDS)
    printed = capsys.readouterr().out
    assert "\nauto: mean " in printed
    assert "what the last one loses:" in printed
    assert len(json.loads(path.read_text())) == len(cases)
    assert choosing.main(["--input", str(path)]) == cases
