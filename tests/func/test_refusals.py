"""What gradkit.func refuses, and that nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import func, meta
from tests.helpers import Halve, unchanged


def never(*args: Any) -> Any:
    raise AssertionError("the function has run")


CALLS: dict[str, Callable[..., Any]] = {
    "value_and_grads": lambda fn, tree: func.value_and_grads(fn)(tree),
    "per_loss_grads": lambda fn, tree: func.per_loss_grads(fn)(tree),
    "per_sample_grads": lambda fn, tree: func.per_sample_grads(fn)(tree, torch.ones(2)),
    "hvp": lambda fn, tree: func.hvp(fn, tree, tree),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


BAD_LEAVES: dict[str, tuple[Any, type[Exception], str]] = {
    "a module without parameters": (
        nn.Tanh(),
        gradkit.UnreachedParamError,
        "a module without parameters",
    ),
    "a lazy module": (
        nn.LazyLinear(1),
        gradkit.LeafTypeError,
        r"(?s)\['weight'\].*forward pass first",
    ),
    "an iterator read through": (iter(()), gradkit.UnreachedParamError, "read only once"),
    "a number": ([1.0], gradkit.LeafTypeError, r"(args\[0\]|primals)\[0\]"),
    "an array of integers": (
        {"a": torch.ones(1, dtype=torch.long)},
        gradkit.LeafTypeError,
        r"(args\[0\]|primals)\['a'\].*int64",
    ),
    "nothing": ({}, gradkit.UnreachedParamError, "a tensor to differentiate"),
    "None": ([None], gradkit.UnreachedParamError, "a tensor to differentiate"),
    "frozen": (
        [nn.Parameter(torch.ones(1), requires_grad=False)],
        gradkit.UnreachedParamError,
        "frozen",
    ),
}


@every_call
@pytest.mark.parametrize("case", BAD_LEAVES)
def test_bad_leaves(device: torch.device, call: Callable[..., Any], case: str) -> None:
    tree, error, text = BAD_LEAVES[case]
    with pytest.raises(error, match=text):
        call(never, tree)


BAD_LOSSES: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {
    "a float": (lambda w: {"x": 1.0}, gradkit.LeafTypeError, r"losses\['x'\]"),
    "None": (lambda w: None, gradkit.LeafTypeError, "losses"),
    "complex": (lambda w: (w * 1j).sum(), gradkit.LeafTypeError, "complex64"),
    "integer": (lambda w: w.sum().long(), gradkit.LeafTypeError, "int64"),
    "empty": (lambda w: {}, gradkit.StructureError, "losses"),
    "constant": (lambda w: torch.ones(()), gradkit.DetachedLossError, "argnums"),
    "detached": (lambda w: [w.detach().sum()], gradkit.DetachedLossError, r"losses\[0\]"),
    "of a closure": (lambda w: OUTSIDE.sum(), gradkit.DetachedLossError, "make_functional"),
    "from outside": (lambda w: OUTSIDE, gradkit.DetachedLossError, "losses"),
    "backward": (lambda w: (w.sum().backward(), w.sum())[1], gradkit.UnsupportedGraphError, "nest"),
    "batch norm from outside": (
        lambda w: NORM(w[None].expand(3, 2)).sum(),
        gradkit.UnsupportedGraphError,
        "make_functional|mixes the samples",
    ),
    "requires_grad_": (
        lambda w: w.detach().requires_grad_().sum(),
        (gradkit.UnsupportedGraphError, gradkit.DetachedLossError),  # by the engine, it cuts
        "requires_grad_|cuts the path",
    ),
    "a checkpoint": (
        lambda w: checkpoint(lambda w: (w**2).sum(), w, use_reentrant=False),
        gradkit.UnsupportedGraphError,
        "checkpoint|forward mode AD",  # the second: hvp, in torch 2.11
    ),
    "a Function with ctx": (
        lambda w: Halve.apply(w, w).sum(),
        gradkit.UnsupportedGraphError,
        "setup_context",
    ),
}
NORM: nn.Module = nn.BatchNorm1d(2)
OUTSIDE: Tensor = torch.tensor(2.0, requires_grad=True) * 3


# By the engine, they are what they would be outside; where torch.func is needed, they are refused.
BY_ENGINE = {"a checkpoint", "a Function with ctx"}


@every_call
@pytest.mark.parametrize("case", BAD_LOSSES)
def test_bad_losses(device: torch.device, call: Callable[..., Any], case: str) -> None:
    fn, error, text = BAD_LOSSES[case]
    if case in BY_ENGINE and call in (CALLS["value_and_grads"], CALLS["per_loss_grads"]):
        w = torch.ones(2, requires_grad=True)
        _, right = gradkit.value_and_grads(fn(w), w)
        got = call(fn, w)
        assert torch.equal(got if isinstance(got, Tensor) else got[1], right)
        return
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)
    with unchanged(w), pytest.raises(error, match=text):
        call(lambda w, *_: fn(w), w)
    assert torch._C._functorch.maybe_current_level() is None
    assert torch.overrides._get_current_function_mode() is None
    assert OUTSIDE.grad_fn is not None


@every_call
@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda w: (w.sum(), 0.5), r"(?s)losses\[1\].*float 0.5.*has_aux=True"),
        (lambda w: (w.sum(), {"n": 3}), r"(?s)losses\[1\]\['n'\].*has_aux=True"),
        (lambda w: (w.sum(), w.argmax()), r"(?s)losses\[1\].*int64.*has_aux=True"),
        (lambda w: w.sum, r"(?s)losses: .*call it, and return the loss"),
        (lambda w: NORM, r"(?s)losses: .*a BatchNorm1d.*return the loss"),
    ],
)
def test_what_is_returned_by_mistake(
    device: torch.device, call: Callable[..., Any], fn: Callable[[Tensor], Any], text: str
) -> None:
    w = torch.ones(2, requires_grad=True)
    with unchanged(w), pytest.raises(gradkit.LeafTypeError, match=text):
        call(lambda w, *_: fn(w), w)


def test_options_are_checked_when_the_function_is_made(device: torch.device) -> None:
    for make, options in (
        (func.value_and_grads, {"unused": "zero"}),
        (func.value_and_grads, {"unused": None}),
        (func.value_and_grads, {"has_aux": 1}),
        (func.per_loss_grads, {"unused": "zero"}),
        (func.per_loss_grads, {"strategy": "parallel"}),
        (func.per_loss_grads, {"strategy": True}),
        (func.per_loss_grads, {"has_aux": "yes"}),
        (func.per_sample_grads, {"unused": ""}),
        (func.per_sample_grads, {"randomness": "none"}),
        (func.per_sample_grads, {"has_aux": None}),
    ):
        name = next(iter(options))
        with pytest.raises(gradkit.OptionError, match=rf"^{name}: expected .*got .*\n.*{name}="):
            make(never, **options)


def test_a_wrapped_module_is_refused(device: torch.device) -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(
        gradkit.UnsupportedGraphError, match=r"args\[0\]: .*DistributedDataParallel"
    ):
        func.value_and_grads(never)(wrapped)


def test_layers_that_are_not_registered_are_named(device: torch.device) -> None:
    for call in CALLS.values():
        with pytest.raises(gradkit.UnreachedParamError, match=r"(?s)module.layers.*ModuleList"):
            call(never, Hidden())


class Hidden(nn.Module):
    """A module whose layers are in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(1, 1)]


