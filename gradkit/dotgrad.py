"""The `.grad` workflow, both ways, bit for bit. The one place that writes `.grad`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradkit import _pytree, _replicas
from gradkit._inputs import (
    Params,
    check_option,
    read_losses,
    read_params,
    read_weights,
    require_graph,
)
from gradkit._leaf import is_dtensor
from gradkit._ownership import PLAIN_TYPES, copy_for, own, zeros_for
from gradkit._passes import UNUSED, ordinary_mode, weigh
from gradkit._pytree import PyTree
from gradkit._reduction import Offer
from gradkit._refusals import prepare_backward
from gradkit.errors import (
    LeafTypeError,
    StructureError,
    UnreachedParamError,
    UnsupportedGraphError,
    UnsupportedOptimizerError,
    describe,
    message,
)

__all__ = [
    "Captured",
    "add_grads_",
    "backward_",
    "capture_grads",
    "clear_grads_",
    "read_grads",
    "step_",
    "write_grads_",
]

# Of each leaf tensor, once, what is to become of its `.grad`.
_Pairs: TypeAlias = list[tuple[Tensor, Tensor | None]]


def read_grads(params: PyTree, *, unused: Literal["none", "zeros", "error"] = "none") -> PyTree:
    """Return copies of what stands in `.grad`.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> (3 * w).sum().backward()
        >>> gradkit.read_grads({"w": w})
        {'w': tensor([3., 3.])}

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.
        unused: What stands for a trainable tensor whose `.grad` is None: `"none"`, `"zeros"` (a
            dense zero) or `"error"`.

    Returns:
        A tree like `params`: of each `.grad` a copy of its shape, dtype, strides and layout,
        without a graph.

    Raises:
        LeafTypeError: A leaf is no leaf tensor.
        StructureError: There are no leaves, or `unused` has no such value.
        UnreachedParamError: A trainable tensor has no `.grad`, under `unused="error"`.
    """
    check_option("unused", unused, UNUSED)
    wanted = _read_leaves(params)
    found: list[Tensor | None] = []
    for index, leaf in enumerate(wanted.leaves):
        grad = None if leaf is None else leaf.grad
        if grad is None and leaf is not None and leaf.requires_grad and unused != "none":
            if unused == "error":
                where = _pytree.path(wanted.spec, index, "params")
                do = "call backward() first, or allow it: unused='none'"
                raise UnreachedParamError(message(where, "a tensor with a .grad", "None", do))
            found.append(zeros_for(leaf))
        else:
            with ordinary_mode():
                found.append(None if grad is None else grad.detach().clone())
    return _pytree.unflatten(wanted.spec, found)


def write_grads_(params: PyTree, grads: PyTree) -> None:
    """Set every `.grad` to a copy of the gradient given; None sets None.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradkit.write_grads_({"w": w}, {"w": torch.zeros(2)})
        >>> w.grad
        tensor([0., 0.])

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.
        grads: A tree of its structure: gradients of each tensor's shape, device and
            `grad_dtype or dtype`, dense or sparse, or None. Their graph, if any, is left behind.

    Raises:
        LeafTypeError: A leaf is no leaf tensor, or a gradient is no tensor.
        StructureError: Trees, shapes, dtypes, devices or layouts do not match, or the places of a
            tied tensor hold different gradients. No `.grad` has been changed then.

    Source:
        The layout is that of `torch::autograd::AccumulateGrad`, as after `.backward()`.
    """
    pairs = _match(params, grads)
    with ordinary_mode():
        for leaf, grad in pairs:
            leaf.grad = None if grad is None else copy_for(grad.detach(), leaf)


def add_grads_(params: PyTree, grads: PyTree, *, hooks: bool = False) -> None:
    """Accumulate gradients into `.grad`: the bits that another `.backward()` would leave.

    An existing dense `.grad` is added to in place and stays the same object; where there is none,
    a copy is put. A tied tensor counts once. None adds nothing.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> values, grads = gradkit.value_and_grads((3 * w).sum(), {"w": w})
        >>> gradkit.add_grads_({"w": w}, grads)
        >>> gradkit.add_grads_({"w": w}, grads)
        >>> w.grad
        tensor([6., 6.])

    Args:
        params: As in `write_grads_`.
        grads: As in `write_grads_`.
        hooks: Go through the engine, so that post-accumulate-grad hooks (an optimizer in the
            backward) fire. Where `params` is, or holds, a DistributedDataParallel module, its ranks
            reduce first: `.grad` becomes the mean over them of what it was with the gradient added,
            as after `.backward()`, by the module's communication hook if there is one. All ranks
            make the call; gradients that are the same on all of them, as those of `gradkit.dist`,
            stay what they are.

    Raises:
        LeafTypeError: As in `write_grads_`.
        StructureError: As in `write_grads_`.
        UnsupportedGraphError: `hooks=True`, and a tensor has tensor hooks: they have been applied
            to the gradient already, and would be applied again; or a DistributedDataParallel module
            is inside of no_sync() or join(), or has static_graph or mixed_precision.
        CollectiveError: `hooks=True`, and a rank has failed, is missing, or is too late.

    Source:
        `torch::autograd::AccumulateGrad::accumulateGrad`.
    """
    pairs = _match(params, grads)
    with ordinary_mode(), torch.no_grad():
        if hooks:
            _add_through_the_engine(params, pairs)
            return
        for leaf, grad in pairs:
            if grad is None:
                continue
            if leaf.grad is None:
                leaf.grad = copy_for(grad.detach(), leaf)
            elif leaf.grad.is_sparse and not grad.is_sparse:
                leaf.grad = grad + leaf.grad  # the sum is dense: another object, as in torch
            else:
                leaf.grad += grad.detach()


def _add_through_the_engine(params: PyTree, pairs: _Pairs) -> None:
    for leaf, _ in pairs:
        if leaf._backward_hooks:
            raise UnsupportedGraphError(
                message(
                    "params",
                    "tensors without tensor hooks, which the gradients have been through already",
                    f"{describe(leaf)} with {len(leaf._backward_hooks)} of them",
                    "remove them, or call add_grads_(params, grads) without hooks=True",
                )
            )
    replicas = _replicas.replicas_in(params)
    if replicas:
        pairs = _add_to_replicas(replicas, pairs)
    present = [(leaf, grad) for leaf, grad in pairs if grad is not None]
    if present:
        leaves, grads = zip(*present, strict=True)
        torch.autograd.backward(leaves, [grad.detach() for grad in grads])


def _add_to_replicas(replicas: Sequence[DistributedDataParallel], pairs: _Pairs) -> _Pairs:
    """Reduce and accumulate what belongs to replicated modules.

    Not by the modules' own reducers: those reduce once after each forward pass, and otherwise
    leave the gradients as they are, without a word [M2]. A post-accumulate-grad hook is called by
    hand, as the engine would.

    Returns:
        The other gradients.
    """
    _replicas.refuse_no_sync(replicas)
    group = _replicas.join_replicas(replicas, "gradkit.add_grads_")
    theirs = {id(param) for module in replicas for param in _replicas.reduced_params(module)}
    own = [(leaf, grad) for leaf, grad in pairs if id(leaf) in theirs]

    def offer() -> Offer:
        leaves, grads = [leaf for leaf, _ in own], [grad for _, grad in own]
        _replicas.refuse_beyond_hooks(replicas, [*grads, *(leaf.grad for leaf in leaves)])
        structure = (("the call", "add_grads_"), ("params", len(own)))
        return Offer(grads, leaves, structure, lambda index: f"grads, tensor {index}")

    def added(index: int, grad: Tensor | None) -> Tensor | None:
        before = own[index][0].grad
        return grad if before is None else before if grad is None else before + grad

    found = _replicas.reduce_replicas(group, replicas, offer, complete=added)
    for (leaf, _), grad in zip(own, found, strict=True):
        if grad is not None:
            _replace_grad(leaf, grad)
    return [(leaf, grad) for leaf, grad in pairs if id(leaf) not in theirs]


def _replace_grad(leaf: Tensor, grad: Tensor) -> None:
    if leaf.grad is not None and leaf.grad.layout == grad.layout == torch.strided:
        leaf.grad.copy_(grad)  # the same object, as after `.backward()`
    else:
        leaf.grad = copy_for(grad, leaf)
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def clear_grads_(params: PyTree) -> None:
    """Set every `.grad` to None.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> w.sum().backward()
        >>> gradkit.clear_grads_([w])
        >>> w.grad is None
        True

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.

    Raises:
        LeafTypeError: A leaf is no leaf tensor.
        StructureError: There are no leaves.

    Source:
        `torch.optim.Optimizer.zero_grad(set_to_none=True)`.
    """
    for leaf in _unique(_read_leaves(params).leaves):
        leaf.grad = None


def backward_(
    losses: PyTree,
    params: PyTree = None,
    *,
    weights: PyTree = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> PyTree:
    """Accumulate the gradient of the weighted sum of the losses into `.grad`, and return values.

    It is `torch.autograd.backward` for trees, with every hook, and no copy of its own. If a user's
    hook raises on the way, or the graph turns out to be freed further down, `.grad` holds what had
    been accumulated until then.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradkit.backward_({"a": w.sum(), "b": (w * w).sum()}, weights={"a": 1.0, "b": 0.5})
        {'a': tensor(2.), 'b': tensor(2.)}
        >>> w.grad
        tensor([2., 2.])

    Args:
        losses: As in `value_and_grads`.
        params: Which tensors' `.grad` to accumulate into; None is all leaves of the graph.
        weights: As in `value_and_grads`.
        retain_graph: As in `value_and_grads`.
        create_graph: Let `.grad` carry a graph, with the reference cycle that torch warns of.

    Returns:
        The losses' values, as in `value_and_grads`.

    Raises:
        DetachedLossError: No loss carries a graph.
        FreedGraphError: The graph has been freed by an earlier call.
        LeafTypeError: A leaf is no tensor that has a gradient.
        NotScalarLossError: A loss has not exactly one element.
        StructureError: A tree is empty or does not match.
        UnreachedParamError: Nothing of `params` is reached.
        UnsupportedGraphError: `params` with a reentrant checkpoint, DistributedDataParallel or
            FSDP, of whose parameters torch would silently leave `.grad` as it is.

    Source:
        `torch.autograd.backward`, https://pytorch.org/docs/stable/generated/torch.autograd.backward.html
    """
    with ordinary_mode():
        target = read_losses(losses, scalar=True)
        outputs, seeds = weigh(target, read_weights(weights, target))
        live = require_graph(target, outputs)
        wanted = None if params is None else read_params(params)
        run = prepare_backward(target, outputs, live, wanted, create_graph)
        run.backward(
            [outputs[index] for index in live],
            [seeds[index] for index in live],
            None if wanted is None else wanted.variables,
            retain=create_graph if retain_graph is None else retain_graph,
        )
        values = [loss if create_graph else loss.detach().clone() for loss in target.leaves]
        return _pytree.unflatten(target.spec, values)


class Captured:
    """What `capture_grads` has captured.

    Attributes:
        grads: A tree like the params of the call; None until the block has ended.
    """

    def __init__(self) -> None:
        self.grads: PyTree = None


@contextmanager
def capture_grads(params: PyTree) -> Iterator[Captured]:
    """Run code that accumulates into `.grad`, and take what it leaves there as a result.

    The block starts from a clean `.grad`; it may call `.backward()` several times, `zero_grad()`,
    or replace `.grad`. Afterwards, also if it raises, every `.grad` is the object it was before.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> with gradkit.capture_grads({"w": w}) as captured:
        ...     (3 * w).sum().backward()
        >>> captured.grads, w.grad
        ({'w': tensor([3., 3.])}, None)

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.

    Yields:
        An object whose `grads`, after the block, is a tree like `params`: what the block left in
        `.grad`, or None.

    Raises:
        LeafTypeError: A leaf is no leaf tensor.
        StructureError: There are no leaves.
    """
    wanted = _read_leaves(params)
    leaves = _unique(wanted.leaves)
    captured = Captured()
    found: list[Tensor | None] = []
    with grads_put_back(leaves):
        yield captured
        found += [leaf.grad for leaf in leaves]
    _own(found, leaves)
    by_leaf = {id(leaf): grad for leaf, grad in zip(leaves, found, strict=True)}
    del found
    places: list[Tensor | None] = []
    for leaf in wanted.leaves:
        grad = None if leaf is None else by_leaf[id(leaf)]
        tied = grad is not None and any(grad is other for other in places)
        places.append(grad.clone() if tied and grad is not None else grad)
    captured.grads = _pytree.unflatten(wanted.spec, places)


def _own(grads: list[Tensor | None], leaves: list[Tensor]) -> None:
    """Copy the gradients that something else refers to; a graph stays as it is."""
    for index, leaf in enumerate(leaves):
        grad = grads[index]
        if grad is not None and not grad.requires_grad:
            grads[index] = None
            lone = [grad]
            del grad
            own(lone, [leaf])
            grads[index] = lone.pop()


@contextmanager
def grads_put_back(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let the block start from an empty `.grad`, and put back what stood there.

    Args:
        leaves: Leaf tensors, each once.
    """
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def step_(
    optimizer: Optimizer, params: PyTree, grads: PyTree, *, scaler: GradScaler | None = None
) -> None:
    """Take one step of an optimizer with these gradients; every `.grad` is as before afterwards.

    Weights and optimizer state are bit for bit those of the `.grad` loop. A parameter of the
    optimizer that is not in `params`, or whose gradient is None, is skipped, as after a
    `.backward()` that did not reach it.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([w], lr=0.1)
        >>> value, grads = gradkit.value_and_grads((w * w).sum(), [w])
        >>> gradkit.step_(optimizer, [w], grads)
        >>> w
        tensor([0.8000, 0.8000], requires_grad=True)

    Args:
        optimizer: Its `step()` is called once, with its hooks and its scheduler's.
        params: As in `write_grads_`.
        grads: As in `write_grads_`; with a `scaler`, the gradients of the scaled loss, unless the
            caller has called `scaler.unscale_(optimizer)` in this step (to clip, say): then the
            unscaled ones.
        scaler: Unscales the gradients and skips the step if one is inf or NaN, by
            `scaler.step(optimizer)`; `scaler.update()` stays the caller's.

    Raises:
        LeafTypeError: As in `write_grads_`.
        StructureError: As in `write_grads_`; or a gradient belongs to no parameter of the
            optimizer; or all are None and there is a scaler, which needs one.
        UnsupportedOptimizerError: The optimizer's `step` needs a closure, as that of LBFGS does.
    """
    _refuse_closure(optimizer)
    pairs = _match(params, grads)
    own_params = _unique(p for group in optimizer.param_groups for p in group["params"])
    _refuse_foreign(pairs, own_params)
    if scaler is not None and all(grad is None for _, grad in pairs):
        do = "skip the step, and scaler.update()"
        raise StructureError(message("grads", "a gradient to unscale", "None everywhere", do))
    with grads_put_back(own_params):
        with ordinary_mode():
            for leaf, grad in pairs:
                leaf.grad = None if grad is None else copy_for(grad.detach(), leaf)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(
            message(
                "optimizer",
                "one whose step() takes gradients as they are",
                f"{type(optimizer).__name__}, whose step needs a closure that computes them anew",
                "with capture_grads(params): optimizer.step(closure)",
            )
        )


