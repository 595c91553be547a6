"""An environment on top of this Python's packages, with the wheels that it lacks."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make(folder: Path, wheels: Sequence[Path]) -> Path:
    """Return the Python of an environment with these wheels, made anew if it has others."""
    python = folder / "bin" / "python"
    ready = folder / "ready"
    content = "\n".join([sys.executable, str(ROOT), *(wheel.name for wheel in wheels)])
    if not (ready.exists() and ready.read_text(encoding="utf-8") == content):
        _make(folder, python, wheels)
        ready.write_text(content, encoding="utf-8")
    return python


def _make(folder: Path, python: Path, wheels: Sequence[Path]) -> None:
    venv.create(folder, clear=True, symlinks=True)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    # Not `system_site_packages`: where this Python is itself of a virtual environment, those are
    # the packages of another. What is added so comes after the wheels; gradkit is the checkout.
    checkout = [str(ROOT), *(str(ROOT / "tools" / name) for name in ("doctor", "parity"))]
    lines = [*checkout, *(f"import site; site.addsitedir({path!r})" for path in _packages())]
    (Path(packages) / "beneath.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--disable-pip-version-check", "--no-cache-dir", "--no-index", "--no-deps"]
    subprocess.run([*pip, *options, "--ignore-installed", *map(str, wheels)], check=True)


def _packages() -> list[str]:
    """Return the folders of packages that this Python imports from."""
    return [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
