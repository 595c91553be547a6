"""Private names of `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

# The node that a forward pass with static_graph or find_unused_parameters adds. Run on torch 2.13.
SINK = "_DDPSinkBackward"


def sink_is_static(node: Node) -> bool:
    """Return whether the module that added a `SINK` node has static_graph. Run on torch 2.13."""
    sink: Any = node
    return bool(sink.ddp_weakref().static_graph)


def is_joining(module: DistributedDataParallel) -> bool:
    """Return whether a module is inside of its join(). Run on torch 2.13."""
    return bool(module._join_config.enable)


def delays_all_reduce(module: DistributedDataParallel) -> bool:
    """Return whether a module has delay_all_reduce_named_params. Run on torch 2.13."""
    return bool(module._delay_all_reduce_params)


def comm_hooks(module: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the Python communication hooks of a module, with their states. Run on torch 2.13."""
    return list(module._comm_hooks)


def has_comm_hook(module: DistributedDataParallel) -> bool:
    """Return whether a module has a communication hook, C++ ones included. Run on torch 2.13."""
    # Only the log shows the C++ hooks.
    log: dict[str, object] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return bool(module._comm_hooks or log.get("comm_hook"))


def zero_buckets(module: DistributedDataParallel) -> list[Any]:
    """Return the gradient buckets of a module, filled with zeros. Run on torch 2.13."""
    return list(module.reducer._get_zeros_like_grad_buckets())


def run_comm_hook(module: DistributedDataParallel, bucket: Any) -> Tensor:
    """Return what the communication hook makes of a bucket's buffer. Run on torch 2.13."""
    reduced: Any = module.reducer._run_comm_hook(bucket).wait()
    tensor: Tensor = reduced if isinstance(reduced, Tensor) else reduced[0]
    return tensor
