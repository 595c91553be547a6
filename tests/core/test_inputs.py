"""What may stand for losses and params, and the trees that come back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit.errors import with_article
from tests.helpers import assert_owned, assert_same_bits, same_bits, unchanged

Pair = namedtuple("Pair", "x y")


@optree.dataclasses.dataclass(namespace="gradkit")
class Registered:
    weight: Any
    bias: Any


@optree.dataclasses.dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
class RegisteredForAll:
    weight: Any


@dataclass
class Unregistered:
    weight: Any


def leaf(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def small_net(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)


def test_containers_come_back_with_their_types_and_key_order(device: torch.device) -> None:
    w = {key: leaf(device, 2) for key in "abcdefgh"}
    params = {
        "z": w["a"],
        "a": [w["b"], (w["c"], None)],
        "o": OrderedDict([("second", w["d"]), ("first", w["e"])]),
        "n": Pair(w["f"], {"k": w["g"]}),
        "d": Registered(w["h"], None),
        "g": RegisteredForAll(w["a"]),
    }
    loss = sum((i + 1) * t.sum() for i, t in enumerate(w.values()))
    _, grads = gradkit.value_and_grads(loss, params)
    assert list(grads) == ["z", "a", "o", "n", "d", "g"]
    assert isinstance(grads["a"], list)
    assert isinstance(grads["a"][1], tuple)
    assert grads["a"][1][1] is None
    assert isinstance(grads["o"], OrderedDict)
    assert list(grads["o"]) == ["second", "first"]
    assert isinstance(grads["n"], Pair)
    assert isinstance(grads["d"], Registered)
    assert grads["d"].bias is None
    assert isinstance(grads["g"], RegisteredForAll)
    for got, factor in (
        (grads["z"], 1), (grads["a"][0], 2), (grads["a"][1][0], 3), (grads["o"]["second"], 4),
        (grads["o"]["first"], 5), (grads["n"].x, 6), (grads["n"].y["k"], 7),
        (grads["d"].weight, 8), (grads["g"].weight, 1),
    ):  # fmt: skip
        assert torch.equal(got, torch.full((2,), float(factor), device=device))


def test_losses_keep_their_structure_and_order(device: torch.device) -> None:
    w = leaf(device, 3)
    losses = {"z": w.sum(), "a": (w.mean(), [w.prod()])}
    values, _ = gradkit.value_and_grads(losses, w, retain_graph=True)
    assert list(values) == ["z", "a"]
    assert isinstance(values["a"], tuple)
    per_loss = gradkit.per_loss_grads(losses, {"w": w})
    assert list(per_loss) == ["z", "a"]
    assert torch.equal(per_loss["z"]["w"], torch.ones(3, device=device))
    assert set(per_loss["a"][1][0]) == {"w"}


def test_a_generator_of_losses_is_a_tuple(device: torch.device) -> None:
    w = leaf(device, 3)
    values, grads = gradkit.value_and_grads((loss for loss in (w.sum(), w.sum())), w)
    assert isinstance(values, tuple)
    assert torch.equal(grads, torch.full((3,), 2.0, device=device))


def test_a_module_is_the_dict_of_its_named_parameters(device: torch.device) -> None:
    model = small_net(device)
    model(torch.randn(5, 3, device=device)).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(torch.ones(5, 3, device=device)).sum()
    _, by_module = gradkit.value_and_grads(loss, model, retain_graph=True)
    _, by_dict = gradkit.value_and_grads(loss, dict(model.named_parameters()), retain_graph=True)
    _, nested = gradkit.value_and_grads(loss, {"net": model, "head": [model[2].weight]})
    assert list(by_module) == list(expected)
    assert_same_bits(by_module.values(), by_dict.values())
    assert_same_bits(nested["net"].values(), by_dict.values())
    assert same_bits(nested["head"][0], by_dict["2.weight"])


@pytest.mark.parametrize("kind", ["generator", "values", "optimizer", "children"])
def test_what_stands_for_a_tuple_of_tensors(device: torch.device, kind: str) -> None:
    model = small_net(device)
    params = {
        "generator": model.parameters,
        "values": lambda: dict(model.named_parameters()).values(),
        "optimizer": lambda: torch.optim.SGD([
            {"params": [model[0].weight]},
            {"params": [model[0].bias, *model[2].parameters()]},
        ]),
        "children": model.children,
    }[kind]()
    loss = model(torch.ones(5, 3, device=device)).square().sum()
    _, expected = gradkit.value_and_grads(loss, list(model.parameters()), retain_graph=True)
    _, grads = gradkit.value_and_grads(loss, params)
    assert isinstance(grads, tuple)
    if kind == "children":
        assert [set(part) for part in grads] == [{"weight", "bias"}, set(), {"weight", "bias"}]
        grads = [grad for part in grads for grad in part.values()]
    assert_same_bits(grads, expected)


def test_a_lone_tensor_is_a_tree(device: torch.device) -> None:
    w = leaf(device, 2, 3)
    value, grad = gradkit.value_and_grads(w.square().sum(), w)
    assert torch.equal(grad, 2 * w.detach())
    assert value.shape == ()


def test_none_stays_none(device: torch.device) -> None:
    w = leaf(device, 2)
    _, grads = gradkit.value_and_grads(w.sum(), {"w": w, "n": None}, unused="zeros")
    assert grads["n"] is None


def test_a_tied_tensor_is_one_variable_with_its_full_gradient_in_each_place(
    device: torch.device,
) -> None:
    w = leaf(device, 2)
    _, grads = gradkit.value_and_grads((w * w).sum() + w.sum(), {"in": w, "out": [w]})
    full = 2 * w.detach() + 1
    assert torch.equal(grads["in"], full)
    assert torch.equal(grads["out"][0], full)
    grads["in"].zero_()
    assert torch.equal(grads["out"][0], full)


def test_frozen_parameters_are_none_whatever_unused_says(device: torch.device) -> None:
    model = small_net(device)
    model[0].requires_grad_(False)
    for unused in ("none", "zeros", "error"):
        loss = model(torch.ones(1, 3, device=device)).sum()
        _, grads = gradkit.value_and_grads(loss, model, unused=unused)
        assert grads["0.weight"] is None
        assert grads["2.weight"] is not None


def test_a_module_s_integer_parameters_are_none_but_an_integer_tensor_is_a_mistake(
    device: torch.device,
) -> None:
    model = nn.Linear(2, 2).to(device)
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8, device=device), requires_grad=False)
    x = torch.ones(1, 2, device=device)
    _, grads = gradkit.value_and_grads(model(x).sum(), model)
    assert grads["codes"] is None
    _, grads = gradkit.value_and_grads(model(x).sum(), model.parameters())
    assert grads[2] is None
    integers = torch.ones(2, dtype=torch.int64, device=device)
    with (
        unchanged(*model.parameters()),
        pytest.raises(gradkit.LeafTypeError, match=r"params\['codes'\]\[0\].*int64"),
    ):
        gradkit.value_and_grads(model(x).sum(), {"codes": [integers], "w": model.weight})


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (lambda w: {"w": w, "bad": 1.5}, r"params\['bad'\].*float 1.5"),
        (lambda w: [w, np.ones(2)], r"params\[1\].*ndarray"),
        (lambda w: {"u": Unregistered(w)}, r"params\['u'\].*Unregistered"),
        (lambda w: [w, "name"], r"dict\(model.named_parameters\(\)\)"),
        (lambda w: [nn.LazyLinear(2), w], r"params\[0\]\['weight'\].*lazy"),
    ],
)
def test_a_leaf_that_is_no_tensor_is_refused(device: torch.device, params: Any, words: str) -> None:
    w = leaf(device, 2)
    loss = (w * w).sum()
    with unchanged(w, loss), pytest.raises(gradkit.LeafTypeError, match=f"(?s){words}") as caught:
        gradkit.value_and_grads(loss, params(w))
    assert isinstance(caught.value, TypeError)
    _, grad = gradkit.value_and_grads(loss, w)  # the graph can still be used
    assert torch.equal(grad, 2 * w.detach())


def test_an_empty_tree_is_refused(device: torch.device) -> None:
    w = leaf(device, 2)
    loss = (w * w).sum()
    spent = iter([w])
    next(spent)
    for losses, params in (({}, w), (loss, {}), (loss, []), (loss, spent), ([], [])):
        for call in (gradkit.value_and_grads, gradkit.per_loss_grads):
            with unchanged(w, loss), pytest.raises(gradkit.StructureError, match="at least one"):
                call(losses, params)
    with pytest.raises(gradkit.StructureError):
        gradkit.simultaneous_grads({}, {})
    gradkit.value_and_grads(loss, w)


class HiddenLayers(nn.Module):
    def __init__(self, container: Any) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.layers = container


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (lambda: HiddenLayers([nn.Linear(1, 1)]), r"module.inner.layers are not.*nn.ModuleList"),
        (lambda: HiddenLayers({"a": nn.Linear(1, 1)}), r"module.inner.layers are.*nn.ModuleDict"),
        (lambda: HiddenLayers([1, "a"]), "a module without parameters"),
        (lambda: iter(()), r"an iterator with nothing left.*list\(model.parameters\(\)\)"),
        (list, "an empty tree"),
    ],
)
def test_what_holds_no_params_is_named(device: torch.device, params: Any, words: str) -> None:
    w = leaf(device, 2)
    loss = (w * w).sum()
    with unchanged(w, loss), pytest.raises(gradkit.StructureError, match=f"(?s){words}"):
        gradkit.value_and_grads(loss, params())
    gradkit.value_and_grads(loss, w)


def test_a_state_dict_is_refused(device: torch.device) -> None:
    x = torch.ones(2, 3, device=device)
    plain, norm = nn.Linear(3, 3).to(device), nn.BatchNorm1d(3).to(device)
    for model, error in ((plain, gradkit.UnreachedParamError), (norm, gradkit.LeafTypeError)):
        loss = model(x).square().sum()
        with (
            unchanged(loss, *model.parameters()),
            pytest.raises(error, match=r"(?s)state_dict\(\).*pass the module"),
        ):
            gradkit.value_and_grads(loss, model.state_dict())
        gradkit.value_and_grads(loss, model)


def test_views_channels_last_and_transposed_parameters(device: torch.device) -> None:
    conv = nn.Conv2d(3, 4, 3).to(device, memory_format=torch.channels_last)
    transposed = torch.randn(4, 3, device=device).t().requires_grad_()
    strided = torch.randn(3, 8, device=device)[:, ::2].detach().requires_grad_()
    empty = torch.empty(0, 3, device=device).requires_grad_()
    loss = (
        conv(torch.randn(2, 3, 8, 8, device=device)).square().sum()
        + (transposed * torch.randn(3, 4, device=device)).sum()
        + strided.sum()
        + empty.sum()
    )
    params = [*conv.parameters(), transposed, strided, empty]
    _, grads = gradkit.value_and_grads(loss, params, retain_graph=True)
    assert_owned(grads, params)
    loss.backward()
    assert_same_bits(grads, [p.grad for p in params])
    for grad, param in zip(grads, params, strict=True):
        assert grad.stride() == param.grad.stride()


def test_dimensions_of_size_one_are_laid_out_as_backward_leaves_them(device: torch.device) -> None:
    p = torch.randn(1, 5, device=device, requires_grad=True)
    loss = (p.t() * torch.randn(5, 1, device=device)).sum()
    _, grad = gradkit.value_and_grads(loss, p, retain_graph=True)
    loss.backward()
    assert same_bits(grad, p.grad)
    assert grad.stride() == p.grad.stride()


def test_a_view_made_apart_from_the_graph_is_refused(device: torch.device) -> None:
    w = leaf(device, 4)
    loss = (w * w).sum()
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads):
        for params in (w[:2], {"head": w[:2], "other": leaf(device, 1)}):
            with unchanged(w, loss), pytest.raises(gradkit.UnreachedParamError, match="view"):
                call(loss, params)
    _, grads = gradkit.value_and_grads(loss, {"w": w, "head": w[:2]}, retain_graph=True)
    assert grads["head"] is None  # beside its base, at which the gradient stands
    assert torch.equal(grads["w"], 2 * w.detach())
    view = w[:2]
    _, grads = gradkit.value_and_grads(loss + (3 * view).sum(), {"w": w, "head": view})
    assert torch.equal(grads["head"], torch.full((2,), 3.0, device=device))


def test_a_view_whose_base_changed_in_place_after_its_use_is_refused(device: torch.device) -> None:
    w = leaf(device, 4)
    base = w * 1
    view = base[:2]
    loss = (view * 3).sum()
    base.mul_(5)  # view has another history now
    with pytest.raises(gradkit.UnreachedParamError):
        gradkit.value_and_grads(loss + (base * 1).sum(), {"view": view})


def test_a_non_leaf_changed_in_place_before_its_use_is_its_new_value(device: torch.device) -> None:
    w = leaf(device, 2)
    y = w * 2
    y.mul_(5)
    _, grads = gradkit.value_and_grads((y * 3).sum(), {"y": y, "w": w})
    assert torch.equal(grads["y"], torch.full((2,), 3.0, device=device))
    assert torch.equal(grads["w"], torch.full((2,), 30.0, device=device))


def test_complex_parameters(device: torch.device) -> None:
    z = torch.randn(3, device=device, dtype=torch.complex64).requires_grad_()
    loss = (z * z.conj()).real.sum() + z.imag.sum()
    _, grad = gradkit.value_and_grads(loss, z, retain_graph=True)
    loss.backward()
    assert same_bits(grad, z.grad)


def test_grad_dtype_is_honoured(device: torch.device) -> None:
    w = leaf(device, 3, dtype=torch.bfloat16)
    w.grad_dtype = torch.float32
    other = leaf(device, 3, dtype=torch.bfloat16)
    unused = leaf(device, 3, dtype=torch.bfloat16)
    unused.grad_dtype = torch.float32
    loss = (w * other).sum().float() + (w * 0.0039).sum().float()
    params = {"w": w, "other": other, "unused": unused}
    _, grads = gradkit.value_and_grads(loss, params, unused="zeros", retain_graph=True)
    loss.backward()
    assert same_bits(grads["w"], w.grad)
    assert same_bits(grads["other"], other.grad)
    assert grads["w"].dtype == grads["unused"].dtype == torch.float32


def test_a_sparse_embedding_stays_sparse(device: torch.device) -> None:
    table = nn.Embedding(10, 3, sparse=True).to(device)
    index = torch.tensor([1, 2, 1], device=device)
    loss = table(index).square().sum()
    _, grads = gradkit.value_and_grads(loss, table, retain_graph=True)
    loss.backward()
    assert grads["weight"].is_sparse
    assert same_bits(grads["weight"], table.weight.grad)
    before = index.clone()
    grads["weight"]._indices().zero_()
    assert torch.equal(index, before)


def test_typed_params_are_all_of_the_promised_kind(device: torch.device) -> None:
    model = small_net(device)
    loss = model(torch.ones(2, 3, device=device)).sum()
    _, grads = gradkit.value_and_grads(loss, model)
    assert_owned(grads.values(), model.parameters())


def test_an_unused_view_of_an_intermediate_value_is_a_structural_zero(device: torch.device) -> None:
    w = leaf(device, 4)
    h = w * 2
    used, unused = h[:2], h[2:]
    _, grads = gradkit.value_and_grads((used * 3).sum(), {"used": used, "unused": unused})
    assert grads["unused"] is None
    assert grads["used"].tolist() == [3, 3]
    changed = (w * 2).mul_(3)
    view = changed[2:]  # taken after the change
    assert gradkit.value_and_grads(changed.sum(), {"v": view, "w": w})[1]["v"] is None


@pytest.mark.parametrize(
    "said",
    ["a Linear", "an SGD", "an Adam", "a ReLU", "an MSELoss", "an L1Loss", "an LSTM", "a GRU",
     "an int64", "a uint8", "a float32", "an Upsample", "a UNet", "a Sequential"],
)  # fmt: skip
def test_names_have_the_article_with_which_they_are_said(device: torch.device, said: str) -> None:
    assert with_article(said.partition(" ")[2]) == said