def _refuse_foreign(pairs: _Pairs, own_params: Iterable[Tensor]) -> None:
    known = {id(p) for p in own_params}
    for leaf, grad in pairs:
        if grad is not None and id(leaf) not in known:
            raise StructureError(
                message(
                    "params",
                    "parameters of the optimizer",
                    f"{describe(leaf)} that it does not have: its gradient would be dropped",
                    "pass the part of params and grads that this optimizer steps",
                )
            )


def _match(params: PyTree, grads: PyTree) -> _Pairs:
    """Return each leaf tensor once with its gradient, all of them checked."""
    wanted = _read_leaves(params)
    given = _pytree.matching_leaves(wanted.spec, "params", grads, "grads")
    if _plainly_match(wanted, given):
        return list(zip(wanted.variables, given, strict=True))
    pairs: dict[int, tuple[Tensor, Tensor | None]] = {}
    for index, (leaf, grad) in enumerate(zip(wanted.leaves, given, strict=True)):
        wrong = _mismatch(leaf, grad)
        if wrong is None and leaf is not None and id(leaf) in pairs:
            wrong = _tie_mismatch(pairs[id(leaf)][1], grad)
        if wrong is not None:
            where = _pytree.path(wanted.spec, index, "grads")
            error = LeafTypeError if not isinstance(grad, Tensor | None) else StructureError
            raise error(message(where, *wrong, "pass the gradients of these very params"))
        if leaf is not None:
            pairs.setdefault(id(leaf), (leaf, grad))
    return list(pairs.values())


