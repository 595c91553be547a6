"""Gradients in several processes, on torch's own engines: never silently local, zero or partial.

`parity` and its classes are in a package of their own, `gradkit_parity`. Where that is not
installed, the error of a name says how to get it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gradkit.distributed._make_functional import make_functional
from gradkit.distributed._public_calls import (
    gram,
    per_loss_grads,
    simultaneous_grads,
    value_and_grads,
)
from gradkit.distributed._reduction import all_reduce
from gradkit.errors import not_installed

if TYPE_CHECKING:
    from gradkit_parity.comparison import parity
    from gradkit_parity.layout_run import BatchPart, Layout
    from gradkit_parity.report import ParityDifference, ParityReport

__all__ = [
    "all_reduce",
    "gram",
    "make_functional",
    "per_loss_grads",
    "simultaneous_grads",
    "value_and_grads",
]

if find_spec("gradkit_parity"):
    __all__ += ["BatchPart", "Layout", "ParityDifference", "ParityReport", "parity"]


def __getattr__(name: str) -> object:
    if name not in {"BatchPart", "Layout", "ParityDifference", "ParityReport", "parity"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("gradkit_parity.comparison"), name)
    except ImportError as error:
        raise not_installed("parity") from error


def __dir__() -> list[str]:
    return __all__
