"""compare: where torch's ways differ, and why; and that the user's things stay as they were."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit.report import Comparison, compare
from gradkit.report.steps import distance, same_bits
from tests.helpers import Scribble, unchanged
from tests.strategies import HOOKLESS, Program, build, programs

FUNC, GRAD = "torch.func", "autograd.grad"


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def reasons(found: Comparison, way: str = FUNC) -> dict[str, str]:
    return {name: d.reason for name, d in found.differences[way].items() if not d.same}


@contextmanager
def as_before(*modules: nn.Module) -> Iterator[None]:
    """Assert that modules, `.grad` and random states are as before a block."""
    states = [deepcopy(module.state_dict()) for module in modules]
    attributes = [{k: v for k, v in vars(m).items() if k[0] != "_"} for m in modules]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    here, there = torch.get_rng_state(), random.getstate()
    grads = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in tensors]
    hooks = [(len(p._backward_hooks or ()), p.grad_dtype) for p in tensors]
    yield
    for module, state, known in zip(modules, states, attributes, strict=True):
        for name, value in module.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert {k: v for k, v in vars(module).items() if k[0] != "_"} == known
    after = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    for p, grad, numbers in grads:
        assert p.grad is grad
        assert grad is None or torch.equal(grad, numbers)
    assert hooks == [(len(p._backward_hooks or ()), p.grad_dtype) for p in tensors]
    assert torch.equal(torch.get_rng_state(), here)
    assert random.getstate() == there


@pytest.fixture
def layer(device: torch.device) -> nn.Linear:
    return nn.Linear(3, 2).to(device)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 3, device=device)


# --- Laws ----------------------------------------------------------------------------------------


@given(program=programs(ops=tuple(op for op in HOOKLESS if op != "halve"), leaf_hooks=False))
def test_the_differences_are_those_of_the_ways_by_hand(
    device: torch.device, program: Program
) -> None:
    graph = build(program, device, torch.float64)
    params = {f"p{index}": leaf for index, leaf in enumerate(graph.leaves)}

    def losses(given: dict[str, Tensor]) -> list[Tensor]:
        built = build(program, device, torch.float64, list(given.values())).losses
        return [*built, given["p0"].sum()]

    with unchanged(*params.values()):
        found = compare(losses, params)
    values = torch.stack([loss.detach().reshape(()) for loss in losses(params)])
    assert list(found.values[".backward()"]) == values.tolist()
    assert all(d.same for d in found.differences[GRAD].values())  # [C12]
    live = [loss for loss in losses(params) if loss.requires_grad]
    whole = torch.autograd.grad(live, list(params.values()), retain_graph=True, allow_unused=True)
    for index, name in enumerate(params):
        if whole[index] is None:
            assert reasons(found)[name].startswith("None against zero")


def test_distances_of_odd_pairs(device: torch.device) -> None:
    def t(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    assert distance(None, None) == 0.0
    assert distance(t(1.0, 2.0), None) == 2.0
    assert distance(t(math.nan, math.inf), t(math.nan, math.inf)) == 0.0
    assert distance(t(math.nan), t(1.0)) == distance(t(math.inf), t(1.0)) == math.inf
    assert distance(t(1.0), t(1 + 2**-7, dtype=torch.bfloat16)) == 2**-7
    assert distance(t(1e300, dtype=torch.float64), t(-1e300, dtype=torch.float64)) == 2e300
    assert distance(t(1j, dtype=torch.complex64), t(1 + 1j, dtype=torch.complex64)) == 1.0
    assert distance(t(), t()) == 0.0
    assert distance(t(0.0), t(-0.0)) == 0.0
    assert not same_bits(t(0.0), t(-0.0))
    assert same_bits(t(math.nan, -math.inf), -t(-math.nan, math.inf))
    assert not same_bits(t(math.inf), t(torch.finfo(torch.float32).max))
    assert not same_bits(t(math.nan), t(0.0))
    assert not same_bits(t(1.0), t(1.0).double())


# --- Reasons -------------------------------------------------------------------------------------


def test_all_ways_agree(layer: nn.Linear, x: Tensor) -> None:
    with as_before(layer):
        found = compare(mean_square, layer, x)
    assert found.same
    assert set(found.differences) == {GRAD, FUNC}
    assert found.called == "loss_fn(params, *args)"
    assert found.values[FUNC] == found.values[GRAD] == found.values[".backward()"]
    assert "the same bits in 2 params" in str(found)


def test_stale_grad(layer: nn.Linear, x: Tensor) -> None:
    mean_square(layer, x).backward()
    with as_before(layer):
        found = compare(mean_square, layer, x)
    for way in (GRAD, FUNC):
        assert all(r.startswith("stale .grad") for r in reasons(found, way).values())
        assert found.differences[way]["weight"].absolute == layer.weight.grad.abs().max()


def test_stale_grad_of_a_frozen_param(layer: nn.Linear, x: Tensor) -> None:
    mean_square(layer, 2 * x).backward()
    layer.weight.requires_grad_(False)
    found = compare(mean_square, layer, x)
    assert reasons(found, GRAD)["weight"].startswith("stale .grad")
    # torch.func gives it a gradient [C4]; what stands there has its part in the difference.
    assert re.match("stale .*; frozen", reasons(found)["weight"])


def test_a_hook_on_a_leaf(layer: nn.Linear, x: Tensor) -> None:
    layer.weight.register_hook(lambda grad: 2 * grad)
    layer.bias.register_hook(lambda grad: None)
    with as_before(layer):
        found = compare(mean_square, layer, x)
    assert list(reasons(found)) == ["weight"]
    assert "tensor hook" in reasons(found)["weight"]
    assert found.differences[GRAD]["weight"].same
    mean_square(layer, x).backward()
    both = reasons(compare(mean_square, layer, x))
    assert "stale" in both["weight"]
    assert "hook" in both["weight"]


def test_a_hook_that_counts_is_no_matter_of_torch_func(device: torch.device) -> None:
    calls: list[Tensor] = []
    p = torch.ones(3, device=device, requires_grad=True)

    def counted(grad: Tensor) -> Tensor:
        calls.append(grad)
        return grad * len(calls)

    p.register_hook(counted)
    assert reasons(compare(lambda p: (2 * p).sum(), p), GRAD) == {"param": "unknown"}


def test_none_against_zero(device: torch.device, x: Tensor) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)}).to(device)
    found = compare(lambda model, x: model["used"](x).sum(), model, x)
    assert set(reasons(found)) == {"unused.weight", "unused.bias"}
    assert reasons(found)["unused.weight"].startswith("None against zero")
    assert found.differences[FUNC]["unused.weight"].absolute == 0.0
    assert not found.differences[FUNC]["unused.weight"].same


@pytest.mark.parametrize("setting", ["dropout", "autocast"])
def test_none_against_zero_is_put_down_to_nothing_else(
    device: torch.device, x: Tensor, setting: str
) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)}).to(device)

    def loss_fn(model: nn.ModuleDict, x: Tensor) -> Tensor:
        out = model["used"](x)
        return (nn.functional.dropout(out) if setting == "dropout" else out).sum()

    with torch.autocast(device.type, torch.bfloat16, enabled=setting == "autocast"):
        why = reasons(compare(loss_fn, model, x))
    assert why["unused.weight"].startswith("None against zero")


def test_tied_leaves(device: torch.device, x: Tensor) -> None:
    """torch.func takes two places of a tensor for two tensors [C1]; modules keep their ties."""
    w = torch.randn(3, device=device, requires_grad=True)
    found = compare(lambda p: (3 * p["a"]).sum() + p["b"].square().sum(), {"a": w, "b": w})
    assert all(r.startswith("tied") for r in reasons(found).values())
    assert set(reasons(found)) == {"a", "b"}
    w.grad = torch.ones_like(w)  # without which the parts would add up
    found = compare(lambda p: (p["a"] * p["b"]).sum(), {"a": w, "b": w})
    assert all(re.match("stale .*; tied", r) for r in reasons(found).values())
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    model[1].weight = model[0].weight
    assert compare(mean_square, model, x).same


def test_grad_dtype(device: torch.device) -> None:
    """torch.func ignores it [B1]."""
    p = torch.randn(5, dtype=torch.bfloat16, device=device, requires_grad=True)
    p.grad_dtype = torch.float32
    found = compare(lambda p: (p * 1.01).sum().float() + (p * 0.3).sum().float(), p)
    assert reasons(found) == {"param": "unknown"}
    assert found.differences[GRAD]["param"].same
    assert p.grad_dtype == torch.float32


def test_inside_of_a_reentrant_checkpoint(
    device: torch.device, layer: nn.Linear, x: Tensor
) -> None:
    """.backward() sees the parameters inside, autograd.grad does not [F1]."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = layer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=True)

    model, x = Checkpointed(), x.requires_grad_()
    with as_before(model):
        found = compare(mean_square, model, x)
    assert set(reasons(found, GRAD)) == {"block.weight", "block.bias"}
    assert "setup_context" in found.refused[FUNC]
    assert x.grad is None


