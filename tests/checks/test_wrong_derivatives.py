"""What torch differentiates wrongly comes out right, or is refused with a way that is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations

import gradkit
from gradkit import func
from gradkit._torch_bugs.table import FORMULAS
from tests.sweep.extra import extra
from tests.sweep.programs import (
    Case,
    Point,
    batch,
    close,
    derivative,
    difference,
    dims,
    directions,
    dot,
    looped,
    masks,
    scalar,
)
from tests.sweep.table import is_mended

D = torch.float64
CASES = {
    name: case for name, case in extra().items() if case.operation not in {"scan", "while_loop"}
}
every_case = pytest.mark.parametrize("name", CASES)
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about sparse tensors and old names


def slope(fn: Callable[..., Tensor], along: Point) -> Callable[..., Tensor]:
    """Return the derivative along a direction, by gradkit."""
    return lambda *x: dot(func.value_and_grads(fn, tuple(range(len(x))))(*x)[1], along)


def product(mode: str, fn: Callable[..., Tensor], x: Point, along: Sequence[Point]) -> Tensor:
    return dot(func.hvp(fn, x, along[0], mode=mode)[1], along[1])


def nested(fn: Callable[..., Tensor], x: Point, along: Sequence[Point]) -> Tensor:
    for one in along:
        fn = slope(fn, one)
    return fn(*x)


def of_jvp(fn: Callable[..., Tensor], x: Point, along: Sequence[Point]) -> Tensor:
    return slope(lambda *x: jvp(fn, x, along[0])[1], along[1])(*x)


def eager(fn: Callable[..., Tensor], x: Point, along: Sequence[Point]) -> Tensor:
    leaves = [tensor.clone().requires_grad_() for tensor in x]
    value = fn(*leaves)
    for one in along:
        _, grads = gradkit.value_and_grads(value, leaves, create_graph=True, unused="zeros")
        value = dot(grads, one)
    return value.detach()


def unrolled(fn: Callable[..., Tensor], x: Point, along: Sequence[Point]) -> Tensor:
    """A step of gradient descent, differentiated: the identity less the Hessian."""
    leaves = [tensor.clone().requires_grad_() for tensor in x]
    step = gradkit.meta.unroll(lambda p, _, b: fn(*p), leaves, [None], gradkit.meta.sgd(1.0))
    _, grads = gradkit.value_and_grads(dot(step.params, along[0]), leaves)
    return dot(along[0], along[1]) - dot(grads, along[1])


def linearized(fn: Callable[..., Tensor], x: Point, along: Sequence[Point]) -> Tensor:
    of_slope: Tensor = func.linearize(lambda *x: jvp(fn, x, along[0])[1], *x)[1](*along[1])
    return of_slope


def func_then_eager(fn: Callable[..., Tensor], x: Point, along: Sequence[Point]) -> Tensor:
    leaves = [tensor.clone().requires_grad_() for tensor in x]
    _, grads = gradkit.value_and_grads(slope(fn, along[0])(*leaves), leaves, unused="zeros")
    return dot(grads, along[1])


SECOND = {
    "func, then eager": func_then_eager,
    "nested": nested,
    "forward over reverse": partial(product, "forward-over-reverse"),
    "reverse over reverse": partial(product, "reverse-over-reverse"),
    "reverse over forward": of_jvp,
    "linearize over forward": linearized,
    "eager": eager,
    "unroll": unrolled,
}


def right_or_refused(run: Callable[[], Tensor], right: Tensor) -> None:
    """Assert that a call gives the right value, or raises; a NaN of torch's is not silent."""
    try:
        got = run()
    except Exception:  # gradkit's error, or torch's own about what it has no rule for
        return
    assert close(got, right, 1e-5) or bool(got.isnan())


