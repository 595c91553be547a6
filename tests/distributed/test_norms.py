"""Norms, clipping and statistics over several meshes: those of the whole tensors, on every rank."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import gradkit
from gradkit import tree
from gradkit._compat.distributed import whole_sums
from tests.helpers import of_dtensors
from tests.host_reads import host_reads
from tests.processes import Ranks

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
    return entries_with_graph(leaf.detach())


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


def check_random(device: torch.device, seeds: range) -> None:
    meshes = meshes_of(device)
    for seed in seeds:
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
    four.run(check_random, range(40))


def mixed(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors, and the same over all meshes, with a plain one beside."""
    meshes, generator = meshes_of(device), torch.Generator().manual_seed(0)
    placements = {
        "line": [Shard(0)], "grid": [Shard(0), Shard(1)], "some": [Shard(0)], "model": [Shard(1)],
    }  # fmt: skip
    whole = {
        name: torch.randn(5, 3, dtype=torch.float64, generator=generator).to(device)
        for name in (*placements, "plain")
    }
    return whole, {
        name: distribute_tensor(x, meshes[name], placements[name]) if name in placements else x
        for name, x in whole.items()
    }


def check_collectives(device: torch.device) -> None:
    """One for the meshes with all ranks, and those of some ranks beside; one for a slice."""
    whole, leaves = mixed(device)
    params = {name: nn.Parameter(torch.zeros_like(x)) for name, x in leaves.items()}
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    for names, count in ((["line", "grid", "some", "plain"], 1), ([*leaves], 2), (["plain"], 0)):
        grads = {name: leaves[name] for name in names}
        some = {name: params[name] for name in names}
        for call in (
            partial(tree.global_norm, grads),
            partial(gradkit.step_, optimizer, some, grads, max_norm=0.5),
        ):
            with CommDebugMode() as collectives:
                norm = call()
            assert collectives.get_total_counts() == count
            close(norm, tree.global_norm({name: whole[name] for name in names}))


def test_one_collective_where_it_can_be(four: Ranks, device: torch.device) -> None:
    four.run(check_collectives)


def check_derivatives(device: torch.device) -> None:
    """To the second order; and zero where all is zero."""
    whole, leaves = mixed(device)
    del leaves["some"]  # of which a rank outside has no gradient
    for scale in (1.0, 0.0):
        pair = []
        for tensors in (leaves, {name: whole[name] for name in leaves}):
            inputs = {n: (x * scale).detach().requires_grad_() for n, x in tensors.items()}
            norm = tree.global_norm(inputs)
            first = torch.autograd.grad(norm, [*inputs.values()], create_graph=scale > 0)
            pair.append([norm, *first])
            if scale:
                again = sum(entries_with_graph(x).pow(3).sum() for x in first)
                pair[-1] += torch.autograd.grad(again, [*inputs.values()])
        for ours, theirs in zip(*pair, strict=True):
            close(entries(ours), entries(theirs))


def entries_with_graph(leaf: Any) -> Tensor:
    return cast("Tensor", leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)


@of_dtensors
def test_a_norm_over_meshes_has_derivatives(four: Ranks, device: torch.device) -> None:
    four.run(check_derivatives)


def check_steps(device: torch.device) -> None:
    """A tied tensor counts once, in both calls, and the optimizer goes where one process does."""
    whole, leaves = mixed(device)
    del whole["some"], leaves["some"]
    runs = []
    for tensors in (leaves, whole):
        params = {name: nn.Parameter(x.detach().clone()) for name, x in tensors.items()}
        tied = {**params, "again": params["grid"]}
        optimizer = torch.optim.AdamW(tied.values(), lr=0.1)
        norms = []
        for step in range(4):
            loss = sum(entries_with_graph(x).cos().pow(2).sum() for x in tied.values())
            if step % 2:
                _, norm = gradkit.minimize_(optimizer, loss, max_norm=0.3)
            else:
                _, grads = gradkit.value_and_grads(loss, tied)
                norm = gradkit.step_(optimizer, tied, grads, max_norm=0.3)
                assert norm is not None
                own = {name: grad for name, grad in grads.items() if name != "again"}
                close(norm, tree.global_norm(own))
                assert norm < tree.global_norm(grads)
            norms.append(norm)
        runs.append([*map(entries, params.values()), *norms])
        assert all(param.grad is None for param in params.values())
    for ours, theirs in zip(*runs, strict=True):
        close(ours, theirs)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of the tied one in two places
def test_clipped_steps_are_those_of_one_process(four: Ranks, device: torch.device) -> None:
    four.run(check_steps)


def check_experts(device: torch.device) -> None:
    """A mesh of some ranks beside one of all, and alone: a rank outside of it has no norm."""
    whole, leaves = mixed(device)
    inside = dist.get_rank() in (1, 2)
    expected = torch.stack([whole["line"].norm(), whole["some"].norm()]).norm()
    close(tree.global_norm([leaves["line"], leaves["some"]]), expected)
    if inside:
        close(tree.global_norm([leaves["some"]]), whole["some"].norm())
    else:
        param: Any = nn.Parameter(torch.zeros_like(leaves["some"]))
        optimizer = torch.optim.SGD([param], lr=1.0)
        for call in (
            lambda: tree.global_norm([leaves["some"]]),
            lambda: tree.clip_by_global_norm([leaves["some"], leaves["plain"]], 1.0),
            lambda: gradkit.step_(optimizer, [param], [leaves["some"]], max_norm=1.0),
            lambda: gradkit.report.norms([leaves["some"]]),
        ):
            with pytest.raises(gradkit.StructureError, match=r"ranks \[1, 2\], seen from rank"):
                call()
        assert param.grad is None
    halves = [DeviceMesh(device.type, ranks) for ranks in ([0, 1], [2, 3])]
    x, y = (distribute_tensor(whole["some"] + i, mesh, [Shard(0)]) for i, mesh in enumerate(halves))
    close(tree.global_norm([x, y]), tree.global_norm([whole["some"], whole["some"] + 1]))
    own = x if dist.get_rank() < 2 else y
    close(tree.global_norm([own]), own.full_tensor().norm())
    with pytest.raises(gradkit.StructureError, match="copies or not"):
        tree.global_norm([own, leaves["line"]])


def test_experts_on_some_ranks(four: Ranks, device: torch.device) -> None:
    four.run(check_experts)


def check_report(device: torch.device) -> None:
    whole, leaves = mixed(device)
    for tensors in (whole, leaves):
        tensors["none"] = None
    del whole["some"], leaves["some"]
    whole["grid"][0, 0] = float("nan")
    bad = leaves["grid"].to_local()
    if dist.get_rank() == 0:
        bad[0, 0] = float("nan")
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    ours = gradkit.report.norms(leaves, scaler=scaler, params=leaves)
    theirs = gradkit.report.norms(whole, scaler=scaler, params=whole)
    with host_reads() as seen:
        gradkit.report.norms([leaves["grid"], leaves["plain"]], scaler=scaler)
    assert seen == ["tolist"]
    assert ours.rows["none"] is None
    assert ours.to_dict() == pytest.approx(theirs.to_dict(), rel=1e-12, nan_ok=True)
    line = ours.rows["line"]
    assert line is not None
    assert line.norm == pytest.approx((whole["line"] / 4).norm().item(), rel=1e-12)


def test_the_report_is_that_of_the_whole_tensors(four: Ranks, device: torch.device) -> None:
    four.run(check_report)
