"""The emulated accelerator does what a GPU does, with the bits of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

import pytest
import torch
from torch import Tensor

from tests.accelerator import emulation, modules


def each(device: torch.device) -> list[torch.device]:
    return [torch.device(device.type, index) for index in range(modules.DEVICES)]


def test_results_have_the_bits_of_the_cpu(device: torch.device) -> None:
    x = torch.randn(5, 7)
    there = x.to(device)
    assert there.device == torch.device(device.type, 0)
    assert torch.equal((there @ there.mT).exp().sum(1).cpu(), (x @ x.mT).exp().sum(1))


def test_views_are_views(device: torch.device) -> None:
    x = torch.zeros(3, 4, device=device)
    x.mT[1].add_(1)
    x.view(-1)[::5].mul_(2)
    assert x[:, 1].tolist() == [1, 2, 1]
    assert x[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_tensors_of_two_devices_are_refused(device: torch.device) -> None:
    first, second = (torch.ones(2, device=one) for one in each(device))
    for other in (second, torch.ones(2)):
        with pytest.raises(RuntimeError, match="at least two devices"):
            _ = first + other
        with pytest.raises(RuntimeError, match="at least two devices"):
            torch.cat([first, other])
    assert (first + torch.tensor(1.0)).tolist() == [2, 2]  # a number of the host's
    assert first.copy_(second * 3).tolist() == [3, 3]


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "equal": lambda x: torch.equal(x, x),
    "a mask": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "a copy of the host's": lambda x: x.copy_(torch.ones(3)),
}


@pytest.mark.parametrize("name", READS)
def test_what_the_host_waits_for_is_counted(device: torch.device, name: str) -> None:
    x = torch.ones(3, device=device)
    with emulation.waits() as seen:
        READS[name](x)
    assert seen


def test_what_is_queued_is_no_wait(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    with emulation.waits() as seen:
        (w * 2).square().sum().backward()
        torch.where(w > 0, w, 0)
        w.detach().to("cpu", non_blocking=True)
    assert not seen


def test_each_device_has_a_thread_of_the_engine(device: torch.device) -> None:
    threads = []
    for one in each(device):
        w = torch.ones(2, device=one, requires_grad=True)
        h = w * 1
        h.register_hook(lambda _: threads.append(get_ident()))
        h.sum().backward()
    assert len({*threads, get_ident()}) == 1 + modules.DEVICES


def test_each_device_has_a_generator(device: torch.device) -> None:
    module = torch.get_device_module(device)
    before = torch.get_rng_state()
    first, second = each(device)
    torch.randn(3, device=first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(module.get_rng_state(first), module.get_rng_state(second))
    torch.manual_seed(7)
    state = module.get_rng_state(first)
    drawn = torch.randn(3, device=first)
    module.set_rng_state(state, first)
    assert torch.equal(torch.randn(3, device=first), drawn)


@pytest.fixture
def stream(device: torch.device) -> torch.Stream:
    """Return another stream, which has waited for what was before."""
    other = torch.Stream(device)
    other.wait_stream(torch.accelerator.current_stream())
    return other


def test_a_read_without_an_order_is_seen(device: torch.device, stream: torch.Stream) -> None:
    for waits in (False, True):
        with emulation.hazards() as seen:
            x = torch.ones(3, device=device) * 2
            if waits:
                stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                x.sum()
        assert [text.partition(":")[0] for text in seen] == ["read after write"] * (not waits)


def test_a_write_without_an_order_is_seen(device: torch.device, stream: torch.Stream) -> None:
    for waits in (False, True):
        x = torch.ones(3, device=device)
        stream.wait_stream(torch.accelerator.current_stream())
        with emulation.hazards() as seen:
            with stream:
                x.sum()
            if waits:
                torch.accelerator.current_stream().wait_stream(stream)
            x.add_(1)
        assert [text.partition(":")[0] for text in seen] == ["write after read"] * (not waits)


@pytest.mark.parametrize("way", ["nothing", "record_stream", "wait_stream", "synchronize"])
def test_memory_used_again_too_early_is_seen(
    device: torch.device, stream: torch.Stream, way: str
) -> None:
    """A freed block goes to its own stream at once, or late if another stream was recorded."""
    x = torch.ones(3, device=device)
    stream.wait_stream(torch.accelerator.current_stream())
    with emulation.hazards() as seen:
        with stream:
            x.sum()
        if way == "record_stream":
            x.record_stream(stream)
        del x
        if way == "wait_stream":
            torch.accelerator.current_stream().wait_stream(stream)
        if way == "synchronize":
            torch.accelerator.synchronize()
        torch.zeros(3, device=device)
    kinds = {text.partition(":")[0] for text in seen}
    assert kinds == ({"memory used again"} if way == "nothing" else set())


def test_what_was_left_before_a_block_is_no_hazard_in_it(
    device: torch.device, stream: torch.Stream
) -> None:
    x = torch.ones(3, device=device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        x.sum()
    del x
    with emulation.hazards() as seen:
        torch.zeros(3, device=device)
    assert not seen
