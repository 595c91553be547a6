"""`add_grads_`: what another `.backward()` would add."""

from __future__ import annotations

import torch

from gradkit._autograd.passes import ordinary_mode
from gradkit._compat.dynamo import disable_compile
from gradkit._core.ownership import copy_for
from gradkit._core.pytree import PyTree
from gradkit.dotgrad._pairs import Pairs, match
from gradkit.errors import (
    UnsupportedGraphError,
    describe,
    message,
)


@disable_compile
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
            make the call; gradients that are the same on all of them, as those of
            `gradkit.distributed`, stay what they are.

    Raises:
        LeafTypeError: As in `write_grads_`.
        StructureError: As in `write_grads_`.
        UnsupportedGraphError: `hooks=True`, and a tensor has tensor hooks: they have been applied
            to the gradient already, and would be applied again; or a DistributedDataParallel module
            is inside of no_sync() or join(), or has static_graph or mixed_precision. Or as in
            `read_grads`.
        CollectiveError: `hooks=True`, and a rank has failed, is missing, or is too late.

    Source:
        `torch::autograd::AccumulateGrad::accumulateGrad`.
    """

    def read_pairs() -> Pairs:
        pairs = match(params, grads)
        _refuse_tensor_hooks(pairs)
        return pairs

    with ordinary_mode(), torch.no_grad():
        if hooks:
            from gradkit.distributed._accumulate import add_to_replicas  # lazily: a slow import

            _add_through_the_engine(add_to_replicas(params, read_pairs))
            return
        for leaf, grad in match(params, grads):
            if grad is None:
                continue
            if leaf.grad is None:
                leaf.grad = copy_for(grad.detach(), leaf)
            elif leaf.grad.is_sparse and not grad.is_sparse:
                leaf.grad = grad + leaf.grad  # the sum is dense: another object, as in torch
            else:
                leaf.grad += grad.detach()


def _refuse_tensor_hooks(pairs: Pairs) -> None:
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


def _add_through_the_engine(pairs: Pairs) -> None:
    present = [(leaf, grad) for leaf, grad in pairs if grad is not None]
    if present:
        leaves, grads = zip(*present, strict=True)
        torch.autograd.backward(leaves, [grad.detach() for grad in grads])
