"""`check_grads`: whether torch's derivatives of a function are those of the function.

Each mode has a random direction: the last a constant, those below it one that varies with the
values, so that a backward pass that takes its cotangent for a constant is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, isfinite, nan, sqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradkit import errors
from gradkit._autograd import directional
from gradkit._autograd.directional import Function, Tensors, dot, in_double, is_number, random_like
from gradkit._checks.differentiated_jvps import DifferentiatedJvps
from gradkit._compat.transforms import transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import check_function, is_positive_int
from gradkit._core.graph import Subgraph, edge
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.user_code import captured_by
from gradkit._state.snapshot import Snapshot
from gradkit.errors import first_line, message
from gradkit.func import _errors
from gradkit.func._arguments import ArgNums, read_arguments, refuse_sparse

Mode = Literal["reverse", "forward"]
Kind: TypeAlias = tuple[tuple[str, ...], str, bool]  # modes from the innermost, API, varying or not

_BOTH = ("reverse", "forward")
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
    torch.func, is compared with finite differences of the one before it along a random direction.
    It runs on float64 copies from one random state; nothing of the caller's changes.

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
        atol: The largest absolute error, along a random direction, beside `rtol` and rounding.
        rtol: The largest relative error.
        eps: The length of the step of finite differences; a thirtieth and 30 times it serve, too.

    Raises:
        DetachedLossError: What `fn` returns does not depend on the arguments.
        GradientCheckError: A derivative is wrong; it says at which leaf, of which order, in which
            mode, by how much, and the last operation before the leaf, where it is one.
        StructureError: `fn` does not compute in float64.
        UnsupportedGraphError: `fn` differs from run to run, or torch can run no mode of an order;
            or the call is inside a torch.func transform, or torch.compile.
        GradkitError: As in `value_and_grads`, for its arguments and options.

    Source:
        https://docs.jax.dev/en/latest/_autosummary/jax.test_util.check_grads.html, and
        `gradcheck(fast_mode=True)` of https://pytorch.org/docs/stable/notes/gradcheck.html
    """
    check_function(fn)
    _check_options(order, modes, atol=atol, rtol=rtol, eps=eps)
    arguments = read_arguments(args, argnums, is_variable=_is_variable)
    refuse_sparse(arguments)
    captured = captured_by((fn, args))
    with leave_inference_mode(record=True):
        leaves, spec = pytree.flatten(arguments.args)
        copies = {id(x): in_double(x) for x in leaves}  # by id: ties stay
        here = arguments.at(pytree.unflatten(spec, [copies[id(x)] for x in leaves]))

        def flat(inputs: Tensors) -> Tensors:
            return directional.dense_numbers(fn(*here.with_variables(inputs)))

        snapshot = Snapshot(captured, [*pytree.tensors(args), *filter(torch.is_tensor, captured)])
        options = tuple(dict.fromkeys(modes)), atol, rtol, eps
        at = Derivatives(flat, here.variables, snapshot.restored, *options)
        graph, inputs = _graph_in_double(at, partial(fn, *arguments.args))
        if wrong := at.first_wrong(order):
            *facts, leaf = wrong
            where = "args" if leaf is None else arguments.path(leaf)
            operation = None if leaf is None or not inputs else _last_operation(graph, inputs[leaf])
            error = _errors.wrong_derivative(where, operation, *facts)
            raise error
        if inputs and not any(map(graph.reaches, inputs)):
            raise errors.DetachedLossError(_errors.independent("fn"))


def _check_options(order: object, modes: Any, **positive: Any) -> None:
    checks = {"order": (is_positive_int(order), order, "a positive int", "2")}
    is_list = isinstance(modes, tuple | list | set | frozenset) and len(modes) > 0
    both = "a tuple of 'reverse', 'forward'", '("reverse", "forward")'
    checks["modes"] = is_list and all(m in _BOTH for m in modes), modes, *both
    for name, value in positive.items():
        is_right = isinstance(value, int | float) and value > 0
        checks[name] = is_right, value, "a positive number", "1e-6"
    for name, (is_right, value, expected, right) in checks.items():
        if not is_right:
            raise errors.OptionError(message(name, expected, repr(value), f"{name}={right}"))
    if torch.compiler.is_compiling() or transforms():
        raise errors.UnsupportedGraphError(message("check_grads", *_errors.INSIDE_A_TRANSFORM))


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    return is_number(leaf) and not (isinstance(leaf, nn.Parameter) and not leaf.requires_grad)


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
        raise _errors.not_in_double(f"torch's error: {first_line(error)}") from error
    if not first:
        raise errors.LeafTypeError(message("fn", *_errors.NO_TENSOR))
    if not all(map(partial(torch.allclose, rtol=1e-10, atol=1e-10, equal_nan=True), first, second)):
        raise errors.UnsupportedGraphError(message("fn", *_errors.OTHER_RESULT))
    with suppress(RuntimeError):  # it changes its arguments in place
        for dtype in {x.dtype for x in at.evaluate(roots)} - {torch.float64, torch.complex128}:
            raise _errors.not_in_double(f"a result in {dtype}")
    return graphs[0] if graphs else (Subgraph([]), [])


