"""Prints the device, its driver and the versions as JSON: `python -m gpu.versions`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "optree", "numpy", "scipy", "scikit-learn", "matplotlib", "pytest", "hypothesis", "torchjd",
    "opacus", "backpack-for-pytorch", "higher", "torchopt", "triton",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Return what the results hold for; "devices" is empty where there is no CUDA."""
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or output("git", "rev-parse", "HEAD"),
        "changed": bool(output("git", "status", "--porcelain", "--untracked-files=no")),
        "devices": [device(i) for i in range(torch.cuda.device_count())],
        "driver": (output(*smi) or "").partition("\n")[0] or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def device(index: int) -> dict[str, Any]:
    """Return what there is to say of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def output(*command: str) -> str | None:
    """Return what a command prints, or None if there is none such, or it fails."""
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(describe(), indent=1))
