"""Implicit differentiation: of a minimum, a root or a fixed point, whatever algorithm found it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradkit import errors, tree
from gradkit._autograd.guarded_pass import InnerPass
from gradkit._checks import eager_graph, recomputations
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._compat.transforms import carries_graph, is_dual, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import check_bool, check_function, check_option, is_positive_int
from gradkit._core.graph import Subgraph
from gradkit._core.known_results import Rule, merged
from gradkit._core.leaf_arithmetic import same_values
from gradkit._core.ownership import without_inference
from gradkit._core.params import Grads, Params, Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import hooks_made, user_code_may_run
from gradkit._state.rerun import RerunState, recording_writes
from gradkit._state.snapshot import put_back
from gradkit._torch_bugs.monitor import ForwardMonitor, OpMonitor
from gradkit.errors import describe, message, warn_fallback
from gradkit.func._arguments import read_arguments
from gradkit.func._checkpoint import Recomputed
from gradkit.func._products import write_counts
from gradkit.meta._inner_step import read_loss, refuse_captured, runs_user_code

# Multiplies a vector, given as a list of tensors, by the matrix.
MatrixVectorProduct: TypeAlias = Callable[[Tensors], Tensors]
LinearSolver: TypeAlias = Callable[[MatrixVectorProduct, Tensors], Tensors]
# The caller's: of a linear map and a right-hand side, trees like params; returns the solution.
TreeSolver = Callable[[Callable[[PyTree], PyTree], PyTree], PyTree]


def implicit(
    solver: Callable[[PyTree, PyTree], PyTree],
    inner_loss: Callable[[PyTree, PyTree], Tensor] | None = None,
    *,
    root: Callable[[PyTree, PyTree], PyTree] | None = None,
    fixed_point: Callable[[PyTree, PyTree], PyTree] | None = None,
    solve: Literal["auto", "cg", "gmres", "neumann"] | TreeSolver = "auto",
    maxiter: int = 100,
    tol: float = 1e-6,
    damping: float = 0.0,
    warn: bool = True,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Return a function that finds a minimum, root or fixed point, and is differentiated there.

    Its gradient comes from the condition that holds there, d inner_loss / d params = 0, root = 0 or
    fixed_point = params, and one linear system with the condition's Jacobian (a loss's is the inner
    Hessian): exact where the condition holds, whatever the steps of the solver.

    Example:
        >>> import torch, gradkit
        >>> def inner(w, scale):
        ...     return ((w - 3.0) ** 2 + scale * w**2).sum()
        >>> find = gradkit.meta.implicit(lambda w, scale: 0 * w + 3.0 / (1 + scale), inner)
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> w = find(torch.zeros(1), scale)
        >>> gradkit.value_and_grads(w.sum(), scale)
        (tensor(2.), tensor(-1.3333))
        >>> root_of = gradkit.meta.implicit(lambda x, a: a.sqrt(), root=lambda x, a: x * x - a)
        >>> gradkit.value_and_grads(root_of(torch.ones(()), scale), scale)
        (tensor(0.7071), tensor(0.7071))

    Args:
        solver: `solver(params, outer)` returns params at which the condition holds, by any means;
            it is not differentiated. It gets copies of params, which require grad where params do,
            and constants for outer, on which it must not write.
        inner_loss: What the solver minimizes: `inner_loss(params, outer)` is one real element,
            twice differentiable, computed from its arguments alone.
        root: In place of a loss, what is zero: `root(params, outer)` is a tree like params, of the
            same shapes; where params are tied, the same tensor stands in each of their places.
        fixed_point: In place of a loss, a map whose value is params: a tree as that of `root`.
        solve: How `H u = v` is solved, H being the Jacobian, transposed: `"cg"`, conjugate
            gradients, for a positive definite H; `"gmres"`, for any; `"neumann"`, a Neumann series
            with a step of one over the largest eigenvalue, or for a fixed point of one, which
            converges if the map is a contraction; or a function `solve(matvec, v)` of trees like
            params, which may differentiate `matvec(u)` with respect to u. `"auto"` is `"cg"` for a
            loss, and `"gmres"` otherwise.
        maxiter: The largest number of products with H in a solve.
        tol: The solve ends when the norm of the residual, relative to that of v, is below this.
        damping: This times the identity is added to H.
        warn: Whether the residual, which takes one more product with H and waits for the device, is
            read after a solve. If it is not below `tol`, that is a `GradkitWarning` for a loss, and
            otherwise an error. A point at which `root` or `fixed_point` does not hold is a warning.

    Returns:
        `find(params, outer)`, which returns what `solver` does, differentiable with respect to
        `outer`. Params have no gradient; a frozen `nn.Parameter` stays as it is.

    Raises:
        OptionError: An option has no such value, an argument is no function, or there is not one of
            `inner_loss`, `root` and `fixed_point`.
        LeafTypeError: Raised by `find` if params are complex.
        StructureError: Raised by `find` if the solver, `root` or `fixed_point` returns another
            tree.
        UnsupportedGraphError: Raised by `find` if the inner loss uses a tensor from outside that
            requires grad; if the solver needs params that require grad, or writes on outer; and
            inside torch.func; and by a backward pass with `create_graph=True`, or for which the
            Jacobian is singular.

    Source:
        Blondel et al. 2022, "Efficient and Modular Implicit Differentiation", equation (2),
        https://arxiv.org/abs/2105.15183; Rajeswaran et al. 2019, "Meta-Learning with Implicit
        Gradients", equation (6), https://arxiv.org/abs/1909.04630; Lorraine et al. 2020,
        algorithms 2 and 3, https://arxiv.org/abs/1911.02590
    """
    check_function(solver, "solver", "params", "outer")
    kind, condition_of = _read_condition(inner_loss=inner_loss, root=root, fixed_point=fixed_point)
    if not callable(solve):
        check_option("solve", solve, ("auto", "cg", "gmres", "neumann"))
    if not is_positive_int(maxiter):
        raise errors.OptionError(message("maxiter", "a positive int", repr(maxiter), "maxiter=100"))
    for name, value in {"tol": tol, "damping": damping}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            expected = "a number that is not negative"
            raise errors.OptionError(message(name, expected, repr(value), f"{name}=1e-6"))
    check_bool("warn", warn)

    def find(params: PyTree, outer: PyTree) -> PyTree:
        with put_back(solver, inner_loss, root, fixed_point):
            # Dense: torch has no Hessian of sparse tensors.
            inner = read_arguments((params,), 0, "params", dense=True)
            outer_tensors, rebuild_outer = pytree.partition_tensors(outer)
            outer_tensors = without_inference(outer_tensors)
            _check_tensors(inner.variables, outer_tensors)
            before = write_counts(outer_tensors)
            minimum = _minimize(solver, inner, rebuild_outer([x.detach() for x in outer_tensors]))
            if write_counts(outer_tensors) != before:
                raise errors.UnsupportedGraphError(_WRITES_ON_OUTER)

            def run(at: Tensors, by: Tensors) -> Tensors:
                returned = condition_of(inner.tree(at), rebuild_outer(by))
                if kind == "inner_loss":
                    return [read_loss(returned, kind)[0]]
                values = _read_like_params(inner, returned, f"{kind}(params, outer)")
                values = [value.to(x.dtype) for value, x in zip(values, at, strict=True)]
                return values if kind == "root" else tree.sub(at, values)

            linear_solver = _linear_solver(solve, kind, inner, maxiter, tol)
            condition = _OptimalityCondition(run, kind, linear_solver, tol, damping, warn)
            return inner.tree(condition.attach(minimum, outer_tensors))

    return find


