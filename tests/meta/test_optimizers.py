"""Optimizers as pure functions: against torch.optim, and meta-gradients against differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck
from torch.func import functional_call, jvp, vmap
from torch.func import grad as func_grad

import gradkit
from gradkit import meta
from tests.helpers import World, assert_same_bits, same_bits, unchanged

D = torch.float64
optim: Any = torch.optim
Steps = Callable[[Any, int], Any]


def initial(device: torch.device, dtype: torch.dtype = D) -> dict[str, Any]:
    w = torch.randn(3, 2, dtype=dtype, device=device)
    return {"w": w, "more": [torch.randn(2, dtype=dtype, device=device), w.sum()], "none": None}


def leaves(tree: Any) -> list[Tensor]:
    flat = optree.tree_leaves(tree, namespace="gradkit")  # which keeps the order of dictionaries
    return [leaf for leaf in flat if isinstance(leaf, Tensor)]


def like(tree: Any, tensors: Any) -> Any:
    rest = iter(tensors)
    return gradkit.tree.map(lambda _: next(rest), tree)


def slopes(tensors: list[Tensor], step: int = 0) -> list[Tensor]:
    """The gradient of a loss with no symmetry, written out."""
    shared = sum(t.abs().sum() if t.is_complex() else t.sum() for t in tensors)
    return [(t - i - 0.1 * step) + 0.2 * t**3 + torch.cos(shared) for i, t in enumerate(tensors, 1)]


def height(tensors: list[Tensor]) -> Any:
    return sum(((i + 1.3) * t).sin().sum() + (t**2).sum() for i, t in enumerate(tensors))


def ours(opt: meta.Optimizer, params: Any, steps: int = 5, **hyper: Any) -> tuple[Any, Any]:
    state = opt.init(params)
    for t in range(steps):
        params, state = opt.step(params, like(params, slopes(leaves(params), t)), state, **hyper)
    return params, state


@contextmanager
def exact_counts(cls: Any) -> Iterator[None]:
    """torch keeps NAdam's product of momenta in the default dtype: float32 costs nine digits."""
    if cls is optim.NAdam:
        torch.set_default_dtype(D)
    yield
    torch.set_default_dtype(torch.float32)


# On a device, torch's default is to step all tensors at once, some of its numbers in float32.
SINGLE: dict[str, Any] = {"foreach": False}


def torchs(cls: Any, params: Any, hyper: dict[str, Any], steps: int = 5) -> list[Tensor]:
    tensors = [p.detach().clone().requires_grad_() for p in leaves(params)]
    opt = cls(
        tensors, **hyper, **(SINGLE if "foreach" in inspect.signature(cls).parameters else {})
    )
    for t in range(steps):
        for p, grad in zip(tensors, slopes([p.detach() for p in tensors], t), strict=True):
            p.grad = grad
        with exact_counts(cls):
            opt.step()
    return [p.detach() for p in tensors]


def assert_close(ours: Any, theirs: Any, tol: float = 1e-12) -> None:
    torch.testing.assert_close(leaves(ours), leaves(theirs), rtol=tol, atol=tol)


