"""`python -m gradkit` runs the doctor, and `python -m gradkit migrate` rewrites training loops.

Short, as each is a package of its own: `gradkit_doctor` and `gradkit_migrate`, where installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from gradkit.errors import not_installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 2 also where it is not installed."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    migrates = given[:1] == ["migrate"]
    try:
        run = import_module("gradkit_migrate.command" if migrates else "gradkit_doctor.__main__")
    except ImportError:
        print(not_installed("migrate" if migrates else "doctor"), file=sys.stderr)
        return 2
    status: int = run.main(given[1:]) if migrates else run.main(given, "python -m gradkit")
    return status


if __name__ == "__main__":
    sys.exit(main())
