"""Groups that an optimizer gets later on: their gradients may be those of earlier turns."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradkit._migrate import reasons
from gradkit._migrate.calls import LoopCall
from gradkit._migrate.holders import position
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
    for node in changes:
        if before:
            joins_late = _runs_within(program, node, max(before), step)
        else:
            joins_late = not _runs_before(program, node, backward)
        if joins_late:
            line = getattr(node, "lineno", 0)
            reason = f"`{shown(program.statement(node))}` (line {line}) may add parameters to the "
            reason += "optimizer that have gradients already"
            raise NotSureError(backward.line, reason, reasons.GROUPS)


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
    names = {getattr(p, "name", "") or "" for p, _ in program.ancestors(node)} - {""}
    size = -1
    while len(names) > size:
        size = len(names)
        for call in program.of_type(ast.Call):
            if last_name(call) in names:
                names |= {getattr(p, "name", "") or "" for p, _ in program.ancestors(call)} - {""}
    return names


def _runs_before(program: Program, node: ast.AST, backward: LoopCall) -> bool:
    """Return whether some code runs once, before the loop."""
    scope = program.scope(node)
    if scope is not backward.scope:
        return getattr(scope, "name", "") == "__init__"
    around = [p for p, _ in program.ancestors(backward.call) if program.scope(p) is scope]
    loops = [p for p in around if isinstance(p, LOOPS)]
    return bool(loops) and position(node) < position(loops[-1])
