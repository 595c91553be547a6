"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradkit.errors import OptionError, describe, message
from gradkit.meta import _foreach
from gradkit.meta._foreach import Factor, Tensors
from gradkit.meta._optimizer import Columns, Hyper, Optimizer, optimizer_function, select


@optimizer_function
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
        momentum: The decay of the momentum buffer.
        dampening: 1 - dampening is the factor of the gradient in the momentum buffer, after the
            first step.
        weight_decay: This times the parameter is added to the gradient.
        nesterov: Use Nesterov momentum, which needs a momentum and no dampening.
        maximize: Ascend instead of descend.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.SGD`.

    Raises:
        OptionError: There is no such hyper-parameter, or a flag is not a bool.

    Source:
        `torch.optim.SGD`, https://pytorch.org/docs/stable/generated/torch.optim.SGD.html. Its own
        `differentiable=True` loses the gradient through the first momentum step; this keeps it.
    """
    hyper = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    hyper |= {"nesterov": nesterov, "maximize": maximize}
    return Optimizer("sgd", hyper, {"momentum_buffer": lambda leaf: None}, _sgd)


def _sgd(
    params: Tensors, grads: Tensors, state: Columns, hyper: Mapping[str, Any]
) -> tuple[Tensors, Columns]:
    momentum, dampening, nesterov = hyper["momentum"], hyper["dampening"], hyper["nesterov"]
    if nesterov and (_foreach.is_zero(momentum) or not _foreach.is_zero(dampening)):
        expected = "a momentum, and no dampening, as in torch.optim.SGD"
        got = f"momentum={describe(momentum)}, dampening={describe(dampening)}"
        fix = "sgd(lr=0.1, momentum=0.9, nesterov=True)"
        raise OptionError(message("nesterov", expected, got, fix))
    grads = _foreach.with_weight_decay(params, grads, hyper)
    if _foreach.is_zero(momentum):
        return _foreach.descend(params, grads, hyper["lr"]), state
    buffers = _momentum(state["momentum_buffer"], grads, momentum, dampening)
    direction = _foreach.add(grads, buffers, momentum) if nesterov else buffers
    return _foreach.descend(params, direction, hyper["lr"]), {"momentum_buffer": buffers}


def _momentum(
    buffers: Sequence[Tensor | None], grads: Tensors, momentum: Factor, dampening: Factor
) -> Tensors:
    """Return the momentum buffers after a step, which on the first step are the gradients."""
    # Leaf by leaf: another leaf may have had its first gradient before.
    started = [index for index, buffer in enumerate(buffers) if buffer is not None]
    new = list(grads)
    if started:
        old = [buffer for buffer in buffers if buffer is not None]
        share = _foreach.one_minus(select(dampening, started))
        decayed = _foreach.scale(old, select(momentum, started))
        sums = _foreach.add(decayed, select(grads, started), share)
        for index, buffer in zip(started, sums, strict=True):
            new[index] = buffer
    return new
