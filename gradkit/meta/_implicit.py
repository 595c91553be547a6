"""Implicit differentiation: the gradient of a minimum, whatever algorithm found it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradkit import errors, tree
from gradkit._autograd.engine import inner_grads
from gradkit._autograd.passes import InnerPass
from gradkit._checks import eager_graph, recomputations
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._compat.transforms import carries_graph, is_dual, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import check_bool, check_function, check_option, is_positive_int
from gradkit._core.graph import Subgraph
from gradkit._core.leaf_arithmetic import same_values
from gradkit._core.ownership import without_inference
from gradkit._core.params import Grads, Params, Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import hooks_made
from gradkit._state.rerun import RerunState, recording_writes
from gradkit._state.snapshot import put_back_on_error
from gradkit._torch_bugs.monitor import ForwardMonitor, OpMonitor
from gradkit.errors import describe, message, warn_fallback
from gradkit.func import _make_functional as checkpoints
from gradkit.func._products import write_counts
from gradkit.meta._inner_step import read_inner_params, read_loss, refuse_captured, runs_user_code

# Multiplies a vector, given as a list of tensors, by the matrix.
MatrixVectorProduct: TypeAlias = Callable[[Tensors], Tensors]
LinearSolver: TypeAlias = Callable[[MatrixVectorProduct, Tensors], Tensors]
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
    warn: bool = True,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Return a function that minimizes an inner loss, and is differentiated at the minimum.

    Its gradient comes from the optimality condition, d inner_loss / d params = 0, and one linear
    system with the inner Hessian: exact at a minimum, whatever the steps of the solver.

    Example:
        >>> import torch, gradkit
        >>> def inner(w, scale):
        ...     return ((w - 3.0) ** 2 + scale * w**2).sum()
        >>> find = gradkit.meta.implicit(lambda w, scale: 0 * w + 3.0 / (1 + scale), inner)
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> w = find(torch.zeros(1), scale)
        >>> gradkit.value_and_grads(w.sum(), scale)
        (tensor(2.), tensor(-1.3333))

    Args:
        solver: `solver(params, outer)` returns params that minimize `inner_loss(params, outer)`, by
            any means; it is not differentiated. It gets copies of params, which require grad where
            params do, and constants for outer, on which it must not write.
        inner_loss: One real element, twice differentiable, computed from its arguments alone.
        solve: How `H u = v` is solved, H being the inner Hessian: `"cg"`, conjugate gradients, for
            a positive definite H; `"neumann"`, a Neumann series with a step of one over the largest
            eigenvalue; or a function `solve(matvec, v)` of trees like params, which may
            differentiate `matvec(u)` with respect to u.
        maxiter: The largest number of products with H in a solve.
        tol: The solve ends when the norm of the residual, relative to that of v, is below this.
        damping: This times the identity is added to H.
        warn: Whether to give a `GradkitWarning` if the residual, which takes one more product with
            H and waits for the device, is not below `tol` after a solve.

    Returns:
        `find(params, outer)`, which returns what `solver` does, differentiable with respect to
        `outer`. Params have no gradient; a frozen `nn.Parameter` stays as it is.

    Raises:
        OptionError: An option has no such value, or an argument is no function.
        StructureError: Raised by `find` if the solver returns another tree.
        UnsupportedGraphError: Raised by `find` if the inner loss uses a tensor from outside that
            requires grad, or a checkpoint that recomputes a module with its own parameters; if the
            solver needs params that require grad, or writes on outer; and inside torch.func; and by
            a backward pass with `create_graph=True`.

    Source:
        Rajeswaran et al. 2019, "Meta-Learning with Implicit Gradients", equation (6),
        https://arxiv.org/abs/1909.04630; Lorraine et al. 2020, algorithms 2 and 3,
        https://arxiv.org/abs/1911.02590
    """
    check_function(solver, "solver")
    check_function(inner_loss, "inner_loss")
    if not callable(solve):
        check_option("solve", solve, ("cg", "neumann"))
    if not is_positive_int(maxiter):
        raise errors.OptionError(message("maxiter", "a positive int", repr(maxiter), "maxiter=100"))
    for name, value in {"tol": tol, "damping": damping}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            expected = "a number that is not negative"
            raise errors.OptionError(message(name, expected, repr(value), f"{name}=1e-6"))
    check_bool("warn", warn)

    def find(params: PyTree, outer: PyTree) -> PyTree:
        with put_back_on_error(solver, inner_loss):
            inner = read_inner_params(params, dense=True)  # torch has no Hessian of sparse tensors
            outer_tensors, rebuild_outer = pytree.partition_tensors(outer)
            outer_tensors = without_inference(outer_tensors)
            _check_tensors(inner.variables, outer_tensors)
            before = write_counts(outer_tensors)
            minimum = _minimize(solver, inner, rebuild_outer([x.detach() for x in outer_tensors]))
            if write_counts(outer_tensors) != before:
                raise errors.UnsupportedGraphError(_WRITES_ON_OUTER)

            def loss(at: Tensors, by: Tensors) -> Tensor:
                return inner_loss(inner.tree(at), rebuild_outer(by))

            linear_solver = _linear_solver(solve, inner, maxiter, tol)
            condition = _OptimalityCondition(loss, linear_solver, tol, damping, warn)
            return inner.tree(condition.attach(minimum, outer_tensors))

    return find


