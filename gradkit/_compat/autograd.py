"""torch's private names for autograd and tensors. Run on torch 2.11 to 2.15, or as said."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from logging import DEBUG, getLogger
from operator import attrgetter, methodcaller
from threading import get_ident
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch._utils
from torch import Tensor
from torch.autograd.graph import Node, _engine_run_backward
from torch.nested._internal import nested_tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from gradkit._compat.undoing import INSIDE, undone

__all__ = ["TorchDispatchMode", "flatten_dense", "unflatten_dense", "without_torch_function"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_log = getLogger(torch.autograd.graph.__name__)
_engine: Any = torch.autograd.Variable._execution_engine
# The type of the nodes that accumulate the gradient of a leaf tensor.
AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
# The binding takes an iterable of tensors; torch.autograd.graph's function is a Python call more.
increment_version: Callable[[Iterable[Tensor]], None] = torch._C._increment_version
# The number of nodes that its thread had made before a node; the largest number for a leaf's.
sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
# The number that this thread's next node gets.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# The number of the engine's pass that runs in this thread; -1 outside of passes.
current_pass: Callable[[], int] = torch._C._current_graph_task_id
# The node that the engine executes in this thread.
current_node: Callable[[], Node] = torch._C._current_autograd_node
# Whether a TorchFunctionMode is active, which sees what torch.autograd.grad is called with.
function_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
# Calls a function once the pass of this thread is done, which raises what that raises: before it
# returns, and on the streams of its caller; not if it fails [E7]. So torch's DDP and FSDP end.
at_end_of_pass: Callable[[Callable[[], None]], None] = _engine.queue_callback
# Holds an entry for each jagged tensor's offsets that are alive.
jagged_offsets: Any = vars(nested_tensor).get("_tensor_symint_registry", WeakKeyDictionary())
# The address of a tensor's storage, and how many owners the storage at an address has.
storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
# How many owners a tensor has, torch's own among them; before 2.12, only Python's are counted.
tensor_use_count: Callable[[Any], int] = getattr(Tensor, "_use_count", sys.getrefcount)
# The hooks of a tensor by their handles, in their order, or None: those of its gradient, and those
# that run once `.grad` has it.
_Hooks: TypeAlias = Callable[[Tensor], dict[object, Callable[..., Any]] | None]
tensor_hooks: _Hooks = attrgetter("_backward_hooks")
post_accumulate_hooks: _Hooks = attrgetter("_post_accumulate_grad_hooks")
# The Function whose nodes are of a type, and the type of the nodes of a Function.
forward_class: Callable[[Any], Any] = attrgetter("_forward_cls")
node_type: Callable[[Any], type] = attrgetter("_backward_cls")
# Whether a tensor is a view of another that autograd knows of.
is_view: Callable[[Tensor], bool] = Tensor._is_view
# Whether a tensor stands for zeros without memory of its own, as torch.func makes them.
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
# Let no tensor subclass change what torch functions return in a block.
without_torch_function: Callable[[], AbstractContextManager[object]] = (
    torch._C.DisableTorchFunctionSubclass
)
# Whether a tensor is a batch of `batched_mode`. Run on torch 2.13.
is_batch: Callable[[Any], bool] = torch._C._functorch.is_legacy_batchedtensor
# Let no TorchFunctionMode see what is called in a block. Run on torch 2.13.
without_function_modes: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
# Whether operations are recorded from now on, without the block that torch's public one makes.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# Whether autocast is on, for any device: it keeps a copy of each leaf that it casts until it ends.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
# Let them see it again, inside of such a block.
with_function_modes: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction


_CALLER = "gradkit: the thread that calls passes"


def _stash_caller(thread: int | None) -> None:
    if not hasattr(torch._C, "_remove_obj_from_tls"):  # torch 2.11 takes over the reference
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thread))
    torch._C._stash_obj_in_tls(_CALLER, thread)


# A thread that ends while it has such an object waits for the interpreter's lock.
_forget_caller: Callable[[], object] = (
    partial(torch._C._remove_obj_from_tls, _CALLER)
    if hasattr(torch._C, "_remove_obj_from_tls")
    else partial(_stash_caller, None)
)


def calling_thread() -> int:
    """Return the number of this thread; in a pass inside of `named_thread`, that of its caller."""
    # The engine runs nodes in threads of devices, too, and in others where passes are nested
    # deeply. It hands them such objects of its caller. (Its own, the context, is gone there once a
    # hook has run a pass.) Run on torch 2.13.
    if torch._C._is_key_in_tls(_CALLER):
        return cast("int | None", torch._C._get_obj_in_tls(_CALLER)) or get_ident()
    return get_ident()


@contextmanager
def named_thread() -> Iterator[int]:
    """Let `calling_thread` tell, in all passes of the block, which thread has called them."""
    if torch._C._is_key_in_tls(_CALLER) and (around := torch._C._get_obj_in_tls(_CALLER)):
        yield cast("int", around)
        return
    thread, is_forgotten = get_ident(), False
    try:
        try:
            _stash_caller(thread)
            yield thread
        finally:
            _forget_caller()
            is_forgotten = True
    finally:  # again, as `undone` does it: an interrupt may have come in between
        if not is_forgotten:
            _forget_caller()


_tentative: set[int] = set()  # the threads that call tentative passes


@contextmanager
def tentative_passes() -> Iterator[None]:
    """Let passes record graphs that may be thrown away: a derivative is refused once taken."""
    with named_thread() as thread:
        is_nested = thread in _tentative
        with INSIDE if is_nested else undone(partial(_tentative.discard, thread)), INSIDE:
            _tentative.add(thread)
            yield


def is_tentative() -> bool:
    """Return whether this runs in a tentative pass, be it in a device's thread."""
    return calling_thread() in _tentative


