"""Running something a second time as if it had run once.

The random numbers are drawn from the state of the first time, casts and kernels are chosen as then,
and what was written on is put back to what it held, for the while. That it came out the same is
checked by what came out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradkit._state import rng
from gradkit.errors import UnsupportedGraphError, message


class Replay:
    """What is needed to run something again.

    Args:
        tensors: What it is given; their devices are those whose state counts.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._random = rng.states(tensors)
        devices = {"cpu", *(t.device.type for t in tensors)}
        self._casts = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in devices
        ]
        self._kernels = _kernels()
        self._writes = _Writes()
        self._print: list[Tensor] = []

    def recording(self) -> TorchDispatchMode:
        """Return the context of the first time."""
        return self._writes

    def record_outputs(self, results: Sequence[Tensor]) -> None:
        """Remember what came out the first time."""
        self._print = _prints(results)

    def check(self, results: Sequence[Tensor], where: str) -> None:
        """Raise if something else came out this time.

        Args:
            results: What came out.
            where: The name of the function, for the error.

        Raises:
            UnsupportedGraphError: So it is.
        """
        for was, now in zip(self._print, _prints(results), strict=True):
            # Sums: equal up to what a parallel sum may change. They may be nan: it has diverged.
            close = 1e3 * torch.finfo(was.dtype).eps * was.abs().nan_to_num().max()
            if was.dtype != now.dtype or not torch.allclose(
                was, now, rtol=0.0, atol=float(close), equal_nan=True
            ):
                raise UnsupportedGraphError(
                    message(
                        where,
                        "a function that gives the same when it runs again, in the backward pass",
                        "another result than before: it reads something that has changed since (a "
                        "variable of a loop, a module, a list), or a generator of its own",
                        'pass what changes in batches or outer; or memory="store"',
                    )
                )

    def undo(self) -> None:
        """Put back what the first time has changed, as if it had not been."""
        rng.restore(self._random)
        for storage, held in self._writes.before:
            storage.copy_(held)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Be in the state of the first time, and leave everything as it is now."""
        now = [(storage, _copy(storage)) for storage, _ in self._writes.before]
        kernels = _kernels()
        devices = [device.index for device, _ in self._random if device.type != "cpu"]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            rng.restore(self._random)
            for device, enabled, dtype in self._casts:
                stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
            try:
                _choose(self._kernels)
                for storage, held in self._writes.before:
                    storage.copy_(held)  # unseen by version counters: it comes back as it was
                yield
            finally:
                _choose(kernels)
                for storage, held in now:
                    storage.copy_(held)


def _prints(results: Sequence[Tensor]) -> list[Tensor]:
    return [_print(x.detach()) for x in results if x.is_floating_point() and x.numel()]


def _print(x: Tensor) -> Tensor:
    """Return sums of the numbers, of their sizes, and one that tells their order."""
    # In half precision a sum could not tell a change from rounding.
    x = x.flatten().to(torch.promote_types(x.dtype, torch.float32))
    ramp = torch.linspace(0, 1, len(x), dtype=x.dtype, device=x.device)
    return torch.stack([x.sum(), x.abs().sum(), (x * ramp).sum()])


def _kernels() -> tuple[bool, ...]:
    # Those of the fused attentions, in the order of `_choose`; the functions have no types.
    cuda: Any = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _choose(kernels: tuple[bool, ...]) -> None:
    if kernels != _kernels():
        flash, efficient, math, cudnn = kernels
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)
        torch.backends.cuda.enable_math_sdp(math)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what was in memory from outside before it is first written on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        # Memory that was made meanwhile, and need not be kept; and what is kept.
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for place, name in _written(func):
            self._keep(args[place] if place < len(args) else kwargs.get(name))
        out = func(*args, **kwargs)
        if _makes(func):
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, Tensor) and one.layout == torch.strided:
                    self._known.add(one.untyped_storage()._cdata)
        return out

    def _keep(self, written: Any) -> None:
        for tensor in written if isinstance(written, tuple | list) else (written,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.before.append((storage, _copy(storage)))


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return cast("torch.UntypedStorage", storage.clone())  # type: ignore[no-untyped-call]


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Return the arguments that an operator writes on."""
    if func.overloadpacket.__name__ in _UNTOLD:
        return _UNTOLD[func.overloadpacket.__name__]
    arguments = func._schema.arguments
    return [
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@cache
def _makes(func: Any) -> bool:
    """Return whether what an operator returns is new, and no view of what it was given."""
    return all(result.alias_info is None for result in func._schema.returns)


# Their schemas do not say that the running statistics are written on.
_STATISTICS = [(3, "running_mean"), (4, "running_var")]
_UNTOLD: dict[str, list[tuple[int, str]]] = {
    "native_batch_norm": _STATISTICS,
    "cudnn_batch_norm": _STATISTICS,
    "miopen_batch_norm": _STATISTICS,
}
