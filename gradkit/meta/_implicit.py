"""Implicit differentiation: the gradient of where a minimization ends, whatever its way there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gradkit import tree
from gradkit._autograd.jacobian import level_of_the_caller
from gradkit._checks import unsupported
from gradkit._compat.transforms import is_dual, transforms
from gradkit._core import graph, pytree
from gradkit._core.losses import read_losses
from gradkit._core.options import check_option
from gradkit._core.params import expand_params
from gradkit._core.pytree import PyTree
from gradkit._state.replay import Replay
from gradkit.errors import (
    GradkitWarning,
    LeafTypeError,
    StructureError,
    UnreachedParamError,
    UnsupportedGraphError,
    describe,
    message,
)
from gradkit.func._variables import Variables, read_variables
from gradkit.meta._solvers import Solve, linear_solver


def implicit(
    solver: Callable[[PyTree, PyTree], PyTree],
    inner_loss: Callable[[PyTree, PyTree], Tensor],
    *,
    solve: Literal["cg", "neumann"] | Solve = "cg",
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
            any means; nothing of it is differentiated.
        inner_loss: One real element, twice differentiable, computed from its arguments alone.
        solve: How `H u = v` is solved, H being the inner Hessian: `"cg"`, conjugate gradients, for
            a positive definite H; `"neumann"`, a Neumann series with a step of one over the largest
            eigenvalue; or a function `solve(matvec, v)` of trees like params.
        maxiter: How many products with H a solve may take.
        tol: How small the residual, relative to v, has to become.
        damping: This times the identity is added to H.

    Returns:
        `find(params, outer)`, which returns what `solver` does, differentiable by `outer`. Params,
        where the solver starts, have no gradient; a frozen `nn.Parameter` stays as it is. A solve
        that has not come to `tol` gives a `GradkitWarning` with its residual.

    Raises:
        StructureError: An option has no such value. `find` raises it if the solver returns another
            tree, and `UnsupportedGraphError` if the inner loss uses a tensor from outside that
            requires grad, and inside of torch.func. A backward pass with `create_graph=True` raises
            it, too: the gradient cannot be differentiated again.

    Source:
        Rajeswaran et al. 2019, "Meta-Learning with Implicit Gradients", equation (6),
        https://arxiv.org/abs/1909.04630; Lorraine et al. 2020, algorithms 2 and 3,
        https://arxiv.org/abs/1911.02590
    """
    if not callable(solve):
        check_option("solve", solve, ("cg", "neumann"))
    if type(maxiter) is not int or maxiter < 1 or not tol >= 0 or not damping >= 0:
        raise StructureError(
            message(
                "maxiter, tol, damping",
                "a positive int, and numbers that are not negative",
                f"{maxiter!r}, {tol!r}, {damping!r}",
                "maxiter=100, tol=1e-6, damping=0.0",
            )
        )

    def find(params: PyTree, outer: PyTree) -> PyTree:
        leaves, spec = expand_params(params, "params")
        given = read_variables((pytree.unflatten(spec, leaves),), 0, "params")
        _refuse_kinds(given, outer)
        minimum = _solved(solver, given, outer)
        system = _System(inner_loss, given, outer, linear_solver(solve, maxiter, tol), tol, damping)
        return pytree.unflatten(given.spec, given.placed(system.attach(minimum)))[0]

    return find


def _refuse_kinds(given: Variables, outer: PyTree) -> None:
    tensors = [x for x in pytree.flatten(outer)[0] if isinstance(x, Tensor)]
    if transforms() or any(map(is_dual, tensors)):
        raise UnsupportedGraphError(
            message(
                "find(params, outer)",
                "a call outside of torch.func's transforms and of forward mode",
                "one inside",
                "gradkit.value_and_grads(loss(find(params, outer)), outer); or unroll",
            )
        )
    if any(x.is_complex() for x in given.tensors):
        raise LeafTypeError(
            message("params", "real tensors", "a complex one", "torch.view_as_real(tensor)")
        )


