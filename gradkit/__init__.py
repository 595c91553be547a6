"""gradkit: the gradients you asked for, exactly, or an error that says why.

`value_and_grads`, `per_loss_grads` and `simultaneous_grads` differentiate losses that have been
computed, by any tree of parameters, and return trees of gradients; `safe_retain` keeps the
gradients of intermediate tensors. None of them touches `.grad`.
"""

from gradkit import errors, tree
from gradkit._matrix import combine
from gradkit.eager import per_loss_grads, simultaneous_grads, value_and_grads
from gradkit.errors import (
    DetachedLossError,
    FreedGraphError,
    GradkitError,
    GradkitWarning,
    LeafTypeError,
    NotScalarLossError,
    StructureError,
    UnreachedParamError,
    UnsupportedGraphError,
    UnsupportedOptimizerError,
)
from gradkit.retain import safe_retain

__all__ = [
    "DetachedLossError",
    "FreedGraphError",
    "GradkitError",
    "GradkitWarning",
    "LeafTypeError",
    "NotScalarLossError",
    "StructureError",
    "UnreachedParamError",
    "UnsupportedGraphError",
    "UnsupportedOptimizerError",
    "combine",
    "errors",
    "per_loss_grads",
    "safe_retain",
    "simultaneous_grads",
    "tree",
    "value_and_grads",
]

__version__ = "0.1.0"
