"""The mean meta-loss over a batch of tasks, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from gradkit import tree
from gradkit._compat.transforms import recording_levels
from gradkit._core import call as options
from gradkit._core import pytree
from gradkit._core.params import Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import with_zero_derivatives
from gradkit._state.snapshot import put_back
from gradkit.errors import OptionError, StructureError, describe, message
from gradkit.func import _vmap_or_loop
from gradkit.func._arguments import Arguments, read_arguments
from gradkit.func._differentiate import differentiate
from gradkit.func._errors import independent, named_errors
from gradkit.func._level import gradient_of_the_sum
from gradkit.func._vmap_or_loop import Batch, OneByOne, Randomness, RunOne
from gradkit.meta._inner_step import raised_where_it_would_take, read_loss

_STACK = "tasks=gradkit.tree.stack(tasks); or a loop over tasks that differ in size"
_STACKED = "one tree, of tensors that have the tasks as a dimension"


def mean_value_and_grads(
    meta_loss_fn: Callable[[PyTree, PyTree], Any],
    params: PyTree,
    tasks: PyTree,
    *,
    in_dims: PyTree = 0,
    tasks_at_once: int | None = None,
    has_aux: bool = False,
    randomness: Randomness = "different",
    create_graph: bool | None = None,
    group: Any = None,
) -> tuple[Any, PyTree]:
    """Return the mean meta-loss over a batch of tasks, and the meta-gradient.

    Equal, to rounding, to a loop over the tasks. They are vmapped, with every derivative taken
    inside the vmap: the other order is silently wrong in torch for normalizations with a weight.
    Every task starts from the modules as they are, and their buffers and attributes are afterwards
    as before. What torch.vmap cannot batch, such as `.item()`, is a loop, with a `GradkitWarning`
    that says why. torch.compile does not compile this call.

    Example:
        >>> import torch, gradkit
        >>> def meta_loss(w, task):
        ...     opt = gradkit.meta.sgd(lr=0.25)
        ...     adapted = gradkit.meta.unroll(lambda w, _, x: ((w - x) ** 2).sum(), w, [task], opt)
        ...     return ((adapted.params - task) ** 2).sum()
        >>> tasks = torch.tensor([[0.0], [2.0]])
        >>> w = torch.tensor([1.0])
        >>> gradkit.meta.mean_value_and_grads(meta_loss, w, tasks, create_graph=False)
        (tensor(0.2500), tensor([0.]))

    Args:
        meta_loss_fn: The meta-loss of one task, `meta_loss_fn(params, task)`, one real element;
            usually an `unroll` and the loss on other data of the task.
        params: The meta-learned parameters, as in `unroll`.
        tasks: A tree of tensors, the tasks stacked.
        in_dims: The dimension of the tasks: an int, or a prefix tree, None for what all share.
        tasks_at_once: The number of tasks in memory at a time; None is all. It changes the result
            by rounding only, but for what is drawn at random.
        has_aux: Whether `meta_loss_fn` returns `(loss, aux)`.
        randomness: As in `torch.vmap`: `"different"` for each task, `"same"`, or `"error"`.
        create_graph: As in `gradkit.func.value_and_grads`; False for a training step or a log.
        group: A process group of torch.distributed, such as `torch.distributed.group.WORLD`: each
            rank passes its own tasks, of any number, and equal params; the means are over the
            tasks of all ranks. None is this process alone.

    Returns:
        `(value, grads)`, or `((value, aux), grads)`: a 0-dim tensor, a tree like `params`, as in
        `gradkit.func.value_and_grads`, and the tensors of aux, stacked over this rank's tasks.

    Raises:
        CollectiveError: With `group`: a rank has failed, is missing, or is too late.
        OptionError: An option has no such value.
        StructureError: `in_dims` is no prefix of the tasks; or sizes, or params of ranks, differ.
        UnsupportedGraphError: A write on a part of a tensor from outside; `group` in a transform.
        GradkitError: As in `gradkit.func.value_and_grads`.

    Source:
        Finn et al. 2017, "Model-Agnostic Meta-Learning", algorithm 1,
        https://arxiv.org/abs/1703.03400
    """
    options.check_bool("has_aux", has_aux)
    options.check_optional_bool("create_graph", create_graph)
    options.check_function(meta_loss_fn, "meta_loss_fn", "params", "task")
    if tasks_at_once is not None and not options.is_positive_int(tasks_at_once):
        expected, got = "a positive int or None", repr(tasks_at_once)
        raise OptionError(message("tasks_at_once", expected, got, "tasks_at_once=None"))
    options.check_option("randomness", randomness, _vmap_or_loop.RANDOMNESS)
    with nullcontext() if group is None else _failures_reported(group):
        outer = read_arguments((params,), 0, "params", allow_distributed=group is not None)
        batch = _read_tasks(tasks, in_dims)
        try:
            with put_back(meta_loss_fn):
                totals, aux = _sum_over_tasks(
                    meta_loss_fn, has_aux, randomness, create_graph, outer, batch, tasks_at_once
                )
        except Exception as error:
            args = outer.tree(outer.variables), *(tasks[:1] if type(tasks) is list else ())
            if len(args) == 2 and raised_where_it_would_take(error, meta_loss_fn, *args):
                got = f"a list of {len(tasks)}, of which meta_loss_fn takes each as a task"
                raise StructureError(message("tasks", _STACKED, got, _STACK)) from error
            raise
    count: float | Tensor = batch.size
    if group is not None:
        names = list(map(outer.path, range(len(outer.variables))))
        totals, count = _over_ranks(["value", *names], totals, batch.size, group)
    value, *grads = totals
    mean, mean_grads = value / count, outer.to_tree(tree.scale(grads, 1 / count))
    return ((mean, aux) if has_aux else mean), mean_grads


def _failures_reported(group: Any) -> AbstractContextManager[object]:
    """Return the block in which a rank that fails is reported to the others."""
    from gradkit.distributed._agreement import failures_reported, require_group

    return failures_reported(require_group(group, "gradkit.meta.mean_value_and_grads"))


def _over_ranks(
    names: list[str], totals: Tensors, count: int, group: Any
) -> tuple[Tensors, Tensor]:
    """Return the sums over all ranks, and the number of their tasks, from one reduction."""
    from gradkit.distributed import all_reduce

    # Names tell them apart: others of one shape may take the place of those that are frozen.
    dtype = torch.promote_types(totals[0].dtype, torch.float32)  # half precision cannot count
    number = torch.tensor(float(count), dtype=dtype, device=totals[0].device)
    has_graph = any(total.requires_grad for total in totals)
    by_name = {**dict(zip(names, totals, strict=True)), "the number of tasks": number}
    *sums, number = all_reduce(by_name, group, "sum", differentiable=has_graph).values()
    return sums, number


def _sum_over_tasks(
    meta_loss_fn: Callable[[PyTree, PyTree], Any],
    has_aux: bool,
    randomness: Randomness,
    create_graph: bool | None,
    outer: Arguments,
    batch: Batch,
    tasks_at_once: int | None,
) -> tuple[Tensors, PyTree]:
    """Return the sums of values and gradients over the tasks, and aux stacked."""
    rebuild: list[Callable[[Tensors], PyTree]] = []  # of aux, from the last trace
    attempt = _vmap_or_loop.VmapOrLoop("mean_value_and_grads", meta_loss_fn, randomness)
    depend: list[bool] = []  # for each task of a loop, whether its loss depends on params

    def loss_and_aux(tensors: Tensors, task: PyTree) -> tuple[Tensor, PyTree]:
        returned = meta_loss_fn(outer.tree(tensors), task)
        loss, aux = read_loss(returned, "meta_loss_fn", has_aux=has_aux)
        if attempt.is_loop:
            level = max(recording_levels(tensors[0]))
            depend.append(level in recording_levels(loss))
            if not depend[-1]:
                loss = cast("Tensor", with_zero_derivatives([loss], tensors)[0])
        return loss, aux

    def of_task(*tensors: Any) -> tuple[Tensors, Tensors]:
        arguments = read_arguments((outer.variables, batch.tree(tensors)), 0)
        run_pass = partial(gradient_of_the_sum, may_be_aux=False)
        flags: Any = {"has_aux": True, "create_graph": create_graph, "batched": True}
        with attempt.of_one():
            one = differentiate(loss_and_aux, arguments, {}, run_pass, **flags)
        grads = arguments.grads_to_tree(one.grads[0], losses=one.values, refused=one.refused)
        attempt.check_aux(one.aux)
        tensors_of_aux, rebuild_aux = pytree.partition_tensors(one.aux)
        rebuild[:] = [rebuild_aux]
        return [*one.values, *grads], tensors_of_aux

    def run(one_by_one: OneByOne | None = None) -> tuple[Tensors, Tensors]:
        size, batched = tasks_at_once or batch.size, vmap(of_task, batch.dims, 0, randomness)
        if one_by_one:
            size, batched = 1, one_by_one(of_task, batch.dims)
        sums = _summed(batched, batch.chunks(size, randomness))
        if one_by_one and not any(depend):
            raise independent("losses")
        return sums

    totals, tensors_of_aux = named_errors(lambda: attempt.run(run))
    return totals, rebuild[0](tensors_of_aux)


def _summed(batched: RunOne, chunks: Iterable[tuple[int, Tensors]]) -> tuple[Tensors, Tensors]:
    """Return the sums over the tasks, and what is stacked."""
    totals: Tensors = []
    stacked: list[Tensors] = []
    for _, chunk in chunks:
        each, others = batched(*chunk)
        sums = [one.sum(0) for one in each]
        totals = tree.add(totals, sums) if totals else sums
        stacked.append(others)
    # Copies: what does not depend on the task is one tensor, expanded.
    return totals, [torch.cat(of_chunks) for of_chunks in zip(*stacked, strict=True)]


def _read_tasks(tasks: PyTree, in_dims: PyTree) -> Batch:
    """Open and check the tasks."""
    parts, spec = pytree.flatten(tasks)
    given = pytree.broadcast_prefix(in_dims, "in_dims", tasks, "tasks")
    pairs = zip(parts, given, strict=True)
    dims = [dim if isinstance(part, Tensor) else None for part, dim in pairs]
    sizes: dict[int, str] = {}
    for index, (part, dim) in enumerate(zip(parts, dims, strict=True)):
        if dim is None:
            continue
        if type(dim) is not int:
            raise OptionError(message("in_dims", "ints and None", repr(dim), "in_dims=0"))
        where = partial(pytree.path, spec, index, "tasks")
        if not -part.dim() <= dim < part.dim():
            expected = f"a tensor with the task dimension {dim!r}"
            fix = "give in_dims, with None for tensors that all tasks share"
            raise OptionError(message(where(), expected, describe(part), fix))
        _vmap_or_loop.require_dense(part, where)
        sizes.setdefault(part.shape[dim], where())
    if len(sizes) != 1 or 0 in sizes:
        expected = "tensors with one number of tasks, at least one"
        got = " and ".join(f"{size} in {where}" for size, where in sizes.items())
        fix = "stack the tensors of the tasks, and give in_dims, with None for shared tensors"
        fix = _STACK if isinstance(tasks, list | Iterator) else fix
        raise StructureError(message("tasks", expected, got or f"none in {describe(tasks)}", fix))
    return Batch(parts, dims, spec, next(iter(sizes)))
