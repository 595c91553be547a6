"""The mode that sees every operator as it runs."""

from __future__ import annotations

# Run on torch 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
