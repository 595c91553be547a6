"""torch.func's transforms: which are around a call, and what they wrap.

Run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import custom_function_call as _custom_function_call
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from gradkit._compat.undoing import INSIDE, undo_stack, undone

TensorLists: TypeAlias = Sequence[Sequence[Tensor | None]]
_functorch = torch._C._functorch
_read = _functorch.get_interpreter_stack
# The names are kept by number: the attribute `name` of such an enumeration searches all of it.
_TYPES: Any = _functorch.TransformType
_KINDS = {int(kind): kind.name for kind in _TYPES.__members__.values()}

# The transforms whose value is a derivative.
DERIVATIVES = frozenset({"Grad", "Jvp"})
BATCH, FORWARD = "Vmap", "Jvp"
# torch raises these where it cannot batch a pass. Batched, the means of mse_loss and huber_loss are
# divided by the number of elements in Python, which may be 0.
BATCH_FAILURES = (RuntimeError, ZeroDivisionError)

# torch.func's own grad and vjp call this; torch.compile traces it as one operation, where it does
# not trace torch.autograd.grad. Its results are zeros for what is not reached.
autograd_grad = eager_transforms._autograd_grad
# Function.apply calls this inside transforms; the Function is the first argument that modes see.
apply_function: Any = _custom_function_call
# The transform level that a tensor belongs to: -1 for none, -2 for one that has ended.
level_of: Callable[[Tensor], int] = _functorch.maybe_get_level
_ENDED = -2
# Whether a transform has wrapped a tensor, and whether that is grad, vjp or jvp.
is_transform_tensor: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_differentiated_tensor: Callable[[Tensor], bool] = _functorch.is_gradtrackingtensor
# Differentiates in forward mode, too, inside of a Function's `jvp`, where torch does not:
# https://github.com/pytorch/pytorch/issues/197867
forward_mode_on = partial(forward_ad._set_fwd_grad_enabled, True)
_mode_stack: Any = torch._C
# How many modes see what this thread calls in Python, also where a block hides it from them.
count_function_modes: Callable[[], int] = _mode_stack._len_torch_function_stack
# How many modes see the operators of this thread, in a backward pass, too.
count_dispatch_modes: Callable[[], int] = _mode_stack._len_torch_dispatch_stack
# The pack and unpack hooks that saved tensors get at present, if any.
default_hooks: Callable[[], tuple[Any, Any] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
# Nodes have attributes of such names, which are read in one file.
_of_hooks = partial(getattr, torch._C._autograd)
allow_saved_tensor_hooks: Callable[[], None] = _of_hooks("_saved_tensors_hooks_enable")
why_no_saved_tensor_hooks: Callable[[], str | None] = _of_hooks(
    "_saved_tensors_hooks_get_disabled_error_message"
)
_NO_HOOKS = "torch.func's grad and vjp do not support saved tensor hooks"
# Whether this thread compiles scripted functions, as from their second call on: into a node whose
# derivative transforms do not see. One that was compiled before stays so. Run on torch 2.13.
compiles_scripted: Callable[[], bool] = torch._C._get_graph_executor_optimize
set_compiles_scripted: Callable[[bool], None] = torch._C._set_graph_executor_optimize
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


def transforms() -> tuple[str, ...]:
    """Return the transforms that are active, from the outermost: "Vmap", "Grad", "Jvp", ..."""
    # A compiled function is traced again where these differ, so that they are constants in it.
    stack: list[Any] | None = _read()
    return tuple([_KINDS[int(interpreter.key())] for interpreter in stack]) if stack else ()


class _Engine(threading.local):
    """How many functions this thread differentiates with the engine of eager autograd."""

    depth = 0
    own: frozenset[int] = frozenset()  # the ids of their variables that are leaves
    # The second run of a checkpointed function has how many transforms were around it when it
    # began, and the derivatives around the first run, which are those that are taken.
    second_run: tuple[int, tuple[str, ...]] | None = None

    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}  # leaves that the innermost function has made, by id
        self.inside: set[Any] = set()  # nodes that were found to lead to these alone


engine_calls = _Engine()


def derivatives_around() -> tuple[str, ...]:
    """Return the transforms that are active, with a Grad for each function of eager code."""
    # Eager code is the outermost: inside of a transform, a function gets a level of torch.func.
    stack = transforms()
    stack = ("Grad",) * engine_calls.depth + stack if engine_calls.depth else stack
    if engine_calls.second_run is None:
        return stack
    count, first = engine_calls.second_run
    return first + stack[count:]


@contextmanager
def as_in_first_run(first: tuple[str, ...]) -> Iterator[None]:
    """Let the derivatives around a block be those that were around the first run of a function."""
    # The level that a second run is differentiated in stands for the one around the first.
    with undone(partial(setattr, engine_calls, "second_run", engine_calls.second_run)):
        engine_calls.second_run = engine_calls.depth + len(transforms()), first
        yield


def is_plain() -> bool:
    """Return whether no transform, no trace and no forward mode is around this call."""
    if torch.compiler.is_compiling():
        return False
    return not _read() and forward_ad._current_level < 0


def differentiated() -> bool:
    """Return whether a transform around this call differentiates what it returns."""
    return not DERIVATIVES.isdisjoint(transforms())


# torch.compiler.assume_constant_result does the same, but would import all of torch's compiler.
for _run_in_trace in (transforms, derivatives_around, differentiated):
    vars(_run_in_trace)["_dynamo_marked_constant"] = True


def differentiated_around(stack: tuple[str, ...], kind: str) -> bool:
    """Return whether a transform of this kind stands inside one that differentiates."""
    last = len(stack) - 1 - stack[::-1].index(kind) if kind in stack else 0
    return not DERIVATIVES.isdisjoint(stack[:last])


def jvp_level() -> int:
    """Return the level of the outermost jvp around this call, 0 for none."""
    stack = transforms()
    return stack.index("Jvp") + 1 if "Jvp" in stack else 0


def recording_levels(tensor: Tensor) -> set[int]:
    """Return the transform levels that record a graph of a tensor; that of eager code is 0."""
    # A tensor that vmap has batched says that it does not require grad: the tensor inside may.
    recorded = (layer for layer in layers(tensor) if layer.requires_grad)
    return {level_of(layer) if is_transform_tensor(layer) else 0 for layer in recorded}


def is_batched(tensor: Tensor) -> bool:
    """Return whether a vmap around this call has batched a tensor."""
    return any(map(_functorch.is_batchedtensor, layers(tensor)))


def carries_graph(tensor: Tensor) -> bool:
    """Return whether eager code, or a transform, records a graph of a tensor."""
    return tensor.requires_grad or bool(recording_levels(tensor))


def in_dual_level() -> bool:
    """Return whether a tensor may carry a tangent of forward mode."""
    return forward_ad._current_level >= 0


def is_dual(tensor: Tensor) -> bool:
    """Return whether a tensor carries a tangent of forward mode."""
    if not in_dual_level():
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def function_modes() -> list[TorchFunctionMode]:
    """Return the modes that see what this thread calls, the innermost last."""
    return [_mode_stack._get_function_stack_at(i) for i in range(count_function_modes())]


push_mode: Callable[[TorchFunctionMode], None] = _mode_stack._push_on_torch_function_stack
pop_mode: Callable[[], TorchFunctionMode] = _mode_stack._pop_torch_function_stack


def slip_under_modes(mode: TorchFunctionMode) -> None:
    """Enter a mode as the outermost; only the mode of the default device stays outside of it."""
    # The mode is known by its name: torch imports its module with the first default device.
    first = [type(one).__name__ for one in function_modes()[:1]]
    _change_modes(lambda modes: modes.insert(first == ["DeviceContext"], mode))


def remove_function_mode(mode: TorchFunctionMode) -> None:
    """Leave a mode, wherever it stands; nothing if this thread is not in it."""
    if mode in function_modes():
        _change_modes(lambda modes: modes.remove(mode))


def _change_modes(change: Callable[[list[TorchFunctionMode]], None]) -> None:
    modes = function_modes()
    change(modes)

    def put() -> None:
        while count_function_modes():
            _mode_stack._pop_torch_function_stack()
        for mode in modes:
            _mode_stack._push_on_torch_function_stack(mode)

    with undone(put):  # calls it again if an interrupt comes in between
        pass


def detach_keep_tangent(tensor: Tensor) -> Tensor:
    """Return what `detach` does, or a copy that keeps the tangent of forward mode."""
    if not in_dual_level():
        return tensor.detach()
    with torch.no_grad(), INSIDE:  # detach() drops the tangent; vmap has no rule for unpack_dual
        return tensor.clone()


def unbatched(tensor: Tensor) -> Tensor:
    """Return the tensor that the vmaps innermost around this call have batched, with its graph."""
    while _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what each transform has wrapped, down to the data."""
    yield tensor
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        yield tensor


