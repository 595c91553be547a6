"""gram, per_loss_norms and weights=function: what K sets of gradients give, without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradkit
from gradkit._autograd.consume_on_arrival import ConsumingRunner
from gradkit._autograd.passes import PassRunner
from tests.helpers import Halve, others_slow, unchanged
from tests.strategies import Program, build, programs


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each engine pass: 1 for an ordinary one."""
    seen: list[int] = []
    ordinary, reducing, batch = PassRunner.grads, ConsumingRunner.grads, ConsumingRunner.batch

    def counted(run: Callable[..., Any], rows: Callable[[Any], int]) -> Callable[..., Any]:
        def count(self: Any, outputs: Any, seeds: Any, *args: Any, **options: Any) -> Any:
            seen.append(rows(seeds))
            return run(self, outputs, seeds, *args, **options)

        return count

    monkeypatch.setattr(PassRunner, "grads", counted(ordinary, lambda _: 1))
    monkeypatch.setattr(ConsumingRunner, "grads", counted(reducing, lambda _: 1))
    monkeypatch.setattr(ConsumingRunner, "batch", counted(batch, lambda seeds: len(seeds[0])))
    return seen


def expected_gram(losses: Any, params: Any) -> Tensor:
    per_loss = gradkit.per_loss_grads(losses, params, retain_graph=True)
    return gradkit.tree.gram(per_loss, losses=losses)


