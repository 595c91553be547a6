"""A function's losses, and passes from them: by the engine of eager code, or in a level.

Where no transform of torch.func is around a call, no forward mode is on and nothing traces, `fn`
runs on variables of eager code: it may do all that eager code may, at half of the price of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, ne
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradkit._autograd import engine
from gradkit._checks.eager_graph import refuse_nodes
from gradkit._checks.modified_tensors import refuse_changed_since_saved
from gradkit._checks.recomputations import exact
from gradkit._compat.autograd import autocast_is_on, set_grad_enabled, without_function_modes
from gradkit._compat.transforms import differentiated, engine_calls, is_plain, is_zero, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core.call import Losses
from gradkit._core.graph import PRIVATE, Subgraph, leads_to_others
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.params import Grads, Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import (
    functions_alive,
    hooks_made,
    hooks_registered,
    hooks_since,
    remove_hooks_since,
)
from gradkit._torch_bugs.monitor import OpMonitor
from gradkit.errors import FreedGraphError, UnsupportedGraphError, message
from gradkit.func import _level as levels
from gradkit.func._arguments import Arguments
from gradkit.func._errors import FREED, independent, named_errors
from gradkit.func._outside import Outside

_requires_grad, _is_leaf, _dtype = map(attrgetter, ("requires_grad", "is_leaf", "dtype"))
_FEW = 4
R = TypeVar("R")


def differentiate(
    fn: Callable[..., Any],
    arguments: Arguments,
    kwargs: dict[str, Any],
    run: levels.Run,
    *,
    has_aux: bool,
    create_graph: bool | None,
    scalar: bool = True,
    batched: bool = False,
    per_sample: bool = False,
) -> levels.LevelResult:
    """Call a function, and `run` passes from its losses."""
    if batched or not is_plain() or not adds_up_right(arguments, create_graph):
        options = has_aux, create_graph, scalar, per_sample, batched
        return levels.differentiate_in_level(fn, arguments, kwargs, run, options)
    option = False if create_graph is None and not torch.is_grad_enabled() else create_graph
    monitor = OpMonitor(per_sample=per_sample)
    outside = Outside(fn, [*arguments.given, kwargs], arguments.variables)
    call = _EagerCall(fn, arguments, kwargs, has_aux, option, scalar, monitor, outside)
    return call.run(partial(call.result, run))


def hold(
    fn: Callable[..., Any],
    arguments: Arguments,
    monitor: OpMonitor,
    *,
    has_aux: bool,
    create_graph: bool | None,
    is_linear: bool,
) -> HeldCall:
    """Call a function on variables of eager code, for passes to come."""
    option = False if create_graph is None and not torch.is_grad_enabled() else create_graph
    outside = Outside(fn, arguments.given, arguments.variables)
    call = _EagerCall(fn, arguments, {}, has_aux, option, False, monitor, outside)
    return call.run(partial(call.held, create_graph, is_linear))


def _leave(
    depth: int, own: frozenset[int], made: dict[int, Tensor], outside: Outside, enabled: bool
) -> None:
    outside.is_open = False
    set_grad_enabled(enabled)
    if autocast_is_on():
        torch.clear_autocast_cache()
    engine_calls.own, engine_calls.made = own, made
    if not depth:
        engine_calls.inside.clear()
    engine_calls.depth = depth  # last: it tells that all is done


def own_code() -> AbstractContextManager[object]:
    """Return a block for gradkit's own code around a call of a function."""
    # In a function of eager code, its monitor would see each attribute of a tensor that is read.
    return without_function_modes() if engine_calls.depth and is_plain() else INSIDE


def adds_up_right(arguments: Arguments, create_graph: bool | None) -> bool:
    """Return whether the uses of each variable are added up in its `grad_dtype`."""
    # The uses of a view, which stands for a variable whose graph the results are to be a part of,
    # are added up in its own dtype.
    variables = arguments.variables
    return (
        create_graph is False
        or not any(map(_requires_grad, variables))
        or not any(map(ne, map(_dtype, variables), arguments.dtypes))
    )


def _variables_for(arguments: Arguments, *, cut: bool) -> Tensors:
    """Return variables of eager code; with `cut`, without the graphs of the arguments."""
    given = arguments.variables
    # Views: what else is computed from a tensor is not computed from the variable.
    if any(map(Tensor.is_inference, given)) or not (cut or not any(map(_requires_grad, given))):
        variables = [
            levels.views_of([x])[0]
            if x.requires_grad and not cut
            else (x.clone() if x.is_inference() else x.detach()).requires_grad_()
            for x in given
        ]
    else:
        variables = list(map(Tensor.requires_grad_, map(Tensor.detach, given)))
    if any(map(ne, map(_dtype, variables), arguments.dtypes)):
        for tensor, dtype in zip(variables, arguments.dtypes, strict=True):
            if tensor.dtype != dtype:
                tensor.grad_dtype = dtype  # torch adds up the uses of a leaf in it [B1]
    return variables