def data_of(tensor: Tensor) -> Tensor:
    """Return the data that transforms have wrapped in a tensor."""
    *_, data = layers(tensor)
    return data


def is_zero(tensor: Tensor) -> bool:
    """Return whether every entry of a tensor, in all of a batch, is known to be zero."""
    with no_transforms(), INSIDE:
        data = data_of(tensor)
        return not data.is_meta and not data.detach().count_nonzero()


@contextmanager
def no_transforms() -> Iterator[None]:
    """Run the block outside of all transforms."""
    with undo_stack() as left:
        while transforms():
            left.enter_context(temporarily_pop_interpreter_stack())
        yield


@contextmanager
def outside_vmaps(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run the block outside of the innermost vmaps, which have batched none of these tensors."""
    with undo_stack() as left:
        while batches_others(tensors):
            left.enter_context(temporarily_pop_interpreter_stack())
        yield


def batches_others(tensors: Sequence[Tensor]) -> bool:
    """Return whether the innermost transform is a vmap that has batched none of these tensors."""
    stack = transforms()
    return stack[-1:] == (BATCH,) and not any(len(stack) in _batch_levels(x) for x in tensors)


def without_innermost_tangent(tensor: Tensor) -> Tensor:
    """Return a tensor without its tangent of the innermost jvp around this call."""
    # vmap has no rule for unpack_dual.
    if _functorch.is_batchedtensor(tensor):
        dim, level = _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor)
        with temporarily_pop_interpreter_stack():
            inner = without_innermost_tangent(_functorch.get_unwrapped(tensor))
        return _functorch._add_batch_dim(inner, dim, level)
    if not is_dual(tensor):
        return tensor
    return forward_ad.unpack_dual(tensor).primal  # type: ignore[no-untyped-call, no-any-return]


def carries_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor carries a tangent, of this level or of one around it."""
    return tangent_version(tensor) is not None


def tangent_version(tensor: Tensor) -> int | None:
    """Return how often the tangent of a tensor was written on; None if it has none."""
    if not in_dual_level():
        return None
    # A tangent is shown at its own level alone.
    with undo_stack() as left:
        for layer in layers(tensor):
            while len(transforms()) > max(0, level_of(layer)):
                left.enter_context(temporarily_pop_interpreter_stack())
            if not _functorch.is_batchedtensor(layer) and is_dual(layer):
                return int(forward_ad.unpack_dual(layer).tangent._version)  # type: ignore[no-untyped-call]
    return None


def varies(tensor: Tensor) -> bool:
    """Return whether a tensor carries a graph or a tangent."""
    return carries_graph(tensor) or carries_tangent(tensor)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells the memory of a tensor, or of what transforms wrap in it: storage first."""
    # Run on torch 2.13.
    with torch._C.DisableTorchFunction(), INSIDE:  # a mode around would see each attribute
        data = data_of(tensor)
        if data.layout != torch.strided:
            return (id(data),)
        parts = data.storage_offset(), data.shape, data.stride(), data.dtype
        return data.untyped_storage()._cdata, *parts


def batched_like(tensor: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Return a tensor, batched in each vmap in which one of the others is."""
    levels = _batch_levels(tensor)
    for other in others:
        if not _batch_levels(other) <= levels:
            tensor = tensor + other.new_zeros((), dtype=tensor.dtype, device=tensor.device)
            levels |= _batch_levels(other)
    return tensor


def is_writable(tensor: Tensor, operands: Iterable[Tensor]) -> bool:
    """Return whether an operation with these operands can write on a tensor in place."""
    levels = _batch_levels(tensor)
    is_innermost = level_of(tensor) == len(transforms())
    return is_innermost and all(_batch_levels(operand) <= levels for operand in operands)


def is_of_ended_transform(tensor: Tensor) -> bool:
    """Return whether a transform that has returned had wrapped this tensor."""
    return level_of(tensor) == _ENDED


def without_ended_levels(tensor: Tensor) -> Tensor:
    """Return what transforms that have returned had wrapped. Run on torch 2.13."""
    while level_of(tensor) == _ENDED:
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _batch_levels(tensor: Tensor) -> set[int]:
    return {level_of(layer) for layer in layers(tensor) if _functorch.is_batchedtensor(layer)}


def clone_with_node(tensor: Tensor) -> Tensor:
    """Return a copy made by a node of its own, whether or not the tensor requires grad."""
    if _functorch.is_batchedtensor(tensor):
        dim, level = _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor)
        inner = clone_with_node(_functorch.get_unwrapped(tensor))
        return _functorch._add_batch_dim(inner, dim, level)
    if not tensor.requires_grad:
        tensor = tensor.view_as(tensor)  # not detached: a transform around may differentiate it
        set_requires_grad([tensor])
    return tensor.clone()


