"""Several processes: docs/several_processes.md says what becomes of a call; this runs it.

Every cell of the table there is a test here, and every row of the one is a row of the other. What
is right is equal to one process on the batches of all ranks. Shards are tried on four ranks, too:
one of them has none of the last layer then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradkit
from gradkit import tree
from gradkit._compat.versions import is_mended
from gradkit._core import pytree
from tests.processes import Ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "several_processes.md"
F64 = torch.float64


# --- A module, wrapped or not --------------------------------------------------------------------


@dataclass
class Setting:
    """A module as one of the columns has it, and the same in one process on all batches."""

    module: nn.Module
    net: Callable[[Any], Any]  # the forward pass: the module's, or compiled
    x: Tensor
    single: nn.Module
    joined: Tensor
    is_wrapped: bool  # by DDP or FSDP: gradkit.distributed takes it

    @property
    def api(self) -> Any:
        return gradkit.distributed if self.is_wrapped else gradkit

    def of_single(self) -> Setting:
        return Setting(self.single, self.single, self.joined, self.single, self.joined, False)


def fresh_net(device: torch.device, dtype: torch.dtype = F64) -> nn.Module:
    """Return one whose last layer is not divided evenly among two ranks, nor among four."""
    torch.manual_seed(1)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 5)
    return nn.Sequential(*layers).to(device, dtype)


def by_ddp(net: nn.Module, joined: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Tensor]:
    return DistributedDataParallel(net), joined.chunk(mesh.size())[mesh.get_rank()]


def by_fsdp(net: Any, joined: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Tensor]:
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net, joined.chunk(mesh.size())[mesh.get_rank()]


def by_tensor_parallel(
    net: nn.Module, joined: Tensor, mesh: DeviceMesh
) -> tuple[nn.Module, Tensor]:
    """Some parameters become DTensors, and the others stay what they are."""
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), joined


def as_dtensors(net: Any, joined: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Tensor]:
    for layer in net:
        # torch 2.11 has no backward pass for a layer norm with a sharded weight.
        whole = isinstance(layer, nn.LayerNorm) and torch.__version__ < "2.12"
        for name, param in list(layer.named_parameters(recurse=False)):
            placements = [Replicate() if whole else Shard(0)]
            sharded = distribute_tensor(param.detach(), mesh, placements)
            layer.register_parameter(name, nn.Parameter(sharded))
    return net, distribute_tensor(joined, mesh, [Shard(0)])


COLUMNS: dict[str, Callable[..., tuple[nn.Module, Tensor]]] = {
    "DDP": by_ddp,
    "FSDP2": by_fsdp,
    "tensor parallel": by_tensor_parallel,
    "DTensor": as_dtensors,
}


def setting(device: torch.device, column: str, dtype: torch.dtype = F64) -> Setting:
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    generator = torch.Generator().manual_seed(2)
    joined = torch.randn(3 * size, 8, generator=generator, dtype=dtype).to(device)
    module, x = COLUMNS[column](fresh_net(device, dtype), joined, mesh)
    wrapped = column in ("DDP", "FSDP2")
    return Setting(module, module, x, fresh_net(device, dtype), joined, wrapped)


def two(s: Setting) -> dict[str, Any]:
    """Return two losses that are means over the batch, and disagree on the last layer."""
    out = s.net(s.x)
    return {"fit": out.square().mean(), "size": out.sin().mean() + (out**3).mean()}


def vector(s: Setting) -> Any:
    return s.net(s.x).square().mean(0)


def whole(anything: Any) -> list[Any]:
    """Return the leaves of a tree, as plain tensors."""
    leaves, _ = pytree.flatten(anything)
    return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def assert_alike(actual: Any, expected: Any) -> None:
    ours, theirs = whole(actual), whole(expected)
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            assert a is b
        elif isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        else:
            assert a == pytest.approx(b, rel=1e-9, abs=1e-11)


def grads_left(module: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in module.parameters()]


# --- The rows: each returns what is to be compared, run on a column and on one process -----------


def joint(s: Setting) -> Any:
    _, grads = s.api.value_and_grads(two(s), s.module, weights={"fit": 1.0, "size": 0.3})
    return grads


def separate(s: Setting) -> Any:
    return s.api.per_loss_grads(two(s), s.module)


def dist_calls(s: Setting) -> Any:
    if s.module is s.single:
        return joint(s), separate(s)
    _, grads = gradkit.distributed.value_and_grads(
        two(s), s.module, weights={"fit": 1.0, "size": 0.3}
    )
    return grads, gradkit.distributed.per_loss_grads(two(s), s.module)


def streamed(s: Setting) -> Any:
    """A function of the Gramian that tells the losses apart."""
    api = gradkit if s.module is s.single else gradkit.distributed
    _, grads = api.value_and_grads(two(s), s.module, weights=lambda gramian: gramian[0])
    return api.gram(two(s), s.module), grads


def plain_calls(s: Setting) -> Any:
    """The values, too: of a DTensor that is yet to be summed, torch's item() tells a part."""
    values, grads = gradkit.value_and_grads(two(s), s.module)
    numbers = [value.item() for value in values.values()]
    return numbers, grads, gradkit.per_loss_grads(two(s), s.module)


