"""Collects the wheels that a machine with a GPU lacks: `make gpu-wheels PYTHON_VERSION=3.12`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.versions import constraints

ROOT = Path(__file__).resolve().parents[1]
# What the tests and the benchmarks import, with their needs. BackPACK goes without torchvision, as
# in the Makefile.
NAMES = (
    "optree", "typing_extensions",
    "pytest", "iniconfig", "packaging", "pluggy", "Pygments",
    "pytest-xdist", "execnet", "pytest-cov", "coverage",
    "hypothesis", "sortedcontainers", "sybil", "expecttest",
    "torchjd", "quadprog", "qpsolvers",
    "opacus", "opt_einsum", "backpack-for-pytorch", "einops", "unfoldNd", "higher",
    "torchopt", "graphviz",
    "rich", "markdown-it-py", "mdurl",
)  # fmt: skip
# What the machine has: torch, which fits its driver, and what is large.
THERE = ("torch", "numpy", "scipy", "scikit-learn", "matplotlib")
# pip matches each number exactly.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
LIMIT_MIB = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect the wheels, and return the exit status: 1 if they are too large to take along."""
    parser = argparse.ArgumentParser(prog="python -m gpu.wheels", description=__doc__)
    parser.add_argument("--python-version", default="3.12", help="that of the other machine")
    parser.add_argument("--torch", default="2.11.0", help="that of the other machine, too")
    parser.add_argument("--output", type=Path, default=Path("wheels"), help="the folder")
    options = parser.parse_args(arguments)
    folder: Path = options.output
    for old in folder.glob("*.whl"):  # two versions of one package could not be installed
        old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    pins = folder / "constraints.txt"  # an older torch needs an older optree
    pins.write_text(constraints(options.torch, ""), encoding="utf-8")
    subprocess.run(command(options.python_version, folder), cwd=ROOT, check=True)
    wheels, files = size(folder.glob("*.whl")), size(tracked())
    print(f"{folder}: {wheels:.1f} MiB of wheels, to go with {files:.1f} MiB of files")
    if wheels > LIMIT_MIB:
        print(f"expected at most {LIMIT_MIB:.0f} MiB of wheels")
    return int(wheels > LIMIT_MIB)


def command(python_version: str, folder: Path) -> list[str]:
    """Return the command that downloads every wheel, in the version that is pinned."""
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    kind = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", *platforms]
    where = ["-c", str(folder.resolve() / "constraints.txt"), "-d", str(folder.resolve())]
    return [*pip, *kind, "--python-version", python_version, *where, *NAMES]


def tracked() -> list[Path]:
    """Return the files of the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def size(files: Iterable[Path]) -> float:
    """Return how many MiB files take."""
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
