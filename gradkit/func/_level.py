"""One level of torch.func: a function's losses, passes from them, and the errors of torch.func.

The passes run inside the level, where a pass can start from one loss: from outside, as the function
that `torch.func.vjp` returns, the others would need zero cotangents, and 0 * inf is nan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd import engine
from gradkit._autograd.guarded_pass import InnerPass
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._checks.modified_tensors import saved_versions
from gradkit._compat import transforms as torch_func
from gradkit._compat.autograd import tentative_passes
from gradkit._compat.dynamo import functions_traced, inlined_function
from gradkit._compat.transforms import (
    TensorLists,
    differentiated,
    is_zero,
    level_of,
    recording_levels,
    transforms,
)
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Losses, read_losses, read_weights
from gradkit._core.graph import Subgraph
from gradkit._core.ownership import PLAIN_TYPES, leave_inference_mode
from gradkit._core.params import Grads, Tensors
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.user_code import functions_alive, hooks_made, user_code_may_run, user_functions
from gradkit._torch_bugs.monitor import OpMonitor, active_monitors
from gradkit.errors import LeafTypeError, StructureError, UnsupportedGraphError, describe, message
from gradkit.func._arguments import Arguments, copied
from gradkit.func._errors import independent, named_errors
from gradkit.func._vmap_or_loop import BatchableOps

Seeds: TypeAlias = Sequence[Tensor | None]
_CONSTANTS = (str, bytes, Number, Enum, torch.dtype, torch.device, torch.Size, torch.layout)


@dataclass
class LevelPasses:
    """Passes from the losses of one call of a function, which run inside its level."""

    monitor: OpMonitor  # what is known of the operations of the function
    path: Callable[[int], str]  # of a variable, as the caller would write it
    option: bool | None  # create_graph. False: no graph. True: a wrong derivative raises at once
    in_transform: bool  # a transform around the level differentiates its results
    eager: bool  # eager code records what it computes
    variables: Tensors  # the level's tensors to differentiate with respect to
    level: int | None  # its number; None while torch.compile traces, which cannot tell
    hooked: bool = False  # fn has registered hooks, which may use tensors that its losses do not
    refused: str | None = None  # why a derivative that eager code may take would be wrong
    create_graph: bool = True  # jacobian reads it, and stacks gradients; not the caller's option
    is_pull: bool = False  # the passes follow the call, and are linear in their cotangents
    is_private: bool = False  # nobody else differentiates by what the outputs depend on
    in_eager_code = False

    def depends(self, output: Tensor) -> bool:
        """Return whether an output was computed from the variables; True while tracing."""
        # A tensor from outside may require grad, too, with a graph outside of the level.
        return self.level is None or (output.requires_grad and level_of(output) == self.level)

    def refuse_unreached(self, losses: Losses) -> None:
        """Raise if no path leads from a loss to a variable."""
        # A parameter that fn makes requires grad in its level, too, and leads nowhere.
        below = Subgraph(list(filter(self.depends, losses.leaves)))
        if not any(map(below.reaches, self.variables)):
            raise independent(losses.first_paths())

    def grads(
        self, outputs: Sequence[Tensor], seeds: Seeds, variables: Tensors, *, retain: bool
    ) -> Grads:
        """Return the gradients of a weighted sum of outputs, from one engine pass."""
        if self.level is None:  # a trace has no graph to look at
            weights, keep = [seed for seed in seeds if seed is not None], self.option is True
            options: Any = {"create_graph": keep, "retain_graph": retain or keep}
            return engine.inner_grads(outputs, variables, weights or None, **options)
        pairs = [p for p in zip(outputs, seeds, strict=True) if self.depends(p[0])]
        roots, cotangents = [output for output, _ in pairs], [seed for _, seed in pairs]

        weights = [seed for seed in cotangents if seed is not None]

        def run(create: bool, edges: Sequence[Any] = (), keep: bool = False) -> Grads:
            # A pass with a graph may be refused, and run again without.
            keep |= retain | create
            given = roots, [*variables, *edges], weights or None
            return engine.inner_grads(*given, create_graph=create, retain_graph=keep)

        return self.run_pass(run, roots, weights, variables)

    def run_pass(
        self, run: Callable[..., Grads], roots: Tensors, weights: Tensors, variables: Tensors
    ) -> Grads:
        """Return the gradients of the pass `run(create_graph)`: a graph, where one is asked for."""
        keep = self._keeps(roots, weights)
        below = Subgraph(roots)
        inner = InnerPass("the loss", self.path, variables, below, weights)
        watch = self.in_eager_code or not self.is_pull  # that of torch.func shows no edges
        if not keep and self._may_reach_outside(below):
            with tentative_passes():
                grads = inner.guarded(partial(run, True), create_graph=False, watch=watch)
            return self._looked_at(grads)
        if keep:
            keep = self._check_derivative(below, variables)
        try:
            return inner.guarded(partial(run, keep), create_graph=keep, watch=watch)
        except UnsupportedGraphError as error:
            if not keep or self.option or self.in_transform:
                raise
            self.refused = str(error)
        return inner.guarded(partial(run, False), create_graph=False, watch=watch)

    def _keeps(self, roots: Sequence[Tensor], weights: Tensors) -> bool:
        """Return whether the gradients of a pass from these are to carry a graph."""
        # A transform around would take gradients without a graph for constants.
        if self.option is not None:
            return self.option
        # Level 0 is eager code, around all transforms.
        return self.in_transform or any(0 in recording_levels(x) for x in (*roots, *weights))

    def _looked_at(self, grads: Grads) -> Grads:
        """Return gradients whose graph may lead outside, though that of the losses does not."""
        return grads

    def _may_reach_outside(self, below: Subgraph) -> bool:
        """Return whether code of the user's in the pass may use tensors that the losses do not."""
        if self.option is not None or not self.eager:
            return False
        return self.hooked or (functions_alive().users and bool(user_functions(below.kinds)))

    def _check_derivative(self, below: Subgraph, variables: Tensors) -> bool:
        """Return whether a pass may record its graph; a derivative to come may be refused."""
        around = set().union(*map(recording_levels, below.roots))
        is_eager = 0 in around and not self.is_private
        # Gradients are linear in weights, and in the cotangents of a vjp, whose level has ended.
        is_seen = self.in_transform and (
            not self.is_pull
            or max(around, default=0) > 0
            or any(map(torch_func.carries_tangent, below.roots))
        )
        linear = not (is_eager or is_seen or self.option)
        check = partial(refuse_wrong_derivative, lambda: "the loss", variables, below)
        if is_eager and self.in_transform and not (is_seen or self.option):
            self.allows(check)  # eager code alone may take the derivative by the variables
            linear = True
        keep = self.allows(partial(check, linear=linear), may_differentiate=self.in_transform)
        if keep and is_eager and not active_monitors():  # one around a call sees all that is in it
            self.allows(lambda: self.monitor.check_derivative(below))
        return keep

    def allows(self, check: Callable[[], None], *, may_differentiate: bool = False) -> bool:
        """Run `check`, which raises for a wrong derivative; return whether none was refused."""
        try:
            check()
        except UnsupportedGraphError as error:
            if may_differentiate or self.option:
                raise
            self.refused = str(error)
            return False
        return True

    def batched_grads(self, output: Tensor, seeds: Tensor, variables: Tensors) -> Grads:
        """Return stacked gradients for a batch of cotangents, from one vmapped pass."""
        one = partial(self.grads, [output], variables=variables, retain=True)
        return engine.vmapped_grads(lambda seed: (one([seed]), []), seeds)[0]


