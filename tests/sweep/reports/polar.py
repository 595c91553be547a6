"""torch.polar: the gradient of a radius of zero is zero.

The real part is abs * cos(angle), whose derivative by abs is cos(angle), here one, also at zero.
Torch reads the direction off the result, which has none there.
"""

import torch

radius = torch.zeros(1, requires_grad=True)
(torch_gives,) = torch.autograd.grad(torch.polar(radius, torch.zeros(1)).real.sum(), radius)
right = torch.ones(1)
print("torch gives:", torch_gives, "right:", right, sep="\n")
