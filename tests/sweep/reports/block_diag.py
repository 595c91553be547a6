"""torch.block_diag: an empty 1-D tensor shifts the gradients of the blocks after it.

The empty tensor is a block of one row and no columns, so that x stands in the second row and its
gradient is the second row of the weights. The backward pass takes the first: it counts no row.
"""

import torch

weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
x = torch.ones(2, requires_grad=True)
loss = (torch.block_diag(torch.empty(0), x) * weights).sum()
(torch_gives,) = torch.autograd.grad(loss, x)
right = weights[1]
print("torch gives:", torch_gives, "right:", right, sep="\n")
