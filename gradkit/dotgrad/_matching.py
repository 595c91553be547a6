"""Leaf tensors matched with their gradients, and checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradkit._checks.reachability import refuse_gathered
from gradkit._compat.distributed import any_fully_sharded, is_dtensor
from gradkit._compat.transforms import is_transform_tensor, transforms
from gradkit._core import pytree
from gradkit._core.leaf_arithmetic import same_values
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import (
    GradkitError,
    LeafTypeError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)

_shape, _dtype, _device, _layout, _grad_dtype = map(
    attrgetter, ("shape", "dtype", "device", "layout", "grad_dtype")
)
# Each leaf tensor once, with its gradient.
Pairs: TypeAlias = list[tuple[Tensor, Tensor | None]]


def read_leaves(params: PyTree) -> Params:
    """Open and check a tree of params whose `.grad` is read or written."""
    if isinstance(params, OrderedDict):
        _refuse_state_dict(params, "params")
    opened = read_params(params, allow_distributed=True)
    if not opened.only_leaves:
        _refuse_computed(opened)
    if any_fully_sharded():
        refuse_gathered(opened)
    return opened


def _refuse_computed(params: Params) -> None:
    """Raise if a tensor was computed from others."""
    for index, leaf in enumerate(params.leaves):
        if leaf is not None and not leaf.is_leaf:
            where = pytree.path(params.spec, index, "params")
            got = f"{describe(leaf)} that was computed from others"
            advice = "use value_and_grads or safe_retain for the gradients of intermediate values"
            raise LeafTypeError(message(where, "a leaf tensor, which has a .grad", got, advice))


def match(params: Params, grads: PyTree, by_leaf: list[Any] | None = None) -> Pairs:
    """Return each leaf tensor once with its gradient, checked; `by_leaf`: those read before."""
    by_leaf = read_grad_leaves(params, grads) if by_leaf is None else by_leaf
    for index, grad in enumerate(by_leaf) if transforms() else ():
        if isinstance(grad, Tensor) and is_transform_tensor(grad):
            expected, got = "a gradient outside of torch.func's transforms", "one inside of them"
            fix = "return the gradients from the function, and write them or step outside"
            where = pytree.path(params.spec, index, "grads")
            raise UnsupportedGraphError(message(where, expected, got, fix))
    if plainly_match(params, by_leaf):
        return list(zip(params.variables, by_leaf, strict=True))
    try:
        return _matched(params, by_leaf)
    except GradkitError as error:
        raise (_known_mistake(params, grads) or error) from None


def read_grad_leaves(params: Params, grads: PyTree) -> list[Any]:
    """Return what `grads` has in the place of each leaf of the params, unchecked."""
    if isinstance(grads, OrderedDict):
        _refuse_state_dict(grads, "grads")
    try:
        return pytree.flatten_up_to(params.spec, "params", grads, "grads")
    except GradkitError as error:
        raise (_known_mistake(params, grads) or error) from None


def _matched(params: Params, by_leaf: list[Any]) -> Pairs:
    pairs: dict[int, tuple[Tensor, Tensor | None]] = {}
    for index, (leaf, grad) in enumerate(zip(params.leaves, by_leaf, strict=True)):
        if isinstance(leaf, Tensor) and _is_zero_of_frozen(leaf, grad):
            grad = None
        mismatch = _mismatch(leaf, grad)
        if mismatch is None and id(leaf) in pairs and _differ(pairs[id(leaf)][1], grad):
            expected = "the gradient that the same tensor has in another place"
            mismatch = expected, "a different one", _PASS_GRADS_OF_PARAMS
        if mismatch is not None:
            where = pytree.path(params.spec, index, "grads")
            error = StructureError if isinstance(grad, Tensor | None) else LeafTypeError
            raise error(message(where, *mismatch))
        if leaf is not None:
            pairs.setdefault(id(leaf), (leaf, grad))
    return list(pairs.values())


def plainly_match(params: Params, *by_leaf: list[Any]) -> bool:
    """Return whether each leaf is an ordinary variable, and one tensor of each list matches it."""
    leaves = params.variables
    if not (params.no_subclasses and params.only_leaves and params.all_variables):
        return False
    if not all(PLAIN_TYPES.issuperset(map(type, tensors)) for tensors in by_leaf):
        return False
    try:
        # A Python loop over the tensors takes far longer: `map` reads an attribute of all.
        columns = [list(map(read, leaves)) for read in (_shape, _grad_dtype, _device)]
        return {torch.strided}.issuperset(map(_layout, leaves)) and all(
            {torch.strided}.issuperset(map(_layout, tensors))
            and columns == [list(map(read, tensors)) for read in (_shape, _dtype, _device)]
            for tensors in by_leaf
        )
    except RuntimeError:  # a nested tensor that is strided has no shape
        return False


def _is_zero_of_frozen(leaf: Tensor, grad: object) -> bool:
    """Return whether a frozen parameter has the zeros of `gradkit.func`, which are no gradient."""
    if leaf.requires_grad or not isinstance(grad, Tensor) or grad.shape != leaf.shape:
        return False
    return grad.layout == torch.strided and not grad.is_meta and not grad.count_nonzero()


_PASS_GRADS_OF_PARAMS = "pass the gradients of these very params"


def _mismatch(leaf: Tensor | None, grad: object) -> tuple[str, str, str] | None:
    """Return what was expected, what came, and what to do, if they do not match."""
    if grad is None:
        return None
    if not isinstance(grad, Tensor):
        return "a tensor or None", describe(grad), _PASS_GRADS_OF_PARAMS
    if leaf is None or not leaf.requires_grad:
        why = "None" if leaf is None else "frozen; requires_grad_() would train it"
        return f"None, as the param is {why}", describe(grad), _PASS_GRADS_OF_PARAMS
    if (leaf.is_nested and leaf.layout == torch.strided) or grad.is_nested != leaf.is_nested:
        fix = "nested tensors of layout torch.jagged, or loss.backward()"
        return "a gradient that .grad can be set to", f"{describe(grad)} of {describe(leaf)}", fix
    dtype = leaf.grad_dtype
    alike = (
        grad.shape == leaf.shape
        and grad.device == leaf.device
        and dtype in (None, grad.dtype)
        and is_dtensor(grad) == is_dtensor(leaf)
    )
    if not alike:
        in_dtype = "" if dtype in (None, leaf.dtype) else f", in {dtype}"
        return f"the gradient of {describe(leaf)}{in_dtype}", describe(grad), _PASS_GRADS_OF_PARAMS
    if grad.layout in (leaf.layout, torch.sparse_coo):
        return None
    # The engine can give a sparse leaf a dense `.grad`; an assignment cannot.
    expected = f"a gradient of layout {leaf.layout} or torch.sparse_coo, which .grad can hold"
    fix = "grad.to_dense()" if leaf.layout == torch.strided else "grad.to_sparse()"
    return expected, f"one of layout {grad.layout}", f"give it another: {fix}"


def _differ(first: Tensor | None, second: Tensor | None) -> bool:
    if first is second or first is None or second is None:
        return first is not second
    return first.layout != second.layout or not same_values(first.to_dense(), second.to_dense())


def path_of(params: Params, leaf: Tensor) -> str:
    """Return the path of the first place in which a leaf stands."""
    index = next(i for i, other in enumerate(params.leaves) if other is leaf)
    return pytree.path(params.spec, index, "params")


def unique(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the tensors, each once, without None."""
    return list({id(t): t for t in tensors if t is not None}.values())


