"""A U-Net without weights, and its Lovasz and soft Dice losses."""

import segmentation_models_pytorch as smp
import torch

from tests.works_with._oracles import of_function, of_module

PIP = "segmentation-models-pytorch"


def tries():
    make = lambda: smp.Unet(
        "resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(8, 4, 4), classes=2
    )
    yield from of_module(
        make,
        (torch.randn(2, 3, 32, 32),),
        lambda m, x: m(x).square().mean(),
        "Unet: ",
        "steps functional",
        tol=1e-4,
    )
    x, y = torch.randn(1, 3, 4, 4, dtype=torch.float64), torch.randint(3, (1, 4, 4))
    yield from of_function(lambda x: smp.losses.LovaszLoss("multiclass")(x, y), x, "Lovasz: ")
    yield from of_function(lambda x: smp.losses.DiceLoss("multiclass")(x, y), x, "Dice: ")
    yield from of_function(lambda x: smp.losses.FocalLoss("multiclass")(x, y), x, "focal: ")
