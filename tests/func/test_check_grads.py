"""check_grads: finds what is wrong, names it, and lets pass what is right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit.func import check_grads
from tests.helpers import same_bits, unchanged
from tests.strategies import HOOKLESS, Program, build, programs
from tests.sweep.table import is_mended

# "halve" has no gradient for its second argument.
KINKED_OR_WRONG = {"relu", "where", "halve"}
SMOOTH = tuple(op for op in HOOKLESS if op not in KINKED_OR_WRONG)
HAS_CHUNKED_LOSS = hasattr(nn, "LinearCrossEntropyOptions")


@given(program=programs(ops=SMOOTH, leaf_hooks=False))
def test_a_smooth_program_passes(device: torch.device, program: Program) -> None:
    leaves = [leaf.detach() for leaf in build(program, device, torch.float64).leaves]
    check_grads(lambda t: build(program, device, torch.float64, t).losses, leaves)


def spd(device: torch.device) -> Tensor:
    a = torch.randn(3, 3, device=device, dtype=torch.float64)
    return a @ a.T + 3 * torch.eye(3, device=device, dtype=torch.float64)


def sparse(v: Tensor) -> Tensor:
    index = torch.tensor([[0, 1, 2], [2, 0, 1]], device=v.device)
    return torch.sparse_coo_tensor(index, v, (3, 3)).to_dense().sin().sum()


def householder(a: Tensor) -> Tensor:
    tau = torch.full((3,), 0.1, dtype=a.dtype, device=a.device)
    return torch.linalg.householder_product(a, tau).sin().sum()


# What is wrong, and the operation on the argument, which is named in the message.
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], int, str, str]] = {
    "jvp of solve": (
        lambda a: torch.linalg.solve(a, torch.ones_like(a[0])).sin().sum(),
        2, "reverse-over-forward", "LinalgSolveEx",
    ),
    "jvp of tensorsolve": (
        lambda a: torch.linalg.tensorsolve(a, torch.ones_like(a[0])),
        2, "reverse-over-forward", "View",
    ),
    "jvp of householder_product": (
        householder, 2, "reverse-over-forward", "LinalgHouseholderProduct",
    ),
    "eigvalsh": (
        lambda a: torch.linalg.eigvalsh(a).sin().sum(),
        2, "forward-over-reverse", "LinalgEigh",
    ),
    "cholesky": (
        lambda a: torch.linalg.cholesky(a).sin().sum(),
        1, "forward", "LinalgCholeskyEx",
    ),
    "a Gaussian": (
        lambda a: torch.distributions.MultivariateNormal(torch.zeros(3).to(a), a).log_prob(
            torch.ones(3).to(a)
        ),
        1, "forward", "LinalgCholeskyEx",
    ),
    "sparse values": (
        lambda a: sparse(a[0]), 2, "reverse-over-reverse", "Select",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_torch_gets_wrong_is_found(device: torch.device, case: str) -> None:
    fn, order, mode, operation = WRONG[case]
    if is_mended(case.rpartition(" ")[2]):
        check_grads(fn, spd(device))
        return
    with pytest.raises(gradkit.GradientCheckError) as caught:
        check_grads(fn, spd(device))
    error = caught.value
    assert (error.leaf, error.order, error.mode) == ("args[0]", order, mode)
    assert error.operation == operation
    assert error.difference > 1e-4
    assert f"order {order}" in str(error)
    assert str(error.operation) in str(error)
    if order == 2:
        check_grads(fn, spd(device), order=1)


def test_weight_norm_is_named_with_its_leaf(device: torch.device) -> None:
    layer = weight_norm(nn.Linear(4, 3, device=device))
    call, params, buffers = gradkit.func.make_functional(layer)

    def loss(params: Any, x: Tensor) -> Tensor:
        return call(params, buffers, x)[0].sin().sum()

    x = torch.randn(5, 4, device=device)
    check_grads(loss, params, x, order=1)
    if device.type == "cpu":
        with pytest.raises(gradkit.GradientCheckError, match="through WeightNorm") as caught:
            check_grads(loss, params, x)
        assert caught.value.leaf == "args[0]['parametrizations.weight.original1']"
        assert caught.value.mode == "reverse-over-reverse"


def test_the_derivative_of_a_jvp_is_found_as_a_first_one(device: torch.device) -> None:
    a = spd(device)

    def slope(a: Tensor) -> Tensor:
        along = torch.ones_like(a).triu()
        return torch.func.jvp(lambda a: torch.linalg.solve(a, along[0]).sin(), (a,), (along,))[1]

    if is_mended("solve"):
        check_grads(slope, a)
        return
    with pytest.raises(gradkit.GradientCheckError) as caught:
        check_grads(slope, a)
    assert (caught.value.order, caught.value.mode) == (1, "reverse")


@pytest.mark.skipif(not HAS_CHUNKED_LOSS, reason="torch 2.13 has it")
def test_a_derivative_that_is_constant_to_torch(device: torch.device) -> None:
    options = nn.LinearCrossEntropyOptions()
    loss = functools.partial(functional.linear_cross_entropy, options=options)
    args = torch.randn(6, 4, device=device), torch.randn(5, 4, device=device)
    target = torch.randint(5, (6,), device=device)
    check_grads(loss, *args, target, modes=["reverse"], order=1)
    with pytest.raises(gradkit.GradientCheckError, match="linear_cross_entropy") as caught:
        check_grads(loss, *args, target, modes=["reverse"])
    assert (caught.value.order, caught.value.mode) == (2, "reverse-over-reverse")


@pytest.mark.long
def test_a_branch_of_torch_cond(device: torch.device) -> None:
    yes = torch.tensor(True, device=device)

    def fn(x: Tensor) -> Tensor:
        return torch.cond(yes, torch.sin, torch.cos, (x,)).sum() + (x**2).sum()

    with pytest.raises(gradkit.GradientCheckError) as caught:
        check_grads(fn, torch.ones(2, device=device), modes=["reverse"])
    assert (caught.value.order, caught.value.mode) == (2, "reverse-over-reverse")


def logged(function: Any) -> Any:
    return functools.wraps(function)(lambda *args: function(*args))


def cube(decorate: Any, name: str = "backward") -> Any:
    """x**3, whose backward is decorated."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x * x

    with_dtype = torch.amp.custom_fwd(forward, device_type="cpu")  # for custom_bwd
    methods = {"forward": staticmethod(with_dtype), name: staticmethod(decorate(backward))}
    return type("Cube", (torch.autograd.Function,), methods)


