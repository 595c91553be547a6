"""Implicit differentiation: the gradient of where a minimization ends, whatever its way there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradkit import _pytree, tree
from gradkit._inputs import check_option, open_up, read_losses
from gradkit._pytree import PyTree, Structure
from gradkit.errors import GradkitWarning, StructureError, message

# A linear map, and a right-hand side; the solution.
Solve: TypeAlias = Callable[[Callable[[PyTree], PyTree], PyTree], PyTree]


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
        where the solver starts, have no gradient. A solve that has not come to `tol` gives a
        `GradkitWarning` with its residual.

    Raises:
        StructureError: An option has no such value. `find` raises it if the solver returns another
            tree, and `UnsupportedGraphError` if the inner loss uses a tensor from outside that
            requires grad.

    Source:
        Rajeswaran et al. 2019, "Meta-Learning with Implicit Gradients", equation (6),
        https://arxiv.org/abs/1909.04630; Lorraine et al. 2020, algorithms 2 and 3,
        https://arxiv.org/abs/1911.02590
    """
    if not callable(solve):
        check_option("solve", solve, ("cg", "neumann"))
    if not isinstance(maxiter, int) or maxiter < 1 or not tol >= 0 or not damping >= 0:
        raise StructureError(
            message(
                "maxiter, tol, damping",
                "a positive int, and numbers that are not negative",
                f"{maxiter!r}, {tol!r}, {damping!r}",
                "maxiter=100, tol=1e-6, damping=0.0",
            )
        )

    def find(params: PyTree, outer: PyTree) -> PyTree:
        leaves, spec = open_up(params, "params")
        found = _solved(solver, _pytree.unflatten(spec, leaves), outer, spec)
        system = _System(inner_loss, spec, _linear_solver(solve, maxiter, tol), tol, damping)
        return system.attach(found, outer)

    return find


def _solved(
    solver: Callable[[PyTree, PyTree], PyTree], params: PyTree, outer: PyTree, spec: Structure
) -> list[Tensor]:
    leaves, outer_spec = _pytree.flatten(outer)
    apart = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    start = [x.detach() if isinstance(x, Tensor) else x for x in _pytree.flatten(params)[0]]
    result = solver(_pytree.unflatten(spec, start), _pytree.unflatten(outer_spec, apart))
    found = _pytree.matching_leaves(spec, "params", result, "solver(params, outer)")
    return [leaf.detach() for leaf in found]


