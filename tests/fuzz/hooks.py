"""Operations with hooks of all kinds; those that see a gradient keep a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

import gradkit
from tests.fuzz.cases import HOOKED, Op
from tests.strategies import Operation, double_in_place, writable

Hook = Callable[..., Any]


def note(kept: list[Tensor], grad: Tensor | None) -> None:
    """Keep a copy of a gradient; of a batch of them, or of an undefined one, nothing."""
    if grad is not None and not torch._C._functorch.is_legacy_batchedtensor(grad):
        kept.append(grad.detach().clone())


def scaling(kept: list[Tensor], factor: float) -> Hook:
    def hook(grad: Tensor | None) -> Tensor | None:
        note(kept, grad)
        return None if grad is None else grad * factor

    return hook


def scale_all(grads: tuple[Tensor | None, ...], factor: float) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad * factor for grad in grads)


def tensor_hook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a + b
    new.register_hook(scaling(kept, 2))
    return new


def hook_on_the_first(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    """On a value that others may have used already, leaves among them."""
    a.register_hook(scaling(kept, 0.5))
    return a * b


def removed_hook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a - b
    new.register_hook(scaling(kept, 3)).remove()
    return new


def node_hook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a * b
    new.grad_fn.register_hook(lambda inputs, outputs: scale_all(inputs, 2))
    return new


def node_prehook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a + b
    new.grad_fn.register_prehook(lambda outputs: scale_all(outputs, 0.5))
    return new


def retained(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a + b
    new.retain_grad()
    return new


class Through(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a) + b


def module_hook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    module = Through()
    module.register_full_backward_hook(lambda _, inputs, outputs: scale_all(inputs, 2))
    return module(a, b)


def module_prehook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    module = Through()
    module.register_full_backward_pre_hook(lambda _, outputs: scale_all(outputs, 3))
    return module(a, b)


def saved_hooks(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved * 2, lambda packed: packed / 2):
        return torch.tanh(a) * b


def on_many(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    def keep_all(grads: Sequence[Tensor | None]) -> None:
        for grad in grads:
            note(kept, grad)

    inner = [a * 1, b * 1]
    register_multi_grad_hook(inner, keep_all)
    return inner[0] + inner[1]


def on_many_leaves(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    if a.is_leaf and b.is_leaf:
        register_multi_grad_hook([a, b], lambda grads: None)
    return a + b


def post_accumulate(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    if a.is_leaf:
        a.register_post_accumulate_grad_hook(lambda leaf: None)
    return a - b


def accumulator(leaf: Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]


def accumulate_posthook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a + b  # which holds the node
    if a.is_leaf:
        accumulator(a).register_hook(lambda inputs, outputs: None)
    return new


def accumulate_prehook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a + b
    if a.is_leaf:
        accumulator(a).register_prehook(lambda outputs: scale_all(outputs, 10))
    return new


def hook_calls_gradkit(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a + b

    def hook(grad: Tensor | None) -> Tensor | None:
        with torch.enable_grad():
            point = torch.full((2,), 1.5, dtype=a.dtype, requires_grad=True)
            value, (gradient,) = gradkit.value_and_grads((point**2).sum(), [point])
            (point**3).sum().backward()
        factor = float(gradient.sum() + point.grad.sum() + value)
        return None if grad is None else grad * factor

    new.register_hook(hook)
    return new


def doubled_in_place(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients, the first of which has been written on."""
    return (double_in_place(grads[0]) if writable(grads[0]) else grads[0], *grads[1:])


def node_hook_that_writes(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a + b
    new.grad_fn.register_hook(lambda inputs, outputs: doubled_in_place(inputs))
    return new


def node_prehook_that_writes(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a - b
    new.grad_fn.register_prehook(doubled_in_place)
    return new


def module_hook_that_writes(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    module = Through()
    module.register_full_backward_hook(lambda _, inputs, outputs: doubled_in_place(inputs))
    return module(a, b)


def module_prehook_that_writes(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    module = Through()
    module.register_full_backward_pre_hook(lambda _, outputs: doubled_in_place(outputs))
    return module(a, b)


def changing(apply: Operation) -> Op:
    """An operation with a hook that changes a gradient."""
    return Op(apply, second=(HOOKED,))


MULTI_GRAD = Op(on_many_leaves, ("register_multi_grad_hook",))
HOOKS = {
    "tensor hook": changing(tensor_hook),
    "hook on the first": changing(hook_on_the_first),
    "removed hook": Op(removed_hook),
    "node hook": changing(node_hook),
    "node pre-hook": changing(node_prehook),
    "retained": Op(retained),
    "module hook": changing(module_hook),
    "module pre-hook": changing(module_prehook),
    "saved-tensor hooks": Op(saved_hooks),
    "multi-grad hook": Op(on_many),
    "multi-grad hook on leaves": MULTI_GRAD,
    "post-accumulate hook": Op(post_accumulate),
    "AccumulateGrad hook": Op(accumulate_posthook),
}
ACCUMULATE_PREHOOKS = {
    "AccumulateGrad pre-hook": Op(accumulate_prehook, ("AccumulateGrad",), (HOOKED,)),
    "tensor hook": changing(tensor_hook),
}
WRITES = {
    "node hook that writes": Op(node_hook_that_writes),
    "node pre-hook that writes": Op(node_prehook_that_writes),
    "module hook that writes": Op(module_hook_that_writes),
    "module pre-hook that writes": Op(module_prehook_that_writes),
}
