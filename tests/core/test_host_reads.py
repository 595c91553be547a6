"""Whoever reads a number of a tensor on the host waits for the device: no call in a loop does it.

`tests/cuda/test_synchronization.py` asks CUDA itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import gradkit
from gradkit import meta, tree
from gradkit.dotgrad._kernels import KERNELS
from tests.host_reads import host_reads

pytestmark = pytest.mark.long

# --- The recorder --------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.any()),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index": lambda x: x[x > 0],
    "assignment": lambda x: x.clone().__setitem__(x > 0, x[:0]),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().numpy(),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
}


@pytest.mark.parametrize("how", PLANTED)
def test_a_read_is_seen(device: torch.device, how: str) -> None:
    x = -torch.ones(3, device=device)
    with host_reads() as seen:
        PLANTED[how](x)
    assert seen


@pytest.mark.parametrize("where", ["hook", "backward", "loss_fn"])
def test_a_read_inside_a_call_is_seen(device: torch.device, where: str) -> None:
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float(grad.sum())

    w = torch.ones(3, device=device, requires_grad=True)
    middle = Reading.apply(w) if where == "backward" else w * 2
    if where == "hook":
        middle.register_hook(lambda grad: grad * float(grad.sum()))
    with host_reads() as seen:
        if where == "loss_fn":
            gradkit.func.value_and_grads(lambda w: w.sum() * float(w.detach().sum()))(w)
        else:
            gradkit.value_and_grads(middle.sum(), w)
    assert seen == ["_local_scalar_dense"]


def test_what_reads_nothing_is_not_seen(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with host_reads() as seen:
        rows = torch.arange(2, device=device)
        torch.where(x > 0, x, 0.0).index_put((rows,), x[rows]).to(torch.float64).norm()
    assert seen == []


# --- The calls of a loop -------------------------------------------------------------------------


class Task:
    """A model whose losses share a part of it, and miss the rest."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model = nn.ModuleDict({
            "body": nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
            "fit": nn.Linear(3, 2),
            "size": nn.Linear(3, 2),
            "unused": nn.Linear(1, 1),
        }).to(device)  # fmt: skip
        self.x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(device)
        self.weight = torch.full((), 0.5, device=device)

    def outputs(self) -> dict[str, Tensor]:
        shared = self.model["body"](self.x)
        return {name: self.model[name](shared) for name in ("fit", "size")}

    def losses(self) -> dict[str, Tensor]:
        return {name: out.square().mean() for name, out in self.outputs().items()}

    def vector_losses(self) -> dict[str, Tensor]:
        return {name: out.square().mean(1) for name, out in self.outputs().items()}

    def grads(self) -> Any:
        return gradkit.value_and_grads(self.losses(), self.model)[1]

    def per_loss(self) -> Any:
        return gradkit.per_loss_grads(self.losses(), self.model)


Call = Callable[[], object]
Prepare = Callable[[Task], Call]  # what is not to be recorded, and the call that is


def joint(**options: Any) -> Prepare:
    def prepare(task: Task) -> Call:
        losses = task.losses()
        return lambda: gradkit.value_and_grads(losses, task.model, **options)

    return prepare


def weighted(*, learned: bool) -> Prepare:
    def prepare(task: Task) -> Call:
        losses = task.losses()
        weights = {"fit": task.weight.clone().requires_grad_(learned), "size": 0.1}
        return lambda: gradkit.value_and_grads(losses, task.model, weights=weights)

    return prepare


def with_hooks(task: Task) -> Call:
    for param in task.model.parameters():
        param.register_hook(lambda grad: grad * 2)
    losses = task.losses()
    losses["fit"].register_hook(lambda grad: grad * 2)
    losses["fit"].retain_grad()
    return lambda: gradkit.value_and_grads(losses, task.model)


def separate(strategy: str, *, vector: bool) -> Prepare:
    def prepare(task: Task) -> Call:
        losses = task.vector_losses() if vector else task.losses()
        return lambda: gradkit.per_loss_grads(losses, task.model, strategy=strategy)

    return prepare


def players(task: Task) -> Call:
    losses = task.losses()
    params = {name: task.model[name] for name in losses}
    return lambda: gradkit.simultaneous_grads(losses, params)


