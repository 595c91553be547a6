"""Errors that ranks raise between the collectives of a call: those that wait can name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from gradkit._compat.distributed import store
from gradkit.errors import CollectiveError

_NUMBERS = count()  # ranks make the same functions in the same order


class RemoteErrors:
    """The errors of a function that all ranks call, in the store that all ranks read."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._number, self._call = next(_NUMBERS), 0

    @contextmanager
    def report_own(self) -> Iterator[None]:
        """Write down what the block, the next call on all ranks, raises on this one."""
        self._call += 1
        try:
            yield
        except CollectiveError:  # of a rank that has waited for another
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            with suppress(RuntimeError):
                store().set(self._key(self._rank), text)
            raise

    def of_others(self) -> str:
        """Return what other ranks have written down in the last call; empty if nothing."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        lines = [(rank, self._read(rank)) for rank in others]
        return "; ".join(f"an error on rank {n} in the call, {text}" for n, text in lines if text)

    def _read(self, rank: int) -> str:
        shared, key = store(), self._key(rank)
        with suppress(RuntimeError):  # of a store that has gone with its rank
            return str(shared.get(key).decode()) if shared.check([key]) else ""
        return ""

    def _key(self, rank: int) -> str:
        return f"gradkit/{self._number}/{self._call}/{rank}"
