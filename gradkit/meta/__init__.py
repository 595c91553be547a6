"""Meta-learning with higher-order gradients: optimizers, inner loops, tasks, implicit gradients."""

from gradkit.meta._implicit import implicit
from gradkit.meta._optimizer import Optimizer
from gradkit.meta._tasks import value_and_grads
from gradkit.meta._unroll import Adapted, unroll
from gradkit.meta._wrapped import from_torch
from gradkit.meta.optimizers import adam, adamw, rmsprop, sgd

__all__ = [
    "Adapted",
    "Optimizer",
    "adam",
    "adamw",
    "from_torch",
    "implicit",
    "rmsprop",
    "sgd",
    "unroll",
    "value_and_grads",
]
