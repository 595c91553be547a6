"""gradkit.func inside and around torch.func's transforms; the orders that torch gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional

import gradkit
from gradkit import func
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def cubes(w: Tensor) -> Tensor:
    return (w**3).sum()


def ours(w: Tensor) -> Tensor:
    return func.value_and_grads(cubes)(w)[1]


def test_a_transform_around_a_call_sees_its_gradient(device: torch.device) -> None:
    w = torch.tensor([1.0, -2.0, 3.0], device=device)
    v = torch.tensor([0.5, 1.0, -1.0], device=device)
    first, second = 3 * w**2, torch.diag(6 * w)
    close = torch.testing.assert_close
    close(grad(lambda w: (ours(w) * v).sum())(w), second @ v)
    close(jvp(ours, (w,), (v,)), (first, second @ v))
    close(vjp(ours, w)[1](v)[0], second @ v)
    close(jacrev(ours)(w), second)
    close(jacfwd(ours)(w), second)
    close(vmap(ours)(torch.stack([w, v])), torch.stack([first, 3 * v**2]))
    close(grad(lambda w: grad(lambda w: ours(w).sum())(w).sum())(w), torch.full_like(w, 6.0))
    close(hessian(lambda w: func.value_and_grads(cubes)(w)[0])(w), second)
    close(vmap(jacrev(ours))(torch.stack([w, v]))[1], torch.diag(6 * v))
    close(jacrev(vmap(ours))(w[None])[0, :, 0], second)


def test_a_transform_around_every_call(device: torch.device) -> None:
    w = torch.tensor([1.0, -2.0], device=device)
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 2.0]], device=device)

    def one(w: Tensor, x: Tensor) -> Tensor:
        return (w**2 * x).sum() ** 2

    samples = jacfwd(lambda w: func.per_sample_grads(one)(w, x))(w)
    expected = torch.stack([hessian(one)(w, row) for row in x])
    torch.testing.assert_close(samples, expected)
    torch.testing.assert_close(jacrev(lambda w: func.per_sample_grads(one)(w, x))(w), expected)

    def rows(w: Tensor) -> Any:
        return {"a": (w**2).sum(), "b": w**3}

    for chunk in (None, 2):
        by_loss = jacrev(func.per_loss_grads(rows, chunk_size=chunk))(w)
        torch.testing.assert_close(by_loss["a"], 2 * torch.eye(2, device=device))
        cube = torch.zeros(2, 2, 2, device=device)
        cube[0, 0, 0], cube[1, 1, 1] = 6 * w
        torch.testing.assert_close(by_loss["b"], cube)
    for mode in ("forward-over-reverse", "reverse-over-reverse"):
        third = grad(lambda w, mode=mode: func.hvp(cubes, w, w, mode=mode)[1].sum())(w)
        torch.testing.assert_close(third, 12 * w)
        batched = vmap(lambda w, mode=mode: func.hvp(cubes, w, w, mode=mode))(x)
        torch.testing.assert_close(batched, (3 * x**2, 6 * x * x))


def test_calls_inside_of_calls(device: torch.device) -> None:
    w = torch.tensor([1.0, -2.0], device=device)
    value, second = func.value_and_grads(lambda w: ours(w).sum())(w)
    assert_same_bits([value, second], [(3 * w.detach() ** 2).sum(), 6 * w.detach()])
    rows = func.per_loss_grads(ours)(w)
    torch.testing.assert_close(rows, torch.diag(6 * w.detach()))
    samples = func.per_sample_grads(lambda w, x: (ours(w) * x).sum())(
        w, torch.eye(2, device=device)
    )
    torch.testing.assert_close(samples, torch.diag(6 * w.detach()))
    torch.testing.assert_close(
        func.value_and_grads(lambda w: jvp(cubes, (w,), (torch.ones_like(w),))[1])(w)[1],
        6 * w.detach(),
    )
    torch.testing.assert_close(
        func.value_and_grads(lambda w: vmap(lambda x: x**3)(w).sum())(w)[1], 3 * w.detach() ** 2
    )
    torch.testing.assert_close(
        func.value_and_grads(lambda w: jacrev(lambda w: w**3)(w).sum())(w)[1], 6 * w.detach()
    )


def test_make_functional_over_and_under_transforms(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    call, params, buffers = func.make_functional(model)
    x = torch.randn(5, 3, device=device)
    per_input = vmap(grad(lambda x: call(params, buffers, x)[0].sum()))(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf).sum(), leaf)
    torch.testing.assert_close(per_input.detach(), expected)


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, w: functional.layer_norm(x, (4,), w),
    "torch.layer_norm": lambda x, w: torch.layer_norm(x, (4,), weight=w),
    "batch_norm": lambda x, w: functional.batch_norm(x, None, None, w, training=True),
    "instance_norm": lambda x, w: functional.instance_norm(x.T[None], weight=w)[0].T,
}
HARMLESS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer_norm without weight": lambda x, w: functional.layer_norm(x * w, (4,)),
    "group_norm": lambda x, w: functional.group_norm(x, 2, w),
    "rms_norm": lambda x, w: functional.rms_norm(x, (4,), w),
    "batch_norm in eval mode": lambda x, w: functional.batch_norm(
        x, torch.zeros_like(w), torch.ones_like(w), w
    ),
}


class Orders:
    """A sum of squared gradients of a normalization, differentiated; in several orders."""

    def __init__(self, norm: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
        self.norm = norm
        self.x = torch.randn(3, 5, 4, device=device)
        self.y = torch.randn(3, 5, 4, device=device)
        self.w = torch.rand(4, device=device) + 0.5
        self.k = torch.randn(4, 4, device=device)

    def one(self, p: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (self.norm(x @ p[0], p[1]).sin() * y).sum()

    def rows(self, p: tuple[Tensor, Tensor]) -> Tensor:
        return (self.norm(self.x[0] @ p[0], p[1]).sin() * self.y[0]).sum(1)

    @property
    def params(self) -> tuple[Tensor, Tensor]:
        return self.k, self.w

    def loop(self, p: tuple[Tensor, Tensor]) -> Tensor:
        each = [grad(self.one)(p, x, y) for x, y in zip(self.x, self.y, strict=True)]
        return sum((g**2).sum() for gs in each for g in gs)

    def batched(self, per_sample: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda p: sum((g**2).sum() for g in per_sample(p, self.x, self.y))

    def expected(self) -> Any:
        return grad(self.loop)(self.params)


def wrong_orders(case: Orders) -> dict[str, Callable[[], Any]]:
    theirs = vmap(grad(case.one), in_dims=(None, 0, 0))
    inside = vmap(lambda p, x, y: func.value_and_grads(case.one)(p, x, y)[1], in_dims=(None, 0, 0))
    samples = func.per_sample_grads(case.one)
    tangents = tuple(map(torch.ones_like, case.params))
    return {
        "ours(vmap(grad))": lambda: func.value_and_grads(case.batched(theirs))(case.params)[1],
        "grad(vmap(ours))": lambda: grad(case.batched(inside))(case.params),
        "jvp(vmap(ours))": lambda: jvp(case.batched(inside), (case.params,), (tangents,)),
        "grad(per_sample)": lambda: grad(case.batched(samples))(case.params),
        "ours(per_sample)": lambda: func.value_and_grads(case.batched(samples))(case.params)[1],
        "hvp(per_sample)": lambda: func.hvp(case.batched(samples), (case.params,), (tangents,)),
    }


ORDERS = (
    "ours(vmap(grad))", "grad(vmap(ours))", "jvp(vmap(ours))", "grad(per_sample)",
    "ours(per_sample)", "hvp(per_sample)",
)  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm", NORMS)
def test_orders_that_torch_gets_wrong_are_refused(
    device: torch.device, norm: str, order: str
) -> None:
    case = Orders(NORMS[norm], device)
    with pytest.raises(
        gradkit.UnsupportedGraphError, match=r"inside of the vmap|batch_norm in train"
    ):
        wrong_orders(case)[order]()


@pytest.mark.parametrize("norm", NORMS)
def test_torch_still_gets_them_wrong(device: torch.device, norm: str) -> None:
    """When this fails, torch has mended it, and the refusals can go [V1]."""
    case = Orders(NORMS[norm], device)
    theirs = grad(case.batched(vmap(grad(case.one), in_dims=(None, 0, 0))))(case.params)
    assert any(
        (a - b).norm() > 1e-3 * b.norm() for a, b in zip(theirs, case.expected(), strict=True)
    )


@pytest.mark.parametrize(
    "order", [order for order in ORDERS if "jvp" not in order and "hvp" not in order]
)
@pytest.mark.parametrize("norm", HARMLESS)
def test_what_is_right_is_not_refused(device: torch.device, norm: str, order: str) -> None:
    case = Orders(HARMLESS[norm], device)
    torch.testing.assert_close(wrong_orders(case)[order](), case.expected())


@pytest.mark.parametrize("norm", NORMS)
def test_the_right_order_is_right(device: torch.device, norm: str) -> None:
    case = Orders(NORMS[norm], device)

    def inner(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return sum((g**2).sum() for g in func.value_and_grads(case.one)(p, x, y)[1])

    per_task = vmap(func.value_and_grads(inner), in_dims=(None, 0, 0))
    _, grads = per_task(case.params, case.x, case.y)
    torch.testing.assert_close(tuple(g.sum(0) for g in grads), case.expected())


@pytest.mark.parametrize("norm", [*NORMS, *HARMLESS])
def test_batched_rows_under_a_derivative_run_one_by_one(device: torch.device, norm: str) -> None:
    case = Orders({**NORMS, **HARMLESS}[norm], device)

    def squares(rows: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda p: sum((g**2).sum() for g in rows(p))

    expected = grad(squares(func.per_loss_grads(case.rows)))(case.params)
    batched = func.per_loss_grads(case.rows, chunk_size=2)
    if norm in NORMS:
        with pytest.warns(gradkit.GradkitWarning, match="silently wrong for .*_norm"):
            got = grad(squares(batched))(case.params)
    else:
        got = grad(squares(batched))(case.params)
    torch.testing.assert_close(got, expected)
    one_by_one = [grad(lambda p, i=i: case.rows(p)[i])(case.params) for i in range(case.x.shape[1])]
    together = batched(case.params)
    for index, row in enumerate(one_by_one):
        torch.testing.assert_close(tuple(g[index] for g in together), row)


def test_a_jacobian_inside_is_refused_where_it_would_be_wrong(device: torch.device) -> None:
    case = Orders(NORMS["layer_norm"], device)
    with pytest.raises(gradkit.UnsupportedGraphError, match="inside of the vmap"):
        func.value_and_grads(lambda p: sum((g**2).sum() for g in jacrev(case.rows)(p)))(case.params)


def test_wrong_batching_rules_are_avoided(device: torch.device) -> None:
    """cdist and roll: pass by pass, with a warning; under a vmap by formula, or refused [G1]."""
    x, other = torch.randn(4, 3, device=device), torch.randn(5, 3, device=device)
    losses = {
        "cdist": lambda x: torch.cdist(x, other).sum(1),
        "roll": lambda x: torch.roll(x.sum(), 10) * x[:, 0],
    }
    for name, fn in losses.items():
        expected = torch.stack([grad(lambda x, i=i, fn=fn: fn(x)[i])(x) for i in range(len(fn(x)))])
        with pytest.warns(gradkit.GradkitWarning, match=name):
            got = func.per_loss_grads(fn, chunk_size=3)(x)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(func.per_loss_grads(fn)(x), expected)
    by_sample = {
        name: func.per_sample_grads(lambda x, s, fn=fn: fn(x).sum() * s)
        for name, fn in losses.items()
    }
    (row,) = by_sample["cdist"](x, torch.ones(1, device=device))
    torch.testing.assert_close(row, grad(lambda x: losses["cdist"](x).sum())(x))
    with pytest.raises(gradkit.UnsupportedGraphError, match="roll"):
        by_sample["roll"](x, torch.ones(1, device=device))
    with pytest.raises(gradkit.UnsupportedGraphError, match="cdist"):
        func.value_and_grads(lambda x: jacrev(losses["cdist"])(x).sum())(x)
    right = func.per_loss_grads(lambda x: torch.roll(x, 2, 0).sum(1), chunk_size=3)(x)
    torch.testing.assert_close(right.sum(0), torch.ones_like(x))


@pytest.mark.parametrize("by", ["input", "src"])
def test_as_strided_scatter_is_refused_where_it_is_differentiated(
    device: torch.device, by: str
) -> None:
    """torch reads its cotangent with another's strides, and drops what it should keep [G1]."""
    x, zeros = torch.randn(3, device=device), torch.zeros(3, device=device)

    def loss(x: Tensor) -> Tensor:
        into, src = (x * 1, zeros[:1]) if by == "input" else (zeros, x[:1] * 1)
        return (torch.as_strided_scatter(into, src, (1,), (1,), 1) * x).sum()

    for call in (func.value_and_grads(loss), func.per_loss_grads(loss)):
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.where"):
            call(x)
    constant = torch.as_strided_scatter(zeros, x[:1], (1,), (1,), 1)
    _, grad = func.value_and_grads(
        lambda x: (torch.as_strided_scatter(zeros, constant[1:2], (1,), (1,), 1) * x).sum()
    )(x)
    torch.testing.assert_close(grad, constant)


