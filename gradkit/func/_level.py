"""One level of derivatives: a function's losses, and passes from them, inside of torch.func.

`torch.func.vjp` is entered for the level alone. The passes run inside of it, where a pass can start
from one loss by itself: from outside, the others would have to be given zeros, and 0 * inf is nan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch._functorch.eager_transforms import _autograd_grad
from torch.func import vjp

from gradkit._checks import unsupported
from gradkit._checks.op_monitor import OpMonitor
from gradkit._compat.transforms import detached, differentiated, ordinary_mode
from gradkit._core import graph, pytree
from gradkit._core.inputs import Losses, read_losses
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import (
    DetachedLossError,
    GradkitError,
    LeafTypeError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)
from gradkit.func._variables import Variables, copied


@dataclass(frozen=True)
class Passes:
    """Runs passes inside of a level.

    Attributes:
        variables: The level's tensors to differentiate by.
        level: Its number; None while torch.compile traces, which cannot tell.
        differentiable: A transform around the level differentiates what comes out.
        watch: What is known of the operations of the function.
    """

    variables: tuple[Tensor, ...]
    level: int | None
    differentiable: bool
    watch: OpMonitor

    def depends(self, output: Tensor) -> bool:
        """Return whether an output was computed from the variables.

        A tensor from outside may require grad, too: its own graph is none of the level's business.
        While torch.compile traces, every output counts.
        """
        return self.level is None or (output.requires_grad and _level_of(output) == self.level)

    def grads(
        self, outputs: Sequence[Tensor], seeds: Sequence[Tensor] | None, *, retain: bool
    ) -> list[Tensor]:
        """Return the gradients of a weighted sum of outputs, from one engine pass.

        Args:
            outputs: Where the pass starts.
            seeds: The cotangent of each; None is one.
            retain: Keep the graph for a further pass.

        Returns:
            One gradient for each variable, zeros where it is not reached.
        """
        live = [index for index, output in enumerate(outputs) if self.depends(output)]
        self._refuse_wrong_derivative([outputs[index] for index in live], self.differentiable)
        return list(
            _autograd_grad(
                [outputs[index] for index in live],
                self.variables,
                None if seeds is None else [seeds[index] for index in live],
                retain_graph=retain,
                # Without it the level above would take the gradient for a constant.
                create_graph=self.differentiable,
            )
        )

    def grads_or_none(
        self, outputs: Sequence[Tensor], *, create: bool
    ) -> tuple[Tensor | None, ...]:
        """Return gradients as `grads` does, but None where a variable is not reached."""
        live = [output for output in outputs if self.depends(output)]
        self._refuse_wrong_derivative(live, create)
        create = create or self.differentiable
        return torch.autograd.grad(live, self.variables, create_graph=create, allow_unused=True)

    def _refuse_wrong_derivative(self, live: Sequence[Tensor], create: bool) -> None:
        if create and self.level is not None:
            nodes = graph.nodes_below(live)
            unsupported.refuse_wrong_derivative("the loss", self.variables, nodes)


@dataclass(frozen=True)
class Outcome:
    """What comes out of a level.

    Attributes:
        values: The losses.
        grads: The lists of gradients that were asked for, often one for each variable.
        aux: What the function returned beside the losses.
        spec: The structure of the losses.
    """

    values: list[Tensor]
    grads: list[list[Tensor]]
    aux: PyTree
    spec: Structure


def differentiate(
    fn: Callable[..., Any],
    given: Variables,
    kwargs: dict[str, Any],
    run: Callable[[Losses, Passes], list[list[Tensor]]],
    *,
    has_aux: bool,
    scalar: bool,
    watch: OpMonitor | None = None,
) -> Outcome:
    """Call a function in a level of its own, and run passes from its losses.

    Args:
        fn: The caller's function.
        given: Its arguments.
        kwargs: Its keyword arguments.
        run: What to do with the losses: lists of gradients, one gradient for each variable.
        has_aux: `fn` returns (losses, aux).
        scalar: Every loss must have exactly one element.
        watch: The watch over the function's operations, if the caller has one.

    Returns:
        Its losses, gradients and aux, without the level, and without the caller's own graph.

    Raises:
        DetachedLossError: No loss depends on the variables.
        UnsupportedGraphError: The function does what a level cannot follow.
    """
    differentiable = differentiated()
    watch = OpMonitor() if watch is None else watch
    outside: list[Any] = []

    def inside(*tensors: Tensor) -> tuple[Tensor, Any]:
        _set_grad_dtypes(tensors, given)
        level = None if torch.compiler.is_compiling() else _current_level()
        with watch:
            returned = fn(*given.with_tensors(tensors), **kwargs)
            tree, aux = _with_aux(returned) if has_aux else (returned, None)
        losses = read_losses(tree, scalar=scalar)
        passes = Passes(tensors, level, differentiable, watch)
        _require_dependence(losses, passes)
        watch.check()
        grads = run(losses, passes)
        tensors_of_aux, put_back = tensors_of(aux)
        outside.extend((losses.spec, put_back))
        return losses.leaves[0], (losses.leaves, grads, tensors_of_aux)

    with ordinary_mode():
        values, grads, tensors_of_aux = _enter(inside, list(map(detached, given.tensors)))
        values = copied([detached(value) for value in values])
    spec, put_back = outside
    right = [cast_to(given.dtypes, one) if len(one) == len(given.dtypes) else one for one in grads]
    del grads
    return Outcome(values, right, put_back(map(detached, tensors_of_aux)), spec)


def gradient_of_the_sum(losses: Losses, passes: Passes) -> list[list[Tensor]]:
    """Run one pass from all losses together; a `run` for `differentiate`."""
    return [passes.grads(losses.leaves, None, retain=False)]


def is_constant(leaf: object) -> bool:
    """Return whether a leaf that is no tensor cannot be a container of some."""
    return leaf is None or isinstance(leaf, _CONSTANTS) or callable(leaf)


_CONSTANTS = (str, bytes, Number, Enum, torch.dtype, torch.device, torch.Size, torch.layout)


def tensors_of(tree: PyTree) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], PyTree]]:
    """Take the tensors out of a tree: a transform passes on nothing else.

    Args:
        tree: A tree of tensors and constants.

    Returns:
        The tensors, and a function that puts others in their places.

    Raises:
        LeafTypeError: A leaf may hold tensors that would come out of the level unusable.
    """
    leaves, spec = pytree.flatten(tree)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) and not is_constant(leaf):
            raise LeafTypeError(
                message(
                    pytree.path(spec, index, "aux"),
                    "a tensor, or a constant: a number, text, a function, a module",
                    f"{describe(leaf)}, which is no tree that optree knows",
                    "return a dict; or register the class: optree.register_pytree_node",
                )
            )
    others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def put_back(tensors: Iterable[Tensor]) -> PyTree:
        rest = iter(tensors)
        return pytree.unflatten(spec, [next(rest) if o is None else o[0] for o in others])

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], put_back


def cast_to(dtypes: Sequence[torch.dtype], grads: Iterable[Tensor]) -> list[Tensor]:
    """Return gradients in the dtypes that they are to have."""
    return [
        grad if grad.dtype == dtype else grad.to(dtype)
        for grad, dtype in zip(grads, dtypes, strict=True)
    ]


def _enter(inside: Callable[..., Any], tensors: list[Tensor]) -> Any:
    if torch.compiler.is_compiling():
        _, _, result = vjp(inside, *tensors, has_aux=True)  # type: ignore[misc]
        return result
    try:
        _, _, result = vjp(inside, *tensors, has_aux=True)  # type: ignore[misc]
        return result
    except RuntimeError as error:
        for text, (came, do) in _CANNOT_ENTER.items():
            if text in str(error) and not isinstance(error, GradkitError):
                raise UnsupportedGraphError(
                    message("fn", "what torch.func can differentiate", came, do)
                ) from error
        raise


_OF_ITS_OWN = (
    "a call of backward(), retain_grad() or requires_grad_(), or of torch.autograd.functional",
    "nest gradkit.func or torch.func calls, and return what is to be kept as aux",
)
_CANNOT_ENTER = {
    "saved tensor hooks": (
        "saved-tensor hooks: a checkpoint, or save_on_cpu",
        "leave them out, or compute the losses eagerly: gradkit.value_and_grads(losses, params)",
    ),
    "backward() called inside a functorch transform": _OF_ITS_OWN,
    "inside of a function being transformed by a functorch transform": _OF_ITS_OWN,
    "would mutate a captured Tensor": (
        "an in-place operation on a tensor from outside: batch norm in train mode, say",
        "call, params, buffers = gradkit.func.make_functional(module), and return the new buffers "
        "as aux",
    ),
    "setup_context": (
        "an autograd.Function whose forward takes ctx, or a full backward hook of a module",
        "give the Function a setup_context staticmethod; or compute the losses eagerly: "
        "gradkit.value_and_grads(losses, params)",
    ),
}


def _set_grad_dtypes(tensors: Sequence[Tensor], given: Variables) -> None:
    # Not only the result has this dtype: so has the sum over the uses [B1].
    for tensor, dtype in zip(tensors, given.dtypes, strict=True):
        if tensor.dtype != dtype:
            tensor.grad_dtype = dtype


def _with_aux(returned: object) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise StructureError(
            message(
                "fn", "(losses, aux), with has_aux=True", describe(returned), "return losses, aux"
            )
        )
    return returned[0], returned[1]


_level_of = torch._C._functorch.maybe_get_level
_current_level = torch._C._functorch.maybe_current_level


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
