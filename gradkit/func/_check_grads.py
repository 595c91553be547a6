"""check_grads: whether torch's derivatives of a function are those of the function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.call import check_function, is_positive_int
from gradkit._core.graph import Subgraph
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.user_code import captured_by
from gradkit._state.snapshot import Snapshot
from gradkit.errors import (
    DetachedLossError,
    GradientCheckError,
    LeafTypeError,
    OptionError,
    StructureError,
    UnsupportedGraphError,
    message,
)
from gradkit.func._arguments import ArgNums, Arguments, read_arguments, refuse_sparse
from gradkit.func._derivative_check import DerivativeCheck, Disagreement, Tolerance
from gradkit.func._directional import FORWARD, REVERSE, Directional, Tensors
from gradkit.func._errors import independent
from gradkit.func._find_wrong_op import differentiable, find_wrong_op, is_number

Mode = Literal["reverse", "forward"]


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
    torch.func, is compared with finite differences of the derivative before it, along a random
    direction: a few evaluations, whatever the size. It runs on float64 copies, each time from the
    same random state; `.grad`, modules and random states are as before afterwards.

    Example:
        >>> import torch, gradkit
        >>> gradkit.func.check_grads(lambda w, x: (w @ x).tanh(), torch.randn(2, 3), torch.ones(3))
        >>> try:
        ...     gradkit.func.check_grads(lambda w: w.detach() * w, torch.ones(2))
        ... except gradkit.GradientCheckError as error:
        ...     print(error.leaf, error.order, error.mode, error.operation)
        args[0] 1 reverse torch.Tensor.detach

    Args:
        fn: Takes tensors, in any trees, and returns a tree of tensors of any shapes; what is no
            floating-point or complex tensor in it does not count. Tensors that it refers to must
            be float64, or be passed as arguments.
        args: Its arguments. Those that `argnums` does not name are constants; modules among them
            are copied.
        argnums: As in `value_and_grads`: which arguments to differentiate with respect to. A leaf
            that is no floating-point or complex tensor is a constant.
        order: The highest derivative.
        modes: A tuple of `"reverse"`, `"forward"`, or both. A mode in which torch itself raises, as
            it has no formula, is left out; if no mode of an order is left, the call raises.
        atol: The largest absolute error of a derivative along a random direction, beside `rtol`
            and rounding. Scale a function of small derivatives up.
        rtol: The largest relative error.
        eps: The length of the step of finite differences. A derivative that agrees at a step of a
            thirtieth of it, or of 30 times it, is right, too.

    Raises:
        DetachedLossError: What `fn` returns does not depend on the arguments.
        GradientCheckError: A derivative is wrong; the message and the attributes of the error say
            at which leaf, of which order, in which mode, by how much, and, where a single operation
            is wrong by itself, by which operation.
        LeafTypeError: `fn` returns no floating-point tensor; a leaf is sparse.
        OptionError: An option has no such value.
        StructureError: `fn` does not compute in float64.
        UnreachedParamError: The arguments hold nothing to differentiate.
        UnsupportedGraphError: `fn` differs from run to run, or torch can run no mode of an order;
            or the call is inside a torch.func transform, or torch.compile.
        GradkitError: As in `value_and_grads`, for its arguments.

    Source:
        `jax.test_util.check_grads`,
        https://docs.jax.dev/en/latest/_autosummary/jax.test_util.check_grads.html; the fast mode
        of `torch.autograd.gradcheck`, https://pytorch.org/docs/stable/notes/gradcheck.html
    """
    check_function(fn)
    tolerance = _check_options(order, modes, atol, rtol, eps)
    _refuse_transforms()
    arguments = read_arguments(args, argnums, is_variable=_is_variable)
    refuse_sparse(arguments)
    tensors = pytree.tensors(args)
    captured = captured_by((fn, args))
    tensors += [x for x in captured if isinstance(x, Tensor)]
    with leave_inference_mode(record=True):
        snapshot = Snapshot(captured, tensors)
        here = arguments.at(_in_double(arguments.args))

        def flat(inputs: Tensors) -> Tensors:
            return differentiable(fn(*here.with_variables(inputs)))

        directional = Directional(flat, here.variables, snapshot.restored)
        depends = _check_values(directional, partial(fn, *arguments.args))
        check = DerivativeCheck(directional, tuple(dict.fromkeys(modes)), tolerance)
        disagreement = check.first_disagreement(order)
        if disagreement is not None:
            op = find_wrong_op(check, disagreement.product.modes)
            _raise(disagreement, arguments, op)
        if not depends:
            raise DetachedLossError(independent("fn"))


