"""Running a computation a second time as if it had run once, and checking that it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from gradkit._compat import autograd
from gradkit._compat.distributed import local_tensor
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import transforms
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit._core.ownership import written_arguments, written_tensors
from gradkit._core.user_code import is_floating
from gradkit._state import rng
from gradkit._state.module_state import ModuleSnapshot, modules_put_back, state_now
from gradkit.errors import UnsupportedGraphError, message

Kind: TypeAlias = tuple[torch.device, torch.dtype]
Checksums: TypeAlias = dict[Kind, Tensor]  # `[n, 2]`, two numbers for each of n tensors


def checksums(outputs: Sequence[Tensor]) -> Checksums:
    """Return numbers that tell the values of one run from those of another."""
    groups: dict[Kind, list[Tensor]] = {}
    with torch.no_grad(), INSIDE:
        for x in outputs:
            x = local_tensor(x.detach())
            if is_floating(x) and x.numel():
                x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
                # A sum in half precision could not tell a change from rounding.
                x = x.flatten().to(torch.promote_types(x.dtype, torch.float32))
                groups.setdefault((x.device, x.dtype), []).append(x)
        return {key: _checksums(group) for key, group in groups.items()}


def _checksums(xs: list[Tensor]) -> Tensor:
    """Return for each vector the sum of its sizes, and a sum that depends on order and sign."""
    # torch's 1-norm takes three times as long as this sum, and its 2-norm overflows.
    sums = [x.sum() for x in torch._foreach_abs(xs)]
    sums += map(torch.dot, xs, map(_ramp, xs))
    return torch.stack(sums).view(2, len(xs)).t()


# A ramp takes longer on the CPU than the rest. Elsewhere, other streams would have to wait for it.
_ramps: dict[tuple[int, torch.dtype], Tensor] = {}
_MOST_RAMPS, _LONGEST_RAMP = 16, 1 << 18


def _ramp(x: Tensor) -> Tensor:
    """Return as many weights from 0.5 to 1 as a vector has elements."""
    key = x.numel(), x.dtype
    is_kept = type(x) is Tensor and x.device.type == "cpu" and key[0] <= _LONGEST_RAMP
    if is_kept and key in _ramps:
        return _ramps[key]
    ramp = torch.linspace(0.5, 1, key[0], dtype=x.dtype, device=x.device)
    if is_kept and type(ramp) is Tensor:
        if len(_ramps) >= _MOST_RAMPS:
            _ramps.clear()
        _ramps[key] = ramp
    return ramp


_FEW = 1 << 10


def remembered(outputs: Sequence[Tensor]) -> list[Tensor] | Checksums:
    """Return what is kept of a first run's outputs: copies of few numbers, which are faster."""
    xs = list(filter(is_floating, outputs))
    # Elsewhere than on the CPU, the host would wait for each comparison.
    if transforms() or not all(map(_is_plain, xs)) or sum(map(Tensor.numel, xs)) > _FEW:
        return checksums(outputs)
    return [x.detach().clone() for x in xs]


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.device.type == "cpu" and x.layout == torch.strided


def _has_values(x: Tensor, copy: Tensor) -> bool:
    return _is_plain(x) and x.dtype == copy.dtype and torch.equal(x, copy)


def _differs(first: Tensor, second: Tensor) -> Tensor:
    """Return, on the device, whether some checksums of two runs differ."""
    # Checksums are equal up to what a parallel sum may change, or both nan: the loss has diverged.
    size = first.abs().nan_to_num().amax(1, keepdim=True)
    gap = (first - second).abs()
    is_close = gap.isfinite() & (gap <= 1e3 * torch.finfo(first.dtype).eps * size)
    is_same = (first == second) | (first.isnan() & second.isnan())
    return ~(is_close | is_same).all()


class Differences:
    """Whether some second runs differ from their first, on the device until it is read."""

    def __init__(self) -> None:
        self._differ: dict[tuple[torch.device, str], list[Tensor]] = {}

    def add(self, differs: Tensor, where: str) -> None:
        """Add a comparison: a 0-dim tensor, and the function that ran twice."""
        self._differ.setdefault((differs.device, where), []).append(differs)

    def read(self) -> None:
        """Raise if a run differs."""
        while self._differ:
            (_, where), differ = self._differ.popitem()
            if not differ[0].is_meta and torch.stack(differ).any():
                raise different_result(where)


