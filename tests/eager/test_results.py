"""Results are yours; derivatives of derivatives; hooks and modes around a call."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import gradkit
from gradkit._autograd import arrival_copies
from gradkit._core import ownership
from tests.helpers import Scribble, assert_owned, assert_same_bits, same_bits, unchanged


def test_no_stride_zero_and_no_shared_object(device: torch.device) -> None:
    a, b = (torch.randn(3, 2, device=device, requires_grad=True) for _ in range(2))
    seed = torch.ones((), device=device)
    _, grads = gradkit.value_and_grads((a + b).sum(), [a, b], weights=seed)
    assert_owned(grads, [a, b])
    grads[0].mul_(torch.arange(6, device=device).reshape(3, 2))
    assert torch.equal(grads[1], torch.ones(3, 2, device=device))


def test_overlapping_slices_of_one_cotangent_are_copied(device: torch.device) -> None:
    a = torch.randn(3, device=device, requires_grad=True)
    b = torch.randn(5, device=device, requires_grad=True)
    whole = torch.nn.functional.pad(a, (1, 1)) + b
    loss = (whole * torch.arange(5.0, device=device)).sum()
    _, grads = gradkit.value_and_grads(loss, [a, b])
    assert_owned(grads, [a, b])


def test_a_gradient_that_a_hook_or_a_function_keeps_is_copied(device: torch.device) -> None:
    kept: list[Tensor] = []

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, slope: Tensor) -> Tensor:
            ctx.slope = slope
            return x * slope

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return ctx.slope, None  # the caller's own tensor

    w = torch.randn(4, device=device, requires_grad=True)
    v = torch.randn(4, device=device, requires_grad=True)
    flat = v.view(2, 2)
    flat.register_hook(kept.append)
    slope = torch.ones(4, device=device)
    loss = Constant.apply(w, slope).sum() + (flat * flat).sum()
    _, (gw, gv) = gradkit.value_and_grads(loss, [w, v])
    gw.zero_()
    gv.zero_()
    assert torch.equal(slope, torch.ones(4, device=device))
    assert torch.equal(kept[0].view(-1), 2 * v.detach())


@pytest.mark.parametrize("checked", [False, True])
def test_what_is_ours_already_is_not_copied(
    device: torch.device, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ownership costs no memory, whatever hooks there are in the process."""
    copies: list[Tensor] = []

    def count(grad: Tensor, *_: Tensor) -> Tensor:
        copies.append(grad)
        return grad.clone()

    monkeypatch.setattr(arrival_copies, "_cloned", count)
    monkeypatch.setattr(ownership, "copy_for", count)
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    layer = nn.Linear(4, 4).to(device)
    loss = layer(torch.randn(3, 4, device=device)).exp().sum()
    with gradkit.checked() if checked else nullcontext():
        _, grads = gradkit.value_and_grads(loss, layer)
    assert len(copies) == (2 if checked else 0)
    assert_owned(grads.values(), layer.parameters())


IN_PLACE_HOOKS = {
    "intermediate": lambda z, a: z.register_hook(lambda grad: grad.clamp_(-1, 1)),
    "leaf": lambda z, a: a.register_hook(lambda grad: grad.mul_(0.1)),
    "node": lambda z, a: z.grad_fn.register_prehook(lambda grads: (grads[0].mul_(0.1),)),
}


@pytest.mark.parametrize("kind", IN_PLACE_HOOKS)
def test_a_hook_that_changes_its_gradient_in_place_spoils_no_sibling(
    device: torch.device, kind: str
) -> None:
    def build() -> tuple[Tensor, Tensor, Tensor]:
        a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
        z = a * 1
        IN_PLACE_HOOKS[kind](z, a)
        return ((z + b) ** 2).sum(), a, b

    loss, a, b = build()
    loss.backward()
    expected = [a.grad, b.grad]
    for call in (
        lambda loss, params: gradkit.value_and_grads(loss, params)[1],
        lambda loss, params: gradkit.per_loss_grads([loss], params)[0],
        # The leaves are also used by another loss, whose pass is another one.
        lambda loss, params: gradkit.per_loss_grads(
            [(params[0] * 2).sum() + (params[1] * 2).sum(), loss], params
        )[1],
        lambda loss, params: gradkit.simultaneous_grads([loss], [params])[0],
        lambda loss, params: gradkit.vjp(loss, params, torch.ones_like(loss)),
    ):
        loss, *params = build()
        if kind == "leaf":
            assert_same_bits(call(loss, params), expected)
            continue
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"params.*\[1\].*written in place"):
            call(loss, params)
        assert [param.grad for param in params] == [None, None]
        loss, *params = build()
        with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match="test_results.py, line"):
            assert_same_bits(call(loss, params), expected)