COMMON = [
    {},
    {"lr": 0.05, "weight_decay": 0.1},
    {"lr": 0.05, "maximize": True, "weight_decay": 0.1},
]
ADAM: list[dict[str, Any]] = [
    *COMMON,
    {"lr": 0.1, "amsgrad": True},
    {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3},
]
CASES: dict[Any, list[dict[str, Any]]] = {
    optim.SGD: [
        *COMMON,
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "maximize": True, "dampening": -0.5},
    ],
    optim.Adam: [
        *ADAM,
        {"lr": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
    optim.AdamW: [*ADAM, {"lr": 0.1, "weight_decay": 0.0, "amsgrad": True, "maximize": True}],
    optim.RMSprop: [
        *COMMON,
        {"lr": 0.1, "alpha": 0.7, "eps": 1e-3},
        {"lr": 0.1, "centered": True},
        {"lr": 0.1, "momentum": 0.8, "centered": True, "weight_decay": 0.1},
    ],
    optim.Adafactor: [
        *COMMON,
        {"lr": 0.5, "beta2_decay": -0.4, "d": 1.5, "eps": (1e-3, 0.1), "weight_decay": 0.1},
    ],
    optim.NAdam: [
        *COMMON,
        {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "momentum_decay": 0.1},
        {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
    optim.RAdam: [
        *COMMON,
        {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3},
        {"lr": 0.1, "betas": (0.5, 0.99), "decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
    optim.Adamax: [*COMMON, {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3}],
    optim.Adagrad: [
        *COMMON,
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.3, "eps": 1e-3},
    ],
    optim.Adadelta: [*COMMON, {"lr": 0.5, "rho": 0.6, "eps": 1e-3}],
    optim.ASGD: [*COMMON, {"lr": 0.1, "lambd": 0.1, "alpha": 0.5, "t0": 1.0}],
    optim.Rprop: [{}, {"lr": 0.1, "etas": (0.4, 1.3), "step_sizes": (1e-3, 0.12)}],
}
EPS = {optim.Adadelta: {"eps": 0.01}}  # so that differences see no kink
WRITTEN = {optim.SGD: "sgd", optim.Adam: "adam", optim.AdamW: "adamw", optim.RMSprop: "rmsprop"}
WRITTEN |= {optim.Adafactor: "adafactor"}
WRAPPED = [cls for cls in CASES if cls not in WRITTEN]


def name_of_case(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value) or "default"


every_case = pytest.mark.parametrize(
    ("cls", "hyper"),
    [(cls, hyper) for cls, hypers in CASES.items() for hyper in hypers],
    ids=name_of_case,
)
every_class = pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)


@pytest.mark.parametrize("graph", [False, True])
@every_case
def test_values_are_those_of_torch(
    device: torch.device, cls: Any, hyper: dict[str, Any], graph: bool
) -> None:
    params = initial(device)
    expected = torchs(cls, params, hyper)
    opt = meta.from_torch(cls, **hyper)
    for leaf in leaves(params):
        leaf.requires_grad_(graph)
    got, state = ours(opt, params)
    assert_close(got, expected)
    assert got["none"] is None
    assert all(leaf.requires_grad == graph for leaf in leaves(got))
    assert not any(t.requires_grad for t in leaves(state)) or graph


def test_a_written_one_is_what_from_torch_gives(device: torch.device) -> None:
    params = initial(device)
    for cls, name in WRITTEN.items():
        direct = getattr(meta, name)(lr=0.1, weight_decay=0.1)
        wrapped = meta.from_torch(
            cls, lr=0.1, weight_decay=0.1, foreach=True, fused=False, differentiable=True
        )
        assert_same_bits(leaves(ours(direct, params)[0]), leaves(ours(wrapped, params)[0]))
        assert wrapped.name == name


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"lr": 0.1, "nesterov": False, "momentum": 0.5},
        {"lr": 0.1, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.1, "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-3},
    ],
)
def test_muon_is_that_of_torch(device: torch.device, hyper: dict[str, Any]) -> None:
    params = [torch.randn(*shape, dtype=D, device=device) for shape in ((3, 2), (2, 5), (4, 4))]
    opt = meta.from_torch(optim.Muon, **hyper)
    assert_same_bits(ours(opt, params)[0], torchs(optim.Muon, params, hyper))
    rates = [0.1, 0.2, 0.3]
    alone = [
        torchs(optim.Muon, [p], {**hyper, "lr": r}, 1) for p, r in zip(params, rates, strict=True)
    ]
    by_leaf = meta.from_torch(optim.Muon, **{**hyper, "lr": rates})
    got = [by_leaf.step(params, [slopes([p])[0] for p in params], by_leaf.init(params))[0]]
    assert_close(got, alone)
    adapted = meta.unroll(
        lambda params, _, x: sum((p**4).sum() for p in params),
        params,
        [()] * 3,
        meta.from_torch(optim.Muon, lr=0.01),
        first_order=True,
    )
    assert adapted.values[-1] < adapted.values[0]
    mixed: Any = {"w": params[0], "b": params[0][0]}
    text = r"^params\['b'\]: expected a 2-dimensional tensor for muon"
    with unchanged(*leaves(mixed)), pytest.raises(gradkit.StructureError, match=text):
        opt.step(mixed, mixed, opt.init(mixed))
    after, _ = opt.step(mixed, {**mixed, "b": None}, opt.init(mixed))
    assert after["b"] is mixed["b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 2), ()])
@every_class
def test_other_dtypes(
    device: torch.device, cls: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    params = [torch.randn(shape, dtype=dtype, device=device)]
    if dtype.is_complex and cls in WRITTEN and cls is not optim.SGD:
        with pytest.raises(gradkit.LeafTypeError, match=rf"{WRITTEN[cls]}.*complex"):
            ours(meta.from_torch(cls), params)
        return
    expected = torchs(cls, params, {"lr": 0.05})
    for graph in (False, True):
        given = [p.detach().clone().requires_grad_(graph) for p in params]
        got, _ = ours(meta.from_torch(cls, lr=0.05), given)
        assert got[0].dtype == dtype
        assert_close(got, expected, tol=1e-6 if dtype == torch.float32 else 1e-12)


def test_nadam_as_torch_runs_it_by_default(device: torch.device) -> None:
    p = torch.randn(3, dtype=D, device=device)
    theirs = p.clone().requires_grad_()
    reference = optim.NAdam([theirs], **SINGLE)
    for t in range(5):
        theirs.grad = slopes([theirs.detach()], t)[0]
        reference.step()
    assert_close(ours(meta.from_torch(optim.NAdam), [p])[0], [theirs.detach()], tol=1e-10)


@pytest.mark.parametrize("graph", [False, True])
@every_class
def test_a_leaf_without_a_gradient_is_skipped_as_in_torch(
    device: torch.device, cls: Any, graph: bool
) -> None:
    start = [torch.randn(2, dtype=D, device=device) for _ in range(3)]
    hyper = {"lr": 0.1, **({} if cls is optim.Rprop else {"weight_decay": 0.1})}
    if cls is optim.SGD:
        hyper["momentum"] = 0.9
    theirs = [p.clone().requires_grad_() for p in start]
    reference = cls(theirs, **hyper, **SINGLE)
    opt = meta.from_torch(cls, **hyper)
    params: Any = [p.clone().requires_grad_(graph) for p in start]
    state = opt.init(params)
    # The second leaf starts two steps late, and pauses; the third never has a gradient.
    for t in range(6):
        seen = [True, t in {2, 3, 5}, False]
        grads = [g if s else None for g, s in zip(slopes(params, t), seen, strict=True)]
        before = params
        params, state = opt.step(params, grads, state)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = None if grad is None else grad.detach()
        with exact_counts(cls):
            reference.step()
        assert all((p is b) == (not s) for p, b, s in zip(params, before, seen, strict=True))
        assert_close(params, theirs)


@every_class
def test_no_gradient_at_all_changes_nothing(device: torch.device, cls: Any) -> None:
    params = initial(device)
    opt = meta.from_torch(cls)
    state = opt.init(params)
    after, same = opt.step(params, like(params, [None] * 3), state)
    assert all(a is b for a, b in zip(leaves(after), leaves(params), strict=True))
    assert optree.tree_structure(same) == optree.tree_structure(state)


def test_a_module_stands_for_its_parameters(device: torch.device) -> None:
    model = nn.Linear(2, 2).double().to(device)
    opt = meta.adam(lr=0.1)
    x = torch.randn(3, 2, dtype=D, device=device)
    named = dict(model.named_parameters())
    grads = dict(zip(named, torch.autograd.grad(model(x).sum(), named.values()), strict=True))
    world = World(*named.values())
    params, _ = opt.step(model, grads, opt.init(model))
    world.assert_unchanged()
    out = functional_call(model, params, (x,))
    reference = optim.Adam(model.parameters(), lr=0.1)
    model(x).sum().backward()
    reference.step()
    torch.testing.assert_close(out, model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("graph", [False, True])
@every_class
def test_a_step_is_pure(device: torch.device, cls: Any, graph: bool) -> None:
    opt = meta.from_torch(cls, lr=0.1, **({} if cls is optim.Rprop else {"weight_decay": 0.1}))
    params = gradkit.tree.map(lambda t: t.requires_grad_(graph), initial(device))
    params, state = ours(opt, params, steps=2)
    grads = like(params, slopes(leaves(params)))
    world = World(*leaves(params), *leaves(grads), *leaves(state))
    first, first_state = opt.step(params, grads, state)
    again, again_state = opt.step(params, grads, state)
    world.assert_unchanged()
    assert_same_bits(leaves(first), leaves(again))
    assert_same_bits(leaves(first_state), leaves(again_state))
    old = {t.data_ptr() for t in leaves((params, grads, state))}
    assert not any(t.data_ptr() in old for t in leaves((first, first_state)))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_a_learned_weight_decay_leaves_the_gradient_alone(device: torch.device, name: str) -> None:
    """torch writes on it [T7]."""
    decay = torch.tensor(0.1, dtype=D, device=device, requires_grad=True)
    params = initial(device)
    grads = like(params, slopes(leaves(params)))
    world = World(*leaves(grads))
    opt = getattr(meta, name)(lr=0.1, weight_decay=decay)
    after, _ = opt.step(params, grads, opt.init(params))
    world.assert_unchanged()
    assert all(t.requires_grad for t in leaves(after))


LEARNED: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1, "momentum": 0.7, "dampening": 0.2, "weight_decay": 0.1}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.1, "nesterov": True}),
    "adam": ("adam", {"lr": 0.1, "betas": (0.6, 0.9), "eps": 0.05, "weight_decay": 0.1}),
    "amsgrad": ("adam", {"lr": 0.1, "betas": (0.6, 0.9), "eps": 0.05, "amsgrad": True}),
    "adamw": ("adamw", {"lr": 0.1, "betas": (0.6, 0.9), "eps": 0.05, "weight_decay": 0.1}),
    "up": ("adamw", {"lr": 0.1, "betas": (0.6, 0.9), "weight_decay": 0.1, "maximize": True}),
    "rmsprop": ("rmsprop", {"lr": 0.1, "alpha": 0.8, "eps": 0.05, "weight_decay": 0.1}),
    "centered": ("rmsprop", {"lr": 0.1, "alpha": 0.8, "momentum": 0.5, "centered": True}),
}
FORMS: dict[str, Callable[[float, Tensor], Tensor]] = {
    "a scalar for each leaf": lambda value, leaf: leaf.new_full((), value),
    "the shape of each leaf": lambda value, leaf: leaf.new_full(leaf.shape, value),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "override"),
    [("one scalar", True), *((form, False) for form in ("one scalar", *FORMS))],
)
@pytest.mark.parametrize("case", LEARNED)
def test_meta_gradients_by_every_hyper_parameter(
    device: torch.device, case: str, form: str, override: bool
) -> None:
    name, hyper = LEARNED[case]
    params = initial(device)

    def learnable(value: float) -> Any:
        if form in FORMS:
            return gradkit.tree.map(lambda leaf: FORMS[form](value, leaf), params)
        return torch.tensor(value, dtype=D, device=device)

    constant = {key: value for key, value in hyper.items() if isinstance(value, bool)}
    tree = {
        key: tuple(map(learnable, value)) if isinstance(value, tuple) else learnable(value)
        for key, value in hyper.items()
        if key not in constant
    }
    spec = optree.tree_structure(tree, none_is_leaf=False)

    def after(*flat: Tensor) -> Tensor:
        given = optree.tree_unflatten(spec, flat)
        if override:
            return height(leaves(ours(getattr(meta, name)(0.3, **constant), params, 3, **given)[0]))
        return height(leaves(ours(getattr(meta, name)(**given, **constant), params, 3)[0]))

    flat = [t.requires_grad_() for t in cast(list[Tensor], optree.tree_leaves(tree))]
    assert len(flat) == (3 if form in FORMS else 1) * (len(tree) + ("betas" in tree))
    assert gradcheck(after, flat, eps=1e-6, atol=1e-6, rtol=1e-6)
    assert all(g.any() for g in torch.autograd.grad(after(*flat), flat))


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 3])
@every_class
def test_meta_gradients_by_weights_gradients_and_state(
    device: torch.device, cls: Any, steps: int
) -> None:
    start = initial(device)
    more = {optim.SGD: {"momentum": 0.9}, optim.RMSprop: {"momentum": 0.9}}
    opt = meta.from_torch(cls, lr=0.1, **more.get(cls, EPS.get(cls, {})))
    _, state = ours(opt, start, steps=2)
    parts, spec = optree.tree_flatten(state)
    floats = [i for i, p in enumerate(parts) if isinstance(p, Tensor) and p.dim()]

    def after(scale: Tensor, *flat: Tensor) -> Tensor:
        params = like(start, flat[:3])
        now = list(parts)
        for place, tensor in zip(floats, flat[3:], strict=True):
            now[place] = tensor
        state: Any = optree.tree_unflatten(spec, now)
        for t in range(steps):
            grads = [scale * g for g in slopes(leaves(params), t)]
            params, state = opt.step(params, like(params, grads), state)
        return height(leaves(params))

    learned = [start["w"], *start["more"], *(parts[i] for i in floats)]
    flat = [t.detach().clone().requires_grad_() for t in learned]
    scale = torch.tensor(1.1, dtype=D, device=device, requires_grad=True)
    assert gradcheck(after, (scale, *flat), eps=1e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_first_momentum_step_keeps_its_gradient(device: torch.device, steps: int) -> None:
    """torch's own differentiable SGD drops it [T4]: this fails when torch mends that."""
    start = [torch.randn(4, dtype=D, device=device)]
    scale = torch.tensor(0.9, dtype=D, device=device, requires_grad=True)

    def after(scale: Tensor) -> Tensor:
        opt = meta.sgd(lr=0.1, momentum=0.9)
        params, state = start, opt.init(start)
        for t in range(steps):
            params, state = opt.step(params, [scale * g for g in slopes(params, t)], state)
        return height(params)

    assert gradcheck(after, scale, eps=1e-6, atol=1e-6, rtol=1e-6)
    p = start[0].clone().requires_grad_().clone()
    opt = optim.SGD([p], lr=0.1, momentum=0.9, differentiable=True)
    for t in range(steps):
        p.grad = scale * slopes([p.clone()], t)[0]
        opt.step()
    (theirs,) = torch.autograd.grad(height([p]), scale, materialize_grads=True)
    (right,) = torch.autograd.grad(after(scale), scale)
    assert abs(theirs - right) > 0.05 * abs(right)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cls", "hyper"),
    [
        pytest.param(cls, hyper, marks=() if hyper is hypers[0] else pytest.mark.slow)
        for cls, hypers in CASES.items()
        for hyper in hypers
    ],
    ids=name_of_case,
)
def test_a_dead_unit_leaves_meta_gradients_finite_and_right(
    device: torch.device, cls: Any, hyper: dict[str, Any]
) -> None:
    """Its second moment is exactly 0, where the root has no derivative [T5]."""
    x, y = torch.randn(8, 5, dtype=D, device=device), torch.randn(8, 2, dtype=D, device=device)
    w = torch.randn(5, 4, dtype=D, device=device)
    b = torch.tensor([0.3, 0.2, 0.1, -100.0], dtype=D, device=device)
    v = torch.randn(4, 2, dtype=D, device=device)
    decay = {"weight_decay": 0.0} if "weight_decay" in hyper or cls is optim.AdamW else {}
    opt = meta.from_torch(cls, **{**hyper, "lr": 0.03, **decay})

    def after(scale: Tensor, *flat: Tensor) -> Tensor:
        params, state = list(flat), opt.init(list(flat))
        for _ in range(7):  # RAdam divides by the second moment from the sixth step on
            at = [p if p.requires_grad else p.detach().requires_grad_() for p in params]
            before = x @ at[0] + at[1]
            loss = scale * (((before.tanh() * (before > -50)) @ at[2] - y) ** 2).mean()
            params, state = opt.step(
                at, like(at, torch.autograd.grad(loss, at, create_graph=True)), state
            )
        return height(params)

    scale = torch.tensor(1.0, dtype=D, device=device, requires_grad=True)
    flat = [t.clone().requires_grad_() for t in (w, b, v)]
    grads = torch.autograd.grad(after(scale, *flat), [scale, *flat])
    assert all(g.isfinite().all() for g in grads)
    # gradcheck's directions: a full check of every class takes half a minute.
    assert gradcheck(after, (scale, *flat), eps=1e-6, atol=1e-5, rtol=1e-5, fast_mode=True)


