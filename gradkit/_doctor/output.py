"""The examination as plain text, as a rich table, or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from shutil import get_terminal_size
from typing import Any

from gradkit._doctor.checks import Check, text
from gradkit._doctor.examination import Examination, Finding

# The five columns of the table need this width; elsewhere plain text is easier to read.
WIDTH = 110


def as_json(examination: Examination) -> str:
    """Return the examination as JSON, indented."""
    values = {
        "versions": examination.versions,
        "devices": examination.devices,
        "extras": examination.extras,
        "rows": [_row(finding) for finding in examination.findings],
        "equal": examination.equal,
    }
    return json.dumps(values, indent=2)


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "device": finding.device,
        "number": finding.number,
        "title": finding.title,
        **asdict(finding.observation),
        "error": finding.error,
        "equal": finding.equal,
    }


def show(examination: Examination) -> None:
    """Print the examination: as a table in a wide terminal if rich is installed, else as text."""
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
    console.print(_summary(examination), markup=False)


def as_text(examination: Examination) -> str:
    """Return the examination as plain text."""
    lines = [_head(examination)]
    for device in examination.devices:
        lines += ["", f"On {device}"]
        for finding in _of(examination, device):
            lines += [f"{finding.number:3}. {finding.title}"]
            lines += [f"       torch    {line}" for line in _lines(finding.observation.torch)]
            lines += [f"       gradkit  {line}" for line in _lines(finding.observation.gradkit)]
            lines += [f"       {_status(finding)}"]
    return "\n".join([*lines, "", _summary(examination)])


def _head(examination: Examination) -> str:
    lines = [f"{name:9} {version}" for name, version in examination.versions.items()]
    lines += [f"{'device':9} {device}: {name}" for device, name in examination.devices.items()]
    for extra, packages in examination.extras.items():
        installed = [f"{name} {version or 'missing'}" for name, version in packages.items()]
        lines.append(f"{'extra':9} {extra}: {', '.join(installed)}")
    return "\n".join(lines)


def _of(examination: Examination, device: str) -> list[Finding]:
    return [finding for finding in examination.findings if finding.device == device]


def _lines(checks: list[Check]) -> list[str]:
    return [
        f"{check.what}: {text(check.got)}"
        + ("" if check.equal else f" (expected: {text(check.expected)})")
        for check in checks
    ]


def _status(finding: Finding) -> str:
    if finding.equal:
        return "as expected"
    if finding.error is not None:
        return f"MISMATCH: it raised {finding.error}"
    both = {"torch": finding.torch_equal, "gradkit": finding.gradkit_equal}
    return f"MISMATCH: {', '.join(name for name, equal in both.items() if not equal)}"


def _summary(examination: Examination) -> str:
    findings = examination.findings
    good = sum(finding.equal for finding in findings)
    devices = ", ".join(examination.devices)
    return f"{good} of {len(findings)} confusions are as expected, on {devices}"


def _table(examination: Examination, device: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"On {device}", show_lines=True)
    for heading in ("", "What people say", "What torch does here", "What gradkit gives", "Result"):
        table.add_column(heading, overflow="fold")
    for finding in _of(examination, device):
        columns = finding.observation.torch, finding.observation.gradkit
        shown = ["\n".join(_lines(checks)) for checks in columns]
        cells = map(Text, [str(finding.number), finding.title, *shown])
        status = Text(_status(finding), style="green" if finding.equal else "bold red")
        table.add_row(*cells, status)
    return table
