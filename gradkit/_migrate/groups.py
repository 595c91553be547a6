"""What may change the groups of an optimizer after it was made."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradkit._migrate.holders import Holder, UnsafeUse, bound_by
from gradkit._migrate.program import Scope, dotted, last_name
from gradkit._migrate.uses import Followed, Uses

METHODS = {"step", "zero_grad", "state_dict", "load_state_dict"}
GIVEN = ("torch.optim.lr_scheduler.", "transformers.")


class GroupsCheck(Uses):
    """Follows an optimizer."""

    def changes(self, text: str, scope: Scope) -> list[ast.AST]:
        """Return each place where the optimizer may get other parameters."""
        program = self._program
        attribute = text.rpartition(".")[2]
        if text == attribute:
            where = self._holders.scope_from(text, scope)
            start = Holder(text, where, is_source=True)
        else:
            own = program.class_of(scope) if text == f"self.{attribute}" else None
            start = Holder(attribute, own, is_attribute=True)
        return [*self._anywhere(), *self.unsafe([start])]

    def _anywhere(self) -> list[ast.AST]:
        """Return the places that name what changes the groups of any optimizer."""
        attributes: list[ast.Attribute] = self._program.of_type(ast.Attribute)
        subscripts: list[ast.Subscript] = self._program.of_type(ast.Subscript)
        named = [s for s in subscripts if _key(s) == "params"]
        return [*(a for a in attributes if a.attr == "add_param_group"), *named]

    def attribute(self, node: ast.Attribute, at: ast.AST, holder: Holder, over: bool) -> Followed:
        parent, _ = next(self._program.ancestors(node))
        is_called = isinstance(parent, ast.Call) and parent.func is node
        if is_called and node.attr in METHODS:
            return None, []
        if isinstance(node.ctx, ast.Load) and node.attr in {"state", "defaults"}:
            return None, []
        if isinstance(node.ctx, ast.Load) and node.attr == "param_groups":
            self._check_groups(node)
            return None, []
        raise UnsafeUse(node)

    def _check_groups(self, node: ast.Attribute) -> None:
        """Raise if the list of groups, or a group, is used other than for its options."""
        parent, field = next(self._program.ancestors(node))
        if isinstance(parent, ast.Call) and dotted(parent.func) in {"enumerate", "len"}:
            if dotted(parent.func) == "len":
                return
            parent, field = next(self._program.ancestors(parent))
        if isinstance(parent, ast.For | ast.comprehension) and field == "iter":
            for name in [n for part in bound_by(parent) for n in ast.walk(part)]:
                if isinstance(name, ast.Name):
                    self._check_group_name(name)
            return
        is_read = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load)
        if not (is_read and isinstance(parent, ast.expr) and self._is_option(parent)):
            raise UnsafeUse(node)

    def _check_group_name(self, bound: ast.Name) -> None:
        one = Holder(bound.id, self._holders.scope(bound.id, bound))
        for node in self._holders.nodes(one):
            parent, _ = next(self._program.ancestors(node))
            is_index = isinstance(parent, ast.Subscript) and parent.slice is node
            in_number = isinstance(parent, ast.Compare | ast.BinOp | ast.FormattedValue)
            if isinstance(node.ctx, ast.Load) and not (
                is_index or in_number or self._is_option(node)
            ):
                raise UnsafeUse(node)

    def _is_option(self, group: ast.expr) -> bool:
        """Return whether a group is used for one of its options: `group["lr"]`."""
        parent, field = next(self._program.ancestors(group))
        if isinstance(parent, ast.Subscript) and field == "value":
            return _key(parent) not in {"params", None}
        outer, _ = next(self._program.ancestors(parent))
        is_get = isinstance(parent, ast.Attribute) and parent.attr == "get"
        if not (is_get and isinstance(outer, ast.Call) and outer.args):
            return False
        return isinstance(outer.args[0], ast.Constant) and outer.args[0].value != "params"

    def subscript(self, node: ast.Subscript, over: bool) -> Followed:
        if isinstance(node.ctx, ast.Load):
            return node, []
        raise UnsafeUse(node)

    def called(self, call: ast.Call, over: bool) -> Followed:
        raise UnsafeUse(call)

    def made_from(self, node: ast.AST | None) -> Iterator[ast.Name | ast.Attribute]:
        if isinstance(node, ast.Name | ast.Attribute):
            yield node

    def takes(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute) and last_name(call) in {"step", "unscale_"}:
            return True  # of a scaler
        return self._program.qualified(call.func).startswith(GIVEN)


def _key(node: ast.Subscript) -> object:
    """Return a constant key, else None."""
    return node.slice.value if isinstance(node.slice, ast.Constant) else None
