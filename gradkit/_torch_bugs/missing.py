"""Derivatives that torch does not have, where it raises: what they are of, and what to do."""

from __future__ import annotations

import re
from typing import TypeAlias

from gradkit._compat.nodes import names_of_nodes
from gradkit._compat.versions import is_mended

Reason: TypeAlias = tuple[str, str, str]  # expected, got, what to do

DIFFERENTIABLE = "a graph whose derivative can be differentiated"
_EXPECTED = "operations that have a derivative in torch"
_CONSTANT = "if its result is meant as a constant, give it x.detach()"
_BY_FUNCTION = "a torch.autograd.Function whose backward has its derivative"
_ALONE = "differentiate with respect to x alone, in reverse mode: give it {}.detach(); or write "
_ALONE += _BY_FUNCTION
_OTHER = f"other operations; or {_BY_FUNCTION}"
_FORWARD = re.compile(r"forward AD with (aten::)?(\w+) that does not support it")
_MISSING = re.compile(r"derivative for '?(?:aten::)?([\w: ]+?)'? is not implemented")
_IN_PLACE = ("acosh", "asinh", "atanh")
# The keys are torch's names; the values, what users call it, and what to write in its place.
_KNOWN: dict[str, tuple[str, str]] = {
    "igamma": ("torch.special.gammainc(a, x) by a", _ALONE.format("a")),
    "igammac": ("torch.special.gammaincc(a, x) by a", _ALONE.format("a")),
    "zeta": ("torch.special.zeta(s, x) by s", _ALONE.format("s")),
    "geqrf": ("torch.geqrf", "torch.linalg.qr(a)"),
    "linalg_ldl_factor_ex": ("torch.linalg.ldl_factor", "torch.linalg.lu_factor(a)"),
    "linalg_ldl_solve": ("torch.linalg.ldl_solve", "torch.linalg.solve(a, b)"),
    **{f"{name}_": (f"{name}_", f"x.{name}(), not in place") for name in _IN_PLACE},
    "_unique2": ("torch.unique", "torch.sort(x)[0], with every value as often as it stands"),
    "unique_dim": ("torch.unique with dim", _OTHER),
    **{name: (f"torch.{name}", _OTHER) for name in ("unique_consecutive", "embedding_renorm_")},
    "bincount": ("torch.bincount", "torch.zeros(size).index_add(0, indices, weights)"),
    "_chunk_cat": ("torch._chunk_cat", "torch.cat"),
    "scatter": ("torch.scatter with reduce", "torch.scatter_reduce"),
    "_sample_dirichlet": ("torch._sample_dirichlet", "torch.distributions.Dirichlet(x).rsample()"),
}
# How torch calls some of them in reverse mode.
_ALIASES = {"special_zeta": "zeta", "embedding_renorm": "embedding_renorm_"}
_ALIASES |= {f"inplace version of {name}": f"{name}_" for name in _IN_PLACE}
OF_NESTED = (
    "a nested tensor in a transform, or differentiated a second time",
    "pad it: torch.zeros(count, longest, width).index_put((row_of_each, place_of_each), values); "
    "or, for a first derivative, compute it eagerly: gradkit.value_and_grads(losses, params)",
)
# The keys are parts of torch's texts; the values say what came, and what to do.
_TEXTS: dict[str, tuple[str, str]] = {
    "The QR decomposition is not differentiable": (
        "torch.linalg.qr with mode='complete' of a matrix that has more rows than columns",
        "torch.linalg.qr(a), whose mode is 'reduced'"),
    "The derivative of linalg.qr depends on Q": (
        "torch.linalg.qr with mode='r'", "torch.linalg.qr(a)[1], whose mode is 'reduced'"),
    "up to multiplication by e^{i phi}": (
        "complex singular vectors or eigenvectors, of which the loss takes the phase",
        "a loss that does not depend on that phase: of abs() of the vectors, or of u @ u.mH"),
    "scale_grad_by_freq not supported with sparse": (
        "an embedding with sparse=True and scale_grad_by_freq=True",
        "leave out one of these options"),
    "_nested_tensor_storage_offsets": OF_NESTED, "values backward with respect to self": OF_NESTED,
}  # fmt: skip


