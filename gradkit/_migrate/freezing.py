"""Parameters that are frozen once their optimizer is made: a phase may reach none of them."""

from __future__ import annotations

import ast

from gradkit._migrate.holders import position
from gradkit._migrate.program import LOOPS, Program, Scope, last_name


class Freezing:
    """Finds where a file freezes parameters after an optimizer was made."""

    def __init__(self, program: Program, made: list[ast.AST]) -> None:
        self._program = program
        self._calls: list[ast.Call] = program.of_type(ast.Call)
        self._makers = self._names_of_makers(made)
        self._made = [*made, *(c for c in self._calls if last_name(c) in self._makers)]

    def first(self) -> ast.AST | None:
        """Return the first place where parameters are frozen, if an optimizer may have them."""
        late = [node for node in self._events() if self._is_late(node, set())]
        return min(late, key=position, default=None)

    def _events(self) -> list[ast.AST]:
        stored: list[ast.Attribute] = self._program.of_type(ast.Attribute)
        events: list[ast.AST] = [
            node for node in stored
            if node.attr == "requires_grad" and not isinstance(node.ctx, ast.Load)
            if not _is_true(getattr(next(self._program.ancestors(node))[0], "value", None))
        ]  # fmt: skip
        for call in self._calls:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if last_name(call) == "requires_grad_":
                events += [call] if given and not _is_true(given[0]) else []
            elif last_name(call) == "setattr" and len(given) == 3:
                text = given[1].value if isinstance(given[1], ast.Constant) else "requires_grad"
                events += [call] if text == "requires_grad" and not _is_true(given[2]) else []
        return events

    def _is_late(self, node: ast.AST, seen: set[Scope]) -> bool:
        """Return whether an optimizer may have been made before some code runs."""
        scope = self._program.scope(node)
        made = [one for one in self._made if self._program.scope(one) is scope]
        if made:
            return any(self._is_before(one, node) for one in made)
        if isinstance(scope, ast.Module) or scope in seen:
            return False
        name = getattr(scope, "name", "")
        owner = next((p for p, _ in self._program.ancestors(scope)), None)
        if name == "__init__" and isinstance(owner, ast.ClassDef):
            return False  # of the module, which its optimizer is made from later
        calls = [c for c in self._calls if last_name(c) == name]
        seen = seen | {scope}
        return not calls or any(self._is_late(call, seen) for call in calls)

    def _is_before(self, made: ast.AST, node: ast.AST) -> bool:
        """Return whether one of two nodes of a scope may run before the other."""
        around = {p for p, _ in self._program.ancestors(made) if isinstance(p, LOOPS)}
        in_loop = any(p in around for p, _ in self._program.ancestors(node))
        return in_loop or position(made) < position(node)

    def _names_of_makers(self, made: list[ast.AST]) -> set[str]:
        """Return the names of the functions that make an optimizer, or call one that does."""
        names: set[str] = set()
        scopes = {self._program.scope(node) for node in made}
        while True:
            more = {getattr(s, "name", "") for s in scopes} - {"", "__init__"} - names
            classes = {self._program.class_of(s) for s in scopes if _is_init(s)}
            more |= {c.name for c in classes if c is not None} - names
            if not more:
                return names
            names |= more
            scopes |= {self._program.scope(c) for c in self._calls if last_name(c) in names}


def _is_init(scope: Scope) -> bool:
    return getattr(scope, "name", "") == "__init__"


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