def forward_line(node: Node) -> str | None:
    """Return the line of the forward pass that made a node, if anomaly detection was on."""
    # Run on torch 2.13.
    frames: list[str] = cast("Any", node.metadata).get("traceback_", [])
    ours = [frame for frame in frames if _TORCH not in frame.partition("\n")[0]]
    lines = [line.strip() for line in ours[-1].strip().splitlines()] if ours else []
    return ": ".join(lines[:2]).removeprefix("File ") or None


def run_engine(*arguments: Any, accumulate: bool = False) -> tuple[Tensor | None, ...]:
    """Run the engine: outputs, cotangents, retain_graph, create_graph, inputs, allow_unused."""
    # torch.autograd.grad and backward do this once they have read their arguments, which takes them
    # 13 us and 0.5 us an input. Plain tensors only. In between torch has a function that logs each
    # node when asked, and passes context variables on to the threads of devices, 6 us where the
    # caches are cold: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/graph.py#L966
    on_device = _may_have_device_threads(backend_registration._privateuse1_backend_name)
    run = _engine_run_backward if on_device or _log.isEnabledFor(DEBUG) else _engine.run_backward
    grads: tuple[Tensor | None, ...] = run(*arguments, accumulate_grad=accumulate)
    if on_device and not accumulate:
        record_stream(grads)
    return grads


def run_without_grad(calls: Iterable[Callable[[], object]]) -> None:
    """Run what is not to be recorded, as `torch.no_grad()` does, which takes a microsecond more."""
    before = torch.is_grad_enabled()
    try:
        try:
            set_grad_enabled(False)
            for call in calls:
                call()
        finally:
            set_grad_enabled(before)
    finally:  # again, as `undone` does it: an interrupt may have come in between
        set_grad_enabled(before)


@cache
def _may_have_device_threads(other: str) -> bool:
    # `other`: the name of a backend beside torch's own, which may be registered at any time.
    return torch.accelerator.is_available()


def record_stream(tensors: Iterable[Tensor | None]) -> None:
    """Let no stream use the memory of tensors again before this stream has read it."""
    # The engine runs a node on the stream of its forward pass, which may be another: it would use
    # the memory again as soon as a tensor is freed. Where the streams are one, this does nothing.
    with without_function_modes(), INSIDE:
        for tensor in tensors:
            if tensor is not None and not tensor.is_cpu and _records_streams(tensor.device.type):
                for part in _strided_parts(tensor):
                    part.record_stream(torch.accelerator.current_stream(part.device))


@cache
def _records_streams(kind: str) -> bool:
    key = torch._C._dispatch_key_for_device(kind)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", key)


