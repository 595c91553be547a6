"""`gradkit.vjp` is `torch.autograd.grad(outputs, params, cotangents)`, with the laws of calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import optree
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import gradkit
from gradkit._autograd import engine
from gradkit._compat.autograd import run_engine
from tests.eager.test_passes import no_hook_yet
from tests.helpers import World, assert_owned, assert_same_bits, unchanged
from tests.strategies import HOOKLESS, OPS, SIZE, WRITING, Graph, Program, build, programs

dtypes = st.sampled_from([torch.float64, torch.float32])
# How a cotangent lies in memory; the last is none: its output is not asked for.
KINDS = ("plain", "transposed", "sliced", "row", "column", "one", "zeros", "version", None)
kinds = st.lists(st.sampled_from(KINDS), min_size=5, max_size=5)


def cotangent(kind: str, output: Tensor, seed: int) -> Tensor:
    """A cotangent of a matrix."""
    source = torch.Generator().manual_seed(seed)

    def fresh(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64).to(output)

    match kind:
        case "transposed":
            return fresh(SIZE, SIZE).t()
        case "sliced":
            return fresh(SIZE, 2 * SIZE)[:, ::2]
        case "row":
            return fresh(1, SIZE).expand(SIZE, SIZE)
        case "column":
            return fresh(SIZE, 1).expand(SIZE, SIZE)
        case "one":
            return fresh().expand(SIZE, SIZE)
        case "zeros":
            return torch.zeros_like(output)
        case "version":
            return fresh(SIZE, SIZE).mul_(2)
    return fresh(SIZE, SIZE)


def of_values(graph: Graph, kinds: list[str | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the last values of a graph, and cotangents; some outputs may be in two places."""
    outputs = [graph.values[-1 - i % len(graph.values)] for i in range(len(kinds))]
    pairs = enumerate(zip(kinds, outputs, strict=True))
    return outputs, [None if kind is None else cotangent(kind, x, i) for i, (kind, x) in pairs]


def autograd(graph: Graph, kinds: list[str | None], inputs: list[Tensor], **options: Any) -> Any:
    """What torch gives for the outputs that are asked for."""
    pairs = zip(*of_values(graph, kinds), strict=True)
    asked = [(output, seed) for output, seed in pairs if seed is not None and output.requires_grad]
    assume(asked)
    outputs, seeds = zip(*asked, strict=True)
    return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, **options)


@given(program=programs(), kinds=kinds, dtype=dtypes)
def test_it_is_autograd_grad_bit_for_bit_and_owned(
    device: torch.device, program: Program, kinds: list[str | None], dtype: torch.dtype
) -> None:
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    expected = autograd(theirs, kinds, theirs.leaves)
    outputs, cotangents = of_values(ours, kinds)
    given = [one for one in cotangents if one is not None]
    with unchanged(*ours.leaves, *outputs, *given):
        if all(grad is None for grad in expected):
            with pytest.raises(gradkit.UnreachedParamError):
                gradkit.vjp(outputs, ours.leaves, cotangents)
            return
        grads = gradkit.vjp(outputs, ours.leaves, cotangents)
    assert_same_bits(grads, expected)
    assert_same_bits(ours.kept, theirs.kept)  # by hooks
    assert_owned(grads, ours.leaves)
    world = World(*ours.leaves, *outputs, *given)
    for grad in grads:
        if grad is not None:
            grad.add_(1)
    world.assert_unchanged()


