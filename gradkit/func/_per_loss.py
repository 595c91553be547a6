"""per_loss_grads of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradkit._autograd import jacobian
from gradkit._core import pytree
from gradkit._core.losses import Losses
from gradkit._core.options import (
    STRATEGIES,
    UNUSED,
    Strategy,
    Unused,
    check_bool,
    check_chunk_size,
    check_option,
)
from gradkit.func._arguments import ArgNums, read_arguments
from gradkit.func._level import Passes, differentiate
from gradkit.func._results import check_unused_can_be_known


def per_loss_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    has_aux: bool = False,
    unused: Unused = "zeros",
    strategy: Strategy | None = None,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Return a function that gives the gradients of every loss of `fn` separately.

    What `gradkit.per_loss_grads` does for losses that have been computed: a pass starts from one
    loss alone, so an inf or NaN in one loss reaches no other's gradients.

    Example:
        >>> import torch, gradkit
        >>> def losses(w):
        ...     return {"sum": w.sum(), "squares": w * w}
        >>> gradkit.func.per_loss_grads(losses)(torch.tensor([1.0, 2.0]))["squares"]
        tensor([[2., 0.],
                [0., 4.]])

    Args:
        fn: As in `value_and_grads`; its losses may have any shape.
        argnums: As in `value_and_grads`.
        has_aux: As in `value_and_grads`.
        unused: As in `value_and_grads`, for each loss.
        strategy: `"sequential"`: a pass for each element of each loss. `"batched"`: the elements of
            each loss vmapped, equal to rounding; where torch would get that silently wrong, or
            fails at it, there is a pass for each, with one `GradkitWarning` that says why. `"auto"`
            picks by device and size. None is `"batched"` with a `chunk_size`, else `"sequential"`.
        chunk_size: The largest number of elements in one batched pass; None is all.

    Returns:
        A function of `fn`'s arguments that returns a tree like the losses, or a pair of that and
        aux. Each leaf is replaced by what `grads` is in `value_and_grads`, where a loss of shape S
        has gradients of shape `S + tensor.shape`, as `torch.func.jacrev` orders them.

    Raises:
        OptionError: `unused`, `strategy` or `chunk_size` has no such value.
        GradkitError: As in `value_and_grads`, but a loss may have any number of elements.

    Source:
        `torch.func.jacrev`, https://pytorch.org/docs/stable/func.api.html
    """
    check_bool("has_aux", has_aux)
    check_option("unused", unused, UNUSED)
    check_option("strategy", strategy, (*STRATEGIES, None))
    check_chunk_size(chunk_size)

    def call(*args: Any, **kwargs: Any) -> Any:
        check_unused_can_be_known(unused)
        arguments = read_arguments(args, argnums)

        def run(losses: Losses, passes: Passes) -> list[list[Tensor | None]]:
            batch = jacobian.losses_to_batch(
                strategy or _default_strategy(losses.leaves, chunk_size),
                losses.leaves,
                lambda _: passes.monitor.why_not_batched(),
            )
            last = max(i for i, loss in enumerate(losses.leaves) if passes.depends(loss))
            return [
                _jacobian(loss, passes, chunk_size, batch=batch[index], retain=index < last)
                for index, loss in enumerate(losses.leaves)
            ]

        result = differentiate(fn, arguments, kwargs, run, has_aux=has_aux, scalar=False)
        trees = [
            arguments.finish(grads, unused, tuple(loss.shape))
            for grads, loss in zip(result.grads, result.values, strict=True)
        ]
        by_loss = pytree.unflatten(result.spec, trees)
        return (by_loss, result.aux) if has_aux else by_loss

    return call


def _default_strategy(losses: list[Tensor], chunk_size: int | None) -> Strategy:
    # Where there is nothing to batch nobody has asked for it, and no warning is due.
    several = any(loss.numel() != 1 for loss in losses)
    return "batched" if several and chunk_size is not None else "sequential"


def _jacobian(
    loss: Tensor, passes: Passes, chunk_size: int | None, *, batch: bool, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of a loss of shape S, each of shape `S + variable.shape`."""
    if not passes.depends(loss):
        return [None] * len(passes.variables)
    if batch:  # the graph goes with the level, so that the last element needs no separate pass
        return jacobian.batched(passes, loss, passes.variables, retain=True, chunk_size=chunk_size)
    return jacobian.sequential(passes, loss, passes.variables, retain=retain)
