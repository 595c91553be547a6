"""Which parameters an optimizer has in its loop, where that is evident.

It is so for a module, or a list, that the optimizer is made from in the function of its loop: under
a name that is bound once and only read, in a file that changes the parts of no module and the
groups of no optimizer afterwards. Otherwise the first place that speaks against it is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from gradkit_migrate.calls import Optimizers
from gradkit_migrate.groups import GroupChanges
from gradkit_migrate.source import (
    BUILTINS,
    Binding,
    Function,
    Node,
    Source,
    arguments,
    constant,
    dotted,
    last_name,
    parameters,
)

# Methods of a module that leave its parts as they are; the second also give the module itself.
READS = {
    "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "zero_grad",
}  # fmt: skip
RETURNS_ITSELF = {"train", "eval", "to", "cuda", "cpu", "double", "float"}
OF_TORCH = ("torch.optim.", "torch.nn.utils.clip_grad", "torch.save", "copy.deepcopy", "gradkit.")
OF_OPTIMIZER = {
    "step", "zero_grad", "state_dict", "load_state_dict", "param_groups", "state", "defaults",
    "add_param_group",
}  # fmt: skip
SHOWN = (cst.Comparison, cst.FormattedStringExpression)
READING = (*SHOWN, cst.For, cst.CompFor, cst.BinaryOperation, cst.StarredElement)
# What changes the parts of a module.
CHANGES = {
    "append", "extend", "insert", "remove", "pop", "clear", "update", "setdefault", "popitem",
    "add_module", "register_module", "register_parameter", "apply", "_apply", "__setattr__",
    "__delattr__", "__setitem__", "__delitem__", "__dict__", "_modules", "_parameters",
}  # fmt: skip
CHANGING_CALLS = {"setattr", "delattr", "vars", "globals", "locals", "exec", "eval"}
# What is no module, nor a part of one.
NEW = (cst.List, cst.Dict, cst.Set, cst.ListComp, cst.DictComp)
NEW_CALLS = ("builtins.list", "builtins.dict", "builtins.set", "collections.")
SETTINGS = ("torch.backends.", "os.", "sys.", "matplotlib.", "numpy.")
PLAIN = (cst.Comparison, cst.UnaryOperation, cst.FormattedString)


@dataclass(frozen=True)
class Owner:
    """What an optimizer was made from: the name of a module, or of a list of parameters."""

    name: str = ""
    is_module: bool = False
    doubt: Node | None = None  # where it may become something else than the optimizer has


class Owners:
    """Finds what the optimizers of a file were made from."""

    def __init__(self, source: Source, optimizers: Optimizers, groups: GroupChanges) -> None:
        self._source = source
        self._optimizers = optimizers
        self._groups = groups

    def of(self, optimizer: str, at: Node) -> Owner:
        """Return what an optimizer was made from, as it is where a statement stands."""
        source, function = self._source, self._source.function(at)
        made = self._bound_once(optimizer, function)
        if made is None or not isinstance(made.value, cst.Call):
            known = source.bindings.get(optimizer, ())
            return Owner(doubt=next((one.node for one in known), function))
        given: Node | None = arguments(made.value, "params").get("params")
        is_module = isinstance(given, cst.Call) and last_name(given) == "parameters"
        if isinstance(given, cst.Call) and isinstance(given.func, cst.Attribute) and is_module:
            given = given.func.value if not given.args else None
        name = given.value if isinstance(given, cst.Name) else ""
        is_torchs = self._optimizers.is_made_by_torch(made.value)
        if not (name and is_torchs and source.precedes(source.statement(made.node), at)):
            return Owner(doubt=made.node)
        doubts = self._of_module(name, made) if is_module else self._of_list(name, made)
        uses = (use.node for one in source.assigned(optimizer, function) for use in one.references)
        others = (node for node in uses if not self._keeps_groups(node, made))
        first = min([*self._groups.nodes, *others, *doubts], key=source.at, default=None)
        return Owner(name, is_module, first)

    def _bound_once(self, name: str, function: Function) -> Binding | None:
        """Return the only binding of a name of a function."""
        own = [one for one in self._source.bindings.get(name, ()) if one.function is function]
        assigned = self._source.assigned(name, function)
        return own[0] if len(own) == len(assigned) == 1 else None

    def _keeps_groups(self, node: Node, made: Binding) -> bool:
        """Return whether an optimizer is stepped, read, or given to a call: see `groups.py`."""
        parent = self._source.parents[node]
        if isinstance(parent, cst.Attribute):
            return parent.attr.value in OF_OPTIMIZER
        return isinstance(parent, (cst.Arg, *SHOWN)) or self._is_returned(node, made)

    def _is_before(self, node: Node, made: Binding) -> bool:
        """Return whether some code has run, for good, when an optimizer is made."""
        is_first = self._source.at(node) < self._source.at(made.node)
        is_once = not self._source.loops(made.node)
        return is_first and is_once and self._source.function(node) is made.function

    def _of_module(self, name: str, made: Binding) -> Iterator[Node]:
        """Yield what may change the parts of a module that an optimizer was made from."""
        source, bound = self._source, self._bound_once(name, made.function)
        is_argument = name in parameters(made.function)
        assigned = source.assigned(name, made.function)
        if len(assigned) != 1 or not (is_argument or (bound and self._is_new_module(bound.value))):
            own = [one.node for one in source.bindings.get(name, ())]
            yield [made.node, *own][-1]
        for one in assigned:
            yield from (n.node for n in one.references if not self._reads_module(n.node, made))
        yield from (node for node in self._changes() if not self._is_before(node, made))

    def _is_new_module(self, value: Node | None) -> bool:
        """Return whether a call makes a module, from no other one that has a name."""
        if not isinstance(value, cst.Call):
            return False
        names = (name for name in self._source.walk(value, cst.Name) if self._source.is_read(name))
        return all(map(self._is_number, names))

    def _is_number(self, name: cst.Name) -> bool:
        """Return whether a name is that of a number, of a class or a function, or imported."""
        source, parent = self._source, self._source.parents[name]
        bound = source.bindings.get(name.value, ())
        if name.value == "device" or bound:
            return name.value == "device" or all(self._is_plain(one.value) for one in bound)
        is_called = isinstance(parent, cst.Call) and parent.func is name
        is_ours = name.value in source.functions or name.value in source.classes
        is_known = bool(source.full_names(name)) or is_called or is_ours
        return is_known and name.value not in parameters(source.function(name))

    def _is_plain(self, value: Node | None) -> bool:
        """Return whether a value is a number, a text, or an answer of True or False."""
        if isinstance(value, cst.Call):
            return self._source.is_builtin(value.func, {"len", "int", "float", "str", "bool"})
        return isinstance(constant(value), int | float | str) or isinstance(value, PLAIN)

    def _reads_module(self, node: Node, made: Binding) -> bool:
        """Return whether a use of a module leaves its parts alone, and gives it to nothing."""
        parent, outer, *_ = self._source.ancestors(node)
        if self._is_returned(node, made) or (isinstance(parent, cst.Call) and parent.func is node):
            return True
        if isinstance(parent, cst.Attribute) and isinstance(outer, cst.Call):
            name, is_alone = parent.attr.value, isinstance(self._source.parents[outer], cst.Expr)
            if name == "load_state_dict":  # `assign=True` replaces parameters
                return len(outer.args) <= 2 and "assign" not in arguments(outer)
            if name in {"train", "eval"} or self._is_before(node, made):
                return name in READS or (name in RETURNS_ITSELF and is_alone)
            return name in READS
        return self._is_read(node, {"print", "len", "isinstance", "type"}, SHOWN)

    def _is_returned(self, node: Node, made: Binding) -> bool:
        """Return whether the function of a loop ends, and returns a value itself."""
        is_own = self._source.function(node) is made.function
        around = itertools.takewhile(
            lambda one: not isinstance(one, cst.Call | cst.CompFor), self._source.ancestors(node)
        )
        return is_own and any(isinstance(one, cst.Return) for one in around)

    def _is_read(self, node: Node, builtins: set[str], reading: tuple[type, ...]) -> bool:
        """Return whether a value is read by what keeps and changes nothing."""
        parent, outer, *_ = self._source.ancestors(node)
        if isinstance(parent, cst.Arg) and isinstance(outer, cst.Call):
            is_builtin = self._source.is_builtin(outer.func, builtins)
            return is_builtin or self._source.is_from(outer.func, *OF_TORCH)
        return isinstance(parent, reading)

    def _changes(self) -> Iterator[Node]:
        """Yield each place in the file that may change the parts of some module."""
        source = self._source
        for node in source.walk(source.module, cst.Attribute):
            if source.is_stored(node) and not self._is_no_part(node):
                yield node
            call, is_scalers = source.parents[node], node.attr.value == "update"
            is_scalers = is_scalers and isinstance(call, cst.Call) and not call.args
            if node.attr.value in CHANGES and not (is_scalers or self._is_container(node.value)):
                yield node
        for item in source.walk(source.module, cst.Subscript):
            if source.is_stored(item) and not self._is_container(item.value):
                yield item
        yield from (c for c in source.calls if source.is_builtin(c.func, CHANGING_CALLS))

    def _is_no_part(self, node: cst.Attribute) -> bool:
        """Return whether an attribute is of a new object, of no module, or has a plain value."""
        value = getattr(self._source.statement(node), "value", None)
        if self._source.is_from(node, *SETTINGS) or self._is_plain(value):
            return True
        owner = self._source.class_of(node)
        is_plain_object = owner is not None and not owner.bases and dotted(node.value) == "self"
        return is_plain_object or self._is_being_made(node.value)

    def _is_being_made(self, node: Node) -> bool:
        """Return whether a value is `self`, or a new part of it, in its `__init__`."""
        function, text = self._source.function(node), dotted(node)
        is_init = isinstance(function, cst.FunctionDef) and function.name.value == "__init__"
        made = self._source.bindings.get(text, ())
        is_new = bool(made) and all(isinstance(one.value, cst.Call) for one in made)
        return is_init and (text == "self" or (text.startswith("self.") and is_new))

    def _is_container(self, node: Node) -> bool:
        """Return whether an expression is a new list or dict, a group's options, or settings."""
        while isinstance(node, cst.Subscript):
            node = node.value
        of_groups = dotted(node).endswith(".param_groups")
        if of_groups or self._source.is_from(node, *SETTINGS) or self._is_being_made(node):
            return True
        bound = self._source.bindings.get(dotted(node), [])
        own = [one for one in bound if one.function is self._source.function(node)] or bound
        return bool(own) and all(map(self._is_new_container, own))

    def _is_new_container(self, bound: Binding) -> bool:
        if isinstance(bound.value, cst.Call):
            return self._source.is_from(bound.value.func, *NEW_CALLS)
        loop = self._source.parents[bound.node]
        of_groups = isinstance(loop, cst.For) and dotted(loop.iter).endswith(".param_groups")
        return of_groups or isinstance(bound.value, NEW)

    def _of_list(self, name: str, made: Binding) -> Iterator[Node]:
        """Yield what may change a list that an optimizer was made from, or keep it elsewhere."""
        source, bound = self._source, self._bound_once(name, made.function)
        statement = source.statement(bound.node) if bound else None
        is_one = isinstance(statement, cst.Assign) and len(statement.targets) == 1
        is_new = bound is not None and is_one and self._makes_list(bound.value)
        if not is_new or source.loops(made.node):
            own = [one.node for one in source.bindings.get(name, ())]
            yield [made.node, *own][-1]
        for one in source.assigned(name, made.function):
            for use in one.references:
                item = source.parents[use.node]
                is_item = isinstance(item, cst.Subscript) and source.is_read(item)
                if not (is_item or self._is_read(use.node, BUILTINS, READING)):
                    yield use.node
        yield from (c for c in source.calls if source.is_builtin(c.func, CHANGING_CALLS))

    def _makes_list(self, value: Node | None) -> bool:
        if isinstance(value, cst.BinaryOperation):
            return self._makes_list(value.left) or self._makes_list(value.right)
        is_call = isinstance(value, cst.Call) and self._source.is_builtin(value.func, {"list"})
        return is_call or isinstance(value, cst.List | cst.ListComp)
