"""Functions that the engine of eager code differentiates: right where torch.func cannot enter them.

A twin of each function does the same where torch.func can: the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import gradkit
from benchmarks.reading import own_code
from gradkit import func, meta
from gradkit._compat.transforms import engine_calls, function_modes
from gradkit._torch_bugs.monitor import active_monitors
from tests.fuzz import eager_functions
from tests.fuzz.cases import Refused
from tests.fuzz.eager_functions import Cubed
from tests.helpers import unchanged

F64 = torch.float64
Fn = Callable[[Tensor], Tensor]


@given(seed=st.integers(0, 1 << 20))
def test_random_programs_are_torch_funcs(device: torch.device, seed: int) -> None:
    """Law: results, which of them carry a graph, and two orders of their derivatives."""
    with suppress(Refused):  # of which the room knows the reasons
        eager_functions.functions(Random(seed))


# --- what eager code may do


def hooked_module(x: Tensor) -> Tensor:
    layer = nn.Tanh()
    layer.register_full_backward_hook(lambda module, grads, outputs: None)
    out: Tensor = layer(x * 2)
    return out.sum() * x.square().sum()


def retained(x: Tensor) -> Tensor:
    y = (x * 2).tanh()
    if y.requires_grad:
        y.retain_grad()
    return y.sum() * x.square().sum()


def forces(x: Tensor) -> Tensor:
    """Energies and forces, as people write them."""
    x = x.requires_grad_()
    energy = (x**4).sum()
    force = -torch.autograd.grad(energy, x, create_graph=True)[0]
    return energy + force.square().sum()


def saved(x: Tensor, hooks: Any) -> Tensor:
    with hooks:
        return (x * x.sin()).tanh().sum()


def block(x: Tensor) -> Tensor:
    return torch.tanh(x * x).sum() * x.sum()


GAINS: dict[str, tuple[Fn, Fn]] = {
    "a Function with ctx": (lambda x: Cubed.apply(x).sum(), lambda x: (x**3).sum()),
    "a checkpoint": (lambda x: checkpoint(block, x, use_reentrant=False), block),
    "save_on_cpu": (lambda x: saved(x, save_on_cpu()), lambda x: (x * x.sin()).tanh().sum()),
    "saved_tensors_hooks": (
        lambda x: saved(x, saved_tensors_hooks(torch.clone, torch.clone)),
        lambda x: (x * x.sin()).tanh().sum(),
    ),
    "a full backward hook": (hooked_module, lambda x: (x * 2).tanh().sum() * x.square().sum()),
    "retain_grad": (retained, lambda x: (x * 2).tanh().sum() * x.square().sum()),
    "autograd.grad": (forces, lambda x: (x**4).sum() + (4 * x**3).square().sum()),
    "requires_grad_": (lambda x: (x.requires_grad_() ** 3).sum(), lambda x: (x**3).sum()),
}


def slope(fn: Fn, along: Tensor, create_graph: bool | None = None) -> Fn:
    return lambda x: (func.value_and_grads(fn, create_graph=create_graph)(x)[1] * along).sum()


def difference(fn: Fn, x: Tensor, along: Tensor, step: float = 1e-5) -> Tensor:
    return (fn(x + step * along) - fn(x - step * along)).detach() / (2 * step)


@pytest.mark.parametrize("name", GAINS)
def test_it_is_right_to_second_order(device: torch.device, name: str) -> None:
    fn, twin = GAINS[name]
    x = torch.tensor([0.7, -0.4, 1.2], dtype=F64, device=device)
    along = torch.tensor([1.0, -2.0, 0.5], dtype=F64, device=device)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    with unchanged(x):
        for create_graph in (None, True, False):
            call = func.value_and_grads(fn, create_graph=create_graph)
            close(call(x), torch.func.grad_and_value(twin)(x)[::-1])
            close(slope(fn, along, create_graph)(x), difference(twin, x, along))
        (row,) = func.per_loss_grads(lambda x: fn(x)[None])(x)
        close(row, torch.func.grad(twin)(x))
        nested = slope(slope(fn, along), along)(x)
        close(nested, difference(slope(twin, along), x, along))
        leaf = x.clone().requires_grad_()
        (outside,) = torch.autograd.grad(slope(fn, along)(leaf), leaf)
        close((outside * along).sum(), nested)


@pytest.mark.parametrize("name", GAINS)
def test_products_are_right_to_second_order(device: torch.device, name: str) -> None:
    fn, twin = GAINS[name]
    x = torch.tensor([0.7, -0.4, 1.2], dtype=F64, device=device)
    along = torch.tensor([1.0, -2.0, 0.5], dtype=F64, device=device)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    two = torch.full((), 2.0, dtype=F64, device=device)
    with unchanged(x):
        gradient, second = torch.func.grad(twin)(x), difference(torch.func.grad(twin), x, along)
        value, pull = func.vjp(fn, x)
        close(value, twin(x))
        for _ in range(2):
            close(pull(two)[0], 2 * gradient)
        close(func.linearize(fn, x)[1](along), gradient @ along)
        close(func.ggn_vp(fn, torch.square, x, along)[1], 2 * gradient * (gradient @ along))
        grads, product = func.hvp(fn, x, along, mode="reverse-over-reverse")
        close((grads, product), (gradient, second))
        inner = lambda x: func.value_and_grads(fn)(x)[1]  # noqa: E731
        close(func.vjp(inner, x)[1](along)[0], second)
        close(func.linearize(inner, x)[1](along), second)


@pytest.mark.parametrize("create_graph", [None, False])
def test_outputs_and_pulls_carry_the_graph_of_what_is_outside(
    device: torch.device, create_graph: bool | None
) -> None:
    w = torch.tensor([0.7, -0.4], dtype=F64, device=device).requires_grad_()
    for fn, x in ((lambda x: (x * w).sin(), w.detach()), (torch.sin, w)):
        cotangent = torch.ones_like(x)
        derivatives: list[Tensor] = []
        for vjp in (partial(func.vjp, create_graph=create_graph), torch.func.vjp):
            values, pull, *_ = vjp(fn, x)
            for result in (values, pull(cotangent)[0], pull(cotangent)[0]):
                derivatives.append(result.detach())
                assert result.requires_grad == (create_graph is None or vjp is torch.func.vjp)
                if result.requires_grad:
                    derivatives += torch.autograd.grad(result.sum(), w, retain_graph=True)
        if create_graph is None:
            torch.testing.assert_close(derivatives[:6], derivatives[6:])
        assert x.grad is None


def test_a_pull_whose_graph_a_pass_through_the_outputs_has_freed(device: torch.device) -> None:
    w = torch.tensor([0.7, -0.4], dtype=F64, device=device).requires_grad_()
    for retain in (False, True):
        values, pull = func.vjp(torch.sin, w)
        torch.autograd.grad(values.sum(), w, retain_graph=retain)
        if retain:
            torch.testing.assert_close(pull(w.detach())[0], w.cos() * w)
        else:
            with pytest.raises(gradkit.FreedGraphError, match="retain_graph=True"):
                pull(w.detach())


def test_a_pull_of_eager_code_in_other_calls(device: torch.device) -> None:
    """Values are torch.func's; no call of gradkit's leaves a graph to the function's variables."""
    x = torch.tensor([0.7, -0.4, 1.2], dtype=F64, device=device)

    def fn(x: Tensor) -> Tensor:
        return (x**3).sin() * x.sum()

    (_, pull), (_, theirs, *_) = func.vjp(fn, x), torch.func.vjp(fn, x)
    rows = torch.eye(3, dtype=F64, device=device)
    for call in (
        lambda pull: torch.vmap(pull)(rows)[0],
        lambda pull: func.per_loss_grads(lambda u: pull(u)[0])(x),
        lambda pull: func.value_and_grads(lambda u: pull(u)[0].square().sum())(x)[1],
        lambda pull: func.vjp(lambda u: pull(u)[0], x)[1](x)[0],
        lambda pull: func.linearize(lambda u: pull(u)[0].sin(), x)[1](x),
        lambda pull: func.jvp(lambda u: pull(u)[0].sin(), x, x)[1],
        lambda pull: func.hvp(lambda u: (pull(u)[0] ** 3).sum(), x, x)[1],
        lambda pull: func.hvp(lambda u: (pull(u)[0] ** 3).sum(), x, x, mode="reverse-over-reverse")[
            1
        ],
    ):
        ours = call(pull)
        torch.testing.assert_close(ours, call(theirs))
        assert not ours.requires_grad
    for transformed in (
        lambda pull: torch.func.grad(lambda u: pull(u)[0].square().sum())(x),
        lambda pull: torch.func.jvp(lambda u: pull(u)[0].square(), (x,), (x,))[1],
        lambda pull: torch.func.hessian(lambda u: (pull(u)[0] ** 3).sum())(x),
        lambda pull: torch.vmap(torch.func.jacrev(lambda u: pull(u)[0]))(rows),
    ):
        torch.testing.assert_close(transformed(pull).detach(), transformed(theirs))


