"""The eager calls for modules that DistributedDataParallel or fully_shard has wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd import passes
from gradkit._checks.reachability import require_reached
from gradkit._compat import distributed
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import (
    Strategy,
    Unused,
    check_batching,
    check_chunk_size,
    check_optional_bool,
    check_weighting,
    read_pass_options,
)
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.params import Params, read_iterator, read_params
from gradkit._core.pytree import PyTree, Structure
from gradkit._state.hook_tables import hooks_put_back
from gradkit.distributed import _ddp, _distributed_call, _fsdp
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.distributed._gramian import (
    call_for_elements,
    gram_of_replicas,
    sequential,
    weights_on_all_ranks,
)
from gradkit.errors import LeafTypeError, StructureError, describe, message

_WRAPPED = "a module wrapped in DistributedDataParallel, or by fully_shard"
_WRAP_OR_REDUCE = (
    "pass the wrapped module; for parts of a sharded one or your own wrapping, call "
    "gradkit.distributed.all_reduce(grads) on what gradkit.value_and_grads returns"
)


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

    As `gradkit.value_and_grads`, but for what follows. All ranks make the call. The gradient is
    what `.backward()` of the wrapped module leaves in a fresh `.grad`: the mean over the ranks, by
    the communication hook if there is one; for `fully_shard`, in shards. `.grad` is neither read
    nor written. It reduces inside of `no_sync()`, too: gradients of micro-batches may be added up.

    Example:
        >>> import gradkit, torch
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        >>> loss = model(torch.ones(2, 3)).square().mean()
        >>> value, grads = gradkit.distributed.value_and_grads(loss, model)
        >>> {name: tuple(grad.shape) for name, grad in grads.items()}
        {'module.weight': (1, 3), 'module.bias': (1,)}
        >>> torch.distributed.destroy_process_group()

    Args:
        losses: Those of this rank, computed by the wrapped module.
        module: A module wrapped in `DistributedDataParallel` or by `fully_shard`, or a tree of
            such modules; it stands for `dict(module.named_parameters())`. Or parameters of one in
            `DistributedDataParallel`: a part of it, a tree or an iterator of them, an optimizer.
        weights: A function gets the `gram` over all ranks, and is called on each; its weights on
            the first rank are those of all.
        unused: For parameters that no rank reaches.
        create_graph: For `DistributedDataParallel` only. A backward pass through the gradients
            reduces, so that all ranks must run it.
        retain_graph: As there.

    Returns:
        `(values, grads)`. `values`: those of this rank. `grads`: a tree like `module`, the same on
        all ranks; for `fully_shard`, DTensors in the placements of the sharded parameters. A
        gradient is None if no rank reaches the parameter.

    Raises:
        CollectiveError: A rank has failed, is missing, or is too late.
        LeafTypeError: `module` is not a wrapped module, nor parameters of a replicated one.
        StructureError: Trees, or the parameters that are frozen, differ between ranks.
        UnsupportedGraphError: static_graph, join(), mixed precision of
            DistributedDataParallel, FullyShardedDataParallel, fully_shard without gradient
            synchronization or with `create_graph`.
        GradkitError: As in `gradkit.value_and_grads`.

    Source:
        `torch.nn.parallel.DistributedDataParallel`; `torch.distributed.fsdp.fully_shard`.
    """
    retain = read_pass_options(unused, create_graph, retain_graph)
    name, module = "gradkit.distributed.value_and_grads", _read_iterators(module)
    with leave_inference_mode():
        if weights is not None and callable(weights):
            check_weighting(weights)
            weights = weights_from_gram(name, losses, module, weights)
        run = partial(passes.run_jointly, weights=weights)
        call = DistributedCall(name, losses, module, run, True, create_graph, retain, weights)
        result, params = _run(call, unused)
        return result.values, passes.grads_to_tree(result.grads[0], params, unused, create_graph)


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
    """Return the gradients of each loss, reduced over the ranks.

    As `gradkit.per_loss_grads`, for modules as in `value_and_grads`. For `DistributedDataParallel`,
    the gradients of all losses are sent together, 25 MB at a time and large ones singly (with a
    communication hook, loss by loss). For `fully_shard`, a backward pass for each loss gathers and
    reduces.

    Example:
        >>> import gradkit, torch
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        >>> out = model(torch.ones(4, 3))
        >>> losses = {"a": out[:, 0].mean(), "b": out[:, 1].mean()}
        >>> grads = gradkit.distributed.per_loss_grads(losses, model)
        >>> grads["a"]["module.bias"]
        tensor([1., 0.])
        >>> torch.distributed.destroy_process_group()

    Args:
        losses: Those of this rank, of equal shapes on all ranks.
        module: As in `value_and_grads`.
        unused: As in `value_and_grads`, for each loss.
        create_graph: As in `value_and_grads`.
        retain_graph: As in `gradkit.per_loss_grads`.
        strategy: As in `gradkit.per_loss_grads`; with `fully_shard` there is `"sequential"` only.
        chunk_size: As in `gradkit.per_loss_grads`.

    Returns:
        A tree like `losses`, each leaf replaced by a tree like `module`, the same on all ranks.

    Raises:
        GradkitError: As in `value_and_grads`, but for `NotScalarLossError`.

    Source:
        As `value_and_grads`.
    """
    retain = read_pass_options(unused, create_graph, retain_graph)
    check_batching(strategy, chunk_size)
    run = partial(passes.run_separately, strategy=strategy, chunk_size=chunk_size)
    name, module = "gradkit.distributed.per_loss_grads", _read_iterators(module)
    call = DistributedCall(name, losses, module, run, False, create_graph, retain)
    with leave_inference_mode():
        result, params = _run(call, unused)
        return passes.trees_by_loss(result, params, unused)


