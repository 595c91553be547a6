"""Engine passes inside a level of torch.func."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from gradkit._compat import functorch


def run(
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    variables: Sequence[Tensor],
    *,
    retain: bool,
    create: bool,
) -> list[Tensor | None]:
    """Return each variable's gradient, or None if unreached (zeros while torch.compile traces)."""
    if torch.compiler.is_compiling():
        cotangents = [seed for seed in seeds if seed is not None]  # all of them, or none
        return list(
            functorch.autograd_grad(
                outputs, variables, cotangents or None, retain_graph=retain, create_graph=create
            )
        )
    if not outputs:
        return [None] * len(variables)
    with functorch.compiled_autograd_disabled():
        return list(
            torch.autograd.grad(
                outputs,
                variables,
                seeds,
                retain_graph=retain,
                create_graph=create,
                allow_unused=True,
            )
        )


def run_batch(
    run_one: Callable[[Tensor], list[Tensor | None]], seeds: Tensor
) -> list[Tensor | None]:
    """Return stacked gradients from one vmapped pass over a batch of cotangents."""
    reached: list[bool] = []

    def present(seed: Tensor) -> list[Tensor]:
        grads = run_one(seed)
        reached[:] = [grad is not None for grad in grads]
        return [grad for grad in grads if grad is not None]  # vmap returns tensors only

    stacked = iter(vmap(present)(seeds))
    return [next(stacked) if there else None for there in reached]
