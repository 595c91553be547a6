"""The devices that torch can use here.

Apart, as all rooms ask for them.
"""

from __future__ import annotations

import torch


def available_devices() -> list[torch.device]:
    """Return the CPU, and every accelerator that torch can use here."""
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        devices += [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
    return devices


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured here, which records what runs, and no state."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