@pytest.mark.long
@every_case
@pytest.mark.parametrize("way", SECOND)
def test_a_second_derivative_is_right_or_refused(device: torch.device, name: str, way: str) -> None:
    case = CASES[name]
    fn, along = scalar(case.outputs), directions(case.point, 2)
    right = second(case, along)
    if case.operation == "as_strided_scatter":
        pytest.skip("its first derivative is wrong: a row of what gradkit does not see")
    right_or_refused(lambda: SECOND[way](fn, case.point, along), right)


def second(case: Case, along: Sequence[Point]) -> Tensor:
    """Return a second derivative by differences of the gradient."""
    meant = scalar(case.meant or case.outputs)

    def first(*x: Tensor) -> Tensor:
        leaves = [tensor.clone().requires_grad_() for tensor in x]
        grads = torch.autograd.grad(meant(*leaves), leaves, materialize_grads=True)
        return dot(grads, along[0])

    right = difference(first, case.point, along[1])
    assert right is not None
    return right


THIRD = {"nested": nested, "eager": eager}


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in CASES
        if n.partition(":")[0]
        in {
            "layer_norm",
            "batch_norm",
            "instance_norm",
            "det",
            "eigvals",
            "weight_norm",
            "prelu",
            "logcumsumexp",
        }
    ],
)
@pytest.mark.parametrize("way", THIRD)
def test_a_third_derivative_is_right_or_refused(device: torch.device, name: str, way: str) -> None:
    case = CASES[name]
    fn, along = scalar(case.outputs), directions(case.point, 3)
    right = difference_of(lambda *x: second(Case("", case.outputs, x), along), case.point, along[2])
    try:
        got = THIRD[way](fn, case.point, along)
    except gradkit.GradkitError:
        return
    torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-4)


def difference_of(fn: Callable[..., Tensor], x: Point, along: Point) -> Tensor:
    """Return a plain difference; `fn` is one itself, so that it has few digits."""
    ahead, behind = (
        fn(*(t + step * d for t, d in zip(x, along, strict=True))) for step in (1e-3, -1e-3)
    )
    return (ahead - behind) / 2e-3


@pytest.mark.long
@every_case
def test_samples_are_right_or_refused(device: torch.device, name: str) -> None:
    case = CASES[name]
    fn, (along,) = scalar(case.outputs), directions(case.point, 1)
    for mask in masks(len(case.point)):
        points = batch(case.point, mask, 2)
        right = looped(derivative(fn, ("Grad",), [along]), mask, 2)
        positions = tuple(range(len(points)))
        call = func.per_sample_grads(fn, positions, in_dims=dims(mask))
        try:
            expected = right(*points)
        except Exception:
            return  # torch's own refusal

        def got(call: Callable[..., Point] = call, points: Point = points) -> Tensor:
            pairs = zip(call(*points), along, strict=True)
            return torch.stack([(g * t).flatten(1).sum(1) for g, t in pairs]).sum(0)

        if case.operation != "as_strided_scatter":
            right_or_refused(got, expected)


# --- what is right stays


FIRST_ORDER_IN_FUNC = [
    name for name, case in CASES.items()
    if case.operation not in {"as_strided_scatter", "cond", "sparse_csr_tensor", "to_sparse_csr",
                              "linear_cross_entropy"}
]  # fmt: skip


@pytest.mark.parametrize("name", FIRST_ORDER_IN_FUNC)
def test_the_first_derivative_is_not_refused_and_keeps_its_bits(
    device: torch.device, name: str
) -> None:
    case = CASES[name]
    fn = scalar(case.outputs)
    leaves = [tensor.clone().requires_grad_() for tensor in case.point]
    options: Any = {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(fn(*leaves), leaves, **options)
    call = func.value_and_grads(fn, tuple(range(len(leaves))))
    for a, b in zip(call(*case.point)[1], expected, strict=True):
        assert torch.equal(a.to_dense(), b.to_dense())
    # Of parameters, which eager code may differentiate again, by the formula if there is one.
    for a, b in zip(call(*leaves)[1], expected, strict=True):
        torch.testing.assert_close(a.to_dense(), b.to_dense())


@pytest.mark.parametrize("name", ["batch_norm: eval", "instance_norm: running"])
@pytest.mark.parametrize("affine", ["", ", affine"])
def test_the_third_derivative_of_running_statistics_is_not_refused(
    device: torch.device, name: str, affine: str
) -> None:
    case = CASES[name + affine]
    fn, along = scalar(case.outputs), directions(case.point, 3)
    right = derivative(fn, ("Grad",) * 3, along)(*case.point)
    for way in THIRD.values():
        torch.testing.assert_close(way(fn, case.point, along), right)


# --- weight_norm, wherever it stands


def layer() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(4, 3)).double()


