"""Stateful modules over tasks: the loop that starts each task from a copy of the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

from gradkit import func, meta
from tests.helpers import unchanged

D = torch.float64
TASKS, SAMPLES, LENGTH, WIDTH, RATE = 3, 4, 5, 4, 0.3


class First(nn.Module):
    """The last step of what a recurrent or attention layer returns first."""

    def __init__(self, layer: nn.Module, times: int = 1, **options: Any) -> None:
        super().__init__()
        self.layer, self.times, self.options = layer, times, options

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(*[x] * self.times, **self.options)[0]
        return out[:, -1]


class Cell(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Ema(nn.Module):
    """Buffers written on in all ways: in place, by `out=`, item, `.data`, and by assignment."""

    assigned: Tensor
    steps: Tensor
    mean: Tensor
    scale: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        for name in ("mean", "scale", "last", "assigned"):
            self.register_buffer(name, torch.ones(WIDTH))
        self.register_buffer("steps", torch.tensor(0))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean((0, 1))
        with torch.no_grad():
            torch.mul(self.mean, 0.9, out=self.mean)
        self.mean.add_(rows * self.weight)  # with a gradient
        self.scale.data.mul_(rows.detach().abs())
        self.last[1] = rows[0].detach()
        self.assigned = self.assigned * rows.detach()
        self.steps += 1
        self.count += 1
        state = self.mean + self.scale + self.last + self.assigned
        return x[:, -1] * self.weight * state / float(self.steps) * self.count


class Twice(nn.Module):
    """A batch norm that is used twice, and reads its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(LENGTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(self.norm(x).sin()))
        assert self.norm.running_mean is not None
        return out[:, -1] * self.norm.running_mean.sum()


def norm(kind: type[nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv1d(LENGTH, 3, 3, padding=1),
        kind(3, *args, **options),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(3 * WIDTH, WIDTH),
    )


def recurrent(
    kind: type[nn.Module], hidden: int = WIDTH, **options: Any
) -> Callable[[], nn.Module]:
    return lambda: First(kind(WIDTH, hidden, batch_first=True, **options))


def attention(**options: Any) -> Callable[[], nn.Module]:
    layer = lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)  # noqa: E731
    return lambda: First(layer(), times=3, **options)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(LENGTH * WIDTH, WIDTH))


def spectral(steps: int = 1) -> nn.Module:
    layer = parametrizations.spectral_norm(
        nn.Linear(LENGTH * WIDTH, WIDTH), n_power_iterations=steps
    )
    return nn.Sequential(nn.Flatten(), layer)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": norm(nn.BatchNorm1d),
    "its cumulative average": norm(nn.BatchNorm1d, momentum=None),
    "without a weight": norm(nn.BatchNorm1d, affine=False),
    "without statistics": norm(nn.BatchNorm1d, track_running_stats=False),
    "in eval mode": lambda: norm(nn.BatchNorm1d)().eval(),
    "instance norm": norm(nn.InstanceNorm1d, affine=True, track_running_stats=True),
    "a synchronized norm": norm(nn.SyncBatchNorm),  # of one process
    "spectral norm": spectral,
    "two power iterations": lambda: spectral(2),
    "one norm twice": Twice,
    "buffers": Ema,
    "RNN": recurrent(nn.RNN, nonlinearity="relu"),
    "GRU": recurrent(nn.GRU, num_layers=2, bidirectional=True, hidden=2),
    "LSTM": recurrent(nn.LSTM),
    "LSTM with a projection": recurrent(nn.LSTM, proj_size=WIDTH, hidden=6),
    "RNNCell": lambda: Cell(nn.RNNCell),
    "GRUCell": lambda: Cell(nn.GRUCell),
    "LSTMCell": lambda: Cell(nn.LSTMCell),
    "attention": attention(),
    "fused attention": attention(need_weights=False),
    "an encoder": encoder,
    "an encoder in eval mode": lambda: encoder().eval(),
}
every_module = pytest.mark.parametrize("name", MODULES)


