"""unroll: meta-gradients against differences and a plain loop, whatever is kept of the steps."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, jvp, vmap
from torch.func import grad as func_grad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import meta
from tests.helpers import World, assert_same_bits, unchanged

D = torch.float64
MEMORY = ["store", "recompute", 1, 2, 3, 7]
STEPS = 5
every_memory = pytest.mark.parametrize("memory", MEMORY)
each_way = pytest.mark.parametrize("memory", ["store", "recompute", 2])
recomputing = pytest.mark.parametrize("memory", [m for m in MEMORY if m != "store"])


def leaves(tree: Any) -> list[Tensor]:
    flat = optree.tree_leaves(tree, namespace="gradkit")  # which keeps the order of dictionaries
    return [leaf for leaf in flat if isinstance(leaf, Tensor)]


def random(device: torch.device, *shape: int, learned: bool = False) -> Tensor:
    return torch.randn(shape, dtype=D, device=device).div(2).requires_grad_(learned)


class Problem:
    """A small network, with everything that a gradient can flow to."""

    def __init__(self, device: torch.device) -> None:
        make = lambda *shape: random(device, *shape, learned=True)  # noqa: E731
        self.params = {"w": make(3, 4), "more": [make(4), make(4, 2)], "none": None}
        self.outer = {"scale": make(), "target": make(2), "kind": "mse", "none": None}
        once, twice = (make(5, 3), random(device, 5, 2)), {"x": make(5, 3), "weight": 2}
        self.batches = [once, twice, once, twice, once]
        self.rate = {"w": make(3, 4), "more": [make(), make()], "none": None}
        self.momentum = make()

    def opt(self, name: str = "sgd") -> meta.Optimizer:
        rate = gradkit.tree.map(lambda t: 0.1 + 0.05 * t, self.rate)
        if name == "sgd":
            return meta.sgd(lr=rate, momentum=self.momentum.sigmoid(), weight_decay=0.1)
        if name == "adam":
            return meta.adam(lr=rate, betas=(self.momentum.sigmoid(), 0.9), eps=0.01)
        return meta.from_torch(torch.optim.NAdam, lr=0.05, eps=0.01)

    def loss(self, params: Any, outer: Any, batch: Any) -> Tensor:
        assert outer["kind"] == "mse"
        x, y = batch if isinstance(batch, tuple) else (batch["x"], batch["weight"])
        out = (x @ params["w"] + params["more"][0]).tanh() @ params["more"][1]
        return outer["scale"].exp() * ((out - y * outer["target"]) ** 2).mean()

    def loss_and_aux(self, *args: Any) -> tuple[Tensor, Any]:
        loss = self.loss(*args)
        return loss, {"twice": 2 * loss, "text": "aux"}

    def learned(self) -> list[Tensor]:
        data = [self.batches[0][0], self.batches[1]["x"]]
        return [*leaves(self.params), *leaves(self.outer), *data, *leaves(self.rate), self.momentum]

    def put(self, tensors: Any) -> None:
        rest = iter(tensors)
        self.params = gradkit.tree.map(lambda _: next(rest), self.params)
        self.outer = {**self.outer, "scale": next(rest), "target": next(rest)}
        once, twice = (next(rest), self.batches[0][1]), {"x": next(rest), "weight": 2}
        self.batches = [once, twice, once, twice, once]
        self.rate = gradkit.tree.map(lambda _: next(rest), self.rate)
        self.momentum = next(rest)


def height(adapted: meta.Adapted) -> Tensor:
    """A meta-loss that looks at the parameters, the state and the inner losses."""
    state = sum((t.double() ** 2).sum() for t in leaves(adapted.state))
    return sum((t.sin() ** 2).sum() for t in leaves(adapted.params)) + adapted.values.prod() + state


def plain(
    loss_fn: Any,
    params: Any,
    batches: Any,
    opt: Any,
    outer: Any = (),
    state: Any = None,
    transform: Callable[[Any], Any] = lambda grads: grads,
) -> meta.Adapted:
    """The loop as one would write it."""
    state = opt.init(params) if state is None else state
    values = []
    for batch in batches:
        flat = [t if t.requires_grad else t.requires_grad_() for t in leaves(params)]
        loss = loss_fn(params, outer, batch)
        rest = iter(gradients(loss, flat, create_graph=True))
        grads = transform(gradkit.tree.map(lambda _, rest=rest: next(rest), params))
        params, state = opt.step(params, grads, state)
        values.append(loss)
    return meta.Adapted(params, state, torch.stack(values))


def gradients(out: Tensor, by: Any, **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(out, by, allow_unused=True, **options)


def assert_close(ours: Any, theirs: Any, tol: float = 1e-12) -> None:
    torch.testing.assert_close(list(ours), list(theirs), rtol=tol, atol=tol)


@every_memory
@pytest.mark.parametrize("name", ["sgd", "adam", "NAdam"])
def test_it_is_the_plain_loop(device: torch.device, memory: Any, name: str) -> None:
    p = Problem(device)
    world = World(*p.learned())
    got = meta.unroll(
        p.loss_and_aux, p.params, p.batches, p.opt(name), outer=p.outer, memory=memory, has_aux=True
    )
    expected = plain(p.loss, p.params, p.batches, p.opt(name), p.outer)
    assert_close(leaves(got.params), leaves(expected.params))
    assert_close(leaves(got.state), leaves(expected.state))
    assert_close(got.values, expected.values)
    assert got.params["none"] is None
    assert [one["text"] for one in got.aux] == ["aux"] * STEPS
    assert_same_bits(
        [one["twice"] for one in got.aux], [2 * value.detach() for value in got.values]
    )
    meta_grads = gradients(height(got), p.learned())
    assert_close(meta_grads, gradients(height(expected), p.learned()))
    missing = [t is None for t in meta_grads]
    assert missing == [False] * 7 + [name == "NAdam"] * 4
    world.assert_unchanged()


@pytest.mark.long
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_meta_gradients_are_those_of_differences(device: torch.device, name: str) -> None:
    p = Problem(device)

    def after(*tensors: Tensor) -> Tensor:
        p.put(tensors)
        opt = p.opt(name)
        return height(meta.unroll(p.loss, p.params, p.batches, opt, outer=p.outer))

    assert gradcheck(after, p.learned(), eps=1e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.long
@each_way
def test_the_meta_gradient_has_a_derivative(device: torch.device, memory: Any) -> None:
    w, scale, rate = (random(device, *shape, learned=True) for shape in ((2,), (), ()))
    x = random(device, 3, 2)

    def loss(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return scale.exp() * (x @ w).sin().square().sum() + (w**4).sum()

    def after(w: Any, scale: Any, rate: Any, memory: Any = memory) -> Any:
        opt = meta.sgd(lr=rate.sigmoid() * 0.1, momentum=0.9)
        return height(meta.unroll(loss, w, [x] * 3, opt, outer=scale, memory=memory))

    by = [w, scale, rate]
    first = gradients(after(*by), by)
    assert_close(gradients(after(*by), by, create_graph=True), first)
    assert gradgradcheck(after, by, eps=1e-6, atol=1e-5, rtol=1e-5)
    third = []
    for m in (memory, "store"):
        second: Any = gradients(after(w, scale, rate, m), by, create_graph=True)
        third.append(gradients(sum((g**2).sum() for g in second), by))
    assert_close(*third)


@pytest.mark.long
@each_way
def test_the_state_goes_on_from_call_to_call(device: torch.device, memory: Any) -> None:
    for name in ("sgd", "adam", "NAdam"):
        p = Problem(device)
        call = lambda *args, p=p, **options: meta.unroll(  # noqa: E731
            p.loss, *args, outer=p.outer, memory=memory, **options
        )
        whole = call(p.params, p.batches, p.opt(name))
        first = call(p.params, p.batches[:3], p.opt(name))
        rest = call(first.params, p.batches[3:], p.opt(name), state=first.state)
        assert_close(leaves(rest.params), leaves(whole.params))
        assert_close(leaves(rest.state), leaves(whole.state))
        assert_close(torch.cat([first.values, rest.values]), whole.values)
        ours = (height(meta.Adapted(out.params, out.state, whole.values)) for out in (rest, whole))
        assert_close(*(gradients(out, p.learned(), retain_graph=True) for out in ours))
        cut = gradkit.tree.map(lambda t: t.detach().requires_grad_(), first.params)
        cut_state = optree.tree_map(
            lambda t: t.detach().requires_grad_(t.dim() > 0) if isinstance(t, Tensor) else t,
            first.state,
        )
        again = call(cut, p.batches[3:], p.opt(name), state=cut_state)
        expected = plain(p.loss, cut, p.batches[3:], p.opt(name), p.outer, cut_state)
        by = [*leaves(cut), *(t for t in leaves(cut_state) if t.requires_grad), *leaves(p.outer)]
        assert_close(gradients(height(again), by), gradients(height(expected), by))


def random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@every_memory
def test_random_numbers_are_drawn_once(device: torch.device, memory: Any) -> None:
    p = Problem(device)

    def loss(params: Any, outer: Any, batch: Any) -> Tensor:
        kept = functional.dropout(params["w"].new_ones(4), 0.5)
        params = {**params, "w": params["w"] * kept * torch.rand(4).to(kept)}
        return p.loss(params, outer, batch)

    def run(memory: Any) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(1)
        adapted = meta.unroll(loss, p.params, p.batches, p.opt(), outer=p.outer, memory=memory)
        before = random_states(device)
        torch.rand(3, device=device)  # what comes between must not matter
        grads = gradients(height(adapted), p.learned())
        return before, [*leaves(adapted.params), *grads]

    between = run("store")
    got = run(memory)
    assert_same_bits(got[0], between[0])
    assert_close(got[1], between[1])
    torch.manual_seed(1)
    expected = plain(loss, p.params, p.batches, p.opt(), p.outer)
    assert_close(got[1][:3], leaves(expected.params))
    now = random_states(device)
    gradients(height(expected), p.learned())
    assert_same_bits(random_states(device), now)
    assert_same_bits(got[0], now)


def _inplace(buffer: Tensor, by: float) -> None:
    buffer.add_(by)


def _augmented(buffer: Tensor, by: float) -> None:
    buffer += by


def _indexed(buffer: Tensor, by: float) -> None:
    buffer[...] = buffer + by


def _out(buffer: Tensor, by: float) -> None:
    torch.add(buffer, by, out=buffer)


def _data(buffer: Tensor, by: float) -> None:
    buffer.data.add_(by)


def _view(buffer: Tensor, by: float) -> None:
    buffer.view(-1)[0].add_(by)


class Counter(nn.Module):
    """Its output depends on what it writes on, if it reads it."""

    count: Tensor

    def __init__(self, write: Callable[..., None] | None, *, reads: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))
        self._write = write
        self._reads = reads

    def forward(self, x: Tensor) -> Tensor:
        if self._write is None:
            self.count = self.count + 1
        else:
            self._write(self.count, 1.0)
        return self.linear(x) * (1 + 0.3 * self.count if self._reads else 1)


def spectral() -> nn.Module:
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    for buffer in model.buffers():
        nn.init.normal_(buffer)  # far from where the power iteration ends
    return model


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def with_buffers(model: nn.Module, device: torch.device, **options: Any) -> tuple[Any, ...]:
    """Run forwards and backwards; return the buffers after each, and what came out."""
    torch.manual_seed(2)
    model.to(device, D).train()
    params = {n: random(device, *t.shape, learned=True) for n, t in model.named_parameters()}
    batches = [random(device, 6, 3) for _ in range(STEPS)]

    def loss(params: Any, _: Any, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).sin().square().sum()

    how = meta.unroll if options else plain
    adapted = how(loss, params, batches, meta.sgd(lr=0.1), **options)
    between = [b.detach().clone() for b in model.buffers()]
    grads = gradients(height(adapted), list(params.values()))
    return between, list(model.buffers()), [*leaves(adapted.params), *grads]


@every_memory
@pytest.mark.parametrize("make", [norm, spectral, lambda: Counter(_inplace)])
def test_buffers_are_as_if_it_had_run_once(device: torch.device, memory: Any, make: Any) -> None:
    model = make()
    start = copy.deepcopy(model)
    between, after, got = with_buffers(model, device, memory=memory)
    expected = with_buffers(start, device)
    assert_close(got, expected[2])
    assert_close(between, expected[0])
    assert_same_bits(after, between)
    assert not torch.equal(between[0], next(make().to(device, D).buffers()))


@pytest.mark.parametrize("memory", ["recompute", 2])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("write", [_augmented, _indexed, _out, _data, _view, None])
def test_other_ways_to_write_are_right_or_refused(
    device: torch.device, memory: Any, write: Any, reads: bool
) -> None:
    if write is None and not reads:
        return  # an attribute that is assigned, and not read: it is assigned again, as documented
    model = Counter(write, reads=reads)
    start = copy.deepcopy(model)
    try:
        between, after, got = with_buffers(model, device, memory=memory)
    except gradkit.UnsupportedGraphError:
        return
    assert_close(got, with_buffers(start, device)[2])
    assert_same_bits(between, [torch.full((1,), STEPS, dtype=D, device=device)])
    assert_same_bits(after, between)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@each_way
@pytest.mark.parametrize("how", ["functional_call", "make_functional", "arguments"])
def test_a_checkpoint_inside_is_right(device: torch.device, memory: Any, how: str) -> None:
    """torch recomputes with the module's own parameters, silently [I6]."""
    model = Checkpointed().double().to(device)
    call, _, buffers = gradkit.func.make_functional(model)
    params = {n: random(device, *t.shape, learned=True) for n, t in model.named_parameters()}
    batches = [random(device, 6, 3) for _ in range(STEPS)]

    def block(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, w, b).tanh(), v, c)

    def loss(params: Any, inside: str, x: Tensor) -> Tensor:
        if inside == "functional_call":
            out = functional_call(model, params, (x,))
        elif inside == "make_functional":
            out = call(params, buffers, x)[0]
        elif inside == "arguments":
            out = checkpoint(block, x, *params.values(), use_reentrant=False)
        else:
            out = block(x, *params.values())
        return out.sin().square().sum()

    expected = gradients(
        height(meta.unroll(loss, params, batches, meta.sgd(lr=0.1), outer="none")), params.values()
    )
    adapted = meta.unroll(loss, params, batches, meta.sgd(lr=0.1), outer=how, memory=memory)
    assert_close(gradients(height(adapted), params.values()), expected)


