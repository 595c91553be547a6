"""What a module keeps in attributes: seen by the function that called it, and put back at the end.

The oracle is a plain module with the given values as its parameters, and torch.autograd.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import gradkit
from gradkit import func, meta

DOUBLE = torch.float64


@dataclass
class Record:
    losses: list[Any] = field(default_factory=list)
    last: Any = None


# How a module keeps a tensor, and how that is read: what is added up, in the end.
KEEPS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda m, a: setattr(m, "left", a), lambda m: m.left),
    "buffer": (lambda m, a: setattr(m, "held", a), lambda m: m.held),
    "created": (lambda m, a: setattr(m, "made", a), lambda m: m.made),
    "list": (lambda m, a: m.items.append(a), lambda m: sum(m.items)),
    "dict": (lambda m, a: m.table.update(aux=a), lambda m: m.table["aux"]),
    "tuple": (lambda m, a: setattr(m, "left", (a, 2 * a)), lambda m: sum(m.left)),
    "deque": (lambda m, a: m.queue.append(a), lambda m: sum(m.queue)),
    "dataclass": (lambda m, a: m.record.losses.append(a), lambda m: sum(m.record.losses)),
    "object": (lambda m, a: setattr(m.space, "aux", a), lambda m: m.space.aux),
    "nested": (lambda m, a: m.nested["a"][0].append(a), lambda m: sum(m.nested["a"][0])),
    "deleted": (lambda m, a: vars(m).pop("flag", None), lambda m: 0.0 * m.steps),
    "state": (
        lambda m, a: setattr(m, "left", a if m.left is None else 0.5 * m.left * a),
        lambda m: m.left,
    ),
    "cache": (
        lambda m, a: setattr(m, "left", m.w.exp() if m.left is None else m.left),
        lambda m: m.left,
    ),
}


class Keeps(nn.Module):
    """A module that keeps tensors in the given ways."""

    seen: Tensor
    held: Tensor

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.w = nn.Parameter(torch.tensor(0.7, dtype=DOUBLE))
        self.register_buffer("seen", torch.zeros((), dtype=DOUBLE), persistent=False)
        self.register_buffer("held", torch.zeros((), dtype=DOUBLE))
        self.left: Any = None
        self.items: list[Any] = []
        self.table: dict[str, Any] = {}
        self.queue: deque[Any] = deque()
        self.record, self.space = Record(), SimpleNamespace(aux=None)
        self.nested: Any = {"a": ([],)}
        self.steps, self.flag = 0, "here"

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for kind in self.kinds:
            KEEPS[kind][0](self, (self.w * x).sin().sum() + self.w**2)
        return (self.w * x).sum() * self.steps

    def power(self, x: Tensor) -> Tensor:
        return x**self.w

    def kept(self) -> Any:
        return sum(KEEPS[kind][1](self) for kind in self.kinds)


def deep(value: Any) -> Any:
    """Return what an attribute holds: ids, and numbers, of all that is in it."""
    if isinstance(value, Tensor):
        return id(value), value.tolist(), value.requires_grad
    if isinstance(value, dict):
        return [(key, deep(x)) for key, x in value.items()]
    if isinstance(value, list | tuple | deque):
        return id(value), list(map(deep, value))
    return deep(vars(value)) if isinstance(value, Record | SimpleNamespace) else value


def state(module: nn.Module) -> list[Any]:
    return [deep(vars(part)) for part in module.modules()]


def right(kinds: list[str], times: int, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivatives of a plain module with this value."""
    module = nn.Sequential(Keeps(*kinds)).to(x.device)
    own = module[0].w
    with torch.no_grad():
        own.copy_(w)
    (grad,) = torch.autograd.grad(uses(module, module, times, x), own, create_graph=True)
    product = torch.zeros_like(own)
    if grad.requires_grad:
        (product,) = torch.autograd.grad(grad, own, materialize_grads=True)
    return grad.detach(), product.detach()


def calls(module: nn.Module) -> dict[str, Callable[[Any, Tensor], Tensor]]:
    call, _, buffers = func.make_functional(module)
    return {
        "make_functional": lambda p, x: call(p, buffers, x)[0],
        "functional_call": lambda p, x: functional_call(module, p, (x,)),
    }


