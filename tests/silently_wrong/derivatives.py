"""Forward mode, derivatives of forward mode, second derivatives in a batch, third derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import jvp, vmap

import gradkit
from gradkit import func
from tests.helpers import OnceCubed
from tests.silently_wrong._row import Case, D, Row
from tests.sweep import defects
from tests.sweep.table import mended_in


def _derivative_of_jvp(fn: Callable[[Tensor], Tensor], device: torch.device) -> Case:
    fn, a, along = defects.determinant(fn, device)

    def slope(a: Tensor) -> Tensor:
        return jvp(fn, (a,), (along,))[1]

    return Case(
        *defects.of_jvp(fn, a, along),
        lambda: func.value_and_grads(slope)(a)[1],
        lambda: func.hvp(fn, a, along)[1],
    )


def derivative_of_jvp_of_det(device: torch.device) -> Case:
    return _derivative_of_jvp(torch.linalg.det, device)


def derivative_of_jvp_of_slogdet(device: torch.device) -> Case:
    return _derivative_of_jvp(defects.slogdet, device)


def derivative_of_jvp_of_logdet(device: torch.device) -> Case:
    return _derivative_of_jvp(torch.logdet, device)


def forward_through_no_grad(device: torch.device) -> Case:
    def loss(w: Tensor) -> Tensor:
        with torch.no_grad():
            target = w.square()
        return (target * w).sum()

    w = torch.ones(1, dtype=D, device=device)
    leaf = w.clone().requires_grad_()
    right = torch.autograd.grad(loss(leaf), leaf)[0].sum()
    return Case(jvp(loss, (w,), (w,))[1], right, lambda: func.jvp(loss, w, w)[1])


class _SquareByHand(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return cast("Tensor", 2 * ctx.saved_tensors[0] * dx)


def jvp_of_jvp_of_a_function(device: torch.device) -> Case:
    def fourth_power(x: Tensor) -> Any:
        return _SquareByHand.apply(_SquareByHand.apply(x))

    x = torch.tensor([3.0], dtype=D, device=device)

    def twice(jvp: Callable[..., Any]) -> Tensor:
        one = torch.ones_like(x)
        inner = lambda x: jvp(fourth_power, (x,), (one,))[1]  # noqa: E731
        return cast("Tensor", jvp(inner, (x,), (one,))[1])

    return Case(twice(jvp), 12 * x**2, lambda: twice(func.jvp))


@torch.library.custom_op("gradkit_rows::square", mutates_args=())
def _square(x: Tensor) -> Tensor:
    return x * x


@_square.register_fake
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _square_backward(ctx: Any, cotangent: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x * cotangent


_square.register_autograd(
    _square_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


def jvp_of_custom_op(device: torch.device) -> Case:
    def loss(w: Tensor) -> Tensor:
        return _square(w).sum() + w.sum()

    w = torch.ones(1, dtype=D, device=device)
    leaf = w.clone().requires_grad_()

    def instead() -> Tensor:
        slope: Tensor = gradkit.value_and_grads(loss(leaf), leaf)[1]
        return slope @ w

    right = torch.autograd.grad(loss(leaf), leaf)[0] @ w
    return Case(jvp(loss, (w,), (w,))[1], right, lambda: func.jvp(loss, w, w)[1], instead)


def _forward_over_reverse(fn: Callable[[Tensor], Tensor], x: Tensor, along: Tensor) -> Case:
    def loss(x: Tensor) -> Tensor:
        return fn(x).square().sum()

    return Case(
        *defects.over_reverse(fn, x, along),
        lambda: func.hvp(loss, x, along)[1],
        lambda: func.hvp(loss, x, along, mode="reverse-over-reverse")[1],
    )


def forward_over_cholesky_inverse(device: torch.device) -> Case:
    return _forward_over_reverse(*defects.cholesky_inverse(device))


def forward_over_triangular_solve(device: torch.device) -> Case:
    return _forward_over_reverse(*defects.triangular_solve(device))


def forward_over_scatter_reduce(device: torch.device) -> Case:
    return _forward_over_reverse(*defects.scatter_reduce(device))


def _second_in_a_batch(norm: Callable[..., Tensor], device: torch.device) -> Case:
    """The derivative, by the weight, of the squared gradients of two samples."""
    x, w = defects.rows_and_weight(device)
    squared = defects.squared_gradient(norm)

    def total(w: Tensor) -> Tensor:
        return vmap(squared, (None, 0))(w, x).sum()

    def ours() -> Tensor:
        return vmap(func.value_and_grads(squared), (None, 0))(w, x)[1].sum(0)

    values = defects.second_in_batch(norm, x, w)
    return Case(*values, lambda: func.value_and_grads(total)(w), ours)


def second_in_a_batch_of_layer_norm(device: torch.device) -> Case:
    return _second_in_a_batch(defects.layer_norm, device)


def second_in_a_batch_of_batch_norm(device: torch.device) -> Case:
    return _second_in_a_batch(defects.batch_norm, device)


def second_in_a_batch_of_instance_norm(device: torch.device) -> Case:
    return _second_in_a_batch(defects.instance_norm, device)


def _third(norm: Callable[[Tensor], Tensor], device: torch.device) -> Case:
    start, _ = defects.row_and_direction(device)

    def ours(norm: Callable[[Tensor], Tensor]) -> Tensor:
        x = start.clone().requires_grad_()
        out = norm(x).sin().sum()
        for _ in range(2):
            _, slope = gradkit.value_and_grads(out, x, create_graph=True)
            out = slope.square().sum()
        return gradkit.value_and_grads(out, x)[1]

    try:
        theirs: Tensor | str = defects.third(norm, start)[0]
    except RuntimeError as error:
        theirs = f"RuntimeError: {error}"
    right = defects.third(defects.by_hand, start)[0]
    return Case(theirs, right, lambda: ours(norm), lambda: ours(defects.by_hand))


def third_of_layer_norm(device: torch.device) -> Case:
    return _third(defects.layer_norm, device)


def third_of_batch_norm(device: torch.device) -> Case:
    return _third(defects.batch_norm, device)


def third_of_instance_norm(device: torch.device) -> Case:
    return _third(defects.instance_norm, device)


def derivative_of_jvp_of_layer_norm(device: torch.device) -> Case:
    x, along = defects.row_and_direction(device)

    def squared(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: jvp(norm, (x,), (along,))[1].square().sum()

    return Case(
        *defects.squared_jvp(defects.layer_norm, x, along),
        lambda: func.value_and_grads(squared(defects.layer_norm))(x),
        lambda: func.value_and_grads(squared(defects.by_hand))(x)[1],
    )


def second_of_once_differentiable(device: torch.device) -> Case:
    return _second(OnceCubed.apply, device)


def second_of_a_backward_without_grad(device: torch.device) -> Case:
    return _second(CubedWithoutGrad.apply, device)


def second_of_a_compiled_function(device: torch.device) -> Case:
    return _second(torch.compile(_waves, backend="aot_eager"), device, _waves)


def _waves(x: Tensor) -> Tensor:
    return x.exp().sin().cos()


class CubedWithoutGrad(OnceCubed):
    """As with a kernel that autograd does not know."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            return cotangent * 3 * x**2


