"""`Accumulator`: the exact mean over all targets, whatever the micro-batches and ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from math import inf
from operator import call
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd.passes import run_jointly, run_separately
from gradkit._checks.reachability import require_reached
from gradkit._compat import distributed
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.nodes import averaged_elements
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Grads, Losses, check_number, read_losses
from gradkit._core.leaf_arithmetic import add_leaves, common_dtype
from gradkit._core.ownership import grad_dtype, leave_inference_mode, owned
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import LEAF, PyTree, Structure
from gradkit.distributed import _agreement, _ddp, _fsdp, all_reduce
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.errors import (
    NotScalarLossError,
    OptionError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)
from gradkit.tree import add

_MEAN = "gradkit.Accumulator.mean"
_MicroBatch = tuple[Losses, list[float]]  # has one count for all losses, or one for each


class _Sums(NamedTuple):
    losses: Structure | None = None  # of the losses; None before the first
    counts: Sequence[float] = ()  # one for all losses, or one for each
    values: Sequence[Tensor | None] = ()  # of each loss
    grads: Sequence[Tensor | None] = ()  # for each count, of each variable


class Accumulator:
    """Sums of gradients and counts, whose quotient is the exact mean over all targets.

    The mean over a batch is the sum over its targets by their number. The mean of micro-batches'
    means is another, where they hold unequal numbers of targets. So each adds a sum and a count.

    Example:
        >>> import torch, gradkit
        >>> model = torch.nn.Linear(3, 1)
        >>> total = gradkit.Accumulator(model)
        >>> for rows in (2, 5):
        ...     error = model(torch.ones(rows, 3)) - 1
        ...     total.add_(error.square().sum(), rows)
        >>> loss, grads = total.mean()
        >>> loss.shape, grads["weight"].shape
        (torch.Size([]), torch.Size([1, 3]))

    Args:
        params: As in `value_and_grads`; also modules wrapped in `DistributedDataParallel` or by
            `fully_shard`, for which each rank holds sums of whole gradients.

    Raises:
        UnsupportedGraphError: A parameter is a DTensor of another module; or a module is wrapped
            with a communication hook, or with what `gradkit.distributed` does not take.
        GradkitError: As in `value_and_grads`.

    Source:
        Linearity of the gradient; https://github.com/huggingface/transformers/issues/34191
    """

    @disable_compile
    def __init__(self, params: PyTree) -> None:
        modules = [leaf for leaf in pytree.flatten(params)[0] if isinstance(leaf, nn.Module)]
        parts = [part for module in modules for part in distributed.modules_in(module)]
        self._replicas = [part for part in parts if isinstance(part, DistributedDataParallel)]
        kinds = distributed.module_classes()
        self._shards: list[Any] = [part for part in parts if isinstance(part, kinds)]
        self._params = read_params(params, allow_distributed=True)
        # The tree holds the tensors: an iterator can be read once.
        self._tree = params if self._shards else self._params.tree(self._params.variables)
        self._sums = _Sums()
        self._scales: set[float] = set()  # see `averaged_elements`
        replicas = self._all_replicas()
        if replicas:
            _ddp.require_one_group(replicas, "gradkit.Accumulator")
        if _ddp.with_comm_hook(replicas):
            got = "a communication hook, which would not run"
        elif any(module.parameters_to_ignore for module in replicas):
            got = "parameters that DistributedDataParallel is to ignore"
        elif not self._shards and any(map(distributed.is_dtensor, self._params.variables)):
            got = "a DTensor that is not in a module of fully_shard"
        else:
            return
        expected = "parameters whose gradients are summed over ranks here"
        fix = "leave it out; or gradkit.tree.add_(total, grads) of gradients that are reduced"
        raise UnsupportedGraphError(message("params", expected, got, fix))

    def __copy__(self) -> Accumulator:
        """Return another with the same sums, to which neither adds for the other."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), _scales=set(self._scales))
        with leave_inference_mode(), INSIDE:  # `add_` writes on the gradients
            grads = [None if grad is None else grad.clone() for grad in self._sums.grads]
        other._sums = self._sums._replace(grads=grads)
        return other

    @disable_compile
    def add_(self, loss_sum: PyTree, count: PyTree) -> None:
        """Add a micro-batch: the gradient of its sum, from one pass, and its number of targets.

        Args:
            loss_sum: As `losses` in `value_and_grads`; each is a sum over targets. The graph is
                freed. Where the count is 0 it is 0, and may be a constant.
            count: How many targets the sum is over, or their weight: a finite number of at least
                0, or a tensor of one, for which the host waits. It is that of all losses. Or a
                tree like `loss_sum`: each loss has a mean, and a pass, of its own.

        Raises:
            NotScalarLossError: A loss does not have exactly one element.
            OptionError: A count is no such number; or it is 0, and the sum is not.
            StructureError: Losses and counts differ in structure, or from earlier calls, or the
                parameters that require grad do.
            UnsupportedGraphError: A loss, or a term of it, is a mean over several targets, or a sum
                divided by their number, as the operations tell that sums, and products with
                constants, were made of. (A mean that is itself one of the targets is added as
                `torch.stack([mean]).sum()`.)
            GradkitError: As in `value_and_grads`. After an error nothing has been added.
        """
        with leave_inference_mode():
            read = cache(partial(_read, self._sums, self._scales, loss_sum, count))
            joint = pytree.flatten(count)[1] == LEAF
            try:
                self._params, grads = self._run(joint, loss_sum, read)
            except NotScalarLossError as error:
                raise NotScalarLossError(str(error).replace(" or loss.mean()", "")) from error
            self._add(*read(), grads)

    def _run(
        self, joint: bool, loss_sum: PyTree, read: Callable[[], _MicroBatch]
    ) -> tuple[Params, Grads]:
        """Return the params, and their gradients of one pass for all losses, or one for each."""
        given = None if self._shards else read()
        if given and not any(given[1]) and not any(x.requires_grad for x in given[0].leaves):
            nothing: Grads = [None] * (len(given[1]) * len(self._params.variables))
            return self._params, nothing
        separately = partial(run_separately, strategy="sequential", chunk_size=None)
        passes: Any = partial(run_jointly, weights=None) if joint else separately
        name = "gradkit.Accumulator.add_"
        call = DistributedCall(name, loss_sum, self._tree, passes, joint, False, False)
        call = replace(call, losses_to_run=lambda _: read()[0])  # if it raises, all ranks do
        if self._shards:
            result, params = _fsdp.run(call, self._shards, reduced=False)
        else:
            losses, params = call.read()
            _ddp.refuse_static_graph(losses)
            result = call.run(losses, params, allowed=(distributed.SINK,))
        if list(params.slots) != list(self._params.slots):
            expected, fix = "those to require grad that did for Accumulator(params)", "a new one"
            raise StructureError(message("params", expected, "others", fix))
        if any(read()[1]):
            require_reached(result.call, result.grads)
        return params, [*chain(*result.grads)]

    def _add(self, losses: Losses, counts: Sequence[float], grads: Grads) -> None:
        """Add a micro-batch to the sums, in the memory of those before if dense: all or nothing."""
        before = self._sums
        if before.losses is None:
            zeros = [loss.new_zeros((), dtype=common_dtype(loss.dtype)) for loss in losses.leaves]
            before = _Sums(losses.spec, [0] * len(counts), zeros, [None] * len(grads))
        sums, dense = [*before.grads], []
        variables = self._params.variables * len(counts)
        for index, (total, grad) in enumerate(zip(sums, grads, strict=True)):
            if total is not None and grad is not None and total.layout == torch.strided:
                dense.append((total, grad))
            elif grad is not None:
                sums[index] = add_leaves(total, grad.to(_dtype_of_sum(variables[index])))
        pairs = zip(cast("list[Tensor]", before.values), losses.leaves, strict=True)
        values = [total + loss.detach() for total, loss in pairs]
        counts = [a + b for a, b in zip(before.counts, counts, strict=True)]
        steps: list[Callable[[], Any]] = []
        if dense:
            steps.append(partial(torch._foreach_add_, *map(list, zip(*dense, strict=True))))
        steps.append(partial(setattr, self, "_sums", _Sums(before.losses, counts, values, sums)))
        deque(map(call, steps), 0)  # in one call, which no interrupt cuts in two

    @disable_compile
    def mean(self, group: Any = None) -> tuple[PyTree, PyTree]:
        """Return the means over all targets of all ranks, and the gradient of their sum.

        All ranks make the call, also one that has added nothing. It reduces once; the sums stay.

        Args:
            group: The process group. None: that of the wrapped modules; without them the default
                one, or this process alone where there is none.

        Returns:
            `(mean, grads)`, the same on all ranks. `mean`: a tree like `loss_sum`, of 0-dim
            tensors, in float32 at least. A loss whose own count is 0 everywhere has NaN, and no
            part in `grads`. `grads`: as in `value_and_grads`, of `fully_shard` in shards; summed in
            `p.grad_dtype` if that is not `p.dtype`, else in `p.dtype`, float32 at least.

        Raises:
            CollectiveError: A rank has failed, is missing, or is too late.
            StructureError: All counts are 0; or params or losses differ between ranks.
            UnsupportedGraphError: A gradient is sparse where there is no sparse sum.
        """
        with leave_inference_mode(), torch.no_grad(), INSIDE:
            sums = self._sums
            for ranks in self._groups(group):
                sums = self._over_ranks(ranks, sums)
            if sums.losses is None or not any(sums.counts):
                fix = "on one rank at least, add_(loss_sum, count) with the number of targets"
                raise StructureError(message(_MEAN, "a count", "0 everywhere", fix))
            counts = [*sums.counts] * (len(sums.values) // len(sums.counts))
            values = list(map(_divided, sums.values, counts))
            every = zip(self._by_count(sums), sums.counts, strict=True)
            rows = [[_divided(total, count) for total in row] for row, count in every if count]
            grads: Grads = rows[0] if len(rows) == 1 else add(*rows)
            grads = list(map(_like_param, grads, self._params.variables))
            if not self._shards:
                grads = owned(grads, self._params.variables)
            by_leaf = self._params.per_leaf(grads, partial(map, Tensor.clone))
            means = pytree.unflatten(sums.losses, values)
            return means, pytree.unflatten(self._params.spec, by_leaf)

    def _all_replicas(self) -> list[DistributedDataParallel]:
        """Return the replicated modules that were given, and others that have the parameters."""
        return self._replicas or distributed.replicas_of(self._params.variables)

    def _by_count(self, sums: _Sums) -> list[Sequence[Tensor | None]]:
        width = len(self._params.variables)
        return [sums.grads[i * width : (i + 1) * width] for i in range(len(sums.counts))]

    def _groups(self, group: Any) -> list[_agreement.Group]:
        """Return the groups over which sums are added up, one after the other."""
        if group is None and self._shards:
            return _fsdp.require_groups(self._shards, _MEAN, one_mesh=True)
        if group is None and (replicas := self._all_replicas()):
            return [_ddp.require_one_group(replicas, _MEAN)]
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        return [] if alone else [_agreement.require_group(group, _MEAN)]

    def _over_ranks(self, ranks: _agreement.Group, sums: _Sums) -> _Sums:
        """Return the sums over all ranks of a group."""
        own = None if sums.losses is None else (sums.losses, len(sums.counts))
        digest = _agreement.NO_DIGEST if own is None else _agreement.digest_of(own)
        trained = ("params", self._params.spec), ("what is trained", tuple(self._params.slots))
        described = _agreement.Description((("the call", _MEAN), *trained), (), tuple, digest)
        _, agreed = _agreement.agree_or_raise(ranks, lambda: (None, described))
        if agreed.same_expected and own is None:
            return sums
        if not agreed.same_expected:
            by_rank: list[Any] = [None] * ranks.size
            with _agreement.collective_errors(ranks):
                dist.all_gather_object(by_rank, own, group=ranks.handle)
            losses, count = next(filter(None, by_rank))
            others = [i for i, one in enumerate(by_rank) if one and one != (losses, count)]
            if others:
                raise StructureError(_other_tree(by_rank, others[0]))
            if own is None:  # the rank adds zeros to the sums of the others
                grads: Grads = [None] * (count * len(self._params.variables))
                sums = _Sums(losses, [0] * count, [None] * losses.num_leaves, grads)
        every = pytree.paths(self._params.spec, "params")
        names = [every[index] for index in self._params.first_leaf_of_variable]
        local = {
            "counts": torch.tensor(sums.counts, dtype=torch.float64, device=ranks.device),
            "losses": pytree.unflatten(cast("Structure", sums.losses), sums.values),
            "sums": [dict(zip(names, row, strict=True)) for row in self._by_count(sums)],
        }
        summed = all_reduce(local, ranks.handle, "sum")
        values, _ = pytree.flatten(summed["losses"])
        flat = [grad for row in summed["sums"] for grad in row.values()]
        return _Sums(sums.losses, summed["counts"].tolist(), values, flat)


def _other_tree(by_rank: Sequence[Any], rank: int) -> str:
    """Return the message for a rank that has added other losses, or counts of another kind."""
    first = next(index for index, one in enumerate(by_rank) if one)
    shown = [
        f"{pytree.paths(by_rank[i][0], 'loss_sum')}, {by_rank[i][1]} counts" for i in (first, rank)
    ]
    fix = "one loss that a rank lacks as a zero of no targets: "
    fix += "add_({'fit': fit_sum, 'aux': 0 * fit_sum}, {'fit': n, 'aux': 0})"
    where = f"loss_sum on rank {rank} of {len(by_rank)} in {_MEAN}"
    return message(where, f"what rank {first} has, {shown[0]}", shown[1], fix)


def _read(before: _Sums, scales: set[float], loss_sum: PyTree, count: PyTree) -> _MicroBatch:
    """Return the losses, and one count for all or one for each; raise if they are no sums."""
    losses = read_losses(loss_sum, scalar=True)
    if before.losses is not None and losses.spec != before.losses:
        tree = pytree.unflatten(losses.spec, losses.leaves)
        leaves = _leaves_like(before.losses, "the first losses", tree, "losses")
        losses = Losses(leaves, before.losses)
    numbers, where = [count], ["count"]
    if pytree.flatten(count)[1] != LEAF:
        numbers = _leaves_like(losses.spec, "losses", count, "count")
        where = pytree.paths(losses.spec, "count")
    counts = list(map(_read_count, where, numbers))
    if len(before.counts) not in (0, len(counts)):
        kinds = "a number for each loss", "one number for all losses"
        expected, got = kinds if len(counts) == 1 else kinds[::-1]
        fix = "count as in the first add_, or a new Accumulator"
        raise StructureError(message("count", f"{expected}, as before", got, fix))
    for index, loss in enumerate(losses.leaves):
        if not counts[index % len(counts)] and loss.detach().item() != 0:
            expected = f"the number of targets that {losses.path(index)} is a sum over"
            got, fix = f"0, and a sum of {loss.item()}", "count them; or sum: a mean of none is NaN"
            raise OptionError(message(where[index % len(where)], expected, got, fix))
        count_of_loss = counts[index % len(counts)]
        elements, is_term = averaged_elements(loss.grad_fn, count_of_loss, scales)
        if elements:
            got = f"a mean over {elements}{', as one of its terms' * is_term}"
            where_loss = losses.path(index)
            raise UnsupportedGraphError(message(where_loss, "a sum over targets", got, _OF_SUMS))
    with torch.enable_grad(), INSIDE:  # a loss of shape [1] has gradients [1, ...]
        scalars = [loss.reshape(()) if loss.dim() else loss for loss in losses.leaves]
    return Losses(scalars, losses.spec), counts


_OF_SUMS = (
    "reduction='sum', or .sum(), not divided, and their number as the count. A mean that is one of "
    "the targets itself, that of a sequence say: torch.stack([mean]).sum(). An auxiliary mean: a "
    "loss with a count of its own, add_({'fit': fit_sum, 'aux': aux_sum}, {'fit': n, 'aux': m})"
)


def _leaves_like(spec: Structure, spec_root: str, tree: PyTree, root: str) -> list[Any]:
    """Return the leaves of a tree in the order of a structure, which is to be its own."""
    leaves = pytree.flatten_up_to(spec, spec_root, tree, root)
    for index, leaf in enumerate(leaves):
        if not pytree.flatten(leaf)[1].is_leaf():
            expected = f"a leaf, as {pytree.path(spec, index, spec_root)} is"
            fix = f"give {root} the containers and keys of {spec_root}"
            raise StructureError(
                message(pytree.path(spec, index, root), expected, describe(leaf), fix)
            )
    return leaves


def _read_count(where: str, value: Any) -> float:
    fix = "the number of targets: total.add_(loss_sum, len(targets))"
    number = check_number(where, value, fix)
    number = number.item() if isinstance(number, Tensor) else number
    if not 0 <= number < inf:
        raise OptionError(message(where, "a finite number of at least 0", repr(number), fix))
    return cast("float", number)


def _dtype_of_sum(param: Tensor) -> torch.dtype:
    dtype = grad_dtype(param)
    return common_dtype(dtype) if dtype == param.dtype else dtype


def _divided(total: Tensor | None, count: float) -> Tensor | None:
    return None if total is None else total / count


def _like_param(grad: Tensor | None, param: Tensor) -> Tensor | None:
    grad = None if grad is None else grad.to(grad_dtype(param))
    is_whole = grad is not None and distributed.is_dtensor(param)
    return distributed.sharded_like(cast("Tensor", grad), param).clone() if is_whole else grad
