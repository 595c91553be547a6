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
        elif not (call.args or call.keywords) and optimizers.may_be_optimizer(call.func.value):
            yield "step", receiver, ""


def clip_values(call: ast.Call) -> tuple[ast.expr, ast.expr] | None:
    """Return what is clipped, and to which norm; None if there are other options."""
    given = dict(zip(("parameters", "max_norm", "norm_type"), call.args, strict=False))
    given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
    norm_type = given.pop("norm_type", ast.Constant(2))
    is_two_norm = isinstance(norm_type, ast.Constant) and norm_type.value == 2
    if set(given) != {"parameters", "max_norm"} or not is_two_norm or len(call.args) > 3:
        return None
    return given["parameters"], given["max_norm"]


class LoopFunctions:
    """The functions of a program in which such calls are, or that call one of these."""

    def __init__(self, program: Program, calls: list[LoopCall]) -> None:
        self._program = program
        own = {scope for call in calls for scope in self._scopes(call.call)}
        self._names = {name for scope in own if (name := self._name(scope))}
        count = -1
        while len(self._names) > count:
            count = len(self._names)
            self._names |= {
                self._name(function)
                for function in program.of_type(ast.FunctionDef, ast.AsyncFunctionDef)
                if any(isinstance(c, ast.Call) and self.runs(c) for c in ast.walk(function))
            }

    def runs(self, call: ast.Call) -> bool:
        """Return whether a call is of such a function: `f()`, or of such a method: `x.f()`."""
        kind = "method" if isinstance(call.func, ast.Attribute) else "function"
        return (kind, last_name(call)) in self._names

    def _name(self, scope: Scope) -> tuple[str, str]:
        """Return how a function is called."""
        parent = next(self._program.ancestors(scope), (None, ""))[0]
        kind = "method" if isinstance(parent, ast.ClassDef) else "function"
        return kind, getattr(scope, "name", "")

    def _scopes(self, node: ast.AST) -> Iterator[Scope]:
        while not isinstance(node, ast.Module):
            node = self._program.scope(node)
            yield node
