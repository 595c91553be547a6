"""Nodes whose derivative torch gets wrong at some values of what they have saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.autograd.graph import Node

from gradkit._checks.checked import is_checked
from gradkit._checks.edge_formulas import is_saturated, is_zeroth_power
from gradkit._compat.nodes import hooked_tensors, node_type, saved, saved_ints
from gradkit._compat.transforms import (
    carries_tangent,
    in_dispatch_mode,
    is_transform_tensor,
    recording_levels,
)
from gradkit._core.call import Call
from gradkit.errors import UnsupportedGraphError, message

_ELSEWHERE = (
    "compute it in a function that gradkit.func differentiates, or in a `with gradkit.checked():`"
)


def _of_det(node: Node, *, create_graph: bool) -> str | None:
    matrix, value = saved(node, "A"), saved(node, "result")
    size = value.detach().abs()
    limits = torch.finfo(size.dtype)
    if not create_graph:
        got = "the determinant of a singular matrix, for whose gradient torch gives zero"
        return got if (size < limits.tiny / limits.eps).any() else None
    # There, and everywhere in torch.func and below a dispatch mode, such as that of `checked`,
    # torch differentiates a decomposition for the second.
    if is_transform_tensor(matrix):
        if len(recording_levels(matrix)) + carries_tangent(matrix) < 2:
            return None
        size = torch.zeros_like(size)
    elif in_dispatch_mode() or is_checked():
        size = torch.zeros_like(size)
    singular = torch.linalg.svdvals(matrix.detach()[size < 100 * limits.eps])
    gaps = singular[..., :-1] - singular[..., 1:] <= limits.eps ** (1 / 3) * singular[..., :1]
    if gaps.any() or (matrix.is_complex() and singular.numel()):
        got = "the determinant of a matrix with equal singular values, or a singular complex one, "
        return f"{got}whose second derivative torch gets silently wrong"
    return None


def _of_reduction(node: Node, *, create_graph: bool, src: str) -> str | None:
    reduce, (dim,) = saved(node, "reduce"), saved_ints(node, "dim")
    given = (saved(node, name) for name in ("self", "index", src, "result"))
    input, index, source, result = map(torch.atleast_1d, given)
    if src == "source":  # of index_reduce, whose indices are those of one dimension
        index = index.reshape(-1, *[1] * (source.dim() - 1)).movedim(0, dim).expand_as(source)
    if reduce == "prod" and create_graph:
        zeros = (source[tuple(map(slice, index.shape))] == 0).to(result.dtype)
        several = torch.zeros_like(result).scatter_add(dim, index, zeros) > 1
        got = "a product of several zeros, whose second derivative torch does not have"
        return got if several.any() else None
    if reduce not in {"amax", "amin"} or saved(node, "include_self"):
        return None
    hit = torch.zeros_like(input, dtype=torch.bool).scatter(dim, index, True)
    if not (hit & (input == result)).any():
        return None
    got = f"{reduce} with include_self=False, where what is not included equals the result: torch "
    return f"{got}counts it as a tie, and gives the others too small a gradient"


def _of_sinc(node: Node, *, create_graph: bool) -> str | None:
    size = saved(node, "self").detach().abs()
    if create_graph and (size < torch.finfo(size.dtype).eps ** 0.25).any():
        return "sinc near zero, whose second derivative torch gets silently wrong"
    return None


def _of_pow(node: Node, *, create_graph: bool) -> str | None:
    # Its slope with respect to the base loses the part that is linear in the exponent.
    if not create_graph or any(below is None for below, _ in node.next_functions):
        return None
    if is_zeroth_power(saved(node, "self").detach(), saved(node, "exponent").detach()).any():
        return "a power whose exponent is zero, whose second derivative torch gets silently wrong"
    return None


def _of_polar(node: Node, *, create_graph: bool) -> str | None:
    got = "polar of a radius of zero, for which torch gives a gradient of zero"
    return got if (saved(node, "result").detach() == 0).any() else None


def _of_binary_cross_entropy(node: Node, *, create_graph: bool) -> str | None:
    got = "binary_cross_entropy of a probability next to zero or one, for which torch gives too "
    return f"{got}small a gradient" if is_saturated(saved(node, "self").detach()).any() else None


def _of_shrink(node: Node, *, create_graph: bool) -> str | None:
    is_wrong = saved(node, "lambd") == 0 and (saved(node, "self").detach() == 0).any()
    return "a threshold of zero, at which torch gives a gradient of zero" if is_wrong else None


_READ: dict[type, Callable[..., str | None]] = {
    node_type("LinalgDetBackward0"): _of_det,
    node_type("ScatterReduceBackward0"): partial(_of_reduction, src="src"),
    node_type("IndexReduceBackward0"): partial(_of_reduction, src="source"),
    node_type("SincBackward0"): _of_sinc,
    node_type("PowBackward1"): _of_pow,
    node_type("PolarBackward0"): _of_polar,
    node_type("BinaryCrossEntropyBackward0"): _of_binary_cross_entropy,
    node_type("SoftshrinkBackward0"): _of_shrink,
    node_type("HardshrinkBackward0"): _of_shrink,
}
KINDS = frozenset(_READ)


def refuse_special_points(
    where: Callable[[], str], nodes: Iterable[Node], *, create_graph: bool
) -> None:
    """Raise if torch gets the derivative of a node wrong for the values that it has saved."""
    for node in nodes:
        if type(node) not in KINDS or hooked_tensors(node):  # which may recompute much
            continue
        try:
            got = _READ[type(node)](node, create_graph=create_graph)
        except RuntimeError:  # freed, or changed in place, which torch says itself; or batched
            continue
        if got is not None:
            expected = "an operation whose derivative torch gets right here"
            raise UnsupportedGraphError(message(where(), expected, got, _ELSEWHERE))


def refuse_in_call(call: Call) -> None:
    """Raise so if a pass of a call goes through such a node."""
    if not call.graph.below(call.differentiated).kinds & KINDS:
        return
    for group, params in call.passes:
        for index in group:
            nodes = call.graph.below([index]).leading_to(params.variables)
            refuse_special_points(partial(call.losses.path, index), nodes, create_graph=False)
