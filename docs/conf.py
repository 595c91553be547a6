"""How the documentation is built: `make docs`, with warnings as errors and without a network."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sphinx.application import Sphinx

import gradkit

project = "gradkit"
author = "the gradkit authors"
copyright = "the gradkit authors"
release = version = gradkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_pictures"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"gradkit {release}"
html_show_sourcelink = False

myst_heading_anchors = 3

# A name in single backticks is code, in docstrings as in Markdown.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
# The docstrings say more than the types do, and the overloads would fill a page.
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]


def _keep_prose(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keep napoleon from taking the words before a colon for a type."""
    firsts = [0] if what in {"attribute", "property"} else []
    firsts += [i + 1 for i, line in enumerate(lines) if line.strip() in {"Returns:", "Yields:"}]
    for i in firsts:
        lines[i] = lines[i].replace(": ", " -- ", 1)


STEPS = 6
INK = "#1f4e79"


def _draw_steps(ax: Axes, row: float, memory: str | int) -> None:
    """Draw the steps of one choice of memory: what is filled is kept."""
    every = memory if isinstance(memory, int) else 1
    again = {"store": 0, "recompute": 1}.get(str(memory), 2)
    ax.plot([0, 2 * STEPS], [row, row], color=INK, linewidth=1, zorder=1)
    for step in range(STEPS + 1):
        kept = again > 0 and step % every == 0 and step < STEPS
        face = INK if kept else "white"
        ax.plot(2 * step, row, "o", markersize=9, mec=INK, mfc=face, zorder=2)
    for step in range(STEPS):
        box = {
            "boxstyle": "square,pad=0.45",
            "edgecolor": INK,
            "facecolor": "white" if again else INK,
            "linestyle": "--" if again else "-",
        }
        # Where nothing runs again, the text only gives the box its size.
        text = f"{again}x" if again else "1x"
        ax.text(2 * step + 1, row, text, ha="center", va="center", color=INK, bbox=box)


def _draw_memory(path: Path) -> None:
    """Draw what each choice of memory keeps of an inner loop, and what it runs again."""
    sides = {
        "store": "kept: the graph of every step\nrun again: nothing",
        "recompute": "kept: the parameters before every step\nrun again: every step, once",
        3: "kept: the parameters before every third step\nrun again: every step, twice",
    }
    with rc_context({"svg.hashsalt": "gradkit"}):  # the same bytes each time
        figure = Figure(figsize=(9.6, 3.1), facecolor="white")
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(-5.4, 22.2), ylim=(-3.4, 0.7))
        ax.axis("off")
        for i, (memory, side) in enumerate(sides.items()):
            _draw_steps(ax, -i, memory)
            ax.text(-5.1, -i, f"memory={memory!r}", va="center", family="monospace", fontsize=10)
            ax.text(2 * STEPS + 0.8, -i, side, va="center", fontsize=10, linespacing=1.5)
        legend = (
            "A circle is the parameters and the optimizer's state between two steps, a square the "
            "graph of a step.\n"
            "Filled: kept for the backward pass.  Dashed: not kept.  1x, 2x: how often the step "
            "runs again there."
        )
        ax.text(-5.1, -3.0, legend, va="center", fontsize=9, linespacing=1.6, color="#444444")
        _save(figure, path)


WAY = (
    ("eager", "value_and_grads, per_loss_grads, simultaneous_grads: each one screen"),
    ("_inputs", "open up modules, iterators, optimizers; flatten; check types, sizes, options"),
    ("_refusals", "prepare: refuse what would come out wrong, zero or local"),
    ("_passes", "run the passes, and let go of the graph behind them"),
    ("_engine", "one pass: the only call of torch.autograd.grad"),
    ("_ownership", "copy what shares memory, or is laid out otherwise than its parameter"),
    ("_passes", "finish: None or zeros for what was not reached; put the tree together"),
)
PURE, RUNS = "white", "#cfe2f3"


def _draw_way(path: Path) -> None:
    """Draw the way of a call through the modules of the package."""
    with rc_context({"svg.hashsalt": "gradkit"}):
        figure = Figure(figsize=(9.6, 6.4), facecolor="white")
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(-2.9, 11.5), ylim=(-8.7, 0.5))
        ax.axis("off")
        ends = {"fontsize": 11, "ha": "center", "va": "center"}
        ax.text(0, 0, "losses, params, weights", **ends)
        ax.text(0, -8.3, "values, grads", **ends)
        for row, (room, told) in enumerate(WAY, start=1):
            box = {
                "boxstyle": "round,pad=0.45",
                "edgecolor": INK,
                "facecolor": RUNS if room in {"_passes", "_engine"} and row < 6 else PURE,
            }
            ax.text(0, -row, f"{room:^10}", family="monospace", bbox=box, **ends)
            ax.text(1.7, -row, told, va="center", fontsize=10)
        for row in range(8):
            end = 0.32 if row < 7 else 0.2
            arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", xy=(0, -row - 1 + end), xytext=(0, -row - 0.3), arrowprops=arrow)
        again = {
            "arrowstyle": "-|>",
            "color": INK,
            "connectionstyle": "arc3,rad=-0.5",
            "linestyle": "--",
        }
        ax.annotate("", xy=(-1.2, -4), xytext=(-1.2, -6), arrowprops=again)
        ax.text(-1.95, -5, "next\npass", fontsize=9, color="#444444", ha="right", va="center")
        ax.text(
            1.7,
            -7.9,
            "Blue: here the engine runs. Bad input is refused above, before anything has changed.",
            fontsize=9,
            color="#444444",
        )
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Save a picture, unless it is there already, so that a page is built anew only if it is."""
    drawn = BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    if not path.exists() or path.read_bytes() != drawn.getvalue():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(drawn.getvalue())


def _run_examples(folder: Path, pictures: Path) -> None:
    """Let every example of the gallery save its picture, unless it has since it was changed."""
    for script in sorted(folder.glob("*.py")):
        picture = pictures / f"{script.stem}.png"
        if script.stem in GALLERY and _is_older(picture, script):
            command = [sys.executable, script, "--smoke", "--output", pictures]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _is_older(picture: Path, script: Path) -> bool:
    return not picture.exists() or picture.stat().st_mtime < script.stat().st_mtime


GALLERY = {
    "fewshot_digits",
    "learn_hyperparams",
    "maml_sinusoid",
    "multitask_ddp",
    "multitask_digits",
    "per_sample_digits",
}


def setup(app: Sphinx) -> None:
    _run_examples(Path(app.srcdir).parent / "examples", Path(app.srcdir) / "_pictures")
    _draw_memory(Path(app.srcdir) / "_pictures" / "memory.svg")
    _draw_way(Path(app.srcdir) / "_pictures" / "way.svg")
    app.connect("autodoc-process-docstring", _keep_prose, priority=1)
