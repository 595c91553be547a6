"""torch.linalg.eigh: forward mode of the eigenvectors disagrees with the gradient.

Along a direction that is not symmetric, the jvp is not the product of the gradient with the
direction. That product is right: it is the jvp of the eigenvectors of (a + a.mT) / 2.
"""

import torch
from torch.func import grad, jvp


def entry(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigh(a).eigenvectors[0, 0].square()


a = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
direction = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
torch_gives = jvp(entry, (a,), (direction,))[1]
right = (grad(entry)(a) * direction).sum()
print("torch gives:", torch_gives, "right:", right, sep="\n")
