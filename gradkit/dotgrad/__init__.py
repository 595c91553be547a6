"""The `.grad` workflow, bit for bit: gradients from `.grad` and back, and optimizer steps.

`gradkit._state` is the only room that writes `.grad`; these calls use it.
"""

from gradkit.dotgrad._backward import Captured, backward_, capture_grads
from gradkit.dotgrad._minimize import minimize_
from gradkit.dotgrad._read_write import add_grads_, clear_grads_, read_grads, write_grads_
from gradkit.dotgrad._step import step_

__all__ = [
    "Captured",
    "add_grads_",
    "backward_",
    "capture_grads",
    "clear_grads_",
    "minimize_",
    "read_grads",
    "step_",
    "write_grads_",
]