def uses(module: nn.Module, out: Callable[[Tensor], Tensor], times: int, x: Tensor) -> Tensor:
    total = sum(out(x * (1 + i)) for i in range(times))
    return total + module[0].kept()


ONE_PLACE = {"buffer", "attribute", "tuple", "state", "cache"}  # only one of them can be there
kinds = st.lists(st.sampled_from(sorted(KEEPS)), min_size=1, max_size=3, unique=True)


@pytest.mark.parametrize("by", ["make_functional", "functional_call"])
@settings(max_examples=12)
@given(
    kinds=kinds.filter(lambda drawn: len(ONE_PLACE & set(drawn)) < 2),
    times=st.integers(1, 3),
    at=st.floats(-1.5, 1.5),
)
def test_every_call_is_plain_autograd_of_the_module(
    device: torch.device, by: str, kinds: list[str], times: int, at: float
) -> None:
    """What it keeps counts, and carries from call to call; and the module is as before, deeply."""
    if by == "functional_call":  # whose buffers are the module's, which keeps them
        kinds = ["attribute" if kind == "buffer" else kind for kind in kinds]
    module = nn.Sequential(Keeps(*kinds)).to(device)
    x = torch.tensor([0.3, -0.8], dtype=DOUBLE, device=device)
    p = {"0.w": torch.tensor(at, dtype=DOUBLE, device=device)}
    v = {"0.w": torch.ones_like(p["0.w"])}
    call = calls(module)[by]

    def loss(p: Any, x: Tensor) -> Tensor:
        return uses(module, partial(call, p), times, x)

    grad, product = right(kinds, times, p["0.w"], x)
    many = x.expand(3, 2)
    run: dict[str, Callable[[], Tensor]] = {
        "value_and_grads": lambda: func.value_and_grads(loss)(p, x)[1]["0.w"],
        "per_loss_grads": lambda: func.per_loss_grads(loss)(p, x)["0.w"],
        "vjp": lambda: func.vjp(lambda p: loss(p, x), p)[1](torch.ones_like(grad))[0]["0.w"],
        "jvp": lambda: func.jvp(lambda p: loss(p, x), (p,), (v,))[1],
        "linearize": lambda: func.linearize(lambda p: loss(p, x), p)[1](v),
        "per_sample_grads": lambda: func.per_sample_grads(loss, chunk_size=2)(p, many)["0.w"],
        "mean_value_and_grads": lambda: meta.mean_value_and_grads(
            loss, p, many, tasks_at_once=2
        )[1]["0.w"],
        "unroll": lambda: p["0.w"] - meta.unroll(
            lambda p, _, x: loss(p, x), p, [x], meta.sgd(lr=1.0)
        ).params["0.w"],
    }  # fmt: skip
    if set(kinds) <= {"attribute", "buffer", "created", "state", "cache", "deleted"}:
        again = func.checkpoint(loss)  # which refuses tensors with a graph in containers
        run["checkpoint"] = lambda: func.value_and_grads(again)(p, x)[1]["0.w"]
    before = state(module)
    for name, result in ((name, one()) for name, one in run.items()):
        torch.testing.assert_close(result, grad.expand_as(result), msg=name)
        assert state(module) == before, name
    grads, hv = func.hvp(lambda p: loss(p, x), (p,), (v,))
    torch.testing.assert_close([grads[0]["0.w"], hv[0]["0.w"]], [grad, product])
    assert state(module) == before


@pytest.mark.parametrize("kind", sorted(KEEPS))
def test_a_call_by_itself_leaves_the_module_as_it_was(device: torch.device, kind: str) -> None:
    module = nn.Sequential(Keeps(kind)).to(device)
    call, params, buffers = func.make_functional(module)
    before, x = state(module), torch.ones(2, dtype=DOUBLE, device=device)
    call(params, buffers, x)
    call({"0.w": params["0.w"].detach() * 2}, buffers, x)
    assert state(module) == before


@pytest.mark.parametrize("kind", sorted(set(KEEPS) - {"deleted", "buffer"}))
def test_checked_refuses_what_an_eager_call_leaves(device: torch.device, kind: str) -> None:
    module = nn.Sequential(Keeps(kind)).to(device)
    call, params, buffers = func.make_functional(module)
    before, x = state(module), torch.ones(2, dtype=DOUBLE, device=device)
    with gradkit.checked():
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"^module\.0\.\w+.*: expected"):
            call(params, buffers, x)
        assert state(module) == before
        # What to do: the call in a function, or an attribute without a graph.
        values = {name: param.detach() for name, param in params.items()}
        loss = lambda p: uses(module, lambda x: call(p, buffers, x)[0], 1, x)  # noqa: E731
        grads = func.value_and_grads(loss)(values)[1]
        assert torch.equal(grads["0.w"], right([kind], 1, values["0.w"], x)[0])
        call(values, buffers, x)
    assert state(module) == before


