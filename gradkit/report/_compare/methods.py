"""The ways to the same gradients: `.backward()`, `torch.autograd.grad`, and `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradkit._core import pytree
from gradkit._core.inputs import Losses, require_graph
from gradkit._core.pytree import PyTree
from gradkit.report._compare.state_snapshot import DROPOUT, Keeping, grads_for
from gradkit.report._compare.step import Step, tensors_in
from gradkit.report._explain.closure import held_by, tensors_of
from gradkit.report._explain.graphs import walk
from gradkit.report._explain.verdicts import checkpointed

BACKWARD, GRAD, FUNC, IN_TURN = ".backward()", "autograd.grad", "torch.func", "loss by loss"

Without: TypeAlias = frozenset[str]
NOTHING: Without = frozenset()


@dataclass(frozen=True)
class RunResult:
    """What one way gave.

    Attributes:
        grads: A gradient or None for each leaf of the params.
        values: The losses.
        refused: Why torch cannot go this way, if so.
    """

    grads: list[Tensor | None]
    values: tuple[float, ...] = ()
    refused: str = ""


@dataclass
class Runner:
    """Runs a step in any of the ways, each from the same state, and remembers the outcome.

    Attributes:
        step: The step.
    """

    step: Step
    _ran: dict[tuple[str, Without], RunResult] = field(default_factory=dict)

    @cached_property
    def keeping(self) -> Keeping:
        """What is put back after each run."""
        held = held_by((self.step.fn, self.step.args, self.step.modules))
        modules = [one for one in held if isinstance(one, nn.Module)]
        arguments = [t for t in tensors_in(self.step.args) if t.requires_grad]  # others are copied
        attributes = [a for module in modules for m in module.modules() for a in vars(m).values()]
        generators = [one for one in (*held, *attributes) if isinstance(one, torch.Generator)]
        tensors = tensors_in((self.step.wanted.leaves, arguments, modules))
        return Keeping(modules, tensors, generators)

    @cached_property
    def scouted(self) -> Scouted:
        """What one run of the forward pass shows."""
        with self.keeping.kept(), torch.enable_grad():
            before = self.keeping.random_states()
            losses = self.step.losses()
            live = require_graph(losses, losses.leaves)
            draws = self.keeping.random_states() != before
            accumulates = self.keeping.has_grads()
            graphs = walk(losses.leaves)
            functions = [f for index in live for f in checkpointed(graphs, index)]
            hidden = tensors_of(held_by(functions)) if functions else {}
            leaves = {key: leaf for below in graphs.leaves for key, leaf in below.items()}
            kinds = {kind.__name__ for index in live for kind in graphs.kinds(index)}
            hidden = {key: tensor for key, tensor in hidden.items() if tensor.is_leaf}
            return Scouted(kinds, leaves, hidden, draws, accumulates, len(live))

    def run(self, way: str, without: Without = NOTHING) -> RunResult:
        """Return what a way gives.

        Args:
            way: One of the four.
            without: What is left out, as in `grads_for` and `Keeping.kept`.

        Returns:
            Its gradients, or why there are none.
        """
        key = (way, without & {DROPOUT} if way == FUNC else without)
        if key not in self._ran:
            with self.keeping.kept(without), torch.enable_grad():
                self._ran[key] = _RUNS[way](self, without)
        return self._ran[key]

    @cached_property
    def again(self) -> RunResult:
        """What `.backward()` gives once more, from the same state."""
        with self.keeping.kept(), torch.enable_grad():
            return _by_backward(self, NOTHING)

    def accumulating(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the params, and the other leaves whose `.grad` a pass would write."""
        others = (self.scouted.leaves | self.scouted.hidden).values()
        return [leaf for leaf in self.step.wanted.leaves if leaf is not None], list(others)


@dataclass(frozen=True)
class Scouted:
    """What one run of the forward pass shows.

    Attributes:
        kinds: The names of the types of its nodes.
        leaves: The leaf tensors of the graph, by id.
        hidden: Those that reentrant checkpoints hold, by id.
        draws: It draws random numbers.
        accumulates: It writes `.grad`.
        live: How many losses carry a graph.
    """

    kinds: set[str]
    leaves: dict[int, Tensor]
    hidden: dict[int, Tensor]
    draws: bool
    accumulates: bool
    live: int


