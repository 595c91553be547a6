"""Recording the gradients that arrive at values of tensors, in every pass, as safe_retain does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradkit._compat.autograd import (
    calling_thread,
    current_pass,
    is_returned_to_a_function,
    named_thread,
    record_stream,
)
from gradkit._compat.dynamo import any_compiled, compiled_together
from gradkit._compat.transforms import is_transform_tensor, transforms
from gradkit._compat.undoing import INSIDE, undone
from gradkit._core import graph, user_code
from gradkit._core.ownership import copy_for
from gradkit.errors import LeafTypeError, UnsupportedGraphError, describe, message


class GradRecorder:
    """Records the gradients that arrive at one tensor, for the value that it has now."""

    def __init__(self, tensor: Tensor, edge: GradientEdge, where: Callable[[], str]) -> None:
        self.tensor, self.edge = tensor, edge
        self.passes: list[Tensor] = []
        self._numbers: list[int] = []  # the numbers of these passes
        self._is_compiled, self._passed_unseen = any_compiled([type(edge.node)]), False
        self._where = where
        self._version = tensor._version
        self._thread = calling_thread()
        # The hook stays on the node of this version when the tensor is changed in place [L1].
        self.handle = user_code.register_own_hook(tensor, self._record)

    def _record(self, grad: Tensor | None) -> None:
        if calling_thread() != self._thread:
            return
        is_hidden = bool(_hidden_passes) and current_pass() in _hidden_passes
        node = self.edge.node
        is_hidden = is_hidden or (graph.is_leaf_node(node) and is_returned_to_a_function(node))
        if grad is not None and not is_hidden:  # an undefined gradient is None [D10]
            # A copy, because the node below may write on its cotangent [L3].
            self.passes.append(copy_for(grad, self.tensor))
            self._numbers.append(current_pass())
        elif self._is_compiled and grad is None:
            self._passed_unseen = True  # the pass went through what has made the tensor

    def read(self) -> list[Tensor]:
        """Return the gradients of the passes, to be read on this stream."""
        record_stream(self.passes)
        return self.passes

    def scale(self, passes: Set[int], factor: Tensor) -> None:
        """Multiply the gradients of passes with these numbers."""
        record_stream(self.passes)
        for grad, number in zip(self.passes, self._numbers, strict=True):
            if number in passes:
                grad.mul_(factor.to(grad.device))

    def check(self) -> None:
        """Raise if the history of the tensor was rebuilt, or the graph may hide a path to it."""
        tensor = self.tensor
        # The history of a view that was changed in place is rebuilt [L2].
        if tensor.grad_fn is not None and tensor._is_view() and tensor._version != self._version:
            where = self._where()
            fix = f"pass a clone, h = h.clone(), instead of {where}; or change a copy"
            raise UnsupportedGraphError(message(where, *_REBUILT, fix))
        if self._passed_unseen:
            raise UnsupportedGraphError(message(self._where(), *compiled_together("the losses")))


_REBUILT = (
    "a tensor whose history stays as it was at the call",
    "a view that was changed in place since, directly or through its base: torch rebuilds its "
    "history, so that gradients no longer arrive at the former value",
)


class Recorders:
    """Recorders, one for each place of the graph."""

    def __init__(self) -> None:
        # Gradients arrive at a node, and a number of its outputs. An in-place operation gives its
        # tensor others.
        self._by_arrival: dict[tuple[Node, int], GradRecorder] = {}

    def of(self, value: object, where: Callable[[], str]) -> GradRecorder:
        """Return the recorder of the value that a tensor has now; raise if it has no graph."""
        tensor = _require_graph(value, where)
        graph.refuse_lost_history([tensor], lambda _: where())
        edge = graph.edge(tensor)
        arrival = edge.node, edge.output_nr
        if arrival not in self._by_arrival:
            self._by_arrival[arrival] = GradRecorder(tensor, edge, where)
        return self._by_arrival[arrival]

    def before_pass(self) -> list[tuple[Tensor, GradientEdge]]:
        """Return the tensors and their edges, or raise if the history of one was rebuilt."""
        self.check()
        return [(recorder.tensor, recorder.edge) for recorder in self._by_arrival.values()]

    def check(self) -> None:
        """Raise if the history of a tensor was rebuilt, or the graph may hide a path to it."""
        for recorder in list(self._by_arrival.values()):
            recorder.check()

    def scale(self, passes: Set[int], factor: Tensor) -> None:
        """Multiply the gradients of passes with these numbers."""
        for recorder in list(self._by_arrival.values()):
            recorder.scale(passes, factor)

    def are_empty(self) -> bool:
        """Return whether no pass has been recorded."""
        return not any(recorder.passes for recorder in self._by_arrival.values())

    def remove(self) -> None:
        """Record no more."""
        for recorder in self._by_arrival.values():
            recorder.handle.remove()


def refuse_transforms(tensor: Tensor, where: Callable[[], str]) -> None:
    """Raise if a tensor is inside a transform of torch.func."""
    if is_transform_tensor(tensor) or transforms():
        expected = "a tensor outside of torch.func's transforms"
        got = "one inside: its gradient would not outlive the transform"
        fix = "return the value as auxiliary output instead, torch.func.grad(fn, has_aux=True)"
        raise UnsupportedGraphError(message(where(), expected, got, fix))


def _require_graph(tensor: object, where: Callable[[], str]) -> Tensor:
    """Return what is a tensor whose gradients can be recorded; raise if it is none."""
    if not isinstance(tensor, Tensor):
        do = "pass tensors; for the outputs of a module, safe_retain(model, ['name'])"
        raise LeafTypeError(message(where(), "a tensor", describe(tensor), do))
    refuse_transforms(tensor, where)
    if not tensor.requires_grad:
        got = f"{describe(tensor)} without a graph: a constant, detached, or made under no_grad"
        got += " (as in a checkpoint with use_reentrant=True)"
        fix = "keep it where it is part of the graph, or call requires_grad_() before its use"
        raise UnsupportedGraphError(message(where(), "a tensor that requires grad", got, fix))
    return tensor


class _Observers:
    """What the passes that one thread calls are seen by, those of hooks in them included."""

    def __init__(self, begin: Callable[[int], None] | None = None) -> None:
        self.active: list[Recorders] = []  # whose tensors every pass includes
        self.begin = begin  # is called with the number of each pass


# The keys are the threads that call passes; there are none while nothing is observed.
observers: dict[int, _Observers] = {}
_NONE = _Observers()
_hidden_passes: set[int] = set()


@contextmanager
def observing(observer: Recorders) -> Iterator[None]:
    """Include the observer's tensors in every pass of this thread inside the block."""
    with named_thread() as thread, INSIDE:  # a generator may end the block in another one
        mine = observers.get(thread) or _Observers()

        def end() -> None:
            mine.active[:] = [other for other in mine.active if other is not observer]
            if not mine.active and observers.get(thread) is mine and mine.begin is None:
                del observers[thread]

        with undone(end):
            observers[thread] = mine
            mine.active.append(observer)
            yield


