"""torch.prod: the third derivative by forward mode is wrong where a factor is zero.

The gradient of x[0] * x[1] * x[2] is [x[1] * x[2], ...], whose second derivative along a direction
is 2 * [d[1] * d[2], ...], wherever it is taken. Torch drops a part of it.
"""

import torch
from torch.func import grad, jvp


def third(x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    def along(x: torch.Tensor) -> torch.Tensor:
        return jvp(grad(torch.prod), (x,), (direction,))[1]

    return jvp(along, (x,), (direction,))[1]


x, direction = torch.tensor([[2.0, 0.0, 3.0], [1.0, 2.0, 4.0]])
torch_gives = third(x, direction)
a, b, c = direction
right = 2 * torch.stack([b * c, a * c, a * b])
print("torch gives:", torch_gives, "right:", right, sep="\n")
