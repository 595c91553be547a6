"""The calls that Python makes in a call of gradkit, and its functions, are at most as written."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

from benchmarks import counting, fresh, reading
from benchmarks.harness import Side
from gradkit import tree

HOW = "python -m benchmarks.counting tells, and its docstring when to raise a ceiling"


@pytest.mark.long
@pytest.mark.processes
def test_a_clean_call_makes_no_more_calls_than_before(device: torch.device) -> None:
    # In this process, other tests may have registered hooks.
    here = platform.python_version().rpartition(".")[0], torch.__version__.partition("+")[0]
    if here != counting.counted_with():  # an optimizer of another torch makes other calls
        pytest.skip(f"counted with Python and torch {counting.counted_with()}, here are {here}")
    counted = fresh.python("-m", "benchmarks.counting")
    allowed = counting.ceilings()
    assert counted.keys() == allowed.keys()
    above = {name: count for name, count in counted.items() if count > allowed[name]}
    assert not above, f"{above} over {allowed}: {HOW}"


def test_calls_of_python_and_of_c_count(device: torch.device) -> None:
    def run(numbers: list[int]) -> int:
        return abs(min(numbers))

    assert counting.calls(Side(lambda: [1, 2], run)) == 3
    assert counting.calls(Side(lambda: [1, 2], lambda numbers: [*map(abs, numbers)])) == 1


def test_own_functions_count_once(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    names = {code.co_name for code in reading.own_code(lambda: tree.global_norm([w, w]))}
    assert "global_norm" in names
    assert not any(name.startswith("<") for name in names)
    assert reading.own_code(lambda: torch.ones(2)) == set()


def test_what_is_counted_becomes_the_ceiling(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "CEILINGS", tmp_path / "ceilings.json")
    monkeypatch.setattr(counting, "counts", lambda: {"a call": 7})
    counting.main(["--write"])
    assert counting.ceilings() == {"a call": 7}
    written = json.loads(counting.CEILINGS.read_text())
    assert {"about", "python", "torch", "optree"} <= written.keys()
    assert "--write" in written["about"]
