"""Checkpoints that would recompute something else than the forward pass computed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._checks.checked import compare_values, differs, has_values, what_changed
from gradkit._checks.modified_tensors import nodes_by_loss, without_hint
from gradkit._compat import checkpoints
from gradkit._compat.checkpoints import Frame
from gradkit._compat.nodes import (
    DRAW_AFTER_SAVING,
    hooked_tensors,
    packed_tensors,
    raise_freed,
    saved,
)
from gradkit._compat.transforms import default_hooks, differentiated, is_transform_tensor
from gradkit._core import graph, pytree
from gradkit._core.call import Call
from gradkit._core.graph import nodes_in_order
from gradkit._core.pytree import PyTree
from gradkit._state import rng
from gradkit.errors import UnsupportedGraphError, describe, first_line, message


@dataclass(frozen=True)
class StateBeforeCall:
    """The state before a call."""

    frames: int  # how many checkpoints wait to recompute, plus a constant
    nodes: Iterable[Node]  # where the graphs of the call's inputs begin, which are not the call's
    # The unpack hook around it: that of a checkpoint of the whole call, say, which recomputes the
    # call and not the module.
    outer: object


def before(inputs: PyTree) -> StateBeforeCall | None:
    """Return the state before a call; None if no graph is recorded."""
    # Inside a derivative of torch.func, a checkpoint raises by itself.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or differentiated():
        return None
    # The nodes of now: an operation in place replaces them. An edge costs some microseconds, and
    # `refuse` asks for none where no checkpoint exists.
    nodes = [(x, x.grad_fn) for x in _differentiable(inputs)]
    lazy = (graph.edge(x).node if node is None else node for x, node in nodes)
    hooks = default_hooks() or (None, None)
    return StateBeforeCall(checkpoints.frames_waiting(), lazy, hooks[1])


def refuse(out: PyTree, snapshot: StateBeforeCall | None) -> None:
    """Raise if the graph of a call's result would be recomputed with other parameters."""
    if snapshot is None:
        return
    frames = checkpoints.frames_waiting()
    if frames <= 0:
        return  # there is no checkpoint anywhere, and no graph to walk
    # One that was made meanwhile is seen wherever its output is. If another one went meanwhile,
    # their number tells nothing, and the graph has to be looked at.
    below = graph.nodes_in_order(_differentiable(out), snapshot.nodes)
    hooks = (one.unpack_hook for node in below for one in hooked_tensors(node))
    inside = (checkpoints.frame_of(hook) for hook in hooks if hook is not snapshot.outer)
    if frames > snapshot.frames or any(frame is not None for frame in inside):
        got = "one with torch.utils.checkpoint: its backward pass would recompute with the "
        got += "module's own parameters, not the ones of this call"
        fix = "switch it off in the module, and checkpoint the whole call: torch.utils.checkpoint."
        fix += "checkpoint(call, params, buffers, x, use_reentrant=False); in meta.unroll, "
        fix += 'memory="recompute" does the same'
        expected = "a module without checkpoints inside"
        raise UnsupportedGraphError(message("module", expected, got, fix))


def _differentiable(tree: PyTree) -> list[Tensor]:
    """Return the tensors of a tree that require grad, without those that a transform wraps."""
    leaves, _ = pytree.flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [tensor for tensor in tensors if not is_transform_tensor(tensor)]


def refuse_other_tensors(call: Call, *, thorough: bool = False) -> None:
    """Raise if a pass would get other tensors than its forward pass had, as far as that shows."""
    if (thorough or checkpoints.copies_waiting()) and call.whole.kinds & DRAW_AFTER_SAVING:
        for node in call.whole.nodes:
            _refuse_lost_noise(call, node)
    if checkpoints.frames_waiting() <= 0:
        return
    frames = _frames(nodes_in_order(map(call.outputs.__getitem__, call.differentiated)))
    for frame, node in frames.items():
        _refuse_lost_noise(call, node)
        error = checkpoints.changed_argument(frame)
        if error is not None and (where := _loss_through(call, node)) is not None:
            expected = f"the arguments of a checkpoint, of {_function(frame)}, as they were in its "
            got = f"one changed in place since: {without_hint(error)}"
            fix = "take the gradients before the write; or give the checkpoint a copy, h.clone()"
            raise UnsupportedGraphError(message(where, f"{expected}forward pass", got, fix))
    elsewhere = bool(frames) and len(rng.states()) > 1  # on an accelerator
    for frame in frames:
        if elsewhere or not checkpoints.preserves_rng_state(frame):
            _refuse_other_draws(frame, call.losses.path(call.differentiated[0]))
    if any(map(has_values, frames)):
        compare_values(frames, call.whole.nodes)


