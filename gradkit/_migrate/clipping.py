"""Clipping between backward and step: when `step_(max_norm=)` is the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gradkit._migrate import reasons
from gradkit._migrate.calls import CLIP, LoopCall
from gradkit._migrate.optimizers import OptimizerOrigin
from gradkit._migrate.program import Program, dotted
from gradkit._migrate.reasons import NotSureError, shown
from gradkit._migrate.statements import GradNeutrality


def check_clipping(
    program: Program, clip: LoopCall, neutral: GradNeutrality, between: list[ast.stmt]
) -> None:
    """Raise if `step_(max_norm=)` is not the same as this call."""
    values = clip_values(clip.call)
    if values is None or program.qualified(clip.call.func) not in CLIP:
        reason = f"`{shown(clip.call)}` has options, or is not torch's"
        raise NotSureError(clip.line, reason, reasons.CLIPPED)
    if not neutral.expression(values[1]):
        raise NotSureError(clip.line, f"max_norm is {shown(values[1])}", reasons.CLIPPED)
    if norm_name(clip) is None:
        reason = f"the norm is used in `{shown(clip.statement)}`"
        raise NotSureError(clip.line, reason, "norm = gradkit.step_(..., max_norm=...)")
    # The clipping, and the norm, come with the step: nothing between may need or change them.
    rest = between[between.index(clip.statement) + 1 :]
    used = {n for part in rest for n in names_in(part)}
    needed = {n for n in [norm_name(clip)] if n} | set(names_in(values[1], stored=False))
    stored = {n for part in rest for n in names_in(part, loaded=False)}
    if norm_name(clip) in used or needed & stored:
        reason = "the norm, or what max_norm is computed from, is used before step()"
        raise NotSureError(clip.line, reason, reasons.CLIPPED)


def clipped_params(
    program: Program, clip: LoopCall, origin: OptimizerOrigin | None, optimizer: str
) -> str:
    """Return the params for which the clipped parameters are exactly those that are stepped."""
    values = clip_values(clip.call)
    assert values is not None
    clipped = ast.unparse(values[0])
    if origin is not None and origin.owner and clipped == f"{origin.owner}.parameters()":
        return origin.owner
    if origin is not None and clipped == origin.arguments and _is_list(program, values[0], clip):
        return optimizer
    reason = f"{clipped} is clipped, and may not be exactly what {optimizer} has"
    raise NotSureError(clip.line, reason, reasons.SAME_PARAMETERS)


def _is_list(program: Program, node: ast.expr, clip: LoopCall) -> bool:
    """Return whether an expression is the same list of parameters each time it is computed."""
    if not isinstance(node, ast.Name):
        return False
    values = [a.value for a in program.bindings_seen_from(node.id, clip.scope)]
    is_new = len(values) == 1 and values[0] is not None and _is_new_list(values[0])
    return is_new and not _is_changed(program, node.id)


def _is_changed(program: Program, name: str) -> bool:
    """Return whether a list may get other items: by a method of its own, or an index."""
    nodes: list[Any] = program.of_type(ast.Attribute, ast.Subscript)
    return any(
        dotted(node.value) == name
        for node in nodes
        if isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store | ast.Del)
    )


def clip_values(call: ast.Call) -> tuple[ast.expr, ast.expr] | None:
    """Return what is clipped, and to which norm; None if there are other options."""
    given = dict(zip(("parameters", "max_norm", "norm_type"), call.args, strict=False))
    given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
    norm_type = given.pop("norm_type", ast.Constant(2))
    is_two_norm = isinstance(norm_type, ast.Constant) and norm_type.value == 2
    if set(given) != {"parameters", "max_norm"} or not is_two_norm or len(call.args) > 3:
        return None
    return given["parameters"], given["max_norm"]


def norm_name(clip: LoopCall) -> str | None:
    """Return the name to which the norm is assigned, '' if it is not used, None if otherwise."""
    if clip.is_statement:
        return ""
    statement = clip.statement
    if not isinstance(statement, ast.Assign) or statement.value is not clip.call:
        return None
    (name,) = statement.targets[:1]
    return name.id if isinstance(name, ast.Name) and len(statement.targets) == 1 else None


def names_in(node: ast.AST, *, loaded: bool = True, stored: bool = True) -> Iterator[str]:
    """Yield the names that some code reads or binds."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and (loaded if isinstance(part.ctx, ast.Load) else stored):
            yield part.id


def _is_new_list(node: ast.expr) -> bool:
    is_list = isinstance(node, ast.Call) and dotted(node.func) == "list"
    return is_list or isinstance(node, ast.List | ast.ListComp)
