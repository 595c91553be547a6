"""Norms, clipping and statistics over several meshes: those of the whole tensors, on every rank."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradkit
from gradkit import tree
from gradkit._compat.distributed import whole_sums
from tests.processes import Ranks

CASES = 60
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def meshes_of(device: torch.device) -> dict[str, Any]:
    """Return a line, a grid, slices of the grid, and a mesh of some ranks."""
    grid = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "model"))
    line, some = init_device_mesh(device.type, (4,)), DeviceMesh(device.type, [1, 2])
    return {
        "line": line, "grid": grid, "data": grid["data"], "model": grid["model"], "some": some,
    }  # fmt: skip


def divided(whole: Tensor, mesh: Any, placements: list[Any]) -> Any:
    """Return a DTensor of these entries; a partial sum has a part of each on each of the ranks."""
    kept = [Replicate() if p.is_partial() else p for p in placements]
    result: Any = distribute_tensor(whole, mesh, kept)
    coordinate = mesh.get_coordinate()
    if coordinate is None or kept == placements:
        return result
    shares = [
        (0.25, 0.75)[at] for at, p in zip(coordinate, placements, strict=True) if p.is_partial()
    ]
    local = result.to_local()
    for share in shares:
        local = local * share
    options: Any = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    return DTensor.from_local(local, mesh, placements, **options)


def entries(leaf: Any) -> Tensor:
    """Return the whole of a leaf."""
    return leaf.detach().full_tensor() if isinstance(leaf, DTensor) else leaf.detach()  # type: ignore[attr-defined]


def case(seed: int, meshes: dict[str, Any], device: torch.device) -> tuple[list[Tensor], list[Any]]:
    """Return tensors of uneven sizes, and the same over meshes and placements drawn at random."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    whole, leaves = [], []
    for _ in range(draw.randint(1, 6)):
        shape = [draw.choice((0, 1, 2, 3, 5, 6)), draw.choice((1, 3, 4))]
        x = torch.randn(shape, dtype=torch.float64, generator=generator).to(device)
        name = draw.choice(["plain", *meshes])
        if name == "plain":
            leaf: Any = x.clone()
        else:
            kinds = [Shard(0), Shard(1), Replicate()] + [Partial()] * (name not in ("some", "line"))
            mesh = meshes[name]
            leaf = divided(x, mesh, [draw.choice(kinds) for _ in range(mesh.ndim)])
        whole.append(x)
        leaves.append(leaf)
    if any(isinstance(x, DTensor) and x.device_mesh == meshes["some"] for x in leaves):
        whole.append(x := torch.ones(3, dtype=torch.float64, device=device))
        leaves.append(
            distribute_tensor(x, meshes["line"], [Shard(0)])
        )  # a mesh of all ranks beside
    return whole, leaves


def same_everywhere(number: Tensor) -> bool:
    """Return whether all ranks have the same bits."""
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number.item())
    return len(set(numbers)) == 1 and not isinstance(number, DTensor)


def check_random(device: torch.device) -> None:
    meshes = meshes_of(device)
    for seed in range(CASES):
        whole, leaves = case(seed, meshes, device)
        try:
            check_case(whole, leaves, meshes["some"])
        except Exception as error:
            error.add_note(f"seed {seed}: {leaves}")
            raise


def check_case(whole: list[Tensor], leaves: list[Any], some: Any) -> None:
    expected = torch.cat([x.flatten() for x in whole]).norm()
    norm = tree.global_norm(leaves)
    close(norm, expected)
    assert same_everywhere(norm)
    clipped, before = tree.clip_by_global_norm(leaves, 0.5)
    close(before, expected)
    summed = [whole_sums(leaf) for leaf in leaves]  # torch's steps do not add all partial sums
    params = [nn.Parameter(torch.zeros_like(leaf)) for leaf in summed]
    single = [nn.Parameter(torch.zeros_like(x)) for x in whole]
    ours = gradkit.step_(torch.optim.SGD(params, lr=1.0), params, summed, max_norm=0.5)
    theirs = gradkit.step_(torch.optim.SGD(single, lr=1.0), single, whole, max_norm=0.5)
    close(ours, theirs)
    assert ours is not None
    assert same_everywhere(ours)
    for part, param, alone in zip(clipped, params, single, strict=True):
        if getattr(param, "device_mesh", None) == some and some.get_coordinate() is None:
            continue
        close(entries(part), -alone.detach())
        close(entries(param), alone.detach())
        assert param.grad is None


def test_norms_are_those_of_the_whole_tensors(four: Ranks, device: torch.device) -> None:
    four.run(check_random)
