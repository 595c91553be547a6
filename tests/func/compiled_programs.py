"""Programs to compile: each special operation of gradkit's table, and random compositions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import gradkit
from gradkit import func
from gradkit._core import pytree
from gradkit._torch_bugs import table
from tests.fuzz import formulas
from tests.sweep.cases import EXCLUDED, LARGEST, D, flat, short

Loss = Callable[..., Tensor]  # of the tensors of a point
Point = tuple[Tensor, ...]
BACKENDS = ("eager", "aot_eager")


class Program(NamedTuple):
    """A loss, and where it is differentiated."""

    name: str
    loss: Loss
    point: Point


_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
    modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
    spherical_bessel_j0
"""
SPECIAL = _SPECIAL.split()
_POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
    legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
"""
POLYNOMIALS = _POLYNOMIALS.split()


def _of_degree(polynomial: Callable[..., Tensor], x: Tensor) -> Tensor:
    return polynomial(x / 4, 3)


def _cosines(point: Point) -> Point:
    return tuple(map(torch.cos, point))


def _value_and_grads(loss: Loss, point: Point) -> Any:
    return func.value_and_grads(loss, argnums=tuple(range(len(point))))(*point)


def _nested(loss: Loss, point: Point) -> Any:
    def slope(*point: Tensor) -> Tensor:
        _, grads = _value_and_grads(loss, point)
        return torch.stack([grad.square().sum() for grad in grads]).sum()

    return _value_and_grads(slope, point)


def _per_sample(loss: Loss, point: Point) -> Any:
    scaled = lambda scale, *xs: loss(*(scale * x for x in xs))  # noqa: E731
    batch = [torch.stack([x, 0.9 * x]) for x in point]
    return func.per_sample_grads(scaled)(torch.ones((), dtype=D, device=point[0].device), *batch)


CALLS: dict[str, Callable[[Loss, Point], Any]] = {
    "value_and_grads": _value_and_grads,
    "nested": _nested,
    "hvp": lambda loss, point: func.hvp(loss, point, _cosines(point)),
    "jvp": lambda loss, point: func.jvp(loss, point, _cosines(point)),
    "per_sample_grads": _per_sample,
}


# Torch's table has no derivative of these.
FUNCTIONS = {
    **{name: getattr(torch.special, name) for name in SPECIAL},
    **{name: partial(_of_degree, getattr(torch.special, name)) for name in POLYNOMIALS},
}


def operation(name: str, device: torch.device) -> Program:
    """Return an example of torch's own of a special operation, as a loss."""
    from tests.op_db import op_db

    if name in FUNCTIONS:
        x = torch.tensor([0.7, 1.9, 3.1], dtype=D, device=device)
        return Program(name, lambda x: FUNCTIONS[name](x).sin().sum(), (x,))
    (info,) = (info for info in op_db if info.full_name == name)
    samples = info.sample_inputs(device, D, requires_grad=True)
    return next(p for p in (_of_sample(info, sample) for sample in samples) if p is not None)


def special(device: torch.device) -> list[str]:
    """Return the names, in torch's table, of the operations that gradkit's table is about."""
    from tests.op_db import op_db

    names = {*table.OPERATIONS, *table.BY_FORMULA, *table.REFUSED}
    return [
        info.full_name
        for info in op_db
        if short(info.name) in names and info.full_name not in EXCLUDED
        if info.supports_autograd and D in info.supported_dtypes(device.type)
        if any(_of_sample(info, x) for x in info.sample_inputs(device, D, requires_grad=True))
    ]


def _of_sample(info: Any, sample: Any) -> Program | None:
    leaves, spec = torch_pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    slots = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    given = [leaves[slot] for slot in slots]
    if not given or sum(x.numel() for x in given) > LARGEST:
        return None
    if any(x.dtype != D or not x.numel() or x.layout != torch.strided for x in given):
        return None
    constants = [x.detach() if isinstance(x, Tensor) else x for x in leaves]

    def loss(*point: Tensor) -> Tensor:
        here = list(constants)
        for slot, x in zip(slots, point, strict=True):
            here[slot] = x
        args, kwargs = torch_pytree.tree_unflatten(here, spec)
        return torch.sin(flat(info.gradcheck_wrapper(info.op, *args, **kwargs)) + 0.3).sum()

    return Program(info.full_name, loss, tuple(constants[slot].contiguous() for slot in slots))


def drawn(seed: int, device: torch.device) -> tuple[Program, str]:
    """Return a random composition of two formulas of a 3 x 3 matrix, and a call."""
    rng = Random(seed)
    known = {**formulas.SOUND, **formulas.DOUBTFUL}
    first, loss, x, _ = formulas.draw_loss(rng, known)
    second, other, _, _ = formulas.draw_loss(rng, known)
    if second in formulas.MATRICES and first not in formulas.MATRICES:
        x = x.tanh() + 4 * torch.eye(3, dtype=D)
    mix = rng.choice((torch.mul, torch.add, torch.sub))
    total = lambda x: mix(loss(x), other(x).cos())  # noqa: E731
    return Program(f"{first}, {second}", total, (x.to(device),)), rng.choice(sorted(CALLS))


def outcome(program: Program, call: str, backend: str | None) -> Any:
    """Return the tensors that a call gives, or gradkit's error; compiled if there is a backend."""

    def run(*point: Tensor) -> Any:
        return CALLS[call](program.loss, point)

    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(run, backend=backend, fullgraph=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytree.tensors(run(*program.point))
    except gradkit.GradkitError as error:
        return error