def test_a_pull_says_what_fn_has_saved_and_was_changed(device: torch.device) -> None:
    x, factor = torch.ones(2, device=device), torch.full((2,), 2.0, device=device)
    pull = func.vjp(lambda x: x * factor, x)[1]
    assert torch.equal(pull(x)[0], factor)
    factor.mul_(2)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^fn: .* changed in place since"):
        pull(x)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_hooks_of_a_function_run_in_pulls_alone(device: torch.device, requires_grad: bool) -> None:
    """Not in passes through what the call has returned: as with torch.func."""
    x = torch.tensor([0.7, -0.4], dtype=F64, device=device, requires_grad=requires_grad)
    seen: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        y = x * x
        y.register_hook(lambda grad: seen.append(grad))
        return y * y

    values, pull = func.vjp(fn, x)
    for count in (1, 2):
        result = pull(x.detach())[0]
        torch.testing.assert_close(result, 4 * x.detach() ** 4, check_device=False)
        assert len(seen) == count
    if requires_grad:
        for one in (values, result):
            torch.autograd.grad(one.sum(), x, retain_graph=True)
    assert len(seen) == 2


def test_hooks_run_in_pulls_of_several_threads_and_after_an_interrupt(device: torch.device) -> None:
    x = torch.tensor([0.7, -0.4], dtype=F64, device=device, requires_grad=True)
    interrupts = [True]

    def fn(x: Tensor) -> Tensor:
        def hook(grad: Tensor) -> Tensor:
            if interrupts and interrupts.pop():
                raise KeyboardInterrupt
            return 3 * grad

        y = x * x
        y.register_hook(hook)
        return y.sin()

    values, pull = func.vjp(fn, x)
    cotangent, right = torch.ones_like(x), 6 * x.detach() * (x.detach() ** 2).cos()
    with pytest.raises(KeyboardInterrupt):
        pull(cotangent)
    (without,) = torch.autograd.grad(values.sum(), x, retain_graph=True)
    torch.testing.assert_close(without, right / 3)
    with ThreadPoolExecutor(4) as pool:
        for pulled in pool.map(lambda _: pull(cotangent)[0], range(40)):
            torch.testing.assert_close(pulled.detach(), right)


