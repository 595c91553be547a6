"""What a sweep has found, as the table that gradkit reads."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from gradkit import _torch_bugs
from gradkit._compat.versions import Release, release
from gradkit._torch_bugs.table import NODES, OPERATIONS, ROWS, SWEPT, Stack, stacks_of, wrong_here

PATH = Path(_torch_bugs.__file__).with_name("swept.json")
Rows = dict[str, dict[str, str]]  # by name, and by transforms or orders: releases


@dataclass
class Found:
    """The verdicts on the cases of a sweep.

    Attributes:
        wrong: For each operation, the programs that are wrong with some case.
        raising: Those that raise.
        nodes: For each order, the kinds of nodes of each wrong derivative.
        right: The kinds of nodes in right ones.
    """

    wrong: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    raising: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    nodes: dict[int, list[set[str]]] = field(default_factory=lambda: defaultdict(list))
    right: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, operation: str, verdicts: dict[str, str], kinds: dict[int, set[str]]) -> None:
        """Add the verdicts on a case, and the nodes of its derivatives."""
        eager = [(order, verdicts[f"eager {order}"]) for order in sorted(kinds)]
        for order, verdict in eager:
            if verdict == "wrong":
                self.nodes[order].append(kinds[order])
                break  # the higher ones are, too
            self.right[order] |= kinds[order]
        for program, verdict in verdicts.items():
            if program.startswith("eager"):
                continue
            if verdict == "wrong":
                self.wrong[operation].add(program)
            elif verdict.startswith("raises"):
                self.raising[operation].add(program)

    def operations(self) -> dict[str, list[str]]:
        """Return for each operation the shortest stacks that are wrong.

        Or that raise, where another of as many derivatives is wrong: torch would advise that one.
        What a module gets wrong is one of its operations.
        """
        names = sorted(name for name in self.wrong if not name.startswith("module "))
        return {name: shortest(self._stacks(name)) for name in names}

    def _stacks(self, name: str) -> set[str]:
        orders = {len(stack.split()) for stack in self.wrong[name] if "Vmap" not in stack}
        return self.wrong[name] | {
            stack
            for stack in self.raising[name]
            if "Vmap" not in stack and len(stack.split()) in orders
        }

    def kinds(self) -> dict[str, str]:
        """Return the fewest kinds of nodes that tell wrong derivatives, and of which order."""
        fewest: dict[str, str] = {}
        for order in range(2, max(self.nodes, default=1) + 1):
            cases = [case - self.right[order] for case in self.nodes[order]]
            while cases := [case for case in cases if case and fewest.keys().isdisjoint(case)]:
                counts = Counter(chain.from_iterable(cases))
                fewest[max(sorted(counts), key=counts.__getitem__)] = str(order)
        return fewest


def shortest(stacks: Iterable[str]) -> list[str]:
    """Return the stacks that hold no other one."""
    every = {tuple(stack.split()) for stack in stacks}
    return sorted(" ".join(s) for s in every if not any(o != s and holds(s, o) for o in every))


def known_stacks(name: str) -> tuple[Stack, ...]:
    """Return the transforms under which an operation is wrong: those swept, or all if it drops."""
    dropped = [row.also for row in ROWS if row.drops and name in row.names.split()]
    return (*chain(*dropped), *stacks_of(name))


def mended_in(name: str) -> Release | None:
    """Return the first release in which an operation, or a kind of node, is not wrong any more."""
    last = max(release(one) for row in (OPERATIONS | NODES)[name].values() for one in row.split())
    return min((one for one in map(release, SWEPT) if one > last), default=None)


def is_mended(name: str) -> bool:
    """Return whether it is in the torch that is installed."""
    rows = (OPERATIONS | NODES).get(name)
    return rows is not None and not wrong_here(rows)


def holds(stack: Iterable[str], other: Iterable[str]) -> bool:
    """Return whether a stack holds the transforms of another one, in that order."""
    rest = iter(stack)
    return all(kind in rest for kind in other)


def merge(old: Rows, here: str, found: dict[str, list[str]], *, everything: bool) -> Rows:
    """Return the rows, with what was found in a release of torch: by everything, or added."""
    gone = {here} if everything else set()
    rows: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, row in old.items():
        for stack, versions in row.items():
            rows[name][stack] |= set(versions.split()) - gone
    for name, stacks in found.items():
        for stack in stacks:
            rows[name][stack].add(here)
    return {
        name: {s: in_order(v) for s, v in sorted(rows[name].items()) if v}
        for name in sorted(rows)
        if any(rows[name].values())
    }


def in_order(versions: Iterable[str]) -> str:
    """Return releases, the oldest first."""
    return " ".join(sorted(set(versions), key=release))


def write(found: Found, *, everything: bool) -> None:
    """Write the table, with what was found in the torch that is installed."""
    here = ".".join(map(str, release(torch.__version__)))
    kinds = {name: [order] for name, order in found.kinds().items()}
    rows = {
        "operations": merge(OPERATIONS, here, found.operations(), everything=everything),
        "nodes": merge(NODES, here, kinds, everything=everything),
    }
    releases = {"releases": in_order([*SWEPT, here])}
    PATH.write_text(json.dumps(releases | rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
