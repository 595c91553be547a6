"""What a run is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.harness import Effort


@dataclass(frozen=True, slots=True)
class Plan:
    """What every room is given.

    Attributes:
        device: Where to measure.
        quick: Small sizes, few rounds and no further processes: a test that the rows come out,
            not a measurement.
    """

    device: torch.device
    quick: bool = False

    @property
    def effort(self) -> Effort:
        """How long a comparison goes on."""
        return Effort(least=3, most=3, seconds=0, warmup=1) if self.quick else Effort()
