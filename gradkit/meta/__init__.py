"""Meta-learning with higher-order gradients: optimizers, inner loops, tasks, implicit gradients."""

from gradkit.meta._builtin_optimizers import adam, adamw, rmsprop, sgd
from gradkit.meta._from_torch import from_torch
from gradkit.meta._implicit import implicit
from gradkit.meta._optimizer import Optimizer
from gradkit.meta._tasks import mean_value_and_grads
from gradkit.meta._unroll import Adapted, unroll

__all__ = [
    "Adapted",
    "Optimizer",
    "adam",
    "adamw",
    "from_torch",
    "implicit",
    "mean_value_and_grads",
    "rmsprop",
    "sgd",
    "unroll",
]
