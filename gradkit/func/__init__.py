"""The same gradients for losses that a function computes, over torch.func.

`value_and_grads` and `per_loss_grads` take a function where the eager calls take losses;
`per_sample_grads`, the products `vjp`, `jvp`, `linearize`, `hvp` and `ggn_vp`, and
`make_functional` complete them. They work on any tree, inside and around `torch.func.vmap`, `grad`,
`jvp` and `jacrev`, and under `torch.compile(fullgraph=True)`. `check_grads` tests the derivatives
of a function; `staged_value_and_grads` differentiates the loss of a whole batch in chunks.
"""

from gradkit.func._check_grads import check_grads
from gradkit.func._checkpoint import checkpoint
from gradkit.func._grads import per_loss_grads, per_sample_grads, value_and_grads
from gradkit.func._make_functional import make_functional
from gradkit.func._products import ggn_vp, hvp, jvp, linearize, vjp
from gradkit.func._staged import staged_value_and_grads

__all__ = [
    "check_grads",
    "checkpoint",
    "ggn_vp",
    "hvp",
    "jvp",
    "linearize",
    "make_functional",
    "per_loss_grads",
    "per_sample_grads",
    "staged_value_and_grads",
    "value_and_grads",
    "vjp",
]
