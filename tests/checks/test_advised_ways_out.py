"""Where torch or Python would raise an error of its own, gradkit's says what to do; it is done."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit import func
from tests.helpers import unchanged


@pytest.fixture
def w(device: torch.device) -> Tensor:
    return torch.tensor([1.0, 2.0], device=device, requires_grad=True)


X = torch.ones(4, 3)


# --- containers that optree does not know


class LossDict(dict):  # type: ignore[type-arg]
    """As those of many training libraries."""


@dataclass
class LossPair:
    fit: Tensor
    size: Tensor


@dataclass
class ModelOutput:
    loss: Tensor
    logits: Tensor


def in_array(*losses: Tensor) -> Any:
    array = np.empty(len(losses), dtype=object)
    for index, loss in enumerate(losses):
        array[index] = loss
    return array


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a subclass of dict": (lambda a, b: LossDict(fit=a, size=b), "dict(losses)"),
    "a mapping": (lambda a, b: UserDict(fit=a, size=b), "dict(losses)"),
    "items of a dict": (lambda a, b: {"fit": a, "size": b}.items(), "dict(losses)"),
    "a dataclass": (LossPair, "vars(losses)"),
    "an array": (in_array, "list(losses)"),
    "a set": (lambda a, b: {a, b}, "list(losses)"),
    "an output of a model": (ModelOutput, "losses.loss"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_of_losses_is_made_a_tree(w: Tensor, kind: str) -> None:
    make, advised = CONTAINERS[kind]

    def losses() -> Any:
        return make(w.exp().sum(), w.square().sum())

    fit, size = w.detach().exp(), 2 * w.detach()
    expected = fit if advised == "losses.loss" else fit + size
    for call in (
        lambda losses: gradkit.value_and_grads(losses, w)[1],
        lambda losses: func.value_and_grads(lambda _: losses)(w)[1],
        lambda losses: gradkit.minimize_(torch.optim.SGD([w], 0.0), losses),
    ):
        with unchanged(w), pytest.raises(gradkit.LeafTypeError) as caught:
            call(losses())
        assert str(caught.value).endswith(f"What to do: {advised}")
    tree = eval(advised, {"losses": losses()})
    torch.testing.assert_close(gradkit.value_and_grads(tree, w)[1], expected)


def test_a_mapping_of_params(w: Tensor) -> None:
    params = UserDict(w=w)
    with pytest.raises(gradkit.LeafTypeError, match=r"dict\(params\)"):
        gradkit.value_and_grads(w.sum(), params)
    assert gradkit.value_and_grads(w.sum(), dict(params))[1]["w"].tolist() == [1, 1]


def test_a_sparse_loss_of_one_element(w: Tensor) -> None:
    loss = w.sum()[None].to_sparse()
    with pytest.raises(gradkit.LeafTypeError, match=r"loss\.to_dense\(\)"):
        gradkit.value_and_grads(loss, w)
    assert gradkit.value_and_grads(loss.to_dense(), w)[1].tolist() == [1, 1]


# --- freed graphs, and what was written on


def test_a_value_kept_from_the_step_before(w: Tensor) -> None:
    optimizer = torch.optim.SGD([w], 0.1)
    kept = w.exp()
    gradkit.minimize_(optimizer, kept.sum())
    total = gradkit.Accumulator(w)
    for call in (
        lambda: gradkit.minimize_(optimizer, kept.sum()),
        lambda: total.add_(kept.sum(), 1),
        lambda: gradkit.value_and_grads(kept * 1 @ kept, w),
    ):
        with unchanged(w), pytest.raises(gradkit.FreedGraphError) as caught:
            call()
        for advice in ("anew in each step", "kept.detach()", "total.add_([", "retain_graph=True"):
            assert advice in str(caught.value)
    at = w.detach().clone()
    kept = w.exp()
    torch.testing.assert_close(gradkit.value_and_grads(kept.sum(), w)[1], at.exp())
    grads = gradkit.value_and_grads((w * w.exp().detach()).sum(), w)[1]
    torch.testing.assert_close(grads, at.exp())
    shared = w.exp()
    total.add_([shared.sum(), 2 * shared.sum()], 1)
    torch.testing.assert_close(total.mean()[1], 3 * at.exp())


class InPlace(torch.autograd.Function):
    """A scan whose backward writes on what it has made, as mambapy's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y = x.exp()
        out = y * y
        y.add_(1)
        return grad * (out / x.exp())


