"""Norms of trees of gradients, and what is made of them; whether trees are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._compat.distributed import full_tensor, is_dtensor, torch_has_norm
from gradkit._compat.transforms import in_dual_level, transforms
from gradkit._core import pytree
from gradkit._core.call import check_bool, check_number
from gradkit._core.leaf_arithmetic import (
    clip_factor,
    dense,
    largest,
    stored_values,
    to_common_dtype,
)
from gradkit._core.params import DIFFERENTIABLE
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, OptionError, StructureError, describe, message
from gradkit.tree._arithmetic import (
    ClippedGrads,
    Leaf,
    aligned_leaves,
    apply_with_zeros,
    dot,
    foreach_takes,
    scale_leaves,
)


def global_norm(tree: PyTree, *, batch_dims: int = 0) -> Tensor:
    """Return the Euclidean norm of all leaves taken as one vector, or of one for each sample.

    Of DTensors each entry counts once, whatever their meshes and placements, and the norm is the
    same number on all ranks, which all pass the same tree: DTensors of which they have no part,
    too. It takes one collective for each mesh, and one for all those of all ranks. What is on
    another slice of a mesh is a copy; what is on a mesh of some ranks that is no slice is not, and
    needs a DTensor over all ranks beside it. A plain tensor counts as a copy of what the other
    ranks have: one that differs must be a DTensor. Gradients do not tell that parameters are tied:
    one in two leaves counts twice here, and once in `step_` and `minimize_`.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.global_norm({"w": torch.tensor([3.0, 4.0]), "b": None})
        tensor(5.)
        >>> per_sample = {"w": torch.tensor([[3.0], [6.0]]), "b": torch.tensor([4.0, 8.0])}
        >>> gradkit.tree.global_norm(per_sample, batch_dims=1)
        tensor([ 5., 10.])

    Args:
        tree: A tree of tensors or None.
        batch_dims: How many leading dimensions count the samples, or the elements of a loss: 1 for
            what `per_sample_grads` returns. They have the same sizes in all leaves.

    Returns:
        A 0-dim tensor, zero if every leaf is None; or one of the shape of the leading dimensions.

    Raises:
        LeafTypeError: A leaf is no floating-point or complex tensor.
        OptionError: `batch_dims` is no int of at least 0.
        StructureError: The leading dimensions differ, or every leaf is None, which has none; or
            this rank is not in the mesh of a DTensor, and no other mesh has all ranks; or other
            ranks have DTensors over other ranks, which may be copies or not.

    Source:
        `torch.nn.utils.get_total_norm`, the norm that `clip_grad_norm_` computes.
    """
    if isinstance(batch_dims, bool) or not isinstance(batch_dims, int) or batch_dims < 0:
        expected, fix = "an int of at least 0", "batch_dims=1"
        raise OptionError(message("batch_dims", expected, repr(batch_dims), fix))
    (leaves,), spec = aligned_leaves({"tree": tree})
    if not batch_dims:
        return _norm_of_leaves(leaves, foreach_takes(leaves))
    _check_batch(leaves, spec, batch_dims)
    batches = [full_tensor(leaf).to_dense() for leaf in leaves if leaf is not None]
    return _checked_norm(batches, partial(_norms_of_samples, batch_dims=batch_dims))


def _norm_of_leaves(leaves: list[Any], are_alike: bool) -> Tensor:
    """Return the norm of leaves, all of which a `torch._foreach_*` kernel takes, or not."""
    if are_alike:  # as get_total_norm, in a fifth of its time: it looks at the device of each norm
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(leaves)))
        return norm
    present = [leaf for leaf in leaves if leaf is not None]
    return _checked_norm([*map(stored_values, present)], _norm) if present else torch.zeros(())


def _check_batch(leaves: Sequence[Leaf], spec: Structure, batch_dims: int) -> None:
    """Raise unless all leaves have the same leading sizes."""
    shapes = {i: tuple(leaf.shape) for i, leaf in enumerate(leaves) if leaf is not None}
    first = next(iter(shapes.values()), ())[:batch_dims]
    fix = "pass what per_sample_grads returned; batch_dims=0 for the norm of all leaves"
    if not shapes:
        expected = f"{batch_dims} leading dimensions"
        raise StructureError(message("tree", expected, "None everywhere, which has none", fix))
    for index, shape in shapes.items():
        if len(shape) < batch_dims or shape[:batch_dims] != first:
            sizes = f"the sizes {first}" if len(first) == batch_dims else f"{batch_dims} sizes"
            where = pytree.path(spec, index, "tree")
            raise StructureError(
                message(where, f"a shape that begins with {sizes}", f"{shape}", fix)
            )


def _norms_of_samples(dense: list[Tensor], batch_dims: int) -> Tensor:
    # reshape would not do: a batch may be empty, and a leaf a number for each sample.
    rows = [leaf.unsqueeze(-1).flatten(batch_dims) for leaf in dense]
    norms = [torch.linalg.vector_norm(row, dim=-1) for row in rows]
    result: Tensor = torch.linalg.vector_norm(torch.stack(to_common_dtype(norms), -1), dim=-1)
    return result


def _checked_norm(dense: list[Tensor], norm: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return the norm of leaves; raise for integers and float8, of which torch has none."""
    try:
        return norm(dense)
    except RuntimeError as error:
        for leaf in dense:
            expected, fix = DIFFERENTIABLE, "gradkit.tree.map(torch.Tensor.float, tree)"
            if not leaf.is_floating_point() and not leaf.is_complex():
                fix = f"gradients are no integers; {fix}"
            elif leaf.dtype.itemsize == 1:
                expected = "tensors of a dtype that has norms"
            else:
                continue
            raise LeafTypeError(message("tree", expected, describe(leaf), fix)) from error
        raise


