"""`gradkit.distributed` under `fully_shard`: the sharded gradients that `.backward()` leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

import gradkit
from tests.distributed.test_ddp import Heads, batch, losses_of
from tests.processes import Ranks


def sharded(
    device: torch.device, *, parts: bool = True, mesh_shape: Any = None, **options: Any
) -> Any:
    """Return the model, sharded part by part, and as a whole."""
    torch.manual_seed(1)
    model = Heads().to(device)
    shape = mesh_shape or (dist.get_world_size(),)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if parts:
        for part in (model.trunk, *model.heads.values()):
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def grads_left(module: nn.Module) -> dict[str, Any]:
    return {name: param.grad for name, param in module.named_parameters()}


def backward_of(module: nn.Module, x: Tensor, names: tuple[str, ...] = ("a", "b")) -> Any:
    """Return what `.backward()` leaves; between forward and backward, params may be unsharded."""
    module.zero_grad()
    losses = losses_of(module(x))
    torch.autograd.backward([losses[name] for name in names])
    return grads_left(module)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, grad in ours.items():
        other = theirs[name]
        assert (grad is None) == (other is None), name
        if grad is not None:
            assert isinstance(grad, DTensor)
            assert grad.placements == other.placements
            assert grad.dtype == other.dtype
            assert torch.equal(grad.to_local(), other.to_local()), name


SHARDERS: dict[str, dict[str, Any]] = {
    "resharded": {"reshard_after_forward": True},
    "not resharded": {"reshard_after_forward": False},
    "as a whole": {"parts": False},
    "mixed precision": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}


def check_equal_to_backward(device: torch.device, options: dict[str, Any]) -> None:
    """Interleaved with ordinary steps, on which gradkit has no effect."""
    model, untouched = sharded(device, **options), sharded(device, **options)
    opt, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, untouched))
    for step in range(3):
        x = batch(device, step)
        sentinel: list[Any] = [torch.ones_like(p) for p in opt.param_groups[0]["params"]]
        for param, one in zip(opt.param_groups[0]["params"], sentinel, strict=True):
            param.grad = one
        losses = losses_of(model(x))
        values, grads = gradkit.distributed.value_and_grads(losses, model)
        assert all(torch.equal(value, losses[name]) for name, value in values.items())
        per_loss = gradkit.distributed.per_loss_grads(losses_of(model(x)), model)
        for param, one in zip(opt.param_groups[0]["params"], sentinel, strict=True):
            assert param.grad is one
            assert (one.to_local() == 1).all()
        expected = backward_of(untouched, x)
        assert_same(grads, expected)
        for name in ("a", "b"):
            assert_same(per_loss[name], backward_of(untouched, x, (name,)))
        backward_of(untouched, x)

        assert_same(backward_of(model, x), grads_left(untouched))
        opt.step()
        other.step()
    for step in range(10):
        for module, optimizer in ((model, opt), (untouched, other)):
            backward_of(module, batch(device, 10 + step))
            optimizer.step()
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())


@pytest.mark.parametrize("sharder", SHARDERS)
def test_gradients_are_what_backward_leaves(
    several: Ranks, device: torch.device, sharder: str
) -> None:
    several.run(check_equal_to_backward, SHARDERS[sharder])


def check_mesh_of_two_dimensions(device: torch.device) -> None:
    check_equal_to_backward(device, {"mesh_shape": (2, 2)})


def test_sharded_within_and_replicated_between(four: Ranks, device: torch.device) -> None:
    four.run(check_mesh_of_two_dimensions)


def check_one_process(device: torch.device) -> None:
    """The gradients, put together, are those of one process on the joined batch."""
    model = sharded(device).double()
    torch.manual_seed(1)
    single = Heads().to(device).double()
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(100)
    every = torch.randn(size, 6, 5, generator=generator).to(device).double()
    joined = sum(sum(losses_of(single(x)).values()) for x in every) / size
    _, expected = gradkit.value_and_grads(joined, single)
    _, grads = gradkit.distributed.value_and_grads(losses_of(model(batch(device).double())), model)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.full_tensor(), expected[name])


def test_they_are_those_of_the_joined_batch(several: Ranks, device: torch.device) -> None:
    several.run(check_one_process)


def check_steps(device: torch.device) -> None:
    """A training with `step_` is the training with `.backward()`, bit for bit."""
    model, other = sharded(device), sharded(device)
    opt, theirs = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, other))
    for step in range(10):
        x = batch(device, step)
        _, grads = gradkit.distributed.value_and_grads(losses_of(model(x)), model)
        gradkit.step_(opt, model, grads)
        backward_of(other, x)
        theirs.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    per_loss = gradkit.distributed.per_loss_grads(losses_of(model(x)), model)
    gradkit.clear_grads_(model)
    gradkit.add_grads_(model, per_loss["a"], hooks=True)
    assert_same(grads_left(model), per_loss["a"])


def test_ten_steps(two: Ranks, device: torch.device) -> None:
    two.run(check_steps)


def check_parts_and_strangers(device: torch.device) -> None:
    """A part of the model; an input that requires grad; a frozen head; an unused one."""
    model, other = sharded(device), sharded(device)
    x = batch(device).requires_grad_()
    x.grad = torch.full_like(x, 5.0)
    expected = backward_of(other, batch(device))
    _, grads = gradkit.distributed.value_and_grads(losses_of(model(x)), {"trunk": model.trunk})
    assert_same(grads["trunk"], {n[6:]: g for n, g in expected.items() if n.startswith("trunk")})
    assert torch.equal(x.grad, torch.full_like(x, 5.0))
    assert all(param.grad is None for param in model.parameters())

    losses = losses_of(model(x, ("a",)))
    _, unused = gradkit.distributed.value_and_grads(losses, model)
    assert unused["heads.b.weight"] is None
    losses = losses_of(model(x, ("a",)))
    _, zeros = gradkit.distributed.value_and_grads(losses, model, unused="zeros")
    assert isinstance(zeros["heads.b.weight"], DTensor)
    assert not zeros["heads.b.weight"].full_tensor().any()
    with pytest.raises(gradkit.UnreachedParamError, match=r"heads\.b"):
        gradkit.distributed.value_and_grads(losses_of(model(x, ("a",))), model, unused="error")

    torch.manual_seed(1)
    frozen = Heads().to(device)
    frozen.heads["b"].requires_grad_(False)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(frozen, mesh=mesh)
    _, grads = gradkit.distributed.value_and_grads(losses_of(frozen(batch(device))), frozen)
    assert grads["heads.b.weight"] is None
    assert grads["heads.a.weight"] is not None


def test_parts_inputs_frozen_and_unused(two: Ranks, device: torch.device) -> None:
    two.run(check_parts_and_strangers)


def check_vectors_and_graphs(device: torch.device) -> None:
    model = sharded(device)
    x = batch(device)
    rows = gradkit.distributed.per_loss_grads(
        {"v": model(x)["b"].mean(0), "s": model(x)["a"].sum()}, model
    )
    assert rows["v"]["trunk.0.weight"].shape == (3, 16, 5)
    for index in range(3):
        _, row = gradkit.distributed.value_and_grads(model(x)["b"].mean(0)[index], model)
        for name, grad in row.items():
            if grad is not None:
                assert torch.equal(rows["v"][name].full_tensor()[index], grad.full_tensor())
    with pytest.warns(gradkit.GradkitWarning, match="fully_shard"):
        batched = gradkit.distributed.per_loss_grads(
            model(x)["b"].mean(0), model, strategy="batched"
        )
    assert torch.equal(
        batched["trunk.0.bias"].full_tensor(), rows["v"]["trunk.0.bias"].full_tensor()
    )

    losses = losses_of(model(x))
    first = gradkit.distributed.per_loss_grads(losses, model, retain_graph=True)
    second = gradkit.distributed.per_loss_grads(losses, model)
    assert_same(first["b"], second["b"])
    for call in (gradkit.distributed.per_loss_grads, gradkit.distributed.value_and_grads):
        with pytest.raises(gradkit.FreedGraphError):
            call(losses, model)
    lone = model(x)["a"].sum()
    gradkit.distributed.value_and_grads(lone, model)
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.distributed.value_and_grads(lone, model)
    backward_of(model, x)


def test_the_elements_of_a_vector_and_the_graph(two: Ranks, device: torch.device) -> None:
    two.run(check_vectors_and_graphs)


def check_weights(device: torch.device) -> None:
    model, other = sharded(device), sharded(device)
    weights = {"a": 0.25, "b": torch.tensor(3.0, device=device)}
    _, grads = gradkit.distributed.value_and_grads(
        losses_of(model(batch(device))), model, weights=weights
    )
    losses = losses_of(other(batch(device)))
    seeds = [torch.full_like(losses["a"], 0.25), torch.full_like(losses["b"], 3.0)]
    torch.autograd.backward(list(losses.values()), seeds)
    assert_same(grads, grads_left(other))


def test_weights(two: Ranks, device: torch.device) -> None:
    two.run(check_weights)


def check_retained_loss(device: torch.device) -> None:
    """torch writes the `.grad` of a loss that retain_grad() was called on; it is restored."""
    model = sharded(device)
    losses = losses_of(model(batch(device)))
    for loss in losses.values():
        loss.retain_grad()
    losses["a"].grad = before = torch.full_like(losses["a"], 5.0)
    gradkit.distributed.value_and_grads(losses, model)
    assert losses["a"].grad is before
    assert before.item() == 5.0
    assert losses["b"].grad is None


def test_the_grad_of_a_loss_is_restored(two: Ranks, device: torch.device) -> None:
    two.run(check_retained_loss)


def check_trees(device: torch.device) -> None:
    """The arithmetic of trees sees the whole gradients, not this rank's shards."""
    model = sharded(device).double()
    per_loss = gradkit.distributed.per_loss_grads(losses_of(model(batch(device).double())), model)
    whole = {
        loss: {n: None if g is None else g.full_tensor() for n, g in grads.items()}
        for loss, grads in per_loss.items()
    }

    def value(result: Any) -> Tensor:
        return result.full_tensor() if isinstance(result, DTensor) else result

    tree = gradkit.tree
    torch.testing.assert_close(value(tree.global_norm(per_loss["a"])), tree.global_norm(whole["a"]))
    torch.testing.assert_close(
        value(tree.dot(per_loss["a"], per_loss["b"])), tree.dot(whole["a"], whole["b"])
    )
    torch.testing.assert_close(
        value(tree.cosine(per_loss["a"], per_loss["b"])), tree.cosine(whole["a"], whole["b"])
    )
    with implicit_replication():
        torch.testing.assert_close(value(tree.gram(per_loss)), tree.gram(whole))
    summed = tree.weighted_sum(per_loss, {"a": 0.5, "b": 2.0})
    expected = tree.weighted_sum(whole, {"a": 0.5, "b": 2.0})
    for name, grad in summed.items():
        torch.testing.assert_close(value(grad), expected[name])


