"""The mean meta-loss over a batch of tasks, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gradkit import tree
from gradkit._core import pytree
from gradkit._core.options import check_bool, check_optional_bool, is_positive_int
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, StructureError, describe, message
from gradkit.func import value_and_grads
from gradkit.meta._trees import open_tensors, read_inner_params, read_loss


def mean_value_and_grads(
    meta_loss_fn: Callable[[PyTree, PyTree], Any],
    params: PyTree,
    tasks: PyTree,
    *,
    in_dims: PyTree = 0,
    tasks_at_once: int | None = None,
    has_aux: bool = False,
    create_graph: bool | None = None,
) -> tuple[Any, PyTree]:
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
            usually an `unroll` and the loss on other data of the task. With `has_aux` a pair of
            that and a tree.
        params: The meta-learned parameters: a tree of tensors; a module stands for its named
            parameters.
        tasks: A tree of tensors, the tasks stacked.
        in_dims: The dimension of the tasks: an int, or a prefix tree of `tasks`, with None for
            tensors that all tasks share.
        tasks_at_once: The number of tasks in memory at a time; None is all. It changes the result
            by rounding only.
        has_aux: Whether `meta_loss_fn` returns `(loss, aux)`.
        create_graph: As in `gradkit.func.value_and_grads`; False for a training step, whose
            gradients are not differentiated again.

    Returns:
        `(value, grads)`: a 0-dim tensor, and a tree like `params`, its leaves as in
        `gradkit.func.value_and_grads`. With `has_aux`, `((value, aux), grads)`: the tensors of aux
        stacked over the tasks, first in their shape.

    Raises:
        DetachedLossError: The meta-loss does not depend on params.
        LeafTypeError: A leaf, or the meta-loss, is no tensor that has a gradient.
        NotScalarLossError: The meta-loss has not exactly one element.
        OptionError: `in_dims`, `tasks_at_once`, `has_aux` or `create_graph` has no such value.
        StructureError: `in_dims` is no prefix of the tasks, or their sizes differ; or
            `meta_loss_fn` returned no pair, with `has_aux`.
        UnsupportedGraphError: torch.func cannot enter the meta-loss, or gets it silently wrong.

    Source:
        Finn et al. 2017, "Model-Agnostic Meta-Learning", algorithm 1,
        https://arxiv.org/abs/1703.03400
    """
    check_bool("has_aux", has_aux)
    check_optional_bool("create_graph", create_graph)
    if tasks_at_once is not None and not is_positive_int(tasks_at_once):
        expected, got = "a positive int or None", repr(tasks_at_once)
        raise OptionError(message("tasks_at_once", expected, got, "tasks_at_once=None"))
    outer = read_inner_params(params)
    parts, dims, count, close = _read_tasks(tasks, in_dims)
    size = tasks_at_once or count
    put_back: list[Callable[[list[Tensor]], PyTree]] = []  # of aux, from the trace of a chunk

    def loss_and_aux(tensors: list[Tensor], task: PyTree) -> tuple[Tensor, PyTree]:
        returned = meta_loss_fn(outer.tree(tensors), task)
        return read_loss(returned, "meta_loss_fn", has_aux=has_aux)

    def run(*task: Any) -> tuple[list[Tensor], list[Tensor]]:
        of_task = value_and_grads(loss_and_aux, has_aux=True, create_graph=create_graph)
        (value, aux), grads = of_task(outer.variables, close(task))
        tensors_of_aux, close_aux = open_tensors(aux)
        put_back[:] = [close_aux]
        return [value, *grads], tensors_of_aux

    batched = vmap(run, in_dims=tuple(dims), randomness="different")
    totals: list[Tensor] = []
    aux_parts: list[list[Tensor]] = []
    for start in range(0, count, size):
        chunk = [
            part if dim is None else part.narrow(dim, start, min(size, count - start))
            for part, dim in zip(parts, dims, strict=True)
        ]
        stacked, tensors_of_aux = batched(*chunk)
        sums = [one.sum(0) for one in stacked]
        totals = tree.add(totals, sums) if totals else sums
        aux_parts.append(tensors_of_aux)
    value, *grads = totals
    mean, mean_grads = value / count, outer.arguments.to_tree(tree.scale(grads, 1 / count))
    if not has_aux:
        return mean, mean_grads
    # Copies: what does not depend on the task is one tensor, expanded.
    aux = put_back[0]([torch.cat(of_chunks) for of_chunks in zip(*aux_parts, strict=True)])
    return (mean, aux), mean_grads


def _read_tasks(
    tasks: PyTree, in_dims: PyTree
) -> tuple[list[Any], list[int | None], int, Callable[[Any], PyTree]]:
    """Return the leaves of the tasks, the task dimension of each, their number, and `unflatten`."""
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
            expected = f"a tensor with the task dimension {dim!r}"
            fix = "give in_dims, with None for tensors that all tasks share"
            raise OptionError(message(where, expected, describe(part), fix))
        sizes.setdefault(part.shape[dim], where)
    if len(sizes) != 1 or 0 in sizes:
        expected = "tensors with one number of tasks, at least one"
        got = " and ".join(f"{size} in {where}" for size, where in sizes.items()) or "none"
        fix = "stack the tensors of the tasks, and give in_dims, with None for shared tensors"
        raise StructureError(message("tasks", expected, got, fix))
    return parts, dims, next(iter(sizes)), spec.unflatten
