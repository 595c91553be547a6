"""A program as `ast` reads it: parents, scopes, imported names, assignments."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Scope: TypeAlias = Function | ast.Module
LOOPS = (ast.For, ast.AsyncFor, ast.While)
Block: TypeAlias = tuple[ast.AST, str]  # a statement, and the field that lists its statements


@dataclass(frozen=True)
class Assignment:
    """One binding of a name or of an attribute."""

    node: ast.AST
    value: ast.expr | None  # None where it is unpacked, updated, a loop's variable, or deleted
    scope: Scope

    @property
    def position(self) -> tuple[int, int]:
        """Where it stands."""
        return getattr(self.node, "lineno", 0), getattr(self.node, "col_offset", 0)


class Program:
    """One file, parsed."""

    def __init__(self, source: bytes | str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in a string is not ours to report
            self.tree = ast.parse(source)
        self._parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        for node in ast.walk(self.tree):
            for field, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._parents[child] = (node, field)
        self.imports = dict(_imports(self.tree))
        defined = self.of_type(ast.FunctionDef, ast.AsyncFunctionDef)
        self._names = [function.name for function in defined]
        self.functions = {function.name: function for function in defined}
        self.classes = {n.name: n for n in self.of_type(ast.ClassDef)}
        self.assignments: dict[str, list[Assignment]] = defaultdict(list)
        for node in ast.walk(self.tree):
            if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) and dotted(node):
                assignment = Assignment(node, self._assigned_value(node), self.scope(node))
                self.assignments[dotted(node)].append(assignment)
        declared = self.of_type(ast.Global, ast.Nonlocal)
        self.shared_names = {name for node in declared for name in node.names}

    def _assigned_value(self, node: ast.AST) -> ast.expr | None:
        """Return what is assigned to a name, if the assignment shows it."""
        parent, _ = self._parents[node]
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            return parent.value
        if isinstance(parent, ast.Tuple):
            whole, _ = self._parents[parent]
            value = whole.value if isinstance(whole, ast.Assign) else None
            if isinstance(value, ast.Tuple) and len(value.elts) == len(parent.elts):
                return value.elts[parent.elts.index(node)]  # type: ignore[arg-type]
        return None

    def of_type(self, *kinds: type[ast.AST]) -> list[Any]:
        """Return all nodes of these kinds."""
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def ancestors(self, node: ast.AST) -> Iterator[Block]:
        """Yield what a node stands in, with the field, from the inside out."""
        while node in self._parents:
            node, field = self._parents[node]
            yield node, field

    def scope(self, node: ast.AST) -> Scope:
        """Return the function in which a node stands, or the module."""
        for parent, _ in self.ancestors(node):
            if isinstance(parent, (*FUNCTIONS, ast.Module)):
                return parent
        return self.tree

    def names_around(self, node: ast.AST) -> set[str]:
        """Return the names of the functions and classes in which some code is."""
        return {getattr(parent, "name", "") or "" for parent, _ in self.ancestors(node)} - {""}

    def with_callers(self, names: set[str]) -> set[str]:
        """Return names of functions, and those of the functions that call one of them."""
        size, calls = -1, self.of_type(ast.Call)
        while len(names) > size:
            size = len(names)
            for call in calls:
                if last_name(call) in names:
                    names = names | self.names_around(call)
        return names

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class in which a node stands, if it stands in one."""
        parents = (parent for parent, _ in self.ancestors(node))
        return next((parent for parent in parents if isinstance(parent, ast.ClassDef)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement in which a node stands."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node][0]
        return node

    def block(self, statement: ast.stmt) -> tuple[Block, int]:
        """Return the block of a statement, and its index there."""
        parent, field = self._parents[statement]
        return (parent, field), getattr(parent, field).index(statement)

    def loop(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop of its scope in which a node is, if there is one."""
        for parent, field in self.ancestors(node):
            if isinstance(parent, (*FUNCTIONS, ast.Module)):
                return None
            if isinstance(parent, LOOPS) and field == "body":
                return parent
        return None

    def exclusive(self, a: ast.AST, b: ast.AST) -> bool:
        """Return whether two statements are in different branches of one `if`."""
        branches = {p: f for p, f in self.ancestors(a) if isinstance(p, ast.If)}
        shared = [(p, f) for p, f in self.ancestors(b) if p in branches]
        return any(branches[p] != f for p, f in shared)

    def qualified(self, node: ast.expr) -> str:
        """Return the dotted name of an expression, in full where it is imported; else ''."""
        text = dotted(node)
        first, _, rest = text.partition(".")
        full = self.imports.get(first, first)
        return f"{full}.{rest}" if rest else full

    def calls_of(self, function: Scope) -> list[tuple[Scope, dict[str, ast.expr]]]:
        """Return each call of a function, with its arguments by name; none if not sure."""
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            return []
        names: list[ast.Name] = self.of_type(ast.Name)
        used = [name for name in names if name.id == function.name]
        order = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
        calls = []
        for name in used:
            call = self._parents[name][0]
            if not isinstance(call, ast.Call) or call.func is not name:
                return []
            given = dict(zip(order, call.args, strict=False))
            given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
            if "**" in given or any(isinstance(value, ast.Starred) for value in call.args):
                return []
            calls.append((self.scope(call), given))
        is_method = isinstance(self._parents[function][0], ast.ClassDef)
        return [] if is_method or list(self._names).count(function.name) != 1 else calls

    def bindings_seen_from(self, text: str, scope: Scope) -> list[Assignment]:
        """Return the assignments that give a name its value in a scope; none if not sure."""
        root = text.partition(".")[0]
        if root in self.shared_names:
            return []
        if root == "self" and text != root:
            owner = self.class_of(scope)
            return [a for a in self.assignments[text] if self.class_of(a.node) is owner]
        if text != root:
            return []
        while True:
            if root in parameters(scope):
                return []
            own = [a for a in self.assignments[text] if a.scope is scope]
            if own or isinstance(scope, ast.Module):
                return own
            scope = self.scope(scope)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for such a chain, and '' for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def last_name(call: ast.Call) -> str:
    """Return the last part of the name of what is called, or ''."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return dotted(call.func)


def parameters(scope: Scope) -> dict[str, ast.expr | None]:
    """Return the parameters of a function, and their annotations."""
    if isinstance(scope, ast.Module):
        return {}
    args = scope.args
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {arg.arg: arg.annotation for arg in listed if arg is not None}


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each imported name, and what it is in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module or ''}.{alias.name}"
