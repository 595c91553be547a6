"""Results of gradkit.func carry the graphs of what they were computed from, as torch.func's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional

import gradkit
from gradkit import func, meta
from gradkit.func._products import Mode
from tests.helpers import assert_same_bits

F64 = torch.float64
Fn = Callable[..., Tensor]

# Random programs: smooth functions of w, of another argument, and of a tensor from outside.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "cube": lambda x: x**3,
    "softplus": functional.softplus,
    "roll": lambda x: x.roll(1),
    "linear": lambda x: 3 * x,
}


def torch_product(f: Fn, w: Tensor, along: Tensor) -> Tensor:
    product: Tensor = vjp(grad(f), w)[1](along)[0]
    return product


# For each call of gradkit.func, what torch.func gives in its place: functions of (f, w, x, s).
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "value_and_grads": (
        lambda f, w, x, s: func.value_and_grads(f)(w, x, s)[1],
        lambda f, w, x, s: grad(f)(w, x, s),
    ),
    "value": (
        lambda f, w, x, s: func.value_and_grads(f)(w, x, s)[0] * w,
        lambda f, w, x, s: f(w, x, s) * w,
    ),
    "a weight": (
        lambda f, w, x, s: func.value_and_grads(f, weights=s.sum())(w, x, s)[1],
        lambda f, w, x, s: s.sum() * grad(f)(w, x, s),
    ),
    "aux": (
        lambda f, w, x, s: func.value_and_grads(lambda *a: (f(*a), a[0] * a[2]), has_aux=True)(
            w, x, s
        )[0][1],
        lambda f, w, x, s: w * s,
    ),
    "another argument": (
        lambda f, w, x, s: func.value_and_grads(f, 1)(w, x, s)[1],
        lambda f, w, x, s: grad(f, 1)(w, x, s),
    ),
    "a closure": (
        lambda f, w, x, s: func.value_and_grads(lambda x: f(w, x, s))(x)[1],
        lambda f, w, x, s: grad(lambda x: f(w, x, s))(x),
    ),
    "per_loss_grads": (
        lambda f, w, x, s: func.per_loss_grads(lambda w: f(w, x, s) * w)(w).sum(0),
        lambda f, w, x, s: jacrev(lambda w: f(w, x, s) * w)(w).sum(0),
    ),
    "batched per_loss_grads": (
        lambda f, w, x, s: func.per_loss_grads(lambda w: f(w, x, s) * w, chunk_size=2)(w).sum(0),
        lambda f, w, x, s: jacrev(lambda w: f(w, x, s) * w)(w).sum(0),
    ),
    "per_sample_grads": (
        lambda f, w, x, s: func.per_sample_grads(lambda w, k: f(w, k, s))(
            w, torch.stack([x, x * s, w])
        ).sum(0),
        lambda f, w, x, s: vmap(grad(lambda w, k: f(w, k, s)), (None, 0))(
            w, torch.stack([x, x * s, w])
        ).sum(0),
    ),
    "chunks of samples": (
        lambda f, w, x, s: func.per_sample_grads(lambda w, k: f(w, k, s), chunk_size=2)(
            w, torch.stack([x, x * s, w])
        ).sum(0),
        lambda f, w, x, s: vmap(grad(lambda w, k: f(w, k, s)), (None, 0))(
            w, torch.stack([x, x * s, w])
        ).sum(0),
    ),
    "hvp": (
        lambda f, w, x, s: func.hvp(lambda w: f(w, x, s), w, x)[1],
        lambda f, w, x, s: torch_product(lambda w: f(w, x, s), w, x),
    ),
    "hvp in reverse": (
        lambda f, w, x, s: func.hvp(lambda w: f(w, x, s), w, x, mode="reverse-over-reverse")[1],
        lambda f, w, x, s: torch_product(lambda w: f(w, x, s), w, x),
    ),
    "the gradient of hvp": (
        lambda f, w, x, s: func.hvp(lambda w: f(w, x, s), w, x)[0],
        lambda f, w, x, s: grad(f)(w, x, s),
    ),
    "inside vmap": (
        lambda f, w, x, s: vmap(lambda k: func.value_and_grads(f)(w, k, s)[1])(
            torch.stack([x, s])
        ).sum(0),
        lambda f, w, x, s: vmap(lambda k: grad(f)(w, k, s))(torch.stack([x, s])).sum(0),
    ),
    "twice": (
        lambda f, w, x, s: func.value_and_grads(
            lambda w: func.value_and_grads(f)(w, x, s)[1].square().sum()
        )(w)[1],
        lambda f, w, x, s: grad(lambda w: grad(f)(w, x, s).square().sum())(w),
    ),
}


def program(ops: list[str], power: int) -> Fn:
    def f(w: Tensor, x: Tensor, s: Tensor) -> Tensor:
        out = w * x
        for index, op in enumerate(ops):
            out = UNARY[op](out) + (s * x if index == 0 else w)
        return (out**power).sum()

    return f


def inputs(device: torch.device) -> list[Tensor]:
    return [
        torch.tensor(values, device=device, dtype=F64, requires_grad=True)
        for values in ([0.7, -0.4, 1.2], [0.3, 0.9, -0.5], [1.1, 0.2, -0.8])
    ]


def derivatives(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """First derivatives, and second ones along a direction; zeros where there is none."""
    options: Any = {"materialize_grads": True}
    first = torch.autograd.grad(loss, tensors, create_graph=True, **options)
    along = sum((g * torch.arange(1, 4, dtype=F64, device=g.device)).sum() for g in first)
    return [*first, *torch.autograd.grad(along, tensors, **options)]


@given(
    ops=st.lists(st.sampled_from(sorted(UNARY)), min_size=1, max_size=3),
    power=st.integers(1, 3),
    name=st.sampled_from(sorted(PAIRS)),
)
def test_a_result_in_an_eager_loss_counts(
    device: torch.device, ops: list[str], power: int, name: str
) -> None:
    """Law: what torch.func gives in the same place, first and second order."""
    f = program(ops, power)
    ours, theirs = PAIRS[name]
    results = []
    for call in (ours, theirs):
        w, x, s = inputs(device)
        loss = f(w, x, s) + (call(f, w, x, s) * torch.tensor([1.0, 2.0, -1.0], device=device)).sum()
        results.append(derivatives(loss, [w, x, s]))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PAIRS)
def test_a_result_carries_none_if_asked(device: torch.device, name: str) -> None:
    """Under no_grad, too, as with torch.func."""
    if name in {"value", "aux", "a closure"}:  # the tests' own operations carry the graph
        return
    f = program(["tanh"], 2)
    with torch.no_grad():
        assert not PAIRS[name][0](f, *inputs(device)).requires_grad


def fit(w: Tensor) -> Tensor:
    return (w**4).sum() + w.prod()


def penalized(w: Tensor) -> Tensor:
    return fit(w) + func.value_and_grads(fit)(w)[1].square().sum()


def penalized_by_torch(w: Tensor) -> Tensor:
    return fit(w) + grad(fit)(w).square().sum()


def test_a_penalty_inside_the_calls_that_run_a_forward_pass(device: torch.device) -> None:
    w = inputs(device)[0]
    opt = meta.sgd(0.01)

    def adapted(loss: Fn, w: Tensor, memory: Any = "store") -> Tensor:
        steps = [None, None]
        out = meta.unroll(lambda p, o, b: loss(p), w, steps, opt, memory=memory)
        return out.params.square().sum()

    def solved(loss: Fn, w: Tensor) -> Tensor:
        def solver(p: Tensor, outer: Tensor) -> Tensor:
            p = p.detach().requires_grad_()
            for _ in range(200):
                step = torch.autograd.grad(objective(p, outer), p)[0]
                p = (p - 0.05 * step).detach().requires_grad_()
            return p.detach()

        def objective(p: Tensor, outer: Tensor) -> Tensor:
            return ((p - outer) ** 2).sum() + 0.01 * loss(p)

        start = torch.zeros_like(w)
        return meta.implicit(solver, objective)(start, w).square().sum()

    def mean(loss: Fn, w: Tensor) -> Tensor:
        tasks = torch.tensor([1.0, 2.0], device=device, dtype=F64)
        value, _ = meta.mean_value_and_grads(lambda w, t: t * adapted(loss, w), w, tasks)
        return torch.as_tensor(value)

    for call in (
        adapted,
        lambda loss, w: adapted(loss, w, "recompute"),
        solved,
        mean,
        lambda loss, w: func.value_and_grads(loss)(w)[1].sum(),
    ):
        _, got = gradkit.value_and_grads(call(penalized, w), w)
        _, expected = gradkit.value_and_grads(call(penalized_by_torch, w), w)
        torch.testing.assert_close(got, expected)


def test_cut_results_are_constants(device: torch.device) -> None:
    w, x, s = inputs(device)
    f = program(["sin"], 2)
    cut: Any = {"create_graph": False}
    results = [
        *func.value_and_grads(f, **cut)(w, x, s),
        func.value_and_grads(f, weights=s.sum(), **cut)(w, x, s)[1],
        func.per_loss_grads(f, **cut)(w, x, s),
        func.per_sample_grads(lambda w, k: f(w, k, s), **cut)(w, torch.stack([x, s])),
        *func.hvp(lambda w: f(w, x, s), w, x, **cut),
        *func.hvp(lambda w: f(w, x, s), w, x, mode="reverse-over-reverse", **cut),
        vmap(lambda k: func.value_and_grads(f, **cut)(w, k, s)[1])(torch.stack([x, s])),
        *meta.mean_value_and_grads(lambda w, k: f(w, k, s), w, torch.stack([x, s]), **cut),
    ]
    assert not any(result.requires_grad for result in results)
    # A transform around takes them for constants, too: the product rule has one term left.
    product = grad(lambda w: (w * func.value_and_grads(f, **cut)(w, x, s)[1]).sum())(w)
    torch.testing.assert_close(product, func.value_and_grads(f)(w, x, s)[1])
    tangent = jvp(lambda w: func.value_and_grads(f, **cut)(w, x, s)[1], (w,), (x,))[1]
    assert not tangent.any()


def test_the_default_gives_the_bits_of_a_cut_call(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    call, params, buffers = func.make_functional(model)
    x = torch.randn(5, 3, device=device)

    def loss(params: Any) -> Tensor:
        return call(params, buffers, x)[0].square().sum()

    value, grads = func.value_and_grads(loss)(params)
    cut_value, cut = func.value_and_grads(loss, create_graph=False)(params)
    assert_same_bits([value, *grads.values()], [cut_value, *cut.values()])
    assert all(grad.requires_grad for grad in grads.values())


@pytest.mark.parametrize("unused", ["none", "zeros"])
def test_a_derivative_that_is_zero_is_zeros(device: torch.device, unused: Any) -> None:
    w, x, _ = (tensor.detach() for tensor in inputs(device))

    def by(fn: Fn, argnums: int = 0) -> Fn:
        return lambda *args: func.value_and_grads(fn, argnums)(*args)[1]

    def linear(w: Tensor) -> Tensor:
        return (3 * w).sum()

    def apart(w: Tensor, x: Tensor) -> Tensor:
        return w @ w + x @ x

    zeros = [
        func.per_loss_grads(by(linear))(w),
        func.per_loss_grads(by(apart, 1))(w, x),
        func.per_loss_grads(lambda x: by(lambda w: apart(w, x))(w))(x),
        by(by(by(lambda x: x * x)))(w[0]),
        func.value_and_grads(lambda w: func.hvp(linear, w, x)[1].sum())(w)[1],
        func.per_sample_grads(lambda w, x: (by(linear)(w) * x).sum())(w, torch.stack([w, x])),
        hessian(linear)(w),
        jacrev(by(linear))(w),
    ]
    for zero in zeros:
        assert zero is None or not zero.any()
    leaf = w.clone().requires_grad_()
    _, first = func.value_and_grads(lambda t: t["a"].sum(), unused=unused)({
        "a": leaf,
        "b": leaf[:1],
    })
    present = [one for one in first.values() if one is not None]
    for order in torch.autograd.grad(sum(one.sum() for one in present), leaf, allow_unused=True):
        assert order is None


def test_what_no_argument_reaches_raises_still(device: torch.device) -> None:
    w = inputs(device)[0]
    for fn in (lambda w: torch.ones((), device=device), lambda w: w.detach().sum()):
        with pytest.raises(gradkit.DetachedLossError, match="does not depend on them"):
            func.value_and_grads(fn)(w)


class Once(torch.autograd.Function):
    """The square of a tensor, whose derivative torch cannot differentiate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * cotangent


