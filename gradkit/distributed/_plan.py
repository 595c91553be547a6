"""The reduction of an earlier call, for later calls of the same structure.

Ranks that expect the gradients of the last such call say so when they agree on the next, before its
pass; after it, they send the gradients at once. A rank whose pass has failed, or gave others, sends
zeros instead, and one in a last entry that is zero otherwise. Where the sum of that entry is not
zero, no rank uses what came, and all agree anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

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
    flatten,
    in_layout,
    start_sum_,
    unflatten,
)
from gradkit.errors import CollectiveError

_MOST_PLANS = 64
_MOST_BUCKETS = 4  # which are all in memory at once


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """The gradients that ranks have agreed to sum, and expect to sum again."""

    own: Specs  # of this rank
    common: Specs  # over all ranks
    digest: Digest  # of `common`
    buckets: list[Bucket]

    def reduce(
        self, group: Group, compute: Callable[[], LocalGrads], scale: float
    ) -> list[Tensor | None] | None:
        """Return the sums of gradients, in their memory; None if ranks are to agree anew."""
        try:
            local = compute()
        except BaseException:
            with suppress(CollectiveError):
                self._sum(group, None, scale)
                report_failure(group)
            raise
        as_expected = read_specs(local.grads) == self.own
        flats = self._sum(group, local if as_expected else None, scale)
        if flats[-1][-1] != 0:
            return None
        reduced: list[Tensor | None] = [None] * len(self.common)
        for bucket, flat in zip(self.buckets, flats, strict=True):
            sums = unflatten(bucket, flat[:-1], local, in_place=True)
            for (index, _), grad in zip(bucket, sums, strict=True):
                reduced[index] = grad
        return reduced

    def _sum(self, group: Group, local: LocalGrads | None, scale: float) -> list[Tensor]:
        """Return the summed buckets; their last entry is not zero if a rank sent no gradients."""
        flats: list[Tensor] = []
        waits: list[Callable[[], None]] = []
        for bucket in self.buckets:
            kind = bucket[0][1]
            grads = in_layout(bucket, [None] * len(self.common) if local is None else local.grads)
            last = torch.full((1,), float(local is None), dtype=kind.dtype, device=kind.device)
            flats.append(flatten(grads, last))
            waits.append(start_sum_(group, flats[-1], scale))
        for wait in waits:
            wait()
        return flats


# None for a key whose gradients have not been the same twice.
_plans: OrderedDict[Hashable, ReductionPlan | None] = OrderedDict()


def find_plan(key: Hashable) -> ReductionPlan | None:
    """Return the plan of the last call with this key."""
    return _plans.get(key)


def keep_plan(key: Hashable, group: Group, grads: Sequence[Tensor | None], common: Specs) -> None:
    """Keep what ranks have agreed to sum, for the next call with this key."""
    plan = None
    sent_together = list(buckets(common))
    if key not in _plans and sent_together and len(sent_together) <= _MOST_BUCKETS:
        kinds = [bucket[0][1] for bucket in sent_together]
        # The last entry is read: on another device than small messages are sent from, that would
        # take longer than another agreement.
        if all(kind.layout == torch.strided and kind.device == group.device.type for kind in kinds):
            plan = ReductionPlan(read_specs(grads), common, digest_of(common), sent_together)
    _plans[key] = plan
    if len(_plans) > _MOST_PLANS:
        _plans.popitem(last=False)