def _of_this_thread() -> _Observers:
    return observers.get(calling_thread(), _NONE) if observers else _NONE


def any_observers() -> bool:
    """Return whether passes of this thread include extra tensors, and are recorded."""
    return bool(observers) and bool(_of_this_thread().active)


def what_begins() -> Callable[[int], None] | None:
    """Return what is to be called with the number of each pass of this thread, if anything is."""
    return _of_this_thread().begin


def observed_tensors() -> list[tuple[Tensor, GradientEdge]]:
    """Return the extra tensors and their edges, or raise what an observer raises."""
    if not observers:
        return []
    return [pair for observer in _of_this_thread().active for pair in observer.before_pass()]


@contextmanager
def numbered_passes() -> Iterator[Set[int]]:
    """Yield the numbers of the passes of rows that this thread begins in the block."""
    numbers: set[int] = set()
    mine = _of_this_thread()
    if not mine.active:
        yield numbers
        return
    with undone(partial(setattr, mine, "begin", mine.begin)):
        mine.begin = numbers.add
        yield numbers


@contextmanager
def hidden_passes() -> Iterator[None]:
    """Hide the passes of rows that this thread begins in the block from every observer."""
    if not any_observers():
        yield
        return
    numbers: set[int] = set()

    def hide(number: int) -> None:  # in the thread of a device
        numbers.add(number)
        _hidden_passes.add(number)

    thread = calling_thread()
    mine = observers[thread]

    def end() -> None:
        observers[thread] = mine
        _hidden_passes.difference_update(numbers)

    with undone(end):
        observers[thread] = _Observers(hide)
        yield


def scale_recorded(passes: Set[int], factor: Tensor) -> None:
    """Multiply what has been recorded in passes with these numbers."""
    for observer in list(_of_this_thread().active) if passes else ():
        observer.scale(passes, factor)