Run: TypeAlias = Callable[[Losses, LevelPasses], list[Grads]]


class LevelResult(NamedTuple):
    """The results of a level."""

    values: Tensors  # the losses
    spec: Structure  # of the losses
    grads: list[Grads]  # the lists asked for, often one for each variable
    aux: PyTree
    refused: str | None  # why a derivative of the results would be wrong
    is_plain: bool = False  # nothing of it carries a graph, and no transform is around


def differentiate_in_level(
    fn: Callable[..., Any], arguments: Arguments, kwargs: dict[str, Any], run: Run, options: Any
) -> LevelResult:
    """Call a function in a new level, and `run` passes from its losses."""
    has_aux, create_graph, scalar, per_sample, batched = options  # as of `differentiate`
    in_transform, eager = differentiated(), torch.is_grad_enabled()
    cut, enabled = cut_of(create_graph)
    is_traced = torch.compiler.is_compiling()
    option = cut is list and (create_graph or is_traced or None)
    # Under vmap, or the loop in its place, what fn writes on a tensor from outside stays with its
    # sample. torch.compile cannot ask for the memory of a tensor.
    ops = BatchableOps() if batched and not is_traced else None
    monitor = OpMonitor(per_sample=per_sample, writes=ops)
    outside: list[Any] = []

    def inside(tensors: Sequence[Tensor], level: int | None = None) -> TensorLists:
        made = 0 if level is None else hooks_made()
        if level is not None and [tensor.dtype for tensor in tensors] != arguments.dtypes:
            for tensor, dtype in zip(tensors, arguments.dtypes, strict=True):
                if tensor.dtype != dtype:
                    tensor.grad_dtype = dtype  # torch adds up the uses of a leaf in it [B1]
        with monitor.noting():
            returned = fn(*arguments.args_with(tensors), **kwargs)
            if ops is not None:
                returned = ops.values(returned)
            hooked = level is not None and hooks_made() > made
            losses, aux = read_returned(returned, has_aux=has_aux, scalar=scalar)
        facts = option, in_transform, eager, list(tensors), level, hooked
        passes = LevelPasses(monitor, arguments.path, *facts)
        if not any(map(passes.depends, losses.leaves)):
            raise independent(losses.first_paths())
        if monitor.is_nested and level is not None:
            monitor.note_graph(Subgraph(list(filter(passes.depends, losses.leaves))))
        monitor.check()
        grads = run(losses, passes)
        if level is not None and all(grad is None for part in grads for grad in part):
            passes.refuse_unreached(losses)
        tensors_of_aux, put_aux_back = partition_aux(aux, has_aux)
        outside.extend((losses.spec, put_aux_back, passes.refused))
        return [losses.leaves, tensors_of_aux, *grads]

    enter: Any = torch_func.trace_in_level if is_traced else torch_func.run_in_level
    with leave_inference_mode(record=True), enabled, INSIDE:
        point = cut(arguments.variables)
        values, tensors_of_aux, *grads = named_errors(lambda: enter(inside, point))
        values, tensors_of_aux = copied(cut(values)), cut(tensors_of_aux)
    spec, put_aux_back, refused = outside
    if not is_traced:
        dtypes = arguments.dtypes
        grads = [cast_to(dtypes, part) if len(part) == len(dtypes) else part for part in grads]
    return LevelResult(values, spec, grads, put_aux_back(tensors_of_aux), refused)


