"""A KeyboardInterrupt at any line of gradkit leaves all as it was, or a mutating call done."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit import func, meta
from gradkit._checks import checked
from gradkit._compat import autograd
from gradkit._compat.transforms import default_hooks, transforms
from gradkit._core import grad_recorder, user_code
from gradkit._state import grad_attribute, module_state, rerun
from gradkit._torch_bugs import monitor
from tests.helpers import others_slow

_PACKAGE = os.path.dirname(gradkit.__file__) + os.sep
_OPTIMIZERS = import_module("torch.optim.optimizer")


class Cube(torch.autograd.Function):
    """A Function of the user's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class World:
    """A model with hooks, buffers and some `.grad`, its optimizer, and what they hold."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.model = nn.Sequential(*layers).to(device)
        self.params = list(self.model.parameters())
        self.x = torch.randn(5, 3, device=device)
        self.params[0].register_hook(lambda grad: grad * 2)
        self.model[0].register_forward_hook(lambda *_: None)
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)
        for param in self.params[::2]:
            param.grad = torch.ones_like(param)
        self.given = [torch.full_like(param, 0.5) for param in self.params]
        self.middle = self.model[0](self.x)
        self.total: gradkit.Accumulator | None = None

    def loss(self) -> Tensor:
        return Cube.apply(self.model[1:](self.middle)).square().mean()

    def objects(self) -> list[Any]:
        """Return which objects there are."""
        parts = list(self.model.modules())
        names = "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"
        tables: list[dict[Any, Any]] = [getattr(part, name) for part in parts for name in names]
        return [
            [id(param.grad) for param in self.params],
            [[id(x) for x in table.values()] for table in tables],
            [list(vars(part)) for part in parts],
            [len(x._backward_hooks or ()) for x in (*self.params, self.middle)],
            [param.requires_grad for param in self.params],
        ]

    def values(self) -> list[Any]:
        """Return the values of parameters, buffers, `.grad`, the optimizer's state and sums."""
        grads = [None if p.grad is None else p.grad.tolist() for p in self.params]
        state = {name: x.tolist() for name, x in self.model.state_dict().items()}
        mean, sums = (torch.zeros(()), []) if self.total is None else self.total.mean()
        every = [mean.tolist(), [grad.tolist() for grad in sums]]
        return [grads, state, repr(self.optimizer.state_dict()), every]


def modes() -> dict[str, Any]:
    """Return the modes of this thread, and what gradkit keeps of the process."""
    lock = user_code._own_hooks.lock
    is_free = lock.acquire(timeout=1)
    if is_free:
        lock.release()
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch functions": torch._C._is_torch_function_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "transforms": transforms(),
        "dual level": torch.autograd.forward_ad._current_level,
        "saved tensors": default_hooks(),
        "no hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "requires_grad_": torch._C._functorch.get_inplace_requires_grad_allowed(),
        "kernels": [rerun.attention_kernels(), torch._C._get_mkldnn_enabled()],
        "autocast": torch.is_autocast_enabled("cpu"),
        "observers": [one.active for one in grad_recorder.observers.values()],
        "hidden": set(grad_recorder._hidden_passes),
        "thread": torch._C._is_key_in_tls(autograd._CALLER),
        "checked": list(checked.open_monitors),
        "monitors": monitor.active_monitors(),
        "writes": rerun._writes_of_run.get(),
        "turns": list(module_state._turns),
        "kept": module_state.state_now(),
        "steps": [
            dict(_OPTIMIZERS._global_optimizer_pre_hooks),
            dict(_OPTIMIZERS._global_optimizer_post_hooks),
        ],
        "lock": is_free,
    }


Line = tuple[CodeType, int]


Point = tuple[Line, int]  # a line, the n-th time that it runs


