"""DistributedDataParallel and fully_shard, in two processes.

The model multiplies by one weight, which is 1, and the loss is its square. The data of the first
process is 1, that of the second 3: their own gradients are 2 and 18, and the mean is 10.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import gradkit
from tests.processes import forking
from tests.silently_wrong._row import Case, Row, nothing

SECONDS = 240  # until the processes count as hanging
Trial = Callable[[Tensor], Case]


def linear(width: int = 1) -> nn.Module:
    layer = nn.Linear(1, width, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def backward(model: nn.Module, x: Tensor) -> Tensor:
    """Return what an ordinary step leaves: the right value, of either way to distribute."""
    squared(model, x).backward()
    return gradient(model)


def gradient(model: nn.Module) -> Any:
    """Return the gradient of the one weight, whole."""
    (weight,) = model.parameters()
    return whole(weight.grad)


def whole(tensor: Any) -> Any:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return None if tensor is None else tensor.flatten().clone()


def ddp_and_autograd_grad(x: Tensor) -> Case:
    model = DistributedDataParallel(linear())
    theirs = whole(grad(squared(model, x), list(model.parameters()))[0])
    return Case(
        theirs,
        backward(DistributedDataParallel(linear()), x),
        lambda: gradkit.value_and_grads(squared(model, x), model),
        lambda: reduced(model, x),
    )


def reduced(model: nn.Module, x: Tensor) -> Any:
    """Return the gradient of the one weight by gradkit.distributed, whole."""
    _, grads = gradkit.distributed.value_and_grads(squared(model, x), model)
    return whole(*grads.values())


def ddp_passed_by(x: Tensor) -> Case:
    model = DistributedDataParallel(linear())
    params = list(model.parameters())
    torch.autograd.backward(params, grad(squared(model.module, x), params))
    theirs = gradient(model)
    model.zero_grad()

    def ours() -> Tensor:
        with model.no_sync():
            _, grads = gradkit.value_and_grads(squared(model.module, x), params)
        gradkit.add_grads_(params, grads, hooks=True)
        return gradient(model)

    return Case(theirs, backward(DistributedDataParallel(linear()), x), ours)


def ddp_and_two_passes(x: Tensor) -> Case:
    def losses(model: nn.Module) -> list[Tensor]:
        out = model(x)
        return [out.square().sum(), out.sum()]

    model = DistributedDataParallel(linear())
    first, second = losses(model)
    first.backward(retain_graph=True)
    second.backward()
    theirs = gradient(model)
    joint = DistributedDataParallel(linear())
    torch.autograd.backward(losses(joint))

    def instead() -> Tensor:
        first, second = gradkit.distributed.per_loss_grads(losses(model), model)
        return whole(*gradkit.tree.add(first, second).values())

    ours = partial(gradkit.per_loss_grads, losses(joint), joint)
    return Case(theirs, gradient(joint), ours, instead)


def ddp_with_a_static_graph(x: Tensor) -> Case:
    def later(first: Callable[[nn.Module], object]) -> Tensor:
        model = DistributedDataParallel(linear(), static_graph=True)
        first(model)
        for _ in range(2):
            model.zero_grad()
            result = backward(model, x)
        return result

    def differentiate(model: nn.Module) -> None:
        grad(squared(model, x), list(model.parameters()))

    def ours(model: nn.Module) -> None:
        gradkit.value_and_grads(squared(model, x), list(model.parameters()))

    def instead(model: nn.Module) -> None:
        with suppress(gradkit.UnsupportedGraphError):
            ours(model)

    model = DistributedDataParallel(linear(), static_graph=True)
    right = later(lambda model: None)
    return Case(later(differentiate), right, lambda: ours(model), lambda: later(instead))


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(linear(2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp_and_autograd_grad(x: Tensor) -> Case:
    model = sharded()
    (theirs,) = grad(squared(model, x), list(model.parameters()), materialize_grads=True)
    return Case(
        whole(theirs),
        backward(sharded(), x),
        lambda: gradkit.value_and_grads(squared(model, x), model),
        lambda: reduced(model, x),
    )


def fsdp_and_backward_inputs(x: Tensor) -> Case:
    model = sharded()
    params = list(model.parameters())
    squared(model, x).backward(inputs=params)
    theirs = gradient(model)
    return Case(
        theirs,
        backward(sharded(), x),
        lambda: gradkit.backward_(squared(model, x), params),
        lambda: reduced(model, x),
    )


def parameters_of_ddp(x: Tensor) -> Case:
    model = DistributedDataParallel(linear())
    params = list(model.parameters())
    theirs = whole(grad(squared(model, x), params)[0])
    right = backward(DistributedDataParallel(linear()), x)

    def reduced_to_params() -> Any:
        return whole(gradkit.distributed.value_and_grads(squared(model, x), params)[1][0])

    def ours() -> Any:
        return gradkit.value_and_grads(squared(model, x), params)

    return Case(theirs, right, ours, reduced_to_params)


def factor_that_was_reduced(x: Tensor) -> Case:
    """Collectives write on tensors, and do not count that as a write."""
    w, factor = torch.ones(1, requires_grad=True), x.flatten().clone()
    right, loss = factor.clone(), (w * factor).sum()
    dist.all_reduce(factor)
    theirs = grad(loss, w, retain_graph=True)[0]
    ours = gradkit.value_and_grads(loss, w)[1]
    return Case(theirs, right, lambda: ours)


TRIALS: list[Trial] = [
    ddp_and_autograd_grad,
    ddp_passed_by,
    ddp_and_two_passes,
    ddp_with_a_static_graph,
    fsdp_and_autograd_grad,
    fsdp_and_backward_inputs,
    parameters_of_ddp,
    factor_that_was_reduced,
]


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the error that it raises: what can be sent home."""
    if call is nothing:
        return None
    try:
        return call()
    except Exception as error:
        return error


