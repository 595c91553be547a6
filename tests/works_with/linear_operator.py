"""`solve`, `logdet`, `inv_quad_logdet` and `sqrt_inv_matmul` of a dense operator, exact and by conjugate gradients."""

import linear_operator
import torch

from tests.works_with._oracles import of_function

PIP = "linear_operator"
NOTE = "second derivatives: `settings.fast_computations(False, False, False)`"


def tries():
    a = torch.randn(4, 4, dtype=torch.float64)
    b = torch.randn(4, 1, dtype=torch.float64)

    def op(a):
        return linear_operator.to_linear_operator(a @ a.T + torch.eye(4, dtype=a.dtype))

    for fast in (False, True):

        def guarded(fn, fast=fast):
            def run(a):
                with (
                    linear_operator.settings.fast_computations(fast, fast, fast),
                    linear_operator.settings.cg_tolerance(1e-10),
                    linear_operator.settings.max_cholesky_size(0 if fast else 800),
                    linear_operator.settings.min_preconditioning_size(10**6),
                ):
                    return fn(a)

            return run

        name = "fast" if fast else "exact"
        yield from of_function(
            guarded(lambda a: op(a).solve(b).exp().sum()), a, f"solve, {name}: ", tol=1e-4
        )
        if not fast:
            yield from of_function(
                guarded(lambda a: op(a).logdet().sin()), a, f"logdet, {name}: ", tol=1e-4
            )
            yield from of_function(
                guarded(lambda a: op(a).inv_quad_logdet(b, logdet=True)[0].sin()),
                a,
                f"inv_quad, {name}: ",
                tol=1e-4,
            )
            yield from of_function(
                guarded(lambda a: op(a).sqrt_inv_matmul(b).exp().sum()),
                a,
                f"sqrt_inv_matmul, {name}: ",
                tol=1e-3,
            )
            yield from of_function(
                guarded(
                    lambda a: (
                        (op(a).root_decomposition().root.to_dense().T @ b).square().sum().sin()
                    )
                ),
                a,
                f"root_decomposition, {name}: ",
                tol=1e-3,
            )
            yield from of_function(
                guarded(lambda a: op(a).diagonalization()[0].exp().sum().sin() * 1e-3),
                a,
                f"diagonalization, {name}: ",
                tol=1e-3,
            )
