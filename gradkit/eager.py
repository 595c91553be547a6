"""Gradients of losses that have been computed, by any forward pass, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradkit._autograd.gramian import weights_from_gramian
from gradkit._autograd.passes import (
    grads_to_tree,
    read_params_of_each,
    run_jointly,
    run_separately,
    run_simultaneously,
    simultaneous_trees,
    trees_by_loss,
)
from gradkit._checks.reachability import require_reached
from gradkit._compat.distributed import is_dtensor
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import (
    carries_graph,
    detach_keep_tangent,
    in_dual_level,
    is_differentiated_tensor,
)
from gradkit._core import pytree
from gradkit._core.call import (
    Losses,
    Strategy,
    Unused,
    check_batching,
    read_losses,
    read_pass_options,
)
from gradkit._core.graph import refuse_lost_history
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.params import DIFFERENTIABLE, read_params
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import user_code_may_run
from gradkit.errors import (
    GradkitError,
    LeafTypeError,
    OptionError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)

__all__ = ["per_loss_grads", "simultaneous_grads", "value_and_grads", "vjp"]


@disable_compile
def value_and_grads(
    losses: PyTree,
    params: PyTree,
    *,
    weights: PyTree = None,
    unused: Unused = "none",
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the losses' values and the gradient of their weighted sum, from one engine pass.

    Bit for bit what `torch.autograd.backward(list_of_losses)` leaves in a fresh `.grad`, which is
    neither read nor written. What the backward of a custom Function itself would write there, as
    that of a reversible network does, is part of the gradients.

    Example:
        >>> import torch, gradkit
        >>> model = torch.nn.Linear(3, 1)
        >>> error = model(torch.ones(2, 3)) - 1
        >>> losses = {"fit": error.square().mean(), "l1": model.weight.abs().sum()}
        >>> values, grads = gradkit.value_and_grads(losses, model, weights={"fit": 1.0, "l1": 0.1})
        >>> {name: tuple(grad.shape) for name, grad in grads.items()}
        {'weight': (1, 3), 'bias': (1,)}

    Args:
        losses: A tree of real floating-point tensors of one element each, at least one of which
            carries a graph; the others are constants.
        params: A tree of tensors, leaf or not. A module in it stands for
            `dict(module.named_parameters())`, an iterator for the tuple of its items, an optimizer
            for the tuple of its parameters. None stays None.
        weights: Real numbers or one-element tensors in the structure of `losses`, or a prefix of
            it; None is all ones. A weight that requires grad is part of the differentiated sum.
            Or a function that gets the `gradkit.gram` of the losses, `[K, K]`, and returns K
            weights, as TorchJD's weightings do: a second pass, and never K sets of gradients.
        unused: What stands for a trainable parameter that no loss reaches: `"none"` (a structural
            zero), `"zeros"` (a dense zero), or `"error"`.
        create_graph: Let values and gradients carry a graph, for higher derivatives.
        retain_graph: Keep the losses' graph; None means `create_graph`.

    Returns:
        `(values, grads)`. `values`: a tree like `losses`, of their shapes and dtypes, detached
        copies (the losses themselves with `create_graph`). `grads`: a tree like `params`; each
        leaf has its parameter's shape, its strides if it is dense, and the dtype
        `p.grad_dtype or p.dtype`, and shares no memory with anything. With `create_graph` it may
        share memory, and has the strides that torch gave it.
        A tensor in several places has its full gradient in each. None: frozen, integer or unused.

    Raises:
        DetachedLossError: No loss carries a graph.
        FreedGraphError: The graph has been freed by an earlier call.
        LeafTypeError: A leaf is no tensor that has a gradient.
        NotScalarLossError: A loss has not exactly one element.
        OptionError: An option has no such value.
        StructureError: A tree is empty or does not match.
        UnreachedParamError: Nothing is reached, or not everything under `unused="error"`.
        UnsupportedGraphError: Reentrant checkpoint, DistributedDataParallel, FSDP; or, once the
            pass has run, a hook or Function has written on a gradient in place; see `checked`. Or a
            checkpoint that recomputes other tensors than its forward pass had, as far as that shows
            (values do inside `checked`).

    Source:
        `torch.autograd.backward`, https://pytorch.org/docs/stable/autograd.html; the name and
        argument order follow `jax.value_and_grad`.
    """
    if torch.is_inference_mode_enabled():  # a decorator would cost every call a frame
        with leave_inference_mode():
            options: Any = {"create_graph": create_graph, "retain_graph": retain_graph}
            return value_and_grads(losses, params, weights=weights, unused=unused, **options)
    retain = read_pass_options(unused, create_graph, retain_graph)
    flat_losses = read_losses(losses, scalar=True)
    flat_params = read_params(params)
    if weights is not None and callable(weights):
        weights = weights_from_gramian(flat_losses, flat_params, weights)
    result = run_jointly(
        flat_losses, flat_params, weights, unused=unused, create_graph=create_graph, retain=retain
    )
    if type(None) in map(type, result.grads[0]):
        require_reached(result.call, result.grads)
    return result.values, grads_to_tree(result.grads[0], flat_params, unused, create_graph)


