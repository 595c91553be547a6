"""Learning to adapt, over parameters that are sharded over processes.

A small transformer reads modules of the standard library, and predicts each next character. A task
is one module: two steps of SGD on some passages, and then the loss on other passages of the same
module. MAML learns where such steps begin, and how long they are. Its gradients go through the
steps, so they contain second derivatives. Each process holds its shard of the parameters, and
computes on its part of every batch.

The losses must be those of one process that holds all parameters and whole batches: each process
computes these, too, and compares.

    torchrun --nproc-per-node 2 examples/meta_sharded.py [--smoke] [--curve losses.json]
        [--device cuda] [--output folder]

Started without torchrun, it runs in one process.

Source: MAML is algorithm 1 of Finn et al. 2017, "Model-Agnostic Meta-Learning for Fast Adaptation
of Deep Networks", https://arxiv.org/abs/1703.03400; learned rates of Li et al. 2017, "Meta-SGD",
https://arxiv.org/abs/1707.09835.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path
from tempfile import mkdtemp
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from _script import blank_figure, conclude, options_of, progress_on, save, tidy
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu
from torch.optim import Adam

import gradkit

SEED = 0
BATCH = 12  # passages, of all processes together: a number that 2, 3, 4 and 6 divide
TASKS = 4  # of one step of Adam
INNER_STEPS = 2
FIRST_RATE = 0.3  # of the inner steps
LEARNING_RATE = 3e-3
TOLERANCE = 1e-10  # of the losses against those of one process

# Modules of the standard library. What is learned from the first ones is tried on the last ones.
READ = [
    *("argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "codecs", "configparser"),
    *("copy", "csv", "dataclasses", "datetime", "difflib", "dis", "doctest", "enum", "fileinput"),
    *("fnmatch", "fractions", "functools", "getopt", "glob", "gzip", "heapq", "imaplib", "inspect"),
    *("locale", "mailbox", "mimetypes", "netrc", "optparse", "pdb", "pickle", "platform", "poplib"),
    *("pprint", "profile", "queue", "random", "sched", "shelve", "shlex", "shutil", "socket"),
]
UNSEEN = ["statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "typing"]

Params: TypeAlias = dict[str, Tensor]


# --- The text ------------------------------------------------------------------------------------


def read_module(name: str) -> Tensor:
    """Return the characters of a module of the standard library, as numbers below 128."""
    file = Path(get_path("stdlib")) / f"{name}.py"
    return torch.tensor(list(file.read_text(encoding="utf-8").encode("ascii", "replace")))


@dataclass(frozen=True)
class Task:
    """Passages of one module, `[BATCH, length + 1]`: to adapt to, and to predict afterwards."""

    support: Tensor
    query: Tensor


class Library:
    """The tasks that some modules give, drawn at random: the same in all processes."""

    def __init__(self, names: Sequence[str], length: int, device: torch.device) -> None:
        self._texts = [read_module(name) for name in names]
        self._length, self._device = length, device
        self._random = torch.Generator().manual_seed(SEED)

    def draw(self) -> list[Task]:
        """Return tasks of different modules."""
        chosen = torch.randperm(len(self._texts), generator=self._random)[:TASKS]
        return [self._task(self._texts[index]) for index in chosen]

    def _task(self, text: Tensor) -> Task:
        begins = torch.randint(len(text) - self._length, (2, BATCH, 1), generator=self._random)
        support, query = text[begins + torch.arange(self._length + 1)].to(self._device)
        return Task(support, query)


# --- The transformer -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The sizes of a transformer."""

    characters: int = 128
    length: int = 32
    width: int = 32
    heads: int = 2
    layers: int = 2


