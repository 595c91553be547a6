"""A vmap over samples or tasks, and a loop where torch.vmap cannot batch a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from gradkit import errors
from gradkit._compat.autograd import plain_recurrent_kernels
from gradkit._compat.transforms import batched_like, level_of, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.known_results import merged
from gradkit._core.params import Tensors
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.user_code import captured_by
from gradkit._state import rng
from gradkit._state.copy_on_write import CopyOnWrite, Kwargs, tensors_in
from gradkit._state.module_state import modules_put_back
from gradkit._state.snapshot import unscripted
from gradkit.errors import first_line, message, warn_fallback
from gradkit.func._errors import NOT_RANDOM, RANDOM

_RECURRENT = frozenset(
    getattr(torch, name + of_cell)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for of_cell in ("", "_cell")
)


class BatchableOps(CopyOnWrite):
    """Runs operations in a form that torch.vmap can batch."""

    def __init__(self) -> None:
        level = len(transforms()) + 1  # of the function, whose own tensors are of this, or inside
        super().__init__(lambda tensor: level_of(tensor) < level)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an operation, a recurrent one without the fused kernels."""
        if func not in _RECURRENT:
            return super().run(func, args, kwargs)
        with plain_recurrent_kernels(), INSIDE:
            return super().run(func, _with_batched_state(self.current(args)), kwargs)


def _with_batched_state(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a recurrent operation; torch writes on the hidden state in place."""
    # (input, state, weights, ...), (data, batch_sizes, state, weights, ...) or the weights in turn.
    index = 2 if isinstance(args[3], list | tuple) else 1
    operands, state = tensors_in(args), args[index]
    if isinstance(state, Tensor):
        state = batched_like(state, operands)
    else:
        state = type(state)(batched_like(part, operands) for part in state)
    return *args[:index], state, *args[index + 1 :]


R = TypeVar("R")
Randomness: TypeAlias = Literal["error", "same", "different"]
RANDOMNESS: tuple[Randomness, ...] = ("error", "same", "different")


# A RunOne returns the gradients of one sample, or task, and the tensors of aux.
RunOne: TypeAlias = Callable[..., tuple[list[Any], Tensors]]
# A OneByOne takes a function of one sample, and the dimension of the batch in each tensor.
OneByOne: TypeAlias = Callable[..., RunOne]
Dims: TypeAlias = list[int | None]  # by leaf, None for what is not batched


class VmapOrLoop:
    """A vmapped call, and the loop that is run if torch.vmap fails at it."""

    def __init__(self, name: str, fn: object, randomness: Randomness) -> None:
        self._name = name  # the name in the warning
        self._fn = fn  # the caller's function, with whatever it refers to
        self._randomness = randomness
        self.is_loop = False
        self._modules: list[nn.Module] = []
        self._first_aux: object = None  # the structure of the first of a loop, and its constants

    def run(self, run: Callable[..., R]) -> R:
        """Return what `run()` does; if torch.vmap fails, `run(one_by_one=...)`, and warn."""
        if torch.compiler.is_compiling() or rng.is_capturing():
            return run()
        captured = captured_by(self._fn)
        own = rng.states_of(rng.generators(captured))
        states = rng.states() + own
        self._modules = unscripted(captured)
        try:
            return run()
        except errors.UnsupportedGraphError as error:
            # An error that gradkit itself raises has no cause.
            reason = first_line(error.__cause__ or error)
            if error.__cause__ is None or RANDOM in reason:
                raise
        rng.restore(states)
        self.is_loop = True
        repeated = own if self._randomness == "same" else []
        result = run(one_by_one=partial(_one_by_one, repeated))
        if self._randomness == "error" and rng.differ(states):
            raise errors.UnsupportedGraphError(message("fn", *NOT_RANDOM))
        warn_fallback(f"{self._name} fell back from torch.vmap to a loop: {reason}.")
        return result

    def of_one(self) -> AbstractContextManager[None]:
        """Return what puts modules back after one, or a chunk that is one call of a vmap."""
        return modules_put_back(self._modules)

    def check_aux(self, tree: PyTree) -> None:
        """Raise if the aux of one in a loop cannot be stacked with those before it."""
        if not self.is_loop:  # a call stands for all of a vmap
            return
        leaves, spec = pytree.flatten(tree)
        constants = (Number, str, bytes, Enum)  # to be equal, not of one type alone
        kinds = [
            x.shape if isinstance(x, Tensor) else x if isinstance(x, constants) else type(x)
            for x in leaves
        ]
        if self._first_aux is None:
            self._first_aux = spec, kinds
        elif self._first_aux != (spec, kinds):
            expected = "tensors of one shape for all that are stacked, and equal constants"
            fix = "return what differs as a tensor: loss.detach(), not loss.item()"
            raise errors.StructureError(message("aux", expected, "ones that differ", fix))


def _one_by_one(repeated: rng.States, fn: RunOne, dims: Sequence[int]) -> RunOne:
    """Return what vmap does, for batches of one, each of which starts from the same state."""

    def call(*tensors: Any) -> tuple[list[Any], Tensors]:
        pairs = zip(tensors, dims, strict=True)
        rng.restore(repeated)
        grads, others = fn(*(x.select(dim, 0) for x, dim in pairs))
        stacked = [None if grad is None else grad.unsqueeze(0) for grad in grads]
        return stacked, [other.unsqueeze(0) for other in others]

    return call


def require_dense(batch: Tensor, where: Callable[[], str]) -> None:
    """Raise for a batch that cannot be split along a dimension."""
    if batch.layout != torch.strided or batch.is_nested:
        got, fix = f"one of {batch.layout}", "pass x.to_dense(), or a padded tensor"
        raise errors.LeafTypeError(message(where(), "a dense batch", got, fix))


class Batch:
    """A tree, some of whose tensors are batched."""

    def __init__(self, leaves: list[Any], dims: Dims, spec: Structure, size: int) -> None:
        self.leaves, self._by_leaf, self._spec = leaves, dims, spec
        self.size = size  # the number of samples
        # The batched tensors, and the batch dimension of each.
        self.tensors = [leaf for leaf, dim in zip(leaves, dims, strict=True) if dim is not None]
        self.dims = tuple([dim for dim in dims if dim is not None])

    def tree(self, tensors: Iterable[Tensor]) -> PyTree:
        """Return the tree with other tensors in place of the batched ones."""
        are_batched = [dim is not None for dim in self._by_leaf]
        return pytree.unflatten(self._spec, merged(self.leaves, are_batched, tensors))

    def chunks(self, size: int, randomness: Randomness) -> Iterator[tuple[int, Tensors]]:
        """Yield where each chunk begins, and its tensors; all draw the "same" numbers."""
        states = rng.states() if randomness == "same" else []
        for start in range(0, self.size, size):
            rng.restore(states)
            length = min(size, self.size - start)
            pairs = zip(self.tensors, self.dims, strict=True)
            yield start, [x.narrow(dim, start, length) for x, dim in pairs]