def _frames(nodes: Iterable[Node]) -> dict[Frame, Node]:
    """Return the checkpoints that recompute what nodes have saved, and the last node of each."""
    frames: dict[Frame, Node] = {}
    complete: set[Frame] = set()
    waiting = checkpoints.frames_waiting()  # in this process; to ask a node takes microseconds
    for node in nodes:
        packs: list[Any] = []
        with suppress(RuntimeError):  # a pass has freed it: the engine says so
            packs = hooked_tensors(node)
        for packed in packs:
            frame = checkpoints.frame_of(packed.unpack_hook)
            if frame is not None and checkpoints.is_last_saved(frame, packed.data):
                frames[frame] = node
                complete.add(frame)
            elif frame is not None:
                frames.setdefault(frame, node)
        if len(complete) >= waiting:
            break
    inner = list(frames)
    for frame in inner:  # which grows meanwhile
        for around in checkpoints.frames_around(frame):
            if around not in frames:
                frames[around] = frames[frame]
                inner.append(around)
    return frames


def _loss_through(call: Call, node: Node) -> str | None:
    """Return the path of a loss whose pass executes a node, if one does."""
    through = (index for index, nodes in nodes_by_loss(call) if node in nodes)
    return next(map(call.losses.path, through), None)


def _refuse_lost_noise(call: Call, node: Node) -> None:
    by = _loses_noise(node) if type(node) in DRAW_AFTER_SAVING else ""
    if by and (where := _loss_through(call, node)):
        expected = "an RReLU whose noise is saved as it was drawn"
        got = f"one whose noise {by}: torch saves it first, and draws it then"
        fix = "write it out: torch.where(x < 0, x * torch.empty_like(x).uniform_(lower, upper), x)"
        raise UnsupportedGraphError(message(where, expected, got, fix))


def _loses_noise(node: Any) -> str:
    """Return what loses the noise of an RReLU, "" if nothing does."""
    packed = dict(packed_tensors(node))
    hook = packed["noise"].unpack_hook
    if hook in (None, raise_freed) or not saved(node, "training"):
        return ""
    frame = checkpoints.frame_of(hook)
    if frame is None:
        return "was given to hooks of saved tensors, such as save_on_cpu, which may have copied it"
    before = [one.data for name, one in packed.items() if name != "result"]  # it is drawn
    if any(checkpoints.is_last_saved(frame, data) for data in before):
        return "is the last tensor that a checkpoint saves, and its recomputation ends with that"
    return ""


def _refuse_other_draws(frame: Frame, where: str) -> None:
    """Let a checkpoint raise if it draws random numbers anew when it recomputes, the next time."""
    # Not the call: the graph has the frame, and what of Python's it has is not collected.
    reference, original = ref(frame), frame.recompute_fn

    def recompute(*args: Any) -> None:
        frame = reference()
        if frame is not None:
            frame.recompute_fn = original
        before, seed = rng.states(), torch.initial_seed()
        try:
            original(*args)
        finally:  # torch ends it by an exception where it has all that it needs
            # One that sets a seed of its own draws the same as before.
            if rng.differ(before) and torch.initial_seed() == seed:
                expected = "a checkpoint that draws the same random numbers when it recomputes"
                got = f"one of {_function(frame)} with preserve_rng_state=False, which draws others"
                fix = "leave that out: checkpoint(fn, x, use_reentrant=False)"
                if frame is None or checkpoints.preserves_rng_state(frame):
                    got = f"one of {_function(frame)}, which draws on a device that none of its "
                    got += "arguments is on: torch puts back the generators of theirs only"
                    fix = "gradkit.func.checkpoint(fn)(x); or give it an argument on that device"
                raise UnsupportedGraphError(message(where, expected, got, fix))

    frame.recompute_fn = recompute


def refuse_checkpoint_error(error: RuntimeError, where: str, losses: Iterable[Tensor] = ()) -> None:
    """Raise in the place of torch's error if a checkpoint has recomputed other tensors."""
    if not checkpoints.is_checkpoint_error(error):
        return
    frames = list(_frames(nodes_in_order(losses)))
    differing = list(filter(differs, frames))
    suspects = differing or frames
    frame = suspects[0] if len(suspects) == 1 else None
    changes = [change for one in suspects for change in what_changed(one)]
    got = f"one of {_function(frame)} that "
    got += "gives other values now" if differing else f"saves others now ({first_line(error)})"
    if changes:
        got += f"; changed since the forward pass: {', '.join(changes[:5])}"
    expected = "a checkpoint that recomputes what its forward pass had"
    raise UnsupportedGraphError(message(where, expected, got, _RUN_AGAIN)) from error


_RUN_AGAIN = (
    "take the gradients before anything that it reads changes: before an optimizer's step, eval(), "
    "requires_grad_(); or run the forward pass again. A buffer that it writes, and random numbers "
    "that are not of torch's default generators, are arguments: checkpoint(fn, x, noise, "
    "use_reentrant=False)"
)


def _function(frame: Frame | None) -> str:
    """Return the name, and the line, of what a checkpoint runs."""
    function = None if frame is None else checkpoints.function_of(frame)
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_qualname} ({code.co_filename}, line {code.co_firstlineno})"
    name = getattr(function, "__name__", None)
    return "some function" if function is None else name or describe(function)
