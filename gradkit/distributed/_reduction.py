"""`all_reduce`, the sum of gradients over ranks: few collectives, however many the leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradkit._compat.autograd import flatten_dense, unflatten_dense
from gradkit._compat.distributed import is_dtensor
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import is_dual, transforms
from gradkit._core import pytree
from gradkit._core.call import check_bool, check_option
from gradkit._core.ownership import empty_for, leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit.distributed._agreement import (
    Description,
    Digest,
    GradSpec,
    Group,
    RankInvariants,
    Specs,
    agree_or_raise,
    collective_errors,
    digest_of,
    read_specs,
    report_failure,
    require_group,
)
from gradkit.errors import CollectiveError, LeafTypeError, UnsupportedGraphError, describe, message
from gradkit.tree._arithmetic import are_dense_constants

# DistributedDataParallel's default: latency does not count, and it is little memory.
BUCKET_BYTES = 25 * 2**20
LARGE = 2**20  # bytes of a gradient that is summed where it is, without a copy
_MOST_PLANS = 64
_T = TypeVar("_T")
# Gradients that are sent together, each with its index.
Bucket: TypeAlias = list[tuple[int, GradSpec]]
# Dtypes of eight bits and less, for which torch has no arithmetic.
_NOT_SUMMED = frozenset(
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and each.is_floating_point and each.itemsize < 2
)
_SUMMED_IF_SPARSE = (torch.float32, torch.float64, torch.bfloat16)


@disable_compile
def all_reduce(
    grads: PyTree,
    group: Any = None,
    op: Literal["mean", "sum"] = "mean",
    *,
    differentiable: bool = False,
) -> PyTree:
    """Return the mean, or the sum, of every gradient over the ranks of a process group.

    All ranks of the group make the call, with trees of one structure. A gradient that is None on
    some ranks counts as zero there (without `differentiable`); one that is None on all of them
    stays None.

    Example:
        >>> import gradkit, torch
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> gradkit.distributed.all_reduce({"w": torch.ones(2), "b": None})
        {'w': tensor([1., 1.]), 'b': None}
        >>> torch.distributed.destroy_process_group()

    Args:
        grads: A tree of tensors of any shape and floating-point or complex dtype, dense or sparse,
            on any devices that the group's backend serves, or None. They stay as they are.
        group: A process group; None is the default one.
        op: `"mean"` divides by the number of ranks, before the sum, as DistributedDataParallel
            does; `"sum"` does not.
        differentiable: Let the result carry the graphs of the gradients, which must have one on all
            ranks or on none. A backward pass through it sums the cotangents over the ranks (and
            divides, if this did), so that all ranks must run it, in the same order.

    Returns:
        A tree like `grads`, the same on all ranks, in the strides of `grads` where those are dense.
        It shares no memory with anything; with `differentiable`, it may.

    Raises:
        CollectiveError: There is no group, or a rank has failed, is missing, or is too late.
        LeafTypeError: A leaf is neither a floating-point or complex tensor nor None, or of eight
            bits or less, which torch cannot add.
        OptionError: An option has no such value.
        StructureError: Trees, shapes, dtypes or kinds of devices differ between ranks; or some
            ranks' gradients carry a graph, and others' do not.
        UnsupportedGraphError: A leaf carries a graph that would be cut, without `differentiable`;
            a leaf is a DTensor, or sparse where there is no sparse sum.

    Source:
        `torch.nn.parallel.DistributedDataParallel`; Li et al. 2020, "PyTorch Distributed:
        Experiences on Accelerating Data Parallel Training", section 3.2,
        https://arxiv.org/abs/2006.15704
    """
    check_option("op", op, ("mean", "sum"))
    check_bool("differentiable", differentiable)
    ranks = require_group(group, "gradkit.distributed.all_reduce")
    leaves, spec = pytree.flatten(grads)
    path = partial(pytree.path, spec, root="grads")

    def checked() -> LocalGrads:
        if not _are_plain(leaves):
            for index, leaf in enumerate(leaves):
                _check_leaf(leaf, partial(path, index), differentiable)
        invariants = (("the structure", spec), ("op", op), ("differentiable", differentiable))
        return LocalGrads(leaves, leaves, invariants, path)

    with leave_inference_mode():
        local, specs = agree_on_grads(ranks, checked, differentiable=differentiable)
        reduced = reduce_grads(ranks, local, specs, 1 / ranks.size if op == "mean" else None)
    return pytree.unflatten(spec, reduced)


def _are_plain(leaves: Sequence[Any]) -> bool:
    """Return whether all leaves are dense gradients without a graph, which need no other check."""
    return (
        are_dense_constants(leaves)
        and all(map(Tensor.is_floating_point, leaves))
        and _NOT_SUMMED.isdisjoint(leaf.dtype for leaf in leaves)
    )


def _check_leaf(leaf: object, path: Callable[[], str], differentiable: bool) -> None:
    if leaf is None:
        return
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        expected = "a floating-point or complex tensor, or None"
        fix = "leave it out: gradients are reduced here"
        raise LeafTypeError(message(path(), expected, describe(leaf), fix))
    if leaf.dtype in _NOT_SUMMED:
        fix = "reduce it as torch.float32: gradkit.tree.map(torch.Tensor.float, grads)"
        raise LeafTypeError(message(path(), "a dtype that can be added", describe(leaf), fix))
    if is_dtensor(leaf):
        expected, got = "a tensor of this process", "a DTensor, which torch reduces itself"
        fix = "leave it out: the gradients of fully_shard are reduced already"
    elif leaf.requires_grad and not differentiable and torch.is_grad_enabled():
        expected, got = "a gradient without a graph", "one whose graph the reduction would cut"
        fix = "all_reduce(grads, differentiable=True), or detach it"
    elif transforms() or is_dual(leaf):
        expected, got = "a call outside of torch.func's transforms", "one inside"
        fix = "transform what comes before and after; differentiable=True is for autograd"
    elif leaf.is_sparse and differentiable and leaf.requires_grad:
        expected, got, fix = "a dense tensor", "a sparse one with a graph", "leaf.to_dense()"
    else:
        return
    raise UnsupportedGraphError(message(path(), expected, got, fix))


@dataclass(frozen=True, slots=True)
class LocalGrads:
    """The gradients that a rank adds to a reduction."""

    grads: Sequence[Tensor | None]
    templates: Sequence[Tensor | None]  # give the results their strides
    invariants: RankInvariants  # facts that ranks must have in common, too
    path: Callable[[int], str]  # of a gradient, for errors


def agree_on_grads(
    group: Group, compute: Callable[[], LocalGrads], *, differentiable: bool = False
) -> tuple[LocalGrads, Specs]:
    """Return what `compute` returns, and the spec of each gradient over all ranks."""

    def read() -> tuple[LocalGrads, Description]:
        local = compute()
        specs = read_specs(local.grads, differentiable=differentiable)
        for index, spec in enumerate(specs):
            if spec is not None and spec.layout != torch.strided:
                _check_sparse(local.grads[index], local, index)
        paths = partial(map, local.path, range(len(specs)))
        return local, Description(local.invariants, specs, paths)

    local, agreement = agree_or_raise(group, read)
    return local, agreement.specs


def _check_sparse(grad: Any, local: LocalGrads, index: int) -> None:
    """Raise if gloo would not sum a sparse gradient, or not rightly."""
    summed = grad.layout == torch.sparse_coo and grad.dtype in _SUMMED_IF_SPARSE
    if not summed or grad.device.type != "cpu":
        expected = "a dense gradient, or a sparse_coo one of real numbers on the CPU"
        kind = str(grad.dtype).removeprefix("torch.")
        got = f"one of layout {grad.layout}, {kind}, on {grad.device}"
        fix = "grad.to_dense(), or torch.nn.Embedding(..., sparse=False)"
        raise UnsupportedGraphError(message(local.path(index), expected, got, fix))


def reduce_grads(
    group: Group,
    local: LocalGrads,
    specs: Specs,
    scale: float | None,
    *,
    in_place: bool = False,
    first: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the sums of scaled gradients over the ranks; None where `specs` has None."""
    # `in_place`: in the memory of this rank's own gradients where they are dense. `first`: the sum
    # of the first bucket, where it was sent already.
    reduced: list[Tensor | None] = [None] * len(specs)
    started: list[Any] = []
    for bucket in buckets(specs, alone=in_place):
        kind, grads = bucket[0][1], _in_layout(bucket, local.grads)
        if kind.layout != torch.strided:
            sums = [sum_over_ranks(group, grads[0].detach().coalesce().clone(), scale)]
        elif kind.graph:
            sums = _sum_with_graph(group, grads, scale)
        else:
            sums = _results(bucket, local, in_place=in_place)
            if first is None and len(sums) == 1 and sums[0] is grads[0] and _is_plain(grads[0]):
                started.append(_start_sum(group, grads[0], scale))  # without a copy
            else:
                flat = sum_over_ranks(group, flat_copy(grads), scale) if first is None else first
                write(sums, flat)
        first = None
        for (index, _), grad in zip(bucket, sums, strict=True):
            reduced[index] = grad
    with collective_errors(group):
        for work in started:
            work.wait()
    return reduced


