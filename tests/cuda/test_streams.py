"""Streams and graphs of CUDA: gradients are ready where torch's own would be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.cuda.training import (
    backward_of,
    batch_on,
    loss_of,
    losses_of,
    model_on,
    step,
    step_by_dot_grad,
)

# The node that would write `.grad` is of the stream on which it was made.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
CYCLES = 20_000_000  # of the device: some milliseconds, in which a host that does not wait goes on


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Hold numbers against each other: a stream may have a workspace, and a product, of its own."""
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name])


@pytest.fixture
def stream(device: torch.device) -> torch.cuda.Stream:
    """Return another stream, which has begun with something that takes long."""
    other = torch.cuda.Stream(device)
    other.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(other):
        torch.cuda._sleep(CYCLES)
    return other


def test_all_on_another_stream(device: torch.device, stream: torch.cuda.Stream) -> None:
    model, x = model_on(device), batch_on(device)
    expected = backward_of(model, *losses_of(model, x).values())
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _, grads = gradkit.value_and_grads(losses_of(model, x), model)
    torch.cuda.current_stream(device).wait_stream(stream)
    assert_close(grads, expected)


def test_the_forward_pass_on_another_stream(
    device: torch.device, stream: torch.cuda.Stream
) -> None:
    """The engine runs the backward pass there, and makes this stream wait for it."""
    model, x = model_on(device), batch_on(device)
    expected = backward_of(model, *losses_of(model, x).values())
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        losses = losses_of(model, x)
    _, grads = gradkit.value_and_grads(losses, model)
    doubled = gradkit.tree.scale(grads, 2.0)  # on this stream
    assert_close(doubled, {name: grad * 2 for name, grad in expected.items()})


def test_steps_on_another_stream(device: torch.device, stream: torch.cuda.Stream) -> None:
    ours, theirs, x = model_on(device), model_on(device), batch_on(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for _ in range(3):
            step(optimizer, ours, x)
    torch.cuda.current_stream(device).wait_stream(stream)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        step_by_dot_grad(other, theirs, x)
    assert_close(ours.state_dict(), theirs.state_dict())


WARM, REPLAYED = 3, 4  # steps


def captured(model: nn.Module, x: Tensor) -> torch.cuda.CUDAGraph:
    """Return the graph of a step, after some in which the optimizer makes its state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            step(optimizer, model, x)
    torch.cuda.current_stream(x.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(optimizer, model, x)
    return graph


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_a_step_is_captured_in_a_graph(device: torch.device) -> None:
    ours, theirs, x = model_on(device), model_on(device), batch_on(device)
    graph = captured(ours, x)
    assert all(param.grad is None for param in ours.parameters())
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1, capturable=True)
    for _ in range(WARM):
        step_by_dot_grad(optimizer, theirs, x)
    assert_close(ours.state_dict(), theirs.state_dict())  # the capture itself takes no step
    for number in range(REPLAYED):
        x.copy_(batch_on(device) * (1 + number))
        graph.replay()
        step_by_dot_grad(optimizer, theirs, x)
    assert_close(ours.state_dict(), theirs.state_dict())


def test_gradients_are_captured_in_a_graph(device: torch.device) -> None:
    """A replay writes the same tensors anew, from what is in the batch by then."""
    model, x = model_on(device), batch_on(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        gradkit.value_and_grads(loss_of(model, x), model)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, grads = gradkit.value_and_grads(loss_of(model, x), model)
    x.mul_(3)
    graph.replay()
    assert_close(grads, backward_of(model, loss_of(model, x)))
