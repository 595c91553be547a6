"""Over shards, what a module draws and updates is that of one process: dropout, buffers, steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from tests.distributed.test_make_functional import (
    Sharded,
    Single,
    Tree,
    assert_close,
    batches,
    first_order,
    func_product,
    inner_step,
    net,
    penalty,
    product,
    trained,
    unrolled,
)
from tests.helpers import of_dtensors
from tests.processes import Ranks

pytestmark = of_dtensors

# --- Dropout -------------------------------------------------------------------------------------

SEEDS: dict[str, Callable[[int], int]] = {
    "the same on all ranks": lambda rank: 7,
    "others": lambda rank: 7 + rank,
}


def dropping(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(5, 5), nn.Dropout(0.4), nn.Tanh(), nn.Linear(5, 3), nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Linear(3, 1)).to(device, torch.float64)


def random_state(device: torch.device) -> Any:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def restore(state: Any, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class Drawing(Single):
    """One process on the batches of all ranks, which draws for each as its rank does."""

    def __init__(self, module: nn.Module, seed: Callable[[int], int], device: torch.device) -> None:
        super().__init__(module)
        self._device, self._states = device, []
        for rank in range(dist.get_world_size()):
            torch.manual_seed(seed(rank))
            self._states.append(random_state(device))

    def loss(self, params: Tree, batch: Tensor) -> Tensor:
        losses = []
        for rank, part in enumerate(batch):
            restore(self._states[rank], self._device)
            losses.append(self.call(params, self.buffers, part)[0].square().mean())
            self._states[rank] = random_state(self._device)
        return torch.stack(losses).mean()


# The law, and how one process without recomputation has the same.
DRAWING: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Tensor], Any]]] = {
    "first": (first_order, first_order),
    "penalty": (penalty, penalty),
    "inner step": (inner_step, inner_step),
    "product": (product, product),
    "func": (func_product, func_product),
    "store": (unrolled("store"), unrolled("store")),
    "recompute": (unrolled("recompute"), unrolled("store")),
}


def check_dropout(device: torch.device, seeds: str) -> None:
    seed, batch, module = SEEDS[seeds], batches(device), dropping(device)
    run = Sharded(module, device)
    for name, (law, of_one) in DRAWING.items():
        torch.manual_seed(seed(dist.get_rank()))
        ours = law(run, batch)
        after = random_state(device)
        single = Drawing(module, seed, device)
        try:
            assert_close(ours, of_one(single, batch))
        except Exception as error:
            error.add_note(f"law: {name}")
            raise
        # Nothing more was drawn: the next step draws what it would have drawn in one process.
        assert torch.equal(after, single._states[dist.get_rank()]), name


@pytest.mark.parametrize("seeds", SEEDS)
def test_dropout_is_that_of_one_process_with_the_ranks_seeds(
    several: Ranks, device: torch.device, seeds: str
) -> None:
    several.run(check_dropout, seeds)


def check_masks(device: torch.device) -> None:
    """Steps and calls that run again in the backward pass draw the same masks again."""
    masks: list[Tensor] = []
    module = dropping(device)
    module[1].register_forward_hook(lambda _m, _i, out: masks.append(out.detach() == 0))
    run, batch = Sharded(module, device), batches(device)
    for seed in SEEDS.values():
        results = []
        for memory in ("store", "recompute"):
            masks.clear()
            torch.manual_seed(seed(dist.get_rank()))
            results.append(unrolled(memory)(run, batch))
        forward, again = masks[:2], masks[3:]  # one more, of the outer loss, is between
        assert len(again) == 2
        assert all(any(torch.equal(mask, first) for first in forward) for mask in again)
        for name, grad in results[0].items():
            assert torch.equal(grad.full_tensor(), results[1][name].full_tensor())

        masks.clear()
        torch.manual_seed(seed(dist.get_rank()))
        local = batch[0, dist.get_rank()]
        plain = run.call(run.params, run.buffers, local)[0].square().mean()
        expected = gradkit.value_and_grads(plain, run.params)[1]
        torch.manual_seed(seed(dist.get_rank()))
        out: Any = checkpoint(
            lambda x: run.call(run.params, run.buffers, x)[0], local, use_reentrant=False
        )
        ours = gradkit.value_and_grads(out.square().mean(), run.params)[1]
        assert len(masks) == 3
        assert torch.equal(masks[1], masks[2])
        for name, grad in expected.items():
            assert torch.equal(ours[name].full_tensor(), grad.full_tensor())


def test_recomputation_draws_the_same_mask(two: Ranks, device: torch.device) -> None:
    two.run(check_masks)


# --- Buffers that are updated --------------------------------------------------------------------


def normed(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)
    return nn.Sequential(*layers).to(device, torch.float64)


def check_buffers(device: torch.device) -> None:
    """Each rank has the statistics of its part; gradients are those of the mean of the losses."""
    module, batch, rank = normed(device), batches(device), dist.get_rank()
    run, single = Sharded(module, device), Single(module)
    before = {name: buffer.clone() for name, buffer in run.buffers.items()}
    mine, theirs = run.buffers, [single.buffers for _ in range(dist.get_world_size())]
    for data in batch:
        out, mine = run.call(run.params, mine, data[rank])
        grads = gradkit.value_and_grads(out.square().mean(), run.params)[1]
        losses = []
        for other, part in enumerate(data):
            out, theirs[other] = single.call(single.params, theirs[other], part)
            losses.append(out.square().mean())
        loss = torch.stack(losses).mean()
        assert_close(grads, gradkit.value_and_grads(loss, single.params)[1])
        assert_close(mine, theirs[rank])
    assert_close(run.buffers, before)
    assert_close(dict(module.named_buffers()), before)
    # What is in the buffers of each rank stays a number of its own: means are the caller's to take.
    assert not torch.equal(theirs[0]["1.running_mean"], theirs[1]["1.running_mean"])


def passed_on(run: Any, batch: Tensor, memory: Any, call: Any) -> Any:
    """Return the buffers after two inner steps, and the meta-gradient with them."""
    opt = gradkit.meta.sgd(lr=0.1)

    def inner(params: Tree, buffers: Any, _: Any, part: Tensor) -> Any:
        return call(params, buffers, part)

    adapted = gradkit.meta.unroll(
        inner, run.params, [*batch[:2]], opt, buffers=run.buffers, memory=memory
    )
    loss, _ = call(adapted.params, adapted.buffers, batch[2])
    return adapted.buffers, gradkit.value_and_grads(loss, run.params)[1]


def check_passed_on(device: torch.device) -> None:
    """In the inner loop of each rank, buffers go from step to step."""
    module, batch, rank = normed(device), batches(device), dist.get_rank()
    run, single = Sharded(module, device), Single(module)

    def of_rank(params: Tree, buffers: Tree, data: Tensor) -> Any:
        out, new = run.call(params, buffers, data[rank])
        return out.square().mean(), new

    def of_all(params: Tree, buffers: Any, data: Tensor) -> Any:
        calls = [single.call(params, b, part) for b, part in zip(buffers, data, strict=True)]
        losses = [out.square().mean() for out, _ in calls]
        return torch.stack(losses).mean(), [new for _, new in calls]

    single.buffers = [single.buffers for _ in batch[0]]  # type: ignore[assignment]
    expected, grads = passed_on(single, batch, "store", of_all)
    for memory in ("store", "recompute"):
        ours, our_grads = passed_on(run, batch, memory, of_rank)
        assert_close(ours, expected[rank])
        assert_close(our_grads, grads)


def test_buffers_are_those_of_the_ranks_part(several: Ranks, device: torch.device) -> None:
    several.run(check_buffers)
    several.run(check_passed_on)


# --- Steps ---------------------------------------------------------------------------------------


def check_steps(device: torch.device) -> None:
    """Clipped steps of Adam on tied, frozen, uneven and empty shards, of a second order."""
    run, single, batch = Sharded(net(device), device), Single(net(device)), batches(device)
    ours, theirs = (torch.optim.Adam(trained(one).values(), lr=0.01) for one in (run, single))
    sizes = {name: param.to_local().shape[0] for name, param in run.params.items()}
    rows = {name: param.shape[0] for name, param in single.params.items()}
    by_rank = gradkit.distributed.all_reduce(
        {name: torch.tensor(float(size), device=device) for name, size in sizes.items()}, op="sum"
    )
    assert {name: int(total) for name, total in by_rank.items()} == rows
    if dist.get_rank() == dist.get_world_size() - 1:
        assert sizes["last.weight"] == 0
    frozen = run.params["frozen.weight"].full_tensor()
    for _ in range(4):
        gradkit.step_(ours, run.params, penalty(run, batch), max_norm=0.5)
        gradkit.step_(theirs, single.params, penalty(single, batch), max_norm=0.5)
        assert_close(run.params, {name: p.detach() for name, p in single.params.items()})
    assert torch.equal(run.params["frozen.weight"].full_tensor(), frozen)
    assert "tied.weight" not in run.params


def test_steps_are_those_of_one_process(several: Ranks, device: torch.device) -> None:
    several.run(check_steps)
