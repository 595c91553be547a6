"""Calls that torch's tables lack: sparse values, parametrizations, control flow, factors, batches.

Each operation of gradkit's table has a case here in which it is wrong; `test_sweep.py` re-runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations

from gradkit._compat.versions import release
from tests.sweep.cases import D, flat
from tests.sweep.programs import Case

_GENERATOR = torch.Generator()
INDICES = torch.tensor([[0, 1, 2], [2, 0, 1]])


def normal(*shape: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(shape, dtype=D, generator=_GENERATOR)


def positive(*shape: int) -> Tensor:
    """Return positive random numbers."""
    return normal(*shape).abs() + 0.5


def extra() -> dict[str, Case]:
    """Return the cases by their names."""
    _GENERATOR.manual_seed(5)
    named = {}
    for make in (norms, sparse, factors, symmetric, control_flow, parametrized, others):
        for name, call, point, *meant in make():
            operation = name.partition(":")[0]
            outputs = [lambda *x, f=f: flat(f(*x)) for f in (call, *meant)]
            named[name] = Case(operation, outputs[0], point, outputs[1] if meant else None)
    return named


Calls = Iterator[tuple[Any, ...]]  # a name, a call, where, and the function that is meant


def norms() -> Calls:
    """Yield normalizations, with and without a weight, in train and eval mode."""
    mean, variance = normal(3), positive(3)
    for affine in (False, True):
        weight = (normal(3), normal(3)) if affine else ()
        more = ", affine" if affine else ""

        def named(weight: Any) -> dict[str, Tensor]:
            return dict(zip(("weight", "bias"), weight, strict=False))

        def of_batch(x: Tensor, *w: Tensor) -> Tensor:
            return functional.batch_norm(x, None, None, training=True, **named(w))

        def evaluated(x: Tensor, *w: Tensor) -> Tensor:
            return functional.batch_norm(x, mean, variance, **named(w))

        def of_instance(x: Tensor, *w: Tensor) -> Tensor:
            return functional.instance_norm(x, **named(w))

        def running(x: Tensor, *w: Tensor) -> Tensor:
            return functional.instance_norm(x, mean, variance, use_input_stats=False, **named(w))

        yield f"batch_norm: train{more}", of_batch, (normal(4, 3), *weight)
        yield f"batch_norm: eval{more}", evaluated, (normal(4, 3), *weight)
        yield f"instance_norm: its own{more}", of_instance, (normal(2, 3, 4), *weight)
        yield f"instance_norm: running{more}", running, (normal(2, 3, 4), *weight)
        yield f"layer_norm:{more}", lambda x, *w: functional.layer_norm(x, (3,), *w), (
            normal(2, 3), *weight,
        )  # fmt: skip
        yield f"group_norm:{more}", lambda x, *w: functional.group_norm(x, 1, *w), (
            normal(2, 3, 2), *weight,
        )  # fmt: skip
        yield f"rms_norm:{more}", lambda x, *w: functional.rms_norm(x, (3,), *w), (
            normal(2, 3), *weight[:1],
        )  # fmt: skip


def sparse() -> Calls:
    """Yield functions of the values of sparse tensors, and of dense ones beside them."""

    def coo(values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(INDICES, values, (3, 3))

    def csr(values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(torch.arange(4), INDICES[1], values, (3, 3))

    b, ones = normal(3, 2), torch.ones(3, dtype=D)
    name = "sparse_coo_tensor"
    yield f"{name}: to_dense", lambda v: coo(v).to_dense(), (normal(3),)
    yield f"{name}: coalesce", lambda v: coo(v).coalesce().to_dense(), (normal(3),)
    yield f"{name}: mm", lambda v, b: torch.sparse.mm(coo(v), b), (normal(3), b)
    yield f"{name}: matmul", lambda v, b: coo(v) @ b, (normal(3), b)
    yield f"{name}: sum", lambda v: torch.sparse.sum(coo(v), 0), (normal(3),)
    yield f"{name}: product", lambda v: coo(v) * coo(v), (normal(3),)
    yield f"{name}: values", lambda v: coo(v).coalesce().values(), (normal(3),)
    yield f"{name}: sparse mm", lambda v, w: torch.sparse.mm(coo(v), coo(w)), (
        normal(3), normal(3),
    )  # fmt: skip
    yield f"{name}: addmm", lambda a, v, b: torch.sparse.addmm(a, coo(v), b), (
        normal(3, 2), normal(3), b,
    )  # fmt: skip
    yield "sparse.mm: dense", lambda b: torch.sparse.mm(coo(ones), b), (b,)
    yield "sparse.softmax: it", lambda a: torch.sparse.softmax(a.to_sparse(), 0), (normal(3, 3),)
    yield "sparse_csr_tensor: to_dense", lambda v: csr(v).to_dense(), (normal(3),)
    yield "sparse_csr_tensor: mm", lambda v, b: csr(v) @ b, (normal(3), b)
    dense = (normal(3, 3),)
    yield "to_sparse: mm", lambda a, b: torch.sparse.mm(a.to_sparse(), b), (*dense, b)
    yield "to_sparse: to_dense", lambda a: a.to_sparse().to_dense(), dense
    yield "to_sparse: coalesce", lambda a: a.to_sparse().coalesce().to_dense(), dense
    yield "to_sparse: sum", lambda a: torch.sparse.sum(a.to_sparse(), 0), dense
    yield "to_sparse: values", lambda a: a.to_sparse().coalesce().values(), dense
    yield "to_sparse: product", lambda a: a.to_sparse() * a.to_sparse(), dense
    yield "to_sparse: sparse mm", lambda a: torch.sparse.mm(a.to_sparse(), a.to_sparse()), dense
    yield "to_sparse_csr: mm", lambda a, b: a.to_sparse_csr() @ b, (normal(3, 3), b)
    words = torch.tensor([0, 2, 0])
    yield "embedding: sparse", lambda w: functional.embedding(words, w, sparse=True), (
        normal(3, 2),
    )  # fmt: skip


def factors() -> Calls:
    """Yield linear systems, and what is made of the factors of a matrix."""
    linalg, eye = torch.linalg, torch.eye(3, dtype=D)
    a, b, c = normal(3, 3) + 3 * eye, normal(3, 2), normal(2, 3)

    def factor(a: Tensor) -> tuple[Tensor, Tensor]:
        return linalg.lu_factor(a)

    def definite(a: Tensor) -> Tensor:
        return a @ a.mT + eye

    yield "solve: matrix", linalg.solve, (a, b)
    yield "solve: vector", linalg.solve, (a, normal(3))
    yield "solve: from the right", lambda a, b: linalg.solve(a, b, left=False), (a, c)
    yield "solve_ex: matrix", lambda a, b: linalg.solve_ex(a, b)[0], (a, b)
    cube = (normal(4, 4) + 4 * torch.eye(4, dtype=D)).reshape(2, 2, 4)
    yield "tensorsolve: cube", linalg.tensorsolve, (cube, normal(2, 2))
    yield "inv: matrix", linalg.inv, (a,)
    yield "lu_solve: linalg", lambda a, b: linalg.lu_solve(*factor(a), b), (a, b)
    yield "lu_solve: right", lambda a, b: linalg.lu_solve(*factor(a), b, left=False), (a, c)
    yield "lu_solve: torch", lambda a, b: torch.lu_solve(b, *factor(a)), (a, b)
    yield "lu_unpack: all", lambda a: torch.lu_unpack(*factor(a)), (a,)
    yield "solve_triangular: it", lambda a, b: linalg.solve_triangular(
        a.tril(), b, upper=False
    ), (a, b)  # fmt: skip
    yield "triangular_solve: unit", lambda a, b: torch.triangular_solve(
        b, a, unitriangular=True
    ).solution, (a.triu(), b)  # fmt: skip
    yield "cholesky_inverse: factor", lambda a: torch.cholesky_inverse(
        linalg.cholesky(definite(a))
    ), (a,)  # fmt: skip
    yield "cholesky_solve: factor", lambda a, b: torch.cholesky_solve(
        b, linalg.cholesky(definite(a))
    ), (a, b)  # fmt: skip
    yield "householder_product: it", linalg.householder_product, (normal(3, 2), 0.1 * positive(2))
    yield "det: matrix", linalg.det, (a,)
    yield "slogdet: matrix", lambda a: linalg.slogdet(a)[1], (a,)
    yield "logdet: matrix", lambda a: torch.logdet(definite(a)), (a,)
    apart = (torch.diag(torch.arange(1.0, 4, dtype=D)) + 0.1 * a,)
    yield "eigvals: matrix", linalg.eigvals, apart
    yield "eig: values", lambda a: linalg.eig(a)[0], apart
    yield "eig: vectors", lambda a: linalg.eig(a)[1].abs(), apart
    yield "matrix_exp: matrix", linalg.matrix_exp, (normal(3, 3),)
    yield "pinv: matrix", linalg.pinv, (normal(4, 3),)


def halves(a: Tensor) -> Tensor:
    """Return the symmetric part of a matrix."""
    return (a + a.mT) / 2


def symmetric() -> Calls:
    """Yield operations that take a matrix for symmetric, and the functions that they mean."""
    linalg, eye = torch.linalg, torch.eye(3, dtype=D)
    root = normal(3, 3)
    a, zeros, ones = root @ root.mT + eye, torch.zeros(3, dtype=D), torch.ones(3, dtype=D)

    def log_prob(a: Tensor) -> Tensor:
        return torch.distributions.MultivariateNormal(zeros, a, validate_args=False).log_prob(ones)

    calls: dict[str, Callable[[Tensor], Any]] = {
        "cholesky: linalg": linalg.cholesky,
        "cholesky_ex: it": lambda a: linalg.cholesky_ex(a)[0],
        "eigvalsh: it": linalg.eigvalsh,
        "eigh: values": lambda a: linalg.eigh(a)[0],
        "eigh: squares": lambda a: linalg.eigh(a)[1].square(),
        "cholesky: MultivariateNormal": log_prob,
    }
    if release(torch.__version__) < (2, 14):  # which has the name, and raises
        calls["cholesky: torch"] = torch.cholesky
    for name, call in calls.items():
        yield name, call, (a,), lambda a, call=call: call(halves(a))


def control_flow() -> Calls:
    """Yield torch's operators for control flow."""
    from torch._higher_order_ops import associative_scan, scan, while_loop

    yes = torch.tensor(True)

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (carry * x).sin(), (carry + x).cos()

    def thrice(x: Tensor) -> Tensor:
        zero = torch.tensor(0)
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (zero, x))[1]

    def products(x: Tensor) -> Tensor:
        return associative_scan(torch.mul, x, 0, combine_mode="generic")

    yield "cond: it", lambda x: torch.cond(yes, torch.sin, torch.cos, (x,)), (normal(3),)
    yield "scan: it", lambda c, x: scan(step, c, x), (normal(2), normal(3, 2))
    yield "while_loop: it", thrice, (normal(3),)
    yield "associative_scan: it", products, (positive(3, 2),)


