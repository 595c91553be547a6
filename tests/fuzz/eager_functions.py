"""Functions that do what eager code may do, through gradkit.func, against torch.func on twins.

A twin is the same function where torch.func can enter it: a checkpoint is the call itself, a
Function with ctx its formula, `torch.autograd.grad` is `torch.func.grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap
from torch.utils import _pytree as torch_pytree
from torch.utils.checkpoint import checkpoint

from gradkit import func
from tests.fuzz.cases import CPU, may_refuse

F64 = torch.float64


class Cubed(torch.autograd.Function):
    """A Function without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x**2


class Block(nn.Module):
    """A module that checkpoints itself, or not."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=F64, device=CPU))
        self.register_buffer("shift", torch.full((3,), 0.1, dtype=F64, device=CPU))
        self.checkpoints = checkpoints

    def body(self, x: Tensor) -> Tensor:
        shift: Any = self.shift
        return torch.tanh(x * self.w + x.sum() * shift)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)


class Scope(NamedTuple):
    """What a step of a program may read."""

    w: Tensor
    x: Tensor
    s: Tensor
    captured: Tensor  # a parameter from outside, or a constant
    view: Tensor  # of a tensor that was computed outside
    block: Block
    is_twin: bool


def _written(o: Tensor, at: Scope) -> Tensor:
    y = o.clone()
    y.mul_(at.captured)
    y[0] = y[1] * 2
    return y


def _filled(o: Tensor, at: Scope) -> Tensor:
    buffer = torch.zeros(3, dtype=F64)
    buffer[0] = 1.0
    return buffer.add_(o)


def _hooked(o: Tensor, at: Scope) -> Tensor:
    y = o * 1
    y.register_hook(lambda grad: grad * grad + 2 * grad)
    return y.sin()


def _saved(o: Tensor, at: Scope) -> Tensor:
    if at.is_twin:
        return (o * o.sin()).tanh()
    with saved_tensors_hooks(torch.clone, torch.clone):
        return (o * o.sin()).tanh()


def _on_cpu(o: Tensor, at: Scope) -> Tensor:
    if at.is_twin:
        return (o * o.sin()).tanh()
    with save_on_cpu():
        return (o * o.sin()).tanh()


def _by_autograd(o: Tensor, at: Scope) -> Tensor:
    if at.is_twin:
        return grad(lambda t: (t.sin() * t * at.w).sum())(o)
    t = o if o.requires_grad else o.detach().requires_grad_()
    return torch.autograd.grad((t.sin() * t * at.w).sum(), t, create_graph=True)[0]


def _inner(o: Tensor, at: Scope) -> Tensor:
    def loss(t: Tensor) -> Tensor:
        return (t.sin() * t * at.w * at.captured).sum()

    return grad(loss)(o) if at.is_twin else func.value_and_grads(loss)(o)[1]


def _inner_cut(o: Tensor, at: Scope) -> Tensor:
    def loss(t: Tensor) -> Tensor:
        return (t.sin() * t * at.w).sum()

    if at.is_twin:
        return grad(loss)(o.detach()).detach() * o
    return func.value_and_grads(loss, create_graph=False)(o)[1] * o


def _in_vmap(o: Tensor, at: Scope) -> Tensor:
    call = func.value_and_grads(lambda q: q**3)
    return vmap(lambda t: 3 * t**2 if at.is_twin else call(t)[1])(o)


def _retained(o: Tensor, at: Scope) -> Tensor:
    y = o * 2
    if not at.is_twin and y.requires_grad:
        y.retain_grad()
    return y.sin()


def _without_grad(o: Tensor, at: Scope) -> Tensor:
    with torch.no_grad():
        constant = o.sin()
    return o * constant + o * o.detach()


def _by_functional_call(o: Tensor, at: Scope) -> Tensor:
    tensors = {"w": at.w * at.captured, "shift": at.x * 0.1}
    result: Tensor = functional_call(at.block, tensors, (o,))
    return result


def _by_make_functional(o: Tensor, at: Scope) -> Tensor:
    call, _, buffers = func.make_functional(at.block)
    out: Tensor = call({"w": at.w * 1.5}, buffers, o)[0]
    return out


def _checkpointed(o: Tensor, at: Scope) -> Tensor:
    def body(t: Tensor) -> Tensor:
        return torch.tanh(t * at.captured) + t

    return body(o) if at.is_twin else checkpoint(body, o, use_reentrant=False)


STEPS: dict[str, Callable[[Tensor, Scope], Tensor]] = {
    "sin": lambda o, at: o.sin(),
    "tanh": lambda o, at: o.tanh(),
    "linear": lambda o, at: 3 * o.roll(1),
    "an argument": lambda o, at: o * at.w,
    "others": lambda o, at: o * at.s + at.x,
    "a captured tensor": lambda o, at: o * at.captured,
    "a captured view": lambda o, at: o + at.view * o,
    "views": lambda o, at: torch.cat([o[1:] * 2, o[:1].view(1)]),
    "a write": _written,
    "a buffer": _filled,
    "a hook": _hooked,
    "a Function": lambda o, at: o**3 if at.is_twin else Cubed.apply(o),
    "a checkpoint": _checkpointed,
    "gradkit's checkpoint": lambda o, at: func.checkpoint(lambda t: torch.tanh(t) * t)(o),
    "saved_tensors_hooks": _saved,
    "save_on_cpu": _on_cpu,
    "autograd.grad": _by_autograd,
    "value_and_grads": _inner,
    "a constant gradient": _inner_cut,
    "torch.func.grad": lambda o, at: grad(lambda t: (t.sin() * t * at.w).sum())(o),
    "vmap": lambda o, at: vmap(lambda t: t.sin() * at.captured.sum())(o),
    "value_and_grads in vmap": _in_vmap,
    "retain_grad": _retained,
    "no_grad": _without_grad,
    "a module": lambda o, at: at.block(o),
    "functional_call": _by_functional_call,
    "make_functional": _by_make_functional,
}
# What torch.func cannot enter: refused in one of its transforms around the call.
OF_EAGER_CODE = {
    "a Function", "a checkpoint", "saved_tensors_hooks", "save_on_cpu", "autograd.grad",
    "retain_grad", "a module", "functional_call", "make_functional",
}  # fmt: skip
_Fn = Callable[[Tensor, Tensor, Tensor], Tensor]
PRODUCTS = ("vjp", "vjp", "linearize", "hvp", "ggn_vp")


class Program(NamedTuple):
    """A function of three tensors, and how it is differentiated."""

    steps: list[str]
    power: int
    requires_grad: list[bool]  # each argument
    captured_requires_grad: bool
    argnums: Any
    create_graph: bool | None
    call: str
    seed: int


def draw(rng: Random) -> Program:
    """Draw a program."""
    return Program(
        [rng.choice(sorted(STEPS)) for _ in range(rng.randint(1, 4))],
        rng.randint(1, 3),
        [rng.random() < 0.5 for _ in range(3)],
        rng.random() < 0.6,
        rng.choice([0, 0, 1, (0, 1), (0, 2)]),
        rng.choice([None, None, True, False]),
        rng.choice(["one", "one", "several", "per loss", "inside", "twice", *PRODUCTS]),
        rng.randrange(1 << 30),
    )


def _by(program: Program, fn: Callable[..., Any], *, is_twin: bool) -> Callable[..., Any]:
    """Return what gives the loss and gradients of a function, as gradkit.func does."""
    if not is_twin:
        return func.value_and_grads(fn, program.argnums, create_graph=program.create_graph)

    def call(*args: Tensor) -> Any:
        def summed(*args: Tensor) -> Any:
            losses = fn(*args)
            return torch.stack(torch_pytree.tree_leaves(losses)).sum(), losses

        grads, (_, losses) = grad_and_value(summed, program.argnums, has_aux=True)(*args)
        return _cut((losses, grads), program.create_graph)

    return call


def _cut(results: Any, create_graph: bool | None) -> Any:
    is_cut = create_graph is False
    return torch_pytree.tree_map(torch.detach, results) if is_cut else results


def _push(fn: Callable[..., Any], point: list[Tensor], along: list[Tensor]) -> tuple[Any, Any]:
    """Return outputs, and the product with the Jacobian: the transpose of the transpose."""
    values, pull, *_ = vjp(fn, *point)  # as a jvp heeds no no_grad
    _, transposed, *_ = vjp(pull, torch.zeros_like(values))
    return values, transposed(tuple(along))[0]


def _product(program: Program, vector: _Fn, args: list[Tensor], at: Scope) -> Any:
    """Return the outputs of a function, and products with its derivatives."""
    argnums = program.argnums if isinstance(program.argnums, tuple) else (program.argnums,)
    point, options = [args[i] for i in argnums], {"create_graph": program.create_graph}
    numbers = torch.Generator().manual_seed(program.seed)
    along = [torch.rand(3, generator=numbers, dtype=F64, device=CPU) for _ in argnums]

    def fn(*chosen: Tensor) -> Tensor:
        given = dict(enumerate(args)) | dict(zip(argnums, chosen, strict=True))
        return vector(*map(given.__getitem__, range(3)))

    def scalar(*chosen: Tensor) -> Tensor:
        return fn(*chosen).sum()

    def loss(out: Tensor) -> Tensor:
        return (out**3).sum() + out.sin().sum()

    seeds = [along[0], at.captured * 2]
    if not at.is_twin:
        if program.call == "vjp":
            values, pull = func.vjp(fn, *point, **options)
            return values, [pull(seed) for seed in seeds]
        if program.call == "linearize":
            values, push = func.linearize(fn, *point, **options)
            return values, [push(*along), push(*along[::-1])]
        if program.call == "hvp":
            mode: Any = {"mode": "reverse-over-reverse", **options}
            return func.hvp(scalar, tuple(point), tuple(along), **mode)
        return func.ggn_vp(lambda p: fn(*p), loss, tuple(point), tuple(along), **options)
    if program.call == "vjp":
        values, pull, *_ = vjp(fn, *point)
        result: Any = values, [pull(seed) for seed in seeds]
    elif program.call == "linearize":
        result = _push(fn, point, along)
        result = result[0], [result[1], _push(fn, point, along[::-1])[1]]
    elif program.call == "hvp":
        grads, pull, *_ = vjp(grad(scalar, tuple(range(len(point)))), *point)
        result = grads, pull(tuple(along))
    else:
        values, tangents = _push(fn, point, along)
        cotangents = vjp(grad(loss), values)[1](tangents)[0]
        result = loss(values), vjp(fn, *point)[1](cotangents)
    return _cut(result, program.create_graph)


def _call(program: Program, vector: _Fn, args: list[Tensor], at: Scope) -> Any:
    """Return the losses and gradients of a function, by the call of the program."""
    w, x, s = args
    if program.call in PRODUCTS:
        return _product(program, vector, args, at)

    def fn(w: Tensor, x: Tensor, s: Tensor) -> Tensor:
        return vector(w, x, s).sum()

    one = _by(program, fn, is_twin=at.is_twin)
    if program.call == "one":
        return one(*args)
    if program.call == "several":

        def several(w: Tensor, x: Tensor, s: Tensor) -> list[Tensor]:
            return [fn(w, x, s), (x * s).sum(), (at.captured * w).sum()]

        return _by(program, several, is_twin=at.is_twin)(*args)
    if program.call == "per loss":

        def losses(w: Tensor, x: Tensor, s: Tensor) -> Tensor:
            return torch.stack([fn(w, x, s), (x * s * w).sum()])

        if at.is_twin:
            return None, _cut(jacrev(losses, program.argnums)(*args), program.create_graph)
        options: Any = {"create_graph": program.create_graph}
        return None, func.per_loss_grads(losses, program.argnums, **options)(*args)
    if program.call == "inside":
        return grad_and_value(lambda w: one(w, x, s)[0] * w.sum())(w)[::-1]

    def penalized(*args: Tensor) -> Tensor:
        value, grads = one(*args)
        along = torch.arange(1, 4, dtype=F64, device=CPU)
        leaves = torch_pytree.tree_leaves(grads)
        return value + torch.stack([(one * one * along).sum() for one in leaves]).sum()

    return _by(program, penalized, is_twin=at.is_twin)(*args)


def run(program: Program, *, is_twin: bool) -> tuple[Any, list[Tensor]]:
    """Return the results of a program, and two orders of derivatives of all of them."""
    numbers = torch.Generator().manual_seed(program.seed)

    def values(count: int = 3) -> Tensor:
        return torch.rand(count, generator=numbers, dtype=F64, device=CPU) * 1.6 - 0.8

    args = [values().requires_grad_(need) for need in program.requires_grad]
    captured = values().requires_grad_(program.captured_requires_grad)
    base = values(5).requires_grad_(program.captured_requires_grad)
    block = Block(checkpoints=not is_twin)
    block.requires_grad_(program.captured_requires_grad)
    view = (base * 2)[1:4]
    w, x, s = args
    outside = Scope(w, x, s, captured, view, block, is_twin)

    def fn(w: Tensor, x: Tensor, s: Tensor) -> Tensor:
        at, out = outside._replace(w=w, x=x, s=s), w * x
        for step in program.steps:
            out = STEPS[step](out, at)
        return out**program.power

    losses, grads = _call(program, fn, args, outside)
    results = losses, grads
    every = [x for x in torch_pytree.tree_leaves(results) if x is not None]
    leaves = [x for x in (*args, captured, base, *block.parameters()) if x.requires_grad]
    total = torch.stack([(x * x.cos()).sum() for x in every]).sum()
    derivatives: list[Tensor] = []
    options: Any = {"materialize_grads": True}
    if total.requires_grad and leaves:
        derivatives += torch.autograd.grad(total, leaves, create_graph=True, **options)
        along = torch.stack([x.sum() for x in derivatives]).sum()
        if along.requires_grad and program.call in {"one", "several", "per loss"}:
            derivatives += torch.autograd.grad(along, leaves, **options)
    return results, derivatives


def functions(rng: Random) -> None:
    """Results, which of them carry a graph, and their derivatives, are those of torch.func."""
    program = draw(rng)
    if program.call in PRODUCTS[2:] and "a hook" in program.steps:
        return  # torch runs it once more in a second derivative
    try:
        check(program)
    except Exception as error:
        error.add_note(str(program))
        raise


def check(program: Program) -> None:
    """Compare a program with its twin."""
    refusals = {"does not depend on them"}
    if program.call == "inside" and OF_EAGER_CODE.intersection(program.steps):
        refusals.add("torch.func can")
    expected, theirs = run(program, is_twin=True)
    with may_refuse(refusals):
        got, ours = run(program, is_twin=False)
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
        _compare_graphs(program, got, expected)
        zeros = [torch.zeros_like(x) for x in max(ours, theirs, key=len)]  # of what has no graph
        ours, theirs = ([*x, *zeros[len(x) :]] for x in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def _compare_graphs(program: Program, got: Any, expected: Any) -> None:
    ours, theirs = (
        [
            [x is not None and x.requires_grad for x in torch_pytree.tree_leaves(part)]
            for part in result
        ]
        for result in (got, expected)
    )
    # gradkit gives a constant gradient the graph of the loss, with a derivative of zero.
    assert all(a >= b for a, b in zip(ours[1], theirs[1], strict=True)), (ours, theirs)
    if program.call not in {"twice", "hvp"}:  # whose losses may have such a gradient in them
        assert ours[0] == theirs[0], (ours, theirs)
