"""A command with a time limit: what it prints is in a file, with its outcome on the last line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
GRACE = 15  # seconds in which an interrupted command may say how far it came
LARGEST = 15 << 20  # bytes of a log, of which 1 MiB is the start
OUTCOME = "outcome: "


def run(
    command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> str:
    """Return how a command ended: "passed", "failed (exit status 1)" or "out of time (540 s)"."""
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        print("$", *command, file=file, flush=True)
        status = _run(command, file, max(seconds, 0), os.environ | dict(environment or {}))
    outcome = "passed" if status == 0 else f"failed (exit status {status})"
    if status is None:
        outcome = f"out of time ({seconds:.0f} s)"
    _shorten(log)
    with log.open("a", encoding="utf-8") as file:
        print(f"\n{OUTCOME}{outcome}; {time.monotonic() - began:.0f} s", file=file)
    return outcome


def _run(
    command: Sequence[str], file: IO[str], seconds: float, environment: Mapping[str, str]
) -> int | None:
    """Return the exit status; None if it ran out of time. Nothing that it started is left."""
    # A process group, which can be killed whole; not a session, which would outlive the terminal.
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _shorten(log: Path) -> None:
    """Leave out the middle of a log that is too long."""
    content = log.read_bytes()
    if len(content) > LARGEST:
        start, end = content[: 1 << 20], content[(1 << 20) - LARGEST :]
        log.write_bytes(start + b"\n[...]\n" + end)
