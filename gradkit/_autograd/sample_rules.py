"""What the graph shows of samples: where they lie in each tensor, and the gradient of each.

Of each kind of node there is a rule for where the samples lie in its inputs, which proves that a
loss is computed from one sample alone; where all share a variable, one for their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.func import vmap

from gradkit._compat.nodes import (
    Shape,
    hooked_tensors,
    names_of_nodes,
    output_kind,
    output_shape,
    saved,
    saved_ints,
    saved_or,
)
from gradkit._core.graph import Subgraph, edge, is_leaf_node, leaf_of


class NotProvedError(Exception):
    """A sample may depend on another."""


class BatchDim(NamedTuple):
    """Where the samples lie in a tensor: an element is of sample `index // block % size`."""

    shape: Shape  # of the tensor
    dim: int  # along which the index counts
    block: int  # how many consecutive indices are of one sample
    size: int  # how many samples there are; at least two

    def viewed(self, shape: Shape) -> BatchDim:
        """Return where they lie in a tensor with the same elements in the same order."""
        stride = self.block * prod(self.shape[self.dim + 1 :])  # from one sample to the next
        below = 1
        for dim in reversed(range(len(shape))):
            above = below * shape[dim]
            if above and stride % below == 0 and above % (stride * self.size) == 0:
                return BatchDim(shape, dim, stride // below, self.size)
            below = above or 1
        raise NotProvedError

    def at(self, shape: Shape, dim: int) -> BatchDim:
        """Return where they lie in a tensor whose dimension counts the samples as this one's."""
        if not 0 <= dim < len(shape) or shape[dim] != self.shape[self.dim]:
            raise NotProvedError
        return BatchDim(shape, dim, self.block, self.size)

    def broadcast(self, shape: Shape) -> BatchDim | None:
        """Return where they lie in an operand that was broadcast; None if all samples share it."""
        dim = self.dim - (len(self.shape) - len(shape))
        return self.at(shape, dim) if dim >= 0 and shape[dim] != 1 else None

    def without(self, shape: Shape, dims: Collection[int], *, keepdim: bool = False) -> BatchDim:
        """Return where they lie in a tensor some of whose dimensions are gone here."""
        kept = [dim for dim in range(len(shape)) if keepdim or dim not in dims]
        if len(kept) != len(self.shape):
            raise NotProvedError
        return self.at(shape, kept[self.dim])

    def aligned(self, shape: Shape, mixed: Collection[int]) -> BatchDim:
        """Return where they lie in an input of as many dimensions, some of which are mixed."""
        if len(shape) != len(self.shape) or self.dim in mixed:
            raise NotProvedError
        return self.at(shape, self.dim)


# The dimension of the samples in each input of a node; None if they share it, or there is none.
InputBatchDims: TypeAlias = list[BatchDim | None]
Follow: TypeAlias = Callable[[Node, BatchDim, Shape], BatchDim | None]
BatchDimRule: TypeAlias = Callable[[Node, BatchDim, list[Shape | None]], InputBatchDims]


def inputs_of(node: Node, batch: BatchDim) -> InputBatchDims:
    """Return where the samples lie in the inputs of a node."""
    rule = _BATCH_DIM_RULES.get(type(node).__name__)
    if rule is None:
        raise NotProvedError
    edges = node.next_functions
    return rule(node, batch, [None if n is None else output_shape(n, i) for n, i in edges])


def _each(follow: Follow, count: int | None = None) -> BatchDimRule:
    """Return the rule of a node whose samples lie in its first `count` inputs, or in all."""
    # An input without a graph, as data are, has no shape here. It still has to hold the samples as
    # the output does, else the inputs that all samples are said to share would not be shared.

    def rule(node: Node, batch: BatchDim, shapes: list[Shape | None]) -> InputBatchDims:
        own = shapes[:count]
        if count is not None and None in own:
            follow(node, batch, batch.shape)
        inputs = [None if shape is None else follow(node, batch, shape) for shape in own]
        return [*inputs, *([None] * (len(shapes) - len(own)))]

    return rule


