"""Optimizers as pure functions: `init(params)`, and `step(params, grads, state)`.

Each is written out, so that every hyper-parameter keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.meta import _arithmetic as a
from gradkit.meta._arithmetic import Factor, Tensors
from gradkit.meta._optimizer import Hyper, Optimizer


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
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> state = opt.init(params)
        >>> params, state = opt.step(params, {"w": torch.tensor([1.0, 1.0])}, state)
        >>> params
        {'w': tensor([0.5000, 1.5000])}

    Args:
        lr: The learning rate: a number, a tensor of one element, or a tree like params with one of
            these, or a tensor of the leaf's shape, for each leaf. So may every other number here.
        momentum: How much of the last direction is kept.
        dampening: How much of the gradient is left out of the momentum, after the first step.
        weight_decay: This times the parameter is added to the gradient.
        nesterov: Look ahead along the momentum.
        maximize: Go up.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.SGD`.

    Source:
        `torch.optim.SGD`, https://pytorch.org/docs/stable/generated/torch.optim.SGD.html. Its own
        `differentiable=True` loses the gradient through the first momentum step; this keeps it.
    """
    hyper = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    return Optimizer("sgd", hyper, {"momentum_buffer": lambda leaf: None}, _sgd)


def _sgd(
    params: Tensors, grads: Tensors, state: list[dict[str, Any]], h: Mapping[str, Any]
) -> tuple[Tensors, list[dict[str, Any]]]:
    if h["nesterov"] and (a.is_zero(h["momentum"]) or not a.is_zero(h["dampening"])):
        raise StructureError(
            message(
                "nesterov",
                "a momentum, and no dampening, as in torch.optim.SGD",
                f"momentum={describe(h['momentum'])}, dampening={describe(h['dampening'])}",
                "sgd(lr=0.1, momentum=0.9, nesterov=True)",
            )
        )
    grads = _with_decay(params, grads, h)
    buffers: list[Any] = [entry["momentum_buffer"] for entry in state]
    if not a.is_zero(h["momentum"]):
        buffers = _momentum(buffers, grads, h["momentum"], h["dampening"])
        grads = a.plus(grads, buffers, h["momentum"]) if h["nesterov"] else buffers
    return _moved(params, grads, h["lr"]), [{"momentum_buffer": b} for b in buffers]


def _momentum(
    buffers: Sequence[Tensor | None], grads: Tensors, momentum: Factor, dampening: Factor
) -> Tensors:
    # The first step takes the gradient as it is; another leaf may have had its first before.
    old = [i for i, buffer in enumerate(buffers) if buffer is not None]
    new = list(grads)

    def of_old(factor: Factor) -> Factor:
        return [factor[i] for i in old] if isinstance(factor, list) else factor

    kept = a.scaled([b for b in buffers if b is not None], of_old(momentum)) if old else []
    fresh = a.complement(of_old(dampening))
    for i, buffer in zip(
        old, a.plus(kept, [grads[i] for i in old], fresh) if old else [], strict=True
    ):
        new[i] = buffer
    return new


def _with_decay(params: Tensors, grads: Tensors, h: Mapping[str, Any]) -> Tensors:
    if h["maximize"]:
        grads = a.scaled(grads, -1.0)
    return grads if a.is_zero(h["weight_decay"]) else a.plus(grads, params, h["weight_decay"])


