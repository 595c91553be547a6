"""Calls that look at the graph refuse what torch gets wrong at its values; the advice is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import func

D = torch.float64
ZERO = torch.zeros(2, dtype=torch.long)
Call = Callable[[Tensor, Tensor], Any]
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")  # is in beta


def extreme(reduce: str, x: Tensor) -> Tensor:
    own = x.new_full((1,), 5.0)
    return own.scatter_reduce(0, ZERO.to(x.device), x, reduce, include_self=False).sum()


def least_by_index(x: Tensor) -> Tensor:
    own = x.new_full((1, 2), 5.0)
    return own.index_reduce(0, ZERO.to(x.device), x, "amin", include_self=False).sum()


def scaled(x: Tensor) -> Tensor:
    return torch.linalg.det(1e-8 * x)


def of_two(x: Tensor) -> Tensor:
    return x.new_ones(1).scatter_reduce(0, ZERO.to(x.device), x, "prod").sum()


SINGULAR, EYE = [[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]
# The function, where torch's first derivative is wrong, and what the message names.
FIRST: dict[str, tuple[Callable[[Tensor], Tensor], Any, str]] = {
    "det": (torch.linalg.det, SINGULAR, "singular matrix"),
    "det of a batch": (lambda x: torch.det(x).sum(), [SINGULAR, EYE], "singular matrix"),
    "amax": (lambda x: extreme("amax", x), [5.0, 3.0], "amax with include_self=False"),
    "amin": (lambda x: extreme("amin", x), [5.0, 8.0], "amin with include_self=False"),
    "index_reduce": (least_by_index, [[5.0, 6.0], [7.0, 9.0]], "amin with include_self=False"),
}
SECOND = {
    "det of equal singular values": (scaled, EYE, "equal singular values"),
    "det of zeros": (torch.linalg.det, [[0.0] * 3] * 3, "equal singular values"),
    "sinc": (lambda x: torch.sinc(x).sum(), [0.0, 1e-9, 1.0], "sinc near zero"),
    "i1": (lambda x: torch.special.i1(x).sum(), [0.0, 1e-9, 1.0], "i1 near zero"),
    "prod": (of_two, [0.0, 0.0], "several zeros"),
    "amax": FIRST["amax"],
}
LOOKING: dict[str, Call] = {
    "per_loss_grads": lambda y, x: gradkit.per_loss_grads([y, 2 * y], x)[0],
    "simultaneous_grads": lambda y, x: gradkit.simultaneous_grads([y, y * 1], [x, x])[0],
    "unused='error'": lambda y, x: gradkit.value_and_grads(y, x, unused="error")[1],
    "vjp": lambda y, x: gradkit.vjp([y, y], x, [torch.ones_like(y), None], unused="error"),
}


def leaf(point: Any, device: torch.device) -> Tensor:
    return torch.tensor(point, dtype=D, device=device, requires_grad=True)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("way", LOOKING)
def test_a_wrong_gradient_is_refused_and_the_advice_is_right(
    device: torch.device, name: str, way: str
) -> None:
    fn, point, named = FIRST[name]
    x = leaf(point, device)
    with pytest.raises(gradkit.UnsupportedGraphError, match=named) as caught:
        LOOKING[way](fn(x), x)
    assert "gradkit.func" in str(caught.value)
    assert "gradkit.checked()" in str(caught.value)
    right = differences(fn, x.detach())
    torch.testing.assert_close(func.value_and_grads(fn)(x)[1].detach(), right, rtol=1e-6, atol=1e-6)
    with gradkit.checked():
        got = LOOKING[way](fn(x), x)
    torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)


def differences(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    units = torch.eye(x.numel(), dtype=D, device=x.device).reshape(-1, *x.shape)
    return torch.stack([(fn(x + h) - fn(x - h)) / 2e-6 for h in 1e-6 * units]).reshape(x.shape)


@pytest.mark.parametrize("name", SECOND)
def test_a_wrong_second_derivative_is_refused_and_the_advice_is_right(
    device: torch.device, name: str
) -> None:
    fn, point, named = SECOND[name]
    x = leaf(point, device)
    along = torch.arange(1.0, x.numel() + 1, dtype=D, device=device).reshape(x.shape)
    with pytest.raises(gradkit.UnsupportedGraphError, match=named):
        gradkit.value_and_grads(fn(x), x, create_graph=True)
    right = func.hvp(fn, x.detach(), along)[1]
    torch.testing.assert_close(
        right, func.hvp(fn, x.detach(), along, mode="reverse-over-reverse")[1]
    )
    with gradkit.checked():
        _, grads = gradkit.value_and_grads(fn(x), x, create_graph=True)
        _, got = gradkit.value_and_grads((grads * along).sum() + (x * 0).sum(), x)
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("point", [SINGULAR, EYE, [[3.0, 1.0], [1.0, 2.0]]])
def test_what_torch_gets_right_is_not_refused(device: torch.device, point: Any) -> None:
    x = leaf(point, device)
    _, grads = gradkit.value_and_grads(torch.linalg.det(x), x, create_graph=True)
    adjugate = x.detach().flip(0, 1).mT * torch.tensor([[1, -1], [-1, 1]], device=device)
    torch.testing.assert_close(grads.detach(), adjugate.mT)
    _, second = gradkit.value_and_grads(grads.square().sum() / 2, x)
    torch.testing.assert_close(second, x.detach())
    if point != SINGULAR:
        assert len(gradkit.per_loss_grads([torch.det(x), x.sum()], x)) == 2


def test_ties_that_count_are_not_refused(device: torch.device) -> None:
    x = leaf([5.0, 3.0], device)
    own = x.new_full((1,), 5.0)
    value = own.scatter_reduce(0, ZERO.to(device), x, "amax").sum()  # the value is included
    assert gradkit.per_loss_grads([value, x.sum()], x)[0].tolist() == [0.5, 0]
    apart = x.new_full((3,), 5.0).scatter_reduce(
        0, ZERO.to(device), x - 1, "amax", include_self=False
    )
    assert gradkit.per_loss_grads([apart.sum(), x.sum()], x)[0].tolist() == [1, 0]
    far = leaf([0.5, 2.0], device)
    gradkit.value_and_grads(torch.sinc(far).sum(), far, create_graph=True)


class Passive(TorchDispatchMode):
    """Sees operators and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_below_a_dispatch_mode_torch_takes_another_rule(device: torch.device) -> None:
    x = leaf(EYE, device)
    value = torch.linalg.det(x)
    with Passive(), pytest.raises(gradkit.UnsupportedGraphError, match="equal singular values"):
        gradkit.value_and_grads(value, x, create_graph=True)
    with gradkit.checked(), pytest.raises(gradkit.UnsupportedGraphError, match="equal singular"):
        gradkit.value_and_grads(value, x, create_graph=True)
    gradkit.value_and_grads(value, x, create_graph=True)


