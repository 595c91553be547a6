"""Parameters that `fully_shard` manages, whose gradients would be missing or local."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from weakref import ref

from torch import Tensor

from gradkit._core.inputs import Params
from gradkit._core.leaf import is_dtensor
from gradkit._core.ownership import PLAIN_TYPES
from gradkit.errors import UnsupportedGraphError, message


def refuse_gathered(params: Params) -> None:
    """Raise if params are those of a `fully_shard` module between its forward and backward."""
    gathered = gathered_params()
    for index, variable in enumerate(params.variables if gathered else ()):
        if id(variable) in gathered:
            raise UnsupportedGraphError(
                message(
                    params.path(index),
                    "a parameter of this process, or a shard of one",
                    "one that fully_shard has gathered for the backward pass: its gradient would "
                    "not be reduced, and its .grad is that of no shard",
                    "gradkit.distributed.value_and_grads(losses, module); or make the call before "
                    "the forward pass, or after the backward pass",
                )
            )


def refuse_unreached_shard(params: Params, index: int) -> None:
    """Raise if an unreached variable is a shard: the graph holds the unsharded parameter."""
    variable = params.variables[index]
    if type(variable) not in PLAIN_TYPES and may_be_sharded(variable):
        raise UnsupportedGraphError(
            message(
                params.path(index),
                "a parameter that the losses reach",
                "a DTensor that they do not: the parameters of a fully_shard module are not in the "
                "graph",
                "call gradkit.distributed.value_and_grads(losses, module)",
            )
        )


def may_be_sharded(variable: Tensor) -> bool:
    """Return whether this could be a parameter of a `fully_shard` module."""
    return is_dtensor(variable) and any(True for _ in _fsdp_states())


def gathered_params() -> set[int]:
    """Return the ids of the tensors into which `fully_shard` gathers the shards of parameters.

    Until the backward pass has ended, a module may show them as its parameters: plain ones, in a
    graph that need not hold any node of `fully_shard`, and their gradients are this process's [M9].
    """
    groups = [group for state in _fsdp_states() for group in fsdp_groups(state)]
    shards = [shard for group in groups for shard in group.fsdp_params]
    return {id(shard._unsharded_param) for shard in shards if hasattr(shard, "_unsharded_param")}


def fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that `fully_shard` manages for a module."""
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def _fsdp_states() -> Iterator[Any]:
    composable = sys.modules.get("torch.distributed._composable_state")
    modules = getattr(composable, "_module_state_mapping", {})
    for state in list(modules.values()):
        alive = state() if isinstance(state, ref) else state
        if type(alive).__name__ == "FSDPState":
            yield alive
