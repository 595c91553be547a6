"""gradkit.tree and combine: None is zero, nothing is changed, equal to torch's arithmetic."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import gradkit
from gradkit import tree
from gradkit._core.call import is_weighting
from gradkit.tree import _arithmetic
from tests.helpers import assert_same_bits, same_bits, unchanged

SHAPES = {"w": (2, 3), "b": (3,), "s": ()}


@st.composite
def trees(draw: st.DrawFn, count: int, none: bool = True) -> list[dict[str, Tensor | None]]:
    """Several trees of one structure, any leaf of which may be None."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    found = []
    for _ in range(count):
        leaves: dict[str, Tensor | None] = {}
        for name, shape in SHAPES.items():
            leaf = torch.randn(shape, generator=generator, dtype=torch.float64)
            leaves[name] = None if none and draw(st.booleans()) else leaf
        found.append(leaves)
    return found


def dense(grads: dict[str, Tensor | None]) -> dict[str, Tensor]:
    zeros = {k: torch.zeros(s, dtype=torch.float64) for k, s in SHAPES.items()}
    return {k: zeros[k] if v is None else v for k, v in grads.items()}


def to(device: torch.device, *many: dict[str, Tensor | None]) -> list[dict[str, Tensor | None]]:
    return [{k: None if v is None else v.to(device) for k, v in one.items()} for one in many]


def vector(grads: dict[str, Tensor | None]) -> Tensor:
    return torch.cat([
        leaf.cpu().reshape(-1)
        for leaf in dense({k: None if v is None else v.cpu() for k, v in grads.items()}).values()
    ])


@given(pair=trees(2))
def test_none_is_an_exact_zero_everywhere(device: torch.device, pair: Any) -> None:
    a, b = to(device, *pair)
    tensors = [x for one in (a, b) for x in one.values() if x is not None]
    with unchanged(*tensors):
        results = {
            "add": (tree.add(a, b), vector(a) + vector(b)),
            "sub": (tree.sub(a, b), vector(a) - vector(b)),
            "scale": (tree.scale(a, 2.5), vector(a) * 2.5),
            "map": (tree.map(torch.mul, a, b), vector(a) * vector(b)),
            "sum": (tree.weighted_sum([a, b], [2.0, -1.0]), 2 * vector(a) - vector(b)),
        }
        torch.testing.assert_close(tree.dot(a, b).cpu().double(), vector(a) @ vector(b))
        torch.testing.assert_close(tree.global_norm(a).cpu().double(), vector(a).norm())
        cosine = torch.nn.functional.cosine_similarity(vector(a), vector(b), dim=0)
        torch.testing.assert_close(tree.cosine(a, b).cpu().double(), cosine)
    for name, (result, expected) in results.items():
        torch.testing.assert_close(vector(result), expected, msg=name)
        for key, leaf in result.items():
            absent = a[key] is None and (name == "scale" or b[key] is None)
            assert (leaf is None) == absent, "zeros take no memory"
            for tensor in tensors:
                assert leaf is None or leaf.data_ptr() != tensor.data_ptr()


@given(many=trees(3))
def test_stack_and_unstack(device: torch.device, many: Any) -> None:
    many = to(device, *many)
    stacked = tree.stack(many)
    for key in SHAPES:
        if all(one[key] is None for one in many):
            assert stacked[key] is None
        else:
            assert stacked[key].shape == (3, *SHAPES[key])
    if any(leaf is not None for leaf in stacked.values()):
        for back, one in zip(tree.unstack(stacked), many, strict=True):
            assert tree.allclose(back, one, rtol=0, atol=0)


@given(many=trees(4))
def test_matrix_and_gram(device: torch.device, many: Any) -> None:
    per_loss = dict(zip("dcba", to(device, *many), strict=True))
    matrix, unravel = tree.to_matrix(per_loss)
    rows = torch.stack([vector(one) for one in per_loss.values()])
    present = [k for k in SHAPES if any(one[k] is not None for one in many)]
    assert matrix.shape == (4, sum(torch.Size(SHAPES[k]).numel() for k in present))
    torch.testing.assert_close(tree.gram(per_loss).cpu().double(), rows @ rows.T)
    torch.testing.assert_close(matrix @ matrix.T, tree.gram(per_loss))
    back = unravel(matrix.sum(0)) if present else dict.fromkeys(SHAPES)
    torch.testing.assert_close(vector(back), rows.sum(0))
    assert {k for k, leaf in back.items() if leaf is not None} == set(present)


def test_gram_in_blocks_of_columns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    per_loss = [
        {"w": torch.randn(37, device=device), "v": None},
        {"w": None, "v": None},
        {"w": torch.randn(37, device=device), "v": torch.randn(5, device=device)},
    ]
    whole = tree.gram(per_loss)
    monkeypatch.setattr("gradkit._core.leaf_arithmetic._COLUMNS_AT_A_TIME", 7)
    torch.testing.assert_close(tree.gram(per_loss), whole)


def test_the_order_of_keys_and_matching_by_key(device: torch.device) -> None:
    a = {"z": torch.ones(2, device=device), "a": torch.zeros(2, device=device)}
    b = {"a": torch.full((2,), 5.0, device=device), "z": None}
    assert list(tree.add(a, b)) == ["z", "a"]
    assert tree.add(a, b)["a"].tolist() == [5, 5]
    assert isinstance(tree.scale(OrderedDict(a), 2), OrderedDict)


