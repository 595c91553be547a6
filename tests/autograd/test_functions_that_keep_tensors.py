"""Functions that compute their gradient from what their forward pass has made and kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.function import once_differentiable

import gradkit
from gradkit import func, meta

Apply = Callable[[Tensor], Tensor]


def made(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Apply:
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind: Any = type("Cube", (torch.autograd.Function,), body)
    result: Apply = kind.apply
    return result


def in_attribute(ctx: Any, x: Tensor) -> Tensor:
    ctx.slope = 3 * x**2
    return x**3


def in_container(ctx: Any, x: Tensor) -> Tensor:
    ctx.state = {"slope": [3 * x**2]}
    return x**3


def saved(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(3 * x**2)
    return x**3


def saved_with_the_input(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x, 3 * x)
    return x**3


def of_a_row(ctx: Any, x: Tensor) -> Tensor:
    ctx.slopes = torch.stack([3 * x**2, x])
    return x**3


CUBES: dict[str, Apply] = {
    "attribute": made(in_attribute, lambda ctx, g: g * ctx.slope),
    "container": made(in_container, lambda ctx, g: ctx.state["slope"][0] * g),
    "saved": made(saved, lambda ctx, g: g * ctx.saved_tensors[0]),
    "saved, in place": made(saved, lambda ctx, g: g.clone().mul_(ctx.saved_tensors[0])),
    "saved with the input": made(
        saved_with_the_input, lambda ctx, g: g * ctx.saved_tensors[0] * ctx.saved_tensors[1]
    ),
    "a part": made(of_a_row, lambda ctx, g: torch.mul(g, ctx.slopes[0])),
    "an operator": made(in_attribute, lambda ctx, g: torch.ops.aten.mul(g, ctx.slope)),
    "scaled in place": made(in_attribute, lambda ctx, g: ctx.slope.mul_(g)),
    "scaled, then read": made(in_attribute, lambda ctx, g: (ctx.slope.mul_(g), ctx.slope)[1]),
    "scaled in a container": made(in_container, lambda ctx, g: ctx.state["slope"][0].mul_(g)),
}
each_cube = pytest.mark.parametrize("cube", CUBES.values(), ids=CUBES)


def twice(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    _, grad = gradkit.value_and_grads(loss(leaf), leaf, create_graph=True)
    result: Tensor = gradkit.value_and_grads(grad.sum(), leaf)[1]
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_what_backward_makes_of_complex_kept_tensors(
    device: torch.device, dtype: torch.dtype
) -> None:
    cube = made(in_attribute, lambda ctx, g: g * (2 * ctx.slope).conj() / 2)
    w = torch.tensor([1.5, -2.5], dtype=dtype, device=device, requires_grad=True)
    loss = cube(w).abs().square().sum()
    _, grad = gradkit.value_and_grads(loss, w, create_graph=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="made and kept"):
        gradkit.value_and_grads(grad.abs().square().sum(), w)


def by_torch(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    (grad,) = gradkit.value_and_grads(loss(leaf), [leaf], create_graph=True)[1]
    return torch.autograd.grad(grad.sum(), leaf)[0]


def by_backward(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    with warnings.catch_warnings(action="ignore"):
        gradkit.backward_(loss(leaf), create_graph=True)
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    result: Tensor = gradkit.value_and_grads(grad.sum(), leaf)[1]
    return result


def in_checked(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    # The backward that builds its result in place is named there.
    with gradkit.checked(), warnings.catch_warnings(action="ignore"):
        return twice(loss, w)


def by_rows(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    rows = gradkit.per_loss_grads([loss(leaf), 2 * loss(leaf)], leaf, create_graph=True)
    result: Tensor = gradkit.value_and_grads(rows[1].sum(), leaf)[1]
    return result / 2


def by_unroll(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    adapted = meta.unroll(lambda p, o, b: loss(p), leaf, [0], meta.sgd(1.0))
    result: Tensor = gradkit.value_and_grads(adapted.params.sum(), leaf)[1]
    return 1 - result


CALLS = {f.__name__: f for f in (twice, by_torch, by_backward, in_checked, by_rows, by_unroll)}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
LOSSES: dict[str, Callable[[Apply], Callable[[Tensor], Tensor]]] = {
    "alone": lambda cube: lambda w: cube(w).sum(),
    "below another": lambda cube: lambda w: cube(w * 1).square().sum(),
    "beside another": lambda cube: lambda w: cube(w).sum() + w.square().sum(),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@each_call
@each_loss
@each_cube
def test_a_derivative_through_what_was_kept_raises(
    device: torch.device, cube: Apply, loss: Callable[..., Any], call: Callable[..., Tensor]
) -> None:
    w = torch.tensor([1.0, 2.0], device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"Cube, whose backward computes with"):
        call(loss(cube), w)


@each_loss
@each_cube
def test_the_first_derivative_is_right_and_so_are_others(
    device: torch.device, cube: Apply, loss: Callable[..., Any]
) -> None:
    """The gradient is also that of what is not below the Function."""
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    scale = torch.tensor(2.0, device=device, requires_grad=True)
    right = torch.autograd.grad(loss(lambda x: x**3)(w), w)[0]
    for _ in range(2):
        _, grad = gradkit.value_and_grads(scale * loss(cube)(w), w, create_graph=True)
        torch.testing.assert_close(grad.detach(), 2 * right)
        of_scale = gradkit.value_and_grads(grad.sum(), scale, retain_graph=True)[1]
        torch.testing.assert_close(of_scale, right.sum())


MASK, CONSTANT = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])


def masked(ctx: Any, x: Tensor) -> Tensor:
    ctx.mask, ctx.factor = x > 0, 3.0
    return x * ctx.mask * ctx.factor


def by_constant(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
    ctx.mask = mask
    ctx.save_for_backward(x, mask)
    return x * mask


def by_saved(ctx: Any, g: Tensor) -> Any:
    return g * ctx.saved_tensors[1], None


def by_input(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    ctx.unused = x.sum()
    return x**3


def by_output(ctx: Any, x: Tensor) -> Tensor:
    y = x.exp()
    ctx.save_for_backward(y)
    return y


LINEAR: dict[str, tuple[Apply, Apply]] = {
    "mask": (made(masked, lambda ctx, g: g * ctx.mask * ctx.factor), lambda x: x.relu() * 3),
    "constant": (
        lambda x: made(by_constant, lambda ctx, g: (g * ctx.mask, None))(x, MASK.to(x)),  # type: ignore[call-arg]
        lambda x: x * MASK.to(x),
    ),
    "saved constant": (
        lambda x: made(by_constant, by_saved)(x, CONSTANT.to(x)),  # type: ignore[call-arg]
        lambda x: x * CONSTANT.to(x),
    ),
    "input": (made(by_input, lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2), lambda x: x**3),
    "output": (made(by_output, lambda ctx, g: g * ctx.saved_tensors[0]), Tensor.exp),
}


@each_call
@pytest.mark.parametrize("name", LINEAR)
def test_what_does_not_depend_on_the_inputs_is_accepted(
    device: torch.device, name: str, call: Callable[..., Tensor]
) -> None:
    ours, right = LINEAR[name]
    w = torch.tensor([1.0, 2.0], device=device)
    constant = MASK.to(device)  # someone refers to it
    assert constant is not None
    result = call(lambda w: ours(w).sum() + w.square().sum(), w)
    torch.testing.assert_close(result, twice(lambda w: right(w).sum() + w.square().sum(), w))


def beside_a_target(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
    p = x.softmax(0)
    loss = p.logsumexp(0) - x[target]
    p[target] -= 1
    ctx.save_for_backward(p)
    return loss


def product(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
    ctx.save_for_backward(x, y)
    return x * x * y


def test_inputs_that_no_one_else_refers_to(device: torch.device) -> None:
    """Whether an input is kept, or a result, shows in the source alone: labels are inputs, too."""
    w = torch.tensor([1.0, 2.0], device=device)
    sparsemax: Any = made(beside_a_target, lambda ctx, g: (g * ctx.saved_tensors[0], None))
    with pytest.raises(gradkit.UnsupportedGraphError, match="Cube, whose backward computes with"):
        twice(lambda w: sparsemax(w, torch.tensor(0, device=device)), w)
    multiplied: Any = made(
        product, lambda ctx, g: (2 * g * ctx.saved_tensors[0] * ctx.saved_tensors[1], None)
    )
    result = twice(lambda w: multiplied(w, torch.full_like(w, 3.0)).sum(), w)
    assert result.tolist() == [6, 6]
    copied: Any = made(
        lambda ctx, x, y: product(ctx, x, y), lambda ctx, g: (2 * g * x_and_y(ctx), None)
    )
    with pytest.raises(gradkit.UnsupportedGraphError, match="keep it as it came, or give it a"):
        twice(lambda w: copied(w, torch.full_like(w, 3.0)).sum(), w)
    threes = torch.full_like(w, 3.0)  # what to do
    assert twice(lambda w: copied(w, threes).sum(), w).tolist() == [6, 6]


def x_and_y(ctx: Any) -> Tensor:
    x, y = ctx.saved_tensors
    return x * y


class Linear(torch.autograd.Function):
    """Keeps its inputs, as its source shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return torch.outer(cotangents[0], w), x.T @ cotangents[0]