def test_a_tensor_that_a_module_writes_on_is_as_before(device: torch.device) -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return super().forward(x)

    module = Counts(2, 1).to(device)
    module.count = torch.zeros(3, device=device)
    call, params, buffers = func.make_functional(module)
    call(params, buffers, torch.ones(2, device=device))
    assert module.count.tolist() == [0, 0, 0]


def test_an_attribute_that_got_another_name_is_as_before(device: torch.device) -> None:
    """Its value stays where it was among those of the module: the name alone tells."""

    class Renames(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if "first" in vars(self):
                vars(self)["second"] = vars(self).pop("first")
            return super().forward(x * vars(self)["second"])

    module = Renames(2, 1, device=device)
    vars(module)["first"] = torch.ones(2, device=device)
    before = dict(vars(module))
    call, params, buffers = func.make_functional(module)
    x = torch.ones(3, 2, device=device)
    for run in (
        lambda: func.value_and_grads(lambda p: call(p, buffers, x)[0].sum())(params),
        lambda: func.value_and_grads(lambda w: module(x * w).sum())(x[0]),
        lambda: call(params, buffers, x),
    ):
        run()
        assert list(vars(module)) == list(before)
        assert all(vars(module)[key] is value for key, value in before.items())


@pytest.mark.parametrize("by", ["make_functional", "functional_call"])
@pytest.mark.parametrize("of", ["an eager pass", "torch.func", "a call before"])
@pytest.mark.parametrize("kind", ["cache", "state"])
def test_what_other_parameters_left_is_refused_where_it_is_read(
    device: torch.device, kind: str, of: str, by: str
) -> None:
    module = nn.Sequential(Keeps(kind)).to(device)
    call, x = calls(module)[by], torch.ones(2, dtype=DOUBLE, device=device)
    p = {"0.w": torch.tensor(0.3, dtype=DOUBLE, device=device)}

    if kind == "cache" and (by == "functional_call" or of == "a call before"):
        return  # nobody sees that what is read after the call is of other parameters

    def loss(p: Any) -> Tensor:
        return call(p, x) + (module[0].kept() if kind == "cache" else 0)

    def twice(p: Any) -> Tensor:
        return call({"0.w": 2 * p["0.w"]}, x) + loss(p)

    if of == "an eager pass":
        module(x)
    elif of == "torch.func":
        torch.func.grad(lambda p: functional_call(module, p, (x,)))(p)
    elif by == "functional_call":
        return  # nobody sees that a second call of it has other parameters
    fn = twice if of == "a call before" else loss
    v = {"0.w": torch.ones_like(p["0.w"])}
    named = pytest.raises(gradkit.UnsupportedGraphError, match=r"^module\.0\.left: ")
    for run in (
        lambda: func.value_and_grads(fn)(p),
        lambda: func.jvp(fn, (p,), (v,)),
        lambda: func.hvp(fn, (p,), (v,)),
        lambda: func.value_and_grads(func.checkpoint(fn))(p),
        lambda: func.per_sample_grads(lambda p, y: fn(p) * y)(p, x),
        lambda: meta.unroll(lambda p, *_: fn(p), p, [0], meta.sgd(lr=0.1)),
    ):
        before = state(module)
        with named:
            run()
        assert state(module) == before
    part: Any = module[0]
    part.left, part.steps = None, 0  # what to do
    expected = 2.0 + (torch.tensor(0.3).exp().item() if kind == "cache" else 0)
    assert func.value_and_grads(loss)(p)[1]["0.w"].item() == pytest.approx(expected)


def test_state_with_its_graph_cut_is_carried_over(device: torch.device) -> None:
    """What the message says: the gradient is that of a loop that detaches its state."""
    module = nn.Sequential(Keeps("state")).to(device)
    call, x = calls(module)["make_functional"], torch.ones(2, dtype=DOUBLE, device=device)
    module(x)
    module[0].left = module[0].left.detach()
    p = {"0.w": torch.tensor(0.3, dtype=DOUBLE, device=device)}
    grad = func.value_and_grads(lambda p: call(p, x) + module[0].left)(p)[1]["0.w"]
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].w.copy_(p["0.w"])
    (expected,) = torch.autograd.grad(other(x) + other[0].left, other[0].w)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("by", ["make_functional", "functional_call"])
