"""`check_grads`: whether torch's derivatives of a function are those of the function.

Each mode has a random direction: the last a constant, those below it one that varies with the
values, so that a backward pass that takes its cotangent for a constant is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, isfinite, nan, sqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad as _forward_ad
from torch.autograd.function import BackwardCFunction
from torch.func import jvp, vjp

from gradkit import errors
from gradkit._autograd.engine import inner_grads
from gradkit._compat.transforms import is_dual, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import check_function, is_positive_int
from gradkit._core.graph import Subgraph, edge
from gradkit._core.leaf_arithmetic import refuse_meta
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.user_code import captured_by
from gradkit._state.snapshot import Snapshot
from gradkit._torch_bugs.monitor import DifferentiatedJvps
from gradkit.errors import first_line, message
from gradkit.func._arguments import ArgNums, read_arguments
from gradkit.func._errors import HOOKED_CONSTANT, independent

forward_ad: Any = _forward_ad  # whose functions have no types
Tensors: TypeAlias = Sequence[Tensor]
Function: TypeAlias = Callable[[Tensors], Tensors]
Mode = Literal["reverse", "forward"]
# The function gets the number of a leaf, or None for all, and returns its path, and the operation
# that leads to it.
Names: TypeAlias = Callable[[int | None], tuple[str, str | None]]
Kind: TypeAlias = tuple[tuple[str, ...], str, bool]  # modes from the innermost, API, varying or not

_BOTH = ("reverse", "forward")
# torch.func cannot enter every function, and for some it runs other formulas than the engine.
_APIS = ("torch.autograd", "torch.func")
_STEPS = (1.0, 1 / 30, 30.0)  # a derivative that is wrong is so at each: no kink, no rounding
_ROUNDING = 16 * torch.finfo(torch.float64).eps  # of what a function computes, roughly
_KINK = 1e-2  # how much two finite differences may differ where there is none


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
    torch.func, is compared with finite differences of the one before it along a random direction,
    on float64 copies; nothing of the caller's changes.

    Example:
        >>> import torch, gradkit
        >>> gradkit.func.check_grads(lambda w, x: (w @ x).tanh(), torch.randn(2, 3), torch.ones(3))
        >>> try:
        ...     gradkit.func.check_grads(lambda w: w.detach() * w, torch.ones(2))
        ... except gradkit.GradientCheckError as error:
        ...     print(error.leaf, error.order, error.mode)
        args[0] 1 reverse

    Args:
        fn: Takes trees, and returns one of tensors of any shapes, of which the floating-point and
            complex ones count. Tensors that it refers to must be float64.
        args: Its arguments; modules among them are copied.
        argnums: As in `value_and_grads`. A leaf that is no such tensor is a constant.
        order: The highest derivative.
        modes: A tuple of `"reverse"`, `"forward"`, or both. A mode for which torch has no formula
            is left out; if no mode of an order is left, the call raises.
        atol: The largest absolute error, along a random direction, beside `rtol` and rounding.
        rtol: The largest relative error.
        eps: The length of the step of finite differences; a thirtieth and 30 times it serve, too.

    Raises:
        DetachedLossError: What `fn` returns does not depend on the arguments.
        GradientCheckError: A derivative is wrong; it says at which leaf, of which order and mode,
            by how much, and the last operation before the leaf, where it is one.
        StructureError: `fn` does not compute in float64.
        UnsupportedGraphError: `fn` differs from run to run, or torch can run no mode of an order;
            or the call is inside a torch.func transform, or torch.compile.
        GradkitError: As in `value_and_grads`.

    Source:
        https://docs.jax.dev/en/latest/_autosummary/jax.test_util.check_grads.html, and
        `gradcheck(fast_mode=True)` of https://pytorch.org/docs/stable/notes/gradcheck.html
    """
    check_function(fn)
    _check_options(order, modes, atol=atol, rtol=rtol, eps=eps)
    arguments = read_arguments(args, argnums, is_variable=_is_variable, dense=True)
    refuse_meta(arguments.variables, arguments.path)
    captured = captured_by((fn, args))
    with leave_inference_mode(record=True):
        leaves, spec = pytree.flatten(arguments.args)
        copies = {id(x): _in_double(x) for x in leaves}  # by id: ties stay
        here = arguments.at(pytree.unflatten(spec, [copies[id(x)] for x in leaves]))

        def flat(inputs: Tensors) -> Tensors:
            returned = pytree.tensors(fn(*here.args_with(inputs)))
            return _dense(filter(_is_number, returned))

        snapshot = Snapshot(captured, [*pytree.tensors(args), *filter(torch.is_tensor, captured)])
        options = tuple(dict.fromkeys(modes)), atol, rtol, eps
        at = Derivatives(flat, here.variables, snapshot.restored, *options)
        graph, inputs = _graph_in_double(at, partial(fn, *arguments.args))

        def names(leaf: int | None) -> tuple[str, str | None]:
            if leaf is None:
                return "args", None
            return arguments.path(leaf), _last_operation(graph, inputs[leaf]) if inputs else None

        error: Exception | None = at.first_error(order, names)
        if error is None and inputs and not any(map(graph.reaches, inputs)):
            error = independent("fn")
        if error is not None:
            raise error


