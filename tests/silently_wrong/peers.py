"""Libraries beside torch. A row is skipped where its library is not installed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import func, meta
from tests.silently_wrong._row import Case, D, Row
from tests.silently_wrong.modules import Cubes


def rows_of_other_losses_in_torchjd(device: torch.device) -> Case:
    jac = pytest.importorskip("torchjd.autojac").jac
    w = torch.tensor([0.0, 1.0], device=device, requires_grad=True)

    def losses() -> list[Tensor]:
        return [w.sum(), w.sqrt().sum()]

    return Case(
        jac(losses(), [w])[0][0],
        torch.autograd.grad(losses()[0], w)[0],
        lambda: gradkit.per_loss_grads(losses(), w)[0],
    )


def cdist_in_torchjd(device: torch.device) -> Case:
    jac = pytest.importorskip("torchjd.autojac").jac
    x = torch.tensor([[0.0, 0.0], [4.0, 3.0]], device=device, requires_grad=True)
    other = torch.tensor([[0.0, 3.0], [4.0, 0.0]], device=device)

    def sums() -> Tensor:
        return torch.cdist(x, other).sum(1)

    return Case(
        jac(sums(), [x])[0][-1],
        torch.autograd.grad(sums()[-1], x)[0],
        lambda: gradkit.per_loss_grads(sums(), x)[-1],
    )


def reentrant_checkpoint_in_torchjd(device: torch.device) -> Case:
    jac = pytest.importorskip("torchjd.autojac").jac
    layer = nn.Linear(1, 1, bias=False).to(device)
    x = torch.full((1, 1), 4.0, device=device, requires_grad=True)

    def loss(*, reentrant: bool) -> Tensor:
        return checkpoint(layer, x, use_reentrant=reentrant).sum()

    return Case(
        jac(loss(reentrant=True), [layer.weight])[0][0],
        torch.autograd.grad(loss(reentrant=False), layer.weight)[0],
        lambda: gradkit.per_loss_grads(loss(reentrant=True), layer.weight),
        lambda: gradkit.per_loss_grads(loss(reentrant=False), layer.weight),
    )


def hook_in_torchjd(device: torch.device) -> Case:
    jac = pytest.importorskip("torchjd.autojac").jac
    w = torch.ones(1, device=device, requires_grad=True)
    y = w * 2
    y.register_hook(lambda g: g * 100)
    y.retain_grad()
    loss = (3 * y).sum()
    loss.backward(retain_graph=True)
    right = y.grad.clone()
    y.grad = None
    return Case(
        jac(loss, [w, y], retain_graph=True)[1][0],
        right,
        lambda: gradkit.per_loss_grads(loss, {"w": w, "y": y})["y"],
    )


def _inner(
    device: torch.device, *, inside: bool
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    module = Cubes(inside=inside).to(device)
    return module, torch.full((1,), 2.0, device=device), lambda out: 0.125 * out.sum()


def _unrolled(device: torch.device, *, inside: bool, memory: Any) -> Tensor:
    module, x, height = _inner(device, inside=inside)
    call, params, _ = func.make_functional(module)

    def loss(params: Any, _: Any, x: Tensor) -> Tensor:
        return height(call(params, {}, x)[0])

    adapted = meta.unroll(loss, params, [x, x], meta.sgd(lr=0.1), memory=memory)
    return gradkit.value_and_grads(loss(adapted.params, (), x), module)[1]["w"]


def _written_out(device: torch.device) -> Tensor:
    module, x, height = _inner(device, inside=False)
    w = module.w
    for _ in range(2):
        (slope,) = torch.autograd.grad(height(w * (w * x) ** 2), w, create_graph=True)
        w = w - 0.1 * slope
    return torch.autograd.grad(height(w * (w * x) ** 2), module.w)[0]


def _against_unroll(theirs: Tensor, device: torch.device) -> Case:
    return Case(
        theirs,
        _written_out(device),
        lambda: _unrolled(device, inside=True, memory="store"),
        lambda: _unrolled(device, inside=False, memory="recompute"),
    )


def checkpoint_in_higher(device: torch.device) -> Case:
    higher = pytest.importorskip("higher")

    module, x, height = _inner(device, inside=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with higher.innerloop_ctx(module, optimizer, copy_initial_weights=False) as (inner, steps):
        for _ in range(2):
            steps.step(height(inner(x)))
        (theirs,) = torch.autograd.grad(height(inner(x)), module.w)
    return _against_unroll(theirs, device)


def checkpoint_in_torchopt(device: torch.device) -> Case:
    torchopt = pytest.importorskip("torchopt")

    module, x, height = _inner(device, inside=True)
    start = module.w
    steps = torchopt.MetaSGD(module, lr=0.1)
    for _ in range(2):
        steps.step(height(module(x)))
    (theirs,) = torch.autograd.grad(height(module(x)), start)
    return _against_unroll(theirs, device)


def a_dead_unit_in_torchopt(device: torch.device) -> Case:
    torchopt = pytest.importorskip("torchopt")
    one_dead = torch.tensor([1.0, 0.0], dtype=D, device=device)

    def theirs(scale: Tensor) -> Tensor:
        w = torch.ones(2, dtype=D, device=device, requires_grad=True)
        optimizer = torchopt.adam(lr=0.1, eps=0.5)
        updates, _ = optimizer.update((scale * one_dead,), optimizer.init((w,)), inplace=False)
        return torchopt.apply_updates((w,), updates, inplace=False)[0].sum()

    def ours(scale: Tensor) -> Tensor:
        w, opt = torch.ones(2, dtype=D, device=device), meta.adam(lr=0.1, eps=0.5)
        return opt.step(w, scale * one_dead, opt.init(w))[0].sum()

    scale = torch.tensor(0.5, dtype=D, device=device, requires_grad=True)
    at = scale.detach()
    return Case(
        torch.autograd.grad(theirs(scale), scale)[0],
        ((theirs(at + 1e-6) - theirs(at - 1e-6)) / 2e-6).detach(),
        lambda: torch.autograd.grad(ours(scale), scale)[0],
    )


class UsedTwice(nn.Module):
    """A layer, and its weight once more outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer.weight.sum()


