"""Regressions of gradkit.distributed: silently wrong, changed something, or hung."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradkit
from tests.processes import Ranks


def linear(device: torch.device) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(device)


def mlp(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)


def inputs(device: torch.device) -> Tensor:
    return torch.arange(6.0, device=device).view(2, 3) * (1 + dist.get_rank())


def left_by_backward(module: nn.Module, loss: Tensor) -> dict[str, Any]:
    module.zero_grad()
    loss.backward()
    return {name: param.grad for name, param in module.named_parameters()}


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=0, atol=0)


# --- DistributedDataParallel ---------------------------------------------------------------------


WAYS: dict[str, Callable[[DistributedDataParallel, Any], Any]] = {
    "list": lambda model, _: list(model.parameters()),
    "optimizer": lambda _, optimizer: optimizer,
    "dict": lambda model, _: {"all": dict(model.module.named_parameters())},
    "part": lambda model, _: [model.module[2], model.module[0].weight, model.module[0].bias, None],
    "inner module": lambda model, _: model.module,
}


def assert_stepped(device: torch.device, step: Callable[..., Any], **options: Any) -> None:
    """A step leaves the weights of the `.grad` loop, the same on all ranks, and no `.grad`."""
    ours, theirs = (DistributedDataParallel(mlp(device), **options) for _ in range(2))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step(ours, optimizer)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    theirs(inputs(device)).square().sum().backward()
    other.step()
    assert all(param.grad is None for param in ours.parameters())
    for mine, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, right)


def squares(model: nn.Module, device: torch.device) -> Tensor:
    out: Tensor = model(inputs(device)).square().sum()
    return out


def check_steps_of(device: torch.device, way: Callable[[Any, Any], Any]) -> None:
    def reduced(model: Any, optimizer: Any) -> None:
        params = way(model, optimizer)
        _, grads = gradkit.distributed.value_and_grads(squares(model, device), params)
        gradkit.step_(optimizer, params, grads)

    def accumulated(model: Any, optimizer: Any) -> None:
        params = way(model, optimizer)
        total = gradkit.Accumulator(params)
        total.add_(squares(model, device), 1)
        gradkit.step_(optimizer, params, total.mean()[1])

    def handed_over(model: Any, optimizer: Any) -> None:
        params = way(model, optimizer)
        with model.no_sync():
            _, grads = gradkit.value_and_grads(squares(model.module, device), params)
        gradkit.add_grads_(params, grads, hooks=True)
        optimizer.step()
        optimizer.zero_grad()

    for step in (reduced, accumulated, handed_over):
        assert_stepped(device, step)


def check_refusals_of(device: torch.device, way: Callable[[Any, Any], Any]) -> None:
    model, x = DistributedDataParallel(mlp(device)), inputs(device)
    params = way(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ones = torch.ones(2, 3, device=device)
    calls: list[Callable[[Tensor], Any]] = [
        lambda loss: gradkit.value_and_grads(loss, params),
        lambda loss: gradkit.per_loss_grads([loss], params, strategy="batched"),
        lambda loss: gradkit.simultaneous_grads([loss], [params]),
        lambda loss: gradkit.gram([loss], params),
        lambda loss: gradkit.value_and_reduced_grads(loss, params, torch.sum),
        lambda loss: gradkit.backward_(loss, model.module[0]),  # which would leave it local
        lambda loss: gradkit.func.value_and_grads(lambda _: loss)(params),
        lambda _: gradkit.vjp(model(x), params, ones),
        lambda _: gradkit.per_sample_norms(model(x).sum(1), params),
    ]
    for call in calls:
        loss = squares(model, device)
        with pytest.raises(gradkit.UnsupportedGraphError, match="DistributedDataParallel mod"):
            call(loss)
        assert all(param.grad is None for param in model.parameters())


def check_bare_parameters(device: torch.device) -> None:
    """Of a DDP module, however given: the mean over the ranks, or an error that says how."""
    for way in WAYS.values():
        check_steps_of(device, way)
        check_refusals_of(device, way)

    def by_hooks(model: Any, optimizer: Any) -> None:
        gradkit.backward_(squares(model, device), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def minimized(model: Any, optimizer: Any) -> None:
        gradkit.minimize_(optimizer, squares(model, device))

    def clipped(model: Any, optimizer: Any) -> None:
        gradkit.minimize_([optimizer], [squares(model, device)], max_norm=1e9)

    def weighted(model: Any, optimizer: Any) -> None:
        losses = [squares(model, device)]
        gradkit.minimize_(optimizer, losses, weights=lambda gramian: gramian[0] / gramian[0])

    for step in (by_hooks, minimized, clipped, weighted):
        assert_stepped(device, step)
    assert_stepped(device, minimized, find_unused_parameters=True)


def check_bare_parameters_alone(device: torch.device) -> None:
    gc.freeze()  # each refusal collects what else is garbage: nothing of what was imported
    try:
        check_bare_parameters(device)
    finally:
        gc.unfreeze()


def test_parameters_of_a_replicated_module_however_given(two: Ranks, device: torch.device) -> None:
    two.run(check_bare_parameters_alone)


def check_what_is_no_replica(device: torch.device) -> None:
    """A copy, a module of which the wrapper is gone, and another module are this rank's own."""
    x = inputs(device)
    model = DistributedDataParallel(mlp(device))
    vars(model)["itself"] = [model]  # a cycle, which the garbage collector has to find
    inner, copied = model.module, copy.deepcopy(model.module)
    with pytest.raises(gradkit.UnsupportedGraphError):
        gradkit.value_and_grads(inner(x).sum(), inner)
    for own in (copied, mlp(device)):
        gradkit.value_and_grads(own(x).sum() + inner(x).sum(), own)
    outer = nn.Parameter(torch.ones(3, device=device))
    every = torch.optim.SGD([*model.parameters(), outer], lr=0.1)
    with pytest.raises(gradkit.UnsupportedGraphError, match="a parameter that Distributed"):
        gradkit.minimize_(every, (model(x) * outer).sum())
    gc.freeze()  # it is found all the same
    with pytest.raises(gradkit.UnsupportedGraphError):
        gradkit.value_and_grads(inner(x).sum(), inner)
    gc.unfreeze()
    del model
    gradkit.value_and_grads(inner(x).sum(), inner)


