"""What a refusal advises is run: on the program that was refused, it gives the right value.

Every entry of the tables of torch's defects has a row here, or the test of the tables fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradkit
from gradkit import func
from gradkit._checks import eager_graph
from gradkit._torch_bugs import missing, table

Scalar: TypeAlias = Callable[[Tensor], Tensor]
Way: TypeAlias = Callable[[Scalar, Tensor, Tensor], Tensor]
REVERSE = "reverse-over-reverse"


def derivative(fn: Scalar, x: Tensor, along: Tensor, order: int) -> Tensor:
    """Return a directional derivative by differences of values, which use no derivative at all."""
    step = {1: 1e-4, 2: 1e-3, 3: 5e-3}[order]
    at = {n: fn((x + n * step * along).detach()) for n in range(-3, 4)}
    if order == 1:
        total = 45 * (at[1] - at[-1]) - 9 * (at[2] - at[-2]) + (at[3] - at[-3])
        return total / (60 * step)
    if order == 2:
        even = 270 * (at[1] + at[-1]) - 27 * (at[2] + at[-2]) + 2 * (at[3] + at[-3])
        return (even - 490 * at[0]) / (180 * step**2)
    return (at[-3] - 8 * at[-2] + 13 * at[-1] - 13 * at[1] + 8 * at[2] - at[3]) / (8 * step**3)


# --- ways to take a derivative along a direction, some of which are refused


def jvp(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    result: Tensor = func.jvp(fn, x, along)[1]
    return result


def of_jvp(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    return (func.value_and_grads(lambda x: jvp(fn, x, along))(x)[1] * along).sum()


def jvp_of_jvp(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    return jvp(lambda x: jvp(fn, x, along), x, along)


def slope(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    return (func.value_and_grads(fn)(x)[1] * along).sum()


def linearized(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    result: Tensor = func.linearize(fn, x)[1](along)
    return result


def pulled(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    value, pull = func.vjp(fn, x)
    return (pull(torch.ones_like(value))[0] * along).sum()


def hvp(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    return (func.hvp(fn, x, along)[1] * along).sum()


def hvp_by_reverse(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    return (func.hvp(fn, x, along, mode=REVERSE)[1] * along).sum()


def third_by_forward(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    return jvp(lambda x: jvp_of_jvp(fn, x, along), x, along)


def third_by_func(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    return slope(lambda x: slope(lambda x: slope(fn, x, along), x, along), x, along)


def by_passes(order: int) -> Way:
    def way(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = fn(x)
        for turn in range(order):
            _, grad = gradkit.value_and_grads(value, x, create_graph=turn < order - 1)
            value = (grad * along).sum()
        return value

    return way


def rows(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    """The slopes of three multiples of a function, by a batched backward pass."""
    _, pull = func.vjp(lambda x: fn(x) * torch.arange(1.0, 4.0).to(x), x)
    (grads,) = torch.vmap(pull)(torch.eye(3).to(x))
    return (grads.sum(0) * along).sum() / 6


def samples(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    grads = torch.vmap(lambda x: func.value_and_grads(fn)(x)[1])(torch.stack([x, x]))
    return (grads.mean(0) * along).sum()


def slopes_of_samples(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    """The gradient of a function that is batched itself."""
    return slope(lambda x: torch.vmap(fn)(torch.stack([x, x])).mean(), x, along)


def batches(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    grads = torch.vmap(torch.vmap(lambda x: func.value_and_grads(fn)(x)[1]))(
        x.expand(2, 2, *x.shape)
    )
    return (grads.mean((0, 1)) * along).sum()


@dataclass(frozen=True)
class Row:
    """One entry: what is refused, and what it names; each way is of a function, the same or not."""

    fn: Scalar
    refused: Way
    order: int
    advised: Sequence[tuple[Scalar, Way]]
    point: Callable[[], Tensor] = lambda: torch.randn(3, 3, dtype=torch.float64)


def spd(x: Tensor) -> Tensor:
    return x @ x.mT + 3 * torch.eye(3).to(x)


def regular(x: Tensor) -> Tensor:
    return x + 4 * torch.eye(3).to(x)


def pairs(x: Tensor) -> Tensor:
    return (x[..., :, None, :] - (x.sin() + 1)[..., None, :, :]).norm(dim=-1).sum()


def det(x: Tensor) -> Tensor:
    return torch.linalg.det(regular(x))


def slogdet(x: Tensor) -> Tensor:
    return torch.linalg.slogdet(regular(x))[1]


def logdet(x: Tensor) -> Tensor:
    return torch.logdet(spd(x))


def householder(x: Tensor) -> Tensor:
    return torch.linalg.householder_product(x, x[0].cos()).sin().sum()


def solve(x: Tensor) -> Tensor:
    return torch.linalg.solve(regular(x), x.sin()).square().sum()


def solve_ex(x: Tensor) -> Tensor:
    return torch.linalg.solve_ex(regular(x), x.sin())[0].square().sum()


def tensorsolve(x: Tensor) -> Tensor:
    return torch.linalg.tensorsolve(regular(x), x.sin()[0]).square().sum()


def by_inverse(x: Tensor) -> Tensor:
    return (torch.linalg.inv(regular(x)) @ x.sin()).square().sum()


def vector_by_inverse(x: Tensor) -> Tensor:
    return (torch.linalg.inv(regular(x)) @ x.sin()[0]).square().sum()


def cholesky_inverse(x: Tensor) -> Tensor:
    return torch.cholesky_inverse(regular(x).tril()).sin().sum()


def triangular(x: Tensor) -> Tensor:
    return torch.triangular_solve(x.sin(), regular(x))[0].square().sum()


def eig(x: Tensor) -> Tensor:
    return (torch.linalg.eig(regular(x.diag().diag() * 3 + 0.1 * x))[0].abs() ** 3).sum()


def eigvals(x: Tensor) -> Tensor:
    return (torch.linalg.eigvals(regular(x.diag().diag() * 3 + 0.1 * x)).abs() ** 3).sum()


def scattered(x: Tensor) -> Tensor:
    index = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 0, 2]], device=x.device)
    return x.scatter_reduce(0, index, x.cos(), "prod").sin().sum()


def layer_norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (3,), x[0].exp()).sin().sum()


def batch_norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, x[0].exp(), training=True).sin().sum()


def instance_norm(x: Tensor) -> Tensor:
    return functional.instance_norm(x[None], None, None, x[0].exp()).sin().sum()


def group_norm(x: Tensor) -> Tensor:
    return functional.group_norm(x[None], 1, x[0].exp()).sin().sum()


def rms_norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (3,), x[0].exp()).sin().sum()


MASK = torch.tensor([[True], [False], [True]])


def masked(x: Tensor) -> Tensor:
    return x.masked_select(MASK.to(x.device)).exp().sum()


def masked_expanded(x: Tensor) -> Tensor:
    return x.masked_select(MASK.to(x.device).expand(x.shape)).exp().sum()


def rolled(x: Tensor) -> Tensor:
    return x.sum().roll(1).exp()


def not_rolled(x: Tensor) -> Tensor:
    return x.sum().exp()


def filled(x: Tensor) -> Tensor:
    return x.exp().index_fill(0, torch.tensor([1], device=x.device), x[0, 0].sin()).square().sum()


def put(x: Tensor) -> Tensor:
    row = torch.tensor([1], device=x.device)
    return x.exp().index_put((row,), x[0, 0].sin().expand(1, 3)).square().sum()


def where(x: Tensor) -> Tensor:
    at = (torch.arange(3, device=x.device) == 1)[:, None]
    return torch.where(at, x[0, 0].sin(), x.exp()).square().sum()


def select_scattered(x: Tensor) -> Tensor:
    return x.exp().select_scatter(x[0].sin(), 0, 1).square().sum()


def put_row(x: Tensor) -> Tensor:
    return x.exp().index_put((torch.tensor(1, device=x.device),), x[0].sin()).square().sum()


def where_row(x: Tensor) -> Tensor:
    at = (torch.arange(3, device=x.device) == 1)[:, None]
    return torch.where(at, x[0].sin(), x.exp()).square().sum()


def strided(x: Tensor) -> Tensor:
    return x.exp().as_strided_scatter(x[0].sin(), (3,), (1,)).square().sum()


def put_first(x: Tensor) -> Tensor:
    return x.exp().index_put((torch.tensor(0, device=x.device),), x[0].sin()).square().sum()


INDICES = torch.tensor([[0, 1, 0], [1, 0, 1]])


def sparse(x: Tensor) -> Tensor:
    values = x[0].exp()
    return torch.sparse_coo_tensor(INDICES.to(x.device), values, (2, 2)).to_dense().square().sum()


def dense(x: Tensor) -> Tensor:
    indices = tuple(INDICES.to(x.device))
    return torch.zeros(2, 2).to(x).index_put(indices, x[0].exp(), accumulate=True).square().sum()


def lu_solve(x: Tensor) -> Tensor:
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(regular(x)), x.sin()).square().sum()


class Airy(torch.autograd.Function):
    """Ai(x) near zero, by the series that its equation y'' = x y gives: DLMF 9.4.1 and 9.4.2."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.special.airy_ai(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        terms = [0.35502805388781724, -0.25881940379280680, 0.0]
        for n in range(3, 30):
            terms.append(terms[n - 3] / (n * (n - 1)))
        return cotangent * sum(n * term * x ** (n - 1) for n, term in enumerate(terms) if n)


