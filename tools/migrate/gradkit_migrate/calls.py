"""The calls that a loop consists of: zero_grad, backward, unscale_, clip_grad_norm_, step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from gradkit_migrate.source import (
    Function,
    Node,
    Position,
    Source,
    arguments,
    constant,
    dotted,
    last_name,
    parameters,
)

CLIP = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"}
OPTIMIZER_NAME = re.compile(r"opt(im|imizers?|s)?(_|\d|$)|optimi[sz]er|solver", re.IGNORECASE)
SCHEDULER_NAME = re.compile(r"sched|warm_?up", re.IGNORECASE)
# What reads `.grad` elsewhere, or takes a closure, is not stepped by `step_`.
NOT_STEPPED = ("torch.optim.LBFGS", "torch.optim.lr_scheduler.", "torch.optim.swa_utils.")


class Optimizers:
    """Which names of a file are those of optimizers of torch's."""

    def __init__(self, source: Source) -> None:
        self._source = source
        called = [(last_name(c), dotted(c.func).rpartition(".")[0]) for c in source.calls]
        self.modules = {
            text for name, text in called if name.endswith("parameters") or name == "eval"
        } - {""}
        self._cleared = {text for name, text in called if name == "zero_grad"} - {""} - self.modules

    def is_optimizer(self, text: str) -> bool:
        """Return whether a name is that of an optimizer."""
        last = text.rpartition(".")[2]
        if not text or text in self.modules or SCHEDULER_NAME.search(last):
            return False
        values = [one.value for one in self._source.bindings.get(text, ())]
        other = any(OPTIMIZER_NAME.search(dotted(v).rpartition(".")[2]) for v in values)
        return (
            other
            or any(map(self.is_made, values))
            or text in self._cleared
            or bool(OPTIMIZER_NAME.search(last))
        )

    def may_be_optimizer(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression may stand for an optimizer that has another name."""
        text, source = dotted(node), self._source
        if not text:  # opts["a"], of a list or dict
            return not SCHEDULER_NAME.search(source.text(node))
        bound = [
            one for one in source.bindings.get(text, ()) if not isinstance(one.value, cst.Call)
        ]
        shown = [source.shown(source.statement(one.node)) for one in bound]
        return not self.is_scheduler(text) and not all(map(SCHEDULER_NAME.search, shown))

    def is_scheduler(self, text: str) -> bool:
        """Return whether a name is that of a scheduler of the learning rate."""
        values = [one.value for one in self._source.bindings.get(text, ())]
        made = [self._source.full_names(v.func) for v in values if isinstance(v, cst.Call)]
        named = SCHEDULER_NAME.search(text.rpartition(".")[2])
        return bool(named) or any("lr_scheduler." in name for names in made for name in names)

    def is_made(self, value: Node | None) -> bool:
        """Return whether a value is a new optimizer of torch's, also one that a function makes."""
        if not isinstance(value, cst.Call):
            return False
        if self.is_made_by_torch(value):
            return True
        functions = self._source.functions.get(last_name(value), [])
        returns = [one for f in functions for one in self._source.walk(f, cst.Return)]
        return bool(returns) and all(self.is_made_by_torch(one.value) for one in returns)

    def is_made_by_torch(self, value: Node | None) -> bool:
        """Return whether a value is a call of a class of torch.optim."""
        if not isinstance(value, cst.Call):
            return False
        is_other = self._source.is_from(value.func, *NOT_STEPPED)
        return self._source.is_from(value.func, "torch.optim.") and not is_other

    def doubt(self, text: str, function: Function) -> str:
        """Return what speaks against a name being an optimizer of torch's, or ''."""
        annotation = parameters(function).get(text)
        if annotation is not None and not self._source.is_from(annotation, "torch.optim."):
            written = self._source.text(annotation)
            if "Optimizer" not in written:
                return f"{text} is annotated {written}"
        for one in self._source.bindings.get(text, ()):
            name = dotted(one.value)
            is_argument = name in parameters(one.function) and OPTIMIZER_NAME.search(name)
            if not (
                self.is_made(one.value) or constant(one.value or one.node) is None or is_argument
            ):
                what = self._source.shown(one.value) if one.value else "unpacked or changed"
                return f"{text} is {what} (line {self._source.line(one.node)})"
        return ""


@dataclass(frozen=True)
class LoopCall:
    """One such call."""

    kind: str  # "zero", "backward", "unscale", "clip", "step" or "closure"
    call: cst.Call
    statement: Node
    function: Function
    line: int
    at: Position  # where the statement begins
    receiver: str = ""  # the text of what is called, '' if it is no dotted name
    argument: str = ""  # the optimizer given to a scaler

    @property
    def is_statement(self) -> bool:
        """Whether the call is a statement by itself, whose value is not used."""
        return isinstance(self.statement, cst.Expr) and self.statement.value is self.call

    @property
    def optimizer(self) -> str:
        """The optimizer that a step is of."""
        return self.argument or self.receiver

    @property
    def scaler(self) -> str:
        """The scaler that steps, or ''."""
        return self.receiver if self.argument else ""


def loop_calls(source: Source, optimizers: Optimizers) -> list[LoopCall]:
    """Return the calls of a file in the order in which they stand."""
    calls = []
    for call in source.calls:
        function, statement = source.function(call), source.statement(call)
        if isinstance(function, cst.FunctionDef) and function.name.value == "backward":
            continue  # of a custom Function
        for kind, receiver, argument in _kinds(source, optimizers, call):
            at = source.at(statement)
            calls.append(
                LoopCall(kind, call, statement, function, source.line(call), at, receiver, argument)
            )
    return sorted(calls, key=lambda one: source.at(one.call))


def _kinds(
    source: Source, optimizers: Optimizers, call: cst.Call
) -> Iterator[tuple[str, str, str]]:
    """Yield the kind of a call with its receiver and the optimizer it is given, if it is one."""
    name, full = last_name(call), source.full_names(call.func)
    given = [dotted(arg.value) for arg in call.args]
    receiver = dotted(call.func.value) if isinstance(call.func, cst.Attribute) else ""
    if full & CLIP:
        yield "clip", receiver, ""
    elif not isinstance(call.func, cst.Attribute) or source.is_from(call.func, "gradkit."):
        return
    elif name in {"backward", "manual_backward"}:
        yield "backward", receiver, ""
    elif name == "zero_grad":
        yield "zero", receiver, ""
    elif name == "clip_grad_norm_":  # a method, of FSDP or of a trainer
        yield "clip", "", ""
    elif name == "unscale_":
        yield "unscale", receiver, given[0] if given else ""
    elif name == "step" and optimizers.is_optimizer(receiver):
        yield ("closure" if call.args else "step"), receiver, ""
    elif name == "step" and len(given) == 1 and optimizers.is_optimizer(given[0]):
        yield "step", receiver, given[0]
    elif name == "step" and not given and optimizers.may_be_optimizer(call.func.value):
        yield "step", receiver, ""


def clip_values(call: cst.Call) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return what is clipped, and to which norm; None if there are other options."""
    given = arguments(call, "parameters", "max_norm", "norm_type")
    is_two_norm = constant(given.pop("norm_type", cst.Integer("2"))) == 2
    if set(given) != {"parameters", "max_norm"} or not is_two_norm:
        return None
    return given["parameters"], given["max_norm"]