class Block(nn.Module):
    """Attention to what came before, and a network for each place, each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.first_norm, self.second_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.read = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of the next layer, `[passages, length, width]`."""
        x = x + self.mix(self.attend(self.read(self.first_norm(x))))
        out: Tensor = x + self.narrow(gelu(self.widen(self.second_norm(x))))
        return out

    def attend(self, projected: Tensor) -> Tensor:
        """Return the attended values, by the formula: fused kernels have no second derivative."""
        rows, length, _ = projected.shape
        split = projected.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = split.unbind()
        scores = queries @ keys.mT / math.sqrt(keys.shape[-1])
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ values).transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    """Scores each next character of passages; reads and writes characters by the same weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.characters, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.scores = nn.Linear(config.width, config.characters)
        self.scores.weight = self.characters.weight
        nn.init.normal_(self.characters.weight, std=0.1)

    def forward(self, passages: Tensor) -> Tensor:
        """Return the scores, `[passages, length, characters]`."""
        states = self.characters(passages) + self.places.weight[: passages.shape[1]]
        scores: Tensor = self.scores(self.norm(self.blocks(states)))
        return scores


def fresh_model(config: Config, device: torch.device) -> Transformer:
    """Return the transformer that every run begins with, in double precision."""
    torch.manual_seed(SEED)
    return Transformer(config).to(device, torch.float64)


# --- Learning to adapt: the same lines over shards and in one process ----------------------------


@dataclass(frozen=True)
class Learner:
    """A model as a function, its parameters, and what this process has of a batch.

    Attributes:
        forward: From parameters and passages to scores.
        params: Where the inner steps begin; whole, or shards.
        log_rate: The logarithm of the rate of the inner steps.
        part: The rows of each batch that this process computes.
        mean: From the loss of this process to that of the whole batch.
    """

    forward: Callable[[Params, Tensor], Tensor]
    params: Params
    log_rate: Tensor
    part: slice
    mean: Callable[[Tensor], Tensor]

    def loss(self, params: Params, passages: Tensor) -> Tensor:
        """Return the mean loss of this process's part of the passages."""
        own = passages[self.part]
        return cross_entropy(self.forward(params, own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())

    def adapted(self, task: Task, steps: int = INNER_STEPS) -> Params:
        """Return the parameters after inner steps, with a graph."""
        unrolled = gradkit.meta.unroll(
            lambda params, _, passages: self.loss(params, passages),
            self.params,
            [task.support] * steps,
            gradkit.meta.sgd(lr=self.log_rate.exp()),
            memory="recompute",
        )
        found: Params = unrolled.params
        return found


def sharded(config: Config, device: torch.device) -> Learner:
    """Return the learner whose parameters are sharded over all processes."""
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (count,))
    call, params, _ = gradkit.distributed.make_functional(fresh_model(config, device), mesh)
    return Learner(
        lambda params, passages: call(params, {}, passages)[0],
        params,
        first_log_rate(device),
        slice(rank, None, count),
        gradkit.distributed.all_reduce,
    )


def whole(config: Config, device: torch.device) -> Learner:
    """Return the learner that is one process by itself."""
    call, params, _ = gradkit.func.make_functional(fresh_model(config, device))
    return Learner(
        lambda params, passages: call(params, {}, passages)[0],
        params,
        first_log_rate(device),
        slice(None),
        lambda loss: loss,
    )


def first_log_rate(device: torch.device) -> Tensor:
    """Return where learning the rate of the inner steps begins."""
    first = math.log(FIRST_RATE)
    return torch.tensor(first, dtype=torch.float64, device=device, requires_grad=True)


def meta_step(learner: Learner, tasks: Sequence[Task]) -> tuple[Tensor, Any]:
    """Return the mean loss after adapting to each task, and its gradients."""
    losses = [learner.loss(learner.adapted(task), task.query) for task in tasks]
    # The rate multiplies gradients that are means over all processes: its gradient is one, too.
    learned = {"params": learner.params, "log_rate": learner.log_rate}
    values, grads = gradkit.value_and_grads(losses, learned, weights=1 / len(tasks))
    return learner.mean(torch.stack(values).mean()), grads


