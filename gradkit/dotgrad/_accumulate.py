"""`add_grads_`: what another `.backward()` would add."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd.accumulate import accumulate_through_engine
from gradkit._autograd.passes import ordinary_mode
from gradkit._compat.dynamo import disable_compile
from gradkit._core.leaf import plus
from gradkit._core.options import check_bool
from gradkit._core.ownership import copy_for
from gradkit._core.pytree import PyTree
from gradkit._state import dot_grad
from gradkit.dotgrad._matching import Pairs, match
from gradkit.errors import (
    UnsupportedGraphError,
    describe,
    message,
)


@disable_compile
def add_grads_(params: PyTree, grads: PyTree, *, hooks: bool = False) -> None:
    """Accumulate gradients into `.grad`: the bits that another `.backward()` would leave.

    A dense `.grad` is added to in place and stays the same object; where there is none, a copy is
    put there. A tied tensor counts once. None adds nothing.

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
            backward) run. If `params` is, or contains, a DistributedDataParallel module, its ranks
            reduce first: `.grad` becomes the mean over them of the former `.grad` plus the
            gradient, as after `.backward()`, by the module's communication hook if it has one. All
            ranks make the call; gradients that are the same on all of them, as those of
            `gradkit.distributed`, stay the same.

    Raises:
        LeafTypeError: As in `write_grads_`.
        OptionError: `hooks` is not a bool.
        StructureError: As in `write_grads_`.
        UnsupportedGraphError: `hooks=True`, and a tensor has tensor hooks, which have been applied
            to the gradient already and would be applied again; or a DistributedDataParallel module
            is in no_sync() or join(), or has static_graph or mixed_precision. Or as in
            `read_grads`.
        CollectiveError: `hooks=True`, and a rank has failed, is missing, or is too late.

    Source:
        `torch::autograd::AccumulateGrad::accumulateGrad`.
    """
    check_bool("hooks", hooks)
    with ordinary_mode(), torch.no_grad():
        if hooks and (replicas := _replicas_in(params)):
            accumulate_through_engine(_add_to_replicas(replicas, params, grads))
            return
        pairs = match(params, grads)
        if hooks:
            _refuse_tensor_hooks(pairs)
            accumulate_through_engine(pairs)
            return
        for leaf, grad in pairs:
            if grad is not None:
                dot_grad.accumulate(leaf, grad)


def _replicas_in(params: PyTree) -> list[DistributedDataParallel]:
    from gradkit.distributed import _replicas  # not before it is needed: it takes time to import

    return _replicas.replicas_in(params)


def _refuse_tensor_hooks(pairs: Pairs) -> None:
    for leaf, _ in pairs:
        if leaf._backward_hooks:
            expected = (
                "tensors without tensor hooks, which have been applied to the gradients already"
            )
            got = f"{describe(leaf)} with {len(leaf._backward_hooks)} of them"
            advice = "remove them, or call add_grads_(params, grads) without hooks=True"
            raise UnsupportedGraphError(message("params", expected, got, advice))


def _add_to_replicas(
    replicas: Sequence[DistributedDataParallel], params: PyTree, grads: PyTree
) -> Pairs:
    """Reduce and accumulate what belongs to replicated modules.

    Not by the modules' own reducers: those reduce once after each forward pass, and otherwise
    leave the gradients as they are, without a word [M2]. A post-accumulate-grad hook is called by
    hand, as the engine would.

    Returns:
        The other gradients.
    """
    from gradkit.distributed import _replicas
    from gradkit.distributed._reduction import LocalGrads

    _replicas.refuse_no_sync(replicas)
    group = _replicas.join_replicas(replicas, "gradkit.add_grads_")
    theirs = {id(param) for module in replicas for param in _replicas.reduced_params(module)}
    pairs: Pairs = []
    own: Pairs = []

    def offer() -> LocalGrads:
        pairs.extend(match(params, grads))
        _refuse_tensor_hooks(pairs)
        own.extend(pair for pair in pairs if id(pair[0]) in theirs)
        leaves, given = [leaf for leaf, _ in own], [grad for _, grad in own]
        _replicas.refuse_beyond_hooks(replicas, [*given, *(leaf.grad for leaf in leaves)])
        structure = (("the call", "add_grads_"), ("params", len(own)))
        # Of a rank without a gradient only the others' counts: `.grad` stays if none has one.
        sums = [None if grad is None else plus(leaf.grad, grad) for leaf, grad in own]
        return LocalGrads(sums, leaves, structure, lambda index: f"grads, tensor {index}")

    def added(index: int, total: Tensor | None) -> Tensor | None:
        return own[index][0].grad if total is None else total

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
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)
