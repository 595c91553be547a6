"""func.checkpoint: the function itself, whatever differentiates it, and without its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, jacrev, vmap
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

import gradkit
from gradkit import UnsupportedGraphError, func
from gradkit._core import user_code
from gradkit.func import checkpoint

D = torch.float64
Loss = Callable[[Tensor, Tensor], Tensor]  # of the weights and of samples
Wrap = Callable[[Any], Any]


def plain(fn: Any) -> Any:
    return fn


def block(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w) * x.sin()


def by_argument(wrap: Wrap) -> Loss:
    return lambda w, x: (wrap(block)(w, wrap(block)(w, x)) ** 2).mean()


def by_closure(wrap: Wrap) -> Loss:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        inner = wrap(lambda h: block(w, h))
        return (inner(inner(x)) ** 2).mean()

    return loss


def nested(wrap: Wrap) -> Loss:
    return lambda w, x: wrap(by_closure(wrap))(w, x)


LOSSES = {"arguments": by_argument, "closures": by_closure, "nested": nested}


def eager(call: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def run(loss: Loss, w: Tensor, u: Tensor, x: Tensor) -> Any:
        w = w.clone().requires_grad_()
        return call(loss(w, x), w)

    return run


def backward(loss: Tensor, w: Tensor) -> Any:
    loss.backward()
    return w.grad


FIRST: dict[str, Callable[[Loss, Tensor, Tensor, Tensor], Any]] = {
    "backward": eager(backward),
    "value_and_grads": eager(gradkit.value_and_grads),
    "per_loss_grads": eager(lambda loss, w: gradkit.per_loss_grads([loss, 2 * loss], w)),
    "func.value_and_grads": lambda f, w, u, x: func.value_and_grads(f)(w, x),
    "func.per_loss_grads": lambda f, w, u, x: func.per_loss_grads(lambda w: [f(w, x)] * 2)(w),
    "per_sample_grads": lambda f, w, u, x: func.per_sample_grads(f)(w, x),
    "vmap(grad)": lambda f, w, u, x: torch.vmap(torch.func.grad(f), (None, 0))(w, x),
    "jacrev": lambda f, w, u, x: torch.func.jacrev(f)(w, x),
    "jacfwd": lambda f, w, u, x: torch.func.jacfwd(f)(w, x),
    "jvp": lambda f, w, u, x: func.jvp(lambda w: f(w, x), w, u),
    "vjp": lambda f, w, u, x: func.vjp(lambda w: f(w, x), w)[1](torch.ones_like(x.sum())),
}


def second(loss: Tensor, w: Tensor) -> Any:
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), w)


def third(loss: Tensor, w: Tensor) -> Any:
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    (grad,) = torch.autograd.grad(grad.square().sum(), w, create_graph=True)
    return torch.autograd.grad((grad**3).sum(), w)


def func_in_eager_code(loss: Loss, w: Tensor, u: Tensor, x: Tensor) -> Any:
    w = w.clone().requires_grad_()
    grads = func.per_sample_grads(loss)(w, x)
    return torch.autograd.grad(grads.square().sum(), w)


def forward_over_forward(f: Loss, w: Tensor, u: Tensor, x: Tensor) -> Any:
    return torch.func.jvp(
        lambda w: torch.func.jvp(lambda w: f(w, x), (w,), (u,))[1], (w,), (u.cos(),)
    )


def reverse_over_forward_twice(f: Loss, w: Tensor, u: Tensor, x: Tensor) -> Any:
    return torch.func.grad(lambda w: forward_over_forward(f, w, u, x)[1])(w)


def unrolled(f: Loss, w: Tensor, u: Tensor, x: Tensor, memory: Any = "store") -> Any:
    w, rate = w.clone().requires_grad_(), torch.tensor(0.1, dtype=D, device=w.device)
    rate.requires_grad_()
    out = gradkit.meta.unroll(
        lambda w, _, x: f(w, x), w, [x, x.sin()], gradkit.meta.sgd(rate), memory=memory
    )
    return torch.autograd.grad(f(out.params, x), [w, rate])


HIGHER: dict[str, Callable[[Loss, Tensor, Tensor, Tensor], Any]] = {
    "hvp": lambda f, w, u, x: func.hvp(lambda w: f(w, x), w, u),
    "hvp, twice reverse": lambda f, w, u, x: func.hvp(
        lambda w: f(w, x), w, u, mode="reverse-over-reverse"
    ),
    "grad(jvp)": lambda f, w, u, x: torch.func.grad(
        lambda w: torch.func.jvp(lambda w: f(w, x), (w,), (u,))[1]
    )(w),
    "jvp(jvp)": forward_over_forward,
    "grad(jvp(jvp))": reverse_over_forward_twice,
    "create_graph": eager(second),
    "third order": eager(third),
    "func inside of eager code": func_in_eager_code,
    "unroll": unrolled,
    "unroll, recomputed": lambda f, w, u, x: unrolled(f, w, u, x, "recompute"),
}


def both(
    run: Callable[..., Any], loss: str, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    w, u, x = (torch.randn(n, 3, dtype=D, device=device) for n in (3, 3, 5))
    expected, got = (run(LOSSES[loss](wrap), w, u, x) for wrap in (plain, checkpoint))
    return tree_leaves(expected), tree_leaves(got)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("run", FIRST)
def test_first_derivatives_are_those_of_the_function_itself(
    device: torch.device, run: str, loss: str
) -> None:
    expected, got = both(FIRST[run], loss, device)
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("run", HIGHER)
def test_higher_derivatives(device: torch.device, run: str, loss: str) -> None:
    expected, got = both(HIGHER[run], loss, device)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class Block(nn.Module):
    """A residual block that writes on buffers, and draws random numbers."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap = wrap
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.aux: Any = 0

    def body(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        self.aux = h.square().mean()
        return x + self.second(h)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wrap(self.body)(x)
        return out + self.aux


@pytest.mark.parametrize("way", ["backward", "value_and_grads", "call", "func", "per sample"])
def test_a_block_of_a_module(device: torch.device, way: str) -> None:
    expected, got = (grads_of_blocks(wrap, way, device) for wrap in (plain, checkpoint))
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


def grads_of_blocks(wrap: Wrap, way: str, device: torch.device) -> list[Tensor]:
    """Return gradients, buffers and the next random number of a model of two blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(wrap), Block(wrap)).to(device, D)
    x = torch.randn(6, 4, dtype=D, device=device)
    call, params, buffers = func.make_functional(model.eval() if way == "per sample" else model)
    params = {name: (1.5 * x.detach()).requires_grad_() for name, x in params.items()}
    out: Any

    def loss(params: Any) -> Any:
        y, new = call(params, buffers, x)
        return y.square().mean(), new

    def loss_of_one(params: Any, x: Tensor) -> Any:
        return call(params, buffers, x[None])[0].square().mean()

    if way == "backward":
        model(x).square().mean().backward()
        out = [p.grad for p in model.parameters()]
    elif way == "value_and_grads":
        out = gradkit.value_and_grads(model(x).square().mean(), model)
    elif way == "call":
        value, new = loss(params)
        out = gradkit.value_and_grads(value, params), new
    elif way == "func":
        out = func.value_and_grads(loss, has_aux=True, create_graph=False)(params)
    else:
        out = func.per_sample_grads(loss_of_one, create_graph=False)(params, x)
    return tree_leaves([out, list(model.buffers()), torch.rand(1)])


def saved_bytes(run: Callable[[], object]) -> int:
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    del out
    return total


def test_saves_its_arguments_only(device: torch.device) -> None:
    w = torch.randn(8, 8, device=device, requires_grad=True)
    x = torch.randn(100, 8, device=device)

    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x @ w)
        return x

    out = checkpoint(chain)(x)
    node: Any = out.grad_fn
    assert sum(tensor.nbytes for tensor in node.saved_tensors) == x.nbytes + w.nbytes
    assert saved_bytes(lambda: chain(x)) > 10 * (x.nbytes + w.nbytes)


class Product(torch.autograd.Function):
    """A Function that no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return cotangents[0] * w, cotangents[0] * x


class Hidden:
    """Refers to a tensor where nothing finds it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_what_would_lose_a_gradient_is_refused(device: torch.device) -> None:
    w = torch.randn(4, device=device, requires_grad=True)
    x, hidden, kept = torch.ones(4, device=device), Hidden(w), list[Tensor]()
    module = nn.Linear(4, 4).to(device)
    module.register_buffer("count", torch.zeros((), device=device))

    def keeps(x: Tensor) -> Tensor:
        module.get_buffer("count").add_(1)
        kept.append((x * w).sum())
        return x * w

    for fn in (lambda x: x * hidden.tensor, lambda x: Product.apply(x, w), keeps):
        state = torch.get_rng_state()
        with pytest.raises(UnsupportedGraphError, match=r"argument|return the tensor"):
            checkpoint(fn)(x.clone().requires_grad_())
        assert torch.equal(torch.get_rng_state(), state)
    assert module.count == 0

    def of_a_level(w: Tensor) -> Any:
        hidden = Hidden(w)
        return checkpoint(lambda x: x * hidden.tensor)(x).sum()

    with pytest.raises(UnsupportedGraphError, match="argument"):
        func.value_and_grads(of_a_level)(w.detach())
    with gradkit.safe_retain(nn.Sequential(module), ["0"]):
        pass_through = checkpoint(module)
        with pytest.raises(UnsupportedGraphError, match="retain what fn returns"):
            pass_through(x)
        module(x).sum().backward()


def test_what_a_second_run_does_otherwise_is_refused(device: torch.device) -> None:
    x, state = torch.randn(3, dtype=D, device=device, requires_grad=True), Hidden(torch.ones(()))
    out = checkpoint(lambda x: (state.tensor * x).sin())(x)
    state.tensor = torch.tensor(2.0)
    with pytest.raises(UnsupportedGraphError, match="when it runs again"):
        out.sum().backward()
    lengths = Hidden(torch.ones(2))
    first, *_ = checkpoint(lambda x: [x * 2] * len(lengths.tensor))(x)
    lengths.tensor = torch.ones(3)
    with pytest.raises(UnsupportedGraphError, match="same structure"):
        first.sum().backward()


@pytest.mark.parametrize("count", [3, 3000])  # copies are compared, or checksums
def test_a_second_run_gives_other_complex_numbers(device: torch.device, count: int) -> None:
    x = torch.randn(count, dtype=D, device=device, requires_grad=True)
    for part in (lambda y: torch.complex(y, x), lambda y: torch.complex(x, y).conj()):
        factor = Hidden(torch.ones((), device=device))
        out = checkpoint(lambda x: part(factor.tensor * x))(x)  # noqa: B023
        factor.tensor = factor.tensor * 2
        with pytest.raises(UnsupportedGraphError, match="when it runs again"):
            gradkit.value_and_grads(out.abs().square().sum(), x)


def test_variables_of_a_loop_are_as_they_were(device: torch.device) -> None:
    weights = torch.randn(3, 4, dtype=D, device=device)

    def loss(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        def fn(h: Tensor) -> Tensor:
            for index, w in enumerate(weights):
                h = wrap(lambda h: (h * w * index).cos())(h)  # noqa: B023
            return h.sum()

        return fn

    x = torch.randn(4, dtype=D, device=device)
    expected, got = (func.value_and_grads(loss(wrap))(x) for wrap in (plain, checkpoint))
    assert torch.equal(got[1], expected[1])


def test_outputs_of_all_kinds(device: torch.device) -> None:
    x = torch.randn(3, dtype=D, device=device, requires_grad=True)
    n = torch.arange(3, device=device)

    def fn(x: Tensor, n: Tensor, *, factor: float) -> Any:
        return {"same": x, "int": n + 1, "none": None, "text": "a", "list": [x * factor, x[1:], n]}

    out = checkpoint(fn)(x, n, factor=2.0)
    assert out["none"] is None
    assert out["text"] == "a"
    assert not out["int"].requires_grad
    assert torch.equal(out["list"][2], n)
    out["list"][0].add_(1)  # as that of the function itself, it may be written on
    loss = (out["same"] * out["list"][0]).sum() + out["list"][1].sum()
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, 4 * x + 1 + torch.tensor([0.0, 1, 1], dtype=D, device=device))


def test_nothing_is_recorded_without_grad(device: torch.device) -> None:
    runs = []

    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    fn = checkpoint(counted)
    with torch.no_grad():
        assert not fn(torch.ones(2, device=device, requires_grad=True)).requires_grad
    assert not fn(torch.ones(2, device=device)).requires_grad
    assert len(runs) == 2
    with pytest.raises(gradkit.OptionError, match="a function"):
        checkpoint(3)


def test_autocast_and_modes_are_those_of_the_first_run(device: torch.device) -> None:
    grads = []
    for wrap in (plain, checkpoint):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = wrap(net)(torch.ones(8, 4, device=device))
        net.eval()
        grads.append(torch.autograd.grad(out.float().square().sum(), list(net.parameters())))
    assert all(map(torch.equal, *grads))


@pytest.mark.slow
def test_under_compile(device: torch.device) -> None:
    w, x = torch.randn(4, 4, device=device), torch.randn(3, 4, device=device)

    def loss(w: Tensor) -> Tensor:
        return checkpoint(block)(w, x).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaf = w.clone().requires_grad_()
    (got,) = torch.autograd.grad(compiled(leaf), leaf)
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(got, expected)
    step = torch.compile(func.value_and_grads(loss), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(w)[1], expected)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_buffers_are_put_back_if_the_function_raises(
    device: torch.device, error: type[BaseException]
) -> None:
    norm = nn.BatchNorm1d(3, device=device)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}

    def fn(x: Tensor) -> Tensor:
        norm(x)
        raise error

    with pytest.raises(error):
        func.checkpoint(fn)(torch.randn(4, 3, device=device, requires_grad=True))
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


# --- what gradkit refuses, or runs by a formula, is as without the checkpoint


def wrapped_twice(module: nn.Module, wrap: Wrap) -> Callable[[Tensor], Tensor]:
    return wrap(lambda x: wrap(module)(x).tanh())


BLOCKS: dict[str, Callable[[Tensor, Wrap], Tensor]] = {
    "attention": lambda x, wrap: wrap(functional.scaled_dot_product_attention)(x, x.sin(), x),
    "a layer of a transformer": lambda x, wrap: wrap(
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).to(x)
    )(x),
    "LSTM": lambda x, wrap: wrap(nn.LSTM(4, 3).to(x))(x)[0],
    "GRU": lambda x, wrap: wrap(nn.GRU(4, 3).to(x))(x)[0],
    "RNN": lambda x, wrap: wrap(nn.RNN(4, 3).to(x))(x)[0],
    "layer_norm": lambda x, wrap: wrap(lambda x: functional.layer_norm(x, (4,), x[0, 0]))(x),
    "batch_norm": lambda x, wrap: wrap(
        lambda x: functional.batch_norm(x, None, None, x[0, :, 0], training=True)
    )(x),
    "norm": lambda x, wrap: wrap(lambda x: torch.linalg.vector_norm(x, dim=-1))(x),
    "cdist": lambda x, wrap: wrap(lambda x: torch.cdist(x, x.sin() + 1))(x),
    "a checkpoint": lambda x, wrap: wrapped_twice(nn.Linear(4, 4).to(x), wrap)(x),
    "a gradient": lambda x, wrap: wrap(
        lambda x: func.value_and_grads(lambda x: functional.layer_norm(x, (4,)).sin().sum())(x)[1]
    )(x),
}
SECOND: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "jvp": lambda fn, x, v: func.jvp(fn, x, v)[1],
    "linearize": lambda fn, x, v: func.linearize(fn, x)[1](v),
    "value_and_grads": lambda fn, x, v: func.value_and_grads(fn)(x)[1],
    "hvp": lambda fn, x, v: func.hvp(fn, x, v)[1],
    "hvp by reverse": lambda fn, x, v: func.hvp(fn, x, v, mode="reverse-over-reverse")[1],
    "nested": lambda fn, x, v: func.value_and_grads(
        lambda x: (func.value_and_grads(fn)(x)[1] * v).sum()
    )(x)[1],
    "samples": lambda fn, x, v: func.per_sample_grads(lambda x, s: fn(x) * s)(x, v[0, 0]),
    "linearize of the gradient": lambda fn, x, v: func.linearize(
        lambda x: func.value_and_grads(fn)(x)[1], x
    )[1](v),
    "hvp, differentiated": lambda fn, x, v: func.value_and_grads(
        lambda x: (func.hvp(fn, x, v)[1] ** 2).sum()
    )(x)[1],
}


@pytest.mark.filterwarnings("ignore:.*fell back")
@pytest.mark.parametrize("call", SECOND)
@pytest.mark.parametrize("name", BLOCKS)
def test_refuses_nothing_that_the_function_allows(
    device: torch.device, name: str, call: str
) -> None:
    x, v = torch.randn(2, 2, 3, 4, dtype=D, device=device)

    def run(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        module = BLOCKS[name]
        return SECOND[call](lambda x: module(x, wrap).sin().sum(), x, v)

    try:
        right = run(plain)
    except UnsupportedGraphError:
        with pytest.raises(UnsupportedGraphError):
            run(checkpoint)
    else:
        torch.testing.assert_close(run(checkpoint), right, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["cdist", "norm"])
def test_a_second_run_in_a_process_without_hooks(device: torch.device, name: str) -> None:
    """The pass then runs below the monitor of the function around, which sees the second run."""
    x, v = torch.randn(2, 2, 3, 4, dtype=D, device=device)

    def run(wrap: Wrap) -> Any:
        return SECOND["nested"](lambda x: BLOCKS[name](x, wrap).sin().sum(), x, v)

    with patch.object(user_code._own_hooks, "count", RemovableHandle.next_id):
        torch.testing.assert_close(run(checkpoint), run(plain))


@pytest.mark.parametrize("is_nested", [False, True])
def test_random_numbers_in_a_jacobian(device: torch.device, is_nested: bool) -> None:
    """A vmap of the cotangents, in which torch lets nothing draw, is none of the second run."""
    drop, x = nn.Dropout(0.5), torch.randn(4, dtype=D, device=device)

    def jacobian(wrap: Wrap) -> Callable[[Tensor], Tensor]:
        once = wrap(lambda x: drop(x.sin() * 2) * x)
        return jacrev(wrap(lambda x: once(x).tanh()) if is_nested else once)

    calls: list[Callable[[Any], Tensor]] = [
        lambda jac: jac(x),
        lambda jac: jacrev(jac)(x),
        lambda jac: grad(lambda x: jac(x).sin().sum())(x),
        lambda jac: vmap(jac, randomness="same")(torch.stack([x, 2 * x])),
    ]
    for call in calls:
        results = []
        for wrap in (checkpoint, plain):
            torch.manual_seed(0)
            results.append(call(jacobian(wrap)))
        torch.testing.assert_close(*results)
