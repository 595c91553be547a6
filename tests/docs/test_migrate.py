"""The six loops that were moved: both versions leave equal weights, and a difference is seen."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import gradkit

pytest.importorskip("sklearn")

Load: TypeAlias = Callable[[str], Any]
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "migrate"
SCRIPTS = ["amp", "classifier", "dcgan", "gan", "language_model", "lbfgs"]
GRADKIT = {
    "amp": {"value_and_grads", "step_"},
    "classifier": {"value_and_grads", "tree.add", "tree.clip_by_global_norm", "step_"},
    "dcgan": {"value_and_grads", "per_loss_grads", "tree.add", "step_"},
    "gan": {"value_and_grads", "simultaneous_grads", "step_"},
    "language_model": {"value_and_grads", "tree.clip_by_global_norm", "step_"},
    "lbfgs": {"value_and_grads", "write_grads_", "capture_grads", "tree.global_norm"},
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return what imports a module as the scripts do: from their own folder."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def nudge(weight: torch.Tensor) -> None:
    """Change the last number by one unit in the last place."""
    with torch.no_grad():
        last = weight.view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))


def after(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, do: Callable[[list[nn.Module]], object]
) -> list[list[nn.Module]]:
    """Let `do` run on the models after the functional loop; return the models of each loop."""
    seen: list[list[nn.Module]] = []
    for name in ("legacy", "functional"):
        loop = getattr(script, name)

        def wrapped(*args: Any, loop: Any = loop, name: str = name) -> Any:
            models = [arg for arg in args if isinstance(arg, nn.Module)]
            seen.append([deepcopy(model) for model in models])
            result = loop(*args)
            if name == "functional":
                do(models)
            seen.append(models)
            return result

        monkeypatch.setattr(script, name, wrapped)
    return seen


def calls(function: Callable[..., Any]) -> set[str]:
    """Return the names that a function takes from gradkit."""
    names = (
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(inspect.getsource(function)))
        if isinstance(node, ast.Call)
    )
    found = {name.removeprefix("gradkit.") for name in names if name.startswith("gradkit.")}
    # `gradkit.tree.global_norm(...).item()` is a call as well
    return {name for name in found if "(" not in name}


def test_every_script_is_tried(device: torch.device) -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.py")) == sorted([*SCRIPTS, "side_by_side"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_weights_are_equal_bit_for_bit(
    device: torch.device,
    name: str,
    load: Load,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, bits = load(name), load("side_by_side")
    seen = after(script, monkeypatch, lambda models: None)
    assert script.main(["--smoke", "--device", str(device)]) == 0

    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.count("\n") == 1
    start, theirs, same_start, ours = seen
    count = sum(weight.numel() for model in ours for weight in model.parameters())
    assert f"{count:,} weights equal bit for bit" in told.out
    for before, again, one, other in zip(start, same_start, theirs, ours, strict=True):
        assert bits.differing_weights(before, again) == []
        assert bits.differing_weights(one, other) == []
        # The loops have trained, and did not only leave things alone. (The last bias of a
        # Wasserstein critic stays where it is: it cancels out of the difference of two means.)
        matrices = {n for n, weight in one.named_parameters() if weight.dim() > 1}
        assert matrices <= set(bits.differing_weights(before, one))


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_the_legacy_loop_leaves_grads(
    device: torch.device, name: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load(name)
    seen = after(script, monkeypatch, lambda models: None)
    script.main(["--smoke", "--device", str(device)])
    _, theirs, _, ours = seen
    assert all(p.grad is not None for model in theirs for p in model.parameters())
    assert all(p.grad is None for model in ours for p in model.parameters())


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_ulp_in_one_weight_fails(
    device: torch.device,
    name: str,
    load: Load,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load(name)
    last: list[str] = []

    def nudge_the_last(models: list[nn.Module]) -> None:
        last.append(list(dict(models[-1].named_parameters()))[-1])
        nudge(models[-1].get_parameter(last[0]))

    after(script, monkeypatch, nudge_the_last)
    assert script.main(["--smoke", "--device", str(device)]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("FAILED: the two runs differ in ")
    assert told.err.rstrip().endswith(last[0])
    assert "equal bit for bit" not in told.out


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_legacy_loop_trains_without_gradkit(
    device: torch.device, name: str, load: Load
) -> None:
    script = load(name)
    assert calls(script.functional) == GRADKIT[name]
    # Only to look at the last gradient, after the training.
    looks = {"read_grads", "tree.global_norm"} if name == "lbfgs" else set()
    assert calls(script.legacy) == looks


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_half_moved_loop_is_caught(
    device: torch.device, name: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`checked()` sees the step that was left behind; the scaler's raises by itself."""
    script, functional = load(name), load(name).functional
    models: list[nn.Module] = []
    before: list[nn.Module] = []

    def leftover(optimizer: Any, *_: Any, scaler: Any = None, **__: Any) -> None:
        optimizer.step() if scaler is None else scaler.step(optimizer)

    def half_moved(*args: Any) -> Any:
        models.extend(arg for arg in args if isinstance(arg, nn.Module))
        before.extend(deepcopy(models))
        with gradkit.checked():
            return functional(*args)

    monkeypatch.setattr(gradkit, "step_", leftover)
    monkeypatch.setattr(gradkit, "write_grads_", lambda params, grads: None)
    monkeypatch.setattr(script, "legacy", half_moved)  # the first that runs
    caught = (gradkit.GradkitWarning, AssertionError)
    with pytest.raises(caught, match=r"with every \.grad None|No inf checks were recorded"):
        script.main(["--smoke", "--device", str(device)])
    differing = load("side_by_side").differing_weights
    assert models
    assert not any(map(differing, before, models))


def test_the_pass_of_dcgan_s_generator_computes_no_gradient_of_the_critic(
    device: torch.device, load: Load
) -> None:
    script = load("dcgan")
    batches = script.load(device, epochs=1)[:2]

    def arrivals(loop: Callable[..., float]) -> int:
        """Return how many gradients of the critic's first weight a batch takes."""
        arrived: list[torch.Tensor] = []

        def counted(generator: nn.Module, critic: nn.Module, batches: Any) -> float:
            next(critic.parameters()).register_hook(arrived.append)
            return loop(generator, critic, batches)

        script.train(counted, batches, device)
        return len(arrived) // len(batches)

    assert (arrivals(script.legacy), arrivals(script.functional)) == (3, 2)


def test_amp_without_an_overflow_fails(
    device: torch.device,
    load: Load,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load("amp")

    def calm(device: torch.device, **_: Any) -> Any:
        return torch.amp.GradScaler(device, init_scale=2.0**24, enabled=False)

    monkeypatch.setattr(script, "GradScaler", calm)
    assert script.main(["--smoke", "--device", str(device)]) == 1
    assert "skipped 0 of" in capsys.readouterr().err


def test_comparison_sees_one_ulp_and_the_sign_of_zero(device: torch.device, load: Load) -> None:
    bits = load("side_by_side")
    model = nn.Linear(3, 2).to(device)
    nn.init.zeros_(model.bias)
    for change in (nudge, lambda weight: weight.data.neg_()):
        for name in ("weight", "bias"):
            other = deepcopy(model)
            assert bits.differing_weights(model, other) == []
            change(other.get_parameter(name))
            assert bits.differing_weights(model, other) == [name]
