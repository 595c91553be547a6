"""A step of an inner loop, as a function of all that it reads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd.double_backward import holds_formulas
from gradkit._autograd.engine import inner_grads
from gradkit._autograd.passes import InnerPass
from gradkit._checks import eager_graph, recomputations
from gradkit._checks.checked import ForwardMonitor
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._compat.transforms import transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Losses
from gradkit._core.graph import Subgraph, edge
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import with_refused_derivatives
from gradkit._core.user_code import functions_alive, hooks_made, hooks_registered, user_functions
from gradkit._state.rerun import recording_writes, what_first_run_made
from gradkit.errors import (
    OptionError,
    UnreachedParamError,
    UnsupportedGraphError,
    describe,
    message,
)
from gradkit.func import _make_functional as checkpoints
from gradkit.func._differentiate import LevelPasses, differentiate
from gradkit.meta._builtin_optimizers import is_own_rule
from gradkit.meta._optimizer import Optimizer, StateLists, Tensors, check_grads, update
from gradkit.meta._trees import InnerParams, read_loss, read_loss_and_buffers


@dataclass(frozen=True)
class GradTransform:
    """A function of `(grads)`, or of `(grads, outer, state)`: a learned optimizer."""

    fn: Callable[..., PyTree]
    is_learned: bool

    def __call__(
        self, params: InnerParams, grads: list[Tensor | None], outer: PyTree, state: StateLists
    ) -> list[Any]:
        """Return the changed gradients of the variables."""
        root = "grad_transform(grads)"

        def tree(values: list[Any]) -> PyTree:
            return pytree.unflatten(params.spec, params.per_leaf(values))

        states = {name: tree(column) for name, column in state.items()} if self.is_learned else {}
        more = (outer, states) if self.is_learned else ()
        leaves = pytree.flatten_up_to(params.spec, "params", self.fn(tree(grads), *more), root)
        pairs = zip(params.slots, leaves, strict=True)
        movable = [None if slot is None else leaf for slot, leaf in pairs]
        check_grads(params.leaves, movable, params.spec, root)
        return params.per_variable(movable)


def read_grad_transform(fn: Callable[..., PyTree] | None) -> GradTransform | None:
    """Read how many arguments the function takes, one or three."""
    if fn is None:
        return None
    fits = [count for count in (1, 3) if callable(fn) and _takes(fn, count)]
    if len(fits) != 1:
        got = describe(fn) if not callable(fn) else f"one that takes {_signature(fn)}"
        expected = "a function that takes (grads), or one that takes (grads, outer, state)"
        fix = "grad_transform=lambda grads: fn(grads), or lambda grads, outer, state: ..."
        raise OptionError(message("grad_transform", expected, got, fix))
    return GradTransform(fn, fits == [3])


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with this many arguments."""
    signature = _signature(fn)
    if signature is None:
        return count == 1  # a function of C, such as torch.sign
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except ValueError:
        return None


def refuse_captured(
    where: str, below: Subgraph, inputs: Iterable[Tensor], made: Callable[[Tensor], bool]
) -> None:
    """Raise if a graph ends at a leaf that is no input, and that outlives the run."""
    # A leaf that an operator of the run has made, and that nothing but the graph refers to now.
    ids, alone = set(map(id, inputs)), _references_of_lone_leaf()
    references = _references(below)
    if any(
        leaf.requires_grad and key not in ids and not (made(leaf) and references[key] <= alone)
        for key, leaf in below.leaves.items()
    ):
        expected, fix = _ADVICE[where]
        got = "one that uses a tensor from outside that requires grad: its gradient would be lost"
        fix += (
            "; if it makes the tensor itself, by x.detach().requires_grad_(), not nn.Parameter(x)"
        )
        raise UnsupportedGraphError(message(where, expected, got, fix))


def _references(below: Subgraph) -> dict[int, int]:
    return {key: sys.getrefcount(leaf) for key, leaf in below.leaves.items()}


