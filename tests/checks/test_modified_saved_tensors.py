"""A saved tensor that was changed in place: which loss needs it, what it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit.report import explain
from tests.helpers import Halve, same_bits, unchanged


def dcgan(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the losses of a critic, of which one label is filled anew for the other."""
    label = torch.ones(4, 1, device=device)
    real = binary_cross_entropy(model(torch.ones(4, 3, device=device)), label)
    label.fill_(0)
    return {"real": real, "fake": binary_cross_entropy(model(-torch.ones(4, 3)), label)}


def critic(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()).to(device)


CALLS: dict[str, Callable[..., object]] = {
    "value_and_grads": gradkit.value_and_grads,
    "per_loss_grads": gradkit.per_loss_grads,
    "backward_": gradkit.backward_,
    "backward_ to all leaves": lambda losses, _: gradkit.backward_(losses),
}


@pytest.mark.parametrize("name", CALLS)
def test_only_the_loss_that_needs_it_is_named(device: torch.device, name: str) -> None:
    model = critic(device)
    with torch.device(device):
        losses = dcgan(model, device)
    pattern = (
        r"^losses\['real'\]: .*`target` of BinaryCrossEntropyBackward0 changed in place since: one "
        r"of the variables .* modified by an inplace operation: .* version 1; [^H]*\n"
        r"  What to do: .*torch.zeros_like.*detect_anomaly"
    )
    with (
        unchanged(*model.parameters()),
        pytest.raises(gradkit.UnsupportedGraphError, match=pattern),
    ):
        CALLS[name](losses, model)


def test_the_other_loss_has_its_gradient(device: torch.device) -> None:
    model = critic(device)
    with torch.device(device):
        losses = dcgan(model, device)
        expected = torch.autograd.grad(losses["fake"], list(model.parameters()), retain_graph=True)
    with pytest.raises(gradkit.UnsupportedGraphError):
        gradkit.per_loss_grads(losses, model)
    _, grads = gradkit.value_and_grads(losses["fake"], model)
    assert all(map(same_bits, grads.values(), expected))


def test_each_of_several_losses_is_named(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    losses = {"a": w.sin().sum(), "b": (3 * w).sum(), "c": (w * w).sum()}
    with torch.no_grad():
        w.add_(1)
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads):
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"^losses\['a'\], losses\['c'\]: "):
            call(losses, w, retain_graph=True)


def test_under_anomaly_detection_the_line_is_named(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        loss = w.sin().sum()
    with torch.no_grad():
        w.add_(1)
    line = r"`self` of SinBackward0 changed in place since, saved in .*saved_tensors.py\", line \d+"
    with pytest.raises(gradkit.UnsupportedGraphError, match=line) as caught:
        gradkit.value_and_grads(loss, w)
    assert ": loss = w.sin().sum()" in str(caught.value)
    assert "detect_anomaly" not in str(caught.value)


class SaveTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad * ctx.saved_tensors[0]


OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "exp": lambda x, y, index: x.exp(),
    "add": lambda x, y, index: x + y,
    "mul": lambda x, y, index: x * y,
    "matmul": lambda x, y, index: x @ y,
    "cat": lambda x, y, index: torch.cat([x, y]),
    "index": lambda x, y, index: x[index],
    "index_put": lambda x, y, index: x.index_put((index,), y[:2]),
    "where": lambda x, y, index: torch.where(x > 0, x, y),
    "layer_norm": lambda x, y, index: nn.functional.layer_norm(x, [2], y[0]),
    "a Function": lambda x, y, index: SaveTwo.apply(x, y),
    "another Function": lambda x, y, index: Halve.apply(x, y),
}


