"""Operators of torch.library: a derivative that they do not have raises, and is not zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import gradkit
from gradkit import func
from tests.helpers import unchanged

LIBRARY = torch.library.Library("gradkit_tests", "FRAGMENT")
LIBRARY.define("cube(Tensor x) -> Tensor")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.define("order(Tensor x) -> Tensor")
LIBRARY.define("normal(Tensor x) -> Tensor")  # as torch.normal, which has no derivative
for kernel in ("CPU", "CUDA"):
    LIBRARY.impl("cube", lambda x: torch.empty_like(x).copy_(x.detach() ** 3), kernel)
    LIBRARY.impl("order", lambda x: x.argsort(), kernel)
LIBRARY.impl("twice", lambda x: 2 * x, "CompositeImplicitAutograd")
LIBRARY.impl("normal", lambda x: x / x.norm(), "CompositeImplicitAutograd")
OPERATORS: Any = torch.ops.gradkit_tests


@torch.library.custom_op("gradkit_tests::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    """Return the square; with a backward formula."""
    return x * x


def _square_backward(ctx: Any, cotangent: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x * cotangent


square.register_autograd(
    _square_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


@torch.library.custom_op("gradkit_tests::constant", mutates_args=())
def constant(x: Tensor) -> Tensor:
    """Return the square; without a backward formula."""
    return x * x


def weight(device: torch.device) -> Tensor:
    return torch.tensor([1.0, 2.0], device=device, requires_grad=True)


NESTED: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "jvp": lambda fn, w: func.jvp(fn, w, w),
    "jvp in a vmap": lambda fn, w: vmap(lambda x: func.jvp(fn, x, x)[1])(w[None]),
    "a vmap in jvp": lambda fn, w: func.jvp(lambda x: vmap(fn)(x[None]).sum(), w, w),
    "jvp of jvp": lambda fn, w: func.jvp(lambda x: func.jvp(fn, x, w)[1], w, w),
    "linearize": lambda fn, w: func.linearize(fn, w),
}


@pytest.mark.parametrize("nesting", NESTED)
@pytest.mark.parametrize("operator", [square, OPERATORS.cube, OPERATORS.cube.default, constant])
def test_a_tangent_that_is_dropped(device: torch.device, operator: Any, nesting: str) -> None:
    w = weight(device).detach()
    message = r"torch\.ops\.gradkit_tests\.\w+.*(drops the tangent|derivative as zero)"
    if nesting == "linearize" and operator is constant:
        message = r"torch\.ops\.gradkit_tests\.constant\.default, which has none"  # in reverse mode
    if nesting == "linearize" and operator is square:  # whose formula eager code runs
        product = func.linearize(lambda w: operator(w).sum(), w)[1](w)
        torch.testing.assert_close(product, (2 * w * w).sum())
        return
    with pytest.raises(gradkit.UnsupportedGraphError, match=message):
        NESTED[nesting](lambda w: operator(w).sum() + w.sum(), w)


@pytest.mark.parametrize("nesting", NESTED)
def test_operators_without_such_a_derivative(device: torch.device, nesting: str) -> None:
    """One made of torch's, one whose result is integer, one of a constant: as the message says."""
    w = weight(device).detach()

    def fn(w: Tensor) -> Tensor:
        row: Tensor = OPERATORS.twice(w)[OPERATORS.order(w)]
        return (row * square(w.detach())).sum()

    NESTED[nesting](fn, w)
    torch.testing.assert_close(func.jvp(fn, w, w)[1], (2 * w * w.square()).sum())


def test_under_no_grad_it_is_a_constant(device: torch.device) -> None:
    def fn(w: Tensor) -> Tensor:
        with torch.no_grad():
            factor = square(w)
        return (factor * w).sum()

    w = weight(device).detach()
    torch.testing.assert_close(func.jvp(fn, w, w)[1], (w.square() * w).sum())


