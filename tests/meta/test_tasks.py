"""value_and_grads over tasks: equal to a loop, where torch's own order of transforms is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.func import grad as func_grad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradkit
from gradkit import meta
from tests.helpers import World, assert_owned, assert_same_bits, unchanged

D = torch.float64
TASKS = 4


class Attention(nn.Module):
    """A pre-norm transformer block with one head, and a classifier on the mean."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(4), nn.LayerNorm(4)
        self.qkv, self.up, self.down = nn.Linear(4, 12), nn.Linear(4, 6), nn.Linear(6, 4)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        if self.fused:
            with sdpa_kernel(SDPBackend.MATH):
                mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        x = x + mixed
        return (x + self.down(functional.gelu(self.up(self.between(x))))).mean(-2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(5, 6, 3, padding=1),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Softplus(),
        nn.Conv1d(6, 2, 2),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "attention": lambda: Attention(fused=False),
    "sdpa": lambda: Attention(fused=True),
    "conv and batch norm": conv,
    "instance norm": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.InstanceNorm1d(5, affine=True), nn.Flatten(), nn.Linear(20, 4)
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


def make(
    name: str, device: torch.device, memory: Any = "store", steps: int = 2
) -> tuple[Callable[..., Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return a meta-loss with an unroll inside, parameters with a learned rate, and tasks."""
    model = MODELS[name]().to(device, D)
    params = {n: torch.randn_like(p) / 2 for n, p in model.named_parameters()}
    params["rate"] = torch.tensor(-2.0, dtype=D, device=device)
    tasks = {k: torch.randn(TASKS, 3, 5, 4, dtype=D, device=device) for k in ("train", "test")}
    tasks["y"] = torch.randint(4, (TASKS, 3), device=device)

    def loss(weights: Any, _: Any, data: Any) -> Tensor:
        out = functional_call(model, weights, (data[0],))
        return functional.cross_entropy(out.flatten(1)[:, -4:], data[1])

    def meta_loss(params: Any, task: Any) -> Tensor:
        weights = {n: p for n, p in params.items() if n != "rate"}
        opt = meta.sgd(lr=params["rate"].exp(), momentum=0.5)
        train = [(task["train"], task["y"])] * steps
        adapted = meta.unroll(loss, weights, train, opt, memory=memory)
        return loss(adapted.params, (), (task["test"], task["y"]))

    return meta_loss, params, tasks


def task_of(tasks: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    return {key: part[i] for key, part in tasks.items()}


def loop(meta_loss: Any, params: Any, tasks: Any) -> tuple[Tensor, list[Tensor]]:
    """The mean over the tasks, one after the other, by eager autograd."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    values = torch.stack([meta_loss(leaves, task_of(tasks, i)) for i in range(TASKS)])
    return values.mean().detach(), list(torch.autograd.grad(values.mean(), list(leaves.values())))


def assert_close(ours: Any, theirs: Any, tol: float = 1e-11) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)


@pytest.mark.parametrize("memory", ["store", "recompute", 2])
@every_model
def test_it_is_the_loop_over_tasks(device: torch.device, name: str, memory: Any) -> None:
    meta_loss, params, tasks = make(name, device, memory)
    expected = loop(meta_loss, params, tasks)
    world = World(*params.values(), *tasks.values())
    value, grads = meta.mean_value_and_grads(meta_loss, params, tasks)
    world.assert_unchanged()
    assert value.shape == ()
    assert list(grads) == list(params)
    assert_close(value, expected[0])
    assert_close(list(grads.values()), expected[1])
    assert_owned(grads.values(), params.values())
    # A constant before a norm has no effect.
    still = {"conv and batch norm": {"0.bias"}, "instance norm": set()}.get(name, set())
    assert all((g.abs().max() > 1e-9) == (n not in still) for n, g in grads.items())


@pytest.mark.parametrize("name", ["attention", "conv and batch norm", "instance norm"])
def test_the_other_order_is_wrong_in_torch(device: torch.device, name: str) -> None:
    """grad(vmap(grad)) through a normalization with a weight [V1]: fails when torch mends it."""
    _, params, tasks = make(name, device)
    model = MODELS[name]().to(device, D)
    weights = {n: p for n, p in params.items() if n != "rate"}

    def inner(weights: Any, x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).sin().square().sum()

    def of_slope(weights: Any, x: Tensor) -> Tensor:
        return sum((g**2).sum() for g in func_grad(inner)(weights, x).values())

    def outside(weights: Any) -> Tensor:
        return vmap(of_slope, in_dims=(None, 0))(weights, tasks["train"]).mean()

    _, right = meta.mean_value_and_grads(of_slope, weights, tasks["train"])
    each = [func_grad(of_slope)(weights, x) for x in tasks["train"]]
    expected = [sum(g[n] for g in each) / TASKS for n in weights]
    assert_close(list(right.values()), expected)
    wrong = list(func_grad(outside)(weights).values())
    error = max((a - b).norm() / (1e-9 + b.norm()) for a, b in zip(wrong, expected, strict=True))
    assert error > 1e-4


@pytest.mark.parametrize("at_once", [1, 3, TASKS, TASKS + 5])
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_tasks_at_once_change_only_rounding(device: torch.device, name: str, at_once: int) -> None:
    meta_loss, params, tasks = make(name, device)
    sizes: list[int] = []

    def watched(params: Any, task: Any) -> Tensor:
        size = torch._C._functorch.get_unwrapped(task["y"]).shape[0]
        sizes.append(size)
        return meta_loss(params, task)

    value, grads = meta.mean_value_and_grads(meta_loss, params, tasks)
    part, parts = meta.mean_value_and_grads(watched, params, tasks, tasks_at_once=at_once)
    assert_close(part, value, 1e-13)
    assert_close(parts, grads, 1e-13)
    assert sizes == {1: [1] * 4, 3: [3, 1]}.get(at_once, [4])
    if at_once >= TASKS:
        assert_same_bits([part, *parts.values()], [value, *grads.values()])


def test_in_dims_tell_where_the_tasks_are(device: torch.device) -> None:
    w, shared = (torch.randn(3, dtype=D, device=device) for _ in range(2))
    x, y = (torch.randn(TASKS, 2, 3, dtype=D, device=device) for _ in range(2))

    def meta_loss(w: Tensor, task: Any) -> Tensor:
        assert task["kind"] == "sine"
        assert task["none"] is None
        return (task["x"] * w - task["more"][0] + task["more"][1]).sin().sum()

    def given(x: Tensor, y: Tensor) -> Any:
        return {"x": x, "more": [y, shared], "kind": "sine", "none": None}

    expected = [meta_loss(w, given(x[i], y[i])) for i in range(TASKS)]
    slopes = [func_grad(meta_loss)(w, given(x[i], y[i])) for i in range(TASKS)]
    mean, slope = sum(expected) / TASKS, sum(slopes) / TASKS
    dims = {"x": 0, "more": [0, None], "kind": None, "none": None}
    cases = [
        (given(x, y), dims),
        (given(x, y), {**dims, "kind": 0, "none": 0}),
        (given(x.movedim(0, 1), y.movedim(0, 2)), {**dims, "x": 1, "more": [2, None]}),
        (given(x.movedim(0, -1), y), {**dims, "x": -1, "more": [-3, None]}),
    ]
    for tasks, in_dims in cases:
        for at_once in (None, 3):
            value, grads = meta.mean_value_and_grads(
                meta_loss, w, tasks, in_dims=in_dims, tasks_at_once=at_once
            )
            assert_close(value, mean, 1e-13)
            assert_close(grads, slope, 1e-13)
    stacked = given(x.movedim(0, 1), y.movedim(0, 1))
    stacked["more"][1] = shared.expand(2, TASKS, 3)
    value, grads = meta.mean_value_and_grads(meta_loss, w, stacked, in_dims=1)
    assert_close((value, grads), (mean, slope), 1e-13)
    nested = {"x": 1, "more": 1, "kind": None, "none": None}
    value, grads = meta.mean_value_and_grads(meta_loss, w, stacked, in_dims=nested)
    assert_close((value, grads), (mean, slope), 1e-13)


@pytest.mark.parametrize("at_once", [None, 1, 3])
def test_aux_is_that_of_a_loop_over_tasks(device: torch.device, at_once: Any) -> None:
    meta_loss, params, tasks = make("mlp", device)

    def with_aux(params: Any, task: Any) -> Any:
        aux = {"y": task["y"], "rate": params["rate"], "label": "mlp", "none": None}
        return meta_loss(params, task), [aux, task["test"].sum(0), params["0.bias"] * 2]

    plain = meta.mean_value_and_grads(meta_loss, params, tasks, tasks_at_once=at_once)
    with unchanged(*params.values(), *tasks.values()):
        (value, aux), grads = meta.mean_value_and_grads(
            with_aux, params, tasks, tasks_at_once=at_once, has_aux=True
        )
    assert_same_bits([value, *grads.values()], [plain[0], *plain[1].values()])
    each = [with_aux(params, task_of(tasks, i))[1] for i in range(TASKS)]
    assert aux[0]["label"] == "mlp"
    assert aux[0]["none"] is None
    got = [aux[0]["y"], aux[0]["rate"], aux[1], aux[2]]
    loop = [[one[0]["y"], one[0]["rate"], one[1], one[2]] for one in each]
    expected = [torch.stack(of_tasks) for of_tasks in zip(*loop, strict=True)]
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(ours, theirs, 1e-13)
    assert_owned(got, expected)


def test_trees_of_parameters(device: torch.device) -> None:
    w = torch.randn(3, device=device, dtype=D)
    frozen = nn.Parameter(torch.ones(3, device=device, dtype=D), requires_grad=False)
    unused = torch.ones(2, device=device, dtype=D, requires_grad=True)
    params = {"a": w, "b": (w, None), "frozen": frozen, "unused": unused}
    tasks = torch.randn(TASKS, 3, device=device, dtype=D)

    def meta_loss(p: Any, x: Tensor) -> Tensor:
        return (p["a"] * p["b"][0] * x * p["frozen"]).sum()

    value, grads = meta.mean_value_and_grads(meta_loss, params, tasks)
    _, one = gradkit.func.value_and_grads(meta_loss)(params, tasks.mean(0))
    assert_close(value, (w * w * tasks).sum() / TASKS)
    torch.testing.assert_close(grads["a"], 2 * w * tasks.mean(0))
    assert grads["b"][1] is None
    for mine, theirs in ((grads["a"], one["a"]), (grads["b"][0], one["b"][0])):
        assert_close(mine, theirs)
    assert not grads["frozen"].any()
    assert not grads["unused"].any()
    assert not any(g.requires_grad for g in (grads["a"], grads["unused"], value))
    model = nn.Linear(3, 1).double().to(device)
    _, named = meta.mean_value_and_grads(
        lambda p, x: functional_call(model, p, (x,)).sum(), model, tasks
    )
    assert_close(
        named, {"weight": tasks.mean(0, keepdim=True), "bias": torch.ones_like(value)[None]}
    )


def test_random_numbers_differ_from_task_to_task(device: torch.device) -> None:
    w = torch.ones(1000, device=device, dtype=D)
    tasks = torch.eye(2, device=device, dtype=D)

    def meta_loss(w: Tensor, task: Tensor) -> Tensor:
        kept = functional.dropout(w, 0.5)
        return task[0] * kept.sum() + task[1] * 1e4 * kept.sum()

    _, grad = meta.mean_value_and_grads(meta_loss, w, tasks)
    assert grad.unique().numel() == 4, "each of the tasks keeps, or not, each of the numbers"


def test_what_it_reads_from_outside_leaves_no_graph_if_asked(device: torch.device) -> None:
    w = torch.ones(3, device=device, dtype=D)
    scale = torch.tensor(2.0, device=device, dtype=D, requires_grad=True)
    tasks = torch.randn(TASKS, 3, device=device, dtype=D)

    def meta_loss(w: Tensor, x: Tensor) -> Tensor:
        return (scale * w * x).sum()

    value, grad = meta.mean_value_and_grads(meta_loss, w, tasks, create_graph=False)
    assert not value.requires_grad
    assert not grad.requires_grad
    _, grad = meta.mean_value_and_grads(meta_loss, w, tasks)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), scale)[0], tasks.mean(0).sum())


