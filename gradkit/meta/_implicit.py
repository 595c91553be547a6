"""Implicit differentiation: the gradient of a minimum, whatever algorithm found it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gradkit._compat.transforms import is_dual, transforms
from gradkit._core import pytree
from gradkit._core.options import check_option, is_positive_int
from gradkit._core.pytree import PyTree
from gradkit.errors import (
    LeafTypeError,
    OptionError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)
from gradkit.meta._optimality import (
    LinearSolver,
    OptimalityCondition,
    Product,
    conjugate_gradients,
    neumann,
)
from gradkit.meta._trees import InnerParams, open_tensors, read_inner_params

# The caller's: of a linear map and a right-hand side, trees like params; returns the solution.
TreeSolver = Callable[[Callable[[PyTree], PyTree], PyTree], PyTree]


def implicit(
    solver: Callable[[PyTree, PyTree], PyTree],
    inner_loss: Callable[[PyTree, PyTree], Tensor],
    *,
    solve: Literal["cg", "neumann"] | TreeSolver = "cg",
    maxiter: int = 100,
    tol: float = 1e-6,
    damping: float = 0.0,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Return a function that minimizes an inner loss, and is differentiated at the minimum.

    Its gradient comes from the optimality condition, d inner_loss / d params = 0, and one linear
    system with the inner Hessian: memory does not grow with the steps of the solver. It is exact at
    a minimum; away from one it is as wrong as the solver's result.

    Example:
        >>> import torch, gradkit
        >>> def inner(w, scale):
        ...     return ((w - 3.0) ** 2 + scale * w**2).sum()
        >>> def closed_form(w, scale):
        ...     return 3.0 / (1 + scale) * torch.ones_like(w)
        >>> find = gradkit.meta.implicit(closed_form, inner)
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> w = find(torch.zeros(1), scale)
        >>> gradkit.value_and_grads(w.sum(), scale)
        (tensor(2.), tensor(-1.3333))

    Args:
        solver: `solver(params, outer)` returns params that minimize `inner_loss(params, outer)`, by
            any means; it is not differentiated.
        inner_loss: One real element, twice differentiable, computed from its arguments alone.
        solve: How `H u = v` is solved, H being the inner Hessian: `"cg"`, conjugate gradients, for
            a positive definite H; `"neumann"`, a Neumann series with a step of one over the largest
            eigenvalue; or a function `solve(matvec, v)` of trees like params.
        maxiter: The largest number of products with H in a solve.
        tol: The solve ends when the norm of the residual, relative to that of v, is below this.
        damping: This times the identity is added to H.

    Returns:
        `find(params, outer)`, which returns what `solver` does, differentiable with respect to
        `outer`. Params, where the solver starts, have no gradient; a frozen `nn.Parameter` stays as
        it is. A solve that does not reach `tol` gives a `GradkitWarning` with its residual.

    Raises:
        OptionError: An option has no such value.
        StructureError: Raised by `find` if the solver returns another tree.
        UnsupportedGraphError: Raised by `find` if the inner loss uses a tensor from outside that
            requires grad, and inside torch.func; by a backward pass with `create_graph=True`, since
            the gradient cannot be differentiated again.

    Source:
        Rajeswaran et al. 2019, "Meta-Learning with Implicit Gradients", equation (6),
        https://arxiv.org/abs/1909.04630; Lorraine et al. 2020, algorithms 2 and 3,
        https://arxiv.org/abs/1911.02590
    """
    _check_options(solve, maxiter, tol=tol, damping=damping)

    def find(params: PyTree, outer: PyTree) -> PyTree:
        inner = read_inner_params(params)
        outer_tensors, close_outer = open_tensors(outer)
        _check_tensors(inner.variables, outer_tensors)
        minimum = _minimize(solver, inner, close_outer([x.detach() for x in outer_tensors]))
        condition = OptimalityCondition(
            lambda at, by: inner_loss(inner.tree(at), close_outer(by)),
            _linear_solver(solve, inner, maxiter, tol),
            tol,
            damping,
        )
        return inner.tree(condition.attach(minimum, outer_tensors))

    return find


def _check_options(solve: object, maxiter: object, **numbers: object) -> None:
    if not callable(solve):
        check_option("solve", solve, ("cg", "neumann"))
    if not is_positive_int(maxiter):
        raise OptionError(message("maxiter", "a positive int", repr(maxiter), "maxiter=100"))
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            expected = "a number that is not negative"
            raise OptionError(message(name, expected, repr(value), f"{name}=1e-6"))


def _check_tensors(params: list[Tensor], outer: list[Tensor]) -> None:
    if transforms() or any(map(is_dual, outer)):
        expected = "a call outside torch.func's transforms and forward mode"
        fix = "gradkit.value_and_grads(loss(find(params, outer)), outer); or unroll"
        raise UnsupportedGraphError(message("find(params, outer)", expected, "one inside", fix))
    if any(x.is_complex() for x in params):
        fix = "torch.view_as_real(tensor)"
        raise LeafTypeError(message("params", "real tensors", "a complex one", fix))


def _minimize(solver: Callable[..., PyTree], params: InnerParams, outer: PyTree) -> list[Tensor]:
    """Return new tensors: the variables at the minimum."""
    # Copies: a solver may change its start in place, as an optimizer does.
    start = params.tree([x.detach().clone() for x in params.variables])
    root = "solver(params, outer)"
    leaves = pytree.flatten_up_to(params.spec, "params", solver(start, outer), root)
    minimum = params.per_variable(leaves)
    for slot, leaf in zip(params.slots, leaves, strict=True):
        if slot is None:
            continue
        shape = params.variables[slot].shape
        fits = isinstance(leaf, Tensor) and leaf.shape == shape
        if not fits or not (leaf is minimum[slot] or torch.equal(leaf, minimum[slot])):
            expected = f"one tensor of shape {tuple(shape)} wherever the variable stands"
            fix = "return params of the same shapes, and tied ones equal"
            raise StructureError(message(root, expected, describe(leaf), fix))
    return [x.detach().clone() for x in minimum]


def _linear_solver(
    method: str | TreeSolver, params: InnerParams, maxiter: int, tol: float
) -> LinearSolver:
    """Return the chosen solver, on lists of the variables; the caller's own is one of trees."""
    if not callable(method):
        solver = conjugate_gradients if method == "cg" else neumann
        return lambda product, v: solver(product, v, maxiter, tol)
    # Directions are trees like params that are zero where it is fixed.
    zeros = [None if leaf is None else torch.zeros_like(leaf) for leaf in params.leaves]
    directions = replace(params, leaves=zeros)

    def solve(product: Product, v: list[Tensor]) -> list[Tensor]:
        def matvec(u: PyTree) -> PyTree:
            return directions.tree(product(_read_direction(directions, u, "matvec(u)")))

        # Clones: the solver may change its arguments in place.
        u = method(matvec, directions.tree([x.clone() for x in v]))
        return _read_direction(directions, u, "solve(matvec, v)")

    return solve


def _read_direction(params: InnerParams, tree: PyTree, root: str) -> list[Tensor]:
    leaves = params.per_variable(pytree.flatten_up_to(params.spec, "params", tree, root))
    for leaf, tensor in zip(leaves, params.variables, strict=True):
        if not isinstance(leaf, Tensor) or leaf.shape != tensor.shape:
            expected = f"a tree like v, with a tensor of shape {tuple(tensor.shape)}"
            fix = "return the solution u of matvec(u) = v"
            raise StructureError(message(root, expected, describe(leaf), fix))
    return [leaf.to(tensor.dtype) for leaf, tensor in zip(leaves, params.variables, strict=True)]
