"""scan: the second derivative is silently zero, for the first has no graph.

Two steps of carry -> carry.sin() are x.sin().sin(). The other part of the loss, x**2, keeps torch
from raising that there is no graph; without a scan the second derivative is right.
"""

import torch
from torch._higher_order_ops import scan


def second(y: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad((y + x**2).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x)[0]


x = torch.tensor([1.0, 2.0], requires_grad=True)
steps = torch.ones(2, 2)
torch_gives = second(scan(lambda carry, step: ((carry * step).sin(), step.clone()), x, steps)[0])
right = second(x.sin().sin())
print("torch gives:", torch_gives, "right:", right, sep="\n")
