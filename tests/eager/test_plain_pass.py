"""The short way of the common call gives what the long way gives, which `retain_graph=False` takes.

Both give what `.backward()` gives, and raise the same errors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import gradkit
from tests.eager import short_ways
from tests.eager.short_ways import no_hook_yet, outcome, plain_process, with_others
from tests.helpers import Halve, Scribble, World, assert_owned, assert_same_bits
from tests.strategies import HOOKLESS, OPS, WRITING, Graph, Program, build, programs

dtypes = st.sampled_from([torch.float64, torch.float32])
noting_short_calls = partial(short_ways.noting_short_calls, "plain_value_and_grads")


def total(graph: Graph) -> Tensor:
    """Return one loss of all."""
    return torch.stack([loss.sum() for loss in graph.losses]).sum()


def assert_same_outcome(first: Any, second: Any) -> None:
    if isinstance(first[0], type):
        assert first == second
        return
    assert_same_bits([first[0]], [second[0]])
    assert_same_bits(first[1], second[1])


def of_backward(graph: Graph) -> list[Tensor | None]:
    total(graph).backward()
    return [leaf.grad for leaf in graph.leaves]


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes)
def test_among_hooks_and_functions(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    short, long = build(program, device, dtype), build(program, device, dtype)
    first = outcome(lambda: gradkit.value_and_grads(total(short), short.leaves))
    second = outcome(lambda: gradkit.value_and_grads(total(long), long.leaves, retain_graph=False))
    assert_same_outcome(first, second)
    assert all(leaf.grad is None for leaf in short.leaves)


@given(program=programs(ops=HOOKLESS, leaf_hooks=False), dtype=dtypes, fresh=st.booleans())
def test_the_short_way_is_backward_bit_for_bit(
    device: torch.device, program: Program, dtype: torch.dtype, fresh: bool
) -> None:
    ours, long = build(program, device, dtype), build(program, device, dtype)
    expected = of_backward(build(program, device, dtype))
    loss = total(ours)
    functions = "halve" in [op for op, _, _ in program.ops]
    process = plain_process(functions=functions)
    with no_hook_yet() if fresh else nullcontext(), process, noting_short_calls() as n:
        first = outcome(lambda: gradkit.value_and_grads(loss, ours.leaves))
    second = outcome(lambda: gradkit.value_and_grads(total(long), long.leaves, retain_graph=False))
    assert_same_outcome(first, second)
    if all(grad is None for grad in expected):
        assert first[0] is gradkit.UnreachedParamError
        return
    assert n == [True] or functions  # not where a leaf's gradient is a Function's own
    value, grads = first
    assert_same_bits(grads, expected)
    assert_same_bits([value], [loss])
    assert_owned([*grads, value], [*ours.leaves, loss])
    world = World(*ours.leaves, loss)
    for grad, theirs in zip(grads, expected, strict=True):
        if grad is not None and theirs is not None:
            assert grad.stride() == theirs.stride()
            grad.add_(1)
    world.assert_unchanged()


def two_steps(graph: Graph, steps: Program, retain: bool | None) -> list[Any]:
    """Return the gradients of two steps of an inner loop, and the weights behind them."""
    device, dtype = graph.leaves[0].device, graph.leaves[0].dtype
    options: dict[str, Any] = {"create_graph": True, "retain_graph": retain}
    weights = [leaf * 0.5 for leaf in graph.leaves] if steps.seed % 2 else list(graph.leaves)
    found: list[Any] = []
    for _ in range(2):
        loss = total(build(steps, device, dtype, weights))
        value, grads = gradkit.value_and_grads(loss, weights, **options)
        assert value is loss
        found += grads
        pairs = zip(weights, grads, strict=True)
        weights = [w * 1 if grad is None else w - 0.1 * grad for w, grad in pairs]
    return [*found, *weights]


@given(program=programs(), steps=programs(ops=(*OPS, *WRITING)), dtype=dtypes)
def test_inner_loops_are_the_same(
    device: torch.device, program: Program, steps: Program, dtype: torch.dtype
) -> None:
    """With hooks and Functions, and with derivatives of what the steps give."""
    short, long = build(program, device, dtype), build(program, device, dtype)
    first = outcome(lambda: two_steps(short, steps, None))
    second = outcome(lambda: two_steps(long, steps, True))
    assert_same_steps(first, second, short, long)


@given(
    program=programs(ops=HOOKLESS, leaf_hooks=False),
    steps=programs(ops=tuple(op for op in HOOKLESS if op != "halve"), leaf_hooks=False),
    dtype=dtypes,
    fresh=st.booleans(),
)
def test_inner_loops_take_the_short_way(
    device: torch.device, program: Program, steps: Program, dtype: torch.dtype, fresh: bool
) -> None:
    short, long = build(program, device, dtype), build(program, device, dtype)
    with no_hook_yet() if fresh else nullcontext(), plain_process(), noting_short_calls() as taken:
        first = outcome(lambda: two_steps(short, steps, None))
    second = outcome(lambda: two_steps(long, steps, True))
    assert_same_steps(first, second, short, long)
    if isinstance(first, list) and all(isinstance(grad, Tensor) for grad in first):
        assert taken == [True, True]


def assert_same_steps(first: Any, second: Any, short: Graph, long: Graph) -> None:
    if not isinstance(first, list):
        assert first == second
        return
    assert_same_bits(first, second)
    outer = [
        gradkit.value_and_grads(sum(x.square().sum() for x in found[-2:]), graph.leaves)[1]
        for found, graph in ((first, short), (second, long))
    ]
    assert_same_bits(*outer)


def losses_that_raise(device: torch.device) -> dict[str, tuple[Any, Any]]:
    """Return (losses, params) by what is wrong with them, made anew."""
    x, w = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    freed = (x * x).sum()
    freed.backward()
    x.grad = None
    changed = torch.ones(2, device=device, requires_grad=True) * 1
    square = (changed * changed).sum()
    changed.add_(1)
    hooked = torch.ones(2, device=device, requires_grad=True)
    grouped = torch.ones(2, device=device, requires_grad=True)
    torch.autograd.graph.register_multi_grad_hook([grouped], lambda _: None)
    node = torch.autograd.graph.get_gradient_edge(hooked).node
    node.register_prehook(lambda grads: None)
    written = x * 1
    written.register_hook(lambda grad: grad.mul_(2))
    return {
        "no tensor": (1.0, [x]),
        "integers": (torch.ones((), device=device, dtype=torch.long), [x]),
        "two elements": (x * 2, [x]),
        "no graph": (torch.ones((), device=device), [x]),
        "freed": (freed, [x]),
        "unreached": ((x * x).sum(), [w]),
        "frozen": ((x * x).sum(), [w.detach()]),
        "no params": ((x * x).sum(), []),
        "params of integers": ((x * x).sum(), [x, torch.ones(2, device=device).long()]),
        "a string": ((x * x).sum(), [x, "w"]),
        "changed": (square, [x, changed]),
        "a pre-hook": ((hooked * 2).sum(), [hooked]),
        "a hook of several": ((grouped * 2).sum(), [grouped]),
        "a hook that writes": (((written + w) * torch.ones_like(w)).sum(), [x, w]),
        "an exhausted iterator": ((x * x).sum(), iter(())),
    }


@pytest.mark.parametrize("wrong", losses_that_raise(torch.device("cpu")))
def test_errors_are_the_same(device: torch.device, wrong: str) -> None:
    losses, params = losses_that_raise(device)[wrong]
    with pytest.raises(gradkit.GradkitError) as short:
        gradkit.value_and_grads(losses, params)
    losses, params = losses_that_raise(device)[wrong]
    with pytest.raises(gradkit.GradkitError) as long:
        gradkit.value_and_grads(losses, params, retain_graph=False)
    assert type(short.value) is type(long.value)
    assert str(short.value) == str(long.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [*product(["unused", "create_graph", "retain_graph"], [1, "all", ["none"]]), ("unused", None)],
)
def test_options_are_read_first(device: torch.device, option: str, value: Any) -> None:
    with pytest.raises(gradkit.OptionError):
        gradkit.value_and_grads(1.0, [], **{option: value})


class Seeing(TorchFunctionMode):
    """Sees what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    """A subclass, as users have them."""


