"""Where torch or Python would raise an error of its own, gradkit's says what to do; it is done."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