def _cubed(x: Tensor) -> Tensor:
    return x**3


def _second(
    once: Callable[[Tensor], Tensor],
    device: torch.device,
    instead: Callable[[Tensor], Tensor] = _cubed,
) -> Case:
    w = torch.ones(1, dtype=D, device=device, requires_grad=True)

    def theirs(f: Callable[[Tensor], Tensor]) -> Tensor:
        out = (f(w) + w**2).sum()
        (slope,) = torch.autograd.grad(out, w, create_graph=True)
        return torch.autograd.grad(slope.sum(), w)[0]

    def ours(f: Callable[[Tensor], Tensor]) -> Tensor:
        out = (f(w) + w**2).sum()
        _, slope = gradkit.value_and_grads(out, w, create_graph=True)
        return gradkit.value_and_grads(slope.sum(), w)[1]

    return Case(theirs(once), theirs(instead), lambda: ours(once), lambda: ours(instead))


def jvp_of_cholesky(device: torch.device) -> Case:
    a = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=D, device=device)
    along = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=D, device=device)

    def fn(a: Tensor) -> Tensor:
        return torch.linalg.cholesky(a).sum()

    def symmetric(a: Tensor) -> Tensor:
        return fn((a + a.mT) / 2)

    return Case(
        jvp(fn, (a,), (along,))[1],
        (torch.func.grad(fn)(a) * along).sum(),
        lambda: func.check_grads(fn, a),
        lambda: jvp(symmetric, (a,), (along,))[1],
    )


