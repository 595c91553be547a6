"""What passes are guarded against changes no gradient; where nothing is, they are as exact.

The oracle is plain torch: `.backward()`, and `torch.autograd.grad` for each loss. The process looks
new (no hook was ever registered), or has hooks, Functions and contexts that a pass must see to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

import gradkit
from gradkit._autograd import passes
from gradkit._core import ownership, user_code
from tests.helpers import Halve, Scribble, World, assert_owned, assert_same_bits
from tests.strategies import HOOKLESS, Graph, Program, build, programs

dtypes = st.sampled_from([torch.float64, torch.float32])
functional = programs(ops=HOOKLESS, leaf_hooks=False)
Contexts = dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[Any, Any], None]]]


def no_hook_yet() -> Any:
    """Let the process look as if no hook had been registered before."""
    return patch.object(user_code._own_hooks, "count", RemovableHandle.next_id)


def scalars(graph: Graph) -> list[Tensor]:
    """Return the losses of a graph as 0-dim tensors."""
    return [loss.sum() for loss in graph.losses]


def total(graph: Graph) -> Tensor:
    """Return one loss of all."""
    return torch.stack(scalars(graph)).sum()


def with_others(leaves: list[Tensor], places: set[int]) -> list[Tensor | None]:
    """Return leaves among which some are frozen, or None."""
    params: list[Tensor | None] = list(leaves)
    for place in sorted(places):
        params.insert(place, None if place % 2 else torch.ones(2, device=leaves[0].device))
    return params


def assert_apart(grads: list[Tensor | None], *others: Tensor) -> None:
    """Assert that a write on one gradient changes nothing else."""
    world = World(*others)
    for grad in grads:
        if grad is not None:
            grad.add_(1)
    world.assert_unchanged()


@given(program=functional, dtype=dtypes, fresh=st.booleans(), places=st.sets(st.integers(0, 4)))
def test_a_pass_is_backward_bit_for_bit(
    device: torch.device, program: Program, dtype: torch.dtype, fresh: bool, places: set[int]
) -> None:
    """Also among frozen leaves."""
    ours, theirs = build(program, device, dtype), build(program, device, dtype)
    total(theirs).backward()
    expected = [leaf.grad for leaf in theirs.leaves]
    params, loss = with_others(ours.leaves, places), total(ours)
    with no_hook_yet() if fresh else nullcontext():
        if all(grad is None for grad in expected):
            with pytest.raises(gradkit.UnreachedParamError):
                gradkit.value_and_grads(loss, params)
            return
        value, grads = gradkit.value_and_grads(loss, params)
    present = [
        grad
        for grad, leaf in zip(grads, params, strict=True)
        if leaf is not None and leaf.requires_grad
    ]
    assert sum(grad is None for grad in grads) - sum(grad is None for grad in present) == len(
        places
    )
    assert_same_bits([*present, value], [*expected, loss])
    assert_owned([*present, value], [*ours.leaves, loss])
    pairs = zip(present, expected, strict=True)
    assert all(a.stride() == b.stride() for a, b in pairs if a is not None and b is not None)
    assert_apart(present, *ours.leaves, loss)


@given(
    program=functional,
    fresh=st.booleans(),
    chosen=st.lists(st.sets(st.integers(0, 3)), min_size=4, max_size=4),
    game=st.booleans(),
)
def test_separate_passes_are_a_loop_bit_for_bit(
    device: torch.device, program: Program, fresh: bool, chosen: list[set[int]], game: bool
) -> None:
    """Each loss with respect to the same leaves, or to some of its own, which others may share."""
    ours, theirs = (build(program, device, torch.float64) for _ in range(2))

    def params(graph: Graph) -> list[list[Tensor]]:
        leaves = graph.leaves
        each = zip(chosen if game else chosen[:1] * 4, graph.losses, strict=False)
        return [[x for i, x in enumerate(leaves) if i in which] or leaves for which, _ in each]

    losses, each = scalars(ours), params(ours)
    expected = [
        torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        for loss, leaves in zip(scalars(theirs), params(theirs), strict=True)
    ]
    with no_hook_yet() if fresh else nullcontext():
        try:
            if game:
                rows = gradkit.simultaneous_grads(losses, each)
            else:
                rows = gradkit.per_loss_grads(losses, each[0])
        except gradkit.UnreachedParamError:
            assert all(grad is None for grads in expected for grad in grads)
            return
    every = list(chain.from_iterable(rows))
    assert_same_bits(every, list(chain.from_iterable(expected)))
    assert_owned(every, list(chain.from_iterable(each)))
    for loss, grads in zip(losses, rows, strict=True):  # what leads to them is freed
        if (
            any(grad is not None for grad in grads)
            and type(loss.grad_fn).__name__ == "PowBackward0"
        ):
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()
    assert_apart(every, *ours.leaves, *losses)


def two_steps(graph: Graph, steps: Program, take: Callable[..., Any]) -> list[Any]:
    """Return the gradients of two steps of an inner loop, and the weights behind them."""
    device, dtype = graph.leaves[0].device, graph.leaves[0].dtype
    weights = [leaf * 0.5 for leaf in graph.leaves] if steps.seed % 2 else list(graph.leaves)
    found: list[Any] = []
    for _ in range(2):
        grads = take(total(build(steps, device, dtype, weights)), weights)
        found += grads
        pairs = zip(weights, grads, strict=True)
        weights = [w * 1 if grad is None else w - 0.1 * grad for w, grad in pairs]
    return [*found, *weights]


@given(program=functional, steps=functional, dtype=dtypes, fresh=st.booleans())
def test_inner_loops_are_those_of_autograd_grad(
    device: torch.device, program: Program, steps: Program, dtype: torch.dtype, fresh: bool
) -> None:
    """And so are derivatives of what the steps give."""
    ours, theirs = build(program, device, dtype), build(program, device, dtype)

    def take(loss: Tensor, weights: list[Tensor]) -> Any:
        value, grads = gradkit.value_and_grads(loss, weights, create_graph=True)
        assert value is loss
        return grads

    def expected(loss: Tensor, weights: list[Tensor]) -> Any:
        return torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)

    try:
        with no_hook_yet() if fresh else nullcontext():
            first = two_steps(ours, steps, take)
    except gradkit.GradkitError:  # what the laws of refusals are about
        return
    second = two_steps(theirs, steps, expected)
    assert_same_bits(first, second)
    last = [sum(x.square().sum() for x in found[-2:]) for found in (first, second)]
    _, outer = gradkit.value_and_grads(last[0], ours.leaves)
    assert_same_bits(outer, list(torch.autograd.grad(last[1], theirs.leaves, allow_unused=True)))


class Seeing(TorchFunctionMode):
    """Sees what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def retains(losses: list[Tensor], params: list[Tensor]) -> None:
    losses[-1].retain_grad()


