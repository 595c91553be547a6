"""functional_call, checkpoints, and what a module writes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import func, meta
from tests.silently_wrong._row import Case, Row


class Cubes(nn.Module):
    """w * (w * x) ** 2, inside of a checkpoint or not."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return checkpoint(lambda x: self.w * (self.w * x) ** 2, x, use_reentrant=False)
        return self.w * (self.w * x) ** 2


def checkpoint_inside_of_functional_call(device: torch.device) -> Case:
    w, x = torch.full((1,), 3.0, device=device), torch.full((1,), 2.0, device=device)

    def run(call: Callable[..., Tensor]) -> Tensor:
        params = {"w": w.clone().requires_grad_()}
        return torch.autograd.grad(call(params), params["w"])[0]

    def theirs(inside: bool) -> Tensor:
        module = Cubes(inside=inside).to(device)
        return run(lambda params: functional_call(module, params, (x,)))

    module = Cubes(inside=True).to(device)
    call, _, _ = func.make_functional(module)
    plain, _, _ = func.make_functional(Cubes(inside=False).to(device))
    whole = run(
        lambda params: checkpoint(lambda p: plain(p, {}, x)[0], params, use_reentrant=False)
    )
    assert whole == theirs(inside=False)
    assert run(lambda params: call(params, {}, x)[0]) == theirs(inside=False)

    def ours() -> Tensor:
        params = {"w": w.clone().requires_grad_()}
        _, grads = gradkit.value_and_grads(functional_call(module, params, (x,)), params)
        return grads["w"]

    def instead() -> Tensor:
        loss = lambda params: functional_call(module, params, (x,))  # noqa: E731
        result: Tensor = func.value_and_grads(loss)({"w": w})[1]["w"]
        return result

    return Case(theirs(inside=True), theirs(inside=False), ours, instead)


def buffers_that_are_arguments(device: torch.device) -> Case:
    norm = nn.BatchNorm1d(1).to(device)
    x = torch.tensor([[1.0], [3.0]], device=device)
    call, params, buffers = func.make_functional(norm)

    def mean_after(loss: Callable[[Any, Any], Any], transform: Callable[..., Any]) -> Tensor:
        given = {name: buffer.clone() for name, buffer in buffers.items()}
        transform(loss)(params, given)
        return given["running_mean"]

    return Case(
        mean_after(lambda p, b: functional_call(norm, (p, b), (x,)).sum(), grad),
        torch.zeros(1),
        lambda: mean_after(lambda p, b: call(p, b, x)[0].sum(), func.value_and_grads),
    )


def params_that_are_arguments(device: torch.device) -> Case:
    table = nn.Embedding(1, 2, max_norm=1.0).to(device)
    first = torch.tensor([0], device=device)
    given = torch.tensor([[3.0, 4.0]], device=device)
    functional_call(table, {"weight": given}, (first,))
    return Case(given, torch.tensor([[3.0, 4.0]]), lambda: func.make_functional(table))


def gradient_dtype(device: torch.device) -> Case:
    w = torch.zeros(1, dtype=torch.bfloat16, device=device, requires_grad=True)
    w.grad_dtype = torch.float32

    def loss(w: Tensor) -> Tensor:
        return (w.float() * 256).sum() + (w.float() * 1).sum()

    loss(w).backward()
    return Case(grad(loss)(w), w.grad, lambda: func.value_and_grads(loss)(w)[1])


def checkpoint_of_what_has_moved_on(device: torch.device) -> Case:
    w = torch.ones(1, device=device, requires_grad=True)
    scale = [1.0]
    out = checkpoint(lambda w: (scale[0] * w) ** 2, w, use_reentrant=False)
    scale[0] = 3.0
    (theirs,) = torch.autograd.grad(out, w)

    def ours() -> Tensor:
        scale[0] = 1.0
        adapted = meta.unroll(
            lambda w, _, batch: ((scale[0] * w) ** 3).sum(),
            w, [0], meta.sgd(lr=0.1), memory="recompute",
        )  # fmt: skip
        scale[0] = 3.0
        return torch.autograd.grad(adapted.params, w)[0]

    (right,) = torch.autograd.grad((1.0 * w) ** 2, w)
    return Case(theirs, right, ours)


def statistics_that_count_twice(device: torch.device) -> Case:
    x = torch.tensor([[1.0], [3.0]], device=device)

    def steps(run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        norm = nn.BatchNorm1d(1, affine=False).to(device)
        w = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad(run(norm, w), w)
        return norm.num_batches_tracked

    def ours(norm: nn.Module, w: Tensor) -> Tensor:
        return meta.unroll(
            lambda w, _, batch: (norm(batch) * w).square().sum(),
            w, [x], meta.sgd(lr=0.1), memory="recompute",
        ).params.sum()  # fmt: skip

    return Case(
        steps(lambda norm, w: checkpoint(norm, x * w, use_reentrant=False).square().sum()),
        steps(lambda norm, w: norm(x * w).square().sum()),
        lambda: steps(ours),
    )


REFUSED = gradkit.UnsupportedGraphError
ROWS = [
    Row(
        "`functional_call` with `w = 3` of a module whose own `w` is 1, and whose forward pass "
        "checkpoints `w * (2 * w) ** 2`: w.r.t. `w`",
        [12.0], [108.0], "`value_and_grads`", checkpoint_inside_of_functional_call, REFUSED,
        "`func.make_functional`, `func.value_and_grads` of a function, or a checkpoint around the "
        "`functional_call`",
    ),
    Row(
        "`grad(f)(params, buffers)` of a `functional_call` with a batch norm: the given "
        "`running_mean`",
        [0.2], [0.0], "`func.make_functional`", buffers_that_are_arguments,
    ),
    Row(
        "`functional_call` of an embedding with `max_norm=1`: the given weight",
        [[0.6, 0.8]], [[3.0, 4.0]], "`func.make_functional`", params_that_are_arguments, REFUSED,
    ),
    Row(
        "`grad(lambda w: 256 * w.float() + w.float())(w)` of a bfloat16 `w` with "
        "`w.grad_dtype = torch.float32`",
        [256.0], [257.0], "`func.value_and_grads`", gradient_dtype, tolerance=1e-5,
    ),
    Row(
        "`checkpoint` of a closure over a number that changes from 1 to 3 before the backward pass",
        [6.0], [2.0], '`meta.unroll(..., memory="recompute")`', checkpoint_of_what_has_moved_on,
        REFUSED,
    ),
    Row(
        "`checkpoint` of a batch norm: `num_batches_tracked` after one step",
        2, 1, '`meta.unroll(..., memory="recompute")`', statistics_that_count_twice,
    ),
]  # fmt: skip