def keep_grad_of_loss(loss: Tensor, params: list[Tensor]) -> None:
    loss.retain_grad()


def hook_on_leaf(loss: Tensor, params: list[Tensor]) -> None:
    params[0].register_hook(lambda grad: grad * 3)


def nothing(loss: Tensor, params: list[Tensor]) -> None:
    pass


SPECIAL: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Any]] = {
    "inference mode": (torch.inference_mode, nothing),
    "a function mode": (Seeing, nothing),
    "forward mode": (forward_ad.dual_level, nothing),
    "checked": (gradkit.checked, nothing),
    "a loss that retains its gradient": (nullcontext, keep_grad_of_loss),
    "a hook of a leaf": (nullcontext, hook_on_leaf),
}


@pytest.mark.parametrize("special", SPECIAL)
def test_what_needs_the_long_way_takes_it(device: torch.device, special: str) -> None:
    def made() -> tuple[Tensor, list[Tensor]]:
        params = [torch.full((2,), float(i + 2), device=device, requires_grad=True) for i in (0, 1)]
        loss = (params[0] * params[1]).sum()
        SPECIAL[special][1](loss, params)
        return loss, params

    theirs, leaves = made()
    theirs.backward()
    loss, params = made()
    with SPECIAL[special][0](), noting_short_calls() as taken:
        _, grads = gradkit.value_and_grads(loss, params)
    assert taken in ([], [False])
    assert_same_bits(grads, [leaf.grad for leaf in leaves])


