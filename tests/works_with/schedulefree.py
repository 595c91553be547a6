"""Its SGD, AdamW and RAdam, in training mode."""

import schedulefree

from tests.works_with._oracles import of_optimizer

PIP = "schedulefree"


def tries():
    for name in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"):

        def make(params, cls=getattr(schedulefree, name)):
            optimizer = cls(params, lr=0.1)
            optimizer.train()
            return optimizer

        yield from of_optimizer(make, f"{name}: ")
