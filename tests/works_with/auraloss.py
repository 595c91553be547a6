"""Losses of audio by the signal: multi-resolution STFT, SI-SDR, ESR, log-cosh."""

import auraloss
import torch

from tests.works_with._oracles import of_function

PIP = "auraloss"


def tries():
    x, y = torch.randn(1, 1, 600, dtype=torch.float64), torch.randn(1, 1, 600, dtype=torch.float64)
    stft = auraloss.freq.MultiResolutionSTFTLoss([64, 32], [16, 8], [64, 32]).double()
    yield from of_function(lambda x: stft(x, y), x, "STFT: ", tol=1e-4)
    for name in ("SISDRLoss", "ESRLoss", "LogCoshLoss", "SNRLoss", "DCLoss"):
        yield from of_function(
            lambda x, f=getattr(auraloss.time, name)(): f(x, y), x, f"{name}: ", tol=1e-4
        )
