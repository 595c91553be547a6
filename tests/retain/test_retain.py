"""safe_retain: both forms, what it sees, what it refuses, and that nothing of it stays behind."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit._core import grad_recorder
from tests.helpers import Scribble, assert_owned, assert_same_bits, unchanged


def leaf(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, device=device, requires_grad=True)


@pytest.mark.parametrize("engine", ["backward", "gradkit", "autograd.grad"])
def test_any_engine_before_and_after_the_tensor_s_uses(device: torch.device, engine: str) -> None:
    x = leaf(device, 1.0, 2.0)
    h = x * 2
    early = (h * 3).sum()
    with gradkit.safe_retain({"h": h, "both": [h, x]}) as kept:
        loss = early + (h * h).sum()
        if engine == "backward":
            loss.backward()
        elif engine == "gradkit":
            gradkit.value_and_grads(loss, x)
        else:
            torch.autograd.grad(loss, x)
    expected = 3 + 2 * h.detach()
    assert torch.equal(kept.grads["h"], expected)
    assert torch.equal(kept.grads["both"][0], expected)
    assert torch.equal(kept.grads["both"][1], 2 * expected)
    assert kept.values["h"] is h
    assert_owned([kept.grads["h"], kept.grads["both"][0]], [h, h])
    assert (x.grad is None) == (engine != "backward")
    assert h._backward_hooks == {}
    assert not h.retains_grad


def test_gradients_are_summed_over_passes(device: torch.device) -> None:
    x = leaf(device, 1.0, 2.0)
    h = x * 2
    losses = {"a": (h * 3).sum(), "b": (h * h).sum(), "c": (x * 5).sum()}
    with gradkit.safe_retain([h]) as kept:
        gradkit.per_loss_grads(losses, x)
    assert [g.tolist() for g in kept.passes[0]] == [[3, 3], [4, 8]]  # c does not go through h
    assert kept.grads[0].tolist() == [7, 11]
    kept.grads[0].zero_()
    kept.passes[0][0].zero_()
    assert kept.grads[0].tolist() == [7, 11]


def test_gradkit_s_passes_reach_what_is_kept_whatever_they_are_for(device: torch.device) -> None:
    x = torch.randn(4, 3, device=device, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)
    with gradkit.safe_retain(x) as kept:
        loss = model(x).sum()
        gradkit.value_and_grads(loss, model[2], retain_graph=True)
    assert_same_bits([kept.grads], torch.autograd.grad(loss, x, retain_graph=True))
    with gradkit.safe_retain(x) as kept:
        torch.autograd.grad(loss, model[2].weight)  # torch leaves out what it was not asked for
    assert kept.grads is None
    assert kept.passes == ()


def test_kept_tensors_share_the_graph_with_several_passes(device: torch.device) -> None:
    """The passes' needs are counted with what is kept: nothing is freed too early."""
    x, w = leaf(device, 1.0, 2.0), leaf(device, 3.0, 4.0)
    trunk = (x * x).exp()  # only the kept tensor needs it
    losses = [(trunk * w).sum(), (trunk * w * w).sum()]
    expected = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
    with gradkit.safe_retain(x) as kept:
        gradkit.per_loss_grads(losses, w)
    assert_same_bits(kept.passes, expected)


def test_a_block_without_a_pass_warns(device: torch.device) -> None:
    w = leaf(device, 1.0, 2.0)
    h = w * w
    loss = h.exp().sum()
    gradkit.value_and_grads(loss, w, retain_graph=True)  # too early
    with (
        pytest.warns(
            gradkit.GradkitWarning, match="no backward pass ran inside the block"
        ) as caught,
        gradkit.safe_retain({"h": h}) as kept,
    ):
        h.sum()
    assert kept.grads == {"h": None}
    assert caught[0].filename == __file__
    model = nn.Linear(2, 1).to(device)
    with (
        pytest.warns(gradkit.GradkitWarning, match="no backward pass"),
        gradkit.safe_retain(model, [""]),
    ):
        loss = model(w.detach()).sum()
    loss.backward()  # too late


