"""Losses of every kind: shared, repeated, constant, vectors, infinite, and what weights do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._core.call import params_of_each_loss, read_losses
from tests.helpers import assert_same_bits, same_bits, unchanged


def trunk(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).to(device)
    return model, model(torch.randn(5, 3, device=device))


def test_a_loss_that_is_another_s_ancestor(device: torch.device) -> None:
    model, h = trunk(device)
    first = h.square().sum()
    second = (first * 3).exp().log()
    params = list(model.parameters())
    a = torch.autograd.grad(first, params, retain_graph=True)
    b = torch.autograd.grad(second, params, retain_graph=True)
    joint = torch.autograd.grad([first, second], params, retain_graph=True)
    for order in ([first, second], [second, first]):
        expected = (a, b) if order[0] is first else (b, a)
        per_loss = gradkit.per_loss_grads(order, params, retain_graph=True)
        for got, row in zip(per_loss, expected, strict=True):
            assert_same_bits(got, row)
        assert_same_bits(gradkit.value_and_grads(order, params, retain_graph=True)[1], joint)
    per_loss = gradkit.per_loss_grads([first, second], params)  # and freeing the graph
    assert_same_bits(per_loss[0], a)
    assert_same_bits(per_loss[1], b)


def test_the_same_tensor_twice_counts_twice(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    loss = (w * w).sum()
    _, grad = gradkit.value_and_grads([loss, loss], w, retain_graph=True)
    assert torch.equal(grad, 4 * w.detach())
    first, second = gradkit.per_loss_grads((loss, loss), w)
    assert torch.equal(first, 2 * w.detach())
    assert same_bits(first, second)


def test_a_constant_among_others_contributes_nothing(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    losses = {"fit": (w * w).sum(), "constant": torch.ones((), device=device)}
    values, grads = gradkit.value_and_grads(losses, [w], retain_graph=True)
    assert torch.equal(grads[0], 2 * w.detach())
    assert values["constant"] == 1
    per_loss = gradkit.per_loss_grads(losses, [w, None], retain_graph=True)
    assert per_loss["constant"] == [None, None]
    zeros = gradkit.per_loss_grads(losses, [w], unused="zeros")
    assert torch.equal(zeros["constant"][0], torch.zeros(3, device=device))


def test_only_constants_are_refused(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    with torch.no_grad():
        made_without = (w * w).sum()
    for losses in (made_without, {"a": made_without, "b": (w * w).sum().detach()}):
        for call in (gradkit.value_and_grads, gradkit.per_loss_grads):
            with unchanged(w), pytest.raises(gradkit.DetachedLossError, match="losses"):
                call(losses, w)


CALLS: list[Callable[[Tensor, Any], Any]] = [
    gradkit.value_and_grads,
    gradkit.per_loss_grads,
    gradkit.backward_,
    gradkit.gram,
    gradkit.per_loss_norms,
    lambda loss, params: gradkit.simultaneous_grads({"a": loss}, {"a": params}),
    lambda loss, params: gradkit.value_and_grads([loss], params, weights=[2.0], unused="error"),
    lambda loss, params: gradkit.value_and_reduced_grads(loss, params, torch.Tensor.norm),
]


@pytest.mark.parametrize("call", CALLS)
def test_parameters_that_do_not_require_grad_are_named(
    device: torch.device, call: Callable[..., Any]
) -> None:
    w, b = torch.randn(3, device=device), torch.randn(3, device=device)
    x, whole = torch.randn(4, 3, device=device), torch.ones(2, dtype=torch.int64, device=device)

    def loss() -> Tensor:
        return (x @ w + b.sum()).square().sum()

    with pytest.raises(
        gradkit.DetachedLossError,
        match=r"\['w'\], .*\['b'\]: expected parameters that require grad",
    ) as caught:
        call(loss(), {"w": w, "b": b, "none": None})
    assert "['w'].requires_grad_()" in str(caught.value)
    aside = nn.Parameter(torch.ones(2, device=device))
    count = nn.Parameter(whole, requires_grad=False)  # which cannot be trained: it is not named
    with pytest.raises(gradkit.DetachedLossError, match=r"without requires_grad is [^,]*\['w'\]\."):
        call(loss(), {"w": w, "aside": aside, "count": count})
    w.requires_grad_()  # too late for that loss, and right for the next
    constant = (x @ w.detach()).sum()
    with pytest.raises(gradkit.DetachedLossError, match=r"losses.* a loss that carries a graph"):
        call(constant, {"w": w})
    call(loss(), {"w": w, "b": b})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_checkpoint_of_constants_is_named(
    device: torch.device, call: Callable[..., Any]
) -> None:
    block, x = nn.Linear(3, 3).to(device), torch.randn(4, 3, device=device)
    loss = checkpoint(block, x, use_reentrant=True).square().sum()
    with pytest.raises(gradkit.DetachedLossError, match="by a checkpoint with use_reentrant=True"):
        call(loss, block)
    call(checkpoint(block, x, use_reentrant=False).square().sum(), block)  # as it says


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda w: 1.5, gradkit.LeafTypeError, r"losses\['aux'\].*float 1.5"),
        (lambda w: None, gradkit.LeafTypeError, r"losses\['aux'\].*NoneType"),
        (lambda w: w.sum().item(), gradkit.LeafTypeError, r"before .item\(\)"),
        (lambda w: w.argmax(), gradkit.LeafTypeError, r"losses\['aux'\].*int64"),
        (lambda w: w.sum() * 1j, gradkit.LeafTypeError, r"losses\['aux'\].*complex64"),
        (lambda w: w * 2, gradkit.NotScalarLossError, r"losses\['aux'\].*\(3,\)"),
        (lambda w: w[:0], gradkit.NotScalarLossError, r"losses\['aux'\].*\(0,\)"),
    ],
)
def test_what_is_no_loss_is_refused(
    device: torch.device, loss: Any, error: type[Exception], words: str
) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    good = (w * w).sum()
    losses = {"main": good, "aux": loss(w)}
    with unchanged(w, good), pytest.raises(error, match=f"(?s){words}"):
        gradkit.value_and_grads(losses, w)
    if error is gradkit.LeafTypeError:
        with unchanged(w, good), pytest.raises(error, match=f"(?s){words}"):
            gradkit.per_loss_grads(losses, w)
    assert torch.equal(gradkit.value_and_grads(good, w)[1], 2 * w.detach())


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_element_of_any_shape_is_a_loss(device: torch.device, shape: tuple[int, ...]) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    loss = (w * w).sum().reshape(shape)
    value, grad = gradkit.value_and_grads(loss, w, retain_graph=True)
    assert value.shape == shape
    assert torch.equal(grad, 2 * w.detach())
    per_loss = gradkit.per_loss_grads(loss, w)
    assert per_loss.shape == (*shape, 3)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2)])
def test_a_loss_of_any_shape_is_ordered_as_jacrev_orders_it(
    device: torch.device, shape: tuple[int, ...]
) -> None:
    w = torch.randn(4, 3, device=device, dtype=torch.float64)
    x = torch.randn(3, device=device, dtype=torch.float64)

    def fn(w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(w @ x).reshape(shape)

    expected = torch.func.jacrev(fn)(w)
    for leaf in (w.clone().requires_grad_(), w.t().contiguous().t().requires_grad_()):
        for strategy in ("sequential", "batched"):
            grads = gradkit.per_loss_grads(fn(leaf), leaf, strategy=strategy)
            assert grads.shape == shape + w.shape
            torch.testing.assert_close(grads, expected)
            assert grads.stride()[-2:] == leaf.stride()


def test_an_empty_vector_of_losses_has_empty_gradients(device: torch.device) -> None:
    w, v = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    grads = gradkit.per_loss_grads((w * 2)[:0], {"w": w, "v": v})
    assert grads["w"].shape == (0, 3)
    assert grads["v"] is None
    for strategy in ("sequential", "batched", "auto"):  # and no warning that nothing was batched
        for chunk_size in (None, 2):
            options = {"strategy": strategy, "chunk_size": chunk_size}
            assert gradkit.per_loss_grads((w * 2)[:0], w, **options).shape == (0, 3)
            losses = {"none": (w * 2)[:0], "some": w * 2}
            per_loss = gradkit.per_loss_grads(losses, w, **options)
            assert per_loss["none"].shape == (0, 3)
            assert torch.equal(per_loss["some"], 2 * torch.eye(3, device=device))
            ours = gradkit.func.per_loss_grads(lambda w: (w * 2)[:0], **options)
            assert ours(w.detach()).shape == (0, 3)


class SkipsZero(torch.autograd.Function):
    """Does no work where the cotangent is zero, so that an element may leave out a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        return grad * 1 if bool(grad.ne(0).any()) else None


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    ("kinds", "shape"),
    [
        ("sd", (2,)), ("ds", (2,)), ("dsdn", (2, 2)), ("ndsn", (4,)), ("snds", (2, 1, 2)),
        ("s", (1, 1)), ("ss", (2, 1)), ("nsns", (2, 2)), ("nnsn", (4,)), ("nd", (2,)),
    ],
)  # fmt: skip
def test_sparse_and_dense_rows_are_those_of_autograd(
    device: torch.device, kinds: str, shape: tuple[int, ...], create_graph: bool
) -> None:
    w = torch.randn(3, 2, device=device, requires_grad=True)
    index = torch.tensor([1, 0], device=device)
    other = torch.zeros((), device=device, requires_grad=True)
    elements = {
        "s": lambda: nn.functional.embedding(index, w, sparse=True).sum(),
        "d": lambda: (3 * w**2).sum(),
        "n": lambda: other * 2,
    }
    vector = torch.stack([SkipsZero.apply(elements[kind]()) for kind in kinds])
    rows = [torch.autograd.grad(x, w, retain_graph=True, allow_unused=True)[0] for x in vector]
    dense = [torch.zeros_like(w) if row is None else row.to_dense() for row in rows]
    expected = torch.stack(dense).reshape(*shape, 3, 2)
    options = {"create_graph": create_graph, "retain_graph": True}
    got = gradkit.per_loss_grads(vector.reshape(shape), w, **options)
    assert got.is_sparse == ("d" not in kinds)
    assert got.shape == expected.shape
    assert torch.equal(got.to_dense(), expected)
    assert got.requires_grad == (create_graph and got.layout == torch.strided)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_inf_or_nan_in_one_loss_reaches_no_other_s_gradients(
    device: torch.device, bad: float
) -> None:
    model, h = trunk(device)
    head = torch.full((4,), bad, device=device, requires_grad=True)
    losses = {"bad": (h * head).sum(), "good": h.square().sum()}
    params = {"net": model, "head": head}
    expected = torch.autograd.grad(losses["good"], list(model.parameters()), retain_graph=True)
    for strategy in ("sequential", "auto"):
        per_loss = gradkit.per_loss_grads(losses, params, strategy=strategy, retain_graph=True)
        assert_same_bits(per_loss["good"]["net"].values(), expected)
        assert per_loss["good"]["head"] is None
        assert not per_loss["bad"]["net"]["0.bias"].isfinite().any()