@pytest.mark.parametrize("fn", [tree.add, tree.sub, tree.dot, tree.cosine, tree.allclose])
@pytest.mark.parametrize(
    "other",
    [
        {"w": None},
        {"w": torch.ones(2), "c": None},
        [torch.ones(2)],
        {"w": torch.ones(3), "b": None},
    ],
)  # fmt: skip
def test_trees_that_do_not_match_are_refused(device: torch.device, fn: Any, other: Any) -> None:
    a = {"w": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(gradkit.StructureError):
        fn(a, other)


def test_weighted_sum_adds_in_order_as_backward_does(device: torch.device) -> None:
    w = torch.randn(50, device=device, requires_grad=True)
    losses = {"z": (w * 1e4).sin().sum(), "a": (w * w).exp().sum(), "m": w.cos().sum()}
    for loss in losses.values():
        loss.backward(retain_graph=True)
    summed = tree.weighted_sum(gradkit.per_loss_grads(losses, w))
    assert same_bits(summed, w.grad)


def test_weights_by_tree_tensor_and_prefix(device: torch.device) -> None:
    rows = [torch.tensor([1.0, 2.0], device=device), torch.tensor([3.0, 4.0], device=device)]
    per_loss = {"b": [rows[0]], "a": [rows[1]]}
    for weights in (
        {"a": 10, "b": 1},
        {"b": torch.tensor(1.0), "a": 10.0},
        torch.tensor([1.0, 10.0], device=device),
    ):
        assert tree.weighted_sum(per_loss, weights)[0].tolist() == [31, 42]
        assert gradkit.combine(per_loss, weights)[0].tolist() == [31, 42]
    assert tree.weighted_sum(per_loss, 2.0)[0].tolist() == [8, 12]
    with pytest.raises(gradkit.StructureError, match="weights"):
        tree.weighted_sum(per_loss, {"a": 1.0})
    with pytest.raises(gradkit.StructureError, match="2 weights"):
        tree.weighted_sum(per_loss, torch.ones(3, device=device))


def test_a_deeper_tree_of_losses_and_losses_that_are_no_scalars(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    losses = {"task": [w.sum(), (w * w).sum()], "rows": w * 2}
    per_loss = gradkit.per_loss_grads(losses, {"w": w})
    matrix, unravel = tree.to_matrix(per_loss, losses=losses)
    expected = torch.cat([torch.ones(1, 3), 2 * w.detach().cpu()[None], 2 * torch.eye(3)]).to(
        device
    )
    assert torch.equal(matrix, expected)
    torch.testing.assert_close(tree.gram(per_loss, losses=losses), expected @ expected.T)
    assert torch.equal(unravel(matrix[1])["w"], 2 * w.detach())
    summed = tree.weighted_sum(
        per_loss, {"task": 1.0, "rows": torch.tensor([1.0, 0.0, 3.0])}, losses=losses
    )
    torch.testing.assert_close(
        summed["w"], 1 + 2 * w.detach() + torch.tensor([2.0, 0.0, 6.0], device=device)
    )
    with pytest.raises(gradkit.StructureError):
        tree.to_matrix(per_loss)
    lone = gradkit.per_loss_grads(w * 3, {"w": w})
    assert torch.equal(tree.to_matrix(lone, losses=w)[0], 3 * torch.eye(3, device=device))


def test_combine_with_an_aggregator(device: torch.device) -> None:
    per_loss = {
        "a": {"w": torch.ones(2, device=device), "b": None, "u": None},
        "b": {
            "w": torch.full((2,), 3.0, device=device),
            "b": torch.ones((), device=device, dtype=torch.bfloat16),
            "u": None,
        },
    }
    combined = gradkit.combine(per_loss, lambda matrix: matrix.sum(0))
    assert combined["w"].tolist() == [4, 4]
    assert combined["b"].dtype == torch.bfloat16
    assert combined["u"] is None
    for bad in (lambda m: m, lambda m: m.sum(), lambda m: "no"):
        with pytest.raises(gradkit.StructureError, match="aggregator"):
            gradkit.combine(per_loss, bad)


def test_combine_with_torchjd(device: torch.device) -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    w = torch.randn(4, device=device, requires_grad=True)
    losses = {"a": (w * w).sum(), "b": (w - 1).abs().sum()}
    per_loss = gradkit.per_loss_grads(losses, {"w": w})
    matrix, _ = tree.to_matrix(per_loss)
    for aggregator in (aggregation.Mean(), aggregation.UPGrad()):
        combined = gradkit.combine(per_loss, aggregator)
        torch.testing.assert_close(combined["w"], aggregator(matrix))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_max_norm_may_be_a_tensor_of_one_element(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    grads = [torch.full(shape, value, dtype=dtype, device=device) for value in (3.0, 4.0)]
    expected, norm = tree.clip_by_global_norm(grads, 0.5)
    for most in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]]).double()):
        clipped, same = tree.clip_by_global_norm(grads, most.to(device))
        assert [x.dtype for x in clipped] == [dtype] * 2
        assert [x.shape for x in clipped] == [shape] * 2
        torch.testing.assert_close(clipped, expected)
        assert same_bits(same, norm)


