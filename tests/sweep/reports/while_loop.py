"""while_loop: the second derivative is silently wrong.

Three steps of x -> x.sin() are x.sin().sin().sin(). Without a while_loop its second derivative, and
the 2 of the other part of the loss, x**2, are right.
"""

import torch
from torch._higher_order_ops import while_loop


def second(y: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad((y + x**2).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x)[0]


x = torch.tensor([1.0, 2.0], requires_grad=True)
start = torch.tensor(0), x
torch_gives = second(while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), start)[1])
right = second(x.sin().sin().sin())
print("torch gives:", torch_gives, "right:", right, sep="\n")
