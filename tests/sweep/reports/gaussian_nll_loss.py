"""gaussian_nll_loss: forward mode is zero where the variance is below eps, unlike the gradient.

The variance is clamped under no_grad, which, as is documented, leaves the gradient that of the
loss at eps: (1 / eps - 1 / eps**2) / 2. The jvp along a direction of one should be the same.
"""

import torch
from torch.func import jvp
from torch.nn.functional import gaussian_nll_loss


def loss(variance: torch.Tensor) -> torch.Tensor:
    return gaussian_nll_loss(torch.ones(1), torch.zeros(1), variance, eps=0.5)


torch_gives = jvp(loss, (torch.tensor([0.1]),), (torch.ones(1),))[1]
right = torch.tensor((1 / 0.5 - 1 / 0.5**2) / 2)
print("torch gives:", torch_gives, "right:", right, sep="\n")