def _strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in whose memory one of torch's own type is; none for another type."""
    is_wrapped = is_batch(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if is_wrapped or type(tensor) not in (Tensor, torch.nn.Parameter) or is_zero_tensor(tensor):
        return ()
    if tensor.layout == torch.strided:
        # Torch would resolve what is conjugated lazily, in a copy of it, and record that.
        plain = tensor.conj() if tensor.is_conj() else tensor
        return (torch._neg_view(plain) if plain.is_neg() else plain,)
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else ()


def may_have_node(leaf: Tensor) -> bool:
    """Return False only if no graph in this process has a node for a leaf's gradient."""
    # Such a node refers to its leaf. What else of torch's refers to it causes a look not needed.
    return not hasattr(Tensor, "_use_count") or tensor_use_count(leaf) > 1


def storage_key(tensor: Tensor) -> int:
    """Return a number that the tensors in one storage share, as long as that lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def run_around_backward(node: Node, around: Callable[..., Any]) -> None:
    """Let passes call `around(run, *cotangents)` where they would `run` a Function's backward."""
    # The engine looks `apply` up on the node, to which nothing here may refer. Run on torch 2.13.
    reference, inner = ref(node), vars(node).get("apply")

    def run(*cotangents: Tensor | None) -> Any:
        function: Any = reference()
        return type(function).apply(function, *cotangents)

    cast("Any", node).apply = partial(around, inner or run)


def operator_schema(func: Any) -> Any:
    """Return what an operator declares of its arguments and results; None for torch.cond's kind."""
    return getattr(func, "_schema", None)


def flatten_dense(tensors: Sequence[Tensor]) -> Tensor:
    """Return a vector of the entries of dense tensors of one dtype; of a lone one, a view."""
    flat = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return cast("Tensor", flat)


def unflatten_dense(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of a vector, one after the other, in the shapes of some tensors."""
    parts = torch._utils._unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, ...]", parts)


@contextmanager
def batched_mode() -> Iterator[int]:
    """Enter the mode in which the engine takes batched cotangents; yield the level of the batch."""
    # torch.autograd.grad does this for `is_grads_batched`:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/__init__.py#L577
    entered: list[int] = []

    def end() -> None:
        # No interrupt comes between the two, which are in one line. A level is at least 1.
        _ = entered and entered.pop() and torch._C._vmapmode_decrement_nesting()

    with undone(end):
        entered.append(torch._C._vmapmode_increment_nesting())
        yield entered[0]


def as_batch(tensor: Tensor, level: int) -> Tensor:
    """Return a stack of tensors as a batch of that mode. Run on torch 2.13."""
    return torch._add_batch_dim(tensor, 0, level)


def from_batch(tensor: Tensor, level: int, size: int) -> Tensor:
    """Return a batch of that mode, which may be the same tensor for all, as a stack."""
    # Run on torch 2.13.
    return torch._remove_batch_dim(tensor, level, size, 0)


# Attention by torch's plain formula, and the weights; it would add a mask of bools to the scores.
plain_attention: Callable[..., tuple[Tensor, Tensor]] = (
    torch.ops.aten._scaled_dot_product_attention_math.default
)


@contextmanager
def plain_recurrent_kernels() -> Iterator[None]:
    """Switch off the kernels for whole recurrent layers: no second derivative, and no batches."""
    # `torch.backends` would not do: its flags may be frozen, and its contexts set others, too.
    put_cudnn, put_mkldnn = torch._C._set_cudnn_enabled, torch._C._set_mkldnn_enabled
    before = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
    with undone(partial(put_cudnn, before[0])), undone(partial(put_mkldnn, before[1])):
        put_cudnn(False)
        put_mkldnn(False)
        yield


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what an operator, or an overload of one, writes on. Run on torch 2.13."""
    overloads = operator.overloads() if hasattr(operator, "overloads") else ()
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for one in [getattr(operator, name) for name in overloads] or [operator]
        for index, argument in enumerate(one._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def is_returned_to_a_function(leaf: Node) -> bool:
    """Return whether the running pass is inside a Function's backward, which gets the gradient."""
    # The backward may return it, or not; the pass around brings what it returns. A hook calls this.
    frame: Any = sys._getframe(1)
    inside = torch.autograd.function.BackwardCFunction.apply.__code__
    while frame is not None and frame.f_code is not inside:
        frame = frame.f_back
    if frame is None:
        return False
    try:
        return not torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # says that this is torch.autograd.grad, which adds to no `.grad`
        return True
