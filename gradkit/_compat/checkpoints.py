"""torch's non-reentrant checkpoints, and what tells that one waits to recompute.

Run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from types import CodeType
from typing import Any, TypeAlias
from weakref import ref

import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import Node, save_on_cpu
from torch.utils._python_dispatch import _disable_current_modes

from gradkit._compat.nodes import changed_since_saved, hooked_tensors, packed_tensors, saved

# A checkpoint that waits to recompute.
Frame: TypeAlias = Any
_FRAME: type = torch.utils.checkpoint._CheckpointFrame
CHECKPOINT_MODULE: str = _FRAME.__module__
# A determinism check makes, of each tensor that a checkpoint saves, something that torch compares
# with what the check makes of the tensor that is recomputed:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py#L905
determinism_checks: dict[str, Callable[[Tensor], Any]] = (
    torch.utils.checkpoint._allowed_determinism_checks_to_fns
)
# Runs operations that no mode around sees, a selective checkpoint's neither.
modes_disabled: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
# A selective checkpoint raises a RuntimeError with these words.
_OTHER_OPERATIONS = re.compile(
    "selective activation checkpoint has been mutated|encountered during backward but not found"
)


def _codes() -> list[CodeType]:
    constants = save_on_cpu.__init__.__code__.co_consts
    return [constant for constant in constants if isinstance(constant, CodeType)]


def _twin() -> type:
    """Return a class without instances that has as many references as the class of frames."""
    members = {k: v for k, v in vars(_FRAME).items() if k not in {"__dict__", "__weakref__"}}
    return type(_FRAME.__name__, _FRAME.__bases__, members)


# CPython counts each instance as a reference to its class, and each function as one to its code:
# `[*map(sys.getrefcount, RECOMPUTING)] == IDLE` only if no checkpoint waits, and save_on_cpu keeps
# nothing. A walk of the graph is not needed then; to ask takes a quarter of a microsecond.
RECOMPUTING: tuple[object, ...] = (_FRAME, *_codes())
_twins: tuple[object, ...] = (_twin(), *(code.replace() for code in _codes()))
_by_others = [*_twins, _twins[0]]  # who refers to the originals: code, or modules, this one too
IDLE: list[int] = [*map(sys.getrefcount, _twins)]
del _twins, _by_others


def frames_waiting() -> int:
    """Return how many checkpoints of this process wait to recompute."""
    # The modules that import the class would count, too.
    return next(map(sys.getrefcount, RECOMPUTING)) - IDLE[0]


def copies_waiting() -> bool:
    """Return whether save_on_cpu keeps something in this process."""
    return [*map(sys.getrefcount, RECOMPUTING)][1:] != IDLE[1:]


def is_checkpoint_error(error: RuntimeError) -> bool:
    """Return whether torch says that a checkpoint has not recomputed what its forward pass had."""
    is_named = isinstance(error, torch.utils.checkpoint.CheckpointError)
    return is_named or _OTHER_OPERATIONS.search(str(error)) is not None


def frame_of(unpack_hook: object) -> Frame | None:
    """Return the checkpoint whose hook this is, if it is one's."""
    if getattr(unpack_hook, "__module__", None) != CHECKPOINT_MODULE:
        return None
    for cell in getattr(unpack_hook, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _FRAME):
            return cell.cell_contents
    return None


def preserves_rng_state(frame: Frame) -> bool:
    """Return whether a checkpoint restores the default generators when it recomputes."""
    return _variable(frame, "preserve_rng_state") is not False


def function_of(frame: Frame) -> Any:
    """Return the function that a checkpoint recomputes, None if it does not show."""
    return _variable(frame, "fn")


def keyword_arguments_of(frame: Frame) -> dict[str, Any]:
    """Return the keyword arguments of that function."""
    return _variable(frame, "kwargs") or {}


def _variable(frame: Frame, name: str) -> Any:
    """Return a variable of the closure that recomputes; None if it has none of that name."""
    function = frame.recompute_fn
    function = getattr(function, "__wrapped__", function)  # a function of gradkit's runs it
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def _packed_arguments(frame: Frame) -> list[Any]:
    saver = getattr(frame, "input_saver", None)
    if saver is not None:  # before torch 2.13
        return [packed for _, packed in packed_tensors(saver.grad_fn)]
    return [argument for argument in frame.saved_args if hasattr(argument, "unpack_hook")]


def run_inside(frame: Frame, around: Callable[..., None], *, once: bool = False) -> None:
    """Let a checkpoint recompute by `around(recompute, *args)`, the next time alone if `once`."""
    # The graph has the frame, and what of Python's it has is not collected: no cycle.
    reference, original = ref(frame), frame.recompute_fn

    @wraps(original)
    def recompute(*args: Any) -> None:
        frame = reference()
        if once and frame is not None:
            frame.recompute_fn = original
        around(original, *args)

    frame.recompute_fn = recompute


def holders_of(frame: Frame, nodes: Iterable[Node]) -> set[int]:
    """Return the ids of what stands for the tensors that nodes have saved in a checkpoint."""
    packed = (packed for node in nodes for packed in hooked_tensors(node))
    return {id(one.data) for one in packed if frame_of(one.unpack_hook) is frame}


def recomputed_now(frame: Frame) -> int:
    """Return how many tensors the recomputation that runs in this pass has come to."""
    return int(frame.recomp_counter[torch._C._current_graph_task_id()])


def frames_around(frame: Frame) -> list[Frame]:
    """Return the checkpoints that recompute the arguments of a checkpoint inside of them."""
    around = [frame_of(argument.unpack_hook) for argument in _packed_arguments(frame)]
    return [one for one in around if one is not None]


def changed_argument(frame: Frame) -> str | None:
    """Return torch's error if an argument was changed in place since; it computes nothing."""
    saver = getattr(frame, "input_saver", None)
    if saver is not None:  # before torch 2.13
        changed = changed_since_saved(saver.grad_fn)
        return None if changed is None else changed[1]
    try:
        for argument in _packed_arguments(frame):
            if argument.unpack_hook is None:  # a checkpoint around recomputes another one
                argument.unpack()
    except RuntimeError as error:
        return str(error)
    return None


def recomputed_tensors(node: Node) -> list[tuple[Frame, Any, Any]]:
    """Return what checkpoints recompute of a node's tensors in this pass, and where it stands."""
    named = [(frame_of(one.unpack_hook), name, one.data) for name, one in packed_tensors(node)]
    return [(frame, data, saved(node, name)) for frame, name, data in named if frame is not None]


def offer_again(tensors: Iterable[tuple[Frame, Any, Any]]) -> None:
    """Let tensors be read once more: torch gives out each that is recomputed once in a pass."""
    group = torch.utils.checkpoint.GraphExecGroup._get_current_group()
    number = torch._C._current_graph_task_id() if group is None else group
    for frame, holder, tensor in tensors:
        holder.handles[number] = handle = torch.utils.checkpoint._Handle()
        frame.recomputed[number][handle] = tensor


def is_last_saved(frame: Frame, packed: object) -> bool:
    """Return whether a recomputation ends as soon as it comes to a tensor."""
    holders = frame.weak_holders
    return bool(frame.early_stop and holders and holders[-1]() is packed)
