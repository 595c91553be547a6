"""`Accumulator` over ranks: sums of all ranks equal one process on all their data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradkit
from tests.accumulate.test_sums import Tagger, counted, nats, two_losses
from tests.distributed.test_all_reduce import counted as collectives
from tests.processes import Ranks

ROWS = ((3, 1, 2), (4,), (1, 1), (5, 2))  # of the micro-batches of each rank


def model_on(device: torch.device, **options: Any) -> Tagger:
    torch.manual_seed(1)
    return Tagger(**options).to(device).double()


def parts_of(rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    for rows in ROWS[rank]:
        codes = torch.randint(7, (rows, 3), generator=generator)
        targets = torch.randint(5, (rows, 3), generator=generator)
        targets[torch.rand(rows, 3, generator=generator) < 0.4] = -100
        yield codes.to(device), targets.to(device)


def whole(ranks: range, device: torch.device) -> tuple[Tensor, Tensor]:
    columns = zip(*(part for rank in ranks for part in parts_of(rank, device)), strict=True)
    codes, targets = map(torch.cat, columns)
    return codes, targets


def by_name(grads: Any) -> dict[str, Any]:
    return {
        name.removeprefix("module."): grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads.items()
    }


def assert_right(
    outcome: Any, device: torch.device, ranks: Any = None, tolerance: float = 1e-12, **options: Any
) -> None:
    codes, targets = whole(ranks or range(dist.get_world_size()), device)
    model = model_on(device, **options)
    value, grads = gradkit.value_and_grads(nats(model, codes, targets, "mean"), model)
    torch.testing.assert_close(outcome[0].double(), value, rtol=tolerance, atol=tolerance)
    ours = by_name(outcome[1])
    assert {k: v is None for k, v in ours.items()} == {k: v is None for k, v in grads.items()}
    for name, grad in grads.items():
        if grad is not None:
            torch.testing.assert_close(
                ours[name].to_dense(), grad.to_dense(), rtol=tolerance, atol=tolerance
            )


def add_all(total: gradkit.Accumulator, module: nn.Module, device: torch.device) -> None:
    for codes, targets in parts_of(dist.get_rank(), device):
        total.add_(nats(module, codes, targets), counted(targets))


def check_plain(device: torch.device) -> None:
    model = model_on(device)
    total = gradkit.Accumulator(model)
    add_all(total, model, device)
    assert_right(total.mean(), device)
    assert_right(total.mean(dist.group.WORLD), device)
    alone = gradkit.Accumulator(model)
    if dist.get_rank() == 0:
        add_all(alone, model, device)
    assert_right(alone.mean(), device, range(1))
    for rank in range(dist.get_world_size()):
        one = dist.new_group([rank])
        if rank == dist.get_rank():
            assert_right(total.mean(one), device, range(rank, rank + 1))


def test_plain_modules(two: Ranks, device: torch.device) -> None:
    two.run(check_plain)


WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}


def check_replicated(device: torch.device, options: dict[str, Any]) -> None:
    module = DistributedDataParallel(model_on(device), **options)
    for waiting in (contextlib.nullcontext, module.no_sync):
        total = gradkit.Accumulator(module)
        with waiting():
            assert collectives(partial(add_all, total, module, device)) == (0, 0)
        sums, _ = collectives(total.mean)
        assert sums == (1 if device.type == "cpu" else 2)  # gradients and losses; counts
        assert_right(total.mean(), device)
        assert all(param.grad is None for param in module.parameters())
    inner = gradkit.Accumulator(module.module)
    add_all(inner, module, device)
    assert_right(inner.mean(), device)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_replicated_modules(two: Ranks, device: torch.device, wrapper: str) -> None:
    two.run(check_replicated, WRAPPERS[wrapper])


def check_empty_rank(device: torch.device) -> None:
    """A rank that adds nothing; the structure of the losses is that of the others."""
    for sparse in (False, True):
        module = DistributedDataParallel(model_on(device, sparse=sparse))
        total, each = gradkit.Accumulator(module), gradkit.Accumulator(module)
        if dist.get_rank() == 1:
            add_all(total, module, device)
            for codes, targets in parts_of(1, device):
                losses = two_losses(module, codes, targets)
                each.add_(losses, {"size": len(codes), "nats": counted(targets)})
        assert_right(total.mean(), device, range(1, 2), sparse=sparse)
        means, grads = each.mean()
        assert list(means) == ["nats", "size"]
        assert grads["module.mix.weight"].stride() == module.module.mix.weight.stride()
        codes, targets = whole(range(1, 2), device)
        model = model_on(device, sparse=sparse)
        weights = {"nats": 1 / counted(targets), "size": 1 / len(codes)}
        _, right = gradkit.value_and_grads(
            two_losses(model, codes, targets), model, weights=weights
        )
        assert gradkit.tree.allclose(by_name(grads), right, rtol=1e-12, atol=1e-12)
    with pytest.raises(gradkit.StructureError, match="a count, got 0 everywhere"):
        gradkit.Accumulator(module).mean()
    total.add_(torch.zeros((), device=device), 0)


def test_a_rank_without_micro_batches(two: Ranks, device: torch.device) -> None:
    two.run(check_empty_rank)


def check_unreached_on_a_rank(device: torch.device) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in "abc"}).to(device).double()
    module = DistributedDataParallel(model, find_unused_parameters=True)
    x = torch.ones(3, 2, device=device).double()
    total = gradkit.Accumulator(module)
    total.add_(model["a" if dist.get_rank() == 0 else "b"](x).sum(), 3)
    _, grads = total.mean()
    assert grads["module.c.weight"] is None
    for name in "ab":
        assert grads[f"module.{name}.weight"].tolist() == [[0.5, 0.5]]


def test_parameters_that_one_rank_reaches(two: Ranks, device: torch.device) -> None:
    two.run(check_unreached_on_a_rank)


SHARDERS: dict[str, dict[str, Any]] = {
    "resharded": {"reshard_after_forward": True},
    "not resharded": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)},
    "two dimensions": {"shape": (2, 2)},
}


def sharded(device: torch.device, *, shape: Any = None, **options: Any) -> Any:
    model: Any = model_on(device)
    if shape is not None:
        options["mesh"] = init_device_mesh(
            device.type, shape, mesh_dim_names=("replicas", "shards")
        )
    for part in (model.embed, model.head, model):
        fully_shard(part, **options)
    return model


def check_sharded(device: torch.device, options: dict[str, Any]) -> None:
    model, untouched = sharded(device, **options), sharded(device, **options)
    tolerance = 1e-5 if "mp_policy" in options else 1e-12
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, untouched)]
    total = gradkit.Accumulator(model)
    parts = list(parts_of(dist.get_rank(), device))
    most = max(map(len, ROWS[: dist.get_world_size()]))
    parts += [(x[:0], y[:0]) for x, y in parts[:1] * (most - len(parts))]  # all ranks gather
    for codes, targets in parts:
        total.add_(nats(model, codes, targets), counted(targets))
        assert all(param.grad is None for param in model.parameters())
    outcome = total.mean()
    assert_right(outcome, device, tolerance=tolerance)
    for param, grad in zip(model.parameters(), outcome[1].values(), strict=True):
        if grad is not None:
            assert grad.placements == param.placements
            assert grad.dtype == param.dtype
            local = grad.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes
    for codes, targets in parts:  # ordinary steps work as if nothing had been
        for module, optimizer in zip((model, untouched), optimizers, strict=True):
            optimizer.zero_grad()
            nats(module, codes, targets).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())


@pytest.mark.parametrize("sharder", [name for name in SHARDERS if name != "two dimensions"])
def test_sharded_modules(two: Ranks, device: torch.device, sharder: str) -> None:
    two.run(check_sharded, SHARDERS[sharder])


def test_sharded_and_replicated_modules(four: Ranks, device: torch.device) -> None:
    four.run(check_sharded, SHARDERS["two dimensions"])


def check_separate_means_of_shards(device: torch.device) -> None:
    model = sharded(device)
    total = gradkit.Accumulator(model)
    codes, targets = next(parts_of(dist.get_rank(), device))
    losses = two_losses(model, codes, targets)
    total.add_(losses, {"size": len(codes), "nats": counted(targets)})
    _, grads = total.mean()
    every = [next(parts_of(rank, device)) for rank in range(2)]
    codes, targets = (torch.cat(column) for column in zip(*every, strict=True))
    weights = {"nats": 1 / counted(targets), "size": 1 / len(codes)}
    plain = model_on(device)
    _, right = gradkit.value_and_grads(two_losses(plain, codes, targets), plain, weights=weights)
    assert gradkit.tree.allclose(by_name(grads), right, rtol=1e-12, atol=1e-12)


def test_separate_means_of_sharded_modules(two: Ranks, device: torch.device) -> None:
    two.run(check_separate_means_of_shards)


def check_errors(device: torch.device) -> None:
    rank = dist.get_rank()
    model = sharded(device)
    total = gradkit.Accumulator(model)
    codes, targets = next(parts_of(rank, device))
    loss = nats(model, codes, targets)
    error = gradkit.OptionError if rank == 1 else gradkit.CollectiveError
    with pytest.raises(error):  # at once, on all ranks
        total.add_(loss, -1 if rank == 1 else 1)
    total.add_(loss, counted(targets))  # and the graph is as it was
    total.mean()

    plain = model_on(device)
    other = gradkit.Accumulator(plain)
    loss = nats(plain, codes, targets)
    other.add_(loss if rank == 0 else [loss], 3)
    with pytest.raises(gradkit.StructureError, match="rank 1 of 2"):
        other.mean()
    unlike = gradkit.Accumulator(plain if rank == 0 else plain.mix)
    with pytest.raises(gradkit.StructureError, match="params"):
        unlike.mean()


def test_errors_on_one_rank_are_raised_on_all(two: Ranks, device: torch.device) -> None:
    two.run(check_errors)


def check_refusals(device: torch.device) -> None:
    hooked = DistributedDataParallel(model_on(device))
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    with pytest.raises(gradkit.UnsupportedGraphError, match="a communication hook"):
        gradkit.Accumulator(hooked)
    ignoring: Any = model_on(device)
    ignoring._ddp_params_and_buffers_to_ignore = ["embed.weight"]
    with pytest.raises(gradkit.UnsupportedGraphError, match="is to ignore"):
        gradkit.Accumulator([DistributedDataParallel(ignoring)])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    w = distribute_tensor(torch.ones(4, device=device), mesh, [Replicate()]).requires_grad_()
    with pytest.raises(gradkit.UnsupportedGraphError, match="a DTensor that is not"):
        gradkit.Accumulator([w])

    names = ("replicas", "shards")
    two = init_device_mesh(device.type, (1, 2), mesh_dim_names=names)
    parts = [fully_shard(nn.Linear(2, 2).to(device), mesh=each) for each in (mesh, two)]
    total = gradkit.Accumulator(parts)
    x = torch.ones(3, 2, device=device)
    total.add_(parts[1](parts[0](x)).sum(), 3)
    with pytest.raises(gradkit.StructureError, match="modules of one mesh"):
        total.mean()
    assert len(total.mean(dist.group.WORLD)[1]) == 2


def test_what_is_not_summed_over_ranks_is_refused(two: Ranks, device: torch.device) -> None:
    two.run(check_refusals)


def check_other_trees(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    rank = dist.get_rank()
    total = gradkit.Accumulator(w)
    total.add_({"fit": w.sum()} if rank == 0 else {"fit": w.sum(), "aux": w.sum()}, 3)
    expected = r"loss_sum on rank 1 of 2 in gradkit.Accumulator.mean: .*\n.*\'aux\': 0 \* fit_sum"
    with pytest.raises(gradkit.StructureError, match=expected):
        total.mean()
    total, fit_sum = gradkit.Accumulator(w), w.sum()
    if rank == 0:
        total.add_({"fit": fit_sum, "aux": 0 * fit_sum}, {"fit": 3, "aux": 0})
    else:
        total.add_({"fit": w.sum(), "aux": w.sum()}, {"fit": 3, "aux": 2})
    _, grads = total.mean()
    torch.testing.assert_close(grads, torch.full_like(w, 2 / 6 + 1 / 2))


def test_trees_of_losses_that_differ_between_ranks(two: Ranks, device: torch.device) -> None:
    two.run(check_other_trees)
