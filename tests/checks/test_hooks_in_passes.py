"""Hooks that change, cut, count or remove themselves: the gradient is right, or refused by name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

import gradkit
from gradkit import func
from gradkit._autograd import engine
from gradkit._state import recomputed_tensors

D = torch.float64
Hook = Callable[[Tensor], Tensor | None]
changed_again = pytest.raises(gradkit.UnsupportedGraphError, match="would change again")
cut = pytest.raises(gradkit.UnsupportedGraphError, match="without a path to the one it was given")


def on_tensor(y: Tensor, hook: Hook) -> tuple[Tensor, RemovableHandle]:
    return y, y.register_hook(hook)


def before_node(y: Tensor, hook: Any) -> tuple[Tensor, RemovableHandle]:
    assert y.grad_fn is not None
    return y, y.grad_fn.register_prehook(lambda grads: (hook(grads[0]),))


def after_node(y: Tensor, hook: Any) -> tuple[Tensor, RemovableHandle]:
    assert y.grad_fn is not None

    def each(grads: Any, _: Any) -> Any:
        return tuple(None if grad is None else hook(grad) for grad in grads)

    return y, y.grad_fn.register_hook(each)


def after_module(y: Tensor, hook: Any) -> tuple[Tensor, RemovableHandle]:
    module = nn.Identity()
    handle = module.register_full_backward_hook(lambda _, grads, __: (hook(grads[0]),))
    return module(y), handle


PLACES = {"tensor": on_tensor, "prehook": before_node, "hook": after_node, "module": after_module}
places = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def no_fallback_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        yield


def leaf(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values or 1.0, dtype=D, device=device, requires_grad=True)


def rows_with_hook(w: Tensor, place: str) -> Tensor:
    """Return losses `[w0 * 2, w1 * 6]`, of whose gradients a hook makes tenfold, once."""
    handles: list[RemovableHandle] = []

    def once(grad: Tensor) -> Tensor:
        handles[0].remove()
        return 10 * grad

    y, handle = PLACES[place](2 * w, once)
    handles.append(handle)
    return y * torch.tensor([1.0, 3.0], dtype=D, device=w.device)


ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sequential": gradkit.per_loss_grads,
    "batched": lambda z, w: gradkit.per_loss_grads(z, w, strategy="batched"),
    "batched, graph kept": lambda z, w: gradkit.per_loss_grads(
        z, w, strategy="batched", retain_graph=True
    ),
    "one by one": lambda z, w: gradkit.per_loss_grads(z, w, strategy="batched", chunk_size=1),
    "create_graph": lambda z, w: gradkit.per_loss_grads(z, w, create_graph=True).detach(),
    "a list": lambda z, w: torch.stack(gradkit.per_loss_grads(list(z), w)),
    "norms": lambda z, w: torch.diag(gradkit.per_sample_norms(z, w)),
    "norms, one by one": lambda z, w: torch.diag(gradkit.per_sample_norms(z, w, chunk_size=1)),
    "gram": lambda z, w: gradkit.gram(list(z), w).sqrt(),
    "gram, one by one": lambda z, w: gradkit.gram(z, w, chunk_size=1).sqrt(),
}


@places
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_finds_a_hook_that_removes_itself(
    device: torch.device, place: str, rows: str
) -> None:
    w = leaf(device, 1.0, 2.0)
    z = rows_with_hook(w, place)
    expected = torch.tensor([[20.0, 0.0], [0.0, 60.0]], dtype=D, device=device)
    torch.testing.assert_close(ROWS[rows](z, w), expected)


WEIGHTED: dict[str, Callable[[list[Tensor], Tensor], Any]] = {
    "value_and_grads": lambda z, w: gradkit.value_and_grads(z, w, weights=len_ones)[1],
    "value_and_reduced_grads": lambda z, w: gradkit.value_and_reduced_grads(
        z, w, torch.clone, weights=len_ones
    )[1],
}


def len_ones(gramian: Tensor) -> Tensor:
    return torch.ones_like(gramian[0])


@places
@pytest.mark.parametrize("call", WEIGHTED)
def test_the_pass_by_weights_from_the_gramian_finds_the_hooks(
    device: torch.device, place: str, call: str
) -> None:
    w = leaf(device, 1.0, 2.0)
    z = rows_with_hook(w, place)
    assert WEIGHTED[call](list(z), w).tolist() == [20, 60]
    y = 2 * w

    def registers(grad: Tensor) -> Tensor:
        y.register_hook(lambda grad: 10 * grad)
        return grad

    y.register_hook(registers)
    assert WEIGHTED[call](list(y), w).tolist() == [2, 2]
    assert len(y._backward_hooks or {}) == 2  # as after the one pass of a loop


def test_hooks_are_left_as_one_pass_leaves_them(device: torch.device) -> None:
    w = leaf(device, 1.0, 2.0)
    y = 2 * w
    seen: list[str] = []

    def renewed(grad: Tensor) -> Tensor:
        handle.remove()
        y.register_hook(lambda _: seen.append("new"))
        return grad

    y.register_hook(lambda _: seen.append("first"))
    handle = y.register_hook(renewed)
    y.register_hook(lambda _: seen.append("last"))
    before, method = dict(y._backward_hooks or {}), RemovableHandle.remove
    gradkit.per_loss_grads(y, w, retain_graph=True)
    assert seen == ["first", "last"] * 2
    after = y._backward_hooks or {}
    assert handle.id not in after
    assert len(after) == len(before)
    assert RemovableHandle.remove is method
    seen.clear()
    gradkit.value_and_grads(y.sum(), w)
    assert seen == ["first", "last", "new"]


def test_hooks_are_as_they_were_after_an_error(device: torch.device) -> None:
    w = leaf(device, 1.0, 2.0)
    y = 2 * w
    handle: Any = y.register_hook(lambda _: handle.remove())
    calls: list[int] = []

    def fail(_: Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError

    y.register_hook(fail)
    before = list(y._backward_hooks or {})
    with pytest.raises(ArithmeticError):
        gradkit.per_loss_grads(y, w)
    assert list(y._backward_hooks or {}) == before


def test_a_hook_of_another_thread_is_removed_for_good(device: torch.device) -> None:
    # The other thread's pass is of the CPU: on a device, it would wait for the thread that waits.
    w, v = leaf(device, 1.0, 2.0), leaf(torch.device("cpu"), 1.0)
    y, other = 2 * w, 2 * v
    handle: Any = other.register_hook(lambda _: handle.remove())

    def in_between(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: torch.autograd.grad(other, v, retain_graph=True))
        thread.start()
        thread.join()

    y.register_hook(in_between)
    gradkit.per_loss_grads(y, w)
    assert not other._backward_hooks


@pytest.mark.parametrize("rows", ["batched", "norms", "gram"])
def test_an_attempt_that_is_given_up_has_not_called_a_hook(device: torch.device, rows: str) -> None:
    w, count = leaf(device, 1.0, 2.0), [0]
    y = 2 * w

    def counted(grad: Tensor) -> Tensor:
        count[0] += 1
        return count[0] * grad

    y.register_hook(counted)
    first = ROWS[rows](y, w)[0, 0]
    assert first == 2  # the first call, and not the second


OUTER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "value_and_grads": lambda g, w: gradkit.value_and_grads(g, w)[1],
    "create_graph": lambda g, w: gradkit.value_and_grads(g, w, create_graph=True)[1],
    "per_loss_grads": gradkit.per_loss_grads,
    "batched": lambda g, w: gradkit.per_loss_grads(g.repeat(2), w, strategy="batched")[0],
    "vjp": lambda g, w: gradkit.vjp(g, w, torch.ones_like(g)),
    "norms": lambda g, w: gradkit.per_sample_norms(g.repeat(2), w)[0],
    "gram": lambda g, w: gradkit.gram(g.repeat(2), w)[0, 0].sqrt(),
    "backward_": lambda g, w: (gradkit.backward_(g, w), w.grad)[1],
}


def grad_by_backward(loss: Tensor, w: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # about a cycle of references
        gradkit.backward_(loss, create_graph=True)
    grad, w.grad = w.grad, None
    assert grad is not None
    return grad


INNER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "value_and_grads": lambda loss, w: gradkit.value_and_grads(loss, w, create_graph=True)[1],
    "per_loss_grads": lambda loss, w: gradkit.per_loss_grads(loss, w, create_graph=True),
    "vjp": lambda loss, w: gradkit.vjp(loss, w, torch.ones_like(loss), create_graph=True),
    "backward_": grad_by_backward,
}


@places
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", ["value_and_grads", "backward_"])
def test_a_hook_does_not_change_the_derivative_of_what_it_made(
    device: torch.device, place: str, outer: str, inner: str
) -> None:
    w = leaf(device)
    y, handle = PLACES[place](w * w, lambda grad: 10 * grad)
    grad = INNER[inner](y * y, w)
    with changed_again:
        OUTER[outer](grad, w)
    assert w.grad is None
    # A module has read its hooks in the forward pass.
    if place != "module" and outer != "backward_":
        handle.remove()
        assert OUTER[outer](grad, w) == 120
    assert gradkit.func.hvp(lambda w: on_tensor(w * w, lambda g: 10 * g)[0] ** 2, w, w)[1] == 120


@places
@pytest.mark.parametrize("outer", OUTER)
def test_hooks_that_only_look_are_no_harm(device: torch.device, place: str, outer: str) -> None:
    w = leaf(device)
    y, _ = PLACES[place](w * w, lambda grad: grad)
    _, grad = gradkit.value_and_grads(y * y, w, create_graph=True)
    assert OUTER[outer](grad, w) == 12


def test_the_loss_itself_may_be_differentiated_again(device: torch.device) -> None:
    w = leaf(device)
    y, _ = on_tensor(w * w, lambda grad: 10 * grad)
    _, grad = gradkit.value_and_grads(y * y, w, create_graph=True)
    assert gradkit.value_and_grads(y * y, w, retain_graph=True)[1] == 40
    del grad


@places
def test_unroll(device: torch.device, place: str) -> None:
    w = leaf(device)

    def new(hook: Hook) -> Tensor:
        def loss(p: Tensor, *_: Any) -> Tensor:
            return PLACES[place](p * p, hook)[0] ** 2

        return gradkit.meta.unroll(loss, w, [0], gradkit.meta.sgd(lr=0.01)).params

    with changed_again:
        gradkit.value_and_grads(new(lambda grad: 10 * grad), w)
    torch.testing.assert_close(
        gradkit.value_and_grads(new(lambda grad: grad), w)[1], torch.full_like(w, 0.88)
    )


CUTTING: dict[str, Hook] = {
    "detach": lambda grad: grad.detach().clone(),
    "no_grad": torch.no_grad()(lambda grad: 2 * grad),
    "NumPy": lambda grad: torch.from_numpy(grad.detach().cpu().numpy().copy()).to(grad.device),
    "constant": torch.zeros_like,
    "in part": lambda grad: torch.ones_like(grad, requires_grad=True) * grad.detach(),
}


@pytest.mark.parametrize("place", [*PLACES, "param"])
@pytest.mark.parametrize("hook", CUTTING)
@pytest.mark.parametrize("inner", INNER)
def test_a_hook_that_cuts_the_graph(
    device: torch.device, place: str, hook: str, inner: str
) -> None:
    w = leaf(device, 1.0, 2.0)
    if place == "param":
        w.register_hook(CUTTING[hook])
        y = w * w
    else:
        y, _ = PLACES[place](w * w, CUTTING[hook])
    loss = (y * y).sum()
    with cut:
        INNER[inner](loss, w)
    assert w.grad is None
    assert gradkit.value_and_grads(loss, w)[1] is not None


def on_accumulation(w: Tensor, log: list[object]) -> None:
    w.register_post_accumulate_grad_hook(lambda p: log.append(p.grad is not None))


def on_many(w: Tensor, log: list[object]) -> None:
    register_multi_grad_hook([w], lambda grads: log.append(len(grads)))


def before_accumulation(w: Tensor, log: list[object]) -> None:
    def scaled(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        log.append("pre")
        return (3 * grads[0],)

    get_gradient_edge(w).node.register_prehook(scaled)


def after_accumulation(w: Tensor, log: list[object]) -> None:
    get_gradient_edge(w).node.register_hook(lambda *_: log.append("post"))


def on_leaf(w: Tensor, log: list[object]) -> None:
    def scaled(grad: Tensor) -> Tensor:
        log.append("leaf")
        return 3 * grad

    w.register_hook(scaled)


@pytest.mark.parametrize(
    "register", [on_accumulation, on_many, before_accumulation, after_accumulation, on_leaf]
)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("inputs", [False, True])
def test_a_pass_with_a_graph_accumulates_as_torch_does_with_hooks_of_leaves(
    device: torch.device,
    register: Callable[[Tensor, list[object]], None],
    *,
    accumulates: bool,
    inputs: bool,
) -> None:
    def run(backward: Callable[[Tensor, Tensor], object]) -> tuple[list[object], list[Tensor]]:
        w, log = leaf(device, 1.0, 0.3), list[object]()
        node = get_gradient_edge(w).node  # holds the hooks of the node
        register(w, log)
        w.grad = torch.ones_like(w) if accumulates else None
        y = w * w
        y.register_hook(lambda grad: log.append(grad.tolist()))
        with warnings.catch_warnings(action="ignore"):  # about a cycle of references
            backward((y * y).sum(), w)
        grad, w.grad = w.grad, None
        assert grad is not None
        grad.sum().backward(inputs=[w])
        assert w.grad is not None
        assert node is not None
        return log, [grad, w.grad]

    log, expected = run(
        lambda loss, w: loss.backward(create_graph=True, inputs=[w] if inputs else None)
    )
    ours, grads = run(
        lambda loss, w: gradkit.backward_(loss, w if inputs else None, create_graph=True)
    )
    assert ours == log
    for grad, right in zip(grads, expected, strict=True):
        assert torch.equal(grad, right)


HARMLESS: dict[str, Hook] = {
    "none": lambda _: None,
    "same": lambda grad: grad,
    "scaled": lambda grad: 3 * grad,
    "clipped": lambda grad: grad.clamp(-1, 1),
    "masked": lambda grad: grad * (torch.arange(grad.numel(), device=grad.device) > 0),
}


@given(
    values=st.lists(st.floats(-2, 2), min_size=1, max_size=4),
    hook=st.sampled_from(sorted(HARMLESS)),
    place=st.sampled_from(["tensor", "prehook", "module"]),  # a node's hook gets each part of a sum
)
def test_the_derivative_is_the_transform_s_or_refused(
    device: torch.device, values: list[float], hook: str, place: str
) -> None:
    if hook == "none":
        place = "tensor"  # elsewhere None stands for a gradient of zero

    def loss(w: Tensor, place: str = "tensor") -> Tensor:
        return (PLACES[place](w * w, HARMLESS[hook])[0] ** 2).sum()

    w, one = leaf(device, *values), torch.ones(len(values), dtype=D, device=device)
    grad, expected = gradkit.func.hvp(loss, w.detach(), one)
    _, ours = gradkit.value_and_grads(loss(w, place), w, create_graph=True)
    torch.testing.assert_close(ours.detach(), grad)
    refused = ""
    try:
        _, again = gradkit.value_and_grads(ours.sum(), w)
    except gradkit.UnsupportedGraphError as error:
        refused = str(error)
    else:
        torch.testing.assert_close(again, expected)
    assert not refused or ("would change again" in refused and hook not in ("none", "same"))


def test_a_source_of_recomputed_tensors_elsewhere_hides_no_change(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a function of `gradkit.distributed.make_functional` is alive in the process."""
    monkeypatch.setattr(recomputed_tensors, "recomputed_tensor_sources", sources := {1})
    monkeypatch.setattr(engine, "recomputed_tensor_sources", sources)
    w = leaf(device, 1.0, 2.0)
    y = w * w
    y.register_hook(lambda grad: 10 * grad)
    _, grad = gradkit.value_and_grads(y.square().sum(), w, create_graph=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="would change again"):
        gradkit.value_and_grads(grad.sum(), w)