_WRITES_ON_OUTER = message(
    "solver(params, outer)",
    "a solver that leaves outer as it is",
    "one that has written in place on a tensor of it, which is the caller's",
    "write on a copy: outer = gradkit.tree.map(torch.clone, outer)",
)


def _check_tensors(params: Tensors, outer: Tensors) -> None:
    if transforms() or any(map(is_dual, outer)):
        expected = "a call outside torch.func's transforms and forward mode"
        fix = "gradkit.value_and_grads(loss(find(params, outer)), outer), for several tasks the "
        fix += "mean of their losses in a Python loop; or unroll"
        text = message("find(params, outer)", expected, "one inside", fix)
        raise errors.UnsupportedGraphError(text)
    if any(x.is_complex() for x in params):
        fix = "torch.view_as_real(tensor)"
        raise errors.LeafTypeError(message("params", "real tensors", "a complex one", fix))


def _minimize(solver: Callable[..., PyTree], params: Params, outer: PyTree) -> Tensors:
    """Return new tensors: the variables at the minimum."""
    # Copies: a solver may change its start in place, as an optimizer does.
    copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in params.variables]
    root = "solver(params, outer)"
    try:
        solved = solver(params.tree(copies), outer)
    except RuntimeError as error:
        constant = [i for i, copy in enumerate(copies) if not copy.requires_grad]
        is_detached = isinstance(error, errors.DetachedLossError | errors.UnreachedParamError)
        if constant and (is_detached or "does not require grad" in str(error)):
            expected = "a tensor that requires grad, as the solver differentiates with respect to "
            fix = "find(tensor.requires_grad_(), outer); or in the solver, x = x.detach()"
            fix += ".requires_grad_()"
            text = message(params.path(constant[0]), f"{expected}it", "one that does not", fix)
            raise errors.UnsupportedGraphError(text) from error
        raise
    leaves = pytree.flatten_up_to(params.spec, "params", solved, root)
    minimum = params.per_variable(leaves)
    for slot, leaf in zip(params.slots, leaves, strict=True):
        if slot is None:
            continue
        shape = params.variables[slot].shape
        fits = isinstance(leaf, Tensor) and leaf.shape == shape
        if not fits or not (leaf is minimum[slot] or same_values(leaf, minimum[slot])):
            expected = f"one tensor of shape {tuple(shape)} wherever the variable stands"
            fix = "return params of the same shapes, and tied ones equal"
            raise errors.StructureError(message(root, expected, describe(leaf), fix))
    return [x.detach().clone() for x in minimum]


