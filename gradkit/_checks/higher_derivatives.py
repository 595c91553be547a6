"""Second and third derivatives that torch would get silently wrong, or does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from gradkit._checks.differentiable_formulas import has_formula
from gradkit._checks.special_functions import DIFFERENTIABLE, Reason, without_second
from gradkit._checks.special_points import KINDS, refuse_special_points
from gradkit._checks.wrong_derivatives_table import NODES, SWEPT
from gradkit._compat.autograd import forward_class
from gradkit._compat.distributed import is_dtensor
from gradkit._compat.dynamo import COMPILED
from gradkit._compat.nodes import DRAW_AFTER_SAVING, IN_EVAL_MODE, kind_of_node, names_of_nodes
from gradkit._compat.transforms import is_differentiated_tensor
from gradkit._compat.versions import is_mended, is_seen
from gradkit._core.call import Call
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import user_functions
from gradkit.errors import UnsupportedGraphError, message

# By `kind_of_node`: of which order the derivative through such nodes is wrong.
_WRONG: dict[str, str] = {
    kind: order
    for kind, by_order in NODES.items()
    for order, seen in by_order.items()
    if is_seen(seen, SWEPT)
}
# The kinds whose second derivative torch does not have, or did not: the operation, and what to do.
# torch itself raises, but only once the derivative is taken.
_ATTENTION = (
    "scaled_dot_product_attention by a fused kernel",
    "compute attention without it: attn_implementation='eager' for a model of transformers, or "
    "`with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):` around the forward pass; or let "
    "gradkit run that (gradkit.func.hvp and linearize, gradkit.meta.unroll)",
)
_FUSED_ATTENTION = """
    FlashAttention EfficientAttention CudnnAttention ScaledDotProductFlashAttention
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFusedAttentionOverrideable
"""
_EVER_MISSING: dict[str, tuple[str, str]] = {
    **dict.fromkeys(names_of_nodes(_FUSED_ATTENTION), _ATTENTION),
    "CdistBackward0": ("cdist", "(a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)"),
    "PdistBackward0": ("pdist", "take the norms of the differences: (a - b).norm(dim=-1)"),
    "HardsigmoidBackward0": ("hardsigmoid", "write relu6(x + 3) / 6"),
    "EmbeddingBagBackward0": ("embedding_bag", "add up what nn.functional.embedding gives"),
    **dict.fromkeys(
        names_of_nodes("CtcLoss CtcLoss.1 CudnnCtcLoss"),
        ("ctc_loss", "leave it out of what is differentiated twice"),
    ),
    "MultiMarginLossBackward0": ("multi_margin_loss", "write it out in other operations"),
    "MultilabelMarginLossBackward0": ("multilabel_margin_loss", "write it out"),
    "SegmentReduceBackward0": ("segment_reduce", "use index_add, or scatter_reduce"),
    "SparseMmReduceImplBackward0": ("torch.sparse.mm with reduce", "make the matrix dense"),
    "CudnnRnnBackward0": (
        "an RNN by cuDNN",
        "run the forward pass under `with torch.backends.cudnn.flags(enabled=False):`",
    ),
}
_MISSING = {kind: text for kind, text in _EVER_MISSING.items() if not is_mended(kind)}
# The names of types: a part of what `kind_of_node` has.
# The derivative of torch.compile's backward pass is a node that raises. It has no path to what the
# function was computed from where that is not saved, and is left out then.
# What draws after it has saved is looked at, too, which hooks of saved tensors may have spoiled.
_REFUSED = {kind.removesuffix(IN_EVAL_MODE) for kind in _WRONG} | {COMPILED} | _MISSING.keys()
_REFUSED |= {kind.__name__ for kind in KINDS | DRAW_AFTER_SAVING}  # for what they have saved
_DTENSORS_ARE_WRONG = not is_mended("DTensor")


def refuse_wrong_derivatives(call: Call) -> None:
    """Raise if torch would get the derivative of a pass of the call wrong, or drop it."""
    for group, params in call.passes:
        for index, variable in enumerate(params.variables if _DTENSORS_ARE_WRONG else ()):
            if is_dtensor(variable):
                got = "a DTensor, whose second derivative torch "
                got += f"{torch.__version__} gets silently wrong"
                fix = "leave out create_graph=True; or install torch 2.12 or newer"
                where = params.path(index)
                raise UnsupportedGraphError(message(where, "a tensor of this process", got, fix))
        for index in group:
            below = call.graph.below([index])
            refuse_wrong_derivative(partial(call.losses.path, index), params.variables, below)


def may_be_wrong(kinds: Iterable[type]) -> bool:
    """Return whether the derivative of a pass through torch's nodes of these types may be."""
    return not _REFUSED.isdisjoint([kind.__name__ for kind in kinds])