def test_hooks_of_nodes_would_run_in_passes_through_the_outputs(device: torch.device) -> None:
    x = torch.tensor([0.7, -0.4], dtype=F64, device=device, requires_grad=True)
    fn = lambda x: before_node(x).sin()  # noqa: E731
    with pytest.raises(gradkit.UnsupportedGraphError, match="create_graph=False"):
        func.vjp(fn, x)
    pulled = func.vjp(fn, x, create_graph=False)[1](torch.ones_like(x))[0]
    torch.testing.assert_close(pulled, 4.5 * (1.5 * x.detach()).cos())


# Where a hook that triples a gradient may be; each is registered by the function itself, or before.


def on_tensor(x: Tensor) -> Tensor:
    y = x * 1.5
    y.register_hook(lambda grad: grad * 3)
    return y


def before_node(x: Tensor) -> Tensor:
    y = x * 1.5
    node: Any = y.grad_fn
    node.register_prehook(lambda grads: tuple(grad * 3 for grad in grads))
    return y


def on_node(x: Tensor) -> Tensor:
    y = x * 1.5
    node: Any = y.grad_fn
    node.register_hook(lambda grads, _: tuple(None if g is None else g * 3 for g in grads))
    return y


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5


def tripled(module: nn.Module, grads: Any, *_: Any) -> tuple[Tensor, ...]:
    return tuple(grad * 3 for grad in grads)


def hooked_before() -> nn.Module:
    module = Times()
    module.register_full_backward_hook(tripled)
    return module


def of_new_module(x: Tensor) -> Tensor:
    module = Times()
    module.register_full_backward_pre_hook(tripled)
    result: Tensor = module(x)
    return result


