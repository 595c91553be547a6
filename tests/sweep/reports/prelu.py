"""prelu: the gradient is wrong in two vmaps, the outer over the input, the inner over the weight.

Each gradient is right by itself, in a loop. In the two vmaps, torch pairs them otherwise.
"""

import torch
from torch.func import grad, vmap
from torch.nn.functional import prelu

x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
weights = torch.tensor([[0.5], [0.25]])
slope = grad(lambda weight, x: prelu(x, weight).sin().sum())
torch_gives = vmap(lambda x: vmap(lambda weight: slope(weight, x))(weights))(x)
right = torch.stack([torch.stack([slope(weight, row) for weight in weights]) for row in x])
print("torch gives:", torch_gives, "right:", right, sep="\n")
