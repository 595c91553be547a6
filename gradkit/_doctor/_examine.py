"""The examination: every confusion on every device, and what there is to know of the machine."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import torch

import gradkit
from gradkit._doctor._check import Seen, first_line
from gradkit._doctor._confusions import CONFUSIONS, Confusion

# What the extras of pyproject.toml add to what users run.
EXTRAS = {
    "plot": ("matplotlib", "rich"),
    "torchjd": ("torchjd",),
    "examples": ("scikit-learn", "rich", "matplotlib"),
}


@dataclass(frozen=True)
class Finding:
    """How one confusion came out on one device.

    Attributes:
        device: Where it ran.
        number: Its number in docs/confusions.md.
        title: What people say, or do.
        seen: What torch did, and what gradkit gave; nothing if there was an error.
        error: What it raised where it should not have, or None.
    """

    device: str
    number: int
    title: str
    seen: Seen
    error: str | None

    @property
    def torch_equal(self) -> bool:
        """Whether torch did what is expected of it."""
        return self.error is None and all(check.equal for check in self.seen.torch)

    @property
    def gradkit_equal(self) -> bool:
        """Whether gradkit gave the right values."""
        return self.error is None and all(check.equal for check in self.seen.gradkit)

    @property
    def equal(self) -> bool:
        """Whether both were as they should be."""
        return self.torch_equal and self.gradkit_equal


@dataclass(frozen=True)
class Examination:
    """All that the doctor has to say.

    Attributes:
        versions: Of gradkit, what it is made with, Python, and the system.
        devices: The devices, and what their makers call them.
        extras: By extra, the version of each of its packages, None where it is not there.
        findings: How the confusions came out.
    """

    versions: dict[str, str]
    devices: dict[str, str]
    extras: dict[str, dict[str, str | None]]
    findings: list[Finding]

    @property
    def equal(self) -> bool:
        """Whether everything was as it should be."""
        return all(finding.equal for finding in self.findings)


def examine(devices: Sequence[torch.device]) -> Examination:
    """Try out every confusion on each of these devices."""
    return Examination(
        versions=_versions(),
        devices={str(device): _name(device) for device in devices},
        extras={extra: {name: _version(name) for name in EXTRAS[extra]} for extra in EXTRAS},
        findings=[
            _try(number, confusion, device)
            for device in devices
            for number, confusion in enumerate(CONFUSIONS, start=1)
        ],
    )


def all_devices() -> list[torch.device]:
    """Return the CPU, and every accelerator that torch can use here."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
    return found


def _try(number: int, confusion: Confusion, device: torch.device) -> Finding:
    error, seen = None, Seen([], [])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = confusion.run(device)
    except Exception as raised:  # a torch that behaves otherwise may raise anything, anywhere
        error = f"{type(raised).__name__}: {first_line(raised)}"
    return Finding(str(device), number, confusion.title, seen, error)


def _versions() -> dict[str, str]:
    return {
        "gradkit": gradkit.__version__,
        "torch": torch.__version__,
        "optree": _version("optree") or "unknown",
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _name(device: torch.device) -> str:
    with suppress(Exception):  # not every kind of device can say it, and a broken one may raise
        return str(torch.get_device_module(device).get_device_name(device))
    return platform.machine() if device.type == "cpu" else device.type
