"""The optimizers SGD, Adam, AdamW and RMSprop."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit._core.params import Tensors
from gradkit.errors import LeafTypeError, OptionError, describe, message
from gradkit.meta import _optimizer as ops
from gradkit.meta._optimizer import Factor, Hyper, Leaves, Optimizer, Settings, StateLists, Updated

_COUNT: Mapping[str, Callable[[Tensor], Any]] = {"step": lambda leaf: 0}


@ops.optimizer_function
def sgd(
    lr: Hyper = 1e-3,
    *,
    momentum: Hyper = 0.0,
    dampening: Hyper = 0.0,
    weight_decay: Hyper = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return stochastic gradient descent as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.sgd(lr=0.5)
        >>> w = torch.tensor([1.0, 2.0])
        >>> opt.step(w, torch.tensor([1.0, 1.0]), opt.init(w))[0]
        tensor([0.5000, 1.5000])

    Args:
        lr: The learning rate: a number, a tensor of one element, or a tree like params with one of
            these, or a tensor of the leaf's shape, for each leaf. So may every other number here.
        momentum: The decay of the momentum buffer.
        dampening: 1 - this is the gradient's factor in the momentum buffer, after the first step.
        weight_decay: This times the parameter is added to the gradient.
        nesterov: Use Nesterov momentum, which needs a momentum and no dampening.
        maximize: Ascend instead of descend.

    Returns:
        An `Optimizer` with the values of `torch.optim.SGD`; its `"step"` counts those of each leaf.

    Raises:
        OptionError: There is no such hyper-parameter, a number is negative (`dampening` may be), or
            a flag is not a bool; or, in a step, `nesterov` does not fit.

    Source:
        `torch.optim.SGD`, https://pytorch.org/docs/stable/generated/torch.optim.SGD.html, whose
        `differentiable=True` loses the gradient through the first momentum step.
    """
    hyper = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    hyper |= {"nesterov": nesterov, "maximize": maximize}
    entries = {"momentum_buffer": lambda leaf: None, **_COUNT}
    return Optimizer("sgd", hyper, entries, _sgd, checks_ranges=True)


def _sgd(params: Tensors, grads: Tensors, state: StateLists, hyper: Settings) -> Updated:
    momentum, dampening, nesterov = hyper["momentum"], hyper["dampening"], hyper["nesterov"]
    if nesterov and (ops.is_zero(momentum) or not ops.is_zero(dampening)):
        expected = "a momentum, and no dampening, as in torch.optim.SGD"
        got = f"momentum={describe(momentum)}, dampening={describe(dampening)}"
        fix = "sgd(lr=0.1, momentum=0.9, nesterov=True)"
        raise OptionError(message("nesterov", expected, got, fix))
    grads = ops.to_descend(params, grads, hyper)
    new = {**state, "step": [step + 1 for step in state["step"]]}
    direction = grads
    if not ops.is_zero(momentum):
        direction = _momentum(state["momentum_buffer"], grads, momentum, dampening)
        new["momentum_buffer"] = direction
        if nesterov:
            direction = ops.add(grads, direction, momentum)
    return ops.descend(params, direction, hyper["lr"]), new


def _momentum(buffers: Leaves, grads: Tensors, momentum: Factor, dampening: Factor) -> Tensors:
    """Return the momentum buffers after a step, which on the first step are the gradients."""
    # Leaf by leaf: another leaf may have had its first gradient before.
    started = [index for index, buffer in enumerate(buffers) if buffer is not None]
    if not started:
        return grads
    old = [buffer for buffer in buffers if buffer is not None]
    share = ops.combine(operator.sub, 1, ops.select(dampening, started))
    decayed = ops.scale(old, ops.select(momentum, started))
    sums = ops.add(decayed, ops.select(grads, started), share)
    by_index = dict(zip(started, sums, strict=True))
    return [by_index.get(index, grad) for index, grad in enumerate(grads)]


