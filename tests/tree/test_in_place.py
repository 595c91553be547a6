"""add_ and lerp_: torch's own in-place arithmetic, or a refusal before anything has changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradkit
from gradkit import tree
from tests.helpers import World, assert_same_bits, same_bits, unchanged

SHAPES = {"w": (2, 3), "b": (3,), "s": ()}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Two trees of one structure, any leaf of which may be None."""
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    first, second = (
        {
            name: torch.randn(shape, generator=source) if draw(st.booleans()) else None
            for name, shape in SHAPES.items()
        }
        for _ in range(2)
    )
    return first, second


def moved(one: dict[str, Tensor | None], device: torch.device) -> dict[str, Tensor | None]:
    return {key: None if leaf is None else leaf.to(device, copy=True) for key, leaf in one.items()}


@given(pair=pairs(), alpha=st.sampled_from([1, 1.0, 0.25, -3]))
def test_add_is_torch_s_for_each_leaf(device: torch.device, pair: Any, alpha: float) -> None:
    (a, b), (before, _) = [moved(one, device) for one in pair], pair
    given, world = dict(a), World(*(x for x in b.values() if x is not None))
    assert tree.add_(a, b, alpha=alpha) is a
    for key, start in moved(before, device).items():
        if start is None:
            expected = None if b[key] is None else b[key] * alpha
            assert b[key] is None or a[key].data_ptr() != b[key].data_ptr()
        else:
            assert a[key] is given[key]
            expected = start if b[key] is None else start.add_(b[key], alpha=alpha)
        assert same_bits(a[key], expected)
    world.assert_unchanged()


@given(pair=pairs(), weight=st.sampled_from([0.0, 0.1, 0.75, 1.0]))
def test_lerp_is_torch_s_for_each_leaf(device: torch.device, pair: Any, weight: float) -> None:
    (a, b), (before, _) = [moved(one, device) for one in pair], pair
    given, world = dict(a), World(*(x for x in b.values() if x is not None))
    assert tree.lerp_(a, b, weight) is a
    for key, start in moved(before, device).items():
        if start is None:
            expected = None if b[key] is None else b[key] * weight
        else:
            assert a[key] is given[key]
            zero = start * (1 - weight)
            expected = zero if b[key] is None else start.lerp_(b[key], weight)
        assert same_bits(a[key], expected)
    world.assert_unchanged()


def test_micro_batches_add_up_to_backward(device: torch.device) -> None:
    heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(2)).to(device)
    batches = torch.randn(4, 5, 3, device=device)
    total: Any = None
    for index, batch in enumerate(batches):
        loss = heads[index % 2](batch).square().mean()  # each reaches one head alone
        loss.backward(retain_graph=True)
        _, grads = gradkit.value_and_grads(loss, heads)
        total = grads if total is None else tree.add_(total, grads)
    assert_same_bits(total.values(), [p.grad for p in heads.parameters()])


def test_an_average_of_a_model_is_torch_s(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(device)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)  # the first is a copy
    ema = tree.map(lambda p: p.detach().clone(), model)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
            tree.lerp_(ema, model, 1 - 0.9)
        averaged.update_parameters(model)
    assert_same_bits(ema.values(), list(averaged.module.parameters()))
    with torch.no_grad():
        assert tree.lerp_(model, ema, 1.0) is model
    assert_same_bits(model.parameters(), ema.values())


def test_a_float32_sum_of_bfloat16_gradients(device: torch.device) -> None:
    grads = [{"w": torch.randn(9, device=device, dtype=torch.bfloat16)} for _ in range(5)]
    total = tree.zeros_like(grads[0], dtype=torch.float32)
    for one in grads:
        tree.add_(total, one)
    expected = torch.zeros(9, device=device)
    for one in grads:
        expected += one["w"]
    assert same_bits(total["w"], expected)
    average = tree.lerp_({"w": torch.zeros(9, device=device)}, grads[0], 0.5)
    assert same_bits(average["w"], torch.zeros(9, device=device).lerp_(grads[0]["w"].float(), 0.5))