@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("kind", sorted(set(KEEPS) - {"deleted", "buffer"}))
def test_staged_refuses_a_loss_that_encode_has_left(
    device: torch.device, kind: str, chunk_size: int | None, by: str
) -> None:
    """By the path of the attribute; what is not read is no matter, and a cache is made anew."""
    module = nn.Sequential(Keeps(kind)).to(device)
    module[0].register_forward_hook(lambda m, _, out: out / m.steps)
    call = calls(module)[by]
    p = {"0.w": torch.tensor(0.3, dtype=DOUBLE, device=device)}
    xs = torch.tensor([[0.3], [-0.8]], dtype=DOUBLE, device=device)
    before = state(module)

    def encode(p: Any, x: Tensor) -> Tensor:
        return (call(p, x) + module[0].kept())[None]

    options: Any = {"chunk_size": chunk_size, "create_graph": False}
    step = func.staged_value_and_grads(encode, lambda y: y.sum() + module[0].kept(), **options)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^encode: module\.0\.\w+.*: "):
        step(p, xs)
    assert state(module) == before
    step = func.staged_value_and_grads(encode, torch.sum, **options)
    chunks = [xs] if chunk_size is None else list(xs.split(1))
    expected = sum(
        func.value_and_grads(lambda p, x: encode(p, x).sum())(p, x)[1]["0.w"] for x in chunks
    )
    torch.testing.assert_close(step(p, xs)[1]["0.w"], expected)
    assert state(module) == before


LATER: dict[str, Callable[[Any, Tensor], Any]] = {
    "closure": lambda m, x: lambda: m.w * x,
    "generator": lambda m, x: (m.w * x for _ in range(2)),
    "map": lambda m, x: map(m.power, [x]),
    "method": lambda m, x: m.kept,
    "partial": lambda m, x: partial(torch.mul, x, m.w) and partial(m.kept),
    "object": lambda m, x: {"dist": SimpleNamespace(kernel=SimpleNamespace(of=m))},
    "module": lambda m, x: [m],
}


class Lazy(Keeps):
    """A module that returns, or keeps, what computes later."""

    def __init__(self, kind: str, where: str) -> None:
        super().__init__()
        self.kind, self.where = kind, where

    def forward(self, x: Tensor) -> Any:
        later = LATER[self.kind](self, x)
        if self.where == "kept":
            self.left = later
        return (later, self.w * x) if self.where == "out" else self.w * x


@pytest.mark.parametrize("where", ["out", "kept"])
@pytest.mark.parametrize("kind", LATER)
def test_what_would_compute_later_is_refused(device: torch.device, kind: str, where: str) -> None:
    """With the module's own parameters; with these it is as in the module."""
    if (kind, where) == ("module", "kept"):
        return  # a list of its parts
    module = Lazy(kind, where).to(device)
    call, params, buffers = func.make_functional(module)
    x = torch.ones(2, dtype=DOUBLE, device=device)
    call(params, buffers, x)
    other = {"w": params["w"].detach() * 2}
    where = r"out\[0\]" if where == "out" else r"module\.left"
    with pytest.raises(gradkit.UnsupportedGraphError, match=f"^{where}.*: .*refers to the module"):
        call(other, buffers, x)
    with pytest.raises(gradkit.UnsupportedGraphError, match=f"^{where}.*: .*refers to the module"):
        func.value_and_grads(lambda p: call(p, buffers, x)[0][1].sum())(params)
    assert module.left is None


