"""Everything that running a step may change: tensors, modules, `.grad` and random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gradkit._compat.transforms import transforms
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit._core.user_code import captured_by
from gradkit._state import rng
from gradkit._state.grad_attribute import grad_dtypes_put_back, grads_put_back
from gradkit._state.module_state import ModuleSnapshot, alone_with, modules_put_back


class Snapshot:
    """The state of modules, tensors and random number generators, to be restored after each run."""

    def __init__(self, captured: Iterable[object], tensors: Iterable[Tensor]) -> None:
        captured = list(captured)
        modules = [value for value in captured if isinstance(value, nn.Module)]
        parts = [part for module in modules for part in module.modules()]
        own = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        own += [x for part in parts for x in vars(part).values() if isinstance(x, Tensor)]
        self._tensors = list({id(t): t for t in (*tensors, *own)}.values())
        self.modules = [module for module in modules if not _is_scripted(module)]
        self._generators = list(rng.generators(captured))
        self._values = [(t, t.data, _version(t), t.detach().clone()) for t in self._tensors]
        self.leaves = [t for t in self._tensors if t.is_leaf]
        self._requires_grad = [(t, t.requires_grad) for t in self.leaves]
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
            # Before `.grad`, which must fit.
            stack.enter_context(undone(self._restore_tensors))
            stack.enter_context(modules_put_back(self.modules, hooks=True))
            yield

    def _restore_tensors(self) -> None:
        for tensor, data, version, numbers in self._values:
            if any(getattr(tensor, name) != getattr(data, name) for name in _KIND):
                tensor.data = data  # a module was moved or cast
            if _has_changed(tensor, version, numbers):
                tensor.data.copy_(numbers)
        for tensor, requires_grad in self._requires_grad:
            if not (tensor.is_leaf or tensor._is_view()):
                tensor.detach_()
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

    def random_states(self) -> list[Any]:
        """Return the states of all generators, comparable with `==`."""
        return [[state.tolist() for _, state in self._random_states()], repr(_python_states())]

    def _random_states(self) -> rng.States:
        return rng.states() + rng.states_of(self._generators)


_KIND = ("dtype", "device", "shape")
# A larger tensor that a function refers to, and that no module has for a buffer, is data: no state.
_LARGEST_STATE = 1 << 16


@contextmanager
def put_back_on_error(*functions: object) -> Iterator[None]:
    """Put back, if the block raises, what these functions of the user's may have written on."""
    # Buffers and attributes of the modules that they refer to, small tensors, and random states.
    # A transform around refuses writes on what is outside, or has copies made.
    if torch.compiler.is_compiling() or transforms() or rng.is_capturing():
        yield
        return
    captured = captured_by(*functions)
    modules = [m for m in captured if isinstance(m, nn.Module) and not _is_scripted(m)]
    with alone_with(*modules):
        snapshots = list(map(ModuleSnapshot, modules))
    parts = [part for snapshot in snapshots for _, part in snapshot.parts]
    tensors = [x for x in captured if isinstance(x, Tensor) and not x.requires_grad]
    written = [x for x in tensors if x.numel() <= _LARGEST_STATE]
    own = chain.from_iterable((*part._buffers.values(), *vars(part).values()) for part in parts)
    written += [x for x in own if isinstance(x, Tensor)]
    values = [(x, _version(x), x.detach().clone()) for x in written]
    constants = [x for x in written if not (x.requires_grad or x._is_view())]
    states = rng.states() + rng.states_of(x for x in captured if isinstance(x, Generator))
    try:
        yield
    except BaseException:
        with alone_with(*modules):
            for snapshot in snapshots:
                snapshot.restore()
        with torch.inference_mode(), INSIDE:  # in which its own tensors can be written on
            for tensor, version, value in values:
                if _has_changed(tensor, version, value):
                    tensor.copy_(value)
        for tensor in constants:
            tensor.detach_()  # what was written on it may have a graph
        rng.restore(states)
        raise


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have no count


def _has_changed(tensor: Tensor, version: int, numbers: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_meta:
        return _version(tensor) != version
    return not torch.equal(tensor.detach(), numbers)


def _python_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore_python_states(of_python: Any, of_numpy: Any) -> None:
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
