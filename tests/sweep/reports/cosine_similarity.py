"""cosine_similarity: where a norm is below eps, the gradient is as if it were not.

Both norms are at most eps, which is 1 and stands in their place: the result is x @ y, and its
gradient y. Torch also differentiates the norm, of which the result does not depend.
"""

import torch

x, y = torch.tensor([[0.4, 0.3], [1.0, 0.0]])
x.requires_grad_()
similarity = torch.cosine_similarity(x, y, dim=0, eps=1.0)
(torch_gives,) = torch.autograd.grad(similarity, x)
right = y
print("torch gives:", torch_gives, "right:", right, sep="\n")
