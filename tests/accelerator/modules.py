"""What torch's Python side has for a device: `torch.cuda`, or a module for another kind."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

DEVICES = 2


def complete(kind: str) -> None:
    """Give torch the Python side of a device whose library has started."""
    _refuse_replicas(kind)
    if kind == "cuda":
        _complete_cuda(torch.cuda)
        return
    rename_privateuse1_backend(kind)
    module: Any = ModuleType(f"torch.{kind}")
    sys.modules[module.__name__] = module
    _complete_any(module, kind)
    module._is_in_bad_fork = lambda: False
    module.device = _Current
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(kind, module)
    generate_methods_for_privateuse1_backend()


def _refuse_replicas(kind: str) -> None:
    """Have DistributedDataParallel raise for modules on the device: it ends the process there."""
    replicas: Any = nn.parallel.DistributedDataParallel
    init = replicas.__init__

    def refuse(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(param.device.type == kind for param in module.parameters()):
            raise NotImplementedError(f"Could not run 'DDP' with arguments from {kind}")
        init(self, module, *args, **kwargs)

    replicas.__init__ = refuse


class _Current:
    """A block in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = torch.ops.emulated.device()
        if self.index >= 0:
            torch.ops.emulated.exchange_device(self.index)

    def __exit__(self, *_: object) -> None:
        torch.ops.emulated.exchange_device(self.before)


def _index(device: Any) -> int:
    """Return the number of a device; -1 for the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return -1 if index is None else index


def _complete_any(module: Any, kind: str) -> None:
    """Give a module what torch.random, torch.amp and torch.utils.checkpoint look for in one."""
    emulated = torch.ops.emulated

    def generator(device: Any) -> torch.Generator:
        return emulated.generator(_index(device))

    def manual_seed_all(seed: int) -> None:
        for index in range(DEVICES):
            generator(index).manual_seed(seed)

    module._initialized = True
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = emulated.device
    module.set_device = lambda device: emulated.exchange_device(_index(device))
    module.get_rng_state = lambda device=kind: generator(device).get_state()
    module.set_rng_state = lambda state, device=kind: generator(device).set_state(state)
    module.manual_seed = lambda seed: generator(-1).manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.default_generators = tuple(map(generator, range(DEVICES)))
    module.Stream = lambda device=kind, priority=0: torch.Stream(device, priority=priority)
    module.Event = lambda *_, **__: torch.Event(kind)
    # Another function than torch's, of which torch.compile knows each once.
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.stream = lambda stream: stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)


def _complete_cuda(cuda: Any) -> None:
    """Have `torch.cuda` find what its C++ side has where torch is built with CUDA."""
    emulated = torch.ops.emulated
    _complete_any(cuda, "cuda")
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **_: call()
    cuda._sleep = lambda cycles: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda._exchange_device = emulated.exchange_device
    cuda._maybe_exchange_device = lambda to: (
        emulated.device() if to < 0 else emulated.exchange_device(to)
    )
    cuda.set_sync_debug_mode = lambda mode: emulated.let_waits_raise(mode == "error")
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.random.manual_seed_all = cuda.manual_seed_all
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    with warnings.catch_warnings():  # of torch's own, when torch.compile first imports it
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch.utils.mkldnn")
    storage: Any = torch.UntypedStorage
    storage.__new__ = _new_storage


def _new_storage(cls: type, size: Any = 0, *, device: Any = "cpu") -> torch.UntypedStorage:
    if torch.device(device).type == "cuda" and isinstance(size, int):
        with torch._C._DisableFuncTorch():
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    base: Any = torch._C.StorageBase
    made: torch.UntypedStorage = base.__new__(cls, size, device=device)
    return made
