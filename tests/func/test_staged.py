"""staged_value_and_grads: the gradient of the whole batch, whatever the chunks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import gradkit
from gradkit import GradkitError, OptionError, StructureError, UnsupportedGraphError, func

D = torch.float64


def two_views(device: torch.device, batch: int = 10) -> tuple[dict[str, Tensor], Any]:
    """Return the params of two towers, one weight of which is shared, and pairs of views."""
    params = {name: torch.randn(3, 4, dtype=D, device=device) for name in ("left", "right")}
    params["both"] = torch.randn(4, 4, dtype=D, device=device)
    params["scale"] = torch.tensor(0.5, dtype=D, device=device)
    views = {name: torch.randn(batch, 3, dtype=D, device=device) for name in ("left", "right")}
    return {k: v.requires_grad_() for k, v in params.items()}, views


def encode(params: Any, chunk: Any) -> dict[str, Tensor]:
    return {k: torch.tanh(chunk[k] @ params[k] @ params["both"]) for k in ("left", "right")}


def contrastive(outputs: Any, params: Any) -> Tensor:
    similarities = outputs["left"] @ outputs["right"].T * params["scale"].exp()
    return nn.functional.cross_entropy(
        similarities, torch.arange(len(similarities)).to(similarities.device)
    )


def check(got: Any, losses: Tensor, params: Any) -> None:
    """Compare with torch's gradient of the same loss of the whole batch."""
    right = torch.autograd.grad(losses, list(params.values()), allow_unused=True)
    for grad, one, param in zip(got.values(), right, params.values(), strict=True):
        torch.testing.assert_close(
            grad.detach(), torch.zeros_like(param) if one is None else one, rtol=1e-12, atol=1e-12
        )


@given(batch=st.integers(1, 9), chunk=st.integers(1, 10))
def test_a_coupled_loss_is_that_of_the_whole_batch(
    device: torch.device, batch: int, chunk: int
) -> None:
    params, views = two_views(device, batch)
    sizes = []

    def counted(params: Any, chunk: Any) -> Any:
        sizes.append(len(chunk["left"]))
        return encode(params, chunk)

    step = func.staged_value_and_grads(counted, contrastive, chunk_size=chunk)
    value, grads = step(params, views)
    right = contrastive(encode(params, views), params)
    torch.testing.assert_close(value.detach(), right.detach(), rtol=1e-12, atol=1e-12)
    check(grads, right, params)
    assert max(sizes) <= chunk
    last = (batch - 1) % chunk + 1 if chunk < batch else batch  # which is encoded once
    assert sum(sizes) == 2 * batch - last
    assert all(param.grad is None for param in params.values())


def test_towers_have_batches_of_their_own(device: torch.device) -> None:
    params, views = two_views(device)
    views = {"left": views["left"], "right": views["right"][:7]}
    towers = {k: (lambda p, x, k=k: torch.tanh(x @ p[k] @ p["both"])) for k in views}

    def loss(outputs: Any) -> dict[str, Tensor]:
        similarities = outputs["left"] @ outputs["right"].T
        return {"rows": similarities.logsumexp(1).sum(), "columns": similarities.sin().sum()}

    step = func.staged_value_and_grads(
        towers, loss, chunk_size=3, weights={"rows": 1, "columns": 2}
    )
    values, grads = step(params, views)
    right = loss({k: towers[k](params, views[k]) for k in views})
    assert values.keys() == right.keys()
    check(grads, right["rows"] + 2 * right["columns"], params)