def test_a_loss_that_is_a_parameter(device: torch.device) -> None:
    w = torch.tensor(3.0, device=device, requires_grad=True)
    _, grad = gradkit.value_and_grads(w, w)
    assert grad == 1
    _, grad = gradkit.value_and_grads([w, 3 * w], w)
    assert grad == 4
    assert gradkit.per_loss_grads({"a": w, "b": w * w}, {"w": w}) == {
        "a": {"w": torch.ones((), device=device)},
        "b": {"w": torch.full((), 6.0, device=device)},
    }


def test_values_are_detached_copies(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    losses = {"a": (w * w).sum(), "b": w.sum().reshape(1)}
    with unchanged(w, *losses.values()):
        values, _ = gradkit.value_and_grads(losses, w, retain_graph=True)
        assert_same_bits(values.values(), [loss.detach() for loss in losses.values()])
        for value in values.values():
            assert not value.requires_grad
            value.zero_()
    values, _ = gradkit.value_and_grads(losses, w, create_graph=True)
    assert values["a"].requires_grad


def test_weights_may_be_a_prefix_numbers_or_tensors(device: torch.device) -> None:
    w = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)

    def losses() -> dict[str, Any]:
        return {"a": (w * w).sum(), "b": [w.sum(), (w**3).sum().reshape(1)]}

    d = w.detach()
    want = 0.5 * 2 * d + 2 * (1 + 3 * d**2)
    for weights in (
        {"a": 0.5, "b": 2},
        {"b": [2, 2.0], "a": torch.tensor(0.5)},
        {"a": torch.tensor([0.5], device=device), "b": torch.tensor(2.0, dtype=torch.float64)},
    ):
        values, grad = gradkit.value_and_grads(losses(), w, weights=weights)
        torch.testing.assert_close(grad, want)
        torch.testing.assert_close(values["b"][0], d.sum())
    _, grad = gradkit.value_and_grads(losses(), w, weights=3.0)
    torch.testing.assert_close(grad, 3 * (2 * d + 1 + 3 * d**2))


