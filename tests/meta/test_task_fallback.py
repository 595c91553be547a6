"""Where torch.vmap cannot batch a function: the loop that it stands for, or that loop's error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import gradkit
from gradkit import func, meta
from tests.helpers import unchanged

D = torch.float64
TASKS = 3


class Plus(torch.autograd.Function):
    """Without a rule for vmap."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def in_place(w: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=D, device=x.device)
    total += x.sum().detach()
    return total * w.square().sum()


UNBATCHABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": lambda w, x: (w * x).sin().sum() * x.sum().item(),
    "a condition": lambda w, x: (w * x).sum() if x[0] > 0 else w.square().sum(),
    "a mask": lambda w, x: (w * x)[x > 0].sum() + w.square().sum(),
    "in place": in_place,
    "a backward pass": lambda w, x: (w * Plus.apply(x * w)).sum(),
}
every_function = pytest.mark.parametrize("name", UNBATCHABLE)


def make(device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(TASKS, 4, dtype=D, device=device)
    x[:, 0] = torch.tensor([1.0, -1.0, 2.0])
    return torch.randn(4, dtype=D, device=device), x


def each(fn: Callable[..., Tensor], w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loop, by plain torch."""
    leaf = w.clone().requires_grad_()
    values = torch.stack([fn(leaf, one) for one in x])
    grads = [torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in values]
    return values.detach(), torch.stack(grads)


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what a call returns, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert all(w.category is gradkit.GradkitWarning for w in caught)
    assert all(w.filename == __file__ for w in caught)
    return result, [str(w.message) for w in caught]


@every_function
def test_it_is_a_loop_with_one_warning(device: torch.device, name: str) -> None:
    fn, (w, x) = UNBATCHABLE[name], make(device)
    values, grads = each(fn, w, x)
    with unchanged(w, x):
        (value, grad), texts = warned(lambda: meta.mean_value_and_grads(fn, w, x))
        torch.testing.assert_close((value, grad), (values.mean(), grads.mean(0)))
        (text,) = texts
        assert text.startswith("mean_value_and_grads fell back from torch.vmap to a loop: ")
        for chunk_size in (None, 2):
            by_sample = func.per_sample_grads(fn, chunk_size=chunk_size)
            rows, texts = warned(partial(by_sample, w, x))
            torch.testing.assert_close(rows, grads)
            (text,) = texts
            assert text.startswith("per_sample_grads fell back from torch.vmap to a loop: ")


def test_samples_need_not_reach_the_same(device: torch.device) -> None:
    _, x = make(device)
    params = {name: torch.ones((), dtype=D, device=device) for name in ("a", "b", "none")}

    def fn(p: Any, x: Tensor) -> Tensor:
        return p["a"] * x[1] if x[0] > 0 else p["b"] * x[1]

    zero = torch.zeros((), dtype=D, device=device)
    for create_graph in (None, False):
        call = func.per_sample_grads(fn, unused="none", create_graph=create_graph)
        grads, _ = warned(partial(call, params, x))
        assert grads["none"] is None
        assert grads["a"].tolist() == torch.stack([x[0, 1], zero, x[2, 1]]).tolist()
        assert grads["b"].tolist() == torch.stack([zero, x[1, 1], zero]).tolist()


def test_the_dimensions_of_the_tasks(device: torch.device) -> None:
    w, x = make(device)
    shared = torch.tensor(2.0, dtype=D, device=device)

    def fn(w: Tensor, task: Any) -> Tensor:
        return (w * task["x"]).sum() * task["shared"].item() * task["x"][0].item()

    values, grads = each(lambda w, x: fn(w, {"x": x, "shared": shared}), w, x)
    tasks, in_dims = {"x": x.T, "shared": shared, "note": "text"}, {"x": 1, "shared": None}
    got, _ = warned(
        lambda: meta.mean_value_and_grads(
            fn, w, tasks, in_dims={**in_dims, "note": None}, tasks_at_once=2
        )
    )
    torch.testing.assert_close(got, (values.mean(), grads.mean(0)))


def test_errors_of_the_function_raise_as_they_are(device: torch.device) -> None:
    w, x = make(device)
    late: list[int] = []

    def shapes(w: Tensor, x: Tensor) -> Tensor:
        return (torch.ones(3, 5, dtype=D, device=w.device) @ w).sum()

    def second(w: Tensor, x: Tensor) -> Tensor:
        late.append(1)
        if x[0].item() < 0:
            raise KeyError("mine")
        return (w * x).sum()

    for call in (
        lambda fn: meta.mean_value_and_grads(fn, w, x),
        lambda fn: func.per_sample_grads(fn)(w, x),
    ):
        with unchanged(w, x):
            with pytest.raises(RuntimeError, match="size mismatch") as caught:
                call(shapes)
            assert type(caught.value) is RuntimeError
            assert caught.value.__context__ is None
            late.clear()
            with pytest.raises(KeyError, match="mine"):
                call(second)
            assert len(late) == 3, "once in the vmap, and for two in the loop"
    assert torch._C._functorch.maybe_current_level() is None


def test_aux_of_a_loop_is_stacked(device: torch.device) -> None:
    w, x = make(device)

    def fn(w: Tensor, x: Tensor) -> Any:
        return (w * x).sum() * x.sum().item(), {"x": x * 2, "w": w, "note": "text", "none": None}

    for loop in (
        lambda fn: meta.mean_value_and_grads(fn, w, x, has_aux=True)[0][1],
        lambda fn: func.per_sample_grads(fn, has_aux=True)(w, x)[1],
    ):
        aux, _ = warned(partial(loop, fn))
        torch.testing.assert_close((aux["x"], aux["w"]), (x * 2, w.expand(TASKS, 4)))
        assert (aux["note"], aux["none"]) == ("text", None)
        for other in (lambda x: x.sum().item(), lambda x: x[: 1 + int(x[0] > 0)]):
            with pytest.raises(gradkit.StructureError, match=r"(?s)^aux: .*loss.detach\(\)"):
                loop(lambda w, x, other=other: (fn(w, x)[0], {"a": other(x)}))


class Noisy(nn.Module):
    """Counts its calls, assigns a buffer, draws numbers, and asks for one."""

    sum: Tensor

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.weight, self.asks, self.calls = nn.Parameter(torch.ones(4)), asks, 0
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sum = self.sum + x
        kept = functional.dropout(self.weight, 0.5)
        return (kept * self.sum).sum() * self.calls * (x.sum().item() if self.asks else 1.0)


def test_each_starts_from_the_same_module_and_random_state(device: torch.device) -> None:
    _, x = make(device)
    for asks in (True, False):
        module = Noisy(asks).to(device, D)
        params = {"weight": module.weight.detach().clone()}

        def fn(p: Any, x: Tensor, module: nn.Module = module) -> Tensor:
            out: Tensor = functional_call(module, p, (x,))
            return out

        def run(call: Callable[..., Any], randomness: Any) -> Any:
            torch.manual_seed(3)
            return warned(lambda: call(randomness))[0]

        def mean(randomness: Any, fn: Any = fn, params: Any = params) -> Any:
            return meta.mean_value_and_grads(fn, params, x, randomness=randomness)[1]

        def rows(randomness: Any, fn: Any = fn, params: Any = params) -> Any:
            return func.per_sample_grads(fn, randomness=randomness)(params, x)

        before = dict(vars(module)), module.sum
        for call in (mean, rows):
            masks = []
            for i in range(TASKS):
                if i == 0 or not asks:
                    torch.manual_seed(3)
                masks.append(functional.dropout(params["weight"], 0.5))
            factor = x.sum(1) if asks else x.new_ones(TASKS)
            same = masks[0] * x * factor[:, None]
            got = run(call, "same")["weight"]
            torch.testing.assert_close(got, same if call is rows else same.mean(0))
            if asks:  # a loop draws as a loop does
                different = torch.stack(masks) * x * factor[:, None]
                got = run(call, "different")["weight"]
                torch.testing.assert_close(got, different if call is rows else different.mean(0))
            with pytest.raises(gradkit.UnsupportedGraphError, match='randomness="different"'):
                run(call, "error")
            assert (dict(vars(module)), module.sum) == before
            assert not module.sum.any()


def test_the_result_is_differentiated_as_that_of_the_vmap(device: torch.device) -> None:
    w, x = make(device)
    scale = torch.tensor(2.0, dtype=D, device=device, requires_grad=True)

    def of_scale(scale: Tensor, fn: Callable[..., Tensor]) -> Tensor:
        scaled = lambda w, x: (fn(w, x) * scale).sin()  # noqa: E731
        value, grad = meta.mean_value_and_grads(scaled, w, x)
        rows = func.per_sample_grads(scaled)(w, x)
        return value + grad.sum() + rows.square().sum()

    def eagerly(fn: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(of_scale(scale, fn), scale)[0]

    slopes = []
    for fn in (lambda w, x: (w * x).sum() * x[0].item(), lambda w, x: (w * x).sum() * x[0]):
        slopes.append(warned(partial(eagerly, fn))[0])
        slopes.append(warned(partial(torch.func.grad(of_scale), scale.detach(), fn))[0])
    torch.testing.assert_close(slopes, [slopes[-1]] * 4)


def test_views_of_tensors_from_outside_are_refused(device: torch.device) -> None:
    w, x = make(device)
    shared = torch.zeros(4, dtype=D, device=device)
    part = shared[1:]

    def reads(w: Tensor, x: Tensor) -> Tensor:
        shared.add_(x)
        return (w[1:] * part).sum()

    def writes(w: Tensor, x: Tensor) -> Tensor:
        shared[0].add_(x[0])
        return (w * shared).sum()

    def returned(w: Tensor, x: Tensor) -> Any:
        shared.add_(x)
        return (w * shared).sum(), part

    for fn in (reads, writes):
        for call in (
            lambda fn=fn: meta.mean_value_and_grads(fn, w, x),
            lambda fn=fn: func.per_sample_grads(fn)(w, x),
        ):
            with (
                unchanged(w, x, shared),
                pytest.raises(
                    gradkit.UnsupportedGraphError, match=r"by views|on a tensor from outside"
                ),
            ):
                call()
    with unchanged(w, x, shared), pytest.raises(gradkit.UnsupportedGraphError, match="by views"):
        meta.mean_value_and_grads(returned, w, x, has_aux=True)


@pytest.mark.parametrize("randomness", [None, "others", True])
def test_randomness_is_checked(device: torch.device, randomness: Any) -> None:
    w, x = make(device)
    with pytest.raises(gradkit.OptionError, match=r"^randomness: "):
        meta.mean_value_and_grads(UNBATCHABLE["item"], w, x, randomness=randomness)


@pytest.mark.parametrize("create_graph", [None, False])
def test_a_task_whose_loss_is_constant_has_no_gradient(
    device: torch.device, create_graph: bool | None
) -> None:
    w, x = make(device)
    w.requires_grad_()

    def by_item(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).square().sum() if x[0].item() > 0 else x.sum()

    def by_where(w: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[0] > 0, (w * x).square().sum(), x.sum())

    with pytest.warns(gradkit.GradkitWarning, match="to a loop"):
        ours = meta.mean_value_and_grads(by_item, w, x, create_graph=create_graph)
    expected = meta.mean_value_and_grads(by_where, w, x, create_graph=create_graph)
    torch.testing.assert_close(ours, expected)
    if create_graph is None:
        again = [torch.autograd.grad(grad.sum() + value, w) for value, grad in (ours, expected)]
        torch.testing.assert_close(*again)
    with pytest.raises(gradkit.DetachedLossError, match="does not depend"):
        meta.mean_value_and_grads(by_item, w, -x.abs())
    with pytest.raises(gradkit.OptionError, match=r"^meta_loss_fn: expected a function"):
        meta.mean_value_and_grads(3, w, x)