def product(task: Task) -> Call:
    losses = task.vector_losses()
    cotangents = {name: torch.ones_like(loss) for name, loss in losses.items()}
    return lambda: gradkit.vjp(losses, task.model, cotangents)


def retained(task: Task) -> Call:
    def run() -> None:
        with gradkit.safe_retain(task.model, names=["body.*"]) as acts:
            gradkit.value_and_grads(task.losses(), task.model)
        assert acts

    return run


def captured(task: Task) -> Call:
    loss = sum(task.losses().values())

    def run() -> None:
        with gradkit.capture_grads(task.model):
            loss.backward()

    return run


def dot_grad(task: Task) -> Call:
    grads = task.grads()

    def run() -> None:
        gradkit.write_grads_(task.model, grads)
        gradkit.add_grads_(task.model, grads)
        gradkit.add_grads_(task.model, grads, hooks=True)
        gradkit.read_grads(task.model)
        gradkit.clear_grads_(task.model)
        gradkit.backward_(task.losses(), task.model, weights={"fit": task.weight, "size": 1.0})
        gradkit.backward_(task.losses())

    return run


def arithmetic(call: Callable[[Any], object]) -> Prepare:
    def prepare(task: Task) -> Call:
        per_loss = task.per_loss()
        return lambda: call(per_loss)

    return prepare


def functional(call: Callable[[Task, dict[str, Tensor]], object]) -> Prepare:
    def prepare(task: Task) -> Call:
        params = dict(task.model.named_parameters())
        return lambda: call(task, params)

    return prepare


def losses_of(task: Task) -> Callable[[Any], dict[str, Tensor]]:
    def losses(params: dict[str, Tensor]) -> dict[str, Tensor]:
        shared = functional_call(task.model["body"], below(params, "body"), task.x)
        return {
            name: functional_call(task.model[name], below(params, name), shared).square().mean()
            for name in ("fit", "size")
        }

    return losses