@given(program=programs(ops=HOOKLESS, leaf_hooks=False), kinds=kinds, fresh=st.booleans())
@example(
    program=Program(0, ("plain",), (("add", 0, 0),), (("sum", 0),)),
    kinds=["plain"] * 5,
    fresh=False,
)
def test_intermediate_values_where_no_hook_was_ever_registered(
    device: torch.device, program: Program, kinds: list[str | None], fresh: bool
) -> None:
    """Also an output that is a parameter itself, whose gradient is its cotangent."""
    theirs, ours = build(program, device, torch.float64), build(program, device, torch.float64)
    expected = autograd(theirs, kinds, theirs.values)
    outputs, cotangents = of_values(ours, kinds)
    given = [one for one in cotangents if one is not None]
    with no_hook_yet() if fresh else nullcontext():
        try:
            grads = gradkit.vjp(outputs, ours.values, cotangents)
        except gradkit.UnreachedParamError as error:
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        assert all(grad is None for grad in expected) or "a view of one, made sep" in refusal
        return
    assert_same_bits(grads, expected)
    world = World(*ours.values, *given)
    for grad in grads:
        if grad is not None:
            grad.add_(1)
    world.assert_unchanged()


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0), (1, 129), (130, 2)])
def test_a_cotangent_keeps_its_layout(device: torch.device, strides: tuple[int, int]) -> None:
    """Of another layout, torch adds up in another order."""
    layer, x = nn.Linear(33, 65).to(device), torch.randn(129, 33, device=device)
    source = torch.randn(129 * 65 * 2, device=device)
    for _ in range(8):
        source, output = source.roll(1), layer(x)
        seed = source.as_strided((129, 65), strides)
        expected = torch.autograd.grad(output, [*layer.parameters()], seed, retain_graph=True)
        assert_same_bits(gradkit.vjp(output, layer.parameters(), seed), expected)


@given(program=programs(ops=(*OPS, *WRITING)), kinds=kinds)
def test_what_writes_on_gradients_leaves_cotangents_alone(
    device: torch.device, program: Program, kinds: list[str | None]
) -> None:
    """Torch lets a hook of an output write on the caller's cotangent."""
    graph = build(program, device, torch.float64)
    outputs, cotangents = of_values(graph, kinds)
    given = [one for one in cotangents if one is not None]
    for output in outputs:
        if not output.is_leaf:
            output.register_hook(written_row)
    with unchanged(*graph.leaves, *given), suppress(gradkit.GradkitError):
        gradkit.vjp(outputs, graph.leaves, cotangents)


def written_row(grad: Tensor | None) -> None:
    if grad is not None and grad.stride(1):
        grad[0].mul_(7)  # also where the rows are one row, which torch lets it write on


@given(program=programs(ops=HOOKLESS, leaf_hooks=False), kinds=kinds, learned=st.booleans())
def test_second_derivatives_also_of_the_cotangents(
    device: torch.device, program: Program, kinds: list[str | None], learned: bool
) -> None:
    results: list[list[Tensor | None]] = []
    for ours in (True, False):
        graph = build(program, device, torch.float64)
        outputs, cotangents = of_values(graph, kinds)
        pairs = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if c is not None]
        pairs = [(x, c.detach().requires_grad_(learned)) for x, c in pairs if x.requires_grad]
        assume(pairs)
        ends = [*graph.leaves, *(seed for _, seed in pairs if learned)]
        asked, seeds = map(list, zip(*pairs, strict=True))
        if ours:
            try:
                first = gradkit.vjp(asked, graph.leaves, seeds, create_graph=True)
            except gradkit.UnreachedParamError:
                first = [None]
        else:
            options: Any = {"create_graph": True, "allow_unused": True}
            first = list(torch.autograd.grad(asked, graph.leaves, seeds, **options))
        present = [grad for grad in first if grad is not None]
        assume(present)
        penalty = torch.stack([grad.sin().sum() for grad in present]).sum()
        assume(penalty.requires_grad)
        grads = torch.autograd.grad(penalty, ends, allow_unused=True)
        zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, ends, strict=True)]
        results.append([*first, *zeros])
    assert_same_bits(*results)


