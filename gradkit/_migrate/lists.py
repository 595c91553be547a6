"""Whether a list of parameters is, where it is clipped, what its optimizer was made with."""

from __future__ import annotations

import ast

from gradkit._migrate.holders import Holder, Holders, position
from gradkit._migrate.parts import NOT_FOLLOWED
from gradkit._migrate.program import LOOPS, Assignment, Program, Scope, dotted, parameters
from gradkit._migrate.sources import HARMLESS

# These read a list that they are given. (An optimizer copies it.)
READERS = HARMLESS | {"list", "tuple", "set", "enumerate", "zip", "iter", "map", "filter", "sorted"}
READERS_OF_TORCH = ("torch.optim.", "torch.nn.utils.", "torch.autograd.", "gradkit.")
READING = (ast.BinOp, ast.Compare, ast.Starred, ast.FormattedValue, ast.If, ast.Expr)
METHODS = {"append", "extend", "insert", "remove", "pop", "clear", "reverse", "sort"}


class ListCheck:
    """Looks at each use of the name of a list."""

    def __init__(self, program: Program, holders: Holders) -> None:
        self._program = program
        self._holders = holders

    def doubt(self, name: ast.Name, made: Assignment, scope: Scope) -> ast.AST | None:
        """Return what may make it another list than the optimizer has; None if nothing does."""
        where = self._holders.scope_from(name.id, made.scope)
        is_same = self._holders.scope_from(name.id, scope) is where
        if not is_same or name.id in {*self._program.shared_names, *parameters(where)}:
            return made.node
        used: list[ast.Name] = self._program.of_type(ast.Name)
        uses = self._holders.nodes(Holder(name.id, where))
        bound = [use for use in uses if not isinstance(use.ctx, ast.Load)]
        is_kept = len(bound) == 1 and self._is_new(bound[0]) and not self._is_in_loop(bound[0])
        is_filled_first = where is made.scope and not self._is_in_loop(made.node)
        unsafe = [node for node in used if node.id in NOT_FOLLOWED]
        for use in uses:
            fills = self._fills(use) and self._is_before(use, made) and is_filled_first
            if not (fills or self._reads(use) or (use in bound and is_kept)):
                unsafe.append(use)
        return min(unsafe, key=position, default=None if bound else made.node)

    def _is_in_loop(self, node: ast.AST) -> bool:
        around = [p for p, _ in self._program.ancestors(node) if isinstance(p, LOOPS)]
        return any(self._program.scope(p) is self._program.scope(node) for p in around)

    def _is_before(self, use: ast.AST, made: Assignment) -> bool:
        return self._program.scope(use) is made.scope and position(use) < made.position

    def _is_new(self, use: ast.Name) -> bool:
        """Return whether a name is given a new list, which nothing else holds."""
        parent, _ = next(self._program.ancestors(use))
        statement = self._program.statement(use)
        others = isinstance(statement, ast.Assign) and len(statement.targets) > 1
        values = [a.value for a in self._program.assignments[use.id] if a.node is use]
        known = isinstance(parent, ast.Assign | ast.AnnAssign | ast.Tuple) and not others
        return known and all(map(_is_new_list, values))

    def _fills(self, use: ast.Name) -> bool:
        """Return whether the list is made by a statement, or changed by it alone."""
        (parent, field), (outer, of_outer), *_ = self._program.ancestors(use)
        if isinstance(parent, ast.AugAssign):
            return field == "target" and isinstance(parent.op, ast.Add)
        if isinstance(parent, ast.Subscript):
            return field == "value"
        if isinstance(parent, ast.Attribute):
            return parent.attr in METHODS and isinstance(outer, ast.Call) and of_outer == "func"
        return isinstance(use.ctx, ast.Store) and self._is_new(use)

    def _reads(self, use: ast.Name) -> bool:
        """Return whether the list is read, and given to nothing that may keep it."""
        parent, field = next(self._program.ancestors(use))
        if not isinstance(use.ctx, ast.Load):
            return False
        if isinstance(parent, ast.keyword):
            parent, field = next(self._program.ancestors(parent))
        if isinstance(parent, ast.Subscript):
            return field == "value" and isinstance(parent.ctx, ast.Load)
        if isinstance(parent, ast.Call):
            full, program = self._program.qualified(parent.func), self._program
            ours = full in program.functions or full in program.assignments
            is_known = full.startswith(READERS_OF_TORCH) or (full in READERS and not ours)
            return field != "func" and is_known
        return isinstance(parent, READING) or field == "iter"


def _is_new_list(node: ast.expr | None) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_new_list(node.left) or _is_new_list(node.right)
    is_list = isinstance(node, ast.Call) and dotted(node.func) == "list"
    return is_list or isinstance(node, ast.List | ast.ListComp)
