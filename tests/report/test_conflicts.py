"""conflicts: norms and cosines of per-loss gradients against plain torch, and their record."""

from __future__ import annotations

import csv
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import gradkit
from gradkit.report import Conflicts, History, conflicts
from tests.host_reads import host_reads
from tests.strategies import HOOKLESS, Program, build, programs


def vector(tree: Any) -> Tensor:
    leaves = [leaf for leaf in tree.values() if leaf is not None]
    return torch.cat([leaf.double().reshape(-1) for leaf in leaves]) if leaves else torch.zeros(1)


def rows(device: torch.device, *numbers: list[float]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {"w": torch.tensor(row, device=device)}
        for name, row in zip("abcdef", numbers, strict=False)
    }


# --- Laws ----------------------------------------------------------------------------------------


@given(program=programs(ops=HOOKLESS, leaf_hooks=False))
def test_norms_and_cosines_are_those_of_the_flat_gradients(
    device: torch.device, program: Program
) -> None:
    graph = build(program, device, torch.float64)
    params = {f"p{index}": leaf for index, leaf in enumerate(graph.leaves)}
    losses = {
        f"l{index}": loss.sum() + params["p0"].sum() for index, loss in enumerate(graph.losses)
    }
    per_loss = gradkit.per_loss_grads(losses, params)
    before = gradkit.tree.map(torch.clone, per_loss)
    found = conflicts(per_loss)
    assert gradkit.tree.allclose(per_loss, before, rtol=0, atol=0, equal_nan=True)

    flat = {name: torch.cat([
        torch.zeros(9, dtype=torch.float64, device=device) if grad is None else grad.reshape(-1)
        for grad in tree.values()
    ]) for name, tree in per_loss.items()}  # fmt: skip
    assert found.losses == tuple(losses)
    for name, row in flat.items():
        assert found.norms[name] == pytest.approx(row.norm().item(), rel=1e-9, nan_ok=True)
    for a, b in combinations(losses, 2):
        expected = (flat[a] @ flat[b] / flat[a].norm() / flat[b].norm()).item()
        if math.isfinite(expected):
            assert found.cosine(a, b) == pytest.approx(expected, abs=1e-9)
            assert found.cosine(b, a) == found.cosine(a, b)


@given(program=programs(ops=HOOKLESS, leaf_hooks=False))
def test_the_modules_add_up(device: torch.device, program: Program) -> None:
    graph = build(program, device, torch.float64)
    params = {f"m{i % 2}.n{i}.w": leaf for i, leaf in enumerate(graph.leaves)}
    losses = [loss.sum() + graph.leaves[0].sum() for loss in graph.losses]
    per_loss = gradkit.per_loss_grads(losses, params)
    found = conflicts(per_loss, by="module")
    for index, name in enumerate(found.losses):
        squares = sum(found.modules[m].norms[name] ** 2 for m in found.modules if "." not in m)
        assert found.norms[name] ** 2 == pytest.approx(squares, rel=1e-9, nan_ok=True)
        for prefix, inside in found.modules.items():
            below = {n: g for n, g in per_loss[index].items() if n.startswith(f"{prefix}.")}
            assert inside.norms[name] == pytest.approx(
                vector(below).norm().item(), rel=1e-9, nan_ok=True
            )


# --- Fixed cases ---------------------------------------------------------------------------------


def test_conflicting_pairs_from_the_worst_on(device: torch.device) -> None:
    found = conflicts(rows(device, [1.0, 0.0], [-1.0, 0.0], [-1.0, 1.0], [0.0, 5.0]))
    assert [pair[:2] for pair in found.conflicting] == [("a", "b"), ("a", "c")]
    assert found.conflicting[0][2] == -1.0
    assert found.conflicting[1][2] == pytest.approx(-(0.5**0.5))
    assert found.share == pytest.approx(2 / 6)
    assert found.norms["d"] == 5.0
    assert found.cosines.diagonal().tolist() == [1.0] * 4


