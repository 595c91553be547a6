"""Gradients as one vector, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradkit.distributed._reduction import flat_copy, write
from tests.helpers import assert_same_bits

shapes = st.lists(st.sampled_from([(), (3,), (2, 3), (0, 3), (0,), (1, 1, 2)]), max_size=5)


@given(shapes=shapes, transposed=st.booleans(), extra=st.integers(0, 2))
def test_what_is_sent_arrives(
    device: torch.device, shapes: list[tuple[int, ...]], transposed: bool, extra: int
) -> None:
    grads = [torch.randn(shape[::-1], device=device) for shape in shapes]
    grads = [g.permute(tuple(range(g.dim()))[::-1]) if transposed else g for g in grads]
    sent = [*grads, torch.zeros(extra, device=device)]
    flat = flat_copy(sent)
    assert_same_bits(flat, torch.cat([g.reshape(-1) for g in sent]))
    assert all(flat.data_ptr() != g.data_ptr() for g in sent if g.numel())
    received = [torch.full_like(g, torch.nan) for g in grads]
    write(received, flat)
    assert_same_bits(received, grads)