def airy(x: Tensor) -> Tensor:
    return torch.special.airy_ai(x.sin()).square().sum()


def airy_by_function(x: Tensor) -> Tensor:
    return Airy.apply(x.sin()).square().sum()


def drawn(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return torch.normal(x.sin(), x.cosh()).square().sum()


def drawn_by_noise(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return (x.sin() + x.cosh() * torch.randn_like(x)).square().sum()


def by_hvp(fn: Scalar) -> tuple[tuple[Scalar, Way], ...]:
    return ((fn, hvp),)


def reversely(fn: Scalar) -> tuple[tuple[Scalar, Way], ...]:
    return (fn, slope), (fn, pulled)


THIRD = [(group_norm, third_by_func), (rms_norm, third_by_func)]
# By operation of the table. The advised programs of one row are of the same value, but for
# the norms, where another norm is advised: each has its own oracle.
TRANSFORMS: dict[str, Row] = {
    "airy_ai": Row(airy, slope, 1, [(airy_by_function, slope)]),
    "normal": Row(drawn, slope, 1, [(drawn_by_noise, slope)]),
    "cdist": Row(lambda x: torch.cdist(x, x.sin() + 1).sum(), rows, 1, [(pairs, rows)]),
    "as_strided_scatter": Row(strided, slope, 1, [(put_first, slope)]),
    "roll": Row(rolled, samples, 1, [(not_rolled, samples)]),
    "masked_select": Row(masked, rows, 1, [(masked_expanded, rows)]),
    "index_fill": Row(filled, samples, 1, [(put, samples), (where, samples)]),
    "select_scatter": Row(
        select_scattered,
        slopes_of_samples,
        1,
        [(put_row, slopes_of_samples), (where_row, slopes_of_samples), (select_scattered, samples)],
    ),
    "sparse_coo_tensor": Row(sparse, hvp, 2, [(dense, hvp)]),
    "lu_solve": Row(lu_solve, batches, 1, [(solve, batches)]),
    "det": Row(det, of_jvp, 2, by_hvp(det)),
    "slogdet": Row(slogdet, of_jvp, 2, by_hvp(slogdet)),
    "logdet": Row(logdet, jvp_of_jvp, 2, by_hvp(logdet)),
    "householder_product": Row(householder, of_jvp, 2, by_hvp(householder)),
    "solve": Row(solve, of_jvp, 2, [*by_hvp(solve), (by_inverse, of_jvp)]),
    "solve_ex": Row(solve_ex, of_jvp, 2, [*by_hvp(solve_ex), (by_inverse, of_jvp)]),
    "tensorsolve": Row(tensorsolve, of_jvp, 2, [*by_hvp(tensorsolve), (vector_by_inverse, of_jvp)]),
    "cholesky_inverse": Row(cholesky_inverse, jvp, 1, reversely(cholesky_inverse)),
    "triangular_solve": Row(triangular, jvp, 1, reversely(triangular)),
    "scatter_reduce": Row(scattered, jvp, 1, reversely(scattered)),
    "eig": Row(eig, third_by_forward, 3, [(eig, third_by_func)]),
    "eigvals": Row(eigvals, third_by_forward, 3, [(eigvals, third_by_func)]),
    "layer_norm": Row(layer_norm, of_jvp, 2, [(layer_norm, hvp), *THIRD]),
    "batch_norm": Row(batch_norm, of_jvp, 2, [(batch_norm, hvp), *THIRD]),
    "instance_norm": Row(instance_norm, of_jvp, 2, [(instance_norm, hvp), *THIRD]),
}
ORDERS: dict[Way, int] = {third_by_func: 3}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_torch_func_gets_wrong(device: torch.device, name: str) -> None:
    row = TRANSFORMS[name]
    torch.manual_seed(0)
    x = row.point().to(device)
    along = torch.randn_like(x)
    # What is refused in a graph is right where it is called; not in a pass that is batched later.
    if name in table.BY_FORMULA and row.refused is not rows:
        right = derivative(row.fn, x, along, row.order)
        torch.testing.assert_close(row.refused(row.fn, x, along), right, rtol=1e-4, atol=1e-5)
    elif name in table.REFUSED:
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"silently (wrong|zero)") as caught:
            row.refused(row.fn, x, along)
        assert table.REFUSED[name].fix in str(caught.value)
    for fn, way in row.advised:
        right = derivative(fn, x, along, ORDERS.get(way, row.order))
        torch.testing.assert_close(way(fn, x, along), right, rtol=1e-4, atol=1e-5)


def test_every_entry_of_torch_func_s_has_a_row(device: torch.device) -> None:
    assert TRANSFORMS.keys() == table.EVERY_REFUSAL.keys()


# --- second derivatives that torch does not have, or gets wrong, in eager passes


def attention(x: Tensor) -> Tensor:
    x = x.expand(2, 2, *x.shape)
    return functional.scaled_dot_product_attention(x, x * 2, x.sin()).square().sum()


def attention_by_math(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attention(x)


def attention_written_out(x: Tensor) -> Tensor:
    scores = x @ (2 * x).mT / x.shape[-1] ** 0.5
    return 4 * (scores.softmax(-1) @ x.sin()).square().sum()


def bags(x: Tensor) -> Tensor:
    index = torch.tensor([[0, 1], [2, 2]], device=x.device)
    return functional.embedding_bag(index, x, mode="sum").exp().sum()


def by_embedding(x: Tensor) -> Tensor:
    index = torch.tensor([[0, 1], [2, 2]], device=x.device)
    return functional.embedding(index, x).sum(1).exp().sum()


def distances(x: Tensor) -> Tensor:
    return functional.pdist(x).exp().sum()


def by_differences(x: Tensor) -> Tensor:
    a, b = torch.triu_indices(3, 3, 1, device=x.device)
    return (x[a] - x[b]).norm(dim=-1).exp().sum()


LENGTHS = torch.tensor([2, 1])


def segments(x: Tensor) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=LENGTHS.to(x.device)).exp().sum()


def by_index_add(x: Tensor) -> Tensor:
    index = torch.tensor([0, 0, 1], device=x.device)
    return torch.zeros(2, 3).to(x).index_add(0, index, x).exp().sum()


def by_scatter_reduce(x: Tensor) -> Tensor:
    index = torch.tensor([0, 0, 1], device=x.device)[:, None].expand(3, 3)
    return torch.zeros(2, 3).to(x).scatter_reduce(0, index, x, "sum").exp().sum()


SPARSE = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [4.0, 0.0, 5.0]], dtype=torch.float64)