@disable_compile
def per_loss_grads(
    losses: PyTree,
    params: PyTree,
    *,
    unused: Unused = "none",
    create_graph: bool = False,
    retain_graph: bool | None = None,
    strategy: Strategy = "sequential",
    chunk_size: int | None = None,
) -> PyTree:
    """Return the gradients of each loss separately: the rows of the Jacobian, as trees.

    Each is bit for bit what `torch.autograd.grad` gives for that loss alone: a pass walks only its
    own loss's graph, so an inf or NaN in one loss reaches no other's gradients. Each part
    of the graph is freed after the last pass that needs it.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> gradkit.per_loss_grads({"sum": w.sum(), "squares": w * w}, {"w": w})["squares"]
        {'w': tensor([[2., 0.],
                [0., 4.]])}

    Args:
        losses: A tree of real floating-point tensors of any shape, at least one of which carries
            a graph.
        params: As in `value_and_grads`.
        unused: As in `value_and_grads`, for each loss.
        create_graph: As in `value_and_grads`.
        retain_graph: As in `value_and_grads`.
        strategy: `"sequential"`: an engine pass for each element of each loss. `"batched"`, equal
            to rounding: where the graph proves that the elements are those of independent samples,
            one pass of their sum, and a product of each layer's input and cotangent. Else the
            elements are vmapped through the engine's batched mode; where that is known to be
            wrong, or fails, passes are sequential, with one `GradkitWarning` that says why: so
            where a hook computes with its gradient, which would be a batch. `"auto"` is the
            fastest of these, by device and size. A vmapped pass leaves a tensor that the user
            called `retain_grad()` on with an unusable `.grad`. If the graph is to be freed, the
            last element has a separate pass.
        chunk_size: The largest number of elements in one vmapped pass; None is all of them. The
            passes of `"sequential"` have one each.

    Returns:
        A tree like `losses`, each leaf replaced by a tree like `params`. A loss of shape S gives
        gradients of shape `S + p.shape`, as `torch.func.jacrev` orders them; dtype, strides and
        ownership as in `value_and_grads`. None: not reached by this loss (all of them, for a
        constant loss).

    Raises:
        GradkitError: As in `value_and_grads`, but for `NotScalarLossError`.

    Source:
        `torch.autograd.grad` and its `is_grads_batched`,
        https://pytorch.org/docs/stable/generated/torch.autograd.grad.html
    """
    if torch.is_inference_mode_enabled():
        with leave_inference_mode():
            options: Any = {"unused": unused, "create_graph": create_graph}
            options |= {"retain_graph": retain_graph, "strategy": strategy}
            return per_loss_grads(losses, params, chunk_size=chunk_size, **options)
    retain = read_pass_options(unused, create_graph, retain_graph)
    check_batching(strategy, chunk_size)
    flat_losses = read_losses(losses, scalar=False)
    flat_params = read_params(params)
    result = run_separately(
        flat_losses,
        flat_params,
        unused=unused,
        create_graph=create_graph,
        retain=retain,
        strategy=strategy,
        chunk_size=chunk_size,
    )
    require_reached(result.call, result.grads)
    return trees_by_loss(result, flat_params, unused)


