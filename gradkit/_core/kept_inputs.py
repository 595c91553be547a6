"""Whether a Function keeps its inputs alone, as far as its source shows it.

What it keeps for its backward are tensors without a graph, whether they are inputs that are
constants, or were computed in its forward pass, of which the derivative would be missing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from tokenize import TokenError
from types import CodeType
from typing import Any, NamedTuple

from torch.autograd import Function

from gradkit._compat.autograd import forward_class
from gradkit._core.pytree import tensors

_SAVE = {"save_for_backward", "save_for_forward"}


def keeps_inputs_alone(function: Any) -> bool:
    """Return whether each tensor that a node of a Function keeps is one of its inputs."""
    known = _source(forward_class(function))
    attributes = {name for name, value in vars(function).items() if tensors(value)}
    return known.saves_inputs and attributes <= known.attributes


class _Source(NamedTuple):
    saves_inputs: bool  # and nothing else, by save_for_backward
    attributes: frozenset[str]  # the names on ctx that are set to inputs alone


_NOTHING_KNOWN = _Source(False, frozenset())


@lru_cache(maxsize=1024)
def _source(cls: Any) -> _Source:
    """Return what the source of the method that keeps tensors says of them."""
    is_apart = cls.setup_context is not Function.setup_context
    function: Any = inspect.unwrap(cls.setup_context if is_apart else cls.forward)
    try:
        (method,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError, TokenError):
        return _NOTHING_KNOWN
    if not isinstance(method, ast.FunctionDef) or not _is_of(method, function.__code__):
        return _NOTHING_KNOWN
    if not all(map(_hands_on, method.decorator_list)):
        return _NOTHING_KNOWN
    ctx, *given = [one.arg for one in method.args.args]
    return _read(method, ctx, given, is_apart)


def _is_of(method: ast.FunctionDef, code: CodeType) -> bool:
    """Return whether a source is that of the code; a file may have changed since its import."""
    given = [one.arg for one in (*method.args.posonlyargs, *method.args.args)]
    named = {getattr(x, "attr", getattr(x, "id", None)) for x in ast.walk(method)}
    same = method.name == code.co_name and given == [*code.co_varnames[: code.co_argcount]]
    return same and bool(given) and named.issuperset((*code.co_names, *code.co_freevars))


def _read(method: ast.FunctionDef, ctx: str, given: list[str], is_apart: bool) -> _Source:
    nodes = list(ast.walk(method))
    inputs, unpacked = set(given), list[ast.AST]()
    if is_apart:  # setup_context(ctx, inputs, output)
        inputs = set()
        for node in nodes:
            if isinstance(node, ast.Assign) and _is_name(node.value, given[:1]):
                unpacked += [x for one in node.targets for x in ast.walk(one)]
        inputs |= {x.id for x in unpacked if isinstance(x, ast.Name)}
    inputs -= set(_written(nodes, unpacked))

    def is_input(node: ast.expr) -> bool:
        is_element = (
            isinstance(node, ast.Subscript) and is_apart and _is_name(node.value, given[:1])
        )
        return is_element or _is_name(node, inputs)

    attributes: dict[str, bool] = {}
    saved, seen = list[ast.expr](), 0  # the uses of ctx that are understood
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _is_name(node.func.value, [ctx]):
                seen += 1
                saved += node.args if node.func.attr in _SAVE else []
        elif isinstance(node, ast.Assign):
            for one in node.targets:
                if isinstance(one, ast.Attribute) and _is_name(one.value, [ctx]):
                    seen += 1
                    attributes[one.attr] = attributes.get(one.attr, True) and is_input(node.value)
    reads = [x for x in nodes if isinstance(x, ast.Attribute) and _is_name(x.value, [ctx])]
    seen += sum(isinstance(x.ctx, ast.Load) and x.attr == "needs_input_grad" for x in reads)
    if seen < sum(isinstance(x, ast.Name) and x.id == ctx for x in nodes):
        return _NOTHING_KNOWN  # something else gets ctx, and may keep what it likes
    return _Source(all(map(is_input, saved)), frozenset(k for k, v in attributes.items() if v))


def _hands_on(decorator: ast.expr) -> bool:
    """Return whether a method gets what its decorator is given, and no casts of it."""
    call = decorator if isinstance(decorator, ast.Call) else None
    name = ast.unparse(call.func if call else decorator).rpartition(".")[2]
    casts = call is not None and any(one.arg != "device_type" for one in call.keywords)
    return name in ("staticmethod", "custom_fwd") and not casts


def _is_name(node: ast.AST, names: Any) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _written(nodes: list[ast.AST], unpacked: list[ast.AST]) -> Iterator[str]:
    """Yield the names that a function assigns, or on whose tensors it may write."""
    parts: dict[str, str] = {}  # y = x.view(-1): a write on y is one on x
    outs: list[ast.AST] = []
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            if node not in unpacked:
                yield node.id
        elif isinstance(node, ast.Call):
            outs += [one.value for one in node.keywords if one.arg in ("out", None)]
            by = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            is_in_place = by.endswith("_") or "inplace" in [one.arg for one in node.keywords]
            outs += [node.func, *node.args] if is_in_place or by == "mark_dirty" else []
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            outs.append(node.value)
        elif isinstance(node, ast.AugAssign):
            outs += list(ast.iter_child_nodes(node))[:1]  # the target of +=
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.Name) and node.targets[0] not in unpacked:
                outs.append(node.value)  # a second name
            elif not isinstance(node.value, ast.Name) and (of := _first_name(node.value)):
                parts[node.targets[0].id] = of
    for name in (x.id for one in outs for x in ast.walk(one) if isinstance(x, ast.Name)):
        while name:
            yield name
            name = parts.pop(name, "")


def _first_name(node: ast.AST) -> str:
    """Return x for x.view(-1)[0], and nothing for torch.add(x, 1)(2) or x + 1."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return ""
    return node.id
