"""What torch differentiates wrongly: a row for each operation, and what gradkit does about it.

The monitor sees which operations are called, the check of graphs which nodes these leave; both look
here. A new defect is a row, with its formula if it has one. Under which transforms it shows is in
`swept.json`, which `python -m tests.sweep --write` writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat import transforms
from gradkit._compat.nodes import names_of_nodes, node_type, saved, saved_ints
from gradkit._compat.versions import is_seen
from gradkit._core import pytree
from gradkit._torch_bugs import formulas
from gradkit._torch_bugs.special_functions import SPECIAL_FUNCTIONS

_swept = resources.files("gradkit._torch_bugs").joinpath("swept.json").read_text(encoding="utf-8")
_found: dict[str, Any] = json.loads(_swept)
SWEPT: list[str] = _found["releases"].split()  # the releases of torch that it was run on
# The transforms around operations that are wrong under them ("Grad Jvp" is the derivative of a
# jvp), and the kinds of nodes, by the order of the derivative that `create_graph=True` gives.
OPERATIONS: dict[str, dict[str, str]] = _found["operations"]
NODES: dict[str, dict[str, str]] = _found["nodes"]
Stack: TypeAlias = tuple[str, ...]  # transforms, from the outermost
EAGER = "Grad"  # autograd, which is like a transform around all others
_PASS = "+Vmap"  # a backward pass alone is batched


@dataclass(frozen=True)
class OpCall:
    """A call of an operation, and the transforms around it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    functional: bool  # of torch.nn.functional, whose arguments have another order
    stack: Stack  # the transforms around it
    outer: Stack  # the transforms around the monitor
    in_graph: bool = False  # a node tells of it, not its arguments

    def argument(self, position: int, name: str) -> Any:
        """Return an argument, None if it was left out."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)

    def differentiated_by_eager_code(self) -> OpCall:
        """Return the call as it is if eager code differentiates what the transforms give."""
        return replace(self, stack=(EAGER, *self.stack), outer=(EAGER, *self.outer))

    def is_seen_by(self, stack: Stack) -> bool:
        """Return whether an argument is batched, or has a derivative, as transforms ask for."""
        if self.in_graph or torch.compiler.is_compiling():  # a trace cannot tell
            return True
        tensors = pytree.tensors((self.args, self.kwargs))
        if transforms.DERIVATIVES.isdisjoint(stack):
            return any(map(transforms.is_batched, tensors))
        if torch.is_grad_enabled():
            return any(map(transforms.varies, tensors))
        # The innermost transform records nothing under no_grad; those around it do.
        here = {len(transforms.transforms())}
        levels = (transforms.recording_levels(x) - here for x in tensors)
        return any(levels) or any(map(transforms.carries_tangent, tensors))


# A reader gets a node, whether its pass has a graph, and whether torch then decomposes matrices. It
# returns what an error says came if torch is wrong for the values that the node has saved.
Reader: TypeAlias = Callable[[Node, bool, bool], str | None]
BATCHED, DERIVATIVE_OF_BATCHED = ("Grad", _PASS), ("Grad", "Grad", _PASS)
_FIRST: tuple[Stack, ...] = (("Grad",), ("Jvp",))
RESULT = "the shape of the result"


@dataclass(frozen=True)
class Defect:
    """What torch gets wrong about operations, and what gradkit does: a formula, or a refusal."""

    names: str
    issues: str = ""  # their numbers on torch's tracker; none if it is not reported
    fix: str = ""  # the replacement that an error names
    formula: Callable[..., Any] | None = None  # runs in its place, given the operation first
    # Whether a call is concerned, by the transforms of a row.
    when: Callable[[OpCall, Stack], bool] = lambda call, stack: True
    # The transforms under which it is wrong where the sweep does not look: it tries operations that
    # have derivatives, at generic points.
    also: tuple[Stack, ...] = ()
    drops: bool = False  # gives a result without a graph, or with a gradient of zero
    aliases: str = ""  # other names, and torch's operators beneath it
    # The nodes by which a graph shows a call that is refused, with the arguments that `when` looks
    # at by what they have saved; and those that are wrong for some of the values that they have.
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    values: Mapping[str, Reader] = field(default_factory=dict)
    stacks: tuple[Stack, ...] = ()  # all transforms under which it is wrong in this release

    @property
    def what(self) -> str:
        """What is wrong, in words."""
        words = [_WORDS.get(" ".join(stack), "its derivative") for stack in self.stacks]
        gives = "zero" if self.drops else "wrong"
        return f"{', or '.join(dict.fromkeys(words))} is silently {gives}"

    def wrong_now(self, call: OpCall) -> bool:
        """Return whether the call is wrong, or will be with the transforms around it."""
        if self.formula and not self.drops and call.kwargs.get("out") is not None:
            return False  # torch raises
        # A transform around the monitored function may run a batched backward pass through it.
        is_batched = not transforms.DERIVATIVES.isdisjoint(call.outer)
        is_batched |= self.formula is not None and transforms.BATCH in call.stack
        return any(
            (_holds(call.stack, stack) or (stack == BATCHED and is_batched))
            and self.wrong_in(stack, call)
            for stack in self.stacks
        )

    def wrong_in(self, stack: Stack, call: OpCall) -> bool:
        """Return whether the call is wrong in some transforms, one of `stacks`."""
        return stack in self.stacks and self.when(call, stack) and call.is_seen_by(stack)


def _holds(stack: Stack, part: Stack) -> bool:
    """Return whether a stack holds some transforms, in their order."""
    rest = iter(stack)
    return all(kind in rest for kind in part)


_OF_BATCHED = "a derivative of a batched gradient, grad(vmap(grad(f)))"
_WORDS = {
    "Jvp": "its forward-mode derivative",
    **dict.fromkeys(("Grad Jvp", "Jvp Jvp"), "the derivative of its jvp"),
    "Jvp Grad": "the jvp of its gradient",
    "Grad Grad": "its second derivative",
    **dict.fromkeys(("Grad Grad Grad", "Jvp Grad Grad"), "its third derivative"),
    **dict.fromkeys(("Jvp Jvp Grad", "Jvp Jvp Jvp"), "its third derivative by forward mode"),
    "Vmap": "what vmap makes of it",
    "Grad Vmap": "the derivative of its batching rule",
    "Vmap Vmap": "a batch of batches",
    "Grad +Vmap": "a batched backward pass through it",
    **dict.fromkeys(("Grad Grad +Vmap", "Grad Vmap Grad", "Jvp Vmap Grad"), _OF_BATCHED),
}


# --- which calls


def _of_norm(call: OpCall, stack: Stack, *, position: int = 1, functional: int = 3) -> bool:
    """Return whether a norm is wrong: batched, it is so only with a weight."""
    weight = call.argument(functional if call.functional else position, "weight")
    return weight is not None or not {transforms.BATCH, _PASS} & set(stack)


def _of_own_statistics(call: OpCall, stack: Stack, *, name: str, default: bool) -> bool:
    """Return whether a norm that takes the statistics of its input is wrong."""
    flag = call.argument(5, name)
    return bool(default if flag is None else flag) and _of_norm(call, stack)


def _reduces_wrongly(call: OpCall, _: Stack) -> bool:
    """Return whether the rule of scatter_reduce, or index_reduce, is wrong for some values."""
    reduce = call.argument(4, "reduce")
    is_extreme = reduce in {"amax", "amin"}
    return reduce == "prod" or (is_extreme and call.kwargs.get("include_self") is False)


def _is_of_tensors(call: OpCall, _: Stack) -> bool:
    """Return whether both a base and its exponent are tensors."""
    return all(isinstance(call.argument(*x), Tensor) for x in ((0, "input"), (1, "exponent")))


# --- which values of a node


def _where(got: str, is_wrong: Callable[[Any], Any], *, second: bool = False) -> Reader:
    """Return what tells of wrong values: for any derivative, or only for a second one."""
    return lambda node, create_graph, _: (
        got if (create_graph or not second) and is_wrong(node) else None
    )


def _has_zeroth_power(node: Node) -> bool:
    # The slope with respect to the base loses the part that is linear in the exponent.
    if any(below is None for below, _ in node.next_functions):
        return False
    base, exponent = saved(node, "self").detach(), saved(node, "exponent").detach()
    return bool(formulas.is_zeroth_power(base, exponent).any())


def _is_near_zero(node: Node) -> bool:
    size = saved(node, "self").detach().abs()
    return bool((size < torch.finfo(size.dtype).eps ** 0.25).any())


_SHRINKS = _where(
    "a threshold of zero, at which torch gives a gradient of zero",
    lambda node: saved(node, "lambd") == 0 and (saved(node, "self").detach() == 0).any(),
)


def _det(node: Node, create_graph: bool, decomposes: bool) -> str | None:
    matrix, value = saved(node, "A"), saved(node, "result")
    size = value.detach().abs()
    limits = torch.finfo(size.dtype)
    if not create_graph:
        got = "the determinant of a singular matrix, for whose gradient torch gives zero"
        return got if (size < limits.tiny / limits.eps).any() else None
    if transforms.is_transform_tensor(matrix):
        if len(transforms.recording_levels(matrix)) + transforms.carries_tangent(matrix) < 2:
            return None
        decomposes = True
    size = torch.zeros_like(size) if decomposes else size
    singular = torch.linalg.svdvals(matrix.detach()[size < 100 * limits.eps])
    gaps = singular[..., :-1] - singular[..., 1:] <= limits.eps ** (1 / 3) * singular[..., :1]
    if gaps.any() or (matrix.is_complex() and singular.numel()):
        got = "the determinant of a matrix with equal singular values, or a singular complex one, "
        return f"{got}whose second derivative torch gets silently wrong"
    return None


def _reduction(node: Node, create_graph: bool, _: bool, *, src: str) -> str | None:
    reduce, (dim,) = saved(node, "reduce"), saved_ints(node, "dim")
    given = (saved(node, name) for name in ("self", "index", src, "result"))
    input, index, source, result = map(torch.atleast_1d, given)
    if src == "source":  # index_reduce has the indices of one dimension
        index = index.reshape(-1, *[1] * (source.dim() - 1)).movedim(0, dim).expand_as(source)
    if reduce == "prod" and create_graph:
        zeros = (source[tuple(map(slice, index.shape))] == 0).to(result.dtype)
        several = torch.zeros_like(result).scatter_add(dim, index, zeros) > 1
        got = "a product of several zeros, whose second derivative torch does not have"
        return got if several.any() else None
    if reduce not in {"amax", "amin"} or saved(node, "include_self"):
        return None
    hit = torch.zeros_like(input, dtype=torch.bool).scatter(dim, index, True)
    got = f"{reduce} with include_self=False, where what is not included equals the result: torch "
    got += "counts it as a tie, and gives the others too small a gradient"
    return got if (hit & (input == result)).any() else None


def _has_ties(node: Node) -> bool:
    if saved(node, "p") != math.inf:
        return False
    names = ("self",) if type(node).__name__.startswith("Pdist") else ("x1", "x2")
    sizes = formulas.differences(*(saved(node, name).detach() for name in names)).abs()
    result = saved(node, "result").detach()
    return bool(((sizes == result[..., None]).sum(-1)[result > 0] > 1).any())


def _is_zero_by_zero(node: Node, at: float) -> bool:
    if node.next_functions[-1][0] is None:  # a constant
        return False
    return bool(((saved(node, "self") == 0) & (saved(node, "other") == at)).any())


_SAME_ELEMENTS = names_of_nodes("Alias Clone Expand Permute Squeeze.1 ToCopy Transpose Unsqueeze")


def _is_of_no_log_softmax(node: Node) -> bool:
    below = node.next_functions[0][0]
    while below is not None and below.name() in _SAME_ELEMENTS:
        below = below.next_functions[0][0]
    return below is not None and below.name() != "LogSoftmaxBackward0"


# --- the table

_OVER_JVP = "take the jvp of the gradient: hvp(f, primals, tangents)"
_FORWARD = 'hvp(..., mode="reverse-over-reverse"), and grad or jacrev in place of jvp or jacfwd'
_INSIDE = "take every derivative inside of the vmap, two at most; or use group_norm or rms_norm"
_SOLVED = f"{_OVER_JVP}; or torch.linalg.inv(a) @ b"
_DENSE = "make it dense: torch.zeros(size).index_put(tuple(indices), values, accumulate=True)"
_OF_DET = "192540 192521 196696 104675 80761"
_TIES = "a largest distance of several coordinates, each of which torch gives the whole gradient"
_dropped = partial(Defect, also=_FIRST, drops=True)
# torch's tracker has reports of them: https://github.com/pytorch/pytorch/issues/198017.
ROWS = (
    Defect("as_strided_scatter", fix="index_put, or torch.where"),
    Defect("cdist", fix="(a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)",
           formula=formulas.distances, nodes={"CdistBackward0": {}}),
    Defect("cdist", formula=formulas.distances, also=_FIRST, aliases="_cdist_forward",
           when=lambda call, _: call.argument(2, "p") == math.inf,
           values={"CdistBackward0": _where(_TIES, _has_ties)}),
    Defect("pdist", formula=formulas.distances, also=_FIRST, aliases="_pdist_forward",
           when=lambda call, _: call.argument(1, "p") == math.inf,
           values={"PdistBackward0": _where(_TIES, _has_ties)}),
    Defect("index_fill", fix="torch.where, or index_put", aliases="index_fill_",
           when=lambda call, _: isinstance(call.argument(3, "value"), Tensor),
           nodes={"IndexFillBackward1": {"value": RESULT}}),
    Defect("lu_solve", fix="torch.linalg.solve(a, b)"),
    Defect("masked_select", fix="expand the tensor to the shape of the mask first",
           when=lambda call, _: call.argument(0, "input").shape != call.argument(1, "mask").shape,
           nodes={"MaskedSelectBackward0": {"input": "self", "mask": "mask"}}),
    Defect("roll", fix="leave it out: it moves nothing in a tensor without dimensions",
           when=lambda call, _: call.argument(0, "input").dim() == 0,
           nodes={"RollBackward0": {"input": RESULT}}),
    Defect("select_scatter", nodes={"SelectScatterBackward0": {}},
           fix="torch.where, or index_put; or take the gradient inside the vmap"),
    Defect("sparse_coo_tensor", fix=_DENSE,  # whose values are differentiated
           when=lambda call, _: isinstance(call.argument(1, "values"), Tensor)),

    # --- matrices
    Defect("det", issues=_OF_DET, nodes={"LinalgDetBackward0": {}},  # if only the graph tells of it
           when=lambda call, _: not (call.args or call.kwargs),
           fix=f"{_OVER_JVP}; a third derivative by gradkit.value_and_grads, eagerly"),
    Defect("det", issues=_OF_DET, formula=formulas.det, also=_FIRST,
           values={"LinalgDetBackward0": _det}),
    Defect("slogdet", fix=_OVER_JVP, issues="192540 196697", nodes={"LinalgSlogdetBackward0": {}}),
    Defect("logdet", fix=_OVER_JVP, issues="192540"),
    Defect("householder_product", fix=_OVER_JVP, issues="196698", aliases="orgqr"),
    Defect("solve solve_ex tensorsolve", fix=_SOLVED, issues="192540 196695"),
    # The rule of forward mode divides by zeros, on which it writes: its derivative is nan.
    Defect("eig", fix=_FORWARD, issues="192540", also=(("Grad", "Jvp"),)),
    Defect("eigvals", fix=_FORWARD, issues="192540"),
    Defect("svd", formula=formulas.svd, also=_FIRST),
    Defect("norm vector_norm matrix_norm dist", formula=formulas.norm,
           also=(("Jvp", "Grad"), ("Jvp", "Jvp"))),
    Defect("cholesky_inverse", fix=_FORWARD, issues="196682",
           nodes={"CholeskyInverseBackward0": {}}),
    Defect("triangular_solve", fix=_FORWARD, issues="196707",
           nodes={"TriangularSolveBackward0": {}}),
    Defect("cholesky cholesky_ex eigh eigvalsh", formula=formulas.of_symmetric),
    Defect("block_diag", formula=formulas.block_diag, also=(("Grad",),)),

    # --- normalizations
    Defect("layer_norm", fix=_INSIDE, issues="196700 175754 functorch#534",
           when=partial(_of_norm, position=2, functional=2), aliases="native_layer_norm",
           nodes={"NativeLayerNormBackward0": {"weight": "weight"}}),
    Defect("batch_norm", fix=_INSIDE, issues="196699 186256 functorch#534",
           when=partial(_of_own_statistics, name="training", default=False),
           aliases="native_batch_norm _native_batch_norm_legit _batch_norm_with_update",
           nodes={f"{kernel}BatchNormBackward0": {"weight": "weight"}
                  for kernel in ("Native", "Cudnn", "Miopen")}),
    Defect("instance_norm", fix=_INSIDE, issues="196699 186256 functorch#534",
           when=partial(_of_own_statistics, name="use_input_stats", default=True)),
    Defect("weight_norm", formula=formulas.weight_norm, also=(("Jvp",),),
           aliases="_weight_norm_interface"),

    # --- products and sums
    Defect("prod", formula=formulas.prod),
    Defect("cumprod", issues="196701", formula=formulas.cumprod,
           aliases="cumprod_"),
    Defect("vander", issues="196701", formula=formulas.vander, also=_FIRST),
    Defect("scatter_reduce", fix=_FORWARD, issues="196702", when=_reduces_wrongly,
           nodes={"ScatterReduceBackward0": {"reduce": "reduce"}}),
    Defect("scatter_reduce", issues="196702", formula=formulas.scatter_reduce, also=_FIRST,
           when=_reduces_wrongly, aliases="scatter_reduce_",
           values={"ScatterReduceBackward0": partial(_reduction, src="src")}),
    # Torch has no forward mode of index_reduce.
    Defect("index_reduce", formula=formulas.index_reduce, also=_FIRST, aliases="index_reduce_",
           when=lambda call, stack: stack == ("Jvp",) or _reduces_wrongly(call, stack),
           values={"IndexReduceBackward0": partial(_reduction, src="source")}),
    Defect("logcumsumexp", issues="196705", formula=formulas.logcumsumexp, also=(("Jvp",),)),

    # --- element by element
    Defect("sinc", issues="196703 89459", formula=partial(formulas.near_zero, None),
           also=_FIRST, aliases="sinc_", values={"SincBackward0": _where(
               "sinc near zero, whose second derivative torch gets silently wrong",
               _is_near_zero, second=True)}),
    Defect("i0", formula=partial(formulas.near_zero, 0), also=_FIRST,
           aliases="i0_"),
    Defect("i1", formula=partial(formulas.near_zero, 1), also=_FIRST,
           values={"SpecialI1Backward0": _where(
               "i1 near zero, whose second derivative torch gets silently wrong",
               _is_near_zero, second=True)}),
    Defect("pow", formula=formulas.pow, also=_FIRST, aliases="pow_",
           when=_is_of_tensors, values={"PowBackward1": _where(
               "a power whose exponent is zero, whose second derivative torch gets silently wrong",
               _has_zeroth_power, second=True)}),
    Defect("float_power", formula=formulas.pow, also=_FIRST, aliases="float_power_",
           when=_is_of_tensors),
    Defect("polar", formula=formulas.polar, also=_FIRST, values={"PolarBackward0": _where(
        "polar of a radius of zero, for which torch gives a gradient of zero",
        lambda node: (saved(node, "result").detach() == 0).any())}),
    Defect("softshrink", formula=formulas.shrink, also=_FIRST,
           values={"SoftshrinkBackward0": _SHRINKS}),
    Defect("hardshrink", issues="80803", formula=formulas.shrink, also=_FIRST,
           values={"HardshrinkBackward0": _SHRINKS}),
    Defect("prelu", formula=formulas.prelu),

    *(Defect(name, issues="80770", formula=formulas.xlogy, also=_FIRST, aliases=f"{name}_", values={
        f"{kind}Backward{number}": _where(
            f"{name} of zero, and of another argument at which its logarithm is that of zero: "
            "torch gives nan for a derivative of zero", partial(_is_zero_by_zero, at=at))
        for number in (0, 1)}) for name, kind, at in
        (("xlogy", "Xlogy", 0), ("xlog1py", "SpecialXlog1Py", -1))),

    # --- layers and losses
    Defect("ctc_loss", issues="52241 181534", formula=formulas.ctc_loss, also=_FIRST, values={
        f"{kernel}CtcLossBackward{number}": _where(
            "ctc_loss of log_probs that no log_softmax has made: torch gives its gradient by what "
            "one would be of", _is_of_no_log_softmax)
        for kernel in ("", "Cudnn") for number in (0, 1)}),
    Defect("binary_cross_entropy", issues="103316", formula=formulas.binary_cross_entropy,
           also=_FIRST, values={"BinaryCrossEntropyBackward0": _where(
               "binary_cross_entropy of a probability next to zero or one, for which torch gives "
               "too small a gradient",
               lambda node: formulas.is_saturated(saved(node, "self").detach()).any())}),
    Defect("cosine_similarity", formula=formulas.cosine_similarity, also=_FIRST),
    # Closed: the difference of the modes is documented since.
    Defect("embedding", issues="93950", formula=formulas.embedding),
    Defect("gaussian_nll_loss", formula=formulas.gaussian_nll_loss, also=(("Jvp",),)),
    Defect("linear_cross_entropy", formula=formulas.linear_cross_entropy),

    # --- what drops the graph of a result that varies
    _dropped("airy_ai", fix="if the result is meant as a constant, give it x.detach(); or a "
             "torch.autograd.Function whose backward multiplies by Ai'(x)"),
    _dropped("normal", issues="4620", fix="mean + std * torch.randn_like(mean); or, if the sample "
             "is meant as a constant, give it mean.detach() and std.detach()"),
    _dropped("linspace logspace", formula=formulas.linspace),
    *(_dropped(name, formula=formula,
               issues="189872" if name.startswith(("bessel", "modified")) else "")
      for name, formula in SPECIAL_FUNCTIONS.items()),
)  # fmt: skip


def wrong_here(rows: Mapping[str, str]) -> list[str]:
    """Return what the sweep has found wrong in this release: transforms, or orders."""
    return [key for key, releases in rows.items() if is_seen(releases.split(), SWEPT)]


def stacks_of(name: str) -> tuple[Stack, ...]:
    """Return the transforms under which the sweep has found an operation wrong in this release."""
    return tuple(tuple(stack.split()) for stack in wrong_here(OPERATIONS.get(name, {})))


_every = [
    (name, replace(row, stacks=(*row.also, *stacks_of(name))))
    for row in ROWS
    for name in row.names.split()
]
EVERY = {name: row for name, row in _every if row.stacks}
EVERY_REFUSAL = {name: row for name, row in _every if row.fix}
FORMULAS = {name: row.formula for name, row in _every if row.formula}
# The rows that this release gets wrong.
REFUSED = {name: row for name, row in EVERY_REFUSAL.items() if row.stacks}
BY_FORMULA = {name: row for name, row in _every if row.formula and row.stacks}
# The operations by all their names.
_prefixes = "", "_", "linalg_", "_linalg_", "special_"
_here = [(name, row) for name, row in _every if row.stacks]
ALIASES = {alias: name for name, row in _here for alias in row.aliases.split()}
ALIASES |= {prefix + name: name for name, _ in _here for prefix in _prefixes}
ALIASES.pop("linalg_polar", None)  # since torch 2.15 the decomposition of a matrix
# The keys are kinds of nodes.
CALLS_OF_NODES = {
    kind: (name, kept) for name, row in REFUSED.items() for kind, kept in row.nodes.items()
}
READERS = {node_type(kind): read for row in ROWS for kind, read in row.values.items()}

# The order of the derivative through a node that is wrong in eager passes, by its kind.
WRONG_ORDER = {kind: order for kind, rows in NODES.items() for order in wrong_here(rows)}
# Second derivatives by what they are taken of, and what to write in its place. None is reported;
# the third derivatives of normalizations are: 186256 and 175754.
SECOND: dict[str, tuple[str, str]] = {
    "SparseCooTensorWithDimsAndTensorsBackward0": ("the values of a sparse tensor", _DENSE),
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": (
        "linear_cross_entropy in chunks", "leave out its options"),
    "CondAutogradOpBackward": ("torch.cond", "torch.where, or an if of Python"),
    "ScanAutogradOpBackward": ("scan", "a loop of Python"),
    "WhileLoopAutogradOpBackward": ("while_loop", "a loop of Python"),
}  # fmt: skip
