"""Gradients are copied as they arrive in a pass, before user code can write on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import BackwardHook

from gradkit._autograd.engine import own_roots
from gradkit._compat.autograd import (
    TorchDispatchMode,
    current_node,
    current_pass,
    is_batch,
    storage_address,
    tensor_hooks,
)
from gradkit._compat.checkpoints import CHECKPOINT_MODULE
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import detach_keep_tangent, layers
from gradkit._compat.undoing import undo_stack, undone
from gradkit._core import pytree, user_code
from gradkit._core.ownership import copy_for, written_tensors
from gradkit._core.params import Params
from gradkit._core.user_code import Cotangents, register_own_hooks
from gradkit.errors import warn_fallback


class HookInBatchError(RuntimeError):
    """A hook has computed with a batch: its `.data` crashes the process, its std() is wrong."""


@contextmanager
def hooks_refused(outputs: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield what to start from; raise if a hook gets a batch, also where it catches the error."""
    if not user_code.hooks_registered():
        yield outputs
        return
    guard, passes = _HookGuard(), set[int]()

    def begin(number: int) -> None:
        passes.add(number)
        _refusing.add(number)
        if sys.getprofile() is None:
            sys.setprofile(_refuse_first_entry)

    with undo_stack() as stack:
        if not all(output.is_cpu for output in outputs):
            stack.callback(_refusing.difference_update, passes)
            outputs = stack.enter_context(own_roots(outputs, begin))
        stack.enter_context(guard)
        if sys.getprofile() is None:  # a profiler of the user's would miss what runs here
            stack.callback(sys.setprofile, None)
            sys.setprofile(_refuse_entry)
        yield outputs
    if guard.has_met:
        raise HookInBatchError(_HOOK)


_HOOK = "a hook computes with the gradient, which in a batched pass is a batch of them"


def _refuse_entry(frame: FrameType, event: str, _: object) -> None:
    """Raise before the first line of a hook that a pass of this thread calls with a batch."""
    # A hook may count its calls, or remove itself, before it computes. Below a profiler, the guard
    # alone refuses it.
    names = [one.f_code.co_name for one in (frame, frame.f_back) if one is not None]
    if event != "call" or names[0] in _ENGINE or not _ENGINE.issuperset(names[1:]):
        return
    # The engine calls the backward of a Function, which is no hook, by torch.autograd.function.
    of_function = "gradkit.", "torch.autograd.function"
    if not str(frame.f_globals.get("__name__")).startswith(of_function):
        given = [frame.f_locals.get(name) for name in frame.f_code.co_varnames]
        if any(map(is_batch, pytree.tensors(given))):
            raise HookInBatchError(_HOOK)


_refusing: set[int] = set()  # the numbers of passes whose hooks run in the threads of devices


def _refuse_first_entry(frame: FrameType, event: str, arg: object) -> None:
    """Refuse an entry in the thread of the roots' device, until no pass needs it any more."""
    # Hooks in the thread of another device are refused by the guard alone.
    if not _refusing:
        sys.setprofile(None)
    elif current_pass() in _refusing:
        _refuse_entry(frame, event, arg)


class _HookGuard(TorchFunctionMode):
    """Raises when Python code computes with a batch; the engine itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.has_met = False

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, unless an argument is a batch."""
        kwargs = kwargs or {}
        if any(map(is_batch, pytree.tensors((args, kwargs)))):
            self.has_met = True
            raise HookInBatchError(_HOOK)
        return func(*args, **kwargs)


CopyHook: TypeAlias = Callable[[Tensor | None], Tensor | None]


