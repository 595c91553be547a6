"""The mean meta-loss over a batch of tasks, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.func import vmap

from gradkit import tree
from gradkit._core import pytree
from gradkit._core.options import is_positive_int
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, StructureError, describe, message
from gradkit.func import value_and_grads
from gradkit.meta._layout import read_layout


def mean_value_and_grads(
    meta_loss_fn: Callable[[PyTree, PyTree], Tensor],
    params: PyTree,
    tasks: PyTree,
    *,
    in_dims: PyTree = 0,
    tasks_at_once: int | None = None,
) -> tuple[Tensor, PyTree]:
    """Return the mean meta-loss over a batch of tasks, and the meta-gradient.

    Equal, to rounding, to a loop over the tasks. They are vmapped, with every derivative taken
    inside the vmap: the other order is silently wrong in torch for normalizations with a weight.

    Example:
        >>> import torch, gradkit
        >>> def meta_loss(w, task):
        ...     opt = gradkit.meta.sgd(lr=0.25)
        ...     adapted = gradkit.meta.unroll(lambda w, _, x: ((w - x) ** 2).sum(), w, [task], opt)
        ...     return ((adapted.params - task) ** 2).sum()
        >>> tasks = torch.tensor([[0.0], [2.0]])
        >>> gradkit.meta.mean_value_and_grads(meta_loss, torch.tensor([1.0]), tasks)
        (tensor(0.2500), tensor([0.]))

    Args:
        meta_loss_fn: The meta-loss of one task, `meta_loss_fn(params, task)`, one real element;
            usually an `unroll` and the loss on other data of the task.
        params: The meta-learned parameters: a tree of tensors; a module stands for its named
            parameters.
        tasks: A tree of tensors, the tasks stacked.
        in_dims: The dimension of the tasks: an int, or a prefix tree of `tasks`, with None for
            tensors that all tasks share.
        tasks_at_once: The number of tasks in memory at a time; None is all. It changes the result
            by rounding only.

    Returns:
        A 0-dim tensor, and a tree like `params`, its leaves as in `gradkit.func.value_and_grads`.

    Raises:
        DetachedLossError: The meta-loss does not depend on params.
        LeafTypeError: A leaf, or the meta-loss, is no tensor that has a gradient.
        NotScalarLossError: The meta-loss has not exactly one element.
        OptionError: `in_dims` or `tasks_at_once` has no such value.
        StructureError: `in_dims` is no prefix of the tasks, or their sizes differ.
        UnsupportedGraphError: torch.func cannot enter the meta-loss, or gets it silently wrong.

    Source:
        Finn et al. 2017, "Model-Agnostic Meta-Learning", algorithm 1,
        https://arxiv.org/abs/1703.03400
    """
    _check_tasks_at_once(tasks_at_once)
    layout = read_layout(params)
    parts, dims, close = _read_tasks(tasks, in_dims)
    count = next(part.shape[dim] for part, dim in zip(parts, dims, strict=True) if dim is not None)
    size = tasks_at_once or count
    grads_of_task = value_and_grads(lambda tensors, task: meta_loss_fn(layout.tree(tensors), task))

    def run(*task: Any) -> tuple[Tensor, list[Tensor]]:
        value, grads = grads_of_task(layout.tensors, close(task))
        return value, grads

    batched = vmap(run, in_dims=tuple(dims), randomness="different")
    totals: list[Tensor] = []
    for start in range(0, count, size):
        chunk = [
            part if dim is None else part.narrow(dim, start, min(size, count - start))
            for part, dim in zip(parts, dims, strict=True)
        ]
        values, grads = batched(*chunk)
        sums = [values.sum(), *(grad.sum(0) for grad in grads)]
        totals = tree.add(totals, sums) if totals else sums
    value, *grads = totals
    return value / count, layout.grads_tree(tree.scale(grads, 1 / count))


def _read_tasks(
    tasks: PyTree, in_dims: PyTree
) -> tuple[list[Any], list[int | None], Callable[[Any], PyTree]]:
    """Return the leaves of the tasks, the task dimension of each, and a function to close them."""
    parts, spec = pytree.flatten(tasks)
    given = pytree.broadcast_prefix(in_dims, "in_dims", tasks, "tasks")
    dims = [
        dim if isinstance(part, Tensor) else None for part, dim in zip(parts, given, strict=True)
    ]
    sizes: dict[int, str] = {}
    for index, (part, dim) in enumerate(zip(parts, dims, strict=True)):
        if dim is None:
            continue
        if type(dim) is not int:
            raise OptionError(message("in_dims", "ints and None", repr(dim), "in_dims=0"))
        where = pytree.path(spec, index, "tasks")
        if not -part.dim() <= dim < part.dim():
            raise OptionError(
                message(
                    where,
                    f"a tensor with the task dimension {dim!r}",
                    describe(part),
                    "give in_dims, with None for tensors that all tasks share",
                )
            )
        sizes.setdefault(part.shape[dim], where)
    if len(sizes) != 1 or 0 in sizes:
        raise StructureError(
            message(
                "tasks",
                "tensors with one number of tasks, at least one",
                " and ".join(f"{size} in {where}" for size, where in sizes.items()) or "none",
                "stack the tensors of the tasks, and give in_dims, with None for shared tensors",
            )
        )
    return parts, dims, lambda task: pytree.unflatten(spec, task)


def _check_tasks_at_once(value: object) -> None:
    if value is not None and not is_positive_int(value):
        raise OptionError(
            message("tasks_at_once", "a positive int or None", repr(value), "tasks_at_once=None")
        )
