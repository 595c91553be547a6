"""A nonlinear least-squares layer."""

import theseus

PIP = "theseus-ai==0.2.3"


def tries():
    yield from ()