def hook_on_leaf(losses: list[Tensor], params: list[Tensor]) -> None:
    params[0].register_hook(lambda grad: grad * 3)


def of_one_element(losses: list[Tensor], params: list[Tensor]) -> None:
    losses[-1] = losses[-1].reshape(1)


def constant(losses: list[Tensor], params: list[Tensor]) -> None:
    losses[-1] = losses[-1].detach()


def nothing(losses: list[Tensor], params: list[Tensor]) -> None:
    pass


AROUND: Contexts = {
    "inference mode": (torch.inference_mode, nothing),
    "a function mode": (Seeing, nothing),
    "forward mode": (forward_ad.dual_level, nothing),
    "checked": (gradkit.checked, nothing),
    "a loss that retains its gradient": (nullcontext, retains),
    "a hook of a leaf": (nullcontext, hook_on_leaf),
    "a loss with a dimension": (nullcontext, of_one_element),
    "a constant": (nullcontext, constant),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_call_changes_no_gradient(device: torch.device, name: str) -> None:
    context, change = AROUND[name]

    def made() -> tuple[list[Tensor], list[Tensor]]:
        params = [torch.full((2,), float(i + 2), device=device, requires_grad=True) for i in (0, 1)]
        losses = [(params[0] * params[1]).sum(), (params[0] * 3).sum()]
        change(losses, params)
        return losses, params

    theirs, leaves = made()
    expected = [
        torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        if loss.requires_grad
        else (None, None)
        for loss in theirs
    ]
    losses, params = made()
    with context():
        per_loss = gradkit.per_loss_grads(losses, params)
    for grads, others in zip(per_loss, expected, strict=True):
        assert_same_bits([None if grad is None else grad.reshape(2) for grad in grads], others)
    losses, params = made()
    with context():
        _, grads = gradkit.value_and_grads(losses, params)
    theirs, leaves = made()
    torch.autograd.backward([loss for loss in theirs if loss.requires_grad])
    assert_same_bits(grads, [leaf.grad for leaf in leaves])


@pytest.mark.parametrize("fresh", [True, False])
def test_functions_that_make_the_gradients_of_leaves(device: torch.device, fresh: bool) -> None:
    x, y = (torch.ones(2, 2, device=device, requires_grad=True) for _ in range(2))
    elsewhere = Halve.apply(x, y)
    of_leaves, of_values = Halve.apply(x, y), Halve.apply(x * 1, y * 1)
    with no_hook_yet() if fresh else nullcontext():
        _, first = gradkit.value_and_grads(of_leaves.sum(), [x])
        _, second = gradkit.value_and_grads(of_values.sum(), [x])
        _, third = gradkit.value_and_grads((x * y).sum(), [x, y])
    assert first[0].tolist() == second[0].tolist() == [[0.5, 0.5]] * 2
    assert third[0].tolist() == [[1, 1]] * 2
    del elsewhere


def test_a_function_that_writes_on_its_cotangent_is_seen(device: torch.device) -> None:
    x, y = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    loss = ((Scribble.apply(x * 1) + y) * torch.ones_like(x)).sum()
    raises = pytest.raises(gradkit.UnsupportedGraphError, match="has written in place")
    with no_hook_yet(), raises:
        gradkit.value_and_grads(loss, [x, y])


@pytest.mark.parametrize("separate", [True, False])
def test_in_a_transform_the_call_raises(device: torch.device, separate: bool) -> None:
    call: Any = gradkit.per_loss_grads if separate else gradkit.value_and_grads

    def of(x: Tensor) -> Tensor:
        w = torch.ones(2, device=device, requires_grad=True)
        call([(w * 3).sum(), (x * w).sum()], [w])
        return x.sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match=r"outside of torch\.func"):
        torch.func.grad(of)(torch.ones(2, device=device))


