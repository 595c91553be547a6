"""torch.pdist and torch.cdist with p=inf: each coordinate of a tie gets the whole gradient.

The largest distance of two rows is that of two coordinates. Moved by one, both change it by one,
and not by two. vector_norm(x[0] - x[1], inf), which is the same, shares the gradient among them.
"""

import torch

x = torch.tensor([[2.0, 2.0, 1.0], [0.0, 0.0, 0.0]], requires_grad=True)
(torch_gives,) = torch.autograd.grad(torch.pdist(x, p=torch.inf).sum(), x)
(right,) = torch.autograd.grad(torch.linalg.vector_norm(x[0] - x[1], torch.inf), x)
print("torch gives:", torch_gives, "right:", right, sep="\n")
