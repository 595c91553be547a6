"""A GradScaler between backward and step: when `step_(scaler=)` is the same."""

from __future__ import annotations

import ast

from gradkit._migrate import reasons
from gradkit._migrate.calls import LoopCall
from gradkit._migrate.program import Program, dotted, last_name
from gradkit._migrate.reasons import NotSureError, shown


def check_scaling(
    program: Program,
    backward: LoopCall,
    step: LoopCall,
    clip: LoopCall | None,
    unscale: LoopCall | None,
) -> None:
    """Raise if the loss is scaled, and `step_(scaler=)` may not be the same."""
    assert isinstance(backward.call.func, ast.Attribute)
    loss = backward.call.func.value
    scale = loss.func if isinstance(loss, ast.Call) else None
    is_scaled = isinstance(scale, ast.Attribute) and scale.attr == "scale"
    scaler = step.receiver if step.argument else ""
    if not scaler and not is_scaled and unscale is None:
        return
    same = isinstance(scale, ast.Attribute) and dotted(scale.value) == scaler
    unscaled = unscale is None or (
        unscale.receiver == scaler and unscale.argument == step.argument
        and unscale.is_statement and (clip is None or unscale.position < clip.position)
    )  # fmt: skip
    if not (scaler and is_scaled and same and unscaled and _is_scaler(program, scaler)):
        reason = f"a scaler that is not torch's, or not used as usual ({shown(step.call)})"
        raise NotSureError(backward.line, reason, reasons.SCALED)
    if clip is not None and unscale is None:
        reason = "scaled gradients are clipped, without unscale_"
        raise NotSureError(clip.line, reason, reasons.SCALED_CLIP)


def _is_scaler(program: Program, scaler: str) -> bool:
    values: list[ast.expr | None] = []
    for assignment in program.assignments.get(scaler, ()):
        value = assignment.value
        values += [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    return all(
        (
            isinstance(value, ast.Call)
            and program.qualified(value.func).startswith("torch.")
            and last_name(value) == "GradScaler"
        )
        or (value is not None and ast.unparse(value) in {"None", scaler.rpartition(".")[2]})
        for value in values
    )