def _refuse_state_dict(tree: OrderedDict[Any, Any], root: str) -> None:
    """Raise if a tree is a module's state_dict, whose tensors are copies without `.grad`."""
    if not hasattr(tree, "_metadata"):
        return
    if any(isinstance(value, nn.Parameter) for value in tree.values()):
        return  # state_dict(keep_vars=True): the parameters themselves
    expected = "gradients" if root == "grads" else "parameters"
    got = "a state_dict(), whose tensors are the detached values of parameters and buffers"
    advice = "value, grads = gradkit.value_and_grads(loss, model)"
    if root == "params":
        advice = "pass the module itself, or dict(model.named_parameters())"
    raise LeafTypeError(message(root, expected, got, advice))


def _known_mistake(params: Params, grads: PyTree) -> GradkitError | None:
    """Return the error for gradients that do not match, if it is known what they are instead."""
    tree, pair = "a tree of gradients", "value, grads = gradkit.value_and_grads(losses, params)"
    if isinstance(grads, tuple) and len(grads) == 2:
        per_loss = _matches(params.spec, grads[0]) and not isinstance(grads[0], Tensor)
        if _matches(params.spec, grads[1]) and not per_loss:
            got = "a pair (values, gradients) that was not unpacked"
            return StructureError(message("grads", tree, got, pair))
        if isinstance(grads[1], Tensor) and _matches(params.spec, grads[0]):
            got = "a pair (gradients, norm) that was not unpacked"
            fix = "clipped, norm = gradkit.tree.clip_by_global_norm(grads, max_norm)"
            return StructureError(message("grads", tree, got, fix))
    for leaf in pytree.flatten(grads)[0]:
        if isinstance(leaf, nn.Module | Optimizer | nn.Parameter):
            fix = "pass params before grads: (params, grads), or step_(optimizer, params, grads)"
            return LeafTypeError(message("grads", "gradients", f"params: {describe(leaf)}", fix))
    if isinstance(grads, Tensor) and grads.requires_grad and not params.spec.is_leaf():
        return StructureError(message("grads", tree, f"a loss: {describe(grads)}", pair))
    children = [] if isinstance(grads, Tensor | None) else pytree.children(grads)[0]
    if children and all(_matches(params.spec, child) for child in children):
        expected, got = "the gradients of one loss", "those of several losses"
        fix = "gradkit.combine(grads, aggregator_or_weights), which makes one gradient of them"
        return StructureError(message("grads", expected, got, fix))
    return None


def _matches(spec: Structure, tree: PyTree) -> bool:
    """Return whether a tree has this structure, with gradients for leaves."""
    leaves, own_spec = pytree.flatten(tree)
    return own_spec == spec and all(isinstance(leaf, Tensor | None) for leaf in leaves)
