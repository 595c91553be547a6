"""torch.linalg.cholesky and cholesky_ex: forward mode disagrees with the gradient.

Along a direction that is not symmetric, the jvp is not the product of the gradient with the
direction. That product is right: it is the jvp of the factor of (a + a.mT) / 2.
"""

import torch
from torch.func import grad, jvp


def total(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(a).sum()


a = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
direction = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
torch_gives = jvp(total, (a,), (direction,))[1]
right = (grad(total)(a) * direction).sum()
print("torch gives:", torch_gives, "right:", right, sep="\n")
