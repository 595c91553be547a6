"""`Accumulator` in one process: any partition into micro-batches equals the full batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss

import gradkit
from tests.helpers import assert_owned, assert_same_bits, same_bits, unchanged

ROWS = 12


class Tagger(nn.Module):
    """Tied, frozen and unused parameters, and an embedding whose gradient may be sparse."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=sparse)
        self.mix = nn.Linear(4, 4)
        self.again = self.mix
        self.head = nn.Linear(4, 5)
        self.head.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, codes: Tensor) -> Tensor:
        out: Tensor = self.head(self.again(self.mix(self.embed(codes)).tanh()))
        return out


def data(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(7, (ROWS, 3), generator=generator)
    targets = torch.randint(5, (ROWS, 3), generator=generator)
    targets[torch.rand(ROWS, 3, generator=generator) < 0.4] = -100
    return codes.to(device), targets.to(device)


def nats(model: nn.Module, codes: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    logits = model(codes).flatten(0, 1)
    return cross_entropy(logits, targets.flatten(), reduction=reduction)


def counted(targets: Tensor) -> int:
    return int((targets != -100).sum())


def assert_near(ours: Any, theirs: Any) -> None:
    assert gradkit.tree.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


cuts = st.lists(st.integers(0, ROWS), max_size=5).map(lambda cuts: [0, *sorted(cuts), ROWS])


@pytest.mark.parametrize("sparse", [False, True])
@settings(max_examples=20)
@given(cuts=cuts)
def test_any_partition_equals_the_full_batch(
    device: torch.device, sparse: bool, cuts: list[int]
) -> None:
    model = Tagger(sparse=sparse).to(device).double()
    codes, targets = data(device)
    total = gradkit.Accumulator(model)
    with unchanged(*model.parameters()):
        for start, end in pairwise(cuts):
            part = targets[start:end]
            total.add_(nats(model, codes[start:end], part), counted(part))
        value, grads = total.mean()
    expected, right = gradkit.value_and_grads(nats(model, codes, targets, "mean"), model)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert {name: grad is None for name, grad in grads.items()} == {
        name: grad is None for name, grad in right.items()
    }
    assert grads["embed.weight"].is_sparse == sparse
    assert_near(grads, right)


def test_bits_are_those_of_backward_calls_divided_at_the_end(device: torch.device) -> None:
    model = Tagger().to(device)
    codes, targets = data(device)
    total = gradkit.Accumulator(list(model.parameters()))
    for start, end in ((0, 5), (5, 6), (6, ROWS)):
        nats(model, codes[start:end], targets[start:end]).backward()
        loss = nats(model, codes[start:end], targets[start:end])
        total.add_(loss, torch.tensor(counted(targets[start:end]), device=device))
    params = [p for p in model.parameters() if p.requires_grad]
    left = [None if p.grad is None else p.grad / counted(targets) for p in params]
    grads = [
        grad for grad, p in zip(total.mean()[1], model.parameters(), strict=True) if p.requires_grad
    ]
    assert_same_bits(grads, left)
    assert_same_bits(total.mean()[1], total.mean()[1])  # the sums stay


def two_losses(model: nn.Module, codes: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"nats": nats(model, codes, targets), "size": model(codes).square().sum()}


@settings(max_examples=15)
@given(cuts=cuts)
def test_each_loss_has_a_mean_by_its_own_count(device: torch.device, cuts: list[int]) -> None:
    model = Tagger().to(device).double()
    codes, targets = data(device)
    total, jointly = gradkit.Accumulator(model), gradkit.Accumulator(model)
    for start, end in pairwise(cuts):
        x, y = codes[start:end], targets[start:end]
        counts = {"size": 0.5 * len(x), "nats": counted(y)}  # in another order
        total.add_(two_losses(model, x, y), counts)
        jointly.add_(two_losses(model, x, y), len(x))
    sums = two_losses(model, codes, targets)
    weights = {"nats": 1 / counted(targets), "size": 2 / ROWS}
    _, right = gradkit.value_and_grads(sums, model, weights=weights)
    means, grads = total.mean()
    assert list(means) == ["nats", "size"]
    assert torch.allclose(means["size"], sums["size"] * 2 / ROWS, rtol=1e-12)
    assert_near(grads, right)
    means, grads = jointly.mean()
    sums = two_losses(model, codes, targets)
    assert torch.allclose(means["nats"], sums["nats"] / ROWS, rtol=1e-12)
    assert_near(grads, gradkit.value_and_grads(sums, model, weights=1 / ROWS)[1])


def test_a_loss_without_a_target_anywhere_has_no_part(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    total = gradkit.Accumulator([w])
    total.add_([w.sum(), (0 * w).sum()], [4, 0])
    (kept, rare), (grad,) = total.mean()
    assert kept == 0.5
    assert rare.isnan()
    assert grad.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_in_float32(device: torch.device, dtype: torch.dtype) -> None:
    w = torch.ones(1, device=device, dtype=dtype, requires_grad=True)
    total = gradkit.Accumulator(w)
    for _ in range(1000):
        total.add_((w * 1.0).float().sum(), 1)
    _, grad = total.mean()
    assert same_bits(grad, torch.ones(1, device=device, dtype=dtype))


def test_sums_are_in_a_grad_dtype_that_was_set(device: torch.device) -> None:
    w = nn.Parameter(torch.ones(1, device=device, dtype=torch.bfloat16))
    w.grad_dtype = torch.float64
    total = gradkit.Accumulator({"w": w})
    for _ in range(3):
        total.add_((w.double() / 3).sum(), 3)
    _, grads = total.mean()
    assert grads["w"].dtype == torch.float64
    assert_owned([grads["w"]], [w])
    v = nn.Parameter(torch.ones(1, device=device))
    v.grad_dtype = torch.bfloat16
    total = gradkit.Accumulator(v)
    for _ in range(300):  # 256 + 1 is 256 there
        total.add_(v.sum(), 1)
    assert (total.mean()[1] * 300).item() < 270


def test_results_are_owned_and_laid_out_like_params(device: torch.device) -> None:
    conv = nn.Conv2d(2, 3, 2).to(device, memory_format=torch.channels_last)
    tied = [conv.weight, conv.weight, conv.bias, None]
    total = gradkit.Accumulator(iter(tied))
    for rows in (1, 2):
        total.add_(conv(torch.randn(rows, 2, 4, 4, device=device)).square().sum(), rows)
    first, second, bias, none = total.mean()[1]
    assert none is None
    assert same_bits(first, second)
    assert_owned([first, second, bias], [conv.weight, conv.weight, conv.bias])
    before = total.mean()[1][0]
    first.zero_()
    assert_same_bits([second, total.mean()[1][0]], [before, before])


def test_empty_micro_batches_count_for_nothing(device: torch.device) -> None:
    model = Tagger().to(device)
    codes, targets = data(device)
    total, same = gradkit.Accumulator(model), gradkit.Accumulator(model)
    total.add_(torch.zeros((), device=device), 0)  # a constant
    total.add_(nats(model, codes, targets), counted(targets))
    same.add_(nats(model, codes, targets), counted(targets))
    total.add_(nats(model, codes[:0], targets[:0]), 0)
    total.add_(nats(model, codes[:2], torch.full_like(targets[:2], -100)), 0)
    assert same_bits(total.mean()[0], same.mean()[0])
    assert_near(total.mean()[1], same.mean()[1])


def refused(device: torch.device) -> dict[str, tuple[Callable[[Any, Tensor], Any], type, str]]:
    y = torch.zeros(4, device=device, dtype=torch.int64)
    missing, option = gradkit.StructureError, gradkit.OptionError
    mean = gradkit.UnsupportedGraphError
    return {
        "cross entropy": (lambda t, o: t.add_(cross_entropy(o, y), 1), mean, "a mean over 4"),
        "its count": (lambda t, o: t.add_(cross_entropy(o, y), 4), mean, "reduction='sum'"),
        "images": (
            lambda t, o: t.add_(cross_entropy(o.T[None], y[None]), 1), mean, "a mean over 4",
        ),
        "mse": (lambda t, o: t.add_(mse_loss(o, o.detach() + 1), 1), mean, "a mean over 12"),
        "mean": (lambda t, o: t.add_(o.square().mean(), 1), mean, "a mean over 12"),
        "negative": (lambda t, o: t.add_(-o.mean().double().view(1), 1), mean, "a mean over 12"),
        "of one": (
            lambda t, o: t.add_([o.sum(), o.mean((0, 1))], [1, 1]), mean, r"losses\[1\]: expected",
        ),
        "nan": (lambda t, o: t.add_(o.sum(), float("nan")), option, "count: expected a finite"),
        "infinite": (lambda t, o: t.add_(o.sum(), float("inf")), option, "a finite number"),
        "negative count": (lambda t, o: t.add_(o.sum(), torch.tensor(-1)), option, "got -1"),
        "text": (lambda t, o: t.add_(o.sum(), "4"), option, "count: expected a real number"),
        "none": (lambda t, o: t.add_(o.sum(), None), option, "got the NoneType"),
        "vector": (lambda t, o: t.add_(o.sum(), torch.ones(4)), option, "one element"),
        "bool": (lambda t, o: t.add_([o.sum()], [True]), option, r"count\[0\]"),
        "of nothing": (lambda t, o: t.add_(o.sum() + 100, 0), option, "got 0, and a sum of"),
        "nan of nothing": (lambda t, o: t.add_(o[:0].mean(), 0), option, "a sum of nan"),
        "constant": (lambda t, o: t.add_(o.detach().sum(), 1), gradkit.DetachedLossError, "graph"),
        "tree": (lambda t, o: t.add_(o.sum(), {"a": 1}), missing, "count: expected a leaf"),
        "deep": (lambda t, o: t.add_([o.sum()], [[1]]), missing, r"count\[0\]: expected a leaf"),
        "keys": (
            lambda t, o: t.add_({"a": o.sum(), "b": o.sum()}, {"a": 1, "c": 1}), missing, "'c'",
        ),
        "vector of losses": (lambda t, o: t.add_(o, 4), gradkit.NotScalarLossError, "one element"),
        "number": (lambda t, o: t.add_(1.0, 4), gradkit.LeafTypeError, "a tensor"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refused(torch.device("cpu")))
def test_what_is_no_sum_or_no_count_is_refused(device: torch.device, name: str) -> None:
    w = torch.randn(3, 3, device=device, requires_grad=True)
    x = torch.randn(4, 3, device=device)
    total = gradkit.Accumulator([w])
    total.add_((x @ w).sum(), 4) if name in ("mean", "nan", "of nothing") else None
    call, error, text = refused(device)[name]
    out = x @ w
    before = total.mean() if name in ("mean", "nan", "of nothing") else None
    with unchanged(w), pytest.raises(error, match=text):
        call(total, out)
    out.sum().backward()  # the graph is as it was
    if before is None:
        with pytest.raises(gradkit.StructureError, match="a count, got 0 everywhere"):
            total.mean()
    else:
        assert_same_bits([before[0], *before[1]], [total.mean()[0], *total.mean()[1]])


def means(x: Tensor, w: Tensor) -> dict[str, tuple[Tensor, str]]:
    """Return losses that hold a mean over several targets, and what is said of each."""
    out, y = x @ w, torch.zeros(len(x), device=x.device, dtype=torch.int64)
    p = out.detach().softmax(1)
    logs, total = out.log_softmax(1), functional.cross_entropy(out, y, reduction="sum")
    n, scale = len(x), torch.tensor(0.3, device=x.device, requires_grad=True)
    lengths = torch.full((2,), 5), torch.full((2,), 2)
    paths, codes = out.reshape(5, 2, -1).log_softmax(2), y[:4].view(2, 2) + 1
    return {
        "divided by steps": (cross_entropy(out, y) / 3, "a mean over 10"),
        "scaled": (torch.amp.GradScaler(x.device.type).scale(out.mean()), "a mean over 40"),
        "smoothed": (cross_entropy(out, y, label_smoothing=0.1), "a mean over 10"),
        "probabilities": (cross_entropy(out, p), "a mean over 10"),
        "batchmean": (functional.kl_div(logs, p, reduction="batchmean"), "a mean over 10"),
        "ctc": (functional.ctc_loss(paths.cpu(), codes.cpu(), *lengths), "a mean over 2"),
        "nanmean": (out.nanmean(), "a mean over 40"),
        "margins": (functional.multi_margin_loss(out, y), "a mean over 10"),
        "weighted": (functional.nll_loss(logs, y, weight=p[0]), "a mean over 10"),
        "of means": (out.mean(1).mean(), "a mean over 10"),
        "a term": (total + 0.01 * out.square().mean(), "a mean over 40, as one of its terms"),
        "deep": (1 - (total - out.mean() * 3).double().view(1) / 2, "as one of its terms"),
        "built in": (
            sum((out[i : i + 5].mean() for i in (0, 5)), total * 0),
            "as one of its terms",
        ),
        "learned weight": (out.mean() * scale.exp() + scale, "a mean over 40, as one of its terms"),
        "chosen": (torch.where(total > 0, out.mean(), 0.0), "a mean over 40"),
        "in place": (out.mean().mul_(2.0), "a mean over 40"),
        "by hand": (out.square().sum() / n, "a mean over 10"),
        "by elements": (out.sum() * (1 / out.numel()), "a mean over 40"),
        "each by hand": ((out / n).sum(), "a mean over 10"),
        "masked": ((out * (p > 0.1)).sum() / 9, "a mean over 9"),  # whose count is 9
        "of the batch": (out.square().mean(0).sum(), "a mean over 10"),
        "batch in columns": ((out.T.mean(-1, keepdim=True) / 2).sum(), "a mean over 10"),
        "clamped": (out.mean().clamp(min=0.0) + out.mean().clamp(0, 1), "a mean over 40"),
        "hinge": (functional.relu(out.mean() - 0.2), "a mean over 40"),
        "variance": (out.var(), "a mean over 40"),
        "deviation": (1 - out.std(correction=0), "a mean over 40"),
        "root": (out.square().mean().sqrt(), "a mean over 40"),
        "larger": (torch.maximum(out.mean(), total), "a mean over 40, as one of its terms"),
    }


@pytest.mark.parametrize("name", means(torch.ones(10, 3), torch.ones(3, 4, requires_grad=True)))
def test_a_mean_in_a_sum_or_a_product_is_refused(device: torch.device, name: str) -> None:
    w = torch.randn(3, 4, device=device, requires_grad=True)
    loss, text = means(torch.randn(10, 3, device=device), w)[name]
    total = gradkit.Accumulator(w)
    with pytest.raises(gradkit.UnsupportedGraphError, match=f"losses: expected a sum.*{text}"):
        total.add_(loss, 9 if name == "masked" else 10)
    loss.sum().backward()  # the graph is as it was
    with pytest.raises(gradkit.StructureError, match="a count, got 0 everywhere"):
        total.mean()


def test_sums_whatever_they_are_multiplied_by_are_taken(device: torch.device) -> None:
    """The gradient is that of the loss by the count."""
    x, w = torch.randn(10, 3, device=device), torch.randn(3, 4, device=device, requires_grad=True)
    y = torch.zeros(10, device=device, dtype=torch.int64)
    smoothed = {"label_smoothing": 0.4, "reduction": "sum"}  # torch divides by 4 / 0.4, which is 10
    for loss_of in (
        lambda out: cross_entropy(out, y, reduction="sum") * 0.1,
        lambda out: cross_entropy(out, y, reduction="sum") / 3,
        lambda out: cross_entropy(out, y, **smoothed),
        lambda out: cross_entropy(out, out.detach().softmax(1), reduction="sum"),
        lambda out: out.square().mean(1).sum() - 0.5 * out.norm(),
        lambda out: functional.layer_norm(out, (4,)).square().sum() + 1e-4 * w.square().sum(),
        lambda out: torch.stack([out.mean(), out[:1].mean()]).sum(),
        lambda out: out[:1, :1].mean(),
        lambda out: out.T.square().mean(0).sum(),  # of each row: there are as many as the count
        lambda out: out.square().mean(1, keepdim=True).sum(),
        lambda out: out.T.expand(3, 4, 10).square().mean((0, 1)).sum(),  # times, classes, rows
        lambda out: out[:, :3, None].expand(10, 3, 10).square().mean(2).sum(),  # ten positions
        lambda out: functional.relu(out.square().sum() - 1) + out.norm().exp(),
        lambda out: cross_entropy(out[:1], y[:1]) * 2,
    ):
        total = gradkit.Accumulator(w)
        total.add_(loss_of(x @ w), 10)
        (right,) = torch.autograd.grad(loss_of(x @ w), w)
        assert_near(total.mean()[1], right / 10)


def test_a_number_of_steps_may_be_the_size_of_a_later_batch(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    total = gradkit.Accumulator(w)
    for rows in (2, 7, 3):
        total.add_((torch.ones(rows, 3, device=device) @ w).sum() / 3, rows)
    torch.testing.assert_close(total.mean()[1], torch.full_like(w, 1 / 3))


def test_the_advice_for_a_vector_is_taken(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(gradkit.NotScalarLossError) as raised:
        gradkit.Accumulator(w).add_(w * 2, 3)
    assert "loss.sum()" in str(raised.value)
    assert "mean" not in str(raised.value)
    gradkit.Accumulator(w).add_((w * 2).sum(), 3)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_snapshot(device: torch.device, copied: Callable[[Any], Any]) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    total = gradkit.Accumulator([w])
    total.add_((2 * w).sum(), 1)
    with torch.inference_mode(copied is copy.copy):
        kept = copied(total)
    total.add_((6 * w).sum(), 3)
    assert kept.mean()[1][0].tolist() == [2, 2]
    if copied is copy.copy:  # a deep copy has parameters of its own
        kept.add_((4 * w).sum(), 1)
        assert kept.mean()[1][0].tolist() == [3, 3]
    assert total.mean()[1][0].tolist() == [2, 2]  # (2 + 6) / 4


def test_losses_and_counts_are_those_of_the_first_call(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    total = gradkit.Accumulator(w)
    total.add_({"a": w.sum(), "b": w.square().sum()}, {"a": 2, "b": 2})
    with pytest.raises(gradkit.StructureError, match="a number for each loss, as before"):
        total.add_({"a": w.sum(), "b": w.square().sum()}, 2)
    with pytest.raises(gradkit.StructureError, match="no key 'b'"):
        total.add_({"a": w.sum()}, {"a": 2})
    with pytest.raises(gradkit.StructureError, match=r"losses\['b'\]: expected a leaf"):
        total.add_({"a": w.sum(), "b": [w.sum()]}, {"a": 2, "b": [2]})
    total.add_({"b": w.square().sum(), "a": w.sum()}, {"a": 2, "b": 2})  # in another order
    means, grad = total.mean()
    assert (means["a"], means["b"]) == (1, 1)
    assert grad.tolist() == [1.5, 1.5]


def test_parameters_train_as_at_first(device: torch.device) -> None:
    model = nn.Linear(2, 1).to(device)
    total = gradkit.Accumulator(model)
    x = torch.ones(3, 2, device=device)
    total.add_(model(x).sum(), 3)
    before = total.mean()
    model.bias.requires_grad_(False)
    with pytest.raises(gradkit.StructureError, match=r"those to require grad that did"):
        total.add_(model(x).sum(), 3)
    model.bias.requires_grad_(True)
    after = total.mean()
    assert_same_bits(before[1].values(), after[1].values())


def test_an_error_in_the_pass_adds_nothing(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    total = gradkit.Accumulator(w)
    total.add_(w.sum(), 2)
    loss = (w * w).sum()
    loss.backward()
    with pytest.raises(gradkit.FreedGraphError):
        total.add_(loss, 5)

    def fail(_: Tensor) -> None:
        raise KeyError("a hook")

    for count in (1, 2):
        y = w * 2
        y.register_hook(fail)
        losses = [w.square().sum(), y.sum()]
        with pytest.raises((KeyError, gradkit.GradkitError)):
            total.add_(losses[1] if count == 1 else losses, count)
    mean, grad = total.mean()
    assert (mean, grad.tolist()) == (1, [0.5, 0.5])


def test_it_works_in_inference_mode_and_under_no_grad(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    loss, more = w.sum().reshape(1), w.sum()
    with torch.inference_mode():
        total = gradkit.Accumulator(w)
        total.add_(loss, 2)
    with torch.no_grad():
        total.add_(more, 2)
        grad = total.mean()[1]
    assert not grad.is_inference()
    assert not grad.requires_grad
    assert grad.tolist() == [0.5, 0.5]
