"""Functions, hooks and modules that do more than compute; each has a twin that only computes.

The twin, of torch's own operations, is the oracle of every call. A refusal has to name the hazard:
the Function, the hook, or the attribute that the module keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from gradkit import func
from tests.fuzz.cases import Op
from tests.fuzz.hooks import note, scale_all
from tests.strategies import Operation

CAPTURED = "from outside that requires grad"  # of what a Function closes over, in unroll
UNTRACED = "autograd.Function"  # of the old style, as those of module hooks are, in gradkit.func
Change = Callable[[Tensor | None], Tensor | None]


class Reversible(Function):
    """Computes its input anew, and writes the `.grad` of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block, ctx.x = block, x.detach()
        result: Tensor = block(x).detach()
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.clone().requires_grad_()
            torch.autograd.backward(ctx.block(x), cotangent)
        return x.grad, None


class Asking(Reversible):
    """A checkpoint of a library, that runs under `.backward()` only."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("not compatible with .grad(), please use .backward()")
        return Reversible.backward(ctx, cotangent)


class Keeping(Function):
    """Keeps its gradient from the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        result: Tensor = cotangent * ctx.slope
        return result


class Handing(Keeping):
    """Hands out what it keeps, multiplied by the cotangent in place."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        result: Tensor = ctx.slope.mul_(cotangent)
        return result


class Saving(Keeping):
    """Keeps its gradient as a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        result: Tensor = cotangent * ctx.saved_tensors[0]
        return result


def around(kind: type[Function]) -> Operation:
    def apply(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
        x = a * 1 if a.requires_grad else a.detach().requires_grad_()
        result: Tensor = kind.apply(x, lambda x: x + torch.tanh(x) * b)
        return result

    return apply


def residual(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    return a + torch.tanh(a) * b


def with_kept(kind: type[Function]) -> Op:
    name = kind.__name__
    first = (name, UNTRACED) if kind is Handing else (UNTRACED,)
    apply = lambda a, b, kept: kind.apply(a) + b  # noqa: E731
    return Op(apply, first, (name,), lambda a, b, kept: a.sin() + b)


FUNCTIONS = {
    "reversible": Op(
        around(Reversible),
        ("Reversible", UNTRACED, CAPTURED, "a call of backward()"),  # seen by a call around
        twin=residual,
        on_leaf=True,
    ),
    "asking": Op(
        around(Asking),
        ("Asking", "under .backward() only", UNTRACED, CAPTURED),
        twin=residual,
        on_leaf=True,
    ),
    **{kind.__name__: with_kept(kind) for kind in (Keeping, Handing, Saving)},
}


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1


def on_tensor(x: Tensor, change: Change) -> tuple[Tensor, Any]:
    new = x * 1
    return new, new.register_hook(change)


def on_node(x: Tensor, change: Change) -> tuple[Tensor, Any]:
    new = x * 1
    return new, new.grad_fn.register_hook(lambda inputs, outputs: tuple(map(change, inputs)))


def before_node(x: Tensor, change: Change) -> tuple[Tensor, Any]:
    new = x * 1
    return new, new.grad_fn.register_prehook(lambda outputs: tuple(map(change, outputs)))


def on_module(x: Tensor, change: Change) -> tuple[Tensor, Any]:
    module = Same()
    hook = module.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(map(change, inputs))
    )
    return module(x), hook


def before_module(x: Tensor, change: Change) -> tuple[Tensor, Any]:
    module = Same()
    hook = module.register_full_backward_pre_hook(
        lambda module, outputs: tuple(map(change, outputs))
    )
    return module(x), hook


class Scaled(Function):
    """The identity, whose derivative in reverse mode, and only there, has a factor."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent * 1


PLACES = {
    "tensor": on_tensor,
    "node": on_node,
    "before a node": before_node,
    "module": on_module,
    "before a module": before_module,
}


def hooked(where: str, *, factor: float = 3.0, once: bool = False, cut: bool = False) -> Op:
    """An operation with a hook that multiplies, and removes itself or cuts the graph."""

    def apply(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
        handles: list[Any] = []

        def change(grad: Tensor | None) -> Tensor | None:
            if once:
                handles[0].remove()
            note(kept, grad)  # counts the calls
            (new,) = scale_all((grad,), factor)
            return new.detach() if cut and new is not None else new

        new, handle = PLACES[where](a + b, change)
        handles.append(handle)
        result: Tensor = new
        return result

    def twin(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
        result: Tensor = Scaled.apply(a + b, factor)
        return result

    untraced = (UNTRACED,) if "module" in where else ()
    return Op(apply, ("hook", *untraced) if once else untraced, ("hook",), twin)


HOOKS = {
    f"{what}, {where}": hooked(where, **options)
    for where in PLACES
    for what, options in {"scales": {}, "once": {"once": True}, "cuts": {"cut": True}}.items()
}


class Keeps(nn.Module):
    """A module of one weight; what it keeps is for `fn` to read, or for its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3, 3), 1.5, dtype=torch.float64))


