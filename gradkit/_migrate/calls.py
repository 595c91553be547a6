"""The calls that a loop consists of: zero_grad, backward, unscale_, clip_grad_norm_, step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gradkit._migrate.optimizers import Optimizers
from gradkit._migrate.program import Program, Scope, dotted, last_name

BACKWARD = {"backward", "manual_backward"}
CLIP = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"}


@dataclass(frozen=True)
class LoopCall:
    """One such call."""

    kind: str  # "zero", "backward", "unscale", "clip", "step" or "closure"
    call: ast.Call
    statement: ast.stmt
    scope: Scope
    receiver: str = ""  # the text of what is called, '' if it is no dotted name
    argument: str = ""  # the optimizer given to a scaler

    @property
    def line(self) -> int:
        """The line of the call."""
        return self.call.lineno

    @property
    def position(self) -> tuple[int, int]:
        """Where the statement begins."""
        return self.statement.lineno, self.statement.col_offset

    @property
    def is_statement(self) -> bool:
        """Whether the call is a statement by itself, whose value is not used."""
        return isinstance(self.statement, ast.Expr) and self.statement.value is self.call


def loop_calls(program: Program, optimizers: Optimizers) -> list[LoopCall]:
    """Return the calls of a program in the order in which they stand."""
    calls = [
        LoopCall(kind, call, program.statement(call), program.scope(call), receiver, argument)
        for call in program.of_type(ast.Call)
        for kind, receiver, argument in _kinds(program, optimizers, call)
        if getattr(program.scope(call), "name", "") != "backward"  # that of a custom Function
    ]
    return sorted(calls, key=lambda call: (call.call.lineno, call.call.col_offset))


def _kinds(
    program: Program, optimizers: Optimizers, call: ast.Call
) -> Iterator[tuple[str, str, str]]:
    """Yield the kind of a call with its receiver and the optimizer it is given, if it is one."""
    name = last_name(call)
    full = program.qualified(call.func)
    receiver = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    given = [dotted(argument) for argument in call.args]
    if full in CLIP:
        yield "clip", receiver, ""
    elif not isinstance(call.func, ast.Attribute) or full.startswith("gradkit."):
        return
    elif name in BACKWARD:
        yield "backward", receiver, ""
    elif name == "zero_grad":
        yield "zero", receiver, ""
    elif name == "clip_grad_norm_":  # a method, of FSDP or of a trainer
        yield "clip", "", ""
    elif name == "unscale_":
        yield "unscale", receiver, given[0] if given else ""
    elif name == "step":
        if optimizers.is_optimizer(receiver):
            with_closure = bool(call.args or call.keywords)
            yield ("closure" if with_closure else "step"), receiver, ""
        elif len(given) == 1 and optimizers.is_optimizer(given[0]):
            yield "step", receiver, given[0]


def functions_with(program: Program, calls: list[LoopCall]) -> set[str]:
    """Return the names of the functions in which such calls are, or that call one of them."""
    names = {getattr(scope, "name", "") for call in calls for scope in _scopes(program, call.call)}
    names -= {""}
    called = {
        name: {last_name(c) for c in ast.walk(function) if isinstance(c, ast.Call)}
        for name, function in program.functions.items()
    }
    while True:
        further_names = {name for name, inner in called.items() if inner & names} - names
        if not further_names:
            return names
        names |= further_names


def _scopes(program: Program, node: ast.AST) -> Iterator[Scope]:
    while not isinstance(node, ast.Module):
        node = program.scope(node)
        yield node
