"""Rewrites training steps, and keeps comments, spaces and line ends as they are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor

from gradkit_migrate.between import norm_name
from gradkit_migrate.calls import clip_values
from gradkit_migrate.source import Function, Node, Source
from gradkit_migrate.step import TrainingStep

ABOUT_CLEARING = re.compile(r"grad|zero|clear|reset", re.IGNORECASE)
TYPE_IGNORE = re.compile(r"#\s*type:\s*ignore")
REMOVED = ""  # what a statement becomes: other code, or nothing
CLEARED = "# and comments about it"


def rewrite(source: Source, steps: Sequence[TrainingStep]) -> bytes:
    """Return the source with these steps moved."""
    known_as = _imported_as(source)
    edits: dict[Node, str] = {}
    for step in steps:
        edits |= _edits(source, step, known_as or "gradkit")
    module = source.module.visit(_Rewriter(edits))
    if known_as is None:
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(context, "gradkit")
        module = AddImportsVisitor(context).transform_module(module)
    return module.bytes


def _imported_as(source: Source) -> str | None:
    """Return the name of gradkit in a module, or None if it is not imported as a whole."""
    for alias in source.walk(source.module, cst.ImportAlias):
        outer = source.parents[alias]
        is_whole = isinstance(outer, cst.Import) and alias.evaluated_name == "gradkit"
        if is_whole and source.block(outer) is source.module:
            return alias.evaluated_alias or "gradkit"
    return None


def _free_name(source: Source, function: Function, first: str, *others: str) -> str:
    """Return the first of these names that a function uses for nothing else."""
    used = {
        name.value for name in source.walk(function, cst.Name)
        if name.value != "_" or not source.is_stored(name)  # `for _ in ...` does no harm
    }  # fmt: skip
    numbered = (f"{others[-1]}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([first, *others], numbered) if name not in used)


def _edits(source: Source, step: TrainingStep, gradkit: str) -> dict[Node, str]:
    """Return what becomes of the statements of one step."""
    function, optimizer = step.backward.function, step.step.optimizer
    unused = _free_name(source, function, "_", "loss_value")
    options = f", scaler={step.step.scaler}" if step.step.scaler else ""
    norm = None
    if step.clip is not None and (values := clip_values(step.clip.call)):
        options += f", max_norm={source.text(values[1])}"
        norm = norm_name(step.clip)
    removed = [call for call in (step.clip, step.unscale) if call is not None]
    edits = {
        **{call.statement: REMOVED for call in removed},
        **{zero.statement: CLEARED for zero in step.zeros},
    }
    loss: Any = cst.ensure_type(step.backward.call.func, cst.Attribute).value
    if step.is_one_call:
        if step.step.scaler:
            loss = loss.args[0].value  # of scaler.scale(loss)
        target = f"{unused}, {norm} = " if norm else ""
        code = f"{gradkit}.minimize_({optimizer}, {_as_argument(source, loss)}{options})"
        return edits | {step.backward.statement: REMOVED, step.step.statement: target + code}
    grads = _free_name(source, function, "grads", "step_grads")
    target = f"{norm} = " if norm else ""
    given = "".join(f", {source.text(arg).rstrip(', ')}" for arg in step.backward.call.args)
    found = f"{gradkit}.value_and_grads({_as_argument(source, loss)}, {step.params}{given})"
    stepped = f"{gradkit}.step_({optimizer}, {step.params}, {grads}{options})"
    return edits | {
        step.backward.statement: f"{unused}, {grads} = {found}",
        step.step.statement: target + stepped,
    }


def _as_argument(source: Source, loss: Any) -> str:
    """Return an expression, without the parentheses that it needs in front of a method only."""
    simple = isinstance(loss, cst.BinaryOperation | cst.UnaryOperation)
    if simple and len(loss.lpar) == 1 and "\n" not in source.text(loss):
        loss = loss.with_changes(lpar=[], rpar=[])
    return source.text(loss)


class _Rewriter(cst.CSTTransformer):
    """Replaces and removes statements."""

    def __init__(self, edits: Mapping[Node, str]) -> None:
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Rewrite the statements of a block."""
        if isinstance(original_node, cst.Module | cst.IndentedBlock):
            body, rest = self._block(original_node.body, updated_node.body)
            footer = [*rest, *updated_node.footer]
            return updated_node.with_changes(body=body, footer=footer)
        if isinstance(original_node, cst.SimpleStatementSuite):
            small, _ = self._line(original_node.body, updated_node.body)
            return updated_node.with_changes(body=small)
        return updated_node

    def _block(
        self, original: Sequence[Any], updated: Sequence[Any]
    ) -> tuple[list[Any], list[cst.EmptyLine]]:
        """Return the statements that stay, and the comments that no statement follows."""
        body: list[Any] = []
        kept: list[cst.EmptyLine] = []
        for old, new in zip(original, updated, strict=True):
            if isinstance(old, cst.SimpleStatementLine):
                small, removed = self._line(old.body, new.body)
                if not small:
                    kept += _comments(new, clears=CLEARED in removed)
                    continue
                if small != list(new.body):
                    new = _without_type_ignore(new.with_changes(body=small))
            body.append(new.with_changes(leading_lines=[*kept, *new.leading_lines]))
            kept = []
        return body, kept

    def _line(self, original: Sequence[Any], updated: Sequence[Any]) -> tuple[list[Any], list[str]]:
        """Return the statements of a line that stay, and the edits that removed others."""
        stay, removed = [], []
        for old, new in zip(original, updated, strict=True):
            edit = self._edits.get(old)
            if edit in {REMOVED, CLEARED}:
                removed.append(edit or REMOVED)
            else:
                stay.append(_parsed(edit).with_changes(semicolon=new.semicolon) if edit else new)
        if stay and removed:
            stay[-1] = stay[-1].with_changes(semicolon=updated[-1].semicolon)
        return stay, removed


def _parsed(code: str) -> Any:
    return cst.ensure_type(cst.parse_statement(code), cst.SimpleStatementLine).body[0]


def _comments(line: cst.SimpleStatementLine, *, clears: bool) -> list[cst.EmptyLine]:
    """Return the comments to keep of a line that is removed."""
    lines = [one for one in line.leading_lines if one.comment]
    trailing = line.trailing_whitespace.comment
    if trailing is not None and not TYPE_IGNORE.match(trailing.value):
        lines.append(cst.EmptyLine(comment=trailing))
    return [
        one for one in lines
        if not (clears and one.comment and ABOUT_CLEARING.search(one.comment.value))
    ]  # fmt: skip


def _without_type_ignore(line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """Drop `# type: ignore` from a line that is another one now."""
    trailing = line.trailing_whitespace
    if trailing.comment is None or not TYPE_IGNORE.match(trailing.comment.value):
        return line
    empty = trailing.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None)
    return line.with_changes(trailing_whitespace=empty)
