"""Products and transforms over shards: right, or an error before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gradkit
from tests.distributed.test_make_functional import (
    Sharded,
    Single,
    Tree,
    assert_close,
    batches,
    net,
    trained,
)
from tests.helpers import of_dtensors
from tests.processes import Ranks

pytestmark = of_dtensors


def direction(params: Tree) -> Tree:
    return {name: (param.detach() * 3 + 1).cos() for name, param in params.items()}


def part_loss(run: Any, part: Tensor, params: Tree) -> Tensor:
    """The loss on one part of the batch, in both."""
    loss: Tensor = run.call(run.full(params), run.buffers, part)[0].square().mean()
    return loss


def check_products(device: torch.device) -> None:
    """A pushed direction is that of this rank's part; a pulled one the mean over the ranks."""
    run, single = Sharded(net(device), device), Single(net(device))
    batch, rank = batches(device)[0], dist.get_rank()
    ours, theirs = trained(run), trained(single)
    along, theirs_along = direction(ours), direction(theirs)

    values, push = gradkit.func.linearize(partial(part_loss, run, batch[rank]), ours)
    expected = gradkit.func.jvp(partial(part_loss, single, batch[rank]), theirs, theirs_along)
    assert_close(values.detach(), expected[0].detach())
    assert_close(push(along).detach(), expected[1].detach())

    _, pull = gradkit.func.vjp(partial(part_loss, run, batch[rank]), ours)
    _, pull_all = gradkit.func.vjp(lambda p: single.loss(single.full(p), batch), theirs)
    one = torch.ones((), device=device, dtype=torch.float64)
    assert_close(pull(one)[0], pull_all(one)[0])

    def outputs(run: Any, parts: Tensor, params: Tree) -> Tensor:
        outs = [run.call(run.full(params), run.buffers, part)[0] for part in parts]
        return torch.stack(outs)

    def outer(out: Tensor) -> Tensor:
        return out.pow(4).mean()

    _, product = gradkit.func.ggn_vp(partial(outputs, run, batch[rank][None]), outer, ours, along)
    of_all = partial(outputs, single, batch)
    _, expected_product = gradkit.func.ggn_vp(of_all, outer, theirs, theirs_along)
    assert_close(product, expected_product)


def test_products_are_those_of_one_process(several: Ranks, device: torch.device) -> None:
    several.run(check_products)


# With respect to what is a plain tensor, torch's transforms take the parameters as they are.
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "torch.func.jvp": lambda fn, x: torch.func.jvp(fn, (x,), (x.cos(),))[1],
    "jvp": lambda fn, x: gradkit.func.jvp(fn, x, x.cos())[1],
    "hvp": lambda fn, x: gradkit.func.hvp(fn, x, x.cos())[1],
    "jacfwd": lambda fn, x: torch.func.jacfwd(fn)(x),
    "jacrev": lambda fn, x: torch.func.jacrev(fn)(x),
    "hessian": lambda fn, x: torch.func.hessian(fn)(x),
    "vmap": lambda fn, x: torch.func.vmap(fn)(torch.stack([x, x + 1])),
}


def check_inputs(device: torch.device) -> None:
    run, single = Sharded(net(device), device), Single(net(device))
    x = batches(device)[0, dist.get_rank()]
    for name, transform in TRANSFORMS.items():
        ours = transform(lambda x: part_loss(run, x, run.params), x)
        expected = transform(lambda x: part_loss(single, x, single.params), x)
        try:
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
        except AssertionError as error:
            error.add_note(f"transform: {name}")
            raise
    # An ordinary gradient goes through a vmap of the inputs.
    grads = []
    for one in (run, single):
        rows = torch.func.vmap(lambda x, one=one: part_loss(one, x[None], one.params))(x)
        grads.append(gradkit.value_and_grads(rows.mean(), one.params)[1])
    means = {
        name: None if grad is None else gradkit.distributed.all_reduce(grad)
        for name, grad in grads[1].items()
    }
    assert_close(grads[0], means)


