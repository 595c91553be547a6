"""Operations whose own rules are wrong in a second or third derivative, or under two vmaps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import gradkit
from gradkit import func
from gradkit._compat.versions import Release
from tests.silently_wrong._row import Case, D, Row
from tests.sweep import defects, matrix_examples
from tests.sweep.table import mended_in

Function = Callable[[Tensor], Tensor]


def _of_jvp(name: str, device: torch.device) -> Case:
    fn, a, along = defects.determinant(matrix_examples.SOLVED[name], device)

    def slope(a: Tensor) -> Tensor:
        return jvp(fn, (a,), (along,))[1]

    return Case(
        *defects.of_jvp(fn, a, along),
        lambda: func.value_and_grads(slope)(a)[1],
        lambda: func.hvp(fn, a, along)[1],
    )


def derivative_of_jvp_of_solve(device: torch.device) -> Case:
    return _of_jvp("solve", device)


def derivative_of_jvp_of_solve_ex(device: torch.device) -> Case:
    return _of_jvp("solve_ex", device)


def derivative_of_jvp_of_tensorsolve(device: torch.device) -> Case:
    return _of_jvp("tensorsolve", device)


def derivative_of_jvp_of_householder_product(device: torch.device) -> Case:
    return _of_jvp("householder_product", device)


def _third(name: str, device: torch.device) -> Case:
    fn, a, along = defects.determinant(matrix_examples.BY_FORWARD[name], device)

    def loss(a: Tensor) -> Tensor:
        return fn(a).sin().sum()

    def curvature(a: Tensor) -> Tensor:
        product = func.hvp(loss, a, along, mode="reverse-over-reverse")[1]
        return (product * along).sum()

    def by_forward(a: Tensor) -> Tensor:
        return jvp(lambda a: func.hvp(loss, a, along)[1], (a,), (along,))[1]

    return Case(
        *defects.third_by_forward(fn, a, along),
        lambda: by_forward(a),
        lambda: func.value_and_grads(curvature)(a)[1],
    )


def third_of_eigvals(device: torch.device) -> Case:
    return _third("eigvals", device)


def third_of_prod(device: torch.device) -> Case:
    return _third("prod", device)


def third_of_eig(device: torch.device) -> Case:
    return _third("eig", device)


def _second(
    fn: Function, written: Function, x: Tensor, *, ours: str = "eager", instead: Any = None
) -> Case:
    """The derivative of the squared gradient of the sine of a function, or of it written out."""

    def theirs(fn: Function) -> Tensor:
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fn(leaf).sin().sum(), leaf, create_graph=True)
        total = slope.square().sum() + leaf.sum()  # it has a derivative, if not the right one
        return torch.autograd.grad(total, leaf)[0] - 1

    def eager(fn: Function) -> Tensor:
        leaf = x.clone().requires_grad_()
        _, slope = gradkit.value_and_grads(fn(leaf).sin().sum(), leaf, create_graph=True)
        return gradkit.value_and_grads(slope.square().sum(), leaf)[1]

    def nested(fn: Function) -> Tensor:
        slope = func.value_and_grads(lambda x: fn(x).sin().sum())
        return func.value_and_grads(lambda x: slope(x)[1].square().sum())(x)[1]

    ways = {"eager": eager, "nested": nested}
    return Case(
        theirs(fn),
        theirs(written),
        partial(ways[ours], fn),
        instead or partial(ways[ours], written),
    )


def _direction(device: torch.device) -> Tensor:
    return torch.tensor([[0.6, 0.8]], dtype=D, device=device)


def normalized(v: Tensor) -> Tensor:
    return torch._weight_norm(v, torch.full_like(v[:, :1], 2.0), 0)


def normalized_by_hand(v: Tensor) -> Tensor:
    return 2 * v / v.norm(dim=1, keepdim=True)


def second_of_weight_norm(device: torch.device) -> Case:
    return _second(normalized, normalized_by_hand, _direction(device))


def second_of_weight_norm_in_func(device: torch.device) -> Case:
    return _second(normalized, normalized_by_hand, _direction(device), ours="nested")


def second_of_weight_norm_compiled(device: torch.device) -> Case:
    v = _direction(device)

    def nested(differentiate: Any, fn: Function) -> Function:
        slope = differentiate(lambda v: fn(v).sin().sum())
        return differentiate(lambda v: slope(v).square().sum())

    def compiled(differentiate: Any) -> Tensor:
        run = torch.compile(nested(differentiate, normalized), backend="aot_eager", fullgraph=True)
        return run(v)

    def by_gradkit(fn: Function) -> Function:
        return lambda v: func.value_and_grads(fn)(v)[1]

    def ours() -> Tensor:
        try:
            return compiled(by_gradkit)
        except torch._dynamo.exc.Unsupported as error:  # which has gradkit's text
            raise gradkit.UnsupportedGraphError(str(error)) from error

    theirs, right = compiled(grad), nested(grad, normalized_by_hand)(v)
    return Case(theirs, right, ours, lambda: nested(by_gradkit, normalized)(v))


def second_of_sparse_values(device: torch.device) -> Case:
    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    return _second(matrix_examples.sparse, matrix_examples.dense, x)


def second_of_sparse_values_in_func(device: torch.device) -> Case:
    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    return _second(matrix_examples.sparse, matrix_examples.dense, x, ours="nested")


def second_of_cond(device: torch.device) -> Case:
    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    yes = torch.tensor(True, device=device)

    def either(x: Tensor) -> Tensor:
        return torch.cond(yes, torch.sin, torch.cos, (x,))

    return _second(either, torch.sin, x)


def second_of_scan(device: torch.device) -> Case:
    """It compiles itself."""
    from torch._higher_order_ops import scan

    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    factors = torch.tensor([[0.5, 1.0], [2.0, 0.3]], dtype=D, device=device)

    def step(carry: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        carry = (carry * factor).sin()
        return carry, carry.clone()

    def loop(carry: Tensor) -> Tensor:
        for factor in factors:
            carry, _ = step(carry, factor)
        return carry

    return _second(lambda x: scan(step, x, factors)[0], loop, x)


def second_of_while_loop(device: torch.device) -> Case:
    """It compiles itself, too."""
    from torch._higher_order_ops import while_loop

    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    zero = torch.tensor(0, device=device)

    def thrice(x: Tensor) -> Tensor:
        last: Tensor = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (zero, x))[1]
        return last

    return _second(thrice, lambda x: x.sin().sin().sin(), x)


def third_of_det(device: torch.device) -> Case:
    _, a, along = defects.determinant(torch.linalg.det, device)

    def written(a: Tensor) -> Tensor:
        return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]

    def third(fn: Function, slope: Callable[[Function], Function]) -> Tensor:
        def along_it(of: Function) -> Function:
            return lambda a: (slope(of)(a) * along).sum()

        return slope(along_it(along_it(lambda a: fn(a).sin())))(a)

    return Case(
        third(torch.linalg.det, grad),
        third(written, grad),
        lambda: third(torch.linalg.det, lambda of: lambda a: func.value_and_grads(of)(a)[1]),
    )


def hessian_of_cholesky(device: torch.device) -> Case:
    """Along a direction that is not symmetric."""
    a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=D, device=device)
    along = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=D, device=device)

    def loss(a: Tensor) -> Tensor:
        return torch.linalg.cholesky(a).sin().sum()

    def symmetrized(a: Tensor) -> Tensor:
        return loss((a + a.mT) / 2)

    theirs, right = (jvp(grad(fn), (a,), (along,))[1] for fn in (loss, symmetrized))
    return Case(theirs, right, lambda: func.hvp(loss, a, along)[1])


def jvp_of_jvp_of_cumprod(device: torch.device) -> Case:
    x, along = torch.tensor([[2.0, 0.0, 3.0], [1.0, 1.0, 1.0]], dtype=D, device=device)

    def product(x: Tensor) -> Tensor:
        return torch.cumprod(x, 0).exp().sum()

    def curvature(x: Tensor) -> Tensor:
        return jvp(lambda x: jvp(product, (x,), (along,))[1], (x,), (along,))[1]

    return Case(*defects.jvp_twice(device), lambda: func.value_and_grads(curvature)(x)[0])


def lu_solve_in_two_vmaps(device: torch.device) -> Case:
    a, b = (torch.tensor(x, dtype=D, device=device) for x in matrix_examples.SYSTEMS)

    def each(a: Tensor, b: Tensor, solve: Any) -> Tensor:
        return func.value_and_grads(lambda b: solve(a, b).sum())(b)[0]

    def ours(solve: Any) -> Tensor:
        return vmap(lambda a: vmap(lambda b: each(a, b, solve))(b))(a)

    return Case(
        *defects.in_two_vmaps(device),
        *(
            lambda solve=solve: ours(solve)
            for solve in (matrix_examples.by_factors, torch.linalg.solve)
        ),
    )


REFUSED = gradkit.UnsupportedGraphError
_NESTED = "`func.value_and_grads`, nested"
_EAGER = "`value_and_grads(..., create_graph=True)`"
SOLVED = [[0.7113, -2.845], [3.515, -14.06]], [[0.0531, 0.006982], [4.797, -19.62]]


NORMALIZED = [[-4.145, 3.109]], [[-4.598, 2.504]]
ENTRIES = [0.0, 0.0], [-0.9093, 0.7568]


SOLVES_RIGHTLY = mended_in("solve")


def of_jvp(
    name: str,
    gives: Any,
    right: Any,
    show: Callable[[torch.device], Case],
    mended: Release | None = SOLVES_RIGHTLY,
) -> Row:
    return Row(
        f"`grad` of the `jvp` of `{name}`", gives, right,
        "`func.value_and_grads`", show, REFUSED, "`func.hvp(f, a, v)`",
        mended=mended,
    )  # fmt: skip


ROWS = [
    of_jvp("torch.linalg.solve(a, b)", *SOLVED, derivative_of_jvp_of_solve),
    of_jvp(
        "torch.linalg.solve_ex(a, b)",
        *SOLVED, derivative_of_jvp_of_solve_ex,
    ),
    of_jvp(
        "torch.linalg.tensorsolve(a, b)",
        *SOLVED, derivative_of_jvp_of_tensorsolve,
    ),
    of_jvp(
        "torch.linalg.householder_product(a, t)",
        [[0.0, 0.0], [-3.128, 0.0]], [[0.0, 0.0], [-1.646, 0.0]],
        derivative_of_jvp_of_householder_product, None,
    ),
    Row(
        "`grad` of `grad` of `grad` of the sine of `torch.linalg.det(a)`",
        [[-27.42, 33.93], [7.998, 29.92]], [[-25.03, 32.73], [3.205, 26.33]],
        _NESTED, third_of_det,
        mended=mended_in("det"),
    ),
    *(
        Row(
            f"`jvp` of `jvp` of `grad(f)`, where `f` calls `{name}`",
            [[1.2646, -10.691], [6.0863, -6.0306]], [[6.7824, 0.4418], [8.997, -1.4783]],
            "`jvp` of `func.hvp`", show, REFUSED,
            '`func.value_and_grads` of `func.hvp(..., mode="reverse-over-reverse")`',
            mended=mended_in("eig"),
        )
        for name, show in (
            ("torch.linalg.eigvals", third_of_eigvals), ("torch.linalg.eig", third_of_eig)
        )
    ),
    Row(
        "`jvp` of `jvp` of `grad(f)`, where `f` is the sine of `torch.prod(a)`, and `a` has a zero",
        [[18.0, 30.0], [-28.0, 15.0]], [[36.0, 54.0], [-28.0, 30.0]],
        "`jvp` of `func.hvp`", third_of_prod,
    ),
    Row(
        "`jvp` of the `jvp` of `f`, where `f` calls `torch.cumprod(x, 0)`, and `x` has a zero",
        53.39, 59.39, "`func.value_and_grads` of the same function", jvp_of_jvp_of_cumprod,
    ),
    Row(
        "`jvp(grad(f), (a,), (v,))[1]`, where `f` calls `torch.linalg.cholesky(a)`, and `v` is not "
        "symmetric",
        [[0.01242, -0.02484], [-0.02484, 0.04967]], [[-0.01499, -0.1052], [-0.1052, 0.04967]],
        "`func.hvp`", hessian_of_cholesky,
    ),
    Row(
        "a second derivative through `weight_norm`, in each form",
        *NORMALIZED, _EAGER, second_of_weight_norm,
    ),
    Row(
        "`grad` of `grad` through `weight_norm`",
        *NORMALIZED, _NESTED, second_of_weight_norm_in_func,
    ),
    Row(
        "`torch.compile` of `grad` of `grad` through `weight_norm`",
        *NORMALIZED, _NESTED, second_of_weight_norm_compiled, REFUSED, "uncompiled",
    ),
    Row(
        "a second derivative w.r.t. the values of a `sparse_coo_tensor`",
        *ENTRIES, _EAGER, second_of_sparse_values, REFUSED, "with a dense tensor",
    ),
    Row(
        "`grad` of `grad` w.r.t. the values of a `sparse_coo_tensor`",
        *ENTRIES, _NESTED, second_of_sparse_values_in_func, REFUSED, "with a dense tensor",
    ),
    Row(
        "a second derivative through `torch.cond`",
        [0.0, 0.0], [-0.5605, 0.3555], _EAGER, second_of_cond, REFUSED, "with an `if`",
    ),
    Row(
        "a second derivative through `scan`",
        [-0.1278, 0.0009], [-0.4894, 0.0605], _EAGER, second_of_scan, REFUSED,
        "with a loop",
    ),
    Row(
        "a second derivative through `while_loop`",
        [-0.1502, 0.0873], [-0.2297, 0.1169], _EAGER, second_of_while_loop, REFUSED,
        "with a loop",
    ),
    Row(
        "`torch.linalg.lu_solve` under two `vmap`, one over the factors and one over `b`",
        [[0.7, 1.8], [26.0, 62.0]], [[0.7, 1.8], [0.5, 1.375]],
        "`func.value_and_grads` in two `vmap`", lu_solve_in_two_vmaps, REFUSED,
        "with `torch.linalg.solve`",
    ),
]  # fmt: skip