def test_tangents_of_norms_and_clipped_trees(device: torch.device) -> None:
    w, along = torch.tensor([3.0, 4.0], device=device), torch.tensor([1.0, 2.0], device=device)
    constant = torch.ones(2, device=device)

    def both(w: Tensor) -> tuple[Tensor, Tensor]:
        grads = {"w": w, "b": constant}
        clipped, _ = tree.clip_by_global_norm(grads, 1.0)
        return tree.global_norm(grads), clipped["w"]

    expected = torch.func.jvp(both, (w,), (along,))[1]
    with forward_ad.dual_level():
        got = [forward_ad.unpack_dual(x).tangent for x in both(forward_ad.make_dual(w, along))]
    torch.testing.assert_close(got, list(expected))


def test_a_max_norm_with_a_graph_has_a_gradient(device: torch.device) -> None:
    """Of dense leaves of one dtype, too, which are scaled by one kernel otherwise."""
    grads = {
        name: torch.full((2,), value, device=device) for name, value in (("w", 3.0), ("b", 4.0))
    }
    most = torch.ones((), device=device, requires_grad=True)
    clipped, norm = tree.clip_by_global_norm(grads, most)
    (slope,) = torch.autograd.grad(tree.dot(clipped, clipped), most)
    torch.testing.assert_close(slope, 2 * most.detach())  # the squared norm is that of `most`
    assert not norm.requires_grad


def test_clip_by_global_norm_is_clip_grad_norm_(device: torch.device) -> None:
    for dtypes in ([torch.float32] * 3, [torch.bfloat16] * 3, [torch.float32, torch.bfloat16] * 2):
        params = [
            nn.Parameter(torch.zeros(i + 1, device=device, dtype=d)) for i, d in enumerate(dtypes)
        ]
        grads = {i: torch.randn_like(p) for i, p in enumerate(params)}
        for max_norm in (0.1, 1e6):
            for i, p in enumerate(params):
                p.grad = grads[i].clone()
            norm = nn.utils.clip_grad_norm_(params, max_norm)
            clipped, before = tree.clip_by_global_norm(grads, max_norm)
            assert same_bits(before, norm)
            assert same_bits(tree.global_norm(grads), norm)
            for i, p in enumerate(params):
                assert same_bits(clipped[i], p.grad)
    assert tree.clip_by_global_norm({"a": None}, 1.0) == ({"a": None}, torch.zeros(()))


def test_sparse_leaves(device: torch.device) -> None:
    index = torch.tensor([[0, 0, 2]], device=device)
    sparse = torch.sparse_coo_tensor(
        index, torch.ones(3, 2, device=device), (4, 2), check_invariants=True
    )
    full = torch.ones(4, 2, device=device)
    assert tree.add(sparse, sparse).is_sparse
    for a, b in ((sparse, full), (full, sparse), (sparse, sparse), (sparse, None)):
        dense_b = None if b is None else b.to_dense()
        assert tree.allclose(tree.add(a, b), tree.add(a.to_dense(), dense_b))
        assert tree.allclose(tree.sub(a, b), tree.sub(a.to_dense(), dense_b))
        torch.testing.assert_close(tree.dot(a, b), tree.dot(a.to_dense(), dense_b))
    torch.testing.assert_close(tree.global_norm([sparse]), sparse.to_dense().norm())
    torch.testing.assert_close(tree.scale(sparse, 2.0).to_dense(), 2 * sparse.to_dense())
    assert tree.stack([sparse, full]).shape == (2, 4, 2)


def test_complex_leaves(device: torch.device) -> None:
    z = torch.randn(3, device=device, dtype=torch.complex64)
    v = torch.randn(3, device=device, dtype=torch.complex64)
    torch.testing.assert_close(tree.dot(z, v), torch.vdot(z, v).real)
    torch.testing.assert_close(tree.dot(z, z).sqrt(), tree.global_norm(z))
    matrix, unravel = tree.to_matrix([z, v])
    assert matrix.shape == (2, 6)
    assert torch.equal(unravel(matrix[1]), v)
    torch.testing.assert_close(tree.gram([z, v.conj()])[0, 1], torch.vdot(z, v.conj()).real)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_leaf_after_an_odd_number_of_reals(
    device: torch.device, dtype: torch.dtype
) -> None:
    """view_as_complex takes even offsets only: the columns before are three."""
    leaves = {"a": torch.randn(3, device=device), "z": torch.randn(2, device=device, dtype=dtype)}
    matrix, unravel = tree.to_matrix([leaves])
    assert_same_bits(unravel(matrix[0]).values(), leaves.values())
    half = gradkit.combine([leaves, {"a": None, "z": None}], lambda m: m.mean(0))
    torch.testing.assert_close(half, {name: leaf / 2 for name, leaf in leaves.items()})


def test_a_pair_that_was_not_unpacked_is_no_tree(device: torch.device) -> None:
    """Nor are the norm and the gradients two leaves of one tree."""
    grads = {"w": torch.randn(3, device=device)}
    pair = tree.clip_by_global_norm(grads, 0.5)
    clipped, norm = pair
    assert same_bits(norm, tree.global_norm(grads))
    calls: dict[str, Any] = {
        "tree": lambda: tree.scale(pair, 2.0), "b": lambda: tree.add(grads, pair),
        r"per_loss\[1\]": lambda: gradkit.combine([grads, pair], lambda matrix: matrix.mean(0)),
        "grads": lambda: tree.clip_by_global_norm(pair, 1.0),
    }  # fmt: skip
    for name, call in calls.items():
        text = rf"^{name}: expected a tree of gradients, got a pair.*not unpacked"
        with pytest.raises(gradkit.StructureError, match=text):
            call()
    assert same_bits(tree.scale(clipped, 2.0)["w"], clipped["w"] * 2)


