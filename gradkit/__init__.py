"""gradkit: the gradients you asked for, exactly, or an error that says why.

`value_and_grads`, `per_loss_grads` and `simultaneous_grads` differentiate losses that have been
computed, by any tree of parameters, and return trees of gradients; `vjp` differentiates outputs of
any shape; `safe_retain` keeps the gradients of intermediate tensors. `value_and_reduced_grads`,
`gram`, `per_loss_norms`, `per_sample_norms` and `clipped_sum` return what is made of gradients that
are freed as they arrive.
None of them touches `.grad`: that is for `gradkit.dotgrad`, which leads from these results to the
`.grad` workflow and back. `gradkit.func` does the same for functions, over torch.func;
`gradkit.meta` differentiates through training; `gradkit.distributed` is for several processes;
`gradkit.report` shows what there is to see about gradients.
"""

import gc as _gc
import importlib as _importlib
import typing as _typing

from gradkit._compat import heap as _heap
from gradkit._compat import versions as _versions  # first: it raises if torch is too old

# The imports would start a collection of torch's objects, 80 ms, and leave no garbage themselves.
_collects = _gc.isenabled()
_gc.disable()
try:
    from gradkit import dotgrad, errors, tree
    from gradkit._checks.checked import checked
    from gradkit.dotgrad import (
        add_grads_,
        backward_,
        capture_grads,
        clear_grads_,
        minimize_,
        read_grads,
        step_,
        write_grads_,
    )
    from gradkit.eager import per_loss_grads, simultaneous_grads, value_and_grads, vjp
    from gradkit.errors import (
        CollectiveError,
        DetachedLossError,
        FreedGraphError,
        GradientCheckError,
        GradkitError,
        GradkitWarning,
        LeafTypeError,
        NotScalarLossError,
        OptionError,
        StructureError,
        UnreachedParamError,
        UnsupportedGraphError,
        UnsupportedOptimizerError,
    )
    from gradkit.retain import safe_retain
    from gradkit.streaming import (
        clipped_sum,
        gram,
        per_loss_norms,
        per_sample_norms,
        value_and_reduced_grads,
    )
    from gradkit.tree._per_loss import combine
finally:
    if _collects:
        _gc.enable()

if _typing.TYPE_CHECKING:
    from gradkit import distributed, func, meta, report
    from gradkit.accumulate import Accumulator

__all__ = [
    "Accumulator",
    "CollectiveError",
    "DetachedLossError",
    "FreedGraphError",
    "GradientCheckError",
    "GradkitError",
    "GradkitWarning",
    "LeafTypeError",
    "NotScalarLossError",
    "OptionError",
    "StructureError",
    "UnreachedParamError",
    "UnsupportedGraphError",
    "UnsupportedOptimizerError",
    "add_grads_",
    "backward_",
    "capture_grads",
    "checked",
    "clear_grads_",
    "clipped_sum",
    "combine",
    "distributed",
    "dotgrad",
    "errors",
    "func",
    "gram",
    "meta",
    "minimize_",
    "per_loss_grads",
    "per_loss_norms",
    "per_sample_norms",
    "read_grads",
    "report",
    "safe_retain",
    "simultaneous_grads",
    "step_",
    "tree",
    "value_and_grads",
    "value_and_reduced_grads",
    "vjp",
    "write_grads_",
]

__version__ = "0.2.0"

_versions.warn_if_untested()
_heap.keep_freed_memory()

# Rooms that are opened when they are first asked for: together they would double the import time.
_OPENED_LATER = ("distributed", "func", "meta", "report")


def __getattr__(name: str) -> object:
    if name == "Accumulator":  # in a room that opens gradkit.distributed
        return _importlib.import_module("gradkit.accumulate").Accumulator
    if name in _OPENED_LATER:
        return _importlib.import_module(f"gradkit.{name}")
    raise AttributeError(f"module 'gradkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OPENED_LATER, "Accumulator"})
