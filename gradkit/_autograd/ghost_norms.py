"""Norms of the gradients of samples, from the cotangents of what the layers returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.func import vmap

from gradkit._autograd.engine import numbered_roots, own_roots, run_grad
from gradkit._autograd.jacobian_rows import ARRIVED, JacobianRows
from gradkit._checks.checked import is_checked
from gradkit._checks.sample_independence import (
    BatchDim,
    NotProvedError,
    SharedOperand,
    uses_shared_by_samples,
)
from gradkit._compat.autograd import current_pass
from gradkit._compat.nodes import Shape, saved, saved_ints
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core import user_code
from gradkit._core.leaf_arithmetic import norms_of_rows, without_autocast
from gradkit.errors import GradkitError


class Factors(NamedTuple):
    """The gradients of B samples as products `left^T right`, `[p, q]` each."""

    left: Tensor  # `[B, T, p]`; or `[B, T]`, integers: where in a row of zeros there is a one
    right: Tensor  # `[B, T, q]`


PerSampleGrads: TypeAlias = Factors | Tensor  # or the gradients themselves, `[B, *variable.shape]`
Rule: TypeAlias = Callable[[SharedOperand, Tensor, Tensor], PerSampleGrads]
Terms: TypeAlias = Callable[[Node, Tensor], Tensor]


def _by_sample(tensor: Tensor, batch: BatchDim) -> Tensor:
    """Return a tensor of the output's shape up to the samples' dimension as `[B, T, ...]`."""
    rows = tensor.movedim(batch.dim, 0)
    blocks = rows.reshape(-1, batch.size, batch.block, *rows.shape[1:])
    return blocks.transpose(0, 1).flatten(1, 2)


def _matrix(name: str, *, transposed: bool, scale: str | None = None) -> Rule:
    def rule(use: SharedOperand, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
        if scale is not None and saved(use.node, scale) != 1:
            cotangent = cotangent * saved(use.node, scale)
        rows = _by_sample(saved(use.node, name), use.batch)
        grads = _by_sample(cotangent, use.batch)
        return Factors(grads, rows) if transposed else Factors(rows, grads)

    return rule


def _vector(use: SharedOperand, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
    rows = _by_sample(saved(use.node, "self"), use.batch)
    grads = _by_sample(cotangent, use.batch)
    return torch.bmm(grads.unsqueeze(1), rows).squeeze(1)


def _embedding(use: SharedOperand, cotangent: Tensor, _: Tensor) -> PerSampleGrads:
    positions = _by_sample(saved(use.node, "indices"), use.batch).flatten(1)
    grads = _by_sample(cotangent, use.batch).flatten(1, -2)
    (padding,) = saved_ints(use.node, "padding_idx")
    return Factors(positions, grads.masked_fill((positions == padding).unsqueeze(-1), 0))


def _kernel(use: SharedOperand, cotangent: Tensor, weight: Tensor) -> PerSampleGrads:
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


def _sum_over_uses(terms: Terms, *, by_channel: bool = False) -> Rule:
    """Return the rule of a variable that was broadcast: the sum of terms for each element."""

    # There is a term for each element of its node's output, whose channels are dimension 1.
    def rule(use: SharedOperand, cotangent: Tensor, variable: Tensor) -> PerSampleGrads:
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
    ("AddmmBackward0", 0, False): _sum_over_uses(_scaled("beta")),
    ("AddmmBackward0", 2, False): _matrix("mat1", transposed=False, scale="alpha"),
    ("AddmmBackward0", 2, True): _matrix("mat1", transposed=True, scale="alpha"),
    ("MvBackward0", 1, False): _vector,
    ("EmbeddingBackward0", 0, False): _embedding,
    ("ConvolutionBackward0", 1, False): _kernel,
    ("ConvolutionBackward0", 2, False): _sum_over_uses(_cotangent, by_channel=True),
    ("AddBackward0", 0, False): _sum_over_uses(_cotangent),
    ("AddBackward0", 1, False): _sum_over_uses(_scaled("alpha")),
    ("SubBackward0", 0, False): _sum_over_uses(_cotangent),
    ("SubBackward0", 1, False): _sum_over_uses(_scaled("alpha", -1)),
    ("MulBackward0", 0, False): _sum_over_uses(_scaled("other")),
    ("MulBackward0", 1, False): _sum_over_uses(_scaled("self")),
    ("NativeLayerNormBackward0", 1, False): _sum_over_uses(_layer_norm),
    ("NativeLayerNormBackward0", 2, False): _sum_over_uses(_cotangent),
    ("NativeGroupNormBackward0", 1, False): _sum_over_uses(_group_norm, by_channel=True),
    ("NativeGroupNormBackward0", 2, False): _sum_over_uses(_cotangent, by_channel=True),
    ("NativeBatchNormBackward0", 1, False): _sum_over_uses(_batch_norm, by_channel=True),
    ("NativeBatchNormBackward0", 2, False): _sum_over_uses(_cotangent, by_channel=True),
}


# A sum of T products of norm a_t each has a squared norm S that is computed as the sum of T * T
# terms. The term of t and u is of size a_t * a_u at most, and its rounding error a few eps times
# that: the error of S is a few eps * A * A at most, where A is the sum of the a_t. Where S is more
# than these shares of A * A, the error of the norm is a few thousandths of it at most in float32,
# and mostly far less; in float64, where a norm may be differenced or compared, 1e-10. Positions
# whose gradients are orthogonal have S = A * A / T: they may be 8000, or 50,000.
_CANCELLED = {torch.float32: 1e-4, torch.float64: 2e-5}


class _SquaredNorms(NamedTuple):
    """For each sample, of one variable."""

    squares: Tensor
    # The square of the sum of the norms of what was added up, if by products; else there is no
    # such loss of digits.
    summed: Tensor | None = None


def ghost_norms(rows: JacobianRows, index: int) -> Tensor | None:
    """Return the norms for the elements of a loss, and keep the graph; None if not proved right."""
    loss, variables = rows.call.outputs[index], rows.params.variables
    below = rows.call.graph.below([index])
    if not _may_run(rows, loss):
        return None
    try:
        uses = uses_shared_by_samples(loss, below, variables, RULES)
        squares = _squared_norms(rows, index, uses)
    except NotProvedError:
        return None
    except (RuntimeError, TypeError) as error:  # TypeError: Apple's GPUs have no float64
        if isinstance(error, GradkitError):
            raise
        return None  # such as out of memory; the batched pass has its own ways
    if squares is None:
        return None
    rows.note([ARRIVED if number in squares else None for number in range(len(variables))])
    return _total(rows, loss, [square.squares for square in squares.values()]).sqrt_()


def _squared_norms(
    rows: JacobianRows, index: int, uses: Sequence[SharedOperand]
) -> dict[int, _SquaredNorms] | None:
    """Return squared norms of which some digits are right; None if float64 has not enough."""
    variables = rows.params.variables
    if not _products_are_rounded(variables[0].device):
        squares = _GhostPass(uses, variables, None).run(rows, index)
        if not _have_cancelled(rows, rows.call.outputs[index], squares):
            return squares
        if any(variable.dtype == torch.float64 for variable in variables):
            return None
    return _GhostPass(uses, variables, torch.float64).run(rows, index)


def _products_are_rounded(device: torch.device) -> bool:
    """Return whether the user lets products of float32 have fewer digits, such as TF32's."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee")


