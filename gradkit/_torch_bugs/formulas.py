"""Formulas of operations that are differentiated where torch's own rules are wrong, or missing.

Where torch's rules take branches (ties, zeros, singular matrices, eps), the value stays that of the
operation, bit for bit; elsewhere, where the host can tell, the operation itself runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from gradkit._compat.dynamo import run_in_trace
from gradkit._compat.transforms import (
    BATCH,
    DERIVATIVES,
    FORWARD,
    data_of,
    derivatives_around,
    differentiated_around,
    transforms,
)
from gradkit._core.graph import recorded_outside
from gradkit._core.known_results import Result, Rule, rule_of
from gradkit._state.rng import is_capturing
from gradkit.errors import UnsupportedGraphError, message

Operation = Callable[..., Any]


def by_name(names: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an operation is given, by the names of its parameters."""
    return dict(zip(names.split(), args, strict=False)) | dict(kwargs)


def weight_norm(operation: Operation | None, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """Return a tensor with the norms `g`; of torch's kernel, also the norms of `v`."""
    if operation is not None and v.is_complex():
        return operation(v, g, dim)  # no kernel, and none of its wrong derivatives
    exact = v.contiguous().to(torch.promote_types(v.dtype, torch.float32))  # as torch's kernel
    # Torch has no jvp of the norm of all, which -1 means there.
    norm: Tensor = exact.norm() if dim == -1 else torch.norm_except_dim(exact, 2, dim)
    result = (exact * (g / norm)).to(v.dtype)
    return (result, norm.detach()) if "interface" in _name_of(operation) else result


def prelu(operation: Operation, input: Tensor, weight: Tensor) -> Any:
    """Return what torch.prelu does."""
    channels = input.shape[1] if input.dim() > 1 else 1
    if input.is_complex() or input.dtype != weight.dtype or weight.numel() not in {1, channels}:
        return operation(input, weight)  # torch raises
    if weight.numel() != 1:  # each channel has a weight
        weight = weight.reshape(-1, *[1] * (input.dim() - 2))
    elif weight.dim() > input.dim():
        weight = weight.reshape(())
    input = input.clone()  # a clone has the strides of the result
    return torch.where(input > 0, input, input * weight)


def linear_cross_entropy(operation: Operation, *args: Any, **kwargs: Any) -> Any:
    """Return what it does without chunks, which would be differentiated in the forward pass."""
    return operation(*args, **kwargs | {"options": None})


def of_symmetric(operation: Operation, a: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a function of a symmetric matrix, whose tangent is made symmetric, too."""
    # The operation's rules of reverse mode do that with the gradient; those of forward mode rely on
    # it. The other triangle, which it does not read, may hold anything.
    finite = a.where(a.isfinite(), 0) / 2
    half = finite + finite.mH
    symmetric = a.detach() + (half - half.detach())
    if "eigh" in _name_of(operation):
        return _by_reverse(operation, symmetric, *args, **kwargs)
    return operation(symmetric, *args, **kwargs)


def _by_reverse(operation: Operation, a: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what eigh does, where a jvp is differentiated by its rule of reverse mode alone."""
    # The rule of forward mode divides by zeros, on which it then writes: its derivative is nan.
    eager = not torch.compiler.is_compiling() and recorded_outside(a)
    if not differentiated_around((*["Grad"] * eager, *derivatives_around()), FORWARD):
        return operation(a, *args, **kwargs)
    rule = rule_of(lambda a: tuple(operation(a, *args, **kwargs)), transposes=True)
    return getattr(torch.return_types, operation.__name__, tuple)(Result.of(rule, [a]))


def logcumsumexp(operation: Operation | None, input: Tensor, dim: int) -> Tensor:
    """Return what torch.logcumsumexp does."""
    # torch's gradient takes the logarithm of the cotangent, whose derivative at zero is lost; its
    # jvp: https://github.com/pytorch/pytorch/issues/196705
    if not input.dim():
        return input.clone()
    least = torch.finfo(input.dtype).min  # -inf beside -inf would have a difference of nan
    sums, count = input.masked_fill(input == -torch.inf, least).movedim(dim, -1), 1
    while count < sums.shape[-1]:  # each is the sum over so many elements, or over all before
        pairs = torch.stack([sums[..., count:], sums[..., :-count]])
        sums, count = torch.cat([sums[..., :count], pairs.logsumexp(0)], -1), 2 * count
    sums = sums.masked_fill(sums == least, -torch.inf).movedim(-1, dim).contiguous()
    if not input.is_complex():
        return sums
    # The operation decides which of the logarithms it gives.
    return sums + 1j * (torch.logcumsumexp(input.detach(), dim) - sums.detach()).imag


def differences(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Return the differences of each row of a matrix and each of another, or of its own pairs."""
    if y is not None:
        return x[..., :, None, :] - y[..., None, :, :]
    first, second = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return x[first] - x[second]


def distances(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what cdist and pdist do, whose rules give each tie of p=inf the whole gradient."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    each = differences(*tensors)
    if not each.numel():
        return cast("Tensor", operation(*args, **kwargs))
    order = kwargs.get("p", args[len(tensors)] if len(args) > len(tensors) else 2.0)
    return cast("Tensor", torch.linalg.vector_norm(each, order, -1))


@run_in_trace  # torch.compile finds no text in the name of an operation
def _name_of(operation: Operation | None) -> str:
    return getattr(operation, "__name__", "")


def norm(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return a norm; raise where it is zero: torch takes its second derivative there for zero."""
    # The second derivative of cos(norm(x)), which is smooth, is not zero there.
    value: Tensor = operation(*args, **kwargs)
    if _can_be_read(value) and (data_of(value.detach()) == 0).any():
        expected, got = "a norm that has a second derivative", "one that is zero, of which a jvp "
        fix = "x.square().sum() for its square; or hvp at a point at which it is not zero"
        got += "of a derivative is silently wrong"
        raise UnsupportedGraphError(message("torch.linalg.vector_norm", expected, got, fix))
    return value


def xlogy(operation: Operation, input: Any, other: Any, **kwargs: Any) -> Tensor:
    """Return what torch.xlogy and xlog1py do: zero for an input of zero, whatever the other is."""
    if isinstance(other, Tensor):
        at = -1 if "log1p" in _name_of(operation) else 0
        constant = input.detach() if isinstance(input, Tensor) else input
        is_lost = (other.detach() == at) & (constant == 0)
        other = other if _nowhere(is_lost) else torch.where(is_lost, 1, other)
    return cast("Tensor", operation(input, other, **kwargs))


def ctc_loss(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what ctc_loss does; torch's rule has a term that a log_softmax below takes off."""
    names = "log_probs targets input_lengths target_lengths blank reduction zero_infinity"
    given = {"reduction": "mean", **by_name(names, args, kwargs)}
    each = given | {"reduction": "none" if isinstance(given["reduction"], str) else 0}
    losses: Tensor = operation(**each)
    log_probs, *lengths = (given[names.split()[i]] for i in (0, 2, 3))
    read, spoken = (torch.as_tensor(n, device=losses.device).view(losses.shape) for n in lengths)
    steps = torch.arange(len(log_probs), device=losses.device).view(-1, *[1] * losses.dim())
    more = torch.where((steps < read)[..., None], log_probs, -torch.inf).exp().sum((0, -1))
    if given.get("zero_infinity"):
        more = torch.where(operation(**each | {"zero_infinity": False}).isinf(), 0, more)
    losses = losses - (more - more.detach())
    if given["reduction"] in ("mean", 1):
        return (losses / spoken.clamp_min(1)).mean()
    return losses.sum() if given["reduction"] in ("sum", 2) else losses


def svd(operation: Operation, a: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what torch.linalg.svd and torch.svd do: its rule leaves out full matrices."""
    result = operation(a, *args, **kwargs)
    u, values, v = result
    v = v if operation is torch.svd or operation is Tensor.svd else v.mH
    rank = values.size(-1)
    if max(u.size(-1), v.size(-1)) == rank or not values.numel():
        return result
    if u.size(-1) > rank:
        last = _orthogonal(a, u.detach(), v.detach())
        u = torch.cat([u[..., :rank].mT, last.mT], -2).mT  # laid out as torch's
    else:
        v = torch.cat([v[..., :rank], _orthogonal(a.mH, v.detach(), u.detach())], -1)
    return type(result)((u, values, v if operation in (torch.svd, Tensor.svd) else v.mH))


def _orthogonal(a: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return the last columns of u, which are orthogonal to those of a, as a function of a."""
    # The basis of that space which turns least is followed; a loss that is of the space alone has
    # the same derivatives by every basis.
    near = u.mH @ a @ v
    rank = near.size(-1)
    tilt = torch.linalg.inv_ex(near[..., :rank, :].mH).inverse @ near[..., rank:, :].mH
    square = tilt.mH @ tilt
    shrunk = u[..., rank:] - u[..., :rank] @ tilt
    ones = torch.eye(square.size(-1), dtype=u.dtype, device=u.device)
    # The power -1/2 of 1 + square, which is zero here: all of its derivatives up to the fifth.
    last = shrunk @ (ones - square / 2 + 3 / 8 * square @ square)
    change, is_finite = last - last.detach(), last.detach().isfinite()
    if not _nowhere(~is_finite):  # a singular matrix has torch's value, a derivative of nan
        lost = (0 * a.abs().sum() + is_finite.all()).sqrt()  # the root of zero, if any is
        change = torch.where(is_finite, change, lost.to(change.dtype))
    last = u[..., rank:] + change
    looked_at = [] if order_of(a) == 1 else [True]

    def grads(bases: Sequence[Tensor], _: Sequence[bool], cotangents: Sequence[Any]) -> Any:
        turned = (bases[0].mH @ cotangents[0]).detach()
        # A derivative of a loss of the space has other cotangents.
        if not looked_at and _can_be_read(turned):
            looked_at.append(True)
            is_turned = (turned - turned.mH).abs().max() > 1e-3 * turned.abs().max()
            if data_of(is_turned).any():
                expected = "a loss of the space that is orthogonal to the matrix"
                fix = "full_matrices=False; or a loss of u @ u.mH, of those columns u"
                raise UnsupportedGraphError(
                    message("torch.linalg.svd", expected, "one that depends on its basis", fix)
                )
        return cotangents

    rule = Rule(grads, lambda _, tangents: tangents, lambda x: (x.clone(),))
    return Result.of(rule, [last])[0]


def embedding(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what it does; the rows of padding are constants in forward mode, too."""
    rows: Tensor = operation(*args, **kwargs)
    is_operator = operation is not functional.embedding
    names = "weight indices padding_idx" if is_operator else "input weight padding_idx"
    given = by_name(names, args, kwargs)
    padding_idx = given.get("padding_idx")
    if padding_idx is None or (is_operator and padding_idx < 0):
        return rows
    indices = given["indices" if is_operator else "input"]
    is_padding = (indices == padding_idx % len(given["weight"])).contiguous()
    return torch.where(is_padding[..., None], rows.detach(), rows)


def linspace(
    operation: Operation, start: Any, end: Any, steps: int, base: Any = None, **options: Any
) -> Tensor:
    """Return what torch.linspace and torch.logspace do: they drop the graph."""
    if base is None and "logspace" in _name_of(operation):
        base = 10.0
    ends = [x.detach() if isinstance(x, Tensor) else x for x in (start, end)]
    exact: Tensor = operation(*ends, steps, **options | ({} if base is None else {"base": base}))
    along = torch.linspace(0, 1, steps, device=exact.device)
    # torch makes the points on the CPU without device=, wherever the ends are.
    start, end = (x.to(exact.device) if isinstance(x, Tensor) else x for x in (start, end))
    points = start + (end - start) * along.to(torch.promote_types(exact.dtype, along.dtype))
    same = (points if base is None else base**points).to(exact.dtype)
    return exact + (same - same.detach()) if exact.is_floating_point() else exact


def with_value(value: Tensor, formula: Tensor) -> Tensor:
    """Return a value that has the derivatives of a formula for it."""
    return value.detach() + torch.where(formula.isfinite(), formula - formula.detach(), formula)


def det(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what torch.linalg.det does: https://github.com/pytorch/pytorch/issues/104675."""
    (matrix,) = (*args, *kwargs.values())
    try:
        value: Tensor = operation(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # 2.15 solves for a tangent
        value = operation(matrix.detach())
    if not value.numel() or not matrix.size(-1) or _torch_is_right(matrix, value):
        return value
    if order_of(matrix) > _FEW < matrix.size(-1):
        expected, got = "at most the fourth derivative of det", "the fifth, which has no formula"
        fix = "value_and_grads(..., create_graph=True), eagerly, of a matrix that is not singular"
        raise UnsupportedGraphError(message("torch.linalg.det", expected, got, fix))
    constant = matrix.detach()
    finite = torch.where(constant.isfinite(), constant, 0)  # other matrices have no decomposition
    left, singular, right = torch.linalg.svd(finite)
    change = left.mH @ (matrix - constant) @ right.mH  # zero, to be differentiated
    near = torch.diag_embed(singular).to(matrix.dtype) + change
    least = torch.finfo(singular.dtype).eps ** 3 * singular[..., :1, None]
    factor = torch.linalg.det(left) * torch.linalg.det(right)
    return with_value(value, factor * _det_near_diagonal(near, least))


# A matrix with this many rows left, or fewer, is differentiated without a division.
_FEW = 4


def _det_near_diagonal(matrix: Tensor, least: Tensor) -> Tensor:
    """Return the determinant of a matrix whose rows are in the order of their singular values."""
    # A pivot can vanish only if all after it do: the first derivatives are zero, in any order up to
    # the number of these, whatever stands in its place.
    product = matrix.new_ones(())
    while (size := matrix.size(-1)) > _FEW:
        row, column, pivot = matrix[..., :1, 1:], matrix[..., 1:, :1], matrix[..., :1, :1]
        product = product * pivot[..., 0, 0]
        divisor = torch.where(pivot.abs() <= least, 1, pivot)
        matrix = matrix[..., 1:, 1:] - column * (row / divisor)
    missing = _FEW - size
    ones = functional.pad(matrix.new_ones(missing), (size, 0))
    return product * _det_of_four(functional.pad(matrix, (0, missing) * 2) + ones.diag())


def _det_of_four(matrix: Tensor) -> Tensor:
    """Return the determinant of a matrix of four rows, by the minors of two and two of them."""
    first, second, third, fourth = matrix.unbind(-2)
    upper = first[..., :, None] * second[..., None, :]
    lower = third[..., None] * fourth[..., None, :]
    a, b = upper - upper.mT, lower - lower.mT
    pairs = [(0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2), (1, 2, 0, 3), (1, 3, 2, 0), (2, 3, 0, 1)]
    return torch.stack([a[..., i, j] * b[..., k, m] for i, j, k, m in pairs]).sum(0)


def _torch_is_right(matrix: Tensor, value: Tensor) -> bool:
    """Return whether no matrix is known to be singular, in a first derivative by torch.func."""
    # torch differentiates the gradient inside torch.func, and below any dispatch mode, by a
    # decomposition, which is wrong at equal singular values.
    if not (_is_on_host(value) and derivatives_around()) or order_of(matrix) > 1:
        return False
    size = value.detach().abs()
    return bool((size.isfinite() & (size > 100 * torch.finfo(size.dtype).eps)).all())


def _can_be_read(tensor: Tensor) -> bool:
    """Return whether a tensor has values that a device may wait for: only they tell of a fault."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or is_capturing())


def _is_on_host(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read, and no device waits for that."""
    is_traced = torch.compiler.is_compiling() or BATCH in transforms()
    return not is_traced and tensor.device.type == "cpu"


def order_of(tensor: Tensor) -> int:
    """Return how many transforms differentiate, and eager code if it records the tensor."""
    eager = not torch.compiler.is_compiling() and recorded_outside(tensor)
    return sum(kind in DERIVATIVES for kind in derivatives_around()) + eager


def prod(operation: Operation, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return what torch.prod does."""
    value: Tensor = operation(input, *args, **kwargs)
    if not (input.dim() and value.numel()):  # the result is what is given, or nothing
        return value
    dim = args[0] if args else kwargs.get("dim")
    x = input.to(value.dtype)
    x, exponents = _scaled(x.flatten() if dim is None else x.movedim(dim, -1))
    while (size := x.size(-1)) > 1:
        half = size // 2
        x = torch.cat([x[..., :half] * x[..., half : 2 * half], x[..., 2 * half :]], -1)
    x = _unscaled(x, exponents.sum(-1, keepdim=True))
    return with_value(value, x.reshape(value.shape)) if size else value


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers of size about one, and the powers of two by which they are the given ones."""
    # Whatever the order of the product, none overflows whose product does not.
    exponents = x.detach().abs().log2().round()
    exponents = torch.where(exponents.isfinite(), exponents, 0).clamp_min(-120)
    return x * (-exponents).exp2(), exponents


def _unscaled(x: Tensor, exponents: Tensor) -> Tensor:
    half = (exponents / 2).floor()  # the power itself may overflow where the product does not
    return x * half.exp2() * (exponents - half).exp2()


def cumprod(operation: Operation, input: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """Return what torch.cumprod does: https://github.com/pytorch/pytorch/issues/196701."""
    value: Tensor = operation(input, dim, **kwargs)
    (x,) = _with_dimensions(input.to(value.dtype))
    x = x.movedim(dim, -1)
    x, exponents = _scaled(x)
    x = _products_so_far(x, torch.zeros_like(x, dtype=torch.long))
    x = _unscaled(x, exponents.cumsum(-1))
    return with_value(value, x.movedim(-1, dim).reshape(value.shape))


def _products_so_far(x: Tensor, keys: Tensor) -> Tensor:
    """Return for each element the product of those up to it that have its key, which are sorted."""
    count = 1
    while count < x.size(-1):  # each is the product of so many elements, or of all before
        later, earlier = x[..., count:], x[..., :-count]
        same = keys[..., count:] == keys[..., :-count]
        x = torch.cat([x[..., :count], torch.where(same, later * earlier, later)], -1)
        count *= 2
    return x


def scatter_reduce(
    operation: Operation,
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Return what torch.scatter_reduce does; a value that is not included is no tie."""
    # A product's derivative in forward mode: https://github.com/pytorch/pytorch/issues/196702
    options: Any = {"reduce": reduce, "include_self": include_self}
    src = src[tuple(map(slice, index.shape))]  # the rest is not read
    if reduce == "prod" and index.numel() and not _has_no_zeros(src):
        value: Tensor = operation(input.detach(), dim, index, src.detach(), **options)
        given = _with_dimensions(input, index, src)
        product = _segment_products(given, dim, include_self=include_self)
        return with_value(value, product.reshape(value.shape))
    if reduce in {"amax", "amin"} and not include_self:
        # A nan, which equals nothing, is not taken for the extreme value.
        input = input.masked_fill(_is_hit(input, dim, index), torch.nan)
    return cast("Tensor", operation(input, dim, index, src, **options))


def _has_no_zeros(src: Tensor) -> bool:
    """Return whether torch's rule for products is right; its rule of forward mode never is."""
    return _is_on_host(src) and FORWARD not in transforms() and bool((src.detach() != 0).all())


def _is_hit(input: Tensor, dim: int, index: Tensor) -> Tensor:
    return torch.zeros_like(input, dtype=torch.bool).scatter(dim, index, True)


def _with_dimensions(*tensors: Tensor) -> list[Tensor]:
    return [tensor if tensor.dim() else tensor[None] for tensor in tensors]


def _segment_products(given: Sequence[Tensor], dim: int, *, include_self: bool) -> Tensor:
    input, index, src = given
    order = index.argsort(dim)
    keys, x = (t.gather(dim, order).movedim(dim, -1) for t in (index, src))
    input, scale = _scaled(input.movedim(dim, -1))
    x, exponents = _scaled(x)
    products, factors = _products_so_far(x, keys), torch.ones_like(input)
    is_last = functional.pad(keys[..., 1:] != keys[..., :-1], (0, 1), value=True)
    at_last = torch.where(is_last, products, 0)
    hit = _is_hit(factors, -1, keys)
    factors = torch.where(hit, torch.zeros_like(factors).scatter_add(-1, keys, at_last), 1)
    if include_self:
        scale, factors = scale.scatter_add(-1, keys, exponents), input * factors
    else:
        scale, factors = torch.where(hit, 0, scale), torch.where(hit, factors, input)
        scale = scale.scatter_add(-1, keys, exponents)
    return _unscaled(factors, scale).movedim(-1, dim)


def index_reduce(
    operation: Operation,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Return what torch.index_reduce does, which has no derivative in forward mode."""
    options: Any = {"reduce": reduce, "include_self": include_self}
    if reduce == "prod" and _has_no_zeros(source):
        return cast("Tensor", operation(input, dim, index, source, **options))
    value: Tensor = operation(input.detach(), dim, index, source.detach(), **options)
    input, index, source = _with_dimensions(input, index, source)
    index = index.reshape(-1, *[1] * (source.dim() - 1)).movedim(0, dim).expand_as(source)
    result = scatter_reduce(torch.scatter_reduce, input, dim, index, source, **options)
    return with_value(value, result.reshape(value.shape))


_TERMS = 13  # a series' rest is smaller than rounding, in high derivatives, too


def near_zero(bessel: int | None, operation: Operation, input: Tensor) -> Tensor:
    """Return what torch.i0, i1 and sinc (None) do; near zero by series: torch's rules cancel."""
    value: Tensor = operation(input)  # https://github.com/pytorch/pytorch/issues/196703
    is_small = input.detach().abs() < 0.25
    if value.dtype != input.dtype or _nowhere(is_small):  # integers have another dtype
        return value
    x, series = torch.where(is_small, input, 0), torch.ones_like(input)
    square = -(math.pi * x).square() if bessel is None else (x / 2).square()
    for n in range(_TERMS, 0, -1):
        divisor = 2 * n * (2 * n + 1) if bessel is None else n * (n + bessel)
        series = 1 + square / divisor * series
    series = series * x / 2 if bessel else series
    elsewhere = operation(torch.where(is_small, 1, input))
    return with_value(value, torch.where(is_small, series, elsewhere))


def _nowhere(mask: Tensor) -> bool:
    """Return whether a condition is known to hold nowhere; only what is on the host is read."""
    return _is_on_host(mask) and not mask.any()


def is_zeroth_power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return where an exponent is zero, and a base has a logarithm."""
    return (exponent == 0) & ((base != 0) if base.is_complex() else (base > 0))


def pow(operation: Operation, input: Any, exponent: Any, **kwargs: Any) -> Tensor:
    """Return a power; where the exponent is zero, torch takes the slope for a constant."""
    value: Tensor = operation(input, exponent, **kwargs)
    if not isinstance(input, Tensor) or not isinstance(exponent, Tensor):
        return value
    if not (exponent.is_floating_point() or exponent.is_complex()):
        return value
    x, y = input.to(value.dtype), exponent.to(value.dtype)
    # A derivative more is wrong of one less than the exponent; eager code does not say how many.
    order = order_of(x) if derivatives_around() else 4
    powers = range(max(order - 1, 1))
    is_whole = torch.stack([is_zeroth_power(x.detach(), y.detach() - n) for n in powers]).any(0)
    if _nowhere(is_whole):
        return value
    there = (torch.where(is_whole, y, 0) * torch.where(is_whole, x, 1).log()).exp()
    elsewhere = torch.where(is_whole, 1, x) ** torch.where(is_whole, 0.5, y)
    return with_value(value, torch.where(is_whole, there, elsewhere))


def polar(operation: Operation, abs: Tensor, angle: Tensor, **kwargs: Any) -> Tensor:
    """Return what torch.polar does, whose reverse rule reads the direction off the result."""
    value: Tensor = operation(abs, angle, **kwargs)
    if _nowhere(abs.detach() <= 0):
        return value
    return with_value(value, torch.complex(abs * angle.cos(), abs * angle.sin()))


def is_saturated(p: Tensor) -> Tensor:
    """Return where the rule of binary_cross_entropy divides by 1e-12 in place of p * (1 - p)."""
    return (p > 0) & (p < 1) & (p * (1 - p) < 1e-12)


def binary_cross_entropy(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what binary_cross_entropy does, by its logarithms, which are at least -100."""
    value: Tensor = operation(*args, **kwargs)
    given = by_name("input target weight size_average reduce reduction", args, kwargs)
    p, labels, weight = given["input"], given["target"], given.get("weight")
    is_near = is_saturated(p.detach())
    if _nowhere(is_near):
        return value
    near = torch.where(is_near, p, 0.5)
    positive, negative = near.log().clamp_min(-100), (-near).log1p().clamp_min(-100)
    elsewhere = torch.where(is_near, 0.5, p)
    each: Tensor = functional.binary_cross_entropy(elsewhere, labels, reduction="none")
    each = torch.where(is_near, (labels - 1) * negative - labels * positive, each)
    each = each if weight is None else each * weight
    if value.shape == each.shape:
        return with_value(value, each)
    # The old flag; the operator beneath has a number in its place.
    is_sum = given.get("size_average") in (False, 2) or given.get("reduction") in ("sum", 2)
    return with_value(value, each.sum() if is_sum else each.mean())


def shrink(operation: Operation, input: Tensor, lambd: float = 0.5) -> Tensor:
    """Return what softshrink and hardshrink do: nothing, for a threshold of zero."""
    value: Tensor = operation(input, lambd)
    return value if lambd else with_value(value, input)


def cosine_similarity(
    operation: Operation, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8
) -> Tensor:
    """Return what it does; torch differentiates a norm where the eps stands in its place."""
    value: Tensor = operation(x1, x2, dim, eps)
    shape = (x1.detach() + x2.detach()).shape
    pair = [x.to(value.dtype).expand(shape) for x in (x1, x2)]
    squares = [x.detach().double().square().sum(dim, keepdim=True) for x in pair]
    small = [square < eps * eps for square in squares]
    if _nowhere(small[0] | small[1]):
        return value
    for i, is_small in enumerate(small):
        norm = torch.linalg.vector_norm(torch.where(is_small, 1, pair[i]), dim=dim, keepdim=True)
        pair[i] = pair[i] / torch.where(is_small, eps, norm)
    return with_value(value, (pair[0] * pair[1]).sum(dim))


def gaussian_nll_loss(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what it does, with a clamp that forward mode ignores, too, as is documented."""
    given = by_name("input target var full eps reduction", args, kwargs)
    if isinstance(given["var"], Tensor):
        constant, eps = given["var"].detach(), given.get("eps", 1e-6)
        clamped = torch.where(constant < 0, constant, constant.clamp_min(eps))  # negatives raise
        given["var"] = clamped + (given["var"] - constant)
    result: Tensor = operation(**given)
    return result


def vander(
    operation: Operation, x: Tensor, *args: Any, increasing: bool = False, **kwargs: Any
) -> Tensor:
    """Return what torch.vander and torch.linalg.vander do, by the formula of cumprod."""
    value: Tensor = operation(x, *args, **kwargs, **{"increasing": True} if increasing else {})
    x, count = x.reshape(value.shape[:-1]), value.size(-1)
    ones = torch.ones_like(value[..., :1])
    bases = x.to(value.dtype)[..., None].expand(*x.shape, max(count - 1, 0))
    powers = torch.cat([ones, cumprod(torch.cumprod, bases, -1)], -1)[..., :count]
    is_falling = operation is torch.vander and not increasing
    return with_value(value, powers.flip(-1) if is_falling else powers)


def block_diag(operation: Operation, *tensors: Any) -> Tensor:
    """Return what torch.block_diag does, whose rule counts no row for an empty 1-D tensor."""
    given = tensors[0] if isinstance(tensors[0], list | tuple) else tensors
    matrices = [x.reshape(1, 0) if x.shape == (0,) else x for x in given]
    return cast("Tensor", operation(*matrices) if given is tensors else operation(matrices))
