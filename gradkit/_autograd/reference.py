"""torch's own calls for the same gradients, as users write them: what gradkit is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def accumulate(losses: Sequence[Tensor]) -> None:
    """Accumulate the gradients of the sum of losses into `.grad`, and keep the graph."""
    torch.autograd.backward(losses, retain_graph=True)


def grad(losses: Sequence[Tensor], variables: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of the sum of losses, None where it is unused, and keep the graph."""
    return torch.autograd.grad(losses, variables, retain_graph=True, allow_unused=True)


def func_grads(fn: Callable[..., tuple[Tensor, Any]], *args: Any) -> tuple[Any, Any]:
    """Return the gradients of a function with aux with respect to all arguments, and the aux."""
    run = torch.func.grad_and_value(fn, argnums=tuple(range(len(args))), has_aux=True)
    grads, (_, aux) = run(*args)
    return grads, aux
