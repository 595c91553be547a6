"""The doctor: `python -m gradkit` shows what is installed, and runs twelve common confusions.

`python -m gradkit migrate` moves training loops; see `python -m gradkit migrate --help`.

Each confusion of docs/confusions.md runs on every device here: what torch does, what gradkit
gives, and whether both are as expected. So does each derivative of torch for which gradkit raises,
since it is silently wrong: whether it still is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from gradkit._core.devices import available_devices
from gradkit._doctor.run_and_print import as_json, doctor_report, print_report
from gradkit._migrate.command import main as migrate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the doctor, and return the exit status: 0 if everything is as expected, 1 if not."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["migrate"]:
        return migrate(given[1:])
    options = _parse(given)
    report = doctor_report(options.device or available_devices())
    try:
        if options.json:
            print(as_json(report))
        else:
            print_report(report)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read all it wants
        # Python flushes once more as it exits, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report.equal else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradkit",
        description=__doc__,
        epilog="exit status: 0 if everything is as expected, 1 if not",
    )
    parser.add_argument(
        "--device",
        nargs="+",
        type=_device,
        help="where to run, such as cpu or cuda:1; the default is every device here",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with every value and the expected one"
    )
    return parser.parse_args(arguments)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).split("\n", 1)[0]) from None


if __name__ == "__main__":
    sys.exit(main())
