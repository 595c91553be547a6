"""A pass for variables that a function has been given, guarded as that of an eager call is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

from torch import Tensor

from gradkit._autograd.arrival_copies import copied_on_arrival
from gradkit._autograd.formula_double_backward import differentiated_by_formula
from gradkit._autograd.undifferentiable_functions import refuse_undifferentiable
from gradkit._autograd.unshared_memory import without_shared_memory
from gradkit._checks.checked import is_checked
from gradkit._checks.modified_gradients import (
    grad_versions,
    refuse_modified,
    variables_to_copy_inside,
)
from gradkit._compat.transforms import unbatched
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import functions_alive, hooks_registered


@dataclass(frozen=True, slots=True)
class InnerPass:
    """A pass that ends at all of its variables."""

    where: str  # what errors call its roots
    path: Callable[[int], str]  # what they call a variable, by its number
    variables: Sequence[Tensor]  # what it differentiates with respect to
    below: Subgraph  # of its roots

    def guarded(
        self, run: Callable[[], list[Tensor | None]], *, create_graph: bool
    ) -> list[Tensor | None]:
        """Return the gradients of `run`, which is the pass; raise if the user's code spoils one."""
        formulas = differentiated_by_formula(self.below) if create_graph else nullcontext()
        functions = functions_alive().users
        if not (functions or hooks_registered()):
            with formulas:
                return run()
        with ExitStack() as stack:
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
        refuse_modified(lambda: self.where, self.path, self.variables, self.below, versions)
        return grads
