"""Modules that are wrapped for several processes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gradkit._compat import fsdp
from gradkit.errors import UnsupportedGraphError, message


def refuse_distributed(module: nn.Module, where: Callable[[], str]) -> None:
    """Raise if a module is wrapped by DistributedDataParallel or FSDP."""
    sharded = fsdp.module_classes()
    for part in module.modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            kind = "a DistributedDataParallel module: its gradients would not be reduced"
        elif isinstance(part, sharded):
            kind = "a module sharded by FSDP: its sharded parameters are not in the graph"
        else:
            continue
        raise UnsupportedGraphError(
            message(
                where(),
                "a module of this process",
                kind,
                "gradkit.distributed.value_and_grads(losses, module), or "
                "gradkit.distributed.per_loss_grads, or loss.backward()",
            )
        )
