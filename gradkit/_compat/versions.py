"""The versions that gradkit needs, and since which release of torch a defect is mended."""

from __future__ import annotations

import re
import warnings
from typing import TypeAlias

from gradkit.errors import GradkitWarning

Release: TypeAlias = tuple[int, int]

FLOORS: dict[str, Release] = {"torch": (2, 11), "optree": (0, 14)}  # as in pyproject.toml
NEWEST: Release = (2, 15)  # the newest torch that all tests were run on

# The first release that computes these rightly: `python -m gradkit` tries every defect.
MENDED: dict[str, Release] = {}


def require(package: str, version: str | None) -> None:
    """Raise if a package that gradkit needs is missing (None) or too old."""
    floor = FLOORS[package]
    if version is None or release(version) < floor:
        needed = f"{package}>={floor[0]}.{floor[1]}"
        got = "is missing" if version is None else f"is {version}"
        raise ImportError(f"gradkit needs {needed}; {package} {got}. pip install '{needed}'")


def release(version: str) -> Release:
    """Return the first two numbers of a version."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def is_preview(version: str) -> bool:
    """Return whether a version comes before its final release: an alpha, a nightly, a candidate."""
    return re.match(r"\d+\.\d+[.\d]*(a|b|rc|\.?dev)", version) is not None


def warn_if_newer(version: str) -> None:
    """Warn if torch is newer than any that gradkit was run on."""
    if release(version) > NEWEST:
        warnings.warn(
            f"torch {version} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that this gradkit "
            "was run on. What older versions compute wrongly still raises; `python -m gradkit` "
            "shows what this one computes",
            GradkitWarning,
            stacklevel=2,
        )


def is_mended(defect: str, version: str) -> bool:
    """Return whether this torch computes rightly what an older one did not."""
    mended = MENDED.get(defect)
    if mended is None or release(version) == mended:
        return mended is not None and not is_preview(version)
    return release(version) > mended
