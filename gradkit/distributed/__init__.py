"""Gradients in several processes, on torch's own engines: never silently local, zero or partial."""

from gradkit.distributed._layout_run import BatchPart, Layout
from gradkit.distributed._make_functional import make_functional
from gradkit.distributed._parity import parity
from gradkit.distributed._parity_report import ParityDifference, ParityReport
from gradkit.distributed._public_calls import (
    gram,
    per_loss_grads,
    simultaneous_grads,
    value_and_grads,
)
from gradkit.distributed._reduction import all_reduce

__all__ = [
    "BatchPart",
    "Layout",
    "ParityDifference",
    "ParityReport",
    "all_reduce",
    "gram",
    "make_functional",
    "parity",
    "per_loss_grads",
    "simultaneous_grads",
    "value_and_grads",
]
