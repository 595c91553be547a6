"""The outputs and cotangents of a vector-Jacobian product: read, matched and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradkit._compat.distributed import is_dtensor
from gradkit._compat.transforms import detach_keep_tangent, is_differentiated_tensor
from gradkit._core import pytree
from gradkit._core.call import Defect, Losses
from gradkit._core.graph import refuse_lost_history
from gradkit._core.params import DIFFERENTIABLE
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import user_code_may_run
from gradkit.errors import (
    LeafTypeError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)


def read_cotangents(
    outputs: PyTree, cotangents: PyTree, *, create_graph: bool
) -> tuple[Losses, list[Tensor]]:
    """Return the outputs whose cotangent is not None, and what a pass starts from at each."""
    leaves, spec = pytree.flatten(outputs)
    each, own_spec = pytree.flatten(cotangents)
    if own_spec != spec:
        count = len(_given(each))
        each = pytree.broadcast_prefix(cotangents, "cotangents", outputs, "outputs", "None")
        if len(_given(each)) > count:  # raises: one stands for several outputs
            pytree.flatten_up_to(spec, "outputs", cotangents, "cotangents")
    numbers = _given(each)
    if not numbers:
        got = "None for each" if each else "an empty tree"
        fix = "torch.ones_like(output) for the gradient of its sum"
        raise StructureError(message("cotangents", "a tensor for some output", got, fix))
    asked = Losses([leaves[index] for index in numbers], spec, "outputs", numbers)
    given = [each[index] for index in numbers]
    paths = Losses(given, spec, "cotangents", numbers)
    for index, (output, cotangent) in enumerate(zip(asked.leaves, given, strict=True)):
        if not isinstance(output, Tensor) or not _is_differentiable(output.dtype):
            fix = "None in its place in cotangents leaves it out; the arguments are (outputs, "
            fix += "params, cotangents), in this order"
            got = describe(output)
            raise LeafTypeError(message(asked.path(index), DIFFERENTIABLE, got, fix))
        defect = _defect(cotangent, output, create_graph)
        if defect is not None:
            error, expected, fix = defect
            where = f"{paths.path(index)}, for {asked.path(index)}"
            raise error(message(where, expected, describe(cotangent), fix))
    refuse_lost_history(asked.leaves, asked.path)
    return asked, [_seed(one, create_graph=create_graph) for one in given]


def _given(leaves: list[Any]) -> list[int]:
    return [index for index, leaf in enumerate(leaves) if leaf is not None]


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _defect(cotangent: object, output: Tensor, create_graph: bool) -> Defect | None:
    """Return why this is no cotangent of an output, or None if it is one."""
    if not isinstance(cotangent, Tensor):
        fix = "torch.ones_like(output), or another tensor like it; None leaves the output out"
        return LeafTypeError, "a tensor", fix
    if is_dtensor(output) is not is_dtensor(cotangent):
        if is_dtensor(output):
            fix = "distribute_tensor(cotangent, output.device_mesh, output.placements)"
            return StructureError, "a DTensor", fix
        return StructureError, "a plain tensor", "cotangent.full_tensor()"
    if not _same_shape(output, cotangent):
        fix = "cotangent.reshape(output.shape), or cotangent.expand_as(output)"
        return StructureError, describe(output), fix
    if output.dtype != cotangent.dtype or output.device != cotangent.device:
        return StructureError, describe(output), "cotangent.to(output)"
    if not create_graph and is_differentiated_tensor(cotangent):
        expected = "one outside of torch.func's grad, vjp and jvp, which would take the result for "
        expected += "a constant"
        fix = "create_graph=True, so that it is differentiated, too"
        return UnsupportedGraphError, expected, fix
    return None


def _same_shape(output: Tensor, cotangent: Tensor) -> bool:
    if output.is_nested or cotangent.is_nested:
        return output.is_nested == cotangent.is_nested and torch.is_same_size(output, cotangent)
    return output.shape == cotangent.shape


def _seed(cotangent: Tensor, *, create_graph: bool) -> Tensor:
    """Return what a pass may start from: a copy, where that could be returned or written on."""
    seed = cotangent if create_graph else detach_keep_tangent(cotangent)
    if not (create_graph or user_code_may_run() or seed.is_inference() or seed._version):
        return seed
    if seed.layout != torch.strided or seed.is_nested or 0 not in seed.stride():
        return seed.clone()
    # An expanded one stays so: of another layout, torch would add up in another order.
    part = seed[tuple(slice(None if step else 1) for step in seed.stride())]
    return part.clone().expand_as(seed)
