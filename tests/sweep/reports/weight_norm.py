"""weight_norm: the second derivative is wrong.

The backward pass takes the norm, which it has saved, for a constant. With the formula written out,
2 * v / v.norm(), the second derivative is right.
"""

import torch
from torch.func import grad


def by_torch(v: torch.Tensor) -> torch.Tensor:
    return torch._weight_norm(v, torch.tensor([[2.0]]), 0)


def written(v: torch.Tensor) -> torch.Tensor:
    return 2 * v / v.norm(dim=1, keepdim=True)


def second(norm: object) -> torch.Tensor:
    slope = grad(lambda v: norm(v).sin().sum())
    return grad(lambda v: slope(v).square().sum())(torch.tensor([[0.6, 0.8]]))


torch_gives, right = second(by_torch), second(written)
print("torch gives:", torch_gives, "right:", right, sep="\n")