def _permutation(node: Node) -> list[int]:
    """Return for each dimension of what a transposition returned which one of its input it was."""
    dims = list(range(len(output_shape(node, 0))))
    if type(node).__name__ == "PermuteBackward0":
        return [dim % len(dims) for dim in saved_ints(node, "dims")]
    if len(dims) > 1:
        first, second = 0, 1
        if type(node).__name__ == "TransposeBackward0":
            (first,), (second,) = saved_ints(node, "dim0"), saved_ints(node, "dim1")
        dims[first], dims[second] = dims[second], dims[first]
    return dims


def _reduction(node: Node, batch: BatchDim, shape: Shape) -> BatchDim:
    dims = {dim % len(shape) for dim in saved_ints(node, "dim")}
    return batch.without(shape, dims, keepdim=saved_or(False, node, "keepdim"))


def _stacked(node: Node, batch: BatchDim, shape: Shape) -> BatchDim:
    (dim,) = saved_ints(node, "dim")
    new = dim % len(batch.shape)
    if batch.dim == new:
        raise NotProvedError
    return batch.at(shape, batch.dim - (batch.dim > new))


def _along(name: str) -> Follow:
    """Return where the samples lie if some dimensions are mixed, which a node has saved."""
    return lambda node, batch, shape: batch.aligned(
        shape, {dim % len(shape) for dim in saved_ints(node, name)}
    )


def _last(count: Callable[[Node], int]) -> Follow:
    """Return where the samples lie if the last dimensions are mixed."""
    return lambda node, batch, shape: batch.aligned(
        shape, range(len(shape) - count(node), len(shape))
    )


def _first(_: Node, batch: BatchDim, shape: Shape) -> BatchDim:
    """Return where the samples lie if all dimensions but the first are mixed."""
    if batch.dim:
        raise NotProvedError
    return batch.at(shape, 0)


def _batch_norm(node: Node, batch: BatchDim, shape: Shape) -> BatchDim:
    if saved(node, "training"):
        raise NotProvedError
    return _first(node, batch, shape)


def _addmm(node: Node, batch: BatchDim, shapes: list[Shape | None]) -> InputBatchDims:
    bias, rows, _ = shapes
    samples = _first(node, batch, batch.shape if rows is None else rows)
    shared = None if bias is None else batch.broadcast(bias)
    return [shared, None if rows is None else samples, None]


def _embedding(node: Node, batch: BatchDim, shapes: list[Shape | None]) -> InputBatchDims:
    if batch.dim == len(batch.shape) - 1 or saved(node, "scale_grad_by_freq"):
        raise NotProvedError
    return [None for _ in shapes]


def _named(names: str, rule: BatchDimRule) -> dict[str, BatchDimRule]:
    return dict.fromkeys(names_of_nodes(names), rule)


