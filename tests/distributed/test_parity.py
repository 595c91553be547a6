"""`gradkit.distributed.parity`: right layouts are equal, and each planted bug is named."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradkit
from gradkit.distributed import BatchPart, Layout, ParityReport, parity
from gradkit_parity import comparison
from gradkit_parity.layout_run import ranks
from gradkit_parity.report import Suspects, difference
from tests.distributed import parity_programs as programs
from tests.distributed.parity_programs import bugged
from tests.processes import forking

pytestmark = pytest.mark.usefixtures("device")

SIZES = {"the world size": 2, "the number of micro-batches": 3}


def vector(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


BY_SIZE = Suspects(SIZES)
A, B, C = vector(1, 2, 3, -1), vector(2, -1, 0.5, 4), vector(-3, 0.25, 7, 1)
PARTS = [{"w": one} for one in (A, B, C)]


def kind(grad: Any, expected: Any, suspects: Suspects = BY_SIZE, **options: Any) -> Any:
    one = difference("w", grad, expected, suspects, **options)
    return one and one.kind


@pytest.mark.parametrize(
    ("factor", "named"),
    [
        (2, "x 2: the world size"),
        (1 / 2, "x 0.5: 1 / the world size"),
        (2**0.5, "x 1.414: the root of the world size"),
        (0.5**0.5, "x 0.7071: 1 / the root of the world size"),
        (3, "x 3: the number of micro-batches"),
        (1 / 3, "x 0.3333: 1 / the number of micro-batches"),
        (0, "zero"),
        (-1, "x -1"),
        (1.7, "x 1.7"),
    ],
)
def test_factors_are_named(factor: float, named: str) -> None:
    assert kind(factor * A, A) == named
    assert difference("w", factor * A, A, Suspects(SIZES)).factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("grad", "named"),
    [
        (A, "part 0 of 3 only"),
        (B / 3, "part 1 of 3 only"),
        ((A + C) / 3, "without part 1 of 3"),
        ((A + B) / 2, "without part 2 of 3"),
        ((A + B + C) / 3, "a mean of means"),
        (A + B + C, "a sum of means"),
    ],
)
def test_parts_are_named(grad: torch.Tensor, named: str) -> None:
    expected = 0.5 * A + 0.3 * B + 0.2 * C  # the parts have unequal counts
    assert kind(grad, expected, Suspects(SIZES, PARTS)) == named


@pytest.mark.parametrize(
    ("grad", "named"),
    [
        (A, "without loss 'aux'"),
        (B, "without loss 'fit'"),
        (A + 2 * B, "loss 'aux' x 2"),
        (A / 2 + B, "loss 'fit' x 0.5"),
    ],
)
def test_losses_are_named(grad: torch.Tensor, named: str) -> None:
    losses = {"fit": {"w": A}, "aux": {"w": B}}
    assert kind(grad, A + B, Suspects(SIZES, losses=losses)) == named


@pytest.mark.parametrize("nothing", [None, torch.zeros(4, dtype=torch.float64)])
def test_none_is_zero(nothing: torch.Tensor | None) -> None:
    assert kind(nothing, None) is kind(None, nothing) is kind(nothing, nothing) is None
    assert kind(nothing, A) == "zero"
    assert kind(A, nothing) == "not zero"


def test_special_points() -> None:
    assert kind(vector(), vector()) is None
    assert kind(vector(1, float("nan")), vector(1, 2)) == "not finite"
    assert kind(vector(1, 2), vector(1, float("inf"))) == "not finite"
    assert kind(vector(7.0), vector(2.0)) == "differs by 2.5"  # of one entry, all is a multiple
    assert kind(B, A, Suspects(SIZES, draws="seeds")) == "random numbers"
    assert kind(2 * A, A, Suspects(SIZES, draws="seeds")) == "x 2: the world size"
    assert kind(A * (1 + 1j), A * (1 + 1j)) is None
    assert kind(2 * A * (1 + 1j), A * (1 + 1j)) == "x 2: the world size"


def test_what_is_below_the_floor_is_rounding() -> None:
    assert kind(1e-17 * A, 2e-17 * A, floor=1e-3) is None
    assert kind(1e-11 * A, 2e-11 * A, floor=1e-3) == "x 0.5: 1 / the world size"


@given(st.integers(2, 9), st.integers(0, 8), st.integers(0, 10_000))
def test_a_lost_part_of_many_is_named(count: int, lost: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    lost %= count
    named = kind(
        (grads.sum(0) - grads[lost]) / count,
        grads.mean(0),
        Suspects({"the world size": count}, [{"w": grad} for grad in grads]),
    )
    only = f"part {1 - lost} of {count} only"
    assert named == (only if count == 2 else f"without part {lost} of {count}")


# --- One process ---------------------------------------------------------------------------------

ALONE = ["accumulation", "checkpointed"]


@pytest.mark.parametrize("step", [programs.step, programs.counted, programs.clipped])
def test_right_layouts_of_one_process_are_equal(step: Callable[..., Any]) -> None:
    layouts = [*ALONE, Layout("four", ranks="one", micro_batches=4)]
    report = parity(programs.build, step, layouts)
    assert report.same, report
    assert report.layouts == ("accumulation", "checkpointed", "four")
    assert str(report) == (
        "8 params: accumulation, checkpointed and four against one process: the same"
    )


@pytest.mark.slow
def test_compiled_is_equal() -> None:
    assert parity(programs.build, programs.step, "compiled").same


@pytest.mark.parametrize(
    ("step", "bug", "named"),
    [
        (programs.mean_of_counted, "no reduction", "a mean of means"),
        (programs.step, "lost micro-batch", "part 0 of 2 only"),
        (programs.step, "auxiliary loss twice", "loss 'aux' x 2"),
    ],
)
def test_bugs_of_micro_batches_are_named(step: Any, bug: str, named: str) -> None:
    report = parity(programs.build, step, [bugged(bug, ranks="one", micro_batches=2)])
    kinds = {name: one.kind for name, one in report.differences[bug].items()}
    names = ["router.weight", "router.bias"] if "auxiliary" in bug else report.params
    assert kinds == dict.fromkeys(names, named)


@pytest.mark.parametrize(("factor", "named"), [(2, "loss 'aux' x 2"), (0, "without loss 'aux'")])
def test_a_loss_that_parts_count_otherwise_is_named(factor: int, named: str) -> None:
    x = torch.randn(8, 4, dtype=torch.float64)

    def step(module: nn.Module, part: BatchPart) -> dict[str, torch.Tensor]:
        out = module(part.rows(x))
        times = factor if part.count > 1 else 1
        return {"fit": out.square().mean(), "aux": times * out.abs().mean()}

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    report = parity(build, step, ["accumulation"])
    assert {one.kind for one in report.differences["accumulation"].values()} == {named}


def test_a_step_that_returns_a_vector_and_a_tolerance_of_zero() -> None:
    x = torch.randn(8, 4)

    def vector(module: nn.Module, part: BatchPart) -> torch.Tensor:
        loss: torch.Tensor = module(part.rows(x)).square().mean(1)
        return loss

    def mean(module: nn.Module, part: BatchPart) -> torch.Tensor:
        return vector(module, part).mean()

    def build() -> nn.Module:
        return nn.Linear(4, 2)

    with pytest.raises(gradkit.NotScalarLossError, match=r"loss\.mean\(\)"):
        parity(build, vector, ["accumulation"])
    with pytest.raises(gradkit.OptionError, match=r"rtol=1e-6"):
        parity(build, mean, ["accumulation"], rtol=0)
    assert parity(build, mean, ["accumulation"], rtol=1e-6).same


def test_a_checkpoint_that_draws_again_is_named() -> None:
    build = programs.build_with_dropout
    assert parity(build, programs.dropped, "checkpointed").same
    forgetful = Layout("forgetful", programs.forget_random_state, "one")
    report = parity(build, programs.dropped, [forgetful])
    assert report.differences["forgetful"]["router.weight"].kind == "random numbers"
    assert "head.bias" not in report.differences["forgetful"]


def test_float32_and_half_precision_have_tolerances_of_their_own() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        report = parity(
            lambda: programs.build().to(dtype),  # noqa: B023
            lambda model, part: model(part.rows(programs.X.to(dtype)))[0].square().mean(),  # noqa: B023
            ALONE,
        )
        assert report.same, report
    strict = parity(
        lambda: programs.build().float(),
        lambda model, part: model(part.rows(programs.X.float()))[0].square().mean(),
        [Layout("three", ranks="one", micro_batches=3)],
        rtol=1e-12,
    )
    assert not strict.same


def test_nothing_of_the_caller_changes() -> None:
    state = torch.get_rng_state()
    with torch.no_grad():
        assert parity(programs.build, programs.step, ALONE).same
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert parity(programs.build, programs.step, ALONE).same
    assert torch.equal(torch.get_rng_state(), state)


def test_unreached_parameters_are_said() -> None:
    report = parity(programs.build_with_spare, programs.step, ALONE)
    assert report.same
    assert report.unreached == ("spare.weight", "spare.bias")
    assert "No loss reaches spare.weight and spare.bias" in str(report)


def test_what_a_layout_raises_is_in_the_report() -> None:
    report = parity(programs.build, programs.raising, ["accumulation", "checkpointed"])
    assert not report.same
    assert report.failed == {"accumulation": "ValueError: no such row on rank 0"}
    assert "accumulation raised: ValueError: no such row" in str(report)
    with pytest.raises(ValueError, match="no row"):
        parity(programs.build, lambda model, part: fail("no row"), ALONE)


def fail(text: str) -> None:
    raise ValueError(text)


def test_the_report_is_data_text_and_a_table() -> None:
    report = parity(programs.build, programs.mean_of_counted, ["accumulation"])
    assert "accumulation (8)" in str(report)
    assert "router.weight, router.bias, experts.0.weight, experts.0.bias and 4 more" in str(report)
    assert dataclasses.is_dataclass(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(report, "params", ())  # noqa: B010
    rich = pytest.importorskip("rich.console").Console(width=120)
    with rich.capture() as printed:
        rich.print(report)
    assert "a mean of means" in printed.get()


def test_parts() -> None:
    batch = torch.arange(10)
    layout = Layout("both", micro_batches=2)
    parts = [part for rank in range(2) for part in layout.parts(rank, 2)]
    assert [part.is_last for part in parts] == [False, True, False, True]
    assert torch.equal(torch.cat([part.rows(batch) for part in parts]), batch)
    assert Layout("same", ranks="repeat").parts(1, 2) == [BatchPart()]


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layouts": ["dpp"]}, r"layouts\[0\]: expected 'single', 'ddp', 'fsdp'.*'dpp'"),
        ({"layouts": ["tensor"]}, r'Layout\("tensor", plan, ranks="repeat"\)'),
        ({"layouts": ["ddp", "ddp"]}, r"layouts\[1\]: expected a name of its own, got 'ddp'"),
        ({"layouts": [Layout("a", ranks="each")]}, r"layouts\[0\]\.ranks: expected 'divide'"),
        ({"layouts": [Layout("a", micro_batches=0)]}, r"layouts\[0\]\.micro_batches"),
        ({"layouts": [Layout("a", wrap=None)]}, r"layouts\[0\]\.wrap: expected a function"),
        ({"world_size": 1}, "world_size: expected an int of at least 2, got 1"),
        ({"rtol": 0.0}, "rtol: expected a positive number"),
        ({"timeout": None}, "timeout: expected a positive number"),
        ({"build": nn.Linear(1, 1).weight}, "build: expected a function"),
        ({"step": None}, "step: expected a function"),
        (
            {"step": lambda model, part: None},
            r"step: expected a function that other .*\n.*def step",
        ),
        ({"build": lambda: nn.Linear(1, 1)}, "build: expected a function that other processes"),
        ({"layouts": [Layout("a", lambda module, mesh: module)]}, "wrap of 'a': expected a func"),
    ],
)
def test_refusals_come_before_anything_runs(
    options: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(comparison, "ranks", never)
    monkeypatch.setattr(comparison, "run_parts", never)
    options = {"build": programs.build, "step": programs.step} | options
    with pytest.raises(gradkit.OptionError, match=f"(?s){text}"):
        parity(**options)


def test_functions_of_an_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(programs.step, "__module__", "__main__")
    monkeypatch.setattr(main, "step", programs.step, raising=False)
    monkeypatch.delattr(main, "__file__", raising=False)
    assert b"__main__" in pickle.dumps(programs.step)
    with pytest.raises(gradkit.OptionError, match="typed into an interpreter"):
        parity(programs.build, programs.step, "ddp")


@pytest.mark.parametrize(
    ("build", "step", "text"),
    [
        (lambda: None, programs.step, r"build\(\): expected a module"),
        (programs.build, lambda model, part: 3.0, r"step\(\): loss: expected a tensor"),
        (programs.build, lambda model, part: {"a": None}, r"step\(\): a: expected a tensor"),
    ],
)
def test_what_is_no_module_or_loss_is_refused(build: Any, step: Any, text: str) -> None:
    with pytest.raises(gradkit.StructureError, match=text):
        parity(build, step, ALONE)


def test_a_step_without_gradients_is_refused() -> None:
    with pytest.raises(gradkit.UnreachedParamError, match=r"call \.backward\(\) in it"):
        parity(programs.build, lambda model, part: None, ALONE)


def test_weights_that_differ_are_refused() -> None:
    seeds = iter(range(9))

    def build() -> nn.Module:
        torch.manual_seed(next(seeds))
        return programs.build()

    with pytest.raises(gradkit.StructureError, match="the same weights at each call"):
        parity(build, programs.step, ALONE)


def test_layouts_that_the_machine_cannot_run_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: Any, **options: Any) -> None:
        raise RuntimeError("torch.compile is not supported here")

    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.setattr(torch, "compile", no_compiler)
    report = parity(programs.build, programs.step, ["ddp", "compiled", *ALONE])
    assert report.same
    assert report.skipped == {
        "ddp": "this torch is built without gloo",
        "compiled": "torch.compile is not supported here",
    }
    assert "ddp was skipped: this torch is built without gloo" in str(report)


# --- Ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    """Two processes for all tests of this file, which wait for each other for seconds only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda kind: forking())
        with ranks(2, timeout=6) as run:
            yield run


