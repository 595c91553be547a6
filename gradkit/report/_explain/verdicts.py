"""Whether a loss reaches a parameter, and why not, as far as the graph shows it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._checks import sharding
from gradkit._compat.tensors import without_torch_function
from gradkit._core import graph
from gradkit._core.ownership import PLAIN_TYPES
from gradkit.errors import describe
from gradkit.report._explain.closure import captured_by, tensors_by_id
from gradkit.report._explain.graphs import Graphs
from gradkit.report._explain.records import Verdict

_CHECKPOINT = "CheckpointFunctionBackward"

_REACHED = Verdict("reached")
_FROZEN = Verdict("frozen", "requires_grad is False")
_FROZEN_SINCE = Verdict("frozen", "requires_grad has been set to False since the loss was computed")
_INTEGER = Verdict("frozen", "its dtype is not floating-point, and has no gradient")
_CONSTANT = Verdict(
    "constant loss",
    "the loss carries no graph: made under no_grad or inference_mode, detached, or from inputs "
    "none of which requires grad",
)
_SHARDED = Verdict("sharded", "the parameters of a module sharded by FSDP are not in the graph")
_INSIDE = Verdict(
    "reentrant checkpoint",
    "used by the function of a reentrant checkpoint, which autograd cannot see into; pass "
    "use_reentrant=False",
)
_MOVED = Verdict(
    "moved",
    "moved or cast since the loss was computed; the graph still refers to it as it was before",
)
_CHANGED = Verdict(
    "changed in place",
    "a view or a value that was changed in place since its use: no gradient can arrive there",
)
_SAME_MEMORY = Verdict(
    "not in the graph",
    "another tensor with the same memory is: this one is its .data, its detach() or another view",
)
_NOT_THERE = Verdict(
    "not in the graph",
    "the loss was not computed from it, or the path is cut (detach(), .data, .item(), no_grad, "
    "another copy of the model, requires_grad set only since), which leaves no trace",
)
_PERHAPS_INSIDE = Verdict(
    "not in the graph",
    f"{_NOT_THERE.why}; or it is in the reentrant checkpoint, which autograd cannot see into",
)


@dataclass
class Reachability:
    """Judges whether a loss reaches a tensor; `sharded` are the ids of FSDP's parameters."""

    graphs: Graphs
    sharded: Collection[int] = ()
    _inside: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    _memory: dict[int, dict[int, list[range]]] = field(default_factory=dict)

    def verdict(self, index: int, variable: Tensor) -> Verdict:
        """Return whether loss number `index` reaches a tensor, or why not."""
        if not variable.requires_grad:
            return self._frozen(index, variable)
        if not self.graphs.losses[index].requires_grad:
            return _CONSTANT
        if self.graphs.reaches(index, variable):
            nodes = self.graphs.nodes[index]
            is_there = variable.grad_fn is not None or _leaf_node(variable) in nodes
            return _REACHED if is_there else _MOVED
        return self._unreached(index, variable)

    def _frozen(self, index: int, variable: Tensor) -> Verdict:
        if not (variable.is_floating_point() or variable.is_complex()):
            return _INTEGER
        return _FROZEN_SINCE if id(variable) in self.graphs.leaves[index] else _FROZEN

    def _unreached(self, index: int, variable: Tensor) -> Verdict:
        if id(variable) in self.sharded or sharding.may_be_sharded(variable):
            return _SHARDED
        if id(variable) in self._inside_checkpoints(index):
            return _INSIDE
        if variable.grad_fn is not None and (
            graph.has_rebuilt_history(variable)
            or graph.was_used_before_change(variable, self.graphs.nodes[index])
        ):
            return _CHANGED
        if self._shares_memory(index, variable):
            return _SAME_MEMORY
        has_checkpoint = any(kind.__name__ == _CHECKPOINT for kind in self.graphs.kinds(index))
        return _PERHAPS_INSIDE if has_checkpoint else _NOT_THERE

    def _inside_checkpoints(self, index: int) -> dict[int, Tensor]:
        if index not in self._inside:
            self._inside[index] = checkpointed_tensors(self.graphs, index)
        return self._inside[index]

    def _shares_memory(self, index: int, variable: Tensor) -> bool:
        if index not in self._memory:
            self._memory[index] = {}
            for leaf in self.graphs.leaves[index].values():
                storage, span = _memory_of(leaf)
                self._memory[index].setdefault(storage, []).append(span)
        storage, span = _memory_of(variable)
        # One storage, such as a flat vector of many parameters, may have a part for each.
        return any(
            span.start < other.stop and other.start < span.stop
            for other in self._memory[index].get(storage, ())
        )


def _leaf_node(leaf: Tensor) -> Node:
    # torch takes a view to find it, and __torch_function__ would make that another tensor.
    with without_torch_function():
        return graph.edge(leaf).node


def checkpointed_tensors(graphs: Graphs, index: int) -> dict[int, Tensor]:
    """Return the tensors that the functions of a loss's reentrant checkpoints use, by id."""
    nodes = [node for node in graphs.nodes[index] if type(node).__name__ == _CHECKPOINT]
    functions = [cast("Any", node).run_function for node in nodes]
    return tensors_by_id(captured_by(functions)) if functions else {}


def _memory_of(tensor: Tensor) -> tuple[int, range]:
    """Return a tensor's storage, and the span of bytes in it from its first to its last number."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided:
        return 0, range(0)  # no storage that could be compared
    storage = tensor.untyped_storage().data_ptr()
    if not storage or not tensor.numel():
        return 0, range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    start, itemsize = tensor.storage_offset(), tensor.element_size()
    return storage, range(start * itemsize, (start + length) * itemsize)


def graph_end(name: str, graphs: Graphs, index: int) -> str:
    """Return where the graph of a loss ends that reaches none of the params."""
    leaves = list(graphs.leaves[index].values())
    text = f"The graph of {name!r} ends before any parameter"
    if not leaves:
        return f"{text}."
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    shown = ", ".join(map(describe, leaves[:3]))
    return f"{text}, at leaf tensors that are not in params: {shown}{more}."
