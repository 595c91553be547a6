"""Compares the gradients of one step between layouts: one process, DDP, FSDP2, micro-batches.

`gradkit.distributed.parity` is `parity` of `comparison.py`. Nothing is imported here, as pytest
imports this folder, for its plugin, in every project of an environment that has it.
"""

__version__ = "0.2.0"
