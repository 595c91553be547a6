"""`minimize_` and `step_` are the loop of `zero_grad`, `backward` and `step`, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from random import Random
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

import gradkit
from gradkit.dotgrad import _kernels, _minimize
from tests.helpers import assert_same_bits, unchanged

OPTIONS: dict[Any, dict[str, list[Any]]] = {
    optim.SGD: {
        "momentum": [0.0, 0.9], "dampening": [0.0, 0.1], "weight_decay": [0.0, 0.01],
        "nesterov": [False, True], "fused": [None, True],
    },
    optim.Adam: {"amsgrad": [False, True], "weight_decay": [0.0, 0.01], "fused": [None, True]},
    optim.AdamW: {"amsgrad": [False, True], "betas": [(0.9, 0.99), (0.5, 0.9)]},
    optim.RMSprop: {"momentum": [0.0, 0.9], "centered": [False, True], "weight_decay": [0, 0.1]},
    optim.Adagrad: {"lr_decay": [0.0, 0.1], "weight_decay": [0.0, 0.1]},
    optim.Adamax: {"weight_decay": [0.0, 0.1]},
    optim.Adadelta: {"weight_decay": [0.0, 0.1], "rho": [0.9, 0.5]},
    optim.Rprop: {"etas": [(0.5, 1.2), (0.4, 1.1)]},
    optim.NAdam: {"decoupled_weight_decay": [False, True], "weight_decay": [0.0, 0.1]},
    optim.ASGD: {"weight_decay": [0.0, 0.1]},
    optim.RAdam: {"decoupled_weight_decay": [False, True], "weight_decay": [0.0, 0.1]},
}  # fmt: skip
SHAPES = [(), (1,), (3,), (4, 4), (2, 3, 2), (0,), (17,), (64, 33)]
STEPS = 20


def choose(kind: Any, random: Random) -> dict[str, Any]:
    """Return options of a class, drawn."""
    options = {name: random.choice(values) for name, values in OPTIONS[kind].items()}
    options["maximize"] = random.random() < 0.3
    options["foreach"] = random.choice([None, None, None, False, True])
    if options.get("fused"):
        options["foreach"] = None
    if options.get("nesterov"):
        options |= {"momentum": 0.9, "dampening": 0.0}
    return options | {"lr": random.choice([0.1, 0.01, 1])}


class Task:
    """Parameters, the optimizer of their groups, and a loss for each step."""

    def __init__(self, kind: Any, seed: int, device: torch.device) -> None:
        random = Random(f"{kind.__name__}/{seed}")
        torch.manual_seed(seed)
        dtype = random.choice([torch.float32, torch.float64])
        shapes = [random.choice(SHAPES) for _ in range(random.choice([1, 3, 12, 20]))]
        self.params = [torch.randn(s, dtype=dtype, device=device) for s in shapes]
        self.unused = {i for i in range(1, len(shapes)) if random.random() < 0.1}
        frozen = {i for i in range(1, len(shapes)) if random.random() < 0.1}
        for index, param in enumerate(self.params):
            param.requires_grad_(index not in frozen)
        groups = [{"params": self.params}]
        if len(shapes) > 2 and random.random() < 0.5:
            cut = random.randrange(1, len(shapes))
            groups = [{"params": self.params[:cut]}, {"params": self.params[cut:], "lr": 0.05}]
        self.optimizer = kind(groups, **choose(kind, random))
        self.scheduler: Any = None
        self.handle: Any = None

    def live(self, first: int) -> bool:
        """Return whether one from this index on is trained and used."""
        rest = list(enumerate(self.params))[first:]
        return any(p.requires_grad and i not in self.unused for i, p in rest)

    def loss(self, step: int) -> Tensor:
        """Return a loss that reaches what is used."""
        used = [p for i, p in enumerate(self.params) if i not in self.unused]
        factor = 1 + step / 7
        return torch.stack([(p * factor + 0.1 * i).sin().sum() for i, p in enumerate(used)]).sum()


def add_group(task: Task) -> None:
    new = torch.full((3,), 0.5, device=task.params[0].device, dtype=task.params[0].dtype)
    task.params.append(new.requires_grad_())
    task.optimizer.add_param_group({"params": [task.params[-1]]})


def patch(task: Task) -> None:
    step = task.optimizer.step

    def twice(self: Any, *args: Any) -> None:
        step(*args)
        step(*args)

    task.optimizer.step = MethodType(twice, task.optimizer)


def schedule(task: Task) -> None:
    if task.scheduler is None:
        task.scheduler = optim.lr_scheduler.ExponentialLR(task.optimizer, 0.5)
    else:
        task.scheduler.step()


def hook(task: Task) -> None:
    if task.handle is None:

        def halve(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(0.5)

        task.handle = task.optimizer.register_step_pre_hook(halve)
    else:
        task.handle.remove()
        task.handle = None


def set_rate(task: Task) -> None:
    task.optimizer.param_groups[0]["lr"] *= 0.5


def freeze(task: Task) -> None:
    if task.live(1):
        task.params[0].requires_grad_(not task.params[0].requires_grad)


def use(task: Task) -> None:
    if task.live(2):
        task.unused.symmetric_difference_update({1})


EVENTS: list[Callable[[Task], object]] = [
    lambda task: None, add_group, patch, schedule, hook, set_rate,
    lambda task: task.optimizer.load_state_dict(copy.deepcopy(task.optimizer.state_dict())),
    lambda task: task.optimizer.state.clear(),
    lambda task: task.optimizer.state.pop(task.params[0], None),
    lambda task: task.optimizer.param_groups[0]["params"].reverse(),
    freeze,
    use,
]  # fmt: skip


def loop(task: Task, loss: Tensor) -> None:
    """Step as everybody does."""
    task.optimizer.zero_grad()
    loss.backward()
    task.optimizer.step()


def minimize(task: Task, loss: Tensor) -> None:
    gradkit.minimize_(task.optimizer, loss)


def two_calls(task: Task, loss: Tensor) -> None:
    _, grads = gradkit.value_and_grads(loss, task.optimizer)
    gradkit.step_(task.optimizer, task.optimizer, grads)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")
@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 96), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_weights_and_states_are_those_of_the_loop(
    device: torch.device, kind: Any, seeds: range
) -> None:
    """Also where the optimizer is changed between two steps."""
    for seed in seeds:
        tasks = [(step, Task(kind, seed, device)) for step in (loop, minimize, two_calls)]
        random = Random(seed)
        for number in range(STEPS):
            event = random.choice(EVENTS) if random.random() < 0.4 else EVENTS[0]
            outcomes = [(task, outcome(step, task, number)) for step, task in tasks]
            (expected, failed), *others = outcomes
            for task, error in others:
                assert error is failed
                assert_same_bits(task.params, expected.params)
                assert_same_state(task.optimizer, expected.optimizer)
            if failed is not None:
                break  # without the states that are made once, say, or for fused SGD with some
            for _, task in tasks:
                event(task)


def outcome(step: Callable[[Task, Tensor], object], task: Task, number: int) -> type | None:
    """Return the type of the error that a step raises, None if it raises none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's schedulers, in this order of events
            step(task, task.loss(number))
    except (KeyError, TypeError) as error:
        return type(error)
    return None


