"""Whether a loss reaches a parameter, and why not, as far as the graph shows it."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradkit._checks import reachability
from gradkit._compat.autograd import without_torch_function
from gradkit._compat.undoing import INSIDE
from gradkit._core.graph import Subgraph, edge, has_rebuilt_history, was_used_before_change
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.user_code import captured_by
from gradkit.report._explain.explanation import Verdict

_CHECKPOINT = "CheckpointFunctionBackward"

_REACHED = Verdict("reached")
_FROZEN = Verdict("frozen", "requires_grad is False")
_FROZEN_SINCE = Verdict("frozen", "requires_grad has been set to False since the loss was computed")
_INTEGER = Verdict("frozen", "its dtype is not floating-point, and has no gradient")
_CONSTANT = Verdict(
    "constant loss",
    "the loss carries no graph: made under no_grad or inference_mode, detached, from inputs none "
    "of which requires grad, by a checkpoint with use_reentrant=True of such inputs, or by an "
    "operation that drops it, which gradkit.checked() around the forward pass names",
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
_INFERENCE = Verdict(
    "made in inference mode",
    "a parameter made inside torch.inference_mode(): torch leaves uses of it out of the graph",
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
    "another copy of the model, requires_grad set only since, a checkpoint with use_reentrant=True "
    "none of whose inputs requires grad), which leaves no trace",
)
_PERHAPS_INSIDE = Verdict(
    "not in the graph",
    f"{_NOT_THERE.why}; or it is in the reentrant checkpoint, which autograd cannot see into",
)


class Reachability:
    """Judges which tensors a loss reaches; `sharded` are the ids of FSDP's parameters."""

    def __init__(self, graph: Subgraph, sharded: Collection[int]) -> None:
        self.graph = graph
        self.sharded = sharded

    def verdict(self, variable: Tensor) -> Verdict:
        """Return whether the loss reaches a tensor, or why not."""
        if not (variable.is_floating_point() or variable.is_complex()):
            return _INTEGER  # such a tensor cannot require grad
        if not variable.requires_grad:
            return _FROZEN_SINCE if id(variable) in self.graph.leaves else _FROZEN
        if not self.graph.roots:
            return _CONSTANT
        if variable.is_inference():
            return _INFERENCE
        if not self.graph.reaches(variable):
            return self._unreached(variable)
        is_there = variable.grad_fn is not None or _leaf_node(variable) in self.graph.nodes
        return _REACHED if is_there else _MOVED

    def _unreached(self, variable: Tensor) -> Verdict:
        if id(variable) in self.sharded or reachability.is_fsdp_shard(variable):
            return _SHARDED
        if id(variable) in self._checkpointed:
            return _INSIDE
        if variable.grad_fn is not None and (
            has_rebuilt_history(variable) or was_used_before_change(variable, self.graph.nodes)
        ):
            return _CHANGED
        storage, span = _memory_of(variable)
        # One storage, such as a flat vector of many parameters, may have a part for each.
        spans = self._memory.get(storage, ())
        if any(span.start < other.stop and other.start < span.stop for other in spans):
            return _SAME_MEMORY
        has_checkpoint = any(kind.__name__ == _CHECKPOINT for kind in self.graph.kinds)
        return _PERHAPS_INSIDE if has_checkpoint else _NOT_THERE

    @cached_property
    def _checkpointed(self) -> dict[int, Tensor]:
        return checkpointed_tensors(self.graph)

    @cached_property
    def _memory(self) -> dict[int, list[range]]:
        """The spans of bytes of the leaves in the graph, by storage."""
        spans: dict[int, list[range]] = {}
        for storage, span in map(_memory_of, self.graph.leaves.values()):
            spans.setdefault(storage, []).append(span)
        return spans


def _leaf_node(leaf: Tensor) -> Node:
    # torch takes a view to find it, and __torch_function__ would make that another tensor.
    with without_torch_function(), INSIDE:
        return edge(leaf).node


def checkpointed_tensors(graph: Subgraph) -> dict[int, Tensor]:
    """Return the tensors that the functions of a graph's reentrant checkpoints use, by id."""
    nodes = [cast("Any", node) for node in graph.nodes if type(node).__name__ == _CHECKPOINT]
    tensors: dict[int, Tensor] = {}
    for value in captured_by([node.run_function for node in nodes]):
        if isinstance(value, nn.Module):
            tensors |= {id(param): param for param in value.parameters()}
        elif isinstance(value, Tensor):
            tensors[id(value)] = value
    return tensors


def _memory_of(tensor: Tensor) -> tuple[int, range]:
    """Return a tensor's storage, and the span of bytes in it from its first to its last number."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_nested:
        return 0, range(0)  # no storage that could be compared
    storage = tensor.untyped_storage().data_ptr()
    if not storage or not tensor.numel():
        return 0, range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    start, itemsize = tensor.storage_offset(), tensor.element_size()
    return storage, range(start * itemsize, (start + length) * itemsize)