def test_a_gradient_that_is_zero_or_none_has_no_angle(device: torch.device) -> None:
    per_loss = {
        "fit": {"w": torch.ones(2, device=device), "v": None},
        "off": {"w": None, "v": None},
        "flat": {"w": torch.zeros(2, device=device), "v": None},
        "back": {"w": -torch.ones(2, device=device), "v": None},
    }
    found = conflicts(per_loss)
    assert found.norms["off"] == found.norms["flat"] == 0.0
    assert found.cosine("off", "fit") == found.cosine("flat", "off") == 0.0
    assert found.cosines[1, 1] == 0.0
    assert found.share == 1.0  # of the one pair that has an angle
    assert conflicts({"off": per_loss["off"]}).share == 0.0


def test_nan_and_inf_touch_no_other_loss(device: torch.device) -> None:
    found = conflicts(rows(device, [1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0], [-1.0, -2.0]))
    assert found.norms["a"] == pytest.approx(5**0.5)
    assert math.isnan(found.norms["b"])
    assert found.norms["c"] == math.inf
    assert math.isnan(found.cosine("a", "b"))
    assert math.isnan(found.cosine("c", "d"))
    expected: Any = (("a", "d", pytest.approx(-1.0)),)
    assert found.conflicting == expected
    assert found.share == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1.0, 1e30])
def test_squares_stay_in_range(device: torch.device, dtype: torch.dtype, size: float) -> None:
    """The squares of these, or their sum, leave the range of float32."""
    per_loss = {
        "a": {"m.w": torch.full((4,), size, dtype=dtype, device=device), "n.w": None},
        "b": {"m.w": torch.full((4,), -1.0, dtype=dtype, device=device), "n.w": None},
    }
    found = conflicts(per_loss, by="module")
    for seen in (found, found.modules["m"]):
        assert seen.norms["a"] == pytest.approx(2 * size, rel=1e-2, abs=0)
        assert seen.cosine("a", "b") == pytest.approx(-1.0)


def test_a_small_module_is_measured_by_itself(device: torch.device) -> None:
    per_loss = {
        "a": {"big.w": torch.ones(2, device=device), "small.w": torch.full((2,), 1e-25)},
        "b": {"big.w": torch.ones(2, device=device), "small.w": torch.full((2,), -1e-25)},
    }
    per_loss = gradkit.tree.map(lambda leaf: leaf.to(device), per_loss)
    found = conflicts(per_loss, by="module")
    assert found.modules["small"].cosine("a", "b") == pytest.approx(-1.0)
    assert found.modules["small"].norms["a"] == pytest.approx(2**0.5 * 1e-25)
    assert found.cosine("a", "b") == pytest.approx(1.0)


@pytest.mark.parametrize("by", [None, "module"])
@pytest.mark.parametrize("size", [1.0, 1e-30])
def test_all_numbers_are_read_at_once(device: torch.device, by: Any, size: float) -> None:
    entries = torch.full((4,), size, device=device)
    per_loss = {
        "a": {"m.v.w": entries, "m.b": None, "n.w": entries * 0},
        "b": {"m.v.w": -entries, "m.b": entries, "n.w": None},
        "c": {"m.v.w": None, "m.b": None, "n.w": None},
    }
    with host_reads() as seen:
        conflicts(per_loss, by=by)
    assert seen == ["tolist"]


def test_every_prefix_is_a_module(device: torch.device) -> None:
    model = nn.ModuleDict({
        "t": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)),
        "u": nn.Linear(2, 1),
    })
    model.to(device)
    out = model["t"](torch.ones(1, 2, device=device))
    per_loss = gradkit.per_loss_grads({"a": out.sum(), "b": -2 * out.sum()}, model)
    found = conflicts(per_loss, by="module")
    assert list(found.modules) == ["t", "t.0", "t.1"]  # u is None for every loss
    assert all(inside.cosine("a", "b") == pytest.approx(-1.0) for inside in found.modules.values())
    plain = conflicts({"a": [torch.ones(2, device=device)]}, by="module")
    assert plain.modules == {}


