"""One level of torch.func: a function's losses, and passes from them.

`torch.func.vjp` is entered for the level alone. The passes run inside it, where a pass can start
from one loss: from outside, the others would need zero cotangents, and 0 * inf is nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from gradkit._autograd import transform_pass
from gradkit._checks.derivatives import refuse_wrong_derivative
from gradkit._checks.op_monitor import OpMonitor
from gradkit._compat import functorch
from gradkit._compat.transforms import detached, differentiated
from gradkit._core.graph import Subgraph
from gradkit._core.inference_mode import leave_inference_mode
from gradkit._core.losses import Losses, read_losses
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import DetachedLossError, message
from gradkit.func._arguments import Arguments
from gradkit.func._aux import split_aux, tensors_of
from gradkit.func._results import cast_to, copied
from gradkit.func._torch_func_errors import named_errors


@dataclass(frozen=True)
class Passes:
    """Runs passes inside a level.

    Attributes:
        variables: The level's tensors to differentiate with respect to.
        level: Its number; None while torch.compile traces, which cannot tell.
        differentiable: A transform around the level differentiates its results.
        monitor: What is known of the operations of the function.
    """

    variables: list[Tensor]
    level: int | None
    differentiable: bool
    monitor: OpMonitor

    @property
    def create_graph(self) -> bool:
        """Whether gradients stay tensors of their level, not to be copied into a buffer."""
        return True

    def depends(self, output: Tensor) -> bool:
        """Return whether an output was computed from the variables; True while tracing."""
        # A tensor from outside may require grad, too, with a graph outside of the level.
        return self.level is None or (
            output.requires_grad and functorch.level_of(output) == self.level
        )

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
        create: bool | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of a weighted sum of outputs, from one engine pass.

        With `create=False` the caller takes them for constants, whatever is around the level.
        """
        pairs = [p for p in zip(outputs, seeds, strict=True) if self.depends(p[0])]
        roots = [output for output, _ in pairs]
        # Without a graph, the transform around the level would take a gradient for a constant.
        keep = create or self.differentiable
        if (keep if create is None else create) and self.level is not None:
            refuse_wrong_derivative("the loss", variables, Subgraph(roots))
        return transform_pass.run(
            roots, [seed for _, seed in pairs], variables, retain=retain, create=keep
        )

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Return stacked gradients for a batch of cotangents, from one vmapped pass."""
        return transform_pass.run_batch(
            lambda seed: self.grads([output], [seed], variables, retain=True), seeds
        )


@dataclass(frozen=True)
class LevelResult:
    """The results of a level.

    Attributes:
        values: The losses.
        grads: The lists of gradients that were asked for, often one for each variable.
        aux: What the function returned beside the losses.
        spec: The structure of the losses.
    """

    values: list[Tensor]
    grads: list[list[Tensor | None]]
    aux: PyTree
    spec: Structure


def differentiate(
    fn: Callable[..., Any],
    arguments: Arguments,
    kwargs: dict[str, Any],
    run: Callable[[Losses, Passes], Sequence[Sequence[Tensor | None]]],
    *,
    has_aux: bool,
    scalar: bool,
    monitor: OpMonitor | None = None,
) -> LevelResult:
    """Call a function in a new level, and `run` passes from its losses; without the outer graph."""
    differentiable = differentiated()
    op_monitor = OpMonitor() if monitor is None else monitor
    outside: list[Any] = []

    def inside(*tensors: Tensor) -> tuple[Tensor, Any]:
        _set_grad_dtypes(tensors, arguments)
        level = None if torch.compiler.is_compiling() else functorch.current_level()
        with op_monitor:
            returned = fn(*arguments.with_variables(tensors), **kwargs)
            tree, aux = split_aux(returned) if has_aux else (returned, None)
        losses = read_losses(tree, scalar=scalar, returned=True, may_be_aux=not has_aux)
        passes = Passes(list(tensors), level, differentiable, op_monitor)
        _require_dependence(losses, passes)
        op_monitor.check()
        grads, put_grads_back = tensors_of([list(part) for part in run(losses, passes)])
        tensors_of_aux, put_aux_back = tensors_of(aux)
        outside.extend((losses.spec, put_grads_back, put_aux_back))
        return losses.leaves[0], (losses.leaves, grads, tensors_of_aux)

    with leave_inference_mode(record=True):
        values, flat, tensors_of_aux = _enter(inside, list(map(detached, arguments.variables)))
        values = copied([detached(value) for value in values])
    spec, put_grads_back, put_aux_back = outside
    grads = put_grads_back(flat)
    del flat  # ownership is read off the number of references
    for index, part in enumerate(grads):
        if len(part) == len(arguments.dtypes):
            grads[index] = cast_to(arguments.dtypes, part)
    return LevelResult(values, grads, put_aux_back(map(detached, tensors_of_aux)), spec)


def gradient_of_the_sum(losses: Losses, passes: Passes) -> list[list[Tensor | None]]:
    """Run one pass from all losses together; a `run` for `differentiate`."""
    seeds = [None] * len(losses.leaves)
    return [passes.grads(losses.leaves, seeds, passes.variables, retain=False)]


def _enter(inside: Callable[..., Any], tensors: list[Tensor]) -> Any:
    return named_errors(lambda: vjp(inside, *tensors, has_aux=True)[2])  # type: ignore[misc]


def _set_grad_dtypes(tensors: Sequence[Tensor], arguments: Arguments) -> None:
    # Not only the result has this dtype: so has the sum over the uses [B1].
    for tensor, dtype in zip(tensors, arguments.dtypes, strict=True):
        if tensor.dtype != dtype:
            tensor.grad_dtype = dtype


def _require_dependence(losses: Losses, passes: Passes) -> None:
    if any(map(passes.depends, losses.leaves)):
        return
    raise DetachedLossError(
        message(
            ", ".join(losses.path(index) for index in range(min(len(losses.leaves), 3))),
            "a loss computed from the arguments that argnums names",
            "one that does not depend on them: fn uses a module, or tensors, from outside, or cuts "
            "the path (detach(), .data, .item(), no_grad)",
            "compute it from fn's own arguments: call, params, buffers = "
            "gradkit.func.make_functional(module)",
        )
    )
