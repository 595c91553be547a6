"""A nonlinear least-squares layer."""

PIP = "theseus-ai==0.2.3"


def tries():
    yield from ()
