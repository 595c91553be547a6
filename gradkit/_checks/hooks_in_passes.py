"""Hooks that change a gradient of which a derivative is, or will be, taken.

Torch runs the hooks of the forward graph in every pass through it, also in the one that
differentiates a gradient: they would change the terms of second order once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any, TypeAlias
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradkit._compat.autograd import sequence_number, tensor_hooks
from gradkit._compat.transforms import transforms
from gradkit._compat.undoing import undo_stack
from gradkit._core.graph import Subgraph, edge, is_leaf_node, metadata, nodes_below
from gradkit._core.user_code import hooks_of, register_own_hooks, remove_hooks
from gradkit._torch_bugs.missing import DIFFERENTIABLE
from gradkit.errors import UnsupportedGraphError, message

_Grads: TypeAlias = list[Tensor | None]
# A change has the node at which a hook made it, and the gradient before and after it.
_Change: TypeAlias = tuple[Node | None, Tensor | None, Tensor | None]


class _Mark:
    """A token of the nodes at which hooks have changed a pass, and of those of its gradients."""


_marks: WeakSet[_Mark] = WeakSet()  # the marks of the gradients that are alive
_HOOKED, _MADE = (
    "gradkit: a hook has changed what arrived",
    "gradkit: a gradient that hooks changed",
)


class _Counted(local):
    """How many passes of a thread have given gradients that hooks changed, with a graph."""

    passes = 0


_counted = _Counted()


def passes_changed() -> int:
    """Return how many passes of this thread hooks have changed, of those with a graph."""
    return _counted.passes


def any_changed_gradients() -> bool:
    """Return whether a graph may hold a gradient that a hook has changed."""
    return bool(_marks)


def refuse_second_order(where: Callable[[], str], executed: Iterable[Node]) -> None:
    """Raise if a pass through nodes would run a hook on the derivative of its own result."""
    if _hooked_again(executed):
        raise UnsupportedGraphError(message(where(), *_SECOND))


def _hooked_again(executed: Iterable[Node]) -> set[Node]:
    """Return the nodes, below a gradient that hooks have changed there, that a pass executes."""
    if not _marks:
        return set()
    executed = set(executed)
    tops = [node for node in executed if _MADE in metadata(node)]
    marks = {metadata(node)[_MADE] for node in tops}
    reached, nodes = set(tops), tops
    for node in nodes:  # the list grows meanwhile
        for child, _ in node.next_functions:
            if child in executed and child not in reached:
                reached.add(child)
                nodes.append(child)
    return {node for node in reached if metadata(node).get(_HOOKED) in marks}


def watched_pass(
    run: Callable[[list[GradientEdge], bool], _Grads],
    where: Callable[[], str],
    below: Subgraph,
    variables: Sequence[Tensor],
    extra: Sequence[Node] = (),
    *,
    create_graph: bool,
) -> _Grads:
    """Return the gradients of a pass; raise if these, or a derivative of them, would be wrong."""
    # `run` gets edges at which the engine is to capture, too: it does so before the hooks there;
    # and whether to keep the graph, which is for the mended call.
    executed = below.leading_to(variables, extra)
    again = _hooked_again(executed)
    watched = executed if create_graph else again
    pairs: set[Any] = {edge(root)[:2] for root in below.roots}
    pairs = pairs.union(*(node.next_functions for node in executed)) if watched else set()
    edges = [GradientEdge(*pair) for pair in pairs if pair[0] in watched]
    with _changes(watched, variables if create_graph else []) as (arrived, changes):
        grads = run(edges, bool(again))
    count = len(grads) - len(edges)
    for to, before in zip(edges, grads[count:], strict=True):
        if len(arrived[to.node]) == 1:  # more are of other threads, or of passes inside hooks
            changes.append((to.node, before, arrived[to.node][0][to.output_nr]))
    changes = [change for change in changes if change[1] is not None and change[1] is not change[2]]
    if not again.isdisjoint(node for node, _, _ in changes):
        raise UnsupportedGraphError(message(where(), *_SECOND))
    if create_graph and changes:
        _mark(where, changes, grads[:count], executed)
    return grads[:count]


@contextmanager
def _changes(
    nodes: Collection[Node], variables: Sequence[Tensor]
) -> Iterator[tuple[dict[Node, list[Any]], list[_Change]]]:
    """Yield what arrives at nodes after their hooks; and, later, what other hooks have changed."""
    arrived: dict[Node, list[Any]] = {node: [] for node in nodes}
    changes: list[_Change] = []
    pairs: list[tuple[Node | None, list[Any], list[Any]]] = []
    with undo_stack() as stack:
        hooks = [partial(node.register_prehook, arrived[node].append) for node in nodes]
        last: dict[Node, list[Any]] = {node: [] for node in nodes}
        hooks += [partial(node.register_hook, partial(_note, last[node])) for node in nodes]
        handles = register_own_hooks(*hooks)
        stack.callback(remove_hooks, handles)
        for handle in handles[: len(arrived)]:
            _put_before_own(handle.hooks_dict_ref(), handle.id)
        for node, handle in zip(nodes, handles[len(arrived) :], strict=True):
            first: list[Any] = []
            if _put_before_own(handle.hooks_dict_ref(), handle.id, partial(_note, first), stack):
                pairs.append((node, first, last[node]))
            else:
                handle.remove()
        for variable in filter(tensor_hooks, variables):
            end: list[Any] = []
            first, key, table = [], object(), hooks_of(variable)
            stack.callback(table.pop, key, None)
            table[key] = partial(_note_one, end)
            if _put_before_own(table, key, partial(_note_one, first), stack):
                pairs.append((variable.grad_fn, first, end))
        yield arrived, changes
    for at, ins, outs in pairs:
        if len(ins) == len(outs) == 1:
            changes += [(at, *two) for two in zip(ins[0], outs[0], strict=True)]


def _note(arrived: list[Any], grads: Any, _: Any) -> None:
    arrived.append(grads)


def _note_one(arrived: list[Any], grad: Any) -> None:
    arrived.append((grad,))


def _put_before_own(
    table: Any, key: object, first: Callable[..., None] | None = None, stack: Any = None
) -> bool:
    """Let a hook run after those of users, before others of gradkit's; return if there are such."""
    # `first` is to run before all. The engine calls them in the order of insertion.
    others = {each: hook for each, hook in table.items() if each != key}
    own = {each: hook for each, hook in others.items() if _is_own(hook)}
    users = {each: hook for each, hook in others.items() if each not in own}
    if own or (users and first):
        hook, begin = table[key], object()
        table.clear()
        if first and users:
            stack.callback(table.pop, begin, None)
            table[begin] = first
        table.update({**users, key: hook, **own})
    return bool(users)