def _linear_solver(
    method: str | TreeSolver, params: Params, maxiter: int, tol: float
) -> LinearSolver:
    """Return the chosen solver, on lists of the variables; the caller's own is one of trees."""
    if not callable(method):
        solver = tree.cg if method == "cg" else tree.neumann
        return lambda product, v: solver(product, v, maxiter=maxiter, tol=tol)[0]
    # Directions are trees like params that are zero where it is fixed.
    zeros = [None if leaf is None else torch.zeros_like(leaf) for leaf in params.leaves]
    directions = replace(params, leaves=zeros)

    def solve(product: MatrixVectorProduct, v: Tensors) -> Tensors:
        def matvec(u: PyTree) -> PyTree:
            return directions.tree(product(_read_direction(directions, u, "matvec(u)")))

        # Clones: the solver may change its arguments in place. With grad, which the engine switches
        # off in a backward pass: the solver may differentiate the product.
        with torch.enable_grad(), INSIDE:
            u = method(matvec, directions.tree([x.clone() for x in v]))
        return _read_direction(directions, u, "solve(matvec, v)")

    return solve


def _read_direction(params: Params, direction: PyTree, root: str) -> Tensors:
    leaves = params.per_variable(pytree.flatten_up_to(params.spec, "params", direction, root))
    for leaf, tensor in zip(leaves, params.variables, strict=True):
        if not isinstance(leaf, Tensor) or leaf.shape != tensor.shape:
            expected = f"a tree like v, with a tensor of shape {tuple(tensor.shape)}"
            fix = "return the solution u of matvec(u) = v"
            raise errors.StructureError(message(root, expected, describe(leaf), fix))
    return [leaf.to(tensor.dtype) for leaf, tensor in zip(leaves, params.variables, strict=True)]


@dataclass
class _OptimalityCondition:
    """d inner_loss / d params = 0, where the loss is a function of two lists of tensors."""

    inner_loss: Callable[[Tensors, Tensors], Tensor]
    linear_solver: LinearSolver
    tol: float
    damping: float
    warn: bool
    _state: RerunState = field(init=False)

    def attach(self, minimum: Tensors, outer: Tensors) -> Tensors:
        """Return the minimum, depending on the outer variables."""
        if not torch.is_grad_enabled():
            return minimum
        self._state = RerunState([*minimum, *outer])
        at, by = _as_leaves(minimum), _as_leaves(outer)
        with torch.enable_grad(), self._state.first_run():
            hooks = hooks_made()
            loss, below = self._loss(at, by)
            # Now: what the backward pass could not differentiate.
            refuse_captured("inner_loss", below, [*at, *by], self._state.made)
            if runs_user_code(below, hooks):  # which may use more than the loss does
                slope = Subgraph(_inner_gradient(loss, at, below))
                refuse_captured("inner_loss", slope, [*at, *by], self._state.made)
        self._state.record_outputs([loss])
        if not any(x.requires_grad for x in outer):
            return minimum
        return list(_AtMinimum.apply(self, len(minimum), *minimum, *outer))  # type: ignore[no-untyped-call]

    def _loss(self, at: Tensors, by: Tensors) -> tuple[Tensor, Subgraph]:
        before = checkpoints.before([*at, *by])
        with recording_writes(), ForwardMonitor(), INSIDE:
            loss, _ = read_loss(self.inner_loss(at, by), "inner_loss")
        recomputations.refuse(loss, before)
        return loss, _check_graph(loss, at)

    def outer_grads(
        self, at: Tensors, outer: Tensors, needed: Sequence[bool], cotangents: Tensors
    ) -> Grads:
        """Return the gradients with respect to the outer tensors, from those at the minimum."""
        with torch.enable_grad(), self._state.second_run() as run:
            at = _as_leaves(at)
            by = [x.detach().requires_grad_(need) for x, need in zip(outer, needed, strict=True)]
            loss, below = self._loss(at, by)
            run.compare([loss], "inner_loss")
            run.differences.read()  # now: the solver reads, and warns of what it comes to
            slope = _inner_gradient(loss, at, below)

        def product(u: Tensors) -> Tensors:
            hu = _or_zeros(_hessian_product(slope, at, u), at)
            return tree.add(hu, tree.scale(u, self.damping)) if self.damping else hu

        u = self.linear_solver(product, cotangents)
        if self.warn:
            self._warn_if_inexact(tree.sub(cotangents, product(u)), cotangents)
        reached = iter(inner_grads(slope, list(compress(by, needed)), [-x for x in u]))
        return [next(reached) if need else None for need in needed]

    def _warn_if_inexact(self, left: Tensors, v: Tensors) -> None:
        size = tree.global_norm(v)
        residual = float(tree.global_norm(left) / size) if size > 0 else 0.0
        enough = max(self.tol, 100 * torch.finfo(size.dtype).eps)
        if not residual <= enough:
            warn_fallback(
                "gradkit.meta.implicit: the linear solve came to a relative residual of "
                f"{residual:.2e}, not to tol={self.tol:g}: the gradient is as inexact. Raise "
                "maxiter, add damping, use another solve, or pass warn=False."
            )


