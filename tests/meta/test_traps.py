"""gradkit.meta where torch, or a first draft, was silently wrong; each case was seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import meta
from tests.helpers import OnceCubed, assert_same_bits

pytestmark = pytest.mark.usefixtures("double")
MEMORY = ("store", "recompute", 2)
every_memory = pytest.mark.parametrize("memory", MEMORY)


@pytest.fixture
def double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def tensor(*values: float, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device, requires_grad=True)


@every_memory
def test_a_meta_gradient_can_be_differentiated_again(device: torch.device, memory: Any) -> None:
    def meta_grads(memory: Any) -> tuple[list[Tensor], list[Tensor]]:
        w, lr, o = (tensor(v, device=device) for v in (2.0, 0.1, 0.7))
        adapted = meta.unroll(
            lambda p, o, b: (o * p**4).sum(), w, [0] * 4, meta.sgd(lr * 0.1, momentum=0.9),
            outer=o, memory=memory,
        )  # fmt: skip
        first = torch.autograd.grad(adapted.params.sum(), [w, lr, o], create_graph=True)
        second = torch.autograd.grad(sum(g.sum() for g in first), [w, lr, o])
        return list(first), list(second)

    torch.testing.assert_close(meta_grads(memory), meta_grads("store"))
    plain = by_hand(device)
    torch.testing.assert_close(meta_grads("store"), plain)


def written_out(x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


@pytest.mark.long
@every_memory
@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("norm", [functional.layer_norm, written_out])
def test_an_unroll_inside_of_another_is_a_third_derivative(
    device: torch.device, memory: Any, first_order: bool, norm: Any
) -> None:
    """torch's own of a layer norm is silently wrong."""
    x = torch.randn(5, 3, device=device)
    weight, bias = torch.randn(4, device=device), torch.randn(4, device=device)

    def inner(w: Tensor, o: Any, b: Any) -> Tensor:
        return (norm(x @ w, (4,), weight, bias).tanh() ** 2).sum()

    def middle(w: Tensor, o: Any, b: Any) -> Tensor:
        return inner(meta.unroll(inner, w, [0], meta.sgd(0.1), memory=memory).params, o, b)

    def after(w: Tensor) -> Tensor:
        opt = meta.sgd(0.1)
        adapted = meta.unroll(middle, w, [0], opt, memory=memory, first_order=first_order)
        return inner(adapted.params, (), 0)

    w = torch.randn(3, 4, device=device, requires_grad=True)
    if norm is written_out and not first_order:
        assert torch.autograd.gradcheck(after, w, eps=1e-6, atol=1e-6)
    elif norm is written_out or first_order:
        torch.autograd.grad(after(w), w)
    else:
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"third.*silently wrong"):
            torch.autograd.grad(after(w), w)


@pytest.mark.parametrize("memory", ["recompute", 2])
def test_a_second_derivative_of_steps_is_a_third_one_too(device: torch.device, memory: Any) -> None:
    x, one = torch.randn(5, 3, device=device), torch.ones(4, device=device)
    w = torch.randn(3, 4, device=device, requires_grad=True)
    adapted = meta.unroll(
        lambda w, o, b: (functional.layer_norm(x @ w, (4,), one, one).tanh() ** 2).sum(),
        w, [0, 0], meta.sgd(0.1), memory=memory,
    )  # fmt: skip
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"third.*silently wrong"):
        gradkit.value_and_grads(adapted.params.sum(), w, create_graph=True)


