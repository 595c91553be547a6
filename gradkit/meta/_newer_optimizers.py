"""The optimizers Muon, Lion, Adafactor and schedule-free AdamW."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from gradkit._core.call import check_option, is_number
from gradkit._core.params import Tensors
from gradkit.errors import OptionError, StructureError, message
from gradkit.meta import _optimizer as ops
from gradkit.meta._builtin_optimizers import refuse_complex
from gradkit.meta._optimizer import Factor, Hyper, Optimizer, Settings, StateLists, Updated


@ops.optimizer_function
def muon(
    lr: Hyper = 1e-3,
    *,
    weight_decay: Hyper = 0.1,
    momentum: Hyper = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: Hyper = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Optimizer:
    """Return Muon, which makes the momentum of matrices orthogonal, as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.muon(lr=0.1, weight_decay=0.0, dtype=None)
        >>> w = torch.zeros(2, 2)
        >>> opt.step(w, torch.tensor([[2.0, 0.0], [0.0, 2.0]]), opt.init(w))[0].diag()
        tensor([-0.1108, -0.1108])

    Args:
        lr: As in `sgd`; so are `weight_decay`, which is decoupled, `momentum` and `eps`.
        weight_decay: As in `adamw`.
        momentum: The decay of the average of the gradient.
        nesterov: Use Nesterov momentum.
        ns_coefficients: Those of the polynomial of a Newton-Schulz step.
        eps: The least norm by which a matrix is divided before these steps.
        ns_steps: The number of Newton-Schulz steps, less than 100.
        adjust_lr_fn: As in `torch.optim.Muon`: "original" or None, "match_rms_adamw", or
            "spectral_unclamped", which torch has since 2.15.
        dtype: What these steps are computed in; None is the dtype of the parameter. In bfloat16, as
            in torch, derivatives through them have its two or three digits; those by `lr` and
            `weight_decay` are exact.

    Returns:
        An `Optimizer` with the values of `torch.optim.Muon`, which without Nesterov momentum
        divides buffers in bfloat16 in place. It takes gradients of matrices, and None for all else.

    Raises:
        OptionError: As in `sgd`; or `ns_steps`, `ns_coefficients`, `adjust_lr_fn` or
            `dtype` is not as above.
        StructureError: Raised by a step for a gradient of a leaf that is not 2-dimensional.

    Source:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", algorithm 2,
        https://kellerjordan.github.io/posts/muon/; `torch.optim.Muon`
    """
    check_option("adjust_lr_fn", adjust_lr_fn, (None, *_LR_RATIOS))
    check_option("dtype", dtype, (None, torch.bfloat16, torch.float32, torch.float64))
    is_right = isinstance(ns_coefficients, tuple) and len(ns_coefficients) == 3
    is_right = is_right and all(map(is_number, ns_coefficients))
    if not is_right or type(ns_steps) is not int or not 0 <= ns_steps < 100:
        expected, got = "three numbers, and an int below 100", f"{ns_coefficients!r}, {ns_steps!r}"
        fix = "ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5"
        raise OptionError(message("ns_coefficients, ns_steps", expected, got, fix))
    hyper = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
    rule = partial(
        _muon, (ns_coefficients, ns_steps, dtype), _LR_RATIOS[adjust_lr_fn or "original"]
    )
    entries = {"momentum_buffer": torch.zeros_like}
    hyper["nesterov"] = nesterov
    return Optimizer("muon", hyper, entries, rule, checks_ranges=True, ndim=2)


# The ratios depend on the numbers of rows and columns of a matrix.
_LR_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: sqrt(max(1, rows / max(columns, 1))),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: sqrt(rows / max(columns, 1)),
}


def _muon(
    how: Any,
    ratio: Callable[[int, int], float],
    params: Tensors,
    grads: Tensors,
    state: StateLists,
    hyper: Settings,
) -> Updated:
    refuse_complex("muon", params)
    momentum, eps = hyper["momentum"], ops.per_tensor(hyper["eps"], len(params))
    buffers = _lerp(state["momentum_buffer"], grads, ops.combine(operator.sub, 1, momentum))
    updates = _lerp(grads, buffers, momentum) if hyper["nesterov"] else buffers
    updates = [_orthogonal(x, least, *how) for x, least in zip(updates, eps, strict=True)]
    ratios: Factor = [ratio(*x.shape) for x in params]
    rates = ops.combine(operator.mul, hyper["lr"], ratios)
    return ops.descend(_decayed(params, hyper), updates, rates), {"momentum_buffer": buffers}


def _orthogonal(
    matrix: Tensor, eps: Any, coefficients: Any, steps: int, dtype: torch.dtype | None
) -> Tensor:
    """Return a matrix with the singular vectors of this one, and singular values near 1."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype or matrix.dtype)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