def _have_cancelled(rows: JacobianRows, loss: Tensor, squares: dict[int, _SquaredNorms]) -> bool:
    """Return whether the norm of a sample is but a rounding error of what was added up."""
    summed = [square.summed for square in squares.values() if square.summed is not None]
    if not summed:
        return False
    total = _total(rows, loss, [square.squares for square in squares.values()])
    share = max(_CANCELLED[variable.dtype] for variable in rows.params.variables)
    least = share * _total(rows, loss, summed)
    return not total.is_meta and bool((total < least).any())  # the host has to wait for it


def _total(rows: JacobianRows, loss: Tensor, parts: Sequence[Tensor]) -> Tensor:
    total = rows.zeros(loss.numel())
    for part in parts:
        total += part.to(total)
    return total


def _may_run(rows: JacobianRows, loss: Tensor) -> bool:
    """Return whether nothing but the operations of the graph changes or reads a cotangent."""
    # In float16, a gradient that is not finite would get a norm that is.
    dtypes = {variable.dtype for variable in rows.params.variables}
    return (
        rows.call.plain_leaves
        and dtypes <= {torch.float32, torch.float64}
        and not loss.retains_grad
        and not user_code.hooks_registered()
        and not is_checked()
    )


class _GhostPass:
    """A pass that makes the squared norms of a variable as soon as its last use is reached."""

    def __init__(
        self,
        uses: Sequence[SharedOperand],
        variables: Sequence[Tensor],
        dtype: torch.dtype | None,  # of the products; None is that of their factors
    ) -> None:
        self._variables = variables
        self._dtype = dtype
        self._by_node: dict[Node, list[SharedOperand]] = defaultdict(list)
        self._left: dict[int, int] = defaultdict(int)  # how many uses of a variable are to come
        for use in uses:
            self._by_node[use.node].append(use)
            self._left[use.variable] += 1
        self._parts: dict[int, list[PerSampleGrads]] = defaultdict(list)
        self._squares: dict[int, _SquaredNorms] = {}
        self._own_passes: set[int] = set()

    def run(self, rows: JacobianRows, index: int) -> dict[int, _SquaredNorms]:
        """Return the squared norms by the number of the variable, of those that are reached."""
        below, loss = rows.call.graph.below([index]), rows.call.outputs[index]
        if not self._by_node:
            return {}
        above = below.leading_to((), tuple(self._by_node))
        # The engine does not execute those that it captures, so that no gradient of a variable is
        # computed; those that are above others it executes, and their cotangents are then free.
        captured = [node for node in self._by_node if node not in above]
        with undo_stack() as stack:
            for node in self._by_node.keys() & above:
                arrive = partial(node.register_prehook, partial(self._arrive, node))
                stack.callback(user_code.remove_hooks, user_code.register_own_hooks(arrive))
            numbered = stack.enter_context(numbered_roots([loss]))
            roots = stack.enter_context(own_roots(numbered, self._own_passes.add))
            edges = [GradientEdge(node, 0) for node in captured]
            grads = run_grad(rows.call, roots, edges, [None], retain_graph=True)
            for node in captured:
                self._add(node, grads.pop(0))
        for number in list(self._parts):
            self._finish(number)  # of which a use was not reached
        return self._squares

    def _arrive(self, node: Node, cotangents: user_code.Cotangents) -> None:
        if current_pass() in self._own_passes:
            self._add(node, cotangents[0])

    def _add(self, node: Node, cotangent: Tensor | None) -> None:
        for use in self._by_node[node]:
            variable = self._variables[use.variable]
            self._left[use.variable] -= 1
            if cotangent is not None:
                with torch.no_grad(), without_autocast(cotangent.device), INSIDE:
                    part = RULES[use.kind](use, cotangent, variable.detach())
                    self._parts[use.variable].append(part)
                    if not self._left[use.variable]:
                        self._finish(use.variable)

    def _finish(self, number: int) -> None:
        parts, variable = self._parts.pop(number), self._variables[number]
        self._squares[number] = _squares(parts, variable, self._dtype)