def reduced(x: Tensor) -> Tensor:
    matrix = SPARSE.to(x.device).to_sparse_csr()
    return torch.sparse.mm(matrix, x, "sum").exp().sum()


def by_dense(x: Tensor) -> Tensor:
    return (SPARSE.to(x) @ x).exp().sum()


LSTM = torch.nn.LSTM(3, 2).double()


def recurrent(x: Tensor) -> Tensor:
    with torch.backends.cudnn.flags(enabled=False):
        return (
            torch.func
            .functional_call(
                LSTM, {name: p.to(x.device) for name, p in LSTM.named_parameters()}, (x,)
            )[0]
            .exp()
            .sum()
        )


CHUNKED = "linear_cross_entropy in chunks"
CLASSES = torch.tensor([0, 1, 2])


def chunked(x: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    return functional.linear_cross_entropy(x, x.sin(), CLASSES.to(x.device), options=options)


def in_one_piece(x: Tensor) -> Tensor:
    return functional.linear_cross_entropy(x, x.sin(), CLASSES.to(x.device))


TWICE = by_passes(2)


def unrolled(fn: Scalar, x: Tensor, along: Tensor) -> Tensor:
    """The first derivative, from the step of an inner loop that is not differentiated."""
    adapted = gradkit.meta.unroll(
        lambda x, *_: fn(x), x.clone().requires_grad_(), [None], gradkit.meta.sgd(lr=1.0),
        first_order=True,
    )  # fmt: skip
    return ((x - adapted.params) * along).sum()


ATTENTION = "scaled_dot_product_attention with dropout by a fused kernel"
# By what the entries of the two tables call the operation: it, and what is advised in its place.
EAGER: dict[str, tuple[Scalar, Sequence[tuple[Scalar, Way]]]] = {
    ATTENTION: (
        attention,
        [
            (attention, TWICE),  # without dropout
            (attention_by_math, TWICE),
            (attention_written_out, TWICE),
            (attention, hvp),
            (attention, hvp_by_reverse),
        ],
    ),
    "cdist": (lambda x: torch.cdist(x, x.sin() + 1).sum(), [(pairs, TWICE)]),
    "pdist": (distances, [(by_differences, TWICE)]),
    "embedding_bag": (bags, [(by_embedding, TWICE), (by_embedding, hvp)]),
    "segment_reduce": (segments, [(by_index_add, TWICE), (by_scatter_reduce, TWICE)]),
    "torch.sparse.mm with reduce": (reduced, [(by_dense, TWICE)]),
    "the values of a sparse tensor": (sparse, [(dense, TWICE)]),
}
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    EAGER[CHUNKED] = chunked, [(in_one_piece, TWICE)]


def cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).exp().sum()


