"""After a compiled call that fails, all is as before; and its error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradkit
from gradkit import func
from tests.helpers import others_slow

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
]
D = torch.float64
# A loss that torch's forward mode fails at as it runs, in an operator that no mode is asked for.
_MEAN = 1
FAILING: dict[str, Callable[[Tensor], Any]] = {
    "as it runs": lambda x: func.hvp(
        lambda x: torch.ops.aten.mse_loss.default(x.sin(), x.detach(), _MEAN), x, x
    ),
    "a write on an argument": lambda x: func.hvp(lambda x: x.mul_(2).sum(), x, x),
    "torch.cond": func.value_and_grads(
        lambda x: torch.cond(x.sum() > 0, lambda x: x.sin().sum(), lambda x: x.cos().sum(), (x,))
    ),
    "a checkpoint": func.value_and_grads(
        lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False).sum()
    ),
    "a refused operation": lambda x: func.jvp(lambda x: torch.normal(x, 1.0).sum(), x, x),
    "a vector": func.value_and_grads(lambda x: x * 2),
}


@pytest.mark.parametrize("name", others_slow(FAILING, ["as it runs", "torch.cond"]))
def test_nothing_stays_of_a_compiled_call_that_fails(device: torch.device, name: str) -> None:
    x = torch.tensor([0.3, 0.5], dtype=D, device=device)
    torch._dynamo.reset()
    with pytest.raises(gradkit.GradkitError, match="What to do:"):
        torch.compile(FAILING[name], backend="eager", fullgraph=True)(x)
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    torch.testing.assert_close(func.jvp(torch.sin, x, torch.ones_like(x))[1], x.cos())
    _, product = func.hvp(lambda x: (x**3).sum(), x, torch.ones_like(x))
    torch.testing.assert_close(product, 6 * x)
    torch.testing.assert_close(torch.func.jvp(torch.sin, (x,), (x,))[1], x * x.cos())


def _huber_at_its_kinks(x: Tensor) -> Tensor:
    zero, one = x.detach(), x.detach() - 1
    return functional.huber_loss(x, zero) + functional.huber_loss(x, one, reduction="sum")


SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "mse_loss": lambda x: functional.mse_loss(x.sin(), x.detach()),
    "huber_loss": _huber_at_its_kinks,
    "soft_margin_loss": lambda x: functional.soft_margin_loss(x, x.detach().sign()),
    "layer_norm": lambda x: functional.layer_norm(x, (3,), x[0].exp(), x[0]).sin().sum(),
    "group_norm": lambda x: functional.group_norm(x, 1, x[0].exp(), x[0]).sin().sum(),
    "batch_norm": lambda x: nn.BatchNorm1d(3, dtype=D, device=x.device)(x).sin().sum(),
    "instance_norm": lambda x: functional.instance_norm(x[None]).sin().sum(),
}


@pytest.mark.parametrize("name", others_slow(SECOND, ["huber_loss", "layer_norm"]))
def test_second_derivatives_that_torch_does_not_compile(device: torch.device, name: str) -> None:
    x = torch.tensor([[0.3, 0.5, 0.1], [0.4, 0.9, 0.7]], dtype=D, device=device)
    fn = SECOND[name]
    if name == "batch_norm":
        call, _, buffers = func.make_functional(nn.BatchNorm1d(3, dtype=D, device=device))
        weights = {
            name: torch.full((3,), 0.5, dtype=D, device=device) for name in ("weight", "bias")
        }
        fn = lambda x: call(weights, buffers, x)[0].sin().sum()  # noqa: E731
    torch._dynamo.reset()
    product = torch.compile(lambda x: func.hvp(fn, x, x.cos()), backend="eager", fullgraph=True)(x)
    expected = func.hvp(fn, x, x.cos(), mode="reverse-over-reverse")
    torch.testing.assert_close(product, expected)


@pytest.mark.parametrize("kind", others_slow(["weight_norm", "spectral_norm"], ["weight_norm"]))
@pytest.mark.parametrize("backend", others_slow(["eager", "aot_eager"], ["aot_eager"]))
def test_the_weight_of_an_old_parametrization_stays(
    device: torch.device, kind: str, backend: str
) -> None:
    net = getattr(nn.utils, kind)(nn.Linear(3, 2, dtype=D, device=device))
    call, params, buffers = func.make_functional(net)
    params = {name: p.detach() for name, p in params.items()}
    x = torch.ones(2, 3, dtype=D, device=device)
    step = func.value_and_grads(lambda p: call(p, buffers, x)[0].sin().sum())
    before = net.weight
    torch._dynamo.reset()
    got = torch.compile(step, backend=backend, fullgraph=True)(params)
    assert net.weight is before
    torch.testing.assert_close(got, step(params))


def test_an_ensemble_with_batch_norm_in_train_mode(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(device, D)
    call, params, buffers = func.make_functional(net)
    members = {name: torch.stack([p, 2 * p]).detach() for name, p in params.items()}
    x = torch.arange(12.0, dtype=D, device=device).reshape(4, 3).sin()

    def step(p: Any) -> Any:
        loss = lambda p: call(p, buffers, x)[0].square().sum()  # noqa: E731
        return func.value_and_grads(loss, create_graph=False)(p)

    torch._dynamo.reset()
    got = torch.compile(torch.vmap(step), backend="eager", fullgraph=True)(members)
    torch.testing.assert_close(got, torch.vmap(step)(members))
