"""torch.cond: the second derivative is silently zero, for the first has no graph.

The branch that is taken is the sine, whose second derivative is -sin(x). The other part of the
loss, x**2, keeps torch from raising that there is no graph; its second derivative is 2.
"""

import torch

x = torch.tensor([1.0, 2.0], requires_grad=True)
y = torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,))
(slope,) = torch.autograd.grad((y + x**2).sum(), x, create_graph=True)
(torch_gives,) = torch.autograd.grad(slope.sum(), x)
right = 2 - x.detach().sin()
print("torch gives:", torch_gives, "right:", right, sep="\n")