def test_a_function_that_is_once_differentiable(device: torch.device) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)

    def loss(w: Tensor, o: Any, b: Any) -> Tensor:
        return (OnceCubed.apply(w) ** 2).sum()

    for memory in MEMORY:
        with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
            meta.unroll(loss, w, [0], meta.sgd(0.1), memory=memory).params.sum().backward()
    meta.unroll(loss, w, [0], meta.sgd(0.1), first_order=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        gradkit.value_and_grads(loss(w, (), 0), w, create_graph=True)
    for params in (None, w):
        with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
            gradkit.backward_(loss(w, (), 0), params, create_graph=True)
    assert w.grad is None
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        meta.implicit(lambda w, o: w, lambda w, o: loss(w, o, 0))(w, w * 2)
    _, grad = gradkit.value_and_grads(loss(w, (), 0), w)
    torch.testing.assert_close(grad, 6 * w.detach() ** 5)
    # Beside the way to what is differentiated, it is in no one's.
    constant = OnceCubed.apply(w)
    v = torch.ones(2, device=device, requires_grad=True)
    _, grad = gradkit.value_and_grads((constant * v**2).sum(), v, create_graph=True)
    torch.testing.assert_close(grad, 2 * constant)


class OnceCubedForTransforms(OnceCubed):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:
        (x,) = args
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


def test_a_function_that_is_once_differentiable_over_tasks(device: torch.device) -> None:
    w, tasks = torch.ones(2, device=device), torch.ones(3, 2, device=device)

    def meta_loss(w: Tensor, task: Tensor, first_order: bool = False) -> Tensor:
        adapted = meta.unroll(
            lambda w, o, b: (OnceCubedForTransforms.apply(w) ** 2).sum(),
            w, [0], meta.sgd(0.1), first_order=first_order,
        )  # fmt: skip
        return (adapted.params * task).sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        meta.mean_value_and_grads(meta_loss, w, tasks)
    with pytest.raises(gradkit.UnsupportedGraphError, match="once_differentiable"):
        gradkit.func.hvp(
            lambda w: (OnceCubedForTransforms.apply(w) ** 2).sum(),
            w,
            w,
            mode="reverse-over-reverse",
        )
    _, grad = meta.mean_value_and_grads(lambda w, task: meta_loss(w, task, True), w, tasks)
    assert_same_bits([grad], [torch.ones_like(w)])


def by_hand(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    w, lr, o = (tensor(v, device=device) for v in (2.0, 0.1, 0.7))
    p, buffer = w, None
    for _ in range(4):
        grad = 4 * o * p**3
        buffer = grad if buffer is None else 0.9 * buffer + grad
        p = p - lr * 0.1 * buffer
    first = torch.autograd.grad(p.sum(), [w, lr, o], create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), [w, lr, o])
    return list(first), list(second)


@every_memory
@pytest.mark.parametrize("first_order", [False, True])
def test_params_that_stand_in_outer_too(
    device: torch.device, memory: Any, first_order: bool
) -> None:
    """The inner gradient is by params alone: an anchor is a constant of the step."""
    w = tensor(2.0, device=device)
    hooked: list[Any] = []
    w.register_hook(hooked.append)
    adapted = meta.unroll(
        lambda p, o, b: (p * o["w"] * o["more"]).sum(), w, [0, 0], meta.sgd(0.1),
        outer={"w": w, "more": torch.ones_like(w)}, memory=memory, first_order=first_order,
    )  # fmt: skip
    torch.testing.assert_close(adapted.params.detach(), torch.tensor([1.6], device=device))
    assert not hooked
    (grad,) = torch.autograd.grad(adapted.params.sum(), w)
    torch.testing.assert_close(grad, torch.tensor([1.0 if first_order else 0.8], device=device))


def test_a_vmap_whose_gradient_would_be_taken_outside(device: torch.device) -> None:
    w = tensor(1.0, 2.0, device=device)
    tasks = torch.tensor([[0.0, 1.0], [2.0, 5.0]], device=device)

    def adapted(task: Tensor) -> Tensor:
        opt = meta.sgd(0.01)
        return meta.unroll(lambda p, o, b: (0.5 * (p - b) ** 4).sum(), w, [task] * 2, opt).params

    with pytest.raises(gradkit.UnsupportedGraphError, match="value_and_grads"):
        torch.vmap(adapted)(tasks)
    with torch.no_grad():
        each = torch.vmap(adapted)(tasks)
    torch.testing.assert_close(each, torch.stack([adapted(t).detach() for t in tasks]))


@every_memory
def test_first_order_inside_of_torch_func(device: torch.device, memory: Any) -> None:
    def f(w: Tensor) -> Tensor:
        return meta.unroll(
            lambda p, o, b: (p**4).sum(), w, [0] * 2, meta.sgd(0.01), first_order=True,
            memory=memory,
        ).params.sum()  # fmt: skip

    w = torch.tensor([1.0, 2.0], device=device)
    assert_same_bits([torch.func.grad(f)(w)], [torch.ones_like(w)])


@every_memory
def test_dropout_and_captured_tensors_inside_of_torch_func(
    device: torch.device, memory: Any
) -> None:
    def dropped(w: Tensor, memory: Any) -> Tensor:
        torch.manual_seed(0)
        return meta.unroll(
            lambda p, o, b: (functional.dropout(p, 0.5) * b).pow(2).sum(),
            w, [torch.ones(8, device=device)] * 3, meta.sgd(0.1), memory=memory,
        ).params.sum()  # fmt: skip

    w = torch.ones(8, device=device)
    got = torch.func.grad(dropped)(w, memory)
    leaf = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(dropped(leaf, memory), leaf)
    torch.testing.assert_close(got, expected)

    def captured(s: Tensor) -> Tensor:
        return meta.unroll(
            lambda p, o, b: (s * (p - b) ** 2).sum(), torch.ones(2, device=device), [0.0] * 3,
            meta.sgd(0.1), memory=memory,
        ).params.sum()  # fmt: skip

    by = torch.func.grad(captured)(torch.tensor(0.5, device=device))
    torch.testing.assert_close(by, torch.tensor(-0.972, device=device))


class Writer(nn.Module):
    """Writes on a buffer in a way of its own, and computes with it."""

    count: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "add_":
                self.count.add_(1)
            case "item":
                self.count[0] = self.count[0] + 1
                self.count[1] += 1
            case "view":
                self.count[:1].add_(1)
                self.count[1:].add_(1)
            case "out":
                torch.add(self.count, 1, out=self.count)
            case "data":
                self.count.data.add_(1)
            case "foreach":
                torch._foreach_add_([self.count], 1)
        return x * self.count.sum()


@every_memory
@pytest.mark.parametrize("how", ["add_", "item", "view", "out", "data", "foreach"])
def test_what_a_step_writes_on_is_written_once(device: torch.device, memory: Any, how: str) -> None:
    def run(memory: Any) -> tuple[Tensor, Tensor]:
        module = Writer(how).to(device)
        w = tensor(1.0, 2.0, device=device)
        adapted = meta.unroll(
            lambda p, o, b: module(p).pow(2).sum(), w, [0] * 4, meta.sgd(0.001), memory=memory
        )
        (grad,) = torch.autograd.grad(adapted.params.sum(), w)
        return grad, module.count

    grad, count = run(memory)
    expected, _ = run("store")
    assert_same_bits([count], [torch.full_like(count, 4.0)])
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("memory", ["recompute", 2])
@pytest.mark.parametrize("what", ["loss", "transform", "generator", "support"])
def test_what_comes_out_otherwise_is_refused(device: torch.device, memory: Any, what: str) -> None:
    w = torch.ones(8, device=device).requires_grad_()
    source = torch.Generator().manual_seed(0)
    scale = {"now": 0.5}

    def loss(p: Tensor, o: Any, b: Any) -> Tensor:
        if what == "support":
            return (p[torch.randperm(8, generator=source)[:4].to(p.device)] ** 3).sum()
        return (p**3).sum() * (scale["now"] if what == "loss" else 1.0)

    def transform(grads: Tensor) -> Tensor:
        if what == "transform":
            return grads * scale["now"]
        if what == "generator":
            return grads * torch.rand(8, generator=source).to(grads.device)
        return grads

    adapted = meta.unroll(loss, w, [0] * 3, meta.sgd(0.01), memory=memory, grad_transform=transform)
    scale["now"] = 1.0
    weights = torch.arange(8.0, device=device)
    with pytest.raises(gradkit.UnsupportedGraphError, match="runs again"):
        torch.autograd.grad((adapted.params * weights).sum(), w)


@pytest.mark.parametrize("memory", ["recompute", 2])
def test_another_order_is_another_result(device: torch.device, memory: Any) -> None:
    """The sum of what one step comes to is the same, whichever numbers are moved."""
    w = torch.ones(8, device=device, requires_grad=True)
    source = torch.Generator().manual_seed(0)

    def loss(p: Tensor, o: Any, b: Any) -> Tensor:
        return (p[torch.randperm(8, generator=source)[:4].to(p.device)] ** 3).sum()

    adapted = meta.unroll(loss, w, [0], meta.sgd(0.1), memory=memory)
    with pytest.raises(gradkit.UnsupportedGraphError, match="runs again"):
        torch.autograd.grad(adapted.params.sum(), w)


@pytest.mark.parametrize("memory", ["recompute", 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_result_in_half_precision(
    device: torch.device, memory: Any, dtype: torch.dtype
) -> None:
    w = torch.linspace(-1, 1, 64, dtype=dtype, device=device).requires_grad_()
    scale = {"now": 0.5}

    def run() -> Tensor:
        scale["now"] = 0.5
        return meta.unroll(
            lambda p, o, b: (p**3).mean() * scale["now"], w, [0] * 3, meta.sgd(0.5), memory=memory
        ).params

    torch.autograd.grad(run().sum(), w)
    after = run()
    scale["now"] = 1.5
    with pytest.raises(gradkit.UnsupportedGraphError, match="runs again"):
        torch.autograd.grad(after.sum(), w)


@every_memory
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e40])
def test_a_loop_that_diverges_diverges(device: torch.device, memory: Any, value: float) -> None:
    w = tensor(value, 2.0, device=device)
    adapted = meta.unroll(lambda p, o, b: (p**9).sum(), w, [0] * 3, meta.sgd(1e-3), memory=memory)
    (grad,) = torch.autograd.grad(adapted.params.sum(), w)
    assert grad.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("params", ["lone", "tree"])
def test_betas_in_a_list(device: torch.device, params: str) -> None:
    w = tensor(1.0, device=device)
    given: Any = w
    loss: Any = lambda p, o, b: (p**2).sum()  # noqa: E731
    if params == "tree":
        given, loss = {"w": w}, lambda p, o, b: (p["w"] ** 2).sum()
    one, two = (
        meta.unroll(loss, given, [0] * 2, meta.adam(0.1, betas=betas)).values
        for betas in ([0.5, 0.7], (0.5, 0.7))
    )
    assert_same_bits([one], [two])


def test_params_that_can_be_read_only_once(device: torch.device) -> None:
    model = nn.Linear(2, 1).to(device)
    adapted = meta.unroll(
        lambda p, o, b: sum((x**2).sum() for x in p), model.parameters(), [0], meta.adam(0.1)
    )
    assert [p.shape for p in adapted.params] == [p.shape for p in model.parameters()]


@every_memory
def test_a_checkpoint_inside_is_not_recomputed_with_other_params(
    device: torch.device, memory: Any
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if inside:
                return checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)
            return self.layer(x).tanh()

    block, inside = Block().to(device), True
    x = torch.randn(4, 3, device=device)
    params = {n: (2 * p.detach()).requires_grad_() for n, p in block.named_parameters()}

    def loss(p: Any, o: Any, b: Any) -> Tensor:
        return torch.func.functional_call(block, p, (x,)).pow(2).sum()

    def adapted() -> Tensor:
        new = meta.unroll(loss, params, [0] * 2, meta.sgd(0.1), memory=memory).params
        return torch.stack([x.square().sum() for x in new.values()]).sum()

    got = torch.autograd.grad(adapted(), list(params.values()))
    inside = False
    torch.testing.assert_close(got, torch.autograd.grad(adapted(), list(params.values())))


@every_memory
def test_autocast_around_the_steps_only(device: torch.device, memory: Any) -> None:
    def run(memory: Any) -> Tensor:
        w = torch.full((4, 4), 0.5, dtype=torch.float32, device=device, requires_grad=True)
        x = torch.linspace(0, 1, 8, dtype=torch.float32, device=device).reshape(2, 4)
        with torch.autocast(device.type, torch.bfloat16):
            adapted = meta.unroll(
                lambda p, o, b: (x @ p).float().pow(3).mean(), w, [0] * 3, meta.sgd(0.1),
                memory=memory,
            )  # fmt: skip
        return torch.autograd.grad(adapted.params.sum(), w)[0]

    torch.testing.assert_close(run(memory), run("store"), rtol=1e-5, atol=1e-6)


def test_hyper_parameters_change_no_shape_and_no_dtype(device: torch.device) -> None:
    params = {
        "zero": torch.tensor(1.0, dtype=torch.float32, device=device),
        "three": torch.ones(3, dtype=torch.float32, device=device),
    }
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    for lr in (torch.tensor([0.1]), torch.tensor([[0.1]]), torch.tensor(0.1)):
        for opt in (meta.sgd(lr.to(device)), meta.adam(lr.to(device))):
            new, _ = opt.step(params, grads, opt.init(params))
            assert {k: (p.shape, p.dtype) for k, p in new.items()} == {
                k: (p.shape, p.dtype) for k, p in params.items()
            }
    with pytest.raises(gradkit.StructureError, match="shape"):
        meta.sgd({"zero": torch.ones(3), "three": 0.1}).step(
            params, grads, meta.sgd(1.0).init(params)
        )
    half = torch.ones(2, dtype=torch.bfloat16, device=device)
    for opt in (meta.sgd(0.1, momentum=0.9), meta.adam(0.1), meta.rmsprop(0.1)):
        new, state = opt.step(half, half.float(), opt.init(half))
        assert new.dtype == torch.bfloat16
        assert all(x.dtype == torch.bfloat16 for x in state.values() if isinstance(x, Tensor))


def test_a_state_shares_no_memory_with_what_was_given(device: torch.device) -> None:
    w, g = torch.ones(2, device=device), torch.ones(2, device=device)
    for opt in (meta.sgd(0.1, momentum=0.9), meta.sgd(0.1), meta.rmsprop(0.1), meta.adam(0.1)):
        state = opt.init(w)
        _, new = opt.step(w, g, state)
        _, newer = opt.step(w, g, new)
        kept = [x.clone() for x in newer.values() if isinstance(x, Tensor)]
        for x in (g.clone(), *(x for x in new.values() if isinstance(x, Tensor))):
            x.mul_(100)
        assert_same_bits([x for x in newer.values() if isinstance(x, Tensor)], kept)
    _, state = meta.sgd(0.1, momentum=0.9).step(w, g, {"momentum_buffer": None, "step": 0})
    g.mul_(7)
    assert_same_bits([state["momentum_buffer"]], [torch.ones_like(w)])


def test_params_in_a_tuple_take_learning_rates_in_a_tuple(device: torch.device) -> None:
    w = (tensor(1.0, device=device), tensor(2.0, device=device))
    adapted = meta.unroll(
        lambda p, o, b: (p[0] * p[1]).sum(), w, [0], meta.sgd((0.1, 0.2)), has_aux=False
    )
    torch.testing.assert_close(
        [p.detach() for p in adapted.params],
        [torch.tensor([0.8], device=device), torch.tensor([1.8], device=device)],
    )


@every_memory
def test_aux_is_constant(device: torch.device, memory: Any) -> None:
    w = tensor(1.0, device=device)
    adapted = meta.unroll(
        lambda p, o, b: (p.sum(), {"x": p * 2, "n": b}), w, [1, 2], meta.sgd(0.1),
        memory=memory, has_aux=True,
    )  # fmt: skip
    assert [aux["n"] for aux in adapted.aux] == [1, 2]
    assert not any(aux["x"].requires_grad for aux in adapted.aux)


def ridge(w: Tensor, s: Tensor) -> Tensor:
    return ((w - 3) ** 2 + s * w**2).sum()


def solved(w: Tensor, s: Tensor) -> Tensor:
    return 3 / (1 + s) * torch.ones_like(w)


def test_an_implicit_gradient_is_not_differentiated_again(device: torch.device) -> None:
    s = torch.tensor(0.5, device=device, requires_grad=True)
    w = meta.implicit(solved, ridge)(torch.zeros(1, device=device), s)
    with pytest.raises(gradkit.UnsupportedGraphError, match="create_graph"):
        torch.autograd.grad(w.sum() + s**3, s, create_graph=True)


def test_an_implicit_gradient_inside_of_transforms_is_refused(device: torch.device) -> None:
    find = meta.implicit(solved, ridge)
    s, start = torch.tensor(0.5, device=device), torch.zeros(1, device=device)
    for call in (
        lambda: torch.func.jvp(lambda s: find(start, s), (s,), (s,)),
        lambda: torch.func.grad(lambda s: find(start, s).sum())(s),
        lambda: torch.vmap(lambda s: find(start, s))(s[None]),
    ):
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.func"):
            call()


def test_an_inner_loss_with_a_tensor_from_outside_is_refused(device: torch.device) -> None:
    c = torch.tensor(3.0, device=device, requires_grad=True)
    find = meta.implicit(solved, lambda w, s: ((w - c) ** 2 + s * w**2).sum())
    with pytest.raises(gradkit.UnsupportedGraphError, match="from outside"):
        find(torch.zeros(1, device=device), torch.tensor(0.5, device=device, requires_grad=True))


def test_frozen_and_tied_params_at_a_minimum(device: torch.device) -> None:
    s = torch.tensor(0.5, device=device, requires_grad=True)
    frozen = nn.Parameter(torch.full((1,), 2.0, device=device), requires_grad=False)
    params = {"a": torch.zeros(1, device=device), "b": frozen, "n": None}

    def loss(p: Any, s: Tensor) -> Tensor:
        return ((p["a"] - s * p["b"]) ** 2 + 0.5 * (p["b"] - s * p["a"]) ** 2).sum()

    def solve(p: Any, s: Tensor) -> Any:
        return {**p, "a": (2 * s + s) * p["b"] / (2 + s**2)}

    found = meta.implicit(solve, loss, tol=1e-12)(params, s)
    assert found["n"] is None
    assert not found["b"].requires_grad
    (grad,) = torch.autograd.grad(found["a"].sum(), s)
    (expected,) = torch.autograd.grad((3 * s * 2 / (2 + s**2)).sum(), s)
    torch.testing.assert_close(grad, expected)
    x = torch.zeros(1, device=device)

    def tied(p: Any, s: Tensor) -> Tensor:
        return ((p["a"] - s) ** 2 + (p["b"] - 2 * s) ** 2 + p["a"] * p["b"]).sum()

    def minimum(p: Any, s: Tensor) -> Any:
        return {"a": s.expand(1), "b": s.expand(1)}

    both = meta.implicit(minimum, tied)({"a": x, "b": x}, s)
    (grad,) = torch.autograd.grad(both["a"].sum(), s)
    torch.testing.assert_close(grad, torch.tensor(1.0, device=device))
    apart = {"a": torch.zeros(1, device=device), "b": torch.ones(1, device=device)}
    with pytest.raises(gradkit.StructureError, match="tied"):
        meta.implicit(lambda p, s: apart, tied)({"a": x, "b": x}, s)


def test_a_solver_may_write_on_where_it_starts(device: torch.device) -> None:
    start = torch.zeros(2, device=device)
    s = torch.tensor(0.5, device=device, requires_grad=True)

    def descend(w: Tensor, s: Tensor) -> Tensor:
        opt = torch.optim.SGD([w.requires_grad_()], lr=0.2)
        for _ in range(100):
            opt.zero_grad()
            ridge(w, s).backward()
            opt.step()
        return w

    found = meta.implicit(descend, ridge)(start, s)
    torch.testing.assert_close(found, solved(start, s))
    assert_same_bits([start], [torch.zeros_like(start)])


def test_a_solve_may_write_on_its_right_hand_side(device: torch.device) -> None:
    s = torch.tensor(0.5, device=device, requires_grad=True)

    def solve(product: Any, v: Tensor) -> Tensor:
        return v.div_(2 * (1 + s.detach()))

    for cotangent in (torch.ones(2, device=device), torch.ones((), device=device).expand(2)):
        w = meta.implicit(solved, ridge, solve=solve)(torch.zeros(2, device=device), s)
        (grad,) = torch.autograd.grad(w, s, cotangent)
        (expected,) = torch.autograd.grad(solved(torch.zeros(2, device=device), s).sum(), s)
        torch.testing.assert_close(grad, expected)
        assert_same_bits([cotangent], [torch.ones(2, device=device)])


def test_a_solver_that_diverges_gives_what_it_came_to(device: torch.device) -> None:
    s = torch.tensor(0.5, device=device, requires_grad=True)
    w = meta.implicit(lambda w, s: w / 0, ridge)(torch.zeros(2, device=device), s)
    assert w.isnan().all()


def test_an_inner_loss_that_has_changed_is_refused(device: torch.device) -> None:
    s = torch.tensor(0.5, device=device, requires_grad=True)
    c = 1.0
    start = torch.zeros(1, device=device)
    find = meta.implicit(
        lambda w, s: c / (1 + s) * torch.ones_like(w), lambda w, s: ((w - c) ** 2 + s * w**2).sum()
    )
    w = find(start, s)
    c = 3.0
    with pytest.raises(gradkit.UnsupportedGraphError, match="runs again"):
        w.sum().backward()
    outer = {"s": s, "x": torch.ones(1, device=device)}
    w = meta.implicit(
        lambda w, o: o["x"] / (1 + o["s"]), lambda w, o: ((w - o["x"]) ** 2 + o["s"] * w**2).sum()
    )(start, outer)
    outer["x"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()
