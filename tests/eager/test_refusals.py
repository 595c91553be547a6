"""What is refused, before anything has run, and leaves the graph and every .grad as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import gradkit
from tests.helpers import assert_same_bits, same_bits, unchanged


def product(losses: Any, params: Any) -> Any:
    cotangents = gradkit.tree.map(torch.ones_like, losses)
    return gradkit.vjp({"losses": losses}, params, {"losses": cotangents})


CALLS = [gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.simultaneous_grads, product]


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)


@pytest.mark.parametrize("call", CALLS)
def test_a_reentrant_checkpoint(device: torch.device, call: Callable[..., Any]) -> None:
    """The parameters inside are invisible to autograd.grad: it returns None, or zeros [F1]."""
    model = mlp(device)
    head = torch.ones(1, device=device, requires_grad=True)
    x = torch.randn(2, 3, device=device, requires_grad=True)
    loss = (checkpoint(model, x, use_reentrant=True) * head).sum()
    assert (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)[0]
        is None
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    # Also where what is asked for looks complete: a tied tensor that is used outside, too.
    tied = (loss + model[0].weight.sum()) * 1
    for params in (model, {"head": head}, model[0].weight):
        for target in (loss, tied):
            with (
                unchanged(*model.parameters(), head, x, loss),
                pytest.raises(
                    gradkit.UnsupportedGraphError, match=r"losses.*\n.*use_reentrant=False"
                ),
            ):
                call(target, params)
    loss.backward()  # the graph is as it was
    assert model[0].weight.grad is not None


def test_the_refusal_names_the_loss(device: torch.device) -> None:
    model = mlp(device)
    x = torch.randn(2, 3, device=device, requires_grad=True)
    losses = {"fine": model(x).sum(), "hidden": checkpoint(model, x, use_reentrant=True).sum()}
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^losses\['hidden'\]"):
        gradkit.value_and_grads(losses, model)
    gradkit.value_and_grads(losses["fine"], model)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("call", CALLS)
def test_a_ddp_module_as_params(device: torch.device, call: Callable[..., Any]) -> None:
    """Its gradients would be this process's alone [M1]."""
    model = mlp(device)
    ddp = nn.parallel.DistributedDataParallel(model)
    loss = ddp(torch.randn(2, 3, device=device)).sum()
    for params in (ddp, {"net": [ddp]}, nn.Sequential(ddp)):
        with (
            unchanged(*model.parameters(), loss),
            pytest.raises(gradkit.UnsupportedGraphError, match="DistributedDataParallel"),
        ):
            call(loss, params)
    loss.backward()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_a_graph_of_ddp(device: torch.device, option: str) -> None:
    """One autograd.grad in the first iteration of static_graph ends all reduction [M4]."""
    model = mlp(device)
    ddp = nn.parallel.DistributedDataParallel(model, **{option: True})
    loss = ddp(torch.randn(2, 3, device=device)).sum()
    with (
        unchanged(*model.parameters(), loss),
        pytest.raises(gradkit.UnsupportedGraphError, match="DistributedDataParallel"),
    ):
        gradkit.value_and_grads(loss, list(model.parameters()))
    loss.backward()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_fully_sharded_module(device: torch.device) -> None:
    """Sharded parameters are not in the graph: autograd.grad returns None for all of them [M5]."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type != "cpu":
        pytest.skip("gloo meshes are made on the CPU")
    mesh = init_device_mesh("cpu", (1,))
    model = mlp(device)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    sharded = list(model.parameters())
    loss = model(torch.randn(2, 3, device=device)).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match="FSDP"):
        gradkit.value_and_grads(loss, model)
    with pytest.raises(gradkit.UnsupportedGraphError, match="fully_shard"):
        gradkit.value_and_grads(loss, {"some": sharded})
    x = torch.randn(2, 3, device=device, requires_grad=True)
    through = model(x).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match="fully_shard"):
        gradkit.value_and_grads(through, x)
    loss.backward()
    assert all(p.grad is not None for p in sharded)


@pytest.mark.parametrize(
    ("losses", "params", "error", "builtin"),
    [
        (lambda m, y: 1.0, lambda m: m, gradkit.LeafTypeError, TypeError),
        (lambda m, y: y.sum(), lambda m: [2.0], gradkit.LeafTypeError, TypeError),
        (lambda m, y: {}, lambda m: m, gradkit.StructureError, ValueError),
        (lambda m, y: y.sum(), lambda m: {}, gradkit.StructureError, ValueError),
        (lambda m, y: y, lambda m: m, gradkit.NotScalarLossError, ValueError),
        (lambda m, y: y.sum().detach(), lambda m: m, gradkit.DetachedLossError, RuntimeError),
        (
            lambda m, y: y.sum(), lambda m: torch.ones(2, requires_grad=True),
            gradkit.UnreachedParamError, RuntimeError,
        ),
    ],
)  # fmt: skip
def test_every_refusal_is_also_the_builtin_error_and_leaves_all_alone(
    device: torch.device, losses: Any, params: Any, error: type[Exception], builtin: type[Exception]
) -> None:
    model = mlp(device)
    for p in model.parameters():
        p.grad = torch.full_like(p, 5.0)
    y = model(torch.randn(2, 3, device=device)).exp()
    for call in (gradkit.value_and_grads, gradkit.simultaneous_grads):
        with unchanged(*model.parameters(), y), pytest.raises(builtin) as caught:
            call(losses(model, y), params(model))
        assert type(caught.value) is error
        assert isinstance(caught.value, gradkit.GradkitError)
        where, do = str(caught.value).split("\n")
        assert where.startswith(("losses", "params"))
        assert "expected" in where
        assert "got" in where
        assert do.startswith("  What to do: ")
    _, grads = gradkit.value_and_grads(y.sum(), model, retain_graph=True)
    expected = torch.autograd.grad(y.sum(), list(model.parameters()))
    assert_same_bits(grads.values(), expected)


def test_a_weight_changed_in_place_before_the_call_is_named(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    loss = (w * w).sum()
    with torch.no_grad():
        w.add_(1)
    for call in (gradkit.value_and_grads, gradkit.backward_):
        with (
            unchanged(w),
            pytest.raises(
                gradkit.UnsupportedGraphError,
                match=r"losses\['l'\].*modified by an inplace operation",
            ),
        ):
            call({"l": loss}, w)


def test_a_parameter_frozen_after_the_forward_is_none_as_after_backward(
    device: torch.device,
) -> None:
    w, v = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    loss = (w * v).sum()
    v.requires_grad_(False)
    _, grads = gradkit.value_and_grads(loss, {"w": w, "v": v})
    assert grads["v"] is None
    assert same_bits(grads["w"], v.detach())


def test_a_lone_custom_function_of_another_graph_changes_nothing(device: torch.device) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    w = torch.randn(3, device=device, requires_grad=True)
    other = Twice.apply(w)
    _, grad = gradkit.value_and_grads((w * w).sum(), w)
    assert torch.equal(grad, 2 * w.detach())
    assert torch.equal(gradkit.value_and_grads(other.sum(), w)[1], torch.full_like(w, 2.0))


def test_a_multi_grad_hook_on_leaves_is_named(device: torch.device) -> None:
    w, v = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    seen: list[int] = []
    handle = torch.autograd.graph.register_multi_grad_hook((w, v), lambda g: seen.append(len(g)))
    with unchanged(w, v), pytest.raises(gradkit.UnsupportedGraphError, match="backward_"):
        gradkit.value_and_grads((w * v).sum(), [w, v])
    gradkit.backward_((w * v).sum())
    assert seen == [2]
    handle.remove()
    gradkit.value_and_grads((w * v).sum(), [w, v])


def test_a_parameter_cast_after_the_forward_is_refused(device: torch.device) -> None:
    """Gradients then arrive at an accumulator that autograd.grad does not look at."""
    cast, other = nn.Linear(2, 1).to(device), nn.Linear(2, 1).to(device)
    x = torch.ones(1, 2, device=device)
    for params in (cast, {"cast": cast, "other": other}):
        loss = (cast(x) * other(x)).sum()
        cast.double()
        with pytest.raises(gradkit.UnreachedParamError, match="moved or cast since"):
            gradkit.value_and_grads(loss, params, retain_graph=True)
        with pytest.raises(gradkit.UnreachedParamError, match="moved or cast since"):
            gradkit.per_loss_grads([loss, loss * 2], params, retain_graph=True)
        with pytest.raises(gradkit.UnreachedParamError, match="moved or cast since"):
            gradkit.backward_(loss, params)
        assert other.weight.grad is None
        cast.float()


def test_a_parameter_of_inference_mode_that_torch_leaves_out_is_refused(
    device: torch.device,
) -> None:
    with torch.inference_mode():
        layer = nn.Linear(2, 1).to(device)
    loss = layer(torch.ones(1, 2, device=device)).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match="made outside of inference mode"):
        gradkit.value_and_grads(loss, layer, retain_graph=True)
    assert gradkit.value_and_grads(loss, layer.bias)[1] == 1


def test_a_traced_module_stands_for_its_parameters(device: torch.device) -> None:
    layer, x = nn.Linear(2, 1).to(device), torch.ones(1, 2, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(layer, x)
    ours = gradkit.value_and_grads(traced(x).sum(), traced)[1]
    theirs = torch.autograd.grad(traced(x).sum(), list(traced.parameters()))
    assert all(map(torch.equal, ours.values(), theirs))


def test_a_tensor_changed_in_place_after_its_use_is_refused(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    h = w * 1
    loss = (h * 2).sum()
    h.add_(1).mul_(3)
    with unchanged(w, loss), pytest.raises(gradkit.UnreachedParamError, match=r"params\['h'\]"):
        gradkit.value_and_grads(loss, {"h": h, "w": w})
    other = (w * 1).add_(1)  # changed before, and not used: a structural zero
    _, grads = gradkit.value_and_grads(loss, {"other": other, "w": w})
    assert grads["other"] is None


def test_inside_a_transform_that_differentiates_create_graph_is_needed(
    device: torch.device,
) -> None:
    def fn(z: Tensor, create_graph: bool) -> Tensor:
        return gradkit.value_and_grads((z**3).sum(), z, create_graph=create_graph)[1].sum()

    z = torch.ones(2, device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match="create_graph=True"):
        torch.func.grad(fn)(z, False)
    assert torch.func.grad(fn)(z, True).tolist() == [6, 6]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (lambda m: m.parameters, "call it"),
        (lambda m: set(m.parameters()), "a set has no order"),
        (lambda m: m.state_dict(), "pass the module"),
        (lambda m: nn.ReLU(), "a module without parameters"),
    ],
)
def test_the_advice_fits_the_mistake(device: torch.device, params: Any, words: str) -> None:
    model = mlp(device)
    loss = model(torch.ones(1, 3, device=device)).sum()
    with pytest.raises(gradkit.GradkitError, match=words):
        gradkit.value_and_grads(loss, params(model))


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", "instance_norm"])
def test_a_third_derivative_through_a_norm(device: torch.device, norm: str) -> None:
    """torch gets it silently wrong, or raises; the second derivative is right."""
    shape = [3] if norm == "layer_norm" else None
    fns = {
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, shape),
        "batch_norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        "instance_norm": lambda x: torch.nn.functional.instance_norm(x[None])[0],
    }
    dim = 0 if norm == "batch_norm" else -1

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(dim, keepdim=True)
        return centred / (centred.square().mean(dim, keepdim=True) + 1e-5).sqrt()

    start = torch.randn(4, 3, dtype=torch.float64, device=device)

    def second(fn: Any, *, create_graph: bool) -> torch.Tensor:
        x = start.clone().requires_grad_()
        loss = fn(x).sin().sum()
        _, first = gradkit.value_and_grads(loss, x, create_graph=True)
        return gradkit.value_and_grads(first.square().sum(), x, create_graph=create_graph)[1]

    torch.testing.assert_close(
        second(fns[norm], create_graph=False), second(by_hand, create_graph=True)
    )

    def third(fn: Any) -> torch.Tensor:
        x = start.clone().requires_grad_()
        out = fn(x).sin().sum()
        for _ in range(2):
            _, grad = gradkit.value_and_grads(out, x, create_graph=True)
            out = grad.square().sum()
        return gradkit.value_and_grads(out, x)[1]

    with pytest.raises(gradkit.UnsupportedGraphError, match="third"):
        third(fns[norm])
    assert third(by_hand).isfinite().all()


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict, nn.Sequential])
def test_players_in_one_module(device: torch.device, container: type[nn.Module]) -> None:
    """A module stands for one set of parameters, whatever modules it holds."""
    parts = {"G": nn.Linear(2, 1).to(device), "D": nn.Linear(2, 1).to(device)}
    players: nn.Module = nn.Sequential(*parts.values())
    if container is nn.ModuleDict:
        players = nn.ModuleDict(parts)
    if container is nn.ModuleList:
        players = nn.ModuleList(parts.values())
    x = torch.ones(3, 2, device=device)
    losses = [part(x).mean() for part in parts.values()]
    with (
        unchanged(*players.parameters(), *losses),
        pytest.raises(gradkit.StructureError, match="a tree with the structure of losses"),
    ):
        gradkit.simultaneous_grads(losses, players)
    grads = gradkit.simultaneous_grads(losses, list(parts.values()))
    assert all(grad is not None for tree in grads for grad in tree.values())


class Hidden(nn.Module):
    """A module whose layers are in a plain list, in which torch does not look for them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 1).to(device)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def mistakes(device: torch.device) -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    """Return calls that are mistaken: each with its error, and what its message names."""
    model, hidden = mlp(device), Hidden(device)
    x = torch.randn(2, 3, device=device)
    params = dict(model.named_parameters())

    def loss() -> Tensor:
        return model(x).sum()

    def clipped_step() -> None:
        _, grads = gradkit.value_and_grads(loss(), model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradkit.step_(optimizer, model, gradkit.tree.clip_by_global_norm(grads, 1.0))

    values, per_loss, func = gradkit.value_and_grads, gradkit.per_loss_grads, gradkit.func
    return {
        "criterion": (lambda: values(nn.MSELoss(), model), gradkit.LeafTypeError, "call it"),
        "module first": (
            lambda: values(model, loss()), gradkit.LeafTypeError, r"\(losses, params\)"
        ),
        "dict first": (
            lambda: per_loss(params, loss()), gradkit.UnreachedParamError, r"\(losses, params\)"
        ),
        "parameters first": (
            lambda: per_loss(model.parameters(), loss()),
            gradkit.UnreachedParamError,
            r"\(losses, params\)",
        ),
        "clipped pair": (clipped_step, gradkit.StructureError, r"clipped, norm = "),
        "layers in a list": (
            lambda: values(loss(), {"a": hidden}), gradkit.StructureError, r"module\.layers"
        ),
        "loss for a function": (
            lambda: func.value_and_grads(loss()), gradkit.OptionError, r"value_and_grads\(losses"
        ),
        "torch's optimizer": (
            lambda: gradkit.meta.unroll(
                lambda w, o, b: (w * w).sum(),
                x,
                [0],
                torch.optim.SGD(model.parameters(), lr=0.1),
            ),
            gradkit.UnsupportedOptimizerError,
            r"from_torch\(torch\.optim\.SGD",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", mistakes(torch.device("cpu")))
def test_a_mistake_is_named_with_the_call_that_works(device: torch.device, name: str) -> None:
    call, error, text = mistakes(device)[name]
    assert issubclass(error, gradkit.GradkitError)
    with pytest.raises(error, match=text):
        call()


@pytest.mark.usefixtures("one_process")
def test_cotangents_of_dtensors_are_dtensors(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (1,))
    w: Any = DTensor.from_local(torch.ones(2, 3, device=device), mesh).requires_grad_()
    seed = torch.full((2, 3), 5.0, device=device)
    for output, cotangent, text in (
        (w * 2, seed, r"expected a DTensor, got"),
        ((w * 2).full_tensor(), DTensor.from_local(seed, mesh), r"expected a plain tensor, got"),
    ):
        with pytest.raises(gradkit.StructureError, match=text):
            gradkit.vjp(output, w, cotangent)
    grad = gradkit.vjp(w * 2, w, DTensor.from_local(seed, mesh))
    assert torch.equal(grad.full_tensor(), 2 * seed)
