"""The sum of gradients over ranks: few collectives, whatever the number of leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradkit._core.ownership import empty_for
from gradkit.distributed._agreement import Description, GradSpec, Specs, agree_or_raise
from gradkit.distributed._group import Group, collective_errors
from gradkit.errors import UnsupportedGraphError, message

# The default of DistributedDataParallel: enough that latency does not count, and little memory
# beside the gradients themselves.
BUCKET_BYTES = 25 * 2**20
_SUMMED_IF_SPARSE = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LocalGrads:
    """The gradients that a rank adds to a reduction."""

    grads: Sequence[Tensor | None]
    likes: Sequence[Tensor | None]  # give the results their strides; may be None where grads are
    structure: tuple[tuple[str, object], ...]  # what else ranks must have in common, by name
    path: Callable[[int], str]  # of a gradient, for errors


def agree_on_grads(
    group: Group, compute: Callable[[], LocalGrads], *, differentiable: bool = False
) -> tuple[LocalGrads, Specs]:
    """Return what `compute` returns, and the spec of each gradient over all ranks."""

    def read() -> tuple[LocalGrads, Description]:
        local = compute()
        for index, grad in enumerate(local.grads):
            if grad is not None and grad.layout != torch.strided:
                _check_sparse(grad, local, index)
        specs = tuple(GradSpec.of(grad, differentiable=differentiable) for grad in local.grads)
        paths = partial(map, local.path, range(len(specs)))
        return local, Description(local.structure, specs, paths)

    return agree_or_raise(group, read)


def _check_sparse(grad: Tensor, local: LocalGrads, index: int) -> None:
    """Raise if gloo would not sum a sparse gradient, or not rightly."""
    summed = grad.layout == torch.sparse_coo and grad.dtype in _SUMMED_IF_SPARSE
    if not summed or grad.device.type != "cpu":
        expected = "a dense gradient, or a sparse_coo one of real numbers on the CPU"
        kind = str(grad.dtype).removeprefix("torch.")
        got = f"one of layout {grad.layout}, {kind}, on {grad.device}"
        fix = "grad.to_dense(), or torch.nn.Embedding(..., sparse=False)"
        raise UnsupportedGraphError(message(local.path(index), expected, got, fix))


def reduce_grads(
    group: Group, local: LocalGrads, specs: Specs, scale: float | None
) -> list[Tensor | None]:
    """Return the sums of scaled gradients over the ranks; None where `specs` has None."""
    reduced: list[Tensor | None] = [None] * len(specs)
    for bucket in _buckets(specs):
        grads = [spec.local(local.grads[index]) for index, spec in bucket]
        first = bucket[0][1]
        if first.layout != torch.strided:
            sums = [_sum_(group, grads[0].detach().coalesce().clone(), scale)]
        elif first.graph:
            sums = _sum_with_graph(group, grads, scale)
        else:
            sums = _sum_dense(group, grads, [local.likes[index] for index, _ in bucket], scale)
        for (index, _), grad in zip(bucket, sums, strict=True):
            reduced[index] = grad
    return reduced


def _buckets(specs: Sequence[GradSpec | None]) -> Iterator[list[tuple[int, GradSpec]]]:
    """Yield the gradients that are sent together: of one dtype and device; sparse ones singly."""
    kinds: dict[tuple[object, ...], list[tuple[int, GradSpec]]] = {}
    for index, spec in enumerate(specs):
        if spec is not None and spec.layout != torch.strided:
            yield [(index, spec)]
        elif spec is not None:
            kinds.setdefault((spec.dtype, spec.device, spec.graph), []).append((index, spec))
    for alike in kinds.values():
        bucket: list[tuple[int, GradSpec]] = []
        filled = 0
        for index, spec in alike:
            if bucket and filled + spec.nbytes > BUCKET_BYTES:
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


def _sum_dense(
    group: Group, grads: Sequence[Tensor], likes: Sequence[Tensor | None], scale: float | None
) -> list[Tensor]:
    flat = _sum_(group, torch.cat([grad.detach().reshape(-1) for grad in grads]), scale)
    parts = torch.split(flat, [grad.numel() for grad in grads])
    return [
        _empty_result(grad, like).copy_(part.view(grad.shape))
        for grad, like, part in zip(grads, likes, parts, strict=True)
    ]


def _empty_result(grad: Tensor, like: Tensor | None) -> Tensor:
    if like is None or like.layout != torch.strided:
        return torch.empty_like(grad, memory_format=torch.contiguous_format, requires_grad=False)
    leading = tuple(grad.shape[: grad.dim() - like.dim()])
    return empty_for(like, grad.dtype, leading, grad.device)


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
