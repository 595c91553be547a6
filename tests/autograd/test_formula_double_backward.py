"""Fused attention, whose gradients torch cannot differentiate, is right by its formula."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import gradkit
from gradkit import func, meta
from gradkit._core.graph import Subgraph
from gradkit._torch_bugs.attention import attention
from gradkit._torch_bugs.node_formulas import NODE_FORMULAS, has_formula
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
Tensors = dict[str, Tensor]
Loss = Callable[..., Tensor]
L, S = 4, 5
# The arguments of attention; those of a mask are of its rows and columns.
OPTIONS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": lambda q: {},
    "causal": lambda q: {"is_causal": True},
    "scale": lambda q: {"scale": 0.3},
    "mask": lambda q: {"attn_mask": q.new_ones(L, S).tril() > 0},
    "a query that sees nothing": lambda q: {
        "attn_mask": (torch.arange(L, device=q.device) > 0)[:, None].expand(L, S)
    },
    "bias": lambda q: {"attn_mask": torch.linspace(-1, 1, L * S).to(q).view(1, 1, L, S)},
    "grouped": lambda q: {"enable_gqa": True},
}


def dtype_of(device: torch.device) -> torch.dtype:
    """The most precise one that fused kernels of a device have."""
    return torch.float64 if device.type == "cpu" else torch.float32


def problem(device: torch.device, name: str) -> tuple[Loss, Tensors]:
    torch.manual_seed(0)
    options = {"device": device, "dtype": dtype_of(device)}
    heads = 1 if name == "grouped" else 2
    params = {
        "q": torch.randn(2, 2, L, 4, **options),
        "k": torch.randn(2, heads, S, 4, **options),
        "v": torch.randn(2, heads, S, 4, **options),
    }

    def loss(p: Tensors, *_: Any) -> Tensor:
        kwargs = OPTIONS[name](p["q"])
        out = functional.scaled_dot_product_attention(p["q"].sin(), p["k"], p["v"], **kwargs)
        return out.square().sum()

    return loss, params


def without_kernels(loss: Loss) -> Loss:
    def plain(*args: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return loss(*args)

    return plain


def leaves(params: Tensors) -> Tensors:
    return {name: p.clone().requires_grad_() for name, p in params.items()}


def sines(tree: Tensors) -> Tensor:
    return torch.stack([x.sin().sum() for x in tree.values()]).sum()


def slope(loss: Loss) -> Loss:
    return lambda p: sines(func.value_and_grads(loss)(p)[1])


def nested(loss: Loss, params: Tensors) -> Tensors:
    return func.value_and_grads(slope(loss))(params)[1]


def third(loss: Loss, params: Tensors) -> Tensors:
    return func.value_and_grads(slope(slope(loss)))(params)[1]


def func_then_eager(loss: Loss, params: Tensors, create_graph: bool | None = None) -> Tensors:
    params = leaves(params)
    grads = func.value_and_grads(loss, create_graph=create_graph)(params)[1]
    return gradkit.value_and_grads(sines(grads), params)[1]


def by_unroll(loss: Loss, params: Tensors, memory: Any = "store") -> Tensors:
    params = leaves(params)
    adapted = meta.unroll(loss, params, [None] * 2, meta.sgd(lr=0.1), memory=memory)
    return gradkit.value_and_grads(sines(adapted.params), params)[1]


def twice_by_recomputation(loss: Loss, params: Tensors) -> Tensors:
    params = leaves(params)
    adapted = meta.unroll(loss, params, [None], meta.sgd(lr=0.1), memory="recompute")
    _, grads = gradkit.value_and_grads(sines(adapted.params), params, create_graph=True)
    return gradkit.value_and_grads(sines(grads), params)[1]


def by_implicit(loss: Loss, params: Tensors) -> Tensors:
    def inner(p: Tensors, weight: Tensor) -> Tensor:
        return loss(p) + weight * sum(x.square().sum() for x in p.values())

    find = meta.implicit(lambda p, _: p, inner, maxiter=3, damping=20.0)
    weight = torch.ones_like(params["q"][0, 0, 0, 0], requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)  # it is no minimum
        return {"weight": gradkit.value_and_grads(sines(find(params, weight)), weight)[1]}


def by_tasks(loss: Loss, params: Tensors) -> Tensors:
    def meta_loss(p: Tensors, task: Tensor) -> Tensor:
        here = {**p, "q": p["q"] * task}
        return loss(meta.unroll(loss, here, [None] * 2, meta.sgd(lr=0.1)).params)

    tasks = torch.linspace(0.5, 1.5, 3).to(params["q"])
    return meta.mean_value_and_grads(meta_loss, params, tasks)[1]


def per_sample(loss: Loss, params: Tensors) -> Tensors:
    def of_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss({"q": q[None], "k": k[None], "v": v[None]})

    def penalty(p: Tensors) -> Tensor:
        by_sample = func.per_sample_grads(of_sample, (0, 1), in_dims=0)
        return sum(grad.sin().sum() for grad in by_sample(p["q"], p["k"], p["v"]))

    return func.value_and_grads(penalty)(params)[1]


WAYS: dict[str, Callable[[Loss, Tensors], Tensors]] = {
    "func, then eager": func_then_eager,
    "func that says so, then eager": lambda f, p: func_then_eager(f, p, create_graph=True),
    "unroll": by_unroll,
    "unroll, recomputed": lambda f, p: by_unroll(f, p, "recompute"),
    "unroll, nested recomputation": lambda f, p: by_unroll(f, p, 2),
    "twice by recomputation": twice_by_recomputation,
    "implicit": by_implicit,
    "tasks": by_tasks,
    "samples": per_sample,
    "third": third,
}


def assert_by_formula(way: Callable[[Loss, Tensors], Tensors], loss: Loss, params: Tensors) -> None:
    kinds = {kind.__name__ for kind in Subgraph([loss(leaves(params))]).kinds}
    assert not kinds.isdisjoint(NODE_FORMULAS), "attention was not by a fused kernel"
    expected = way(without_kernels(loss), params)
    tolerance = 1e-10 if params["q"].dtype == torch.float64 else 1e-4
    torch.testing.assert_close(way(loss, params), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_second_derivative_of_fused_attention(device: torch.device, name: str) -> None:
    assert_by_formula(nested, *problem(device, name))


@pytest.mark.parametrize("way", WAYS)
def test_wherever_gradkit_runs_the_forward_pass(device: torch.device, way: str) -> None:
    assert_by_formula(WAYS[way], *problem(device, "mask"))


EAGER = ("unroll", "unroll, recomputed", "unroll, nested recomputation", "implicit")


@pytest.mark.parametrize("way", [*EAGER, "twice by recomputation"])
def test_where_saved_tensors_have_hooks(device: torch.device, way: str) -> None:
    """As in `save_on_cpu`: torch.func takes none."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert_by_formula(WAYS[way], *problem(device, "mask"))


