"""For each kind of node, the rule of per-sample gradients at one use of a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.func import vmap

from gradkit._checks.batch_dim_rules import BatchDim
from gradkit._checks.sample_independence import Use
from gradkit._compat.nodes import Shape, saved, saved_ints


class Factors(NamedTuple):
    """The gradients of B samples as products `left^T right`, `[p, q]` each."""

    left: Tensor  # `[B, T, p]`; or `[B, T]`, integers: where in a row of zeros there is a one
    right: Tensor  # `[B, T, q]`


PerSampleGrads: TypeAlias = Factors | Tensor  # or the gradients themselves, `[B, *variable.shape]`
Rule: TypeAlias = Callable[[Use, Tensor, Tensor], PerSampleGrads]
Terms: TypeAlias = Callable[[Node, Tensor], Tensor]


def per_sample_gradients(use: Use, cotangent: Tensor, variable: Tensor) -> PerSampleGrads:
    """Return the gradients at a use, given the cotangent of what its node returned."""
    return RULES[use.kind](use, cotangent, variable.detach())


def _by_sample(tensor: Tensor, batch: BatchDim) -> Tensor:
    """Return a tensor of the output's shape up to the samples' dimension as `[B, T, ...]`."""
    rows = tensor.movedim(batch.dim, 0)
    blocks = rows.reshape(-1, batch.size, batch.block, *rows.shape[1:])
    return blocks.transpose(0, 1).flatten(1, 2)


def _matrix(name: str, *, transposed: bool, scale: str | None = None) -> Rule:
    def rule(use: Use, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
        if scale is not None and saved(use.node, scale) != 1:
            cotangent = cotangent * saved(use.node, scale)
        rows = _by_sample(saved(use.node, name), use.batch)
        grads = _by_sample(cotangent, use.batch)
        return Factors(grads, rows) if transposed else Factors(rows, grads)

    return rule


def _vector(use: Use, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
    rows = _by_sample(saved(use.node, "self"), use.batch)
    grads = _by_sample(cotangent, use.batch)
    return torch.bmm(grads.unsqueeze(1), rows).squeeze(1)


def _embedding(use: Use, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
    positions = _by_sample(saved(use.node, "indices"), use.batch).flatten(1)
    grads = _by_sample(cotangent, use.batch).flatten(1, -2)
    (padding,) = saved_ints(use.node, "padding_idx")
    return Factors(positions, grads.masked_fill((positions == padding).unsqueeze(-1), 0))


def _kernel(use: Use, cotangent: Tensor, weight: Tensor) -> PerSampleGrads:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [saved(use.node, name) for name in names]

    def one(grads: Tensor, inputs: Tensor) -> Tensor:
        convolution_backward = torch.ops.aten.convolution_backward
        only_weight = [False, True, False]
        result: Tensor = convolution_backward(grads, inputs, weight, None, *options, only_weight)[1]
        return result

    inputs = _by_sample(saved(use.node, "input"), use.batch)
    result: Tensor = vmap(one)(_by_sample(cotangent, use.batch), inputs)
    return result


def _sum(terms: Terms, *, by_channel: bool = False) -> Rule:
    """Return the rule of a variable that was broadcast: the sum of terms for each element."""

    # There is a term for each element of its node's output, whose channels are dimension 1.
    def rule(use: Use, cotangent: Tensor, variable: Tensor) -> PerSampleGrads:
        rank = cotangent.dim()
        shape = (len(variable), *([1] * (rank - 2))) if by_channel else tuple(variable.shape)
        batch = use.batch
        before, after = cotangent.shape[: batch.dim], cotangent.shape[batch.dim + 1 :]
        each = terms(use.node, cotangent).reshape(*before, -1, batch.size, batch.block, *after)
        each = each.movedim(batch.dim + 1, 0)  # two dimensions are left there, of one sample
        padded: list[int] = [*([1] * (rank - len(shape))), *shape]
        padded.insert(batch.dim, 1)
        summed = each.sum([dim + 1 for dim, size in enumerate(padded) if size == 1])
        return summed.reshape(batch.size, *variable.shape)

    return rule


def _cotangent(_: Node, cotangent: Tensor) -> Tensor:
    return cotangent


def _scaled(name: str, sign: int = 1) -> Terms:
    """Return the cotangent times a number, or a tensor, that the node has saved."""

    def terms(node: Node, cotangent: Tensor) -> Tensor:
        scaled: Tensor = cotangent * (sign * saved(node, name))
        return scaled

    return terms


def _layer_norm(node: Node, cotangent: Tensor) -> Tensor:
    mean, rstd = saved(node, "result1"), saved(node, "result2")
    terms: Tensor = cotangent * ((saved(node, "input") - mean) * rstd)
    return terms


def _group_norm(node: Node, cotangent: Tensor) -> Tensor:
    mean, rstd = saved(node, "result1"), saved(node, "result2")
    groups = saved(node, "input").reshape(*mean.shape, -1)
    normalized = (groups - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    terms: Tensor = cotangent * normalized.reshape(cotangent.shape)
    return terms


def _batch_norm(node: Node, cotangent: Tensor) -> Tensor:
    shape: Shape = (-1, *([1] * (cotangent.dim() - 2)))
    mean = saved(node, "running_mean").view(shape)
    rstd = (saved(node, "running_var") + saved(node, "eps")).rsqrt().view(shape)
    terms: Tensor = cotangent * ((saved(node, "input") - mean) * rstd)
    return terms


# By the kind of node, which of its inputs the variable is, and whether it was transposed.
RULES: dict[tuple[str, int, bool], Rule] = {
    ("MmBackward0", 1, False): _matrix("self", transposed=False),
    ("MmBackward0", 1, True): _matrix("self", transposed=True),
    ("AddmmBackward0", 0, False): _sum(_scaled("beta")),
    ("AddmmBackward0", 2, False): _matrix("mat1", transposed=False, scale="alpha"),
    ("AddmmBackward0", 2, True): _matrix("mat1", transposed=True, scale="alpha"),
    ("MvBackward0", 1, False): _vector,
    ("EmbeddingBackward0", 0, False): _embedding,
    ("ConvolutionBackward0", 1, False): _kernel,
    ("ConvolutionBackward0", 2, False): _sum(_cotangent, by_channel=True),
    ("AddBackward0", 0, False): _sum(_cotangent),
    ("AddBackward0", 1, False): _sum(_scaled("alpha")),
    ("SubBackward0", 0, False): _sum(_cotangent),
    ("SubBackward0", 1, False): _sum(_scaled("alpha", -1)),
    ("MulBackward0", 0, False): _sum(_scaled("other")),
    ("MulBackward0", 1, False): _sum(_scaled("self")),
    ("NativeLayerNormBackward0", 1, False): _sum(_layer_norm),
    ("NativeLayerNormBackward0", 2, False): _sum(_cotangent),
    ("NativeGroupNormBackward0", 1, False): _sum(_group_norm, by_channel=True),
    ("NativeGroupNormBackward0", 2, False): _sum(_cotangent, by_channel=True),
    ("NativeBatchNormBackward0", 1, False): _sum(_batch_norm, by_channel=True),
    ("NativeBatchNormBackward0", 2, False): _sum(_cotangent, by_channel=True),
}
