"""linear_cross_entropy in chunks: the second derivative is silently zero, and so is the jvp.

The gradient has no graph. The other part of the loss, x**2, keeps torch from raising that there is
none. With the cross_entropy of x @ weight.T, which is the same, the second derivative is right.
"""

import torch
from torch import nn

target = torch.tensor([0, 1, 2])
weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [1.0, 0.0]], requires_grad=True)
options = nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)


def second(loss: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(loss + x.square().sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x)[0]


torch_gives = second(nn.functional.linear_cross_entropy(x, weight, target, options=options))
right = second(nn.functional.cross_entropy(x @ weight.T, target))
print("torch gives:", torch_gives, "right:", right, sep="\n")
