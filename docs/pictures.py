"""Make the pictures of the documentation anew: `make pictures`, a few minutes on one core.

They are in the repository, so that the pages show them where nothing is built. Those of the gallery
and of the proofs are from full runs of the scripts.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from rich.console import Console

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PICTURES = DOCS / "pictures"
EXAMPLES = (
    "compiled_digits",
    "deq_digits",
    "eight_losses",
    "fewshot_digits",
    "force_field",
    "learn_hyperparams",
    "maml_sinusoid",
    "meta_sharded",
    "multitask_ddp",
    "multitask_digits",
    "per_sample_digits",
    "private_digits",
)
PROOFS = ("hyper_cleaning", "influence", "losses_surgery", "training_attribution")
NOTEBOOKS = ("why_losses_fight", "learning_to_learn")
INK, GREY = "#1f4e79", "#444444"


def main() -> None:
    """Make all pictures, or those whose names are given."""
    makers = {
        "memory": draw_memory,
        "call": draw_call,
        "rooms": draw_rooms,
        "shards": draw_shards,
        "conflicts": draw_conflicts,
        "gram_memory": draw_gram_memory,
    }
    for name in sys.argv[1:] or [*makers, *NOTEBOOKS, *EXAMPLES, *PROOFS]:
        if name in makers:
            makers[name]()
        elif name in NOTEBOOKS:
            draw_notebook(name)
        elif name in PROOFS:
            run_script(f"proof/{name}", "--plot", PICTURES / f"{name}.png")
        else:
            run_script(name, "--output", PICTURES)


# --- The gallery, and the picture in the README --------------------------------------------------


def run_script(script: str, option: str, output: Path) -> None:
    """Run a script of the examples in full, which saves its picture."""
    path = ROOT / "examples" / f"{script}.py"
    command = [sys.executable, str(path), option, str(output)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | os.environ
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    shrink(PICTURES / f"{path.stem}.png")


def shrink(path: Path) -> None:
    """Store a picture with a palette of 256 colors, in about a third of the size."""
    with Image.open(path) as picture:
        # Without alpha: the backgrounds are white.
        small = picture.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT)
    small.save(path, optimize=True)


def draw_conflicts() -> None:
    """Train the network of `multitask_digits.py`, and draw how its losses conflict."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch

    example = importlib.import_module("multitask_digits")

    torch.set_num_threads(1)
    console = Console(quiet=True)
    data, _ = example.load(example.FULL.images, torch.device("cpu"))
    _, _, snapshots = example.train_both(data, example.FULL, console)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    example.record(snapshots).plot(figure.subplots())
    figure.savefig(PICTURES / "conflicts.png", dpi=130)
    shrink(PICTURES / "conflicts.png")


# --- What the inner products of losses take ------------------------------------------------------

PEAKS = {
    "gram": "gradkit.gram",
    "autogram": "TorchJD autogram",
    "sets": "tree.gram(per_loss_grads)",
    "jac_to_grad": "TorchJD backward, jac_to_grad",
    "backward": "one backward pass",
}