def different_result(where: str) -> UnsupportedGraphError:
    """Return the error for a second run that differs."""
    expected = "a function that gives the same when it runs again, in the backward pass"
    got = "another result than before: it reads something that has changed since (a variable of a "
    got += "loop, a module, a list), or draws from its own generator"
    fix = "pass what changes as an argument, in the batch, say; or run it once: without "
    fix += 'checkpoint, memory="store", chunk_size=None'
    return UnsupportedGraphError(message(where, expected, got, fix))


@dataclass
class SecondRun:
    """A second run that is under way, and where it adds how it differs."""

    first: list[Tensor] | Checksums
    differences: Differences
    is_open: bool = field(default=True, init=False)

    def compare(self, outputs: Sequence[Tensor], where: str) -> None:
        """Compare the outputs with the first run's; the pass raises before it returns."""
        first = self.first
        if isinstance(first, list):
            xs = list(filter(is_floating, outputs))
            if len(xs) == len(first) and not transforms() and all(map(_has_values, xs, first)):
                return
            first = checksums(first)
        second = checksums(outputs)
        lengths = [{key: len(sums) for key, sums in run.items()} for run in (first, second)]
        if lengths[0] != lengths[1]:
            raise different_result(where)
        for key, checksum in second.items():
            self.differences.add(_differs(first[key], checksum), where)


_NO_PASS = -1
# The second run that this code runs in.
_innermost: ContextVar[SecondRun | None] = ContextVar("innermost", default=None)
# A pass that fails calls nothing back: with it, its entry is gone.
_of_passes: WeakValueDictionary[int, Differences] = WeakValueDictionary()


@contextmanager
def as_second_run(first: list[Tensor] | Checksums, around: SecondRun | None) -> Iterator[SecondRun]:
    """Run the block as a second run; `around` is the one in which its first run was, if any."""
    # The results of a second run may be differentiated after it, in a pass of their own.
    is_inner = around is not None and around.is_open
    differences = around.differences if around is not None and is_inner else _of_this_pass()
    run = SecondRun(first, differences)
    before = _innermost.get()

    def end() -> None:
        run.is_open = False
        _innermost.set(before)

    with undone(end):
        _innermost.set(run)
        try:
            yield run
        except Exception:
            differences.read()  # a run that differs is the reason
            raise
    if autograd.current_pass() == _NO_PASS:
        differences.read()  # a node that was called by hand


def _of_this_pass() -> Differences:
    """Return the differences that are read at the end of the pass that runs here."""
    number = autograd.current_pass()
    if number == _NO_PASS:
        return Differences()
    differences = _of_passes.get(number)
    if differences is None:
        differences = _of_passes[number] = Differences()
        autograd.at_end_of_pass(differences.read)
    return differences


class RerunState:
    """The state that a computation of some tensors starts from, to run it a second time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        _refuse_capture()
        self._rng = rng.states()
        every: list[Any] = [*(t.device for t in tensors), *(one for one, _ in self._rng)]
        devices = {one.type for one in every} - {"meta"}
        self._autocast = list(map(_autocast, devices))
        self._kernels = attention_kernels()
        self._writes = _StorageWrites()
        # Whether an operator of the first run made a tensor; until outputs are recorded.
        self.made = self._writes.has_made
        self._first: list[Tensor] | Checksums = {}
        self._around = _innermost.get()
        kept = state_now()
        self._modules = [] if kept is None else [one.module for one in kept.snapshots.values()]
        self._module_states = list(map(ModuleSnapshot, self._modules))

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Run the block the first time; copy what `recording_writes` blocks in it write to."""
        with undone(partial(_writes_of_run.set, _writes_of_run.get())):
            _writes_of_run.set(self._writes)
            yield

    def record_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Remember the first run's outputs."""
        self._first = remembered(outputs)
        self._writes.made.clear()

    def put_back(self) -> None:
        """Undo what the first run has written and drawn."""
        _restore(self._writes.snapshots)
        rng.restore(self._rng)

    @contextmanager
    def second_run(self) -> Iterator[SecondRun]:
        """Restore the state of the first run inside the block, and today's after it."""
        _refuse_capture()
        now = [(storage, _copied_storage(storage)) for storage, _ in self._writes.snapshots]
        kernels = attention_kernels()
        states = rng.current(self._rng)
        with undo_stack() as stack:
            stack.enter_context(undone(partial(rng.restore, states)))
            stack.enter_context(modules_put_back(self._modules))
            for snapshot in self._module_states:
                snapshot.restore()
            rng.restore(self._rng)
            for device, enabled, dtype in self._autocast:
                if (device, enabled, dtype) != _autocast(device):
                    stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
            stack.enter_context(undone(partial(enable_attention_kernels, kernels)))
            stack.enter_context(undone(partial(_restore, now)))
            enable_attention_kernels(self._kernels)
            _restore(self._writes.snapshots)
            with as_second_run(self._first, self._around) as run:
                yield run


