"""Parameters of every sparse layout: the gradients of torch, or an error that says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from tests.helpers import same_bits, unchanged

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR) tensor support is in beta")

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}


def matrix(layout: str, device: torch.device) -> Tensor:
    dense = torch.eye(3, device=device) + torch.randn(3, 3, device=device).relu()
    return dense.to_sparse(layout=LAYOUTS[layout]).requires_grad_()


def by_product(w: Tensor) -> Tensor:
    """Losses whose gradients are dense."""
    return (w @ torch.ones(3, 2, device=w.device)).square().sum(1)


def by_entries(w: Tensor) -> Tensor:
    """Losses whose gradients are sparse."""
    values = w.coalesce().values() if w.is_sparse else w.values()
    return torch.stack([values.square().sum(), values.sum()])


LOSSES = [by_product, by_entries]
each = pytest.mark.parametrize(
    ("layout", "losses_of"),
    [(layout, fn) for layout in LAYOUTS for fn in LOSSES],
    ids=lambda x: getattr(x, "__name__", x),
)


@pytest.fixture(params=["no hook", "a hook"])
def _hook(request: pytest.FixtureRequest) -> None:
    if request.param == "a hook":
        torch.ones(1, requires_grad=True).register_hook(lambda grad: None)


def rows_of(losses: Tensor, w: Tensor) -> list[Tensor]:
    """Return the gradient of each element, by plain torch."""
    return [torch.autograd.grad(loss, w, retain_graph=True)[0] for loss in losses]


def dense(rows: list[Tensor]) -> Tensor:
    return torch.stack([row.to_dense() for row in rows])


@each
@pytest.mark.usefixtures("_hook")
def test_gradients_are_those_of_torch(
    device: torch.device, layout: str, losses_of: Callable[[Tensor], Tensor]
) -> None:
    w = matrix(layout, device)
    losses = losses_of(w)
    rows = rows_of(losses, w)
    (whole,) = torch.autograd.grad(losses.sum(), w, retain_graph=True)
    _, grad = gradkit.value_and_grads(losses.sum(), w, unused="error", retain_graph=True)
    assert same_bits(grad, whole)
    with gradkit.checked():
        assert same_bits(gradkit.value_and_grads(losses.sum(), w, retain_graph=True)[1], whole)
    by_element = gradkit.per_loss_grads(losses, w, retain_graph=True)
    assert same_bits(by_element.to_dense(), dense(rows))
    by_name = gradkit.per_loss_grads(dict(enumerate(losses.unbind())), w, retain_graph=True)
    for index, row in enumerate(rows):
        assert same_bits(by_name[index], row)
    total = gradkit.combine(by_name, dict.fromkeys(by_name, 1.0))
    torch.testing.assert_close(total.to_dense(), dense(rows).sum(0))


@each
@pytest.mark.usefixtures("_hook")
@pytest.mark.filterwarnings("ignore:gradkit fell back from a batched pass")
def test_what_is_made_of_gradients_is_that_of_their_rows(
    device: torch.device, layout: str, losses_of: Callable[[Tensor], Tensor]
) -> None:
    w = matrix(layout, device)
    losses = losses_of(w)
    flat = dense(rows_of(losses, w)).flatten(1)
    norms = flat.norm(dim=1)
    keep: Any = {"retain_graph": True}
    torch.testing.assert_close(gradkit.gram(losses, w, **keep), flat @ flat.T)
    torch.testing.assert_close(gradkit.per_sample_norms(losses, w, **keep), norms)
    _, total = gradkit.value_and_reduced_grads(losses.sum(), w, lambda g: g.sum(), **keep)
    torch.testing.assert_close(total.to_dense(), flat.sum())
    factors = (1.0 / (norms + 1e-6)).clamp(max=1)
    clipped = gradkit.clipped_sum(losses, w, 1.0)
    torch.testing.assert_close(clipped.to_dense().flatten(), factors @ flat)


@each
@pytest.mark.usefixtures("_hook")
def test_functions_of_sparse_tensors(
    device: torch.device, layout: str, losses_of: Callable[[Tensor], Tensor]
) -> None:
    w = matrix(layout, device).detach()
    like = w.clone().requires_grad_()
    losses = losses_of(like)
    (expected,) = torch.autograd.grad(losses.sum(), like)
    called: list[Tensor] = []

    def fn(w: Tensor) -> Tensor:
        called.append(w)
        return losses_of(w).sum()

    if layout == "coo":
        _, grad = gradkit.func.value_and_grads(fn)(w)
        assert same_bits(grad.to_dense(), expected.to_dense())
        _, pull = gradkit.func.vjp(losses_of, w)
        (grad,) = pull(torch.ones(len(losses), device=device))
        assert same_bits(grad.to_dense(), expected.to_dense())
        return
    for call in (gradkit.func.value_and_grads(fn), lambda w: gradkit.func.vjp(fn, w)):
        with unchanged(w), pytest.raises(gradkit.LeafTypeError, match="to_sparse") as raised:
            call(w)
        assert str(raised.value).startswith("args[0]: expected a dense tensor, or a sparse one")
    assert not called


def test_a_tangent_of_a_sparse_tensor_is_refused(device: torch.device) -> None:
    w = matrix("coo", device).detach()
    with pytest.raises(gradkit.UnsupportedGraphError, match="vjp in place of jvp"):
        gradkit.func.jvp(by_product, (w,), (w,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_differentiated_twice_is_dense(device: torch.device, layout: str) -> None:
    w = matrix(layout, device)

    def inner_loss(w: Tensor, _: Tensor) -> Tensor:
        raise AssertionError("it was called")

    outer = torch.ones(1, device=device)
    with unchanged(w), pytest.raises(gradkit.LeafTypeError, match="a dense tensor"):
        gradkit.meta.unroll(inner_loss, {"w": w}, [outer], gradkit.meta.sgd(0.1))
    with unchanged(w), pytest.raises(gradkit.LeafTypeError, match="a dense tensor"):
        gradkit.meta.implicit(inner_loss, inner_loss)(w, outer)


def test_a_pre_hook_of_a_sparse_leaf_is_refused(device: torch.device) -> None:
    for layout in LAYOUTS:
        w = matrix(layout, device)
        node = w.clone().grad_fn
        assert node is not None
        accumulate, _ = node.next_functions[0]
        assert accumulate is not None
        accumulate.register_prehook(lambda grads: None)
        with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="a pre-hook"):
            gradkit.value_and_grads(by_product(w).sum(), w)


def test_a_write_on_a_sparse_gradient_is_found(device: torch.device) -> None:
    w = matrix("coo", device)

    def double(grad: Tensor) -> None:
        grad._values().mul_(2)

    w.register_hook(double)
    expected = matrix("coo", device)
    loss = by_entries(w)[1]
    with pytest.warns(gradkit.GradkitWarning, match="double"), gradkit.checked():
        _, grad = gradkit.value_and_grads(loss, w)
    assert expected.layout == grad.layout