@dataclass
class EagerPasses(levels.LevelPasses):
    """Passes of the engine from the losses of one call of a function."""

    losses: Sequence[Tensor] = ()
    runs_users: bool = True  # whether the user's Functions may run in a pass
    kept: bool = False  # whether the results carry a graph
    in_eager_code = True
    own: Collection[int] = ()  # the ids of its leaves: variables, and what the function has made
    _leads_outside: bool | None = None  # whether the losses do; asked once

    def grads(
        self, outputs: Sequence[Tensor], seeds: levels.Seeds, variables: Tensors, *, retain: bool
    ) -> Grads:
        """Return the gradients of a weighted sum of outputs, from one engine pass."""
        is_clean = not (self.runs_users or hooks_registered()) and self.option is not True
        if is_clean and all(map(_requires_grad, outputs)):
            weights = [seed for seed in seeds if seed is not None]
            if not self._keeps(outputs, weights):
                return engine.inner_grads(outputs, variables, weights or None, retain_graph=retain)
        return super().grads(outputs, seeds, variables, retain=retain)

    def depends(self, output: Tensor) -> bool:
        """Return whether an output carries a graph, which may be that of a captured tensor."""
        return output.requires_grad

    def _keeps(self, roots: Sequence[Tensor], weights: Tensors) -> bool:
        if self.option is not None:
            self.kept |= self.option
            return self.option
        if self._leads_outside is None:
            are_leaves = all(map(_is_leaf, self.variables))
            self._leads_outside = not are_leaves or leads_to_others(self.losses, self.own)
            self.is_private = self.is_pull and not self._leads_outside
        keep = self.in_transform or self._leads_outside or any(map(_requires_grad, weights))
        self.kept |= keep
        return keep

    def _looked_at(self, grads: Grads) -> Grads:
        present = [grad for grad in grads if grad is not None and grad.requires_grad]
        if leads_to_others(present, self.own):
            self.kept = True
            return grads
        return [None if grad is None else grad.detach() for grad in grads]


@dataclass
class _EagerCall:
    """One call of a function on variables of eager code."""

    fn: Callable[..., Any]
    arguments: Arguments
    kwargs: dict[str, Any]
    has_aux: bool
    option: bool | None  # create_graph; False where eager code records nothing
    scalar: bool
    monitor: OpMonitor
    outside: Outside
    first_hook: int = 0  # the number that the handle of its first hook has, if it registers one

    def run(self, finish: Callable[[Losses, PyTree, EagerPasses], R]) -> R:
        """Call the function; return what follows from its losses, its aux, and passes from them."""

        def opened() -> R:
            arguments = self.arguments
            variables = _variables_for(arguments, cut=self.option is False)
            made, self.first_hook = hooks_made(), RemovableHandle.next_id
            engine_calls.own = engine_calls.own.union(map(id, filter(_is_leaf, variables)))
            args = arguments.args_with(variables)
            returned = exact(partial(self.monitor.run, self.outside, self.fn, args, self.kwargs))
            hooked = hooks_made() > made
            losses, aux = levels.read_returned(returned, has_aux=self.has_aux, scalar=self.scalar)
            alive = functions_alive()
            facts = self.option, False, self.option is not False, variables, 0, hooked
            own = {*map(id, filter(_is_leaf, variables)), *engine_calls.made}
            of_losses: Any = {"losses": losses.leaves, "runs_users": alive.users, "own": own}
            passes = EagerPasses(self.monitor, arguments.path, *facts, **of_losses)
            if alive.refused:
                refuse_nodes(Subgraph(losses.leaves).kinds, "the loss")
            return finish(losses, aux, passes)

        before = engine_calls.depth
        leave = partial(_leave, before, engine_calls.own, engine_calls.made, self.outside)
        with leave_inference_mode(record=True), INSIDE:
            enabled = torch.is_grad_enabled()
            try:
                try:
                    engine_calls.depth, engine_calls.made = before + 1, {}
                    set_grad_enabled(True)
                    return named_errors(opened)
                finally:
                    leave(enabled)
            finally:  # again, as `undone` does it: an interrupt may have come in between
                if engine_calls.depth > before:
                    leave(enabled)

    def held(
        self,
        create_graph: bool | None,
        is_linear: bool,
        outputs: Losses,
        aux: PyTree,
        passes: EagerPasses,
    ) -> HeldCall:
        """Return the outputs, and what runs passes from them; those of a linear map may be zero."""
        for variable in filter(_is_leaf, passes.variables):
            setattr(variable, PRIVATE, True)
        # The leaves that the function has made stay alive, so that their ids are no one else's.
        passes.is_pull, passes.own = True, dict(engine_calls.made)
        constants = [x for x in outputs.leaves if not x.requires_grad]
        if not is_linear or not all(map(is_zero, constants)):
            passes.refuse_unreached(outputs)
        tensors_of_aux, put_aux_back = levels.partition_aux(aux, self.has_aux)
        values = [*outputs.leaves, *tensors_of_aux]
        if self.option is False:
            values = levels.detached(values)
        else:
            values = _without_own_graphs(passes, values, [])[0]
            is_hooked = passes.hooked and any(map(_requires_grad, values))
            if is_hooked and hooks_since(Subgraph(values).nodes, self.first_hook):
                raise UnsupportedGraphError(message("fn", *_HOOKS_OF_NODES))
        count = len(outputs.leaves)
        values = list(map(Tensor.clone, values))
        values, aux = values[:count], put_aux_back(values[count:])
        return HeldCall(passes, outputs, values, aux, create_graph, self.outside)

    def result(
        self, run: levels.Run, losses: Losses, aux: PyTree, passes: EagerPasses
    ) -> levels.LevelResult:
        """Return the results of passes, which carry a graph where they are to."""
        variables, dtypes = passes.variables, self.arguments.dtypes
        if not any(map(_requires_grad, losses.leaves)):
            raise independent(losses.first_paths())
        grads = run(losses, passes)
        if all(grad is None for part in grads for grad in part):
            passes.refuse_unreached(losses)
        values, put_aux_back = losses.leaves, None
        if self.has_aux:
            tensors_of_aux, put_aux_back = levels.partition_aux(aux)
            values = [*values, *tensors_of_aux]
            if self.option is None:  # which may depend on other tensors than the losses do
                passes.kept |= leads_to_others(tensors_of_aux, passes.own)
        if passes.hooked:  # Those of nodes would run again in a pass through the gradients.
            remove_hooks_since(Subgraph(values).nodes, self.first_hook)
        count = len(losses.leaves)
        if passes.kept:
            values, grads = _without_own_graphs(passes, values, grads)
            for variable in filter(_is_leaf, variables):
                variable.requires_grad_(False)  # no later pass accumulates there
        else:
            values = levels.detached(values)
        if put_aux_back is not None:
            aux = put_aux_back(values[count:])
        values = list(map(Tensor.clone, values[:count]))
        if any(map(ne, map(_dtype, variables), dtypes)):
            every = len(dtypes)
            grads = [levels.cast_to(dtypes, part) if len(part) == every else part for part in grads]
        return levels.LevelResult(
            values, losses.spec, grads, aux, passes.refused, is_plain=not passes.kept
        )