def work(rank: int, folder: str) -> None:
    """Run the trials as one of two processes; the first writes down what it saw."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=SECONDS / 2),
    )  # fmt: skip
    x = torch.tensor([[1.0], [3.0]])[rank].reshape(1, 1)
    found: dict[str, Any] = {}
    for trial in TRIALS:
        case = trial(x)
        found[trial.__name__] = (
            case.theirs, case.right, outcome(case.ours), outcome(case.instead),
        )  # fmt: skip
        dist.barrier()
    if rank == 0:
        Path(folder, "seen").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
    # Torch holds the group, and its threads, all the same. The interpreter would abort if one of
    # them let go of a tensor while it ends.
    os._exit(0)


@cache
def seen() -> Any:
    """Return what the trials showed, or the error that they ended with: they run once."""
    return outcome(run)


def run() -> dict[str, Any]:
    """Run all trials, in two processes that are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        forking()  # says what is imported before
        context = start_processes(
            work, (folder,), nprocs=2, join=False, daemon=True, start_method="forkserver"
        )
        try:
            end = time.monotonic() + SECONDS
            while not context.join(timeout=1):
                assert time.monotonic() < end, "the two processes did not come to an end"
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return pickle.loads(Path(folder, "seen").read_bytes())


def shown(trial: Trial) -> Callable[[torch.device], Case]:
    """Return what shows a trial that two processes have run."""

    def show(device: torch.device) -> Case:
        if device.type != "cpu":
            pytest.skip("gloo, on the CPU")
        theirs, right, ours, instead = again(seen())[trial.__name__]
        return Case(theirs, right, lambda: again(ours), lambda: again(instead))

    show.__name__ = trial.__name__
    return show


def again(outcome: Any) -> Any:
    """Raise, or return, what a call in another process has raised or returned."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


REFUSED = gradkit.UnsupportedGraphError
ROWS = [
    Row(
        "`grad(loss, list(ddp.parameters()))`",
        [2.0], [10.0], "`value_and_grads(loss, ddp)`", shown(ddp_and_autograd_grad), REFUSED,
        "`distributed.value_and_grads(loss, ddp)`",
    ),
    Row(
        "`grad(loss, params)`, `params = list(ddp.parameters())`",
        [2.0], [10.0], "`value_and_grads(loss, params)`", shown(parameters_of_ddp), REFUSED,
        "`distributed.value_and_grads(loss, params)`",
    ),
    Row(
        "`loss_1.backward(retain_graph=True)` and `loss_2.backward()`, after one forward pass of "
        "DDP",
        [11.0], [12.0], "`per_loss_grads(losses, ddp)`", shown(ddp_and_two_passes), REFUSED,
        "`distributed.per_loss_grads(losses, ddp)`",
    ),
    Row(
        "`backward(params, grads)`, where `grads` are those of a loss of `ddp.module`",
        [2.0], [10.0], "`add_grads_(params, grads, hooks=True)`", shown(ddp_passed_by),
    ),
    Row(
        "`.backward()` of DDP with `static_graph=True`, after `autograd.grad` in the first "
        "iteration",
        [2.0], [10.0], "`value_and_grads(loss, params)`", shown(ddp_with_a_static_graph), REFUSED,
        "`.backward()` after this error",
    ),
    Row(
        "`grad(loss, params, materialize_grads=True)` of a `fully_shard` module",
        [0.0, 0.0], [10.0, 10.0], "`value_and_grads(loss, model)`", shown(fsdp_and_autograd_grad),
        REFUSED, "`distributed.value_and_grads(loss, model)`",
    ),
    Row(
        "`loss.backward(inputs=params)` of a `fully_shard` module: `.grad`",
        None, [10.0, 10.0], "`backward_(loss, params)`", shown(fsdp_and_backward_inputs), REFUSED,
        "`distributed.value_and_grads(loss, model)`",
    ),
]  # fmt: skip
