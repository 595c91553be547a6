"""The names and attributes that hold a value, and the functions that are given it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gradkit._migrate.program import Program, Scope, dotted, last_name, parameters

Position = tuple[int, int]
DECORATORS = {
    "torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.set_grad_enabled",
    "functools.wraps", "abc.abstractmethod",
}  # fmt: skip


@dataclass(frozen=True)
class Holder:
    """A name of one scope, or an attribute, that may hold the value which is followed."""

    text: str
    where: Scope | ast.ClassDef | None  # the scope of a name, the class of an attribute of self
    is_attribute: bool = False
    since: ast.stmt | None = None  # uses before it in its scope are over when it runs
    until: ast.stmt | None = None  # uses after it in its scope are too late to matter
    is_over: bool = False  # all its uses are over by then: of a function that is called before
    only_elsewhere: bool = False  # the scope of `since` waits while the loop runs
    is_own: bool = False  # it is what the loop names: it may not become another value
    is_opaque: bool = False  # a function of another file gave it: nobody knows what it runs
    is_source: bool = False  # what it was made from holds the value, or a part of it, too


class UnsafeUse(Exception):  # noqa: N818 (never seen outside)
    """Raised at a use that is not known to be harmless."""

    def __init__(self, node: ast.AST) -> None:
        super().__init__()
        self.node = node


class Holders:
    """Finds them in one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._names: dict[str, list[ast.Name]] = defaultdict(list)
        self._attributes: dict[str, list[ast.Attribute]] = defaultdict(list)
        for node in ast.walk(program.tree):
            if isinstance(node, ast.Name):
                self._names[node.id].append(node)
            elif isinstance(node, ast.Attribute):
                self._attributes[node.attr].append(node)
        self._calls: list[ast.Call] = program.of_type(ast.Call)
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = defaultdict(list)
        for function in program.of_type(ast.FunctionDef, ast.AsyncFunctionDef):
            self._functions[function.name].append(function)

    def nodes(self, holder: Holder) -> list[Any]:
        """Return each place where a holder is named."""
        if not holder.is_attribute:
            names = self._names[holder.text]
            return [node for node in names if self.scope(node.id, node) is holder.where]
        return [n for n in self._attributes[holder.text] if self._may_be(n, holder.where)]

    def _may_be(self, node: ast.Attribute, where: Any) -> bool:
        """Return whether an attribute may be that of this class: of `self`, or of any object."""
        own = self._program.class_of(node)
        if dotted(node.value) != "self" or where is None or own is None:
            return True
        return own in self.family(where)

    def scope(self, name: str, node: ast.AST) -> Scope:
        """Return the scope whose name a name is."""
        return self.scope_from(name, self._program.scope(node))

    def scope_from(self, name: str, scope: Scope) -> Scope:
        """Return the scope whose name a name is that a scope uses."""
        if name in self._program.shared_names:
            return self._program.tree
        while not isinstance(scope, ast.Module) and name not in parameters(scope):
            if any(a.scope is scope for a in self._program.assignments.get(name, ())):
                break
            scope = self._program.scope(scope)
        return scope

    def of(self, node: ast.AST, **options: Any) -> Holder | None:
        """Return what holds a value that is assigned to an expression, or read from it."""
        if isinstance(node, ast.Name):
            return Holder(node.id, self.scope(node.id, node), **options)
        if isinstance(node, ast.Attribute):
            of_self = dotted(node.value) == "self"
            where = self._program.class_of(node) if of_self else None
            return Holder(node.attr, where, is_attribute=True, **options)
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.of(node.value, **options)
        return None

    def family(self, one: ast.ClassDef) -> set[ast.ClassDef]:
        """Return the classes of this file that inherit from a class, or the other way round."""
        family, size = {one}, 0
        while len(family) > size:
            size = len(family)
            names = {c.name for c in family} | {self._last(b) for c in family for b in c.bases}
            bases = {c.name for c in family}
            family |= {
                c for c in self._program.classes.values()
                if c.name in names or any(self._last(b) in bases for b in c.bases)
            }  # fmt: skip
        return family

    def _last(self, base: ast.expr) -> str:
        return dotted(base).rpartition(".")[2]

    def called(self, call: ast.Call) -> list[tuple[Any, int]]:
        """Return the functions of this file that a call may run, and how many arguments go ahead.

        That is one, `self`, for a method. For a class it is its `__init__`.
        """
        name = last_name(call)
        if name in self._program.assignments or name in self._program.imports:
            return []
        if any(self._is_wrapped(function) for function in self._functions[name]):
            return []
        if name in self._program.classes:
            family = self.family(self._program.classes[name])
            return [(f, 1) for f in self._functions["__init__"] if self.class_with(f) in family]
        if isinstance(call.func, ast.Attribute):
            return [(f, 1) for f in self._functions[name] if self.class_with(f) is not None]
        return [(f, 0) for f in self._functions[name] if self.class_with(f) is None]

    def _is_wrapped(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        """Return whether a decorator may run something else, too."""
        calls = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
        return any(self._program.qualified(node) not in DECORATORS for node in calls)

    def class_with(self, function: ast.AST) -> Any:
        """Return the class that a function is a method of, or None."""
        parent = next(self._program.ancestors(function), (None, ""))[0]
        return parent if isinstance(parent, ast.ClassDef) else None

    def callers(self, function: Any) -> Iterator[tuple[ast.Call, int]]:
        """Yield each call in this file that may run a function, with the arguments ahead."""
        for call in self._calls:
            for one, ahead in self.called(call):
                if one is function:
                    yield call, ahead
            if last_name(call) == function.name == "__init__":  # of super()
                yield call, int("super" in ast.dump(call.func))

    def given(self, call: ast.Call, function: Any, ahead: int) -> dict[str, ast.expr] | None:
        """Return the arguments of a call by name; None if they are not all seen."""
        if any(isinstance(a, ast.Starred) for a in call.args):
            return None
        if any(k.arg is None for k in call.keywords):
            return None
        order = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)][ahead:]
        given = dict(zip(order, call.args, strict=False))
        given |= {k.arg: k.value for k in call.keywords if k.arg is not None}
        seen = len(given) == len(call.args) + len(call.keywords)
        return given if seen and given.keys() <= parameters(function).keys() else None

    def methods(self, name: str) -> list[Any]:
        """Return the methods of this name of all classes of the file."""
        return [f for f in self._functions[name] if self.class_with(f) is not None]


def position(node: ast.AST) -> Position:
    """Return where a node begins."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end(node: ast.stmt) -> Position:
    """Return where a statement ends."""
    return node.end_lineno or 0, node.end_col_offset or 0


def bound_by(node: ast.AST) -> list[ast.expr]:
    """Return what an assignment or a loop assigns to."""
    fields = dict(ast.iter_fields(node))
    return [*fields.get("targets", []), *filter(None, [fields.get("target")])]
