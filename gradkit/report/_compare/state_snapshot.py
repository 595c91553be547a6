"""What running a step changes is put back: numbers, module attributes, `.grad`, random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradkit._state import rng
from gradkit.func._modules import as_before

# What may be left out of a run, to see whether it is why two ways differ.
STALE, HOOKS, GRAD_DTYPE, DROPOUT, CACHE = "stale", "hooks", "grad_dtype", "dropout", "cache"


class Keeping:
    """Runs blocks that all start from the same state, which is there again after each.

    Args:
        modules: Whose attributes and buffers may change.
        tensors: Whose numbers, and whose `.grad`, may change.
        generators: Of random numbers, beside those of torch, Python and NumPy.

    Attributes:
        grads: What stands in `.grad` of those that are leaves, by id.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Iterable[Tensor],
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        unique = {id(t): t for t in tensors}
        self._modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self._kept = [(t, t.data, _version(t), t.detach().clone()) for t in unique.values()]
        self._generators = list(generators)
        self._leaves = [t for t in unique.values() if t.is_leaf]
        self._requires = [(t, t.requires_grad) for t in self._leaves]
        self.grads = {id(t): t.grad for t in self._leaves}

    @contextmanager
    def kept(self, without: Collection[str] = ()) -> Iterator[None]:
        """Put everything back after the block, also if it raises. In it, no `.grad` is there.

        Args:
            without: With `DROPOUT`, the modules drop nothing in the block; with `CACHE`, autocast
                keeps no casts.
        """
        states, others = rng.states([t for t, *_ in self._kept]), _other_states()
        own = [(generator, generator.get_state()) for generator in self._generators]
        try:
            with ExitStack() as stack:
                stack.enter_context(grads_for((), self._leaves))
                stack.callback(self._put_back)  # before `.grad`, which must fit
                for module in self._modules:
                    stack.enter_context(as_before(module, hooks=True))
                if DROPOUT in without:
                    _drop_nothing(self._modules)
                if CACHE in without:
                    stack.enter_context(without_autocast_cache())
                yield
        finally:
            rng.restore(states)
            _restore_others(others)
            for generator, state in own:
                generator.set_state(state)

    def _put_back(self) -> None:
        for tensor, data, version, numbers in self._kept:
            if _kind(tensor) != _kind(data):  # a module was moved or cast
                tensor.data = data
            if _differs(tensor, version, numbers):
                tensor.data.copy_(numbers)
        for tensor, requires in self._requires:
            if tensor.is_leaf and tensor.requires_grad != requires:
                tensor.requires_grad_(requires)

    def has_grads(self) -> bool:
        """Return whether something stands in `.grad` now."""
        return any(t.grad is not None for t in self._leaves)

    def random_states(self) -> list[Any]:
        """Return what would change if a random number were drawn."""
        states = [state for _, state in rng.states([t for t, *_ in self._kept])]
        states += [generator.get_state() for generator in self._generators]
        return [[state.tolist() for state in states], repr(_other_states())]


def _drop_nothing(modules: Sequence[nn.Module]) -> None:
    for part in (part for module in modules for part in module.modules()):
        for name, kinds in _SHARES.items():
            if isinstance(part, kinds):
                setattr(part, name, 0.0)


# Where the modules of torch have the share that they drop.
_SHARES: dict[str, tuple[type, ...]] = {
    "p": (nn.modules.dropout._DropoutNd,),
    "dropout": (nn.MultiheadAttention, nn.RNNBase),
}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # which inference mode does not count


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def _differs(tensor: Tensor, version: int, numbers: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return _version(tensor) != version
    return not torch.equal(tensor.detach(), numbers)


def _other_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore_others(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


@contextmanager
def grads_for(
    params: Sequence[Tensor],
    others: Sequence[Tensor],
    stale: Mapping[int, Tensor | None] | None = None,
    without: Collection[str] = (),
) -> Iterator[None]:
    """Let a block accumulate into `.grad`, and put every `.grad` back.

    Post-accumulate-grad hooks do not run in it: often they step an optimizer.

    Args:
        params: Start with copies of what stands in `stale`.
        others: Start without.
        stale: What stood in `.grad`, by id.
        without: What to leave out of the params' part: `STALE` their `.grad`, `HOOKS` their tensor
            hooks, `GRAD_DTYPE` their `grad_dtype`.
    """
    leaves = list({id(t): t for t in (*params, *others)}.values())
    before = [(t, t.grad, t.grad_dtype) for t in leaves]
    mine, stale = set(map(id, params)), stale or {}
    try:
        with ExitStack() as stack:
            for tensor, _, _ in before:
                grad = stale.get(id(tensor))
                stack.enter_context(_emptied(tensor._post_accumulate_grad_hooks))
                tensor.grad = None
                if id(tensor) not in mine:
                    continue
                if HOOKS in without:
                    stack.enter_context(_emptied(tensor._backward_hooks))
                if GRAD_DTYPE in without:
                    tensor.grad_dtype = tensor.dtype
                elif grad is not None and STALE not in without:
                    tensor.grad = grad.detach().clone()
            yield
    finally:
        for tensor, grad, dtype in before:
            tensor.grad = None
            if tensor.grad_dtype != dtype:
                tensor.grad_dtype = dtype
            tensor.grad = grad


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Have autocast cast a parameter anew for every use."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


@contextmanager
def _emptied(table: Any) -> Iterator[None]:
    """Take the hooks out of their table for a while; torch reads it at each pass."""
    if not table:
        yield
        return
    kept = dict(table)
    table.clear()
    try:
        yield
    finally:
        table.update(kept)
