"""torch.autograd.grad and .backward(): hooks, memory that is shared, checkpoints, one-hot rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import gradkit
from tests.helpers import Scribble, Sevenfold
from tests.silently_wrong._row import Case, Row

Write = Callable[[Tensor, Tensor, Tensor], None]


def leaf(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device, requires_grad=True)


def hook_on_an_input(device: torch.device) -> Case:
    w = leaf(device, 1)
    y = w * 2
    y.register_hook(lambda g: g * 100)
    y.retain_grad()
    loss = (3 * y).sum()
    theirs, _ = grad(loss, (y, w), retain_graph=True)
    y.grad = None
    loss.backward(retain_graph=True)
    return Case(theirs, y.grad, lambda: gradkit.value_and_grads(loss, {"y": y, "w": w})[1]["y"])


def backward_that_writes_on_a_non_leaf(device: torch.device) -> Case:
    w = leaf(device, 1)
    y = Scribble.apply(w)
    loss = (y * leaf(device, 3)).sum()
    (right,) = grad(loss, y, retain_graph=True)
    right = right.clone()
    theirs, _ = grad(loss, (y, w), retain_graph=True)
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss, {"y": y, "w": w})[1]["y"])


def backward_that_writes_on_a_sibling(device: torch.device) -> Case:
    a, w = leaf(device, 1), leaf(device, 1)

    def loss() -> Tensor:
        return ((a + Scribble.apply(w * 1)) * torch.ones(1, device=device)).sum()

    def checked() -> Tensor:
        with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match="Scribble"):
            _, grads = gradkit.value_and_grads(loss(), {"a": a, "w": w})
        return grads["a"]

    theirs, _ = grad(loss(), (a, w))
    (right,) = grad(loss(), a)
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss(), [a, w])[1][0], checked)


def _spoilt(
    differentiate: Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor],
    ours: Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor],
    apply: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Case:
    """By `a`, where the backward of a Function writes on the gradient of `w`."""
    a, w = leaf(device, 1), leaf(device, 1)

    def loss(a: Tensor, w: Tensor) -> Tensor:
        return ((a + apply(w * 1)) * torch.ones(1, device=device)).sum()

    def checked() -> Tensor:
        with gradkit.checked(), warnings.catch_warnings(action="ignore"):
            return ours(loss, a, w)

    (right,) = grad(loss(a, w), a)
    return Case(differentiate(loss, a, w), right, lambda: ours(loss, a, w), checked)


def backward_in_a_vmap_that_writes_on_a_sibling(device: torch.device) -> Case:
    return _spoilt(
        lambda loss, a, w: grad(loss(a, w), (a, w))[0],
        lambda loss, a, w: gradkit.value_and_grads(loss(a, w), [a, w])[1][0],
        torch.vmap(Sevenfold.apply),
        device,
    )


def backward_in_func_that_writes_on_a_sibling(device: torch.device) -> Case:
    return _spoilt(
        lambda loss, a, w: torch.func.grad(loss, (0, 1))(a.detach(), w.detach())[0],
        lambda loss, a, w: gradkit.func.value_and_grads(loss, (0, 1), create_graph=False)(a, w)[1][
            0
        ],
        Sevenfold.apply,
        device,
    )


def unscaled_twice(device: torch.device) -> Case:
    def unscaled(write: Write) -> list[Tensor | None]:
        a, b = leaf(device, 1), leaf(device, 1)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        write(scaler.scale((a + b).sum()), a, b)
        scaler.unscale_(torch.optim.SGD([a, b]))
        return [a.grad, b.grad]

    return Case(unscaled(assign), unscaled(backward), lambda: unscaled(ours))


def clipped_twice(device: torch.device) -> Case:
    def clipped(write: Write) -> list[Tensor | None]:
        a, b = leaf(device, 1), leaf(device, 1)
        write((a + b).sum(), a, b)
        nn.utils.clip_grad_norm_([a, b], 1.0, foreach=False)
        return [a.grad, b.grad]

    return Case(clipped(assign), clipped(backward), lambda: clipped(ours))


def backward_into_shared_memory(device: torch.device) -> Case:
    def clipped(write: Write) -> list[Tensor | None]:
        a, b = leaf(device, 1), leaf(device, 1)
        together = a.view_as(a) + b.view_as(b)  # whose gradient arrives as a view, twice
        write((together * torch.ones(1, device=device)).sum(), a, b)
        nn.utils.clip_grad_norm_([a, b], 1.0, foreach=False)
        return [a.grad, b.grad]

    def apart(loss: Tensor, a: Tensor, b: Tensor) -> None:
        loss.backward()
        b.grad = b.grad.clone()

    return Case(clipped(backward), clipped(apart), lambda: clipped(ours))


def assign(loss: Tensor, a: Tensor, b: Tensor) -> None:
    a.grad, b.grad = grad(loss, (a, b))


def backward(loss: Tensor, a: Tensor, b: Tensor) -> None:
    loss.backward()


def ours(loss: Tensor, a: Tensor, b: Tensor) -> None:
    gradkit.write_grads_([a, b], gradkit.value_and_grads(loss, [a, b])[1])


def written_back(device: torch.device) -> Case:
    def afterwards(write: Callable[[Tensor, Tensor], object]) -> Tensor:
        w = leaf(device, 1)
        _, result = gradkit.value_and_grads((w * w).sum(), w)
        write(w, result)
        (w * w).sum().backward()
        return result

    def assign(w: Tensor, result: Tensor) -> None:
        w.grad = result

    return Case(
        afterwards(assign),
        afterwards(lambda w, result: None),
        lambda: afterwards(gradkit.write_grads_),
    )


def result_is_the_seed(device: torch.device) -> Case:
    w = leaf(device, 1)
    seed = torch.full((1,), 5.0, device=device)
    (result,) = grad(w.clone(), w, seed)
    result.zero_()

    def weight() -> Tensor:
        kept = torch.full((1,), 5.0, device=device)
        gradkit.value_and_grads(w.clone(), w, weights=kept)[1].zero_()
        return kept

    return Case(seed, torch.full((1,), 5.0), weight)


def retained_grad_is_written(device: torch.device) -> Case:
    def after(differentiate: Callable[..., object]) -> Tensor | None:
        w = leaf(device, 1)
        y = w * 2
        y.retain_grad()
        differentiate((3 * y).sum(), {"w": w, "y": y})
        return y.grad

    return Case(
        after(lambda loss, params: grad(loss, list(params.values()))),
        None,
        lambda: after(gradkit.value_and_grads),
    )


def hooks_run_again(device: torch.device) -> Case:
    w = leaf(device, 1)
    w.register_hook(lambda g: g * 10)

    def loss() -> Tensor:
        return (2 * w).sum()

    def taken() -> Tensor | None:
        result, w.grad = w.grad, None
        return result

    torch.autograd.backward([w], grad(loss(), w))
    theirs = taken()
    loss().backward()
    right = taken()

    def add(*, hooks: bool) -> Tensor | None:
        _, grads = gradkit.value_and_grads(loss(), w)
        gradkit.add_grads_(w, grads, hooks=hooks)
        return taken()

    return Case(theirs, right, lambda: add(hooks=True), lambda: add(hooks=False))


def checkpointed(device: torch.device, *, reentrant: bool) -> tuple[Tensor, Tensor]:
    layer = nn.Linear(1, 1, bias=False).to(device)
    x = leaf(device, 4).reshape(1, 1)
    return checkpoint(layer, x, use_reentrant=reentrant).sum(), layer.weight


def reentrant_checkpoint_gives_zero(device: torch.device) -> Case:
    loss, weight = checkpointed(device, reentrant=True)
    (theirs,) = grad(loss, weight, materialize_grads=True, retain_graph=True)
    loss.backward(retain_graph=True)

    def instead() -> Tensor:
        return gradkit.value_and_grads(*checkpointed(device, reentrant=False))[1]

    return Case(theirs, weight.grad, lambda: gradkit.value_and_grads(loss, weight), instead)


def reentrant_checkpoint_leaves_none(device: torch.device) -> Case:
    loss, weight = checkpointed(device, reentrant=True)
    loss.backward(inputs=[weight], retain_graph=True)
    theirs = weight.grad
    loss.backward(retain_graph=True)
    right, weight.grad = weight.grad, None

    def instead() -> Tensor | None:
        gradkit.backward_(loss)
        return weight.grad

    return Case(theirs, right, lambda: gradkit.backward_(loss, weight), instead)


def rows_of_other_losses(device: torch.device) -> Case:
    w = leaf(device, 0, 1)
    losses = [w.sum(), w.sqrt().sum()]
    one_hot = list(torch.eye(2, device=device))
    (rows,) = grad(losses, w, one_hot, is_grads_batched=True, retain_graph=True)
    right = grad(losses[0], w, retain_graph=True)[0]
    return Case(rows[0], right, lambda: gradkit.per_loss_grads(losses, w)[0])


def pre_hook_of_a_leaf_s_node(device: torch.device) -> Case:
    def world() -> tuple[Tensor, Tensor]:
        w = torch.ones(1, device=device, requires_grad=True)
        node = get_gradient_edge(w).node
        node.register_prehook(lambda grads: (10 * cast("Tensor", grads[0]),))
        loss = (3 * w).sum()
        return loss, w  # the graph keeps the node, and the hook, alive

    def after_backward(backward: Callable[..., object]) -> Tensor | None:
        loss, w = world()
        backward(loss)
        return w.grad

    return Case(
        torch.autograd.grad(*world())[0],
        after_backward(torch.Tensor.backward),
        lambda: gradkit.value_and_grads(*world())[1],
        lambda: after_backward(gradkit.backward_),
    )


ROWS = [
    Row(
        "`grad(3 * w, w)`, where the `AccumulateGrad` node has a pre-hook `g * 10`",
        [3.0], [30.0], "`value_and_grads`", pre_hook_of_a_leaf_s_node,
        gradkit.UnsupportedGraphError, "`backward_`",
    ),
    Row(
        "`grad(3 * y, (y, w))`, where `y = 2 * w` has a hook `g * 100`: w.r.t. `y`",
        [3.0], [300.0], "`value_and_grads`", hook_on_an_input,
    ),
    Row(
        "`grad(loss, (y, w))`, where the backward of `y = f(w)` changes its cotangent in place: "
        "w.r.t. `y`",
        [21.0], [3.0], "`value_and_grads`", backward_that_writes_on_a_non_leaf,
    ),
    Row(
        "`grad(a + f(w), (a, w))` with such an `f`: w.r.t. `a`",
        [7.0], [1.0], "`value_and_grads`", backward_that_writes_on_a_sibling,
        refuses=gradkit.UnsupportedGraphError, instead="`checked()`",
    ),
    Row(
        "`grad(a + torch.vmap(f)(w), (a, w))` with such an `f`: w.r.t. `a`",
        [7.0], [1.0], "`value_and_grads`", backward_in_a_vmap_that_writes_on_a_sibling,
        refuses=gradkit.UnsupportedGraphError, instead="`checked()`",
    ),
    Row(
        "`torch.func.grad(lambda a, w: a + f(w), (0, 1))(a, w)` with such an `f`: w.r.t. `a`",
        [7.0], [1.0], "`func.value_and_grads`", backward_in_func_that_writes_on_a_sibling,
        refuses=gradkit.UnsupportedGraphError, instead="`checked()`",
    ),
    Row(
        "`a.grad, b.grad = grad(scaler.scale(a + b), (a, b))`, scale 8, then `scaler.unscale_`",
        [[0.125], [0.125]], [[1.0], [1.0]], "`write_grads_`", unscaled_twice,
    ),
    Row(
        "`a.grad, b.grad = grad(a + b, (a, b))`, then `clip_grad_norm_` to 1, `foreach=False`",
        [[0.5], [0.5]], [[0.7071], [0.7071]], "`write_grads_`", clipped_twice,
    ),
    Row(
        "`(a.view_as(a) + b.view_as(b)).backward()`, then `clip_grad_norm_` to 1, `foreach=False`",
        [[0.5], [0.5]], [[0.7071], [0.7071]], "`write_grads_`", backward_into_shared_memory,
    ),
    Row(
        "`w.grad = g`, where the gradient `g` is 2, then `(w * w).backward()`: `g`",
        [4.0], [2.0], "`write_grads_`", written_back,
    ),
    Row(
        "`g, = grad(w.clone(), w, seed)`, then `g.zero_()`: `seed`, which was 5",
        [0.0], [5.0], "`value_and_grads(..., weights=seed)`", result_is_the_seed,
    ),
    Row(
        "`grad(3 * y, (w, y))` after `y.retain_grad()`: `y.grad`",
        [3.0], None, "`value_and_grads`", retained_grad_is_written,
    ),
    Row(
        "`backward([w], grad(2 * w, w))`, where `w` has a hook `g * 10`: `w.grad`",
        [200.0], [20.0], "`add_grads_(..., hooks=True)`", hooks_run_again,
        gradkit.UnsupportedGraphError, "`add_grads_`",
    ),
    Row(
        "`grad(checkpoint(layer, x, use_reentrant=True), weight, materialize_grads=True)`",
        [[0.0]], [[4.0]], "`value_and_grads`", reentrant_checkpoint_gives_zero,
        gradkit.UnsupportedGraphError, "with `use_reentrant=False`",
    ),
    Row(
        "`checkpoint(layer, x, use_reentrant=True).backward(inputs=[weight])`: `weight.grad`",
        None, [[4.0]], "`backward_(loss, weight)`", reentrant_checkpoint_leaves_none,
        gradkit.UnsupportedGraphError, "`backward_(loss)`",
    ),
    Row(
        "`grad([w.sum(), w.sqrt().sum()], w, one_hot_rows, is_grads_batched=True)` at "
        "`w = [0, 1]`: the first row",
        [float("nan"), 1.0], [1.0, 1.0], "`per_loss_grads`", rows_of_other_losses,
    ),
]  # fmt: skip
