"""A run of a step in a layout, on one rank; and the processes that are the ranks."""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradkit._autograd.engine import reference_backward
from gradkit._compat.distributed import full_tensor
from gradkit.errors import NotScalarLossError, StructureError, describe, first_line, message

_START = datetime.timedelta(minutes=2)  # a process imports torch and the user's modules meanwhile


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
        wrap: Called with the module and a mesh, it returns what the step is called with. Parameters
            stay those of the module, as with `fully_shard`, `parallelize_module` and
            `DistributedDataParallel`. The mesh is one-dimensional, over all ranks; None in one
            process.
        ranks: `"divide"`: each rank computes its parts of the batch, as in data parallelism.
            `"repeat"`: each computes the whole batch, as in tensor parallelism. `"one"`: there is
            one process, that of the call.
        micro_batches: How many parts a process computes, one after the other.
    """

    name: str
    wrap: Callable[[nn.Module, Any], nn.Module] = field(default_factory=lambda: unwrapped)
    ranks: Literal["divide", "repeat", "one"] = "divide"
    micro_batches: int = 1

    def parts(self, rank: int = 0, world_size: int = 1) -> list[BatchPart]:
        """Return the parts that a rank computes."""
        rank, world_size = (rank, world_size) if self.ranks == "divide" else (0, 1)
        each = self.micro_batches
        return [BatchPart(rank * each + i, world_size * each, each) for i in range(each)]


@dataclass(frozen=True)
class Program:
    """What runs in each layout."""

    build: Callable[[], Any]
    step: Callable[[nn.Module, BatchPart], Any]
    seed: int = 0


@dataclass
class RankRun:
    """What a rank knows of a run; not all of it, where it failed."""

    weights: dict[str, int] = field(default_factory=dict)  # a checksum of each, as built
    trained: tuple[str, ...] | None = None
    reached: tuple[str, ...] | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    losses: tuple[str, ...] = ()
    states: tuple[bytes, ...] = ()  # of torch's random numbers, before and after the step
    error: str = ""


def run_parts(
    program: Program, layout: Layout, parts: Sequence[BatchPart], *,
    mesh: Any = None, only: str | None = None, run: RankRun | None = None,
) -> RankRun:  # fmt: skip
    """Run the step of each part on a module built and wrapped anew, and return its gradients."""
    # `only` names one of the losses that the step returns. `run` is filled also if this raises.
    run, group = run or RankRun(), None if mesh is None else dist.new_group(backend="gloo")
    with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(program.seed)
        module = program.build()
        if not isinstance(module, nn.Module):
            fix = "return the module: def build(): return Model()"
            raise StructureError(message("build()", "a module", describe(module), fix))
        for name, param in module.named_parameters():
            run.weights[name] = int(param.detach().reshape(-1).view(torch.uint8).sum())
        wrapped = layout.wrap(module, mesh)
        run.trained = _trained(module)
        if len({*_of_all_ranks(run.trained, group)}) > 1:
            raise RuntimeError("some ranks train other parameters, and all would wait")
        before = _random_state()
        for part in parts:
            _backward(program.step(wrapped, part), run, len(parts), only)
        run.states = before, _random_state()
        _read_grads(module, run, group)
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
        if loss.numel() != 1:
            expected, fix = "a loss of exactly one element", "return loss.mean(), or loss.sum()"
            raise NotScalarLossError(message(f"step(): {name}", expected, describe(loss), fix))
    chosen = [*losses.values()] if only is None else [losses[only]]
    with_graph = [loss / micro_batches for loss in chosen if loss.requires_grad]
    if with_graph or only is None:  # a lone loss without a graph is a constant of their sum
        reference_backward(with_graph or chosen)


def _read_grads(module: nn.Module, run: RankRun, group: Any) -> None:
    """Read the gradients of all parameters, whole, where all ranks have one."""
    params = dict(module.named_parameters())
    run.dtypes = {name: param.dtype for name, param in params.items()}
    run.reached = tuple(name for name, param in params.items() if param.grad is not None)
    before, run.trained = run.trained, _trained(module)
    if before != run.trained:
        raise RuntimeError("the step has changed requires_grad")
    everywhere = set.intersection(*map(set, _of_all_ranks(run.reached, group)))
    for name in filter(everywhere.__contains__, params):  # ranks take part in one order
        grad = full_tensor(params[name].grad).detach().to_dense().cpu()
        run.grads[name] = grad.to(torch.complex128 if grad.is_complex() else torch.float64)


def _trained(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, param in module.named_parameters() if param.requires_grad)


def _of_all_ranks(value: Any, group: Any) -> list[Any]:
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _random_state() -> bytes:
    return bytes(torch.get_rng_state().tolist())


@contextlib.contextmanager
def ranks(size: int, timeout: float) -> Iterator[Callable[[Program, Layout], list[RankRun]]]:
    """Start processes; yield what runs a layout on all of them, in a process group of its own."""
    earlier = {*multiprocessing.active_children()}
    # Each rank has a pool: its process is the same in all layouts, and ends no other if it dies.
    pools = [_started() for _ in range(size)]

    def run(program: Program, layout: Layout) -> list[RankRun]:
        with tempfile.TemporaryDirectory() as folder:
            given = size, timeout, f"{folder}/rendezvous", program, layout
            futures = [_submitted(pools, rank, given) for rank in range(size)]
            return [_result(future) for future in futures]

    try:
        yield run
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in {*multiprocessing.active_children()} - earlier:
            process.terminate()


def _started() -> ProcessPoolExecutor:
    context, dtype = multiprocessing.get_context("spawn"), torch.get_default_dtype()
    pool = ProcessPoolExecutor(1, context, _prepare, (dtype,))
    pool.submit(os.getpid)  # the first task starts the process
    return pool


def _submitted(pools: list[ProcessPoolExecutor], rank: int, given: Any) -> Future[RankRun]:
    try:
        return pools[rank].submit(_rank, rank, *given)
    except BrokenProcessPool:  # an earlier layout has ended the process
        pools[rank] = _started()
        return pools[rank].submit(_rank, rank, *given)


def _result(future: Future[RankRun]) -> RankRun:
    try:
        return future.result()
    except BrokenProcessPool:
        return RankRun(error="the process ended; in a script, is parity called under __main__?")


def _prepare(dtype: torch.dtype) -> None:
    # The module keeps the group of its import, and the connections, for good: there is none yet.
    from torch.distributed.nn import functional  # noqa: F401

    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    warnings.simplefilter("ignore")  # those of the step are shown by the process of the call
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def _rank(
    rank: int, size: int, timeout: float, rendezvous: str, program: Program, layout: Layout
) -> RankRun:
    run, limit = RankRun(), datetime.timedelta(seconds=timeout)
    try:
        store = dist.FileStore(rendezvous, size)  # type: ignore[attr-defined]
        store.set(f"started {rank}", "")  # others wait longer for this than for a collective
        store.wait([f"started {other}" for other in range(size)], limit + _START)
        dist.init_process_group("gloo", None, limit, size, rank, store)
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        run_parts(program, layout, layout.parts(rank, size), mesh=mesh, run=run)
    except Exception as error:
        run.error = f"{type(error).__name__}: {first_line(error)}"
    finally:
        if dist.is_initialized():
            gc.collect()  # a module of DDP's would keep the connections, for which others wait
            dist.destroy_process_group()
    return run
