"""A function of one sample, run over a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from gradkit._core.ownership import empty_for
from gradkit._state import rng


@dataclass(frozen=True)
class SampleBatch:
    """A function of one sample, and the samples.

    Attributes:
        fn: Of one sample; returns a list of gradients, and the tensors of aux.
        tensors: The batched tensors.
        dims: The batch dimension of each.
        size: The number of samples.
    """

    fn: Callable[..., tuple[list[Tensor | None], list[Tensor]]]
    tensors: list[Tensor]
    dims: tuple[int, ...]
    size: int

    def run(
        self, randomness: str, chunk_size: int | None
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the gradients and aux of all samples, stacked."""
        reached: list[bool] = []

        def present(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            grads, aux = self.fn(*tensors)
            reached[:] = [grad is not None for grad in grads]
            return [grad for grad in grads if grad is not None], aux  # vmap returns tensors only

        grads, aux = vmap(present, in_dims=self.dims, chunk_size=chunk_size, randomness=randomness)(
            *self.tensors
        )
        stacked = iter(grads)
        return [next(stacked) if there else None for there in reached], list(aux)

    def run_in_chunks(
        self, randomness: str, chunk_size: int, variables: list[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the same, with one chunk in memory beside the results.

        torch's own chunks are joined at the end, which takes the memory of the results twice, and
        draw other numbers for each chunk on CUDA where they are to be the same.
        """
        rng_states = rng.states(self.tensors)
        results: list[Tensor | None] = []
        aux_parts: list[list[Tensor]] = []
        for start in range(0, self.size, chunk_size):
            count = min(chunk_size, self.size - start)
            if randomness == "same":
                rng.restore(rng_states)
            grads, aux = self._narrowed(start, count).run(randomness, None)
            if not results:
                results = [
                    None if grad is None else empty_for(variable, grad.dtype, (self.size,))
                    for variable, grad in zip(variables, grads, strict=True)
                ]
            for result, grad in zip(results, grads, strict=True):
                if result is not None and grad is not None:
                    result[start : start + count].copy_(grad)
            aux_parts.append(aux)
        return results, [torch.cat(parts) for parts in zip(*aux_parts, strict=True)]

    def _narrowed(self, start: int, count: int) -> SampleBatch:
        pairs = zip(self.tensors, self.dims, strict=True)
        return replace(self, tensors=[x.narrow(dim, start, count) for x, dim in pairs])
