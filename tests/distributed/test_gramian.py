"""Inner products over ranks, and weights made of them: those of one process on the joined batch."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradkit
from gradkit._autograd.jacobian_rows import read_jacobian_rows
from gradkit._core.call import read_losses
from gradkit._core.params import read_params
from gradkit.distributed import _gramian
from gradkit.distributed._gramian import arrival_order
from tests.processes import Ranks

F64 = torch.float64


def fresh(device: torch.device) -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3), nn.Linear(3, 3)
    return nn.Sequential(*layers).to(device, F64)


def joined(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(3 * dist.get_world_size(), 5, generator=generator, dtype=F64).to(device)


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def wrapped(device: torch.device, kind: str) -> Any:
    model = fresh(device)
    if kind != "FSDP2":
        return DistributedDataParallel(model, find_unused_parameters=kind == "unused")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def scalars(out: Tensor) -> dict[str, Tensor]:
    return {"a": out[:, 0].square().mean(), "b": out.sin().mean(), "c": out.exp().mean()}


def with_vector(out: Tensor) -> dict[str, Tensor]:
    return {"a": out[:, 0].square().mean(), "b": out.sin().mean(0)}


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def unit(gramian: Tensor) -> Tensor:
    return 1 / gramian.diagonal().sqrt()


KINDS = ("DDP", "unused", "FSDP2")


def check_products(device: torch.device, kind: str) -> None:
    model, single, x = wrapped(device, kind), fresh(device), joined(device)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    expected = gradkit.gram(with_vector(single(x)), single)
    for chunk_size in (None, 2, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error", gradkit.GradkitWarning)
            ours = gradkit.distributed.gram(
                with_vector(model(mine(x))), model, chunk_size=chunk_size
            )
        close(ours, expected)
        assert torch.equal(ours, ours.T)
    losses = with_vector(model(mine(x)))
    close(gradkit.distributed.gram(losses, model, retain_graph=True), expected)
    close(gradkit.distributed.gram(losses, model), expected)
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.distributed.gram(losses, model)
    grads = [param.grad for param in model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    assert all(grad is not None and bool((grad == 1).all()) for grad in whole)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_joined_batch(
    two: Ranks, device: torch.device, kind: str
) -> None:
    two.run(check_products, kind)


def check_mesh_of_two_dimensions(device: torch.device) -> None:
    """Ranks that hold the same shards count once."""
    model, single, x = fresh(device), fresh(device), joined(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (2, 2), mesh_dim_names=("r", "s")))
    expected = gradkit.gram(scalars(single(x)), single)
    close(gradkit.distributed.gram(scalars(model(mine(x))), model), expected)
    _, ours = gradkit.distributed.value_and_grads(scalars(model(mine(x))), model, weights=unit)
    _, theirs = gradkit.value_and_grads(scalars(single(x)), single, weights=unit)
    for name, grad in ours.items():
        close(grad.full_tensor(), theirs[name])


def test_products_of_replicated_shards(four: Ranks, device: torch.device) -> None:
    four.run(check_mesh_of_two_dimensions)


def check_weights(device: torch.device, kind: str) -> None:
    model, single, x = wrapped(device, kind), fresh(device), joined(device)
    _, expected = gradkit.value_and_grads(scalars(single(x)), single, weights=unit)

    def own(gramian: Tensor) -> list[float]:
        return [1.0 + dist.get_rank(), 2.0, 3.0]

    values, grads = gradkit.distributed.value_and_grads(
        scalars(model(mine(x))), model, weights=unit
    )
    _, firsts = gradkit.distributed.value_and_grads(scalars(model(mine(x))), model, weights=own)
    _, theirs = gradkit.value_and_grads(
        scalars(single(x)), single, weights={"a": 1.0, "b": 2.0, "c": 3.0}
    )
    assert list(values) == ["a", "b", "c"]
    for ours, right in ((grads, expected), (firsts, theirs)):
        for one, other in zip(ours.values(), right.values(), strict=True):
            close(one.full_tensor() if isinstance(one, DTensor) else one, other)

    def fails(gramian: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError
        return gramian[0]

    mistakes: list[tuple[Any, Any]] = [
        (fails, ZeroDivisionError if dist.get_rank() == 1 else gradkit.CollectiveError),
        (lambda gramian: [1.0], gradkit.StructureError),
        (lambda gramian: ["1", 1.0, 1.0], gradkit.LeafTypeError),
    ]
    for weights, error in mistakes:
        with pytest.raises(error):
            gradkit.distributed.value_and_grads(scalars(model(mine(x))), model, weights=weights)
    with pytest.raises(gradkit.NotScalarLossError):
        gradkit.distributed.value_and_grads(with_vector(model(mine(x))), model, weights=unit)
    close(
        gradkit.distributed.gram(scalars(model(mine(x))), model),
        gradkit.gram(scalars(single(x)), single),
    )


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_weights_are_made_of_products_over_all_ranks(
    two: Ranks, device: torch.device, kind: str
) -> None:
    two.run(check_weights, kind)


def check_recorded(device: torch.device, kind: str) -> None:
    """What one rank keeps changes nothing for the others."""
    model, x = wrapped(device, kind), joined(device)
    expected = gradkit.distributed.gram(scalars(model(mine(x))), model)
    out = model(mine(x))
    is_first = dist.get_rank() == 0
    with gradkit.safe_retain(out) if is_first else nullcontext() as kept:
        product = gradkit.distributed.gram(scalars(out), model)
    close(product, expected)
    assert kept is None or kept.passes == ()
    out = model(mine(x))
    with gradkit.safe_retain(out) if is_first else nullcontext() as kept:
        gradkit.distributed.value_and_grads(scalars(out), model, weights=unit)
    assert kept is None or len(kept.passes) == 1


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_passes_for_products_are_not_recorded(two: Ranks, device: torch.device, kind: str) -> None:
    two.run(check_recorded, kind)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.trunk = nn.Linear(5, 4)

    def forward(self, x: Tensor, which: list[int]) -> list[Tensor]:
        features = self.trunk(x).tanh()
        return [self.heads[index](features).square().mean() for index in which]


def check_uneven(device: torch.device) -> None:
    """The ranks use different heads, so that leaves arrive in different orders, or not at all."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Heads().to(device, F64), find_unused_parameters=True)
    x = mine(joined(device))
    which = [0, 1] if rank else [1, 2]
    constant = torch.ones((), dtype=F64, device=device)
    for extra in (lambda out: [], lambda out: [constant if rank else out[0] * 2]):
        out = model(x, which)
        losses = [*out, *extra(out)]
        per_loss = gradkit.distributed.per_loss_grads(losses, model, retain_graph=True)
        expected = gradkit.tree.gram(per_loss)
        for chunk_size in (None, 1):
            ours = gradkit.distributed.gram(losses, model, chunk_size=chunk_size, retain_graph=True)
            close(ours, expected)


