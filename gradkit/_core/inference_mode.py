"""Inference mode, left for a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def leave_inference_mode(*, record: bool = False) -> AbstractContextManager[object]:
    """Leave inference mode: a gradient made in it could not take part in autograd later [E6].

    With `record`, operations inside are recorded, as a function that is differentiated needs it.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False) if record else _without_recording()


@contextmanager
def _without_recording() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
