"""Clipping between backward and step: when `step_(max_norm=)` is the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradkit._migrate.advice import Advice
from gradkit._migrate.calls import CLIP, LoopCall, clip_values
from gradkit._migrate.origins import Origins
from gradkit._migrate.reasons import NotSureError, at, shown
from gradkit._migrate.statements import GradNeutrality


def check_clipping(
    advice: Advice, clip: LoopCall, neutral: GradNeutrality, between: list[ast.stmt]
) -> None:
    """Raise if `step_(max_norm=)` is not the same as this call."""
    values = clip_values(clip.call)
    if values is None or advice.program.qualified(clip.call.func) not in CLIP:
        is_torchs = advice.program.qualified(clip.call.func) in CLIP
        what = "has options that gradkit.step_ does not have" if is_torchs else "is not torch's"
        reason = f"`{shown(clip.call)}` {what}"
        raise NotSureError(clip.line, reason, advice.clipped_as_it_is())
    if not neutral.expression(values[1]):
        reason = f"max_norm is {shown(values[1])}"
        raise NotSureError(clip.line, reason, advice.clipped_as_it_is())
    if norm_name(clip) is None:
        reason = f"the norm is used in `{shown(clip.statement)}`"
        raise NotSureError(clip.line, reason, advice.clipped_before(clip))
    # The clipping, and the norm, come with the step: nothing between may need or change them.
    rest = between[between.index(clip.statement) + 1 :]
    used = {n for part in rest for n in names_in(part)}
    needed = {n for n in [norm_name(clip)] if n} | set(names_in(values[1], stored=False))
    stored = {n for part in rest for n in names_in(part, loaded=False)}
    if norm_name(clip) in used or needed & stored:
        reason = "the norm, or what max_norm is computed from, is used before step()"
        raise NotSureError(clip.line, reason, advice.clipped_before(clip))


def clipped_params(advice: Advice, clip: LoopCall, origins: Origins) -> str:
    """Return the params for which the clipped parameters are exactly those that are stepped."""
    values, optimizer, scope = clip_values(clip.call), advice.optimizer, clip.scope
    assert values is not None
    origin = origins.origin(optimizer, scope)
    clipped = ast.unparse(values[0])
    if origin is not None and origin.owner and clipped == f"{origin.owner}.parameters()":
        return origin.owner
    doubt = origins.clipping_doubt(values[0], optimizer, scope)
    if doubt is None:
        return optimizer
    reason = f"{clipped} is clipped, and may not be exactly what {optimizer} has, because of "
    reason += at(advice.program, doubt)
    raise NotSureError(clip.line, reason, advice.clipped_in_step(clip))


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
