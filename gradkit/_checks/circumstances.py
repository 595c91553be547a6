"""What there is around a call that its passes are guarded against: read once, a bit for each."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from sys import getrefcount, modules

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._checks.checked import is_checked, open_monitors
from gradkit._checks.higher_derivatives import may_be_wrong
from gradkit._compat.autograd import is_view
from gradkit._compat.checkpoints import IDLE, RECOMPUTING
from gradkit._compat.distributed import SHARDING_MODULE, any_fully_sharded
from gradkit._compat.dynamo import any_compiled
from gradkit._compat.transforms import is_differentiated_tensor
from gradkit._core.call import Call
from gradkit._core.grad_recorder import any_observers, observers
from gradkit._core.graph import kinds_in_short_pass
from gradkit._core.user_code import hooks_registered
from gradkit._state.recomputed_tensors import recomputed_tensor_sources
from gradkit._torch_bugs.node_formulas import holds_formulas

# The circumstances of the process:
HOOKS = 1 << 0  # someone has registered a hook, of any kind
FUNCTIONS = 1 << 1  # a graph may hold a Function whose backward is the user's
INCOMPLETE = 1 << 2  # a graph may hold a node of torch's that hides parameters, or other ranks
SHARDED = 1 << 3  # there are `fully_shard` modules
CHECKPOINTS = 1 << 4  # a checkpoint may have to recompute what a pass needs
OBSERVED = 1 << 5  # `safe_retain` records the passes of this thread
CHECKED = 1 << 6  # this thread is inside `checked()`
WATCHED = 1 << 7  # some thread is
# The circumstances of the call:
NO_VARIABLES = 1 << 8  # nothing requires grad
CHANGED = 1 << 9  # a variable that was computed from others is a view, or was changed in place
COMPILED_VALUES = 1 << 10  # such a variable is the result of a compiled function
SUBCLASSES = 1 << 11  # a variable is of a subclass of torch's tensors
CREATES_GRAPH = 1 << 12  # a derivative of the gradients may be taken, and wrong
RECORDED = 1 << 13  # the gradients get a graph, with a Function, a formula or what is recomputed
CONSTANT = 1 << 14  # torch.func differentiates a loss, and would take its gradients for constants
MUST_REACH = 1 << 15  # `unused="error"`
SEVERAL_LOSSES = 1 << 16
SEVERAL_PASSES = 1 << 17
RETAINED = 1 << 18  # a pass writes some `.grad`: `retain_grad()` was called

USER_CODE = HOOKS | FUNCTIONS
# Each pass is guarded against these; without any of them, a pass is a call of the engine.
GUARDED = USER_CODE | OBSERVED | CHECKED | RETAINED | RECORDED

_retains_grad, _version, _grad_fn = map(attrgetter, ("retains_grad", "_version", "grad_fn"))


def around(call: Call) -> int:
    """Return what there is around a call; all of it is read when this is first asked for."""
    # A single function reads all: a large pass pushes Python's code out of the caches, so that each
    # function that runs beside it costs a microsecond.
    if call.around is not None:
        return call.around
    bits = HOOKS if hooks_registered() else 0
    refused, users = call.functions
    if users:
        bits |= FUNCTIONS
    if refused:
        bits |= INCOMPLETE
    if SHARDING_MODULE in modules and any_fully_sharded():
        bits |= SHARDED
    if [*map(getrefcount, RECOMPUTING)] != IDLE:
        bits |= CHECKPOINTS
    if observers and any_observers():
        bits |= OBSERVED
    if open_monitors:
        bits |= WATCHED | CHECKED if is_checked() else WATCHED
    written: Sequence[Tensor] = [*call.losses.leaves, *call.weights]
    has_variables = False
    for params in (call.passes[0].params,) if len(call.passes) == 1 else call.params:
        has_variables = has_variables or bool(params.variables)
        if not params.only_leaves:
            written = [*written, *params.variables]
            if any(map(_version, params.variables)) or any(map(is_view, params.variables)):
                bits |= CHANGED
            if any_compiled(set(map(type, map(_grad_fn, params.variables)))):
                bits |= COMPILED_VALUES
        if not params.no_subclasses:
            bits |= SUBCLASSES
    if not has_variables:
        bits |= NO_VARIABLES
    if any(map(_retains_grad, written)):
        bits |= RETAINED
    if len(call.outputs) > 1:
        bits |= SEVERAL_LOSSES
    if len(call.passes) > 1:
        bits |= SEVERAL_PASSES
    if call.unused == "error":
        bits |= MUST_REACH
    if call.create_graph:
        if not _is_differentiable(call, bits):
            bits |= CREATES_GRAPH
            if holds_formulas(call.whole):
                bits |= RECORDED
        if users or recomputed_tensor_sources:
            bits |= RECORDED
    elif any(map(is_differentiated_tensor, call.outputs)):
        bits |= CONSTANT
    call.around = bits
    return bits


_SHORT = 300  # nodes
_NOT_SHORT = (
    FUNCTIONS | INCOMPLETE | CHANGED | SUBCLASSES | SEVERAL_LOSSES | SEVERAL_PASSES | MUST_REACH
    | NO_VARIABLES | RETAINED | RECORDED
)  # fmt: skip


def _is_differentiable(call: Call, bits: int) -> bool:
    """Return whether torch is known to get the derivative of a pass right; False if not sure."""
    # The pass of a step in a loop is short, and so is this look at it: by the view of the graph, a
    # loop of small steps takes 1.44 times torch's, and not 1.27.
    if bits & _NOT_SHORT or call.weights:
        return False
    (params,), (loss,) = call.params, call.outputs
    if is_differentiated_tensor(loss):
        return False
    ends: set[Node] = set()
    if not params.only_leaves:
        ends = set(map(_grad_fn, params.variables)) - {None}
        if len(ends) < len(params.variables):
            return False
    kinds = kinds_in_short_pass(loss, ends, _SHORT)
    return kinds is not None and not may_be_wrong(kinds)
