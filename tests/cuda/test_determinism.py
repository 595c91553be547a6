"""Bit laws over operations whose usual kernels on CUDA add in no fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.helpers import assert_same_bits


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    # The kernel of cuDNN is chosen by time, otherwise.
    torch.use_deterministic_algorithms(True)
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        yield
    torch.use_deterministic_algorithms(False)


def index(device: torch.device) -> Tensor:
    """Return indices, most of them several times."""
    return torch.arange(512, device=device) % 7


def convolved(w: Tensor) -> Tensor:
    images, filters = w.sin().expand(4, 2, -1, -1), w[:2, :6].reshape(2, 2, 1, 3)
    return nn.functional.conv2d(images, filters)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda w: nn.functional.embedding(index(w.device), w),
    "indexing": lambda w: w[index(w.device)],
    "index_select": lambda w: w.index_select(0, index(w.device)),
    "index_add": lambda w: torch.zeros_like(w).index_add(0, index(w.device), w.repeat(64, 1)),
    "gather": lambda w: w.gather(0, index(w.device).unsqueeze(1).expand(-1, w.shape[1])),
    "convolution": convolved,
    "bmm": lambda w: torch.bmm(w.expand(4, -1, -1), w.sin().expand(4, -1, -1).mT),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_joint_pass_has_the_bits_of_backward(device: torch.device, name: str) -> None:
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()

    def losses() -> list[Tensor]:
        out = OPERATIONS[name](w)
        return [(out * torch.linspace(0.1, 2, out.shape[-1], device=device)).sum(), out.sin().sum()]

    _, (grad,) = gradkit.value_and_grads(losses(), [w])
    for _ in range(3):
        w.grad = None
        torch.autograd.backward(losses())
        assert_same_bits([grad], [w.grad])