def test_its_gradient_is_that_of_torch_func_too(device: torch.device) -> None:
    """Under a transform of the caller, as any function."""
    meta_loss, params, tasks = make("mlp", device, steps=1)
    scales = torch.tensor([1.0, 1.5], dtype=D, device=device)

    def after(scale: Tensor) -> Tensor:
        moved = {n: scale * p for n, p in params.items()}
        return sum(
            (g**2).sum() for g in meta.mean_value_and_grads(meta_loss, moved, tasks)[1].values()
        )

    eps = 1e-6
    got = vmap(func_grad(after))(scales)
    expected = torch.stack([(after(s + eps) - after(s - eps)) / (2 * eps) for s in scales])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    w = torch.ones(3, device=device, dtype=D)
    x = torch.ones(TASKS, 3, device=device, dtype=D)

    def meta_loss(w: Tensor, task: Any) -> Tensor:
        return (w * task["x"]).sum()

    def refused(error: Any, text: str, tasks: Any, fn: Any = meta_loss, **options: Any) -> None:
        with unchanged(w, x), pytest.raises(error, match=text):
            meta.mean_value_and_grads(fn, w, tasks, **options)

    wrong = gradkit.StructureError
    refused(wrong, r"4 in tasks\['x'\] and 3 in tasks\['y'\]", {"x": x, "y": x[:3]})
    refused(wrong, r"^tasks: .*none", {})
    refused(wrong, r"^tasks: .*none", {"x": 1.0})
    refused(wrong, r"^tasks: .*none", {"x": x}, in_dims=None)
    refused(wrong, r"^tasks: .*at least one", {"x": x[:0]})
    option = gradkit.OptionError
    refused(option, r"^tasks\['x'\]: .*dimension 2", {"x": x}, in_dims=2)
    refused(option, r"^tasks\['y'\]: .*dimension 0", {"x": x, "y": x.sum()})
    for dim in ("0", 0.0, True):
        refused(option, r"^in_dims: expected ints and None", {"x": x}, in_dims=dim)
    refused(wrong, r"^in_dims: ", {"x": x}, in_dims={"y": 0})
    for at_once in (0, -1, True, 1.5, "all"):
        refused(option, r"^tasks_at_once: ", {"x": x}, tasks_at_once=at_once)
    refused(option, r"^has_aux: ", {"x": x}, has_aux=1)
    refused(wrong, r"^meta_loss_fn: .*has_aux=True", {"x": x}, has_aux=True)
    pair = lambda w, t: ((w * t["x"]).sum(), {"n": 1})  # noqa: E731
    refused(gradkit.LeafTypeError, r"if this is aux, pass has_aux=True", {"x": x}, pair)
    two = lambda w, t: ((w * t["x"]).sum(), w.sum())  # noqa: E731
    refused(gradkit.NotScalarLossError, r"^meta_loss_fn: .*2 losses", {"x": x}, two)
    refused(gradkit.NotScalarLossError, r"losses", {"x": x}, lambda w, t: w * t["x"])
    refused(gradkit.LeafTypeError, r"losses", {"x": x}, lambda w, t: 1.0)
    refused(gradkit.DetachedLossError, r"losses", {"x": x}, lambda w, t: t["x"].sum())
    with pytest.raises(gradkit.LeafTypeError, match="params"):
        meta.mean_value_and_grads(meta_loss, {"w": "w"}, {"x": x})
    with pytest.raises(gradkit.UnreachedParamError):
        meta.mean_value_and_grads(meta_loss, [None], {"x": x})