def test_params_that_can_be_read_once_are_read_once(device: torch.device) -> None:
    model = nn.Linear(2, 1, device=device)
    x = torch.ones(3, 2, device=device)
    model.bias.register_hook(lambda grad: grad * 2)
    _, grads = gradkit.value_and_grads(model(x).sum(), model.parameters())
    assert [tuple(grad.shape) for grad in grads] == [(1, 2), (1,)]
    assert grads[1].tolist() == [6]


def test_the_graph_is_freed(device: torch.device) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    loss = (x * x).sum()
    gradkit.value_and_grads(loss, [x])
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("retain", [None, True])
def test_a_value_below_another_takes_the_nodes_between_into_account(
    device: torch.device, retain: bool | None
) -> None:
    """Also by way of a node that the loss is computed from directly."""
    v = torch.randn(4, 3, device=device, requires_grad=True)
    low = v * 1
    between = low * 2
    targets = torch.tensor([0, 1, 2, 0], device=device)
    high = torch.nn.functional.multi_margin_loss(between, targets, reduction="none")
    loss = (high**3).sum() + between.sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match="multi_margin_loss"):
        gradkit.value_and_grads(loss, [low, high], create_graph=True, retain_graph=retain)


def test_players_share_no_gradient(device: torch.device) -> None:
    x, y = (torch.tensor(2.0, device=device, requires_grad=True) for _ in range(2))
    with no_hook_yet():
        first, second = gradkit.simultaneous_grads([x + y, x + y + 1], [{"x": x}, {"x": x, "y": y}])
    first["x"].add_(1)
    assert [first["x"].item(), second["x"].item(), second["y"].item()] == [2, 1, 1]


