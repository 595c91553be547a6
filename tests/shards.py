"""Parts of the tests, for machines on which a command may not last: N shards are all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from zlib import crc32

import pytest


@dataclass(frozen=True)
class Shard:
    """The tests of which the checksum of the name, modulo `count`, is `number - 1`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that "2/4" is, say."""
        parts = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if parts is None or int(parts[1]) > int(parts[2]):
            raise pytest.UsageError(f"--shard is like 2/4, the second of four; got {text!r}")
        return cls(int(parts[1]), int(parts[2]))

    def __contains__(self, item: pytest.Item) -> bool:
        # Not `hash`, of which each process has a seed of its own.
        return crc32(name_of(item).encode()) % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def name_of(item: pytest.Item) -> str:
    """Return the name of a test, or of the group that shares processes with it."""
    for name in ("processes", "xdist_group"):
        for mark in item.iter_markers(name):
            if mark.args:
                return str(mark.args[0])
    return item.nodeid
