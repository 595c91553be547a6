"""The signatures that the reference writes out: `python docs/signatures.py` brings them up to date.

Each room of the package has a page, `api_func.md` and so on. They are read in a repository, where
autodoc does not run; `tests/docs/test_api_page.py` compares them with `inspect.signature`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

MODULES = ("", "func", "meta", "tree", "dotgrad", "report", "distributed", "errors")
PAGES = {name: Path(__file__).with_name(f"api_{name or 'gradkit'}.md") for name in MODULES}

# An item of a list that begins with a name; a call has its signature in the same backticks.
ENTRY = re.compile(r"(?m)^- `(?P<name>gradkit[\w.]+)(?P<call>\([^`]*\))?`")


def module_of(name: str) -> object:
    """Return `gradkit`, or one of its modules."""
    return importlib.import_module(f"gradkit.{name}" if name else "gradkit")


def find(name: str) -> object:
    """Return what a full name, such as `gradkit.meta.Optimizer.init`, stands for."""
    parts = name.split(".")[1:]
    value = module_of("")
    for i, part in enumerate(parts):
        value = module_of(part) if i == 0 and part in MODULES else getattr(value, part)
    return value


def written(parameter: inspect.Parameter) -> str:
    """Return one parameter as it stands in a `def`, without its type."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    star = next((star for kind, star in stars.items() if kind is parameter.kind), "")
    text = star + parameter.name
    if parameter.default is inspect.Parameter.empty:
        return text
    default = parameter.default
    return f'{text}="{default}"' if isinstance(default, str) else f"{text}={default!r}"


def signature(name: str) -> str:
    """Return a call with its parameters and their defaults."""
    parameters = list(inspect.signature(find(name)).parameters.values())  # type: ignore[arg-type]
    texts: list[str] = []
    for parameter in parameters:
        if parameter.name == "self":
            continue
        keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if keyword and not any(text.startswith("*") for text in texts):
            texts.append("*")
        texts.append(written(parameter))
    return f"{name}({', '.join(texts)})"


def names(text: str) -> list[str]:
    """Return the names that head an item of a page."""
    return [match["name"] for match in ENTRY.finditer(text)]


def entries(text: str) -> dict[str, str]:
    """Return the signature that a page shows for each call."""
    return {
        match["name"]: match["name"] + match["call"]
        for match in ENTRY.finditer(text)
        if match["call"]
    }


def updated(text: str) -> str:
    """Return the page with the signatures that the package has."""

    def item(match: re.Match[str]) -> str:
        return f"- `{signature(match['name'])}`" if match["call"] else match[0]

    return ENTRY.sub(item, text)


if __name__ == "__main__":
    for page in PAGES.values():
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