def by_where(x: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, x.sin(), x.cos()).exp().sum()


def by_if(x: Tensor) -> Tensor:
    return (x.sin() if x.sum() > 0 else x.cos()).exp().sum()


def scanned(x: Tensor) -> Tensor:
    from torch._higher_order_ops import scan

    return (
        scan(lambda c, y: ((c * y).sin(), (c + y).cos()), torch.ones_like(x[0]), x)[0].exp().sum()
    )


def looped(x: Tensor) -> Tensor:
    carry = torch.ones_like(x[0])
    for row in x:
        carry = (carry * row).sin()
    return carry.exp().sum()


def repeated(x: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    zero = torch.tensor(0, device=x.device)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (zero, x))[1].exp().sum()


def thrice(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x.sin()
    return x.exp().sum()


COMPILED: dict[str, tuple[Scalar, Sequence[tuple[Scalar, Way]]]] = {
    "torch.cond": (cond, [(by_where, TWICE), (by_if, TWICE)]),
    "scan": (scanned, [(looped, TWICE)]),
    "while_loop": (repeated, [(thrice, TWICE)]),
}
# These name no call: "leave it out", "write it out".
NAME_NO_CALL = {"ctc_loss", "multi_margin_loss", "multilabel_margin_loss"}
OF_CUDNN = "an RNN by cuDNN"


def test_every_entry_of_eager_passes_has_a_row(device: torch.device) -> None:
    entries = {*missing.EVER_WITHOUT_SECOND.values(), *table.SECOND.values()}
    rows = EAGER.keys() | COMPILED.keys() | NAME_NO_CALL | {OF_CUDNN}
    assert {operation for operation, _ in entries} - {CHUNKED} == rows - {CHUNKED}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", EAGER)
def test_what_has_no_second_derivative(device: torch.device, name: str) -> None:
    fn, advised = EAGER[name]
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.float64, device=device)
    along = torch.randn_like(x)
    texts = dict([*missing.WITHOUT_SECOND.values(), *table.SECOND.values()])
    if name in texts and name != ATTENTION:
        with pytest.raises(gradkit.UnsupportedGraphError, match="second derivative") as caught:
            TWICE(fn, x, along)
        assert texts[name] in str(caught.value)
    for other, way in advised:
        torch.testing.assert_close(other(x), fn(x))  # it stands for the same
        right = derivative(fn, x, along, 2)
        torch.testing.assert_close(way(other, x, along), right, rtol=1e-4, atol=1e-5)
    for way in (by_passes(1), unrolled):  # "leave out create_graph=True", "first_order=True"
        right = derivative(fn, x, along, 1)
        torch.testing.assert_close(way(fn, x, along), right, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("name", COMPILED)
def test_control_flow_of_torch_s(device: torch.device, name: str) -> None:
    fn, advised = COMPILED[name]
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.float64, device=device)
    along = torch.randn_like(x)
    with pytest.raises(gradkit.UnsupportedGraphError, match="second derivative") as caught:
        TWICE(fn, x, along)
    assert dict(table.SECOND.values())[name] in str(caught.value)
    for other, way in advised:
        torch.testing.assert_close(other(x), fn(x))
        right = derivative(other, x, along, 2)
        torch.testing.assert_close(way(other, x, along), right, rtol=1e-4, atol=1e-5)


