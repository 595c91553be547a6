"""`python -m gradkit` shows what is installed, and runs common mistakes about gradients.

So does `python -m gradkit_doctor`. `python -m gradkit migrate` rewrites training loops, where
gradkit-migrate is installed.

The twelve mistakes of docs/confusions.md run on every device here: the output shows what torch
does, what gradkit returns, and whether both are as expected.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from gradkit_doctor.report import available_devices, doctor_report


def main(arguments: Sequence[str] | None = None, command: str = "python -m gradkit_doctor") -> int:
    """Run the command, and return the exit status: 0 if everything is as expected, 1 if not."""
    options = _parser(command).parse_args(arguments)
    report = doctor_report(options.device or available_devices())
    try:
        print(report.as_json() if options.json else report)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read all it wants
        # Python flushes once more as it exits, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report.equal else 1


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command,
        description=__doc__,
        epilog="exit status: 0 if everything is as expected, 1 if not, 2 if misused",
    )
    where = "where to run, such as cpu or cuda:1; the default is every device here"
    parser.add_argument("--device", nargs="+", type=_device, help=where)
    help_json = "print JSON, with every value and the expected one"
    parser.add_argument("--json", action="store_true", help=help_json)
    return parser


def _device(name: str) -> torch.device:
    """Return a device that holds numbers here."""
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()
    except Exception:  # what torch raises depends on the kind of device
        allowed = " or ".join(map(str, available_devices()))
        raise argparse.ArgumentTypeError(f"{name} is not available, use {allowed}") from None
    return device


if __name__ == "__main__":
    sys.exit(main())
