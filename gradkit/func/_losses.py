"""value_and_grads and per_loss_grads of a function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gradkit._autograd.jacobian import level_of_the_caller, one_hot
from gradkit._core import pytree
from gradkit._core.inputs import Losses, read_weights
from gradkit._core.options import check_chunk_size
from gradkit._core.pytree import PyTree
from gradkit.errors import GradkitError, GradkitWarning
from gradkit.func._level import Passes, differentiate
from gradkit.func._variables import ArgNums, owned, read_variables


def value_and_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    has_aux: bool = False,
    weights: PyTree = None,
) -> Callable[..., Any]:
    """Return a function that gives the losses of `fn`, and the gradient of their weighted sum.

    What `gradkit.value_and_grads` does for losses that have been computed, bit for bit wherever
    torch.func computes the same bits (not for an LSTM on the CPU, for one), with zeros where that
    gives None. It may stand inside and around torch.func's transforms and torch.compile.

    Example:
        >>> import torch, gradkit
        >>> def loss(params, x):
        ...     return ((params["w"] * x).sum() - 1).square()
        >>> value, grads = gradkit.func.value_and_grads(loss)(
        ...     {"w": torch.ones(2)}, torch.tensor([1.0, 2.0])
        ... )
        >>> value, grads
        (tensor(4.), {'w': tensor([4., 8.])})

    Args:
        fn: Takes any arguments, and returns a tree of real floating-point losses of one element
            each; with `has_aux` a pair of that and a tree of anything. It must not change its
            arguments.
        argnums: The positional arguments to differentiate by: an int, or a tuple of ints. They are
            trees of floating-point or complex tensors and None. A tensor that stands in several
            places of them is one variable. A plain tensor is differentiated by whether or not it
            requires grad; an `nn.Parameter` that does not is frozen.
        has_aux: Whether `fn` returns something beside the losses.
        weights: Real numbers or tensors of one element, in a tree that begins that of the losses;
            None is all ones. They are constants.

    Returns:
        A function of `fn`'s arguments that returns `(values, grads)`, or `((values, aux), grads)`.
        `values` has the structure of the losses. `grads` has the structure of the argument, or is a
        tuple of such trees: each gradient of the shape of its tensor, of its `grad_dtype` or dtype
        (of its dtype while torch.compile traces, which cannot see the other), dense where it is not
        reached or frozen, laid out like it and in memory of its own. Nothing carries the caller's
        graph, unless a torch.func transform around the call differentiates it.

    Raises:
        DetachedLossError: No loss depends on the arguments (not noticed under torch.compile).
        LeafTypeError: A leaf of an argument or of the losses is no tensor that has a gradient.
        NotScalarLossError: A loss has not exactly one element.
        StructureError: `argnums`, `weights` or what `fn` returned does not fit.
        UnreachedParamError: The arguments hold nothing to differentiate by.
        UnsupportedGraphError: torch.func cannot enter what `fn` does, or gets it silently wrong.

    Source:
        `torch.func.grad_and_value`, https://pytorch.org/docs/stable/func.api.html; names and
        argument order follow `jax.value_and_grad`, `values` first.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = read_variables(args, argnums)

        def run(losses: Losses, passes: Passes) -> list[list[Tensor]]:
            seeds = _seeds(losses, weights)
            return [passes.grads(losses.leaves, seeds, retain=False)]

        out = differentiate(fn, given, kwargs, run, has_aux=has_aux, scalar=True)
        values = pytree.unflatten(out.spec, out.values)
        grads = given.to_tree(owned(out.grads[0], given.tensors))
        return ((values, out.aux), grads) if has_aux else (values, grads)

    return call


def _seeds(losses: Losses, weights: PyTree) -> list[Tensor] | None:
    by_loss = read_weights(weights, losses)
    if by_loss is None:
        return None
    return [
        weight.reshape(loss.shape).to(loss).clone()  # a gradient may be its cotangent itself
        if isinstance(weight, Tensor)
        else torch.full_like(loss, float(weight))
        for weight, loss in zip(by_loss, losses.leaves, strict=True)
    ]


