"""Tensors from outside that require grad: a run that keeps no graph would lose their gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from gradkit._compat.undoing import INSIDE
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import hooks_made, user_functions
from gradkit.errors import UnsupportedGraphError, message


def refuse_captured(
    where: str, below: Subgraph, inputs: Iterable[Tensor], made: Callable[[Tensor], bool]
) -> None:
    """Raise if a graph ends at a leaf that is no input, and that outlives the run."""
    # A leaf that an operator of the run has made, and that nothing but the graph refers to now.
    ids, alone = set(map(id, inputs)), _references_of_lone_leaf()
    references = _references(below)
    if any(
        leaf.requires_grad and key not in ids and not (made(leaf) and references[key] <= alone)
        for key, leaf in below.leaves.items()
    ):
        expected, fix = _ADVICE[where]
        got = "one that uses a tensor from outside that requires grad: its gradient would be lost"
        fix += (
            "; if it makes the tensor itself, by x.detach().requires_grad_(), not nn.Parameter(x)"
        )
        raise UnsupportedGraphError(message(where, expected, got, fix))


def _references(below: Subgraph) -> dict[int, int]:
    return {key: sys.getrefcount(leaf) for key, leaf in below.leaves.items()}


@cache
def _references_of_lone_leaf() -> int:
    """Return how many references there are to a leaf that only its graph holds."""
    with torch.enable_grad(), INSIDE:
        (count,) = _references(Subgraph([torch.ones((), requires_grad=True) * 1])).values()
    return count


_ADVICE = {
    "loss_fn": (
        "a function of its arguments, where its steps are recomputed",
        'pass it in outer, not inside a module: unroll(..., outer={"name": tensor}), which '
        'grad_transform(grads, outer, state) gets, too; or memory="store"',
    ),
    "inner_loss": (
        "a function of its arguments",
        'pass it in outer, not inside a module: find(params, {"name": tensor})',
    ),
}


def runs_user_code(below: Subgraph, hooks: int) -> bool:
    """Return whether a pass may run a Function or hook; `hooks` were made before the run."""
    return hooks_made() != hooks or bool(user_functions(below.kinds))
