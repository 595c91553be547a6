"""torch.logcumsumexp: the second derivative is wrong where an incoming gradient is zero.

Only the second of the sums has an event, so that the loss depends on no other. With logsumexp in
place of it, which is the same function, the second derivative is right.
"""

import torch
from torch.func import grad


def loss(x: torch.Tensor) -> torch.Tensor:
    return (torch.logcumsumexp(x, 0) * torch.tensor([0.0, 1.0, 0.0])).sum().square()


def written(x: torch.Tensor) -> torch.Tensor:
    return x[:2].logsumexp(0).square()


x = torch.tensor([0.0, 1.0, -1.0])
torch_gives = grad(lambda x: grad(loss)(x).square().sum())(x)
right = grad(lambda x: grad(written)(x).square().sum())(x)
print("torch gives:", torch_gives, "right:", right, sep="\n")