@recomputing
def test_what_changes_between_the_passes_is_refused(device: torch.device, memory: Any) -> None:
    w = random(device, 3, learned=True)
    shift = [0.0]

    def loss(w: Tensor, _: Any, x: Tensor) -> Tensor:
        return ((w - x - shift[0]) ** 2).sum()

    adapted = meta.unroll(loss, w, [w.detach()] * STEPS, meta.sgd(lr=0.1), memory=memory)
    shift[0] = 1e-3
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="changed since"):
        gradients(height(adapted), w)
    bound = meta.unroll(
        lambda w, _, x, by=shift[0]: ((w - x - by) ** 2).sum(), w, [w.detach()], meta.sgd(lr=0.1)
    )
    shift[0] = 5.0
    assert gradients(height(bound), w)[0].isfinite().all()


@recomputing
@pytest.mark.parametrize("where", ["loss", "graph", "grad_transform"])
def test_captured_tensors_that_require_grad_are_refused(
    device: torch.device, memory: Any, where: str
) -> None:
    w, c = random(device, 3, learned=True), random(device, 3, learned=True)
    captured = c * 2 if where == "graph" else c

    def loss(w: Tensor, c: Any, x: Tensor) -> Tensor:
        return (c * (w - x) ** 4).sum()

    def bad(w: Tensor, _: Any, x: Tensor) -> Tensor:
        return loss(w, 1.0 if where == "grad_transform" else captured, x)

    options = {"grad_transform": lambda g: g * c} if where == "grad_transform" else {}
    with unchanged(w, c), pytest.raises(gradkit.UnsupportedGraphError, match="outer="):
        meta.unroll(bad, w, [w.detach()] * 3, meta.sgd(lr=0.1), memory=memory, **options)
    stored = meta.unroll(bad, w, [w.detach() + 1] * 3, meta.sgd(lr=0.1), **options)
    assert gradients(height(stored), c)[0].any()