def test_sparse_leaves(device: torch.device) -> None:
    eye = torch.eye(3, device=device)
    total = [eye.to_sparse(), eye.clone()]
    tree.add_(total, [eye.to_sparse(), eye.to_sparse()])
    assert total[0].is_sparse
    for leaf in total:
        assert torch.equal(leaf.to_dense(), 2 * eye)
    tree.lerp_(total[1:], [eye.to_sparse()], 0.5)
    assert torch.equal(total[1], 1.5 * eye)
    for other in ([eye], [eye.to_sparse()]):
        call = tree.add_ if other[0].layout == torch.strided else lambda a, b: tree.lerp_(a, b, 0.5)
        with pytest.raises(gradkit.StructureError, match=r"tree\[0\]: expected a dense tensor"):
            call([eye.to_sparse()], other)


def test_a_none_is_set_in_lists_and_dicts(device: torch.device) -> None:
    one = torch.ones(2, device=device)
    total = OrderedDict(a=None, b=[None, (one.clone(), None)])
    assert tree.add_(total, OrderedDict(a=one, b=[one, (one, None)])) is total
    assert total["a"].tolist() == total["b"][0].tolist() == [1, 1]
    assert total["b"][1][0].tolist() == [2, 2]
    total["a"].zero_()
    assert one.tolist() == [1, 1]


class Pair(NamedTuple):
    a: Any
    b: Any


FLOAT8 = torch.float8_e4m3fn


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return ones(2)