def buckets(specs: Specs, *, alone: bool = False) -> list[Bucket]:
    """Return the gradients that are sent together: of one dtype and device; sparse ones singly."""
    # `alone`: large ones singly, too. The small ones are first.
    kinds: dict[Hashable, tuple[bool, int]] = {}
    rows: list[tuple[tuple[bool, int], tuple[int, GradSpec], int]] = []
    for index, spec in enumerate(specs):
        if spec is not None:
            single = spec.layout != torch.strided or (alone and spec.nbytes >= LARGE)
            kind = spec.dtype, spec.device, spec.graph, index if single else None
            place_in_order = kinds.setdefault(kind, (single, len(kinds)))
            rows.append((place_in_order, (index, spec), spec.nbytes))
    return list(packed(sorted(rows, key=itemgetter(0)), BUCKET_BYTES))


def packed(rows: Iterable[tuple[Hashable, _T, int]], most: int) -> Iterator[list[_T]]:
    """Yield what follows one another, of one kind, and has at most so many bytes together."""
    # A row is the kind, what is yielded, and its bytes.
    bucket: list[_T] = []
    kind_before, filled = None, 0
    for kind, item, nbytes in rows:
        if bucket and (kind != kind_before or filled + nbytes > most):
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        kind_before, filled = kind, filled + nbytes
    if bucket:
        yield bucket