def _moved(params: Tensors, direction: Tensors, lr: Factor) -> Tensors:
    return a.plus(params, direction, a.product(lr, -1.0))


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
        lr: The learning rate; it and every other number may be a tensor or a tree, as in `sgd`.
        betas: How much of the averages of the gradient and of its square is kept.
        eps: Added to the root of the second average.
        weight_decay: This times the parameter is added to the gradient.
        amsgrad: Divide by the largest second average so far.
        maximize: Go up.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.Adam`. Where a second average is
        exactly 0 (a unit that is dead), the derivative of the update is taken as 0; torch's own
        `differentiable=True` gives nan.

    Source:
        Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1,
        https://arxiv.org/abs/1412.6980; `torch.optim.Adam`
    """
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=False)


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
        weight_decay: `lr` times this times the parameter is taken off the parameter.
        amsgrad: As in `adam`.
        maximize: As in `adam`.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.AdamW`; derivatives as in `adam`.

    Source:
        Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2,
        https://arxiv.org/abs/1711.05101; `torch.optim.AdamW`
    """
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=True)


def _adam(
    name: str,
    lr: Hyper,
    betas: tuple[Hyper, Hyper],
    eps: Hyper,
    weight_decay: Hyper,
    amsgrad: bool,
    maximize: bool,
    *,
    decoupled: bool,
) -> Optimizer:
    hyper = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    entries: dict[str, Callable[[Tensor], Any]] = {
        "step": lambda leaf: 0,
        "exp_avg": torch.zeros_like,
        "exp_avg_sq": torch.zeros_like,
    }
    if amsgrad:
        entries["max_exp_avg_sq"] = torch.zeros_like

    def rule(
        params: Tensors, grads: Tensors, state: list[dict[str, Any]], h: Mapping[str, Any]
    ) -> tuple[Tensors, list[dict[str, Any]]]:
        _refuse_complex(name, params)
        if decoupled:
            grads = a.scaled(grads, -1.0) if h["maximize"] else grads
            if not a.is_zero(h["weight_decay"]):
                params = a.plus(
                    params, params, a.product(a.product(h["lr"], h["weight_decay"]), -1.0)
                )
        else:
            grads = _with_decay(params, grads, h)
        beta, beta_sq = h["betas"]
        steps = [entry["step"] + 1 for entry in state]
        means = a.mixed([entry["exp_avg"] for entry in state], grads, beta)
        squares = a.mixed([entry["exp_avg_sq"] for entry in state], a.times(grads, grads), beta_sq)
        new = [
            {"step": t, "exp_avg": m, "exp_avg_sq": v}
            for t, m, v in zip(steps, means, squares, strict=True)
        ]
        if amsgrad:
            largest = [entry["max_exp_avg_sq"] for entry in state]
            squares = list(map(torch.maximum, largest, squares))
            for entry, square in zip(new, squares, strict=True):
                entry["max_exp_avg_sq"] = square
        first, second = _bias_correction(beta, steps), _bias_correction(beta_sq, steps)
        roots = a.scaled(a.root(squares), a.power(second, -0.5))
        direction = _ratio(means, a.shifted(roots, h["eps"]), squares)
        return _moved(params, direction, a.product(h["lr"], a.power(first, -1.0))), new

    return Optimizer(name, hyper, entries, rule)


def _refuse_complex(name: str, params: Tensors) -> None:
    if any(param.is_complex() for param in params):
        raise LeafTypeError(
            message(
                "params",
                f"real tensors, of which {name} squares the gradients",
                "a complex one",
                "torch.view_as_real(tensor), or sgd",
            )
        )


def _bias_correction(beta: Factor, steps: Sequence[int]) -> Factor:
    """Return 1 - beta ** step."""
    # The step is an int: the float32 that torch counts in costs 1 - beta ** t several digits.
    if not isinstance(beta, list) and len(set(steps)) == 1:
        return 1 - beta ** steps[0]
    return [1 - b**t for b, t in zip(a.each(beta, len(steps)), steps, strict=True)]


def _ratio(above: Tensors, below: Tensors, squares: Tensors) -> Tensors:
    """Return above / below, whose derivative is taken as 0 where the square is 0."""
    ratios = a.over(above, below)
    return [
        torch.where(square == 0, ratio.detach(), ratio)
        if ratio.requires_grad or transforms()
        else ratio
        for ratio, square in zip(ratios, squares, strict=True)
    ]


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
        lr: The learning rate; it and every other number may be a tensor or a tree, as in `sgd`.
        alpha: How much of the average of the squared gradient is kept.
        eps: Added to its root.
        weight_decay: This times the parameter is added to the gradient.
        momentum: How much of the last direction is kept.
        centered: Subtract the square of the average gradient.
        maximize: Go up.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.RMSprop`; derivatives as in `adam`.

    Source:
        Tieleman and Hinton 2012, "Lecture 6.5: rmsprop"; Graves 2013 for `centered`,
        https://arxiv.org/abs/1308.0850; `torch.optim.RMSprop`
    """
    hyper = {
        "lr": lr,
        "alpha": alpha,
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "centered": centered,
        "maximize": maximize,
    }
    entries: dict[str, Callable[[Tensor], Any]] = {
        "square_avg": torch.zeros_like,
        "grad_avg": torch.zeros_like if centered else lambda leaf: None,
        "momentum_buffer": torch.zeros_like,
    }
    return Optimizer("rmsprop", hyper, entries, _rmsprop)


def _rmsprop(
    params: Tensors, grads: Tensors, state: list[dict[str, Any]], h: Mapping[str, Any]
) -> tuple[Tensors, list[dict[str, Any]]]:
    _refuse_complex("rmsprop", params)
    grads = _with_decay(params, grads, h)
    squares = a.mixed([entry["square_avg"] for entry in state], a.times(grads, grads), h["alpha"])
    means: list[Any] = [entry["grad_avg"] for entry in state]
    spread = squares
    if h["centered"]:
        means = a.mixed(means, grads, h["alpha"])
        spread = a.plus(squares, a.times(means, means), -1.0)
    direction = _ratio(grads, a.shifted(a.root(spread), h["eps"]), spread)
    buffers = [entry["momentum_buffer"] for entry in state]
    if not a.is_zero(h["momentum"]):
        direction = buffers = a.plus(direction, buffers, h["momentum"])
    new = [
        {"square_avg": s, "grad_avg": m, "momentum_buffer": b}
        for s, m, b in zip(squares, means, buffers, strict=True)
    ]
    return _moved(params, direction, h["lr"]), new
