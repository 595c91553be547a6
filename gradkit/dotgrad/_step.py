"""`step_`: one step of an optimizer, from gradients that are a value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter, eq, is_, is_not, methodcaller
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from gradkit._compat.autograd import increment_version
from gradkit._compat.distributed import full_tensor, torch_has_norm
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.modules import is_step_of_class, is_unscaled, scaler_put_back_on_error
from gradkit._compat.undoing import INSIDE
from gradkit._core.call import check_number
from gradkit._core.ownership import PLAIN_TYPES, are_alone_in_memory, leave_inference_mode
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree
from gradkit._state.grad_attribute import grads_put_back, set_grads, write_all
from gradkit.dotgrad._before_step import check_scaler, look_at_states
from gradkit.dotgrad._kernels import KERNELS, step_by_kernels
from gradkit.dotgrad._matching import Pairs, match, path_of, read_grad_leaves, read_leaves, unique
from gradkit.errors import (
    OptionError,
    StructureError,
    UnsupportedOptimizerError,
    describe,
    first_line,
    message,
)
from gradkit.tree._norms import clip_by_global_norm

_values: Callable[[dict[str, Any]], Iterable[Any]] = methodcaller("values")
_is_contiguous: Callable[[Tensor], bool] = Tensor.is_contiguous
_stride: Callable[[Tensor], tuple[int, ...]] = Tensor.stride
_kind = attrgetter("shape", "dtype", "device")
_version, _grad, _is_given = attrgetter("_version"), attrgetter("grad"), partial(is_not, None)


def _are_alike(leaves: Sequence[Tensor], grads: list[Tensor]) -> bool:
    """Return whether each gradient is laid out like its leaf, in memory of its own."""
    try:
        if list(map(_kind, leaves)) != list(map(_kind, grads)):
            return False
        are_contiguous = all(map(_is_contiguous, grads)) and all(map(_is_contiguous, leaves))
        if not are_contiguous and list(map(_stride, grads)) != list(map(_stride, leaves)):
            return False
        return are_alone_in_memory(grads)  # a shared one may be a view of a parameter
    except (RuntimeError, TypeError):  # sparse or nested, say
        return False


def _are_written(grads: Iterable[Any], optimizer: Optimizer, own_params: Iterable[Tensor]) -> bool:
    """Return whether a gradient is a tensor that a step of the optimizer writes on."""
    try:
        states = chain.from_iterable(map(_values, optimizer.state.values()))
        return not set(map(id, chain(own_params, states))).isdisjoint(map(id, grads))
    except (AttributeError, RuntimeError, TypeError):  # no states, or one of no parameter
        return True


_STEPS = "an optimizer whose step() updates the parameters"


def _check_wrapper(optimizer: Any, *, unscales_or_clips: bool) -> None:
    """Raise if the wrapper would drop the gradients, or unscale them once more."""
    name = type(optimizer).__name__
    # An optimizer of Accelerate shows by its attribute: gradkit does not import that library.
    if not getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True):
        got = f"{name}, which skips this step inside accumulate(): the gradients would be dropped"
        fix = "add up the gradients (gradkit.tree.add_), and step if accelerator.sync_gradients"
        raise UnsupportedOptimizerError(message("optimizer", _STEPS, got, fix))
    if type(optimizer).__module__ == "accelerate.utils.deepspeed":
        got = f"{name}, whose step() does nothing: DeepSpeed steps in accelerator.backward(loss)"
        fix = "train with DDP or fully_shard, or use accelerator.backward(loss) with DeepSpeed"
        raise UnsupportedOptimizerError(message("optimizer", _STEPS, got, fix))
    if unscales_or_clips and _own_scaler(optimizer) is not None:
        expected = "an optimizer that does not unscale, with scaler= or max_norm="
        got = f"{name}, whose step() unscales the gradients"
        fix = "leave both out; to clip, pass "
        fix += "gradkit.tree.clip_by_global_norm(grads, max_norm * scaler.get_scale())[0]"
        raise UnsupportedOptimizerError(message("optimizer", expected, got, fix))


def _own_scaler(optimizer: Any) -> GradScaler | None:
    """Return the scaler of a wrapper of Accelerate, or of Lightning's precision plugin."""
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    scalers = (getattr(owner, "scaler", None) for owner in (optimizer, plugin))
    return next((scaler for scaler in scalers if isinstance(scaler, GradScaler)), None)


