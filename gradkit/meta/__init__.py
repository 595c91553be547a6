"""Meta-learning with higher-order gradients: optimizers, inner loops, tasks, implicit gradients."""

from gradkit.meta._builtin_optimizers import adam, adamw, rmsprop, sgd
from gradkit.meta._from_torch import from_torch
from gradkit.meta._implicit import implicit
from gradkit.meta._newer_optimizers import adafactor, lion, muon, schedule_free_adamw
from gradkit.meta._optimizer import Optimizer
from gradkit.meta._tasks import mean_value_and_grads
from gradkit.meta._unroll import Adapted, unroll

__all__ = [
    "Adapted",
    "Optimizer",
    "adafactor",
    "adam",
    "adamw",
    "from_torch",
    "implicit",
    "lion",
    "mean_value_and_grads",
    "muon",
    "rmsprop",
    "schedule_free_adamw",
    "sgd",
    "unroll",
]