def test_what_the_loss_sums_over_is_taken_in_chunks(device: torch.device) -> None:
    params, views = two_views(device)
    batch = {**views, "label": torch.arange(10, device=device) % 4}
    widths = []

    def loss(outputs: Any, params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        logits = (outputs["left"] + outputs["right"]) @ params["both"]
        widths.append(len(logits))
        entropy = nn.functional.cross_entropy(logits, batch["label"], reduction="sum")
        return entropy / 10, (logits.argmax(1) == batch["label"]).sum()

    step = func.staged_value_and_grads(encode, loss, chunk_size=5, loss_chunk_size=4, has_aux=True)
    (value, correct), grads = step(params, batch)
    assert widths == [4, 4, 2]
    right, all_correct = loss(encode(params, views), params, batch)
    torch.testing.assert_close(value.detach(), right.detach(), rtol=1e-12, atol=1e-12)
    assert sum(correct) == all_correct
    check(grads, right, params)


class Noisy(nn.Module):
    """Draws random numbers, and writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4, dtype=D), nn.BatchNorm1d(4, dtype=D)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.first(x)))
        return out


def test_random_numbers_and_buffers_are_as_if_each_chunk_ran_once(device: torch.device) -> None:
    module, x = Noisy().to(device), torch.randn(10, 3, dtype=D, device=device)

    def loss(outputs: Tensor) -> Tensor:
        return (outputs @ outputs.T).logsumexp(1).mean() + torch.rand((), device=device)

    before = {k: v.clone() for k, v in module.state_dict().items()}
    torch.manual_seed(3)
    right = loss(torch.cat([module(chunk) for chunk in x.split(4)]))
    after, draw = {k: v.clone() for k, v in module.state_dict().items()}, torch.rand(3)
    params = dict(module.named_parameters())
    of_all = torch.autograd.grad(right, list(params.values()))
    module.load_state_dict(before)
    torch.manual_seed(3)
    step = func.staged_value_and_grads(
        lambda params, chunk: functional_call(module, params, (chunk,)), loss, chunk_size=4
    )
    value, grads = step(module, x)
    assert torch.equal(torch.rand(3), draw)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, after[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value.detach(), right.detach(), rtol=1e-12, atol=1e-12)
    for grad, one in zip(grads.values(), of_all, strict=True):
        torch.testing.assert_close(grad.detach(), one, rtol=1e-12, atol=1e-12)
    assert all(param.grad is None for param in module.parameters())


def test_the_parts_of_a_vocabulary_are_a_batch(device: torch.device) -> None:
    hidden, words = (
        torch.randn(6, 4, dtype=D, device=device),
        torch.randn(11, 4, dtype=D, device=device),
    )
    params = {"hidden": hidden.requires_grad_(), "words": words.requires_grad_()}
    label = torch.arange(6, device=device)

    def encode(params: Any, rows: Tensor) -> Tensor:
        return (params["words"][rows] @ params["hidden"].T).logsumexp(0)[None]

    def loss(partial: Tensor, params: Any) -> Tensor:
        return (partial.logsumexp(0) - (params["words"][label] * params["hidden"]).sum(1)).mean()

    step = func.staged_value_and_grads(encode, loss, chunk_size=4)
    value, grads = step(params, torch.arange(11, device=device))
    right = nn.functional.cross_entropy(hidden @ words.T, label)
    torch.testing.assert_close(value.detach(), right.detach(), rtol=1e-12, atol=1e-12)
    check(grads, right, params)


def test_a_derivative_of_the_results_raises_and_is_not_zero(device: torch.device) -> None:
    params, views = two_views(device)
    step = func.staged_value_and_grads(encode, contrastive, chunk_size=4)
    value, grads = step(params, views)
    for result in (value, grads["both"].sum()):
        with pytest.raises(UnsupportedGraphError, match="silently be zero"):
            result.backward()
    cut = func.staged_value_and_grads(encode, contrastive, chunk_size=4, create_graph=False)
    value, grads = cut(params, views)
    assert not value.requires_grad
    assert not any(grad.requires_grad for grad in grads.values())


def test_transforms_around_it_raise(device: torch.device) -> None:
    params, views = two_views(device)
    step = func.staged_value_and_grads(encode, contrastive, chunk_size=4)
    with pytest.raises(UnsupportedGraphError, match="inside"):
        torch.func.grad(lambda p: step(p, views)[0])(params)


def test_another_result_the_second_time_raises(device: torch.device) -> None:
    params, views = two_views(device)
    runs: list[int] = []

    def changing(params: Any, chunk: Any) -> Any:
        runs.append(1)
        return {k: out * len(runs) for k, out in encode(params, chunk).items()}

    with pytest.raises(UnsupportedGraphError, match="another result"):
        func.staged_value_and_grads(changing, contrastive, chunk_size=4)(params, views)
    value, _ = func.staged_value_and_grads(changing, contrastive)(params, views)  # runs once
    assert value.isfinite()


Call = Callable[[Any, Any], Any]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda p, v: func.staged_value_and_grads(encode, contrastive, chunk_size=0),
         OptionError, "chunk_size: expected a positive int"),
        (lambda p, v: func.staged_value_and_grads(encode, contrastive, loss_chunk_size=True),
         OptionError, "loss_chunk_size: expected a positive int"),
        (lambda p, v: func.staged_value_and_grads(encode, contrastive, create_graph=True),
         OptionError, "create_graph"),
        (lambda p, v: func.staged_value_and_grads({"a": 1}, contrastive),
         OptionError, r"encode\['a'\]: expected a function"),
        (lambda p, v: func.staged_value_and_grads(encode, lambda a, b, c, d: a),
         OptionError, "loss: .* 4 arguments"),
        (lambda p, v: func.staged_value_and_grads(encode, contrastive)(p, {"left": 1.0}),
         StructureError, "batch: .*no tensor"),
        (lambda p, v: func.staged_value_and_grads(encode, contrastive)(p, v | {"x": v["left"][:3]}),
         StructureError, r"10 in batch\['left'\], 3 in batch\['x'\]"),
        (lambda p, v: func.staged_value_and_grads(encode, contrastive)(p, {**v, "x": p["scale"]}),
         StructureError, r"batch\['x'\]: .*without dimensions"),
        (lambda p, v: func.staged_value_and_grads(
            lambda p, x: p["scale"] * 1, lambda out: out.sum(), chunk_size=4)(p, v),
         StructureError, "joined"),
    ],
)  # fmt: skip
def test_refusals(device: torch.device, call: Call, error: type[GradkitError], says: str) -> None:
    params, views = two_views(device)
    before = torch.get_rng_state()
    with pytest.raises(error, match=says):
        call(params, views)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(param.grad is None for param in params.values())


def test_a_module_stands_for_its_parameters(device: torch.device) -> None:
    module = nn.Linear(3, 2, dtype=D, device=device)
    module.bias.requires_grad_(False)
    x = torch.randn(5, 3, dtype=D, device=device)
    step = func.staged_value_and_grads(
        lambda p, chunk: functional_call(module, p, (chunk,)), lambda out: out.square().mean(),
        chunk_size=2, create_graph=False,
    )  # fmt: skip
    _, grads = step(module, x)
    _, right = gradkit.value_and_grads(module(x).square().mean(), module)
    assert right["bias"] is None
    torch.testing.assert_close(grads["weight"], right["weight"], rtol=1e-12, atol=1e-12)
    assert not grads["bias"].any()


def test_an_encoder_that_uses_the_parameters_from_outside_is_no_zero(device: torch.device) -> None:
    module, x = nn.Linear(3, 2, device=device), torch.randn(4, 3, device=device)
    for size in (None, 2):
        step = func.staged_value_and_grads(lambda _, x: module(x), torch.sum, chunk_size=size)
        with pytest.raises(gradkit.DetachedLossError, match="does not depend on them"):
            step(module, x)


@pytest.mark.parametrize("where", ["encode", "loss", "batch"])
def test_a_derivative_for_what_is_from_outside_is_no_zero(device: torch.device, where: str) -> None:
    outside = torch.ones((), device=device, requires_grad=True)
    w, x = torch.ones(3, 2, device=device), torch.randn(4, 3, device=device)
    scales = {name: outside if name == where else 1 for name in ("encode", "loss", "batch")}

    def encode(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w) * scales["encode"]

    def loss(outputs: Tensor) -> Tensor:
        return outputs.square().sum() * scales["loss"]

    step = func.staged_value_and_grads(encode, loss, chunk_size=2)
    value, grad = step(w, x * scales["batch"])
    for result in (value, grad.sum()):
        with pytest.raises(UnsupportedGraphError, match="silently be zero"):
            torch.autograd.grad(result, outside)
    step = func.staged_value_and_grads(encode, loss, chunk_size=2, create_graph=False)
    assert not step(w, x * scales["batch"])[0].requires_grad


def test_inference_mode_is_left(device: torch.device) -> None:
    params, views = two_views(device)
    step = func.staged_value_and_grads(encode, contrastive, chunk_size=3)
    with torch.inference_mode():
        _, grads = step(params, views)
        made_inside = {name: view.clone() for name, view in views.items()}
    check(grads, contrastive(encode(params, views), params), params)
    with pytest.raises(UnsupportedGraphError, match="made in inference mode"):
        step(params, made_inside)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (D, torch.float32)])
def test_gradients_of_another_dtype_than_their_parameter(
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    params, views = two_views(device, 6)
    params = {k: v.detach().to(dtypes[0]).requires_grad_() for k, v in params.items()}
    views = {k: v.to(dtypes[0]) for k, v in views.items()}
    for param in params.values():
        param.grad_dtype = dtypes[1]
    step = func.staged_value_and_grads(encode, contrastive, chunk_size=2, create_graph=False)
    whole = func.staged_value_and_grads(encode, contrastive, create_graph=False)
    grads, right = step(params, views)[1], whole(params, views)[1]
    for name, grad in grads.items():
        assert grad.dtype == dtypes[1]
        torch.testing.assert_close(grad, right[name], rtol=0.1, atol=0.1)


def no_user_code() -> Any:
    """As in a process in which no hook was registered, and no Function is alive."""
    return mock.patch("gradkit.func._staged.user_code_may_run", return_value=False)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_gradients_that_are_parts_of_one_cotangent(
    device: torch.device, plain: bool, late: bool
) -> None:
    """The engine gives each parameter a view of it, to which the next chunk's is added."""
    params = {k: torch.randn(2, 3, dtype=D, device=device).requires_grad_() for k in "abc"}
    batch = torch.arange(18, dtype=D, device=device).view(6, 3)

    def encode(params: Any, x: Tensor) -> Tensor:
        both = params["a"].view_as(x) + params["b"].view(3, 2).view(2, 3) + x
        return both + params["c"].view_as(x) if late and x[0, 0] < 6 else both

    def loss(outputs: Tensor) -> Tensor:
        return (outputs * torch.arange(18, dtype=D, device=device).view(6, 3)).sum()

    step = func.staged_value_and_grads(encode, loss, chunk_size=2)
    with no_user_code() if plain else nullcontext():
        grads = step(params, batch)[1]
    whole = loss(torch.cat([encode(params, chunk) for chunk in batch.split(2)]))
    check(grads, whole, params)


class ParameterSized(TorchDispatchMode):
    """Counts the tensors of a size that exist at once."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.most = numel, 0
        self.alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **kwargs or {})
        if isinstance(out, Tensor) and out.numel() == self.numel:
            self.alive[out.untyped_storage()._cdata] = StorageWeakRef(out.untyped_storage())
            alive = [ref for ref in self.alive.values() if not ref.expired()]
            self.most = max(self.most, len(alive))
        return out


def test_the_gradients_of_a_chunk_are_never_there_all_at_once(device: torch.device) -> None:
    params = {str(i): torch.randn(37, 37, device=device) / 6 for i in range(6)}

    def encode(params: Any, x: Tensor) -> Tensor:
        for weight in params.values():
            x = torch.tanh(x @ weight)
        return x

    step = func.staged_value_and_grads(
        encode, lambda x: x.square().sum(), chunk_size=2, create_graph=False
    )
    with no_user_code(), ParameterSized(37 * 37) as counted:
        step(params, torch.randn(8, 37, device=device))
    # Parameters that were seen, their gradients, and the one that arrives.
    assert counted.most <= 2 * 6 + 2
