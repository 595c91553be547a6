"""torch.select_scatter: the gradient of a batch, a vmap inside grad, is too large.

For each sample the result is [0, x], of which the sum of cubes has the gradient 3 * x**2. One by
one torch gives that; for the batch it gives twice as much.
"""

import torch
from torch.func import grad, vmap


def cubes(row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (torch.select_scatter(row, x, 0, 1) ** 3).sum()


x = torch.tensor([1.0, 2.0])
torch_gives = grad(lambda x: vmap(cubes)(torch.zeros(2, 2), x).sum())(x)
right = 3 * x**2
print("torch gives:", torch_gives, "right:", right, sep="\n")
