"""Written by release/stub.py: what calls return for each kind of losses and params."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias, TypedDict, TypeVar, Unpack, overload

from torch import Tensor, nn

from gradkit import distributed, dotgrad, errors, func, meta, report, tree
from gradkit._checks.checked import checked
from gradkit._core.call import Filled, Strategy, Unused
from gradkit._core.pytree import PyTree
from gradkit.accumulate import Accumulator
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
from gradkit.eager import vjp
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

_K = TypeVar("_K")
_L = TypeVar("_L")
_Tensors: TypeAlias = Mapping[_K, Tensor]
_Modules: TypeAlias = Mapping[_K, nn.Module]

class _Options(TypedDict, total=False):
    create_graph: bool
    retain_graph: bool | None

class _Sum(_Options, total=False):
    weights: PyTree

class _Each(_Options, total=False):
    strategy: Strategy
    chunk_size: int | None

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
__version__: str

@overload
def value_and_grads(
    losses: Tensor, params: nn.Module, *, unused: Filled, **options: Unpack[_Sum]
) -> tuple[Tensor, dict[str, Tensor]]: ...
@overload
def value_and_grads(
    losses: _Tensors[_L], params: nn.Module, *, unused: Filled, **options: Unpack[_Sum]
) -> tuple[dict[_L, Tensor], dict[str, Tensor]]: ...
@overload
def value_and_grads(
    losses: Tensor, params: _Tensors[_K], *, unused: Filled, **options: Unpack[_Sum]
) -> tuple[Tensor, dict[_K, Tensor]]: ...
@overload
def value_and_grads(
    losses: Tensor, params: Tensor, *, unused: Filled, **options: Unpack[_Sum]
) -> tuple[Tensor, Tensor]: ...
@overload
def value_and_grads(
    losses: Tensor, params: Iterator[Tensor], *, unused: Filled, **options: Unpack[_Sum]
) -> tuple[Tensor, tuple[Tensor, ...]]: ...
@overload
def value_and_grads(
    losses: Tensor, params: nn.Module, *, unused: Unused = ..., **options: Unpack[_Sum]
) -> tuple[Tensor, dict[str, Tensor | None]]: ...
@overload
def value_and_grads(
    losses: _Tensors[_L], params: nn.Module, *, unused: Unused = ..., **options: Unpack[_Sum]
) -> tuple[dict[_L, Tensor], dict[str, Tensor | None]]: ...
@overload
def value_and_grads(
    losses: Tensor, params: _Tensors[_K], *, unused: Unused = ..., **options: Unpack[_Sum]
) -> tuple[Tensor, dict[_K, Tensor | None]]: ...
@overload
def value_and_grads(
    losses: Tensor, params: Tensor, *, unused: Unused = ..., **options: Unpack[_Sum]
) -> tuple[Tensor, Tensor | None]: ...
@overload
def value_and_grads(
    losses: Tensor, params: Iterator[Tensor], *, unused: Unused = ..., **options: Unpack[_Sum]
) -> tuple[Tensor, tuple[Tensor | None, ...]]: ...
@overload
def value_and_grads(
    losses: PyTree, params: PyTree, *, unused: Unused = ..., **options: Unpack[_Sum]
) -> tuple[PyTree, PyTree]: ...
@overload
def per_loss_grads(
    losses: Tensor, params: nn.Module, *, unused: Filled, **options: Unpack[_Each]
) -> dict[str, Tensor]: ...
@overload
def per_loss_grads(
    losses: Tensor, params: _Tensors[_K], *, unused: Filled, **options: Unpack[_Each]
) -> dict[_K, Tensor]: ...
@overload
def per_loss_grads(
    losses: Tensor, params: Tensor, *, unused: Filled, **options: Unpack[_Each]
) -> Tensor: ...
@overload
def per_loss_grads(
    losses: _Tensors[_L], params: nn.Module, *, unused: Filled, **options: Unpack[_Each]
) -> dict[_L, dict[str, Tensor]]: ...
@overload
def per_loss_grads(
    losses: _Tensors[_L], params: _Tensors[_K], *, unused: Filled, **options: Unpack[_Each]
) -> dict[_L, dict[_K, Tensor]]: ...
@overload
def per_loss_grads(
    losses: _Tensors[_L], params: Tensor, *, unused: Filled, **options: Unpack[_Each]
) -> dict[_L, Tensor]: ...
@overload
def per_loss_grads(
    losses: Tensor, params: nn.Module, *, unused: Unused = ..., **options: Unpack[_Each]
) -> dict[str, Tensor | None]: ...
@overload
def per_loss_grads(
    losses: Tensor, params: _Tensors[_K], *, unused: Unused = ..., **options: Unpack[_Each]
) -> dict[_K, Tensor | None]: ...
@overload
def per_loss_grads(
    losses: Tensor, params: Tensor, *, unused: Unused = ..., **options: Unpack[_Each]
) -> Tensor | None: ...
@overload
def per_loss_grads(
    losses: _Tensors[_L], params: nn.Module, *, unused: Unused = ..., **options: Unpack[_Each]
) -> dict[_L, dict[str, Tensor | None]]: ...
@overload
def per_loss_grads(
    losses: _Tensors[_L], params: _Tensors[_K], *, unused: Unused = ..., **options: Unpack[_Each]
) -> dict[_L, dict[_K, Tensor | None]]: ...
@overload
def per_loss_grads(
    losses: _Tensors[_L], params: Tensor, *, unused: Unused = ..., **options: Unpack[_Each]
) -> dict[_L, Tensor | None]: ...
@overload
def per_loss_grads(
    losses: PyTree, params: PyTree, *, unused: Unused = ..., **options: Unpack[_Each]
) -> PyTree: ...
@overload
def simultaneous_grads(
    losses: _Tensors[_K], params: _Modules[_K], *, unused: Filled, **options: Unpack[_Options]
) -> dict[_K, dict[str, Tensor]]: ...
@overload
def simultaneous_grads(
    losses: _Tensors[_K], params: _Tensors[_K], *, unused: Filled, **options: Unpack[_Options]
) -> dict[_K, Tensor]: ...
@overload
def simultaneous_grads(
    losses: _Tensors[_K], params: _Modules[_K], *, unused: Unused = ..., **options: Unpack[_Options]
) -> dict[_K, dict[str, Tensor | None]]: ...
@overload
def simultaneous_grads(
    losses: _Tensors[_K], params: _Tensors[_K], *, unused: Unused = ..., **options: Unpack[_Options]
) -> dict[_K, Tensor | None]: ...
@overload
def simultaneous_grads(
    losses: PyTree, params: PyTree, *, unused: Unused = ..., **options: Unpack[_Options]
) -> PyTree: ...