REVERSE: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "value_and_grads": lambda fn, w: func.value_and_grads(fn)(w),
    "vjp": lambda fn, w: func.vjp(fn, w),
    "hvp": lambda fn, w: func.hvp(fn, w, w),
    "per_sample_grads": lambda fn, w: func.per_sample_grads(lambda w, x: fn(w * x))(w, w[None]),
}


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("call", REVERSE)
def test_an_operator_without_an_autograd_kernel(device: torch.device, call: str) -> None:
    """torch takes its derivative as zero, and warns once."""
    w = weight(device)
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="derivative as zero"):
        REVERSE[call](lambda w: OPERATORS.cube(w).sum() + w.sum(), w)


def test_an_operator_without_a_formula(device: torch.device) -> None:
    """torch's own error comes in the pass; gradkit's names the loss, and the operator."""
    w = weight(device)
    message = r"losses\['b'\].*gradkit_tests\.constant.*register_autograd"
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.backward_):
        losses = {"a": w.sum(), "b": constant(w).sum()}
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"(?s)" + message):
            call(losses, [w])
    _, grad = gradkit.value_and_grads(constant(w.detach()).sum() + w.sum(), w)
    assert torch.equal(grad, torch.ones_like(w))


def test_an_operator_is_not_that_of_torch_with_its_name(device: torch.device) -> None:
    w = weight(device).detach()
    _, grads = func.value_and_grads(lambda w: OPERATORS.normal(w)[0])(w)
    torch.testing.assert_close(grads, torch.func.grad(lambda w: (w / w.norm())[0])(w))


@torch.library.custom_op("gradkit_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    """Double a tensor, of whose graph torch takes no note."""
    x.mul_(2)


@torch.library.custom_op("gradkit_tests::double_first", mutates_args=("xs",))
def double_first(xs: list[Tensor]) -> None:
    """Double the first tensor of a list."""
    xs[0].mul_(2)


LIBRARY.define("triple_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("triple_", lambda x: x.mul_(3), "CompositeImplicitAutograd")
WRITERS: dict[str, Callable[[Tensor], object]] = {
    "double_": double_,
    "a list": lambda x: double_first([x]),
}
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    # Of a vmap inside of a jvp, torch itself raises.
    **{name: call for name, call in NESTED.items() if name != "a vmap in jvp"},
    "value_and_grads": lambda fn, w: func.value_and_grads(fn)(w),
    "vjp": lambda fn, w: func.vjp(fn, w),
    "hvp": lambda fn, w: func.hvp(fn, w, w),
    "per_sample_grads": lambda fn, w: func.per_sample_grads(fn, in_dims=0)(w[None]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", WRITERS)
def test_an_operator_that_writes_on_a_graph(device: torch.device, name: str, call: str) -> None:
    def written(w: Tensor) -> Tensor:
        x = w * 1
        WRITERS[name](x)
        return x.sum()

    w = weight(device)
    with pytest.raises(gradkit.UnsupportedGraphError):
        CALLS[call](written, w.detach())
    with gradkit.checked(), pytest.raises(gradkit.UnsupportedGraphError, match="one that writes"):
        written(w)


def test_an_operator_that_writes_and_has_a_derivative(device: torch.device) -> None:
    def written(w: Tensor) -> Tensor:
        return OPERATORS.triple_(w * 1).square().sum()

    def on_a_constant(w: Tensor) -> Tensor:
        x = torch.ones_like(w.detach())
        double_(x)
        return (w * x).sum()

    w = weight(device)
    x = w.detach()
    assert func.value_and_grads(written)(x)[1].tolist() == [18, 36]
    assert func.jvp(written, (x,), (torch.ones_like(x),))[1] == 54
    assert func.value_and_grads(on_a_constant)(x)[1].tolist() == [2, 2]
    with gradkit.checked():
        assert gradkit.value_and_grads(written(w), w)[1].tolist() == [18, 36]
        assert gradkit.value_and_grads(on_a_constant(w), w)[1].tolist() == [2, 2]
        double_(w)  # a leaf is the variable, whatever is written on it
        assert gradkit.value_and_grads(w.square().sum(), w)[1].tolist() == [4, 8]