def test_complex_singular_matrices_have_no_second_derivative(device: torch.device) -> None:
    x = torch.tensor(SINGULAR, dtype=torch.complex128, device=device, requires_grad=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="singular complex"):
        gradkit.value_and_grads(torch.linalg.det(x).real, x, create_graph=True)


def test_a_checkpoint_is_not_recomputed_for_this(device: torch.device) -> None:
    x, runs = leaf(SINGULAR, device), [0]

    def run(x: Tensor) -> Tensor:
        runs[0] += 1
        return torch.linalg.det(x + 1)

    value = checkpoint(run, x, use_reentrant=False)
    assert runs == [1]
    gradkit.per_loss_grads([value, x.sum()], x)
    assert runs == [2]


@pytest.mark.parametrize("first_order", [True, False])
def test_a_step_down_a_determinant_is_right(device: torch.device, first_order: bool) -> None:
    x = leaf(SINGULAR, device)

    def step(det: Callable[[Tensor], Tensor]) -> Tensor:
        opt = gradkit.meta.sgd(0.1)
        params: Tensor = gradkit.meta.unroll(
            lambda p, _, batch: det(p), x, [None, None], opt, first_order=first_order
        ).params
        return params

    def by_hand(a: Tensor) -> Tensor:
        return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]

    got, right = step(torch.linalg.det), step(by_hand)
    torch.testing.assert_close(got, right)
    grads = [gradkit.value_and_grads(params.square().sum(), x)[1] for params in (got, right)]
    torch.testing.assert_close(*grads)


def test_with_out_torch_raises_itself(device: torch.device) -> None:
    x = leaf(SINGULAR, device)
    for name in ("sinc", "det"):
        out = torch.empty((), dtype=D, device=device)
        operation = {"sinc": torch.sinc, "det": torch.linalg.det}[name]
        with gradkit.checked(), pytest.raises(RuntimeError, match="automatic differentiation"):
            operation(x, out=out)
