"""A ViT and a ResNet made without weights, on small images."""

import timm
import torch

from tests.works_with._oracles import of_module

PIP = "timm"
NOTE = "its torchvision is built for CUDA, and does not load beside a torch for the CPU"


def loss(module, x, y):
    return torch.nn.functional.cross_entropy(module(x), y)


def tries():
    batch = torch.rand(3, 3, 16, 16, dtype=torch.float64), torch.randint(5, (3,))
    vit = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 5,
    }
    yield from of_module(
        lambda: timm.models.vision_transformer.VisionTransformer(**vit).double(),
        batch,
        loss,
        "ViT: ",
    )
    yield from of_module(
        lambda: timm.create_model("resnet10t", num_classes=5).double().eval(),
        batch,
        loss,
        "ResNet: ",
        "steps functional",
    )
