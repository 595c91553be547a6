"""The gradients of intermediate tensors: what `retain_grad()` was meant for, without its traps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradkit._compat.autograd import current_pass
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import is_transform_tensor, transforms
from gradkit._core import pytree, tensor_nodes, user_code
from gradkit._core.leaf_arithmetic import add_leaves
from gradkit._core.options import check_bool
from gradkit._core.ownership import copy_for
from gradkit._core.pass_observers import observing
from gradkit._core.pytree import PyTree
from gradkit.errors import (
    LeafTypeError,
    OptionError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)

__all__ = ["RetainedGrads", "safe_retain"]

# Of the name of a module, and a tree of what one run of it was given, or has returned.
_SeeRun: TypeAlias = Callable[[str, PyTree], None]


class _GradRecorder:
    """Records the gradients that arrive at one tensor, for the value that it has now."""

    def __init__(self, tensor: Tensor, where: Callable[[], str]) -> None:
        self.tensor = tensor
        self.edge: GradientEdge = tensor_nodes.edge(tensor)
        self.passes: list[Tensor] = []
        self._where = where
        self._version = tensor._version
        # The hook stays on the node of this version when the tensor is changed in place [L1].
        self._handle = user_code.register_own_hook(tensor, self._record)

    def _record(self, grad: Tensor | None) -> None:
        if grad is not None:  # None is an undefined gradient [D10]
            # A copy, because the node below may write on its cotangent [L3].
            self.passes.append(copy_for(grad, self.tensor))

    def require_same_history(self) -> None:
        """Raise if the tensor is a view that was changed in place: its history is rebuilt [L2]."""
        tensor = self.tensor
        if tensor.grad_fn is not None and tensor._is_view() and tensor._version != self._version:
            where, expected = self._where(), "a tensor whose history stays as it was at the call"
            got = "a view that was changed in place since, directly or through its base: torch "
            got += "rebuilds its history, so that gradients no longer arrive at the former value"
            fix = f"pass a clone, h = h.clone(), instead of {where}; or change a copy"
            raise UnsupportedGraphError(message(where, expected, got, fix))

    def remove(self) -> None:
        self._handle.remove()


def _require_graph(tensor: object, where: Callable[[], str]) -> None:
    if not isinstance(tensor, Tensor):
        do = "pass tensors; for the outputs of a module, safe_retain(model, ['name'])"
        raise LeafTypeError(message(where(), "a tensor", describe(tensor), do))
    if is_transform_tensor(tensor) or transforms():
        expected = "a tensor outside of torch.func's transforms"
        got = "one inside: its gradient would not outlive the transform"
        fix = "return the value as auxiliary output instead, torch.func.grad(fn, has_aux=True)"
        raise UnsupportedGraphError(message(where(), expected, got, fix))
    if not tensor.requires_grad:
        got = f"{describe(tensor)} without a graph: a constant, detached, or made under no_grad"
        fix = "keep it where it is part of the graph, or call requires_grad_() before its use"
        raise UnsupportedGraphError(message(where(), "a tensor that requires grad", got, fix))


class RetainedGrads:
    """The tensors of a `safe_retain` block, and their gradients so far."""

    def __init__(self, inputs: RetainedGrads | None = None) -> None:
        self._inputs = inputs
        self._recorders: dict[int, _GradRecorder] = {}
        self._read_values: Callable[[], PyTree] = dict

    @property
    def values(self) -> PyTree:
        """The tensors, in the tree as given.

        In the module form a dict from module name to output: a tuple of outputs for a module that
        ran several times, None for one that did not run.
        """
        return self._read_values()

    @property
    def grads(self) -> PyTree:
        """A tree like `values`: each tensor's gradient, summed over the passes in their order.

        Of the tensor's shape and dtype, and of its strides if it is dense; None where no pass has
        reached the tensor.
        """
        return self._map(lambda recorder: add_leaves(*recorder.passes))

    @property
    def passes(self) -> PyTree:
        """A tree like `values`: for each tensor a tuple with the gradient of each pass."""
        return self._map(
            lambda recorder: tuple(grad.clone() for grad in recorder.passes), missing=()
        )

    @property
    def inputs(self) -> RetainedGrads:
        """The same three trees of what the modules were called with; `inputs=True` asks for them.

        In `values`, a run of a module has its argument; or a tuple of several arguments, behind
        them a dict of those by keyword. In `grads`, None stands for what requires no grad, too.

        Raises:
            OptionError: The block was entered without `inputs=True`.
        """
        if self._inputs is None:
            expected, fix = "inputs=True", "safe_retain(model, names, inputs=True)"
            raise OptionError(message("inputs", expected, "a block that keeps outputs only", fix))
        return self._inputs

    def _map(self, read: Callable[[_GradRecorder], Any], missing: Any = None) -> PyTree:
        leaves, spec = pytree.flatten(self.values)
        recorders = [self._recorders.get(id(leaf)) for leaf in leaves]
        values = [missing if recorder is None else read(recorder) for recorder in recorders]
        return spec.unflatten(values)

    def before_pass(self) -> list[tuple[Tensor, GradientEdge]]:
        """Return the tensors and the edges where their gradients arrive, for gradkit's own passes.

        Returns:
            Pairs of a tensor and its edge.

        Raises:
            UnsupportedGraphError: A tensor's history was rebuilt since the call.
        """
        for recorder in self._recorders.values():
            recorder.require_same_history()
        return [(recorder.tensor, recorder.edge) for recorder in self._recorders.values()]

    def _listen(self, tensor: Tensor, where: Callable[[], str], stack: ExitStack) -> None:
        if id(tensor) not in self._recorders:
            recorder = self._recorders[id(tensor)] = _GradRecorder(tensor, where)
            stack.callback(recorder.remove)


@disable_compile
@contextmanager
def safe_retain(
    tensors: PyTree | nn.Module,
    names: str | Sequence[str] | None = None,
    *,
    inputs: bool = False,
) -> Iterator[RetainedGrads]:
    """Keep the gradients of intermediate tensors, for every backward pass inside the block.

    The gradient is the one with respect to the value that a tensor has at this call, also if it is
    used before the call, or changed in place after it. Hooks that the user registered earlier have
    been applied. `.grad` is not written. All of gradkit's passes of this thread in the block reach
    the tensors; `torch.autograd.grad`, and `.backward()` or `backward_` for some params only, reach
    those that lie on a path to their params, as they would call a tensor's hook.

    Example:
        >>> import torch, gradkit
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> h = w * w
        >>> with gradkit.safe_retain({"h": h}) as kept:
        ...     (3 * h).sum().backward()
        >>> kept.grads
        {'h': tensor([3., 3.])}
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> with gradkit.safe_retain(model, ["0"]) as kept:
        ...     model(w).sum().backward()
        >>> kept.values["0"].shape, kept.grads["0"].shape
        (torch.Size([2]), torch.Size([2]))

    Args:
        tensors: A tree of tensors that require grad; or a module, whose forward then runs inside
            the block.
        names: With a module: the names of submodules (as in `named_modules()`, "" for the module
            itself) or globs, whose outputs, trees of tensors, are watched.
        inputs: With a module: whether to keep what these submodules are called with, too.

    Yields:
        The tensors' `values`, `grads` (summed over passes) and `passes` (one by one); with `inputs`
        the same three of the modules' inputs, as `kept.inputs.values` and so on.

    Raises:
        LeafTypeError: A leaf is no tensor.
        OptionError: `names` or `inputs` beside tensors, or `inputs` is no bool.
        StructureError: There are no leaves, or a name fits no module.
        UnsupportedGraphError: A tensor has no graph, is inside a `torch.func` transform, or is a
            view whose memory was changed in place inside the block (raised before gradkit's next
            pass, or else at the end of the block); or none of the modules ran.

    Source:
        `torch.Tensor.retain_grad`, whose value this is wherever that one is right.
    """
    check_bool("inputs", inputs)
    retained = RetainedGrads(RetainedGrads() if inputs else None)
    every = [retained, retained.inputs] if inputs else [retained]
    with ExitStack() as stack:
        if isinstance(tensors, nn.Module):
            _watch_modules(retained, tensors, names, stack)
        else:
            if names is not None or inputs:
                where, expected, got = "names", "None beside tensors", repr(names)
                if names is None:
                    where, expected, got = "inputs", "False beside tensors", "True"
                fix = "safe_retain(model, names), or safe_retain(tensors)"
                raise OptionError(message(where, expected, got, fix))
            _watch_tensors(retained, tensors, stack)
        with ExitStack() as passes:
            for one in every:
                passes.enter_context(observing(one))
            yield retained
        for one in every:
            one.before_pass()
        is_module = isinstance(tensors, nn.Module)
        if is_module and all(value is None for value in retained.values.values()):
            expected = f"a forward pass through {', '.join(retained.values)} inside the block"
            fix = "call the module inside the with block, not before it"
            raise UnsupportedGraphError(message("safe_retain", expected, "none", fix))


def _watch_tensors(retained: RetainedGrads, tensors: PyTree, stack: ExitStack) -> None:
    leaves, spec = pytree.flatten(tensors)
    if not leaves:
        raise StructureError(message("tensors", "at least one tensor", "none", "safe_retain(h)"))
    for index, leaf in enumerate(leaves):
        where = partial(pytree.path, spec, index, "tensors")
        _require_graph(leaf, where)
        retained._listen(leaf, where, stack)
    retained._read_values = lambda: spec.unflatten(leaves)


def _watch_modules(
    retained: RetainedGrads, module: nn.Module, names: str | Sequence[str] | None, stack: ExitStack
) -> None:
    chosen = _choose(module, names)
    see_output = _recorder_of_runs(retained, list(chosen), "output", stack)
    see_input = None
    if retained._inputs is not None:
        see_input = _recorder_of_runs(retained._inputs, list(chosen), "input", stack)
    for name, part in chosen.items():
        if see_input is not None:
            before = partial(_with_input, see_input, name)
            stack.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
        after = partial(_with_output, see_output, name)
        stack.callback(part.register_forward_hook(after).remove)


def _with_input(see: _SeeRun, name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs:
        see(name, (*args, kwargs) if args else kwargs)
    else:
        see(name, args[0] if len(args) == 1 else args)


def _with_output(see: _SeeRun, name: str, _: nn.Module, args: Any, output: PyTree) -> None:
    see(name, output)


def _recorder_of_runs(
    retained: RetainedGrads, names: list[str], role: str, stack: ExitStack
) -> _SeeRun:
    """Return what is to be called with the inputs, or the outputs, of each run of a module."""
    runs: dict[str, list[PyTree]] = {name: [] for name in names}
    retained._read_values = lambda: {name: _one_or_all(trees) for name, trees in runs.items()}

    def see(name: str, tree: PyTree) -> None:
        if current_pass() != -1:
            return  # a checkpoint's recomputation, inside a backward pass: the graph exists already
        leaves, spec = pytree.flatten(tree)
        with_graph = {id(x) for x in leaves if isinstance(x, Tensor) and x.requires_grad}
        for index, leaf in enumerate(leaves):
            # An input may well be a constant: the data.
            if id(leaf) in with_graph or (role == "output" and not with_graph):
                where = partial(pytree.path, spec, index, f"the {role} of {name!r}")
                _require_graph(leaf, where)
                retained._listen(leaf, where, stack)
        runs[name].append(tree)

    return see


def _one_or_all(runs: list[PyTree]) -> PyTree:
    return None if not runs else runs[0] if len(runs) == 1 else tuple(runs)


def _choose(module: nn.Module, names: str | Sequence[str] | None) -> dict[str, nn.Module]:
    modules = dict(module.named_modules())
    patterns = [names] if isinstance(names, str) else list(names or ())
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        fits = {name: part for name, part in modules.items() if fnmatchcase(name, pattern)}
        if not fits:
            break
        chosen |= fits
    else:
        if chosen:
            return chosen
    expected = "names of submodules or globs, each of which fits one"
    fix = f"one of {', '.join(map(repr, list(modules)[:12]))}"
    raise StructureError(message("names", expected, repr(names), fix))