TRIPLED = {
    "tensor": on_tensor,
    "before a node": before_node,
    "node": on_node,
    "module": hooked_before(),
    "a module's, before": of_new_module,
}


@pytest.mark.parametrize("where", TRIPLED)
def test_a_hook_that_changes_a_gradient_is_in_its_derivatives_once(
    device: torch.device, where: str
) -> None:
    """The gradient is 27 w: its hook would run again in the pass through its graph."""
    w = torch.tensor([0.1, 0.2], dtype=F64, device=device)

    def loss(w: Tensor) -> Tensor:
        return TRIPLED[where](w * 2).square().sum() / 2

    def penalty(w: Tensor) -> Tensor:
        grad: Tensor = func.value_and_grads(loss)(w)[1]
        return grad.sin().sum()

    def through_steps(w: Tensor) -> Tensor:
        inner = lambda p, outer, batch: loss(p["w"])  # noqa: E731
        run = meta.unroll(inner, {"w": w}, [None], meta.sgd(0.1))
        return run.params["w"].sin().sum()

    leaf, right = w.clone().requires_grad_(), 27 * (27 * w).cos()
    for grads in (
        func.value_and_grads(penalty)(w)[1],
        func.per_loss_grads(lambda w: [penalty(w)])(w)[0],
        gradkit.value_and_grads(penalty(leaf), leaf)[1],
        func.value_and_grads(lambda w: func.checkpoint(penalty)(w))(w)[1],
    ):
        torch.testing.assert_close(grads, right)
    second = func.value_and_grads(lambda w: func.value_and_grads(penalty)(w)[1].sum())(w)[1]
    torch.testing.assert_close(second, -27 * 27 * (27 * w).sin())
    for call in (
        lambda: func.value_and_grads(through_steps)(w),
        lambda: gradkit.value_and_grads(through_steps(leaf), leaf),
    ):
        with pytest.raises(gradkit.UnsupportedGraphError, match="that no hook has changed"):
            call()


def test_hooks_of_a_function_end_with_its_call(device: torch.device) -> None:
    """As with a level of torch.func: what differentiates the gradient does not run them again."""
    x = torch.tensor([0.7, -0.4], dtype=F64, device=device)
    seen: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        y = x * x

        def hook(grad: Tensor) -> Tensor:
            seen.append(grad)
            return grad * grad * 3

        y.register_hook(hook)
        return (y * y).sum()

    def penalty(gradient: Callable[..., Any], x: Tensor) -> Tensor:
        result: Tensor = gradient(x).square().sum()
        return result

    ours = func.value_and_grads(partial(penalty, lambda x: func.value_and_grads(fn)(x)[1]))(x)[1]
    assert len(seen) == 1
    theirs = torch.func.grad(partial(penalty, torch.func.grad(fn)))(x)
    torch.testing.assert_close(ours, theirs)
    leaf = x.clone().requires_grad_()
    for call in (lambda x: func.value_and_grads(fn)(x)[1], torch.func.grad(fn)):
        seen.clear()
        (second,) = torch.autograd.grad(penalty(call, leaf), leaf)
        torch.testing.assert_close(second, theirs)
        assert len(seen) == 1


def test_aux_carries_the_graph_of_what_it_was_computed_from(device: torch.device) -> None:
    """Also where the losses do not: as with torch.func."""
    x, learned = torch.ones(2, device=device), torch.ones(2, device=device, requires_grad=True)

    def fn(x: Tensor) -> Any:
        return x.square().sum(), {"both": learned * x, "own": x * 2, "learned": learned}

    (value, aux), grads = func.value_and_grads(fn, has_aux=True)(x)
    theirs, (_, expected) = torch.func.grad_and_value(fn, has_aux=True)(x)
    flags = [{k: v.requires_grad for k, v in each.items()} for each in (aux, expected)]
    assert flags[0] == flags[1]
    assert torch.equal(torch.autograd.grad(aux["both"].sum(), learned)[0], x)
    assert torch.equal(grads, theirs)
    assert not (value.requires_grad)
    assert not (grads.requires_grad)
    (_, aux), _ = func.value_and_grads(fn, has_aux=True, create_graph=False)(x)
    assert not any(v.requires_grad for v in aux.values())


# --- what it may not


NORM = nn.BatchNorm1d(2)
OUTSIDE, LEARNED = torch.zeros(2), torch.ones(2, requires_grad=True)