TRANSFORMED = [cls for cls in CASES if cls is not optim.Rprop]


@pytest.mark.parametrize("shape", [(2,), ()])
@pytest.mark.parametrize("cls", TRANSFORMED, ids=lambda cls: cls.__name__)
def test_steps_under_vmap_are_those_of_a_loop(
    device: torch.device, cls: Any, shape: tuple[int, ...]
) -> None:
    """foreach, and what torch.optim does in place, have no rule of vmap [T2, T8]."""
    rows = torch.randn(3, *shape, dtype=D, device=device)
    opt = meta.from_torch(cls, lr=0.05)
    got = vmap(lambda p: ours(opt, [p], 3)[0][0])(rows)
    assert_close(got, torch.stack([ours(opt, [row], 3)[0][0] for row in rows]))


@every_class
def test_steps_under_torch_func(device: torch.device, cls: Any) -> None:
    params = initial(device)
    opt = meta.from_torch(cls, lr=0.05, **({} if cls is optim.Rprop else {"weight_decay": 0.1}))

    def after(params: Any) -> Tensor:
        return height(leaves(ours(opt, params, 3)[0]))

    eager = gradkit.tree.map(lambda t: t.clone().requires_grad_(), params)
    expected = torch.autograd.grad(after(eager), leaves(eager))
    assert_close(func_grad(lambda *t: after(like(params, t)), (0, 1, 2))(*leaves(params)), expected)
    along = [torch.randn_like(t) for t in leaves(params)]
    tangent = jvp(lambda *t: after(like(params, t)), tuple(leaves(params)), tuple(along))[1]
    torch.testing.assert_close(
        tangent, sum((g * v).sum() for g, v in zip(expected, along, strict=True))
    )


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_hyper_parameters_under_torch_func(device: torch.device, name: str) -> None:
    params = initial(device)
    rates = torch.tensor([0.05, 0.1], dtype=D, device=device)

    def after(lr: Tensor, decay: Tensor) -> Tensor:
        opt = getattr(meta, name)(lr=lr, weight_decay=decay)
        return height(leaves(ours(opt, params, 3)[0]))

    got = vmap(func_grad(after, (0, 1)))(rates, rates)
    for i, rate in enumerate(rates):
        pair = [rate.clone().requires_grad_() for _ in range(2)]
        assert_close([g[i] for g in got], torch.autograd.grad(after(*pair), pair))


