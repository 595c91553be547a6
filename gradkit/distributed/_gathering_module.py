"""A module that sees whole parameters, each gathered from its shards when the module reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradkit._compat import distributed
from gradkit._compat.transforms import is_transform_tensor
from gradkit._compat.undoing import INSIDE, undone
from gradkit._state.module_state import alone_with
from gradkit._state.recomputed_tensors import recompute_hooks, register_recompute
from gradkit.distributed._differentiable_gather import ShardedParam, gather


@contextmanager
def gathering(module: nn.Module, params: Iterable[tuple[Tensor, ShardedParam]]) -> Iterator[None]:
    """Let a module in the block gather these of its parameters when it reads them."""
    gatherer = _Gatherer({id(shard): param for shard, param in params})
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def put_back() -> None:
        for attributes, before in changed:
            attributes.update(before)
        gatherer.free()

    with alone_with(module), undone(put_back):
        for part in module.modules():
            attributes = vars(part)
            new = distributed.without_hooks(part)
            new["_parameters"] = _ReadParameters(gatherer, attributes["_parameters"])
            changed.append((attributes, {name: attributes[name] for name in new}))
            attributes.update(new)
        with recompute_hooks(), INSIDE:
            yield


class _Gatherer:
    """The whole parameters of the part of a module that runs."""

    def __init__(self, params: Mapping[int, ShardedParam]) -> None:
        self._params = params
        self._part: object = None
        self._gathered: dict[tuple[int, bool], Tensor] = {}

    def read(self, part: object, tensor: Any) -> Any:
        """Return the whole parameter if the tensor is sharded; free those of another part."""
        param = self._params.get(id(tensor))
        if param is None:
            return tensor
        if part is not self._part:
            self.free()
            self._part = part
        key = id(tensor), torch.is_grad_enabled()
        if key not in self._gathered:
            whole = self._gathered[key] = gather(tensor, param)
            if not is_transform_tensor(whole):  # no hooks for what those save
                register_recompute(whole, param.recompute(tensor))
        return self._gathered[key]

    def free(self) -> None:
        """Let go of what is gathered; graphs hold none of it."""
        self._gathered.clear()


class _ReadParameters(dict[str, Any]):
    """The table of parameters of a part, from which `nn.Module` reads its attributes."""

    def __init__(self, gatherer: _Gatherer, own: Mapping[str, Any]) -> None:
        super().__init__(own)
        self._gatherer = gatherer

    def __getitem__(self, key: str) -> Any:
        return self._gatherer.read(self, super().__getitem__(key))
