"""Checkpoints that would recompute something else than the forward pass computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from gradkit._checks import checked
from gradkit._checks.checked import compare_values, differs, has_values, recording, what_changed
from gradkit._checks.modified_tensors import nodes_by_loss, without_hint
from gradkit._compat import checkpoints
from gradkit._compat.checkpoints import Frame
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.nodes import (
    DRAW_AFTER_SAVING,
    hooked_tensors,
    packed_tensors,
    raise_freed,
    saved,
)
from gradkit._compat.transforms import differentiated, is_transform_tensor
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Call
from gradkit._core.graph import Subgraph, nodes_in_order
from gradkit._core.user_code import captured_by
from gradkit._state import rng
from gradkit._state.copy_on_write import tensors_in
from gradkit.errors import UnsupportedGraphError, describe, first_line, message

R = TypeVar("R")


def exact(run: Callable[[], R], *modules: nn.Module) -> R:
    """Return what a function of the user's gives; its checkpoints recompute as they ran.

    Where torch.func.functional_call has put tensors into a module, or the caller into these, they
    are there when it recomputes; a pass raises if it comes to other values even so.
    """
    # A checkpoint inside a derivative of torch.func raises by itself.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or differentiated():
        return run()
    frames, outer, block = checkpoints.frames_waiting(), checked.exact.modules, object()
    is_left = False

    try:
        try:
            recording.enter_block(block)
            checked.exact.modules = (*(outer or ()), *modules)
            out = run()
        finally:
            checked.exact.modules = outer
            recording.leave_block(block)
            is_left = True
    finally:  # again, as `undone` does it: an interrupt may have come in between
        if not is_left:
            checked.exact.modules = outer
            recording.leave_block(block)
    if checkpoints.frames_waiting() > max(frames, 0):
        tensors = [x for x in pytree.tensors(out) if x.requires_grad and not is_transform_tensor(x)]
        nodes = Subgraph(tensors).nodes
        compare_values(_frames(nodes), nodes)
    return out


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
        _refuse_other_params(frame, call)
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
    for frame in inner:  # the list grows meanwhile
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
    before = [one.data for name, one in packed.items() if name != "result"]  # the result is drawn
    if any(checkpoints.is_last_saved(frame, data) for data in before):
        return "is the last tensor that a checkpoint saves, and its recomputation ends with that"
    return ""


def _refuse_other_draws(frame: Frame, where: str) -> None:
    """Let a checkpoint raise if it draws random numbers anew when it recomputes, the next time."""
    name = _function(frame)

    preserves = checkpoints.preserves_rng_state(frame)

    def around(recompute: Any, *args: Any) -> None:
        before, seed = rng.states(), torch.initial_seed()
        try:
            recompute(*args)
        finally:  # torch ends it by an exception where it has all that it needs
            # A function that sets a seed of its own draws the same as before.
            if rng.differ(before) and torch.initial_seed() == seed:
                expected = "a checkpoint that draws the same random numbers when it recomputes"
                got = f"one of {name} with preserve_rng_state=False, which draws others"
                fix = "leave that out: checkpoint(fn, x, use_reentrant=False)"
                if preserves:
                    got = f"one of {name}, which draws on a device that none of its "
                    got += "arguments is on: torch puts back the generators of theirs only"
                    fix = "gradkit.func.checkpoint(fn)(x); or give it an argument on that device"
                raise UnsupportedGraphError(message(where, expected, got, fix))

    checkpoints.run_inside(frame, around, once=True)


def _refuse_other_params(frame: Frame, call: Call) -> None:
    """Let a checkpoint raise if it recomputes with other parameters than its forward pass had."""
    # torch.func.functional_call may have put others into the module, and back since.
    captured = captured_by(checkpoints.function_of(frame))
    params = {x for one in captured if isinstance(one, nn.Module) for x in one.parameters()}
    leaves = call.whole.leaves if params else {}
    others: dict[int, Tensor] = {
        id(x): x for x in params if x.requires_grad and id(x) not in leaves
    }
    if not others:
        return
    where, name = call.losses.path(call.differentiated[0]), _function(frame)
    reads = _Reads(frame, others, checkpoints.holders_of(frame, call.whole.nodes))

    def around(recompute: Any, *args: Any) -> None:
        try:
            with reads, INSIDE:
                recompute(*args)
        finally:  # torch ends it by an exception where it has all that it needs
            if reads.is_read:
                expected = "a checkpoint that recomputes with the parameters of its forward pass"
                got = f"one of {name} that reads the module's own, which the losses were not "
                got += "computed from: torch.func.functional_call had put others in their place"
                fix = "gradkit.func.value_and_grads(fn)(params), where fn calls it; or switch it "
                fix += "off in the module, and checkpoint the whole call: checkpoint("
                fix += "functional_call, module, params, (x,), use_reentrant=False)"
                raise UnsupportedGraphError(message(where, expected, got, fix))

    checkpoints.run_inside(frame, around, once=True)


class _Reads(TorchFunctionMode):
    """Finds an operation that reads some parameters, and saves what a node of a graph needs."""

    def __init__(self, frame: Frame, params: dict[int, Tensor], holders: set[int]) -> None:
        super().__init__()
        self._frame, self._read, self._holders = ref(frame), params, holders
        self.is_read = False

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        kwargs, frame = kwargs or {}, self._frame()
        given = tensors_in((*args, *kwargs.values())) if torch.is_grad_enabled() else []
        if frame is None or not any(id(x) in self._read for x in given):
            return func(*args, **kwargs)
        first = checkpoints.recomputed_now(frame)
        try:
            result = func(*args, **kwargs)
        finally:
            saved = frame.weak_holders[first : checkpoints.recomputed_now(frame)]
            self.is_read |= any(id(holder()) in self._holders for holder in saved)
        # A tensor made of such tensors, as by the addition of a bias, counts as one of them.
        self._read |= {id(x): x for x in pytree.tensors(result) if x.requires_grad}
        return result


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