def _as_leaves(tensors: Sequence[Tensor]) -> Tensors:
    """Return leaves with the values of tensors; integers stay constants."""
    return [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]


def _inner_gradient(loss: Tensor, at: Tensors, below: Subgraph) -> Tensors:
    """Return the gradient with respect to the minimum, to be differentiated again."""
    one = InnerPass("inner_loss", "params, variable {}".format, at, below)
    run = partial(inner_grads, [loss], at, create_graph=True)
    with recording_writes():
        return _or_zeros(one.guarded(run, create_graph=True), at)


def _hessian_product(slope: Tensors, at: Tensors, u: Tensors) -> Sequence[Tensor | None]:
    """Return the Hessian times u, which depends on u where a caller's solver differentiates it."""
    keep = torch.is_grad_enabled() and any(map(carries_graph, u))
    run = partial(inner_grads, slope, at, u, create_graph=keep, retain_graph=True)
    if not (keep or transforms()):
        return run()
    below, monitor = Subgraph(slope), OpMonitor()
    monitor.note_graph(below)
    monitor.check()
    if keep:
        refuse_wrong_derivative(lambda: "matvec(u)", at, below)
    one = InnerPass("matvec(u)", "params, variable {}".format, at, below, u)
    return one.guarded(run, create_graph=keep)


def _or_zeros(grads: Sequence[Tensor | None], at: Tensors) -> Tensors:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, at, strict=True)]


def _check_graph(loss: Tensor, at: Tensors) -> Subgraph:
    below = Subgraph([loss] if loss.requires_grad else [])
    eager_graph.refuse_nodes(map(type, below.nodes), "inner_loss")
    refuse_wrong_derivative(lambda: "inner_loss", at, below)
    if below.leaves.keys().isdisjoint(map(id, at)):
        expected, got = "a loss that depends on params", "one that does not depend on them"
        fix = "compute it from inner_loss's own arguments"
        raise errors.UnreachedParamError(message("inner_loss", expected, got, fix))
    return below


class _AtMinimum(torch.autograd.Function):
    """The identity on the minimum, whose backward pass solves the linear system."""

    @staticmethod
    def forward(ctx: Any, condition: _OptimalityCondition, count: int, *tensors: Tensor) -> Any:
        ctx.condition, ctx.count = condition, count
        ctx.save_for_backward(*tensors)  # raises if one of them is changed in place
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            expected = "a first derivative of an implicit gradient"
            got = "one that is to be differentiated again"
            fix = "leave out create_graph=True, or use unroll"
            raise errors.UnsupportedGraphError(message("create_graph", expected, got, fix))
        minimum, outer = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needed = ctx.needs_input_grad[2 + ctx.count :]
        grads = ctx.condition.outer_grads(minimum, outer, needed, list(cotangents))
        return (None, None, *[None] * ctx.count, *grads)