@torch.no_grad()
def unadapted(learner: Learner, tasks: Sequence[Task]) -> Tensor:
    """Return the mean loss without inner steps."""
    losses = [learner.loss(learner.params, task.query) for task in tasks]
    return learner.mean(torch.stack(losses).mean())


def by_steps(learner: Learner, tasks: Sequence[Task]) -> list[float]:
    """Return the mean loss on tasks after 0, 1, 2, ... inner steps."""
    curve = []
    for steps in range(2 * INNER_STEPS + 1):
        losses = [
            learner.loss(learner.adapted(task, steps) if steps else learner.params, task.query)
            for task in tasks
        ]
        curve.append(learner.mean(torch.stack(losses).detach().mean()).item())
    return curve


# --- Training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How long to train, and the threshold of the checks."""

    steps: int
    gain: float  # by which the inner steps must lower the loss on unseen modules


FULL = Size(steps=80, gain=0.2)
SMOKE = Size(steps=3, gain=-torch.inf)


@dataclass(frozen=True)
class Curves:
    """The losses of a training, which one process must reproduce.

    Attributes:
        before: On the modules that are read, before the inner steps, by step of Adam.
        after: The same, after the inner steps.
        at_first: On unseen modules, by number of inner steps, before training.
        at_last: The same after training.
        rate: The rate of the inner steps that was learned.
    """

    before: list[float]
    after: list[float]
    at_first: list[float]
    at_last: list[float]
    rate: float

    def difference(self, other: Curves) -> float:
        """Return the largest difference of two losses; NaN if one is NaN."""
        ours, theirs = (torch.tensor(one.numbers(), dtype=torch.float64) for one in (self, other))
        return (ours - theirs).abs().max().item()

    def numbers(self) -> list[float]:
        """Return all losses, and the rate."""
        return [*self.before, *self.after, *self.at_first, *self.at_last, self.rate]


@dataclass(frozen=True)
class Modules:
    """The modules to learn from, and tasks of others to try it on."""

    read: Library
    unseen: Sequence[Task]

    @classmethod
    def of(cls, length: int, device: torch.device) -> Modules:
        """Return modules of which each call draws the same tasks."""
        return cls(Library(READ, length, device), Library(UNSEEN, length, device).draw())


