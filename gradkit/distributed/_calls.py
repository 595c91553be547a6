"""The eager calls for modules that DistributedDataParallel or fully_shard has wrapped."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd.passes import (
    PassResult,
    check_separate_options,
    finish,
    finish_separate,
    ordinary_mode,
    run_jointly,
    run_separately,
)
from gradkit._checks.call import require_reached
from gradkit._compat.dynamo import disable_compile
from gradkit._core import pytree
from gradkit._core.inputs import Losses, Params, fsdp_classes, read_weights
from gradkit._core.options import UNUSED, Strategy, Unused, check_option
from gradkit._core.pytree import PyTree
from gradkit.distributed import _ddp, _fsdp
from gradkit.distributed._call import DistributedCall
from gradkit.errors import LeafTypeError, StructureError, describe, message


@disable_compile
def value_and_grads(
    losses: PyTree,
    module: PyTree,
    *,
    weights: PyTree = None,
    unused: Unused = "none",
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the losses' values and the gradient of their weighted sum, reduced over the ranks.

    It is what `.backward()` of the wrapped module leaves in a fresh `.grad`, which is neither read
    nor written: the mean over the ranks, by the communication hook if there is one; in shards, for
    `fully_shard`. All ranks make the call. It reduces inside of `no_sync()`, too, so that gradients
    of micro-batches may be added up.

    Example:
        >>> import gradkit, tempfile, torch
        >>> rendezvous = f"file://{tempfile.mkdtemp()}/file"
        >>> torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        >>> loss = model(torch.ones(2, 3)).square().mean()
        >>> value, grads = gradkit.distributed.value_and_grads(loss, model)
        >>> {name: tuple(grad.shape) for name, grad in grads.items()}
        {'module.weight': (1, 3), 'module.bias': (1,)}
        >>> torch.distributed.destroy_process_group()

    Args:
        losses: As in `gradkit.value_and_grads`: this rank's, computed by the wrapped module.
        module: A module wrapped in `DistributedDataParallel` or by `fully_shard`, or a tree of
            those; it stands for `dict(module.named_parameters())`.
        weights: As in `gradkit.value_and_grads`.
        unused: As in `gradkit.value_and_grads`, for what no rank reaches.
        create_graph: As in `gradkit.value_and_grads`, for `DistributedDataParallel` only. A
            backward pass through the gradients reduces, so that all ranks must run it.
        retain_graph: As in `gradkit.value_and_grads`.

    Returns:
        `(values, grads)`. `values`: this rank's. `grads`: a tree like `module`, the same on all
        ranks; for `fully_shard`, DTensors in the placements of the sharded parameters. A gradient
        is None if no rank reaches the parameter.

    Raises:
        CollectiveError: A rank has failed, is missing, or is too late.
        DetachedLossError: No loss carries a graph.
        FreedGraphError: The graph has been freed by an earlier call.
        LeafTypeError: A leaf of `losses` has no gradient; `module` is no wrapped module.
        NotScalarLossError: A loss has not exactly one element.
        StructureError: As in `gradkit.value_and_grads`; or trees differ between ranks.
        UnreachedParamError: As in `gradkit.value_and_grads`.
        UnsupportedGraphError: As in `gradkit.value_and_grads`; or static_graph [M4], join(), the
            wrapper's mixed precision, FullyShardedDataParallel, fully_shard without gradient
            synchronization or with `create_graph`.

    Source:
        `torch.nn.parallel.DistributedDataParallel`; `torch.distributed.fsdp.fully_shard`.
    """
    check_option("unused", unused, UNUSED)

    def run(target: Losses, wanted: Params, **how: Any) -> PassResult:
        return run_jointly(
            target,
            wanted,
            weights,
            unused="none",
            create_graph=create_graph,
            retain_graph=retain_graph,
            **how,
        )

    with ordinary_mode():
        call, check = "gradkit.distributed.value_and_grads", partial(read_weights, weights)
        work = DistributedCall(call, losses, module, run, True, create_graph, check)
        found, wanted = _reduced(work)
        require_reached(found.grads, found.target, found.plan, unused)
        return found.values, finish(found.grads[0], wanted, unused, create_graph)