def test_vectors_deep_trees_sparse_and_complex(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    losses = {"deep": {"x": w.sum()}, "each": w * torch.arange(3, device=device)}
    found = conflicts(gradkit.per_loss_grads(losses, w), losses=losses)
    assert found.losses == ("deep.x", "each[0]", "each[1]", "each[2]")
    assert found.norms["each[2]"] == 2.0
    assert found.cosine("deep.x", "each[1]") == pytest.approx(3**-0.5)

    rows = nn.Embedding(4, 2, sparse=True).to(device)
    picked = rows(torch.tensor([1, 1], device=device))
    found = conflicts(gradkit.per_loss_grads([picked.sum(), -picked[0].sum()], rows))
    assert found.norms["loss[0]"] == pytest.approx(8**0.5)
    assert found.cosine("loss[0]", "loss[1]") == pytest.approx(-1.0)

    c = torch.ones(2, dtype=torch.complex64, device=device, requires_grad=True)
    found = conflicts(gradkit.per_loss_grads([c.real.sum(), c.imag.sum()], [c]))
    assert found.cosine("loss[0]", "loss[1]") == 0.0


def test_gradients_with_a_graph_stay_out_of_it(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    per_loss = gradkit.per_loss_grads([w.square().sum(), w.sum()], [w], create_graph=True)
    assert not conflicts(per_loss).cosines.requires_grad


def test_what_is_no_such_tree_is_refused(device: torch.device) -> None:
    w = torch.ones(2, device=device)
    with pytest.raises(gradkit.StructureError, match="at least one loss"):
        conflicts({})
    with pytest.raises(gradkit.StructureError, match=r"per_loss\['b'\].*no key 'w'"):
        conflicts({"a": {"w": w}, "b": {"v": w}})
    with pytest.raises(gradkit.OptionError, match="by: expected None or 'module'"):
        conflicts({"a": {"w": w}}, by="layer")
    with pytest.raises(gradkit.LeafTypeError):
        conflicts({"a": {"w": 1.0}, "b": {"w": 2.0}})


# --- What it looks like --------------------------------------------------------------------------


def test_text_table_and_sentence(device: torch.device) -> None:
    found = conflicts(rows(device, [1.0, 0.0], [-1.0, 0.0]))
    lines = [line.split() for line in str(found).splitlines()]
    assert ["a", "1", "+1.00", "-1.00"] in lines
    assert "1 pair in conflict, 100% of the pairs of nonzero gradients: a and b -1.00." in str(
        found
    )
    assert "No pair" in str(conflicts(rows(device, [1.0, 0.0], [1.0, 0.0])))
    many = conflicts([[torch.randn(5, device=device)] for _ in range(30)])
    assert max(map(len, str(many).splitlines())) <= 100


def test_the_picture_is_the_matrix(device: torch.device) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    found = conflicts(rows(device, [1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]))
    ax = figure.subplots()
    assert found.plot(ax) is ax
    assert torch.equal(torch.tensor(ax.images[0].get_array().data), found.cosines)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]


# --- History -------------------------------------------------------------------------------------


@pytest.fixture
def history(device: torch.device) -> History:
    record = History()
    for step in range(0, 50, 5):
        record.add_(step, conflicts(rows(device, [1.0, 0.0], [step - 20.0, 1.0])))
    return record


def test_the_record_is_what_was_found(device: torch.device, history: History) -> None:
    assert history.steps == list(range(0, 50, 5))
    for index, step in enumerate(history.steps):
        found = conflicts(rows(device, [1.0, 0.0], [step - 20.0, 1.0]))
        assert history.norms["b"][index] == found.norms["b"]
        assert history.cosines["a", "b"][index] == found.cosine("a", "b")
        assert history.shares[index] == found.share == float(step < 20)


def test_the_record_is_of_the_same_losses(device: torch.device, history: History) -> None:
    with pytest.raises(gradkit.StructureError, match="use one History for each"):
        history.add_(60, conflicts(rows(device, [1.0], [1.0], [1.0])))
    assert len(history.steps) == len(history.norms["a"]) == len(history.shares) == 10


def test_the_record_as_columns_and_as_a_file(
    device: torch.device, history: History, tmp_path: Path
) -> None:
    columns = history.to_dict()
    assert list(columns) == ["step", "share", "norm/a", "norm/b", "cosine/a/b"]
    assert columns["step"] == history.steps
    assert columns["norm/b"] == history.norms["b"]
    columns["step"].clear()
    assert len(history.steps) == 10
    history.to_csv(tmp_path / "history.csv")
    with (tmp_path / "history.csv").open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
    read = {name: [float(x) for x in column] for name, *column in zip(names, *rows, strict=True)}
    assert read == history.to_dict()
    History().to_csv(tmp_path / "empty.csv")
    assert (tmp_path / "empty.csv").read_text(encoding="utf-8").split() == ["step,share"]


def test_table_and_pictures_of_a_record(device: torch.device, history: History) -> None:
    steps = ["0", "5", "10", "20", "40", "45"]
    for table in str(history).split("\n\n"):
        assert [line.split()[0] for line in table.splitlines()[2:]] == steps
    assert "No steps" in str(History())
    upper, lower = pytest.importorskip("matplotlib.figure").Figure().subplots(2)
    assert history.plot(upper, what="norms") is upper
    assert history.plot(lower) is lower
    assert upper.lines[0].get_ydata().tolist() == history.norms["a"]
    thin, thick = (line for line in lower.lines if len(line.get_xdata()) == 10)
    assert thin.get_ydata().tolist() == history.cosines["a", "b"]
    assert thick.get_ydata()[4] == pytest.approx(sum(history.cosines["a", "b"][2:7]) / 5)
    assert upper.get_xlabel() == lower.get_xlabel() == "step (thin: as measured; thick: mean of 5)"
    with pytest.raises(gradkit.OptionError, match="what: expected 'cosines' or 'norms'"):
        history.plot(lower, what="angles")


def test_a_name_with_an_underscore_has_its_place_in_the_legend(device: torch.device) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    record = History()
    one = torch.ones(1, device=device)
    record.add_(0, conflicts({"_aux": [one], "fit": [one]}))
    legend = record.plot(axes, what="norms").get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["_aux", "fit"]


def test_a_record_of_one_step_or_none_makes_no_empty_picture(device: torch.device) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    record = History()
    assert [text.get_text() for text in record.plot(figure.subplots()).texts][-1] == "no steps"
    record.add_(7, conflicts(rows(device, [1.0, 0.0], [-1.0, 1.0])))
    for what in ("cosines", "norms"):
        ax = record.plot(figure.subplots(), what=what)
        markers = [line.get_marker() for line in ax.lines if list(line.get_xdata()) == [7]]
        assert markers.count("o") == len(ax.get_legend().get_texts())
        assert ax.get_xticks().tolist() == [7]
        assert ax.get_xlabel() == "step"  # there is no mean


def test_a_norm_of_zero_is_in_the_picture(device: torch.device) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for numbers, scale in (([1.0], "log"), ([0.0], "symlog"), ([math.nan], "log")):
        record = History()
        for step in range(2):
            record.add_(step, conflicts(rows(device, [2.0], numbers)))
        ax = record.plot(figure.subplots(), what="norms")
        assert ax.get_yscale() == scale
    zeros = History()
    zeros.add_(0, conflicts(rows(device, [0.0])))
    assert zeros.plot(figure.subplots(), what="norms").get_yscale() == "linear"


def test_the_table_of_many_pairs_has_the_most_opposed(device: torch.device) -> None:
    record = History()
    record.add_(0, conflicts(rows(device, *([1.0, 0.6 * index] for index in range(-3, 3)))))
    head = str(record).split("\n\n")[1].splitlines()[0]
    assert head.count("·") == 6
    assert "a · f" in head
    assert "a · b" not in head
    assert str(record).endswith("9 more pairs are in .cosines.")


def test_a_step_that_is_not_finite_changes_no_mean(device: torch.device) -> None:
    record, axes = History(), pytest.importorskip("matplotlib.figure").Figure().subplots()
    for step, first in enumerate([1.0, float("nan"), 1.0]):
        others = ([1.0, 0.6 * index] for index in range(-2, 3))
        record.add_(step, conflicts(rows(device, [first, -1.8], *others)))
    head = str(record).split("\n\n")[1].splitlines()[0]
    assert "a · f" in head  # the most opposed
    assert "a · b" not in head
    thick = [line for line in record.plot(axes).lines if len(line.get_xdata()) == 3][1::2]
    assert len(thick) == 15
    assert all(math.isfinite(mean) for line in thick for mean in line.get_ydata())


def test_many_losses_make_a_picture_that_can_be_saved(device: torch.device) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = conflicts([[torch.ones(1, device=device)] for _ in range(200)]).plot()
    assert max(ax.figure.get_size_inches()) < 40
    assert len(ax.get_xticks()) <= 40
    pyplot.close(ax.figure)


def test_every_picture_of_cosines_has_a_scale_and_numbers_that_fit(device: torch.device) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    for count, size in ((2, 6), (16, 6), (16, 3), (17, 6)):
        ax = figure(figsize=(size, size)).subplots()
        conflicts([[torch.ones(1, device=device)] for _ in range(count)]).plot(ax)
        assert [axes.get_ylabel() for axes in ax.figure.axes[1:]] == ["cosine (red: conflict)"]
        assert len(ax.texts) == (count**2 if count <= 16 else 0)
        cell = ax.get_window_extent().width / count
        assert all(text.get_window_extent().width < cell for text in ax.texts)


def test_nested_losses_without_losses_say_what_was_compared(device: torch.device) -> None:
    """A tree of gradients does not show where the losses end."""
    w = torch.ones(2, device=device, requires_grad=True)
    losses = {"A": [w[0] * 1, w[1] * 1], "B": [w[1] * 1, w[0] * 1]}
    per_loss = gradkit.per_loss_grads(losses, {"w": w})
    found = conflicts(per_loss)
    assert found.params == ("param[0].w", "param[1].w")
    head = "2 losses compared, with respect to 2 params: param[0].w and param[1].w.\n"
    assert str(found).startswith(head)
    found = conflicts(per_loss, losses=losses)
    assert found.params == ("w",)
    assert str(found).startswith("4 losses compared, with respect to 1 param: w.\n")


def test_the_params_are_those_that_some_loss_reaches(device: torch.device) -> None:
    one = torch.ones(1, device=device)
    per_loss = {
        "a": {"m.w": one, "n.w": None, "v": None},
        "b": {"m.w": None, "n.w": None, "v": one},
    }
    found = conflicts(per_loss, by="module")
    assert found.params == ("m.w", "v")
    assert {name: inside.params for name, inside in found.modules.items()} == {"m": ("m.w",)}
    assert str(conflicts({"a": [None]})).startswith("1 loss compared, with respect to 0 params.\n")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([-0.001], "100% of the pairs of nonzero gradients (none below -0.05): "),
        ([-0.001, -1.0], "67% of the pairs of nonzero gradients (1 below -0.05): "),
        ([-1.0], "100% of the pairs of nonzero gradients: "),
    ],
)
def test_slight_conflicts_are_told_from_clear_ones(
    device: torch.device, others: list[float], expected: str
) -> None:
    found = conflicts(rows(device, [1.0, 0.0], *([first, 1.0] for first in others)))
    assert expected in str(found)
    assert len(found.conflicting) == len(others)  # by the definition, as before


