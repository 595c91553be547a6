"""Memory that several tensors share, or entries of one: what else an in-place change reaches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import add, attrgetter

from torch import Tensor

_nbytes = attrgetter("nbytes")


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two entries of a tensor may lie in one place in memory, as if expanded."""
    if tensor.is_contiguous():
        return False
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return True
            end = stride * (size - 1) + end
    return False


def shared_by(written: Sequence[Tensor], read: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """Return a tensor that is written, and another one in its memory; None if there is none."""
    # Both are indices of the two lists in succession. What is written may be read beside it.
    if _are_apart([*written, *(y for y in read if y is not None)]):
        return None
    spans = [(*_span(x), index) for index, x in enumerate(written) if x.numel()]
    for index, (x, y) in enumerate(zip(written, read, strict=True)):
        if y is not None and y.numel() and not _is_same(x, y):
            spans.append((*_span(y), len(written) + index))
    last_end, last = [0, 0], [0, 0]  # of those that are written, and of those that are read
    for start, end, index in sorted(spans):
        is_read = index >= len(written)
        for kind in (0,) if is_read else (0, 1):
            if start < last_end[kind]:
                first, second = sorted((index, last[kind]))
                return first, second
        if end > last_end[is_read]:
            last_end[is_read], last[is_read] = end, index
    return None


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are contiguous, and no two share memory; False if unsure."""
    # One attribute of all at a time: a Python loop over the leaves takes as long as their sum.
    if not all(map(Tensor.is_contiguous, tensors)):
        return False
    starts = list(map(Tensor.data_ptr, tensors))
    spans = sorted(zip(starts, map(add, starts, map(_nbytes, tensors)), strict=True))
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a dense tensor, and the one after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    last = sum(stride * (size - 1) for stride, size in pairs)
    return start, start + (last + 1) * tensor.element_size()
