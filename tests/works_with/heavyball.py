"""Some of its optimizers, compiled modes off."""

import heavyball

from tests.works_with._oracles import of_each_optimizer

PIP = "heavyball"


def tries():
    heavyball.utils.compile_mode = None
    names = (
        "AdamW",
        "ForeachAdamW",
        "ForeachSOAP",
        "ForeachMuon",
        "ForeachPSGDKron",
        "SOAP",
        "Muon",
        "NAdam",
        "ADOPT",
        "LaProp",
        "SignLaProp",
    )
    makers = {
        name: lambda params, cls=getattr(heavyball, name): cls(params, lr=1e-2)
        for name in names
        if hasattr(heavyball, name)
    }
    yield from of_each_optimizer(makers)
