"""Each formula of gradkit's against its operation: value, shape, strides, dtype, options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradkit import func
from gradkit._core import pytree
from gradkit._torch_bugs import formulas
from gradkit._torch_bugs.node_formulas import NODE_FORMULAS, has_formula
from gradkit._torch_bugs.table import BY_FORMULA, FORMULAS, OpCall
from gradkit._torch_bugs.traced_operations import _TABLE_NAMES as _NAMES
from tests.helpers import same_bits
from tests.op_db import op_db

# What torch says of options of its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:linear_cross_entropy:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
F64 = torch.float64
DTYPES = (F64, torch.float32, torch.bfloat16, torch.float16, torch.complex128)
TOLERANCES: dict[torch.dtype, float] = {torch.bfloat16: 0.05, torch.float16: 5e-3}
MOST = 30  # samples of an operation, of those in torch's table
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# Options at their edges, and other names, which torch's table lacks: of each formula at least what
# its signature has. A formula that torch's table has no samples of needs an entry here.
EXTRA: dict[str, Callable[[Callable[..., Tensor]], Iterator[Call]]] = {}


def extra(name: str) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        EXTRA[name] = make
        return make

    return register


@extra("weight_norm")
def of_weight_norm(make: Callable[..., Tensor]) -> Iterator[Call]:
    for shape in ((3,), (3, 4), (2, 3, 4), (1, 3), (3, 1)):
        v = make(*shape)
        for dim in (-1, *range(len(shape))):
            g = torch.norm_except_dim(v, 2, dim) + 0.5
            yield torch._weight_norm, (v, g, dim), {}
            if v.dtype != torch.float16 and dim in {0, len(shape) - 1}:
                yield torch._weight_norm_interface, (v, g, dim), {}
    yield torch._weight_norm, (make(3, 4), make(3, 1)), {}


@extra("prelu")
def of_prelu(make: Callable[..., Tensor]) -> Iterator[Call]:
    for shape in ((), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (0, 3), (2, 1)):
        for weight in ((), (1,), (3,), (2,)):
            yield functional.prelu, (make(*shape), make(*weight)), {}


@extra("logcumsumexp")
def of_logcumsumexp(make: Callable[..., Tensor]) -> Iterator[Call]:
    for shape in ((), (1,), (5,), (3, 4), (3, 0), (0, 3), (2, 3, 4)):
        for dim in range(-max(1, len(shape)), max(1, len(shape))):
            yield torch.logcumsumexp, (make(*shape), dim), {}
    yield torch.logcumsumexp, (make(3, 4),), {"dim": -2}
    if not make().is_complex():
        few = make(3, 4).masked_fill(torch.eye(3, 4, device=make().device) > 0, -torch.inf)
        for dim in (0, 1):
            yield torch.logcumsumexp, (few, dim), {}
        yield torch.logcumsumexp, (torch.full_like(few, -torch.inf), 0), {}
        yield torch.logcumsumexp, (few * 1e3, 1), {}
        yield torch.logcumsumexp, (few.masked_fill(few > 0, torch.inf), 0), {}


@extra("embedding")
def of_embedding(make: Callable[..., Tensor]) -> Iterator[Call]:
    rows = torch.tensor([[1, 0, 2], [3, 3, 0]], device=make().device)
    for padding in (None, 0, 3, -1, -4):
        yield functional.embedding, (rows, make(4, 2)), {"padding_idx": padding}
        yield functional.embedding, (rows[0, 1], make(4, 2), padding), {}
    for padding in (-1, 0, 3):
        yield torch.embedding, (make(4, 2), rows, padding), {}
        yield torch.embedding, (make(4, 2), rows[:0]), {"padding_idx": padding}
        yield torch.ops.aten.embedding, (make(4, 2), rows, padding), {}


def of_symmetric(name: str, make: Callable[..., Tensor]) -> Iterator[Call]:
    for shape in ((1, 1), (3, 3), (2, 3, 3), (0, 0)):
        a = make(*shape)
        a = a @ a.mH + torch.eye(shape[-1], dtype=a.dtype, device=a.device)
        for upper in (False, True):
            option = {"UPLO": "U" if upper else "L"} if "eig" in name else {"upper": upper}
            yield getattr(torch.linalg, name), (a,), option
            unread = torch.ones_like(a, dtype=torch.bool)
            unread = unread.tril(-1) if upper else unread.triu(1)
            for what in (7.0, torch.inf, torch.nan):  # in the triangle that is not read
                yield getattr(torch.linalg, name), (a.masked_fill(unread, what),), option


for _name in ("cholesky", "cholesky_ex", "eigh", "eigvalsh"):
    EXTRA[_name] = partial(of_symmetric, _name)


@extra("cdist")
def of_cdist(make: Callable[..., Tensor]) -> Iterator[Call]:
    if make().dtype in (F64, torch.float32):
        yield torch.cdist, (make(2, 3, 4), make(2, 5, 4), torch.inf), {}
        yield torch.cdist, (make(3, 4), make(5, 4)), {"p": torch.inf}


@extra("pdist")
def of_pdist(make: Callable[..., Tensor]) -> Iterator[Call]:
    if make().dtype in (F64, torch.float32):
        yield functional.pdist, (make(5, 4), torch.inf), {}


@extra("linear_cross_entropy")
def of_linear_cross_entropy(make: Callable[..., Tensor]) -> Iterator[Call]:
    operation = getattr(functional, "linear_cross_entropy", None)
    target = torch.tensor([0, 3, 1], device=make().device)
    for option in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}) if operation else ():
        yield operation, (make(3, 5), make(4, 5), target), option


def layouts(x: Tensor) -> Iterator[Tensor]:
    """The same values, laid out in other ways, some of them for fewer values."""
    yield x
    yield torch.stack([x, x], -1)[..., 0]
    if x.dim() > 1:
        yield x.mT.contiguous().mT
        yield x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.dim() and len(x):
        yield x[:1].expand(x.shape)


def with_layouts(operation: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield args
    if operation is torch._weight_norm_interface:  # which reads any as if it were contiguous
        return
    for position, x in enumerate(args):
        if isinstance(x, Tensor):
            for other in layouts(x):
                yield (*args[:position], other, *args[position + 1 :])


@cache
def table() -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for info in op_db:
        if info.name.startswith("masked."):  # torch.masked.prod is no torch.prod
            continue
        for name in {info.name, *(alias.name for alias in info.aliases)}:
            by_name.setdefault(name.rpartition(".")[2], []).append(info)
    return by_name


def samples(name: str, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    yield from EXTRA[name](make) if name in EXTRA else ()
    for info in table().get(name, ()):
        if dtype in info.supported_dtypes(device) and info.name != "linalg.polar":  # of a matrix
            every = list(info.sample_inputs(device, dtype))
            for one in every[:: 1 + len(every) // MOST]:
                yield info.op, (one.input, *one.args), one.kwargs


def ran(run: Callable[[], Any]) -> list[Tensor] | None:
    """The tensors that come out, None if it raises."""
    torch.manual_seed(0)
    try:
        return pytree.tensors(tuple(result) if isinstance(result := run(), tuple) else result)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def strides(x: Tensor) -> list[int]:
    """Those that a view depends on."""
    return [s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []


def assert_same(ours: list[Tensor] | None, theirs: list[Tensor] | None, given: Any) -> None:
    assert (ours is None) == (theirs is None), "one of the two raises"
    for a, b in zip(ours or (), theirs or (), strict=True):
        assert (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        assert strides(a) == strides(b)
        assert a.requires_grad == b.requires_grad
        assert is_one_of(a, given) == is_one_of(b, given)
        rtol = TOLERANCES.get(a.dtype, 1e-5 if a.dtype == torch.float32 else 1e-10)
        if not torch.equal(a, b):  # which takes no time
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True)


def is_one_of(x: Tensor, given: Any) -> bool:
    address = x.untyped_storage().data_ptr()
    return any(address == one.untyped_storage().data_ptr() for one in given if one.numel())


def is_by_formula(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the formula stands for the operation with these arguments: some are for p=inf."""
    call = OpCall(tuple(args), kwargs, False, (), ())
    return name not in ("cdist", "pdist") or BY_FORMULA[name].when(call, ())