def test_torch_still_batches_cdist_and_roll_wrongly(device: torch.device) -> None:
    """When this fails, torch has mended it, and the refusals can go [G1]."""
    x, other = torch.randn(4, 3, device=device), torch.randn(5, 3, device=device)
    rows = jacrev(lambda x: torch.cdist(x, other).sum(1))(x)
    one_by_one = torch.stack([
        grad(lambda x, i=i: torch.cdist(x, other).sum(1)[i])(x) for i in range(4)
    ])
    assert (rows - one_by_one).norm() > 0.1 * one_by_one.norm()
    sums = vmap(lambda x: torch.roll(x.sum(), 1))(x)
    assert not torch.allclose(sums, x.sum(1))


def second_scatter(x: Tensor, source: Tensor) -> Tensor:
    return (torch.select_scatter(x, source, 0, 1) ** 3).sum()


def test_defects_of_vmap_are_refused(device: torch.device) -> None:
    """Each is silently wrong in torch; the values beside them are right."""
    x = torch.randn(4, device=device)
    values = torch.tensor([1.0, 2.0, 3.0], device=device)
    where = torch.tensor([0, 2], device=device)

    def filled(x: Tensor, value: Tensor) -> Tensor:
        return (torch.index_fill(x, 0, where, value) ** 3).sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match="index_fill"):
        func.per_sample_grads(filled, 1, in_dims=(None, 0))(x, values)
    _, right = func.value_and_grads(filled, 1)(x, values[1])
    torch.testing.assert_close(right, 6 * values[1] ** 2)

    rows = torch.randn(3, 4, device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match="select_scatter"):
        func.value_and_grads(lambda v: vmap(second_scatter)(rows, v).sum())(values)
    per_sample = func.per_sample_grads(second_scatter, 1, in_dims=0)(rows, values)
    torch.testing.assert_close(per_sample, 3 * values**2)