V, G = "parametrizations.weight.original1", "parametrizations.weight.original0"


def written_out(params: dict[str, Tensor], x: Tensor) -> Tensor:
    v, g = params[V], params[G]
    return functional.linear(x, g * v / v.norm(dim=1, keepdim=True), params["bias"]).sin().sum()


def test_a_parametrized_layer_has_the_hessian_of_its_formula(device: torch.device) -> None:
    module, x = layer().to(device), torch.randn(5, 4, dtype=D, device=device)
    call, params, buffers = func.make_functional(module)
    params = {name: p.detach() for name, p in params.items()}
    along = {name: torch.randn_like(p) for name, p in params.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return call(params, buffers, x)[0].sin().sum()

    expected = func.hvp(lambda p: written_out(p, x), params, along)[1]
    for mode in ("forward-over-reverse", "reverse-over-reverse"):
        torch.testing.assert_close(func.hvp(loss, params, along, mode=mode)[1], expected)


def test_weight_norm_in_eager_passes(device: torch.device) -> None:
    module, x = layer().to(device), torch.randn(5, 4, dtype=D, device=device)
    params = dict(module.named_parameters())

    def by_formula(params: dict[str, Tensor]) -> Tensor:
        v, g = params[V], params[G]
        weight = g * v / torch.norm_except_dim(v, 2, 0)
        return functional.linear(x, weight, params["bias"]).sin().sum()

    seconds = []
    for loss in (by_formula, lambda p: module(x).sin().sum(), lambda p: written_out(p, x)):
        _, grads = gradkit.value_and_grads(loss(params), params, create_graph=True)
        squares = gradkit.tree.dot(grads, grads)
        seconds.append(gradkit.value_and_grads(squares, params)[1])
    torch.testing.assert_close(seconds[0], seconds[2])
    torch.testing.assert_close(seconds[1], seconds[2])
    # The first derivative is right, and not refused.
    _, grads = gradkit.value_and_grads(module(x).sin().sum(), params)
    _, right = gradkit.value_and_grads(written_out(params, x), params)
    torch.testing.assert_close(grads, right)


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_the_formula_of_weight_norm_is_that_of_the_parametrization(
    device: torch.device, dim: int | None
) -> None:
    torch.manual_seed(0)
    module = parametrizations.weight_norm(nn.Linear(4, 3), dim=dim).to(device, D)
    x = torch.randn(5, 4, dtype=D, device=device)
    params = {name: p.detach() for name, p in module.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(module, params, (x,)).sin().sum()

    def first(params: dict[str, Tensor]) -> Tensor:
        return gradkit.tree.dot(func.value_and_grads(loss)(params)[1], along)

    along = {name: torch.randn_like(p) for name, p in params.items()}
    _, grads = func.value_and_grads(first)(params)
    step = 1e-5
    ahead, behind = (
        torch.func.grad(loss)({n: p + s * along[n] for n, p in params.items()})
        for s in (step, -step)
    )
    for name, grad in grads.items():
        right = (ahead[name] - behind[name]) / (2 * step)
        torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-6)


# --- the ways that refusals name


def test_the_ways_out_of_a_jvp_of_solve_are_right(device: torch.device) -> None:
    a = torch.randn(3, 3, dtype=D, device=device) + 3 * torch.eye(3, dtype=D, device=device)
    b, along = torch.randn(3, dtype=D, device=device), torch.randn_like(a)

    def loss(a: Tensor) -> Tensor:
        return torch.linalg.solve(a, b).sin().sum()

    right = difference_of_grads(loss, a, along)
    of_slope = func.value_and_grads(lambda a: jvp(loss, (a,), (along,))[1])
    if is_mended("solve"):
        torch.testing.assert_close(of_slope(a)[1], right, rtol=1e-5, atol=1e-6)
    else:
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"(?s)solve.*hvp.*linalg\.inv"):
            of_slope(a)
    torch.testing.assert_close(func.hvp(loss, a, along)[1], right, rtol=1e-5, atol=1e-6)

    def by_inverse(a: Tensor) -> Tensor:
        return (torch.linalg.inv(a) @ b).sin().sum()

    by_jvp = func.value_and_grads(lambda a: jvp(by_inverse, (a,), (along,))[1])(a)[1]
    torch.testing.assert_close(by_jvp, right, rtol=1e-5, atol=1e-6)


