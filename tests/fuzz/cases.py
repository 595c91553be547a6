"""What a number stands for: a random program, and what it has that gradkit may refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor, nn

from gradkit import GradkitError
from tests.strategies import HOOKLESS, WRITING, Graph, Operation, Program, build

SCALARS = ("sum", "mean", "squares", "dot", "one")
WRITTEN = "written in place"
HOOKED = "that no hook has changed"  # of a gradient that is differentiated
CPU = torch.device("cpu")


class Refused(Exception):  # noqa: N818
    """Gradkit has raised, for a reason that the program has."""


@dataclass(frozen=True)
class Op:
    """An operation that draws on more than torch's own, and what gradkit may say of it."""

    apply: Operation
    refusals: tuple[str, ...] = ()
    second: tuple[str, ...] = ()  # of its second derivative
    twin: Operation | None = None  # the same function, of torch's own operations
    on_leaf: bool = False  # its second value is a leaf
    module: nn.Module | None = None  # which keeps something
    restored: bool = False  # what the module keeps is as it was, after a call that returns


@dataclass(frozen=True)
class Case:
    """A program that builds the same graph each time."""

    program: Program
    dtype: torch.dtype
    device: torch.device = CPU
    ops: Mapping[str, Op] = field(default_factory=dict)

    def build(self, leaves: Sequence[Tensor] | None = None) -> Graph:
        others = {name: op.apply for name, op in self.ops.items()}
        return build(self.program, self.device, self.dtype, leaves, others)

    def twin(self) -> Case:
        """The same program in torch's own operations, without code of a user's in a pass."""
        ops = {name: Op(op.twin or op.apply) for name, op in self.ops.items()}
        return replace(self, ops=ops)

    def present(self) -> set[str]:
        return {name for name, _, _ in self.program.ops}

    def is_clean(self) -> bool:
        """Whether no code of a user's runs in a pass."""
        return not self.program.leaf_hooks and self.present() <= set(HOOKLESS) - {"halve"}

    def reasons(self, *, second: bool = False) -> set[str]:
        """The only texts with which gradkit may refuse the program: none, if it has nothing."""
        ops = [self.ops[name] for name in self.present() & self.ops.keys()]
        written = {WRITTEN} if self.present() & set(WRITING) else set()
        if second and (self.program.leaf_hooks or self.present() & {"double_hook", *WRITING}):
            written.add(HOOKED)
        return written.union(*(op.refusals + (op.second if second else ()) for op in ops))


@contextmanager
def may_refuse(reasons: set[str]) -> Iterator[None]:
    """Tell a refusal that has one of these reasons from one that has none, which is wrong."""
    try:
        yield
    except GradkitError as error:
        reason = next((reason for reason in sorted(reasons) if reason in str(error)), None)
        if reason is None:
            raise
        raise Refused(f"{type(error).__name__}: {reason}") from error


def draw(
    rng: Random,
    ops: Sequence[str] = HOOKLESS,
    *,
    more: Mapping[str, Op] | None = None,
    losses: Sequence[str] = SCALARS,
    leaf_hooks: bool = False,
    most: int = 12,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
) -> Case:
    """Draw a program; half of its operations are `more`, if there are any."""
    more = more or {}
    seed = rng.randrange(1 << 16)
    leaves = tuple(rng.choices(("plain", "transposed", "strided"), k=rng.randint(1, 4)))

    met: set[str] = set()

    def op() -> tuple[str, int, int]:
        name = rng.choice(sorted(more) if more and rng.random() < 0.5 else ops)
        if (
            name in met and name in more and more[name].module is not None
        ):  # its state would have carried over
            name = rng.choice(ops)
        met.add(name)
        on_leaf = name in more and more[name].on_leaf
        return name, rng.randrange(31), rng.randrange(len(leaves) if on_leaf else 31)

    program = Program(
        seed=seed,
        leaves=leaves,
        ops=tuple(op() for _ in range(rng.randint(1 if more else 0, most))),
        losses=tuple((rng.choice(losses), rng.randrange(31)) for _ in range(rng.randint(1, 4))),
        leaf_hooks=tuple(rng.randrange(4) for _ in range(rng.randint(0, 2))) if leaf_hooks else (),
    )
    return Case(program, rng.choice(dtypes), ops=more)
