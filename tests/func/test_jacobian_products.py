"""vjp, jvp, linearize and ggn_vp: against torch.func and dense Jacobians, and inside transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.nn import functional

import gradkit
from gradkit import func
from gradkit._core.user_code import hooks_registered
from gradkit._state import recomputed_tensors
from tests.func.test_graphs import UNARY, Once, derivatives, inputs
from tests.helpers import World, assert_owned, assert_same_bits, same_bits

F64 = torch.float64


def model_of(ops: list[str]) -> Callable[[Any], Any]:
    def outputs(params: Any) -> Any:
        out = params["a"] * params["b"]
        for op in ops:
            out = UNARY[op](out) + params["a"]
        return {"out": out, "pair": [out[:2] * params["b"][1], params["b"].sum()]}

    return outputs


def params_on(device: torch.device) -> dict[str, Tensor]:
    a, b, c = (x.detach() for x in inputs(device))
    return {"a": a, "b": b, "unused": c}


def flat(tree: Any) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in torch.utils._pytree.tree_leaves(tree)])


programs = st.lists(st.sampled_from(sorted(UNARY)), max_size=3)


@given(ops=programs)
def test_vjp_and_jvp_are_those_of_torch(device: torch.device, ops: list[str]) -> None:
    fn, params = model_of(ops), params_on(device)
    along = {name: torch.cos(p) for name, p in params.items()}
    world = World(*params.values(), *along.values())
    values, pull = func.vjp(fn, params)
    theirs, their_pull = torch.func.vjp(fn, params)  # type: ignore[misc]
    cotangents = torch.utils._pytree.tree_map(torch.sin, theirs)
    (grads,), (expected,) = pull(cotangents), their_pull(cotangents)
    assert_same_bits([flat(values), *grads.values()], [flat(theirs), *expected.values()])
    assert_owned(grads.values(), params.values())
    values, products = func.jvp(fn, params, along)
    theirs, expected = torch.func.jvp(fn, (params,), (along,))  # type: ignore[misc]
    assert_same_bits([flat(values), flat(products)], [flat(theirs), flat(expected)])
    # <u, Jv> == <J^T u, v>
    torch.testing.assert_close(
        flat(cotangents) @ flat(products), gradkit.tree.dot(grads, along), rtol=1e-10, atol=1e-10
    )
    world.assert_unchanged()


@given(ops=programs)
def test_linearize_is_jvp_at_one_point(device: torch.device, ops: list[str]) -> None:
    fn, params = model_of(ops), params_on(device)
    calls = []

    def counted(params: Any) -> Any:
        calls.append(1)
        return fn(params)

    along = {name: torch.cos(p) for name, p in params.items()}
    world = World(*params.values(), *along.values())
    values, push = func.linearize(counted, params)
    for direction in (along, {**along, "a": None}, gradkit.tree.scale(along, -2)):
        theirs, expected = func.jvp(fn, params, direction)
        torch.testing.assert_close(flat(push(direction)), flat(expected), rtol=1e-10, atol=1e-10)
        assert_same_bits([flat(values)], [flat(theirs)])
    assert len(calls) == 1
    world.assert_unchanged()


@given(ops=programs)
def test_ggn_vp_is_that_of_dense_matrices(device: torch.device, ops: list[str]) -> None:
    w, x, v = (tensor.detach() for tensor in inputs(device))

    def fn(w: Tensor) -> Tensor:
        out = w * x
        for op in ops:
            out = UNARY[op](out) + w.flip(0)
        return out

    def loss(out: Tensor) -> Tensor:
        return out.logsumexp(0) + (out**2).sum() / 3

    value, product = func.ggn_vp(fn, loss, w, v)
    jacobian, out = jacrev(fn)(w), fn(w)
    torch.testing.assert_close(value, loss(out))
    torch.testing.assert_close(product, jacobian.T @ hessian(loss)(out) @ jacobian @ v)


def test_ggn_vp_of_a_model_on_trees(device: torch.device) -> None:
    """With several outputs, a tied weight, attention and dropout: one forward pass."""
    net = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.5).to(device, F64)
    call, params, buffers = func.make_functional(net)
    x = torch.randn(2, 3, 4, device=device, dtype=F64)
    y = torch.randint(4, (6,), device=device)
    along = {name: torch.randn_like(p) for name, p in params.items()}

    def fn(params: Any) -> Any:
        out = call(params, buffers, x)[0]
        return {"logits": out.reshape(6, 4), "size": out.square().mean()}

    def loss(outputs: Any) -> Tensor:
        return functional.cross_entropy(outputs["logits"], y) + outputs["size"]

    torch.manual_seed(0)
    value, product = func.ggn_vp(fn, loss, params, along)
    torch.manual_seed(0)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        outputs = fn(params)
    torch.testing.assert_close(value, loss(outputs))
    # J v is the derivative of J^T u by u.
    leaves, outs = list(params.values()), list(outputs.values())
    zeros = [torch.zeros_like(out).requires_grad_() for out in outs]
    pulled = torch.autograd.grad(outs, leaves, zeros, create_graph=True)
    tangents = torch.autograd.grad(pulled, zeros, list(along.values()), retain_graph=True)
    point = {name: out.detach() for name, out in outputs.items()}
    _, curvature = func.hvp(loss, point, dict(zip(outputs, tangents, strict=True)))
    expected = torch.autograd.grad(outs, leaves, list(curvature.values()))
    assert gradkit.tree.allclose(dict(zip(params, expected, strict=True)), product)


@pytest.mark.parametrize("name", ["vjp", "jvp", "linearize", "ggn_vp"])
def test_results_carry_graphs_unless_cut(device: torch.device, name: str) -> None:
    """Law: eagerly differentiated, first and second order, as the same through torch.func."""

    def fn(w: Tensor, x: Tensor, s: Tensor) -> Tensor:
        return (w * x).sin() * s + w**3

    def loss(out: Tensor) -> Tensor:
        return out.logsumexp(0)

    def ours(w: Tensor, x: Tensor, s: Tensor, **cut: Any) -> Tensor:
        if name == "vjp":
            value, pull = func.vjp(lambda w: fn(w, x, s), w, **cut)
            return torch.cat([value, pull(x * s)[0]])
        if name == "jvp":
            return torch.cat(func.jvp(lambda w: fn(w, x, s), w, x * s, **cut))
        if name == "linearize":
            value, push = func.linearize(lambda w: fn(w, x, s), w, **cut)
            return torch.cat([value, push(x * s)])
        value, product = func.ggn_vp(lambda w: fn(w, x, s), loss, w, x * s, **cut)
        return torch.cat([value[None], product])

    def dense(w: Tensor, x: Tensor, s: Tensor) -> Tensor:
        out, jacobian = fn(w, x, s), torch.diag(x * (w * x).cos() * s + 3 * w**2)
        if name != "ggn_vp":
            return torch.cat([out, jacobian @ (x * s)])
        p = out.softmax(0)
        second = torch.diag(p) - torch.outer(p, p)
        return torch.cat([loss(out)[None], jacobian.T @ second @ jacobian @ (x * s)])

    results = []
    for call in (ours, dense):
        tensors = inputs(device)
        out = call(*tensors)
        weights = torch.arange(1, len(out) + 1, dtype=F64, device=device)
        results.append([out, *derivatives((out * weights).sum(), tensors)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    assert not ours(*inputs(device), create_graph=False).requires_grad


def test_inside_vmap_and_under_compile(device: torch.device) -> None:
    w, x, v = (tensor.detach() for tensor in inputs(device))

    def product(x: Tensor) -> tuple[Tensor, ...]:
        value, pull = func.vjp(lambda w: (w * x).sin(), w)
        along = func.jvp(lambda w: (w * x).sin(), w, v)[1]
        gauss = func.ggn_vp(lambda w: (w * x).sin(), lambda out: (out**2).sum() / 2, w, v)[1]
        pushed = func.linearize(lambda w: (w * x).sin(), w)[1](v)
        return value, pull(v)[0], along, gauss, pushed

    data = torch.stack([x, v])
    batched = vmap(product)(data)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    for row, one in enumerate(data):
        for got, traced, expected in zip(batched, compiled(one), product(one), strict=True):
            torch.testing.assert_close(got[row], expected)
            torch.testing.assert_close(traced, expected)


def test_aux_ties_and_modules(device: torch.device) -> None:
    net = nn.Linear(2, 2).to(device)
    w = torch.tensor([1.0, 2.0], device=device)
    values, pull, aux = func.vjp(
        lambda p: (p["a"] * p["b"], {"n": 3}), {"a": w, "b": w}, has_aux=True
    )
    (grads,) = pull(torch.ones_like(w))
    assert_same_bits([grads["a"], grads["b"], values], [2 * w, 2 * w, w * w])
    assert aux == {"n": 3}
    _, products, aux = func.jvp(lambda w: (w * w, "text"), w, torch.ones_like(w), has_aux=True)
    assert same_bits(products, 2 * w)
    assert aux == "text"
    _, pull = func.vjp(lambda p, w: functional.linear(w, p["weight"], p["bias"]), net, w)
    of_net, of_w = pull(None)
    assert list(of_net) == ["weight", "bias"]
    assert not of_w.any()


@pytest.mark.parametrize("frozen", [False, True])
def test_one_variable_in_two_places_has_one_direction(device: torch.device, frozen: bool) -> None:
    w, x, v = (tensor.detach() for tensor in inputs(device))
    other = nn.Parameter(w.clone(), requires_grad=False) if frozen else w
    params, along = {"a": w, "b": other, "n": None}, {"a": v, "b": v, "n": None}

    def fn(params: Any) -> Tensor:
        return (params["a"] * x).sin() * params["b"]

    def of_one(w: Tensor) -> Tensor:
        return fn({"a": w, "b": other if frozen else w})

    def loss(out: Tensor) -> Tensor:
        return out.logsumexp(0)

    _, expected = func.jvp(of_one, w, v)
    torch.testing.assert_close(func.jvp(fn, params, along)[1], expected)
    torch.testing.assert_close(func.linearize(fn, params)[1](along), expected)
    _, product = func.ggn_vp(fn, loss, params, along)
    _, expected = func.ggn_vp(of_one, loss, w, v)
    torch.testing.assert_close(product["a"], expected)
    torch.testing.assert_close(product["b"], expected * (not frozen))
    assert product["n"] is None


NORMS = {"layer_norm": nn.LayerNorm, "batch_norm": nn.BatchNorm1d}


@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_linearize_of_a_gradient_through_a_norm(
    device: torch.device, norm: str, is_leaf: bool
) -> None:
    """The third derivative that torch gets wrong is by the primals, and not by cotangents."""
    net = nn.Sequential(nn.Linear(4, 6), NORMS[norm](6), nn.Tanh(), nn.Linear(6, 1))
    net.to(device, torch.float64)
    call, params, buffers = func.make_functional(net)
    x = torch.randn(8, 4, dtype=torch.float64, device=device)

    def loss(p: Any) -> Tensor:
        return call(p, buffers, x)[0].square().mean()

    point = {name: p.detach().requires_grad_(is_leaf) for name, p in params.items()}
    along = gradkit.tree.randn_like(point)
    _, right = func.hvp(loss, point, along, create_graph=False)
    for slope in (grad(loss), lambda p: func.value_and_grads(loss)(p)[1]):
        _, push = func.linearize(slope, point)
        product = push(along)
        torch.testing.assert_close(product, right)
        batch = vmap(push)({name: torch.stack([v, 2 * v]) for name, v in along.items()})
        torch.testing.assert_close(batch["0.bias"][1], 2 * right["0.bias"])
        if is_leaf:
            refused = pytest.raises(gradkit.UnsupportedGraphError, match="whose third torch")
            with refused:
                gradkit.value_and_grads(product["0.bias"].sum(), point)
    with pytest.raises(gradkit.UnsupportedGraphError, match=norm):
        func.value_and_grads(lambda p: func.linearize(slope, p)[1](along)["0.bias"].sum())(point)


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "gradkit": lambda w: func.value_and_grads(lambda w: w @ w.new_tensor([1.0, 2.0]))(w)[1],
    "torch": grad(lambda w: w @ w.new_tensor([1.0, 2.0])),
    "of one part": lambda w: func.value_and_grads(lambda w: w[0] ** 2 + w[1])(w)[1],
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_derivative_that_is_constant(device: torch.device, name: str) -> None:
    slope, w = LINEAR[name], torch.tensor([3.0, 4.0], device=device)
    v = torch.tensor([2.0, 1.0], device=device)
    right = jvp(slope, (w,), (v,))[1]
    if name == "torch" and hooks_registered():  # one may have cut the gradient off its graph
        with pytest.raises(gradkit.DetachedLossError):
            func.linearize(slope, w)
        return
    torch.testing.assert_close(func.linearize(slope, w)[1](v), right)
    torch.testing.assert_close(func.jvp(slope, w, v)[1], right)
    torch.testing.assert_close(func.vjp(slope, w)[1](v)[0], right)
    torch.testing.assert_close(func.per_loss_grads(slope)(w) @ v, right)

    # The product of a linear function is a constant, too.
    def loss(w: Tensor) -> Tensor:
        return (func.linearize(lambda w: 2 * w, w)[1](v) * w.detach() + w).sum()

    for got in (grad(loss)(w), func.value_and_grads(loss)(w)[1]):
        assert torch.equal(got, torch.ones_like(w))


def test_a_gradient_that_was_cut_is_no_constant(device: torch.device) -> None:
    w = torch.tensor([3.0, 4.0], device=device)

    def cut(w: Tensor) -> Tensor:
        return func.value_and_grads(lambda w: (w**2).sum())(w)[1].detach()

    calls: list[Callable[..., Any]] = [func.linearize, func.vjp]
    calls.append(lambda fn, w: func.per_loss_grads(fn)(w))
    for call in calls:
        with pytest.raises(gradkit.DetachedLossError):
            call(cut, w)

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return 2 * cotangent.detach()

    with pytest.raises(gradkit.UnsupportedGraphError, match="Cut"):
        func.linearize(Cut.apply, w)

    def summed(w: Tensor) -> Tensor:
        out: Tensor = Cut.apply(w)
        return out.sum()

    with pytest.raises(gradkit.DetachedLossError):
        func.vjp(grad(summed), w)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_linearize_of_several_arguments_in_any_mode(device: torch.device, mode: Any) -> None:
    net, w = nn.Linear(3, 2).to(device, F64), torch.ones(3, device=device, dtype=F64)
    directions = gradkit.tree.randn_like(net), torch.randn_like(w)
    with mode():
        values, push = func.linearize(
            lambda p, w: {"y": functional.linear(w, p["weight"], p["bias"]).tanh()}, net, w
        )
        product = push(*directions)["y"]
    out = net(w).detach().tanh()
    inner = (
        directions[0]["weight"] @ w + directions[0]["bias"] + net.weight.detach() @ directions[1]
    )
    torch.testing.assert_close(values["y"].detach(), out)
    torch.testing.assert_close(product.detach(), (1 - out**2) * inner)
    assert mode is not torch.no_grad or not product.requires_grad


def test_bad_input(device: torch.device) -> None:
    w = torch.ones(2, device=device)
    _, pull = func.vjp(lambda w: {"y": w * 2}, w)

    def fn(out: Any) -> Tensor:
        return torch.as_tensor(out).sum()

    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: pull({"y": torch.ones(3)}), gradkit.StructureError, r"cotangents\['y'\]"),
        (lambda: pull({"y": 1.0}), gradkit.LeafTypeError, r"cotangents\['y'\]"),
        (lambda: pull({"x": w}), gradkit.StructureError, "cotangents"),
        (lambda: func.vjp(3, w), gradkit.OptionError, "fn"),
        (lambda: func.vjp(lambda w: w.detach() * 2, w), gradkit.DetachedLossError, "depend"),
        (lambda: func.vjp(lambda w: "text", w), gradkit.LeafTypeError, "losses"),
        (lambda: func.jvp(lambda w: w * 2, w, w.double()), gradkit.StructureError, "tangents"),
        (lambda: func.jvp(lambda w: w * 2, w, w, has_aux=1), gradkit.OptionError, "has_aux"),
        (lambda: func.ggn_vp(lambda w: w, lambda o: o, w, w), gradkit.NotScalarLossError, "losses"),
        (lambda: func.ggn_vp(lambda w: w, 1, w, w), gradkit.OptionError, "loss"),
        (lambda: func.linearize(3, w), gradkit.OptionError, "fn"),
        (lambda: func.linearize(fn, w, create_graph=1), gradkit.OptionError, "create_graph"),
        (
            lambda: func.linearize(fn, w.to(torch.complex64)),
            gradkit.LeafTypeError,
            r"\[0\].*real tensor",
        ),
        (lambda: func.linearize(fn, w)[1](w, w), gradkit.StructureError, "tangents"),
        (lambda: func.linearize(fn, w)[1](w.double()), gradkit.StructureError, r"tangents\[0\]"),
        (
            lambda: func.ggn_vp(lambda w: w, fn, [w], [w, w]),
            gradkit.StructureError,
            "v: .*as params is",
        ),
        (lambda: func.ggn_vp(lambda w: w, fn, [w], [w[:1]]), gradkit.StructureError, r"v\[0\]"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


def test_a_wrong_derivative_raises(device: torch.device) -> None:
    w, x, _ = inputs(device)
    _, pull = func.vjp(Once.apply, w)
    (gradient,) = pull(x.detach())
    assert_same_bits([gradient], [2 * w.detach() * x.detach()])
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        torch.autograd.grad(gradient.sum(), w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        func.ggn_vp(Once.apply, lambda out: out.sum() ** 2, w.detach(), x.detach())
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        func.linearize(Once.apply, w.detach())[1](x.detach())
    distances = func.vjp(lambda w: torch.cdist(w[None], x.detach()[None]), w.detach())[1]
    with pytest.raises(gradkit.UnsupportedGraphError, match="cdist"):
        vmap(lambda u: distances(u)[0])(torch.ones(2, 1, 1, device=device, dtype=F64))


def test_a_hook_that_writes_is_noticed_in_a_pull(device: torch.device) -> None:
    """The pass comes after the level of torch.func has ended."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        inner = b * 1
        inner.register_hook(lambda grad: grad.mul_(7))
        return (a + inner) * 1

    a, b = inputs(device)[:2]
    for one, other in ((a, b), (a.detach(), b.detach())):
        _, pull = func.vjp(fn, one, other)
        with pytest.raises(gradkit.UnsupportedGraphError, match="written in place"):
            pull(torch.ones_like(one))
    _, pull = func.vjp(lambda w: w, a)
    assert_same_bits(pull(b.detach()), [b.detach()])


