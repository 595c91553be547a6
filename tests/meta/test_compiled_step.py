"""A training step under torch.compile: with aot_eager the bits of the same step without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradkit
from gradkit import func, meta, tree
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.long
OPTIMIZERS: dict[str, Callable[[], meta.Optimizer]] = {
    "sgd": lambda: meta.sgd(lr=0.1, weight_decay=0.1),
    "sgd, momentum": lambda: meta.sgd(lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    "sgd, Nesterov": lambda: meta.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: meta.adam(lr=0.01, weight_decay=0.1),
    "adam, amsgrad": lambda: meta.adam(lr=0.01, amsgrad=True),
    "adamw": lambda: meta.adamw(lr=0.01),
    "rmsprop": lambda: meta.rmsprop(lr=0.01),
    "rmsprop, centered": lambda: meta.rmsprop(lr=0.01, momentum=0.9, centered=True),
    "from_torch": lambda: meta.from_torch(torch.optim.AdamW, lr=0.01),
    "lion": lambda: meta.lion(lr=0.01, weight_decay=0.1),
    "adafactor": lambda: meta.adafactor(lr=0.5, weight_decay=0.1),
    "schedule_free_adamw": lambda: meta.schedule_free_adamw(lr=0.01, weight_decay=0.1),
    "muon": lambda: meta.muon(lr=0.01),
}


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(device)


def data(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 6).to(device), torch.randint(3, (16,)).to(device)


def assert_stays_compiled(step: Callable[..., Any], carry: tuple[Any, ...], *args: Any) -> None:
    """Check that a step compiles for its first state and once more, with the same bits."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = theirs = carry
    for number in range(6):
        rate = torch.tensor(0.01 * 0.9**number)
        with warnings.catch_warnings():
            # torch speaks of its own deprecated functions while it compiles.
            warnings.simplefilter("ignore", DeprecationWarning)
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                ours = compiled(*ours, rate, *args)
        theirs = step(*theirs, rate, *args)
        assert_same_bits(tree_tensors(ours), tree_tensors(theirs))


def tree_tensors(values: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor)]


# Each takes seconds to compile: Adam here, the others in the slow tier.
@pytest.mark.parametrize(
    ("name", "scheduled"),
    [
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in OPTIMIZERS),
        pytest.param("adam", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("adafactor", "muon")),
    ],
)
def test_every_optimizer(device: torch.device, name: str, scheduled: bool) -> None:
    opt = OPTIMIZERS[name]()
    call, params, buffers = func.make_functional(net(device))
    params = tree.map(Tensor.detach, params)

    def loss_of(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        out, buffers = call(params, buffers, x)
        return cross_entropy(out, y), buffers

    def step(params: Any, buffers: Any, state: Any, rate: Tensor, x: Tensor, y: Tensor) -> Any:
        grads_of = func.value_and_grads(loss_of, has_aux=True, create_graph=False)
        (_, buffers), grads = grads_of(params, buffers, x, y)
        if name == "muon":  # which takes matrices
            grads = {key: grad if grad.ndim == 2 else None for key, grad in grads.items()}
        options: Any = {"lr": rate} if scheduled else {}
        params, state = opt.step(params, grads, state, **options)
        return params, buffers, state

    assert_stays_compiled(step, (params, buffers, opt.init(params)), *data(device))


def losses_of(model: Any, params: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    out = model(params, x)
    return {"fit": cross_entropy(out, y), "size": out.square().mean()}


def clipped(losses: Any, params: Any, x: Tensor, y: Tensor) -> Any:
    grads = func.value_and_grads(losses, create_graph=False)(params, x, y)[1]
    return tree.clip_by_global_norm(grads, 0.1)[0]


def weighted(losses: Any, params: Any, x: Tensor, y: Tensor) -> Any:
    per_loss = func.per_loss_grads(losses, create_graph=False)(params, x, y)
    return gradkit.combine(per_loss, {"fit": 1.0, "size": 0.1})


def aggregated(losses: Any, params: Any, x: Tensor, y: Tensor) -> Any:
    per_loss = func.per_loss_grads(losses, create_graph=False)(params, x, y)
    return gradkit.combine(per_loss, lambda matrix: matrix.mean(0))


def accumulated(losses: Any, params: Any, x: Tensor, y: Tensor) -> Any:
    total = tree.map(torch.zeros_like, params)
    for part in zip(x.chunk(2), y.chunk(2), strict=True):
        grads = func.value_and_grads(losses, create_graph=False)(params, *part)[1]
        total = tree.add(total, tree.scale(grads, 0.5))
    return total


def by_sample(losses: Any, params: Any, x: Tensor, y: Tensor) -> Any:
    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        fit: Tensor = losses(params, x[None], y[None])["fit"]
        return fit

    grads = func.per_sample_grads(loss, create_graph=False)(params, x, y)
    factors = (1 / tree.global_norm(grads, batch_dims=1)).clamp(max=1.0)
    return tree.map(lambda g: torch.einsum("b,b...->...", factors, g) / len(x), grads)


def damped(losses: Any, params: Any, x: Tensor, y: Tensor) -> Any:
    def loss(params: Any) -> Tensor:
        fit: Tensor = losses(params, x, y)["fit"]
        return fit

    grads = func.value_and_grads(loss, create_graph=False)(params)[1]
    _, curved = func.hvp(loss, params, grads)
    return tree.add(grads, tree.scale(curved, -0.01))


@pytest.mark.parametrize(
    "direction",
    [
        clipped,
        *(
            pytest.param(fn, marks=pytest.mark.slow)
            for fn in (by_sample, weighted, aggregated, accumulated, damped)
        ),
    ],
)
def test_what_a_step_may_do_with_gradients(device: torch.device, direction: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    call, params, buffers = func.make_functional(model)
    params, opt = tree.map(Tensor.detach, params), meta.adam(lr=0.01)

    def losses(params: Any, x: Tensor, y: Tensor) -> Any:
        return losses_of(lambda params, x: call(params, buffers, x)[0], params, x, y)

    def step(params: Any, state: Any, rate: Tensor, x: Tensor, y: Tensor) -> Any:
        return opt.step(params, direction(losses, params, x, y), state, lr=rate)

    assert_stays_compiled(step, (params, opt.init(params)), *data(device))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_compiled_gradients_and_an_optimizer_of_torch(device: torch.device, kind: Any) -> None:
    """With step_, whose weights and states are those of the loop."""
    torch._dynamo.reset()
    model, other = net(device), net(device)
    call, params, buffers = func.make_functional(model)
    weights = tree.map(Tensor.detach, params)  # of the same memory

    @torch.compile(fullgraph=True, backend="aot_eager")
    def grads_of(weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        def loss(weights: Any) -> Any:
            out, new = call(weights, buffers, x)
            return cross_entropy(out, y), new

        return func.value_and_grads(loss, has_aux=True, create_graph=False)(weights)

    ours, theirs = kind(model.parameters(), lr=0.01), kind(other.parameters(), lr=0.01)
    x, y = data(device)
    for number in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                (_, buffers), grads = grads_of(weights, buffers, x, y)
        gradkit.step_(ours, model, grads)
        theirs.zero_grad()
        cross_entropy(other(x), y).backward()
        theirs.step()
        assert_same_bits(list(model.parameters()), list(other.parameters()))
        assert_same_bits(buffers.values(), dict(other.named_buffers()).values())
