"""The loops of other libraries, with and without gradkit: the weights are equal."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.processes import Ranks, device_of_ranks

pytest.importorskip("sklearn")

os.environ["HF_HUB_OFFLINE"] = "1"
Load: TypeAlias = Callable[[str], ModuleType]
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "with"
LIBRARIES = {
    "accelerate_loop": "accelerate",
    "lightning_module": "lightning",
    "trainer_step": "transformers",
}
slow = pytest.mark.slow
# Theirs: deprecated names of torch and of each other, and advice about loaders and logs.
quiet = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return what imports a script as if it were run, from its own folder."""
    monkeypatch.syspath_prepend(FOLDER)

    def load(name: str) -> ModuleType:
        pytest.importorskip(LIBRARIES[name], reason=f"pip install -e '.[{LIBRARIES[name]}]'")
        return importlib.import_module(name)

    return load


def test_every_script_is_tried(device: torch.device) -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted([*LIBRARIES, "_shared"])


@pytest.mark.parametrize("name", LIBRARIES)
def test_without_its_library_a_script_says_what_to_install(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, name, raising=False)
    for library in (*LIBRARIES.values(), "peft"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"pip install gradkit\[{LIBRARIES[name]}\]"):
        importlib.import_module(name)


@slow
@quiet
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_smoke_run_leaves_equal_weights(
    device: torch.device, name: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(name).main(["--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = {"accelerate_loop": 1, "lightning_module": 3, "trainer_step": 2}[name]
    assert sum("weights equal" in line for line in lines) == runs


@slow
@quiet
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_with_other_gradients_fails(
    device: torch.device, name: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gradkit returns is what the weights are made of."""
    script = load(name)
    true, true_per_loss = gradkit.value_and_grads, gradkit.per_loss_grads

    def half(losses: Any, params: Any) -> Any:
        value, grads = true(losses, params)
        return value, gradkit.tree.scale(grads, 0.5)

    def half_per_loss(losses: Any, params: Any) -> Any:
        return gradkit.tree.scale(true_per_loss(losses, params), 0.5)

    monkeypatch.setattr(gradkit, "value_and_grads", half)
    monkeypatch.setattr(gradkit, "per_loss_grads", half_per_loss)
    assert script.main(["--smoke"]) == 1


@slow
@quiet
def test_the_trainer_records_the_angle_of_the_losses(device: torch.device, load: Load) -> None:
    script = load("trainer_step")
    start = script.new_model(adapter=True)
    model, trainer = script.train(script.WithGradkit, script.Counting(64), adapter=True)
    history = trainer.record.history
    cosines = history.cosines["lm", "z"]
    assert len(cosines) == 4
    assert all(-1 < cosine < 1 for cosine in cosines)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    for name, p in start.named_parameters():
        assert torch.equal(p, model.get_parameter(name)) is (name in frozen)


@slow
@quiet
def test_lightning_counts_the_steps_and_logs_the_conflicts(
    device: torch.device, load: Load
) -> None:
    script = load("lightning_module")
    model, trainer = script.train(script.GradkitTwoLosses, 256)
    assert trainer.global_step == 4  # two micro-batches of 32 each
    assert trainer.logged_metrics["conflicts"].item() in {0.0, 1.0}
    assert all(p.grad is None for p in model.parameters())


# --- Optimizers that the libraries have wrapped --------------------------------------------------


@pytest.fixture
def accelerate() -> Any:
    """Return the library, without what another test has left in its global state."""
    accelerate = pytest.importorskip("accelerate", reason="pip install -e '.[accelerate]'")
    state = accelerate.state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    return accelerate


def weights_after(step: Callable[[Tensor, torch.amp.GradScaler, Any], None], wrapper: Any) -> Any:
    w = torch.ones(3, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step(w, scaler, wrapper(torch.optim.SGD([w], lr=0.1), scaler))
    return w.detach(), scaler.get_scale()


@slow
@quiet
def test_a_prepared_optimizer_unscales_once(device: torch.device, accelerate: Any) -> None:
    accelerate.Accelerator(cpu=True)

    def wrapped(optimizer: Any, scaler: Any) -> Any:
        return accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)

    def usual(w: Tensor, scaler: Any, optimizer: Any) -> None:
        scaler.scale(w.square().sum()).backward()
        optimizer.step()

    def functional(w: Tensor, scaler: Any, optimizer: Any) -> None:
        _, grads = gradkit.value_and_grads(scaler.scale(w.square().sum()), [w])
        for options in ({"scaler": scaler}, {"max_norm": 1.0}):
            with pytest.raises(gradkit.UnsupportedOptimizerError, match="unscales the gradients"):
                gradkit.step_(optimizer, [w], grads, **options)
        gradkit.step_(optimizer, [w], grads)

    theirs, ours = weights_after(usual, wrapped), weights_after(functional, wrapped)
    assert torch.equal(theirs[0], ours[0])
    assert torch.equal(ours[0], torch.full((3,), 0.8))
    assert theirs[1] == ours[1]


@slow
@quiet
def test_a_prepared_optimizer_takes_gradients_clipped_to_the_scaled_norm(
    device: torch.device, accelerate: Any
) -> None:
    accelerate.Accelerator(cpu=True)

    def wrapped(optimizer: Any, scaler: Any) -> Any:
        return accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)

    def usual(w: Tensor, scaler: Any, optimizer: Any) -> None:
        scaler.scale(w.square().sum()).backward()
        scaler.unscale_(optimizer.optimizer)
        nn.utils.clip_grad_norm_([w], 0.5)
        optimizer.step()

    def functional(w: Tensor, scaler: Any, optimizer: Any) -> None:
        _, grads = gradkit.value_and_grads(scaler.scale(w.square().sum()), [w])
        clipped, _ = gradkit.tree.clip_by_global_norm(grads, 0.5 * scaler.get_scale())
        gradkit.step_(optimizer, [w], clipped)

    theirs, ours = weights_after(usual, wrapped), weights_after(functional, wrapped)
    torch.testing.assert_close(theirs[0], ours[0], rtol=0, atol=1e-6)
    assert not torch.allclose(ours[0], torch.full((3,), 0.8))


@slow
@quiet
def test_an_optimizer_of_lightning_with_a_scaler_does_not_clip(
    device: torch.device, load: Load
) -> None:
    script = load("lightning_module")
    refused = []

    def clip(self: Any, batch: Any, index: int) -> None:
        _, grads = gradkit.value_and_grads(self.losses(batch), self)
        before = [p.detach().clone() for p in self.parameters()]
        with pytest.raises(gradkit.UnsupportedOptimizerError, match="unscales the gradients"):
            gradkit.step_(self.optimizers(), self, grads, max_norm=1.0)
        assert all(map(torch.equal, before, self.parameters()))
        refused.append(index)

    kind = type("Clips", (script.GradkitTwoLosses,), {"training_step": clip})
    script.train(kind, 64, **script.float16())
    assert refused == [0, 1]


@slow
@quiet
@pytest.mark.parametrize("name", ["accelerate_loop", "lightning_module"])
def test_bfloat16_needs_no_other_lines(
    device: torch.device, accelerate: Any, load: Load, name: str
) -> None:
    script = load(name)
    if name == "accelerate_loop":
        atol = 0.0  # the same passes
        options = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
        accelerator = script.Accelerator(cpu=True, **options)
        theirs, ours = (
            script.train(f, accelerator, 256) for f in (script.usual, script.functional)
        )
    else:
        atol = 2e-3  # a pass for each loss, and gradients in bfloat16
        kinds = (script.UsualTwoLosses, script.GradkitTwoLosses)
        theirs, ours = (script.train(kind, 256, precision="bf16-mixed")[0] for kind in kinds)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@slow
@quiet
def test_a_prepared_optimizer_between_micro_batches_raises(
    device: torch.device, accelerate: Any
) -> None:
    model = nn.Linear(2, 1)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _, grads = gradkit.value_and_grads(model(torch.ones(1, 2)).sum(), model)
    before = model.weight.detach().clone()
    with accelerator.accumulate(model):
        optimizer.step()  # which does nothing here
        with pytest.raises(gradkit.UnsupportedOptimizerError, match="skips this step"):
            gradkit.step_(optimizer, model, grads)
    assert torch.equal(model.weight, before)
    with accelerator.accumulate(model):
        gradkit.step_(optimizer, model, grads)
    assert not torch.equal(model.weight, before)


# --- Two processes -------------------------------------------------------------------------------


def as_torchrun(rank: int) -> None:
    """Set what torchrun sets. The process group is there already, and both libraries use it."""
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test",
        "GROUP_RANK": "0",
    }  # fmt: skip
    sys.path.insert(0, str(FOLDER))


def weights_of(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


def train_with_accelerate(device: torch.device) -> tuple[int, Any, Any]:
    as_torchrun(torch.distributed.get_rank())
    script = importlib.import_module("accelerate_loop")
    accelerator = script.Accelerator(cpu=True, gradient_accumulation_steps=script.MICRO_BATCHES)
    models = [script.train(loop, accelerator, 256) for loop in (script.usual, script.functional)]
    return accelerator.num_processes, *map(weights_of, models)


def train_with_lightning(device: torch.device) -> tuple[int, Any, Any]:
    as_torchrun(torch.distributed.get_rank())
    script = importlib.import_module("lightning_module")
    kinds = (script.UsualTwoLosses, script.GradkitTwoLosses)
    (theirs, _), (ours, trainer) = (script.train(kind, 256) for kind in kinds)
    return trainer.world_size, weights_of(theirs), weights_of(ours)


def train_gans_with_lightning(device: torch.device) -> tuple[int, Any, Any]:
    as_torchrun(torch.distributed.get_rank())
    script = importlib.import_module("lightning_module")
    (theirs, _), (ours, trainer) = (
        script.train(kind, 256) for kind in (script.UsualGan, script.GradkitGan)
    )
    return trainer.world_size, weights_of(theirs), weights_of(ours)


def tensors(weights: Any) -> list[Tensor]:
    return [torch.tensor(weight) for weight in weights]


def on_both(device: torch.device, two: Ranks, function: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of the usual loop and of gradkit's; each the same on both ranks."""
    if device_of_ranks(device.type, 2) != "cpu":
        pytest.skip("the scripts run on the CPU, where this group of ranks does not")
    first, second = two.run(function)
    assert first[0] == second[0] == 2
    assert first[1:] == second[1:]
    return tensors(first[1]), tensors(first[2])


@slow
@quiet
def test_accelerate_on_two_processes_is_one_on_the_joined_batch(
    device: torch.device, accelerate: Any, two: Ranks, load: Load
) -> None:
    script = load("accelerate_loop")
    theirs, ours = on_both(device, two, train_with_accelerate)
    accelerator = script.Accelerator(cpu=True, gradient_accumulation_steps=script.MICRO_BATCHES)
    joined = script.train(script.functional, accelerator, 256, batch_size=64)
    for a, b, c in zip(theirs, ours, tensors(weights_of(joined)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        torch.testing.assert_close(b, c, rtol=0, atol=1e-5)


@slow
@quiet
def test_lightning_on_two_processes_is_one_on_the_joined_batch(
    device: torch.device, two: Ranks, load: Load
) -> None:
    script = load("lightning_module")
    theirs, ours = on_both(device, two, train_with_lightning)
    joined, _ = script.train(script.GradkitTwoLosses, 256, batch_size=64)
    for a, b, c in zip(theirs, ours, tensors(weights_of(joined)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        torch.testing.assert_close(b, c, rtol=0, atol=1e-5)


@slow
@quiet
def test_a_gan_of_lightning_on_two_processes(device: torch.device, two: Ranks, load: Load) -> None:
    load("lightning_module")
    for a, b in zip(*on_both(device, two, train_gans_with_lightning), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
