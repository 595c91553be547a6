"""A written `.grad` has the layout of a first accumulation, whatever the gradient's is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.helpers import same_bits, unchanged

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(4, 3).T,
    "every second row": lambda: torch.randn(6, 4)[::2],
    "expanded": lambda: torch.randn(4).expand(3, 4),
    "zeros without memory": lambda: torch._efficientzerotensor((3, 4)),
    "a graph": lambda: torch.randn(3, 4, requires_grad=True) * 2,
}
DENSE = ("contiguous", "transposed", "every second row")
SPARSE = {"sparse": torch.sparse_coo, "rows of a sparse matrix": torch.sparse_csr}
FITTING = [
    *((leaf, grad) for leaf in DENSE for grad in (*LAYOUTS, "sparse")),
    *((leaf, grad) for leaf in SPARSE for grad in ("sparse", leaf)),
]
OTHERS = [
    *((leaf, "rows of a sparse matrix") for leaf in (*DENSE, "sparse")),
    *((leaf, grad) for leaf in SPARSE for grad in DENSE),
]


def tensor(layout: str, device: torch.device) -> Tensor:
    if layout not in SPARSE:
        return LAYOUTS[layout]().to(device)
    return torch.randn(3, 4, device=device).relu().to_sparse(layout=SPARSE[layout])


def with_a_plain_one(leaf: Tensor, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return leaves and gradients, of which another is not to be changed if one is refused."""
    plain = nn.Parameter(torch.ones(2, device=leaf.device))
    return [plain, leaf], [torch.ones_like(plain), grad]


CALLS = [gradkit.write_grads_, gradkit.add_grads_]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("leaf_layout", "layout"), FITTING)
def test_the_layout_is_that_of_backward(
    device: torch.device, leaf_layout: str, layout: str, call: Any
) -> None:
    leaf, grad = nn.Parameter(tensor(leaf_layout, device)), tensor(layout, device)
    value = grad.detach().clone()
    call(*with_a_plain_one(leaf, grad))
    written, leaf.grad = leaf.grad, None
    assert written is not None
    assert same_bits(written, value)
    assert not written.requires_grad
    leaf.backward(grad.detach())  # a gradient that somebody else holds
    assert leaf.grad is not None
    assert written.layout == leaf.grad.layout
    if written.layout == torch.strided:
        assert written.stride() == leaf.grad.stride()
        written += 1
        assert same_bits(grad.detach().clone(), value)


def step_(leaves: list[Tensor], grads: list[Tensor]) -> None:
    gradkit.step_(torch.optim.SGD(leaves, lr=0.1), leaves, grads)


@pytest.mark.parametrize("call", [*CALLS, step_])
@pytest.mark.parametrize(("leaf_layout", "layout"), OTHERS)
def test_what_a_grad_cannot_hold_is_refused(
    device: torch.device, leaf_layout: str, layout: str, call: Any
) -> None:
    leaf, grad = nn.Parameter(tensor(leaf_layout, device)), tensor(layout, device)
    leaves, grads = with_a_plain_one(leaf, grad)
    fix = "to_sparse" if leaf_layout in SPARSE else "to_dense"
    with unchanged(*leaves), pytest.raises(gradkit.StructureError, match=fix) as raised:
        call(leaves, grads)
    assert f"grads[1]: expected a gradient of layout {leaf.layout}" in str(raised.value)
    if call is not step_ or leaf.layout != torch.sparse_csr:  # whose step fails in torch
        call(leaves, [grads[0], getattr(grad, fix)()])


def test_a_grad_that_cannot_be_put_back_is_left_alone(device: torch.device) -> None:
    sparse, other = (
        nn.Parameter(tensor("sparse", device)),
        nn.Parameter(torch.ones(2, device=device)),
    )
    (sparse @ torch.ones(4, 2, device=device)).sum().backward()  # leaves a dense one
    optimizer = torch.optim.SGD([sparse, other], lr=0.1)
    with unchanged(sparse, other), pytest.raises(gradkit.UnsupportedGraphError, match="to_sparse"):
        gradkit.step_(optimizer, [other], [torch.ones_like(other)])
    assert sparse.grad is not None
    sparse.grad = sparse.grad.to_sparse()
    gradkit.step_(optimizer, [other], [torch.ones_like(other)])
