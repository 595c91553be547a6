"""Which passes safe_retain records: those whose gradients a call returns, and no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from tests.helpers import assert_same_bits


@contextmanager
def no_fallback() -> Iterator[None]:
    """Fail if sequential passes run in place of batched ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradkit.GradkitWarning)
        yield


def graph(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a parameter, a value that is computed from it, and a loss for each of six samples."""
    w = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)
    h = w * 2
    samples = torch.randn(6, 3, device=device, dtype=torch.float64)
    return w, h, (samples * h.sin()).sum(1)


def double(gramian: Tensor) -> Tensor:
    return torch.tensor([2.0, 1.0], device=gramian.device)


@pytest.mark.parametrize("reduced", [False, True])
def test_of_weights_from_the_gramian_the_weighted_pass(device: torch.device, reduced: bool) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    h = w * 2
    losses = [h.sum(), (h * h).sum()]
    with gradkit.safe_retain({"h": h, "w": w}) as kept, no_fallback():
        if reduced:
            gradkit.value_and_reduced_grads(losses, w, torch.clone, weights=double)
        else:
            gradkit.value_and_grads(losses, w, weights=double)
    assert [grad.tolist() for grad in kept.passes["h"]] == [[6, 6]]
    assert [grad.tolist() for grad in kept.passes["w"]] == [[12, 12]]


NUMBERS: dict[str, Callable[..., Tensor]] = {
    "gram": gradkit.gram,
    "per_loss_norms": gradkit.per_loss_norms,
    "per_sample_norms": gradkit.per_sample_norms,
}


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("name", NUMBERS)
def test_of_numbers_nothing(device: torch.device, name: str, chunk_size: int | None) -> None:
    w, h, losses = graph(device)
    for params in (w, h):  # the passes for h do not go on to w
        expected = NUMBERS[name](losses, params, chunk_size=chunk_size, retain_graph=True)
        with gradkit.safe_retain([h, w, losses]) as kept, no_fallback():
            got = NUMBERS[name](losses, params, chunk_size=chunk_size, retain_graph=True)
        assert torch.equal(got, expected)
        assert kept.passes == [(), (), ()]


@pytest.mark.parametrize("name", NUMBERS)
def test_in_a_checked_block_nothing(device: torch.device, name: str) -> None:
    w, h, losses = graph(device)
    with gradkit.checked(), gradkit.safe_retain(h) as kept, warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        NUMBERS[name](losses, w)
    assert kept.grads is None


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_of_clipped_samples_what_is_summed(device: torch.device, chunk_size: int | None) -> None:
    """In one pass, or in one for each sample, whose gradients are scaled as its result is."""
    w, h, losses = graph(device)
    norms = gradkit.per_sample_norms(losses, w, retain_graph=True)
    factors = (0.3 / (norms + 1e-6)).clamp(max=1.0)
    expected = torch.autograd.grad((factors * losses).sum(), [h, w], retain_graph=True)
    for params in (w, h):
        with gradkit.safe_retain([h, w]) as kept:
            got = gradkit.clipped_sum(losses, params, 0.3, chunk_size=chunk_size, retain_graph=True)
        if params is w:
            torch.testing.assert_close(kept.grads, list(expected))
            torch.testing.assert_close(got, expected[1])
        else:
            torch.testing.assert_close(kept.grads[0], got)
            torch.testing.assert_close(kept.grads[1], 2 * got)
        assert [len(passes) for passes in kept.passes] == [6 if chunk_size else 1] * 2


@pytest.mark.parametrize("name", NUMBERS)
def test_the_user_s_retain_grad_is_put_back(device: torch.device, name: str) -> None:
    w, h, losses = graph(device)
    h.retain_grad()
    h.grad = before = torch.ones_like(h)
    with gradkit.safe_retain(h):
        NUMBERS[name](losses, w)
    assert h.grad is before
    assert_same_bits([h.grad], [torch.ones_like(h)])


def test_a_view_that_was_changed_raises_before_the_pass(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    base = w * 1
    view = base[:2]

    def block() -> None:
        with gradkit.safe_retain(view):
            base.mul_(2)
            gradkit.gram([base.sum(), view.sum()], w)
            pytest.fail("the passes ran")

    with pytest.raises(gradkit.UnsupportedGraphError, match="changed in place"):
        block()


def in_thread(run: Callable[[], Any]) -> None:
    """Run a function in another thread, and raise what it raises."""
    errors: list[BaseException] = []

    def catch() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=catch)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_passes_of_other_threads_are_not_recorded(device: torch.device) -> None:
    w, h, losses = graph(device)
    batched: Any = {"strategy": "batched", "retain_graph": True}
    passes: list[Callable[[], Any]] = [
        lambda: gradkit.gram(losses, w, retain_graph=True),
        lambda: gradkit.value_and_grads(losses.sum(), w, retain_graph=True),
        lambda: gradkit.per_loss_grads(losses, w, **batched),
        lambda: torch.autograd.grad(losses.sum(), w, retain_graph=True),
        lambda: losses.sum().backward(retain_graph=True, inputs=[w]),
    ]
    with gradkit.safe_retain(h) as kept:
        for one in passes:
            in_thread(one)
        assert kept.grads is None
        passes[-1]()  # the same one, of this thread
    assert len(kept.passes) == 1


def test_passes_that_another_thread_runs_meanwhile_add_nothing(device: torch.device) -> None:
    w, h, losses = graph(device)
    stop, runs = Event(), [0]

    def others() -> None:
        while not stop.is_set():
            torch.autograd.grad(losses.sum(), w, retain_graph=True)
            runs[0] += 1

    thread = Thread(target=others)
    with gradkit.safe_retain(h) as kept:
        thread.start()
        own = 0
        while own < 20 or runs[0] < 20:
            torch.autograd.grad(losses[0], w, retain_graph=True)
            own += 1
        stop.set()
        thread.join()
    (expected,) = torch.autograd.grad(losses[0], h, retain_graph=True)
    assert own == len(kept.passes)
    assert all(torch.equal(grad, expected) for grad in kept.passes)


def test_a_pass_inside_a_hook_is_of_the_thread_that_called_the_outer_one(
    device: torch.device,
) -> None:
    w, h, losses = graph(device)
    v = torch.ones(3, device=device, requires_grad=True)
    middle = v * 2
    total = losses.sum()
    middle.register_hook(lambda _: torch.autograd.grad(total, w, retain_graph=True) and None)
    with gradkit.safe_retain(h) as kept:
        in_thread(lambda: torch.autograd.grad(middle.sum(), v, retain_graph=True))
        assert kept.passes == ()
        torch.autograd.grad(middle.sum(), v)
    assert len(kept.passes) == 1


def test_a_module_that_runs_in_another_thread_is_not_kept(device: torch.device) -> None:
    model = torch.nn.Linear(3, 2).to(device)
    x = torch.ones(3, device=device)
    with gradkit.safe_retain(model, "") as kept:
        in_thread(lambda: model(x).sum().backward())
        out = model(x)
        gradkit.value_and_grads(out.sum(), model)
    assert kept.values[""] is out
    assert kept.grads[""].tolist() == [1.0, 1.0]


def test_a_pass_of_a_hook_inside_a_hidden_one_is_recorded(device: torch.device) -> None:
    w, h, losses = graph(device)
    other = (3 * h).sum()
    runs: list[int] = []

    def hook(_: Tensor) -> None:
        runs.append(1)
        if len(runs) == 1:
            torch.autograd.grad(other, w, retain_graph=True)

    h.register_hook(hook)
    with gradkit.safe_retain(h) as kept:
        gradkit.gram(losses, w, chunk_size=1)
    assert [grad.tolist() for grad in kept.passes] == [[3, 3, 3]]


def test_a_hook_of_the_same_tensor_runs_a_pass(device: torch.device) -> None:
    """What arrives after it is recorded, also in the thread of a device."""
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    h, other = w * 2, (v * v).sum()
    h.register_hook(lambda _: torch.autograd.grad(other, v, retain_graph=True) and None)
    loss = h.square().sum()
    with gradkit.safe_retain({"h": h, "w": w}) as kept:
        for _ in range(2):
            loss.backward(retain_graph=True)
    assert [grad.tolist() for grad in kept.passes["h"]] == [[4, 4, 4]] * 2
    assert [grad.tolist() for grad in kept.passes["w"]] == [[8, 8, 8]] * 2


@pytest.mark.parametrize("name", ["backward", "value_and_grads", "per_loss_grads", "gram"])
def test_the_passes_that_hooks_run(device: torch.device, name: str) -> None:
    """They are recorded as outside of hooks: of gradkit's, all that return gradients."""
    w, u = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    h, z = w * 2, w * 3
    runs: dict[str, Callable[[Tensor], object]] = {
        "backward": lambda loss: loss.backward(),
        "value_and_grads": lambda loss: gradkit.value_and_grads(loss, u),
        "per_loss_grads": lambda loss: gradkit.per_loss_grads(loss, u),
        "gram": lambda loss: gradkit.gram([loss], u),
    }
    inner = (h * u).sum()

    def run(_: Tensor) -> None:
        runs[name](inner)

    z.register_hook(run)
    with gradkit.safe_retain(h) as kept:
        z.sum().backward()
    assert [grad.tolist() for grad in kept.passes] == [[1, 1, 1]] * (name != "gram")


class Adjoint(torch.autograd.Function):
    """Takes gradients of a weight in passes of its own, and returns one, as adjoints of ODEs do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.detach() * w.detach() ** 2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            out = own * w**2
            first, _ = torch.autograd.grad(out, [own, w], cotangent, retain_graph=True)
            return first, torch.autograd.grad(out, w, cotangent)[0]


class Accumulating(Adjoint):
    """Adds the gradient of the weight to its `.grad`."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            torch.autograd.backward(own * w**2, cotangent)
        return own.grad, None


PASSES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "backward": lambda loss, w: loss.backward(),
    "grad": lambda loss, w: torch.autograd.grad(loss, w),
    "value_and_grads": gradkit.value_and_grads,
}


@pytest.mark.parametrize("run", PASSES)
@pytest.mark.parametrize("function", [Adjoint, Accumulating])
def test_passes_inside_a_function_count_as_in_grad(
    device: torch.device, function: Any, run: str
) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    loss = function.apply(w * 3, w).sum()  # 3 w^3
    if function is Accumulating and run == "grad":
        return  # torch itself leaves a part of the gradient in `.grad`
    with gradkit.safe_retain({"w": w}) as kept:
        PASSES[run](loss, w)
    assert kept.grads["w"].tolist() == [9, 36]
