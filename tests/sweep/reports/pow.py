"""torch.pow and float_power: the mixed second derivative is zero where the exponent is zero.

The slope by the base is y * x ** (y - 1), whose derivative by y is 1 / x at y = 0. Torch takes the
slope for a constant there.
"""

import torch
from torch.func import grad

x, y = torch.tensor(2.0), torch.tensor(0.0)
torch_gives = grad(lambda y: grad(torch.pow)(x, y))(y)
right = 1 / x
print("torch gives:", torch_gives, "right:", right, sep="\n")
