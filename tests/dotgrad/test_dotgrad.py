"""The .grad workflow: every call against what plain torch leaves, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradkit
from tests.helpers import assert_same_bits, same_bits, unchanged
from tests.strategies import OPS, WRITING, Program, build, programs

dtypes = st.sampled_from([torch.float64, torch.float32])


def assert_same_grads(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal bits, dtype, layout and strides of every .grad."""
    assert_same_bits([p.grad for p in ours], [p.grad for p in theirs])
    for a, b in zip(ours, theirs, strict=True):
        if a.grad is not None and a.grad.layout == torch.strided:
            assert a.grad.stride() == b.grad.stride()


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes, twice=st.booleans())
def test_adding_value_and_grads_is_backward(
    device: torch.device, program: Program, dtype: torch.dtype, twice: bool
) -> None:
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    for round_ in range(1 + twice):
        torch.autograd.backward(theirs.losses, retain_graph=True)
        assume(any(leaf.grad is not None for leaf in theirs.leaves))
        objects = [leaf.grad for leaf in ours.leaves]
        try:
            _, grads = gradkit.value_and_grads(ours.losses, ours.leaves, retain_graph=True)
        except gradkit.UnsupportedGraphError:  # of what writes on a gradient
            if any(name in WRITING for name, _, _ in program.ops):
                return
            raise
        gradkit.add_grads_(ours.leaves, grads)
        assert_same_grads(ours.leaves, theirs.leaves)
        if round_:
            assert all(a is leaf.grad for a, leaf in zip(objects, ours.leaves, strict=True))


@given(program=programs(), dtype=dtypes)
def test_adding_per_loss_grads_in_order_is_one_backward_a_loss(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    for loss in theirs.losses:
        loss.backward(retain_graph=True)
    assume(any(leaf.grad is not None for leaf in theirs.leaves))
    losses = [loss.reshape(()) for loss in ours.losses]
    for grads in gradkit.per_loss_grads(losses, ours.leaves):
        gradkit.add_grads_(ours.leaves, grads)
    assert_same_bits([leaf.grad for leaf in ours.leaves], [leaf.grad for leaf in theirs.leaves])


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes, some=st.booleans())
def test_backward__is_backward(
    device: torch.device, program: Program, dtype: torch.dtype, some: bool
) -> None:
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    log: list[list[int]] = [[], []]
    for graph, seen in zip((theirs, ours), log, strict=True):
        for index, leaf in enumerate(graph.leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, i=index, s=seen: s.append(i))
    kwargs = {"inputs": theirs.leaves[:1]} if some else {}
    torch.autograd.backward(theirs.losses, **kwargs)
    assume(any(leaf.grad is not None for leaf in theirs.leaves))
    values = gradkit.backward_(ours.losses, ours.leaves[:1] if some else None)
    assert_same_grads(ours.leaves, theirs.leaves)
    assert_same_bits(values, theirs.losses)
    assert log[0] == log[1]


@given(program=programs(), dtype=dtypes, with_grad=st.booleans())
def test_capturing_a_backward_is_value_and_grads(
    device: torch.device, program: Program, dtype: torch.dtype, with_grad: bool
) -> None:
    graph = build(program, device, dtype)
    for leaf in graph.leaves if with_grad else ():
        leaf.grad = torch.ones_like(leaf)
    with unchanged(*graph.leaves), gradkit.capture_grads({"p": graph.leaves}) as captured:
        torch.autograd.backward(graph.losses, retain_graph=True)
    assume(any(grad is not None for grad in captured.grads["p"]))
    _, grads = gradkit.value_and_grads(graph.losses, {"p": graph.leaves})
    assert_same_bits(captured.grads["p"], grads["p"])


# --- models


def embedding(sparse: bool) -> Callable[[torch.device], tuple[nn.Module, Tensor]]:
    def make(device: torch.device) -> tuple[nn.Module, Tensor]:
        return nn.Embedding(7, 3, sparse=sparse).to(device), torch.tensor([1, 1, 4], device=device)

    return make


def of_shape(*shape: int) -> Callable[..., Any]:
    def wrap(make: Callable[[], nn.Module]) -> Callable[[torch.device], tuple[nn.Module, Tensor]]:
        return lambda device: (make().to(device), torch.randn(shape, device=device))

    return wrap


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().long() % 7))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.z).abs()


class Bf16(nn.Module):
    def __init__(self, grad_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.bfloat16)
        for p in self.parameters():
            p.grad_dtype = grad_dtype or torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.bfloat16()).float()


MODELS = {
    "mlp": of_shape(5, 3)(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))),
    "conv": of_shape(2, 3, 6, 6)(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    ),
    "channels_last": of_shape(2, 3, 6, 6)(
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ),
    "transformer": of_shape(2, 3, 8)(lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)),
    "lstm": of_shape(4, 2, 3)(Lstm),
    "embedding": embedding(sparse=False),
    "sparse embedding": embedding(sparse=True),
    "tied": of_shape(5)(TiedModel),
    "complex": of_shape(3)(Complex),
    "bf16": of_shape(4, 3)(lambda: Bf16(None)),
    "bf16, grads in float32": of_shape(4, 3)(lambda: Bf16(torch.float32)),
}