class LinearApart(Linear):
    """The same, with a setup_context."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, _ = inputs
        ctx.save_for_backward(x, inputs[1])


@pytest.mark.parametrize("by", ["eager", "nested"])
@pytest.mark.parametrize("function", [Linear, LinearApart])
def test_data_that_no_one_else_refers_to(device: torch.device, function: Any, by: str) -> None:
    w = torch.tensor([1.0, 2.0], device=device)

    def loss(w: Tensor, product: Any = function.apply) -> Tensor:
        x = torch.full((3, 2), 2.0, device=device)  # gone when the loss is returned
        return product(x, w).pow(3).sum()

    def of_sum(w: Tensor) -> Tensor:
        return func.value_and_grads(loss)(w)[1].square().sum()

    right = twice(lambda w: loss(w, torch.matmul), w)
    got = twice(loss, w) if by == "eager" else None
    if got is None:
        once = torch.func.grad(lambda w: loss(w, torch.matmul))
        right = torch.func.grad(lambda w: once(w).square().sum())(w)
        got = func.value_and_grads(of_sum)(w)[1]
    torch.testing.assert_close(got, right)


def power(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
    ctx.save_for_backward(4 * x**3)
    return x**4


def of_a_view(ctx: Any, x: Tensor, ones: Tensor) -> Tensor:
    ctx.weight = x.expand(3, 2)
    return (ones * x**4).sum(0)


FROM_VIEW: Any = made(of_a_view, lambda ctx, g: ((g * 4 * ctx.weight**3).sum(0) / 3, None))
POWER: Any = made(power, lambda ctx, g: (g * ctx.saved_tensors[0], None))


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("is_squared", [False, True])
@pytest.mark.parametrize("function", [POWER, FROM_VIEW])
def test_results_beside_a_constant_input(
    device: torch.device, function: Any, is_squared: bool, is_checked: bool
) -> None:
    w = torch.tensor([1.0, 2.0], device=device)
    other = torch.zeros(2, dtype=torch.long, device=device)
    if function is FROM_VIEW:
        other = torch.full((1, 2), 1.0, device=device)

    def loss(w: Tensor) -> Tensor:
        out: Tensor = function(w, other)
        return out.square().sum() if is_squared else out.sum()

    refused = pytest.raises(gradkit.UnsupportedGraphError, match="Cube, whose backward computes")
    with gradkit.checked() if is_checked else nullcontext(), refused:
        twice(loss, w)


class OfLabels(torch.autograd.Function):
    """Keeps its slope, a result, beside labels."""

    @staticmethod
    def forward(x: Tensor, labels: Tensor) -> Tensor:
        return x**4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(4 * inputs[0] ** 3)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * ctx.saved_tensors[0], None


@pytest.mark.parametrize("by", ["nested", "hvp", "torch.func"])
def test_results_beside_labels_in_functions(device: torch.device, by: str) -> None:
    w, labels = torch.tensor([1.0, 2.0], device=device), torch.zeros(2, dtype=torch.long)

    def loss(w: Tensor) -> Tensor:
        return OfLabels.apply(w, labels.to(w.device)).square().sum()

    once = func.value_and_grads(loss)
    torch.testing.assert_close(once(w)[1], 8 * w**7)
    calls: dict[str, Callable[[], object]] = {
        "nested": lambda: func.value_and_grads(lambda w: once(w)[1].sum())(w),
        "hvp": lambda: func.hvp(loss, w, w, mode="reverse-over-reverse"),
        "torch.func": lambda: torch.func.grad(lambda w: once(w)[1].sum())(w),
    }
    with pytest.raises(gradkit.UnsupportedGraphError, match="OfLabels, whose backward computes"):
        calls[by]()


def test_torch_func_refuses_them_too(device: torch.device) -> None:
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.slope = 3 * inputs[0].detach() ** 2

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
            return cotangents[0] * ctx.slope

    w = torch.tensor([1.0, 2.0], device=device)

    def loss(w: Tensor) -> Tensor:
        return Cube.apply(w).sum() + w.sum()

    once = func.value_and_grads(loss)
    torch.testing.assert_close(once(w)[1], 3 * w**2 + 1)
    with pytest.raises(gradkit.UnsupportedGraphError, match="Cube"):
        func.value_and_grads(lambda w: once(w)[1].sum())(w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="Cube"):
        func.hvp(loss, w, w, mode="reverse-over-reverse")
    leaf = w.clone().requires_grad_()
    with pytest.raises(gradkit.UnsupportedGraphError, match="Cube"):
        gradkit.value_and_grads(once(leaf)[1].sum(), leaf)


# Functions that make their gradient in the forward pass, and scale it in place.
def kept_in_attribute(ctx: Any, w: Tensor) -> Tensor:
    ctx.kept = 2 * w
    return w.square().sum()


def kept_saved(ctx: Any, w: Tensor) -> Tensor:
    ctx.save_for_backward(2 * w)
    return w.square().sum()


def kept_in_parts(ctx: Any, w: Tensor) -> Tensor:
    ctx.parts = {"of": [2 * w]}
    return w.square().sum()


def scaled_behind_autograd(ctx: Any, g: Tensor) -> Tensor:
    ctx.kept.data.mul_(g)
    result: Tensor = ctx.kept
    return result


def saved_scaled_by_a_kernel(ctx: Any, g: Tensor) -> Tensor:
    (kept,) = ctx.saved_tensors
    kept.data.mul_(g)
    result: Tensor = kept
    return result


class Box:
    """Is no container that torch knows, and a Function may keep its gradient in one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_in_object(ctx: Any, w: Tensor) -> Tensor:
    ctx.box = Box(2 * w)
    return w.square().sum()


