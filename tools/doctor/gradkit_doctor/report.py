"""What is installed, and the programs of confusions.toml run on every device: the report.

Each of these programs checks what torch does against what it did when the page was written, and
what gradkit returns against the right value.
"""

from __future__ import annotations

import json
import math
import platform
import re
import tomllib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata, resources
from textwrap import shorten
from typing import Any, TypeAlias

import torch
from torch import Tensor

import gradkit

# The types of JSON. Tensors become nested lists, and numbers that are not finite strings.
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

CONFUSIONS: list[dict[str, str]] = tomllib.loads(
    resources.files("gradkit_doctor").joinpath("confusions.toml").read_text(encoding="utf-8")
)["confusion"]
_CHECK = re.compile(r"(torch|gradkit): (.+) => (.+) == (.+)")

# The packages of the extras in pyproject.toml that users install.
EXTRAS = {
    "plot": ("matplotlib", "rich"),
    "torchjd": ("torchjd",),
    "examples": ("scikit-learn", "rich", "matplotlib", "ase"),
}


@dataclass(frozen=True)
class Check:
    """A value and the expected one, as copies without tensors, and whether they are equal."""

    what: str
    got: JsonValue
    expected: JsonValue
    equal: bool


@dataclass(frozen=True)
class Finding:
    """The checks of one confusion on one device, or the error that it raised."""

    device: str
    number: int
    title: str
    torch: list[Check] = field(default_factory=list)
    gradkit: list[Check] = field(default_factory=list)
    error: str | None = None

    @property
    def mismatches(self) -> list[str]:
        """Which of the two, torch and gradkit, did not do what is expected."""
        both = {"torch": self.torch, "gradkit": self.gradkit}
        return [name for name, checks in both.items() if not all(check.equal for check in checks)]

    @property
    def equal(self) -> bool:
        """Whether both did."""
        return self.error is None and not self.mismatches

    def __str__(self) -> str:
        lines = [f"{self.number:3}. {self.title}"]
        for name, checks in (("torch", self.torch), ("gradkit", self.gradkit)):
            for one in checks:
                wrong = "" if one.equal else f" (expected: {text(one.expected)})"
                lines.append(f"       {name:8} {one.what}: {text(one.got)}{wrong}")
        problem = f"it raised {self.error}" if self.error else ", ".join(self.mismatches)
        return "\n".join([*lines, f"       {f'MISMATCH: {problem}' if problem else 'as expected'}"])


@dataclass(frozen=True)
class DoctorReport:
    """What is installed (None: a missing package), the names of the devices, and what was found."""

    versions: dict[str, str]
    devices: dict[str, str]
    extras: dict[str, dict[str, str | None]]
    findings: list[Finding]

    @property
    def equal(self) -> bool:
        """Whether everything was as expected."""
        return all(finding.equal for finding in self.findings)

    def as_json(self) -> str:
        """Return the report as JSON, indented."""
        rows = [asdict(finding) | {"equal": finding.equal} for finding in self.findings]
        installed = {"versions": self.versions, "devices": self.devices, "extras": self.extras}
        return json.dumps({**installed, "rows": rows, "equal": self.equal}, indent=2)

    def __str__(self) -> str:
        lines = [f"{name:9} {version}" for name, version in self.versions.items()]
        lines += [f"{'device':9} {device}: {name}" for device, name in self.devices.items()]
        for extra, packages in self.extras.items():
            installed = [f"{name} {version or 'missing'}" for name, version in packages.items()]
            lines.append(f"{'extra':9} {extra}: {', '.join(installed)}")
        for device in self.devices:
            lines += ["", f"On {device}: what torch does, and what gradkit returns"]
            lines += [str(finding) for finding in self.findings if finding.device == device]
        equal = [finding.equal for finding in self.findings]
        summary = f"{sum(equal)} of {len(equal)} confusions gave the expected values"
        return "\n".join([*lines, "", f"{summary}, on {', '.join(self.devices)}"])


def available_devices() -> list[torch.device]:
    """Return the CPU, and every accelerator that torch can use here."""
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        devices += [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
    return devices


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
    )


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _name(device: torch.device) -> str:
    with suppress(Exception):  # not every kind of device has a name, and a broken one may raise
        return str(torch.get_device_module(device).get_device_name(device))
    return platform.machine() if device.type == "cpu" else device.type


def _run(number: int, confusion: dict[str, str], device: torch.device) -> Finding:
    finding = Finding(str(device), number, confusion["title"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _run_program(confusion["program"], device, finding)
    except Exception as raised:  # another version of torch may raise anything, anywhere
        error = f"{type(raised).__name__}: {_first_line(raised)}"
        return Finding(finding.device, number, finding.title, error=error)
    return finding


def _run_program(program: str, device: torch.device, finding: Finding) -> None:
    def leaf(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device, requires_grad=True)

    names: dict[str, Any] = {"leaf": leaf, "w": leaf(1, 2), "error_of": error_of}
    names |= {"gradkit": gradkit, "torch": torch, "autograd": torch.autograd, "warnings": warnings}
    code: list[str] = []
    for line in program.splitlines():
        parts = _CHECK.fullmatch(line)
        if parts is None:
            code.append(line)
            continue
        exec("\n".join(code), names)
        code = []
        who, what, got, expected = parts.groups()
        getattr(finding, who).append(check(what, eval(got, names), eval(expected, names)))


def error_of(call: Callable[[], object], text: str) -> str:
    """Return the class of the error that a call raises, with `text` if its message contains it."""
    try:
        call()
    except Exception as error:
        shown = text if text in str(error) else _first_line(error)
        return f"{type(error).__name__}: {shown}"
    return "no error"


def _first_line(error: Exception) -> str:
    return shorten(str(error).split("\n", 1)[0], width=160, placeholder=" ...")


def check(what: str, got: Any, expected: Any) -> Check:
    """Compare a value with the expected one; tensors bit by bit."""
    return Check(what, json_value(got), json_value(expected), _same(got, expected))


def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        return got.dtype == expected.dtype and torch.equal(got, expected)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_same(got[k], expected[k]) for k in expected)
    return type(got) is type(expected) and bool(got == expected)


def json_value(value: Any) -> JsonValue:
    """Return a value in the types of JSON."""
    if isinstance(value, Tensor):
        return json_value(value.detach().tolist())
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def text(value: JsonValue) -> str:
    """Return a value as short text."""
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {text(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