@disable_compile
def simultaneous_grads(
    losses: PyTree,
    params: PyTree,
    *,
    unused: Unused = "none",
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> PyTree:
    """Return the simultaneous gradient of a game: of each loss with respect to its own params.

    One forward pass serves all players: nothing has to be detached, and no loss adds to the
    gradients of another's parameters.

    Example:
        >>> import torch, gradkit
        >>> x, y = (torch.tensor(v, requires_grad=True) for v in (1.0, 2.0))
        >>> gradkit.simultaneous_grads({"min": x * y, "max": -x * y}, {"min": x, "max": y})
        {'min': tensor(2.), 'max': tensor(-1.)}

    Args:
        losses: A tree of real floating-point tensors of one element each, whose structure is a
            prefix of that of `params`.
        params: As in `value_and_grads`, with one part for each loss, often a module: what that loss
            is differentiated with respect to.
        unused: As in `value_and_grads`, for each loss and its own part.
        create_graph: As in `value_and_grads`.
        retain_graph: As in `value_and_grads`.

    Returns:
        A tree like `params`, its leaves as in `value_and_grads`.

    Raises:
        StructureError: `losses` is not a prefix of `params`.
        GradkitError: As in `value_and_grads`.

    Source:
        Balduzzi et al. 2018, "The Mechanics of n-Player Differentiable Games", equation (1),
        https://arxiv.org/abs/1802.05642
    """
    if torch.is_inference_mode_enabled():
        with leave_inference_mode():
            options: Any = {"create_graph": create_graph, "retain_graph": retain_graph}
            return simultaneous_grads(losses, params, unused=unused, **options)
    retain = read_pass_options(unused, create_graph, retain_graph)
    read = read_losses(losses, scalar=True)
    each = read_params_of_each(read, params)
    result = run_simultaneously(read, each, unused, create_graph, retain)
    require_reached(result.call, result.grads)
    return simultaneous_trees(result, each)


@disable_compile
def vjp(
    outputs: PyTree,
    params: PyTree,
    cotangents: PyTree,
    *,
    unused: Unused = "none",
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> PyTree:
    """Return the vector-Jacobian product of tensors that have been computed, from one engine pass.

    Bit for bit what `torch.autograd.grad(outputs, params, cotangents)` gives, also in a hook.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> outputs = {"squares": w * w, "sum": w.sum()}
        >>> gradkit.vjp(outputs, w, {"squares": torch.tensor([1.0, 10.0]), "sum": None})
        tensor([ 2., 40.])

    Args:
        outputs: A tree of floating-point or complex tensors of any shape, at least one of which
            carries a graph; the others are constants.
        params: As in `value_and_grads`.
        cotangents: A tree like `outputs`, of tensors with their shapes, dtypes and devices. None:
            this output, or branch, is left out, and may be anything.
        unused: As in `value_and_grads`.
        create_graph: Let the result carry a graph, to the params and to the cotangents.
        retain_graph: As in `value_and_grads`; True where the product is taken again.

    Returns:
        A tree like `params`, its leaves as those of the gradients in `value_and_grads`; for complex
        tensors, the conjugate, as torch has it.

    Raises:
        LeafTypeError: An output has no gradient, or a cotangent is no tensor.
        OptionError: `create_graph` where gradients are disabled.
        StructureError: A cotangent is not like its output, or all are None.
        GradkitError: As in `value_and_grads`, but for `NotScalarLossError`.

    Source:
        https://pytorch.org/docs/stable/generated/torch.autograd.grad.html
    """
    retain = read_pass_options(unused, create_graph, retain_graph)
    if create_graph and not torch.is_grad_enabled():
        mode = "inference_mode(False)" if torch.is_inference_mode_enabled() else "enable_grad()"
        got = "True, where gradients are disabled: under no_grad or inference_mode, or in a hook"
        fix = f"with torch.{mode}: gradkit.vjp(outputs, params, cotangents, create_graph=True)"
        raise OptionError(message("create_graph", "False", got, fix))
    if torch.is_inference_mode_enabled():
        with leave_inference_mode():
            return vjp(outputs, params, cotangents, unused=unused, retain_graph=retain)
    asked, seeds = _read_cotangents(outputs, cotangents, create_graph=create_graph)
    flat_params = read_params(params)
    kwargs: Any = {"unused": unused, "create_graph": create_graph, "retain": retain}
    result = run_jointly(asked, flat_params, None, **kwargs, cotangents=seeds)
    if type(None) in map(type, result.grads[0]):
        require_reached(result.call, result.grads)
    return grads_to_tree(result.grads[0], flat_params, unused, create_graph)


def _read_cotangents(
    outputs: PyTree, cotangents: PyTree, *, create_graph: bool
) -> tuple[Losses, list[Tensor]]:
    """Return the outputs whose cotangent is not None, and what a pass starts from at each."""
    leaves, spec = pytree.flatten(outputs)
    each, own_spec = pytree.flatten(cotangents)
    numbers = _given(each)
    if own_spec != spec:
        each = pytree.broadcast_prefix(cotangents, "cotangents", outputs, "outputs", "None")
        if len(_given(each)) > len(numbers):  # raises: one stands for several outputs
            pytree.flatten_up_to(spec, "outputs", cotangents, "cotangents")
        numbers = _given(each)
    if not numbers:
        got = "None for each" if each else "an empty tree"
        fix = "torch.ones_like(output) for the gradient of its sum"
        raise StructureError(message("cotangents", "a tensor for some output", got, fix))
    asked = Losses([leaves[index] for index in numbers], spec, "outputs", numbers)
    given = Losses([each[index] for index in numbers], spec, "cotangents", numbers)
    for index, (output, cotangent) in enumerate(zip(asked.leaves, given.leaves, strict=True)):
        if not (isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex())):
            fix = "cotangents that have None there; the arguments are (outputs, params, cotangents)"
            got = describe(output)
            raise LeafTypeError(message(asked.path(index), DIFFERENTIABLE, got, fix))
        defect = _defect(cotangent, output, create_graph)
        if defect is not None:
            error, expected, fix = defect
            where = f"{given.path(index)}, for {asked.path(index)}"
            raise error(message(where, expected, describe(cotangent), fix))
    refuse_lost_history(asked.leaves, asked.path)
    return asked, [_seed(one, create_graph=create_graph) for one in given.leaves]


def _given(leaves: list[Any]) -> list[int]:
    return [index for index, leaf in enumerate(leaves) if leaf is not None]


def _defect(
    cotangent: object, output: Tensor, create_graph: bool
) -> tuple[type[GradkitError], str, str] | None:
    """Return why this is no cotangent of an output, or None if it is one."""
    if not isinstance(cotangent, Tensor):
        fix = "torch.ones_like(output), or another tensor like it; None leaves the output out"
        return LeafTypeError, "a tensor", fix
    if is_dtensor(output) is not is_dtensor(cotangent):
        expected = "a DTensor" if is_dtensor(output) else "a plain tensor"
        fix = "distribute_tensor(cotangent, mesh, placements), or cotangent.full_tensor()"
        return StructureError, expected, fix
    if not _same_shape(output, cotangent):
        fix = "cotangent.reshape(output.shape), or cotangent.expand_as(output)"
        return StructureError, describe(output), fix
    if output.dtype != cotangent.dtype or output.device != cotangent.device:
        return StructureError, describe(output), "cotangent.to(output)"
    if not create_graph and is_differentiated_tensor(cotangent):
        expected = "one outside of torch.func's grad and jvp, which would take the result for a "
        expected += "constant"
        return UnsupportedGraphError, expected, "create_graph=True, which differentiates it, too"
    return None


def _same_shape(output: Tensor, cotangent: Tensor) -> bool:
    if output.is_nested or cotangent.is_nested:
        return output.is_nested == cotangent.is_nested and torch.is_same_size(output, cotangent)
    return output.shape == cotangent.shape


def _seed(cotangent: Tensor, *, create_graph: bool) -> Tensor:
    """Return what a pass may start from: a copy, where that could be returned or written on."""
    seed = cotangent if create_graph else detach_keep_tangent(cotangent)
    if not (create_graph or user_code_may_run() or seed.is_inference()):
        return seed
    is_plain = seed.layout == torch.strided and not (seed.is_nested or carries_graph(seed))
    if not is_plain or in_dual_level() or 0 not in seed.stride():
        return seed.clone()
    # An expanded one stays so: for another layout, torch may add in another order.
    part = seed[tuple(slice(None if step else 1) for step in seed.stride())]
    return part.clone().expand_as(seed)
