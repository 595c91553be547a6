"""Muon, Lion, Adafactor and schedule-free AdamW: as in their papers, differentiable, vmapped."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import vmap

import gradkit
from gradkit import func, meta
from tests.helpers import World, assert_same_bits, unchanged
from tests.meta.test_optimizers import assert_close, height, initial, leaves, like, ours, slopes

D = torch.float64
NEWER: dict[str, Callable[..., meta.Optimizer]] = {
    "muon": lambda **hyper: meta.muon(**{"dtype": None, **hyper}),
    "lion": meta.lion,
    "adafactor": meta.adafactor,
    "schedule_free_adamw": meta.schedule_free_adamw,
}
every = pytest.mark.parametrize("name", NEWER)


def start_of(name: str, device: torch.device) -> Any:
    """A tree of params that an optimizer takes."""
    if name != "muon":
        return initial(device)
    shapes = {"w": (3, 2), "v": (2, 4)}
    return {key: torch.randn(*shape, dtype=D, device=device) for key, shape in shapes.items()}


def lion_by_hand(x: Tensor, grads: Any, lr: float, betas: Any, decay: float) -> Tensor:
    """Algorithm 2 of Chen et al. 2023."""
    m = torch.zeros_like(x)
    for g in grads:
        c = betas[0] * m + (1 - betas[0]) * g(x)
        m = betas[1] * m + (1 - betas[1]) * g(x)
        x = x - lr * (c.sign() + decay * x)
    return x


def schedule_free_by_hand(
    x: Tensor, grads: Any, rates: list[float], betas: Any, eps: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of Defazio et al. 2024; returns x, and y of the step that would come next."""
    z, v, total = x.clone(), torch.zeros_like(x), 0.0
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), 1):
        y = (1 - betas[0]) * z + betas[0] * x
        slope = g(y)
        v = betas[1] * v + (1 - betas[1]) * slope**2
        rate = lr * (1 - betas[1] ** t) ** 0.5
        z = z - rate * (slope / (v.sqrt() + eps)) - rate * decay * y
        total += rate**2
        c = rate**2 / total
        x = (1 - c) * x + c * z
    return x, (1 - betas[0]) * z + betas[0] * x


def slope_at(step: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x - 1 - 0.1 * step + 0.2 * x**3


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(), (3, 2), (0,)])
def test_lion_is_its_algorithm(device: torch.device, shape: Any, decay: float) -> None:
    start = torch.randn(shape, dtype=D, device=device)
    opt = meta.lion(lr=0.05, betas=(0.8, 0.95), weight_decay=decay)
    x, state = start, opt.init(start)
    for t in range(6):
        x, state = opt.step(x, slope_at(t)(x), state)
    expected = lion_by_hand(start, map(slope_at, range(6)), 0.05, (0.8, 0.95), decay)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(), (3, 2), (0,)])
def test_schedule_free_adamw_is_its_algorithm(
    device: torch.device, shape: Any, beta: float, decay: float
) -> None:
    """With a warmup, of which the first step has the rate zero."""
    start = torch.randn(shape, dtype=D, device=device)
    opt = meta.schedule_free_adamw(betas=(beta, 0.97), weight_decay=decay)
    rates = [0.1 * min(1, t / 4) for t in range(1, 9)]
    y, state = start, opt.init(start)
    for t, lr in enumerate(rates):
        y, state = opt.step(y, slope_at(t)(y), state, lr=lr)
    args: Any = map(slope_at, range(8)), rates, (beta, 0.97), 1e-8, decay
    expected = schedule_free_by_hand(start, *args)
    torch.testing.assert_close((state["average"], y), expected, rtol=1e-12, atol=1e-12)
    still, state = opt.step(start, slope_at(0)(start), opt.init(start), lr=0.0)
    torch.testing.assert_close((still, state["average"]), (start, start))


