"""torch.roll: under vmap, samples without dimensions are rolled among each other.

A roll leaves a tensor without dimensions as it is, so that each sample should, too. Torch rolls the
dimension of the batch, and mixes the samples.
"""

import torch
from torch.func import vmap

x = torch.tensor([1.0, 2.0, 3.0])
torch_gives = vmap(lambda x: torch.roll(x, 1))(x)
right = torch.stack([torch.roll(sample, 1) for sample in x])
print("torch gives:", torch_gives, "right:", right, sep="\n")
