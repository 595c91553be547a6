"""Which Functions keep their inputs alone, by their source: nothing that they have computed."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from gradkit._core.kept_inputs import keeps_inputs_alone

custom_fwd: Any = torch.amp.custom_fwd


def saved_by(ctx: Any, x: Tensor) -> None:
    ctx.save_for_backward(x * 2)


class _Kept(Function):
    """A product, in whose forward a part of these tests keeps tensors."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise NotImplementedError


class Inputs(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.power = 2
        ctx.mask = x
        rows = x.shape[0]
        out = x * w / rows
        out += 1
        return out


class Apart(_Kept):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, w = inputs
        ctx.save_for_backward(inputs[0], w)


class Result(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2, w)
        return x * w


class Assigned(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x = x * w
        ctx.save_for_backward(x)
        return x.clone()


class Added(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x += w
        ctx.save_for_backward(x)
        return x.clone()


class InPlace(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x.view(-1).mul_(w)
        ctx.save_for_backward(x)
        return x.clone()


class Renamed(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x
        y.mul_(w)
        ctx.save_for_backward(x)
        return x.clone()


class Out(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        torch.mul(x, w, out=x)
        ctx.save_for_backward(x)
        return x.clone()


class OfAView(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        rows = x.view(-1)[:1]
        rows.mul_(w[:1])
        ctx.save_for_backward(x)
        return x.clone()


class Flagged(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        torch.nn.functional.relu(x, inplace=True)
        ctx.save_for_backward(x)
        return x * w


class Dirty(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        torch._foreach_neg_([x])
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class Cast(_Kept):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w


class HandedOn(_Kept):
    @staticmethod
    @custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w


class Attribute(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.y = x, x * w
        return x * w


class Helped(_Kept):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        saved_by(ctx, x)
        return x * w


class Unpacked(_Kept):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.save_for_backward(*xs)
        return xs[0] * xs[1]


class ApartAssigned(Apart):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w = inputs
        x = x * w
        ctx.save_for_backward(x)


KEEP_INPUTS = (Inputs, Apart, HandedOn)
WRITTEN = (Added, InPlace, Renamed, Out, OfAView, Flagged, Dirty)
DOUBTFUL = (*WRITTEN, Result, Assigned, Attribute, Helped, Unpacked, ApartAssigned, Cast)


@pytest.mark.parametrize("kind", [*KEEP_INPUTS, *DOUBTFUL], ids=lambda x: x.__name__)
def test_what_the_source_shows(device: torch.device, kind: Any) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    node = kind.apply(torch.ones(2, device=device), w).grad_fn
    assert keeps_inputs_alone(node) == (kind in KEEP_INPUTS)


def test_a_file_that_has_changed_shows_nothing(device: torch.device, tmp_path: Path) -> None:
    """The lines of the class are another function's by then, or none at all."""
    text = """
from torch.autograd import Function
class Product(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward({})
        return x * w
"""
    path, w = tmp_path / "products.py", torch.ones(2, device=device, requires_grad=True)
    for kept, now, is_known in (
        ("x, w", text.format("x, w"), True),
        ("x * w.exp()", text.format("x"), False),
        ("x", "(" * 9, False),
        ("x", "", False),
    ):
        path.write_text(now)
        linecache.checkcache(str(path))
        space: dict[str, Any] = {"__name__": "products"}
        exec(compile(text.format(kept), path, "exec"), space)
        node = space["Product"].apply(torch.ones(2, device=device), w).grad_fn
        assert keeps_inputs_alone(node) == is_known
