"""Functions of one sample, or of one task, made fit for torch.vmap; a loop where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradkit._compat.transforms import BATCH, batched_like, level_of, transforms
from gradkit._core import pytree
from gradkit._core.captured import captured_by
from gradkit._core.devices import is_capturing
from gradkit._core.pytree import PyTree
from gradkit._state import rng
from gradkit._state.local_writes import LocalWrites
from gradkit._state.module import attributes_put_back
from gradkit._state.recompute_state import attention_kernels, enable_attention_kernels
from gradkit.errors import StructureError, UnsupportedGraphError, first_line, message, warn_fallback
from gradkit.func._errors import RANDOM, refused_random

R = TypeVar("R")
Randomness: TypeAlias = Literal["error", "same", "different"]
RANDOMNESS: tuple[Randomness, ...] = ("error", "same", "different")

_RECURRENT = frozenset(
    (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    + (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
)
_ATTENTION = frozenset(
    (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)
)


class _BatchableOps(LocalWrites):
    """Runs operations in a form that torch.vmap can batch, and torch.func can differentiate."""

    def __init__(self) -> None:
        innermost = len(transforms())
        super().__init__(lambda tensor: level_of(tensor) < innermost)

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation, if it is one of these without the fused kernels."""
        if func in _RECURRENT:
            with _plain_recurrent_kernels():
                return func(*_with_batched_state(args), **kwargs)
        # The other kernels have no second derivative.
        if func in _ATTENTION and transforms().count("Grad") > 1:
            with _plain_attention():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _with_batched_state(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a recurrent operation; torch writes on the hidden state in place."""
    # (input, state, weights, ...), (data, batch_sizes, state, weights, ...) or the weights in turn.
    index = 2 if isinstance(args[3], list | tuple) else 1
    tensors = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]
    operands = [x for x in tensors if isinstance(x, Tensor)]
    state = args[index]
    if isinstance(state, Tensor):
        state = batched_like(state, operands)
    else:
        state = type(state)(batched_like(part, operands) for part in state)
    return *args[:index], state, *args[index + 1 :]


@contextmanager
def _plain_recurrent_kernels() -> Iterator[None]:
    """Switch off the kernels for whole layers, which have no second derivative and no batches."""
    backends: Any = torch.backends.cudnn, torch.backends.mkldnn
    before = [backend.enabled for backend in backends]
    try:
        for backend in backends:
            backend.enabled = False
        yield
    finally:
        for backend, enabled in zip(backends, before, strict=True):
            backend.enabled = enabled


@contextmanager
def _plain_attention() -> Iterator[None]:
    kernels = attention_kernels()
    enable_attention_kernels([False, False, True, False])
    try:
        yield
    finally:
        enable_attention_kernels(kernels)


def call_batchable(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
    """Call a function in a vmap, or in its place in a loop; tensors from outside stay as they are."""
    if torch.compiler.is_compiling():  # which cannot ask for the memory of a tensor
        return fn(*args, **kwargs)
    with _BatchableOps() as ops:
        return ops.values(fn(*args, **kwargs))


@dataclass(frozen=True)
class Attempt:
    """A vmapped call, and the loop that is run if torch.vmap fails at it.

    Attributes:
        name: What the warning calls it.
        fn: The caller's function, with whatever it refers to.
        tensors: Tensors on the devices whose random number generators it uses.
        randomness: The option.
    """

    name: str
    fn: object
    tensors: Sequence[object]
    randomness: Randomness

    def run(self, batched: Callable[[], R], loop: Callable[..., R], aux: AuxOfEach) -> R:
        """Return what `batched` does; if torch.vmap fails, `loop(one_by_one=...)`, and warn."""
        if torch.compiler.is_compiling() or is_capturing():
            return batched()
        states = rng.states(self.tensors)
        modules = [m for m in captured_by(self.fn) if isinstance(m, nn.Module)]
        with _modules_put_back(modules):
            try:
                return batched()
            except UnsupportedGraphError as error:
                reason = first_line(error.__cause__ or error)
                if RANDOM in reason:
                    raise
        rng.restore(states)
        aux.start_loop()
        result = loop(one_by_one=OneByOne(modules))
        if self.randomness == "error" and rng.differ(states):
            raise refused_random()
        warn_fallback(f"{self.name} fell back from torch.vmap to a loop: {reason}.")
        return result


@dataclass(frozen=True)
class OneByOne:
    """Gives what vmap gives, for batches of one; modules start anew for each.

    Attributes:
        modules: The modules that the function refers to.
    """

    modules: list[nn.Module]

    def __call__(
        self, fn: Callable[..., Any], dims: Sequence[int | None]
    ) -> Callable[..., tuple[list[Any], list[Tensor]]]:
        """Return a function of tensors with a batch of one."""

        def call(*tensors: Any) -> tuple[list[Any], list[Tensor]]:
            pairs = zip(tensors, dims, strict=True)
            with _modules_put_back(self.modules):
                grads, others = fn(*(x if dim is None else x.select(dim, 0) for x, dim in pairs))
            stacked = [None if grad is None else grad.unsqueeze(0) for grad in grads]
            return stacked, [other.unsqueeze(0) for other in others]

        return call


class AuxOfEach:
    """Checks, in a loop, that what a function returns as aux can be stacked."""

    def __init__(self) -> None:
        self._is_loop = False
        self._first: object = None

    def start_loop(self) -> None:
        """Expect the structure and the constants of the first sample of each of the others."""
        self._is_loop, self._first = True, None

    def check(self, tree: PyTree) -> None:
        """Raise if the aux of one cannot be stacked with those before it."""
        if not self._is_loop:  # one call stands for all of a vmap
            return
        leaves, spec = pytree.flatten(tree)
        kinds = [x.shape if isinstance(x, Tensor) else _comparable(x) for x in leaves]
        if self._first is None:
            self._first = spec, kinds
        elif self._first != (spec, kinds):
            expected = "tensors of one shape for all that are stacked, and equal constants"
            fix = "return what differs as a tensor: loss.detach(), not loss.item()"
            raise StructureError(message("aux", expected, "ones that differ", fix))


def _comparable(leaf: object) -> object:
    return leaf if isinstance(leaf, (Number, str, bytes, Enum)) else type(leaf)


@contextmanager
def _modules_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what a block assigns to modules: a buffer would be a tensor of the vmap."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(attributes_put_back(module))
        yield
