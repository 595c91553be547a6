"""Where the graphs of a call's inputs begin, found only if there is a checkpoint to look for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._checks import recomputations
from gradkit._checks.recomputations import StateBeforeCall
from gradkit._compat.transforms import is_transform_tensor
from gradkit._core import graph, pytree
from gradkit._core.pytree import PyTree

_grad_fn = attrgetter("grad_fn")


def before(tensors: Iterable[Any], tree: PyTree = ()) -> StateBeforeCall | None:
    """Return the state before a call; most processes have no checkpoint, and no walk."""
    snapshot = recomputations.before(())
    if snapshot is None:
        return None
    leaves = chain(tensors, pytree.flatten(tree)[0])
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    nodes = map(_grad_fn, inputs)
    # An edge costs some microseconds, and `refuse` asks for none where no checkpoint exists.
    lazy = _nodes(inputs, list(nodes))  # those of now: an operation in place replaces them
    return StateBeforeCall(snapshot.frames, cast("set[Node]", lazy), snapshot.outer)


def _nodes(tensors: Sequence[Tensor], nodes: Sequence[Node | None]) -> Iterator[Node]:
    """Yield the nodes at which the graphs of tensors begin."""
    for tensor, node in zip(tensors, nodes, strict=True):
        if not is_transform_tensor(tensor):
            yield graph.edge(tensor).node if node is None else node
