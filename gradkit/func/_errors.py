"""The errors of torch.func, and what to do about each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradkit._autograd.engine import reason_of
from gradkit._compat.dynamo import explanations, is_exporting
from gradkit._compat.nodes import CHANGED
from gradkit._compat.transforms import BATCH, BATCH_FAILURES, transforms
from gradkit._state import rng
from gradkit._torch_bugs.missing import OF_NESTED, way_out_of
from gradkit.errors import (
    DetachedLossError,
    FreedGraphError,
    GradkitError,
    LeafTypeError,
    UnsupportedGraphError,
    message,
)

R = TypeVar("R")
_MAKE_FUNCTIONAL = "call, params, buffers = gradkit.func.make_functional(module)"


def named_errors(run: Callable[[], R], *, nested: bool = False) -> R:
    """Return what `run` returns; errors of torch.func raise with what to do."""
    # The random states of all devices are as before after any error. Known errors are told; and all
    # of torch's inside of another transform, or if `run` is `nested` ones: in one level alone they
    # are mostly mistakes of fn, and torch's text says which.
    if torch.compiler.is_compiling():
        if is_exporting():  # the program would return tensors of the trace
            expected = "a call that runs, or that torch.compile traces"
            fix = "export the model, and differentiate what the exported program returns"
            raise UnsupportedGraphError(message("fn", expected, "torch.export", fix))
        return run()
    states = [] if rng.is_capturing() else rng.states()
    try:
        return run()
    except BaseException as error:
        rng.restore(states)
        if _takes_parameters(error):
            text = f"params[{error}]" if isinstance(error, KeyError) else str(error)
            got = f"a function that takes them for the module: {text}"
            expected = "a function of a dict of parameters, as a module that is an argument is"
            raise LeafTypeError(message("fn", expected, got, _MODULE_IS_A_DICT)) from error
        if FREED in str(error) and not isinstance(error, GradkitError):
            got = "a pass in fn that frees what the losses, or another pass, need"
            fix = "torch.autograd.grad(y, x, create_graph=True), or retain_graph=True"
            expected = "a graph that still holds its saved tensors"
            raise FreedGraphError(message("fn", expected, got, fix)) from error
        why = _why_refused(error, nested) if isinstance(error, Exception) else None
        if why is None:
            raise
        raise UnsupportedGraphError(message("fn", *why)) from error


def _why_refused(error: Exception, nested: bool) -> tuple[str, str, str] | None:
    """Return what was expected of fn, what came and what to do; None if the error says it all."""
    name = _control_flow(error)
    if name is not None:
        fix = f"use {_IN_ITS_PLACE[name]}; or, for a first derivative, {_EAGERLY}"
        return _DIFFERENTIABLE, f"torch's {name}, which torch.func cannot enter", fix
    if not isinstance(error, BATCH_FAILURES):
        return None
    hook = _hook_that_requires_grad(error)
    if hook is not None:
        return _DIFFERENTIABLE, hook, _REMOVE
    text = str(error).partition("\n")[0].partition(" Hint: ")[0].rstrip(".")
    if any(_module_of(frame).startswith("torch.nested") for frame in _frames(error)):
        return "dense tensors", *OF_NESTED
    if not isinstance(error, GradkitError):
        reason = reason_of(error)
        if reason is not None:
            return reason
        for known, (expected, got, fix) in _KNOWN.items():
            if any(part in str(error) for part in known):
                got, fix = _of_torch(error) or (got, fix)
                return expected, got or text, fix
    stack = transforms()
    # The last frame in the backward of a user's Function is the user's.
    is_torch_s = _raised_by_torch(error) or text.startswith(_DYNAMIC_SHAPE)
    if not ((stack or nested) and is_torch_s):
        return None
    expected, fix = _BATCHED if BATCH in stack else _NESTED
    return expected, text, fix


_DYNAMIC_SHAPE = "vmap: We do not support batching operators that can support dynamic shape"


def _frames(error: Exception) -> Iterator[FrameType]:
    return (frame for frame, _ in walk_tb(error.__traceback__))


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _takes_parameters(error: BaseException) -> bool:
    """Return whether an error is of a function that takes a dict of tensors for the module."""
    # A ParameterList is a dict of strings, too.
    is_index = isinstance(error, KeyError) and type(next(iter(error.args), None)) is int
    if not (is_index or str(error).startswith("'dict' object ")):
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    dicts = (x for x in frame.f_locals.values() if type(x) is dict)
    return any(x and all(isinstance(v, Tensor) for v in x.values()) for x in dicts)


def _control_flow(error: Exception) -> str | None:
    """Return the name of torch's control flow that raised an error of its own, if it did."""
    modules = [_module_of(frame) for frame in _frames(error)]
    if isinstance(error, GradkitError) or not modules[-1].startswith("torch."):
        return None
    names = (module.removeprefix(_HIGHER_ORDER) for module in modules if _HIGHER_ORDER in module)
    return next((name for name in names if name in _IN_ITS_PLACE), None)


