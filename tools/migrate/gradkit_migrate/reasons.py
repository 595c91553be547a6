"""Why a loop is left as it is, and what to do by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from gradkit_migrate.calls import LoopCall, clip_values
from gradkit_migrate.source import Node, Source

ACCUMULATE = (
    "add the gradients as values, grads = gradkit.tree.add(grads, new), then one gradkit.step_; "
    "see 'Accumulation over micro-batches' in docs/moving_a_loop.md; for the gradient of an input "
    "x alone: _, grad = gradkit.value_and_grads(loss, x) in place of x.grad"
)
SEVERAL_BACKWARD = (
    "gradkit.value_and_grads([loss_a, loss_b], model) gives the sum in one pass, "
    "gradkit.per_loss_grads each; for the gradient of an input x alone: _, grad = "
    "gradkit.value_and_grads(loss, x) in place of x.grad"
)
CLOSURE = (
    "compute the gradients in the closure, gradkit.write_grads_(model, grads), and call "
    "optimizer.step(closure) in gradkit.capture_grads(model)"
)
STEP = (
    "_, grads = gradkit.value_and_grads(loss, model), then gradkit.step_(optimizer, model, grads)"
)
OTHER_LIBRARY = "keep that library's loop, or gradkit.capture_grads(model) around it"
TOGETHER = "move the loops of this file together"
CLIPPED = "gradkit.step_(..., max_norm=...) clips all that it steps to a 2-norm"
SCALED = "gradkit.step_(..., scaler=scaler, max_norm=...) unscales, then clips; see docs"
SCALED_CLIP = (
    "clip what is unscaled, as is usual, which trains otherwise than this loop: "
    "gradkit.step_(..., scaler=scaler, max_norm=...)"
)
CREATE_GRAPH = "gradkit.value_and_grads(loss, model, create_graph=True)"
WEIGHTED = "gradkit.vjp(loss, model, gradient); or gradkit.value_and_grads(..., weights=...)"
ONE_OPTIMIZER = (
    "_, grads = gradkit.value_and_grads(loss, [opt_a, opt_b]), then "
    "gradkit.step_(opt_a, opt_a, grads[0]) and gradkit.step_(opt_b, opt_b, grads[1])"
)
ZEROS = "unused='zeros' in gradkit.value_and_grads, where a parameter is not always reached"
CLEAR_FIRST = "call zero_grad() before each backward()"
FROZEN = (
    "value_and_grads raises UnreachedParamError where the loss reaches none of the parameters: "
    "skip it and step_ in the phases in which all of them are frozen"
)
GROUPS = (
    "add all groups before the loop; or call optimizer.zero_grad() before backward(), and change "
    "groups before it"
)


@dataclass(frozen=True, order=True)
class SkippedLoop:
    """A loop that stays as it is."""

    line: int
    reason: str
    by_hand: str


class NotSureError(Exception):
    """Something was seen that may give a loop another meaning once it is moved."""

    def __init__(self, line: int, reason: str, by_hand: str) -> None:
        super().__init__(reason)
        self.skipped = SkippedLoop(line, reason, by_hand)


@dataclass(frozen=True)
class Advice:
    """The calls that take the place of one backward call and its step."""

    source: Source
    backward: LoopCall
    step: LoopCall

    @property
    def optimizer(self) -> str:
        """The optimizer, as the script calls it."""
        func = self.step.call.func
        unnamed = func.value if isinstance(func, cst.Attribute) else func  # opts["a"], say
        return self.step.optimizer or self.source.shown(unnamed)

    def gradients(self) -> str:
        """Return the call that returns the gradients."""
        func = self.backward.call.func
        assert isinstance(func, cst.Attribute)
        options = "".join(f", {self.source.text(arg)}" for arg in self.backward.call.args)
        loss = self.source.shown(func.value)
        return f"_, grads = gradkit.value_and_grads({loss}, {self.optimizer}{options})"

    def moved(self, max_norm: str = "") -> str:
        """Return both calls."""
        options = f", scaler={self.step.scaler}" if self.step.scaler else ""
        options += f", max_norm={max_norm}" if max_norm else ""
        stepped = f"gradkit.step_({self.optimizer}, {self.optimizer}, grads{options})"
        return f"{self.gradients()}; {stepped}"

    def otherwise(self) -> str:
        """Return how to give the gradients to code that reads or writes `.grad`."""
        added = f"gradkit.add_grads_({self.optimizer}, grads)"  # as backward() does
        return f"{self.gradients()}; {added} in place of backward(), and the rest as it is"

    def for_statement(self, statement: Node, calls: Sequence[LoopCall]) -> str:
        """Return what to do with a statement between backward and step."""
        inner = list(self.source.walk(statement, cst.Call))
        kinds = {call.kind for call in calls if call.call in inner}
        if kinds & {"backward", "step"}:
            return SEVERAL_BACKWARD if "backward" in kinds else ONE_OPTIMIZER
        if "zero" in kinds:
            return f"leave it out, if it does not clear what is stepped: {self.moved()}"
        return f"if it uses no gradients, move it before backward(); else {self.otherwise()}"

    def clipped_in_step(self, call: cst.Call) -> str:
        """Return how to clip with the step what the optimizer may have."""
        values = clip_values(call)
        assert values is not None
        clipped, max_norm = map(self.source.text, values)
        return f"if {self.optimizer} has exactly {clipped}: {self.moved(max_norm)}"

    def clipped_as_it_is(self) -> str:
        """Return how to keep calls that clip otherwise than `step_` does."""
        reason = "gradkit.step_ clips to the 2-norm of all gradients only"
        return f"{reason}; if {self.optimizer} has all that is clipped: {self.otherwise()}"