def rows(s: Setting) -> Any:
    return s.api.per_loss_grads(vector(s), s.module)


def rows_of_whole(s: Setting) -> Any:
    losses = vector(s)
    whole_losses = losses.full_tensor() if isinstance(losses, DTensor) else losses
    return s.api.per_loss_grads(whole_losses, s.module)


def second_order(s: Setting) -> Any:
    """The gradient of the square of the gradient's norm, which is the same on all ranks."""
    _, grads = s.api.value_and_grads(two(s), s.module, create_graph=True)
    _, second = s.api.value_and_grads(tree.dot(grads, grads), list(s.module.parameters()))
    return second


def reduced_by_hand(s: Setting) -> Any:
    inner = s.module.module if isinstance(s.module, DistributedDataParallel) else s.module
    if s.module is s.single:
        return gradkit.value_and_grads(two(s), inner)[1]
    if not isinstance(inner, nn.Sequential) or s.is_wrapped is (inner is s.module):
        grads = {name: param.detach() for name, param in inner.named_parameters()}
    else:
        s.net = inner
        with getattr(s.module, "no_sync", nullcontext)():
            _, grads = gradkit.value_and_grads(two(s), inner)
    return gradkit.distributed.all_reduce(grads)


def pcgrad(matrix: Tensor) -> Tensor:
    """Return the sum of the rows, each without what conflicts with the others (Yu et al. 2020)."""
    projected = []
    for index, row in enumerate(matrix):
        for other in [*matrix[:index], *matrix[index + 1 :]]:
            if row @ other < 0:
                row = row - (row @ other) / (other @ other) * other
        projected.append(row)
    return torch.stack(projected).sum(0)


def handed_over(s: Setting) -> Any:
    """Three steps with combined gradients."""
    optimizer = torch.optim.Adam(s.module.parameters(), lr=0.01)
    for step in range(3):
        per_loss = separate(s)
        per_loss["size"] = tree.scale(per_loss["size"], -1.0)  # so that there is a conflict
        grads = gradkit.combine(per_loss, pcgrad if step < 2 else {"fit": 1.0, "size": -0.1})
        optimizer.zero_grad()
        gradkit.add_grads_(s.module, grads, hooks=True)
        optimizer.step()
    return dict(s.module.named_parameters())


def by_upgrad(s: Setting) -> Any:
    from torchjd.aggregation import UPGrad

    per_loss = separate(s)
    per_loss["size"] = tree.scale(per_loss["size"], -1.0)
    return gradkit.combine(per_loss, UPGrad())


def steps(s: Setting) -> Any:
    for optimizer in (
        torch.optim.Adam(s.module.parameters(), lr=0.01),
        torch.optim.SGD(s.module.parameters(), lr=0.01, momentum=0.9),
    ):
        for _ in range(2):
            gradkit.step_(optimizer, s.module, joint(s))
    return dict(s.module.named_parameters())