def below(params: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    pairs = ((path.partition("."), param) for path, param in params.items())
    return {rest: param for (first, _, rest), param in pairs if first == name}


def of_sample(task: Task, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(task.model["body"], below(params, "body"), x).square().mean()


def inner_loss(task: Task) -> Callable[[Any, Any, Any], Tensor]:
    def loss(params: dict[str, Tensor], scale: Any, x: Tensor) -> Tensor:
        return scale * of_sample(task, params, x)

    return loss


def pure_module(task: Task) -> Call:
    call, params, buffers = gradkit.func.make_functional(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(task.device)
    )
    return lambda: call(params, buffers, task.x)


def unrolled(opt: meta.Optimizer, memory: Any = "store", **options: Any) -> Prepare:
    def prepare(task: Task) -> Call:
        params = {name: x for name, x in task.model.named_parameters() if name[:5] == "body."}
        scale = torch.ones((), device=task.device, requires_grad=True)

        def run() -> None:
            adapted = meta.unroll(
                inner_loss(task), params, [task.x] * 4, opt, outer=scale, memory=memory, **options
            )
            gradkit.value_and_grads(of_sample(task, adapted.params, task.x), [scale, params])

        return run

    return prepare


def over_tasks(task: Task) -> Call:
    params = {name: x for name, x in task.model.named_parameters() if name[:5] == "body."}
    tasks = torch.stack([task.x, -task.x])

    def meta_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        adapted = meta.unroll(inner_loss(task), params, [x] * 2, meta.sgd(0.1), outer=1.0)
        return of_sample(task, adapted.params, x)

    return lambda: meta.mean_value_and_grads(meta_loss, params, tasks)


def direction(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(param) for name, param in params.items()}


CALLS: dict[str, Prepare] = {
    "value_and_grads": joint(),
    "value_and_grads, zeros": joint(unused="zeros"),
    "value_and_grads, create_graph": joint(create_graph=True),
    "value_and_grads, tensors as weights": weighted(learned=False),
    "value_and_grads, learned weights": weighted(learned=True),
    "value_and_grads, hooks": with_hooks,
    "per_loss_grads, auto": separate("auto", vector=False),
    "per_loss_grads, sequential": separate("sequential", vector=False),
    "per_loss_grads, auto, vectors": separate("auto", vector=True),
    "per_loss_grads, sequential, vectors": separate("sequential", vector=True),
    "per_loss_grads, batched, vectors": separate("batched", vector=True),
    "simultaneous_grads": players,
    "vjp": product,
    "safe_retain": retained,
    "capture_grads": captured,
    "dotgrad": dot_grad,
    "tree.add": arithmetic(lambda g: tree.add(g["fit"], g["size"])),
    "tree.sub": arithmetic(lambda g: tree.sub(g["fit"], g["size"])),
    "tree.scale": arithmetic(lambda g: tree.scale(g["fit"], 0.5)),
    "tree.dot": arithmetic(lambda g: tree.dot(g["fit"], g["size"])),
    "tree.map": arithmetic(lambda g: tree.map(torch.sign, g["fit"])),
    "tree.global_norm": arithmetic(lambda g: tree.global_norm(g["fit"])),
    "tree.clip_by_global_norm": arithmetic(lambda g: tree.clip_by_global_norm(g["fit"], 1.0)),
    "tree.cosine": arithmetic(lambda g: tree.cosine(g["fit"], g["size"])),
    "tree.stack": arithmetic(lambda g: tree.unstack(tree.stack([g["fit"], g["size"]]))),
    "tree.to_matrix": arithmetic(lambda g: tree.to_matrix(g)),
    "tree.gram, leaves that some miss": arithmetic(lambda g: tree.gram(g)),
    "tree.gram": arithmetic(lambda g: tree.gram({"a": g["fit"], "b": g["fit"]})),
    "tree.weighted_sum": arithmetic(lambda g: tree.weighted_sum(g, {"fit": 0.5, "size": 2.0})),
    "combine": arithmetic(lambda g: gradkit.combine(g, lambda matrix: matrix.mean(0))),
    "func.value_and_grads": functional(
        lambda task, params: gradkit.func.value_and_grads(losses_of(task))(params)
    ),
    "func.per_loss_grads": functional(
        lambda task, params: gradkit.func.per_loss_grads(losses_of(task))(params)
    ),
    "func.per_sample_grads": functional(
        lambda task, params: gradkit.func.per_sample_grads(
            lambda params, x: of_sample(task, params, x), in_dims=(None, 0)
        )(params, task.x)
    ),
    "func.hvp": functional(
        lambda task, params: gradkit.func.hvp(
            lambda params: sum(losses_of(task)(params).values()), params, direction(params)
        )
    ),
    "func.make_functional": pure_module,
    "meta.unroll": unrolled(meta.sgd(lr=0.1, momentum=0.9)),
    "meta.unroll, first order": unrolled(meta.adam(lr=0.1), first_order=True),
    "meta.unroll, Adam": unrolled(meta.adam(lr=0.1)),
    "meta.mean_value_and_grads": over_tasks,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_no_number_is_read(device: torch.device, name: str) -> None:
    call = CALLS[name](Task(device))
    with host_reads() as seen:
        call()
    assert seen == []


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam])
def test_a_step_reads_what_torch_reads(device: torch.device, kind: Any, scaled: bool) -> None:
    """Adam reads its counter, which is on the CPU; the scaler whether a gradient is infinite."""
    task = Task(device)
    optimizer = kind(task.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type) if scaled else None
    loss = sum(task.losses().values()) * torch.ones((), device=device)
    loss = loss if scaler is None else scaler.scale(loss)
    _, grads = gradkit.value_and_grads(loss, task.model)

    def step() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def step_() -> None:
        gradkit.step_(optimizer, task.model, grads, scaler=scaler)
        if scaler is not None:
            scaler.update()

    step_()  # the first makes the state
    with host_reads() as seen:
        step_()
    gradkit.write_grads_(task.model, grads)
    if device.type == "cpu" and scaler is None and kind in KERNELS:
        optimizer.param_groups[0]["foreach"] = True  # whose kernels step_ takes there
    with host_reads() as expected:
        step()
    assert seen == expected
    assert seen == [] or scaled or kind is not torch.optim.SGD
