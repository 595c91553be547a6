"""Tries a wheel in an empty environment: its public names, and its types in a user's program.

    python release/try_wheel.py dist/gradkit-*.whl

The environment has the wheel; what gradkit needs it finds in the one that runs this.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from sysconfig import get_path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "release" / "user_program.py"


def main(wheel: Path) -> None:
    """Raise if anything of it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = environment(folder / "venv", wheel)
        shutil.copytree(ROOT / "tests", folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)  # pytest's options
        where = "import gradkit; print(gradkit.__file__)"
        found = subprocess.run(
            [python, "-c", where], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()
        if not Path(found).is_relative_to(folder):
            raise SystemExit(f"the wheel is not what is imported, but {found}")
        tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not processes"]
        subprocess.run([*tests, "tests/test_public.py"], cwd=folder, check=True)
        shutil.copy(PROGRAM, folder / "program.py")
        types = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
        subprocess.run([*types, "program.py"], cwd=folder, check=True)
        subprocess.run([python, "program.py"], cwd=folder, check=True)


def environment(folder: Path, wheel: Path) -> str:
    """Make an environment with the wheel, and return its Python."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    # Not that environment's own gradkit: a .pth file works in a site folder alone.
    (site / "needs.pth").write_text(get_path("purelib") + "\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)
    return str(folder / "bin" / "python")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