def test_ranks_that_use_different_parameters(two: Ranks, device: torch.device) -> None:
    two.run(check_uneven)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


def check_fallbacks(device: torch.device) -> None:
    """What one rank cannot batch, none does; and all say so."""
    rank, x = dist.get_rank(), mine(joined(device))

    def hooked(model: Any) -> dict[str, Tensor]:
        out = model(x)
        if rank:
            out.register_hook(lambda grad: grad / 2)
        return scalars(out)

    cases: list[tuple[Any, Any, str]] = [
        (
            fresh,
            lambda model: scalars(Doubled.apply(model(x)) if rank else model(x)),
            "Doubled|rank 1",
        ),
        (fresh, hooked, "a hook computes|rank 1"),
        (fresh, lambda model: scalars(model(x)) | {"inf": model(x).sum() * torch.inf}, "finite"),
    ]
    for make, losses_of, reason in cases:
        model = DistributedDataParallel(make(device))
        losses = losses_of(model)
        per_loss = gradkit.distributed.per_loss_grads(losses, model, retain_graph=True)
        with pytest.warns(gradkit.GradkitWarning, match=reason):
            ours = gradkit.distributed.gram(losses, model)
        torch.testing.assert_close(
            ours, gradkit.tree.gram(per_loss), rtol=1e-10, atol=1e-12, equal_nan=True
        )
    model = DistributedDataParallel(fresh(device))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.warns(gradkit.GradkitWarning, match="a communication hook"):
        ours = gradkit.distributed.gram(scalars(model(x)), model)
    per_loss = gradkit.distributed.per_loss_grads(scalars(model(x)), model)
    close(ours, gradkit.tree.gram(per_loss))


def test_what_cannot_be_batched_runs_in_sequence_on_all_ranks(
    two: Ranks, device: torch.device
) -> None:
    two.run(check_fallbacks)


