"""hvp: both modes, against torch.autograd.functional.hvp and dense Hessians."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradkit
from gradkit import func
from tests.helpers import World, assert_owned, assert_same_bits
from tests.strategies import HOOKLESS, Program, build, programs

MODES = ("forward-over-reverse", "reverse-over-reverse")
both_modes = pytest.mark.parametrize("mode", MODES)
TWICE_DIFFERENTIABLE = tuple(op for op in HOOKLESS if op != "halve")


@both_modes
@given(program=programs(ops=TWICE_DIFFERENTIABLE, leaf_hooks=False))
def test_a_product_is_that_of_torch(device: torch.device, mode: Any, program: Program) -> None:
    dtype = torch.float64
    leaves = [leaf.detach() for leaf in build(program, device, dtype).leaves]
    along = [torch.randn_like(leaf) for leaf in leaves]

    def total(*leaves: Tensor) -> Any:
        return sum(loss.sum() for loss in build(program, device, dtype, leaves).losses)

    _, expected = torch.autograd.functional.hvp(total, tuple(leaves), tuple(along))
    world = World(*leaves, *along)
    try:
        grads, products = func.hvp(
            lambda *leaves: build(program, device, dtype, leaves).losses,
            tuple(leaves),
            tuple(along),
            mode=mode,
        )
    except gradkit.DetachedLossError:
        assert not any(p.any() for p in expected)
        return
    _, first = func.value_and_grads(lambda t: build(program, device, dtype, t).losses)(leaves)
    torch.testing.assert_close(list(grads), first, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(products, expected, rtol=1e-9, atol=1e-9)
    assert_owned([*grads, *products], [*leaves, *leaves])
    world.assert_unchanged()


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_torch_whose_forward_mode_fails(
    device: torch.device, reduction: str, some: bool
) -> None:
    """The formula of mse_loss writes on the tangent of a constant, a ZeroTensor."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device)
    call, params, buffers = func.make_functional(model)
    x, y = (torch.randn(5, n, dtype=torch.float64, device=device) for n in (3, 2))

    def loss(params: Any) -> Tensor:
        return functional.mse_loss(call(params, buffers, x)[0], y, reduction=reduction).sum()

    along = {
        name: None if some and name != "2.bias" else torch.randn_like(p)
        for name, p in params.items()
    }
    fails = reduction == "mean"
    with pytest.warns(gradkit.GradkitWarning, match="hvp fell back") if fails else nullcontext():
        grads, products = func.hvp(loss, params, along)
    expected = func.hvp(loss, params, along, mode="reverse-over-reverse")
    torch.testing.assert_close((grads, products), expected, rtol=1e-10, atol=1e-10)
    leaves = tuple(p.detach() for p in params.values())
    v = tuple(
        torch.zeros_like(p) if t is None else t for p, t in zip(leaves, along.values(), strict=True)
    )
    _, theirs = torch.autograd.functional.hvp(
        lambda *tensors: loss(dict(zip(params, tensors, strict=True))), leaves, v
    )
    torch.testing.assert_close(tuple(products.values()), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("operation", [torch.special.gammainc, torch.special.gammaincc])
def test_an_operation_without_forward_mode(device: torch.device, operation: Any) -> None:
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, device=device)
    order, v = torch.tensor(3.0, dtype=torch.float64, device=device), torch.ones_like(x)

    def loss(x: Tensor) -> Tensor:
        return operation(order, x).sum()

    with pytest.warns(gradkit.GradkitWarning, match="forward mode failed on igamma"):
        got = func.hvp(loss, x, v)
    sign = 1 if operation is torch.special.gammainc else -1
    right = [sign * y * torch.exp(-x) / 2 for y in (x**2, 2 * x - x**2)]
    torch.testing.assert_close(list(got), right)
    # By the order, torch has none of any mode.
    with pytest.raises(gradkit.UnsupportedGraphError, match="by a, which has none"):
        func.hvp(lambda a: operation(a, x).sum(), v, v)


