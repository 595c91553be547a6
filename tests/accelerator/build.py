"""The library of the emulated accelerator, compiled when it is first needed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("library")
# In the project's folder, and ignored by git: it stays, and `make clean` removes it.
CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "accelerator"
COMPILER = "g++"
TRIED = ("2.13",)  # releases of torch, of which it replaces private parts


class BuildError(Exception):
    """The compiler's first error."""


def why_not() -> str | None:
    """Return why there can be no emulated accelerator here; None if there can."""
    if torch.accelerator.is_available():
        return f"there is a real accelerator, {torch.accelerator.current_accelerator()}"
    if not torch.__version__.startswith(TRIED):
        return f"torch is {torch.__version__}; the emulation is for {', '.join(TRIED)}"
    if shutil.which(COMPILER) is None:
        return f"there is no compiler, {COMPILER}"
    return None


def library(sources: Path = SOURCES, cache: Path = CACHE) -> Path:
    """Return the library, compiled if these sources have not been for this torch."""
    root = Path(torch.__file__).parent
    include = root / "include"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fmax-errors=1"]
    options += [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    links = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    digest = hashlib.sha256("\0".join([torch.__version__, *options]).encode())
    for path in sorted(sources.iterdir()):
        digest.update(path.read_bytes())
    built = cache / f"{digest.hexdigest()[:16]}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        source = str(sources / "library.cpp")
        _compile([COMPILER, *options, source, "-o", str(unfinished), *links])
        unfinished.rename(built)  # at once, as several processes may build it
    return built


def _compile(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        errors = re.findall(r"(?m)^.*\berror: .*(?:\n +.*)*", run.stderr)
        raise BuildError(errors[0] if errors else run.stderr.strip()[-2000:])
