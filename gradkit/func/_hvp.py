"""hvp: the Hessian of a function times a direction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import RLock
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradkit._core import pytree
from gradkit._core.options import check_function, check_option, check_optional_bool
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.func._arguments import Arguments, read_arguments
from gradkit.func._level import cast_to, differentiate, gradient_of_the_sum, named_errors

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
        fn: Returns real floating-point losses of one element each, which are added.
        primals: Where to differentiate: a tuple (no named one) is the positional arguments of
            `fn`, any other tree its one argument. Its leaves are as in `value_and_grads`, but real;
            a module stands for the dict of its named parameters here, too.
        tangents: The direction, a tree like `primals` of tensors of the same shapes and dtypes. A
            None in it is zero. A tensor that stands in several places of `primals` has the same
            direction in all of them.
        mode: `"forward-over-reverse"`, a forward pass through the gradient, takes the least time
            and memory; `"reverse-over-reverse"` is for what has no forward-mode derivative.
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
    several = type(primals) is tuple
    args = primals if several else (primals,)
    arguments = read_arguments(args, tuple(range(len(args))), None if several else "primals")
    directions = _directions(arguments, arguments.args if several else arguments.args[0], tangents)

    refused: list[str | None] = []

    def grads_at(*tensors: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        here = arguments.at(arguments.with_variables(tensors))
        result = differentiate(fn, here, {}, gradient_of_the_sum, has_aux=False, create_graph=None)
        refused[:] = [result.refused]
        pairs = zip(result.grads[0], here.variables, strict=True)
        return tuple(torch.zeros_like(x) if g is None else g for g, x in pairs), result.values

    one_at_a_time = nullcontext() if torch.compiler.is_compiling() else _LOCK
    with one_at_a_time, leave_inference_mode(record=True), sdpa_kernel(SDPBackend.MATH):
        tensors = (*arguments.variables, *directions)
        if create_graph is False:
            tensors = tuple(tensor.detach() for tensor in tensors)
        point, along = tensors[: len(directions)], tensors[len(directions) :]
        if mode == "forward-over-reverse":
            run = partial(jvp, grads_at, point, along, has_aux=True)
            grads, products, losses = named_errors(lambda: cast("tuple[Any, Any, Any]", run()))
        else:
            grads, pull, losses = vjp(grads_at, *point, has_aux=True)  # type: ignore[misc]
            products = pull(along)
    if create_graph is False:
        grads, products = ([x.detach() for x in tensors] for tensors in (grads, products))
        losses = ()
    results = []
    for tensors in (grads, products):
        # In forward mode, torch makes float64 of a 0-dim float32 times a number.
        cast_grads = cast_to(arguments.dtypes, list(tensors))
        tree = arguments.finish(cast_grads, losses=losses, refused=refused[0])
        results.append(tree if several else tree[0])
    return results[0], results[1]


def _directions(arguments: Arguments, primals: PyTree, tangents: PyTree) -> list[Tensor]:
    """Return one direction for each variable."""
    _, spec = pytree.flatten(primals)
    by_leaf = pytree.flatten_up_to(spec, "primals", tangents, "tangents")
    by_variable: dict[int, Tensor] = {}
    for index, (slot, tangent) in enumerate(zip(arguments.params.slots, by_leaf, strict=True)):
        if slot is None:
            continue
        variable = arguments.variables[slot]
        if variable.dtype.is_complex:
            path = pytree.path(spec, index, "primals")
            fix = "differentiate with respect to torch.view_as_real of it"
            raise LeafTypeError(message(path, "a real tensor", describe(variable), fix))
        where = pytree.path(spec, index, "tangents")
        tangent = torch.zeros_like(variable) if tangent is None else tangent
        _check(tangent, variable, where)
        if not _same(by_variable.setdefault(slot, tangent), tangent):
            expected = "the direction that the same tensor has in its first place"
            fix = "give a tensor the same direction in all its places"
            raise StructureError(message(where, expected, "another one", fix))
    return [by_variable[slot] for slot in range(len(arguments.variables))]


def _check(tangent: object, variable: Tensor, where: str) -> None:
    if not isinstance(tangent, Tensor):
        got, fix = describe(tangent), "torch.zeros_like(primal)"
        raise LeafTypeError(message(where, "a tensor or None", got, fix))
    here, there = ((x.shape, x.dtype, x.device) for x in (tangent, variable))
    if here != there:
        expected, got = describe(variable), describe(tangent)
        raise StructureError(message(where, expected, got, "torch.randn_like(primal)"))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (not torch.compiler.is_compiling() and torch.equal(a, b))