def per_loss_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Return a function that gives the gradients of every loss of `fn` by itself.

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
        chunk_size: How many elements of one loss have their passes vmapped together, equal to
            rounding; None is a pass for each element. Where torch would get a batched pass silently
            wrong, there is a pass for each, with one `GradkitWarning`.

    Returns:
        A function of `fn`'s arguments that returns a tree like the losses, or a pair of that and
        aux. Each leaf is replaced by what `grads` is in `value_and_grads`, where a loss of shape S
        has gradients of shape `S + tensor.shape`, as `torch.func.jacrev` orders them.

    Raises:
        DetachedLossError: No loss depends on the arguments (not noticed under torch.compile).
        LeafTypeError: A leaf of an argument or of the losses is no tensor that has a gradient.
        StructureError: `argnums`, `chunk_size` or what `fn` returned does not fit.
        UnreachedParamError: The arguments hold nothing to differentiate by.
        UnsupportedGraphError: torch.func cannot enter what `fn` does, or gets it silently wrong.

    Source:
        `torch.func.jacrev`, https://pytorch.org/docs/stable/func.api.html
    """
    check_chunk_size(chunk_size)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = read_variables(args, argnums)

        def run(losses: Losses, passes: Passes) -> list[list[Tensor]]:
            chunk = _safe_chunk(chunk_size, losses, passes)
            last = max(i for i, loss in enumerate(losses.leaves) if passes.depends(loss))
            return [
                _rows(loss, passes, chunk, retain=index < last)
                for index, loss in enumerate(losses.leaves)
            ]

        out = differentiate(fn, given, kwargs, run, has_aux=has_aux, scalar=False)
        trees = []
        for index, loss in enumerate(out.values):
            shape = tuple(loss.shape)
            grads, out.grads[index] = out.grads[index], []
            trees.append(given.to_tree(owned(grads, given.tensors, shape), shape))
        by_loss = pytree.unflatten(out.spec, trees)
        return (by_loss, out.aux) if has_aux else by_loss

    return call


def _safe_chunk(chunk_size: int | None, losses: Losses, passes: Passes) -> int | None:
    if chunk_size is None or all(loss.numel() == 1 for loss in losses.leaves):
        return None
    reason = passes.watch.why_not_batched()
    if reason is not None:
        _warn_of_passes(reason)
        return None
    return chunk_size


def _warn_of_passes(reason: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"gradkit.func.per_loss_grads ran a pass for each element: batched, {reason}.",
            GradkitWarning,
            stacklevel=level_of_the_caller(),
        )


def _rows(loss: Tensor, passes: Passes, chunk: int | None, *, retain: bool) -> list[Tensor]:
    """Return the gradients of a loss of shape S, each of shape `S + variable.shape`."""
    if loss.dim() == 0:
        return passes.grads([loss], None, retain=retain)
    total = loss.numel()
    if total == 0:
        return [v.new_zeros((*loss.shape, *v.shape)) for v in passes.variables]
    if chunk is None:
        parts = _one_by_one(loss, passes, retain=retain)
    else:
        parts = _in_chunks(loss, passes, chunk, retain=retain)
    return [_joined(loss, [part[i] for part in parts]) for i in range(len(passes.variables))]


def _one_by_one(loss: Tensor, passes: Passes, *, retain: bool) -> list[list[Tensor]]:
    parts = []
    for row in range(loss.numel()):
        keep = retain or row + 1 < loss.numel()
        grads = passes.grads([loss], [one_hot(loss, row, row + 1)[0]], retain=keep)
        parts.append([grad.unsqueeze(0) for grad in grads])
    return parts


def _in_chunks(loss: Tensor, passes: Passes, chunk: int, *, retain: bool) -> list[list[Tensor]]:
    def run(seeds: Tensor) -> list[Tensor]:
        # The graph is kept, so that passes one by one can follow a failure.
        return vmap(lambda seed: passes.grads([loss], [seed], retain=True))(seeds)

    starts = range(0, loss.numel(), chunk)
    try:
        return [run(one_hot(loss, s, min(s + chunk, loss.numel()))) for s in starts]
    except RuntimeError as error:
        if torch.compiler.is_compiling() or isinstance(error, GradkitError):
            raise
        _warn_of_passes(f"they failed ({type(error).__name__}: {error})")
        return _one_by_one(loss, passes, retain=retain)


def _joined(loss: Tensor, parts: list[Tensor]) -> Tensor:
    rows = torch.cat(parts)
    return rows if loss.dim() == 1 else rows.reshape(*loss.shape, *rows.shape[1:])
