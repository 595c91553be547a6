"""What clears the gradients of a step, and what else adds to them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradkit._migrate import reasons
from gradkit._migrate.advice import Advice
from gradkit._migrate.calls import LoopCall, LoopFunctions
from gradkit._migrate.optimizers import Optimizers
from gradkit._migrate.program import FUNCTIONS, LOOPS, Program, Scope, last_name
from gradkit._migrate.reasons import NotSureError, shown


class ClearingCheck:
    """Checks that a step begins without gradients, and has those of one backward call."""

    def __init__(self, program: Program, optimizers: Optimizers, functions: LoopFunctions) -> None:
        self._program = program
        self._optimizers = optimizers
        self._functions = functions

    def zeros(
        self,
        backward: LoopCall,
        step: LoopCall,
        zeros: list[LoopCall],
        calls: Sequence[LoopCall],
    ) -> list[LoopCall]:
        """Return the calls that clear the gradients of this step; raise if none surely does."""
        before = [z for z in zeros if self._always_before(z, backward)]
        after = [z for z in zeros if self._always_after(z, step)]
        for zero in [*before, *after]:
            if zero.call.args or any(
                ast.unparse(k) != "set_to_none=True" for k in zero.call.keywords
            ):
                reason = f"`{shown(zero.call)}`: a zero is not None to an optimizer"
                raise NotSureError(zero.line, reason, reasons.ZEROS)
        first = max(before, key=lambda z: z.position) if before else None
        if first is None and not after:
            reason = "no zero_grad() that surely runs before each backward(): gradients accumulate"
            raise NotSureError(backward.line, reason, reasons.ACCUMULATE)
        self._check_alone(first, backward, step, calls)
        if first is None:
            self._check_repeats(step, after[0])
        return [*before, *after]

    def check_kept(self, advice: Advice, calls: Sequence[LoopCall]) -> None:
        """Raise if gradients are cleared between backward and step: they may be of an input."""
        for zero in self._clearing(advice, calls):
            after = zero.position > advice.backward.position
            if after and self._always_before(zero, advice.step):
                reason = (
                    f"`{shown(zero.call)}` (line {zero.line}) stands between this backward() and "
                )
                raise NotSureError(advice.backward.line, f"{reason}step()", advice.for_inputs())

    def in_another_block(self, advice: Advice, calls: Sequence[LoopCall]) -> NotSureError:
        """Return the error for a step that may run without its backward call, or not at all."""
        backward, step = advice.backward, advice.step
        of_backward, of_step = (self._around(call, backward.scope) for call in (backward, step))
        inner = [p for p in of_step if p not in of_backward]
        what, outer = ("step()", inner[-1]) if inner else ("backward()", of_backward[0])
        reason = f"{what} is in another block, `{shown(outer)}` (line {outer.lineno})"
        zeros = self._clearing(advice, calls)
        if not any(self._always_before(zero, backward) for zero in zeros):
            reason += ": gradients may accumulate"
            return NotSureError(backward.line, reason, reasons.ACCUMULATE)
        if not isinstance(outer, ast.With | ast.AsyncWith):
            reason += ", and may not run each time"
        by_hand = advice.step_where_it_is(calls) if inner else advice.otherwise()
        return NotSureError(backward.line, reason, by_hand)

    def _around(self, call: LoopCall, scope: Scope) -> list[ast.stmt]:
        """Return the statements of its scope in which a call is, from the inside out."""
        around = [p for p, _ in self._program.ancestors(call.statement)]
        within = [p for p in around if self._program.scope(p) is scope and p is not scope]
        return [p for p in within if isinstance(p, ast.stmt)]

    def _clearing(self, advice: Advice, calls: Sequence[LoopCall]) -> list[LoopCall]:
        """Return the calls that clear what a step has, or may do so: of a module."""
        zeros = [c for c in calls if c.kind == "zero"]
        is_optimizer = self._optimizers.is_optimizer
        return [
            c for c in zeros
            if c.receiver == advice.optimizer or not is_optimizer(c.receiver)
        ]  # fmt: skip

    def _always_before(self, zero: LoopCall, backward: LoopCall) -> bool:
        """Return whether a call runs before each backward call, in the same turn of a loop."""
        if not zero.is_statement or zero.position > backward.position:
            return False
        block, _ = self._program.block(zero.statement)
        for parent, field in self._program.ancestors(backward.statement):
            if (parent, field) == block:
                return True
            if isinstance(parent, (*LOOPS, *FUNCTIONS)):
                return False
        return False

    def _always_after(self, zero: LoopCall, step: LoopCall) -> bool:
        if not zero.is_statement or zero.position < step.position:
            return False
        return self._program.block(zero.statement)[0] == self._program.block(step.statement)[0]

    def _check_alone(
        self,
        zero: LoopCall | None,
        backward: LoopCall,
        step: LoopCall,
        calls: Sequence[LoopCall],
    ) -> None:
        """Raise if anything else adds to the gradients between zero_grad and step."""
        begin = zero.position if zero is not None else (0, 0)
        end = step.position if zero is not None else (10**9, 0)
        others = [
            c for c in calls
            if c.kind == "backward" and c is not backward and begin < c.position < end
            if not (zero is not None and self._program.exclusive(c.call, backward.call))
        ]  # fmt: skip
        if others:
            raise _several(backward, others)
        for node in ast.walk(backward.scope):
            if not isinstance(node, ast.Call) or any(c.call is node for c in calls):
                continue
            if begin < (node.lineno, node.col_offset) < end and self._functions.runs(node):
                reason = f"{shown(node)} runs backward() or step() itself (line {node.lineno})"
                raise NotSureError(backward.line, reason, reasons.SEVERAL_BACKWARD)

    def _check_repeats(self, step: LoopCall, zero: LoopCall) -> None:
        """Raise if a turn of the loop can end after backward and before zero_grad."""
        (parent, field), index = self._program.block(step.statement)
        end = self._program.block(zero.statement)[1]
        leaves = (ast.Break, ast.Continue, ast.Return, ast.Raise, ast.Yield, ast.Await)
        for statement in getattr(parent, field)[index:end]:
            if any(isinstance(node, leaves) for node in ast.walk(statement)):
                reason = f"`{shown(statement)}` may skip zero_grad() (line {statement.lineno})"
                raise NotSureError(zero.line, reason, "call zero_grad() before backward()")
        for outer, _ in self._program.ancestors(step.statement):
            if isinstance(outer, (*LOOPS, *FUNCTIONS)):
                return
            suppressed = isinstance(outer, ast.With) and "suppress" in ast.dump(outer.items[0])
            if isinstance(outer, ast.Try | ast.TryStar) or suppressed:
                reason = "an exception may skip zero_grad(), which runs after step()"
                raise NotSureError(zero.line, reason, "call zero_grad() before backward()")


def several(backward: LoopCall, step: LoopCall, calls: Sequence[LoopCall]) -> NotSureError:
    """Return the error for further backward calls before the step."""
    others = [c for c in calls if c.kind == "backward" and backward.line < c.line < step.line]
    return _several(backward, others)


def _several(backward: LoopCall, others: Sequence[LoopCall]) -> NotSureError:
    lines = sorted([backward.line, *(call.line for call in others)])
    shown_lines = ", ".join(map(str, lines))
    reason = f"several backward calls add to the same gradients (lines {shown_lines})"
    for node in ast.walk(backward.scope):
        if isinstance(node, ast.Expr) and lines[0] < node.lineno < lines[-1]:
            name = last_name(node.value) if isinstance(node.value, ast.Call) else ""
            if name.endswith("_") and name not in {"clip_grad_norm_", "unscale_"}:
                reason += f", with `{shown(node)}` between (line {node.lineno})"
    return NotSureError(backward.line, reason, reasons.SEVERAL_BACKWARD)
