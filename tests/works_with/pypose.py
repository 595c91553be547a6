"""SO3, SE3 and Sim3: `Exp`, `Log`, `Act` and products, by the algebra."""

import pypose as pp
import torch

from tests.works_with._oracles import of_function

PIP = "pypose"
NOTE = "second derivatives: by differences of gradients, or with rotation matrices"


def tries():
    torch.manual_seed(0)
    p = torch.randn(3, dtype=torch.float64)
    for name, size in (("so3", 3), ("se3", 6), ("sim3", 7), ("rxso3", 4)):
        v = torch.randn(size, dtype=torch.float64) * 0.4
        w = torch.randn(size, dtype=torch.float64) * 0.4
        algebra = getattr(pp, name)
        yield from of_function(
            lambda v, f=algebra: (f(v).Exp() @ p).exp().sum(), v, f"{name} Exp, Act: "
        )
        yield from of_function(
            lambda v, f=algebra, w=w: (f(v).Exp() @ f(w).Exp()).Log().tensor().exp().sum(),
            v,
            f"{name} Exp, Log: ",
        )
        yield from of_function(
            lambda v, f=algebra, w=w: f(v).Exp().Inv().matrix().exp().sum(),
            v,
            f"{name} Inv, matrix: ",
        )
