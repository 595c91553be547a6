"""explain: which loss reaches which parameter, by the graph alone, and why not."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._core.graph import nodes_below
from gradkit._core.tables import folded
from gradkit.report import Explanation, explain
from tests.helpers import Halve, unchanged
from tests.strategies import Program, build, programs


def statuses(found: Explanation) -> dict[str, dict[str, str]]:
    return {
        loss: {param: verdict.status for param, verdict in by_param.items()}
        for loss, by_param in found.verdicts.items()
    }


def leaf(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


@pytest.fixture
def model(device: torch.device) -> nn.ModuleDict:
    trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    heads = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
    return nn.ModuleDict({"trunk": trunk, "heads": heads}).to(device)


def losses_of(model: nn.ModuleDict, device: torch.device) -> dict[str, Tensor]:
    features = model["trunk"](torch.randn(3, 4, device=device))
    return {name: head(features).square().mean() for name, head in model["heads"].items()}


# --- Laws ----------------------------------------------------------------------------------------


@given(program=programs())
def test_reached_is_where_the_engine_brings_a_gradient(
    device: torch.device, program: Program
) -> None:
    """What can be reached is what autograd.grad returns, but for Halve, which returns None [C6]."""
    graph = build(program, device, torch.float64)
    losses = graph.losses
    with unchanged(*graph.leaves, *losses):
        found = explain(losses, graph.leaves)
    for index, loss in enumerate(losses):
        grads: tuple[Tensor | None, ...] = (None,) * len(graph.leaves)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, graph.leaves, retain_graph=True, allow_unused=True)
        for leaf_index, grad in enumerate(grads):
            verdict = found.verdicts[f"loss[{index}]"][f"param[{leaf_index}]"]
            if grad is not None:
                assert verdict.status == "reached"
            elif "halve" not in {op for op, _, _ in program.ops}:
                assert verdict.status in ("not in the graph", "constant loss", "detached")


@given(program=programs())
def test_the_parts_are_a_partition_of_the_graph(device: torch.device, program: Program) -> None:
    graph = build(program, device, torch.float32)
    found = explain(graph.losses, graph.leaves)
    live = [loss for loss in graph.losses if loss.requires_grad]
    every = {n for n in nodes_below(live) if "AccumulateGrad" not in n.name()}
    assert sum(part.nodes for part in found.parts) == found.nodes == len(every)
    assert sum(part.nodes for part in found.parts if len(part.losses) > 1) == found.shared
    for name, loss in zip(found.losses, graph.losses, strict=True):
        below = nodes_below([loss]) if loss.requires_grad else set()
        mine = {node for node in below if "AccumulateGrad" not in node.name()}
        assert found.losses[name].nodes == len(mine)
        assert sum(part.nodes for part in found.parts if name in part.losses) == len(mine)
        others = [one for one in live if one is not loss]
        if sum(one is loss for one in graph.losses) == 1:
            assert found.losses[name].own == len(mine - nodes_below(others))
    for part in found.parts:
        for index in part.below:
            assert set(part.losses) < set(found.parts[index].losses)
    placed = [param for part in found.parts for param in part.params]
    assert sorted(placed) == sorted(name for name, losses in found.params.items() if losses)


# --- Why not -------------------------------------------------------------------------------------


def test_a_trunk_with_two_heads(device: torch.device, model: nn.ModuleDict) -> None:
    found = explain(losses_of(model, device), model)
    assert found.params["trunk.0.weight"] == ("a", "b")
    assert found.params["heads.a.bias"] == ("a",)
    assert found.verdicts["a"]["heads.b.weight"].status == "not in the graph"
    assert [part.losses for part in found.parts] == [("a",), ("b",), ("a", "b")]
    assert [found.losses[name].part for name in "ab"] == [0, 1]
    assert found.parts[0].below == found.parts[1].below == (2,)
    # Linear, square, mean; the trunk is Linear, ReLU, Linear, and two transposed weights.
    assert found.losses["a"].own == found.losses["b"].own == 4
    assert found.shared == 5
    assert "per_loss_grads" in found.suggestion


def test_no_suggestion_where_only_a_leaf_is_shared(device: torch.device) -> None:
    w = leaf(device, 3)
    found = explain([w.sum(), (2 * w).sum()], {"w": w})
    assert found.params["w"] == ("loss[0]", "loss[1]")
    assert found.shared == 0
    assert found.suggestion == ""


def test_no_suggestion_that_would_be_refused(device: torch.device) -> None:
    w = leaf(device, 3)
    layer = nn.Linear(3, 3).to(device)

    def suggestion(h: Tensor, params: Any) -> str:
        return explain({"a": h.sum(), "b": (h * h).sum()}, params).suggestion

    assert suggestion(w.exp(), w)
    assert not suggestion(w.exp(), layer)  # none is reached
    assert not suggestion(checkpoint(layer, w, use_reentrant=True), w)
    h = w.exp()
    (h * h).sum().backward()
    assert not suggestion(h, w)  # freed
    h = w.exp()
    losses = {"a": h.sum(), "b": (2 * h).sum()}
    h.add_(1)
    assert not explain(losses, [w, h]).suggestion  # changed in place
    vectors = explain({"a": w.exp() * 2, "b": (h := w.exp()) * 2, "c": h * 3}, w)
    assert "per_loss_grads" in vectors.suggestion
    assert "value_and_grads" not in vectors.suggestion


def test_frozen_before_and_after(device: torch.device, model: nn.ModuleDict) -> None:
    model["heads"]["a"].bias.requires_grad_(False)
    losses = losses_of(model, device)
    model["trunk"][0].bias.requires_grad_(False)  # autograd.grad raises for it now [C9]
    found = explain(losses, model)
    before, after = (found.verdicts["a"][n] for n in ("heads.a.bias", "trunk.0.bias"))
    assert before.status == after.status == "frozen"
    assert "since the loss was computed" in after.why
    assert "since" not in before.why


def test_constants_and_detached(device: torch.device) -> None:
    w, v = leaf(device, 3), leaf(device, 3)
    with torch.no_grad():
        untracked = w.sum()
    losses = {
        "no_grad": untracked,
        "number": torch.zeros((), device=device),
        "aux": (w.detach() * v).sum(),
        "fit": w.sum(),
    }
    found = explain(losses, {"w": w})
    assert statuses(found) == {
        "no_grad": {"w": "constant loss"},
        "number": {"w": "constant loss"},
        "aux": {"w": "detached"},
        "fit": {"w": "reached"},
    }
    assert found.losses["aux"].ends.startswith("The graph of 'aux' ends before any parameter")
    assert "a float32 tensor of shape (3,)" in found.losses["aux"].ends
    assert found.losses["no_grad"].part is None
    assert all(not found.losses[name].ends for name in ("no_grad", "number", "fit"))


def test_another_tensor_with_the_same_memory(device: torch.device) -> None:
    w = leaf(device, 3)
    for other in (w.data.requires_grad_(), w.detach().requires_grad_()):
        verdict = explain((other * 2).sum(), w).verdicts["loss"]["param"]
        assert verdict.status == "not in the graph"
        assert "same memory" in verdict.why
    verdict = explain(w.sum(), w[1:]).verdicts["loss"]["param"]  # made apart [C3]
    assert "same memory" in verdict.why


def test_parts_of_one_vector_have_each_their_own_memory(device: torch.device) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}).to(device)
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    verdicts = explain(model["a"](torch.ones(1, 3, device=device)).sum(), model).verdicts["loss"]
    assert verdicts["b.weight"].status == "not in the graph"
    assert "same memory" not in verdicts["b.weight"].why


def test_changed_in_place(device: torch.device) -> None:
    h = leaf(device, 3) * 1
    loss = (h * h).sum()
    h.add_(1)
    assert explain(loss, h).verdicts["loss"]["param"].status == "changed in place"  # [C8]
    base = leaf(device, 4) * 1
    view = base[:2]
    loss = view.sum()
    base.mul_(2)
    assert explain(loss, view).verdicts["loss"]["param"].status == "changed in place"  # [L2]


def test_moved_since(device: torch.device) -> None:
    layer = nn.Linear(3, 1).to(device)
    loss = layer(torch.ones(1, 3, device=device)).sum()
    layer.double()
    assert explain(loss, layer).verdicts["loss"]["weight"].status == "moved"


def test_made_in_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        layer = nn.Linear(3, 1).to(device)
    loss = layer(torch.ones(1, 3, device=device)).sum()
    verdict = explain(loss, layer).verdicts["loss"]["weight"]
    assert verdict.status == "made in inference mode"


class Tagged(torch.Tensor):
    pass


def test_a_param_of_a_class_of_its_own(device: torch.device) -> None:
    w = leaf(device, 3).detach().as_subclass(Tagged).requires_grad_()
    loss = (w * 2).sum()
    assert explain(loss, w).verdicts["loss"]["param"].status == "reached"
    _, grad = gradkit.value_and_grads(loss, w)
    assert torch.equal(grad.as_subclass(torch.Tensor), torch.full((3,), 2.0, device=device))


@pytest.mark.parametrize(
    "function",
    [
        lambda block: block,
        lambda block: lambda x: block(x),
        lambda block: block.forward,
        lambda block: lambda x, layers=(block,): layers[0](x),
        lambda block: lambda x: torch.nn.functional.linear(x, block.weight, block.bias),
    ],
)
def test_inside_of_a_reentrant_checkpoint(device: torch.device, function: Any) -> None:
    """autograd.grad returns None for what is inside, without a word [F1]."""
    block, other = nn.Linear(2, 2).to(device), leaf(device, 2)
    x = leaf(device, 1, 2)
    loss = checkpoint(function(block), x * other, use_reentrant=True).sum()
    found = explain({"fit": loss}, {"block": block, "other": other, "apart": leaf(device, 1)})
    assert statuses(found)["fit"] == {
        "block.weight": "reentrant checkpoint",
        "block.bias": "reentrant checkpoint",
        "other": "reached",
        "apart": "not in the graph",
    }
    assert "reentrant checkpoint" in found.verdicts["fit"]["apart"].why
    assert "use_reentrant=False" in found.losses["fit"].notes[0]
    with pytest.raises(gradkit.UnsupportedGraphError):
        gradkit.value_and_grads(loss, block)


def test_a_checkpoint_that_is_not_reentrant_is_seen_through(device: torch.device) -> None:
    block = nn.Linear(2, 2).to(device)
    loss = checkpoint(block, torch.ones(1, 2, device=device), use_reentrant=False).sum()
    found = explain(loss, block)
    assert set(statuses(found)["loss"].values()) == {"reached"}
    assert found.losses["loss"].notes == ()


def test_a_freed_graph(device: torch.device) -> None:
    w, v = leaf(device, 3), leaf(device, 3)
    trunk = (w * w).exp()
    first, second, apart = trunk.sum(), trunk.mean(), (v * v).sum()
    torch.autograd.grad(first, w)
    found = explain({"first": first, "second": second, "apart": apart}, [w, v])
    notes = {name: " ".join(graph.notes) for name, graph in found.losses.items()}
    assert "freed" in notes["first"]
    assert "freed" in notes["second"]
    assert notes["apart"] == ""
    # What is freed above nothing in params is not met.
    assert explain({"first": first}, [v]).losses["first"].notes == ()


def test_a_module_sharded_by_fsdp(device: torch.device, gloo: None) -> None:
    """Its parameters are not in the graph [M5]."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type != "cpu":
        pytest.skip("gloo meshes are made on the CPU")
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    mesh = init_device_mesh("cpu", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    loss = model(torch.randn(2, 3)).sum()
    for params in (model, dict(model.named_parameters())):
        found = explain(loss, params)
        assert set(statuses(found)["loss"].values()) == {"sharded"}
    assert "sharded by FSDP" in explain(loss, model).notes[0]
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_module_in_ddp(device: torch.device, gloo: None) -> None:
    """Its parameters are reached, but the gradients are this process's [M1]."""
    if device.type != "cpu":
        pytest.skip("a process group of gloo")
    layer = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    found = explain(layer(torch.randn(2, 3)).sum(), layer)
    assert set(statuses(found)["loss"].values()) == {"reached"}
    assert "not be reduced" in found.notes[0]


@pytest.fixture
def gloo(tmp_path: Path) -> Any:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- Odd losses and params -----------------------------------------------------------------------


def test_a_loss_that_is_a_param_or_stands_above_another(device: torch.device) -> None:
    p = leaf(device)
    found = explain({"itself": p, "twice": 2 * p, "more": (2 * p) * 3}, {"p": p})
    assert found.params["p"] == ("itself", "twice", "more")
    assert found.losses["itself"].nodes == 0
    middle = 2 * p
    found = explain({"below": middle, "above": middle * 3}, {"p": p})
    assert (found.losses["below"].own, found.losses["above"].own) == (0, 1)
    assert found.parts[found.losses["below"].part].losses == ("below", "above")


def test_tied_nested_vector_and_intermediate(device: torch.device) -> None:
    w, v = leaf(device, 3), leaf(device, 3)
    h = w * 2
    h.retain_grad()
    found = explain(
        {"deep": [h.square(), {"x": v.sum()}], "wide": w * v},
        {"w": w, "h": [h, None], "again": w, "v": v},
    )
    assert list(found.losses) == ["deep[0]", "deep[1].x", "wide"]
    assert list(found.params) == ["w", "h[0]", "again", "v"]
    assert found.tied == (("w", "again"),)
    assert found.params["h[0]"] == ("deep[0]",)
    assert h.grad is None


def test_iterators_optimizers_complex_sparse_and_second_order(device: torch.device) -> None:
    layer = nn.Linear(2, 1).to(device)
    loss = layer(torch.ones(1, 2, device=device)).sum()
    for params in (layer.parameters(), torch.optim.SGD(layer.parameters(), lr=1)):
        assert list(explain(loss, params).params) == ["param[0]", "param[1]"]
    c = torch.randn(2, dtype=torch.complex64, device=device, requires_grad=True)
    assert explain(c.abs().sum(), c).params["param"] == ("loss",)
    rows = nn.Embedding(4, 2, sparse=True).to(device)
    assert explain(rows(torch.tensor([1], device=device)).sum(), rows).params["weight"]
    w = leaf(device, 3)
    (grad,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    assert explain(grad.sum(), w).params["param"] == ("loss",)


def test_what_is_told_of_a_custom_function_is_what_can_be_known(device: torch.device) -> None:
    w, v = leaf(device, 3), leaf(device, 3)
    found = explain(Halve.apply(w, v).sum(), {"w": w, "v": v})
    assert found.params == {
        "w": ("loss",),
        "v": ("loss",),
    }  # its None for v shows when it runs [C6]


def test_inside_of_modes_and_transforms(device: torch.device) -> None:
    w = leaf(device, 3)
    loss = w.sum()
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast(device.type)):
        with mode:
            assert explain(loss, w).params["param"] == ("loss",)
    seen = []

    def inside(x: Tensor) -> Tensor:
        seen.append(explain((x * x).sum(), {"x": x}).params["x"])
        return (x * x).sum()

    torch.func.grad(inside)(torch.ones(2, device=device))
    assert seen == [("loss",)]


@pytest.mark.parametrize(
    ("losses", "params", "error"),
    [
        (lambda w: 1.0, lambda w: w, gradkit.LeafTypeError),
        (lambda w: torch.tensor(1), lambda w: w, gradkit.LeafTypeError),
        (lambda w: w.sum(), lambda w: "w", gradkit.LeafTypeError),
        (lambda w: w.sum(), lambda w: torch.tensor([1]), gradkit.LeafTypeError),
        (lambda w: {}, lambda w: w, gradkit.StructureError),
        (lambda w: w.sum(), lambda w: [], gradkit.StructureError),
    ],
)
def test_what_is_no_loss_or_param_is_refused(
    device: torch.device, losses: Any, params: Any, error: type[Exception]
) -> None:
    w = leaf(device, 3)
    with pytest.raises(error):
        explain(losses(w), params(w))


# --- Nothing runs, and it is quick ---------------------------------------------------------------


def test_nothing_runs_and_nothing_is_freed(device: torch.device) -> None:
    ran = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ran.append("backward")
            return 2 * grad

    def block(x: Tensor) -> Tensor:
        ran.append("forward")
        return x.exp()

    w = leaf(device, 3)
    w.register_hook(lambda grad: ran.append("hook"))
    loss = Watched.apply(checkpoint(block, w * w, use_reentrant=False)).sum()
    ran.clear()
    state = torch.get_rng_state()
    with unchanged(w, loss):
        found = explain({"a": loss, "b": (w * w).sum()}, w)
        str(found)
        found._repr_html_()
    assert ran == []
    assert torch.equal(state, torch.get_rng_state())
    loss.backward()
    assert ran == ["backward", "forward", "hook"]


def chain(device: torch.device, length: int) -> Tensor:
    y = leaf(device)
    for _ in range(length):
        y = y * 1.01
    return y


def least(function: Any, *args: Any) -> float:
    """Return the least processor time of some calls: other processes do not lengthen it."""
    times = []
    for _ in range(5):
        start = time.thread_time()
        function(*args)
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.long
def test_the_time_is_linear_in_the_graph(device: torch.device) -> None:
    """A graph ten times as long takes ten times as long, and not a hundred times."""
    w = leaf(device)
    short, long = (least(explain, [chain(device, length)], w) for length in (2_000, 20_000))
    assert long < 40 * short


@pytest.mark.long
def test_the_time_is_linear_in_the_params(device: torch.device) -> None:
    few, many = ([leaf(device) for _ in range(count)] for count in (300, 3_000))
    losses = [sum(params) for params in (few, many)]
    assert least(explain, losses[1], many) < 40 * least(explain, losses[0], few)


# --- What it looks like --------------------------------------------------------------------------


def test_text_folds_what_is_alike(device: torch.device, model: nn.ModuleDict) -> None:
    losses = losses_of(model, device) | {"off": torch.zeros((), device=device)}
    text = str(explain(losses, model))
    lines = [line.split() for line in text.splitlines()]
    assert ["trunk.*", "4", "reached", "reached", "constant", "loss"] in lines
    assert ["heads.a.*", "2", "reached", "not", "in", "the", "graph", "constant", "loss"] in lines
    assert "trunk.0.weight" not in text
    assert repr(explain(losses, model)) == text


@given(kinds=st.dictionaries(st.text("ab.", max_size=5), st.booleans(), min_size=1))
def test_what_is_folded_is_alike_and_begins_alike(
    device: torch.device, kinds: dict[str, bool]
) -> None:
    names = list(kinds)
    groups = folded(kinds)
    assert sorted(name for _, members, _ in groups for name in members) == sorted(names)
    for label, members, kind in groups:
        assert {kinds[name] for name in members} == {kind}
        prefix = label.removesuffix("*") if len(members) > 1 else label
        assert all(name.startswith(prefix) for name in members)


def test_html_and_rich_say_the_same_and_escape(device: torch.device) -> None:
    rich_console = pytest.importorskip("rich.console")
    w = leaf(device, 2)
    found = explain({"<b>[red]": w.sum()}, {"w": w})
    page = found._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;[red]" in page
    console = rich_console.Console(width=120, record=True, file=StringIO())
    console.print(found)
    assert "<b>[red]" in console.export_text()


def test_the_picture_shows_every_loss_part_and_param(
    device: torch.device, model: nn.ModuleDict
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    model["unused"] = nn.Linear(2, 2).to(device)
    losses = losses_of(model, device) | {"off": torch.zeros((), device=device)}
    found = explain(losses, model)
    ax = figure.subplots()
    assert found.plot(ax) is ax
    texts = [text.get_text() for text in ax.texts if text.get_text()]
    assert {"a", "b", "off\n(constant)"} <= set(texts)
    assert "shared: 5 nodes\ntrunk.*" in texts
    assert "head: 4 nodes\nheads.a.*" in texts
    assert "reached by none\nunused.*" in texts
    figure.canvas.draw()


def test_the_picture_of_many_losses_shows_alike_ones_as_one(device: torch.device) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    trunk = nn.Linear(2, 2).to(device)
    heads = nn.ModuleDict({f"t{i}": nn.Linear(2, 1) for i in range(40)}).to(device)
    features = trunk(torch.ones(1, 2, device=device)).tanh()
    losses = {name: head(features).sum() for name, head in heads.items()}
    losses |= {"norm": trunk.weight.sum(), "odd": features.exp().sum()}
    losses |= {name: torch.zeros((), device=device) for name in ("off", "none")}
    found = explain(losses, nn.ModuleDict({"trunk": trunk, "heads": heads}))
    ax = found.plot(figure.subplots())
    texts = {text.get_text() for text in ax.texts if text.get_text()}
    first = "\n".join(f"t{i}" for i in range(4))
    assert {f"{first}\nand 36 more", "norm", "odd", "off\nnone\n(constant)"} < texts
    assert "40 heads: 3 nodes each\nheads.*" in texts
    assert {"head: 1 node", "head: 2 nodes"} < texts
    assert len(texts) <= 10
    few = {name: losses[name] for name in ("t0", "t1")}
    texts = {text.get_text() for text in explain(few, heads).plot(figure.subplots()).texts}
    assert {"t0", "t1", "head: 3 nodes\nt0.*", "head: 3 nodes\nt1.*"} < texts


def test_a_missing_extra_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    w = leaf(device, 2)
    found = explain(w.sum(), w)
    for name in ("matplotlib", "matplotlib.pyplot", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install gradkit\[plot\]"):
        found.plot()
    with pytest.raises(ImportError, match=r"rich is needed.*pip install gradkit\[plot\]"):
        found.__rich__()


def test_a_result_cannot_be_changed(device: torch.device) -> None:
    w = leaf(device, 2)
    result: Any = explain(w.sum(), w)
    with pytest.raises(FrozenInstanceError):
        result.nodes = 3


@pytest.mark.processes
def test_the_package_is_imported_on_first_use(device: torch.device) -> None:
    code = (
        "import sys, gradkit; assert 'gradkit.report' not in sys.modules;"
        "gradkit.report.explain; assert 'matplotlib' not in sys.modules;"
        "assert 'rich' not in sys.modules; print('report' in dir(gradkit))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"
