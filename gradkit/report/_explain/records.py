"""What an explanation is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal[
    "reached",
    "frozen",
    "constant loss",
    "not in the graph",
    "reentrant checkpoint",
    "sharded",
    "moved",
    "changed in place",
]


@dataclass(frozen=True)
class Verdict:
    """Whether a gradient of one loss arrives at one parameter.

    Attributes:
        status: `"reached"`, or why not: `"frozen"`, `"constant loss"`, `"not in the graph"`,
            `"reentrant checkpoint"`, `"sharded"`, `"moved"` (moved or cast since) or
            `"changed in place"`.
        why: The reason in a sentence; empty if it is reached.
    """

    status: Status
    why: str = ""


@dataclass(frozen=True)
class LossGraph:
    """The graph of one loss.

    Attributes:
        nodes: The number of its nodes. Those that accumulate into leaf tensors are not counted.
        own: How many of them no other loss's graph has.
        part: The index, in `parts`, of the part that it starts in; None for a constant.
        ends: Where its graph ends, if it reaches none of the params; else empty.
        notes: What prevents its differentiation, a sentence each.
    """

    nodes: int
    own: int
    part: int | None
    ends: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A part of the graphs: the nodes that exactly these losses reach. One loss: its head.

    Attributes:
        losses: The names of the losses.
        nodes: The number of nodes.
        params: The params that exactly these losses reach.
        below: The indices of the parts that it leads into.
    """

    losses: tuple[str, ...]
    nodes: int
    params: tuple[str, ...]
    below: tuple[int, ...]
