"""Whether each loss of a vector is computed from one sample alone, read from the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._checks.batch_dim_rules import BatchDim, NotProvedError, inputs_of, permutation
from gradkit._compat.nodes import hooked_tensors, output_dtype
from gradkit._core.graph import Subgraph, edge, is_leaf_node, leaf_tensors

_TRANSPOSITIONS = {"TBackward0", "TransposeBackward0", "PermuteBackward0"}


@dataclass(frozen=True, slots=True)
class Use:
    """An operation in which all samples share a variable."""

    node: Node
    operand: int  # which of its inputs the variable is
    transposed: bool  # that input is the transposed variable
    variable: int  # its number
    batch: BatchDim  # where the samples lie in the output

    @property
    def kind(self) -> tuple[str, int, bool]:
        """What tells how the gradient of a sample follows from this use."""
        return type(self.node).__name__, self.operand, self.transposed


def uses_shared_by_samples(
    loss: Tensor,
    below: Subgraph,
    variables: Sequence[Tensor],
    known: Collection[tuple[str, int, bool]],
) -> list[Use]:
    """Return where the samples share variables; raise if a sample may depend on another."""
    # From the vector down, each tensor gets a `BatchDim`. If one gets two that differ, if samples
    # share what was computed from a variable, or if a use is not of a known kind, nothing is
    # proved. What leads to no variable is not looked at.
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    leading = below.leading_to(variables)
    top = edge(loss)[:2]
    batches = {top: BatchDim((loss.numel(),), 0, 1, loss.numel()).viewed(tuple(loss.shape))}
    uses: list[Use] = []
    stack = [top]
    while stack:
        output = stack.pop()
        inputs = inputs_of(output[0], batches[output])
        for operand, (node, number) in enumerate(output[0].next_functions):
            if node is None or not (node in leading or _number(node, numbers) >= 0):
                continue
            child, batch = (node, number), inputs[operand]
            if batch is None:
                use = _use(output, operand, node, batches[output], numbers)
                if use.kind not in known:
                    raise NotProvedError
                uses.append(use)
            elif child not in batches:
                batches[child] = batch
                stack.append(child)
            elif batches[child] != batch:
                raise NotProvedError
    return uses


def _number(node: Node, numbers: Mapping[int, int]) -> int:
    """Return the number of the variable whose gradient a node accumulates; -1 for other nodes."""
    return next((numbers.get(leaf, -1) for leaf in leaf_tensors([node])), -1)


def _use(
    output: tuple[Node, int],
    operand: int,
    child: Node,
    batch: BatchDim,
    numbers: Mapping[int, int],
) -> Use:
    transposed = type(child).__name__ in _TRANSPOSITIONS and permutation(child) == [1, 0]
    leaf = child.next_functions[0][0] if transposed else child
    if leaf is None or not is_leaf_node(leaf) or output[1] or hooked_tensors(output[0]):
        raise NotProvedError  # to read what a hook has may recompute a checkpoint
    if output_dtype(*output) != output_dtype(leaf, 0):
        raise NotProvedError
    return Use(output[0], operand, transposed, _number(leaf, numbers), batch)
