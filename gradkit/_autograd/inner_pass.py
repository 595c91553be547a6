"""A pass that ends at all of its variables: those of `gradkit.func` and `gradkit.meta`.

Its guards are those of `PassRunner`, without what is around an eager call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

from torch import Tensor

from gradkit._autograd import engine
from gradkit._autograd.arrival_copies import (
    copied_on_arrival,
    memory_address,
    without_shared_memory,
)
from gradkit._autograd.side_effects import side_effects_put_back
from gradkit._checks.checked import is_checked
from gradkit._checks.higher_derivatives import refuse_undifferentiable
from gradkit._checks.hooks_in_passes import any_changed_gradients, watched_pass
from gradkit._checks.modified_tensors import (
    functions_below,
    grad_versions,
    refuse_modified,
    variables_to_copy_inside,
)
from gradkit._compat.transforms import unbatched
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core import user_code
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import functions_alive, hooks_registered, user_code_may_run
from gradkit._torch_bugs.node_formulas import differentiated_by_formula

_version = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class InnerPass:
    """A pass that ends at all of its variables."""

    where: str  # the name of its roots in errors
    path: Callable[[int], str]  # the name of a variable in errors, by its number
    variables: Sequence[Tensor]  # the tensors to differentiate with respect to
    below: Subgraph  # the graph of its roots
    cotangents: Sequence[Tensor | None] = ()  # the roots' own, if the caller has made them

    def grads(
        self, roots: Sequence[Tensor], *, create_graph: bool = False, retain_graph: bool = False
    ) -> list[Tensor | None]:
        """Return the gradient of the roots by each variable."""
        retain = retain_graph or create_graph

        def run(edges: Sequence[Any] = (), keep: bool = False) -> list[Tensor | None]:
            given = roots, [*self.variables, *edges], self.cotangents or None
            return engine.inner_grads(*given, create_graph=create_graph, retain_graph=retain | keep)

        return self.guarded(run, create_graph=create_graph)

    def guarded(
        self, run: Callable[..., list[Tensor | None]], *, create_graph: bool, watch: bool = True
    ) -> list[Tensor | None]:
        """Return the gradients of `run`, which is the pass; raise if the user's code spoils one."""
        # `run(edges, keep)` captures at edges of the graph, too, and keeps it, if there is a watch
        # on hooks that change gradients.
        formulas = differentiated_by_formula(self.below) if create_graph else INSIDE
        # A Function that is alive may be in another graph: that of the step before, say.
        if not user_code_may_run() or not (
            hooks_registered() or is_checked() or user_code.user_functions(self.below.kinds)
        ):
            with formulas:
                return run()
        if watch and hooks_registered() and (create_graph or any_changed_gradients()):
            given = run, lambda: self.where, self.below, self.variables
            run = partial(watched_pass, *given, create_graph=create_graph)
        before = _writes_before(self.cotangents)
        with undo_stack() as stack:
            stack.enter_context(formulas)
            functions = functions_below(self.below) if functions_alive().users else []
            if create_graph and functions:
                graph = self.below, self.variables
                stack.enter_context(refuse_undifferentiable(lambda: self.where, *graph))
            leaves = user_code.leaves_of_functions(functions)
            effects = side_effects_put_back(
                leaves, (), lambda: self.where, retain=True, made=self.variables
            )
            written = stack.enter_context(effects) if functions else None
            copied = variables_to_copy_inside(self.variables, functions)
            stack.enter_context(copied_on_arrival(copied))
            if is_checked():
                stack.enter_context(without_shared_memory(self.below.nodes))
            grads = run()
            if written is not None:
                written.refuse(lambda: self.where)
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
