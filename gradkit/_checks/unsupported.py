"""Graphs and parameters whose gradients would be silently wrong, incomplete or local."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function, once_differentiable
from torch.autograd.graph import Node

from gradkit._compat.dtensor import is_dtensor
from gradkit._core.graph import leading_to
from gradkit.errors import UnsupportedGraphError, message

# Nodes in whose presence a functional gradient is silently incomplete or local [F1, M4, M5].
_REFUSED = {
    "CheckpointFunctionBackward": (
        "a graph without reentrant checkpoints",
        "one: autograd cannot see the parameters inside, and would leave out their gradient",
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    ),
    "_DDPSinkBackward": (
        "the forward pass of a plain module",
        "one of DistributedDataParallel (static_graph or find_unused_parameters), whose gradients "
        "would be this process's alone, and whose later backward() would stop reducing",
        "call gradkit.distributed.value_and_grads(losses, ddp), without static_graph; or run "
        "ddp.module(...) for the forward",
    ),
    "RegisterPostBackwardFunctionBackward": (
        "the forward pass of a plain module",
        "one of a fully_shard module, whose sharded parameters are not in the graph",
        "call gradkit.distributed.value_and_grads(losses, module)",
    ),
}


def refuse_hazards(kinds: set[type], where: str, allowed: Collection[str] = ()) -> None:
    """Raise if a graph holds a node that would make its gradients silently wrong.

    Args:
        kinds: The types of the nodes.
        where: The path of the loss, for the error.
        allowed: Names of such nodes that the caller sees to.

    Raises:
        UnsupportedGraphError: A reentrant checkpoint, DDP's static_graph, or FSDP's parameters.
    """
    for hazard in hazards(kinds, allowed):
        raise UnsupportedGraphError(message(where, *hazard))


def hazards(kinds: Iterable[type], allowed: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """Return what would make a graph's gradients silently wrong: expected, got, what to do.

    Args:
        kinds: The types of its nodes.
        allowed: Names of such nodes that the caller sees to.

    Returns:
        One for each kind of node that is refused.
    """
    names = (kind.__name__ for kind in kinds if _is_hazard(kind))
    return [_REFUSED[name] for name in names if name not in allowed]


def _is_hazard(kind: type) -> bool:
    return kind.__name__ in _REFUSED


def custom_functions_alive() -> bool:
    """Return False only if no graph in this process holds a node that `hazards` would look at.

    Those are nodes of Python Functions: the user's, and the few of torch's that are refused. A
    graph need not be walked as long as none exists; a walk costs a tenth of a small pass. Such a
    node is an instance of a class that `Function` makes, and CPython counts each instance as one
    reference to its class, so a class with more references than an idle one may have instances.
    Any other reference only causes a walk that was not needed.
    """
    if _free_threaded():
        return True  # references are not counted exactly there
    classes, idle = _classes_to_watch(repr(_functions_made))
    return any(_references(cls) > idle for cls in classes)


# torch numbers the Functions that are defined; the count tells when to look for new ones.
_functions_made = torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER


@lru_cache(maxsize=1)
def _classes_to_watch(_: str) -> tuple[list[ref[type]], int]:
    """Return the classes whose instances matter, and the references that an idle class has."""
    every = [ref(cls) for cls in BackwardCFunction.__subclasses__()]
    watched = [r for r in every if (cls := r()) and (_is_hazard(cls) or not _from_torch(cls))]
    del cls
    # Most classes that torch brings have no instances.
    return watched, min(filter(None, map(_references, every)))


def _references(cls: ref[type]) -> int:
    kind = cls()
    return 0 if kind is None else sys.getrefcount(kind)


@cache
def _free_threaded() -> bool:
    enabled = getattr(sys, "_is_gil_enabled", None)
    return enabled is not None and not enabled()


def user_functions(kinds: set[type]) -> list[type]:
    """Return the types among `kinds` whose backward is code that did not come with torch."""
    return [k for k in kinds if issubclass(k, BackwardCFunction) and not _from_torch(k)]


# The class of an operator made with torch.library is named after its namespace; these are torch's.
_TORCH_OPERATORS = tuple(
    f"GeneratedBackwardFor_{ns}_" for ns in ("prims", "rngprims", "debug_mode_ops")
)


def _from_torch(kind: Any) -> bool:
    module: str = kind._forward_cls.__module__
    if module.startswith("torch._library"):  # may run what the user gave to register_autograd
        return bool(kind.__name__.startswith(_TORCH_OPERATORS))
    return module.startswith("torch.")


def refuse_wrong_derivative(where: str, variables: Iterable[Tensor], nodes: set[Node]) -> None:
    """Raise if torch gets the derivative of a pass silently wrong.

    It does after second derivatives of normalizations: their own formula takes the mean and the
    deviation for constants, so that a third derivative is wrong. Not so group_norm and rms_norm.
    And it does through a `once_differentiable` Function: its error stands where a pass for chosen
    tensors does not come by, and the derivative is dropped.

    Args:
        where: The path of the loss, for the error.
        variables: What the pass is for.
        nodes: The graph below its losses, with the nodes of the variables.

    Raises:
        UnsupportedGraphError: The pass executes such a node.
    """
    kinds = set(map(type, nodes))
    if not any(kind.__name__ in _NO_THIRD or _is_once_differentiable(kind) for kind in kinds):
        return
    kinds = set(map(type, leading_to(variables, nodes)))
    for kind in filter(_is_once_differentiable, kinds):
        name = kind.__name__.removesuffix("Backward").removesuffix("Generated")
        raise UnsupportedGraphError(
            message(
                where,
                "a graph whose derivative can be differentiated",
                f"{name}, a Function that is once_differentiable",
                "leave out create_graph=True; take unroll(..., first_order=True); or give it a "
                "backward that can be differentiated",
            )
        )
    for name in _NO_THIRD & {kind.__name__ for kind in kinds}:
        raise UnsupportedGraphError(
            message(
                where,
                "a graph whose derivative can be differentiated again",
                f"a second derivative through {name.removesuffix('BackwardBackward0')}, whose "
                "third torch gets silently wrong",
                "leave out create_graph=True, or an unroll inside of another, in the last call; or "
                "use group_norm or rms_norm, or write the norm out",
            )
        )


_NO_THIRD = {"NativeLayerNormBackwardBackward0", "NativeBatchNormBackwardBackward0"}


def _is_once_differentiable(kind: Any) -> bool:
    if not issubclass(kind, BackwardCFunction):
        return False
    backward: Any = kind._forward_cls.backward
    if not issubclass(kind._forward_cls, Function):  # torch.func's own, around the user's
        around = [cell.cell_contents for cell in getattr(backward, "__closure__", None) or ()]
        backward = next((getattr(fn, "backward", None) for fn in around), None)
    return getattr(backward, "__code__", None) is _ONCE


# Of the wrapper, which is the same for all.
_ONCE = once_differentiable(lambda ctx: None).__code__


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