def _check_options(order: object, modes: Any, **positive: Any) -> None:
    is_list = isinstance(modes, tuple | list | set | frozenset) and len(modes) > 0
    are_modes = is_list and all(m in _BOTH for m in modes)
    checks = [("order", order, is_positive_int(order), "a positive int", "2")]
    both = '("reverse", "forward")'
    checks.append(("modes", modes, are_modes, "a tuple of 'reverse', 'forward'", both))
    for name, value in positive.items():
        is_positive = isinstance(value, int | float) and value > 0
        checks.append((name, value, is_positive, "a positive number", "1e-6"))
    for name, value, is_right, expected, right in checks:
        if not is_right:
            raise errors.OptionError(message(name, expected, repr(value), f"{name}={right}"))
    if torch.compiler.is_compiling() or transforms():
        expected = "a call outside of torch.func's transforms and of torch.compile"
        fix = "call it outside, on the transformed function"
        raise errors.UnsupportedGraphError(message("check_grads", expected, "one inside", fix))


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    return _is_number(leaf) and not (isinstance(leaf, nn.Parameter) and not leaf.requires_grad)


def _is_number(x: object) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _in_double(x: Any) -> Any:
    if isinstance(x, Tensor):
        dtype = torch.promote_types(x.dtype, torch.float64) if _is_number(x) else x.dtype
        return x.detach().to(dtype, copy=True)
    return deepcopy(x).double() if isinstance(x, nn.Module) else x


def _graph_in_double(at: Derivatives, original: Callable[[], Any]) -> tuple[Subgraph, Tensors]:
    """Raise unless fn computes the same twice, in float64; return its graph, and the inputs."""
    graphs: list[tuple[Subgraph, Tensors]] = []

    def roots(inputs: Tensors) -> Tensors:
        graphs.append((Subgraph(at.fn([x.requires_grad_() for x in inputs])), inputs))
        return graphs[0][0].roots

    try:
        first, second = (at.evaluate(at.fn) for _ in range(2))
    except RuntimeError as error:
        with at.isolated():
            original()  # raises the same, unless it is a matter of dtypes
        raise _not_in_double(f"torch's error: {first_line(error)}") from error
    if not first:
        expected = "at least one floating-point or complex tensor"
        fix = "return the tensors to differentiate"
        raise errors.LeafTypeError(message("fn", expected, "none", fix))
    if not all(map(partial(torch.allclose, rtol=1e-10, atol=1e-10, equal_nan=True), first, second)):
        expected = "a function that gives the same when it runs again from the same random state"
        got = "another result than before: it reads something that has changed since"
        fix = "pass what changes as an argument, and seed a generator of its own inside of fn"
        raise errors.UnsupportedGraphError(message("fn", expected, got, fix))
    with suppress(RuntimeError):  # fn changes its arguments in place
        for dtype in {x.dtype for x in at.evaluate(roots)} - {torch.float64, torch.complex128}:
            raise _not_in_double(f"a result in {dtype}")
    return graphs[0] if graphs else (Subgraph([]), [])


def _not_in_double(got: str) -> errors.StructureError:
    expected = "a function that computes in float64 from float64 copies of its arguments"
    fix = "leave out casts, and pass the tensors and modules that it uses as arguments, "
    fix += "check_grads(fn, params, module), or call module.double()"
    return errors.StructureError(message("fn", expected, got, fix))


def _last_operation(graph: Subgraph, leaf: Tensor) -> str | None:
    """Return the custom Function that leads to a leaf, or the operation on it, if it is one."""
    above: Any = graph.leading_to([leaf]) if graph.reaches(leaf) else ()
    own = edge(leaf).node
    last = [node for node in above if any(child is own for child, _ in node.next_functions)]
    custom = [node for node in above if isinstance(node, BackwardCFunction)]
    names = {re.sub(r"Backward\d*$", "", type(node).__name__) for node in custom or last}
    return names.pop() if len(names) == 1 else None


def _random_like(seed: int, values: Tensors, *, varying: bool = False) -> list[Tensor]:
    """Return the random tensors of a seed; `varying` ones depend on the values, too."""
    source = torch.Generator().manual_seed(seed)
    parts = [torch.randn(x.shape, dtype=x.dtype, generator=source).to(x.device) for x in values]
    return [r * (1 + x) for r, x in zip(parts, values, strict=True)] if varying else parts