def backward(x: Tensor) -> Tensor:
    torch.autograd.backward(x.square().sum())
    return x.sum()


def written(x: Tensor, target: Callable[[Tensor], Any], *, grad: bool = True) -> Tensor:
    with torch.set_grad_enabled(grad):
        target(x)
    return x.square().sum()


def set_data(x: Tensor) -> None:
    OUTSIDE.data = x.detach()


WRITES: dict[str, tuple[Fn, str]] = {
    "backward": (lambda x: written(x, lambda x: x.sum().backward()), "call of backward"),
    "torch.autograd.backward": (backward, "call of backward"),
    "requires_grad_ outside": (
        lambda x: written(x, lambda x: OUTSIDE.requires_grad_()), "requires_grad_"),
    "freezing outside": (
        lambda x: written(x, lambda x: LEARNED.requires_grad_(False)), "requires_grad_"),
    "in place": (lambda x: written(x, OUTSIDE.add_), "tensor from outside"),
    "an index": (lambda x: written(x, lambda x: OUTSIDE.__setitem__(0, x[0])), "from outside"),
    "a view": (lambda x: written(x, lambda x: OUTSIDE.view(2, 1).mul_(2)), "from outside"),
    "detached": (lambda x: written(x, lambda x: OUTSIDE.detach().mul_(2)), "from outside"),
    "data": (lambda x: written(x, lambda x: LEARNED.data.mul_(2)), "from outside"),
    "an assignment to data": (lambda x: written(x, set_data), "from outside"),
    "out": (lambda x: written(x, lambda x: torch.add(x.detach(), 1, out=OUTSIDE)), "from outside"),
    "an operator": (
        lambda x: written(x, lambda x: torch.ops.aten.add_.Tensor(OUTSIDE, x.detach())),
        "from outside"),
    "an operator by name": (
        lambda x: written(x, lambda x: torch.ops.aten.mul_(OUTSIDE, 2)), "from outside"),
    "in lists": (lambda x: written(x, lambda x: torch._foreach_add_([OUTSIDE], 1)), "from outside"),
    "an activation": (
        lambda x: written(x, lambda x: nn.functional.relu(OUTSIDE, inplace=True)), "from outside"),
    "max_norm": (
        lambda x: written(x, lambda x: nn.functional.embedding(
            torch.tensor([0]), OUTSIDE[None], max_norm=0.1)), "from outside"),
    "statistics": (lambda x: NORM(x.expand(3, 2)).square().sum(), "from outside: batch norm"),
    "the argument": (
        lambda x: written(x, lambda x: x.mul_(2), grad=False), "changes an argument in place"),
}  # fmt: skip


@pytest.mark.parametrize("create_graph", [None, False])
@pytest.mark.parametrize("is_variable", [True, False], ids=["variable", "constant"])
@pytest.mark.parametrize("name", WRITES)
def test_nothing_outside_is_changed(
    device: torch.device, name: str, is_variable: bool, create_graph: bool | None
) -> None:
    fn, text = WRITES[name]
    x = torch.ones(2, requires_grad=is_variable)
    x = x * 1 if is_variable else x
    statistics = [*NORM.buffers()]
    call = func.value_and_grads(fn, create_graph=create_graph)
    world = unchanged(x, OUTSIDE, LEARNED, *NORM.parameters(), *statistics)
    with world, pytest.raises(gradkit.UnsupportedGraphError, match=text):
        call(x)
    assert engine_calls.depth == active_monitors() == len(function_modes()) == 0


def test_its_own_tensors_may_be_written_on(device: torch.device) -> None:
    x = torch.ones(2, device=device)

    def fn(x: Tensor) -> Tensor:
        mask = torch.zeros(2, device=device)
        mask[0] = 2.0
        y = nn.functional.relu(x * mask, inplace=True)
        return torch.mul(y, 3, out=torch.empty(0, device=device)).sum() if y.is_meta else y.sum()

    assert func.value_and_grads(fn)(x)[1].tolist() == [2, 0]


@contextmanager
def untouched() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)
    assert engine_calls.depth == active_monitors() == len(function_modes()) == 0
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_error_all_is_as_before(device: torch.device, error: type[BaseException]) -> None:
    x = torch.ones(2, device=device)

    def fn(x: Tensor) -> Tensor:
        torch.rand(3)
        raise error

    def outer(x: Tensor) -> Tensor:
        result: Tensor = func.value_and_grads(fn)(x)[0]
        return result

    for call in (func.value_and_grads(fn), func.per_loss_grads(outer), func.value_and_grads(outer)):
        with untouched(), pytest.raises(error):
            call(x)


