"""`checked`: watches the forward pass, writes on gradients, and optimizers that step without.

Torch compares the shapes of what a checkpoint recomputes. Inside `checked()` it compares a
fingerprint of each tensor, too, in the passes of gradkit's calls: a gradient is right if all of the
tensors that its pass unpacks are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from threading import Lock, local
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradkit._compat import checkpoints, transforms
from gradkit._compat.autograd import increment_version
from gradkit._compat.checkpoints import Frame
from gradkit._compat.distributed import local_tensor
from gradkit._compat.nodes import IN_EVAL_MODE, kind_of_node, packed_tensors
from gradkit._compat.transforms import engine_calls
from gradkit._compat.undoing import INSIDE, block, undo_stack, undone
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.user_code import captured_by, register_own_hooks
from gradkit._state.module_state import alone
from gradkit._torch_bugs.monitor import ForwardMonitor, OpMonitor, active_monitors
from gradkit.errors import warn_fallback


class CheckedForward(ForwardMonitor):
    """The monitor of a thread's `checked()` blocks, which may overlap."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[object] = set()
        self._blocks = 0

    def enter_block(self, block: object) -> None:
        """Watch until the last block has ended."""
        # The monitor goes to the bottom: a mode of the user's that begins before the block and ends
        # inside takes off the top of the stack, whatever stands there.
        self._open.add(block)
        if self not in transforms.function_modes():
            transforms.slip_under_modes(self)
        self._blocks = len(self._open)

    def leave_block(self, block: object) -> None:
        """End a block, once or more; in another thread, the mode stays and does nothing."""
        self._open.discard(block)
        self._blocks = len(self._open)
        if not self._blocks:
            transforms.remove_function_mode(self)


def _checked_forward() -> CheckedForward:
    """Return the monitor of this thread, or a new one."""
    mine = (mode for mode in transforms.function_modes() if isinstance(mode, CheckedForward))
    return next(mine, None) or CheckedForward()


open_monitors: list[StepMonitor] = []  # the monitors of all threads