@pytest.mark.slow
def test_products_and_solutions_are_those_of_curvlinops(device: torch.device) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device, F64)
    x, y = torch.randn(9, 3, device=device, dtype=F64), torch.arange(9, device=device) % 2
    call, params, buffers = func.make_functional(net)
    v = gradkit.tree.randn_like(params)

    def outputs(params: Any) -> Tensor:
        return call(params, buffers, x)[0]

    def loss(out: Tensor) -> Tensor:
        return functional.cross_entropy(out, y)

    theirs = net, nn.CrossEntropyLoss(), list(net.parameters()), [(x, y)]
    _, product = func.ggn_vp(outputs, loss, params, v)
    expected = curvlinops.GGNLinearOperator(*theirs) @ list(v.values())
    torch.testing.assert_close(list(product.values()), list(expected))
    _, product = func.hvp(lambda params: loss(outputs(params)), params, v)
    expected = curvlinops.HessianLinearOperator(*theirs) @ list(v.values())
    torch.testing.assert_close(list(product.values()), list(expected))


def stopped(w: Tensor) -> Tensor:
    with torch.no_grad():
        target = w.square()
        target.mul_(2)
        first, second = target.chunk(2)
        assert target.mul_(1.5) is target
    return (target * w.square()).sum() + (torch.stack([first, second]) * w.exp()).sum()