def refused_at_zero(name: str, values: list[Tensor] | None) -> bool:
    """Whether a norm of zero is among the values: its formula is a refusal."""
    return FORMULAS[name] is formulas.norm and any((x == 0).any() for x in values or ())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_its_operation(device: torch.device, name: str, dtype: torch.dtype) -> None:
    count = 0
    for operation, args, kwargs in samples(name, device, dtype):
        for laid_out in with_layouts(operation, args):
            detached = [x.detach() if isinstance(x, Tensor) else x for x in laid_out]
            for requires_grad in (False, True):
                given = [
                    x.detach().requires_grad_(requires_grad)
                    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
                    else x
                    for x in detached
                ]
                theirs = ran(lambda: operation(*given, **kwargs))  # noqa: B023
                if not is_by_formula(name, given, kwargs) or refused_at_zero(name, theirs):
                    continue
                ours = ran(lambda: FORMULAS[name](operation, *given, **kwargs))  # noqa: B023
                if name in BY_FORMULA and BY_FORMULA[name].drops:  # torch 2.15 has a graph, too
                    pair = ours, theirs
                    ours, theirs = (x and [one.detach() for one in x] for x in pair)
                assert_same(ours, theirs, pytree.tensors(given))
                count += theirs is not None
    if dtype == F64 and name != "linear_cross_entropy":  # which older releases lack
        assert count, f"no sample of {name}: give EXTRA some"