CUBES = {
    "plain": cube(once_differentiable),
    "wrapped": cube(lambda f: logged(once_differentiable(f))),
    "custom_bwd": cube(lambda f: torch.amp.custom_bwd(once_differentiable(f), device_type="cpu")),
    "vjp": cube(once_differentiable, "vjp"),
}


@pytest.mark.parametrize("name", CUBES)
def test_once_differentiable_is_found_however_it_is_hidden(device: torch.device, name: str) -> None:
    def fn(w: Tensor) -> Tensor:
        return CUBES[name].apply(w) + w**2

    w = torch.ones(2, device=device)
    check_grads(fn, w, order=1)
    with pytest.raises(gradkit.GradientCheckError, match="through Cube") as caught:
        check_grads(fn, w)
    assert (caught.value.order, caught.value.mode) == (2, "reverse-over-reverse")


class Product(torch.autograd.Function):
    """x * y; `once` and `twice` are factors of its derivatives, which are wrong if not 1."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.once, ctx.twice = inputs[2:]

    @staticmethod
    def forward(x: Tensor, y: Tensor, once: float, twice: float) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        second = x * ctx.twice + (x * (1 - ctx.twice)).detach()
        return g * y, g * second * ctx.once, None, None


def product(t: Any, once: float = 1.0, twice: float = 1.0) -> Tensor:
    return Product.apply(t["a"].sin(), t["b"], once, twice).cos()


def leaves(device: torch.device) -> dict[str, Tensor]:
    return {name: torch.randn(3, device=device) for name in "ab"}


def test_a_wrong_backward_is_found_at_its_leaf(device: torch.device) -> None:
    check_grads(product, leaves(device))
    with pytest.raises(gradkit.GradientCheckError, match="through Product") as caught:
        check_grads(lambda t: product(t, once=1.01), leaves(device))
    error = caught.value
    assert (error.leaf, error.order, error.mode) == ("args[0]['b']", 1, "reverse")
    assert error.operation == "Product"


def test_a_wrong_double_backward_is_found(device: torch.device) -> None:
    with pytest.raises(gradkit.GradientCheckError) as caught:
        check_grads(lambda t: product(t, twice=1.01), leaves(device))
    assert (caught.value.order, caught.value.mode) == (2, "reverse-over-reverse")
    check_grads(lambda t: product(t, twice=1.01), leaves(device), order=1)


def test_a_backward_that_takes_its_cotangent_for_a_constant_is_found(device: torch.device) -> None:
    """A linear function: its second derivative is zero, and yet the next function's is lost."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.detach() * 2

    with pytest.raises(gradkit.GradientCheckError) as caught:
        check_grads(Double.apply, torch.randn(3, device=device))
    assert caught.value.order == 2


