"""retain_grad() and hooks on tensors that are changed in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import gradkit
from tests.silently_wrong._row import Case, Row


def retained_then_changed(device: torch.device) -> Case:
    def run(*, by_torch: bool) -> Tensor | None:
        y = torch.ones(1, device=device, requires_grad=True) * 2
        if by_torch:
            y.retain_grad()
        with gradkit.safe_retain(y) as kept:
            early = (3 * y).sum()
            y.mul_(5)
            (early + (7 * y).sum()).backward()
        return y.grad if by_torch else kept.grads

    y = torch.full((1,), 2.0, device=device, requires_grad=True)
    (right,) = torch.autograd.grad((3 * y).sum() + (7 * (5 * y)).sum(), y)
    return Case(run(by_torch=True), right, lambda: run(by_torch=False))


def view_whose_base_changed(device: torch.device) -> Case:
    def run(keep: Callable[[Tensor], list[Tensor]]) -> Tensor | None:
        base = torch.ones(2, device=device, requires_grad=True) * 2
        view = base[:1]
        seen = keep(view)
        base.mul_(5)
        (3 * view).sum().backward()
        return seen[0] if seen else None

    def hooked(view: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        view.register_hook(seen.append)
        return seen

    def ours() -> None:
        base = torch.ones(2, device=device, requires_grad=True) * 2
        view = base[:1]
        with gradkit.safe_retain(view):
            base.mul_(5)
            (3 * view).sum().backward()

    value = torch.full((1,), 2.0, device=device, requires_grad=True)
    (right,) = torch.autograd.grad((3 * (5 * value)).sum(), value)
    return Case(run(hooked), right, ours)


ROWS = [
    Row(
        "`y.retain_grad()`, `early = 3 * y`, `y.mul_(5)`, `(early + 7 * y).backward()`: w.r.t. the "
        "`y` before `mul_`",
        [7.0], [38.0], "`safe_retain`", retained_then_changed,
    ),
    Row(
        "`view = base[:1]` with a hook, `base.mul_(5)`, `(3 * view).backward()`: what the hook "
        "gets",
        None, [15.0], "`safe_retain`", view_whose_base_changed, gradkit.UnsupportedGraphError,
    ),
]  # fmt: skip
