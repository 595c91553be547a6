"""`all_reduce`: the sum and the mean over real processes, and what is refused by name."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradkit
from gradkit.distributed import _reduction
from tests.processes import Ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
SHAPES = [(), (3,), (2, 5), (4, 1, 3), (0,), (2, 0)]


def grads_of(rank: int, plan: list[Any], device: torch.device) -> dict[str, Any]:
    """Return the tree that a plan gives to a rank; every rank can make that of every other."""
    tree: dict[str, Any] = {}
    for index, (dtype, shape, transposed, absent) in enumerate(plan):
        generator = torch.Generator().manual_seed(100 * rank + index)
        kind = torch.complex128 if dtype.is_complex else torch.float64
        leaf = torch.randn(shape, generator=generator, dtype=kind).to(dtype).to(device)
        if transposed:
            leaf = leaf.mT.contiguous().mT if leaf.dim() > 1 else leaf
        tree[f"leaf {index}"] = None if rank in absent else leaf
    return tree


def reduced_by_hand(leaves: list[Tensor | None], op: str) -> Tensor | None:
    """Return the sum, or the mean, in the order of the ranks."""
    present = [leaf for leaf in leaves if leaf is not None]
    if not present:
        return None
    scale = 1 / len(leaves) if op == "mean" else 1
    return sum((leaf * scale for leaf in present), start=torch.zeros_like(present[0]))


def check_random_tree(device: torch.device, plan: list[Any], op: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    trees = [grads_of(other, plan, device) for other in range(size)]
    given_, before = trees[rank], grads_of(rank, plan, device)
    result = gradkit.distributed.all_reduce(given_, op=op)
    assert list(result) == list(given_)
    for name in result:
        expected = reduced_by_hand([tree[name] for tree in trees], op)
        leaf = given_[name]
        if leaf is not None:
            assert torch.equal(leaf, before[name])
        if expected is None:
            assert result[name] is None
        elif size == 2:  # a + b and b + a are the same bits
            torch.testing.assert_close(result[name], expected, rtol=0, atol=0)
        else:  # in an order that is gloo's: each addition rounds, in both sums
            terms = [tree[name].abs().double() for tree in trees if tree[name] is not None]
            room = 2 * size * torch.finfo(expected.dtype).eps * sum(terms)
            assert ((result[name] - expected).abs().double() <= room).all()
        if leaf is not None and expected is not None:
            assert result[name].stride() == leaf.stride()
    storages = [leaf.untyped_storage().data_ptr() for leaf in result.values() if leaf is not None]
    filled = [pointer for pointer in storages if pointer]
    assert len(set(filled)) == len(filled)


leaves = st.tuples(
    st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.booleans(), st.sets(st.integers(0, 3))
)


@given(plan=st.lists(leaves, max_size=6), op=st.sampled_from(["mean", "sum"]))
def test_a_random_tree_is_summed(two: Ranks, device: torch.device, plan: Any, op: str) -> None:
    two.run(check_random_tree, plan, op)


@given(plan=st.lists(leaves, max_size=6), op=st.sampled_from(["mean", "sum"]))
def test_a_random_tree_is_summed_by_four(
    four: Ranks, device: torch.device, plan: Any, op: str
) -> None:
    four.run(check_random_tree, plan, op)


def mlp(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    return model.to(device, dtype)


def batch(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return this rank's inputs."""
    every = torch.randn(dist.get_world_size(), 6, 5, generator=torch.Generator().manual_seed(2))
    return every[dist.get_rank()].to(device, dtype)


def check_mean_is_what_ddp_leaves(device: torch.device) -> None:
    model = mlp(device)
    wrapped = DistributedDataParallel(mlp(device))
    wrapped(batch(device)).square().mean().backward()
    _, grads = gradkit.value_and_grads(model(batch(device)).square().mean(), model)
    reduced = gradkit.distributed.all_reduce(grads)
    for grad, param in zip(reduced.values(), wrapped.parameters(), strict=True):
        if dist.get_world_size() == 2:
            assert torch.equal(grad, param.grad)
        torch.testing.assert_close(grad, param.grad)


def test_the_mean_is_what_ddp_leaves_in_grad(several: Ranks, device: torch.device) -> None:
    several.run(check_mean_is_what_ddp_leaves)


