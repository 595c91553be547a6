"""Gradients in several processes, on torch's own engines: never silently local, zero or partial."""

from gradkit.distributed._make_functional import make_functional
from gradkit.distributed._public_calls import (
    gram,
    per_loss_grads,
    simultaneous_grads,
    value_and_grads,
)
from gradkit.distributed._reduction import all_reduce

__all__ = [
    "all_reduce",
    "gram",
    "make_functional",
    "per_loss_grads",
    "simultaneous_grads",
    "value_and_grads",
]