@pytest.mark.parametrize("kind", sorted(set(LATER) - {"module", "object"}))
def test_what_would_compute_later_is_refused_in_a_checkpoint(
    device: torch.device, kind: str
) -> None:
    """Which has other tensors in the place of the module's own."""
    module = Lazy(kind, "out").to(device)
    call, params, buffers = func.make_functional(module)
    x = torch.ones(2, dtype=DOUBLE, device=device)
    p = {"w": params["w"].detach() * 3}

    def compute(later: Any) -> Tensor:
        value = next(later) if kind in ("generator", "map") else later()
        return torch.as_tensor(value).sum()

    @func.checkpoint
    def loss(p: Any, x: Tensor) -> Tensor:
        later, plain = call(p, buffers, x)[0]
        return compute(later) + plain.sum()

    def total(p: Any) -> Tensor:
        return loss(p, x)

    run: dict[str, Callable[[], Any]] = {
        "value_and_grads": lambda: func.value_and_grads(total)(p),
        "nested": lambda: func.value_and_grads(func.checkpoint(total))(p),
        "hvp": lambda: func.hvp(total, (p,), (p,)),
        "jvp": lambda: func.jvp(total, (p,), (p,)),
        "per_sample_grads": lambda: func.per_sample_grads(loss)(p, x),
        "staged": lambda: func.staged_value_and_grads(loss, lambda y: y)(p, x),
        "unroll": lambda: meta.unroll(
            lambda p, *_: total(p), p, [0], meta.sgd(lr=0.1), memory="recompute"
        ),
        "eager": lambda: gradkit.value_and_grads(total(module_params(p)), []),
    }
    before = state(module)
    for name, one in run.items():
        with pytest.raises(
            gradkit.UnsupportedGraphError, match=r"out\[0\]: .*refers to the module"
        ):
            one()
        assert state(module) == before, name


def module_params(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone().requires_grad_() for name, x in p.items()}


def test_a_given_parameter_of_its_own_may_be_used_later_in_a_checkpoint(
    device: torch.device,
) -> None:
    """Where it is the one that the call was given."""
    module = Lazy("closure", "out").to(device)
    call, params, buffers = func.make_functional(module)
    x = torch.tensor([0.5, 2.0], dtype=DOUBLE, device=device)

    def loss(x: Tensor) -> Tensor:
        later, plain = call(params, buffers, x)[0]
        return (later() * plain).sum()

    w = params["w"]
    (expected,) = torch.autograd.grad((w * x * w * x).sum(), w)
    _, grad = gradkit.value_and_grads(func.checkpoint(loss)(x), w)
    torch.testing.assert_close(grad, expected)


class Inside(nn.Module):
    """What the message says: a module that computes inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        later, plain = self.model(x)
        return later() + plain


def test_what_computes_inside_is_right(device: torch.device) -> None:
    module = Inside(Lazy("closure", "out")).to(device)
    call, params, buffers = func.make_functional(module)
    x = torch.tensor([0.5, 2.0], dtype=DOUBLE, device=device)
    grads = func.value_and_grads(lambda p: call(p, buffers, x)[0].sum())(params)[1]
    assert grads["model.w"].item() == 5.0


class Fails(nn.Module):
    """Changes all that a module has, and raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Keeps(*sorted({*KEEPS} - {"tuple", "state"}))
        self.frozen = nn.Linear(1, 1, dtype=DOUBLE).requires_grad_(False)

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        self.inner.seen = self.inner.seen + 1
        self.inner(w)
        self.frozen.requires_grad_(True)
        self.eval()
        self.inner.register_forward_hook(lambda *_: None)
        self.register_buffer("more", x)
        torch.rand(1)
        return w * 2  # no loss: it has two elements


def test_a_call_that_raises_changes_nothing(device: torch.device) -> None:
    module = Fails().to(device)
    w, x = (torch.ones(2, dtype=DOUBLE, device=device) for _ in range(2))
    at = partial(module, x=x)

    def raises(w: Tensor) -> Tensor:
        at(w)
        raise ZeroDivisionError

    one = (w,), (torch.ones_like(w),)
    run: dict[str, Callable[[], Any]] = {
        "value_and_grads": lambda: func.value_and_grads(module)(w, x),
        "per_loss_grads": lambda: func.per_loss_grads(raises)(w),
        "per_sample_grads": lambda: func.per_sample_grads(module)(w, x),
        "hvp": lambda: func.hvp(at, *one),
        "jvp": lambda: func.jvp(raises, *one),
        "vjp": lambda: func.vjp(raises, w),
        "linearize": lambda: func.linearize(raises, w),
        "ggn_vp": lambda: func.ggn_vp(at, lambda y: y, w, w),
        "check_grads": lambda: func.check_grads(raises, w),
        "staged": lambda: func.staged_value_and_grads(module, lambda y: y)(w, x),
        "unroll": lambda: meta.unroll(module_loss(at), w, [0], meta.sgd(lr=0.1)),
        "mean_value_and_grads": lambda: meta.mean_value_and_grads(module, w, x),
    }

    def everything() -> list[Any]:
        frozen = [(id(p), p.requires_grad) for p in module.parameters()]
        modes = [part.training for part in module.modules()]
        return [state(module), frozen, modes, torch.get_rng_state().tolist()]

    before = everything()
    for name, call in run.items():
        with pytest.raises((gradkit.GradkitError, ZeroDivisionError)):
            call()
        assert everything() == before, name