@pytest.fixture
def over_ranks(shared: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ParityReport]:
    """`parity` on processes that have started."""
    monkeypatch.setattr(comparison, "ranks", lambda size, timeout: contextlib.nullcontext(shared))
    return parity


def kinds(report: ParityReport, name: str) -> dict[str, str]:
    assert name not in report.failed, report
    return {param: one.kind for param, one in report.differences[name].items()}


@pytest.mark.processes
@pytest.mark.parametrize("step", [programs.step, programs.counted])
def test_right_layouts_are_equal(over_ranks: Any, step: Any) -> None:
    both = Layout("ddp in micro-batches", programs.wrap, micro_batches=2)
    report = over_ranks(programs.build, step, ["ddp", "fsdp", programs.TENSOR, both])
    assert report.same, report
    assert report.layouts == ("ddp", "fsdp", "tensor", "ddp in micro-batches")


@pytest.mark.processes
def test_clipping_by_hand_is_equal_where_all_ranks_have_the_gradient(over_ranks: Any) -> None:
    assert over_ranks(programs.build, programs.clipped, ["ddp"]).same


@pytest.mark.processes
@pytest.mark.parametrize(
    ("bug", "step", "named"),
    [
        ("auxiliary loss", programs.step, "without loss 'aux'"),
        ("ddp", programs.mean_of_counted, "a mean of means"),
        ("missing reduction", programs.step, "part 0 of 2 only"),
        ("doubled norm", programs.clipped, "x 0.7071: 1 / the root of the world size"),
        ("sum", programs.step, "x 2: the world size"),
    ],
)
def test_planted_bugs_are_named(over_ranks: Any, bug: str, step: Any, named: str) -> None:
    report = over_ranks(programs.build, step, [bugged(bug), "fsdp"])
    if bug != "auxiliary loss":
        assert list(report.differences[bug]) == list(report.params)  # the first layer first
    else:
        assert list(report.differences[bug]) == ["router.weight", "router.bias"]
    assert set(kinds(report, bug).values()) == {named}
    assert kinds(report, "fsdp") == (kinds(report, bug) if bug == "ddp" else {})
    assert named in str(report)
    assert {one.ranks for one in report.differences[bug].values()} == {(0, 1)}


