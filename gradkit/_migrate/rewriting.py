"""Rewrites training steps with libcst, which keeps comments, spaces and line ends as they are."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from gradkit._migrate.calls import clip_values
from gradkit._migrate.clipping import norm_name
from gradkit._migrate.imports import imported_as, line_of_last_import
from gradkit._migrate.program import Program
from gradkit._migrate.training_step import TrainingStep

ABOUT_CLEARING = re.compile(r"grad|zero|clear|reset", re.IGNORECASE)
TYPE_IGNORE = re.compile(r"#\s*type:\s*ignore")
Position = tuple[int, int]  # line from 1, column in characters from 0


@dataclass(frozen=True)
class Edit:
    """What becomes of one statement: it is removed, or replaced by other code."""

    code: str = ""  # in which LOSS stands for what backward was called on
    about: str = ""


def rewrite(source: bytes, program: Program, steps: Sequence[TrainingStep]) -> bytes:
    """Return the source with these steps moved."""
    try:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        raise ValueError(f"libcst cannot parse it: {error.message}") from None
    lines = re.split("\r\n|\r|\n", source.decode(wrapper.module.encoding))
    known_as = imported_as(program.tree)
    edits: dict[Position, Edit] = {}
    for step in steps:
        for statement, edit in _edits(step, known_as or "gradkit"):
            before = lines[statement.lineno - 1].lstrip("\ufeff").encode()[: statement.col_offset]
            edits[statement.lineno, len(before.decode())] = edit
    last_import = None if known_as else line_of_last_import(program.tree)
    rewriter = _Rewriter(wrapper.resolve(PositionProvider), edits, last_import)
    module = wrapper.module.visit(rewriter)
    if rewriter.edits:
        raise ValueError(f"statements not found again: {sorted(rewriter.edits)}")
    return module.bytes


def _free_name(scope: ast.AST, first: str, *others: str) -> str:
    """Return the first of these names that a function uses for nothing else."""
    nodes = list(ast.walk(scope))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    shared = (node.names for node in nodes if isinstance(node, ast.Global | ast.Nonlocal))
    used |= set(itertools.chain.from_iterable(shared))
    if first == "_":  # `for _ in ...` does no harm
        read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        used = used - {"_"} | read
    numbered = (f"{others[-1]}_{number}" for number in itertools.count(2))
    return next(n for n in itertools.chain([first, *others], numbered) if n not in used)


def _edits(step: TrainingStep, gradkit: str) -> list[tuple[ast.stmt, Edit]]:
    """Return the edits that move one step."""
    options = "".join(f", {ast.unparse(k)}" for k in step.backward.call.keywords)
    value = _free_name(step.backward.scope, "_", "loss_value")
    params, grads = step.params, _free_name(step.backward.scope, "grads", "step_grads")
    taken = f"{value}, {grads} = {gradkit}.value_and_grads(LOSS, {params}{options})"
    stepped = f"{gradkit}.step_({step.optimizer}, {params}, {grads}"
    if step.scaler:
        stepped += f", scaler={step.scaler}"
    if step.clip is not None:
        values = clip_values(step.clip.call)
        assert values is not None
        stepped += f", max_norm={ast.unparse(values[1])}"
        if norm := norm_name(step.clip):
            stepped = f"{norm} = {stepped}"
    edits = [
        (step.backward.statement, Edit(taken)),
        (step.step.statement, Edit(f"{stepped})")),
        *((zero.statement, Edit(about="clearing")) for zero in step.zeros),
    ]
    removed = [call for call in (step.clip, step.unscale) if call is not None]
    return edits + [(call.statement, Edit()) for call in removed]


class _Rewriter(cst.CSTTransformer):
    """Replaces and removes statements by their positions."""

    def __init__(
        self,
        positions: Mapping[cst.CSTNode, Any],
        edits: dict[Position, Edit],
        last_import: int | None,
    ) -> None:
        super().__init__()
        self._positions = positions
        self.edits = edits  # those that are still to be made
        self._last_import = last_import

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body, rest = self._block(original_node.body, updated_node.body)
        if self._last_import is not None:
            lines = [self._positions[node].start.line for node in original_node.body]
            index = sum(line <= self._last_import for line in lines)
            body.insert(index, _import(body[:index]))
        return updated_node.with_changes(body=body, footer=[*rest, *updated_node.footer])

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body, rest = self._block(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body, footer=[*rest, *updated_node.footer])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        small, _ = self._small(original_node.body, updated_node.body)
        return updated_node.with_changes(body=small)

    def _block(
        self, original: Sequence[cst.CSTNode], updated: Sequence[cst.CSTNode]
    ) -> tuple[list[Any], list[cst.EmptyLine]]:
        """Return the statements that stay, and the comments that no statement follows."""
        body: list[Any] = []
        kept: list[cst.EmptyLine] = []
        for old, new in zip(original, updated, strict=True):
            if not isinstance(old, cst.SimpleStatementLine):
                body.append(_after(new, kept, first=not body))
                kept = []
                continue
            assert isinstance(new, cst.SimpleStatementLine)
            small, removed = self._small(old.body, new.body)
            if not small:
                kept += _comments(new, removed)
                continue
            if small != list(new.body):
                new = _without_type_ignore(new.with_changes(body=small))
            body.append(_after(new, kept, first=not body))
            kept = []
        return body, [line for line in kept if line.comment]

    def _small(
        self, original: Sequence[cst.CSTNode], updated: Sequence[Any]
    ) -> tuple[list[Any], list[Edit]]:
        """Return the statements of a line that stay, and the edits that removed others."""
        stay, removed = [], []
        for old, new in zip(original, updated, strict=True):
            start = self._positions[old].start
            edit = self.edits.pop((start.line, start.column), None)
            if edit is None:
                stay.append(new)
            elif edit.code:
                stay.append(_replaced(new, edit.code))
            else:
                removed.append(edit)
        if stay and removed:
            stay[-1] = stay[-1].with_changes(semicolon=updated[-1].semicolon)
        return stay, removed


def _replaced(statement: Any, code: str) -> Any:
    """Return other code, with the tensor on which the statement calls backward for LOSS."""
    line = cst.parse_statement(code)
    assert isinstance(line, cst.SimpleStatementLine)
    new = line.body[0]
    if "LOSS" in code:
        loss = statement.value.func.value
        simple = isinstance(loss, cst.BinaryOperation | cst.UnaryOperation)
        if simple and len(loss.lpar) == 1 and "\n" not in cst.Module([]).code_for_node(loss):
            loss = loss.with_changes(lpar=[], rpar=[])
        assert isinstance(new, cst.Assign)
        call = cst.ensure_type(new.value, cst.Call)
        args = [call.args[0].with_changes(value=loss), *call.args[1:]]
        new = new.with_changes(value=call.with_changes(args=args))
    return new.with_changes(semicolon=statement.semicolon)


def _comments(line: cst.SimpleStatementLine, removed: Sequence[Edit]) -> list[cst.EmptyLine]:
    """Return the blank lines and comments to keep of a line that is removed."""
    clears = any(edit.about for edit in removed)
    lines = list(line.leading_lines)
    trailing = line.trailing_whitespace.comment
    if trailing is not None and not TYPE_IGNORE.match(trailing.value):
        lines.append(cst.EmptyLine(comment=trailing))
    return [
        one for one in lines
        if not (clears and one.comment is not None and ABOUT_CLEARING.search(one.comment.value))
    ]  # fmt: skip


def _after(statement: Any, kept: Sequence[cst.EmptyLine], *, first: bool) -> Any:
    """Return a statement below the lines that have been kept from those removed before it."""
    if not kept:
        return statement
    lines = [*kept, *statement.leading_lines]
    own: list[cst.EmptyLine] = []
    for line in lines:
        blank = line.comment is None
        if blank and ((first and not own) or (own and own[-1].comment is None)):
            continue  # no two blank lines where there was one, none at the head of a block
        own.append(line)
    return statement.with_changes(leading_lines=own)


def _without_type_ignore(line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """Drop `# type: ignore` from a line that is another one now."""
    trailing = line.trailing_whitespace
    if trailing.comment is None or not TYPE_IGNORE.match(trailing.comment.value):
        return line
    empty = trailing.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None)
    return line.with_changes(trailing_whitespace=empty)


def _import(before: Sequence[Any]) -> cst.SimpleStatementLine:
    """Return `import gradkit`, below a blank line if it does not follow another import."""
    line = cst.parse_statement("import gradkit")
    assert isinstance(line, cst.SimpleStatementLine)
    last = before[-1] if before else None
    docstring = isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[0], cst.Expr)
    return line.with_changes(leading_lines=[cst.EmptyLine(indent=False)] if docstring else [])