def differences(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, eps: float = 1e-6) -> Tensor:
    return (f(x + eps * v) - f(x - eps * v)) / (2 * eps)


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky_inverse": lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x @ x.T))
}


@pytest.mark.parametrize("name", FORWARD)
def test_wrong_forward_derivatives_are_refused(device: torch.device, name: str) -> None:
    x = torch.rand(3, 3, device=device) + torch.eye(3, device=device)
    v = torch.randn(3, 3, device=device)

    def loss(x: Tensor) -> Tensor:
        return FORWARD[name](x).sin().sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match=f"(?s){name}.*reverse-over-reverse"):
        func.hvp(loss, x, v)
    _, product = func.hvp(loss, x, v, mode="reverse-over-reverse")
    expected = differences(lambda x: func.value_and_grads(loss)(x)[1], x, v)
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer_norm", "instance_norm"])
def test_derivatives_of_forward_derivatives_are_refused(device: torch.device, name: str) -> None:
    x, v = torch.randn(2, 3, 3, device=device).unbind()
    fns: dict[str, Callable[[Tensor], Tensor]] = {
        "layer_norm": lambda x: functional.layer_norm(x, (3,)),
        "instance_norm": lambda x: functional.instance_norm(x[None]),
    }

    def ahead(x: Tensor) -> Tensor:
        return jvp(fns[name], (x,), (v,))[1].square().sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match=name):
        func.value_and_grads(ahead)(x)
    with pytest.raises(gradkit.UnsupportedGraphError, match=name):
        func.value_and_grads(lambda x: func.hvp(ahead, x, v)[1].sum())(x)
    products = [func.hvp(lambda x: fns[name](x).sin().sum(), x, v, mode=m)[1] for m in MODES]
    torch.testing.assert_close(*products)