@both_modes
@pytest.mark.parametrize("compiled", [False, True])
def test_expanded_tensors(device: torch.device, mode: Any, compiled: bool) -> None:
    """torch's forward mode writes on a tangent of the layout of the point."""
    x = torch.tensor([[1.0, 2.0, 3.0]], device=device).expand(2, 3)
    v = torch.tensor([2.0, -1.0], device=device)[:, None].expand(2, 3)

    def call(x: Tensor, v: Tensor) -> Any:
        return func.hvp(lambda x: x.sin().sum(), x, v, mode=mode)

    run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    torch.testing.assert_close(run(x, v), (x.cos(), -x.sin() * v))


@both_modes
def test_a_product_is_that_of_the_dense_hessian(device: torch.device, mode: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    model.to(device)
    call, params, buffers = func.make_functional(model)
    x = torch.randn(5, 3, dtype=torch.float64, device=device)
    y = torch.randint(2, (5,), device=device)
    along = {name: torch.randn_like(p) for name, p in params.items()}

    def loss(p: Any) -> Tensor:
        return functional.cross_entropy(call(p, buffers, x)[0], y)

    names, shapes = list(params), [p.shape for p in params.values()]

    def of_vector(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        return loss({n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)})

    flat = torch.cat([p.detach().flatten() for p in params.values()])
    dense = torch.autograd.functional.hessian(of_vector, flat)
    direction = torch.cat([v.flatten() for v in along.values()])
    _, products = func.hvp(loss, params, along, mode=mode)
    assert list(products) == names
    torch.testing.assert_close(
        torch.cat([p.flatten() for p in products.values()]), dense @ direction
    )


@both_modes
def test_the_primals_are_positional_arguments_or_one_tree(device: torch.device, mode: Any) -> None:
    a, b = torch.tensor([1.0, 2.0], device=device), torch.tensor(3.0, device=device)
    grads, products = func.hvp(
        lambda a, tree: (a**2 * tree["b"]).sum(),
        (a, OrderedDict(b=b, none=None)),
        (torch.ones_like(a), OrderedDict(b=None, none=None)),
        mode=mode,
    )
    assert_same_bits(
        [grads[0], grads[1]["b"], products[0], products[1]["b"]],
        [2 * a * b, (a**2).sum(), 2 * b.expand(2), (2 * a).sum()],
    )
    assert grads[1]["none"] is None
    alone = func.hvp(lambda a: (a**3).sum(), a, a, mode=mode)
    assert_same_bits(alone, [3 * a**2, 6 * a * a])
    listed = func.hvp(lambda t: (t[0] ** 3).sum(), [a], [a], mode=mode)
    assert isinstance(listed[1], list)


@both_modes
def test_several_losses_are_added(device: torch.device, mode: Any) -> None:
    a = torch.tensor([1.0, 2.0], device=device)
    _, product = func.hvp(lambda a: {"x": (a**2).sum(), "y": [(a**3).sum()]}, a, a, mode=mode)
    torch.testing.assert_close(product, 2 * a + 6 * a * a)


@both_modes
def test_tied_and_frozen(device: torch.device, mode: Any) -> None:
    w = torch.tensor([1.0, 2.0], device=device)
    frozen = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    v = torch.tensor([1.0, -1.0], device=device)
    tree, along = {"a": w, "b": w, "f": frozen}, {"a": v, "b": v.clone(), "f": None}
    grads, products = func.hvp(
        lambda t: (t["a"] ** 2 * t["b"] * t["f"]).sum(), tree, along, mode=mode
    )
    assert_same_bits([grads["a"], grads["b"]], [3 * w**2] * 2)
    torch.testing.assert_close([products["a"], products["b"]], [6 * w * v] * 2)
    assert not grads["f"].any()
    assert not products["f"].any()
    with pytest.raises(gradkit.StructureError, match=r"tangents\['b'\].*same tensor"):
        func.hvp(lambda t: (t["a"] * t["b"]).sum(), tree, {**along, "b": -v}, mode=mode)


@both_modes
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_is_replaced_by_its_formula(
    device: torch.device, mode: Any, causal: bool
) -> None:
    q = torch.randn(1, 2, 4, 8, device=device)
    v = torch.randn_like(q)

    def loss(q: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(q, q * 2, q.sin(), is_causal=causal)
        return out.square().sum()

    _, product = func.hvp(loss, q, v, mode=mode)
    with sdpa_kernel(SDPBackend.MATH):
        _, expected = torch.autograd.functional.hvp(loss, q, v)
    torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-4)


@both_modes
def test_a_transformer_layer(device: torch.device, mode: Any) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().to(device)
    call, params, buffers = func.make_functional(model)
    x = torch.randn(2, 3, 8, dtype=torch.float64, device=device)
    along = {name: torch.randn_like(p) for name, p in params.items()}
    _, products = func.hvp(
        lambda p: call(p, buffers, x)[0].square().sum(), params, along, mode=mode
    )
    with sdpa_kernel(SDPBackend.MATH):
        grads = torch.autograd.grad(
            model(x).square().sum(), list(model.parameters()), create_graph=True
        )
        inner = sum((g * v).sum() for g, v in zip(grads, along.values(), strict=True))
        expected = torch.autograd.grad(inner, list(model.parameters()))
    torch.testing.assert_close(list(products.values()), list(expected))


@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_times_a_scalar_keeps_its_dtype(
    device: torch.device, mode: Any, dtype: torch.dtype
) -> None:
    w = torch.tensor(1.5, dtype=dtype, device=device)
    _, product = func.hvp(lambda w: ((w * 2.0 + 1e-3) ** 3).sum(), w, w, mode=mode)
    assert product.dtype == dtype


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(device: torch.device, cell: Any) -> None:
    model = cell(2, 3, batch_first=True).double().to(device)
    call, params, buffers = func.make_functional(model)
    x = torch.randn(2, 4, 2, dtype=torch.float64, device=device)
    along = {name: torch.randn_like(p) for name, p in params.items()}

    def loss(p: Any) -> Tensor:
        return call(p, buffers, x)[0][0].square().sum()

    eps = 1e-6
    ahead, behind = (
        func.value_and_grads(loss)({n: p.detach() + s * along[n] for n, p in params.items()})[1]
        for s in (eps, -eps)
    )
    for mode in MODES:
        _, products = func.hvp(loss, params, along, mode=mode)
        for name in params:
            difference = (ahead[name] - behind[name]) / (2 * eps)
            torch.testing.assert_close(products[name], difference, rtol=1e-5, atol=1e-7)


def test_two_threads_at_a_time(device: torch.device) -> None:
    """torch's levels of forward mode, and its choice of attention, are those of the process."""
    w = torch.tensor([1.0, 2.0], device=device)
    flags = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled
    before = [flag() for flag in flags]

    def run(_: int) -> Tensor:
        return func.hvp(lambda w: (w**3).sum(), w, torch.ones_like(w))[1]

    with ThreadPoolExecutor(2) as pool:
        for product in pool.map(run, range(200)):
            assert_same_bits([product], [6 * w])
    assert [flag() for flag in flags] == before


def test_a_named_tuple_is_one_tree(device: torch.device) -> None:
    w = torch.tensor([1.0, 2.0], device=device)
    pair = Pair(w, w + 1)
    grads, products = func.hvp(lambda p: (p.a**2 * p.b).sum(), pair, Pair(w, None))
    assert isinstance(products, Pair)
    assert_same_bits([grads.b, products.b], [w**2, 2 * w * w])


class Pair(NamedTuple):
    a: Tensor
    b: Tensor | None


@pytest.mark.parametrize(
    "op",
    [
        torch.square,
        lambda w: functional.prelu(w, w[0]),
        lambda w: functional.embedding(torch.tensor([0, 1], device=w.device), w, padding_idx=0),
        lambda w: torch.logcumsumexp(w, 0),
    ],
    ids=["square", "prelu", "embedding", "logcumsumexp"],
)
def test_what_is_computed_under_no_grad_is_a_constant(device: torch.device, op: Any) -> None:
    """Of a jvp, too, also where the operation runs by a formula."""

    def loss(w: Tensor) -> Tensor:
        with torch.no_grad():
            factor = op(w)
        total: Tensor = (factor * w[: len(factor)]).sum()
        return total

    w = torch.rand(3, 2, device=device, dtype=torch.float64) + 1
    _, grad = func.value_and_grads(loss)(w)
    torch.testing.assert_close(func.jvp(loss, w, w)[1], (grad * w).sum())