def test_a_tensor_from_outside(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    found = compare(lambda p: p["w"].sum() + w.square().sum(), {"w": w})
    assert reasons(found) == {"w": "unknown"}


def test_dropout(device: torch.device, x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(), nn.Linear(64, 1)).to(device)
    with as_before(model):
        found = compare(mean_square, model, x)
    assert found.same  # each way starts from the same state
    assert "draws random numbers" in found.notes[0]


def test_dropout_that_falls_on_other_places(device: torch.device) -> None:
    """Under torch.func the attention's dropout on the CPU fills its mask in another order."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).to(device)
    x = torch.randn(2, 3, 8, device=device)
    with as_before(model):
        found = compare(mean_square, model, x)
    assert reasons(found) or device.type != "cpu"
    assert set(reasons(found).values()) <= {"unknown"}
    assert model.self_attn.dropout == model.dropout1.p == 0.5


@pytest.mark.parametrize("use", ["python", "generator"])
def test_randomness_of_other_kinds(
    device: torch.device, layer: nn.Linear, x: Tensor, use: str
) -> None:
    own = random.Random(0)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * (random.random() if use == "python" else own.random())

    with as_before(layer):
        found = compare(loss_fn, layer, x)
    assert found.same == (use == "python")  # Python's own state is put back, too
    assert set(reasons(found).values()) <= {"unknown"}


def test_a_generator_of_torch(device: torch.device, x: Tensor) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn(x.shape, generator=self.own).to(x))

    def loss_fn(model: nn.Module, x: Tensor, given: torch.Generator) -> Tensor:
        return mean_square(model, x + torch.randn(x.shape, generator=given).to(x))

    own, given = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    model: Any = Noisy(3, 2).to(device)
    model.own = own
    before = [own.get_state(), given.get_state()]
    found = compare(loss_fn, model, x, given)
    assert found.same
    assert "random numbers" in found.notes[0]
    assert all(map(torch.equal, before, [own.get_state(), given.get_state()]))


def test_autocast_casts_once(device: torch.device, layer: nn.Linear, x: Tensor) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(x).float().square().mean() + 0.3 * model(x).float().exp().mean()

    assert set(reasons(compare(loss_fn, layer, x)).values()) == {"unknown"}


@pytest.mark.parametrize("constant", [0.0, math.nan])
def test_what_no_check_explains_is_unknown(device: torch.device, constant: float) -> None:
    """A function that notices torch.func; nothing that compare looks at is the cause."""
    w = torch.ones(3, device=device, requires_grad=True)

    def loss_fn(w: Tensor) -> Tensor:
        inside = torch._C._functorch.is_functorch_wrapped_tensor(w)
        moved = w.detach().sum() if inside else 0
        return (w * (2 if inside else 3)).sum() + moved + constant  # the same number in both

    found = compare(loss_fn, w)
    assert found.differences[FUNC]["param"].reason == "unknown"
    assert found.differences[FUNC]["param"].absolute == 1.0


# --- How it is called ----------------------------------------------------------------------------


def test_a_function_that_holds_its_modules(layer: nn.Linear, x: Tensor) -> None:
    found = compare(lambda x: layer(x).square().mean(), layer, x)
    assert found.same
    assert found.called == "loss_fn(*args)"
    found = compare(lambda x: layer(x).sum(), layer.parameters(), x)
    assert "loss_fn(params, *args)" in found.refused[FUNC]
    assert all(d.same for d in found.differences[GRAD].values())


def test_trees_of_modules_and_tensors(device: torch.device, layer: nn.Linear, x: Tensor) -> None:
    scale = torch.ones((), device=device, requires_grad=True)
    params = {"G": layer, "rest": [scale, None], "again": layer}
    found = compare(lambda p, x: (p["G"](x) * p["rest"][0]).sum(), params, x)
    assert found.same
    assert list(found.differences[FUNC]) == [
        "G.weight", "G.bias", "rest[0]", "again.weight", "again.bias",
    ]  # fmt: skip
    weight, bias = layer.parameters()
    by_hand = lambda p, x: nn.functional.linear(x, *p).square().mean()  # noqa: E731
    assert compare(by_hand, layer.parameters(), x).same
    assert compare(by_hand, torch.optim.SGD([weight, bias], lr=1), x).same


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m, x: (lambda a, b, c: a, m, x), gradkit.StructureError, "loss_fn: expected"),
        (lambda m, x: (mean_square(m, x), m), gradkit.StructureError, "loss_fn: .*a function"),
        (lambda m, x: (mean_square, m, iter([x])), gradkit.LeafTypeError, r"args\[0\].*only once"),
        (lambda m, x: (mean_square, m, m(x)), gradkit.LeafTypeError, r"args\[0\].*history"),
        (lambda m, x: (mean_square, m.weight * 2, x), gradkit.LeafTypeError, "params.*history"),
        (lambda m, x: (lambda m, x: m(x), m, x), gradkit.NotScalarLossError, "exactly one"),
        (lambda m, x: (lambda m, x: "loss", m, x), gradkit.LeafTypeError, "losses"),
        (lambda m, x: (lambda m, x: x.sum(), m, x), gradkit.DetachedLossError, "constants"),
        (lambda m, x: (mean_square, m.requires_grad_(False), x), RuntimeError, "requires grad"),
        (lambda m, x: (mean_square, {}, x), gradkit.StructureError, "params"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    layer: nn.Linear, x: Tensor, call: Any, error: type[Exception], text: str
) -> None:
    args = call(layer, x)
    with as_before(layer), pytest.raises(error, match=text):
        compare(*args)


def test_inside_of_a_transform_it_is_refused(layer: nn.Linear, x: Tensor) -> None:
    def inside(x: Tensor) -> Tensor:
        compare(mean_square, layer, x)
        return x.sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match="inside of Grad"):
        torch.func.grad(inside)(x)


# --- Nothing of the user's changes ---------------------------------------------------------------


def test_batch_norm_and_attributes(device: torch.device, x: Tensor) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.calls = 0
            self.seen = torch.zeros(3)  # no buffer

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            return self.norm(x)

    model, outer = Counting().to(device), nn.BatchNorm1d(3).to(device)
    x.requires_grad_()
    with as_before(model, outer):
        found = compare(lambda model, x: outer(model(x)).square().mean(), model, x)
        assert all(d.same for d in found.differences[GRAD].values())
        assert compare(mean_square, model, x).same
    assert x.grad is None
    assert not model.seen.any()


def test_one_module_in_two_places(device: torch.device, layer: nn.Linear, x: Tensor) -> None:
    # functional_call leaves the tensors of the call in a module that it finds under two names.
    square = nn.Linear(3, 3).to(device)
    twice = nn.Sequential(square, nn.Tanh(), square)
    with as_before(square):
        assert compare(mean_square, twice, x).same
    below = {"layer": layer, "all": nn.Sequential(square, layer)}
    with as_before(layer, square):
        assert compare(lambda m, x: (m["layer"](x) + m["all"](x)).square().sum(), below, x).same


def test_what_a_forward_pass_puts_into_a_cache(device: torch.device, x: Tensor) -> None:
    class Caching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.cache["out"] = out = super().forward(x)
            return out

    model: Any = Caching(3, 2).to(device)
    model.cache = {}
    assert compare(mean_square, model, x).same
    assert not model.cache


def test_what_an_object_holds(device: torch.device, layer: nn.Linear, x: Tensor) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.teacher = nn.BatchNorm1d(3).to(device)

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return model(x + self.teacher(x).detach()).square().mean()

    trainer = Trainer()
    with as_before(layer, trainer.teacher):
        compare(trainer.loss, layer, x)
        compare(lambda model, x: trainer.loss(model, x), layer, x)
        compare(lambda model, x, trainer: trainer.loss(model, x), layer, x, trainer)


def test_a_refusal_after_the_forward_pass(device: torch.device, x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device).requires_grad_(False)
    with as_before(model), pytest.raises(gradkit.UnreachedParamError, match="requires grad"):
        compare(lambda m, x: (m(x) * x.requires_grad_()[:, :1]).sum(), model, x)


def test_what_writes_on_params_and_arguments(device: torch.device, x: Tensor) -> None:
    rows = nn.Embedding(5, 3, max_norm=0.1).to(device)
    index = torch.tensor([1, 2], device=device)
    with as_before(rows), unchanged(x):
        compare(lambda m, i, x: (m(i) * x.mul_(2).sum()).square().sum(), rows, index, x)


def test_an_optimizer_in_the_backward_does_not_step(
    device: torch.device, layer: nn.Linear, x: Tensor
) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9)
    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with as_before(layer):
        found = compare(mean_square, layer, x)
    assert not optimizer.state
    assert "post-accumulate-grad hooks" in found.notes[0]
    mean_square(layer, x).backward()
    assert optimizer.state  # the hook is there again


def test_a_function_that_calls_backward(layer: nn.Linear, x: Tensor) -> None:
    mean_square(layer, x).backward()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        mean_square(model, 3 * x).backward()
        return mean_square(model, x)

    with as_before(layer):
        found = compare(loss_fn, layer, x)
    assert "backward() called inside" in found.refused[FUNC]
    assert any(note.startswith("loss_fn itself writes .grad") for note in found.notes)


def test_a_function_that_freezes(layer: nn.Linear, x: Tensor) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        model.weight.requires_grad_(False)
        return mean_square(model, x)

    with as_before(layer):
        found = compare(loss_fn, layer, x)
    assert layer.weight.requires_grad
    assert "does not require grad" in found.refused[GRAD]
    assert "nothing can be compared" in str(found)
    assert "param" not in str(found).split("\n\n")[1].split(":")[0]  # no table


def test_a_hook_that_a_refused_way_leaves_behind(device: torch.device, x: Tensor) -> None:
    class Scribbling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Scribble.apply(super().forward(x))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        handle = model.register_forward_hook(lambda *_: None)
        loss = mean_square(model, x)
        handle.remove()
        return loss

    model = Scribbling(3, 2).to(device)
    assert FUNC in compare(loss_fn, model, x).refused
    assert not model._forward_hooks


def test_a_function_that_casts(layer: nn.Linear, x: Tensor) -> None:
    mean_square(layer, x).backward()
    with as_before(layer):
        compare(lambda model, x: mean_square(model.double(), x.double()), layer, x)
    assert layer.weight.dtype == torch.float32


def test_a_function_that_raises(layer: nn.Linear, x: Tensor) -> None:
    mean_square(layer, x).backward()
    calls = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(torch.rand(()))
        if len(calls) == 3:
            raise ZeroDivisionError
        return mean_square(model, x)

    with as_before(layer), pytest.raises(ZeroDivisionError):
        compare(loss_fn, layer, x)


def test_a_graph_of_the_caller_is_not_freed(device: torch.device, layer: nn.Linear) -> None:
    w = torch.randn(4, 3, device=device, requires_grad=True)
    held = w.exp()
    found = compare(lambda model: mean_square(model, held), layer)
    assert found.same
    assert w.grad is None
    held.sum().backward()  # its graph is still there


def test_a_teacher_of_inference_mode(device: torch.device, layer: nn.Linear, x: Tensor) -> None:
    with torch.inference_mode():
        teacher = nn.Linear(3, 2).to(device)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = teacher(x)
        return (model(x) - aim).square().mean()

    with as_before(layer):
        assert compare(loss_fn, layer, x).same


def test_modes(device: torch.device, layer: nn.Linear, x: Tensor) -> None:
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, as_before(layer):
            assert compare(mean_square, layer, x).same


# --- Odd steps -----------------------------------------------------------------------------------


def test_complex_sparse_empty_and_higher_order(
    device: torch.device, layer: nn.Linear, x: Tensor
) -> None:
    c = torch.randn(3, dtype=torch.complex64, device=device, requires_grad=True)
    assert compare(lambda c: c.abs().square().sum(), c).same
    rows = nn.Embedding(4, 2, sparse=True).to(device)
    index = torch.tensor([1, 1, 2], device=device)
    assert compare(lambda m, i: m(i).square().sum(), rows, index).same
    assert compare(lambda p: p.sum(), torch.zeros(0, device=device, requires_grad=True)).same

    def penalty(model: nn.Linear, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        return torch.autograd.grad(loss, model.weight, create_graph=True)[0].square().sum()

    assert compare(penalty, layer, x).same


def test_inf_and_nan_are_the_same_bits(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    assert compare(lambda w: (w / 0).sum() + (w * 0).sqrt().sum(), w).same


def test_what_torch_func_refuses_is_told(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    found = compare(lambda w: Scribble.apply(w).sum(), w)
    assert found.refused[FUNC].startswith("RuntimeError")
    assert set(found.differences) == {GRAD}
    assert "torch.func cannot be compared" in str(found)


# --- What it looks like --------------------------------------------------------------------------


def test_the_picture_of_none_against_zero_has_one_tick(device: torch.device, x: Tensor) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    parts = nn.ModuleDict({"used": nn.Linear(3, 1), "idle": nn.Linear(3, 1)}).to(device)
    found = compare(lambda parts, x: mean_square(parts["used"], x), parts, x)
    assert "0, not None" in str(found)
    ax = found.plot(figure.subplots())
    assert ax.get_xticks().tolist() == [0]


def test_text_html_and_picture(device: torch.device, layer: nn.Linear, x: Tensor) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    layer.weight.register_hook(lambda grad: 2 * grad)
    found = compare(mean_square, layer, x)
    text = str(found)
    assert "1 of 2 params differ" in text
    assert "torch.func (weight): a tensor hook on the leaf" in text
    assert "1 of 2 params differ" in found._repr_html_()
    upper, lower = figure.subplots(2)
    assert found.plot(upper) is upper
    assert [label.get_text() for label in upper.get_yticklabels()] == ["weight"]
    lines: Any = upper.lines
    rings = {o.get_label(): [*o.get_xdata()] for o in lines}
    assert rings == {GRAD: [0.0], FUNC: [found.differences[FUNC]["weight"].absolute]}
    labels = [text.get_text() for text in upper.get_legend().get_texts()]
    assert labels == [GRAD, FUNC]
    compare(mean_square, deepcopy(layer), x).plot(lower)
    assert any(text.get_text() == "equal, bit for bit" for text in lower.texts)
    assert [text.get_text() for text in lower.get_legend().get_texts()] == labels
    figure.canvas.draw()
