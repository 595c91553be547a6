"""`gradkit.distributed.simultaneous_grads`: players of several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import gradkit
from tests.processes import Ranks

F64 = torch.float64


def fresh(device: torch.device) -> dict[str, nn.Module]:
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    return {"G": generator.to(device, F64), "D": critic.to(device, F64)}


def wrapped(device: torch.device, kind: str) -> dict[str, Any]:
    players = fresh(device)
    if kind == "DDP":
        return {name: DistributedDataParallel(player) for name, player in players.items()}
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return {name: fully_shard(player, mesh=mesh) for name, player in players.items()}


def batch(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(4 * dist.get_world_size(), 5, generator=generator, dtype=F64).to(device)


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def losses_of(players: Any, x: Tensor) -> dict[str, Tensor]:
    noise, real = x.split([2, 3], 1)
    fake = players["D"](players["G"](noise))
    return {
        "D": softplus(fake).mean() + softplus(-players["D"](real)).mean(),
        "G": softplus(-fake).mean(),
    }


def flat(grads: Any) -> dict[str, Any]:
    return {
        f"{player}.{name.removeprefix('module.')}": (
            grad.full_tensor() if isinstance(grad, DTensor) else grad
        )
        for player, tree in grads.items()
        for name, grad in tree.items()
    }


def check_game(device: torch.device, kind: str) -> None:
    players, single, x = wrapped(device, kind), fresh(device), batch(device)
    expected = flat(gradkit.simultaneous_grads(losses_of(single, x), single))
    for _ in range(3):  # the later ones with what the first has agreed on
        grads = gradkit.distributed.simultaneous_grads(losses_of(players, mine(x)), players)
        ours = flat(grads)
        assert ours.keys() == expected.keys()
        for name, grad in ours.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)
        assert all(p.grad is None for player in players.values() for p in player.parameters())


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_game_is_that_of_the_joined_batch(two: Ranks, device: torch.device, kind: str) -> None:
    two.run(check_game, kind)


def check_second_order(device: torch.device) -> None:
    """The critic's gradient, differentiated: what consensus optimization adds to a game."""
    players, single, x = wrapped(device, "DDP"), fresh(device), batch(device)

    def penalty(api: Any, players: Any, x: Tensor) -> Any:
        grads = api.simultaneous_grads(losses_of(players, x), players, create_graph=True)
        return gradkit.tree.dot(grads, grads)

    # Its cotangent, the sum over ranks that have one and the same square, and then the mean.
    _, ours = gradkit.distributed.value_and_grads(
        penalty(gradkit.distributed, players, mine(x)), players
    )
    _, theirs = gradkit.value_and_grads(penalty(gradkit, single, x), single)
    for name, grad in flat(ours).items():
        torch.testing.assert_close(grad, flat(theirs)[name], rtol=1e-9, atol=1e-11)


def test_the_gradient_of_a_game_is_differentiable(two: Ranks, device: torch.device) -> None:
    two.run(check_second_order)


def check_edges(device: torch.device) -> None:
    players, x = wrapped(device, "DDP"), mine(batch(device))
    rank = dist.get_rank()
    api = gradkit.distributed
    losses = losses_of(players, x)
    constant = {"D": losses["D"], "G": torch.zeros((), dtype=F64, device=device)}
    grads = api.simultaneous_grads(constant, players, retain_graph=True)
    assert all(grad is None for grad in grads["G"].values())
    assert all(grad is not None for grad in grads["D"].values())
    zeros = api.simultaneous_grads(constant, players, unused="zeros", retain_graph=True)
    assert not any(grad.any() for grad in zeros["G"].values())
    with pytest.raises(gradkit.UnreachedParamError, match=r"\['G'\]"):
        api.simultaneous_grads(constant, players, unused="error", retain_graph=True)
    one_rank = constant if rank else losses
    grads = api.simultaneous_grads(one_rank, players, retain_graph=True)
    assert all(grad is not None for grad in grads["G"].values())
    mistakes: list[tuple[Any, Any, Any]] = [
        ({"D": losses["D"]}, players, gradkit.StructureError),
        (losses if rank else {"D": 1.0, "G": losses["G"]}, players, gradkit.GradkitError),
        (losses, players["D"], gradkit.StructureError),
        (losses, fresh(device), gradkit.LeafTypeError),
    ]
    for wrong, modules, error in mistakes:
        with pytest.raises(error):
            api.simultaneous_grads(wrong, modules)
    assert all(p.grad is None for player in players.values() for p in player.parameters())
    api.simultaneous_grads(losses, players)
    with pytest.raises(gradkit.FreedGraphError):
        api.simultaneous_grads(losses, players)


def test_edges_of_a_game(two: Ranks, device: torch.device) -> None:
    two.run(check_edges)