def _of_torch(error: Exception) -> tuple[str, str] | None:
    """Return what came, and what to do, if torch's own Function or operator has no rule."""
    operator = re.search(r"forward AD with (\w+) that", str(error))
    way_out = operator and way_out_of(operator[1])
    if way_out:
        return "", f"vjp in place of jvp; or {way_out}"
    *_, frame = _frames(error)
    function: Any = frame.f_locals.get("cls")
    if _SETUP_CONTEXT not in str(error) or not _module_of(frame).startswith("torch.autograd"):
        return None
    # torch._library makes the Functions of operators that users have registered.
    module = str(getattr(function, "__module__", ""))
    if not module.startswith("torch.") or module.startswith("torch._library."):
        return None
    fix = _OF_GAMMAS if function.__name__ == "_Dirichlet" else ""
    return (
        f"{function.__name__}, an autograd.Function of torch that it cannot enter",
        _EAGERLY + fix,
    )


def _hook_that_requires_grad(error: Exception) -> str | None:
    """Return, in words, a hook of a module that has called requires_grad_(), if one raised."""
    if not str(error).startswith("You are attempting to call Tensor.requires_grad_()"):
        return None
    for frame, called in pairwise(_frames(error)):
        module: Any = frame.f_locals.get("self")
        if not isinstance(module, torch.nn.Module):
            continue
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if getattr(hook, "__code__", None) is called.f_code:
                kind = type(module).__name__
                return f"a call of requires_grad_() by {hook.__name__}, a forward hook of {kind}"
    return None


def _raised_by_torch(error: Exception) -> bool:
    """Return whether an operator of torch raised an error, not the caller's own code."""
    # torch's own are of these two classes, and subclasses that say what they are (out of memory).
    # An operator fails in the frame of OpMonitor, of a pass, or of torch's code that called it;
    # the last frame of what the caller's code raises is the caller's.
    if type(error) not in (*BATCH_FAILURES, NotImplementedError) or error.__traceback__ is None:
        return False
    *_, frame = _frames(error)
    return _module_of(frame).partition(".")[0] in {"gradkit", "torch"}


