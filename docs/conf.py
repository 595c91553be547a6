"""How the documentation is built: `make docs`, with warnings as errors and without a network."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import gradkit

sys.path.append(str(Path(__file__).parent))
import llms
import notebooks
import signatures

project = "gradkit"
author = "the gradkit authors"
copyright = "the gradkit authors"
release = version = gradkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"gradkit {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_heading_anchors = 3

# A name in single backticks is code, in docstrings as in Markdown.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
# The docstrings say more than the types do, and the overloads would fill a page.
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]


def _keep_prose(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keep napoleon from taking the words before a colon for a type."""
    firsts = [0] if what in {"attribute", "property"} else []
    firsts += [i + 1 for i, line in enumerate(lines) if line.strip() in {"Returns:", "Yields:"}]
    for i in firsts:
        lines[i] = lines[i].replace(": ", " -- ", 1)


def _docstring_of(name: str) -> str:
    """Return the directive for a name of the reference; a method stands with its class."""
    value = signatures.find(name)
    if inspect.isfunction(value):
        above = signatures.find(name.rpartition(".")[0])
        return "" if inspect.isclass(above) else f".. autofunction:: {name}\n\n"
    shown = [
        key
        for key, member in vars(value).items()
        if key[0] != "_" and (inspect.isfunction(member) or isinstance(member, property))
    ]
    return (
        f".. autoclass:: {name}()\n   :members: {', '.join(shown)}\n\n"
        if shown
        else (f".. autoclass:: {name}()\n\n")
    )


def _add_docstrings(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the docstrings below the lists of the reference, which a repository page has alone."""
    if page not in {path.stem for path in signatures.PAGES.values()}:
        return

    def followed(match: re.Match[str]) -> str:
        directives = "".join(map(_docstring_of, signatures.names(match[0])))
        return f"{match[0]}\n```{{eval-rst}}\n{directives}```\n"

    items = r"(?m)(?:^- `gradkit\..*\n(?:  .*\n)*)+"
    source[0] = re.sub(items, followed, source[0])
    if page == signatures.PAGES["errors"].stem:
        directive = ".. automodule:: gradkit.errors\n   :members:\n   :show-inheritance:\n"
        source[0] += f"\n```{{eval-rst}}\n{directive}```\n"


def _add_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the sidebar of the links on the first page, and on pages that are split into others."""
    lists = [("", llms.parts(page, source[0]))] if page in llms.SPLIT else []
    if page == "index":
        lists = list(llms.pages(source[0]))
    for caption, pages in lists:
        options = f":caption: {caption}\n:hidden:" if caption else ":hidden:"
        listed = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n{options}\n\n{listed}\n```\n"


def _break_names(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Let a long name in code break after an underscore; what is copied stays as it is."""
    body, literal = context.get("body"), r'(?<=<span class="pre">)[^<]+'
    if body:
        context["body"] = re.sub(literal, lambda match: match[0].replace("_", "_<wbr>"), body)


def _write_other_forms(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt, the pages each with its first sentence, and the notebooks."""
    if error is None:
        notebooks.write(Path(app.srcdir), Path(app.outdir) / "notebooks")
        out = Path(app.outdir) / "llms.txt"
        out.write_text(llms.text(Path(app.srcdir)), encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", _write_other_forms)
    app.connect("html-page-context", _break_names)
    app.connect("source-read", _add_toctrees)
    app.connect("source-read", _add_docstrings)
    app.connect("autodoc-process-docstring", _keep_prose, priority=1)
