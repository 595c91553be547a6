"""Checkpoints and hooks that give a pass other tensors than its forward pass had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.nn.functional import dropout, rrelu
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import gradkit
from gradkit._autograd.engine import inner_grads
from gradkit._compat.checkpoints import copies_waiting, frames_waiting
from tests.helpers import assert_same_bits, unchanged

once = partial(checkpoint, use_reentrant=False)
Losses = Callable[[Tensor], Tensor]
CALLS: dict[str, Callable[[Tensor, Any], object]] = {
    "value_and_grads": gradkit.value_and_grads,
    "value_and_grads of a tree": lambda loss, w: gradkit.value_and_grads([loss], w),
    "value_and_grads, create_graph": partial(gradkit.value_and_grads, create_graph=True),
    "per_loss_grads": lambda loss, w: gradkit.per_loss_grads([loss, loss], w),
    "simultaneous_grads": lambda loss, w: gradkit.simultaneous_grads([loss], [w]),
    "vjp": lambda loss, w: gradkit.vjp([loss], w, [torch.ones_like(loss)]),
    "backward_": gradkit.backward_,
    "backward_ to all leaves": lambda loss, _: gradkit.backward_(loss),
    "gram": lambda loss, w: gradkit.gram([loss], w),
}


def point(device: torch.device, *, double: bool = True) -> Tensor:
    dtype = torch.float64 if double else torch.float32
    return torch.randn(8, 3, dtype=dtype, device=device, requires_grad=True)


def leaky(w: Tensor, inplace: bool = False) -> Tensor:
    return rrelu(w * 1.0, 0.1, 0.9, training=True, inplace=inplace)


def by_hand(w: Tensor) -> Tensor:
    x = w * 1.0
    return torch.where(x < 0, x * torch.empty_like(x).uniform_(0.1, 0.9), x)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("fn", [leaky, lambda w: once(leaky, w)], ids=["alone", "nested"])
def test_an_rrelu_that_ends_a_checkpoint_is_refused(
    device: torch.device, call: Callable[[Tensor, Any], object], fn: Losses
) -> None:
    w = point(device)
    loss = once(fn, w).sum()
    match = r"an RReLU whose noise is saved as it was drawn, .* a checkpoint .* write it out"
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match=rf"(?s){match}"):
        call(loss, w)
    torch.autograd.grad(loss, w)  # the graph has not been freed


@pytest.mark.parametrize("copied", [False, True])
def test_written_out_it_is_right(device: torch.device, copied: bool) -> None:
    w = point(device)
    with saved_tensors_hooks(Tensor.clone, lambda x: x):
        out = by_hand(w) if copied else once(by_hand, w)
    grad = gradkit.value_and_grads(out.sum(), w)[1]
    torch.testing.assert_close(grad, (out / w).detach())


RIGHT: dict[str, Losses] = {
    "another operation after it": lambda w: once(lambda w: leaky(w) * w.detach() * w, w),
    "in place": lambda w: once(partial(leaky, inplace=True), w),
    "no checkpoint": leaky,
    "eval": lambda w: once(lambda w: rrelu(w * 1.0, 0.1, 0.9, training=False), w),
}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("fn", RIGHT.values(), ids=RIGHT)
def test_an_rrelu_whose_noise_is_kept_is_right(
    device: torch.device, fn: Losses, checked: bool
) -> None:
    def grads(run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        torch.manual_seed(3)
        w = point(device)
        return run(fn(w).sum(), w)

    def ours(loss: Tensor, w: Tensor) -> Tensor:
        grad: Tensor = gradkit.value_and_grads(loss, w)[1]
        return grad

    expected = grads(lambda loss, w: torch.autograd.grad(loss, w)[0])
    if checked:
        with gradkit.checked():
            assert_same_bits([grads(ours)], [expected])
    else:
        assert_same_bits([grads(ours)], [expected])


def test_an_rrelu_recomputed_to_its_end_is_right(device: torch.device) -> None:
    w = point(device)
    with set_checkpoint_early_stop(False):
        out = once(leaky, w)
    grad = gradkit.value_and_grads(out.sum(), w)[1]
    torch.testing.assert_close(grad, (out / w).detach())


def test_a_gradient_that_needs_no_noise_is_given(device: torch.device) -> None:
    w, v = point(device), torch.ones((), dtype=torch.float64, device=device, requires_grad=True)
    loss = once(leaky, w).sum() * v
    assert_same_bits([gradkit.value_and_grads(loss, v)[1]], [loss.detach()])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_rrelu_whose_noise_is_kept_elsewhere_is_refused(
    device: torch.device, call: Callable[[Tensor, Any], object], inplace: bool
) -> None:
    w = point(device)
    with save_on_cpu():
        loss = leaky(w, inplace).sum()
    match = "given to hooks of saved tensors"
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match=match):
        call(loss, w)


@pytest.mark.parametrize("name", ["value_and_grads, create_graph", "per_loss_grads"])
def test_hooks_that_copy_are_seen_where_the_graph_is_looked_at(
    device: torch.device, name: str
) -> None:
    w = point(device)
    with saved_tensors_hooks(Tensor.clone, lambda x: x):
        loss = leaky(w).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match="given to hooks of saved tensors"):
        CALLS[name](loss, w)
    with (
        gradkit.checked(),
        pytest.raises(gradkit.UnsupportedGraphError, match="given to hooks of saved tensors"),
    ):
        gradkit.value_and_grads(loss, w)


def test_whatever_else_is_kept_on_the_cpu_is_right(device: torch.device) -> None:
    w = point(device)
    with save_on_cpu():
        loss = (w.sin() * w).square().sum()
        assert copies_waiting()
    expected = torch.autograd.grad(loss, w, retain_graph=True)
    assert_same_bits([gradkit.value_and_grads(loss, w)[1]], expected)


# Operations that write an argument which their node has saved before, and what a pass needs of it.
# Running statistics are not needed in training, in which alone they are written.
WRITE_WHAT_THEY_SAVED = {
    ("rrelu_with_noise", "noise"),
    ("rrelu_with_noise_", "noise"),
    *(
        (name, f"running_{which}")
        for name in ("_native_batch_norm_legit", "_batch_norm_with_update")
        for which in ("mean", "var")
    ),
}


def test_no_other_operation_of_torch_writes_what_it_has_saved(device: torch.device) -> None:
    nodes: dict[str, set[str]] = {}
    for name in dir(torch._C._functions):
        kind = getattr(torch._C._functions, name)
        key = name.rstrip("0123456789").removesuffix("Backward").lower()
        nodes.setdefault(key, set()).update(
            a.removeprefix("_raw_saved_") for a in dir(kind) if a.startswith("_raw_saved_")
        )
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        saved = nodes.get(name.replace("_", "").lower(), set())
        if schema.name.startswith("aten::"):
            found |= {
                (name, argument.name)
                for argument in schema.arguments
                if argument.alias_info is not None
                and argument.alias_info.is_write
                and not argument.is_out
                and argument.name != "self"
                and argument.name in saved
            }
    assert found == WRITE_WHAT_THEY_SAVED


def dropped(w: Tensor) -> Tensor:
    return dropout(w * 2.0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_random_numbers_that_are_drawn_anew_are_refused(
    device: torch.device, call: Callable[[Tensor, Any], object]
) -> None:
    w = point(device)
    loss = once(dropped, w, preserve_rng_state=False).square().sum()
    match = r"(?s)^(loss|output).*of dropped.* preserve_rng_state=False, which draws others.*leave"
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match=match):
        call(loss, w)
    y = once(dropped, w).square()
    torch.testing.assert_close(
        gradkit.value_and_grads(y.sum(), w)[1], torch.where(y == 0, 0, 32 * w).detach()
    )


def test_a_function_that_draws_nothing_needs_no_state(device: torch.device) -> None:
    w = point(device)
    loss = once(torch.sin, w, preserve_rng_state=False).sum()
    for _ in range(2):
        assert_same_bits([gradkit.value_and_grads(loss, w, retain_graph=True)[1]], [w.cos()])


def test_a_function_that_sets_its_seed_draws_the_same(device: torch.device) -> None:
    torch.manual_seed(5)

    def seeded(w: Tensor) -> Tensor:
        torch.manual_seed(11)
        return dropped(w)

    w = point(device)
    y = once(seeded, w, preserve_rng_state=False).square()
    torch.manual_seed(5)
    torch.testing.assert_close(
        gradkit.value_and_grads(y.sum(), w)[1], torch.where(y == 0, 0, 32 * w).detach()
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_argument_that_has_changed_is_refused_before_the_pass(
    device: torch.device, call: Callable[[Tensor, Any], object]
) -> None:
    w, x = point(device), torch.randn(3, dtype=torch.float64, device=device)
    other = (w * w).sum()
    loss = once(lambda x: (x * w).sin(), x).sum() + other
    copied = once(lambda x: (x * w).sin(), x.clone()).sum()
    expected = torch.autograd.grad(copied, w, retain_graph=True)
    x.add_(1)
    match = "the arguments of a checkpoint, of .*lambda.*changed in place since"
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match=match):
        call(loss, w)
    assert_same_bits(torch.autograd.grad(other, w), [2 * w])  # the graph has not been freed
    assert_same_bits([gradkit.value_and_grads(copied, w)[1]], expected)


def network(device: torch.device) -> nn.Sequential:
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double().to(device)


def to_eval(net: nn.Module) -> None:
    net.eval()


def frozen(net: nn.Module) -> None:
    net.get_parameter("4.weight").requires_grad_(False)


@pytest.mark.parametrize("change", [to_eval, frozen])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_other_tensors_of_a_recomputation_are_named(
    device: torch.device, call: Callable[[Tensor, Any], object], change: Callable[[nn.Module], None]
) -> None:
    net, x = network(device), point(device)
    loss = once(net, x).square().sum()
    change(net)
    match = r"(?s)^(loss|output).*a checkpoint that recomputes .* Sequential that saves others now"
    with pytest.raises(gradkit.UnsupportedGraphError, match=match) as caught:
        call(loss, x)
    assert isinstance(caught.value.__cause__, CheckpointError)
    out = once(net, x).square().sum()  # the forward pass, run again
    expected = torch.autograd.grad(out, x, retain_graph=True)
    assert_same_bits([gradkit.value_and_grads(out, x)[1]], expected)


def test_a_captured_pass_names_them_too(device: torch.device) -> None:
    net, x = network(device), point(device)
    loss = once(net, x).square().sum()
    net.eval()
    with (
        unchanged(*net.parameters()),
        pytest.raises(gradkit.UnsupportedGraphError, match=r"capture_grads: .* recomputes"),
        gradkit.capture_grads(net),
    ):
        loss.backward()


def test_an_inner_pass_names_them_too(device: torch.device) -> None:
    net, x = network(device), point(device)
    out = once(net, x)
    net.eval()
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^a loss: .*recomputes"):
        inner_grads([out.sum()], [x])


def test_what_a_selective_checkpoint_keeps_may_not_change(device: torch.device) -> None:
    w = torch.randn(3, 3, device=device, requires_grad=True)
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def written(w: Tensor) -> Tensor:
        return ((w @ w).add_(1.0) @ w).sin()

    def loss() -> Tensor:
        return once(written, w, context_fn=context).sum()

    with pytest.raises(RuntimeError, match="has been mutated"):
        torch.autograd.grad(loss(), w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="recomputes"):
        gradkit.value_and_grads(loss(), w)


def nested(net: nn.Sequential, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        return once(net, once(net[:3], x) @ torch.ones(4, 3).to(x)).tanh()

    return once(outer, x)


def selective(net: nn.Sequential, x: Tensor) -> Tensor:
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return once(net, x, context_fn=context)


def to_the_end(net: nn.Sequential, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return once(net, x)


def kept_on_the_cpu(net: nn.Sequential, x: Tensor) -> Tensor:
    with save_on_cpu():
        return once(lambda x: net(x).sin(), x * 2.0)


def with_an_average(net: nn.Sequential, x: Tensor) -> Tensor:
    average = [p.detach().clone() for p in net.parameters()]
    net.register_buffer("average", average[0])
    out = once(net, x)
    average[0].lerp_(net[0].weight.detach(), 0.1)
    return out


def after_a_step(net: nn.Sequential, x: Tensor) -> Tensor:
    once(net, x)
    torch.optim.SGD(net.parameters(), 0.1).step(lambda: once(net, x).sum().backward())
    net.zero_grad()
    return once(net, x)


ORDINARY: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "a module": once,
    "twice": lambda net, x: once(net, x) + once(net, x),
    "nested": nested,
    "sequential": lambda net, x: checkpoint_sequential(net, 2, x, use_reentrant=False),
    "selective": selective,
    "without a check": partial(once, determinism_check="none"),
    "to its end": to_the_end,
    "a buffer that it does not read is written": with_an_average,
    "after a step": after_a_step,
    "kept on the CPU": kept_on_the_cpu,
    "bfloat16": lambda net, x: once(net.bfloat16(), x.bfloat16()),
}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("run", ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_checkpoint_is_exact(
    device: torch.device, run: Callable[[nn.Sequential, Tensor], Tensor], checked: bool
) -> None:
    def grads(take: Callable[[Tensor, list[Tensor]], Any]) -> Any:
        torch.manual_seed(1)
        net, x = network(device), point(device)
        return take(run(net, x).square().mean(), [x, *net.parameters()])

    expected = grads(lambda loss, at: torch.autograd.grad(loss, at, allow_unused=True))
    if checked:
        with gradkit.checked():
            ours = grads(lambda loss, at: gradkit.value_and_grads(loss, at)[1])
    else:
        ours = grads(lambda loss, at: gradkit.value_and_grads(loss, at)[1])
    assert_same_bits(ours, expected)


@pytest.mark.parametrize("checked", [False, True])
def test_several_losses_of_one_checkpoint_are_exact(device: torch.device, checked: bool) -> None:
    net, x = network(device), point(device)
    if checked:
        with gradkit.checked():
            out = once(net, x)
            ours = gradkit.per_loss_grads([out.sum(), out.square().sum()], x, retain_graph=True)
    else:
        out = once(net, x)
        ours = gradkit.per_loss_grads([out.sum(), out.square().sum()], x, retain_graph=True)
    each = [out.sum(), out.square().sum()]
    assert_same_bits(ours, [torch.autograd.grad(one, x, retain_graph=True)[0] for one in each])


def test_a_step_inside_of_the_pass_is_not_refused(device: torch.device) -> None:
    # The optimizer steps each parameter as soon as its gradient is there.
    net, x = nn.Linear(3, 3).double().to(device), point(device)
    before, (expected,) = net.weight.detach().clone(), torch.autograd.grad(net(x).sum(), net.weight)
    optimizer = torch.optim.SGD([net.weight], 0.5)
    net.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    gradkit.backward_(once(net, x).sum())
    torch.testing.assert_close(net.weight.detach(), before - 0.5 * expected)


def test_what_waits_is_counted(device: torch.device) -> None:
    before, w = frames_waiting(), point(device)
    out = once(torch.sin, w)
    assert frames_waiting() == before + 1
    del out
    assert frames_waiting() == before >= 0


# --- torch gives out each tensor that a checkpoint recomputes once in a pass

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: functional.scaled_dot_product_attention(x, x.sin(), x),
    "attention, twice": lambda x: functional.scaled_dot_product_attention(
        functional.scaled_dot_product_attention(x, x.sin(), x).tanh(), x, x
    ),
    "weight_norm": lambda x: torch._weight_norm(x[0, 0], x[0, 0, :, :1]),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, -1),
    "hardsigmoid": functional.hardsigmoid,
}
Wrap = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]


def again(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return partial(once, fn)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("around", ["one", "nested", "two"])
@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_differentiated_by_a_formula(
    device: torch.device, name: str, around: str, hooked: bool
) -> None:
    fn = FORMULAS[name]
    x, v = torch.randn(2, 1, 2, 4, 4, dtype=torch.float64, device=device)

    def derivatives(wrap: Wrap) -> list[Tensor]:
        block = wrap(fn)
        if around == "nested":
            block = wrap(lambda x: wrap(fn)(x).tanh())
        elif around == "two":
            block = lambda x: wrap(fn)(x) + wrap(fn)(2 * x)  # noqa: E731
        leaf = x.clone().requires_grad_()
        h = leaf * 1
        if hooked:
            h.register_hook(lambda grad: None)
        value, results = block(h).sin().sum(), []
        for order in range(3):
            _, grad = gradkit.value_and_grads(value, leaf, create_graph=order < 2)
            results.append(grad)
            value = (grad * v).sum()
        return results

    torch.testing.assert_close(derivatives(again), derivatives(lambda fn: fn))