def test_a_write_of_the_model_s_own_is_not_an_optimizer_s(w: Tensor) -> None:
    _, grad = gradkit.value_and_grads(InPlace.apply(w).sum(), w, create_graph=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"y = y \+ x, not y.add_") as caught:
        gradkit.value_and_grads(grad.sum(), w)
    assert "optimizer" not in str(caught.value)
    stale = (w * w).sum()
    with torch.no_grad():
        w.sub_(0.1)
    with pytest.raises(gradkit.UnsupportedGraphError, match="which an optimizer's step is"):
        gradkit.value_and_grads(stale, w)


# --- Functions


class FreesItsContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = ctx.x
        del ctx.x
        return 2 * x * grad


class Saves(FreesItsContext):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.filterwarnings("ignore::gradkit.GradkitWarning")
@pytest.mark.parametrize("strategy", ["sequential", "batched", "auto"])
def test_a_function_that_frees_its_context(w: Tensor, strategy: Any) -> None:
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="FreesItsContext") as e:
        gradkit.per_loss_grads(FreesItsContext.apply(w), w, strategy=strategy)
    assert isinstance(e.value.__cause__, AttributeError)
    with pytest.raises(gradkit.UnsupportedGraphError, match="FreesItsContext"):
        gradkit.gram(FreesItsContext.apply(w), w)
    jacobian = gradkit.per_loss_grads(Saves.apply(w), w, strategy=strategy)
    assert jacobian.tolist() == [[2, 0], [0, 4]]
    loss = FreesItsContext.apply(w).sum()
    assert gradkit.value_and_grads(loss, w)[1].tolist() == [2, 4]


