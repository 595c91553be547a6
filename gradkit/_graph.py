"""Reading the autograd graph: who reaches what, and what stands in the way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from functools import cache, lru_cache
from threading import Lock
from typing import Any, NoReturn, cast
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function, once_differentiable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradkit._leaf import is_dtensor
from gradkit.errors import FreedGraphError, UnsupportedGraphError, message

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

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
        "call gradkit.dist.value_and_grads(losses, ddp), without static_graph; or run "
        "ddp.module(...) for the forward",
    ),
    "RegisterPostBackwardFunctionBackward": (
        "the forward pass of a plain module",
        "one of a fully_shard module, whose sharded parameters are not in the graph",
        "call gradkit.dist.value_and_grads(losses, module)",
    ),
}


def edge(tensor: Tensor) -> GradientEdge:
    """Return the place in the graph where the gradient of `tensor` arrives."""
    return get_gradient_edge(tensor)


def nodes_below(losses: Iterable[Tensor], stop: Iterable[Node] = ()) -> set[Node]:
    """Return every node that a pass from these losses could visit; about 0.4 us a node.

    Args:
        losses: Where the pass starts.
        stop: Nodes that the walk does not enter.

    Returns:
        The nodes of the losses, and all below them.
    """
    barred = set(stop)
    seen = {edge(loss).node for loss in losses} - barred
    stack = list(seen)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen and node not in barred:
                seen.add(node)
                stack.append(node)
    return seen


def leaves_of(nodes: Iterable[Node]) -> set[int]:
    """Return the ids of the leaf tensors whose gradient the nodes accumulate."""
    return {id(_variable(node)) for node in nodes if type(node) is _AccumulateGrad}


def leaf_tensors(nodes: Iterable[Node]) -> dict[int, Tensor]:
    """Return the leaf tensors whose gradient the nodes accumulate, by their ids."""
    found = (_variable(node) for node in nodes if type(node) is _AccumulateGrad)
    return {id(variable): variable for variable in found}


def is_leaf_node(node: Node) -> bool:
    """Return whether a node accumulates the gradient of a leaf tensor."""
    return type(node) is _AccumulateGrad


def _variable(node: Any) -> Tensor:
    return cast("Tensor", node.variable)


def largest_tensor(nodes: Iterable[Node]) -> int:
    """Return the number of elements of the largest gradient that a pass through the nodes makes."""
    metadata = (one for node in nodes for one in _metadata(node))
    return max((torch.Size(one.shape).numel() for one in metadata), default=0)


def _metadata(node: Any) -> list[Any]:
    return list(node._input_metadata)


def leading_to(
    variables: Iterable[Tensor], nodes: set[Node], further: Iterable[Node] = ()
) -> set[Node]:
    """Return those of the nodes that a pass for the gradients of `variables` executes.

    Args:
        variables: The tensors whose gradient is wanted.
        nodes: A graph, from `nodes_below`.
        further: Nodes that are to be reached, too.

    Returns:
        The nodes above one of the variables; not its own, at which the engine only captures.
    """
    parents: dict[Node, list[Node]] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None:
                parents.setdefault(child, []).append(node)
    wanted = {id(variable) for variable in variables}
    stack = [
        node for node in nodes if type(node) is _AccumulateGrad and id(_variable(node)) in wanted
    ]
    stack += [variable.grad_fn for variable in variables if variable.grad_fn is not None]
    stack += further
    leading: set[Node] = set()
    while stack:
        for node in parents.get(stack.pop(), ()):
            if node not in leading:
                leading.add(node)
                stack.append(node)
    return leading


def reached(
    variable: Tensor, losses: Iterable[Tensor], nodes: set[Node], leaves: Collection[int]
) -> bool:
    """Return whether a gradient can arrive at `variable`.

    Args:
        variable: A tensor that requires grad.
        losses: The losses of the pass.
        nodes: `nodes_below(losses)`.
        leaves: `leaves_of(nodes)`.

    Returns:
        True if the variable is one of the losses or stands below one.
    """
    if variable.grad_fn is None:
        return id(variable) in leaves
    here = edge(variable)
    if here.node not in nodes:
        return False
    key = (here.node, here.output_nr)
    return any(edge(loss)[:2] == key for loss in losses) or any(
        key in node.next_functions for node in nodes
    )


def has_another_history(view: Tensor) -> bool:
    """Return whether torch has rebuilt the history of a view, as after a change of its base."""
    node = view.grad_fn
    return view._version > 0 and node is not None and node.name() == "AsStridedBackward0"


def was_used_before_change(variable: Tensor, nodes: set[Node]) -> bool:
    """Return whether an earlier value of a tensor that was changed in place is in a graph [C8]."""
    if variable._is_view():
        return False  # its count of changes is that of all views of the same memory
    node = variable.grad_fn
    for _ in range(min(variable._version, 16)):
        # An in-place operation leads on to the earlier value first.
        if node is None or not node.next_functions:
            return False
        node = node.next_functions[0][0]
        if node in nodes and type(node) is not _AccumulateGrad:
            return True
    return False


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


def _is_hazard(kind: type) -> bool:
    return kind.__name__ in _REFUSED


def listen(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register a tensor hook of our own, which `hooks_registered` does not count."""
    with _own_hooks.lock:
        handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        _own_hooks.count += 1
    return handle