def assert_same_state(mine: Any, theirs: Any) -> None:
    """Check that two optimizers are equal, bit for bit."""
    ours, others = mine.state_dict(), theirs.state_dict()
    assert repr(ours["param_groups"]) == repr(others["param_groups"])
    assert ours["state"].keys() == others["state"].keys()
    for key, state in ours["state"].items():
        other = others["state"][key]
        assert state.keys() == other.keys()
        tensors = [name for name, value in state.items() if isinstance(value, Tensor)]
        assert_same_bits([state[name] for name in tensors], [other[name] for name in tensors])
        assert all(state[name] == other[name] for name in state.keys() - set(tensors))


@pytest.mark.parametrize("kind", _kernels.KERNELS, ids=lambda kind: kind.__name__)
def test_the_kernels_take_the_common_step(
    device: torch.device, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second on: the first makes the states; a large one runs in slices."""
    shapes = [(2,), (600, 600), (3, 3)] * 4
    each = [[torch.ones(s, device=device).requires_grad_() for s in shapes] for _ in range(2)]
    mine, theirs = (kind(params, lr=0.1) for params in each)
    stepped = step_watched(monkeypatch)
    for step in range(3):
        gradkit.minimize_(mine, sum(((p + step) ** 2).sum() for p in each[0]))
        theirs.zero_grad()
        sum(((p + step) ** 2).sum() for p in each[1]).backward()
        theirs.step()
    assert stepped[1:] == [True, True]
    assert_same_bits(*each)
    assert_same_state(mine, theirs)


def step_watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the list of whether each step was taken by a kernel."""
    stepped: list[bool] = []

    def watched(*args: Any, **options: Any) -> bool:
        stepped.append(_kernels.step_by_kernels(*args, **options))
        return stepped[-1]

    monkeypatch.setattr(_minimize, "step_by_kernels", watched)
    return stepped


def make(device: torch.device, kind: Any = optim.SGD, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    return model, kind(model.parameters(), **{"lr": 0.1, **options})


def loss_of(model: nn.Module) -> Tensor:
    x = torch.arange(6.0, device=next(model.parameters()).device).reshape(2, 3)
    return model(x).square().mean()


@pytest.mark.parametrize("kind", [optim.SGD, optim.ASGD])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_grad_is_neither_read_nor_written(
    device: torch.device, kind: Any, max_norm: float | None
) -> None:
    model, optimizer = make(device, kind)
    before = [torch.full_like(p, 7.0) for p in model.parameters()]
    for param, grad in zip(model.parameters(), before, strict=True):
        param.grad = grad
    for _ in range(2):
        gradkit.minimize_(optimizer, loss_of(model), max_norm=max_norm)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    assert all((grad == 7).all() for grad in before)


def test_losses_weights_and_values(device: torch.device) -> None:
    (model, optimizer), (other, usual) = make(device), make(device)

    def losses(model: nn.Module) -> dict[str, Tensor]:
        loss = loss_of(model)
        return {"fit": loss, "size": next(model.parameters()).abs().sum()}

    given = losses(model)
    values = gradkit.minimize_(optimizer, given, weights={"fit": 2.0, "size": 0.5})
    assert not any(value.requires_grad for value in values.values())
    assert_same_bits(values.values(), given.values())
    there = losses(other)
    (2.0 * there["fit"] + 0.5 * there["size"]).backward()
    usual.step()
    assert_same_bits(model.parameters(), other.parameters())


def test_weights_may_come_from_the_gramian(device: torch.device) -> None:
    model, optimizer = make(device)
    loss = loss_of(model)
    weighting = lambda gram: gram.diag() / gram.diag().sum()  # noqa: E731
    gradkit.minimize_(optimizer, [loss, 2 * loss], weights=weighting)
    assert loss_of(model) < loss


def test_max_norm_is_that_of_clip_grad_norm_(device: torch.device) -> None:
    (model, optimizer), (other, usual) = make(device, optim.Adam), make(device, optim.Adam)
    for _ in range(3):
        value, norm = gradkit.minimize_(optimizer, loss_of(model), max_norm=0.05)
        usual.zero_grad()
        loss = loss_of(other)
        loss.backward()
        assert_same_bits([norm, value], [clip_grad_norm_(other.parameters(), 0.05), loss.detach()])
        usual.step()
    assert_same_bits(model.parameters(), other.parameters())


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_scaler_scales_unscales_and_skips(
    device: torch.device, max_norm: float | None, factor: float
) -> None:
    (model, optimizer), (other, usual) = make(device), make(device)
    mine, theirs = (torch.amp.GradScaler(device.type, init_scale=64.0) for _ in range(2))
    for step in range(3):
        scaled, options = factor if step == 1 else 1.0, {"scaler": mine, "max_norm": max_norm}
        result: Any = gradkit.minimize_(optimizer, loss_of(model) * scaled, **options)
        mine.update()
        usual.zero_grad()
        loss = loss_of(other) * scaled
        theirs.scale(loss).backward()
        if max_norm is not None:
            theirs.unscale_(usual)
            clip_grad_norm_(other.parameters(), max_norm)
        theirs.step(usual)
        theirs.update()
        assert_same_bits([result if max_norm is None else result[0]], [loss.detach()])
    assert_same_bits(model.parameters(), other.parameters())
    assert mine.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_several_optimizers_step_from_one_pass(
    device: torch.device, max_norm: float | None
) -> None:
    def halves() -> tuple[Any, list[Any]]:
        model: Any = make(device)[0]
        return model, [optim.SGD(model[0].parameters(), lr=0.1), optim.Adam(model[2].parameters())]

    (model, optimizers), (other, usual) = halves(), halves()
    for _ in range(3):
        gradkit.minimize_(optimizers, loss_of(model), max_norm=max_norm)
        other.zero_grad()
        loss_of(other).backward()
        if max_norm is not None:
            clip_grad_norm_(other.parameters(), max_norm)
        for each in usual:
            each.step()
    assert_same_bits(model.parameters(), other.parameters())


def test_a_scheduler_sees_the_step(device: torch.device) -> None:
    model, optimizer = make(device, optim.SGD)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradkit.minimize_(optimizer, loss_of(model))
        scheduler.step()


def test_a_profiler_sees_the_step(device: torch.device) -> None:
    model, optimizer = make(device)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        gradkit.minimize_(optimizer, loss_of(model))
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}


REFUSED: dict[str, tuple[Callable[[nn.Module, Any], Any], type[Exception], str]] = {
    "a constant": (
        lambda model, o: gradkit.minimize_(o, torch.ones(())), gradkit.DetachedLossError, "losses",
    ),
    "a vector": (
        lambda model, o: gradkit.minimize_(o, loss_of(model).expand(2)),
        gradkit.NotScalarLossError, "losses",
    ),
    "arguments in another order": (
        lambda model, o: gradkit.minimize_(loss_of(model), o),
        gradkit.UnsupportedOptimizerError, r"first: gradkit.minimize_\(optimizer, losses\)$",
    ),
    "a module": (
        lambda model, o: gradkit.minimize_(model, loss_of(model)),
        gradkit.UnsupportedOptimizerError, "optimizer: expected a torch.optim.Optimizer",
    ),
    "no optimizer": (
        lambda model, o: gradkit.minimize_([], loss_of(model)), gradkit.StructureError, "optimizer",
    ),
    "LBFGS": (
        lambda model, o: gradkit.minimize_(optim.LBFGS(model.parameters()), loss_of(model)),
        gradkit.UnsupportedOptimizerError, "closure",
    ),
    "a negative norm": (
        lambda model, o: gradkit.minimize_(o, loss_of(model), max_norm=-1.0),
        gradkit.OptionError, "max_norm",
    ),
    "another scaler": (
        lambda model, o: gradkit.minimize_(o, loss_of(model), scaler=2.0),
        gradkit.OptionError, "scaler",
    ),
    "weights of another structure": (
        lambda model, o: gradkit.minimize_(o, loss_of(model), weights=[1.0]),
        gradkit.StructureError, "weights",
    ),
    "a loss of other parameters": (
        lambda model, o: gradkit.minimize_(o, torch.ones((), requires_grad=True) * 2),
        gradkit.UnreachedParamError, "losses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_before_anything_changes(device: torch.device, name: str) -> None:
    call, error, match = REFUSED[name]
    model, optimizer = make(device, momentum=0.9)
    with unchanged(*model.parameters()), pytest.raises(error, match=match):
        call(model, optimizer)
    assert not optimizer.state
    gradkit.minimize_(optimizer, loss_of(model))


def test_a_step_that_raises_leaves_what_it_found(device: torch.device) -> None:
    model, optimizer = make(device)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with unchanged(*model.parameters()), pytest.raises(ZeroDivisionError):
        gradkit.minimize_(optimizer, loss_of(model))
    handle.remove()
    gradkit.minimize_(optimizer, loss_of(model))


def test_a_gradient_that_a_hook_keeps_is_not_written_on(device: torch.device) -> None:
    """SGD with Nesterov's momentum adds to the gradients themselves."""
    params = [torch.ones(3, device=device, requires_grad=True) for _ in range(12)]
    kept: list[Tensor] = []
    params[0].register_hook(kept.append)
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(2):
        gradkit.minimize_(optimizer, sum(3 * p.sum() for p in params))
    assert [grad.tolist() for grad in kept] == [[3.0] * 3] * 2


def test_inference_mode_is_left(device: torch.device) -> None:
    model, optimizer = make(device)
    loss = loss_of(model)
    with torch.inference_mode():
        gradkit.minimize_(optimizer, loss)
    assert loss_of(model) < loss


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad])
def test_sparse_gradients_beside_many_dense_ones(device: torch.device, kind: Any) -> None:
    """The foreach kernels take none."""
    each: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True, device=device)
        each.append([
            table.weight,
            *(torch.ones(3, device=device).requires_grad_() for _ in range(9)),
        ])
    mine, theirs = (kind(params, lr=0.1) for params in each)
    rows = torch.tensor([1, 3, 3], device=device)

    def loss(params: Any) -> Tensor:
        out = nn.functional.embedding(rows, params[0], sparse=True).square().sum()
        return out + torch.stack([(p * i).sin().sum() for i, p in enumerate(params[1:])]).sum()

    for _ in range(3):
        gradkit.minimize_(mine, loss(each[0]))
        theirs.zero_grad()
        loss(each[1]).backward()
        theirs.step()
    assert_same_bits(*each)


def test_parameters_that_share_memory_are_stepped_in_turn(device: torch.device) -> None:
    """The second reads, for the decay of weights, what the first has written."""
    each: list[Any] = []
    for _ in range(2):
        base = torch.ones(3, device=device)
        each.append([base[:].detach().requires_grad_() for _ in range(10)])
    mine, theirs = (optim.SGD(params, lr=0.1, weight_decay=0.5) for params in each)
    for _ in range(2):
        gradkit.minimize_(mine, torch.stack([p.sin().sum() for p in each[0]]).sum())
        theirs.zero_grad()
        torch.stack([p.sin().sum() for p in each[1]]).sum().backward()
        theirs.step()
    assert_same_bits(*each)