def detached_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without graphs and tangents that the innermost transform records."""
    if _functorch.is_batchedtensor(tensor):
        dim, level = _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor)
        inner = detached_leaf(_functorch.get_unwrapped(tensor))
        return _functorch._add_batch_dim(inner, dim, level)
    leaf = tensor.detach()
    set_requires_grad([leaf])
    return leaf


def run_in_level(
    fn: Callable[[list[Tensor], int], TensorLists], point: Sequence[Tensor]
) -> list[list[Any]]:
    """Return the lists of tensors that a function of tensors gives in a new level of torch.func."""
    # The call is `torch.func.vjp` without its trees, which take longer than a small pass;
    # torch.compile traces only torch's own:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/eager_transforms.py#L388
    depth = len(_read() or ())

    def leave() -> None:
        while len(_read() or ()) > depth:
            _functorch._grad_decrement_nesting()

    with disable_saved_tensors_hooks(_NO_HOOKS), undone(leave), torch.enable_grad(), INSIDE:
        level = _functorch._grad_increment_nesting()
        variables = [_functorch._wrap_for_grad(x, level) for x in point]
        set_requires_grad(variables)
        unwrap = _functorch._unwrap_for_grad
        return [
            [None if x is None else unwrap(x, level) for x in tensors]
            for tensors in fn(variables, level)
        ]


def trace_in_level(
    fn: Callable[[list[Tensor]], TensorLists], point: Sequence[Tensor]
) -> list[list[Any]]:
    """Do what `run_in_level` does, in a way that torch.compile traces: as torch.func's own."""
    level: Any
    with (
        disable_saved_tensors_hooks(_NO_HOOKS),
        eager_transforms.grad_increment_nesting() as level,
        torch.enable_grad(),
    ):
        variables = [_functorch._wrap_for_grad(x, level) for x in point]
        with eager_transforms.enable_inplace_requires_grad(True):
            for variable in variables:
                eager_transforms._set_tensor_requires_grad(variable)
        # Views: in a Function's `apply`, torch.compile would take the variables for constants.
        return [
            [None if x is None else _functorch._unwrap_for_grad(x, level) for x in tensors]
            for tensors in fn([x.view_as(x) for x in variables])
        ]


