"""safe_retain by names of modules: modules in place, copies of the model, outputs of any kind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._core import user_code
from tests.helpers import assert_same_bits


def in_place(device: torch.device) -> tuple[nn.Sequential, Tensor, list[Tensor]]:
    """Return a model with a module in place, data, and the gradients at its three outputs."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)).to(device)
    x = torch.randn(8, 2, device=device)
    before = model[0](x)
    after = before.relu()
    out = model[2](after)
    return model, x, list(torch.autograd.grad(out.square().sum(), [before, after, out]))


@pytest.mark.parametrize("names", [["0", "1"], ["1", "0"], "*", ["1", "2"], ["0", "2"]])
def test_modules_in_place_have_gradients_of_their_own(device: torch.device, names: Any) -> None:
    """Both return the same tensor: the gradient is that of its value when the module returned."""
    model, x, expected = in_place(device)
    with gradkit.safe_retain(model, names) as kept:
        gradkit.value_and_grads(model(x).square().sum(), model)
    for name, grad in kept.grads.items():
        torch.testing.assert_close(grad, expected[int(name or 2)])
    assert all(len(passes) == 1 for passes in kept.passes.values())


def test_inputs_around_a_module_in_place(device: torch.device) -> None:
    model, x, (before, after, _) = in_place(device)
    with gradkit.safe_retain(model, ["1", "2"], inputs=True) as kept:
        gradkit.value_and_grads(model(x).square().sum(), model)
    torch.testing.assert_close(kept.inputs.grads["1"], before)
    torch.testing.assert_close(kept.inputs.grads["2"], after)
    torch.testing.assert_close(kept.grads["1"], after)


def test_a_model_that_ends_in_place(device: torch.device) -> None:
    whole, x, _ = in_place(device)
    model = nn.Sequential(whole[0], whole[1])
    with gradkit.safe_retain(model, ["0", "1", ""]) as kept:
        model(x).sum().backward()
    at_end = torch.ones(8, 3, device=device)
    assert_same_bits([kept.grads[""], kept.grads["1"]], [at_end, at_end])
    assert_same_bits([kept.grads["0"]], [(kept.values["0"] > 0).float()])
    assert kept.values["0"] is kept.values["1"] is kept.values[""]  # torch's one tensor


def test_a_tensor_in_two_blocks_with_a_change_between(device: torch.device) -> None:
    model, x, (before, after, _) = in_place(device)
    h = model[0](x)
    with gradkit.safe_retain(h) as first:
        h.relu_()
        with gradkit.safe_retain(h) as second:
            model[2](h).square().sum().backward()
    torch.testing.assert_close(first.grads, before)
    torch.testing.assert_close(second.grads, after)


class Growing(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x * 2}


def test_a_dict_that_the_caller_changes_later(device: torch.device) -> None:
    """The three trees have the structure that the module returned."""
    model, x = Growing().to(device), torch.ones(2, device=device, requires_grad=True)
    with gradkit.safe_retain(model, "") as kept:
        out = model(x)
        out["loss"] = out["a"].sum()
        out["loss"].backward()
    assert list(kept.values[""]) == list(kept.grads[""]) == list(kept.passes[""]) == ["a"]
    assert kept.grads[""]["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy.copy]
)
def test_a_copy_made_in_the_block_is_not_watched(device: torch.device, make_copy: Any) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).to(device), torch.ones(1, 2, device=device)
    with gradkit.safe_retain(model, ["", "1"], inputs=True) as kept:
        model(x).sum().backward()
        ema = make_copy(model)
        ema(x)  # of which nothing is kept, in the block or after it
    with torch.no_grad():
        ema(x)
    assert isinstance(kept.values[""], Tensor)
    assert isinstance(kept.inputs.values[""], Tensor)
    ref = weakref.ref(kept)
    del kept
    gc.collect()
    assert ref() is None  # also while the copy lives
    assert not model._forward_hooks


def test_a_hook_that_outlives_the_block_does_nothing(device: torch.device) -> None:
    model, x = nn.Linear(2, 2).to(device), torch.ones(1, 2, device=device)
    with gradkit.safe_retain(model, "", inputs=True) as kept:
        model(x).sum().backward()
        table = copy.copy(model._forward_hooks)
    model._forward_hooks.update(table)
    with torch.no_grad():
        model(x)
    assert isinstance(kept.values[""], Tensor)


def test_its_hooks_do_not_count_as_the_user_s(device: torch.device) -> None:
    """After a block, passes are as fast as before: no user code can run in them."""
    model, x = nn.Linear(2, 2).to(device), torch.ones(1, 2, device=device)
    made = user_code.hooks_made()
    with gradkit.safe_retain(model, "", inputs=True):
        model(x).sum().backward()
    assert user_code.hooks_made() == made