def _plainly_match(wanted: Params, given: list[Any]) -> bool:
    """Return whether every leaf is a plain variable of its own, and has a gradient that fits."""
    leaves = wanted.variables
    return (
        len(leaves) == len(given)
        and wanted.ordinary
        and set(map(type, given)) <= PLAIN_TYPES
        and list(map(_shape, leaves)) == list(map(_shape, given))
        and list(map(_grad_dtype, leaves)) == list(map(_dtype, given))
        and list(map(_device, leaves)) == list(map(_device, given))
        and set(map(_layout, given)) == {torch.strided}
    )


_shape, _dtype, _device, _layout, _grad_dtype = map(
    attrgetter, ("shape", "dtype", "device", "layout", "grad_dtype")
)


def _mismatch(leaf: Tensor | None, grad: object) -> tuple[str, str] | None:
    """Return what was expected and what came, if they do not go together."""
    if grad is None:
        return None
    if not isinstance(grad, Tensor):
        return "a tensor or None", describe(grad)
    if leaf is None or not leaf.requires_grad:
        return f"None, as the param is {'None' if leaf is None else 'frozen'}", describe(grad)
    dtype = leaf.grad_dtype
    alike = (
        grad.shape == leaf.shape
        and grad.device == leaf.device
        and (dtype is None or grad.dtype == dtype)
        and is_dtensor(grad) == is_dtensor(leaf)
    )
    if not alike:
        return f"the gradient of {describe(leaf)}" + _in_dtype(leaf), describe(grad)
    if grad.layout not in (leaf.layout, torch.strided, torch.sparse_coo):
        return f"a gradient of layout {leaf.layout}, strided or sparse_coo", f"{grad.layout}"
    return None


def _in_dtype(leaf: Tensor) -> str:
    return "" if leaf.grad_dtype in (None, leaf.dtype) else f", in {leaf.grad_dtype}"


def _tie_mismatch(first: Tensor | None, second: Tensor | None) -> tuple[str, str] | None:
    if first is second or (
        first is not None
        and second is not None
        and first.layout == second.layout
        and torch.equal(first.to_dense(), second.to_dense())
    ):
        return None
    return "the gradient that the same tensor has in another place", "a different one"


def _read_leaves(params: PyTree) -> Params:
    wanted = read_params(params, wrapped=True)
    for index, leaf in enumerate(wanted.leaves):
        if leaf is not None and not leaf.is_leaf:
            raise LeafTypeError(
                message(
                    _pytree.path(wanted.spec, index, "params"),
                    "a leaf tensor, which has a .grad",
                    f"{describe(leaf)} with a history",
                    "use value_and_grads or safe_retain for the gradients of intermediate values",
                )
            )
    return wanted


def _unique(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return list({id(t): t for t in tensors if t is not None}.values())
