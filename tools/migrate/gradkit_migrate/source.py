"""One file: its tree, what libcst knows about it, and the questions that are asked of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import libcst as cst
from libcst.metadata import (
    BaseAssignment,
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameSource,
    ScopeProvider,
)

Node: TypeAlias = cst.CSTNode
Function: TypeAlias = cst.FunctionDef | cst.Lambda | cst.Module  # the module is the outermost
Statement: TypeAlias = cst.BaseSmallStatement | cst.BaseCompoundStatement
Called: TypeAlias = tuple[bool, str]  # whether it is a method, and the name
Position: TypeAlias = tuple[int, int]  # line from 1, column from 0
FUNCTIONS = (cst.FunctionDef, cst.Lambda, cst.Module)
BLOCKS = (cst.Module, cst.IndentedBlock, cst.SimpleStatementSuite)
LOOPS = (cst.For, cst.While)
# Of Python's own: these read what they are given, and run nothing but its own methods.
BUILTINS = {
    "print", "len", "float", "int", "str", "bool", "round", "abs", "min", "max", "sum", "range",
    "enumerate", "zip", "isinstance", "format", "repr", "list", "tuple", "dict", "set", "id",
    "type", "any", "all", "iter", "hasattr",
}  # fmt: skip
N = TypeVar("N", bound=cst.CSTNode)


@dataclass(frozen=True)
class Binding:
    """One place that gives a name or an attribute its value."""

    node: Node
    value: cst.BaseExpression | None  # None where it is unpacked, updated, a loop's, or deleted
    function: Function


class Source:
    """One file, parsed."""

    def __init__(self, source: bytes) -> None:
        try:
            wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        except cst.ParserSyntaxError as error:
            raise ValueError(f"libcst cannot parse it: {error.message}") from None
        self.module = wrapper.module
        self.parents = wrapper.resolve(ParentNodeProvider)
        self._scopes = wrapper.resolve(ScopeProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self._contexts = wrapper.resolve(ExpressionContextProvider)
        self._children: dict[Node, list[Node]] = defaultdict(list)
        for child, parent in self.parents.items():
            self._children[parent].append(child)
        self.calls = list(self.walk(self.module, cst.Call))
        self.classes = {one.name.value: one for one in self.walk(self.module, cst.ClassDef)}
        self.functions: dict[str, list[cst.FunctionDef]] = defaultdict(list)
        for function in self.walk(self.module, cst.FunctionDef):
            self.functions[function.name.value].append(function)
        self.bindings: dict[str, list[Binding]] = defaultdict(list)
        for node in self.nodes(self.module):
            if self._is_bound(node) and (text := dotted(node)):
                binding = Binding(node, self._bound_value(node), self.function(node))
                self.bindings[text].append(binding)

    def nodes(self, node: Node) -> Iterator[Node]:
        """Yield all nodes of some code, in their order."""
        pending = [node]
        while pending:
            one = pending.pop()
            yield one
            pending += reversed(self._children.get(one, ()))

    def walk(self, node: Node, kind: type[N]) -> Iterator[N]:
        """Yield the nodes of a kind in some code."""
        return (one for one in self.nodes(node) if isinstance(one, kind))

    def at(self, node: Node) -> Position:
        """Return where some code begins."""
        start = self._positions[node].start
        return start.line, start.column

    def line(self, node: Node) -> int:
        """Return the line where some code begins."""
        return self.at(node)[0]

    def text(self, node: Node) -> str:
        """Return some code as it is written."""
        return self.module.code_for_node(node)

    def shown(self, node: Node) -> str:
        """Return the first line of some code, shortened."""
        if isinstance(node, cst.BaseCompoundStatement):
            changes: dict[str, Any] = {"body": cst.IndentedBlock([]), "leading_lines": []}
            node = node.with_changes(**changes)
        text = self.text(node).strip("; \n").partition("\n")[0]
        return text if len(text) <= 60 else f"{text[:57]}..."

    def shown_at(self, node: Node) -> str:
        """Return where some code stands, and its statement."""
        line = f"line {self.line(node)}"
        is_statement = isinstance(node, cst.Module)
        return line if is_statement else f"{line}: `{self.shown(self.statement(node))}`"

    def ancestors(self, node: Node) -> Iterator[Node]:
        """Yield what a node stands in, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: Node) -> Function:
        """Return the function in which a node stands, or the module."""
        around = (one for one in self.ancestors(node) if isinstance(one, FUNCTIONS))
        return next(around, self.module)

    def class_of(self, node: Node) -> cst.ClassDef | None:
        """Return the class in which a node stands, if it stands in one."""
        around = (one for one in self.ancestors(node) if isinstance(one, cst.ClassDef))
        return next(around, None)

    def loops(self, node: Node) -> list[Node]:
        """Return the loops of its own function in which a node is, from the inside out."""
        loops: list[Node] = []
        for one in self.ancestors(node):
            if isinstance(one, FUNCTIONS):
                break
            loops += [one] if isinstance(one, LOOPS) else []
        return loops

    def statement(self, node: Node) -> Any:
        """Return the innermost statement in which a node stands."""
        while not isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
            node = self.parents[node]
        return node

    def block(self, statement: Node) -> Node:
        """Return the block in which a statement stands."""
        return next(one for one in self.ancestors(statement) if isinstance(one, BLOCKS))

    def statements(self, block: Any) -> list[Statement]:
        """Return the statements of a block."""
        lines = [
            one.body if isinstance(one, cst.SimpleStatementLine) else [one] for one in block.body
        ]
        return [statement for line in lines for statement in line]

    def precedes(self, first: Node, second: Node, *, stop: tuple[type, ...] = FUNCTIONS) -> bool:
        """Return whether a statement runs before another one, each time that that one runs."""
        block = self.block(first)
        for one in self.ancestors(second):
            if one is block:
                return self.at(first) < self.at(second)
            if isinstance(one, stop):
                break
        return False

    def are_exclusive(self, a: Node, b: Node) -> bool:
        """Return whether two nodes are in different branches of one `if`."""
        of_a, of_b = ({one, *self.ancestors(one)} for one in (a, b))
        ifs = (one for one in of_a & of_b if isinstance(one, cst.If) and one.orelse is not None)
        return any(
            (one.body in of_a and one.orelse in of_b) or (one.body in of_b and one.orelse in of_a)
            for one in ifs
        )

    def assigned(self, name: str, function: Function) -> list[BaseAssignment]:
        """Return what gives a name of a function its value: none if the name is of another one."""
        scope = self._scopes[function if isinstance(function, cst.Module) else function.body]
        assigned = list(scope[name]) if scope and name.isidentifier() else []
        return assigned if all(one.scope is scope for one in assigned) else []

    def is_stored(self, node: Node) -> bool:
        """Return whether a name, an attribute or an item is written or deleted."""
        return self._contexts.get(node) in {ExpressionContext.STORE, ExpressionContext.DEL}

    def is_read(self, node: Node) -> bool:
        """Return whether a name, an attribute or an item is a value that is read."""
        is_import = isinstance(self.statement(node), cst.Import | cst.ImportFrom)
        return self._contexts.get(node) is ExpressionContext.LOAD and not is_import

    def full_names(self, node: Node) -> set[str]:
        """Return what an imported or built-in name is in full: none for a name of this file."""
        scope = self._scopes.get(node)
        if scope is None or not dotted(node):
            return set()
        names = scope.get_qualified_names_for(node)
        return {name.name for name in names if name.source is not QualifiedNameSource.LOCAL}

    def is_from(self, node: Node, *prefixes: str) -> bool:
        """Return whether a name is imported, and begins so in full."""
        names = self.full_names(node)
        return bool(names) and all(name.startswith(prefixes) for name in names)

    def is_builtin(self, node: Node, names: Collection[str] = BUILTINS) -> bool:
        """Return whether a name is one of these built-in names."""
        return self.full_names(node) == {f"builtins.{dotted(node)}"} and dotted(node) in names

    def callers(self, nodes: Iterable[Node]) -> set[Called]:
        """Return how the functions are called in which some code is, and those that call them."""
        names: set[Called] = set()
        new = {name for node in nodes for name in self._names_around(node)}
        while new:
            names |= new
            running = (call for call in self.calls if called(call) in new)
            new = {name for call in running for name in self._names_around(call)} - names
        return names

    def _names_around(self, node: Node) -> Iterator[Called]:
        for function in (one for one in self.ancestors(node) if isinstance(one, cst.FunctionDef)):
            name, (_, owner, *_) = function.name.value, [*self.ancestors(function), None]
            is_method = isinstance(owner, cst.ClassDef)
            if isinstance(owner, cst.ClassDef) and name == "__init__":
                is_method, name = False, owner.name.value
            yield is_method, name

    def _is_bound(self, node: Node) -> bool:
        defines = (cst.FunctionDef, cst.ClassDef, cst.Param, cst.AsName, cst.ImportAlias)
        return self.is_stored(node) and not isinstance(self.parents[node], defines)

    def _bound_value(self, node: Node) -> cst.BaseExpression | None:
        """Return what is assigned to a name, if the assignment shows it."""
        parent, outer, *_ = self.ancestors(node)
        if isinstance(parent, cst.AnnAssign | cst.NamedExpr):
            return parent.value
        if isinstance(parent, cst.AssignTarget) and isinstance(outer, cst.Assign):
            return outer.value
        if isinstance(parent, cst.Element) and isinstance(outer, cst.Tuple):
            whole = self.parents[self.parents[outer]]
            value = whole.value if isinstance(whole, cst.Assign) else None
            if isinstance(value, cst.Tuple) and len(value.elements) == len(outer.elements):
                return value.elements[outer.elements.index(parent)].value
        return None