@ops.optimizer_function
def adam(
    lr: Hyper = 1e-3,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return Adam as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.adam(lr=0.1)
        >>> w = torch.tensor([1.0])
        >>> w, state = opt.step(w, torch.tensor([2.0]), opt.init(w))
        >>> w, state["step"]
        (tensor([0.9000]), 1)

    Args:
        lr: As in `sgd`; it and every other number may be a tensor or a tree.
        betas: The decays of the averages of the gradient and of its square.
        eps: Added to the square root of the second average.
        weight_decay: As in `sgd`.
        amsgrad: Divide by the largest second average so far.
        maximize: As in `sgd`.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.Adam`. Where a second average is 0 (a
        dead unit), so is the derivative of the update; torch's `differentiable=True` gives nan.

    Raises:
        OptionError: As in `sgd`; or a beta is not below 1.

    Source:
        Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1,
        https://arxiv.org/abs/1412.6980; `torch.optim.Adam`
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return _make("adam", {**hyper, "maximize": maximize, "amsgrad": amsgrad})


@ops.optimizer_function
def adamw(
    lr: Hyper = 1e-3,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return AdamW, Adam with decoupled weight decay, as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.adamw(lr=0.1, weight_decay=0.5)
        >>> w = torch.tensor([1.0])
        >>> opt.step(w, torch.tensor([0.0]), opt.init(w))[0]
        tensor([0.9500])

    Args:
        lr: As in `adam`.
        betas: As in `adam`.
        eps: As in `adam`.
        weight_decay: `lr` times this times the parameter is subtracted from the parameter.
        amsgrad: As in `adam`.
        maximize: As in `adam`.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.AdamW`; derivatives as in `adam`.

    Raises:
        OptionError: As in `adam`.

    Source:
        Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2,
        https://arxiv.org/abs/1711.05101; `torch.optim.AdamW`
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return _make("adamw", {**hyper, "maximize": maximize, "amsgrad": amsgrad})


def _make(name: str, hyper: dict[str, Any]) -> Optimizer:
    averages = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if hyper["amsgrad"] else [])]
    entries = {**_COUNT, **dict.fromkeys(averages, torch.zeros_like)}
    return Optimizer(name, hyper, entries, partial(_adam, name), checks_ranges=True)


def _adam(
    name: str, params: Tensors, grads: Tensors, state: StateLists, hyper: Settings
) -> Updated:
    refuse_complex(name, params)
    if hyper["amsgrad"] and "max_exp_avg_sq" not in state:
        raise _no_state_for(name, "amsgrad")
    is_decoupled = name == "adamw"
    if is_decoupled and not ops.is_zero(hyper["weight_decay"]):
        shrinkage = ops.combine(operator.mul, hyper["lr"], hyper["weight_decay"])
        params = ops.descend(params, params, shrinkage)
    grads = ops.to_descend(params, grads, hyper, decay=not is_decoupled)
    beta, beta_sq = hyper["betas"]
    steps = [step + 1 for step in state["step"]]
    means = ops.moving_average(state["exp_avg"], grads, beta)
    squares = ops.moving_average(state["exp_avg_sq"], ops.squared(grads), beta_sq)
    new: StateLists = {"step": steps, "exp_avg": means, "exp_avg_sq": squares}
    if hyper["amsgrad"]:
        squares = list(map(torch.maximum, state["max_exp_avg_sq"], squares))
        new["max_exp_avg_sq"] = squares
    elif "max_exp_avg_sq" in state:
        new["max_exp_avg_sq"] = state["max_exp_avg_sq"]
    first, second = _bias_correction(beta, steps), _bias_correction(beta_sq, steps)
    roots = ops.scale(ops.sqrt(squares), _computed_once(ops.combine(operator.pow, second, -0.5)))
    direction = _divide_by_root(means, ops.add_scalar(roots, hyper["eps"]), squares)
    rate = ops.combine(operator.mul, hyper["lr"], ops.combine(operator.pow, first, -1.0))
    return ops.descend(params, ops.scale(direction, _computed_once(rate)), 1.0), new


def _bias_correction(beta: Factor, steps: Sequence[Any]) -> Factor:
    """Return 1 - beta ** step."""
    # The step is an int: the float32 that torch counts in costs 1 - beta ** t several digits.
    first = steps[0]
    is_read = torch.compiler.is_compiling() or isinstance(first, Tensor)
    if not (isinstance(beta, list) or is_read) and len(set(steps)) == 1:
        once: Factor = 1 - beta**first
        return once
    betas = ops.per_tensor(beta, len(steps))
    return [1 - b**step for b, step in zip(betas, steps, strict=True)]


def _computed_once(factor: Any) -> Any:
    """Return a factor, as a tensor that torch.compile computes before its loop over elements."""
    if transforms() or not torch.compiler.is_compiling():
        return factor
    if isinstance(factor, list):
        return list(map(_computed_once, factor))
    if not isinstance(factor, Tensor):
        factor = torch.scalar_tensor(factor, dtype=torch.float64)
    # Inductor gives what as_strided reads its own memory; all else it repeats for every element,
    # a power of the count too (0.57 of the usual loop at 20 tensors of 64 x 64, and not 0.47).
    return factor.as_strided((), ()) if factor.ndim == 0 else factor