def test_the_average_is_better_than_where_gradients_are_taken(device: torch.device) -> None:
    """A noisy quadratic: without a schedule, the average comes near to the minimum."""
    torch.manual_seed(0)
    opt = meta.schedule_free_adamw(lr=0.05)
    y = torch.full((200,), 2.0, dtype=D, device=device)
    state = opt.init(y)
    for _ in range(400):
        y, state = opt.step(y, y + torch.randn_like(y), state)
    assert state["average"].norm() < 0.5 * state["z"].norm()


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_muon_without_a_clamp(device: torch.device, shape: tuple[int, int]) -> None:
    """`spectral_unclamped` of torch 2.15: the rate times sqrt(rows / columns), also below one."""
    start, slope = torch.randn(2, *shape, dtype=D, device=device)

    def moved(kind: str | None) -> torch.Tensor:
        opt = meta.muon(lr=0.1, weight_decay=0.0, dtype=None, adjust_lr_fn=kind)
        return opt.step(start, slope, opt.init(start))[0] - start

    rows, columns = shape
    expected = moved("original") * min(1, rows / columns) ** 0.5
    torch.testing.assert_close(moved("spectral_unclamped"), expected)
    if torch.__version__ >= "2.15":
        p, options = torch.nn.Parameter(start.clone()), {"adjust_lr_fn": "spectral_unclamped"}
        p.grad = slope.clone()
        torch.optim.Muon([p], lr=0.1, **options).step()
        opt = meta.from_torch(torch.optim.Muon, lr=0.1, **options)
        torch.testing.assert_close(opt.step(start, slope, opt.init(start))[0], p.detach())


def test_muon_makes_the_singular_values_alike(device: torch.device) -> None:
    for shape in ((6, 4), (4, 6), (5, 5)):
        w = torch.zeros(shape, dtype=D, device=device)
        opt = meta.muon(lr=1.0, weight_decay=0.0, dtype=None, adjust_lr_fn=None)
        u, s, v = torch.linalg.svd(torch.randn_like(w), full_matrices=False)
        step, _ = opt.step(w, (u * s.clamp(min=0.3)) @ v, opt.init(w))
        values = torch.linalg.svdvals(step) / max(1, shape[0] / shape[1]) ** 0.5
        assert values.min() > 0.5
        assert values.max() < 1.3
        low, _ = meta.muon(lr=1.0, weight_decay=0.0).step(
            w, (u * s.clamp(min=0.3)) @ v, opt.init(w)
        )
        torch.testing.assert_close(low, step, rtol=0.05, atol=0.05)


LEARNED: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.7},
    "lion": {"lr": 0.1, "weight_decay": 0.2},
    "adafactor": {"lr": 0.1, "weight_decay": 0.2, "beta2_decay": -0.6, "d": 1.0001},
    "schedule_free_adamw": {"lr": 0.1, "weight_decay": 0.2, "eps": 0.05, "betas": (0.6, 0.9)},
}


@pytest.mark.parametrize("form", ["one scalar", "a scalar for each leaf"])
@every
def test_meta_gradients_by_hyper_parameters_and_params(
    device: torch.device, name: str, form: str
) -> None:
    params = start_of(name, device)

    def learnable(value: float) -> Any:
        if form == "one scalar":
            return torch.tensor(value, dtype=D, device=device)
        return gradkit.tree.map(lambda leaf: leaf.new_full((), value), params)

    tree = {
        key: tuple(map(learnable, value)) if isinstance(value, tuple) else learnable(value)
        for key, value in LEARNED[name].items()
    }
    flat = [x.requires_grad_() for x in leaves(tree)]

    def after(*given: Tensor) -> Tensor:
        hyper, rest = iter(given[: len(flat)]), list(given[len(flat) :])
        options = gradkit.tree.map(lambda _: next(hyper), tree)
        at = like(params, rest)
        got, state = ours(NEWER[name](**options), at, 3)
        return height(leaves(got)) + height(leaves(state.get("average", ())))

    inputs = [*flat, *(x.detach().requires_grad_() for x in leaves(params))]
    assert gradcheck(after, inputs, eps=1e-6, atol=1e-6, rtol=1e-6)
    grads = torch.autograd.grad(after(*inputs), inputs)
    # The update of a single number is never clipped, whatever d.
    assert all(g.any() for g in grads[: len(flat)]) or "d" in tree


@every
def test_a_dead_unit_leaves_meta_gradients_finite(device: torch.device, name: str) -> None:
    scale = torch.tensor(1.0, dtype=D, device=device, requires_grad=True)
    w = torch.randn(3, 2, dtype=D, device=device, requires_grad=True)
    dead = torch.zeros_like(w)
    opt = NEWER[name](lr=0.1)
    for grad in (dead, torch.cat([torch.ones_like(w)[:1], dead[1:]]), dead * w):
        params, state = [w, w], opt.init([w, w])
        for _ in range(3):
            params, state = opt.step(params, [scale * grad, scale * slopes([w])[0]], state)
        grads = torch.autograd.grad(height(params), (scale, w))
        assert all(g.isfinite().all() for g in grads)


