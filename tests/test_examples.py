"""The demos keep their promises, and would notice if they did not."""

from __future__ import annotations

import importlib.util
import re
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy

for extra in ("sklearn", "rich", "matplotlib"):
    pytest.importorskip(extra)


def load_example(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


demo = load_example("multitask_digits")
digits = load_example("per_sample_digits")


def smoke(device: torch.device, folder: Path) -> int:
    return demo.main(["--smoke", "--device", str(device), "--output", str(folder)])


def nudge(weight: torch.Tensor) -> None:
    """Change the first number by one unit in the last place."""
    with torch.no_grad():
        first = weight.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


@pytest.fixture
def batch(device):
    data, _ = demo.load(256, device)
    return demo.Batch(data.images[:64], data.digits[:64])


def test_smoke_run_keeps_its_promises(device, tmp_path, capsys):
    assert smoke(device, tmp_path / "new" / "folder") == 0

    picture = tmp_path / "new" / "folder" / "multitask_digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr()
    assert str(picture) in told.out
    assert "equal bit for bit" in told.out
    assert "test accuracy" in told.out
    assert "safe_retain" in told.out
    assert told.err == ""


def test_run_in_which_one_weight_moves_by_one_ulp_fails(device, tmp_path, capsys, monkeypatch):
    step = demo.gradkit_step

    def nudged_step(model, optimizer, batch):
        values = step(model, optimizer, batch)
        nudge(model.heads["image"].bias)
        return values

    monkeypatch.setattr(demo, "gradkit_step", nudged_step)
    assert smoke(device, tmp_path) == 1
    told = capsys.readouterr()
    assert "heads.image.bias" in told.err
    assert "equal bit for bit" not in told.out


def test_run_below_the_accuracy_fails(device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "SMOKE", demo.Size(1, 256, 2, accuracy=0.95))
    assert smoke(device, tmp_path) == 1
    assert "not above 95%" in capsys.readouterr().err


def test_full_run_demands_the_accuracy(device):
    assert demo.FULL.accuracy == 0.95
    assert demo.broken_promises([], 0.95, demo.FULL.accuracy)
    assert not demo.broken_promises([], 0.951, demo.FULL.accuracy)


@pytest.mark.parametrize("name", ["trunk.0.weight", "trunk.2.bias", "heads.parity.bias"])
def test_comparison_sees_one_ulp(device, name):
    model = demo.fresh_model(device)
    other = deepcopy(model)
    assert demo.differing_weights(model, other) == []
    nudge(other.get_parameter(name))
    assert demo.differing_weights(model, other) == [name]


def test_comparison_sees_the_sign_of_zero(device):
    model = demo.fresh_model(device)
    torch.nn.init.zeros_(model.heads["digit"].bias)
    other = deepcopy(model)
    with torch.no_grad():
        other.heads["digit"].bias.neg_()
    assert demo.differing_weights(model, other) == ["heads.digit.bias"]


def test_both_steps_leave_the_same_bits(device, batch):
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


def test_looking_tells_the_truth_and_changes_nothing(device, batch):
    model = demo.fresh_model(device)
    sight = demo.look(7, model, batch)
    assert demo.differing_weights(model, demo.fresh_model(device)) == []
    assert all(weight.grad is None for weight in model.parameters())

    flat, at_output = {}, {}
    for name in demo.WEIGHTS:
        seen = []
        hook = model.trunk.register_forward_hook(
            lambda _m, _i, output, seen=seen: seen.append(output)
        )
        loss = demo.multitask_losses(model, batch)[name]
        hook.remove()
        *grads, output = torch.autograd.grad(loss, [*model.trunk.parameters(), *seen])
        flat[name] = torch.cat([grad.flatten() for grad in grads])
        at_output[name] = output.norm().item()

    assert sight.step == 7
    assert sight.norms == pytest.approx({name: grad.norm().item() for name, grad in flat.items()})
    assert sight.at_output == pytest.approx(at_output)
    for (a, b), cosine in sight.cosines.items():
        expected = torch.nn.functional.cosine_similarity(flat[a], flat[b], dim=0).item()
        assert cosine == pytest.approx(expected, abs=1e-5)


def test_start_and_batches_are_the_same_every_time(device, batch):
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


# --- per_sample_digits ---------------------------------------------------------------------------


def smoke_per_sample(device: torch.device, folder: Path) -> int:
    return digits.main(["--smoke", "--device", str(device), "--output", str(folder)])


@pytest.fixture(scope="module")
def outcome(device):
    return digits.experiment(digits.SMOKE, device, digits.Console(quiet=True))


def as_text(table: digits.Table) -> str:
    console = digits.Console(width=120)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_smoke_run_finds_the_wrong_labels(device, tmp_path, capsys):
    assert smoke_per_sample(device, tmp_path / "new" / "folder") == 0

    picture = tmp_path / "new" / "folder" / "per_sample_digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr()
    assert str(picture) in told.out
    assert "find the wrong labels" in told.out
    assert "of the first 10 are mislabelled" in told.out
    assert "test accuracy" in told.out
    assert told.err == ""


def test_wrong_labels_stand_far_in_front(device, outcome):
    count = int(outcome.data.flipped.sum())
    chance = count / len(outcome.data.flipped)
    precision = digits.found(outcome.norms, outcome.data.flipped, count) / count
    assert chance == digits.FLIPPED
    assert precision > 20 * chance
    assert digits.broken_promises(outcome, digits.SMOKE) == []
    assert digits.FULL.precision > 20 * chance


def test_table_tells_what_was_found(device, outcome):
    assert all(scores.isfinite().all() for scores in outcome.scores.values())
    rows = [
        [float(cell) for cell in re.findall(r"(\S+?)%? +[│]", line)]
        for line in as_text(digits.precision_table(outcome)).splitlines()
        if line.startswith("│")
    ]
    flipped = outcome.data.flipped
    assert [row[0] for row in rows] == [5, 10, 20]  # 10 are flipped
    for k, *precisions, chance, recall in rows:
        hits = [digits.found(scores, flipped, int(k)) for scores in outcome.scores.values()]
        assert precisions == pytest.approx([100 * count / k for count in hits], abs=0.5)
        assert chance == 2
        assert recall == pytest.approx(100 * hits[0] / 10, abs=0.5)


def test_counting_on_paper(device):
    scores = torch.tensor([0.1, 5.0, 3.0, 4.0, 0.2], device=device)
    flipped = torch.tensor([True, True, False, True, False], device=device)
    assert [digits.found(scores, flipped, k) for k in range(1, 6)] == [1, 2, 2, 2, 3]


@pytest.mark.parametrize("images", [500, 1347])
def test_two_percent_of_the_labels_are_wrong(device, images):
    data, test = digits.load(images, device)
    assert data.flipped.sum() == round(0.02 * images)
    assert not test.flipped.any()
    assert set(data.given.tolist()) <= set(range(10))
    assert len(set((data.given - data.true)[data.flipped].tolist())) > 2  # not to one class on


def test_labels_and_start_are_the_same_every_time(device):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = digits.load(500, device)[0], digits.fresh_model(device)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = digits.load(500, device)[0], digits.fresh_model(device)
    assert torch.equal(first[0].given, second[0].given)
    assert demo.differing_weights(first[1], second[1]) == []


def test_norms_are_of_the_gradients_and_change_nothing(device):
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
def test_run_with_norms_that_no_loop_gives_fails(device, tmp_path, capsys, monkeypatch, factor):
    right = digits.sample_norms

    def wrong(model, data):
        norms, losses = right(model, data)
        return norms * factor, losses

    monkeypatch.setattr(digits, "sample_norms", wrong)
    monkeypatch.setattr(digits, "SMOKE", digits.Size(1, 500, 2, precision=-1.0))
    assert smoke_per_sample(device, tmp_path) == 1
    told = capsys.readouterr()
    assert "a norm differs from the loop's" in told.err
    assert "find the wrong labels" not in told.out


def test_run_that_finds_too_few_fails(device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(digits, "SMOKE", digits.Size(1, 500, 2, precision=1.0))
    assert smoke_per_sample(device, tmp_path) == 1
    assert "not above 100%" in capsys.readouterr().err


# --- maml_sinusoid -------------------------------------------------------------------------------


def test_smoke_run_adapts_to_new_waves(device, tmp_path, capsys):
    maml = load_example("maml_sinusoid")
    assert maml.main(["--smoke", "--device", str(device), "--output", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    picture = tmp_path / "maml_sinusoid.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in told.replace("\n", "")
    for method in ("MAML", "FOMAML", "Meta-SGD"):
        assert method in told
    assert "adapts to new waves" in told
