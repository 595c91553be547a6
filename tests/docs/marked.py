"""How a page of errors runs: a statement marked `# raises` or `# warns` gives its heading.

An entry is headed by one or more literal texts in backticks; all of them have to be given, or one
of those that "or" joins.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser

import gradkit

_MARK = re.compile(r"# (raises|warns)$")
_CLASS = re.compile(r"`(\w+(?:Error|Warning))`")


@dataclass(frozen=True)
class Entry:
    """A section of a page: its texts, the class it names, its blocks."""

    heading: str
    body: str

    @property
    def texts(self) -> list[str]:
        """The literal messages that head it."""
        return re.findall("`([^`]+)`", self.heading)

    @property
    def raised(self) -> type[BaseException]:
        """The class with which the entry begins, or any."""
        found = _CLASS.match(self.body.strip())
        if found is None:
            return Exception
        name = found[1]
        return getattr(gradkit, name, None) or getattr(builtins, name)

    @property
    def blocks(self) -> list[str]:
        """Its Python."""
        return re.findall(r"(?s)```python\n(.*?)```", self.body)


def entries(text: str) -> list[Entry]:
    """Return the sections of a page, each headed by messages."""
    sections = re.split(r"(?m)^## (.*)$", text)
    pairs = zip(sections[1::2], sections[2::2], strict=True)
    return [Entry(heading, body) for heading, body in pairs]


def marked(block: str) -> dict[ast.stmt, str]:
    """Return the statements of a block that are marked, and how."""
    lines = block.splitlines()
    found: dict[ast.stmt, str] = {}
    for statement in ast.parse(block).body:
        for line in lines[statement.lineno - 1 : statement.end_lineno]:
            if mark := _MARK.search(line):
                found[statement] = mark[1]
    return found


def after_the_mark(block: str) -> list[ast.AST]:
    """Return the calls in a block that stand below its last marked statement."""
    ends = [statement.end_lineno or 0 for statement in marked(block)]
    return [
        node
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and node.lineno > max(ends, default=0)
    ]


@dataclass
class Page:
    """Runs the blocks of a page, and keeps the texts that have come."""

    entries: list[Entry]
    given: set[str] = field(default_factory=set)

    @contextmanager
    def expected(self, index: int, kind: str) -> Iterator[None]:
        """Expect what an entry says."""
        entry = self.entries[index]
        match = "|".join(map(re.escape, entry.texts))
        if kind == "warns":
            with pytest.warns(entry.raised, match=match) as warned:
                yield
            said = " ".join(str(one.message) for one in warned)
        else:
            with pytest.raises(entry.raised, match=match) as caught:
                yield
            said = str(caught.value)
        given = {text for text in entry.texts if text in said}
        self.given |= set(entry.texts) if "` or `" in entry.heading else given

    def evaluate(self, example: Example) -> None:
        """Run a block, in which marked statements have to raise or warn."""
        block = str(example.parsed)
        index = next((i for i, one in enumerate(self.entries) if block in one.blocks), None)
        module = ast.parse(block)
        if index is not None:
            kinds = {one.lineno: kind for one, kind in marked(block).items()}
            module.body = [
                _wrapped(one, index, kinds[one.lineno]) if one.lineno in kinds else one
                for one in module.body
            ]
        example.namespace["_expected"] = self.expected
        code = compile(ast.fix_missing_locations(module), example.path, "exec", dont_inherit=True)
        exec(code, example.namespace)


def _wrapped(statement: ast.stmt, index: int, kind: str) -> ast.stmt:
    """Return a statement inside `with _expected(...)`."""
    outer = ast.parse(f"with _expected({index}, {kind!r}): pass").body[0]
    assert isinstance(outer, ast.With)
    outer.body = [statement]
    return outer


def parsed(path: str, page: Page) -> Document:
    """Return the document, whose blocks the page runs."""
    return Document.parse(path, CodeBlockParser("python", page.evaluate))