def difference_of_grads(fn: Callable[[Tensor], Tensor], a: Tensor, along: Tensor) -> Tensor:
    """Return a product of the Hessian, by differences."""
    ahead, behind = (torch.func.grad(fn)(a + step * along) for step in (1e-5, -1e-5))
    return (ahead - behind) / 2e-5


def test_a_penalty_on_a_jvp_of_a_layer_that_solves_is_refused(device: torch.device) -> None:
    module = parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley").to(device, D)
    x = torch.randn(2, 3, dtype=D, device=device)
    params = {name: p.detach() for name, p in module.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in params.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(module, params, (x,)).sin().sum()

    of_slope = func.value_and_grads(lambda p: jvp(loss, (p,), (along,))[1])
    if is_mended("solve"):
        right = func.hvp(loss, params, along)[1]
        assert gradkit.tree.allclose(of_slope(params)[1], right)
        return
    with pytest.raises(gradkit.UnsupportedGraphError, match="solve"):
        of_slope(params)


@pytest.mark.parametrize("operation", ["linalg", "aten"])
def test_operators_beneath_run_by_the_formula_too(device: torch.device, operation: str) -> None:
    a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=D, device=device)
    along = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=D, device=device)
    cholesky = {"linalg": torch.linalg.cholesky, "aten": torch.ops.aten.linalg_cholesky}[operation]
    results = [
        func.hvp(lambda a: cholesky(a).sin().sum(), a, along, mode=mode)
        for mode in ("forward-over-reverse", "reverse-over-reverse")
    ]
    torch.testing.assert_close(*results)


def test_two_vmaps_of_prelu_are_right_and_those_of_lu_solve_refused(device: torch.device) -> None:
    w, x = torch.randn(2, 3, dtype=D), torch.randn(2, 2, 3, dtype=D)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (functional.prelu(x, w) * torch.arange(6.0, dtype=D).view(2, 3)).sum()

    grad = func.value_and_grads(loss)
    got = vmap(lambda w: vmap(lambda x: grad(x, w)[1])(x))(w)
    right = torch.stack([torch.stack([torch.func.grad(loss)(s, v) for s in x]) for v in w])
    torch.testing.assert_close(got, right)
    a, b = torch.randn(2, 3, 3, dtype=D) + 3 * torch.eye(3, dtype=D), torch.randn(2, 3, 2, dtype=D)

    def solved(solve: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        return solve(a, b).sin().sum()

    def by_factors(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b)

    with pytest.raises(gradkit.UnsupportedGraphError, match=r"(?s)lu_solve.*torch\.linalg\.solve"):
        vmap(lambda a: func.per_sample_grads(partial(solved, by_factors))(a, b))(a)
    solve = partial(solved, torch.linalg.solve)
    got = vmap(lambda a: func.per_sample_grads(solve)(a, b))(a)
    right = torch.stack([torch.stack([torch.func.grad(solve)(m, v) for v in b]) for m in a])
    torch.testing.assert_close(got, right)


def test_a_constant_sparse_tensor_is_not_refused(device: torch.device) -> None:
    where = torch.tensor([[0, 1, 2], [2, 0, 1]], device=device)
    values = torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)
    x = torch.randn(3, 2, dtype=D, device=device)

    def loss(x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.sparse_coo_tensor(where, values, (3, 3)), x).sin().sum()

    def dense(x: Tensor) -> Tensor:
        matrix = values.new_zeros(3, 3).index_put(tuple(where), values)
        return (matrix @ x).sin().sum()

    along = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    _, first = gradkit.value_and_grads(loss(leaf), leaf, create_graph=True)
    torch.testing.assert_close(first, torch.func.grad(dense)(x))
    assert func.hvp(dense, x, along)[1].shape == x.shape