@pytest.mark.parametrize("fresh", [True, False])
def test_losses_of_several_dtypes(device: torch.device, fresh: bool) -> None:
    x = torch.full((3,), 2.0, device=device, dtype=torch.float64, requires_grad=True)
    losses = {"double": (x * x).sum(), "half": x.half().sum(), "float": x.float().square().sum()}
    with no_hook_yet() if fresh else nullcontext():
        grads = gradkit.per_loss_grads(losses, x)
    assert {name: grad.tolist() for name, grad in grads.items()} == {
        "double": [4.0] * 3, "half": [1.0] * 3, "float": [4.0] * 3,
    }  # fmt: skip


def test_gradients_that_are_the_cotangent_are_not_shared(device: torch.device) -> None:
    x = torch.tensor(2.0, device=device, requires_grad=True)
    with no_hook_yet():
        first, second, third = gradkit.per_loss_grads([x + 1, x + 2, x.clone()], x)
    first.add_(1)
    assert [first.item(), second.item(), third.item()] == [2, 1, 1]


def test_a_lone_loss_and_one_twice(device: torch.device) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    loss = (x * x).sum()
    assert gradkit.per_loss_grads((3 * x).sum(), x).tolist() == [3, 3]
    first, second = gradkit.per_loss_grads((loss, loss), x)
    assert first.tolist() == second.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_hook_that_writes_on_what_it_has_kept_of_an_earlier_pass(device: torch.device) -> None:
    """A common accumulator: `kept[0].add_(grad)`."""
    x, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []

    def add(grad: Tensor) -> None:
        if kept:
            kept[0].add_(grad)
        kept.append(grad)

    h = x + b
    h.register_hook(add)
    first, second = gradkit.per_loss_grads([(h * 2).sum(), (h * 3).sum()], [x, b])
    assert [grad.tolist() for grad in first] == [[2, 2]] * 2
    assert [grad.tolist() for grad in second] == [[3, 3]] * 2


class Workspace(torch.autograd.Function):
    """Gives its gradients in a tensor that it uses again."""

    space: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.mul(grad, 1, out=Workspace.space)


def test_a_function_that_uses_its_memory_again(device: torch.device) -> None:
    Workspace.space = torch.empty(2, device=device)
    x, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    h = Workspace.apply(x + b)
    first, second = gradkit.per_loss_grads([(h * 2).sum(), (h * 3).sum()], [x, b])
    assert [grad.tolist() for grad in (*first, *second)] == [[2, 2]] * 2 + [[3, 3]] * 2


class Cleared(torch.autograd.Function):
    """Frees what it has saved as soon as its backward reads it, as torch lets it."""

    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(*(x * i for i in range(1, 40)))
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        first, *_ = ctx.saved_tensors
        return grad * 3 + 0 * first


def test_what_a_node_has_let_go_in_a_pass_is_not_released_again(device: torch.device) -> None:
    """A wrapper of what it had saved would write to freed memory."""
    for _ in range(20):
        x, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
        trunk = torch.tanh(x * b)
        losses = [Cleared.apply(trunk).sum(), (trunk * 3).sum()]
        first, second = gradkit.per_loss_grads(losses, [x, b])
        assert_same_bits(first, second)


def test_a_graph_that_a_hook_frees_in_a_pass(device: torch.device) -> None:
    for _ in range(20):
        x, b = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))
        trunk = torch.tanh(x * b)
        top = torch.cat([trunk * 2, trunk])[(torch.tensor([0, 3], device=device),)]
        total = top.sum()
        freed: list[bool] = []

        def free(grad: Tensor, freed: list[bool] = freed, total: Tensor = total) -> None:
            if not freed:
                freed.append(True)
                torch.autograd.grad(total, trunk)  # noqa: B023

        value = top * 1.0
        value.register_hook(free)
        try:
            gradkit.per_loss_grads([value.sum(), (trunk * 3).sum()], [x, b])
        except gradkit.FreedGraphError:
            continue


