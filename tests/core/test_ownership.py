"""The memory of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradkit
from gradkit._core import ownership


@pytest.mark.parametrize("shape", [(), (1,), (0, 2), (2, 3)])
def test_memory_for_a_gradient(device: torch.device, shape: tuple[int, ...]) -> None:
    p = torch.randn(shape, device=device)
    for leading in ((), (4,), (2, 0), (3, 2)):
        made = ownership.empty_for(p, torch.float64, leading)
        assert made.shape == leading + shape
        assert made.dtype == torch.float64
        if made.numel():
            assert made.is_contiguous() or not p.is_contiguous()
    transposed = torch.randn(3, 2, device=device).t()
    assert ownership.empty_for(transposed, torch.float32, (5,)).stride() == (
        6,
        *transposed.stride(),
    )


class Marked(torch.Tensor):
    """A subclass without anything of its own."""


def test_rows_of_zeros_for_a_subclass(device: torch.device) -> None:
    p = torch.ones(2, device=device).as_subclass(Marked)
    for leading in ((0,), (3,), (2, 0)):
        rows = ownership.zeros_for(p, leading)
        assert type(rows) is Marked
        assert rows.shape == (*leading, 2)
        assert not rows.any()


def test_what_an_operator_writes_on(device: torch.device) -> None:
    x, mean, var, out = (torch.ones(2, device=device) for _ in range(4))
    aten = torch.ops.aten
    args = (x, None, None, mean, var, True, 0.1, 1e-5)
    written = ownership.written_tensors(aten.native_batch_norm.default, args, {})
    assert list(map(id, written)) == [id(mean), id(var)]
    outs = {"out": out, "save_mean": out, "save_invstd": out}
    written = ownership.written_tensors(aten.native_batch_norm.out, args, outs)
    assert {id(mean), id(var), id(out)} == set(map(id, written))
    stream = torch.Stream(device) if device.type != "cpu" else None
    assert not ownership.written_tensors(aten.record_stream.default, (x, stream), {})
    gathered = (x, mean, var, mean, var, 0.1, 1e-5, 2)
    written = ownership.written_tensors(aten.batch_norm_gather_stats.default, gathered, {})
    assert set(map(id, written)) == {id(mean), id(var)}


def test_nothing_is_copied_that_can_be_kept(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a device lets go of a gradient some time after a pass has ended."""
    copied: list[torch.Tensor] = []
    copy_for = ownership.copy_for

    def copy(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        copied.append(grad)
        return copy_for(grad, param)

    monkeypatch.setattr(ownership, "copy_for", copy)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))).to(device)
    x = torch.randn(2, 4, device=device)
    for _ in range(50):
        gradkit.value_and_grads(net(x).square().mean(), net)
        gradkit.per_loss_grads({"a": net(x).sum(), "b": net(x).square().sum()}, net)
    assert len(copied) < 300  # of 3000; it may not get its turn on a busy machine


def test_what_a_hook_keeps_is_copied(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    kept: list[torch.Tensor] = []
    w.register_hook(kept.append)
    _, grad = gradkit.value_and_grads((w * 2).sum(), w)
    grad.mul_(5)
    assert kept[0].tolist() == [2, 2, 2]