def _per_sample(module: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    call, params, _ = func.make_functional(copy.deepcopy(module))
    name = next(iter(params))

    def loss(params: Any, x: Tensor) -> Tensor:
        return call(params, {}, x)[0].square().sum()

    right = [torch.autograd.grad(loss(params, row[None]), params[name])[0] for row in x]
    return torch.stack(right), lambda: func.per_sample_grads(loss)(params, x)[name]


def weight_used_outside_in_opacus(device: torch.device) -> Case:
    opacus = pytest.importorskip("opacus")
    module: Any = UsedTwice().to(device)
    x = torch.tensor([[1.0], [2.0]], device=device)
    right, ours = _per_sample(module, x)
    wrapped = opacus.GradSampleModule(module, loss_reduction="sum")
    wrapped(x.requires_grad_()).square().sum().backward()
    return Case(module.layer.weight.grad_sample, right, ours)


def weight_used_outside_in_backpack(device: torch.device) -> Case:
    backpack = pytest.importorskip("backpack")
    extensions = pytest.importorskip("backpack.extensions")
    module: Any = UsedTwice().to(device)
    x = torch.tensor([[1.0], [2.0]], device=device)
    right, ours = _per_sample(module, x)
    backpack.extend(module.layer)
    loss = backpack.extend(nn.MSELoss(reduction="sum"))
    with backpack.backpack(extensions.BatchGrad()):
        loss(module(x.requires_grad_()), torch.zeros(2, 1, device=device)).backward()
    return Case(module.layer.weight.grad_batch, right, ours)


REFUSED = gradkit.UnsupportedGraphError
CHECKPOINTED = "two inner steps of a module with a checkpoint: the meta-gradient"
OUTSIDE = (
    "the loss `(layer(x) * layer.weight) ** 2` of two samples: each gradient w.r.t. the weight"
)
RECOMPUTE = '`memory="recompute"` instead of the checkpoint'
ROWS = [
    Row(
        "`jac([w.sum(), w.sqrt().sum()], [w])` at `w = [0, 1]`: the first row",
        [float("nan"), 1.0], [1.0, 1.0], "`per_loss_grads`", rows_of_other_losses_in_torchjd,
        by="TorchJD",
    ),
    Row(
        "`jac(torch.cdist(x, other).sum(1), [x])`: the last row",
        [[-1.0, -1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]], "`per_loss_grads`", cdist_in_torchjd,
        by="TorchJD",
    ),
    Row(
        "`jac(checkpoint(layer, x, use_reentrant=True).sum(), [weight])`",
        [[0.0]], [[4.0]], "`per_loss_grads`", reentrant_checkpoint_in_torchjd, REFUSED,
        "with `use_reentrant=False`", by="TorchJD",
    ),
    Row(
        "`jac(3 * y, [w, y])`, where `y = 2 * w` has a hook `g * 100`: w.r.t. `y`",
        [3.0], [300.0], "`per_loss_grads`", hook_in_torchjd, by="TorchJD",
    ),
    Row(
        CHECKPOINTED,
        [0.4526], [0.4302], "`meta.unroll`", checkpoint_in_higher, REFUSED, RECOMPUTE, by="higher",
    ),
    Row(
        CHECKPOINTED,
        [0.4526], [0.4302], "`meta.unroll`", checkpoint_in_torchopt, REFUSED, RECOMPUTE,
        by="TorchOpt",
    ),
    Row(
        "a step of Adam, where one of two gradients is 0: w.r.t. a factor of the gradients",
        float("nan"), -0.05, "`meta.adam`", a_dead_unit_in_torchopt, by="TorchOpt",
    ),
    Row(
        OUTSIDE,
        [[[2.0]], [[8.0]]], [[[4.0]], [[16.0]]], "`func.per_sample_grads`",
        weight_used_outside_in_opacus, by="Opacus",
    ),
    Row(
        OUTSIDE,
        [[[2.0]], [[8.0]]], [[[4.0]], [[16.0]]], "`func.per_sample_grads`",
        weight_used_outside_in_backpack, by="BackPACK",
    ),
]  # fmt: skip
