"""torch.sparse_coo_tensor: the second derivative by the values is silently zero.

Made dense, the tensor has the values on its diagonal and zeros elsewhere, so that the sum of its
sines is that of the sines of the values, whose second derivative is -sin(x).
"""

import torch
from torch.func import grad

indices = torch.tensor([[0, 1], [0, 1]])


def total(x: torch.Tensor) -> torch.Tensor:
    dense = torch.sparse_coo_tensor(indices, x, (2, 2), check_invariants=False).to_dense()
    return dense.sin().sum()


x = torch.tensor([1.0, 2.0])
torch_gives = grad(lambda x: grad(total)(x).sum())(x)
right = -x.sin()
print("torch gives:", torch_gives, "right:", right, sep="\n")
