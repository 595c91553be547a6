"""What the documents say is so: every Python block runs, and so does every docstring example.

The blocks of a page share a namespace, in order. They run on the CPU.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from sybil import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

import gradkit
from gradkit._compat.versions import is_mended
from tests.docs import marked, two_ranks
from tests.helpers import others_slow

pytestmark = pytest.mark.usefixtures("device")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
ROOMS = sorted([*(ROOT / "gradkit").rglob("*.py"), *ROOT.glob("tools/parity/*/*.py")])

# What may stand behind the three backticks. Only "python" runs; a "{...}" is a directive of MyST.
LANGUAGES = {"python", "diff", "text", "console", "bash", "toml", "svg"}
DIRECTIVES = {"{eval-rst}", "{toctree}", "{literalinclude}"}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(path: Path) -> list[str]:
    """Return what stands behind the opening fence of every block; written without sybil."""
    found: list[str] = []
    closing = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        fence = re.match(r"[\s>]*(`{3,}|~{3,})(.*)", line)
        if fence is None:
            continue
        if not closing:
            closing = fence[1]
            found.append(fence[2].strip())
        elif fence[1].startswith(closing) and not fence[2].strip():
            closing = ""
    assert not closing, f"{page_id(path)}: a block is not closed"
    return found


def parse(path: Path) -> Document:
    return Document.parse(str(path), CodeBlockParser("python", PythonEvaluator()))


def leave_process_group() -> None:
    """End what a page has not come to the end of, which the next one would find."""
    if dist.is_initialized():
        dist.destroy_process_group()


def skip_of_dtensors(name: str) -> None:
    """Skip what takes second derivatives over shards, which gradkit refuses on torch 2.11."""
    pages = {"docs/several_processes.md", "_make_functional.make_functional"}
    if name in pages and not is_mended("DTensor"):
        pytest.skip("torch gets second derivatives of DTensors wrong")


def run(document: Document) -> None:
    """Run the blocks of a page."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # a compiled layer is shared with other tests
    try:
        for example in document:
            example.evaluate()
    finally:
        # A class registered as a tree node keeps its module, and the graphs in it, alive.
        document.namespace.clear()
        leave_process_group()


# Of each, statements have to raise: they run with what they expect.
ERRORS = sorted((ROOT / "docs").glob("errors_*.md"))
RUN = [path for path in PAGES if path not in ERRORS]
IN_SECONDS = [path for path in RUN if path.name != "compile.md"]


@pytest.mark.parametrize("path", others_slow(RUN, IN_SECONDS), ids=page_id)
def test_python_blocks_run(path: Path) -> None:
    skip_of_dtensors(page_id(path))
    run(parse(path))


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_no_block_is_skipped(path: Path) -> None:
    kinds = fences(path)
    assert {kind.partition(" ")[0] for kind in kinds} <= LANGUAGES | DIRECTIVES
    assert len(list(parse(path))) == kinds.count("python")


def test_pages_have_blocks() -> None:
    assert sum(fences(path).count("python") for path in PAGES) > 50


OF_PAGE = {path: marked.entries(path.read_text(encoding="utf-8")) for path in ERRORS}
ENTRIES = [entry for entries in OF_PAGE.values() for entry in entries]
every_page_of_errors = pytest.mark.parametrize("path", ERRORS, ids=page_id)
every_entry = pytest.mark.parametrize(
    "entry",
    [entry for entry in ENTRIES if entry.heading not in two_ranks.ENDING],
    ids=lambda entry: entry.heading,
)


@every_page_of_errors
def test_every_text_on_a_page_of_errors_is_raised(path: Path) -> None:
    """So that a search for a text that somebody got ends there."""
    entries = OF_PAGE[path]
    page = marked.Page(entries)
    run(marked.parsed(str(path), page))
    heads = {text for entry in entries for text in entry.texts}
    apart = {text for entry in entries if entry.heading in two_ranks.ENDING for text in entry.texts}
    assert heads
    assert heads - page.given == apart


def test_a_text_heads_one_entry() -> None:
    """On all pages together."""
    texts = Counter(text for entry in ENTRIES for text in entry.texts)
    assert len(texts) > 200
    assert [text for text, times in texts.items() if times > 1] == []
    assert set(two_ranks.ENDING) <= {entry.heading for entry in ENTRIES}


def test_the_index_of_errors_has_every_page() -> None:
    index = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((errors_\w+\.md)\)", index)) == {path.name for path in ERRORS}


@every_entry
def test_a_statement_of_each_error_is_marked(entry: marked.Entry) -> None:
    assert entry.texts
    assert any(marked.marked(block) for block in entry.blocks)


# What it advises is another tool's: DeepSpeed's engine.
WITHOUT_A_CALL = "`whose step() does nothing`"


@every_entry
def test_each_error_has_a_call_that_works(entry: marked.Entry) -> None:
    """Below the call that raises there is another one, which runs with the page."""
    calls = [call for block in entry.blocks for call in marked.after_the_mark(block)]
    assert calls or entry.heading == WITHOUT_A_CALL


@pytest.mark.processes
@pytest.mark.parametrize(
    "heading",
    others_slow(
        two_ranks.ENDING,
        [
            "`Connection closed by peer` or `Connection reset by peer`",
            "`every rank of the group to take part`",
        ],
    ),
)
def test_errors_of_two_processes_are_what_is_raised(heading: str, tmp_path: Path) -> None:
    said = two_ranks.last_words(two_ranks.ENDING[heading], tmp_path)
    (entry,) = [entry for entry in ENTRIES if entry.heading == heading]
    assert any(text in said for text in entry.texts)


@every_page_of_errors
def test_code_on_a_page_of_errors_is_no_wider_than_the_column(path: Path) -> None:
    blocks = [str(block.parsed) for block in parse(path)]
    assert blocks
    assert [line for block in blocks for line in block.splitlines() if len(line) > 76] == []


Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def documented(node: ast.stmt | ast.Module) -> Iterator[Documented]:
    """Yield what may have a docstring: a module, and the classes and functions in it."""
    if isinstance(node, Documented):
        yield node
        for inner in node.body:
            yield from documented(inner)


def examples() -> list[doctest.DocTest]:
    """Return the example of every docstring in the package, read from the sources."""
    parser = doctest.DocTestParser()
    found: list[doctest.DocTest] = []
    for path in ROOMS:
        source = path.read_text(encoding="utf-8")
        for node in documented(ast.parse(source)) if ">>>" in source else ():
            text = ast.get_docstring(node)
            if text and ">>>" in text:
                name = f"{path.stem}.{getattr(node, 'name', '__doc__')}"
                line = node.body[0].lineno - 1
                found.append(parser.get_doctest(text, {}, name, str(path), line))
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_docstring_examples_run(example: doctest.DocTest) -> None:
    skip_of_dtensors(example.name)
    report: list[str] = []
    result = doctest.DocTestRunner().run(example, out=report.append)
    leave_process_group()
    assert result.failed == 0, "".join(report)


def public_functions() -> list[object]:
    names = [(gradkit, name) for name in gradkit.__all__]
    names += [(gradkit.tree, name) for name in gradkit.tree.__all__]
    return [value for room, name in names if inspect.isfunction(value := getattr(room, name))]


@pytest.mark.parametrize("function", public_functions(), ids=lambda function: function.__name__)
def test_public_functions_have_an_example(function: object) -> None:
    assert ">>>" in (inspect.getdoc(function) or "")