def train(learner: Learner, modules: Modules, steps: int, progress: Progress, name: str) -> Curves:
    """Train a learner in place, and return its losses."""
    # Two of them, as Adam takes all of its tensors at once: shards, or whole ones.
    optimizers = {
        "params": Adam(learner.params.values(), lr=LEARNING_RATE),
        "log_rate": Adam([learner.log_rate], lr=LEARNING_RATE),
    }
    task = progress.add_task(name, total=steps, status="")
    at_first, before, after = by_steps(learner, modules.unseen), [], []
    for _ in range(steps):
        tasks = modules.read.draw()
        before.append(unadapted(learner, tasks).item())
        loss, grads = meta_step(learner, tasks)
        gradkit.step_(optimizers["params"], learner.params, grads["params"])
        gradkit.step_(optimizers["log_rate"], learner.log_rate, grads["log_rate"])
        after.append(loss.item())
        progress.update(task, advance=1, status=f"loss {after[-1]:.2f}")
    rate = learner.log_rate.exp().item()
    return Curves(before, after, at_first, by_steps(learner, modules.unseen), rate)


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        curves: The losses over all processes.
        difference: The largest difference from those of one process.
        numbers: How many numbers the parameters have.
        held: How many of them this process holds.
    """

    curves: Curves
    difference: float
    numbers: int
    held: int


def experiment(size: Size, config: Config, device: torch.device, console: Console) -> Outcome:
    """Train over all processes together and, for comparison, in each process on whole batches."""
    together, alone = sharded(config, device), whole(config, device)
    with progress_on(console) as progress:
        count = dist.get_world_size()
        name = "1 process" if count == 1 else f"{count} processes"
        curves, expected = (
            train(learner, Modules.of(config.length, device), size.steps, progress, called)
            for learner, called in ((together, name), (alone, "one alone"))
        )
    held = sum(p.to_local().numel() for p in together.params.values() if isinstance(p, DTensor))
    numbers = sum(param.numel() for param in alone.params.values())
    return Outcome(curves, curves.difference(expected), numbers, held)


def failed_checks(outcome: Outcome, size: Size) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    # Not `>`, which NaN would pass.
    if not outcome.difference <= TOLERANCE:
        failed.append(f"the losses differ by {outcome.difference:.1e} from those of one process")
    # A parameter of a few rows may be whole on the first ranks.
    share = outcome.numbers / dist.get_world_size()
    if outcome.held > 1.1 * share:
        failed.append(f"this process holds {outcome.held} of {outcome.numbers} numbers")
    curve = outcome.curves.at_last
    gain = curve[0] - curve[INNER_STEPS]
    if not gain > size.gain:
        failed.append(f"the inner steps lower the loss on unseen modules by {gain:.3f} only")
    return failed


# --- Tables and pictures, and several processes --------------------------------------------------


def result_table(outcome: Outcome) -> Table:
    """Return the results, one line each."""
    curves, last = outcome.curves, outcome.curves.at_last
    table = Table.grid(padding=(0, 2))
    table.add_row("parameters", f"{outcome.held:,} of {outcome.numbers:,} numbers in this process")
    table.add_row("one process", f"largest difference of a loss {outcome.difference:.1e}")
    table.add_row(
        "unseen modules",
        f"loss {last[0]:.3f}, after {INNER_STEPS} steps at rate {curves.rate:.2f} "
        f"{last[INNER_STEPS]:.3f}",
    )
    return table


def draw(curves: Curves, picture: Path) -> None:
    """Draw the losses, over the steps of training and over the inner steps."""
    figure = blank_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    left.plot(curves.before, label="before the inner steps", alpha=0.8)
    left.plot(curves.after, label="after them", alpha=0.8)
    left.set(xlabel="step of Adam", ylabel="loss for each character")
    tidy(left, "Modules that it reads")
    right.plot(curves.at_first, "o:", label="before training")
    right.plot(curves.at_last, "o-", label="after training")
    right.set(xlabel="inner steps")
    tidy(right, "Unseen modules")
    save(figure, picture)


def join_processes(kind: torch.device) -> torch.device:
    """Join the other processes, if there are any; return where this process computes."""
    if not dist.is_torchelastic_launched():
        rendezvous = f"file://{mkdtemp()}/file"
        dist.init_process_group("gloo", rendezvous, rank=0, world_size=1)
        return torch.device("cpu")
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if kind.type != "cuda" or not enough:  # gloo has no reduce_scatter of tensors on a GPU
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(kind.type, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    parser = options_of(__doc__)
    parser.add_argument("--curve", type=Path, help="where to save the losses, to compare runs")
    options = parser.parse_args(argv)
    size = SMOKE if options.smoke else FULL
    device = join_processes(options.device)
    try:
        if BATCH % dist.get_world_size():
            parser.error(f"{BATCH} passages cannot be divided among {dist.get_world_size()}")
        is_first = dist.get_rank() == 0
        console = Console(quiet=not is_first)
        outcome = experiment(size, Config(), device, console)
        failed = failed_checks(outcome, size)
    finally:
        dist.destroy_process_group()
    if not is_first:
        return 1 if failed else 0
    if options.curve is not None:
        options.curve.write_text(json.dumps(outcome.curves.numbers()), encoding="utf-8")
    picture = options.output / "meta_sharded.png"
    draw(outcome.curves, picture)
    console.print(result_table(outcome))
    return conclude(console, picture, failed, "the losses are those of one process")


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