_ELEMENTWISE = """
    Abs Add Add.1 Addcdiv Addcmul Alias Atan BinaryCrossEntropy BinaryCrossEntropyWithLogits Celu
    Clamp Clamp.1 ClampMax ClampMin Cos Cosh Div Div.1 Elu Erf Exp Expand Expm1 Gelu Hardsigmoid
    Hardswish Hardtanh HuberLoss LeakyRelu Lerp Lerp.1 Log Log1P LogSigmoid MaskedFill MaskedFill.1
    Maximum Minimum Mish MseLoss Mul Mul.1 NativeDropout Neg Pow Pow.1 Pow.2 PreluKernel Reciprocal
    Relu Rsqrt Rsub Rsub.1 Sigmoid Silu Sin Sinh SmoothL1Loss Softplus Sqrt Sub Sub.1 Tanh
    Threshold ToCopy Where
"""
_VIEWS = "Clone ReshapeAlias Squeeze Squeeze.1 Squeeze.2 UnsafeView Unsqueeze View"
_TRANSPOSITIONS = frozenset(names_of_nodes("T Transpose Permute"))
_REDUCTIONS = "Amax Amin LinalgVectorNorm Logsumexp Max Mean.1 Min Norm.1 Prod.1 Std Sum.1 Var"
_ALONG = "Cat Cumprod Cumsum Gather Glu LogSoftmax SafeSoftmax Slice Softmax Split SplitWithSizes"
_ON_IMAGES = """
    AdaptiveAvgPool{0} AdaptiveMaxPool{0} AvgPool{0} MaxPool{0}WithIndices UpsampleNearest{0}
"""
_ATTENTION = """
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
"""
# Two or three dimensions at the end are mixed.
_OF_TWO = f"{_ON_IMAGES.format('2D')} Tril Triu UpsampleBicubic2D UpsampleBilinear2D"
_OF_THREE = f"{_ON_IMAGES.format('3D')} PixelShuffle"
_BATCH_DIM_RULES = {
    **_named(_ELEMENTWISE, _each(lambda _, batch, shape: batch.broadcast(shape))),
    **_named(_VIEWS, _each(lambda _, batch, shape: batch.viewed(shape))),
    **dict.fromkeys(
        _TRANSPOSITIONS, _each(lambda n, b, shape: b.at(shape, _permutation(n)[b.dim]))
    ),
    **_named(f"{_REDUCTIONS} Select Unbind", _each(_reduction)),
    **_named("NllLoss NllLoss2D", _each(lambda _, batch, shape: batch.without(shape, {1}), 1)),
    **_named("Stack", _each(_stacked)),
    **_named(_ALONG, _each(_along("dim"))),
    **_named("Flip", _each(_along("dims"))),
    **_named("Convolution Mm Mv NativeGroupNorm", _each(_first, 1)),
    **_named("Bmm", _each(_first, 2)),
    **_named(_ATTENTION, _each(_last(lambda _: 2), 3)),
    **_named("NativeBatchNorm", _each(_batch_norm, 1)),
    **_named("NativeLayerNorm", _each(_last(lambda n: len(saved(n, "normalized_shape"))), 1)),
    **_named("ConstantPadNd", _each(_last(lambda n: len(saved(n, "pad")) // 2))),
    **_named(_OF_TWO, _each(_last(lambda _: 2))),
    **_named(_OF_THREE, _each(_last(lambda _: 3))),
    **_named("Addmm", _addmm),
    **_named("Embedding", _embedding),
}


class SharedOperand(NamedTuple):
    """An operation in which all samples share a variable."""

    node: Node
    operand: int  # the input that is the variable
    transposed: bool  # whether the input is the transposed variable
    variable: int  # the variable's number
    batch: BatchDim  # the place of the samples in the output
    is_last: bool  # nothing below its operation leads to another use
    rule: GradRule  # gives the gradients of the samples


def uses_shared_by_samples(
    loss: Tensor, below: Subgraph, variables: Sequence[Tensor]
) -> list[SharedOperand]:
    """Return where the samples share variables; raise if a sample may depend on another."""
    # Each tensor from the vector down gets a `BatchDim`. If one gets two that differ, if samples
    # share what was computed from a variable, or if a use has no rule for its gradients, nothing is
    # proved. What leads to no variable is not looked at.
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    leading = below.leading_to(variables)
    top = edge(loss)[:2]
    batches = {top: BatchDim((loss.numel(),), 0, 1, loss.numel()).viewed(tuple(loss.shape))}
    uses: list[SharedOperand] = []
    stack = [top]
    while stack:
        output = stack.pop()
        inputs = inputs_of(output[0], batches[output])
        shared: list[tuple[int, Node]] = []
        is_last = True
        for operand, (node, number) in enumerate(output[0].next_functions):
            if node is None or not (node in leading or _number(node, numbers) >= 0):
                continue
            child, batch = (node, number), inputs[operand]
            if batch is None:
                shared.append((operand, node))
                continue
            is_last = False
            if child not in batches:
                batches[child] = batch
                stack.append(child)
            elif batches[child] != batch:
                raise NotProvedError
        if shared and (output[1] or hooked_tensors(output[0])):
            raise NotProvedError  # to read what a hook has may recompute a checkpoint
        uses += [_use(output, *one, batches[output], numbers, is_last) for one in shared]
    return uses


def _number(node: Node, numbers: Mapping[int, int]) -> int:
    """Return the number of the variable whose gradient a node accumulates; -1 for other nodes."""
    return numbers.get(id(leaf_of(node)), -1) if is_leaf_node(node) else -1


def _use(
    output: tuple[Node, int],
    operand: int,
    child: Node,
    batch: BatchDim,
    numbers: Mapping[int, int],
    is_last: bool,
) -> SharedOperand:
    name = type(child).__name__
    transposed = name == "TBackward0" or (name in _TRANSPOSITIONS and _permutation(child) == [1, 0])
    leaf = child.next_functions[0][0] if transposed else child
    if leaf is None or not is_leaf_node(leaf) or output_kind(*output) != output_kind(leaf, 0):
        raise NotProvedError
    rule = _GRAD_RULES.get((type(output[0]).__name__, operand, transposed))
    if rule is None:
        raise NotProvedError
    number = _number(leaf, numbers)
    return SharedOperand(output[0], operand, transposed, number, batch, is_last, rule)


class Factors(NamedTuple):
    """The gradients of B samples as products `left^T right`, `[p, q]` each."""

    left: Tensor  # `[B, T, p]`; or `[B, T]`, integers: where in a row of zeros there is a one
    right: Tensor  # `[B, T, q]`


PerSampleGrads: TypeAlias = Factors | Tensor  # or the gradients themselves, `[B, *variable.shape]`
# A rule gets a use, the cotangent of its operation, and the variable.
GradRule: TypeAlias = Callable[[SharedOperand, Tensor, Tensor], PerSampleGrads]
# The function gets a node and its cotangent, and returns a term for each element of the output,
# whose channels are dim 1.
Terms: TypeAlias = Callable[[Node, Tensor], Tensor]


def _by_sample(tensor: Tensor, batch: BatchDim) -> Tensor:
    """Return a tensor of the output's shape up to the samples' dimension as `[B, T, ...]`."""
    if batch.dim == 0 and tensor.shape[0] == batch.size:  # one position each
        return tensor.unsqueeze(1)
    rows = tensor.movedim(batch.dim, 0)
    blocks = rows.reshape(-1, batch.size, batch.block, *rows.shape[1:])
    return blocks.transpose(0, 1).flatten(1, 2)


def _matrix(name: str, scale: str | None = None) -> GradRule:
    def rule(use: SharedOperand, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
        if scale is not None and saved(use.node, scale) != 1:
            cotangent = cotangent * saved(use.node, scale)
        rows = _by_sample(saved(use.node, name), use.batch)
        grads = _by_sample(cotangent, use.batch)
        return Factors(grads, rows) if use.transposed else Factors(rows, grads)

    return rule


def _vector_grads(use: SharedOperand, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
    rows = _by_sample(saved(use.node, "self"), use.batch)
    grads = _by_sample(cotangent, use.batch)
    return torch.bmm(grads.unsqueeze(1), rows).squeeze(1)


def _embedding_grads(use: SharedOperand, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
    positions = _by_sample(saved(use.node, "indices"), use.batch).flatten(1)
    grads = _by_sample(cotangent, use.batch).flatten(1, -2)
    (padding,) = saved_ints(use.node, "padding_idx")
    return Factors(positions, grads.masked_fill((positions == padding).unsqueeze(-1), 0))


def _kernel_grads(use: SharedOperand, cotangent: Tensor, weight: Tensor) -> PerSampleGrads:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [saved(use.node, name) for name in names]

    def one(grads: Tensor, inputs: Tensor) -> Tensor:
        arguments = grads, inputs, weight, None, *options, [False, True, False]
        result: Tensor = torch.ops.aten.convolution_backward(*arguments)[1]
        return result

    inputs = _by_sample(saved(use.node, "input"), use.batch)
    if inputs.is_contiguous():  # kernels of the CPU refuse other strides of dimensions of size 1
        inputs = inputs.flatten().view(inputs.shape)
    result: Tensor = vmap(one)(_by_sample(cotangent, use.batch), inputs)
    return result


def _summed(terms: Terms, *, by_channel: bool = False) -> GradRule:
    """Return the rule of a variable that was broadcast: the sum of terms for each element."""

    def rule(use: SharedOperand, cotangent: Tensor, variable: Tensor) -> PerSampleGrads:
        rank = cotangent.dim()
        shape = (variable.shape[0], *([1] * (rank - 2))) if by_channel else tuple(variable.shape)
        batch = use.batch
        if batch.dim == 0 and cotangent.shape[0] == batch.size and shape == cotangent.shape[1:]:
            each = terms(use.node, cotangent)  # of a sample, one for each element of the variable
            return each.flatten(1) if by_channel else each
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
    """Return the cotangent times a number that the node has saved."""

    def terms(node: Node, cotangent: Tensor) -> Tensor:
        factor = sign * saved(node, name)
        return cotangent if factor == 1 else cotangent * factor

    return terms


def _times(name: str) -> Terms:
    """Return the cotangent times a tensor that the node has saved."""
    return lambda node, cotangent: cotangent * saved(node, name)


def _layer_norm_terms(node: Node, cotangent: Tensor) -> Tensor:
    mean, rstd = saved(node, "result1"), saved(node, "result2")
    return cotangent.mul((saved(node, "input") - mean) * rstd)


def _group_norm_terms(node: Node, cotangent: Tensor) -> Tensor:
    mean, rstd = saved(node, "result1").unsqueeze(-1), saved(node, "result2").unsqueeze(-1)
    groups = saved(node, "input").reshape(*mean.shape[:-1], -1)
    return cotangent.mul(((groups - mean) * rstd).reshape(cotangent.shape))


def _batch_norm_terms(node: Node, cotangent: Tensor) -> Tensor:
    shape: Shape = (-1, *([1] * (cotangent.dim() - 2)))
    mean = saved(node, "running_mean").view(shape)
    rstd = (saved(node, "running_var") + saved(node, "eps")).rsqrt().view(shape)
    return cotangent.mul((saved(node, "input") - mean) * rstd)


# The keys are the kind of node, which of its inputs the variable is, and whether it was transposed.
_GRAD_RULES: dict[tuple[str, int, bool], GradRule] = {
    ("MmBackward0", 1, False): _matrix("self"),
    ("MmBackward0", 1, True): _matrix("self"),
    ("AddmmBackward0", 0, False): _summed(_scaled("beta")),
    ("AddmmBackward0", 2, False): _matrix("mat1", "alpha"),
    ("AddmmBackward0", 2, True): _matrix("mat1", "alpha"),
    ("MvBackward0", 1, False): _vector_grads,
    ("EmbeddingBackward0", 0, False): _embedding_grads,
    ("ConvolutionBackward0", 1, False): _kernel_grads,
    ("ConvolutionBackward0", 2, False): _summed(_cotangent, by_channel=True),
    ("AddBackward0", 0, False): _summed(_cotangent),
    ("AddBackward0", 1, False): _summed(_scaled("alpha")),
    ("SubBackward0", 0, False): _summed(_cotangent),
    ("SubBackward0", 1, False): _summed(_scaled("alpha", -1)),
    ("MulBackward0", 0, False): _summed(_times("other")),
    ("MulBackward0", 1, False): _summed(_times("self")),
    ("NativeLayerNormBackward0", 1, False): _summed(_layer_norm_terms),
    ("NativeLayerNormBackward0", 2, False): _summed(_cotangent),
    ("NativeGroupNormBackward0", 1, False): _summed(_group_norm_terms, by_channel=True),
    ("NativeGroupNormBackward0", 2, False): _summed(_cotangent, by_channel=True),
    ("NativeBatchNormBackward0", 1, False): _summed(_batch_norm_terms, by_channel=True),
    ("NativeBatchNormBackward0", 2, False): _summed(_cotangent, by_channel=True),
}