@cache
def _references_of_lone_leaf() -> int:
    """Return how many references there are to a leaf that only its graph holds."""
    with torch.enable_grad(), INSIDE:
        (count,) = _references(Subgraph([torch.ones((), requires_grad=True) * 1])).values()
    return count


_ADVICE = {
    "loss_fn": (
        "a function of its arguments, where its steps are recomputed",
        'pass it in outer, not inside a module: unroll(..., outer={"name": tensor}), which '
        'grad_transform(grads, outer, state) gets, too; or memory="store"',
    ),
    "inner_loss": (
        "a function of its arguments",
        'pass it in outer, not inside a module: find(params, {"name": tensor})',
    ),
}


def runs_user_code(below: Subgraph, hooks: int) -> bool:
    """Return whether a pass may run a Function or hook; `hooks` were made before the run."""
    return hooks_made() != hooks or bool(user_functions(below.kinds))


Grads = list[Tensor | None]
InnerGrads: TypeAlias = tuple[Tensor, Grads, PyTree]  # the loss, its gradients, the aux
# The loss and aux of a tree of params.
LossOfParams = Callable[[PyTree], tuple[Tensor, PyTree]]


class Carry(NamedTuple):
    """What each step passes to the next: the variables, the optimizer's state of each, buffers."""

    tensors: list[Tensor]
    state: StateLists
    buffers: PyTree  # None, or what the loss returns besides, for the next step


class StepInputs(NamedTuple):
    """What steps read besides the carry: outer variables, hyper-parameters, a batch a step."""

    outer: PyTree
    hyper: dict[str, Any]
    batches: list[PyTree]


class StepOutputs(NamedTuple):
    """The carry after some steps, and the 0-dim loss and the aux of each."""

    carry: Carry
    losses: list[Tensor]
    aux: list[PyTree]
    between: list[Tensors]  # the variables after each step but the last, if asked for


Steps: TypeAlias = Callable[..., StepOutputs]  # run some: (carry, inputs, *, create_graph)