def test_integers_have_no_norm(device: torch.device) -> None:
    counts = {
        "w": torch.ones(3, device=device),
        "n": torch.ones(2, dtype=torch.int64, device=device),
    }
    for call in (tree.global_norm, lambda t: tree.clip_by_global_norm(t, 1.0)):
        with pytest.raises(gradkit.LeafTypeError, match=r"^tree: expected a floating-point.*int64"):
            call(counts)


def test_small_and_large_gradients_keep_their_angle(device: torch.device) -> None:
    """The product of two squared norms would underflow, and the cosine be zero."""
    a = torch.tensor([3e-15, 4e-15], device=device)
    torch.testing.assert_close(tree.cosine(a, 2 * a), torch.ones((), device=device))
    b = torch.tensor([3e17, 4e17], device=device)
    torch.testing.assert_close(tree.cosine(b, -b), -torch.ones((), device=device))


def test_low_precision_is_summed_in_float32(device: torch.device) -> None:
    ones = {
        "w": torch.ones(1000, device=device, dtype=torch.bfloat16),
        "v": torch.ones(1, device=device, dtype=torch.bfloat16),
    }
    assert tree.dot(ones, ones).item() == 1001


def test_differentiable_under_create_graph(device: torch.device) -> None:
    w = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)

    def penalty(w: Tensor) -> Tensor:
        _, grads = gradkit.value_and_grads(
            {"a": (w**3).sum()}, {"w": w, "n": None}, create_graph=True
        )
        rows = gradkit.per_loss_grads([(w**2).sum(), (w**4).sum()], [w], create_graph=True)
        return (
            tree.global_norm(grads) ** 2
            + tree.dot(grads, grads)
            + tree.cosine(*rows)
            + tree.gram(rows).sum()
            + tree.to_matrix(rows)[0].sum()
            + tree.global_norm(tree.clip_by_global_norm(grads, 0.5)[0])
            + tree.clip_by_global_norm(grads, 0.5)[1]
            + tree.weighted_sum(rows)[0].sum()
        )

    assert torch.autograd.gradcheck(penalty, w)
    zero = torch.zeros(3, device=device, requires_grad=True)
    tree.cosine({"w": zero * 1}, {"w": zero + 1}).backward()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("fn", [tree.global_norm, lambda t: tree.scale(t, 2), tree.unstack])
@pytest.mark.parametrize("leaf", [1.0, "x", nn.Linear])
def test_what_is_no_gradient_is_refused(device: torch.device, fn: Any, leaf: Any) -> None:
    with pytest.raises(gradkit.LeafTypeError, match=r"tree\['w'\]"):
        fn({"w": leaf})


@pytest.mark.parametrize(
    "weights",
    [
        {"a": torch.tensor([1.0, 2.0, 3.0]), "b": 1.0},
        {"a": None, "b": 1.0},
        {"a": "x", "b": 1.0},
        {"a": 1j, "b": 1.0},
        torch.tensor([[1.0], [2.0]]),
    ],
)
def test_weights_that_are_no_numbers_are_refused(device: torch.device, weights: Any) -> None:
    per_loss = {k: {"w": torch.ones(3, device=device)} for k in "ab"}
    with pytest.raises(gradkit.GradkitError, match="weights"):
        tree.weighted_sum(per_loss, weights)


def test_autocast_around_changes_nothing(device: torch.device) -> None:
    rows = [{"w": torch.ones(1000, device=device) * x} for x in (1.01, 1.0, 0.3)]
    gram, dot = tree.gram(rows), tree.dot(rows[0], rows[1])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert same_bits(tree.gram(rows), gram)
        assert same_bits(tree.dot(rows[0], rows[1]), dot)


def test_gram_is_symmetric_to_the_bit(device: torch.device) -> None:
    gram = tree.gram([torch.randn(1000, device=device) for _ in range(5)])
    assert torch.equal(gram, gram.T)


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e-12, 1.0, 1e20, 1e30, 3e38])
def test_the_cosine_at_any_scale(device: torch.device, size: float) -> None:
    x = torch.full((3,), size, device=device)
    torch.testing.assert_close(tree.cosine(x, x), torch.ones((), device=device))
    torch.testing.assert_close(tree.cosine([x, None], [-x, None]), -torch.ones((), device=device))
    assert tree.cosine(x, torch.zeros_like(x)) == 0
    assert tree.cosine(torch.zeros_like(x), x * float("nan")).isnan()
    assert tree.cosine(x, x * float("nan")).isnan()


@pytest.mark.parametrize("size", [1e-300, 1e-40, 1e40, 1e300])
def test_the_cosine_of_leaves_of_two_dtypes(device: torch.device, size: float) -> None:
    one = torch.ones(1, device=device)
    wide = torch.full((1,), size, device=device, dtype=torch.float64)
    for pair in ([one, wide], [wide, one], [one * 0, wide]):
        close = torch.ones((), device=device, dtype=torch.float64)
        torch.testing.assert_close(tree.cosine(pair, pair), close)
        torch.testing.assert_close(tree.cosine(pair, tree.scale(pair, -0.5)), -close)


def test_the_product_of_a_complex_and_a_real_leaf(device: torch.device) -> None:
    z, x = torch.randn(4, device=device, dtype=torch.complex64), torch.randn(4, device=device)
    for a, b in ((z, x), (x, z), (z, x.to_sparse())):
        torch.testing.assert_close(tree.dot([a], [b]), z.real @ x)
        torch.testing.assert_close(tree.cosine([a], [b]), z.real @ x / z.norm() / x.norm())


