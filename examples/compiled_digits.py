"""A whole training step as one compiled function, on scikit-learn's handwritten digits.

Forward pass, gradients, clipping, Adam with a learning rate that falls, and BatchNorm's statistics
are one graph, which is compiled twice (the first step by itself) and then stays. The usual loop is
run beside it: the weights are the same to rounding.

    python examples/compiled_digits.py [--smoke] [--device cuda] [--output folder]

`--smoke` takes the backend aot_eager, which needs no C++ compiler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from _script import blank_figure, conclude, options_of, save, tidy
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradkit

SEED, RATE, MAX_NORM = 0, 1e-3, 1.0
TOLERANCE = 1e-8  # of a weight, in float64
Step = Callable[[float, Tensor, Tensor], float]  # from a learning rate, images, labels to the loss


def network(device: torch.device) -> nn.Module:
    """Return the network at its start."""
    torch.manual_seed(SEED)
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).to(device, torch.float64)


def batches(steps: int, device: torch.device) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield for each step the learning rate, images `[64, 64]` and labels `[64]`."""
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels / 16), torch.tensor(labels)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        rows = torch.randint(len(digits), (64,), generator=generator)
        rate = RATE * (1 + cos(pi * step / steps)) / 2
        yield rate, images[rows].to(device), digits[rows].to(device)


def compiled_step(model: nn.Module, backend: str) -> tuple[Step, Callable[[], dict[str, Tensor]]]:
    """Return a step that is one graph, and what returns the weights and statistics by name."""
    call, params, buffers = gradkit.func.make_functional(model)
    optimizer = gradkit.meta.adam(lr=RATE)

    def loss_of(params: Any, buffers: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        scores, buffers = call(params, buffers, x)
        return cross_entropy(scores, y), buffers

    @torch.compile(fullgraph=True, backend=backend)
    def train(params: Any, buffers: Any, state: Any, rate: Tensor, *batch: Tensor) -> Any:
        grads_of = gradkit.func.value_and_grads(loss_of, has_aux=True, create_graph=False)
        (loss, buffers), grads = grads_of(params, buffers, *batch)
        grads, _ = gradkit.tree.clip_by_global_norm(grads, MAX_NORM)
        params, state = optimizer.step(params, grads, state, lr=rate)
        return loss, params, buffers, state

    params = gradkit.tree.map(Tensor.detach, params)  # a parameter would compile once more
    carry = [params, buffers, optimizer.init(params)]

    def step(rate: float, x: Tensor, y: Tensor) -> float:
        # As a tensor: a learning rate that is a number would be compiled in.
        loss, *carry[:] = train(*carry, torch.tensor(rate, dtype=x.dtype), x, y)
        return float(loss)

    return step, lambda: carry[0] | carry[1]


def usual_step(model: nn.Module) -> tuple[Step, Callable[[], dict[str, Tensor]]]:
    """Return the same as a loop of plain torch."""
    optimizer = torch.optim.Adam(model.parameters())

    def step(rate: float, x: Tensor, y: Tensor) -> float:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.item()

    return step, model.state_dict


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    steps, backend = (30, "aot_eager") if options.smoke else (600, "inductor")
    model = network(options.device)
    sides = {"one graph": compiled_step(deepcopy(model), backend), "usual loop": usual_step(model)}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    seconds = dict.fromkeys(sides, 0.0)
    for number, batch in enumerate(batches(steps, options.device)):
        for name, (step, _) in sides.items():
            start = time.thread_time()
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                losses[name].append(step(*batch))
            seconds[name] += (time.thread_time() - start) * (number > 1)  # the first two compile
    ours, theirs = (weights() for _, weights in sides.values())
    difference = max((ours[name] - theirs[name]).abs().max().item() for name in ours)

    console, picture = Console(), options.output / "compiled_digits.png"
    draw(losses, picture)
    table = Table.grid(padding=(0, 2))
    for name, taken in seconds.items():
        table.add_row(name, f"{1e3 * taken / (steps - 2):.2f} ms of CPU time a step")
    table.add_row("largest difference", f"{difference:.1e} after {steps} steps, in float64")
    console.print(table)
    # Not `>`, which NaN would pass.
    failed = [] if difference <= TOLERANCE else [f"a weight differs by {difference:.1e}"]
    summary = "the weights are those of the usual loop, and no step was compiled again"
    return conclude(console, picture, failed, summary)


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Save a picture of both losses over the steps."""
    figure = blank_figure(7, 3.5)
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", ":"), strict=True):
        axes.semilogy(values, style, label=name)
    tidy(axes, "The loss of a compiled step, and of the usual loop")
    axes.set(xlabel="step", ylabel="cross-entropy")
    save(figure, path)


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