@every
def test_a_step_is_pure_and_skips_leaves_without_a_gradient(
    device: torch.device, name: str
) -> None:
    opt, params = NEWER[name](lr=0.1), start_of(name, device)
    params, state = ours(opt, params, 2)
    grads = like(params, slopes(leaves(params)))
    grads["w"] = None
    world = World(*leaves(params), *leaves(grads), *leaves(state))
    first, first_state = opt.step(params, grads, state)
    again, again_state = opt.step(params, grads, state)
    world.assert_unchanged()
    assert_same_bits(leaves((first, first_state)), leaves((again, again_state)))
    assert first["w"] is params["w"]
    for entry, before in zip(first_state.values(), state.values(), strict=True):
        assert entry["w"] is before["w"]
    old = {t.data_ptr() for t in leaves((params, grads, state)) if t is not params["w"]}
    others = {key: value for key, value in first.items() if key != "w"}
    assert not any(t.data_ptr() in old for t in leaves(others))


@pytest.mark.parametrize("memory", ["recompute", 2])
@every
def test_unrolled_with_less_memory(device: torch.device, name: str, memory: Any) -> None:
    rate = torch.tensor(0.05, dtype=D, device=device, requires_grad=True)
    params = gradkit.tree.map(Tensor.requires_grad_, start_of(name, device))

    def loss(params: Any, _: Any, batch: Tensor) -> Tensor:
        return reduce(operator.add, (((x - batch) ** 2).sum() for x in leaves(params)))

    batches = list(torch.randn(4, dtype=D, device=device))
    results = []
    for how in ("store", memory):
        adapted = meta.unroll(loss, params, batches, NEWER[name](lr=rate), memory=how)
        total = height(leaves(adapted.params))
        results.append([total, *torch.autograd.grad(total, (rate, *leaves(params)))])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


MEMBERS: dict[str, tuple[Callable[..., meta.Optimizer], dict[str, Any]]] = {
    "sgd": (meta.sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}),
    "adam": (meta.adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 0.1}),
    "adamw": (meta.adamw, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    "rmsprop": (meta.rmsprop, {"lr": 0.1, "alpha": 0.8, "momentum": 0.5}),
    "muon": (NEWER["muon"], {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.7, "eps": 0.1}),
    **{name: (NEWER[name], LEARNED[name]) for name in NEWER if name != "muon"},
}


@pytest.mark.parametrize("how", ["hyper", "lr of a step"])
@pytest.mark.parametrize("name", MEMBERS)
def test_each_member_of_an_ensemble_has_its_own_hyper_parameters(
    device: torch.device, name: str, how: str
) -> None:
    """Under vmap, with gradients of gradkit.func inside: what a loop over the members gives."""
    make, values = MEMBERS[name]
    if how == "lr of a step":
        values = {"lr": values["lr"]}
    factors = torch.tensor([0.5, 1.0, 1.3], dtype=D, device=device)
    flat, spec = torch.utils._pytree.tree_flatten(values)
    hyper = torch.utils._pytree.tree_unflatten([factors * value for value in flat], spec)
    if "d" in hyper:
        hyper["d"] = 1 + factors
    if "betas" in hyper:
        hyper["betas"] = tuple(1 - (1 - beta) * factors for beta in values["betas"])
    if "alpha" in hyper:
        hyper["alpha"] = 1 - (1 - values["alpha"]) * factors
    rows = torch.randn(3, 4, 2, dtype=D, device=device)
    x, y = torch.randn(5, 2, dtype=D, device=device), torch.randn(5, 4, dtype=D, device=device)

    def loss(params: Any) -> Tensor:
        return (x @ params["w"].T - y).square().sum() + params["w"].sin().sum()

    def train(w: Tensor, hyper: Any) -> Any:
        opt = make() if how == "lr of a step" else make(**hyper)
        params = {"w": w}
        state = opt.init(params)
        for _ in range(4):
            _, grads = func.value_and_grads(loss, create_graph=False)(params)
            options = hyper if how == "lr of a step" else {}
            params, state = opt.step(params, grads, state, **options)
        return params["w"], state.get("average", params)["w"]

    got = vmap(train)(rows, hyper)
    loop = [
        train(row, torch.utils._pytree.tree_map(lambda value, i=i: value[i], hyper))
        for i, row in enumerate(rows)
    ]
    assert_close(list(got), [torch.stack(part) for part in zip(*loop, strict=True)])


def test_members_of_muon_in_bfloat16_differ_by_its_rounding(device: torch.device) -> None:
    """A batched product of matrices in bfloat16 is another kernel."""
    w, grads = torch.randn(2, 3, 4, 2, device=device)
    opt = meta.muon(lr=1.0)
    step = lambda w, g: opt.step(w, g, opt.init(w))[0]  # noqa: E731
    loop = torch.stack(list(map(step, w, grads)))
    torch.testing.assert_close(vmap(step)(w, grads), loop, rtol=0.05, atol=0.05)