@pytest.mark.parametrize("inner", [False, True], ids=["direct", "through an inner loop"])
@pytest.mark.parametrize("tasks_at_once", [None, 1])
def test_a_later_derivative_that_torch_gets_wrong_raises(
    device: torch.device, inner: bool, tasks_at_once: int | None
) -> None:
    """It was zero, or that of a graph that is wrong under vmap."""
    w = torch.rand(3, device=device, dtype=torch.float64, requires_grad=True)
    tasks = torch.randn(2, 5, 3, device=device, dtype=torch.float64)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return functional.layer_norm(x * w, (3,), w).sin().square().mean()

    def meta_loss(w: Tensor, x: Tensor) -> Tensor:
        if not inner:
            return loss(w, x)
        adapted = meta.unroll(lambda p, _, x: loss(p, x), w, [x], meta.sgd(0.5)).params
        return loss(adapted, x)

    _, grad = meta.mean_value_and_grads(meta_loss, w, tasks, tasks_at_once=tasks_at_once)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"layer_norm|NativeLayerNorm"):
        gradkit.value_and_grads(grad.square().sum(), w)


def fit(w: Tensor, task: Any) -> Tensor:
    x, y = task
    return ((x @ w - y) ** 2).mean()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tasks_that_are_not_stacked(device: torch.device, count: int) -> None:
    w = torch.ones(3, device=device)
    tasks = [tuple(torch.randn(2, 4, 3, device=device).unbind()) for _ in range(count)]
    tasks = [(x, y[:, 0]) for x, y in tasks]
    noise = torch.get_rng_state()
    match = rf"^tasks: .*a list of {count}, of which .*gradkit\.tree\.stack\(tasks\)"
    with unchanged(w), pytest.raises(gradkit.StructureError, match=f"(?s){match}") as caught:
        meta.mean_value_and_grads(fit, w, tasks)
    assert not isinstance(caught.value.__cause__, gradkit.GradkitError)
    assert torch.equal(noise, torch.get_rng_state())
    value, grads = meta.mean_value_and_grads(fit, w, gradkit.tree.stack(tasks))
    each = [gradkit.func.value_and_grads(fit)(w, task) for task in tasks]
    torch.testing.assert_close(value, torch.stack([one for one, _ in each]).mean())
    torch.testing.assert_close(grads, torch.stack([grad for _, grad in each]).mean(0))


def test_an_error_of_the_meta_loss_itself_stays(device: torch.device) -> None:
    def broken(w: Tensor, task: Any) -> Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        meta.mean_value_and_grads(broken, torch.ones(3, device=device), [torch.ones(2, 3)])


@pytest.mark.parametrize("make", [list, iter])
def test_tasks_of_several_sizes(device: torch.device, make: Callable[[Any], Any]) -> None:
    tasks = [(torch.ones(n, 3, device=device), torch.ones(n, device=device)) for n in (4, 5)]
    with pytest.raises(gradkit.StructureError, match=r"(?s)^tasks: .*a loop over tasks"):
        meta.mean_value_and_grads(fit, torch.ones(3, device=device), make(tasks))


def test_sparse_tasks(device: torch.device) -> None:
    tasks = torch.eye(3, device=device).to_sparse()
    w = torch.ones(3, device=device)
    with pytest.raises(gradkit.LeafTypeError, match=r"(?s)^tasks: .* dense batch.*to_dense"):
        meta.mean_value_and_grads(lambda w, t: (w * t).sum(), w, tasks)
    meta.mean_value_and_grads(lambda w, t: (w * t).sum(), w, tasks.to_dense())
