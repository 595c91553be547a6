"""Random graphs: programs that Hypothesis draws, and that build the same graph each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import Halve, Scribble, written_on

SIZE = 3
Fresh: TypeAlias = Callable[..., Tensor]
# Of two values; the list is for what its hooks keep.
Operation: TypeAlias = Callable[[Tensor, Tensor, list[Tensor]], Tensor]


OPS = (
    "add", "mul", "sub", "tanh", "matmul", "transpose", "slice", "split", "unbind", "stack",
    "expand", "in_place", "in_place_view", "halve", "pass", "double_hook", "keep_hook", "relu",
    "index", "where", "cumsum", "reuse",
)  # fmt: skip
# What writes on a tensor that the engine may have captured: .backward() is the oracle here.
WRITING = ("scribble", "in_place_hook")
HOOKLESS = tuple(op for op in OPS if "hook" not in op)


@dataclass(frozen=True)
class Program:
    """What to build: leaves, operations on earlier values, and which values become losses."""

    seed: int
    leaves: tuple[str, ...]
    ops: tuple[tuple[str, int, int], ...]
    losses: tuple[tuple[str, int], ...]
    leaf_hooks: tuple[int, ...] = ()


@dataclass
class Graph:
    """What a program has built."""

    leaves: list[Tensor]
    values: list[Tensor]
    losses: list[Tensor]
    kept: list[Tensor] = field(default_factory=list)


def programs(
    *, ops: tuple[str, ...] = OPS, vector: bool = False, leaf_hooks: bool = True
) -> st.SearchStrategy[Program]:
    index = st.integers(0, 30)
    reductions = ("vector",) if vector else ("sum", "mean", "squares", "dot", "one")
    return st.builds(
        Program,
        seed=st.integers(0, 1 << 16),
        leaves=st.lists(
            st.sampled_from(("plain", "transposed", "strided")), min_size=1, max_size=4
        ).map(tuple),
        ops=st.lists(st.tuples(st.sampled_from(ops), index, index), max_size=12).map(tuple),
        losses=st.lists(st.tuples(st.sampled_from(reductions), index), min_size=1, max_size=4).map(
            tuple
        ),
        leaf_hooks=st.lists(st.integers(0, 3), max_size=2 if leaf_hooks else 0).map(tuple),
    )


def build(
    program: Program,
    device: torch.device,
    dtype: torch.dtype,
    leaves: Sequence[Tensor] | None = None,
    others: Mapping[str, Operation] | None = None,
) -> Graph:
    """Run a program, on leaves of its own or on these; `others` are operations besides OPS."""
    others = others or {}
    source = torch.Generator().manual_seed(program.seed)

    def fresh(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(device, dtype)

    graph = Graph([], [], [])
    for kind in program.leaves:
        if kind == "plain":
            leaf = fresh(SIZE, SIZE)
        elif kind == "transposed":
            leaf = fresh(SIZE, SIZE).t()
        else:
            leaf = fresh(SIZE, 2 * SIZE)[:, ::2]
        graph.leaves.append(leaf.detach())
    graph.leaves = (
        [leaf.requires_grad_() for leaf in graph.leaves] if leaves is None else list(leaves)
    )
    for which in program.leaf_hooks:
        graph.leaves[which % len(graph.leaves)].register_hook(times(3))
    graph.values = list(graph.leaves)
    for op, i, j in program.ops:
        a, b = graph.values[i % len(graph.values)], graph.values[j % len(graph.values)]
        new = others[op](a, b, graph.kept) if op in others else _apply(op, a, b, fresh, graph.kept)
        graph.values.append(new)
    for reduction, i in program.losses:
        graph.losses.append(_reduce(reduction, graph.values[i % len(graph.values)], fresh))
    return graph


def times(factor: float) -> Callable[[Tensor | None], Tensor | None]:
    """A hook; torch calls it with None where a gradient is undefined [D10]."""
    return lambda grad: None if grad is None else grad * factor


def double_in_place(grad: Tensor | None) -> Tensor | None:
    """A hook that writes on what it is given, and leaves what cannot be written on."""
    return written_on(grad).mul_(2) if writable(grad) else None


def writable(grad: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a gradient can be written on in place: an expanded one cannot."""
    return grad is not None and 0 not in grad.stride()


def _apply(op: str, a: Tensor, b: Tensor, fresh: Fresh, kept: list[Tensor]) -> Tensor:
    match op:
        case "add":
            return a + b
        case "mul":
            return a * b * 0.5
        case "sub":
            return a - b
        case "tanh":
            return torch.tanh(a)
        case "matmul":
            return a @ b * 0.3
        case "transpose":
            return a.t()
        case "slice":
            return torch.cat([a[:1], b[1:]])
        case "split":
            first, _ = torch.split(a, [1, SIZE - 1])
            return first + b
        case "unbind":
            return torch.stack(a.unbind(1)[::-1])
        case "stack":
            return torch.stack([a, b]).sum(0)
        case "expand":
            return a.mean(0, keepdim=True).expand(SIZE, SIZE)
        case "in_place":
            return a.clone().mul_(0.5).add_(b)
        case "in_place_view":
            copy = a.clone()
            copy[0].mul_(2)
            return copy
        case "halve":
            return Halve.apply(a, b)
        case "scribble":
            return Scribble.apply(a)
        case "pass":
            return a.view_as(a) + b.view_as(b)
        case "double_hook":
            new = a * 1.5
            new.register_hook(times(2))
            return new
        case "keep_hook":
            new = a + b
            new.register_hook(lambda grad: None if grad is None else kept.append(grad))
            return new
        case "in_place_hook":
            new = a + b
            new.register_hook(double_in_place)
            return new
        case "relu":
            return torch.relu(a)
        case "index":
            return a[[0, 0, 2]]
        case "where":
            return torch.where(a.detach() > 0, a, b)
        case "cumsum":
            return a.cumsum(0) * 0.5
        case "reuse":
            return a * a + a
    raise AssertionError(op)


def _reduce(reduction: str, value: Tensor, fresh: Fresh) -> Tensor:
    match reduction:
        case "sum":
            return value.sum()
        case "mean":
            return value.mean().reshape(1)
        case "squares":
            return (value * value).sum()
        case "dot":
            return (value * fresh(SIZE, SIZE)).sum()
        case "one":
            return value[1, 2]
        case "vector":
            return (value * fresh(SIZE, SIZE)).sum(1)
    raise AssertionError(reduction)