def test_a_mask_of_each_task(device: torch.device) -> None:
    _, params = problem(device, "bias")
    masks = torch.linspace(-2, 2, 3 * L * S).to(params["q"]).view(3, 1, 1, L, S)

    def run(backends: list[SDPBackend]) -> Tensor:
        def meta_loss(p: Tensors, mask: Tensor) -> Tensor:
            def loss(p: Tensors, _: Any, mask: Tensor) -> Tensor:
                q, k, v = p.values()
                mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                return mixed.square().sum()

            return sines(meta.unroll(loss, p, [mask] * 2, meta.sgd(lr=0.1)).params)

        with sdpa_kernel(backends):
            return meta.mean_value_and_grads(meta_loss, params, masks)[1]["q"]

    every = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    torch.testing.assert_close(run(every), run([SDPBackend.MATH]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("create_graph", [None, True])
def test_gradients_keep_the_bits_of_the_kernel(
    device: torch.device, create_graph: bool | None
) -> None:
    loss, params = problem(device, "causal")
    params = leaves(params)
    expected = torch.autograd.grad(loss(params), list(params.values()))
    _, grads = func.value_and_grads(loss, create_graph=create_graph)(params)
    assert_same_bits([g.detach() for g in grads.values()], expected)
    adapted = meta.unroll(loss, params, [None], meta.sgd(lr=1.0))
    right = [p.detach() - g for p, g in zip(params.values(), expected, strict=True)]
    assert_same_bits([p.detach() for p in adapted.params.values()], right)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_formula_is_what_torch_computes(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    _, params = problem(device, name)
    q, k, v = (p.to(dtype) for p in params.values())
    options = OPTIONS[name](q)
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    got = attention(q, k, v, **options)
    assert got.dtype == dtype
    tolerance = 1e-10 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_with_dropout_there_is_no_formula(device: torch.device) -> None:
    def node(dropout: float) -> Any:
        name = "ScaledDotProductFlashAttentionBackward0"
        return type(name, (), {"_saved_dropout_p": dropout})()

    assert has_formula(node(0.0))
    assert not has_formula(node(0.1))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


def normalized() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(4, 4))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor] | None]] = {
    "encoder": (encoder, None),
    "weight_norm": (normalized, None),
    "hardsigmoid": (lambda: nn.Linear(4, 4), functional.hardsigmoid),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_step_of_a_module(device: torch.device, name: str) -> None:
    """Against differences of the inner loss's gradient, along the cotangent."""
    torch.manual_seed(0)
    make, activation = MODULES[name]
    dtype = dtype_of(device)
    module, x = make().to(device, dtype), torch.randn(2, 3, 4, device=device, dtype=dtype)

    def loss(p: Tensors, *_: Any) -> Tensor:
        out = functional_call(module, p, (x,))
        return (out if activation is None else activation(out)).sin().square().sum()

    params = leaves({name: p.detach() for name, p in module.named_parameters()})
    adapted = meta.unroll(loss, params, [None], meta.sgd(lr=1.0))
    along = {name: torch.randn_like(p) for name, p in params.items()}
    _, grads = gradkit.value_and_grads(gradkit.tree.dot(adapted.params, along), params)
    step = 1e-5 if dtype == torch.float64 else 1e-3
    ahead, behind = (
        torch.func.grad(loss)({n: p.detach() + s * along[n] for n, p in params.items()})
        for s in (step, -step)
    )
    for key, grad in grads.items():
        hessian_product = (ahead[key] - behind[key]) / (2 * step)
        tolerance = 1e-5 if dtype == torch.float64 else 1e-2
        right = along[key] - hessian_product
        torch.testing.assert_close(grad, right, rtol=tolerance, atol=tolerance)


def test_a_hook_elsewhere_changes_nothing(device: torch.device) -> None:
    """Torch's kernel for passes without a graph rounds otherwise than what has one."""
    elsewhere = torch.ones(1, device=device, requires_grad=True)
    for seed in range(20):
        torch.manual_seed(seed)
        module = normalized().to(device)
        loss = module(torch.randn(6, 4, device=device)).square().sum()
        params = list(module.parameters())
        options: Any = {"create_graph": True, "retain_graph": True}
        _, without = gradkit.value_and_grads(loss, params, **options)
        handle = elsewhere.register_hook(lambda grad: grad)
        _, grads = gradkit.value_and_grads(loss, params, **options)
        handle.remove()
        assert_same_bits(grads, without)
