"""Replicas of a module: what DistributedDataParallel reduces, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._core import pytree
from gradkit._core.ownership import empty_for
from gradkit._core.pytree import PyTree
from gradkit.distributed._agreement import Group, Leaf, join, named
from gradkit.distributed._reduction import LocalGrads, agree, reduce
from gradkit.errors import StructureError, UnsupportedGraphError, message


def replicas_in(tree: PyTree) -> list[DistributedDataParallel]:
    """Return the replicated modules in a tree of params, also inside of other modules."""
    leaves, _ = pytree.flatten(tree)
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    parts = {id(part): part for module in modules for part in module.modules()}
    return [part for part in parts.values() if isinstance(part, DistributedDataParallel)]


def join_replicas(modules: Sequence[DistributedDataParallel], call: str) -> Group:
    """Return the group over which modules are replicated.

    Args:
        modules: At least one.
        call: The public call that uses it.

    Returns:
        The group of all of them.

    Raises:
        StructureError: They are of several groups.
    """
    for module in modules:
        _refuse_unreduced(module)
    handle = modules[0].process_group
    if any(module.process_group is not handle for module in modules):
        raise StructureError(
            message(call, "modules of one process group", "several", "make a call for each group")
        )
    return join(handle, call)


def _refuse_unreduced(module: DistributedDataParallel) -> None:
    """Raise if gradients cannot be reduced rightly beside the module's own backward passes.

    Raises:
        UnsupportedGraphError: static_graph [M4], join(), or mixed precision of the wrapper's own.
    """
    wrapped = "a DistributedDataParallel module"
    if module.static_graph:
        expected, came = f"{wrapped} without static_graph", "one with static_graph=True"
        do = "leave static_graph out: with it, a functional pass ends all later reduction"
    elif module._join_config.enable:
        expected, came = f"{wrapped} outside of join()", "one inside of it"
        do = "give all ranks as many inputs: a rank that has joined takes no part in this call"
    elif module.mixed_precision is not None:
        expected, came = f"{wrapped} without mixed_precision", "one with it"
        do = "use torch.autocast in the forward pass"
    elif module._delay_all_reduce_params:
        expected, came = wrapped, "one with delay_all_reduce_named_params"
        do = "leave it out: what it delays is reduced by a hook, also in a functional pass"
    else:
        return
    raise UnsupportedGraphError(message("the module", expected, came, do))


def refuse_no_sync(modules: Sequence[DistributedDataParallel]) -> None:
    """Raise if a module is not to reduce now.

    Args:
        modules: The modules.

    Raises:
        UnsupportedGraphError: One is inside of no_sync().
    """
    if not all(module.require_backward_grad_sync for module in modules):
        raise UnsupportedGraphError(
            message(
                "params",
                "a DistributedDataParallel module that reduces",
                "one inside of no_sync(), whose gradients would stay this process's alone",
                "make the call outside of it, or without hooks=True",
            )
        )


def reduced_params(module: DistributedDataParallel) -> list[Tensor]:
    """Return the trained parameters of a module but for those that it was told to ignore, once."""
    # As the module itself reads the names, which at its root begin with a dot: a tied parameter is
    # reduced unless every one of its places is ignored.
    places = (
        (f"{path}.{name}", param)
        for path, part in module.module.named_modules()
        for name, param in part.named_parameters(recurse=False)
    )
    ignored = module.parameters_to_ignore
    params = {id(p): p for name, p in places if p.requires_grad and name not in ignored}
    return list(params.values())


def reduce_replicas(
    group: Group,
    modules: Sequence[DistributedDataParallel],
    offer: Callable[[], LocalGrads],
    *,
    differentiable: bool = False,
    complete: Callable[[int, Tensor | None], Tensor | None] = lambda _, grad: grad,
) -> list[Tensor | None]:
    """Return the means over the ranks of gradients of replicated modules.

    Where the user has registered a communication hook with a module, that reduces them, as it would
    in a backward pass.

    Args:
        group: The ranks.
        modules: The modules.
        offer: Makes what this rank brings, by gradients of the modules' parameters.
        differentiable: Let the results carry a graph.
        complete: From the place of a gradient that some rank has, and this rank's, what this rank
            adds.

    Returns:
        One for each gradient; None where no rank has one.
    """
    ours, leaves = agree(group, offer, differentiable=differentiable)
    brought = [
        None if leaf is None else complete(index, ours.grads[index])
        for index, leaf in enumerate(leaves)
    ]
    hooked = [module for module in modules if _has_comm_hook(module)]
    likes = cast("Sequence[Tensor]", ours.likes)
    by_hook = {key for module in hooked for key in _in_buckets(module)}
    plain = [None if id(p) in by_hook else leaf for p, leaf in zip(likes, leaves, strict=True)]
    reduced = reduce(group, brought, likes, plain, 1 / group.size)
    for module in hooked:
        for index, grad in _by_comm_hook(group, module, likes, brought, leaves):
            reduced[index] = grad
    return reduced


def _has_comm_hook(module: DistributedDataParallel) -> bool:
    # What is registered for C++ shows in the log only.
    log: dict[str, object] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return bool(module._comm_hooks or log.get("comm_hook"))


def _in_buckets(module: DistributedDataParallel) -> set[int]:
    # Those that were trained when the module was wrapped, and are to be reduced.
    buckets = module.reducer._get_zeros_like_grad_buckets()
    return {id(param) for bucket in buckets for param in bucket.parameters()}


def refuse_beyond_hooks(
    modules: Iterable[DistributedDataParallel],
    grads: Iterable[Tensor | None],
    *,
    graph: bool = False,
    several: bool = False,
) -> None:
    """Raise if gradients are none that a communication hook takes.

    Args:
        modules: The modules.
        grads: The gradients.
        graph: The result is to carry a graph.
        several: There are those of several losses, or elements of one.

    Raises:
        UnsupportedGraphError: A module has a hook, and there is a graph or a sparse gradient; or
            the hook steps an optimizer, or remembers what it has left out, and there are several.
    """
    hooked = [module for module in modules if _has_comm_hook(module)]
    hooks = [hook for module in hooked for hook in module._comm_hooks]
    if hooked and graph:
        came = "create_graph=True"
    elif hooked and any(grad is not None and grad.layout != torch.strided for grad in grads):
        came = "a sparse gradient"
    elif any(word in hook.__qualname__ for hook, _ in hooks for word in _STEPPING):
        came = "a hook that steps an optimizer"
    elif several and any(hasattr(state, "error_dict") for _, state in hooks):
        came = "several losses: what the hook leaves out of one would be added to the next"
    else:
        return
    raise UnsupportedGraphError(
        message(
            "the module",
            "dense gradients without a graph, one a parameter, for a communication hook",
            came,
            "do without the hook, or reduce with gradkit.distributed.all_reduce",
        )
    )


# In the names of torch's own hooks that do so.
_STEPPING = ("optim", "zero")


def _by_comm_hook(
    group: Group,
    module: DistributedDataParallel,
    likes: Sequence[Tensor],
    brought: Sequence[Tensor | None],
    leaves: Sequence[Leaf | None],
) -> Iterator[tuple[int, Tensor]]:
    """Yield what the hook of a module makes of gradients: it takes one for each parameter."""
    params = _in_buckets(module)
    width = len({id(like) for like in likes}) or 1
    for start in range(0, len(likes), width):
        row = {
            id(likes[index]): index
            for index in range(start, start + width)
            if id(likes[index]) in params and leaves[index] is not None
        }
        if row:
            yield from _row_by_comm_hook(group, module, row, likes, brought, leaves)


def _row_by_comm_hook(
    group: Group,
    module: DistributedDataParallel,
    row: dict[int, int],
    likes: Sequence[Tensor],
    brought: Sequence[Tensor | None],
    leaves: Sequence[Leaf | None],
) -> Iterator[tuple[int, Tensor]]:
    any_of_it = next(iter(row.values()))
    shape = cast("Leaf", leaves[any_of_it]).shape
    leading = shape[: len(shape) - likes[any_of_it].dim()]  # that of the loss
    rooms = {
        key: empty_for(likes[index], cast("Leaf", leaves[index]).dtype, leading)
        for key, index in row.items()
    }
    for element in range(torch.Size(leading).numel()):
        grads = {key: _element(brought[index], likes[index], element) for key, index in row.items()}
        found = _run_comm_hook(group, module, grads)
        for key, room in rooms.items():
            room.view(-1, *likes[row[key]].shape)[element].copy_(found[key])
    for key, index in row.items():
        yield index, rooms[key]


def _element(grads: Tensor | None, like: Tensor, element: int) -> Tensor | None:
    return None if grads is None else grads.view(-1, *like.shape)[element]


def _run_comm_hook(
    group: Group, module: DistributedDataParallel, grads: dict[int, Tensor | None]
) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    with torch.no_grad(), named(group, backend_only=True):
        for bucket in module.reducer._get_zeros_like_grad_buckets():
            params, views = bucket.parameters(), bucket.gradients()
            for param, view in zip(params, views, strict=True):
                grad = grads.get(id(param))
                if grad is None:
                    continue  # the bucket is of zeros
                if grad.dtype != view.dtype:
                    _refuse_cast(grad, view)
                view.copy_(grad)
            made: Any = module.reducer._run_comm_hook(bucket).wait()
            bucket.buffer().copy_(made if isinstance(made, Tensor) else made[0])
            for param, view in zip(params, views, strict=True):
                found[id(param)] = view
    return found


def _refuse_cast(grad: Tensor, view: Tensor) -> NoReturn:
    raise UnsupportedGraphError(
        message(
            "the module",
            f"gradients in {view.dtype}, as when it was wrapped, for its communication hook",
            f"{grad.dtype}",
            "call .to(), .double(), ... before DistributedDataParallel(module)",
        )
    )
