"""checkpoint: a function that keeps its arguments, and no graph, and runs again in a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from types import CellType
from typing import Any, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from gradkit._autograd.engine import inner_grads
from gradkit._autograd.guarded_pass import InnerPass
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._compat import transforms as levels
from gradkit._compat.autograd import is_tentative
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import BATCH, carries_graph, transforms, unbatched, varies
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit._core import pytree, user_code
from gradkit._core.call import check_function
from gradkit._core.grad_recorder import observed_tensors
from gradkit._core.graph import Subgraph, edge, leads_to_others
from gradkit._core.known_results import Result, Rule, merged
from gradkit._core.params import Grads, Tensors, refuse_distributed
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.results_without_graph import with_refused_derivatives
from gradkit._core.user_code import captured_by
from gradkit._state.copy_on_write import CopyOnWrite, CopyOnWriteMode
from gradkit._state.module_state import (
    KeptState,
    ModuleSnapshot,
    alone,
    keeping_state,
    modules_put_back,
)
from gradkit._state.rerun import RerunState, recording_writes
from gradkit._state.stale_reads import stale_reads_refused
from gradkit._torch_bugs.monitor import monitor_around, watched_again
from gradkit.errors import UnsupportedGraphError, describe, message
from gradkit.func._errors import named_errors


def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `fn` does, without keeping its graph for a backward pass.

    A pass that needs the graph runs `fn` a second time. It works wherever `fn` does: under
    `.backward()`, all of gradkit and torch.func, to any order, inside of itself.

    Example:
        >>> import torch, gradkit
        >>> def block(w, x):
        ...     return torch.tanh(x @ w)
        >>> def loss(w):
        ...     return gradkit.func.checkpoint(block)(w, torch.ones(1, 2)).sum()
        >>> gradkit.func.value_and_grads(loss)(torch.zeros(2, 1))
        (tensor(0.), tensor([[1.],
                [1.]]))

    Args:
        fn: A function, or a module, of any trees of tensors and other objects, which it must not
            change, to a tree. The modules and tensors that it refers to (in closures, attributes,
            containers) get their gradients as its arguments do.

    Returns:
        A function of `fn`'s arguments. Its values and first derivatives have the bits of `fn`'s (a
        tensor with three uses or more: another order of sums); what needs no grad is as it was. The
        second run draws the same random numbers, under the same autocast, with its modules in the
        mode, and with the tensors, of the first (the params of a `make_functional` call, say);
        buffers are as after one run. What `fn` assigns to attributes of its modules, such as an
        auxiliary loss, has a gradient, too. While a call runs, no other thread may use the modules.

        Forward mode runs `fn` twice, and saves no memory. With `create_graph=True`, as inside of
        torch.func's own transforms, a pass keeps the graphs that it makes. While torch.compile
        traces, it is torch's non-reentrant checkpoint; inside a transform there, `fn` itself.

    Raises:
        UnsupportedGraphError: `fn` uses a tensor that requires grad, and to which nothing that can
            be seen refers; it keeps a tensor with a graph in a list or a closure; it is sharded.
            In a pass: `fn` gave another result when it ran again.

    Source:
        `jax.checkpoint`, https://docs.jax.dev/en/latest/gradient-checkpointing.html; and
        `torch.utils.checkpoint.checkpoint`, for what is restored. Griewank, Walther 2000,
        "Algorithm 799: Revolve", https://doi.org/10.1145/347837.347846
    """
    check_function(fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not transforms():
            by_torch: Any = torch.utils.checkpoint.checkpoint
            return by_torch(fn, *args, use_reentrant=False, **kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        others = (x for x in pytree.flatten((args, kwargs))[0] if not isinstance(x, Tensor))
        roots = [fn, *others]
        modules = [one for one in captured_by(*roots) if isinstance(one, nn.Module)]
        for module in modules:
            refuse_distributed(module, lambda: "fn")
        with alone() if modules else nullcontext(), keeping_state() as state:
            return named_errors(_Rerun(fn, args, kwargs, roots, modules, state).first_run)

    return call


class Recomputed(Result):
    """Results whose rule runs what has computed them again: code of the user's."""


@dataclass(frozen=True)
class Recomputation:
    """A function of tensors that runs again in a pass, where its results are differentiated."""

    name: str  # the function's name in errors
    # Runs it again, and yields those of its results that may have a gradient.
    second_run: Callable[[Sequence[Tensor]], AbstractContextManager[Tensors]]

    def results(self, values: Tensors, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return copies of what the first run has computed from tensors, with one node as graph."""
        return Recomputed.of(Rule(self._grads, self._tangents), tensors, values)

    def _grads(
        self, tensors: Sequence[Tensor], needed: Sequence[bool], cotangents: Sequence[Any]
    ) -> Grads:
        """Return the gradients of the tensors that need one, from a pass through a second run."""
        tensors = list(map(levels.without_ended_levels, tensors))
        sources = [*tensors, *(x for x in cotangents if x is not None)]
        create = torch.is_grad_enabled() and any(map(carries_graph, sources))
        cut = levels.detach_keep_tangent

        def in_level(variables: Tensors, _: int) -> list[Grads]:
            with self.second_run(merged(tensors, needed, variables)) as outputs, INSIDE:
                return [inner_grads(outputs, variables, cotangents, create_graph=create)]

        if transforms():
            point = list(compress(tensors, needed))
            point = point if create else list(map(cut, point))
            with levels.compiled_autograd_disabled():
                if levels.batches_others(tensors):
                    grads = self._pulled(tensors, needed, cotangents, point)
                else:
                    grads = levels.run_in_level(in_level, point)[0]
                return merged([None] * len(needed), needed, grads)
        with torch.enable_grad(), INSIDE:
            # Views: the pass ends here, and does not go on through what was before.
            inputs = [
                x.view_as(x) if create and x.requires_grad else cut(x).requires_grad_(need)
                for x, need in zip(tensors, needed, strict=True)
            ]
            variables = list(compress(inputs, needed))
            with self.second_run(inputs) as outputs, INSIDE:
                below = Subgraph(outputs, stop={edge(x).node for x in variables})
                refused = ""
                try:
                    if create:  # whose derivative by the inputs may be nobody's
                        linear = not leads_to_others(tensors, ())
                        refuse_wrong_derivative(lambda: self.name, variables, below, linear=linear)
                except UnsupportedGraphError as error:
                    if not is_tentative():
                        raise
                    create, refused = False, str(error)
                one = InnerPass(self.name, "its input {}".format, variables, below, cotangents)
                grads = one.grads(outputs, create_graph=create)
            if refused:  # who takes this derivative gets the error
                grads = [*with_refused_derivatives(grads, sources, refused)]
        return merged([None] * len(needed), needed, grads)

    def _pulled(
        self,
        tensors: Sequence[Tensor],
        needed: Sequence[bool],
        cotangents: Sequence[Any],
        point: Tensors,
    ) -> Grads:
        """Return the gradients from a run outside of a vmap that has batched cotangents alone."""
        # A random operation inside the vmap would raise, or draw for each of the batch.
        arrived = [x is not None for x in cotangents]

        def fn(*variables: Tensor) -> tuple[Tensor, ...]:
            with self.second_run(merged(tensors, needed, variables)) as outputs, INSIDE:
                return tuple(compress(outputs, arrived))

        with levels.outside_vmaps(tensors), levels.without_default_hooks(), INSIDE:
            _, pull, *_ = torch.func.vjp(fn, *point)
        return list(pull(tuple(compress(cotangents, arrived))))

    def _tangents(self, tensors: Sequence[Tensor], tangents: Sequence[Any]) -> Sequence[Any]:
        moves = [x is not None for x in tangents]
        point, directions = compress(tensors, moves), compress(tangents, moves)

        def fn(*variables: Tensor) -> tuple[Tensor, ...]:
            with self.second_run(merged(tensors, moves, variables)) as outputs, INSIDE:
                return tuple(outputs)

        with torch.enable_grad(), INSIDE:
            if transforms():
                return torch.func.jvp(fn, tuple(point), tuple(directions))[1]  # type: ignore[no-any-return]
            outputs = fn(*map(forward_ad.make_dual, point, directions))
            return [forward_ad.unpack_dual(x).tangent for x in outputs]  # type: ignore[no-untyped-call]


class _Rerun:
    """One call of a function: what its first run had, for the second."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        roots: list[Any],
        modules: list[Any],
        state: KeptState,
    ) -> None:
        self._fn, self._roots, self._modules = fn, roots, modules
        self._given, self._rebuild = pytree.partition_tensors((args, kwargs))
        self._reachable = _reachable(roots, modules)
        # A mode around may have another in the stead of one: a copy that was written on, or what a
        # checkpoint around computes with.
        pairs = [(x, x.to(x.dtype)) for x in self._reachable.values()]
        is_input = levels.is_transform_tensor
        pairs = [(x, now) for x, now in pairs if now is not x or varies(now) or is_input(now)]
        self._captured, self._values = [x for x, _ in pairs], [now for _, now in pairs]
        self._derivatives = levels.derivatives_around()
        self._monitor = monitor_around()
        self._snapshots = list(map(ModuleSnapshot, modules))
        state.before |= {id(one.module): one for one in self._snapshots}
        self._cells = _contents(_cells(fn, {}).values())
        self._assigned: list[tuple[dict[str, Any], str]] = []
        self._state = RerunState([*self._given, *self._values])

    def first_run(self) -> Any:
        """Run the function, and return what it does, with one node in the stead of a graph."""
        observed = len(observed_tensors())
        inputs = [*self._given, *self._values]
        leaves = [levels.detached_leaf(x) if varies(x) else x for x in inputs]
        try:
            with self._state.first_run(), recording_writes(), self._substituted(leaves):
                out = self._run(leaves)
            self._read_attributes({id(leaf): x for leaf, x in zip(leaves, inputs, strict=True)})
            outputs, self._layout, rebuild = self._read(out)
            self._refuse_other_graphs(outputs, leaves)
            if len(observed_tensors()) > observed:
                raise UnsupportedGraphError(_OBSERVED)
            result, attributes = rebuild(self._recorded(outputs, leaves))
            for (table, key), value in zip(self._assigned, attributes, strict=True):
                table[key] = value
                self._reachable[id(value)] = value
            now = _reachable(self._roots, self._modules)
            if any(map(varies, (now[key] for key in now.keys() - self._reachable.keys()))):
                raise UnsupportedGraphError(_KEEPS_A_GRAPH)
        except BaseException:
            for snapshot in self._snapshots:
                snapshot.restore()
            self._state.put_back()
            raise
        self._reachable = {}
        return result

    def _read_attributes(self, inputs: dict[int, Tensor]) -> None:
        """Note which attributes, and buffers, a run has assigned that are tensors with a graph."""
        new = [entry[1:] for one in self._snapshots for entry in one.new_attributes()]
        new += [entry for one in self._snapshots for entry in one.new_buffers()]
        for table, key in {(id(table), key): (table, key) for table, key in new}.values():
            value = table[key] = _replaced(table[key], inputs)  # an LSTM lists its weights anew
            is_new = isinstance(value, Tensor) and id(value) not in self._reachable
            if is_new and varies(value):
                self._assigned.append((table, key))

    def _refuse_other_graphs(self, outputs: Tensors, leaves: Tensors) -> None:
        """Raise if outputs depend on tensors with a graph that were no leaves of the run."""
        own = set().union(*map(levels.recording_levels, leaves))
        ids = {id(unbatched(leaf)) for leaf in leaves}
        for key, leaf in Subgraph(map(unbatched, outputs)).leaves.items():
            # A leaf that an operator of the run has made is its own: x.detach().requires_grad_().
            if key not in ids and (transforms() or not self._state.made(leaf)):
                raise UnsupportedGraphError(_unseen(leaf))
        for output in outputs:
            if levels.recording_levels(output) - own or levels.carries_tangent(output):
                raise UnsupportedGraphError(_unseen(output))

    def _recorded(self, outputs: Tensors, leaves: Tensors) -> Tensors:
        """Return the outputs, those with a graph as results of one node."""
        self._differentiable = list(map(carries_graph, outputs))
        # A vmap may arrange the data in another way when it runs again.
        self._is_compared = BATCH not in transforms()
        with levels.no_transforms(), INSIDE:
            self._state.record_outputs(
                list(map(levels.data_of, outputs)) if self._is_compared else ()
            )
        reached = Subgraph(map(unbatched, outputs)).leaves.keys()
        pairs = zip(self._values, leaves[len(self._given) :], strict=True)
        needed = [x is leaf or id(unbatched(leaf)) in reached for x, leaf in pairs]
        operands = [*self._given, *compress(self._values, needed)]
        self._captured = list(compress(self._captured, needed))
        self._given, self._values = [], []  # from here on, the node keeps them
        values = [x.detach() for x in compress(outputs, self._differentiable)]
        if not values:
            return outputs
        made = Recomputation("fn", self._second_run).results(values, operands)
        return merged(outputs, self._differentiable, made)

    def _read(self, out: Any) -> tuple[Tensors, _Layout, Callable[[Iterable[Tensor]], PyTree]]:
        """Return the tensors that a run has returned, and assigned to attributes."""
        tree = out, [table.get(key) for table, key in self._assigned]
        outputs, rebuild = pytree.partition_tensors(tree)
        return outputs, (pytree.flatten(tree)[1], [(x.shape, x.dtype) for x in outputs]), rebuild

    def _run(self, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = self._rebuild(tensors)
        return self._fn(*args, **kwargs)

    @contextmanager
    def _substituted(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the captured tensors be the last of these in the block, also in modules."""
        last = tensors[len(tensors) - len(self._captured) :]
        new = {id(x): now for x, now in zip(self._captured, last, strict=True)}
        changed: list[tuple[dict[str, Any], str, Tensor]] = []

        def put_back() -> None:
            for table, key, before in changed:
                if table.get(key) is new[id(before)]:
                    table[key] = before

        with undone(put_back):
            for table in _tables(self._modules) if new else ():
                changed += [(table, key, x) for key, x in table.items() if id(x) in new]
            for table, key, before in changed:
                table[key] = new[id(before)]
            stale = stale_reads_refused(self._snapshots, substitutes=new)
            with stale, _Substitution(new), INSIDE:
                yield

    @contextmanager
    def _second_run(self, tensors: Sequence[Tensor]) -> Iterator[Tensors]:
        """Run the function again, and yield those outputs that have a graph."""
        with undo_stack() as stack:
            second = stack.enter_context(self._state.second_run())
            stack.enter_context(modules_put_back(self._modules))
            stack.enter_context(
                undone(partial(_set_contents, _contents(cell for cell, _ in self._cells)))
            )
            _set_contents(self._cells)
            for snapshot in self._snapshots:
                snapshot.restore()
            stack.enter_context(self._substituted(tensors))
            stack.enter_context(watched_again(self._derivatives, self._monitor))
            if transforms():  # transforms refuse writes on what is outside
                reachable = _reachable(self._roots, self._modules).values()
                memory = set(map(levels.memory_of, reachable))
                writes = CopyOnWrite(lambda x: levels.memory_of(x) in memory)
                stack.enter_context(CopyOnWriteMode(writes))
            outputs, layout, _ = self._read(self._run(tensors))
            if layout != self._layout:
                raise UnsupportedGraphError(_OTHER_STRUCTURE)
            if self._is_compared and BATCH not in transforms():
                with levels.no_transforms(), INSIDE:
                    second.compare(list(map(levels.data_of, outputs)), "fn")
            yield list(compress(outputs, self._differentiable))


_Layout: TypeAlias = tuple[Structure, list[tuple[torch.Size, torch.dtype]]]


def _reachable(roots: Iterable[object], modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Return the tensors that objects refer to, and those of modules, by id."""
    values = chain.from_iterable(table.values() for table in _tables(modules))
    every = (*captured_by(*roots), *captured_by(*values))
    # A list that a function logs to may hold tensors of an earlier vmap, of which torch makes none.
    tensors = (x for x in every if isinstance(x, Tensor))
    return {id(x): x for x in tensors if not levels.is_of_ended_transform(x)}


_Contents: TypeAlias = list[tuple[CellType, Any]]


def _cells(fn: Any, cells: dict[int, CellType]) -> dict[int, CellType]:
    """Return the cells of a function's variables, by id, and of the functions in them."""
    fn = fn.func if isinstance(fn, partial) else getattr(fn, "__func__", fn)
    new = [cell for cell in getattr(fn, "__closure__", None) or () if id(cell) not in cells]
    cells |= {id(cell): cell for cell in new}
    for _, value in _contents(new):
        _cells(value, cells)
    return cells


def _contents(cells: Iterable[Any]) -> _Contents:
    """Return the value of each variable that has one."""
    return [(cell, value) for cell in cells for value in user_code.cell_contents(cell)]


def _set_contents(contents: _Contents) -> None:
    for cell, value in contents:
        cell.cell_contents = value


def _tables(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return the dictionaries in which modules, and their parts, have their tensors."""
    parts = {id(part): part for module in modules for part in module.modules()}
    tables = [(vars(part), part._parameters, part._buffers) for part in parts.values()]
    return list(chain.from_iterable(tables))


class _Substitution(TorchFunctionMode):
    """Gives operations other tensors in the stead of some."""

    def __init__(self, new: dict[int, Tensor]) -> None:
        super().__init__()
        self._new = new

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        given = {name: _replaced(x, self._new) for name, x in (kwargs or {}).items()}
        return func(*_replaced(args, self._new), **given)


def _replaced(value: Any, new: dict[int, Tensor]) -> Any:
    """Return a tensor, or a list of several, with others in the stead of some."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    is_list = type(value) in (list, tuple)
    return type(value)(_replaced(x, new) for x in value) if is_list else value


def _unseen(tensor: Tensor) -> str:
    expected = "a function of its arguments, and of what it can be seen to refer to"
    got = f"one that uses a tensor with a graph from elsewhere ({describe(tensor)}): its gradient "
    fix = "pass the tensor as an argument: checkpoint(fn)(x, w)"
    return message("fn", expected, f"{got}would be lost", fix)


_KEEPS_A_GRAPH = message(
    "fn",
    "a function that returns what it computes, or assigns it to attributes of its modules",
    "one that keeps a tensor with a graph in a list, a dictionary or a closure",
    "return the tensor, and append it outside: y, aux = checkpoint(fn)(x)",
)
_OTHER_STRUCTURE = message(
    "fn",
    "a function that returns the same structure when it runs again, in the backward pass",
    "other containers, shapes or dtypes than in its first run",
    "pass what changes as an argument; or call it without checkpoint",
)
_OBSERVED = message(
    "safe_retain",
    "a forward pass with a graph",
    "one in gradkit.func.checkpoint: its graph is made in the backward pass",
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or retain what fn returns",
)