def _norm(dense: list[Tensor]) -> Tensor:
    # get_total_norm runs under no_grad, which would make the norm a constant.
    is_transformed = transforms() or in_dual_level()
    is_constant = not is_transformed and not any(x.requires_grad for x in dense)
    if is_constant and torch_has_norm(dense):
        return full_tensor(torch.nn.utils.get_total_norm(dense))
    if any(map(is_dtensor, dense)) and not is_transformed:
        from gradkit._core.shard_sum import norm_over_shards

        return norm_over_shards(dense)
    norms = [full_tensor(torch.linalg.vector_norm(leaf)).to(dense[0].device) for leaf in dense]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_by_global_norm(grads: PyTree, max_norm: float | Tensor) -> tuple[PyTree, Tensor]:
    """Return gradients scaled down to a global norm of at most `max_norm`, and their norm before.

    Example:
        >>> import torch, gradkit
        >>> grads = {"w": torch.tensor([3.0, 4.0])}
        >>> clipped, norm = gradkit.tree.clip_by_global_norm(grads, 1.0)
        >>> clipped, norm
        ({'w': tensor([0.6000, 0.8000])}, tensor(5.))

    Args:
        grads: A tree of tensors or None.
        max_norm: The largest norm, in the units of `global_norm`: a number of at least 0, or a
            one-element tensor, whose sign is not checked.

    Returns:
        `(clipped, norm)`. `clipped`: a tree like `grads`, bit for bit what `clip_grad_norm_` leaves
        in `.grad`. `norm`: the `global_norm` of `grads`, a 0-dim tensor, as `clip_grad_norm_`
        returns it.

    Raises:
        OptionError: `max_norm` is not a number of at least 0.

    Source:
        `torch.nn.utils.clip_grad_norm_`; Pascanu et al. 2013, "On the difficulty of training
        recurrent neural networks", algorithm 1, https://arxiv.org/abs/1211.5063
    """
    fix = "gradkit.tree.clip_by_global_norm(grads, 1.0), or leave the call out"
    max_norm = check_number("max_norm", max_norm, fix, nonnegative=True)
    (leaves,), spec = aligned_leaves({"grads": grads})
    are_alike = foreach_takes(leaves)
    norm = _norm_of_leaves(leaves, are_alike)
    factor = clip_factor(norm, max_norm)
    if not are_alike or isinstance(max_norm, Tensor):  # of another dtype, say, or with a graph
        clipped = scale_leaves(leaves, factor)
    else:
        clipped = list(torch._foreach_mul(cast("list[Tensor]", leaves), factor))
    return ClippedGrads(pytree.unflatten(spec, clipped), norm)


def cosine(a: PyTree, b: PyTree) -> Tensor:
    """Return the cosine of the angle between two trees, each taken as one vector.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.cosine({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([-2.0, 0.0])})
        tensor(-1.)

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.

    Returns:
        A 0-dim tensor between -1 and 1; zero if one of the trees is zero.

    Source:
        `torch.nn.functional.cosine_similarity` of the trees as vectors, without its `eps`.
    """
    leaves, _ = aligned_leaves({"a": a, "b": b})
    maxima = [largest(column) for column in leaves]
    is_zero = (maxima[0] == 0) | (maxima[1] == 0)
    ones = [torch.where(is_zero, 1.0, maximum) for maximum in maxima]
    a, b = (_about_one(column, one) for column, one in zip(leaves, ones, strict=True))
    product = dot(a, b)
    # The square root of zero has no derivative: it must not be in the graph at all.
    one = torch.ones_like(product)  # a number would make the tangents of jvp float64
    squares = [torch.where(is_zero, one, dot(x, x)) for x in (a, b)]
    cosine = (product / squares[0].sqrt() / squares[1].sqrt()).clamp(-1, 1)
    return torch.where(is_zero & ~product.isnan(), torch.zeros_like(cosine), cosine)


def _about_one(leaves: Sequence[Leaf], maximum: Tensor) -> list[Leaf]:
    """Return leaves divided by a number near the largest entry: their squares stay in range."""
    if maximum.dtype == torch.float64:  # leaves of other dtypes may not hold the factor
        leaves = [
            None if x is None else x.to(torch.promote_types(x.dtype, torch.float64)) for x in leaves
        ]
    limit = math.log2(1 / torch.finfo(maximum.dtype).tiny)  # a subnormal number has no reciprocal
    return scale_leaves(leaves, torch.exp2(-maximum.log2().ceil().clamp(-limit, limit)))


def allclose(
    a: PyTree, b: PyTree, *, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether two trees are equal up to rounding, as `torch.allclose` says; None is zeros.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.allclose({"w": torch.zeros(2)}, {"w": None})
        True

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.
        rtol: The relative tolerance, of `b`.
        atol: The absolute tolerance.
        equal_nan: Whether NaN equals NaN.

    Returns:
        Whether every leaf is.

    Raises:
        OptionError: A tolerance is not a number of at least 0, or `equal_nan` is not a bool.
    """
    rtol = float(check_number("rtol", rtol, "rtol=1e-05", nonnegative=True))
    atol = float(check_number("atol", atol, "atol=1e-08", nonnegative=True))
    check_bool("equal_nan", equal_nan)

    def close(x: Tensor, y: Tensor) -> bool:
        x, y = dense(full_tensor(x)), dense(full_tensor(y))
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y = x.to(dtype), y.to(x.device, dtype)
        return torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)

    leaves, _ = aligned_leaves({"a": a, "b": b})
    # Every leaf is compared, also after one that is not close: gathering DTensors is a collective.
    results = [apply_with_zeros(close, *row) for row in zip(*leaves, strict=True)]
    return all(result is not False for result in results)
