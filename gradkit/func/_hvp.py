"""hvp: the Hessian of a function times a direction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import RLock
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradkit._core import pytree
from gradkit._core.call import check_function, check_option, check_optional_bool
from gradkit._core.leaf_arithmetic import same_values
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit.errors import (
    LeafTypeError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
    warn_fallback,
)
from gradkit.func._arguments import Arguments, read_arguments
from gradkit.func._differentiate import cast_to, cut_of, differentiate, gradient_of_the_sum
from gradkit.func._errors import ZERO_TENSOR, named_errors

Mode: TypeAlias = Literal["forward-over-reverse", "reverse-over-reverse"]

# torch's levels of forward mode are those of the process, and so is the choice of a kernel.
_LOCK = RLock()


def hvp(
    fn: Callable[..., Any],
    primals: PyTree,
    tangents: PyTree,
    *,
    mode: Mode = "forward-over-reverse",
    create_graph: bool | None = None,
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
        fn: Returns real floating-point losses of one element each, which are added. A bare tuple of
            two raises, as in `value_and_grads`.
        primals: Where to differentiate: a tuple (no named one) is the positional arguments of
            `fn`, any other tree its one argument. Its leaves are as in `value_and_grads`, but real;
            a module stands for the dict of its named parameters here, too.
        tangents: The direction, a tree like `primals` of tensors of the same shapes and dtypes. A
            None in it is zero. A tensor that stands in several places of `primals` has the same
            direction in all of them.
        mode: `"forward-over-reverse"`, a forward pass through the gradient, takes the least time
            and memory; `"reverse-over-reverse"` is for what has no forward-mode derivative, and
            taken, with a `GradkitWarning`, where torch's formula for that fails, as of `mse_loss`.
        create_graph: As in `value_and_grads`, for a third derivative.

    Returns:
        `(grads, hv)`, both like `primals`, their leaves as in `value_and_grads`.

    Raises:
        LeafTypeError: A leaf is no tensor that has a gradient, or complex.
        OptionError: An option has no such value.
        StructureError: `tangents` do not match `primals`.
        GradkitError: As in `value_and_grads`.

    Source:
        Pearlmutter 1994, "Fast Exact Multiplication by the Hessian"; its arguments are those of
        `torch.autograd.functional.hvp`, https://pytorch.org/docs/stable/autograd.html
    """
    check_function(fn)
    check_option("mode", mode, ("forward-over-reverse", "reverse-over-reverse"))
    check_optional_bool("create_graph", create_graph)
    arguments = read_primals(primals)
    directions = read_directions(arguments, tangents)
    refused: list[str | None] = []

    def grads_at(*tensors: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        here = arguments.at(arguments.with_variables(tensors))
        run = partial(gradient_of_the_sum, may_be_aux=True)
        result = differentiate(fn, here, {}, run, has_aux=False, create_graph=None)
        refused[:] = [result.refused]
        pairs = zip(result.grads[0], here.variables, strict=True)
        return tuple(torch.zeros_like(x) if g is None else g for g, x in pairs), result.values

    cut = cut_of(create_graph)
    enabled = nullcontext() if cut is list else torch.enable_grad()  # as in `differentiate`
    with (
        one_forward_level(),
        leave_inference_mode(record=True),
        enabled,
        sdpa_kernel(SDPBackend.MATH),
    ):
        point, along = tuple(cut(arguments.variables)), tuple(cut(directions))
        grads, products, losses = _run(grads_at, point, along, mode)
    if cut is not list:
        grads, products, losses = cut(grads), cut(products), []
    results = []
    for tensors in (grads, products):
        # In forward mode, torch makes float64 of a 0-dim float32 times a number.
        cast_grads = cast_to(arguments.dtypes, list(tensors))
        tree = arguments.grads_to_tree(cast_grads, losses=losses, refused=refused[0])
        results.append(tree)
    return results[0], results[1]


def _run(
    grads_at: Callable[..., Any], point: tuple[Tensor, ...], along: tuple[Tensor, ...], mode: Mode
) -> tuple[Any, Any, list[Tensor]]:
    """Return the gradients at a point, their derivative along a direction, and the losses."""

    def forward() -> tuple[Any, Any, list[Tensor]]:
        return cast("tuple[Any, Any, Any]", jvp(grads_at, point, along, has_aux=True))

    def reverse() -> tuple[Any, Any, list[Tensor]]:
        grads, pull, losses = vjp(grads_at, *point, has_aux=True)  # type: ignore[misc]
        return grads, pull(along), losses

    if mode == "reverse-over-reverse":
        return named_errors(reverse, nested=True)
    try:
        return named_errors(forward, nested=True)
    except UnsupportedGraphError as error:
        # Some formulas of torch, that of mse_loss for one, write on the tangent of a constant.
        if ZERO_TENSOR not in str(error):
            raise
    warn_fallback(
        "hvp fell back from forward-over-reverse to reverse-over-reverse, and called fn again: "
        f"torch's forward mode failed ({ZERO_TENSOR}), as it does for mse_loss. "
        'mode="reverse-over-reverse" saves the first call.'
    )
    return named_errors(reverse, nested=True)


def one_forward_level() -> AbstractContextManager[object]:
    """Wait until no other thread is in forward mode."""
    return nullcontext() if torch.compiler.is_compiling() else _LOCK


def read_primals(primals: PyTree) -> Arguments:
    """Check and flatten primals: a tuple of arguments, or another tree, the only argument."""
    if type(primals) is tuple:
        return read_arguments(primals, tuple(range(len(primals))))
    return read_arguments((primals,), 0, "primals")


def read_directions(arguments: Arguments, tangents: PyTree, root: str = "tangents") -> list[Tensor]:
    """Return one direction for each variable."""
    of = arguments.root or "primals"
    primals = arguments.args[0] if arguments.single else arguments.args
    _, spec = pytree.flatten(primals)
    by_leaf = pytree.flatten_up_to(spec, of, tangents, root)
    by_variable: dict[int, Tensor] = {}
    for index, (slot, tangent) in enumerate(zip(arguments.params.slots, by_leaf, strict=True)):
        if slot is None:
            continue
        variable = arguments.variables[slot]
        if variable.dtype.is_complex:
            path = pytree.path(spec, index, of)
            fix = "differentiate with respect to torch.view_as_real of it"
            raise LeafTypeError(message(path, "a real tensor", describe(variable), fix))
        where = partial(pytree.path, spec, index, root)
        tangent = torch.zeros_like(variable) if tangent is None else tangent
        check_direction(tangent, variable, where, "torch.randn_like(primal)")
        if not _same(by_variable.setdefault(slot, tangent), tangent):
            expected = "the direction that the same tensor has in its first place"
            fix = "give a tensor the same direction in all its places"
            raise StructureError(message(where(), expected, "another one", fix))
    return [by_variable[slot] for slot in range(len(arguments.variables))]


def check_direction(direction: object, like: Tensor, where: Callable[[], str], fix: str) -> None:
    """Raise if a tangent or cotangent is not a tensor like this one."""
    if not isinstance(direction, Tensor):
        raise LeafTypeError(message(where(), "a tensor or None", describe(direction), fix))
    here, there = ((x.shape, x.dtype, x.device) for x in (direction, like))
    if here != there:
        raise StructureError(message(where(), describe(like), describe(direction), fix))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (not torch.compiler.is_compiling() and same_values(a, b))
