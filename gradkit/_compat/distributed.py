"""Private names of torch.distributed: DDP, FSDP, DTensor. Run on torch 2.11 to 2.15, or as said.

FSDP and DTensor are looked up, not imported: a process that has not imported them has none.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._compat.undoing import INSIDE

# The node that a forward pass with static_graph or find_unused_parameters adds.
SINK = "_DDPSinkBackward"


def sink_is_static(node: Any) -> bool:
    """Return whether the module that added a `SINK` node has static_graph."""
    return bool(node.ddp_weakref().static_graph)


def modules_in(module: nn.Module) -> list[Any]:
    """Return a module and all inside of it, several times as fast as `modules()`."""
    parts, parents = [module], set()
    for part in parts:  # the list grows meanwhile
        children = part._modules
        if children and id(part) not in parents:
            parents.add(id(part))
            parts += [child for child in children.values() if child is not None]
    return list(dict.fromkeys(parts))


# The process groups there are: none before `init_process_group`, and once all are destroyed.
PROCESS_GROUPS: dict[Any, Any] = dist.distributed_c10d._pg_map if dist.is_available() else {}
# How many references the class of DDP's reducers has without any; and had when these were found.
_REDUCER: Any = getattr(dist, "Reducer", None)
_IDLE = sys.getrefcount(_REDUCER)
_found: tuple[int, list[ref[DistributedDataParallel]]] = -1, []


def replicas() -> list[DistributedDataParallel]:
    """Return the DDP modules of this process."""
    # Torch has no list of them, and a search through all objects takes tens of milliseconds. Each
    # has one reducer, and CPython counts an instance as a reference to its class: only where one
    # was made or freed is the search repeated. Run on torch 2.13.
    global _found
    count, references = _found
    alive = [module for reference in references if (module := reference()) is not None]
    now, has_gil = sys.getrefcount(_REDUCER), getattr(sys, "_is_gil_enabled", lambda: True)
    if now != count or len(alive) < len(references) or not has_gil():
        alive = _search()
        if len(alive) < now - _IDLE and gc.get_freeze_count():  # frozen objects are hidden
            gc.unfreeze()
            alive = _search()
            gc.freeze()
        _found = now, list(map(ref, alive))
    return alive


def _search() -> list[DistributedDataParallel]:
    kinds: list[type] = [DistributedDataParallel]
    for kind in kinds:  # the list grows meanwhile
        kinds += kind.__subclasses__()
    return [x for x in gc.get_referrers(*kinds) if type(x) in kinds and "reducer" in vars(x)]


def reduced_params(modules: Iterable[DistributedDataParallel]) -> dict[int, str]:
    """Return the names of the trained parameters of modules by id, without what DDP ignores."""
    # Names as DDP reads them: at the root they begin with a dot. DDP reduces a tied parameter
    # unless all of its names are ignored.
    return {
        id(param): f"module.{path}.{name}" if path else f"module.{name}"
        for module in modules
        for path, part in module.module.named_modules()
        for name, param in part.named_parameters(recurse=False)
        if param.requires_grad and f"{path}.{name}" not in module.parameters_to_ignore
    }


def replicas_of(tensors: Sequence[Any], *, now: bool = False) -> list[DistributedDataParallel]:
    """Return the DDP modules that reduce the gradients of these; `now`: and not in no_sync()."""
    ids = set(map(id, tensors)) if PROCESS_GROUPS else set()
    every = replicas() if ids else []
    if now:
        every = [module for module in every if module.require_backward_grad_sync]
    return [module for module in every if not ids.isdisjoint(reduced_params([module]))]


# Whether a DDP module is inside of its join(), and the parameters whose reduction it delays.
is_joining: Callable[[DistributedDataParallel], bool] = attrgetter("_join_config.enable")
delays_all_reduce: Callable[[Any], list[Tensor]] = attrgetter("_delay_all_reduce_params")
# The Python communication hooks of a DDP module, with their states.
comm_hooks: Callable[[Any], list[tuple[Callable[..., Any], object]]] = attrgetter("_comm_hooks")


def has_comm_hook(module: DistributedDataParallel) -> bool:
    """Return whether a module has a communication hook, C++ ones included."""
    # Only the log shows the C++ hooks.
    log: dict[str, object] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return bool(module._comm_hooks or log.get("comm_hook"))


def zero_buckets(module: DistributedDataParallel) -> list[Any]:
    """Return the gradient buckets of a module, filled with zeros."""
    return list(module.reducer._get_zeros_like_grad_buckets())


def run_comm_hook(module: DistributedDataParallel, bucket: Any) -> Tensor:
    """Return what the communication hook makes of a bucket's buffer."""
    reduced: Any = module.reducer._run_comm_hook(bucket).wait()
    return cast("Tensor", reduced if isinstance(reduced, Tensor) else reduced[0])


# The node that the forward pass of a sharded module adds.
POST_BACKWARD = "RegisterPostBackwardFunctionBackward"


def module_classes() -> tuple[type, ...]:
    """Return the classes of modules that FSDP has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on an FSDP module."""
    return hasattr(module, "_get_fsdp_state")


