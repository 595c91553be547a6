"""A step of training by each of torch's methods, from one state; how far gradients are apart."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradkit._autograd import engine
from gradkit._compat.autograd import post_accumulate_hooks
from gradkit._compat.undoing import undo_stack
from gradkit._core import pytree
from gradkit._core.call import Losses, read_losses, require_graph
from gradkit._core.graph import Subgraph
from gradkit._core.leaf_arithmetic import refuse_meta
from gradkit._core.params import Params, read_iterator, read_params
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import captured_by
from gradkit._state.grad_attribute import grad_dtypes_put_back, grads_put_back, set_grads
from gradkit._state.module_state import modules_put_back
from gradkit._state.snapshot import Snapshot
from gradkit.errors import LeafTypeError, StructureError, describe, first_line, message
from gradkit.report.explain import checkpointed_tensors

# The parameters of all modules, each once, by name; and lone tensors, by their index in `leaves`.
Inputs: TypeAlias = dict[str | int, Tensor]
BACKWARD, GRAD, FUNC = ".backward()", "autograd.grad", "torch.func"


class RunResult(NamedTuple):
    """What a method gave: a gradient or None for each leaf and the losses, or why torch raised."""

    grads: Sequence[Tensor | None]
    values: tuple[float, ...] = ()
    refused: str = ""


class ForwardPass(NamedTuple):
    """What one run of the forward pass shows; tensors are leaves, by id."""

    leaves: dict[int, Tensor]  # the leaves, also those in reentrant checkpoints
    draws: bool
    writes_grad: bool


@dataclass(frozen=True)
class Step:
    """A loss function and its arguments; `tree` is the params with iterators read once."""

    fn: Callable[..., PyTree]
    tree: PyTree
    args: tuple[Any, ...]
    takes_params: bool
    params: Params
    names: list[str]

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the tree: tensors, None, and modules as a whole."""
        return pytree.flatten(self.tree)[0]

    @cached_property
    def modules(self) -> nn.Module:
        """The modules in the params, each once, as one whose forward calls its argument."""
        return _Container({id(m): m for m in self.leaves if isinstance(m, nn.Module)}.values())

    @property
    def inputs(self) -> Inputs:
        """What torch.func differentiates."""
        named = self.modules.named_parameters()
        given: dict[str | int, Any] = {**dict(named), **dict(enumerate(self.leaves))}
        tensors = {key: x for key, x in given.items() if isinstance(x, Tensor)}
        return {k: x for k, x in tensors.items() if x.is_floating_point() or x.is_complex()}

    @cached_property
    def snapshot(self) -> Snapshot:
        """The state that every run starts from."""
        arguments, _ = pytree.flatten(self.args)
        captured = captured_by(self.fn, arguments, list(self.modules))  # type: ignore[call-overload]
        trained = [x for x in pytree.tensors(arguments) if x.requires_grad]  # the others are copied
        return Snapshot(captured, [*pytree.tensors(self.params.leaves), *trained])

    @cached_property
    def forward(self) -> ForwardPass:
        """What one run of the forward pass shows."""
        with self.isolated():
            before = self.snapshot.random_states()
            losses = self.losses()
            require_graph(losses, losses.leaves)
            graph = Subgraph(losses.leaves)
            inside = checkpointed_tensors(graph)
            return ForwardPass(
                graph.leaves | {key: x for key, x in inside.items() if x.is_leaf},
                draws=self.snapshot.random_states() != before,
                writes_grad=any(leaf.grad is not None for leaf in self.snapshot.leaves),
            )

    def losses(self, tree: PyTree = None) -> Losses:
        """Call the function, on the params themselves unless a tree like them is given."""
        params = (self.tree if tree is None else tree,) if self.takes_params else ()
        # The function may write on arguments that do not require grad.
        args = pytree.map_tensors(lambda x: x if x.requires_grad else x.clone(), self.args)
        return read_losses(self.fn(*params, *args), scalar=True)

    def losses_at(self, inputs: Inputs) -> Losses:
        """Call the function with other tensors in place of its inputs."""
        leaves, spec = pytree.flatten(self.tree)
        tree = pytree.unflatten(spec, [inputs.get(i, leaf) for i, leaf in enumerate(leaves)])
        # torch.func refuses writes on buffers that were made outside of the transform.
        named = {name: buffer.clone() for name, buffer in self.modules.named_buffers()}
        named |= {key: x for key, x in inputs.items() if isinstance(key, str)}
        with modules_put_back([self.modules]):
            losses: Losses = functional_call(self.modules, named, (partial(self.losses, tree),))
        return losses

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore the state after a block, in which no post-accumulate-grad hooks run."""
        with self.snapshot.restored(), torch.enable_grad(), undo_stack() as stack:
            _without_hooks(self.snapshot.leaves, stack)
            yield

    def run(self, method: str) -> RunResult:
        """Return what a method gives; all keep the graph, which the caller's may share."""
        if method == FUNC:
            with self.isolated():
                return self._by_func()
        by_id = {id(leaf): leaf for leaf in self.params.leaves if leaf is not None}
        leaves = list((by_id | self.forward.leaves).values())
        with self.isolated(), undo_stack() as stack:
            stack.enter_context(grads_put_back(leaves))
            stack.enter_context(grad_dtypes_put_back(leaves))
            _without_hooks(leaves, stack)
            stale = [self.snapshot.grads.get(key) for key in by_id]
            copies = [None if grad is None else grad.detach().clone() for grad in stale]
            set_grads(list(by_id.values()), copies)
            return self._by_engine(method)

    def _by_engine(self, method: str) -> RunResult:
        losses = self.losses()
        roots = [losses.leaves[index] for index in require_graph(losses, losses.leaves)]
        if method == GRAD:
            try:
                grads = engine.reference_grad(roots, self.params.variables)
            except RuntimeError as error:
                return RunResult([], refused=f"{type(error).__name__}: {first_line(error)}")
            return RunResult(self.params.per_leaf(grads), _values(losses.leaves))
        engine.reference_backward(roots)
        grads = [None if leaf is None else leaf.grad for leaf in self.params.leaves]
        return RunResult(grads, _values(losses.leaves))

    def _by_func(self) -> RunResult:
        leaves, inputs = self.leaves, self.inputs
        if not self.takes_params and not all(isinstance(leaf, nn.Module) for leaf in leaves):
            text = "it needs tensors outside of modules as arguments: loss_fn(params, *args)"
            return RunResult([], refused=text)

        def total(inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
            losses = self.losses_at(inputs).leaves
            first, *others = (loss.reshape(()) for loss in losses)
            return sum(others, start=first), losses

        try:
            detached = {key: x.detach() for key, x in inputs.items()}
            (by_input,), losses = engine.reference_func_grads(total, detached)
        except Exception as error:  # the losses could be computed without torch.func
            return RunResult([], refused=f"{type(error).__name__}: {first_line(error)}")
        by_id = {id(inputs[key]): grad for key, grad in by_input.items() if isinstance(key, str)}
        grads: list[Tensor | None] = []
        for index, leaf in enumerate(leaves):
            is_module = isinstance(leaf, nn.Module)
            parts = [by_id.get(id(p)) for p in leaf.parameters()] if is_module else []
            grads += parts if is_module else [by_input.get(index)]
        return RunResult(grads, _values(losses))


class _Container(nn.ModuleList):
    def forward(self, call: Callable[[], PyTree]) -> PyTree:
        return call()


def _values(losses: Sequence[Tensor]) -> tuple[float, ...]:
    return tuple(float(loss.detach()) for loss in losses)


def _without_hooks(leaves: Iterable[Tensor], stack: ExitStack) -> None:
    """Let no post-accumulate-grad hooks run until the stack is unwound."""
    for table in filter(None, map(post_accumulate_hooks, leaves)):
        stack.callback(table.update, dict(table))
        table.clear()


def read_step(fn: Any, params: PyTree, args: tuple[Any, ...]) -> Step:
    """Check the arguments of `compare`."""
    if not callable(fn):
        expected, fix = "a function that computes the losses", "lambda params: ..."
        raise StructureError(message("loss_fn", expected, describe(fn), fix))
    tree = _without_iterators(params)
    opened = read_params(tree)
    refuse_meta(opened.leaves, partial(pytree.path, opened.spec, root="params"))
    for index, leaf in enumerate(opened.leaves):
        if leaf is not None and not leaf.is_leaf:
            where = pytree.path(opened.spec, index, "params")
            expected = "a leaf tensor, which .backward() gives a .grad"
            fix = "pass the tensors that it was computed from"
            raise LeafTypeError(message(where, expected, f"{describe(leaf)} with a history", fix))
    _check_args(args)
    names = pytree.labels(opened.spec, "param")
    return Step(fn, tree, args, _takes_params(fn, tree, args), opened, names)


def _without_iterators(tree: PyTree) -> PyTree:
    leaves, spec = pytree.flatten(tree)
    read = list(map(read_iterator, leaves))
    if all(map(is_, read, leaves)):
        return tree
    return _without_iterators(pytree.unflatten(spec, read))


def _check_args(args: tuple[Any, ...]) -> None:
    leaves, spec = pytree.flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not leaf.is_leaf:
            got = f"{describe(leaf)} with a history, which is a constant for torch.func"
            fix = "compute it in loss_fn, or pass x.detach()"
        elif isinstance(leaf, Iterator):
            got, fix = f"the {type(leaf).__name__}, which can be read only once", "list(...)"
        else:
            continue
        where = pytree.path(spec, index, "args")
        raise LeafTypeError(message(where, "the same argument in every run", got, fix))


def _takes_params(fn: Callable[..., PyTree], tree: PyTree, args: tuple[Any, ...]) -> bool:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return True  # a builtin without a signature
    for takes_params, given in ((True, (tree, *args)), (False, args)):
        with suppress(TypeError):
            signature.bind(*given)
            return takes_params
    expected = (
        f"a function of (params, *args), {len(args) + 1} arguments; or of (*args), if it holds its "
        "modules itself"
    )
    got, fix = f"one of {signature}", "lambda params, x, y: ..."
    raise StructureError(message("loss_fn", expected, got, fix))


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest absolute difference of an entry; None is zero, and NaN equals itself."""
    present = [grad for grad in (a, b) if grad is not None]
    if not present:
        return 0.0
    x, y = _common(present[0], present[1] if present[1:] else torch.zeros_like(present[0]))
    equal = (x == y) | (x.isnan() & y.isnan())
    gap = (x.double() - y.double()).abs().masked_fill(equal, 0.0)
    return gap.nan_to_num(math.inf, math.inf).max().item() if gap.numel() else 0.0


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two gradients have the same bits, or are both None; NaN equals itself."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = _common(a, b)
    nan, alike = x.isnan(), (x == y) & (x.signbit() == y.signbit())
    return torch.equal(nan, y.isnan()) and bool((alike | nan).all())


def _common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as real vectors of the coarser dtype."""
    x, y = (t.detach().to_dense().reshape(-1) for t in (a, b))
    x, y = (
        torch.view_as_real(t.resolve_conj()).reshape(-1) if t.is_complex() else t for t in (x, y)
    )
    dtype = max(x.dtype, y.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return x.to(dtype), y.to(dtype)
