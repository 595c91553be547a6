"""Nodes in whose presence a functional gradient would be silently incomplete or local."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gradkit._compat import ddp, fsdp
from gradkit.errors import UnsupportedGraphError, message

# [F1, M4, M5]; the names are those of `functions.REFUSED`.
_REASONS = {
    "CheckpointFunctionBackward": (
        "a graph without reentrant checkpoints",
        "one: autograd cannot see the parameters inside, and would leave out their gradient",
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    ),
    ddp.SINK: (
        "the forward pass of a plain module",
        "one of DistributedDataParallel (static_graph or find_unused_parameters), whose gradients "
        "would not be synchronized, and whose later backward() would stop reducing",
        "call gradkit.distributed.value_and_grads(losses, ddp), without static_graph; or run "
        "ddp.module(...) for the forward",
    ),
    fsdp.POST_BACKWARD: (
        "the forward pass of a plain module",
        "one of a fully_shard module, whose sharded parameters are not in the graph",
        "call gradkit.distributed.value_and_grads(losses, module)",
    ),
}


def refuse_nodes(kinds: Iterable[type], where: str, allowed: Collection[str] = ()) -> None:
    """Raise if a graph holds a node that would make its gradients wrong, but for those allowed."""
    for reason in refused_nodes(kinds, allowed):
        raise UnsupportedGraphError(message(where, *reason))


def refused_nodes(
    kinds: Iterable[type], allowed: Collection[str] = ()
) -> list[tuple[str, str, str]]:
    """Return (expected, got, what to do) for each kind of node that is refused."""
    names = {kind.__name__ for kind in kinds} & _REASONS.keys()
    return [_REASONS[name] for name in sorted(names.difference(allowed))]