def test_a_cosine_close_to_zero_keeps_its_sign_and_size(device: torch.device) -> None:
    found = conflicts(rows(device, [1.0, -0.002], [0.0, 1.0], [float("nan"), 1.0]))
    assert "a and b -2e-03" in str(found)
    assert "-0.00" not in str(found)
    assert math.isnan(found.cosine("c", "c"))


def test_a_result_is_frozen(device: torch.device) -> None:
    found = conflicts(rows(device, [1.0]))
    assert isinstance(found, Conflicts)
    frozen: Any = found
    with pytest.raises(AttributeError):
        frozen.share = 1.0


def test_the_text_has_a_row_for_each_module(device: torch.device) -> None:
    g = torch.tensor([1.0, 0.0], device=device)
    per_loss = {"a": {"trunk.w": g, "head.w": g}, "b": {"trunk.w": -g, "head.w": g}}
    text = str(gradkit.report.conflicts(per_loss, by="module"))
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["trunk"], ["head"])]
    assert [row[0] for row in rows] == ["trunk", "head"]
    assert "-1" in text
    assert "a and b" in next(line for line in text.splitlines() if line.startswith("trunk"))


def test_losses_are_no_gradients(device: torch.device) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    losses = {"a": w.sum(), "b": -w.sum()}
    with pytest.raises(gradkit.LeafTypeError, match=r"per_loss: .*losses(?s:.*)per_loss_grads"):
        conflicts(losses)
    assert len(conflicts(gradkit.per_loss_grads(losses, [w])).conflicting) == 1
    number = torch.tensor(1.0, device=device, requires_grad=True)
    conflicts(gradkit.per_loss_grads({"a": number * 2, "b": -number}, number))
