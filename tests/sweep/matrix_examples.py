"""Functions of matrices, or of their entries, that torch differentiates wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

# Of two rows; a right-hand side, or the coefficients of reflections.
SOLVED: Mapping[str, Function] = {
    "solve": lambda a: torch.linalg.solve(a, a.new_tensor([1.0, 2.0])).sin().sum(),
    "solve_ex": lambda a: torch.linalg.solve_ex(a, a.new_tensor([1.0, 2.0]))[0].sin().sum(),
    "tensorsolve": lambda a: torch.linalg.tensorsolve(a, a.new_tensor([1.0, 2.0])).sin().sum(),
    "householder_product": lambda a: (
        torch.linalg.householder_product(a, a.new_tensor([0.5, 0.25])).sin().sum()
    ),
}
BY_FORWARD: Mapping[str, Function] = {  # of which the third derivative by forward mode is wrong
    "prod": lambda a: torch.prod(a),
    "eigvals": lambda a: torch.linalg.eigvals(a).real,
    "eig": lambda a: torch.linalg.eig(a)[0].real,
}
SYSTEMS = ([[[4.0, 1.0], [2.0, 3.0]], [[2.0, 1.0], [4.0, 6.0]]], [[[1.0], [2.0]], [[3.0], [5.0]]])
_WHERE = [[0, 1], [1, 0]]


def by_factors(a: Tensor, b: Tensor) -> Tensor:
    """Return the solution of a system."""
    solution: Tensor = torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b)
    return solution


def sparse(x: Tensor) -> Tensor:
    """Return a matrix with some entries, made sparse first."""
    where = torch.tensor(_WHERE, device=x.device)
    return torch.sparse_coo_tensor(where, x, (2, 2), check_invariants=False).to_dense()


def dense(x: Tensor) -> Tensor:
    """Return the same, dense from the beginning."""
    return x.new_zeros(2, 2).index_put(tuple(torch.tensor(_WHERE, device=x.device)), x)
