"""What torch has no second derivative of is named by the first call, before anything has run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradkit
from gradkit import func, meta
from gradkit._checks.higher_derivatives import _REFUSED
from gradkit._compat.versions import is_mended
from gradkit._core.graph import Subgraph
from gradkit._torch_bugs.missing import WITHOUT_SECOND
from gradkit._torch_bugs.node_formulas import NODE_FORMULAS
from tests.helpers import unchanged


def attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x * 2, x.sin())


def ctc(x: Tensor) -> Tensor:
    labels = torch.tensor([[1, 2], [2, 1]], device=x.device)
    sizes = torch.tensor([4, 4], device=x.device)
    return functional.ctc_loss(x.flatten(2).log_softmax(-1), labels, sizes, sizes // 2)


def classes(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def indices(x: Tensor) -> Tensor:
    return torch.tensor([[0, 1], [1, 1]], device=x.device)


# Of a tensor [4, 2, 3, 8]. What the error names, and a way out of those that it names.
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]] = {
    "scaled_dot_product_attention": (attention, None),
    "hardsigmoid": (functional.hardsigmoid, lambda x: functional.relu6(x + 3) / 6),
    "embedding_bag": (
        lambda x: functional.embedding_bag(indices(x), x.flatten(1), mode="sum"),
        lambda x: functional.embedding(indices(x), x.flatten(1)).sum(1),
    ),
    "ctc_loss": (ctc, None),
    "cdist": (
        lambda x: torch.cdist(x.flatten(1), x.flatten(1).sin() + 1, p=1.0),
        lambda x: (x.flatten(1)[:, None] - x.flatten(1).sin() - 1).norm(1, dim=-1),
    ),
    "pdist": (lambda x: functional.pdist(x.flatten(1)), None),
    "multi_margin_loss": (
        lambda x: functional.multi_margin_loss(x.flatten(1).sin(), classes(x)),
        None,
    ),
    "multilabel_margin_loss": (
        lambda x: functional.multilabel_margin_loss(
            x.flatten(1).sin(), classes(x)[:, None].expand(-1, 48)
        ),
        None,
    ),
}
BY_NOW = {"cdist", "pdist"} if is_mended("CdistBackward0") else set()
MISSING = [name for name in OPERATIONS if name not in BY_NOW]
every_operation = pytest.mark.parametrize("name", MISSING)
BY_FORMULA = {"scaled_dot_product_attention", "hardsigmoid"}
refused = pytest.mark.parametrize("name", [name for name in MISSING if name not in BY_FORMULA])


def point(device: torch.device) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 2, 3, 8, device=device, requires_grad=True)


@every_operation
def test_torch_does_not_have_it(device: torch.device, name: str) -> None:
    """Fails when torch has: then its kinds of nodes can leave the table."""
    x = point(device)
    loss = OPERATIONS[name][0](x).square().sum()
    kinds = {kind.__name__ for kind in Subgraph([loss]).kinds}
    assert not kinds.isdisjoint(WITHOUT_SECOND.keys() | NODE_FORMULAS.keys())
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        torch.autograd.grad(grad.square().sum(), x)


@pytest.mark.skipif(not BY_NOW, reason="torch has them since 2.14")
@pytest.mark.parametrize("name", ["cdist", "pdist"])
def test_what_torch_has_by_now_is_right(device: torch.device, name: str) -> None:
    x = point(device).detach().double()
    fn = OPERATIONS[name][0]
    func.check_grads(fn, x, modes=["reverse"])
    leaf = x.clone().requires_grad_()
    _, grad = gradkit.value_and_grads(fn(leaf).sin().sum(), leaf, create_graph=True)
    _, second = gradkit.value_and_grads(grad.square().sum(), leaf)
    first = torch.func.grad(lambda x: fn(x).sin().sum())
    torch.testing.assert_close(second, torch.func.grad(lambda x: first(x).square().sum())(x))


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "value_and_grads": lambda loss, x: gradkit.value_and_grads(loss, x, create_graph=True),
    "per_loss_grads": lambda loss, x: gradkit.per_loss_grads(
        [loss, 2 * loss], x, create_graph=True
    ),
    "simultaneous_grads": lambda loss, x: gradkit.simultaneous_grads(
        {"x": loss}, {"x": x}, create_graph=True
    ),
    "vjp": lambda losses, x: gradkit.vjp(
        {"losses": losses}, x, {"losses": torch.ones_like(losses)}, create_graph=True
    ),
    "backward_": lambda loss, x: gradkit.backward_(loss, x, create_graph=True),
    "backward_ to all leaves": lambda loss, x: gradkit.backward_(loss, create_graph=True),
}


@refused
@pytest.mark.parametrize("call", CALLS)
def test_the_eager_call_that_asks_for_a_graph_raises(
    device: torch.device, name: str, call: str
) -> None:
    x = point(device)
    loss = OPERATIONS[name][0](x).square().sum()
    with (
        unchanged(x),
        pytest.raises(gradkit.UnsupportedGraphError, match=f"(?s)losses.*{name}.*does not have"),
    ):
        CALLS[call](loss, x)
    gradkit.value_and_grads(loss, x)  # the first derivative is right, and the graph still there


def test_a_graph_that_does_not_lead_to_the_params_is_not_refused(device: torch.device) -> None:
    x, w = point(device), torch.ones(1, device=device, requires_grad=True)
    loss = (attention(x).sum() + w**3).sum()
    _, grad = gradkit.value_and_grads(loss, w, create_graph=True)
    assert gradkit.value_and_grads(grad.sum(), w)[1] == 6


def test_what_is_below_the_params_is_not_refused(device: torch.device) -> None:
    """The pass ends at them, and does not differentiate what they were computed by."""
    w = torch.randn(4, 3, device=device, requires_grad=True)
    y = torch.cdist(w.sin(), torch.randn(5, 3, device=device))
    (grad,) = gradkit.value_and_grads((y**3).sum(), [y], create_graph=True)[1]
    assert torch.equal(grad, torch.autograd.grad((y**3).sum(), y)[0])


ATTENTION: dict[str, Any] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.ones(3, 3, dtype=torch.bool).tril()},
    "float mask": {"attn_mask": torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)},
    "a row that may attend to nothing": {"attn_mask": torch.ones(3, 3).tril(-1) > 0},
    "grouped queries": {"enable_gqa": True},
    "dropout": {"dropout_p": 0.4},
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("hooked", [False, True])
def test_every_order_of_attention_in_eager_passes(
    device: torch.device, kind: str, hooked: bool
) -> None:
    """The first order has the bits of `.backward()`; the others are those of the math kernel."""
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in ATTENTION[kind].items()}
    torch.manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 2 if kind == "grouped queries" else 4, 3, 8)
    q, k = (torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes)

    handles: list[Any] = []

    def loss() -> Tensor:
        torch.manual_seed(1)
        out = functional.scaled_dot_product_attention(q, k, k.sin(), **options)
        if hooked:
            handles.append(out.register_hook(lambda g: 2 * g))
        return out.sin().sum()

    def remove_hooks() -> None:
        """Remove what would run again in the derivative of what it has changed."""
        while handles:
            handles.pop().remove()

    def orders(create_graph: Callable[..., Any]) -> list[Tensor]:
        first = create_graph(loss(), [q, k])
        remove_hooks()
        second = create_graph(first[0].square().sum() + first[1].sin().sum(), [q, k])
        return [*first, *second, *create_graph(second[0].square().sum(), [q, k])]

    ours = orders(lambda x, by: gradkit.value_and_grads(x, by, create_graph=True)[1])
    with sdpa_kernel(SDPBackend.MATH):
        right = orders(lambda x, by: torch.autograd.grad(x, by, create_graph=True))
    torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)
    first = torch.autograd.grad(loss(), [q, k])
    assert all(map(torch.equal, ours, first))
    gradkit.backward_(loss(), [q, k], create_graph=True)
    remove_hooks()
    penalty = gradkit.tree.dot([q.grad, k.grad], [q.grad, k.grad])
    again = gradkit.value_and_grads(penalty, [q, k])[1]
    q.grad = k.grad = None
    with sdpa_kernel(SDPBackend.MATH):
        grads = torch.autograd.grad(loss(), [q, k], create_graph=True)
        remove_hooks()
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), [q, k])
    torch.testing.assert_close(again, list(seconds), rtol=1e-10, atol=1e-10)


def test_a_hook_on_the_node_is_in_no_formula(device: torch.device) -> None:
    x = point(device)
    out = attention(x)
    out.grad_fn.register_hook(lambda grads, _: tuple(g if g is None else 10 * g for g in grads))
    for call in (CALLS["value_and_grads"], CALLS["backward_"]):
        with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match="a hook on Scaled"):
            call(out.square().sum(), x)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if OPERATIONS[name][1]])
def test_the_other_ways_out_are_right(device: torch.device, name: str) -> None:
    x = point(device)
    named, way = OPERATIONS[name]
    torch.testing.assert_close(way(x), named(x))
    _, grad = gradkit.value_and_grads(way(x).sin().sum(), x, create_graph=True)
    gradkit.value_and_grads(grad.square().sum(), x)


@refused
def test_where_gradkit_runs_the_forward_pass_the_rest_raises(
    device: torch.device, name: str
) -> None:
    x = point(device)
    # The second derivative of cdist is refused for something else, too.
    expected = name if name == "cdist" else f"(?s){name}.*does not have"

    def loss(x: Tensor, *_: Any) -> Tensor:
        return OPERATIONS[name][0](x).square().sum()

    def slope(x: Tensor, loss: Callable[..., Tensor] = loss) -> Tensor:
        return func.value_and_grads(loss)(x)[1].square().sum()

    with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match=expected):
        meta.unroll(loss, x, [None], meta.sgd(lr=0.1))
    if name == "cdist":  # which runs by its formula in a nested call
        by_formula = partial(slope, loss=lambda x: OPERATIONS[name][1](x).square().sum())
        got, right = (
            func.value_and_grads(fn)(x.detach().double())[1] for fn in (slope, by_formula)
        )
        torch.testing.assert_close(got, right)
    else:
        with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match=expected):
            func.value_and_grads(slope)(x.detach())
    # What eager code may differentiate raises only if it does.
    penalty = slope(x)
    with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match=expected):
        gradkit.value_and_grads(penalty, x)
    meta.unroll(loss, x, [None], meta.sgd(lr=0.1), first_order=True)


def test_what_the_table_does_not_have_has_gradkit_s_name(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gradkit._checks.higher_derivatives._REFUSED", _REFUSED - WITHOUT_SECOND.keys()
    )
    x = point(device)
    _, grad = gradkit.value_and_grads(ctc(x).sum(), x, create_graph=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"(?s)losses.*ctc_loss.*What to do"):
        gradkit.value_and_grads(grad.square().sum(), x)


def test_what_has_a_formula_is_looked_for_in_eager_calls(device: torch.device) -> None:
    assert NODE_FORMULAS.keys() <= _REFUSED