@pytest.mark.parametrize("number", [10**30, Fraction(1, 3)])
def test_numbers_that_torch_does_not_take(device: torch.device, number: Any) -> None:
    x = torch.full((2,), 3.0, device=device)
    assert same_bits(tree.scale(x, number), x * float(number))
    assert same_bits(tree.weighted_sum([x, x], [number, 1]), x * float(number) + x)
    clipped, _ = tree.clip_by_global_norm(x, number)
    assert same_bits(clipped, tree.clip_by_global_norm(x, float(number))[0])
    assert tree.allclose(x, x + 0.1, atol=number)


def test_float8(device: torch.device) -> None:
    x = torch.full((2,), 3.0, device=device).to(torch.float8_e5m2)
    assert tree.dot(x, x) == 18
    assert tree.gram([x, x]).tolist() == [[18, 18], [18, 18]]
    with pytest.raises(gradkit.LeafTypeError, match=r"(?s)dtype that has norms.*Tensor.float"):
        tree.global_norm(x)
    assert tree.global_norm(tree.map(Tensor.float, x)) == 18**0.5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_strided_nested_tensors_are_no_rows(device: torch.device) -> None:
    parts = torch.nested.nested_tensor([torch.ones(n, 3, device=device) for n in (2, 4)])
    grads = [[parts], [parts]]
    for call in (tree.gram, tree.to_matrix, tree.weighted_sum):
        with pytest.raises(gradkit.LeafTypeError, match=r"per_loss\[0\]\[0\].*nested"):
            call(grads)
    padded = tree.map(lambda x: torch.nested.to_padded_tensor(x, 0.0), grads)
    assert tree.gram(padded).tolist() == [[18, 18], [18, 18]]


def test_leaves_of_two_dtypes_are_compared_in_the_larger(device: torch.device) -> None:
    x, third = torch.ones(2, device=device), torch.tensor([1 / 3], device=device)
    assert tree.allclose([x], [x.double()])
    assert not tree.allclose([third], [third.double() + 1e-4], atol=0.0)
    assert tree.allclose([x.half(), None], [x.to(torch.complex64), torch.zeros(1, device=device)])


def test_leaves_of_two_dtypes(device: torch.device) -> None:
    a, b = torch.ones(2, device=device), torch.ones(2, device=device, dtype=torch.float64)
    assert tree.dot(a, b).dtype == torch.float64
    torch.testing.assert_close(tree.cosine(a, b), torch.ones_like(b[0]))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: tree.unstack({"w": torch.tensor(1.0)}),
        lambda t: tree.to_matrix([t, t])[1](torch.ones(5)),
        lambda t: tree.gram(torch.ones(0, 3), losses=torch.ones(0)),
    ],
)
def test_wrong_shapes_are_refused_by_name(device: torch.device, call: Any) -> None:
    with pytest.raises(gradkit.StructureError):
        call({"w": torch.ones(3, device=device)})


def test_rows_of_a_sparse_vector_loss(device: torch.device) -> None:
    table = nn.Embedding(4, 2, sparse=True).to(device)
    loss = table(torch.tensor([0, 2, 2], device=device)).sum(1)
    per_loss = gradkit.per_loss_grads(loss, table, retain_graph=True)
    matrix, _ = tree.to_matrix(per_loss, losses=loss)
    torch.testing.assert_close(tree.gram(per_loss, losses=loss), matrix @ matrix.T)


def test_inside_of_transforms(device: torch.device) -> None:
    tree = {"w": torch.randn(3, 2, device=device), "b": torch.randn(3, device=device), "n": None}
    rows = gradkit.tree.unstack(tree)
    for fn in (
        gradkit.tree.global_norm,
        lambda t: gradkit.tree.dot(t, t),
        lambda t: gradkit.tree.cosine(t, gradkit.tree.map(torch.sin, t)),
        lambda t: gradkit.tree.global_norm(gradkit.tree.scale(t, 2.0)),
        lambda t: gradkit.tree.clip_by_global_norm(t, 0.5)[0]["w"].sum(),
    ):
        each = torch.stack([fn(row) for row in rows])
        given = {name: leaf for name, leaf in tree.items() if leaf is not None}
        torch.testing.assert_close(torch.vmap(fn)(given), each)
        along = {name: torch.ones_like(leaf) for name, leaf in rows[0].items() if leaf is not None}
        row = {name: leaf for name, leaf in rows[0].items() if leaf is not None}
        ahead = torch.func.jvp(fn, (row,), (along,))[1]
        grads = torch.func.grad(fn)(row)
        # torch's own tangent of a 0-dim tensor times a number is float64.
        torch.testing.assert_close(ahead.float(), sum(g.sum() for g in grads.values()))


# --- modules, iterators and optimizers stand for tensors


