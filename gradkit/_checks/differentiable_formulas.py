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
    # Its gradient takes the logarithm of the cotangent, whose derivative at zero is lost.
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
    read = _padding if operation is functional.embedding else _padding_of_operator
    indices, padding_idx = read(*args, **kwargs)
    if padding_idx is None or padding_idx < 0:
        return rows
    is_padding = (indices == padding_idx).contiguous()
    return torch.where(is_padding[..., None], rows.detach(), rows)


def _padding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> tuple[Tensor, int | None]:
    # Counted from the end, if it is negative.
    return input, None if padding_idx is None else padding_idx % len(weight)


def _padding_of_operator(
    _: Tensor, indices: Tensor, padding_idx: int = -1, *__: Any, **___: Any
) -> tuple[Tensor, int]:
    return indices, padding_idx


def linspace(
    operation: Operation,
    start: Tensor | float,
    end: Tensor | float,
    steps: int,
    base: float | None = None,
    **options: Any,
) -> Tensor:
    """Return what torch.linspace does, or with a base torch.logspace: it drops its graph."""
    ends = [x.detach() if isinstance(x, Tensor) else x for x in (start, end)]
    exact: Tensor = operation(*ends, steps, **options | ({} if base is None else {"base": base}))
    along = torch.linspace(0, 1, steps, device=exact.device)
    points = start + (end - start) * along.to(torch.promote_types(exact.dtype, along.dtype))
    same = (points if base is None else base**points).to(exact.dtype)
    return exact + (same - same.detach()) if exact.is_floating_point() else exact


def logspace(
    operation: Operation,
    start: Tensor | float,
    end: Tensor | float,
    steps: int,
    base: float = 10.0,
    **options: Any,
) -> Tensor:
    """Return what torch.logspace does: it drops its graph."""
    return linspace(operation, start, end, steps, base, **options)


FORMULAS: dict[str, Callable[..., Any]] = {
    "weight_norm": weight_norm,
    "prelu": prelu,
    "logcumsumexp": logcumsumexp,
    "embedding": embedding,
    "linear_cross_entropy": linear_cross_entropy,
    **dict.fromkeys(("cholesky", "cholesky_ex", "eigh", "eigvalsh"), of_symmetric),
    "linspace": linspace,
    "logspace": logspace,
    **SPECIAL_FUNCTIONS,
    "det": edge_formulas.det,
    "prod": edge_formulas.prod,
    "cumprod": edge_formulas.cumprod,
    "scatter_reduce": edge_formulas.scatter_reduce,
    "index_reduce": edge_formulas.index_reduce,
    "sinc": edge_formulas.sinc,
    **dict.fromkeys(("pow", "float_power"), edge_formulas.pow),
    "polar": edge_formulas.polar,
    "binary_cross_entropy": edge_formulas.binary_cross_entropy,
    **dict.fromkeys(("softshrink", "hardshrink"), edge_formulas.shrink),
    "cosine_similarity": edge_formulas.cosine_similarity,
    "gaussian_nll_loss": edge_formulas.gaussian_nll_loss,
    "vander": edge_formulas.vander,
    "block_diag": edge_formulas.block_diag,
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


def _weight_norm_of(node: Any) -> OfNode:
    return partial(weight_norm, None, dim=saved(node, "dim")), [saved(node, "v"), saved(node, "g")]


def _logcumsumexp_of(node: Any) -> OfNode:
    (dim,) = saved_ints(node, "dim")
    return partial(logcumsumexp, None, dim=dim), [saved(node, "self")]


def _hardsigmoid_of(node: Any) -> OfNode:
    return lambda x: functional.relu6(x + 3) / 6, [saved(node, "self")]


_FUSED_ATTENTION = (
    "FlashAttention", "FlashAttentionForCpu", "EfficientAttention", "CudnnAttention",
    "FusedAttentionOverrideable",
)  # fmt: skip
# By the kind of node.
NODE_FORMULAS: dict[str, Callable[[Any], OfNode]] = {
    **{f"ScaledDotProduct{kernel}Backward0": _attention_of for kernel in _FUSED_ATTENTION},
    "WeightNormInterfaceBackward0": _weight_norm_of,
    "LogcumsumexpBackward0": _logcumsumexp_of,
    "HardsigmoidBackward0": _hardsigmoid_of,
}


def has_formula(node: Any) -> bool:
    """Return whether the result of a node is that of a formula, which draws nothing at random."""
    return type(node).__name__ in NODE_FORMULAS and not saved_or(0, node, "dropout_p")
