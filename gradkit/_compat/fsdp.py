"""Private names of `torch.distributed.fsdp`: states of modules, their groups of sharded parameters.

Modules are looked up, not imported: a process that has not imported FSDP has no such module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn

# The node that the forward pass of a sharded module adds. Run on torch 2.13.
POST_BACKWARD = "RegisterPostBackwardFunctionBackward"


def module_classes() -> tuple[type, ...]:
    """Return the classes of modules that FSDP has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on an FSDP module. Run on torch 2.13."""
    return hasattr(module, "_get_fsdp_state")


def states_of(modules: Iterable[Any]) -> list[Any]:
    """Return the states of `fully_shard` modules and of all that share a root. Run on torch 2.13.

    A backward pass through one module writes the `.grad` of every other one in the graph.
    """
    states = [module._get_fsdp_state() for module in modules]
    together = [other for state in states for other in (state, *state._state_ctx.all_states)]
    return list({id(state): state for state in together}.values())


def all_states() -> Iterator[Any]:
    """Yield the states of all `fully_shard` modules of this process. Run on torch 2.13."""
    composable = sys.modules.get("torch.distributed._composable_state")
    for state in list(getattr(composable, "_module_state_mapping", {}).values()):
        alive = state() if isinstance(state, ref) else state
        if type(alive).__name__ == "FSDPState":
            yield alive


def groups_of(states: Iterable[Any]) -> list[Any]:
    """Return the parameter groups that states manage. Run on torch 2.13."""
    groups: list[Any] = []
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def shards_of(groups: Iterable[Any]) -> list[Any]:
    """Return the shards of groups: each knows its `sharded_param`. Run on torch 2.13."""
    return [shard for group in groups for shard in group.fsdp_params]


def unsharded_param(shard: Any) -> Tensor | None:
    """Return the parameter that stands in the graph; None before a forward. Run on torch 2.13."""
    param: Tensor | None = getattr(shard, "_unsharded_param", None)
    return param


def module_params(shard: Any) -> list[Tensor]:
    """Return the tensors that a module may show as this parameter. Run on torch 2.13."""
    resharded: Tensor | None = getattr(shard, "_sharded_post_forward_param", None)
    params = (shard.sharded_param, unsharded_param(shard), resharded)
    return [param for param in params if param is not None]


def synchronizes(group: Any) -> bool:
    """Return whether the next backward pass reduces the gradients of a group. Run on torch 2.13."""
    return bool(group.reduce_grads and group.all_reduce_grads)


def has_unreduced_grads(group: Any) -> bool:
    """Return whether earlier backward passes left gradients to be reduced. Run on torch 2.13."""
    waiting = [getattr(group, "_partial_reduce_output", None)]
    for shard in group.fsdp_params:
        param = unsharded_param(shard)
        waiting += [shard.unsharded_accumulated_grad, None if param is None else param.grad]
    return any(grad is not None for grad in waiting)


def reset_iteration(states: Iterable[Any]) -> None:
    """Let later steps reduce, after a backward pass that was aborted. Run on torch 2.13."""
    for state in states:
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
