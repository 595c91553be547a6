"""The proofs come to what their page says, within tolerances, and would notice if they did not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import torch

import gradkit

for extra in ("sklearn", "matplotlib"):
    pytest.importorskip(extra)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "proof"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "_proof")
Load: TypeAlias = Callable[[str], ModuleType]
slow = pytest.mark.slow
# The scripts run on the CPU.
pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return what imports a script as if it were run, from its own folder."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def run(script: ModuleType, *options: str) -> int:
    status: int = script.main(["--seeds", "1", *options])
    return status


# --- The page, and what the scripts share --------------------------------------------------------


def test_the_page_has_a_section_for_each(load: Load) -> None:
    page = (ROOT / "docs" / "proofs.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"examples/proof/{name}.py" in page
    assert page.count("**Fails:**") == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_says_where_it_is_from_and_where_it_fails(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert "\nSource: " in source
    assert "Fails: " in source


def test_table_is_aligned(load: Load) -> None:
    lines = load("_proof").table(["a", "long"], [["wide", "1"], ["", "22222"]]).splitlines()
    assert lines == ["a      long", "----  -----", "wide      1", "      22222"]


def test_spread_is_over_seeds(load: Load) -> None:
    shared = load("_proof")
    assert shared.over_seeds([1.0, 3.0], ".1f") == "2.0 ± 1.4"
    assert shared.over_seeds([2.0], ".1f") == "2.0"


def test_digits_are_shuffled_by_the_seed(load: Load) -> None:
    digits = load("_proof").digits
    (images, labels), (again, _), (others, _) = digits(0), digits(0), digits(1)
    assert images.shape == (1797, 64)
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(images, again)
    assert not torch.equal(images, others)
    assert images.sum() == others.sum()


def test_without_matplotlib_a_plot_says_what_to_install(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = load("_proof")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install gradkit\[plot\]"):
        shared.parse("", ["--plot", "a.png"])
    assert shared.parse("", []).plot is None


def test_a_claim_that_does_not_hold_is_an_exit_status(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = load("_proof")
    assert shared.conclude({"a": True}) == 0
    assert shared.conclude({"a": True, "b": False}) == 1
    assert capsys.readouterr().err == "FAILED: b\n"


# --- influence -----------------------------------------------------------------------------------


@slow
def test_influence_is_what_training_again_comes_to(load: Load) -> None:
    outcome = load("influence").measure(0, left_out=12, groups=(50,))
    assert outcome.correlation > 0.999
    assert 1.0 < outcome.slope < 1.15
    assert outcome.groups[50] > 1.5  # where it fails


@slow
def test_influence_by_another_hessian_fails(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    hvp = gradkit.func.hvp

    def doubled(*args: Any, **options: Any) -> Any:
        grads, hv = hvp(*args, **options)
        return grads, gradkit.tree.scale(hv, 2.0)

    monkeypatch.setattr(gradkit.func, "hvp", doubled)
    script = load("influence")
    assert script.measure(0, left_out=3, groups=()).slope > 1.9
    monkeypatch.setattr(script, "GROUPS", ())
    monkeypatch.setattr(script, "measure", partial(script.measure, left_out=3, groups=()))
    assert run(script) == 1


# --- hyper_cleaning ------------------------------------------------------------------------------


@slow
def test_cleaning_finds_the_redrawn_labels(load: Load) -> None:
    scores = load("hyper_cleaning").measure(1, meta_steps=10)
    assert scores["oracle"].accuracy > 0.93
    for name in ("implicit", "unrolled"):
        assert scores[name].f1 > 0.85
        assert scores[name].accuracy > scores["all"].accuracy + 0.02
    assert scores["implicit"].f1 == pytest.approx(scores["unrolled"].f1, abs=0.05)


@slow
def test_few_validation_images_do_not_clean(load: Load) -> None:
    script = load("hyper_cleaning")
    scores = script.measure(1, script.FEW, meta_steps=15)
    assert scores["implicit"].accuracy < scores["all"].accuracy


@slow
def test_cleaning_with_other_gradients_fails(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("hyper_cleaning")
    monkeypatch.setattr(script, "measure", partial(script.measure, meta_steps=3))
    true = gradkit.minimize_
    monkeypatch.setattr(gradkit, "minimize_", lambda optimizer, loss: true(optimizer, -loss))
    assert run(script) == 1


@slow
def test_the_hypergradients_are_one_where_training_ends_at_the_minimum(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("hyper_cleaning")
    images, labels = script.digits(0)
    data, validation = (images[:40], labels[:40]), (images[40:60], labels[40:60])
    numbers = torch.linspace(-1, 1, 40, dtype=torch.double, requires_grad=True)
    monkeypatch.setattr(script, "DECAY", 0.1)
    monkeypatch.setattr(script, "STEPS", 400)
    grads = []
    for way in script.WAYS.values():
        loss = script.losses(way(data)(numbers), validation).mean()
        grads.append(gradkit.value_and_grads(loss, numbers)[1])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-9)


# --- training_attribution ------------------------------------------------------------------------


@slow
def test_attribution_through_training_ranks_what_training_again_does(load: Load) -> None:
    script = load("training_attribution")
    short, _, adam = script.SETTINGS
    outcome = script.measure(short, 0, subsets=20)
    for share in (0.01, 0.05):
        assert outcome.scores["unroll"][share] > 0.85
        assert outcome.scores["unroll"][share] > outcome.scores["influence"][share] + 0.1
        assert outcome.scores["influence"][share] > outcome.scores["products"][share] + 0.1
    predicted, true = outcome.example
    assert (predicted - true).norm() < true.norm()
    # Where it fails.
    long = script.measure(adam, 0, subsets=20)
    assert long.scores["unroll"][0.2] < 0.8
    assert long.scores["unroll"][0.2] < long.scores["influence"][0.2] + 0.1


def test_the_derivative_by_a_weight_is_the_finite_difference(load: Load) -> None:
    script = load("training_attribution")
    images, labels = script.digits(0)
    data, tests = (images[:500], labels[:500]), (images[500:502], labels[500:502])
    batches = script.batches(0, 12)
    run = script.Run(script.SGD, script.initial(0), batches, data, tests)
    derivatives, params = script.by_training(run)
    index, step = int(batches[0][0]), 1e-5
    weights = torch.ones(2, 500, dtype=torch.double)
    weights[:, index] += torch.tensor([step, -step], dtype=torch.double)
    up, down = run.test_losses(weights)
    torch.testing.assert_close(derivatives[:, index], (up - down) / (2 * step), rtol=1e-5, atol=0)
    assert gradkit.tree.allclose(params, run.train(torch.ones(500, dtype=torch.double)))


def test_rank_correlation_is_spearman_s(load: Load) -> None:
    scipy = pytest.importorskip("scipy.stats")
    a, b = torch.randn(2, 30, dtype=torch.double)
    expected = scipy.spearmanr(a.numpy(), b.numpy()).statistic
    assert load("training_attribution").rank_correlation(a, b) == pytest.approx(expected)


# --- losses_surgery ------------------------------------------------------------------------------


@slow
def test_surgery_is_no_better_than_the_sum(load: Load) -> None:
    outcomes = load("losses_surgery").measure(0, steps=300)
    accuracies = [outcome.accuracy for outcome in outcomes.values()]
    assert min(accuracies) > 88
    assert max(accuracies) - min(accuracies) < 2.5
    cosines = outcomes["sum of losses"].cosines
    assert abs(sum(cosines) / len(cosines)) < 0.15
    assert outcomes["PCGrad"].accuracy == pytest.approx(outcomes["UPGrad"].accuracy, abs=0.5)


@pytest.mark.parametrize("dot", [-0.9, 0.0, 0.9])
def test_the_methods_keep_their_definitions(load: Load, dot: float) -> None:
    script = load("losses_surgery")
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 6, dtype=torch.double, generator=generator)
    b = b - (a @ b) / (a @ a) * a
    matrix = torch.stack([a, dot * a + b])
    gradients = {name: method(matrix) for name, method in script.METHODS.items()}
    torch.testing.assert_close(gradients["sum of losses"], matrix.sum(0))
    assert (matrix @ gradients["UPGrad"] >= -1e-12).all()  # no loss grows
    torch.testing.assert_close(gradients["PCGrad"], gradients["UPGrad"])
    shares = torch.linspace(0, 1, 1001, dtype=torch.double)[:, None]
    shortest = (shares * matrix[0] + (1 - shares) * matrix[1]).norm(dim=1).min()
    assert gradients["MGDA"].norm() <= 2 * shortest + 1e-12
    if dot >= 0:
        torch.testing.assert_close(gradients["PCGrad"], matrix.sum(0))


@slow
def test_a_method_that_harms_a_loss_fails(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("losses_surgery")
    monkeypatch.setattr(
        script, "METHODS", {"sum of losses": script.total, "against": lambda matrix: -matrix.sum(0)}
    )
    monkeypatch.setattr(script, "measure", partial(script.measure, steps=300))
    assert run(script) == 1


# --- same_gradient_three_ways, pinned_defect -----------------------------------------------------


@slow
@pytest.mark.processes
def test_gradients_of_three_ways_are_one(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new" / "picture.png"
    assert run(load("same_gradient_three_ways"), "--plot", str(picture)) == 0
    printed = capsys.readouterr()
    assert printed.out.count("1 of 1") >= 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert printed.err == ""


def test_a_bit_is_a_difference(load: Load) -> None:
    difference = load("same_gradient_three_ways").difference
    a = {"w": torch.tensor([1.0, 0.0])}
    assert difference(a, {"w": torch.tensor([1.0, 0.0])}) == 0
    assert difference(a, {"w": torch.tensor([1.0, -0.0])}) > 0
    assert difference(a, {"w": torch.tensor([1.5, 0.0])}) == 0.5


@slow
def test_the_defect_is_pinned(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """When it fails, torch has mended weight norm: choose another defect."""
    script = load("pinned_defect")
    error = script.pinned()
    assert error.operation == "WeightNormInterface"
    assert (error.order, error.leaf.partition("[")[0]) == (2, "args")
    errors = script.measure(0)
    assert errors["torch.autograd.grad"] > 0.1
    assert errors["torch.func.grad"] > 0.1
    assert errors["gradkit.value_and_grads"] < 1e-12
    assert errors["gradkit.meta.unroll"] < 1e-12
    assert run(script) == 0
    assert "refuses" not in capsys.readouterr().out


@slow
def test_a_wrong_meta_gradient_of_gradkit_fails(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("pinned_defect")
    monkeypatch.setitem(script.WAYS, "gradkit.meta.unroll", script.by_torch)
    assert run(script) == 1