def sum_over_ranks(group: Group, tensor: Tensor, scale: float | None = None) -> Tensor:
    """Return the tensor, scaled and summed over the ranks in place."""
    with collective_errors(group):
        _start_sum(group, tensor, scale).wait()
    return tensor


def _start_sum(group: Group, tensor: Tensor, scale: float | None) -> Any:
    """Start to sum a tensor, scaled, over the ranks in place; return what waits for the sum."""
    if scale is not None:
        tensor *= scale
    with collective_errors(group):
        return dist.all_reduce(tensor, group=group.handle, async_op=True)


def _in_layout(bucket: Bucket, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return this rank's gradients in the layout that is sent; zeros for None."""
    return [
        grad if grad is not None and grad.layout is spec.layout else spec.local(grad)
        for grad, spec in ((grads[index], spec) for index, spec in bucket)
    ]


def _is_plain(grad: Tensor) -> bool:
    """Return whether the memory of a gradient holds its numbers as they are, one by one."""
    return grad.is_contiguous() and not grad.is_conj() and not grad.is_neg()


@torch.no_grad()
def flat_copy(grads: Sequence[Tensor]) -> Tensor:
    """Return the entries of dense gradients as a new vector."""
    return flatten_dense(grads) if len(grads) > 1 else torch.cat([grads[0].ravel()])


def _results(bucket: Bucket, local: LocalGrads, *, in_place: bool) -> list[Tensor]:
    """Return where sums are written: new tensors, or `in_place` this rank's own gradients."""
    rows = [(local.grads[index], spec, local.templates[index]) for index, spec in bucket]
    return [
        grad
        if in_place and grad is not None and grad.layout is spec.layout
        else _empty_grad(spec, grad, like)
        for grad, spec, like in rows
    ]


def _empty_grad(spec: GradSpec, grad: Tensor | None, like: Tensor | None) -> Tensor:
    device = torch.device(spec.device) if grad is None else grad.device
    if like is None or like.layout != torch.strided or like.is_contiguous():
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    return empty_for(like, spec.dtype, spec.shape[: len(spec.shape) - like.dim()], device)


@torch.no_grad()
def write(grads: list[Tensor], flat: Tensor) -> None:
    """Write the first entries of a flat tensor to gradients, one after the other."""
    grads = [grad for grad in grads if grad.numel()]
    parts = unflatten_dense(flat.view(-1), grads)
    if grads and all(map(Tensor.is_contiguous, grads)):
        torch._foreach_copy_(grads, parts)
        return
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part)