def test_an_rnn_without_cudnn(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.float64, device=device)
    right = derivative(recurrent, x, x.sin(), 2)
    torch.testing.assert_close(TWICE(recurrent, x, x.sin()), right, rtol=1e-4, atol=1e-5)


# --- forward mode, and Functions of torch's own


def test_what_has_no_forward_mode(device: torch.device) -> None:
    fn, advised = EAGER["embedding_bag"]
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.float64, device=device)
    along = torch.randn_like(x)
    with pytest.raises(gradkit.UnsupportedGraphError, match="forward") as caught:
        jvp(fn, x, along)
    advice = str(caught.value).partition("What to do")[2]
    assert "vjp in place of jvp" in advice
    assert "mode=" not in advice  # which is refused, too, or not needed
    right = derivative(fn, x, along, 1)
    ways = [(fn, pulled), *((other, jvp) for other, _ in advised if other is not fn)]
    for other, way in ways:
        torch.testing.assert_close(way(other, x, along), right, rtol=1e-5, atol=1e-7)


def mean_of_beta(concentration: Tensor) -> Tensor:
    return torch.distributions.Beta(*concentration.expand(20_000, 2).mT).rsample().mean()


def mean_of_dirichlet(concentration: Tensor) -> Tensor:
    return torch.distributions.Dirichlet(concentration.expand(20_000, 2)).rsample()[:, 0].mean()


