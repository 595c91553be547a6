"""Functions whose backward calls backward() itself: their gradients count, and no `.grad` changes.

So do reversible networks, and checkpoints that are written by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradkit
from gradkit import func, meta
from tests.helpers import assert_same_bits

Forward = Callable[[Tensor], Tensor]


class Recompute(torch.autograd.Function):
    """Runs a function of a tensor again in the backward pass, whose weights get their `.grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Forward) -> Tensor:
        ctx.fn, ctx.x = fn, x.detach()
        return fn(x).detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.clone().requires_grad_()
            torch.autograd.backward(ctx.fn(x), cotangents)
        return x.grad, None


def recomputed(fn: Forward, x: Tensor) -> Tensor:
    result: Tensor = Recompute.apply(x, fn)
    return result


class Net(nn.Module):
    """A weight above, and two that are used inside of such Functions."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        kwargs: Any = {"bias": False, "device": device}
        self.first, self.block, self.other = (nn.Linear(3, 3, **kwargs) for _ in range(3))
        self.head = nn.Linear(3, 3, **kwargs)
        self.x = torch.randn(5, 3, device=device)


def once(net: Net, x: Tensor) -> Tensor:
    return recomputed(net.block, net.first(x))


def twice(net: Net, x: Tensor) -> Tensor:
    return recomputed(net.block, recomputed(net.block, net.first(x)).tanh())


def also_outside(net: Net, x: Tensor) -> Tensor:
    y = recomputed(net.block, net.block(net.first(x)))
    return net.block(recomputed(net.block, y))


def by_closure(net: Net, x: Tensor) -> Tensor:
    return recomputed(lambda y: net.other(net.block(y).tanh()), net.first(x))


def nested(net: Net, x: Tensor) -> Tensor:
    return recomputed(lambda y: recomputed(net.block, net.other(y)).tanh(), net.first(x))


def beside_others(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    return y * recomputed(net.block, y) + net.other(y)


NETS = [once, twice, also_outside, by_closure, nested, beside_others]
each_net = pytest.mark.parametrize("forward", NETS, ids=lambda fn: fn.__name__)
WHERE = {"no .grad": False, "a .grad": True}
each_start = pytest.mark.parametrize("filled_", WHERE.values(), ids=WHERE)


def losses_of(net: Net, forward: Callable[[Net, Tensor], Tensor]) -> dict[str, Tensor]:
    y = net.head(forward(net, net.x).tanh())
    return {"square": y.square().sum(), "sum": 0.3 * y.sum()}


def expected(net: Net, losses: list[Tensor], weights: Any = None) -> list[Tensor | None]:
    """Return what `.backward()` leaves, from no `.grad`."""
    before = [p.grad for p in net.parameters()]
    net.zero_grad()
    torch.autograd.backward(losses, weights, retain_graph=True)
    grads = [p.grad for p in net.parameters()]
    for p, grad in zip(net.parameters(), before, strict=True):
        p.grad = grad
    return grads


def filled(net: Net, fill: bool) -> Callable[[], None]:
    """Set every `.grad`, if asked for; return what looks whether they are as they were."""
    for p in net.parameters():
        p.grad = torch.randn_like(p) if fill else None
    before = [p.grad for p in net.parameters()]
    values = [None if grad is None else grad.clone() for grad in before]

    def look() -> None:
        assert all(p.grad is grad for p, grad in zip(net.parameters(), before, strict=True))
        assert_same_bits([p.grad for p in net.parameters()], values)

    return look


def by_accumulator(losses: dict[str, Tensor], net: Net) -> Any:
    total = gradkit.Accumulator(net)
    total.add_(losses, 1)
    return total.mean()[1]


def by_step(losses: dict[str, Tensor], net: Net) -> Any:
    before = [p.detach().clone() for p in net.parameters()]
    gradkit.minimize_(torch.optim.SGD(net.parameters(), 1.0), losses)
    steps = [old - p.detach() for old, p in zip(before, net.parameters(), strict=True)]
    with torch.no_grad():
        for p, old in zip(net.parameters(), before, strict=True):
            p.copy_(old)
    return steps


JOINT: dict[str, Callable[[dict[str, Tensor], Net], Any]] = {
    "value_and_grads": lambda losses, net: gradkit.value_and_grads(losses, net)[1],
    "unused": lambda losses, net: gradkit.value_and_grads(losses, net, unused="zeros")[1],
    "vjp": lambda losses, net: gradkit.vjp(
        losses, net, {key: torch.ones_like(loss) for key, loss in losses.items()}
    ),
    "Accumulator": by_accumulator,
    "checked": lambda losses, net: in_checked(losses, net),
}


def in_checked(losses: dict[str, Tensor], net: Net) -> Any:
    with gradkit.checked():
        return gradkit.value_and_grads(losses, net)[1]


@each_start
@each_net
@pytest.mark.parametrize("call", JOINT.values(), ids=JOINT)
def test_a_joint_pass_has_what_backward_leaves(
    device: torch.device,
    forward: Callable[[Net, Tensor], Tensor],
    filled_: bool,
    call: Callable[..., Any],
) -> None:
    net = Net(device)
    right = expected(net, list(losses_of(net, forward).values()))
    look = filled(net, filled_)
    grads = list(call(losses_of(net, forward), net).values())
    for index, (grad, like) in enumerate(zip(grads, right, strict=True)):
        if like is None:
            assert grad is None or not grad.any(), index
        else:
            assert_same_bits([grad], [like])
    look()


@each_net
def test_a_step_moves_what_a_loop_moves(
    device: torch.device, forward: Callable[[Net, Tensor], Tensor]
) -> None:
    ours, theirs = Net(device), Net(device)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (ours, theirs)]
    for _ in range(3):
        gradkit.minimize_(optimizers[0], losses_of(ours, forward))
        optimizers[1].zero_grad()
        torch.autograd.backward(list(losses_of(theirs, forward).values()))
        optimizers[1].step()
    assert_same_bits(list(ours.parameters()), list(theirs.parameters()))
    assert all(p.grad is None for p in ours.parameters())


@each_start
@each_net
def test_a_pass_for_each_loss_has_what_its_backward_leaves(
    device: torch.device, forward: Callable[[Net, Tensor], Tensor], filled_: bool
) -> None:
    net = Net(device)
    look = filled(net, filled_)
    losses = losses_of(net, forward)
    right = {key: expected(net, [loss]) for key, loss in losses.items()}
    each = gradkit.per_loss_grads(losses, net, retain_graph=True)
    for key, grads in each.items():
        present = [
            pair for pair in zip(grads.values(), right[key], strict=True) if pair[1] is not None
        ]
        assert_same_bits(*map(list, zip(*present, strict=True)))
    look()
    per_loss = [gradkit.tree.map(torch.clone, each[key]) for key in each]
    with pytest.warns(gradkit.GradkitWarning, match="may not be batchable"):
        gram = gradkit.gram(losses, net, retain_graph=True)
    torch.testing.assert_close(gram, gradkit.tree.gram(per_loss))
    norms = gradkit.per_loss_norms(losses, net, retain_graph=True)
    for norm, grads in zip(norms, per_loss, strict=True):
        torch.testing.assert_close(norm, gradkit.tree.global_norm(grads))
    look()
    freed = gradkit.per_loss_grads(losses, net)  # the graph in parts
    for key in losses:
        assert_same_bits(list(freed[key].values()), list(each[key].values()))
    look()


PARTS: dict[str, Callable[[Net], Any]] = {
    "inside": lambda net: net.block.weight,
    "inside, and one after": lambda net: [net.block.weight, net.head.weight],
    "one before": lambda net: net.first.weight,
    "one after": lambda net: net.head.weight,
}


@each_net
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_of_the_params_has_its_part(
    device: torch.device, forward: Callable[[Net, Tensor], Tensor], part: Callable[[Net], Any]
) -> None:
    net = Net(device)
    losses = losses_of(net, forward)
    every = dict(zip(map(id, net.parameters()), expected(net, list(losses.values())), strict=True))
    some = part(net)
    leaves = some if isinstance(some, list) else [some]
    right = [every[id(leaf)] for leaf in leaves]
    look = filled(net, True)
    _, grads = gradkit.value_and_grads(losses, leaves, unused="error", retain_graph=True)
    assert_same_bits(grads, right)
    look()
    players = [gradkit.simultaneous_grads([sum(losses.values())], [leaves], retain_graph=True)]
    torch.testing.assert_close(players[0][0], right)
    look()


@each_net
def test_backward_for_some_params_writes_these_or_raises(
    device: torch.device, forward: Callable[[Net, Tensor], Tensor]
) -> None:
    net = Net(device)
    losses = losses_of(net, forward)
    right = expected(net, list(losses.values()))
    gradkit.backward_(losses, [net.first.weight, net.block.weight], retain_graph=True)
    named = dict(zip(["first", "block", "other", "head"], right, strict=True))
    for name, grad in named.items():
        here = getattr(net, name).weight.grad
        if name in ("first", "block"):
            assert grad is not None
            assert_same_bits([here], [grad])
        else:
            assert here is None
    net.zero_grad()
    if forward is not also_outside:  # in which a pass for the block itself runs them all
        with pytest.raises(gradkit.UnsupportedGraphError, match="of a Function may write"):
            gradkit.backward_(losses, [net.head.weight, net.block.weight], retain_graph=True)
    assert all(p.grad is None for p in net.parameters())
    gradkit.backward_(losses)
    assert_same_bits([net.block.weight.grad], [named["block"]])


def test_hooks_run_as_in_backward_and_a_pure_call_steps_nothing(device: torch.device) -> None:
    net = Net(device)
    weight = net.block.weight
    start, steps = weight.detach().clone(), []
    weight.register_hook(lambda grad: 2 * grad)
    right = expected(net, list(losses_of(net, also_outside).values()))
    weight.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    _, grads = gradkit.value_and_grads(losses_of(net, also_outside), net)
    present = [pair for pair in zip(grads.values(), right, strict=True) if pair[1] is not None]
    assert_same_bits(*map(list, zip(*present, strict=True)))
    assert not steps
    assert torch.equal(weight, start)
    gradkit.backward_(losses_of(net, also_outside))
    assert steps


class Stop(BaseException):
    pass


@each_start
@pytest.mark.parametrize("error", [ValueError, Stop])
def test_an_error_inside_puts_every_grad_back(
    device: torch.device, filled_: bool, error: type[BaseException]
) -> None:
    net = Net(device)
    calls: list[int] = []

    def failing(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise error
        return net.block(x)

    def forward(net: Net, x: Tensor) -> Tensor:
        return recomputed(net.block, recomputed(failing, recomputed(net.block, net.first(x))))

    calls.append(1)
    losses = losses_of(net, forward)
    look = filled(net, filled_)
    net.block.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(error):
        gradkit.value_and_grads(losses, net)
    assert len(net.block.weight._post_accumulate_grad_hooks) == 1
    look()


def test_threads_share_a_net(device: torch.device) -> None:
    net = Net(device)
    right = expected(net, list(losses_of(net, also_outside).values()))
    look = filled(net, True)
    names = [name for name, _ in net.named_parameters()]

    def run(_: int) -> None:
        for _ in range(10):
            grads = gradkit.value_and_grads(losses_of(net, also_outside), net)[1]
            for name, like in zip(names, right, strict=True):
                if like is not None:
                    assert_same_bits([grads[name]], [like])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    look()


def test_a_graph_of_the_gradients_is_refused(device: torch.device) -> None:
    net = Net(device)
    look = filled(net, True)
    for params in (net, net.block.weight):
        losses = losses_of(net, once)
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"Recompute, (which|a Function)"):
            gradkit.value_and_grads(losses, params, create_graph=True)
        look()


def test_what_is_no_leaf_of_the_call_is_refused(device: torch.device) -> None:
    """A functional call has put other weights in, which a later run does not have."""
    net = Net(device)
    look = filled(net, True)
    call, params, buffers = func.make_functional(net.block)
    x = torch.ones(2, 3, device=device)

    def loss(params: Any) -> Tensor:
        return recomputed(lambda y: call(params, buffers, y)[0], x * params["weight"].sum()).sum()

    for run in (
        lambda: meta.unroll(loss_of_step, dict(params), [0], meta.sgd(0.1)),
        lambda: func.value_and_grads(loss)(params),
    ):
        with pytest.raises(gradkit.GradkitError):
            run()
        look()


def loss_of_step(params: Any, outer: Any, batch: Any) -> Tensor:
    weight = params["weight"]
    return recomputed(lambda y: y * BIAS.to(y), weight).sum()


BIAS = torch.ones(3, requires_grad=True)


def test_a_function_that_writes_what_it_returns_doubles_as_in_backward(
    device: torch.device,
) -> None:
    """As one does that kernels of another library fill, in memory of `.grad`."""

    class Buffered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            ctx.x, ctx.buffer = x, x.grad
            return x.detach().square()

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> Any:
            ctx.buffer.data += cotangents[0] * 2 * ctx.x.detach()  # no version counts it
            return ctx.buffer

    x = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    Buffered.apply(x).sum().backward()
    right = x.grad
    assert right is not None
    assert right.tolist() == [4.0, 8.0]
    for start in (None, torch.full_like(x, 3.0)):
        x.grad = start
        loss = Buffered.apply(x).sum()
        before, value = x.grad, x.grad.clone()
        assert torch.equal(gradkit.value_and_grads(loss, x)[1], right)
        assert x.grad is before
        assert torch.equal(x.grad, value)


LAYERS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "first": lambda net, x: net.first(x),
    "block": lambda net, x: net.block(x),
    "tanh": lambda net, x: x.tanh(),
    "residual": lambda net, x: x + recomputed(net.other, x),
    "recomputed block": lambda net, x: recomputed(net.block, x),
    "recomputed other": lambda net, x: recomputed(lambda y: net.other(y).tanh(), x),
    "nested": lambda net, x: recomputed(lambda y: recomputed(net.block, net.other(y)), x),
}


@given(st.data())
def test_any_net_of_such_functions(device: torch.device, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=6))
    net = Net(device)
    some = data.draw(st.sets(st.sampled_from(["first", "block", "other", "head"]), min_size=1))

    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.first(x)
        for name in names:
            y = LAYERS[name](net, y)
        return y

    losses = losses_of(net, forward)
    right = dict(zip(map(id, net.parameters()), expected(net, list(losses.values())), strict=True))
    params = [*(getattr(net, name).weight for name in sorted(some)), net.head.weight]
    look = filled(net, data.draw(st.booleans()))
    _, grads = gradkit.value_and_grads(losses, params)
    for param, grad in zip(params, grads, strict=True):
        like = right[id(param)]
        assert (grad is None) == (like is None)
        if grad is not None and like is not None:
            assert_same_bits([grad], [like])
    look()


class Asking(torch.autograd.Function):
    """A checkpoint that runs under `.backward()` only, as several libraries have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Forward) -> Tensor:
        ctx.fn, ctx.x = fn, x.detach()
        return fn(x).detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad()")
        return Recompute.backward(ctx, *cotangents)


class AskingBelow(Asking):
    """The same, where the question is asked in another function."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return Asking.backward(ctx, *cotangents)


def unnamed() -> None:
    valid = "_is_checkpoint" + "_valid"
    if not getattr(torch.autograd, valid)():
        raise RuntimeError("Checkpointing is not compatible with .grad() or ...")


class AskingUnseen(Asking):
    """The same, where nothing shows that it asks."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        unnamed()
        return Recompute.backward(ctx, *cotangents)


@pytest.mark.parametrize("kind", [Asking, AskingBelow, AskingUnseen])
def test_a_checkpoint_for_backward_alone_is_refused_by_name(
    device: torch.device, kind: Any
) -> None:
    net = Net(device)
    look = filled(net, True)

    def losses() -> dict[str, Tensor]:
        return losses_of(net, lambda net, x: kind.apply(net.first(x), net.block))

    right = expected(net, list(losses().values()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    calls: list[Callable[[], Any]] = [
        lambda: gradkit.value_and_grads(losses(), net),
        lambda: gradkit.per_loss_grads(losses(), net),
        lambda: gradkit.minimize_(optimizer, losses()),
        lambda: gradkit.per_loss_norms(losses(), net),
        lambda: gradkit.backward_(losses(), net.first.weight),
    ]
    for call in calls:
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(gradkit.UnsupportedGraphError, match=r"under \.backward\(\) only"),
        ):
            call()
        look()
    with gradkit.capture_grads(net) as captured:
        gradkit.backward_(losses())
    assert_same_bits(list(captured.grads.values())[:2], right[:2])
    look()


def test_a_leaf_loss_whose_hook_runs_the_backward_pass_is_refused_before_it_does(
    device: torch.device,
) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)

    def cached() -> Tensor:
        loss = w.square().sum().detach().requires_grad_()
        loss.register_hook(torch.enable_grad()(lambda g: (g * w.square().sum()).backward()))
        return loss

    calls: list[Callable[[Tensor], Any]] = [
        lambda loss: gradkit.value_and_grads(loss, w),
        lambda loss: gradkit.value_and_grads([loss, w.sum()], w),
        lambda loss: gradkit.per_loss_grads([loss, w.sum()], w),
        lambda loss: gradkit.minimize_(torch.optim.SGD([w], 0.1), loss),
        lambda loss: gradkit.gram([loss, w.sum()], w),
        lambda loss: gradkit.simultaneous_grads([loss], [w]),
    ]
    for call in calls:
        with pytest.raises(gradkit.UnreachedParamError, match="capture_grads"):
            call(cached())
        assert w.grad is None
    with gradkit.capture_grads(w) as captured:
        cached().backward()
    assert captured.grads.tolist() == [2, 4]
    assert w.grad is None
    gradkit.backward_(cached())
    assert w.grad is not None
    assert w.grad.tolist() == [2, 4]
    w.register_hook(lambda grad: 3 * grad)  # a param may be a loss, too
    scale = torch.ones((), device=device, requires_grad=True)
    scale.register_hook(lambda grad: 3 * grad)
    assert gradkit.value_and_grads(scale, scale)[1] == 3


class ByHand(torch.autograd.Function):
    """Adds to the `.grad` of a weight that its graph does not lead to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: list[Tensor]) -> Tensor:
        ctx.weight = box[0]
        ctx.save_for_backward(x)
        return x * box[0].detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.grad = cotangent.detach() * x.detach()
        return cotangent * weight.detach(), None


def by_hand(p: dict[str, Tensor]) -> Tensor:
    result: Tensor = ByHand.apply(p["x"] * 1, [p["w"]]).sum()
    return result


@pytest.mark.parametrize("grad", [True, False], ids=["outer", "no outer"])
@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_unroll_refuses_what_is_written_for_its_own_params(
    device: torch.device, grad: bool, memory: Any
) -> None:
    ones = {name: torch.ones(2, device=device, requires_grad=grad) for name in "xw"}
    step = meta.sgd(1.0)
    with pytest.raises(gradkit.UnsupportedGraphError, match="ByHand, which has written"):
        meta.unroll(lambda p, outer, batch: by_hand(p), ones, [None], step, memory=memory)
    assert all(x.grad is None for x in ones.values())


def test_a_nested_call_refuses_what_is_written_for_its_own_params(device: torch.device) -> None:
    ones = {name: torch.ones(2, device=device) for name in "xw"}

    def outer(p: dict[str, Tensor]) -> Tensor:
        grads = func.value_and_grads(by_hand)(p)[1]
        return torch.stack([grad.square().sum() for grad in grads.values()]).sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match="ByHand, which has written"):
        func.value_and_grads(outer)(ones)