class StepMonitor:
    """Warns once of an optimizer that steps without a gradient, though gradkit returned some."""

    def __init__(self) -> None:
        self._returned: dict[int, ref[Tensor]] = {}
        self._began_idle: set[int] = set()  # the optimizers in whose step a closure may run
        self._warned = False
        self._handles: list[RemovableHandle] = []
        self.blocks: set[object] = set()  # the blocks that have not ended

    def enter_block(self, block: object) -> None:
        """Look at every step that an optimizer of this process takes, until the last block ends."""
        self.blocks.add(block)
        if self not in open_monitors:
            open_monitors.append(self)
        if not self._handles:
            self._handles += register_own_hooks(
                partial(register_optimizer_step_pre_hook, self._before),
                partial(register_optimizer_step_post_hook, self._after),
            )

    def leave_block(self, block: object) -> None:
        """Stop, if this is the last block; to leave one again does no harm."""
        self.blocks.discard(block)
        if not self.blocks and self in open_monitors:
            open_monitors.remove(self)
        while not self.blocks and self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def note(self, variables: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        """Note the tensors whose gradients a call returns."""
        pairs = zip(variables, grads, strict=True)
        self._returned |= {id(v): ref(v) for v, grad in pairs if grad is not None}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if all(param.grad is None for param in _params(optimizer)):
            self._began_idle.add(id(optimizer))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A closure may have written the gradients, and a hook may have cleared them.
        began_idle = id(optimizer) in self._began_idle
        self._began_idle.discard(id(optimizer))
        params = list(_params(optimizer))
        # A fused step tells no graph that it has written on the parameters.
        increment_version([p for p in params if p.grad is not None and not p.is_inference()])
        if self._warned or not began_idle or any(param.grad is not None for param in params):
            return
        noted = (self._returned.get(id(param)) for param in params)
        if any(
            one is not None and one() is param for one, param in zip(noted, params, strict=True)
        ):
            self._warned = True
            warn_fallback(
                f"{type(optimizer).__name__} has stepped with every .grad None, and changed "
                "nothing, though gradkit has returned gradients of losses of its parameters: call "
                "gradkit.step_(optimizer, params, grads) instead of optimizer.step(), with "
                "max_norm= instead of clip_grad_norm_"
            )


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


# torch writes these after it has saved them. In training, a pass does not need running statistics;
# the noise of an RReLU is refused where it is lost.
STATISTICS, _NOISE = {"running_mean", "running_var"}, "noise"


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

    def __repr__(self) -> str:
        return f"{self._metadata}{' of other values' if self.differs else ''}"


# A parallel sum, which adds in another order, may change each element by so many eps.
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
        if exact.modules is not None:
            checkpoints.run_inside(frame, _AsItRan([*captured, *exact.modules]))

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


class _Exact(local):
    """The modules into which calls of this thread have put tensors; None outside of all blocks."""

    modules: tuple[nn.Module, ...] | None = None


exact = _Exact()


class _AsItRan:
    """Lets a checkpoint recompute with the tensors that its modules had in the forward pass."""

    # torch.func.functional_call, and make_functional, have put them there, and back since.

    def __init__(self, captured: Iterable[object]) -> None:
        modules = {part for x in captured if isinstance(x, nn.Module) for part in x.modules()}
        self._params = [(one._parameters, dict(one._parameters)) for one in modules]
        # Copies: what the forward pass writes on has other values by then.
        self._buffers = [
            (one._buffers, {k: _copy_of(x) for k, x in one._buffers.items()}) for one in modules
        ]
        self._calls, self._is_monitored = engine_calls.depth, active_monitors() > 0

    def __call__(self, recompute: Callable[..., None], *args: Any) -> None:
        """Recompute."""
        buffers = [(x, {k: _copy_of(b) for k, b in then.items()}) for x, then in self._buffers]
        with alone(), undo_stack() as stack:
            tables: list[Any] = [*self._params, *buffers]
            for table, then in tables:
                stack.enter_context(undone(partial(table.update, {k: table[k] for k in then})))
                table.update(then)
            stack.enter_context(undone(partial(setattr, engine_calls, "depth", engine_calls.depth)))
            engine_calls.depth = self._calls - self._is_monitored
            monitor = OpMonitor()
            engine_calls.depth = self._calls
            with monitor.noting() if self._is_monitored else INSIDE, INSIDE:
                recompute(*args)


def _copy_of(buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is None or buffer.requires_grad else buffer.detach().clone()


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
    frame = checkpoints.frame_of((transforms.default_hooks() or (None, None))[1])
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
                for name, check in self._before.items():
                    checkpoints.determinism_checks[name] = partial(_value, check)
            self._blocks.add(block)

    def leave_block(self, block: object) -> None:
        """End a block, which may have ended before."""
        with self._lock, INSIDE:
            self._blocks.discard(block)
            if not self._blocks:
                checkpoints.determinism_checks.update(self._before)


recording = _Recording()


_of_process = StepMonitor() if os.environ.get("GRADKIT_CHECKED", "0") not in ("", "0") else None
_monitor = ContextVar("monitor", default=_of_process)
for _watching in (_of_process, _checked_forward(), recording) if _of_process is not None else ():
    _watching.enter_block("GRADKIT_CHECKED")


@block
def checked() -> Iterator[None]:
    """Watch the forward pass, writes on gradients, and steps without gradients; slow.

    A hook, or the backward of a custom Function, that writes on the gradient it is given may spoil
    that of another tensor, which torch hands the same memory. Inside this context no two parts of a
    pass are handed the same memory: each result is, bit for bit, what it is where hooks and
    Functions write on copies. A `GradkitWarning` of the eager calls names each place that wrote,
    its file and line. `backward_` stays what `.backward()` is.

    Another one, once, is for a loop of which only half was moved: `optimizer.step()` runs with
    every `.grad` None, after gradkit has returned gradients of its parameters. All optimizers of
    the process are watched while the context is open.

    Operations that this thread calls, the forward pass included, whose first derivative torch gets
    wrong, or whose graph it drops (`torch.special.bessel_j0`), are differentiated by a formula, or
    raise.

    A checkpoint (`use_reentrant=False`) whose forward pass ran inside has to recompute the values
    that it had. Else, as after a step of an optimizer, or with random numbers of numpy, eager calls
    raise `UnsupportedGraphError`, and name what has changed of what its function refers to.

    The environment variable `GRADKIT_CHECKED=1` does the same for a whole process, and for the
    operations of the thread that imports gradkit.

    Example:
        >>> import torch, gradkit, warnings
        >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> z = a * 1
        >>> def tenfold(grad):
        ...     grad.mul_(10)
        >>> handle = z.register_hook(tenfold)
        >>> with gradkit.checked(), warnings.catch_warnings(record=True, action="always") as caught:
        ...     value, grads = gradkit.value_and_grads(((z + b) * torch.ones(2)).sum(), [a, b])
        >>> grads
        [tensor([10., 10.]), tensor([1., 1.])]
        >>> "tenfold" in str(caught[0].message)
        True

    Yields:
        Nothing.

    Raises:
        UnsupportedGraphError: An operation, called in the block, has no right derivative.

    Source:
        torch forbids such writes ("the hook should not modify its argument"),
        https://pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html
    """
    # A block that a generator holds may end before one that began inside it, and in another thread:
    # one monitor serves all that overlap, and is closed with the last, wherever that ends.
    monitor = step_monitor()
    if monitor is None:
        monitor = StepMonitor()
        _monitor.set(monitor)
    block, watching = object(), (monitor, _checked_forward(), recording)
    with undo_stack() as stack:
        for one in watching:
            stack.enter_context(undone(partial(one.leave_block, block)))
        for one in watching:
            one.enter_block(block)
        yield


def is_checked() -> bool:
    """Return whether calls here hand each part of a pass memory of its own."""
    monitor = _monitor.get()
    return monitor is not None and bool(monitor.blocks)


def step_monitor() -> StepMonitor | None:
    """Return what notes which gradients were returned, inside `checked()`."""
    return _monitor.get() if is_checked() else None


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
        written_later = set() if kind_of_node(node).endswith(IN_EVAL_MODE) else STATISTICS
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
