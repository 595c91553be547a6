"""How the optimizers of a program were made, and which parameters they have."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from gradkit._migrate.groups import GroupsCheck
from gradkit._migrate.holders import Holder, Holders
from gradkit._migrate.parts import PartsCheck
from gradkit._migrate.program import Assignment, Program, Scope, dotted, last_name, parameters

OPTIMIZER_NAME = re.compile(r"opt(im|imizers?|s)?(_|\d|$)|optimi[sz]er|solver", re.IGNORECASE)
SCHEDULER_NAME = re.compile(r"sched|warm_?up", re.IGNORECASE)
# What reads `.grad` elsewhere, or takes a closure, is not stepped by `step_`.
NOT_STEPPED = ("torch.optim.LBFGS", "torch.optim.lr_scheduler.", "torch.optim.swa_utils.")


@dataclass(frozen=True)
class OptimizerOrigin:
    """Which parameters one optimizer was made with."""

    arguments: str  # the text of its parameters
    owner: str  # the module whose parameters they are, as the loop names it; or ""
    by_callers: bool = False  # it is an argument: so do all calls in this file, others may not


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
        self._holders = Holders(program)
        self._parts = PartsCheck(program, self._holders)
        self._groups = GroupsCheck(program, self._holders)
        self._changes: dict[tuple[str, Scope], list[ast.AST]] = {}

    def is_optimizer(self, text: str) -> bool:
        """Return whether a name is that of an optimizer."""
        last = text.rpartition(".")[2]
        if not text or text in self.modules or SCHEDULER_NAME.search(last):
            return False
        made = any(self._is_made(a.value) for a in self._program.assignments.get(text, ()))
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
            if value is None or not (self._is_made(value) or self._is_passed_on(assignment)):
                what = "unpacked or changed" if value is None else ast.unparse(value)
                return f"{text} is {what[:60]} (line {assignment.position[0]})"
        return ""

    def origin(self, text: str, scope: Scope) -> OptimizerOrigin | None:
        """Return how the optimizer that a scope calls by this name was made, if that is sure."""
        if text in parameters(scope):
            return self._origin_from_callers(text, scope)
        seen = self._program.bindings_seen_from(text, scope)
        if len(seen) != 1 or not self._is_made_by_torch(seen[0].value):
            return None
        if self.changes(text, scope) or not self._is_only(text, seen[0]):
            return None
        call = seen[0].value
        assert isinstance(call, ast.Call)
        given = [k.value for k in call.keywords if k.arg == "params"] or call.args[:1]
        if not given:
            return None
        return OptimizerOrigin(ast.unparse(given[0]), self._owner(given[0], seen[0], scope))

    def changes(self, text: str, scope: Scope) -> list[ast.AST]:
        """Return each place where an optimizer of a scope may get other parameters."""
        if (text, scope) not in self._changes:
            self._changes[text, scope] = self._groups.changes(text, scope)
        return self._changes[text, scope]

    def made(self) -> list[ast.AST]:
        """Return each place where an optimizer is made."""
        return [c for c in self._program.of_type(ast.Call) if self._is_made_by_torch(c)]

    def _is_only(self, text: str, made: Assignment) -> bool:
        """Return whether an attribute is set once: not by a subclass, nor from outside."""
        if "." not in text:
            return True
        where = self._program.class_of(made.node)
        one = Holder(text.rpartition(".")[2], where, is_attribute=True)
        nodes = self._holders.nodes(one)
        return [n for n in nodes if not isinstance(n.ctx, ast.Load)] == [made.node]

    def _origin_from_callers(self, text: str, scope: Scope) -> OptimizerOrigin | None:
        """Return how an argument was made, if each call in this file gives its owner, too."""
        owners: set[str] | None = None
        for caller, given in self._program.calls_of(scope):
            passed = dotted(given.get(text, ast.Pass()))
            origin = self.origin(passed, caller) if passed and "." not in passed else None
            if origin is None or not origin.owner:
                return None
            same = {name for name, value in given.items() if dotted(value) == origin.owner}
            owners = same if owners is None else owners & same
        bound = {
            a.scope for name in (text, *(owners or ())) for a in self._program.assignments[name]
        }
        if not owners or len(owners) != 1 or scope in bound:
            return None
        (owner,) = owners
        return OptimizerOrigin(f"{owner}.parameters()", owner, True)

    def _owner(self, given: ast.expr, made: Assignment, scope: Scope) -> str:
        """Return the module `m` of `m.parameters()`, if the scope has it by a name, unchanged."""
        if not isinstance(given, ast.Call) or given.args or given.keywords:
            return ""
        if not (isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"):
            return ""
        owner = dotted(given.func.value)
        own = self._program.assignments.get(owner, [])
        bound = [a.position for a in own if a.scope is made.scope]
        if any(position > made.position for position in bound):
            return ""  # it is another one afterwards
        for name in (owner, *self._aliases(owner, made, max(bound, default=(0, 0)))):
            is_same = bool(name) and self._is_same(name, made, scope)
            if is_same and self._parts.is_same({owner, name}, made, scope):
                return name
        return ""

    def _aliases(self, owner: str, made: Assignment, bound: tuple[int, int]) -> list[str]:
        """Return each `self.x` to which the module is assigned where the optimizer is made."""
        return [
            text
            for text, assigned in self._program.assignments.items()
            if text.startswith("self.") and len(assigned) == 1
            if assigned[0].scope is made.scope and assigned[0].position > bound
            if assigned[0].value is not None and dotted(assigned[0].value) == owner
        ]

    def _is_same(self, name: str, made: Assignment, scope: Scope) -> bool:
        """Return whether a name is, in the loop, what it was where the optimizer was made."""
        if name.startswith("self."):
            seen = self._program.bindings_seen_from(name, scope)
            same_class = self._program.class_of(made.node) is self._program.class_of(scope)
            return bool(seen) and same_class and all(a.scope is made.scope for a in seen)
        while scope is not made.scope:
            rebound = any(a.scope is scope for a in self._program.assignments.get(name, ()))
            if rebound or name in parameters(scope) or isinstance(scope, ast.Module):
                return False
            scope = self._program.scope(scope)
        return "." not in name and name not in self._program.shared_names

    def _is_made(self, value: ast.expr | None) -> bool:
        """Return whether a value is a new optimizer of torch's."""
        if not isinstance(value, ast.Call):
            return False
        function = self._program.functions.get(last_name(value))
        if function is None or self._program.qualified(value.func).startswith("torch.optim."):
            return self._is_made_by_torch(value)
        returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
        return bool(returned) and all(map(self._is_made_by_torch, returned))

    def _is_made_by_torch(self, value: ast.expr | None) -> bool:
        name = self._program.qualified(value.func) if isinstance(value, ast.Call) else ""
        return name.startswith("torch.optim.") and not name.startswith(NOT_STEPPED)

    def _is_passed_on(self, assignment: Assignment) -> bool:
        """Return whether the value is None, or an argument that has the name of an optimizer."""
        value = assignment.value
        if isinstance(value, ast.Constant):
            return value.value is None
        name = dotted(value) if value is not None else ""
        return name in parameters(assignment.scope) and bool(OPTIMIZER_NAME.search(name))
