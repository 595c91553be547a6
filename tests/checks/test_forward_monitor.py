"""Inside `checked()`, the forward pass of eager code is watched: its first derivative is right."""

from __future__ import annotations

from collections.abc import Callable, Generator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import gradkit
from gradkit import func
from gradkit._compat.transforms import function_modes

D = torch.float64
REFUSED = pytest.raises(gradkit.UnsupportedGraphError, match=r"as_strided_scatter: its derivative")


def scattered(x: Tensor) -> Tensor:
    return x.as_strided_scatter(x.new_zeros(1), (1,), (1,), 1).square().sum()


def by_index_put(x: Tensor) -> Tensor:
    index = torch.tensor([1], device=x.device)
    return x.index_put((index,), x.new_zeros(1)).square().sum()


def leaf(device: torch.device) -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device, requires_grad=True)


def test_an_operation_is_refused_and_the_advice_is_right(device: torch.device) -> None:
    x = leaf(device)
    with gradkit.checked():
        with REFUSED:
            scattered(x)
        assert gradkit.value_and_grads(by_index_put(x), x)[1].tolist() == [2, 0, 6]
    assert scattered(x).item() == 10  # not seen outside of the block


def test_under_a_vmap_and_as_an_operator(device: torch.device) -> None:
    x = leaf(device)
    with gradkit.checked():
        with REFUSED:
            torch.vmap(scattered)(x[None])
        with REFUSED:
            torch.ops.aten.as_strided_scatter(x, x.new_zeros(1), (1,), (1,), 1)


def test_what_is_not_differentiated_runs(device: torch.device) -> None:
    x = leaf(device)
    with gradkit.checked():
        with torch.no_grad():
            assert scattered(x).item() == 10
        assert scattered(x.detach()).item() == 10


def test_calls_of_func_are_refused_or_right_as_elsewhere(device: torch.device) -> None:
    x = leaf(device)
    for create_graph in (None, False):
        with gradkit.checked():
            with REFUSED:
                func.value_and_grads(scattered, create_graph=create_graph)(x)
            _, grads = func.value_and_grads(by_index_put, create_graph=create_graph)(x)
        assert grads.tolist() == [2, 0, 6]


class Counted(TorchFunctionMode):
    """Counts what it sees."""

    calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def held() -> Generator[None]:
    with gradkit.checked():
        yield


def test_a_block_that_begins_inside_a_mode_and_ends_after_it(device: torch.device) -> None:
    x, before, block = leaf(device), function_modes(), held()
    with Counted() as mode:
        next(block)
        with REFUSED:
            scattered(x)
        assert mode.calls
    with REFUSED:
        scattered(x)
    block.close()
    assert function_modes() == before


def test_blocks_that_overlap(device: torch.device) -> None:
    x, before, first, second = leaf(device), function_modes(), held(), held()
    next(first)
    next(second)
    first.close()
    with REFUSED:
        scattered(x)
    second.close()
    assert function_modes() == before


def test_a_block_that_ends_in_another_thread(device: torch.device) -> None:
    x, before, block = leaf(device), function_modes(), held()
    next(block)
    other = Thread(target=block.close)
    other.start()
    other.join()
    assert scattered(x).item() == 10
    with gradkit.checked(), REFUSED:
        scattered(x)
    assert function_modes() == before


def test_a_default_device_set_in_the_block(device: torch.device) -> None:
    before = function_modes()
    with gradkit.checked():
        with torch.device(device), gradkit.checked(), REFUSED:
            scattered(leaf(device))
        with REFUSED:
            scattered(leaf(device))
    with torch.device(device):
        with gradkit.checked(), REFUSED:
            scattered(leaf(device))
        assert torch.zeros(1).device.type == device.type
    assert function_modes() == before


@pytest.mark.long
def test_a_compiled_function_in_the_block(device: torch.device) -> None:
    x = leaf(device)
    compiled = torch.compile(by_index_put, backend="aot_eager", fullgraph=True)
    with gradkit.checked():
        assert gradkit.value_and_grads(compiled(x), x)[1].tolist() == [2, 0, 6]
        with REFUSED:
            torch.compile(scattered, backend="aot_eager")(x)
    torch._dynamo.reset()