def dotted(node: Node | None) -> str:
    """Return `a.b.c` for such a chain, and '' for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr.value}"
    return ""


def last_name(call: cst.Call) -> str:
    """Return the last part of the name of what is called, or ''."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else dotted(call.func)


def called(call: cst.Call) -> Called:
    """Return how a call names what it runs: whether by an attribute, and the last name."""
    return isinstance(call.func, cst.Attribute), last_name(call)


def arguments(call: cst.Call, *order: str) -> dict[str, cst.BaseExpression]:
    """Return the arguments of a call by name; '*' is one that has none."""
    given: dict[str, cst.BaseExpression] = {}
    for index, arg in enumerate(call.args):
        by_order = order[index] if index < len(order) and not arg.star else "*"
        given[arg.keyword.value if arg.keyword else by_order] = arg.value
    return given


def parameters(function: Function) -> dict[str, cst.BaseExpression | None]:
    """Return the parameters of a function, and their annotations."""
    if isinstance(function, cst.Module):
        return {}
    every = function.params
    listed = [*every.posonly_params, *every.params, *every.kwonly_params]
    listed += [one for one in (every.star_arg, every.star_kwarg) if isinstance(one, cst.Param)]
    return {p.name.value: p.annotation.annotation if p.annotation else None for p in listed}


def constant(node: Node | None) -> object:
    """Return the value of a number, a string, True, False or None; else the node."""
    if isinstance(node, cst.Integer | cst.Float | cst.SimpleString):
        return node.evaluated_value
    if isinstance(node, cst.Name) and node.value in {"True", "False", "None"}:
        return {"True": True, "False": False, "None": None}[node.value]
    return node