# --- checkpoints


class Net(nn.Module):
    """Blocks with a batch norm, in checkpoints or not, a frozen scale, and a buffer."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("shift", torch.ones(3))
        self.checkpoints = checkpoints
        self.double()

    def block(self, x: Tensor) -> Tensor:
        shift: Any = self.shift
        return torch.tanh(self.norm(self.first(x + shift)) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (
                checkpoint(self.block, x, use_reentrant=False)
                if self.checkpoints
                else self.block(x)
            )
        return x.square().sum()


def by_make_functional(net: Net, buffers: Any, x: Tensor, params: Any) -> Any:
    call, _, _ = func.make_functional(net)
    return call({"scale": params["scale"], **params}, buffers, x)


def by_functional_call(net: Net, buffers: Any, x: Tensor, params: Any) -> Any:
    new = {name: buffer.clone() for name, buffer in buffers.items()}
    return functional_call(net, {**params, **new}, (x,)), new


@pytest.mark.parametrize("call", [by_make_functional, by_functional_call])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_checkpoint_recomputes_with_the_tensors_of_the_call(
    device: torch.device, call: Callable[..., Any], training: bool
) -> None:
    """Parameters, frozen ones and buffers, to second order; each buffer is written on once."""
    results = []
    for checkpoints in (True, False):
        net = Net(checkpoints=checkpoints).to(device).train(training)
        given = {name: x.detach() * 1.5 for name, x in net.named_parameters()}
        buffers = {name: x + 1 for name, x in net.named_buffers()}
        x = torch.arange(12.0, dtype=F64, device=device).view(4, 3).sin()
        loss = partial(call, net, buffers, x)

        def penalty(params: Any, loss: Any = loss) -> Tensor:
            _, grads = func.value_and_grads(loss, has_aux=True)(params)
            return torch.stack([grad.square().sum() for grad in grads.values()]).sum()

        with unchanged(*net.parameters(), *net.buffers(), *given.values(), *buffers.values()):
            one = [
                func.value_and_grads(loss, has_aux=True, create_graph=create_graph)(given)
                for create_graph in (None, True, False)
            ]
            leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
            (value, _), grads = func.value_and_grads(loss, has_aux=True)(leaves)
            total = value + torch.stack([grad.square().sum() for grad in grads.values()]).sum()
            outside = torch.autograd.grad(total, list(leaves.values()))
            results.append((one, func.value_and_grads(penalty)(given), outside))
    torch.testing.assert_close(*results)


def test_a_checkpoint_that_ran_with_other_parameters_is_refused(device: torch.device) -> None:
    net = Net(checkpoints=True).to(device).eval()
    x = torch.arange(12.0, dtype=F64, device=device).view(4, 3).sin()
    params = {
        name: (x.detach() * 1.5).requires_grad_(name != "scale")
        for name, x in net.named_parameters()
    }

    def loss(params: Any) -> Tensor:
        result: Tensor = functional_call(net, params, (x,))
        return result

    trained = {name: x for name, x in params.items() if x.requires_grad}
    right = gradkit.value_and_grads(
        functional_call(Net(checkpoints=False).to(device).eval(), params, (x,)), trained
    )
    match = r"(?s)Net\.block .*the module's own.*checkpoint\(functional_call"
    calls: list[Callable[[], object]] = [
        lambda: gradkit.value_and_grads(loss(params), trained),
        lambda: gradkit.value_and_grads(loss(params), trained, create_graph=True),
        lambda: gradkit.per_loss_grads([loss(params), loss(params)], trained),
        lambda: gradkit.backward_(loss(params)),
    ]
    for call in calls:
        with unchanged(*params.values()), pytest.raises(gradkit.UnsupportedGraphError, match=match):
            call()
    net.checkpoints = False
    whole = checkpoint(functional_call, net, params, (x,), use_reentrant=False)
    torch.testing.assert_close(gradkit.value_and_grads(whole, trained), right)
    net.checkpoints = True
    with gradkit.checked():
        torch.testing.assert_close(func.value_and_grads(lambda p: loss(params | p))(trained), right)


class Heads(nn.Module):
    """Two results of one checkpoint, and a teacher under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.teacher = (nn.Linear(3, 3) for _ in range(3))

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x)
        return torch.tanh(self.first(x)) * target, torch.tanh(self.second(x)) + self.second.bias

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.both, x, use_reentrant=False)