class Interrupt:
    """Counts the lines of gradkit that a call runs, and raises at one of them."""

    def __init__(self, at: Point | None = None) -> None:
        self._at = at
        self._counts: Counter[Line] = Counter()
        self.lines: list[Line] = []

    def __call__(self, run: Callable[[], Any]) -> bool:
        """Return whether the call was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            line = frame.f_code, frame.f_lineno
            self.lines.append(line)
            self._counts[line] += 1
            if (line, self._counts[line]) == self._at:
                raise KeyboardInterrupt
        return self._line


def points(lines: list[Line]) -> list[Point]:
    """Return where to interrupt: at each line the first time, and the last time, that it runs."""
    # Not the n-th line of all: what an interrupt keeps alive makes the walks of later calls longer.
    counts = Counter(lines)
    return list(
        dict.fromkeys(point for line in counts for point in ((line, 1), (line, counts[line])))
    )


Call = Callable[[World], Callable[[], Any]]


def captured(w: World) -> Callable[[], Any]:
    loss = w.loss()

    def run() -> None:
        with gradkit.capture_grads(w.model):
            loss.backward()

    return run


def in_checked(w: World) -> Callable[[], Any]:
    loss = w.loss()

    def run() -> None:
        with gradkit.checked():
            gradkit.value_and_grads(loss, w.model)

    return run


def retained(w: World) -> Callable[[], Any]:
    loss = w.loss()

    def run() -> None:
        with gradkit.safe_retain({"middle": w.middle}):
            gradkit.value_and_grads(loss, w.model)

    return run


def retained_of_modules(w: World) -> Callable[[], Any]:
    def run() -> None:
        with gradkit.safe_retain(w.model, ["0"], inputs=True):
            gradkit.value_and_grads(w.model[2](w.model[0](w.x)).sum(), [w.model[0], w.model[2]])

    return run


def of_function(w: World) -> Callable[[], Any]:
    call, params, buffers = func.make_functional(w.model)
    return lambda: func.value_and_grads(
        lambda p: Cube.apply(call(p, buffers, w.x)[0]).square().mean()
    )(params)


def called(w: World) -> Callable[[], Any]:
    call, params, buffers = func.make_functional(w.model)
    doubled = {name: 2 * param.detach() for name, param in params.items()}
    return lambda: call(doubled, buffers, w.x)


def unrolled(w: World) -> Callable[[], Any]:
    def loss(p: Tensor, _: Any, x: Tensor) -> Tensor:
        return Cube.apply(w.model(x * p)).square().mean()

    start = torch.ones(3, device=w.x.device)
    return lambda: meta.unroll(loss, start, [w.x] * 2, meta.sgd(lr=0.1))


def recomputed(w: World) -> Callable[[], Any]:
    call, params, buffers = func.make_functional(w.model)

    def loss(p: Any, _: Any, x: Tensor) -> Tensor:
        return call(p, buffers, x)[0].square().mean()

    def run() -> None:
        adapted = meta.unroll(loss, params, [w.x], meta.sgd(lr=0.1), memory="recompute")
        gradkit.value_and_grads(adapted.values.sum(), params)

    return run


def staged(w: World) -> Callable[[], Any]:
    step = func.staged_value_and_grads(
        lambda p, x: w.model(x * p), lambda y: y.square().mean(), chunk_size=3
    )
    return lambda: step(torch.ones(3, device=w.x.device), w.x)


def of_losses(call: Callable[..., Any], *rest: Any, **options: Any) -> Call:
    def make(w: World) -> Callable[[], Any]:
        loss = w.loss()
        return lambda: call([loss, 2 * loss.detach() * loss], w.model, *rest, **options)

    return make


def minimized(w: World, **options: Any) -> Callable[[], Any]:
    """Return a step that is not the first, which makes the states."""
    gradkit.minimize_(w.optimizer, torch.stack([p.square().sum() for p in w.params]).sum())
    loss = w.loss()
    return lambda: gradkit.minimize_(w.optimizer, loss, **options)


def accumulated(w: World) -> Callable[[], Any]:
    """Return a micro-batch that is not the first."""
    total = w.total = gradkit.Accumulator(w.params)
    total.add_(torch.stack([p.square().sum() for p in w.params]).sum(), 3)
    loss = torch.stack([w.loss()]).sum() * 1
    return lambda: total.add_(loss, 2)


def with_given(call: Callable[..., Any]) -> Call:
    return lambda w: lambda: call(w.params, w.given)


class Subject(NamedTuple):
    """A call, and whether it may be done where it was interrupted."""

    make: Call
    mutates: bool = False


SUBJECTS = {
    "capture_grads": Subject(captured),
    "step_": Subject(lambda w: lambda: gradkit.step_(w.optimizer, w.params, w.given), mutates=True),
    "step_, max_norm": Subject(
        lambda w: lambda: gradkit.step_(w.optimizer, w.params, w.given, max_norm=1.0), mutates=True
    ),
    "minimize_": Subject(minimized, mutates=True),
    "minimize_, max_norm": Subject(partial(minimized, max_norm=1.0), mutates=True),
    "Accumulator.add_": Subject(accumulated, mutates=True),
    "checked": Subject(in_checked),
    "safe_retain": Subject(retained),
    "safe_retain of modules": Subject(retained_of_modules),
    "func.value_and_grads": Subject(of_function),
    "value_and_grads": Subject(of_losses(gradkit.value_and_grads)),
    "per_loss_grads": Subject(of_losses(gradkit.per_loss_grads)),
    "per_loss_grads, batched": Subject(of_losses(gradkit.per_loss_grads, strategy="auto")),
    "gram": Subject(of_losses(gradkit.gram)),
    "value_and_reduced_grads": Subject(of_losses(gradkit.value_and_reduced_grads, Tensor.norm)),
    "backward_": Subject(of_losses(gradkit.backward_), mutates=True),
    "add_grads_": Subject(lambda w: lambda: gradkit.add_grads_(w.params, w.given), mutates=True),
    "write_grads_": Subject(
        lambda w: lambda: gradkit.write_grads_(w.params, w.given), mutates=True
    ),
    "unroll": Subject(unrolled, mutates=True),  # the statistics of its batch norm, as below
    "unroll, recomputed": Subject(recomputed),
    "make_functional's call": Subject(called),
    "staged_value_and_grads": Subject(staged, mutates=True),
}


# Python reports an interrupt in `__del__`, or in a generator that is closed, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
@pytest.mark.parametrize("name", others_slow(SUBJECTS, {"per_loss_grads", "safe_retain"}))
def test_an_interrupt_at_any_line(device: torch.device, name: str) -> None:
    subject = SUBJECTS[name]
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2):  # what is cached, is
            subject.make(World(device))()
        world = World(device)
        whole = Interrupt()
        assert not whole(subject.make(world))
        done = world.values()
        failed = [
            f"{code.co_filename[len(_PACKAGE) :]}:{line} {code.co_name}"
            for (code, line), number in points(whole.lines)
            if not leaves_all(device, subject, ((code, line), number), done)
        ]
    assert not failed, f"{len(failed)} of {len(whole.lines)}:\n" + "\n".join(failed)


def leaves_all(device: torch.device, subject: Subject, at: Point, done: list[Any]) -> bool:
    """Return whether an interrupt at a line leaves all as it was, or the call done."""
    world = World(device)
    run = subject.make(world)
    objects, values, before = world.objects(), world.values(), modes()
    if not Interrupt(at)(run):
        return True  # the order of a set: this time there were fewer lines
    if modes() != before:
        return False
    if (world.objects(), world.values()) == (objects, values):
        return True
    # A step puts every `.grad` back; what writes them may put new ones there.
    return subject.mutates and world.values() == done and world.objects()[1:] == objects[1:]


def test_what_is_left_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: here nothing is undone."""
    step, retain = SUBJECTS["step_, max_norm"], SUBJECTS["safe_retain"]
    for subject in (step, retain):
        subject.make(World(device))()  # what is cached, is
    lines = Interrupt()
    assert not lines(step.make(World(device)))
    (within,) = (point for point in points(lines.lines) if text(point[0]).strip() == "step()")
    assert leaves_all(device, step, within, [])
    monkeypatch.setattr(grad_attribute, "undone", lambda _: nullcontext())
    assert not leaves_all(device, step, within, [])
    monkeypatch.setattr(grad_recorder, "undone", lambda _: nullcontext())
    lines = Interrupt()
    assert not lines(retain.make(World(device)))
    grad_recorder.observers.clear()
    # Not the last line of all: it may be in `__del__` of a node, where Python goes on.
    last = [line for line in lines.lines if line[0].co_name == "safe_retain"][-1]
    assert not leaves_all(device, retain, (last, lines.lines.count(last)), [])
    grad_recorder.observers.clear()


def text(line: Line) -> str:
    code, number = line
    return linecache.getline(code.co_filename, number)
