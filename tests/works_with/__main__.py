"""Try libraries: `python -m tests.works_with --only "einops peft"`, outside of CI.

Each is installed, with what it needs, in a temporary environment that sees the project's torch
(`torch` is pinned, so that no other is installed), and its program runs there. What came of it is
written into `results.json`, and from there into `docs/works_with.md`. The exit status is 1 if a
result is worse than the one that was there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import site
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from tests.works_with import _page

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "results.json"
SECONDS_TO_INSTALL, SECONDS_TO_RUN = 900, 600


def names() -> list[str]:
    """Return the names of the programs, one for each library."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem[0] != "_")


def tried(name: str, folder: Path) -> dict[str, Any]:
    """Install a library in a new environment, run its program, and return what came of both."""
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "package": _page.constant(name, "PIP").split()[0].partition("==")[0],
    }
    python = environment(folder / name)
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
         "--disable-pip-version-check", "--prefer-binary", "--no-compile",
         "-c", str(constraint(folder)), *_page.constant(name, "PIP").split()],
        capture_output=True, text=True, timeout=SECONDS_TO_INSTALL, check=False,
    )  # fmt: skip
    if installed.returncode:
        lines = [line for line in installed.stderr.splitlines() if "rror: " in line]
        return result | {"fails": f"does not install: {why(lines)}"}
    result["version"] = installed_version(python, result["package"])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-W", "ignore", "-m", "tests.works_with._one", name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT,
                             timeout=SECONDS_TO_RUN, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return result | {"fails": f"took longer than {SECONDS_TO_RUN} seconds"}
    lines = run.stdout.splitlines()
    outcomes = [json.loads(line[8:]) for line in lines if line.startswith("OUTCOME ")]
    if run.returncode:
        result["fails"] = f"does not run: {why(run.stderr.strip().splitlines())}"
    return result | {"outcomes": outcomes}


def why(lines: list[str]) -> str:
    """Return the last line of what was said, without the paths of this machine."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "for no reason given")
    return " ".join(word if "/" not in word else "..." for word in last[:200].split())


def environment(folder: Path) -> Path:
    """Return the Python of an environment that sees what the project's has."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "project.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def constraint(folder: Path) -> Path:
    """Return a file that keeps torch, and what gradkit stands on, as they are."""
    path = folder / "constraints.txt"
    lines = (f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "optree"))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def installed_version(python: Path, package: str) -> str:
    """Return the version of a package in an environment."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    paths = [str(packages), *site.getsitepackages()]
    plain = package.lower().replace("_", "-")
    versions = [
        one.version for one in distributions(path=paths)
        if one.metadata["Name"].lower().replace("_", "-") == plain
    ]  # fmt: skip
    return versions[0] if versions else "?"


def worse(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Return what was right in the old result, and is not in the new one."""
    was = {one["what"] for one in old.get("outcomes", []) if one["gradkit"] == "right"}
    now = {one["what"]: one["gradkit"] for one in new.get("outcomes", [])}
    return [f"{what}: {now[what]}" for what in sorted(was & now.keys()) if now[what] != "right"]


def main() -> int:
    """Try the libraries that are asked for, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of programs; all without it")
    parser.add_argument("--environments", type=Path, help="a folder in which they are kept")
    asked = parser.parse_args()
    chosen = asked.only.split() or names()
    if unknown := sorted({*chosen} - {*names()}):
        parser.error(f"no program for {', '.join(unknown)}: there are {', '.join(names())}")
    was_worse = False
    for name in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            result = tried(name, asked.environments or Path(temporary))
        results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        lost = worse(result, results.get(name, {}))
        was_worse = was_worse or bool(lost)
        results[name] = result
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(_page.row(name, result), *(f"  WORSE: {line}" for line in lost), sep="\n", flush=True)
    _page.write(json.loads(RESULTS.read_text(encoding="utf-8")))
    return int(was_worse)


if __name__ == "__main__":
    sys.exit(main())