@disable_compile
def per_loss_grads(
    losses: PyTree,
    module: PyTree,
    *,
    unused: Unused = "none",
    create_graph: bool = False,
    retain_graph: bool | None = None,
    strategy: Strategy = "sequential",
    chunk_size: int | None = None,
) -> PyTree:
    """Return the gradients of every loss by itself, reduced over the ranks.

    For `DistributedDataParallel` the gradients of all losses are sent together, in as few
    collectives as their bytes need (with a communication hook, loss by loss). For `fully_shard`
    there is a backward pass for each loss, which gathers and reduces. All ranks make the call.

    Example:
        >>> import gradkit, tempfile, torch
        >>> rendezvous = f"file://{tempfile.mkdtemp()}/file"
        >>> torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        >>> out = model(torch.ones(4, 3))
        >>> losses = {"a": out[:, 0].mean(), "b": out[:, 1].mean()}
        >>> grads = gradkit.distributed.per_loss_grads(losses, model)
        >>> grads["a"]["module.bias"]
        tensor([1., 0.])
        >>> torch.distributed.destroy_process_group()

    Args:
        losses: As in `gradkit.per_loss_grads`: this rank's, of the same shapes on all ranks.
        module: As in `value_and_grads`.
        unused: As in `value_and_grads`, for each loss.
        create_graph: As in `value_and_grads`.
        retain_graph: As in `gradkit.per_loss_grads`.
        strategy: As in `gradkit.per_loss_grads`; with `fully_shard` there is `"sequential"` only.
        chunk_size: As in `gradkit.per_loss_grads`.

    Returns:
        A tree like `losses`, each leaf replaced by a tree like `module`, as in
        `gradkit.per_loss_grads`, and the same on all ranks.

    Raises:
        CollectiveError: As in `value_and_grads`.
        DetachedLossError: No loss carries a graph.
        FreedGraphError: The graph has been freed by an earlier call.
        LeafTypeError: As in `value_and_grads`.
        StructureError: As in `gradkit.per_loss_grads`; or trees differ between ranks.
        UnreachedParamError: As in `gradkit.per_loss_grads`.
        UnsupportedGraphError: As in `value_and_grads`.

    Source:
        As `value_and_grads`.
    """
    check_separate_options(unused, strategy, chunk_size)

    def run(target: Losses, wanted: Params, **how: Any) -> PassResult:
        found = run_separately(
            target,
            wanted,
            unused="none",
            create_graph=create_graph,
            retain_graph=retain_graph,
            strategy=strategy,
            chunk_size=chunk_size,
            **how,
        )
        return found.with_constants(wanted)

    with ordinary_mode():
        work = DistributedCall(
            "gradkit.distributed.per_loss_grads", losses, module, run, False, create_graph
        )
        found, wanted = _reduced(work)
        require_reached(found.grads, found.target, found.plan, unused)
        return finish_separate(found, wanted, unused, create_graph)


def _reduced(work: DistributedCall) -> tuple[PassResult, Params]:
    replicas, shards = _wrapped(work.module)
    return _fsdp.run(work, shards) if shards else _ddp.run(work, replicas)


def _wrapped(
    tree: PyTree,
) -> tuple[list[DistributedDataParallel], list[nn.Module]]:
    """Return the modules that are replicated, and those that are sharded, in a tree of modules."""
    leaves, spec = pytree.flatten(tree)
    replicas: list[DistributedDataParallel] = []
    shards: list[nn.Module] = []
    for index, leaf in enumerate(leaves):
        parts = list(leaf.modules()) if isinstance(leaf, nn.Module) else []
        here = [part for part in parts if isinstance(part, DistributedDataParallel)]
        split = [part for part in parts if isinstance(part, fsdp_classes())]
        if bool(here) == bool(split) or (replicas and split) or (shards and here):
            raise LeafTypeError(
                message(
                    pytree.path(spec, index, "module"),
                    "a module wrapped in DistributedDataParallel, or by fully_shard, as the others",
                    "both" if here and split else describe(leaf),
                    "pass the wrapped module; for parts of it or your own wrapping, call "
                    "gradkit.distributed.all_reduce(grads) on what gradkit.value_and_grads returns",
                )
            )
        replicas += here
        shards += split
    if not leaves:
        raise StructureError(message("module", "a wrapped module", "an empty tree", "pass one"))
    return replicas, shards