def test_what_they_refuse(device: torch.device) -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (meta.muon, {"ns_steps": 100}, "ns_coefficients, ns_steps: expected three numbers"),
        (meta.muon, {"ns_steps": 2.0}, "ns_coefficients, ns_steps: "),
        (meta.muon, {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients, ns_steps: "),
        (meta.muon, {"adjust_lr_fn": "rms"}, "adjust_lr_fn: expected None or 'original'"),
        (meta.muon, {"dtype": torch.int32}, "dtype: expected None or "),
        (meta.muon, {"nesterov": 1}, "nesterov: "),
        (meta.muon, {"momentum": -0.1}, "momentum: expected numbers of at least 0"),
        (meta.lion, {"betas": (0.9, 1.0)}, "betas: expected numbers of at least 0, below 1"),
        (meta.lion, {"lr": -1.0}, "lr: expected numbers of at least 0"),
        (meta.lion, {"eps": 1.0}, "lion has no hyperparameter 'eps'"),
        (meta.adafactor, {"eps": 1e-3}, "eps: expected a pair"),
        (meta.adafactor, {"eps": (-1.0, 0.1)}, "eps: expected a pair"),
        (meta.adafactor, {"eps": (None, None)}, "eps: expected a pair"),
        (meta.adafactor, {"beta2_decay": 0.1}, "beta2_decay: expected numbers of at most 0"),
        (meta.adafactor, {"d": 0.5}, "d: expected numbers of at least 1"),
        (meta.schedule_free_adamw, {"weight_decay": -0.1}, "weight_decay: expected numbers of"),
    ]
    for make, options, text in wrong:
        with pytest.raises(gradkit.OptionError, match=rf"^{text}"):
            make(**options)
    p = torch.ones(2, 2, dtype=torch.complex64, device=device)
    for name, newer in NEWER.items():
        with pytest.raises(gradkit.LeafTypeError, match=rf"real tensors, because {name}"):
            newer().step(p, p, newer().init(p))
    w = torch.ones(3, 2, device=device)
    adafactor, muon = meta.adafactor(), meta.muon()
    state = adafactor.init(w)
    with pytest.raises(gradkit.StructureError, match=r"^state\['row_var'\]: "):
        adafactor.step(w, w, {**state, "row_var": w[:2, :1]})
    for name in ("beta2_decay", "d"):
        options = {name: torch.ones_like(w)}
        with (
            unchanged(w),
            pytest.raises(gradkit.StructureError, match=r"^beta2_decay, d: expected"),
        ):
            adafactor.step(w, w, state, **options)
    for shape in ((3,), (), (2, 2, 2)):
        bad = {"a": [w, torch.ones(shape, device=device)]}
        with (
            unchanged(*leaves(bad)),
            pytest.raises(gradkit.StructureError, match=r"^params\['a'\]\[1\].*\n.*None in place"),
        ):
            muon.step(bad, bad, muon.init(bad))
        with pytest.raises(gradkit.StructureError, match=r"^params\['a'\]\[1\]"):
            meta.unroll(lambda p, o, b: height(leaves(p)), bad, [()], muon)


def test_torch_writes_on_the_buffer_of_muon_in_bfloat16(device: torch.device) -> None:
    """Without Nesterov momentum, torch divides the buffer itself: this fails when it mends that."""
    p = torch.randn(4, 4, device=device).bfloat16()
    grad = torch.full_like(p, 2.0)
    theirs = p.clone().requires_grad_()
    reference = torch.optim.Muon([theirs], nesterov=False)
    theirs.grad = grad.clone()
    reference.step()
    opt = meta.muon(nesterov=False)
    _, state = opt.step(p, grad, opt.init(p))
    torch.testing.assert_close(state["momentum_buffer"], grad * 0.05, rtol=0.01, atol=0.01)
    assert not torch.equal(reference.state[theirs]["momentum_buffer"], state["momentum_buffer"])


@pytest.mark.parametrize("name", NEWER)
def test_the_names_of_a_state_and_other_dtypes(device: torch.device, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.randn(4, 3, device=device).to(dtype)
        opt = NEWER[name](lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            after, state = opt.step(w, w.float(), opt.init(w))
        assert after.dtype == dtype
        assert set(state) == set(opt.entries)
        assert after.isfinite().all()