@pytest.mark.skipif(not hasattr(torch.linalg, "polar"), reason="torch has it since 2.15")
def test_the_decomposition_of_a_matrix_is_not_the_formula_of_polar(device: torch.device) -> None:
    x = torch.randn(3, 3, dtype=F64, device=device)

    def fn(x: Tensor) -> Tensor:
        unitary, positive = cast("Any", torch.linalg).polar(x)
        return (unitary * torch.arange(9.0, device=device).view(3, 3)).sum() + positive.sum()

    torch.testing.assert_close(func.value_and_grads(fn)(x)[1], torch.func.grad(fn)(x))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_its_operation_in_a_batch(device: torch.device, name: str) -> None:
    for operation, args, kwargs in samples(name, device, F64):
        for position, x in enumerate(args):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            if not is_by_formula(name, args, kwargs):
                continue

            def at(x: Tensor, fn: Any, position: int = position, args: Any = args) -> Any:
                return fn(*args[:position], x, *args[position + 1 :], **kwargs)  # noqa: B023

            batch = torch.stack([x, x.flip(0) if x.dim() else x + 1])
            by_formula = partial(FORMULAS[name], operation)
            ours = ran(lambda: vmap(partial(at, fn=by_formula))(batch))  # noqa: B023
            rows = [ran(lambda: at(row, operation)) for row in batch]  # noqa: B023
            if None in rows or ours is None:  # vmap has no rule for what reads its values
                continue
            for index, row in enumerate(rows):
                torch.testing.assert_close([x[index] for x in ours], row, equal_nan=True)


def test_every_name_of_an_operation_has_its_formula(device: torch.device) -> None:
    """What the monitor runs by formula takes the arguments that each of its names takes."""
    names = {name for name in _NAMES.values() if name in FORMULAS}
    assert names == BY_FORMULA.keys()


def fused_attention(**options: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return functional.scaled_dot_product_attention(q, k, v, **options)

    return call


def node_samples(make: Callable[..., Tensor]) -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    for heads in (1, 2):
        q, k, v = make(2, 2, 3, 4), make(2, heads, 5, 4), make(2, heads, 5, 4)
        mask = torch.arange(15, device=q.device).reshape(3, 5) % 4 > 0
        options: list[dict[str, Any]] = [{"scale": scale} for scale in (None, 0.0, 1.0, -0.5)]
        options += [{"is_causal": True}]  # the kernel gives nan with scale=0.0: 0 * -inf
        options += [{"attn_mask": mask}, {"attn_mask": mask * 0.5}, {"attn_mask": mask & False}]
        for option in options:
            if "attn_mask" in option and option["attn_mask"].dtype != torch.bool:
                option = {"attn_mask": option["attn_mask"].to(q.dtype)}
            yield fused_attention(**option, enable_gqa=heads == 1), [q, k, v]
        yield fused_attention(), [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, q, q)]
    for dim in (0, 1):
        v = make(3, 4)
        yield partial(torch._weight_norm, dim=dim), [v, torch.norm_except_dim(v, 2, dim)]
    for dim in (0, -1):
        yield partial(torch.logcumsumexp, dim=dim), [make(3, 4)]
    yield functional.hardsigmoid, [torch.cat([make(5), make(2).sign() * 3])]


def test_a_formula_of_a_node_is_its_operation(device: torch.device) -> None:
    """Its value, and its gradients, are those of the operation that made the node."""
    read = set()
    for operation, given in node_samples(lambda *s: torch.randn(s, dtype=F64, device=device)):
        leaves = [x.detach().requires_grad_() for x in given]
        try:
            out = operation(*leaves)
        except RuntimeError:  # the fused kernels of this device have no such option
            continue
        node = next(n for n in (out.grad_fn, out.grad_fn.next_functions[0][0]) if has_formula(n))
        assert node is out.grad_fn
        read.add(NODE_FORMULAS[type(node).__name__])
        formula, inputs = NODE_FORMULAS[type(node).__name__](node)
        torch.testing.assert_close(formula(*inputs), out)
        seed = torch.randn_like(out)
        expected = torch.autograd.grad(out, leaves, seed, retain_graph=True)
        again = [x.detach().requires_grad_() for x in inputs[: len(leaves)]]
        got = torch.autograd.grad(formula(*again, *inputs[len(leaves) :]), again, seed)
        torch.testing.assert_close(got, expected)
    assert read == set(NODE_FORMULAS.values()), "give node_samples one of each formula"


@pytest.mark.parametrize("view", ["view", "as_strided", "flatten", "transposed"])
@pytest.mark.parametrize("mode", ["forward-over-reverse", "reverse-over-reverse"])
def test_views_of_a_result_are_those_of_the_operation(
    device: torch.device, mode: Any, view: str
) -> None:
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda y: y.view(-1)[:2],
        "as_strided": lambda y: y.as_strided((2,), (1,)),
        "flatten": lambda y: y.flatten()[:2],
        "transposed": lambda y: y.T[:2, 0],
    }
    x = torch.randn(3, 4, dtype=F64, device=device)
    g = torch.rand(3, 1, dtype=F64, device=device) + 0.5
    for operation in (
        lambda x: torch.logcumsumexp(x, 0),
        lambda x: torch._weight_norm(x, g, 0),
        lambda x: functional.prelu(x, g[0]),
    ):
        loss = lambda x: views[view](operation(x)).square().sum()  # noqa: B023, E731
        got, _ = func.hvp(loss, x, torch.ones_like(x), mode=mode)
        expected = torch.func.grad(loss)(x)
        torch.testing.assert_close(got, expected)
        assert same_bits(*(views[view](f(x)).contiguous() for f in (operation, operation)))
