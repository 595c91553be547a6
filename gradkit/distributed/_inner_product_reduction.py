"""Inner products of gradients that are summed over the ranks leaf by leaf, as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

import torch
import torch.distributed as dist
from torch import Tensor

from gradkit._autograd.engine import unrecorded
from gradkit._autograd.jacobian_rows import JacobianRows
from gradkit._checks.reachability import refuse_cast_since_forward
from gradkit._compat.autograd import sequence_number
from gradkit._compat.undoing import INSIDE
from gradkit._core.graph import is_leaf_node
from gradkit._core.leaf_arithmetic import products_of_rows
from gradkit._core.ownership import grad_dtype
from gradkit.distributed._agreement import (
    Description,
    Group,
    agree_or_raise,
    collective_errors,
)
from gradkit.distributed._reduction_plan import EARLY_BYTES
from gradkit.errors import CollectiveError, GradkitError


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
        self.product = rows.zeros(size, size)  # of all that was sent
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
        with collective_errors(self._group):
            dist.all_reduce(flat, group=self._group.handle)
        self.product += products_of_rows(flat).to(self.product)

    def _zeros(self, index: int) -> Tensor:
        variable = self._variables[index]
        shape = self._size, variable.numel()
        return torch.zeros(shape, dtype=grad_dtype(variable), device=variable.device)


def _bucketed(variables: Sequence[Tensor], order: Sequence[int], size: int) -> list[list[int]]:
    """Return the variables in order; small ones of a dtype and device that follow one another."""
    buckets: list[list[int]] = []
    kind: object = None
    filled = 0
    for index in order:
        variable = variables[index]
        dtype = grad_dtype(variable)
        nbytes = size * variable.numel() * dtype.itemsize
        if kind != (dtype, variable.device) or filled + nbytes > EARLY_BYTES:
            buckets.append([])
            kind, filled = (dtype, variable.device), 0
        buckets[-1].append(index)
        filled += nbytes
    return buckets


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