_BATCHED = (
    "a function of one sample, or of one task, that torch.vmap can batch",
    "if fn fails on one by itself, too, mend it (a module may need x[None]); else take them in a "
    "loop: gradkit.func.value_and_grads(fn)(params, x[i]), and gradkit.tree.stack",
)
_NESTED = (
    "what torch.func can differentiate once more",
    "if fn fails by itself, too, mend it; else the other mode of hvp; or two eager passes of "
    "gradkit.value_and_grads, the first with create_graph=True",
)
HOOKED_CONSTANT = "register a hook on a tensor that doesn't require gradient"
FREED = "Trying to backward through the graph a second time"
_MODULE_IS_A_DICT = (
    "call torch.func.functional_call(model, params, (x,)) in fn, or what "
    "gradkit.func.make_functional(model) gives; params['weight'], not params.weight; "
    "params['0'], not params[0]"
)
_DIFFERENTIABLE = "what torch.func can differentiate"
_EAGERLY = "compute the losses eagerly: gradkit.value_and_grads(losses, params)"
_SETUP_CONTEXT = "setup_context"
# The samples have the same distribution, and torch.func has the pathwise derivative of a Gamma.
_OF_GAMMAS = (
    "; or sample Gammas, g = torch.distributions.Gamma(concentration, 1.0).rsample(), of which "
    "g / g.sum(-1, keepdim=True) is a Dirichlet, and g[..., 0] / g.sum(-1) a Beta"
)
_REMOVE = (
    "remove the hook: handle.remove(); for a model of transformers, which has it for gradient "
    "checkpointing, model.gradient_checkpointing_disable() and model.disable_input_require_grads()"
)
_HIGHER_ORDER = "torch._higher_order_ops."
# The keys are the modules of torch that have the operation.
_IN_ITS_PLACE = {
    "cond": "torch.where, or an if of Python",
    "scan": "a loop of Python",
    "while_loop": "a loop of Python",
    "map": "torch.vmap, or a loop of Python",
}
RANDOM = "randomness error mode"
NOT_RANDOM = (
    'no random operation, with randomness="error"',
    "one: dropout, say",
    'randomness="different" for other numbers in each sample, or "same"',
)
ZERO_TENSOR = "ZeroTensors are immutable"
RUNS_BACKWARD = (
    _DIFFERENTIABLE,
    "a call of backward(), retain_grad() or requires_grad_(), or of torch.autograd.functional",
    "nest gradkit.func or torch.func calls, and return intermediate values as aux; or, for a first "
    f"derivative, {_EAGERLY}",
)
WRITES_OUTSIDE = (
    _DIFFERENTIABLE,
    "an in-place operation on a tensor from outside: batch norm in train mode, say",
    f"{_MAKE_FUNCTIONAL}, and return the new buffers as aux; or, for a first derivative, "
    f"{_EAGERLY}",
)
WRITES_ON_ARGUMENT = (
    "a function that leaves its arguments as they are",
    "one that changes an argument in place",
    "change a copy: x = x.clone(); a module with inplace=True takes x.clone()",
)
# The expectation, what came (torch's text if empty), and what to do, by parts of torch's text.
_KNOWN = {
    ("saved tensor hooks", "vmap over _NoopSaveInputs"): (  # the latter: a checkpoint in torch 2.11
        _DIFFERENTIABLE,
        "saved-tensor hooks: a checkpoint, or save_on_cpu",
        f"gradkit.func.checkpoint(fn)(x) in the place of a checkpoint; or {_EAGERLY}",
    ),
    (
        "backward() called inside a functorch transform",
        "inside of a function being transformed by a functorch transform",
    ): RUNS_BACKWARD,
    ("would mutate a captured Tensor",): WRITES_OUTSIDE,
    ("returned as-is as output is being saved",): (
        "a Function that saves a view of an input that it returns as it is",
        "one that saves the input itself",
        "return and save a view, in forward: return x.view_as(x)",
    ),
    (HOOKED_CONSTANT,): (
        "a function whose hooks are on tensors with a graph",
        "one that registers a hook where no backward pass follows: in forward mode, or by "
        "differences",
        "vjp or linearize in place of jvp; or register it where h.requires_grad only",
    ),
    (_SETUP_CONTEXT,): (
        _DIFFERENTIABLE,
        "an autograd.Function whose forward takes ctx, an operator of torch.library that has one, "
        "or a full backward hook of a module",
        f"give the Function a setup_context staticmethod; or {_EAGERLY}",
    ),
    (RANDOM,): NOT_RANDOM,
    ("while the running_mean or running_var",): (
        "a function of one sample at a time",
        "a norm layer that updates its running statistics from a batch",
        "module.eval(), or track_running_stats=False",
    ),
    ("aten._has_same_storage_numel",): (  # of the first thing that make_dual does
        "tensors that have forward-mode derivatives in torch",
        "DTensors, which have none",
        'hvp(..., mode="reverse-over-reverse"), or linearize in place of jvp',
    ),
    ("Cannot access storage of Sparse",): (
        "dense tensors, in forward mode",
        "sparse ones, which have no tangents in torch",
        'hvp(..., mode="reverse-over-reverse"), or vjp in place of jvp',
    ),
    ("NestedTensorImpl doesn't support",): (
        "dense tensors",
        "nested ones, which torch.func cannot wrap",
        f"pass their parts, and nest them in fn; or {_EAGERLY}",
    ),
    ("forward AD", "forward mode AD", ZERO_TENSOR): (
        "operations that have a forward-mode derivative",
        "",
        'vjp in place of jvp; hvp(..., mode="reverse-over-reverse") and linearize, where torch has '
        "the second derivative",
    ),
    CHANGED: (
        "a function that leaves what its derivative needs as it is",
        "",
        "y = y + 1 in the place of y.add_(1); where fn writes on nothing, a formula of torch does, "
        'of a norm or std in forward mode: hvp(..., mode="reverse-over-reverse")',
    ),
    ("Inference tensors cannot be saved", "requires_grad=True on inference tensor"): (
        "tensors that autograd can save for the backward pass",
        "one that was made in inference mode",
        "tensor.clone(), outside of torch.inference_mode()",
    ),
    ("leaf Variable that requires grad is being used in an in-place",): WRITES_ON_ARGUMENT,
    ("mutating directly with `.data`",): (
        "a function that leaves its arguments as they are",
        "an assignment to the .data of an argument",
        "compute what it should be as a value, and use that: w = torch.renorm(w, 2, 0, 1.0)",
    ),
    ("data pointer of Tensor that doesn't have storage", "Can't call numpy()"): (
        _DIFFERENTIABLE,
        "an operation that reads memory: numpy(), tolist(), or ctc_loss whose lengths are tuples",
        f"give it constants from outside, lengths as tensors; or {_EAGERLY}",
    ),
}


