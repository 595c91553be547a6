"""A run of a step in a layout, on one rank; and the processes that are the ranks."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from gradkit._autograd.engine import reference_backward
from gradkit._compat.distributed import full_tensor
from gradkit.errors import StructureError, describe, first_line, message

_WRAPPERS = "_orig_mod.", "_checkpoint_wrapped_module."
_LATER = 30.0  # seconds by which a rank may outlast the timeout of the collective it waits in


@dataclass(frozen=True)
class BatchPart:
    """Which part of the batch one call of a step computes: part `index` of `count`.

    Attributes:
        index: From 0; numbered over the ranks, and on a rank over its micro-batches.
        count: How many parts the batch has: 1 where a process computes it whole.
        micro_batches: How many of them this process computes before its gradients are read.
    """

    index: int = 0
    count: int = 1
    micro_batches: int = 1

    @property
    def is_last(self) -> bool:
        """Whether this is the last part that this process computes: clip, or reduce, here."""
        return (self.index + 1) % self.micro_batches == 0

    def rows(self, batch: Tensor) -> Tensor:
        """Return the rows of this part, as `torch.tensor_split` divides them."""
        return batch.tensor_split(self.count)[self.index]


def unwrapped(module: nn.Module, mesh: Any) -> nn.Module:
    """Return the module."""
    return module


@dataclass(frozen=True)
class Layout:
    """A layout of your own for `parity`.

    Attributes:
        name: The name that the report shows.
        wrap: `wrap(module, mesh)` returns what the step is called with. Parameters keep their
            names, as with `fully_shard`, `parallelize_module` and `DistributedDataParallel`; `mesh`
            is one-dimensional, over all ranks, and None in one process.
        ranks: `"divide"`: each rank computes its parts of the batch, as in data parallelism.
            `"repeat"`: each computes the whole batch, as in tensor parallelism. `"one"`: there is
            one process, that of the call.
        micro_batches: How many parts a process computes, one after the other.
    """

    name: str
    wrap: Callable[[nn.Module, Any], nn.Module] = unwrapped
    ranks: Literal["divide", "repeat", "one"] = "divide"
    micro_batches: int = 1

    def parts(self, rank: int = 0, world_size: int = 1) -> list[BatchPart]:
        """Return the parts that a rank computes."""
        rank, world_size = (rank, world_size) if self.ranks == "divide" else (0, 1)
        each, total = self.micro_batches, self.micro_batches * world_size
        return [BatchPart(rank * each + index, total, each) for index in range(each)]


@dataclass(frozen=True)
class Program:
    """What runs in each layout."""

    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, BatchPart], Any]
    seed: int = 0


@dataclass
class RankRun:
    """What a rank knows of a run; not all of it, where it failed."""

    weights: dict[str, int] = field(default_factory=dict)  # a checksum of each, as built
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    trained: tuple[str, ...] | None = None
    reached: tuple[str, ...] | None = None  # None: the step has not come to its end
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    losses: tuple[str, ...] = ()
    states: tuple[bytes, ...] = ()  # of torch's random numbers, before and after the step
    error: str = ""


def run_parts(
    program: Program, layout: Layout, parts: Sequence[BatchPart], *,
    mesh: Any = None, only: str | None = None, run: RankRun | None = None,
) -> RankRun:  # fmt: skip
    """Run the step of each part on a module built and wrapped anew, and return its gradients."""
    # `only`: one of the losses that the step returns by name. `run` is filled also if this raises.
    run = run or RankRun()
    with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(program.seed)
        module = program.build()
        if not isinstance(module, nn.Module):
            fix = "return the module: def build(): return Model()"
            raise StructureError(message("build()", "a module", describe(module), fix))
        run.weights = {name: _checksum(one) for name, one in module.named_parameters()}
        run.dtypes = {name: param.dtype for name, param in module.named_parameters()}
        wrapped = layout.wrap(module, mesh)
        group = None if mesh is None else dist.new_group(backend="gloo")
        run.trained = _trained(wrapped, run)
        if len({*_of_all_ranks(run.trained, group)}) > 1:
            raise RuntimeError("some ranks train other parameters, and all would wait")
        before = _random_state()
        for part in parts:
            _backward(program.step(wrapped, part), run, len(parts), only)
        run.states = before, _random_state()
        _read_grads(wrapped, run, group)
    return run


def _backward(result: Any, run: RankRun, micro_batches: int, only: str | None) -> None:
    if result is None:
        return
    losses = dict(result) if isinstance(result, Mapping) else {"loss": result}
    run.losses = tuple(losses)
    for name, loss in losses.items():
        if not isinstance(loss, Tensor):
            fix = "return a loss, a dict of losses, or None after .backward()"
            raise StructureError(message(f"step(): {name}", "a tensor", describe(loss), fix))
    chosen = losses.values() if only is None else [losses[only]]
    reference_backward([loss / micro_batches for loss in chosen])


def _read_grads(wrapped: nn.Module, run: RankRun, group: Any) -> None:
    """Read the gradients of all parameters, whole, where all ranks have one."""
    params = _params(wrapped, run)
    run.reached = tuple(name for name, param in params.items() if param.grad is not None)
    trained, run.trained = run.trained, _trained(wrapped, run)
    if trained != run.trained:
        raise RuntimeError("the step has changed requires_grad")
    everywhere = set.intersection(*map(set, _of_all_ranks(run.reached, group)))
    for name, param in params.items():
        run.grads[name] = None
        if param.grad is not None and name in everywhere:
            grad = full_tensor(param.grad.detach()).to_dense().cpu()
            wide = torch.complex128 if grad.is_complex() else torch.float64
            run.grads[name] = grad.to(wide, copy=True)


def _trained(wrapped: nn.Module, run: RankRun) -> tuple[str, ...]:
    return tuple(name for name, param in _params(wrapped, run).items() if param.requires_grad)


def _params(wrapped: nn.Module, run: RankRun) -> dict[str, Tensor]:
    """Return the parameters by the names that they had before they were wrapped."""
    params: dict[str, Tensor] = {}
    for name, param in wrapped.named_parameters():
        for prefix in _WRAPPERS:
            name = name.replace(prefix, "")
        params[name if name in run.weights else name.removeprefix("module.")] = param
    if params.keys() != run.weights.keys():
        expected, got = "a module with the parameters that build() made", f"{sorted(params)}"
        fix = "wrap with fully_shard, parallelize_module or DistributedDataParallel"
        raise StructureError(message("wrap", expected, got[:300], fix))
    return {name: params[name] for name in run.weights}


def _of_all_ranks(value: Any, group: Any) -> list[Any]:
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _checksum(tensor: Tensor) -> int:
    return int(tensor.detach().reshape(-1).view(torch.uint8).sum())


def _random_state() -> bytes:
    return bytes(torch.get_rng_state().tolist())


class Ranks:
    """Processes that run layouts together, each layout in a process group of its own."""

    def __init__(self, size: int, timeout: float) -> None:
        self._timeout, self._folder = timeout, tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        settings = size, timeout, self._folder.name, torch.get_default_dtype()
        self._processes = [
            context.Process(target=_serve, args=(rank, *settings, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, task: bytes) -> list[RankRun]:
        """Run a pickled program and layout; a rank that dies, or does not return, has an error."""
        runs = [RankRun(error="the process did not return") for _ in self._connections]
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(task)
        ranks, patience = {one: rank for rank, one in enumerate(self._connections)}, None
        while ranks and (ready := wait(ranks, patience)):
            patience = self._timeout + _LATER
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    runs[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    runs[rank].error = "the process ended"
        return runs

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.terminate()
            process.join(5)
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(
    rank: int, size: int, timeout: float, folder: str, dtype: torch.dtype, connection: Any
) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    warnings.simplefilter("ignore")  # those of the step are shown by the process of the call
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    limit = datetime.timedelta(seconds=timeout)
    for number in count():
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        run, rendezvous = RankRun(), f"file://{Path(folder) / str(number)}"
        try:
            program, layout = pickle.loads(task)
            dist.init_process_group("gloo", rendezvous, limit, size, rank)
            mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
            run_parts(program, layout, layout.parts(rank, size), mesh=mesh, run=run)
        except BaseException as error:
            run.error = f"{type(error).__name__}: {first_line(error)}"
        if dist.is_initialized():
            dist.destroy_process_group()  # which ends the waits of the other ranks
        connection.send_bytes(pickle.dumps(run))
