"""torch.index_fill: under vmap, a value that is a batched tensor gives a wrong result.

For each value, the result is [value, 1]. In the batch, torch fills with a value of another sample.
"""

import torch
from torch.func import vmap


def filled(value: torch.Tensor) -> torch.Tensor:
    return torch.index_fill(torch.ones(2), 0, torch.tensor([0]), value)


values = torch.tensor([10.0, 20.0])
torch_gives = vmap(filled)(values)
right = torch.stack([filled(value) for value in values])
print("torch gives:", torch_gives, "right:", right, sep="\n")