REFUSED: dict[str, tuple[Callable[[], tuple[Any, Any]], type[Exception], str]] = {
    "a None in a tuple": (
        lambda: ((ones(2), None), (ones(2), ones(2))), ValueError, r"tree\[1\].*None",
    ),
    "a None in a namedtuple": (
        lambda: (Pair(ones(2), None), Pair(None, ones(2))), ValueError, r"tree\.b",
    ),
    "a lone None": (lambda: (None, ones(2)), ValueError, r"(?s)tree: .*tree\.add"),
    "a None in two places": (
        lambda: ([d := {"w": None}, d], [{"w": ones(1)}, {"w": ones(1)}]), ValueError,
        r"tree\[1\]\['w'\]",
    ),
    "other keys": (lambda: ({"w": ones(2)}, {"v": ones(2)}), ValueError, "'w'"),
    "another shape": (
        lambda: ([ones(2), ones(2)], [ones(2), ones(1)]), ValueError, r"\[1\].*shape",
    ),
    "more precision": (
        lambda: ([ones(2), ones(2)], [ones(2), ones(2).double()]), ValueError, r"\[1\].*float64",
    ),
    "complex into real": (
        lambda: ([ones(2)], [ones(2, dtype=torch.complex64)]), ValueError, "complex64",
    ),
    "another device": (lambda: ([ones(2)], [ones(2, device="meta")]), ValueError, "meta"),
    "integers": (lambda: ([ones(2).long()], [ones(2)]), TypeError, r"tree\[0\].*int64"),
    "no tensors": (lambda: ([ones(2)], [1.0]), TypeError, r"\[0\].*float 1.0"),
    "that require grad": (
        lambda: ([ones(2), ones(2, requires_grad=True)], [ones(2), ones(2)]), RuntimeError,
        r"(?s)tree\[1\].*torch.no_grad",
    ),
    "of others that require grad": (
        lambda: ([ones(2)], [ones(2, requires_grad=True)]), RuntimeError,
        r"(?s)\[0\].*torch.no_grad",
    ),
    "inference tensors": (
        lambda: ([ones(2), in_inference_mode()], [ones(2)] * 2), ValueError, "inference",
    ),
    "expanded": (
        lambda: ([ones(2), ones(1).expand(2)], [ones(2)] * 2), ValueError, r"tree\[1\].*expanded",
    ),
    "one tensor twice": (
        lambda: ([x := ones(6), x], [ones(6), ones(6)]), ValueError, r"tree\[0\].*tree\[1\]",
    ),
    "views of one": (
        lambda: ([(x := ones(6))[:4], x[2:]], [ones(4), ones(4)]), ValueError, r"tree\[1\]",
    ),
    "other entries of it": (
        lambda: ([(x := ones(6))[:4]], [x[2:]]), ValueError, r"tree\[0\].*\[0\]",
    ),
    "float8": (
        lambda: ([ones(2), ones(2).to(FLOAT8)], [ones(2), ones(2).to(FLOAT8)]), ValueError,
        r"tree\[1\].*Float8.*\n.*float\(\)",
    ),
    "float8 alone": (
        lambda: ([ones(2), None], [ones(2), ones(2).to(FLOAT8)]), ValueError, r"\[1\].*Float8",
    ),
    "float8 into float32": (
        lambda: ([ones(2)], [ones(2).to(FLOAT8)]), ValueError, r"\[0\].*float8",
    ),
    "other sparse dimensions": (
        lambda: ([ones(2), ones(2, 2).to_sparse(1)], [ones(2), ones(2, 2).to_sparse(2)]),
        ValueError, r"tree\[1\].*sparse_coo",
    ),
    "compressed columns": (
        lambda: ([ones(2), ones(2, 2).to_sparse_csc()], [ones(2), ones(2, 2).to_sparse_csc()]),
        ValueError, r"tree\[1\].*sparse_csc",
    ),
    "another leaf of it": (
        lambda: ([(x := ones(6))[:3], x[3:]], [x[3:], ones(3)]), ValueError, r"tree\[1\]",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta")
@pytest.mark.parametrize(
    "call", [tree.add_, lambda a, b: tree.lerp_(a, b, 0.5)], ids=["add_", "lerp_"]
)
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_anything_has_changed(
    device: torch.device, name: str, call: Any
) -> None:
    make, error, text = REFUSED[name]
    with device:
        a, b = make()
    nones = [leaf is None for leaf in flat(a)]
    leaves = [x for x in (*flat(a), *flat(b)) if isinstance(x, Tensor) and not x.is_meta]
    before = [x.detach().clone() for x in leaves]
    with pytest.raises(gradkit.GradkitError, match=text) as caught:
        call(a, b)
    assert isinstance(caught.value, error)
    assert_same_bits([x.detach() for x in leaves], before)
    assert [leaf is None for leaf in flat(a)] == nones


def flat(one: Any) -> list[Any]:
    if isinstance(one, dict | list | tuple):
        return [x for part in (one.values() if isinstance(one, dict) else one) for x in flat(part)]
    return [one]


def test_views_of_one_tensor_that_do_not_overlap(device: torch.device) -> None:
    whole = torch.zeros(6, device=device)
    tree.add_([whole[:2], whole[2:].view(2, 2).t()], [ones(2).to(device), ones(2, 2).to(device)])
    assert torch.equal(whole, torch.ones(6, device=device))
    tree.add_([whole], [whole])  # where it is read, it is written
    assert torch.equal(whole, torch.full((6,), 2.0, device=device))


def test_options_and_transforms(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with unchanged(x):
        for call in (
            lambda: tree.add_(x, x, alpha=torch.ones(())),
            lambda: tree.add_(x, x, alpha=True),
            lambda: tree.lerp_(x, x, "half"),
        ):
            with pytest.raises(gradkit.OptionError, match="expected a real number"):
                call()
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.func"):
            torch.vmap(lambda v: tree.add_(v, v))(x)


@pytest.mark.parametrize("number", [10**30, Fraction(1, 3), -(2.0**40)])
def test_any_number(device: torch.device, number: Any) -> None:
    """torch takes no ints of more than 64 bits, and no fractions."""
    x, y = (torch.tensor([2.0], device=device) for _ in range(2))
    assert same_bits(tree.add_(x.clone(), y, alpha=number), x.clone().add_(y, alpha=float(number)))
    assert same_bits(tree.lerp_(x.clone(), y, number), x.clone().lerp_(y, float(number)))
    assert same_bits(tree.add_([None], [y], alpha=number)[0], y * float(number))
    half = [x.clone(), x.half()]
    if abs(number) > 1:
        with unchanged(*half), pytest.raises(gradkit.StructureError, match=r"tree\[1\].*overflow"):
            tree.add_(half, half, alpha=number)


@pytest.mark.long
def test_under_torch_compile(device: torch.device) -> None:
    def step(total: Any, grads: Any) -> Any:
        return tree.lerp_(tree.add_(total, grads), grads, 0.5)

    grads = {"w": torch.randn(3, device=device)}
    eager, compiled = ({"w": torch.ones(3, device=device)} for _ in range(2))
    step(eager, grads)
    torch.compile(step, fullgraph=True, backend="eager")(compiled, grads)
    assert same_bits(eager["w"], compiled["w"])