_REPORTS = ("INTERNAL ASSERT FAILED", "report a bug to PyTorch")
_FAILED_INSIDE = (
    "operations that torch can differentiate",
    "one at which an internal check of torch fails: a defect of torch, whose text is above",
    "find it with torch.autograd.detect_anomaly(), and write it in other operations; in forward "
    'mode, take vjp or linearize in place of jvp, and hvp(..., mode="reverse-over-reverse")',
)


def missing_derivative(error: BaseException) -> Reason | None:
    """Return what was expected, what came and what to do, if torch has raised for want of one."""
    for text, (got, fix) in _TEXTS.items():
        if text in str(error):
            return _EXPECTED, f"{got}, which has none", fix
    forward = _FORWARD.search(str(error))
    if forward is not None:  # an operator of aten:: has no derivative in either mode
        name = _ALIASES.get(forward[2], forward[2])
        return _without_any(name) if forward[1] or name in _KNOWN else None
    missing = _MISSING.search(str(error))
    if missing is None:
        return _FAILED_INSIDE if any(report in str(error) for report in _REPORTS) else None
    name = missing[1].partition(": ")[0]
    if "backward" in name or name.endswith("_grad"):
        return without_second(name, "compute it by other operations")
    return _without_any(_ALIASES.get(name, name))


def without_forward_mode(error: BaseException | None) -> str | None:
    """Return the operator of which torch has a derivative in reverse mode alone, if it said so."""
    operator = _FORWARD.search(str(error))
    return operator[2] if operator is not None and not operator[1] else None


def _without_any(name: str) -> Reason:
    operation, fix = _KNOWN.get(name, (f"torch.{name}", _OTHER))
    return _EXPECTED, f"{operation}, which has none, of any order", f"{fix}; or, {_CONSTANT}"


def without_second(operation: str, fix: str) -> Reason:
    """Return the reason for an operation whose second derivative torch does not have."""
    return no_second(f"{operation}, whose second derivative torch does not have", fix)


def no_second(got: str, fix: str) -> Reason:
    """Return the reason for what cannot be differentiated twice."""
    fix = f"leave out create_graph=True; take unroll(..., first_order=True); or {fix}"
    return DIFFERENTIABLE, got, fix


# Attention without dropout has a formula.
_ATTENTION = (
    "scaled_dot_product_attention with dropout by a fused kernel",
    "compute attention without it: attn_implementation='eager' for a model of transformers, or "
    "`with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):` around the forward pass; or take all "
    "derivatives by gradkit.func (hvp and linearize, say)",
)
_FUSED = """
    FlashAttention EfficientAttention CudnnAttention ScaledDotProductFlashAttention
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFusedAttentionOverrideable
"""
# The kinds of nodes whose second derivative torch does not have, or did not: the operation, and
# what to do. torch itself raises, but only once the derivative is taken.
_BY_NODES: dict[str, tuple[str, str]] = {
    _FUSED: _ATTENTION,
    "Cdist": ("cdist", "(a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)"),
    "Pdist": ("pdist", "take the norms of the differences: (a - b).norm(dim=-1)"),
    "EmbeddingBag": ("embedding_bag", "add up what nn.functional.embedding gives"),
    "CtcLoss CtcLoss.1 CudnnCtcLoss": (
        "ctc_loss", "leave it out of what is differentiated twice"),
    "MultiMarginLoss": ("multi_margin_loss", "write it out in other operations"),
    "MultilabelMarginLoss": ("multilabel_margin_loss", "write it out"),
    "SegmentReduce": ("segment_reduce", "use index_add, or scatter_reduce"),
    "SparseMmReduceImpl": ("torch.sparse.mm with reduce", "make the matrix dense"),
    "CudnnRnn": (
        "an RNN by cuDNN",
        "run the forward pass under `with torch.backends.cudnn.flags(enabled=False):`"),
}  # fmt: skip
EVER_WITHOUT_SECOND = {
    kind: reason for names, reason in _BY_NODES.items() for kind in names_of_nodes(names)
}
WITHOUT_SECOND = {k: text for k, text in EVER_WITHOUT_SECOND.items() if not is_mended(k)}


def way_out_of(operator: str) -> str | None:
    """Return what to do without an operator of torch whose second derivative torch lacks."""
    name = operator.strip("_").removesuffix("_forward").title().replace("_", "")
    return WITHOUT_SECOND.get(f"{name}Backward0", (None, None))[1]
