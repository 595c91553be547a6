"""What the rules say about where samples lie, against the Jacobians of the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional

from gradkit._autograd.sample_rules import BatchDim, NotProvedError, inputs_of
from gradkit._compat.nodes import Shape
from gradkit._core.graph import is_leaf_node

SIZE = 4  # of every dimension
Op = Callable[[Tensor], Tensor]


def eye(x: Tensor) -> Tensor:
    return torch.eye(SIZE, dtype=x.dtype, device=x.device) + 1


def classes(x: Tensor) -> Tensor:
    return torch.arange(SIZE, device=x.device)


UNARY = (
    "abs", "atan", "clone", "cos", "cosh", "erf", "exp", "expm1", "float", "neg", "relu",
    "sigmoid", "sin", "sinh", "square", "tanh", "tril", "triu",
)  # fmt: skip
ACTIVATIONS = (
    "celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid",
    "mish", "relu6", "selu", "silu", "softplus",
)  # fmt: skip
POINTWISE: dict[str, Op] = {
    **{name: lambda x, name=name: getattr(x, name)() for name in UNARY},  # type: ignore[misc]
    **{name: lambda x, name=name: getattr(functional, name)(x) for name in ACTIVATIONS},  # type: ignore[misc]
    "add": lambda x: x + 2 * x.exp(),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.exp()),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "clamp": lambda x: x.clamp(-0.5, 0.5) + x.clamp_min(0) + x.clamp_max(0),
    "div": lambda x: x / x.exp() / 2 + 1 / (x + 9),
    "dropout": functional.dropout,
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3) + torch.lerp(x, 2 * x, x),
    "log": lambda x: (x + 9).log() + (x + 9).log1p() + (x + 9).rsqrt() + (x + 9).sqrt(),
    "losses": lambda x: functional.huber_loss(x, x.exp(), reduction="none")
    + functional.smooth_l1_loss(x, x.exp(), reduction="none")
    + functional.mse_loss(x, x.exp(), reduction="none")
    + functional.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="none")
    + functional.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid(), reduction="none"),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "maximum": lambda x: torch.maximum(x, -x) + torch.minimum(x, x.exp()),
    "pow": lambda x: (x + 9) ** 0.5 + 2**x + (x + 9) ** x,
    "prelu": lambda x: functional.prelu(x, torch.ones(SIZE, device=x.device, dtype=x.dtype)),
    "sub": lambda x: 1 - x - x.exp(),
    "threshold": lambda x: functional.threshold(x, 0.1, 0.2),
    "where": lambda x: torch.where(x > 0, x, x.exp()),
}  # fmt: skip
SHAPING: dict[str, Op] = {
    "broadcast": lambda x: x + x[..., :1] * x[:, :1],
    "broadcast, fewer": lambda x: x * x[0],
    "cat": lambda x: torch.cat([x, x.exp()], 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 2)[::-1], 2),
    "expand": lambda x: x.expand(2, -1, -1, -1),
    "flatten": lambda x: x.flatten(0, 1).exp(),
    "flatten, transposed": lambda x: x.transpose(0, 1).flatten(0, 1),
    "flip": lambda x: x.flip(0, -1),
    "gather": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "pad": lambda x: functional.pad(x, (1, 2)),
    "permute": lambda x: x.permute(2, 0, -2),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x.unsqueeze(1).expand(-1, 4, -1, -1), 2),
    "select": lambda x: x[:, 1],
    "split": lambda x: x.split([1, 3], 1)[1],
    "stack": lambda x: torch.stack([x, x.exp()], -2),
    "squeeze": lambda x: x[:, None].squeeze(1) + x[None].squeeze() + x[None].squeeze((0,)),
    "swap": lambda x: x.mT.flatten(1).unflatten(1, (2, -1)),
    "unbind": lambda x: torch.stack(x.unbind(2)[::-1], 0),
    "view of two": lambda x: x.view(2, 2, SIZE, SIZE).transpose(0, 1).reshape_as(x),
    "view of parts": lambda x: x.view(2, -1, 2, SIZE).sum(1),
}  # fmt: skip
MIXING: dict[str, Op] = {
    "amax": lambda x: x.amax(1) + x.amin(-2),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x.exp(), x.sin()),
    "attention, causal": lambda x: functional.scaled_dot_product_attention(
        x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), is_causal=True
    ),
    "batch_norm": lambda x: functional.batch_norm(x, eye(x)[0], eye(x)[1]),
    "batch_norm in training": lambda x: functional.batch_norm(x, None, None, training=True),
    "bmm": lambda x: torch.bmm(x, x.exp()),
    "conv1d": lambda x: functional.conv1d(x, eye(x).unsqueeze(-1)),
    "conv2d": lambda x: functional.conv2d(x.unsqueeze(1), eye(x).expand(2, 1, -1, -1)),
    "conv_transpose1d": lambda x: functional.conv_transpose1d(x, eye(x).unsqueeze(-1)),
    "cross_entropy": lambda x: functional.cross_entropy(
        x, classes(x).expand(SIZE, -1), reduction="none"
    ),
    "cross_entropy of rows": lambda x: functional.cross_entropy(
        x.flatten(0, 1), classes(x).repeat(SIZE), reduction="none"
    ),
    "cumsum": lambda x: x.cumsum(1) + x.cumprod(-2),
    "glu": lambda x: functional.glu(x, 1),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "instance_norm": functional.instance_norm,
    "interpolate": lambda x: functional.interpolate(x.unsqueeze(1), scale_factor=2),
    "layer_norm": lambda x: functional.layer_norm(x, (SIZE,)),
    "layer_norm of two": lambda x: functional.layer_norm(x, (SIZE, SIZE)),
    "linear": lambda x: functional.linear(x, eye(x), eye(x)[0]),
    "logsumexp": lambda x: x.logsumexp((0, -1)),
    "matmul": lambda x: x @ eye(x),
    "matmul from the left": lambda x: eye(x) @ x,
    "max": lambda x: x.max(1).values + x.min(-2, keepdim=True).values.squeeze(1),
    "mean": lambda x: x.mean((1, -1)),
    "mv": lambda x: x @ eye(x)[0],
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1)
    + functional.pairwise_distance(x, x.exp()),
    "normalize": lambda x: functional.normalize(x, dim=1),
    "outer": lambda x: x.flatten(1) @ x.flatten(1).T,
    "pools": lambda x: functional.avg_pool1d(x, 2)
    + functional.max_pool1d(x, 2)
    + functional.adaptive_avg_pool1d(x, 2),
    "pools of images": lambda x: functional.adaptive_max_pool2d(x, 2) + functional.max_pool2d(x, 2),
    "pools of volumes": lambda x: functional.max_pool3d(x[:, None, None], (1, 2, 2))
    + functional.avg_pool3d(x[:, None, None], (1, 2, 2)),
    "prod": lambda x: x.prod(1),
    "softmax": lambda x: x.softmax(1) + x.log_softmax(-2),
    "std": lambda x: x.std(1) + x.var(1),
    "sum": lambda x: x.sum(-1, keepdim=True) + x.sum(2, keepdim=True).sum(),
    "sum of rows": lambda x: x.sum(-1).sum(-1, keepdim=True),
}  # fmt: skip
NEVER = {"batch_norm in training", "instance_norm", "outer", "sum"}  # or not by these rules
OPS = {**POINTWISE, **SHAPING, **MIXING}


def at_the_leaf(node: Node, batch: BatchDim) -> Iterator[BatchDim | None]:
    """Yield where the samples lie in the leaf below, by each path; None if they share it."""
    children = [child for child, _ in node.next_functions]
    for child, there in zip(children, inputs_of(node, batch), strict=True):
        if child is None:
            continue
        if is_leaf_node(child) or there is None:
            yield there
        else:
            yield from at_the_leaf(child, there)


def samples(batch: BatchDim, device: torch.device) -> Tensor:
    """Return the sample of each element of a tensor, in row-major order."""
    index = torch.arange(batch.shape[batch.dim], device=device)
    shape = [-1 if dim == batch.dim else 1 for dim in range(len(batch.shape))]
    return (index // batch.block % batch.size).view(shape).expand(batch.shape).flatten()


@pytest.mark.parametrize("name", OPS)
def test_the_rules_are_true_of_the_jacobian(device: torch.device, name: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(SIZE, SIZE, SIZE, dtype=torch.float64, device=device, requires_grad=True)
    y = OPS[name](x)
    assert y.grad_fn is not None
    ones = torch.eye(y.numel(), dtype=y.dtype, device=device).view(-1, *y.shape)
    rows = [torch.autograd.grad(y, x, one, retain_graph=True)[0].flatten() for one in ones]
    jacobian = torch.stack(rows)
    proved = 0
    for dim, size in enumerate(y.shape):
        for block, count in ((1, SIZE), (1, 2), (2, 2)):
            batch = BatchDim(tuple(y.shape), dim, block, count)
            if size % (block * count):
                continue
            try:
                (there,) = set(at_the_leaf(y.grad_fn, batch))
            except (NotProvedError, ValueError):
                continue
            if there is not None:
                proved += 1
                apart = samples(batch, device)[:, None] != samples(there, device)
                assert not jacobian[apart].count_nonzero()
    assert (proved > 0) == (name not in NEVER)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw the shape of a tensor of 72 elements."""
    factors = draw(st.permutations((2, 2, 2, 3, 3, 1)))
    ends = [0, *sorted(draw(st.sets(st.integers(1, 5)))), 6]
    return tuple(prod(factors[start:end]) for start, end in pairwise(ends))


@settings(max_examples=settings.default.max_examples // 2)
@given(shape=shapes(), viewed=shapes(), size=st.sampled_from((2, 3, 4, 6)), data=st.data())
def test_a_view_has_the_samples_where_the_tensor_has_them(
    device: torch.device, shape: Shape, viewed: Shape, size: int, data: st.DataObject
) -> None:
    dim = data.draw(st.sampled_from(range(len(shape))))
    block = data.draw(st.sampled_from((1, 2, 3)))
    assume(shape[dim] % (size * block) == 0)
    batch = BatchDim(shape, dim, block, size)
    expected = samples(batch, device)
    possible = [
        BatchDim(viewed, to, of, size)
        for to, length in enumerate(viewed)
        for of in range(1, length)
        if length % (of * size) == 0
    ]
    right = [one for one in possible if torch.equal(samples(one, device), expected)]
    if right:
        assert [batch.viewed(viewed)] == right
    else:
        with pytest.raises(NotProvedError):
            batch.viewed(viewed)