@pytest.mark.parametrize("name", ["value_and_grads", "per_sample_grads", "hvp"])
def test_a_loss_of_several_elements(device: torch.device, name: str) -> None:
    with pytest.raises(gradkit.NotScalarLossError, match=r"losses\[1\].*shape \(2,\)"):
        CALLS[name](lambda w, *_: (w.sum(), w), torch.ones(2))


def test_the_graph_of_a_loss_from_outside_survives(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    outside = (w**2).sum()
    values, grads = func.value_and_grads(
        lambda v: {"a": outside, "b": v.sum()}, create_graph=False
    )(w)
    assert values["a"] == 2
    assert not values["a"].requires_grad
    assert (grads == 1).all()
    outside.backward()
    assert (w.grad == 2).all()


@pytest.mark.parametrize("argnums", [1, -2, (0, 0), (), (0, 1), True, "0", [0], 0.0])
def test_bad_argnums(device: torch.device, argnums: Any) -> None:
    for call in (func.value_and_grads, func.per_loss_grads):
        with pytest.raises(gradkit.OptionError, match="argnums"):
            call(never, argnums)(torch.ones(2, device=device))
    with pytest.raises(gradkit.OptionError, match="argnums"):
        func.value_and_grads(never)(w=torch.ones(2, device=device))


def test_bad_weights(device: torch.device) -> None:
    w = torch.ones(2, device=device)

    def fn(w: Tensor) -> Any:
        return {"a": w.sum(), "b": w.sum()}

    with pytest.raises(gradkit.StructureError, match="weights"):
        func.value_and_grads(fn, weights={"a": 1.0})(w)
    with pytest.raises(gradkit.LeafTypeError, match=r"losses\['b'\]"):
        func.value_and_grads(fn, weights={"a": 1.0, "b": "x"})(w)


@pytest.mark.parametrize("returned", [lambda w: w.sum(), lambda w: (w.sum(), 1, 2)])
def test_without_the_aux_it_promised(device: torch.device, returned: Any) -> None:
    w = torch.ones(2, device=device)
    for call in (func.value_and_grads, func.per_loss_grads):
        with pytest.raises(gradkit.StructureError, match="has_aux"):
            call(returned, has_aux=True)(w)
    with pytest.raises(gradkit.StructureError, match="has_aux"):
        func.per_sample_grads(lambda w, x: returned(w * x), has_aux=True)(w, w)


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "2", True])
def test_bad_chunk_size(device: torch.device, chunk: Any) -> None:
    for call in (func.per_loss_grads, func.per_sample_grads):
        with pytest.raises(gradkit.OptionError, match=r"^chunk_size"):
            call(never, chunk_size=chunk)


