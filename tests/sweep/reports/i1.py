"""torch.special.i1: the third derivative at zero is 0, and the fourth of torch.special.i0.

I1(x) = x/2 + x**3/16 + x**5/384 + ..., whose third derivative at zero is 3/8. torch gives the one
of a constant at zero, and 0.3737 at 1e-6.
"""

import torch
from torch.func import grad

x = torch.zeros((), dtype=torch.float64)
torch_gives = grad(grad(grad(torch.special.i1)))(x)
right = torch.tensor(3 / 8, dtype=torch.float64)
print("torch gives:", torch_gives, "right:", right, sep="\n")