def test_a_module_stands_for_its_parameters(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to(device)
    named = dict(model.named_parameters())
    grads = {name: torch.randn_like(p) for name, p in named.items()}
    with unchanged(*named.values()):
        zeros = tree.map(torch.zeros_like, model)
        assert list(zeros) == list(named)
        assert not any(zero.any() for zero in zeros.values())
        for one, other in ((model, grads), (grads, model), (dict(reversed(grads.items())), model)):
            expected = tree.add(*(named if x is model else x for x in (one, other)))
            got = tree.add(one, other)
            assert list(got) == list(expected)
            assert all(same_bits(got[name], expected[name]) for name in expected)
        assert same_bits(tree.dot(model, grads), tree.dot(named, grads))
        assert same_bits(tree.global_norm(model), tree.global_norm(named))
        assert tree.allclose(model, named, rtol=0, atol=0)
        nested = tree.scale({"G": model, "D": [model[0].weight]}, 2.0)
        assert same_bits(nested["G"]["0.weight"], nested["D"][0])
        stacked = tree.stack([model, model])
        assert stacked["0.bias"].shape == (2, 2)
        matrix, _ = tree.to_matrix([model, model])
        assert matrix.shape == (2, sum(p.numel() for p in model.parameters()))


def test_iterators_and_optimizers_stand_for_tuples(device: torch.device) -> None:
    model = nn.Linear(3, 2).to(device)
    params = tuple(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for params_of in (model.parameters(), optimizer, dict(model.named_parameters()).values()):
        halves = tree.scale(params_of, 0.5)
        assert isinstance(halves, tuple)
        assert all(same_bits(x, p * 0.5) for x, p in zip(halves, params, strict=True))
    rows = tree.stack({"w": p} for p in (params[0], params[0]))
    assert rows["w"].shape == (2, 2, 3)
    per_loss = [{"w": torch.ones(2, device=device)}] * 3
    assert torch.equal(tree.weighted_sum(iter(per_loss))["w"], torch.full((2,), 3.0, device=device))
    assert tree.gram(iter(per_loss)).shape == (3, 3)


# --- options


@pytest.mark.parametrize("max_norm", [None, -1.0, float("nan"), True, "1", 1j, [1.0]])
def test_a_max_norm_that_is_none_is_refused(device: torch.device, max_norm: Any) -> None:
    grads = {"w": torch.ones(3, device=device)}
    with unchanged(grads["w"]), pytest.raises(gradkit.OptionError, match=r"max_norm.*\n.*1\.0"):
        tree.clip_by_global_norm(grads, max_norm)


def test_a_max_norm_of_zero_inf_and_of_a_tensor(device: torch.device) -> None:
    grads = {"w": torch.full((4,), 2.0, device=device)}
    clipped, norm = tree.clip_by_global_norm(grads, 0)
    assert norm == 4
    assert norm.dim() == 0
    assert not clipped["w"].any()
    clipped, _ = tree.clip_by_global_norm(grads, float("inf"))
    assert same_bits(clipped["w"], grads["w"])
    limit = torch.tensor(1.0, device=device, requires_grad=True)
    clipped, _ = tree.clip_by_global_norm(grads, limit)
    clipped["w"].sum().backward()
    torch.testing.assert_close(limit.grad, torch.tensor(2.0, device=device))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: tree.scale(t, torch.ones(2)), "factor"),
        (lambda t: tree.scale(t, 1j), "factor"),
        (lambda t: tree.scale(t, True), "factor"),
        (lambda t: tree.scale(t, None), "factor"),
        (lambda t: tree.clip_by_global_norm(t, torch.ones(2)), "max_norm"),
        (lambda t: tree.allclose(t, t, rtol=-1.0), "rtol"),
        (lambda t: tree.allclose(t, t, atol="0"), "atol"),
        (lambda t: tree.allclose(t, t, equal_nan=1), "equal_nan"),
        (lambda t: tree.map(t, torch.neg), "fn"),
    ],
)
def test_wrong_options_are_refused_by_name(device: torch.device, call: Any, name: str) -> None:
    with pytest.raises(gradkit.OptionError, match=f"^{name}: expected"):
        call({"w": torch.ones(3, device=device)})


@pytest.mark.parametrize("trees", [{"a": 1}, torch.ones(2, 3), 3, []])
def test_stack_takes_several_trees(device: torch.device, trees: Any) -> None:
    with pytest.raises(gradkit.StructureError, match="trees: expected"):
        tree.stack(trees)


def test_another_shape_is_named_in_both_trees(device: torch.device) -> None:
    a, b = ({"w": [torch.ones(n, device=device)]} for n in (2, 3))
    with pytest.raises(
        gradkit.StructureError, match=r"^b\['w'\]\[0\]: .*a\['w'\]\[0\], \(2,\), got"
    ):
        tree.add(a, b)
    with pytest.raises(gradkit.StructureError, match=r"^trees\[1\]\['w'\]\[0\]: expected"):
        tree.stack([a, b])
    with pytest.raises(gradkit.LeafTypeError, match=r"^rest\[0\]\['w'\]\[0\]"):
        tree.map(torch.add, a, {"w": [1.0]})
    with pytest.raises(gradkit.StructureError, match=r"per_loss\['y'\]\['w'\]\[0\].*one shape"):
        tree.gram({"x": a, "y": b})
    with pytest.raises(gradkit.StructureError, match=r"per_loss\['w'\]\[0\].*one shape .*\(5, 2\)"):
        tree.gram(a | {"w": [torch.ones(4, 2, device=device)]}, losses=torch.ones(5, device=device))