@pytest.mark.processes
def test_dropout_seeds_that_differ_are_named(over_ranks: Any) -> None:
    layouts = [Layout("repeat", ranks="repeat"), Layout("seeds", programs.seed_each, "repeat")]
    report = over_ranks(programs.build_with_dropout, programs.dropped, [*layouts, "ddp"])
    assert kinds(report, "repeat") == {}
    assert kinds(report, "seeds")["router.weight"] == "random numbers"
    assert "seeds of the ranks differ" in report.differences["seeds"]["router.weight"].why
    assert "module.eval()" in report.differences["ddp"]["router.weight"].why


@pytest.mark.processes
@pytest.mark.parametrize("bug", ["frozen", "frozen in the step"])
def test_a_frozen_rank_is_named(over_ranks: Any, bug: str) -> None:
    layout = Layout(bug, programs.freeze_on_one) if bug == "frozen" else bugged(bug)
    report = over_ranks(programs.build, programs.with_frozen, [layout, "ddp"])
    frozen = {name for name, one in report.differences[bug].items() if one.kind == "frozen"}
    assert frozen == {"head.weight"} | ({"head.bias"} if bug != "frozen" else set())
    assert report.differences[bug]["head.weight"].ranks == (1,)
    assert kinds(report, "ddp") == {}  # the ranks have not lost each other


