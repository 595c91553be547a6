"""torch.cdist: jacrev, and any batched backward pass, is silently wrong.

The second output depends on the second point alone. Alone its gradient is right; in the batch of
both, torch repeats the gradient of the first output.
"""

import torch
from torch.func import grad, jacrev

x, y = torch.tensor([[[0.0, 0.0], [4.0, 3.0]], [[0.0, 3.0], [4.0, 0.0]]])


def distances(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, y).sum(1)


torch_gives = jacrev(distances)(x)[1]
right = grad(lambda x: distances(x)[1])(x)
print("torch gives:", torch_gives, "right:", right, sep="\n")