def draw_gram_memory() -> None:
    """Draw the peak memory of ways to inner products, as losses and parameters grow."""
    sys.path.insert(0, str(ROOT))
    import torch

    streaming = importlib.import_module("benchmarks.streaming")
    plan = importlib.import_module("benchmarks.plan").Plan(torch.device("cpu"))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = streaming.growth(plan).items()
    for axes, (noun, peaks) in zip(figure.subplots(1, 2), panels, strict=True):
        for way, label in PEAKS.items():
            style = "k:" if way == "backward" else "o-"
            axes.plot(list(peaks), [found[way] for found in peaks.values()], style, label=label)
        axes.set(xlabel=f"number of {noun}", ylabel="peak memory, MB", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(PICTURES / "gram_memory.png", dpi=130)
    shrink(PICTURES / "gram_memory.png")


def draw_notebook(name: str) -> None:
    """Run the cells of a page, and save its `figure`."""
    import torch

    torch.set_num_threads(1)
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    cells: dict[str, Any] = {}
    for cell in re.findall(r"(?s)```python\n(.*?)```", page):
        exec(cell, cells)
    cells["figure"].savefig(PICTURES / f"{name}.png", dpi=100)
    shrink(PICTURES / f"{name}.png")


# --- What unroll stores --------------------------------------------------------------------------

STEPS = 6


def draw_memory() -> None:
    """Draw what each choice of `memory` stores of an inner loop, and what it recomputes."""
    rows: dict[str | int, str] = {
        "store": "stored: the graph of every step\nrecomputed: nothing",
        "recompute": "stored: the parameters before every step\nrecomputed: every step, once",
        3: "stored: the parameters before every third step\nrecomputed: every step, twice",
    }
    with rc_context({"svg.hashsalt": "gradkit"}):  # the same bytes each time
        figure, ax = blank_page(10.2, 3.1, xlim=(-5.4, 23.8), ylim=(-3.4, 0.7))
        for i, (memory, text) in enumerate(rows.items()):
            draw_steps(ax, -i, memory)
            ax.text(-5.1, -i, f"memory={memory!r}", va="center", family="monospace", fontsize=10)
            ax.text(2 * STEPS + 0.8, -i, text, va="center", fontsize=10, linespacing=1.5)
        legend = (
            "A circle is the parameters and the optimizer's state between two steps, a square the "
            "graph of a step.\n"
            "Filled: stored for the backward pass.  Dashed: not stored.  1x, 2x: how often the "
            "step is recomputed."
        )
        ax.text(-5.1, -3.0, legend, va="center", fontsize=9, linespacing=1.6, color=GREY)
        save(figure, "memory")


def draw_steps(ax: Axes, row: float, memory: str | int) -> None:
    """Draw the steps of one choice of memory: what is filled is stored."""
    every = memory if isinstance(memory, int) else 1
    times = {"store": 0, "recompute": 1}.get(str(memory), 2)
    ax.plot([0, 2 * STEPS], [row, row], color=INK, linewidth=1, zorder=1)
    for step in range(STEPS + 1):
        stored = times > 0 and step % every == 0 and step < STEPS
        face = INK if stored else "white"
        ax.plot(2 * step, row, "o", markersize=9, mec=INK, mfc=face, zorder=2)
    for step in range(STEPS):
        box = {
            "boxstyle": "square,pad=0.45",
            "edgecolor": INK,
            "facecolor": "white" if times else INK,
            "linestyle": "--" if times else "-",
        }
        # Where nothing is recomputed, the text only gives the box its size.
        text = f"{times}x" if times else "1x"
        ax.text(2 * step + 1, row, text, ha="center", va="center", color=INK, bbox=box)


# --- How it works --------------------------------------------------------------------------------

CALL = (
    ("eager", "value_and_grads, per_loss_grads, simultaneous_grads: one screen each"),
    ("_core.params", "expand modules, iterators, optimizers; flatten; check types, sizes, options"),
    ("_checks", "raise on what torch would return silently wrong, zero or local"),
    ("_autograd", "run the passes, and free each part of the graph after its last pass"),
    ("_core.ownership", "copy a gradient that shares memory, or has other strides than its param"),
    ("_core.pytree", "None or zeros for unreached params; rebuild the tree of the params"),
)
RUNS = "#cfe2f3"


def draw_call() -> None:
    """Draw how a call passes through the rooms."""
    with rc_context({"svg.hashsalt": "gradkit"}):
        figure, ax = blank_page(9.6, 5.4, xlim=(-2.9, 11.5), ylim=(-7.6, 0.5))
        ends: dict[str, Any] = {"fontsize": 11, "ha": "center", "va": "center"}
        ax.text(0, 0, "losses, params, weights", **ends)
        ax.text(0, -7.2, "values, grads", **ends)
        for row, (room, text) in enumerate(CALL, start=1):
            box: dict[str, Any] = {
                "boxstyle": "round,pad=0.45",
                "edgecolor": INK,
                "facecolor": RUNS if room == "_autograd" else "white",
            }
            ax.text(0, -row, f"{room:^15}", family="monospace", bbox=box, **ends)
            ax.text(1.9, -row, text, va="center", fontsize=10)
        for row in range(7):
            arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
            end = 0.32 if row < 6 else 0.05
            ax.annotate("", xy=(0, -row - 1 + end), xytext=(0, -row - 0.3), arrowprops=arrow)
        note = "Blue: the engine runs. Bad input raises above it, before anything has changed."
        ax.text(1.9, -7.2, note, fontsize=9, va="center", color=GREY)
        save(figure, "call")


ROOMS = {
    "__main__": "python -m gradkit",
    "report": "explain, conflicts, compare",
    "meta": "unroll, implicit, optimizers, tasks",
    "eager": "value_and_grads, ...",
    "streaming": "gram, ...",
    "retain": "safe_retain",
    "func": "the same over torch.func",
    "dotgrad": "the .grad workflow",
    "distributed": "DDP, FSDP2, all_reduce",
    "_autograd": "runs the engine",
    "tree": "arithmetic on gradients",
    "_checks": "raises on wrong, zero or local gradients",
    "_torch_bugs": "what torch differentiates wrongly: a table",
    "_state": ".grad, random states, buffers: saved and restored",
    "_core": "inputs, the graph, ownership, pytrees",
    "_compat": "private names of torch",
    "errors": "error classes, message texts",
}


def layers() -> list[list[str]]:
    """Return the rooms of each layer, from the top, as the import contract has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    names = next(c["layers"] for c in contracts if c.get("containers") == ["gradkit"])
    return [[room.strip(" ()") for room in layer.replace(":", "|").split("|")] for layer in names]


def draw_rooms() -> None:
    """Draw the rooms in their layers: imports go down only."""
    rows = layers()
    with rc_context({"svg.hashsalt": "gradkit"}):
        figure, ax = blank_page(
            9.6, 0.56 * len(rows), xlim=(-0.1, 12.1), ylim=(-len(rows) + 0.45, 0.55)
        )
        for i, rooms in enumerate(rows):
            width = 12 / len(rooms)
            for j, room in enumerate(rooms):
                draw_room(ax, j * width, -i, width, room)
        save(figure, "rooms")


def draw_room(ax: Axes, left: float, row: float, width: float, room: str) -> None:
    """Draw one room as a box with its name and what it is for."""
    face = "white" if room.startswith("_") else RUNS
    corner = (left + 0.05, row - 0.42)
    ax.add_patch(Rectangle(corner, width - 0.1, 0.84, facecolor=face, edgecolor=INK))
    middle, text = left + width / 2, ROOMS.get(room, "")
    if width < 4:  # two lines, where there is no room for one
        ax.text(middle, row + 0.15, room, family="monospace", fontsize=9, ha="center", va="center")
        ax.text(middle, row - 0.2, text, fontsize=7, ha="center", va="center", color=GREY)
    else:
        ax.text(left + 0.25, row, room, family="monospace", fontsize=10, va="center")
        ax.text(left + 2.2, row, text, fontsize=9, va="center", color=GREY)


# --- Where sharded parameters are ----------------------------------------------------------------

# By step: the layer that each rank has in whole, and what is sent.
SHARDED = (
    ("between two calls", "", "each rank holds its rows of every parameter"),
    ("forward, layer A", "A", "gather A"),
    ("forward, layer B", "B", "free A, gather B"),
    ("after the forward pass", "", "free B: the graph keeps shards, and activations"),
    ("backward, layer B", "B", "gather B again; the mean of its gradient, in shards"),
    ("backward, layer A", "A", "free B, gather A again; the same"),
    ("after create_graph=True", "", "free A: the graph of the gradients keeps shards, too"),
    ("second backward, layer A", "A", "gather A, and the cotangent of its gradient"),
    ("second backward, layer B", "B", "free both, gather those of B; and so on, down to A"),
)


def draw_shards() -> None:
    """Draw which parts of two layers are in the memory of two ranks, step by step."""
    with rc_context({"svg.hashsalt": "gradkit"}):
        figure, ax = blank_page(10.2, 4.6, xlim=(-4.6, 15.4), ylim=(-len(SHARDED) - 0.9, 1.1))
        for rank in range(2):
            ax.text(4 * rank + 1.55, 0.6, f"rank {rank}", fontsize=11, ha="center")
        for i, (step, whole, text) in enumerate(SHARDED):
            ax.text(-4.4, -i, step, va="center", fontsize=10)
            ax.text(8.1, -i, text, va="center", fontsize=9.5, color=GREY)
            for rank in range(2):
                draw_layers(ax, 4 * rank, -i, rank, whole)
        legend = (
            "Two boxes are the rows of a layer's parameters.  Dark: this rank's own, always in its "
            "memory.  Light: gathered from the other rank.\nWhite: not in its memory."
        )
        ax.text(-4.4, -len(SHARDED) - 0.4, legend, va="center", fontsize=9, color=GREY)
        save(figure, "shards")


def draw_layers(ax: Axes, left: float, row: float, rank: int, whole: str) -> None:
    """Draw what one rank has of the layers A and B."""
    for i, layer in enumerate("AB"):
        for half in range(2):
            gathered = RUNS if layer == whole else "white"
            face = INK if half == rank else gathered
            corner = (left + 1.7 * i + 0.7 * half, row - 0.32)
            ax.add_patch(Rectangle(corner, 0.7, 0.64, facecolor=face, edgecolor=INK))
            ink = "white" if half == rank else INK
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": ink}
            if half == rank or layer == whole:
                ax.text(corner[0] + 0.35, row, layer, **style)


def blank_page(
    width: float, height: float, xlim: tuple[float, float], ylim: tuple[float, float]
) -> tuple[Figure, Axes]:
    """Return a figure of a size in inches, and axes without a frame that fill it."""
    figure = Figure(figsize=(width, height), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=xlim, ylim=ylim)
    ax.axis("off")
    return figure, ax


def save(figure: Figure, name: str) -> None:
    """Save a drawing, without the date."""
    drawn = BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{name}.svg").write_bytes(drawn.getvalue())


if __name__ == "__main__":
    main()
