"""One training step: the calls from zero_grad to step that belong to one backward call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from gradkit_migrate import reasons
from gradkit_migrate.between import GradNeutrality, check_clipping, check_scaling
from gradkit_migrate.calls import LoopCall, Optimizers
from gradkit_migrate.clearing import ClearingCheck, several
from gradkit_migrate.groups import GroupChanges
from gradkit_migrate.params import Owners
from gradkit_migrate.reasons import Advice, NotSureError
from gradkit_migrate.source import Source, Statement, arguments, constant, dotted, last_name

COMPILED = re.compile(r"compile|jit|script")


@dataclass(frozen=True)
class TrainingStep:
    """What is moved together."""

    backward: LoopCall
    step: LoopCall
    zeros: Sequence[LoopCall]
    clip: LoopCall | None
    unscale: LoopCall | None
    params: str  # with respect to what: the module where that is evident, else the optimizer
    is_one_call: bool  # nothing needs the gradients, or stands between these calls

    @property
    def calls(self) -> list[LoopCall]:
        """All calls that are replaced or removed."""
        calls = [self.backward, self.step, *self.zeros, self.clip, self.unscale]
        return [call for call in calls if call is not None]

    @property
    def clears_before(self) -> bool:
        """Whether the gradients are cleared before they are computed, and not after the step."""
        return any(zero.at < self.backward.at for zero in self.zeros)


class StepMatcher:
    """Finds the step of a backward call, or raises NotSureError."""

    def __init__(self, source: Source, optimizers: Optimizers, calls: list[LoopCall]) -> None:
        self._source = source
        self._optimizers = optimizers
        running = source.callers(call.call for call in calls)
        self._clearing = ClearingCheck(source, running)
        self._groups = GroupChanges(source, optimizers)
        self._owners = Owners(source, optimizers, self._groups)
        given = (arg.value for call in calls if call.kind == "closure" for arg in call.call.args)
        self._closures = {"closure", *map(dotted, given)} - {""}

    def match(self, backward: LoopCall, calls: Sequence[LoopCall]) -> TrainingStep:
        """Return the step that a backward call belongs to."""
        self._check_backward(backward)
        step = self._step_after(backward, calls)
        advice = Advice(self._source, backward, step)
        self._check_optimizer(backward, step.optimizer)
        owner = self._owners.of(step.optimizer, backward.statement)
        is_evident = owner.is_module and owner.doubt is None
        trained = {step.optimizer, owner.name} if is_evident else {step.optimizer}
        neutral = GradNeutrality(self._source, self._optimizers, trained)
        between, clip, unscale = self._between(advice, calls, neutral)
        if clip is not None:
            check_clipping(advice, clip, neutral, between, owner)
        check_scaling(advice, clip, unscale)
        zeros = [call for call in calls if call.kind == "zero" and call.receiver in trained]
        zeros = self._clearing.zeros(backward, step, zeros, calls)
        self._groups.check(zeros, backward, step)
        self._check_names([*zeros, backward, step], backward, trained)
        params = owner.name if is_evident else step.optimizer
        own = [call.statement for call in (clip, unscale) if call is not None]
        is_one_call = len(between) == len(own) and not backward.call.args
        return TrainingStep(backward, step, zeros, clip, unscale, params, is_one_call)

    def _check_backward(self, backward: LoopCall) -> None:
        call, line, shown = backward.call, backward.line, self._source.shown
        given = arguments(call)
        if last_name(call) == "manual_backward" or (given.get("*") and dotted(call.func)):
            reason = f"{shown(call)} is another library's, or has a cotangent"
            raise NotSureError(line, reason, reasons.OTHER_LIBRARY)
        kept = given.get("retain_graph")
        if set(given) - {"retain_graph"} or constant(kept) not in {True, False, None}:
            fix = reasons.CREATE_GRAPH if "create_graph" in given else reasons.WEIGHTED
            raise NotSureError(line, f"{shown(call)} has options", fix)
        function = backward.function
        name = function.name.value if isinstance(function, cst.FunctionDef) else ""
        if isinstance(function, cst.Lambda) or name in self._closures:
            raise NotSureError(line, "backward() is in a closure", reasons.CLOSURE)
        if not backward.is_statement:
            raise NotSureError(line, shown(backward.statement), reasons.STEP)
        decorators = function.decorators if isinstance(function, cst.FunctionDef) else ()
        if any(COMPILED.search(self._source.text(one.decorator)) for one in decorators):
            raise NotSureError(line, f"{name} is compiled", reasons.STEP)

    def _step_after(self, backward: LoopCall, calls: Sequence[LoopCall]) -> LoopCall:
        """Return the step in the block of the backward call."""
        source, block = self._source, self._source.block(backward.statement)
        later = [call for call in calls if call.kind == "step" and call.at > backward.at]
        for call in later:
            if call.is_statement and source.block(call.statement) is block:
                self._check_only_step(backward, later, calls)
                return call
        if not later:
            reason = "no optimizer's step() after it in this function"
            raise NotSureError(backward.line, reason, reasons.STEP)
        if source.loops(backward.call)[:1] not in [source.loops(one.call)[:1] for one in later]:
            reason = "backward() is in a loop that step() is outside of: gradients may accumulate"
            raise NotSureError(backward.line, reason, reasons.ACCUMULATE)
        reason = "step() and backward() are in different blocks, and one may run without the other"
        raise NotSureError(backward.line, reason, Advice(source, backward, later[0]).otherwise())

    def _check_only_step(
        self, backward: LoopCall, later: Sequence[LoopCall], calls: Sequence[LoopCall]
    ) -> None:
        following = [call.at for call in calls if call.kind == "backward" and call.at > backward.at]
        end = min(following, default=(10**9, 0))
        stepping = [call for call in later if call.at < end]
        if len(stepping) > 1:
            lines = ", ".join(str(call.line) for call in stepping)
            reason = f"several steps with the gradients of one backward call (lines {lines})"
            raise NotSureError(backward.line, reason, reasons.ONE_OPTIMIZER)

    def _check_optimizer(self, backward: LoopCall, optimizer: str) -> None:
        unnamed = "" if optimizer else "the optimizer has no name of its own"
        doubt = unnamed or self._optimizers.doubt(optimizer, backward.function)
        if doubt:
            reason = f"{doubt}: it may not be a plain torch.optim.Optimizer"
            raise NotSureError(backward.line, reason, reasons.STEP)

    def _between(
        self, advice: Advice, calls: Sequence[LoopCall], neutral: GradNeutrality
    ) -> tuple[list[Statement], LoopCall | None, LoopCall | None]:
        """Return what stands between, the clip and the unscale_; raise if it may touch `.grad`."""
        source, backward, step = self._source, advice.backward, advice.step
        every = source.statements(source.block(backward.statement))
        between = [one for one in every if backward.at < source.at(one) < step.at]
        others = [call for call in calls if call.kind == "backward" and call.statement in between]
        if others:
            raise several(backward, others)
        known: dict[str, LoopCall] = {}
        for statement in between:
            kinds = {"clip", "unscale"} - known.keys()
            own = [call for call in calls if call.statement is statement and call.kind in kinds]
            if len(own) == 1:
                known[own[0].kind] = own[0]
            elif not neutral.is_neutral(statement):
                line, shown = source.line(statement), source.shown(statement)
                reason = f"`{shown}` (line {line}) between backward and step"
                raise NotSureError(backward.line, reason, advice.for_statement(statement, calls))
        return between, known.get("clip"), known.get("unscale")

    def _check_names(self, calls: Sequence[LoopCall], backward: LoopCall, names: set[str]) -> None:
        """Raise if the optimizer or the module becomes another one within the step."""
        lines = [call.line for call in calls]
        for text, bindings in self._source.bindings.items():
            if any(f"{name}.".startswith(f"{text}.") for name in names):
                bound = [self._source.line(one.node) for one in bindings]
                if any(min(lines) <= line <= max(lines) for line in bound):
                    reason = f"{text} is assigned between zero_grad() and step()"
                    raise NotSureError(backward.line, reason, reasons.STEP)
