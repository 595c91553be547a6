"""Formulas of operations that are differentiated where torch's own rules are wrong, or missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gradkit._checks import edge_formulas
from gradkit._checks.special_functions import SPECIAL_FUNCTIONS
from gradkit._compat.nodes import saved, saved_ints, saved_or

Operation = Callable[..., Any]


def weight_norm(operation: Operation | None, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """Return a tensor with the norms `g`; of torch's kernel, also the norms of `v`."""
    if operation is not None and v.is_complex():
        return operation(v, g, dim)  # no kernel, and none of its wrong derivatives
    exact = v.contiguous().to(torch.promote_types(v.dtype, torch.float32))  # as torch's kernel
    # Of the norm of all, which -1 means there, torch has no jvp.
    norm: Tensor = exact.norm() if dim == -1 else torch.norm_except_dim(exact, 2, dim)
    result = (exact * (g / norm)).to(v.dtype)
    return (result, norm.detach()) if "interface" in getattr(operation, "__name__", "") else result


def prelu(operation: Operation, input: Tensor, weight: Tensor) -> Any:
    """Return what torch.prelu does."""
    channels = input.shape[1] if input.dim() > 1 else 1
    if input.is_complex() or input.dtype != weight.dtype or weight.numel() not in {1, channels}:
        return operation(input, weight)  # which raises
    if weight.numel() != 1:  # one for each channel
        weight = weight.reshape(-1, *[1] * (input.dim() - 2))
    elif weight.dim() > input.dim():
        weight = weight.reshape(())
    input = input.clone()  # which has the strides of the result
    return torch.where(input > 0, input, input * weight)


def linear_cross_entropy(operation: Operation, *args: Any, **kwargs: Any) -> Any:
    """Return what it does without chunks, which would be differentiated in the forward pass."""
    return operation(*args, **kwargs | {"options": None})


def of_symmetric(operation: Operation, a: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a function of a symmetric matrix, whose tangent is made symmetric, too."""
    # Its rules of reverse mode do that with the gradient; those of forward mode rely on it.
    # What it does not read, of the other triangle, may be anything.
    finite = a.where(a.isfinite(), 0) / 2
    half = finite + finite.mH
    return operation(a.detach() + (half - half.detach()), *args, **kwargs)


def logcumsumexp(operation: Operation | None, input: Tensor, dim: int) -> Tensor:
    """Return what torch.logcumsumexp does."""
    # Its gradient takes the logarithm of the cotangent, whose derivative at zero is lost; of its
    # jvp: https://github.com/pytorch/pytorch/issues/196705
    if not input.dim():
        return input.clone()
    least = torch.finfo(input.dtype).min  # of -inf beside -inf the difference would be nan
    sums, count = input.masked_fill(input == -torch.inf, least).movedim(dim, -1), 1
    while count < sums.shape[-1]:  # each is the sum over so many elements, or over all before
        pairs = torch.stack([sums[..., count:], sums[..., :-count]])
        sums, count = torch.cat([sums[..., :count], pairs.logsumexp(0)], -1), 2 * count
    sums = sums.masked_fill(sums == least, -torch.inf).movedim(-1, dim).contiguous()
    if not input.is_complex():
        return sums
    # Which of the logarithms it is that the operation gives.
    return sums + 1j * (torch.logcumsumexp(input.detach(), dim) - sums.detach()).imag


def embedding(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what it does; the rows of padding are constants in forward mode, too."""
    rows: Tensor = operation(*args, **kwargs)
    is_operator = operation is not functional.embedding
    names = "weight indices padding_idx" if is_operator else "input weight padding_idx"
    given = edge_formulas.by_name(names, args, kwargs)
    padding_idx = given.get("padding_idx")
    if padding_idx is None or (is_operator and padding_idx < 0):
        return rows
    indices = given["indices" if is_operator else "input"]
    is_padding = (indices == padding_idx % len(given["weight"])).contiguous()
    return torch.where(is_padding[..., None], rows.detach(), rows)


def linspace(
    operation: Operation,
    start: Tensor | float,
    end: Tensor | float,
    steps: int,
    base: float | None = None,
    **options: Any,
) -> Tensor:
    """Return what torch.linspace and torch.logspace do: they drop the graph."""
    if base is None and "logspace" in operation.__name__:
        base = 10.0
    ends = [x.detach() if isinstance(x, Tensor) else x for x in (start, end)]
    exact: Tensor = operation(*ends, steps, **options | ({} if base is None else {"base": base}))
    along = torch.linspace(0, 1, steps, device=exact.device)
    points = start + (end - start) * along.to(torch.promote_types(exact.dtype, along.dtype))
    same = (points if base is None else base**points).to(exact.dtype)
    return exact + (same - same.detach()) if exact.is_floating_point() else exact


FORMULAS: dict[str, Callable[..., Any]] = {
    "weight_norm": weight_norm,
    "prelu": prelu,
    "logcumsumexp": logcumsumexp,
    "embedding": embedding,
    "linear_cross_entropy": linear_cross_entropy,
    **dict.fromkeys(("cholesky", "cholesky_ex", "eigh", "eigvalsh"), of_symmetric),
    **dict.fromkeys(("linspace", "logspace"), linspace),
    **SPECIAL_FUNCTIONS,
    **edge_formulas.EDGE_FORMULAS,
}


def attention(
    query: Tensor, key: Tensor, value: Tensor, *mask: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    """Return what a fused kernel of scaled_dot_product_attention does."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    scale = query.size(-1) ** -0.5 if scale is None else scale
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    masks = [torch.ones_like(scores, dtype=torch.bool).tril()] if is_causal else []
    for one in (*masks, *mask):
        is_bool = one.dtype == torch.bool
        scores = scores.masked_fill(~one, -torch.inf) if is_bool else scores + one
    # A query that may attend to nothing gives zeros; a softmax of it would be nan.
    empty = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return (weights @ value.to(dtype)).to(query.dtype)


Formula: TypeAlias = Callable[..., Tensor]
# A formula, and the tensors that it is of: first those that the node's gradients belong to.
OfNode: TypeAlias = tuple[Formula, list[Tensor]]


def _attention_of(node: Any) -> OfNode:
    mask = saved_or(None, node, "attn_mask", "attn_bias")
    formula = partial(attention, is_causal=saved(node, "is_causal"), scale=saved(node, "scale"))
    inputs = [saved(node, name) for name in ("query", "key", "value")]
    return formula, inputs if mask is None else [*inputs, mask]


_FUSED_ATTENTION = (
    "FlashAttention", "FlashAttentionForCpu", "EfficientAttention", "CudnnAttention",
    "FusedAttentionOverrideable",
)  # fmt: skip
# By the kind of node.
NODE_FORMULAS: dict[str, Callable[[Any], OfNode]] = {
    **{f"ScaledDotProduct{kernel}Backward0": _attention_of for kernel in _FUSED_ATTENTION},
    "WeightNormInterfaceBackward0": lambda node: (
        partial(weight_norm, None, dim=saved(node, "dim")),
        [saved(node, "v"), saved(node, "g")],
    ),
    "LogcumsumexpBackward0": lambda node: (
        partial(logcumsumexp, None, dim=saved_ints(node, "dim")[0]),
        [saved(node, "self")],
    ),
    "HardsigmoidBackward0": lambda node: (
        lambda x: functional.relu6(x + 3) / 6,
        [saved(node, "self")],
    ),
}


def has_formula(node: Any) -> bool:
    """Return whether the result of a node is that of a formula, which draws nothing at random."""
    return type(node).__name__ in NODE_FORMULAS and not saved_or(0, node, "dropout_p")