def test_the_third_derivative(device: torch.device) -> None:
    w = torch.randn(4, device=device)
    check_grads(lambda w: (w.sin() * w[0]).prod(), w, order=3)

    def norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (4,)).sin()

    x = torch.randn(3, 4, device=device)
    check_grads(norm, x, modes=["reverse"])
    with pytest.raises(gradkit.GradientCheckError, match="through NativeLayerNorm") as caught:
        check_grads(norm, x, modes=["reverse"], order=3)
    assert caught.value.mode == "reverse-over-reverse-over-reverse"


def test_a_derivative_that_is_cut(device: torch.device) -> None:
    with pytest.raises(gradkit.GradientCheckError, match="detach") as caught:
        check_grads(lambda w: w.detach() * w, torch.ones(2, device=device))
    assert caught.value.order == 1
    assert isinstance(caught.value, AssertionError)


def test_trees_ties_constants_and_complex_numbers(device: torch.device) -> None:
    w = torch.randn(3, device=device)
    z = torch.randn(3, dtype=torch.complex64, device=device)
    frozen = nn.Parameter(torch.randn(3, device=device), requires_grad=False)
    tree = {"a": w, "again": [w, None], "n": 2, "i": torch.arange(3, device=device), "f": frozen}

    def fn(t: Any, z: Tensor) -> Any:
        accuracy = (t["a"] > 0).float().mean()
        powers = t["a"] * t["again"][0] ** t["n"] * t["f"].detach() * t["i"]
        return {"powers": powers, "more": (z**2 * z.conj(), None, accuracy)}

    check_grads(fn, tree, z, argnums=(0, 1))


def test_a_symmetric_matrix_that_is_made_so_is_no_special_case(device: torch.device) -> None:
    check_grads(lambda a: torch.linalg.cholesky((a + a.mT) / 2), spd(device))


@pytest.mark.parametrize("seed", range(3))
def test_kinks_beside_the_point_do_not_matter(device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    params = [torch.randn(8, 64, device=device), torch.randn(64, 64, device=device) / 8]
    x = torch.randn(32, 8, device=device)

    def net(params: Any, x: Tensor) -> Tensor:
        return ((x @ params[0]).relu() @ params[1]).relu().square().mean()

    check_grads(net, params, x)


def test_a_kink_at_the_point_is_named(device: torch.device) -> None:
    with pytest.raises(gradkit.GradientCheckError, match="a kink or a pole at this one"):
        check_grads(torch.abs, torch.zeros(3, device=device))


def test_a_large_value_is_no_error(device: torch.device) -> None:
    check_grads(lambda w: 1e8 + w.sin().sum(), torch.randn(3, device=device))


def state(module: nn.Module) -> list[Tensor]:
    return [t.clone() for t in module.state_dict().values()]


@pytest.mark.parametrize("right", [True, False])
def test_everything_is_as_before(device: torch.device, right: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double().to(device)
    module[0].weight.grad = torch.ones_like(module[0].weight)
    x = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    x.grad = torch.ones_like(x)
    torch.manual_seed(3)
    rng, before = torch.get_rng_state(), state(module)

    def fn(x: Tensor) -> Tensor:
        return module(x if right else x * x.detach())

    with unchanged(x, *module.parameters()):
        try:
            check_grads(fn, x, modes=["reverse"])
        except gradkit.GradientCheckError:
            assert not right
        else:
            assert right
    assert torch.equal(rng, torch.get_rng_state())
    assert all(map(same_bits, state(module), before))


def test_an_argument_that_is_a_module_is_copied(device: torch.device) -> None:
    module = nn.LSTM(4, 3).to(device)
    with unchanged(*module.parameters()):
        check_grads(lambda x, m: m(x)[0], torch.randn(6, 4, device=device), module)
    assert module.weight_ih_l0.dtype == torch.float32


def test_a_checkpoint_and_an_unrolled_loop(device: torch.device) -> None:
    x = torch.randn(3, device=device)
    check_grads(lambda x: checkpoint(lambda y: (y.sin() * y).cos(), x, use_reentrant=False), x)

    def adapted(x: Tensor) -> Any:
        sgd = gradkit.meta.sgd(0.1)
        steps = gradkit.meta.unroll(lambda p, _, b: ((p - x) ** 4).sum(), x * 2, [None] * 2, sgd)
        return steps.params

    check_grads(adapted, x)


def test_a_mode_that_torch_does_not_have(device: torch.device) -> None:
    v = torch.randn(3, device=device)
    check_grads(sparse, v, order=1)  # forward mode is left out
    with pytest.raises(gradkit.UnsupportedGraphError, match="of order 1 in forward mode"):
        check_grads(sparse, v, order=1, modes=["forward"])
    q = torch.randn(1, 2, 4, 8, device=device)

    def attention(q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q * 2, q.sin())

    with sdpa_kernel(SDPBackend.MATH):
        check_grads(attention, q)
    if device.type == "cpu":
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"of order 2[\s\S]*order=1"):
            check_grads(attention, q)


def test_a_function_that_changes_its_argument(device: torch.device) -> None:
    x = torch.randn(3, device=device)
    with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match="in-place operation"):
        check_grads(lambda x: x.mul_(2) ** 2, x)


