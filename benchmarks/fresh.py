"""Fresh processes, for figures on which an earlier measurement would have left its mark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def python(*arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run Python in a process of its own, and return the JSON that it prints last.

    Args:
        arguments: Its command line.
        environment: Variables to set for it.

    Returns:
        What the JSON says.

    Raises:
        RuntimeError: The process failed.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=os.environ | dict(environment or {}),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def call(function: str, environment: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """Return what a function returns in a process of its own.

    Args:
        function: Where it is, as "module:function".
        environment: Variables to set for the process.
        arguments: Plain values, by name, for the function.

    Returns:
        Its result, which must be plain values, too.
    """
    command = ("-m", "benchmarks.fresh", function, json.dumps(arguments))
    return python(*command, environment=environment)


def ranks(function: str, count: int, /, **arguments: Any) -> Any:
    """Return what a function returns on the first of several ranks, each in a process of its own.

    Args:
        function: Where it is, as "module:function"; it takes `rank` and `ranks` besides.
        count: How many ranks there are.
        arguments: As in `call`.

    Returns:
        Its result on the first rank, in plain values.
    """
    arguments |= {"ranks": count}
    command = (sys.executable, "-m", "benchmarks.fresh", function)
    others = [
        subprocess.Popen(
            [*command, json.dumps(arguments | {"rank": rank})], stdout=subprocess.DEVNULL, cwd=_ROOT
        )
        for rank in range(1, count)
    ]
    try:
        return call(function, rank=0, **arguments)
    finally:
        for other in others:
            try:
                other.wait(timeout=60)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


def main(function: str, arguments: str) -> None:
    """Print the result of a function as JSON; this is the fresh process."""
    module, name = function.split(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
