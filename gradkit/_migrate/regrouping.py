"""Groups that an optimizer gets later on: their gradients may be those of earlier turns."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from gradkit._migrate import reasons
from gradkit._migrate.calls import LoopCall
from gradkit._migrate.holders import bound_by, position
from gradkit._migrate.program import LOOPS, Program, last_name
from gradkit._migrate.reasons import NotSureError, shown


def check_groups(
    program: Program,
    changes: Sequence[ast.AST],
    zeros: Sequence[LoopCall],
    backward: LoopCall,
    step: LoopCall,
) -> None:
    """Raise if a parameter may join the optimizer after gradients were added to its `.grad`."""
    before = [zero.position for zero in zeros if zero.position < backward.position]
    for node in _later_too(program, changes):
        if before:
            joins_late = _runs_within(program, node, max(before), step)
        else:
            joins_late = not _runs_before(program, node, backward)
        if joins_late:
            line = getattr(node, "lineno", 0)
            reason = f"`{shown(program.statement(node))}` (line {line}) may add parameters to the "
            reason += "optimizer that have gradients already"
            raise NotSureError(backward.line, reason, reasons.GROUPS)


def _later_too(program: Program, changes: Sequence[ast.AST]) -> list[ast.AST]:
    """Return these changes, and each use of a name under which the change may be kept for later."""
    nodes: list[Any] = program.of_type(ast.Name, ast.Attribute)
    uses, names = list(changes), set[str]()
    for use in uses:
        new = set(_kept_as(program, use)) - names
        names |= new
        uses += [
            n for n in nodes
            if (n.attr if isinstance(n, ast.Attribute) else n.id) in new and n not in uses
        ]  # fmt: skip
    return uses


def _kept_as(program: Program, node: ast.AST) -> Iterator[str]:
    """Yield the names that the statement of a node binds, or whose methods are given it."""
    parts = [node, *(p for p, _ in program.ancestors(node))]
    statement = program.statement(node)
    for part in parts[: parts.index(statement)]:
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            root = ast.unparse(part.func).partition(".")[0]
            if root not in program.imports and node not in ast.walk(part.func):
                yield root
        yield from _stored(bound_by(part))
    yield from _stored(bound_by(statement))
    for item in getattr(statement, "items", []):
        yield from _stored([item.optional_vars] if item.optional_vars else [])


def _stored(bound: list[ast.expr]) -> Iterator[str]:
    for part in (p for whole in bound for p in ast.walk(whole)):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _runs_within(program: Program, node: ast.AST, zero: tuple[int, int], step: LoopCall) -> bool:
    """Return whether some code may run after zero_grad and before the step."""
    if program.scope(node) is step.scope and zero < position(node) < step.position:
        return True
    names = _names_of_callers(program, node)
    calls: list[ast.Call] = program.of_type(ast.Call)
    return any(
        program.scope(call) is step.scope and zero < position(call) < step.position
        for call in calls if last_name(call) in names
    )  # fmt: skip


def _names_of_callers(program: Program, node: ast.AST) -> set[str]:
    """Return the names of the functions in which some code is, and of those that call them."""
    return program.with_callers(program.names_around(node))


def _runs_before(program: Program, node: ast.AST, backward: LoopCall) -> bool:
    """Return whether some code runs once, before the loop."""
    scope = program.scope(node)
    if scope is not backward.scope:
        return getattr(scope, "name", "") == "__init__"
    around = [p for p, _ in program.ancestors(backward.call) if program.scope(p) is scope]
    loops = [p for p in around if isinstance(p, LOOPS)]
    return bool(loops) and position(node) < position(loops[-1])