@pytest.mark.parametrize("changes", [0, 1, 2, 3], ids=["x", "y", "index", "result"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_explain_says_so_where_torch_raises(device: torch.device, name: str, changes: int) -> None:
    x, y = (torch.ones(2, 2, device=device, requires_grad=True) for _ in range(2))
    index = torch.tensor([0, 1], device=device)
    # The second call is that of a node below.
    result = OPERATIONS[name](OPERATIONS[name](x, y, index), y, index)
    loss = result.sum()
    with torch.no_grad():
        (x, y, index, result)[changes].mul_(2)
    notes = explain(loss, {"x": x, "y": y}).losses["loss"].notes
    torch_says = ""
    try:
        torch.autograd.grad(loss, [x, y], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        torch_says = str(error).partition(" Hint")[0].rstrip(".")
    if not torch_says:
        assert notes == ()
        return
    assert f"changed in place since: {torch_says}" in notes[0]
    with pytest.raises(gradkit.UnsupportedGraphError, match="in place since: one of the var"):
        gradkit.value_and_grads(loss, [x, y])


def test_the_argument_of_a_checkpoint_is_named_by_the_call_only(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    loss = checkpoint(torch.sin, w, use_reentrant=False).sum()
    with torch.no_grad():
        w.mul_(2)
    assert explain(loss, w).losses["loss"].notes == ()
    match = r"^losses: .*got one changed in place since: one of the variables .* instead\.\n"
    with pytest.raises(gradkit.UnsupportedGraphError, match=match):
        gradkit.value_and_grads(loss, w)


def test_a_param_above_the_changed_tensor_has_its_gradient(device: torch.device) -> None:
    below, above = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    loss = ((below * below) + above).sum()
    with torch.no_grad():
        below.mul_(2)
    assert explain(loss, above).losses["loss"].notes == ()
    assert gradkit.value_and_grads(loss, above)[1].tolist() == [1, 1]


def test_tensors_with_hooks_are_not_unpacked(device: torch.device) -> None:
    unpacked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    w = torch.ones(2, device=device, requires_grad=True)
    below = w.sin()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = below.cos().sum()
    with torch.no_grad():
        w.mul_(2)
    assert "SinBackward0" in explain(loss, w).losses["loss"].notes[0]
    assert unpacked == []
    with pytest.raises(gradkit.UnsupportedGraphError, match="SinBackward0"):
        gradkit.value_and_grads(loss, w, retain_graph=True)
    assert len(unpacked) == 1  # by the pass


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "iteration": tuple,
    "unbind": torch.unbind,
    "split": lambda w: w.split(1),
    "split_with_sizes": lambda w: w.split_with_sizes([1, 1]),
    "chunk": lambda w: w.chunk(2),
}
ELEMENTWISE: dict[str, Callable[[list[Tensor], Tensor], object]] = {
    "value_and_grads": lambda losses, x: gradkit.value_and_grads(losses, [x]),
    "per_loss_grads": lambda losses, x: gradkit.per_loss_grads(losses, [x]),
    "backward_": lambda losses, x: gradkit.backward_(losses, [x]),
    "value_and_grads of one": lambda losses, x: gradkit.value_and_grads(losses[0], x),
    "create_graph": lambda losses, x: gradkit.value_and_grads(losses[0], x, create_graph=True),
    "backward_ of one": lambda losses, x: gradkit.backward_(losses[0]),
    "simultaneous_grads": lambda losses, x: gradkit.simultaneous_grads(losses, [x, x]),
    "vjp": lambda losses, x: gradkit.vjp(losses, x, [*map(torch.ones_like, losses)]),
    "gram": gradkit.gram,
    "per_loss_norms": gradkit.per_loss_norms,
    "value_and_reduced_grads": lambda losses, x: gradkit.value_and_reduced_grads(
        losses, x, torch.norm
    ),
}


@pytest.mark.filterwarnings("ignore:gradkit fell back")
@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_view_of_several_whose_base_was_written(
    device: torch.device, name: str, views: str
) -> None:
    def losses(w: Tensor, x: Tensor) -> list[Tensor]:
        a, b = VIEWS[views](w)
        return [(a * x).sum(), (b * x * x).sum()]

    w = torch.tensor([1.5, 2.5], device=device, requires_grad=True)
    x = torch.tensor(3.0, device=device, requires_grad=True)
    saved, right = losses(w, x), losses(w.clone(), x)
    with torch.no_grad():
        w.mul_(2)
    match = (
        r"^(losses|outputs).* changed in place since: Output \d of .* What to do: .*a, b = w.clone"
    )
    with unchanged(w, x), pytest.raises(gradkit.UnsupportedGraphError, match=f"(?s){match}"):
        ELEMENTWISE[name](saved, x)
    assert gradkit.per_loss_grads(right, x)[0] == 1.5


@pytest.mark.parametrize("views", VIEWS)
def test_such_a_view_as_a_loss_or_a_param(device: torch.device, views: str) -> None:
    w = torch.tensor([1.5, 2.5], device=device, requires_grad=True)
    view, copied = VIEWS[views](w)[0], VIEWS[views](w.clone())[0]
    above = 3 * view.sum()
    with torch.no_grad():
        w.mul_(2)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("losses", lambda: gradkit.value_and_grads(view, w)),
        ("losses", lambda: gradkit.value_and_grads(view, w, create_graph=True)),
        (r"losses\[0\]", lambda: gradkit.per_loss_grads([view, above], w)),
        ("losses", lambda: gradkit.backward_(view)),
        ("losses", lambda: gradkit.gram(view, w)),
        ("params", lambda: gradkit.value_and_grads(above, view)),
        (r"params\['a'\]\[1\]", lambda: gradkit.value_and_grads(above, {"a": [w, view]})),
        (r"params\['a'\]", lambda: gradkit.read_grads({"a": view})),
        ("args", lambda: gradkit.func.value_and_grads(lambda x: 2 * x.sum())(view)),
        ("tensors", lambda: gradkit.safe_retain(view).__enter__()),
    ]
    for where, call in calls:
        match = rf"^{where}.*: expected a value as it was computed, got one of several views"
        with pytest.raises(gradkit.UnsupportedGraphError, match=match):
            call()
    assert gradkit.value_and_grads(copied.sum(), copied)[1] == 1