def test_derivatives_in_inputs_are_those_of_this_process(two: Ranks, device: torch.device) -> None:
    two.run(check_inputs)


def check_forward_mode(device: torch.device) -> None:
    run, batch = Sharded(net(device), device), batches(device)[0]
    params = trained(run)
    ran: list[object] = []

    def loss(params: Tree) -> Tensor:
        ran.append(params)
        return part_loss(run, batch[dist.get_rank()], params)

    along = direction(params)
    error = gradkit.UnsupportedGraphError
    for call in (gradkit.func.jvp, gradkit.func.hvp):
        with pytest.raises(error, match="DTensors, which have none") as raised:
            call(loss, params, along)
        assert 'mode="reverse-over-reverse"' in str(raised.value)
        assert "linearize" in str(raised.value)
    with pytest.raises(NotImplementedError, match="sharding strategy"):  # torch's own
        torch.func.jvp(loss, (params,), (along,))
    assert not ran
    # One for each sample: the gradients would have to be gathered and reduced sample by sample.
    with pytest.raises(error, match="gradients that are the same for all samples"):
        torch.func.vmap(
            lambda x: torch.func.grad(lambda p: part_loss(run, x[None], p))(params)["last.bias"]
        )(batch[dist.get_rank()])
    part_loss(run, batch[dist.get_rank()], params)  # the ranks are still in step


def test_forward_mode_over_shards_raises_first(two: Ranks, device: torch.device) -> None:
    two.run(check_forward_mode)


def rows(w: Tensor, x: Tensor) -> Tensor:
    return (x * w).square().sum(1)


def of_function(x: Tensor, half: Tensor) -> Any:
    return gradkit.func.value_and_grads(lambda w: rows(w, x).sum(), weights=half)


def check_losses_and_weights(device: torch.device) -> None:
    """A vector of losses that is a DTensor, and plain weights, give what full tensors give."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    full_x = torch.arange(1.0, 9.0, device=device).view(4, 2)
    full_w = torch.tensor([1.0, 2.0], device=device)
    half = torch.tensor(0.5, device=device)
    for placement in (Replicate(), Shard(0)):
        w = torch.nn.Parameter(distribute_tensor(full_w, mesh, [Replicate()]))
        x = distribute_tensor(full_x, mesh, [placement])
        plain = full_w.clone().requires_grad_()

        ours, theirs = partial(rows, w, x), partial(rows, plain, full_x)
        pairs: list[tuple[Any, Any]] = [
            (gradkit.per_loss_grads(ours(), w), gradkit.per_loss_grads(theirs(), plain)),
            (gradkit.gram(ours(), w), gradkit.gram(theirs(), plain)),
            (gradkit.per_sample_norms(ours(), w), gradkit.per_sample_norms(theirs(), plain)),
            (gradkit.clipped_sum(ours(), w, 1.0), gradkit.clipped_sum(theirs(), plain, 1.0)),
            (
                gradkit.value_and_grads(ours().sum(), w, weights=half)[1],
                gradkit.value_and_grads(theirs().sum(), plain, weights=half)[1],
            ),
            (
                gradkit.value_and_grads(plain.sum(), plain, weights=ours().detach().sum())[1],
                gradkit.value_and_grads(plain.sum(), plain, weights=theirs().detach().sum())[1],
            ),
            (of_function(x, half)(w)[1], of_function(full_x, half)(plain)[1]),
        ]
        for got, expected in pairs:
            whole = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(whole.detach(), expected.detach())
        gradkit.minimize_(torch.optim.SGD([w], 0.1), ours().sum(), weights=half)
        gradkit.minimize_(torch.optim.SGD([plain], 0.1), theirs().sum(), weights=half)
        stepped: Any = w.detach()
        torch.testing.assert_close(stepped.full_tensor(), plain.detach())


@pytest.mark.filterwarnings("ignore::gradkit.GradkitWarning")
def test_losses_that_are_dtensors_and_plain_weights(two: Ranks, device: torch.device) -> None:
    two.run(check_losses_and_weights)