@dataclass
class HeldCall:
    """The outputs of a function's call on variables of eager code, and passes from them."""

    passes: EagerPasses
    outputs: Losses
    values: Tensors  # copies of the outputs
    aux: PyTree
    create_graph: bool | None  # as the caller has it
    outside: Outside
    saved = ()  # nothing to compare before a pass: the engine raises if a saved tensor has changed

    def pulled(self, seeds: Sequence[Tensor]) -> tuple[Grads, str | None]:
        """Return the gradients of a backward pass, and why their derivative would be wrong."""
        option = self.create_graph if torch.is_grad_enabled() else False
        in_transform = bool(transforms())
        # In a function of eager code, its variables tell that its derivative is to be taken.
        is_seen = bool(engine_calls.depth) and any(map(_requires_grad, seeds))
        facts: Any = {"option": option, "in_transform": differentiated() or is_seen}
        passes, outputs = replace(self.passes, **facts), self.outputs.leaves
        if in_transform:
            passes.monitor.check()
        hooks = self.outside.pulled() if passes.hooked else INSIDE
        try:
            with hooks:
                grads = passes.grads(outputs, seeds, passes.variables, retain=True)
        except RuntimeError as error:
            if FREED in str(error):
                raise FreedGraphError(message("fn", *_FREED_BY_CALLER)) from error
            refuse_changed_since_saved(Subgraph(outputs).nodes, error)
            raise
        if passes.kept and not in_transform:
            grads = _without_own_graphs(passes, [], [grads])[1][0]
        if option is False and in_transform:
            grads = [None if grad is None else grad.detach() for grad in grads]
        return grads, passes.refused


_HOOKS_OF_NODES = (
    "outputs whose graph has no hooks of the function's, which a pass through them would run",
    "hooks on nodes, or on a module",
    "pass create_graph=False; or register a hook of the tensor: y.register_hook(hook)",
)
_FREED_BY_CALLER = (
    "a graph that still holds its saved tensors",
    "one that a pass through the outputs, or through an earlier result, has freed",
    "pull first; or .backward(retain_graph=True), where create_graph=False has not cut the results",
)


def _without_own_graphs(
    passes: EagerPasses, values: Sequence[Tensor], grads: list[Grads]
) -> tuple[Tensors, list[Grads]]:
    """Return results of which each that leads to variables of the call alone has no graph."""
    if not (passes.own or passes.is_pull):
        return list(values), grads
    every = [*values, *(grad for part in grads for grad in part if grad is not None)]
    leading: set[Any] | None = None
    if len(every) > _FEW:  # a walk for each would be quadratic
        below = Subgraph(every)
        others = [x for k, x in below.leaves.items() if x.requires_grad and k not in passes.own]
        others = [x for x in others if not hasattr(x, PRIVATE)]
        leading = below.leading_to(others)

    def cut(tensor: Tensor) -> Tensor:
        if leading is None or tensor.grad_fn is None:
            is_kept = leads_to_others([tensor], passes.own)
        else:
            is_kept = tensor.grad_fn in leading
        return tensor if is_kept else tensor.detach()

    cut_grads = [[None if grad is None else cut(grad) for grad in part] for part in grads]
    return list(map(cut, values)), cut_grads