def _sums(x: Tensor) -> Tensor:
    return torch.logcumsumexp(x, 0)


def _written_sums(x: Tensor) -> Tensor:
    return torch.stack([x[: i + 1].logsumexp(0) for i in range(len(x))])


def _of_event(sums: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (sums(x) * x.new_tensor([0.0, 1.0, 0.0])).sum().square()


def second_of_logcumsumexp(device: torch.device) -> Case:
    start = torch.tensor([0.0, 1.0, -1.0], dtype=D, device=device)

    def theirs(sums: Callable[[Tensor], Tensor]) -> Tensor:
        x = start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(_of_event(sums, x), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    def ours(sums: Callable[[Tensor], Tensor]) -> Tensor:
        x = start.clone().requires_grad_()
        _, slope = gradkit.value_and_grads(_of_event(sums, x), x, create_graph=True)
        return gradkit.value_and_grads(slope.square().sum(), x)[1]

    return Case(theirs(_sums), theirs(_written_sums), lambda: ours(_sums))


def second_of_logcumsumexp_in_func(device: torch.device) -> Case:
    x = torch.tensor([0.0, 1.0, -1.0], dtype=D, device=device)

    def theirs(sums: Callable[[Tensor], Tensor]) -> Tensor:
        slope = torch.func.grad(lambda x: _of_event(sums, x))
        return torch.func.grad(lambda x: slope(x).square().sum())(x)

    def ours() -> Tensor:
        slope = func.value_and_grads(lambda x: _of_event(_sums, x))
        return func.value_and_grads(lambda x: slope(x)[1].square().sum())(x)[1]

    return Case(theirs(_sums), theirs(_written_sums), ours)


def forward_over_logcumsumexp(device: torch.device) -> Case:
    x = torch.tensor([0.0, 1.0, -1.0], dtype=D, device=device)
    sums, along = _sums(x), torch.ones_like(x)

    def loss(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (of(x) - sums).square().sum()

    theirs, right = (
        jvp(torch.func.grad(loss(of)), (x,), (along,))[1] for of in (_sums, _written_sums)
    )
    return Case(theirs, right, lambda: func.hvp(loss(_sums), x, along)[1])


def forward_through_padding(device: torch.device) -> Case:
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D, device=device)
    words = torch.tensor([0, 1], device=device)

    def loss(w: Tensor) -> Tensor:
        return torch.nn.functional.embedding(words, w, padding_idx=0).square().sum()

    return Case(
        jvp(loss, (w,), (w,))[1],
        (torch.func.grad(loss)(w) * w).sum(),
        lambda: func.jvp(loss, w, w)[1],
    )


def _linearized(fn: Callable[[Tensor], Tensor], x: Tensor, along: Tensor, *, order: int) -> Case:
    """The derivative of a jvp, along a direction, by two pullbacks, as `func.linearize` has it."""

    def slope(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (torch.func.grad(fn)(x) * along).sum()

    below = fn if order == 2 else slope(fn)

    def of_jvp(x: Tensor) -> Tensor:
        return jvp(below, (x,), (along,))[1]

    value, pull = torch.func.vjp(of_jvp, x)[:2]
    theirs = torch.func.vjp(pull, torch.ones_like(value))[1]((along,))[0]
    return Case(
        theirs,
        slope(slope(below))(x),
        lambda: func.linearize(of_jvp, x)[1](along),
        lambda: func.linearize(slope(below), x)[1](along),
    )


def linearized_jvp_of_cumprod(device: torch.device) -> Case:
    x, along = torch.tensor([[2.0, 0.0, 3.0], [1.0, 1.0, 1.0]], dtype=D, device=device)
    return _linearized(lambda x: torch.cumprod(x, 0).exp().sum(), x, along, order=2)


def linearized_jvp_of_eigvals(device: torch.device) -> Case:
    matrices = [[[2.0, 1.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]]]
    a, along = torch.tensor(matrices, dtype=D, device=device)
    return _linearized(lambda a: torch.linalg.eigvals(a).real.sin().sum(), a, along, order=3)


Show = Callable[[torch.device], Case]
REFUSED = gradkit.UnsupportedGraphError


def of_jvp(
    name: str, gives: Any, right: Any, show: Show, refuses: type[Exception] | None = REFUSED
) -> Row:
    return Row(
        f"`grad` of the `jvp` of `{name}`", gives, right,
        "`func.value_and_grads`", show, refuses, "`func.hvp(f, a, v)`" if refuses else "",
        mended=mended_in("det"),
    )  # fmt: skip


def over_reverse(
    name: str, gives: Any, right: Any, show: Show, refuses: type[Exception] | None = REFUSED
) -> Row:
    return Row(
        f"`jvp` of `grad(f)`, where `f` is the sum of squares of `{name}`", gives, right,
        "`func.hvp`", show, refuses, '`mode="reverse-over-reverse"`' if refuses else "",
    )  # fmt: skip


def in_a_batch(name: str, gives: Any, right: Any, show: Show) -> Row:
    return Row(
        f"`grad` of a sum over `vmap(grad(f))`, where `f` calls `{name}` with a weight",
        gives, right,
        "`func.value_and_grads`", show, REFUSED, "`func.value_and_grads` inside the `vmap`",
    )  # fmt: skip


def third(name: str, gives: Any, right: Any, show: Show) -> Row:
    return Row(
        f"a third derivative through `{name}`", gives, right,
        "`value_and_grads(..., create_graph=True)`", show, REFUSED, "with the norm written out",
        mended=None if name == "layer_norm" else mended_in("NativeBatchNormBackwardBackward0"),
    )  # fmt: skip


ROWS = [
    of_jvp(
        "torch.linalg.det",
        [[3.0, 0.0], [-3.0, 6.0]], [[4.0, -3.0], [-2.0, 1.0]], derivative_of_jvp_of_det, None,
    ),
    of_jvp(
        "slogdet",
        [[0.0, 0.0], [0.0, 0.0]], [[0.5, -1.5], [0.5, -2.5]], derivative_of_jvp_of_slogdet,
    ),
    of_jvp(
        "torch.logdet",
        [[0.0, 0.0], [0.0, 0.0]], [[0.5, -1.5], [0.5, -2.5]], derivative_of_jvp_of_logdet,
    ),
    over_reverse(
        "torch.cholesky_inverse",
        [[332.0, -176.0], [-144.0, 12.0]], [[140.0, -240.0], [-80.0, 140.0]],
        forward_over_cholesky_inverse,
    ),
    over_reverse(
        "torch.triangular_solve(..., unitriangular=True)",
        [[0.0, -52.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], forward_over_triangular_solve,
    ),
    over_reverse(
        'scatter_reduce(..., "prod")',
        [-18.0, -8.0, -2.0], [42.0, 32.0, 2.0], forward_over_scatter_reduce, None,
    ),
    in_a_batch(
        "layer_norm",
        [14.53, -250.5, 174.8], [16.36, -255.1, 163.5], second_in_a_batch_of_layer_norm,
    ),
    in_a_batch(
        "batch_norm",
        [7.589, -43.25, 28.77], [9.235, -45.06, 25.95], second_in_a_batch_of_batch_norm,
    ),
    in_a_batch(
        "instance_norm",
        [7.589, -43.25, 28.77], [9.235, -45.06, 25.95], second_in_a_batch_of_instance_norm,
    ),
    *(
        third(name, [[0.0586, -0.0929, -0.0648]], [[0.1688, -0.0406, -0.1282]], show)
        for name, show in (
            ("layer_norm", third_of_layer_norm),
            ("batch_norm", third_of_batch_norm),
            ("instance_norm", third_of_instance_norm),
        )
    ),
    Row(
        "`jvp(f, (w,), (w,))[1]`, where `f` returns `(target * w).sum()`, and `target` is `w**2` "
        "under `no_grad`",
        3.0, 1.0, "`func.jvp`", forward_through_no_grad,
    ),
    Row(
        "`jvp(f, (w,), (w,))[1]`, where `f` returns `(square(w) + w).sum()`, and `square` is a "
        "`torch.library.custom_op`",
        1.0, 3.0, "`func.jvp`", jvp_of_custom_op, REFUSED, "the gradient, times `w`",
    ),
    Row(
        "a second derivative of `f(w) + w**2`, where the cube `f` is `once_differentiable`",
        [2.0], [8.0], "`value_and_grads(..., create_graph=True)`", second_of_once_differentiable,
        REFUSED, "with a differentiable backward",
    ),
    Row(
        "a second derivative of `f(w) + w**2`, where the backward of the cube `f` is under "
        "`no_grad`, or in a kernel that autograd does not know",
        [2.0], [8.0], "`value_and_grads(..., create_graph=True)`",
        second_of_a_backward_without_grad, REFUSED, "with a differentiable backward",
    ),
    Row(
        "a second derivative of `f(w) + w**2`, where `f` is "
        "`torch.compile(lambda w: w.exp().sin().cos())`",
        [2.0], [-1.4295], "`value_and_grads(..., create_graph=True)`",
        second_of_a_compiled_function, REFUSED, "without `torch.compile`",
    ),
    Row(
        "`grad` of the sum of squares of the `jvp` of `layer_norm`",
        [[0.1050, -0.1574, 0.0525]], [[0.2099, -0.1312, -0.0787]],
        "`func.value_and_grads`", derivative_of_jvp_of_layer_norm, REFUSED,
        "with the norm written out",
    ),
    Row(
        "`jvp(f, (a,), (v,))[1]`, where `f` calls `torch.linalg.cholesky(a)`, and `v` is not "
        "symmetric",
        -0.07538, 0.1746, "`func.check_grads`", jvp_of_cholesky, gradkit.GradientCheckError,
        "`jvp` with `(a + a.mT) / 2` in place of `a`",
    ),
    Row(
        "a second derivative of `(events * torch.logcumsumexp(x, 0)).sum().square()`, "
        "where `events` is a mask",
        [0.9979, 7.3739, 0.0], [0.4609, 5.9140, 0.0],
        "`value_and_grads(..., create_graph=True)`", second_of_logcumsumexp,
    ),
    Row(
        "`grad` of `grad` of `(events * torch.logcumsumexp(x, 0)).sum().square()`",
        [0.9979, 7.3739, 0.0], [0.4609, 5.9140, 0.0],
        "`func.value_and_grads`, nested", second_of_logcumsumexp_in_func,
    ),
    Row(
        "`jvp(grad(f), (x,), (v,))[1]`, where `f` is the sum of squares of the zero "
        "vector `torch.logcumsumexp(x, 0) - y`",
        [0.0, 0.0, 0.0], [3.0273, 2.7926, 0.1801], "`func.hvp`", forward_over_logcumsumexp,
    ),
    Row(
        "`jvp(f, (w,), (w,))[1]`, where `f` calls "
        "`torch.nn.functional.embedding(words, w, padding_idx=0)`",
        60.0, 50.0, "`func.jvp`", forward_through_padding,
    ),
    Row(
        "`vjp` of `vjp` of the `jvp` of `f`, where `f` calls `torch.cumprod(x, 0)`, and `x` has a "
        "zero",
        53.39, 59.39, "`func.linearize`", linearized_jvp_of_cumprod,
    ),
    Row(
        "`vjp` of `vjp` of the `jvp` of `f`, where `f` is `(grad(g)(a) * v).sum()`, and `g` calls "
        "`torch.linalg.eigvals(a)`",
        -25.98, 28.74, "`func.linearize`", linearized_jvp_of_eigvals, REFUSED,
        "with `(grad(f)(a) * v).sum()` in place of the `jvp`",
        mended=mended_in("eigvals"),
    ),
    Row(
        "`jvp` of `jvp` through an `autograd.Function` that has a `jvp`",
        [0.0], [108.0], "`func.jvp`, nested", jvp_of_jvp_of_a_function,
    ),
]  # fmt: skip
