"""A vector quantizer with its commitment loss (learned codebook; and a moving average), FSQ and LFQ."""

import torch
from torch import nn
from vector_quantize_pytorch import FSQ, LFQ, VectorQuantize

from tests.works_with._oracles import of_module

PIP = "vector-quantize-pytorch"


class Coded(nn.Module):
    def __init__(self, quantizer):
        super().__init__()
        self.encode, self.quantizer, self.decode = nn.Linear(4, 4), quantizer, nn.Linear(4, 4)

    def forward(self, x):
        out = self.quantizer(self.encode(x).unsqueeze(0))
        code, rest = out[0], out[2:] or (torch.zeros(()),)
        return self.decode(code.squeeze(0)), rest[0].sum()


def loss(module, x):
    y, extra = module(x)
    return (y - x).square().mean() + extra


def tries():
    x = torch.randn(6, 4, dtype=torch.float64)
    for name, make in {
        "moving average: ": lambda: VectorQuantize(dim=4, codebook_size=8, decay=0.5),
        "learned codebook: ": lambda: VectorQuantize(
            dim=4, codebook_size=8, learnable_codebook=True, ema_update=False
        ),
        "FSQ: ": lambda: FSQ(levels=[5, 5, 5, 5]),
        "LFQ: ": lambda: LFQ(codebook_size=16, dim=4),
    }.items():
        # A straight-through estimate is no derivative: the plain loop is the oracle.
        yield from of_module(
            lambda make=make: Coded(make()).double(), (x,), loss, name, "steps functional"
        )