@pytest.mark.slow
@pytest.mark.processes
def test_a_layer_that_one_rank_does_not_use_is_named(over_ranks: Any) -> None:
    report = over_ranks(programs.build_with_spare, programs.with_spare, [bugged("unused"), "ddp"])
    first = report.differences["unused"]["spare.weight"]
    assert (first.kind, first.ranks) == ("zero", (1,))
    assert "unused" in report.failed  # the other rank waited for it
    assert kinds(report, "ddp") == {}


@pytest.mark.processes
def test_a_rank_that_raises_or_dies_ends_its_layout_only(over_ranks: Any) -> None:
    layouts = ["ddp", Layout("dies", programs.die), "fsdp"]
    report = over_ranks(programs.build, programs.raising, layouts)
    assert report.failed["ddp"] == "ValueError: no such row on rank 1"
    assert "the process ended" in report.failed["dies"]
    assert over_ranks(programs.build, programs.step, ["fsdp"]).same


@pytest.mark.processes
def test_weights_of_ranks_that_differ_are_refused(over_ranks: Any) -> None:
    with pytest.raises(gradkit.StructureError, match="the same weights at each call"):
        over_ranks(programs.build_differently, programs.step, ["ddp"])


@pytest.mark.slow
@pytest.mark.processes
def test_processes_are_started_and_ended() -> None:
    before = {*multiprocessing.active_children()}
    torch.set_default_dtype(torch.float64)
    try:
        report = parity(partial(nn.Linear, 4, 2), programs.default_step, ["ddp"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.same, report
    for process in {*multiprocessing.active_children()} - before:
        process.join(10)
    assert {*multiprocessing.active_children()} <= before


SCRIPT = """
from tests.distributed import parity_programs as programs
from gradkit.distributed import parity
print(parity(programs.build, programs.step, ["ddp", "accumulation"]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(gradkit.__file__).parents[1])
    command = [sys.executable, str(tmp_path / "script.py")]
    environment = os.environ | {"PYTHONPATH": root}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "is parity called under __main__?" in run.stdout
    assert "accumulation against one process: the same" in run.stdout


def test_inside_of_a_process_group_it_is_refused(tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
    try:
        with pytest.raises(gradkit.CollectiveError, match="call parity in one process"):
            parity(programs.build, programs.step, ALONE)
    finally:
        torch.distributed.destroy_process_group()


# --- The plugin ----------------------------------------------------------------------------------

TESTS = """
from tests.distributed import parity_programs as programs

def test_right(parity):
    assert parity(programs.build, programs.counted, ["accumulation"]).same

def test_wrong(parity):
    parity(programs.build, programs.mean_of_counted, ["accumulation"])
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "option", [pytest.param((), marks=pytest.mark.slow), ("--gradkit-parity",)]
)
def test_the_plugin(tmp_path: Path, option: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # none of a folder above
    command = [sys.executable, "-m", "pytest", "-q", "-rs"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), *option, str(tmp_path)]
    root = Path(gradkit.__file__).parents[1]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if option:
        assert run.returncode == 1, run.stdout + run.stderr
        assert "1 failed, 1 passed" in run.stdout
        assert "router.weight, router.bias" in run.stdout
        assert "a mean of means" in run.stdout
    else:
        assert run.returncode == 0, run.stdout + run.stderr
        assert "2 skipped" in run.stdout
        assert "pytest --gradkit-parity" in run.stdout


IMPORTS_NOTHING = """
import sys

def test_nothing_of_gradkit_but_the_plugin() -> None:
    ours = {name for name in sys.modules if name.partition(".")[0].startswith("gradkit")}
    assert ours == {"gradkit_parity", "gradkit_parity.plugin"}
    assert "torch" not in sys.modules
"""


@pytest.mark.processes
def test_pytest_with_the_plugin_imports_no_gradkit(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(IMPORTS_NOTHING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # none of a folder above
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
