"""Fresh processes, for figures on which an earlier measurement would have left its mark."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).parents[1]


def python(
    *arguments: str, environment: Mapping[str, str] | None = None, seconds: float | None = None
) -> Any:
    """Run Python in a process of its own, and return the JSON that it prints last.

    Args:
        arguments: Its command line.
        environment: Variables to set for it.
        seconds: When to kill it, and the processes that it has started.

    Returns:
        What the JSON says.

    Raises:
        RuntimeError: The process failed.
        subprocess.TimeoutExpired: It was killed.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env=os.environ | dict(environment or {}),
        # What it starts is in its session: all of that can be killed at once.
        start_new_session=seconds is not None,
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except BaseException:  # Ctrl-C, too, which another session does not get
        if seconds is None:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{errors}")
    return json.loads(out.splitlines()[-1])


def call(
    function: str,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    **arguments: Any,
) -> Any:
    """Return what a function returns in a process of its own.

    Args:
        function: Where it is, as "module:function".
        environment: Variables to set for the process.
        seconds: As in `python`.
        arguments: Plain values, by name, for the function.

    Returns:
        Its result, which must be plain values, too.
    """
    command = ("-m", "benchmarks.fresh", function, json.dumps(arguments))
    return python(*command, environment=environment, seconds=seconds)


def ranks(function: str, count: int, /, **arguments: Any) -> Any:
    """Return what a function returns on the first of several ranks, each in a process of its own.

    Args:
        function: Where it is, as "module:function"; it takes `rank` and `ranks` besides.
        count: How many ranks there are.
        arguments: As in `call`.

    Returns:
        Its result on the first rank, in plain values.

    Raises:
        RuntimeError: The first rank failed; with what all ranks wrote to stderr.
    """
    arguments |= {"ranks": count}
    command = (sys.executable, "-m", "benchmarks.fresh", function)
    with contextlib.ExitStack() as files:
        # Files, not pipes: a full pipe that nobody reads would stop a rank.
        errors = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(1, count)]
        others = [
            subprocess.Popen(
                [*command, json.dumps(arguments | {"rank": rank})],
                stdout=subprocess.DEVNULL,
                stderr=error,
                cwd=_ROOT,
            )
            for rank, error in enumerate(errors, start=1)
        ]
        try:
            return call(function, rank=0, **arguments)
        except RuntimeError as first:
            # When ranks fail together, only one of them says why: the rest lost their connection.
            for other in others:
                _end(other)
            raise RuntimeError("\n".join([str(first), *map(_text, errors)])) from None
        finally:
            for other in others:
                _end(other)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process, and kill it after a minute."""
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def main(function: str, arguments: str) -> None:
    """Print the result of a function as JSON; this is the fresh process."""
    module, name = function.split(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
