"""Attention that can be differentiated twice, and in forward mode, as fused kernels cannot.

By torch's plain formula: for long sequences in chunks of queries, whose scores are computed again
in a pass, so that what is kept is linear in the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradkit._compat.autograd import plain_attention
from gradkit._compat.transforms import FORWARD, derivatives_around
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.known_results import recomputed

_fused: Any = functional.scaled_dot_product_attention
_multi_head: Any = functional.multi_head_attention_forward
OPERATIONS = frozenset((_fused, _multi_head))
CHUNK = 1 << 22  # the most scores of a chunk: 16 MiB in float32
Tensors: TypeAlias = tuple[Tensor, ...]


def lacks_derivative(more: int = 0) -> bool:
    """Return whether fused kernels lack a derivative that is taken here, or `more` Grads around."""
    # The kernel's node has its formula where eager code differentiates a gradient again.
    stack = derivatives_around()
    return FORWARD in stack or stack.count("Grad") + more > 1


def by_formula(operation: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Run one of `OPERATIONS` by the formula."""
    if torch.compiler.is_compiling():
        with sdpa_kernel(SDPBackend.MATH), INSIDE:
            return operation(*args, **kwargs)
    if operation is _fused:
        given, options = pytree.map_tensors(
            lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (args, kwargs)
        )
        operation(*given, **options)  # raises for bad arguments
        return attention(*args, **kwargs)
    # A mode does not see what is called in an operation that it runs.
    names = {"has_torch_function": lambda _: False, "scaled_dot_product_attention": attention}
    code, variables = _multi_head.__code__, vars(functional) | names
    return FunctionType(code, variables, argdefs=_multi_head.__defaults__)(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what scaled_dot_product_attention does; a query that may see nothing gives zeros."""
    formula = partial(_formula, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
    length, keys = query.size(-2), key.size(-2)
    mask = attn_mask[None] if attn_mask is not None and attn_mask.dim() == 1 else attn_mask
    rows = CHUNK * length // max(1, query.shape[:-1].numel() * keys)
    if dropout_p or rows >= length:  # dropout is drawn at once, as in eager code
        given = (query, key, value) if mask is None else (query, key, value, mask)
        return formula(*given, causal_from=0 if is_causal else None)[0]
    results: list[Tensor] = []
    for start in range(0, length, max(1, rows)):
        chunk = slice(start, start + max(1, rows))
        seen = slice(chunk.stop if is_causal else None)
        given = query[..., chunk, :], key[..., seen, :], value[..., seen, :]
        if mask is not None:
            given += (mask if mask.size(-2) == 1 else mask[..., chunk, :],)
        of_chunk = partial(formula, causal_from=start if is_causal else None)
        results += recomputed(of_chunk, *given)
    return torch.cat(results, -2)


def _formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    *, causal_from: int | None, dropout_p: float, scale: float | None, enable_gqa: bool,
) -> Tensors:  # fmt: skip
    if causal_from is not None:  # the number of the first query
        every = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        mask = every.tril(causal_from)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return (plain_attention(query, key, value, mask, dropout_p, **options)[0],)