def test_arithmetic_of_sharded_gradients(several: Ranks, device: torch.device) -> None:
    several.run(check_trees)


# --- Refusals ------------------------------------------------------------------------------------


def refused(call: Callable[[], Any], error: type[Exception], words: str, model: nn.Module) -> None:
    before = [param.grad for param in model.parameters()]
    with pytest.raises(error, match=words):
        call()
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def check_refusals(device: torch.device) -> None:
    model, other = sharded(device), sharded(device)
    x = batch(device)
    graph_error = gradkit.UnsupportedGraphError
    value_and_grads = gradkit.distributed.value_and_grads
    losses = losses_of(model(x))
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.backward_):
        refused(partial(call, losses, model), graph_error, r"gradkit\.distributed", model)
    with pytest.raises(graph_error, match=r"gradkit\.distributed"):
        gradkit.value_and_grads(losses, list(other.parameters()))
    refused(lambda: value_and_grads(losses, model, create_graph=True), graph_error, "create", model)
    hook = next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    refused(lambda: value_and_grads(losses, model), graph_error, "hook", model)
    hook.remove()
    torch.autograd.backward(list(losses.values()))
    assert_same(grads_left(model), backward_of(other, x))

    model.set_requires_gradient_sync(False)
    refused(lambda: value_and_grads(losses_of(model(x)), model), graph_error, "sync", model)
    model.zero_grad()
    torch.autograd.backward(list(losses_of(model(x)).values()))
    model.set_requires_gradient_sync(True)
    refused(lambda: value_and_grads(losses_of(model(x)), model), graph_error, "reduced", model)
    torch.autograd.backward(list(losses_of(model(x)).values()))
    assert all(param.grad is not None for param in model.parameters())

    outside = nn.ModuleDict({"sharded": model, "plain": nn.Linear(5, 1).to(device)})
    loss = model(x)["a"].sum() + outside["plain"](x).sum()
    refused(lambda: value_and_grads(loss, outside), graph_error, r"plain\.weight", model)
    unrelated = (torch.ones(2, device=device, requires_grad=True) * 2).sum()
    refused(lambda: value_and_grads(unrelated, model), gradkit.UnreachedParamError, "", model)
    refused(
        lambda: value_and_grads(losses["a"].detach(), model), gradkit.DetachedLossError, "", model
    )