@every_class
def test_hyper_parameters_are_overridden_step_by_step(device: torch.device, cls: Any) -> None:
    params = [torch.randn(3, dtype=D, device=device)]
    theirs = [params[0].clone().requires_grad_()]
    reference = cls(theirs, lr=0.1, **SINGLE)
    opt = meta.from_torch(cls, lr=0.1)
    state = opt.init(params)
    for t, lr in enumerate([0.1, 0.03, 0.3]):
        params, state = opt.step(params, slopes(params, t), state, lr=lr)
        reference.param_groups[0]["lr"] = lr
        theirs[0].grad = slopes([theirs[0].detach()], t)[0]
        with exact_counts(cls):
            reference.step()
        assert_close(params, theirs)
    assert opt.hyper["lr"] == 0.1


@pytest.mark.parametrize("key", ["lr", "momentum_decay"])
def test_hyper_parameters_of_wrapped_classes_that_torch_gets_right(
    device: torch.device, key: str
) -> None:
    params = initial(device)
    for cls in [optim.NAdam, *([optim.RAdam] if key == "lr" else [])]:
        value = torch.tensor(0.1, dtype=D, device=device, requires_grad=True)

        def after(value: Tensor, cls: Any = cls) -> Tensor:
            opt = meta.from_torch(cls, **{"lr": 0.1, key: value})
            return height(leaves(ours(opt, params, 7)[0]))

        # The uses on a device and on the host are added up by two threads, in no fixed order.
        tolerances = {"atol": 1e-6, "rtol": 1e-6, "nondet_tol": 1e-12}
        assert gradcheck(after, value, eps=1e-6, **tolerances)
        (expected,) = torch.autograd.grad(after(value), value)
        assert_close([func_grad(after)(value.detach())], [expected])
        assert expected.any()


WRONG_IN_TORCH = [
    *((cls, key) for cls in (optim.NAdam, optim.RAdam) for key in ("betas", "weight_decay", "eps")),
    *((cls, "lr") for cls in WRAPPED if cls not in {optim.NAdam, optim.RAdam}),
    *((optim.ASGD, key) for key in ("lambd", "alpha", "t0", "weight_decay")),
    *((optim.Rprop, key) for key in ("etas", "step_sizes")),
    *((optim.Adagrad, key) for key in ("lr_decay", "initial_accumulator_value")),
    (optim.Adadelta, "rho"),
    (optim.Adamax, "betas"),
]


@pytest.mark.parametrize(("cls", "key"), WRONG_IN_TORCH)
def test_hyper_parameters_that_torch_gets_wrong_are_refused(
    device: torch.device, cls: Any, key: str
) -> None:
    """It drops some silently, and raises of others from its depths [T3]."""
    learned = torch.tensor(0.5, dtype=D, device=device, requires_grad=True)
    params = [torch.randn(3, dtype=D, device=device)]

    def given(tensor: Tensor) -> Any:
        return (0.5, tensor) if key in {"betas", "etas", "step_sizes"} else tensor

    def late(tensor: Tensor) -> Tensor:
        opt = meta.from_torch(cls)
        return opt.step(params, slopes(params), opt.init(params), **{key: given(tensor)})[0][0]

    refused = pytest.raises(
        gradkit.UnsupportedOptimizerError, match=rf"^{key} of {cls.__name__}: .*gradient"
    )
    with refused:
        meta.from_torch(cls, **{key: given(learned)})
    with refused:
        late(learned)
    with refused:
        func_grad(lambda t: late(t).sum())(learned.detach())
    with refused:
        jvp(late, (learned.detach(),), (torch.ones_like(learned),))