class _System:
    """The optimality condition at a minimum, and the gradient through it."""

    def __init__(
        self,
        inner_loss: Callable[[PyTree, PyTree], Tensor],
        spec: Structure,
        solve: Solve,
        tol: float,
        damping: float,
    ) -> None:
        self._inner_loss = inner_loss
        self._spec = spec
        self._solve = solve
        self._tol = tol
        self._damping = damping

    def attach(self, found: list[Tensor], outer: PyTree) -> PyTree:
        """Return the minimum as a tree that depends on the outer variables."""
        leaves, outer_spec = _pytree.flatten(outer)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]

        def with_outer(tensors: list[Tensor]) -> PyTree:
            placed = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                placed[place] = tensor
            return _pytree.unflatten(outer_spec, placed)

        self._with_outer = with_outer
        learned = [leaves[place] for place in places]
        if not learned or not torch.is_grad_enabled():
            return _pytree.unflatten(self._spec, found)
        out = _AtMinimum.apply(self, len(found), *found, *learned)  # type: ignore[no-untyped-call]
        return _pytree.unflatten(self._spec, out)

    def gradient(self, found: list[Tensor], learned: list[Tensor]) -> list[Tensor]:
        """Return the gradient of the inner loss by params, with a graph."""
        loss = self._inner_loss(_pytree.unflatten(self._spec, found), self._with_outer(learned))
        (leaf,) = read_losses((loss,), scalar=True).leaves
        return list(torch.autograd.grad(leaf, found, create_graph=True, materialize_grads=True))

    def pull(
        self, found: list[Tensor], learned: list[Tensor], cotangent: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient by the outer variables, from that by the minimum."""
        with torch.enable_grad():
            at = [x.detach().requires_grad_() for x in found]
            by = [x.detach().requires_grad_() for x in learned]
            slope = self.gradient(at, by)

        def product(u: PyTree) -> PyTree:
            along = [x.to(g.dtype) for x, g in zip(_leaves(u), slope, strict=True)]
            hu = torch.autograd.grad(slope, at, along, retain_graph=True, materialize_grads=True)
            flat = tree.add(list(hu), tree.scale(along, self._damping)) if self._damping else hu
            return self._tree(list(flat))

        v = self._tree(cotangent)
        u = self._solve(product, v)
        self._warn(product, u, v)
        found_by = torch.autograd.grad(
            slope, by, [-x for x in _leaves(u)], allow_unused=True, materialize_grads=False
        )
        return tuple(found_by)

    def _tree(self, leaves: list[Tensor]) -> PyTree:
        return _pytree.unflatten(self._spec, leaves)

    def _warn(self, product: Callable[[PyTree], PyTree], u: PyTree, v: PyTree) -> None:
        size = tree.global_norm(v)
        left = tree.global_norm(tree.sub(v, product(u)))
        residual = float(left / size) if size > 0 else 0.0
        if not residual <= max(self._tol, 1e-12) * (1 + 1e-6):
            warnings.warn(
                f"gradkit.meta.implicit: the linear solve came to a relative residual of "
                f"{residual:.2e}, not to tol={self._tol:g}: the gradient is as wrong. Give it more "
                "maxiter, some damping, or another solve.",
                GradkitWarning,
                stacklevel=2,
            )


def _leaves(value: PyTree) -> list[Tensor]:
    return _pytree.flatten(value)[0]


class _AtMinimum(torch.autograd.Function):
    """The identity on the minimum, whose backward pass solves the linear system."""

    @staticmethod
    def forward(ctx: Any, system: _System, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.system, ctx.count = system, count
        ctx.save_for_backward(*tensors)
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        found, learned = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        grads = ctx.system.pull(list(found), list(learned), list(cotangents))
        return (None, None, *[None] * ctx.count, *grads)


def _linear_solver(solve: str | Solve, maxiter: int, tol: float) -> Solve:
    if not isinstance(solve, str):
        return solve
    if solve == "cg":
        return lambda product, v: _conjugate_gradients(product, v, maxiter, tol)
    return lambda product, v: _neumann(product, v, maxiter, tol)


def _conjugate_gradients(
    product: Callable[[PyTree], PyTree], v: PyTree, maxiter: int, tol: float
) -> PyTree:
    """Solve a positive definite system: Hestenes and Stiefel 1952, section 3."""
    x, r = tree.scale(v, 0.0), v
    p, rr = r, tree.dot(r, r)
    enough = tol**2 * rr
    for _ in range(maxiter):
        if rr <= enough:
            break
        hp = product(p)
        step = rr / tree.dot(p, hp)
        x = tree.add(x, tree.scale(p, step))
        r = tree.sub(r, tree.scale(hp, step))
        rr, before = tree.dot(r, r), rr
        p = tree.add(r, tree.scale(p, rr / before))
    return x


def _neumann(product: Callable[[PyTree], PyTree], v: PyTree, maxiter: int, tol: float) -> PyTree:
    """Sum (1 - a H)^k a v, where a is one over the largest eigenvalue."""
    step = 1 / _largest_eigenvalue(product, v)
    x, r = tree.scale(v, 0.0), v
    enough = tol * tree.global_norm(v)
    for _ in range(maxiter):
        if tree.global_norm(r) <= enough:
            break
        x = tree.add(x, tree.scale(r, step))
        r = tree.sub(v, product(x))
    return x


def _largest_eigenvalue(product: Callable[[PyTree], PyTree], v: PyTree, rounds: int = 20) -> Tensor:
    """Estimate it by power iteration, from above."""
    value = tree.global_norm(v)
    for _ in range(rounds):
        v = tree.scale(v, 1 / tree.global_norm(v))
        v = product(v)
        value = tree.global_norm(v)
    return value * 1.1