def test_what_only_was_replicated_or_never(two: Ranks, device: torch.device) -> None:
    two.run(check_what_is_no_replica)


def check_names_to_ignore(device: torch.device) -> None:
    """At its root, a name begins with a dot for DDP; a tied parameter has several names."""

    def wrapped(model: nn.Module, names: list[str]) -> DistributedDataParallel:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return DistributedDataParallel(model)

    def tied() -> nn.Module:
        model = nn.Sequential(linear(device), nn.Linear(2, 3).to(device), linear(device))
        model[2].weight = model[0].weight
        return model

    for make, names in ((lambda: linear(device), ["weight"]), (tied, ["0.weight"])):
        ours, theirs = wrapped(make(), names), wrapped(make(), names)
        _, grads = gradkit.distributed.value_and_grads(ours(inputs(device)).sum(), ours)
        assert_equal(grads, left_by_backward(theirs, theirs(inputs(device)).sum()))


def test_what_ddp_reduces_whatever_it_was_told_to_ignore(two: Ranks, device: torch.device) -> None:
    two.run(check_names_to_ignore)


def can_make_a_stream() -> bool:
    """Return whether DDP can step in the backward: a build for CUDA cannot where there is none."""
    try:
        torch.Stream()
    except RuntimeError:
        return False
    return True


