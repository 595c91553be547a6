"""torch.linalg.lu_solve: wrong in two vmaps, one over the factors and one over the other side.

Each system is solved rightly by itself, in a loop. In the two vmaps, torch mixes them.
"""

import torch
from torch.func import vmap

a = torch.tensor([[[4.0, 1.0], [2.0, 3.0]], [[2.0, 1.0], [4.0, 6.0]]])
b = torch.tensor([[[1.0], [2.0]], [[3.0], [5.0]]])


def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b)


torch_gives = vmap(lambda a: vmap(lambda b: solve(a, b))(b))(a)
right = torch.stack([torch.stack([solve(matrix, side) for side in b]) for matrix in a])
print("torch gives:", torch_gives, "right:", right, sep="\n")