def test_a_refusal_comes_before_anything_has_changed(device: torch.device) -> None:
    w, c = random(device, 3, learned=True), random(device, 3, learned=True)
    count = torch.zeros((), dtype=D, device=device)
    before = random_states(device)

    def loss(w: Tensor, _: Any, x: Tensor) -> Tensor:
        count.add_(1)
        return (c * (w - x) ** 4).sum() + torch.rand((), device=device)

    with pytest.raises(gradkit.UnsupportedGraphError, match="outer="):
        meta.unroll(loss, w, [w.detach()] * 3, meta.sgd(lr=0.1), memory="recompute")
    assert count == 0
    assert_same_bits(random_states(device), before)


@each_way
def test_first_order_is_fomaml(device: torch.device, memory: Any) -> None:
    p = Problem(device)
    hidden: list[weakref.ref[Tensor]] = []

    def loss(params: Any, outer: Any, batch: Any) -> Tensor:
        after = p.loss(params, outer, batch) * 1.0
        hidden.extend(weakref.ref(t) for t in (after, params["w"] * 2))
        value = (after**2).sin()
        hidden.append(weakref.ref(value))
        return value

    adapted = meta.unroll(
        loss, p.params, p.batches, p.opt(), outer=p.outer, memory=memory, first_order=True
    )
    assert not any(ref() is not None for ref in hidden)
    assert not adapted.values.requires_grad
    params, state, opt = p.params, p.opt().init(p.params), p.opt()
    for batch in p.batches:
        flat = leaves(params)
        rest = iter(torch.autograd.grad(loss(params, p.outer, batch), flat))
        grads = gradkit.tree.map(lambda _, rest=rest: next(rest), params)
        params, state = opt.step(params, grads, state)
    assert_close(leaves(adapted.params), leaves(params))
    by = p.learned()
    got = gradients(sum(t.sin().sum() for t in leaves(adapted.params)), by)
    assert_close(got, gradients(sum(t.sin().sum() for t in leaves(params)), by))
    assert [t is None for t in got] == [False] * 3 + [True] * 4 + [False] * 4
    full = meta.unroll(loss, p.params, p.batches, p.opt(), outer=p.outer)
    assert any(ref() is not None for ref in hidden)
    assert not torch.equal(gradients(height(full), by)[0], got[0])
    constant = meta.from_torch(type("Subclass", (torch.optim.SGD,), {}), lr=0.1)
    with pytest.raises(gradkit.UnsupportedOptimizerError):
        meta.unroll(p.loss, p.params, p.batches, constant, outer=p.outer)
    start = gradkit.tree.map(Tensor.detach, p.params)
    alone = meta.unroll(
        p.loss, start, p.batches, constant, outer=p.outer, memory=memory, first_order=True
    )
    assert alone.values[-1] < alone.values[0]


