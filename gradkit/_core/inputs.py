"""The names of `params` and `losses` for rooms that still import them from here."""

from __future__ import annotations

from gradkit._core.losses import Losses, read_losses, read_weights, require_graph
from gradkit._core.params import Params, expand_params
from gradkit._core.params import read_params as _read_params
from gradkit._core.pytree import PyTree
from gradkit._core.wrapped_modules import fsdp_classes, refuse_distributed

__all__ = [
    "Losses",
    "Params",
    "expand_params",
    "fsdp_classes",
    "read_losses",
    "read_params",
    "read_weights",
    "refuse_distributed",
    "require_graph",
]


def read_params(
    tree: PyTree, root: str = "params", *, wrapped: bool = False, allow_distributed: bool = False
) -> Params:
    """Call `params.read_params`, with the former name of its option, too."""
    return _read_params(tree, root, allow_distributed=wrapped or allow_distributed)
