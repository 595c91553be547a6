"""The inner loop: steps of an optimizer, and the gradient through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradkit._compat.transforms import differentiated, is_dual, ordinary_mode, transforms
from gradkit._core import pytree
from gradkit._core.params import expand_params
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, UnsupportedGraphError, describe, message
from gradkit.func._variables import Variables, read_variables
from gradkit.meta._inner import Carry, Inner, StepInputs
from gradkit.meta._optimizer import Optimizer, State
from gradkit.meta._recompute import recomputed

Memory: TypeAlias = Literal["store", "recompute"] | int


@dataclass(frozen=True)
class Adapted:
    """What an inner loop has come to.

    Attributes:
        params: The parameters after the last step, a tree like those before the first.
        state: The optimizer's state, to go on from.
        values: The inner losses, a tensor of one for each step.
        aux: What the inner loss returned beside them, one for each step; without gradients.
    """

    params: PyTree
    state: State
    values: Tensor
    aux: list[PyTree] = field(default_factory=list)


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
    grad_transform: Callable[[PyTree], PyTree] | None = None,
    has_aux: bool = False,
) -> Adapted:
    """Return the parameters after some steps of an optimizer, differentiable through the steps.

    Gradients of whatever is computed from the result flow to `params`, to `outer`, to the
    hyper-parameters of `opt`, to `state` and to the batches.

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
            its arguments alone; with `has_aux` a pair of that and a tree.
        params: The initial parameters: a tree of tensors; a module stands for its named
            parameters. A tensor in two places is one variable. An `nn.Parameter` that does not
            require grad stays as it is, and so does what the loss does not reach.
        batches: The data of each step.
        opt: The optimizer, `sgd(lr=0.1)` for one.
        outer: A tree of outer variables.
        state: Where the optimizer starts; None is `opt.init(params)`.
        memory: `"store"` keeps the graph of every step, and is the fastest. `"recompute"` keeps
            each step's parameters and batch, and runs the step again in the backward pass. An int n
            keeps one set of parameters for n steps, and runs these again, and each of them once
            more. Inside of a torch.func transform all is stored. The results differ by rounding.
            Random numbers and what a step writes on (the statistics of batch norm) are as if it had
            run once; what it assigns to an attribute, or appends to a list, is done again.
        first_order: Take the inner gradients for constants, as FOMAML does; no graph is kept.
        grad_transform: A function on trees of gradients, applied before the optimizer: clipping,
            say. It must not write on them.
        has_aux: Whether `loss_fn` returns something beside the loss.

    Returns:
        An `Adapted`, with `params`, `state`, `values` and `aux`.

    Raises:
        LeafTypeError: A leaf, or the loss, is no tensor that has a gradient.
        NotScalarLossError: The loss has not exactly one element.
        StructureError: There are no batches, or an option or a tree does not fit.
        UnreachedParamError: The loss does not depend on params, or they hold nothing to adapt.
        UnsupportedGraphError: What is recomputed uses tensors from outside that require grad; or
            torch would get the derivative of a step silently wrong. In the backward pass, also that
            a step came out otherwise than before.

    Source:
        Finn et al. 2017, "Model-Agnostic Meta-Learning", algorithm 1 and section 5.2 (first order),
        https://arxiv.org/abs/1703.03400; Chen et al. 2016, "Training Deep Nets with Sublinear
        Memory Cost", https://arxiv.org/abs/1604.06174, for the recomputation.
    """
    enabled = torch.is_grad_enabled()
    create = enabled and not first_order
    with ordinary_mode(), torch.set_grad_enabled(enabled):
        size = _steps_kept(memory)
        data = [_ordinary(batch) for batch in _read_batches(batches)]
        outer, state = _ordinary(outer), _ordinary(state)
        leaves, spec = expand_params(params, "params")
        given = read_variables((pytree.unflatten(spec, leaves),), 0, "params")
        _refuse_graphs(given.tensors, (outer, data, state, dict(opt.hyper)))
        start = opt.init(pytree.unflatten(spec, leaves)) if state is None else state
        carry = Carry(_ordinary(given.tensors), _state_of_variables(given, start, opt))
        inner = Inner(loss_fn, given, opt, grad_transform, has_aux)
        hyper = dict(opt.hyper)
        if not opt.scalar_hyperparams:
            hyper = {name: _for_variables(value, name, given) for name, value in hyper.items()}
        opt.spread(hyper, given.tensors, range(len(given.tensors)))  # before any loss has run
        values: list[Tensor] = []
        aux: list[PyTree] = []
        hyper = _ordinary(hyper)
        run = _segment(inner, memory, create=create)
        for begin in range(0, len(data), size):
            reads = [StepInputs(outer, hyper, batch) for batch in data[begin : begin + size]]
            carry, losses, more = run(carry, reads)
            values += losses
            aux += [_constant(tree) for tree in more]
        return Adapted(
            params=_to_tree(given, carry.tensors, given.leaves),
            state={
                name: _to_tree(given, column, _leaves_of(start[name], given, name))
                for name, column in carry.state.items()
            },
            values=torch.stack(values),
            aux=aux,
        )


def _refuse_graphs(variables: list[Tensor], others: PyTree) -> None:
    """Refuse what the steps would be cut from."""
    tensors = [*variables, *(x for x in pytree.flatten(others)[0] if isinstance(x, Tensor))]
    if not transforms() and any(map(is_dual, tensors)):
        raise UnsupportedGraphError(
            message(
                "unroll",
                "ordinary tensors, or those of torch.func.jvp",
                "dual tensors of torch.autograd.forward_ad",
                "torch.func.jvp(f, primals, tangents)",
            )
        )
    batched_only = bool(transforms()) and not differentiated()
    if batched_only and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedGraphError(
            message(
                "unroll",
                "a derivative inside of the vmap",
                "a vmap around tensors that require grad, whose gradient would be taken outside",
                "gradkit.meta.value_and_grads(meta_loss, params, tasks); or torch.no_grad()",
            )
        )


def _segment(inner: Inner, memory: Memory, *, create: bool) -> Callable[..., Any]:
    """Return what runs some steps: carry and reads to carry, losses and aux."""

    def one(
        carry: Carry, reads: StepInputs, build: bool
    ) -> tuple[Carry, list[Tensor], list[PyTree]]:
        new, loss, aux = inner.step(carry, reads, create=build)
        return new, [loss], [aux] if inner.has_aux else []

    def again(carry: Carry, reads: StepInputs) -> tuple[Carry, list[Tensor], list[PyTree]]:
        inputs = (carry.tensors, carry.state, reads.outer, dict(reads.hyper), reads.batch)
        return recomputed(
            lambda given, build: one(Carry(*given[:2]), StepInputs(*given[2:]), build), inputs
        )

    def several(
        carry: Carry, each: list[StepInputs], step: Callable[[Carry, StepInputs], Any]
    ) -> tuple[Carry, list[Tensor], list[PyTree]]:
        values: list[Tensor] = []
        aux: list[PyTree] = []
        for reads in each:
            carry, losses, more = step(carry, reads)
            values += losses
            aux += more
        return carry, values, aux

    def many_again(
        carry: Carry, each: list[StepInputs]
    ) -> tuple[Carry, list[Tensor], list[PyTree]]:
        shared = (each[0].outer, dict(each[0].hyper))
        inputs = (carry.tensors, carry.state, *shared, [reads.batch for reads in each])

        def run(given: Any, build: bool) -> tuple[Carry, list[Tensor], list[PyTree]]:
            tensors, state, outer, hyper, batches = given
            step = again if build else lambda carry, reads: one(carry, reads, False)
            return several(
                Carry(tensors, state), [StepInputs(outer, hyper, batch) for batch in batches], step
            )

        return recomputed(run, inputs)

    def stored(carry: Carry, reads: StepInputs) -> tuple[Carry, list[Tensor], list[PyTree]]:
        new, losses, aux = one(carry, reads, create)
        return new, losses if create else [loss.detach() for loss in losses], aux

    # Inside of torch.func nobody can see what a step reads from outside, or put back what it wrote.
    if not create or memory == "store" or transforms():
        return lambda carry, each: several(carry, each, stored)
    if memory == "recompute":
        return lambda carry, each: several(carry, each, again)
    return many_again


def _ordinary(tree: PyTree) -> PyTree:
    """Return a tree without tensors of inference mode, of which autograd can keep none."""
    leaves, spec = pytree.flatten(tree)
    return pytree.unflatten(
        spec,
        [x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in leaves],
    )


def _constant(tree: PyTree) -> PyTree:
    leaves, spec = pytree.flatten(tree)
    return pytree.unflatten(
        spec, [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )


def _steps_kept(memory: object) -> int:
    if memory in ("store", "recompute"):
        return 1
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    raise StructureError(
        message("memory", "'store', 'recompute' or a positive int", repr(memory), "memory='store'")
    )


def _read_batches(batches: Iterable[PyTree]) -> list[PyTree]:
    if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise StructureError(
            message(
                "batches",
                "a list with the data of each step",
                describe(batches),
                "list(batches.unbind()), or [batch] * steps",
            )
        )
    data, versions = [], []
    for batch in batches:
        data.append(batch)
        versions += [(x, x._version) for x in pytree.flatten(batch)[0] if _is_counted(x)]
    if any(x._version != version for x, version in versions):
        raise StructureError(
            message(
                "batches",
                "data that stays as it is: all of it is read before the first step",
                "a tensor that the iterator writes the data of several steps on",
                "(batch.clone() for batch in batches)",
            )
        )
    if not data:
        raise StructureError(
            message("batches", "the data of at least one step", "none", "[batch] * steps")
        )
    return data


def _is_counted(leaf: object) -> bool:
    """Return whether torch counts how often a leaf has been written on."""
    return isinstance(leaf, Tensor) and not leaf.is_inference()


def _for_variables(value: Any, name: str, given: Variables) -> Any:
    """Return a hyper-parameter for the list of variables: a tree as a list."""
    if name == "betas" and isinstance(value, tuple | list):
        return tuple(_for_variables(one, f"{name}[{i}]", given) for i, one in enumerate(value))
    _, spec = pytree.flatten(value)
    if spec.is_leaf():
        return value
    spread = pytree.broadcast_prefix(
        value, name, pytree.unflatten(given.spec, given.leaves)[0], "params"
    )
    return [spread[given.slots.index(slot)] for slot in range(len(given.tensors))]


def _state_of_variables(given: Variables, state: State, opt: Optimizer) -> dict[str, list[Any]]:
    opt.check_state(state)
    columns = {name: _leaves_of(state[name], given, name) for name in opt.entries}
    return {
        name: [column[given.slots.index(slot)] for slot in range(len(given.tensors))]
        for name, column in columns.items()
    }


def _leaves_of(tree: PyTree, given: Variables, name: str) -> list[Any]:
    """Return what stands in a tree at the leaves of params."""
    (params,) = pytree.unflatten(given.spec, given.leaves)
    return pytree.flatten_up_to(pytree.flatten(params)[1], "params", tree, f"state[{name!r}]")


def _to_tree(given: Variables, column: list[Any], others: list[Any]) -> PyTree:
    """Return the tree of params, with the new value of each variable, and other leaves as given."""
    placed = [
        other if slot is None else column[slot]
        for slot, other in zip(given.slots, others, strict=True)
    ]
    return pytree.unflatten(given.spec, placed)[0]
