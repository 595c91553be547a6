"""Run the program of one library, and print its outcomes as JSON: `python -m ..._one einops`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import warnings

import torch


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    program = importlib.import_module(f"tests.works_with.{name}")
    for outcome in program.tries():
        print("OUTCOME " + json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