@dataclass
class LevelCall:
    """A call of a function in a level of torch.func.vjp or jvp, and passes from its outputs."""

    fn: Callable[..., Any]
    arguments: Arguments
    monitor: OpMonitor
    has_aux: bool
    create_graph: bool | None
    transposed: bool  # the pass that follows is a backward pass
    is_linear: bool = False  # an output that does not depend on the variables is zero
    variables: Tensors = field(init=False)
    has_user_code: bool = field(init=False)  # hooks; while torch.compile traces, a Function
    outputs: Losses = field(init=False)
    put_aux_back: Callable[[Iterable[Tensor]], PyTree] = field(init=False)
    values: Tensors = field(init=False)  # copies of the outputs
    aux: PyTree = field(init=False)
    saved: list[Any] = field(init=False)  # by the graph of the level

    def hold(self) -> None:
        """Call the function in a level of torch.func, for passes to come."""
        cut, enabled = cut_of(self.create_graph)
        with leave_inference_mode(record=True), enabled, INSIDE:
            # This, and `pulled`, are torch.func.vjp without its trees.
            is_traced, point = torch.compiler.is_compiling(), cut(self.arguments.variables)
            enter: Any = torch_func.trace_in_level if is_traced else torch_func.run_in_level
            outputs, aux = named_errors(lambda: enter(lambda tensors, *_: self(*tensors), point))
            self.values, aux = copied(cut(outputs)), copied(cut(aux))
        self.aux = self.put_aux_back(aux)
        self.saved = [] if is_traced or transforms() else saved_versions(self.outputs.leaves)

    def __call__(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Tensors]:
        is_traced = torch.compiler.is_compiling()
        if self.transposed and not is_traced and user_code_may_run():
            # Views, whose nodes are still there when the pass runs, after the level has ended.
            tensors = views_of(tensors)
        count = functions_traced if is_traced else hooks_made
        made = count()
        with self.monitor.noting():
            returned = self.fn(*self.arguments.args_with(tensors))
        self.monitor.check_traced()
        self.has_user_code = count() > made
        self.outputs, aux = read_returned(returned, has_aux=self.has_aux, scalar=False)
        self.variables = list(tensors)
        if self.transposed and not is_traced:
            passes = self.passes(None, level_of(tensors[0]))
            constants = [x for x in self.outputs.leaves if not passes.depends(x)]
            if not self.is_linear or not all(map(is_zero, constants)):
                passes.refuse_unreached(self.outputs)
        tensors_of_aux, self.put_aux_back = partition_aux(aux, self.has_aux)
        return tuple(self.outputs.leaves), tensors_of_aux

    def passes(
        self, create_graph: bool | None, level: int | None, *, is_pull: bool = False
    ) -> LevelPasses:
        """Return what runs passes from the outputs: inside of the level, or after it has ended."""
        facts = create_graph, differentiated(), torch.is_grad_enabled(), self.variables, level
        of_run = self.monitor, self.arguments.path, *facts, self.has_user_code
        return LevelPasses(*of_run, is_pull=is_pull)

    def pulled(self, seeds: Sequence[Tensor]) -> tuple[Grads, str | None]:
        """Return the gradients of a backward pass, and why their derivative would be wrong."""

        def run(create: bool) -> Grads:
            cut = detached if self.create_graph is False else detached_but_tangents
            given, keep = (self.outputs.leaves, self.variables, seeds), torch.is_grad_enabled()
            grads = torch_func.autograd_grad(*given, retain_graph=True, create_graph=keep)
            return [*(list if create else cut)(grads)]

        if torch.compiler.is_compiling():
            if self.has_user_code and transforms():  # compiled, its second derivative would be 0
                raise UnsupportedGraphError(inlined_function())
            return run(self.create_graph is not False), None
        self.monitor.check()
        passes = self.passes(self.create_graph, 0, is_pull=True)
        roots = [output for output in self.outputs.leaves if output.grad_fn is not None]
        return passes.run_pass(run, roots, list(seeds), self.variables), passes.refused