def module_loss(fn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda w, *_: fn(w)


OF_THE_FILE: dict[str, nn.Module] = {}  # a global


@dataclass(frozen=True)
class Case:
    operations: dict[str, Callable[[Any], Tensor]]


class Task:
    """Has a module behind an object, a dictionary and a closure."""

    def __init__(self, module: nn.Module) -> None:
        self.case = Case({"loss": lambda w: module(w)})

    def total(self, w: Tensor) -> Tensor:
        return self.case.operations["loss"](w) * 2


def through_a_nested_function(w: Tensor) -> Tensor:
    return (lambda w: (lambda w: OF_THE_FILE["it"](w))(w))(w)


@pytest.mark.parametrize("by", ["nested", "checkpoint", "object"])
def test_a_module_that_is_far_from_the_function_is_put_back(device: torch.device, by: str) -> None:
    module = nn.Sequential(Keeps("attribute", "created")).to(device)
    OF_THE_FILE["it"] = module
    fn: Callable[[Tensor], Tensor] = {
        "nested": through_a_nested_function,
        "checkpoint": lambda w: (lambda w: func.checkpoint(lambda w: OF_THE_FILE["it"](w))(w))(w),
        "object": Task(module).total,
    }[by]
    w = torch.ones(2, dtype=DOUBLE, device=device)

    def raises(w: Tensor) -> Tensor:
        fn(w)
        raise ZeroDivisionError

    before = state(module)
    run: list[Callable[[], Any]] = [
        lambda: func.value_and_grads(raises)(w),
        lambda: func.hvp(raises, (w,), (w,)),
        lambda: func.vjp(raises, w),
        lambda: meta.unroll(lambda w, *_: raises(w), w, [0], meta.sgd(lr=0.1)),
    ]
    for call in run:
        with pytest.raises(ZeroDivisionError):
            call()
        assert state(module) == before


class Adjoint(torch.autograd.Function):
    """Calls its module again in the backward pass, as `odeint_adjoint` does."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), (x, *params), cotangents, allow_unused=True)
        return None, *found


class CalledAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Adjoint.apply(self.inner, x, *self.inner.parameters())
        return out


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_module_that_a_backward_calls_again(device: torch.device, is_eager: bool) -> None:
    module, x = CalledAgain().to(device), torch.ones(3, 2, dtype=DOUBLE, device=device)
    call, params, buffers = func.make_functional(module)
    values = {name: param.detach().clone().requires_grad_() for name, param in params.items()}

    def loss(p: Any) -> Tensor:
        return call(p, buffers, x)[0].sum()

    run = loss if is_eager else func.value_and_grads(loss)
    with pytest.raises(gradkit.UnsupportedGraphError, match="Adjoint, whose backward refers to it"):
        run(values)
    # What to do.
    _, grads = gradkit.value_and_grads(module(x).sum(), module)
    assert grads["inner.weight"].tolist() == [[3, 3]]


def test_a_buffer_of_a_call_in_between_is_freed(device: torch.device) -> None:
    module = nn.Sequential(Keeps("buffer")).to(device)
    call, params, buffers = func.make_functional(module)
    x, left = torch.ones(2, dtype=DOUBLE, device=device), list[Any]()

    def loss(p: dict[str, Tensor]) -> Tensor:
        for _ in range(3):
            call({name: param.detach() for name, param in p.items()}, buffers, x)
            left.append(weakref.ref(module[0].held))
        assert [ref() is not None for ref in left] == [False, False, True]
        return p["0.w"] * 1

    before = module[0].held
    func.value_and_grads(loss)(params)
    assert module[0].held is before
    assert left[-1]() is None