def minimized(s: Setting) -> Any:
    """One optimizer, then two of them, clipped; the losses weighted."""
    params = list(s.module.parameters())
    weights = {"fit": 1.0, "size": 0.3}
    gradkit.minimize_(torch.optim.Adam(params, lr=0.01), two(s), weights=weights)
    parts = [torch.optim.SGD(part, lr=0.1) for part in (params[:3], params[3:])]
    _, norm = gradkit.minimize_(parts, two(s), max_norm=0.1)
    return norm.item(), dict(s.module.named_parameters())


def backward_with_graph(s: Setting) -> Any:
    gradkit.backward_(two(s), create_graph=True)
    grads = grads_left(s.module)
    assert all(grad is not None and grad.requires_grad for grad in grads)
    s.module.zero_grad()
    return grads


def scaled_steps(s: Setting) -> Any:
    """With a scaler: the second step is not taken, because of an inf on one rank."""
    optimizer = torch.optim.SGD(s.module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(s.joined.device.type, init_scale=8.0)
    for step in range(3):
        loss = sum(two(s).values())
        if step == 1 and (s.module is s.single or dist.get_rank() == 1 or not s.is_wrapped):
            loss = loss * torch.inf
        _, grads = s.api.value_and_grads(scaler.scale(loss), s.module)
        gradkit.step_(optimizer, s.module, grads, scaler=scaler)
        scaler.update()
    return scaler.get_scale(), dict(s.module.named_parameters())


def workflow(s: Setting) -> Any:
    grads = joint(s)
    gradkit.write_grads_(s.module, grads)
    gradkit.add_grads_(s.module, grads)
    grads = gradkit.read_grads(s.module)
    gradkit.clear_grads_(s.module)
    assert all(grad is None for grad in grads_left(s.module))
    return grads


def backward(s: Setting) -> Any:
    gradkit.backward_(two(s))
    return grads_left(s.module)


def captured(s: Setting) -> Any:
    before = {id(p): p.grad for p in s.module.parameters()}
    with gradkit.capture_grads(s.module) as block:
        sum(two(s).values()).backward()
    assert all(p.grad is before[id(p)] for p in s.module.parameters())
    return block.grads


def retained(s: Setting) -> Any:
    """Of a tensor: this rank's rows of the batch, whose mean over the ranks is the loss."""
    out = s.net(s.x)
    with gradkit.safe_retain({"out": out}) as retained_grads:
        s.api.per_loss_grads([out.square().mean(), out.sin().mean()], s.module)
    return retained_grads.grads, retained_grads.passes


def retained_of_module(s: Setting) -> Any:
    (name,) = [n for n, part in s.module.named_modules() if isinstance(part, nn.LayerNorm)]
    with gradkit.safe_retain(s.module, [name]) as retained_grads:
        joint(s)
    return list(retained_grads.grads.values())


def sums(s: Setting) -> Any:
    per_loss = separate(s)
    a, b = per_loss["fit"], per_loss["size"]
    return (
        tree.add(a, b), tree.sub(a, b), tree.scale(a, 2.0), tree.map(torch.mul, a, b),
        tree.clip_by_global_norm(a, 0.1)[0], tree.unstack(tree.stack([a, b])),
        tree.weighted_sum(per_loss, {"fit": 1.0, "size": 0.5}),
        gradkit.combine(per_loss, torch.tensor([0.2, 0.8])),
    )  # fmt: skip


def numbers(s: Setting) -> Any:
    """What is made of them must be plain: of a DTensor, `item()` may tell this rank's part."""
    per_loss = separate(s)
    a, b = per_loss["fit"], per_loss["size"]
    matrix, unravel = tree.to_matrix(per_loss)
    return (
        tree.dot(a, b).item(), tree.global_norm(a).item(), tree.cosine(a, b).item(),
        tree.gram(per_loss).tolist(), [tree.allclose(a, a), tree.allclose(a, b)],
        matrix.shape, unravel(matrix[1]), gradkit.combine(per_loss, pcgrad),
    )  # fmt: skip


def conflicting(s: Setting) -> Any:
    report = gradkit.report.conflicts(separate(s))
    return report.norms, report.cosines, report.share


def functional(s: Setting) -> Any:
    call, params, buffers = gradkit.func.make_functional(s.module)

    def losses(params: Any) -> Any:
        s.net = lambda x: call(params, buffers, x)[0]
        return two(s)

    return gradkit.func.value_and_grads(losses)(params)[1]


def compiled(s: Setting) -> Any:
    s.net = torch.compile(s.module, backend="aot_eager")
    try:
        return separate(s), joint(s)
    finally:
        torch._dynamo.reset()


def autocast(s: Setting) -> Any:
    """Against `.backward()`, of the same module: how bfloat16 rounds depends on the batch."""
    with torch.autocast(s.joined.device.type, torch.bfloat16):
        losses = two(s)
    ours = s.api.value_and_grads(losses, s.module)[1]
    with torch.autocast(s.joined.device.type, torch.bfloat16):
        losses = two(s)
    s.module.zero_grad()
    sum(losses.values()).backward()
    for grad, theirs in zip(whole(ours), whole(grads_left(s.module)), strict=True):
        assert torch.equal(grad, theirs) or dist.get_world_size() > 2
        torch.testing.assert_close(grad, theirs)
    return ()


def meta_step(s: Setting) -> Any:
    """The meta-gradient over the tasks of all ranks."""
    inner = s.module.module if isinstance(s.module, DistributedDataParallel) else s.module
    call, params, buffers = gradkit.func.make_functional(inner)
    opt, sync = gradkit.meta.sgd(lr=0.1), getattr(s.module, "no_sync", nullcontext)

    def loss(params: Any, outer: Any, x: Tensor) -> Tensor:
        return call(params, buffers, x)[0].square().mean()

    def meta_loss(params: Any, x: Tensor) -> Tensor:
        return loss(gradkit.meta.unroll(loss, params, [x, x], opt).params, (), x.cos())

    with sync():
        _, grads = gradkit.meta.mean_value_and_grads(
            meta_loss, params, s.x[:, None], create_graph=False
        )
    return grads if s.module is s.single else gradkit.distributed.all_reduce(grads)


# --- The table -----------------------------------------------------------------------------------

OK, NO = "right", "`UnsupportedGraphError`"
OTHER, TORCH = "`LeafTypeError`", "`RuntimeError`"
IDLE = "not run"
LOCAL = "right, this rank's"

ROWS: dict[str, Callable[[Setting], Any]] = {
    "`distributed.value_and_grads`, `distributed.per_loss_grads`": dist_calls,
    "`distributed.gram`, `distributed.value_and_grads(weights=function)`": streamed,
    "`value_and_grads`, `per_loss_grads`": plain_calls,
    "`per_loss_grads` of a vector": rows,
    "`create_graph=True`": second_order,
    "`distributed.all_reduce`": reduced_by_hand,
    "`combine`, `add_grads_(..., hooks=True)`": handed_over,
    "`combine` with TorchJD's UPGrad": by_upgrad,
    "`step_`": steps,
    "`minimize_`": minimized,
    "`backward_(..., create_graph=True)`": backward_with_graph,
    "`step_` with a `GradScaler`": scaled_steps,
    "`write_grads_`, `add_grads_`, `read_grads`, `clear_grads_`": workflow,
    "`backward_`": backward,
    "`capture_grads`": captured,
    "`safe_retain` of tensors": retained,
    "`safe_retain` of modules": retained_of_module,
    "`tree`: sums": sums,
    "`tree`: numbers, `to_matrix`, `gram`": numbers,
    "`report.conflicts`": conflicting,
    "`func`": functional,
    "`meta`, then `distributed.all_reduce`": meta_step,
    "a compiled module": compiled,
    "`torch.autocast`": autocast,
}

TABLE: dict[str, tuple[str, str, str, str]] = {
    "`distributed.value_and_grads`, `distributed.per_loss_grads`": (OK, OK, OTHER, OTHER),
    "`distributed.gram`, `distributed.value_and_grads(weights=function)`": (OK, OK, OTHER, OTHER),
    "`value_and_grads`, `per_loss_grads`": (NO, NO, OK, OK),
    "`per_loss_grads` of a vector": (OK, OK, OK, OK),
    "`create_graph=True`": (OK, NO, OK, OK),
    "`distributed.all_reduce`": (OK, NO, NO, NO),
    "`combine`, `add_grads_(..., hooks=True)`": (OK, OK, OK, OK),
    "`combine` with TorchJD's UPGrad": (OK, OK, OK, OK),
    "`step_`": (OK, OK, OK, OK),
    "`minimize_`": (OK, NO, OK, OK),
    "`backward_(..., create_graph=True)`": (NO, NO, OK, OK),
    "`step_` with a `GradScaler`": (OK, OK, TORCH, OK),
    "`write_grads_`, `add_grads_`, `read_grads`, `clear_grads_`": (OK, OK, OK, OK),
    "`backward_`": (OK, OK, OK, OK),
    "`capture_grads`": (OK, OK, OK, OK),
    "`safe_retain` of tensors": (LOCAL, LOCAL, OK, OK),
    "`safe_retain` of modules": (LOCAL, LOCAL, OK, OK),
    "`tree`: sums": (OK, OK, OK, OK),
    "`tree`: numbers, `to_matrix`, `gram`": (OK, OK, OK, OK),
    "`report.conflicts`": (OK, OK, OK, OK),
    "`func`": (NO, NO, OK, OK),
    "`meta`, then `distributed.all_reduce`": (OK, IDLE, IDLE, IDLE),
    "a compiled module": (OK, OK, OK, OK),
    "`torch.autocast`": (OK, OK, OK, OK),
}
CELLS = [
    pytest.param(row, column, cell, id=f"{row.replace('`', '')}-{column}")
    for row, cells in TABLE.items()
    for column, cell in zip(COLUMNS, cells, strict=True)
    if cell != IDLE
]
# Of rows that stand for several calls: each by itself, to see that each is refused.
EACH: dict[Callable[[Setting], Any], list[Callable[[Setting], Any]]] = {
    dist_calls: [
        lambda s: gradkit.distributed.value_and_grads(two(s), s.module),
        lambda s: gradkit.distributed.per_loss_grads(two(s), s.module),
    ],
    streamed: [
        lambda s: gradkit.distributed.gram(two(s), s.module),
        lambda s: gradkit.distributed.value_and_grads(two(s), s.module, weights=torch.diagonal),
    ],
    plain_calls: [
        lambda s: gradkit.value_and_grads(two(s), s.module),
        lambda s: gradkit.per_loss_grads(two(s), s.module),
    ],
}
FLOAT32 = {autocast}  # float64 is not cast
OF_DTENSORS = {"tensor parallel", "DTensor"}


def check_cell(device: torch.device, row: str, column: str, cell: str) -> None:
    run = ROWS[row]
    s = setting(device, column, torch.float32 if run in FLOAT32 else F64)
    if run is second_order and column in OF_DTENSORS and not is_mended("DTensor"):
        cell = NO
    if cell.startswith("`"):
        for call in EACH.get(run, [run]):
            assert_refused(call, s, cell.strip("`"))
    else:
        actual, expected = run(s), run(s.of_single())
        if cell == LOCAL:
            expected = share_of(expected)
        assert_alike(actual, expected)
    # The group works on.
    total = gradkit.distributed.all_reduce(torch.ones(3, device=device), op="sum")
    assert total.tolist() == [dist.get_world_size()] * 3


def assert_refused(call: Callable[[Setting], Any], s: Setting, name: str) -> None:
    def state() -> Any:
        return whole([p.detach() for p in s.module.parameters()]), grads_left(s.module)

    before = [leaf.clone() for leaf in whole(state()[0])]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(s)
    assert type(caught.value).__name__ == name, caught.value
    weights, grads = state()
    assert_alike(weights, before)
    assert all(grad is None for grad in grads)


def share_of(of_all: Any) -> Any:
    """Return this rank's rows, as gradients of the mean over its rows."""
    leaves, spec = pytree.flatten(of_all)
    size, rank = dist.get_world_size(), dist.get_rank()
    return pytree.unflatten(spec, [size * leaf.chunk(size)[rank] for leaf in leaves])


@pytest.mark.parametrize(("row", "column", "cell"), CELLS)
def test_a_cell_of_the_table(
    two: Ranks, device: torch.device, row: str, column: str, cell: str
) -> None:
    if "UPGrad" in row:
        pytest.importorskip("torchjd")
    two.run(check_cell, row, column, cell)


SHARDED = [cell for cell in CELLS if cell.values[1] in ("FSDP2", "DTensor")]


@pytest.mark.parametrize(("row", "column", "cell"), SHARDED)
def test_a_cell_of_the_table_where_a_rank_has_an_empty_shard(
    four: Ranks, device: torch.device, row: str, column: str, cell: str
) -> None:
    if "UPGrad" in row:
        pytest.importorskip("torchjd")
    four.run(check_cell, row, column, cell)


# --- DTensors beyond the table -------------------------------------------------------------------


PLACEMENTS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "replicated": ((Replicate(),), (Shard(0),)),
    "by columns": ((Shard(1),), (Replicate(),)),
    "by rows": ((Shard(0),), (Shard(0),)),
    "in two dimensions": ((Replicate(), Shard(0)), (Shard(0), Replicate())),
}


