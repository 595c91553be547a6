"""per_loss_grads of a vector of losses whose samples are independent: one pass for all of them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread, get_ident
from typing import Any, TypeAlias, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import gradkit
from gradkit._autograd import passes, sample_pass
from gradkit._core import user_code
from tests.helpers import Halve, assert_owned, unchanged


@pytest.fixture
def in_one_pass(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the losses whose gradients have been taken so."""
    monkeypatch.setattr(user_code, "hooks_registered", lambda: False)  # by other tests
    losses: list[int] = []

    def noted(call: Any, index: int, *args: Any, **options: Any) -> Any:
        losses.append(index)
        return sample_pass.run_samples(call, index, *args, **options)

    monkeypatch.setattr(passes, "run_samples", noted)
    return losses


def convolutional(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)
    return nn.Sequential(*layers).to(device, torch.float64)


def losses_of(model: nn.Module, count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64)
    loss: Tensor = model(x.to(next(model.parameters()).device)).square().sum(1)
    return loss


@pytest.mark.parametrize("strategy", ["batched", "auto"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_pass_gives_what_a_pass_for_each_gives(
    device: torch.device, in_one_pass: list[int], strategy: Any, memory_format: torch.memory_format
) -> None:
    model = convolutional(device).to(memory_format=memory_format)
    loss = losses_of(model)
    expected = gradkit.per_loss_grads(loss, model, retain_graph=True)
    grads = gradkit.per_loss_grads(loss, model, strategy=strategy)
    assert in_one_pass == [0]
    torch.testing.assert_close(grads, expected)
    assert [g.stride() for g in grads.values()] == [g.stride() for g in expected.values()]
    assert not any(grad.requires_grad for grad in grads.values())
    assert len({grad.untyped_storage().data_ptr() for grad in grads.values()}) == len(grads)
    for grad in grads.values():
        grad.zero_()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.per_loss_grads(loss, model)


def test_the_graph_is_kept_if_asked_for(device: torch.device, in_one_pass: list[int]) -> None:
    model = convolutional(device)
    loss = losses_of(model)
    first = gradkit.per_loss_grads(loss, model, strategy="auto", retain_graph=True)
    torch.testing.assert_close(gradkit.per_loss_grads(loss, model, strategy="auto"), first)
    assert in_one_pass == [0, 0]


def test_a_tree_of_losses_of_several_shapes(device: torch.device, in_one_pass: list[int]) -> None:
    model = convolutional(device)

    def losses() -> dict[str, Tensor]:
        each = losses_of(model)
        return {"sum": each.sum(), "vector": each, "half": 0.5 * each, "one": each[:1]}

    expected = gradkit.per_loss_grads(losses(), model)
    grads = gradkit.per_loss_grads(losses(), model, strategy="batched")
    torch.testing.assert_close(grads, expected)
    assert in_one_pass == [1, 2]
    assert (
        gradkit.per_loss_grads(losses_of(model)[:0], model, strategy="batched")["0.bias"].shape[0]
        == 0
    )


@pytest.mark.parametrize("unused", ["none", "zeros"])
def test_parameters_that_are_tied_frozen_or_unused(
    device: torch.device, in_one_pass: list[int], unused: Any
) -> None:
    torch.manual_seed(0)
    table, linear, spare = nn.Embedding(7, 3), nn.Linear(3, 3), nn.Linear(2, 2)
    model = nn.ModuleList([table, linear, spare]).to(device, torch.float64)
    linear.bias.requires_grad_(False)
    words = torch.tensor([[1, 2], [2, 2], [0, 6], [3, 1], [4, 4]], device=device)
    options: Any = {"unused": unused, "retain_graph": True}
    loss = (linear(table(words)) @ table.weight.T).logsumexp(2).sum(1)
    expected = gradkit.per_loss_grads(loss, model, **options)
    grads = gradkit.per_loss_grads(loss, model, strategy="auto", **options)
    assert in_one_pass == [0]
    assert [g is None for g in grads.values()] == [g is None for g in expected.values()]
    torch.testing.assert_close(
        [g for g in grads.values() if g is not None],
        [g for g in expected.values() if g is not None],
    )


def twice(grad: Tensor) -> Tensor:
    return 2 * grad


@pytest.mark.filterwarnings("ignore::gradkit.GradkitWarning")
@pytest.mark.parametrize(
    "case",
    ["few", "mixed", "graph", "sparse", "half", "hook", "retained", "checked", "observed", "dtype"],
)
def test_what_is_not_proved_or_is_watched_takes_the_usual_passes(
    device: torch.device, in_one_pass: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model = convolutional(device)
    table = nn.Embedding(4, 2, sparse=True).to(device, torch.float64)
    params: Any = {"model": model, "table": table.weight}
    options: Any = {"unused": "zeros", "retain_graph": True}
    if case == "half":
        params, options = {"model": model.bfloat16()}, {"retain_graph": True}
        loss = model(torch.ones(6, 2, 5, 5, device=device, dtype=torch.bfloat16)).sum(1)
    else:
        loss = losses_of(model, 3 if case == "few" else 6)
    if case == "mixed":
        loss = loss - loss.mean()
    if case == "sparse":
        loss = loss + table(torch.arange(6, device=device) % 4).sum(1)
    if case == "hook":
        monkeypatch.undo()
        hidden = loss.sqrt()
        hidden.register_hook(twice)
        loss = hidden.square()
    if case == "dtype":
        model[4].bias.grad_dtype = torch.float32
    if case == "retained":
        loss.retain_grad()
    if case == "graph":
        options["create_graph"] = True
    expected = gradkit.per_loss_grads(loss, params, **options)
    if case == "checked":
        with gradkit.checked():
            grads = gradkit.per_loss_grads(loss, params, strategy="auto", **options)
    elif case == "observed":
        with gradkit.safe_retain(loss):
            grads = gradkit.per_loss_grads(loss, params, strategy="auto", **options)
    else:
        grads = gradkit.per_loss_grads(loss, params, strategy="auto", **options)
    assert in_one_pass == []
    tolerance = {"rtol": 0.1, "atol": 0.1} if case == "half" else {}
    dense = [gradkit.tree.map(Tensor.to_dense, each) for each in (grads, expected)]
    torch.testing.assert_close(*dense, **tolerance)


def test_a_gradient_that_is_not_finite_reaches_no_other_sample(
    device: torch.device, in_one_pass: list[int]
) -> None:
    """In a pass for one element, torch multiplies the cotangents of all others, zeros, by inf."""
    w = torch.zeros(2, device=device, requires_grad=True)
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0], [0.0, 3.0]], device=device)
    for fn in (torch.sqrt, torch.abs, torch.reciprocal, torch.log):
        expected = gradkit.func.per_sample_grads(lambda w, x, fn=fn: fn(x @ w))(w, x)
        with unchanged(w):
            grads = gradkit.per_loss_grads(fn(x @ w), w, strategy="batched")
        torch.testing.assert_close(grads, expected, equal_nan=True)
    assert in_one_pass == [0] * 4


