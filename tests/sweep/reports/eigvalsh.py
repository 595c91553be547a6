"""torch.linalg.eigvalsh: a second derivative by forward mode disagrees with the one by gradients.

Along a direction that is not symmetric, the jvp of the gradient is not the Hessian-vector product.
Two gradients give that; it is also the jvp of the gradient with (a + a.mT) / 2 in place of a.
"""

import torch
from torch.func import grad, jvp


def total(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(a).sin().sum()


a = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
direction = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
torch_gives = jvp(grad(total), (a,), (direction,))[1]
right = grad(lambda a: (grad(total)(a) * direction).sum())(a)
print("torch gives:", torch_gives, "right:", right, sep="\n")