def kept_in_closure(w: Tensor) -> Tensor:
    kept = 2 * w.detach()
    return made(lambda ctx, w: w.square().sum(), lambda ctx, g: kept.mul_(g))(w)


FUSED: dict[str, Apply] = {
    "an object": made(kept_in_object, lambda ctx, g: ctx.box.tensor.mul_(g)),
    "a closure": kept_in_closure,
    "attribute": made(kept_in_attribute, lambda ctx, g: ctx.kept.mul_(g)),
    "a view": made(kept_in_attribute, lambda ctx, g: ctx.kept.mul_(g).view(2, 1).view(2)),
    "a copy": made(kept_in_attribute, lambda ctx, g: ctx.kept.mul_(g).clone()),
    "saved": made(kept_saved, saved_scaled_by_a_kernel),
    "container": made(kept_in_parts, lambda ctx, g: ctx.parts["of"][0].mul_(g)),
    "behind autograd": made(kept_in_attribute, scaled_behind_autograd),
    "once_differentiable": made(kept_in_attribute, once_differentiable(scaled_behind_autograd)),
}
each_fused = pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)


@each_fused
@pytest.mark.parametrize("inner", [False, True], ids=["at a leaf", "above an operation"])
@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
def test_what_a_function_scales_in_place_is_put_back(
    device: torch.device, fused: Apply, inner: bool, checked: bool
) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2):
            loss = fused(w * 1 if inner else w)
            with gradkit.checked() if checked else warnings.catch_warnings():
                rows = gradkit.per_loss_grads([3 * loss, 5 * loss], w, retain_graph=True)
                assert [row.tolist() for row in rows] == [[6, 12], [10, 20]]
                gram = gradkit.gram([3 * loss, 5 * loss], w, retain_graph=True)
                assert gram.tolist() == [[180, 300], [300, 500]]
                norms = gradkit.per_loss_norms([3 * loss, 5 * loss], w, retain_graph=True)
                torch.testing.assert_close(norms, gram.diagonal().sqrt())
                first = gradkit.value_and_grads(3 * loss, w, retain_graph=True)[1]
                second = gradkit.value_and_grads(5 * loss, w)[1]
                assert first.tolist() == [6, 12]
                assert second.tolist() == [10, 20]


