"""What a function of eager code would change outside of itself: refused before it happens.

In a level of torch.func, torch refuses that by itself. The hooks that `fn` registers end with its
call, as they do with a level.
"""

# This file stands apart from the call's, which reads top to bottom.

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gradkit._compat.autograd import storage_key, written_arguments
from gradkit._compat.transforms import engine_calls
from gradkit._compat.undoing import INSIDE, undone
from gradkit._core import pytree
from gradkit._core.user_code import captured_by
from gradkit._state.copy_on_write import tensors_in, written
from gradkit._state.module_state import state_now
from gradkit._torch_bugs.foreign_operators import OVERLOAD, is_foreign
from gradkit.errors import UnsupportedGraphError, message
from gradkit.func._errors import RUNS_BACKWARD, WRITES_ON_ARGUMENT, WRITES_OUTSIDE

_tensor: Any = Tensor
_BACKWARD_OF_SEVERAL: Any = torch.autograd.backward
_BACKWARD, _REGISTER_HOOK = _tensor.backward, _tensor.register_hook
_REQUIRES_GRAD = {_tensor.requires_grad_, _tensor.requires_grad.__set__}
_IS_NESTED, _FRAMES = _tensor.is_nested.__get__, 8
_SET_DATA = _tensor.data.__set__
_EMBEDDINGS = {nn.functional.embedding, nn.functional.embedding_bag}


class Outside:
    """The tensors that a call of a function may not change, and what it does with them."""

    def __init__(self, fn: object, given: Sequence[Any], variables: Sequence[Tensor]) -> None:
        self._fn, self._given, self._variables = fn, given, variables
        self.is_open = True  # until the call ends, and its hooks with it
        self.pulls: set[object] = set()  # those that run now, in which the hooks run, too

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of an operation that may change something, None for any other."""
        if func is _BACKWARD:
            raise UnsupportedGraphError(message("fn", *RUNS_BACKWARD))
        if func is _BACKWARD_OF_SEVERAL:
            self._refuse_backward(kwargs.get("inputs"))
            return args
        if func == _IS_NESTED:  # which that asks, where no mode sees it itself: before torch 2.13
            frame: FrameType | None = sys._getframe()
            for _ in range(_FRAMES):
                frame = frame and frame.f_back
                if frame is not None and frame.f_code is _BACKWARD_OF_SEVERAL.__code__:
                    self._refuse_backward(frame.f_locals["inputs"])
            return args
        if func is _REGISTER_HOOK:
            tensor, hook = args
            return args if id(tensor) in self._tensors else (tensor, _Hook(self, hook))
        if func in _REQUIRES_GRAD:
            requires_grad = [*args[1:], *kwargs.values(), True][0]
            if args[0].requires_grad != requires_grad:
                if id(args[0]) in self._tensors:
                    raise UnsupportedGraphError(message("fn", *RUNS_BACKWARD))
                engine_calls.made[id(args[0])] = args[0]
            return args
        if func == _SET_DATA:
            targets = [args[0]]
        elif isinstance(func, OVERLOAD) or is_foreign(func):
            targets = pytree.tensors(written_arguments(func, args, kwargs))
        else:
            targets = written(func, args, kwargs) + tensors_in((kwargs.get("out"),))
            if func in _EMBEDDINGS and kwargs.get("max_norm") is not None:
                targets.append(args[1])
            if not targets:
                return None
        for tensor in targets:
            if _key(tensor) in self._memory:
                is_argument = _key(tensor) in self._arguments
                reason = WRITES_ON_ARGUMENT if is_argument else WRITES_OUTSIDE
                raise UnsupportedGraphError(message("fn", *reason))
        return args

    @contextmanager
    def pulled(self) -> Iterator[None]:
        """Let the hooks of the function run in a pass after its call."""
        pull = object()  # a count would be wrong after an interrupt
        with undone(partial(self.pulls.discard, pull)), INSIDE:
            self.pulls.add(pull)
            yield

    def _refuse_backward(self, inputs: Any) -> None:
        """Raise if torch.autograd.backward would add to `.grad` of what is outside."""
        if inputs is None or any(id(x) in self._tensors for x in pytree.tensors(inputs)):
            raise UnsupportedGraphError(message("fn", *RUNS_BACKWARD))

    @cached_property
    def _arguments(self) -> set[int]:
        return set(map(_key, [*pytree.tensors(self._given), *self._variables]))

    @cached_property
    def _memory(self) -> set[int]:
        return self._arguments.union(map(_key, self._tensors.values()))

    @cached_property
    def _tensors(self) -> dict[int, Tensor]:
        """The tensors that the function was given, or refers to, by id."""
        captured = captured_by(self._fn, self._given)
        tensors = [x for x in captured if isinstance(x, Tensor)]
        state = state_now()
        for module in (x for x in captured if isinstance(x, nn.Module)):
            # A call of make_functional has put others into it.
            known = None if state is None else state.snapshots.get(id(module))
            tensors += [*module.parameters(), *module.buffers()] if known is None else known.own()
        return {id(x): x for x in (*tensors, *pytree.tensors(self._given))}


def _key(tensor: Tensor) -> int:
    # Sparse tensors have no storage, and lazy ones no memory.
    return storage_key(tensor) if tensor.layout == torch.strided else id(tensor)


class _Hook:
    """A hook of a function's, until its call ends."""

    def __init__(self, call: Outside, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._call, self._hook = call, hook
        self.__name__ = getattr(hook, "__name__", type(hook).__name__)

    def __call__(self, grad: Tensor) -> Tensor | None:
        """Run the hook."""
        return self._hook(grad) if self._call.is_open or self._call.pulls else None
