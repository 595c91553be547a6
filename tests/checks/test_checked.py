"""`checked`: every gradient is right, and what wrote on one is named."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import optimizer

import gradkit
from gradkit._checks.checked import is_checked
from tests.helpers import Scribble, Sevenfold, assert_same_bits, writes_on_copies
from tests.strategies import OPS, SIZE, WRITING, Program, build, programs


def clip(grad: Tensor) -> None:
    grad.mul_(10)


def clip_data(grad: Tensor) -> None:
    grad.data.mul_(10)


def clip_list(grad: Tensor) -> None:
    torch._foreach_mul_([grad], 10)


def clip_out(grad: Tensor) -> None:
    torch.mul(grad, 10, out=grad)


def clip_several(grad: Tensor) -> None:
    parts = (grad / 10, grad * 10)
    torch.aminmax(torch.stack(parts), dim=0, out=(torch.empty_like(grad), grad))


@pytest.mark.parametrize("hook", [clip, clip_data, clip_list, clip_out, clip_several])
def test_a_hook_is_named_with_its_line_and_spoils_nothing(
    device: torch.device, hook: Callable[[Tensor], None]
) -> None:
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    z = a * 1
    z.register_hook(hook)
    loss = ((z + b) * torch.ones(2, device=device)).sum()
    where = rf"params\['b'\]: {hook.__name__} \(.*test_checked.py, line \d+\) wrote .* after"
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match=where):
        _, grads = gradkit.value_and_grads(loss, {"a": a, "b": b})
    assert grads["a"].tolist() == [10, 10]
    assert grads["b"].tolist() == [1, 1]


def test_a_module_s_hook_is_named_with_the_module(device: torch.device) -> None:
    layer = nn.Linear(2, 2).to(device)
    x, other = (torch.ones(1, 2, device=device, requires_grad=True) for _ in range(2))

    def scale(module: nn.Module, grads: object, outputs: tuple[Tensor, ...]) -> None:
        outputs[0].mul_(3)

    layer.register_full_backward_hook(scale)
    loss = (layer(x * 1) + other).square().sum()
    match = r"params\['other'\]: a backward hook of Linear, .*scale"
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match=match):
        _, grads = gradkit.value_and_grads(loss, {"other": other, "x": x})
    assert_same_bits([grads["other"]], [2 * (layer(x) + other).detach()])


def test_functions_non_leaves_and_each_of_several_losses(device: torch.device) -> None:
    a, w = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    y = Scribble.apply(w)
    losses = {"one": ((a + y) * torch.ones(2, device=device)).sum(), "two": (a * 3).sum()}
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match=r"Scribble.backward \("):
        rows = gradkit.per_loss_grads(losses, {"a": a, "y": y, "w": w})
    assert {name: None if g is None else g.tolist() for name, g in rows["one"].items()} == {
        "a": [1, 1], "y": [1, 1], "w": [7, 7],
    }  # fmt: skip
    assert rows["two"]["a"].tolist() == [3, 3]


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_writes(device: torch.device) -> None:
    layer = nn.Linear(2, 2).to(device)
    layer.weight.register_hook(lambda grad: grad * 2)
    x = torch.ones(3, 2, device=device)
    with gradkit.checked():
        _, ours = gradkit.value_and_grads(layer(x)[:, torch.tensor([0, 0])].sum(), layer)
    _, plain = gradkit.value_and_grads(layer(x)[:, torch.tensor([0, 0])].sum(), layer)
    assert_same_bits(ours.values(), plain.values())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True 1"), ("0", "False 0"), ("", "False 0")]
)
def test_the_environment_variable(device: torch.device, value: str, expected: str) -> None:
    code = (
        "from gradkit._checks.checked import is_checked; from torch.optim import optimizer; "
        "print(is_checked(), len(optimizer._global_optimizer_post_hooks))"
    )
    environment = {**os.environ, "GRADKIT_CHECKED": value}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


dtypes = st.sampled_from([torch.float64, torch.float32])


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes)
def test_results_are_those_of_writers_on_copies(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    """Bit for bit, in one pass and for each loss, whatever is spoilt in `.backward()`."""
    graph = build(program, device, dtype)
    with writes_on_copies():
        torch.autograd.backward(graph.losses)
    expected = [leaf.grad for leaf in graph.leaves]
    assume(any(grad is not None for grad in expected))
    joint, single = build(program, device, dtype), build(program, device, dtype)
    with gradkit.checked(), warnings.catch_warnings(action="ignore"):
        _, grads = gradkit.value_and_grads(joint.losses, joint.leaves)
        rows = gradkit.per_loss_grads(single.losses, single.leaves)
    assert_same_bits(grads, expected)
    for index, row in enumerate(rows):
        graph = build(program, device, dtype)
        with writes_on_copies():
            graph.losses[index].backward()
        single_row = [None if grad is None else grad.reshape(SIZE, SIZE) for grad in row]
        assert_same_bits(single_row, [leaf.grad for leaf in graph.leaves])


@pytest.mark.parametrize("levels", [0, 1])
def test_func_and_its_transforms(device: torch.device, levels: int) -> None:
    a, w = torch.ones(3, device=device), torch.full((3,), 2.0, device=device)

    def loss(a: Tensor, w: Tensor) -> Tensor:
        y = a * 1
        z = y + Sevenfold.apply(w)
        return (z * torch.arange(1.0, z.numel() + 1, device=device).reshape(z.shape)).sum()

    options: Any = {"argnums": (0, 1), "create_graph": False}
    call: Callable[..., Any] = gradkit.func.value_and_grads(loss, **options)
    for _ in range(levels):
        call = torch.vmap(call)
        a, w = a.expand(2, 3), w.expand(2, 3)
    with gradkit.checked():
        _, (of_a, of_w) = call(a, w)
    weights = torch.arange(1.0, 4, device=device).expand_as(a)
    assert torch.equal(of_a, weights)
    assert torch.equal(of_w, weights * 7)


@pytest.mark.parametrize("kind", ["node", "module"])
def test_a_hook_on_what_a_node_makes_changes_its_own_alone(device: torch.device, kind: str) -> None:
    """Also if it was registered before, and writes on one of two that are the same tensor."""
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))

    def tenfold(grads: tuple[Tensor, ...]) -> None:
        grads[0].mul_(10)

    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    module = Sum()
    if kind == "module":
        module.register_full_backward_hook(lambda _, inputs, outputs: tenfold(inputs))
    z = module(a, b)
    if kind == "node":
        z.grad_fn.register_hook(lambda inputs, outputs: tenfold(inputs))
    handles = len(z.grad_fn.register_hook(lambda *_: None).hooks_dict_ref() or ())
    loss = (z * torch.ones(2, device=device)).sum()
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match="tenfold"):
        _, (of_a, of_b) = gradkit.value_and_grads(loss, [a, b], retain_graph=True)
    assert of_a.tolist() == [10, 10]
    assert of_b.tolist() == [1, 1]
    left = z.grad_fn.register_hook(lambda *_: None).hooks_dict_ref() or ()
    assert len(left) == handles + 1  # the one that counts them


@pytest.mark.parametrize("layout", ["dense", "expanded", "sparse"])
def test_a_hook_sees_the_layout_that_it_sees_elsewhere(device: torch.device, layout: str) -> None:
    seen: list[tuple[object, ...]] = []

    def look(grad: Tensor) -> None:
        seen.append((grad.layout, grad.stride() if grad.layout == torch.strided else None))

    a, b = (torch.ones(2, 3, device=device, requires_grad=True) for _ in range(2))
    for leaf in (a, b):
        leaf.register_hook(look)
    index = torch.tensor([0, 1], device=device)

    def loss() -> Tensor:
        if layout == "sparse":
            rows = [torch.nn.functional.embedding(index, leaf, sparse=True) for leaf in (a, b)]
            return (rows[0] + rows[1]).sum()
        return (a + b).sum() if layout == "expanded" else (a + b).square().sum()

    gradkit.value_and_grads(loss(), [a, b])
    with gradkit.checked():
        gradkit.value_and_grads(loss(), [a, b])
    assert seen[:2] == seen[2:]


def test_hooks_of_a_node_keep_their_order_and_handles(device: torch.device) -> None:
    leaf = torch.ones(2, device=device, requires_grad=True)
    total = leaf + leaf
    seen: list[int] = []
    handles = [
        total.grad_fn.register_hook(lambda *_, index=index: seen.append(index))
        for index in range(3)
    ]
    with gradkit.checked():
        gradkit.value_and_grads((total * 2).sum(), [leaf], retain_graph=True)
        handles[1].remove()
        gradkit.value_and_grads((total * 2).sum(), [leaf], retain_graph=True)
    total.sum().backward()
    assert seen == [0, 1, 2, 0, 2, 0, 2]


def test_weights_keep_their_graph(device: torch.device) -> None:
    leaf = torch.ones(2, device=device, requires_grad=True)
    leaf.register_hook(lambda grad: grad * 1)
    weight = torch.tensor(3.0, device=device, requires_grad=True)
    loss = (leaf**2).sum()
    with gradkit.checked(), torch.no_grad():
        _, (grad,) = gradkit.value_and_grads([loss], [leaf], weights=[weight], create_graph=True)
    assert torch.autograd.grad(grad.sum(), weight)[0].item() == 4


def held() -> Generator[None]:
    with gradkit.checked():
        yield


def test_blocks_that_overlap(device: torch.device) -> None:
    """The one that began first may end first, and the other is checked to its end."""
    first, second = held(), held()
    next(first)
    next(second)
    first.close()
    assert is_checked()
    second.close()
    assert not is_checked()


def test_a_block_that_ends_in_another_thread(device: torch.device) -> None:
    hooks = len(optimizer._global_optimizer_post_hooks)
    block = held()
    next(block)
    assert is_checked()
    assert len(optimizer._global_optimizer_post_hooks) == hooks + 1
    other = Thread(target=block.close)
    other.start()
    other.join()
    assert not is_checked()
    assert len(optimizer._global_optimizer_post_hooks) == hooks


@pytest.mark.parametrize("of", ["a sum", "a view"])
def test_a_gradient_that_a_hook_above_has_written_on(device: torch.device, of: str) -> None:
    """With respect to an intermediate value, too: what torch hands on is a copy there."""
    w = torch.ones(3, device=device, requires_grad=True)
    h = w * 1
    above = h.sum() if of == "a sum" else h.view(3, 1)
    above.register_hook(lambda grad: grad.mul_(2))
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match=r"params\['h'\]"):
        _, grads = gradkit.value_and_grads((above * 3).sum(), {"h": h, "w": w})
    assert_same_bits(grads.values(), [torch.full_like(w, 6)] * 2)


def test_a_batched_pass_of_another_thread(device: torch.device) -> None:
    """Its gradients are batches, which arrive at the same parameters."""
    w = torch.ones(3, device=device, requires_grad=True)
    z = (w * 1).cpu()  # whose hook does not hold up the device's thread, which the other needs
    others: list[Tensor] = []

    def another() -> None:
        with warnings.catch_warnings():  # of the fallback, as its hook cannot take a batch
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
            others.append(gradkit.gram([(w * w).sum(), w.sum()], [w]))

    def start_another(_: Tensor) -> None:
        thread = Thread(target=another)
        thread.start()
        thread.join()

    z.register_hook(start_another)
    with gradkit.checked():
        _, (grad,) = gradkit.value_and_grads(z.sum(), [w])
    assert torch.equal(grad, torch.ones_like(w))
    assert len(others) == 1


@pytest.mark.long
def test_control_flow_of_torch_inside_the_block(device: torch.device) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    loss = torch.cond(w.sum() > 0, torch.sin, torch.cos, (w,)).sum()
    with gradkit.checked():
        _, grad = gradkit.value_and_grads(loss, w)
    torch.testing.assert_close(grad, w.detach().cos())
    torch._dynamo.reset()
