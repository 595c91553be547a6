"""A ResNet and `roi_align`; its wheel for the CPU is what is asked for."""

import torch
import torchvision

from tests.works_with._oracles import of_function, of_module

PIP = "torchvision"


def tries():
    batch = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    yield from of_module(
        lambda: torchvision.models.resnet18(num_classes=5),
        batch,
        lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y),
        "ResNet: ",
        "steps functional",
    )
    boxes = torch.tensor([[0, 0.0, 0.0, 4.0, 4.0]], dtype=torch.float64)
    yield from of_function(
        lambda x: torchvision.ops.roi_align(x, boxes, 2).square().sum(),
        torch.rand(1, 1, 6, 6, dtype=torch.float64),
        "roi_align: ",
    )