def test_what_hooks_have_packed_is_freed_where_the_trunk_is_not_asked_for(
    device: torch.device,
) -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    packed: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor.detach())
        packed.append(weakref.ref(box))
        return box

    trunk = nn.Linear(4, 4, device=device)
    heads = [nn.Linear(4, 1, device=device) for _ in range(3)]
    features = torch.tanh(trunk(torch.ones(2, 4, device=device)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        losses = [torch.tanh(head(features)).square().mean() for head in heads]
    gradkit.per_loss_grads(losses, heads)
    gc.collect()
    assert packed
    assert not any(box() for box in packed)


def test_not_many_passes_hold_what_their_gradients_are_views_of(device: torch.device) -> None:
    """Those of a concatenation are parts of one cotangent."""
    x, y = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    sizes: list[int] = []
    original = vars(passes)["owned_of_each"]

    def noted(each: list[Any], params: Any) -> Any:
        sizes.append(len(each))
        return original(each, params)

    losses = [(torch.cat([x, y]) * i).sum() for i in range(10)]
    with no_hook_yet(), patch.object(passes, "owned_of_each", noted):
        each = gradkit.per_loss_grads(losses, [x, y])
    assert sum(sizes) == 10
    assert max(sizes) <= 4
    assert_owned(chain.from_iterable(each), [x, y] * 10)


def test_a_hook_that_the_pass_itself_registers(device: torch.device) -> None:
    """The first hook of the process: what was read before the pass knows none."""
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    with no_hook_yet():
        h = w + 1
        loss = (h.exp() * v).sum()

        def register(grad: Tensor) -> Tensor:
            h.register_hook(lambda grad: grad.mul_(100))
            return grad.clone()

        functions = {"w": torch.clone, "v": register}
        with pytest.raises(gradkit.UnsupportedGraphError, match="has written in place"):
            gradkit.value_and_reduced_grads(loss, {"w": w, "v": v}, functions)


def test_special_points_beside_a_function_of_a_leaf_are_refused(device: torch.device) -> None:
    zero, x = (torch.zeros(2, 2, device=device, requires_grad=True) for _ in range(2))
    loss = nn.functional.softshrink(zero, 0.0).sum() + Halve.apply(x, x).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match="a threshold of zero"):
        gradkit.value_and_grads(loss, [zero, x])


class Own(Tensor):
    """A subclass, as users have them."""


@pytest.mark.parametrize("fresh", [True, False])
def test_a_retained_value_of_a_subclass_keeps_its_class(device: torch.device, fresh: bool) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    own = (w * 2).as_subclass(Own)
    own.retain_grad()
    w.register_hook(lambda _: None).remove()
    with no_hook_yet() if fresh else nullcontext():
        _, (grad,) = gradkit.value_and_grads(own.exp().sum(), [own])
    assert type(grad) is type(torch.autograd.grad((own * 1).sum(), own)[0])


COUNTED: dict[str, Callable[[dict[str, Tensor], Any], object]] = {
    "value_and_grads": lambda losses, nets: gradkit.value_and_grads(losses["a"], nets["a"]),
    "value_and_grads, two losses": lambda losses, nets: gradkit.value_and_grads(losses, nets),
    "per_loss_grads": lambda losses, nets: gradkit.per_loss_grads(losses, nets),
    "per_loss_grads, a vector": lambda losses, nets: gradkit.per_loss_grads(
        torch.stack([*losses.values()]), nets
    ),
    "simultaneous_grads": lambda losses, nets: gradkit.simultaneous_grads(losses, nets),
    "vjp": lambda losses, nets: gradkit.vjp(
        losses, nets, {key: torch.ones_like(loss) for key, loss in losses.items()}
    ),
}


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_gradients_of_a_plain_call_are_not_copied(
    device: torch.device, name: str, hooks: bool
) -> None:
    """Whether one is owned shows in its count of references, which each list more would raise."""
    nets = {key: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for key in "ab"}
    x = torch.randn(5, 3, device=device)
    losses = {key: net.to(device)(x).square().mean() for key, net in nets.items()}
    copies: list[Tensor] = []

    def counted(grad: Tensor, param: Tensor) -> Tensor:
        copies.append(grad)
        return grad.clone()

    looks = nullcontext() if hooks else no_hook_yet()
    with looks, patch.object(ownership, "copy_for", counted):
        COUNTED[name](losses, nets)
    assert not copies
