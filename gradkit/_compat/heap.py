"""The C library's heap: what a step frees is kept for the next one.

This file stands apart because `gradkit` calls it once, at its import.
"""

from __future__ import annotations

_LARGEST = 1 << 25  # bytes of a block by which glibc moves its thresholds


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB of freed memory at the top of a heap, as it learns to by itself.

    Source:
        mallopt(3), M_MMAP_THRESHOLD: a freed block that was mapped sets it, and twice its size is
        what may be free at the top of the heap, https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    # Gradients that live in no `.grad` are freed at the end of a step. Without this, the top of the
    # heap goes back to the system with them, and the next pass faults it in: 500 to 3,500 faults of
    # a microsecond in a step of an MLP of 4 layers that are 512 to 1,024 wide, a third of the step.
    # One tensor of 32 MB that any code frees has the same effect. The block is never written on.
    bytes(_LARGEST - (1 << 14))
