"""The laws of gradkit.func: the eager calls and plain torch are the oracle."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import gradkit
from gradkit import func
from gradkit._autograd import engine
from tests.helpers import World, assert_owned, assert_same_bits, unchanged
from tests.strategies import OPS, Program, build, programs

dtypes = st.sampled_from([torch.float64, torch.float32])
# torch.func takes no Function whose forward takes ctx.
ENTERABLE = tuple(op for op in OPS if op != "halve")


def losses_of(program: Program, device: torch.device, dtype: torch.dtype) -> Any:
    def fn(leaves: list[Tensor]) -> list[Tensor]:
        return build(program, device, dtype, leaves).losses

    return fn


def as_zeros(grads: Any, leaves: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, leaves, strict=True)]


@given(program=programs(ops=ENTERABLE), dtype=dtypes)
def test_one_joint_pass_is_backward_bit_for_bit(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    torch.autograd.backward(theirs.losses)
    expected = [leaf.grad for leaf in theirs.leaves]
    leaves = [leaf.detach() for leaf in ours.leaves]
    fn = losses_of(program, device, dtype)
    if all(grad is None for grad in expected):
        with pytest.raises(gradkit.DetachedLossError):
            func.value_and_grads(fn)(leaves)
        return
    world = World(*leaves)
    values, grads = func.value_and_grads(fn)(leaves)
    assert_same_bits(values, theirs.losses)
    assert_same_bits(grads, as_zeros(expected, leaves))
    assert_owned([*grads, *values], [*leaves, *theirs.losses])
    for grad in (*grads, *values):
        grad.add_(1)
    world.assert_unchanged()


@given(
    program=programs(ops=ENTERABLE, leaf_hooks=False),
    weights=st.lists(st.floats(-3, 3), min_size=4, max_size=4),
    dtype=dtypes,
)
def test_weights_are_those_of_the_eager_call(
    device: torch.device, program: Program, weights: list[float], dtype: torch.dtype
) -> None:
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    by_loss = weights[: len(theirs.losses)]
    try:
        _, expected = gradkit.value_and_grads(theirs.losses, theirs.leaves, weights=by_loss)
    except gradkit.UnreachedParamError:
        return
    leaves = [leaf.detach() for leaf in ours.leaves]
    fn = losses_of(program, device, dtype)
    _, grads = func.value_and_grads(fn, weights=by_loss)(leaves)
    assert_same_bits(grads, as_zeros(expected, leaves))
    tensors = [torch.tensor(w, dtype=dtype, device=device, requires_grad=True) for w in by_loss]
    _, grads = func.value_and_grads(fn, weights=tensors)(leaves)
    assert_same_bits(grads, as_zeros(expected, leaves))


@given(program=programs(ops=ENTERABLE, vector=True, leaf_hooks=False), chunk=st.integers(1, 4))
def test_the_rows_are_those_of_the_eager_call(
    device: torch.device, program: Program, chunk: int
) -> None:
    dtype = torch.float64
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    try:
        expected = gradkit.per_loss_grads(theirs.losses, theirs.leaves, unused="zeros")
    except gradkit.UnreachedParamError:
        return
    leaves = [leaf.detach() for leaf in ours.leaves]
    fn = losses_of(program, device, dtype)
    rows = func.per_loss_grads(fn)(leaves)
    for row, theirs_row in zip(rows, expected, strict=True):
        assert_same_bits(row, theirs_row)
        assert_rows_owned(row, leaves)
    for row, theirs_row in zip(
        func.per_loss_grads(fn, chunk_size=chunk)(leaves), expected, strict=True
    ):
        torch.testing.assert_close(row, theirs_row, rtol=1e-12, atol=1e-12)
        assert_rows_owned(row, leaves)


def assert_rows_owned(rows: list[Tensor], leaves: list[Tensor]) -> None:
    """Each row by itself is laid out like its parameter, and nothing shares memory."""
    assert len({r.untyped_storage().data_ptr() for r in rows}) == len(rows)
    for row, leaf in zip(rows, leaves, strict=True):
        one = row.reshape(-1, *leaf.shape)[0].clone() if not row.numel() else row[0]
        dense = torch.empty_like(leaf).stride() == leaf.stride()
        assert one.stride() == (leaf.stride() if dense else leaf.contiguous().stride())
        assert not row.requires_grad


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)),
        lambda: torch.randn(5, 6),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        lambda: torch.randn(5, 2, 6, 6),
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        lambda: torch.randn(5, 4, 8),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)),
        lambda: torch.randint(7, (5, 3)),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)),
        lambda: torch.randn(5, 6),
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 6), nn.Flatten()).to(
            memory_format=torch.channels_last
        ),
        lambda: torch.randn(5, 2, 6, 6),
    ),
}


def a_model(name: str, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    model, batch = MODELS[name]
    return model().to(device), batch().to(device), torch.randint(3, (5,)).to(device)


@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_bits_of_the_eager_call(device: torch.device, name: str) -> None:
    model, x, y = a_model(name, device)
    call, params, buffers = func.make_functional(model)

    def fn(params: Any, buffers: Any) -> Any:
        out, new = call(params, buffers, x)
        loss = functional.cross_entropy(out, y)
        return {"ce": loss, "size": out.square().mean().reshape(1, 1)}, new

    torch.manual_seed(1)
    run = func.value_and_grads(fn, has_aux=True, create_graph=False)
    (values, new), grads = run(params, buffers)
    torch.manual_seed(1)
    rows = func.per_loss_grads(lambda p, b: fn(p, b)[0])(params, buffers)
    torch.manual_seed(1)
    out = model(x)
    losses = {"ce": functional.cross_entropy(out, y), "size": out.square().mean().reshape(1, 1)}
    values_of_eager, expected = gradkit.value_and_grads(losses, model, retain_graph=True)
    by_loss = gradkit.per_loss_grads(losses, model)
    assert list(grads) == list(expected)
    assert list(values) == list(losses)
    assert_same_bits(grads.values(), expected.values())
    assert_same_bits(values.values(), values_of_eager.values())
    assert_same_bits(new.values(), dict(model.named_buffers()).values())
    assert_owned(grads.values(), params.values())
    for loss in losses:
        assert_same_bits(rows[loss].values(), by_loss[loss].values())


def test_an_lstm_is_equal_to_rounding(device: torch.device) -> None:
    model = nn.LSTM(3, 4, batch_first=True).to(device)
    x = torch.randn(2, 5, 3, device=device)
    call, params, buffers = func.make_functional(model)
    _, grads = func.value_and_grads(lambda p: call(p, buffers, x)[0][0].square().sum())(params)
    _, expected = gradkit.value_and_grads(model(x)[0].square().sum(), model)
    torch.testing.assert_close(grads, expected)


def test_autocast_gives_the_bits_of_the_eager_call(device: torch.device) -> None:
    model, x, y = a_model("mlp", device)
    call, params, buffers = func.make_functional(model)
    with torch.autocast(device.type, torch.bfloat16):
        _, grads = func.value_and_grads(
            lambda p: functional.cross_entropy(call(p, buffers, x)[0].float(), y)
        )(params)
        loss = functional.cross_entropy(model(x).float(), y)
    _, expected = gradkit.value_and_grads(loss, model)
    assert_same_bits(grads.values(), expected.values())


def test_none_in_the_eager_call_is_zero_here(device: torch.device) -> None:
    params = {name: torch.ones(2, device=device, requires_grad=True) for name in "abc"}

    def fn(params: Any) -> Any:
        return {"a": params["a"].sum(), "b": (params["b"] ** 2).sum(), "one": x.sum()}

    x = torch.ones(1, device=device)
    by_loss = func.per_loss_grads(fn)(params)
    eager = gradkit.per_loss_grads(fn(params), params, unused="zeros")
    for loss in eager:
        assert_same_bits(by_loss[loss].values(), eager[loss].values())
    assert not by_loss["one"]["a"].any()


def test_an_inf_in_one_loss_reaches_no_other(device: torch.device) -> None:
    def fn(w: Tensor) -> Any:
        trunk = w * 2
        return {"inf": trunk.log().sum(), "fine": trunk.sum(), "vector": trunk * trunk}

    w = torch.zeros(2, device=device)
    for chunk in (None, 2):
        grads = func.per_loss_grads(fn, chunk_size=chunk)(w)
        assert grads["inf"].isinf().all()
        assert_same_bits([grads["fine"]], [torch.full((2,), 2.0, device=device)])
        assert not grads["vector"].any()


def test_argnums_are_those_of_jax(device: torch.device) -> None:
    a, b, c = (torch.tensor(v, device=device) for v in (2.0, 3.0, 5.0))

    def fn(a: Tensor, b: dict[str, Tensor], c: Tensor, *, scale: float = 1.0) -> Tensor:
        return a * b["b"] * c * scale

    expected = {0: c * b, 2: a * b, -1: a * b}
    for argnums, grad in expected.items():
        _, got = func.value_and_grads(fn, argnums)(a, {"b": b}, c)
        assert_same_bits([got], [grad])
    value, (by_c, by_b) = func.value_and_grads(fn, (2, 1))(a, {"b": b}, c, scale=2.0)
    assert value == 60
    assert_same_bits([by_c, by_b["b"]], [torch.tensor(12.0, device=device), by_b["b"]])
    assert by_b == {"b": 20}


def test_a_tensor_in_two_places_is_one_variable(device: torch.device) -> None:
    w = torch.full((2,), 3.0, device=device)
    v = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad((v * v).sum(), v)

    def fn(tree: Any) -> Tensor:
        return (tree["a"] * tree["b"][0]).sum()

    _, grads = func.value_and_grads(fn)({"a": w, "b": [w]})
    rows = func.per_loss_grads(fn)({"a": w, "b": [w]})
    _, (first, second) = func.value_and_grads(lambda a, b: (a * b).sum(), (0, 1))(w, w)
    for one, two in ((grads["a"], grads["b"][0]), (rows["a"], rows["b"][0]), (first, second)):
        assert_same_bits([one, two], [expected, expected])
        assert one.data_ptr() != two.data_ptr()
    # A place that argnums does not name is another value: a target network, say.
    _, alone = func.value_and_grads(lambda a, b: (a * b).sum())(w, w)
    assert_same_bits([alone], [w])


def test_tied_weights_of_a_module(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3)).to(device)
    model[2].weight = model[0].weight
    x = torch.randn(4, 3, device=device)
    call, params, buffers = func.make_functional(model)
    assert list(params) == ["0.weight", "2.bias"]
    _, grads = func.value_and_grads(lambda p: call(p, buffers, x)[0].square().sum())(params)
    _, expected = gradkit.value_and_grads(model(x).square().sum(), model)
    assert_same_bits(grads.values(), expected.values())


def test_grad_dtype_is_that_of_the_sum_over_the_uses(device: torch.device) -> None:
    w = torch.ones(3, dtype=torch.bfloat16, device=device, requires_grad=True)
    w.grad_dtype = torch.float32
    unused = torch.ones(2, dtype=torch.bfloat16, device=device, requires_grad=True)
    unused.grad_dtype = torch.float32

    def fn(params: Any) -> Tensor:
        return sum(((params[0] * (1 + k / 256)).float() * (1 + k)).sum() for k in range(4))

    _, grads = func.value_and_grads(fn)([w, unused])
    _, expected = gradkit.value_and_grads(fn([w, unused]), [w, unused], unused="zeros")
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]
    assert_same_bits(grads, expected)
    rows = func.per_loss_grads(fn)([w, unused])
    assert_same_bits(rows, expected)
    cast = expected[0].bfloat16()
    assert not torch.equal(cast.float(), expected[0]), "the case must tell them apart"


def test_frozen_parameters_have_zeros_and_plain_tensors_gradients(device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    model.weight.requires_grad_(False)
    call, params, buffers = func.make_functional(model)
    x = torch.ones(1, 2, device=device)
    _, grads = func.value_and_grads(lambda p: call(p, buffers, x)[0].sum())(params)
    assert not grads["weight"].any()
    assert grads["weight"].shape == model.weight.shape
    assert (grads["bias"] == 1).all()
    plain = {name: p.detach() for name, p in params.items()}
    _, grads = func.value_and_grads(lambda p: call(p, buffers, x)[0].sum())(plain)
    assert (grads["weight"] == 1).all()


def test_no_result_carries_a_graph_if_asked(device: torch.device) -> None:
    outside = torch.ones(2, device=device, requires_grad=True)
    params = [torch.ones(2, device=device, requires_grad=True), outside * 2]

    def fn(params: Any) -> Any:
        return (params[0] * params[1] * outside).sum(), {"out": params[0] * outside, "raw": outside}

    (value, aux), grads = func.value_and_grads(fn, has_aux=True, create_graph=False)(params)
    rows, _ = func.per_loss_grads(fn, has_aux=True, create_graph=False)(params)
    samples, each = func.per_sample_grads(
        lambda w, x: ((w * x * outside).sum(), outside * 2), has_aux=True, create_graph=False
    )(params[0], params[1])
    one = func.value_and_grads(lambda w, x: (w * x * outside).sum(), create_graph=False)
    batched = torch.vmap(one, in_dims=(None, 0))(params[0], params[1])
    products = func.hvp(lambda p: fn(p)[0], params, params, create_graph=False)
    for result in (value, aux["out"], aux["raw"], *grads, *rows, samples, each, *batched):
        assert not result.requires_grad
    assert not any(result.requires_grad for result in (*products[0], *products[1]))
    assert outside.grad is None
    _, again = func.value_and_grads(lambda p: fn(p)[0])(params)
    assert_same_bits(again, grads)


def test_any_tree(device: torch.device) -> None:
    one = torch.ones(2, device=device)
    tree = OrderedDict(z=one, a=[None, {"k": one * 2}], m=(one * 3,))
    values, grads = func.value_and_grads(
        lambda t: OrderedDict(y=t["z"].sum(), b=(t["a"][1]["k"] * t["m"][0]).sum())
    )(tree)
    assert list(values) == ["y", "b"]
    assert type(values) is OrderedDict
    assert list(grads) == ["z", "a", "m"]
    assert type(grads) is OrderedDict
    assert grads["a"][0] is None
    assert_same_bits([grads["a"][1]["k"], grads["m"][0]], [one * 3, one * 2])


def test_aux_is_any_tree(device: torch.device) -> None:
    w = torch.ones(2, device=device)
    (_, aux), _ = func.value_and_grads(
        lambda w: ((w * 2).sum(), {"h": w * 2, "name": "x", "none": None, "n": [1, w.sum()]}),
        has_aux=True,
    )(w)
    assert aux["name"] == "x"
    assert aux["none"] is None
    assert aux["n"][0] == 1
    assert_same_bits([aux["h"], aux["n"][1]], [w * 2, w.sum()])


def test_a_sparse_gradient_stays_sparse(device: torch.device) -> None:
    table = torch.randn(5, 2, device=device)
    where = torch.tensor([1, 1, 3], device=device)
    leaf = table.clone().requires_grad_()
    loss = functional.embedding(where, leaf, sparse=True).sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    _, grad = func.value_and_grads(lambda w: functional.embedding(where, w, sparse=True).sum())(
        table
    )
    assert grad.layout == torch.sparse_coo
    assert_same_bits([grad], [expected])


def test_in_inference_mode_the_gradients_are_ordinary_tensors(device: torch.device) -> None:
    with torch.inference_mode():
        made_here = torch.ones(2, device=device)
        _, grad = func.value_and_grads(lambda w: (w**3).sum())(made_here)
        rows = func.per_sample_grads(lambda w, x: (w * x).sum())(made_here, made_here)
    for result in (grad, rows):
        assert not result.is_inference()
    assert_same_bits([grad], [torch.full((2,), 3.0, device=device)])


def test_the_function_may_raise(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    with unchanged(w), pytest.raises(KeyError, match="mine"):
        func.value_and_grads(lambda w: {}["mine"])(w)
    assert torch._C._functorch.maybe_current_level() is None
    _, grad = func.value_and_grads(lambda w: (w * 2).sum())(w)
    assert_same_bits([grad], [torch.full((2,), 2.0, device=device)])


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_what_a_function_has_drawn_before_it_raises_is_put_back(
    device: torch.device, error: type[BaseException]
) -> None:
    w, x = torch.ones(3, device=device), torch.ones(4, 3, device=device)
    calls_left = [0]

    def fn(w: Tensor, *_: Tensor) -> Tensor:
        torch.rand(1)
        product = functional.dropout(w).sum()
        calls_left[0] -= 1
        if calls_left[0] < 0:
            raise error
        return product

    each: Any = {"randomness": "different", "chunk_size": 2}
    calls: dict[str, Any] = {
        "value_and_grads": lambda: func.value_and_grads(fn)(w),
        "per_loss_grads": lambda: func.per_loss_grads(fn)(w),
        "per_sample_grads, the second chunk": lambda: func.per_sample_grads(fn, **each)(w, x),
        "a loop, the second sample": lambda: func.per_sample_grads(
            lambda w, x: fn(w) * x.sum().item(), **each
        )(w, x),
        "vjp": lambda: func.vjp(fn, w),
        "jvp": lambda: func.jvp(fn, w, w),
        "hvp": lambda: func.hvp(fn, w, w),
        "linearize": lambda: func.linearize(fn, w),
        "checkpoint": lambda: func.checkpoint(fn)(w),
        "check_grads": lambda: func.check_grads(fn, w),
        "tasks": lambda: gradkit.meta.mean_value_and_grads(fn, w, x, tasks_at_once=1),
    }
    for name, call in calls.items():
        before = torch.get_rng_state()
        calls_left[0] = {"per_sample_grads": 1, "a loop": 2, "tasks": 2}.get(name.split(",")[0], 0)
        with pytest.raises(error):
            call()
        assert torch.equal(torch.get_rng_state(), before), name


def test_unused_is_that_of_the_eager_call(device: torch.device) -> None:
    a, b = torch.ones(2, device=device), torch.ones(3, device=device)
    frozen = nn.Parameter(torch.ones(1, device=device), requires_grad=False)
    params = {"a": a, "b": [b, b], "frozen": frozen, "n": None}

    def one(p: Any) -> Tensor:
        return (p["a"] ** 2).sum()

    def both(p: Any) -> Any:
        return {"a": p["a"] ** 2, "b": p["b"][0].sum(), "empty": p["a"][:0]}

    _, grads = func.value_and_grads(one, unused="none")(params)
    assert grads == {"a": grads["a"], "b": [None, None], "frozen": None, "n": None}
    assert_same_bits([grads["a"]], [2 * a])
    _, zeros = func.value_and_grads(one, unused="zeros")(params)
    assert_same_bits([*zeros["b"], zeros["frozen"]], [b * 0, b * 0, frozen.detach() * 0])
    assert zeros["b"][0].data_ptr() != zeros["b"][1].data_ptr()
    for options in ({}, {"strategy": "batched"}, {"chunk_size": 1}):
        rows = func.per_loss_grads(both, unused="none", **options)(params)
        assert rows["a"]["b"] == [None, None]
        assert rows["b"]["a"] is None
        assert rows["empty"]["b"] == [None, None]
        assert rows["empty"]["a"].shape == (0, 2)
        torch.testing.assert_close(rows["a"]["a"], torch.diag(2 * a))
    for chunk in (None, 2):
        samples = func.per_sample_grads(lambda p, x: one(p) * x, unused="none", chunk_size=chunk)(
            params, torch.ones(5, device=device)
        )
        assert samples["b"] == [None, None]
        assert samples["a"].shape == (5, 2)


def test_unused_error_names_the_tensor(device: torch.device) -> None:
    a = torch.ones(2, device=device, requires_grad=True)
    b = torch.ones(3, device=device, requires_grad=True)
    a.grad = torch.ones_like(a)
    tree = {"a": a, "b": b}
    calls: list[Any] = [
        lambda: func.value_and_grads(lambda x, p: p["a"].sum(), 1, unused="error")(a, tree),
        lambda: func.per_loss_grads(
            lambda x, p: {"a": p["a"].sum(), "b": p["b"] * p["a"].sum()}, 1, unused="error"
        )(a, tree),
        lambda: func.per_sample_grads(lambda x, p: p["a"].sum() * x, 1, unused="error")(a, tree),
    ]
    for call in calls:
        with (
            unchanged(a, b),
            pytest.raises(gradkit.UnreachedParamError, match=r"args\[1\]\['b'\].*from every loss"),
        ):
            call()
    _, grads = func.value_and_grads(lambda p: (p["a"].sum() * p["b"]).sum(), unused="error")(tree)
    assert all(grad is not None for grad in grads.values())


def test_a_module_stands_for_its_named_parameters(device: torch.device) -> None:
    model, x, y = a_model("mlp", device)
    params = dict(model.named_parameters())

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        assert list(params) == [name for name, _ in model.named_parameters()]
        return functional.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    def nested(tree: Any, x: Tensor) -> Tensor:
        return loss(tree["net"], x, y) * tree["scale"]

    value, grads = func.value_and_grads(loss)(model, x, y)
    expected, by_dict = func.value_and_grads(loss)(params, x, y)
    assert list(grads) == list(params)
    assert_same_bits([value, *grads.values()], [expected, *by_dict.values()])
    scale = torch.tensor(2.0, device=device)
    _, deep = func.value_and_grads(nested)({"net": model, "scale": scale}, x)
    assert_same_bits([deep["scale"]], [expected])
    rows = func.per_loss_grads(loss)(model, x, y)
    assert_same_bits(rows.values(), by_dict.values())
    samples = func.per_sample_grads(lambda p, x, y: loss(p, x[None], y[None]))(model, x, y)
    by_dict = func.per_sample_grads(lambda p, x, y: loss(p, x[None], y[None]))(params, x, y)
    assert_same_bits(samples.values(), by_dict.values())
    along = {name: torch.ones_like(p) for name, p in params.items()}
    by_module = func.hvp(lambda p: loss(p, x, y), model, along)
    by_dict = func.hvp(lambda p: loss(p, x, y), params, along)
    for ours, theirs in zip(by_module, by_dict, strict=True):
        assert_same_bits(ours.values(), theirs.values())
    # What argnums does not name goes to the function as it is.
    _, grad = func.value_and_grads(lambda x, m: m(x).sum())(x, model)
    assert grad.shape == x.shape


def test_an_iterator_and_an_optimizer_stand_for_tuples(device: torch.device) -> None:
    model = nn.Linear(3, 2).to(device)
    x = torch.randn(4, 3, device=device)

    def loss(params: Any) -> Tensor:
        assert type(params) is tuple
        return functional.linear(x, *params).square().sum()

    _, expected = gradkit.value_and_grads(model(x).square().sum(), model.parameters())
    makers: list[Any] = [
        model.parameters,
        dict(model.named_parameters()).values,
        lambda: torch.optim.SGD(model.parameters()),
    ]
    for make in makers:
        _, grads = func.value_and_grads(loss)(make())
        assert type(grads) is tuple
        assert_same_bits(grads, expected)


def test_strategies_are_those_of_the_eager_call(device: torch.device) -> None:
    w = torch.randn(6, device=device, dtype=torch.float64)

    def fn(w: Tensor) -> Any:
        return {"vector": w.sin(), "scalar": w.square().sum(), "matrix": (w * w).reshape(2, 3)}

    expected = func.per_loss_grads(fn, strategy="sequential")(w)
    default = func.per_loss_grads(fn)(w)
    for name in expected:
        assert_same_bits([default[name]], [expected[name]])
    for options in (
        {"strategy": "batched"},
        {"strategy": "batched", "chunk_size": 4},
        {"strategy": "auto"},
        {"chunk_size": 4},
        {"strategy": "sequential", "chunk_size": 4},
    ):
        got = func.per_loss_grads(fn, **options)(w)
        for name, grads in expected.items():
            torch.testing.assert_close(got[name], grads, rtol=1e-14, atol=1e-14)
            assert got[name].stride() == grads.stride()
    with pytest.warns(gradkit.GradkitWarning, match="batch of one"):
        func.per_loss_grads(lambda w: w.sum(), strategy="batched")(w)


def test_the_size_of_a_batched_pass_is_bounded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = engine.vmapped_grads

    def counting(run_one: Any, seeds: Tensor) -> Any:
        sizes.append(len(seeds))
        return run(run_one, seeds)

    monkeypatch.setattr(engine, "vmapped_grads", counting)
    w = torch.randn(5, device=device)
    for options, expected in (
        ({}, []),
        ({"strategy": "batched"}, [5]),
        ({"strategy": "batched", "chunk_size": 2}, [2, 2, 1]),
        ({"chunk_size": 3}, [3, 2]),
        ({"strategy": "sequential", "chunk_size": 3}, []),
    ):
        sizes.clear()
        func.per_loss_grads(lambda w: w * w, **options)(w)
        assert sizes == expected