@disable_compile
def simultaneous_grads(
    losses: PyTree,
    modules: PyTree,
    *,
    unused: Unused = "none",
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> PyTree:
    """Return the simultaneous gradient of a game between modules, reduced over the ranks.

    As `gradkit.simultaneous_grads`. For `DistributedDataParallel`, each pass visits what its own
    player needs. For `fully_shard`, it is a whole backward pass for each loss, of which the other
    players' gradients are dropped.

    Example:
        >>> import gradkit, torch
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> wrap = torch.nn.parallel.DistributedDataParallel
        >>> players = {"G": wrap(torch.nn.Linear(2, 2)), "D": wrap(torch.nn.Linear(2, 1))}
        >>> score = players["D"](players["G"](torch.ones(4, 2))).mean()
        >>> grads = gradkit.distributed.simultaneous_grads({"G": -score, "D": score}, players)
        >>> grads["D"]["module.bias"], list(grads["G"])
        (tensor([1.]), ['module.weight', 'module.bias'])
        >>> torch.distributed.destroy_process_group()

    Args:
        losses: Those of this rank.
        modules: A tree of wrapped modules, as in `value_and_grads`, with one part for each loss.
        unused: As in `value_and_grads`, for each loss and its own part.
        create_graph: As in `value_and_grads`.
        retain_graph: As in `value_and_grads`.

    Returns:
        A tree like `modules`, its leaves as in `value_and_grads`.

    Raises:
        StructureError: `losses` is not a prefix of `modules`.
        GradkitError: As in `value_and_grads`.

    Source:
        As `gradkit.simultaneous_grads`.
    """
    retain = read_pass_options(unused, create_graph, retain_graph)
    name, modules = "gradkit.distributed.simultaneous_grads", _read_iterators(modules)
    with leave_inference_mode():
        _, shards = _wrapped_in(modules)
        options: Any = {"create_graph": create_graph, "retain": retain}
        call = _distributed_call.game(name, losses, modules, whole=bool(shards), **options)
        result, each = _distributed_call.own_parts(*_run_on_modules(call), unused)
        require_reached(result.call, result.grads, unused)
        return passes.simultaneous_trees(result, each)


@disable_compile
def gram(
    losses: PyTree,
    module: PyTree,
    *,
    chunk_size: int | None = None,
    retain_graph: bool | None = None,
) -> Tensor:
    """Return the inner products of the losses' gradients, which are reduced over the ranks.

    The angles between losses on the whole batch, not on one rank's part of it, as in
    `gradkit.gram`. Under `DistributedDataParallel` the K gradients of a parameter are averaged as
    they arrive, multiplied, and freed. Under `fully_shard` each rank holds its shards of K sets of
    gradients.

    Example:
        >>> import gradkit, torch
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        >>> out = model(torch.ones(4, 3))
        >>> gradkit.distributed.gram([out[:, 0].mean(), out.sum()], model)
        tensor([[  4.,  16.],
                [ 16., 128.]])
        >>> torch.distributed.destroy_process_group()

    Args:
        losses: Those of this rank, of equal shapes on all ranks.
        module: As in `value_and_grads`.
        chunk_size: As in `gradkit.gram`. Where passes are sequential, the number of losses whose
            gradients are held while those of the others pass by. None: 1, and K with `fully_shard`.
        retain_graph: As in `gradkit.gram`.

    Returns:
        `[K, K]`, the same on all ranks.

    Raises:
        GradkitError: As in `per_loss_grads`.

    Source:
        As `gradkit.gram`.
    """
    check_optional_bool("retain_graph", retain_graph)
    check_chunk_size(chunk_size)
    with leave_inference_mode():
        module = _read_iterators(module)
        call = call_for_elements("gradkit.distributed.gram", losses, module)
        return _gram_of(call, chunk_size, bool(retain_graph))


def _gram_of(call: DistributedCall, chunk_size: int | None, retain: bool) -> Tensor:
    replicas, shards = _wrapped_in(call.module)
    if shards:
        return sequential(call, lambda part: _fsdp.run(part, shards), chunk_size, retain)
    return gram_of_replicas(call, replicas, chunk_size, retain)


def weights_from_gram(
    name: str, losses: PyTree, module: PyTree, weighting: Callable[..., Any]
) -> PyTree:
    """Return the weights that a function makes of the products over all ranks."""
    call = call_for_elements(name, losses, module, scalar=True)
    with hooks_put_back(), INSIDE:
        product = _gram_of(call, None, retain=True)
    replicas, shards = _wrapped_in(module)
    ranks = (
        _fsdp.require_groups(shards, name) if shards else [_ddp.require_one_group(replicas, name)]
    )
    return weights_on_all_ranks(ranks, losses, product, weighting)


def _run(call: DistributedCall, unused: str) -> tuple[passes.PassResult, Params]:
    result, params = _run_on_modules(call)
    require_reached(result.call, result.grads, unused)
    return result, params


def _run_on_modules(call: DistributedCall) -> tuple[passes.PassResult, Params]:
    replicas, shards = _wrapped_in(call.module)
    return _fsdp.run(call, shards) if shards else _ddp.run(call, replicas)


def _wrapped_in(tree: PyTree) -> tuple[list[DistributedDataParallel], list[nn.Module]]:
    """Return the replicated and the sharded modules that a tree is of; one list is empty."""
    leaves, spec = pytree.flatten(tree)
    if not leaves:
        raise StructureError(message("module", "a wrapped module", "an empty tree", "pass one"))
    replicas: list[DistributedDataParallel] = []
    shards: list[nn.Module] = []
    unwrapped: list[int] = []  # parameters, or modules of them, that a replicated module may have
    for index, leaf in enumerate(leaves):
        parts = distributed.modules_in(leaf) if isinstance(leaf, nn.Module) else []
        replicated = [part for part in parts if isinstance(part, DistributedDataParallel)]
        sharded: list[Any] = [
            part for part in parts if isinstance(part, distributed.module_classes())
        ]
        if isinstance(leaf, Tensor | nn.Module | None) and not (replicated or sharded):
            unwrapped.append(index)
        elif bool(replicated) == bool(sharded) or (replicas and sharded) or (shards and replicated):
            _refuse_leaf(spec, index, "both" if replicated and sharded else describe(leaf))
        replicas += replicated
        shards += sharded
    if unwrapped:
        bare = read_params([leaves[index] for index in unwrapped], allow_distributed=True)
        replicated = [] if shards else distributed.replicas_of(bare.variables)
        if not replicated:
            _refuse_leaf(spec, unwrapped[0], describe(leaves[unwrapped[0]]))
        replicas += replicated
    return list({id(module): module for module in replicas}.values()), shards


def _refuse_leaf(spec: Structure, index: int, got: str) -> NoReturn:
    where = pytree.path(spec, index, "module")
    raise LeafTypeError(message(where, _WRAPPED, got, _WRAP_OR_REDUCE))


def _read_iterators(tree: PyTree) -> PyTree:
    """Return the tree, with the parameters of optimizers and of iterators, which are read once."""
    leaves, spec = pytree.flatten(tree)
    return pytree.unflatten(spec, list(map(read_iterator, leaves)))