def _solved(
    solver: Callable[[PyTree, PyTree], PyTree], given: Variables, outer: PyTree
) -> list[Tensor]:
    """Return the minimum, one tensor for each variable, that nobody else has."""
    # Copies: a solver may well write on where it starts, as an optimizer does.
    start = given.with_tensors([x.detach().clone() for x in given.tensors])[0]
    leaves, spec = pytree.flatten(outer)
    apart = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    result = solver(start, pytree.unflatten(spec, apart))
    found = pytree.flatten_up_to(
        pytree.flatten(start)[1], "params", result, "solver(params, outer)"
    )
    for slot, leaf in zip(given.slots, found, strict=True):
        if slot is None:
            continue
        first = found[given.slots.index(slot)]
        shape = given.tensors[slot].shape
        fits = isinstance(leaf, Tensor) and leaf.shape == shape
        if not fits or not (leaf is first or torch.equal(leaf, first)):
            raise StructureError(
                message(
                    "solver(params, outer)",
                    f"one tensor of shape {tuple(shape)} wherever the variable stands",
                    describe(leaf),
                    "return params of the same shapes, and tied ones equal",
                )
            )
    return [found[given.slots.index(slot)].detach().clone() for slot in range(len(given.tensors))]


class _System:
    """The optimality condition at a minimum, and the gradient through it."""

    def __init__(
        self,
        inner_loss: Callable[[PyTree, PyTree], Tensor],
        given: Variables,
        outer: PyTree,
        solve: Solve,
        tol: float,
        damping: float,
    ) -> None:
        self._inner_loss = inner_loss
        self._given = given
        leaves, self._outer_spec = pytree.flatten(outer)
        self._others = [None if isinstance(x, Tensor) else (x,) for x in leaves]
        self._outer = [x for x in leaves if isinstance(x, Tensor)]
        self._solve = solve
        self._tol = tol
        self._damping = damping

    def attach(self, minimum: list[Tensor]) -> list[Tensor]:
        """Return the minimum, depending on the outer variables."""
        if not torch.is_grad_enabled():
            return minimum
        outer, self._outer = self._outer, []
        self._replay = Replay([*minimum, *outer])
        with torch.enable_grad(), self._replay.recording():
            at, by = _apart(minimum), _apart(outer)
            loss = self._loss(at, by)
        nodes = graph.nodes_below([loss])
        unsupported.refuse_wrong_derivative("inner_loss", at, nodes)
        reached = graph.leaves_of(nodes)
        if reached.isdisjoint(map(id, at)):
            raise UnreachedParamError(_constant_loss())
        if reached - set(map(id, [*at, *by])):
            raise UnsupportedGraphError(
                message(
                    "inner_loss",
                    "a function of its arguments",
                    "one that uses a tensor from outside that requires grad: its gradient would be "
                    "lost",
                    'pass it in outer, not inside of a module: find(params, {"name": tensor})',
                )
            )
        self._replay.record_outputs([loss])
        if not any(x.requires_grad for x in outer):
            return minimum
        return list(_AtMinimum.apply(self, len(minimum), *minimum, *outer))  # type: ignore[no-untyped-call]

    def _loss(self, at: list[Tensor], by: list[Tensor]) -> Tensor:
        rest = iter(by)
        outer = pytree.unflatten(
            self._outer_spec, [next(rest) if o is None else o[0] for o in self._others]
        )
        loss = self._inner_loss(self._given.with_tensors(at)[0], outer)
        (leaf,) = read_losses((loss,), scalar=True).leaves
        if not leaf.requires_grad:
            raise UnreachedParamError(_constant_loss())
        return leaf

    def pull(
        self, minimum: list[Tensor], outer: list[Tensor], needed: list[bool], v: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradient by the outer tensors, from that by the minimum."""
        places = [i for i, need in enumerate(needed) if need]
        with torch.enable_grad(), self._replay.again():
            at = _apart(minimum)
            by = [x.detach().requires_grad_(need) for x, need in zip(outer, needed, strict=True)]
            loss = self._loss(at, by)
            self._replay.check([loss], "inner_loss")
            slope = list(torch.autograd.grad(loss, at, create_graph=True, materialize_grads=True))

        def product(u: PyTree) -> PyTree:
            along = self._variables(u)
            hu = self._pulled(slope, at, along)
            if self._damping:
                hu = tree.add(hu, tree.scale(along, self._damping))
            return self._tree(hu)

        u = self._solve(product, self._tree([x.clone() for x in v]))  # a solve may write on it
        self._check(u)
        self._warn(product, u, self._tree(v))
        minus = [-x for x in self._variables(u)]
        live = [(g, x) for g, x in zip(slope, minus, strict=True) if g.requires_grad]
        grads: list[Tensor | None] = [None] * len(outer)
        if live:
            found = torch.autograd.grad(
                [g for g, _ in live],
                [by[place] for place in places],
                [x for _, x in live],
                allow_unused=True,
            )
            for place, grad in zip(places, found, strict=True):
                grads[place] = grad
        return grads

    @staticmethod
    def _pulled(slope: list[Tensor], at: list[Tensor], along: list[Tensor]) -> list[Tensor]:
        live = [(g, x) for g, x in zip(slope, along, strict=True) if g.requires_grad]
        if not live:
            return [torch.zeros_like(x) for x in at]
        outputs, seeds = [g for g, _ in live], [x for _, x in live]
        return list(
            torch.autograd.grad(outputs, at, seeds, retain_graph=True, materialize_grads=True)
        )

    def _tree(self, tensors: list[Tensor]) -> PyTree:
        """Return a direction as the solve takes it: a tree like params, zero where it is fixed."""
        given = self._given
        placed = [
            (None if leaf is None else torch.zeros_like(leaf)) if slot is None else tensors[slot]
            for leaf, slot in zip(given.leaves, given.slots, strict=True)
        ]
        return pytree.unflatten(given.spec, placed)[0]

    def _check(self, u: PyTree) -> None:
        like, spec = pytree.flatten(self._given.with_tensors(self._given.tensors)[0])
        leaves = pytree.flatten_up_to(spec, "params", u, "solve(matvec, v)")
        for slot, leaf, wanted in zip(self._given.slots, leaves, like, strict=True):
            if slot is not None and (not isinstance(leaf, Tensor) or leaf.shape != wanted.shape):
                raise StructureError(
                    message(
                        "solve(matvec, v)",
                        f"a tree like v, with a tensor of shape {tuple(wanted.shape)}",
                        describe(leaf),
                        "return the solution u of matvec(u) = v",
                    )
                )

    def _variables(self, direction: PyTree) -> list[Tensor]:
        leaves, _ = pytree.flatten(direction)
        tensors = self._given.tensors
        return [
            leaves[self._given.slots.index(slot)].to(tensors[slot].dtype)
            for slot in range(len(tensors))
        ]

    def _warn(self, product: Callable[[PyTree], PyTree], u: PyTree, v: PyTree) -> None:
        size = tree.global_norm(v)
        left = tree.global_norm(tree.sub(v, product(u)))
        residual = float(left / size) if size > 0 else 0.0
        enough = max(self._tol, 100 * torch.finfo(size.dtype).eps)
        if not residual <= enough:
            warnings.warn(
                f"gradkit.meta.implicit: the linear solve came to a relative residual of "
                f"{residual:.2e}, not to tol={self._tol:g}: the gradient is as wrong. Give it more "
                "maxiter, some damping, or another solve.",
                GradkitWarning,
                stacklevel=level_of_the_caller(),
            )


def _constant_loss() -> str:
    return message(
        "inner_loss",
        "a loss that depends on params",
        "one that does not depend on them",
        "compute it from inner_loss's own arguments",
    )


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Return leaves in place of tensors; of integers, constants."""
    return [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]


class _AtMinimum(torch.autograd.Function):
    """The identity on the minimum, whose backward pass solves the linear system."""

    @staticmethod
    def forward(ctx: Any, system: _System, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.system, ctx.count = system, count
        ctx.save_for_backward(*tensors)  # which notices a tensor that is changed in place
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedGraphError(
                message(
                    "create_graph",
                    "a first derivative of an implicit gradient",
                    "one that is to be differentiated again",
                    "leave out create_graph=True, or use unroll",
                )
            )
        minimum, outer = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needed = ctx.needs_input_grad[2 + ctx.count :]
        grads = ctx.system.pull(list(minimum), list(outer), list(needed), list(cotangents))
        return (None, None, *[None] * ctx.count, *grads)
