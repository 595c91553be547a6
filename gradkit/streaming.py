"""Gradients that are consumed as they arrive: what is made of them is returned, not they."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd import gramian
from gradkit._autograd.consume_on_arrival import ConsumingRunner
from gradkit._autograd.passes import run_jointly
from gradkit._checks.reachability import require_reached
from gradkit._compat.autograd import record_stream, storage_address
from gradkit._compat.dynamo import disable_compile
from gradkit._core import pytree
from gradkit._core.call import (
    Losses,
    check_chunk_size,
    check_number,
    check_optional_bool,
    read_losses,
)
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree
from gradkit._state.snapshot import put_back_on_error
from gradkit.errors import NotScalarLossError, OptionError, UnsupportedGraphError, describe, message

__all__ = ["clipped_sum", "gram", "per_loss_norms", "per_sample_norms", "value_and_reduced_grads"]

_Function: TypeAlias = Callable[[Tensor], Any]


@disable_compile
def value_and_reduced_grads(
    losses: PyTree,
    params: PyTree,
    fn: PyTree,
    *,
    weights: PyTree = None,
    retain_graph: bool | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the losses' values, and what a function makes of each parameter's gradient.

    The function is called with a gradient as soon as the pass has computed it, after the hooks of
    its parameter; then the gradient is freed. There is never a whole set of gradients in memory.

    Example:
        >>> import torch, gradkit
        >>> model = torch.nn.Linear(3, 1)
        >>> loss = model(torch.ones(2, 3)).sum()
        >>> gradkit.value_and_reduced_grads(loss, model, torch.Tensor.norm)[1]
        {'weight': tensor(3.4641), 'bias': tensor(2.)}

    Args:
        losses: As in `value_and_grads`.
        params: As in `value_and_grads`. The gradient of an intermediate value is freed at the end
            of the pass.
        fn: A function of one gradient, which has its parameter's shape and the dtype
            `p.grad_dtype or p.dtype`, no graph, and any strides; if sparse, it is coalesced. Or a
            tree of functions with the structure of `params`, or a prefix of it. It is called
            once for each tensor that the losses reach, in the order in which the gradients
            arrive, and without gradient recording. It must not write on the gradient.
        weights: As in `value_and_grads`.
        retain_graph: True: the graph can be used by another call. None: False.

    Returns:
        `(values, reduced)`. `values`: as in `value_and_grads`. `reduced`: a tree like `params`,
        with the function's result for each leaf; a tensor in it that shares memory with the
        gradient is copied. None: frozen, integer or not reached.

    Raises:
        OptionError: `fn` is not a function.
        UnsupportedGraphError: The function has written on a gradient.
        GradkitError: As in `value_and_grads`. What the function raises is raised as it is.

    Source:
        Tensor hooks, which run before the engine stores a gradient:
        https://pytorch.org/docs/stable/notes/autograd.html#backward-hooks-execution
    """
    check_optional_bool("retain_graph", retain_graph)
    with leave_inference_mode():
        flat, opened = read_losses(losses, scalar=True), read_params(params)
        functions = _read_functions(fn, opened)
        if weights is not None and callable(weights):
            weights = gramian.weights_from_gramian(flat, opened, weights)
        results: list[Any] = [None] * len(opened.variables)

        def consume(index: int, grad: Tensor) -> None:
            results[index] = _reduced(functions[index], grad, partial(opened.path, index))

        with put_back_on_error(*functions):
            result = run_jointly(
                flat,
                opened,
                weights,
                unused="none",
                create_graph=False,
                retain=bool(retain_graph),
                runner=partial(ConsumingRunner, consume=consume),
            )
            require_reached(result.call, result.grads)
        record_stream(pytree.tensors(results))
        copies = partial(map, partial(pytree.map_tensors, Tensor.clone))
        return result.values, pytree.unflatten(opened.spec, opened.per_leaf(results, copies))


def _read_functions(fn: PyTree, params: Params) -> list[_Function]:
    """Return the function for each variable: that of its first leaf."""
    tree = pytree.unflatten(params.spec, params.leaves)
    by_leaf = pytree.broadcast_prefix(fn, "fn", tree, "params")
    functions: list[Any] = params.per_variable(by_leaf)
    for index, function in enumerate(functions):
        if not callable(function):
            fix = "fn=torch.Tensor.norm, or a tree of functions with the structure of params"
            expected = f"a function of the gradient of {params.path(index)}"
            raise OptionError(message("fn", expected, describe(function), fix))
    return functions


