"""What torch.compile leaves to the interpreter, and what a compiled backward pass cannot do."""

from __future__ import annotations

import inspect
import os
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from gradkit import errors
from gradkit._compat.transforms import (
    allow_saved_tensor_hooks,
    is_transform_tensor,
    levels_put_back_on_error,
    transforms,
)
from gradkit._compat.undoing import INSIDE
from gradkit.errors import message

_dynamo: Any = torch._C._dynamo.eval_frame
_LEAVE = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)
_REASON = (
    "gradkit's eager calls read the graph of losses that exist already. Call them outside of what "
    "is compiled, or leave out fullgraph=True; gradkit.func is compiled in one graph"
)

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

COMPILED = "CompiledFunctionBackward"  # the type of the node of what torch.compile has compiled
F = TypeVar("F", bound=Callable[..., Any])


def disable_compile(function: F) -> F:
    """Let a compiled function call this one as it is, and all that it calls."""
    # torch.compile would take apart its frames one by one, in seconds and for nothing. torch's own
    # `disable` would import the compiler, and cost each call a wrapper:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/compiler/__init__.py#L250
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    # A context manager wraps a generator, whose code this is.
    code: CodeType = getattr(function, "__wrapped__", function).__code__
    _dynamo.set_code_exec_strategy(code, _LEAVE)
    return function


def leave_uncompiled(method: F) -> F:
    """Keep the method by which a mode sees operations out of what torch.compile compiles."""
    # Compiled code inside of a mode breaks at each operation, and torch compiles the frame of this
    # method with the operation as a constant: the next one would silently compute the first one.
    _dynamo.set_code_exec_strategy(cast("Any", method).__code__, _LEAVE)
    return method


def run_in_trace(function: F) -> F:
    """Let torch.compile run a function while it traces a call, and take the result for constant."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


# Functions that say why something cannot be compiled, given a text of torch's, and if any counts.
explanations: list[Callable[[str, bool], str | None]] = []


@run_in_trace
def begin_trace() -> None:
    """Have what is compiled of a call leave no state behind if it fails, and say what to do."""
    from torch._dynamo import convert_frame  # the compiler: imported by now

    output = _tracer().output
    if not hasattr(output.compiler_fn, "of_gradkit"):
        output.compiler_fn = _guarded_backend(output.compiler_fn)
        output.add_cleanup_hook(_allow_saved_tensor_hooks)
    handle: Any = convert_frame.exception_handler
    if not hasattr(handle, "of_gradkit"):

        @wraps(handle)
        def exception_handler(error: Exception, *args: Any, **kwargs: Any) -> None:
            handle(error, *args, **kwargs)
            is_ours = _PACKAGE in str(error) or "What to do:" in str(error)
            if is_ours and not _is_in_call():
                _explain(error)

        vars(exception_handler)["of_gradkit"] = True
        vars(convert_frame)["exception_handler"] = exception_handler


def _is_in_call() -> bool:
    """Return whether gradkit's code runs, and is not traced: it names errors by itself."""
    # torch compiles the bodies of torch.cond, scan and while_loop where they are called.
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and path != __file__:
            return True
    return False


def _allow_saved_tensor_hooks() -> None:
    # torch leaves them disabled where an error ends the tracing of a derivative.
    if not transforms():
        allow_saved_tensor_hooks()


def _explain(error: Exception) -> None:
    """Make an error of torch.compile one of gradkit's, too, with what to do in its text."""
    from torch._dynamo.exc import TorchDynamoException

    raised = re.search(r"raised exception (\w+)\((.*)\)", str(error))
    kind = getattr(errors, raised[1], None) if raised else errors.UnsupportedGraphError
    if not (isinstance(kind, type) and issubclass(kind, errors.GradkitError)):
        return  # an exception of the user's own
    text, given = str(error), error.args
    if raised is not None and not text.startswith(own := _text_of(raised[2])):
        error.args = f"{own}\n\n{text}", *given[1:]
    elif raised is None and "What to do:" not in text:
        explained = (
            explain(text.partition("from user code:")[0], True) for explain in explanations
        )
        error.args = f"{next(explained)}\n\n{text}", *given[1:]
    if not isinstance(error, kind):
        if not isinstance(error, TorchDynamoException):  # an assertion: it takes no other class
            raise kind(*error.args) from error
        of_torch: Any = type(error)
        members = {"__module__": of_torch.__module__}
        error.__class__ = type(of_torch.__name__, (of_torch, kind), members)


