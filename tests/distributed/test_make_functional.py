"""`distributed.make_functional`: derivatives of any order over shards are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import gradkit
from gradkit.distributed import _make_functional
from tests.helpers import of_dtensors
from tests.processes import Ranks

Tree = dict[str, Any]
make_functional = gradkit.distributed.make_functional


class Net(nn.Module):
    """Rows that no number of ranks divides; a tied, a frozen and a shared-by-hand weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.GroupNorm(1, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(5, 1)  # one row: all other ranks have none
        self.shift = nn.Parameter(torch.full((3, 5), 0.1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x = self.norm(self.first(x)).tanh() + self.shift.mean(0)
        x = self.tied(self.frozen(x)).tanh() @ self.frozen.weight  # of a part, read by the whole
        out: Tensor = self.last(x)
        return out


def net(device: torch.device) -> Net:
    torch.manual_seed(1)
    return Net().to(device, torch.float64)


def mesh_of(device: torch.device) -> Any:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def batches(device: torch.device, count: int = 3) -> Tensor:
    """Return the data of every rank, `[count, ranks, 4, 5]`."""
    generator = torch.Generator().manual_seed(3)
    shape = (count, dist.get_world_size(), 4, 5)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def assert_close(ours: Any, expected: Any) -> None:
    """Compare trees; those of shards are gathered."""
    if isinstance(expected, dict):
        assert list(ours) == list(expected)
        for key in expected:
            assert_close(ours[key], expected[key])
    elif expected is None:
        assert ours is None
    else:
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


class Run:
    """What both have."""

    params: Tree

    def full(self, params: Tree) -> Tree:
        """Return the parameters, with the frozen ones."""
        return {**self.params, **params}


class Sharded(Run):
    """Losses of this rank over sharded parameters."""

    def __init__(self, module: nn.Module, device: torch.device, **options: Any) -> None:
        self.call, self.params, self.buffers = make_functional(module, mesh_of(device), **options)

    def loss(self, params: Tree, batch: Tensor) -> Tensor:
        out: Tensor = self.call(params, self.buffers, batch[dist.get_rank()])[0]
        return out.square().mean()

    def reduced(self, grad: Tensor) -> Tensor:
        return gradkit.distributed.all_reduce(grad)


class Single(Run):
    """The same in one process on the batches of all ranks."""

    def __init__(self, module: nn.Module) -> None:
        self.call, self.params, self.buffers = gradkit.func.make_functional(module)

    def loss(self, params: Tree, batch: Tensor) -> Tensor:
        outs = [self.call(params, self.buffers, part)[0] for part in batch]
        return torch.stack([out.square().mean() for out in outs]).mean()

    def reduced(self, grad: Tensor) -> Tensor:
        return grad


def grads_of(loss: Tensor, params: Tree) -> Tree:
    grads: Tree = gradkit.value_and_grads(loss, params, create_graph=True)[1]
    return grads


def square(grads: Any) -> Tensor:
    return gradkit.tree.dot(grads, grads)


def first_order(run: Any, batch: Tensor) -> Tree:
    losses = {"a": run.loss(run.params, batch[0]), "b": run.loss(run.params, batch[1])}
    return gradkit.per_loss_grads(losses, run.params)


def penalty(run: Any, batch: Tensor) -> Tree:
    loss = run.loss(run.params, batch[0])
    grads = grads_of(loss, run.params)
    total: Tree = gradkit.value_and_grads(loss + square(grads), run.params)[1]
    return total


def third_order(run: Any, batch: Tensor) -> Tree:
    first = grads_of(run.loss(run.params, batch[0]), run.params)
    second = grads_of(square(first), run.params)
    third: Tree = gradkit.value_and_grads(square(second), run.params)[1]
    return third


def inner_step(run: Any, batch: Tensor) -> Tree:
    grads = grads_of(run.loss(run.params, batch[0]), run.params)
    adapted = gradkit.tree.sub(run.params, gradkit.tree.scale(grads, 0.1))
    return gradkit.value_and_grads(run.loss(adapted, batch[1]), run.params)[1]


def product(run: Any, batch: Tensor) -> Tree:
    """A Hessian product, from eager passes."""
    grads = grads_of(run.loss(run.params, batch[0]), run.params)
    along = gradkit.tree.dot(grads, {name: p.detach() for name, p in run.params.items()})
    return gradkit.value_and_grads(along, run.params)[1]


def trained(run: Any) -> Tree:
    return {name: p for name, p in run.params.items() if p.requires_grad}


def func_product(run: Any, batch: Tensor) -> Tree:
    def loss(params: Tree) -> Tensor:
        return run.loss(run.full(params), batch[0])

    along = {name: p.detach() for name, p in trained(run).items()}
    grads, hv = gradkit.func.hvp(loss, trained(run), along, mode="reverse-over-reverse")
    return {"grads": grads, "hv": hv}


def unrolled(memory: Any) -> Callable[[Any, Tensor], Tree]:
    def run_unroll(run: Any, batch: Tensor) -> Tree:
        opt = gradkit.meta.sgd(lr=0.1, momentum=0.9)
        adapted = gradkit.meta.unroll(
            lambda params, _, part: run.loss(params, part),
            run.params,
            [*batch[:2]],
            opt,
            memory=memory,
        )
        loss = run.loss(adapted.params, batch[2])
        return gradkit.value_and_grads(loss, run.params)[1]

    return run_unroll


def learned_rate(run: Any, batch: Tensor) -> Tensor:
    """A plain tensor that shards are multiplied by: its gradient is plain, and not this rank's."""
    rate = torch.tensor(0.1, dtype=torch.float64, device=batch.device, requires_grad=True)
    opt = gradkit.meta.sgd(lr=rate)
    adapted = gradkit.meta.unroll(
        lambda params, _, part: run.loss(params, part), run.params, [*batch[:2]], opt
    )
    _, grad = gradkit.value_and_grads(run.loss(adapted.params, batch[2]), rate)
    assert not isinstance(grad, DTensor)
    return grad


def implicit(run: Any, batch: Tensor) -> Tensor:
    """The gradient of a plain tensor, which each rank's own loss uses, is to be reduced."""
    decay = torch.tensor(0.5, dtype=torch.float64, device=batch.device, requires_grad=True)

    def inner(params: Tree, decay: Tensor) -> Tensor:
        return run.loss(run.full(params), batch[0]) + decay * square(params)

    def solver(params: Tree, decay: Tensor) -> Tree:
        grads = gradkit.value_and_grads(inner(params, decay), params)[1]
        new = gradkit.tree.sub(params, gradkit.tree.scale(grads, 0.4))
        return {name: param.detach().requires_grad_() for name, param in new.items()}

    # The formula away from the minimum, and a solve that ends early: the same in both.
    find = gradkit.meta.implicit(solver, inner, maxiter=2)
    adapted = find(trained(run), decay)
    loss = run.loss(run.full(adapted), batch[1])
    return run.reduced(gradkit.value_and_grads(loss, decay)[1])


LAWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "first": first_order,
    "penalty": penalty,
    "third": third_order,
    "inner step": inner_step,
    "product": product,
    "func": func_product,
    "store": unrolled("store"),
    "recompute": unrolled("recompute"),
    "learned rate": learned_rate,
    "implicit": implicit,
}


def check_laws(device: torch.device) -> None:
    run, single, batch = Sharded(net(device), device), Single(net(device)), batches(device)
    for name, law in LAWS.items():
        try:
            assert_close(law(run, batch), law(single, batch))
        except Exception as error:
            error.add_note(f"law: {name}")
            raise
    assert run.buffers["count"] == 0
    assert run.call(run.params, run.buffers, batch[0, 0])[1]["count"] == 1


@of_dtensors
def test_every_order_is_that_of_one_process(several: Ranks, device: torch.device) -> None:
    several.run(check_laws)


class Attention(nn.Module):
    """Reads its parts' weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


LAYERS: list[Callable[[], nn.Module]] = [
    Attention,
    lambda: nn.GRUCell(5, 3),
    lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 3), nn.GELU()),
]


def check_layers(device: torch.device) -> None:
    batch = batches(device)
    for make in LAYERS:
        torch.manual_seed(1)
        module = make().to(device, torch.float64)
        assert_close(penalty(Sharded(module, device), batch), penalty(Single(module), batch))


@of_dtensors
def test_layers(two: Ranks, device: torch.device) -> None:
    two.run(check_layers)


# --- What is in memory, and when -----------------------------------------------------------------


class Gathered:
    """How many numbers of gathered parameters there are in memory, at most and now."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self.most, self.limit = 0, inf
        gather = _make_functional.ShardedParam.gather

        def counted(param: Any, shard: Tensor) -> Tensor:
            full = gather(param, shard)
            self._storages.append((StorageWeakRef(full.untyped_storage()), full.numel()))
            self.most = max(self.most, self.settled(self.limit))
            return full

        patch.setattr(_make_functional.ShardedParam, "gather", counted)

    @property
    def now(self) -> int:
        return sum(count for storage, count in self._storages if not storage.expired())

    def settled(self, limit: float) -> int:
        """Return how many there are, once threads of gloo have let go of what they received."""
        until = monotonic() + 2
        while self.now > limit and monotonic() < until:
            sleep(0.001)
        return self.now


def check_memory(device: torch.device) -> None:
    """Of four layers, one in a first pass, and with its cotangents in a second."""
    layers = [part for _ in range(4) for part in (nn.Linear(20, 20), nn.Tanh())]
    with pytest.MonkeyPatch.context() as patch:
        gathered = Gathered(patch)
        run = Sharded(nn.Sequential(*layers), device)
        x = torch.ones(3, 20, device=device)

        def loss() -> Tensor:
            out: Tensor = run.call(run.params, run.buffers, x)[0].square().mean()
            return out

        layer = gathered.limit = 20 * 20 + 20
        grads = grads_of(loss(), run.params)
        with CommDebugMode() as collectives:
            square(grads)  # of shards: a graph would keep the whole gradients
        assert set(map(str, collectives.get_comm_counts())) == {"c10d.allreduce_"}
        assert (gathered.most, gathered.settled(0)) == (layer, 0)
        gathered.limit = 2 * layer
        gradkit.value_and_grads(square(grads), run.params)  # gathers cotangents, too
        assert gathered.most <= 2 * layer
        assert gathered.settled(0) == 0
        gathered.limit = inf
        opt = gradkit.meta.sgd(lr=0.1)
        adapted = gradkit.meta.unroll(
            lambda p, _, x: run.call(p, run.buffers, x)[0].sum(), run.params, [x] * 2, opt
        )
        assert gathered.settled(0) == 0
        del adapted
        # torch's own calls leave what their graph saves; the values are the same.
        theirs: Any = torch.autograd.grad(loss(), [*run.params.values()], create_graph=True)
        assert gathered.now > 0
        again = gradkit.value_and_grads(square(theirs), run.params)[1]
        ours: Any = gradkit.value_and_grads(square(grads_of(loss(), run.params)), run.params)[1]
        assert_close(again, {name: grad.full_tensor() for name, grad in ours.items()})


@of_dtensors
def test_a_layer_is_in_memory_at_a_time(two: Ranks, device: torch.device) -> None:
    two.run(check_memory)


# --- Where modules come from ---------------------------------------------------------------------


def untied(device: torch.device) -> Net:
    module = net(device)
    module.tied.weight = nn.Parameter(module.tied.weight.detach().clone())
    return module


def check_fully_sharded(device: torch.device) -> None:
    """The parameters are the module's own; it trains on under FSDP as before."""
    module, single, batch = untied(device), Single(untied(device)), batches(device)
    for part in (module.first, module.last, module):
        fully_shard(part, mesh=mesh_of(device))
    run = Sharded(module, device)
    assert all(run.params[name] is param for name, param in module.named_parameters())
    local = batch[0, dist.get_rank()]
    for _ in range(2):
        assert_close(penalty(run, batch), penalty(single, batch))
        loss = module(local).square().mean()
        with pytest.raises(gradkit.UnsupportedGraphError, match="gathered for the backward pass"):
            Sharded(module, device)
        loss.backward()
        expected = gradkit.value_and_grads(single.loss(single.params, batch[0]), single.params)[1]
        assert_close({name: p.grad for name, p in module.named_parameters()}, expected)
        module.zero_grad()
        opt, theirs = (torch.optim.SGD(trained(one).values(), lr=0.1) for one in (run, single))
        gradkit.step_(opt, run.params, penalty(run, batch))
        gradkit.step_(theirs, single.params, penalty(single, batch))


def check_meta(device: torch.device) -> None:
    state = net(device).state_dict()
    with torch.device("meta"):
        module = Net().double()
    with pytest.raises(
        gradkit.LeafTypeError, match=r"module\.shift: expected a tensor with values"
    ):
        Sharded(module, device)
    run, batch = Sharded(module, device, state_dict=state), batches(device)
    single = Single(net(device))
    assert_close(penalty(run, batch), penalty(single, batch))
    assert all(param.is_meta for param in module.parameters())
    # Of modules that differ between ranks, the first rank's is taken, as DDP does.
    different = net(device)
    if dist.get_rank():
        with torch.no_grad():
            different.shift.fill_(torch.nan)
            different.count.fill_(5)
    run = Sharded(different, device)
    assert_close(penalty(run, batch), penalty(single, batch))
    assert run.buffers["count"] == 0


@of_dtensors
def test_from_a_sharded_module_and_from_a_state_dict(two: Ranks, device: torch.device) -> None:
    two.run(check_fully_sharded)
    two.run(check_meta)


# --- Refusals ------------------------------------------------------------------------------------


def raises(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()


def check_bad_modules(device: torch.device) -> None:
    module, mesh, structure = net(device), mesh_of(device), gradkit.StructureError
    graph = gradkit.UnsupportedGraphError
    size = dist.get_world_size()
    square_mesh = init_device_mesh(device.type, (1, size), mesh_dim_names=("a", "b"))
    raises(structure, "a mesh of one dimension", lambda: make_functional(module, square_mesh))
    raises(structure, r"all \d ranks", lambda: make_functional(module, square_mesh["a"]))
    wrapped = DistributedDataParallel(module)
    raises(graph, "make_functional\\(model.module", lambda: make_functional(wrapped, mesh))
    scalar = nn.ParameterDict({"t": nn.Parameter(torch.zeros((), device=device))})
    raises(structure, "rows to divide, got a scalar", lambda: make_functional(scalar, mesh))
    columns = nn.Linear(4, 4, device=device)
    fully_shard(columns, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    raises(structure, r"module\.weight: .*Shard\(dim=1\)", lambda: make_functional(columns, mesh))
    state = {"last.weight": torch.zeros(2, 5)}
    raises(structure, r"state_dict\['last", lambda: make_functional(module, mesh, state))
    raises(gradkit.LeafTypeError, "an nn.Module", lambda: make_functional(torch.ones(2), mesh))
    rows = nn.Linear(5, 3 + dist.get_rank(), device=device)
    raises(structure, r"module\.weight on rank 1", lambda: make_functional(rows, mesh))
    order = ["a", "b"][:: 1 if dist.get_rank() == 0 else -1]
    turned = nn.ModuleDict({name: nn.Linear(4, 4, device=device) for name in order})
    raises(structure, "the names on rank 1", lambda: make_functional(turned, mesh))


def check_other_meshes(device: torch.device) -> None:
    """Each half of the ranks has a mesh of its own: all raise, and can go on."""
    halves = init_device_mesh(device.type, (2, 2), mesh_dim_names=("a", "b"))
    for half in (halves["a"], halves["b"]):
        words = r"mesh: expected .* all 4 ranks, got one of \(2,\)"
        raises(gradkit.StructureError, words, partial(make_functional, net(device), half))
    first_only = halves["b"] if dist.get_rank() == 0 else mesh_of(device)
    error = gradkit.StructureError if dist.get_rank() == 0 else gradkit.CollectiveError
    raises(error, "mesh|an error on rank 0", lambda: make_functional(net(device), first_only))
    run, single, batch = Sharded(net(device), device), Single(net(device)), batches(device)
    assert_close(first_order(run, batch), first_order(single, batch))


def test_a_mesh_of_some_ranks_is_refused_on_all(four: Ranks, device: torch.device) -> None:
    four.run(check_other_meshes)


def check_bad_calls(device: torch.device) -> None:
    run, batch, structure = Sharded(net(device), device), batches(device), gradkit.StructureError
    first = dist.get_rank() == 0

    def call(params: Any) -> Any:
        return run.loss(params, batch[0])

    less = {name: param for name, param in run.params.items() if name != "shift"}
    raises(structure, "the params of make_functional, by name", lambda: call(less))
    whole = {name: param.full_tensor() for name, param in run.params.items()}
    raises(structure, r"params\['shift'\]: expected a DTensor of shape", lambda: call(whole))
    changed = net(device)
    before = Sharded(changed, device)
    changed.more = nn.Linear(1, 1, device=device)
    new = r"module\.more\.bias: expected the parameters .* got a new parameter"
    raises(structure, new, lambda: before.loss(before.params, batch[0]))
    del changed.more, changed.last
    gone = r"module\.last\.bias: .* got none any more"
    raises(structure, gone, lambda: before.loss(before.params, batch[0]))
    same = {n: p.redistribute(placements=[Replicate()]) for n, p in run.params.items()}
    raises(structure, r"params\['shift'\]: .*Replicate", lambda: call(same))
    raises(
        structure if first else gradkit.CollectiveError,
        "",
        lambda: call(less if first else run.params),
    )
    detached = {name: param.detach() for name, param in run.params.items()}
    raises(
        structure, r"params\['shift'\] on rank 1", lambda: call(run.params if first else detached)
    )
    with torch.set_grad_enabled(first):
        raises(structure, "is_grad_enabled", lambda: call(run.params))
    loss, other = run.loss(run.params, batch[0]), run.loss(run.params, batch[1])
    with torch.no_grad():
        run.params["last.weight"].add_(1)
    raises(
        gradkit.UnsupportedGraphError,
        r"params\['last.weight'\]: .*changed in place",
        lambda: gradkit.value_and_grads(loss, run.params),
    )
    del other
    run = Sharded(Branches().to(device), device)
    x = torch.ones(2, 5, device=device)
    outs, _ = run.call(run.params, run.buffers, x)
    for index in (0, 1) if first else (1, 0):  # what torch cannot know to be another's
        gradkit.value_and_grads(outs[index].sum(), run.params)
    raises(structure, "passes since the last call", lambda: run.call(run.params, run.buffers, x))
    run.call(run.params, run.buffers, x)


class Branches(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self]


class Careless(nn.Module):
    """Changes what it reads: its weight, or what a graph has saved."""

    def __init__(self, change: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).exp()
        self.change(self.layer.weight, out)
        return out * 1


def check_writes(device: torch.device) -> None:
    x = torch.ones(2, 5, device=device)
    for change in (lambda w, _: w.data.mul_(2), lambda w, _: w.detach().mul_(2)):
        run = Sharded(Careless(change).to(device), device)
        raises(
            gradkit.UnsupportedGraphError,
            "writes on them in its forward pass",
            partial(run.call, run.params, run.buffers, x),
        )
    # With hooks for saved tensors, torch itself would not see this.
    run = Sharded(Careless(lambda _, out: out.detach().mul_(2)).to(device), device)
    out, _ = run.call(run.params, run.buffers, x)
    raises(
        gradkit.UnsupportedGraphError,
        "changed in place since",
        lambda: gradkit.value_and_grads(out.sum(), run.params),
    )


def test_bad_input_is_refused_on_all_ranks(two: Ranks, device: torch.device) -> None:
    two.run(check_bad_modules)
    two.run(check_bad_calls)
    two.run(check_writes)
