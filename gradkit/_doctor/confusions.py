"""The twelve confusions of docs/confusions.md, each with a function that runs it.

A function checks what torch does here against what it did when the page was written, and what
gradkit returns against the right value, which is written out or computed by a formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradkit._doctor import accumulation, retention
from gradkit._doctor.checks import Observation


@dataclass(frozen=True)
class Confusion:
    """The title of a section of docs/confusions.md, and the function that runs it."""

    title: str
    run: Callable[[torch.device], Observation]


CONFUSIONS = (
    Confusion(
        '"The second backward changes w.grad, even if the loss does not use w"',
        accumulation.other_losses,
    ),
    Confusion(
        '"autograd.grad of a loss that does not use w gives a zero gradient"', accumulation.unused
    ),
    Confusion(
        '"After backward(), autograd.grad can be called on the same graph"', accumulation.freed
    ),
    Confusion(
        '"backward() and autograd.grad use different graphs, or different numerics"',
        accumulation.same_engine,
    ),
    Confusion(
        '"autograd.grad does not accumulate correctly for a shared parameter"', accumulation.shared
    ),
    Confusion("Forgetting zero_grad()", accumulation.zero_grad),
    Confusion(
        '"retain_grad() keeps a branch from overwriting the gradient of another"',
        retention.branches,
    ),
    Confusion('"retain_grad() must stand before the tensor is used"', retention.position),
    Confusion('"Without retain_grad(), y.grad raises"', retention.not_a_leaf),
    Confusion('"retain_grad() lets you call backward() twice"', retention.twice),
    Confusion('"Gradients of several losses need create_graph=True"', retention.create_graph),
    Confusion("A change in place after retain_grad()", retention.in_place),
)
