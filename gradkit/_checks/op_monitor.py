"""Watches the operations of a function, and raises where torch.func would be silently wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradkit._checks.differentiable_formulas import FORMULAS
from gradkit._checks.differentiated_jvps import function_with_differentiated_jvp
from gradkit._checks.transform_bugs import (
    ALIASES,
    BY_FORMULA,
    EAGER,
    IN_PLACE,
    NOT_SWEPT,
    TRANSFORM_BUGS,
    OpCall,
)
from gradkit._compat.dynamo import functions_traced, leave_uncompiled
from gradkit._compat.nodes import output_shape, saved, saved_or
from gradkit._compat.transforms import (
    BATCH,
    DERIVATIVES,
    apply_function,
    autograd_grad,
    carries_graph,
    carries_tangent,
    differentiated,
    differentiated_around,
    jvp_level,
    layers,
    level_of,
    recording_levels,
    transforms,
)
from gradkit._compat.undoing import INSIDE, undone
from gradkit._core import pytree
from gradkit._core.graph import Subgraph
from gradkit._state.copy_on_write import CopyOnWrite
from gradkit.errors import UnsupportedGraphError, message

__all__ = ["TRANSFORM_BUGS", "OpMonitor"]

# An operator called as torch.ops.aten.add, or with its overload.
OPERATOR, OVERLOAD = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
_OF_TORCH = frozenset({"aten", "prim", "prims"})
_WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"
_RESULT = "the shape of the result"


def is_foreign(func: Callable[..., Any]) -> bool:
    """Return whether this is an operator that torch itself does not define."""
    is_operator = isinstance(func, (OPERATOR, OVERLOAD))
    return is_operator and str(func).partition(".")[0] not in _OF_TORCH


def refuse_dropped(func: Callable[..., Any], given: Any, result: Any) -> None:
    """Raise if an operator has dropped a derivative of what it was given."""
    # torch drops tangents without a word, and warns once of a backward pass.
    outputs = [x for x in pytree.tensors(result) if x.is_floating_point() or x.is_complex()]
    if not outputs:
        return
    inputs = pytree.tensors(given)
    nodes = [layer.grad_fn for output in outputs for layer in layers(output)]
    is_cut = any(node is not None and node.name() == _WITHOUT_DERIVATIVE for node in nodes)
    if torch.is_grad_enabled() and not any(map(carries_graph, outputs)):  # a kernel falls through
        is_cut |= any(map(carries_graph, inputs))
    if is_cut:
        got = "one without an autograd kernel: torch takes its derivative as zero"
        fix = "torch.library.register_autograd, or an Autograd kernel in C++"
    elif any(map(carries_tangent, inputs)) and not any(map(carries_tangent, outputs)):
        got = "one without a formula for forward mode: torch drops the tangent"
        fix = "reverse mode: gradkit.value_and_grads(losses, params)"
    else:
        return
    where, expected = f"torch.ops.{func}", "an operator whose derivative torch has"
    fix += "; or, if the result is meant as a constant, give the operator x.detach()"
    raise UnsupportedGraphError(message(where, expected, got, fix))


# By the kind of node: the operation, and how it saves the arguments that its bug depends on.
_OPERATION_OF_NODE: dict[str, tuple[str, dict[str, str]]] = {
    "CdistBackward0": ("cdist", {}),
    "RollBackward0": ("roll", {"input": _RESULT}),
    "MaskedSelectBackward0": ("masked_select", {"input": "self", "mask": "mask"}),
    "IndexFillBackward1": ("index_fill", {"value": _RESULT}),
    "SelectScatterBackward0": ("select_scatter", {}),
    "LinalgDetBackward0": ("det", {}),
    "LinalgSlogdetBackward0": ("slogdet", {}),
    "CholeskyInverseBackward0": ("cholesky_inverse", {}),
    "TriangularSolveBackward0": ("triangular_solve", {}),
    "ScatterReduceBackward0": ("scatter_reduce", {"reduce": "reduce"}),
    "NativeLayerNormBackward0": ("layer_norm", {"weight": "weight"}),
    "NativeBatchNormBackward0": ("batch_norm", {"weight": "weight"}),
    "CudnnBatchNormBackward0": ("batch_norm", {"weight": "weight"}),
    "MiopenBatchNormBackward0": ("batch_norm", {"weight": "weight"}),
}


def _operations_in(nodes: Iterable[Node]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each such operation, and those of its arguments that the bug depends on."""
    for node in nodes:
        name, names = _OPERATION_OF_NODE.get(type(node).__name__, ("", {}))
        if not name:
            continue
        arguments = {
            argument: torch.empty(output_shape(node, 0), device="meta")
            if kept is _RESULT
            else saved(node, kept)
            for argument, kept in names.items()
        }
        if name == "batch_norm":
            # instance_norm is a batch_norm of one sample that has all channels of all samples.
            name = "instance_norm" if output_shape(node, 0)[0] == 1 else name
            training = saved_or(True, node, "training")  # cuDNN's is that of training alone
            arguments |= {"training": training, "use_input_stats": training}
        yield name, arguments