def test_a_learned_weight_gets_its_gradient(device: torch.device) -> None:
    w = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)
    s = torch.zeros(2, device=device, dtype=torch.float64, requires_grad=True)
    losses = [(w * w).sum(), w.sum()]
    weights = [torch.exp(-s[0]), torch.exp(-s[1])]
    params = {"w": w, "s": s}
    values, grads = gradkit.value_and_grads(losses, params, weights=weights)
    torch.testing.assert_close(grads["s"], -torch.stack(values))
    torch.testing.assert_close(grads["w"], 2 * w.detach() + 1)


def test_weights_do_not_alias_the_result(device: torch.device) -> None:
    w = torch.ones(1, device=device, requires_grad=True)
    weight = torch.full((), 2.0, device=device)
    _, grad = gradkit.value_and_grads(w.reshape(()), w, weights=weight)
    grad.zero_()
    assert weight == 2


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ({"a": 1.0}, gradkit.StructureError),
        ({"a": 1.0, "c": 1.0}, gradkit.StructureError),
        ([1.0, 1.0], gradkit.StructureError),
        ({"a": 1.0, "b": "x"}, gradkit.LeafTypeError),
        ({"a": 1.0, "b": None}, gradkit.LeafTypeError),
        ({"a": 1.0, "b": torch.ones(2)}, gradkit.LeafTypeError),
        ({"a": 1.0, "b": 1j}, gradkit.LeafTypeError),
        ({"a": 1.0, "b": torch.ones((), device="meta")}, gradkit.LeafTypeError),
        ({"a": 1.0, "b": torch.ones(1).to_sparse()}, gradkit.LeafTypeError),
        ({"a": 1.0, "b": True}, gradkit.LeafTypeError),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    device: torch.device, weights: Any, error: type[Exception]
) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    losses = {"a": (w * w).sum(), "b": (w * w * w).sum()}
    with unchanged(w, *losses.values()), pytest.raises(error, match="weight"):
        gradkit.value_and_grads(losses, w, weights=weights)
    gradkit.value_and_grads(losses, w)


