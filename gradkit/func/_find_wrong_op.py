"""Which operation of a function has a wrong derivative: each is checked by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, resolve_name

from gradkit._compat.dynamo import leave_uncompiled
from gradkit._core import pytree
from gradkit._core.graph import Subgraph
from gradkit._state.snapshot import Snapshot
from gradkit.func._derivative_check import DerivativeCheck
from gradkit.func._directional import Directional, Modes, Tensors

_MOST = 200  # operations of different shapes, beyond which it would take too long


@dataclass(frozen=True)
class Op:
    """A call of an operation: its inputs in order, and which of them carry a graph."""

    func: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.Structure
    variables: list[int]

    @property
    def name(self) -> str:
        """What a user calls it by."""
        own = getattr(self.func, "__name__", "")
        is_torch_s = getattr(torch, own, None) is self.func
        public = cast("str | None", resolve_name(self.func))
        return public or (f"torch.{own}" if is_torch_s else own)

    @property
    def kind(self) -> object:
        """What calls whose derivatives are the same have in common."""
        return self.name, [x.shape if isinstance(x, Tensor) else repr(x) for x in self.leaves]

    def __call__(self, tensors: Tensors) -> list[Tensor]:
        """Call it with other variables."""
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in self.leaves]
        for index, tensor in zip(self.variables, tensors, strict=True):
            leaves[index] = tensor.clone()  # which an operation may change in place
        args, kwargs = pytree.unflatten(self.spec, leaves)
        return differentiable(self.func(*args, **kwargs))


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, Op] = {}

    @leave_uncompiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves, spec = pytree.flatten((args, kwargs or {}))
        variables = [i for i, x in enumerate(leaves) if is_number(x) and x.requires_grad]
        if variables and len(self.ops) < _MOST:
            copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
            op = Op(func, copies, spec, variables)
            self.ops.setdefault(str(op.kind), op)
        return func(*args, **(kwargs or {}))


def is_number(x: object) -> bool:
    """Return whether this is a floating-point or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def differentiable(tree: Any) -> list[Tensor]:
    """Return the floating-point and complex tensors of a tree, dense."""
    tensors: list[Tensor] = list(filter(is_number, pytree.flatten(tree)[0]))
    return [x if x.layout == torch.strided else x.to_dense() for x in tensors]


def find_wrong_op(check: DerivativeCheck, modes: Modes) -> str | None:
    """Return a function's first operation whose derivative in these modes is wrong by itself."""
    recorder, functions = _Recorder(), set[type]()

    def record(inputs: Tensors) -> Tensors:
        for x in inputs:
            x.requires_grad_()
        with suppress(Exception), recorder:  # torch.compile, as in torch.cond, cannot be recorded
            check.directional.fn([x.clone() for x in inputs])
        functions.update(Subgraph(check.directional.fn(inputs)).kinds)
        return []

    with suppress(Exception):  # what cannot be recorded is not named
        check.directional.evaluate(record)
    alone = (op.name for op in recorder.ops.values() if _is_wrong(op, check, modes))
    # A custom Function is not called through torch: the only one there is named by elimination.
    return next(alone, None) or _only_function(functions)


def _is_wrong(op: Op, check: DerivativeCheck, modes: Modes) -> bool:
    point = [op.leaves[index] for index in op.variables]
    directional = Directional(op, point, Snapshot([], []).restored)
    with suppress(Exception):  # it cannot be run by itself
        alone = DerivativeCheck(directional, check.modes, check.tolerance)
        disagreement = alone.first_disagreement(len(modes))
        return disagreement is not None and disagreement.product.modes == modes
    return False


def _only_function(kinds: Iterable[type]) -> str | None:
    names = [k.__name__.removesuffix("Backward") for k in kinds if issubclass(k, BackwardCFunction)]
    return names[0] if len(names) == 1 else None
