"""What may give an optimizer other groups of parameters than those that it was made with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from gradkit_migrate import reasons
from gradkit_migrate.calls import SCHEDULER_NAME, LoopCall, Optimizers
from gradkit_migrate.reasons import NotSureError
from gradkit_migrate.source import Node, Position, Source, called, constant, dotted, last_name

GIVEN = ("torch.optim.lr_scheduler.", "transformers.", "gradkit.")
NUMBERS = (cst.Comparison, cst.BinaryOperation, cst.FormattedStringExpression, cst.Index)


class GroupChanges:
    """The places in a file that may change the groups of an optimizer."""

    def __init__(self, source: Source, optimizers: Optimizers) -> None:
        self._source = source
        self._optimizers = optimizers
        self.nodes = sorted(self._find(), key=source.at)

    def check(self, zeros: Sequence[LoopCall], backward: LoopCall, step: LoopCall) -> None:
        """Raise if a parameter may join the optimizer once its `.grad` has been added to."""
        before = [zero.at for zero in zeros if zero.at < backward.at]
        for node in self.nodes:
            statement = self._source.statement(node)
            if not isinstance(statement, cst.Expr | cst.If) or self._is_kept(node):
                joins_late = True  # who knows when
            elif before:
                joins_late = self._runs_within(node, max(before), step)
            else:
                joins_late = not self._runs_before_loop(node, backward)
            if joins_late:
                shown, line = self._source.shown(statement), self._source.line(node)
                reason = f"`{shown}` (line {line}) may add parameters to the optimizer that have "
                reason += "gradients already"
                raise NotSureError(backward.line, reason, reasons.GROUPS)

    def _find(self) -> Iterator[Node]:
        """Yield what names parameters of groups, and what gives an optimizer to other code."""
        source = self._source
        for item in source.walk(source.module, cst.Subscript):
            if _key(item) == "params":
                yield item
        for node in source.walk(source.module, cst.Attribute):
            is_list = node.attr.value == "param_groups" and not self._reads_options(node)
            if is_list or node.attr.value == "add_param_group":
                yield node
        for call in source.calls:
            given = (arg.value for arg in call.args)
            taken = [one for one in given if self._optimizers.is_optimizer(dotted(one))]
            yield from [] if self._leaves_alone(call) else taken

    def _leaves_alone(self, call: cst.Call) -> bool:
        """Return whether a call changes no groups, or its function is read here, too."""
        source, name = self._source, last_name(call)
        of_scaler = isinstance(call.func, cst.Attribute) and name in {"step", "unscale_"}
        is_known = source.is_from(call.func, *GIVEN) or SCHEDULER_NAME.search(name)
        is_ours = name in source.functions or name in source.classes
        return of_scaler or bool(is_known) or is_ours or source.is_builtin(call.func)

    def _reads_options(self, node: cst.Attribute) -> bool:
        """Return whether the list of groups is used for options of groups alone: `["lr"]`."""
        source, whole = self._source, self._source.parents[node]
        call = source.parents[whole] if isinstance(whole, cst.Arg) else None
        if isinstance(call, cst.Call) and source.is_builtin(call.func, {"len"}):
            return True
        if isinstance(call, cst.Call) and source.is_builtin(call.func, {"enumerate"}):
            whole = source.parents[call]
        if isinstance(whole, cst.For | cst.CompFor):
            names = {name.value for name in source.walk(whole.target, cst.Name)}
            used = source.walk(source.function(whole), cst.Name)
            return all(self._is_option(one) for one in used if one.value in names)
        return isinstance(whole, cst.Subscript) and self._is_option(whole)

    def _is_option(self, group: Node) -> bool:
        """Return whether a group is read by a key of its options."""
        parent = self._source.parents[group]
        if not self._source.is_read(group):
            return isinstance(group, cst.Name)
        if isinstance(parent, cst.Subscript) and parent.value is group:
            return isinstance(_key(parent), str) and _key(parent) != "params"
        return isinstance(parent, NUMBERS)

    def _is_kept(self, node: Node) -> bool:
        """Return whether a value is given to a method, of a list say."""
        calls = [one for one in self._source.ancestors(node) if isinstance(one, cst.Call)]
        given = [c for c in calls if node not in self._source.nodes(c.func)]
        return any("." in dotted(c.func) and not self._source.full_names(c.func) for c in given)

    def _runs_within(self, node: Node, zero: Position, step: LoopCall) -> bool:
        """Return whether some code may run after zero_grad and before the step."""
        source = self._source
        names = source.callers([node])
        running = [node, *(call for call in source.calls if called(call) in names)]
        while isinstance(source.function(running[0]), cst.Lambda):
            running[0] = source.function(running[0])
        own = [one for one in running if source.function(one) is step.function]
        return any(zero < source.at(one) < step.at for one in own)

    def _runs_before_loop(self, node: Node, backward: LoopCall) -> bool:
        """Return whether some code runs once, before the loop."""
        function = self._source.function(node)
        if function is not backward.function:
            return isinstance(function, cst.FunctionDef) and function.name.value == "__init__"
        loops = self._source.loops(backward.call)
        return bool(loops) and self._source.at(node) < self._source.at(loops[-1])


def _key(node: cst.Subscript) -> object:
    """Return a constant key; else the node."""
    index = node.slice[0].slice
    return constant(index.value) if isinstance(index, cst.Index) else index