MODES = ("forward-over-reverse", "reverse-over-reverse")


def test_a_third_derivative_through_a_norm_is_refused(device: torch.device) -> None:
    x = torch.randn(2, 3, device=device)

    def first(x: Tensor) -> Tensor:
        return func.value_and_grads(lambda x: functional.layer_norm(x, (3,)).sin().sum())(x)[1]

    def second(x: Tensor) -> Tensor:
        return func.value_and_grads(lambda x: first(x).square().sum())(x)[1]

    second(x)
    with pytest.raises(gradkit.UnsupportedGraphError, match="layer_norm"):
        func.value_and_grads(lambda x: second(x).square().sum())(x)


def test_operators_beneath_are_seen_too(device: torch.device) -> None:
    x = torch.randn(4, 3, device=device)
    for op in (torch.ops.aten.cdist, torch.ops.aten.cdist.default):
        with pytest.warns(gradkit.GradkitWarning, match="cdist"):
            func.per_loss_grads(lambda x, op=op: op(x, x + 1).sum(1), chunk_size=2)(x)
    w = torch.ones(3, device=device)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.layer_norm.default(x, [3], w).sin().sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match="layer_norm"):
        func.value_and_grads(lambda w: func.per_sample_grads(loss)(w, x).square().sum())(w)