class ArrivalCapture:
    """Copies the gradients of some tensors as they arrive."""

    # The engine captures a non-leaf's gradient before the tensor's hooks if the pass goes on below,
    # and hands it on to the node there, which may write on it [D3, L3]; a custom Function that was
    # given a leaf's captured gradient may write on that, too. A hook that is registered last sees
    # the value that the user's hooks return.
    #
    # Other threads, and passes inside hooks, go through the same tensors: each gradient of a
    # non-leaf is stored by the number of its pass, and `own_roots` tells which is ours.

    def __init__(
        self,
        variables: Sequence[Tensor],
        to_copy: Sequence[Tensor],
        stack: ExitStack,
        *,
        create_graph: bool,
        ends: bool,
        finder: WriteFinder | None,
    ) -> None:
        self._finder = finder
        self.own_pass: list[int] = []  # the number of the pass, once it has begun
        self._arrived: dict[int, dict[int, Tensor]] = {}
        self._create_graph = create_graph
        # The version that the gradient of each non-leaf arrived with, by its number: a sibling may
        # have written on it before. What its own hooks write belongs to it.
        self.versions: dict[int, int] = {}
        if not to_copy:
            return
        self._hooked = {id(v) for v in to_copy if tensor_hooks(v)}
        ids = set(map(id, to_copy))
        numbered = [(index, v) for index, v in enumerate(variables) if id(v) in ids]
        leaves = [(index, v) for index, v in numbered if ends or v.grad_fn is None]
        copies: list[CopyHook] = [_cloned] * len(leaves)
        if finder is not None:
            copies = [partial(_noted_and_cloned, finder, index) for index, _ in leaves]
        stack.enter_context(copied_on_arrival([leaf for _, leaf in leaves], copies))
        for index, variable in () if ends else numbered:
            if variable.grad_fn is not None:
                self._arrived[index] = {}
                hook = partial(self._store, index, variable)
                stack.callback(user_code.register_own_hook(variable, hook).remove)

    @property
    def needs_number(self) -> bool:
        """Whether the number of the pass tells which of the gradients that arrive are its own."""
        return bool(self._arrived)

    def _store(self, index: int, variable: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            if self._finder is not None and not is_batch(grad):
                self._finder.arrive(index, grad)
            copy = copy_for(grad if self._create_graph else detach_keep_tangent(grad), variable)
            self._arrived[index][current_pass()] = copy
            # The finder separates gradients: only its own hooks have written on one then.
            if self._finder is None and grad._version and id(variable) not in self._hooked:
                self.versions[index] = grad._version

    def replace(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients, with those that arrived instead of the engine's captures."""
        for index, by_pass in self._arrived.items():
            if self.own_pass[0] in by_pass:
                arrived, captured = by_pass.pop(self.own_pass[0]), grads[index]
                if type(arrived) is Tensor and captured is not None:
                    arrived = arrived.as_subclass(type(captured))  # as torch.autograd.grad does
                grads[index] = arrived
        return grads


@contextmanager
def copied_on_arrival(
    tensors: Sequence[Tensor], copies: Sequence[CopyHook] | None = None
) -> Iterator[None]:
    """Make the engine capture a copy of the gradient of each tensor that a pass ends at."""
    # The tables of hooks get it themselves: a handle for each would take longer than the copy.
    tables = list(map(user_code.hooks_of, tensors))
    key = object()

    def end() -> None:
        for table in tables:
            table.pop(key, None)

    with undone(end):
        for table, copy in zip(tables, copies or [_cloned] * len(tables), strict=True):
            table[key] = copy
        yield


def _cloned(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()  # an undefined gradient is None [D10]


def _noted_and_cloned(finder: WriteFinder, index: int, grad: Tensor | None) -> Tensor | None:
    if grad is not None and not is_batch(grad):  # a batch is of another thread's pass
        finder.arrive(index, grad)
    return _cloned(grad)


class WriteFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which gradients arrive in a pass, and what is written by Python code in it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The storage, where the code is, and whether the node that runs it has made the memory.
        self._writes: list[tuple[int, str, bool]] = []
        self._made: dict[int, Node] = {}  # the nodes whose Python code made a storage
        # Each variable, what arrived for it, and how many writes there had been.
        self._arrived: list[tuple[int, Tensor, int]] = []
        # Copies, by their storage, of what torch would have shared; they are kept until the end.
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the tensors that it writes on."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        location = _location(sys._getframe(1))
        if location is not None:
            node = current_node()
            addresses = map(memory_address, written)
            self._writes += [(a, location, self._made.get(a) is node) for a in addresses]
            if not written:
                known = set(map(memory_address, pytree.tensors((args, kwargs))))
                made = set(map(memory_address, pytree.tensors(result))) - known
                self._made |= dict.fromkeys(made, node)
        return result

    def note_copy(self, grad: Tensor, copy: Tensor) -> None:
        """Note that a part of the pass got a copy of a gradient that torch would have shared."""
        self._copied[memory_address(copy)] = grad, copy

    def arrive(self, variable: int, grad: Tensor) -> None:
        """Note that the gradient of a variable arrives; its memory is kept until the pass ends."""
        self._arrived.append((variable, grad, len(self._writes)))

    def report(self, params: Params) -> None:
        """Warn of each gradient on whose memory, as torch would have shared it, was written."""
        writes = [(self._shared(address), *rest) for address, *rest in self._writes]
        lines: list[str] = []
        for variable, grad, before in self._arrived:
            address = self._shared(memory_address(grad))
            for when, some in (("after", writes[before:]), ("before", writes[:before])):
                wrote = f"wrote on its gradient {when} it had arrived"
                lines += [
                    f"{params.path(variable)}: {location} {wrote}"
                    for storage, location, is_own in some
                    if storage == address and not (is_own and when == "before")
                ]
        if lines:
            warn_fallback(
                "; ".join(dict.fromkeys(lines))
                + ". The gradients that are returned are right: each part of this pass had a copy "
                "of its own. Elsewhere, torch shares the memory. Return a new tensor there: "
                "lambda grad: grad.clamp(-1, 1), and not grad.clamp_(-1, 1)"
            )

    def _shared(self, address: int) -> int:
        """Return the storage of which torch would have shared the one at an address."""
        while address in self._copied:
            address = memory_address(self._copied[address][0])
        return address


_ENGINE = {"_engine_run_backward", "run_engine"}  # the functions that call the engine


def _location(frame: FrameType | None) -> str | None:
    """Return where the code of a hook or Function is that runs an operation; None for torch's."""
    location: str | None = None
    while frame is not None and frame.f_code.co_name not in _ENGINE:
        module = frame.f_globals.get("__name__", "")
        if module == CHECKPOINT_MODULE:
            return None  # a checkpoint recomputes, and writes on its own
        if location is None and not module.startswith(("torch.", "gradkit.")):
            code = frame.f_code
            location = f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})"
        hook = frame.f_locals.get("self") if module == BackwardHook.__module__ else None
        if location is not None and isinstance(hook, BackwardHook):
            return f"a backward hook of {type(hook.module).__name__}, {location},"
        frame = frame.f_back
    return location


# A NoteCopy gets a gradient, and the copy that is handed on in its place.
NoteCopy: TypeAlias = Callable[[Tensor, Tensor], object]


@contextmanager
def without_shared_memory(
    nodes: Iterable[Node], note_copy: NoteCopy = lambda grad, copy: None
) -> Iterator[None]:
    """Copy what a node hands to more than one other, in every pass through these nodes."""
    # A hook or a Function that writes on its gradient in place changes its own alone then, whether
    # it runs before or after another has been captured, or summed up [A3, L3].
    separate = partial(_separated, note_copy=note_copy)

    def separate_each(grads: Cotangents, _: Cotangents) -> Cotangents:
        return separate(grads, ())

    with undo_stack() as stack:
        for node in nodes:
            if any(child is not None for child, _ in node.next_functions):
                (last,) = register_own_hooks(partial(node.register_hook, separate_each))
                stack.callback(last.remove)
                hooks = cast("dict[int, object]", last.hooks_dict_ref())
                others = [key for key in hooks if key != last.id]
                if others:
                    (first,) = register_own_hooks(partial(node.register_hook, separate))
                    stack.callback(first.remove)
                    # The engine follows the order of insertion, and not OrderedDict's.
                    for key in (*others, last.id):
                        hooks[key] = hooks.pop(key)
        yield


def _separated(grads: Cotangents, received: Cotangents, note_copy: NoteCopy) -> Cotangents:
    """Return gradients that share memory neither with each other nor with what was received."""
    taken = {memory_address(grad) for grad in received if grad is not None}
    separate: list[Tensor | None] = []
    for grad in grads:
        if grad is None or memory_address(grad) not in taken:
            separate.append(grad)
        else:
            copy = _unshared(grad)
            note_copy(grad, copy)
            separate.append(copy)
        if grad is not None:
            taken.add(memory_address(grad))
    return tuple(separate)


def _unshared(grad: Tensor) -> Tensor:
    """Return a copy; an expanded tensor stays one, since hooks may look at strides."""
    if grad.layout != torch.strided or grad.is_nested or 0 not in grad.stride():
        return grad.clone()
    once = [slice(0, 1) if stride == 0 else slice(None) for stride in grad.stride()]
    return grad[tuple(once)].clone().expand(grad.shape)


def memory_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; of a sparse one, that of its values."""
    *_, data = layers(tensor)
    if data.layout != torch.strided:
        data = data._values() if data.is_sparse else data.values()
    return storage_address(data)
