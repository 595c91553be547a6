"""A step of an inner loop: the params and loss that it reads, the step, and steps that run twice.

The backward pass recomputes the last, which keep their inputs, and no graph.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from gradkit import errors
from gradkit._autograd.engine import inner_grads
from gradkit._autograd.guarded_pass import InnerPass
from gradkit._checks import eager_graph, recomputations
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._compat.autograd import with_function_modes
from gradkit._compat.transforms import engine_calls, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree, user_code
from gradkit._core.call import Losses
from gradkit._core.graph import Subgraph, edge
from gradkit._core.known_results import merged
from gradkit._core.params import Grads, Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import with_refused_derivatives
from gradkit._state.rerun import RerunState, recording_writes, what_first_run_made
from gradkit._state.snapshot import Snapshot
from gradkit._torch_bugs.monitor import ForwardMonitor, active_monitors
from gradkit._torch_bugs.node_formulas import holds_formulas
from gradkit.errors import describe, message
from gradkit.func._arguments import Arguments
from gradkit.func._checkpoint import Recomputation
from gradkit.func._differentiate import differentiate, own_code
from gradkit.func._level import LevelPasses, parts_of, read_returned
from gradkit.meta._builtin_optimizers import is_own_rule
from gradkit.meta._optimizer import Optimizer, StateLists, check_grads, update


def raised_where_it_would_take(error: Exception, fn: Callable[..., Any], *args: Any) -> bool:
    """Return whether a function of the caller's has raised, and runs with other arguments."""
    # The run leaves everything as before. Errors of gradkit's name the cause already.
    if isinstance(error, errors.GradkitError) or transforms():
        return False
    try:
        with Snapshot(user_code.captured_by(fn), pytree.tensors(args)).restored():
            fn(*args)
    except Exception:
        return False
    return True


def read_loss(returned: PyTree, fn: str, *, has_aux: bool = False) -> tuple[Tensor, PyTree]:
    """Return the one loss, as a 0-dim tensor, and the aux that a function of the caller's gave."""
    losses, aux = read_returned(returned, has_aux=has_aux, scalar=True, where=fn, loss="loss")
    if len(losses.leaves) != 1:
        got = f"{len(losses.leaves)} losses"
        fix = "return their sum; or if this is (loss, aux), return the loss alone, or pass "
        fix += "has_aux=True to a call that takes it"
        raise errors.NotScalarLossError(message(fn, "one loss", got, fix))
    return losses.leaves[0].reshape(()), aux


def read_loss_and_buffers(
    returned: PyTree, buffers: PyTree, *, has_aux: bool
) -> tuple[Tensor, tuple[PyTree, PyTree]]:
    """Return the one loss, the next buffers and the aux that a function of the caller's gave."""
    names = ("loss", "buffers", "aux")[: 2 + has_aux]
    loss, after, *aux = parts_of(returned, "loss_fn(params, buffers, outer, batch)", names)
    root, spec = "the buffers that loss_fn returned", pytree.flatten(buffers)[1]
    after = pytree.unflatten(spec, pytree.flatten_up_to(spec, "buffers", after, root))
    return read_loss((loss, None), "loss_fn", has_aux=True)[0], (after, aux[0] if aux else None)