@ops.optimizer_function
def lion(
    lr: Hyper = 1e-4, *, betas: tuple[Hyper, Hyper] = (0.9, 0.99), weight_decay: Hyper = 0.0
) -> Optimizer:
    """Return Lion, which steps along the sign of a momentum, as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.lion(lr=0.1)
        >>> w = torch.tensor([1.0, 2.0])
        >>> opt.step(w, torch.tensor([5.0, -0.2]), opt.init(w))[0]
        tensor([0.9000, 2.1000])

    Args:
        lr: As in `sgd`; so is every other number.
        betas: The decays of the average of the gradient in the step, and in the state.
        weight_decay: As in `adamw`.

    Returns:
        An `Optimizer`. The sign has the derivative 0: gradients flow through `lr`, `weight_decay`
        and params alone.

    Raises:
        OptionError: As in `adam`.

    Source:
        Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2,
        https://arxiv.org/abs/2302.06675
    """
    hyper = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    return Optimizer("lion", hyper, {"exp_avg": torch.zeros_like}, _lion, checks_ranges=True)


def _lion(params: Tensors, grads: Tensors, state: StateLists, hyper: Settings) -> Updated:
    refuse_complex("lion", params)
    in_step, in_state = hyper["betas"]
    signs = [x.sign() for x in ops.moving_average(state["exp_avg"], grads, in_step)]
    new = {"exp_avg": ops.moving_average(state["exp_avg"], grads, in_state)}
    return ops.descend(_decayed(params, hyper), signs, hyper["lr"]), new