def test_a_batch_of_batches_is_not_made(device: torch.device) -> None:
    """In vmap(vmap(...)), torch solves with the wrong factors."""
    a = torch.randn(3, 4, 4, device=device) + 3 * torch.eye(4, device=device)
    b = torch.randn(3, 4, 2, device=device)

    def solve(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve(a, b).reshape(-1)

    expected = vmap(lambda a, b: func.per_loss_grads(solve)(a, b))(a, b)
    with pytest.warns(gradkit.GradkitWarning, match="batch of batches"):
        got = vmap(lambda a, b: func.per_loss_grads(solve, chunk_size=3)(a, b))(a, b)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        expected, torch.stack([func.per_loss_grads(solve)(*one) for one in zip(a, b, strict=True)])
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_batched_pass_that_fails_is_done_one_by_one(device: torch.device) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device=device)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1]], dtype=torch.bool, device=device)

    def picked(x: Tensor) -> Tensor:
        return torch.masked_select(x, mask) ** 3

    table = torch.randn(4, 2, device=device)

    def looked_up(w: Tensor) -> Tensor:
        ids = torch.tensor([1, 1, 3], device=device)
        return functional.embedding(ids, w, sparse=True).sum(1)

    for fn, at in ((picked, x), (looked_up, table)):
        one_by_one = func.per_loss_grads(fn)(at)
        with pytest.warns(gradkit.GradkitWarning, match="masked_select|failed"):
            batched = func.per_loss_grads(fn, chunk_size=2)(at)
        assert batched.layout == one_by_one.layout
        torch.testing.assert_close(batched.to_dense(), one_by_one.to_dense())
        leaf = at.clone().requires_grad_()
        eager = gradkit.per_loss_grads(fn(leaf), leaf)
        torch.testing.assert_close(one_by_one.to_dense(), eager.to_dense())


def test_results_inside_of_a_transform_share_nothing(device: torch.device) -> None:
    a, b = torch.randn(2, 2, device=device)

    def second(x: Tensor) -> Tensor:
        by_a, by_b = func.value_and_grads(lambda a, b: ((a + b) * x).sum(), (0, 1))(a, b)[1]
        by_a.mul_(100)
        return by_b

    x = torch.rand(3, 2, device=device)
    assert_same_bits([vmap(second)(x)], [x])


def test_a_gradient_is_not_the_weight_of_the_caller(device: torch.device) -> None:
    w, weight = torch.tensor(1.5, device=device), torch.tensor(2.0, device=device)
    _, got = func.value_and_grads(lambda w: w, weights=weight)(w)
    got.zero_()
    assert weight == 2


def test_a_log_of_tensors_of_a_transform_stops_no_later_call(device: torch.device) -> None:
    """A list in a closure holds tensors of a vmap that has returned: torch makes none of them."""
    w, x = torch.ones(3, device=device), torch.tensor([[0.1, 0.2, 0.4]] * 2, device=device)
    log: list[Tensor] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        log.append((w * x).sum())
        return log[-1] ** 2

    def one(w: Tensor) -> Tensor:
        return fn(w, x[0])

    def quiet(w: Tensor) -> Tensor:
        return (w * x[0]).sum() ** 2 + 0 * len(log)

    firsts: tuple[Callable[[], Any], ...] = (
        lambda: func.per_sample_grads(fn)(w, x),
        lambda: torch.vmap(torch.func.grad(fn), (None, 0))(w, x),
        lambda: torch.func.jvp(one, (w,), (w,)),
        lambda: func.hvp(one, w, w),
    )
    right = 2 * (w @ x[0]) * x[0]
    for first in firsts:
        log.clear()
        first()
        for call in (
            lambda: func.value_and_grads(func.checkpoint(quiet))(w)[1],
            lambda: func.value_and_grads(lambda w: func.checkpoint(lambda: quiet(w))())(w)[1],
            lambda: func.per_sample_grads(fn)(w, x)[0],
            lambda: func.hvp(one, w, w)[0],
            lambda: func.linearize(one, w)[1](torch.eye(3, device=device)[0]) / x[0, 0] * x[0],
        ):
            torch.testing.assert_close(call(), right)
        func.check_grads(lambda w: fn(w, x[0].double()), w.double())
