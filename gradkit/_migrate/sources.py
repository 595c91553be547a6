"""What a value, or a part of it, was before it had its name: other names that hold it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from gradkit._migrate.holders import Holder, Holders, UnsafeUse
from gradkit._migrate.program import Program, parameters

HARMLESS = {
    "print", "len", "str", "repr", "format", "isinstance", "issubclass", "type", "id", "callable",
    "hasattr", "bool", "int", "float", "abs", "round", "range", "sum", "min", "max", "any", "all",
}  # fmt: skip
PLAIN = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr)
# Yields the names that hold the value, or a part of it, if an expression gives it.
Named: TypeAlias = Callable[[ast.AST | None], Iterable[ast.Name | ast.Attribute]]


def made_from(holder: Holder, named: Named, program: Program, holders: Holders) -> Iterator[Holder]:
    """Yield what holds the value where a function is called with it, or its parts."""
    for value, context in _values(holder, program, holders):
        for part in named(value):
            one = None if _is_plain(part, program, holders) else holders.of(part, is_source=True)
            if one is not None:
                yield replace(
                    one, since=context.since, until=context.until,
                    only_elsewhere=context.only_elsewhere,
                )  # fmt: skip


def _values(
    holder: Holder, program: Program, holders: Holders
) -> Iterator[tuple[ast.AST | None, Holder]]:
    """Yield the expressions that a holder is given, with from where on their uses count."""
    if not holder.is_source:
        return
    scope, text = holder.where, holder.text
    if not holder.is_attribute and text in parameters(scope):  # type: ignore[arg-type]
        waits = holder.until is not None or holder.only_elsewhere
        for call, ahead in holders.callers(scope):
            given = holders.given(call, scope, ahead)
            if given is None:
                raise UnsafeUse(call)
            since = program.statement(call)
            yield (
                given.get(text),
                replace(holder, since=since, until=None, only_elsewhere=waits),
            )
    name = f"self.{text}" if holder.is_attribute else text
    for assignment in program.assignments.get(name, ()):
        since_scope = program.scope(holder.since) if holder.since is not None else None
        if assignment.scope is since_scope:
            yield assignment.value, holder
        elif holder.is_attribute or assignment.scope is scope:
            yield assignment.value, replace(holder, since=None, until=None)


def _is_plain(node: ast.Name | ast.Attribute, program: Program, holders: Holders) -> bool:
    """Return whether a name is that of a number, a function, or of something imported."""
    if isinstance(node, ast.Attribute):
        return not any(text.endswith(f".{node.attr}") for text in program.assignments)
    if node.id in program.imports or node.id in program.functions or node.id in program.classes:
        return True
    scope = holders.scope(node.id, node)
    annotation = parameters(scope).get(node.id)
    if annotation is not None and ast.unparse(annotation) in {"int", "float", "str", "bool"}:
        return True
    values = [a.value for a in program.assignments.get(node.id, ()) if a.scope is scope]
    return bool(values) and all(_is_number(value, program) for value in values)


def _is_number(value: ast.expr | None, program: Program) -> bool:
    if not isinstance(value, ast.Call):
        return isinstance(value, PLAIN)
    full = program.qualified(value.func)
    return full in HARMLESS or full in {"torch.device", "torch.tensor"}