@pytest.mark.parametrize(
    "run",
    [
        lambda loss, other, w: gradkit.value_and_grads(other.exp().sum(), other),  # not of h
        lambda loss, other, w: gradkit.gram([loss, 2 * loss], w),  # which is not recorded
        lambda loss, other, w: loss.backward(),
        lambda loss, other, w: torch.autograd.grad(loss, w),
        lambda loss, other, w: torch.autograd.grad(other.exp().sum(), other),  # of torch, not of h
        lambda loss, other, w: gradkit.backward_(loss, w),
    ],
)
def test_a_block_with_a_pass_does_not_warn(device: torch.device, run: Callable[..., Any]) -> None:
    """Warnings are errors in these tests. Nor does one that raises, whose error is enough."""
    w, other = leaf(device, 1.0, 2.0), leaf(device, 1.0)
    h = w * w
    with gradkit.safe_retain({"h": h}):
        run(h.exp().sum(), other, w)
    with pytest.raises(ValueError, match="of the user"), gradkit.safe_retain({"h": h}):
        raise ValueError("of the user")


def test_the_value_at_the_call_after_an_in_place_change(device: torch.device) -> None:
    x = leaf(device, 1.0, 1.0)
    y = x * 2
    with gradkit.safe_retain(y) as kept:
        early = (y * 3).sum()
        y.mul_(5)
        (early + (y * 7).sum()).backward()
    assert kept.grads.tolist() == [38, 38]  # retain_grad() says 7


def test_a_backward_that_writes_on_its_input(device: torch.device) -> None:
    x = leaf(device, 1.0, 1.0)
    y = Scribble.apply(x)
    with gradkit.safe_retain(y) as kept:
        (y * torch.full((2,), 3.0, device=device)).sum().backward()
    assert kept.grads.tolist() == [3, 3]


def test_hooks_of_the_user_registered_earlier_are_seen(device: torch.device) -> None:
    x = leaf(device, 1.0, 1.0)
    y = x * 2
    y.register_hook(lambda grad: grad * 100)
    with gradkit.safe_retain(y) as kept:
        (y * 3).sum().backward()
    assert kept.grads.tolist() == [300, 300]
    assert len(y._backward_hooks) == 1


def test_a_base_changed_through_a_view(device: torch.device) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    base = x * 2
    with gradkit.safe_retain(base) as kept:
        base[:2].mul_(5)
        (base * 3).sum().backward()
    assert kept.grads.tolist() == [15, 15, 3, 3]


@pytest.mark.parametrize("changed", ["base", "view"])
@pytest.mark.parametrize("engine", ["backward", "gradkit"])
def test_a_view_changed_in_place_is_refused(
    device: torch.device, changed: str, engine: str
) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    base = x * 2
    view = base[:2]

    def block() -> None:
        with gradkit.safe_retain({"v": view}):
            (base if changed == "base" else view).mul_(5)
            loss = (view * 3).sum()
            loss.backward() if engine == "backward" else gradkit.value_and_grads(loss, x)

    with pytest.raises(gradkit.UnsupportedGraphError, match=r"tensors\['v'\].*view"):
        block()
    assert not view._backward_hooks
    if engine == "gradkit":
        assert x.grad is None