def multitask(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    model.to(device, dtype)
    y = model(torch.randn(4, 5, device=device, dtype=dtype))
    losses = {
        "square": y.square().mean(), "abs": y.abs().sum(), "one": y[0, :1],
        "weight": model[0].weight.norm(), "constant": torch.ones((), device=device, dtype=dtype),
    }  # fmt: skip
    return losses, model


@settings(max_examples=settings.default.max_examples // 4)
@given(program=programs(), vector=programs(vector=True), chunk=st.sampled_from((None, 1, 2, 3, 5)))
def test_equal_to_the_products_of_the_gradients(
    device: torch.device, program: Program, vector: Program, chunk: int | None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        for one in (program, vector):
            graph = build(one, device, torch.float64)
            params = graph.values
            try:
                expected = expected_gram(graph.losses, params)
            except gradkit.GradkitError as error:
                with pytest.raises(type(error)):
                    gradkit.gram(graph.losses, params, chunk_size=chunk)
                continue
            options = {"chunk_size": chunk, "retain_graph": True}
            ours = gradkit.gram(graph.losses, params, **options)
            norms = gradkit.per_loss_norms(graph.losses, params, **options)
            close(ours, expected)
            close(norms, expected.diagonal().sqrt())


def close(ours: Tensor, expected: Tensor) -> None:
    scale = expected.nan_to_num(0.0, 0.0, 0.0).abs().sum().item() + 1
    torch.testing.assert_close(
        ours, expected, rtol=1e-11, atol=1e-12 * scale, equal_nan=True, check_dtype=True
    )


@pytest.mark.parametrize("chunk", [None, 1, 2, 4, 7, 100])
def test_losses_of_all_kinds(device: torch.device, passes: list[int], chunk: int | None) -> None:
    losses, model = multitask(device)
    losses["vector"] = model(torch.ones(4, 5, device=device, dtype=torch.float64)).sum(1)
    expected = expected_gram(losses, model)
    passes.clear()
    with unchanged(*model.parameters()), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = gradkit.gram(losses, model, chunk_size=chunk)
    close(ours, expected)
    assert torch.equal(ours, ours.T)
    assert ours[4].count_nonzero() == 0  # the constant
    assert {None: [9], 1: [1] * 36, 2: [2] * 36, 4: [4] * 6 + [3] * 4, 7: [6] * 3, 100: [9]}[
        chunk
    ] == sorted(passes, reverse=True)
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.gram(losses, model)


def test_norms_of_all_kinds(device: torch.device, passes: list[int]) -> None:
    # Norms of rows take no pass of their own where no hook of the process could see it.
    torch.ones(1, device=device, requires_grad=True).register_hook(lambda grad: None).remove()
    losses, model = multitask(device)
    losses["vector"] = model(torch.ones(4, 5, device=device, dtype=torch.float64)).sum(1)
    losses["empty"] = losses["vector"][:0]
    expected = expected_gram(losses, model).diagonal().sqrt()
    passes.clear()
    close(gradkit.per_loss_norms(losses, model, retain_graph=True), expected)
    assert passes == [1, 1, 1, 1, 4]
    passes.clear()
    close(gradkit.per_loss_norms(losses, model, chunk_size=3), expected)
    assert passes == [1, 1, 1, 1, 3, 1]
    for loss in losses.values():
        if loss.requires_grad and loss.numel() and loss is not losses["weight"]:
            with pytest.raises(gradkit.FreedGraphError):
                gradkit.per_loss_norms(loss, model)


def test_a_tensor_in_several_places_counts_once(device: torch.device) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    losses, twice = [w.sum(), w.square().sum()], {"encoder": w, "decoder": w}
    grams, norms = [
        [fn(losses, params, retain_graph=True) for params in (twice, [w])]
        for fn in (gradkit.gram, gradkit.per_loss_norms)
    ]
    torch.testing.assert_close(*grams)
    torch.testing.assert_close(*norms)
    # Trees of gradients have it in each place.
    torch.testing.assert_close(expected_gram(losses, twice), 2 * grams[0])


def test_an_infinite_loss_does_not_reach_the_others(device: torch.device) -> None:
    w = torch.tensor([0.0, 2.0], device=device, requires_grad=True)
    h = w * 1.0
    losses = [h.sqrt().sum(), (h * 3).sum(), h.square().sum()]
    expected = expected_gram(losses, [w])
    assert expected[1:, 1:].isfinite().all()
    assert not expected[0, 0].isfinite()
    with pytest.warns(gradkit.GradkitWarning, match=r"0 \* inf is nan"):
        ours = gradkit.gram(losses, [w])
    close(ours, expected)


HOOKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "data": lambda grad: grad / grad.data.norm(),  # crashes the process
    "std": lambda grad: grad / grad.std(),  # another value
    "item": lambda grad: grad / float(grad.abs().max()),
    "in place": lambda grad: grad.mul_(2),
    "caught": lambda grad: _caught(grad),
    "plain": lambda grad: grad * 2,
}


def _caught(grad: Tensor) -> Tensor | None:
    try:
        return grad / grad.std()
    except Exception:
        return None


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("on_leaf", [False, True])
def test_hooks_that_compute(device: torch.device, name: str, on_leaf: bool) -> None:
    w = torch.tensor([0.3, 2.0], device=device, dtype=torch.float64, requires_grad=True)
    h = w * torch.tensor([2.0, 3.0], device=device)
    (w if on_leaf else h).register_hook(HOOKS[name])
    losses = [h.tanh().sum(), (h**3).sum(), h.square().sum()]
    expected = expected_gram(losses, [w])
    with pytest.warns(gradkit.GradkitWarning, match="a hook computes with the gradient"):
        ours = gradkit.gram(losses, [w])
    close(ours, expected)


def test_module_hooks(device: torch.device) -> None:
    losses, model = multitask(device)
    seen: list[Any] = []
    model[3].register_full_backward_hook(lambda _, grads, __: seen.extend(grads))
    y = model(torch.randn(4, 5, device=device, dtype=torch.float64))
    losses = [y.square().sum(), y.abs().sum()]
    expected = expected_gram(losses, model)
    seen.clear()
    with pytest.warns(gradkit.GradkitWarning, match="a hook computes with the gradient"):
        close(gradkit.gram(losses, model), expected)
    assert len(seen) >= 2
    assert all(grad.isfinite().all() for grad in seen)  # none is a batch, which would raise


UNBATCHABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "a custom Function": lambda x: Halve.apply(x, x),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, x.sum(1), (3,), (4,)),
    "a retained tensor": lambda x: _retained(x) * 2,
}


def _retained(x: Tensor) -> Tensor:
    x.retain_grad()
    return x


