"""make_functional: a module as a function of parameters that are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._checks.reachability import gathered_params
from gradkit._compat import distributed
from gradkit._compat.distributed import (
    all_gather_into,
    from_rows,
    has_rows_on,
    is_dtensor,
    local_tensor,
    placement,
    reduce_scatter_into,
    to_rows,
)
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import is_transform_tensor, layers
from gradkit._compat.undoing import INSIDE, undone
from gradkit._state.module_state import keeping_state
from gradkit._state.recomputed_tensors import (
    Recompute,
    recompute_hooks,
    recomputed_tensor_sources,
    refuse_changed,
    register_recompute,
)
from gradkit.distributed._agreement import (
    PASSES,
    Description,
    Group,
    agree_or_raise,
    collective_errors,
    read_specs,
    require_group,
)
from gradkit.errors import LeafTypeError, StructureError, UnsupportedGraphError, describe, message
from gradkit.func._make_functional import Named, functional, read_named, require_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class CollectiveOrder:
    """The collectives that a rank has taken part in since the last call, as a number."""

    # Ranks with different graphs could otherwise swap parameters of one shape unnoticed.

    count = digest = 0

    def __init__(self) -> None:
        recomputed_tensor_sources.add(id(self))
        finalize(self, recomputed_tensor_sources.discard, id(self))

    def add(self, index: int, kind: int) -> None:
        """Count a collective for a parameter."""
        # Hashes of ints do not differ between processes.
        self.count, self.digest = self.count + 1, hash((self.digest, index, kind))

    def __str__(self) -> str:
        return f"{self.count} gathers and means, of checksum {self.digest % 10**6}"


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """How one parameter is divided over the ranks: its rows, in chunks."""

    name: str
    index: int
    shape: torch.Size
    mesh: DeviceMesh
    group: Group
    order: CollectiveOrder

    @property
    def rows(self) -> int:
        """Return the rows of the first shard; the last ones may have fewer, or none."""
        return -(-self.shape[0] // self.group.size)

    def fits(self, tensor: object) -> bool:
        """Return whether this is a DTensor of the shape, on the mesh, in the placement."""
        return has_rows_on(tensor, self.mesh) and cast("Tensor", tensor).shape == self.shape

    def gather(self, shard: Tensor) -> Tensor:
        """Return the whole parameter; not differentiable."""
        padded = _padded(self.local(shard), self.rows)
        full = padded.new_empty(self.rows * self.group.size, *self.shape[1:])
        self.order.add(self.index, 0)
        with self._collective_errors("the gather"):
            all_gather_into(full, padded, self.group.handle)
        return full if full.shape == self.shape else full[: self.shape[0]]

    def reduce(self, full: Tensor) -> Tensor:
        """Return the mean over the ranks, in shards; not differentiable."""
        factor = 1 / self.group.size
        sum_overflows = full.dtype == torch.float16  # although the mean does not
        padded = _padded(full * factor if sum_overflows else full, self.rows * self.group.size)
        local = padded.new_empty(self.rows, *self.shape[1:])
        self.order.add(self.index, 1)
        with self._collective_errors("the mean of the gradient"):
            reduce_scatter_into(local, padded, self.group.handle)
        if not sum_overflows:
            local.mul_(factor)  # after the collective: no second copy of the whole gradient
        begin = min(self.rows * self.group.rank, self.shape[0])
        kept = local[: min(self.rows, self.shape[0] - begin)]
        return from_rows(kept, self.mesh, self.shape)

    def _collective_errors(self, what: str) -> AbstractContextManager[None]:
        return collective_errors(self.group, what=f"{what} of params[{self.name!r}]")

    def local(self, shard: Tensor) -> Tensor:
        """Return the rows of this rank."""
        if not self.fits(shard):
            raise StructureError(self.misfit(shard))
        return local_tensor(shard)

    def misfit(self, tensor: object) -> str:
        """Return the message for a tensor that does not fit."""
        shape = tuple(self.shape)
        expected = f"a DTensor of shape {shape}, Shard(0) on the mesh of make_functional"
        got = placement(tensor) if is_dtensor(tensor) else describe(tensor)
        fix = "tensor.redistribute(placements=[Shard(0)]), or compute it from the params"
        return message(f"params[{self.name!r}]", expected, got, fix)

    def batched(self, what: str) -> str:
        """Return the message for `what` being one for each sample of a vmap."""
        expected = f"{what} that are the same for all samples of torch.func.vmap"
        fix = "a loop over the samples; or vmap inputs and outputs only, not parameters"
        return message(f"params[{self.name!r}]", expected, "others for each sample", fix)

    def recompute(self, shard: Tensor) -> Recompute:
        """Return a function that gathers again what `gather` returns for this shard."""
        # The version is that of the DTensor: torch does not count what it writes on local tensors.
        return partial(self._again, shard.detach(), shard._version)

    def _again(self, shard: Tensor, version: int) -> Tensor:
        if shard._version != version:
            refuse_changed("the parameter", f"params[{self.name!r}]")
        return self.gather(shard)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded


class _Collective(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.param = inputs[1]
        ctx.set_materialize_grads(False)


class Gather(_Collective):
    """The whole parameter, on every rank."""

    @staticmethod
    def forward(shard: Tensor, param: ShardedParam) -> Tensor:
        return param.gather(shard)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None
        return ReduceScatter.apply(cotangent, ctx.param), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(_: Any, in_dims: Sequence[int | None], shard: Tensor, param: ShardedParam) -> Any:
        if in_dims[0] is not None:
            raise UnsupportedGraphError(param.batched("params"))
        return gather(shard, param), None  # the same for all samples


class ReduceScatter(_Collective):
    """The mean over the ranks, in shards."""

    @staticmethod
    def forward(full: Tensor, param: ShardedParam) -> Tensor:
        return param.reduce(full)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None
        # The cotangent of a sum over all rows, say, is replicated.
        return gather(to_rows(cotangent), ctx.param), None

    @staticmethod
    def vmap(_: Any, in_dims: Sequence[int | None], full: Tensor, param: ShardedParam) -> Any:
        raise UnsupportedGraphError(param.batched("gradients"))


def gather(shard: Tensor, param: ShardedParam) -> Tensor:
    """Return the whole parameter, differentiable."""
    return cast("Tensor", Gather.apply(shard, param))  # type: ignore[no-untyped-call]


@contextmanager
def gathering(module: nn.Module, params: Mapping[int, ShardedParam]) -> Iterator[None]:
    """Let a module in the block gather these of its parameters, by id, when it reads them."""
    gathered = _Gathered()
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def put_back() -> None:
        for attributes, before in changed:
            attributes.update(before)
        gathered.clear()

    with keeping_state() as state, undone(put_back):
        state.add(module)
        for part in module.modules():
            attributes = vars(part)
            new = distributed.without_hooks(part)
            new["_parameters"] = _ReadParameters(gathered, params, attributes["_parameters"])
            changed.append((attributes, {name: attributes[name] for name in new}))
            attributes.update(new)
        with recompute_hooks(), INSIDE:
            yield


class _Gathered(dict[tuple[int, bool], Tensor]):
    """The whole parameters of the part of a module that runs; graphs hold none of them."""

    part: object = None


class _ReadParameters(dict[str, Any]):
    """The table of parameters of a part, from which `nn.Module` reads its attributes."""

    def __init__(
        self, gathered: _Gathered, params: Mapping[int, ShardedParam], own: Mapping[str, Any]
    ) -> None:
        super().__init__(own)
        self._gathered, self._params = gathered, params

    def __getitem__(self, key: str) -> Any:
        """Return a parameter, the whole one if it is sharded; free those of another part."""
        tensor, gathered = super().__getitem__(key), self._gathered
        param = self._params.get(id(tensor))
        if param is None:
            return tensor
        if gathered.part is not self:
            gathered.clear()
            gathered.part = self
        at = id(tensor), torch.is_grad_enabled()
        if at not in gathered:
            whole = gathered[at] = gather(tensor, param)
            if not is_transform_tensor(whole):  # saved-tensor hooks do not run for these
                register_recompute(whole, param.recompute(tensor))
        return gathered[at]


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
        >>> import gradkit, torch
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
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
        missing, or has failed in the call.

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
    order, apart = CollectiveOrder(), _group_apart(group, mesh)
    placed = {
        name: ShardedParam(name, index, param.shape, mesh, apart, order)
        for index, (name, param) in enumerate(params.items())
    }

    @disable_compile
    def call(params: _Tensors, buffers: _Tensors, *args: Any, **kwargs: Any) -> tuple[Any, Named]:
        describe_call = partial(_describe_call, module, params, placed, order)
        try:
            given, _ = agree_or_raise(group, describe_call)
        finally:
            order.count = order.digest = 0
        with gathering(module, {id(given[name]): param for name, param in placed.items()}):
            return inner(given, buffers, *args, **kwargs)

    first = {name: _of_first_rank(own[name], group, mesh) for name in buffers}
    return call, params, first


def _group_apart(group: Group, mesh: DeviceMesh) -> Group:
    """Return a group for gathers and means alone, the same one for all modules."""
    # A rank that raises in a call and goes on sends its next message while others wait for its
    # shard: in one group, gloo would take a message that is no longer for that shard.
    if group.device.type != mesh.device_type:  # messages and shards are on different backends
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
    paths = partial(map, "module.{}".format, values)
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
            where = f"module.{name}"
            raise UnsupportedGraphError(message(where, "a sharded parameter", got, fix))


def _values(own: Named, state_dict: _Tensors) -> Named:
    """Return the values of a state dict by name, or the module's own where it has none."""
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
    """Raise if a buffer (no mesh) or a parameter (a mesh) cannot be used."""
    where = f"module.{name}"
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


def _of_first_rank(buffer: Tensor, group: Group, mesh: DeviceMesh) -> Tensor:
    copy = buffer.detach().to(mesh.device_type, copy=True)
    dist.broadcast(copy, group=group.handle, group_src=0)
    return copy


def _refuse_changed(module: nn.Module, placed: Mapping[str, ShardedParam]) -> None:
    """Raise if the module has got parameters, which would not be sharded, or lost some."""
    names = {name for name, _ in module.named_parameters()}
    if names != placed.keys():
        name = min(names ^ placed.keys())
        expected = "the parameters that the module had in make_functional"
        got = "a new parameter" if name in names else "none any more"
        fix = "call make_functional again, after the module has changed"
        raise StructureError(message(f"module.{name}", expected, got, fix))


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