def refuse_wrong_derivative(
    where: Callable[[], str],
    variables: Sequence[Tensor],
    below: Subgraph,
    *,
    by_formula: bool = False,
) -> None:
    """Raise if a pass executes a node whose derivative torch gets wrong, drops, or lacks."""
    once = set(filter(_is_once_differentiable, user_functions(below.kinds)))
    if not once and not may_be_wrong(below.kinds):
        return
    leading = below.leading_to(variables)
    refuse_special_points(where, leading, create_graph=True)
    nodes = {
        kind_of_node(node): type(node)
        for node in leading
        if not (by_formula and has_formula(node))  # by which `InnerPass` differentiates
    }
    for name, kind in sorted(nodes.items()):
        if kind in once:
            raise UnsupportedGraphError(undifferentiable_message(where(), kind))
        if name in _WRONG:
            raise UnsupportedGraphError(message(where(), *_wrong(name)))
        if name in _MISSING:
            raise UnsupportedGraphError(message(where(), *without_second(*_MISSING[name])))
        if name == COMPILED and not user_functions([kind]):
            raise UnsupportedGraphError(message(where(), *_OF_COMPILED))


def _is_once_differentiable(kind: Any) -> bool:
    """Return whether the decorator shows; where it is hidden, the pass itself finds out."""
    function = forward_class(kind)
    backward: Any = function.backward
    if not issubclass(function, Function):  # torch.func's own, around the user's
        closure = [cell.cell_contents for cell in getattr(backward, "__closure__", None) or ()]
        backward = next((getattr(fn, "backward", None) for fn in closure), None)
    return getattr(backward, "__code__", None) is _WRAPPER_CODE


# Of the wrapper that once_differentiable makes, which is the same for all.
_WRAPPER_CODE = once_differentiable(lambda ctx: None).__code__


def undifferentiable_message(where: str, kind: type) -> str:
    """Return the message for a Function whose gradients cannot be differentiated."""
    got = kind.__name__.removesuffix("Backward").removesuffix("Generated")
    got += ", a Function whose backward cannot be: it is once_differentiable, or cuts the path to "
    got += "its gradients (no_grad, detach(), .data, NumPy, a kernel that autograd does not know)"
    fix = "leave out create_graph=True; take unroll(..., first_order=True)"
    if not forward_class(kind).__module__.startswith("torch."):
        fix += "; or give it a backward made of operations that can be differentiated, that "
        fix += "returns None where there is none"
    return message(where, DIFFERENTIABLE, got, fix)


_OF_COMPILED = (
    DIFFERENTIABLE,
    "a graph that torch.compile has compiled, whose derivative cannot be",
    "leave out create_graph=True; call the module that is not compiled; or compile the "
    "function that takes all derivatives",
)


def way_out_of(operator: str) -> str | None:
    """Return what to do without an operator of torch whose second derivative torch lacks."""
    name = operator.strip("_").removesuffix("_forward").title().replace("_", "")
    return _MISSING.get(f"{name}Backward0", (None, None))[1]


def _wrong(name: str) -> Reason:
    if _WRONG[name] == "2":
        operation, fix = _SECOND.get(name, (name, "write it out in other operations"))
        got = f"{operation}, whose second derivative torch gets silently wrong"
        fix = f"leave out create_graph=True; take unroll(..., first_order=True); or {fix}"
        return DIFFERENTIABLE, got, fix
    got = f"a second derivative through {name.removesuffix('BackwardBackward0')}, whose third torch"
    fix = "leave out create_graph=True, or an unroll inside of another, in the last call; or use "
    fix += "group_norm or rms_norm, or write the norm out"
    return f"{DIFFERENTIABLE} again", f"{got} gets silently wrong", fix


# By the kind of node: the operation, and what to write in its place.
_SECOND = {
    "WeightNormInterfaceBackward0": (
        "weight_norm",
        "take all derivatives by gradkit.func, which differentiates its formula; or write that: "
        "g * v / torch.norm_except_dim(v, 2, dim)",
    ),
    "LogcumsumexpBackward0": (
        "logcumsumexp, where a cotangent is zero,",
        "take all derivatives by gradkit.func, which differentiates its formula; or write that: "
        "torch.stack([x[: i + 1].logsumexp(0) for i in range(len(x))])",
    ),
    "SparseCooTensorWithDimsAndTensorsBackward0": (
        "the values of a sparse tensor",
        "make it dense: torch.zeros(size).index_put(tuple(indices), values, accumulate=True)",
    ),
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": (
        "linear_cross_entropy in chunks",
        "leave out its options",
    ),
    "CondAutogradOpBackward": ("torch.cond", "torch.where, or an if of Python"),
    "ScanAutogradOpBackward": ("scan", "a loop of Python"),
    "WhileLoopAutogradOpBackward": ("while_loop", "a loop of Python"),
}


def refuse_inside_transforms(call: Call) -> None:
    """Raise if a transform of torch.func would take the gradients of a call for constants."""
    for index, output in enumerate(call.outputs):
        if is_differentiated_tensor(output):
            expected = "a loss outside of torch.func's grad, vjp and jvp"
            got = "one inside: the transform would take the gradient for a constant"
            fix = "pass create_graph=True, so that it is differentiated, too"
            raise UnsupportedGraphError(message(call.losses.path(index), expected, got, fix))