class Masked(nn.Module):
    """A model with submodules that return something without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.mask, self.log = Mask(), Silent()
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(x)
        self.log(h)
        out: Tensor = self.last(h * self.mask(h)["keep"])
        return out


class Mask(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"keep": x > 0, "count": 3, "no": ()}


class Silent(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


@pytest.mark.parametrize("names", ["*", ["last", "[flm]*", "?og"]])
def test_a_glob_takes_outputs_without_a_graph(device: torch.device, names: Any) -> None:
    model, x = Masked().to(device), torch.randn(4, 2, device=device)
    with gradkit.safe_retain(model, names) as kept:
        gradkit.value_and_grads(model(x).sum(), model)
    assert torch.equal(kept.values["frozen"], model.frozen(x))
    assert kept.values["mask"]["count"] == 3
    assert kept.values["log"] is kept.grads["log"] is kept.grads["frozen"] is None
    assert kept.grads["mask"] == {"keep": None, "count": None, "no": ()}
    assert kept.passes["frozen"] == ()
    assert kept.grads["last"].tolist() == [[1.0]] * 4


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("frozen", gradkit.UnsupportedGraphError),
        ("mask", gradkit.UnsupportedGraphError),
        ("log", gradkit.LeafTypeError),
    ],
)
def test_a_name_needs_an_output_with_a_graph(
    device: torch.device, name: str, error: type[Exception]
) -> None:
    """Also if a glob fits it, too."""
    model, x = Masked().to(device), torch.randn(4, 2, device=device)
    for names in (name, [name, "*"], ["*", name]):
        with pytest.raises(error, match=f"'{name}'"), gradkit.safe_retain(model, names):
            model(x)


def test_a_glob_inside_a_transform_is_refused(device: torch.device) -> None:
    model = Masked().to(device)
    with (
        pytest.raises(gradkit.UnsupportedGraphError, match="has_aux"),
        gradkit.safe_retain(model, "froz*"),
    ):
        torch.func.vmap(model)(torch.randn(4, 2, device=device))


def test_names_of_another_type_are_refused(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).to(device)
    cases: list[tuple[Any, str]] = [
        ([0], "got the int 0"),
        (0, "got the int 0"),
        (["0", None], "got the NoneType"),
        ([model[0]], "got a Linear"),
        (model, "got a Sequential"),
        (model[0], "got a Linear"),
    ]
    for names, text in cases:
        with (
            pytest.raises(gradkit.OptionError, match=rf"(?s)^names: .*{text}.*of some: '0', '1'"),
            gradkit.safe_retain(model, names),
        ):
            pytest.fail("the block ran")
    assert not any(m._forward_hooks for m in model.modules())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.idle = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize("make", [Branching, lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())])
def test_a_model_compiled_before_the_block(device: torch.device, make: Any) -> None:
    """Code that was compiled before does not call the hooks, except on what holds it."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(make().to(device), backend="aot_eager")
    x = torch.randn(3, 2, device=device)
    inside = "_orig_mod.first" if make is Branching else "_orig_mod.0"
    chosen: list[Any] = [["", inside], inside, "*", ["", "_orig_mod.*"]]
    if make is not Branching:
        chosen.append(["", "_orig_mod"])
    compiled(x).sum().backward()
    for names in chosen:
        with (
            pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.compile made before"),
            gradkit.safe_retain(compiled, names),
        ):
            compiled(x).sum().backward()
    with gradkit.safe_retain(compiled, "") as kept:
        compiled(x).sum().backward()
    assert bool((kept.grads[""] == 1).all())
    torch._dynamo.reset()
    for _ in range(2):
        with gradkit.safe_retain(compiled, "*") as kept:
            compiled(x).sum().backward()
        assert kept.grads[inside].shape == (3, 2)
    assert kept.grads.get("_orig_mod.idle") is None  # a branch not taken
    assert not any(m._forward_hooks for m in compiled.modules())


def test_a_compiled_model_that_did_not_run(device: torch.device) -> None:
    """What is inside it is a branch not taken, as any other."""
    head = nn.Linear(2, 1)
    model = nn.ModuleDict({"a": torch.compile(nn.Linear(2, 2), backend="aot_eager"), "b": head})
    model.to(device)
    with gradkit.safe_retain(model, ["a._orig_mod", "b"]) as kept:
        model["b"](torch.ones(3, 2, device=device)).sum().backward()
    assert kept.grads["a._orig_mod"] is None
    assert kept.grads["b"].shape == (3, 1)
    with (
        pytest.raises(gradkit.UnsupportedGraphError, match="make its first call there"),
        gradkit.safe_retain(model, ["a._orig_mod", "b"]),
    ):
        pass


class Checkpointed(nn.Module):
    """Two layers, the second in a checkpoint, and a frozen one under no_grad."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.frozen(x)
        out: Tensor = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        return out + shift


def test_modules_in_a_reentrant_checkpoint(device: torch.device) -> None:
    """Their gradient exists, but no graph that leads to it, before the backward pass."""
    x = torch.ones(2, 3, device=device)
    words = r"through body with a graph.*\n.*use_reentrant=False"
    model = Checkpointed(reentrant=True).to(device)
    for names, inputs in (("*", False), (["bod?"], True)):
        with (
            pytest.raises(gradkit.UnsupportedGraphError, match=words),
            gradkit.safe_retain(model, names, inputs=inputs),
        ):
            model(x).sum().backward()
    with gradkit.safe_retain(model, ["f*"]) as kept:
        model(x).sum().backward()
    assert kept.grads["frozen"] is None
    assert kept.grads["first"].shape == (2, 3)
    model.reentrant = False
    with gradkit.safe_retain(model, "*") as kept:
        model(x).sum().backward()
    assert kept.grads["body"].tolist() == [[1] * 3] * 2
    assert kept.grads["frozen"] is None
