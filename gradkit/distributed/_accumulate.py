"""The part of `add_grads_(..., hooks=True)` that belongs to DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from gradkit._core.leaf import plus
from gradkit._core.pytree import PyTree
from gradkit._state.dot_grad import replace_grad
from gradkit.distributed._comm_hooks import check_comm_hooks
from gradkit.distributed._reduction import LocalGrads, agree_on_grads
from gradkit.distributed._replicas import (
    join_replicas,
    reduce_replicas,
    reduced_params,
    refuse_no_sync,
    replicas_in,
)

# Leaf tensors, each with the gradient that is added to its `.grad`.
Pairs: TypeAlias = list[tuple[Tensor, Tensor | None]]


def add_to_replicas(params: PyTree, read_pairs: Callable[[], Pairs]) -> Pairs:
    """Add to `.grad` of replicated modules in `params`, reduced; return the other pairs."""
    modules = replicas_in(params)
    if not modules:
        return read_pairs()
    # Not through DDP's reducers: they reduce once after each forward pass, and otherwise silently
    # leave the gradients local [M2].
    refuse_no_sync(modules)
    group = join_replicas(modules, "gradkit.add_grads_")
    replicated = {id(param) for module in modules for param in reduced_params(module)}
    ours: Pairs = []
    others: Pairs = []

    def totals() -> LocalGrads:
        for pair in read_pairs():
            (ours if id(pair[0]) in replicated else others).append(pair)
        leaves, grads = [leaf for leaf, _ in ours], [grad for _, grad in ours]
        check_comm_hooks(modules, [*grads, *(leaf.grad for leaf in leaves)])
        sums = [None if grad is None else plus(leaf.grad, grad) for leaf, grad in ours]
        structure = (("the call", "add_grads_"), ("params", len(ours)))
        return LocalGrads(sums, leaves, structure, lambda index: f"grads, tensor {index}")

    local, specs = agree_on_grads(group, totals)
    # A rank without a gradient adds its `.grad`; where no rank has one, `.grad` stays.
    pairs = zip(ours, local.grads, strict=True)
    sums = [leaf.grad if total is None else total for (leaf, _), total in pairs]
    reduced = reduce_replicas(group, modules, replace(local, grads=sums), specs)
    for (leaf, _), mean in zip(ours, reduced, strict=True):
        if mean is not None:
            replace_grad(leaf, mean)
    return others