def _read_condition(**given: Callable[..., Any] | None) -> tuple[str, Callable[..., Any]]:
    """Return the one condition that was given, and its name."""
    conditions = [(name, fn) for name, fn in given.items() if fn is not None]
    if len(conditions) != 1:
        expected, got = "one of inner_loss, root and fixed_point", f"{len(conditions)} of them"
        fix = "implicit(solver, inner_loss), implicit(solver, root=fn), or fixed_point=fn"
        raise errors.OptionError(message("inner_loss", expected, got, fix))
    check_function(conditions[0][1], conditions[0][0], "params", "outer")
    return conditions[0]


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
    return [x.detach().clone() for x in _read_like_params(params, solved, root)]


def _read_like_params(params: Params, returned: PyTree, root: str) -> Tensors:
    """Return the tensor that a function of the caller's has returned for each variable."""
    leaves = pytree.flatten_up_to(params.spec, "params", returned, root)
    values = params.per_variable(leaves)
    for index, (slot, leaf) in enumerate(zip(params.slots, leaves, strict=True)):
        if slot is None:
            continue
        shape = params.variables[slot].shape
        fits = isinstance(leaf, Tensor) and leaf.shape == shape and not leaf.is_complex()
        if not fits or not (leaf is values[slot] or same_values(leaf, values[slot])):
            where = pytree.path(params.spec, index, root)
            expected = f"one real tensor of shape {tuple(shape)} wherever the variable stands"
            fix = "return a tree like params, of the same shapes, and tied ones equal"
            raise errors.StructureError(message(where, expected, describe(leaf), fix))
    return values