def test_bad_tangents(device: torch.device) -> None:
    w = torch.ones(2, device=device)
    cases = {
        "tangents": ({"b": w}, gradkit.StructureError),
        "shape": ({"a": torch.ones(3, device=device)}, gradkit.StructureError),
        "float64": ({"a": w.double()}, gradkit.StructureError),
        "a tensor or None": ({"a": 1.0}, gradkit.LeafTypeError),
    }
    for text, (tangents, error) in cases.items():
        with pytest.raises(error, match=text):
            func.hvp(never, {"a": w}, tangents)
    with pytest.raises(gradkit.OptionError, match="mode"):
        func.hvp(never, w, w, mode="reverse-over-forward")
    with pytest.raises(gradkit.LeafTypeError, match="view_as_real"):
        func.hvp(never, w + 1j, w + 1j)


class Opaque:
    """A container that optree does not know."""

    def __init__(self, content: Any) -> None:
        self.content = content


def test_containers_that_nobody_can_look_into(device: torch.device) -> None:
    w, x = torch.ones(2, device=device), torch.ones(3, 2, device=device)
    for batch in (Opaque(x), np.ones((3, 2))):
        with pytest.raises(gradkit.LeafTypeError, match=r"args\[2\].*no tree that optree knows"):
            func.per_sample_grads(never)(w, x, batch)
    with pytest.raises(gradkit.StructureError, match="keyword argument"):
        func.per_sample_grads(never)(w, x, y=x)
    with pytest.raises(gradkit.LeafTypeError, match=r"aux\['h'\].*no tree that optree knows"):
        func.value_and_grads(lambda w: (w.sum(), {"h": Opaque(w * 2)}), has_aux=True)(w)
    assert torch._C._functorch.maybe_current_level() is None


def test_one_tensor_with_two_batch_dimensions(device: torch.device) -> None:
    w = torch.arange(9.0, device=device).reshape(3, 3)
    for dims in ((0, 1), (0, None)):
        with pytest.raises(gradkit.StructureError, match="one tensor in two places"):
            func.per_sample_grads(never, (0, 1), in_dims=dims)(w, w)
    grads = func.per_sample_grads(lambda a, b: (a * b).sum(), (0, 1), in_dims=(0, 1))(w, w.clone())
    torch.testing.assert_close(grads, (w.T, w))