def _refuse_capture() -> None:
    """Raise where a graph of CUDA's is captured, in which no random state can be put back."""
    if rng.is_capturing():
        expected = "what runs again in the backward pass outside of the capture of a CUDA graph"
        got = "one inside, where no random state can be read, or put back"
        fix = 'capture without the recomputation: fn itself, memory="store", no chunk_size'
        raise UnsupportedGraphError(message("a step that is computed again", expected, got, fix))


def _autocast(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_KERNELS_ENABLED = [getattr(torch.backends.cuda, f"{x}_sdp_enabled") for x in _ATTENTION_KERNELS]


def attention_kernels() -> list[bool]:
    """Return which kernels of scaled_dot_product_attention are enabled."""
    return [is_enabled() for is_enabled in _KERNELS_ENABLED]


def enable_attention_kernels(kernels: list[bool]) -> None:
    """Enable these kernels, in the order of `attention_kernels`."""
    if kernels != attention_kernels():
        for name, enabled in zip(_ATTENTION_KERNELS, kernels, strict=True):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


Snapshots: TypeAlias = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]


class _StorageWrites(autograd.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies each storage from outside before an operator first writes to it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.snapshots: Snapshots = []
        self.made: dict[int, ref[Tensor]] = {}  # the results of operators, by id
        self._known: set[int] = set()  # storages that need no copy

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        may_write, allocates = _effects(func)
        written = written_tensors(func, args, kwargs or {}) if may_write else []
        for tensor in written:
            # Memory that is allocated inside, or was copied already, needs no copy.
            if tensor.layout == torch.strided and autograd.storage_key(tensor) not in self._known:
                self._known.add(autograd.storage_key(tensor))
                storage = tensor.untyped_storage()
                self.snapshots.append((storage, _copied_storage(storage)))
        out = func(*args, **kwargs) if kwargs else func(*args)
        for result in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(result, Tensor):
                continue
            if not written:  # a tensor that is written is returned, often
                self.made[id(result)] = ref(result)
            if allocates and result.layout == torch.strided:
                self._known.add(autograd.storage_key(result))
        return out

    def has_made(self, tensor: Tensor) -> bool:
        made = self.made.get(id(tensor))
        return made is not None and made() is tensor


_writes_of_run: ContextVar[_StorageWrites | None] = ContextVar("writes_of_run", default=None)


def what_first_run_made() -> Callable[[Tensor], bool] | None:
    """Return what tells which tensors operators of the first run around have made, if any is."""
    writes = _writes_of_run.get()
    return None if writes is None else writes.has_made


@contextmanager
def recording_writes() -> Iterator[None]:
    """Run code that may write to memory from outside; a first run around it copies that before."""
    # gradkit's and torch's own computations need none: recording an operator takes longer than
    # running a small one.
    writes = _writes_of_run.get()
    if writes is None:
        yield
        return
    with undone(partial(_writes_of_run.set, writes)), writes, INSIDE:
        _writes_of_run.set(None)  # the code inside is recorded already
        yield


def _restore(snapshots: Snapshots) -> None:
    """Write the copies back to their storages; version counters do not count it."""
    for storage, copy in snapshots:
        storage.copy_(copy)


def _copied_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return cast("torch.UntypedStorage", storage.clone())  # type: ignore[no-untyped-call]


@cache
def _effects(func: Any) -> tuple[bool, bool]:
    """Return whether an operator may write, and whether its results are new: no views of others."""
    schema = autograd.operator_schema(func)
    if schema is None:
        got = f"torch.{func}, which runs functions whose operations torch does not show"
        expected = "operations that can run a second time"
        fix = 'torch.where, or an if or a loop of Python; or memory="store" in unroll'
        where = "a step that is computed again"
        raise UnsupportedGraphError(message(where, expected, got, fix))
    is_new = all(result.alias_info is None for result in schema.returns)
    return bool(written_arguments(func)), is_new
