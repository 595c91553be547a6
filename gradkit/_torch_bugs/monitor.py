"""Watches the operations of a function, and raises where torch would be silently wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from gradkit._compat.autograd import with_function_modes, without_function_modes
from gradkit._compat.dynamo import functions_traced, is_watched, leave_uncompiled, operations_traced
from gradkit._compat.nodes import output_shape, saved, saved_or
from gradkit._compat.transforms import (
    BATCH,
    DERIVATIVES,
    FORWARD,
    apply_function,
    as_in_first_run,
    carries_graph,
    compiles_scripted,
    derivatives_around,
    differentiated,
    differentiated_around,
    forward_mode_on,
    function_modes,
    jvp_level,
    level_of,
    set_compiles_scripted,
    transforms,
    unbatched,
    without_innermost_tangent,
)
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit._core import pytree
from gradkit._core.graph import Subgraph, recorded_outside
from gradkit._core.results_without_graph import with_zero_derivatives
from gradkit._core.user_code import functions_alive, hooks_registered, note_labels, user_functions
from gradkit._state.copy_on_write import CopyOnWrite, is_in_place
from gradkit._torch_bugs import attention, table
from gradkit._torch_bugs import foreign_operators as foreign
from gradkit._torch_bugs.foreign_operators import is_foreign
from gradkit._torch_bugs.traced_operations import (
    ATTENTION,
    BACKWARD_PASS,
    FUNCTION,
    FUNCTIONAL,
    IPOW,
    TRACED_BY_FORMULA,
    name_of,
    traced_by_formula,
    wrong_unseen,
)
from gradkit.errors import UnsupportedGraphError, message

_IN_PLACE = {
    getattr(owner, alias)
    for alias in filter(is_in_place, table.ALIASES)
    for owner in (torch, Tensor, torch.ops.aten)
    if hasattr(owner, alias)
}

# Operations that are none of the table's, and write on nothing: they run as they are.
_ordinary: set[Any] = set()
_unnamed: set[Any] = set()  # operations of torch's own that are none of the table's
_is_traced = torch.compiler.is_dynamo_compiling
_MOST_ORDINARY = 10_000  # each module of torch.ops, and each property, has functions of its own
_active = threading.local()


def active_monitors() -> int:
    """Return how many monitors note the operations of this thread."""
    return getattr(_active, "count", 0)


# Is told of an operation of eager code, and returns its arguments; None if those of its kind change
# nothing.
BeforeOperation: TypeAlias = Callable[[Any, Any, Any], Any]


def _may_write(
    *, out: Any = None, inplace: bool = False, max_norm: float | None = None, **_: Any
) -> bool:
    """Return whether any operation writes on a tensor that is called with such arguments."""
    return out is not None or inplace is True or max_norm is not None


def is_ordinary(func: Any, kwargs: Any) -> bool:
    """Return whether a monitor of eager code runs an operation as it is."""
    return func in _ordinary and not (kwargs and _may_write(**kwargs))


def all_are_monitors() -> bool:
    """Return whether modes see this thread's operations, all of them monitors of eager code."""
    modes = function_modes()
    return bool(modes) and all(type(x) is OpMonitor and x._watch is not None for x in modes)