def _last_operation(graph: Subgraph, leaf: Tensor) -> str | None:
    """Return the custom Function that leads to a leaf, or the operation on it, if it is one."""
    above: Any = graph.leading_to([leaf]) if graph.reaches(leaf) else ()
    own = edge(leaf).node
    last = [node for node in above if any(child is own for child, _ in node.next_functions)]
    custom = [node for node in above if isinstance(node, BackwardCFunction)]
    names = {re.sub(r"Backward\d*$", "", type(node).__name__) for node in custom or last}
    return names.pop() if len(names) == 1 else None


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
            return [x.detach() for x in fn(inputs)]

    def first_wrong(self, order: int) -> tuple[Any, ...] | None:
        """Return the first derivative, up to an order, that is wrong."""
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
                right = dict.fromkeys(modes for modes, *_ in values if modes not in in_doubt)
                return at._at_worst_leaf(wrong[0], list(right))
        return None

    def _values(self, degree: int) -> dict[Kind, float]:
        """Return the derivatives of an order that torch can run; raise if there are none."""
        values: dict[Kind, float] = {}
        failures: list[Exception] = []
        for modes, api in product(product(self.modes, repeat=degree), directional.APIS):
            for kind in ((modes, api, True), (modes, api, False)):
                try:
                    values[kind] = self._value(kind)
                    break
                except Exception as error:  # fn itself runs: torch cannot run the mode
                    failures.append(error)
        # Forward mode may be without a formula; what has no gradient is not tried at all.
        runs = {modes for modes, *_ in values}
        if not runs or (degree == 1 and "reverse" in self.modes and ("reverse",) not in runs):
            text = _errors.no_derivative(degree, self.modes, failures[0])
            raise errors.UnsupportedGraphError(text) from failures[0]
        return values

    def _below(self, kind: Kind) -> Function:
        """Return the derivative below the last, a function of the inputs."""
        fn, (modes, api, varying) = self.fn, kind
        for number, mode in enumerate(modes[:-1]):
            direction = partial(random_like, 2 * number + (mode == "reverse"), varying=varying)
            fn = partial(directional.differentiate, fn, mode, api, direction)
        return fn

    def _tangents(self, kind: Kind, leaf: int | None) -> list[Tensor]:
        every = random_like(2 * len(kind[0]) - 2, self.point)
        return [x if leaf in (None, index) else x * 0 for index, x in enumerate(every)]

    def _value(self, kind: Kind, leaf: int | None = None) -> float:
        """Return what torch gives along the direction of the last mode, or its part in a leaf."""
        (modes, api, _), tangents = kind, self._tangents(kind, leaf)
        weights, is_reverse = partial(random_like, 2 * len(modes) - 1), modes[-1] == "reverse"
        direction = weights if is_reverse else lambda _: tangents
        last = partial(directional.differentiate, self._below(kind), modes[-1], api, direction)
        return dot(values := self.evaluate(last), tangents if is_reverse else weights(values))

    def _differences(self, kind: Kind, leaf: int | None, scale: float) -> list[float]:
        """Return a finite difference, those ahead and behind, and how much may be rounding."""
        fn, tangents = self._below(kind), self._tangents(kind, leaf)
        if self.symmetric:
            pairs = zip(self.point, tangents, strict=True)
            tangents = [(t + t.mH) / 2 if _is_symmetric(x) else t for x, t in pairs]
        step = self.eps * scale / (sqrt(dot(tangents, tangents)) or 1.0)
        shifts = ([step * sign * t for t in tangents] for sign in (1, 0, -1))
        try:
            ahead, here, behind = (self.evaluate(fn, shift) for shift in shifts)
        except Exception:  # a function of symmetric matrices alone raises beside the point
            if self.symmetric or not any(map(_is_symmetric, self.point)):
                raise
            return [nan] * 4
        weights = random_like(2 * len(kind[0]) - 1, here)
        one = dot(weights, list(map(torch.sub, ahead, here))) / step
        other = dot(weights, list(map(torch.sub, here, behind))) / step
        size = dot([x.abs() for x in weights], [x.abs() for x in here]) / step
        return [(one + other) / 2, one, other, _ROUNDING * size]

    def _agrees(self, kind: Kind, value: float, leaf: int | None = None) -> bool:
        for scale in _STEPS:
            expected, *_, rounding = self._differences(kind, leaf, scale)
            size, gap = max(abs(value), abs(expected)), abs(value - expected)
            if isfinite(size) and gap <= self.atol + self.rtol * size + rounding:
                return True
        return False

    def _at_worst_leaf(self, kind: Kind, right: list[tuple[str, ...]]) -> tuple[Any, ...]:
        """Return what `_errors.wrong_derivative` takes, and the leaf where it is farthest off."""
        gap, leaf, value = -1.0, None, self._value(kind)
        for index in range(len(self.point)):
            here = self._value(kind, index)
            off = abs(here - self._differences(kind, index, 1.0)[0])
            if not self._agrees(kind, here, index) and gap < inf and not off <= gap:
                gap, leaf, value = off if isfinite(off) else inf, index, here
        expected, *sides, _ = self._differences(kind, leaf, 1.0)
        pairs = sides, [expected, self._differences(kind, leaf, 30.0)[0]]
        kinks = [p for p in pairs if abs(p[0] - p[1]) > _KINK * max(abs(value), *map(abs, p))]
        return kind[:2], expected, value, self.symmetric, right, kinks, leaf


def _is_symmetric(x: Tensor) -> bool:
    return x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.allclose(x, x.mH, rtol=1e-6)
