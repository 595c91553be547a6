"""Why two ways differ at a leaf: each reason is what a check has shown, else it is unknown."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradkit._core import graph
from gradkit.report._compare.distance import distance, is_close, is_zero, same_bits
from gradkit.report._compare.methods import BACKWARD, FUNC, GRAD, IN_TURN, Runner, RunResult
from gradkit.report._compare.state_snapshot import CACHE, DROPOUT, GRAD_DTYPE, HOOKS, STALE
from gradkit.report._compare.step import Step

_FROZEN = "frozen: torch.func differentiates by whatever it is given"
_NONE = "None against zero: no loss reaches it, which torch.func fills with zeros"
_HIDDEN = "inside a reentrant checkpoint, into which autograd.grad cannot see"
_RANDOM = "loss_fn or a hook differs from run to run: .backward() twice from one state differs, too"
_TIED = (
    "tied: torch.func gives each place of the tensor its own part of the gradient; the parts add up"
)
_OUTSIDE = (
    "loss_fn also uses the tensor itself, from outside, which torch.func takes for a constant"
)
_ROUNDING = (
    "rounding: a joint pass adds the losses inside of the graph, passes in turn add at the end"
)
_FORWARD = "the forward pass gives other numbers there: the losses differ, too"
_CAUSES = {
    STALE: "stale .grad: .backward() adds to what stands there",
    HOOKS: "a tensor hook on the leaf, which torch.func does not run",
    GRAD_DTYPE: "grad_dtype, which torch.func does not know",
    DROPOUT: "dropout RNG: the same random numbers fall on other places there",
    CACHE: "autocast casts a parameter once for all uses, and adds their gradients in the lower "
    "precision; under torch.func it casts for each use",
}
_HOOKS_IN_TURN = "a tensor hook on the leaf, which runs for every loss by itself"
UNKNOWN = "unknown"
_SMALL = "; no larger than rounding can explain"


def reason(lab: Runner, way: str, place: int) -> str:
    """Return why a way differs from `.backward()` at a leaf.

    Args:
        lab: Where the step is run.
        way: Another way than `.backward()`, in which it has run.
        place: Which leaf.

    Returns:
        A reason that a check has shown, or that it is unknown.
    """
    base, other = lab.run(BACKWARD), lab.run(way)
    is_small = is_close(base.grads[place], other.grads[place])
    checks: tuple[Callable[[], str], ...] = (
        lambda: _without_a_cause(lab, way, place),
        lambda: _structural(lab, way, place),
        lambda: _tied(lab, way, place),
        lambda: _random(lab, place),
        lambda: _ROUNDING if way == IN_TURN and is_small else "",
        lambda: _outside(lab, way, place),
    )
    found = next(filter(None, (check() for check in checks)), "")
    # As text, in which nan equals itself.
    last = UNKNOWN if str(base.values) == str(other.values) else _FORWARD
    return found or last + (_SMALL if is_small else "")


def _structural(lab: Runner, way: str, place: int) -> str:
    leaf = lab.step.wanted.leaves[place]
    base = lab.run(BACKWARD, frozenset(_suspects(leaf, way))).grads[place]
    other = lab.run(way).grads[place]
    if way == FUNC and not leaf.requires_grad and base is None:
        return _beside_others(lab, way, place, _FROZEN)
    if way == FUNC and base is None and is_zero(other):
        return _NONE
    if way in (GRAD, FUNC) and is_zero(other) and id(leaf) in lab.scouted.hidden:
        return _HIDDEN
    return ""


def _without_a_cause(lab: Runner, way: str, place: int) -> str:
    """Leave out what may be the cause, one by one and then as few together as will do."""
    suspects = _suspects(lab.step.wanted.leaves[place], way)
    suspects += _suspects_of_func(lab) if way == FUNC else []
    for cause in suspects:
        if told := _explained_by([cause], lab, way, place):
            return told
    told = _explained_by(suspects, lab, way, place)
    for cause in list(suspects) if told else ():
        others = [one for one in suspects if one != cause]
        if without := _explained_by(others, lab, way, place):
            suspects, told = others, without
    return told


def _explained_by(causes: list[str], lab: Runner, way: str, place: int) -> str:
    """Return what is to be said if a difference is gone, or small, without these causes."""
    if not causes:
        return ""
    base, other = (lab.run(w, frozenset(causes)).grads[place] for w in (BACKWARD, way))
    was, was_other = (lab.run(w).grads[place] for w in (BACKWARD, way))
    told = " and ".join(_told(cause, way) for cause in causes)
    if same_bits(base, other):
        return told
    # What was no more than rounding before is not explained by what leaves rounding.
    if base is not None and is_close(base, other) and not is_close(was, was_other):
        return f"{told}; what remains is no larger than rounding can explain"
    if was is not None and base is None and is_zero(other):
        return f"{told}; {_NONE}"
    return ""


def _beside_others(lab: Runner, way: str, place: int, why: str) -> str:
    """Put before a reason what else has a part in what .backward() gives."""
    base = lab.run(BACKWARD).grads[place]
    others = [
        _told(cause, way)
        for cause in _suspects(lab.step.wanted.leaves[place], way)
        if not same_bits(base, lab.run(BACKWARD, frozenset({cause})).grads[place])
    ]
    return "; ".join([*others, why])


def _told(cause: str, way: str) -> str:
    return _HOOKS_IN_TURN if (cause, way) == (HOOKS, IN_TURN) else _CAUSES[cause]


def _suspects(leaf: Tensor, way: str) -> list[str]:
    """Return what a leaf has that may make a way differ; not what both ways heed alike."""
    present = {
        STALE: leaf.grad is not None and way != IN_TURN,
        HOOKS: bool(leaf._backward_hooks) and way != GRAD,
        GRAD_DTYPE: leaf.grad_dtype not in (None, leaf.dtype) and way == FUNC,
    }
    return [cause for cause, is_there in present.items() if is_there]


def _suspects_of_func(lab: Runner) -> list[str]:
    present = {DROPOUT: lab.scouted.draws, CACHE: "ToCopyBackward0" in lab.scouted.kinds}
    return [cause for cause, is_there in present.items() if is_there]


def _tied(lab: Runner, way: str, place: int) -> str:
    leaves = lab.step.wanted.leaves
    places = [index for index, leaf in enumerate(leaves) if leaf is leaves[place]]
    if way != FUNC or len(places) < 2:
        return ""
    without = frozenset(_suspects(leaves[place], way))
    ran = lab.run(way).grads
    parts = [grad.to_dense() for index in places if (grad := ran[index]) is not None]
    whole = lab.run(BACKWARD, without).grads[place]
    if not parts or not is_close(torch.stack(parts).sum(0), whole):
        return ""
    return _beside_others(lab, way, place, _TIED)


def _random(lab: Runner, place: int) -> str:
    again = lab.again.grads[place]
    return "" if same_bits(again, lab.run(BACKWARD).grads[place]) else _RANDOM


def _outside(lab: Runner, way: str, place: int) -> str:
    """Call the function on copies, and look whether the tensor itself is in the graph."""
    if way != FUNC:
        return ""
    with lab.keeping.kept(), torch.enable_grad():
        return _OUTSIDE if id(lab.step.wanted.leaves[place]) in _leaves_beside(lab.step) else ""


def _leaves_beside(step: Step) -> set[int]:
    named = {name: _copy(p) for name, p in step.holder().named_parameters()}
    bare = [None if leaf is None else _copy(leaf) for leaf in step.bare()]
    losses = step.losses_at(named, bare)
    live = [loss for loss in losses.leaves if loss.requires_grad]
    return graph.leaves_of(graph.nodes_below(live))


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def reason_against_another(lab: Runner, other: Runner, place: int) -> str:
    """Return why another model, or the same on another device, differs at a leaf.

    Args:
        lab: Where the step is run.
        other: Where the other one is.
        place: Which leaf.

    Returns:
        What is different between them, as far as a check has shown.
    """
    mine, theirs = lab.step.wanted.leaves, other.step.wanted.leaves
    found = []
    if mine[place].grad is not None or theirs[place].grad is not None:
        base, against = (one.run(BACKWARD, frozenset({STALE})) for one in (lab, other))
        if same_bits(_cpu(base.grads[place]), _cpu(against.grads[place])):
            return _CAUSES[STALE]
        found.append(_CAUSES[STALE])
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
    others = sum(distance(a, b)[0] != 0 for a, b in pairs)
    if others:
        found.append(f"other numbers in {others} of {len(pairs)} params")
    found += _setting(lab, other)
    if found:
        return ", ".join(found)
    is_small = is_close(*(one.run(BACKWARD).grads[place] for one in (lab, other)))
    return _random(lab, place) or UNKNOWN + (_SMALL if is_small else "")


def _setting(lab: Runner, other: Runner) -> list[str]:
    """Return what differs around the params: buffers, modes, devices, random numbers."""
    pairs = list(zip(lab.step.modules, other.step.modules, strict=False))
    buffers = [
        (a, b)
        for mine, theirs in pairs
        for a, b in zip(mine.buffers(), theirs.buffers(), strict=False)
    ]
    modes = [
        a.training != b.training
        for mine, theirs in pairs
        for a, b in zip(mine.modules(), theirs.modules(), strict=False)
    ]
    found = []
    if any(not torch.equal(a.cpu(), b.cpu()) for a, b in buffers):
        found.append("other numbers in buffers")
    if any(modes):
        found.append("one is in train mode, the other in eval mode")
    if _dtypes(lab) != _dtypes(other):
        found.append("another dtype")
    if _devices(lab) != _devices(other):
        found.append("another device, which rounds in other places")
        if lab.scouted.draws:
            found.append("random numbers, of which each device has its own")
    return found


def _devices(lab: Runner) -> set[torch.device]:
    return {leaf.device for leaf in lab.step.wanted.leaves if leaf is not None}


def _dtypes(lab: Runner) -> list[torch.dtype]:
    return [leaf.dtype for leaf in lab.step.wanted.leaves if leaf is not None]


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def differs(a: RunResult, b: RunResult, place: int) -> bool:
    """Return whether two runs gave a leaf other bits; across devices, too."""
    return not same_bits(_cpu(a.grads[place]), _cpu(b.grads[place]))
