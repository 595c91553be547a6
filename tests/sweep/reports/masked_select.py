"""torch.masked_select: a batched backward pass, as in jacrev, is wrong if the mask broadcasts.

The mask, an identity, selects [x[0], x[1]], whose Jacobian is the identity. In the batch, torch
gives a second row of zeros.
"""

import torch
from torch.func import jacrev

mask = torch.tensor([[True, False], [False, True]])
torch_gives = jacrev(lambda x: torch.masked_select(x, mask))(torch.tensor([1.0, 2.0]))
right = torch.eye(2)
print("torch gives:", torch_gives, "right:", right, sep="\n")
