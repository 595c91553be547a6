"""Maps between rotation vectors, quaternions and matrices, `special_procrustes`, `rigid_points_registration`."""

import roma
import torch

from tests.works_with._oracles import of_function

PIP = "roma"
NOTE = "second derivatives: `special_procrustes`"


def tries():
    v, w = (
        torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64),
        torch.randn(3, 3, dtype=torch.float64),
    )
    m = torch.randn(3, 3, dtype=torch.float64)
    yield from of_function(
        lambda v: (roma.rotvec_to_rotmat(v) * w).sum().exp(), v, "rotvec_to_rotmat: "
    )
    yield from of_function(
        lambda v: (
            roma
            .rotmat_to_rotvec(roma.rotvec_to_rotmat(v) @ roma.rotvec_to_rotmat(v.flip(0)))
            .exp()
            .sum()
        ),
        v,
        "rotmat_to_rotvec: ",
    )
    yield from of_function(
        lambda v: (roma.rotvec_to_unitquat(v).exp()).sum(), v, "rotvec_to_unitquat: "
    )
    yield from of_function(
        lambda v: (roma.rotvec_to_rotmat(v) * w).sum().exp(), v * 0, "rotvec_to_rotmat at 0: "
    )
    yield from of_function(
        lambda m: (roma.special_procrustes(m) * w).sum().exp(), m, "special_procrustes: "
    )
    yield from of_function(lambda m: (roma.procrustes(m)[0] * w).sum().exp(), m, "procrustes: ")
    yield from of_function(
        lambda m: (roma.special_gramschmidt(m) * w).sum().exp(), m, "special_gramschmidt: "
    )
    points = torch.randn(6, 3, dtype=torch.float64)
    yield from of_function(
        lambda p: roma.rigid_points_registration(p, points)[0].exp().sum(),
        torch.randn(6, 3, dtype=torch.float64),
        "rigid_points_registration: ",
    )
    q = torch.nn.functional.normalize(torch.randn(4, dtype=torch.float64), dim=0)
    yield from of_function(
        lambda q: (
            roma.utils
            .unitquat_slerp(
                q / q.norm(),
                torch.tensor([0.0, 0, 0, 1], dtype=torch.float64),
                torch.tensor([0.3], dtype=torch.float64),
            )
            .exp()
            .sum()
        ),
        q,
        "slerp: ",
    )