_BACKWARD_PASS = "a backward pass"
_FUNCTION = "a Function"
_NAMES: dict[Any, str] = {
    getattr(owner, alias): name
    for alias, name in ALIASES.items()
    for owner in (torch, Tensor, torch.linalg, torch.special, functional)
    if hasattr(owner, alias)
}
_NAMES |= {torch.autograd.grad: _BACKWARD_PASS, autograd_grad: _BACKWARD_PASS}
_NAMES[apply_function] = _FUNCTION
_IN_PLACE = {
    getattr(owner, name)
    for name in IN_PLACE
    for owner in (torch, Tensor, torch.ops.aten)
    if hasattr(owner, name)
}
# Of `**`, which torch.compile does not find among the keys of a dictionary.
_POW, _IPOW = Tensor.__pow__, Tensor.__ipow__
_FUNCTIONAL = {functional.batch_norm, functional.instance_norm}

_active = threading.local()


def active_monitors() -> int:
    """Return how many monitors note the operations of this thread."""
    return getattr(_active, "count", 0)


class OpMonitor(TorchFunctionMode):
    """Notes the operations of a function, and raises at those whose derivative would be wrong."""

    # It sees what Python calls, and in `note_graph` what else a graph tells of: torch.jit.script,
    # DisableTorchFunction and callbacks of torch's own functions leave nodes, too.

    def __init__(self, *, per_sample: bool = False, writes: CopyOnWrite | None = None) -> None:
        super().__init__()
        self._per_sample = per_sample  # fn is for one sample: train-mode batch norm raises
        self._writes = writes  # what fn writes on tensors from outside is written on copies
        self._outer = transforms()
        self.is_nested = bool(self._outer)
        # Operations that are wrong if the backward pass is batched; if it is differentiated; if
        # eager code differentiates the result.
        self._wrong_batched: list[str] = []
        self._wrong_derivative: list[str] = []
        self._wrong_outside: list[str] = []
        self._tangents_from = 0  # the level of a jvp around the function; 0 for none
        self._level = 0  # that of the innermost transform around it

    def noting(self) -> AbstractContextManager[object]:
        """Return what notes the operations of a block."""
        if torch.compiler.is_compiling():  # which would compile again for each count
            functions_traced()
            return self
        return self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if torch.is_grad_enabled():
            self._tangents_from, self._level = jvp_level(), len(transforms())
        before = active_monitors()
        with undone(partial(setattr, _active, "count", before)), self, INSIDE:
            _active.count = before + 1
            yield

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it has a known bug here."""
        name = name_of(func)
        constants = self._tangents_from and not torch.is_grad_enabled()
        if name == _BACKWARD_PASS:
            self.check()
        elif name == _FUNCTION:
            args = function_with_differentiated_jvp(args), *args[1:]
        elif name is not None:
            is_functional, given = func in _FUNCTIONAL, (args, kwargs or {})
            if name in BY_FORMULA:
                given = self._current(given)
            call = OpCall(*given, is_functional, transforms(), self._outer)
            if name not in BY_FORMULA:
                self._note(name, call)
            elif not constants and _needs_formula(name, call):
                if not _is_in_place(func):
                    return FORMULAS[name](func, *call.args, **call.kwargs)
                func, args, kwargs = Tensor.copy_, (args[0], _value_in_place(name, call)), {}
        if constants and not (self._writes and self._writes.redirects(func, kwargs)):
            args, kwargs = self._current((args, kwargs or {}))
            return self._run_on_constants(func, args, kwargs)
        if self._writes is not None:
            if constants:  # what is written keeps its own tangents
                args = (*args[:1], *pytree.map_tensors(self._constant, args[1:]))
            result = self._writes.run(func, args, kwargs or {})
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if is_foreign(func) and not (constants or torch.compiler.is_compiling()):
            refuse_dropped(func, (args, kwargs), result)
        return result

    def _current(self, given: Any) -> Any:
        """Return arguments with the copies of what the function has written on in their place."""
        return given if self._writes is None else self._writes.current(given)

    def _run_on_constants(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation under no_grad on tensors without tangents: a jvp does not heed it."""
        name = getattr(func, "__name__", "")
        if name in {"__set__", "register_hook"}:
            return func(*args, **kwargs)
        if name == "__get__":  # x.T and x.real are views of x; others are no tensors, or its own
            result = func(*args, **kwargs)
            is_view = isinstance(result, Tensor) and result is not args[0]
            return self._constant(result) if is_view else result
        given: dict[int, tuple[Tensor, Tensor]] = {}

        def constant(tensor: Tensor) -> Tensor:
            cut = self._constant(tensor)
            given[id(cut)] = cut, tensor
            return cut

        args, kwargs = pytree.map_tensors(constant, (args, kwargs))
        result = func(*args, **kwargs)
        # An operation in place, and one that has nothing to do, returns what it was given.
        return pytree.map_tensors(lambda x: given[id(x)][1] if id(x) in given else x, result)

    def _constant(self, tensor: Tensor) -> Tensor:
        """Return a tensor without the tangents of the transforms around the function."""
        # Not of one that the function has entered, whose own tangents count.
        is_around = self._tangents_from <= level_of(tensor) <= self._level
        return tensor.detach() if is_around else tensor

    def _note(self, name: str, call: OpCall) -> None:
        bug = TRANSFORM_BUGS[name]
        if name == "batch_norm" and self._per_sample and call.argument(5, "training"):
            expected = "a function of one sample at a time"
            got = "batch_norm in train mode, which mixes the samples of a batch, so that no sample "
            got += "has a separate gradient"
            fix = "module.eval(), or a GroupNorm in its place"
            raise UnsupportedGraphError(message("per_sample_grads", expected, got, fix))
        if bug.wrong_now(call):
            _raise(name)
        if bug.wrong_batched(call):
            self._wrong_batched.append(name)
        if bug.wrong_derivative(call):
            self._wrong_derivative.append(name)
        if bug.wrong_now(call.differentiated_by_eager_code()):
            self._wrong_outside.append(name)

    def note_graph(self, losses: Sequence[Tensor]) -> None:
        """Note the operations in the graph of some losses as if they had been called here."""
        if torch.compiler.is_compiling():  # which shows no graph
            return
        for name, arguments in _operations_in(Subgraph(losses).nodes):
            if name in TRANSFORM_BUGS:
                self._note(name, OpCall((), arguments, False, transforms(), self._outer))

    def check(self) -> None:
        """Raise if a backward pass through the operations so far would be wrong."""
        stack = transforms()
        if BATCH in stack and self._wrong_batched:
            _raise(self._wrong_batched[0])
        if differentiated_around(stack, BATCH) and self._wrong_derivative:
            _raise(self._wrong_derivative[0])

    def check_derivative(self, losses: Sequence[Tensor]) -> None:
        """Raise if a derivative that eager code takes of the losses' gradient would be wrong."""
        self.note_graph(losses)
        wrong = [*self._wrong_outside, *(self._wrong_derivative if BATCH in transforms() else ())]
        if wrong:
            _raise(wrong[0])

    def why_not_batched(self, loss: Tensor) -> str | None:
        """Return why a vmapped backward pass from a loss would be wrong, or None if it is right."""
        self.note_graph([loss])
        wrong = list(self._wrong_batched)
        if not DERIVATIVES.isdisjoint(self._outer):
            wrong += self._wrong_derivative
        if wrong:
            return f"torch gets it silently wrong for {', '.join(dict.fromkeys(wrong))}"
        got = "in a vmap around the call it would be a batch of batches, for which some rules of "
        return f"{got}torch are silently wrong" if BATCH in self._outer else None


