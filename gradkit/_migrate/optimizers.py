"""Which names of a program are those of optimizers of torch's."""

from __future__ import annotations

import ast
import re

from gradkit._migrate.holders import Holders
from gradkit._migrate.origins import Origins
from gradkit._migrate.program import Assignment, Program, Scope, dotted, parameters

OPTIMIZER_NAME = re.compile(r"opt(im|imizers?|s)?(_|\d|$)|optimi[sz]er|solver", re.IGNORECASE)
SCHEDULER_NAME = re.compile(r"sched|warm_?up", re.IGNORECASE)


class Optimizers:
    """The optimizers of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        calls: list[ast.Call] = program.of_type(ast.Call)
        methods = [c.func for c in calls if isinstance(c.func, ast.Attribute)]
        self.modules = {
            dotted(m.value) for m in methods if m.attr.endswith("parameters") or m.attr == "eval"
        } - {""}
        cleared = {dotted(m.value) for m in methods if m.attr == "zero_grad"} - {""}
        self._cleared = cleared - self.modules
        self.scalers = {dotted(m.value) for m in methods if m.attr in {"scale", "unscale_"}} - {""}
        self.origins = Origins(program, Holders(program))

    def is_optimizer(self, text: str) -> bool:
        """Return whether a name is that of an optimizer."""
        last = text.rpartition(".")[2]
        if not text or text in self.modules or SCHEDULER_NAME.search(last):
            return False
        made = any(self.origins.is_made(a.value) for a in self._program.assignments.get(text, ()))
        return made or text in self._cleared or bool(OPTIMIZER_NAME.search(last))

    def may_be_optimizer(self, node: ast.expr) -> bool:
        """Return whether an expression may stand for an optimizer that has another name."""
        text = dotted(node)
        if not text:  # opts["a"], of a list or dict
            return not SCHEDULER_NAME.search(ast.unparse(node))
        if self.is_scheduler(text):
            return False
        own = self._program.assignments.get(text, [])
        around = [block for a in own for block in self._program.ancestors(a.node)]
        loops = (ast.For, ast.comprehension)
        of = [at.iter for at, field in around if isinstance(at, loops) and field == "target"]
        values = [a.value for a in own if a.value is not None]
        of += [value for value in values if isinstance(value, ast.Subscript)]
        from_several = any(not SCHEDULER_NAME.search(ast.unparse(one)) for one in of)
        return from_several or any(self.is_optimizer(dotted(value)) for value in values)

    def first_unbound_step(self) -> ast.Attribute | None:
        """Return the first `optimizer.step` that is no call of it."""
        called = {call.func for call in self._program.of_type(ast.Call)}
        nodes: list[ast.Attribute] = self._program.of_type(ast.Attribute)
        others = (n for n in nodes if n.attr == "step" and n not in called)
        return next((n for n in others if self.is_optimizer(dotted(n.value))), None)

    def is_scheduler(self, text: str) -> bool:
        """Return whether a name is that of a scheduler of the learning rate."""
        values = [a.value for a in self._program.assignments.get(text, ())]
        made = [self._program.qualified(v.func) for v in values if isinstance(v, ast.Call)]
        named = SCHEDULER_NAME.search(text.rpartition(".")[2])
        return bool(named) or any("lr_scheduler." in name for name in made)

    def doubt(self, text: str, scope: Scope) -> str:
        """Return what speaks against a name being an optimizer of torch's, or ''."""
        annotation = parameters(scope).get(text)
        if annotation is not None:
            is_torchs = self._program.qualified(annotation).startswith("torch.optim.")
            if not is_torchs and "Optimizer" not in ast.unparse(annotation):
                return f"{text} is annotated {ast.unparse(annotation)}"
        for assignment in self._program.assignments.get(text, ()):
            value = assignment.value
            if value is None or not (self.origins.is_made(value) or self._is_passed_on(assignment)):
                what = "unpacked or changed" if value is None else ast.unparse(value)
                return f"{text} is {what[:60]} (line {assignment.position[0]})"
        return ""

    def _is_passed_on(self, assignment: Assignment) -> bool:
        """Return whether the value is None, or an argument that has the name of an optimizer."""
        value = assignment.value
        if isinstance(value, ast.Constant):
            return value.value is None
        name = dotted(value) if value is not None else ""
        return name in parameters(assignment.scope) and bool(OPTIMIZER_NAME.search(name))