def test_a_view_that_is_only_used_is_right(device: torch.device) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    view = (x * 2)[:2]
    with gradkit.safe_retain(view) as kept:
        (view * 3).sum().backward()
    assert kept.grads.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda x: {"a": x * 1, "b": x.detach()}, gradkit.UnsupportedGraphError, r"\['b'\]"),
        (lambda x: [torch.ones(2)], gradkit.UnsupportedGraphError, r"tensors\[0\]"),
        (lambda x: {"a": x * 1, "b": 2.0}, gradkit.LeafTypeError, r"tensors\['b'\].*float"),
        (lambda x: [], gradkit.StructureError, "at least one"),
        (lambda x: [nn.Linear(2, 2)], gradkit.LeafTypeError, r"safe_retain\(model"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_once(
    device: torch.device, make: Any, error: type[Exception], words: str
) -> None:
    x = leaf(device, 1.0, 2.0)
    tensors = make(x)
    present = [
        t
        for t in (tensors.values() if isinstance(tensors, dict) else tensors)
        if isinstance(t, Tensor)
    ]
    with (
        unchanged(x, *present),
        pytest.raises(error, match=f"(?s){words}"),
        gradkit.safe_retain(tensors),
    ):
        pytest.fail("the block ran")


def test_inside_a_transform_it_is_refused(device: torch.device) -> None:
    outside = leaf(device, 1.0, 2.0) * 2

    def fn(w: Tensor, kept: Tensor | None) -> Tensor:
        h = w * 2
        with gradkit.safe_retain(h if kept is None else kept):
            return (h * h).sum()

    for kept in (None, outside):
        for transform in (torch.func.grad, lambda f: torch.func.vmap(f, in_dims=(0, None))):
            with pytest.raises(gradkit.UnsupportedGraphError, match="has_aux"):
                transform(fn)(torch.ones(2, device=device), kept)


def test_hooks_are_gone_after_an_exception(device: torch.device) -> None:
    x = leaf(device, 1.0, 2.0)
    h = x * 2
    model = nn.Linear(2, 2).to(device)
    with (
        pytest.raises(KeyError, match="mine"),
        gradkit.safe_retain(h) as kept,
        gradkit.safe_retain(model, ""),
    ):
        raise KeyError("mine")
    assert h._backward_hooks == {}
    assert not model._forward_hooks
    (h * 3).sum().backward()
    assert kept.grads is None


def test_nothing_of_it_is_left(device: torch.device) -> None:
    x = leaf(device, 1.0, 2.0)
    h = x * 2
    with gradkit.safe_retain(h) as kept:
        (h * h).sum().backward()
    refs = [weakref.ref(h), weakref.ref(kept)]
    del h, kept
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_create_graph_is_kept(device: torch.device) -> None:
    x = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)
    h = x * x
    with gradkit.safe_retain(h) as kept:
        gradkit.value_and_grads((h**3).sum(), x, create_graph=True)
    second = torch.autograd.grad(kept.grads.sum(), x)[0]
    torch.testing.assert_close(second, 12 * x.detach() ** 3)


def test_the_user_s_retain_grad_goes_on_as_before(device: torch.device) -> None:
    x = leaf(device, 1.0, 2.0)
    h = x * 2
    h.retain_grad()
    with gradkit.safe_retain(h) as kept:
        gradkit.value_and_grads((h * 3).sum(), x, retain_graph=True)
        assert_same_bits([h.grad], [None])  # gradkit's own pass put it back
        (h * 3).sum().backward()
    assert h.grad.tolist() == [3, 3]  # the user's own pass is the user's
    assert kept.grads.tolist() == [6, 6]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
        self.rnn = nn.GRU(4, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 2)})
        self.idle = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, _ = self.rnn(self.encoder(x))
        return {name: head(h) for name, head in self.heads.items()}


def test_modules_by_name_and_glob(device: torch.device) -> None:
    model, x = Net().to(device), torch.randn(5, 3, device=device)
    with gradkit.safe_retain(model, ["encoder.0", "heads.*", "rnn", "", "idle"]) as kept:
        out = model(x)
        loss = out["a"].square().sum() + out["b"].sum()
        gradkit.value_and_grads(loss, model)
    assert list(kept.values) == ["encoder.0", "heads.a", "heads.b", "rnn", "", "idle"]
    assert kept.values["heads.a"] is out["a"]
    assert torch.equal(kept.grads["heads.a"], 2 * out["a"].detach())
    assert torch.equal(kept.grads["heads.b"], torch.ones_like(out["b"]))
    assert kept.grads["encoder.0"].shape == (5, 4)  # before the in-place ReLU
    assert isinstance(kept.grads["rnn"], tuple)
    assert kept.grads["rnn"][1] is None  # the last hidden state, which no loss uses
    assert torch.equal(kept.grads[""]["a"], kept.grads["heads.a"])
    assert kept.values["idle"] is None
    assert kept.grads["idle"] is None
    assert len(kept.passes["heads.a"]) == 1
    assert not any(m._forward_hooks for m in model.modules())


def test_a_module_that_runs_several_times_has_a_tuple(device: torch.device) -> None:
    layer = nn.Linear(2, 2).to(device)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(3, 2, device=device)
    with gradkit.safe_retain(model, "0") as kept:
        model(x).sum().backward()
    first, second = kept.grads["0"]
    assert torch.equal(second, torch.ones(3, 2, device=device))
    hidden = kept.values["0"][0]
    expected = torch.autograd.grad(
        layer(torch.tanh(h := hidden.detach().requires_grad_())).sum(), h
    )
    assert_same_bits([first], expected)


@pytest.mark.parametrize("names", ["encodr", ["encoder", "heads.c"], [], None])
def test_a_name_that_fits_nothing_is_refused(device: torch.device, names: Any) -> None:
    model = Net().to(device)
    with (
        pytest.raises(gradkit.StructureError, match=r"names.*\n.*encoder"),
        gradkit.safe_retain(model, names),
    ):
        pytest.fail("the block ran")
    assert not any(m._forward_hooks for m in model.modules())