def make(name: str, device: torch.device) -> tuple[nn.Module, dict[str, Tensor], Any]:
    module = MODULES[name]().to(device, D)
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    x = torch.randn(TASKS, SAMPLES, LENGTH, WIDTH, dtype=D, device=device)
    return module, params, (x, torch.randint(WIDTH, (TASKS, SAMPLES), device=device))


def forwards(module: nn.Module) -> dict[str, Callable[[Any, Tensor], Tensor]]:
    call, _, buffers = func.make_functional(module)
    return {
        "functional_call": lambda params, x: functional_call(module, params, (x,)),
        "make_functional": lambda params, x: call(params, buffers, x)[0],
    }


def maml(forward: Callable[[Any, Tensor], Tensor], memory: Any = "store") -> Callable[..., Tensor]:
    def inner(params: Any, _: Any, task: Any) -> Tensor:
        return functional.cross_entropy(forward(params, task[0]), task[1])

    def meta_loss(params: Any, task: Any) -> Tensor:
        adapted = meta.unroll(inner, params, [task], meta.sgd(lr=RATE), memory=memory)
        return inner(adapted.params, (), task)

    return meta_loss


def by_hand(module: nn.Module, params: dict[str, Tensor], tasks: Any, *, fresh: bool) -> Any:
    """MAML in plain torch; with `fresh`, every forward pass starts from the module's buffers.

    And from the attributes that the pass before has left: these carry from call to call.
    """
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    value = torch.zeros((), dtype=D, device=tasks[0].device)
    for x, y in zip(*tasks, strict=True):
        one = copy.deepcopy(module)
        loss = functional.cross_entropy(functional_call(one, leaves, (x,)), y)
        slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        moved = {n: p - RATE * g for (n, p), g in zip(leaves.items(), slopes, strict=True)}
        if fresh:
            left, one = vars(one), copy.deepcopy(module)
            vars(one).update({name: left[name] for name in ("count",) if name in left})
        value = value + functional.cross_entropy(functional_call(one, moved, (x,)), y) / TASKS
    grads = torch.autograd.grad(value, list(leaves.values()))
    return value.detach(), dict(zip(leaves, grads, strict=True))


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # fused attention, batched
@pytest.mark.parametrize("through", ["functional_call", "make_functional"])
@every_module
def test_each_task_is_that_of_a_loop(device: torch.device, name: str, through: str) -> None:
    module, params, tasks = make(name, device)
    with sdpa_kernel(SDPBackend.MATH):  # eagerly, the others have no second derivative
        expected = by_hand(module, params, tasks, fresh=through == "make_functional")
    state = dict(vars(module))
    with unchanged(*module.parameters(), *module.buffers(), *params.values(), *tasks):
        got = meta.mean_value_and_grads(maml(forwards(module)[through]), params, tasks)
    assert vars(module) == state
    assert_close(got, expected)


@pytest.mark.parametrize("options", [{"tasks_at_once": 2}, {"create_graph": True}])
@pytest.mark.parametrize("name", ["GRU", "buffers"])
def test_whatever_the_options(device: torch.device, name: str, options: dict[str, Any]) -> None:
    module, params, tasks = make(name, device)
    meta_loss = maml(forwards(module)["make_functional"], memory="recompute")
    got = meta.mean_value_and_grads(meta_loss, params, tasks, **options)
    assert_close(got, by_hand(module, params, tasks, fresh=True))


def test_a_process_whose_backend_flags_are_frozen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = (
        f"__{'allow_nonbracketed_mutation_flag'}"  # what torch.backends.disable_global_flags sets
    )
    assert hasattr(torch.backends, flag)
    monkeypatch.setattr(torch.backends, flag, False)
    test_each_task_is_that_of_a_loop(device, "GRU", "functional_call")


def test_new_buffers_are_stacked_over_the_tasks(device: torch.device) -> None:
    module, params, (x, _) = make("batch norm", device)
    call, _, buffers = func.make_functional(module)

    def loss(params: Any, x: Tensor) -> Any:
        out, new = call(params, buffers, x)
        return out.square().sum(), new

    (_, new), _ = meta.mean_value_and_grads(loss, params, x, has_aux=True)
    rows = [call(params, buffers, one)[1] for one in x]
    assert_close(new, {key: torch.stack([row[key] for row in rows]) for key in buffers})
