"""Arguments of the .grad workflow that are something else: named, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.helpers import unchanged


def trained(device: torch.device) -> tuple[nn.Linear, torch.optim.Optimizer, Tensor, Any]:
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3, device=device)).square().sum()
    _, grads = gradkit.value_and_grads(loss, model, retain_graph=True)
    return model, optimizer, loss, grads


def pair_of(loss: Tensor, params: Any) -> Any:
    return gradkit.value_and_grads(loss, params, retain_graph=True)


STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    "model, optimizer, grads": (lambda m, o, loss, g: (m, o, g), "optimizer: .*optimizer first"),
    "model, grads, optimizer": (lambda m, o, loss, g: (m, g, o), "optimizer: .*optimizer first"),
    "the class": (lambda m, o, loss, g: (torch.optim.SGD, m, g), "SGD.*model.parameters"),
    "a scheduler": (
        lambda m, o, loss, g: (torch.optim.lr_scheduler.StepLR(o, 1), m, g),
        "StepLR.*the optimizer itself",
    ),
    "None": (lambda m, o, loss, g: (None, m, g), "optimizer: expected a torch.optim.Optimizer"),
    "a pure optimizer": (lambda m, o, loss, g: (gradkit.meta.sgd(), m, g), "optimizer: expected"),
    "grads, model": (lambda m, o, loss, g: (o, g, m), "grads: .*Linear.*params before grads"),
    "grads, parameters": (
        lambda m, o, loss, g: (o, g, dict(m.named_parameters())),
        "grads: .*params before grads",
    ),
    "the pair": (lambda m, o, loss, g: (o, m, pair_of(loss, m)), "unpacked.*value, grads ="),
    "the pair of two tensors": (
        lambda m, o, loss, g: (o, m.parameters(), pair_of(loss, m.parameters())),
        "unpacked.*value, grads =",
    ),
    "the pair of one tensor": (
        lambda m, o, loss, g: (o, m.weight, pair_of(loss, m.weight)),
        "unpacked.*value, grads =",
    ),
    "a state_dict as grads": (
        lambda m, o, loss, g: (o, m, m.state_dict()),
        "grads: .*state_dict.*value_and_grads",
    ),
    "a state_dict as params": (
        lambda m, o, loss, g: (o, m.state_dict(), g),
        "params: .*state_dict.*the module itself",
    ),
    "the loss": (lambda m, o, loss, g: (o, m, loss), "grads: .*a loss: .*value, grads ="),
    "the value": (lambda m, o, loss, g: (o, m, loss.detach()), "grads: expected a dict"),
    "None as grads": (lambda m, o, loss, g: (o, m, None), "grads: expected a dict.*None"),
    "of several losses": (
        lambda m, o, loss, g: (
            o, m, gradkit.per_loss_grads({"a": loss, "b": 2 * loss}, m, retain_graph=True)
        ),
        "grads: .*several losses.*combine",
    ),
    "half of the gradients": (
        lambda m, o, loss, g: (o, m, {"weight": g["weight"]}),
        "grads: expected the keys of params .'weight', 'bias'., got no key 'bias'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STEPS)
def test_step__names_what_was_passed_instead(device: torch.device, kind: str) -> None:
    model, optimizer, loss, grads = trained(device)
    model.weight.grad = torch.ones_like(model.weight)
    make, text = STEPS[kind]
    arguments = make(model, optimizer, loss, grads)
    before = optimizer.state_dict()
    with (
        unchanged(*model.parameters(), loss, *grads.values()),
        pytest.raises(gradkit.GradkitError, match=f"(?s){text}"),
    ):
        gradkit.step_(*arguments)
    assert optimizer.state_dict() == before


def test_write_and_add_name_what_was_passed_instead(device: torch.device) -> None:
    model, _, loss, grads = trained(device)
    for call in (gradkit.write_grads_, gradkit.add_grads_):
        for arguments, text in (
            ((model, pair_of(loss, model)), "unpacked"),
            ((grads, model), "params before grads"),
            ((model, model.state_dict()), "state_dict"),
            ((model.state_dict(), grads), "state_dict"),
        ):
            with unchanged(*model.parameters()), pytest.raises(gradkit.GradkitError, match=text):
                call(*arguments)
    for read in (gradkit.read_grads, gradkit.clear_grads_):
        with unchanged(*model.parameters()), pytest.raises(gradkit.LeafTypeError, match="state_di"):
            read(model.state_dict())


def test_a_state_dict_of_the_parameters_themselves_is_one_of_params(device: torch.device) -> None:
    model, optimizer, _, grads = trained(device)
    before = model.weight.detach().clone()
    gradkit.step_(optimizer, model.state_dict(keep_vars=True), grads)
    assert torch.equal(model.weight, before - 0.1 * grads["weight"])


def test_two_gradients_of_two_tensors_are_no_pair(device: torch.device) -> None:
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    _, grads = gradkit.value_and_grads((a * b).sum(), (a, b))
    gradkit.step_(torch.optim.SGD([a, b], lr=0.1), (a, b), grads)
    torch.testing.assert_close(a.detach(), torch.full_like(a, 0.9))
    with pytest.raises(gradkit.StructureError, match=r"grads\[1\]: expected the gradient of"):
        gradkit.write_grads_((a, b), (grads[0], torch.ones(3, device=device)))


def test_step__names_the_parameter_that_the_optimizer_does_not_have(device: torch.device) -> None:
    model = nn.ModuleDict({"trunk": nn.Linear(2, 2), "head": nn.Linear(2, 1)}).to(device)
    optimizer = torch.optim.SGD(model["trunk"].parameters(), lr=0.1)
    grads = gradkit.tree.map(torch.ones_like, model)
    with (
        unchanged(*model.parameters()),
        pytest.raises(
            gradkit.StructureError,
            match=r"^params\['head.weight'\]: expected a parameter of the optimizer, got a float32",
        ),
    ):
        gradkit.step_(optimizer, model, grads)
    gradkit.step_(optimizer, model, grads | {"head.weight": None, "head.bias": None})


def test_wrong_options_change_nothing(device: torch.device) -> None:
    model, optimizer, loss, grads = trained(device)
    for call, name in (
        (lambda: gradkit.step_(optimizer, model, grads, scaler=True), "scaler"),
        (lambda: gradkit.add_grads_(model, grads, hooks=1), "hooks"),
        (lambda: gradkit.read_grads(model, unused=None), "unused"),
        (lambda: gradkit.backward_(loss, retain_graph=1), "retain_graph"),
        (lambda: gradkit.backward_(loss, create_graph=None), "create_graph"),
    ):
        with (
            unchanged(*model.parameters(), loss),
            pytest.raises(gradkit.OptionError, match=f"^{name}: expected"),
        ):
            call()
    gradkit.backward_(loss)


def test_the_gradients_of_a_tuple_of_two_losses_are_no_pair(device: torch.device) -> None:
    model = nn.Linear(2, 1).to(device)
    out = model(torch.ones(3, 2, device=device))
    grads = gradkit.per_loss_grads((out.mean(), out.square().sum()), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        unchanged(*model.parameters()),
        pytest.raises(gradkit.StructureError, match="got those of several losses"),
    ):
        gradkit.step_(optimizer, model, grads)


@pytest.mark.parametrize("max_norm", [None, 10.0])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_step_with_a_scaler_that_raises_can_be_tried_again(
    device: torch.device, max_norm: float | None, unscaled: bool
) -> None:
    """The scaler, too, is as it was: it would step with gradients that are not unscaled."""

    def weight_after(failures: int) -> Tensor:
        w = torch.ones(2, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1.0)
        scaler = torch.amp.GradScaler(device.type, init_scale=65536.0)
        _, grads = gradkit.value_and_grads(scaler.scale((2 * w).sum()), [w])
        if unscaled:
            gradkit.write_grads_([w], grads)
            scaler.unscale_(optimizer)
            grads = gradkit.read_grads([w])
        handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        for _ in range(failures):
            with pytest.raises(ZeroDivisionError):
                gradkit.step_(optimizer, [w], grads, scaler=scaler, max_norm=max_norm)
        handle.remove()
        gradkit.step_(optimizer, [w], grads, scaler=scaler, max_norm=max_norm)
        return w

    assert torch.equal(weight_after(2), weight_after(0))
    assert torch.equal(weight_after(0), torch.full((2,), -1.0, device=device))


@pytest.mark.parametrize("call", ["step_", "minimize_"])
@pytest.mark.parametrize("max_norm", [1.0, 5.0])
def test_sparse_gradients_are_clipped(device: torch.device, call: str, max_norm: float) -> None:
    """As the same dense ones, beside others; torch's clip_grad_norm_ takes them from 2.14 on."""

    def stepped(*, sparse: bool) -> tuple[Tensor, list[Tensor]]:
        table = nn.Embedding(4, 2, sparse=sparse, device=device)
        layer = nn.Linear(2, 1, device=device)
        for p in (*table.parameters(), *layer.parameters()):
            p.data.fill_(0.5)
        params = [*table.parameters(), *layer.parameters()]
        optimizer = torch.optim.SGD(params, lr=1.0)
        loss = layer(table(torch.tensor([1, 2, 2], device=device))).sum()
        if call == "minimize_":
            _, norm = gradkit.minimize_(optimizer, loss, max_norm=max_norm)
        else:
            _, grads = gradkit.value_and_grads(loss, params)
            kept = grads[0].clone()
            norm = gradkit.step_(optimizer, params, grads, max_norm=max_norm)
            assert torch.equal(grads[0].to_dense(), kept.to_dense())
        return norm, [p.detach() for p in params]

    for ours, right in zip(stepped(sparse=True), stepped(sparse=False), strict=True):
        torch.testing.assert_close(ours, right)


