"""The calls of torch's engine, and the names that gradkit has for its errors."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.func import vmap

from gradkit._checks.circumstances import HOOKS, SUBCLASSES, around
from gradkit._checks.eager_graph import DONATED, freed_message, losses_freed, only_backward
from gradkit._checks.higher_derivatives import refuse_undifferentiable
from gradkit._checks.hooks_in_passes import any_changed_gradients, refuse_second_order, watched_pass
from gradkit._checks.modified_tensors import modified_message
from gradkit._checks.recomputations import refuse_checkpoint_error
from gradkit._compat.autograd import (
    current_pass,
    function_mode_enabled,
    jagged_offsets,
    record_stream,
    run_engine,
    tensor_hooks,
    with_function_modes,
)
from gradkit._compat.distributed import full_tensor, is_dtensor
from gradkit._compat.nodes import CHANGED
from gradkit._compat.transforms import (
    COMPILED_AUTOGRAD,
    autograd_grad,
    compiled_autograd_disabled,
    count_function_modes,
    engine_calls,
)
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core import user_code
from gradkit._core.call import Call
from gradkit._core.grad_recorder import (
    any_observers,
    hidden_passes,
    observed_tensors,
    observers,
    what_begins,
)
from gradkit._core.graph import Subgraph, edge
from gradkit._core.known_results import merged
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.user_code import user_code_may_run
from gradkit._state.grad_attribute import grads_put_back, set_grads
from gradkit._state.recomputed_tensors import recompute_hooks, recomputed_tensor_sources
from gradkit._torch_bugs.missing import Reason, missing_derivative
from gradkit._torch_bugs.node_formulas import differentiated_by_formula, holds_formulas
from gradkit.errors import FreedGraphError, UnsupportedGraphError, first_line, message


def run_grad(
    call: Call,
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    seeds: Sequence[Tensor | None],
    *,
    retain_graph: bool,
    is_grads_batched: bool = False,
    watched: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of a weighted sum of outputs with respect to tensors or graph edges."""
    options = retain_graph, call.create_graph
    bits = around(call) if call.around is None else call.around
    # A gradient that is captured among shards that are recomputed would be a partial sum.
    of_shards = recomputed_tensor_sources and bits & SUBCLASSES
    is_first = bits & HOOKS and not (watched or is_grads_batched or of_shards)
    if is_first and (call.create_graph or any_changed_gradients()):
        again = partial(run_grad, call, outputs, seeds=seeds, watched=True)
        return watched_pass(
            lambda edges, keep: again(inputs=[*inputs, *edges], retain_graph=retain_graph or keep),
            call.losses.first_paths,
            Subgraph(outputs, ends=call.graph.ends),
            [x for x in inputs if isinstance(x, Tensor)],
            [x.node for x in inputs if not isinstance(x, Tensor)],
            create_graph=call.create_graph,
        )
    by_engine = not (bits & SUBCLASSES or is_grads_batched or function_mode_enabled())
    grads: Sequence[Tensor | None]
    try:
        if by_engine and PLAIN_TYPES.issuperset(map(type, outputs)):
            pairs = zip(outputs, seeds, strict=True)
            cotangents = [torch.ones_like(x) if seed is None else seed for x, seed in pairs]
            grads = run_engine(tuple(outputs), tuple(cotangents), *options, tuple(inputs), True)
        else:
            batched: Any = {"allow_unused": True, "is_grads_batched": is_grads_batched}
            grads = torch.autograd.grad(outputs, inputs, seeds, *options, **batched)
            record_stream(grads)
    except RuntimeError as error:
        _raise_named(error, call)
        raise
    except (AttributeError, LookupError, TypeError) as error:
        _raise_named(error, call)
        _raise_of_function(error, call)
        raise
    if not recomputed_tensor_sources:
        return list(grads)
    # Torch gives a number that DTensors were multiplied by a partial sum, and `item()` this rank's.
    return [
        full_tensor(grad) if grad is not None and not is_dtensor(variable) else grad
        for grad, variable in zip(grads, inputs, strict=True)
    ]