OF_FUNC: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "hvp": lambda loss, w: func.hvp(loss, w, torch.ones_like(w))[1],
    "hvp by reverse": lambda loss, w: func.hvp(
        loss, w, torch.ones_like(w), mode="reverse-over-reverse"
    )[1],
    "nested": lambda loss, w: func.value_and_grads(
        lambda w: func.value_and_grads(loss)(w)[1].sum()
    )(w)[1],
    "jvp": lambda loss, w: func.jvp(
        lambda w: func.value_and_grads(loss)(w)[1], (w,), (torch.ones_like(w),)
    )[1],
}


@pytest.mark.parametrize("call", OF_FUNC.values(), ids=OF_FUNC)
def test_a_hook_inside_a_function_that_cuts_the_graph(
    device: torch.device, call: Callable[[Any, Tensor], Tensor]
) -> None:
    """The gradient of (h w)^2, h = 2 w: 2 * 4 w^3 by way of h, made threefold, and 8 w^3."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)

    def loss(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor]:
        def of(w: Tensor) -> Tensor:
            h = 2 * w
            h.register_hook(hook)
            return (h * w).square().sum()

        return of

    torch.testing.assert_close(call(loss(lambda g: 3 * g), w), 96 * w**2)
    with pytest.raises(gradkit.UnsupportedGraphError, match="without a path"):
        call(loss(lambda g: 3 * g.detach()), w)
    _, grad = func.value_and_grads(loss(lambda g: 3 * g.detach()))(w)  # a first derivative
    torch.testing.assert_close(grad, 32 * w**3)


@given(
    entries=st.lists(st.floats(-2, 2), min_size=4, max_size=4),
    paths=st.lists(st.sampled_from(["plain", "tensor", "prehook"]), min_size=2, max_size=2),
)
def test_both_modes_of_hvp_have_the_change_of_the_gradient(
    device: torch.device, entries: list[float], paths: list[str]
) -> None:
    """The Jacobian of a gradient that a hook has changed on some paths is not symmetric."""
    mix = torch.tensor(entries, dtype=D, device=device).view(2, 2)

    def loss(w: Tensor) -> Tensor:
        first, second = (
            w[i] * 1 if path == "plain" else PLACES[path](w[i] * 1, lambda grad: 3 * grad)[0]
            for i, path in enumerate(paths)
        )
        return ((mix @ torch.stack([first, second])) ** 3).sum() + (first * w[1]) ** 2

    w = torch.tensor([0.7, -1.2], dtype=D, device=device)
    along = torch.tensor([0.5, 2.0], dtype=D, device=device)
    forward = func.hvp(loss, w, along)
    reverse = func.hvp(loss, w, along, mode="reverse-over-reverse")
    torch.testing.assert_close(reverse, forward)
    step = 1e-6 * along
    slopes = [func.value_and_grads(loss)(w + sign * step)[1] for sign in (1, -1)]
    torch.testing.assert_close(forward[1], (slopes[0] - slopes[1]) / 2e-6, rtol=1e-6, atol=1e-6)