def takes_outer_and_state(fn: object) -> bool:
    """Return whether a `grad_transform` takes three arguments, as a learned optimizer does."""
    fits = [count for count in (1, 3) if callable(fn) and _takes(fn, count)]
    if len(fits) != 1:
        got = f"one that takes {inspect.signature(fn)}" if callable(fn) else describe(fn)
        expected = "a function that takes (grads), or one that takes (grads, outer, state)"
        fix = "grad_transform=lambda grads: fn(grads), or lambda grads, outer, state: ..."
        raise errors.OptionError(message("grad_transform", expected, got, fix))
    return fits == [3]


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with this many arguments."""
    try:
        inspect.signature(fn).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return count == 1  # a function of C, such as torch.sign
    return True


IsMade: TypeAlias = Callable[[Tensor], bool]  # whether an operator of the run has made a tensor


def refuse_captured(where: str, below: Subgraph, inputs: Iterable[Tensor], made: IsMade) -> None:
    """Raise if a graph ends at a leaf that is no input, and that outlives the run."""
    # A leaf that an operator of the run has made, and that nothing but the graph refers to now.
    ids, alone = set(map(id, inputs)), _references_of_lone_leaf()
    references = {} if ids.issuperset(below.leaves) else _references(below)
    if any(
        leaf.requires_grad and key not in ids and not (made(leaf) and references[key] <= alone)
        for key, leaf in below.leaves.items()
    ):
        expected, fix = _ADVICE[where]
        got = "one that uses a tensor from outside that requires grad: its gradient would be lost"
        fix += "; if it makes the tensor itself, by x.detach().requires_grad_(), not "
        fix += "nn.Parameter(x)"
        raise errors.UnsupportedGraphError(message(where, expected, got, fix))


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
    **dict.fromkeys(
        ("inner_loss", "root", "fixed_point"),
        (
            "a function of its arguments",
            'pass it in outer, not inside a module: find(params, {"name": tensor})',
        ),
    ),
}


def runs_user_code(below: Subgraph, hooks: int) -> bool:
    """Return whether a pass may run a Function or hook; `hooks` were made before the run."""
    return user_code.hooks_made() != hooks or bool(user_code.user_functions(below.kinds))


def watched() -> AbstractContextManager[object]:
    """Return what watches the operations of the caller's code; in a function, its monitor does."""
    return with_function_modes() if active_monitors() else ForwardMonitor()


InnerGrads: TypeAlias = tuple[Tensor, Grads, PyTree]  # the loss, its gradients, the aux
# The loss and aux of a tree of params.
LossOfParams = Callable[[PyTree], tuple[Tensor, PyTree]]


class Carry(NamedTuple):
    """What each step passes to the next: the variables, the optimizer's state of each, buffers."""

    tensors: Tensors
    state: StateLists
    buffers: PyTree  # what the loss returns besides, for the next step; or None


class StepInputs(NamedTuple):
    """What steps read besides the carry: outer variables, hyper-parameters, a batch a step."""

    outer: PyTree
    hyper: dict[str, Any]
    batches: list[PyTree]


class StepOutputs(NamedTuple):
    """The carry after some steps, and the 0-dim loss and the aux of each."""

    carry: Carry
    losses: Tensors
    aux: list[PyTree]
    between: list[Tensors]  # the variables after each step but the last, if asked for


Steps: TypeAlias = Callable[..., StepOutputs]  # run some: (carry, inputs, *, create_graph)


