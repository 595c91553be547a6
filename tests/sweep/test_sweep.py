"""The table of wrong derivatives holds for the torch that is installed, and the sweep would see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradkit._compat import versions
from gradkit._compat.versions import is_seen
from gradkit._torch_bugs import table as defects
from gradkit._torch_bugs.table import EVERY_REFUSAL, FORMULAS, ROWS, WRONG_ORDER, stacks_of
from tests.sweep import table
from tests.sweep.__main__ import judge
from tests.sweep.cases import operations, without_graph
from tests.sweep.extra import extra
from tests.sweep.programs import Case, difference, directions, scalar, verdicts_of

OPERATIONS = sorted({name: None for name in defects.OPERATIONS if stacks_of(name)})
here = pytest.mark.skipif(versions.is_untested(), reason="a torch that gradkit was not run on")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about sparse tensors and old names


def cases_of(operation: str) -> Iterator[Case]:
    return (case for case in extra().values() if case.operation == operation)


@here
@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_row_is_found_again(device: torch.device, operation: str) -> None:
    rows = {" ".join(stack) for stack in stacks_of(operation)}
    found = table.Found()
    for case in cases_of(operation):
        verdicts = verdicts_of(case)
        # The third derivative of det is wrong or not finite by the rounding of the CPU.
        infinite = {program for program in rows if verdicts.get(program) == "not finite"}
        found.add(operation, verdicts | dict.fromkeys(infinite, "wrong"), {})
    assert set(found.operations()[operation]) == rows


@here
@pytest.mark.slow
def test_each_kind_of_node_is_found_again(device: torch.device) -> None:
    found = table.Found()
    names = [name for name in extra() if not name.startswith(("sparse_csr", "lu_", "inv"))]
    for name in names:
        found.add("", *judge(extra()[name], 3))
    assert set(found.kinds()) == WRONG_ORDER.keys()


def test_each_operation_of_the_table_is_refused_or_runs_by_its_formula(
    device: torch.device,
) -> None:
    assert defects.OPERATIONS.keys() <= EVERY_REFUSAL.keys() | FORMULAS.keys()
    for row in ROWS:
        # One with a formula is refused where only the graph tells of it.
        assert bool(row.fix) != bool(row.formula) or row.nodes, row.names
        for name in row.names.split():
            assert row.also or name in defects.OPERATIONS, name


def test_the_table_is_written_by_release(device: torch.device) -> None:
    old = {"a": {"Grad": "2.12 2.13"}, "b": {"Jvp": "2.13"}}
    found = {"c": ["Vmap"], "a": ["Jvp"]}
    of_all = {"a": {"Grad": "2.12", "Jvp": "2.13"}, "c": {"Vmap": "2.13"}}
    assert table.merge(old, "2.13", found, everything=True) == of_all
    of_some = {**of_all, "a": {"Grad": "2.12 2.13", "Jvp": "2.13"}, "b": old["b"]}
    assert table.merge(old, "2.13", found, everything=False) == of_some


def test_the_table_that_finds_nothing_new_is_written_as_it_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = table.PATH.read_text(encoding="utf-8")
    monkeypatch.setattr(table, "PATH", tmp_path / "swept.json")
    table.write(table.Found(), everything=False)
    assert table.PATH.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("version", "seen"),
    [("2.11.0", True), ("2.12.1", True), ("2.13.0", False), ("2.16.0", False), ("2.10.0", True)],
)
def test_a_release_that_was_not_swept_is_as_the_one_before(
    device: torch.device, version: str, seen: bool
) -> None:
    assert is_seen(("2.11", "2.12"), ("2.11", "2.12", "2.13", "2.15"), version) is seen


def test_a_preview_may_be_older_than_what_mended_it(device: torch.device) -> None:
    assert is_seen(("2.14",), ("2.14", "2.15"), "2.15.0.dev20260901")
    assert not is_seen(("2.14",), ("2.14", "2.15"), "2.15.0")


class Halved(torch.autograd.Function):
    """A square whose second derivative is a half of the right one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x + x.detach())


def test_the_sweep_sees_a_wrong_second_derivative(device: torch.device) -> None:
    case = Case("square", Halved.apply, (torch.tensor([0.5, 1.5], dtype=torch.float64),))
    verdicts, kinds = judge(case, 3)
    assert [verdicts["eager 1"], verdicts["eager 2"]] == ["right", "wrong"]
    found = table.Found()
    found.add("square", verdicts, kinds)
    found.add("sum", *judge(Case("sum", lambda x: x.sum()[None], case.point), 3))
    assert found.kinds() == {"HalvedBackward": "2"}


def test_differences_are_none_at_a_kink(device: torch.device) -> None:
    point = (torch.full((2,), 1e-4, dtype=torch.float64),)
    along = directions(point, 1)[0]
    assert difference(scalar(torch.abs), point, along) is None
    assert difference(scalar(torch.sin), point, along) is not None


@here
@pytest.mark.long
def test_operations_that_drop_their_graph_have_a_formula_or_are_refused(
    device: torch.device,
) -> None:
    """All of torch's table: a release that adds one, or mends one, fails here."""
    others = {"normal", "logspace"}  # which has a graph; whose samples are too large to difference
    dropped = {name for row in ROWS if row.drops for name in row.names.split()}
    assert without_graph(4) == dropped - others


@here
@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_no_operation_of_torch_is_wrong_that_the_table_does_not_have(
    device: torch.device, part: int
) -> None:
    """A sample of one in thirty-two, to the second order; `python -m tests.sweep` tries all."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, make in list(operations())[part::64]:
        for case in make(1):
            known = table.known_stacks(case.operation)
            for program, verdict in verdicts_of(case, 2).items():
                if verdict == "wrong" and not any(table.holds(stack(program), k) for k in known):
                    found[name].add(program)
    assert found == {}


def stack(program: str) -> list[str]:
    eager = program.startswith("eager")
    return ["Grad"] * int(program.removeprefix("eager ")) if eager else program.split()
