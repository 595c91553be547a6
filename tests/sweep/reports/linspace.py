"""torch.linspace and logspace: the gradient of an end that is a tensor is silently dropped.

The sum of linspace(start, 5, 3) is 1.5 * start + 7.5, so that its gradient is 1.5. Torch returns a
result without a graph: only the gradient of what is added, start itself, is left.
"""

import torch
from torch.func import grad


def total(start: torch.Tensor) -> torch.Tensor:
    return torch.linspace(start, 5.0, 3).sum() + start


torch_gives = grad(total)(torch.tensor(1.0))
right = torch.tensor(1.5 + 1)
print("torch gives:", torch_gives, "right:", right, sep="\n")
