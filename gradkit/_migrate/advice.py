"""What to do by hand with a step that is left, in the names of its script."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from gradkit._migrate import reasons
from gradkit._migrate.calls import CLIP, LoopCall, clip_values
from gradkit._migrate.program import Program, dotted, last_name
from gradkit._migrate.reasons import shown

CLIP_VALUE = {"torch.nn.utils.clip_grad_value_", "torch.nn.utils.clip_grad.clip_grad_value_"}


@dataclass(frozen=True)
class Advice:
    """The calls that take the place of one backward call and its step."""

    program: Program
    backward: LoopCall
    step: LoopCall

    @property
    def optimizer(self) -> str:
        """The optimizer, as the script calls it."""
        func = self.step.call.func
        unnamed = func.value if isinstance(func, ast.Attribute) else func  # opts["a"], say
        return self.step.argument or self.step.receiver or shown(unnamed)

    @property
    def scaler(self) -> str:
        """The scaler, or ''."""
        return self.step.receiver if self.step.argument else ""

    def gradients(self, params: str) -> str:
        """Return the call that returns the gradients."""
        assert isinstance(self.backward.call.func, ast.Attribute)
        loss = shown(self.backward.call.func.value)
        options = "".join(f", {ast.unparse(k)}" for k in self.backward.call.keywords)
        return f"_, grads = gradkit.value_and_grads({loss}, {params}{options})"

    def stepped(self, params: str, max_norm: str = "") -> str:
        """Return the call that steps."""
        options = f", scaler={self.scaler}" if self.scaler else ""
        options += f", max_norm={max_norm}" if max_norm else ""
        return f"gradkit.step_({self.optimizer}, {params}, grads{options})"

    def otherwise(self) -> str:
        """Return how to give the gradients to code that reads or writes `.grad`."""
        written = f"gradkit.write_grads_({self.optimizer}, grads)"
        calls = f"{self.gradients(self.optimizer)}; {written}"
        return f"{calls} in place of backward(), and the rest as it is"

    def for_inputs(self) -> str:
        """Return how to have the gradient of an input."""
        grad = self.gradients("x").replace("grads =", "grad =", 1)
        return f"if it is for the gradient of an input x alone: {grad} in place of x.grad"

    def step_where_it_is(self, calls: Sequence[LoopCall]) -> str:
        """Return both calls for a step under a condition."""
        clips = self._clips()
        norms = [c for c in calls if c.kind == "clip" and c.call in clips]
        if not clips:
            return f"{self.moved()} where step() is"
        is_one = len(clips) == len(norms) == 1
        return self.clipped_before(norms[0]) if is_one else self.clipped_as_it_is()

    def _clips(self) -> list[ast.Call]:
        """Return each call between backward and step that clips."""
        begin, end = self.backward.position, self.step.position
        return [
            call
            for call in ast.walk(self.backward.scope)
            if isinstance(call, ast.Call) and begin < (call.lineno, call.col_offset) < end
            if last_name(call) == "clip_grad_norm_" or self._is_by_value(call)
        ]

    def _is_by_value(self, call: ast.Call) -> bool:
        return self.program.qualified(call.func) in CLIP_VALUE

    def moved(self) -> str:
        """Return both calls."""
        return f"{self.gradients(self.optimizer)}; {self.stepped(self.optimizer)}"

    def clipped_in_step(self, clip: LoopCall) -> str:
        """Return how to clip with the step."""
        values = clip_values(clip.call)
        assert values is not None
        return self._clipped_in_step(values[0], ast.unparse(values[1]))

    def clipped_before(self, clip: LoopCall) -> str:
        """Return how to clip, and to have the norm, before the step."""
        values = clip_values(clip.call)
        if values is None or self.scaler or self.program.qualified(clip.call.func) not in CLIP:
            return self.clipped_as_it_is()
        params = _params(values[0], self.optimizer)
        clipped = f"grads, norm = gradkit.tree.clip_by_global_norm(grads, {ast.unparse(values[1])})"
        return (
            f"{self._if_same(values[0])}{self.gradients(params)}; {clipped}; "
            f"{self.stepped(params)} where step() is"
        )

    def clipped_as_it_is(self) -> str:
        """Return how to keep calls that clip otherwise than `step_` does."""
        clipped = dict.fromkeys(ast.unparse(call.args[0]) for call in self._clips() if call.args)
        has_all = f"if {self.optimizer} has all of {' and '.join(clipped)}: " if clipped else ""
        return (
            f"gradkit.step_ clips to the 2-norm of all gradients only; {has_all}{self.otherwise()}"
        )

    def clipped_by_value(self, call: ast.Call) -> str:
        """Return how to clamp the gradients."""
        given = dict(zip(("parameters", "clip_value"), call.args, strict=False))
        given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
        if self.scaler or not {"parameters", "clip_value"} <= given.keys():
            return self.clipped_as_it_is()
        value = given["clip_value"]
        limit = ast.unparse(value)
        negative = limit if isinstance(value, ast.Constant) or dotted(value) else f"({limit})"
        params = _params(given["parameters"], self.optimizer)
        clipped = f"grads = gradkit.tree.map(lambda g: g.clamp(-{negative}, {limit}), grads)"
        return (
            f"{self._if_same(given['parameters'])}{self.gradients(params)}; {clipped}; "
            f"{self.stepped(params)}"
        )

    def for_statement(self, statement: ast.stmt, calls: Sequence[LoopCall], reads: bool) -> str:
        """Return what to do with a statement between backward and step, which may read `.grad`."""
        inner = [c for c in ast.walk(statement) if isinstance(c, ast.Call)]
        own = {call.kind: call for call in calls if call.call in inner}
        by_value = list(filter(self._is_by_value, inner))
        if "backward" in own:
            return reasons.SEVERAL_BACKWARD
        if "step" in own:
            return reasons.ONE_OPTIMIZER
        if "zero" in own:
            return f"leave it out, if it does not clear what is stepped: {self.moved()}"
        clips = self._clips()
        if len(clips) > 1 and ("clip" in own or by_value):
            return self.clipped_as_it_is()
        if "clip" in own:
            return self._for_clipping(statement, own["clip"])
        if by_value and isinstance(statement, ast.Expr):
            return self.clipped_by_value(by_value[0])
        if reads or by_value:
            return self.otherwise()
        return f"if it uses no gradients, move it before backward(); else {self.otherwise()}"

    def _for_clipping(self, statement: ast.stmt, clip: LoopCall) -> str:
        """Return how to clip under a condition; or in a loop."""
        values = clip_values(clip.call)
        is_plain = clip.is_statement and self.program.qualified(clip.call.func) in CLIP
        if not isinstance(statement, ast.If) or values is None or not is_plain:
            return self.clipped_as_it_is()
        if statement.body != [clip.statement] or statement.orelse:
            return self.clipped_as_it_is()
        limit = f"{ast.unparse(values[1])} if {ast.unparse(statement.test)} else None"
        return self._clipped_in_step(values[0], limit)

    def _clipped_in_step(self, clipped: ast.expr, limit: str) -> str:
        params = _params(clipped, self.optimizer)
        stepped = self.stepped(params, limit)
        return f"{self._if_same(clipped)}{self.gradients(params)}; {stepped}"

    def _if_same(self, clipped: ast.expr) -> str:
        return f"if {self.optimizer} has exactly {ast.unparse(clipped)}: "


def _params(clipped: ast.expr, optimizer: str) -> str:
    """Return the module whose parameters are clipped, or else the optimizer."""
    if not isinstance(clipped, ast.Call) or clipped.args or clipped.keywords:
        return optimizer
    owner, _, method = dotted(clipped.func).rpartition(".")
    return owner if owner and method == "parameters" else optimizer
