"""How the documentation is built: `make docs`, with warnings as errors and without a network."""

from sphinx.application import Sphinx

import gradkit

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


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _keep_prose, priority=1)
