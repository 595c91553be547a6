"""`add_grads_`: what another `.backward()` would add."""

from __future__ import annotations

import torch

from gradkit._autograd.accumulate import accumulate_through_engine
from gradkit._compat.dynamo import disable_compile
from gradkit._core.inference_mode import leave_inference_mode
from gradkit._core.options import check_bool
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

    def read_pairs() -> Pairs:
        pairs = match(params, grads)
        _refuse_tensor_hooks(pairs)
        return pairs

    with leave_inference_mode(), torch.no_grad():
        if hooks:
            from gradkit.distributed._accumulate import add_to_replicas  # lazily: a slow import

            accumulate_through_engine(add_to_replicas(params, read_pairs))
            return
        for leaf, grad in match(params, grads):
            if grad is not None:
                dot_grad.accumulate(leaf, grad)


def _refuse_tensor_hooks(pairs: Pairs) -> None:
    for leaf, _ in pairs:
        if leaf._backward_hooks:
            expected = (
                "tensors without tensor hooks, which have been applied to the gradients already"
            )
            got = f"{describe(leaf)} with {len(leaf._backward_hooks)} of them"
            advice = "remove them, or call add_grads_(params, grads) without hooks=True"
            raise UnsupportedGraphError(message("params", expected, got, advice))