def test_what_a_hook_keeps_in_any_way_is_not_shared(device: torch.device) -> None:
    w = torch.ones(4, device=device, requires_grad=True)
    s = torch.ones(2, 2, device=device, requires_grad=True)
    h = w.view(2, 2)
    h.register_hook(lambda grad: setattr(s, "grad", grad))  # held from C++ alone
    _, grad = gradkit.value_and_grads((h * h).sum(), w)
    (s * 5).sum().backward()
    assert grad.tolist() == [2, 2, 2, 2]
    p = torch.ones(3, device=device, requires_grad=True)
    w = torch.ones(3, device=device, requires_grad=True)
    w.register_hook(lambda grad: p)  # with a history of its own
    for result in (gradkit.value_and_grads((w * w).sum(), w)[1], gradkit.per_loss_grads(w * w, w)):
        assert not result.requires_grad


def test_gradients_without_memory_of_their_own(device: torch.device) -> None:
    one = torch.ones(1, device=device, requires_grad=True)
    none = torch.ones(2, 0, 3, device=device, requires_grad=True)
    x = torch.randn(3, device=device, requires_grad=True)
    loss = one.expand(1).sum() + none.flip(0).sum() + torch.sgn(x).sum()
    params = [one, none, x]
    _, grads = gradkit.value_and_grads(loss, params, retain_graph=True)
    loss.backward()
    for grad, param in zip(grads, params, strict=True):
        assert 0 not in grad.stride()
        assert grad.stride() == param.grad.stride()
        grad.mul_(2)


def test_a_subclass_keeps_its_parts(device: torch.device) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a = TwoTensor(torch.ones(2, device=device), 5 * torch.ones(2, device=device)).requires_grad_()
    rows = gradkit.per_loss_grads(a * a, a)
    assert type(rows) is TwoTensor
    assert torch.equal(rows.b, 10 * torch.eye(2, device=device))


def test_a_retained_weight_s_grad_is_put_back(device: torch.device) -> None:
    a = torch.ones((), device=device, requires_grad=True)
    weight = a * 1
    weight.retain_grad()
    loss = a * 3
    with unchanged(a, weight, loss):
        _, grad = gradkit.value_and_grads(loss, a, weights=weight, retain_graph=True)
    assert grad == 6


def test_a_function_that_writes_on_its_cotangent_spoils_no_sibling(device: torch.device) -> None:
    """torch.autograd.grad gives [7, 7] for `a` here; .backward() gives [1, 1] [L3]."""
    a, w = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))

    def loss() -> Tensor:
        return ((a + Scribble.apply(w * 1)) * torch.ones(2, device=device)).sum()

    assert torch.autograd.grad(loss(), a)[0].tolist() == [1, 1]
    assert torch.autograd.grad(loss(), [a, w])[0].tolist() == [7, 7]
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"params\['a'\].*custom Function"):
        gradkit.value_and_grads(loss(), {"a": a, "w": w})
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match="Scribble.backward"):
        _, grads = gradkit.value_and_grads(loss(), {"a": a, "w": w})
    assert grads["a"].tolist() == [1, 1]
    assert grads["w"].tolist() == [7, 7]
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match="Scribble.backward"):
        per_loss = gradkit.per_loss_grads([loss(), loss() * 2], {"a": a, "w": w})
    assert per_loss[1]["a"].tolist() == [2, 2]


