"""step_ writes on no gradient: every class of torch.optim, with every option."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradkit
from gradkit._state import grad_attribute
from gradkit.dotgrad import _step
from gradkit.dotgrad._kernels import KERNELS
from tests.helpers import assert_same_bits

FLAGS: dict[str, list[Any]] = {
    "foreach": [None, True, False], "fused": [None, True], "maximize": [False, True],
    "weight_decay": [0.0, 0.1], "momentum": [0.0, 0.9], "nesterov": [False, True],
    "amsgrad": [False, True], "centered": [False, True],
    "decoupled_weight_decay": [False, True],
}  # fmt: skip


def combinations(cls: Any) -> Iterator[dict[str, Any]]:
    """Yield every combination of the flags that an optimizer takes, but for those it refuses."""
    code = cls.__init__.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = [name for name in FLAGS if name in arguments]
    for values in product(*(FLAGS[name] for name in names)):
        hyper = dict(zip(names, values, strict=True))
        try:
            cls([torch.ones(2, 2, requires_grad=True)], lr=0.1, **hyper)
        except (ValueError, RuntimeError, TypeError):
            continue
        yield hyper


def net(device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(4, 3), (3, 4)]
    return [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]


def grads_of(params: list[nn.Parameter], step: int) -> list[Tensor]:
    return [torch.sin(p.detach() + step) for p in params]


CLASSES = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type)
    and issubclass(kind, optim.Optimizer)
    and kind not in {optim.Optimizer, optim.LBFGS, optim.SparseAdam}
]


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_step_writes_on_no_gradient_and_keeps_none(device: torch.device, cls: Any) -> None:
    for hyper in combinations(cls):
        ours, theirs = net(device), net(device)
        by_step, by_loop = (cls(params, lr=0.1, **hyper) for params in (ours, theirs))
        for step in range(3):
            grads = grads_of(ours, step)
            if step == 1:  # with a graph, as `create_graph=True` gives them
                grads = [grad.requires_grad_() * 1 for grad in grads]
            before = [grad.detach().clone() for grad in grads]
            gradkit.step_(by_step, ours, grads)
            for param, grad in zip(theirs, grads_of(theirs, step), strict=True):
                param.grad = grad
            by_loop.step()
            assert_same_bits([grad.detach() for grad in grads], before)
            assert_same_bits(list(ours), list(theirs))
            assert all(param.grad is None for param in ours)
            values = [x for state in by_step.state.values() for x in state.values()]
            held = [x for x in values if isinstance(x, Tensor)]
            assert not any(x.requires_grad for x in held)
            addresses = {x.data_ptr() for x in held}
            assert addresses.isdisjoint(grad.data_ptr() for grad in grads)


def writes(hook: str) -> optim.Optimizer:
    param = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([param], lr=0.1)

    def clear(*_: Any) -> None:
        assert param.grad is not None
        param.grad.zero_()

    getattr(optimizer, f"register_step_{hook}_hook")(clear)
    return optimizer


class Own(optim.SGD):
    """A subclass, which may do anything with its gradients."""


def test_what_a_step_does_to_grad_is_done_to_copies(device: torch.device) -> None:
    param = nn.Parameter(torch.ones(2, device=device))
    nesterov = optim.SGD([param], lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    patched = optim.SGD([param], lr=0.1)
    patched.step = lambda: param.grad.zero_()  # type: ignore
    for optimizer in (nesterov, patched, Own([param], lr=0.1), writes("pre"), writes("post")):
        own = optimizer.param_groups[0]["params"]
        grads = [torch.ones_like(own[0])]
        gradkit.step_(optimizer, own, grads)
        gradkit.step_(optimizer, own, grads)
        assert grads[0].tolist() == [1, 1]


@pytest.mark.parametrize("cls", [optim.SGD, Own])
def test_a_step_that_raises_leaves_grad_as_it_was(device: torch.device, cls: Any) -> None:
    params = net(device)
    before = [torch.ones_like(param) for param in params]
    for param, grad in zip(params, before, strict=True):
        param.grad = grad
    optimizer = cls(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = "none"
    grads = grads_of(params, 0)
    with pytest.raises(TypeError):
        gradkit.step_(optimizer, params, grads)
    assert all(param.grad is grad for param, grad in zip(params, before, strict=True))
    assert_same_bits(before, [torch.ones_like(param) for param in params])
    assert_same_bits(grads, grads_of(params, 0))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the list of the leaves whose gradients are copied to `.grad` from here on."""
    leaves: list[Tensor] = []
    write_all = grad_attribute.write_all

    def noted(pairs: Any) -> None:
        leaves.extend(leaf for leaf, _ in pairs)
        write_all(pairs)

    monkeypatch.setattr(_step, "write_all", noted)
    return leaves