def explain_compiled(text: str, always: bool) -> str | None:
    """Return what a message says of an error of torch.compile; None for none that is known."""
    for known, (expected, got, fix) in (_COMPILED | _KNOWN).items():
        if any(part in text for part in known):
            fix = f"{fix}; or leave the call uncompiled: torch.compiler.disable(call)"
            return message("fn", expected, got or _line_with(text, known), fix)
    if not always:
        return None
    expected = "a function that torch.compile traces inside of a derivative"
    raised = re.search(r"got (\w+)\(['\"](.*)['\"]\)", text)
    got = raised[2] if raised else text.strip().partition("\n")[0]
    fix = "leave the call uncompiled: torch.compiler.disable(call)"
    return message("fn", expected, got[:_LONGEST].rstrip("."), fix)


def _line_with(text: str, parts: Iterable[str]) -> str:
    line = next(x for x in text.split("\n") if any(part in x for part in parts))
    return line.strip().rstrip(".")[-_LONGEST:]


_LONGEST = 300
explanations.append(explain_compiled)
# The same by parts of what torch.compile says.
_COMPILED = {
    ("native::_fw_primal",): (
        "operations whose forward-mode derivative torch.compile traces",
        "one that it does not: a normalization called as an operator of torch's, say",
        'hvp(..., mode="reverse-over-reverse"), and vjp in place of jvp',
    ),
    ("Attempted to wrap RNN, GRU, or LSTM",): (
        "modules that torch.compile traces",
        "an RNN, a GRU or an LSTM",
        "torch._dynamo.config.allow_rnn = True",
    ),
    ("is not possible because there exists a Tensor",): (
        "a function of one sample that torch.vmap can batch",
        "a write of what depends on the sample on a tensor that does not",
        "make it by torch.stack, torch.where or x.new_zeros(...), of a tensor of the sample",
    ),
    ("Expected FakeTensor, got",): (
        "operations that torch.compile traces inside of a derivative",
        "one that it does not: torch.cond, say",
        "torch.where, or an if of Python, in place of torch.cond",
    ),
}


def independent(where: str) -> DetachedLossError:
    """Return the error for what does not depend on the arguments of a function."""
    expected = "a loss computed from the arguments that argnums names"
    got = (
        "one that does not depend on them: fn uses a module, or tensors, from outside, or cuts "
        "the path (detach(), .data, .item(), no_grad, create_graph=False, nn.Parameter(w))"
    )
    fix = f"compute it from fn's own arguments: {_MAKE_FUNCTIONAL}"
    return DetachedLossError(message(where, expected, got, fix))