def twins(name: str, device: torch.device) -> list[tuple[nn.Module, Tensor]]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(MODELS[name](device))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_models_round_trip(device: torch.device, name: str) -> None:
    (theirs, x), (ours, _) = twins(name, device)
    ours_p, theirs_p = list(ours.parameters()), list(theirs.parameters())
    for step in range(3):
        theirs(x).square().sum().mul(step + 1).backward()
        loss = ours(x).square().sum().mul(step + 1)
        _, grads = gradkit.value_and_grads(loss, ours)
        gradkit.add_grads_(ours, grads)
        assert_same_grads(ours_p, theirs_p)
    copies = gradkit.read_grads(ours)
    assert_same_bits(copies.values(), [p.grad for p in ours_p])
    gradkit.clear_grads_(ours)
    assert all(p.grad is None for p in ours_p)
    gradkit.write_grads_(ours, copies)
    assert_same_bits([p.grad for p in ours_p], [p.grad for p in theirs_p])


def test_sparse_and_dense_in_every_order(device: torch.device) -> None:
    """sparse + dense becomes another, dense object; dense + sparse stays the same one [B3]."""
    index = torch.tensor([[0, 2, 0]], device=device)

    def sparse() -> Tensor:
        values = torch.ones(3, 2, device=device)
        return torch.sparse_coo_tensor(index, values, (4, 2), check_invariants=True)

    dense = torch.full((4, 2), 5.0, device=device)
    for first, second in ((sparse(), dense), (dense, sparse()), (sparse(), sparse())):
        p, q = (torch.zeros(4, 2, device=device, requires_grad=True) for _ in range(2))
        for grad in (first, second):
            q.backward(grad.clone())
            gradkit.add_grads_([p], [grad])
            assert same_bits(p.grad, q.grad)
            assert p.grad.is_sparse == q.grad.is_sparse
        assert first.to_dense().sum() in (6, 40)  # what was added is as it was


@pytest.mark.parametrize("hooks", [False, True])
def test_gradients_that_are_each_others_grad(device: torch.device, hooks: bool) -> None:
    """They are added as they were at the call, however their memory overlaps."""
    a, b = (torch.zeros(3, device=device, requires_grad=True) for _ in range(2))
    a.grad, b.grad = torch.ones(3, device=device), torch.full((3,), 10.0, device=device)
    gradkit.add_grads_([a, b], [b.grad, a.grad], hooks=hooks)
    assert a.grad.tolist() == b.grad.tolist() == [11, 11, 11]
    flat = torch.arange(4.0, device=device)
    a.grad, b.grad = flat[:3], torch.zeros(3, device=device)
    gradkit.add_grads_([a, b], [torch.ones_like(a), flat[1:]], hooks=hooks)
    assert a.grad.tolist() == b.grad.tolist() == [1, 2, 3]
    a.grad, b.grad = (torch.eye(3, device=device)[0].to_sparse() for _ in range(2))
    gradkit.add_grads_([a, b], [b.grad, a.grad], hooks=hooks)
    assert a.grad.to_dense().tolist() == b.grad.to_dense().tolist() == [2, 0, 0]


# --- optimizers


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}  # fmt: skip


