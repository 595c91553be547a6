"""RMSprop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradkit.meta import _foreach
from gradkit.meta._foreach import Tensors
from gradkit.meta._hyperparams import Hyper
from gradkit.meta._optimizer import Columns, Optimizer, optimizer_function


@optimizer_function
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
        alpha: The decay of the average of the squared gradient.
        eps: Added to its square root.
        weight_decay: This times the parameter is added to the gradient.
        momentum: The decay of the momentum buffer.
        centered: Subtract the square of the average gradient.
        maximize: Ascend instead of descend.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.RMSprop`; derivatives as in `adam`.

    Raises:
        OptionError: There is no such hyper-parameter, or a flag is not a bool.

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
    }
    return Optimizer("rmsprop", hyper, entries, _rmsprop)


def _rmsprop(
    params: Tensors, grads: Tensors, state: Columns, hyper: Mapping[str, Any]
) -> tuple[Tensors, Columns]:
    _foreach.refuse_complex("rmsprop", params)
    grads = _foreach.with_weight_decay(params, grads, hyper)
    alpha, momentum = hyper["alpha"], hyper["momentum"]
    squares = _foreach.moving_average(state["square_avg"], _foreach.mul(grads, grads), alpha)
    means, variances = state["grad_avg"], squares
    if hyper["centered"]:
        means = _foreach.moving_average(means, grads, alpha)
        variances = _foreach.add(squares, _foreach.mul(means, means), -1.0)
    roots = _foreach.add_scalar(_foreach.sqrt(variances), hyper["eps"])
    direction, buffers = _foreach.divide_by_root(grads, roots, variances), state["momentum_buffer"]
    if not _foreach.is_zero(momentum):
        direction = buffers = _foreach.add(direction, buffers, momentum)
    new: Columns = {"square_avg": squares, "grad_avg": means, "momentum_buffer": buffers}
    return _foreach.descend(params, direction, hyper["lr"]), new