def _text_of(written: str) -> str:
    """Return the text of an error, as Python has written it among torch's own."""
    try:
        return str(literal_eval(written))
    except (SyntaxError, ValueError):  # an error of several arguments
        return written


def _guarded_backend(backend: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backend)
    def compiler(*args: Any, **kwargs: Any) -> Any:
        _drop_guards(_tracer().output.guards)
        compiled = guarded(backend)(*args, **kwargs)
        # The graph may enter transforms of torch.func, which no `finally` leaves.
        enters_levels = any("nesting" in str(node.target) for node in args[0].graph.nodes)
        return guarded(compiled) if enters_levels else compiled

    def guarded(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                with levels_put_back_on_error():
                    return run(*args, **kwargs)
            except Exception as error:
                explained = (explain(str(error), False) for explain in explanations)
                text = next(filter(None, explained), None)
                if text is None or isinstance(error, errors.GradkitError):
                    raise
                raise errors.UnsupportedGraphError(text) from error

        return call

    vars(compiler)["of_gradkit"] = True
    return compiler


_NEVER_REPLACED = set(
    map(id, (Tensor, torch.compiler, torch.func, torch.enable_grad, nn.Module, INSIDE))
)
_READ = re.compile(r"G\['__import_(gradkit\w*)'\]((?:\.\w+)*)(.*)")


def _drop_guards(guards: Any) -> None:
    """Let a compiled call not look at gradkit's functions, classes and constants each time."""

    def is_fixed(guard: Any) -> bool:
        module, path, inside = (_READ.findall(guard.name) or [("", "", "")])[0]
        owner = value = cast("Any", sys.modules.get(module.replace("_dot_", ".")))
        names = path.split(".")[1:]
        while names and isinstance(value, ModuleType):
            owner, value = value, getattr(value, names.pop(0), None)
        # What gradkit has defined stays; of what it has imported, and of objects, the name alone.
        is_ours = str(getattr(owner, "__name__", "")).startswith("gradkit")
        if names or inside:
            is_defined = str(getattr(value, "__module__", "")).startswith("gradkit")
            kinds = str, tuple, frozenset, *((type, FunctionType) if is_defined else ())
            return is_ours and isinstance(value, kinds)
        # Lists, dictionaries, sets and numbers are state, which a later call may find changed.
        is_constant = callable(value) or isinstance(value, str | tuple | frozenset | ModuleType)
        return (is_ours and is_constant) or id(value) in _NEVER_REPLACED

    guards.inner = type(guards.inner)(guard for guard in guards.inner if not is_fixed(guard))


_traced: list[str] = []  # the Functions that torch.compile has traced


@run_in_trace
def functions_traced() -> int:
    """Return how many Functions were traced; from now on, those that would go wrong are refused."""
    # torch.compile inlines `forward` under any transforms but one grad, and silently ignores
    # `backward`. Not reported. Run on torch 2.13.
    from torch._dynamo.exc import Unsupported  # the compiler: imported by now
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable

    apply: Any = AutogradFunctionVariable.call_apply
    if hasattr(apply, "__wrapped__"):
        return len(_traced)

    @wraps(apply)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        _traced.append(self.fn_cls.__name__)
        if transforms() not in {(), ("Grad",)} and _is_traced_in_gradkit(tx):
            given = (*args, *kwargs.values())
            trackers = [one for one in given if isinstance(one, TensorVariable)]
            values = [one.as_proxy().node.meta["example_value"] for one in trackers]
            if any(map(is_transform_tensor, values)):
                raise Unsupported(inlined_function())
        return apply(self, tx, args, kwargs)

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]
    _leave_frames()
    return len(_traced)


# The folders of what public calls call; nobody compiles it by itself.
_ROOMS = tuple(
    f"{_PACKAGE}{room}{os.sep}"
    for room in ("_autograd", "_checks", "_core", "_state", "_torch_bugs", "func")
)


