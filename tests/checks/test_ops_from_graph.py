"""Operations that torch.func gets wrong, called where no mode sees them: right, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gradkit
from gradkit import func

Operation = Callable[[Tensor], Tensor]


def unseen(operation: Operation) -> Operation:
    def call(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return operation(x)

    return call


def other(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape) / 3


def distances(x: Tensor) -> Tensor:
    return torch.cdist(x, other(x)).sum(1)


@torch.jit.script
def scripted_distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y).sum(1)


def callback(x: Tensor) -> Tensor:
    return functional.triplet_margin_with_distance_loss(
        x,
        other(x),
        other(x) + 9,
        distance_function=lambda a, b: torch.cdist(a, b).sum(1),
        margin=100.0,
        reduction="none",
    )


def selected(x: Tensor) -> Tensor:
    mask = torch.arange(2 * x.numel(), device=x.device).reshape(2, *x.shape) % 3 == 0
    return torch.masked_select(x * x, mask)


def filled(x: Tensor) -> Tensor:
    first = torch.zeros(1, dtype=torch.long, device=x.device)
    return x.index_fill(0, first, x.sum()).square().sum(1)


def rolled(x: Tensor) -> Tensor:
    return torch.roll(x.sum(), 1) * x[0]


def normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x * 2, x.shape[-1:], other(x)[0] + 1).square().sum(1)


ROWS: dict[str, Operation] = {
    "torch.jit.script": lambda x: scripted_distances(x, other(x)),
    "a callback": callback,
    "cdist": unseen(distances),
    "masked_select": unseen(selected),
    "index_fill": unseen(filled),
    "roll": unseen(rolled),
    "layer_norm": unseen(normed),
}
every_row = pytest.mark.parametrize("fn", ROWS.values(), ids=ROWS)


def point(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(3, 2, generator=generator, dtype=torch.float64).to(device)


@every_row
@pytest.mark.filterwarnings("ignore::gradkit.GradkitWarning")
def test_rows_in_batches(device: torch.device, fn: Operation) -> None:
    x = point(device)
    leaf = x.clone().requires_grad_()
    expected = [torch.autograd.grad(y, leaf, retain_graph=True)[0] for y in fn(leaf)]
    torch.testing.assert_close(func.per_loss_grads(fn, chunk_size=2)(x), torch.stack(expected))


@pytest.mark.parametrize("name", ["cdist", "masked_select", "index_fill", "roll"])
def test_a_sample_at_a_time(device: torch.device, name: str) -> None:
    x = point(device)
    fn = ROWS[name]
    samples = func.per_sample_grads(lambda x, scale: (fn(x) * scale).sum())
    with pytest.raises(gradkit.UnsupportedGraphError, match=rf"torch\.{name}: expected"):
        samples(x, torch.ones(2, device=device))


def test_the_derivative_of_a_sample(device: torch.device) -> None:
    x, scales = point(device), torch.ones(2, device=device)
    samples = func.per_sample_grads(lambda x, scale: (ROWS["layer_norm"](x) * scale).sum())
    assert samples(x, scales).shape == (2, 3, 2)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.layer_norm: expected"):
        func.value_and_grads(lambda x: samples(x, scales).sum())(x)


FORWARD: dict[str, Operation] = {
    "cholesky_inverse": torch.cholesky_inverse,
    "scatter_reduce": lambda a: torch.scatter_reduce(
        a, 0, torch.zeros_like(a, dtype=torch.long), a, "prod"
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_over_reverse(device: torch.device, name: str) -> None:
    a = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=torch.float64, device=device)
    loss = unseen(lambda a: FORWARD[name](a).square().sum())
    with pytest.raises(gradkit.UnsupportedGraphError, match=name):
        func.hvp(loss, a, a)
    _, product = func.hvp(loss, a, a, mode="reverse-over-reverse")
    leaf = a.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    torch.testing.assert_close(product, torch.autograd.grad((grad * a).sum(), leaf)[0])


@pytest.mark.parametrize("instance_norm", [False, True])
def test_the_norms_of_a_sample(device: torch.device, instance_norm: bool) -> None:
    """An instance_norm is a batch_norm of other dimensions, and does not mix the samples."""

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            if instance_norm:
                return functional.instance_norm(x[None], weight=weight).square().sum()
            return functional.batch_norm(x, None, None, weight, training=True).square().sum()

    weight, x = torch.ones(2, device=device), point(device).float().T.expand(4, 2, 3)
    samples = func.per_sample_grads(loss)
    if instance_norm:
        expected = [func.value_and_grads(loss)(weight, each)[1] for each in x]
        torch.testing.assert_close(samples(weight, x), torch.stack(expected))
    else:
        with pytest.raises(gradkit.UnsupportedGraphError, match="mixes the samples"):
            samples(weight, x.transpose(1, 2))