def test_without_a_forward_derivative_the_other_mode_is_taken(device: torch.device) -> None:
    x = torch.rand(3, 3, device=device)

    def loss(x: Tensor) -> Tensor:
        return torch.ormqr(x, x[0], x).square().sum()

    with pytest.warns(gradkit.GradkitWarning, match="failed on ormqr, .*reverse-over-reverse"):
        got = func.hvp(loss, x, x)
    torch.testing.assert_close(got, func.hvp(loss, x, x, mode="reverse-over-reverse"))


class Plus(torch.autograd.Function):
    """Without a rule for vmap, which torch says by a `raise` in its own Python."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


UNBATCHABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": lambda w, x: (w * x).sum() * x.sum().item(),
    "a number": lambda w, x: (w * x).sum() * float(x.sum()),
    "a condition": lambda w, x: (w * x).sum() if x.sum() > 0 else w.sum(),
    "numpy": lambda w, x: (w * torch.from_numpy(x.cpu().numpy())).sum(),
    "a list": lambda w, x: w.sum() * sum(x.tolist()),
    "a mask": lambda w, x: (w * x)[x > 0].sum(),
    "in place": lambda w, x: torch.zeros_like(w.detach()).add_(x.detach() * w.detach()).sum() * w,
    "shapes": lambda w, x: (torch.ones(3, 5, device=w.device) @ w).sum(),
    "a backward pass": lambda w, x: (w * Plus.apply(x * w)).sum(),
    "operator by name": lambda w, x: torch.ops.aten.dot(w, x[:1]),
    "torch's Python": lambda w, x: torch.unique(x).sum() * w.sum(),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", UNBATCHABLE)
def test_what_torch_raises_in_a_vmap_raises_with_what_to_do(
    device: torch.device, name: str
) -> None:
    """In the caller's own; gradkit's falls back to a loop, of which meta/test_task_fallback.py."""
    w, x = torch.ones(2, device=device), torch.ones(3, 2, device=device)
    with unchanged(w, x), pytest.raises(gradkit.UnsupportedGraphError) as caught:
        torch.vmap(func.value_and_grads(UNBATCHABLE[name]), (None, 0))(w, x)
    cause = caught.value.__cause__
    assert type(cause) in (RuntimeError, NotImplementedError)
    assert str(caught.value).count("What to do") == 1
    assert not str(caught.value).startswith("fn: expected a function") or (
        str(cause).partition("\n")[0].rstrip(".") in str(caught.value)
    )


class MineError(RuntimeError):
    pass


def raises(error: Exception) -> Callable[..., Any]:
    def fn(*args: Any) -> Any:
        raise error

    return fn


def raises_in_backward(error: Exception) -> Callable[..., Any]:
    def fn(w: Tensor, *args: Any) -> Any:
        product = w * 2
        product.register_hook(raises(error))
        return product.sum()

    return fn


@pytest.mark.parametrize("where", [raises, raises_in_backward])
@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, MineError, ValueError])
def test_what_fn_raises_itself_comes_unchanged(
    device: torch.device, where: Callable[..., Any], kind: type[Exception]
) -> None:
    error = kind("vmap: mine")
    fn, w, x = where(error), torch.ones(2, device=device), torch.ones(3, 2, device=device)
    calls: list[Callable[[], Any]] = [
        lambda: func.per_sample_grads(fn)(w, x),
        lambda: func.value_and_grads(fn)(w),
        lambda: func.hvp(fn, w, w),
        lambda: func.hvp(fn, w, w, mode="reverse-over-reverse"),
        lambda: gradkit.meta.mean_value_and_grads(fn, w, x),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value is error


def test_without_a_transform_around_torch_s_text_is_left(device: torch.device) -> None:
    """One level differentiates nearly all that torch does: what fails there is mostly fn itself."""
    w = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        func.value_and_grads(lambda w: (torch.ones(3, 5, device=w.device) @ w).sum())(w)
    assert type(caught.value) is RuntimeError
    with pytest.raises(gradkit.UnsupportedGraphError, match="reads memory"):
        func.value_and_grads(lambda w: torch.from_numpy(w.cpu().numpy()).sum())(w)


def test_what_was_made_in_inference_mode_raises_with_what_to_do(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    with torch.inference_mode():
        t = torch.ones(2, device=device)

    def square(w: Tensor) -> Tensor:
        return (w * w).sin()

    calls: list[Callable[[], object]] = [
        lambda: func.vjp(square, w)[1](t),
        lambda: func.linearize(square, w)[1](t),
        lambda: func.hvp(lambda w: square(w).sum(), w, t),
        lambda: func.ggn_vp(square, torch.sum, w, t),
    ]
    for call in calls:
        with pytest.raises(gradkit.UnsupportedGraphError, match="made in inference mode"):
            call()
    assert func.vjp(square, w)[1](t.clone())[0].shape == (2,)
    assert torch.equal(func.jvp(square, w, t)[1], func.jvp(square, w, t.clone())[1])


@pytest.mark.parametrize("mode", ["forward-over-reverse", "reverse-over-reverse"])
def test_what_torch_raises_in_hvp_raises_with_what_to_do(device: torch.device, mode: Any) -> None:
    w = torch.rand(3, device=device)
    with unchanged(w), pytest.raises(gradkit.UnsupportedGraphError, match="What to do") as caught:
        func.hvp(lambda w: (w * torch.ones(2, device=w.device)).sum(), w, w, mode=mode)
    assert type(caught.value.__cause__) is RuntimeError


@pytest.mark.parametrize("in_dims", [True, (None, True), (None, "0"), (None, 0.0)])
def test_in_dims_are_ints(device: torch.device, in_dims: Any) -> None:
    w, x = torch.ones(2, device=device), torch.ones(3, 2, device=device)
    with pytest.raises(gradkit.StructureError, match=r"expected an int or None in in_dims, and no"):
        func.per_sample_grads(never, in_dims=in_dims)(w, x)


def loss_and_metric(w: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return (w * w).sum(), w.max()


@pytest.mark.parametrize("metric", [lambda w: w.max(), lambda w: w.detach().max(), dict])
def test_a_bare_pair_is_not_summed(device: torch.device, metric: Callable[..., Any]) -> None:
    """It may be (loss, aux), whose metric would change the gradient silently."""
    w, x = torch.tensor([1.0, 2.0], device=device), torch.ones(3, 2, device=device)

    def fn(w: Tensor, *_: Tensor) -> Any:
        return (w * w).sum(), metric(w) if metric is not dict else {"max": w.max()}

    calls: list[Callable[[], Any]] = [
        lambda: func.value_and_grads(fn)(w),
        lambda: func.per_sample_grads(fn)(w, x),
        lambda: func.hvp(fn, w, w),
        lambda: func.hvp(fn, w, w, mode="reverse-over-reverse"),
        lambda: func.ggn_vp(lambda w: w, fn, w, w),
    ]
    for call in calls:
        with (
            unchanged(w, x),
            pytest.raises(gradkit.StructureError, match=r"(?s)^fn: .*\(loss, aux\).*has_aux=True"),
        ):
            call()
    _, grad = func.value_and_grads(fn, has_aux=True)(w)
    assert torch.equal(grad, 2 * w)
    grad, _ = func.per_sample_grads(fn, has_aux=True)(w, x)
    assert torch.equal(grad, 2 * w.expand(3, 2))


def test_a_pair_of_losses_says_that_it_is_one(device: torch.device) -> None:
    w = torch.tensor([1.0, 3.0], device=device)
    first, second = torch.tensor([2.0, 6.0], device=device), torch.tensor([0.0, 1.0], device=device)
    pairs: list[Callable[[Any], Any]] = [list, Pair._make, lambda p: {"a": p[0], "b": p[1]}]
    for make in pairs:
        _, grad = func.value_and_grads(lambda w, make=make: make(loss_and_metric(w)))(w)
        assert torch.equal(grad, first + second)
    for weights in (1.0, (1.0, 1.0)):
        _, grad = func.value_and_grads(loss_and_metric, weights=weights)(w)
        assert torch.equal(grad, first + second)
    _, grad = func.value_and_grads(lambda w: (loss_and_metric(w), None), has_aux=True)(w)
    assert torch.equal(grad, first + second)
    _, grad = func.value_and_grads(lambda w: (*loss_and_metric(w), w.sum()))(w)
    assert torch.equal(grad, first + second + 1)
    assert torch.equal(func.per_loss_grads(loss_and_metric)(w)[1], second)


def test_weights_of_elements_are_sent_to_vjp(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 3.0], device=device)
    for call, text in (
        (lambda: gradkit.value_and_grads(w * w, w, weights=weights), r"gradkit\.vjp\(loss, params"),
        (lambda: func.value_and_grads(lambda w: w * w, weights=weights)(w), r"func\.vjp\(fn, par"),
    ):
        with pytest.raises(gradkit.NotScalarLossError, match=rf"\(weights \* loss\)\.sum.*{text}"):
            call()
    assert torch.equal(gradkit.vjp(w * w, w, weights), 2 * weights)
    _, pull = func.vjp(lambda w: w * w, w.detach())
    assert torch.equal(pull(weights)[0], 2 * weights)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_a_parameter_made_of_an_argument_cuts_the_path(device: torch.device) -> None:
    """It is a leaf of its own: torch.func gives zeros."""
    x = torch.ones(3, 2, device=device)
    params = {"weight": torch.ones(1, 2, device=device), "bias": torch.zeros(1, device=device)}

    def loss(p: Any, *_: Any) -> Tensor:
        weight, bias = nn.Parameter(p["weight"]), nn.Parameter(p["bias"])
        return nn.functional.linear(x, weight, bias).square().sum()

    def inner(p: Any) -> Tensor:
        adapted = meta.unroll(loss, p, [0], meta.sgd(lr=0.1)).params
        return adapted["weight"].sum()

    calls: list[Callable[[], object]] = [
        lambda: func.value_and_grads(loss)(params),
        lambda: func.per_loss_grads(loss)(params),
        lambda: func.hvp(loss, params, params),
        lambda: func.hvp(loss, params, params, mode="reverse-over-reverse"),
        lambda: func.vjp(loss, params),
        lambda: func.linearize(loss, params),
        lambda: meta.mean_value_and_grads(loss, params, torch.zeros(2, device=device)),
    ]
    for call in calls:
        with (
            unchanged(*params.values()),
            pytest.raises(gradkit.DetachedLossError, match=r"nn\.Parameter"),
        ):
            call()
    with pytest.raises(gradkit.UnreachedParamError, match="does not depend on them"):
        func.value_and_grads(inner)(params)
    _, grads = func.value_and_grads(lambda p: loss(p) + p["bias"].sum())(params)
    assert not grads["weight"].any()  # some argument is reached, and this one has no part in it
    assert grads["bias"] == 1


def test_params_in_the_place_of_argnums(device: torch.device) -> None:
    """They belong to the function that the call returns: it raises, and not the unpacking of it."""
    w = torch.ones(2, device=device)
    for call in (func.value_and_grads, func.per_loss_grads, func.per_sample_grads):
        with pytest.raises(
            gradkit.OptionError, match=r"argnums: .*(?s:.*)value_and_grads\(fn\)\(w\)"
        ):
            call(lambda w: w.sum(), {"w": w})
    with pytest.raises(gradkit.OptionError, match=r"argnums: .*none in it"):
        func.value_and_grads(lambda w: w.sum())(w=w)


@pytest.mark.parametrize("modes", ["reverse", (), ("rev",), ("reverse", "back")])
def test_modes_of_check_grads(device: torch.device, modes: Any) -> None:
    match = r'What to do: modes=\("reverse", "forward"\)'
    with pytest.raises(gradkit.OptionError, match=match):
        func.check_grads(lambda w: w.sum(), torch.ones(2, device=device), modes=modes)