def _dot(a: Tensors, b: Tensors) -> float:
    """Return the real inner product of two lists of tensors."""
    return sum(float((x.conj() * y).real.sum()) for x, y in zip(a, b, strict=True))


def _dense(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [x if x.layout == torch.strided else x.to_dense() for x in tensors]


def _differentiate(fn: Function, mode: str, api: str, along: Function, inputs: Tensors) -> Tensors:
    """Return a derivative of fn along a direction, of its outputs in reverse mode."""

    def as_tuple(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(fn(xs))

    if mode == "reverse" and api == "torch.func":
        outputs, pull = vjp(as_tuple, *inputs)  # type: ignore[misc]
        return _dense(pull(tuple(along(outputs))))
    if api == "torch.func":
        return _dense(jvp(as_tuple, tuple(inputs), tuple(along(inputs)))[1])
    pairs: Iterable[tuple[Tensor, Tensor | None]]
    if mode == "reverse":
        nested = any(x.requires_grad or is_dual(x) for x in inputs)
        outputs = fn([x.requires_grad_() for x in inputs])
        grads = inner_grads(outputs, inputs, along(outputs), create_graph=nested)
        pairs = zip(inputs, grads, strict=True)
    else:
        tangents = tuple(along(inputs))
        with forward_ad.dual_level(), INSIDE:
            outputs = fn(list(map(forward_ad.make_dual, inputs, tangents)))
            pairs = list(map(forward_ad.unpack_dual, outputs))
    return _dense(torch.zeros_like(x) if d is None else d for x, d in pairs)


@dataclass(frozen=True, eq=False)
class Derivatives:
    """The derivatives at a point of a function from float64 or complex128 tensors to such."""

    fn: Function
    point: Tensors
    isolated: Callable[[], AbstractContextManager[object]]  # around each evaluation
    modes: tuple[str, ...] = _BOTH
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
            try:
                return [x.detach() for x in fn(inputs)]
            except RuntimeError as error:
                if HOOKED_CONSTANT not in str(error):
                    raise
        with self.isolated(), torch.enable_grad(), DifferentiatedJvps(), INSIDE:
            inputs = [x.requires_grad_().clone() for x in inputs]  # fn registers hooks on them
            return [x.detach() for x in fn(inputs)]

    def first_error(self, order: int, names: Names) -> errors.GradientCheckError | None:
        """Return the error for the first derivative, up to an order, that is wrong."""
        at = self
        for degree in range(1, order + 1):
            values = at._values(degree)
            wrong = [kind for kind, value in values.items() if not at._agrees(kind, value)]
            if degree == 1 and wrong and any(map(_is_symmetric, self.point)):
                # torch.linalg.cholesky and its kin read one triangle: their gradient is that of
                # a function of symmetric matrices.
                other = replace(self, symmetric=True)
                still = [kind for kind, value in values.items() if not other._agrees(kind, value)]
                if len(still) < len(values) and all(kind[0] != ("reverse",) for kind in still):
                    at, wrong = other, still
            if wrong:
                in_doubt = {modes for modes, *_ in wrong}
                right = dict.fromkeys(modes[::-1] for modes, *_ in values if modes not in in_doubt)
                return at._error_of(wrong[0], list(map("-over-".join, right)), names)
        return None

    def _values(self, degree: int) -> dict[Kind, float]:
        """Return the derivatives of an order that torch can run; raise if there are none."""
        values: dict[Kind, float] = {}
        failures: list[Exception] = []
        for modes, api in product(product(self.modes, repeat=degree), _APIS):
            for kind in ((modes, api, True), (modes, api, False)):
                try:
                    values[kind] = self._value(kind)
                    break
                except Exception as error:  # fn itself runs: torch cannot run the mode
                    failures.append(error)
        # Forward mode may be without a formula; what has no gradient is not tried at all.
        runs = {modes for modes, *_ in values}
        if not runs or (degree == 1 and "reverse" in self.modes and ("reverse",) not in runs):
            cause, tried = failures[0], " or ".join(self.modes)
            expected = f"a function with a derivative of order {degree} in {tried} mode"
            got = f"torch's error, {type(cause).__name__}: {first_line(cause)}"
            fix = "let fn leave its arguments as they are, and compute by differentiable operations"
            if degree > 1:
                fix = f"order={degree - 1}, or other modes; around attention: "
                fix += "sdpa_kernel(SDPBackend.MATH)"
            raise errors.UnsupportedGraphError(message("fn", expected, got, fix)) from cause
        return values

    def _below(self, kind: Kind, leaf: int | None) -> tuple[Function, list[Tensor], Function]:
        """Return the derivative below the last; the directions of its inputs and its outputs."""
        fn, (modes, api, varying) = self.fn, kind
        for number, mode in enumerate(modes[:-1]):
            direction = partial(_random_like, 2 * number + (mode == "reverse"), varying=varying)
            fn = partial(_differentiate, fn, mode, api, direction)
        every = _random_like(2 * len(modes) - 2, self.point)
        tangents = [x if leaf in (None, index) else x * 0 for index, x in enumerate(every)]
        return fn, tangents, partial(_random_like, 2 * len(modes) - 1)

    def _value(self, kind: Kind, leaf: int | None = None) -> float:
        """Return what torch gives along the direction of the last mode, or its part in a leaf."""
        (*_, mode), api, _ = kind
        fn, tangents, weights = self._below(kind, leaf)
        direction = weights if mode == "reverse" else lambda _: tangents
        values = self.evaluate(partial(_differentiate, fn, mode, api, direction))
        return _dot(values, tangents if mode == "reverse" else weights(values))

    def _differences(self, kind: Kind, leaf: int | None, scale: float) -> list[float]:
        """Return a finite difference, those ahead and behind, and how much may be rounding."""
        fn, tangents, weigh = self._below(kind, leaf)
        if self.symmetric:
            pairs = zip(self.point, tangents, strict=True)
            tangents = [(t + t.mH) / 2 if _is_symmetric(x) else t for x, t in pairs]
        step = self.eps * scale / (sqrt(_dot(tangents, tangents)) or 1.0)
        shifts = ([step * sign * t for t in tangents] for sign in (1, 0, -1))
        try:
            ahead, here, behind = (self.evaluate(fn, shift) for shift in shifts)
        except Exception:  # a function of symmetric matrices alone raises beside the point
            if self.symmetric or not any(map(_is_symmetric, self.point)):
                raise
            return [nan] * 4
        weights = weigh(here)
        one = _dot(weights, list(map(torch.sub, ahead, here))) / step
        other = _dot(weights, list(map(torch.sub, here, behind))) / step
        size = _dot([x.abs() for x in weights], [x.abs() for x in here]) / step
        return [(one + other) / 2, one, other, _ROUNDING * size]

    def _agrees(self, kind: Kind, value: float, leaf: int | None = None) -> bool:
        for scale in _STEPS:
            expected, *_, rounding = self._differences(kind, leaf, scale)
            size, gap = max(abs(value), abs(expected)), abs(value - expected)
            if isfinite(size) and gap <= self.atol + self.rtol * size + rounding:
                return True
        return False

    def _error_of(self, kind: Kind, agreeing: list[str], names: Names) -> errors.GradientCheckError:
        """Return the error for a wrong derivative, at the leaf where it is farthest off."""
        gap, leaf, got = -1.0, None, self._value(kind)
        for index in range(len(self.point)):
            here = self._value(kind, index)
            off = abs(here - self._differences(kind, index, 1.0)[0])
            if not self._agrees(kind, here, index) and gap < inf and not off <= gap:
                gap, leaf, got = off if isfinite(off) else inf, index, here
        expected, *sides, _ = self._differences(kind, leaf, 1.0)
        pairs = sides, [expected, self._differences(kind, leaf, 30.0)[0]]
        kinks = [p for p in pairs if abs(p[0] - p[1]) > _KINK * max(abs(got), *map(abs, p))]
        fixes = ["make the matrix symmetric in fn, (a + a.mT) / 2"] if self.symmetric else []
        if agreeing:
            heeded = "leave no_grad out of fn, which forward mode does not heed; or "
            heeded = heeded if agreeing == ["forward"] else ""
            fixes.append(f"{heeded}differentiate by what agrees: {', '.join(agreeing)}")
        fix = "; or ".join(fixes) or "look for detach(), .data or a custom backward in fn"
        if kinks:
            pair = f"finite differences give {kinks[0][0]:.6g} and {kinks[0][1]:.6g}"
            fix = f"check at another point: fn has a kink or a pole at this one ({pair})"
        (where, operation), order, mode = names(leaf), len(kind[0]), "-over-".join(kind[0][::-1])
        along = f"for the derivative of order {order} along a random direction"
        through = f", through {operation}" if operation else ""
        aim = f"{expected:.6g} (finite differences) {along}"
        text = message(where, aim, f"{got:.6g} from {mode} ({kind[1]}){through}", fix)
        return errors.GradientCheckError(text, where, order, mode, abs(got - expected), operation)


def _is_symmetric(x: Tensor) -> bool:
    return x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.allclose(x, x.mH, rtol=1e-6)
