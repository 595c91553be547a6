"""The training steps of a program: which can be moved, and which are left."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import replace

from gradkit._migrate import reasons
from gradkit._migrate.calls import LoopCall, LoopFunctions, loop_calls
from gradkit._migrate.freezing import Freezing
from gradkit._migrate.hazards import first_hazard
from gradkit._migrate.optimizers import Optimizers
from gradkit._migrate.program import Program, Scope
from gradkit._migrate.reasons import NotSureError, SkippedLoop
from gradkit._migrate.training_step import StepMatcher, TrainingStep


def find_loops(program: Program) -> tuple[list[TrainingStep], list[SkippedLoop]]:
    """Return the steps to move, and what is left."""
    optimizers = Optimizers(program)
    calls = loop_calls(program, optimizers)
    matcher = StepMatcher(program, optimizers, calls, LoopFunctions(program, calls))
    by_scope: dict[Scope, list[LoopCall]] = defaultdict(list)
    for call in calls:
        by_scope[call.scope].append(call)
    steps: list[TrainingStep] = []
    skipped: list[SkippedLoop] = []
    for own in by_scope.values():
        sure, unsure = _of_scope(matcher, own)
        steps += sure
        skipped += unsure
    doubt = _of_file(program, optimizers, calls, steps, skipped) if steps else None
    if doubt is not None:
        skipped += [replace(doubt, line=step.backward.line) for step in steps]
        steps = []
    return steps, sorted(set(skipped))


def _of_scope(
    matcher: StepMatcher, calls: list[LoopCall]
) -> tuple[list[TrainingStep], list[SkippedLoop]]:
    """Match the calls of one function; if one is left, all are, since they share `.grad`."""
    backward = [call for call in calls if call.kind == "backward"]
    steps: list[TrainingStep] = []
    skipped = [
        SkippedLoop(call.line, f"{call.receiver}.step takes a closure", reasons.CLOSURE)
        for call in calls
        if call.kind == "closure" and (backward or not matcher.sees_closure(call))
    ]
    for call in backward:
        try:
            steps.append(matcher.match(call, calls))
        except NotSureError as error:
            skipped.append(error.skipped)
    skipped += _not_matched(calls, steps) if not skipped else []
    if skipped and steps:
        reason = f"this function has more that is left (line {skipped[0].line})"
        skipped += [SkippedLoop(step.backward.line, reason, reasons.TOGETHER) for step in steps]
        steps = []
    return steps, skipped


def _not_matched(calls: list[LoopCall], steps: list[TrainingStep]) -> list[SkippedLoop]:
    """Return what belongs to no step: the other calls that read or write `.grad`."""
    matched = [call for step in steps for call in step.calls]
    kinds = {call.kind for call in calls}
    if not steps and not {"zero", "step"} <= kinds:
        return []
    rest = [c for c in calls if c.kind in {"step", "clip", "unscale"} and c not in matched]
    if not steps and rest:
        reason = f"{reasons.shown(rest[-1].call)} without .backward() in this function"
        return [SkippedLoop(rest[-1].line, reason, reasons.OTHER_LIBRARY)]
    return [
        SkippedLoop(
            c.line, f"{reasons.shown(c.call)} has no backward() of its own here", _BY_HAND[c.kind]
        )
        for c in rest
    ]


_BY_HAND = {"step": reasons.STEP, "clip": reasons.CLIPPED, "unscale": reasons.SCALED}


def _of_file(
    program: Program,
    optimizers: Optimizers,
    calls: list[LoopCall],
    steps: list[TrainingStep],
    skipped: list[SkippedLoop],
) -> SkippedLoop | None:
    """Return what in a file speaks against moving any of its loops."""
    hazard = first_hazard(program)
    if hazard is not None:
        line, reason, by_hand = hazard
        return SkippedLoop(line, f"{reason} (line {line})", by_hand)
    shared = (
        _frozen(program, optimizers)
        or _unbound(optimizers)
        or _step_alone(calls, steps)
        or _cleared_late(steps)
    )
    if shared is not None:
        return shared
    clean = {step.backward for step in steps if not step.clears_before}
    zeros = [call for call in calls if call.kind == "zero"]
    lines = {part.line for part in skipped}
    for call in calls:
        if call.kind != "backward" or call in clean:
            continue
        cleared = any(z.scope is call.scope and z.position < call.position for z in zeros)
        # What one loop leaves in .grad is in the first step of one that clears only afterwards.
        if clean or (call.line in lines and not cleared):
            reason = (
                "a loop here does not begin with zero_grad(), and may add to gradients of others"
            )
            return SkippedLoop(call.line, reason, "call zero_grad() before each backward()")
    return None


def _frozen(program: Program, optimizers: Optimizers) -> SkippedLoop | None:
    """Return that parameters are frozen later on, so that a loss may reach none of them."""
    node = Freezing(program, optimizers.origins.made()).first()
    if node is None:
        return None
    line = getattr(node, "lineno", 0)
    reason = f"`{reasons.shown(program.statement(node))}` (line {line}) may freeze all parameters"
    return SkippedLoop(line, f"{reason} of an optimizer that steps", reasons.FROZEN)


def _unbound(optimizers: Optimizers) -> SkippedLoop | None:
    """Return a step that is called by another name, `step = optimizer.step`, or replaced."""
    node = optimizers.first_unbound_step()
    if node is None:
        return None
    return SkippedLoop(
        node.lineno, f"{ast.unparse(node)} is used without being called", reasons.STEP
    )


def _step_alone(calls: list[LoopCall], steps: list[TrainingStep]) -> SkippedLoop | None:
    """Return a step in a function without backward, with the gradients of some other function."""
    matched = [call for step in steps for call in step.calls]
    with_backward = {call.scope for call in calls if call.kind == "backward"}
    for call in calls:
        if call.kind == "step" and call not in matched and call.scope not in with_backward:
            reason = f"{reasons.shown(call.call)} without .backward() in its function"
            return SkippedLoop(call.line, reason, reasons.TOGETHER)
    return None


def _cleared_late(steps: list[TrainingStep]) -> SkippedLoop | None:
    """Return that several optimizers are cleared after their steps alone."""
    # What the backward call of one adds to the gradients of another is in the next step of that.
    late = {step.optimizer: step for step in steps if not step.clears_before}
    if len(late) < 2:
        return None
    (first, *_), names = late.values(), " and ".join(sorted(late))
    reason = f"{names} are cleared after their steps: the backward() for one may add to gradients "
    reason += "of another"
    return SkippedLoop(first.backward.line, reason, "call zero_grad() before each backward()")
