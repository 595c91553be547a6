"""Everything that running a step may change: tensors, modules, `.grad` and random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gradkit._compat.transforms import is_of_ended_transform, transforms
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit._core.user_code import CapturedObject, captured_by
from gradkit._state import rng
from gradkit._state.grad_attribute import grad_dtypes_put_back, grads_put_back
from gradkit._state.module_state import (
    LARGEST_STATE,
    ModuleSnapshot,
    TensorState,
    alone,
    keeping_state,
    modules_put_back,
)
from gradkit._state.stale_reads import stale_reads_refused


class Snapshot:
    """The state of modules, tensors and random number generators, to be restored after each run."""

    def __init__(self, captured: Iterable[CapturedObject], tensors: Iterable[Tensor]) -> None:
        captured = list(captured)
        modules = [value for value in captured if isinstance(value, nn.Module)]
        parts = [part for module in modules for part in module.modules()]
        own = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        own += [x for part in parts for x in vars(part).values() if isinstance(x, Tensor)]
        every = {id(t): t for t in (*tensors, *own) if not is_of_ended_transform(t)}
        self._tensors = list(every.values())
        self.modules = unscripted(captured)
        self._generators = list(rng.generators(captured))
        self._state = TensorState(self._tensors)
        self.leaves = [t for t in self._tensors if t.is_leaf]
        self.grads = {id(t): t.grad for t in self.leaves}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run a block with every `.grad` None, and restore the state after it."""
        states, others = self._random_states(), _python_states()
        with undo_stack() as stack:
            stack.enter_context(undone(partial(rng.restore, states)))
            stack.enter_context(undone(partial(_restore_python_states, *others)))
            stack.enter_context(grads_put_back(self.leaves))
            stack.enter_context(grad_dtypes_put_back(self.leaves))
            # The tensors are back before `.grad`, which must fit them.
            stack.enter_context(undone(self._state.restore))
            stack.enter_context(modules_put_back(self.modules, hooks=True))
            yield

    def random_states(self) -> list[Any]:
        """Return the states of all generators, comparable with `==`."""
        return [[state.tolist() for _, state in self._random_states()], repr(_python_states())]

    def _random_states(self) -> rng.States:
        return rng.states() + rng.states_of(self._generators)


def put_back(*functions: object) -> AbstractContextManager[None]:
    """Put back what modules of the user's functions keep; everything, if the block raises."""
    return INSIDE if torch.compiler.is_compiling() else _put_back(*functions)


@contextmanager
def _put_back(*functions: object) -> Iterator[None]:
    # The block around puts back what nested ones keep.
    captured = captured_by(*functions)
    with keeping_state() as state:
        if not captured:  # errors of torch.func put back the state of the default generators
            yield
            return
        modules = unscripted(captured)
        new = [state.add(module, hooks=True) for module in modules]
        stale = stale_reads_refused(filter(None, new), state=state)
        restore = _restoring(captured, modules, new)
        with stale, INSIDE:
            try:
                yield
            except BaseException:
                restore()
                raise


@contextmanager
def put_back_on_error(*functions: object) -> Iterator[None]:
    """Put everything back if the block raises; what modules keep is the user's otherwise."""
    if torch.compiler.is_compiling():
        yield
        return
    captured = captured_by(*functions)
    modules = unscripted(captured)
    restore = _restoring(captured, modules, [None] * len(modules))
    try:
        yield
    except BaseException:
        restore()
        raise


def _restoring(
    captured: list[CapturedObject], modules: list[nn.Module], known: Sequence[ModuleSnapshot | None]
) -> Callable[[], None]:
    """Return what puts back buffers, attributes, hooks, modes, small tensors, random states."""
    # A transform around refuses writes on what is outside, or has copies made.
    if transforms() or rng.is_capturing():
        return _do_nothing
    pairs = zip(modules, known, strict=True)
    with alone() if None in known else INSIDE, INSIDE:  # a state that knows them is alone
        snapshots = [one or ModuleSnapshot(module, hooks=True) for module, one in pairs]
    params = [x for one in snapshots for x in one.now_in("_parameters")]
    written = [x for one in snapshots for x in one.now_in("_buffers")]
    # A larger tensor that a function refers to, and that no module has for a buffer, is no state.
    small = (x for x in captured if isinstance(x, Tensor) and x.numel() <= LARGEST_STATE)
    written += [x for x in small if not x.requires_grad]
    tensors, frozen = TensorState(written), [x.requires_grad for x in params]
    states = rng.states() + rng.states_of(
        [x for x in captured if type(x) is Generator]
        + [x for snapshot in snapshots for x in snapshot.generators]
    )

    def restore() -> None:
        with alone():
            for snapshot in snapshots:
                snapshot.restore()
            tensors.restore()
            for param, requires_grad in zip(params, frozen, strict=True):
                if param.requires_grad != requires_grad:
                    param.requires_grad_(requires_grad)
            rng.restore(states)

    return restore


def _do_nothing() -> None:
    pass


def unscripted(captured: Iterable[CapturedObject]) -> list[nn.Module]:
    """Return the modules among some objects, without those whose state torch.jit keeps."""
    modules = [x for x in captured if isinstance(x, nn.Module)]
    return [x for x in modules if not isinstance(x, torch.jit.ScriptModule)]


def _python_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore_python_states(of_python: Any, of_numpy: Any) -> None:
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
