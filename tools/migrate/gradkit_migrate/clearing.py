"""What clears the gradients of a step, and what else adds to them."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from gradkit_migrate import reasons
from gradkit_migrate.calls import LoopCall
from gradkit_migrate.reasons import NotSureError
from gradkit_migrate.source import FUNCTIONS, LOOPS, Called, Source, arguments, called, constant

LEAVES = (cst.Break, cst.Continue, cst.Return, cst.Raise, cst.Yield, cst.Await)


class ClearingCheck:
    """Checks that a step begins without gradients, and has those of one backward call."""

    def __init__(self, source: Source, running: set[Called]) -> None:
        self._source = source
        self._running = running

    def zeros(
        self,
        backward: LoopCall,
        step: LoopCall,
        zeros: Sequence[LoopCall],
        calls: Sequence[LoopCall],
    ) -> list[LoopCall]:
        """Return the calls that clear the gradients of this step; raise if none surely does."""
        before = [zero for zero in zeros if self._always_before(zero, backward)]
        block = self._source.block(step.statement)
        after = [
            zero for zero in zeros if zero.is_statement and zero.at > step.at
            if self._source.block(zero.statement) is block
        ]  # fmt: skip
        for zero in [*before, *after]:
            given = {name: constant(value) for name, value in arguments(zero.call).items()}
            if given not in ({}, {"set_to_none": True}):
                reason = f"`{self._source.shown(zero.call)}`: a zero is not None to an optimizer"
                raise NotSureError(zero.line, reason, reasons.ZEROS)
        first = max(before, key=lambda zero: zero.at) if before else None
        if first is None and not after:
            reason = "no zero_grad() that surely runs before each backward(): gradients accumulate"
            raise NotSureError(backward.line, reason, reasons.ACCUMULATE)
        self._check_alone(first, backward, step, calls)
        if first is None:
            self._check_repeats(step, after[0])
        return [*before, *after]

    def _always_before(self, zero: LoopCall, call: LoopCall) -> bool:
        """Return whether zero_grad runs before each such call, in the same turn of a loop."""
        stop = (*LOOPS, *FUNCTIONS)
        return zero.is_statement and self._source.precedes(
            zero.statement, call.statement, stop=stop
        )

    def _check_alone(
        self, zero: LoopCall | None, backward: LoopCall, step: LoopCall, calls: Sequence[LoopCall]
    ) -> None:
        """Raise if anything else adds to the gradients between zero_grad and step."""
        source = self._source
        begin = zero.at if zero is not None else (0, 0)
        end = step.at if zero is not None else (10**9, 0)
        others = [
            call for call in calls
            if call.kind == "backward" and call is not backward and begin < call.at < end
            if not (zero is not None and source.are_exclusive(call.call, backward.call))
        ]  # fmt: skip
        if others:
            raise several(backward, others)
        known = {call.call for call in calls}
        for node in source.walk(backward.function, cst.Call):
            inside = node not in known and begin < source.at(node) < end
            if inside and called(node) in self._running:
                line = source.line(node)
                reason = f"{source.shown(node)} runs backward() or step() itself (line {line})"
                raise NotSureError(backward.line, reason, reasons.SEVERAL_BACKWARD)

    def _check_repeats(self, step: LoopCall, zero: LoopCall) -> None:
        """Raise if a turn of the loop can end after backward and before zero_grad."""
        source = self._source
        for statement in source.statements(source.block(step.statement)):
            between = step.at <= source.at(statement) < zero.at
            if between and any(isinstance(n, LEAVES) for n in source.nodes(statement)):
                line = source.line(statement)
                reason = f"`{source.shown(statement)}` may skip zero_grad() (line {line})"
                raise NotSureError(zero.line, reason, reasons.CLEAR_FIRST)
        for outer in source.ancestors(step.statement):
            if isinstance(outer, (*LOOPS, *FUNCTIONS)):
                return
            suppressed = isinstance(outer, cst.With) and "suppress" in source.shown(outer)
            if isinstance(outer, cst.Try | cst.TryStar) or suppressed:
                reason = "an exception may skip zero_grad(), which runs after step()"
                raise NotSureError(zero.line, reason, reasons.CLEAR_FIRST)


def several(backward: LoopCall, others: Sequence[LoopCall]) -> NotSureError:
    """Return the error for further backward calls before the step."""
    lines = sorted([backward.line, *(call.line for call in others)])
    reason = f"several backward calls before one step() (lines {str(lines)[1:-1]})"
    return NotSureError(backward.line, reason, reasons.SEVERAL_BACKWARD)