class Net(nn.Module):
    """What the nets below share, each of whose samples is `[T]` of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.mixing = nn.BatchNorm1d(4)


Layer: TypeAlias = Callable[[Net, Tensor], Tensor]  # of `[B, T, 4]`

INDEPENDENT: dict[str, Layer] = {
    "linear": lambda m, h: m.first(h).tanh(),
    "one position": lambda m, h: m.second(h[:, 0]).relu().unsqueeze(1) + h,
    "norm": lambda m, h: m.norm(h),
    "convolution": lambda m, h: m.conv(h.mT).mT,
    "residual": lambda m, h: h + m.second(functional.gelu(m.first(h))),
    "tied": lambda m, h: (h @ m.table.weight.T).softmax(2)[..., :4],
    "bias twice": lambda m, h: h * m.first.bias * m.first.bias + m.first.bias,
}
OTHERS: dict[str, Layer] = {
    "mixing": lambda m, h: m.mixing(h.mT).mT,
    "centred": lambda m, h: h - h.mean(0),
    "one for all": lambda m, h: h * m.first.bias.exp(),
    "a Function": lambda m, h: cast("Tensor", Halve.apply(m.first(h), h)),
}


def loss_of_words(model: Net, words: Tensor, names: list[str]) -> Tensor:
    h: Tensor = model.table(words)
    for name in names:
        h = (INDEPENDENT | OTHERS)[name](model, h)
    return h.square().sum((1, 2))


def loop(loss: Tensor, params: list[Tensor]) -> list[Tensor | None]:
    """Return the stacked gradients of the elements of a vector from a pass of torch's for each."""
    each = [torch.autograd.grad(x, params, retain_graph=True, allow_unused=True) for x in loss]
    return [
        None if grads[0] is None else torch.stack([g for g in grads if g is not None])
        for grads in zip(*each, strict=True)
    ]


