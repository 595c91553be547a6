"""`python -m tests.house`: the lines of gradkit/ by room, and what one call runs of them.

A room is a folder, or the files beside the folders. Code is what is no docstring, comment, import
or blank line. A call runs in a process of its own, the second time; lambdas, comprehensions and
functions inside of functions are counted with the function that they stand in.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "gradkit"
LINES, FILES = 33_866, 128  # at most
LONGEST, SHORT = 600, 60  # lines of a file; a shorter one says why in its docstring
KINDS = ("files", "lines", "code", "imports", "docstrings", "comments", "blank")


_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def counted(source: str) -> Counter[str]:
    """Return how many lines of a file are of each kind."""
    lines = source.splitlines()
    kinds = ["code" if line.strip() else "blank" for line in lines]
    for index, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            kinds[index] = "comments"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds[node.lineno - 1 : node.end_lineno] = ["imports"] * _height(node)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            kinds[text.lineno - 1 : text.end_lineno] = ["docstrings"] * _height(text)
    return Counter(kinds) + Counter(files=1, lines=len(lines))


def _height(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def rooms() -> dict[str, Counter[str]]:
    """Return the counts of each room, the greatest first."""
    found: dict[str, Counter[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        first, *more = path.relative_to(PACKAGE).parts
        room = found.setdefault(first if more else "(beside the folders)", Counter())
        room.update(counted(path.read_text(encoding="utf-8")))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["lines"]))


def total() -> Counter[str]:
    """Return the counts of the package."""
    return sum(rooms().values(), Counter())


_SETUP = """
import torch
import gradkit
from gradkit import func, meta
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
params, x, opt = dict(net.named_parameters()), torch.ones(3, 4), torch.optim.SGD(net.parameters())
values = {name: x.detach() for name, x in params.items()}
losses = lambda: [net(x).square().mean(), net(x).abs().mean()]
layer = lambda x, w, name: torch.nn.functional.linear(x, w[name + ".weight"], w[name + ".bias"])
loss = lambda w: layer(layer(x, w, "0").relu(), w, "2").sum()
inner = lambda w, outer, batch: loss(w) * outer
rate = torch.tensor(0.1, requires_grad=True)
"""
# Calls, and how many functions and files one may run.
CALLS = {
    "value_and_grads": ("gradkit.value_and_grads(net(x).mean(), params)", 22, 13),
    "value_and_grads, two losses": ("gradkit.value_and_grads(losses(), params)", 29, 15),
    "per_loss_grads": ("gradkit.per_loss_grads(losses(), params)", 67, 21),
    "README step": ("gradkit.minimize_(opt, net(x).mean())", 26, 15),
    "func.value_and_grads": ("func.value_and_grads(loss)(values)", 73, 23),
    "unroll": ("meta.unroll(inner, values, [1, 2], meta.sgd(lr=0.1), outer=rate)", 106, 30),
    "gram": ("gradkit.gram(losses(), params)", 104, 31),
}


def run() -> dict[str, tuple[int, int]]:
    """Return how many functions of gradkit, in how many files, each call runs the second time."""
    space: dict[str, Any] = {}
    exec(_SETUP, space)
    result = {}
    for name, (call, *_) in CALLS.items():
        exec(call, space)
        codes: set[tuple[str, str]] = set()
        sys.setprofile(partial(_note, codes))
        exec(call, space)
        sys.setprofile(None)
        result[name] = len(codes), len({file for file, _ in codes})
    return result


def _note(codes: set[tuple[str, str]], frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(str(PACKAGE)):
        codes.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))


def run_alone() -> dict[str, list[int]]:
    """Return the same from a new process, in which no hook was ever registered."""
    code = "import json; from tests.house import run; print(json.dumps(run()))"
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PACKAGE.parent)
    counts: dict[str, list[int]] = json.loads(out)
    return counts


if __name__ == "__main__":
    print("| room |", " | ".join(KINDS), "|")
    print("|---|" + "---:|" * len(KINDS))
    for name, counts in {**rooms(), "gradkit": total()}.items():
        print(f"| {name} |", " | ".join(f"{counts[kind]:,}" for kind in KINDS), "|")
    print(f"\nAt most {LINES:,} lines in {FILES} files.")
    print("\n| call | functions | files |\n|---|---:|---:|")
    for call, (functions, files) in run_alone().items():
        print(f"| {call} | {functions} | {files} |")