def test_a_weight_that_no_float_holds_is_refused(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    with unchanged(w), pytest.raises(gradkit.LeafTypeError, match="fits in a float"):
        gradkit.value_and_grads(w.sum(), w, weights=10**400)


def test_unused_none_zeros_error(device: torch.device) -> None:
    w, v = (torch.randn(3, 2, device=device).t().requires_grad_() for _ in range(2))
    loss = (w * w).sum()
    _, grads = gradkit.value_and_grads(loss, {"w": w, "v": v}, retain_graph=True)
    assert grads["v"] is None
    for call in (
        lambda **kw: gradkit.value_and_grads(loss, {"w": w, "v": v}, **kw)[1],
        lambda **kw: gradkit.per_loss_grads({"l": loss}, {"w": w, "v": v}, **kw)["l"],
        lambda **kw: gradkit.simultaneous_grads({"l": loss}, {"l": {"w": w, "v": v}}, **kw)["l"],
    ):
        zeros = call(unused="zeros", retain_graph=True)["v"]
        assert torch.equal(zeros, torch.zeros_like(v))
        assert zeros.stride() == v.stride()
        with unchanged(w, v, loss), pytest.raises(gradkit.UnreachedParamError, match=r"\['v'\]"):
            call(unused="error")
    # Refused before the engine ran: the graph is still there, though no call kept it.
    assert torch.equal(gradkit.value_and_grads(loss, w)[1], 2 * w.detach())


def test_nothing_reached_is_an_error_whatever_unused_says(device: torch.device) -> None:
    w, v = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    loss = (w * w).sum()
    for unused in ("none", "zeros", "error"):
        for call in (gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.simultaneous_grads):
            with unchanged(w, v, loss), pytest.raises(gradkit.UnreachedParamError, match="params"):
                call(loss, v, unused=unused)
            frozen = torch.ones(2, device=device)
            with unchanged(w, loss), pytest.raises(gradkit.UnreachedParamError, match="requires"):
                call(loss, frozen, unused=unused)
    assert torch.equal(gradkit.value_and_grads(loss, w)[1], 2 * w.detach())


@pytest.mark.parametrize(
    "options",
    [{"unused": "zero"}, {"strategy": "parallel"}, {"chunk_size": 0}, {"chunk_size": 2.5}],
)
def test_an_option_with_no_such_value_is_refused(
    device: torch.device, options: dict[str, Any]
) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    with pytest.raises(gradkit.OptionError, match=next(iter(options))):
        gradkit.per_loss_grads((w * w).sum(), w, **options)


def test_simultaneous_grads_of_a_gan_are_those_of_two_detached_passes(device: torch.device) -> None:
    generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    noise, real = torch.randn(6, 2, device=device), torch.randn(6, 3, device=device)

    fake = generator(noise)
    loss_g = -critic(fake).mean()
    loss_d = critic(fake).mean() - critic(real).mean()
    with unchanged(*generator.parameters(), *critic.parameters()):
        grads = gradkit.simultaneous_grads(
            {"G": loss_g, "D": loss_d}, {"G": generator, "D": critic.parameters()}
        )
    expected_g = torch.autograd.grad(-critic(generator(noise)).mean(), list(generator.parameters()))
    fake = generator(noise).detach()
    loss_d = critic(fake).mean() - critic(real).mean()
    expected_d = torch.autograd.grad(loss_d, list(critic.parameters()))
    assert list(grads) == ["G", "D"]
    assert_same_bits(grads["G"].values(), expected_g)
    assert_same_bits(grads["D"], expected_d)


def test_simultaneous_grads_match_by_key(device: torch.device) -> None:
    w, v = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    losses = {"a": (2 * w).sum(), "b": (3 * v).sum()}
    grads = gradkit.simultaneous_grads(losses, {"b": v, "a": [w]})
    assert torch.equal(grads["a"][0], torch.full((3,), 2.0, device=device))
    assert torch.equal(grads["b"], torch.full((3,), 3.0, device=device))


def test_simultaneous_grads_refuses_losses_that_are_no_prefix(device: torch.device) -> None:
    w, v = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    loss = (w * v).sum()
    for losses, params in (
        ({"a": loss}, {"b": w}),
        ({"a": loss}, {"a": w, "b": v}),
        ([loss, loss], nn.Linear(2, 2)),
    ):
        with unchanged(w, v, loss), pytest.raises(gradkit.StructureError, match="params"):
            gradkit.simultaneous_grads(losses, params)
    grads = gradkit.simultaneous_grads(
        {"a": loss, "b": torch.ones((), device=device)}, {"a": w, "b": {"v": v}}
    )
    assert torch.equal(grads["a"], v.detach())
    assert grads["b"] == {"v": None}


def a_function(w: torch.Tensor) -> torch.Tensor:
    return (w * w).sum()


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (lambda model: model, r"losses: .*a Linear.*\(losses, params\), in this order"),
        (lambda model: {"fit": model}, r"losses\['fit'\]: .*\(losses, params\)"),
        (lambda model: torch.optim.SGD(model.parameters()), r"an? SGD.*\(losses, params\)"),
        (lambda model: a_function, r"losses: .*call it.*gradkit.func.value_and_grads\(fn\)"),
        (lambda model: [lambda: 1.0], r"losses\[0\]: .*call it"),
        (lambda model: "fit", r"losses: .*got the str 'fit'"),
    ],
)
def test_what_stands_in_the_place_of_losses_by_mistake(
    device: torch.device, losses: Any, words: str
) -> None:
    model = nn.Linear(2, 1).to(device)
    loss = model(torch.ones(1, 2, device=device)).sum()
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.backward_):
        with (
            unchanged(loss, *model.parameters()),
            pytest.raises(gradkit.LeafTypeError, match=f"(?s){words}") as caught,
        ):
            call(losses(model), loss)
        assert isinstance(caught.value, gradkit.GradkitError)
    gradkit.value_and_grads(loss, model)  # the graph can still be used