@ops.optimizer_function
def adafactor(
    lr: Hyper = 1e-2,
    *,
    beta2_decay: Hyper = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: Hyper = 1.0,
    weight_decay: Hyper = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Return Adafactor, which keeps the row and column means of squares, as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.adafactor(lr=0.1)
        >>> w = torch.ones(2, 2)
        >>> opt.step(w, torch.full((2, 2), 3.0), opt.init(w))[0][0]
        tensor([0.9000, 0.9000])

    Args:
        lr: As in `sgd`, but relative to the size of the parameter, and at most `step ** -0.5`; so
            are `beta2_decay`, `d` and `weight_decay`.
        beta2_decay: The averages of squares give the last one a weight of `step ** beta2_decay`.
        eps: The least root of a mean square (None is that of the dtype), and the least size that a
            parameter counts for.
        d: The largest root mean square of an update, in units of the rate. It and `beta2_decay` are
            one number for a leaf.
        weight_decay: As in `adamw`.
        maximize: As in `sgd`.

    Returns:
        An `Optimizer` with the values of `torch.optim.Adafactor`.

    Raises:
        OptionError: As in `sgd`; or `beta2_decay` is positive, `d` less than 1, or `eps` no pair.
        StructureError: Raised by a step if one of the first two has more elements than one.

    Source:
        Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
        algorithms 4 and 5, https://arxiv.org/abs/1804.04235; `torch.optim.Adafactor`
    """
    is_pair = isinstance(eps, tuple) and len(eps) == 2 and is_number(eps[1])
    if not is_pair or not (eps[0] is None or is_number(eps[0])) or min(eps[0] or 0.0, eps[1]) < 0:
        expected = "a pair of numbers of at least 0, or None and one"
        raise OptionError(message("eps", expected, repr(eps), "eps=(None, 1e-3)"))
    hyper = {"lr": lr, "beta2_decay": beta2_decay, "d": d, "weight_decay": weight_decay}
    entries: dict[str, Callable[[Tensor], Any]] = {
        "row_var": partial(_zero_sums, -1),
        "col_var": partial(_zero_sums, -2),
        "variance": lambda leaf: torch.zeros_like(leaf) if leaf.dim() < 2 else None,
        "step": lambda leaf: 0,
    }
    rule, hyper = partial(_adafactor, eps), {**hyper, "maximize": maximize}
    return Optimizer("adafactor", hyper, entries, rule, checks_ranges=True)


def _zero_sums(dim: int, leaf: Tensor) -> Tensor | None:
    """Return zeros in the shape of a sum over a dimension; None if the leaf is no matrix."""
    if leaf.dim() < 2:
        return None
    shape = list(leaf.shape)
    shape[dim] = 1
    return leaf.new_zeros(shape)


def _adafactor(
    eps: tuple[float | None, float],
    params: Tensors,
    grads: Tensors,
    state: StateLists,
    hyper: Settings,
) -> Updated:
    refuse_complex("adafactor", params)
    grads = ops.to_descend(params, grads, hyper, decay=False)
    steps = [step + 1 for step in state["step"]]
    names = "row_var", "col_var", "variance"
    new: StateLists = {"step": steps, **{name: [] for name in names}}
    updates, rates = [], []
    of_leaf = [ops.per_tensor(hyper[name], len(params)) for name in ("lr", "beta2_decay", "d")]
    for index, (p, g, step) in enumerate(zip(params, grads, steps, strict=True)):
        lr, decay, d = (numbers[index] for numbers in of_leaf)
        if any(isinstance(x, Tensor) and x.dim() for x in (decay, d)):
            got, fix = "a tensor with dimensions", "beta2_decay=-0.8, d=1.0"
            raise StructureError(message("beta2_decay, d", "one number for each leaf", got, fix))
        least = torch.finfo(p.dtype).eps if eps[0] is None else eps[0]
        before = [state[name][index] for name in names]
        after, variance = _factored(before, g * g, step**decay, least)
        for name, entry in zip(names, after, strict=True):
            new[name].append(entry)
        update = variance.clamp(min=least**2).rsqrt() * g
        updates.append(update / (_size(update) / d).clamp(min=1.0))
        rates.append(_size(p).clamp(min=eps[1]) * _smaller(lr, step**-0.5))
    return ops.descend(_decayed(params, hyper), updates, rates), new


def _factored(before: list[Any], squares: Tensor, weight: Any, eps: float) -> tuple[Any, Tensor]:
    """Return the averages of squares, by row and column of a matrix, and what they come to."""
    rows, columns, variance = before
    if rows is None:
        variance = variance * (1 - weight) + squares * weight
        return (None, None, variance), variance
    rows = rows * (1 - weight) + squares.mean(-1, keepdim=True) * weight
    columns = columns * (1 - weight) + squares.mean(-2, keepdim=True) * weight
    product = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=eps)
    return (rows, columns, None), product


def _size(x: Tensor) -> Tensor:
    """Return the root of the mean square."""
    return ops.safe_sqrt(x.square().mean())


def _smaller(a: Any, b: Any) -> Any:
    """Return the smaller of two numbers or tensors."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        tensor, other = (a, b) if isinstance(a, Tensor) else (b, a)
        return tensor.clamp(max=other)
    least: Any = torch.sym_min  # no comparison, for which torch.compile would trace again
    return least(a, b)


@ops.optimizer_function
def schedule_free_adamw(
    lr: Hyper = 2.5e-3,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 0.0,
) -> Optimizer:
    """Return schedule-free AdamW, whose result is an average of its steps, as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.schedule_free_adamw(lr=0.1)
        >>> w = torch.tensor([1.0])
        >>> state = opt.init(w)
        >>> for _ in range(50):
        ...     w, state = opt.step(w, 2 * w, state)
        >>> state["average"].abs() < 0.2  # not w, at which gradients are taken
        tensor([True])

    Args:
        lr: As in `adam`; it needs no decay. To warm up, pass it to each step.
        betas: How far gradients are taken towards the average, and the decay of squares.
        eps: As in `adam`.
        weight_decay: As in `adamw`; at the point at which gradients are taken.

    Returns:
        An `Optimizer`: `step` takes and returns the params at which to take gradients (y in the
        paper); evaluate those in `state["average"]` (x).

    Raises:
        OptionError: As in `adam`.

    Source:
        Defazio et al. 2024, "The Road Less Scheduled", algorithm 1,
        https://arxiv.org/abs/2405.15682
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    entries = {
        "z": torch.clone,
        "average": torch.clone,
        "exp_avg_sq": torch.zeros_like,
        "weight_sum": lambda x: x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32)),
        "step": lambda leaf: 0,
    }
    return Optimizer("schedule_free_adamw", hyper, entries, _schedule_free, checks_ranges=True)


def _schedule_free(params: Tensors, grads: Tensors, state: StateLists, hyper: Settings) -> Updated:
    refuse_complex("schedule_free_adamw", params)
    steps = [step + 1 for step in state["step"]]
    beta, beta_sq = hyper["betas"]
    squares = ops.moving_average(state["exp_avg_sq"], ops.squared(grads), beta_sq)
    roots = ops.add_scalar(ops.sqrt(squares), hyper["eps"])
    # A gradient is 0 where its square is; the derivative is taken as 0, as Adam's is here.
    quotients = map(operator.truediv, grads, roots)
    direction = [torch.where(x == 0, 0.0, q) for x, q in zip(squares, quotients, strict=True)]
    if not ops.is_zero(hyper["weight_decay"]):
        direction = ops.add(direction, params, hyper["weight_decay"])
    betas = ops.per_tensor(beta_sq, len(params))
    roots_of_sum: Factor = [(1 - b**step) ** 0.5 for b, step in zip(betas, steps, strict=True)]
    rates = ops.combine(operator.mul, hyper["lr"], roots_of_sum)
    z = ops.descend(state["z"], direction, rates)
    weights = [rate * rate for rate in ops.per_tensor(rates, len(params))]
    sums = list(map(operator.add, state["weight_sum"], weights))
    shares: Any = [w / torch.where(s == 0, 1.0, s) for w, s in zip(weights, sums, strict=True)]
    average = _lerp(state["average"], z, shares)
    new = {"z": z, "average": average, "exp_avg_sq": squares, "weight_sum": sums, "step": steps}
    return ops.moving_average(average, z, beta), new


def _decayed(params: Tensors, hyper: Settings) -> Tensors:
    """Return the params after decoupled weight decay."""
    if ops.is_zero(hyper["weight_decay"]):
        return params
    shrinkage = ops.combine(operator.mul, hyper["lr"], hyper["weight_decay"])
    return ops.scale(params, ops.combine(operator.sub, 1, shrinkage))


def _lerp(xs: Tensors, ys: Tensors, weight: Factor) -> Tensors:
    """Return x + weight * (y - x), with the rounding of torch.lerp."""
    weights = ops.per_tensor(weight, len(xs))
    return [
        torch.lerp(x, y, w.to(x.dtype) if isinstance(w, Tensor) else w)
        for x, y, w in zip(xs, ys, weights, strict=True)
    ]
