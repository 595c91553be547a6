"""value_and_grads and per_loss_grads of a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from gradkit._autograd import jacobian
from gradkit._core import pytree
from gradkit._core.call import STRATEGIES, Losses, Strategy, Unused, check_chunk_size, check_option
from gradkit._core.pytree import PyTree
from gradkit.func._arguments import ArgNums, check_options, read_arguments
from gradkit.func._differentiate import LevelPasses, differentiate, gradient_of_the_sum


def value_and_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    has_aux: bool = False,
    weights: PyTree = None,
    unused: Unused = "zeros",
    create_graph: bool | None = None,
) -> Callable[..., Any]:
    """Return a function that gives the losses of `fn`, and the gradient of their weighted sum.

    What `gradkit.value_and_grads` does for losses that exist, with the same bits wherever
    torch.func has them (not for an LSTM on the CPU, for one). It may stand inside and around
    torch.func's transforms and torch.compile.

    Example:
        >>> import torch, gradkit
        >>> def loss(params, x):
        ...     return ((params["w"] * x).sum() - 1).square()
        >>> gradkit.func.value_and_grads(loss)({"w": torch.ones(2)}, torch.tensor([1.0, 2.0]))
        (tensor(4.), {'w': tensor([4., 8.])})

    Args:
        fn: Takes any arguments, which it must not change, and returns a tree of real losses of one
            element each. A bare tuple of two raises without `weights`, as it may be (loss, aux).
        argnums: The positional arguments to differentiate with respect to, an int or a tuple of
            ints: trees of floating-point or complex tensors and None. A module in them stands for
            `dict(module.named_parameters())`, an iterator or an optimizer for the tuple of its
            tensors, and `fn` is called with these. A tensor in several places is one variable. A
            plain tensor need not require grad; an `nn.Parameter` that does not is frozen.
        has_aux: Whether `fn` returns a pair of the losses and a tree of anything.
        weights: Real numbers or tensors of one element, a prefix tree of the losses; None is ones.
        unused: The result for a tensor that no loss reaches: `"zeros"`, `"none"` (None, also for a
            frozen parameter), or `"error"`. torch.compile, which cannot tell, takes `"zeros"` only.
        create_graph: Whether the results carry the graph of all that they were computed from. None:
            where that requires grad, as in torch.func; a derivative of them that torch would get
            wrong raises `UnsupportedGraphError` when it is taken. True: it raises in this call.
            False: they carry none, inside a transform, too: less time and memory for training.

    Returns:
        A function of `fn`'s arguments that returns `(values, grads)`, or `((values, aux), grads)`.
        `values` is a tree like the losses. `grads` is one like the argument, or a tuple of such
        trees: gradients of the shape and layout of their tensors and of their `grad_dtype` (of
        their dtype while torch.compile traces), dense zeros where they are not reached or frozen.
        They share memory with nothing, unless they carry a graph; the derivative of a constant
        gradient, that of a linear function, is zero.

    Raises:
        DetachedLossError: No loss depends on the arguments (not noticed under torch.compile).
        LeafTypeError: A leaf of an argument or of the losses is no tensor that has a gradient.
        NotScalarLossError: A loss has not exactly one element.
        OptionError: An option has no such value.
        StructureError: `weights` or what `fn` returned does not fit.
        UnreachedParamError: There is nothing to differentiate; or a tensor that no loss reaches,
            with `unused="error"`.
        UnsupportedGraphError: torch.func cannot enter what `fn` does, or gets it silently wrong.

    Source:
        `torch.func.grad_and_value`, https://pytorch.org/docs/stable/func.api.html; names and
        argument order follow `jax.value_and_grad`, `values` first.
    """
    check_options(fn, argnums, has_aux, unused, create_graph)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = read_arguments(args, argnums, unused=unused)
        run = partial(gradient_of_the_sum, weights=weights, may_be_aux=not has_aux)
        result = differentiate(
            fn, arguments, kwargs, run, has_aux=has_aux, create_graph=create_graph
        )
        values = pytree.unflatten(result.spec, result.values)
        grads = arguments.grads_to_tree(
            result.grads[0], losses=result.values, refused=result.refused
        )
        return ((values, result.aux), grads) if has_aux else (values, grads)

    return call


def per_loss_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    has_aux: bool = False,
    unused: Unused = "zeros",
    strategy: Strategy | None = None,
    chunk_size: int | None = None,
    create_graph: bool | None = None,
) -> Callable[..., Any]:
    """Return a function that gives the gradients of every loss of `fn` separately.

    What `gradkit.per_loss_grads` does for losses that exist: an inf or NaN in one loss reaches no
    other's gradients.

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
        create_graph: As in `value_and_grads`.

    Returns:
        A function of `fn`'s arguments that returns a tree like the losses, or a pair of that and
        aux. Each leaf is what `grads` is in `value_and_grads`; a loss of shape S has gradients of
        shape `S + tensor.shape`, as in `torch.func.jacrev`.

    Raises:
        GradkitError: As in `value_and_grads`, but a loss may have any number of elements.

    Source:
        `torch.func.jacrev`, https://pytorch.org/docs/stable/func.api.html
    """
    check_options(fn, argnums, has_aux, unused, create_graph)
    check_option("strategy", strategy, (*STRATEGIES, None))
    check_chunk_size(chunk_size)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = read_arguments(args, argnums, unused=unused)

        def run(losses: Losses, passes: LevelPasses) -> list[list[Tensor | None]]:
            # Where there is nothing to batch nobody has asked for it, and no warning is due.
            asked = chunk_size is not None and any(loss.numel() != 1 for loss in losses.leaves)
            chosen = strategy or ("batched" if asked else "sequential")
            why_not = passes.monitor.why_not_batched
            batch = jacobian.losses_to_batch(chosen, losses.leaves, why_not)
            last = max(i for i, loss in enumerate(losses.leaves) if passes.depends(loss))
            return [
                _jacobian(loss, passes, chunk_size, batch=batch[index], retain=index < last)
                for index, loss in enumerate(losses.leaves)
            ]

        result = differentiate(
            fn, arguments, kwargs, run, has_aux=has_aux, scalar=False, create_graph=create_graph
        )
        trees = [
            arguments.grads_to_tree(grads, tuple(loss.shape), losses=[loss], refused=result.refused)
            for grads, loss in zip(result.grads, result.values, strict=True)
        ]
        by_loss = pytree.unflatten(result.spec, trees)
        return (by_loss, result.aux) if has_aux else by_loss

    return call


def _jacobian(
    loss: Tensor, passes: LevelPasses, chunk_size: int | None, *, batch: bool, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of a loss of shape S, each of shape `S + variable.shape`."""
    if not passes.depends(loss):
        return [None] * len(passes.variables)
    if batch:  # the graph goes with the level, so that the last element needs no separate pass
        return jacobian.batched(passes, loss, passes.variables, retain=True, chunk_size=chunk_size)
    return jacobian.sequential(passes, loss, passes.variables, retain=retain)
