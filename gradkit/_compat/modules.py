"""torch's private names for modules. Run on torch 2.11 to 2.15."""

from __future__ import annotations

import torch
from torch import nn


def lists_as_torch(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class list their parameters as `torch.nn.Module` does."""
    # A scripted module keeps its parameters elsewhere.
    return not issubclass(kind, torch.jit.ScriptModule) and (
        kind.named_parameters is nn.Module.named_parameters
        and kind.named_modules is nn.Module.named_modules
        and kind._named_members is nn.Module._named_members
    )