@every_memory
def test_clipping_is_differentiated(device: torch.device, memory: Any) -> None:
    p = Problem(device)
    seen: list[float] = []

    def clip(grads: Any) -> Any:
        seen.append(gradkit.tree.global_norm(grads).item())
        return gradkit.tree.clip_by_global_norm(grads, 0.3)[0]

    got = meta.unroll(
        p.loss, p.params, p.batches, p.opt(), outer=p.outer, memory=memory, grad_transform=clip
    )
    expected = plain(p.loss, p.params, p.batches, p.opt(), p.outer, transform=clip)
    assert_close(got.values, expected.values)
    assert_close(gradients(height(got), p.learned()), gradients(height(expected), p.learned()))
    assert max(seen) > 0.5
    with pytest.raises(gradkit.StructureError, match=r"grad_transform\(grads\)"):
        meta.unroll(
            p.loss, p.params, p.batches, p.opt(), outer=p.outer, grad_transform=lambda g: [g]
        )


@each_way
def test_frozen_tied_unreached_and_none(device: torch.device, memory: Any) -> None:
    w, alone = random(device, 3, learned=True), random(device, 2, learned=True)
    frozen = nn.Parameter(random(device, 3), requires_grad=False)
    params = {"a": w, "b": [w, None], "frozen": frozen, "alone": alone, "none": None}

    def loss(p: Any, _: Any, x: Tensor) -> Tensor:
        assert p["a"] is p["b"][0]
        assert p["none"] is None
        return ((p["a"] * p["b"][0] - p["frozen"] * x) ** 2).sum()

    x = random(device, 3)
    opt = meta.adam(lr={"a": 0.1, "b": [0.1, 0.1], "frozen": 9.0, "alone": 9.0, "none": None})
    adapted = meta.unroll(loss, params, [x] * 3, opt, memory=memory)
    assert adapted.params["a"] is adapted.params["b"][0]
    assert adapted.params["frozen"] is frozen
    assert_same_bits([adapted.params["alone"]], [alone])
    assert adapted.params["none"] is adapted.params["b"][1] is None
    assert adapted.state["step"]["a"] == 3
    assert adapted.state["step"]["alone"] == 0
    once = plain(
        lambda p, _, x: ((p[0] ** 2 - frozen * x) ** 2).sum(), [w], [x] * 3, meta.adam(0.1)
    )
    assert_close([adapted.params["a"]], once.params)
    out = adapted.params["a"].sum() + (adapted.params["alone"] ** 2).sum()
    got = gradients(out, [w, alone, frozen] if frozen.requires_grad else [w, alone])
    assert_close(got, [*gradients(once.params[0].sum(), [w]), 2 * alone])
    again = meta.unroll(loss, adapted.params, [x] * 3, opt, state=adapted.state, memory=memory)
    assert again.params["a"] is again.params["b"][0]


