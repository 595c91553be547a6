"""One training step: the calls from zero_grad to step that belong to one backward call."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradkit._migrate import reasons
from gradkit._migrate.advice import Advice
from gradkit._migrate.calls import LoopCall, LoopFunctions
from gradkit._migrate.clearing import ClearingCheck, several
from gradkit._migrate.clipping import check_clipping, clipped_params
from gradkit._migrate.optimizers import Optimizers
from gradkit._migrate.program import Program, dotted, last_name
from gradkit._migrate.reasons import NotSureError, shown
from gradkit._migrate.regrouping import check_groups
from gradkit._migrate.scaling import check_scaling
from gradkit._migrate.statements import GradNeutrality

COMPILED = re.compile(r"compile|jit|script")


@dataclass(frozen=True)
class TrainingStep:
    """What is moved together."""

    backward: LoopCall
    step: LoopCall
    zeros: Sequence[LoopCall]
    clip: LoopCall | None
    unscale: LoopCall | None
    optimizer: str
    params: str  # with respect to what: the module, or the optimizer for exactly its parameters
    is_made_here: bool  # the program shows how the optimizer was made

    @property
    def calls(self) -> list[LoopCall]:
        """All calls that are replaced or removed."""
        calls = [self.backward, self.step, *self.zeros, self.clip, self.unscale]
        return [call for call in calls if call is not None]

    @property
    def scaler(self) -> str:
        """The scaler, or ''."""
        return self.step.receiver if self.step.argument else ""

    @property
    def clears_before(self) -> bool:
        """Whether the gradients are cleared before they are computed, and not after the step."""
        return any(zero.position < self.backward.position for zero in self.zeros)


class StepMatcher:
    """Finds the step of a backward call, or raises NotSureError."""

    def __init__(
        self,
        program: Program,
        optimizers: Optimizers,
        calls: Sequence[LoopCall],
        functions: LoopFunctions,
    ) -> None:
        self._program = program
        self._optimizers = optimizers
        self._clearing = ClearingCheck(program, optimizers, functions)
        self._closures = {
            name for call in calls if call.kind == "closure" for name in _closures(call)
        }

    def sees_closure(self, call: LoopCall) -> bool:
        """Return whether the closure of a step is in this file, where its backward is seen."""
        return _closures(call) <= {*self._program.functions, ""}

    def match(self, backward: LoopCall, calls: Sequence[LoopCall]) -> TrainingStep:
        """Return the step that a backward call belongs to."""
        self._check_backward(backward)
        step = self._step_after(backward, calls)
        advice = Advice(self._program, backward, step)
        optimizer = step.argument or step.receiver
        self._check_optimizer(backward, optimizer)
        origins = self._optimizers.origins
        origin = origins.origin(optimizer, backward.scope)
        owner = origin.owner if origin is not None else ""
        trained = {optimizer, owner} - {""}
        clip, unscale = self._check_between(advice, calls, trained)
        params = owner if origin is not None and origin.made is not None else ""
        params = params or optimizer
        if clip is not None:
            params = clipped_params(advice, clip, origins)
        check_scaling(self._program, backward, step, clip, unscale)
        zeros = [c for c in calls if c.kind == "zero" and c.receiver in trained]
        zeros = self._clearing.zeros(backward, step, zeros, calls)
        changes = origins.changes(optimizer, backward.scope)
        check_groups(self._program, changes, zeros, backward, step)
        self._check_names(zeros, backward, step, {optimizer, params})
        made_here = origin is not None or origins.is_made_here(optimizer, backward.scope)
        return TrainingStep(backward, step, zeros, clip, unscale, optimizer, params, made_here)

    def _check_backward(self, backward: LoopCall) -> None:
        call, line = backward.call, backward.line
        name = getattr(backward.scope, "name", "<lambda>")
        if last_name(call) == "manual_backward" or (call.args and dotted(call.func)):
            raise NotSureError(
                line, f"{shown(call)} is another library's, or has a cotangent",
                reasons.OTHER_LIBRARY,
            )  # fmt: skip
        options = {k.arg: k.value for k in call.keywords}
        constant = isinstance(options.get("retain_graph", ast.Constant(True)), ast.Constant)
        if call.args or set(options) - {"retain_graph"} or not constant:
            fix = reasons.CREATE_GRAPH if "create_graph" in options else reasons.WEIGHTED
            raise NotSureError(line, f"{shown(call)} has options", fix)
        if isinstance(backward.scope, ast.Lambda) or name in self._closures or name == "closure":
            raise NotSureError(line, "backward() is in a closure", reasons.CLOSURE)
        if not backward.is_statement:
            raise NotSureError(line, f"{shown(backward.statement)}", reasons.STEP)
        decorators = getattr(backward.scope, "decorator_list", [])
        if any(COMPILED.search(ast.unparse(decorator)) for decorator in decorators):
            raise NotSureError(line, f"{name} is compiled", reasons.STEP)

    def _step_after(self, backward: LoopCall, calls: Sequence[LoopCall]) -> LoopCall:
        """Return the step in the block of the backward call."""
        block, _ = self._program.block(backward.statement)
        later = [c for c in calls if c.kind == "step" and c.position > backward.position]
        for call in later:
            if call.is_statement and self._program.block(call.statement)[0] == block:
                self._check_only_step(backward, later, calls)
                return call
        if not later:
            reason = "no optimizer's step() after it in this function"
            raise NotSureError(backward.line, reason, reasons.STEP)
        loop = self._program.loop(backward.call)
        in_loop = [c for c in later if self._program.loop(c.call) is loop]
        advice = Advice(self._program, backward, next(iter(in_loop), later[0]))
        self._clearing.check_kept(advice, calls)
        if in_loop:
            raise self._clearing.in_another_block(advice, calls)
        reason = "backward() runs several times for one step(): gradients accumulate"
        raise NotSureError(backward.line, reason, reasons.ACCUMULATE)

    def _check_only_step(
        self, backward: LoopCall, later: Sequence[LoopCall], calls: Sequence[LoopCall]
    ) -> None:
        next_ones = [c for c in calls if c.kind == "backward" and c.position > backward.position]
        end = next_ones[0].position if next_ones else (10**9, 0)
        stepping = [call for call in later if call.position < end]
        if len(stepping) > 1:
            lines = ", ".join(str(call.line) for call in stepping)
            reason = f"several steps with the gradients of one backward call (lines {lines})"
            raise NotSureError(backward.line, reason, reasons.ONE_OPTIMIZER)

    def _check_optimizer(self, backward: LoopCall, optimizer: str) -> None:
        in_container = "" if optimizer else "the optimizer has no name of its own"
        doubt = in_container or self._optimizers.doubt(optimizer, backward.scope)
        if doubt:
            reason = f"{doubt}: it may not be a plain torch.optim.Optimizer"
            raise NotSureError(backward.line, reason, reasons.STEP)

    def _check_between(
        self, advice: Advice, calls: Sequence[LoopCall], trained: set[str]
    ) -> tuple[LoopCall | None, LoopCall | None]:
        """Return the clip and the unscale_ between; raise if something else may touch `.grad`."""
        backward, step = advice.backward, advice.step
        (parent, field), first = self._program.block(backward.statement)
        last = self._program.block(step.statement)[1]
        neutral = GradNeutrality(self._program, self._optimizers, trained)
        between = getattr(parent, field)[first + 1 : last]
        known: dict[str, LoopCall] = {}
        if any(c.kind == "backward" and c.statement in between for c in calls):
            self._clearing.check_kept(advice, calls)
            raise several(backward, step, calls)
        for statement in between:
            own = [c for c in calls if c.statement is statement and c.kind in {"clip", "unscale"}]
            if len(own) == 1 and own[0].kind not in known:
                known[own[0].kind] = own[0]
            elif not neutral.statement(statement):
                reason = f"`{shown(statement)}` (line {statement.lineno}) between backward and step"
                by_hand = advice.for_statement(statement, calls, neutral.mentions(statement))
                raise NotSureError(backward.line, reason, by_hand)
        clip = known.get("clip")
        if clip is not None:
            check_clipping(advice, clip, neutral, between)
        return clip, known.get("unscale")

    def _check_names(
        self, zeros: list[LoopCall], backward: LoopCall, step: LoopCall, names: set[str]
    ) -> None:
        """Raise if the optimizer or the module becomes another one within the step."""
        lines = [call.line for call in (*zeros, backward, step)]
        for name in names:
            for text, assigned in self._program.assignments.items():
                if name != text and not name.startswith(f"{text}."):
                    continue
                if any(min(lines) <= a.position[0] <= max(lines) for a in assigned):
                    reason = f"{text} is assigned between zero_grad() and step()"
                    raise NotSureError(backward.line, reason, reasons.STEP)


def _closures(call: LoopCall) -> set[str]:
    """Return the names of the functions that a step is given, '' for a lambda."""
    return {dotted(a) for a in [*call.call.args, *(k.value for k in call.call.keywords)]}