@dataclass(frozen=True)
class InnerStep:
    """A step of an optimizer on an inner loss."""

    loss_fn: Callable[..., Any]
    params: Arguments
    opt: Optimizer
    grad_transform: Callable[..., PyTree] | None
    is_learned: bool  # whether that also takes the outer variables, and the optimizer's state
    first_order: bool
    has_buffers: bool
    has_aux: bool

    def __call__(self, carry: Carry, inputs: StepInputs, *, create_graph: bool) -> StepOutputs:
        """Run the step of a single batch; the loss carries the graph of its computation."""
        with own_code():
            return self._run(carry, inputs, create_graph)

    def _run(self, carry: Carry, inputs: StepInputs, create_graph: bool) -> StepOutputs:
        (batch,) = inputs.batches
        # Clones: the loss may write to them, as batch norm does.
        buffers = pytree.map_tensors(Tensor.clone, carry.buffers) if self.has_buffers else None

        def loss_fn(params: PyTree) -> tuple[Tensor, PyTree]:
            if not self.has_buffers:
                returned = self.loss_fn(params, inputs.outer, batch)
                return read_loss(returned, "loss_fn", has_aux=self.has_aux)
            returned = self.loss_fn(params, buffers, inputs.outer, batch)
            return read_loss_and_buffers(returned, carry.buffers, has_aux=self.has_aux)

        # `_functional` is right in eager code, too, but takes 1.2 of the time of 5 steps of a small
        # net, and 4.5 of 200: its walks go down through all steps before this one.
        if transforms():
            loss, grads, aux = self._functional(loss_fn, carry.tensors, create_graph)
        else:
            given = inputs.outer, batch, buffers
            loss, grads, aux = self._eager(loss_fn, carry.tensors, given, create_graph)
        if self.has_buffers:
            buffers, aux = aux
        if self.grad_transform is not None:
            with recording_writes(), watched(), INSIDE:
                grads = self._transformed(self.grad_transform, grads, inputs.outer, carry.state)
        run = partial(update, self.opt, carry.tensors, grads, carry.state, inputs.hyper)
        if is_own_rule(self.opt):
            new = run()
        else:
            with recording_writes(), watched(), INSIDE:
                new = run()
        return StepOutputs(Carry(*new, buffers), [loss], [aux], [])

    def _transformed(
        self, transform: Callable[..., PyTree], grads: Grads, outer: PyTree, state: StateLists
    ) -> list[Any]:
        """Return the gradients of the variables that the caller's function makes of these."""
        params, root = self.params, "grad_transform(grads)"

        def tree(values: Sequence[Any]) -> PyTree:
            return pytree.unflatten(params.spec, params.per_leaf(values))

        args = [tree(grads)]
        if self.is_learned:
            args += [outer, {name: tree(column) for name, column in state.items()}]
        leaves = pytree.flatten_up_to(params.spec, "params", transform(*args), root)
        pairs = zip(params.slots, leaves, strict=True)
        movable = [None if slot is None else leaf for slot, leaf in pairs]
        check_grads(params.leaves, movable, params.spec, root)
        return params.per_variable(movable)

    def _eager(
        self, loss_fn: LossOfParams, tensors: Tensors, given: PyTree, create_graph: bool
    ) -> InnerGrads:
        twice = create_graph and not self.first_order  # whether the gradients get a graph, too
        with torch.enable_grad(), INSIDE:
            # Views: what outer variables or batches share with params is not params.
            # A leaf that it makes is none from outside; views are no leaves.
            with INSIDE if all(x.requires_grad for x in tensors) else recording_writes():
                variables = [
                    x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
                    for x in tensors
                ]
            if engine_calls.depth:
                engine_calls.made |= {id(x): x for x in variables if x.is_leaf}
            hooks, tree = user_code.hooks_made(), self.params.tree(variables)
            with recording_writes(), watched(), INSIDE:
                loss, aux = recomputations.exact(lambda: loss_fn(tree))
            below = _check_graph(loss, variables, create_graph=twice)
            options: Any = {"create_graph": twice, "retain_graph": create_graph}
            if below is None:
                grads = inner_grads([loss], variables, **options)
            else:
                one = InnerPass("the inner loss", self.params.path, variables, below)
                made = None if twice or self.first_order else what_first_run_made()
                if made is not None and runs_user_code(below, hooks):
                    inputs = [*variables, *pytree.tensors(given)]
                    grads = _first_pass_of_two(one, loss, inputs, made)
                else:
                    with recording_writes():
                        grads = one.grads([loss], **options)
        if all(grad is None for grad in grads):
            expected = "a loss computed from params"
            got = "one that does not depend on them: loss_fn uses a module, or tensors, from "
            got += "outside; or a checkpoint with use_reentrant=True cuts the path"
            fix = "compute it from loss_fn's own argument: call, params, buffers = "
            fix += "gradkit.func.make_functional(module)"
            raise errors.UnreachedParamError(message("the inner loss", expected, got, fix))
        return loss, grads, aux

    def _functional(self, fn: LossOfParams, tensors: Tensors, create_graph: bool) -> InnerGrads:
        def run(losses: Losses, passes: LevelPasses) -> list[Grads]:
            variables = passes.variables
            return [passes.grads(losses.leaves, [None], variables, retain=create_graph)]

        arguments = self.params.at((self.params.tree(tensors),))
        option = None if create_graph else False
        out = differentiate(fn, arguments, {}, run, has_aux=True, create_graph=option)
        grads = out.grads[0]
        if self.first_order:
            grads = [grad if grad is None else grad.detach() for grad in grads]
        elif out.refused is not None:
            grads = with_refused_derivatives(grads, out.values, out.refused)
        return out.values[0], grads, out.aux