def test_a_wrong_derivative_raises_when_it_is_taken(device: torch.device) -> None:
    """The results themselves are right, and a training step that needs no more gets them."""
    w = inputs(device)[0]

    def loss(w: Tensor) -> Tensor:
        return Once.apply(w).sum()

    value, gradient = func.value_and_grads(loss)(w)
    assert_same_bits([gradient], [2 * w.detach()])
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        torch.autograd.grad(gradient.sum(), w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        gradkit.value_and_grads(value + gradient.square().sum(), w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        func.value_and_grads(loss, create_graph=True)(w)
    _, gradient = func.value_and_grads(loss, create_graph=False)(w)
    assert_same_bits([gradient], [2 * w.detach()])


def test_a_wrong_derivative_of_samples_raises_when_it_is_taken(device: torch.device) -> None:
    w, x, s = inputs(device)

    def norm(w: Tensor, x: Tensor) -> Tensor:
        return functional.layer_norm(x * w, (3,), w).sin().sum()

    data = torch.stack([x, s]).detach()
    grads = func.per_sample_grads(norm)(w, data)
    expected = func.per_sample_grads(norm, create_graph=False)(w, data)
    assert_same_bits([grads], [expected])
    with pytest.raises(gradkit.UnsupportedGraphError, match="layer_norm"):
        torch.autograd.grad(grads.sum(), w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="layer_norm"):
        func.per_sample_grads(norm, create_graph=True)(w, data)


def test_the_option_is_checked(device: torch.device) -> None:
    w = inputs(device)[0]
    calls: list[Callable[[Any], Any]] = [
        lambda option: func.value_and_grads(fit, create_graph=option),
        lambda option: func.per_loss_grads(fit, create_graph=option),
        lambda option: func.per_sample_grads(fit, create_graph=option),
        lambda option: func.hvp(fit, w, w, create_graph=option),
        lambda option: meta.mean_value_and_grads(fit, w, w, create_graph=option),
    ]
    for call in calls:
        with pytest.raises(gradkit.OptionError, match=r"create_graph.*None or False or True"):
            call("no")


class Scaled(torch.autograd.Function):
    """The identity, whose gradient has a factor that is no argument."""

    generate_vmap_rule = True
    factor: Tensor

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * Scaled.factor


@pytest.mark.parametrize("kind", ["hook", "Function"])
def test_what_a_hook_or_a_backward_uses_counts(device: torch.device, kind: str) -> None:
    """Though the loss does not depend on it: as in torch.func."""
    w, _, s = inputs(device)
    w = w.detach()

    def fn(w: Tensor) -> Tensor:
        if kind == "Function":
            Scaled.factor = s
            return (Scaled.apply(w) ** 2).sum()
        h = w * 1
        h.register_hook(lambda grad: grad * s)
        return (h**2).sum()

    (expected,) = torch.autograd.grad(grad(fn)(w).sum(), s)
    assert torch.equal(expected, 2 * w)
    for gradient in (
        func.value_and_grads(fn)(w)[1],
        func.per_loss_grads(fn)(w),
        func.vjp(fn, w)[1](torch.ones((), device=device, dtype=F64))[0],
    ):
        torch.testing.assert_close(torch.autograd.grad(gradient.sum(), s)[0], expected)
    assert not func.value_and_grads(fn, create_graph=False)(w)[1].requires_grad


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: functional.instance_norm(x[None])[0],
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "rms_norm": lambda x: functional.rms_norm(x, (4,)),
}


@pytest.mark.parametrize("norm", NORMS)
def test_without_a_graph_around_no_result_has_one(device: torch.device, norm: str) -> None:
    """torch.func leaves one to some second derivatives since 2.14, which leads nowhere."""
    x, v = (torch.randn(4, 4, dtype=F64, device=device) for _ in range(2))
    fn = NORMS[norm]

    def loss(x: Tensor) -> Tensor:
        return fn(x).sin().sum()

    def slope(x: Tensor) -> Tensor:
        result: Tensor = func.value_and_grads(loss)(x)[1]
        return result

    products = [func.hvp(loss, x, v, mode=mode)[1] for mode in get_args(Mode)]
    ggn = func.ggn_vp(fn, lambda y: y.square().sum(), x, v)[1]
    for result in (*products, ggn, func.vjp(slope, x)[1](v)[0]):
        assert not result.requires_grad
    for result in products:
        torch.testing.assert_close(result, products[0])
    w = x.clone().requires_grad_()
    assert func.hvp(loss, w, v, mode="reverse-over-reverse")[1].requires_grad


CALLS_IN_VMAP: dict[str, Callable[..., Any]] = {
    "value_and_grads": lambda loss, w: func.value_and_grads(loss)(w)[1],
    "per_loss_grads": lambda loss, w: func.per_loss_grads(loss)(w),
    "vjp": lambda loss, w: func.vjp(loss, w)[1](torch.ones_like(loss(w)))[0],
    "jvp": lambda loss, w: func.jvp(loss, (w,), (torch.ones_like(w),))[1],
    "hvp": lambda loss, w: func.hvp(loss, w, torch.ones_like(w))[1],
}


@pytest.mark.parametrize("normalization", [functional.layer_norm, functional.rms_norm])
@pytest.mark.parametrize("call", CALLS_IN_VMAP.values(), ids=CALLS_IN_VMAP)
def test_a_derivative_of_gradients_of_a_vmap(
    device: torch.device, call: Callable[..., Any], normalization: Any
) -> None:
    """Eager code differentiates what a call inside of `torch.vmap` returned."""
    torch.manual_seed(0)
    w = torch.rand(3, device=device, dtype=torch.float64).requires_grad_()
    batch = torch.randn(4, 5, 3, device=device, dtype=torch.float64)

    def sums(w: Tensor) -> Tensor:
        def grads(x: Tensor) -> Tensor:
            result: Tensor = call(lambda w: normalization(x * w, (3,), w).sin().square().mean(), w)
            return result

        return torch.vmap(grads)(batch).square().sum()

    if normalization is functional.layer_norm:  # which torch gets wrong
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"layer_norm|NativeLayerNorm"):
            gradkit.value_and_grads(sums(w), w)
        return
    epsilon = 1e-6
    with torch.no_grad():
        slope = (sums(w + epsilon) - sums(w - epsilon)) / (2 * epsilon)
    _, grad = gradkit.value_and_grads(sums(w), w)
    torch.testing.assert_close(grad.sum(), slope, rtol=1e-5, atol=1e-7)
