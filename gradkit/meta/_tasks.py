"""The mean meta-loss over a batch of tasks, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.func import vmap

from gradkit import tree
from gradkit._core import pytree
from gradkit._core.params import expand_params
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, describe, message
from gradkit.func import value_and_grads as value_and_grads_of_one
from gradkit.func._variables import read_variables


def value_and_grads(
    meta_loss_fn: Callable[[PyTree, PyTree], Tensor],
    params: PyTree,
    tasks: PyTree,
    *,
    in_dims: PyTree = 0,
    tasks_at_once: int | None = None,
) -> tuple[Tensor, PyTree]:
    """Return the mean meta-loss over a batch of tasks, and the meta-gradient.

    Equal, to rounding, to a loop over the tasks. They are vmapped, with every derivative taken
    inside of the vmap: the other order is silently wrong in torch for normalizations with a weight.

    Example:
        >>> import torch, gradkit
        >>> def meta_loss(w, task):
        ...     opt = gradkit.meta.sgd(lr=0.25)
        ...     adapted = gradkit.meta.unroll(lambda w, _, x: ((w - x) ** 2).sum(), w, [task], opt)
        ...     return ((adapted.params - task) ** 2).sum()
        >>> tasks = torch.tensor([[0.0], [2.0]])
        >>> gradkit.meta.value_and_grads(meta_loss, torch.tensor([1.0]), tasks)
        (tensor(0.2500), tensor([0.]))

    Args:
        meta_loss_fn: The meta-loss of one task, `meta_loss_fn(params, task)`, one real element;
            usually an `unroll` and the loss on other data of the task.
        params: What is meta-learned: a tree of tensors; a module stands for its named parameters.
        tasks: A tree of tensors, the tasks stacked.
        in_dims: Their dimension: an int, or a tree that begins `tasks`, with None for what all
            tasks share.
        tasks_at_once: How many tasks are in memory at a time; None is all. It changes the result by
            rounding only.

    Returns:
        A 0-dim tensor, and a tree like `params`, its leaves as in `gradkit.func.value_and_grads`.

    Raises:
        DetachedLossError: The meta-loss does not depend on params.
        LeafTypeError: A leaf, or the meta-loss, is no tensor that has a gradient.
        NotScalarLossError: The meta-loss has not exactly one element.
        StructureError: `in_dims`, `tasks_at_once` or the sizes of the tasks do not fit.
        UnsupportedGraphError: torch.func cannot enter the meta-loss, or gets it silently wrong.

    Source:
        Finn et al. 2017, "Model-Agnostic Meta-Learning", algorithm 1,
        https://arxiv.org/abs/1703.03400
    """
    leaves, spec = expand_params(params, "params")
    given = pytree.unflatten(spec, leaves)
    read_variables((given,), 0, "params")
    parts, dims, rebuild = _read_tasks(tasks, in_dims)
    count = next(part.shape[dim] for part, dim in zip(parts, dims, strict=True) if dim is not None)
    size = _read_size(tasks_at_once, count)
    one = value_and_grads_of_one(meta_loss_fn)

    def run(*of_task: Any) -> tuple[Tensor, list[Tensor]]:
        value, grads = one(given, rebuild(of_task))
        return value, [grad for grad in pytree.flatten(grads)[0] if grad is not None]

    total, sums = None, None
    for start in range(0, count, size):
        some = [
            part if dim is None else part.narrow(dim, start, min(size, count - start))
            for part, dim in zip(parts, dims, strict=True)
        ]
        values, grads = vmap(run, in_dims=tuple(dims), randomness="different")(*some)
        added = [grad.sum(0) for grad in grads]
        total = values.sum() if total is None else total + values.sum()
        sums = added if sums is None else tree.add(sums, added)
    assert total is not None
    means = iter(tree.scale(sums, 1 / count))
    result = [None if leaf is None else next(means) for leaf in leaves]
    return total / count, pytree.unflatten(spec, result)


def _read_tasks(
    tasks: PyTree, in_dims: PyTree
) -> tuple[list[Any], list[int | None], Callable[[Any], PyTree]]:
    parts, spec = pytree.flatten(tasks)
    spread = pytree.broadcast_prefix(in_dims, "in_dims", tasks, "tasks")
    is_tensor = [isinstance(part, Tensor) for part in parts]
    dims = [dim if t else None for t, dim in zip(is_tensor, spread, strict=True)]
    sizes: dict[int, str] = {}
    for index, (part, dim) in enumerate(zip(parts, dims, strict=True)):
        if dim is None:
            continue
        where = pytree.path(spec, index, "tasks")
        if type(dim) is not int or not -part.dim() <= dim < part.dim():
            raise StructureError(
                message(
                    where,
                    f"a tensor with the task dimension {dim!r}",
                    describe(part),
                    "give in_dims, with None for what all tasks share",
                )
            )
        sizes.setdefault(part.shape[dim], where)
    if len(sizes) != 1 or 0 in sizes:
        raise StructureError(
            message(
                "tasks",
                "tensors with one number of tasks, at least one",
                " and ".join(f"{size} in {where}" for size, where in sizes.items()) or "none",
                "stack what belongs to the tasks, and give in_dims, with None for what they share",
            )
        )
    return parts, dims, lambda of_task: pytree.unflatten(spec, of_task)


def _read_size(tasks_at_once: object, count: int) -> int:
    if tasks_at_once is None:
        return count
    if isinstance(tasks_at_once, int) and not isinstance(tasks_at_once, bool) and tasks_at_once > 0:
        return tasks_at_once
    raise StructureError(
        message(
            "tasks_at_once", "a positive int or None", repr(tasks_at_once), "tasks_at_once=None"
        )
    )
