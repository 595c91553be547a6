"""The harness measures what it says, and every row of the table comes out; times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import gradkit
from benchmarks import (
    clipping,
    combining,
    compiling,
    fresh,
    functions,
    harness,
    heads,
    loops,
    memory,
    models,
    optimizing,
    processes,
    replicas,
    report,
    rooms,
    samplers,
    sharding,
    shards,
    staging,
    streaming,
    tasks,
    unrollers,
    unrolling,
)
from benchmarks.__main__ import main
from benchmarks.harness import Effort, Side, Timing, measure, order, quartiles, ratios
from benchmarks.heads import Size
from benchmarks.plan import Plan
from benchmarks.row import Row, Want, show, timed
from tests.processes import Ranks

Quick: TypeAlias = tuple[list[Row], Path]


def others_are_slow(ways: Mapping[str, object], *libraries: str) -> list[Any]:
    """Return the ways to parametrize a test by; those of other tools are in the slow tier."""
    return [pytest.param(way, marks=pytest.mark.slow if way in libraries else ()) for way in ways]


def busy(steps: int) -> Side:
    def run(_: object) -> int:
        total = 0
        for step in range(steps):
            total += step
        return total

    return Side(lambda: None, run)


def whole_table(test: Callable[..., None]) -> Callable[..., None]:
    """Mark what needs every row: one worker measures them all, once."""
    return pytest.mark.slow(pytest.mark.xdist_group("the table")(test))


@pytest.fixture(scope="module")
def quick(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Quick:
    folder = tmp_path_factory.mktemp("results")
    rows = main(["--quick", "--device", str(device), "--output", str(folder)])
    return rows, folder


def test_twice_the_work_takes_twice_the_time(device: torch.device) -> None:
    timings = measure(
        {"one": busy(20_000), "two": busy(40_000)}, device, Effort(most=15, seconds=0)
    )
    assert 1.4 < harness.ratio(timings["two"], timings["one"]) < 2.8
    assert len(timings["one"].samples) == len(timings["two"].samples) == 15


def test_inputs_are_fresh_and_not_timed(device: torch.device) -> None:
    built: list[object] = []

    def build() -> object:
        busy(200_000).run(None)
        built.append(object())
        return built[-1]

    seen: list[object] = []
    slow = Side(build, seen.append)
    timings = measure(
        {"slow": slow, "fast": busy(20_000)}, device, Effort(most=15, seconds=0, warmup=2)
    )
    assert seen == built
    assert len(set(map(id, built))) == 17
    assert timings["slow"].typical < timings["fast"].typical


def test_threads_are_put_back(device: torch.device) -> None:
    inside: list[int] = []
    side = Side(lambda: None, lambda _: inside.append(torch.get_num_threads()))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure({"side": side}, device, Effort(least=3, most=3, seconds=0))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert set(inside) == {1}


def test_the_order_turns(device: torch.device) -> None:
    assert ["".join(order("AB", turn)) for turn in range(4)] == ["AB", "BA", "BA", "AB"]
    firsts = {order("ABC", turn)[0] for turn in range(6)}
    assert firsts == {"A", "B", "C"}


def test_effort_stops_between_least_and_most(device: torch.device) -> None:
    effort = Effort(least=15, most=20, seconds=1.0)
    assert not effort.enough(14, 9.0)
    assert effort.enough(15, 1.0)
    assert not effort.enough(19, 0.5)
    assert effort.enough(20, 0.0)


def test_time_that_others_take_does_not_count(device: torch.device) -> None:
    asleep = Side(lambda: None, lambda _: time.sleep(0.01))
    effort = Effort(least=3, most=3, seconds=0)
    on_cpu = torch.device("cpu")
    assert measure({"asleep": asleep}, on_cpu, effort)["asleep"].typical < 5e6
    passed = measure({"asleep": asleep}, on_cpu, effort, time.perf_counter_ns)
    assert passed["asleep"].typical >= 1e7


def test_a_ratio_is_of_first_quartiles(device: torch.device) -> None:
    ours, theirs = Timing((20, 40, 60, 80, 1000)), Timing((10, 20, 30, 40, 50))
    assert (ours.typical, theirs.typical) == (40, 20)
    assert harness.ratio(ours, theirs) == 2.0
    assert ratios(ours, theirs) == [2.0, 2.0, 2.0, 2.0, 20.0]
    assert quartiles([1.0, 2.0, 3.0]) == (1.5, 2.5)
    row = timed("a", "b", {"gradkit": ours, "raw": theirs}, theirs="raw", limit=1.5)
    assert row.ratio == 2.0
    assert row.spread == (2.0, 2.0)
    assert row.verdict == "missed by 33.3%"


def test_a_row_comes_back_from_another_process(device: torch.device) -> None:
    row = Row(what="a", against="b", ratio=1.2, figure=1.2, spread=(1.0, 2.0), want=Want(1.1))
    assert Row.from_plain(json.loads(json.dumps(asdict(row)))) == row
    bare = Row(what="a", against="b", note="no such thing")
    assert Row.from_plain(json.loads(json.dumps(asdict(bare)))) == bare


def test_a_room_that_fails_is_a_row(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("-m benchmarks failed:\nTraceback\nValueError: no")

    monkeypatch.setattr(fresh, "call", fail)
    (row,) = rooms.measured("values", Plan(device))
    assert (row.what, row.verdict) == ("values", "not run: ValueError: no")


def test_no_room_begins_when_time_is_out(device: torch.device) -> None:
    arguments = ["--quick", "--device", str(device), "--minutes", "-1"]
    (row,) = main([*arguments, "--only", "values"])
    assert row.verdict == "not run: out of time; --only values"


@pytest.mark.processes
def test_a_room_that_takes_too_long_is_left_out(device: torch.device) -> None:
    (row,) = rooms.measured("values", Plan(device), seconds=0.2)
    assert row.verdict == "not run: out of time; --only values"


@pytest.mark.processes
def test_what_is_killed_is_killed_with_what_it_has_started(
    device: torch.device, tmp_path: Path
) -> None:
    number = tmp_path / "number"
    inner = "import time; time.sleep(60)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}]); "
    code += f"open({str(number)!r}, 'w').write(str(p.pid)); p.wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        fresh.python("-c", code, seconds=5)
    started = int(number.read_text())
    for _ in range(100):
        if not is_running(started):
            return
        time.sleep(0.1)
    raise AssertionError("it is still running")


def is_running(number: int) -> bool:
    """Return whether a process runs; one that has been killed may wait for its parent to see it."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{number}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row(what="", against="", ratio=1.0, figure=1.0, want=Want(1.0)), "met"),
        (Row(what="", against="", ratio=1.2, figure=1.2), "shown"),
        (Row(what="", against="", figure=70.0, want=Want(60.0, "ms")), "missed by 10.00 ms"),
        (Row(what="", against="", note="no such thing"), "not run: no such thing"),
    ],
)
def test_verdicts(row: Row, verdict: str, device: torch.device) -> None:
    assert row.verdict == verdict