@contextmanager
def recording(
    where: Callable[[], str], below: Subgraph, variables: Sequence[Tensor], *, recomputing: bool
) -> Iterator[None]:
    """Run passes whose gradients get a graph: of Functions, of formulas, of what is recomputed."""
    refused = refuse_undifferentiable(where, below, variables)
    functions = refused if user_code.functions_alive().users else INSIDE
    saving = recompute_hooks() if recomputing else INSIDE  # `inner_grads` sees to that itself
    with saving, functions, differentiated_by_formula(below), INSIDE:
        yield


def run_batch(
    call: Call, outputs: Sequence[Tensor], inputs: Sequence[Any], batches: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run one pass from batches of cotangents, inside `batched_mode`, and keep the graph."""
    # torch.autograd.grad would be seen by a TorchFunctionMode: hooks could not be seen by one.
    options = (True, call.create_graph, tuple(inputs), True)
    try:
        return list(run_engine(tuple(outputs), tuple(batches), *options))
    except RuntimeError as error:
        _raise_named(error, call)
        raise


def run_backward(
    call: Call,
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    variables: list[Tensor] | None,
    *,
    retain_graph: bool,
) -> None:
    """Accumulate the gradient of a weighted sum of outputs into `.grad` of some, or all, leaves."""
    if any_changed_gradients():
        below = call.whole
        refuse_second_order(
            call.losses.first_paths, below.leading_to(variables) if variables else below.nodes
        )
    by_formula = call.create_graph and holds_formulas(call.whole)
    restoring = by_formula or (call.create_graph and call.functions.users)
    formulas = differentiated_by_formula(call.whole) if by_formula else INSIDE
    by_engine = not (around(call) & SUBCLASSES or function_mode_enabled())
    by_engine = by_engine and PLAIN_TYPES.issuperset(map(type, outputs))
    leaves: list[Tensor] = []
    if call.create_graph and around(call) & HOOKS:
        leaves = [*call.whole.leaves.values()] if variables is None else variables
        if recomputed_tensor_sources and not PLAIN_TYPES.issuperset(map(type, leaves)):
            leaves = []  # captured shards would be partial sums, as in `run_grad`
    if jagged_offsets.data:
        _refuse_nested(call, variables)
    with _grads_restored_on_error(call) if restoring else INSIDE, formulas, INSIDE:
        try:
            options = retain_graph, call.create_graph
            if leaves and _only_tensor_hooks(leaves):
                grads = run_grad(call, outputs, leaves, seeds, retain_graph=retain_graph)
                _accumulate(leaves, grads)
            elif by_engine:
                pairs = zip(outputs, seeds, strict=True)
                cotangents = [torch.ones_like(x) if seed is None else seed for x, seed in pairs]
                arguments = tuple(outputs), tuple(cotangents), *options, tuple(variables or ())
                run_engine(*arguments, True, accumulate=True)
            else:
                torch.autograd.backward(outputs, seeds, *options, inputs=variables)
        except (RuntimeError, TypeError) as error:
            _raise_named(error, call)
            raise


def _refuse_nested(call: Call, variables: Sequence[Tensor] | None) -> None:
    """Raise before a pass that adds to the `.grad` of a nested leaf, which torch cannot."""
    leaves = call.whole.leaves.values() if variables is None else variables
    if any(leaf.layout == torch.jagged and leaf.grad is not None for leaf in leaves):
        expected, got = "a nested leaf whose .grad is None", "one that has a gradient already"
        fix = "gradkit.add_grads_(n, gradkit.value_and_grads(loss, n)[1])"
        raise UnsupportedGraphError(message(call.losses.path(0), expected, got, fix))


def _only_tensor_hooks(leaves: Sequence[Tensor]) -> bool:
    """Return whether a pass that returns the gradients of these tensors runs all of their hooks."""
    # Hooks of AccumulateGrad nodes and those of `register_multi_grad_hook` do not run in it.
    return all(leaf.grad_fn is None for leaf in leaves) and not (
        user_code.any_hooked_nodes(leaves)
        or any(
            getattr(hook, "__module__", None) == torch.autograd.graph.__name__
            for leaf in leaves
            for hook in (tensor_hooks(leaf) or {}).values()
        )
    )


def _accumulate(leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Add to `.grad` what a pass has returned after it has run the hooks of these leaves."""
    with torch.enable_grad():  # as the engine does it where a graph is recorded
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                node: Any = edge(leaf).node
                node(grad)  # runs only the hooks that are due after accumulation


@contextmanager
def _grads_restored_on_error(call: Call) -> Iterator[None]:
    """Put every `.grad` back if a Function cannot be differentiated again."""
    # A pass with create_graph replaces each `.grad`, and does not add into it.
    leaves = list(call.whole.leaves.values())
    before = [leaf.grad for leaf in leaves]
    try:
        variables = [variable for _, _, variable in call.variables()]
        with refuse_undifferentiable(call.losses.first_paths, call.whole, variables):
            yield
    except UnsupportedGraphError:
        set_grads(leaves, before)
        raise


def _raise_named(error: Exception, call: Call) -> None:
    """Raise gradkit's error for one of the engine's, if there is one."""
    text, where = str(error), call.losses.first_paths()
    if "through the graph a second time" in text:
        raise FreedGraphError(freed_message(call.losses, losses_freed(call.losses))) from error
    if "_will_engine_execute_node" in text:
        raise UnsupportedGraphError(_MULTI_GRAD_HOOK) from error
    reason = reason_of(error)
    if reason:
        raise UnsupportedGraphError(message(where, *reason)) from error
    if not isinstance(error, RuntimeError):
        return
    refuse_checkpoint_error(error, where, call.outputs)
    if any(change in text for change in CHANGED):
        raise UnsupportedGraphError(modified_message(error, call)) from error


def reason_of(error: Exception) -> Reason | None:
    """Return what was expected of a graph, what came and what to do; None for an unknown error."""
    text = str(error)
    without = re.search(r"through (\S+) but no autograd formula was registered", text)
    known = {
        "does not support 3rd+ order derivatives": _NO_THIRD_DERIVATIVE,
        "non-empty donated buffers": DONATED,
        "under selective activation checkpoint": _SELECTIVE,
        "chunked backward called twice": _IN_CHUNKS,
    }
    reason = next((reason for part, reason in known.items() if part in text), None)
    if _UNDER_BACKWARD in text:
        reason = only_backward()
    for part, fix in _RETURNED.items():
        if part in text:
            expected = "Functions and hooks that return gradients of their inputs"
            reason = expected, first_line(error), fix
    reason = reason or missing_derivative(error)
    if reason is None and without:
        got = f"one with torch.ops.{without[1]}, which has none"
        fix = "torch.library.register_autograd; or, if its result is meant as a constant, give it "
        reason = "a graph of operators that have a backward formula", got, f"{fix}x.detach()"
    return reason


# The errors of a Function's backward, or a hook, that returns something else than gradients.
_RETURNED = {
    "incorrect number of gradients": "return as many as forward has arguments, None for some",
    "returned an invalid gradient": "return a gradient of the shape and dtype of that input",
    "returned a gradient different than None": "return None for an argument that is no tensor",
    "either the backward or vjp method": "give the Function a backward; or @once_differentiable",
    "has changed the size of value": "return a gradient of the shape that the hook was given",
    "has changed the type of value": "return a gradient of the dtype that the hook was given",
    "returned an incorrect number of values": "return as many gradients as the hook was given",
    "invalid number of grad_input": "return as many gradients as the hook has grad_input, or None",
    "but hook returned": "return a gradient from the hook, or None to leave it as it is",
    "no input requires gradient should always return": "return None from the hook",
    "input_grad_buffers does not support": "return it; or capture_grads(params) around .backward()",
}


def _raise_of_function(error: Exception, call: Call) -> None:
    """Raise gradkit's error if a Function's backward has failed in one of several passes."""
    owners = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    node = next((owner for owner in owners if isinstance(owner, BackwardCFunction)), None)
    if node is not None and len(call.passes) + call.losses.leaves[0].numel() > 2:
        name = user_code.name_of_function(type(node))
        got = f"{name}, which fails in one of several ({type(error).__name__}: {error})"
        fix = "keep tensors by ctx.save_for_backward, and free nothing on ctx in backward; or take "
        fix += "one pass: gradkit.value_and_grads(losses, params)"
        expected, where = "Functions whose backward can run more than once", call.losses.path(0)
        raise UnsupportedGraphError(message(where, expected, got, fix)) from error


_UNDER_BACKWARD = "compatible with .grad()"  # says a checkpoint of another library
_SELECTIVE = (
    "a graph that more than one pass can go through",
    "a selective checkpoint (one with a context_fn), which keeps its results for one pass",
    "checkpoint without context_fn; or take one pass: gradkit.value_and_grads, for the sum",
)
_IN_CHUNKS = (
    "a graph that more than one pass can go through",
    "linear_cross_entropy in chunks, which frees what it keeps in its first backward pass",
    "functional.cross_entropy(functional.linear(x, weight), target); or take one pass: "
    "gradkit.value_and_grads, for the sum",
)
_MULTI_GRAD_HOOK = message(
    "params",
    "leaf tensors without register_multi_grad_hook",
    "one that has it: torch runs such hooks of leaves in backward() only",
    "remove the hook for this call, register it on non-leaf tensors, or use backward_",
)


# https://github.com/pytorch/pytorch/issues/186256
_NO_THIRD_DERIVATIVE = (
    "a graph whose derivative torch has",
    "the second derivative of a batch_norm or instance_norm, whose third torch does not have",
    "use group_norm or rms_norm, or write the norm out",
)


def accumulate_through_engine(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Add gradients to the `.grad` of leaf tensors in an engine pass, which calls their hooks."""
    present = [(leaf, grad.detach()) for leaf, grad in pairs if grad is not None]
    if present:
        leaves, grads = zip(*present, strict=True)
        torch.autograd.backward(leaves, grads)


def inner_grads(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    accumulate: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of outputs with respect to inputs; outputs without a graph add none."""
    # The inputs are leaves of gradkit's own with `accumulate`: the pass adds to their `.grad`.
    # The gradients of inputs that are not reached are zeros while torch.compile traces.
    if torch.compiler.is_compiling():
        traced: Any = {"retain_graph": retain_graph, "create_graph": create_graph}
        given: Any = cotangents
        return list(autograd_grad(outputs, inputs, given, **traced))
    seeds = [None] * len(outputs) if cotangents is None else cotangents
    pairs = [
        (output, seed)
        for output, seed in zip(outputs, seeds, strict=True)
        if output.requires_grad and (cotangents is None or seed is not None)
    ]
    if not pairs or not inputs:
        return [x.grad if accumulate else None for x in inputs]
    roots, seeds = zip(*pairs, strict=True)
    options = create_graph if retain_graph is None else retain_graph, create_graph
    is_plain = not accumulate and _are_plain(roots, inputs, seeds)
    # gradkit's own code around a function inside of another is hidden from modes.
    is_hidden = engine_calls.depth and count_function_modes() and user_code_may_run()
    modes = with_function_modes() if is_hidden else INSIDE
    recomputing = recompute_hooks() if create_graph else INSIDE
    with compiled_autograd_disabled(), recomputing, modes, INSIDE:
        try:
            if accumulate:
                torch.autograd.backward(roots, seeds, *options, inputs=inputs)
                return [x.grad for x in inputs]
            if is_plain:
                both = zip(roots, seeds, strict=True)
                filled = tuple([torch.ones_like(x) if s is None else s for x, s in both])
                return list(run_engine(roots, filled, *options, tuple(inputs), True))
            return list(torch.autograd.grad(roots, inputs, seeds, *options, allow_unused=True))
        except RuntimeError as error:
            refuse_checkpoint_error(error, "a loss", roots)
            if _UNDER_BACKWARD in str(error):
                raise UnsupportedGraphError(message("a loss", *only_backward())) from error
            reason = missing_derivative(error)
            if reason is None:
                raise
            raise UnsupportedGraphError(message("the loss", *reason)) from error


def _are_plain(roots: Sequence[Tensor], inputs: Sequence[Any], seeds: Sequence[Any]) -> bool:
    """Return whether the engine can be called without a look at each of these."""
    if function_mode_enabled() or not PLAIN_TYPES.issuperset(map(type, (*roots, *inputs))):
        return False
    return all(
        root.numel() == 1 and not root.is_complex() if seed is None else seed.shape == root.shape
        for root, seed in zip(roots, seeds, strict=True)
    )


def vmapped_grads(
    run_one: Callable[..., tuple[list[Tensor | None], list[Tensor]]],
    *batched: Tensor,
    **options: Any,
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Vmap a function that returns gradients, some of them None, and other tensors."""
    reached: list[bool] = []

    def present(*tensors: Tensor) -> tuple[Tensor, ...]:
        grads, others = run_one(*tensors)
        reached[:] = [grad is not None for grad in grads]
        # vmap returns tensors only; a trace of lists in a tuple takes long.
        return tuple([grad for grad in (*grads, *others) if grad is not None])

    results = vmap(present, **options)(*batched)
    count = reached.count(True)
    return merged([None] * len(reached), reached, results), list(results[count:])


def reference_backward(losses: Sequence[Tensor]) -> None:
    """Accumulate the gradients of the sum of losses into `.grad`, and keep the graph."""
    torch.autograd.backward(losses, retain_graph=True)


def reference_grad(
    losses: Sequence[Tensor], variables: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of the sum of losses, None where it is unused, and keep the graph."""
    return torch.autograd.grad(losses, variables, retain_graph=True, allow_unused=True)


def reference_func_grads(fn: Callable[..., tuple[Tensor, Any]], *args: Any) -> tuple[Any, Any]:
    """Return the gradients of a function with aux with respect to all arguments, and the aux."""
    run = torch.func.grad_and_value(fn, argnums=tuple(range(len(args))), has_aux=True)
    grads, (_, aux) = run(*args)
    return grads, aux


@contextmanager
def own_roots(outputs: Sequence[Tensor], begin: Callable[[int], None]) -> Iterator[list[Tensor]]:
    """Yield views of outputs; `begin` gets the number of a pass from them, before other hooks."""
    # Other threads, and passes inside hooks, go through the same tensors at the same time.
    with undo_stack() as stack:
        with torch.enable_grad(), INSIDE:
            # The engine runs the newest first: in this order, as without views, it adds them up.
            roots = [output.view_as(output) for output in reversed(outputs)][::-1]
        for root in roots:
            handle = user_code.register_own_hook(root, lambda _: begin(current_pass()))
            stack.callback(handle.remove)
        if COMPILED_AUTOGRAD in sys.modules:  # would trace the hooks, to run later
            stack.enter_context(compiled_autograd_disabled())
        yield roots


@contextmanager
def numbered_roots(outputs: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield what a pass is to start from if its number is asked for; else the outputs."""
    begin = what_begins() if observers else None
    if begin is None:
        yield outputs
    else:
        with own_roots(outputs, begin) as roots:
            yield roots


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the passes of rows in the block from safe_retain: no call returns their gradients."""
    if not any_observers():
        yield
        return
    # The block raises as a recorded pass would, and leaves the `.grad` of these tensors alone.
    tensors = {id(t): t for t, _ in observed_tensors() if t.retains_grad and not t.is_leaf}
    with grads_put_back(list(tensors.values())), hidden_passes():
        yield


_thread = threading.local()


@cache
def _leaf_of_numbered_passes() -> Tensor:
    with torch.inference_mode(False), INSIDE:
        leaf = torch.zeros((), device="cpu", requires_grad=True)
    user_code.register_own_hook(leaf, lambda _: setattr(_thread, "number", current_pass()))
    return leaf


def number_of_a_pass() -> int:
    """Return the number of a pass that is run for it: torch counts those of the process."""
    leaf = _leaf_of_numbered_passes()
    traced = COMPILED_AUTOGRAD in sys.modules
    with compiled_autograd_disabled() if traced else nullcontext():
        run_engine((leaf,), (leaf.detach(),), False, False, (leaf,), False)
    return int(_thread.number)