def _reduced(function: _Function, grad: Tensor, path: Callable[[], str]) -> Any:
    """Return the result of a function, which shares no memory with the gradient."""
    if grad.is_sparse:
        grad = grad.coalesce()
    version = grad._version
    result = function(grad)
    if grad._version != version:
        expected, got = "a function that reads its gradient", "one that writes on it in place"
        fix = "return a new tensor: fn=lambda grad: grad.abs().max(), and not grad.abs_().max()"
        raise UnsupportedGraphError(message(f"fn at {path()}", expected, got, fix))
    return pytree.map_tensors(partial(_unshared, grad), result)


def _unshared(grad: Tensor, result: Tensor) -> Tensor:
    try:
        shares = storage_address(result) == storage_address(grad)
    except (RuntimeError, NotImplementedError):
        shares = result.layout != torch.strided  # such a layout has no storage of its own
    return result.clone() if shares else result


@disable_compile
def gram(
    losses: PyTree,
    params: PyTree,
    *,
    chunk_size: int | None = None,
    retain_graph: bool | None = None,
) -> Tensor:
    """Return the inner products of the losses' gradients, which are never all in memory.

    Equals `gradkit.tree.gram(gradkit.per_loss_grads(losses, params), losses=losses)` to rounding,
    but that a tensor in several places of `params` counts once. One vmapped pass multiplies the K
    gradients of a parameter as they arrive, and frees them.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> gradkit.gram([w.sum(), w.square().sum()], [w])
        tensor([[ 2.,  6.],
                [ 6., 20.]])

    Args:
        losses: A tree of real floating-point tensors of any shape, at least one of which carries
            a graph; K elements in all.
        params: As in `value_and_grads`.
        chunk_size: The largest number of losses, or elements, in one vmapped pass, which takes
            memory for as many gradients of the largest parameter; None is all K of them. With
            chunks of `c` there are about `2 (K / c)**2` passes. 1: sequential passes for two of
            the losses at a time, `K (K + 1) / 2` in all.
        retain_graph: True: the graph can be used by another call. None: False.

    Returns:
        `[K, K]`, symmetric, without a graph, in the order of the losses: in the common dtype of
        the gradients, float32 at least, and on the device of the first parameter. A loss that does
        not reach a parameter has an exact zero there, and a constant loss zeros everywhere.

    Raises:
        StructureError: A tree is empty, or the losses have no element.
        GradkitError: As in `per_loss_grads`.

    Source:
        Section 6 of Quinton and Rey 2024, "Jacobian Descent for Multi-Objective Optimization",
        https://arxiv.org/abs/2406.16232
    """
    check_optional_bool("retain_graph", retain_graph)
    check_chunk_size(chunk_size)
    with leave_inference_mode():
        flat = read_losses(losses, scalar=False), read_params(params)
        return gramian.gramian(*flat, chunk_size=chunk_size, retain=bool(retain_graph))


@disable_compile
def per_loss_norms(
    losses: PyTree,
    params: PyTree,
    *,
    chunk_size: int | None = None,
    retain_graph: bool | None = None,
) -> Tensor:
    """Return the norm of each loss's gradient, without a set of gradients in memory.

    It is the square root of the diagonal of `gradkit.gram`, to rounding.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> gradkit.per_loss_norms([w.sum(), w.square().sum()], [w])
        tensor([ 1.4142, 10.0000])

    Args:
        losses: As in `gram`.
        params: As in `value_and_grads`.
        chunk_size: The largest number of elements of a loss that is not a scalar in one vmapped
            pass, which takes memory for as many gradients of the largest parameter. None is all
            of them; 1 is a pass for each. Scalar losses have a pass each.
        retain_graph: As in `gram`.

    Returns:
        `[K]`, without a graph, in the order of the losses and of their elements; dtype and device
        as in `gram`.

    Raises:
        GradkitError: As in `per_loss_grads`.

    Source:
        Chen et al. 2018, "GradNorm", section 3, which weighs losses by these norms,
        https://arxiv.org/abs/1711.02257
    """
    check_optional_bool("retain_graph", retain_graph)
    check_chunk_size(chunk_size)
    with leave_inference_mode():
        flat = read_losses(losses, scalar=False), read_params(params)
        return gramian.norms(*flat, chunk_size=chunk_size, retain=bool(retain_graph))


