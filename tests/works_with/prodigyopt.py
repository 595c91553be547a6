"""Prodigy."""

from prodigyopt import Prodigy

from tests.works_with._oracles import of_optimizer

PIP = "prodigyopt"


def tries():
    yield from of_optimizer(lambda params: Prodigy(params, weight_decay=0.01))