def hooks_of(tensor: Tensor) -> dict[object, Callable[[Tensor], Tensor | None]]:
    """Return the table of a tensor's hooks, which run in its order."""
    if tensor._backward_hooks is None:
        listen(tensor, lambda _: None).remove()
    return cast("dict[object, Callable[[Tensor], Tensor | None]]", tensor._backward_hooks)


def hooks_registered() -> bool:
    """Return False only if nothing in this process but gradkit has ever registered a hook.

    A hook that changes its gradient in place, g.clamp_(-1, 1), changes whatever the engine shares
    that tensor with, and a hook that keeps it keeps a result. torch numbers the handles that it
    gives out for hooks of all kinds; where they are cannot be seen from Python.
    """
    return RemovableHandle.next_id > _own_hooks.count


class _OwnHooks:
    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0


_own_hooks = _OwnHooks()


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


def gone(_: object) -> NoReturn:
    """Stand, as its unpack hook, for a saved tensor that has been let go of.

    Raises:
        FreedGraphError: Whenever it is asked for.
    """
    raise FreedGraphError(
        message(
            "a loss",
            "a graph that still holds its saved tensors",
            "one that an earlier gradkit call has freed (Trying to backward through the graph a "
            "second time)",
            "pass retain_graph=True to the earlier call",
        )
    )


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


def is_freed(loss: Tensor) -> bool:
    """Return whether the first node below `loss` that saves tensors has lost one.

    This sees a loss that has been differentiated before, in a microsecond or two; not a graph that
    is freed further down, as a trunk shared with such a loss is.
    """
    node = loss.grad_fn
    for _ in range(8):
        if node is None:
            return False
        if saved_names(type(node)):
            return has_released(node)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False


def has_released(node: Node) -> bool:
    """Return whether the node has lost a tensor that it saved, and so cannot run again."""
    return any(_is_released(node, name) for name in saved_names(type(node)))


def saved_names(kind: type) -> tuple[str, ...]:
    """Return the attributes by which nodes of a type show the tensors they have saved."""
    if issubclass(kind, BackwardCFunction):
        return ("_raw_saved_tensors",)  # not through the cache, which would keep the class alive
    return _saved_names(cast("Hashable", kind))


@cache
def _saved_names(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _is_released(node: Node, name: str) -> bool:
    try:
        saved = getattr(node, name)
        if getattr(saved, "data", saved) is None:
            if saved.unpack_hook is None:
                saved.unpack()
            # One with hooks is not unpacked: that could recompute a checkpoint.
            return saved.unpack_hook is gone
    except RuntimeError:
        return True
    return False