class ReductionPlan(NamedTuple):
    """What ranks have agreed to sum, and expect to sum again in the next call like it."""

    own: Specs  # of this rank's gradients
    common: Specs  # the specs of all ranks together
    digest: Digest  # the digest of both

    @property
    def first(self) -> Bucket:
        """What is sent first, and says whether all gradients are those expected."""
        return buckets(self.common, alone=True)[0]


# The last calls have plans, by what their gradients depend on; None where those differed between
# calls.
plans: OrderedDict[Hashable, ReductionPlan | None] = OrderedDict()


def keep_plan(key: Hashable, group: Group, grads: Sequence[Tensor | None], common: Specs) -> None:
    """Keep what ranks have agreed to sum, for the next call with this key."""
    plan = None
    if key not in plans and any(common):
        plan = ReductionPlan(read_specs(grads), common, digest_of(common))
        kind = plan.first[0][1]
        # The host reads its last entry: of gradients on a GPU that takes longer than another
        # agreement over the CPU.
        if kind.layout != torch.strided or kind.device != group.device.type:
            plan = None
    plans[key] = plan
    if len(plans) > _MOST_PLANS:
        plans.popitem(last=False)


def reduce_as_planned(
    group: Group, plan: ReductionPlan, compute: Callable[[], LocalGrads], scale: float
) -> list[Tensor | None] | None:
    """Return the sums of gradients, in their memory; None if ranks are to agree anew."""
    try:
        local = compute()
    except BaseException:
        with suppress(CollectiveError):
            _sum_first(group, plan, None, scale)
            report_failure(group)
        raise
    is_as_planned = read_specs(local.grads) == plan.own
    first = _sum_first(group, plan, local.grads if is_as_planned else None, scale)
    if first[-1] != 0:
        return None
    return reduce_grads(group, local, plan.common, scale, in_place=True, first=first)


def _sum_first(
    group: Group, plan: ReductionPlan, grads: Sequence[Tensor | None] | None, scale: float
) -> Tensor:
    """Return the sum of the first bucket, and behind it whether a rank has other gradients."""
    tensors = _in_layout(plan.first, grads or [None] * len(plan.own))
    tensors.append(tensors[0].new_full((1,), grads is None))
    return sum_over_ranks(group, flat_copy(tensors), scale)


@torch.enable_grad()  # also where the caller has disabled it: the graph would be cut
def _sum_with_graph(group: Group, grads: Sequence[Tensor], scale: float | None) -> list[Tensor]:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    reduced = _all_reduce(flat if scale is None else flat * scale, group)
    parts = torch.split(reduced, [grad.numel() for grad in grads])
    return [part.view(grad.shape) for grad, part in zip(grads, parts, strict=True)]


def _all_reduce(tensor: Tensor, group: Group) -> Tensor:
    return cast("Tensor", _AllReduce.apply(tensor, group))  # type: ignore[no-untyped-call]


class _AllReduce(torch.autograd.Function):
    """The sum over ranks; its derivative is the sum of the ranks' cotangents."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sum_over_ranks(group, tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return _all_reduce(cotangents[0], ctx.group), None