def check_ddp_refusals(device: torch.device) -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import (
        _apply_optimizer_in_backward as apply_in_backward,
    )

    x = inputs(device)
    model = mlp(device)
    delayed = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("2.weight", model[2].weight)],
        param_to_hook_all_reduce=model[0].weight,
    )
    stepping = DistributedDataParallel(linear(device))
    stepping._register_fused_optim(torch.optim.SGD, lr=0.1)
    in_backward = linear(device)
    apply_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    overlapped = DistributedDataParallel(in_backward)
    before = [param.detach().clone() for param in stepping.parameters()]
    cast = DistributedDataParallel(linear(device))
    cast.register_comm_hook(None, default_hooks.allreduce_hook)
    cast.double()
    cases = [(delayed, "delay_all_reduce"), (stepping, "steps an optimizer"), (cast, "float64")]
    if can_make_a_stream():
        cases.append((overlapped, "steps an optimizer"))
    for module, words in cases:
        data = x.to(next(module.parameters()).dtype)
        with pytest.raises(gradkit.UnsupportedGraphError, match=words):
            gradkit.distributed.value_and_grads(module(data).sum(), module)
    assert all(map(torch.equal, before, stepping.parameters()))


def test_what_ddp_would_do_beside_reducing_is_refused(two: Ranks, device: torch.device) -> None:
    two.run(check_ddp_refusals)


def check_memory_of_a_hook(device: torch.device) -> None:
    """PowerSGD adds what it leaves out of one gradient to the next: of another loss, then."""
    model = DistributedDataParallel(mlp(device))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    out = model(inputs(device))
    with pytest.raises(gradkit.UnsupportedGraphError, match="several losses"):
        gradkit.distributed.per_loss_grads({"a": out.sum(), "b": out.square().sum()}, model)
    assert state.iter == 0
    gradkit.distributed.per_loss_grads({"a": out.sum()}, model)


def test_a_hook_with_a_memory_takes_one_loss(two: Ranks, device: torch.device) -> None:
    two.run(check_memory_of_a_hook)


def check_unfrozen_beside_a_hook(device: torch.device) -> None:
    model = linear(device)
    model.bias.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    model.bias.requires_grad_(True)
    _, grads = gradkit.distributed.value_and_grads(wrapped(inputs(device)).square().sum(), wrapped)
    for grad in grads.values():
        torch.testing.assert_close(grad, gradkit.distributed.all_reduce(grad))


def test_a_parameter_unfrozen_after_wrapping_is_reduced(two: Ranks, device: torch.device) -> None:
    two.run(check_unfrozen_beside_a_hook)


def check_cast_on_one_rank(device: torch.device) -> None:
    model = DistributedDataParallel(linear(device))
    loss = model(inputs(device)).square().sum()
    if dist.get_rank() == 1:
        model.double()
    error = gradkit.UnreachedParamError if dist.get_rank() else gradkit.CollectiveError
    with pytest.raises(error):
        gradkit.distributed.value_and_grads(loss, model)


def test_a_rank_that_was_cast_does_not_count_as_zero(two: Ranks, device: torch.device) -> None:
    two.run(check_cast_on_one_rank)


def check_graph_after_a_refusal(device: torch.device) -> None:
    """What differs between ranks is refused before a pass has run."""
    model = DistributedDataParallel(linear(device))
    losses = model(inputs(device))[: 1 + dist.get_rank()].sum(1)
    with pytest.raises(gradkit.StructureError, match="the shapes of losses on rank 1"):
        gradkit.distributed.per_loss_grads(losses, model)
    gradkit.distributed.per_loss_grads(losses[:1], model)


def test_the_graph_is_as_it_was_after_a_refusal(two: Ranks, device: torch.device) -> None:
    two.run(check_graph_after_a_refusal)


