"""The demos pass their checks, and would notice if they did not."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from copy import deepcopy
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

import gradkit
from tests.processes import Ranks

for extra in ("ase", "sklearn", "rich", "matplotlib"):
    pytest.importorskip(extra)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """Return an example, which imports its neighbours from the folder that it is in."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


demo = load_example("multitask_digits")
digits = load_example("per_sample_digits")
maml = load_example("maml_sinusoid")
fewshot = load_example("fewshot_digits")
compiled = load_example("compiled_digits")
deq = load_example("deq_digits")
force_field = load_example("force_field")
hyperparams = load_example("learn_hyperparams")
ddp = load_example("multitask_ddp")
shards = load_example("meta_sharded")
planted = load_example("parity")


def smoke(device: torch.device, folder: Path) -> int:
    return demo.main(["--smoke", "--device", str(device), "--output", str(folder)])


def nudge(weight: torch.Tensor) -> None:
    """Change the first number by one unit in the last place."""
    with torch.no_grad():
        first = weight.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


@pytest.fixture
def batch(device: torch.device) -> Any:
    data, _ = demo.load(256, device)
    return demo.Batch(data.images[:64], data.digits[:64])


CUT = "…"  # where a bar or a table is wider than a terminal of 80 columns, which rich assumes


@pytest.mark.slow
def test_smoke_run_passes_its_checks(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke(device, tmp_path / "new" / "folder") == 0

    picture = tmp_path / "new" / "folder" / "multitask_digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert str(picture) in printed.out
    assert CUT not in printed.out
    assert "equal bit for bit" in printed.out
    assert "test accuracy" in printed.out
    assert "safe_retain" in printed.out
    assert printed.err == ""


def test_run_in_which_one_weight_moves_by_one_ulp_fails(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = demo.gradkit_step

    def nudged_step(model: Any, optimizer: Any, batch: Any) -> Any:
        values = step(model, optimizer, batch)
        nudge(model.heads["image"].bias)
        return values

    monkeypatch.setattr(demo, "gradkit_step", nudged_step)
    assert smoke(device, tmp_path) == 1
    printed = capsys.readouterr()
    assert "heads.image.bias" in printed.err
    assert "equal bit for bit" not in printed.out


def test_run_below_the_accuracy_fails(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "SMOKE", demo.Size(1, 256, 2, accuracy=0.95))
    assert smoke(device, tmp_path) == 1
    assert "not above 95%" in capsys.readouterr().err


def test_full_run_demands_the_accuracy(device: torch.device) -> None:
    assert demo.FULL.accuracy == 0.95
    assert demo.failed_checks([], 0.95, demo.FULL.accuracy)
    assert not demo.failed_checks([], 0.951, demo.FULL.accuracy)


@pytest.mark.parametrize("name", ["trunk.0.weight", "trunk.2.bias", "heads.parity.bias"])
def test_comparison_sees_one_ulp(device: torch.device, name: str) -> None:
    model = demo.fresh_model(device)
    other = deepcopy(model)
    assert demo.differing_weights(model, other) == []
    nudge(other.get_parameter(name))
    assert demo.differing_weights(model, other) == [name]


def test_comparison_sees_the_sign_of_zero(device: torch.device) -> None:
    model = demo.fresh_model(device)
    torch.nn.init.zeros_(model.heads["digit"].bias)
    other = deepcopy(model)
    with torch.no_grad():
        other.heads["digit"].bias.neg_()
    assert demo.differing_weights(model, other) == ["heads.digit.bias"]


def test_both_steps_leave_the_same_bits(device: torch.device, batch: Any) -> None:
    models = [demo.fresh_model(device) for _ in range(2)]
    steps = [demo.usual_step, demo.gradkit_step]
    values = [
        step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch)
        for step, model in zip(steps, models, strict=True)
    ]
    assert values[0] == values[1]
    assert demo.differing_weights(*models) == []
    assert demo.differing_weights(models[0], demo.fresh_model(device)) != []
    for usual, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(usual.grad, ours.grad)


def test_looking_tells_the_truth_and_changes_nothing(device: torch.device, batch: Any) -> None:
    model = demo.fresh_model(device)
    snapshot = demo.measure(7, model, batch)
    assert demo.differing_weights(model, demo.fresh_model(device)) == []
    assert all(weight.grad is None for weight in model.parameters())

    flat, at_output = {}, {}
    for name in demo.WEIGHTS:
        seen: list[torch.Tensor] = []
        hook = model.trunk.register_forward_hook(
            lambda _m, _i, output, seen=seen: seen.append(output)
        )
        loss = demo.multitask_losses(model, batch)[name]
        hook.remove()
        *grads, output = torch.autograd.grad(loss, [*model.trunk.parameters(), *seen])
        flat[name] = torch.cat([grad.flatten() for grad in grads])
        at_output[name] = output.norm().item()

    assert snapshot.step == 7
    assert snapshot.conflicts.norms == pytest.approx({
        name: grad.norm().item() for name, grad in flat.items()
    })
    assert snapshot.at_output == pytest.approx(at_output)
    for a, b in combinations(demo.WEIGHTS, 2):
        cosine = snapshot.conflicts.cosine(a, b)
        expected = torch.nn.functional.cosine_similarity(flat[a], flat[b], dim=0).item()
        assert cosine == pytest.approx(expected, abs=1e-5)


def test_start_and_batches_are_the_same_every_time(device: torch.device, batch: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = demo.fresh_model(device), demo.shuffled(batch, epochs=2, batch_size=16)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = demo.fresh_model(device), demo.shuffled(batch, epochs=2, batch_size=16)

    assert demo.differing_weights(first[0], second[0]) == []
    assert len(first[1]) == 8
    for one, other in zip(first[1], second[1], strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.digits, other.digits)


# --- compiled_digits -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_step_has_the_weights_of_the_loop(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--smoke", "--device", str(device), "--output", str(tmp_path)]
    assert compiled.main(run) == 0
    assert (tmp_path / "compiled_digits.png").read_bytes().startswith(b"\x89PNG")
    assert "no step was compiled again" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_step_with_another_clipping_is_seen(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradkit.tree, "clip_by_global_norm", lambda grads, _: (grads, 0.0))
    assert compiled.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 1


# --- force_field ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_force_field_has_the_weights_of_the_loop(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--smoke", "--device", str(device), "--output", str(tmp_path)]
    assert force_field.main(run) == 0
    assert (tmp_path / "force_field.png").read_bytes().startswith(b"\x89PNG")
    assert "OK the weights are those of the usual loop" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_force_field_with_another_force_is_seen(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled_step(model: Any, known: Any, weight: float, backend: str) -> Any:
        return usual_step(model, known, 1.01 * weight)

    usual_step = force_field.usual_step
    monkeypatch.setattr(force_field, "compiled_step", compiled_step)
    run = ["--smoke", "--device", str(device), "--output", str(tmp_path)]
    assert force_field.main(run) == 1


def test_molecules_have_their_measured_energies(device: torch.device) -> None:
    """Water has 232.6 kcal/mol to its atoms; no padding changes an energy or a force."""
    known = force_field.molecules(device)
    sizes = known.species.sum((1, 2))
    water = known.at((known.species.sum(1) == known.species.new_tensor([2, 0, 0, 1])).all(1))
    torch.testing.assert_close(water.energies, water.energies.new_tensor([-232.5799 * 0.0433641]))
    model = force_field.network(device)
    padded = force_field.errors(model, dict(model.named_parameters()), known.at(sizes == 3))
    triples = force_field.Molecules(*(x[sizes == 3] for x in known))
    alone = triples._replace(positions=triples.positions[:, :3], species=triples.species[:, :3])
    assert force_field.errors(model, dict(model.named_parameters()), alone) == pytest.approx(padded)


# --- per_sample_digits ---------------------------------------------------------------------------


def smoke_per_sample(device: torch.device, folder: Path) -> int:
    return digits.main(["--smoke", "--device", str(device), "--output", str(folder)])


@pytest.fixture(scope="module")
def outcome(device: torch.device) -> Any:
    return digits.experiment(digits.SMOKE, device, digits.Console(quiet=True))


def as_text(table: Any) -> str:
    console = digits.Console(width=120)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.slow
def test_smoke_run_finds_the_wrong_labels(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke_per_sample(device, tmp_path / "new" / "folder") == 0

    picture = tmp_path / "new" / "folder" / "per_sample_digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert str(picture) in printed.out
    assert CUT not in printed.out
    assert "find the wrong labels" in printed.out
    assert "of the first 10 are mislabelled" in printed.out
    assert "test accuracy" in printed.out
    assert printed.err == ""


def test_wrong_labels_stand_far_in_front(device: torch.device, outcome: Any) -> None:
    count = int(outcome.data.flipped.sum())
    chance = count / len(outcome.data.flipped)
    precision = digits.mislabelled(outcome.norms, outcome.data.flipped, count) / count
    assert chance == digits.FLIPPED
    assert precision > 20 * chance
    assert digits.failed_checks(outcome, digits.SMOKE) == []
    assert digits.FULL.precision > 20 * chance


def test_table_tells_what_was_found(device: torch.device, outcome: Any) -> None:
    assert all(scores.isfinite().all() for scores in outcome.scores.values())
    rows = [
        [float(cell) for cell in re.findall(r"(\S+?)%? +[│]", line)]
        for line in as_text(digits.precision_table(outcome)).splitlines()
        if line.startswith("│")
    ]
    flipped = outcome.data.flipped
    assert [row[0] for row in rows] == [5, 10, 20]  # 10 are flipped
    for k, *precisions, chance, recall in rows:
        hits = [digits.mislabelled(scores, flipped, int(k)) for scores in outcome.scores.values()]
        assert precisions == pytest.approx([100 * count / k for count in hits], abs=0.5)
        assert chance == 2
        assert recall == pytest.approx(100 * hits[0] / 10, abs=0.5)


def test_counting_on_paper(device: torch.device) -> None:
    scores = torch.tensor([0.1, 5.0, 3.0, 4.0, 0.2], device=device)
    flipped = torch.tensor([True, True, False, True, False], device=device)
    assert [digits.mislabelled(scores, flipped, k) for k in range(1, 6)] == [1, 2, 2, 2, 3]


@pytest.mark.parametrize("images", [500, 1347])
def test_two_percent_of_the_labels_are_wrong(device: torch.device, images: int) -> None:
    data, test = digits.load(images, device)
    assert data.flipped.sum() == round(0.02 * images)
    assert not test.flipped.any()
    assert set(data.given.tolist()) <= set(range(10))
    assert len(set((data.given - data.true)[data.flipped].tolist())) > 2  # not to one class on


def test_labels_and_start_are_the_same_every_time(device: torch.device) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = digits.load(500, device)[0], digits.fresh_model(device)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = digits.load(500, device)[0], digits.fresh_model(device)
    assert torch.equal(first[0].given, second[0].given)
    assert demo.differing_weights(first[1], second[1]) == []


def test_norms_are_of_the_gradients_and_change_nothing(device: torch.device) -> None:
    model = digits.fresh_model(device).double()
    data, _ = digits.load(500, device)
    few = digits.Data(data.images[:5].double(), data.given[:5], data.true[:5])
    norms, losses = digits.sample_norms(model, few)
    assert all(weight.grad is None for weight in model.parameters())
    start = digits.fresh_model(device).double()
    assert all(map(torch.equal, model.parameters(), start.parameters()))

    for row, (image, label) in enumerate(zip(few.images, few.given, strict=True)):
        again = deepcopy(model)
        loss = cross_entropy(again(image[None]), label[None])
        loss.backward()
        squares = sum(weight.grad.square().sum() for weight in again.parameters())
        torch.testing.assert_close(norms[row], squares.sqrt())
        torch.testing.assert_close(losses[row], loss.detach())


@pytest.mark.parametrize("factor", [1 + 1e-8, torch.nan])
def test_run_with_norms_that_no_loop_gives_fails(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
) -> None:
    right = digits.sample_norms

    def wrong(model: Any, data: Any) -> Any:
        norms, losses = right(model, data)
        return norms * factor, losses

    monkeypatch.setattr(digits, "sample_norms", wrong)
    monkeypatch.setattr(digits, "SMOKE", digits.Size(1, 500, 2, precision=-1.0))
    assert smoke_per_sample(device, tmp_path) == 1
    printed = capsys.readouterr()
    assert "a norm differs from the loop's" in printed.err
    assert "find the wrong labels" not in printed.out


def test_run_that_finds_too_few_fails(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digits, "SMOKE", digits.Size(1, 500, 2, precision=1.0))
    assert smoke_per_sample(device, tmp_path) == 1
    assert "not above 100%" in capsys.readouterr().err


# --- maml_sinusoid -------------------------------------------------------------------------------


@pytest.mark.slow
def test_smoke_run_adapts_to_new_waves(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert maml.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    picture = tmp_path / "maml_sinusoid.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in printed.replace("\n", "")
    assert CUT not in printed
    for method in ("MAML", "FOMAML", "Meta-SGD"):
        assert method in printed
    assert "adapts to new waves" in printed


def test_waves_are_those_of_the_paper(device: torch.device) -> None:
    tasks = maml.draw_tasks(500, 7, torch.Generator().manual_seed(0), device)
    assert tasks.support.x.shape == (500, 10, 1)
    assert tasks.query.y.shape == (500, 7, 1)
    assert tasks.support.x.abs().max() <= 5 < tasks.support.x.abs().max() + 0.1
    assert 4.5 < tasks.support.y.abs().max() <= 5


def test_errors_by_step_are_those_of_plain_gradient_descent(device: torch.device) -> None:
    tasks = maml.draw_tasks(3, 8, torch.Generator().manual_seed(0), device)
    params = maml.METHODS[0].start(maml.network(), device)
    errors = maml.errors_by_step(params, tasks)
    for index, by_step in enumerate(errors):
        model = maml.network().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=maml.STEP_SIZE)
        for step in range(maml.LONGEST + 1):
            with torch.no_grad():
                expected = mse_loss(model(tasks.query.x[index]), tasks.query.y[index])
            torch.testing.assert_close(by_step[step], expected, rtol=1e-4, atol=1e-5)
            optimizer.zero_grad()
            mse_loss(model(tasks.support.x[index]), tasks.support.y[index]).backward()
            optimizer.step()


def test_first_order_leaves_the_second_derivatives_out(device: torch.device) -> None:
    tasks = maml.draw_tasks(4, 10, torch.Generator().manual_seed(0), device)
    params = maml.METHODS[0].start(maml.network(), device)
    grads = {}
    for first_order in (False, True):

        def meta_loss(params: Any, task: Any, first_order: bool = first_order) -> Any:
            weights = maml.adapted(params, task.support, 1, first_order=first_order)
            return maml.error(weights, (), task.query)

        _, grads[first_order] = gradkit.meta.mean_value_and_grads(meta_loss, params, tasks)
    expected = gradkit.tree.map(torch.zeros_like, params["weights"])
    for index in range(4):
        support, query = (maml.Points(p.x[index], p.y[index]) for p in tasks)
        weights = maml.adapted(params, support, 1, first_order=True)
        _, grad = gradkit.value_and_grads(maml.error(weights, (), query), weights)
        expected = gradkit.tree.add(expected, gradkit.tree.scale(grad, 1 / 4))
    assert gradkit.tree.allclose(grads[True]["weights"], expected, rtol=1e-4, atol=1e-5)
    assert not gradkit.tree.allclose(grads[False]["weights"], expected, rtol=1e-2, atol=1e-3)


def test_divergence_is_told_and_not_averaged(device: torch.device) -> None:
    errors = torch.tensor([1.0, 2.0, torch.nan, torch.inf, 26.0], device=device)
    assert maml.diverged(errors) == pytest.approx(3 / 5)
    assert "diverges on 60%" in maml.cell(errors)
    assert maml.cell(errors[:2]).startswith("1.500 ± ")


@pytest.mark.parametrize("left", [1.0, torch.nan])
def test_run_that_does_not_adapt_fails(device: torch.device, left: float) -> None:
    errors = torch.ones(5, maml.LONGEST + 1, device=device)
    errors[:, 1] = left
    outcomes = [maml.Learned(maml.METHODS[2], {}, [], errors)]
    assert "Meta-SGD leaves" in maml.failed_checks(outcomes, maml.FULL)[0]


# --- fewshot_digits ------------------------------------------------------------------------------


@pytest.mark.slow
def test_smoke_run_sorts_new_digits(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fewshot.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    picture = tmp_path / "fewshot_digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in printed.out
    assert CUT not in printed.out
    for start in ("MAML", "pretrained", "random", "nearest"):
        assert start in printed.out
    assert printed.err == ""


def test_tasks_are_of_different_images_with_names_of_their_own(device: torch.device) -> None:
    assert not set(fewshot.TRAIN_DIGITS) & set(fewshot.TEST_DIGITS)
    # Images that tell what they are: the digit, and a number of their own.
    by_digit = [
        (100 * digit + torch.arange(20.0, device=device)).reshape(20, 1, 1, 1, 1)
        for digit in range(10)
    ]
    digits = (2, 5, 7, 8)
    tasks = fewshot.draw_tasks(by_digit, digits, 6, 4, torch.Generator().manual_seed(0))
    orders = set()
    for index in range(6):
        shown, asked = (part.images[index].flatten().tolist() for part in tasks)
        assert len({*shown, *asked}) == fewshot.WAYS * (fewshot.SHOTS + 4)
        names: dict[int, float] = {}
        for part, images in zip(tasks, (shown, asked), strict=True):
            for image, name in zip(images, part.classes[index].tolist(), strict=True):
                assert names.setdefault(name, image // 100) == image // 100
        assert set(names) == {0, 1, 2}
        assert set(names.values()) < set(digits)
        orders.add(tuple(names.values()))
    assert len(orders) > 1


def test_images_lie_at_every_place(device: torch.device) -> None:
    by_digit = fewshot.load(device)
    assert sum(map(len, by_digit)) == 1797
    places = by_digit[3][0]
    assert len(places) == len(torch.unique(places, dim=0)) == 25
    torch.testing.assert_close(places.sum((1, 2, 3)), places[0].sum().expand(25))


def test_pretraining_leaves_the_last_layer_to_the_task(device: torch.device) -> None:
    learner = fewshot.Learner(device)
    with fewshot.Progress(console=fewshot.Console(quiet=True)) as progress:
        weights = fewshot.pretrain(learner, fewshot.load(device), 2, progress)
    *trunk, _, _ = weights
    assert list(weights) == list(learner.start)
    assert not any(torch.equal(weights[name], learner.start[name]) for name in trunk)
    assert not weights["7.weight"].any()
    assert not weights["7.bias"].any()


@pytest.mark.parametrize("after", [0.34, torch.nan])
def test_start_that_is_no_better_fails(device: torch.device, after: float) -> None:
    learned = torch.full((4, fewshot.LONGEST + 1), 1 / 3, device=device)
    learned[:, fewshot.STEPS] = after
    other = torch.full_like(learned, 0.3)
    outcome = fewshot.Experiment(
        [fewshot.Outcome("MAML", 0.3, learned), fewshot.Outcome("random", 0.1, other)],
        other[:, 0],
        None,
        {},
        None,
    )
    gain, lead, neighbour = fewshot.failed_checks(outcome, fewshot.FULL)
    assert "3 steps add" in gain
    assert "MAML leads random" in lead
    assert "MAML leads nearest neighbour" in neighbour


# --- deq_digits ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_equilibrium_model_learns(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deq.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "deq_digits.png").read_bytes().startswith(b"\x89PNG")
    assert "is that of the iteration" in capsys.readouterr().out


def test_the_gradient_of_an_equilibrium_is_that_of_its_iterations(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, params = deq.load(device), deq.initial(device)
    x, y = (part[: deq.BATCH] for part in data[:2])
    apart, few, many = deq.compare(params, x, y)
    assert apart <= deq.CLOSE
    assert 5 * few < many
    short = gradkit.meta.implicit(deq.iterate, fixed_point=deq.layer, maxiter=2, warn=False)
    monkeypatch.setattr(deq, "equilibrium", short)
    assert deq.compare(params, x, y)[0] > deq.CLOSE


# --- learn_hyperparams ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def patients(device: torch.device) -> Any:
    return hyperparams.load(device)


@pytest.mark.slow
def test_smoke_run_gets_the_hypergradients_right(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hyperparams.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    picture = tmp_path / "learn_hyperparams.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in printed.out
    assert CUT not in printed.out
    assert "the hypergradients are correct" in printed.out
    assert printed.err == ""


def test_patients_are_in_one_part_each_and_standardized(patients: Any) -> None:
    assert [len(part.y) for part in patients] == [120, 161, 161]
    rows = torch.cat([part.x for part in patients])
    assert len(torch.unique(rows, dim=0)) == 442
    assert rows.shape[1] == 64
    torch.testing.assert_close(patients.train.x.std(0), torch.ones_like(rows[0]))


def test_closed_form_is_where_the_inner_loss_is_least(device: torch.device, patients: Any) -> None:
    hyper = hyperparams.hyper_at(0.3, 0.1, device)
    weights = hyperparams.ridge(hyper, patients.train).detach().requires_grad_()
    loss = hyperparams.inner_loss(weights, hyper, patients.train)
    assert gradkit.value_and_grads(loss, weights)[1].abs().max() < 1e-14
    reached = hyperparams.unrolled(hyper, patients.train, 1000)
    torch.testing.assert_close(reached, weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("factor", [1 + 1e-6, torch.nan])
@pytest.mark.parametrize("way", ["unrolled", "implicit", "rate"])
def test_hypergradient_that_is_wrong_fails(
    device: torch.device, patients: Any, way: str, factor: float
) -> None:
    right = {"unrolled": 1e-12, "implicit": 1e-10, "rate": 1e-9}
    wrong = {**right, way: abs(factor - 1) * 10}
    grid = hyperparams.Grid("grid", *torch.ones(2, 1), torch.ones(1, 1), torch.ones(1, 1))
    found = hyperparams.Learned("found", [1.0, 0.5], None, [1.0, 0.5], 1.0, 2)

    def broken(differences: dict[str, float]) -> Any:
        outcome = hyperparams.Outcome(
            [hyperparams.Agreement(9, differences["unrolled"], differences["implicit"])],
            differences["rate"],
            [found] * 3,
            [grid] * 2,
        )
        return hyperparams.failed_checks(outcome, hyperparams.FULL)

    assert broken(right) == []
    assert len(broken(wrong)) == 1
    assert "is off by" in broken(wrong)[0]


def test_learning_that_is_worse_than_the_grid_fails(device: torch.device) -> None:
    grid = hyperparams.Grid("grid", *torch.ones(2, 1), torch.full((1, 1), 0.5), torch.ones(1, 1))
    found = hyperparams.Learned("found", [1.0, 0.5], None, [1.0, 0.51], 1.0, 2)
    agreement = hyperparams.Agreement(9, 0.0, 0.0)
    outcome = hyperparams.Outcome([agreement], 0.0, [found] * 3, [grid] * 2)
    first, second = hyperparams.failed_checks(outcome, hyperparams.FULL)
    assert first == second == "found: the validation loss is 0.5100, and the grid's 0.5000"


# --- multitask_ddp -------------------------------------------------------------------------------


def run_script(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script that starts processes of its own, and see that none is left behind."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"} | os.environ,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=600)
    finally:
        # The resource tracker of multiprocessing ends with its parent, and init reaps it.
        left, until = True, time.monotonic() + 10
        while left and time.monotonic() < until:
            try:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            except ProcessLookupError:
                left = False
        if left:
            os.killpg(process.pid, signal.SIGKILL)
    assert not left
    return subprocess.CompletedProcess(command, process.returncode, out, err)


THREE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_processes_reach_the_weights_of_one(
    device: torch.device, tmp_path: Path, launcher: str
) -> None:
    by_torchrun = launcher == "torchrun"
    aggregator = "pcgrad" if by_torchrun or not find_spec("torchjd") else "upgrad"
    script = [*(THREE if by_torchrun else ()), EXAMPLES / "multitask_ddp.py", "--smoke"]
    script += ["--aggregator", aggregator, "--device", str(device), "--output", tmp_path]
    done = run_script(*script)

    assert done.returncode == 0, done.stderr
    picture = tmp_path / "multitask_ddp.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in done.stdout
    assert done.stdout.count("the same bits in all") == 1  # the other processes are silent
    assert ("not started by torchrun" in done.stdout) is not by_torchrun
    assert ("3 processes" if by_torchrun else "2 processes") in done.stdout
    assert re.search(r"conflict +digit and parity \d+%", done.stdout)


@pytest.mark.slow
def test_micro_batches_on_two_processes_reach_the_weights_of_one(device: torch.device) -> None:
    done = run_script(EXAMPLES / "token_weighted.py", "--smoke", "--device", str(device))
    assert done.returncode == 0, done.stderr
    assert "OK 2 processes have the weights of one" in done.stdout
    assert re.search(r"its gradient is [1-9]\d\.\d% off", done.stdout)


def test_each_claim_about_tokens_can_fail(device: torch.device) -> None:
    tokens = load_example("token_weighted")
    assert tokens.failed_checks([2.0, 1.0], 1e-15) == []
    assert len(tokens.failed_checks([1.0, 2.0], float("nan"))) == 2


WATCHED = """
import sys, weakref
import multitask_ddp as ddp

started = []
destroy = ddp.dist.destroy_process_group

def destroyed():
    started.append(weakref.ref(ddp.dist.group.WORLD))
    destroy()

ddp.dist.destroy_process_group = destroyed
status = ddp.main(sys.argv[1:])
assert started and started[0]() is None, "the group is still there"
sys.exit(status)
"""


@pytest.mark.slow
def test_no_thread_of_the_group_outlives_it(device: torch.device, tmp_path: Path) -> None:
    """One that lets go of a tensor while the interpreter ends aborts the process."""
    script = tmp_path / "watched.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n{WATCHED}")
    one = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    done = run_script(*one, script, "--smoke", "--device", str(device), "--output", tmp_path)
    assert done.returncode == 0, done.stderr


def test_pcgrad_takes_away_what_conflicts(device: torch.device) -> None:
    a, b, c = torch.randn(3, 9, device=device, dtype=torch.float64)
    b = b - (1 + a @ b) / (a @ a) * a  # in conflict with a
    c = c - (a @ c) / (a @ a) * a  # in none
    assert a @ b < 0
    by_hand = a - (a @ b) / (b @ b) * b + b - (a @ b) / (a @ a) * a
    torch.testing.assert_close(ddp.pcgrad(torch.stack([a, b])), by_hand)
    assert ddp.pcgrad(torch.stack([a, b])) @ a > 0
    torch.testing.assert_close(ddp.pcgrad(torch.stack([a, c])), a + c)


def check_processes_apart(device: torch.device) -> None:
    rank = torch.distributed.get_rank()
    model = ddp.fresh_model(device).double()
    assert ddp.apart(model) == []
    alone = deepcopy(model)
    assert ddp.difference(model, alone) == 0
    if rank == 1:
        nudge(model.heads["image"].bias)
    found = ddp.apart(model)
    assert found == [other for other in range(2) if other != rank]
    outcome = ddp.Outcome([], {"digit": 0.9}, found, torch.nan)
    assert len(ddp.failed_checks(outcome, ddp.FULL)) == 3
    assert ddp.failed_checks(ddp.Outcome([], {"digit": 0.96}, [], 1e-12), ddp.FULL) == []


def test_processes_that_come_apart_are_seen(two: Ranks, device: torch.device) -> None:
    two.run(check_processes_apart)


# --- meta_sharded --------------------------------------------------------------------------------

TWO = (*THREE[:-1], "2")


@pytest.mark.slow
def test_losses_over_shards_are_those_of_one_process(device: torch.device, tmp_path: Path) -> None:
    curves = {}
    for launcher, count in (((), 1), (TWO, 2)):
        script = [*launcher, EXAMPLES / "meta_sharded.py", "--smoke", "--device", str(device)]
        file, folder = tmp_path / f"{count}.json", tmp_path / str(count)
        done = run_script(*script, "--curve", file, "--output", folder)
        assert done.returncode == 0, done.stderr
        assert (folder / "meta_sharded.png").read_bytes().startswith(b"\x89PNG")
        assert done.stdout.count("the losses are those of one process") == 1
        assert f"{30720 // count:,} of 30,720 numbers" in done.stdout
        assert CUT not in done.stdout
        curves[count] = torch.tensor(json.loads(file.read_text()), dtype=torch.float64)
    assert len(curves[1]) == 2 * shards.SMOKE.steps + 2 * (2 * shards.INNER_STEPS + 1) + 1
    torch.testing.assert_close(curves[2], curves[1], rtol=0, atol=1e-10)


def check_meta_gradient(device: torch.device) -> None:
    """Through steps that are recomputed, with respect to shards and a rate: that of one process."""
    config = shards.Config(length=6, width=4, layers=1)
    tasks = shards.Library(shards.READ[:4], config.length, device).draw()
    expected_loss, expected = shards.meta_step(shards.whole(config, device), tasks)
    loss, grads = shards.meta_step(shards.sharded(config, device), tasks)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads["log_rate"], expected["log_rate"], rtol=0, atol=1e-12)
    for name, grad in expected["params"].items():
        whole = grads["params"][name].full_tensor()
        torch.testing.assert_close(whole, grad, rtol=0, atol=1e-12)


def test_meta_gradient_over_shards_is_that_of_one_process(two: Ranks, device: torch.device) -> None:
    two.run(check_meta_gradient)


def check_claims_about_shards(device: torch.device) -> None:
    """Losses that differ, or are NaN; a process that holds all; steps that do not help."""
    falling = shards.Curves([2.0], [1.0], [3.0] * 5, [2.0, 1.5, 1.0, 1.0, 1.0], 0.3)
    right = shards.Outcome(falling, 1e-15, 100, 50)
    assert shards.failed_checks(right, shards.FULL) == []
    flat = shards.Curves([2.0], [1.0], [3.0] * 5, [2.0] * 5, 0.3)
    for difference in (1e-6, torch.nan):
        wrong = shards.Outcome(flat, difference, 100, 100)
        assert len(shards.failed_checks(wrong, shards.FULL)) == 3
    assert falling.difference(flat) == 1
    broken = shards.Curves([2.0], [1.0], [3.0] * 5, [2.0, 1.5, 1.0, 1.0, torch.nan], 0.3)
    assert not falling.difference(broken) <= 1e9


@pytest.mark.slow
def test_each_claim_about_shards_can_fail(two: Ranks, device: torch.device) -> None:
    two.run(check_claims_about_shards)


# --- private_digits ------------------------------------------------------------------------------


@pytest.fixture
def private() -> Any:
    pytest.importorskip("opacus")
    return load_example("private_digits")


@pytest.mark.slow
def test_smoke_run_is_private(
    private: Any, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert private.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "private_digits.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert CUT not in printed.out
    assert "equal Opacus'" in printed.out
    assert printed.err == ""


@pytest.mark.slow
def test_a_sum_that_is_not_clipped_is_noticed(
    private: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unclipped(model: Any, data: Any) -> Any:
        return gradkit.value_and_grads(private.losses_of(model, data).sum(), model)[1]

    monkeypatch.setattr(private, "clipped_sum", unclipped)
    model = private.fresh_model(device)
    data, _ = private.load(device)
    few = private.Data(data.images[:8], data.digits[:8])
    run = private.Run(
        1.0,
        accuracies=[1.0],
        differences=[private.difference_from_opacus(model, few)],
        moves=[private.sensitivity(model, few)],
    )
    failed = private.failed_checks([run], private.SMOKE)
    assert len(failed) == 2
    assert "differs from Opacus'" in failed[0]
    assert "has moved a sum" in failed[1]


# --- eight_losses --------------------------------------------------------------------------------


@pytest.fixture
def eight() -> Any:
    pytest.importorskip("torchjd")
    return load_example("eight_losses")


@pytest.mark.long
@pytest.mark.slow
def test_smoke_run_keeps_to_the_budget(
    eight: Any, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eight.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "eight_losses.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert CUT not in printed.out
    assert "UPGrad's step fits the budget" in printed.out
    assert printed.err == ""


@pytest.mark.slow
def test_each_claim_about_eight_losses_can_fail(device: torch.device) -> None:
    pytest.importorskip("torchjd")
    eight = load_example("eight_losses")
    falling = {"digit": [2.0] * 40 + [1.0] * 40}
    right = eight.Outcome(falling, {"streamed": 50.0, "sets": 500.0}, 1e-15)
    assert eight.failed_checks(right, eight.FULL) == []
    wrong = eight.Outcome(
        {"digit": [1.0] * 40 + [2.0] * 40}, {"streamed": 500.0, "sets": 50.0}, float("nan")
    )
    assert len(eight.failed_checks(wrong, eight.FULL)) == 4


# --- parity --------------------------------------------------------------------------------------


def test_bugs_of_one_process_are_named_and_mended(device: torch.device) -> None:
    checks = planted.checks()[:3]
    for check in checks:
        report = gradkit.distributed.parity(planted.build, check.step, check.layouts)
        assert planted.kinds(report) == check.kinds, report
    assert sum(bool(check.bug) for check in checks) == 2


@pytest.mark.slow
def test_all_planted_bugs_are_named(device: torch.device) -> None:
    done = run_script(EXAMPLES / "parity.py")
    assert done.returncode == 0, done.stderr
    assert "three bugs found and named" in done.stdout
