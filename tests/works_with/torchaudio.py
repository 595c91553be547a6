"""A mel spectrogram, `lfilter` and a Conformer; its wheel for the CPU is what is asked for."""

import torch
import torchaudio

from tests.works_with._oracles import of_function, of_module

PIP = "torchaudio"


def tries():
    x = torch.randn(1, 200, dtype=torch.float64)
    mel = torchaudio.transforms.MelSpectrogram(n_fft=64, n_mels=8).double()
    yield from of_function(lambda x: (mel(x) + 1).log().sum(), x, "mel: ", tol=1e-4)
    a = torch.tensor([1.0, -0.3, 0.1], dtype=torch.float64)
    yield from of_function(
        lambda x: torchaudio.functional.lfilter(x, a, a, clamp=False).square().sum(), x, "lfilter: "
    )
    yield from of_function(
        lambda a: torchaudio.functional.lfilter(x, a, a, clamp=False).square().mean(),
        a,
        "lfilter by its coefficients: ",
        tol=1e-4,
    )
    make = lambda: torchaudio.models.Conformer(4, 2, 8, 1, 3, dropout=0.0).double()
    yield from of_module(
        make,
        (torch.randn(3, 6, 4, dtype=torch.float64),),
        lambda m, x: m(x, torch.full((len(x),), 6))[0].square().mean(),
        "Conformer: ",
        "steps gradient hvp functional",
        tol=1e-4,
    )
