"""A pass for variables that a function has been given, guarded as that of an eager call is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

from torch import Tensor

from gradkit._autograd.arrival_copies import copied_on_arrival
from gradkit._autograd.formula_double_backward import differentiated_by_formula
from gradkit._autograd.undifferentiable_functions import refuse_undifferentiable
from gradkit._autograd.unshared_memory import memory_address, without_shared_memory
from gradkit._checks.checked import is_checked
from gradkit._checks.modified_gradients import (
    grad_versions,
    refuse_modified,
    variables_to_copy_inside,
)
from gradkit._compat.transforms import unbatched
from gradkit._compat.undoing import undo_stack
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import functions_alive, hooks_registered

_version = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class InnerPass:
    """A pass that ends at all of its variables."""

    where: str  # what errors call its roots
    path: Callable[[int], str]  # what they call a variable, by its number
    variables: Sequence[Tensor]  # what it differentiates with respect to
    below: Subgraph  # of its roots
    cotangents: Sequence[Tensor | None] = ()  # of its roots, if the caller has made them

    def guarded(
        self, run: Callable[[], list[Tensor | None]], *, create_graph: bool
    ) -> list[Tensor | None]:
        """Return the gradients of `run`, which is the pass; raise if the user's code spoils one."""
        formulas = differentiated_by_formula(self.below) if create_graph else nullcontext()
        functions = functions_alive().users
        if not (functions or hooks_registered()):
            with formulas:
                return run()
        before = _writes_before(self.cotangents)
        with undo_stack() as stack:
            stack.enter_context(formulas)
            if create_graph and functions:
                stack.enter_context(refuse_undifferentiable(lambda: self.where, self.below))
            copied = variables_to_copy_inside(self.variables, self.below if functions else None)
            stack.enter_context(copied_on_arrival(copied))
            if is_checked():
                stack.enter_context(without_shared_memory(self.below.nodes))
            grads = run()
        arrived = [None if grad is None else unbatched(grad) for grad in grads]
        versions = grad_versions(self.variables, arrived, copied)
        if before:  # a gradient may be a cotangent itself
            for index in versions:
                versions[index] -= before.get(memory_address(cast("Tensor", arrived[index])), 0)
        refuse_modified(lambda: self.where, self.path, self.variables, self.below, versions)
        return grads


def _writes_before(cotangents: Iterable[Tensor | None]) -> dict[int, int]:
    """Return how often each cotangent had been written on before the pass, by its memory."""
    given = [unbatched(cotangent) for cotangent in cotangents if cotangent is not None]
    counted = [cotangent for cotangent in given if not cotangent.is_inference()]
    written = sorted(filter(_version, counted), key=_version)
    return {memory_address(cotangent): cotangent._version for cotangent in written}
