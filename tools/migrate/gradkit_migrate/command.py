"""`gradkit-migrate`: reads files, shows or writes what is moved, says what is left."""

from __future__ import annotations

import argparse
import difflib
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradkit_migrate.migration import migrate

DESCRIPTION = """Move training loops from .grad to gradients that are values.

zero_grad, backward, clip_grad_norm_ and step become value_and_grads and step_. The diff is printed
to standard output. A loop that may mean something else when it is moved is left as it is, and
standard error says why, with the line, and what to do by hand."""
EPILOG = (
    "exit status: 0 if nothing is left, 1 if something is, or a file cannot be read, 2 if misused"
)
SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv", "env"}
ASSUMED = (
    "note: optimizers that come from elsewhere are taken for plain ones of torch.optim in one "
    "process; for DistributedDataParallel: gradkit.distributed.value_and_grads"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    options = _parse(arguments)
    files = [file for path in options.paths for file in _files(path)]
    results = [_migrate_file(file, write=options.write) for file in dict.fromkeys(files)]
    unread = results.count(None)
    moved, skipped = (sum(n) for n in zip((0, 0), *filter(None, results), strict=True))
    done = "moved" if options.write else "to move"
    counts = f"{_count(moved, 'training step')} {done}, {skipped} left"
    if unread:
        counts += f", {_count(unread, 'file')} not read"
    _say(f"{_count(len(results), 'file')}: {counts}")
    if moved:
        _say(ASSUMED)
    return int(skipped + unread > 0)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gradkit-migrate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="path",
        help="a file, or a folder: all .py files below it, but for hidden folders and environments",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help="write the files; prints no diff")
    options = parser.parse_args(arguments)
    for path in options.paths:
        if not path.exists():
            parser.error(f"no such file or folder: {path}")
    return options


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or those of a folder in the order of their names."""
    if not path.is_dir():
        yield path
        return
    for inner in sorted(path.iterdir()):
        hidden = inner.name.startswith(".") or inner.name in SKIPPED or inner.is_symlink()
        if hidden or (inner / "pyvenv.cfg").exists():
            continue
        if inner.is_dir() or inner.suffix == ".py":
            yield from _files(inner)


def _migrate_file(file: Path, *, write: bool) -> tuple[int, int] | None:
    """Show or write what is moved in one file; return how many steps are moved, and left."""
    try:
        source = file.read_bytes()
        result = migrate(source)
    except SyntaxError as error:
        _say(f"{file}:{error.lineno or 1}: does not parse: {error.msg}")
        return None
    except (OSError, ValueError, RecursionError) as error:
        _say(f"{file}:1: left: {error}")
        return None
    for part in result.skipped:
        _say(f"{file}:{part.line}: left: {part.reason}\n    by hand: {part.by_hand}")
    if result.moved and write:
        file.write_bytes(result.source)
        print(f"wrote {file}")
    elif result.moved:
        sys.stdout.write(_diff(source, result.source, file))
    return result.moved, len(result.skipped)


def _diff(old: bytes, new: bytes, file: Path) -> str:
    """Return the unified diff, with the lines' own ends."""
    name = file.as_posix().lstrip("/")
    before, after = (_lines(text) for text in (old, new))
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    )


def _lines(source: bytes) -> list[str]:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)  # which the file declares
    return re.findall(r"[^\n]*\n|[^\n]+", source.decode(encoding))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
