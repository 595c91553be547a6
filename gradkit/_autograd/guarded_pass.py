"""A pass of the engine among its guards: the same for eager calls, functions and inner steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

from torch import Tensor

from gradkit._autograd import engine
from gradkit._autograd.arrival_copies import (
    ArrivalCapture,
    WriteFinder,
    memory_address,
    without_shared_memory,
)
from gradkit._autograd.side_effects import Written, side_effects_put_back
from gradkit._checks.checked import is_checked
from gradkit._checks.hooks_in_passes import any_changed_gradients, watched_pass
from gradkit._checks.modified_tensors import (
    functions_below,
    grad_versions,
    refuse_modified,
    variables_to_copy_inside,
)
from gradkit._compat.transforms import unbatched
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core.call import Grads
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import (
    functions_alive,
    hooks_registered,
    leaves_of_functions,
    user_code_may_run,
)

_version = attrgetter("_version")


@dataclass(slots=True)
class GuardedPass:
    """A pass of the engine, and what its guards need to know before it runs."""

    where: Callable[[], str]  # the names of its losses in errors
    path: Callable[[int], str]  # the name of a variable in errors, by its number
    variables: Sequence[Tensor]  # the tensors to differentiate with respect to
    below: Callable[[], Subgraph]  # the graph of its roots
    copied: Sequence[Tensor]  # the variables whose gradients are copied as they arrive
    effects: AbstractContextManager[Written] = INSIDE  # puts back what Functions write
    recording: AbstractContextManager[object] = INSIDE  # around a pass that records its graph
    create_graph: bool = False  # its results have a graph
    ends: bool = True  # the pass goes on below none of its variables
    adds: bool = False  # what a Function has written into `.grad` is a part of the gradient
    cotangents: Sequence[Tensor | None] = ()  # those of the caller, which may be gradients

    def run(
        self,
        execute: Callable[[ExitStack, ArrivalCapture, Written], Grads],
        finder: WriteFinder | None = None,
    ) -> Grads:
        """Return the gradients of `execute`, which is the pass; raise if user code spoils one."""
        before = _writes_before(self.cotangents)
        with undo_stack() as stack:
            written = stack.enter_context(self.effects)
            stack.enter_context(self.recording)
            given: Any = {"create_graph": self.create_graph, "ends": self.ends, "finder": finder}
            capture = ArrivalCapture(self.variables, self.copied, stack, **given)
            if is_checked() and user_code_may_run():
                note = () if finder is None else (finder.note_copy,)
                stack.enter_context(without_shared_memory(self.below().nodes, *note))
            grads = capture.replace(execute(stack, capture, written))
            arrived = grads
            if self.ends:  # which may be in a vmap
                arrived = [None if grad is None else unbatched(grad) for grad in grads]
            versions = capture.versions
            if user_code_may_run():  # the pass itself may have registered the first hook
                versions = grad_versions(self.variables, arrived, self.copied) | versions
            if written is not None and self.adds:
                grads = written.added_to(grads)
            elif written is not None:
                written.refuse(self.where)
        if versions and before:  # a gradient may be a cotangent itself
            for index in versions:
                versions[index] -= before.get(memory_address(cast("Tensor", arrived[index])), 0)
        self.refuse_modified(versions)
        return grads

    def refuse_modified(self, versions: Mapping[int, int]) -> None:
        """Raise if a gradient that has this version, by its variable's number, was written on."""
        if versions:
            refuse_modified(self.where, self.path, self.variables, self.below(), versions)


def _writes_before(cotangents: Iterable[Tensor | None]) -> dict[int, int]:
    """Return how often each cotangent had been written on before the pass, by its memory."""
    given = [unbatched(cotangent) for cotangent in cotangents if cotangent is not None]
    counted = [cotangent for cotangent in given if not cotangent.is_inference()]
    written = sorted(filter(_version, counted), key=_version)
    return {memory_address(cotangent): cotangent._version for cotangent in written}


@dataclass(frozen=True, slots=True)
class InnerPass:
    """A pass that ends at all of its variables: those of `gradkit.func` and `gradkit.meta`."""

    where: str  # the name of its roots in errors
    path: Callable[[int], str]  # the name of a variable in errors, by its number
    variables: Sequence[Tensor]  # the tensors to differentiate with respect to
    below: Subgraph  # the graph of its roots
    cotangents: Sequence[Tensor | None] = ()  # the roots' own, if the caller has made them

    def grads(
        self, roots: Sequence[Tensor], *, create_graph: bool = False, retain_graph: bool = False
    ) -> Grads:
        """Return the gradient of the roots by each variable."""
        retain = retain_graph or create_graph

        def run(edges: Sequence[Any] = (), keep: bool = False) -> Grads:
            given = roots, [*self.variables, *edges], self.cotangents or None
            return engine.inner_grads(*given, create_graph=create_graph, retain_graph=retain | keep)

        return self.guarded(run, create_graph=create_graph)

    def guarded(
        self, run: Callable[..., Grads], *, create_graph: bool, watch: bool = True
    ) -> Grads:
        """Return the gradients of `run`, which is the pass; raise if user code spoils one."""
        # `run(edges, keep)` captures at edges of the graph, too, and keeps it, if there is a watch
        # on hooks that change gradients.
        where, variables, below = (lambda: self.where), self.variables, self.below
        recording: AbstractContextManager[object] = INSIDE
        if create_graph:
            recording = engine.recording(where, below, variables, recomputing=False)
        functions = functions_below(below) if functions_alive().users else []
        if not (functions or hooks_registered()):  # others are of other graphs
            with recording:
                return run()
        if watch and hooks_registered() and (create_graph or any_changed_gradients()):
            run = partial(watched_pass, run, where, below, variables, create_graph=create_graph)
        effects: Any = INSIDE
        if functions:
            leaves = leaves_of_functions(functions)
            effects = side_effects_put_back(leaves, (), where, retain=True, made=variables)
        copied = variables_to_copy_inside(variables, functions)
        of_pass: Any = {"effects": effects, "recording": recording, "cotangents": self.cotangents}
        one = GuardedPass(where, self.path, variables, lambda: below, copied, **of_pass)
        return one.run(lambda *_: run())