def _squares(
    parts: list[PerSampleGrads], variable: Tensor, dtype: torch.dtype | None
) -> _SquaredNorms:
    """Return the squared norm of the sum of the parts, for each sample."""
    factors = [part for part in parts if isinstance(part, Factors)]
    if len(factors) == len(parts) and _products_are_less(factors, variable.numel()):
        return _squares_of_products([_cast(part, dtype) for part in factors])
    dense = (_dense(part, variable) for part in parts)
    total = next(dense)
    for part in dense:
        total = total + part
    return _SquaredNorms(norms_of_rows(total).square_())


def _cast(part: Factors, dtype: torch.dtype | None) -> Factors:
    """Return factors in a dtype; positions stay integers."""
    if dtype is None:
        return part
    left, right = part
    return Factors(left if left.dim() == 2 else left.to(dtype), right.to(dtype))


def _products_are_less(factors: list[Factors], size: int) -> bool:
    """Return whether products of rows are less arithmetic than gradients, or far less memory."""
    count, width = sum(part.right.shape[1] for part in factors), factors[0].right.shape[2]
    return count * (size // width + width) <= size or 8 * count * count <= size


def _squares_of_products(factors: list[Factors]) -> _SquaredNorms:
    """Return the squared norms of sums of products: `<left left^T, right right^T>`."""
    if len(factors) == 1 and factors[0].right.shape[1] == 1:
        left, right = factors[0]
        squares = norms_of_rows(right).square_()
        return _SquaredNorms(
            squares if left.dim() == 2 else squares * norms_of_rows(left).square_()
        )
    # A variable of several uses has the cross terms of each two of them.
    total = summed = torch.zeros_like(factors[0].right[:, 0, 0])
    for i, (left, right) in enumerate(factors):
        for other_left, other_right in factors[i:]:
            lefts, rights = _products(left, other_left), right @ other_right.mT
            terms = lefts * rights
            if other_left is left:
                total = total + terms.sum((1, 2))
                squares = terms.diagonal(dim1=1, dim2=2)
                summed = summed + squares.clamp(min=0).sqrt().sum(1)
            else:
                total = total + 2 * terms.sum((1, 2))
    return _SquaredNorms(total.clamp_(min=0), summed.square())


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of rows `[B, T, p]` and `[B, U, p]`, either as positions."""
    if left.dim() == 3 and right.dim() == 3:
        return left @ right.mT
    if left.dim() == 2 and right.dim() == 2:
        return left.unsqueeze(2) == right.unsqueeze(1)
    if left.dim() == 2:
        return _products(right, left).mT
    return left.gather(2, right.unsqueeze(1).expand(-1, left.shape[1], -1))


def _dense(part: PerSampleGrads, variable: Tensor) -> Tensor:
    """Return the gradients of the samples, `[B, *shape]`."""
    if isinstance(part, Tensor):
        return part
    left, right = part
    if left.dim() == 3:
        return left.mT @ right
    zeros = right.new_zeros(len(right), *variable.shape)
    return zeros.scatter_add_(1, left.unsqueeze(2).expand_as(right), right)