@disable_compile
def step_(
    optimizer: Optimizer,
    params: PyTree,
    grads: PyTree,
    *,
    scaler: GradScaler | None = None,
    max_norm: float | None = None,
) -> Tensor | None:
    """Take one step of an optimizer with these gradients; every `.grad` is as before afterwards.

    Weights and optimizer state are bit for bit those of the `.grad` loop. Where torch.optim has a
    functional form of the step (SGD, Adam, AdamW, RMSprop, Adagrad, Adamax, Adadelta, Rprop; no
    step hooks, `scaler` or `max_norm`), it is called with the gradients themselves. All others
    get copies. A parameter of the optimizer that is not in `params`, or has no gradient, is
    skipped, as by the loop.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([w], lr=0.1)
        >>> value, grads = gradkit.value_and_grads((w * w).sum(), [w])
        >>> gradkit.step_(optimizer, [w], grads)
        >>> w
        tensor([0.8000, 0.8000], requires_grad=True)

    Args:
        optimizer: Its `step()` is called once, with its hooks and those of its scheduler.
        params: As in `write_grads_`. For the gradients of `value_and_grads(losses, optimizer)`, the
            optimizer itself: `step_(optimizer, optimizer, grads)`.
        grads: As in `write_grads_`. With a `scaler`: the gradients of the scaled loss; or the
            unscaled ones, if `scaler.unscale_(optimizer)` has unscaled a `.grad` in this step.
        scaler: `step_` takes gradients of scaled losses, which nothing tells from others;
            `minimize_` takes plain losses. Unscales the gradients, and skips the step if one is inf
            or NaN, by `scaler.step(optimizer)`. Call `scaler.update()` afterwards, as in the loop.
        max_norm: Clip the gradients, unscaled if there is a scaler, to this global norm, as
            `torch.nn.utils.clip_grad_norm_` does. The gradients that were passed stay as they are.
            A tied parameter counts once; for DTensors see `gradkit.tree.global_norm`.

    Returns:
        With `max_norm` the global norm of the gradients before they were clipped, a 0-dim tensor.

    Raises:
        GradkitError: As in `write_grads_`.
        OptionError: `scaler` is not a GradScaler, has scaled nothing, or has not been updated since
            the last step; or `max_norm` is not a number of at least 0.
        StructureError: The optimizer does not have one of the parameters that have a gradient; or
            all gradients are None and there is a scaler, which needs one; or a state of an
            optimizer of torch does not fit its parameter.
        UnsupportedOptimizerError: `optimizer` is not an optimizer, or its `step` needs a closure,
            as that of LBFGS does; or it is a wrapper of Accelerate or Lightning whose step would be
            skipped, or would unscale the gradients once more; or fused is on for some groups only,
            with a scaler, or for a parameter whose memory has gaps.
    """
    check_arguments(optimizer, params, grads, scaler, max_norm)
    if max_norm is not None:
        check_number("max_norm", max_norm, "max_norm=1.0, or leave it out", nonnegative=True)
    opened = read_leaves(params)
    by_leaf = read_grad_leaves(opened, grads)
    own_params = [p for group in optimizer.param_groups for p in group["params"]]
    is_plain = scaler is None and max_norm is None and not torch.is_inference_mode_enabled()
    if is_plain and _step_without_copies(optimizer, opened, by_leaf, own_params):
        return None
    if scaler is not None:
        check_scaler(scaler, [optimizer], "step_")
    pairs = _pairs_of_optimizer(opened, match(opened, grads, by_leaf), own_params)
    if scaler is not None and all(grad is None for _, grad in pairs):
        fix = "skip the step, and scaler.update()"
        raise StructureError(message("grads", "a gradient to unscale", "None everywhere", fix))
    assign = partial(write_all, pairs)
    return take_steps([optimizer], own_params, [p for p, _ in pairs], assign, scaler, max_norm)


