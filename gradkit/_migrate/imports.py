"""Where `import gradkit` goes, and under which name a program has it already."""

from __future__ import annotations

import ast

IMPORTS = (ast.Import, ast.ImportFrom)


def imported_as(tree: ast.Module) -> str | None:
    """Return the name of gradkit in a module, or None if it is not imported as a whole."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.name == "gradkit":
                    return alias.asname or alias.name
    return None


def line_of_last_import(tree: ast.Module) -> int:
    """Return the last line of the docstring and the imports at the top of a module; 0 if none."""
    last = 0
    for index, statement in enumerate(tree.body):
        docstring = index == 0 and isinstance(statement, ast.Expr)
        if not ((docstring and ast.get_docstring(tree) is not None) or _imports(statement)):
            break
        last = statement.end_lineno or statement.lineno
    return last


def _imports(statement: ast.stmt) -> bool:
    """Return whether a statement only imports: also in `try` and `if TYPE_CHECKING`."""
    if isinstance(statement, ast.If | ast.Try):
        handlers = statement.handlers if isinstance(statement, ast.Try) else []
        inner = [*statement.body, *statement.orelse, *(s for h in handlers for s in h.body)]
        return isinstance(statement.body[0], IMPORTS) and all(
            isinstance(part, (*IMPORTS, ast.Pass, ast.Assign)) for part in inner
        )
    return isinstance(statement, IMPORTS)