def _leave_frames() -> None:
    """Let the functions inside of a call run as they are where its graph breaks in their midst."""
    # torch would compile them frame by frame below a graph break, on tensors of a transform, of
    # which it makes no fake ones. Those that it inlines, it traces all the same.
    public = list(vars(sys.modules["gradkit.func"]).values())
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(_ROOMS):
            classes = [x for x in vars(module).values() if isinstance(x, type)]
            for value in chain(*(vars(owner).values() for owner in (module, *classes))):
                code = getattr(inspect.unwrap(value), "__code__", None)
                if isinstance(code, CodeType) and not any(value is one for one in public):
                    _dynamo.set_code_exec_strategy(code, _LEAVE)


@run_in_trace
def inlined_function() -> str:
    """Return what a message says of the last Function: its derivative would be wrong compiled."""
    expected = "in what is compiled, Functions under one first-order reverse-mode call"
    got = f"{_traced[-1]} under a vmap, a jvp or a second derivative, where torch.compile "
    got += "differentiates its forward, and ignores its backward"
    return message("fn", expected, got, "leave the call uncompiled: torch.compiler.disable(call)")


@run_in_trace
def is_exporting() -> bool:
    """Return whether torch.export traces; torch.compile of torch 2.11 says so of itself, too."""
    return torch.compiler.is_exporting()


@run_in_trace
def operations_traced() -> int:
    """Return how many operations torch.compile has traced."""
    return len(_tracer().output.graph.nodes)


@run_in_trace
def is_watched() -> bool:
    """Return whether the trace began again, to have a mode see its operations."""
    return hasattr(_tracer().speculation_log, "watched_by_gradkit")


def trace_again_watched() -> None:
    """Let the trace begin again, with a mode that sees its operations."""
    from torch._dynamo.exc import UnspecializeRestartAnalysis

    _tracer().speculation_log.watched_by_gradkit = True
    raise UnspecializeRestartAnalysis(restart_reason="gradkit watches its operations")


def is_higher_order(function: Any) -> bool:
    """Return whether a function takes functions whose operations are traced apart."""
    return isinstance(function, torch._ops.HigherOrderOperator)


def traced_since(count: int) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """Yield the functions traced since, with their arguments and results as they are in a trace."""

    def value(node: Any) -> Any:
        return node.meta.get("example_value")

    for node in islice(_tracer().output.graph.nodes, count, None):
        if node.op == "call_function":
            function = node.target
        elif node.op == "call_method":
            function = getattr(torch.Tensor, node.target)
        else:
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        yield function, args, kwargs, value(node)


def _tracer() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator  # imported by now

    return InstructionTranslator.current_tx()


def _is_traced_in_gradkit(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return True
        frame = frame.parent
    return False


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is what torch.compile has returned for another. Run on torch 2.13."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported before it is used
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def any_compiled(kinds: Iterable[type]) -> bool:
    """Return whether one of these types of nodes is that of compiled functions' backward passes."""
    return COMPILED in {kind.__name__ for kind in kinds}


def compiled_together(losses: str) -> tuple[str, str, str]:
    """Return what a message says of a value that was compiled together with what is made of it."""
    return (
        f"a value with a path from {losses}",
        "one that a compiled function has returned along with what it made of it: its graph does "
        "not show whether, and how, the one depends on the other",
        "return the value alone, and compute the rest outside of what is compiled; or do not "
        "compile this part",
    )


def overwrites_saved_tensors(kind: Any) -> bool:
    """Return whether the compiled backward pass of a kind of node can run only once."""
    # The first pass through a compiled graph decides: one that frees the graph lets it write its
    # results where saved tensors were ("donated buffers"). Run on torch 2.13.
    if kind.__name__ != COMPILED:
        return False
    compiled = kind._forward_cls
    donated = getattr(getattr(compiled, "metadata", None), "bw_donated_idxs", None)
    is_settled = getattr(compiled, "compiled_bw", None) is not None
    return is_settled and bool(donated) and torch._functorch.config.donated_buffer
