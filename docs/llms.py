"""The text of llms.txt: what gradkit is, and its pages, each with its first sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
# Pages that are an index of others: `api` of `api_func` and so on.
SPLIT = ("api", "errors")

_END = re.compile(r"(?<!et al\.)(?<=[.:])\s")


def pages(index: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the captions of the first page's list of pages, and the pages below each."""
    listed = index.partition("\n## Pages\n")[2].partition("\n## ")[0]
    parts = re.split(r"(?m)^\*\*(.*?)\.\*\*", listed)
    for caption, text in zip(parts[1::2], parts[2::2], strict=True):
        yield caption, re.findall(r"\((\w+)\.md\)", text)


def parts(page: str, source: str) -> list[str]:
    """Return the pages that an index has links to, in its order."""
    return list(dict.fromkeys(re.findall(rf"\(({page}_\w+)\.md\)", source)))


def text(docs: Path) -> str:
    """Return the text, as https://llmstxt.org has it."""
    index = (docs / "index.md").read_text(encoding="utf-8")
    lines = ["# gradkit", "", f"> {' '.join(_paragraphs(index)[0].split()).replace('**', '')}"]
    for caption, names in pages(index):
        lines += ["", f"## {caption}", ""]
        for name in names:
            lines.append(_line(docs, name))
            if name in SPLIT:
                source = (docs / f"{name}.md").read_text(encoding="utf-8")
                lines += [_line(docs, part) for part in parts(name, source)]
    return "\n".join([*lines, ""])


def _line(docs: Path, name: str) -> str:
    source = (docs / f"{name}.md").read_text(encoding="utf-8")
    title = source.partition("# ")[2].partition("\n")[0]
    return f"- [{title}]({name}.html): {_first_sentence(source)}"


def _paragraphs(source: str) -> list[str]:
    """Return what stands below the title of a page, without headings."""
    paragraphs = source.partition("# ")[2].split("\n\n")[1:]
    return [one for one in paragraphs if not one.startswith(("#", "`" * 3, "|", "!"))]


def _first_sentence(source: str) -> str:
    plain = _LINK.sub(r"\1", " ".join(_paragraphs(source)[0].split())).replace("**", "")
    return _END.split(plain, maxsplit=1)[0]
