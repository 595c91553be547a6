"""Parameters that `fully_shard` manages, whose gradients would be missing or local."""

from __future__ import annotations

from torch import Tensor

from gradkit._compat import fsdp
from gradkit._compat.dtensor import is_dtensor
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import Params
from gradkit.errors import UnsupportedGraphError, message


def refuse_gathered(params: Params) -> None:
    """Raise if params are those of a `fully_shard` module between its forward and backward."""
    gathered = _gathered_params()
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
    return is_dtensor(variable) and any(True for _ in fsdp.all_states())


def _gathered_params() -> set[int]:
    """Return the ids of the unsharded parameters into which `fully_shard` gathers shards.

    Until the backward pass has ended, a module may show them as its parameters: plain tensors, in a
    graph that need not hold any node of `fully_shard`. Their gradients are not synchronized [M9].
    """
    shards = fsdp.shards_of(fsdp.groups_of(fsdp.all_states()))
    return {id(param) for shard in shards if (param := fsdp.unsharded_param(shard)) is not None}