def test_numbers_are_shown_with_their_unit(device: torch.device) -> None:
    assert show(0.1234, "ms") == "0.123 ms"
    assert show(12.345, "ms") == "12.35 ms"
    assert show(1.03, "x") == "1.03x"
    assert show(2, "collectives") == "2 collectives"


def test_peak_memory_is_exact(device: torch.device) -> None:
    size = 4 * 1024 * 1024

    def run(_: object) -> list[torch.Tensor]:
        first, second = (torch.zeros(size // 4, device=device) for _ in range(2))
        del first
        return [second]

    peak = memory.peak(Side(lambda: None, run), device)
    assert (peak.total, peak.results, peak.beyond) == (2 * size, size, size)


def test_both_ways_to_differentiate_heads_agree(device: torch.device) -> None:
    task = Size(4, 2, 3, 3).task(device)
    found: list[Any] = []
    for side in heads.sides(task).values():
        torch.manual_seed(0)
        found.append(side.run(side.build()))
    ours = [tuple(tree.values()) for tree in found[0]]
    torch.testing.assert_close(ours, list(map(tuple, found[1])), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # the libraries make torch warn of their hooks
@pytest.mark.parametrize("name", others_are_slow(samplers.PEERS, "Opacus", "BackPACK"))
@pytest.mark.parametrize("kind", ["dense", "convolutional", "pooled"])
def test_all_ways_to_differentiate_samples_agree(
    name: str, kind: str, device: torch.device
) -> None:
    task = (
        models.dense_classifier(4, 2, 3, device)
        if kind == "dense"
        else models.convolutional_classifier(2, (3, 4, 4), 3, device, pooled=kind == "pooled")
    )
    sides, problem = samplers.peer(name, task)
    if "is not installed" in problem:
        pytest.skip(problem)
    assert (list(sides), problem) == ([name], "")


def test_a_peer_with_other_gradients_is_shown(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(task: models.Classifier) -> Side:
        right = samplers.gradkits(task)
        return Side(right.build, lambda batch: gradkit.tree.scale(right.run(batch), 2))

    monkeypatch.setitem(samplers.PEERS, "off", off)
    found = samplers.peer("off", models.dense_classifier(4, 2, 3, device))
    assert found == ({}, "it gives other gradients")


@pytest.mark.parametrize(
    ("name", "library"), [("Opacus", "opacus"), ("BackPACK", "backpack"), ("TorchJD", "torchjd")]
)
def test_a_peer_that_is_not_installed_is_shown(
    name: str, library: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [library, *(m for m in sys.modules if m.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    if name == "TorchJD":
        problems = {row.note for row in combining.rows(Plan(device, quick=True))}
    else:
        problems = {samplers.peer(name, models.dense_classifier(4, 2, 3, device))[1]}
    (problem,) = problems
    assert problem.startswith(library)
    assert problem.endswith(" is not installed (make bench installs it)")


def test_both_ways_to_differentiate_a_function_agree(device: torch.device) -> None:
    found: list[Any] = []
    for side in functions.sides(models.layers(4, 2, 3, device)).values():
        torch.manual_seed(0)
        found.append(side.run(side.build()))
    (value, grads), (other_grads, other_value) = found
    torch.testing.assert_close((value, grads), (other_value, other_grads), rtol=0, atol=0)


def test_all_ways_to_combine_gradients_agree(device: torch.device) -> None:
    pytest.importorskip("torchjd")
    task = Size(4, 2, 3, 3, shared=True).task(device)
    found: list[torch.Tensor] = []
    for side in combining.sides(task).values():
        torch.manual_seed(0)
        result: Any = side.run(side.build())
        leaves = result.values() if isinstance(result, dict) else result
        found.append(torch.cat([leaf.flatten() for leaf in leaves]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_all_ways_to_a_gramian_agree(device: torch.device) -> None:
    pytest.importorskip("torchjd")
    found: list[torch.Tensor] = []
    for name in ("gram", "sets", "autogram"):
        torch.manual_seed(0)
        side = streaming.SIDES[name](Size(4, 2, 3, 3), device)
        found.append(side.run(side.build()))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of Opacus' hooks
@pytest.mark.parametrize("call", clipping.CALLS)
def test_all_ways_to_clip_agree(call: str, device: torch.device) -> None:
    pytest.importorskip("opacus")
    task = models.dense_classifier(4, 2, 3, device).copy(torch.float64)
    found: list[Any] = []
    for make in clipping.CALLS[call].values():
        side = make(task.copy())
        torch.manual_seed(0)
        result: Any = side.run(side.build())
        found.append(list(result.values()) if isinstance(result, dict) else result)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_all_ways_to_stage_agree(device: torch.device) -> None:
    found: list[Any] = []
    for side in staging.sides(4, 64, device).values():
        torch.manual_seed(0)
        found.append(side.run(side.build()))
    for _, grads in found[1:]:
        assert gradkit.tree.allclose(grads, found[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # the libraries are older than what they import
@pytest.mark.parametrize(
    "way", others_are_slow(unrollers.WAYS, unrollers.HIGHER, unrollers.TORCHOPT)
)
@pytest.mark.parametrize("kind", ["dense", "encoder"])
def test_all_ways_through_an_inner_loop_agree(way: str, kind: str, device: torch.device) -> None:
    task = (
        loops.dense(4, 3, 2, 6, device) if kind == "dense" else loops.encoder(4, 2, 3, 2, 6, device)
    )
    side, problem = unrollers.side(way, task)
    if "is not installed" in problem:
        pytest.skip(problem)
    assert problem == ""
    assert side is not None


def test_a_way_with_other_meta_gradients_is_shown(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(task: loops.Loop) -> Side:
        right = unrollers.plain(task)
        return Side(right.build, lambda course: gradkit.tree.scale(right.run(course), 1 + 1e-6))

    monkeypatch.setitem(unrollers.WAYS, unrollers.STORE, off)
    task = loops.dense(4, 2, 2, 3, device)
    assert unrollers.side(unrollers.STORE, task) == (None, "it gives other gradients")
    row = next(unrolling.rows(Plan(device, quick=True)))
    assert row.verdict == "not run: it gives other gradients"


@pytest.mark.parametrize("library", ["higher", "torchopt"])
def test_a_meta_learning_library_that_is_not_installed_is_shown(
    library: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [library, *(m for m in sys.modules if m.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    name = {"higher": unrollers.HIGHER, "torchopt": unrollers.TORCHOPT}[library]
    problems = {unrollers.side(name, loops.dense(4, 2, 2, 3, device))[1]}
    if library == "torchopt":
        problems |= {row.note for row in optimizing.rows(Plan(device, quick=True))}
    (problem,) = problems
    assert problem == f"{library} is not installed (make bench installs it)"


def test_both_ways_over_tasks_agree(device: torch.device) -> None:
    assert tasks.agree(tasks.Sines(4, 3, device))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TorchOpt is older than what it imports
def test_both_ways_to_step_agree(device: torch.device) -> None:
    pytest.importorskip("torchopt")
    assert optimizing.agree()


def check_ways_over_processes(device: torch.device) -> None:
    size = Size(4, 2, 3, 3)
    assert replicas.agree(size)
    sent = {
        name: replicas.collectives(side) for name, side in replicas.per_loss_sides(size).items()
    }
    params = sum(p.numel() for p in replicas.Heads(size).parameters())
    trunk = 2 * (4 * 4 + 4)
    head = params - trunk
    assert params == trunk + 3 * (4 + 1)
    assert sent[replicas.LOOP] == [4 * 3 * params]
    # What they have reduced before; then of each loss the trunk and its own head, in one, and
    # whether all ranks have what they said.
    assert sent["gradkit"] == [64, 4 * (3 * trunk + head) + 4]
    # For each loss which parameters it uses, and all of them.
    assert sum(sent[replicas.PASSES]) == 3 * (4 * params + 4 * (2 * 2 + 2 * 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # DDP makes torch warn of unused parameters
def test_all_ways_over_processes_agree(two: Ranks, device: torch.device) -> None:
    two.run(check_ways_over_processes)


def test_a_rank_of_the_benchmark_that_fails_is_told(device: torch.device, tmp_path: Path) -> None:
    how = {"rounds": 1, "rendezvous": str(tmp_path / "rendezvous")}
    with pytest.raises(RuntimeError, match="not enough values to unpack"):
        fresh.ranks("benchmarks.processes:compare", 2, shapes=[[1]], sizes=[], **how)


def check_ways_over_shards(device: torch.device) -> None:
    for call in shards.calls():
        assert shards.agree(call, shards.Net(4, 2, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch renames its collectives
def test_all_ways_over_shards_agree(two: Ranks, device: torch.device) -> None:
    two.run(check_ways_over_shards)


@pytest.mark.parametrize("room", [processes, sharding])
def test_processes_are_not_measured_on_a_gpu(room: Any, device: torch.device) -> None:
    (row,) = room.rows(Plan(torch.device("cuda"), quick=True))
    assert row.verdict.startswith("not run: it is measured over gloo")


def test_what_lies_where_a_tensor_lay_says_that_it_is_free(device: torch.device) -> None:
    kept, freed, unseen, over_unseen = (0, 10), (20, 10), (40, 10), (35, 20)
    history = [kept, freed, (20, -10), unseen, over_unseen, (90, -5), (35, -20), (60, 4)]
    assert memory.largest_total(history) == 30
    assert memory.largest_total([]) == 0


def test_what_cannot_be_compiled_is_shown(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(compiling, "_compiled", lambda *_: refuse)
    for row in compiling.rows(Plan(device, quick=True)):
        assert row.verdict == "not run: RuntimeError: no compiler"


def test_a_peer_that_cannot_run_is_shown(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("not on this machine")

    monkeypatch.setattr(heads, "_jac", refuse)
    peer = heads.torchjd(Size(4, 2, 3, 2).task(device), 2, device)
    assert peer.sides == {}
    assert peer.problem == "RuntimeError: not on this machine"


@whole_table
def test_every_row_has_a_ratio_or_says_why_not(quick: Quick) -> None:
    rows, _ = quick
    assert rows
    for row in rows:
        assert row.what
        assert row.against
        assert row.ratio is not None or row.note, row.what
        assert row.verdict.startswith(("met", "missed by", "shown", "not run: ")), row.verdict


@whole_table
def test_every_target_has_its_rows(quick: Quick) -> None:
    rows, _ = quick
    said = "\n".join(f"{row.what} | {row.against}" for row in rows)
    for part in (
        "training step with SGD, 1 linear layer, 2 tensors | zero_grad, backward, step",
        "training step with Adam, 1 linear layer",
        "value_and_grads, 8 params, 16 wide",
        "a custom Function in the graph | autograd.grad on the list",
        "value_and_grads, 200 params, a forward hook elsewhere",
        "a tensor hook in the graph",
        "20 params of a compiled module",
        "no hook or Function | autograd.grad in a loop",
        "K8, a forward hook elsewhere | autograd.grad in a loop",
        "inner loop of 3 steps | autograd.grad in the same loop",
        "a step of the loop of 3 over one of that of 2",
        "add_grads_, 4 params, 4 wide | _foreach_add_",
        "write_grads_, 4 params",
        "tree.clip_by_global_norm, 4 params, 4 wide | _foreach_norm",
        "call of func.make_functional, 1 linear layer, 2 tensors | functional_call",
        "instructions of a call | valgrind",
        "value_and_grads, what",
        "autograd.grad in a loop",
        "TorchJD jac",
        "peak memory,",
        "peak memory less results",
        "per_loss_grads batched",
        "per_loss_grads auto",
        "safe_retain of 10",
        "func.value_and_grads, 2 layers",
        "torch.func.grad_and_value, compiled",
        "itself, not compiled",
        "per_loss_grads, auto, MLP | ExpandedWeights",
        "per_sample_grads, MLP | Opacus",
        "per_sample_grads, MLP | BackPACK",
        "per_sample_grads, CNN C2 3x4x4 B3 | ExpandedWeights",
        "per_sample_grads, CNN C2 3x4x4 B3 | torch.func.vmap(grad)",
        "per_sample_grads, peak memory less results, chunks of 8",
        "| TorchJD UPGrad, matrix made before",
        "combine with UPGradWeighting, peak memory over the gradients",
        "gram, W8 D2 B4 K3 | TorchJD autogram",
        "gram, W8 D2 B4 K3, peak memory | one backward pass, and K times the largest gradient",
        "clipped_sum, MLP W4 D3 B3 | Opacus ghost clipping",
        "per_sample_norms, MLP W4 D3 B3, peak memory | Opacus ghost clipping",
        "func.staged_value_and_grads, 8 chunks, W4 D4 B32 | the whole batch at once",
        "unroll, store, MLP W4 D3 B2 T5 | create_graph loop",
        "unroll, store, MLP W4 D3 B2 T5 | higher",
        "unroll, store, MLP W4 D3 B2 T5 | TorchOpt",
        "unroll, recompute, peak memory over the data, MLP W4 D3 B3 T5 | create_graph loop",
        "unroll, recompute, peak memory over the data, MLP W4 D3 B3 T5 | TorchOpt",
        "unroll, recompute, encoder W4 H2 B2 S3 T5 | create_graph loop",
        "unroll, memory=4, encoder W4 H2 B2 S3 T5",
        "meta.mean_value_and_grads, 3 tasks",
        "meta.adam step, 4 tensors, without a graph | TorchOpt",
        "distributed.value_and_grads and step_, 1 process, 8 params, 4 wide | DDP: backward",
        "distributed.per_loss_grads with the forward pass, 1 process, W4 D2 B3 K2 | DDP",
        "distributed.per_loss_grads with the forward pass, 1 process, W4 D2 B3 K2 | autograd.grad",
        "distributed.per_loss_grads, collectives, W4 D2 B3 K2 | DDP: forward and backward a loss",
        "distributed.per_loss_grads, what a rank sends, W4 D2 B3 K2",
        "distributed.make_functional, loss and gradients, 1 process, W8 D2 B3 | fully_shard",
        "loss and gradients, 1 process, W8 D2 B3, peak memory | fully_shard",
        "gradient penalty, 1 process, W8 D2 B3, parameter memory | create_graph on the whole",
        "meta-gradient, 1 step of SGD, 1 process, W8 D2 B3, parameter memory",
        "import gradkit",
        "growth when leaves double",
        "growth when losses double",
        "growth when tensors kept double",
        "unroll, store, growth when inner steps double",
        "unroll, memory=4, growth of memory when inner steps double",
    ):
        assert part in said, part


@whole_table
def test_the_table_is_written_for_programs(quick: Quick, device: torch.device) -> None:
    rows, folder = quick
    (path,) = folder.glob("*.json")
    assert path.stem == f"{device.type}-torch{torch.__version__}"
    written = json.loads(path.read_text())
    assert {"device", "device_name", "date", "python", "versions", "threads"} <= set(written)
    assert written["versions"]["torch"] == torch.__version__
    assert [row["what"] for row in written["rows"]] == [row.what for row in rows]
    assert {"ratio", "spread", "want", "met", "verdict", "details"} <= set(written["rows"][0])


@whole_table
def test_the_picture_of_growth_is_written(quick: Quick) -> None:
    pytest.importorskip("matplotlib")
    _, folder = quick
    (picture,) = folder.glob("*-growth.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@whole_table
def test_the_plain_table_holds_every_row(quick: Quick) -> None:
    rows, _ = quick
    lines = report.plain(rows).splitlines()
    assert lines[0].split() == list(report.COLUMNS)
    assert len(lines) == 2 + len(rows)


@whole_table
def test_the_table_in_colour_holds_every_row(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    rows, _ = quick
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "1000")  # no cell breaks, whatever note a row has
    report.print_table(rows, "a title")
    printed = capsys.readouterr().out
    assert all(row.what in printed for row in rows)


def test_nothing_is_written_unasked(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.__main__.RESULTS", tmp_path / "results")
    main(["--quick", "--device", str(device), "--only", "retaining"])
    assert not list(tmp_path.iterdir())
