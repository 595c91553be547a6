"""The reduction of an earlier call, for later calls of the same structure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradkit._autograd.arrival_copies import copied_on_arrival
from gradkit._autograd.passes import PassRunner
from gradkit._compat.undoing import INSIDE
from gradkit.distributed._agreement import (
    Digest,
    Group,
    Specs,
    digest_of,
    read_specs,
    report_failure,
)
from gradkit.distributed._reduction import (
    Bucket,
    LocalGrads,
    buckets,
    flat_copy,
    in_layout,
    results,
    start_sum_,
    write,
)
from gradkit.errors import CollectiveError

_MOST_PLANS = 64
# The bytes of a bucket that is sent during a pass: latency does not count, and it is soon filled. A
# gradient of `LARGE` bytes or more is sent alone, which saves a copy of its sum.
EARLY_BYTES = 4 * 2**20
LARGE = 2**20


class ReductionPlan(NamedTuple):
    """The gradients that ranks have agreed to sum, and expect to sum again."""

    own: Specs  # of this rank
    digest: Digest  # of the specs over all ranks
    buckets: list[Bucket]  # in the order in which they are sent


# None for a key whose gradients have not been the same twice.
_plans: OrderedDict[Hashable, ReductionPlan | None] = OrderedDict()


def find_plan(key: Hashable) -> ReductionPlan | None:
    """Return the plan of the last call with this key."""
    return _plans.get(key)


def keep_plan(
    key: Hashable, group: Group, grads: Sequence[Tensor | None], common: Specs, *, joint: bool
) -> None:
    """Keep what ranks have agreed to sum, for the next call with this key; `joint`: of one pass."""
    plan = None
    to_send = _sent_early(common) if joint else list(buckets(common))
    # All buckets of a plan are in memory at once: those of several losses could be many.
    if key not in _plans and to_send and (joint or len(to_send) == 1):
        kinds = [bucket[0][1] for bucket in to_send]
        # The host reads the last entry: of gradients on a GPU that takes longer than another
        # agreement over the CPU.
        if all(kind.layout == torch.strided and kind.device == group.device.type for kind in kinds):
            plan = ReductionPlan(read_specs(grads), digest_of(common), to_send)
    _plans[key] = plan
    if len(_plans) > _MOST_PLANS:
        _plans.popitem(last=False)


def _sent_early(specs: Specs) -> list[Bucket]:
    """Return buckets in the order in which a pass fills them, which meets the last params first."""
    alone = [[(i, spec)] for i, spec in enumerate(specs) if spec and spec.nbytes >= LARGE]
    small = tuple(spec if spec and spec.nbytes < LARGE else None for spec in specs)
    every = [*alone, *buckets(small, EARLY_BYTES)]
    last = min(every, key=_nbytes, default=None)  # it is sent after the pass
    return sorted(every, key=lambda bucket: (bucket is last, -bucket[0][0]))


def _nbytes(bucket: Bucket) -> int:
    return sum(spec.nbytes for _, spec in bucket)


class PlannedReduction:
    """Sums the gradients of one call, as an earlier one of the same structure did."""

    def __init__(self, plan: ReductionPlan, group: Group, scale: float) -> None:
        self._plan, self._group, self._scale = plan, group, scale
        self._early = [_EarlyBucket(bucket, plan.own) for bucket in plan.buckets[:-1]]
        self._arrivals: Counter[int] = Counter()
        self._lock = RLock()  # a pass has a thread for each device
        self._sent: list[tuple[Tensor, Callable[[], None]]] = []  # and what waits

    @property
    def runner(self) -> Callable[..., PassRunner]:
        """The runner of the pass, which sends what has arrived."""
        return partial(_SendingRunner, reduction=self) if self._early else PassRunner

    def reduce(self, compute: Callable[[], LocalGrads]) -> list[Tensor | None] | None:
        """Return the sums of gradients, in their memory; None if ranks are to agree anew."""
        try:
            local = compute()
        except BaseException:
            with suppress(CollectiveError):
                self._send_rest(None)
                report_failure(self._group)
            raise
        self._send_rest(local.grads if self._is_as_planned(local.grads) else None)
        return self._received(local) if self._sent[-1][0][-1] == 0 else None

    def _received(self, local: LocalGrads) -> list[Tensor | None]:
        """Return the sums, in the memory of this rank's own gradients where it has them."""
        reduced: list[Tensor | None] = [None] * len(local.grads)
        for bucket, (flat, _) in zip(self._plan.buckets, self._sent, strict=True):
            grads = results(bucket, local, in_place=True)
            if len(grads) == 1 and flat.shape == grads[0].shape and grads[0].is_contiguous():
                grads = [flat]
            else:
                write(grads, flat)
            for (index, _), grad in zip(bucket, grads, strict=True):
                reduced[index] = grad
        return reduced

    def _is_as_planned(self, grads: Sequence[Tensor | None]) -> bool:
        # A pass inside of a hook, or in another thread, runs the hooks of the same parameters.
        once = Counter(index for bucket in self._early for index in bucket.expected)
        return self._arrivals == once and read_specs(grads) == self._plan.own

    def sending(self, variables: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Send each bucket but the last as soon as a pass in the block has filled it."""
        hooks: dict[int, Any] = {
            index: partial(self._arrive, bucket, index)
            for bucket in self._early
            for index in bucket.expected
        }
        return copied_on_arrival([variables[index] for index in hooks], list(hooks.values()))

    def _arrive(self, bucket: _EarlyBucket, index: int, grad: Tensor | None) -> None:
        with self._lock, INSIDE:
            self._arrivals[index] += 1
            if self._arrivals[index] > 1 or not bucket.add(index, grad, self._scale):
                self._arrivals[index] += 1  # not as planned
                return
            full = self._early[len(self._sent) :]
            for one in takewhile(lambda bucket: bucket.is_full, full):
                self._send(one.flat)

    def _send(self, flat: Tensor) -> None:
        self._sent.append((flat, start_sum_(self._group, flat)))

    def _send_rest(self, grads: Sequence[Tensor | None] | None) -> None:
        """Send the buckets that are left, zeros for None, and wait for all."""
        for bucket in self._plan.buckets[len(self._sent) :]:
            tensors = in_layout(bucket, grads or [None] * len(self._plan.own))
            if bucket is self._plan.buckets[-1]:
                tensors.append(tensors[0].new_full((1,), grads is None))
            self._send(flat_copy(tensors).mul_(self._scale))
        errors: list[CollectiveError] = []
        for _, wait in self._sent:
            try:
                wait()
            except CollectiveError as error:  # the others still write to their buckets
                errors.append(error)
        if errors:
            raise errors[0]


class _EarlyBucket:
    """A bucket that gradients are copied to as they arrive."""

    def __init__(self, bucket: Bucket, own: Specs) -> None:
        self.expected = {index for index, _ in bucket if own[index] is not None}
        self._bucket = bucket
        self._missing = set(self.expected)

    @cached_property
    def flat(self) -> Tensor:
        """The entries of all gradients, zero where this rank has none; a lone one in its shape."""
        kind = self._bucket[0][1]
        shape = (sum(_numels(self._bucket)),) if len(self._bucket) > 1 else kind.shape
        make = torch.empty if len(self.expected) == len(self._bucket) else torch.zeros
        return make(shape, dtype=kind.dtype, device=kind.device)

    @cached_property
    def _views(self) -> dict[int, Tensor]:
        parts = torch.split(self.flat.view(-1), _numels(self._bucket))
        pairs = zip(self._bucket, parts, strict=True)
        return {index: part.view(spec.shape) for (index, spec), part in pairs}

    @property
    def is_full(self) -> bool:
        """Whether all gradients that are expected have arrived."""
        return not self._missing

    def add(self, index: int, grad: Tensor | None, scale: float) -> bool:
        """Copy a gradient, scaled; return whether it fits."""
        view = self._views[index]
        if grad is None or grad.layout != view.layout or grad.shape != view.shape:
            return False
        torch.mul(grad, scale, out=view)
        self._missing.discard(index)
        return True


def _numels(bucket: Bucket) -> list[int]:
    return [torch.Size(spec.shape).numel() for _, spec in bucket]


@dataclass(slots=True, kw_only=True)
class _SendingRunner(PassRunner):
    """A runner whose gradients are sent while the pass runs."""

    reduction: PlannedReduction

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        """Return the gradients of one pass; see `PassRunner.grads`."""
        self.look_for_hooks(variables)  # before those that send
        with self.reduction.sending(variables):
            return PassRunner.grads(self, outputs, seeds, variables, retain=retain)
