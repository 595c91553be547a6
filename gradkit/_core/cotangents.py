"""The outputs and cotangents of a vector-Jacobian product: read, matched and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradkit._compat.distributed import is_dtensor
from gradkit._compat.transforms import (
    carries_graph,
    detach_keep_tangent,
    in_dual_level,
    is_differentiated_tensor,
)
from gradkit._core import pytree
from gradkit._core.call import Losses
from gradkit._core.graph import refuse_lost_history
from gradkit._core.params import DIFFERENTIABLE
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import user_code_may_run
from gradkit.errors import (
    GradkitError,
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
    numbers = _given(each)
    if own_spec != spec:
        each = pytree.broadcast_prefix(cotangents, "cotangents", outputs, "outputs", "None")
        if len(_given(each)) > len(numbers):  # raises: one stands for several outputs
            pytree.flatten_up_to(spec, "outputs", cotangents, "cotangents")
        numbers = _given(each)
    if not numbers:
        got = "None for each" if each else "an empty tree"
        fix = "torch.ones_like(output) for the gradient of its sum"
        raise StructureError(message("cotangents", "a tensor for some output", got, fix))
    asked = Losses([leaves[index] for index in numbers], spec, "outputs", numbers)
    given = Losses([each[index] for index in numbers], spec, "cotangents", numbers)
    for index, (output, cotangent) in enumerate(zip(asked.leaves, given.leaves, strict=True)):
        if not (isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex())):
            fix = "cotangents that have None there; the arguments are (outputs, params, cotangents)"
            got = describe(output)
            raise LeafTypeError(message(asked.path(index), DIFFERENTIABLE, got, fix))
        defect = _defect(cotangent, output, create_graph)
        if defect is not None:
            error, expected, fix = defect
            where = f"{given.path(index)}, for {asked.path(index)}"
            raise error(message(where, expected, describe(cotangent), fix))
    refuse_lost_history(asked.leaves, asked.path)
    return asked, [_seed(one, create_graph=create_graph) for one in given.leaves]


def _given(leaves: list[Any]) -> list[int]:
    return [index for index, leaf in enumerate(leaves) if leaf is not None]


def _defect(
    cotangent: object, output: Tensor, create_graph: bool
) -> tuple[type[GradkitError], str, str] | None:
    """Return why this is no cotangent of an output, or None if it is one."""
    if not isinstance(cotangent, Tensor):
        fix = "torch.ones_like(output), or another tensor like it; None leaves the output out"
        return LeafTypeError, "a tensor", fix
    if is_dtensor(output) is not is_dtensor(cotangent):
        expected = "a DTensor" if is_dtensor(output) else "a plain tensor"
        fix = "distribute_tensor(cotangent, mesh, placements), or cotangent.full_tensor()"
        return StructureError, expected, fix
    if not _same_shape(output, cotangent):
        fix = "cotangent.reshape(output.shape), or cotangent.expand_as(output)"
        return StructureError, describe(output), fix
    if output.dtype != cotangent.dtype or output.device != cotangent.device:
        return StructureError, describe(output), "cotangent.to(output)"
    if not create_graph and is_differentiated_tensor(cotangent):
        expected = "one outside of torch.func's grad and jvp, which would take the result for a "
        expected += "constant"
        return UnsupportedGraphError, expected, "create_graph=True, which differentiates it, too"
    return None


def _same_shape(output: Tensor, cotangent: Tensor) -> bool:
    if output.is_nested or cotangent.is_nested:
        return output.is_nested == cotangent.is_nested and torch.is_same_size(output, cotangent)
    return output.shape == cotangent.shape


def _seed(cotangent: Tensor, *, create_graph: bool) -> Tensor:
    """Return what a pass may start from: a copy, where that could be returned or written on."""
    seed = cotangent if create_graph else detach_keep_tangent(cotangent)
    if not (create_graph or user_code_may_run() or seed.is_inference()):
        return seed
    is_plain = seed.layout == torch.strided and not (seed.is_nested or carries_graph(seed))
    if not is_plain or in_dual_level() or 0 not in seed.stride():
        return seed.clone()
    # An expanded one stays so: for another layout, torch may add in another order.
    part = seed[tuple(slice(None if step else 1) for step in seed.stride())]
    return part.clone().expand_as(seed)
