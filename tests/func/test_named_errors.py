"""Errors of torch that gradkit.func names, with what to do about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit import func
from tests.helpers import unchanged


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def scanned(x: Tensor) -> Tensor:
    from torch._higher_order_ops import scan

    return scan(lambda c, y: (c + y.sin(), c * y), torch.zeros_like(x[0]), x)[1]


def repeated(x: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    start = torch.zeros((), dtype=torch.long, device=x.device)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (start, x))[1]


CONTROL_FLOW: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "cond": (branch, lambda x: x.sin() if x.sum() > 0 else x.cos()),
    "scan": (scanned, lambda x: torch.stack([x[:i].sin().sum(0) * y for i, y in enumerate(x)])),
    "while_loop": (repeated, lambda x: x.sin().sin().sin()),
}
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "value_and_grads": lambda fn, x: func.value_and_grads(fn)(x),
    "value_and_grads, create_graph=False": lambda fn, x: func.value_and_grads(
        fn, create_graph=False
    )(x),
    "hvp": lambda fn, x: func.hvp(fn, x, x),
    "nested": lambda fn, x: func.value_and_grads(
        lambda x: func.value_and_grads(fn)(x)[1].square().sum()
    )(x),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_write_on_what_the_derivative_needs_is_named(device: torch.device, call: str) -> None:
    x = torch.ones(2, device=device)

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        z = (y * y).sum()
        y.add_(1)
        return z

    expected = r"fn: .*needs as it is, got .*inplace operation.*\n.*y \+ 1"
    with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match=expected):
        CALLS[call](fn, x)
    with pytest.raises(gradkit.UnsupportedGraphError, match=expected):  # torch's own formula writes
        func.value_and_grads(lambda x: func.hvp(torch.std, x, x)[1].sum())(x)
    grad = func.value_and_grads(
        lambda x: func.hvp(torch.std, x, x, mode="reverse-over-reverse")[1].sum()
    )
    assert grad(torch.tensor([1.0, 2.0], device=device))[1].isfinite().all()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
@pytest.mark.parametrize("name", CONTROL_FLOW)
@pytest.mark.parametrize("call", CALLS)
def test_control_flow_is_right_once_and_named_beyond(
    device: torch.device, name: str, call: str
) -> None:
    """Where it is differentiated more than once; once, the engine does it."""
    operation, by_hand = CONTROL_FLOW[name]
    x = torch.linspace(0.1, 1, 6, device=device).view(3, 2)
    right = CALLS[call](lambda x: by_hand(x).sum(), x)
    if call.startswith("value_and_grads"):
        got = CALLS[call](lambda x: operation(x).sum(), x)
        torch.testing.assert_close(got, right)
        return
    with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match=f"(?s){name}.*Python"):
        CALLS[call](lambda x: operation(x).sum(), x)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_control_flow_after_an_operation_that_torch_s_compiler_cannot_trace(
    device: torch.device,
) -> None:
    """It traces what watches the operations, too, which knows those that ran before."""
    values = torch.ones(2, device=device)

    def sparse(x: Tensor) -> Tensor:
        rows = torch.sparse_csr_tensor([0, 2], [0, 1], x.detach(), (1, 2), device=device)
        return rows.to_dense().sum() + x.sum()

    func.value_and_grads(sparse)(values)
    _, grad = func.value_and_grads(lambda x: branch(x).sum())(values)
    torch.testing.assert_close(grad, values.cos())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_eager_calls_differentiate_control_flow_once(device: torch.device, name: str) -> None:
    operation, by_hand = CONTROL_FLOW[name]
    x = torch.linspace(0.1, 1, 6, device=device).view(3, 2).requires_grad_()
    _, grad = gradkit.value_and_grads(operation(x).sum(), x)
    torch.testing.assert_close(grad, gradkit.value_and_grads(by_hand(x).sum(), x)[1])


class MineError(Exception):
    pass


def test_an_error_of_the_function_stays_what_it_is(device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        raise MineError

    with pytest.raises(MineError):
        func.value_and_grads(fn)(torch.ones(1, device=device))


def require(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


class Hook:
    def method(self, module: nn.Module, inputs: Any) -> None:
        inputs[0].requires_grad_()


def test_a_hook_that_requires_grad_is_named(device: torch.device) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1)).to(device)
    ids = torch.tensor([0, 3], device=device)
    call, params, buffers = func.make_functional(model)

    def loss(params: Any) -> Tensor:
        return call(params, buffers, ids)[0].sum()

    handles = {
        "require, a forward hook of Embedding": model[0].register_forward_hook(require),
        "method, a forward hook of Linear": model[1].register_forward_pre_hook(Hook().method),
    }
    right = gradkit.value_and_grads(model(ids).sum(), model)
    for name, handle in handles.items():
        match = f"(?s)requires_grad_\\(\\) by {name}.*handle.remove.*disable_input_require_grads"
        with unchanged(*params.values()):
            torch.testing.assert_close(func.value_and_grads(loss)(params), right)
            with pytest.raises(gradkit.UnsupportedGraphError, match=match):
                func.hvp(loss, params, params)
        handle.remove()
    func.hvp(loss, params, params)


def test_a_function_that_requires_grad_by_itself_is_no_hook(device: torch.device) -> None:
    x = torch.ones(1, device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"requires_grad_\(\), or of") as caught:
        func.hvp(lambda x: x.requires_grad_().sum(), x, x)
    assert "hook" not in str(caught.value)
    assert func.value_and_grads(lambda x: x.requires_grad_().square().sum())(x) == (1, 2)


def test_a_graph_that_fn_has_freed_is_named(device: torch.device) -> None:
    w = torch.ones(2, device=device)

    def loss(w: Tensor, **options: Any) -> Tensor:
        energy = (w**3).sum()
        (slope,) = torch.autograd.grad(energy, w, **options)
        return energy + 0 * slope.detach().sum()

    for call in (
        lambda loss: func.value_and_grads(loss)(w)[1],
        lambda loss: func.vjp(loss, w)[1](w[0])[0],
        lambda loss: func.hvp(loss, w, w)[0],
    ):
        with unchanged(w), pytest.raises(gradkit.FreedGraphError, match="retain_graph=True"):
            call(loss)
        assert torch.equal(call(lambda w: loss(w, retain_graph=True)), 3 * w**2)


class AsItIs(torch.autograd.Function):
    forward = staticmethod(lambda x: x)
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
    backward = staticmethod(lambda ctx, grad: 2 * grad * ctx.saved_tensors[0])


class ByAView(AsItIs):
    forward = staticmethod(lambda x: x.view_as(x))


def test_a_function_that_saves_what_it_returns(device: torch.device) -> None:
    w = torch.tensor([3.0], device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"return x\.view_as\(x\)"):
        func.value_and_grads(lambda w: AsItIs.apply(w).sum())(w)
    assert func.value_and_grads(lambda w: ByAView.apply(w).sum())(w)[1].item() == 6


def test_a_hook_where_no_backward_pass_follows(device: torch.device) -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)

    def loss(w: Tensor, is_careful: bool = False) -> Tensor:
        y = w * w
        if y.requires_grad or not is_careful:
            y.register_hook(lambda grad: grad * 1)
        return y.sum()

    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="registers a hook"):
        func.jvp(loss, w, w)
    torch.testing.assert_close(func.linearize(loss, w)[1](w), 2 * (w * w).sum())
    torch.testing.assert_close(func.jvp(lambda w: loss(w, True), w, w)[1], 2 * (w * w).sum())
    func.check_grads(loss, w, modes=("reverse",), order=1)


def test_a_jagged_argument(device: torch.device) -> None:
    rows = torch.randn(5, 4, device=device)
    jagged = torch.nested.nested_tensor([rows[:3], rows[3:]], layout=torch.jagged)
    with pytest.raises(gradkit.LeafTypeError, match="nest them in fn"):
        func.value_and_grads(lambda j: (j * j).values().sum())(jagged)
    offsets = torch.tensor([0, 3, 5], device=device)

    def loss(values: Tensor) -> Tensor:
        j = torch.nested.nested_tensor_from_jagged(values, offsets)
        return (j * j).values().sum()

    torch.testing.assert_close(func.value_and_grads(loss)(rows)[1], 2 * rows)
