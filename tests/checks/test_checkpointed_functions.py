"""A checkpoint is taken if what it computes again reads its arguments and constants alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradkit._checks.checkpointed_functions import frame_of_arguments
from gradkit._compat.nodes import saved_names
from gradkit._compat.transforms import checkpoint_frame

pytestmark = pytest.mark.skipif(
    not hasattr(checkpoint_frame(), "get_inputs"), reason="this torch keeps the arguments elsewhere"
)
FACTOR = 2.0
FACTORS = [2.0]
LAYER = nn.Tanh()


def frames(fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> set[object]:
    """Return what is found of the checkpoint of a call."""
    out: Any = checkpoint(fn, *args, **kwargs, use_reentrant=False)
    node = out.grad_fn
    saved = [getattr(node, name) for name in saved_names(type(node))]
    hooks = [hook for x in saved if (hook := getattr(x, "unpack_hook", None)) is not None]
    assert hooks
    return set(map(frame_of_arguments, hooks))


def by_constants(x: Tensor, power: int = 2) -> Tensor:
    return (x * FACTOR * math.pi) ** power


def by_helper(x: Tensor) -> Tensor:
    return torch.relu(by_constants(x)).exp()


def by_list(x: Tensor) -> Tensor:
    return (x * FACTORS[0]).exp()


def by_layer_inside(x: Tensor) -> Tensor:
    return torch.stack([LAYER(row) for row in x]).exp()


def by_helper_of_list(x: Tensor) -> Tensor:
    return by_list(x).exp()


class Model:
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_what_computes_from_its_arguments(device: torch.device) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    scale = 3.0
    for fn in (by_constants, by_helper, torch.exp, lambda x: (x * scale).exp()):
        assert None not in frames(fn, x)
    assert None not in frames(lambda x, more: (x * more["y"][0]).exp(), x, {"y": [x, None, 2]})
    assert None not in frames(lambda x, *, y: (x * y).exp(), x, y=x)


def test_what_may_read_more(device: torch.device) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    held = {"w": x}
    every: list[Callable[..., Tensor]] = [
        nn.Tanh(), by_list, by_layer_inside, by_helper_of_list, Model().forward, x.mul,
        partial(torch.mul, x), lambda x: x * held["w"], lambda x: (x * held.get("w")).exp(),
    ]  # fmt: skip
    for fn in every:
        assert frames(fn, x) == {None}
    assert frames(lambda layer, x: layer(x), nn.Tanh(), x) == {None}
    assert frames(lambda x, *, layer: layer(x), x, layer=nn.Tanh()) == {None}
    assert frame_of_arguments(lambda packed: packed) is None
