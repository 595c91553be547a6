"""`check_grads`: whether torch's derivatives of a function are those of the function.

Modes name a derivative, from the innermost: ("reverse", "forward") is forward over reverse. Each
has a random direction: in the inputs in forward mode, in the outputs in reverse mode. That of the
last is constant. The others vary with the values where torch can run that, so that a backward pass
that takes its cotangent for a constant is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, isfinite, nan, sqrt
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad as _forward_ad
from torch.autograd.function import BackwardCFunction
from torch.func import jvp, vjp

from gradkit import errors
from gradkit._autograd.engine import inner_grads
from gradkit._checks.differentiated_jvps import DifferentiatedJvps
from gradkit._compat.transforms import is_dual, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.closure_contents import captured_by
from gradkit._core.graph import Subgraph
from gradkit._core.options import check_function, is_positive_int
from gradkit._core.ownership import leave_inference_mode
from gradkit._state.snapshot import Snapshot
from gradkit.errors import first_line, message
from gradkit.func._arguments import ArgNums, read_arguments, refuse_sparse
from gradkit.func._errors import independent

Mode = Literal["reverse", "forward"]
Tensors: TypeAlias = Sequence[Tensor]
Function: TypeAlias = Callable[[Tensors], Tensors]
forward_ad: Any = _forward_ad  # whose functions have no types

# A derivative that is wrong is so at every step; a kink nearby or rounding is not.
_STEPS = (1.0, 1 / 30, 30.0)
_ROUNDING = 16 * torch.finfo(torch.float64).eps  # of what a function computes, roughly
APIS = ("torch.autograd", "torch.func")
_KINK = 1e-2  # how much two finite differences may differ where there is none
_IN_DOUBLE = "a function that computes in float64 from float64 copies of its arguments"
_CHANGES = (
    "a function that gives the same when it runs again from the same random state",
    "another result than before: it reads something that has changed since",
    "pass what changes as an argument, and seed a generator of its own inside of fn",
)
_RETURN = "return the tensors to differentiate"
_FIX = (
    "leave out casts, and pass the tensors and modules that it uses as arguments, "
    "check_grads(fn, params, module), or call module.double()"
)


def check_grads(
    fn: Callable[..., Any],
    *args: Any,
    argnums: ArgNums = 0,
    order: int = 2,
    modes: Sequence[Mode] = ("reverse", "forward"),
    atol: float = 1e-7,
    rtol: float = 1e-5,
    eps: float = 1e-6,
) -> None:
    """Return None if torch's derivatives of a function are right, and raise if one is wrong.

    Every derivative up to `order`, in every succession of `modes`, by torch.autograd and by
    torch.func, is compared with finite differences of the one before it along a random direction.
    It runs on float64 copies, always from the same random state; nothing of the caller's changes.

    Example:
        >>> import torch, gradkit
        >>> gradkit.func.check_grads(lambda w, x: (w @ x).tanh(), torch.randn(2, 3), torch.ones(3))
        >>> try:
        ...     gradkit.func.check_grads(lambda w: w.detach() * w, torch.ones(2))
        ... except gradkit.GradientCheckError as error:
        ...     print(error.leaf, error.order, error.mode)
        args[0] 1 reverse

    Args:
        fn: Takes tensors, in any trees, and returns a tree of tensors of any shapes, of which the
            floating-point and complex ones count. Tensors that it refers to must be float64.
        args: Its arguments; modules among them are copied.
        argnums: Which of them to differentiate with respect to, as in `value_and_grads`. A leaf
            that is no floating-point or complex tensor is a constant.
        order: The highest derivative.
        modes: A tuple of `"reverse"`, `"forward"`, or both. A mode for which torch has no formula
            is left out; if no mode of an order is left, the call raises.
        atol: The largest absolute error of a derivative along a random direction, beside `rtol`
            and rounding. Scale a function of small derivatives up.
        rtol: The largest relative error.
        eps: The length of the step of finite differences; a thirtieth of it and 30 times it are
            tried, too, before a derivative is called wrong.

    Raises:
        DetachedLossError: What `fn` returns does not depend on the arguments.
        GradientCheckError: A derivative is wrong; the error says at which leaf, of which order, in
            which mode, by how much, and in which custom Function if there is only one.
        LeafTypeError: `fn` returns no floating-point tensor; a leaf is sparse.
        OptionError: An option has no such value.
        StructureError: `fn` does not compute in float64.
        UnreachedParamError: The arguments hold nothing to differentiate.
        UnsupportedGraphError: `fn` differs from run to run, or torch can run no mode of an order;
            or the call is inside a torch.func transform, or torch.compile.
        GradkitError: As in `value_and_grads`, for its arguments.

    Source:
        https://docs.jax.dev/en/latest/_autosummary/jax.test_util.check_grads.html, and
        `gradcheck(fast_mode=True)` of https://pytorch.org/docs/stable/notes/gradcheck.html
    """
    check_function(fn)
    _check_options(order, modes, atol=atol, rtol=rtol, eps=eps)
    arguments = read_arguments(args, argnums, is_variable=_is_variable)
    refuse_sparse(arguments)
    captured = captured_by((fn, args))
    tensors = pytree.tensors(args) + [x for x in captured if isinstance(x, Tensor)]
    with leave_inference_mode(record=True):
        leaves, spec = pytree.flatten(arguments.args)
        copies = {id(x): in_double(x) for x in leaves}  # by id: ties stay
        here = arguments.at(pytree.unflatten(spec, [copies[id(x)] for x in leaves]))

        def flat(inputs: Tensors) -> Tensors:
            return _dense(filter(_is_number, pytree.tensors(fn(*here.with_variables(inputs)))))

        isolated = Snapshot(captured, tensors).restored
        at = Derivatives(flat, here.variables, isolated, tuple(modes), atol, rtol, eps)
        graph, inputs = _check_values(at, partial(fn, *arguments.args))
        at.check(order, arguments.path, lambda leaf: _only_function(graph, inputs, leaf))
        if inputs and not any(map(graph.reaches, inputs)):
            raise errors.DetachedLossError(independent("fn"))


def _check_options(order: object, modes: Sequence[Mode], **positive: float) -> None:
    text, both = "", ("reverse", "forward")
    if not is_positive_int(order):
        text = message("order", "a positive int", repr(order), "order=2")
    if not isinstance(modes, tuple | list | set | frozenset) or not modes or set(modes) - {*both}:
        text = message("modes", "a tuple of 'reverse', 'forward'", repr(modes), f"modes={both}")
    for name, value in positive.items():
        if not isinstance(value, int | float) or not value > 0:
            text = message(name, "a positive number", repr(value), f"{name}=1e-6")
    if text:
        raise errors.OptionError(text)
    if torch.compiler.is_compiling() or transforms():
        expected = "a call outside of torch.func's transforms and of torch.compile"
        fix = "call it outside, on the transformed function"
        raise errors.UnsupportedGraphError(message("check_grads", expected, "one inside", fix))


def _is_number(x: object) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    return _is_number(leaf) and not (isinstance(leaf, nn.Parameter) and not leaf.requires_grad)


def _dense(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [x if x.layout == torch.strided else x.to_dense() for x in tensors]


def in_double(x: Any) -> Any:
    """Return a float64 or complex128 copy of a tensor or a module; others as they are."""
    if isinstance(x, nn.Module):
        return deepcopy(x).double()
    if isinstance(x, Tensor):
        dtype = torch.promote_types(x.dtype, torch.float64) if _is_number(x) else x.dtype
        return x.detach().to(dtype, copy=True)
    return x


def _check_values(at: Derivatives, original: Callable[[], Any]) -> tuple[Subgraph, Tensors]:
    """Raise unless fn computes the same twice, in float64; return its graph, and the inputs."""
    graph, leaves = Subgraph([]), list[Tensor]()

    def with_graph(inputs: Tensors) -> Tensors:
        nonlocal graph
        graph = Subgraph(at.fn([x.requires_grad_() for x in inputs]))
        leaves.extend(inputs)
        return [x for x in graph.roots if x.dtype not in (torch.float64, torch.complex128)]

    try:
        first, second = (at.evaluate(at.fn) for _ in range(2))
    except RuntimeError as error:
        with at.isolated():
            original()  # raises the same, unless it is a matter of dtypes
        got = f"torch's error: {first_line(error)}"
        raise errors.StructureError(message("fn", _IN_DOUBLE, got, _FIX)) from error
    if not first:
        expected, fix = "at least one floating-point or complex tensor", _RETURN
        raise errors.LeafTypeError(message("fn", expected, "none", fix))
    if not all(map(partial(torch.allclose, rtol=1e-10, atol=1e-10, equal_nan=True), first, second)):
        raise errors.UnsupportedGraphError(message("fn", *_CHANGES))
    with suppress(RuntimeError):  # it changes its arguments in place
        for x in at.evaluate(with_graph):
            raise errors.StructureError(message("fn", _IN_DOUBLE, f"a result in {x.dtype}", _FIX))
    return graph, leaves


def _only_function(graph: Subgraph, inputs: Tensors, leaf: int | None) -> str | None:
    """Return the custom Function through which all gradients of a leaf come, if it is one."""
    nodes = graph.leading_to(inputs if leaf is None else [inputs[leaf]]) if inputs else ()
    names = {type(n).__name__ for n in nodes if isinstance(n, BackwardCFunction)}
    return names.pop().removesuffix("Backward") if len(names) == 1 else None


def random_like(seed: int, values: Tensors, *, varying: bool = False) -> list[Tensor]:
    """Return the random tensors of a seed; `varying` ones depend on the values, too."""
    source = torch.Generator().manual_seed(seed)
    parts = [torch.randn(x.shape, dtype=x.dtype, generator=source).to(x.device) for x in values]
    return [r * (1 + x) for r, x in zip(parts, values, strict=True)] if varying else parts


def dot(a: Tensors, b: Tensors) -> float:
    """Return the real inner product of two lists of tensors."""
    return sum(float((x.conj() * y).real.sum()) for x, y in zip(a, b, strict=True))


def differentiate(
    by: tuple[str, str], fn: Function, direction: Function, inputs: Tensors
) -> list[Tensor]:
    """Return the derivative of fn, by a mode and an API, along a direction that it is given for."""
    # torch.func cannot enter every function, and for some it runs other formulas than the engine.
    if by == ("reverse", "torch.autograd"):
        nested = any(x.requires_grad or is_dual(x) for x in inputs)
        outputs = fn([x.requires_grad_() for x in inputs])
        grads = inner_grads(outputs, inputs, direction(outputs), create_graph=nested)
        pairs = zip(inputs, grads, strict=True)
        return _dense(torch.zeros_like(x) if grad is None else grad for x, grad in pairs)
    if by == ("reverse", "torch.func"):
        outputs, pull = vjp(lambda *xs: tuple(fn(xs)), *inputs)
        return _dense(pull(tuple(direction(outputs))))
    tangents = tuple(direction(inputs))
    if by == ("forward", "torch.func"):
        return _dense(jvp(lambda *xs: tuple(fn(xs)), tuple(inputs), tangents)[1])
    with forward_ad.dual_level(), INSIDE:
        outputs = fn(list(map(forward_ad.make_dual, inputs, tangents)))
        pairs = map(forward_ad.unpack_dual, outputs)
        return _dense(torch.zeros_like(x) if t is None else t for x, t in pairs)


class Derivative(NamedTuple):
    """A derivative along a direction, as torch gives it."""

    modes: tuple[str, ...]
    api: str
    varying: bool  # with directions below the last derivative that vary with the values
    value: float = nan

    @property
    def mode(self) -> str:
        """Its name: forward-over-reverse."""
        return "-over-".join(reversed(self.modes))


@dataclass(frozen=True, eq=False)
class Derivatives:
    """The derivatives at a point of a function from float64 or complex128 tensors to such."""

    fn: Function
    point: Tensors
    isolated: Callable[[], AbstractContextManager[object]]  # around each evaluation
    modes: tuple[str, ...] = ("reverse", "forward")
    atol: float = 1e-7
    rtol: float = 1e-5
    eps: float = 1e-6
    symmetric: bool = False  # finite differences are those along symmetric directions

    def evaluate(self, fn: Function, shifts: Tensors | None = None) -> list[Tensor]:
        """Return the values of a function of the inputs, at the point or beside it."""
        inputs = [x.clone() for x in self.point]
        if shifts is not None:
            inputs = list(map(torch.add, inputs, shifts))
        with self.isolated(), torch.enable_grad(), DifferentiatedJvps(), INSIDE:
            return [x.detach() for x in fn(inputs)]

    def check(
        self, order: int, path: Callable[[int], str], name: Callable[[int | None], str | None]
    ) -> None:
        """Raise for the first derivative, up to an order, that is wrong."""
        at = self
        for degree in range(1, order + 1):
            every = at._that_run(degree)
            wrong = [d for d in every if not at._agrees(d)]
            if degree == 1 and wrong and any(map(_is_symmetric, self.point)):
                # torch.linalg.cholesky and its kin read one triangle: their gradient is that of
                # a function of symmetric matrices.
                symmetric = replace(self, symmetric=True)
                still = [d for d in every if not symmetric._agrees(d)]
                if len(still) < len(every) and all(d.modes != ("reverse",) for d in still):
                    at, wrong = symmetric, still
            if wrong:
                in_doubt = {d.mode for d in wrong}
                agreeing = dict.fromkeys(d.mode for d in every if d.mode not in in_doubt)
                raise at._error(wrong[0], list(agreeing), path, name)

    def _that_run(self, degree: int) -> list[Derivative]:
        """Return the derivatives of an order that torch can run; raise if there are none."""
        every: dict[object, Derivative] = {}
        failures: list[Exception] = []
        for modes, api, varying in product(product(self.modes, repeat=degree), APIS, (True, False)):
            if (modes, api) not in every:
                d = Derivative(modes, api, varying)
                try:
                    every[modes, api] = d._replace(value=self._value(d))
                except Exception as error:  # fn itself runs: torch cannot run the mode
                    failures.append(error)
        # Forward mode may be without a formula; what has no gradient is not tried at all.
        runs = {modes for modes, _ in every}
        if runs and (degree > 1 or "reverse" not in self.modes or ("reverse",) in runs):
            return list(every.values())
        expected = (
            f"a function with a derivative of order {degree} in {' or '.join(self.modes)} mode"
        )
        got = f"torch's error, {type(failures[0]).__name__}: {first_line(failures[0])}"
        fix = f"order={degree - 1}, or other modes; around attention: sdpa_kernel(SDPBackend.MATH)"
        if degree == 1:
            fix = "let fn leave its arguments as they are, and compute by differentiable operations"
        raise errors.UnsupportedGraphError(message("fn", expected, got, fix)) from failures[0]

    def _below(self, d: Derivative) -> Function:
        """Return the derivative below the last, a function of the inputs."""
        fn = self.fn
        for number, mode in enumerate(d.modes[:-1]):
            direction = partial(random_like, 2 * number + (mode == "reverse"), varying=d.varying)
            fn = partial(differentiate, (mode, d.api), fn, direction)
        return fn

    def _tangents(self, d: Derivative, leaf: int | None) -> list[Tensor]:
        every = random_like(2 * len(d.modes) - 2, self.point)
        return [x if leaf in (None, index) else x * 0 for index, x in enumerate(every)]

    def _value(self, d: Derivative, leaf: int | None = None) -> float:
        """Return what torch gives for a derivative along its direction, or its part in a leaf."""
        tangents, weights = self._tangents(d, leaf), partial(random_like, 2 * len(d.modes) - 1)
        is_reverse = d.modes[-1] == "reverse"
        direction = weights if is_reverse else lambda _: tangents
        values = self.evaluate(
            partial(differentiate, (d.modes[-1], d.api), self._below(d), direction)
        )
        return dot(values, tangents if is_reverse else weights(values))

    def _differences(self, d: Derivative, scale: float, leaf: int | None) -> list[float]:
        """Return a finite difference, those ahead and behind, and how much may be rounding."""
        fn, tangents = self._below(d), self._tangents(d, leaf)
        if self.symmetric:
            pairs = zip(self.point, tangents, strict=True)
            tangents = [(t + t.mH) / 2 if _is_symmetric(x) else t for x, t in pairs]
        step = self.eps * scale / (sqrt(dot(tangents, tangents)) or 1.0)
        here = self.evaluate(fn)
        weights = random_like(2 * len(d.modes) - 1, here)
        ahead, behind = (self.evaluate(fn, [s * step * t for t in tangents]) for s in (1, -1))
        one = dot(weights, list(map(torch.sub, ahead, here))) / step
        other = dot(weights, list(map(torch.sub, here, behind))) / step
        size = dot([x.abs() for x in weights], [x.abs() for x in here]) / step
        return [(one + other) / 2, one, other, _ROUNDING * size]

    def _agrees(self, d: Derivative, leaf: int | None = None) -> bool:
        for scale in _STEPS:
            try:
                expected, *_, rounding = self._differences(d, scale, leaf)
            except Exception:  # a function of symmetric matrices alone raises beside the point
                if self.symmetric or not any(map(_is_symmetric, self.point)):
                    raise
                return False
            size, gap = max(abs(d.value), abs(expected)), abs(d.value - expected)
            if isfinite(size) and gap <= self.atol + self.rtol * size + rounding:
                return True
        return False

    def _error(
        self,
        d: Derivative,
        agreeing: list[str],
        path: Callable[[int], str],
        name: Callable[[int | None], str | None],
    ) -> errors.GradientCheckError:
        """Return the error for a wrong derivative, at the leaf at which it is farthest off."""
        worst: tuple[float, int | None, Derivative] = (-1.0, None, d)
        for index in range(len(self.point)):
            here = d._replace(value=self._value(d, index))
            if not self._agrees(here, index):
                gap = abs(here.value - self._differences(d, 1.0, index)[0])
                worst = max(worst, (gap if isfinite(gap) else inf, index, here), key=itemgetter(0))
        _, leaf, d = worst
        expected, *sides, _ = self._differences(d, 1.0, leaf)
        wider = self._differences(d, 30.0, leaf)[0]
        function = name(leaf)
        fixes = [f"correct the derivative of {function}"] if function else []
        if self.symmetric:
            fixes.append("make the matrix symmetric in fn, (a + a.mT) / 2")
        if agreeing:
            fixes.append(f"differentiate by what agrees: {', '.join(agreeing)}")
        for a, b in (sides, (expected, wider)):
            if abs(a - b) > _KINK * max(abs(d.value), abs(a), abs(b)):
                pair = f"finite differences give {a:.6g} and {b:.6g}"
                fixes = [f"check at another point: fn has a kink or a pole at this one ({pair})"]
                break
        where, order = "args" if leaf is None else path(leaf), len(d.modes)
        along = f"for the derivative of order {order} along a random direction"
        got = f"{d.value:.6g} from {d.mode} ({d.api})" + (f", in {function}" if function else "")
        fix = "; or ".join(fixes) or "look for detach(), .data or a custom backward in fn"
        text = message(where, f"{expected:.6g} (finite differences) {along}", got, fix)
        gap = abs(d.value - expected)
        return errors.GradientCheckError(text, where, order, d.mode, gap, function)


def _is_symmetric(x: Tensor) -> bool:
    is_square = x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1
    return is_square and torch.allclose(x, x.mH, rtol=1e-6)
