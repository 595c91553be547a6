"""The same gradient three ways: of computed losses, of a function, and in two processes.

A network says which digit it sees, and whether it is odd. The gradient of both losses is taken by
`gradkit.value_and_grads`, `gradkit.func.value_and_grads` and, with half of the batch in each of two
processes, `gradkit.distributed.value_and_grads`, and compared with what torch leaves in `.grad`.
Where the engine runs the same calls in the same order, that is bit for bit; otherwise the sums are
taken in another order, and the table has the largest difference.

    python examples/proof/same_gradient_three_ways.py [--seeds 3] [--plot differences.png]

Source: torch's own `backward()` and DistributedDataParallel.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported before a group exists, so that it does not hold the group after its end.
import torch.distributed.nn.functional  # noqa: F401
from _proof import conclude, digits, parse, save_plot, table, use_one_thread
from torch import Tensor, nn
from torch.autograd import backward
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradkit

BATCH, RANKS = 256, 2

Grads = dict[str, Tensor]
Images = tuple[Tensor, Tensor]  # and their digits


class Network(nn.Module):
    """Two heads on a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.digit, self.odd = nn.Linear(64, 10), nn.Linear(64, 2)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of both heads."""
        features = self.trunk(images)
        return self.digit(features), self.odd(features)


def problem(seed: int) -> tuple[Network, Images]:
    """Return a network and a batch in float32; the same for the same seed."""
    images, labels = digits(seed)
    torch.manual_seed(seed)
    return Network(), (images[:BATCH].float(), labels[:BATCH])


def losses_of(scores: tuple[Tensor, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """Return the loss of each head."""
    return {
        "digit": cross_entropy(scores[0], labels), "odd": cross_entropy(scores[1], labels % 2)
    }  # fmt: skip


def left_in_grad(model: nn.Module) -> Grads:
    """Return copies of `.grad`, and clear it."""
    grads: Grads = gradkit.read_grads(dict(model.named_parameters()))
    gradkit.clear_grads_(model)
    return grads


def on_a_rank(rank: int, folder: str, seeds: int) -> None:
    """Save the gradients of this rank, by DDP and by gradkit, for each seed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=RANKS)
    results = []
    for seed in range(seeds):
        network, (images, labels) = problem(seed)
        part = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
        model = DistributedDataParallel(network)
        backward([*losses_of(model(images[part]), labels[part]).values()])
        usual = left_in_grad(network)
        losses = losses_of(model(images[part]), labels[part])
        _, grads = gradkit.distributed.value_and_grads(losses, model)
        results.append((usual, dict(zip(usual, grads.values(), strict=True))))
        del model
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def in_two_processes(seeds: int) -> list[list[tuple[Grads, Grads]]]:
    """Return, for each rank and seed, the gradients of DDP and of gradkit."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_a_rank, (folder, seeds), nprocs=RANKS)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


def of_function(network: Network, data: Images) -> Grads:
    """Return the gradient of both losses as a function of the parameters."""
    call, params, buffers = gradkit.func.make_functional(network)

    def losses(params: Grads) -> dict[str, Tensor]:
        scores, _ = call(params, buffers, data[0])
        return losses_of(scores, data[1])

    _, grads = gradkit.func.value_and_grads(losses)(params)
    result: Grads = grads
    return result


def difference(a: Grads, b: Grads) -> float:
    """Return the largest difference, relative to the largest entry; 0 only for the same bits."""
    largest = max(grad.abs().max().item() for grad in a.values())
    gap = max((a[name] - b[name]).abs().max().item() for name in a)
    same = all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)
    return 0.0 if same else max(gap / largest, sys.float_info.min)


BITS = (
    "value_and_grads, backward() of both losses",
    "per_loss_grads added up, a backward() each",
    "distributed, backward() of DDP",
    "distributed, on one rank and the other",
)
ROUNDED = ("func, value_and_grads", "distributed, value_and_grads of the whole batch")


def measure(seeds: int) -> dict[str, list[float]]:
    """Return how far apart two ways are, for each seed."""
    apart: dict[str, list[float]] = {name: [] for name in (*BITS, *ROUNDED)}
    first, second = in_two_processes(seeds)
    for seed in range(seeds):
        network, (images, labels) = problem(seed)
        backward([*losses_of(network(images), labels).values()])
        usual = left_in_grad(network)
        _, eager = gradkit.value_and_grads(losses_of(network(images), labels), network)

        losses = losses_of(network(images), labels)
        backward(losses["digit"], retain_graph=True)
        backward(losses["odd"])
        one_by_one = left_in_grad(network)
        per_loss = gradkit.per_loss_grads(losses_of(network(images), labels), network)
        added = gradkit.tree.add(per_loss["digit"], per_loss["odd"])

        (ddp, of_ranks), (_, of_other) = first[seed], second[seed]
        pairs: list[tuple[Any, Any]] = [
            (usual, eager), (one_by_one, added), (ddp, of_ranks), (of_other, of_ranks),
            (eager, of_function(network, (images, labels))), (eager, of_ranks),
        ]  # fmt: skip
        for name, pair in zip(apart, pairs, strict=True):
            apart[name].append(difference(*pair))
    return apart


def draw(apart: dict[str, list[float]], axes: Any) -> None:
    """Draw the largest differences, in units of what float32 rounds to."""
    units = [max(gaps) / torch.finfo(torch.float32).eps for gaps in apart.values()]
    axes.barh(list(apart), units)
    axes.set(xlabel="largest difference, in float32 eps")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status: 0 if the claims hold."""
    options = parse(__doc__, argv)
    apart = measure(options.seeds)
    rows = [
        [name, f"{gaps.count(0.0)} of {len(gaps)}", f"{max(gaps):.1e}" if any(gaps) else "0"]
        for name, gaps in apart.items()
    ]
    print(table(["compared", "same bits", "largest difference, relative"], rows))
    print(
        "\nFails: the bits of a function, and of a mean over processes, are not promised, as sums"
    )
    print("are taken in another order. Nor are those of another torch or processor.")
    save_plot(options.plot, partial(draw, apart))
    claims = {f"the same bits: {name}": not any(apart[name]) for name in BITS}
    claims |= {f"equal up to rounding: {name}": max(apart[name]) < 1e-5 for name in ROUNDED}
    return conclude(claims)


if __name__ == "__main__":
    use_one_thread()
    sys.exit(main())
