"""torch.linalg.vector_norm: forward over reverse takes its second derivative at zero for zero.

The square of the norm has the Hessian 2 everywhere. Reverse over reverse gives nan there.
"""

import torch
from torch.func import grad, jvp

x, along = torch.zeros(2), torch.tensor([1.0, 2.0])
torch_gives = jvp(grad(lambda x: torch.linalg.vector_norm(x) ** 2), (x,), (along,))[1]
right = jvp(grad(lambda x: x.square().sum()), (x,), (along,))[1]
print("torch gives:", torch_gives, "right:", right, sep="\n")
