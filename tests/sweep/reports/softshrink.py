"""softshrink with lambd=0: the gradient at zero is zero.

With a threshold of zero, softshrink returns its input, and its derivative is one everywhere. At
zero torch gives zero; hardshrink does the same, https://github.com/pytorch/pytorch/issues/80803.
"""

import torch

x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
(torch_gives,) = torch.autograd.grad(torch.nn.functional.softshrink(x, 0.0).sum(), x)
right = torch.ones(3)
print("torch gives:", torch_gives, "right:", right, sep="\n")
