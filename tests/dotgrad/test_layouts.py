"""A written `.grad` has the layout of a first accumulation, whatever the gradient's is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.helpers import same_bits, unchanged

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta")

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
    optimizer = torch.optim.ASGD([sparse, other], lr=0.1)
    with unchanged(sparse, other), pytest.raises(gradkit.UnsupportedGraphError, match="to_sparse"):
        gradkit.step_(optimizer, [other], [torch.ones_like(other)])
    assert sparse.grad is not None
    sparse.grad = sparse.grad.to_sparse()
    gradkit.step_(optimizer, [other], [torch.ones_like(other)])


def in_inference_mode(device: torch.device) -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 2, device=device)


Sum = tuple[Tensor, Tensor, Tensor]  # a leaf, its gradient, and its .grad
# What torch cannot add in place, and what the message says is to be done.
NOT_ADDED: dict[str, tuple[Callable[[Tensor], Sum], str]] = {
    "inference mode": (
        lambda e: (e.clone(), e, in_inference_mode(e.device)), "leaf.grad = leaf.grad.clone()",
    ),
    "other sparse dimensions": (
        lambda e: (e.clone(), e.to_sparse(), e.to_sparse(1)), "leaf.grad = leaf.grad.to_dense()",
    ),
    "compressed columns": (
        lambda e: (e.to_sparse_csc(), e.to_sparse_csc(), e.to_sparse_csc()),
        "leaf.grad = leaf.grad.to_dense().to_sparse()",
    ),
    "rows and coordinates": (
        lambda e: (e.to_sparse_csr(), e.to_sparse_csr(), e.to_sparse()),
        "leaf.grad = leaf.grad.to_dense().to_sparse()",
    ),
    "float8": (
        lambda e: (e.to(torch.float8_e5m2),) * 3,
        "leaf.grad, leaf.grad_dtype = None, torch.float32",
    ),
    "another shape": (lambda e: (e[:, :1], e[:, :1], e), "leaf.grad = None"),
}  # fmt: skip


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("name", NOT_ADDED)
def test_what_cannot_be_added_in_place_is_refused_first(
    device: torch.device, name: str, hooks: bool
) -> None:
    make, fix = NOT_ADDED[name]
    value, grad, total = make(torch.eye(2, device=device))
    leaf = nn.Parameter(value if value.shape == total.shape else total.clone())
    leaf.grad = total
    if value.shape != total.shape:
        leaf.data = value  # which leaves the former .grad
    leaves, grads = with_a_plain_one(leaf, grad)
    leaves[0].grad = torch.ones(2, device=device)
    expected = r"params\[1\]: expected a .grad that can be added to in place, got a "
    with unchanged(*leaves), pytest.raises(gradkit.UnsupportedGraphError, match=expected) as raised:
        gradkit.add_grads_(leaves, grads, hooks=hooks)
    assert f"What to do: {fix}" in str(raised.value)
    exec(fix, {"leaf": leaf, "torch": torch})
    before = 0 if leaf.grad is None else leaf.grad.to_dense().clone()
    grads[1] = grad.float() if name == "float8" else grad.to_dense()
    if leaf.layout != torch.strided:
        grads[1] = grads[1].to_sparse()
    gradkit.add_grads_(leaves, grads, hooks=hooks)
    assert leaves[0].grad.tolist() == [2, 2]
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.to_dense(), before + grads[1].to_dense())
