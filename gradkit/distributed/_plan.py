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
from typing import NamedTuple

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
    as_vectors,
    buckets,
    in_layout,
    start_sum_,
    write,
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
        sent = self._sum(group, local.grads if as_expected else None, scale)
        if sent[-1].flat[-1] != 0:
            return None
        reduced: list[Tensor | None] = [None] * len(self.common)
        for bucket, (grads, vectors, flat) in zip(self.buckets, sent, strict=True):
            write(grads, vectors, flat[:-1])
            for (index, _), grad in zip(bucket, grads, strict=True):
                reduced[index] = grad
        return reduced

    def _sum(self, group: Group, own: Sequence[Tensor | None] | None, scale: float) -> list[_Sent]:
        """Return the summed buckets; their last entry is not zero if a rank sent no gradients."""
        sent: list[_Sent] = []
        waits: list[Callable[[], None]] = []
        for bucket in self.buckets:
            grads = in_layout(bucket, [None] * len(self.common) if own is None else own)
            vectors = as_vectors(grads)
            last = vectors[0].new_full((1,), own is None)
            flat = torch.cat([*vectors, last])
            waits.append(start_sum_(group, flat, scale))
            sent.append(_Sent(grads, vectors, flat))
        for wait in waits:
            wait()
        return sent


class _Sent(NamedTuple):
    """A bucket that is on its way."""

    grads: list[Tensor]
    vectors: list[Tensor]  # the entries of each gradient
    flat: Tensor  # of all, and one more


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
