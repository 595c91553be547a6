"""Training: states of optimizers, scalers of losses, stale graphs, captured tensors, means."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import gradkit
from gradkit import func
from tests.fuzz.calls import SMOOTH
from tests.fuzz.cases import Case, Op, Refused, draw, may_refuse
from tests.fuzz.laws import Grads, assert_close
from tests.fuzz.twins import JOINT, ROWS, Attempt, Call, attempted, first_of, flat, joint_of
from tests.helpers import assert_same_bits, same_bits

F64 = torch.float64
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {"maximize": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {}),
}
FUSED = ("SGD", "momentum", "nesterov", "Adam", "AdamW", "Adagrad")
# What gradkit may say of a state: of which tensor, or of what kind.
OF_A_STATE = {"state", "fused", "memory", "layout", "strides", "dtype"}


class Net(nn.Module):
    """A convolution, which has memory formats, and a scale."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        draws = [torch.randn(shape, generator=source) for shape in ((2, 3, 2, 2), (2, 1, 1))]
        self.w, self.scale = (nn.Parameter(x.to(dtype)) for x in draws)
        self.x = torch.randn(2, 3, 4, 4, generator=source).to(dtype)
        self.boost = 1.0

    def loss(self) -> Tensor:
        boost, self.boost = self.boost, 1.0
        return (functional.conv2d(self.x, self.w) * self.scale).tanh().square().mean() * boost


def recast(optimizer: Optimizer, dtype: torch.dtype) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step" and value.is_floating_point():
                state[name] = value.to(dtype)


def reload(optimizer: Optimizer, net: Net) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def contiguous_states(optimizer: Optimizer, net: Net) -> None:
    for state in optimizer.state.values():
        state.update({k: v.contiguous() if torch.is_tensor(v) else v for k, v in state.items()})


def overflow(optimizer: Optimizer, net: Net) -> None:
    """The next gradients are infinite."""
    net.boost = float("inf")


def switch(optimizer: Optimizer, net: Net) -> None:
    """Go over from a fused step to another, or the other way."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group.update(fused=not group["fused"], foreach=None)


EVENTS: dict[str, Callable[[Any, Net], object]] = {
    "nothing": lambda optimizer, net: None,
    "channels_last": lambda optimizer, net: net.to(memory_format=torch.channels_last),
    "float64 state": lambda optimizer, net: recast(optimizer, F64),
    "float32 state": lambda optimizer, net: recast(optimizer, torch.float32),
    "bfloat16 state": lambda optimizer, net: recast(optimizer, torch.bfloat16),
    "loaded": reload,
    "contiguous state": contiguous_states,
    "overflow": overflow,
    "switch": switch,
}


def by_loop(optimizer: Any, net: Net, scaler: Any, max_norm: Any) -> None:
    optimizer.zero_grad()
    (net.loss() if scaler is None else scaler.scale(net.loss())).backward()
    if max_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def by_minimize(optimizer: Any, net: Net, scaler: Any, max_norm: Any) -> None:
    gradkit.minimize_(optimizer, net.loss(), scaler=scaler, max_norm=max_norm)
    if scaler is not None:
        scaler.update()


def by_step(optimizer: Any, net: Net, scaler: Any, max_norm: Any) -> None:
    loss = net.loss() if scaler is None else scaler.scale(net.loss())
    grads = gradkit.value_and_grads(loss, net)[1]
    gradkit.step_(optimizer, net, grads, scaler=scaler, max_norm=max_norm)
    if scaler is not None:
        scaler.update()


def snapshot(optimizer: Any, net: Net, scaler: Any) -> list[Any]:
    """What a step changes: the parameters, the state and its numbers, the scale."""
    states = [dict(optimizer.state[p]) if p in optimizer.state else {} for p in net.parameters()]
    scale = None if scaler is None else copy.deepcopy(scaler.state_dict())
    return copy.deepcopy([[p.detach() for p in net.parameters()], states, scale])


def trained(step: Any, seed: int, dtype: torch.dtype, name: str, plan: Any, fused: Any) -> Net:
    """Run a plan: an event before each step."""
    cls, options = CLASSES[name]
    events, scaled, max_norm = plan
    net = Net(seed, dtype)
    optimizer: Any = cls(net.parameters(), lr=0.05, **options, **fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1) if scaled else None
    for event in events:
        EVENTS[event](optimizer, net)
        before = snapshot(optimizer, net, scaler)
        try:
            step(optimizer, net, scaler, max_norm)
        except gradkit.GradkitError:
            assert_same_state(snapshot(optimizer, net, scaler), before)
            raise
        assert all(p.grad is None for p in net.parameters())
    return net


def assert_same_state(now: Any, before: Any) -> None:
    params, states, scale = before
    assert_same_bits(now[0], params)
    for a, b in zip(now[1], states, strict=True):
        assert a.keys() == b.keys(), "the state has other entries"
        for key, value in b.items():
            assert same_bits(torch.as_tensor(a[key]), torch.as_tensor(value)), key
    assert now[2] == scale


def optimizers(rng: Random) -> None:
    """The weights are those of torch's plain loop, and bits those of its own loop where it is."""
    name, dtype = rng.choice(sorted(CLASSES)), rng.choice((F64, torch.float32))
    kinds = [{}, {"foreach": True}, {"foreach": False}, *[{"fused": True}] * (name in FUSED)]
    fused, seed = rng.choice(kinds), rng.randrange(1 << 16)
    events = ["nothing", *rng.choices(sorted(EVENTS), k=rng.randint(0, 3))]
    scaled = rng.random() < 0.3 and "switch" not in events  # which torch does not take
    plan = (events, scaled, rng.choice((None, None, 0.1)))
    ours = lambda: trained(rng.choice((by_minimize, by_step)), seed, dtype, name, plan, fused)  # noqa: E731
    try:
        theirs = trained(by_loop, seed, dtype, name, plan, fused)
        steady = (["nothing" if each == "switch" else each for each in events], *plan[1:])
        plain = trained(by_loop, seed, dtype, name, steady, {"foreach": False})
    except RuntimeError as error:
        try:
            ours()
        except gradkit.GradkitError:
            raise Refused("torch raises, too") from error
        raise AssertionError("torch raises, and gradkit returns") from error
    reasons = OF_A_STATE if len(plan[0]) > 1 else set()
    with may_refuse(reasons):
        net = ours()
    tolerance = 1e-2 if "bfloat16 state" in events else 1e-6 if dtype == F64 else 1e-4
    tolerance = 1e-4 if tolerance == 1e-6 and "float32 state" in events else tolerance
    # A fused step of torch pairs memory, not indices.
    pairs_memory = "channels_last" in events and (fused == {"fused": True} or "switch" in events)
    try:
        assert_close(list(net.parameters()), list(plain.parameters()), tolerance)
        if not pairs_memory:
            assert_same_bits(net.parameters(), theirs.parameters())
    except AssertionError as error:
        error.add_note(f"{name}, {fused}, {plan}, {dtype}")
        raise


