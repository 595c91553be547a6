"""A small UNet made from a config: the denoising loss."""

import torch
from diffusers import DDPMScheduler, UNet2DModel

from tests.works_with._oracles import of_module

PIP = "diffusers"


def make():
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def loss(module, x, noise):
    times = torch.tensor([10, 500])[: len(x)]
    return (
        (module(DDPMScheduler().add_noise(x, noise, times), times).sample - noise).square().mean()
    )


def tries():
    yield from of_module(
        make,
        (torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)),
        loss,
        "",
        "steps functional",
        tol=1e-4,
    )