@pytest.mark.parametrize("name", UNBATCHABLE)
def test_graphs_that_take_no_batch(device: torch.device, name: str) -> None:
    w = torch.rand(3, 3, dtype=torch.float64, device=device, requires_grad=True)
    h = w * 2
    y = UNBATCHABLE[name](h)
    losses = [y.square().sum(), y.abs().sum(), (y**3).sum()]
    expected = expected_gram(losses, {"w": w, "h": h})
    with warnings.catch_warnings(record=True) as caught, unchanged(w, h):
        warnings.simplefilter("always")
        close(gradkit.gram(losses, {"w": w, "h": h}), expected)
    falls_back = name != "a retained tensor"
    assert [one.category for one in caught] == [gradkit.GradkitWarning] * falls_back


def test_sparse_half_and_complex(device: torch.device) -> None:
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64).to(device)
    rows = table(torch.tensor([1, 1, 3], device=device))
    losses = [rows.sum(), rows.square().sum()]
    expected = expected_gram(losses, table)
    with pytest.warns(gradkit.GradkitWarning, match="sparse"):
        close(gradkit.gram(losses, table), expected)
    half = torch.full((1 << 12,), 1.0, dtype=torch.bfloat16, device=device, requires_grad=True)
    ours = gradkit.gram([half.sum(), (half * 3).sum()], [half])
    assert ours.dtype == torch.float32
    assert ours.tolist() == [[4096.0, 12288.0], [12288.0, 36864.0]]
    z = torch.randn(2, 3, dtype=torch.complex128, device=device, requires_grad=True)
    losses = [(z * (2 + 1j)).real.sum(), (z * z).imag.sum(), z.abs().sum()]
    expected = expected_gram(losses, [z])
    close(gradkit.gram(losses, [z]), expected)


def test_float8(device: torch.device) -> None:
    w = torch.ones(2, device=device).to(torch.float8_e5m2).requires_grad_()
    losses = [w.float().square().sum(), w.float().sum()]
    expected = torch.tensor([[8.0, 4.0], [4.0, 2.0]], device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)  # of the batched pass
        close(gradkit.gram(losses, [w], retain_graph=True), expected)
        close(gradkit.per_loss_norms(losses, [w]), expected.diagonal().sqrt())


def test_of_tensors_without_values_there_is_the_shape(device: torch.device) -> None:
    w = torch.ones(3, 2, device="meta", requires_grad=True)
    losses = [w.sum(), w.square().sum()]
    product = gradkit.gram(losses, w, retain_graph=True)
    assert (product.shape, product.is_meta) == ((2, 2), True)
    assert gradkit.tree.gram(gradkit.per_loss_grads(losses, w, retain_graph=True)).is_meta
    assert gradkit.per_loss_norms(losses, w, retain_graph=True).is_meta
    _, grad = gradkit.value_and_grads(losses, w, weights=lambda _: [1.0, 2.0])
    assert grad.is_meta


def test_a_tensor_that_is_made_of_several_is_refused(device: torch.device) -> None:
    """Its product added to a plain tensor would add the products of all of them."""
    from torch.testing._internal.two_tensor import TwoTensor

    w = TwoTensor(torch.ones(3, device=device), torch.ones(3, device=device)).requires_grad_()
    losses = [(w * w).sum(), w.sum()]
    with pytest.raises(gradkit.LeafTypeError, match=r"(?s)TwoTensor.*tree\.gram"):
        gradkit.gram(losses, [w], chunk_size=1)
    product: Any = gradkit.tree.gram(gradkit.per_loss_grads(losses, [w]))
    assert product.a.tolist() == [[12, 6], [6, 3]]


def test_the_shared_representation_of_the_losses(device: torch.device) -> None:
    losses, model = multitask(device)
    h = model[0](torch.ones(4, 5, device=device, dtype=torch.float64))
    y = model[1:](h)
    losses = {"a": y.sum(), "b": y.square().sum()}
    expected = expected_gram(losses, [h, model[0].weight])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(gradkit.gram(losses, [h, model[0].weight]), expected)