class Counting(torch.optim.SGD):
    """Keeps something in its state that belongs to no parameter."""

    first: Any = 0

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", self.first) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", ["tensor", "number", "text", "on torch's own"])
@pytest.mark.parametrize("call", ["step_", "minimize_"])
def test_a_state_of_no_parameter(device: torch.device, kind: str, call: str) -> None:
    def run(step: Callable[[Any, Tensor], object]) -> Tensor:
        w = torch.ones(2, device=device, requires_grad=True)
        cls: Any = torch.optim.SGD if kind == "on torch's own" else Counting
        optimizer = cls([w], 0.1, momentum=0.9)
        if kind == "text":
            optimizer.state["note"] = "text"
        elif kind != "number":
            optimizer.state["steps"] = torch.zeros(1, device=device)
        for _ in range(3):
            step(optimizer, w)
        return w.detach()

    def by_loop(optimizer: Any, w: Tensor) -> None:
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()

    def by_gradkit(optimizer: Any, w: Tensor) -> None:
        if call == "minimize_":
            gradkit.minimize_(optimizer, (w * w).sum())
        else:
            gradkit.step_(optimizer, [w], gradkit.value_and_grads((w * w).sum(), [w])[1])

    assert torch.equal(run(by_gradkit), run(by_loop))


class OfTuples:
    """An optimizer of another library, whose groups are tuples of tensors."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [tuple(params)]

    def step(self) -> None:
        raise AssertionError


def test_an_optimizer_that_is_not_torch_s(device: torch.device) -> None:
    model, _, loss, grads = trained(device)
    optimizer: Any = OfTuples(model.parameters())
    refused = pytest.raises(gradkit.UnsupportedOptimizerError, match=r"OfTuples(?s:.*)dicts with")
    with unchanged(*model.parameters()):
        with refused:
            gradkit.minimize_(optimizer, loss)
        with refused:
            gradkit.step_(optimizer, model, grads)


def test_backward_refuses_a_leaf_that_was_cast(device: torch.device) -> None:
    """Whatever is in `.grad`, and whatever hooks there are: afterwards `.grad` is as it was."""

    def clean(layers: list[nn.Linear]) -> None: ...

    def accumulated(layers: list[nn.Linear]) -> None:
        layers[1](torch.ones(2, device=device)).sum().backward()

    def hooked(layers: list[nn.Linear]) -> None:
        layers[1].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    for prepare in (clean, accumulated, hooked):
        layers = [nn.Linear(2, 2).to(device) for _ in range(3)]
        loss = layers[1](layers[0](torch.ones(2, device=device))).sum()
        later = layers[0](torch.ones(2, device=device)).sum()
        prepare(layers)
        layers[0].double()
        newer = layers[0](torch.ones(2, device=device).double()).sum()  # its graph is alive
        leaves = [p for layer in layers for p in layer.parameters()]
        before = [None if p.grad is None else p.grad.clone() for p in leaves]
        with pytest.raises(gradkit.UnreachedParamError, match=r"params\[0\].*cast since"):
            gradkit.backward_(loss, leaves)
        for leaf, grad in zip(leaves, before, strict=True):
            assert leaf.grad is None if grad is None else torch.equal(leaf.grad, grad)
        gradkit.backward_(newer, leaves)  # others are not reached, and not asked for
        assert layers[0].weight.grad.dtype == torch.float64
        with pytest.raises(gradkit.UnreachedParamError):
            gradkit.backward_(later, layers[2])


def test_zeros_for_a_frozen_parameter_are_no_gradient(device: torch.device) -> None:
    """`gradkit.func` gives zeros for it; `.backward()` leaves its .grad as it is."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(device)
    model[0].requires_grad_(False)
    x = torch.randn(6, 3, device=device)
    call = torch.func.functional_call
    _, grads = gradkit.func.value_and_grads(lambda p: call(model, p, (x,)).square().mean())(model)
    before = model[0].weight.clone()
    gradkit.step_(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), model, grads)
    gradkit.write_grads_(model, grads)
    gradkit.add_grads_(model, grads)
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, before)
    torch.testing.assert_close(model[1].weight.grad, 2 * grads["1.weight"])
    grads["0.weight"] += 1
    with pytest.raises(gradkit.StructureError, match=r"grads\['0.weight'\].*frozen"):
        gradkit.write_grads_(model, grads)


def test_the_hook_of_a_parameter_is_named(device: torch.device) -> None:
    model = torch.nn.Linear(3, 1).to(device)
    model.bias.register_hook(lambda grad: grad)
    grads = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^params\['bias'\]: expected"):
        gradkit.add_grads_(model, grads, hooks=True)


def test_a_second_backward_to_a_jagged_leaf(device: torch.device) -> None:
    rows = torch.arange(10.0, device=device).view(5, 2)
    n = torch.nested.nested_tensor([rows[:2], rows[2:]], layout=torch.jagged, requires_grad=True)
    gradkit.backward_((n * n).values().sum(), n)
    first = n.grad.values().clone()
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"add_grads_\(n, "):
        gradkit.backward_((n * n).values().sum(), n)
    assert torch.equal(n.grad.values(), first)
    gradkit.add_grads_(n, gradkit.value_and_grads((n * n).values().sum(), n)[1])
    assert torch.equal(n.grad.values(), 2 * first)