@pytest.mark.parametrize("cls", KERNELS, ids=lambda cls: cls.__name__)
def test_a_kernel_is_given_the_gradients_themselves(
    device: torch.device, cls: Any, copied: list[Tensor]
) -> None:
    params = net(device)
    optimizer = cls(params, lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    gradkit.step_(optimizer, params, grads_of(params, 0))  # which makes the states
    copied.clear()
    gradkit.step_(optimizer, params, grads_of(params, 1))
    assert not copied


def test_what_a_kernel_may_not_be_given_is_copied(
    device: torch.device, copied: list[Tensor]
) -> None:
    params = net(device)
    optimizer = optim.SGD(params, lr=0.1)
    strided = [torch.ones(3, 4, device=device).T, torch.ones_like(params[1])]
    gradkit.step_(optimizer, params, strided)
    assert list(map(id, copied)) == list(map(id, params))  # the layout of one is another
    copied.clear()
    aliases = [params[0].detach(), torch.ones_like(params[1])]
    gradkit.step_(optimizer, params, aliases)
    assert list(map(id, copied)) == list(map(id, params))  # one changes during the step
    copied.clear()
    conv = nn.Conv2d(3, 4, 3).to(device, memory_format=torch.channels_last)
    loss = conv(torch.randn(1, 3, 5, 5, device=device)).sum()
    gradkit.step_(optim.SGD(conv.parameters()), conv, gradkit.value_and_grads(loss, conv)[1])
    assert not copied


@pytest.mark.parametrize("former", [False, True])
def test_the_gradients_of_a_part_are_not_copied(
    device: torch.device, copied: list[Tensor], former: bool
) -> None:
    """Where some parameters are frozen or unused, and beside what another loop has left."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))).to(device)
    model[0].requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = [torch.ones_like(p) if former else None for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    for param, grad in zip(model.parameters(), before, strict=True):
        param.grad = grad
    _, grads = gradkit.value_and_grads(model[:3](torch.ones(2, device=device)).sum(), model)
    gradkit.step_(optimizer, model, grads)
    assert not copied
    changed = [not w.equal(p) for w, p in zip(weights, model.parameters(), strict=True)]
    assert changed == [False, False, *[True] * 4, False, False]
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is grad
        assert grad is None or grad.eq(1).all()


def test_a_gradient_inside_a_parameter_is_copied(device: torch.device) -> None:
    """The step changes it while it is read."""
    a = torch.arange(8.0, device=device).view(4, 2).requires_grad_()
    b = torch.zeros(2, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([a, b], lr=1.0)
    gradkit.step_(optimizer, [a, b], [torch.ones_like(a), a.detach()[2]])
    assert b.tolist() == [-4, -5]


def test_a_gradient_keeps_its_graph(device: torch.device) -> None:
    params = net(device)
    loss = sum((p**3).sum() for p in params)
    _, grads = gradkit.value_and_grads(loss, params, create_graph=True)
    gradkit.step_(optim.SGD(params, lr=0.1), params, grads)
    assert all(grad.requires_grad for grad in grads)


def test_gradients_made_in_inference_mode_are_copied(device: torch.device) -> None:
    param = nn.Parameter(torch.ones(3, device=device))
    with torch.inference_mode():
        grad = torch.ones(3, device=device)
    gradkit.step_(optim.SGD([param], lr=0.5), [param], [grad])
    assert param.tolist() == [0.5] * 3


def test_putting_back_a_view_is_no_write_of_the_step(device: torch.device) -> None:
    param = nn.Parameter(torch.ones(3, device=device))
    param.grad = torch.ones(4, device=device)[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradkit.step_(optim.SGD([param], lr=0.5), [param], [param.grad])
    assert param.tolist() == [0.5] * 3


class Twice(nn.Module):
    """Lists its one parameter under two names."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, device=device))

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield "a", self.a
        yield "b", self.a


def test_a_parameter_that_a_module_lists_twice_counts_once(device: torch.device) -> None:
    module, one = Twice(device), torch.ones(2, device=device)
    gradkit.add_grads_(module, {"a": one, "b": one})
    assert module.a.grad is not None
    assert module.a.grad.tolist() == [1, 1]
    with pytest.raises(gradkit.StructureError, match="in another place"):
        gradkit.step_(optim.SGD([module.a], lr=1.0), module, {"a": one, "b": one * 5})
    assert module.a.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["momentum_buffer", "a view of it"])
