"""Linear systems whose matrix is a function of trees: by conjugate gradients, GMRES and Neumann."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gradkit._compat.transforms import carries_tangent, in_dual_level
from gradkit._core.call import check_function, check_number, is_positive_int
from gradkit._core.leaf_arithmetic import largest
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import OptionError, UnsupportedGraphError, message
from gradkit.tree._arithmetic import Leaf, add, aligned_leaves, dot, scale, sub
from gradkit.tree._norms import global_norm
from gradkit.tree._per_loss import weighted_sum

_POWER_ITERATIONS = 20


class SolveInfo(NamedTuple):
    """How far a solve has come.

    Attributes:
        residual: The norm of `b - A x`, relative to that of `b`: a 0-dim tensor.
        iterations: How many steps were taken.
    """

    residual: Tensor
    iterations: int


def cg(
    matvec: Callable[[PyTree], PyTree],
    b: PyTree,
    *,
    x0: PyTree = None,
    tol: float = 1e-6,
    maxiter: int = 100,
    damping: float = 0.0,
) -> tuple[PyTree, SolveInfo]:
    """Return the solution of a positive definite linear system, by conjugate gradients.

    Example:
        >>> import torch, gradkit
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> x, info = gradkit.tree.cg(lambda v: {"w": matrix @ v["w"]}, {"w": torch.ones(2)})
        >>> x, info.iterations
        ({'w': tensor([0.4000, 0.2000])}, 2)

    Args:
        matvec: Multiplies a tree like `b` by the matrix, which is symmetric and positive definite.
        b: The right-hand side, a tree of tensors or None.
        x0: Where to start, a tree like `b`; None is zero.
        tol: The solve ends when the norm of the residual, relative to that of `b`, is below this.
        maxiter: The largest number of steps; each has one product.
        damping: This times the identity is added to the matrix.

    Returns:
        `(x, info)`: a tree like `b`, and `info.residual`, the relative norm of what the recursion
        takes for the residual, and `info.iterations`. A solve that has not come to `tol`, or whose
        matrix is not positive definite, returns what it has, with a residual that is large or NaN.
        The host waits for the device in every step.

    Raises:
        OptionError: An option has no such value, or `matvec` is no function.
        UnsupportedGraphError: A tensor carries a tangent, or requires grad, outside of `no_grad()`:
            the steps are not differentiated. `gradkit.meta.implicit` is, by solving once more.

    Source:
        Hestenes and Stiefel 1952, "Methods of Conjugate Gradients for Solving Linear Systems",
        section 3; arguments as in `jax.scipy.sparse.linalg.cg`.
    """
    system = _read_system(matvec, b, tol, maxiter, damping)
    x, r = system.start(x0)
    p, rr = r, dot(r, r)
    enough = tol**2 * dot(system.b, system.b)
    count = 0
    while count < maxiter and rr > enough:
        hp = system.product(p)
        step = rr / dot(p, hp)
        x = add(x, scale(p, step))
        r = sub(r, scale(hp, step))
        rr, before = dot(r, r), rr
        p = add(r, scale(p, rr / before))
        count += 1
    return system.result(x, rr.sqrt(), count)


def gmres(
    matvec: Callable[[PyTree], PyTree],
    b: PyTree,
    *,
    x0: PyTree = None,
    tol: float = 1e-6,
    maxiter: int = 100,
    damping: float = 0.0,
    restart: int = 50,
) -> tuple[PyTree, SolveInfo]:
    """Return the solution of a linear system, whose matrix need not be symmetric, by GMRES.

    Example:
        >>> import torch, gradkit
        >>> matrix = torch.tensor([[0.0, 2.0], [-1.0, 1.0]])
        >>> x, info = gradkit.tree.gmres(lambda v: matrix @ v, torch.tensor([2.0, 0.0]))
        >>> x, info.iterations
        (tensor([1., 1.]), 2)

    Args:
        matvec: Multiplies a tree like `b`, of real tensors, by the matrix, which is square.
        b: As in `cg`.
        x0: As in `cg`.
        tol: As in `cg`.
        maxiter: As in `cg`; a restart has one more product.
        damping: As in `cg`.
        restart: After so many steps, whose vectors are all kept, it begins again from there.

    Returns:
        `(x, info)`, as in `cg`, but `info.residual` is that of x itself. In exact arithmetic it
        needs no more steps than x has elements, up to `restart`; if the matrix is singular and has
        no solution for `b`, the residual stays large.

    Raises:
        OptionError: As in `cg`.
        UnsupportedGraphError: As in `cg`.

    Source:
        Saad and Schultz 1986, "GMRES: A Generalized Minimal Residual Algorithm for Solving
        Nonsymmetric Linear Systems", algorithm 4, https://doi.org/10.1137/0907058
    """
    system = _read_system(matvec, b, tol, maxiter, damping)
    if not is_positive_int(restart):
        raise OptionError(message("restart", "a positive int", repr(restart), "restart=50"))
    x, r = system.start(x0)
    left = global_norm(r)
    enough = tol * global_norm(system.b)
    count = 0
    while count < maxiter and left > enough:
        step, steps = _least_residual(system, r, min(restart, maxiter - count), enough)
        x = add(x, step)
        r = sub(system.b, system.product(x))
        left = global_norm(r)
        count += steps
    return system.result(x, left, count)


def _least_residual(
    system: _System, r: list[Leaf], most: int, enough: Tensor
) -> tuple[list[Leaf], int]:
    """Return the step that leaves least of r, of some products of r by the matrix; their number."""
    left = global_norm(r)
    basis = [scale(r, 1 / left)]
    # The matrix in this basis, by host: it is small, and has to be more exact than the leaves.
    matrix, right = (torch.zeros(most + 1, n, dtype=torch.float64, device="cpu") for n in (most, 1))
    right[0] = left.cpu()
    for k in range(most):
        w = system.product(basis[k])
        for _ in range(2):  # a single subtraction leaves w less orthogonal than float32 allows
            overlaps = torch.stack([dot(q, w) for q in basis])
            w = sub(w, weighted_sum(basis, overlaps))
            matrix[: k + 1, k] += overlaps.cpu()
        matrix[k + 1, k] = length = global_norm(w).cpu()
        if not matrix[:, k].isfinite().all():
            return scale(r, float("nan")), k + 1
        square = matrix[: k + 2, : k + 1]
        y = torch.linalg.lstsq(square, right[: k + 2]).solution
        is_enough = (square @ y - right[: k + 2]).norm() <= enough.cpu()
        if is_enough or length <= 10 * torch.finfo(left.dtype).eps * matrix[:, k].norm():
            break
        basis.append(scale(w, 1 / length.to(left.device)))
    return cast("list[Leaf]", weighted_sum(basis[: k + 1], y[:, 0].tolist())), k + 1


def neumann(
    matvec: Callable[[PyTree], PyTree],
    b: PyTree,
    *,
    step: float | None = None,
    tol: float = 1e-6,
    maxiter: int = 100,
    damping: float = 0.0,
) -> tuple[PyTree, SolveInfo]:
    """Return the solution of a linear system, by a Neumann series: the sum of (1 - aA)^k a b.

    Example:
        >>> import torch, gradkit
        >>> x, _ = gradkit.tree.neumann(lambda v: 2 * v, torch.tensor([2.0, 4.0]), step=0.4)
        >>> x
        tensor([1.0000, 2.0000])

    Args:
        matvec: As in `cg`.
        b: As in `cg`.
        step: The number a. None: one over the largest eigenvalue, which 20 more products estimate.
        tol: As in `cg`.
        maxiter: As in `cg`: the largest number of terms.
        damping: As in `cg`.

    Returns:
        `(x, info)`, as in `cg`.

    Raises:
        GradkitError: As in `cg`.

    Source:
        Lorraine et al. 2020, "Optimizing Millions of Hyperparameters by Implicit Differentiation",
        algorithm 3, https://arxiv.org/abs/1911.02590
    """
    system = _read_system(matvec, b, tol, maxiter, damping)
    if step is not None:
        check_number("step", step, "step=0.1, less than two over the largest eigenvalue")
    x, r = scale(system.b, 0.0), system.b
    left = global_norm(r)
    enough = tol * left
    factor = 1 / _largest_eigenvalue(system) if step is None else step
    count = 0
    while count < maxiter and left > enough:
        x = add(x, scale(r, factor))
        r = sub(system.b, system.product(x))
        left = global_norm(r)
        count += 1
    return system.result(x, left, count)


def _largest_eigenvalue(system: _System) -> Tensor:
    """Estimate the largest eigenvalue by power iteration, from above."""
    v = system.b
    for _ in range(_POWER_ITERATIONS):
        v = system.product(scale(v, 1 / global_norm(v)))
    return global_norm(v) * 1.1


@dataclass(frozen=True)
class _System:
    """A linear system, on lists of leaves."""

    matvec: Callable[[PyTree], PyTree]
    b: list[Leaf]  # divided by the unit, since squares of gradients leave the range of float32
    unit: Tensor  # the largest entry of the right-hand side, or one
    spec: Structure
    damping: float

    def product(self, u: list[Leaf]) -> list[Leaf]:
        """Return the matrix times a vector."""
        au = self.leaves(self.matvec(self.spec.unflatten(u)), "matvec(v)")
        return cast("list[Leaf]", add(au, scale(u, self.damping))) if self.damping else au

    def start(self, x0: PyTree) -> tuple[list[Leaf], list[Leaf]]:
        """Return the leaves of where to start, zero for None, and their residual."""
        if x0 is None:
            return scale(self.b, 0.0), self.b
        x = scale(self.leaves(x0, "x0"), 1 / self.unit)
        return x, cast("list[Leaf]", sub(self.b, self.product(x)))

    def leaves(self, tree: PyTree, name: str) -> list[Leaf]:
        """Return the leaves of a tree like the right-hand side."""
        (_, leaves), _ = aligned_leaves({"b": self.spec.unflatten(self.b), name: tree})
        _refuse_graph(leaves, name)
        return leaves

    def result(self, x: list[Leaf], left: Tensor, count: int) -> tuple[PyTree, SolveInfo]:
        """Return the solution as a tree, and the norm of the residual relative to that of b."""
        size = global_norm(self.b)
        relative = left / torch.where(size == 0, torch.ones_like(size), size)
        return self.spec.unflatten(scale(x, self.unit)), SolveInfo(relative, count)


def _read_system(
    matvec: Callable[[PyTree], PyTree], b: PyTree, tol: float, maxiter: int, damping: float
) -> _System:
    check_function(matvec, "matvec")
    for name, value in (("tol", tol), ("damping", damping)):
        check_number(name, value, f"{name}=1e-6", nonnegative=True)
    if not is_positive_int(maxiter):
        raise OptionError(message("maxiter", "a positive int", repr(maxiter), "maxiter=100"))
    (leaves,), spec = aligned_leaves({"b": b})
    _refuse_graph(leaves, "b")
    unit = largest(leaves)
    unit = torch.where(unit == 0, torch.ones_like(unit), unit)
    return _System(matvec, scale(leaves, 1 / unit), unit, spec, damping)


def _refuse_graph(leaves: list[Leaf], name: str) -> None:
    tensors = [x for x in leaves if x is not None]
    has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if has_graph or (in_dual_level() and any(map(carries_tangent, tensors))):
        expected = "tensors that do not require grad, since the steps are not differentiated"
        got = "one that does" if has_graph else "one with a tangent of forward mode"
        fix = "call it under torch.no_grad(), and with x.detach() in forward mode; "
        fix += "gradkit.meta.implicit for a solution that is differentiated"
        raise UnsupportedGraphError(message(name, expected, got, fix))
