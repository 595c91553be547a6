"""Derivatives of first, second and third order, against finite differences of the one before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import gradkit
from gradkit import func
from tests.fuzz.cases import Refused

Fn: TypeAlias = Callable[[Tensor], Tensor]
F64 = torch.float64
STEP = 1e-5
INDICES = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 0], [0, 1, 0, 1, 2, 0, 1, 2, 2]])


def normed(x: Tensor) -> Tensor:
    layer = weight_norm(nn.Linear(3, 3, dtype=F64))
    weights = {
        "parametrizations.weight.original0": torch.ones(3, 1, dtype=F64),
        "parametrizations.weight.original1": x,
        "bias": torch.zeros(3, dtype=F64),
    }
    return torch.func.functional_call(layer, weights, torch.eye(3, dtype=F64))


def sparse(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDICES, x.reshape(-1), (3, 3)).to_dense()


def attention(x: Tensor) -> Tensor:
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])


# Of a 3 x 3 matrix, near which they are smooth.
SOUND: dict[str, Fn] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp(1),
    "cumprod": lambda x: x.cumprod(1),
    "norm": lambda x: x.norm(dim=1),
    "var": lambda x: x.var(1),
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "group_norm": lambda x: functional.group_norm(x, 1),
    "conv": lambda x: functional.conv1d(x[None], x[:, None], groups=3),
    "bilinear": lambda x: functional.bilinear(x, x, x[None]),
    "attention": attention,
    "einsum": lambda x: torch.einsum("ij,jk,ki->i", x, x, x),
    "index_put": lambda x: torch.zeros_like(x).index_put((INDICES[0], INDICES[1]), x.reshape(-1)),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "expm": lambda x: torch.matrix_exp(0.3 * x),
    "inv": torch.linalg.inv,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.mT),
}
# What torch gets wrong somewhere, or refuses; any UnsupportedGraphError is right, no wrong number.
DOUBTFUL: dict[str, Fn] = {
    "layer_norm": lambda x: functional.layer_norm(x, (3,), x[0]),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, x[0], training=True),
    "instance_norm": lambda x: functional.instance_norm(x[None]),
    "weight_norm": normed,
    "sparse values": sparse,
    "sparse product": lambda x: torch.sparse.mm(
        torch.sparse_coo_tensor(INDICES, x.reshape(-1), (3, 3)), torch.eye(3, dtype=F64)
    ),
    "mse": lambda x: functional.mse_loss(x, torch.ones_like(x)),
    "prelu": lambda x: functional.prelu(x, torch.full((3,), 0.3, dtype=F64)),
    "cdist": lambda x: torch.cdist(x, torch.eye(3, dtype=F64) + 3),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x.tril()),
    "logdet": lambda x: torch.logdet(x @ x.mT),
    "det": torch.linalg.det,
    "solve": lambda x: torch.linalg.solve(x, x[0]),
}
# Of which torch gets the gradient of a jvp wrong, and nothing else.
WRONG_OVER_JVP = {"cumprod"}
MATRICES = {"inv", "cholesky", "eigvalsh", "cholesky_inverse", "logdet", "det", "solve"}


def eager(f: Fn, x: Tensor, along: Tensor) -> list[Tensor]:
    """The three directional derivatives, from calls of calls."""
    x = x.clone().requires_grad_()
    grads, value = [], f(x)
    for order in range(3):
        _, grad = gradkit.value_and_grads(value, x, unused="zeros", create_graph=order < 2)
        grads.append(grad.detach())
        value = (grad * along).sum()
        if not value.requires_grad:
            break
    return grads


def functional_calls(f: Fn, x: Tensor, along: Tensor) -> list[Tensor]:
    grads = [func.value_and_grads(f)(x)[1]]
    slope = lambda x: (func.value_and_grads(f)(x)[1] * along).sum()  # noqa: E731
    grads.append(func.value_and_grads(slope)(x)[1])
    curve = lambda x: (func.value_and_grads(slope)(x)[1] * along).sum()  # noqa: E731
    return [*grads, func.value_and_grads(curve)(x)[1]]


def forward_mode(f: Fn, x: Tensor, along: Tensor) -> list[Tensor]:
    with warnings.catch_warnings():  # where torch's forward mode fails
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        grad, product = func.hvp(f, x, along)
    return [grad, product]


def reverse_mode(f: Fn, x: Tensor, along: Tensor) -> list[Tensor]:
    grad, product = func.hvp(f, x, along, mode="reverse-over-reverse")
    return [grad, product]


def of_tangents(f: Fn, x: Tensor, along: Tensor) -> list[Tensor]:
    """The gradient of a derivative by forward mode, in the place of the second."""
    slope = lambda x: torch.func.jvp(f, (x,), (along,))[1]  # noqa: E731
    return [func.value_and_grads(f)(x)[1], func.value_and_grads(slope)(x)[1]]


METHODS = (eager, functional_calls, forward_mode, reverse_mode, of_tangents)


def difference(of: Fn, x: Tensor, along: Tensor, step: float = STEP) -> Tensor:
    """The slope along a direction, to the fourth order of the step: some slopes are thousands."""
    near, far = (of(x + n * step * along) - of(x - n * step * along) for n in (1, 2))
    return (8 * near - far) / (12 * step)


def assert_near(order: int, got: Tensor, expected: Tensor) -> None:
    size = max(1.0, float(expected.abs().max()))
    text = f"order {order}: {got} is not {expected}"
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * size), text


def draw_loss(rng: Random, formulas: dict[str, Fn]) -> tuple[str, Fn, Tensor, Tensor]:
    """A formula between smooth functions, a point away from kinks, and a direction."""
    name = rng.choice(sorted(formulas))
    source = torch.Generator().manual_seed(rng.randrange(1 << 16))
    x, along, factors = torch.randn(3, 3, 3, generator=source, dtype=F64).unbind()
    x = x + 0.2 * x.sign()
    if name in MATRICES:
        # Far from a singular one; entries that were cut at 1 and -1 would give equal eigenvalues.
        x = x.tanh() + 4 * torch.eye(3, dtype=F64)
    formula, scale = formulas[name], rng.choice((1.0, 0.5))

    def loss(x: Tensor) -> Tensor:
        out = formula(scale * x)
        weights = factors.reshape(-1)[: out.numel()].reshape(out.shape)
        return (out.sin() * weights).sum()

    return name, loss, x, along


def judge(rng: Random, formulas: dict[str, Fn]) -> None:
    name, loss, x, along = draw_loss(rng, formulas)
    method = rng.choice(METHODS)
    try:
        grads = method(loss, x, along)
        # From torch 2.14 on, the second derivative of a batch norm carries a graph to nowhere.
        slopes = difference(lambda x: torch.stack(method(loss, x, along)).detach(), x, along)
        slope = (grads[0] * along).sum()
        try:
            assert_near(1, slope, difference(loss, x, along))
        except AssertionError:  # eigenvalues that nearly meet bend the loss within a step
            assert_near(1, slope, difference(loss, x, along, STEP / 10))
        for order, (grad, slope) in enumerate(zip(grads[1:], slopes, strict=False), 2):
            assert_near(order, grad, slope)
    except NotImplementedError as error:
        raise Refused("torch raises, too") from error
    except gradkit.UnsupportedGraphError as error:
        if name not in DOUBTFUL and not (name in WRONG_OVER_JVP and method is of_tangents):
            raise
        raise Refused(f"UnsupportedGraphError: {name}") from error
    except Exception as error:
        error.add_note(f"{name}, {method.__name__}, {x}, {along}")
        raise


def sound(rng: Random) -> None:
    judge(rng, SOUND)


def doubtful(rng: Random) -> None:
    judge(rng, DOUBTFUL)
