"""torch.special: functions without a derivative drop the gradient silently, where others raise.

The gradient of x + f(x) is 1 + f'(x), which differences of f give. Torch gives one: the result of
these functions has no graph, although it varies with x.
"""

import torch
from torch.func import grad

kinds = [f"chebyshev_polynomial_{kind}" for kind in "tuvw"]
kinds += [f"shifted_{kind}" for kind in kinds]
kinds += ["hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l"]
kinds += ["legendre_polynomial_p"]
functions = [lambda x, kind=kind: getattr(torch.special, kind)(x, 3) for kind in kinds]
functions += [torch.special.scaled_modified_bessel_k0, torch.special.scaled_modified_bessel_k1]
functions += [torch.special.spherical_bessel_j0, torch.special.airy_ai]

x, step = torch.tensor(0.3, dtype=torch.float64), 1e-3
torch_gives = torch.stack([grad(lambda x, f=f: x + f(x))(x) for f in functions])
right = torch.stack([1 + (f(x + step) - f(x - step)) / (2 * step) for f in functions])
print("torch gives:", torch_gives, "right:", right, sep="\n")
