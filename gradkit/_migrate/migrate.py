"""`migrate`: the source of one file with its loops moved."""

from __future__ import annotations

from dataclasses import dataclass

from gradkit._migrate.loops import find_loops
from gradkit._migrate.program import Program
from gradkit._migrate.reasons import SkippedLoop

MENTIONED = (b"backward", b"zero_grad")


@dataclass(frozen=True)
class Migrated:
    """One file after its loops have been moved."""

    source: bytes
    moved: int
    skipped: list[SkippedLoop]
    unseen: list[int]  # the lines of steps whose optimizer comes from another file


def migrate(source: bytes) -> Migrated:
    """Return a file's source with its loops moved, and what is left; needs libcst to move one."""
    program = Program(source)
    steps, skipped = find_loops(program) if any(word in source for word in MENTIONED) else ([], [])
    if not steps:
        return Migrated(source, 0, skipped, [])
    from gradkit._migrate.rewriting import rewrite

    new = rewrite(source, program, steps)
    Program(new)  # a SyntaxError here would be ours
    unseen = [step.step.line for step in steps if not step.is_made_here]
    return Migrated(new, len(steps), skipped, unseen)
