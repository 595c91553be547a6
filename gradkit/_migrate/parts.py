"""Whether the modules that an optimizer was made from still have the same parts in the loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gradkit._migrate.holders import Holder, UnsafeUse, position
from gradkit._migrate.program import Assignment, Program, Scope, dotted, last_name, parameters
from gradkit._migrate.sources import HARMLESS
from gradkit._migrate.uses import Followed, Uses

# Of a module: these give values, or the module itself, and leave its parts as they are.
READS = {
    "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "zero_grad",
    "get_extra_state",
}  # fmt: skip
RETURNS_ITSELF = {"train", "eval", "requires_grad_"}
MOVES = {"to", "cuda", "type"}  # which are given a device or a dtype
# Of a tensor that is an attribute of a module.
OF_TENSORS = {
    "norm", "item", "size", "numel", "dim", "sum", "mean", "std", "abs", "max", "min", "detach",
    "clone", "tolist", "numpy", "view", "reshape", "t", "transpose", "permute", "expand", "repeat",
    "squeeze", "unsqueeze", "flatten", "new_zeros", "new_ones",
}  # fmt: skip
NOT_OF_TENSORS = (
    "torch.nn.", "torch.optim.", "torch.utils.", "torch.compile", "torch.jit.", "torch.fx.",
    "torch.ao.", "torch.quantization.", "torch.func.", "torch.export", "torch.onnx.",
    "torch._dynamo.", "torch.distributed.",
)  # fmt: skip
KNOWN_BASES = ("torch.", "abc.", "typing.", "object", "Generic", "Protocol")
NO_MODULES = {"object", "abc.ABC", "typing.Protocol", "torch.autograd.Function"}
NOT_FOLLOWED = {"globals", "locals", "exec", "eval", "vars"}


class PartsCheck(Uses):
    """Follows a module from where its optimizer was made."""

    def changes(self, names: set[str], made: Assignment, scope: Scope) -> list[ast.AST]:
        """Return each place that may change the parts of a module that is trained."""
        program = self._program
        used: list[ast.Name] = program.of_type(ast.Name)
        unseen: list[ast.AST] = [node for node in used if node.id in NOT_FOLLOWED]
        since = program.statement(made.node)
        until = last_statement(program, scope) if made.scope is scope else None
        start = []
        for name in names:
            attribute = name.rpartition(".")[2]
            if name == attribute:
                where = self._holders.scope_from(name, made.scope)
                one = Holder(name, where, since=since, until=until, is_own=True, is_source=True)
            elif name == f"self.{attribute}":
                own = program.class_of(made.node)
                unseen += [made.node] if own is None else self._uses_as_a_whole(own)
                one = Holder(
                    attribute, own, is_attribute=True, since=since, is_own=True, is_source=True
                )
            else:
                return [made.node]
            start.append(one)
        return unseen or self.unsafe(start)

    def _uses_as_a_whole(self, owner: ast.ClassDef) -> list[ast.AST]:
        """Return where, in all of the file, an object is used other than by its attributes."""
        family = self._holders.family(owner)
        names = {c.name for c in family}
        bases = [base for c in family for base in c.bases if dotted(base) not in names]
        # The methods of other bases are in another file.
        others = [b for b in bases if not self._program.qualified(b).startswith(KNOWN_BASES)]
        nodes: list[ast.Name] = self._program.of_type(ast.Name)
        return [
            *others,
            *(
                node for node in nodes
                if isinstance(node.ctx, ast.Load) and self._is_one_of(node, family, names)
                if not self._is_by_attribute(node)
            ),
        ]  # fmt: skip

    def _is_one_of(self, node: ast.Name, family: set[ast.ClassDef], names: set[str]) -> bool:
        if node.id == "self":
            return self._program.class_of(node) in family
        scope = self._holders.scope(node.id, node)
        made = [a.value for a in self._program.assignments.get(node.id, ()) if a.scope is scope]
        return any(isinstance(v, ast.Call) and last_name(v) in names for v in made)

    def _is_by_attribute(self, node: ast.Name) -> bool:
        parent, _ = next(self._program.ancestors(node))
        if isinstance(parent, ast.Call):
            name = dotted(parent.func)
            return parent.func is node or name == "super" or name in HARMLESS
        if isinstance(parent, ast.Attribute):
            return not parent.attr.startswith("__") or parent.attr == "__class__"
        return isinstance(parent, ast.Return | ast.Compare | ast.Expr)

    def attribute(self, node: ast.Attribute, at: ast.AST, holder: Holder, over: bool) -> Followed:
        parent, _ = next(self._program.ancestors(node))
        if not isinstance(node.ctx, ast.Load):
            if over or _is_plain_value(parent):
                return None, []
            raise UnsafeUse(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            return self._method(parent, node, at, over)
        return node, []

    def subscript(self, node: ast.Subscript, over: bool) -> Followed:
        if over or isinstance(node.ctx, ast.Load):
            return node, []
        raise UnsafeUse(node)

    def _method(self, call: ast.Call, node: ast.Attribute, at: ast.AST, over: bool) -> Followed:
        """Follow a module, or one of its parts, into a method."""
        name = node.attr
        methods = self._of_modules(name)
        if methods and self.is_made_here(node.value):
            return None, [Holder(_first(m), m, is_over=over) for m in methods]
        if methods and name != "forward" and not over:
            raise UnsafeUse(call)
        if name == "forward":
            return self.called(call, over)
        if name in READS or (name == "load_state_dict" and _copies(call)):
            return None, []
        if name in RETURNS_ITSELF or over:
            return call, []
        of_part = isinstance(at, ast.Attribute | ast.Subscript) and dotted(at) != "self"
        if of_part and (name in OF_TENSORS or _is_in_place(node)):
            return None, []
        if f"self.{name}" in self._program.assignments:  # a submodule
            return self.called(call, over)
        raise UnsafeUse(call)

    def _of_modules(self, name: str) -> list[Any]:
        """Return the methods of this name of the classes that may be modules."""
        return [
            method for method in self._holders.methods(name)
            if any(
                self._program.qualified(base) not in NO_MODULES
                for c in self._holders.family(self._holders.class_with(method)) for base in c.bases
                if dotted(base) not in self._program.classes
            )
        ]  # fmt: skip

    def called(self, call: ast.Call, over: bool) -> Followed:
        """Follow a module that is called into the `forward` of each class of the file."""
        forward = self._of_modules("forward") + self._of_modules("__call__")
        return None, [Holder(_first(method), method, is_over=over) for method in forward]

    def is_known(self, call: ast.Call) -> bool:
        name, full = last_name(call), self._program.qualified(call.func)
        if isinstance(call.func, ast.Attribute) and name in RETURNS_ITSELF | MOVES:
            return True
        return full.startswith(("torch.nn.", "torch.compile")) or super().is_known(call)

    def made_from(self, node: ast.AST | None) -> Iterator[ast.Name | ast.Attribute]:
        return _named(node)

    def takes(self, call: ast.Call) -> bool:
        full = self._program.qualified(call.func)
        return full.startswith("torch.") and not full.startswith(NOT_OF_TENSORS)


def last_statement(program: Program, scope: Scope) -> ast.stmt | None:
    """Return the last outermost statement of a scope in which an optimizer may step."""
    names, calls = _names_of_steps(program), program.of_type(ast.Call)
    own = [c for c in calls if last_name(c) in names and program.scope(c) is scope]
    around = [[call, *(p for p, _ in program.ancestors(call))] for call in own]
    outer = [
        [p for p in parents if isinstance(p, ast.stmt) and program.scope(p) is scope][-1]
        for parents in around
    ]
    return max(outer, key=position, default=None)


def _names_of_steps(program: Program) -> set[str]:
    """Return the names of the functions that step an optimizer, or call one that does."""
    return program.with_callers({"step", "step_"})


def _first(function: ast.FunctionDef) -> str:
    """Return the name of the first parameter, `self`."""
    return next(iter(parameters(function)), "")


def _copies(call: ast.Call) -> bool:
    """Return whether load_state_dict writes on the parameters, and does not replace them."""
    return len(call.args) <= 2 and all(k.arg in {"state_dict", "strict"} for k in call.keywords)


def _is_in_place(node: ast.Attribute) -> bool:
    """Return whether a method is one of `.data` that writes in place."""
    return ast.unparse(node.value).endswith(".data") and node.attr.endswith("_")


def _is_plain_value(parent: ast.AST) -> bool:
    """Return whether an attribute becomes a number or a text, which is no part of a module."""
    if isinstance(parent, ast.AugAssign) and not isinstance(parent.op, ast.Add | ast.Sub):
        return False
    value = parent.value if isinstance(parent, ast.Assign | ast.AugAssign) else None
    return isinstance(value, ast.Constant) and value.value is not None


def _named(node: ast.AST | None) -> Iterator[ast.Name | ast.Attribute]:
    """Yield the names that an expression may be made from."""
    if isinstance(node, ast.Name | ast.Attribute):
        if dotted(node):
            yield node
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield from _named(node.func.value)
        if last_name(node) not in MOVES:
            for given in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield from _named(given)
    elif node is not None:
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in {"slice", "ctx", "test"}:
                    yield from _named(child)
