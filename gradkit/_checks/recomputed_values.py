"""Values that checkpoints save in their forward pass, to compare with what they recompute.

Torch compares shapes. Inside `checked()` it compares a fingerprint of each tensor, too, in the
passes of gradkit's calls: a gradient is right if all of the tensors that its pass unpacks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradkit._compat import checkpoints
from gradkit._compat.checkpoints import Frame
from gradkit._compat.distributed import local_tensor
from gradkit._compat.nodes import IN_EVAL_MODE, kind_of_node, packed_tensors
from gradkit._compat.transforms import default_hooks
from gradkit._compat.undoing import INSIDE
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.user_code import captured_by

# What torch writes after it has saved it. In training, a pass does not need running statistics; the
# noise of an RReLU is refused where it is lost.
_STATISTICS, _NOISE = {"running_mean", "running_var"}, "noise"


class SavedValue:
    """What torch compares of a tensor that a checkpoint has saved, or recomputed."""

    def __init__(self, metadata: object, tensor: Tensor, state: ForwardState | None) -> None:
        self._metadata, self.state = metadata, state
        self._fingerprint, self._eps = _fingerprint(tensor)
        self.is_compared = False  # whether a pass that runs unpacks it
        self.differs = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SavedValue) or self._metadata != other._metadata:
            return False
        first, second = self._fingerprint, other._fingerprint
        if self.is_compared and first is not None and second is not None:
            gap = (first - second).abs().max()
            self.differs = bool(gap > _ROUNDING * self._eps * first[1].abs())
        return not self.differs

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{self._metadata}{' of other values' if self.differs else ''}"


# What another order of additions may change in each element, as a parallel sum does.
_ROUNDING = 8.0


def _fingerprint(tensor: Tensor) -> tuple[Tensor | None, float]:
    """Return a projection and the norm of a tensor, and its precision."""
    if type(tensor) not in PLAIN_TYPES and not hasattr(tensor, "to_local"):
        return None, 0.0
    with torch.no_grad(), checkpoints.modes_disabled():  # a selective checkpoint counts operations
        x = local_tensor(tensor.detach())
        # A workspace, in bytes, has parts that nothing has written.
        if x.layout != torch.strided or x.is_meta or x.is_quantized or x.dtype == torch.uint8:
            return None, 0.0
        eps = torch.finfo(x.dtype).eps if x.dtype.is_floating_point or x.is_complex() else 0.0
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        x = (x.cpu() if x.device.type == "mps" else x).flatten().double().nan_to_num()
        weights = torch.arange(len(x), dtype=x.dtype, device=x.device).cos()
        return torch.stack([x @ weights, x.norm()]), eps


class ForwardState:
    """The versions and modes of what a checkpoint's function refers to, in its forward pass."""

    def __init__(self, frame: Frame) -> None:
        function, kwargs = checkpoints.function_of(frame), checkpoints.keyword_arguments_of(frame)
        captured = captured_by([function, kwargs])
        self._modules = [
            (name or "the module", ref(part), part.training)
            for module in captured
            if isinstance(module, nn.Module)
            for name, part in module.named_modules()
        ]
        self._tensors = [(name, ref(x), _state(x)) for name, x in _named(captured)]

    def changes(self) -> list[str]:
        """Return what has changed since."""
        modes = [
            f"{name}, now in {'training' if module.training else 'eval'} mode"
            for name, reference, training in self._modules
            if (module := reference()) is not None and module.training != training
        ]
        return modes + [
            f"{name}, {'written' if before[0] != _state(tensor)[0] else 'requires_grad_()'}"
            for name, reference, before in self._tensors
            if (tensor := reference()) is not None and _state(tensor) != before
        ]


def _named(captured: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    for one in captured:
        if isinstance(one, Tensor):
            yield f"a tensor of shape {tuple(one.shape)}", one
        if isinstance(one, nn.Module):
            yield from ((f"the parameter {name!r}", x) for name, x in one.named_parameters())
            yield from ((f"the buffer {name!r}", x) for name, x in one.named_buffers())


def _state(tensor: Tensor) -> tuple[int, bool]:
    return -1 if tensor.is_inference() else tensor._version, tensor.requires_grad


def _value(check: Callable[[Tensor], Any], tensor: Tensor) -> SavedValue:
    """Return what torch compares of a tensor by itself, and its fingerprint."""
    frame = checkpoints.frame_of((default_hooks() or (None, None))[1])
    begins = frame is not None and not (frame.x_metadatas or frame.forward_completed)
    return SavedValue(check(tensor), tensor, ForwardState(frame) if begins else None)


class _Recording:
    """Lets the checkpoints that run while a block is open, of all threads, save fingerprints."""

    def __init__(self) -> None:
        self._lock, self._blocks = Lock(), set[object]()
        self._before: dict[str, Callable[[Tensor], Any]] = {}

    def enter_block(self, block: object) -> None:
        """Record until the last of some blocks that overlap has ended."""
        with self._lock, INSIDE:
            if not self._blocks:
                self._before = dict(checkpoints.determinism_checks)
            self._blocks.add(block)
            for name, check in self._before.items():
                checkpoints.determinism_checks[name] = partial(_value, check)

    def leave_block(self, block: object) -> None:
        """End a block, which may have ended before."""
        with self._lock, INSIDE:
            self._blocks.discard(block)
            if not self._blocks:
                checkpoints.determinism_checks.update(self._before)


recording = _Recording()


def compare_values(frames: Iterable[Frame], nodes: Iterable[Node]) -> None:
    """Let a pass through nodes compare the values that they have saved, if those were recorded."""
    by_holder = {
        id(holder): value
        for frame in frames
        for reference, value in zip(frame.weak_holders, frame.x_metadatas, strict=False)
        if isinstance(value, SavedValue) and (holder := reference()) is not None
    }
    for value in by_holder.values():
        value.is_compared = value.differs = False
    for node in nodes if by_holder else ():
        written_later = set() if kind_of_node(node).endswith(IN_EVAL_MODE) else _STATISTICS
        for name, packed in packed_tensors(node):
            key = id(packed.data)
            if key in by_holder and name not in {*written_later, _NOISE}:
                by_holder[key].is_compared = True


def has_values(frame: Frame) -> bool:
    """Return whether the values that a checkpoint has saved were recorded."""
    return any(isinstance(value, SavedValue) for value in frame.x_metadatas[:1])


def differs(frame: Frame) -> bool:
    """Return whether a checkpoint has recomputed another value in a pass that compared them."""
    return any(getattr(value, "differs", False) for value in frame.x_metadatas)


def what_changed(frame: Frame) -> list[str]:
    """Return what a checkpoint's function refers to that has changed, if that was recorded."""
    states = (getattr(value, "state", None) for value in frame.x_metadatas)
    return next((state.changes() for state in states if isinstance(state, ForwardState)), [])
