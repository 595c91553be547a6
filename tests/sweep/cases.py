"""The calls that are swept: the samples of torch's own tables. `extra.py` has what these lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from tests.sweep.programs import Case

LARGEST = 150  # elements of the tensors that are differentiated
D = torch.float64

# What differences say nothing about, by the name in torch's table.
EXCLUDED = {
    "native_layer_norm": "the statistics among its outputs have no derivative, by design",
    "native_batch_norm": "the same",
    "_native_batch_norm_legit": "the same",
    "_batch_norm_with_update": "the same",
    "normal": "its gradient is zero, and gradkit refuses it: transform_bugs.NOT_SWEPT",
    "normal.number_mean": "the same",
    "bfloat16": "rounds",
    "half": "rounds",
    "linalg.norm.subgradients_at_zero": "is tried where it has no derivative",
    "nn.functional.cosine_embedding_loss": "its labels are differentiated",
    "nn.functional.hinge_embedding_loss": "the same",
    "nn.functional.max_unpool1d": "where an index stands twice, which value stays is undefined",
    "nn.functional.max_unpool2d": "the same",
    "nn.functional.max_unpool3d": "the same",
    "as_strided": "reads memory beyond a sample, so that a batch is another function",
    "as_strided.partial_views": "the same",
    "as_strided_copy": "the same",
    "linalg.lstsq": "the residuals are empty or not by the rank of the matrix",
}

# What is the identity of a tensor without dimensions, and right, by the same kind of node.
OF_DIMENSIONS = {"logcumsumexp"}


def flat(outputs: Any) -> Tensor:
    """Return every floating-point output as one real vector."""
    parts = []
    for x in pytree.tree_leaves(outputs):
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            x = x.to_dense() if x.layout != torch.strided else x
            parts.append(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x)
    return torch.cat([x.reshape(-1).to(D) for x in parts])


def case(operation: str, call: Callable[..., Any], args: Any) -> Case | None:
    """Return a call as a function of the tensors that require grad, None if it is not to be had."""
    leaves, spec = pytree.tree_flatten(args)
    slots = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    given = [leaves[i] for i in slots]
    if not slots or sum(x.numel() for x in given) > LARGEST:
        return None
    if any(x.layout != torch.strided or x.numel() == 0 for x in given):
        return None
    if any(x.dtype not in {D, torch.complex128} for x in given):
        return None  # differences would have too few digits
    constants = [x.detach() if isinstance(x, Tensor) else x for x in leaves]

    def outputs(*tensors: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)
        here = list(constants)
        for slot, tensor in zip(slots, tensors, strict=True):
            here[slot] = tensor
        positional, named = pytree.tree_unflatten(here, spec)
        return flat(call(*positional, **named))

    return Case(operation, outputs, tuple(constants[i].contiguous() for i in slots))


Make = Callable[[int], list[Case]]  # at most so many cases


def operations() -> Iterator[tuple[str, Make]]:
    """Yield every operation of torch's table, and what makes cases of it."""
    from tests.op_db import op_db

    for info in op_db:
        differentiable = info.supports_autograd and D in info.supported_dtypes("cpu")
        if differentiable and info.full_name not in EXCLUDED:
            yield info.full_name, partial(_of_operation, info)


def _of_operation(info: Any, count: int) -> list[Case]:
    cases = []
    for number, one in enumerate(info.sample_inputs("cpu", D, requires_grad=True)):
        if number > 300:
            break
        if info.name in OF_DIMENSIONS and not one.input.dim():
            continue

        def call(*args: Any, one: Any = one, **kwargs: Any) -> Any:
            return one.output_process_fn_grad(info.gradcheck_wrapper(info.op, *args, **kwargs))

        cases.append(case(short(info.name), call, ((one.input, *one.args), dict(one.kwargs))))
    return some([c for c in cases if c], count)


def without_graph(count: int) -> set[str]:
    """Return the operations of torch's table that vary smoothly, and give results without a graph.

    Of each, so many samples are tried: a floating-point output that has no graph is differentiated
    by the floating-point arguments, all of which require grad.
    """
    from tests.op_db import op_db

    infos = [info for info in op_db if info.full_name not in EXCLUDED]
    infos = [x for x in infos if D in x.supported_dtypes("cpu") and "jiterator" not in x.name]
    return {short(info.name) for info in infos if _drops_its_graph(info, count)}


def _drops_its_graph(info: Any, count: int) -> bool:
    samples = islice(info.sample_inputs("cpu", D, requires_grad=False), count)
    return any(_is_dropped(info.op, (one.input, *one.args), dict(one.kwargs)) for one in samples)


def _is_dropped(op: Callable[..., Any], args: Any, named: Any) -> bool:
    leaves, spec = pytree.tree_flatten((args, named))
    slots = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
    slots = [i for i in slots if leaves[i].layout == torch.strided and leaves[i].numel()]

    def outputs(step: float, requires_grad: bool) -> list[Tensor]:
        torch.manual_seed(0)
        here = list(leaves)
        for slot in slots:
            along = torch.linspace(0.5, 1.0, leaves[slot].numel(), dtype=D).reshape_as(leaves[slot])
            here[slot] = (leaves[slot].detach() + step * along).requires_grad_(requires_grad)
        positional, by_name = pytree.tree_unflatten(here, spec)
        found = pytree.tree_leaves(op(*positional, **by_name))
        return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]

    def one_output(index: int, step: float) -> Tensor:
        return outputs(step, False)[index]

    try:
        lost = [i for i, x in enumerate(outputs(0, True)) if not x.requires_grad]
        return any(_varies_smoothly(partial(one_output, i)) for i in lost)
    except (RuntimeError, TypeError, ValueError):
        return False  # a sample that is not differentiable as a leaf: written in place, say


def _varies_smoothly(at: Callable[[float], Tensor]) -> bool:
    fine, coarse = ((at(h) - at(-h)) / (2 * h) for h in (1e-5, 3e-5))
    finite = fine.isfinite() & coarse.isfinite()
    fine, coarse = fine[finite], coarse[finite]
    is_smooth = (fine - coarse).abs() <= 1e-5 * (1 + fine.abs())
    return bool(((fine.abs() > 1e-3) & is_smooth).any())


def short(name: str) -> str:
    """Return an operation's name without its module: "linalg.det" is "det"."""
    return name.removesuffix(".default").rpartition(".")[2]


def some(cases: list[Case], count: int) -> list[Case]:
    """Return so many cases, from all over a list."""
    step = max(1, len(cases) // count)
    return cases[::step][:count]


def modules() -> Iterator[tuple[str, Make]]:
    """Yield every module of torch's table, and what makes cases of it."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if D in info.dtypes and "Lazy" not in info.name:
            yield f"module {info.name}", partial(_of_module, info)


def _of_module(info: Any, count: int) -> list[Case]:
    cases = []
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=D, requires_grad=True, training=False
    )
    for one in inputs:
        made, forward = one.constructor_input, one.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(D).eval()
        params = dict(module.named_parameters())

        def call(params: Any, *args: Any, module: Any = module, **kwargs: Any) -> Any:
            return functional_call(module, params, args, kwargs)

        args = ((params, *forward.args), dict(forward.kwargs))
        cases.append(case(f"module {info.name}", call, args))
    return some([c for c in cases if c], count)