def test_large_and_many_leaves_have_the_products_of_the_matrix(device: torch.device) -> None:
    """A large leaf is multiplied alone, small ones in groups of bounded size."""
    sizes = [(1 << 14) + 1, *[1 << 14] * 18, 3]
    per_loss = [
        {str(i): torch.randn(n, device=device, dtype=torch.float64) for i, n in enumerate(sizes)}
        for _ in range(2)
    ]
    matrix, _ = gradkit.tree.to_matrix(per_loss)
    torch.testing.assert_close(gradkit.tree.gram(per_loss), matrix @ matrix.T)
    total = gradkit.tree.weighted_sum(per_loss, [0.5, 2.0])
    expected = {key: 0.5 * grad + 2.0 * per_loss[1][key] for key, grad in per_loss[0].items()}
    assert gradkit.tree.allclose(total, expected)


@given(many=trees(4))
def test_sums_of_several_trees(device: torch.device, many: Any) -> None:
    a, b, c, d = to(device, *many)
    total = tree.add(a, b, c, d)
    expected = tree.add(tree.add(tree.add(a, b), c), d)
    assert_same_bits(total.values(), expected.values())
    assert same_bits(tree.add(None, a["w"], None), a["w"])
    tensors = {x.data_ptr() for one in (a, b, c, d) for x in one.values() if x is not None}
    assert tensors.isdisjoint(x.data_ptr() for x in total.values() if x is not None)
    with pytest.raises(gradkit.StructureError, match=r"rest\[0\]"):
        tree.add(a, b, [None])


def test_zeros_and_random_numbers_of_a_tree(device: torch.device) -> None:
    transposed = torch.ones(3, 2, device=device).t()
    model = nn.Linear(2, 1).to(device)
    w = torch.ones(4, dtype=torch.bfloat16, device=device, requires_grad=True)
    one: dict[str, Any] = {
        "t": transposed,
        "m": model,
        "n": None,
        "w": w,
        "again": w,
        "i": torch.ones(2, dtype=torch.complex64),
    }
    with unchanged(transposed, w, *model.parameters()):
        zeros, wide = tree.zeros_like(one), tree.zeros_like([w, None], dtype=torch.float32)
        drawn = tree.randn_like(one)
    assert zeros["n"] is drawn["n"] is wide[1] is None
    assert wide[0].dtype == torch.float32
    assert zeros["t"].stride() == transposed.stride()
    for result in (zeros, drawn):
        assert list(result["m"]) == ["weight", "bias"]
        for key, like in (("t", transposed), ("w", w), ("again", w), ("i", one["i"])):
            leaf = result[key]
            assert (leaf.shape, leaf.dtype, leaf.device) == (like.shape, like.dtype, like.device)
            assert not leaf.requires_grad
    assert not any(leaf.any() for leaf in (zeros["t"], zeros["w"], *zeros["m"].values()))
    assert torch.equal(drawn["w"], drawn["again"])  # one variable has one direction
    assert drawn["w"].data_ptr() != drawn["again"].data_ptr()
    same = [
        tree.randn_like([w, w.double()], generator=torch.Generator(device).manual_seed(0))
        for _ in range(2)
    ]
    assert_same_bits(*same)
    assert not torch.equal(*(x.double() for x in same[0]))
    for call, text in (
        (lambda: tree.zeros_like(w, dtype="float32"), "dtype: expected a torch.dtype"),
        (lambda: tree.randn_like(w, generator=0), "generator: expected a torch.Generator"),
        (lambda: tree.randn_like([w, torch.ones(2).long()]), r"tree\[1\]: expected a floating"),
    ):
        with pytest.raises(gradkit.GradkitError, match=text):
            call()


@given(many=trees(3))
def test_norms_of_samples_are_those_of_each(device: torch.device, many: Any) -> None:
    stacked = tree.stack(to(device, *many))
    if all(leaf is None for leaf in stacked.values()):
        with pytest.raises(gradkit.StructureError, match="None everywhere"):
            tree.global_norm(stacked, batch_dims=1)
        return
    expected = torch.stack([tree.global_norm(one).double() for one in tree.unstack(stacked)])
    torch.testing.assert_close(tree.global_norm(stacked, batch_dims=1), expected)
    again = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), stacked)
    both = torch.stack([expected, 2 * expected])
    torch.testing.assert_close(tree.global_norm(again, batch_dims=2), both)


