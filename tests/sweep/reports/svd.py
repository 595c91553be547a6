"""torch.linalg.svd(full_matrices=True): the gradient by the columns of U beyond the rank is zero.

They span what is orthogonal to the columns of the matrix. The squared distance of y from these does
not depend on which basis that is, and has a gradient.
"""

import torch

a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]], requires_grad=True)
y = torch.tensor([1.0, 2.0, 4.0])
beyond = torch.linalg.svd(a, full_matrices=True).U[:, 2:]
(torch_gives,) = torch.autograd.grad((beyond.mT @ y).square().sum(), a)
rest = y - a @ torch.linalg.solve(a.mT @ a, a.mT @ y)
(right,) = torch.autograd.grad(rest.square().sum(), a)
print("torch gives:", torch_gives, "right:", right, sep="\n")