@pytest.mark.parametrize("how", ["vmap", "dual"])
@pytest.mark.parametrize(("cls", "key"), WRONG_IN_TORCH)
def test_they_are_never_silently_dropped(
    device: torch.device, cls: Any, key: str, how: str
) -> None:
    """Where a tensor does not say that it is differentiated: inside of vmap, and a dual one."""
    params = [torch.randn(3, dtype=D, device=device)]

    def after(t: Tensor) -> Tensor:
        opt = meta.from_torch(cls)
        hyper = {key: (0.5, t) if key in {"betas", "etas", "step_sizes"} else t}
        return ours(opt, params, 3, **hyper)[0][0].sum()

    at = torch.tensor(0.5, dtype=D, device=device)
    expected = (after(at + 1e-5) - after(at - 1e-5)) / 2e-5

    try:
        if how == "vmap":
            got = func_grad(lambda t: vmap(after)(t).sum())(at.expand(1))
        else:
            with forward_ad.dual_level():
                out = after(forward_ad.make_dual(at, torch.ones_like(at)))
                got = forward_ad.unpack_dual(out).tangent
    except (RuntimeError, gradkit.UnsupportedOptimizerError):
        return
    assert got is not None
    torch.testing.assert_close(got.reshape(()), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("cls", [optim.NAdam, optim.Adagrad])
def test_a_tangent_is_not_dropped(device: torch.device, cls: Any, enabled: bool) -> None:
    """`no_grad` does not switch forward mode off, nor does a dual tensor require grad."""
    opt = meta.from_torch(cls, lr=0.1)
    w, g, along = (torch.randn(3, dtype=D, device=device) for _ in range(3))

    def after(g: Tensor) -> Tensor:
        return cast("Tensor", opt.step(w, g, opt.init(w))[0])

    eps = 1e-6
    expected = (after(g + eps * along) - after(g - eps * along)) / (2 * eps)
    with torch.set_grad_enabled(enabled):
        torch.testing.assert_close(jvp(after, (g,), (along,))[1], expected, rtol=1e-5, atol=1e-7)
        with forward_ad.dual_level():
            out = after(forward_ad.make_dual(g, along))
            got = forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_classes_and_arguments_that_are_no_pure_optimizer(device: torch.device) -> None:
    refused = gradkit.UnsupportedOptimizerError
    for cls, why in ((optim.LBFGS, "LBFGS.*closure"), (optim.SparseAdam, "SparseAdam.*sparse")):
        with pytest.raises(refused, match=why):
            meta.from_torch(cls)
    p = torch.ones(2, device=device)
    for wrong in (optim.Adam([p]), "Adam", nn.Linear, optim.lr_scheduler.StepLR):
        with pytest.raises(refused, match=r"a class of torch\.optim"):
            meta.from_torch(wrong)
    for tree in ({"w": 0.1}, [0.1, 0.2]):
        opt = meta.from_torch(optim.NAdam, lr=tree)
        with pytest.raises(gradkit.StructureError, match=r"^lr: "):
            opt.step([p], [p], opt.init([p]))
    for beta in ({"w": 0.1}, [0.1]):
        with pytest.raises(refused, match=r"betas of NAdam.*tuple of trees"):
            meta.from_torch(optim.NAdam, betas=(beta, 0.9))
    with pytest.raises(gradkit.OptionError, match="NAdam"):
        meta.from_torch(optim.NAdam, lr={"w": 0.1, "b": -0.1})
    for cls in CASES:
        with pytest.raises(gradkit.OptionError, match=rf"^{cls.__name__} has .*'lrr'; it has lr, "):
            meta.from_torch(cls, lrr=1)


BY_LEAF = [(cls, "weight_decay") for cls in (optim.NAdam, optim.Adamax, optim.ASGD, optim.Adagrad)]


@pytest.mark.parametrize(("cls", "key"), [(cls, "lr") for cls in WRAPPED] + BY_LEAF)
def test_a_wrapped_class_takes_a_tree_of_hyper_parameters(
    device: torch.device, cls: Any, key: str
) -> None:
    params = initial(device)
    tree = {"w": 0.03, "more": [0.1, 0.2], "none": None}
    expected = [p.detach().clone() for p in leaves(params)]
    groups = [{"params": [p], key: x} for p, x in zip(expected, [0.03, 0.1, 0.2], strict=True)]
    theirs = cls(groups, **SINGLE)
    for t in range(5):
        for p, grad in zip(expected, slopes(expected, t), strict=True):
            p.grad = grad
        with exact_counts(cls):
            theirs.step()
    assert_close(ours(meta.from_torch(cls, **{key: tree}), params)[0], expected)
    assert_close(ours(meta.from_torch(cls), params, **{key: tree})[0], expected)
    prefix = {"w": 0.03, "more": 0.1, "none": None}  # one for all below it
    got = ours(meta.from_torch(cls, **{key: prefix}), params, 1)[0]
    assert_close([got["w"]], [ours(meta.from_torch(cls, **{key: tree}), params, 1)[0]["w"]])


def test_a_tree_of_learned_rates_in_a_wrapped_class(device: torch.device) -> None:
    params = {
        "w": torch.randn(3, dtype=D, device=device),
        "b": torch.randn((), dtype=D, device=device),
    }
    rates = [torch.tensor(x, dtype=D, device=device, requires_grad=True) for x in (0.1, 0.2)]

    def after(*rates: Tensor) -> Any:
        opt = meta.from_torch(optim.NAdam, lr=dict(zip(params, rates, strict=True)))
        return height(leaves(ours(opt, params, 3)[0]))

    assert gradcheck(after, rates, eps=1e-6, atol=1e-6, rtol=1e-6)
    with pytest.raises(gradkit.UnsupportedOptimizerError, match=r"lr of ASGD.*drops the gradient"):
        meta.from_torch(optim.ASGD, lr=dict(zip(params, rates, strict=True)))


class Signs(optim.Optimizer):
    """A class of a user, without `differentiable`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("count", 0)
                self.state[p]["count"] = count + 1
                p.sub_(p.grad.sign(), alpha=group["lr"] / (count + 1))


def test_a_class_of_a_user(device: torch.device) -> None:
    params = initial(device)
    opt = meta.from_torch(Signs, lr=0.2)
    assert_close(ours(opt, params)[0], torchs(Signs, params, {"lr": 0.2}))
    with pytest.raises(gradkit.UnsupportedOptimizerError, match="Signs"):
        ours(opt, gradkit.tree.map(lambda t: t.requires_grad_(), params))


class Momentum(optim.SGD):
    """A class of a user with torch's own step, whose first one cuts the gradient off [T4]."""


def test_a_subclass_of_sgd_is_refused_where_gradients_flow(device: torch.device) -> None:
    params = initial(device)
    hyper = {"lr": 0.1, "momentum": 0.9}
    opt = meta.from_torch(Momentum, **hyper)
    assert_close(ours(opt, params)[0], torchs(Momentum, params, hyper))
    with pytest.raises(gradkit.UnsupportedOptimizerError, match=r"Momentum.*subclass of SGD"):
        ours(opt, gradkit.tree.map(lambda t: t.requires_grad_(), params))


def test_nesterov_needs_what_torch_needs(device: torch.device) -> None:
    p = torch.ones(2, device=device)
    for wrong in ({}, {"momentum": 0.9, "dampening": 0.1}):
        opt = meta.sgd(lr=0.1, nesterov=True, **wrong)
        with unchanged(p), pytest.raises(gradkit.OptionError, match=r"^nesterov"):
            opt.step(p, p, opt.init(p))


OUT_OF_RANGE = [
    (optim.SGD, {"lr": -0.1}), (optim.Adam, {"lr": float("nan")}), (optim.SGD, {"momentum": -0.5}),
    (optim.SGD, {"weight_decay": -1}), (optim.Adam, {"lr": -1}), (optim.Adam, {"eps": -1e-8}),
    (optim.Adam, {"betas": (1.0, 0.0)}), (optim.Adam, {"betas": (0.9, 1.5)}),
    (optim.AdamW, {"betas": (-0.1, 0.9)}), (optim.AdamW, {"weight_decay": -1}),
    (optim.RMSprop, {"momentum": -1.0}), (optim.RMSprop, {"alpha": -0.1}),
    (optim.RAdam, {"betas": (1.0, 0.0)}), (optim.Adadelta, {"rho": 1.1}),
    (optim.Rprop, {"etas": (1.0, 0.5)}), (optim.Adafactor, {"beta2_decay": 0.8}),
    (optim.NAdam, {"lr": -0.1}), (optim.Adagrad, {"initial_accumulator_value": -1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "hyper"), OUT_OF_RANGE)
def test_a_number_that_torch_refuses_is_refused(
    device: torch.device, cls: Any, hyper: dict[str, Any]
) -> None:
    p = torch.ones(2, 2, device=device)
    with pytest.raises(ValueError, match=r".*"):
        cls([p], **hyper)
    ((name, value),) = hyper.items()
    written = cls in WRITTEN
    text = rf"^{name}: expected numbers of at least 0" if written else rf"^{cls.__name__}: .*nvalid"
    text = text if cls is not optim.Adafactor else text.replace("least", "most")
    with pytest.raises(gradkit.OptionError, match=text):
        meta.from_torch(cls, **hyper)
    opt = meta.from_torch(cls)
    with unchanged(p), pytest.raises(gradkit.OptionError, match=text):
        opt.step(p, p, opt.init(p), **hyper)
    if written and name != "betas":
        tree = {"a": [0.1, value]}
        with pytest.raises(gradkit.OptionError, match=text):
            meta.from_torch(cls, **{name: tree})
        # A tensor is not read: that would wait for the device.
        meta.from_torch(cls, **{name: torch.tensor(value, device=device)})


def test_numbers_that_torch_takes_are_taken(device: torch.device) -> None:
    p = torch.ones(2, 2, device=device)
    for cls, hyper in (
        (optim.SGD, {"lr": 0.0, "momentum": 0.9, "dampening": -0.5}),
        (optim.Adam, {"betas": (0.0, 0.5)}),
        (optim.RMSprop, {"alpha": 0.0}),
        (optim.NAdam, {"momentum_decay": 0.0}),
    ):
        every: dict[str, Any] = {"lr": 0.1, **hyper}
        assert_close(ours(meta.from_torch(cls, **every), [p])[0], torchs(cls, [p], every))
    opt = meta.sgd(lr=10**400)  # which no float can hold
    with pytest.raises(gradkit.LeafTypeError, match=r"^lr of params.*the int"):
        opt.step(p, p, opt.init(p))


@pytest.mark.parametrize("make", [meta.sgd, meta.adam, meta.adamw, meta.rmsprop])
def test_names_and_flags_that_an_optimizer_does_not_have(device: torch.device, make: Any) -> None:
    name = make.__name__
    unknown = rf"^{name} has no hyperparameter 'lrr'; it has lr, .*weight_decay.*maximize"
    with pytest.raises(gradkit.OptionError, match=unknown):
        make(lrr=0.1)
    p = torch.ones(2, device=device)
    opt = make(lr=0.1)
    state = opt.init(p)
    with unchanged(p), pytest.raises(gradkit.OptionError, match=unknown):
        opt.step(p, p, state, lrr=0.1)
    for flag in (1, None, "yes"):
        with pytest.raises(gradkit.OptionError, match=r"^maximize: expected False or True"):
            make(maximize=flag)
        with unchanged(p), pytest.raises(gradkit.OptionError, match=r"^maximize: expected False"):
            opt.step(p, p, state, maximize=flag)
    with unchanged(p), pytest.raises(gradkit.LeafTypeError, match=r"^lr of params.*bool"):
        opt.step(p, p, state, lr=True)
    adam = meta.adam(betas=(0.9,))
    before = adam.init(p)
    with unchanged(p), pytest.raises(gradkit.OptionError, match=r"^betas: expected a pair"):
        adam.step(p, p, before)


def test_params_that_can_be_read_only_once(device: torch.device) -> None:
    model = nn.Linear(2, 1).to(device)
    rate = torch.tensor(0.1, device=device, requires_grad=True)
    opt = meta.sgd(lr=rate)
    grads = tuple(torch.ones_like(p) for p in model.parameters())
    after, _ = opt.step(model.parameters(), grads, opt.init(model.parameters()))
    assert_close(after, [p - rate for p in model.parameters()])


@pytest.mark.parametrize("make", [meta.sgd, meta.adam, meta.adamw, meta.rmsprop])
def test_what_is_no_number_is_refused(device: torch.device, make: Any) -> None:
    p = torch.ones(2, device=device)
    with pytest.raises(gradkit.LeafTypeError, match=r"^params.*floating"):
        make().step(p.int(), p.int(), make().init(p.int()))
    for wrong in (None, "0.1"):
        opt = make(lr=wrong)
        with pytest.raises(gradkit.LeafTypeError, match=r"^lr of params"):
            opt.step(p, p, opt.init(p))


@pytest.mark.parametrize("make", [meta.sgd, meta.adam, meta.adamw, meta.rmsprop])
def test_a_learned_rate_does_not_change_shape_or_dtype(device: torch.device, make: Any) -> None:
    params = [torch.ones(2, device=device), torch.tensor(1.0, device=device)]
    for shape in ((), (1,), (1, 1)):
        lr = torch.full(shape, 0.1, dtype=D, device=device, requires_grad=True)
        after, _ = ours(make(lr=lr), params)
        assert [(p.shape, p.dtype) for p in after] == [(p.shape, p.dtype) for p in params]


@pytest.mark.parametrize("make", [meta.sgd, meta.adam, meta.adamw, meta.rmsprop])
def test_trees_that_do_not_fit_are_refused(device: torch.device, make: Any) -> None:
    p = torch.randn(3, 2, device=device)
    params, grads = {"a": p, "b": [p]}, {"a": p, "b": [p]}
    opt = make(lr=0.1)
    state = opt.init(params)

    def refused(text: str, *args: Any, error: Any = gradkit.StructureError, **hyper: Any) -> None:
        with unchanged(p), pytest.raises(error, match=text):
            opt.step(*args, **hyper)

    refused(r"^grads: expected the keys of params", params, {"a": p}, state)
    refused(r"^grads\['b'\]: expected a list", params, {"a": p, "b": (p,)}, state)
    refused(r"grads\['b'\]\[0\].*\(3, 2\)", params, {"a": p, "b": [p[0]]}, state)
    refused(r"grads\['a'\].*float", params, {**grads, "a": 1.0}, state, error=gradkit.LeafTypeError)
    refused(r"params\['a'\].*str", {**params, "a": "w"}, grads, state, error=gradkit.LeafTypeError)
    refused(r"(?s)^state: .*init", params, grads, {})
    refused(r"(?s)^state: .*init", params, grads, None)
    refused(r"(?s)^state: .*init", params, grads, meta.from_torch(optim.NAdam).init(params))
    refused(r"^state\['", params, grads, opt.init([p]))
    refused(r"^lr: expected the keys of params", params, grads, state, lr={"a": 0.1})
    for value in ({"a": "fast", "b": 0.1}, {"a": 0.1, "b": [None]}):
        refused(r"lr.*params\['", params, grads, state, error=gradkit.LeafTypeError, lr=value)
    for shape in ((2, 2), (5, 3, 2), (7,)):
        lr = {"a": 0.1, "b": torch.ones(shape, device=device)}
        refused(r"lr.*\['b'\]", params, grads, state, lr=lr)
        refused(r"lr", params, grads, state, lr=lr["b"])


SWITCHED = [
    (optim.SGD, {"momentum": 0.9}), (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"amsgrad": True}), (optim.AdamW, {"amsgrad": True}),
    (optim.RMSprop, {"centered": True}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "hyper"), SWITCHED)
def test_what_is_switched_off_for_a_step_is_as_in_torch(
    device: torch.device, cls: Any, hyper: dict[str, Any]
) -> None:
    params = [torch.randn(3, dtype=D, device=device)]
    theirs = [params[0].clone().requires_grad_()]
    every = {"lr": 0.1, **hyper, **({"betas": (0.9, 0.5)} if "amsgrad" in hyper else {})}
    reference, opt = cls(theirs, **every, **SINGLE), meta.from_torch(cls, **every)
    off = {name: 0.0 if name == "momentum" else False for name in hyper}
    state = opt.init(params)
    for t, now in enumerate([hyper, off, hyper, off]):
        grads = [g / (t + 1) for g in slopes(params, t)]
        params, state = opt.step(params, grads, state, **now)
        reference.param_groups[0].update(now)
        theirs[0].grad = grads[0].clone()
        with exact_counts(cls):
            reference.step()
        assert_close(params, theirs)


def test_momentum_is_switched_on_for_a_step_as_in_torch(device: torch.device) -> None:
    params = [torch.randn(3, dtype=D, device=device)]
    theirs = [params[0].clone().requires_grad_()]
    reference, opt = optim.SGD(theirs, lr=0.1), meta.sgd(lr=0.1)
    state = opt.init(params)
    for t, momentum in enumerate([0.0, 0.9, 0.9]):
        grads = slopes(params, t)
        params, state = opt.step(params, grads, state, momentum=momentum)
        reference.param_groups[0]["momentum"], theirs[0].grad = momentum, grads[0].clone()
        reference.step()
        assert_close(params, theirs)


@pytest.mark.parametrize(("name", "flag"), [("adam", "amsgrad"), ("adamw", "amsgrad"),
                                            ("rmsprop", "centered")])  # fmt: skip
def test_a_flag_that_the_state_has_no_entry_for(device: torch.device, name: str, flag: str) -> None:
    make, p = getattr(meta, name), torch.ones(2, device=device)
    opt = make(lr=0.1)
    text = rf"(?s)^{flag}: expected False, .* got True for a step.*{name}\({flag}=True\)"
    with unchanged(p), pytest.raises(gradkit.OptionError, match=text):
        opt.step(p, p, opt.init(p), **{flag: True})
    some = {"a": p, "b": p}
    with pytest.raises(gradkit.OptionError, match=text):
        opt.step(some, {"a": p, "b": None}, opt.init(some), **{flag: True})


@pytest.mark.parametrize("make", [meta.sgd, meta.adam, meta.adamw, meta.rmsprop])
def test_a_state_that_does_not_fit_is_refused(device: torch.device, make: Any) -> None:
    p = torch.ones(3, device=device)
    opt, params = make(lr=0.1), {"a": p, "b": None}
    entry = "square_avg" if make is meta.rmsprop else "exp_avg"
    entry = "momentum_buffer" if make is meta.sgd else entry
    for shape in ((1,), (4,), (), (1, 3)):
        other = {**opt.init(params), entry: {"a": torch.zeros(shape, device=device), "b": None}}
        text = rf"^state\['{entry}'\]\['a'\]: expected a tensor of shape \(3,\)"
        with unchanged(p), pytest.raises(gradkit.StructureError, match=text):
            opt.step(params, params, other)
        never: Any = lambda *_: pytest.fail("the loss has run")  # noqa: E731
        with unchanged(p), pytest.raises(gradkit.StructureError, match=text):
            meta.unroll(never, params, [0], opt, state=other)
    uncounted = {**opt.init(params), "step": {"a": None, "b": None}}
    with pytest.raises(gradkit.StructureError, match=r"^state\['step'\]\['a'\]: expected a count"):
        opt.step(params, params, uncounted)
    if make is not meta.sgd:
        empty = {**opt.init(params), entry: {"a": None, "b": None}}
        with pytest.raises(gradkit.StructureError, match=rf"^state\['{entry}'\]\['a'\]"):
            opt.step(params, params, empty)


@pytest.mark.parametrize("make", [meta.sgd, meta.adam, meta.adamw, meta.rmsprop])
def test_no_imaginary_part_is_dropped(device: torch.device, make: Any) -> None:
    p, opt = torch.ones(3, device=device), make(lr=0.1)
    imaginary = torch.full((3,), 1j, device=device)
    with unchanged(p), pytest.raises(gradkit.LeafTypeError, match=r"^grads: expected a real"):
        opt.step(p, imaginary, opt.init(p))
    for opt in (make(lr=imaginary[0]), make(lr=imaginary)):
        with unchanged(p), pytest.raises(gradkit.LeafTypeError, match=r"^lr of params: .*real"):
            opt.step(p, p, opt.init(p))


def test_a_wrapped_class_takes_no_complex_number(device: torch.device) -> None:
    p, lr = torch.ones(2, device=device), torch.tensor(0.1j, device=device)
    opt = meta.from_torch(optim.NAdam)
    state = opt.init(p)
    with pytest.raises(gradkit.LeafTypeError, match=r"^lr of NAdam: expected a real number"):
        opt.step(p, p, state, lr=lr)


def test_a_state_is_of_tensors(device: torch.device) -> None:
    for make in (meta.sgd, meta.adam, meta.rmsprop):
        with pytest.raises(gradkit.LeafTypeError, match=r"^params\['b'\]: expected a tensor"):
            make().init({"a": torch.ones(2, device=device), "b": 1.0})


def test_a_tree_of_rates_may_begin_that_of_params(device: torch.device) -> None:
    params = initial(device)
    full = {"w": 0.1, "more": [0.2, 0.2], "none": None}
    some, _ = ours(meta.adam(lr={"w": 0.1, "more": 0.2, "none": 0.3}), params)
    assert_same_bits(leaves(some), leaves(ours(meta.adam(lr=full), params)[0]))
    rates = [0.1, 0.2, 0.2]
    for leaf, got, lr in zip(leaves(params), leaves(some), rates, strict=True):
        grads_apart = ours(meta.adam(lr=lr), params, steps=1)[0]
        now = ours(meta.adam(lr=full), params, steps=1)[0]
        place = next(i for i, other in enumerate(leaves(params)) if other is leaf)
        torch.testing.assert_close(leaves(now)[place], leaves(grads_apart)[place])
        assert not same_bits(got, leaf)


WITH_RATES = [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, *WRAPPED, optim.Rprop]


@pytest.mark.parametrize("cls", dict.fromkeys(WITH_RATES))
def test_a_rate_of_another_shape_is_refused_before_the_step(device: torch.device, cls: Any) -> None:
    params = {"w": torch.ones(3, device=device), "b": torch.ones(2, 2, device=device)}
    rates = {
        "two": torch.tensor([0.1, 0.2], device=device),
        "none": torch.zeros(0, device=device),
        "a matrix": torch.full((2, 3), 0.1, device=device),
        "sparse": torch.tensor([0.1], device=device).to_sparse(),
        "text": "0.1",
        "an array": np.array([0.1, 0.2]),
        "a tree": {"w": 0.1, "b": torch.tensor([0.1, 0.2, 0.3], device=device)},
    }
    for rate in rates.values():
        ran: list[object] = []

        def loss(p: Any, _: Any, batch: Any, ran: list[object] = ran) -> Tensor:
            ran.append(batch)
            return sum((x.square().sum() for x in p.values()), torch.zeros((), device=device))

        with unchanged(*params.values()), pytest.raises(gradkit.GradkitError, match=r"lr\b"):
            meta.unroll(loss, params, [None] * 2, meta.from_torch(cls, lr=rate))
        assert not ran
    one = [torch.tensor(0.1), torch.tensor([0.1]), torch.tensor([[0.1]]), 0.1]
    grads = gradkit.tree.scale(params, 2.0)
    each = []
    for rate in one:
        opt = meta.from_torch(cls, lr=rate)
        each.append(opt.step(params, grads, opt.init(params))[0])
    assert all(gradkit.tree.allclose(each[0], other, atol=1e-6) for other in each)


@pytest.mark.parametrize("cls", dict.fromkeys(WRAPPED))
def test_each_hyper_parameter_is_of_the_kind_of_its_default(device: torch.device, cls: Any) -> None:
    defaults = inspect.signature(cls).parameters
    ignored = {"params", "foreach", "fused", "capturable", "differentiable"}
    for key in defaults.keys() - ignored:
        default = defaults[key].default
        wrong = {"text": "no", "two": torch.ones(2), "function": len, "a pair": (0.1, 0.2, 0.3)}
        for value in wrong.values():
            with pytest.raises(gradkit.OptionError, match=rf"(?s)^{key}\b.*: .*{key}="):
                meta.from_torch(cls, **{key: value})
        meta.from_torch(cls, **{key: default})


COUNTED: dict[str, Callable[[], meta.Optimizer]] = {
    "adam": lambda: meta.adam(lr=0.1), "adamw": lambda: meta.adamw(lr=0.1),
    "adafactor": lambda: meta.adafactor(lr=0.1), "sgd": lambda: meta.sgd(lr=0.1, momentum=0.9),
    "rmsprop": lambda: meta.rmsprop(lr=0.1),
    "schedule_free_adamw": lambda: meta.schedule_free_adamw(lr=0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_counts_may_be_tensors(
    device: torch.device, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """As torch's own optimizers keep them, and safetensors: as exact as a number."""
    params = initial(device)
    opt, grads = COUNTED[name](), like(params, slopes(leaves(params)))
    new, state = opt.step(params, grads, opt.init(params))
    counts = optree.tree_map(
        lambda n: torch.full(shape, n, dtype=dtype, device=device), state["step"]
    )
    given = {**state, "step": counts}
    expected = opt.step(new, grads, state)
    got = opt.step(new, grads, given)
    assert_close(leaves(got[0]), leaves(expected[0]), 1e-14)
    of_state = {k: v for k, v in got[1].items() if k != "step"}
    for entry, other in zip(leaves(of_state), leaves(expected[1]), strict=True):
        assert entry.dtype == other.dtype
        assert_close([entry], [other], 1e-14)
    for count in leaves(got[1]["step"]):
        assert count.shape == shape
        assert count.item() == 2
        assert count.dtype == (torch.float64 if dtype.is_floating_point else torch.int64)


def test_a_count_that_is_no_number_is_refused(device: torch.device) -> None:
    w = torch.ones(2, dtype=D, device=device)
    opt = meta.adam()
    state = {**opt.init(w), "step": torch.ones(2, device=device)}
    with pytest.raises(gradkit.StructureError, match=r"state\['step'\]: expected a count"):
        opt.step(w, w, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_hypergradient_of_a_count_that_is_a_tensor(
    device: torch.device, dtype: torch.dtype
) -> None:
    w, opt = torch.ones(2, dtype=D, device=device), meta.adam(lr=0.1)
    first, state = opt.step(w, 0.7 * w, opt.init(w))
    state = {k: v.detach() if isinstance(v, Tensor) else v for k, v in state.items()}

    def slope(step: Any) -> Tensor:
        x = torch.tensor(2.0, dtype=D, device=device, requires_grad=True)
        new, _ = opt.step(first, x * x * w, {**state, "step": step})
        return torch.autograd.grad(new.sum(), x)[0]

    count = torch.tensor(1, dtype=dtype, device=device)
    assert_close([slope(count)], [slope(1)], 1e-14)

    def stepped(n: Tensor) -> Tensor:
        new: Tensor = opt.step(first, w, {**state, "step": n})[0]
        return new

    each = vmap(stepped)(count.repeat(3))
    assert_close([each[1]], [opt.step(first, w, state)[0]], 1e-14)
    compiled: Any = torch.compile(stepped, backend="eager", fullgraph=True)
    assert_close([compiled(count)], [opt.step(first, w, state)[0]], 1e-14)


@pytest.mark.parametrize("cls", [optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD])
@pytest.mark.parametrize("kind", [float, torch.float32, torch.bfloat16, torch.int64])
def test_counts_of_a_class_of_torch(device: torch.device, cls: Any, kind: Any) -> None:
    w = torch.ones(2, dtype=D, device=device)
    opt = meta.from_torch(cls, lr=0.1)
    new, state = opt.step(w, 0.7 * w, opt.init(w))
    entry = state["torch"]
    step = entry["step"].item() if kind is float else entry["step"].to(kind).reshape(1)
    x = (3 * w).requires_grad_()
    expected, _ = opt.step(new, x, state)
    got, after = opt.step(new, x, {"torch": {**entry, "step": step}})
    assert_close([got], [expected], 1e-14)
    assert after["torch"]["step"] == 2


@pytest.mark.parametrize(
    "cls", [optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop], ids=lambda cls: cls.__name__
)
def test_entries_of_a_state_that_do_not_fit_are_named(device: torch.device, cls: Any) -> None:
    params = {"a": torch.ones(2, device=device), "b": None}
    opt = meta.from_torch(cls)
    _, state = opt.step(params, params, opt.init(params))
    entries: dict[str, Tensor] = state["torch"]["a"]
    rest = {name: {k: x for k, x in entries.items() if k != name} for name in entries}
    for key, wrong in [
        *((key, {**entries, key: torch.ones(3, device=device)}) for key in entries),
        *((key, {**entries, key: "text"}) for key in entries),
        *rest.items(),
    ]:
        match = rf"^state\['torch'\]\['a'\]\['{key}'\]: expected"
        with pytest.raises(gradkit.StructureError, match=match):
            opt.step(params, params, {"torch": {"a": wrong, "b": None}})


def test_an_entry_that_hyper_parameters_need_is_named(device: torch.device) -> None:
    class Plain(optim.NAdam):
        def step(self, closure: Any = None) -> Any:
            _ = [self.state[p]["more"] for g in self.param_groups for p in g["params"]]

    w = torch.ones(2, device=device)
    opt = meta.from_torch(Plain)
    with pytest.raises(gradkit.StructureError, match=r"state: expected the entry 'more'"):
        opt.step(w, w, opt.init(w))


@pytest.mark.parametrize("make", [meta.adam, meta.adamw])
def test_a_count_below_zero_is_refused(device: torch.device, make: Any) -> None:
    w, opt = torch.ones(2, device=device), make(lr=0.1)
    with pytest.raises(gradkit.StructureError, match=r"state\['step'\]: expected a count"):
        opt.step(w, w, {**opt.init(w), "step": -1})