def name_of(func: Callable[..., Any]) -> str | None:
    """Return the name of an operation with a bug, however it is called."""
    name = _NAMES.get(func)
    if name is None and (func is _POW or func is _IPOW):
        return "pow"
    # torch.ops.aten.name; an operator of the user's may have the same.
    if name is None and isinstance(func, (OVERLOAD, OPERATOR)) and not is_foreign(func):
        packet = func.overloadpacket if isinstance(func, OVERLOAD) else func
        return ALIASES.get(packet.__name__)
    return name


def run_by_eager_code(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run what eager code calls, by its formula where a first derivative of it would be wrong."""
    if name == _FUNCTION:
        args = function_with_differentiated_jvp(args), *args[1:]
    elif name != _BACKWARD_PASS and (
        any(map(carries_graph, pytree.tensors((args, kwargs)))) or differentiated()
    ):
        stack = transforms()
        if DERIVATIVES.isdisjoint(stack):
            stack = (EAGER, *stack)
        call = OpCall(args, kwargs, func in _FUNCTIONAL, stack, ())
        if name in BY_FORMULA:
            if BY_FORMULA[name].wrong_now(call) and not _is_refused_by_torch(name, call):
                if _is_in_place(func):
                    return args[0].copy_(_value_in_place(name, call))
                return FORMULAS[name](func, *args, **kwargs)
        elif TRANSFORM_BUGS[name].wrong_now(call):
            _raise(name)
    return func(*args, **kwargs)


def _needs_formula(name: str, call: OpCall) -> bool:
    """Return whether a derivative of an operation would be wrong without its formula."""
    bug = BY_FORMULA[name]
    if _is_refused_by_torch(name, call):
        return False
    if bug.wrong_now(call):
        return True
    if not bug.wrong_now(call.differentiated_by_eager_code()):
        return False
    # Wrong if eager code differentiates what the transforms give; torch.compile cannot tell.
    tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    return torch.compiler.is_compiling() or any(0 in recording_levels(x) for x in tensors)


def _is_refused_by_torch(name: str, call: OpCall) -> bool:
    """Return whether an operation is given `out`, which torch refuses, unless it drops graphs."""
    return call.kwargs.get("out") is not None and name not in NOT_SWEPT


def _is_in_place(func: Callable[..., Any]) -> bool:
    """Return whether an operation writes on its first argument."""
    return func is _IPOW or getattr(func, "overloadpacket", func) in _IN_PLACE


def _value_in_place(name: str, call: OpCall) -> Tensor:
    """Return what an operation in place is to write, by its formula."""
    written, *others = call.args
    value: Tensor = FORMULAS[name](getattr(Tensor, name), written.clone(), *others, **call.kwargs)
    return value


def _raise(name: str) -> NoReturn:
    owners = torch, torch.linalg, torch.special
    owner = next(owner.__name__ for owner in owners if hasattr(owner, name))
    bug, expected = TRANSFORM_BUGS[name], "an operation whose derivative torch gets right here"
    got = f"{name}: {bug.what}"
    raise UnsupportedGraphError(message(f"{owner}.{name}", expected, got, bug.fix))
