"""Code that accumulates into .grad: the engine's backward, and a block that is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._autograd.passes import PassRunner, values_of, weighted_outputs
from gradkit._checks.circumstances import HOOKS, around
from gradkit._checks.eager_graph import check_backward, check_backward_to_leaves, refuse_donated
from gradkit._checks.reachability import refuse_cast_since_forward
from gradkit._checks.recomputations import refuse_checkpoint_error
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.undoing import block
from gradkit._core import pytree
from gradkit._core.call import Call, Pass, read_losses, read_pass_options, require_graph
from gradkit._core.ownership import leave_inference_mode, own
from gradkit._core.params import NO_PARAMS, read_params
from gradkit._core.pytree import PyTree
from gradkit._state.grad_attribute import grads_put_back, set_grads
from gradkit.dotgrad._matching import read_leaves, unique
from gradkit.errors import GradkitError


@disable_compile
def backward_(
    losses: PyTree,
    params: PyTree = None,
    *,
    weights: PyTree = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> PyTree:
    """Accumulate the gradient of the weighted sum of the losses into `.grad`, and return values.

    It is `torch.autograd.backward` for trees, with every hook and without further copies. If a hook
    raises during the pass, the graph turns out to be freed further down, or a checkpoint or a step
    of `meta.unroll` differs when it is recomputed, `.grad` has what was accumulated until then.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradkit.backward_({"a": w.sum(), "b": (w * w).sum()}, weights={"a": 1.0, "b": 0.5})
        {'a': tensor(2.), 'b': tensor(2.)}
        >>> w.grad
        tensor([2., 2.])

    Args:
        losses: As in `value_and_grads`.
        params: The tensors whose `.grad` is accumulated into; None is all leaves of the graph.
        weights: As in `value_and_grads`.
        retain_graph: As in `value_and_grads`.
        create_graph: Let `.grad` carry a graph, with the reference cycle that torch warns of.

    Returns:
        The losses' values, as in `value_and_grads`.

    Raises:
        DetachedLossError: No loss carries a graph.
        FreedGraphError: The graph has been freed by an earlier call.
        LeafTypeError: A leaf is not a tensor that has a gradient.
        NotScalarLossError: A loss does not have exactly one element.
        OptionError: `retain_graph` or `create_graph` is not a bool.
        StructureError: A tree is empty or does not match.
        UnreachedParamError: Nothing of `params` is reached, or one was cast since the forward pass
            (which may show after the pass; `.grad` is as before, too).
        UnsupportedGraphError: `params` with a reentrant checkpoint, DistributedDataParallel or
            FSDP, where torch would silently not write `.grad`, or not reduce it; `create_graph`
            for parameters of these, which torch reduces without a graph, or through an operation
            whose second derivative is silently wrong in torch, or a hook that returns a gradient
            without a path to the one it was given. Or a checkpoint that recomputes other tensors
            than its forward pass had, as far as that shows.

    Source:
        `torch.autograd.backward`, https://pytorch.org/docs/stable/generated/torch.autograd.backward.html
    """
    if torch.is_inference_mode_enabled():
        with leave_inference_mode():
            options: Any = {"retain_graph": retain_graph, "create_graph": create_graph}
            return backward_(losses, params, weights=weights, **options)
    retain = read_pass_options("none", create_graph, retain_graph)
    flat = read_losses(losses, scalar=True)
    outputs, seeds, learned = weighted_outputs(flat, weights)
    opened = NO_PARAMS if params is None else read_params(params, allow_whole_replicas=True)
    group = require_graph(flat, outputs, [opened])
    call = Call(flat, outputs, [Pass(group, opened)], "none", create_graph, learned)
    # A hook may step, or take `.grad`: what it has done cannot be undone after the pass.
    starts_clean = opened.only_leaves and not around(call) & HOOKS and _no_grads(opened.variables)
    if params is None:
        check_backward_to_leaves(call)
    else:
        check_backward(call, casts=not starts_clean)
    if retain:
        refuse_donated(call, [retain])
    PassRunner(call).backward(
        [outputs[index] for index in group],
        [seeds[index] for index in group],
        None if params is None else opened.variables,
        retain=retain,
    )
    if params is not None and starts_clean:
        _refuse_cast(call, opened.variables)
    return values_of(flat, create_graph)


_grad: Callable[[Tensor], Tensor | None] = attrgetter("grad")


def _no_grads(leaves: Sequence[Tensor]) -> bool:
    return {type(None)}.issuperset(map(type, map(_grad, leaves)))


def _refuse_cast(call: Call, leaves: list[Tensor]) -> None:
    """Raise if a leaf has no `.grad`, since it was cast; then no leaf has one."""
    grads = list(map(_grad, leaves))
    if type(None) in set(map(type, grads)):
        try:
            refuse_cast_since_forward(call, [grads])
        except GradkitError:
            set_grads(leaves, [None] * len(leaves))
            raise


class Captured:
    """The gradients that `capture_grads` has captured.

    Attributes:
        grads: A tree like the params of the call; None until the block has ended.
    """

    def __init__(self) -> None:
        self.grads: PyTree = None


@disable_compile
@block
def capture_grads(params: PyTree) -> Iterator[Captured]:
    """Run code that accumulates into `.grad`, and return those gradients as a value.

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
        An object whose `grads`, after the block, is a tree like `params`: the `.grad` that the
        block left, or None.

    Raises:
        LeafTypeError: A leaf is not a leaf tensor.
        StructureError: There are no leaves.
        RuntimeError: The block raises it.
        UnsupportedGraphError: A leaf is a parameter that `fully_shard` has gathered: enter the
            block before the forward pass. Or a checkpoint recomputes other tensors in the block.

    Source:
        `torch.Tensor.grad`, as `torch.autograd.backward` accumulates it.
    """
    opened = read_leaves(params)
    leaves = unique(opened.leaves)
    captured = Captured()
    grads: list[Tensor | None] = []
    with grads_put_back(leaves):
        try:
            yield captured
        except RuntimeError as error:
            refuse_checkpoint_error(error, "capture_grads")
            raise
        # A view of a buffer is copied, as the former `.grad` may be one, too.
        grads += [x if x is None or x._base is None else x.clone() for x in map(_grad, leaves)]
    by_leaf = {id(leaf): _owned([grads.pop()], leaf) for leaf in reversed(leaves)}
    placed: list[Tensor | None] = []
    for leaf in opened.leaves:
        grad = None if leaf is None else by_leaf[id(leaf)]
        tied = any(grad is other for other in placed)
        placed.append(grad.clone() if tied and grad is not None else grad)
    captured.grads = pytree.unflatten(opened.spec, placed)


def _owned(only: list[Tensor | None], leaf: Tensor) -> Tensor | None:
    """Return the gradient in a list, copied if anything else refers to it and it has no graph."""
    if only[0] is not None and not only[0].requires_grad:
        own(cast("list[Tensor]", only), [leaf])
    return only[0]