def take_steps(
    optimizers: Sequence[Optimizer],
    own_params: Iterable[Tensor],
    leaves: list[Tensor],
    assign: Callable[[], None],
    scaler: GradScaler | None,
    max_norm: float | Tensor | None,
) -> Tensor | None:
    """Step with the `.grad` that `assign` sets, and put the former back; return the norm."""
    put_back = INSIDE if scaler is None else scaler_put_back_on_error(scaler, optimizers)
    owned = unique(own_params)
    with grads_put_back(owned), put_back, INSIDE:
        steps: list[Callable[[], object]] = [optimizer.step for optimizer in optimizers]
        if scaler is not None:
            steps = [partial(scaler.step, optimizer) for optimizer in optimizers]
        norm = None
        with leave_inference_mode(), INSIDE:
            assign()
            is_fused = look_at_states(optimizers)
            if max_norm is not None:
                for optimizer in optimizers:
                    if scaler is not None and not is_unscaled(scaler, id(optimizer)):
                        scaler.unscale_(optimizer)
                norm = _clip(leaves, max_norm)
        stepped = [*compress(owned, map(_is_given, map(_grad, owned)))]
        # With a scaler, which may skip the step, only a fused step has its parameters marked as
        # written on: nobody can tell whether it was skipped.
        is_marked = (scaler is None or is_fused) and not any(map(Tensor.is_inference, stepped))
        before = [*map(_version, stepped)] if is_marked else []
        for step, optimizer in zip(steps, optimizers, strict=True):
            try:
                step()
            except (RuntimeError, AssertionError) as error:
                if scaler is None:
                    _raise_named(error, optimizer)
                raise
        if is_marked:
            # Neither a fused step nor one that writes on .data tells the graphs from before it.
            increment_version([*compress(stepped, map(eq, before, map(_version, stepped)))])
        return norm


def _raise_named(error: Exception, optimizer: Optimizer) -> None:
    """Raise gradkit's error where torch refuses a step: of sparse gradients by Adam, say."""
    if type(error) not in (RuntimeError, AssertionError):  # out of memory has a class of its own
        return
    *_, (frame, _) = walk_tb(error.__traceback__)
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    if str(frame.f_globals.get("__name__")).startswith("torch."):  # none of a hook, or a wrapper
        name, fix = type(optimizer).__name__, "an optimizer that takes them: torch.optim.SGD, say"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            fix = "leave out differentiable=True; gradkit.meta's optimizers are differentiable"
        elif any(group.get("capturable") for group in optimizer.param_groups):
            fix = "leave out capturable=True, which is for CUDA graphs"
        expected, got = "one that takes these gradients", f"{name}, whose step says: "
        got += first_line(error)
        raise UnsupportedOptimizerError(message("optimizer", expected, got, fix)) from error


def _clip(params: list[Tensor], max_norm: float | Tensor) -> Tensor:
    """Clip the gradients of the params, and return their norm before."""
    present = [param for param in params if param.grad is not None]
    grads: list[Any] = [param.grad for param in present]
    # Torch clips sparse gradients, too, from 2.14 on.
    are_dense = all(grad.layout == torch.strided for grad in grads)
    if are_dense and torch_has_norm(grads):
        return full_tensor(clip_grad_norm_(present, max_norm))  # type: ignore[arg-type]
    clipped, norm = clip_by_global_norm(grads, max_norm)
    set_grads(present, clipped)
    return norm


def _step_without_copies(
    optimizer: Optimizer, params: Params, by_leaf: list[Any], own_params: list[Tensor]
) -> bool:
    """Step by torch's kernels with the caller's gradients; return False if that is not possible."""
    leaves, grads = params.leaves, by_leaf
    kinds = set(map(type, by_leaf))
    if type(None) in kinds:  # frozen parameters, or unused ones
        if not params.no_ties:  # the same tensor may have a gradient in another place
            return False
        kinds.discard(type(None))
        present = [i for i, grad in enumerate(by_leaf) if grad is not None]
        leaves, grads = [leaves[i] for i in present], [by_leaf[i] for i in present]
    if (
        not kinds <= PLAIN_TYPES
        or not _are_trained(leaves, params, own_params)
        or not _are_alike(leaves, grads)
        or _are_written(grads, optimizer, own_params)
    ):
        return False
    if len(leaves) < len(own_params) or not all(map(is_, leaves, own_params)):
        by_leaf_id = dict(zip(map(id, leaves), grads, strict=True))
        grads = [by_leaf_id.get(id(param)) for param in own_params]
    return step_by_kernels(optimizer, grads, may_write=False)


