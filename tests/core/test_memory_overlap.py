"""What shares memory: where none is seen, there is none; and plain views are told apart."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradkit._core.ownership import overlaps_itself, shared_by

STRIDES, OFFSET = st.tuples(*[st.integers(0, 6)] * 3), st.integers(0, 9)
SIZES = st.lists(st.integers(0, 4), max_size=3)


def entries(view: Tensor) -> list[float]:
    return view.reshape(-1).tolist()  # each is its own address


@given(sizes=SIZES, strides=STRIDES, offset=OFFSET)
def test_a_tensor_that_overlaps_itself_is_seen(
    device: torch.device, sizes: Any, strides: Any, offset: int
) -> None:
    whole = torch.arange(100.0, device=device)
    tensor = whole.as_strided(sizes, strides[: len(sizes)], offset)
    if not overlaps_itself(tensor):
        assert len(set(entries(tensor))) == tensor.numel()


@given(drawn=st.lists(st.tuples(SIZES, STRIDES, OFFSET, STRIDES, OFFSET), max_size=3))
def test_what_is_changed_with_another_is_seen(device: torch.device, drawn: Any) -> None:
    whole = torch.arange(100.0, device=device)
    written = [whole.as_strided(n, by[: len(n)], start) for n, by, start, _, _ in drawn]
    read = [whole.as_strided(n, by[: len(n)], start) for n, _, _, by, start in drawn]
    shared = shared_by(written, read)
    if shared is not None:
        first, second = shared
        assert first < len(written)
        assert first != second
        return
    every = [entries(tensor) for tensor in (*written, *read)]
    for first in range(len(written)):
        for second in range(first + 1, len(every)):
            beside = second == first + len(written) and every[first] == every[second]
            assert beside or not set(every[first]) & set(every[second])


def test_plain_views_are_told_apart(device: torch.device) -> None:
    whole = torch.zeros(4, 6, device=device)
    for parts in (whole.unbind(), whole.t().unbind(1), [whole[:2].t(), whole[2:]], [whole.t()]):
        assert not any(map(overlaps_itself, parts))
        assert shared_by(list(parts), list(parts)) is None
    assert overlaps_itself(whole[:1].expand(3, 6))
    assert not overlaps_itself(whole[:, ::2])


def test_meta_tensors_share_no_memory(device: torch.device) -> None:
    one, two = (torch.ones(2, device="meta") for _ in range(2))
    assert shared_by([one, two], [two, None]) is None