def check_placements(device: torch.device, name: str) -> None:
    """The gradient may be placed otherwise than its parameter [M7]; it is the right one."""
    of_params, of_data = PLACEMENTS[name]
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,) if len(of_params) == 1 else (2, size // 2))
    ours, single = fresh_net(device)[0], fresh_net(device)[0]
    weight = distribute_tensor(single.weight.detach(), mesh, of_params)
    ours.register_parameter("weight", nn.Parameter(weight))
    ours.register_parameter("bias", None)
    single.register_parameter("bias", None)
    joined = torch.randn(2 * size, 8, device=device, dtype=F64)
    s = Setting(ours, ours, distribute_tensor(joined, mesh, of_data), single, joined, False)
    for row in (plain_calls, rows_of_whole, sums, numbers, workflow, steps, handed_over):
        assert_alike(row(s), row(s.of_single()))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_of_dtensors(two: Ranks, four: Ranks, device: torch.device, name: str) -> None:
    (four if "two" in name else two).run(check_placements, name)


def check_partial(device: torch.device) -> None:
    """A gradient that is yet to be summed over the ranks: torch's `item()` tells a part of it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device.type, (size,))
    ours = torch.full((2, 3), rank + 1.0, device=device)
    partial = DTensor.from_local(ours, mesh, [Partial()])
    total = torch.full((2, 3), size * (size + 1) / 2, device=device)
    assert partial.sum().item() != total.sum().item()  # torch itself
    for call in (lambda g: tree.dot(g, g).item(), lambda g: tree.global_norm(g).item()):
        assert call([partial]) == pytest.approx(call([total]))
    assert bool(tree.dot([partial], [-partial]) < 0)
    param: Any = nn.Parameter(distribute_tensor(torch.zeros_like(total), mesh, [Replicate()]))
    gradkit.step_(torch.optim.SGD([param], lr=1.0), [param], [partial])
    assert torch.equal(param.detach().full_tensor(), -total)
    combined = gradkit.combine([[partial], [partial]], lambda matrix: matrix.mean(0))
    assert torch.equal(combined[0].full_tensor(), total)


def test_a_gradient_that_is_yet_to_be_summed(several: Ranks, device: torch.device) -> None:
    several.run(check_partial)


# --- FSDP2 beyond the table ----------------------------------------------------------------------


def check_compiled_step(device: torch.device, backend: str, accumulate: bool) -> None:
    """Two steps of a compiled FSDP2 module, against the usual loop on another."""
    ours, theirs = setting(device, "FSDP2"), setting(device, "FSDP2")
    ours.net = torch.compile(ours.module, backend=backend)
    optimizers = [torch.optim.SGD(s.module.parameters(), lr=0.1) for s in (ours, theirs)]
    for _ in range(2):
        grads = joint(ours)
        if accumulate:
            grads = tree.add(grads, joint(ours))
        gradkit.step_(optimizers[0], ours.module, grads)
        optimizers[1].zero_grad()
        losses = two(theirs)
        (losses["fit"] + 0.3 * losses["size"]).backward()
        if accumulate:
            losses = two(theirs)
            (losses["fit"] + 0.3 * losses["size"]).backward()
        optimizers[1].step()
    torch._dynamo.reset()
    assert_alike(list(ours.module.parameters()), list(theirs.module.parameters()))


@pytest.mark.parametrize("accumulate", [False, True])
def test_steps_of_a_compiled_fsdp_module(
    two: Ranks, device: torch.device, accumulate: bool
) -> None:
    two.run(check_compiled_step, "aot_eager", accumulate)


def check_one_process_stops_at_the_same_weights(device: torch.device) -> None:
    """Clipping uses one norm on all ranks, so that the shards stay parts of one model."""
    s = setting(device, "FSDP2")
    single = s.of_single()
    for one in (s, single):
        optimizer = torch.optim.SGD(one.module.parameters(), lr=0.1)
        for _ in range(3):
            gradkit.step_(
                optimizer, one.module, tree.clip_by_global_norm(joint(one), max_norm=0.05)[0]
            )
    assert_alike(list(s.module.parameters()), list(single.module.parameters()))


def test_clipped_steps_of_an_fsdp_module(several: Ranks, device: torch.device) -> None:
    several.run(check_one_process_stops_at_the_same_weights)


def check_gathered(device: torch.device) -> None:
    """Between forward and backward the parameters are plain, and no node tells of fully_shard."""
    model: Any = fully_shard(fresh_net(device))
    shards = list(model.parameters())
    optimizer = torch.optim.SGD(shards, lr=0.1)
    x = torch.randn(2, 8, device=device, dtype=F64)
    model(x).square().mean().backward()
    before = [param.grad for param in shards]
    grads = gradkit.read_grads(model)

    loss = model(x).square().mean()
    params = list(model.parameters())
    assert not any(isinstance(param, DTensor) for param in params)
    for call in (
        lambda: gradkit.value_and_grads(loss, params),
        lambda: gradkit.per_loss_grads([loss], {"bias": params[1]}),
        lambda: gradkit.simultaneous_grads([loss], [params]),
        lambda: gradkit.backward_(loss, params),
        lambda: gradkit.read_grads(model),
        lambda: gradkit.write_grads_(model, grads),
        lambda: gradkit.add_grads_(model, grads),
        lambda: gradkit.clear_grads_(model),
        lambda: gradkit.step_(optimizer, model, grads),
        lambda: gradkit.capture_grads(model).__enter__(),
    ):
        with pytest.raises(gradkit.UnsupportedGraphError, match="fully_shard has gathered"):
            call()
    assert all(param.grad is None for param in params)
    assert all(param.grad is grad for param, grad in zip(shards, before, strict=True))
    other = torch.ones(2, device=device, requires_grad=True)
    assert gradkit.value_and_grads((other * other).sum(), other)[1].tolist() == [2, 2]
    _, repeated = gradkit.distributed.value_and_grads(loss, model)
    assert_alike(repeated, grads)


def test_gathered_parameters_are_refused(two: Ranks, device: torch.device) -> None:
    two.run(check_gathered)


# --- The page ------------------------------------------------------------------------------------


def test_the_page_has_the_same_table(device: torch.device) -> None:
    page = PAGE.read_text(encoding="utf-8")
    heading = r"(?m)^\| call \| " + r" \| ".join(COLUMNS) + r" \|\n\|[-|]+\n((?:\|.*\n)+)"
    tables = re.findall(heading, page)
    assert len(tables) == 1
    lines = [line.strip("|").split("|") for line in tables[0].splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert {row: tuple(rest) for row, *rest in cells} == TABLE
