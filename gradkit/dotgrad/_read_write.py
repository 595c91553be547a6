"""`.grad` as a value: read, written, added to, cleared."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from gradkit._autograd.engine import accumulate_through_engine
from gradkit._compat.autograd import tensor_hooks
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import detach_keep_tangent
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import UNUSED, check_bool, check_option
from gradkit._core.leaf_arithmetic import ARITHMETIC_DTYPES, why_it_fails
from gradkit._core.ownership import leave_inference_mode, overlaps_itself, zeros_for
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree
from gradkit._state import grad_attribute
from gradkit.dotgrad import _matching
from gradkit.errors import UnreachedParamError, UnsupportedGraphError, describe, message


@disable_compile
def read_grads(params: PyTree, *, unused: Literal["none", "zeros", "error"] = "none") -> PyTree:
    """Return copies of the `.grad` of each tensor.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> (3 * w).sum().backward()
        >>> gradkit.read_grads({"w": w})
        {'w': tensor([3., 3.])}

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.
        unused: The result for a trainable tensor whose `.grad` is None: `"none"`, `"zeros"` (a
            dense zero) or `"error"`.

    Returns:
        A tree like `params`: of each `.grad` a copy of its shape, dtype, strides and layout,
        without a graph.

    Raises:
        LeafTypeError: A leaf is not a leaf tensor.
        OptionError: `unused` has another value.
        StructureError: There are no leaves.
        UnreachedParamError: A trainable tensor has no `.grad`, under `unused="error"`.
        UnsupportedGraphError: A leaf is a parameter that `fully_shard` has gathered.
    """
    check_option("unused", unused, UNUSED)
    opened = _matching.read_leaves(params)
    grads: list[Tensor | None] = []
    for index, leaf in enumerate(opened.leaves):
        grad = None if leaf is None else leaf.grad
        if grad is not None:
            with leave_inference_mode():
                grads.append(detach_keep_tangent(grad).clone())
        elif unused == "none" or leaf is None or not leaf.requires_grad:
            grads.append(None)
        elif unused == "zeros":
            grads.append(zeros_for(leaf))
        else:
            where = pytree.path(opened.spec, index, "params")
            fix = "call backward() first, or allow it: unused='none'"
            raise UnreachedParamError(message(where, "a tensor with a .grad", "None", fix))
    return pytree.unflatten(opened.spec, grads)


@disable_compile
def write_grads_(params: PyTree, grads: PyTree) -> None:
    """Set every `.grad` to a copy of the gradient given; None sets None.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradkit.write_grads_({"w": w}, {"w": torch.zeros(2)})
        >>> w.grad
        tensor([0., 0.])

    Args:
        params: As in `read_grads`.
        grads: A tree of its structure: gradients of each tensor's shape, device and
            `grad_dtype or dtype`, dense or sparse, or None. They are written without their graph.

    Raises:
        LeafTypeError: A gradient is not a tensor.
        StructureError: Trees, shapes, dtypes, devices or layouts do not match, or a tied tensor has
            two different gradients. Nothing has been changed.
        GradkitError: As in `read_grads`.

    Source:
        The layout is that of `torch::autograd::AccumulateGrad`, as after `.backward()`.
    """
    pairs = _matching.match(_matching.read_leaves(params), grads)
    with leave_inference_mode():
        grad_attribute.write_all(pairs)


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
        OptionError: `hooks` is not a bool.
        UnsupportedGraphError: torch cannot add the gradient to a `.grad` in place: it is expanded,
            of inference mode, of float8, or sparse in another way. Or `hooks=True`, and a tensor
            has tensor hooks, which have been applied to the gradient already and would be applied
            again; or a DistributedDataParallel module is in no_sync() or join(), or has
            static_graph or mixed_precision.
        CollectiveError: `hooks=True`, and a rank has failed, is missing, or is too late.
        GradkitError: As in `write_grads_`.

    Source:
        `torch::autograd::AccumulateGrad::accumulateGrad`.
    """
    check_bool("hooks", hooks)

    def read_pairs() -> _matching.Pairs:
        opened = _matching.read_leaves(params)
        pairs = _matching.match(opened, grads)
        _refuse_tensor_hooks(opened)
        _refuse_unaddable(opened, pairs)
        return pairs

    with leave_inference_mode(), torch.no_grad(), INSIDE:
        if hooks:
            from gradkit.distributed._ddp import add_to_replicas  # lazily: a slow import

            pairs = add_to_replicas(params, read_pairs)
            accumulate_through_engine(grad_attribute.apart_from_grads(pairs))
            return
        opened = _matching.read_leaves(params)
        by_leaf = _matching.read_grad_leaves(opened, grads)
        totals = [leaf.grad for leaf in opened.variables]
        if set(map(type, totals)) == {type(None)}:
            pairs = _matching.match(opened, grads, by_leaf)
            grad_attribute.write_all([pair for pair in pairs if pair[1] is not None])
            return
        if _matching.plainly_match(opened, by_leaf, totals) and grad_attribute.add_together(
            totals, by_leaf
        ):
            return
        pairs = [pair for pair in _matching.match(opened, grads, by_leaf) if pair[1] is not None]
        _refuse_unaddable(opened, pairs)
        apart = grad_attribute.apart_from_grads(pairs)
        grad_attribute.accumulate_all(cast("list[tuple[Tensor, Tensor]]", apart))


