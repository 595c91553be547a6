"""Runs every confusion and defect on every device, and prints what came out: the report."""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from shutil import get_terminal_size
from typing import Any

import torch

import gradkit
from gradkit._compat.versions import is_untested
from gradkit._doctor.checks import Check, Finding, first_line, leaf, text
from gradkit._doctor.confusions import CONFUSIONS, Confusion
from gradkit._doctor.defects import DEFECTS, Trial

# The five columns of the table need this width; elsewhere plain text is easier to read.
_WIDTH = 110

# The packages of the extras in pyproject.toml that users install.
EXTRAS = {
    "plot": ("matplotlib", "rich"),
    "torchjd": ("torchjd",),
    "examples": ("scikit-learn", "rich", "matplotlib"),
}


@dataclass(frozen=True)
class DoctorReport:
    """What is installed (None: a missing package), the names of the devices, and what was found."""

    versions: dict[str, str]
    devices: dict[str, str]
    extras: dict[str, dict[str, str | None]]
    findings: list[Finding]  # what people say, tried
    trials: list[Trial]  # the defects of torch for which gradkit raises, tried

    @property
    def equal(self) -> bool:
        """Whether everything was as expected."""
        # On a torch that gradkit was not run on, it may raise for what that computes rightly.
        silent = [trial for trial in self.trials if trial.outcome == "wrong" and not trial.refused]
        trials = silent if is_untested() else [one for one in self.trials if not one.equal]
        return not trials and all(finding.equal for finding in self.findings)

    def on(self, device: str) -> list[Finding]:
        """Return the findings on a device."""
        return [finding for finding in self.findings if finding.device == device]


def doctor_report(devices: Sequence[torch.device]) -> DoctorReport:
    """Run every confusion on each of these devices."""
    return DoctorReport(
        versions={
            "gradkit": gradkit.__version__,
            "torch": torch.__version__,
            "optree": _version("optree") or "unknown",
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        devices={str(device): _name(device) for device in devices},
        extras={extra: {name: _version(name) for name in EXTRAS[extra]} for extra in EXTRAS},
        findings=[
            _run(number, confusion, device)
            for device in devices
            for number, confusion in enumerate(CONFUSIONS, start=1)
        ],
        trials=[defect.tried(device) for device in devices for defect in DEFECTS],
    )


def _run(number: int, confusion: Confusion, device: torch.device) -> Finding:
    finding = Finding(str(device), number, confusion.title)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            confusion.program(leaf(device, 1, 2), finding)
    except Exception as raised:  # another version of torch may raise anything, anywhere
        error = f"{type(raised).__name__}: {first_line(raised)}"
        return replace(finding, torch=[], gradkit=[], error=error)
    return finding


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _name(device: torch.device) -> str:
    with suppress(Exception):  # not every kind of device has a name, and a broken one may raise
        return str(torch.get_device_module(device).get_device_name(device))
    return platform.machine() if device.type == "cpu" else device.type


def as_json(report: DoctorReport) -> str:
    """Return the report as JSON, indented."""
    values = {
        "versions": report.versions,
        "devices": report.devices,
        "extras": report.extras,
        "rows": [asdict(finding) | {"equal": finding.equal} for finding in report.findings],
        "defects": [asdict(trial) | {"equal": trial.equal} for trial in report.trials],
        "equal": report.equal,
    }
    return json.dumps(values, indent=2)


def print_report(report: DoctorReport) -> None:
    """Print the report: as a table in a wide terminal if rich is installed, else as text."""
    columns = get_terminal_size().columns
    try:
        from rich.console import Console
    except ImportError:
        columns = 0
    if not sys.stdout.isatty() or columns < _WIDTH:
        print(as_text(report))
        return
    console = Console(width=columns, highlight=False)
    console.print(_head(report), markup=False)
    for device in report.devices:
        console.print(_table(device, report.on(device)))
    console.print(_summary(report), markup=False)


def as_text(report: DoctorReport) -> str:
    """Return the report as plain text."""
    lines = [_head(report)]
    for device in report.devices:
        lines += ["", f"On {device}"]
        for finding in report.on(device):
            lines += [f"{finding.number:3}. {finding.title}"]
            lines += [f"       torch    {line}" for line in _lines(finding.torch)]
            lines += [f"       gradkit  {line}" for line in _lines(finding.gradkit)]
            lines += [f"       {_status(finding)}"]
    return "\n".join([*lines, "", _summary(report)])


def _head(report: DoctorReport) -> str:
    lines = [f"{name:9} {version}" for name, version in report.versions.items()]
    lines += [f"{'device':9} {device}: {name}" for device, name in report.devices.items()]
    for extra, packages in report.extras.items():
        installed = [f"{name} {version or 'missing'}" for name, version in packages.items()]
        lines.append(f"{'extra':9} {extra}: {', '.join(installed)}")
    return "\n".join(lines)


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


def _summary(report: DoctorReport) -> str:
    equal = [finding.equal for finding in report.findings]
    devices = ", ".join(report.devices)
    lines = [f"{sum(equal)} of {len(equal)} confusions are as expected, on {devices}"]
    refused = [trial for trial in report.trials if trial.refused]
    wrong = [trial for trial in refused if trial.outcome == "wrong"]
    lines.append(
        f"gradkit raises for {len(refused)} silently wrong derivatives of torch: {len(wrong)} are "
        "wrong in this one"
    )
    for trial in report.trials:
        if not trial.equal:
            does = "raises" if trial.refused else "does not raise"
            lines.append(
                f"  on {trial.device}, {trial.derivative} through {trial.operation}: torch "
                f"{'raises' if trial.outcome == 'raises' else f'is {trial.outcome}'}, and gradkit "
                f"{does}"
            )
    return "\n".join(lines)


def _table(device: str, findings: list[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"On {device}", show_lines=True)
    for heading in ("", "What people say", "What torch does here", "What gradkit gives", "Result"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        shown = ["\n".join(_lines(checks)) for checks in (finding.torch, finding.gradkit)]
        cells = map(Text, [str(finding.number), finding.title, *shown])
        status = Text(_status(finding), style="green" if finding.equal else "bold red")
        table.add_row(*cells, status)
    return table
