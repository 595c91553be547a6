"""Running a computation a second time as if it had run once.

The second run draws the same random numbers, uses the same autocast and attention kernels, and
reads what memory held before the first run wrote to it. Afterwards all of that is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.tensors import TorchDispatchMode
from gradkit._state import rng, storage_writes
from gradkit._state.storage_writes import StorageWrites
from gradkit.errors import UnsupportedGraphError, message


class RecomputeState:
    """The state that a computation of some tensors starts from, to run it a second time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._rng = rng.states(tensors)
        devices = {"cpu", *(t.device.type for t in tensors)}
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in devices
        ]
        self._kernels = _attention_kernels()
        self._writes = StorageWrites()
        self._checksums: list[Tensor] = []

    def first_run(self) -> TorchDispatchMode:
        """Return the context of the first run."""
        return self._writes

    def record_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Remember checksums of the first run's outputs."""
        self._checksums = _checksums(outputs)

    def check_outputs(self, outputs: Sequence[Tensor], where: str) -> None:
        """Raise if the second run's outputs differ from the first's."""
        for first, second in zip(self._checksums, _checksums(outputs), strict=True):
            # Equal up to what a parallel sum may change; nan where the loss has diverged.
            close = 1e3 * torch.finfo(first.dtype).eps * first.abs().nan_to_num().max()
            if first.dtype != second.dtype or not torch.allclose(
                first, second, rtol=0.0, atol=float(close), equal_nan=True
            ):
                raise UnsupportedGraphError(
                    message(
                        where,
                        "a function that gives the same when it runs again, in the backward pass",
                        "another result than before: it reads something that has changed since (a "
                        "variable of a loop, a module, a list), or draws from its own generator",
                        'pass what changes in batches or outer; or memory="store"',
                    )
                )

    def undo(self) -> None:
        """Put back what the first run changed."""
        rng.restore(self._rng)
        storage_writes.restore(self._writes.snapshots)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Restore the state of the first run inside the block, and today's after it."""
        now = storage_writes.current(self._writes.snapshots)
        kernels = _attention_kernels()
        devices = [device.index for device, _ in self._rng if device.type != "cpu"]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            rng.restore(self._rng)
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
            try:
                _enable_attention_kernels(self._kernels)
                storage_writes.restore(self._writes.snapshots)
                yield
            finally:
                _enable_attention_kernels(kernels)
                storage_writes.restore(now)


def _checksums(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [_checksum(x.detach()) for x in outputs if x.is_floating_point() and x.numel()]


def _checksum(x: Tensor) -> Tensor:
    """Return the sum of the values, of their sizes, and one that depends on their order."""
    # In half precision a sum could not tell a change from rounding.
    x = x.flatten().to(torch.promote_types(x.dtype, torch.float32))
    ramp = torch.linspace(0, 1, len(x), dtype=x.dtype, device=x.device)
    return torch.stack([x.sum(), x.abs().sum(), (x * ramp).sum()])


def _attention_kernels() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda  # its functions have no types
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _enable_attention_kernels(kernels: tuple[bool, ...]) -> None:
    if kernels != _attention_kernels():
        flash, efficient, math, cudnn = kernels
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)
        torch.backends.cuda.enable_math_sdp(math)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