@pytest.mark.parametrize("fresh", [True, False])
def test_functions_that_make_the_gradients_of_leaves_take_the_long_way(
    device: torch.device, fresh: bool
) -> None:
    x, y = (torch.ones(2, 2, device=device, requires_grad=True) for _ in range(2))
    elsewhere = Halve.apply(x, y)
    of_leaves, of_values = Halve.apply(x, y), Halve.apply(x * 1, y * 1)
    process = plain_process(functions=True)
    with no_hook_yet() if fresh else nullcontext(), process, noting_short_calls() as taken:
        _, first = gradkit.value_and_grads(of_leaves.sum(), [x])
        _, second = gradkit.value_and_grads(of_values.sum(), [x])
        _, third = gradkit.value_and_grads((x * y).sum(), [x, y])
        gradkit.value_and_grads((Halve.apply(x * 1, y * 1) * y).sum(), [y], create_graph=True)
    assert taken == [False, True, True, False]
    assert first[0].tolist() == second[0].tolist() == [[0.5, 0.5]] * 2
    assert third[0].tolist() == [[1, 1]] * 2
    del elsewhere


def test_a_function_that_writes_on_its_cotangent_is_seen(device: torch.device) -> None:
    x, y = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    loss = ((Scribble.apply(x * 1) + y) * torch.ones_like(x)).sum()
    raises = pytest.raises(gradkit.UnsupportedGraphError, match="has written in place")
    with no_hook_yet(), plain_process(functions=True), raises:
        gradkit.value_and_grads(loss, [x, y])


@given(
    program=programs(ops=HOOKLESS, leaf_hooks=False),
    dtype=dtypes,
    places=st.sets(st.integers(0, 4), min_size=1),
    create=st.booleans(),
)
def test_leaves_among_frozen_ones(
    device: torch.device, program: Program, dtype: torch.dtype, places: set[int], create: bool
) -> None:
    short, long = build(program, device, dtype), build(program, device, dtype)
    params = with_others(short.leaves, places)
    functions = "halve" in [op for op, _, _ in program.ops]
    options = {"create_graph": create}
    with plain_process(functions=functions), noting_short_calls() as taken:
        first = outcome(lambda: gradkit.value_and_grads(total(short), params, **options))
        others = with_others(long.leaves, places)
        options["retain_graph"] = create
        second = outcome(lambda: gradkit.value_and_grads(total(long), others, **options))
    if isinstance(first[0], type):
        assert first == second
        return
    assert taken == [True] or functions
    assert_same_bits([first[0]], [second[0]])
    assert_same_bits(first[1], second[1])
    pairs = zip(params, first[1], strict=True)
    assert all(grad is None for leaf, grad in pairs if leaf is None or not leaf.requires_grad)


def test_intermediate_values_and_subclasses_take_the_long_way(device: torch.device) -> None:
    x, y = (torch.ones(2, 2, device=device, requires_grad=True) for _ in range(2))
    own = torch.ones(2, device=device).as_subclass(Own).requires_grad_()
    middle = x * 2
    with plain_process(), noting_short_calls() as taken:
        gradkit.value_and_grads((own * 2).as_subclass(Tensor).sum(), [own])
        gradkit.value_and_grads((middle * y).sum(), [middle])
        gradkit.value_and_grads((x * y).sum(), [x, None, x])
    assert taken == [False] * 3


def test_in_a_transform_the_call_raises_as_before(device: torch.device) -> None:
    def of(x: Tensor) -> Tensor:
        w = torch.ones(2, device=device, requires_grad=True)
        return gradkit.value_and_grads((x * w).sum(), [w])[1][0].sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match=r"outside of torch\.func"):
        torch.func.grad(of)(torch.ones(2, device=device))


def test_what_safe_retain_keeps_is_kept(device: torch.device) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    middle = x * 2
    with gradkit.safe_retain(middle) as kept, noting_short_calls() as taken:
        gradkit.value_and_grads((middle * 3).sum(), [x])
    assert kept.grads.tolist() == [3, 3]
    assert not taken


def test_params_that_can_be_read_once_are_read_once(device: torch.device) -> None:
    model = nn.Linear(2, 1, device=device)
    x = torch.ones(3, 2, device=device)
    model.bias.register_hook(lambda grad: grad * 2)  # the short way ends after the params
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
    v, g = (torch.randn(4, n, device=device, requires_grad=True) for n in (3, 1))
    low = v * 1
    between = low * 2
    high = torch._weight_norm(between, g, 0)
    loss = (high**3).sum() + between.sum()
    with plain_process(), pytest.raises(gradkit.UnsupportedGraphError, match="weight_norm"):
        gradkit.value_and_grads(loss, [low, high], create_graph=True, retain_graph=retain)


@pytest.mark.parametrize("separate", [True, False])
def test_the_first_hook_of_the_process_is_registered_by_the_pass(
    device: torch.device, separate: bool
) -> None:
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    h = w + 1
    hooks: list[Any] = []

    def unpack(saved: Tensor) -> Tensor:
        if not hooks:
            hooks.append(h.register_hook(lambda grad: grad.mul_(100)))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        loss = (h.exp() * v).sum()
    raises = pytest.raises(gradkit.UnsupportedGraphError, match="has written in place")
    with no_hook_yet(), plain_process(), raises:
        if separate:
            gradkit.per_loss_grads([loss], [w, v])
        else:
            gradkit.value_and_grads(loss, [w, v])