@dataclass(frozen=True)
class InnerStep:
    """A step of an optimizer on an inner loss."""

    loss_fn: Callable[..., Any]
    params: InnerParams
    opt: Optimizer
    grad_transform: GradTransform | None
    first_order: bool
    has_buffers: bool
    has_aux: bool

    def __call__(self, carry: Carry, inputs: StepInputs, *, create_graph: bool) -> StepOutputs:
        """Run the step of a single batch; the loss carries the graph of its computation."""
        (batch,) = inputs.batches
        # Clones: the loss may write to them, as batch norm does.
        buffers = pytree.map_tensors(Tensor.clone, carry.buffers) if self.has_buffers else None

        def loss_fn(params: PyTree) -> tuple[Tensor, PyTree]:
            if not self.has_buffers:
                returned = self.loss_fn(params, inputs.outer, batch)
                return read_loss(returned, "loss_fn", has_aux=self.has_aux)
            returned = self.loss_fn(params, buffers, inputs.outer, batch)
            return read_loss_and_buffers(returned, carry.buffers, has_aux=self.has_aux)

        if transforms():
            out = self._functional(loss_fn, carry.tensors, create_graph=create_graph)
        else:
            constants = partial(pytree.tensors, (inputs.outer, batch, buffers))
            out = self._eager(loss_fn, carry.tensors, constants, create_graph=create_graph)
        loss, grads, aux = out
        if self.has_buffers:
            buffers, aux = aux
        if self.grad_transform is not None:
            with recording_writes(), ForwardMonitor():
                grads = self.grad_transform(self.params, grads, inputs.outer, carry.state)
        with ExitStack() as stack:
            if not is_own_rule(self.opt):
                stack.enter_context(recording_writes())
                stack.enter_context(ForwardMonitor())
            new = update(self.opt, carry.tensors, grads, carry.state, inputs.hyper)
        return StepOutputs(Carry(*new, buffers), [loss], [aux], [])

    def _eager(
        self,
        loss_fn: LossOfParams,
        tensors: Tensors,
        constants: Callable[[], Tensors],
        *,
        create_graph: bool,
    ) -> InnerGrads:
        twice = create_graph and not self.first_order  # whether the gradients get a graph, too
        with torch.enable_grad(), INSIDE:
            # Views: what outer variables or batches share with params is not params.
            variables = [
                t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors
            ]
            before, hooks = checkpoints.before(variables), hooks_made()
            with recording_writes(), ForwardMonitor():
                loss, aux = loss_fn(self.params.tree(variables))
            recomputations.refuse((loss, aux), before)
            below = _check_graph(loss, variables, create_graph=twice)
            run = partial(
                inner_grads, [loss], variables, create_graph=twice, retain_graph=create_graph
            )
            if below is None:
                grads = run()
            else:
                one = InnerPass("the inner loss", self.params.path, variables, below)
                made = None if twice or self.first_order else what_first_run_made()
                if made is not None and runs_user_code(below, hooks):
                    inputs = [*variables, *constants()]
                    grads = _first_pass_of_two(one, loss, inputs, made)
                else:
                    with recording_writes():
                        grads = one.guarded(run, create_graph=twice)
        if all(grad is None for grad in grads):
            expected = "a loss computed from params"
            got = "one that does not depend on them: loss_fn uses a module, or tensors, from "
            got += "outside; or a checkpoint with use_reentrant=True cuts the path"
            fix = "compute it from loss_fn's own argument: call, params, buffers = "
            fix += "gradkit.func.make_functional(module)"
            raise UnreachedParamError(message("the inner loss", expected, got, fix))
        return loss, grads, aux

    def _functional(
        self, loss_fn: LossOfParams, tensors: Tensors, *, create_graph: bool
    ) -> InnerGrads:
        def run(losses: Losses, passes: LevelPasses) -> list[Grads]:
            variables = passes.variables
            return [passes.grads(losses.leaves, [None], variables, retain=create_graph)]

        arguments = self.params.arguments.at((self.params.tree(tensors),))
        option = None if create_graph else False
        out = differentiate(loss_fn, arguments, {}, run, has_aux=True, create_graph=option)
        grads = out.grads[0]
        if self.first_order:
            grads = [grad if grad is None else grad.detach() for grad in grads]
        elif out.refused is not None:
            grads = with_refused_derivatives(grads, out.values, out.refused)
        return out.values[0], grads, out.aux


def _first_pass_of_two(
    one: InnerPass, loss: Tensor, inputs: Tensors, made: Callable[[Tensor], bool]
) -> Grads:
    """Return constant gradients; raise if their graph, which the second run makes, ends outside."""
    run = partial(inner_grads, [loss], one.variables, create_graph=True)
    with recording_writes():
        grads = one.guarded(run, create_graph=True)
    stop = {edge(x).node for x in inputs if x.requires_grad}
    below = Subgraph([grad for grad in grads if grad is not None], stop=stop)
    refuse_captured("loss_fn", below, inputs, made)
    return [grad if grad is None else grad.detach() for grad in grads]


def _check_graph(loss: Tensor, variables: list[Tensor], *, create_graph: bool) -> Subgraph | None:
    """Check the graph of a step, and return it if its pass is to be guarded."""
    alive = functions_alive()
    if not loss.requires_grad or not (create_graph or any(alive) or hooks_registered()):
        return None
    # Only this step: a walk through all steps before it would make the loop quadratic.
    nodes = [tensor.grad_fn or edge(tensor).node for tensor in variables]
    below = Subgraph([loss], stop=set(nodes))
    if alive.refused:
        eager_graph.refuse_nodes(map(type, below.nodes.difference(below.stop)), "the inner loss")
    if create_graph:
        refuse_wrong_derivative(lambda: "the inner loss", variables, below, by_formula=True)
    # Those that are alive may be the steps before this one.
    runs_user_code = hooks_registered() or (alive.users and user_functions(below.kinds))
    return below if runs_user_code or (create_graph and holds_formulas(below)) else None
