"""hvp: the Hessian of a function times a direction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradkit._compat.transforms import detached, ordinary_mode
from gradkit._core import pytree
from gradkit._core.options import check_option
from gradkit._core.pytree import PyTree
from gradkit.errors import (
    GradkitError,
    LeafTypeError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)
from gradkit.func._level import cast_to, differentiate, gradient_of_the_sum
from gradkit.func._variables import Variables, owned, read_variables

Mode: TypeAlias = Literal["forward-over-reverse", "reverse-over-reverse"]


def hvp(
    fn: Callable[..., Any],
    primals: PyTree,
    tangents: PyTree,
    *,
    mode: Mode = "forward-over-reverse",
) -> tuple[PyTree, PyTree]:
    """Return the gradient of a function, and its Hessian times a direction, in two passes.

    Attention inside of `fn` is computed by torch's plain formula: the fused kernels have no second
    derivative.

    Example:
        >>> import torch, gradkit
        >>> def loss(w):
        ...     return (w**3).sum()
        >>> gradkit.func.hvp(loss, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
        (tensor([ 3., 12.]), tensor([6., 0.]))

    Args:
        fn: Returns real floating-point losses of one element each, which are added.
        primals: Where to differentiate: a tuple (no named one) is the positional arguments of
            `fn`, any other tree its one argument. Its leaves are as in `value_and_grads`, but real.
        tangents: The direction, a tree like `primals` of tensors of the same shapes and dtypes. A
            None in it is zero. A tensor that stands in several places of `primals` has the same
            direction in all of them.
        mode: `"forward-over-reverse"`, a forward pass through the gradient, takes the least time
            and memory; `"reverse-over-reverse"` is for what has no forward-mode derivative.

    Returns:
        `(grads, hv)`, both like `primals`, their leaves as in `value_and_grads`.

    Raises:
        DetachedLossError: No loss depends on the primals (not noticed under torch.compile).
        LeafTypeError: A leaf is no tensor that has a gradient, or complex.
        NotScalarLossError: A loss has not exactly one element.
        StructureError: `tangents` do not match `primals`, or there is no such mode.
        UnreachedParamError: There is nothing to differentiate by.
        UnsupportedGraphError: torch.func cannot enter what `fn` does, or gets it silently wrong.

    Source:
        Pearlmutter 1994, "Fast Exact Multiplication by the Hessian"; its arguments are those of
        `torch.autograd.functional.hvp`, https://pytorch.org/docs/stable/autograd.html
    """
    check_option("mode", mode, ("forward-over-reverse", "reverse-over-reverse"))
    args = primals if type(primals) is tuple else (primals,)
    given = read_variables(args, tuple(range(len(args))))
    directions = _directions(given, primals, tangents)

    def grads_at(*tensors: Tensor) -> tuple[Tensor, ...]:
        here = given.at(given.with_tensors(tensors))
        out = differentiate(fn, here, {}, gradient_of_the_sum, has_aux=False, scalar=True)
        return tuple(out.grads[0])

    with _one_at_a_time(), ordinary_mode(), sdpa_kernel(SDPBackend.MATH):
        point, along = (tuple(map(detached, x)) for x in (given.tensors, directions))
        if mode == "forward-over-reverse":
            grads, products = _forward(grads_at, point, along)
        else:
            grads, pull = vjp(grads_at, *point)  # type: ignore[misc]
            products = pull(along)
    results = []
    for found in (grads, products):
        # In forward mode, torch makes float64 of a 0-dim float32 times a number.
        right = cast_to(given.dtypes, map(detached, found))
        tree = given.to_tree(owned(right, given.tensors))
        results.append(tree if type(primals) is tuple else tree[0])
    return results[0], results[1]


# torch's levels of forward mode are those of the process, and so is the choice of a kernel.
_LOCK = RLock()


def _one_at_a_time() -> AbstractContextManager[object]:
    return nullcontext() if torch.compiler.is_compiling() else _LOCK


def _forward(
    fn: Callable[..., Any], point: tuple[Tensor, ...], along: tuple[Tensor, ...]
) -> tuple[Any, Any]:
    if torch.compiler.is_compiling():
        return cast("tuple[Any, Any]", jvp(fn, point, along))
    try:
        return cast("tuple[Any, Any]", jvp(fn, point, along))
    except RuntimeError as error:
        if "forward AD" not in str(error) or isinstance(error, GradkitError):
            raise
        raise UnsupportedGraphError(
            message(
                "fn",
                "operations that have a forward-mode derivative",
                str(error).partition("\n")[0],
                'mode="reverse-over-reverse"',
            )
        ) from error


def _directions(given: Variables, primals: PyTree, tangents: PyTree) -> list[Tensor]:
    """Return one direction for each variable."""
    _, spec = pytree.flatten(primals)
    along = pytree.flatten_up_to(spec, "primals", tangents, "tangents")
    found: dict[int, Tensor] = {}
    for index, (slot, tangent) in enumerate(zip(given.slots, along, strict=True)):
        if slot is None:
            continue
        variable = given.tensors[slot]
        where = pytree.path(spec, index, "tangents")
        if variable.dtype.is_complex:
            raise LeafTypeError(
                message(
                    pytree.path(spec, index, "primals"),
                    "a real tensor",
                    describe(variable),
                    "differentiate by torch.view_as_real of it",
                )
            )
        tangent = torch.zeros_like(variable) if tangent is None else tangent
        _check(tangent, variable, where)
        if not _same(found.setdefault(slot, tangent), tangent):
            raise StructureError(
                message(
                    where,
                    "the direction that the same tensor has in its first place",
                    "another one",
                    "give the one tensor one direction, wherever it stands",
                )
            )
    return [found[slot] for slot in range(len(given.tensors))]


def _check(tangent: object, variable: Tensor, where: str) -> None:
    if not isinstance(tangent, Tensor):
        raise LeafTypeError(
            message(where, "a tensor or None", describe(tangent), "torch.zeros_like(primal)")
        )
    if (tangent.shape, tangent.dtype, tangent.device) != (
        variable.shape,
        variable.dtype,
        variable.device,
    ):
        raise StructureError(
            message(where, describe(variable), describe(tangent), "torch.randn_like(primal)")
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (not torch.compiler.is_compiling() and torch.equal(a, b))
