"""The trees of a call, opened once into flat lists: params, a returned loss, tensors anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.call import read_losses
from gradkit._core.params import Params, expand_params
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import captured_by
from gradkit._state.snapshot import Snapshot
from gradkit.errors import GradkitError, NotScalarLossError, StructureError, describe, message
from gradkit.func._arguments import Arguments, read_arguments, refuse_sparse


@dataclass(slots=True)
class InnerParams(Params):
    """Params whose variables an inner computation adapts; frozen parameters stay as they are."""

    arguments: Arguments  # the same variables, of a function of one argument

    def tree(self, tensors: Sequence[Tensor]) -> PyTree:
        """Return params with these tensors in all places of the variables."""
        return pytree.unflatten(self.spec, self.with_variables(tensors))


def read_inner_params(tree: PyTree, *, dense: bool = False) -> InnerParams:
    """Open and check params, of which none may be sparse if they are to be dense."""
    leaves, spec = expand_params(tree, "params")
    arguments = read_arguments((pytree.unflatten(spec, leaves),), 0, "params")
    if dense:
        refuse_sparse(arguments)
    flat = arguments.params
    return InnerParams(
        leaves,
        spec,
        flat.variables,
        flat.slots,
        "params",
        flat.no_subclasses,
        flat.only_leaves,
        arguments,
    )


def raised_where_it_would_take(error: Exception, fn: Callable[..., Any], *args: Any) -> bool:
    """Return whether a function of the caller's has raised, and runs with other arguments."""
    # It is run with them, and everything is as before. Not for what gradkit has said by name.
    if isinstance(error, GradkitError) or transforms():
        return False
    try:
        with Snapshot(captured_by(fn), pytree.tensors(args)).restored():
            fn(*args)
    except Exception:
        return False
    return True


def read_loss(returned: PyTree, fn: str, *, has_aux: bool = False) -> tuple[Tensor, PyTree]:
    """Return the one loss, as a 0-dim tensor, and the aux that a function of the caller's gave."""
    aux = None
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            expected, got = "(loss, aux), with has_aux=True", describe(returned)
            raise StructureError(message(fn, expected, got, "return loss, aux"))
        returned, aux = returned
    losses = read_losses(returned, scalar=True, returned=True, may_be_aux=not has_aux).leaves
    if len(losses) != 1:
        fix = (
            "return their sum; or if this is (loss, aux), return the loss alone, or pass "
            "has_aux=True to a call that takes it"
        )
        raise NotScalarLossError(message(fn, "one loss", f"{len(losses)} losses", fix))
    return losses[0].reshape(()), aux


def read_loss_and_buffers(
    returned: PyTree, buffers: PyTree, *, has_aux: bool
) -> tuple[Tensor, tuple[PyTree, PyTree]]:
    """Return the one loss, the next buffers and the aux that a function of the caller's gave."""
    parts = ("loss", "buffers", "aux") if has_aux else ("loss", "buffers")
    if not isinstance(returned, tuple) or len(returned) != len(parts):
        expected, fix = f"({', '.join(parts)})", f"return {', '.join(parts)}"
        where = "loss_fn(params, buffers, outer, batch)"
        raise StructureError(message(where, expected, describe(returned), fix))
    loss, after, *aux = returned
    root, spec = "the buffers that loss_fn returned", pytree.flatten(buffers)[1]
    leaves = pytree.flatten_up_to(spec, "buffers", after, root)
    after = pytree.unflatten(spec, leaves)
    return read_loss((loss, None), "loss_fn", has_aux=True)[0], (after, aux[0] if aux else None)
