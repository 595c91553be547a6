"""value_and_reduced_grads: the gradients of value_and_grads, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import gradkit
from gradkit._autograd import consume_on_arrival, engine
from tests.helpers import Scribble, assert_same_bits, unchanged
from tests.strategies import OPS, WRITING, Program, build, programs


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What the engine keeps until the end of each pass."""
    seen: list[Tensor | None] = []
    run = engine.run_grad

    def keep(*args: Any, **kwargs: Any) -> Any:
        grads = run(*args, **kwargs)
        seen.extend(grads)
        return grads

    monkeypatch.setattr(consume_on_arrival, "run_grad", keep)
    return seen


def streamed(losses: Any, params: Any) -> Any:
    """Return what value_and_grads does."""
    return gradkit.value_and_reduced_grads(losses, params, torch.clone)


def outcome(run: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class of the error that it raises."""
    try:
        return run()
    except gradkit.GradkitError as error:
        return type(error)


@given(program=programs(ops=OPS + WRITING))
def test_the_function_gets_the_bits_of_value_and_grads(
    device: torch.device, program: Program
) -> None:
    def grads(call: Callable[..., Any]) -> Any:
        graph = build(program, device, torch.float32)
        params = {"values": graph.values, "leaves": graph.leaves}
        return outcome(lambda: call(graph.losses, params))

    expected = grads(gradkit.value_and_grads)
    ours = grads(streamed)
    if isinstance(ours, type) or isinstance(expected, type):
        # What is written on a gradient after it has arrived does not matter here.
        assert ours is expected or expected is gradkit.UnsupportedGraphError
        return
    assert_same_bits(ours[0], expected[0])
    for key in ("values", "leaves"):
        assert_same_bits(ours[1][key], expected[1][key])


def test_no_gradient_is_kept(device: torch.device, captured: list[Tensor]) -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40), nn.Linear(40, 1)).to(device)
    loss = model(torch.ones(2, 30, device=device)).mean()
    _, reduced = gradkit.value_and_reduced_grads(loss, model, torch.linalg.vector_norm)
    assert list(reduced) == [name for name, _ in model.named_parameters()]
    assert [grad.untyped_storage().nbytes() for grad in captured] == [4] * len(reduced)


def test_each_tensor_once(device: torch.device) -> None:
    w, bias, unused = (torch.ones(3, device=device, requires_grad=True) for _ in range(3))
    frozen = torch.ones(3, device=device)
    calls: list[Tensor] = []

    def fn(grad: Tensor) -> dict[str, Any]:
        calls.append(grad)
        return {"sum": grad.sum(), "shape": grad.shape, "none": None}

    params = {"a": w, "tied": [w, bias], "frozen": frozen, "unused": unused, "none": None}
    loss = (w * w).sum() + (bias + w).sum()
    _, reduced = gradkit.value_and_reduced_grads(loss, params, fn)
    assert len(calls) == 2
    assert reduced["a"] == {"sum": torch.tensor(9.0, device=device), "shape": (3,), "none": None}
    assert reduced["tied"][0] == reduced["a"]
    assert reduced["tied"][0]["sum"] is not reduced["a"]["sum"]
    assert reduced["frozen"] is reduced["unused"] is reduced["none"] is None


def test_a_tree_of_functions(device: torch.device) -> None:
    w = torch.tensor([3.0, 4.0], device=device, requires_grad=True)
    b = torch.tensor([1.0], device=device, requires_grad=True)
    fns = {"w": torch.linalg.vector_norm, "rest": torch.sum}
    _, reduced = gradkit.value_and_reduced_grads(
        {"square": w.square().sum() / 2, "linear": b.sum()},
        {"w": w, "rest": {"b": b}},
        fns,
        weights={"square": 2.0, "linear": 3.0},
    )
    assert reduced == {"w": torch.tensor(10.0), "rest": {"b": torch.tensor(3.0)}}


@pytest.mark.parametrize("part", [lambda g: g, lambda g: (g, g[0]), lambda g: g.view(-1)[:2]])
def test_results_share_no_memory(device: torch.device, part: Callable[[Tensor], Any]) -> None:
    a, b = (torch.ones(2, 2, device=device, requires_grad=True) for _ in range(2))
    loss = ((a + b) * torch.rand(2, 2, device=device)).sum()  # both get the same tensor
    _, reduced = gradkit.value_and_reduced_grads(loss, [a, b], part)
    tensors = [t for result in reduced for t in (result if type(result) is tuple else (result,))]
    pointers = {t.untyped_storage().data_ptr() for t in tensors}
    assert len(pointers) == len(tensors)


def test_a_function_that_writes_is_refused(device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    loss = model(torch.ones(1, 2, device=device)).square().sum()
    with (
        unchanged(*model.parameters()),
        pytest.raises(gradkit.UnsupportedGraphError, match=r"fn at params\['(weight|bias)'\]"),
    ):
        gradkit.value_and_reduced_grads(loss, model, lambda grad: grad.mul_(2), retain_graph=True)
    gradkit.value_and_grads(loss, model)


def test_a_function_that_raises(device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    model.weight.grad = torch.ones(2, 2, device=device)
    loss = model(torch.ones(1, 2, device=device)).square().sum()
    loss.retain_grad()

    def fn(grad: Tensor) -> None:
        raise KeyError("mine")

    with unchanged(*model.parameters(), loss):
        with pytest.raises(KeyError, match="mine"):
            gradkit.value_and_reduced_grads(loss, model, fn, retain_graph=True)
        gradkit.value_and_reduced_grads(loss, model, torch.sum)
        with pytest.raises(gradkit.FreedGraphError):
            gradkit.value_and_reduced_grads(loss, model, torch.sum)


def test_sparse_and_half_and_complex_gradients(device: torch.device) -> None:
    table = nn.Embedding(5, 2, sparse=True).to(device)
    index = torch.tensor([1, 1, 3], device=device)
    _, reduced = gradkit.value_and_reduced_grads(
        table(index).sum(), table, lambda grad: (grad.is_coalesced(), grad.values())
    )
    assert reduced["weight"][0]
    assert reduced["weight"][1].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    half = torch.ones(3, dtype=torch.bfloat16, device=device, requires_grad=True)
    z = torch.ones(2, dtype=torch.complex64, device=device, requires_grad=True)
    loss = half.sum().float() + (z.conj() * z).real.sum()
    _, reduced = gradkit.value_and_reduced_grads(loss, [half, z], lambda grad: grad.dtype)
    assert reduced == [torch.bfloat16, torch.complex64]


def test_other_passes_through_the_same_tensors(device: torch.device) -> None:
    """A hook that runs a pass of its own gets its gradient, and the function does not."""
    w = torch.ones(2, device=device, requires_grad=True)
    other, inside = (w * 5).sum(), []
    h = w * 2
    h.register_hook(lambda _: inside.extend(torch.autograd.grad(other, w)))
    seen: list[Tensor] = []
    gradkit.value_and_reduced_grads(h.sum(), [w], lambda grad: seen.append(grad.clone()))
    assert_same_bits(inside, [torch.full((2,), 5.0, device=device)])
    assert_same_bits(seen, [torch.full((2,), 2.0, device=device)])


def test_a_pass_of_another_thread(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    other, outside, calls = (w * 5).sum(), [], []

    def start_another(_: Tensor) -> None:
        thread = Thread(target=lambda: outside.extend(torch.autograd.grad(other, w)))
        thread.start()
        thread.join()

    def fn(grad: Tensor) -> Tensor:
        calls.append(grad)
        return grad.clone()

    z = (w * 2).cpu()  # whose hook does not hold up the device's thread, which the other needs
    z.register_hook(start_another)
    _, reduced = gradkit.value_and_reduced_grads(z.sum(), [w], fn)
    assert len(calls) == 1
    assert_same_bits(outside, [torch.full((2,), 5.0, device=device)])
    assert_same_bits(reduced, [torch.full((2,), 2.0, device=device)])


def test_hooks_of_the_caller_run_first(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    w.register_hook(lambda grad: grad * 3)
    fn = torch.clone
    with unchanged(w):
        _, (grad,) = gradkit.value_and_reduced_grads((w * 2).sum(), [w], fn)
    assert grad.tolist() == [6.0, 6.0]


def test_what_others_see_of_the_pass(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    h = w * 2
    with gradkit.safe_retain({"w": w, "h": h}) as kept:
        _, (norm,) = gradkit.value_and_reduced_grads(h.square().sum(), [w], torch.sum)
    assert norm.item() == 24
    assert kept.grads["w"].tolist() == [8.0] * 3
    assert kept.grads["h"].tolist() == [4.0] * 3
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    with gradkit.checked():
        _, reduced = gradkit.value_and_reduced_grads((a * b).sum(), [a, b], torch.sum)
    assert [x.item() for x in reduced] == [2.0, 2.0]


def test_a_spoilt_gradient_is_refused(device: torch.device) -> None:
    """A hook of one tensor writes on what another gets, before that arrives."""

    def run(call: Callable[..., Any]) -> Any:
        w = torch.ones(2, device=device, requires_grad=True)
        h, k = w.view_as(w), w * 1.0
        h.register_hook(lambda grad: grad.mul_(7))
        scale = torch.ones(2, device=device)
        return outcome(lambda: call(((k + h) * scale).sum(), [k, w]))

    ours = run(lambda losses, params: streamed(losses, params)[1])
    expected = run(lambda *args: gradkit.value_and_grads(*args)[1])
    assert ours is gradkit.UnsupportedGraphError or expected is not gradkit.UnsupportedGraphError
    w = torch.ones(2, device=device, requires_grad=True)
    v = torch.ones(2, device=device, requires_grad=True)
    loss = (Scribble.apply(w) + v).square().sum()
    _, (grad, _) = gradkit.value_and_reduced_grads(loss, [w, v], torch.clone)
    assert grad.tolist() == [28.0, 28.0]


@pytest.mark.parametrize("fn", [None, 3, {"weight": torch.sum, "bias": 3}])
def test_what_is_no_function_is_refused(device: torch.device, fn: Any) -> None:
    model = nn.Linear(2, 2).to(device)
    loss = model(torch.ones(1, 2, device=device)).sum()
    with unchanged(*model.parameters()), pytest.raises(gradkit.OptionError, match="fn: expected"):
        gradkit.value_and_reduced_grads(loss, model, fn)
    with pytest.raises(gradkit.StructureError, match="fn"):
        gradkit.value_and_reduced_grads(loss, model, {"weight": torch.sum})
    with pytest.raises(gradkit.OptionError, match="retain_graph"):
        gradkit.value_and_reduced_grads(loss, model, torch.sum, retain_graph=1)
    gradkit.value_and_reduced_grads(loss, model, torch.sum)  # nothing had run
    with pytest.raises(gradkit.UnreachedParamError):
        gradkit.value_and_reduced_grads(torch.ones((), requires_grad=True) * 1, model, torch.sum)
