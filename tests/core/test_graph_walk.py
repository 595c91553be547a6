"""The walk that stops where passes end at intermediate values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.autograd.graph import Node

from gradkit._core import graph
from tests.strategies import Program, build, programs

# Three values, each computed from the one before, and a loss of the last, or of the last two.
VALUES = Program(
    seed=0,
    leaves=("plain",),
    ops=(("tanh", 0, 0), ("tanh", 1, 0), ("tanh", 2, 0)),
    losses=(("sum", 3),),
)
TWO_VALUES = replace(VALUES, losses=(("sum", 2), ("sum", 3)))


@example(program=VALUES, chosen=[{1, 2}], threads=[0] * 12)
@example(program=VALUES, chosen=[{0, 2}], threads=[0, 1] * 6)
@example(program=VALUES, chosen=[{0, 2}], threads=[1, 0] * 6)
@example(program=TWO_VALUES, chosen=[{0, 2}], threads=[0] * 12)
@given(
    program=programs(leaf_hooks=False),
    chosen=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=2),
    threads=st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_what_leads_to_intermediate_values_without_a_whole_walk(
    device: torch.device, program: Program, chosen: list[set[int]], threads: list[int]
) -> None:
    """What passes of one call, or of two, execute, whichever threads have made the graph."""
    made = build(program, device, torch.float64)
    losses = [loss for loss in made.losses if loss.requires_grad]
    inner = [value for value in made.values if value.grad_fn is not None]
    assume(losses and inner)
    whole = graph.Subgraph(losses)

    def number(node: Node) -> int:
        return node._sequence_nr() + 1000 * threads[node._sequence_nr() % 12]

    for indices in chosen:  # the second call meets what the first has marked
        values = [inner[index % len(inner)] for index in sorted(indices)]
        ends = frozenset(value.grad_fn for value in values if value.grad_fn is not None)
        parts = graph.Subgraph(losses, stop=ends).parts
        directly = {node for part in parts for node in part.shared}
        above = [whole.leading_to([v]) for v in values if v.grad_fn in directly]
        with pytest.MonkeyPatch.context() as patch:
            if not any(nodes & ends for nodes in above):
                # Else one end is right there, and below another, where the numbers have to tell.
                patch.setattr("gradkit._core.graph.sequence_number", number)
            below = graph.Subgraph(losses, ends=ends)
            assert [*map(below.reaches, values)] == [*map(whole.reaches, values)]
            executed = whole.leading_to(values)
            assert below.leading_to(values) == executed
            for part, every in zip(below.parts, whole.parts, strict=True):
                assert set(part.nodes) & executed == set(every.nodes) & executed
                assert set(part.shared) & executed == set(every.shared) & executed
