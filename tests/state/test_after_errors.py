"""A call that raises in the user's code, wherever that is, leaves buffers as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit import func, meta, report
from gradkit._compat.transforms import transforms


class RaisedByUserError(Exception):
    """What the user's code raises."""


class Smoothed(nn.Module):
    """A running mean that is assigned, and not written on."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.runs: list[int] = []
        self.seen, self.counts = torch.zeros(()), True  # no buffer, but its own

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(1)
        if self.counts and not transforms():
            self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Task:
    """A net with state, and a function that raises when it is called for the n-th time."""

    def __init__(self, device: torch.device, raise_at: int) -> None:
        torch.manual_seed(0)
        self.last = Smoothed()
        layers = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), self.last
        self.net = nn.Sequential(*layers).to(device)
        self.count = torch.zeros((), device=device)
        self.x = torch.randn(6, 3, device=device)
        self.w = torch.ones(3, device=device)
        self.counts = True
        self.ticks, self._raise_at = 0, raise_at

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == self._raise_at:
            raise RaisedByUserError

    def out(self, w: Tensor, x: Tensor) -> Tensor:
        """Run the net, which writes on its buffers, between two places where this may raise."""
        self.tick()
        y: Tensor = self.net(x * w)
        if self.counts:
            self.count.add_(1)
        self.tick()
        return y

    def loss(self, w: Tensor, *_: Any) -> Tensor:
        return self.out(w, self.x).square().mean()

    def inner(self, w: Tensor, _: Any, x: Tensor) -> Tensor:
        return self.out(w, x).square().mean()

    def state(self) -> list[Any]:
        parts = list(self.net.modules())
        own = [(name, t.tolist()) for name, t in self.net.state_dict().items()]
        kept = [[id(t) for t in (*m._parameters.values(), *m._buffers.values())] for m in parts]
        runs = [(list(m.runs), m.seen.item()) for m in parts if isinstance(m, Smoothed)]
        return [own, kept, runs, self.count.item(), [p.grad for p in self.net.parameters()]]


def sgd() -> Any:
    return meta.sgd(lr=0.1)


def unroll(task: Task, steps: int = 3, **options: Any) -> Any:
    return meta.unroll(task.inner, task.w, [task.x] * steps, sgd(), **options)


def staged(task: Task, chunk_size: int | None, where: str) -> Any:
    def loss(y: Tensor) -> Tensor:
        if where == "loss":
            task.tick()
        return y if where == "not scalar" else y.square().mean()

    step = func.staged_value_and_grads(task.out, loss, chunk_size=chunk_size)
    return step(task.w, task.x)


def implicit(task: Task, *, in_solver: bool) -> Any:
    def solver(w: Tensor, outer: Any) -> Tensor:
        return w - task.loss(w).detach() if in_solver else w

    def inner_loss(w: Tensor, scale: Tensor) -> Tensor:
        return (scale * task.out(w, task.x)).square().mean()

    scale = torch.ones((), device=task.x.device, requires_grad=True)
    find = meta.implicit(solver, inner_loss, warn=False)
    return gradkit.value_and_grads(find(task.w, scale).sum(), scale)


def tasks(task: Task, *, batchable: bool) -> Any:
    def meta_loss(w: Tensor, x: Tensor) -> Tensor:
        y = task.out(w, x).square().mean()
        assert batchable or y.item()  # which torch.vmap cannot batch
        return y

    many = torch.stack([task.x] * 2)
    return meta.mean_value_and_grads(meta_loss, task.w, many)


def samples(task: Task, *, batchable: bool) -> Any:
    task.net.eval()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = task.out(w, x[None]).square().mean()
        assert batchable or y.item()
        return y

    return func.per_sample_grads(loss, in_dims=(None, 0))(task.w, task.x)


def functional(task: Task) -> Any:
    task.last.counts = False  # not undone after a call that returns, either
    call, params, buffers = func.make_functional(task.net)
    task.net.register_forward_hook(lambda *_: task.tick())
    return call(params, buffers, task.x)


def in_callback(task: Task, call: Callable[[Callable[..., Any]], Any]) -> Any:
    """Make a call of gradkit's whose callback runs the net."""

    def callback(given: Any) -> Any:
        task.out(task.w, task.x)
        return given

    return call(callback)


def losses(task: Task) -> tuple[list[Tensor], list[Tensor]]:
    w = task.w.clone().requires_grad_()
    return [w.sum(), (w * w).sum()], [w]


def weights_of_gramian(task: Task) -> Any:
    values, params = losses(task)

    def weights(callback: Callable[..., Any]) -> Any:
        return gradkit.value_and_grads(values, params, weights=lambda g: callback(g).diagonal())

    return in_callback(task, weights)


def reduced(task: Task) -> Any:
    values, params = losses(task)
    return in_callback(task, lambda fn: gradkit.value_and_reduced_grads(values, params, fn))


def combined(task: Task) -> Any:
    per_loss = gradkit.per_loss_grads(*losses(task))
    return in_callback(
        task, lambda fn: gradkit.combine(per_loss, lambda matrix: fn(matrix).mean(0))
    )


def compare(task: Task) -> Any:
    task.counts = False  # what loss_fn does beyond modules is not undone after a run
    return report.compare(task.loss, task.w.requires_grad_())


