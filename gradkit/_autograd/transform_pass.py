"""Engine passes inside a level of torch.func."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gradkit._autograd.inner_pass import inner_grads
from gradkit._compat.transforms import autograd_grad, compiled_autograd_disabled


def run(
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    variables: Sequence[Tensor],
    *,
    retain: bool,
    create: bool,
) -> list[Tensor | None]:
    """Return each variable's gradient, or None if unreached (zeros while torch.compile traces)."""
    cotangents = [seed for seed in seeds if seed is not None] or None  # all of them, or none
    options = {"retain_graph": retain, "create_graph": create}
    if torch.compiler.is_compiling():
        return list(autograd_grad(outputs, variables, cotangents, **options))
    with compiled_autograd_disabled():
        return inner_grads(outputs, variables, cotangents, **options)


def run_batch(
    run_one: Callable[..., tuple[list[Tensor | None], list[Tensor]]],
    *batched: Tensor,
    **options: Any,
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Vmap a function that returns gradients, some of them None, and other tensors."""
    reached: list[bool] = []

    def present(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        grads, others = run_one(*tensors)
        reached[:] = [grad is not None for grad in grads]
        return [grad for grad in grads if grad is not None], others  # vmap returns tensors only

    grads, others = vmap(present, **options)(*batched)
    stacked = iter(grads)
    return [next(stacked) if there else None for there in reached], list(others)