def test_two_products_are_a_jvp(device: torch.device) -> None:
    """The vjp is linear in its cotangent: its own vjp there is the jvp."""

    def fn(x: Tensor) -> Tensor:
        return torch.sin(x[:, :2]) * x.sum()

    x, tangent = torch.randn(2, 4, 3, device=device, dtype=torch.float64)
    x.requires_grad_()
    y = fn(x)
    dummy = torch.zeros_like(y, requires_grad=True)
    pulled = gradkit.vjp(y, x, dummy, create_graph=True)
    dots = gradkit.vjp(pulled, dummy, tangent)
    expected = torch.func.jvp(fn, (x.detach(),), (tangent,))[1]
    torch.testing.assert_close(dots, expected)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_gradient_that_is_the_cotangent_is_a_copy(
    device: torch.device, create_graph: bool, fresh: bool
) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    seed = torch.zeros(3, device=device).add_(2)
    for output in (x + 1, x.view(3, 1).squeeze(1), x):
        with no_hook_yet() if fresh else nullcontext():
            grad = gradkit.vjp(output, x, seed, create_graph=create_graph)
        assert grad.tolist() == [2, 2, 2]
        assert grad.untyped_storage().data_ptr() != seed.untyped_storage().data_ptr()


def test_trees_ties_and_outputs_that_are_not_asked_for(device: torch.device) -> None:
    layer = nn.Linear(3, 2).to(device)
    x = torch.randn(4, 3, device=device)
    out = layer(x)
    outputs = {"out": out, "more": [out * 2, out.argmax(1), "no tensor"], "constant": x}
    cotangents = {"constant": torch.ones_like(x), "more": None, "out": torch.ones_like(out)}
    params = {"layer": layer, "again": [layer.weight, None], "frozen": nn.Parameter(x, False)}
    grads = gradkit.vjp(outputs, params, cotangents, retain_graph=True)
    expected = torch.autograd.grad(out, [layer.weight, layer.bias], torch.ones_like(out), True)
    assert list(grads) == ["layer", "again", "frozen"]
    assert_same_bits(grads["layer"].values(), expected)
    assert_same_bits([grads["again"][0]], expected[:1])
    assert grads["again"][1] is grads["frozen"] is None
    grads["again"][0].zero_()
    assert_same_bits(grads["layer"].values(), expected)  # no two leaves share memory
    cotangents = {**cotangents, "more": [torch.ones_like(out), None, None]}
    grads = gradkit.vjp(outputs, layer, cotangents)
    torch.testing.assert_close(list(grads.values()), [3 * grad for grad in expected])


@pytest.mark.parametrize("keys", [("a", "b"), (1, 2)])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_cotangents_match_by_key(device: torch.device, kind: Any, keys: tuple[Any, Any]) -> None:
    x, (a, b) = torch.ones(2, device=device, requires_grad=True), keys
    cotangents = kind([(b, torch.full_like(x, 10)), (a, torch.ones_like(x))])
    assert gradkit.vjp({a: 2 * x, b: 3 * x}, x, cotangents).tolist() == [32, 32]


