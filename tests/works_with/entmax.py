"""entmax15, sparsemax, entmax_bisect, normmax_bisect and their losses, by scores and by alpha."""

import entmax
import torch

from tests.works_with._oracles import of_function

PIP = "entmax"
NOTE = "second derivatives of the losses: write them with `entmax15`, which is right"


def tries():
    x = torch.tensor([[0.3, -0.2, 0.9, 0.15]], dtype=torch.float64)
    w, y = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64), torch.tensor([2])
    for name in (
        "sparsemax",
        "entmax15",
        "sparsemax_bisect",
        "entmax_bisect",
        "normmax_bisect",
        "budget_bisect",
    ):
        map_ = getattr(entmax, name, None)
        if map_ is None:
            continue
        options = {"budget": 2} if name == "budget_bisect" else {}
        yield from of_function(
            lambda x, f=map_, o=options: (f(x, **o) * w).sum().exp(), x, f"{name}: ", tol=1e-4
        )
    yield from of_function(
        lambda a: (entmax.entmax_bisect(x, a) * w).sum().exp(),
        torch.tensor([[1.4]], dtype=torch.float64),
        "entmax_bisect by alpha: ",
        tol=1e-4,
    )
    for name in ("SparsemaxLoss", "Entmax15Loss", "EntmaxBisectLoss"):
        loss = getattr(entmax, name)()
        yield from of_function(lambda x, f=loss: f(x, y).exp().sum(), x, f"{name}: ", tol=1e-4)
