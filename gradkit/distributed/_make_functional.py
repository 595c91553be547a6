"""make_functional: a module as a function of parameters that are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._checks.reachability import gathered_params
from gradkit._compat import distributed
from gradkit._compat.distributed import is_dtensor
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import layers
from gradkit.distributed._agreement import (
    PASSES,
    Description,
    Group,
    agree_or_raise,
    read_specs,
    require_group,
)
from gradkit.distributed._differentiable_gather import CollectiveOrder, ShardedParam
from gradkit.distributed._gathering_module import gathering
from gradkit.distributed._remote_errors import RemoteErrors
from gradkit.errors import LeafTypeError, StructureError, UnsupportedGraphError, describe, message
from gradkit.func._make_functional import Named, functional, read_named, require_module

if TYPE_CHECKING:  # looked up, not imported: it would import all of DTensor
    from torch.distributed.device_mesh import DeviceMesh

_NAME = "gradkit.distributed.make_functional"
_CALL = "the call of gradkit.distributed.make_functional"
_Call: TypeAlias = Callable[..., tuple[Any, Named]]
_Tensors: TypeAlias = Mapping[str, Tensor]
_groups_apart: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by group of a mesh


@disable_compile
def make_functional(
    module: nn.Module, mesh: DeviceMesh, state_dict: _Tensors | None = None
) -> tuple[_Call, Named, Named]:
    """Return a module's forward as a pure function of sharded parameters, and these.

    For derivatives of any order where one process cannot hold the parameters. Each rank calls it on
    its part of the batch, and passes its own loss to the calls of `gradkit`: the gradients are
    DTensors, those of the mean of the losses over the ranks, and so are their derivatives. A
    parameter is gathered when a part of the module reads it, and freed when the next part reads
    its own; graphs keep shards, and gather again in the backward pass.

    Example:
        >>> import gradkit, tempfile, torch
        >>> rendezvous = f"file://{tempfile.mkdtemp()}/file"
        >>> torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        >>> model = torch.nn.Linear(3, 1)
        >>> call, params, buffers = gradkit.distributed.make_functional(model, mesh)
        >>> loss = call(params, buffers, torch.ones(2, 3))[0].square().mean()
        >>> _, grads = gradkit.value_and_grads(loss, params, create_graph=True)
        >>> penalty = gradkit.tree.dot(grads, grads)
        >>> _, grads = gradkit.value_and_grads(penalty, params)
        >>> grads["weight"].placements
        (Shard(dim=0),)
        >>> torch.distributed.destroy_process_group()

    Args:
        module: A plain module; one that `fully_shard` was called on, whose hooks do not run in
            `call`; or one on the meta device. Its Python attributes count at the time of a call.
        mesh: A mesh of one dimension with all ranks of the default process group.
        state_dict: Values in place of the module's own, by the names of `module.state_dict()`.

    Returns:
        `(call, params, buffers)`. `params`: leaf tensors by name, a tied one by its first name,
        DTensors whose rows are divided over the ranks, `Shard(0)`: the module's own for
        `fully_shard`, otherwise shards of the first rank's values, on the device of the mesh.
        `buffers`: copies of the first rank's buffers.

        `call(params, buffers, *args, **kwargs)` returns `(out, new_buffers)`, as in
        `gradkit.func.make_functional`: plain tensors of this rank. All ranks make the call, and the
        backward passes through `out` in the same order. It raises `StructureError` on all ranks if
        params, modes or the order of earlier passes differ between them, a tensor is not such a
        DTensor, or the module has got or lost parameters; and `CollectiveError` if a rank is
        missing, with its error if it has failed in the call.

    Raises:
        CollectiveError: A rank has failed, is missing, or is too late.
        LeafTypeError: It is no module; or it has parameters on the meta device, without a value.
        StructureError: The mesh has other dimensions or ranks; a parameter has no dimension, or is
            a DTensor, but not `Shard(0)` on this mesh; `state_dict` does not fit; or ranks differ.
        UnsupportedGraphError: A module wrapped in DistributedDataParallel or the former FSDP, or
            whose parameters `fully_shard` has gathered; or as in `gradkit.func.make_functional`.

    Source:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models", section 5.3, https://arxiv.org/abs/1910.02054
    """
    world = require_group(None, _NAME)
    read = partial(_read, module, mesh, state_dict, world)
    (own, names), _ = agree_or_raise(world, read)
    group = require_group(mesh.get_group(), _CALL)
    inner, _, buffers = functional(module)
    params = {name: distributed.sharded_rows(own[name], mesh) for name in names}
    order, remote_errors = CollectiveOrder(), RemoteErrors(group.rank, group.size)
    apart = _group_apart(group, mesh)
    placed = {
        name: ShardedParam(name, index, param.shape, mesh, apart, order, remote_errors)
        for index, (name, param) in enumerate(params.items())
    }

    @disable_compile
    def call(params: _Tensors, buffers: _Tensors, *args: Any, **kwargs: Any) -> tuple[Any, Named]:
        describe_call = partial(_describe_call, module, params, placed, order)
        try:
            given, _ = agree_or_raise(group, describe_call)
        finally:
            order.reset()
        pairs = [(given[name], param) for name, param in placed.items()]
        with remote_errors.report_own(), gathering(module, pairs):
            return inner(given, buffers, *args, **kwargs)

    first = {name: _of_first_rank(own[name], group, mesh) for name in buffers}
    return call, params, first


def _group_apart(group: Group, mesh: DeviceMesh) -> Group:
    """Return a group for gathers and means alone, the same one for all modules."""
    # A rank that has raised in a call, and goes on, would send its next message, of whatever kind,
    # to those that wait for its shard: gloo takes it for one if it is no longer.
    if group.device.type != mesh.device_type:  # messages and shards have different backends
        return group
    if group.handle not in _groups_apart:
        _groups_apart[group.handle] = distributed.group_like(group.handle, mesh.device_type)
    return group._replace(handle=_groups_apart[group.handle])


def _read(
    module: nn.Module, mesh: DeviceMesh, state_dict: _Tensors | None, world: Group
) -> tuple[tuple[Named, list[str]], Description]:
    """Return the tensors by name, and the names of the parameters."""
    require_module(module)
    _refuse_wrapped(module)
    if mesh.ndim != 1 or mesh.size() != world.size:
        expected = f"a mesh of one dimension with all {world.size} ranks"
        fix = "init_device_mesh(device_type, (torch.distributed.get_world_size(),))"
        raise StructureError(message("mesh", expected, f"one of {tuple(mesh.shape)}", fix))
    params = dict(module.named_parameters())
    own = {**params, **dict(module.named_buffers())}
    values = own if state_dict is None else _values(own, state_dict)
    for name, value in values.items():
        _check_value(name, value, mesh if name in params else None)
    paths = partial(map, _of_module, values)
    invariants = (("the call", _NAME), ("the names", (tuple(values), len(params))))
    specs = read_specs(list(values.values()), differentiable=True)
    return (values, list(params)), Description(invariants, specs, paths)


def _refuse_wrapped(module: nn.Module) -> None:
    for part in module.modules():
        sharded_by_fsdp = isinstance(part, distributed.module_classes())
        if isinstance(part, DistributedDataParallel):
            got, fix = "one in DistributedDataParallel", "make_functional(model.module, mesh)"
        elif sharded_by_fsdp and not distributed.is_fully_sharded(part):
            got, fix = "one in the former FSDP", "move to fully_shard, or pass the plain module"
        else:
            continue
        expected = "a plain module, or one that fully_shard was called on"
        raise UnsupportedGraphError(message("module", expected, got, fix))
    unsharded = gathered_params()
    for name, param in module.named_parameters():
        if id(param) in unsharded:
            got = "one that fully_shard has gathered for the backward pass"
            fix = "make the call before the forward pass, or after the backward pass"
            where = _of_module(name)
            raise UnsupportedGraphError(message(where, "a sharded parameter", got, fix))


def _values(own: Named, state_dict: _Tensors) -> Named:
    """Return the values of a state dict for the tensors of a module; its own if not saved."""
    values: Named = {}
    for name, tensor in own.items():
        value = state_dict.get(name, tensor)
        if not isinstance(value, Tensor) or value.shape != tensor.shape:
            where = f"state_dict[{name!r}]"
            expected = f"a tensor of shape {tuple(tensor.shape)}"
            fix = "pass the state_dict() of this module"
            raise StructureError(message(where, expected, describe(value), fix))
        values[name] = value.detach().requires_grad_(tensor.requires_grad)
    return values


def _check_value(name: str, value: Tensor, mesh: DeviceMesh | None) -> None:
    """Raise if a parameter, which has a mesh, or a buffer cannot be taken over."""
    where = _of_module(name)
    if value.is_meta:
        got, fix = "one on the meta device", "make_functional(module, mesh, state_dict)"
        raise LeafTypeError(message(where, "a tensor with values", got, fix))
    if mesh is None:
        return
    if value.dim() == 0:
        fix = "register it with the shape (1,)"
        raise StructureError(message(where, "one with rows to divide", "a scalar", fix))
    if is_dtensor(value) and not distributed.has_rows_on(value, mesh):
        expected = f"a plain tensor, or a DTensor that is Shard(0) on {mesh}"
        fix = "call fully_shard with this mesh, or pass the plain module"
        raise StructureError(message(where, expected, distributed.placement(value), fix))


def _of_module(name: str) -> str:
    return f"module.{name}"


def _of_first_rank(buffer: Tensor, group: Group, mesh: DeviceMesh) -> Tensor:
    copy = buffer.detach().to(mesh.device_type, copy=True)
    dist.broadcast(copy, group=group.handle, group_src=0)
    return copy


def _refuse_changed(module: nn.Module, placed: Mapping[str, ShardedParam]) -> None:
    """Raise if parameters were added to a module, which would be this rank's alone, or removed."""
    names = {name for name, _ in module.named_parameters()}
    if names != placed.keys():
        name = min(names ^ placed.keys())
        expected = "the parameters that the module had in make_functional"
        got = "a new parameter" if name in names else "none any more"
        fix = "call make_functional again, after the module has changed"
        raise StructureError(message(_of_module(name), expected, got, fix))


def _describe_call(
    module: nn.Module, params: _Tensors, placed: Mapping[str, ShardedParam], order: CollectiveOrder
) -> tuple[Named, Description]:
    given = read_named(params, list(placed), "params")
    _refuse_changed(module, placed)
    for name, param in placed.items():
        *_, data = layers(given[name])
        if not param.fits(data):
            raise StructureError(param.misfit(data))
    modes = tuple(part.training for part in module.modules())
    invariants = (
        ("the call", _CALL),
        ("torch.is_grad_enabled()", torch.is_grad_enabled()),
        ("the training mode of the module", modes),
        (PASSES, str(order)),
    )
    specs = read_specs(list(given.values()), differentiable=True)
    return given, Description(invariants, specs, partial(map, "params[{!r}]".format, given))