def test_a_checkpoint_of_a_module_as_it_is_runs(device: torch.device) -> None:
    """Also where it reads parameters that this loss has no part of."""
    heads, x = Heads().to(device), torch.arange(12.0, device=device).view(4, 3).sin()
    for index in (0, 1):
        results, plain = heads(x), heads.both(x)  # both are alive
        got = gradkit.value_and_grads(results[index].sum(), heads)
        torch.testing.assert_close(got, gradkit.value_and_grads(plain[index].sum(), heads))


# --- what is left behind


@pytest.mark.parametrize("create_graph", [None, False])
def test_an_autocast_block_keeps_no_copies_of_the_arguments(
    device: torch.device, create_graph: bool | None
) -> None:
    w, x = torch.ones(64, 64, device=device), torch.ones(1, 64, device=device)
    call = func.value_and_grads(lambda w: (x @ w).float().sum(), create_graph=create_graph)

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[Any] = []

        def __torch_dispatch__(
            self, fn: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = fn(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.bfloat16 and out.shape == w.shape:
                self.made.append(out.untyped_storage()._weak_ref())
            return out

    with torch.autocast(device.type, dtype=torch.bfloat16):
        with Seen() as seen:
            call(w)
        assert seen.made
        ended = [torch.UntypedStorage._expired(reference) for reference in seen.made]
    assert all(ended)


def test_functions_in_a_function_are_seen_once(device: torch.device) -> None:
    """The monitor of the outer function does not see what gradkit itself reads."""
    x, calls = torch.ones(2, device=device), 0

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, fn: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal calls
            calls += 1
            return fn(*args, **(kwargs or {}))

    def inner(x: Tensor) -> Tensor:
        return (x**3).sum()

    def outer(x: Tensor) -> Tensor:
        with Count():
            return func.value_and_grads(inner)(x)[1].sum()

    assert func.value_and_grads(outer)(x)[1].tolist() == [6, 6]
    assert calls <= 5  # the power, two sums


def test_a_step_inside_of_a_function(device: torch.device) -> None:
    """Func around unroll around func."""
    w = torch.tensor([0.5, -0.3], dtype=F64, device=device)

    def inner(p: Tensor, outer: Tensor, batch: Any) -> Tensor:
        _, grad = func.value_and_grads(lambda p: (p**4).sum())(p)
        return (grad * outer).sum() + (p - outer).square().sum()

    def adapted(w: Tensor) -> Tensor:
        return meta.unroll(inner, w * 2, [0, 1], meta.sgd(0.1), outer=w).params.square().sum()

    def by_hand(w: Tensor) -> Tensor:
        p = w * 2
        for _ in range(2):
            p = p - 0.1 * torch.func.grad(lambda p: (4 * p**3 * w).sum() + (p - w).square().sum())(
                p
            )
        return p.square().sum()

    torch.testing.assert_close(
        func.value_and_grads(adapted)(w), torch.func.grad_and_value(by_hand)(w)[::-1]
    )


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * 2


def test_a_guarded_pass_of_a_function_is_that_of_the_eager_calls(device: torch.device) -> None:
    """What guards against hooks and Functions is there once; 2 functions in 5 are the same."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    model[1].register_full_backward_hook(lambda module, grads, outputs: None)
    call, params, buffers = func.make_functional(model)
    x = torch.ones(5, 3, device=device)

    def loss(out: Tensor) -> Tensor:
        return Doubled.apply(out).square().mean()

    def of_params(params: Any) -> Tensor:
        return loss(call(params, buffers, x)[0])

    eager = own_code(lambda: gradkit.value_and_grads(loss(model(x)), model))
    ours = own_code(lambda: func.value_and_grads(of_params)(params))
    shared = {code.co_qualname for code in eager & ours}
    assert {"side_effects_put_back", "copied_on_arrival", "grad_versions"} <= shared
    # On a device, neither looks at what a Function keeps in memory.
    assert len(shared) >= (0.4 if device.type == "cpu" else 1 / 3) * len(eager)
