"""The versions that gradkit needs, and since which release of torch a defect is mended."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import TypeAlias

Release: TypeAlias = tuple[int, int]

FLOORS: dict[str, Release] = {"torch": (2, 11), "optree": (0, 14)}  # as in pyproject.toml
NEWEST: Release = (2, 15)  # the newest torch that all tests were run on

# The first release in which what is not swept is right; `_torch_bugs/swept.json` has the others.
MENDED: dict[str, Release] = {
    **dict.fromkeys(("CdistBackward0", "PdistBackward0"), (2, 14)),  # had no second derivative
    "DTensor": (2, 12),  # the second derivative, where a pass redistributes
}


def release(version: str) -> Release:
    """Return the first two numbers of a version."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def require(package: str, version: str | None) -> None:
    """Raise if a package that gradkit needs is missing (None) or too old."""
    floor = FLOORS[package]
    if version is None or release(version) < floor:
        needed = f"{package}>={floor[0]}.{floor[1]}"
        got = "it is not installed" if version is None else f"{version} is installed"
        raise ImportError(f"gradkit needs {needed}; {got}. pip install '{needed}'")


try:
    import torch
except ModuleNotFoundError:
    require("torch", None)
require("torch", torch.__version__)


def is_mended(defect: str, version: str = torch.__version__) -> bool:
    """Return whether a release of torch computes rightly what older ones did not."""
    mended = MENDED.get(defect)
    if mended is None:
        return False
    return release(version) > mended or (release(version) == mended and not _is_preview(version))


def _is_preview(version: str) -> bool:
    # An alpha, a nightly or a candidate of a release may be older than a change in it.
    return re.match(r"\d+\.\d+[.\d]*(a|b|rc|\.?dev)", version) is not None


def is_seen(
    releases: Sequence[str], swept: Sequence[str], version: str = torch.__version__
) -> bool:
    """Return whether a defect that some of the swept releases have is in this one."""
    # A release that was not swept has what the one before it has.
    until = [one for one in swept if release(one) <= release(version)]
    last = until[-2 if _is_preview(version) else -1 :]
    return not last or not set(last).isdisjoint(releases)


def is_untested(version: str = torch.__version__) -> bool:
    """Return whether torch is newer than any that gradkit was run on."""
    return release(version) > NEWEST


def warn_if_untested(version: str = torch.__version__) -> None:
    """Warn if torch is newer than any that gradkit was run on."""
    if is_untested(version):
        from gradkit.errors import GradkitWarning  # imports torch, too

        warnings.warn(
            f"torch {version} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that this gradkit "
            "was run on. What older versions compute wrongly still raises; `python -m gradkit` "
            "shows what this one does",
            GradkitWarning,
            stacklevel=2,
        )
