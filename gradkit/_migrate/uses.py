"""Follows a value through a file, and returns each use of it that is not known to be harmless."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from gradkit._migrate.holders import Holder, Holders, UnsafeUse, bound_by, end, position
from gradkit._migrate.program import LOOPS, Program, dotted, last_name
from gradkit._migrate.sources import HARMLESS, made_from

ITERATED = {"enumerate", "zip", "reversed", "list", "tuple", "iter", "next", "sorted", "dict"}
HARMLESS_FULL = ("gradkit.", "torch.save", "copy.deepcopy", "torch.nn.functional.")
CONTAINERS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.BoolOp, ast.IfExp)
ENDS = (ast.FormattedValue, ast.Compare, ast.UnaryOp, ast.Expr, ast.Assert, ast.If, ast.While)
BINDINGS = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign)
Followed: TypeAlias = tuple[ast.AST | None, list[Holder]]  # the outer value, other holders of it


class Uses:
    """The uses of one kind of value: subclasses say which of them are harmless."""

    def __init__(self, program: Program, holders: Holders) -> None:
        self._program = program
        self._holders = holders
        self._returned: set[ast.AST] = set()

    def attribute(self, node: ast.Attribute, at: ast.AST, holder: Holder, over: bool) -> Followed:
        """Follow the value into one of its attributes, or the call of one."""
        raise NotImplementedError

    def subscript(self, node: ast.Subscript, over: bool) -> Followed:
        """Follow the value into one of its items."""
        raise NotImplementedError

    def called(self, call: ast.Call, over: bool) -> Followed:
        """Follow the value where it is called itself."""
        raise NotImplementedError

    def takes(self, call: ast.Call) -> bool:
        """Return whether a function of another file may have the value as an argument."""
        raise NotImplementedError

    def is_known(self, call: ast.Call) -> bool:
        """Return whether a call gives the value itself, or what runs nothing but the value."""
        plain = isinstance(call.func, ast.Name) and not self._is_defined(call)
        return plain and dotted(call.func) in ITERATED

    def made_from(self, node: ast.AST | None) -> Iterator[ast.Name | ast.Attribute]:
        """Yield the names that hold the value, or a part of it, if an expression gives it."""
        raise NotImplementedError

    def unsafe(self, start: Iterable[Holder]) -> list[ast.AST]:
        """Return the uses that are not known to be harmless, of these holders and others."""
        pending, seen = list(start), set[Holder]()
        unsafe_uses: list[ast.AST] = []
        self._returned = set()
        while pending:
            holder = pending.pop()
            if holder in seen:
                continue
            seen.add(holder)
            try:
                pending += made_from(holder, self.made_from, self._program, self._holders)
            except UnsafeUse as unsafe:
                unsafe_uses.append(unsafe.node)
            for node in self._holders.nodes(holder):
                try:
                    pending += self._of(node, holder)
                except UnsafeUse as unsafe:
                    unsafe_uses.append(unsafe.node)
        return unsafe_uses

    def _of(self, node: ast.Name | ast.Attribute, holder: Holder) -> list[Holder]:
        """Return the further holders to which one use leads."""
        scope_waits = self._in_scope(node, holder)
        if scope_waits and holder.only_elsewhere:
            return []
        if scope_waits and holder.until is not None and position(node) > end(holder.until):
            return []
        over = self._is_over(node, holder)
        if not isinstance(node.ctx, ast.Load):
            parent, _ = next(self._program.ancestors(node))
            if not over and (holder.is_own or isinstance(parent, ast.AugAssign)):
                raise UnsafeUse(node)
            return []
        return list(self._follow(node, holder, over))

    def _in_scope(self, node: ast.AST, holder: Holder) -> bool:
        """Return whether a use runs with the statement from which uses count."""
        since = holder.since
        return since is not None and self._program.scope(node) is self._program.scope(since)

    def _is_over(self, node: ast.AST, holder: Holder) -> bool:
        """Return whether a use has surely run before the statement from which uses count."""
        if holder.is_over or holder.since is None or not self._in_scope(node, holder):
            return holder.is_over
        if position(node) > end(holder.since):
            return False
        around = {p for p, _ in self._program.ancestors(holder.since) if isinstance(p, LOOPS)}
        if not any(p in around for p, _ in self._program.ancestors(node)):
            return True
        block, _ = self._program.block(holder.since)
        bound = self._program.assignments.get(holder.text, [])
        return any(  # in each turn of the loop it is a new one
            a.position <= position(node) and isinstance(a.value, ast.Call)
            and self._program.block(self._program.statement(a.node))[0] == block
            for a in bound
        )  # fmt: skip

    def _follow(self, node: ast.AST, holder: Holder, over: bool) -> Iterator[Holder]:
        """Yield the further holders of a value that stands somewhere."""
        at: ast.AST | None = node
        while at is not None:
            parent, field = next(self._program.ancestors(at))
            if isinstance(parent, ast.keyword):
                at, (parent, _) = parent, next(self._program.ancestors(parent))
            outer, others = self._step(at, parent, field, holder, over)
            yield from others
            at = outer

    def _step(
        self, at: ast.AST, parent: ast.AST, field: str, holder: Holder, over: bool
    ) -> Followed:
        """Follow a value to what it stands in."""
        is_run = isinstance(parent, ast.Attribute | ast.Call) and field in {"value", "func"}
        if is_run and holder.is_opaque and not over:
            raise UnsafeUse(parent)
        if isinstance(parent, ast.Attribute):
            return self.attribute(parent, at, holder, over)
        if isinstance(parent, ast.Subscript):
            return self.subscript(parent, over) if field == "value" else _read(parent)
        if isinstance(parent, ast.Call):
            is_called = parent.func is at
            return self.called(parent, over) if is_called else self._argument(parent, at, over)
        if isinstance(parent, ENDS) or field == "test":
            return None, []
        if isinstance(parent, CONTAINERS):
            return parent, []
        if isinstance(parent, ast.BinOp):
            adds = any(isinstance(n, ast.List) for n in (parent.left, parent.right))
            return (parent if adds or isinstance(at, ast.Name) else None), []
        if isinstance(parent, ast.Return):
            return None, list(self._from_calls(parent, holder))
        return self._bound(at, parent, field, holder)

    def _bound(self, at: ast.AST, parent: ast.AST, field: str, holder: Holder) -> Followed:
        """Follow a value to the names that it is given."""
        self._check_named(at)
        is_bound = isinstance(parent, BINDINGS) or field == "iter"
        flat = [part for whole in bound_by(parent) for part in _parts(whole)]
        others = [self._holder_of(part, at, holder) for part in flat]
        if not is_bound or not flat or None in others:
            raise UnsafeUse(at)
        outer = parent if isinstance(parent, ast.NamedExpr) else None
        return outer, [one for one in others if one is not None]

    def _holder_of(self, part: ast.expr, at: ast.AST, holder: Holder) -> Holder | None:
        """Return what holds a value from now on."""
        one = self._holders.of(part)
        if one is None:
            return None
        calls = [node for node in ast.walk(at) if isinstance(node, ast.Call)]
        return replace(
            one,
            since=holder.since,
            until=holder.until,
            is_over=holder.is_over and one.where is holder.where and not one.is_attribute,
            only_elsewhere=holder.only_elsewhere,
            is_opaque=holder.is_opaque or not all(map(self.is_known, calls)),
        )

    def _check_named(self, at: ast.AST) -> None:
        """Raise if a value may be a bound method, which is called by another name later on."""
        if not isinstance(at, ast.Attribute) or f"self.{at.attr}" in self._program.assignments:
            return
        if at.attr not in {"weight", "bias"}:
            raise UnsafeUse(at)

    def _argument(self, call: ast.Call, at: ast.AST, over: bool) -> Followed:
        """Follow a value into the function that is given it."""
        name, full = last_name(call), self._program.qualified(call.func)
        value = at.value if isinstance(at, ast.keyword) else at
        plain = isinstance(call.func, ast.Name) and full == name and not self._is_defined(call)
        if (plain and name in HARMLESS) or full.startswith(HARMLESS_FULL) or self.takes(call):
            return None, []
        if plain and name in ITERATED:
            return call, []
        self._check_named(value)
        functions = self._holders.called(call) if self.is_of_this_file(call) else []
        others = []
        for function, ahead in functions:
            given = self._holders.given(call, function, ahead)
            if given is None:
                raise UnsafeUse(call)
            others += [Holder(k, function, is_over=over) for k, v in given.items() if v is value]
        if functions:
            return None, others
        if not over:
            raise UnsafeUse(call)
        return call, []

    def _is_defined(self, call: ast.Call) -> bool:
        """Return whether a name that is called is one of this file, and not a built-in one."""
        name, program = last_name(call), self._program
        is_global = self._holders.scope(name, call) is program.tree
        return not is_global or name in program.functions or name in program.assignments

    def is_of_this_file(self, call: ast.Call) -> bool:
        """Return whether a call surely runs a function of this file."""
        if not isinstance(call.func, ast.Attribute):
            return True
        return self.is_made_here(call.func.value)

    def is_made_here(self, node: ast.expr) -> bool:
        """Return whether a value is of a class of this file."""
        sources = list(self._sources(node))
        return bool(sources) and all(map(self._is_instance_of_own_class, sources))

    def _sources(self, node: ast.expr) -> Iterator[ast.expr | None]:
        """Yield the values that one may come from by assignments and methods."""
        pending: list[ast.expr | None] = [node]
        seen = set[str]()
        while pending:
            value = pending.pop()
            text = "" if value is None else dotted(value)
            made = self._program.assignments.get(text, [])
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                pending.append(value.func.value)
            elif not made:
                yield value
            elif text not in seen:  # out = out.view(-1): what it was made from tells, not this
                seen.add(text)
                pending += [assignment.value for assignment in made]

    def _is_instance_of_own_class(self, value: ast.expr | None) -> bool:
        if isinstance(value, ast.Call):
            return dotted(value.func) in self._program.classes
        return value is not None and dotted(value) == "self"

    def _from_calls(self, node: ast.Return, holder: Holder) -> Iterator[Holder]:
        """Yield the holders of what a function returns, where it is called."""
        if self._in_scope(node, holder) and holder.until is not None:
            return  # the loop is over then
        function = self._program.scope(node)
        decorators = getattr(function, "decorator_list", [])
        if any("property" in ast.unparse(one) for one in decorators):
            raise UnsafeUse(node)
        for call, _ in self._holders.callers(function):
            if call not in self._returned:
                self._returned.add(call)
                yield from self._follow(call, Holder("", None), over=False)


def _read(node: ast.Subscript) -> Followed:
    """Raise if something is stored under a value as its key."""
    if not isinstance(node.ctx, ast.Load):
        raise UnsafeUse(node)
    return None, []


def _parts(whole: ast.expr) -> Iterator[ast.expr]:
    """Yield each expression to which an assignment unpacks a value."""
    if isinstance(whole, ast.Tuple | ast.List):
        for part in whole.elts:
            yield from _parts(part)
    else:
        yield whole
