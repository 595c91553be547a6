"""Filters, geometry and losses by the image and by the homography."""

import kornia
import torch

from tests.works_with._oracles import of_function

PIP = "kornia"


def tries():
    image = torch.rand(1, 1, 6, 6, dtype=torch.float64)
    other = torch.rand(1, 1, 6, 6, dtype=torch.float64)
    h = torch.eye(3, dtype=torch.float64)[None] + 0.05 * torch.randn(1, 3, 3, dtype=torch.float64)
    yield from of_function(
        lambda x: kornia.filters.gaussian_blur2d(x, (3, 3), (1.0, 1.0)).exp().sum(),
        image,
        "gaussian_blur2d: ",
    )
    yield from of_function(lambda x: kornia.losses.ssim_loss(x, other, 3), image, "ssim_loss: ")
    yield from of_function(
        lambda h: kornia.geometry.transform.warp_perspective(image, h, (6, 6)).square().sum(),
        h,
        "warp_perspective by the homography: ",
        tol=1e-4,
    )
    yield from of_function(
        lambda v: (kornia.geometry.conversions.axis_angle_to_rotation_matrix(v)).exp().sum(),
        torch.randn(1, 3, dtype=torch.float64),
        "axis_angle_to_rotation_matrix: ",
    )
    yield from of_function(
        lambda v: (kornia.geometry.conversions.axis_angle_to_quaternion(v)).exp().sum(),
        torch.zeros(1, 3, dtype=torch.float64),
        "axis_angle_to_quaternion at 0: ",
    )
    yield from of_function(
        lambda x: (
            kornia.color
            .rgb_to_lab(
                x.expand(1, 3, 6, 6) * 0.9 + 0.05 * torch.arange(3).double().view(1, 3, 1, 1) / 3
            )
            .square()
            .mean()
        ),
        image,
        "rgb_to_lab: ",
    )
    yield from of_function(
        lambda x: kornia.color.rgb_to_hsv(torch.cat([x, x.flip(2), x.flip(3)], 1)).square().mean(),
        image,
        "rgb_to_hsv: ",
    )
    yield from of_function(
        lambda x: kornia.losses.focal_loss(
            x.expand(1, 3, 6, 6) * torch.arange(1, 4).double().view(1, 3, 1, 1),
            torch.zeros(1, 6, 6, dtype=torch.long),
            alpha=0.5,
            reduction="mean",
        ),
        image,
        "focal_loss: ",
    )
    yield from of_function(
        lambda x: kornia.losses.dice_loss(
            x.expand(1, 3, 6, 6) * torch.arange(1, 4).double().view(1, 3, 1, 1),
            torch.zeros(1, 6, 6, dtype=torch.long),
        ),
        image,
        "dice_loss: ",
    )
