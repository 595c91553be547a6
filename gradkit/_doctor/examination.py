"""The examination: every confusion on every device, and what is installed."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import torch

import gradkit
from gradkit._doctor.checks import Observation, first_line
from gradkit._doctor.confusions import CONFUSIONS, Confusion

# The packages of the extras in pyproject.toml that users install.
EXTRAS = {
    "plot": ("matplotlib", "rich"),
    "torchjd": ("torchjd",),
    "examples": ("scikit-learn", "rich", "matplotlib"),
}


@dataclass(frozen=True)
class Finding:
    """The checks of one confusion on one device, or the error that it raised."""

    device: str
    number: int
    title: str
    observation: Observation
    error: str | None

    @property
    def torch_equal(self) -> bool:
        """Whether torch did what is expected."""
        return self.error is None and all(check.equal for check in self.observation.torch)

    @property
    def gradkit_equal(self) -> bool:
        """Whether gradkit returned the right values."""
        return self.error is None and all(check.equal for check in self.observation.gradkit)

    @property
    def equal(self) -> bool:
        """Whether both did."""
        return self.torch_equal and self.gradkit_equal


@dataclass(frozen=True)
class Examination:
    """What is installed (None: a missing package), the names of the devices, and the findings."""

    versions: dict[str, str]
    devices: dict[str, str]
    extras: dict[str, dict[str, str | None]]
    findings: list[Finding]

    @property
    def equal(self) -> bool:
        """Whether everything was as expected."""
        return all(finding.equal for finding in self.findings)


def examine(devices: Sequence[torch.device]) -> Examination:
    """Run every confusion on each of these devices."""
    return Examination(
        versions=_versions(),
        devices={str(device): _name(device) for device in devices},
        extras={extra: {name: _version(name) for name in EXTRAS[extra]} for extra in EXTRAS},
        findings=[
            _run(number, confusion, device)
            for device in devices
            for number, confusion in enumerate(CONFUSIONS, start=1)
        ],
    )


def _run(number: int, confusion: Confusion, device: torch.device) -> Finding:
    error, observation = None, Observation([], [])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            observation = confusion.run(device)
    except Exception as raised:  # another version of torch may raise anything, anywhere
        error = f"{type(raised).__name__}: {first_line(raised)}"
    return Finding(str(device), number, confusion.title, observation, error)


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
    with suppress(Exception):  # not every kind of device has a name, and a broken one may raise
        return str(torch.get_device_module(device).get_device_name(device))
    return platform.machine() if device.type == "cpu" else device.type
