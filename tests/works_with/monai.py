"""A U-Net, and its Dice, focal, Tversky, and mutual-information losses."""

import monai
import torch

from tests.works_with._oracles import of_function, of_module

PIP = "monai"


def tries():
    make = lambda: monai.networks.nets.BasicUNet(
        spatial_dims=2, in_channels=1, out_channels=2, features=(4, 4, 4, 4, 4, 4)
    ).double()
    yield from of_module(
        make,
        (torch.randn(2, 1, 32, 32, dtype=torch.float64),),
        lambda m, x: m(x).square().mean(),
        "UNet: ",
        "steps functional",
    )
    x, y = (
        torch.randn(2, 3, 4, 4, dtype=torch.float64),
        torch.nn.functional.one_hot(torch.randint(3, (2, 4, 4)), 3).permute(0, 3, 1, 2).double(),
    )
    losses = monai.losses
    for name, loss in {
        "Dice": losses.DiceLoss(softmax=True),
        "focal": losses.FocalLoss(),
        "Tversky": losses.TverskyLoss(softmax=True),
        "GeneralizedDice": losses.GeneralizedDiceLoss(softmax=True),
    }.items():
        yield from of_function(lambda x, f=loss: f(x, y), x, f"{name}: ")
    image, other = (
        torch.rand(1, 1, 6, 6, dtype=torch.float64),
        torch.rand(1, 1, 6, 6, dtype=torch.float64),
    )
    yield from of_function(
        lambda x: losses.GlobalMutualInformationLoss()(x, other),
        image,
        "mutual information: ",
        tol=1e-3,
    )
    yield from of_function(
        lambda x: losses.LocalNormalizedCrossCorrelationLoss(spatial_dims=2)(x, other),
        image,
        "LNCC: ",
        tol=1e-4,
    )
    yield from of_function(
        lambda x: losses.BendingEnergyLoss()(x),
        torch.rand(1, 2, 6, 6, dtype=torch.float64),
        "bending energy: ",
    )