def _are_trained(leaves: list[Any], params: Params, owned: list[Tensor]) -> bool:
    """Return whether each leaf is a variable, no other leaf, and a parameter of the optimizer."""
    every = len(leaves) == len(owned) and len(params.variables) == len(params.leaves)
    if every and all(map(is_, leaves, owned)):
        return True
    trained = set(map(id, leaves))
    return (
        len(trained) == len(leaves)
        and trained.issubset(map(id, params.variables))
        and trained.issubset(map(id, owned))
    )


def check_arguments(
    optimizer: Any, params: PyTree, grads: PyTree, scaler: object, max_norm: object
) -> None:
    """Raise if the optimizer is not one that steps, or the scaler is not a GradScaler."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or isinstance(optimizer, type) or not hasattr(optimizer, "step"):
        fix = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        if isinstance(params, Optimizer) or isinstance(grads, Optimizer):
            name, rest = ("minimize_", "losses") if params is None else ("step_", "params, grads")
            fix = f"pass the optimizer first: gradkit.{name}(optimizer, {rest})"
        elif hasattr(optimizer, "optimizer"):
            fix = "pass the optimizer itself, and call the scheduler's step() as before"
        _refuse(optimizer, fix)
    if scaler is not None and not isinstance(scaler, GradScaler):
        expected, fix = "a torch.amp.GradScaler or None", "scaler=torch.amp.GradScaler()"
        raise OptionError(message("scaler", expected, describe(scaler), fix))
    if type(optimizer) in KERNELS and is_step_of_class(optimizer):
        return
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        _refuse(optimizer, "an optimizer whose param_groups are dicts with 'params', as torch's")
    _check_wrapper(optimizer, unscales_or_clips=not (scaler is None and max_norm is None))
    # A scheduler's method has the self of what it calls.
    signature = inspect.signature(optimizer.step)
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and name != "self"
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        expected, name = "one whose step() takes gradients as they are", type(optimizer).__name__
        got, fix = f"{name}, whose step takes {', '.join(needed)}", "give these arguments defaults"
        if "closure" in needed:
            got = f"{name}, whose step needs a closure that computes them anew"
            fix = "with capture_grads(params): optimizer.step(closure)"
        raise UnsupportedOptimizerError(message("optimizer", expected, got, fix))


def _refuse(optimizer: Any, fix: str) -> NoReturn:
    expected, got = "a torch.optim.Optimizer", describe(optimizer)
    raise UnsupportedOptimizerError(message("optimizer", expected, got, fix))


def _pairs_of_optimizer(params: Params, pairs: Pairs, own_params: Iterable[Tensor]) -> Pairs:
    """Return the pairs of the optimizer's own params; raise if another one has a gradient."""
    own = {id(param) for param in own_params}
    with_grad = [leaf for leaf, grad in pairs if grad is not None]
    others = [leaf for leaf in with_grad if id(leaf) not in own]
    if others:
        got = f"{describe(others[0])} that it does not have: its gradient would be dropped"
        fix = _OF_OTHER_PARAMS if len(others) == len(with_grad) else _OF_SOME_PARAMS
        where = path_of(params, others[0])
        raise StructureError(message(where, "a parameter of the optimizer", got, fix))
    return [pair for pair in pairs if id(pair[0]) in own]


_OF_SOME_PARAMS = (
    "pass the part of params and grads that this optimizer steps; or "
    "_, grads = value_and_grads(losses, optimizer); step_(optimizer, optimizer, grads)"
)
_OF_OTHER_PARAMS = (
    "make an optimizer of these parameters, torch.optim.SGD(model.parameters(), lr=0.1): this one "
    "has none of those with a gradient, as one of another model or of a copy"
)