class OpMonitor(TorchFunctionMode):
    """Notes the operations of a function, and raises at those whose derivative would be wrong."""

    # The mode sees what Python calls, and `note_graph` what else a graph tells of:
    # torch.jit.script, DisableTorchFunction and callbacks of torch's leave nodes, too.

    # Attributes of the class: a trace of `__init__` would set each.
    _watch: BeforeOperation | None = None  # in a function of eager code
    _is_outermost = True  # no monitors alone are around it
    _tangents_from = 0  # the level of a jvp around the function; 0 for none
    _level = 0  # the innermost transform's around it
    _traced = -1  # how many operations torch.compile had traced before
    _watches = False  # whether this sees what it traces

    def __init__(
        self, *, per_sample: bool = False, writes: CopyOnWrite | None = None, more: int = 0
    ) -> None:
        self.more = more  # derivatives that gradkit takes of the first
        self._per_sample = per_sample  # fn is for one sample: train-mode batch norm raises
        self._writes = writes  # copies get what fn writes on tensors from outside
        self.outer = derivatives_around()
        self.is_nested = bool(transforms())
        # Operations that are wrong if the backward pass is batched; if it is differentiated; if
        # eager code differentiates the result.
        self._wrong_batched: list[str] = []
        self._wrong_derivative: list[str] = []
        self._wrong_outside: list[str] = []

    def noting(self) -> AbstractContextManager[object]:
        """Return what notes the operations of a block."""
        if torch.compiler.is_compiling():  # a trace would compile again for each count
            functions_traced()
            self._traced = operations_traced()
            # torch.compile fails at some operations of forward mode before they can be looked at.
            self._watches = FORWARD in derivatives_around() or is_watched()
            return self if self._watches else INSIDE
        return self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if torch.is_grad_enabled():
            self._tangents_from, self._level = jvp_level(), len(transforms())
        before = active_monitors()
        with (
            undone(partial(setattr, _active, "count", before)),
            undone(partial(set_compiles_scripted, compiles_scripted())),
            self,
            INSIDE,
        ):
            _active.count = before + 1
            set_compiles_scripted(False)
            yield

    def run(self, watch: BeforeOperation, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a function of eager code does, whose operations are noted, and watched."""
        # `noting` does the same by context managers, which take 8 us.
        self._watch, before, compiles = watch, active_monitors(), compiles_scripted()
        self._is_outermost = not all_are_monitors()

        try:
            try:
                _active.count = before + 1
                set_compiles_scripted(False)
                with with_function_modes(), self, INSIDE:
                    return fn(*args, **kwargs)
            finally:
                _active.count = before
                set_compiles_scripted(compiles)
        finally:  # again, as `undone` does it: an interrupt may have come in between
            _active.count = before
            set_compiles_scripted(compiles)

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it has a known bug here."""
        # torch.cond has its calls traced: torch's compiler cannot look up all functions in a set.
        if self._watch is None or _is_traced():
            if func is Tensor.unflatten:  # calls `super()`, which torch.compile cannot trace
                return args[0].unflatten(*args[1:], **(kwargs or {}))
            name = traced_by_formula(func) if self._traced >= 0 else None
            if name is not None:
                return TRACED_BY_FORMULA[name](func, *args, **(kwargs or {}))
            if self._traced >= 0 and name_of(func) is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._run(func, args, kwargs)
        if func in _ordinary and not (kwargs and _may_write(**kwargs)):
            if self._is_outermost or types:
                return func(*args, **kwargs) if kwargs else func(*args)
            with without_function_modes():  # all around are monitors, too: half of the time
                return func(*args, **kwargs) if kwargs else func(*args)
        if not transforms():  # a transform refuses what is outside
            watched = self._watch(func, args, kwargs or {})
            if watched is not None:
                args = watched
            elif len(_ordinary) < _MOST_ORDINARY and name_of(func) is None and not is_foreign(func):
                _ordinary.add(func)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(func)
        constants = self._tangents_from and not torch.is_grad_enabled()
        if name == BACKWARD_PASS:
            self.check()
        elif name == FUNCTION:
            args = _with_differentiated_jvp(args), *args[1:]
        elif name == ATTENTION:
            if not constants and attention.lacks_derivative(self.more):
                return attention.by_formula(func, *self._current((args, kwargs or {})))
        elif name is not None:
            is_functional, given = func in FUNCTIONAL, (args, kwargs or {})
            if constants:
                given = pytree.map_tensors(self._constant, given)
            elif name in table.BY_FORMULA:
                given = self._current(given)
            call = table.OpCall(*given, is_functional, derivatives_around(), self.outer)
            bug = table.BY_FORMULA.get(name)
            if bug is None or (name in table.REFUSED and not bug.when(call, ())):
                if self._note(name, call):
                    return table.FORMULAS[name](func, *call.args, **call.kwargs)
            elif not constants and self._needs_formula(name, call):
                if not _is_in_place(func):
                    return table.FORMULAS[name](func, *call.args, **call.kwargs)
                func, args, kwargs = Tensor.copy_, (args[0], _value_in_place(name, call)), {}
        if constants and not (self._writes and self._writes.redirects(func, kwargs)):
            args, kwargs = self._current((args, kwargs or {}))
            return self._run_on_constants(func, args, kwargs)
        watched = is_foreign(func) and not (constants or torch.compiler.is_compiling())
        written = foreign.graphs_written_on(func, args, kwargs) if watched else []
        if watched and self._watch is not None and torch.is_grad_enabled():
            written += foreign.constants_written_on(func, args, kwargs)
        if self._writes is not None:
            if constants:  # a tensor that is written keeps its own tangents
                args = (*args[:1], *pytree.map_tensors(self._constant, args[1:]))
            result = self._writes.run(func, args, kwargs or {})
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if watched:
            foreign.refuse_dropped(func, (args, kwargs), result, written)
        elif name == FUNCTION and not torch.compiler.is_compiling():
            note_labels(result, args[1:])
        has_graph = name == BACKWARD_PASS and (kwargs or {}).get("create_graph")
        if not has_graph or torch.compiler.is_compiling():
            return result
        # The gradient of a linear function has no graph, as one that the user's code has cut.
        roots = [x for x in map(unbatched, pytree.tensors(args[0])) if x.requires_grad]
        may_be_cut = functions_alive().users and user_functions(Subgraph(roots).kinds)
        if may_be_cut or hooks_registered() or FORWARD in transforms():
            return result
        return tuple(with_zero_derivatives(result, pytree.tensors(args)))

    def _needs_formula(self, name: str, call: table.OpCall) -> bool:
        """Return whether a derivative of an operation would be wrong without its formula."""
        bug = table.BY_FORMULA[name]
        if bug.wrong_now(call):
            return True
        if not bug.wrong_now(call.differentiated_by_eager_code()):
            return False
        # A derivative is wrong if eager code takes one of the result; torch.compile cannot tell.
        tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
        return torch.compiler.is_compiling() or any(map(recorded_outside, tensors))

    def _current(self, given: Any) -> Any:
        """Return arguments with the copies of what the function has written on in their place."""
        return given if self._writes is None else self._writes.current(given)

    def _run_on_constants(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation under no_grad on tensors without tangents: a jvp does not heed it."""
        name = getattr(func, "__name__", "")
        if name in {"__set__", "register_hook"}:
            return func(*args, **kwargs)
        if name == "__get__":  # x.T and x.real are views of x; others are no tensors, or its own
            result = func(*args, **kwargs)
            is_view = isinstance(result, Tensor) and result is not args[0]
            return self._constant(result) if is_view else result
        given: dict[int, tuple[Tensor, Tensor]] = {}

        def constant(tensor: Tensor) -> Tensor:
            cut = self._constant(tensor)
            given[id(cut)] = cut, tensor
            return cut

        args, kwargs = pytree.map_tensors(constant, (args, kwargs))
        result = func(*args, **kwargs)
        # An operation in place, and one that has nothing to do, returns what it was given.
        return pytree.map_tensors(lambda x: given[id(x)][1] if id(x) in given else x, result)

    def _constant(self, tensor: Tensor) -> Tensor:
        """Return a tensor without the tangents of the transforms around the function."""
        # Tangents of a level that the function itself has entered stay, and count.
        is_around = self._tangents_from <= level_of(tensor) <= self._level
        return tensor.detach() if is_around else tensor

    def _note(self, name: str, call: table.OpCall) -> bool:
        """Note a call of an operation, or refuse it; return whether its formula has to run."""
        bug = table.REFUSED[name]
        if name == "batch_norm" and self._per_sample and call.argument(5, "training"):
            expected = "a function of one sample at a time"
            got = "batch_norm in train mode, which mixes the samples of a batch, so that no sample "
            got += "has a separate gradient"
            fix = "module.eval(), or a GroupNorm in its place"
            raise UnsupportedGraphError(message("per_sample_grads", expected, got, fix))
        if bug.wrong_now(call):
            if bug.formula and not call.in_graph:
                return True
            _refuse(name)
        if bug.wrong_in(table.BATCHED, call):
            self._wrong_batched.append(name)
        if bug.wrong_in(table.DERIVATIVE_OF_BATCHED, call):
            self._wrong_derivative.append(name)
        if bug.wrong_now(call.differentiated_by_eager_code()):
            self._wrong_outside.append(name)
        return False

    def note_graph(self, below: Subgraph) -> None:
        """Note the operations in a graph as if they had been called here."""
        if table.CALLS_OF_NODES.keys().isdisjoint(kind.__name__ for kind in below.kinds):
            return
        for node in below.nodes:
            name, names = table.CALLS_OF_NODES.get(type(node).__name__, ("", {}))
            if not name:
                continue
            arguments = {
                argument: torch.empty(output_shape(node, 0), device="meta")
                if kept is table.RESULT
                else saved(node, kept)
                for argument, kept in names.items()
            }
            if name == "batch_norm":
                # instance_norm is a batch_norm of one sample that has all channels of all samples.
                name = "instance_norm" if output_shape(node, 0)[0] == 1 else name
                training = saved_or(True, node, "training")  # cuDNN's is that of training alone
                arguments |= {"training": training, "use_input_stats": training}
            stack = derivatives_around()
            self._note(name, table.OpCall((), arguments, False, stack, self.outer, in_graph=True))

    def check(self) -> None:
        """Raise if a backward pass through the operations so far would be wrong."""
        self.check_traced()
        stack = derivatives_around()
        if BATCH in stack and self._wrong_batched:
            _refuse(self._wrong_batched[0])
        if self._wrong_derivative and differentiated_around(stack, BATCH):
            _refuse(self._wrong_derivative[0])

    def check_traced(self, *, batches: bool = False) -> None:
        """Look at what torch.compile has traced; it begins again where one is to be watched."""
        facts = self._traced, self._watches, self.more, batches
        if self._traced >= 0 and (text := wrong_unseen(*facts)):
            raise UnsupportedGraphError(text)

    def check_derivative(self, below: Subgraph | None = None) -> None:
        """Raise if a derivative that eager code takes of a gradient would be wrong."""
        if below is not None:
            self.note_graph(below)
        wrong = [*self._wrong_outside, *(self._wrong_derivative if BATCH in transforms() else ())]
        if wrong:
            _refuse(wrong[0])

    def why_not_batched(self, loss: Tensor) -> str | None:
        """Return why a vmapped backward pass from a loss would be wrong, or None if it is right."""
        if torch.compiler.is_compiling():  # a trace shows no graph
            self.check_traced(batches=True)
        else:
            self.note_graph(Subgraph([loss]))
        wrong = list(self._wrong_batched)
        if not DERIVATIVES.isdisjoint(self.outer):
            wrong += self._wrong_derivative
        if wrong:
            return f"torch gets it silently wrong for {', '.join(dict.fromkeys(wrong))}"
        got = "in a vmap around the call it would be a batch of batches, for which some rules of "
        return f"{got}torch are silently wrong" if BATCH in self.outer else None


class ForwardMonitor(TorchFunctionMode):
    """Gives operations whose first derivative torch gets wrong, or drops, a formula, or refuses."""

    # Each inner step of a loop makes three of these. An `OpMonitor`, which also notes what later
    # derivatives would get wrong, takes 2.8 us to make, and this 0.5.

    def __init__(self, first: tuple[int, table.Stack] | None = None) -> None:
        super().__init__()
        self._alone = first is not None  # what `monitor_around` a first run had; none sees this one
        self.more, self.outer = first or (0, ())  # as in `OpMonitor`
        self._blocks = 1  # the open ones; torch.compile cannot trace a property here

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; inside a call of gradkit.func, its own monitor sees to that."""
        if not _is_traced() and func in _unnamed:
            return func(*args, **kwargs) if kwargs else func(*args)
        is_watched = self._blocks and torch.is_grad_enabled()
        is_watched = is_watched and (self._alone or not active_monitors())
        name = name_of(func) if is_watched else None
        if name == FUNCTION:
            args = _with_differentiated_jvp(args), *args[1:]
        elif name == ATTENTION:
            if attention.lacks_derivative(self.more):
                return attention.by_formula(func, args, kwargs or {})
        elif name is not None and name != BACKWARD_PASS:
            return _run_in_eager_code(name, func, args, kwargs or {}, self.outer)
        elif is_watched and not (_is_traced() or name or is_foreign(func)):
            _unnamed.update([func] if len(_unnamed) < _MOST_ORDINARY else [])
        is_watched = is_watched and is_foreign(func) and not torch.compiler.is_compiling()
        written: foreign.Written = []
        if is_watched:
            written += foreign.graphs_written_on(func, args, kwargs or {})
            written += foreign.constants_written_on(func, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if is_watched:
            foreign.refuse_dropped(func, (args, kwargs), result, written)
        return result


def monitor_around() -> tuple[int, table.Stack] | None:
    """Return `more` and `outer` of the monitors that see operations here, if there are any."""
    monitors = [x for x in function_modes() if isinstance(x, (OpMonitor, ForwardMonitor))]
    return (max(one.more for one in monitors), monitors[-1].outer) if monitors else None


@contextmanager
def watched_again(first: table.Stack, monitor: tuple[int, table.Stack] | None) -> Iterator[None]:
    """Watch the operations of a second run as those of the first, with these around, were."""
    before, seeing = active_monitors(), [x for x in function_modes() if isinstance(x, OpMonitor)]
    with undo_stack() as stack:
        stack.enter_context(undone(partial(setattr, _active, "count", before)))
        stack.enter_context(as_in_first_run(first))
        if monitor is not None:
            _active.count = before + 1
            for one in seeing:  # modes that see what is around the second run
                stack.enter_context(undone(partial(setattr, one, "outer", one.outer)))
                one.outer = monitor[1]
        # A monitor does not see what the rule of a Function that it runs calls.
        with INSIDE if monitor is None or seeing else ForwardMonitor(monitor):
            yield


def _run_in_eager_code(name: str, func: Any, args: Any, kwargs: Any, outer: table.Stack) -> Any:
    """Run an operation, by its formula where a first derivative of it would be wrong."""
    if any(map(carries_graph, pytree.tensors((args, kwargs)))) or differentiated():
        stack = derivatives_around()
        if DERIVATIVES.isdisjoint(stack):
            stack = (table.EAGER, *stack)
        call = table.OpCall(args, kwargs, func in FUNCTIONAL, stack, outer)
        bugs = table.BY_FORMULA.get(name), table.REFUSED.get(name)
        bug = next((bug for bug in bugs if bug is not None and bug.wrong_now(call)), None)
        if bug is not None:
            if bug.formula is None:
                _refuse(name)
            if _is_in_place(func):
                return args[0].copy_(_value_in_place(name, call))
            return table.FORMULAS[name](func, *args, **kwargs)
    return func(*args, **kwargs)


def _value_in_place(name: str, call: table.OpCall) -> Tensor:
    """Return what an operation in place is to write, by its formula."""
    written, *others = call.args
    operation, formula = getattr(Tensor, name), table.FORMULAS[name]
    value: Tensor = formula(operation, written.clone(), *others, **call.kwargs)
    return value


def _is_in_place(func: Any) -> bool:
    """Return whether an operation that has a formula writes on its first argument."""
    return func is IPOW or getattr(func, "overloadpacket", func) in _IN_PLACE


def _refuse(name: str) -> NoReturn:
    owners = torch, torch.linalg, torch.special
    owner = next(owner.__name__ for owner in owners if hasattr(owner, name))
    bug, expected = table.REFUSED[name], "an operation whose derivative torch gets right here"
    got = f"{name}: {bug.what}"
    raise UnsupportedGraphError(message(f"{owner}.{name}", expected, got, bug.fix))


# The jvp of a user's Function is differentiated as the code that it is. torch switches forward mode
# off while it runs one, and a jvp around it loses its own tangents there:
# https://github.com/pytorch/pytorch/issues/197867
def _with_differentiated_jvp(args: Sequence[Any]) -> Any:
    """Return the first argument, a Function, with a jvp that others can differentiate if needed."""
    function, *given = args
    stack = derivatives_around()
    if function in _made or FORWARD not in stack:
        return function
    is_differentiated = differentiated_around(stack, FORWARD) or any(
        isinstance(x, Tensor) and recorded_outside(x) for x in given
    )
    return _made_differentiable(function) if is_differentiated else function


class DifferentiatedJvps(TorchFunctionMode):
    """Sees the Functions that others call: in a jvp, a backward, a rule for vmap."""

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if func is apply_function:
            args = _with_differentiated_jvp(args), *args[1:]
        return func(*args, **kwargs or {})


_made: WeakSet[Any] = WeakSet()


def _made_differentiable(function: Any) -> Any:
    """Return a Function with the same results, for which forward mode stays on in its jvp."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The tangents of the level whose jvp is about to run are no part of what that computes.
        given: dict[int, Any] = {}

        def primal(tensor: Tensor) -> Tensor:
            result = without_innermost_tangent(tensor)
            given[id(result)] = tensor
            return result

        mark_dirty: Any = WeakMethod(ctx.mark_dirty)  # a node would else refer to itself
        ctx.mark_dirty = lambda *xs: mark_dirty()(*[given.get(id(x), x) for x in xs])
        with torch.enable_grad(), forward_mode_on(), DifferentiatedJvps(), INSIDE:
            function.setup_context(ctx, pytree.map_tensors(primal, inputs), output)
        given.clear()

    def jvp(ctx: Any, *tangents: Any) -> Any:
        with forward_mode_on(), DifferentiatedJvps(), INSIDE:
            return function.jvp(ctx, *tangents)

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with DifferentiatedJvps(), INSIDE:
                return method(*args)

        return call

    methods = {"setup_context": setup_context, "jvp": jvp, "backward": watched(function.backward)}
    if function.vmap is not Function.vmap:
        methods["vmap"] = watched(function.vmap)
    members: dict[str, Any] = {name: staticmethod(method) for name, method in methods.items()}
    members["__module__"] = function.__module__  # of the user's, as its nodes are
    made = type(function)(function.__name__, (function,), members)
    _made.add(made)
    return made
