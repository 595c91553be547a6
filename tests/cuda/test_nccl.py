"""`gradkit.distributed` over NCCL, which one GPU has for one rank: tensors stay on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import gradkit
from tests.distributed import test_ddp as ddp
from tests.distributed import test_fsdp as fsdp
from tests.processes import Ranks, ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def one(device: torch.device) -> Iterator[Ranks]:
    """A group of one process; none where there is no CUDA."""
    if device.type != "cuda":
        pytest.skip("it is about CUDA")
    with ranks(1, device) as group:
        yield group


def check_device(device: torch.device) -> None:
    assert device.type == "cuda"
    assert "nccl" in str(dist.get_backend_config())


def test_the_rank_is_on_cuda(one: Ranks, device: torch.device) -> None:
    one.run(check_device)


def check_all_reduce(device: torch.device) -> None:
    grads = {"a": torch.arange(3.0, device=device), "b": None}
    summed = gradkit.distributed.all_reduce(grads)
    assert torch.equal(summed["a"], grads["a"])
    assert summed["a"].device == device
    assert summed["b"] is None


def test_all_reduce(one: Ranks, device: torch.device) -> None:
    one.run(check_all_reduce)


@pytest.mark.parametrize("wrapper", ddp.WRAPPERS)
def test_replicated_parameters(one: Ranks, device: torch.device, wrapper: str) -> None:
    one.run(ddp.check_equal_to_backward, ddp.WRAPPERS[wrapper])


@pytest.mark.parametrize("sharder", fsdp.SHARDERS)
def test_sharded_parameters(one: Ranks, device: torch.device, sharder: str) -> None:
    one.run(fsdp.check_equal_to_backward, fsdp.SHARDERS[sharder])
