"""torch.linalg.vector_norm: forward over reverse takes its second derivative at zero for zero.

The square of the norm has the Hessian 2 everywhere. Reverse over reverse gives nan there.
"""

import torch
from torch.func import grad, jvp


def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x) ** 2


def written(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


x, along = torch.zeros(2), torch.tensor([1.0, 2.0])
torch_gives = jvp(grad(squared), (x,), (along,))[1]
right = jvp(grad(written), (x,), (along,))[1]
print("torch gives:", torch_gives, "right:", right, sep="\n")