def scaled_losses(rng: Random) -> None:
    """A loss that is scaled already is refused where gradkit scales, and nothing has changed."""
    net = Net(rng.randrange(1 << 16), torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(rng.randint(0, 2)):
        gradkit.minimize_(optimizer, net.loss(), scaler=scaler)
        scaler.update()
    scaled = scaler.scale(net.loss())
    losses = rng.choice((
        scaled,
        [net.loss(), scaled],
        {"a": scaled},
        scaled + net.loss(),
        scaled / 2,
        -scaled,
    ))
    before = snapshot(optimizer, net, scaler)
    try:
        gradkit.minimize_(optimizer, losses, scaler=scaler)
    except gradkit.GradkitError:
        assert_same_state(snapshot(optimizer, net, scaler), before)
    else:
        raise AssertionError("a scaled loss was scaled again")


def unscaled(rng: Random) -> None:
    """Lines of torch's loops around a step with a scaler: as they do in torch, or refused."""
    lines = rng.choice(("unscale_", "twice", "never scaled", "unscale_ and step_"))
    net = Net(rng.randrange(1 << 16), torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if lines != "never scaled":
        gradkit.minimize_(optimizer, net.loss(), scaler=scaler)
        scaler.update()
    reference = copy.deepcopy(net)
    for p, grad in zip(
        reference.parameters(),
        torch.autograd.grad(reference.loss(), list(reference.parameters())),
        strict=True,
    ):
        p.data -= 0.1 * grad
    with may_refuse({"scale", "unscale_", "update()"}):
        if lines == "never scaled":
            grads = gradkit.value_and_grads(net.loss(), net)[1]
            gradkit.step_(optimizer, net, grads, scaler=scaler)
        elif lines == "twice":
            gradkit.minimize_(optimizer, net.loss(), scaler=scaler)
            gradkit.minimize_(optimizer, net.loss(), scaler=scaler)
        elif lines == "unscale_":
            if rng.random() < 0.5:
                for p in net.parameters():
                    p.grad = torch.zeros_like(p)
            scaler.unscale_(optimizer)
            gradkit.minimize_(optimizer, net.loss(), scaler=scaler)
        else:
            grads = gradkit.value_and_grads(scaler.scale(net.loss()), net)[1]
            gradkit.write_grads_(net, grads)
            scaler.unscale_(optimizer)
            gradkit.step_(optimizer, net, gradkit.read_grads(net), scaler=scaler)
    assert lines != "twice", "two steps between updates, which torch refuses"
    assert_close(list(net.parameters()), list(reference.parameters()), 1e-5)


def doubled(leaf: Tensor) -> None:
    with torch.no_grad():
        leaf.mul_(2)


def stepped_by(**options: Any) -> Callable[[Tensor], None]:
    def write(leaf: Tensor) -> None:
        optimizer = torch.optim.SGD([leaf], lr=1.0, **options)
        gradkit.step_(optimizer, [leaf], [torch.ones_like(leaf)])

    return write


def minimized(leaf: Tensor) -> None:
    gradkit.minimize_(torch.optim.Adam([leaf], fused=True), (leaf * 3).sum())


WRITES: dict[str, Callable[[Tensor], None]] = {
    "in place": doubled,
    "step_": stepped_by(),
    "foreach": stepped_by(foreach=True),
    "fused": stepped_by(fused=True),
    "fused Adam": minimized,
}
CHANGED = {"in place", "changed", "inplace", "version"}


class Stale(Attempt):
    """Losses that were computed before a leaf was written."""

    write = ""

    def losses(self, leaves: Any = None) -> list[Tensor]:
        losses = super().losses(leaves)
        self.write = self.rng.choice(sorted(WRITES))
        WRITES[self.write]((self.leaves if leaves is None else leaves)[0])
        return losses


PURE = ("value_and_grads", "vjp", "backward_", "Accumulator", "capture_grads", "safe_retain")


def of_two_leaves(rng: Random) -> Case:
    """A program of plain leaves, one of which is written."""
    while True:
        case = draw(rng, SMOOTH, dtypes=(F64,), most=8)
        if len(case.program.leaves) > 1:
            leaves = ("plain",) * len(case.program.leaves)
            return replace(case, program=replace(case.program, leaves=leaves))


def stale(rng: Random) -> None:
    """Gradients of an older graph are those of the values it was computed from, or refused."""
    case = of_two_leaves(rng)
    names: dict[str, tuple[Call, Call]] = {name: (JOINT[name], joint_of) for name in PURE}
    names.update({name: (call, lambda t: flat(first_of(t))) for name, call in ROWS.items()})
    name = rng.choice(sorted(names))
    call, oracle = names[name]
    expected = oracle(attempted(case, Random(0)))
    t = attempted(case, rng)
    older = Stale(case, rng, t.leaves)
    try:
        with_changes(lambda: call(older), expected)
    except AssertionError as error:
        error.add_note(f"{name}, {older.write}: {case.program}")
        raise


def with_changes(call: Callable[[], Grads], expected: Grads) -> None:
    try:
        with may_refuse(CHANGED), warnings.catch_warnings():
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
            grads = call()
    except (gradkit.DetachedLossError, gradkit.UnreachedParamError) as error:
        if any(grad is not None and grad.any() for grad in expected):
            raise
        raise Refused("nothing is reached") from error
    except RuntimeError as error:
        if isinstance(error, gradkit.GradkitError) or "inplace" not in str(error):
            raise
        raise Refused("torch's error of what was written in place") from error
    assert_close(grads, expected, 1e-7)


def captured(rng: Random) -> None:
    """What fn closes over is written between func.vjp or linearize and the pull or push."""
    case = of_two_leaves(rng)
    expected = joint_of(attempted(case, Random(0)))[:1]
    t, name = attempted(case, rng), rng.choice(sorted(WRITES))
    others = [leaf if rng.random() < 0.5 else leaf.detach() for leaf in t.leaves[1:]]
    one, x = torch.ones((), dtype=F64), t.leaves[0].detach()
    if "step" in name or "fused" in name or name == "foreach":
        others[0] = t.leaves[1]
    fn = lambda x: t.total([x, *others])  # noqa: E731
    by_push = rng.random() < 0.5

    def call() -> Grads:
        if by_push:
            _, push = func.linearize(fn, x)
            WRITES[name](others[0])
            return [push(torch.ones_like(x))]
        _, pull = func.vjp(fn, x)
        WRITES[name](others[0])
        return [pull(one)[0]]

    try:
        with_changes(call, [expected[0].sum()] if by_push else expected)
    except AssertionError as error:
        error.add_note(f"{name}, {by_push}: {case.program}")
        raise


def scripted(rng: Random) -> dict[str, Op]:
    """A function that TorchScript has compiled, and has run some times."""
    unit: Any = torch.jit.CompilationUnit("def wave(x):\n    return torch.sin(x) * torch.tanh(x)\n")
    for _ in range(rng.randint(0, 3)):
        x = torch.ones(3, 3, dtype=F64, requires_grad=rng.random() < 0.7)
        unit.wave(x)

    def apply(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
        result: Tensor = unit.wave(unit.wave(a)) + b
        return result

    def twin(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
        inner = a.sin() * a.tanh()
        return inner.sin() * inner.tanh() + b

    return {"scripted": Op(apply, (), ("script",), twin)}


Loss = Callable[[Tensor, str], Tensor]


def of_classes(**options: Any) -> Loss:
    return lambda x, how: functional.cross_entropy(
        x, torch.arange(len(x)) % 3, reduction=how, **options
    )


LOSSES: dict[str, Loss] = {
    "mean": lambda x, how: getattr(x.sin(), how)(),
    "nanmean": lambda x, how: getattr(x.sin(), "nan" + how)(),
    "mse": lambda x, how: functional.mse_loss(x, torch.ones_like(x), reduction=how),
    "l1": lambda x, how: functional.l1_loss(x, torch.full_like(x, 9.0), reduction=how),
    "huber": lambda x, how: functional.huber_loss(x, torch.ones_like(x), reduction=how),
    "cross entropy": of_classes(),
    "smoothed": of_classes(label_smoothing=0.1),
    "probabilities": lambda x, how: functional.cross_entropy(
        x, torch.full_like(x, 1 / 3), reduction=how
    ),
    "bce": lambda x, how: functional.binary_cross_entropy_with_logits(
        x, torch.full_like(x, 0.3), reduction=how
    ),
    "kl_div": lambda x, how: functional.kl_div(
        x.log_softmax(1), torch.full_like(x, 1 / 3), reduction="batchmean" if how == "mean" else how
    ),
    "nll": lambda x, how: functional.nll_loss(
        x.log_softmax(1), torch.arange(len(x)) % 3, reduction=how
    ),
    "ctc": lambda x, how: functional.ctc_loss(
        x.log_softmax(1)[None].expand(4, -1, -1).contiguous(),
        torch.ones(len(x), 1, dtype=torch.long),
        torch.full((len(x),), 4),
        torch.ones(len(x), dtype=torch.long),
        reduction=how,
    ),
}
# Of the means of whole batches, and of a loss of few elements, both linear.
WRAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "divided": lambda x: x / 4,
    "scaled": lambda x: 0.5 * x,
    "by a tensor": lambda x: x * torch.tensor(3.0, dtype=x.dtype),
    "negative": lambda x: -x,
    "plus a constant": lambda x: x + 1.0,
    "subtracted": lambda x: 2 - x,
    "reshaped": lambda x: x.reshape(1).squeeze(),
}


def means(rng: Random) -> None:
    """A mean, also in products and sums, is refused or right; a sum is right."""
    name, how = rng.choice(sorted(LOSSES)), rng.choice(("mean", "sum"))
    wraps = rng.choices(sorted(WRAPS), k=rng.randint(0, 3))
    source = torch.Generator().manual_seed(rng.randrange(1 << 16))
    w = torch.randn(3, 3, generator=source, dtype=F64).requires_grad_()
    parts = [torch.randn(n, 3, generator=source, dtype=F64) for n in (2, 5, 3)]
    with_aux = rng.random() < 0.3

    def loss(x: Tensor, how: str) -> Tensor:
        value = LOSSES[name](x @ w, how)
        value = value + LOSSES["mse"](x @ w, how) if with_aux else value
        for wrap in wraps:
            value = WRAPS[wrap](value)
        return value

    total = gradkit.Accumulator(w)
    try:
        # A sum that is divided may be a mean.
        with may_refuse({"mean"} if how == "mean" or "divided" in wraps else set()):
            for x in parts:
                total.add_(loss(x, how), len(x))
        if how == "mean":
            expected = torch.autograd.grad(loss(torch.cat(parts), how), w)[0]
        else:
            every = torch.stack([loss(x, how) for x in parts]).sum() / 10
            expected = torch.autograd.grad(every, w)[0]
        assert_close([total.mean()[1]], [expected], 1e-7)
    except Exception as error:
        error.add_note(f"{name}, {how}, {wraps}, {with_aux}")
        raise