def set_requires_grad(tensors: Iterable[Tensor], to: bool = True) -> None:
    """Do what `requires_grad_` does, which torch refuses inside of transforms."""
    allowed = _functorch.get_inplace_requires_grad_allowed()
    with undone(partial(_functorch.set_inplace_requires_grad_allowed, allowed)):
        _functorch.set_inplace_requires_grad_allowed(True)
        for tensor in tensors:
            tensor.requires_grad_(to)


@contextmanager
def levels_put_back_on_error() -> Iterator[None]:
    """Leave the transforms, and the forward mode, that a block has entered and not left."""
    depth, in_forward_mode = len(_read() or ()), forward_ad._current_level >= 0
    allowed, enabled = torch._C._is_fwd_grad_enabled(), torch.is_grad_enabled()
    why_no_hooks = why_no_saved_tensor_hooks()
    try:
        yield
    except BaseException as error:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        # The only level is the process's: that of another thread stays.
        if not in_forward_mode and _NESTED_FORWARD_MODE not in str(error):
            with suppress(RuntimeError):  # no level is open
                torch._C._exit_dual_level(level=0)
        torch._C._set_fwd_grad_enabled(allowed)
        torch._C._set_grad_enabled(enabled)
        if why_no_hooks is None:
            allow_saved_tensor_hooks()
        raise


_NESTED_FORWARD_MODE = "Nested forward mode AD is not supported"


def compiled_autograd_disabled() -> AbstractContextManager[Any]:
    """Leave compiled autograd, which can run neither a transform nor hooks that keep something."""
    # Looked up, not imported: a process that has not imported it has not enabled it.
    module: Any = sys.modules.get(COMPILED_AUTOGRAD)
    return INSIDE if module is None else module._disable()


def without_default_hooks() -> AbstractContextManager[None]:
    """Let tensors be saved as they are: torch.func's derivatives have no hooks for that."""
    if torch.compiler.is_compiling() or default_hooks() is None:
        return nullcontext()
    return _default_hooks_set_aside()


@contextmanager
def _default_hooks_set_aside() -> Iterator[None]:
    autograd: Any = torch._C._autograd
    aside: list[tuple[Any, Any]] = []

    def put_back() -> None:
        while aside:
            autograd._push_saved_tensors_default_hooks(*aside.pop())

    with undone(put_back):
        while (hooks := default_hooks()) is not None:
            # No interrupt comes between the two, which are in one line.
            aside += (hooks, autograd._pop_saved_tensors_default_hooks())[:1]
        yield