def _first_pass_of_two(one: InnerPass, loss: Tensor, inputs: Tensors, made: IsMade) -> Grads:
    """Return constant gradients; raise if their graph, which the second run makes, ends outside."""
    with recording_writes():
        grads = one.grads([loss], create_graph=True)
    stop = {edge(x).node for x in inputs if x.requires_grad}
    below = Subgraph([grad for grad in grads if grad is not None], stop=stop)
    refuse_captured("loss_fn", below, inputs, made)
    return [grad if grad is None else grad.detach() for grad in grads]


def _check_graph(loss: Tensor, variables: Tensors, *, create_graph: bool) -> Subgraph | None:
    """Check the graph of a step, and return it if its pass is to be guarded."""
    alive = user_code.functions_alive()
    if not loss.requires_grad or not (create_graph or any(alive) or user_code.hooks_registered()):
        return None
    # The walk ends at this step: one through all steps before it would make the loop quadratic.
    nodes = [tensor.grad_fn or edge(tensor).node for tensor in variables]
    below = Subgraph([loss], stop=set(nodes))
    if alive.refused:
        eager_graph.refuse_nodes(map(type, below.nodes.difference(below.stop)), "the inner loss")
    if create_graph:
        refuse_wrong_derivative(lambda: "the inner loss", variables, below)
    if user_code.hooks_registered() or (create_graph and holds_formulas(below)):
        return below
    # The Functions that are alive may be the steps before this one.
    return below if alive.users and user_code.user_functions(below.kinds) else None


def run_recomputed(run: Steps, carry: Carry, inputs: StepInputs) -> StepOutputs:
    """Run steps without keeping their graph; gradients flow to the carry and the inputs."""
    tensors, rebuild = pytree.partition_tensors((carry, inputs))
    state = RerunState(tensors)
    count = len(carry.tensors)  # of the variables, which come first
    needed = [index < count or x.requires_grad for index, x in enumerate(tensors)]
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
    with torch.enable_grad(), state.first_run():
        done = run(*rebuild(leaves), create_graph=False)
    outputs, rebuild_outputs = pytree.partition_tensors(done)
    refuse_captured("loss_fn", Subgraph(outputs), leaves, state.made)
    state.record_outputs(outputs)
    # Statistics that required grad would be refused by batch norm in the next step.
    constants = {id(x) for x in pytree.tensors(done.carry.buffers) if not x.requires_grad}
    varies = [id(x) not in constants for x in outputs]

    @contextmanager
    def second_run(tensors: Sequence[Tensor]) -> Iterator[Tensors]:
        with state.second_run() as second:
            again = pytree.tensors(run(*rebuild(tensors), create_graph=True))
            second.compare(again, "loss_fn")
            yield list(compress(again, varies))

    pairs = zip(outputs, varies, strict=True)
    values = [x.detach() if may_vary else x.detach().clone() for x, may_vary in pairs]
    recomputation = Recomputation("loss_fn", second_run)
    results = recomputation.results(list(compress(values, varies)), tensors)
    return cast("StepOutputs", rebuild_outputs(merged(values, varies, results)))
