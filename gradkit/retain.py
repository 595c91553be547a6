"""The gradients of intermediate tensors: what `retain_grad()` was meant for, without its traps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeAlias

from torch import Tensor, nn

from gradkit._autograd.engine import number_of_a_pass
from gradkit._compat.autograd import calling_thread, current_pass
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import default_hooks
from gradkit._compat.undoing import block, undo_stack, undone
from gradkit._core import pytree
from gradkit._core.call import check_bool
from gradkit._core.grad_recorder import GradRecorder, Recorders, observing, refuse_transforms
from gradkit._core.leaf_arithmetic import add_leaves
from gradkit._core.modules import choose_modules, inside_compiled, watching_runs
from gradkit._core.pytree import PyTree
from gradkit.errors import (
    OptionError,
    StructureError,
    UnsupportedGraphError,
    message,
    warn_fallback,
)

__all__ = ["RetainedGrads", "safe_retain"]

_Read: TypeAlias = Callable[["_KeptTree"], PyTree]
# The function gets a module's name, and a tree of what one run of it was given, or has returned.
_SeeRun: TypeAlias = Callable[[str, PyTree], None]


class _KeptTree(NamedTuple):
    """A tree of tensors, and for each leaf what records its gradients, if anything does."""

    leaves: list[Any]
    spec: pytree.Structure
    recorders: list[GradRecorder | None]

    def values(self) -> PyTree:
        return self.spec.unflatten(self.leaves)

    def read(self, fn: Callable[[GradRecorder], Any], missing: Any) -> PyTree:
        pairs = zip(self.leaves, self.recorders, strict=True)
        results = [
            None if leaf is None else missing if one is None else fn(one) for leaf, one in pairs
        ]
        return self.spec.unflatten(results)


class RetainedGrads:
    """The tensors of a `safe_retain` block, and their gradients so far."""

    def __init__(self, inputs: RetainedGrads | None = None) -> None:
        self._inputs = inputs
        self._recorders = Recorders()
        # The function gets one of a kept tree, and what stands for a module that did not run.
        self._collect: Callable[[_Read, Any], PyTree] = lambda read, missing: {}

    @property
    def values(self) -> PyTree:
        """The tensors, in the tree as given.

        In the module form a dict from module name to output: a tuple of outputs for a module that
        ran several times, None for one that did not run.
        """
        return self._collect(_KeptTree.values, None)

    @property
    def grads(self) -> PyTree:
        """A tree like `values`: each tensor's gradient, summed over the passes in their order.

        Of the tensor's shape and dtype, and of its strides if it is dense; None where no pass has
        reached the tensor.
        """
        return self._map(lambda recorder: add_leaves(*recorder.read()), None)

    @property
    def passes(self) -> PyTree:
        """A tree like `values`: for each tensor a tuple with the gradient of each pass."""
        return self._map(lambda recorder: tuple(grad.clone() for grad in recorder.read()), ())

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

    def _map(self, fn: Callable[[GradRecorder], Any], missing: Any) -> PyTree:
        return self._collect(lambda kept: kept.read(fn, missing), missing)


@disable_compile
@block
def safe_retain(
    tensors: PyTree | nn.Module, names: str | Sequence[str] | None = None, *, inputs: bool = False
) -> Iterator[RetainedGrads]:
    """Keep the gradients of intermediate tensors, for every backward pass inside the block.

    The gradient is the one with respect to the value that a tensor has at this call, also if it is
    used before the call, or changed in place after it. Hooks that the user registered earlier have
    been applied. `.grad` is not written. What other threads run is not recorded, nor are passes
    whose gradients a call does not return, such as those of `gram`, of norms, and of the Gramian
    behind `value_and_grads(weights=function)`. All of gradkit's passes in the block reach the
    tensors; `torch.autograd.grad`, `.backward()` or `backward_` for some params only reach those
    that lie on a path to these, and are recorded as by `retain_grad()`. A block in which no pass
    ran, and that ends without an error, warns (`GradkitWarning`).

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
        tensors: A tree of tensors that require grad, and None, which stays None; or a module, whose
            forward then runs inside the block.
        names: With a module: the names of submodules (as in `named_modules()`, "" for the module
            itself) or globs, whose outputs, trees of tensors, are watched. Of what a glob fits,
            an output without a graph is in `values`, and its gradient is None.
        inputs: With a module: whether to keep what these submodules are called with, too.

    Yields:
        The tensors' `values`, `grads` (summed over passes) and `passes` (one by one); with `inputs`
        the same three of the modules' inputs, as `kept.inputs.values` and so on.

    Raises:
        LeafTypeError: A leaf is no tensor.
        OptionError: `names` or `inputs` beside tensors, a name is no string, or `inputs` no bool.
        StructureError: There are no leaves, or a name fits no module.
        UnsupportedGraphError: A tensor has no graph, is inside a `torch.func` transform, or is a
            view whose memory was changed in place inside the block (raised before gradkit's next
            pass, or else at the end of the block); or none of the modules ran, or code that was
            compiled before the block ran in their place, or a reentrant checkpoint ran them.

    Source:
        `torch.Tensor.retain_grad`, equal to this wherever that is right.
    """
    check_bool("inputs", inputs)
    retained = RetainedGrads(RetainedGrads() if inputs else None)
    every = [retained, retained.inputs] if inputs else [retained]
    require_runs: Callable[[], None] | None = None
    with undo_stack() as stack:
        for one in every:
            stack.enter_context(undone(one._recorders.remove))
        if isinstance(tensors, nn.Module):
            require_runs = _watch_modules(retained, tensors, names, stack)
        else:
            if names is not None or inputs:
                where, expected, got = "names", "None beside tensors", repr(names)
                if names is None:
                    where, expected, got = "inputs", "False beside tensors", "True"
                fix = "safe_retain(model, names), or safe_retain(tensors)"
                raise OptionError(message(where, expected, got, fix))
            _watch_tensors(retained, tensors)
        before = number_of_a_pass()
        with undo_stack() as passes:
            for one in every:
                passes.enter_context(observing(one._recorders))
            yield retained
        for one in every:
            one._recorders.check()
        if require_runs is not None:
            require_runs()
        is_empty = all(one._recorders.are_empty() for one in every)
        if is_empty and number_of_a_pass() == before + 1:
            warn_fallback(_NO_PASS)


_NO_PASS = (
    "safe_retain: no backward pass ran inside the block, so that all gradients are None. Run the "
    "pass inside the with block, not before or after it."
)


def _watch_tensors(retained: RetainedGrads, tensors: PyTree) -> None:
    leaves, spec = pytree.flatten(tensors)
    if not leaves:
        raise StructureError(message("tensors", "at least one tensor", "none", "safe_retain(h)"))
    paths = (partial(pytree.path, spec, index, "tensors") for index in range(len(leaves)))
    is_empty = all(leaf is None for leaf in leaves)  # the first is refused
    recorders = [
        None if leaf is None and not is_empty else retained._recorders.of(leaf, path)
        for leaf, path in zip(leaves, paths, strict=True)
    ]
    kept = _KeptTree(leaves, spec, recorders)
    retained._collect = lambda read, _: read(kept)


def _watch_modules(
    retained: RetainedGrads, module: nn.Module, names: str | Sequence[str] | None, stack: ExitStack
) -> Callable[[], None]:
    """Watch modules, and return what raises if none has run, or compiled code in their place."""
    parts = dict(module.named_modules())
    chosen = choose_modules(parts, names)
    required = [name for name, is_exact in chosen.items() if is_exact]
    recomputed: set[str] = set()
    see_output = _recorder_of_runs(retained, list(chosen), "output", required, recomputed)
    see_input = None
    if retained._inputs is not None:  # an input may well be a constant: the data
        see_input = _recorder_of_runs(retained._inputs, list(chosen), "input", (), recomputed)
    for name in chosen:
        see = None if see_input is None else partial(_see_arguments, see_input, name)
        stack.enter_context(watching_runs(parts[name], partial(see_output, name), see))
    compiled = inside_compiled(parts, chosen)
    compiled_runs: set[str] = set()
    for name in dict.fromkeys(name for name, _ in compiled):
        note = partial(lambda name, _: compiled_runs.add(name), name)
        stack.enter_context(watching_runs(parts[name], note))

    def require_runs() -> None:
        if recomputed:
            expected = f"a forward pass through {', '.join(sorted(recomputed))} with a graph"
            got = "one in a checkpoint with use_reentrant=True: its graph is made in the backward "
            fix = "checkpoint(..., use_reentrant=False), or leave these modules out of names"
            raise UnsupportedGraphError(message("safe_retain", expected, f"{got}pass", fix))
        ran = retained._collect(lambda _: True, False)
        for name, inside in compiled:
            if name in compiled_runs and not any(ran[part] for part in inside):
                _refuse_compiled(inside)
        if not any(ran.values()):
            expected = f"a forward pass through {', '.join(ran)} inside the block"
            fix = "call the module inside the with block, not before it; of a model compiled by "
            fix += "torch.compile, make its first call there"
            raise UnsupportedGraphError(message("safe_retain", expected, "none", fix))

    return require_runs


def _refuse_compiled(names: list[str]) -> NoReturn:
    expected = f"a forward pass through {', '.join(names)} that calls their hooks"
    got = "code that torch.compile made before the block, which calls no hook registered later"
    fix = "enter the block before the first call, or after torch._dynamo.reset(); or leave these "
    fix += "modules out of what is compiled, with torch.compiler.disable"
    raise UnsupportedGraphError(message("safe_retain", expected, got, fix))


def _see_arguments(see: _SeeRun, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    every = (*args, kwargs) if kwargs else args
    see(name, every[0] if len(every) == 1 else every)


def _recorder_of_runs(
    retained: RetainedGrads,
    names: list[str],
    role: str,
    required: Collection[str],
    recomputed: set[str],
) -> _SeeRun:
    """Return what is to be called with the inputs, or the outputs, of each run of a module."""
    # A run has to have a tensor with a graph of those that are required. `recomputed` gets the
    # names of those that have one in a recomputation alone.
    runs: dict[str, list[_KeptTree]] = {name: [] for name in names}
    thread = calling_thread()

    def collect(read: _Read, missing: Any) -> PyTree:
        trees = {name: tuple(map(read, kept)) for name, kept in runs.items()}
        return {
            name: missing if not each else each[0] if len(each) == 1 else each
            for name, each in trees.items()
        }

    retained._collect = collect

    def see(name: str, tree: PyTree) -> None:
        if calling_thread() != thread:
            return
        leaves, spec = pytree.flatten(tree)
        with_graph = {id(x) for x in leaves if isinstance(x, Tensor) and x.requires_grad}
        if current_pass() != -1:
            # A checkpoint's recomputation, inside a backward pass: the graph exists already, but
            # for a reentrant one, which is without the hooks of the other kind.
            before = [zip(kept.recorders, leaves, strict=False) for kept in runs[name]]
            without = (leaf for recorder, leaf in chain(*before) if recorder is None)
            if default_hooks() is None and any(id(leaf) in with_graph for leaf in without):
                recomputed.add(name)
            return
        is_required = name in required and not with_graph
        recorders: list[GradRecorder | None] = []
        for index, leaf in enumerate(leaves):
            where = partial(pytree.path, spec, index, f"the {role} of {name!r}")
            if id(leaf) in with_graph or is_required:
                recorders.append(retained._recorders.of(leaf, where))
            else:
                if isinstance(leaf, Tensor):
                    refuse_transforms(leaf, where)
                recorders.append(None)
        runs[name].append(_KeptTree(leaves, spec, recorders))

    return see
