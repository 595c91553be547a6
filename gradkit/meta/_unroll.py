"""The inner loop: steps of an optimizer, and the gradient through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradkit._compat.transforms import FORWARD, differentiated, is_dual, transforms
from gradkit._core import pytree
from gradkit._core.call import check_bool, check_function, is_positive_int
from gradkit._core.ownership import leave_inference_mode, without_inference
from gradkit._core.params import Tensors
from gradkit._core.pytree import PyTree
from gradkit._state.snapshot import put_back
from gradkit.errors import OptionError, StructureError, UnsupportedGraphError, describe, message
from gradkit.func._arguments import read_arguments
from gradkit.meta import _inner_step as steps
from gradkit.meta import _optimizer
from gradkit.meta._inner_step import Carry, InnerStep, StepInputs, StepOutputs
from gradkit.meta._optimizer import Optimizer, State

Memory: TypeAlias = Literal["store", "recompute"] | int
Run: TypeAlias = Callable[[Carry, StepInputs], StepOutputs]


@dataclass(frozen=True)
class Adapted:
    """The result of an inner loop.

    Attributes:
        params: The parameters after the last step, a tree like those before the first.
        state: The optimizer's state after the last step.
        values: The inner losses, a tensor with one element for each step.
        aux: What the inner loss returned besides them, one item for each step; without gradients.
        buffers: The buffers after the last step; None without `buffers`.
        trajectory: With `trajectory=True` the parameters after each step, the last being `params`.
    """

    params: PyTree
    state: State
    values: Tensor
    aux: list[PyTree] = field(default_factory=list)
    buffers: PyTree = None
    trajectory: list[PyTree] = field(default_factory=list)


_DATA, _ONE_BATCH = "a list with the data of each step", "[(x, y)] * steps, also for one step"


def unroll(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batches: Iterable[PyTree],
    opt: Optimizer,
    *,
    outer: PyTree = (),
    state: State | None = None,
    memory: Memory = "store",
    first_order: bool = False,
    grad_transform: Callable[..., PyTree] | None = None,
    buffers: PyTree = None,
    trajectory: bool = False,
    has_aux: bool = False,
) -> Adapted:
    """Return the parameters after some steps of an optimizer, differentiable through the steps.

    Gradients flow to `params`, to `outer`, to the hyper-parameters of `opt`, to `state`, to
    `buffers` and to the batches. After an error, buffers of modules in `loss_fn` are as before.

    Example:
        >>> import torch, gradkit
        >>> def loss(w, scale, x):
        ...     return (scale * (w - x) ** 2).sum()
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> opt = gradkit.meta.sgd(lr=0.1)
        >>> adapted = gradkit.meta.unroll(loss, w, [torch.zeros(1)] * 2, opt, outer=scale)
        >>> gradkit.value_and_grads(adapted.params.sum(), [w, scale])
        (tensor(0.8100), [tensor([0.8100]), tensor(-0.3600)])

    Args:
        loss_fn: The inner loss, `loss_fn(params, outer, batch)`: one real element, computed from
            its arguments alone. With `buffers`, `loss_fn(params, buffers, outer, batch)` returns
            `(loss, buffers)`.
        params: The initial parameters: a tree of tensors; a module stands for its named
            parameters. A tensor in two places is one variable. An `nn.Parameter` that does not
            require grad stays as it is, and so does what the loss does not reach.
        batches: The data of each step, trees. All are read before the first step.
        opt: The optimizer, `sgd(lr=0.1)` for one.
        outer: A tree of outer variables.
        state: The optimizer's state before the first step; None is `opt.init(params)`.
        memory: `"store"` keeps the graph of every step, and is the fastest. `"recompute"` keeps
            each step's parameters and batch, and runs the step again in the backward pass; an int n
            keeps those of every n-th step, and runs each step twice more. Inside a torch.func
            transform everything is stored. The results differ by rounding. Random numbers, and
            memory that a step writes to, are as if it had run once; assigning to an attribute of
            what is no module, or appending to a list, happens again. At the end of such a pass, the
            host waits once for the device, to compare the results of both runs.
        first_order: Treat the inner gradients as constants, as FOMAML does. No graph of the inner
            loss is kept, so that `values` and `buffers` are constants, too, unless
            `grad_transform` takes three arguments: `values` may be used to train it.
        grad_transform: A function `(grads)` of trees, such as clipping, applied before the
            optimizer; or `(grads, outer, state)`, such as a learned optimizer, which also gets the
            outer variables and the optimizer's state. It must not change its arguments.
        buffers: A tree that each step passes to the next, such as the statistics of batch norm:
            `loss_fn` gets it, and returns the next, of the same structure. None is no buffers.
        trajectory: Whether to return the parameters after each step, which are then all kept.
        has_aux: Whether `loss_fn` returns `(loss, aux)`, or `(loss, buffers, aux)`.

    Returns:
        An `Adapted`, with `params`, `state`, `values`, `aux`, `buffers` and `trajectory`.

    Raises:
        LeafTypeError: A leaf, or the loss, is no tensor that has a gradient; or a leaf is sparse.
        NotScalarLossError: The loss has not exactly one element.
        OptionError: An option has no such value.
        StructureError: There are no batches, or a tree does not fit.
        UnreachedParamError: The loss does not depend on params, or they hold nothing to adapt.
        UnsupportedGraphError: A recomputed step uses tensors from outside that require grad, or
            gave another result than before; or torch would get the derivative of a step wrong.
        UnsupportedOptimizerError: `opt` is not an optimizer of `gradkit.meta`.

    Source:
        Finn et al. 2017, "Model-Agnostic Meta-Learning", algorithm 1 and section 5.2 (first order),
        https://arxiv.org/abs/1703.03400; for the recomputation, Chen et al. 2016, "Training Deep
        Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174
    """
    check_function(loss_fn, "loss_fn")
    is_named = isinstance(memory, str) and memory in ("store", "recompute")
    if not (is_named or is_positive_int(memory)):
        expected = "'store', 'recompute' or a positive int"
        raise OptionError(message("memory", expected, repr(memory), "memory='store'"))
    check_bool("first_order", first_order)
    check_bool("trajectory", trajectory)
    check_bool("has_aux", has_aux)
    _optimizer.require_optimizer(opt)
    is_learned = grad_transform is not None and steps.takes_outer_and_state(grad_transform)
    has_buffers, enabled = buffers is not None, torch.is_grad_enabled()
    # `no_grad` does not switch the tangents of a jvp off.
    create_graph = (enabled or FORWARD in transforms()) and (is_learned or not first_order)
    with (
        put_back(loss_fn, grad_transform),
        leave_inference_mode(record=True),
        torch.set_grad_enabled(enabled),
    ):
        data = _read_batches(batches)
        inner = read_arguments((params,), 0, "params", dense=True)  # a step takes views of them
        facts = grad_transform, is_learned, first_order, has_buffers, has_aux
        step = InnerStep(loss_fn, inner, opt, *facts)
        tensors, rebuild = pytree.partition_tensors((outer, data, state, dict(opt.hyper), buffers))
        _refuse_graphs([*inner.variables, *tensors])
        outer, data, state, hyper, buffers = rebuild(without_inference(tensors))
        if state is None:
            by_leaf = _optimizer.initial_state(opt, inner.leaves)
        else:
            by_leaf = _optimizer.read_state(opt, state, inner.leaves, inner.spec)
        state_lists = {name: inner.per_variable(column) for name, column in by_leaf.items()}
        carry = Carry(without_inference(inner.variables), state_lists, buffers)
        first, movable = inner.first_leaf_of_variable, inner.per_leaf(inner.variables)
        settings = _optimizer.read_settings(opt, hyper, movable, inner.spec, first)
        settings = {name: _optimizer.select(value, first) for name, value in settings.items()}
        inputs = StepInputs(outer, settings, data)
        run, size = _segments(step, memory, create_graph, trajectory)
        check_function(loss_fn, "loss_fn", "params", *["buffers"] * has_buffers, "outer", "batch")
        try:
            carry, losses, aux, between = _loop(run, carry, inputs, size, trajectory)
        except Exception as error:
            args = [inner.tree(inner.variables), *[buffers] * has_buffers, outer, batches]
            is_one = type(batches) in (list, tuple)
            if is_one and steps.raised_where_it_would_take(error, loss_fn, *args):
                got = f"a {type(batches).__name__} that loss_fn takes as one of them"
                raise StructureError(message("batches", _DATA, got, _ONE_BATCH)) from error
            raise
        states = {
            name: replace(inner, leaves=by_leaf[name]).tree(column)
            for name, column in carry.state.items()
        }
        aux = pytree.map_tensors(Tensor.detach, aux) if has_aux else []
        adapted, values = inner.tree(carry.tensors), torch.stack(losses)
        after_each = [*map(inner.tree, between), adapted] if trajectory else []
        return Adapted(adapted, states, values, aux, carry.buffers, after_each)


def _read_batches(batches: Iterable[PyTree]) -> list[PyTree]:
    """Return the data of each step, read before the first."""
    if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Iterable):
        fix = "list(batches.unbind()), or [batch] * steps"
        raise StructureError(message("batches", _DATA, describe(batches), fix))
    of_tensors = type(batches) is tuple and all(isinstance(x, Tensor) for x in batches)
    if of_tensors and len({(x.dtype, x.dim()) for x in pytree.tensors(batches)}) > 1:
        got = f"a tuple of {' and '.join(map(describe, pytree.tensors(batches)))}, as a batch is"
        raise StructureError(message("batches", _DATA, got, _ONE_BATCH))
    data, versions = [], []
    for batch in batches:
        leaves, spec = pytree.flatten(batch)
        data.append(pytree.unflatten(spec, leaves))  # the iterator may fill its container again
        tensors = (x for x in leaves if isinstance(x, Tensor))
        # torch counts no in-place changes of what was made in inference mode.
        versions += [(x, x._version) for x in tensors if not x.is_inference()]
    if any(x._version != version for x, version in versions):
        expected = "data that stays as it is: all of it is read before the first step"
        got = "a tensor that the iterator overwrites with the data of several steps"
        fix = "(batch.clone() for batch in batches)"
        raise StructureError(message("batches", expected, got, fix))
    if not data:
        expected = "the data of at least one step"
        raise StructureError(message("batches", expected, "none", "[batch] * steps"))
    return data


def _refuse_graphs(tensors: Tensors) -> None:
    """Raise if the steps would be cut from the graph of a tensor."""
    if not transforms() and any(map(is_dual, tensors)):
        expected = "ordinary tensors, or those of torch.func.jvp"
        got = "dual tensors of torch.autograd.forward_ad"
        fix = "torch.func.jvp(f, primals, tangents)"
        raise UnsupportedGraphError(message("unroll", expected, got, fix))
    batched_only = bool(transforms()) and not differentiated()
    if batched_only and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        got = "a vmap around tensors that require grad, whose gradient would be taken outside"
        fix = "gradkit.meta.mean_value_and_grads(meta_loss, params, tasks); or torch.no_grad()"
        raise UnsupportedGraphError(message("unroll", "a derivative inside the vmap", got, fix))


def _segments(
    step: InnerStep, memory: Memory, create_graph: bool, trajectory: bool
) -> tuple[Run, int]:
    """Return a function that runs some steps, and how many it is to run at a time."""
    # A tensor from outside cannot be seen inside torch.func, nor memory that is written put back.
    if not create_graph or memory == "store" or transforms():
        return partial(_stored, step, create_graph), 1
    if memory == "recompute":
        return partial(steps.run_recomputed, step), 1

    def nested(carry: Carry, inputs: StepInputs, *, create_graph: bool) -> StepOutputs:
        # Each step is recomputed once more where a segment is differentiated.
        once = partial(step, create_graph=False)
        run = partial(steps.run_recomputed, step) if create_graph else once
        return _loop(run, carry, inputs, 1, trajectory)

    return partial(steps.run_recomputed, nested), int(memory)


def _stored(step: InnerStep, create_graph: bool, carry: Carry, inputs: StepInputs) -> StepOutputs:
    carry, losses, aux, between = step(carry, inputs, create_graph=create_graph)
    aux = pytree.map_tensors(Tensor.detach, aux) if step.has_aux else aux
    if not create_graph:
        losses = [loss.detach() for loss in losses]
        if step.has_buffers:
            carry = carry._replace(buffers=pytree.map_tensors(Tensor.detach, carry.buffers))
    return StepOutputs(carry, losses, aux, between)


def _loop(run: Run, carry: Carry, inputs: StepInputs, size: int, trajectory: bool) -> StepOutputs:
    """Run all steps, some at a time."""
    losses: Tensors = []
    aux: list[PyTree] = []
    after_each: list[Tensors] = []
    for begin in range(0, len(inputs.batches), size):
        part = inputs._replace(batches=inputs.batches[begin : begin + size])
        carry, more_losses, more_aux, between = run(carry, part)
        losses += more_losses
        aux += more_aux
        if trajectory:
            after_each += [*between, carry.tensors]
    return StepOutputs(carry, losses, aux, after_each[:-1])