def states_of(modules: Iterable[Any]) -> list[Any]:
    """Return the states of `fully_shard` modules and of all that share a root."""
    # A backward pass through one module writes the `.grad` of every other one in the graph.
    states = [module._get_fsdp_state() for module in modules]
    together = [other for state in states for other in (state, *state._state_ctx.all_states)]
    return list({id(state): state for state in together}.values())


SHARDING_MODULE = "torch.distributed._composable_state"  # a process may never import it


def any_fully_sharded() -> bool:
    """Return False only if this process has no `fully_shard` module."""
    composable = sys.modules.get(SHARDING_MODULE)
    if composable is None:
        return False
    states = composable._module_state_mapping  # its keys are weak, their table is `data`
    return bool(getattr(states, "data", states))


def all_states() -> Iterator[Any]:
    """Yield the states of all `fully_shard` modules of this process."""
    composable = sys.modules.get(SHARDING_MODULE)
    for state in list(getattr(composable, "_module_state_mapping", {}).values()):
        alive = state() if isinstance(state, ref) else state
        if type(alive).__name__ == "FSDPState":
            yield alive


def groups_of(states: Iterable[Any]) -> list[Any]:
    """Return the parameter groups that states manage."""
    groups: list[Any] = []
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def shards_of(groups: Iterable[Any]) -> list[Any]:
    """Return the shards of groups: each knows its `sharded_param`."""
    return [shard for group in groups for shard in group.fsdp_params]


def all_shards() -> list[Any]:
    """Return the shards of all `fully_shard` modules of this process."""
    return shards_of(groups_of(all_states()))


def unsharded_param(shard: Any) -> Tensor | None:
    """Return the parameter that stands in the graph; None before a forward."""
    return cast("Tensor | None", getattr(shard, "_unsharded_param", None))


def module_params(shard: Any) -> list[Tensor]:
    """Return the tensors that a module may show as this parameter."""
    resharded: Tensor | None = getattr(shard, "_sharded_post_forward_param", None)
    params = (shard.sharded_param, unsharded_param(shard), resharded)
    return [param for param in params if param is not None]


def synchronizes(group: Any) -> bool:
    """Return whether the next backward pass reduces the gradients of a group."""
    return bool(group.reduce_grads and group.all_reduce_grads)


def has_unreduced_grads(group: Any) -> bool:
    """Return whether earlier backward passes left gradients to be reduced."""
    waiting = [getattr(group, "_partial_reduce_output", None)]
    for shard in group.fsdp_params:
        param = unsharded_param(shard)
        waiting += [shard.unsharded_accumulated_grad, None if param is None else param.grad]
    return any(grad is not None for grad in waiting)


def reset_iteration(states: Iterable[Any]) -> None:
    """Let later steps reduce, after a backward pass that was aborted."""
    for state in states:
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()


def without_hooks(module: nn.Module) -> dict[str, Any]:
    """Return a module's tables of forward hooks, by attribute, without those of `fully_shard`."""
    return {  # run on torch 2.13
        name: type(table)((k, v) for k, v in table.items() if not _is_of_fsdp(v))
        for name in ("_forward_pre_hooks", "_forward_hooks")
        if (table := vars(module)[name])
    }