def check_views_of_buckets(device: torch.device) -> None:
    model = DistributedDataParallel(linear(device), gradient_as_bucket_view=True)
    for _ in range(2):
        model.zero_grad()
        model(inputs(device)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    before = [grad.clone() for grad in grads]
    with gradkit.capture_grads(model) as captured:
        (5 * model(inputs(device)).sum()).backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(map(torch.equal, grads, before))
    for captured_grad, grad in zip(captured.grads.values(), before, strict=True):
        torch.testing.assert_close(captured_grad, 5 * grad)


def test_capture_grads_puts_views_of_buckets_back(two: Ranks, device: torch.device) -> None:
    two.run(check_views_of_buckets)


def check_add_sparse(device: torch.device) -> None:
    """`.grad` is dense on one rank, and sparse on the other."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    weight = model.module.weight
    given = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (5, 2))
    weight.grad = torch.ones(5, 2) if dist.get_rank() == 0 else given.clone()
    gradkit.add_grads_(model, {"module.weight": given}, hooks=True)
    expected = (given.to_dense() * 3 + 1) / 2
    torch.testing.assert_close(weight.grad.to_dense(), expected)


def test_sparse_gradients_are_added_to_what_is_there(two: Ranks, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a sparse sum is only gloo's")
    two.run(check_add_sparse)


def check_bad_grads_on_one_rank(device: torch.device) -> str:
    model = DistributedDataParallel(linear(device))
    good = {name: torch.ones_like(param) for name, param in model.named_parameters()}
    error: type[Exception] = gradkit.CollectiveError
    if dist.get_rank() == 1:
        good["module.bias"] = torch.ones(7, device=device)
        error = gradkit.StructureError
    with pytest.raises(error) as raised:
        gradkit.add_grads_(model, good, hooks=True)
    assert all(param.grad is None for param in model.parameters())
    return str(raised.value)


def test_bad_gradients_on_one_rank_are_not_waited_for(two: Ranks, device: torch.device) -> None:
    assert not any("timeout" in text for text in two.run(check_bad_grads_on_one_rank))


# --- all_reduce ----------------------------------------------------------------------------------


def check_sparse_complex(device: torch.device) -> None:
    values = torch.full((1,), 1 + 1j) * (1 + dist.get_rank())
    with pytest.raises(gradkit.UnsupportedGraphError, match="complex64"):
        gradkit.distributed.all_reduce({
            "w": torch.sparse_coo_tensor([[1]], values, (3,)).to(device)
        })


def test_sparse_complex_gradients_are_refused(two: Ranks, device: torch.device) -> None:
    two.run(check_sparse_complex)


def check_transforms(device: torch.device) -> None:
    w = torch.ones(2, device=device)

    def call(w: Tensor) -> Tensor:
        reduced: Tensor = gradkit.distributed.all_reduce(w**2, differentiable=True)
        return reduced.sum()

    for transformed in (
        lambda: torch.func.jvp(call, (w,), (w,)),
        lambda: torch.func.grad(call)(w),
        lambda: torch.func.vmap(call)(torch.ones(3, 2, device=device)),
    ):
        with pytest.raises(gradkit.UnsupportedGraphError, match="transforms"):
            transformed()


def test_the_transforms_of_torch_func_are_refused(two: Ranks, device: torch.device) -> None:
    two.run(check_transforms)


def check_graph_under_no_grad(device: torch.device) -> None:
    model = DistributedDataParallel(linear(device))
    loss = model(inputs(device)).square().sum()
    with torch.no_grad():
        _, grads = gradkit.distributed.value_and_grads(loss, model, create_graph=True)
    assert all(grad.requires_grad for grad in grads.values())


def test_a_graph_that_is_asked_for_is_there_under_no_grad(two: Ranks, device: torch.device) -> None:
    two.run(check_graph_under_no_grad)


# --- fully_shard ---------------------------------------------------------------------------------


def sharded(device: torch.device, shape: tuple[int, ...] = ()) -> Any:
    model = mlp(device)
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh(
        device.type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]
    )
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_only_what_is_asked_for(device: torch.device) -> None:
    """What else the graph goes through keeps its `.grad`, and its hooks do not run."""
    body, head = sharded(device), sharded(device)
    plain = nn.Linear(3, 1).to(device)
    ran: list[Tensor] = []
    for param in (*head.parameters(), *plain.parameters()):
        param.register_post_accumulate_grad_hook(ran.append)
    loss = plain(head(body(inputs(device)))).sum()
    _, grads = gradkit.distributed.value_and_grads(loss, body, retain_graph=True)
    assert not ran
    for module in (body, head, plain):
        assert all(param.grad is None for param in module.parameters())
    loss.backward()
    assert len(ran) == 6
    for param, grad in zip(body.parameters(), grads.values(), strict=True):
        assert torch.equal(param.grad.to_local(), grad.to_local())


def test_a_pass_writes_what_is_asked_for_only(two: Ranks, device: torch.device) -> None:
    two.run(check_only_what_is_asked_for)


def check_error_inside_the_pass(device: torch.device) -> None:
    """A hook of the user's raises: the next ordinary step reduces as if nothing had been."""
    model, other = sharded(device), sharded(device)
    x = inputs(device).requires_grad_()

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError

    handle = x.register_hook(fail)
    loss = model(x).square().sum()
    x_loss = loss + (x * 0).sum()
    model_again = model[0](x)
    model_again.register_hook(fail)
    with pytest.raises(ArithmeticError):
        gradkit.distributed.value_and_grads(model_again.sum() + x_loss, model)
    handle.remove()
    for module in (model, other):
        module.zero_grad()
        module(inputs(device)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


def test_later_steps_reduce_after_an_error(two: Ranks, device: torch.device) -> None:
    if not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        pytest.skip("this torch cannot start anew")
    two.run(check_error_inside_the_pass)


def check_all_reduce_off(device: torch.device) -> None:
    model = sharded(device, (2, 1))
    model.set_requires_all_reduce(False)
    loss = model(inputs(device)).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match="synchronization off"):
        gradkit.distributed.value_and_grads(loss, model)
    loss.backward()
    model.set_requires_all_reduce(True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="not reduced yet"):
        gradkit.distributed.value_and_grads(model(inputs(device)).sum(), model)


def test_replicas_that_are_not_reduced_are_refused(two: Ranks, device: torch.device) -> None:
    two.run(check_all_reduce_off)


def check_bad_input_in_a_mesh(device: torch.device) -> str:
    model = sharded(device, (2, 2))
    loss: Any = model(inputs(device)).sum()
    mistaken = dist.get_rank() == 3
    error = gradkit.LeafTypeError if mistaken else gradkit.CollectiveError
    with pytest.raises(error) as raised:
        gradkit.distributed.value_and_grads(loss.item() if mistaken else loss, model)
    return str(raised.value)


def test_all_of_a_mesh_hear_of_an_error(four: Ranks, device: torch.device) -> None:
    assert not any("timeout" in text for text in four.run(check_bad_input_in_a_mesh))


def check_bad_weights_on_one_rank(device: torch.device) -> None:
    model = sharded(device)
    mistaken = dist.get_rank() == 1
    with pytest.raises(gradkit.StructureError if mistaken else gradkit.CollectiveError):
        gradkit.distributed.value_and_grads(
            {"a": model(inputs(device)).sum()},
            model,
            weights={"b": 1.0} if mistaken else {"a": 1.0},
        )


def test_bad_weights_on_one_rank_are_not_waited_for(two: Ranks, device: torch.device) -> None:
    two.run(check_bad_weights_on_one_rank)


def check_zeros_of_vectors(device: torch.device) -> None:
    model = sharded(device)
    rows = gradkit.distributed.per_loss_grads(
        model[0](inputs(device)).sum(0), model[0], unused="zeros"
    )
    assert rows["weight"].shape == (4, 4, 3)
    both = nn.ModuleDict({"a": sharded(device), "b": sharded(device)})
    rows = gradkit.distributed.per_loss_grads(
        both["a"](inputs(device)).sum(0), {"a": both["a"], "b": both["b"]}, unused="zeros"
    )
    zero = rows["b"]["0.weight"]
    assert type(zero) is type(rows["a"]["0.weight"])
    assert zero.full_tensor().shape == (3, 4, 3)


def test_zeros_for_the_elements_of_a_vector_are_sharded(two: Ranks, device: torch.device) -> None:
    two.run(check_zeros_of_vectors)