def test_every_optimizer_of_torch_is_tried(device: torch.device) -> None:
    made = {type(make([torch.zeros(1, requires_grad=True)])) for make in OPTIMIZERS.values()}
    elsewhere = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}  # the base; tested by themselves below
    every = {
        cls
        for name in torch.optim.__all__
        if isinstance(cls := getattr(torch.optim, name), type)
        and issubclass(cls, torch.optim.Optimizer)
        and name not in elsewhere
    }
    assert made == every


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    left, right = a.state_dict()["state"], b.state_dict()["state"]
    if left.keys() != right.keys():
        return False
    return all(
        left[k].keys() == right[k].keys()
        and all(
            same_bits(v, right[k][name]) if isinstance(v, Tensor) else v == right[k][name]
            for name, v in left[k].items()
        )
        for k in left
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_the_loop(device: torch.device, name: str) -> None:
    (theirs, x), (ours, _) = twins("mlp", device)
    branch = nn.Linear(2, 2).to(device)  # reached by every third step only
    theirs = nn.ModuleDict({"net": theirs, "branch": branch})
    ours = nn.ModuleDict({"net": ours, "branch": deepcopy(branch)})
    opt_theirs, opt_ours = (OPTIMIZERS[name](m.parameters()) for m in (theirs, ours))
    stale = [torch.ones_like(p) for p in ours.parameters()]
    for p, grad in zip(ours.parameters(), stale, strict=True):
        p.grad = grad  # must neither be used nor changed
    for step in range(10):
        losses = []
        for model in (theirs, ours):
            loss = model["net"](x + step).square().mean()
            if step % 3 == 1:
                loss = loss + model["branch"](x[:, :2]).square().sum()
            losses.append(loss)
        opt_theirs.zero_grad(set_to_none=True)
        losses[0].backward()
        opt_theirs.step()
        _, grads = gradkit.value_and_grads(losses[1], ours)
        before = gradkit.tree.map(torch.clone, grads)
        gradkit.step_(opt_ours, ours, grads)
        assert_same_bits(grads.values(), before.values())
        assert_same_bits(ours.state_dict().values(), theirs.state_dict().values())
    assert same_state(opt_ours, opt_theirs)
    for p, grad in zip(ours.parameters(), stale, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, torch.ones_like(grad))


@pytest.mark.parametrize("name", ["SparseAdam", "Muon"])
def test_optimizers_for_some_tensors_only(device: torch.device, name: str) -> None:
    sparse = name == "SparseAdam"
    (theirs, x), (ours, _) = twins("sparse embedding" if sparse else "mlp", device)
    make = getattr(torch.optim, name, None)
    if make is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    matrices = [[p for p in m.parameters() if p.dim() == 2] for m in (theirs, ours)]
    opt_theirs, opt_ours = (make(p, lr=0.1) for p in matrices)
    for _ in range(4):
        opt_theirs.zero_grad()
        theirs(x).square().sum().backward()
        opt_theirs.step()
        _, grads = gradkit.value_and_grads(ours(x).square().sum(), matrices[1])
        gradkit.step_(opt_ours, matrices[1], grads)
        assert_same_bits(matrices[1], matrices[0])


def parts(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return an optimizer of two groups, and one of the other parameters."""
    first, second, *others = model.parameters()
    groups = [{"params": [first]}, {"params": [second], "lr": 0.5}]
    return [torch.optim.SGD(groups, lr=0.1, momentum=0.9), torch.optim.AdamW(others)]


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_optimizers_stand_for_their_parameters(
    device: torch.device, max_norm: float | None
) -> None:
    (theirs, x), (ours, _) = twins("mlp", device)
    theirs_parts, ours_parts = parts(theirs), parts(ours)
    for step in range(3):
        theirs.zero_grad()
        theirs(x + step).square().mean().backward()
        for optimizer in theirs_parts:
            if max_norm is not None:
                own = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(own, max_norm)
            optimizer.step()
        _, grads = gradkit.value_and_grads(ours(x + step).square().mean(), ours_parts)
        for optimizer, its_grads in zip(ours_parts, grads, strict=True):
            gradkit.step_(optimizer, optimizer, its_grads, max_norm=max_norm)
        assert_same_bits(ours.parameters(), theirs.parameters())
    assert all(map(same_state, ours_parts, theirs_parts))
    assert all(p.grad is None for p in ours.parameters())


def test_the_gradients_of_a_whole_model_are_too_many_for_a_part(device: torch.device) -> None:
    model, x = twins("mlp", device)[0]
    optimizer, other = parts(model)
    _, grads = gradkit.value_and_grads(model(x).sum(), model)
    with (
        unchanged(*model.parameters()),
        pytest.raises(gradkit.StructureError, match=r"step_\(optimizer, optimizer, grads\)"),
    ):
        gradkit.step_(optimizer, model, grads)
    with unchanged(*model.parameters()), pytest.raises(gradkit.StructureError, match="params"):
        gradkit.step_(other, optimizer, list(grads.values())[:2])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_optimizer_of_another_model_is_to_be_made_anew(
    device: torch.device, kind: Any, max_norm: float | None
) -> None:
    model, other = (nn.Linear(3, 1).to(device) for _ in range(2))
    x = torch.randn(4, 3, device=device)
    loss = model(x).square().sum()
    _, grads = gradkit.value_and_grads(loss, model, retain_graph=True)
    for wrong in (kind(other.parameters(), lr=0.1), kind(deepcopy(model).parameters(), lr=1)):
        with (
            unchanged(*model.parameters(), *other.parameters()),
            pytest.raises(gradkit.StructureError, match="make an optimizer of these") as caught,
        ):
            gradkit.step_(wrong, model, grads, max_norm=max_norm)
        # Nor is advised what fails here.
        assert "value_and_grads(losses, optimizer)" not in str(caught.value)
        with pytest.raises(gradkit.UnreachedParamError):
            gradkit.value_and_grads(loss, wrong, retain_graph=True)
    gradkit.step_(kind(model.parameters(), lr=0.1), model, grads, max_norm=max_norm)  # as it says
    # One that has parameters of the model, which the loss does not reach, does not help either.
    both = {"model": model, "other": other}
    _, grads = gradkit.value_and_grads(model(x).square().sum(), both)
    with pytest.raises(gradkit.StructureError, match="make an optimizer of these"):
        gradkit.step_(kind(other.parameters(), lr=0.1), both, grads, max_norm=max_norm)
    gradkit.step_(kind([*model.parameters(), *other.parameters()]), both, grads, max_norm=max_norm)


def test_lbfgs_is_refused_and_runs_through_capture_grads(device: torch.device) -> None:
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    opt_w, opt_v = torch.optim.LBFGS([w], max_iter=5), torch.optim.LBFGS([v], max_iter=5)
    w.grad = torch.full_like(w, 7.0)
    with unchanged(w), pytest.raises(gradkit.UnsupportedOptimizerError, match="capture_grads"):
        gradkit.step_(opt_w, [w], [torch.ones_like(w)])

    def closure(p: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def run() -> Tensor:
            optimizer.zero_grad()
            loss = ((p * p).sum() - 2) ** 2
            loss.backward()
            return loss

        return run

    before = w.grad
    with gradkit.capture_grads([w]) as captured:
        opt_w.step(closure(w, opt_w))
    opt_v.step(closure(v, opt_v))
    assert same_bits(w, v)
    assert w.grad is before
    assert same_bits(captured.grads[0], v.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_clipping_and_a_scheduler(device: torch.device, set_to_none: bool) -> None:
    (theirs, x), (ours, _) = twins("mlp", device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (theirs, ours)]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for o in optimizers]
    for _ in range(5):
        optimizers[0].zero_grad(set_to_none=set_to_none)
        total = None
        for part in (x[:2], x[2:]):
            theirs(part).square().sum().backward()
            _, grads = gradkit.value_and_grads(ours(part).square().sum(), ours)
            total = grads if total is None else gradkit.tree.add(total, grads)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        clipped, _ = gradkit.tree.clip_by_global_norm(total, 0.1)
        assert_same_bits(clipped.values(), [p.grad for p in theirs.parameters()])
        optimizers[0].step()
        gradkit.step_(optimizers[1], ours, clipped)
        for scheduler in schedulers:
            scheduler.step()
        assert_same_bits(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("scaler", ["none", "disabled", "enabled"])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
def test_max_norm_is_clip_grad_norm_(device: torch.device, scaler: str, max_norm: float) -> None:
    """The line before `optimizer.step()`, with what it returns; a scaler unscales before it."""
    scaled = scaler == "enabled"
    (theirs, x), (ours, _) = twins("mlp", device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (theirs, ours)]
    scalers = [torch.amp.GradScaler(device.type, init_scale=8.0, enabled=scaled) for _ in range(2)]
    for step in range(5):
        scale = float("inf") if scaled and step == 2 else 1.0
        optimizers[0].zero_grad()
        scalers[0].scale(theirs(x).square().sum() * scale).backward()
        scalers[0].unscale_(optimizers[0])
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        scalers[0].step(optimizers[0])
        scalers[0].update()
        loss = scalers[1].scale(ours(x).square().sum() * scale)
        _, grads = gradkit.value_and_grads(loss, ours)
        before = gradkit.tree.map(torch.clone, grads)
        options: Any = {} if scaler == "none" else {"scaler": scalers[1]}
        if step == 3:  # unscaled by the caller in this step
            gradkit.write_grads_(ours, grads)
            scalers[1].unscale_(optimizers[1])
            grads, before = gradkit.read_grads(ours), gradkit.read_grads(ours)
            gradkit.clear_grads_(ours)
        our_norm = gradkit.step_(optimizers[1], ours, grads, max_norm=max_norm, **options)
        scalers[1].update()
        assert same_bits(our_norm, norm)
        assert_same_bits(grads.values(), before.values())
        assert_same_bits(ours.parameters(), theirs.parameters())
        assert all(p.grad is None for p in ours.parameters())
    assert gradkit.step_(optimizers[1], ours, grads) is None


def test_max_norm_is_checked_before_anything_changes(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for wrong in (-1.0, True, "1", float("nan"), torch.ones(2)):
        with pytest.raises(gradkit.OptionError, match=r"max_norm: .*\n.*max_norm=1.0"):
            gradkit.step_(optimizer, [w], [torch.ones_like(w)], max_norm=wrong)
    assert (w == 1).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_tied_weight_that_overflows_is_skipped_as_in_the_loop(
    device: torch.device, bad: float
) -> None:
    """A NaN differs from itself: the two places of the weight would not have one gradient."""
    first, second = nn.Linear(3, 3).to(device), nn.Linear(3, 3).to(device)
    second.weight = first.weight
    model = {"first": first, "second": second}
    optimizer = torch.optim.SGD([*first.parameters(), second.bias], lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    x = torch.randn(2, 3, device=device)
    for scale, after in ((1.0, 8.0), (bad, 4.0)):
        before = first.weight.detach().clone()
        loss = (second(first(x)) * scale).square().sum()
        _, grads = gradkit.value_and_grads(scaler.scale(loss), model)
        gradkit.step_(optimizer, model, grads, scaler=scaler)
        scaler.update()
        assert scaler.get_scale() == after
        assert torch.equal(first.weight, before) == (scale == bad or scale != scale)
    grads["second"]["weight"] = torch.zeros(3, 3, device=device)
    with pytest.raises(
        gradkit.StructureError, match=r"grads\['second'\]\['weight'\].*another place"
    ):
        gradkit.write_grads_(model, grads)


def test_a_grad_scaler_with_an_overflow(device: torch.device) -> None:
    (theirs, x), (ours, _) = twins("mlp", device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (theirs, ours)]
    scalers = [
        torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=2) for _ in range(2)
    ]
    for step in range(7):
        scale = float("inf") if step == 3 else 1.0
        optimizers[0].zero_grad()
        scalers[0].scale(theirs(x).square().sum() * scale).backward()
        scalers[0].step(optimizers[0])
        scalers[0].update()
        loss = scalers[1].scale(ours(x).square().sum() * scale)
        _, grads = gradkit.value_and_grads(loss, ours)
        before = gradkit.tree.map(torch.clone, grads)
        gradkit.step_(optimizers[1], ours, grads, scaler=scalers[1])
        assert_same_bits(grads.values(), before.values())
        scalers[1].update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_bits(ours.parameters(), theirs.parameters())
    assert scalers[0].get_scale() != 8.0
    with pytest.raises(gradkit.StructureError, match="unscale"):
        gradkit.step_(optimizers[1], ours, dict.fromkeys(grads), scaler=scalers[1])


def test_autocast_in_bf16(device: torch.device) -> None:
    (theirs, x), (ours, _) = twins("mlp", device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (theirs, ours)]
    for _ in range(4):
        losses = []
        for model in (theirs, ours):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                losses.append(model(x).float().square().mean())
        optimizers[0].zero_grad()
        losses[0].backward()
        optimizers[0].step()
        gradkit.step_(optimizers[1], ours, gradkit.value_and_grads(losses[1], ours)[1])
        assert_same_bits(ours.parameters(), theirs.parameters())


# --- hooks: the table in docs/moving_a_loop.md


def logged(device: torch.device) -> tuple[Tensor, nn.Module, list[str], Tensor]:
    log: list[str] = []
    w = torch.ones(2, device=device, requires_grad=True)
    layer = nn.Identity().to(device)
    layer.register_full_backward_pre_hook(lambda m, g: log.append("module pre"))
    layer.register_full_backward_hook(lambda m, gi, go: log.append("module"))
    w.register_hook(lambda grad: log.append("tensor"))
    w.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
    return w, layer, log, layer(w * 2).sum()


def _captured(loss: Tensor, w: Tensor) -> None:
    with gradkit.capture_grads(w):
        loss.backward()


HOOKS: dict[str, tuple[Callable[[Tensor, Tensor], Any], set[str]]] = {
    "loss.backward()": (
        lambda loss, w: loss.backward(),
        {"module pre", "module", "tensor", "accumulated"},
    ),
    "backward_": (
        lambda loss, w: gradkit.backward_(loss),
        {"module pre", "module", "tensor", "accumulated"},
    ),
    "value_and_grads": (
        lambda loss, w: gradkit.value_and_grads(loss, w),
        {"module pre", "module", "tensor"},
    ),
    "per_loss_grads": (
        lambda loss, w: gradkit.per_loss_grads(loss, w),
        {"module pre", "module", "tensor"},
    ),
    "simultaneous_grads": (
        lambda loss, w: gradkit.simultaneous_grads(loss, w),
        {"module pre", "module", "tensor"},
    ),
    "capture_grads": (
        lambda loss, w: _captured(loss, w),
        {"module pre", "module", "tensor", "accumulated"},
    ),
    "write_grads_": (lambda loss, w: gradkit.write_grads_(w, torch.ones_like(w)), set()),
    "add_grads_": (lambda loss, w: gradkit.add_grads_(w, torch.ones_like(w)), set()),
    "step_": (
        lambda loss, w: gradkit.step_(torch.optim.SGD([w]), [w], [torch.ones_like(w)]),
        set(),
    ),
}


@pytest.mark.parametrize("call", HOOKS)
def test_which_hooks_fire(device: torch.device, call: str) -> None:
    w, _, log, loss = logged(device)
    run, expected = HOOKS[call]
    run(loss, w)
    assert sorted(log) == sorted(expected)


def test_hooks_run_once_for_each_loss(device: torch.device) -> None:
    w, _, log, loss = logged(device)
    gradkit.per_loss_grads([loss, loss * 2], w)
    assert sorted(log) == sorted(["module pre", "module", "tensor"] * 2)


def test_only_what_accumulates_steps_an_optimizer_in_the_backward(device: torch.device) -> None:
    steps: list[str] = []
    for call, (run, expected) in HOOKS.items():
        w = torch.ones(2, device=device, requires_grad=True)
        w.register_post_accumulate_grad_hook(lambda p, call=call: steps.append(call))
        run((w * 2).sum(), w)
        assert (call in steps) == ("accumulated" in expected)
    w = torch.ones(2, device=device, requires_grad=True)
    w.register_post_accumulate_grad_hook(lambda p: steps.append("hooks=True"))
    gradkit.add_grads_(w, torch.ones_like(w), hooks=True)
    assert steps[-1] == "hooks=True"


def test_the_optimizer_s_own_hooks_run_in_step_(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    log: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: log.append("pre"))
    optimizer.register_step_post_hook(lambda *_: log.append("post"))
    gradkit.step_(optimizer, [w], [torch.ones_like(w)])
    assert log == ["pre", "post"]


def test_hooks_true_fires_accumulation_hooks_once_and_refuses_tensor_hooks(
    device: torch.device,
) -> None:
    log: list[str] = []
    w = torch.ones(2, device=device, requires_grad=True)
    w.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
    grad = torch.full((2,), 3.0, device=device)
    gradkit.add_grads_([w, w, None], [grad, grad, None], hooks=True)
    assert log == ["accumulated"]
    assert same_bits(w.grad, grad)
    assert w.grad is not grad
    handle = w.register_hook(lambda grad: grad * 10)
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="tensor hooks"):
        gradkit.add_grads_([w], [grad], hooks=True)
    handle.remove()
    gradkit.add_grads_([w], [grad], hooks=True)
    assert w.grad.tolist() == [6, 6]


def test_an_optimizer_in_the_backward(device: torch.device) -> None:
    (theirs, x), (ours, _) = twins("mlp", device)
    for model in (theirs, ours):
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
    theirs(x).square().sum().backward()
    _, grads = gradkit.value_and_grads(ours(x).square().sum(), ours)
    gradkit.add_grads_(ours, grads, hooks=True)
    assert_same_bits(ours.parameters(), theirs.parameters())
    assert all(p.grad is None for p in ours.parameters())


# --- capture_grads


def test_capture_nests_and_restores(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    w.grad = torch.full_like(w, 9.0)
    with unchanged(w), gradkit.capture_grads({"w": w, "again": w, "n": None}) as outer:
        (w * 1).sum().backward()
        with gradkit.capture_grads([w]) as inner:
            (w * 2).sum().backward()
            (w * 3).sum().backward()
        (w * 4).sum().backward()
    assert inner.grads[0].tolist() == [5, 5]
    assert outer.grads["w"].tolist() == [5, 5]
    assert outer.grads["again"].tolist() == [5, 5]
    assert outer.grads["n"] is None
    outer.grads["w"].zero_()
    assert outer.grads["again"].tolist() == [5, 5]


@pytest.mark.parametrize("how", ["zero_grad", "zero", "replace", "delete"])
def test_capture_handles_code_that_clears_or_replaces(device: torch.device, how: str) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    before = torch.full_like(w, 9.0)
    w.grad = before
    optimizer = torch.optim.SGD([w], lr=0.1)
    mine = torch.full_like(w, 7.0)
    with gradkit.capture_grads([w]) as captured:
        (w * 5).sum().backward()
        if how == "zero_grad":
            optimizer.zero_grad()
        elif how == "zero":
            optimizer.zero_grad(set_to_none=False)
        elif how == "replace":
            w.grad = mine
        else:
            del w.grad
        (w * 2).sum().backward()
    assert captured.grads[0].tolist() == ([9, 9] if how == "replace" else [2, 2])
    captured.grads[0].zero_()
    assert mine.tolist() == ([9, 9] if how == "replace" else [7, 7])
    assert w.grad is before
    assert before.tolist() == [9, 9]


def test_capture_restores_what_the_block_has_cast(device: torch.device) -> None:
    """`.grad` has the dtype of its leaf, as if it had been there when the module was cast."""
    model = torch.nn.Linear(2, 2, device=device)
    model(torch.ones(1, 2, device=device)).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with gradkit.capture_grads(model):
        model.double()
        model.bias.data = torch.zeros(3, device=device)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float64
    assert torch.equal(model.weight.grad.float(), before[0])
    assert model.bias.grad is None  # of another shape


def test_capture_restores_on_exceptions(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    w.grad = torch.full_like(w, 9.0)

    def fail() -> None:
        (w * 5).sum().backward()
        raise KeyError("mine")

    with unchanged(w), pytest.raises(KeyError), gradkit.capture_grads([w]) as captured:
        fail()
    assert captured.grads is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_capture_leaks_nothing(device: torch.device) -> None:
    """.backward(create_graph=True) leaves a cycle that gc cannot collect [E5], but not here."""
    w = torch.ones(2, device=device, requires_grad=True)
    w.grad = torch.full_like(w, 9.0)
    old = weakref.ref(w.grad)
    with gradkit.capture_grads([w]) as captured:
        loss = (w * w * w).sum()
        loss.backward(create_graph=True)
    second = torch.autograd.grad(captured.grads[0].sum(), w, retain_graph=True)
    assert second[0].tolist() == [6, 6]
    refs = [weakref.ref(w), weakref.ref(loss), weakref.ref(captured.grads[0])]
    del loss, captured, second
    w.grad = None
    assert old() is None
    del w
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


# --- aliasing


def test_nothing_is_shared_in_either_direction(device: torch.device) -> None:
    """Written back unprotected, a later backward, unscale or clip would change the result [A4]."""
    a, b = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    params = {"a": a, "b": b}
    _, grads = gradkit.value_and_grads((a + b).sum(), params)
    for put in (gradkit.write_grads_, gradkit.add_grads_):
        gradkit.clear_grads_(params)
        put(params, grads)
        before = gradkit.tree.map(torch.clone, grads)
        (a * b).sum().backward()
        nn.utils.clip_grad_norm_([a, b], 0.01)
        torch.optim.SGD([a, b]).zero_grad(set_to_none=False)
        assert_same_bits(grads.values(), before.values())
        a.grad = torch.full_like(a, 5.0)
        grads["a"].zero_()
        assert a.grad.tolist() == [5, 5, 5]
        grads["a"].fill_(1)
    read = gradkit.read_grads(params)
    read["a"].zero_()
    assert a.grad.tolist() == [5, 5, 5]


def test_a_graph_is_left_behind(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    _, grad = gradkit.value_and_grads((w**3).sum(), w, create_graph=True)
    for put in (gradkit.write_grads_, gradkit.add_grads_, gradkit.add_grads_):
        put(w, grad)
        assert not w.grad.requires_grad


def test_a_tied_tensor_counts_once(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    params = {"in": w, "out": [w]}
    _, grads = gradkit.value_and_grads((3 * w).sum(), params)
    gradkit.add_grads_(params, grads)
    assert w.grad.tolist() == [3, 3]
    grads["out"][0].mul_(2)
    with unchanged(w), pytest.raises(gradkit.StructureError, match=r"grads\['out'\]\[0\].*another"):
        gradkit.add_grads_(params, grads)


# --- refusals


GOOD = {"first": (2, 3), "last": (3,)}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda d: torch.ones(1, 3, device=d), gradkit.StructureError),
        (lambda d: torch.ones(3, device=d, dtype=torch.float64), gradkit.StructureError),
        (lambda d: torch.ones(3, device="meta"), gradkit.StructureError),
        (lambda d: torch.ones(3).to_mkldnn(), gradkit.StructureError),
        (lambda d: 1.0, gradkit.LeafTypeError),
        (lambda d: [torch.ones(3, device=d)], gradkit.LeafTypeError),
    ],
)
def test_the_last_leaf_of_many_may_be_the_bad_one(
    device: torch.device, bad: Callable[[torch.device], Any], error: type[Exception]
) -> None:
    params = {k: torch.zeros(s, device=device, requires_grad=True) for k, s in GOOD.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    wrong = bad(device)
    grads = {"first": torch.ones(2, 3, device=device), "last": wrong}
    for grad in (None, torch.full((2, 3), 4.0, device=device)):
        params["first"].grad = grad
        for call in (
            lambda: gradkit.write_grads_(params, grads),
            lambda: gradkit.add_grads_(params, grads),
            lambda: gradkit.add_grads_(params, grads, hooks=True),
            lambda: gradkit.step_(optimizer, params, grads),
        ):
            with unchanged(*params.values()), pytest.raises(error, match=r"grads\['last'\]"):
                call()


def test_trees_that_do_not_match(device: torch.device) -> None:
    params = {k: torch.zeros(s, device=device, requires_grad=True) for k, s in GOOD.items()}
    first = torch.ones(2, 3, device=device)
    for grads in ({"first": first}, {"first": first, "lost": first}, [first, first], first):
        with unchanged(*params.values()), pytest.raises(gradkit.StructureError, match="grads"):
            gradkit.write_grads_(params, grads)


def test_what_has_no_grad_is_refused(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    inner = w * 2
    frozen = torch.ones(2, device=device)
    one = torch.ones(2, device=device)
    for call in (
        lambda: gradkit.read_grads({"h": inner}),
        lambda: gradkit.write_grads_({"h": inner}, {"h": one}),
        lambda: gradkit.clear_grads_({"h": inner}),
        lambda: gradkit.capture_grads({"h": inner}).__enter__(),
    ):
        with pytest.raises(gradkit.LeafTypeError, match=r"params\['h'\].*leaf"):
            call()
    for params, root in (([frozen], "frozen"), ([None], "None")):
        with unchanged(frozen), pytest.raises(gradkit.StructureError, match=root):
            gradkit.write_grads_(params, [one])
        gradkit.write_grads_(params, [None])
    with pytest.raises(gradkit.StructureError, match="does not have"):
        gradkit.step_(
            torch.optim.SGD([w]), [torch.ones(2, device=device, requires_grad=True)], [one]
        )


def test_read_grads_unused(device: torch.device) -> None:
    w = torch.ones(3, 2, device=device).t().requires_grad_()
    frozen = torch.ones(2, device=device)
    params = {"w": w, "frozen": frozen, "none": None}
    assert gradkit.read_grads(params) == {"w": None, "frozen": None, "none": None}
    zeros = gradkit.read_grads(params, unused="zeros")
    assert torch.equal(zeros["w"], torch.zeros_like(w))
    assert zeros["frozen"] is None
    with pytest.raises(gradkit.UnreachedParamError, match=r"params\['w'\]"):
        gradkit.read_grads(params, unused="error")
    with pytest.raises(gradkit.OptionError, match="unused"):
        gradkit.read_grads(params, unused="some")


def test_backward__refuses_before_anything_has_changed(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    w, v = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    old, new = (w * w).exp().sum(), (w * w).exp().sum()
    old.backward()
    w.grad = torch.ones_like(w)
    hidden = checkpoint(lambda x: x * w, v, use_reentrant=True).sum()
    for losses, params, error in (
        ({"old": old, "new": new}, None, gradkit.FreedGraphError),
        ({"old": old, "new": new}, [w], gradkit.FreedGraphError),
        ({"new": new}, [v], gradkit.UnreachedParamError),
        ({"hidden": hidden}, [w], gradkit.UnsupportedGraphError),
        ({"new": new * w}, None, gradkit.NotScalarLossError),
        ({"new": new.detach()}, None, gradkit.DetachedLossError),
    ):
        with unchanged(w, v), pytest.raises(error):
            gradkit.backward_(losses, params)
    gradkit.backward_(hidden)  # all leaves: a reentrant checkpoint works as it does in torch
    assert w.grad.tolist() == [2, 2]
    gradkit.backward_(new)


def test_backward__takes_weights_and_returns_values(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    losses = {"b": w.sum(), "a": (w * w).sum()}
    values = gradkit.backward_(losses, weights={"a": 10.0, "b": 1.0}, retain_graph=True)
    assert values == {"b": 2, "a": 2}
    assert w.grad.tolist() == [21, 21]
    gradkit.backward_(losses, [w])
    assert w.grad.tolist() == [24, 24]


def test_dotgrad_under_inference_mode_makes_no_inference_grads(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    loss = (w * w).sum()
    one = torch.ones_like(w)
    for call in (
        lambda: gradkit.backward_(loss, retain_graph=True),
        lambda: gradkit.write_grads_(w, 2 * one),
        lambda: gradkit.add_grads_(w, 2 * one),
        lambda: gradkit.add_grads_(w, 2 * one, hooks=True),
    ):
        gradkit.clear_grads_(w)
        with torch.inference_mode():
            call()
            assert not gradkit.read_grads(w).is_inference()
        loss.backward(retain_graph=True)
        assert w.grad.tolist() == [4, 4]


class OwnSGD(torch.optim.SGD):
    """An optimizer that gradkit does not know, and gives copies."""


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
@pytest.mark.parametrize("cls", [torch.optim.SGD, OwnSGD])
def test_a_step_leaves_grad_of_what_the_optimizer_does_not_have(
    device: torch.device, cls: Any, options: Any
) -> None:
    own, other = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    frozen = torch.ones(2, device=device)
    total = torch.full((2,), 5.0, device=device)
    other.grad, frozen.grad = total, total.clone()
    _, grads = gradkit.value_and_grads(own.sum(), [own, other, frozen])
    gradkit.step_(cls([own], lr=0.1), [own, other, frozen], grads, **options)
    assert other.grad is total
    assert frozen.grad is not None
    assert frozen.grad.tolist() == [5, 5]


STEPS: dict[str, Any] = {
    # Not SGD, whose kernel needs no `.grad`.
    "step_": lambda w, v: gradkit.step_(torch.optim.ASGD([w, v], lr=0.1), [w, v], [w * 0, v * 0]),
    "step_, clipped": lambda w, v: gradkit.step_(
        torch.optim.SGD([w, v], lr=0.1), [w, v], [w * 0, v * 0], max_norm=1.0
    ),
    "capture_grads": lambda w, v: captured([w, v], lambda: (w.sum() + v.sum()).backward()),
}


def captured(params: Any, run: Callable[[], Any]) -> None:
    with gradkit.capture_grads(params):
        run()


@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_an_expanded_grad_is_put_back(device: torch.device, call: Any) -> None:
    """Such as `torch.autograd.grad` returns; what comes after it is put back, too."""
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    w.grad, v.grad = torch.autograd.grad(w.sum(), w)[0], torch.full((3,), 7.0, device=device)
    before = w.grad, v.grad
    call(w, v)
    assert (w.grad, v.grad) == before
    assert (w.grad.stride(), w.grad.tolist(), v.grad.tolist()) == ((0,), [1] * 3, [7] * 3)


@pytest.mark.parametrize("new", [(5,), (3,)], ids=["shape", "dtype"])
@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_a_grad_that_does_not_fit_any_more_is_refused(
    device: torch.device, call: Any, new: tuple[int, ...]
) -> None:
    """An assignment to `.data` leaves it there; no assignment could put it back."""
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    w.grad = torch.full((3,), 7.0, device=device)
    w.data = torch.ones(new, device=device, dtype=torch.float64 if new == (3,) else None)
    stale = w.grad
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"put back.*\n.*leaf.grad = None"):
        call(w, v)
    assert w.grad is stale
    assert v.grad is None
    assert (w == 1).all()


def test_nothing_is_added_to_frozen_parameters(device: torch.device) -> None:
    """Nor where no parameter that is trained has a `.grad` yet."""
    w, v, frozen = (torch.ones(2, device=device, requires_grad=True) for _ in range(3))
    frozen.requires_grad_(False)
    frozen.grad = former = torch.full((2,), 7.0, device=device)
    for grads in ([torch.ones(2, device=device), None, None], [None] * 3):
        gradkit.add_grads_([w, v, frozen], grads)
        assert frozen.grad is former
        assert former.tolist() == [7, 7]
        assert v.grad is None
        assert w.grad is not None
        assert w.grad.tolist() == [1, 1]


@pytest.mark.parametrize("tree", [list, lambda x: dict(zip("abc", x, strict=False))])
def test_a_tied_tensor_with_a_gradient_in_one_place_alone(device: torch.device, tree: Any) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    grads = tree([torch.ones(2, device=device), None])
    optimizer = torch.optim.SGD([w], lr=1.0)
    calls: list[Callable[[], Any]] = [
        lambda: gradkit.step_(optimizer, tree([w, w]), grads),
        lambda: gradkit.step_(optimizer, tree([w, w]), grads, max_norm=9.0),
        lambda: gradkit.add_grads_(tree([w, w]), grads),
        lambda: gradkit.write_grads_(tree([w, w]), grads),
    ]
    for call in calls:
        with pytest.raises(gradkit.StructureError, match="in another place"):
            call()
        assert w.tolist() == [1, 1]
        assert w.grad is None


@pytest.mark.parametrize("max_norm", [None, 9.0])
def test_a_step_stays_where_a_grad_is_part_of_a_parameter(
    device: torch.device, max_norm: float | None
) -> None:
    w, v = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    w.grad, v.grad = w.detach()[:], w.detach()[:]
    before = w.grad, v.grad
    grads = [torch.ones(2, device=device) for _ in range(2)]
    gradkit.step_(torch.optim.SGD([w, v], lr=0.5), [w, v], grads, max_norm=max_norm)
    assert (w.tolist(), v.tolist()) == ([0.5, 0.5], [0.5, 0.5])
    assert (w.grad, v.grad) == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("max_norm", [None, 9.0])
def test_the_grad_of_a_strided_nested_parameter_is_refused_first(
    device: torch.device, max_norm: float | None
) -> None:
    """The engine has set it, and no assignment could put it back."""
    parts = [torch.ones(n, device=device) for n in (2, 3)]
    nested = torch.nested.nested_tensor(parts).requires_grad_()
    w = torch.ones(2, device=device, requires_grad=True)
    torch.nested.to_padded_tensor(nested * 2, 0.0).sum().backward()
    w.grad = torch.full((2,), 7.0, device=device)
    before = nested.grad, w.grad
    optimizer = torch.optim.ASGD([nested, w], lr=0.5)
    grads = [None, torch.ones(2, device=device)]
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"put back(?s:.*)leaf.grad = None"):
        gradkit.step_(optimizer, [nested, w], grads, max_norm=max_norm)
    assert w.tolist() == [1, 1]
    assert nested.grad is before[0]
    assert w.grad is before[1]


@pytest.mark.parametrize("hooks", [False, True])
def test_nothing_is_added_to_an_expanded_grad(device: torch.device, hooks: bool) -> None:
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    w.grad, v.grad = torch.autograd.grad(w.sum(), w)[0], torch.zeros(3, device=device)
    one = torch.ones(3, device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"leaf.grad = leaf.grad.clone\(\)"):
        gradkit.add_grads_([v, w], [one, one], hooks=hooks)
    assert v.grad.tolist() == [0, 0, 0]
    w.grad = w.grad.clone()
    gradkit.add_grads_([v, w], [one, one], hooks=hooks)
    assert (v.grad.tolist(), w.grad.tolist()) == ([1, 1, 1], [2, 2, 2])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_strided_nested_parameters_are_refused(device: torch.device) -> None:
    """They have no shape, and torch lets nobody set their `.grad`."""

    def nested(*sizes: int) -> Tensor:
        return torch.nested.nested_tensor([torch.ones(n, device=device) for n in sizes])

    w = nested(2, 3).requires_grad_()
    loss = 3 * torch.stack([part.sum() for part in w.unbind()]).sum()
    _, grads = gradkit.value_and_grads(loss, [w])
    optimizer = torch.optim.SGD([w], lr=0.5, foreach=False)
    calls: list[Callable[[Any], Any]] = [
        lambda grads: gradkit.step_(optimizer, [w], grads),
        lambda grads: gradkit.write_grads_([w], grads),
        lambda grads: gradkit.add_grads_([w], grads),
    ]
    for call in calls:
        for one in (grads, [torch.ones(2, 3, device=device)]):
            with pytest.raises(gradkit.StructureError, match=r"grads\[0\].*\n.*torch.jagged"):
                call(one)
    assert w.grad is None
    assert [part.tolist() for part in w.detach().unbind()] == [[1] * 2, [1] * 3]