def test_a_pass_is_one_call_of_the_engine(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * x
    with patch.object(engine, "run_engine", wraps=run_engine) as passes:
        gradkit.vjp([y, y * 2, y[0]], {"x": x, "y": y}, [y.detach(), y.detach(), y[0].detach()])
    assert passes.call_count == 1


def test_numbers_that_are_complex(device: torch.device) -> None:
    x = torch.randn(3, 2, device=device, dtype=torch.complex128, requires_grad=True)
    w = torch.randn(2, device=device, dtype=torch.float64, requires_grad=True)
    y = torch.sin(x) * w
    seed = torch.randn_like(y).conj()
    expected = torch.autograd.grad(y, [x, w], seed, retain_graph=True)
    assert_same_bits(gradkit.vjp(y, [x, w], seed, retain_graph=True), expected)
    with pytest.raises(gradkit.StructureError, match=r"complex128.*float64"):
        gradkit.vjp(y, [x, w], seed.real)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_shapes_of_none_and_one(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    seed = torch.full(shape, 3.0, device=device)
    grad = gradkit.vjp(x * 2, x, seed)
    assert grad.shape == shape
    assert torch.equal(grad, 2 * seed)


def test_a_batch_of_cotangents_by_vmap(device: torch.device) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    y = x.cumsum(0).sin()
    rows = torch.eye(3, device=device)
    jacobian = torch.vmap(lambda row: gradkit.vjp(y, x, row, retain_graph=True))(rows)
    torch.testing.assert_close(jacobian, gradkit.per_loss_grads(y, x, retain_graph=True))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_transform_must_not_take_the_result_for_a_constant(
    device: torch.device, fresh: bool
) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y, seed = x**2, torch.arange(3.0, device=device)
    call: Callable[..., Any] = lambda v, **kw: gradkit.vjp(y, x, v, **kw).square().sum()  # noqa: E731
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"cotangents.*torch\.func.*\n.*create"):
        torch.func.grad(call)(seed)
    with no_hook_yet() if fresh else nullcontext():
        grad = torch.func.grad(lambda v: call(v, create_graph=True))(seed)
    assert torch.equal(grad, 8 * seed)


X = torch.ones(2, 3)
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "shape": ("y", X[:1], gradkit.StructureError, r"cotangents, for outputs.*\(1, 3\).*\n.*expand"),
    "dtype": ("y", X.double(), gradkit.StructureError, r"float32.*float64.*\n.*\.to\(output\)"),
    "device": ("y", X.to("meta"), gradkit.StructureError, r"on meta"),
    "no tensor": ("y", 1.0, gradkit.LeafTypeError, r"float 1\.0.*\n.*ones_like"),
    "all None": ({"a": "y"}, {"a": None}, gradkit.StructureError, "None for each"),
    "empty": ([], [], gradkit.StructureError, "an empty tree"),
    "keys": ({"a": "y"}, {"b": X}, gradkit.StructureError, "no key 'a', but 'b'.*\n.*or None for"),
    "one for two": ({"a": ["y", "y"]}, {"a": X}, gradkit.StructureError, r"cotangents\['a'\]"),
    "integers": ({"n": "n"}, {"n": X}, gradkit.LeafTypeError, r"outputs\['n'\].*int64.*\n.*None"),
    "an output that is a number": ([1.0], [X], gradkit.LeafTypeError, r"outputs\[0\].*float 1\.0"),
    "second": (["y", "y"], [X, X[0]], gradkit.StructureError, r"cotangents\[1\], for outputs\[1\]"),
    "behind None": (["y", "y"], [None, X[0]], gradkit.StructureError, r"s\[1\], for outputs\[1\]"),
    "constants": ("c", X, gradkit.DetachedLossError, r"outputs: "),
    "a leaf": ("other", X, gradkit.UnreachedParamError, r"outputs are leaf.*\n.*\(outputs, param"),
    "unreached": ("elsewhere", X, gradkit.UnreachedParamError, r"params: .* path from outputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_before_anything_ran(device: torch.device, name: str) -> None:
    tree, seeds, error, text = WRONG[name]
    x, other = (torch.ones(2, 3, device=device, requires_grad=True) for _ in range(2))
    y = x * x
    named = {"y": y, "n": y.long(), "c": y.detach(), "other": other, "elsewhere": other * 2}
    put = partial(optree.tree_map, none_is_leaf=True)
    outputs = put(lambda leaf: named.get(leaf, leaf), tree)
    cotangents = put(lambda leaf: leaf.to(device) if leaf is X else leaf, seeds)
    ran: list[Tensor] = []
    y.register_hook(ran.append)
    x.grad = torch.ones_like(x)
    with unchanged(x, y, X), pytest.raises(error, match=f"(?s){text}"):
        gradkit.vjp(outputs, x, cotangents)
    assert not ran
    assert torch.equal(gradkit.vjp(y, x, X.to(device)), 2 * x)


class Equilibrium(nn.Module):
    """A deep equilibrium layer, z = tanh(W z + x), whose hook solves for its cotangent."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64) / 8)
        self.call, self.passes = call, 0

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(60):
                z = torch.tanh(z @ self.weight + x)
        z = torch.tanh(z @ self.weight + x)
        root = z.detach().requires_grad_()
        again = torch.tanh(root @ self.weight + x)

        def solve(cotangent: Tensor) -> Tensor:
            solution = cotangent
            for _ in range(60):
                self.passes += 1
                solution = cotangent + self.call(again, root, solution)
            return solution

        if z.requires_grad:
            z.register_hook(solve)
        return z


def by_autograd(output: Tensor, root: Tensor, seed: Tensor) -> Tensor:
    return torch.autograd.grad(output, root, seed, retain_graph=True)[0]


def by_gradkit(output: Tensor, root: Tensor, seed: Tensor) -> Tensor:
    grad: Tensor = gradkit.vjp(output, root, seed, retain_graph=True)
    return grad


def exact_grads(layer: Equilibrium, x: Tensor) -> list[Tensor]:
    """What the implicit function theorem says, with a dense solve."""
    weight, z = layer.weight.detach(), layer(x).detach().flatten()

    def step(weight: Tensor, x: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(z.reshape_as(x) @ weight + x).flatten()

    by_weight, by_x, by_z = torch.func.jacrev(step, (0, 1, 2))(weight, x.detach(), z)
    adjoint = torch.linalg.solve(torch.eye(len(z), device=z.device, dtype=z.dtype) - by_z.T, 2 * z)
    return [torch.tensordot(adjoint, by_weight, 1), torch.tensordot(adjoint, by_x, 1)]


OUTER: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "backward": lambda loss, params: torch.autograd.backward(loss),
    "value_and_grads": lambda loss, params: gradkit.value_and_grads(loss, params)[1],
    "per_loss_grads": lambda loss, params: gradkit.per_loss_grads([loss], params)[0],
    "vjp": lambda loss, params: gradkit.vjp(loss, params, torch.ones_like(loss)),
    "backward_": lambda loss, params: gradkit.backward_(loss),
    "create_graph": lambda loss, p: gradkit.value_and_grads(loss, p, create_graph=True)[1],
}


@pytest.mark.parametrize("around", [nullcontext, gradkit.checked])
@pytest.mark.parametrize("outer", OUTER)
def test_a_hook_that_solves_by_products(
    device: torch.device, outer: str, around: Callable[[], Any]
) -> None:
    """A pass in a pass, under the no_grad of hooks, as often as the solver asks for it."""
    grads: list[list[Tensor]] = []
    for call in (by_gradkit, by_autograd):
        torch.manual_seed(0)
        layer = Equilibrium(call).to(device)
        x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
        params = [layer.weight, x]
        with around():
            result = OUTER[outer](layer(x).square().sum(), params)
        assert layer.passes == 60
        if "backward" in outer:
            result = [param.grad for param in params]
        else:
            assert x.grad is layer.weight.grad is None
        grads.append(result)
    assert_same_bits(*grads)
    torch.testing.assert_close(grads[0], exact_grads(layer, x))


def test_products_in_a_hook_write_nothing(device: torch.device) -> None:
    """Nor are they what safe_retain records of the pass around them."""
    layer = Equilibrium(by_gradkit).to(device)
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    z = layer(x)
    with gradkit.safe_retain({"z": z}) as kept:
        _, grads = gradkit.value_and_grads(z.square().sum(), {"z": z, "x": x})
    assert len(kept.passes["z"]) == 1
    assert_same_bits([kept.grads["z"]], [grads["z"]])
    assert x.grad is layer.weight.grad is None


def test_a_graph_needs_gradients_enabled(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y, z = x**3, x * 2
    seed = torch.ones_like(y)
    seen: list[Any] = []

    def hook(_: Tensor) -> None:
        with pytest.raises(gradkit.OptionError, match=r"a hook(?s:.*)with torch\.enable_grad\(\)"):
            gradkit.vjp(y, x, seed, create_graph=True)
        with torch.enable_grad():
            grad = gradkit.vjp(y, x, seed, create_graph=True)
            seen.append(gradkit.vjp(grad, x, seed))

    z.register_hook(hook)
    z.sum().backward()
    assert torch.equal(seen[0], 6 * x)
    with torch.inference_mode():
        with pytest.raises(gradkit.OptionError, match=r"with torch\.inference_mode\(False\)"):
            gradkit.vjp(y, x, seed, create_graph=True)
        with torch.inference_mode(False):
            assert gradkit.vjp(y, x, seed, create_graph=True).requires_grad


def test_inference_mode_and_its_cotangents(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x**3
    with torch.inference_mode():
        seed = torch.full((3,), 2.0, device=device)
        first = gradkit.vjp(y, x, seed, retain_graph=True)
    second = gradkit.vjp(y, x, seed, create_graph=True)
    assert not first.is_inference()
    assert_same_bits([first, second.detach()], [6 * x.detach()] * 2)


def test_options(device: torch.device) -> None:
    x, unused = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    y = x**2
    y.retain_grad()
    seed, params = torch.ones_like(y), {"x": x, "unused": unused}
    assert gradkit.vjp(y, params, seed, retain_graph=True)["unused"] is None
    zeros = gradkit.vjp(y, params, seed, retain_graph=True, unused="zeros")["unused"]
    assert torch.equal(zeros, torch.zeros_like(x))
    with pytest.raises(gradkit.UnreachedParamError, match=r"params\['unused'\].*outputs"):
        gradkit.vjp(y, params, seed, unused="error")
    assert y.grad is None  # put back
    with torch.no_grad():
        gradkit.vjp(y, x, seed)
    with pytest.raises(gradkit.FreedGraphError, match=r"outputs: .*has freed"):
        gradkit.vjp(y, x, seed)
    with pytest.raises(gradkit.OptionError, match="unused"):
        gradkit.vjp(y, x, seed, unused="zero")


def test_the_tangents_of_a_cotangent_are_those_of_torch(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x**3
    tangent = torch.arange(3.0, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, device=device), tangent)
        expanded = forward_ad.make_dual(torch.ones(1, device=device), tangent[2:]).expand(3)
        for seed in (dual, expanded):
            theirs = torch.autograd.grad(y, x, seed, retain_graph=True)[0]
            assert forward_ad.unpack_dual(theirs).tangent is not None
            for create_graph in (False, True):
                ours = gradkit.vjp(y, x, seed, retain_graph=True, create_graph=create_graph)
                assert_same_bits(forward_ad.unpack_dual(ours), forward_ad.unpack_dual(theirs))


def test_layouts_other_than_dense(device: torch.device) -> None:
    """Sparse gradients of an embedding; nested outputs, and cotangents that are not like them."""
    table = nn.Embedding(5, 2, sparse=True).to(device)
    rows = table(torch.tensor([1, 1, 3], device=device))
    grad = gradkit.vjp(rows, table, torch.ones_like(rows))["weight"]
    assert grad.is_sparse
    assert grad.to_dense()[:, 0].tolist() == [0, 2, 0, 1, 0]
    x = torch.ones(3, 2, device=device, requires_grad=True)
    nested = torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged) * 2
    grad = gradkit.vjp(nested, x, torch.ones_like(nested), retain_graph=True)
    assert grad[:, 0].tolist() == [4, 2, 2]
    other = torch.nested.as_nested_tensor([x.detach()] * 2, layout=torch.jagged)
    for seed in (torch.ones(4, 2, device=device), other):
        with pytest.raises(gradkit.StructureError, match="cotangents, for outputs"):
            gradkit.vjp(nested, x, seed)