def test_a_forward_outside_the_block_is_refused(device: torch.device) -> None:
    model = Net().to(device)
    out = model(torch.randn(5, 3, device=device))
    with (
        pytest.raises(gradkit.UnsupportedGraphError, match="inside the block"),
        gradkit.safe_retain(model, "encoder"),
    ):
        out["a"].sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_output_without_a_graph_is_refused(device: torch.device, mode: Any) -> None:
    model = Net().to(device)
    with (
        pytest.raises(gradkit.UnsupportedGraphError, match="'encoder'"),
        mode(),
        gradkit.safe_retain(model, "encoder"),
    ):
        model(torch.randn(5, 3, device=device))
    assert not any(m._forward_hooks for m in model.modules())


def test_under_no_grad_on_a_tensor_with_a_graph(device: torch.device) -> None:
    x = leaf(device, 1.0, 1.0)
    y = x * 2
    loss = (3 * y).sum()
    with torch.no_grad(), gradkit.safe_retain(y) as kept:
        gradkit.value_and_grads(loss, x)
    assert kept.grads.tolist() == [3, 3]


def test_a_leaf_that_is_a_view_may_be_updated(device: torch.device) -> None:
    base = torch.zeros(4, device=device)
    v = base[:2]
    v.requires_grad_()
    with gradkit.safe_retain(v) as kept:
        (v * 3).sum().backward()
        with torch.no_grad():
            v.sub_(0.1)
    assert kept.grads.tolist() == [3, 3]


def test_names_beside_tensors_are_refused(device: torch.device) -> None:
    h = torch.ones(2, device=device, requires_grad=True)
    with (
        pytest.raises(gradkit.OptionError, match=r"(?s)names: .*safe_retain\(model, names\)"),
        gradkit.safe_retain({"h": h}, ["h"]),
    ):
        pytest.fail("the block ran")
    assert not h._backward_hooks


@pytest.mark.parametrize("call", [gradkit.per_loss_grads, gradkit.simultaneous_grads])
def test_what_is_kept_may_be_older_than_the_params(
    device: torch.device, call: Callable[..., Any]
) -> None:
    """The passes of a call go on to it, and free the graph there with the last."""
    w = torch.randn(3, device=device, requires_grad=True)
    h = w.sin()
    y = h.exp().tanh()
    losses = [(y * w).sum(), (y * w).sin().sum()]
    expected = [torch.autograd.grad(loss, [y, h], retain_graph=True) for loss in losses]
    with gradkit.safe_retain(h) as kept:
        results = call(losses, [y, y])
    if call is gradkit.per_loss_grads:
        results = [first for first, _ in results]
    for (of_y, _), result in zip(expected, results, strict=True):
        assert torch.equal(result, of_y)
    assert torch.equal(kept.grads, expected[0][1] + expected[1][1])


def test_a_block_that_ends_in_another_thread(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)

    def held() -> Generator[None]:
        with gradkit.safe_retain(w * 2):
            yield

    block = held()
    next(block)
    assert grad_recorder.any_observers()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block.close).result()
    assert not grad_recorder.any_observers()


def test_a_block_of_another_thread_leaves_batches_as_they_are(device: torch.device) -> None:
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    kept = w * 2

    def batched(losses: Tensor, x: Tensor) -> list[str]:
        with warnings.catch_warnings(record=True, action="always") as caught:
            gradkit.per_loss_grads(losses, x, strategy="batched", retain_graph=True)
        return [str(each.message) for each in caught]

    with gradkit.safe_retain(kept) as retained, ThreadPoolExecutor(1) as pool:
        assert not pool.submit(batched, v * v, v).result()
        assert not pool.submit(batched, kept * kept, w).result()
    assert retained.passes == ()


def test_none_stays_none(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    h = w * 2
    with gradkit.safe_retain({"h": h, "cache": [None]}) as kept:
        (h * 3).sum().backward()
    assert kept.grads["h"].tolist() == [3, 3]
    for tree in (kept.values, kept.grads, kept.passes):
        assert tree["cache"] == [None]
    with pytest.raises(gradkit.LeafTypeError), gradkit.safe_retain([None]):
        pass