def _linear_solver(
    method: str | TreeSolver, kind: str, params: Params, maxiter: int, tol: float
) -> LinearSolver:
    """Return the chosen solver, on lists of the variables; the caller's own is one of trees."""
    if not callable(method):
        by_name: dict[str, Callable[..., Any]]
        by_name = {"cg": tree.cg, "gmres": tree.gmres, "neumann": tree.neumann}
        if kind == "fixed_point":
            by_name["neumann"] = partial(tree.neumann, step=1.0)
        by_name["auto"] = by_name["cg" if kind == "inner_loss" else "gmres"]
        solver = by_name[method]
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
    """What is zero at the minimum or root: a function of two lists of tensors, or its gradient."""

    fn: Callable[[Tensors, Tensors], Tensors]
    name: str
    linear_solver: LinearSolver
    tol: float
    damping: float
    warn: bool
    _state: RerunState = field(init=False)

    @property
    def is_slope(self) -> bool:
        """Whether it is the gradient of what the function returns."""
        return self.name == "inner_loss"

    def attach(self, minimum: Tensors, outer: Tensors) -> Tensors:
        """Return the minimum, depending on the outer variables."""
        if not torch.is_grad_enabled():
            return minimum
        self._state = RerunState([*minimum, *outer])
        at, by = _as_leaves(minimum), _as_leaves(outer)
        with torch.enable_grad(), self._state.first_run():
            hooks = hooks_made()
            values, below = self._run(at, by)
            # A tensor that the backward pass could not differentiate is refused now.
            refuse_captured(self.name, below, [*at, *by], self._state.made)
            if self.is_slope and runs_user_code(below, hooks):  # code may use more than the loss
                slope = Subgraph(_inner_gradient(values[0], at, below))
                refuse_captured(self.name, slope, [*at, *by], self._state.made)
        self._state.record_outputs(values)
        if not any(x.requires_grad for x in outer):
            return minimum
        rule = Rule(partial(self._grads, len(minimum)))
        return list(Recomputed.of(rule, [*minimum, *outer], minimum))

    def _run(self, at: Tensors, by: Tensors) -> tuple[Tensors, Subgraph]:
        with recording_writes(), ForwardMonitor(), INSIDE:
            values = recomputations.exact(lambda: self.fn(at, by))
        return values, _check_graph(values, at, self.name)

    def _grads(
        self, count: int, tensors: Sequence[Tensor], needed: Sequence[bool], cotangents: Grads
    ) -> Grads:
        """Return the gradients with respect to the outer tensors, from those at the minimum."""
        if torch.is_grad_enabled():
            expected = "a first derivative of an implicit gradient"
            got = "one that is to be differentiated again"
            fix = "leave out create_graph=True, or differentiate the solver's steps, as unroll does"
            raise errors.UnsupportedGraphError(message("create_graph", expected, got, fix))
        with torch.enable_grad(), self._state.second_run() as run:
            at = _as_leaves(tensors[:count])
            pairs = list(zip(tensors, needed, strict=True))[count:]
            by = [x.detach().requires_grad_(need) for x, need in pairs]
            zeros, below = self._run(at, by)
            run.compare(zeros, self.name)
            run.differences.read()  # now: the solver reads, and warns of what it comes to
            if self.is_slope:
                zeros = _inner_gradient(zeros[0], at, below)
                below = Subgraph(zeros)

        def product(u: Tensors) -> Tensors:
            hu = _or_zeros(_transposed_product(zeros, at, u, below), at)
            return tree.add(hu, tree.scale(u, self.damping)) if self.damping else hu

        v = _or_zeros(cotangents, at)
        u = self.linear_solver(product, v)
        if self.warn:
            self._check_residual(tree.sub(v, product(u)), v)
            if not self.is_slope:
                self._check_point(at, zeros, u, v)
        needing = [x for x in by if x.requires_grad]
        grads = _pull(zeros, needing, [-x for x in u], below, "outer")
        return merged([None] * len(needed), needed, grads)

    def _check_residual(self, left: Tensors, v: Tensors) -> None:
        size = tree.global_norm(v)
        residual = float(tree.global_norm(left) / size) if size > 0 else 0.0
        if residual <= max(self.tol, 100 * torch.finfo(size.dtype).eps):
            return
        if self.is_slope:
            warn_fallback(
                "gradkit.meta.implicit: the linear solve came to a relative residual of "
                f"{residual:.2e}, not to tol={self.tol:g}: the gradient is as inexact. Raise "
                "maxiter, add damping, use another solve, or pass warn=False."
            )
            return
        expected = f"a Jacobian for which the linear solve comes to tol={self.tol:g}"
        got = f"a relative residual of {residual:.2e}: it is singular, or maxiter too small"
        fix = "make the solution unique; implicit(..., maxiter=1000), a larger tol, damping=1e-3, "
        fix += "or another solve; warn=False for a gradient as inexact"
        raise errors.UnsupportedGraphError(message(self.name, expected, got, fix))

    def _check_point(self, at: Tensors, zeros: Tensors, u: Tensors, v: Tensors) -> None:
        """Warn if the point is no root: to first order, v is off by u times what is not zero."""
        size, sizes = tree.global_norm(at), list(map(tree.global_norm, (zeros, u, v)))
        off = float(sizes[0] * sizes[1] / sizes[2]) if sizes[2] > 0 else 0.0
        rounding = (torch.finfo(size.dtype).eps * sum(x.numel() for x in at)) ** 0.5
        if not off <= 0.01 * float(size) + rounding:
            warn_fallback(
                f"gradkit.meta.implicit: {self.name} does not hold at what the solver returned, "
                f"which is off by about {off:.2e}, of a norm of {float(size):.2e}: the gradient is "
                "as inexact. Let the solver take more steps, or pass warn=False."
            )