def check_mistakes(device: torch.device) -> None:
    """All ranks raise, nothing has changed, and the next call works."""
    rank, x = dist.get_rank(), joined(device)
    model, single = DistributedDataParallel(fresh(device)), fresh(device)

    def stopping(grad: Tensor) -> None:
        raise gradkit.OptionError("stop")

    def with_stop(out: Tensor) -> dict[str, Tensor]:
        if rank:
            out.register_hook(stopping)
        return scalars(out)

    other = gradkit.CollectiveError
    cases: list[tuple[Any, Any]] = [
        (with_stop, gradkit.OptionError if rank else other),
        (lambda out: list(scalars(out).values())[rank:], gradkit.StructureError),
        (lambda out: {"a": out.detach().sum()}, gradkit.DetachedLossError),
        (
            lambda out: {"a": 1.0} if rank else scalars(out),
            gradkit.LeafTypeError if rank else other,
        ),
        (lambda out: out[:0, 0], gradkit.StructureError),
        (lambda out: {"a": x.clone().requires_grad_().sum()}, gradkit.UnreachedParamError),
    ]
    for losses_of, error in cases:
        with pytest.raises(error):
            gradkit.distributed.gram(losses_of(model(mine(x))), model)
        assert all(param.grad is None for param in model.parameters())
        expected = gradkit.gram(scalars(single(x)), single)
        close(gradkit.distributed.gram(scalars(model(mine(x))), model), expected)
    told = fresh(device)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(told, ["0.weight"])
    ignoring = DistributedDataParallel(told)
    with pytest.raises(gradkit.UnsupportedGraphError, match="parameters to ignore"):
        gradkit.distributed.gram(scalars(ignoring(mine(x))), ignoring)
    with pytest.raises(gradkit.LeafTypeError, match="expected a module wrapped"):
        gradkit.distributed.gram(scalars(single(x)), single)
    with pytest.raises(gradkit.OptionError):
        gradkit.distributed.gram(scalars(model(mine(x))), model, chunk_size=0)
    with pytest.raises(gradkit.StructureError, match="part on rank 1"):
        gradkit.distributed.gram(scalars(model(mine(x))), model, chunk_size=2 + rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradkit.GradkitWarning)  # there is one pass in any case
        one = gradkit.distributed.gram(Doubled.apply(model(mine(x))).mean(), model)
    close(one, gradkit.gram(single(x).mean() * 2, single))


def test_mistakes(two: Ranks, device: torch.device) -> None:
    two.run(check_mistakes)


@pytest.mark.parametrize("backwards", [False, True])
def test_leaves_are_sent_in_the_order_of_their_arrival(
    device: torch.device, backwards: bool
) -> None:
    """Whatever the order in which they were registered: none waits for another."""
    layers = [nn.Linear(4, 4, bias=index % 2 == 0) for index in range(6)]
    layers[3].weight = layers[1].weight
    model = nn.ModuleList(layers[::-1] if backwards else layers).to(device)
    out = torch.randn(3, 4, device=device)
    for layer in layers:
        out = layer(out).tanh()
    losses = [out.sum(), out.square().sum()]
    rows = read_jacobian_rows(read_losses(losses, scalar=False), read_params(model))
    arrived: list[int] = []
    rows.run_batch([slice(0, 2)], lambda index, _: arrived.append(index))
    position = {index: turn for turn, index in enumerate(arrived)}
    # A layer's weight and bias come from one node, in any order.
    order = arrival_order(rows)
    assert sorted(order) == sorted(arrived)
    assert all(abs(turn - position[index]) <= 1 for turn, index in enumerate(order))


def check_memory(device: torch.device) -> None:
    """Each stack is sent as it arrives, and none is kept."""
    layers = [nn.Linear(64, 64, bias=False) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    x = torch.randn(2, 64, device=device)
    calls = most = 0
    add = _gramian._Buckets.add

    def counted(self: Any, index: int, rows: Tensor) -> None:
        nonlocal calls, most
        calls += 1
        add(self, index, rows)
        most = max(most, len(self._arrived))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gramian._Buckets, "add", counted)
        patch.setattr(_gramian, "_BUCKET_BYTES", 1)
        out = model(x)
        gradkit.distributed.gram([out.sum(), out.square().sum()], model)
    assert (calls, most) == (8, 0)


def test_stacks_are_not_kept(two: Ranks, device: torch.device) -> None:
    two.run(check_memory)