@pytest.mark.parametrize("also_w", [True, False])
def test_a_non_leaf_param_whose_node_writes_on_its_cotangent(
    device: torch.device, also_w: bool
) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    y = Scribble.apply(w)
    loss = (y * torch.full((2,), 3.0, device=device)).sum()
    _, grads = gradkit.value_and_grads(loss, {"y": y, "w": w} if also_w else {"y": y})
    assert grads["y"].tolist() == [3, 3]


@pytest.mark.parametrize("also_w", [True, False])
def test_a_non_leaf_param_with_a_hook(device: torch.device, also_w: bool) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    y = w * 2
    y.register_hook(lambda grad: grad * 100)
    params = {"y": y, "w": w} if also_w else {"y": y}
    with unchanged(w):
        _, grads = gradkit.value_and_grads((3 * y).sum(), params, retain_graph=True)
    assert grads["y"].tolist() == [300, 300]  # torch.autograd.grad gives 3 if w is asked for, too
    assert len(y._backward_hooks) == 1
    per_loss = gradkit.per_loss_grads({"l": (3 * y).sum()}, params)
    assert per_loss["l"]["y"].tolist() == [300, 300]


def test_both_outputs_of_a_node_as_params(device: torch.device) -> None:
    w = torch.randn(4, device=device, requires_grad=True)
    left, right = (w * 1).split(2)
    _, grads = gradkit.value_and_grads((left * 3).sum(), {"l": left, "r": right, "w": w})
    assert grads["l"].tolist() == [3, 3]
    assert grads["r"] is None
    with pytest.raises(gradkit.UnreachedParamError, match=r"\['r'\]"):
        gradkit.value_and_grads((left * 3).sum(), {"l": left, "r": right}, unused="error")


def test_a_function_that_returns_none_gives_none(device: torch.device) -> None:
    from tests.helpers import Halve

    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    _, grads = gradkit.value_and_grads(Halve.apply(a, b).sum(), {"a": a, "b": b})
    assert grads["a"].tolist() == [0.5, 0.5]
    assert grads["b"] is None
    with pytest.raises(gradkit.UnreachedParamError, match="returns None"):
        gradkit.value_and_grads(Halve.apply(a, b).sum(), {"b": b})
    with pytest.raises(gradkit.UnreachedParamError, match="returns None"):
        gradkit.value_and_grads(Halve.apply(a, b).sum(), {"a": a, "b": b}, unused="error")
    rows = gradkit.per_loss_grads(Halve.apply(a, b), {"a": a, "b": b})
    assert rows["a"].shape == (2, 2)
    assert rows["b"] is None


def test_higher_derivatives_up_to_the_third(device: torch.device) -> None:
    w = torch.tensor(0.7, device=device, dtype=torch.float64, requires_grad=True)
    first = gradkit.value_and_grads(torch.sin(w) * w, w, create_graph=True)[1]
    second = gradkit.value_and_grads(first, w, create_graph=True)[1]
    third = gradkit.value_and_grads(second, w)[1]
    x = w.detach()
    torch.testing.assert_close(first.detach(), torch.cos(x) * x + torch.sin(x))
    torch.testing.assert_close(second.detach(), 2 * torch.cos(x) - x * torch.sin(x))
    torch.testing.assert_close(third, -3 * torch.sin(x) - x * torch.cos(x))