def _as_leaves(tensors: Sequence[Tensor]) -> Tensors:
    """Return leaves with the values of tensors; integers stay constants."""
    return [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]


def _inner_gradient(loss: Tensor, at: Tensors, below: Subgraph) -> Tensors:
    """Return the gradient with respect to the minimum, to be differentiated again."""
    one = InnerPass("inner_loss", "params, variable {}".format, at, below)
    with recording_writes():
        return _or_zeros(one.grads([loss], create_graph=True), at)


def _transposed_product(
    zeros: Tensors, at: Tensors, u: Tensors, below: Subgraph
) -> Sequence[Tensor | None]:
    """Return the transposed Jacobian times u, which depends on u where the caller's solver does."""
    keep = torch.is_grad_enabled() and any(map(carries_graph, u))
    if keep or transforms():
        monitor = OpMonitor()
        monitor.note_graph(below)
        monitor.check()
    if keep:
        refuse_wrong_derivative(lambda: "matvec(u)", at, below)
    return _pull(zeros, at, u, below, "params", create_graph=keep)


def _pull(
    outputs: Tensors,
    inputs: Tensors,
    cotangents: Tensors,
    below: Subgraph,
    root: str,
    *,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Return the gradients of outputs with respect to inputs, and keep the graph."""
    if user_code_may_run() and not create_graph:  # the user's code may write on a solver's vector
        cotangents = [x.clone() for x in cotangents]
    one = InnerPass("matvec(u)", f"{root}, variable {{}}".format, inputs, below, cotangents)
    return one.grads(outputs, create_graph=create_graph, retain_graph=True)


def _or_zeros(grads: Sequence[Tensor | None], at: Tensors) -> Tensors:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, at, strict=True)]


def _check_graph(values: Tensors, at: Tensors, name: str) -> Subgraph:
    below = Subgraph([x for x in values if x.requires_grad])
    eager_graph.refuse_nodes(map(type, below.nodes), name)
    if name == "inner_loss":
        refuse_wrong_derivative(lambda: name, at, below)
    if below.leaves.keys().isdisjoint(map(id, at)):
        expected, got = "a function of params", "one that does not depend on them"
        fix = f"compute it from {name}'s own arguments"
        raise errors.UnreachedParamError(message(name, expected, got, fix))
    return below