def test_calls_with_missing_or_partial_gradients_raise(two: Ranks, device: torch.device) -> None:
    two.run(check_refusals)


def check_uneven(device: torch.device) -> None:
    """Ranks that reach different parameters would reduce different shards with each other."""
    model = sharded(device)
    losses = losses_of(model(batch(device)))
    total = {"sum": losses["a"] + losses["b"] if dist.get_rank() == 0 else losses["a"]}
    for call in (gradkit.distributed.value_and_grads, gradkit.distributed.per_loss_grads):
        refused(
            partial(call, total, model),
            gradkit.StructureError,
            r"heads\.b\.weight.* on rank \d",
            model,
        )


def test_parameters_that_some_ranks_do_not_reach(several: Ranks, device: torch.device) -> None:
    several.run(check_uneven)


def check_frozen_differently(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    model[dist.get_rank() % 2].requires_grad_(False)
    for call in (gradkit.distributed.value_and_grads, gradkit.distributed.per_loss_grads):
        refused(
            partial(call, model(torch.ones(2, 4, device=device)).sum(), model),
            gradkit.StructureError,
            "freeze the same parameters",
            model,
        )


def test_other_parameters_frozen_on_another_rank(two: Ranks, device: torch.device) -> None:
    two.run(check_frozen_differently)


def check_plain_states(device: torch.device) -> None:
    """Torch finds out when a kernel has taken half of the step."""
    for plain in (DTensor.to_local, DTensor.full_tensor):
        model = sharded(device)
        params = list(model.parameters())
        optimizer = torch.optim.Adam(params)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            losses = losses_of(model(batch(device)))
            _, grads = gradkit.distributed.value_and_grads(losses, model)
            gradkit.step_(optimizer, model, grads)

        step()
        before = [param.to_local().clone() for param in params]
        last = [param for param in params if param in optimizer.state][-1]
        optimizer.state[last]["exp_avg"] = plain(optimizer.state[last]["exp_avg"])
        with pytest.raises(gradkit.StructureError, match=r"a DTensor of shape .*\n.*state.pop\("):
            step()
        assert all(map(torch.equal, before, (param.to_local() for param in params)))
        optimizer.state.pop(last)  # as the message says
        step()
        assert all(name in optimizer.state[last] for name in ("step", "exp_avg"))


def test_a_plain_state_of_a_sharded_parameter(two: Ranks, device: torch.device) -> None:
    two.run(check_plain_states)


def check_one_rank_fails(device: torch.device) -> None:
    model = sharded(device)
    loss: Any = model(batch(device))["a"].sum()
    if dist.get_rank() == 1:
        with pytest.raises(gradkit.LeafTypeError):
            gradkit.distributed.value_and_grads(loss.item(), model)
    else:
        with pytest.raises(gradkit.CollectiveError, match="an error on rank 1"):
            gradkit.distributed.value_and_grads(loss, model)
    assert copy.copy(grads_left(model)) == dict.fromkeys(dict(model.named_parameters()))


def test_an_error_on_one_rank_ends_the_call_on_all(two: Ranks, device: torch.device) -> None:
    two.run(check_one_rank_fails)
