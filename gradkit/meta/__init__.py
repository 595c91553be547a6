"""Meta-learning with higher-order gradients: optimizers, inner loops, tasks, implicit gradients."""

from gradkit.meta._wrapped import from_torch
from gradkit.meta.optimizers import Optimizer, adam, adamw, rmsprop, sgd

__all__ = ["Optimizer", "adam", "adamw", "from_torch", "rmsprop", "sgd"]