@pytest.mark.filterwarnings("ignore::gradkit.GradkitWarning")
@given(
    names=st.lists(st.sampled_from([*INDEPENDENT]), max_size=4),
    other=st.none() | st.sampled_from([*OTHERS]),
    batch=st.integers(2, 5),
    positions=st.integers(1, 4),
    frozen=st.sets(st.integers(3, 9), max_size=3),  # none of those that are used in all ways
)
def test_every_net_gives_what_a_loop_gives(
    device: torch.device,
    in_one_pass: list[int],
    names: list[str],
    other: str | None,
    batch: int,
    positions: int,
    frozen: set[int],
) -> None:
    torch.manual_seed(0)
    model = Net().to(device, torch.float64)
    params = list(model.parameters())
    for number in frozen:
        params[number].requires_grad_(False)
    words = torch.randint(7, (batch, positions), device=device)
    loss = loss_of_words(model, words, names if other is None else [*names, other])
    expected = loop(loss, [param for param in params if param.requires_grad])
    in_one_pass.clear()
    grads = gradkit.per_loss_grads(loss, params, strategy="batched")
    found = [grad for grad, param in zip(grads, params, strict=True) if param.requires_grad]
    assert [grad is None for grad in found] == [grad is None for grad in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    torch.testing.assert_close(*map(list, zip(*pairs, strict=True)))
    assert_owned(found, [p.expand(batch, *p.shape).clone() for p in params if p.requires_grad])
    assert in_one_pass == ([0] if other is None else [])


def test_one_cotangent_for_two_biases_is_two_gradients(
    device: torch.device, in_one_pass: list[int]
) -> None:
    x, a, b = (torch.ones(*s, device=device) for s in ((3, 2), (2,), (2,)))
    grads = gradkit.per_loss_grads(
        (x + a.requires_grad_() + b.requires_grad_()).sum(1), [a, b], strategy="batched"
    )
    assert in_one_pass == [0]
    assert_owned(grads, [torch.ones(3, 2, device=device)] * 2)


def test_the_dtype_and_device_of_a_gradient_are_those_that_it_is_to_have(
    device: torch.device, in_one_pass: list[int]
) -> None:
    x, w = torch.ones(5, 3, device=device), torch.ones(3, device=device, requires_grad=True)
    w.grad_dtype = torch.float64
    number = torch.tensor(2.0, requires_grad=True)  # torch takes one of the CPU on all devices
    grads = gradkit.per_loss_grads((x * w * number).sum(1), [w, number], strategy="batched")
    assert [(g.dtype, g.device) for g in grads] == [
        (torch.float64, x.device),
        (torch.float32, number.device),
    ]
    grad = gradkit.per_loss_grads((x * number).sum(1), number, strategy="batched")
    assert grad.device == number.device
    assert in_one_pass == ([0] if device.type == "cpu" else [])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_pass_of_another_thread_through_the_same_graph(
    device: torch.device, in_one_pass: list[int], monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    """Nor does autocast around the call change the products, in whatever thread these are made."""
    model = convolutional(device).float()  # autocast leaves float64 alone
    params = list(model.parameters())
    loss = model(torch.randn(6, 2, 5, 5, device=device)).square().sum(1)
    expected = gradkit.per_loss_grads(loss, params, retain_graph=True)
    outside: list[tuple[Tensor, ...]] = []
    running: list[Thread] = []
    here, add = get_ident(), sample_pass.SamplePass._add

    def run_another(*args: Any) -> None:
        def another() -> None:
            outside.append(torch.autograd.grad(loss.sum(), params, retain_graph=True))

        # The thread of a device is needed by the other pass, too.
        if not running and get_ident() == here:
            running.append(Thread(target=another))
            running[0].start()
            running[0].join()
            running.clear()
        add(*args)

    monkeypatch.setattr(sample_pass.SamplePass, "_add", run_another)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        grads = gradkit.per_loss_grads(loss, params, strategy="batched", retain_graph=True)
    assert in_one_pass == [0]
    torch.testing.assert_close(grads, expected)
    assert len(outside) == 3 or (outside and device.type != "cpu")
    for total, one in zip(outside[0], expected, strict=True):
        torch.testing.assert_close(total, one.sum(0))


def test_inside_a_pass_each_element_has_its_own(
    device: torch.device, in_one_pass: list[int]
) -> None:
    model = convolutional(device)
    loss, found = losses_of(model), []

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
            found.append(gradkit.per_loss_grads(loss, model, strategy="auto", retain_graph=True))
            return cotangents[0]

    x = torch.ones((), device=device, requires_grad=True)
    torch.autograd.grad(Inner.apply(x), x)
    assert in_one_pass == []
    torch.testing.assert_close(found, [gradkit.per_loss_grads(loss, model)])