@each_way
def test_a_module_is_adapted_by_name(device: torch.device, memory: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device)
    model[0].bias.requires_grad_(False)
    world = World(*model.parameters())
    x = random(device, 5, 3)

    def loss(params: Any, _: Any, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().sum()

    adapted = meta.unroll(loss, model, [x] * 3, meta.sgd(lr=0.05, momentum=0.9), memory=memory)
    world.assert_unchanged()
    assert list(adapted.params) == list(dict(model.named_parameters()))
    trained = [p for p in model.parameters() if p.requires_grad]
    out = functional_call(model, adapted.params, (x,)).square().sum()
    meta_grads = gradients(out, trained)
    assert all(g.any() for g in meta_grads)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for value in adapted.values:
        sgd.zero_grad()
        now = model(x).square().sum()
        torch.testing.assert_close(value, now)
        now.backward()
        sgd.step()
    assert_close(leaves(adapted.params), [p.detach() for p in model.parameters()])


@each_way
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_adapts(device: torch.device, memory: Any, context: Any) -> None:
    p = Problem(device)
    expected = meta.unroll(p.loss, p.params, p.batches, p.opt(), outer=p.outer)
    with context():
        got = meta.unroll(p.loss, p.params, p.batches, p.opt(), outer=p.outer, memory=memory)
    found = [*leaves(got.params), *leaves(got.state), got.values]
    assert not any(t.requires_grad for t in found)
    assert_close(found, [*leaves(expected.params), *leaves(expected.state), expected.values])


@each_way
def test_inside_of_torch_func(device: torch.device, memory: Any) -> None:
    starts, scale = random(device, 3, 2), random(device)
    x = random(device, 4, 2)

    def after(w: Tensor, scale: Tensor) -> Tensor:
        def loss(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
            return scale.exp() * (x @ w).sin().square().sum() + (w**4).sum()

        opt = meta.adam(lr=scale.sigmoid() / 10, eps=0.01)
        return height(meta.unroll(loss, w, [x] * 4, opt, outer=scale, memory=memory))

    by = [starts.requires_grad_(), scale.requires_grad_()]
    values = torch.stack([after(w, by[1]) for w in by[0]])
    expected = gradients(values.sum(), by)
    starts, scale = (t.detach() for t in by)
    assert_close([vmap(after, in_dims=(0, None))(starts, scale)], [values])
    got = vmap(func_grad(after, (0, 1)), in_dims=(0, None))(starts, scale)
    assert_close([got[0], got[1].sum(0)], expected)
    with pytest.raises(gradkit.UnsupportedGraphError, match="derivative inside the vmap"):
        vmap(after, in_dims=(0, None))(*by)  # whose gradient is silently wrong for some [V1]
    along = jvp(after, (starts[0], scale), (starts[1], scale))[1]
    slopes = func_grad(after, (0, 1))(starts[0], scale)
    torch.testing.assert_close(along, slopes[0] @ starts[1] + slopes[1] * scale)


@each_way
@pytest.mark.parametrize("learned", [False, True])
def test_no_grad_does_not_switch_forward_mode_off(
    device: torch.device, memory: Any, learned: bool
) -> None:
    x, w = random(device, 4, 2), random(device, 2, learned=learned)
    along = torch.ones((), dtype=D, device=device)

    def after(rate: Tensor) -> Tensor:
        def loss(w: Tensor, _: Any, x: Tensor) -> Tensor:
            return (x @ w).sin().square().sum()

        for opt in (
            meta.adam(lr=rate.sigmoid() / 10, eps=0.01),
            meta.from_torch(torch.optim.NAdam),
        ):
            adapted = meta.unroll(loss, w * rate, [x] * 4, opt, memory=memory)
            rate = height(adapted)
        return rate

    rate = random(device, learned=True)
    expected = gradients(after(rate), rate)
    with torch.no_grad():
        for jvp_of in (jvp, gradkit.func.jvp):
            got = jvp_of(after, (rate,), (along,))
            assert_close([got[1]], expected)
            assert not any(t.requires_grad for t in got[:2])


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in optree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage() not in self._seen:
                storage = t.untyped_storage()
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
                self.most = max(self.most, self.now)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


@pytest.mark.long
def test_memory_by_step(device: torch.device) -> None:
    w = random(device, 32, 32, learned=True)
    x = random(device, 400, 32)
    of_params, of_activation = 8 * w.numel(), 8 * x.numel()

    def loss(w: Tensor, _: Any, x: Tensor) -> Tensor:
        return (x @ w).tanh().square().mean()

    def most(steps: int, memory: Any, **options: Any) -> int:
        with Live() as live:
            opt = meta.sgd(lr=0.1)
            adapted = meta.unroll(loss, w, [x] * steps, opt, memory=memory, **options)
            if not options:
                gradients(adapted.params.square().sum(), w)
        return live.most

    def by_step(memory: Any, **options: Any) -> float:
        return (most(24, memory, **options) - most(8, memory, **options)) / 16

    assert by_step("store") > 3 * of_activation
    assert 0.9 * of_params < by_step("recompute") < 1.2 * of_params
    assert by_step(8) < 0.4 * of_params
    for memory in ("store", "recompute", 8):
        assert by_step(memory, first_order=True) < 2.5 * of_params
        with torch.no_grad():
            assert by_step(memory, first_order=True) < 0.1 * of_params


def _through_reentrant_checkpoint(w: Tensor, _: Any, x: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no input requires grad
        return checkpoint(lambda x: (w * x).sum(), torch.ones_like(w), use_reentrant=True)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    w = random(device, 3, learned=True)
    opt = meta.sgd(lr=0.1)

    def loss(w: Tensor, _: Any, x: Tensor) -> Tensor:
        return ((w - x) ** 2).sum()

    def refused(error: Any, text: str, fn: Any = loss, batches: Any = (1.0,), **more: Any) -> None:
        given = {"params": w, "opt": opt, **more}
        params, by = given.pop("params"), given.pop("opt")
        with unchanged(w), pytest.raises(error, match=text):
            meta.unroll(fn, params, batches, by, **given)

    structure, option = gradkit.StructureError, gradkit.OptionError
    for fn in (3, None, torch.ones(2)):
        refused(option, r"^loss_fn: expected a function", fn)
    refused(structure, r"^batches: .*at least one", batches=[])
    refused(structure, r"^batches: .*at least one", batches=iter(()))
    for batches in (w.detach(), "data", 3, {"x": [1.0]}):
        refused(structure, r"^batches: ", batches=batches)
    buffer = w.detach().clone()
    rewritten = ({"x": buffer.fill_(i)} for i in range(2))
    refused(structure, r"^batches: .*stays as it is", batches=rewritten)
    for memory in ("keep", 0, -1, True, 1.5, None, [2]):
        refused(option, r"^memory: expected 'store', 'recompute'", memory=memory)
    for flag in ("first_order", "has_aux"):
        refused(option, rf"^{flag}: expected False or True", **{flag: 1})
    for state in ({}, None or [], {"step": w}, meta.adam().init(w)):
        refused(structure, r"^state", state=state)
    refused(structure, r"^state\['momentum_buffer'\]", state=opt.init([w, w]), params=[w])
    refused(structure, r"loss_fn: .*has_aux=True", has_aux=True)
    refused(structure, r"^lr: ", opt=meta.sgd(lr={"a": 0.1}))
    never = lambda *_: pytest.fail("the loss has run")  # noqa: E731
    refused(structure, r"^lr of params", never, opt=meta.sgd(lr=torch.ones(7)))
    refused(option, r"^betas: ", never, opt=meta.adam(betas=0.9))
    refused(gradkit.LeafTypeError, r"^eps of params", never, opt=meta.adam(eps=None))
    unreached = gradkit.UnreachedParamError
    for params in (None, {}, [None], nn.Parameter(w.detach(), requires_grad=False)):
        refused(unreached, r"differentiate", params=params)
    refused(gradkit.LeafTypeError, r"^params\['w'\]", params={"w": "w"})
    refused(gradkit.LeafTypeError, r"^params", params=torch.ones(2, dtype=torch.int64))
    for options in ({}, {"memory": "recompute"}, {"memory": 2}, {"first_order": True}):
        refused(gradkit.NotScalarLossError, r"loss", lambda w, _, x: (w - x) ** 2, **options)
        refused(gradkit.LeafTypeError, r"loss", lambda w, _, x: 1.0, **options)
        refused(unreached, "does not depend", lambda w, _, x: w.new_ones(()), **options)
        refused(unreached, "does not depend", lambda w, _, x: (w.detach() ** 2).sum(), **options)
        other = torch.ones(3, dtype=D, device=device, requires_grad=True)
        refused(unreached, "does not depend", lambda w, _, x, o=other: (o**2).sum(), **options)
        refused(unreached, "use_reentrant=True", _through_reentrant_checkpoint, **options)
    one = meta.unroll(lambda w, _, x: loss(w, _, x).reshape(1, 1), w, [1.0], opt)
    assert one.values.shape == (1,)


@pytest.mark.parametrize("memory", ["store", "recompute", 2])
def test_an_iterator_may_fill_one_container_again(device: torch.device, memory: Any) -> None:
    w = random(device, 3, learned=True)
    data = [random(device, 3) for _ in range(3)]

    def batches(batch: Any, inner: Any) -> Any:
        for inner["x"] in data:
            yield batch

    def loss(w: Tensor, _: Any, batch: Any) -> Tensor:
        return (w - (batch["x"] if isinstance(batch, dict) else batch[0]["x"])).square().sum()

    expected = meta.unroll(loss, w, [{"x": x} for x in data], meta.sgd(lr=0.1))
    inner: dict[str, Any] = {}
    for batch in (inner, [inner, 1]):
        adapted = meta.unroll(loss, w, batches(batch, inner), meta.sgd(lr=0.1), memory=memory)
        assert_same_bits([adapted.params], [expected.params])


def test_dual_tensors_of_forward_ad_raise_before_anything_runs(device: torch.device) -> None:
    w = torch.ones(2, device=device)
    runs: list[Tensor] = []

    def loss(params: Tensor, outer: Any, batch: Any) -> Tensor:
        runs.append(params)
        return (params * params).sum()

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.func\.jvp"):
            meta.unroll(loss, dual, [0], meta.sgd(0.1))
    assert not runs


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
def test_one_batch_in_place_of_those_of_all_steps(
    device: torch.device, kind: Any, integers: bool, buffers: bool
) -> None:
    def fit(w: Tensor, outer: Any, batch: Any) -> Tensor:
        x, y = batch
        return ((x @ w - y) ** 2).mean()

    def with_buffers(w: Tensor, before: Tensor, outer: Any, batch: Any) -> Any:
        return fit(w, outer, batch), before + 1

    x, y = torch.randn(4, 3, device=device), torch.arange(4, device=device)
    batch = kind((x, y if integers else y.float()))
    w = torch.ones(3, device=device, requires_grad=True)
    options = {"buffers": torch.zeros((), device=device)} if buffers else {}
    run = with_buffers if buffers else fit
    match = r"(?s)^batches: expected a list with the data of each step, got .*\[\(x, y\)\] \* steps"
    with unchanged(w, x, y), pytest.raises(gradkit.StructureError, match=match):
        meta.unroll(run, w, batch, meta.sgd(0.1), **options)
    adapted = meta.unroll(run, w, [tuple(batch)] * 1, meta.sgd(0.1), **options).params
    (grad,) = torch.autograd.grad(fit(w, (), tuple(batch)), w)
    torch.testing.assert_close(adapted, w - 0.1 * grad)


def test_batches_that_differ_in_size_only_are_two(device: torch.device) -> None:
    w = torch.ones(3, device=device)
    batches = torch.randn(4, 3, device=device), torch.randn(2, 3, device=device)
    adapted = meta.unroll(lambda w, _, x: ((x @ w) ** 2).mean(), w, batches, meta.sgd(0.1))
    assert len(adapted.values) == 2


def test_an_error_of_the_inner_loss_itself_stays(device: torch.device) -> None:
    def broken(w: Tensor, outer: Any, batch: Any) -> Tensor:
        raise ValueError("mine")

    w = torch.ones(3, device=device)
    for batches in ([w, w], (w, w)):
        with pytest.raises(ValueError, match=r"^mine$"):
            meta.unroll(broken, w, batches, meta.sgd(0.1))
