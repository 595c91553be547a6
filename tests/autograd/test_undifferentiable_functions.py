"""Functions whose backward cuts the path of a second derivative: refused, wherever that hides."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import gradkit
from gradkit import func, meta
from tests.helpers import assert_same_bits

Backward = Callable[..., Any]


class Wrapper:
    def __init__(self, function: Backward) -> None:
        self._functions = [function]

    def __call__(self, *args: Any) -> Any:
        return self._functions[0](*args)


def logged(function: Backward) -> Backward:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def right(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * 3 * x * x


def without_grad(ctx: Any, grad: Tensor) -> Tensor:
    with torch.no_grad():
        return right(ctx, grad)


def detached(ctx: Any, grad: Tensor) -> Tensor:
    return right(ctx, grad).detach()


def with_numpy(ctx: Any, grad: Tensor) -> Tensor:
    return torch.from_numpy(right(ctx, grad).detach().cpu().numpy()).to(grad.device)


BACKWARDS: dict[str, Backward] = {
    "once_differentiable": once_differentiable(right),
    "inside of functools.wraps": logged(once_differentiable(right)),
    "inside of an object": Wrapper(once_differentiable(right)),
    "no_grad": without_grad,
    "detach": detached,
    "NumPy": with_numpy,
}
every_backward = pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS)
Apply = Callable[[Tensor], Tensor]


def cube(backward: Backward, name: str = "backward") -> Apply:
    """Return x ** 3, by a Function with this backward."""

    def forward(x: Tensor) -> Tensor:
        return x**3

    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    methods = {"forward": forward, "setup_context": setup_context, name: backward}
    body = {key: staticmethod(method) for key, method in methods.items()}
    made: Any = type("Cube", (torch.autograd.Function,), {**body, "generate_vmap_rule": True})
    applied: Apply = made.apply
    return applied


def by_value_and_grads(loss: Apply, w: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    _, grad = gradkit.value_and_grads(loss(leaf), leaf, create_graph=True)
    result: Tensor = gradkit.value_and_grads(grad.sum(), leaf)[1]
    return result


def by_rows(loss: Apply, w: Tensor, **options: Any) -> Tensor:
    leaf = w.clone().requires_grad_()
    losses = loss(leaf) * torch.ones(2, device=w.device) / 2
    with warnings.catch_warnings(action="ignore", category=gradkit.GradkitWarning):
        rows = gradkit.per_loss_grads(losses, leaf, create_graph=True, **options)
    result: Tensor = gradkit.value_and_grads(rows.sum(), leaf)[1]
    return result


def by_unroll(loss: Apply, w: Tensor, **options: Any) -> Tensor:
    leaf = w.clone().requires_grad_()
    opt = meta.sgd(1.0)
    adapted = meta.unroll(lambda w, o, b: loss(w), leaf, [0], opt, **options)
    result: Tensor = 1 - gradkit.value_and_grads(adapted.params.sum(), leaf)[1]
    return result


def by_implicit(loss: Apply, w: Tensor) -> Tensor:
    # The minimum of loss(m) + m * o with respect to m moves by -1 / loss''(m) with o.
    outer = torch.zeros_like(w, requires_grad=True)
    solve = meta.implicit(lambda start, o: start, lambda m, o: loss(m) + (m * o).sum())
    return -1 / gradkit.value_and_grads(solve(w, outer).sum(), outer)[1]


def by_func_twice(loss: Apply, w: Tensor) -> Tensor:
    grad = func.value_and_grads(loss)
    result: Tensor = func.value_and_grads(lambda w: grad(w)[1].sum())(w)[1]
    return result


def by_rows_of_func(loss: Apply, w: Tensor) -> Tensor:
    rows = func.per_loss_grads(lambda w: loss(w) * torch.ones(2, device=w.device) / 2, chunk_size=2)
    result: Tensor = func.value_and_grads(lambda w: rows(w).sum())(w)[1]
    return result


def by_samples(loss: Apply, w: Tensor) -> Tensor:
    samples = func.per_sample_grads(lambda w, x: loss(w) * x)
    ones = torch.ones(1, device=w.device)
    result: Tensor = func.value_and_grads(lambda w: samples(w, ones).sum())(w)[1]
    return result


def by_hvp(loss: Apply, w: Tensor) -> Tensor:
    result: Tensor = func.hvp(loss, w, torch.ones_like(w), mode="reverse-over-reverse")[1]
    return result


CALLS: dict[str, Callable[[Apply, Tensor], Tensor]] = {
    "value_and_grads": by_value_and_grads,
    "value_and_grads of a vmap": lambda loss, w: by_value_and_grads(
        lambda w: torch.vmap(loss)(w[None]).sum(), w
    ),
    "per_loss_grads": by_rows,
    "per_loss_grads, batched": functools.partial(by_rows, strategy="batched"),
    "unroll": by_unroll,
    "unroll, recompute": functools.partial(by_unroll, memory="recompute"),
    "implicit": by_implicit,
    "func.value_and_grads": by_func_twice,
    "func.per_loss_grads": by_rows_of_func,
    "func.per_sample_grads": by_samples,
    "func.hvp": by_hvp,
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
REFUSED = "Cube, a Function whose backward cannot be"


def loss_of(function: Apply) -> Apply:
    # The cotangent of the function is a constant, and the sum has another path to w.
    return lambda w: (function(w) + w**2).sum()


@every_call
@every_backward
def test_a_cut_path_is_refused(
    device: torch.device, backward: Backward, call: Callable[[Apply, Tensor], Tensor]
) -> None:
    if backward is with_numpy and call not in (by_value_and_grads, by_unroll):
        pytest.skip("torch.func has no .numpy()")
    w = torch.tensor([2.0], device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match=REFUSED):
        call(loss_of(cube(backward)), w)


@every_call
@pytest.mark.parametrize("name", ["backward", "vjp"])
def test_what_can_be_differentiated_is(
    device: torch.device, name: str, call: Callable[[Apply, Tensor], Tensor]
) -> None:
    if name == "vjp" and call not in (by_value_and_grads, by_rows, by_unroll, by_implicit):
        pytest.skip("torch.func calls it backward")
    w = torch.tensor([2.0], device=device)
    hessian = call(loss_of(cube(right, name)), w)
    torch.testing.assert_close(hessian, 6 * w + 2)


@every_call
def test_a_linear_function_is_not_refused(
    device: torch.device, call: Callable[[Apply, Tensor], Tensor]
) -> None:
    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.mul_(2)  # also if it writes

    w = torch.tensor([2.0], device=device)
    torch.testing.assert_close(call(loss_of(Twice.apply), w), torch.full_like(w, 2))


def test_the_gradients_are_those_of_torch(device: torch.device) -> None:
    """The same bits, a constant is a constant, and no leaf is left in the graph."""
    w = torch.tensor([0.3, 2.0], device=device, requires_grad=True)
    linear = cube(lambda ctx, grad: grad * 2)
    for function in (cube(right), linear):
        for loss in (function(w).sum(), function(w).square().sum()):
            (expected,) = torch.autograd.grad(loss, w, create_graph=True)
            _, grad = gradkit.value_and_grads(loss, w, create_graph=True)
            assert_same_bits([grad], [expected])
            again, of_torch = (g.square().sum() for g in (grad, expected))
            second = None
            if expected.requires_grad:
                (second,) = torch.autograd.grad(of_torch, w, retain_graph=True)
            assert_same_bits([gradkit.value_and_grads(again, w)[1]], [second])
    # A step that is recomputed raises if it finds a leaf from outside.

    def penalty(w: Tensor, o: Any, b: Any) -> Tensor:
        grad: Tensor = gradkit.value_and_grads(cube(right)(w).sum(), w, create_graph=True)[1]
        return grad.sum()

    adapted = meta.unroll(penalty, w, [0], meta.sgd(0.1), memory="recompute")
    torch.testing.assert_close(adapted.params, w - 0.1 * 6 * w)


def test_none_has_lost_nothing_and_zeros_may_have(device: torch.device) -> None:
    """A gradient that is zero at this point has a derivative: of a weight that starts at zero."""
    w = torch.tensor([2.0], device=device, requires_grad=True)
    _, grad = gradkit.value_and_grads(
        loss_of(cube(lambda ctx, grad: None))(w), w, create_graph=True
    )
    assert gradkit.value_and_grads(grad.sum(), w)[1] == 2
    loss = loss_of(cube(lambda ctx, grad: torch.zeros_like(grad)))(w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="returns None where there is none"):
        gradkit.value_and_grads(loss, w, create_graph=True)
    scale = torch.zeros(1, device=device, requires_grad=True)
    loss = (scale * cube(detached)(w)).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match=REFUSED):
        gradkit.value_and_grads(loss, [w, scale], create_graph=True)


def test_a_refusal_changes_nothing(device: torch.device) -> None:
    w = torch.tensor([2.0], device=device, requires_grad=True)
    before = w.grad = torch.ones_like(w)
    loss = loss_of(cube(detached))(w)
    for run in (
        lambda: gradkit.backward_(loss, create_graph=True),
        lambda: gradkit.backward_(loss, w, create_graph=True),
        lambda: gradkit.value_and_grads(loss, w, create_graph=True),
    ):
        with pytest.raises(gradkit.UnsupportedGraphError, match=REFUSED):
            run()
        assert w.grad is before
        assert w.grad.tolist() == [1]
    assert gradkit.value_and_grads(loss, w)[1] == 16  # the graph is as it was, and its nodes


def test_a_function_beside_the_way_is_no_matter(device: torch.device) -> None:
    w, v = (torch.tensor([2.0], device=device, requires_grad=True) for _ in range(2))
    loss = (cube(detached)(w) * v**2).sum()
    _, grad = gradkit.value_and_grads(loss, v, create_graph=True)
    assert gradkit.value_and_grads(grad.sum(), v)[1] == 16


@pytest.mark.long
def test_a_compiled_graph_is_refused(device: torch.device) -> None:
    """Its derivative has no path where it has saved what it has computed, and no input."""
    compiled = torch.compile(lambda w: torch.exp(w).sin().cos(), backend="aot_eager")
    w = torch.tensor([1.0], device=device, requires_grad=True)
    loss = loss_of(compiled)(w)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.compile has compiled"):
        gradkit.value_and_grads(loss, w, create_graph=True)
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    assert torch.autograd.grad(grad.sum(), w)[0] == 2  # of w ** 2 alone


@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_functions_of_torch_that_are_once_differentiable(device: torch.device, memory: Any) -> None:
    """torch drops their part of the second derivative."""
    c = torch.tensor([1.5, 2.5, 3.0], device=device, requires_grad=True)

    def sampled(c: Tensor, *_: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.distributions.Dirichlet(c).rsample().square().sum()

    gradkit.value_and_grads(sampled(c), c)
    with pytest.raises(gradkit.UnsupportedGraphError, match="_Dirichlet, a Function"):
        gradkit.value_and_grads(sampled(c), c, create_graph=True)

    def twice() -> object:
        adapted = meta.unroll(sampled, c, [0], meta.sgd(lr=1.0), memory=memory).params
        return torch.autograd.grad(adapted.sum(), c)

    with pytest.raises(gradkit.UnsupportedGraphError, match="_Dirichlet, a Function"):
        twice()


def in_a_thread(function: Backward) -> Backward:
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return 1 * pool.submit(function, ctx, grad).result()

    return backward


@pytest.mark.parametrize(
    "call", [by_value_and_grads, by_rows, by_unroll, by_implicit, by_func_twice, by_hvp]
)
def test_a_backward_that_works_in_another_thread(
    device: torch.device, call: Callable[[Apply, Tensor], Tensor]
) -> None:
    w = torch.tensor([0.5, 2.0], dtype=torch.float64, device=device)
    [(w.clone().requires_grad_() * 2).sum() for _ in range(100)]  # a thread numbers its own nodes
    torch.testing.assert_close(call(loss_of(cube(in_a_thread(right))), w), 6 * w + 2)
    with pytest.raises(gradkit.UnsupportedGraphError, match=REFUSED):
        call(loss_of(cube(in_a_thread(without_grad))), w)


def test_what_a_thread_computes_of_kept_results_is_refused(device: torch.device) -> None:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, x**2)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return in_a_thread(lambda ctx, grad: 3 * grad * ctx.saved_tensors[1])(ctx, grad)

    x = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    [(x * 2).sum() for _ in range(100)]
    with pytest.raises(gradkit.UnsupportedGraphError, match="Kept"):
        gradkit.value_and_grads(Kept.apply(x).sum(), x, create_graph=True)


def test_a_hook_that_works_in_another_thread(device: torch.device) -> None:
    x = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    y = x**2
    [(x * 2).sum() for _ in range(100)]

    def double(grad: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return 1 * pool.submit(lambda: grad * 2).result()

    handle = y.register_hook(double)
    _, grad = gradkit.value_and_grads((y**2).sum() + x.sum(), x, create_graph=True)
    handle.remove()
    _, second = gradkit.value_and_grads(grad.sum(), x)
    torch.testing.assert_close(second, 24 * x.detach() ** 2)
