"""Writes `gradkit/__init__.pyi`, which says what a call returns for each kind of losses and params.

    python release/stub.py

The stub has the imports and names of `gradkit/__init__.py`, and overloads of three calls: with a
value of `unused` that fills in, no gradient is None. `release/user_program.py` shows the types.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gradkit

PACKAGE = Path(__file__).resolve().parents[1] / "gradkit"
STUB = PACKAGE / "__init__.pyi"
HEAD = '''"""Written by release/stub.py: what calls return for each kind of losses and params."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias, TypedDict, TypeVar, Unpack, overload

from torch import Tensor, nn

from gradkit._core.call import Filled, Strategy, Unused
from gradkit._core.pytree import PyTree
'''
TYPES = """
_K = TypeVar("_K")
_L = TypeVar("_L")
_Tensors: TypeAlias = Mapping[_K, Tensor]
_Modules: TypeAlias = Mapping[_K, nn.Module]

class _Options(TypedDict, total=False):
    create_graph: bool
    retain_graph: bool | None

class _Sum(_Options, total=False):
    weights: PyTree

class _Each(_Options, total=False):
    strategy: Strategy
    chunk_size: int | None
"""
# What losses, or params, are, and what stands in the result for them, where a gradient is `{}`.
Kinds = dict[str, str]
MODULE, TREE = {"nn.Module": "dict[str, {}]"}, {"_Tensors[_K]": "dict[_K, {}]"}
ONE, ITERATOR = {"Tensor": "{}"}, {"Iterator[Tensor]": "tuple[{}, ...]"}
LOSSES = {"_Tensors[_L]": "dict[_L, {}]"}
# For each call its options, and in the order in which types are looked up: losses, params, result.
CALLS: dict[str, tuple[str, list[tuple[Kinds, Kinds, str]]]] = {
    "value_and_grads": (
        "_Sum",
        [
            (ONE, MODULE, "tuple[Tensor, {params}]"),
            ({"_Tensors[_L]": ""}, MODULE, "tuple[dict[_L, Tensor], {params}]"),
            (ONE, {**TREE, **ONE, **ITERATOR}, "tuple[Tensor, {params}]"),
        ],
    ),
    "per_loss_grads": ("_Each", [({**ONE, **LOSSES}, {**MODULE, **TREE, **ONE}, "{losses}")]),
    "simultaneous_grads": (
        "_Options",
        [
            ({"_Tensors[_K]": ""}, {"_Modules[_K]": "dict[_K, dict[str, {}]]"}, "{params}"),
            ({"_Tensors[_K]": ""}, {"_Tensors[_K]": "dict[_K, {}]"}, "{params}"),
        ],
    ),
}
ANY = {"value_and_grads": "tuple[PyTree, PyTree]"}  # the others return one tree


def overloads(name: str) -> Iterator[str]:
    """Yield the overloads of a call; the last is for any trees."""
    options, rows = CALLS[name]

    def signature(losses: str, params: str, unused: str, result: str) -> str:
        given = f"losses: {losses}, params: {params}, *, unused: {unused}"
        return f"@overload\ndef {name}({given}, **options: Unpack[{options}]) -> {result}: ...\n"

    for unused, grad in (("Filled", "Tensor"), ("Unused = ...", "Tensor | None")):
        for losses_kinds, params_kinds, result in rows:
            for losses, outer in losses_kinds.items():
                for params, inner in params_kinds.items():
                    of_params = inner.format(grad)
                    both = {"params": of_params, "losses": outer.format(of_params)}
                    yield signature(losses, params, unused, result.format(**both))
    yield signature("PyTree", "PyTree", "Unused = ...", ANY.get(name, "PyTree"))


def text() -> str:
    """Return the stub."""
    parts = []
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.names[0].asname:
            names = [alias.name for alias in node.names if alias.name not in CALLS]
            parts.append(f"from {node.module} import {', '.join(names)}\n")
    exported = f"__all__ = {sorted(gradkit.__all__)}\n__version__: str\n"
    calls = [signature for name in CALLS for signature in overloads(name)]
    source = "".join([HEAD, *parts, TYPES, exported, *calls])
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--select=I", "--fix", "--quiet"], ["format"]):
        run = [*ruff, *command, "--stdin-filename", str(STUB), "-"]
        done = subprocess.run(run, input=source, capture_output=True, text=True, check=True)
        source = done.stdout
    return source


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
