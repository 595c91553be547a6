"""Runs the tests and the benchmarks on CUDA, in parts that each end in time: `make gpu`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu import environment, limited, summary

ROOT = environment.ROOT
ENVIRONMENT = ROOT / ".gpu"
SECONDS = 540.0  # of a part, the environment included: who calls may allow ten minutes
LIMIT = 100  # of a test; one that hangs is killed, with its process, and the others go on
SHARDS, BENCHES = 4, 2  # with versions.json and summary.md, eight files
# Of tests that each machine runs in a minute or two.
QUICK = ("tests/eager", "tests/tree", "tests/dotgrad", "tests/cuda", "tests/gpu")


@dataclass(frozen=True)
class Part:
    """A command with a time limit, and the name of its files: a log, or the JSON that it writes."""

    name: str
    command: tuple[str, ...]
    device: str
    writes_json: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, and return the exit status: 1 if a part did not pass."""
    began = time.monotonic()
    options = _parse(arguments)
    results: Path = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    wheels = sorted(options.wheels.resolve().glob("*.whl"))
    if not wheels:
        sys.exit(f"no wheels in {options.wheels}: collect them with `make gpu-wheels`")
    python = str(environment.make(ENVIRONMENT, wheels))
    has_cuda = _write_versions(python, results)
    parts = [*_parts(python, options.shard, options.bench)] if has_cuda else [*_smoke(python)]
    if not has_cuda:
        print(summary.NO_CUDA, flush=True)
    outcomes = []
    for part in parts:
        outcomes.append(_run(part, results, SECONDS - (time.monotonic() - began)))
        began = time.monotonic()
        (results / "summary.md").write_text(summary.text(results), encoding="utf-8")
    print(summary.text(results))
    return int(any(outcome != "passed" for outcome in outcomes))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="by gpu.wheels")
    parser.add_argument("--results", type=Path, default=Path("results"), help="a folder")
    parser.add_argument("--shard", help="2/4: this quarter of the tests, and nothing else")
    parser.add_argument("--bench", help="1/2: this half of the benchmarks, and nothing else")
    return parser.parse_args(arguments)


def _write_versions(python: str, results: Path) -> bool:
    """Write what the results hold for, and return whether there is a CUDA device."""
    run = [python, "-m", "gpu.versions"]
    text = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    (results / "versions.json").write_text(text, encoding="utf-8")
    return bool(json.loads(text)["devices"])


def _parts(python: str, shard: str | None, bench: str | None) -> Iterator[Part]:
    """Yield what runs on CUDA: one part of each that is asked for, or all."""
    everything = shard is None and bench is None
    shards = [f"{i}/{SHARDS}" for i in range(1, SHARDS + 1)] if everything else [shard]
    benches = [f"{i}/{BENCHES}" for i in range(1, BENCHES + 1)] if everything else [bench]
    for one in filter(None, shards):
        yield Part(_name("tests", one), _pytest(python, "--shard", one), "cuda")
    for one in filter(None, benches):
        command = python, "-m", "gpu.measure", "--device", "cuda", "--part", one
        yield Part(_name("benchmarks", one), command, "cuda", writes_json=True)


def _smoke(python: str) -> Iterator[Part]:
    """Yield what shows, without CUDA, that the environment is in order."""
    few = "-m", "not slow and not long and not processes", "--hypothesis-profile", "fast"
    yield Part("smoke", _pytest(python, *few, *QUICK), "cpu")
    command = python, "-m", "gpu.measure", "--device", "cpu", "--quick", "--only", "values"
    yield Part("benchmarks-smoke", command, "cpu", writes_json=True)


def _name(kind: str, part: str) -> str:
    return f"{kind}-{part.replace('/', '-of-')}"


def _pytest(python: str, *options: str) -> tuple[str, ...]:
    """Return the command that runs tests, with the name of each, to see where it was stopped."""
    workers = "-n", "auto", "--maxprocesses", "8", "--dist", "loadgroup"
    shown = "-v", "--tb=short", "--durations=15", "-p", "no:cacheprovider"
    return python, "-m", "pytest", *workers, *shown, "--limit", f"{LIMIT}", *options


def _run(part: Part, results: Path, seconds: float) -> str:
    """Run a part, print a line about it, and return its outcome."""
    command, log = part.command, results / f"{part.name}.log"
    seconds -= limited.GRACE
    if part.writes_json:
        output, log = results / f"{part.name}.json", ENVIRONMENT / log.name
        inside = f"{seconds - limited.GRACE:.0f}"  # so that it comes to writing
        command = *command, "--output", str(output), "--seconds", inside
    outcome = limited.run(command, log, seconds, {"GRADKIT_TEST_DEVICE": part.device})
    print(f"{part.name}: {outcome}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
