"""The sum of gradients over ranks: few collectives, whatever the number of leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradkit._core.ownership import empty_for
from gradkit.distributed._agreement import agree_or_raise, common_specs
from gradkit.distributed._grad_spec import GradSpec
from gradkit.distributed._group import Group, collective_errors
from gradkit.errors import UnsupportedGraphError, message

# The default of DistributedDataParallel: enough that latency does not count, and little memory
# beside the gradients themselves.
BUCKET_BYTES = 25 * 2**20

# Of each gradient over all ranks; None if no rank has one.
Specs: TypeAlias = list[GradSpec | None]


@dataclass(frozen=True, slots=True)
class LocalGrads:
    """The gradients that a rank adds to a reduction."""

    grads: Sequence[Tensor | None]
    likes: Sequence[Tensor | None]  # give the results their strides; may be None where grads are
    structure: tuple[tuple[str, object], ...]  # what else ranks must have in common, by name
    path: Callable[[int], str]  # of a gradient, for errors

    def paths(self) -> tuple[str, ...]:
        """Return the paths of all gradients."""
        return tuple(map(self.path, range(len(self.grads))))


def agree_on_grads(
    group: Group, compute: Callable[[], LocalGrads], *, differentiable: bool = False
) -> tuple[LocalGrads, Specs]:
    """Return what `compute` returns, and the spec of each gradient over all ranks."""

    def read() -> tuple[tuple[LocalGrads, Specs], tuple[object, ...]]:
        local = compute()
        for index, grad in enumerate(local.grads):
            _refuse_sparse(grad, local, index)
        specs = [GradSpec.of(grad, differentiable=differentiable) for grad in local.grads]
        return (local, specs), (local.structure, tuple(specs))

    (local, specs), descriptions = agree_or_raise(group, read, lambda ours: ours[0].paths())
    if descriptions is None:
        return local, specs
    return local, common_specs(group, descriptions, local.path)


def _refuse_sparse(grad: Tensor | None, local: LocalGrads, index: int) -> None:
    """Raise if a gradient is sparse, and gloo would not sum it, or not rightly."""
    if grad is None or grad.layout == torch.strided:
        return
    if grad.layout == torch.sparse_coo and grad.device.type == "cpu" and grad.dtype in _SUMMED:
        return
    expected = "a dense gradient, or a sparse_coo one of real numbers on the CPU"
    kind = str(grad.dtype).removeprefix("torch.")
    got = f"one of layout {grad.layout}, {kind}, on {grad.device}"
    fix = "grad.to_dense(), or torch.nn.Embedding(..., sparse=False)"
    raise UnsupportedGraphError(message(local.path(index), expected, got, fix))


_SUMMED = (torch.float32, torch.float64, torch.bfloat16)


def reduce_grads(
    group: Group, local: LocalGrads, specs: Sequence[GradSpec | None], scale: float | None
) -> list[Tensor | None]:
    """Return the sums of scaled gradients over the ranks; None where `specs` has None."""
    reduced: list[Tensor | None] = [None] * len(specs)
    for bucket in _buckets(specs):
        grads = [spec.local(local.grads[index]) for index, spec in bucket]
        first = bucket[0][1]
        if first.layout != torch.strided:
            sums = [_sum_sparse(group, grads[0], scale)]
        elif first.graph:
            sums = _sum_with_graph(group, grads, scale)
        else:
            sums = _sum(group, grads, [local.likes[index] for index, _ in bucket], scale)
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


def _sum(
    group: Group, grads: Sequence[Tensor], likes: Sequence[Tensor | None], scale: float | None
) -> list[Tensor]:
    flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
    if scale is not None:
        flat *= scale
    with collective_errors(group):
        dist.all_reduce(flat, group=group.handle)
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


def _sum_sparse(group: Group, grad: Tensor, scale: float | None) -> Tensor:
    reduced = grad.detach().coalesce().clone()
    if scale is not None:
        reduced *= scale
    with collective_errors(group):
        dist.all_reduce(reduced, group=group.handle)
    return reduced


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
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        with collective_errors(group):
            dist.all_reduce(reduced, group=group.handle)
        return reduced

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return _all_reduce(cotangents[0], ctx.group), None
