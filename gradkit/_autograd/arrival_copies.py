"""Copies of the gradients of a pass, made as they arrive and before another can write on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from gradkit._autograd.write_finder import WriteFinder
from gradkit._compat.autograd import current_pass, is_batch, tensor_hooks
from gradkit._compat.transforms import detach_keep_tangent
from gradkit._compat.undoing import INSIDE, undone
from gradkit._core import user_code
from gradkit._core.ownership import copy_for

Copy: TypeAlias = Callable[[Tensor | None], Tensor | None]


class ArrivalCapture:
    """Copies the gradients of some tensors as they arrive."""

    # For a non-leaf, the engine captures before the tensor's hooks if the pass goes on below it,
    # and hands the captured tensor to the node below, which may write on it [D3, L3]; a custom
    # Function that was given a leaf's captured gradient may write on that, too. A hook that is
    # registered last sees the value that the user's hooks return.
    #
    # Other threads, and passes inside hooks, go through the same tensors: each gradient of a
    # non-leaf is stored by the number of its pass. An extra root of the pass shows which is ours.

    def __init__(
        self,
        variables: Sequence[Tensor],
        to_copy: Sequence[Tensor],
        stack: ExitStack,
        *,
        create_graph: bool,
        finder: WriteFinder | None = None,
    ) -> None:
        self._finder = finder
        self._own_pass: list[int] = []
        self._arrived: dict[int, dict[int, Tensor]] = {}
        self._create_graph = create_graph
        self.roots: list[Tensor] = []  # what the pass also has to start from
        self.leaves: list[Tensor] = []  # what it also has to be for
        # By the number of a non-leaf, the version that its gradient arrived with: a sibling may
        # have written on it before. What its own hooks write belongs to it.
        self.versions: dict[int, int] = {}
        self._hooked = {id(v) for v in to_copy if tensor_hooks(v)}
        copies = {id(v): _copied for v in to_copy if v.grad_fn is None}
        if finder is not None:
            for index, variable in enumerate(variables):
                if id(variable) in copies:
                    copies[id(variable)] = partial(_noted_and_copied, finder, index)
        leaves = [v for v in to_copy if v.grad_fn is None]
        stack.enter_context(copied_on_arrival(leaves, [copies[id(leaf)] for leaf in leaves]))
        not_leaves = {id(v) for v in to_copy if v.grad_fn is not None}
        for index, variable in enumerate(variables):
            if id(variable) in not_leaves:
                self._arrived[index] = {}
                self._register(variable, partial(self._store, index, variable), stack)
        if not_leaves:
            with torch.enable_grad(), INSIDE:
                leaf = torch.zeros((), device=variables[0].device, requires_grad=True)
                root = leaf.view_as(leaf)
            self._register(root, lambda _: self._own_pass.append(current_pass()), stack)
            self.roots, self.leaves = [root], [leaf]

    @staticmethod
    def _register(
        tensor: Tensor, hook: Callable[[Tensor], Tensor | None], stack: ExitStack
    ) -> None:
        stack.callback(user_code.register_own_hook(tensor, hook).remove)

    def _store(self, index: int, variable: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            if self._finder is not None and not is_batch(grad):
                self._finder.arrive(index, grad)
            copy = copy_for(grad if self._create_graph else detach_keep_tangent(grad), variable)
            self._arrived[index][current_pass()] = copy
            # Where the finder has separated them, only its own hooks have written on it.
            if self._finder is None and grad._version and id(variable) not in self._hooked:
                self.versions[index] = grad._version

    def replace(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients, with those that arrived instead of the engine's captures."""
        for index, by_pass in self._arrived.items():
            if self._own_pass[0] in by_pass:
                grads[index] = by_pass.pop(self._own_pass[0])
        return grads


@contextmanager
def copied_on_arrival(
    tensors: Sequence[Tensor], copies: Sequence[Copy] | None = None
) -> Iterator[None]:
    """Make the engine capture a copy of the gradient of each tensor that a pass ends at."""
    # Into the tables of hooks themselves: a handle for each would take longer than the copy.
    tables = list(map(user_code.hooks_of, tensors))
    key = object()

    def end() -> None:
        for table in tables:
            table.pop(key, None)

    with undone(end):
        for table, copy in zip(tables, copies or [_copied] * len(tables), strict=True):
            table[key] = copy
        yield


def _copied(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()  # None is an undefined gradient [D10]


def _noted_and_copied(finder: WriteFinder, index: int, grad: Tensor | None) -> Tensor | None:
    if grad is not None and not is_batch(grad):  # that of another thread's pass
        finder.arrive(index, grad)
    return _copied(grad)