@pytest.mark.parametrize("outer", ["none", "vmap", "grad"])
def test_what_is_computed_under_no_grad_is_constant_in_forward_mode(
    device: torch.device, outer: str
) -> None:
    """A jvp of torch's goes on through it, unlike a backward pass."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
    along = torch.tensor([1.0, 0.5], dtype=torch.float64, device=device)
    one = torch.ones((), dtype=torch.float64, device=device)
    calls: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (
            lambda w: func.jvp(stopped, w, along)[1],
            lambda w: func.vjp(stopped, w)[1](one)[0] @ along,
        ),
        (
            lambda w: func.hvp(stopped, w, along)[1].sum(),
            lambda w: func.hvp(stopped, w, along, mode="reverse-over-reverse")[1].sum(),
        ),
    ]
    for ours, other in calls:
        if outer == "none":
            torch.testing.assert_close(ours(w), other(w))
        elif outer == "vmap":
            each = torch.stack([w, 2 * w])
            torch.testing.assert_close(torch.vmap(ours)(each), torch.vmap(other)(each))
        else:
            torch.testing.assert_close(torch.func.grad(ours)(w), torch.func.grad(other)(w))
    assert torch.func.jvp(stopped, (w,), (along,))[1] != calls[0][0](w)


def derived(w: Tensor) -> Tensor:
    with torch.no_grad():
        constant = torch.func.jacfwd(lambda x: x**3)(torch.ones_like(w).cumsum(0)).sum(0)
    return w * constant


def views(w: Tensor) -> Tensor:
    y = w * w.unsqueeze(1)
    with torch.no_grad():
        transposed, (same,) = y.T, torch.broadcast_tensors(y)
    return (y @ transposed).sum(0) + same.sum(0)


@pytest.mark.parametrize("fn", [derived, views])
def test_transforms_and_views_under_no_grad(
    device: torch.device, fn: Callable[[Tensor], Tensor]
) -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
    along = torch.tensor([1.0, 0.5], dtype=torch.float64, device=device)
    values, products = func.jvp(fn, w, along)
    torch.testing.assert_close(values, fn(w))
    torch.testing.assert_close(products, func.linearize(fn, w)[1](along))

    def loss(w: Tensor) -> Tensor:
        return (fn(w) * w).sum()

    forward = func.hvp(loss, w, along)
    torch.testing.assert_close(forward, func.hvp(loss, w, along, mode="reverse-over-reverse"))


# --- what fn refers to, changed before the product is taken


class Holder:
    """Holds a tensor deeper than a closure shows."""

    def __init__(self, device: torch.device) -> None:
        self.parts = {"rest": [{"weight": torch.ones(2, device=device)}]}

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.parts["rest"][0]["weight"]).sum()[None]


def linear_and_optimizer(device: torch.device) -> tuple[torch.nn.Linear, torch.optim.SGD]:
    module = torch.nn.Linear(2, 1, device=device)
    torch.nn.init.ones_(module.weight)
    return module, torch.optim.SGD(module.parameters(), lr=1.0)


def changed_since(device: torch.device, change: str) -> tuple[Any, Any]:
    """Return a function, and what changes a tensor that it refers to."""
    module, optimizer = linear_and_optimizer(device)
    grads = {"weight": torch.ones(1, 2, device=device), "bias": None}
    x, holder = torch.ones(2, device=device), Holder(device)
    eval_norm = torch.nn.BatchNorm1d(2, device=device)
    eval_norm(torch.randn(4, 2, device=device))
    eval_norm.eval()
    function = gradkit.func.checkpoint(lambda x: holder(x).sin())
    changes: dict[str, tuple[Any, Any]] = {
        "step_": (module, lambda: gradkit.step_(optimizer, module, grads)),
        "minimize_": (module, lambda: gradkit.minimize_(optimizer, module(x).sum())),
        "copy_": (module, lambda: module.weight.detach().copy_(grads["weight"] * 3)),
        "load_state_dict": (module, lambda: module.load_state_dict(module.state_dict())),
        "an object": (holder, lambda: holder.parts["rest"][0]["weight"].zero_()),
        "a checkpoint": (function, lambda: holder.parts["rest"][0]["weight"].zero_()),
        "statistics": (
            lambda x: eval_norm(x[None]).sum()[None], lambda: eval_norm.running_var.mul_(4)
        ),
    }  # fmt: skip
    return changes[change]


CHANGES = [
    "step_",
    "minimize_",
    "copy_",
    "load_state_dict",
    "an object",
    "a checkpoint",
    "statistics",
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("product", ["vjp", "linearize"])
@pytest.mark.parametrize("has_shards", [False, True])
def test_what_fn_refers_to_has_changed(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    has_shards: bool,
    product: str,
    change: str,
) -> None:
    """Also once a module of the process is sharded: then hooks save what graphs need."""
    if has_shards:
        monkeypatch.setattr(recomputed_tensors, "recomputed_tensor_sources", [object()])
    fn, write = changed_since(device, change)
    x = torch.ones(2, device=device)
    multiply = getattr(gradkit.func, product)(fn, x)[1]
    given = torch.ones(1, device=device) if product == "vjp" else x
    multiply(given)
    write()
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^fn: expected"):
        multiply(given)


def test_a_change_that_the_product_does_not_read(device: torch.device) -> None:
    module, _ = linear_and_optimizer(device)
    x, one = torch.ones(2, device=device), torch.ones(1, device=device)
    pull = gradkit.func.vjp(module, x)[1]
    push = gradkit.func.linearize(module, x)[1]
    module.bias.detach().zero_()
    assert pull(one)[0].tolist() == [1, 1]
    assert push(x).tolist() == [2]
    copied = gradkit.func.vjp(lambda x: x @ module.weight[0].clone()[:, None], x)[1]
    module.weight.detach().zero_()
    assert copied(one)[0].tolist() == [1, 1]  # as the message advises
