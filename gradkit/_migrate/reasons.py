"""Why a loop is left as it is, and what to do by hand."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradkit._migrate.program import Program

ACCUMULATE = (
    "add the gradients as values, grads = gradkit.tree.add(grads, new), then one gradkit.step_; "
    "see 'Accumulation over micro-batches' in docs/moving_a_loop.md"
)
SEVERAL_BACKWARD = (
    "gradkit.value_and_grads([loss_a, loss_b], model) gives the sum in one pass, "
    "gradkit.per_loss_grads each; a GAN: gradkit.simultaneous_grads"
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
WEIGHTED = "gradkit.value_and_grads(loss, model, weights=...), or sum the loss first"
ONE_OPTIMIZER = (
    "_, grads = gradkit.value_and_grads(loss, [opt_a, opt_b]), then "
    "gradkit.step_(opt_a, opt_a, grads[0]) and gradkit.step_(opt_b, opt_b, grads[1])"
)
ZEROS = "unused='zeros' in gradkit.value_and_grads, where a parameter is not always reached"
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


def shown(node: ast.AST) -> str:
    """Return the first line of some code, shortened."""
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


def at(program: Program, node: ast.AST) -> str:
    """Return where some code stands, and its statement."""
    line = getattr(node, "lineno", 1)
    return f"line {line}" + (
        "" if isinstance(node, ast.Module) else f": `{shown(program.statement(node))}`"
    )
