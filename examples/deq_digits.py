"""A deep equilibrium model of handwritten digits, differentiated at its fixed point.

Its hidden layer is as deep as it takes: z = tanh(W z + U x + b) is iterated until z no longer
changes. `gradkit.meta.implicit(fixed_point=)` differentiates the fixed point, by one linear system
whose matrix is not symmetric, and keeps nothing of the iteration. At the end the gradient of a
batch is compared with that through all iterations, and so is the memory that each keeps.

    python examples/deq_digits.py [--smoke] [--device cuda] [--output folder]

Source: Bai et al. 2019, "Deep Equilibrium Models", equation (6), https://arxiv.org/abs/1909.01377;
scikit-learn's digits.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from _script import blank_figure, conclude, options_of, save, tidy
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

import gradkit

SEED, HIDDEN, BATCH = 0, 48, 128
SHRINKS_BY = 0.8  # the norm of W: each iteration brings two points this much nearer
MOST = 200  # iterations
CLOSE = 1e-6  # how far the gradients may be apart, in float64
Params: TypeAlias = dict[str, Tensor]
Parts: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def load(device: torch.device) -> Parts:
    """Return images `[N, 64]` and digits `[N]`, for training and for testing."""
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=450, random_state=SEED)
    x, x_test, y, y_test = map(torch.from_numpy, parts)
    return tuple(part.to(device) for part in (x, y, x_test, y_test))  # type: ignore[return-value]


def initial(device: torch.device) -> Params:
    """Return the weights, in float64."""
    torch.manual_seed(SEED)
    shapes = {"W": (HIDDEN, HIDDEN), "U": (HIDDEN, 64), "b": (HIDDEN,), "head": (10, HIDDEN)}
    return {
        name: (torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5)
        .to(device)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def layer(z: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Return the next hidden states `[B, H]`."""
    return (z @ given["W"].T + given["injected"]).tanh()


def iterate(z: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Return the hidden states that the layer no longer changes."""
    for _ in range(MOST):
        before, z = z, layer(z, given)
        if (z - before).norm() <= 1e-9 * z.norm():
            break
    return z


equilibrium = gradkit.meta.implicit(iterate, fixed_point=layer, tol=1e-8)


def scores(params: Params, x: Tensor, find: Any = equilibrium) -> Tensor:
    """Return the scores `[B, 10]` of images."""
    w = SHRINKS_BY * params["W"] / torch.linalg.matrix_norm(params["W"], 2)
    given = {"W": w, "injected": x @ params["U"].T + params["b"]}
    z: Tensor = find(torch.zeros(len(x), HIDDEN).to(x), given)
    return z @ params["head"].T


def train(params: Params, data: Parts, epochs: int) -> tuple[list[float], list[float]]:
    """Train in place; return the loss of each step, and the accuracy after each epoch."""
    x, y, x_test, y_test = data
    optimizer = torch.optim.Adam(params.values(), lr=0.01)
    losses, accuracies = [], []
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).to(x.device).chunk(-(-len(x) // BATCH)):
            loss = cross_entropy(scores(params, x[rows]), y[rows])
            losses.append(float(gradkit.minimize_(optimizer, loss)))
        with torch.no_grad():
            accuracies.append(float((scores(params, x_test).argmax(1) == y_test).double().mean()))
    return losses, accuracies


def grads_and_bytes(params: Params, x: Tensor, y: Tensor, find: Any) -> tuple[Any, int]:
    """Return the gradient of a batch, and how many bytes its graph keeps."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = cross_entropy(scores(params, x, find), y)
    return gradkit.value_and_grads(loss, params)[1], sum(kept.values())


def compare(params: Params, x: Tensor, y: Tensor) -> tuple[float, int, int]:
    """Return how far both gradients are apart, and the bytes that each keeps."""
    run = partial(grads_and_bytes, params, x, y)
    (ours, few), (theirs, many) = run(equilibrium), run(iterate)
    apart = gradkit.tree.global_norm(gradkit.tree.sub(ours, theirs))
    return float(apart / gradkit.tree.global_norm(theirs)), few, many


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    epochs, least = (2, 0.8) if options.smoke else (12, 0.95)
    data, params = load(options.device), initial(options.device)
    losses, accuracies = train(params, data, epochs)
    apart, few, many = compare(params, data[0][:BATCH], data[1][:BATCH])

    console, picture = Console(), options.output / "deq_digits.png"
    draw(losses, accuracies, picture)
    table = Table.grid(padding=(0, 2))
    table.add_row("test accuracy", f"{accuracies[-1]:.1%}")
    table.add_row("gradient", f"{apart:.1e} from that through all iterations")
    table.add_row("kept for it", f"{few / 1e6:.2f} MB, and {many / 1e6:.2f} MB through all")
    console.print(table)
    # Not `>`, which NaN would pass.
    failed = [] if apart <= CLOSE else [f"the gradients are {apart:.1e} apart"]
    failed += [] if accuracies[-1] >= least else [f"the accuracy is not at least {least:.0%}"]
    failed += [] if 5 * few < many else [f"{few} bytes are kept, and through all only {many}"]
    summary = "the gradient at the fixed point is that of the iteration, in a fifth of its memory"
    return conclude(console, picture, failed, summary)


def draw(losses: list[float], accuracies: list[float], path: Path) -> None:
    """Save a picture of the loss over the steps, and of the accuracy over the epochs."""
    figure = blank_figure(9, 3.5)
    left, right = figure.subplots(1, 2)
    left.semilogy(losses, label="cross-entropy")
    tidy(left, "A deep equilibrium model of digits")
    left.set(xlabel="step", ylabel="training loss")
    right.plot(range(1, len(accuracies) + 1), accuracies, label="450 test images")
    tidy(right, "What it recognizes")
    right.set(xlabel="epoch", ylabel="accuracy")
    save(figure, path)


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