# --- logcumsumexp, where a cotangent is zero


def written_sums(x: Tensor) -> Tensor:
    return torch.stack([x[: i + 1].logsumexp(0) for i in range(len(x))])


def of_events(sums: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A loss as that of Cox, squared: only where there is an event the sums have a cotangent."""
    events = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=D, device=x.device)
    return (events * (sums(x) - x)).sum().square()


def test_a_loss_of_events_has_the_second_derivatives_of_its_formula(device: torch.device) -> None:
    x = torch.tensor([-0.3, 0.4, 1.2, -0.9], dtype=D, device=device)
    point, along = (x,), [(torch.arange(1.0, 5, dtype=D, device=device),)] * 2
    loss = partial(of_events, partial(torch.logcumsumexp, dim=0))
    right = product("reverse-over-reverse", partial(of_events, written_sums), point, along)
    for name in ("nested", "func, then eager", "unroll", "reverse over reverse"):
        torch.testing.assert_close(SECOND[name](loss, point, along), right)
    torch.testing.assert_close(SECOND["forward over reverse"](loss, point, along), right)

    def slopes(sums: Callable[[Tensor], Tensor]) -> Tensor:
        each = func.per_loss_grads(lambda x: sums(x).sin())
        return func.value_and_grads(lambda x: each(x).sum())(x)[1]

    torch.testing.assert_close(slopes(partial(torch.logcumsumexp, dim=0)), slopes(written_sums))


def test_logcumsumexp_where_a_cotangent_is_zero(device: torch.device) -> None:
    x = torch.tensor([-0.3, 0.4, 1.2, -0.9], dtype=D, device=device, requires_grad=True)
    loss = of_events(partial(torch.logcumsumexp, dim=0), x)
    _, first = gradkit.value_and_grads(loss, x, create_graph=True)
    _, right = gradkit.value_and_grads(of_events(written_sums, x), x, create_graph=True)
    torch.testing.assert_close(first, right)
    second, also = (gradkit.value_and_grads(grad.sum(), x)[1] for grad in (first, right))
    torch.testing.assert_close(second, also)


@pytest.mark.parametrize(
    "values",
    [
        [1.0, -torch.inf, -torch.inf, 2.0],
        [-torch.inf, -torch.inf, 1.0, 2.0],
        [1.0, 2000.0, -5.0, 3.0],
        [0.5],
    ],
)
def test_the_formula_of_logcumsumexp_is_stable(device: torch.device, values: list[float]) -> None:
    x = torch.tensor(values, dtype=D, device=device)
    along = torch.linspace(0.5, 1.5, len(x), dtype=D, device=device)

    def loss(sums: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return (sums(x) * along)[-2:].sin().sum()

    right = func.hvp(partial(loss, written_sums), x.clamp(min=-1e4), along)  # whose exp is zero
    for mode in ("forward-over-reverse", "reverse-over-reverse"):
        got = func.hvp(partial(loss, partial(torch.logcumsumexp, dim=0)), x, along, mode=mode)
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_formula_of_logcumsumexp_has_its_dimensions(device: torch.device, dim: int) -> None:
    x = torch.randn(3, 5, dtype=D, device=device)
    formula = FORMULAS["logcumsumexp"]
    torch.testing.assert_close(formula(None, x, dim), torch.logcumsumexp(x, dim))
    assert formula(None, x[0, 0], 0) == x[0, 0]
    z = torch.complex(x, x.sin())
    torch.testing.assert_close(formula(None, z, dim), torch.logcumsumexp(z, dim))


# --- embedding, whose row of padding is a constant


TOKENS = [1, 2, 0, 0]
EMBEDDINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nn.Embedding": lambda words, w: functional_call(
        nn.Embedding(4, 2, padding_idx=0, _weight=torch.zeros_like(w)), {"weight": w}, (words,)
    ),
    "functional": lambda words, w: functional.embedding(words, w, 0),
    "counted from the end": lambda words, w: functional.embedding(words, w, padding_idx=-4),
    "torch": lambda words, w: torch.embedding(w, words, padding_idx=0),
    "aten": lambda words, w: torch.ops.aten.embedding(w, words, 0),
}
every_embedding = pytest.mark.parametrize("name", EMBEDDINGS)


def of_rows(name: str, words: Tensor, w: Tensor) -> Tensor:
    """A loss that couples the rows."""
    return EMBEDDINGS[name](words, w).sum(-2).sin().sum()


def padded(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    words = torch.tensor(TOKENS, device=device)
    w = torch.randn(4, 2, dtype=D, generator=torch.Generator().manual_seed(0)).to(device)
    return words, w, torch.ones_like(w)


@every_embedding
def test_the_modes_agree_on_padding(device: torch.device, name: str) -> None:
    words, w, along = padded(device)
    loss = partial(of_rows, name, words)
    _, grad = func.value_and_grads(loss)(w)
    assert not grad[0].any()
    assert grad[1].all()
    torch.testing.assert_close(func.jvp(loss, w, along)[1], dot([grad], [along]))
    torch.testing.assert_close(func.linearize(loss, w)[1](along), dot([grad], [along]))
    _, right = func.hvp(loss, w, along, mode="reverse-over-reverse")
    torch.testing.assert_close(func.hvp(loss, w, along)[1], right)
    of_slope = func.value_and_grads(lambda w: func.jvp(loss, w, along)[1])
    torch.testing.assert_close(of_slope(w)[1], right)
    twice = func.jvp(lambda w: func.jvp(loss, w, along)[1], w, along)[1]
    torch.testing.assert_close(twice, dot([right], [along]))


@every_embedding
def test_the_modes_agree_on_padding_in_a_batch(device: torch.device, name: str) -> None:
    words, w, along = padded(device)
    batch = torch.stack([words, words.flip(0) + 1, words % 3])
    got = vmap(lambda words: func.jvp(partial(of_rows, name, words), w, along)[1])(batch % 4)
    grads = func.per_sample_grads(lambda w, words: of_rows(name, words, w))(w, batch % 4)
    torch.testing.assert_close(got, (grads * along).sum((1, 2)))


@pytest.mark.parametrize(
    "embed", [functional.embedding, lambda words, w: torch.embedding(w, words)]
)
def test_without_padding_every_row_has_a_tangent(
    device: torch.device, embed: Callable[[Tensor, Tensor], Tensor]
) -> None:
    words, w, along = padded(device)
    got = func.jvp(lambda w: embed(words, w), w, along)[1]
    assert torch.equal(got, torch.ones_like(got))


# --- the nan of a derivative of a jvp, which reverse mode twice loses


LOST = [n for n in CASES if n.partition(":")[0] in {"eigvals", "eig", "prod", "cumprod"}]


@pytest.mark.parametrize("inner", ["Grad", "Jvp"])
@pytest.mark.parametrize("name", LOST)
def test_linearize_of_a_jvp_is_right_or_refused(
    device: torch.device, name: str, inner: str
) -> None:
    case = CASES[name]
    fn, along = scalar(case.outputs), directions(case.point, 3)

    def first(*x: Tensor) -> Tensor:
        if inner == "Grad":
            return slope(fn, along[0])(*x)
        return jvp(fn, x, along[0])[1]

    def run(below: Callable[..., Tensor], direction: Point) -> Tensor:
        return func.linearize(below, *case.point)[1](*direction)

    right = second(case, along)
    right_or_refused(lambda: run(first, along[1]), right)
    right = difference_of(lambda *x: second(Case("", case.outputs, x), along), case.point, along[2])
    try:
        got = run(lambda *x: jvp(first, x, along[1])[1], along[2])
    except Exception:  # gradkit's error, or torch's own
        return
    assert close(got, right, 1e-3)


# --- operations of constants, which have no derivative that could be wrong


def factor(device: torch.device) -> Tensor:
    a = torch.rand(3, 3, dtype=D, device=device)
    return torch.linalg.cholesky(a @ a.mT + torch.eye(3, dtype=D, device=device))


OF_CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "cdist": lambda a: torch.cdist(a, a + 1),
    "cholesky_inverse": torch.cholesky_inverse,
    "sparse_coo_tensor": lambda a: (
        torch.sparse_coo_tensor(torch.eye(2, device=a.device).long(), a[0, :2], (3, 3)) @ a
    ),
    "as_strided_scatter": lambda a: torch.as_strided_scatter(a, a[0], (3,), (1,), 1),
    "index_fill": lambda a: a.index_fill(0, torch.tensor([1], device=a.device), a[0, 0]),
    "roll": lambda a: torch.roll(a.sum(), 1),
    "masked_select": lambda a: torch.masked_select(a, a[0] > a[0, 1]),
    "lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), a),
    "triangular_solve": lambda a: torch.triangular_solve(a, a)[0],
    "slogdet": lambda a: torch.slogdet(a)[1],
    "scatter_reduce": lambda a: torch.scatter_reduce(
        a, 0, torch.zeros_like(a, dtype=torch.long), a, "prod"
    ),
    "eigvals": lambda a: torch.linalg.eigvals(a @ a.mT).real,
    "layer_norm": lambda a: functional.layer_norm(a, (3,), a[0]),
}  # fmt: skip


@pytest.mark.parametrize("where", ["outside", "under no_grad"])
@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_an_operation_of_constants_is_right(device: torch.device, name: str, where: str) -> None:
    operation, a = OF_CONSTANTS[name], factor(device)
    value = operation(a).sum()
    w = torch.tensor([1.0, -2.0], dtype=D, device=device)

    def constant(w: Tensor) -> Tensor:
        if where == "outside":
            return operation(a).sum()
        with torch.no_grad():
            return operation(a + 0 * w.sum()).sum()

    def loss(w: Tensor) -> Tensor:
        return (w.sum() * constant(w)) ** 2

    slope = 2 * value**2 * w.sum() * torch.ones_like(w)
    along = torch.tensor([3.0, 1.0], dtype=D, device=device)
    for mode in ("forward-over-reverse", "reverse-over-reverse"):
        got, product = func.hvp(loss, w, along, mode=mode)
        torch.testing.assert_close(got, slope)
        torch.testing.assert_close(product, 2 * value**2 * along.sum() * torch.ones_like(w))
    torch.testing.assert_close(func.jvp(loss, w, along)[1], slope @ along)
    inside = func.value_and_grads(lambda w: func.value_and_grads(loss)(w)[1] @ along)(w)[1]
    torch.testing.assert_close(inside, product)
    if where == "outside":
        samples = func.per_sample_grads(lambda w, s: loss(w) * s)(w, a[0])
        torch.testing.assert_close(samples, a[0][:, None] * slope)


def test_a_jvp_inside_of_no_grad_is_none_of_a_constant(device: torch.device) -> None:
    a = factor(device)

    def loss(w: Tensor) -> Tensor:
        with torch.no_grad():
            return jvp(torch.cholesky_inverse, (a,), (a * w,))[1].sum() * w

    with pytest.raises(gradkit.UnsupportedGraphError, match="cholesky_inverse"):
        func.jvp(loss, a[0, 0], a[1, 1])