class Root(torch.autograd.Function):
    """Its backward writes on a temporary of its own, as entmax's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad / ctx.saved_tensors[0].sqrt()
        out[:] = out * 1
        return out.mul_(0.5)


class Scribbles(Root):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(0.5)


def test_checked_blames_no_write_on_what_the_backward_has_made(w: Tensor) -> None:
    with warnings.catch_warnings(), gradkit.checked():
        warnings.simplefilter("error")
        _, grad = gradkit.value_and_grads(Root.apply(w).sum(), w)
    torch.testing.assert_close(grad, 0.5 / w.detach().sqrt())
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match="Scribbles"):
        gradkit.value_and_grads((Scribbles.apply(w) * torch.ones_like(w)).sum(), w)


# --- torch.func


def test_a_nested_tensor_in_a_transform(device: torch.device) -> None:
    rows = torch.randn(5, 4, device=device, dtype=torch.float64)
    offsets = torch.tensor([0, 2, 5], device=device)

    def loss(rows: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(rows, offsets)
        return nested.sin().values().sum()

    def padded(rows: Tensor) -> Tensor:
        row_of_each = torch.tensor([0, 0, 1, 1, 1], device=device)
        place_of_each = torch.tensor([0, 1, 0, 1, 2], device=device)
        zeros = torch.zeros(2, 3, 4, device=device, dtype=torch.float64)
        return zeros.index_put((row_of_each, place_of_each), rows).sin().sum()

    for call in (func.hvp, func.jvp):
        with pytest.raises(gradkit.UnsupportedGraphError, match="index_put"):
            call(loss, rows, rows)
    torch.testing.assert_close(func.hvp(padded, rows, rows)[1], -rows.sin() * rows)
    torch.testing.assert_close(func.value_and_grads(loss)(rows)[1], rows.cos())


def test_a_second_pass_to_a_jagged_leaf(device: torch.device) -> None:
    other = torch.ones(2, device=device, requires_grad=True)
    rows = [torch.ones(2, 3, device=device), torch.ones(1, 3, device=device)]
    n = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)

    def loss() -> Tensor:
        return (n * n).values().sum() + other.sum()

    gradkit.backward_(loss())
    with unchanged(other), pytest.raises(gradkit.UnsupportedGraphError, match="add_grads_"):
        gradkit.backward_(loss())
    gradkit.add_grads_(n, gradkit.value_and_grads(loss(), n)[1])
    assert n.grad is not None
    assert n.grad.values().unique().tolist() == [4]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
def test_a_module_of_torch_jit(device: torch.device, compiled: Callable[[Any], Any]) -> None:
    module = nn.Linear(3, 2)
    script = compiled(module)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^module: .*takes other parameters"):
        func.make_functional(script)
    call, params, buffers = func.make_functional(module)
    _, ours = func.value_and_grads(lambda p: call(p, buffers, X)[0].square().sum())(params)
    _, eager = gradkit.value_and_grads(script(X).square().sum(), script)
    torch.testing.assert_close(ours["weight"].detach(), eager["weight"])


@pytest.mark.parametrize("use", [lambda m, x: m(x), lambda m, x: x @ m.weight.T])
def test_a_module_that_is_an_argument_is_a_dict(device: torch.device, use: Any) -> None:
    model, x = nn.Linear(3, 1).to(device), torch.ones(2, 3, device=device)
    for call in (func.value_and_grads, func.per_loss_grads):
        with pytest.raises(gradkit.LeafTypeError, match=r"(?s)a dict of param.*functional_call"):
            call(lambda model: use(model, x).sum())(model)
    grads = func.value_and_grads(lambda p: (x @ p["weight"].T).sum())(model)[1]
    torch.testing.assert_close(grads["weight"], x.sum(0, keepdim=True))


def test_a_defect_of_torch_s_own_is_named(w: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x INTERNAL ASSERT FAILED at y, please report a bug to PyTorch."

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError(text)

    with pytest.raises(gradkit.UnsupportedGraphError, match="a defect of torch") as caught:
        func.value_and_grads(fails)(w)
    assert text in str(caught.value.__cause__)
    z = w * 2
    z.register_hook(fails)
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="a defect of torch"):
        gradkit.value_and_grads(z.sum(), w)


# --- tensors without numbers, and those that know few operations


def test_meta_tensors(device: torch.device) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 1)
        x = torch.ones(4, 2)
    step = func.staged_value_and_grads(
        lambda p, x: torch.func.functional_call(model, p, (x,)),
        lambda e: e.square().mean(),
        chunk_size=2,
    )
    _, grads = step(model, x)
    assert grads["weight"].is_meta
    losses = [model(x).mean(), model(x).square().mean()]
    for call in (
        lambda: gradkit.report.norms(grads),
        lambda: gradkit.report.conflicts(gradkit.per_loss_grads(losses, model, retain_graph=True)),
        lambda: gradkit.report.compare(lambda: model(x).square().mean(), model),
        lambda: func.check_grads(lambda w: w.square().sum(), model.weight),
    ):
        with pytest.raises(gradkit.LeafTypeError, match="to_empty"):
            call()
    loaded = model.to_empty(device=device)
    nn.init.ones_(loaded.weight)
    total = gradkit.report.norms({"w": loaded.weight.detach()}).total
    assert total.norm == pytest.approx(2**0.5)


class Int8(Tensor):
    """A quantized weight that knows two operations."""

    fails: Any = NotImplementedError

    def __new__(cls, q: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, q.shape, device=q.device)

    def __init__(self, q: Tensor) -> None:
        self.q = q

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, f: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if f in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].q)
        if cls.fails is None:
            return NotImplemented
        raise cls.fails(f"no {f}")


class Int8Raises(Int8):
    fails = RuntimeError


class Int8Declines(Int8):
    fails = None


@pytest.mark.parametrize("kind", [Int8, Int8Raises, Int8Declines])
def test_a_frozen_quantized_weight(device: torch.device, kind: type[Int8]) -> None:
    net = nn.Linear(3, 1).to(device)
    net.frozen = nn.Parameter(
        kind(torch.ones(3, 3, dtype=torch.int8, device=device)), requires_grad=False
    )
    x = torch.ones(2, 3, device=device)

    def loss(p: Any) -> Tensor:
        weight = p["frozen"].q.float() if "frozen" in p else 0
        return nn.functional.linear(x @ weight, p["weight"], p["bias"]).square().sum()

    params = {name: p.detach() if p.requires_grad else p for name, p in net.named_parameters()}
    trained = {name: p for name, p in params.items() if name != "frozen"}
    expected = func.value_and_grads(lambda p: loss({**params, **p}))(trained)[1]
    grads = func.value_and_grads(loss)(params)[1]
    assert torch.equal(grads.pop("frozen"), torch.zeros(3, 3, device=device))
    torch.testing.assert_close(grads, expected)
    along = {**trained, "frozen": None}
    pushed = func.linearize(loss, params)[1](along)
    torch.testing.assert_close(pushed, sum((grads[k] * trained[k]).sum() for k in trained))
    assert gradkit.tree.zeros_like(params)["frozen"].shape == (3, 3)
    gradkit.report.compare(lambda: loss(dict(net.named_parameters())), net)


# --- optimizers


class NoState:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


class NoGroups:
    param_groups = None

    def step(self) -> None:
        raise AssertionError


class OtherGroups(NoGroups):
    param_groups: Any = ({"weights": ()},)


def test_optimizers_that_are_not_torch_s(w: Tensor) -> None:
    gradkit.step_(NoState(torch.optim.SGD([w], 1.0)), w, torch.ones_like(w))
    assert w.tolist() == [0, 1]
    for other in (NoGroups(), OtherGroups(), torch.optim.SGD):
        for call in (
            lambda o: gradkit.step_(o, w, torch.ones_like(w)),
            lambda o: gradkit.minimize_(o, w.sum()),
        ):
            with unchanged(w), pytest.raises(gradkit.UnsupportedOptimizerError):
                call(other)


def test_going_on_from_torch_s_optimizer_and_back(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).to(device), torch.randn(5, 3, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step_of_torch() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step_of_torch()
    saved, opt = optimizer.state_dict(), gradkit.meta.adam(lr=0.1)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, grads = gradkit.value_and_grads(model(x).square().mean(), model)
    with pytest.raises(gradkit.StructureError, match=r"saved\['state'\]"):
        opt.step(params, grads, saved)
    state = {
        name: dict(zip(params, (s[name] for s in saved["state"].values()), strict=True))
        for name in opt.init(params)
    }
    params, state = opt.step(params, grads, state)
    step_of_torch()
    for name, p in model.named_parameters():
        torch.testing.assert_close(params[name], p.detach())
    with pytest.raises(gradkit.StructureError, match=r"state\['exp_avg'\]\['weight'\]: .* on "):
        opt.step(
            params, grads, {**state, "exp_avg": gradkit.tree.map(lambda t: t.to("meta"), params)}
        )


# --- derivatives


def test_no_grad_is_not_heeded_by_forward_mode(device: torch.device) -> None:
    x = torch.tensor([1.0, 2.0], device=device)

    def cut(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = x * x
        return (x * constant).sum()

    with pytest.raises(gradkit.GradientCheckError, match="leave no_grad out of fn"):
        func.check_grads(cut, x)
    func.check_grads(lambda x: (x * (x * x)).sum(), x)
    func.check_grads(lambda x, constant: (x * constant).sum(), x, x * x)


def test_sinc_beside_a_norm_of_zero(device: torch.device) -> None:
    d = torch.tensor([1.0, 2.0], device=device, dtype=torch.float64)

    def second(at: float) -> Tensor:
        v = torch.full_like(d, at).requires_grad_()
        n = torch.linalg.vector_norm(v)
        value = torch.cos(n) + (torch.special.sinc(n / torch.pi) * v * v).sum()
        _, grad = gradkit.value_and_grads(value, v, create_graph=True)
        return gradkit.value_and_grads((grad * d).sum(), v)[1]

    with pytest.raises(gradkit.UnsupportedGraphError, match=r"a norm of zero.*\n.*v \+ 1e-9"):
        second(0.0)
    with gradkit.checked():
        torch.testing.assert_close(second(1e-9), d)


def test_explain_tells_a_value_that_was_detached(device: torch.device) -> None:
    a, b, c = (torch.ones(2, device=device, requires_grad=True) for _ in range(3))
    verdicts = gradkit.report.explain((a.detach() * b).sum(), {"a": a, "b": b, "c": c}).verdicts
    statuses = {name: verdict.status for name, verdict in verdicts["loss"].items()}
    assert statuses == {"a": "detached", "b": "reached", "c": "not in the graph"}


# --- parameters, trees and arguments of other kinds


@dataclass(frozen=True, slots=True)
class Slots:
    w: Tensor
    size: Tensor


@pytest.mark.parametrize("make", [Slots, lambda w, size: SimpleNamespace(w=w, size=size)])
def test_what_holds_tensors_as_attributes(w: Tensor, make: Callable[..., Any]) -> None:
    params = make(w, w.detach().clone().requires_grad_())
    with unchanged(w), pytest.raises(gradkit.LeafTypeError) as caught:
        gradkit.value_and_grads(w.square().sum(), params)
    advised = str(caught.value).partition("What to do: ")[2]
    grads = gradkit.value_and_grads(w.square().sum(), eval(advised, {"params": params}))[1]
    assert grads["w"].tolist() == [2, 4]
    assert grads["size"] is None


def test_a_tree_that_holds_itself(w: Tensor) -> None:
    params: dict[str, Any] = {"w": w}
    params["all"] = params
    with pytest.raises(gradkit.StructureError, match=r"a dict that holds itself.*\n.*leave out"):
        gradkit.value_and_grads(w.sum(), params)
    del params["all"]
    assert gradkit.value_and_grads(w.sum(), params)[1]["w"].tolist() == [1, 1]


def test_items_of_a_parameter_list_in_fn(device: torch.device) -> None:
    layers = nn.ParameterList([
        nn.Parameter(torch.full((2,), n, device=device)) for n in (2.0, 3.0)
    ])
    with pytest.raises(gradkit.LeafTypeError, match=r"params\['0'\], not params\[0\]"):
        func.value_and_grads(lambda params: (params[0] * params[1]).sum())(layers)
    grads = func.value_and_grads(lambda params: (params["0"] * params["1"]).sum())(layers)[1]
    assert grads["0"].tolist() == [3, 3]
    with pytest.raises(KeyError, match="wieght"):  # a mistake of fn itself
        func.value_and_grads(lambda params: params["wieght"].sum())(nn.Linear(2, 1))


def test_argnums_in_a_list(w: Tensor) -> None:
    call = partial(func.value_and_grads, lambda a, b: (a * b).sum())
    with pytest.raises(gradkit.OptionError, match=r"do: argnums=\(0, 1\)$"):
        call(argnums=[0, 1])(w, 2 * w)
    assert [grad.tolist() for grad in call(argnums=(0, 1))(w, 2 * w)[1]] == [[2, 4], [1, 2]]


def test_nothing_in_the_place_of_losses_and_params(w: Tensor) -> None:
    with pytest.raises(gradkit.LeafTypeError, match=r"losses\['aux'\].*\n.*leave it out"):
        gradkit.value_and_grads({"fit": w.sum(), "aux": None}, w)
    assert gradkit.value_and_grads({"fit": w.sum()}, w)[1].tolist() == [1, 1]
    with pytest.raises(gradkit.LeafTypeError, match="return the loss that fn computes"):
        func.value_and_grads(lambda w: None)(w)
    with pytest.raises(
        gradkit.UnreachedParamError, match=r"got none: no tensor there\.\n.*the module"
    ):
        gradkit.value_and_grads(w.sum(), None)


def test_integers_among_primals(w: Tensor) -> None:
    count = torch.tensor([2, 3], device=w.device)
    with pytest.raises(gradkit.LeafTypeError, match=r"args\[1\].*\n.*what fn refers to"):
        func.hvp(lambda w, n: (w**n).sum(), (w, count), (w, count))
    tangents = torch.ones_like(w)
    assert func.hvp(lambda w: (w**count).sum(), w, tangents)[1].tolist() == [2, 12]


def test_groups_of_an_optimizer_as_params(w: Tensor) -> None:
    optimizer = torch.optim.SGD([w], 0.1)
    with pytest.raises(gradkit.LeafTypeError, match=r"for optimizer\.param_groups, the optimizer"):
        gradkit.value_and_grads(w.sum(), optimizer.param_groups)
    assert gradkit.value_and_grads(w.sum(), optimizer)[1][0].tolist() == [1, 1]


# --- steps


def test_a_step_out_of_memory_says_so(w: Tensor) -> None:
    kernel: dict[str, Any] = {"__name__": "torch.optim.rmsprop", "Full": torch.OutOfMemoryError}
    exec("def full(*args, **kwargs): raise Full('no memory left')", kernel)
    optimizer = torch.optim.RMSprop([w], 0.1)
    step = patch("torch.optim.rmsprop.rmsprop", kernel["full"])
    with step, pytest.raises(torch.OutOfMemoryError):
        gradkit.minimize_(optimizer, w.sum())


def test_each_optimizer_once(w: Tensor) -> None:
    first, second = torch.optim.SGD([w], 0.1), torch.optim.SGD([w], 0.1)
    for optimizers, got in (([], "an empty list"), ([first, first], "one of them twice")):
        with unchanged(w), pytest.raises(gradkit.StructureError, match=got):
            gradkit.minimize_(optimizers, w.sum())
    gradkit.minimize_([first, second], w.sum())
    torch.testing.assert_close(w.detach().cpu(), torch.tensor([0.8, 1.8]))


class NeedsRate(torch.optim.SGD):
    def step(self, lr: float) -> None:  # type: ignore[override]
        super().step()


class HasRate(torch.optim.SGD):
    def step(self, lr: float = 0.1) -> None:  # type: ignore[override]
        super().step()


def test_a_step_that_takes_arguments(w: Tensor) -> None:
    with (
        unchanged(w),
        pytest.raises(gradkit.UnsupportedOptimizerError, match=r"takes.*lr.*\n.*defaults"),
    ):
        gradkit.minimize_(NeedsRate([w], 0.5), w.sum())
    gradkit.minimize_(HasRate([w], 0.5), w.sum())
    assert w.tolist() == [0.5, 1.5]


def test_a_step_that_torch_refuses(device: torch.device) -> None:
    table = nn.Embedding(3, 2, sparse=True, device=device)
    row = torch.tensor([1], device=device)
    options: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, r"consider SparseAdam.*\n.*torch\.optim\.SGD"),
        ({"differentiable": True}, r"leave out differentiable=True; gradkit\.meta"),
    )
    for options_of_adam, advice in options:
        adam = torch.optim.Adam(table.parameters(), **options_of_adam)
        with unchanged(table.weight):
            with pytest.raises(gradkit.UnsupportedOptimizerError, match=advice):
                gradkit.minimize_(adam, table(row).sum())
            _, grads = gradkit.value_and_grads(table(row).sum(), table)
            with pytest.raises(gradkit.UnsupportedOptimizerError, match=advice):
                gradkit.step_(adam, table, grads)
    for right in (torch.optim.SparseAdam, torch.optim.SGD):
        before = table.weight.detach().clone()
        gradkit.minimize_(right(table.parameters(), lr=0.5), table(row).sum())
        torch.testing.assert_close((before - table.weight)[1], torch.full_like(before[1], 0.5))

    class Stop(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        gradkit.minimize_(Stop(table.parameters(), 0.1), table(row).sum())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_compressed_parameter(device: torch.device) -> None:
    x = torch.ones(2, 1, device=device)
    sparse = torch.eye(2, device=device).to_sparse_csr().requires_grad_()
    with pytest.raises(
        gradkit.LeafTypeError, match=r"optimizer\[0\].*torch\.sparse_csr.*\n.*dense"
    ):
        gradkit.minimize_(torch.optim.SGD([sparse], 0.1), (sparse @ x).sum())
    w = sparse.detach().to_dense().requires_grad_()
    gradkit.minimize_(torch.optim.SGD([w], 0.5), (w @ x).sum())
    assert w.tolist() == [[0.5, -0.5], [-0.5, 0.5]]


def test_writes_inside_of_transforms(device: torch.device) -> None:
    model, x = nn.Linear(3, 1, device=device), X.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def grads_of(x: Tensor) -> Any:
        return func.value_and_grads(
            lambda params: torch.func.functional_call(model, params, (x,)).sum()
        )(model)[1]

    def one_of(call: Callable[[Any], object]) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            call(grads_of(x))
            return x

        return fn

    with unchanged(*model.parameters()):
        for call in (
            partial(gradkit.write_grads_, model),
            partial(gradkit.add_grads_, model),
            partial(gradkit.step_, optimizer, model),
            partial(gradkit.step_, optimizer, model, max_norm=1.0),
        ):
            with pytest.raises(
                gradkit.UnsupportedGraphError, match=r"grads\['weight'\].*\n.*return"
            ):
                torch.vmap(one_of(call))(x)
        assert model.weight.grad is None
        with pytest.raises(
            gradkit.UnsupportedGraphError, match=r"grads\['weight'\].*\n.*return it"
        ):
            torch.vmap(one_of(gradkit.report.norms))(x)
        with pytest.raises(gradkit.DetachedLossError, match=r"torch\.vmap.*\n.*gradkit\.func"):
            torch.vmap(lambda x: gradkit.minimize_(optimizer, model(x).sum()))(x)
    per_sample = torch.vmap(grads_of)(x)
    gradkit.write_grads_(model, gradkit.tree.map(lambda grad: grad.sum(0), per_sample))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[4, 4, 4]]


# --- Functions whose backward does not fit


class OneOfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class OtherShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_ones(7), None


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


@pytest.mark.parametrize(
    ("function", "advice"),
    [(OneOfTwo, "as forward has arguments"), (OtherShape, "the shape"), (NoBackward, "a backward")],
)
def test_a_backward_that_does_not_fit(w: Tensor, function: Any, advice: str) -> None:
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.backward_):
        loss = function.apply(w, w.detach()).sum()
        with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match=advice):
            call(loss, w)


@pytest.mark.parametrize(
    ("hook", "advice"),
    [
        (lambda grad: grad[:1], "the shape that the hook"),
        (lambda grad: 3, "None to leave it as it"),
    ],
)
def test_a_hook_that_returns_no_gradient(w: Tensor, hook: Any, advice: str) -> None:
    handle = w.register_hook(hook)
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.backward_):
        with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match=advice):
            call(w.square().sum(), w)
    handle.remove()
    w.register_hook(lambda grad: None)
    assert gradkit.value_and_grads(w.square().sum(), w)[1].tolist() == [2, 4]


def test_a_module_as_the_encoder(device: torch.device) -> None:
    model, x = nn.Linear(3, 1, device=device), X.to(device)
    with pytest.raises(gradkit.OptionError, match=r"encode: .*\(input.*\n.*lambda params, batch: "):
        func.staged_value_and_grads(model, torch.sum)
    encode = partial(torch.func.functional_call, model)
    step = func.staged_value_and_grads(lambda params, batch: encode(params, (batch,)), torch.sum)
    assert step(model, x)[1]["bias"].tolist() == [4]


# --- blocks, functions of gradkit.meta, reports


def test_a_block_is_entered_again(w: Tensor) -> None:
    captured = gradkit.capture_grads(w)
    for power in (2, 3):
        with captured as result:
            (w**power).sum().backward()
        torch.testing.assert_close(result.grads, power * w.detach() ** (power - 1))
    kept = gradkit.safe_retain(w)
    for power in (2, 3):
        with kept as retained:
            (w**power).sum().backward()
        torch.testing.assert_close(retained.grads, power * w.detach() ** (power - 1))
    checked = gradkit.checked()
    for _ in range(2):
        with checked:
            assert gradkit.value_and_grads(w.sum(), w)[1].tolist() == [1, 1]
    twice = pytest.raises(gradkit.StructureError, match=r"another capture_grads\(\.\.\.\)")
    with captured, twice, captured:
        pass
    with captured as result, gradkit.capture_grads(w) as inner:
        w.sum().backward()
    assert result.grads is None
    assert inner.grads.tolist() == [1, 1]


def test_functions_that_take_too_few_arguments(w: Tensor) -> None:
    opt, batches = gradkit.meta.sgd(lr=0.5), [torch.zeros_like(w)]
    with pytest.raises(gradkit.OptionError, match=r"\(w, x\).*\n.*=lambda params, outer, batch: "):
        gradkit.meta.unroll(lambda w, x: ((w - x) ** 2).sum(), w, batches, opt)
    adapted = gradkit.meta.unroll(lambda w, _, x: ((w - x) ** 2).sum(), w, batches, opt)
    assert adapted.params.tolist() == [0, 0]
    with pytest.raises(gradkit.OptionError, match="params, buffers, outer, batch"):
        gradkit.meta.unroll(lambda w, _, x: w.sum(), w, batches, opt, buffers={"n": w.detach()})
    implicit: Any = gradkit.meta.implicit
    mean_value_and_grads: Any = gradkit.meta.mean_value_and_grads
    with pytest.raises(gradkit.OptionError, match=r"solver: .*\n.*lambda params, outer: "):
        implicit(lambda w: w, lambda w, a: ((w - a) ** 2).sum())
    find = implicit(lambda w, a: a + 0 * w, lambda w, a: ((w - a) ** 2).sum())
    assert gradkit.value_and_grads(find(w.detach(), w).sum(), w)[1].tolist() == [1, 1]
    with pytest.raises(gradkit.OptionError, match=r"meta_loss_fn=lambda params, task: "):
        mean_value_and_grads(lambda w: w.sum(), w, X)


def test_clipped_gradients_in_a_transform_of_them(w: Tensor) -> None:
    run: Any = partial(gradkit.meta.unroll, lambda w, _, x: (w * w).sum() / 2, w, [0])
    clip = gradkit.tree.clip_by_global_norm
    with pytest.raises(gradkit.LeafTypeError, match=r"max_norm\)\[0\]"):
        run(gradkit.meta.sgd(lr=1.0), grad_transform=lambda grads: clip(grads, 1.0))
    adapted = run(gradkit.meta.sgd(lr=1.0), grad_transform=lambda grads: clip(grads, 1.0)[0])
    torch.testing.assert_close(adapted.params, w * (1 - 5**-0.5))


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("params_are", ["a tensor", "a list", "a module"])
@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "adam"])
def test_going_on_from_an_optimizer_of_torch(
    device: torch.device, kind: str, params_are: str, is_live: bool
) -> None:
    hyper = {"lr": 0.1} if kind == "adam" else {"lr": 0.1, "momentum": 0.9}
    model, x = nn.Linear(3, 1, device=device), X.to(device)
    params: Any = {"a tensor": model.weight, "a list": [*model.parameters()]}.get(params_are, model)
    names = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam"}
    trained = [params] if params_are == "a tensor" else [*model.parameters()]
    optimizer = getattr(torch.optim, names[kind])(trained, **hyper)

    def loss(params: Any, *_: Any) -> Tensor:
        if isinstance(params, dict):
            return nn.functional.linear(x, **params).square().mean()
        tensors = params if isinstance(params, list) else [params, model.bias.detach()]
        return nn.functional.linear(x, *tensors).square().mean()

    for _ in range(2):
        gradkit.minimize_(optimizer, model(x).square().mean())
    opt, saved = getattr(gradkit.meta, kind)(**hyper), optimizer.state_dict()
    with pytest.raises(gradkit.StructureError, match=r"got one of torch\.optim") as caught:
        gradkit.meta.unroll(loss, params, [0, 0], opt, state=optimizer.state if is_live else saved)
    advice = str(caught.value).partition("to go on from it, ")[2].partition("; to start anew")[0]
    state = eval(advice, {"saved": saved, "opt": opt, "params": params})
    adapted = gradkit.meta.unroll(loss, params, [0, 0], opt, state=state)
    for _ in range(2):
        gradkit.minimize_(optimizer, model(x).square().mean())
    got = gradkit.tree.map(torch.Tensor.detach, adapted.params)
    leaves = [got] if isinstance(got, Tensor) else [*getattr(got, "values", lambda: got)()]
    torch.testing.assert_close(leaves, [p.detach() for p in trained])


def test_a_history_takes_conflicts(w: Tensor) -> None:
    history, grads = gradkit.report.History(), gradkit.per_loss_grads([w.sum(), w @ w], w)
    with pytest.raises(gradkit.LeafTypeError, match=r"gradkit\.report\.conflicts\(per_loss\)"):
        history.add_(0, grads)
    history.add_(0, gradkit.report.conflicts(grads))
    assert history.steps == [0]


# --- nested tensors in trees of gradients


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_trees_of_nested_tensors(device: torch.device, layout: torch.layout) -> None:
    parts = [torch.ones(2, device=device), torch.full((3,), 2.0, device=device)]
    n = torch.nested.nested_tensor(parts, layout=layout)
    flat, tree = torch.cat(parts), gradkit.tree

    def entries(nested: Tensor) -> Tensor:
        return torch.cat([*nested.unbind()])

    close = torch.testing.assert_close
    close(tree.global_norm([n, None]), flat.norm())
    close(tree.dot([n], [n]), flat @ flat)
    close(tree.cosine([n], [n]), flat.new_ones(()))
    close(entries(tree.clip_by_global_norm([n], 1.0)[0][0]), flat / flat.norm())
    close(entries(tree.add([n], [n])[0]), 2 * flat)
    close(entries(tree.sub([n], [None])[0]), flat)
    close(entries(tree.scale([n], 0.5)[0]), flat / 2)
    assert tree.allclose([n], [n])
    assert not tree.allclose([n], [None])
    assert gradkit.report.norms([n]).total.norm == pytest.approx(flat.norm().item())
    drawn = tree.randn_like([n], generator=torch.Generator(device).manual_seed(0))[0]
    assert [len(row) for row in drawn.unbind()] == [2, 3]
    with pytest.raises(gradkit.LeafTypeError, match=r"trees: .*nested"):
        tree.stack([[n], [n]])
    with pytest.raises(gradkit.StructureError, match=r"tree\[0\].*nested.*\n.*gradkit\.tree\.add"):
        tree.lerp_([n], [n], 0.5)


def test_gradients_of_a_jagged_leaf(device: torch.device) -> None:
    parts = [torch.ones(2, device=device), torch.full((3,), 2.0, device=device)]
    n = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    def losses() -> list[Tensor]:
        return [(n * n).values().sum(), (n * 3).values().sum()]

    with pytest.raises(gradkit.UnsupportedGraphError, match=r"tree\.gram\(gradkit\.per_loss_grads"):
        gradkit.gram(losses(), [n])
    per_loss, rows = gradkit.per_loss_grads(losses(), [n]), 2 * torch.cat(parts)
    rows = torch.stack([rows, torch.full_like(rows, 3.0)])
    torch.testing.assert_close(gradkit.tree.gram(per_loss), rows @ rows.T)
    matrix, unravel = gradkit.tree.to_matrix(per_loss)
    torch.testing.assert_close(matrix, rows)
    torch.testing.assert_close(unravel(matrix[0])[0].values(), rows[0])
    combined = gradkit.combine(per_loss, lambda matrix: matrix.sum(0))
    torch.testing.assert_close(combined[0].values(), rows.sum(0))
    _, norm = gradkit.minimize_(torch.optim.SGD([n], 1.0), losses()[0], max_norm=1.0)
    torch.testing.assert_close(norm, rows[0].norm())
    expected = torch.cat(parts) - rows[0] / rows[0].norm()
    torch.testing.assert_close(n.values().detach(), expected)


class Times(torch.autograd.Function):
    """Adds to the buffer of an input, where there is one: torch has them since 2.15."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, w), buffer = ctx.saved_tensors, ctx.input_grad_buffers[0]
        if buffer is None:
            return grads[0] * w, grads[0] * x
        buffer.add_(grads[0] * w)
        return None, grads[0] * x


@pytest.mark.skipif(
    not hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers"),
    reason="torch has input_grad_buffers since 2.15",
)
def test_a_function_that_adds_to_the_buffer_of_an_input(device: torch.device) -> None:
    x, w = (torch.full((2,), n, device=device, requires_grad=True) for n in (2.0, 3.0))

    def loss() -> Tensor:
        return Times.apply(x, w).sum() + x.square().sum()

    expected = r"input_grad_buffers.*\n.*capture_grads\(params\) around \.backward"
    for block in (nullcontext(), gradkit.checked()):
        with block, pytest.raises(gradkit.UnsupportedGraphError, match=expected):
            gradkit.value_and_grads(loss(), (x, w))
    with gradkit.capture_grads((x, w)) as captured:  # as advised
        loss().backward()
    right = torch.full_like(x, 7), torch.full_like(w, 2)
    torch.testing.assert_close(captured.grads, right)