def _is_own(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None)).startswith("gradkit.")


def _mark(
    where: Callable[[], str], changes: Sequence[_Change], grads: _Grads, executed: set[Node]
) -> None:
    """Mark the gradients that hooks have changed; raise for one that has lost its graph."""
    mark = _Mark()
    _counted.passes += 1
    for node, before, after in changes:
        if before is not None and after is not None and before.requires_grad:
            made = edge(before).node
            oldest = 0 if is_leaf_node(made) else sequence_number(made)
            roots = [after] if after.requires_grad else []
            # Numbers of nodes compare within a thread; a hook may have one of its own.
            stop = executed - {made}
            if all(made not in nodes_below(roots, stop, number) for number in (oldest, 0)):
                raise UnsupportedGraphError(message(where(), *_CUT))
        if node is not None and not transforms():  # hooks run once in a transform's pass
            metadata(node)[_HOOKED] = mark
            _marks.add(mark)
    for made_by in [*grads, *(after for _, _, after in changes)]:
        if mark in _marks and made_by is not None and made_by.grad_fn is not None:
            metadata(made_by.grad_fn)[_MADE] = mark


_FUNC = "gradkit.func.hvp(fn, primals, tangents), or another call of gradkit.func inside of one"
_SECOND = (
    "a gradient that no hook has changed, or one whose hooks are removed",
    "one that a hook (of a tensor, a node or a module) has changed, and would change again: torch "
    "runs it in the pass that differentiates the gradient, too",
    f"handle.remove() before the derivative of the gradient is taken; or {_FUNC}",
)
_CUT = (
    DIFFERENTIABLE,
    "a hook (of a tensor, a node or a module) that returns a gradient without a path to the one it "
    "was given (detach(), no_grad, .data, NumPy): its derivative would be taken for a constant",
    "leave out create_graph=True; or compute in the hook with gradients enabled, from its argument",
)
