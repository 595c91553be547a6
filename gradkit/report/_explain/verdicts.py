"""Why a loss does or does not reach a parameter, as far as the graph shows it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._checks import unsupported
from gradkit._core import graph
from gradkit._core.ownership import PLAIN_TYPES
from gradkit.errors import describe
from gradkit.report._explain.closure import held_by, tensors_of
from gradkit.report._explain.graphs import Graphs
from gradkit.report._explain.records import Verdict

_CHECKPOINT = "CheckpointFunctionBackward"

_FROZEN = Verdict("frozen", "requires_grad is False")
_FROZEN_SINCE = Verdict("frozen", "requires_grad has been set to False since the loss was computed")
_NUMBERS = Verdict("frozen", "its numbers are not floating-point, and have no gradient")
_CONSTANT = Verdict(
    "constant loss",
    "the loss carries no graph: made under no_grad or inference_mode, detached, or from inputs "
    "none of which requires grad",
)
_SHARDED = Verdict("sharded", "the parameters of a module sharded by FSDP are not in the graph")
_INSIDE = Verdict(
    "reentrant checkpoint",
    "held by the function of a reentrant checkpoint, into which autograd cannot see; pass "
    "use_reentrant=False",
)
_MOVED = Verdict(
    "moved", "moved or cast since the loss was computed, which leaves the graph behind"
)
_CHANGED = Verdict(
    "changed in place",
    "a view or a value that was changed in place since its use: no gradient can arrive there",
)
_SAME_MEMORY = Verdict(
    "not in the graph",
    "another tensor with the same memory is, so this one is its .data, a detach() or a view made "
    "apart",
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
    """Tells of any loss and variable whether the one reaches the other.

    Attributes:
        graphs: The graphs of the losses.
        sharded: The parameters of modules sharded by FSDP, by id.
    """

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
        nodes = self.graphs.nodes[index]
        if self.graphs.reaches(index, variable):
            is_there = variable.grad_fn is not None or _leaf_node(variable) in nodes
            return Verdict("reached") if is_there else _MOVED
        return self._unreached(index, variable)

    def _frozen(self, index: int, variable: Tensor) -> Verdict:
        if not (variable.is_floating_point() or variable.is_complex()):
            return _NUMBERS
        return _FROZEN_SINCE if id(variable) in self.graphs.leaves[index] else _FROZEN

    def _unreached(self, index: int, variable: Tensor) -> Verdict:
        if id(variable) in self.sharded or unsupported.may_be_sharded(variable):
            return _SHARDED
        if id(variable) in self._inside_checkpoints(index):
            return _INSIDE
        if variable.grad_fn is not None and (
            graph.has_another_history(variable)
            or graph.was_used_before_change(variable, self.graphs.nodes[index])
        ):
            return _CHANGED
        if self._shares_memory(index, variable):
            return _SAME_MEMORY
        return _PERHAPS_INSIDE if self._has_checkpoint(index) else _NOT_THERE

    def _has_checkpoint(self, index: int) -> bool:
        return any(kind.__name__ == _CHECKPOINT for kind in self.graphs.kinds(index))

    def _inside_checkpoints(self, index: int) -> dict[int, Tensor]:
        if index not in self._inside:
            functions = checkpointed(self.graphs, index)
            self._inside[index] = tensors_of(held_by(functions)) if functions else {}
        return self._inside[index]

    def _shares_memory(self, index: int, variable: Tensor) -> bool:
        if index not in self._memory:
            self._memory[index] = {}
            for leaf in self.graphs.leaves[index].values():
                storage, numbers = _memory_of(leaf)
                self._memory[index].setdefault(storage, []).append(numbers)
        storage, mine = _memory_of(variable)
        # Of one storage, as a vector that many parameters are parts of, each may have its own part.
        return any(
            mine.start < other.stop and other.start < mine.stop
            for other in self._memory[index].get(storage, ())
        )


def _leaf_node(leaf: Tensor) -> Node:
    # To find it torch takes a view, which __torch_function__ would make a tensor of its own.
    with torch._C.DisableTorchFunctionSubclass():
        return graph.edge(leaf).node


def checkpointed(graphs: Graphs, index: int) -> list[object]:
    """Return the functions that reentrant checkpoints in the graph of a loss would run again."""
    nodes = (node for node in graphs.nodes[index] if type(node).__name__ == _CHECKPOINT)
    return [cast("Any", node).run_function for node in nodes]


def _memory_of(tensor: Tensor) -> tuple[int, range]:
    """Return the storage of a tensor, and where in it from the first number to the last stand."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided:
        return 0, range(0)  # its memory is not its own
    storage = tensor.untyped_storage().data_ptr()
    if not storage or not tensor.numel():
        return 0, range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    start, bytes_each = tensor.storage_offset(), tensor.element_size()
    return storage, range(start * bytes_each, (start + length) * bytes_each)


def where_it_ends(name: str, graphs: Graphs, index: int) -> str:
    """Return where the graph of a loss ends that reaches none of the params."""
    others = list(graphs.leaves[index].values())
    told = f"The graph of {name!r} ends before any parameter"
    if not others:
        return f"{told}."
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"{told}, at leaf tensors that are not in params: {_shown(others[:3])}{more}."


def _shown(tensors: list[Tensor]) -> str:
    return ", ".join(map(describe, tensors))