@pytest.mark.parametrize("call", ["joint", "per_loss", "simultaneous"])
def test_create_graph_against_gradcheck_and_gradgradcheck(device: torch.device, call: str) -> None:
    a, b = (
        torch.randn(2, 3, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )

    def gradients(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(a * b)  # a non-leaf param, too
        losses = {"x": (h * a).square().sum(), "y": (h.exp() * b).sum()}
        if call == "joint":
            values, grads = gradkit.value_and_grads(losses, [a, b, h], create_graph=True)
            return (*grads, values["x"])
        if call == "per_loss":
            rows = gradkit.per_loss_grads(losses, [a, b, h], create_graph=True)
            return (*rows["x"], *rows["y"])
        return tuple(
            gradkit.simultaneous_grads(losses, {"x": a, "y": b}, create_graph=True).values()
        )

    assert torch.autograd.gradcheck(gradients, (a, b))  # second derivatives
    assert torch.autograd.gradgradcheck(gradients, (a, b))  # third ones


def test_a_vector_of_losses_with_create_graph(device: torch.device) -> None:
    w = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)

    def rows(w: Tensor, strategy: str) -> Tensor:
        return gradkit.per_loss_grads((w**3).cumsum(0), w, create_graph=True, strategy=strategy)

    for strategy in ("sequential", "batched"):
        leaf = w.detach().requires_grad_()
        torch.testing.assert_close(
            gradkit.per_loss_grads(rows(leaf, strategy).sum(), leaf),
            6 * leaf.detach() * torch.arange(3, 0, -1, device=device),
        )


def test_results_have_no_graph_unless_asked_for(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    _, grad = gradkit.value_and_grads((w**3).sum(), w, retain_graph=True)
    assert not grad.requires_grad
    _, grad = gradkit.value_and_grads((w**3).sum(), w, create_graph=True)
    assert grad.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_mode_around_the_call_makes_no_difference(device: torch.device, mode: Any) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    s = torch.ones((), device=device, requires_grad=True)
    loss = (w**3).sum()
    expected = 3 * w.detach() ** 2
    with mode():
        values, grads = gradkit.value_and_grads(
            loss, {"w": w, "u": s}, weights=s, unused="zeros", retain_graph=True
        )
        rows = gradkit.per_loss_grads([loss, loss], w, retain_graph=True)
        higher = gradkit.value_and_grads(loss, w, create_graph=True)[1]
    torch.testing.assert_close(grads["w"], expected)
    torch.testing.assert_close(grads["u"], loss.detach())
    for tensor in (values, *grads.values(), *rows, higher):
        assert not tensor.is_inference()
    assert not grads["w"].requires_grad
    torch.testing.assert_close(gradkit.value_and_grads(higher.sum(), w)[1], 6 * w.detach())


def test_tensor_hooks_fire_and_accumulation_hooks_do_not(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    log: list[str] = []

    def hook(grad: Tensor) -> Tensor:
        log.append("tensor")
        return grad * 10

    w.register_hook(hook)
    w.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
    _, grad = gradkit.value_and_grads((w * 2).sum(), w)
    assert grad.tolist() == [20, 20]
    assert log == ["tensor"]
    assert w.grad is None


def test_dropout_and_module_hooks(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    log: list[str] = []
    model[2].register_full_backward_pre_hook(lambda m, g: log.append("pre"))
    model[0].register_full_backward_hook(lambda m, gi, go: log.append("full"))
    x = torch.randn(4, 3, device=device, requires_grad=True)
    loss = model(x).square().sum()
    state = torch.get_rng_state()
    _, grads = gradkit.value_and_grads(loss, model, retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert log == ["pre"]  # the hook that sees input gradients fires where they are asked for [D5]
    gradkit.value_and_grads(loss, [x, model], retain_graph=True)
    assert log == ["pre", "pre", "full"]
    loss.backward()
    assert_same_bits(grads.values(), [p.grad for p in model.parameters()])


def test_two_threads_at_once(device: torch.device) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(seed: int) -> bool:
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(20, 20, generator=g).to(device).requires_grad_()
        losses = [(w @ w).tanh().sum(), (w * w).sum()]
        expected = [torch.autograd.grad(loss, w, retain_graph=True)[0] for loss in losses]
        with gradkit.safe_retain(w) as kept:
            rows = gradkit.per_loss_grads(losses, w)
        ok = all(same_bits(a, b) for a, b in zip(rows, expected, strict=True))
        return ok and len(kept.passes) == 2

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_threads_and_passes_inside_of_hooks_do_not_take_each_other_s_gradients(
    device: torch.device,
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    w = torch.ones(50, device=device, requires_grad=True)
    alive = Scribble.apply(w)  # so that every pass copies gradients as they arrive

    def work(factor: int) -> bool:
        for _ in range(30):
            _, grad = gradkit.value_and_grads((Scribble.apply(w * factor) * 1.5).sum(), w)
            if not torch.equal(grad, torch.full_like(w, 7 * 1.5 * factor)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))
    del alive

    y = w * 2
    z = y * 3
    inner: list[Tensor] = []

    def nested(grad: Tensor) -> None:
        with torch.enable_grad():
            loss = (y * 100).sum()
        inner.append(gradkit.value_and_grads(loss, y, retain_graph=True)[1])

    z.register_hook(nested)
    y.register_hook(lambda grad: grad * 10)
    w.register_hook(lambda grad: nested(grad) if len(inner) < 2 else None)
    _, grads = gradkit.value_and_grads(z.sum(), [y, w])
    assert grads[0][0] == 30
    assert grads[1][0] == 60
    assert [g[0] for g in inner] == [1000, 1000]


@pytest.mark.parametrize("strategy", ["sequential", "batched"])
@pytest.mark.parametrize("strided", [False, True])
def test_tangents_of_forward_mode_are_those_of_autograd(
    device: torch.device, strategy: Any, strided: bool
) -> None:
    """detach() drops a tangent: a gradient that is copied would have none."""
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device).requires_grad_()
    b = (a.detach().T if strided else a.detach()).clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.tensor([[1.0, 0.0], [0.5, 2.0]], device=device))
        cubes = (dual + b) ** 3
        loss, (x, y) = cubes.sum(), (a * 2, b * 3)
        inner = (dual * x * y).sum()
        expected = torch.autograd.grad(loss, [a, b], retain_graph=True)
        value, grads = gradkit.value_and_grads(loss, [a, b, a], retain_graph=True)
        per_loss = gradkit.per_loss_grads([loss, loss], [a, b], retain_graph=True)
        rows = gradkit.per_loss_grads(cubes.flatten(), b, strategy=strategy, retain_graph=True)
        theirs = torch.autograd.grad(inner, [x, y], retain_graph=True)
        with gradkit.safe_retain([x, y]) as kept:
            gradkit.value_and_grads(inner, [a, b])
        gradkit.write_grads_([a, b], list(expected))
        pairs = [
            (value, loss), *zip(grads, (*expected, expected[0]), strict=True),
            *zip(per_loss[0], expected, strict=True), *zip(per_loss[1], expected, strict=True),
            (rows.sum(0), expected[1]), *zip(kept.grads, theirs, strict=True),
            *zip(gradkit.read_grads([a, b]), expected, strict=True),
        ]  # fmt: skip
        for ours, plain in pairs:
            tangent = forward_ad.unpack_dual(ours).tangent
            torch.testing.assert_close(tangent, forward_ad.unpack_dual(plain).tangent.detach())
            assert not ours.requires_grad


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc"])
def test_a_compressed_sparse_param_has_the_dense_gradient_of_autograd(
    device: torch.device, layout: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a beta
        sparse = torch.eye(3, device=device).to_sparse(layout=getattr(torch, layout))
    w = sparse.requires_grad_()
    out = w @ torch.randn(3, 2, device=device)
    _, grad = gradkit.value_and_grads(out.sum(), w, retain_graph=True)
    assert same_bits(grad, torch.autograd.grad(out.sum(), w, retain_graph=True)[0])
    rows = gradkit.per_loss_grads(out.sum(1), w, retain_graph=True)
    theirs = [torch.autograd.grad(x, w, retain_graph=True)[0] for x in out.sum(1)]
    assert_same_bits(rows, theirs)


def test_nested_params_have_gradients_of_scalars_only(device: torch.device) -> None:
    parts = [torch.randn(n, 3, device=device) for n in (2, 4)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()
    loss = (jagged.values() * 2).sum(0)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"params\['x'\].*a nested tensor"):
        gradkit.per_loss_grads([loss.sum(), loss], {"x": jagged})
    rows = gradkit.per_loss_grads(list(loss.flatten()), {"x": jagged}, retain_graph=True)
    for row, element in zip(rows, loss, strict=True):
        (expected,) = torch.autograd.grad(element, jagged, retain_graph=True)
        assert same_bits(row["x"].values(), expected.values())