def test_params_in_the_place_of_losses(device: torch.device) -> None:
    model = nn.Linear(2, 1).to(device)
    loss = model(torch.ones(1, 2, device=device)).sum()
    with pytest.raises(gradkit.NotScalarLossError, match=r"(?s)losses\[0\].*\(losses, params\)"):
        gradkit.value_and_grads(model.parameters(), loss)


def test_a_value_that_gradkit_returned_is_detached(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    value, _ = gradkit.value_and_grads((w * w).sum(), w)
    with unchanged(w), pytest.raises(gradkit.DetachedLossError, match=r"(?s)create_graph=True"):
        gradkit.value_and_grads(value, w)
    value, _ = gradkit.value_and_grads((w * w).sum(), w, create_graph=True)
    _, grad = gradkit.value_and_grads(value, w)
    assert torch.equal(grad, 2 * w.detach())


def test_the_advice_for_a_tensor_of_weights_works(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    weights = torch.tensor([2.0, 3.0])
    for losses, advised, text in (
        ([w.sum(), w.sum()], list(weights), r"weights=list\(weights\)"),
        ({"a": w.sum(), "b": w.sum()}, None, r"weights=dict\(zip\(losses, weights\)\)"),
    ):
        with unchanged(w), pytest.raises(gradkit.LeafTypeError, match=text):
            gradkit.value_and_grads(losses, w, weights=weights)
        by_loss = dict(zip(losses, weights, strict=True)) if advised is None else advised
        _, grad = gradkit.value_and_grads(losses, w, weights=by_loss)
        assert torch.equal(grad, torch.full_like(w, 5.0).detach())


def test_the_players_of_a_game_in_one_module(device: torch.device) -> None:
    players = nn.ModuleList(nn.Linear(2, 1) for _ in range(2)).to(device)
    losses = [player(torch.ones(1, 2, device=device)).sum() for player in players]
    read = read_losses(losses, scalar=True)
    with pytest.raises(gradkit.StructureError, match=r"(?s)params: .*a ModuleList.*list\(params\)"):
        params_of_each_loss(read, players)
    assert params_of_each_loss(read, list(players)) == list(players)
    assert params_of_each_loss(read_losses(losses[0], scalar=True), players) == [players]


def test_the_params_of_a_constant_loss_are_unreached(device: torch.device) -> None:
    q, r = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    losses = {"a": q.sum(), "b": torch.tensor(1.0, device=device)}
    with pytest.raises(gradkit.UnreachedParamError, match=r"params\['b'\]"):
        gradkit.simultaneous_grads(losses, {"a": q, "b": r}, unused="error")
    assert gradkit.simultaneous_grads(losses, {"a": q, "b": r})["b"] is None