def _is_of_fsdp(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def is_dtensor(leaf: object) -> bool:
    """Return whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def mesh_of(leaf: Any) -> object:
    """Return the mesh of a DTensor; None for any other tensor."""
    return leaf.device_mesh if is_dtensor(leaf) else None


def torch_has_norm(leaves: Iterable[Any]) -> bool:
    """Return whether torch's norm is right: of plain tensors, or those of a line with this rank."""
    # torch's norm mixes no meshes (https://github.com/pytorch/pytorch/issues/180346), may round
    # otherwise on each rank of a grid, and is 0 on a rank outside of the mesh.
    meshes: set[Any] = set(map(mesh_of, leaves))
    return len(meshes) < 2 and all(m is None or (m.ndim == 1 and has_rank(m)) for m in meshes)


def has_rank(mesh: Any) -> bool:
    """Return whether this rank is in the mesh of a DTensor; of any other tensor, None, it is."""
    return mesh is None or mesh.get_coordinate() is not None


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one is a slice of; itself if it is none."""
    return getattr(mesh, "_root_mesh", None) or mesh


def ranks_of(mesh: Any) -> tuple[int, ...]:
    """Return the ranks of a mesh, sorted."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def groups_of_mesh(mesh: Any) -> tuple[Any, ...]:
    """Return the groups to reduce over, one after the other, to reduce over all of a mesh."""
    world: Any = dist.group.WORLD
    if mesh.size() == world.size() and torch.device(mesh.device_type) in world._device_types:
        return (world,)
    return tuple(mesh.get_all_groups())


def whole_sums(leaf: Any) -> Tensor:
    """Return a DTensor that is yet to be summed over ranks as the sum; any other tensor as is."""
    if not is_dtensor(leaf) or not any(p.is_partial() for p in leaf.placements):
        return cast("Tensor", leaf)
    from torch.distributed.tensor import Replicate

    summed = [Replicate() if p.is_partial() else p for p in leaf.placements]
    return cast("Tensor", leaf.redistribute(placements=summed))


def full_tensor(leaf: Any) -> Tensor:
    """Return the whole tensor of a DTensor, which is a collective; any other tensor as it is."""
    # `item()` and `bool()` of a DTensor that is still to be summed over its ranks give this rank's
    # part; the maximum of one with an empty shard fails on that rank while the others wait [M8].
    return cast("Tensor", leaf.full_tensor() if is_dtensor(leaf) else leaf)


def replicated(leaf: Any) -> Tensor:
    """Return a DTensor of which each rank holds the whole; any other tensor as it is."""
    # A copy of a partial sum is the sum in some versions of torch only.
    if not is_dtensor(leaf):
        return cast("Tensor", leaf)
    from torch.distributed.tensor import Replicate

    whole = [Replicate()] * leaf.device_mesh.ndim
    return cast("Tensor", leaf.redistribute(placements=whole))


def local_part(leaf: Any) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    return cast("Tensor", leaf.to_local() if is_dtensor(leaf) else leaf)


def sharding(leaf: Any) -> Hashable:
    """Return what DTensors that are sharded alike have in common; None for any other tensor."""
    return (leaf.device_mesh, leaf.placements) if is_dtensor(leaf) else None


def are_aligned(a: Any, b: Any) -> bool:
    """Return whether two tensors are DTensors whose parts on a rank are the same entries."""
    if not is_dtensor(a) or not is_dtensor(b) or a.shape != b.shape:
        return False
    return sharding(a) == sharding(b) and not any(p.is_partial() for p in a.placements)


def sharded_like(leaf: Tensor, like: Any) -> Tensor:
    """Return a tensor, which is the same on all ranks, with the mesh and shards of a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    whole = [Replicate()] * like.device_mesh.ndim
    same = DTensor.from_local(leaf, like.device_mesh, whole, run_check=False)
    # The leaf is the sum over ranks already: as a partial sum it would count once for each of them.
    placements = [Replicate() if p.is_partial() else p for p in like.placements]
    return same.redistribute(placements=placements)


def cotangent_for(output: Tensor, seed: Tensor) -> Tensor:
    """Return a cotangent, or weight, as a DTensor where the output is one, and only there."""
    if is_dtensor(output) == is_dtensor(seed):
        return seed
    return sharded_like(seed, output) if is_dtensor(output) else full_tensor(seed)


def sharded_rows(tensor: Tensor, mesh: Any) -> Tensor:
    """Return a leaf whose rows are divided over a mesh: a DTensor itself, or the first rank's."""
    if is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Shard, distribute_tensor

    shards = distribute_tensor(tensor.detach(), mesh, [Shard(0)])
    return nn.Parameter(shards, requires_grad=tensor.requires_grad)


def has_rows_on(tensor: Any, mesh: Any) -> bool:
    """Return whether this is a DTensor whose rows are divided over this mesh."""
    if not is_dtensor(tensor) or tensor.device_mesh != mesh:
        return False
    return len(tensor.placements) == 1 and bool(tensor.placements[0].is_shard(0))


def placement(tensor: Any) -> str:
    """Return the shape, the placements and the mesh of a DTensor, for errors."""
    shape, placements = tuple(tensor.shape), tuple(tensor.placements)
    return f"a DTensor of shape {shape}, {placements} on {tensor.device_mesh}"


def from_rows(rows: Tensor, mesh: Any, shape: torch.Size) -> Tensor:
    """Return a DTensor of a shape, contiguous, of which this rank has these rows."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def to_rows(tensor: Any) -> Tensor:
    """Return a DTensor with its rows divided over its mesh, differentiable; others as they are."""
    if not is_dtensor(tensor) or tensor.placements[0].is_shard(0):
        return cast("Tensor", tensor)
    from torch.distributed.tensor import Shard

    return cast("Tensor", tensor.redistribute(placements=[Shard(0)]))


def local_tensor(tensor: Any) -> Tensor:
    """Return what this rank has of a DTensor, without a graph; any other tensor as it is."""
    if not is_dtensor(tensor):
        return cast("Tensor", tensor)
    with torch.no_grad(), INSIDE:
        return local_part(tensor.detach())


def group_like(group: Any, device_type: str) -> Any:
    """Return a new group of the same ranks and timeout; a collective of all. Run on torch 2.13."""
    timeout = group._get_backend(torch.device(device_type)).options._timeout
    return dist.new_group(dist.get_process_group_ranks(group), timeout=timeout)


def all_gather_into(output: Tensor, tensor: Tensor, group: Any) -> None:
    """Write the tensors of all ranks to `output`. Torch 2.13 deprecates the name of 2.11."""
    run: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    run(output, tensor, group=group)


def reduce_scatter_into(output: Tensor, tensor: Tensor, group: Any) -> None:
    """Write this rank's part of the sum over the ranks. Torch 2.13 deprecates the name of 2.11."""
    run: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    run(output, tensor, group=group)
