"""`migrate`: the source of one file with its loops moved, and what is left, with reasons."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import libcst as cst

from gradkit_migrate import reasons
from gradkit_migrate.calls import LoopCall, Optimizers, loop_calls
from gradkit_migrate.hazards import first_freezing, first_hazard
from gradkit_migrate.reasons import NotSureError, SkippedLoop
from gradkit_migrate.rewriting import rewrite
from gradkit_migrate.source import Function, Source, dotted
from gradkit_migrate.step import StepMatcher, TrainingStep

BY_HAND = {"step": reasons.STEP, "clip": reasons.CLIPPED, "unscale": reasons.SCALED}


@dataclass(frozen=True)
class Migrated:
    """One file after its loops have been moved."""

    source: bytes
    moved: int
    skipped: list[SkippedLoop]


def migrate(source: bytes) -> Migrated:
    """Return a file's source with its loops moved, and what is left."""
    _check_syntax(source)
    if not any(word in source for word in (b"backward", b"zero_grad")):
        return Migrated(source, 0, [])
    file = _File(Source(source))
    steps, skipped = file.steps()
    if not steps:
        return Migrated(source, 0, skipped)
    new = rewrite(file.source, steps)
    _check_syntax(new)  # an error here would be ours
    return Migrated(new, len(steps), skipped)


def _check_syntax(source: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in a string is not ours to report
        ast.parse(source)


class _File:
    """The loops of one file: those of a function are moved together, or left."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._optimizers = Optimizers(source)
        self._calls = loop_calls(source, self._optimizers)
        self.matcher = StepMatcher(source, self._optimizers, self._calls)

    def steps(self) -> tuple[list[TrainingStep], list[SkippedLoop]]:
        """Return the steps to move, and what is left."""
        by_function: dict[Function, list[LoopCall]] = defaultdict(list)
        for call in self._calls:
            by_function[call.function].append(call)
        steps: list[TrainingStep] = []
        skipped: list[SkippedLoop] = []
        for own in by_function.values():
            sure, unsure = self._of_function(own)
            steps += sure
            skipped += unsure
        doubt = next(self._doubts(steps, skipped), None) if steps else None
        if doubt is not None:
            skipped += [replace(doubt, line=step.backward.line) for step in steps]
            steps = []
        return steps, sorted(set(skipped))

    def _of_function(self, calls: list[LoopCall]) -> tuple[list[TrainingStep], list[SkippedLoop]]:
        """Match the calls of one function; if one is left, all are, since they share `.grad`."""
        backward = [call for call in calls if call.kind == "backward"]
        steps: list[TrainingStep] = []
        skipped = [
            SkippedLoop(call.line, f"{call.receiver}.step takes a closure", reasons.CLOSURE)
            for call in calls
            if call.kind == "closure"
        ]
        for call in backward:
            try:
                steps.append(self.matcher.match(call, calls))
            except NotSureError as error:
                skipped.append(error.skipped)
        skipped += self._not_matched(calls, steps) if not skipped else []
        if skipped and steps:
            reason = f"this function has more that is left (line {skipped[0].line})"
            skipped += [SkippedLoop(one.backward.line, reason, reasons.TOGETHER) for one in steps]
            steps = []
        return steps, skipped

    def _not_matched(self, calls: list[LoopCall], steps: list[TrainingStep]) -> list[SkippedLoop]:
        """Return what belongs to no step: the other calls that read or write `.grad`."""
        if not steps and not {"zero", "step"} <= {call.kind for call in calls}:
            return []
        matched = [call for step in steps for call in step.calls]
        rest = [call for call in calls if call.kind in BY_HAND and call not in matched]
        shown = self.source.shown
        if not steps and rest:
            reason = f"{shown(rest[-1].call)} without .backward() in this function"
            return [SkippedLoop(rest[-1].line, reason, reasons.OTHER_LIBRARY)]
        return [
            SkippedLoop(
                one.line, f"{shown(one.call)} has no backward() of its own here", BY_HAND[one.kind]
            )
            for one in rest
        ]

    def _doubts(
        self, steps: list[TrainingStep], skipped: list[SkippedLoop]
    ) -> Iterator[SkippedLoop]:
        """Yield what in a file speaks against moving any of its loops."""
        source = self.source
        hazard = first_hazard(source)
        if hazard is not None:
            line, reason, by_hand = hazard
            yield SkippedLoop(line, f"{reason} (line {line})", by_hand)
        made = [call for call in source.calls if self._optimizers.is_made_by_torch(call)]
        frozen = first_freezing(source, list(made))
        if frozen is not None:
            shown = f"`{source.shown(source.statement(frozen))}` (line {source.line(frozen)})"
            reason = f"{shown} may freeze all parameters of an optimizer that steps"
            yield SkippedLoop(source.line(frozen), reason, reasons.FROZEN)
        yield from self._other_steps(steps)
        # What the backward call of one adds to the gradients of another is in its next step.
        late = {one.step.optimizer: one for one in steps if not one.clears_before}
        if len(late) > 1:
            reason = f"{' and '.join(sorted(late))} are cleared after their steps: the backward() "
            reason += "for one may add to gradients of another"
            line = next(iter(late.values())).backward.line
            yield SkippedLoop(line, reason, reasons.CLEAR_FIRST)
        yield from self._left_over(steps, skipped)

    def _other_steps(self, steps: list[TrainingStep]) -> Iterator[SkippedLoop]:
        """Yield each step under another name, and each with the gradients of another function."""
        source = self.source
        called = {call.func for call in source.calls}
        for node in source.walk(source.module, cst.Attribute):
            is_bound = node.attr.value == "step" and node not in called
            if is_bound and self._optimizers.is_optimizer(dotted(node.value)):
                reason = f"{source.text(node)} is used without being called"
                yield SkippedLoop(source.line(node), reason, reasons.STEP)
        matched = [call for step in steps for call in step.calls]
        with_backward = {call.function for call in self._calls if call.kind == "backward"}
        for call in self._calls:
            is_other = call.kind == "step" and call not in matched
            if is_other and call.function not in with_backward:
                reason = f"{source.shown(call.call)} without .backward() in its function"
                yield SkippedLoop(call.line, reason, reasons.TOGETHER)

    def _left_over(
        self, steps: list[TrainingStep], skipped: list[SkippedLoop]
    ) -> Iterator[SkippedLoop]:
        """Yield each backward call whose gradients the first step of another loop may have."""
        late = {step.backward for step in steps if not step.clears_before}
        zeros = [call for call in self._calls if call.kind == "zero"]
        lines = {one.line for one in skipped}
        for call in self._calls:
            if call.kind != "backward" or call in late:
                continue
            cleared = any(z.function is call.function and z.at < call.at for z in zeros)
            if late or (call.line in lines and not cleared):
                reason = "a loop here does not begin with zero_grad(), and may add to gradients of "
                yield SkippedLoop(call.line, f"{reason}others", reasons.CLEAR_FIRST)
