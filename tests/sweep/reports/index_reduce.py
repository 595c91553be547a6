"""index_reduce and scatter_reduce: with include_self=False, the input is counted as a tie.

The greatest of [5, 3] is the first, whose gradient is one. The input is also 5, though it is not
included; torch counts it, and gives the first half of the gradient.
"""

import torch

x = torch.tensor([5.0, 3.0], requires_grad=True)
index, five = torch.tensor([0, 0]), torch.tensor([5.0])
torch_gives = torch.stack([
    torch.autograd.grad(reduce(five, 0, index, x, "amax", include_self=False), x)[0]
    for reduce in (torch.index_reduce, torch.scatter_reduce)
])
right = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
print("torch gives:", torch_gives, "right:", right, sep="\n")
