"""Inner products of the gradients of losses over all ranks, and weights that are made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd.engine import numbered_roots, unrecorded
from gradkit._autograd.gramian import by_blocks, weights_of
from gradkit._autograd.jacobian_rows import JacobianRows, read_jacobian_rows, warn_sequential
from gradkit._autograd.passes import PassResult, PassRunner, run_separately
from gradkit._autograd.release import release as release_nodes
from gradkit._checks.eager_graph import check_call
from gradkit._checks.reachability import refuse_cast_since_forward
from gradkit._compat import distributed
from gradkit._compat.autograd import sequence_number
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Call, Grads, Losses, Pass, read_losses, read_weights
from gradkit._core.graph import is_leaf_node
from gradkit._core.leaf_arithmetic import dot_leaves, products_of_rows, symmetrized
from gradkit._core.ownership import grad_dtype
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree
from gradkit.distributed import _ddp
from gradkit.distributed._agreement import (
    Description,
    Group,
    agree_in_all,
    agree_or_raise,
    collective_errors,
    digest_of,
)
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.distributed._reduction import packed, sum_over_ranks
from gradkit.errors import (
    CollectiveError,
    GradkitError,
    StructureError,
    UnsupportedGraphError,
    message,
)

# The size of stacks of gradients that are sent together: few are in memory at once.
_BUCKET_BYTES = 4 * 2**20


class LeafReduction:
    """The products of rows of gradients, each leaf averaged over the ranks as it arrives."""

    def __init__(self, rows: JacobianRows, group: Group, order: Sequence[int]) -> None:
        self.reached = False  # whether a gradient has arrived on any rank
        self._jacobian_rows, self._group, self._order = rows, group, order

    def products(self, parts: Sequence[slice]) -> Tensor:
        """Return the products of some rows, from one vmapped pass of each rank."""
        size = sum(part.stop - part.start for part in parts)
        buckets = _Buckets(self._jacobian_rows, self._group, self._order, size)
        error: BaseException | None = None
        try:
            with unrecorded():
                self._jacobian_rows.run_batch(parts, buckets.add)
        except CollectiveError:  # the group is lost
            raise
        except BaseException as raised:
            error = raised
        buckets.send_rest()
        self._agree(error)
        return buckets.product

    def _agree(self, error: BaseException | None) -> None:
        """Raise if the pass has failed on any rank: a RuntimeError where all ranks can go on."""
        can_go_on = isinstance(error, RuntimeError) and not isinstance(error, GradkitError)
        arrived = self._jacobian_rows.arrived
        is_any = any(grad is not None for grad in arrived)

        def read() -> tuple[None, Description]:
            if error is not None and not can_go_on:
                raise error
            if error is None and any(grad is None for grad in arrived):
                refuse_cast_since_forward(
                    self._jacobian_rows.call, [arrived] * len(self._jacobian_rows.call.passes)
                )
            flags = (int(error is not None), int(is_any), 0, 0)
            return None, Description((), (), tuple, flags)

        _, agreement = agree_or_raise(self._group, read)
        failed = [rank for rank, flags in enumerate(agreement.expected) if flags[0]]
        if failed:
            raise error or RuntimeError(f"it failed on rank {failed[0]}")
        self.reached |= any(flags[1] for flags in agreement.expected)


class _Buckets:
    """Stacks of gradients that are sent together, in an order which is the same on all ranks."""

    def __init__(self, rows: JacobianRows, group: Group, order: Sequence[int], size: int) -> None:
        self._group, self._size = group, size
        self._variables = rows.params.variables
        self.product = rows.zeros(size, size)  # the products of all that was sent
        self._buckets = _bucketed(self._variables, order, size)
        self._arrived: dict[int, Tensor] = {}
        self._lock = RLock()  # a pass has a thread for each device

    def add(self, index: int, stack: Tensor) -> None:
        """Add a stack of gradients, and send what is complete and next in the order."""
        with self._lock, INSIDE:
            self._arrived[index] = stack.reshape(self._size, -1) / self._group.size
            while self._buckets and self._arrived.keys() >= set(self._buckets[0]):
                self._send()

    def send_rest(self) -> None:
        """Send what is left: zeros for what has not arrived."""
        while self._buckets:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets.pop(0)
        stacks = [self._arrived.pop(index, None) for index in bucket]
        pairs = zip(bucket, stacks, strict=True)
        dense = [self._zeros(index) if stack is None else stack for index, stack in pairs]
        del stacks
        flat = dense[0] if len(dense) == 1 else torch.cat(dense, 1)
        dense.clear()
        self.product += products_of_rows(sum_over_ranks(self._group, flat)).to(self.product)

    def _zeros(self, index: int) -> Tensor:
        variable = self._variables[index]
        shape = self._size, variable.numel()
        return torch.zeros(shape, dtype=grad_dtype(variable), device=variable.device)


def _bucketed(variables: Sequence[Tensor], order: Sequence[int], size: int) -> list[list[int]]:
    """Return the variables in order; small ones of a dtype and device that follow one another."""
    dtypes = [grad_dtype(variable) for variable in variables]
    rows = (
        ((dtypes[i], variables[i].device), i, size * variables[i].numel() * dtypes[i].itemsize)
        for i in order
    )
    return list(packed(rows, _BUCKET_BYTES))


def arrival_order(rows: JacobianRows) -> tuple[int, ...]:
    """Return the variables in the order in which a pass meets the last use of each."""
    # The engine runs the newest node that is ready. Any order is right: a stack that arrives before
    # its turn is kept until then.
    oldest_use: dict[int, int] = {}
    for node in rows.call.graph.below(rows.call.differentiated).nodes:
        number = None
        for child, _ in node.next_functions:
            if child is not None and is_leaf_node(child):
                number = sequence_number(node) if number is None else number
                leaf = id(getattr(child, "variable"))  # noqa: B009
                oldest_use[leaf] = min(number, oldest_use.get(leaf, number))
    variables = rows.params.variables
    return tuple(sorted(range(len(variables)), key=lambda i: -oldest_use.get(id(variables[i]), -1)))


# Runs a call on its modules, by DistributedDataParallel's means or by those of fully_shard.
RunOnModules: TypeAlias = Callable[[DistributedCall], tuple[PassResult, Params]]
_BySharding: TypeAlias = defaultdict[Hashable, Tensor]


def call_for_elements(
    name: str, losses: PyTree, module: PyTree, *, scalar: bool = False
) -> DistributedCall:
    """Return a call whose losses are the elements of these; `scalar`: each must have just one."""

    def elements(given: Losses) -> Losses:
        if scalar:
            read_losses(losses, scalar=True)
        if all(loss.numel() == 1 for loss in given.leaves):
            return given
        with torch.enable_grad(), INSIDE:
            rows = [element for loss in given.leaves for element in loss.reshape(-1).unbind()]
        if not rows:
            fix = "leave out losses without elements"
            raise StructureError(message("losses", "at least one element", "none", fix))
        return Losses(rows, pytree.flatten(rows)[1])

    options: Any = {"create_graph": False, "retain": False, "losses_to_run": elements}
    return DistributedCall(name, losses, module, run_separately, joint=False, **options)


def gram_of_replicas(
    call: DistributedCall,
    modules: Sequence[DistributedDataParallel],
    chunk_size: int | None,
    retain: bool,
) -> Tensor:
    """Return the products for modules under DistributedDataParallel."""
    group = _ddp.require_one_group(modules, call.name)
    _refuse_ignored(modules)
    shared = replace(call, part=chunk_size)
    rows, order, reason = _read_on_all_ranks(group, shared, modules)
    several = len(rows.elements) > 1 and chunk_size != 1
    if several and reason is not None:
        warn_sequential(reason)
    elif several:
        reduction = LeafReduction(rows, group, order)
        every = rows.call.differentiated
        run = partial(by_blocks, rows, chunk_size, reduction.products)
        if (product := rows.batched(run, every)) is not None:
            if not reduction.reached:
                rows.require_reached()
            if not retain:
                rows.release(every)
            return symmetrized(product)
    return sequential(call, lambda part: _ddp.run(part, modules), chunk_size or 1, retain)


def _refuse_ignored(modules: Sequence[DistributedDataParallel]) -> None:
    if any(module.parameters_to_ignore for module in modules):
        expected = "a module of which DistributedDataParallel reduces all parameters"
        got = "one with parameters to ignore: each rank would have another product"
        fix = "gradkit.tree.gram(gradkit.distributed.per_loss_grads(losses, module))"
        raise UnsupportedGraphError(message("the module", expected, got, fix))


def _read_on_all_ranks(
    group: Group, call: DistributedCall, modules: Sequence[DistributedDataParallel]
) -> tuple[JacobianRows, Sequence[int], str | None]:
    """Return the rows, the order in which leaves are sent, and why no batched pass can run."""

    def read() -> tuple[tuple[JacobianRows, tuple[int, ...], str | None], Description]:
        losses, params = _ddp.read_replicated(call, modules)
        rows = read_jacobian_rows(losses, params, (distributed.SINK,))
        reason = rows.why_not_batched(rows.call.differentiated)
        if _ddp.with_comm_hook(modules):
            reason = "a communication hook reduces the gradients of one loss at a time"
        order = arrival_order(rows)
        expected = (int(reason is None), *digest_of(order)[1:])
        return (rows, order, reason), call.describe(losses, params, expected)

    (rows, order, reason), agreement = agree_or_raise(group, read)
    refusing = [rank for rank, (can_batch, *_) in enumerate(agreement.expected) if not can_batch]
    if refusing and reason is None:
        reason = f"a batched pass is not possible on rank {refusing[0]}"
    if not agreement.same_expected:
        return rows, tuple(reversed(range(len(order)))), reason
    return rows, order, reason


def sequential(
    call: DistributedCall, run: RunOnModules, held_at_a_time: int | None, retain: bool
) -> Tensor:
    """Return the products of all rows: some are held, and multiplied with each that comes later."""

    def run_rows(start: int, stop: int | None, *, is_last: bool) -> tuple[PassResult, Params]:
        # The last rows free the graph.
        release = is_last and not retain
        passes = partial(_run_rows, start=start, stop=stop, release=release)
        return run(replace(call, passes=passes, part=(start, stop)))

    first, params = run_rows(0, held_at_a_time, is_last=True)
    rows = JacobianRows(first.call, params)
    count = len(rows.elements)
    size = held_at_a_time or count
    # The keys are the ways in which gradients are sharded.
    products: _BySharding = defaultdict(partial(rows.zeros, count, count))
    for start in range(0, count, size):
        stop = min(start + size, count)
        result = run_rows(start, stop, is_last=True)[0] if start else first
        block = result.grads[start:stop]
        for offset, grads in enumerate(block):
            rows.note(grads)
            for row, other in enumerate(block[: offset + 1], start):
                _add_products(products, (row, start + offset), other, grads)
        for column in range(stop, count):
            result, _ = run_rows(column, column + 1, is_last=False)
            for row, grads in enumerate(block, start):
                _add_products(products, (row, column), grads, result.grads[column])
    rows.require_reached()
    from gradkit._core.shard_sum import Shards

    parts = torch.stack([rows.zeros(count, count), *products.values()])
    total = Shards([None, *products]).combined(parts).sum(0)
    return symmetrized(total.to(parts.dtype))


def _run_rows(
    losses: Losses,
    params: Params,
    *,
    start: int,
    stop: int | None,
    release: bool,
    allowed: Sequence[str],
    runner: Callable[..., PassRunner] = PassRunner,
    **_: object,
) -> PassResult:
    """Run the passes of some losses; the others count as unreached."""
    # The graph is kept until the last row has had its passes.
    every = [index for index, loss in enumerate(losses.leaves) if loss.requires_grad]
    passes_of_rows = [Pass([index], params) for index in every]
    call = Call(losses, losses.leaves, passes_of_rows, allowed=allowed)
    check_call(call)
    passes = runner(call)
    rows = range(len(losses.leaves))[start:stop]
    grads: list[Grads] = []
    for index in every:
        if index in rows:
            with unrecorded(), numbered_roots([losses.leaves[index]]) as roots:
                row = passes.grads(roots, [None], params.variables, retain=True)
        else:
            row = [None] * len(params.variables)
        grads.append(row)
    if release and rows.stop == len(losses.leaves):
        release_nodes(call.graph.below(every).leading_to(params.variables))
    return PassResult(call, grads)


def _add_products(products: _BySharding, where: tuple[int, int], left: Grads, right: Grads) -> None:
    """Add the product of two sets of gradients, or of this rank's shards of them."""
    for a, b in zip(left, right, strict=True):
        if a is not None and b is not None:
            local = dot_leaves(distributed.local_part(a), distributed.local_part(b))
            assert local is not None
            products[distributed.sharding(a)][where] += local


def weights_on_all_ranks(
    ranks: Sequence[Group],
    losses: PyTree,
    product: Tensor,
    weighting: Callable[[Tensor], Sequence[Any] | Tensor],
) -> PyTree:
    """Return the weights that a function gives to losses: those of the first rank, on all."""
    flat = read_losses(losses, scalar=True)

    def read() -> tuple[Tensor, Description]:
        given = pytree.unflatten(flat.spec, weights_of(product, weighting))
        weights = [torch.as_tensor(weight).detach() for weight in read_weights(given, flat) or ()]
        rows = [weight.reshape(()).to(product.device, torch.float64) for weight in weights]
        return torch.stack(rows), Description((("the weights", len(rows)),), (), tuple)

    weights = agree_in_all(ranks, read)
    # A function that draws random numbers would weigh the losses differently on each rank.
    for group in ranks:
        sent = weights.to(group.device)
        with collective_errors(group):
            dist.broadcast(sent, group=group.handle, group_src=0)
        weights = sent.to(product.device)
    return pytree.unflatten(flat.spec, list(weights))