def check_sums_and_counts(device: torch.device, sizes: list[list[int]]) -> None:
    """The mean over all targets, however they are split into micro-batches and ranks."""
    model, rank = mlp(device, torch.float64), dist.get_rank()
    total = sum(map(sum, sizes))
    x = torch.randn(total, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parts = x.to(device).split([size for own in sizes for size in own])
    first = sum(map(len, sizes[:rank]))
    count = torch.zeros((), device=device, dtype=torch.float64)
    local = gradkit.tree.zeros_like(model)
    for part in parts[first : first + len(sizes[rank])]:
        _, grads = gradkit.value_and_grads(model(part).square().sum(), model)
        gradkit.tree.add_(local, grads)
        count += len(part)
    reduced = gradkit.distributed.all_reduce({"grads": local, "count": count}, op="sum")
    mean = gradkit.tree.scale(reduced["grads"], 1 / reduced["count"])
    _, whole = gradkit.value_and_grads(model(torch.cat(parts)).square().sum() / total, model)
    assert gradkit.tree.allclose(mean, whole, rtol=1e-10, atol=1e-12)


sizes = st.lists(st.integers(1, 7), max_size=4)


@given(sizes=st.lists(sizes, min_size=2, max_size=2).filter(any))
def test_sums_and_counts_give_the_mean_over_all_targets(
    two: Ranks, device: torch.device, sizes: list[list[int]]
) -> None:
    two.run(check_sums_and_counts, sizes)


def check_tied_empty_and_nested(device: torch.device) -> None:
    w = torch.full((2,), float(dist.get_rank()), device=device)
    mean = (dist.get_world_size() - 1) / 2
    tied = gradkit.distributed.all_reduce({"a": [w], "b": (w, None)})
    assert tied["a"][0].tolist() == tied["b"][0].tolist() == [mean, mean]
    tied["a"][0].zero_()
    assert tied["b"][0].tolist() == [mean, mean]
    assert tied["b"][1] is None
    empties: list[Any] = [{}, [], (), {"a": {}}]
    for empty in empties:
        assert gradkit.distributed.all_reduce(empty) == empty
    assert gradkit.distributed.all_reduce(None) is None
    assert gradkit.distributed.all_reduce(w).tolist() == [mean, mean]
    assert w.tolist() == [dist.get_rank()] * 2


def test_tied_leaves_empty_trees_and_lone_leaves(several: Ranks, device: torch.device) -> None:
    several.run(check_tied_empty_and_nested)


def check_sparse(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    index = torch.tensor([[rank, rank, 7]])
    ours = torch.sparse_coo_tensor(index, torch.ones(3, 2) * (rank + 1), (9, 2))
    dense = [
        torch.sparse_coo_tensor([[r, r, 7]], torch.ones(3, 2) * (r + 1), (9, 2)).to_dense() / size
        for r in range(size)
    ]
    result = gradkit.distributed.all_reduce({"all": ours, "one": ours if rank == 0 else None})
    assert result["all"].is_sparse
    assert result["one"].is_sparse
    torch.testing.assert_close(result["all"].to_dense(), sum(dense, torch.zeros(9, 2)))
    torch.testing.assert_close(result["one"].to_dense(), dense[0])
    assert not ours.is_coalesced()
    mixed = gradkit.distributed.all_reduce(ours if rank == 0 else ours.to_dense())
    assert not mixed.is_sparse
    torch.testing.assert_close(mixed, sum(dense, torch.zeros(9, 2)))


def test_sparse_leaves_stay_sparse(several: Ranks, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a sparse sum is only gloo's; the refusal is tested below")
    several.run(check_sparse)


def check_mixed_devices(device: torch.device) -> None:
    rank = dist.get_rank()
    tree = {"here": torch.ones(2, device=device) * rank, "on the CPU": torch.ones(3) * rank}
    result = gradkit.distributed.all_reduce(tree, op="sum")
    assert result["here"].device == device
    assert result["on the CPU"].device.type == "cpu"
    assert set(result["here"].tolist()) == set(result["on the CPU"].tolist())


def test_leaves_on_several_devices(two: Ranks, device: torch.device) -> None:
    two.run(check_mixed_devices)


def counted(call: Any) -> tuple[int, int]:
    """Return the numbers of collectives of a call: of gradients, and in all."""
    counts = {"all_reduce": 0, "all_gather": 0, "all_gather_object": 0}
    originals = {name: getattr(dist, name) for name in counts}

    def counting(name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return collective

    for name in counts:
        setattr(dist, name, counting(name))
    try:
        call()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return counts["all_reduce"], sum(counts.values())


def check_number_of_collectives(device: torch.device) -> None:
    small = [torch.ones(3, 4, device=device) for _ in range(500)]
    assert counted(lambda: gradkit.distributed.all_reduce(small)) == (1, 2)
    two_dtypes = [*small, *(leaf.double() for leaf in small)]
    assert counted(lambda: gradkit.distributed.all_reduce(two_dtypes)) == (2, 3)
    quarter = _reduction.BUCKET_BYTES // 16  # numbers of four bytes
    large = [torch.ones(quarter, device=device) for _ in range(10)]
    assert counted(lambda: gradkit.distributed.all_reduce(large)) == (math.ceil(10 / 4), 4)
    one = torch.ones(5 * quarter, device=device)
    assert counted(lambda: gradkit.distributed.all_reduce([one, *small])) == (2, 3)
    absent = [None if dist.get_rank() else leaf for leaf in small]
    assert counted(lambda: gradkit.distributed.all_reduce(absent)) == (1, 3)


def test_collectives_are_bounded_by_bytes_and_not_by_leaves(
    two: Ranks, device: torch.device
) -> None:
    two.run(check_number_of_collectives)


def check_second_order(device: torch.device, op: str) -> None:
    """MAML over ranks: the inner gradient is that of all, and so is the outer one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    start = torch.randn(4, device=device, dtype=torch.float64)
    inner = torch.randn(size, 5, 4, device=device, dtype=torch.float64)
    outer = torch.randn(size, 5, 4, device=device, dtype=torch.float64)
    scale = 1 / size if op == "mean" else 1.0

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).sin().square().mean()

    def joined(w: Tensor) -> Tensor:
        losses = [loss(w, inner[r]) for r in range(size)]
        grads = [torch.autograd.grad(one, w, create_graph=True)[0] for one in losses]
        adapted = w - 0.1 * scale * sum(grads, torch.zeros_like(w))
        return scale * sum((loss(adapted, outer[r]) for r in range(size)), torch.zeros(()))

    w = start.clone().requires_grad_()
    (expected,) = torch.autograd.grad(joined(w), w, create_graph=True)
    (third,) = torch.autograd.grad(expected.square().sum(), w)

    w = start.clone().requires_grad_()
    _, grad = gradkit.value_and_grads(loss(w, inner[rank]), w, create_graph=True)
    grad = gradkit.distributed.all_reduce(grad, op=op, differentiable=True)
    _, ours = gradkit.value_and_grads(loss(w - 0.1 * grad, outer[rank]), w, create_graph=True)
    reduced = gradkit.distributed.all_reduce(ours, op=op, differentiable=True)
    torch.testing.assert_close(reduced, expected)
    # Once more: the backward pass of the reduction can be differentiated, too. Every rank has the
    # same loss here, which counts once.
    share = reduced.square().sum() * (1 if op == "mean" else 1 / size)
    _, ours = gradkit.value_and_grads(share, w)
    torch.testing.assert_close(gradkit.distributed.all_reduce(ours, op=op), third)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_the_graph_goes_through_the_reduction(
    several: Ranks, device: torch.device, op: str
) -> None:
    several.run(check_second_order, op)


def check_graph_on_some_ranks(device: torch.device, case: str) -> None:
    """A backward pass would wait for a rank that does not come."""
    w = torch.ones(2, device=device, requires_grad=True)
    ours = {"w": w * 2, "constant": torch.ones(2, device=device)}
    if dist.get_rank() == 0:
        ours["w"] = None if case == "none" else ours["w"].detach()
    with pytest.raises(gradkit.StructureError, match=r"grads\['w'\] on rank .*with a graph"):
        gradkit.distributed.all_reduce(ours, differentiable=True)
    ours["w"] = None
    result = gradkit.distributed.all_reduce(ours, differentiable=True)
    assert not result["constant"].requires_grad


@pytest.mark.parametrize("case", ["none", "constant"])
def test_a_graph_on_some_ranks_only_is_refused(two: Ranks, device: torch.device, case: str) -> None:
    two.run(check_graph_on_some_ranks, case)


# --- Refusals ------------------------------------------------------------------------------------


def check_refused(device: torch.device, case: str, error: str, words: list[str]) -> None:
    """One case of bad input: the same error on all ranks, and the group works on."""
    rank = dist.get_rank()
    ours = {"w": torch.ones(2, device=device), "b": torch.zeros((), device=device)}
    options: dict[str, Any] = {}
    if rank == 1 or case in ("integers", "eight bits", "a number", "a graph", "op"):
        match case:
            case "another leaf":
                ours["c"] = torch.ones(1, device=device)
            case "a missing leaf":
                del ours["b"]
            case "another order":
                ours = dict(reversed(ours.items()))
            case "another shape":
                ours["w"] = torch.ones(1, 2, device=device)
            case "another dtype":
                ours["w"] = torch.ones(2, device=device, dtype=torch.float64)
            case "another op" | "op":
                options["op"] = "sum" if case == "another op" else "max"
            case "another kind of container":
                ours = {"w": ours["w"], "b": [ours["b"]]}
            case "integers":
                ours["w"] = torch.ones(2, device=device, dtype=torch.int64)
            case "eight bits":
                ours["w"] = ours["w"].to(torch.float8_e5m2)
            case "a number":
                ours["b"] = 1.0  # type: ignore[assignment]
            case "a graph":
                ours["w"] = torch.ones(2, device=device, requires_grad=True) * 2
            case "a failure":
                ours["w"] = "no tensor"  # type: ignore[assignment]
    expected = getattr(gradkit, error)
    if case == "a failure" and rank == 1:
        expected = gradkit.LeafTypeError
        words = ["grads['w']"]
    with pytest.raises(expected) as raised:
        gradkit.distributed.all_reduce(ours, **options)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert (
        gradkit.distributed.all_reduce(torch.ones(3, device=device), op="sum").tolist()
        == [dist.get_world_size()] * 3
    )


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("another leaf", "StructureError", ["grads['c'] on rank 0", "which rank 1 has"]),
        ("a missing leaf", "StructureError", ["grads['b'] on rank 1", "which rank 0 has"]),
        ("another order", "StructureError", ["the structure on rank 1"]),
        ("another shape", "StructureError", ["grads['w'] on rank 1", "(2,)", "(1, 2)"]),
        ("another dtype", "StructureError", ["grads['w'] on rank 1", "float64", "float32"]),
        ("another op", "StructureError", ["op on rank 1", "mean", "sum"]),
        ("another kind of container", "StructureError", ["grads['b'] on rank 1"]),
        ("integers", "LeafTypeError", ["grads['w']", "int64"]),
        ("eight bits", "LeafTypeError", ["grads['w']", "float8_e5m2", "Tensor.float"]),
        ("a number", "LeafTypeError", ["grads['b']", "the float 1.0"]),
        ("a graph", "UnsupportedGraphError", ["grads['w']", "differentiable=True"]),
        ("op", "OptionError", ["'mean' or 'sum'", "'max'"]),
        ("a failure", "CollectiveError", ["an error on rank 1", "gradkit.distributed.all_reduce"]),
    ],
)
def test_what_does_not_go_together_is_refused_on_all_ranks(
    several: Ranks, device: torch.device, case: str, error: str, words: list[str]
) -> None:
    several.run(check_refused, case, error, words)


def check_groups(device: torch.device) -> None:
    rank = dist.get_rank()
    first = dist.new_group([0, 1])
    value = torch.ones(2, device=device) * (rank + 1)
    if rank < 2:
        assert gradkit.distributed.all_reduce(value, first, "sum").tolist() == [3.0, 3.0]
    else:
        with pytest.raises(gradkit.CollectiveError, match=f"rank {rank} is not in"):
            gradkit.distributed.all_reduce(value, first)


def test_a_group_of_some_ranks(four: Ranks, device: torch.device) -> None:
    four.run(check_groups)


def test_without_a_group_the_error_says_so(device: torch.device) -> None:
    with pytest.raises(gradkit.CollectiveError, match="init_process_group"):
        gradkit.distributed.all_reduce({"w": torch.ones(2, device=device)})


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("all_reduce", {"op": "max"}, "op: expected 'mean' or 'sum', got 'max'"),
    ("all_reduce", {"differentiable": 1}, "differentiable: expected False or True, got 1"),
    ("value_and_grads", {"unused": "zero"}, "unused: expected 'none' or 'zeros' or 'error'"),
    ("value_and_grads", {"create_graph": None}, "create_graph: expected False or True, got None"),
    ("value_and_grads", {"retain_graph": "no"}, "retain_graph: expected None or False or True"),
    ("per_loss_grads", {"unused": None}, "unused: expected 'none' or 'zeros' or 'error'"),
    ("per_loss_grads", {"create_graph": 1}, "create_graph: expected False or True, got 1"),
    ("per_loss_grads", {"retain_graph": 0}, "retain_graph: expected None or False or True"),
    ("per_loss_grads", {"strategy": "loop"}, "strategy: expected 'sequential' or"),
    ("per_loss_grads", {"chunk_size": True}, "chunk_size: expected a positive int or None"),
]


@pytest.mark.parametrize(("call", "options", "words"), OPTIONS)
def test_a_wrong_option_raises_before_a_group_is_needed(
    device: torch.device, call: str, options: dict[str, Any], words: str
) -> None:
    module = nn.Linear(2, 1).to(device)
    loss = module(torch.ones(3, 2, device=device)).sum()
    args = (dict(module.named_parameters()),) if call == "all_reduce" else (loss, module)
    with pytest.raises(gradkit.OptionError) as raised:
        getattr(gradkit.distributed, call)(*args, **options)
    assert words in str(raised.value)
    assert all(param.grad is None for param in module.parameters())
    loss.backward()  # the graph is as it was


def check_dtensor(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(4, device=device), mesh, [Shard(0)])
    with pytest.raises(gradkit.UnsupportedGraphError, match="reduced already"):
        gradkit.distributed.all_reduce({"w": sharded})


def test_a_dtensor_is_refused(two: Ranks, device: torch.device) -> None:
    two.run(check_dtensor)


def check_no_grad_mode(device: torch.device) -> None:
    w = nn.Parameter(torch.ones(2, device=device) * dist.get_rank())
    with torch.no_grad():
        mean = gradkit.distributed.all_reduce({"w": w})["w"]
    assert not mean.requires_grad
    with torch.inference_mode():
        reduced = gradkit.distributed.all_reduce({"w": w.detach().clone()})["w"]
    assert torch.equal(reduced, mean)


def test_parameters_can_be_averaged_without_a_graph(two: Ranks, device: torch.device) -> None:
    two.run(check_no_grad_mode)


def check_two_meshes(device: torch.device) -> None:
    """Each entry counts once, however the tensors are divided."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    line = init_device_mesh(device.type, (size,))
    grid = init_device_mesh(device.type, (1, size), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole = {
        name: torch.randn(shape, dtype=torch.float64, device=device)
        for name, shape in {"x": (6, 4), "y": (3, 5), "z": (2, 2), "plain": (3,)}.items()
    }
    layouts: dict[str, tuple[Any, list[Any]]] = {
        "x": (line, [Shard(0)]),
        "y": (grid, [Replicate(), Shard(1)]),
        "z": (grid, [Replicate(), Replicate()]),
    }
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

    def full(tree: Any) -> Tensor:
        parts = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tree.values()]
        return torch.cat([part.detach().flatten() for part in parts])

    for names in (["x", "y"], ["y", "x", "z"], ["x", "y", "z", "plain"]):
        grads = {
            name: distribute_tensor(whole[name], *layouts[name]) if name in layouts else whole[name]
            for name in names
        }
        flat = torch.cat([whole[name].flatten() for name in names])
        close(gradkit.tree.global_norm(grads), flat.norm())
        close(gradkit.tree.dot(grads, grads), flat @ flat)
        close(gradkit.tree.cosine(grads, grads), flat.new_ones(()))
        clipped, norm = gradkit.tree.clip_by_global_norm(grads, 0.5)
        close(norm, flat.norm())
        expected = flat * (0.5 / (flat.norm() + 1e-6))
        close(full(clipped), expected)
        params = {name: torch.nn.Parameter(torch.zeros_like(x)) for name, x in grads.items()}
        for foreach in (None, False):
            optimizer = torch.optim.SGD(params.values(), lr=1.0, foreach=foreach)
            before = full(params)
            found = gradkit.step_(optimizer, params, grads, max_norm=0.5)
            assert found is not None
            close(found, flat.norm())
            close(full(params) - before, -expected)
        close(full(grads), flat)
        assert all(p.grad is None for p in params.values())


def test_norms_over_two_meshes(several: Ranks, device: torch.device) -> None:
    several.run(check_two_meshes)
