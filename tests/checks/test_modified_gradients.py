"""Gradients that a hook or a Function has written on: refused; and those of torch's own: not."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradkit
from tests.helpers import assert_same_bits

INDEX = torch.tensor([0, 2, 2])
# Backward functions that write on what they have just made.
WRITE_THEMSELVES: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[INDEX.to(x.device)],
    "index_select": lambda x: x.index_select(0, INDEX.to(x.device)),
    "gather": lambda x: x.gather(0, INDEX.to(x.device)[:, None]),
    "max": lambda x: x.max(dim=0).values,
    "amax of a view": lambda x: x.view(-1).max(),
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort().values,
    "group_norm": lambda x: functional.group_norm(x[None, :, None] * 1.5, 4, x[0], x[1]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "maximum": lambda x: torch.maximum(x, x.detach() + 0.1),
    "through a view": lambda x: x.t()[INDEX.to(x.device)],
    "twice": lambda x: x[INDEX.to(x.device)] * x[1],
    "in place": lambda x: (x * 1).mul_(x[0]),
    "a sum of many": lambda x: x + x + x + x.t() + x.t(),
    "residual": lambda x: x + torch.tanh(x + torch.tanh(x)),
}


@pytest.fixture(autouse=True)
def some_hook() -> Iterator[None]:
    with_hook = nn.Linear(1, 1)
    handle = with_hook.register_forward_hook(lambda *_: None)
    yield
    handle.remove()


@pytest.mark.parametrize("name", WRITE_THEMSELVES)
def test_what_torch_itself_writes_is_no_writer(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, device=device, requires_grad=True)
    bias = torch.randn(4, 4, device=device, requires_grad=True)
    loss = (WRITE_THEMSELVES[name](x).square().sum() + (bias + x[INDEX.to(device)].sum())).sum()
    expected = torch.autograd.grad(loss, [x, bias], retain_graph=True)
    assert_same_bits(gradkit.value_and_grads(loss, [x, bias], retain_graph=True)[1], expected)
    second, first = gradkit.per_loss_grads([loss * 2, loss], [x, bias], create_graph=True)
    expected = torch.autograd.grad(loss, [x, bias], create_graph=True)
    assert_same_bits(first, expected)
    assert_same_bits(second, [2 * grad for grad in expected])


def test_a_function_that_builds_its_result_in_place_is_no_writer(device: torch.device) -> None:
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.shape = x.shape
            return x[1:3].clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            result = grad.new_zeros(ctx.shape)
            result[1:3] += grad
            return result

    x, y = (torch.randn(4, 2, device=device, requires_grad=True) for _ in range(2))
    _, grad = gradkit.value_and_grads(Rows.apply(x).square().sum(), x)
    assert torch.equal(grad[1:3], 2 * x.detach()[1:3])
    _, (of_x, of_y) = gradkit.value_and_grads(Rows.apply(x + y).square().sum(), [x, y])
    assert torch.equal(of_x[1:3], 2 * (x + y).detach()[1:3])
    assert torch.equal(of_y, of_x)


def test_a_refusal_leaves_every_grad_alone(device: torch.device) -> None:
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    a.grad = torch.full_like(a, 5)
    z = a * 1
    z.register_hook(lambda grad: grad.mul_(10))
    loss = ((z + b) * torch.ones(2, device=device)).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"params\['b'\].*in place"):
        gradkit.value_and_grads(loss, {"a": a, "b": b})
    assert a.grad.tolist() == [5, 5]
    assert b.grad is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_operation_of_torch_is_taken_for_a_writer(device: torch.device) -> None:
    """With torch's own inputs for its own tests; not all of their names exist in every version."""
    # What the module imports for tests that compare with recorded text.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=object))
    from tests.op_db import op_db

    tried, refused = 0, []
    for op in op_db:
        for loss, leaves in _losses(op, device):
            tried += 1
            try:
                gradkit.value_and_grads(loss, leaves)
            except gradkit.UnreachedParamError:
                continue
            except gradkit.UnsupportedGraphError as error:
                if "written in place" in str(error):
                    refused.append(op.name)
            except (RuntimeError, NotImplementedError, gradkit.GradkitError):
                continue  # torch's own derivative fails, or does not exist
    assert tried > 1000
    assert not refused


def _losses(op: Any, device: torch.device) -> Iterator[tuple[Tensor, list[Tensor]]]:
    if not op.supports_autograd:
        return
    try:
        samples = list(op.sample_inputs(device.type, torch.float32, requires_grad=True))[:4]
    except (RuntimeError, ImportError, ModuleNotFoundError):
        return
    for sample in samples:
        given = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
        try:
            out = torch.utils._pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
            parts = [o for o in out if isinstance(o, Tensor) and o.requires_grad and o.numel()]
            loss = sum((o.abs() if o.is_complex() else o * torch.rand_like(o)).sum() for o in parts)
        except (RuntimeError, NotImplementedError, TypeError):  # complex numbers only, say
            continue
        if leaves and isinstance(loss, Tensor) and loss.dtype.is_floating_point:
            yield loss, leaves


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_no_layer_of_torch_is_taken_for_a_writer(
    device: torch.device, kind: Callable[..., nn.RNNBase]
) -> None:
    layer = kind(3, 4, num_layers=2, bidirectional=True).to(device)
    loss = layer(torch.randn(5, 2, 3, device=device))[0].square().sum()
    expected = torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
    _, grads = gradkit.value_and_grads(loss, list(layer.parameters()), create_graph=True)
    assert_same_bits(grads, list(expected))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_loss_that_is_listed_several_times_is_no_writer(device: torch.device, count: int) -> None:
    """The engine adds its seeds in place."""
    w = torch.ones(3, device=device, requires_grad=True)
    loss = (w + 1.0).sum()
    _, grad = gradkit.value_and_grads([loss] * count, w)
    assert torch.equal(grad, torch.full_like(w, count))
