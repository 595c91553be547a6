"""compare: the same step through torch's ways to gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradkit._checks.call import unreached
from gradkit._compat.transforms import ordinary_mode, transforms
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, UnreachedParamError, UnsupportedGraphError, message
from gradkit.report._compare.comparison import Comparison, Difference
from gradkit.report._compare.distance import distance
from gradkit.report._compare.methods import BACKWARD, FUNC, GRAD, IN_TURN, Runner, RunResult
from gradkit.report._compare.reasons import differs, reason, reason_against_another
from gradkit.report._compare.step import Step, moved, read_step
from gradkit.report._view.names import listed

_DRAWS = (
    "loss_fn draws random numbers (dropout, say). Each way started from the same random state; in "
    "a loop, every call draws new ones."
)
_ACCUMULATES = (
    "loss_fn itself writes .grad (it calls .backward(), say), and .backward() added to that: have "
    "it return the losses, and leave the rest of the step out."
)


def compare(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    *args: Any,
    other: PyTree = None,
    device: torch.device | str | None = None,
) -> Comparison:
    """Return where `.backward()`, `torch.autograd.grad` and `torch.func` give other gradients.

    The same step is run in each way, from the same weights, buffers, `.grad` and random states, and
    each reason for a difference is one that a further run has shown. Afterwards the model, `.grad`
    and the random states are as before.

    Example:
        >>> import torch, gradkit
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, x):
        ...     return model(x).square().mean()
        >>> loss_fn(model, torch.ones(2, 3)).backward()  # and no zero_grad() after it
        >>> found = gradkit.report.compare(loss_fn, model, torch.ones(2, 3))
        >>> found.differences["autograd.grad"]["weight"].reason
        'stale .grad: .backward() adds to what stands there'

    Args:
        loss_fn: Called as `loss_fn(params, *args)`, with params as they are given: a module is the
            module itself, whose parameters torch.func exchanges for the call. A function that takes
            `(*args)`, and cannot take the former, is called so: it holds its modules itself, and
            params are these. The result tells which. It returns a tree of losses of one element
            each, and runs several times.
        params: A tree of leaf tensors, modules, iterators (read once, then a tuple), optimizers
            (likewise), or None.
        args: Further arguments. Tensors that do not require grad are copied for each run.
        other: A second tree of the same structure: `loss_fn(other, *args)` is compared, too, with
            args on its device.
        device: Run a copy of params and args there, and compare this, too.

    Returns:
        For each way and leaf the largest difference from `.backward()` and the reason. Several
        losses are added; `"loss by loss"` is a `.backward()` for each. torch.func gets every
        leaf as an argument, a tensor in two places twice, as it stands in the tree. What torch
        refuses is told in `refused`.

        Hooks run as usual, but for post-accumulate-grad hooks, which run in no way: often they
        step an optimizer. What loss_fn or hooks do beyond the modules, params and random states is
        not undone.

    Raises:
        DetachedLossError: No loss carries a graph.
        LeafTypeError: A leaf is no leaf tensor; a loss is no real floating-point tensor; an
            argument has a graph, or can be read only once.
        NotScalarLossError: A loss has not exactly one element.
        StructureError: A tree is empty, `other` does not match, or loss_fn is no function of these
            arguments.
        UnreachedParamError: Nothing in params requires grad.
        UnsupportedGraphError: A module is wrapped for several processes; or the call is inside of
            a torch.func transform.

    Source:
        https://pytorch.org/docs/stable/autograd.html and
        https://pytorch.org/docs/stable/func.api.html
    """
    _require_no_transform()
    with ordinary_mode():
        step = read_step(loss_fn, params, args)
        second = _second(step, other, device)
        lab = Runner(step)
        if not step.wanted.variables:
            with lab.keeping.kept():
                losses = step.losses()
            raise UnreachedParamError(unreached(losses, [([0], step.wanted)], None))
        ways = [GRAD, FUNC, *([IN_TURN] if lab.scouted.live > 1 else [])]
        ran = {way: lab.run(way) for way in [BACKWARD, *ways]}
        differences = {way: _by_leaf(lab, way) for way in ways if not ran[way].refused}
        for name, against in second.items():
            ran[name] = against.run(BACKWARD)
            differences[name] = _against(lab, against)
        return Comparison(
            called=step.called,
            values={way: one.values for way, one in ran.items() if not one.refused},
            refused={way: one.refused for way, one in ran.items() if one.refused},
            differences=differences,
            notes=_notes(lab),
        )


def _require_no_transform() -> None:
    stack = transforms()
    if stack:
        raise UnsupportedGraphError(
            message(
                "compare",
                "a call outside of torch.func's transforms",
                f"one inside of {listed(stack)}, in which .backward() cannot run",
                "call it by itself",
            )
        )


def _second(step: Step, other: PyTree, device: torch.device | str | None) -> dict[str, Runner]:
    if other is None and device is None:
        return {}
    if step.closes or (other is not None and device is not None):
        raise StructureError(
            message(
                "other" if other is not None else "device",
                "a loss_fn(params, *args), to be run on one other thing",
                "a loss_fn(*args), which holds its modules" if step.closes else "device, too",
                "loss_fn=lambda model, x: ..., and other= or device=",
            )
        )
    if device is not None:
        return {f"on {torch.device(device)}": Runner(moved(step, torch.device(device)))}
    there = read_step(step.fn, other, step.args)
    devices = [leaf.device for leaf in there.wanted.leaves if leaf is not None]
    args = moved(step, devices[0]).args if devices else step.args
    against = read_step(step.fn, there.tree, args)
    if against.names != step.names or _shapes(against) != _shapes(step):
        raise StructureError(
            message(
                "other",
                f"the names and shapes of params, {_shown(step)}",
                _shown(against),
                "pass a model of the same architecture",
            )
        )
    return {"other": Runner(against)}


def _shown(step: Step) -> str:
    pairs = zip(step.names, _shapes(step), strict=True)
    return listed([name if shape is None else f"{name} {tuple(shape)}" for name, shape in pairs])


def _shapes(step: Step) -> list[torch.Size | None]:
    return [None if leaf is None else leaf.shape for leaf in step.wanted.leaves]


def _by_leaf(lab: Runner, way: str) -> dict[str, Difference]:
    return _differences(lab, lab.run(way), lambda place: reason(lab, way, place))


def _against(lab: Runner, other: Runner) -> dict[str, Difference]:
    return _differences(
        lab, other.run(BACKWARD), lambda place: reason_against_another(lab, other, place)
    )


def _differences(lab: Runner, ran: RunResult, why: Callable[[int], str]) -> dict[str, Difference]:
    base = lab.run(BACKWARD)
    found = {}
    for place, name in enumerate(lab.step.names):
        if lab.step.wanted.leaves[place] is None:
            continue
        if differs(base, ran, place):
            gap, ulps = distance(base.grads[place], ran.grads[place])
            found[name] = Difference(False, gap, ulps, why(place))
        else:
            found[name] = Difference(True, 0.0, 0.0)
    return found


def _notes(lab: Runner) -> tuple[str, ...]:
    notes = [_DRAWS] if lab.scouted.draws else []
    notes += [_ACCUMULATES] if lab.scouted.accumulates else []
    hooked = [
        name
        for name, leaf in zip(lab.step.names, lab.step.wanted.leaves, strict=True)
        if leaf is not None and leaf._post_accumulate_grad_hooks
    ]
    if hooked:
        notes.append(
            f"{listed(hooked)}: post-accumulate-grad hooks, which .backward() alone runs, were "
            "left out: often they step an optimizer."
        )
    return tuple(notes)
