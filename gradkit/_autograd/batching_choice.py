"""Which losses are batched: vmapped passes for their elements, and not a pass for each."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from gradkit._checks.checked import is_checked
from gradkit._checks.modified_gradients import refuse_pre_hooks, user_code_may_run_in
from gradkit._compat.dynamo import COMPILED
from gradkit._compat.nodes import any_sparse_gradients, sizes_of_gradients
from gradkit._core import user_code
from gradkit._core.call import Call
from gradkit._core.grad_recorder import any_observers
from gradkit._core.graph import Subgraph
from gradkit.errors import warn_fallback

# What the engine's batched mode gets wrong, or cannot do [G1, G6].
_UNBATCHABLE = {
    "AsStridedScatterBackward0": "torch computes a batched as_strided_scatter wrongly",
    COMPILED: "a backward compiled by torch.compile takes no batch",
}

# A batched pass saves the overhead of an operation, not its work: it pays where there are several
# elements, and tensors that are small. On the CPU these bounds, on the elements of all gradients
# that a pass makes, and on those of the largest, take 1.001 of the better strategy in the mean, and
# 1.07 at most: `python -m benchmarks.choosing` derives them. On CUDA nothing was measured: there,
# the bound is where a pass should take about a millisecond.
_FEW = 4
_MOST_IN_ALL = 1 << 22
_LARGEST = {"cpu": 1 << 17, "cuda": 1 << 20}

_NO_LEAF = "the gradient of a tensor that is no leaf is taken where it arrives, one at a time"
_NOTHING_TO_BATCH = (
    "a loss of one element is a batch of one; the losses of a tree are not batched with each "
    "other, which would push zeros through each other's graphs, and 0 * inf is nan"
)


def choose(strategy: str, call: Call) -> set[int]:
    """Return the indices of the losses to batch, and warn if some were to be and cannot."""
    if strategy == "sequential":
        return set()
    if user_code_may_run_in(call):
        refuse_pre_hooks(call)
    indices = call.differentiated
    losses = [call.outputs[index] for index in indices]
    by_id = dict(zip(map(id, losses), indices, strict=True))

    def below(loss: Tensor) -> Subgraph:
        return call.graph.below([by_id[id(loss)]])

    def why_not(loss: Tensor) -> str | None:
        variables = call.passes[0].params.variables
        if loss.retains_grad or any(v.grad_fn is not None for v in variables):
            return _NO_LEAF
        return why_not_batched(below(loss))

    batch = losses_to_batch(strategy, losses, why_not, below)
    return {index for index, is_batched in zip(indices, batch, strict=True) if is_batched}


def losses_to_batch(
    strategy: str,
    losses: list[Tensor],
    why_not: Callable[[Tensor], str | None],
    below: Callable[[Tensor], Subgraph] = lambda loss: Subgraph([loss]),
) -> list[bool]:
    """Return which losses to batch; `why_not` gives the reason against one, if there is any."""
    if strategy == "sequential":
        return [False] * len(losses)
    if strategy == "auto":
        return [_worth_batching(loss, below) and why_not(loss) is None for loss in losses]
    few = {0: "", 1: _NOTHING_TO_BATCH}  # of an empty loss there is nothing to say
    reasons = [few[loss.numel()] if loss.numel() in few else why_not(loss) for loss in losses]
    refused = dict.fromkeys(reason for reason in reasons if reason)
    if None in reasons:
        refused.pop(_NOTHING_TO_BATCH, None)
    if refused:
        warn_not_batched("; ".join(refused))
    return [reason is None for reason in reasons]


def warn_not_batched(reason: str) -> None:
    """Warn that the passes of a loss run one by one, where batched ones were asked for."""
    if not torch.compiler.is_compiling():
        warn_fallback(f"per_loss_grads fell back from batched to sequential passes: {reason}.")


def _worth_batching(loss: Tensor, below: Callable[[Tensor], Subgraph]) -> bool:
    if loss.numel() < _FEW or not loss.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return True
    device = loss.device.type
    if device not in _LARGEST:
        return False
    sizes = sizes_of_gradients(below(loss).nodes)
    is_small = max(sizes, default=0) <= _LARGEST[device]
    return is_small and (device != "cpu" or sum(sizes) <= _MOST_IN_ALL)


def why_not_batched(below: Subgraph, allowed: Collection[str] = ()) -> str | None:
    """Return why a graph is known not to come out right in the batched mode, or not to run."""
    if is_checked():
        return "gradkit.checked() looks at one pass at a time"
    if any_observers():
        return "safe_retain keeps gradients, and those of a batch cannot outlive it"
    for kind in below.kinds:
        if kind.__name__ in _UNBATCHABLE:
            return _UNBATCHABLE[kind.__name__]
    # Of the Functions that are allowed, it is known that they do.
    kinds = [kind for kind in below.kinds if kind.__name__ not in allowed]
    custom = user_code.user_functions(kinds)
    if custom:
        return f"the backward of {custom[0].__name__.removesuffix('Backward')} may not be batchable"
    if any_sparse_gradients(below.nodes):
        return "a sparse gradient cannot be batched"
    return None
