"""The examination on paper: plain text, a table of rich, or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from shutil import get_terminal_size
from typing import Any

from gradkit._doctor._check import Check, text
from gradkit._doctor._examine import Examination, Finding

# Five columns need this width. In a narrower terminal, in a file or a pipe, text is easier to read.
WIDTH = 110


def as_json(examination: Examination) -> str:
    """Return the examination as JSON, indented."""
    return json.dumps(
        {
            "versions": examination.versions,
            "devices": examination.devices,
            "extras": examination.extras,
            "rows": [_row(finding) for finding in examination.findings],
            "equal": examination.equal,
        },
        indent=2,
    )


def show(examination: Examination) -> None:
    """Print the examination: as a table in a terminal that has room for it, if rich is there."""
    columns = get_terminal_size().columns
    try:
        from rich.console import Console
    except ImportError:
        columns = 0
    if not sys.stdout.isatty() or columns < WIDTH:
        print(as_text(examination))
        return
    console = Console(width=columns, highlight=False)
    console.print(_head(examination), markup=False)
    for device in examination.devices:
        console.print(_table(examination, device))
    console.print(_verdict(examination), markup=False)


def as_text(examination: Examination) -> str:
    """Return the examination as plain text."""
    lines = [_head(examination)]
    for device in examination.devices:
        lines += ["", f"On {device}"]
        for finding in _of(examination, device):
            lines += [f"{finding.number:3}. {finding.title}"]
            lines += [f"       torch    {line}" for line in _lines(finding.seen.torch)]
            lines += [f"       gradkit  {line}" for line in _lines(finding.seen.gradkit)]
            lines += [f"       {_word(finding)}"]
    return "\n".join([*lines, "", _verdict(examination)])


def _row(finding: Finding) -> dict[str, Any]:
    seen = asdict(finding.seen)
    return {
        "device": finding.device,
        "number": finding.number,
        "title": finding.title,
        "torch": seen["torch"],
        "gradkit": seen["gradkit"],
        "error": finding.error,
        "equal": finding.equal,
    }


def _head(examination: Examination) -> str:
    lines = [f"{name:9} {version}" for name, version in examination.versions.items()]
    lines += [f"{'device':9} {device}: {name}" for device, name in examination.devices.items()]
    for extra, packages in examination.extras.items():
        there = ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
        lines.append(f"{'extra':9} {extra}: {there}")
    return "\n".join(lines)


def _of(examination: Examination, device: str) -> list[Finding]:
    return [finding for finding in examination.findings if finding.device == device]


def _lines(checks: list[Check]) -> list[str]:
    return [_line(check) for check in checks]


def _line(check: Check) -> str:
    wanted = "" if check.equal else f" (expected: {text(check.right)})"
    return f"{check.what}: {text(check.got)}{wanted}"


def _word(finding: Finding) -> str:
    if finding.error is not None:
        return f"MISMATCH: it raised {finding.error}"
    wrong = [
        name
        for name, equal in (("torch", finding.torch_equal), ("gradkit", finding.gradkit_equal))
        if not equal
    ]
    return f"MISMATCH: {', '.join(wrong)}" if wrong else "as expected"


def _verdict(examination: Examination) -> str:
    findings = examination.findings
    good = sum(finding.equal for finding in findings)
    devices = ", ".join(examination.devices)
    return f"{good} of {len(findings)} are as they should be, on {devices}"


def _table(examination: Examination, device: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"On {device}", show_lines=True)
    for heading in ("", "What people say", "What torch does here", "What gradkit gives", "Verdict"):
        table.add_column(heading, overflow="fold")
    for finding in _of(examination, device):
        cells = [
            str(finding.number),
            finding.title,
            "\n".join(_lines(finding.seen.torch)),
            "\n".join(_lines(finding.seen.gradkit)),
        ]
        word = Text(_word(finding), style="green" if finding.equal else "bold red")
        table.add_row(*map(Text, cells), word)
    return table