def test_a_gradient_inside_the_state_is_copied(device: torch.device, name: str) -> None:
    """The step writes on its state while it reads the gradient."""
    ours, theirs = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    both = [optim.SGD([p], lr=0.1, momentum=0.9) for p in (ours, theirs)]
    for p, optimizer in zip((ours, theirs), both, strict=True):
        p.grad = torch.arange(3.0, device=device)
        optimizer.step()
        p.grad = None
    buffers = [
        optimizer.state[p]["momentum_buffer"]
        for optimizer, p in zip(both, (ours, theirs), strict=True)
    ]
    gradkit.step_(both[0], [ours], [buffers[0] if name == "momentum_buffer" else buffers[0][:]])
    theirs.grad = buffers[1].clone()
    both[1].step()
    assert_same_bits(ours, theirs)
    assert_same_bits(*buffers)


@pytest.mark.parametrize("tree", [list, tuple, lambda x: dict(enumerate(x)), lambda x: {"a": x}])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("others", [[], [None]], ids=["all", "some missing"])
def test_a_state_is_copied_whatever_tree_holds_it(
    device: torch.device, tree: Any, kept: bool, others: list[None]
) -> None:
    """Of those that nothing else refers to, the counts of references tell a state."""
    ours, theirs = net(device), net(device)
    both = [optim.SGD(params, lr=0.1, momentum=0.9) for params in (ours, theirs)]
    for params, optimizer in zip((ours, theirs), both, strict=True):
        gradkit.step_(optimizer, params, grads_of(params, 0))
    buffers = [
        [optimizer.state[p]["momentum_buffer"] for p in params]
        for optimizer, params in zip(both, (ours, theirs), strict=True)
    ]
    for param, buffer in zip(theirs, buffers[1], strict=True):
        param.grad = buffer.clone()
    both[1].step()
    grads = tree([*others, *buffers[0]])
    if not kept:
        buffers.clear()
    gradkit.step_(both[0], tree([*others, *ours]), grads)
    assert_same_bits(list(ours), list(theirs))


@pytest.mark.parametrize("tree", [list, tuple, lambda x: dict(enumerate(x)), lambda x: {"a": x}])
def test_a_parameter_is_copied_where_it_is_a_gradient(device: torch.device, tree: Any) -> None:
    ours, theirs = (
        [nn.Parameter(torch.full((2,), value, device=device)) for value in (1.0, 3.0)]
        for _ in range(2)
    )
    both = [optim.SGD(params, lr=0.1) for params in (ours, theirs)]
    gradkit.step_(both[0], tree(ours), tree(ours[::-1]))
    for param, other in zip(theirs, theirs[::-1], strict=True):
        param.grad = other.detach().clone()
    both[1].step()
    assert_same_bits(ours, theirs)


def test_the_states_of_a_parameter_are_copied_as_a_tree_of_gradients(device: torch.device) -> None:
    ours, theirs = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    both = [optim.SGD([param], lr=0.1, momentum=0.9) for param in (ours, theirs)]
    for param, optimizer in zip((ours, theirs), both, strict=True):
        gradkit.step_(optimizer, [param], [torch.ones_like(param)])
    gradkit.step_(both[0], {"momentum_buffer": ours}, both[0].state[ours])
    theirs.grad = both[1].state[theirs]["momentum_buffer"].clone()
    both[1].step()
    assert_same_bits(ours, theirs)
    states = [optimizer.state[p] for optimizer, p in zip(both, (ours, theirs), strict=True)]
    assert_same_bits(*(state["momentum_buffer"] for state in states))
