"""How the optimizers of a program were made, and which parameters they have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gradkit._migrate.groups import GroupsCheck
from gradkit._migrate.holders import Holder, Holders, position
from gradkit._migrate.lists import ListCheck
from gradkit._migrate.parts import PartsCheck
from gradkit._migrate.program import Assignment, Program, Scope, dotted, last_name, parameters

# What reads `.grad` elsewhere, or takes a closure, is not stepped by `step_`.
NOT_STEPPED = ("torch.optim.LBFGS", "torch.optim.lr_scheduler.", "torch.optim.swa_utils.")


@dataclass(frozen=True)
class OptimizerOrigin:
    """Which parameters one optimizer was made with."""

    owner: str  # the module whose parameters they are, as the loop names it; or ""
    doubt: ast.AST | None = None  # without an owner: what makes it unsure
    made: Assignment | None = None  # None if it is an argument: all calls in this file, others not
    given: ast.expr | None = None  # what it was made with


class Origins:
    """Finds them in one program."""

    def __init__(self, program: Program, holders: Holders) -> None:
        self._program = program
        self._holders = holders
        self._parts = PartsCheck(program, holders)
        self._groups = GroupsCheck(program, holders)
        self._lists = ListCheck(program, holders)
        self._changes: dict[tuple[str, Scope], list[ast.AST]] = {}

    def origin(
        self, text: str, scope: Scope, inside: frozenset[Scope] = frozenset()
    ) -> OptimizerOrigin | None:
        """Return how the optimizer that a scope calls by this name was made, if that is sure."""
        # `inside` are functions whose callers are being asked: one that calls itself is not sure.
        if text in parameters(scope):
            return self._origin_from_callers(text, scope, inside | {scope})
        if self._doubt(text, scope) is not None:
            return None
        (made,) = self._program.bindings_seen_from(text, scope)
        given = _params_of(made.value)
        if given is None:
            return None
        owner, doubt = self._owner(given, made, scope)
        return OptimizerOrigin(owner, doubt, made, given)

    def changes(self, text: str, scope: Scope) -> list[ast.AST]:
        """Return each place where an optimizer of a scope may get other parameters."""
        if (text, scope) not in self._changes:
            self._changes[text, scope] = self._groups.changes(text, scope)
        return self._changes[text, scope]

    def made(self) -> list[ast.AST]:
        """Return each place where an optimizer is made."""
        return [c for c in self._program.of_type(ast.Call) if self._is_made_by_torch(c)]

    def clipping_doubt(self, clipped: ast.expr, text: str, scope: Scope) -> ast.AST | None:
        """Return what makes it unsure that a list is what an optimizer has; None if it is sure."""
        origin = self.origin(text, scope)
        if origin is None:
            return self._doubt(text, scope) or scope
        if origin.made is None or origin.given is None:
            return scope
        if isinstance(clipped, ast.Name) and dotted(origin.given) == clipped.id:
            return self._lists.doubt(clipped, origin.made, scope)
        return origin.doubt or origin.made.node

    def is_made_here(self, text: str, scope: Scope) -> bool:
        """Return whether this file shows how the optimizer of this name in a scope was made."""
        return self._is_shown(text, scope, frozenset())

    def is_made(self, value: ast.expr | None) -> bool:
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

    def _is_shown(self, text: str, scope: Scope, seen: frozenset[tuple[str, Scope]]) -> bool:
        if (text, scope) in seen:
            return True  # a function that calls itself
        values = [pair for pair in self._values(text, scope) if not _is_none(pair[0])]
        seen = seen | {(text, scope)}
        return bool(values) and all(
            self._is_shown(name, around, seen) if (name := _name(value)) else self.is_made(value)
            for value, around in values
        )

    def _values(self, text: str, scope: Scope) -> Iterator[tuple[ast.expr | None, Scope]]:
        """Yield what is given to a name, and in which scope; None if that is not seen."""
        if "." not in text:
            where = self._holders.scope_from(text, scope)
            if text in parameters(where):
                yield from self._arguments(text, where)
        for assignment in self._program.assignments.get(text, ()):
            if "." in text:
                own = (self._program.class_of(node) for node in (scope, assignment.node))
                is_same = self._are_related(*own)
            else:
                is_same = self._holders.scope_from(text, assignment.scope) is where
            if is_same:
                yield assignment.value, assignment.scope

    def _arguments(self, text: str, function: Scope) -> Iterator[tuple[ast.expr | None, Scope]]:
        callers = self._holders.callers(function)
        calls = [pair for pair in callers if self._program.scope(pair[0]) is not function]
        if not calls:
            yield None, function
        for call, ahead in calls:
            given = self._holders.given(call, function, ahead) or {}
            yield given.get(text), self._program.scope(call)

    def _are_related(self, a: ast.ClassDef | None, b: ast.ClassDef | None) -> bool:
        return a is None or b is None or b in self._holders.family(a)

    def _doubt(self, text: str, scope: Scope) -> ast.AST | None:
        """Return what makes it unsure how an optimizer was made; None if it is sure."""
        seen = self._program.bindings_seen_from(text, scope)
        if len(seen) != 1 or not self._is_made_by_torch(seen[0].value):
            return next((a.node for a in reversed(seen)), scope)
        others = [*self.changes(text, scope), *self._bound_elsewhere(text, seen[0])]
        return min(others, key=position, default=None)

    def _bound_elsewhere(self, text: str, made: Assignment) -> list[ast.AST]:
        """Return where else an attribute is set: by a subclass, or from outside."""
        if "." not in text:
            return []
        where = self._program.class_of(made.node)
        one = Holder(text.rpartition(".")[2], where, is_attribute=True)
        nodes = self._holders.nodes(one)
        return [n for n in nodes if not isinstance(n.ctx, ast.Load) and n is not made.node]

    def _origin_from_callers(
        self, text: str, scope: Scope, inside: frozenset[Scope]
    ) -> OptimizerOrigin | None:
        """Return how an argument was made, if each call in this file gives its owner, too."""
        owners: set[str] | None = None
        for caller, given in self._program.calls_of(scope):
            passed = dotted(given.get(text, ast.Pass()))
            is_seen = passed and "." not in passed and caller not in inside
            origin = self.origin(passed, caller, inside) if is_seen else None
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
        return OptimizerOrigin(owner)

    def _owner(self, given: ast.expr, made: Assignment, scope: Scope) -> tuple[str, ast.AST | None]:
        """Return the module `m` of `m.parameters()`, if the scope has it by a name, unchanged."""
        if not isinstance(given, ast.Call) or given.args or given.keywords:
            return "", made.node
        if not (isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"):
            return "", made.node
        owner = dotted(given.func.value)
        own = [a for a in self._program.assignments.get(owner, []) if a.scope is made.scope]
        later = [a.node for a in own if a.position > made.position]
        if later:
            return "", later[0]  # it is another one afterwards
        last = max((a.position for a in own), default=(0, 0))
        doubts: list[ast.AST] = []
        for name in (owner, *self._aliases(owner, made, last)):
            if not name or not self._is_same(name, made, scope):
                continue
            changes = self._parts.changes({owner, name}, made, scope)
            if not changes:
                return name, None
            doubts += changes
        return "", min(doubts, key=position, default=made.node)

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


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _name(value: ast.expr | None) -> str:
    return "" if value is None else dotted(value)


def _params_of(value: ast.expr | None) -> ast.expr | None:
    """Return what an optimizer is made with."""
    assert isinstance(value, ast.Call)
    named = [keyword.value for keyword in value.keywords if keyword.arg == "params"]
    return next(iter([*named, *value.args[:1]]), None)
