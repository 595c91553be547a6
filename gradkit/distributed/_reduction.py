"""`all_reduce`, the sum of gradients over ranks: few collectives, however many the leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, cast

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
    GradSpec,
    Group,
    RankInvariants,
    Specs,
    agree_or_raise,
    collective_errors,
    read_specs,
    require_group,
)
from gradkit.errors import LeafTypeError, UnsupportedGraphError, describe, message
from gradkit.tree._arithmetic import are_dense_constants

# DistributedDataParallel's default: latency does not count, and it is little memory.
BUCKET_BYTES = 25 * 2**20
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
        >>> import gradkit, tempfile, torch
        >>> rendezvous = f"file://{tempfile.mkdtemp()}/file"
        >>> torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
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
    invariants: RankInvariants  # what else ranks must have in common
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
    group: Group, local: LocalGrads, specs: Specs, scale: float | None, *, in_place: bool = False
) -> list[Tensor | None]:
    """Return the sums of scaled gradients over the ranks; None where `specs` has None."""
    # `in_place`: in the memory of this rank's own gradients where they are dense.
    reduced: list[Tensor | None] = [None] * len(specs)
    for bucket in buckets(specs):
        first = bucket[0][1]
        if first.layout != torch.strided:
            sparse = in_layout(bucket, local.grads)[0].detach().coalesce()
            sums = [_sum_(group, sparse.clone(), scale)]
        elif first.graph:
            sums = _sum_with_graph(group, in_layout(bucket, local.grads), scale)
        else:
            flat = _sum_(group, flat_copy(in_layout(bucket, local.grads)), scale)
            sums = results(bucket, local, in_place=in_place)
            write(sums, flat)
        for (index, _), grad in zip(bucket, sums, strict=True):
            reduced[index] = grad
    return reduced


def buckets(specs: Specs, most: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yield the gradients that are sent together: of one dtype and device; sparse ones singly."""
    kinds: dict[tuple[object, ...], Bucket] = {}
    for index, spec in enumerate(specs):
        if spec is not None and spec.layout != torch.strided:
            yield [(index, spec)]
        elif spec is not None:
            kinds.setdefault((spec.dtype, spec.device, spec.graph), []).append((index, spec))
    for alike in kinds.values():
        bucket: Bucket = []
        filled = 0
        for index, spec in alike:
            if bucket and filled + spec.nbytes > most:
                yield bucket
                bucket, filled = [], 0
            bucket.append((index, spec))
            filled += spec.nbytes
        yield bucket


def _sum_(group: Group, tensor: Tensor, scale: float | None = None) -> Tensor:
    """Return the tensor, scaled and summed over the ranks in place."""
    if scale is not None:
        tensor *= scale
    with collective_errors(group):
        dist.all_reduce(tensor, group=group.handle)
    return tensor


def start_sum_(group: Group, tensor: Tensor) -> Callable[[], None]:
    """Start to sum a tensor over the ranks in place; return what waits for the sum."""
    with collective_errors(group):
        work: Any = dist.all_reduce(tensor, group=group.handle, async_op=True)

    def wait() -> None:
        with collective_errors(group):
            work.wait()

    return wait


def in_layout(bucket: Bucket, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return this rank's gradients in the layout that is sent; zeros for None."""
    pairs = ((grads[index], spec) for index, spec in bucket)
    return [
        grad if grad is not None and grad.layout is spec.layout else spec.local(grad)
        for grad, spec in pairs
    ]


@torch.no_grad()
def flat_copy(grads: Sequence[Tensor]) -> Tensor:
    """Return the entries of dense gradients as a new vector."""
    return flatten_dense(grads) if len(grads) > 1 else torch.cat([grads[0].ravel()])


def results(bucket: Bucket, local: LocalGrads, *, in_place: bool) -> list[Tensor]:
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
        return _sum_(group, tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return _all_reduce(cotangents[0], ctx.group), None
