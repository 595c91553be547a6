"""What the update rules of several optimizers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradkit._compat.transforms import transforms
from gradkit.errors import LeafTypeError, message
from gradkit.meta import _foreach
from gradkit.meta._foreach import Factor, Tensors


def ascent_as_descent(grads: Tensors, hyper: Mapping[str, Any]) -> Tensors:
    """Return the gradients, negated with `maximize`."""
    return _foreach.scale(grads, -1.0) if hyper["maximize"] else grads


def with_weight_decay(params: Tensors, grads: Tensors, hyper: Mapping[str, Any]) -> Tensors:
    """Return the gradients to descend, with the weight decay added."""
    grads = ascent_as_descent(grads, hyper)
    decay = hyper["weight_decay"]
    return grads if _foreach.is_zero(decay) else _foreach.add(grads, params, decay)


def descend(params: Tensors, direction: Tensors, lr: Factor) -> Tensors:
    """Return params - lr * direction."""
    return _foreach.add(params, direction, _foreach.product(lr, -1.0))


def divide_by_root(numerators: Tensors, denominators: Tensors, squares: Tensors) -> Tensors:
    """Return the quotients, whose derivative is taken as 0 where the square is 0."""
    quotients = _foreach.div(numerators, denominators)
    return [
        torch.where(square == 0, quotient.detach(), quotient)
        if quotient.requires_grad or transforms()
        else quotient
        for quotient, square in zip(quotients, squares, strict=True)
    ]


def refuse_complex(name: str, params: Tensors) -> None:
    """Raise if an optimizer that squares gradients is given complex parameters."""
    if any(param.is_complex() for param in params):
        raise LeafTypeError(
            message(
                "params",
                f"real tensors, because {name} squares the gradients",
                "a complex one",
                "torch.view_as_real(tensor), or sgd",
            )
        )
