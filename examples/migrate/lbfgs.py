"""Ridge regression by LBFGS, an optimizer that calls a closure for several gradients in one step.

    python examples/migrate/lbfgs.py [--smoke] [--device cuda]

`legacy` and `functional` are the same loop, line by line. The weights must be equal bit for bit,
and, as the problem is convex, close to those that scikit-learn finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

import torch
from side_by_side import parse, verdict
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.optim import LBFGS

import gradkit

ALPHA = 0.1

Loop: TypeAlias = Callable[[nn.Linear, Tensor, Tensor, int], float]


def lbfgs(model: nn.Module) -> LBFGS:
    """Return the optimizer."""
    return LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")


def objective(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """Return what `sklearn.linear_model.Ridge` minimizes."""
    errors: Tensor = model(x).squeeze(1) - y
    return errors.square().sum() + ALPHA * model.weight.square().sum()


def legacy(model: nn.Linear, x: Tensor, y: Tensor, steps: int) -> float:
    """Fit through `.grad`, and return the norm of the last gradient."""
    optimizer = lbfgs(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return gradkit.tree.global_norm(gradkit.read_grads(model)).item()


def functional(model: nn.Linear, x: Tensor, y: Tensor, steps: int) -> float:
    """Fit with gradients as values, and return the norm of the last gradient."""
    optimizer = lbfgs(model)

    def closure() -> Tensor:
        loss = objective(model, x, y)
        value, grads = gradkit.value_and_grads(loss, model)
        gradkit.write_grads_(model, grads)  # LBFGS reads .grad only
        return value

    for _ in range(steps):
        with gradkit.capture_grads(model) as captured:  # restores .grad
            optimizer.step(closure)  # type: ignore[no-untyped-call]
    return gradkit.tree.global_norm(captured.grads).item()


def load(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 442 patients: ten standardized features, and how far the disease has gone."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    features, target = (torch.tensor(v, dtype=torch.float64, device=device) for v in (x, y))
    return (features - features.mean(0)) / features.std(0), target


def train(loop: Loop, x: Tensor, y: Tensor, steps: int) -> tuple[nn.Linear, float]:
    """Return a model fitted by this loop, and the norm of its last gradient."""
    torch.manual_seed(0)  # both loops start from the same weights
    model = nn.Linear(10, 1, dtype=torch.float64).to(x.device)
    return model, loop(model, x, y, steps)


def main(argv: list[str] | None = None) -> int:
    """Fit with both loops, and return the exit status: 0 if all weights are equal, and correct."""
    options = parse(__doc__, argv)
    x, y = load(options.device)
    steps = 5 if options.smoke else 20
    (theirs, their_norm), (ours, norm) = train(legacy, x, y, steps), train(functional, x, y, steps)
    known = Ridge(alpha=ALPHA).fit(x.cpu().numpy(), y.cpu().numpy())
    error = (ours.weight.detach().cpu().squeeze(0) - torch.tensor(known.coef_)).abs().max().item()
    if norm != their_norm or error > 1e-4:
        print(f"FAILED: gradient norms {norm} and {their_norm}, {error} from scikit-learn's Ridge",
              file=sys.stderr)  # fmt: skip
        return 1
    fit = f"gradient norm {norm:.1e}, within {error:.1e} of scikit-learn's Ridge"
    return verdict(theirs, ours, f"lbfgs: {fit}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # with matrices this small, threads mostly wait for each other
    sys.exit(main())