def _by_backward(lab: Runner, without: Without) -> RunResult:
    return _accumulated(
        lab, without, lambda losses: torch.autograd.backward(losses, retain_graph=True)
    )


def _in_turn(lab: Runner, without: Without) -> RunResult:
    def accumulate(losses: list[Tensor]) -> None:
        for loss in losses:
            torch.autograd.backward(loss, retain_graph=True)

    return _accumulated(lab, without, accumulate)


def _accumulated(
    lab: Runner, without: Without, accumulate: Callable[[list[Tensor]], None]
) -> RunResult:
    params, others = lab.accumulating()
    with grads_for(params, others, lab.keeping.grads, without):
        losses = lab.step.losses()
        accumulate(_live(losses))
        # The graph is kept, since what loss_fn holds may be part of another one of the caller's.
        return RunResult(
            [None if p is None else p.grad for p in lab.step.wanted.leaves], _values(losses)
        )


def _by_grad(lab: Runner, without: Without) -> RunResult:
    wanted = lab.step.wanted
    params, others = lab.accumulating()
    with grads_for(params, others, lab.keeping.grads, without):
        losses = lab.step.losses()
        try:
            grads = torch.autograd.grad(
                _live(losses), wanted.variables, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            return RunResult([], refused=_told(error))
    placed = [None if slot is None else grads[slot] for slot in wanted.slots]
    return RunResult(placed, _values(losses))


def _by_func(lab: Runner, _: Without) -> RunResult:
    step = lab.step
    if step.closes and step.bare():
        return RunResult(
            [],
            refused="it needs tensors that stand in no module as arguments: loss_fn(params, *args)",
        )
    named = {name: p for name, p in step.holder().named_parameters() if _is_number(p)}
    bare = step.bare()
    free = {str(place): leaf for place, leaf in enumerate(bare) if _is_number(leaf)}

    def total(named: dict[str, Tensor], free: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        placed = [free.get(str(place), leaf) for place, leaf in enumerate(bare)]
        losses = step.losses_at(named, placed)
        return _sum(losses.leaves), losses.leaves

    try:
        run = torch.func.grad_and_value(total, argnums=(0, 1), has_aux=True)
        (by_name, by_place), (_, values) = run(_detached(named), _detached(free))
    except Exception as error:  # the losses could be computed without torch.func: it is the reason
        return RunResult([], refused=_told(error))
    by_id = {id(p): by_name[name] for name, p in named.items()}
    return RunResult(
        _placed(step, by_id, by_place), tuple(float(value.detach()) for value in values)
    )


def _placed(
    step: Step, by_id: dict[int, Tensor], by_place: dict[str, Tensor]
) -> list[Tensor | None]:
    """Return the gradients in the order of the leaves: of modules by tensor, of others by place."""
    top, _ = pytree.flatten(step.tree)
    found: list[Tensor | None] = []
    place = 0
    for leaf in top:
        if isinstance(leaf, nn.Module):
            found += [by_id.get(id(p)) for _, p in leaf.named_parameters()]
        else:
            found.append(by_place.get(str(place)))
            place += 1
    return found


def _sum(losses: Sequence[Tensor]) -> Tensor:
    total = losses[0].reshape(())
    for loss in losses[1:]:
        total = total + loss.reshape(())
    return total


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _is_number(leaf: PyTree) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _live(losses: Losses) -> list[Tensor]:
    return [losses.leaves[index] for index in require_graph(losses, losses.leaves)]


def _values(losses: Losses) -> tuple[float, ...]:
    return tuple(float(loss.detach()) for loss in losses.leaves)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


_RUNS: dict[str, Callable[[Runner, Without], RunResult]] = {
    BACKWARD: _by_backward,
    GRAD: _by_grad,
    FUNC: _by_func,
    IN_TURN: _in_turn,
}