@each_fused
def test_what_one_pass_has_spent_is_refused_in_the_next(device: torch.device, fused: Apply) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    loss = fused(w)
    assert gradkit.value_and_grads(loss * 3, w)[1].tolist() == [6, 12]
    with pytest.raises((gradkit.UnsupportedGraphError, gradkit.FreedGraphError)):
        gradkit.value_and_grads(loss * 5, w)


@given(
    st.lists(st.floats(-4, 4, width=16).filter(bool), min_size=1, max_size=5),
    st.sampled_from(list(FUSED)),
)
def test_any_rows_of_a_fused_loss(device: torch.device, factors: list[float], name: str) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    other = torch.tensor([3.0, 4.0], device=device, requires_grad=True)
    shared = FUSED[name](w * other)
    rows = gradkit.per_loss_grads([factor * shared for factor in factors], [w, other])
    plain = (w * other).square().sum()
    for factor, row in zip(factors, rows, strict=True):
        torch.testing.assert_close(
            row, list(torch.autograd.grad(factor * plain, [w, other], retain_graph=True))
        )


WORKSPACES: dict[torch.Size, Tensor] = {}


def in_a_workspace(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    memory = WORKSPACES.setdefault(x.shape, torch.empty_like(x))
    return torch.mul(x.detach(), 2 * g, out=memory)


def test_memory_that_a_function_writes_anew_in_each_pass_is_no_gradient_kept(
    device: torch.device,
) -> None:
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.square().sum()

    WORKSPACES.clear()
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    apply = made(forward, in_a_workspace)
    rows = gradkit.per_loss_grads([3 * (one := apply(w)), 5 * one, apply(2 * w)], w)
    assert [row.tolist() for row in rows] == [[6, 12], [10, 20], [8, 16]]
