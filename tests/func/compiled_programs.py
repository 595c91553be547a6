"""Programs to compile: each special operation of gradkit's table, and random compositions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
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


class Program(NamedTuple):
    """A loss, and where it is differentiated."""

    name: str
    loss: Loss
    point: Point


def _cosines(point: Point) -> Point:
    return tuple(map(torch.cos, point))


def _nested(loss: Loss, point: Point) -> Any:
    numbers = tuple(range(len(point)))

    def slope(*point: Tensor) -> Tensor:
        _, grads = func.value_and_grads(loss, argnums=numbers)(*point)
        return torch.stack([grad.abs().square().sum() for grad in grads]).sum()

    return func.value_and_grads(slope, argnums=numbers)(*point)


def _per_sample(loss: Loss, point: Point) -> Any:
    batch = tuple(torch.stack([x, 0.9 * x]) for x in point)
    scale = torch.ones((), dtype=D)
    shift = lambda scale, *xs: loss(*(scale * x for x in xs))  # noqa: E731
    return func.per_sample_grads(shift)(scale, *batch)


CALLS: dict[str, Callable[[Loss, Point], Any]] = {
    "value_and_grads": lambda loss, point: func.value_and_grads(
        loss, argnums=tuple(range(len(point)))
    )(*point),
    "nested": _nested,
    "hvp": lambda loss, point: func.hvp(loss, point, _cosines(point)),
    "jvp": lambda loss, point: func.jvp(loss, point, _cosines(point)),
    "per_sample_grads": _per_sample,
}
BACKENDS = ("eager", "aot_eager")


def operations(device: torch.device) -> Iterator[Program]:
    """Yield an example of torch's own of each special operation, as a loss."""
    from tests.op_db import op_db

    special = {*table.OPERATIONS, *table.BY_FORMULA, *table.REFUSED}
    for info in op_db:
        differentiable = info.supports_autograd and D in info.supported_dtypes(device.type)
        if differentiable and short(info.name) in special and info.full_name not in EXCLUDED:
            samples = info.sample_inputs(device, D, requires_grad=True)
            programs = (_of_sample(info, sample) for sample in samples)
            yield from islice(filter(None, programs), 1)


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
        y = flat(info.gradcheck_wrapper(info.op, *args, **kwargs))
        return (torch.sin(y + 0.3)).sum()

    return Program(info.full_name, loss, tuple(constants[slot].contiguous() for slot in slots))


def drawn(seed: int, device: torch.device) -> Program:
    """Return a random composition of formulas of a 3 x 3 matrix."""
    rng = Random(seed)
    known = {**formulas.SOUND, **formulas.DOUBTFUL}
    first, loss, x, _ = formulas.draw_loss(rng, known)
    second, other, _, _ = formulas.draw_loss(rng, known)
    if second in formulas.MATRICES and first not in formulas.MATRICES:
        x = x.tanh() + 4 * torch.eye(3, dtype=D)
    mix = rng.choice((torch.mul, torch.add, torch.sub))
    return Program(f"{first}, {second}", lambda x: mix(loss(x), other(x).cos()), (x.to(device),))


def outcome(program: Program, call: str, backend: str | None) -> Any:
    """Return the tensors that a call gives, or gradkit's error."""

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