Cut: TypeAlias = Callable[[Iterable[Tensor]], Tensors]


def views_of(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return views of the tensors of a level, and copies of sparse ones: torch views none."""
    return tuple(x.view_as(x) if x.layout == torch.strided else x.clone() for x in tensors)


def cut_of(create_graph: bool | None) -> tuple[Cut, AbstractContextManager[object]]:
    """Return what cuts a call's tensors from their graphs, or `list`; and what it runs under."""
    # Detached, and not under no_grad: below a level of torch.func, operators would take that for
    # inference (the LSTM of the CPU keeps nothing for its backward pass then).
    if create_graph is False:
        return detached, torch.enable_grad()
    if create_graph or torch.is_grad_enabled() or differentiated():
        return list, INSIDE
    return detached_but_tangents, torch.enable_grad()


def detached(tensors: Iterable[Tensor]) -> Tensors:
    """Return tensors without a graph."""
    return list(map(Tensor.detach, tensors))


def detached_but_tangents(tensors: Iterable[Tensor]) -> Tensors:
    """Return tensors without a graph, with the tangents that forward mode around them gives."""
    detach = Tensor.detach if torch.compiler.is_compiling() else torch_func.detach_keep_tangent
    return list(map(detach, tensors))


def gradient_of_the_sum(
    losses: Losses, passes: LevelPasses, *, weights: PyTree = None, may_be_aux: bool
) -> list[Grads]:
    """Run one pass from all losses together, with weights; a `run` for `differentiate`."""
    is_pair = losses.spec.type is tuple and losses.spec.num_children == 2
    if may_be_aux and weights is None and is_pair:
        # Summed, a metric in it would change the gradient silently.
        expected = "one loss, or several that are meant to be summed"
        fix = "if the second is no loss, return the first alone, or pass has_aux=True to a call "
        fix += "that takes it; if both are losses, return a list of them"
        got = "a tuple of two, which may be (loss, aux)"
        raise StructureError(message("fn", expected, got, fix))
    seeds: Grads = [None] * len(losses.leaves)
    given = None if weights is None else read_weights(weights, losses)
    for index, weight in enumerate(given or ()):
        loss = losses.leaves[index]
        if isinstance(weight, Tensor):  # a copy: a gradient may be its cotangent itself
            seeds[index] = weight.reshape(loss.shape).to(loss).clone()
        else:
            seeds[index] = torch.full_like(loss, float(weight))
    return [passes.grads(losses.leaves, seeds, passes.variables, retain=False)]


def cast_to(dtypes: Sequence[torch.dtype], grads: Sequence[Tensor | None]) -> Grads:
    """Return gradients in these dtypes."""
    return [
        grad if grad is None or grad.dtype == dtype else grad.to(dtype)
        for grad, dtype in zip(grads, dtypes, strict=True)
    ]


def read_returned(
    returned: Any, *, has_aux: bool, scalar: bool, where: str = "fn", loss: str = "losses"
) -> tuple[Losses, PyTree]:
    """Check the losses that a function has returned, and split off its aux."""
    tree, aux = returned, None
    if has_aux:
        tree, aux = parts_of(returned, where, (loss, "aux"), ", with has_aux=True")
    return read_losses(tree, scalar=scalar, returned=True, may_be_aux=not has_aux), aux


def parts_of(returned: Any, where: str, names: Sequence[str], why: str = "") -> tuple[Any, ...]:
    """Return what a function of the caller's has returned, if it is a tuple of these parts."""
    if not isinstance(returned, tuple) or len(returned) != len(names):
        listed = ", ".join(names)
        expected, fix = f"({listed}){why}", f"return {listed}"
        raise StructureError(message(where, expected, describe(returned), fix))
    return returned


def require_tensor_or_constant(leaf: object, where: Callable[[], str], fix: str) -> None:
    """Raise for a leaf that may be a container of tensors, which optree does not know."""
    if leaf is None or isinstance(leaf, (Tensor, *_CONSTANTS)) or callable(leaf):
        return
    expected = "a tensor, or a constant: a number, text, a function, a module"
    got = f"{describe(leaf)}, which is no tree that optree knows"
    raise LeafTypeError(message(where(), expected, got, fix))


def partition_aux(
    aux: PyTree, has_aux: bool = True
) -> tuple[Tensors, Callable[[Iterable[Tensor]], PyTree]]:
    """Do as `partition_tensors`; raise if a leaf is neither a tensor nor a constant."""
    if not has_aux:
        return [], lambda _: None
    leaves, spec = pytree.flatten(aux)
    fix = "return a dict; or register the class: optree.register_pytree_node"
    for index, leaf in enumerate(leaves):
        if type(leaf) not in PLAIN_TYPES:
            require_tensor_or_constant(leaf, partial(pytree.path, spec, index, "aux"), fix)
    return pytree.partition_tensors(aux)
