"""torch.as_strided_scatter: the gradient of the input is zero, also where the input is kept.

The source, a zero, stands in the middle of the result, which is [x[0], 0, x[2]]. The sum of its
squares has the gradient 2 * [x[0], 0, x[2]]; torch gives zeros.
"""

import torch
from torch.func import grad


def squares(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided_scatter(x, torch.zeros(1), (1,), (1,), 1).square().sum()


x = torch.tensor([1.0, 2.0, 3.0])
torch_gives = grad(squares)(x)
right = 2 * x * torch.tensor([1.0, 0.0, 1.0])
print("torch gives:", torch_gives, "right:", right, sep="\n")