class Latent(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = (self.w**3).mean()
        return self.w * x


class Recurrent(Keeps):
    state: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.state + self.w * x)
        return self.state


class Cached(Keeps):
    cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.w.sin() if self.cache is None else self.cache
        return self.cache * x


class Lazy(Keeps):
    def forward(self, x: Tensor) -> Any:
        return lambda: (self.w * x).sin()


class Counting(Keeps):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.log: list[Tensor] = []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen = self.seen + 1
        self.log.append(self.w * x)
        return self.log[-1].sin()


def by_make_functional(module: nn.Module, w: Tensor, x: Tensor) -> Any:
    call, _, buffers = func.make_functional(module)
    return call({"w": w}, buffers, x)[0]


def by_functional_call(module: nn.Module, w: Tensor, x: Tensor) -> Any:
    return functional_call(module, {"w": w}, (x,))


def in_checkpoint(module: nn.Module, w: Tensor, x: Tensor) -> Any:
    return func.checkpoint(partial(by_functional_call, module))(w, x)


def ways(name: str) -> Any:
    """How a module is called; after torch's functional_call an output has the module's weights."""
    every = (by_make_functional, by_functional_call, in_checkpoint)
    return every[:1] if name == "lazy" else every


def recurrent(start: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(start + b * a) + b * a)


# Of a way to call, the module, its weight and an input; and the twin, of what the module has kept
# of an earlier pass, an input, and the weight; and what it keeps.
MODULES: dict[str, tuple[type[Keeps], Any, Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "aux": (
        Latent,
        lambda call, module, w, x: call(module, w, x) + module.aux,
        lambda start, a, b: b * a + (b**3).mean(),
        "aux",
    ),
    "state": (
        Recurrent,
        lambda call, module, w, x: [call(module, w, x) for _ in "ab"][1],
        recurrent,
        "state",
    ),
    "cache": (
        Cached,
        lambda call, module, w, x: call(module, w, x),
        lambda start, a, b: b.sin() * a,
        "cache",
    ),
    "lazy": (
        Lazy,
        lambda call, module, w, x: call(module, w, x)(),
        lambda start, a, b: (b * a).sin(),
        "module",
    ),
    "counts": (
        Counting,
        lambda call, module, w, x: call(module, w, x) + 0 * module.log[-1],
        lambda start, a, b: (b * a).sin(),
        "in a list",
    ),
}


def keeping(name: str, way: Any, *, ran: bool) -> Op:
    """An operation that calls a module of its own, which has run before, or has not."""
    kind, run, twin, attribute = MODULES[name]
    module = kind()
    if ran:
        module(torch.ones(3, 3, dtype=torch.float64))
    start = torch.as_tensor(getattr(module, "state", 0.0)).detach().clone()
    return Op(
        lambda a, b, kept: run(way, module, b, a),
        (attribute,),
        twin=lambda a, b, kept: twin(start, a, b),
        on_leaf=True,
        module=module,
        restored=way is by_make_functional,
    )