def _refuse_unaddable(params: Params, pairs: _matching.Pairs) -> None:
    """Raise if a gradient cannot be added to a `.grad` in place."""
    every = [(leaf, leaf.grad, grad) for leaf, grad in pairs]
    sums = [(leaf, a, b) for leaf, a, b in every if a is not None and b is not None]
    if grad_attribute.are_addable([total for _, total, _ in sums], [grad for *_, grad in sums]):
        return
    for leaf, total, grad in sums:
        defect = _defect(leaf, total, grad)
        if defect is not None:
            expected = "a .grad that can be added to in place"
            raise UnsupportedGraphError(message(_matching.path_of(params, leaf), expected, *defect))


def _defect(leaf: Tensor, total: Tensor, grad: Tensor) -> tuple[str, str] | None:
    """Return why a gradient cannot be added to a `.grad`, and what to do."""
    if total.is_inference():
        return f"{describe(total)} made in inference mode", "leaf.grad = leaf.grad.clone()"
    if (total.shape, total.device) != (grad.shape, grad.device):
        return f"{describe(total)} from before .data was set", "leaf.grad = None"
    if grad_attribute.are_addable([total], [grad]):
        return None
    if total.layout == torch.strided and overlaps_itself(total):
        got = f"an expanded one, {describe(total)}, whose elements share memory"
        return got, "leaf.grad = leaf.grad.clone()"
    reason = why_it_fails(lambda: grad_attribute.add_to(total.clone(), grad))
    got = f"{describe(total)} of layout {total.layout}, of which torch says: {reason}"
    return None if reason is None else (got, _how_to_add(leaf, total, grad))


def _how_to_add(leaf: Tensor, total: Tensor, grad: Tensor) -> str:
    if not ARITHMETIC_DTYPES.issuperset({total.dtype, grad.dtype}):
        return "leaf.grad, leaf.grad_dtype = None, torch.float32 before the gradients are computed"
    if total.dtype != grad.dtype:
        return "leaf.grad = leaf.grad.to(grad.dtype)"
    if leaf.layout == torch.strided:
        return "leaf.grad = leaf.grad.to_dense()"
    return "leaf.grad = leaf.grad.to_dense().to_sparse(), and add grad.to_dense().to_sparse()"


def _refuse_tensor_hooks(params: Params) -> None:
    for index, leaf in enumerate(params.leaves):
        if leaf is not None and (count := len(tensor_hooks(leaf) or ())):
            expected = "a tensor without tensor hooks, which have been applied to the gradients"
            got = f"{describe(leaf)} with {count} of them"
            fix = "remove them, or call add_grads_(params, grads) without hooks=True"
            where = pytree.path(params.spec, index, "params")
            raise UnsupportedGraphError(message(where, f"{expected} already", got, fix))


@disable_compile
def clear_grads_(params: PyTree) -> None:
    """Set every `.grad` to None, as `Optimizer.zero_grad` does.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> w.sum().backward()
        >>> gradkit.clear_grads_([w])
        >>> w.grad is None
        True

    Args:
        params: As in `read_grads`.

    Raises:
        GradkitError: As in `read_grads`.
    """
    for leaf in _matching.unique(_matching.read_leaves(params).leaves):
        grad_attribute.set_grad(leaf, None)