def test_random_numbers_are_the_same_each_time(device: torch.device) -> None:
    x = torch.randn(30, device=device)
    check_grads(lambda x: functional.dropout(x) ** 2, x)
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return x * len(calls)

    with pytest.raises(gradkit.UnsupportedGraphError, match="the same when it runs again"):
        check_grads(counted, x)
    assert len(calls) == 2


def test_single_precision_is_named_before_anything_is_compared(device: torch.device) -> None:
    layer, x = nn.Linear(3, 2).to(device), torch.randn(3, device=device)
    with pytest.raises(gradkit.StructureError, match=r"in float64[\s\S]*module.double\(\)"):
        check_grads(layer, x)
    check_grads(lambda x, m: m(x), x, layer)
    with pytest.raises(gradkit.StructureError, match=r"a result in torch\.float32"):
        check_grads(lambda x: x.float() ** 2, x)
    with pytest.raises(RuntimeError, match="size"):  # it does not run with the arguments at all
        check_grads(lambda x: x @ torch.ones(7, dtype=x.dtype, device=device), x)


def test_what_does_not_depend_on_the_arguments(device: torch.device) -> None:
    w = torch.randn(3, device=device)
    with pytest.raises(gradkit.DetachedLossError, match="does not depend on them"):
        check_grads(lambda w: torch.ones(2, device=device), w)
    with pytest.raises(gradkit.LeafTypeError, match="at least one floating-point"):
        check_grads(lambda w: None, w)
    with pytest.raises(gradkit.UnreachedParamError):
        check_grads(lambda i: i, torch.arange(3, device=device))
    with pytest.raises(gradkit.LeafTypeError, match="a dense tensor"):
        check_grads(lambda s: s.to_dense(), torch.eye(2, device=device).to_sparse())


@pytest.mark.parametrize(
    "option", [{"order": 0}, {"modes": "reverse"}, {"modes": ["back"]}, {"modes": ()}, {"eps": 0}]
)
def test_options_are_checked(device: torch.device, option: Any) -> None:
    with pytest.raises(gradkit.OptionError, match=next(iter(option))):
        check_grads(torch.sin, torch.ones(2, device=device), **option)


def test_inside_of_a_transform_it_raises(device: torch.device) -> None:
    def fn(w: Tensor) -> Tensor:
        check_grads(torch.sin, w)
        return w.sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match="a call outside"):
        torch.func.grad(fn)(torch.ones(2, device=device))


def test_the_operation_is_the_one_that_is_wrong_in_this_mode(device: torch.device) -> None:
    """The derivative of layer_norm's jvp is wrong, too, but is not what is reported."""

    def fn(w: Tensor) -> Tensor:
        return functional.layer_norm(CUBES["plain"].apply(w) + w**2, (4,)).sin()

    with pytest.raises(gradkit.GradientCheckError) as caught:
        check_grads(fn, torch.randn(3, 4, device=device))
    assert (caught.value.mode, caught.value.operation) == ("reverse-over-reverse", "Cube")


def test_a_derivative_that_should_be_zero_is_no_kink(device: torch.device) -> None:
    def fn(t: Any) -> Tensor:
        return product({"a": t["a"], "b": t["b"]}, once=1.5) + t["c"] - t["c"].detach()

    tree = {**leaves(device), "c": torch.randn(3, device=device)}
    with pytest.raises(gradkit.GradientCheckError, match="through Add") as caught:
        check_grads(fn, {**tree, "a": tree["a"] * 0})
    assert caught.value.leaf == "args[0]['c']"
