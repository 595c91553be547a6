"""An EfficientNet without weights, whose swish is a Function of its own."""

import torch
from efficientnet_pytorch import EfficientNet

from tests.works_with._oracles import of_module

PIP = "efficientnet-pytorch"


def tries():
    batch = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    make = lambda: EfficientNet.from_name(
        "efficientnet-b0", num_classes=3, dropout_rate=0.0, drop_connect_rate=0.0
    )
    yield from of_module(
        make,
        batch,
        lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y),
        "",
        "steps functional",
        tol=1e-3,
    )
