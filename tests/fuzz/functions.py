"""Operations of custom Functions, in all the forms that torch has for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import gradkit
from tests.fuzz.cases import WRITTEN, Op
from tests.helpers import Halve, OnceCubed, Scribble, written_on

ONCE = "once_differentiable"


class Cubed(Function):
    """Old style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x**2


class Product(Function):
    """With setup_context, a rule for vmap, and two arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return cotangent * b, cotangent * a


class Sine(Function):
    """With a vmap of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * ctx.saved_tensors[0].cos()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return Sine.apply(x), in_dims[0]


class Several(Function):
    """Two results, one without a derivative; undefined cotangents stay undefined."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        sign = a.sign()
        ctx.mark_non_differentiable(sign)
        return a * 2, b * 3, sign

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, _: Tensor) -> Any:
        return None if first is None else first * 2, None if second is None else second * 3


class Dirty(Function):
    """Changes its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * 2


class InPlace(Function):
    """Builds what it returns in place: nobody else has that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent.clone().mul_(3)


class Sevenfold(Function):
    """Writes on its cotangent, also under vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * 7 if 0 in cotangent.stride() else written_on(cotangent).mul_(7)


class SkipsZero(Function):
    """Returns no gradient for a cotangent of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor | None:
        return cotangent * 1 if bool(cotangent.ne(0).any()) else None


class Recomputing(Function):
    """Runs gradkit, `torch.autograd.grad` and `.backward()` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            _, grad = gradkit.value_and_grads((x.sin() * cotangent).sum(), x)
            theirs = torch.autograd.grad((x.sin() * cotangent).sum(), x)[0]
            (x.sin() * cotangent).sum().backward()
        return (grad + theirs + x.grad) / 3


def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args)

    return call


def cube_with(name: str, decorate: Callable[[Any], Any]) -> type[Function]:
    """A cube whose backward, of this name, is decorated."""

    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x**2

    body = {"forward": Cubed.forward, name: staticmethod(decorate(backward))}
    return type("Hidden", (Function,), body)


HIDDEN: dict[str, Any] = {
    "wrapped": cube_with("backward", lambda fn: logged(once_differentiable(fn))),
    "named vjp": cube_with("vjp", once_differentiable),
}


class OnceSquared(Function):
    """Once differentiable, also under vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * cotangent


def block(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a) * b


def of_one(kind: Any, *refusals: str, second: tuple[str, ...] = ()) -> Op:
    return Op(lambda a, b, kept: kind.apply(a) + b, refusals, second)


def vmapped(kind: Any, *refusals: str, second: tuple[str, ...] = ()) -> Op:
    return Op(lambda a, b, kept: torch.vmap(kind.apply)(a) + b, refusals, second)


FUNCTIONS = {
    "old style": of_one(Cubed),
    "no second gradient": Op(lambda a, b, kept: Halve.apply(a, b)),
    "setup_context": Op(lambda a, b, kept: Product.apply(a, b)),
    "own vmap": of_one(Sine),
    "several": Op(lambda a, b, kept: Several.apply(a, b)[1]),
    "dirty": Op(lambda a, b, kept: Dirty.apply(a * 1) + b),
    "in place": of_one(InPlace),
    "once": of_one(OnceCubed, second=(ONCE,)),
    "checkpoint": Op(lambda a, b, kept: checkpoint(block, a, b, use_reentrant=False)),
    "reentrant checkpoint": Op(
        lambda a, b, kept: checkpoint(block, a, b, use_reentrant=True), ("reentrant checkpoint",)
    ),
}
VMAPPED = {
    "vmap, setup_context": Op(lambda a, b, kept: torch.vmap(Product.apply)(a, b)),
    "vmap, own": vmapped(Sine),
    "vmap of vmap": Op(lambda a, b, kept: torch.vmap(torch.vmap(Product.apply))(a, b)),
    "vmap, once": vmapped(OnceSquared, second=(ONCE,)),
    "setup_context": FUNCTIONS["setup_context"],
}
WRITES = {"writes": of_one(Scribble, WRITTEN), "in place": FUNCTIONS["in place"]}
VMAPPED_WRITES = {
    "vmap, writes": vmapped(Sevenfold, WRITTEN),
    "vmap, setup_context": VMAPPED["vmap, setup_context"],
}
HIDDEN_ONCE = {name: of_one(kind, second=(ONCE,)) for name, kind in HIDDEN.items()}
REENTRANT = {
    "recomputing": of_one(Recomputing, second=(ONCE,)),
    "checkpoint": FUNCTIONS["checkpoint"],
}


def rows(index: list[int]) -> Callable[[Tensor, Tensor, list[Tensor]], Tensor]:
    """Rows of a leaf, with a sparse gradient; of what is no leaf, a dense one."""

    def apply(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
        indices = torch.tensor(index, device=a.device)
        taken = torch.nn.functional.embedding(indices, a, sparse=a.is_leaf)
        return taken * b.detach()

    return apply


def mixed(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    """Rows of which one has a sparse gradient, the others a dense one, and each alone."""
    sparse = rows([1])(a, torch.ones_like(b), kept)[0]
    return torch.stack([SkipsZero.apply(row) for row in (sparse, 3 * a[1], b[2])])


SPARSE = {
    "rows": Op(rows([0, 0, 2])),
    "one row": Op(rows([1, 1, 1])),
    "mixed": Op(mixed),
    "mixed, of one": Op(lambda a, b, kept: mixed(a, a, kept)),
    "skips zeros": Op(lambda a, b, kept: SkipsZero.apply(a) if not a.is_leaf else a * 1),
}
