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
from gradkit.distributed._agreement import (
    Group,
    Leaf,
    agree_or_raise,
    agreed_leaves,
    leaf_of,
    named,
)
from gradkit.errors import UnsupportedGraphError, message

# Gradients are sent in portions of so many bytes, the default of DistributedDataParallel: enough
# that latency does not count, and little beside the gradients themselves.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class LocalGrads:
    """What a rank brings to a reduction.

    Attributes:
        grads: Gradients, or None.
        likes: For each a tensor whose layout the result takes; None may stand where there is no
            gradient.
        structure: What else must be the same on all ranks, by name.
        path: Tells the way to a gradient, for errors.
    """

    grads: Sequence[Tensor | None]
    likes: Sequence[Tensor | None]
    structure: tuple[tuple[str, object], ...]
    path: Callable[[int], str]


def agree(
    group: Group, offer: Callable[[], LocalGrads], *, differentiable: bool
) -> tuple[LocalGrads, list[Leaf | None]]:
    """Return what this rank brings, and what each gradient is on all ranks together.

    Args:
        group: The ranks.
        offer: Makes what this rank brings; if it raises, all ranks do.
        differentiable: The results are to carry a graph.

    Returns:
        The offer; and for each gradient a description, or None if no rank has one.
    """
    made: list[LocalGrads] = []

    def described() -> tuple[Leaf | None, ...]:
        return tuple(leaf_of(grad, differentiable=differentiable) for grad in made[0].grads)

    def read() -> tuple[object, ...]:
        made.append(offer())
        for index, grad in enumerate(made[0].grads):
            _refuse_sparse(grad, partial(made[0].path, index))
        return made[0].structure, described()

    def explain() -> tuple[str, ...]:
        return tuple(map(made[0].path, range(len(made[0].grads))))

    theirs = agree_or_raise(group, read, explain)
    ours = made[0]
    if theirs is None:
        return ours, list(described())
    return ours, agreed_leaves(group, theirs, ours.path)


def _refuse_sparse(grad: Tensor | None, where: Callable[[], str]) -> None:
    """Raise if a gradient is sparse, and gloo would not sum it, or not rightly."""
    if grad is None or grad.layout == torch.strided:
        return
    if grad.layout == torch.sparse_coo and grad.device.type == "cpu" and grad.dtype in _SUMMED:
        return
    kind = str(grad.dtype).removeprefix("torch.")
    raise UnsupportedGraphError(
        message(
            where(),
            "a dense gradient, or a sparse_coo one of real numbers on the CPU",
            f"one of layout {grad.layout}, {kind}, on {grad.device}",
            "grad.to_dense(), or torch.nn.Embedding(..., sparse=False)",
        )
    )


_SUMMED = (torch.float32, torch.float64, torch.bfloat16)


def reduce(
    group: Group,
    grads: Sequence[Tensor | None],
    likes: Sequence[Tensor | None],
    leaves: Sequence[Leaf | None],
    scale: float | None,
) -> list[Tensor | None]:
    """Return the sums over the ranks of what each of them brings.

    Args:
        group: The ranks.
        grads: What this rank brings; None counts as zero.
        likes: As in `LocalGrads`.
        leaves: What each is on all ranks together; None for what is not reduced.
        scale: What to multiply by before.

    Returns:
        One for each gradient; None where `leaves` has None.
    """
    reduced: list[Tensor | None] = [None] * len(leaves)
    for bucket in _buckets(leaves):
        brought = [_brought(grads[i], cast("Leaf", leaves[i])) for i in bucket]
        if cast("Leaf", leaves[bucket[0]]).layout != torch.strided:
            found = [_sum_sparse(group, brought[0], scale)]
        elif cast("Leaf", leaves[bucket[0]]).graph:
            found = _sum_with_graph(group, brought, scale)
        else:
            found = _sum(group, brought, [likes[i] for i in bucket], scale)
        for index, grad in zip(bucket, found, strict=True):
            reduced[index] = grad
    return reduced


def _buckets(leaves: Sequence[Leaf | None]) -> Iterator[list[int]]:
    """Yield which gradients are sent together: of one dtype and device; a sparse one by itself."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf is not None and leaf.layout != torch.strided:
            yield [index]
        elif leaf is not None:
            kinds.setdefault((leaf.dtype, leaf.device, leaf.graph), []).append(index)
    for indices in kinds.values():
        bucket: list[int] = []
        filled = 0
        for index in indices:
            leaf = cast("Leaf", leaves[index])
            size = leaf.dtype.itemsize * torch.Size(leaf.shape).numel()
            if bucket and filled + size > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(index)
            filled += size
        yield bucket


def _brought(grad: Tensor | None, leaf: Leaf) -> Tensor:
    """Return what this rank adds to a gradient: zeros, if it has none."""
    if grad is None:
        # On "cuda" without an index: the device that torch.cuda.set_device has chosen.
        if leaf.layout == torch.strided:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        split = len(leaf.shape) - leaf.dense_dim
        index = torch.empty(split, 0, dtype=torch.int64, device=leaf.device)
        values = torch.empty(0, *leaf.shape[split:], dtype=leaf.dtype, device=leaf.device)
        return torch.sparse_coo_tensor(index, values, leaf.shape, check_invariants=False)
    if leaf.layout == torch.strided:
        return grad.to_dense() if grad.is_sparse else grad
    return grad if grad.is_sparse else grad.to_sparse(len(leaf.shape) - leaf.dense_dim)


def _sum(
    group: Group, grads: Sequence[Tensor], likes: Sequence[Tensor | None], scale: float | None
) -> list[Tensor]:
    flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
    if scale is not None:
        flat *= scale
    with named(group):
        dist.all_reduce(flat, group=group.handle)
    parts = torch.split(flat, [grad.numel() for grad in grads])
    return [
        _room(grad, like).copy_(part.view(grad.shape))
        for grad, like, part in zip(grads, likes, parts, strict=True)
    ]


def _room(grad: Tensor, like: Tensor | None) -> Tensor:
    if like is None or like.layout != torch.strided:
        return torch.empty_like(grad, memory_format=torch.contiguous_format, requires_grad=False)
    leading = tuple(grad.shape[: grad.dim() - like.dim()])
    return empty_for(like, grad.dtype, leading, grad.device)


def _sum_sparse(group: Group, grad: Tensor, scale: float | None) -> Tensor:
    ours = grad.detach().coalesce().clone()
    if scale is not None:
        ours *= scale
    with named(group):
        dist.all_reduce(ours, group=group.handle)
    return ours


def _sum_with_graph(group: Group, grads: Sequence[Tensor], scale: float | None) -> list[Tensor]:
    # Also where the caller has switched it off: the gradients have a graph, which would be cut.
    with torch.enable_grad():
        return _sum_in_graph(group, grads, scale)


def _sum_in_graph(group: Group, grads: Sequence[Tensor], scale: float | None) -> list[Tensor]:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    reduced = _all_reduced(flat if scale is None else flat * scale, group)
    parts = torch.split(reduced, [grad.numel() for grad in grads])
    return [part.view(grad.shape) for grad, part in zip(grads, parts, strict=True)]


def _all_reduced(tensor: Tensor, group: Group) -> Tensor:
    return cast("Tensor", _AllReduce.apply(tensor, group))  # type: ignore[no-untyped-call]


class _AllReduce(torch.autograd.Function):
    """The sum over ranks; its derivative is the sum of the ranks' cotangents."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        with named(group):
            dist.all_reduce(reduced, group=group.handle)
        return reduced

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return _all_reduced(cotangents[0], ctx.group), None