def _check_options(
    order: object, modes: Sequence[Mode], atol: float, rtol: float, eps: float
) -> Tolerance:
    if not is_positive_int(order):
        raise OptionError(message("order", "a positive int", repr(order), "order=2"))
    is_list = isinstance(modes, tuple | list | set | frozenset) and len(modes) > 0
    if not is_list or any(mode not in (REVERSE, FORWARD) for mode in modes):
        fix = 'modes=("reverse", "forward")'
        raise OptionError(message("modes", "a tuple of 'reverse', 'forward'", repr(modes), fix))
    for name, value in (("atol", atol), ("rtol", rtol), ("eps", eps)):
        if not isinstance(value, int | float) or not value > 0:
            raise OptionError(message(name, "a positive number", repr(value), f"{name}=1e-6"))
    return Tolerance(atol, rtol, eps)


def _refuse_transforms() -> None:
    if torch.compiler.is_compiling() or transforms():
        expected = "a call outside of torch.func's transforms and of torch.compile"
        fix = "call it outside, on the transformed function"
        raise UnsupportedGraphError(message("check_grads", expected, "one inside", fix))


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    return is_number(leaf) and not (isinstance(leaf, nn.Parameter) and not leaf.requires_grad)


def _in_double(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with float64 and complex128 copies of their tensors and modules."""
    leaves, spec = pytree.flatten(args)
    copies: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, nn.Module):
            copies[id(leaf)] = deepcopy(leaf).double()
        elif isinstance(leaf, Tensor):
            dtype = torch.complex128 if leaf.is_complex() else torch.float64
            copy = leaf.detach().clone()
            copies[id(leaf)] = copy.to(dtype) if is_number(leaf) else copy
    converted: tuple[Any, ...] = pytree.unflatten(spec, [copies.get(id(x), x) for x in leaves])
    return converted


def _check_values(directional: Directional, original: Callable[[], Any]) -> bool:
    """Raise unless a function computes the same twice, in float64; return if the inputs matter."""
    depends: list[bool] = []
    dtypes: list[torch.dtype] = []

    def with_graph(inputs: Tensors) -> Tensors:
        outputs = directional.fn([x.requires_grad_() for x in inputs])
        graph = Subgraph(outputs)
        depends.append(any(map(graph.reaches, inputs)))
        dtypes.extend(x.dtype for x in graph.roots)
        return outputs

    try:
        first, second = (directional.evaluate(directional.fn) for _ in range(2))
    except RuntimeError as error:
        with directional.isolated():
            original()  # raises the same, unless it is a matter of dtypes
        line = str(error).partition("\n")[0].rstrip(".")
        raise StructureError(message("fn", _IN_DOUBLE, f"torch's error: {line}", _FIX)) from error
    if not first:
        expected = "at least one floating-point or complex tensor"
        raise LeafTypeError(message("fn", expected, "none", "return the tensors to differentiate"))
    pairs = zip(first, second, strict=True)
    if not all(torch.allclose(x, y, 1e-10, 1e-10, equal_nan=True) for x, y in pairs):
        raise UnsupportedGraphError(message("fn", *_CHANGES))
    with suppress(RuntimeError):  # it changes its arguments in place
        directional.evaluate(with_graph)
    for dtype in set(dtypes) - {torch.float64, torch.complex128}:
        raise StructureError(message("fn", _IN_DOUBLE, f"a result in {dtype}", _FIX))
    return any(depends) or not depends


_CHANGES = (
    "a function that gives the same when it runs again from the same random state",
    "another result than before: it reads something that has changed since",
    "pass what changes as an argument, and seed a generator of its own inside of fn",
)
_IN_DOUBLE = "a function that computes in float64 from float64 copies of its arguments"
_FIX = (
    "leave out casts, and pass the tensors and modules that it uses as arguments, "
    "check_grads(fn, params, module), or call module.double()"
)


def _raise(wrong: Disagreement, arguments: Arguments, op: str | None) -> NoReturn:
    p, order = wrong.product, len(wrong.product.modes)
    where = "args" if wrong.leaf is None else arguments.path(wrong.leaf)
    along = f"for the derivative of order {order} along a random direction"
    expected = f"{wrong.expected:.6g} (finite differences) {along}"
    got = f"{p.value:.6g} from {p}" + (f", in {op}" if op else "")
    text = message(where, expected, got, _fix(wrong, op))
    raise GradientCheckError(text, where, order, p.mode, abs(p.value - wrong.expected), op)


def _fix(wrong: Disagreement, op: str | None) -> str:
    if wrong.kink is not None:
        one, other = wrong.kink
        pair = f"finite differences give {one:.6g} and {other:.6g}"
        return f"check at another point: fn has a kink or a pole at this one ({pair})"
    fixes = []
    if op:
        is_torch_s = op.startswith("torch.")
        out = f"write {op} out by other operations"
        fixes.append(out if is_torch_s else f"correct the derivative of {op}")
    if wrong.symmetric:
        fixes.append("make the matrix symmetric in fn, (a + a.mT) / 2")
    if wrong.agreeing:
        fixes.append(f"differentiate by what agrees: {', '.join(wrong.agreeing)}")
    return "; or ".join(fixes) or "look for detach(), .data or a custom backward in fn"
