"""Whether a second run came to what the first did: compared on the device, read once a pass.

Each number that the host reads makes it wait for the device, so the comparisons of all second runs
in a backward pass are read together when it is done, before it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gradkit._compat.autograd import at_end_of_pass, current_pass
from gradkit._compat.distributed import local_tensor
from gradkit._compat.undoing import INSIDE, undone
from gradkit.errors import UnsupportedGraphError, message

# For each device and dtype `[n, 3]`, three numbers for each of n tensors.
Checksums: TypeAlias = dict[tuple[torch.device, torch.dtype], Tensor]


def checksums(outputs: Sequence[Tensor]) -> Checksums:
    """Return numbers that tell the values of one run from those of another."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad(), INSIDE:
        for x in outputs:
            x = local_tensor(x.detach())
            if x.is_floating_point() and x.numel():
                # In half precision a sum could not tell a change from rounding.
                x = x.flatten().to(torch.promote_types(x.dtype, torch.float32))
                groups.setdefault((x.device, x.dtype), []).append(x)
        return {key: _checksums(group) for key, group in groups.items()}


def _checksums(xs: list[Tensor]) -> Tensor:
    """Return for each vector its sum, that of its sizes, and one that depends on its order."""
    ordered = torch._foreach_mul(xs, list(map(_ramp, xs)))
    sums = [x.sum() for x in (*xs, *torch._foreach_abs(xs), *ordered)]
    return torch.stack(sums).view(3, len(xs)).t()


# On the CPU a ramp takes longer than the rest. Elsewhere, other streams would have to wait for it.
_ramps: dict[tuple[int, torch.dtype], Tensor] = {}
_MOST_RAMPS, _LONGEST_RAMP = 16, 1 << 18


def _ramp(x: Tensor) -> Tensor:
    """Return as many weights from 0 to 1 as a vector has elements."""
    key = len(x), x.dtype
    is_kept = type(x) is Tensor and x.device.type == "cpu" and len(x) <= _LONGEST_RAMP
    if is_kept and key in _ramps:
        return _ramps[key]
    ramp = torch.linspace(0, 1, len(x), dtype=x.dtype, device=x.device)
    if is_kept and type(ramp) is Tensor:
        if len(_ramps) >= _MOST_RAMPS:
            _ramps.clear()
        _ramps[key] = ramp
    return ramp


def _lengths(sums: Checksums) -> dict[tuple[torch.device, torch.dtype], int]:
    return {key: len(group) for key, group in sums.items()}


def _differs(first: Tensor, second: Tensor) -> Tensor:
    """Return, on the device, whether some checksums of two runs differ."""
    # Equal up to what a parallel sum may change; nan where the loss has diverged.
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
            if torch.stack(differ).any():
                raise different_result(where)


def different_result(where: str) -> UnsupportedGraphError:
    """Return the error for a second run that differs."""
    expected = "a function that gives the same when it runs again, in the backward pass"
    got = "another result than before: it reads something that has changed since (a "
    got += "variable of a loop, a module, a list), or draws from its own generator"
    fix = 'pass what changes as an argument, in the batch, say; or run it once: memory="store", '
    fix += "chunk_size=None"
    return UnsupportedGraphError(message(where, expected, got, fix))


@dataclass
class SecondRun:
    """A second run that is under way, and where it adds how it differs."""

    first: Checksums
    differences: Differences
    is_open: bool = field(default=True, init=False)

    def compare(self, outputs: Sequence[Tensor], where: str) -> None:
        """Compare the outputs with the first run's; the pass raises before it returns."""
        second = checksums(outputs)
        if _lengths(self.first) != _lengths(second):
            raise different_result(where)
        for key, checksum in second.items():
            self.differences.add(_differs(self.first[key], checksum), where)


_NO_PASS = -1
_innermost: ContextVar[SecondRun | None] = ContextVar("innermost", default=None)
# A pass that fails calls nothing back: with it, its entry is gone.
_of_passes: WeakValueDictionary[int, Differences] = WeakValueDictionary()


def innermost_second_run() -> SecondRun | None:
    """Return the second run that this code runs in."""
    return _innermost.get()


@contextmanager
def as_second_run(first: Checksums, around: SecondRun | None) -> Iterator[SecondRun]:
    """Run the block as a second run; `around` is the one in which its first run was, if any."""
    # What a second run made may be differentiated after it, in a pass of its own.
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
            differences.read()  # which is the reason, if a run differs
            raise
    if current_pass() == _NO_PASS:
        differences.read()  # a node that was called by hand


def _of_this_pass() -> Differences:
    """Return the differences that are read at the end of the pass that runs here."""
    number = current_pass()
    if number == _NO_PASS:
        return Differences()
    differences = _of_passes.get(number)
    if differences is None:
        differences = _of_passes[number] = Differences()
        at_end_of_pass(differences.read)
    return differences