@ops.optimizer_function
def rmsprop(
    lr: Hyper = 1e-2,
    *,
    alpha: Hyper = 0.99,
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 0.0,
    momentum: Hyper = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return RMSprop as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.rmsprop(lr=0.1, alpha=0.75)
        >>> w = torch.tensor([1.0])
        >>> opt.step(w, torch.tensor([2.0]), opt.init(w))[0]
        tensor([0.8000])

    Args:
        lr: As in `sgd`; it and every other number may be a tensor or a tree.
        alpha: The decay of the average of the squared gradient.
        eps: Added to its square root.
        weight_decay: As in `sgd`.
        momentum: As in `sgd`.
        centered: Subtract the square of the average gradient.
        maximize: As in `sgd`.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.RMSprop`; derivatives as in `adam`.

    Raises:
        OptionError: As in `sgd`.

    Source:
        Tieleman and Hinton 2012, "Lecture 6.5: rmsprop"; Graves 2013 for `centered`,
        https://arxiv.org/abs/1308.0850; `torch.optim.RMSprop`
    """
    hyper = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
    hyper |= {"momentum": momentum, "centered": centered, "maximize": maximize}
    entries: dict[str, Callable[[Tensor], Any]] = {
        "square_avg": torch.zeros_like,
        "grad_avg": torch.zeros_like if centered else lambda leaf: None,
        "momentum_buffer": torch.zeros_like,
        **_COUNT,
    }
    return Optimizer("rmsprop", hyper, entries, _rmsprop, checks_ranges=True)


def _rmsprop(params: Tensors, grads: Tensors, state: StateLists, hyper: Settings) -> Updated:
    refuse_complex("rmsprop", params)
    if hyper["centered"] and any(mean is None for mean in state["grad_avg"]):
        raise _no_state_for("rmsprop", "centered")
    grads = ops.to_descend(params, grads, hyper)
    alpha, momentum = hyper["alpha"], hyper["momentum"]
    squares = ops.moving_average(state["square_avg"], ops.squared(grads), alpha)
    means, variances = state["grad_avg"], squares
    if hyper["centered"]:
        means = ops.moving_average(means, grads, alpha)
        variances = ops.add(squares, ops.squared(means), -1.0)
    roots = ops.add_scalar(ops.sqrt(variances), hyper["eps"])
    direction, buffers = _divide_by_root(grads, roots, variances), state["momentum_buffer"]
    if not ops.is_zero(momentum):
        direction = buffers = ops.add(direction, buffers, momentum)
    steps = [step + 1 for step in state["step"]]
    new = {"step": steps, "square_avg": squares, "grad_avg": means, "momentum_buffer": buffers}
    return ops.descend(params, direction, hyper["lr"]), new


def _divide_by_root(numerators: Tensors, denominators: Tensors, squares: Tensors) -> Tensors:
    """Return the quotients, whose derivative is taken as 0 where the square is 0."""
    if not transforms():
        quotients: Iterable[Tensor] = torch._foreach_div(numerators, denominators)
    else:
        quotients = map(operator.truediv, numerators, denominators)
    return [
        torch.where(square == 0, q.detach(), q) if q.requires_grad or transforms() else q
        for q, square in zip(quotients, squares, strict=True)
    ]


def refuse_complex(name: str, params: Tensors) -> None:
    """Raise if an optimizer that squares gradients is given complex parameters."""
    if any(param.is_complex() for param in params):
        expected = f"real tensors, because {name} squares the gradients"
        fix = "torch.view_as_real(tensor), or sgd"
        raise LeafTypeError(message("params", expected, "a complex one", fix))


def _no_state_for(name: str, flag: str) -> OptionError:
    """Return the error for a flag that is switched on where the state has no entry for it."""
    expected = "False, as when the state was made"
    fix = f"opt = {name}({flag}=True), and its opt.init(params)"
    return OptionError(message(flag, expected, "True for a step", fix))


def is_own_rule(opt: Optimizer) -> bool:
    """Return whether the update of an optimizer is of this package: no code of the caller's."""
    rule = getattr(opt.rule, "func", opt.rule)
    return isinstance(rule, FunctionType) and rule.__module__ in _FILES


_FILES = {__name__, __name__.replace("builtin", "newer")}