def parametrized() -> Calls:
    """Yield linear layers whose weight is computed, as functions of their parameters."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "weight_norm: new": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
        "spectral_norm: it": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
        "orthogonal: matrix_exp": lambda: parametrizations.orthogonal(
            nn.Linear(3, 3), orthogonal_map="matrix_exp"
        ),
        "solve: cayley": lambda: parametrizations.orthogonal(
            nn.Linear(3, 3), orthogonal_map="cayley"
        ),
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        module = make().to(D).eval()
        params, x = dict(module.named_parameters()), normal(2, module.in_features)

        def call(*tensors: Tensor, of: Any = (module, tuple(params), x)) -> Tensor:
            module, names, x = of
            return functional_call(module, dict(zip(names, tensors, strict=True)), (x,))

        yield name, call, tuple(p.detach().clone() for p in params.values())
    point = normal(3, 4), positive(3, 1)
    yield "weight_norm: it", lambda v, g: torch._weight_norm(v, g, 0), point


def others() -> Calls:
    """Yield what has been wrong otherwise, and its like."""
    zero, twice = torch.tensor([0]), torch.tensor([0, 0, 1])
    eye = torch.eye(2, dtype=torch.bool)
    for name in ("prod", "sum", "amax"):
        yield f"scatter_reduce: {name}", lambda x, s, name=name: x.scatter_reduce(
            0, twice, s, name
        ), (positive(3), positive(3))  # fmt: skip
    yield "index_fill: tensor", lambda x, v: torch.index_fill(x, 0, zero, v), (normal(3), normal())
    yield "select_scatter: it", lambda x, v: torch.select_scatter(x, v, 0, 1), (normal(3), normal())
    zero_inside = torch.tensor([1.5, 0.0, 0.5, 2.0], dtype=D)
    yield "prod: zero", lambda x: torch.prod(x)[None], (zero_inside,)
    yield "cumprod: zero", lambda x: torch.cumprod(x, 0), (zero_inside,)
    yield "roll: no dimensions", lambda x: torch.roll(x, 1) * x, (normal(),)
    yield "masked_select: broadcast", lambda x: torch.masked_select(x, eye), (normal(2),)
    yield "cdist: it", torch.cdist, (normal(3, 2), normal(2, 2))
    yield "as_strided_scatter: it", lambda x, y: torch.as_strided_scatter(x, y, (1,), (1,), 1), (
        normal(3), normal(1),
    )  # fmt: skip
    yield "prelu: channels", functional.prelu, (normal(2, 3), normal(3))
    yield "prelu: vector", functional.prelu, (normal(3), normal(1))
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
        yield "linear_cross_entropy: chunked", lambda x, w: functional.linear_cross_entropy(
            x, w, torch.tensor([0, 1, 2]), options=options
        ), (normal(3, 2), normal(4, 2))  # fmt: skip
    point, events = normal(4), torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=D)
    sums = torch.logcumsumexp(point, 0)
    yield "logcumsumexp: all", lambda x: torch.logcumsumexp(x, 0), (point,)
    yield "logcumsumexp: masked", lambda x: (torch.logcumsumexp(x, 0) * events).sum().square(), (
        point,
    )  # fmt: skip
    yield "logcumsumexp: fitted", lambda x: (torch.logcumsumexp(x, 0) - sums + events).square(), (
        point,
    )  # fmt: skip
    words, table = torch.tensor([0, 2, 0, 1]), normal(3, 2)
    yield (
        "embedding: padding",
        lambda w: functional.embedding(words, w, padding_idx=-3),
        (table,),
        lambda w: functional.embedding(words, torch.cat([table[:1], w[1:]])),
    )