def test_norms_of_an_empty_batch_and_what_is_no_batch(device: torch.device) -> None:
    empty = {"a": torch.zeros(0, 3, device=device), "b": torch.zeros(0, device=device)}
    assert tree.global_norm(empty, batch_dims=1).shape == (0,)
    x = torch.ones(2, 3, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(tree.global_norm([x], batch_dims=1).sum(), x)
    torch.testing.assert_close(grad, torch.full_like(grad, 3**-0.5))
    for one, text in (
        ([torch.ones(2, 3), torch.ones(3, 3)], r"tree\[1\]: .*\(2,\), got \(3, 3\)"),
        ([torch.ones(2), torch.ones(())], r"tree\[1\]"),
    ):
        with pytest.raises(gradkit.StructureError, match=text):
            tree.global_norm(one, batch_dims=1)
    for wrong in (-1, True, 1.0, None):
        with pytest.raises(gradkit.OptionError, match="batch_dims: expected an int"):
            tree.global_norm([x], batch_dims=wrong)
    with pytest.raises(gradkit.LeafTypeError, match="integers"):
        tree.global_norm([torch.ones(2, 3).long()], batch_dims=1)


def stub(base: str, call: Any) -> Any:
    """Return an instance of a class like TorchJD's, where that is not installed."""
    kind = type(base, (), {"__module__": "torchjd.aggregation._bases"})
    return type(f"UPGrad{base}", (kind,), {"__module__": "elsewhere", "__call__": call})()


def both_of_torchjd() -> list[tuple[Any, Any]]:
    """Return pairs of a weighting and an aggregator of TorchJD: stubs, and its own."""
    aggregator = stub("Aggregator", lambda _, m: m[0])
    kinds = "Weighting", "_GramianWeighting"
    stubs = [(stub(kind, lambda _, g: g.diagonal()), aggregator) for kind in kinds]
    try:
        from torchjd import aggregation
    except ImportError:
        return stubs
    names = "UPGrad", "Mean", "MGDA"
    own = [(getattr(aggregation, f"{n}Weighting")(), getattr(aggregation, n)()) for n in names]
    return [*stubs, *own]


@pytest.mark.parametrize("count", [2, 3])  # with two losses all sizes fit
def test_weightings_and_aggregators_are_not_taken_for_each_other(
    device: torch.device, count: int
) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    losses = [((k + 1) * w.sin()).square().sum() for k in range(count)]
    for weighting, aggregator in both_of_torchjd():
        per_loss = gradkit.per_loss_grads(losses, w, retain_graph=True)
        if is_weighting(weighting):
            weights = weighting(gradkit.tree.gram(per_loss))
            expected = gradkit.tree.weighted_sum(per_loss, weights)
            torch.testing.assert_close(gradkit.combine(per_loss, weighting), expected)
        else:  # from something else to weights
            with pytest.raises(gradkit.OptionError, match=r"(?s)^aggregator: .*UPGradWeighting"):
                gradkit.combine(per_loss, weighting)
        with pytest.raises(gradkit.OptionError, match=r"(?s)^weights: .*gradkit\.combine"):
            gradkit.value_and_grads(losses, w, weights=aggregator)
        gradkit.value_and_grads(losses, w, weights=weighting, retain_graph=True)
        gradkit.combine(per_loss, aggregator)


@pytest.mark.parametrize("shapes", [[(3,)], [(3,), (2, 2), ()], [(200, 100), (3,)]])
def test_a_weighting_is_given_the_gram(device: torch.device, shapes: list[tuple[int, ...]]) -> None:
    """Of one leaf, of several that become one matrix, and beside a large one."""
    torch.manual_seed(0)
    per_loss = {k: [torch.randn(shape, device=device) for shape in shapes] for k in "abc"}
    weighting = stub("_GramianWeighting", lambda _, g: 1 / g.diagonal())
    weights = weighting(gradkit.tree.gram(per_loss))
    combined = gradkit.combine(per_loss, weighting)
    torch.testing.assert_close(combined, gradkit.tree.weighted_sum(per_loss, weights))
    assert len({x.untyped_storage().data_ptr() for x in combined}) == len(combined)
    for wrong in (lambda _, g: g, lambda _, g: g[0, :2], lambda _, g: "none"):
        with pytest.raises(gradkit.GradkitError, match=r"one for each loss|weights"):
            gradkit.combine(per_loss, stub("_GramianWeighting", wrong))


def test_a_class_in_place_of_its_instance(device: torch.device) -> None:
    class First:
        def __call__(self, rows: Tensor) -> Tensor:
            return rows[0]

    w = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
    losses = [w.sum(), w.square().sum()]
    per_loss = gradkit.per_loss_grads(losses, w, retain_graph=True)
    with pytest.raises(gradkit.OptionError, match=r"(?s)the class First.*instance: First\(\)"):
        gradkit.combine(per_loss, First)
    with pytest.raises(gradkit.OptionError, match=r"(?s)the class First.*instance: First\(\)"):
        gradkit.value_and_grads(losses, w, weights=First)
    assert gradkit.combine(per_loss, First()).tolist() == [1, 1, 1]
    for name in ("value_and_grads", "per_loss_grads", "vjp", "linearize"):
        call = getattr(gradkit.func, name)
        with pytest.raises(gradkit.OptionError, match="such as an instance of Linear"):
            call(nn.Linear, w) if name in ("vjp", "linearize") else call(nn.Linear)(w)


@pytest.mark.parametrize(
    "bad",
    [
        lambda matrix: matrix.mean(0) + 0j,
        lambda matrix: matrix.mean(0).long(),
        lambda matrix: matrix.mean(0) > 0,
        lambda matrix: matrix.mean(0).to_sparse(),
        lambda matrix: matrix.mean(0).numpy(force=True),
        lambda matrix: matrix.mean(0).tolist(),
        lambda matrix: matrix.mean(1),
    ],
)
def test_what_an_aggregator_may_not_return(device: torch.device, bad: Any) -> None:
    per_loss = [{"w": torch.rand(3, device=device)} for _ in range(2)]
    match = r"aggregator's result: expected a dense real vector of shape \(3,\)"
    with pytest.raises(gradkit.StructureError, match=match):
        gradkit.combine(per_loss, bad)
    double = gradkit.combine(per_loss, lambda matrix: matrix.double().mean(0))["w"]
    assert same_bits(double, gradkit.combine(per_loss, lambda m: m.double().mean(0).float())["w"])


def test_the_public_map_does_not_stand_in_for_the_builtin(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """It shadows `map` in its file; there it would flatten a tree for each look at the leaves."""
    a = {"w": torch.ones(2, device=device)}
    monkeypatch.setattr(_arithmetic, "map", None)
    assert tree.dot(a, tree.add(a, a)).item() == 4.0
    assert tree.clip_by_global_norm(a, 1.0)[1].item() == pytest.approx(2**0.5)