@disable_compile
def per_sample_norms(
    losses: Tensor,
    params: PyTree,
    *,
    chunk_size: int | None = None,
    retain_graph: bool | None = None,
) -> Tensor:
    """Return the norm of the gradient of each element of a vector of losses.

    Equals `per_loss_norms`. The samples may depend on each other, as with batch_norm or a
    contrastive loss: what is measured is the gradient of each sample's loss, as it is. Where the
    graph proves that they do not, one pass for all samples is enough, and no gradient is computed.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> samples = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> gradkit.per_sample_norms(samples @ w, [w])
        tensor([5., 1.])

    Args:
        losses: `[B]`, real floating-point: the losses of the samples, with a graph.
        params: As in `value_and_grads`.
        chunk_size: Where that is not proved, the largest number of samples in one vmapped pass,
            which takes memory for as many gradients of the largest parameter; None is all B of
            them. A pass for `c` samples takes the time of about `c` passes through the graph of
            the whole batch. docs/streaming.md says what is proved.
        retain_graph: As in `gram`.

    Returns:
        `[B]`, without a graph; dtype and device as in `gram`. An empty batch gives `[0]`.

    Raises:
        NotScalarLossError: `losses` is not a vector.
        GradkitError: As in `per_loss_grads`.

    Source:
        Goodfellow 2015, "Efficient Per-Example Gradient Computations",
        https://arxiv.org/abs/1510.01799; for sequences section 4 of Li et al. 2021, "Large
        Language Models Can Be Strong Differentially Private Learners",
        https://arxiv.org/abs/2110.05679
    """
    check_optional_bool("retain_graph", retain_graph)
    check_chunk_size(chunk_size)
    with leave_inference_mode():
        flat = _read_samples(losses), read_params(params)
        return gramian.norms(*flat, chunk_size=chunk_size, retain=bool(retain_graph))


@disable_compile
def clipped_sum(
    losses: Tensor,
    params: PyTree,
    max_norm: float | Tensor,
    *,
    chunk_size: int | None = None,
    retain_graph: bool | None = None,
) -> PyTree:
    """Return the sum over samples of their gradients, each scaled down to a norm of `max_norm`.

    One pass measures the norms, as in `per_sample_norms`, another adds the gradients: never B sets
    of them in memory. Where a vmapped pass would be wrong, as in `gram`, with a `chunk_size` of 1,
    and for losses in float16, each sample has one pass, and there are two sets. DP-SGD adds noise
    to this sum.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> samples = torch.tensor([[3.0, 4.0], [0.0, 0.5]])
        >>> gradkit.clipped_sum(samples @ w, {"w": w}, max_norm=1.0)
        {'w': tensor([0.6000, 1.3000])}

    Args:
        losses: As in `per_sample_norms`.
        params: As in `value_and_grads`.
        max_norm: The largest norm of a sample's gradient, over all params: a number of at least 0,
            or a one-element tensor, whose sign is not checked.
        chunk_size: As in `per_sample_norms`.
        retain_graph: As in `gram`.

    Returns:
        A tree like `params`, its leaves as in `value_and_grads`: the sum of
        `min(1, max_norm / (norm + 1e-6)) * gradient`, the factor of `clip_grad_norm_`. It is NaN
        if a norm is not finite.

    Raises:
        NotScalarLossError: `losses` is not a vector.
        OptionError: `max_norm` is not a number of at least 0.
        GradkitError: As in `per_loss_grads`.

    Source:
        Abadi et al. 2016, "Deep Learning with Differential Privacy", algorithm 1,
        https://arxiv.org/abs/1607.00133
    """
    check_optional_bool("retain_graph", retain_graph)
    check_chunk_size(chunk_size)
    fix = "gradkit.clipped_sum(losses, params, 1.0)"
    max_norm = check_number("max_norm", max_norm, fix, nonnegative=True)
    with leave_inference_mode():
        flat = _read_samples(losses), read_params(params)
        return gramian.clipped_sum(*flat, max_norm, chunk_size, bool(retain_graph))


def _read_samples(losses: Tensor) -> Losses:
    flat = read_losses(losses, scalar=False)
    if len(flat.leaves) != 1 or flat.leaves[0].dim() != 1:
        fix = "reduction='none' in the loss function; gradkit.per_loss_norms for a tree of losses"
        if len(flat.leaves) == 1 and flat.leaves[0].dim() > 1:
            fix = "losses.flatten(1).sum(1), if the samples are its first dimension"
        got = describe(flat.leaves[0]) if len(flat.leaves) == 1 else f"{len(flat.leaves)} losses"
        raise NotScalarLossError(message("losses", "a vector, one loss for each sample", got, fix))
    return flat
