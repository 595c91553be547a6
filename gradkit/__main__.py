"""The doctor: `python -m gradkit` tells what is installed, and tries out what people get wrong.

Each of the twelve confusions of docs/confusions.md runs on every device here: what torch does, what
gradkit gives, and whether both are as they should be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from gradkit._doctor._examine import all_devices, examine
from gradkit._doctor._show import as_json, show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the doctor.

    Args:
        arguments: The command line; None is the process's own.

    Returns:
        The exit status: 0 if all is as it should be, 1 if not.
    """
    options = _parse(arguments)
    examination = examine(options.device or all_devices())
    if options.json:
        print(as_json(examination))
    else:
        show(examination)
    return 0 if examination.equal else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradkit",
        description=__doc__,
        epilog="exit status: 0 if everything is as it should be, 1 if something is not",
    )
    parser.add_argument(
        "--device",
        nargs="+",
        type=_device,
        help="where to run, such as cpu or cuda:1; every device here if left out",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with all that was compared"
    )
    return parser.parse_args(arguments)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).split("\n", 1)[0]) from None


if __name__ == "__main__":
    sys.exit(main())