def directions(call: Callable[..., Any], task: Task) -> Any:
    return call(task.loss, (task.w,), (torch.ones_like(task.w),))


CALLS: dict[str, Callable[[Task], Any]] = {
    "value_and_grads": lambda t: func.value_and_grads(t.loss)(t.w),
    "per_loss_grads": lambda t: func.per_loss_grads(t.loss)(t.w),
    "hvp": partial(directions, func.hvp),
    "jvp": partial(directions, func.jvp),
    "vjp": lambda t: func.vjp(t.loss, t.w),
    "linearize": lambda t: func.linearize(t.loss, t.w),
    "ggn_vp": lambda t: func.ggn_vp(
        lambda w: t.out(w, t.x), lambda y: y.square().mean(), t.w, torch.ones_like(t.w)
    ),
    "check_grads": lambda t: func.check_grads(t.loss, t.w.double()),
    "per_sample_grads": partial(samples, batchable=True),
    "per_sample_grads, a loop": partial(samples, batchable=False),
    "make_functional": functional,
    "staged, one chunk": partial(staged, chunk_size=None, where="loss"),
    "staged": partial(staged, chunk_size=2, where="loss"),
    "staged, no scalar": partial(staged, chunk_size=2, where="not scalar"),
    "unroll": unroll,
    "unroll, first order": partial(unroll, first_order=True),
    "unroll, recompute": partial(unroll, memory="recompute"),
    "unroll, two at a time": partial(unroll, memory=2),
    "unroll, grad_transform": lambda t: unroll(t, grad_transform=lambda g: [t.out(t.w, t.x), g][1]),
    "implicit, solver": partial(implicit, in_solver=True),
    "implicit, inner_loss": partial(implicit, in_solver=False),
    "mean_value_and_grads": partial(tasks, batchable=True),
    "mean_value_and_grads, a loop": partial(tasks, batchable=False),
    "mean_value_and_grads of unroll": lambda t: meta.mean_value_and_grads(
        lambda w, x: meta.unroll(t.inner, w, [x] * 2, sgd()).params.sum(), t.w, t.x[None]
    ),
    "compare": compare,
    "weights of the Gramian": weights_of_gramian,
    "value_and_reduced_grads": reduced,
    "combine": combined,
}


def outcome(call: Callable[[Task], Any], task: Task) -> type[Exception] | None:
    with warnings.catch_warnings(action="ignore"):
        try:
            call(task)
        except Exception as error:
            return type(error)
    return None


@pytest.mark.parametrize("name", CALLS)
def test_buffers_are_as_before_an_error(device: torch.device, name: str) -> None:
    call, raise_at, kinds = CALLS[name], 1, []
    while True:
        task = Task(device, raise_at)
        before = task.state()
        kind = outcome(call, task)
        if kind is None:
            break
        kinds.append(kind)
        assert task.state() == before, f"{kind.__name__} at tick {raise_at}"
        if task.ticks < raise_at:  # gradkit, or torch, refuses the call by itself
            break
        raise_at += 1
    assert kinds
    assert kinds[0] is RaisedByUserError


@pytest.mark.parametrize("memory", ["store", "recompute"])
@pytest.mark.parametrize("call", ["unroll", "staged", "implicit"])
def test_no_graph_is_left_on_what_was_written(device: torch.device, call: str, memory: Any) -> None:
    norm, own = nn.BatchNorm1d(2, device=device), torch.ones(2, device=device)
    w = torch.full((2,), 2.0, device=device, requires_grad=True)

    def loss(w: Tensor, *_: Any) -> Tensor:
        own.mul_(w)
        norm.running_mean.add_(w)
        raise RaisedByUserError

    calls: dict[str, Callable[[], Any]] = {
        "unroll": lambda: meta.unroll(loss, w, [0], sgd(), memory=memory),
        "staged": lambda: func.staged_value_and_grads(loss, torch.sum, chunk_size=1)(w, w[None]),
        "implicit": lambda: meta.implicit(lambda w, _: w, loss)(w.detach(), w),
    }
    with pytest.raises(RaisedByUserError):
        calls[call]()
    for tensor, value in ((own, 1.0), (norm.running_mean, 0.0)):
        assert not tensor.requires_grad
        assert tensor.tolist() == [value] * 2


def test_check_grads_of_a_function_that_writes_on_a_tensor_from_outside(
    device: torch.device,
) -> None:
    """Every run starts from the tensor as it was, without the graph of the run before."""
    own = torch.ones(2, device=device, dtype=torch.float64)
    func.check_grads(lambda w: own.mul_(w).square().sum(), torch.full_like(own, 2.0))
    assert not own.requires_grad
    assert own.tolist() == [1.0, 1.0]


class WithoutALength(tuple[int, ...]):
    """A tuple whose length and items are not for a walk over them, as e3nn's Irreps."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


def test_a_tuple_that_has_no_length_is_walked_over(device: torch.device) -> None:
    layer = nn.Linear(2, 1, bias=False, device=device)
    vars(layer)["kept"] = WithoutALength((1, 2))
    call, params, buffers = func.make_functional(layer)

    def loss(p: Any) -> Tensor:
        out: Tensor = call(p, buffers, torch.ones(1, 2, device=device))[0]
        return out.sum()

    grads = func.value_and_grads(loss, create_graph=False)(params)[1]
    assert torch.equal(grads["weight"], torch.ones(1, 2, device=device))