def test_what_is_refused(device: torch.device) -> None:
    losses, model = multitask(device)
    with unchanged(*model.parameters()):
        for call in (gradkit.gram, gradkit.per_loss_norms):
            for bad in (0, -1, 2.0, True):
                with pytest.raises(gradkit.OptionError, match="chunk_size"):
                    call(losses, model, chunk_size=bad)
            with pytest.raises(gradkit.OptionError, match="retain_graph"):
                call(losses, model, retain_graph="no")
            with pytest.raises(gradkit.StructureError, match="losses"):
                call([], model)
            with pytest.raises(gradkit.DetachedLossError):
                call(losses["constant"], model)
            with pytest.raises(gradkit.UnreachedParamError):
                call(losses, torch.ones(2, device=device, requires_grad=True), retain_graph=True)
            with pytest.raises(gradkit.UnreachedParamError, match="no tensor there requires grad"):
                call(losses, torch.ones(2, device=device))
        with pytest.raises(gradkit.StructureError, match="at least one element"):
            gradkit.gram(losses["one"][:0], model)
    gradkit.gram(losses, model)  # nothing was freed


def by_norm(gramian: Tensor) -> Tensor:
    return 1 / gramian.diagonal().sqrt()


@pytest.mark.parametrize("kind", ["UPGrad", "MGDA", "function", "list"])
def test_weights_from_the_gramian(device: torch.device, kind: str) -> None:
    losses, model = multitask(device)
    del losses["constant"]
    losses["one"] = losses["one"].sum()
    if kind in ("UPGrad", "MGDA"):
        aggregation = pytest.importorskip("torchjd.aggregation")
        weigh, aggregator = (getattr(aggregation, kind + end)() for end in ("Weighting", ""))
    else:
        weigh = by_norm if kind == "function" else lambda gramian: by_norm(gramian).tolist()
        aggregator = lambda matrix: by_norm(matrix @ matrix.T) @ matrix  # noqa: E731
    per_loss = gradkit.per_loss_grads(losses, model, retain_graph=True)
    expected = gradkit.combine(per_loss, aggregator)
    with unchanged(*model.parameters()):
        values, grads = gradkit.value_and_grads(losses, model, weights=weigh)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)
    assert values.keys() == losses.keys()
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.value_and_grads(losses, model)


def test_weights_that_are_none(device: torch.device) -> None:
    losses, model = multitask(device)
    wrong: dict[str, tuple[Callable[[Tensor], Any], type[Exception]]] = {
        "matrix": (lambda gramian: gramian, gradkit.StructureError),
        "few": (lambda gramian: gramian.diagonal()[:2], gradkit.StructureError),
        "number": (lambda gramian: 1.0, gradkit.StructureError),
        "strings": (lambda gramian: ["a"] * len(gramian), gradkit.LeafTypeError),
        "raises": (lambda gramian: {}["key"], KeyError),
    }
    with unchanged(*model.parameters()):
        for weigh, error in wrong.values():
            with pytest.raises(error):
                gradkit.value_and_grads(losses, model, weights=weigh)
    gradkit.value_and_reduced_grads(losses, model, torch.sum, weights=by_rank)


def by_rank(gramian: Tensor) -> Tensor:
    return torch.arange(len(gramian))


CONSUMED: dict[str, Callable[[dict[str, Tensor], nn.Module], Any]] = {
    "gram": gradkit.gram,
    "gram, one at a time": lambda losses, model: gradkit.gram(losses, model, chunk_size=1),
    "per_loss_norms": gradkit.per_loss_norms,
    "per_sample_norms": lambda losses, model: gradkit.per_sample_norms(losses["rows"], model),
    "of samples that depend": lambda losses, model: gradkit.per_sample_norms(
        losses["rows"] - losses["rows"].mean(), model
    ),
    "clipped_sum": lambda losses, model: gradkit.clipped_sum(losses["rows"], model, 0.1),
    "value_and_reduced_grads": lambda losses, model: gradkit.value_and_reduced_grads(
        losses["mean"], model, torch.norm
    )[1],
    "weights from the Gramian": lambda losses, model: gradkit.value_and_grads(
        [losses["mean"], losses["square"]], model, weights=by_norm
    )[1],
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch's tracing reads
@pytest.mark.parametrize("name", others_slow(CONSUMED, CONSUMED.keys() - {"gram, one at a time"}))
def test_under_compiled_autograd(device: torch.device, name: str) -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)
    x = torch.randn(5, 4, device=device)

    def result() -> Any:
        out = model(x)
        rows = out.square().sum(1)
        losses = {"mean": out.mean(), "square": out.square().mean(), "rows": rows}
        return CONSUMED[name](losses, model)

    expected = result()
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        got = result()
    torch.testing.assert_close(got, expected)
