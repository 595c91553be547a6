"""The twelve confusions of docs/confusions.md, each with a function that tries it out.

A function gives what torch does here, beside what it did where the page was written, and what
gradkit gives, beside the right value. The right values are written out, or come from a formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradkit._doctor import _accumulating as accumulating
from gradkit._doctor import _retaining as retaining
from gradkit._doctor._check import Seen


@dataclass(frozen=True)
class Confusion:
    """What people say or do, as it stands over a section of docs/confusions.md; and its trial."""

    title: str
    run: Callable[[torch.device], Seen]


CONFUSIONS = (
    Confusion(
        '"The second backward changes w.grad, even if the loss does not use w"',
        accumulating.other_losses,
    ),
    Confusion(
        '"autograd.grad of a loss that does not use w gives a zero gradient"', accumulating.unused
    ),
    Confusion(
        '"After backward(), autograd.grad can be called on the same graph"', accumulating.freed
    ),
    Confusion(
        '"backward() and autograd.grad use different graphs, or different numerics"',
        accumulating.same_engine,
    ),
    Confusion(
        '"autograd.grad does not accumulate correctly for a shared parameter"', accumulating.shared
    ),
    Confusion("Forgetting zero_grad()", accumulating.zero_grad),
    Confusion(
        '"retain_grad() keeps a branch from overwriting the gradient of another"',
        retaining.branches,
    ),
    Confusion('"retain_grad() must stand before the tensor is used"', retaining.position),
    Confusion('"Without retain_grad(), y.grad raises"', retaining.not_a_leaf),
    Confusion('"retain_grad() lets you call backward() twice"', retaining.twice),
    Confusion('"Gradients of several losses need create_graph=True"', retaining.create_graph),
    Confusion("A change in place after retain_grad()", retaining.in_place),
)
