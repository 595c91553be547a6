"""`gradkit.distributed` under DistributedDataParallel: the gradients of `.backward()`."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradkit
from tests.distributed.test_all_reduce import counted
from tests.processes import Ranks


class Heads(nn.Module):
    """A trunk with two heads, one of which a rank may leave out."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh()
        )
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 2), "b": nn.Linear(16, 3)})

    def forward(self, x: Tensor, names: tuple[str, ...] = ("a", "b")) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {name: self.heads[name](features) for name in names}


def wrapped(device: torch.device, *, norm: bool = False, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(Heads(norm=norm).to(device), **options)


def batch(device: torch.device, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    every = torch.randn(dist.get_world_size(), 6, 5, generator=generator)
    return every[dist.get_rank()].to(device)


def losses_of(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: out.square().mean() + out.sin().sum() for name, out in outputs.items()}


def assert_same(ours: Any, theirs: Any, **tolerance: float) -> None:
    """Bits where two ranks add, else rounding."""
    for name, grad in ours.items():
        if theirs[name] is None or grad is None:
            assert grad is theirs[name], name
        elif dist.get_world_size() == 2:
            assert torch.equal(grad, theirs[name]), name
        else:
            torch.testing.assert_close(grad, theirs[name], **tolerance)


def grads_left(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in module.named_parameters()}


def backward_of(module: nn.Module, losses: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return what `.backward()` of the sum leaves in a fresh `.grad`."""
    module.zero_grad()
    torch.autograd.backward(list(losses.values()))
    return grads_left(module)


WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "batch norm": {"norm": True},
}


def check_equal_to_backward(device: torch.device, options: dict[str, Any]) -> None:
    """Interleaved with ordinary steps, on which gradkit has no effect."""
    model, untouched = wrapped(device, **options), wrapped(device, **options)
    opt, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, untouched))
    for step in range(3):
        x = batch(device, step)
        frozen_in_time = copy.deepcopy(model.module.state_dict())
        values, grads = gradkit.distributed.value_and_grads(losses_of(model(x)), model)
        assert all(param.grad is None for param in model.parameters())
        model.module.load_state_dict(frozen_in_time)  # the statistics of the batch norm
        per_loss = gradkit.distributed.per_loss_grads(losses_of(model(x)), model)
        model.module.load_state_dict(frozen_in_time)
        expected_losses = losses_of(untouched(x))
        expected = backward_of(untouched, expected_losses)
        assert {n: v.item() for n, v in values.items()} == {
            n: v.item() for n, v in expected_losses.items()
        }
        assert_same(grads, expected)
        summed = gradkit.tree.weighted_sum(per_loss)
        assert gradkit.tree.allclose(summed, expected, rtol=1e-4, atol=1e-5)
        assert per_loss["a"]["module.heads.b.weight"] is None

        assert_same(backward_of(model, losses_of(model(x))), expected)
        opt.step()
        other.step()
        opt.zero_grad()
        other.zero_grad()
    for step in range(10):
        for module, optimizer in ((model, opt), (untouched, other)):
            backward_of(module, losses_of(module(batch(device, 10 + step))))
            optimizer.step()
    theirs = untouched.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_what_backward_leaves(
    several: Ranks, device: torch.device, wrapper: str
) -> None:
    several.run(check_equal_to_backward, WRAPPERS[wrapper])


def check_uneven(device: torch.device) -> None:
    """The ranks leave out different heads: one is left out by all but the last rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    names = ("a", "b") if rank == last else ("a",)
    model = wrapped(device, find_unused_parameters=True)
    other = wrapped(device, find_unused_parameters=True)
    x = batch(device)
    expected = backward_of(other, losses_of(other(x, names)))
    _, grads = gradkit.distributed.value_and_grads(losses_of(model(x, names)), model)
    assert_same(grads, expected)
    assert grads["module.heads.b.weight"] is not None

    expected = backward_of(other, losses_of(other(x, ("a",))))
    _, grads = gradkit.distributed.value_and_grads(losses_of(model(x, ("a",))), model)
    assert_same(grads, expected)
    assert grads["module.heads.b.weight"] is None
    _, zeros = gradkit.distributed.value_and_grads(
        losses_of(model(x, ("a",))), model, unused="zeros"
    )
    assert not zeros["module.heads.b.weight"].any()
    with pytest.raises(gradkit.UnreachedParamError, match=r"heads\.b\.weight"):
        gradkit.distributed.value_and_grads(losses_of(model(x, ("a",))), model, unused="error")

    per_loss = gradkit.distributed.per_loss_grads(losses_of(model(x)), model)
    out = losses_of(model(x))
    out = {"a": out["a"], "b": out["b"] if rank == last else torch.zeros((), device=device)}
    uneven = gradkit.distributed.per_loss_grads(out, model)
    assert_same(uneven["a"], per_loss["a"])
    assert uneven["b"]["module.trunk.0.weight"] is not None


def test_parameters_that_some_ranks_do_not_use(several: Ranks, device: torch.device) -> None:
    several.run(check_uneven)


def check_no_sync(device: torch.device) -> None:
    """Micro-batches: reduced one by one and added, or added and reduced once."""
    model, other = wrapped(device), wrapped(device)
    xs = [batch(device, step) for step in range(3)]
    with other.no_sync():
        for x in xs[:2]:
            torch.autograd.backward(list(losses_of(other(x)).values()))
    torch.autograd.backward(list(losses_of(other(xs[2])).values()))
    expected = grads_left(other)

    total: Any = None
    for index, x in enumerate(xs):
        with model.no_sync() if index < 2 else contextlib.nullcontext():
            _, grads = gradkit.distributed.value_and_grads(losses_of(model(x)), model)
        total = grads if total is None else gradkit.tree.add(total, grads)
    assert gradkit.tree.allclose(total, expected, rtol=1e-5, atol=1e-6)

    local: Any = None
    for x in xs:
        with model.no_sync():
            _, grads = gradkit.value_and_grads(losses_of(model.module(x)), model.module)
        local = grads if local is None else gradkit.tree.add(local, grads)
    once = {f"module.{name}": grad for name, grad in gradkit.distributed.all_reduce(local).items()}
    assert_same(once, expected)
    assert_same(
        backward_of(model, losses_of(model(xs[0]))), backward_of(other, losses_of(other(xs[0])))
    )


def test_gradient_accumulation_and_no_sync(several: Ranks, device: torch.device) -> None:
    several.run(check_no_sync)


def powersgd(module: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: dict[str, Any] = {
    "allreduce": lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "built in": lambda m: m._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
    "PowerSGD": powersgd,
}


def check_comm_hook(device: torch.device, hook: str) -> None:
    model, other = wrapped(device), wrapped(device)
    HOOKS[hook](model)
    HOOKS[hook](other)
    for step in range(4):
        x = batch(device, step)
        _, grads = gradkit.distributed.value_and_grads(losses_of(model(x)), model)
        expected = backward_of(other, losses_of(other(x)))
        if hook == "PowerSGD" and step >= 2:  # its memory depends on the buckets
            assert all(grad is not None for grad in grads.values())
        else:  # the sum of four is rounded in half precision
            assert_same(grads, expected, rtol=1e-2, atol=1e-3)
        assert all(param.grad is None for param in model.parameters())
    with pytest.raises(gradkit.UnsupportedGraphError, match="create_graph"):
        gradkit.distributed.value_and_grads(losses_of(model(x)), model, create_graph=True)
    if hook == "fp16":
        out = model(x)["a"].mean(0)
        rows = gradkit.distributed.per_loss_grads({"v": out, "w": out.sum() ** 2}, model)
        assert rows["v"]["module.trunk.0.weight"].shape == (2, 16, 5)
        first = gradkit.distributed.value_and_grads(model(x)["a"].mean(0)[0], model)[1]
        row = {name: None if grad is None else grad[0] for name, grad in rows["v"].items()}
        assert_same(row, first, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("hook", HOOKS)
def test_communication_hooks_reduce(several: Ranks, device: torch.device, hook: str) -> None:
    several.run(check_comm_hook, hook)


def check_per_loss_collectives(device: torch.device) -> None:
    model = wrapped(device)
    out = model(batch(device))
    losses = {str(k): (k + 1) * out["a"].sum() for k in range(8)}
    assert counted(lambda: gradkit.distributed.per_loss_grads(losses, model)) == (1, 3)


def test_all_losses_are_sent_together(two: Ranks, device: torch.device) -> None:
    two.run(check_per_loss_collectives)


def check_vectors_and_strategies(device: torch.device) -> None:
    model = wrapped(device).double()
    x = batch(device).double()
    rows = gradkit.distributed.per_loss_grads(model(x)["b"].mean(0), model)
    batched = gradkit.distributed.per_loss_grads(model(x)["b"].mean(0), model, strategy="batched")
    for index in range(3):
        _, grads = gradkit.distributed.value_and_grads(model(x)["b"].mean(0)[index], model)
        for name, grad in grads.items():
            for stacked in (rows, batched):
                assert (grad is None) == (stacked[name] is None)
                if grad is not None:
                    torch.testing.assert_close(stacked[name][index], grad)


def test_the_elements_of_a_vector(two: Ranks, device: torch.device) -> None:
    two.run(check_vectors_and_strategies)


def check_second_order(device: torch.device) -> None:
    """A gradient penalty on the gradient of the joined batch."""
    size = dist.get_world_size()
    model = wrapped(device).double()
    every = torch.randn(size, 6, 5, generator=torch.Generator().manual_seed(9)).double().to(device)

    def joined(module: nn.Module) -> Tensor:
        return sum((module(x)["a"].square().mean() for x in every), torch.zeros(())) / size

    params = list(model.module.parameters())[:4]
    grads = torch.autograd.grad(joined(model.module), params, create_graph=True)
    penalty = joined(model.module) + sum(g.square().sum() for g in grads)
    expected = torch.autograd.grad(penalty, params)

    x = every[dist.get_rank()]
    loss = model(x)["a"].square().mean()
    value, first = gradkit.distributed.value_and_grads(loss, model, create_graph=True)
    # The penalty is the same on every rank, and the loss is not: their mean is that of the batch.
    penalized = value + gradkit.tree.dot(first, first)
    _, second = gradkit.distributed.value_and_grads(penalized, params)
    for ours, theirs in zip(second, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_gradients_are_those_of_the_joined_batch(
    several: Ranks, device: torch.device
) -> None:
    several.run(check_second_order)


# --- Combined, and handed back -------------------------------------------------------------------


def pcgrad(matrix: Tensor) -> Tensor:
    """Return the sum of the rows, each without what conflicts with the others (Yu et al. 2020)."""
    rows = []
    for index, row in enumerate(matrix):
        for other in [*matrix[:index], *matrix[index + 1 :]]:
            if row @ other < 0:
                row = row - (row @ other) / (other @ other) * other
        rows.append(row)
    return torch.stack(rows).sum(0)


def aggregator(name: str) -> Any:
    if name == "UPGrad":
        from torchjd.aggregation import UPGrad

        return UPGrad()
    return pcgrad


def check_ten_combined_steps(device: torch.device, name: str) -> None:
    """All ranks hold equal weights, which are those of one process on the joined batch."""
    model = wrapped(device).double()
    single = copy.deepcopy(model.module)
    opt, opt_single = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, single))
    combine = aggregator(name)
    for step in range(10):
        per_loss = gradkit.distributed.per_loss_grads(
            losses_of(model(batch(device, step).double())), model
        )
        grads = gradkit.combine(per_loss, combine)
        opt.zero_grad()
        gradkit.add_grads_(model, grads, hooks=True)
        for param in model.parameters():
            mean = gradkit.distributed.all_reduce(param.grad)
            assert torch.equal(mean, param.grad)
        opt.step()

        generator = torch.Generator().manual_seed(100 + step)
        every = torch.randn(dist.get_world_size(), 6, 5, generator=generator).double().to(device)
        outs = [losses_of(single(x)) for x in every]
        joined = {key: sum(out[key] for out in outs) / len(outs) for key in ("a", "b")}
        per_loss = gradkit.per_loss_grads(joined, single)
        gradkit.step_(opt_single, single, gradkit.combine(per_loss, combine))
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        everywhere = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, ours.detach())
        assert all(torch.equal(one, ours) for one in everywhere)


@pytest.mark.parametrize("name", ["PCGrad", "UPGrad"])
def test_ten_steps_with_combined_gradients(several: Ranks, device: torch.device, name: str) -> None:
    several.run(check_ten_combined_steps, name)


def check_handed_over(device: torch.device, options: dict[str, Any]) -> None:
    """This rank's gradients are reduced, whatever forward pass was before, as often as given."""
    model, other = wrapped(device, **options), wrapped(device, **options)
    x = batch(device)
    expected = {
        n: g.clone() for n, g in backward_of(other, losses_of(other(x))).items() if g is not None
    }

    def local(out: Any) -> Any:
        with model.no_sync():
            _, grads = gradkit.value_and_grads(losses_of(out), model.module)
        return {f"module.{name}": grad for name, grad in grads.items()}

    armed = local(model.module(x))
    model(x)  # a forward pass that waits for a backward pass
    gradkit.add_grads_(model, armed, hooks=True)
    assert_same(grads_left(model), expected)
    before = [param.grad for param in model.parameters()]
    gradkit.add_grads_(model, armed, hooks=True)  # a second time after one forward pass
    for (name, param), grad in zip(model.named_parameters(), before, strict=True):
        assert param.grad is grad
        torch.testing.assert_close(param.grad, 2 * expected[name])

    model.zero_grad()
    with model.no_sync():
        losses = losses_of(model(x))
        with pytest.raises(gradkit.UnsupportedGraphError, match="no_sync"):
            gradkit.add_grads_(model, armed, hooks=True)
        assert all(param.grad is None for param in model.parameters())
        torch.autograd.backward(list(losses.values()))  # accumulated, on this rank
    gradkit.add_grads_(model, armed, hooks=True)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, 2 * expected[name])
    assert_same(backward_of(model, losses_of(model(x))), expected)


@pytest.mark.parametrize("wrapper", ["plain", "views", "small buckets"])
def test_gradients_handed_over_are_reduced(
    several: Ranks, device: torch.device, wrapper: str
) -> None:
    several.run(check_handed_over, WRAPPERS[wrapper])


def check_handed_over_with_none(device: torch.device) -> None:
    rank = dist.get_rank()
    model = wrapped(device)
    before = torch.full_like(model.module.heads["b"].bias, 7.0)
    model.module.heads["b"].bias.grad = before
    grads: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    grads["module.trunk.0.bias"] = torch.ones(16, device=device)
    grads["module.heads.a.bias"] = torch.ones(2, device=device) if rank == 0 else None
    seen: list[Tensor] = []
    hook = model.module.trunk[0].bias.register_post_accumulate_grad_hook(
        lambda param: seen.append(param.grad.clone())
    )
    gradkit.add_grads_(model, grads, hooks=True)
    hook.remove()
    assert model.module.heads["b"].weight.grad is None
    assert model.module.heads["b"].bias.grad is before
    assert before.tolist() == [7.0] * 3
    share = 1 / dist.get_world_size()
    assert model.module.heads["a"].bias.grad.tolist() == [share, share]
    assert len(seen) == 1
    assert seen[0].tolist() == [1.0] * 16

    model.module.trunk[0].bias.register_hook(lambda grad: grad)
    with pytest.raises(gradkit.UnsupportedGraphError, match="tensor hooks"):
        gradkit.add_grads_(model, grads, hooks=True)


def test_none_is_zero_where_another_rank_has_a_gradient(
    several: Ranks, device: torch.device
) -> None:
    several.run(check_handed_over_with_none)


def check_handed_over_by_comm_hook(device: torch.device) -> None:
    model, other = wrapped(device), wrapped(device)
    HOOKS["fp16"](model)
    HOOKS["fp16"](other)
    x = batch(device)
    with model.no_sync():
        _, grads = gradkit.value_and_grads(losses_of(model.module(x)), model.module)
    gradkit.add_grads_(model, {f"module.{n}": g for n, g in grads.items()}, hooks=True)
    expected = backward_of(other, losses_of(other(x)))
    assert_same(grads_left(model), expected, rtol=1e-2, atol=1e-3)


def test_gradients_handed_over_go_through_the_communication_hook(
    several: Ranks, device: torch.device
) -> None:
    several.run(check_handed_over_by_comm_hook)


def check_scaler_and_autocast(device: torch.device) -> None:
    """With a scaler, a rank's inf makes all ranks skip the step."""
    model, other = wrapped(device), wrapped(device)
    opt, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    scaler, scaler_2 = (torch.amp.GradScaler(device.type, init_scale=8.0) for _ in range(2))
    for step in range(3):
        x = batch(device, step)
        if step == 1 and dist.get_rank() == 1:
            x = x * torch.inf
        with torch.autocast(device.type, torch.bfloat16):
            ours, legacy = (sum(losses_of(m(x)).values()) for m in (model, other))
        _, grads = gradkit.distributed.value_and_grads(scaler.scale(ours), model)
        gradkit.step_(opt, model, grads, scaler=scaler)
        scaler.update()
        theirs.zero_grad()
        scaler_2.scale(legacy).backward()
        scaler_2.step(theirs)
        scaler_2.update()
        assert scaler.get_scale() == scaler_2.get_scale()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert scaler.get_scale() == 4.0


def test_autocast_and_a_scaler(two: Ranks, device: torch.device) -> None:
    two.run(check_scaler_and_autocast)


def check_compiled(device: torch.device, outside: bool) -> None:
    torch.manual_seed(1)
    model: Any = Heads().to(device)
    other = DistributedDataParallel(copy.deepcopy(model))
    if outside:
        model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    else:
        model = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    for step in range(2):
        x = batch(device, step)
        _, grads = gradkit.distributed.value_and_grads(losses_of(model(x)), model)
        expected = backward_of(other, losses_of(other(x)))
        for ours, theirs in zip(grads.values(), expected.values(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("outside", [False, True])
def test_a_compiled_module(two: Ranks, device: torch.device, outside: bool) -> None:
    two.run(check_compiled, outside)


# --- Refusals ------------------------------------------------------------------------------------


def check_static_graph(device: torch.device) -> None:
    model = wrapped(device, static_graph=True)
    x = batch(device)
    losses = losses_of(model(x))
    for call in (
        lambda: gradkit.distributed.value_and_grads(losses, model),
        lambda: gradkit.distributed.per_loss_grads(losses, model),
        lambda: gradkit.add_grads_(model, grads_left(model), hooks=True),
    ):
        with pytest.raises(gradkit.UnsupportedGraphError, match="static_graph"):
            call()
    other = wrapped(device)
    # Through both: the pass would go through the sink of the first.
    loss = sum(losses_of(other(losses["a"].expand(2, 5))).values())
    with pytest.raises(gradkit.UnsupportedGraphError, match="DistributedDataParallel"):
        gradkit.distributed.value_and_grads(loss, other)
    # Nothing has run: the first iteration is still to come, and reduces.
    torch.autograd.backward(list(losses.values()))
    assert_same(grads_left(model), backward_of(other, losses_of(other(x))))


def test_static_graph_is_refused_and_goes_on(two: Ranks, device: torch.device) -> None:
    two.run(check_static_graph)


def check_plain_calls(device: torch.device) -> None:
    model = wrapped(device)
    losses = losses_of(model(batch(device)))
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.backward_):
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"gradkit\.distributed"):
            call(losses, model)
    torch.autograd.backward(list(losses.values()))


def test_the_plain_calls_raise_and_name_the_distributed_ones(
    two: Ranks, device: torch.device
) -> None:
    two.run(check_plain_calls)


def check_other_refusals(device: torch.device) -> None:
    model = wrapped(device)
    x = batch(device)
    plain = nn.Linear(5, 1).to(device)
    with pytest.raises(gradkit.LeafTypeError, match=r"module\['plain'\].*Linear"):
        gradkit.distributed.value_and_grads(model(x)["a"].sum(), {"ddp": model, "plain": plain})
    empties: list[Any] = [[], {}]
    for nothing in empties:
        with pytest.raises(gradkit.StructureError, match="empty"):
            gradkit.distributed.value_and_grads(model(x)["a"].sum(), nothing)
    with pytest.raises(gradkit.LeafTypeError, match="module"):
        gradkit.distributed.value_and_grads(plain(x).sum(), list(plain.parameters()))
    partly = nn.ModuleDict({"ddp": model, "plain": plain})
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"params\['plain.weight'\]"):
        gradkit.distributed.value_and_grads(model(x)["a"].sum() + plain(x).sum(), partly)
    with pytest.raises(gradkit.NotScalarLossError):
        gradkit.distributed.value_and_grads(model(x), model)
    with pytest.raises(gradkit.DetachedLossError):
        gradkit.distributed.value_and_grads(torch.zeros((), device=device), model)
    loss = model(x)["a"].sum()
    gradkit.distributed.value_and_grads(loss, model)
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.distributed.value_and_grads(loss, model)
    losses = losses_of(model(x, ("a", "b") if dist.get_rank() == 0 else ("a",)))
    with pytest.raises(gradkit.StructureError, match="on rank"):
        gradkit.distributed.per_loss_grads(losses, model)
    with model.join(), pytest.raises(gradkit.UnsupportedGraphError, match=r"join\(\)"):
        gradkit.distributed.value_and_grads(model.module(x)["a"].sum(), model)
    assert all(param.grad is None for param in model.parameters())
    backward_of(model, losses_of(model(x)))


def test_calls_with_unsynchronized_or_wrong_gradients_raise(
    two: Ranks, device: torch.device
) -> None:
    two.run(check_other_refusals)


def check_one_rank_fails(device: torch.device) -> None:
    model = wrapped(device)
    loss: Any = model(batch(device))["a"].sum()
    if dist.get_rank() == 1:
        with pytest.raises(gradkit.LeafTypeError, match="the float"):
            gradkit.distributed.value_and_grads(loss.item(), model)
    else:
        with pytest.raises(gradkit.CollectiveError, match="an error on rank 1"):
            gradkit.distributed.value_and_grads(loss, model)
    backward_of(model, losses_of(model(batch(device))))


def test_an_error_on_one_rank_ends_the_call_on_all(several: Ranks, device: torch.device) -> None:
    several.run(check_one_rank_fails)


def check_ignored(device: torch.device) -> None:
    """The gradients of parameters that DDP ignores stay local, as after `.backward()`."""
    torch.manual_seed(1)
    models = [Heads().to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["heads.a.bias"])
    first, second = (DistributedDataParallel(model) for model in models)
    x = batch(device) + dist.get_rank()
    _, grads = gradkit.distributed.value_and_grads(losses_of(first(x)), first)
    assert_same(grads, backward_of(second, losses_of(second(x))))
    with first.no_sync():
        _, local = gradkit.value_and_grads(losses_of(first.module(x)), first.module)
    assert torch.equal(grads["module.heads.a.bias"], local["heads.a.bias"])
    assert not torch.equal(grads["module.heads.a.weight"], local["heads.a.weight"])


def test_parameters_that_ddp_ignores(two: Ranks, device: torch.device) -> None:
    two.run(check_ignored)


def check_frozen_tied_sparse(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4, sparse=device.type == "cpu")
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.frozen = nn.Linear(4, 1)
            self.frozen.requires_grad_(False)

        def forward(self, index: Tensor) -> Tensor:
            return self.frozen(self.two(self.one(self.embedding(index)).tanh()))

    torch.manual_seed(1)
    first = DistributedDataParallel(Model().to(device))
    second = DistributedDataParallel(copy.deepcopy(first.module))
    index = torch.tensor([dist.get_rank(), 5, 5], device=device)
    _, grads = gradkit.distributed.value_and_grads(first(index).sum(), first)
    expected = backward_of(second, {"sum": second(index).sum()})
    assert list(grads) == list(expected)
    for name, grad in grads.items():
        if expected[name] is None:
            assert grad is None
        else:
            assert grad.layout == expected[name].layout
            torch.testing.assert_close(grad.to_dense(), expected[name].to_dense())
    assert grads["module.frozen.weight"] is None


def test_frozen_tied_and_sparse_parameters(several: Ranks, device: torch.device) -> None:
    several.run(check_frozen_tied_sparse)


def check_frozen_differently(device: torch.device) -> None:
    """Each rank trains as many parameters, of the same shapes: their sums would be of no use."""
    layers = {"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}
    chain = nn.Sequential(*layers.values()).to(device)
    model = DistributedDataParallel(chain, find_unused_parameters=True)
    x = torch.ones(2, 3, device=device)
    _, grads = gradkit.distributed.value_and_grads(model(x).sum(), model)
    frozen = chain[dist.get_rank() % 2]
    frozen.requires_grad_(False)
    with model.no_sync():
        _, local = gradkit.value_and_grads(chain(x).sum(), chain)
    armed = {f"module.{name}": grad for name, grad in local.items()}
    calls: list[Any] = [
        lambda loss: gradkit.distributed.value_and_grads(loss, model),
        lambda loss: gradkit.distributed.per_loss_grads([loss, 2 * loss], model),
        lambda loss: gradkit.distributed.gram([loss, 2 * loss], model),
        lambda loss: gradkit.distributed.simultaneous_grads([loss], [model]),
        lambda _: gradkit.add_grads_(model, armed, hooks=True),
    ]
    for call in calls:
        with pytest.raises(gradkit.StructureError, match="freeze the same parameters"):
            call(model(x).sum())
        assert all(param.grad is None for param in model.parameters())
    frozen.requires_grad_(True)
    _, again = gradkit.distributed.value_and_grads(model(x).sum(), model)
    assert gradkit.tree.allclose(again, grads, rtol=0, atol=0)


def test_other_parameters_frozen_on_another_rank(two: Ranks, device: torch.device) -> None:
    two.run(check_frozen_differently)
