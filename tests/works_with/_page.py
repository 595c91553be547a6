"""The page `docs/works_with.md`, written from the results."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "works_with.md"

HEAD = """\
# Works with

Libraries that people use, tried with gradkit. Each is installed in a temporary environment beside
torch {torch}, and a small program runs: the result of plain torch and that of gradkit are both
compared with an oracle, a difference quotient in float64 for a derivative, and the plain loop, bit
for bit, for steps; and once more inside `gradkit.checked()`. `make works-with ONLY="einops peft"`
runs some again; the programs are in `tests/works_with/`.

**Refused** is a `GradkitError` that names the reason. **Differs without gradkit** is a result of
the library and plain torch that is not the oracle's: a derivative that the library gets silently
wrong (the scripts in `findings/` are about such), an estimate by design, a point at which there is
no derivative, or a program that is random. "The same with it" means that gradkit does not see it;
`gradkit.func.check_grads(fn, x)` compares with differences. Where `hvp` is refused for a Function
whose forward takes `ctx`, two eager calls with `create_graph=True` may compute the same.

{counted}

| Library | Tried | Right | Otherwise |
|---|---|---|---|
"""

# What is said of a try in the table, by what torch gave and what gradkit gave.
_RAISES, _WRONG, _REFUSED = "raises", "wrong", "refused"


def write(results: dict[str, Any]) -> None:
    """Write the page."""
    PAGE.write_text(text(results), encoding="utf-8")


def text(results: dict[str, Any]) -> str:
    """Return the page that shows these results."""
    torch = max(result["torch"] for result in results.values()).partition("+")[0]
    tried = [result for result in results.values() if "fails" not in result]
    whole = [result for result in tried if not otherwise(result)]
    counted = (
        f"{len(results)} libraries; {len(tried)} could be run, and with {len(whole)} of these "
    )
    counted += "everything that was tried is right."
    head = HEAD.format(torch=torch, counted=counted)
    return head + "".join(row(name, results[name]) + "\n" for name in sorted(results))


def row(name: str, result: dict[str, Any]) -> str:
    """Return a row of the table."""
    label = f"{result['package'].partition('[')[0]} {result.get('version', '')}".strip()
    right = [one["what"] for one in result.get("outcomes", []) if is_right(one)]
    notes = [result["fails"]] if "fails" in result else []
    notes += otherwise(result)
    if note := constant(name, "NOTE"):
        notes.append(note)
    cells = (label, about(name), _grouped(right), "; ".join(notes))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def is_right(outcome: dict[str, str]) -> bool:
    """Return whether gradkit was right, inside of `checked()`, too."""
    return outcome["gradkit"] == outcome["checked"] == "right"


def otherwise(result: dict[str, Any]) -> list[str]:
    """Return what is to be said of the tries that were not right, those of one kind together."""
    kinds: dict[str, list[str]] = {}
    for one in result.get("outcomes", []):
        if not is_right(one):
            kinds.setdefault(_words(one), []).append(one["what"])
    return [f"{_grouped(what)}: {words}" for words, what in kinds.items()]


def _words(outcome: dict[str, str]) -> str:
    torch, ours, checked = outcome["torch"], outcome["gradkit"], outcome["checked"]
    if ours.startswith(_REFUSED):
        reason = _reason(ours)
        if torch.startswith(_WRONG):
            return f"**differs without gradkit**; refused ({reason})"
        if torch.startswith(_RAISES):
            return f"raises without gradkit, too; refused ({reason})"
        return f"refused ({reason})"
    if ours.startswith(_WRONG):
        if torch.startswith(_RAISES):
            return "**wrong**, where torch.func raises"
        if torch == "right":
            return "**wrong**"
        seen = "refused in `checked()`" if checked.startswith(_REFUSED) else "the same with it"
        seen = "right in `checked()`" if checked == "right" else seen
        return f"**differs without gradkit**; {seen}"
    if ours == "right":
        return f"right; in `checked()`: {_reason(checked)}"
    return "raises, without gradkit, too" if torch.startswith(_RAISES) else ours


def _reason(said: str) -> str:
    """Return what a refusal got, in few words."""
    got = re.search(r"got (.*)", said)
    words = got[1] if got else said.partition(": ")[2]
    words = re.split(r"[:;]| whose forward takes ctx| The derivative", words)[0].strip()
    return words if len(words) < 110 else words[:107].rsplit(" ", 1)[0] + " ..."


def _grouped(names: list[str]) -> str:
    """Return the names of tries, those of one part of a library together."""
    parts: dict[str, list[str]] = {}
    for name in names:
        part, _, what = name.rpartition(": ")
        parts.setdefault(part, []).append(what)
    by_tries: dict[tuple[str, ...], list[str]] = {}
    for part, tries in parts.items():
        by_tries.setdefault(tuple(tries), []).append(part)
    return "; ".join(
        (f"{', '.join(parts)} (" if parts != [""] else "") + ", ".join(tries)
        + (")" if parts != [""] else "")
        for tries, parts in by_tries.items()
    )  # fmt: skip


def about(name: str) -> str:
    """Return what a program tries, which its docstring says."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").split()).rstrip(".")


def constant(name: str, constant: str) -> str:
    """Return a constant of a program, whose library need not be installed."""
    for node in ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == constant:
            return str(ast.literal_eval(node.value))
    return ""