def mean_by_gammas(concentration: Tensor) -> Tensor:
    g = torch.distributions.Gamma(concentration.expand(20_000, 2), 1.0).rsample()
    return (g[..., 0] / g.sum(-1)).mean()


@pytest.mark.parametrize("sample", [mean_of_beta, mean_of_dirichlet])
def test_samples_of_torch_s_own_function(device: torch.device, sample: Scalar) -> None:
    """Of both, a / (a + b) is the mean."""
    torch.manual_seed(0)
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, device=device)
    along = torch.tensor([1.0, -0.5], dtype=torch.float64, device=device)
    for refused in (jvp, hvp):
        with pytest.raises(gradkit.UnsupportedGraphError, match="_Dirichlet") as caught:
            refused(sample, x, along)
        assert "setup_context" not in str(caught.value)
        assert "gradkit.value_and_grads(losses, params)" in str(caught.value)
    with pytest.raises(gradkit.UnsupportedGraphError, match="_Dirichlet") as caught:
        TWICE(sample, x, along)
    assert "give it a backward" not in str(caught.value)
    right = derivative(lambda x: x[0] / x.sum(), x, along, 1)
    for fn, way in (
        (sample, by_passes(1)),
        (sample, unrolled),
        (sample, slope),
        (mean_by_gammas, slope),
    ):
        torch.testing.assert_close(way(fn, x, along), right, rtol=0, atol=5e-3)


# --- graphs that hide gradients


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_the_reasons_of_graphs(device: torch.device) -> None:
    """Those of DDP and FSDP run in `tests/distributed`, in test_ddp.py and test_fsdp.py."""
    (name,) = (name for name in eager_graph._REASONS if name.startswith("Checkpoint"))
    assert len(eager_graph._REASONS) == 3
    layer = torch.nn.Linear(3, 3, dtype=torch.float64).to(device)
    x = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    with pytest.raises(gradkit.UnsupportedGraphError) as caught:
        gradkit.value_and_grads(checkpoint(layer, x, use_reentrant=True).sum(), layer)
    assert eager_graph._REASONS[name][2] in str(caught.value)
    loss = checkpoint(layer, x, use_reentrant=False).square().sum()
    _, grads = gradkit.value_and_grads(loss, layer)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    assert all(map(torch.equal, grads.values(), expected))
