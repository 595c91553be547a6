"""An optimizer as a pair of pure functions, with a state and hyper-parameters that are trees."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from gradkit import errors
from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.call import check_bool, is_number
from gradkit._core.params import Tensors, expand_params
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import describe, message

# A hyper-parameter for a list of tensors: one number for all, or a number or tensor for each.
Factor: TypeAlias = float | list[float | Tensor]
Settings: TypeAlias = Mapping[str, Any]  # hyper-parameters by name
Leaves: TypeAlias = Sequence[Any]  # of a tree of params: tensors and None


def per_tensor(factor: Factor, count: int) -> Sequence[float | Tensor]:
    """Return a factor for each of `count` tensors."""
    return factor if isinstance(factor, list) else [factor] * count


def scale(xs: Tensors, factor: Factor) -> Tensors:
    """Return x * factor."""
    return _with_factor(torch._foreach_mul, operator.mul, xs, factor)


def add_scalar(xs: Tensors, scalar: Factor) -> Tensors:
    """Return x + scalar."""
    return _with_factor(torch._foreach_add, operator.add, xs, scalar)


def _with_factor(kernel: Any, op: Callable[..., Tensor], xs: Tensors, factor: Factor) -> Tensors:
    if isinstance(factor, list) or transforms():
        return list(map(op, xs, per_tensor(factor, len(xs))))
    return list(kernel(xs, factor))


def squared(xs: Tensors) -> Tensors:
    """Return x * x."""
    return [x * x for x in xs] if transforms() else list(torch._foreach_mul(xs, xs))


def add(xs: Tensors, ys: Tensors, alpha: Factor = 1.0) -> Tensors:
    """Return x + alpha * y."""
    # The foreach kernel with a graph would keep every y for its backward pass.
    if isinstance(alpha, list) or transforms() or any(x.requires_grad for x in (*xs, *ys)):
        return [
            x + f * y if isinstance(f, Tensor) else torch.add(x, y, alpha=f)
            for x, y, f in zip(xs, ys, per_tensor(alpha, len(xs)), strict=True)
        ]
    return list(torch._foreach_add(xs, ys, alpha=alpha))


def moving_average(xs: Tensors, ys: Tensors, decay: Factor) -> Tensors:
    """Return decay * x + (1 - decay) * y."""
    return add(scale(xs, decay), ys, combine(operator.sub, 1, decay))


def sqrt(xs: Tensors) -> Tensors:
    """Return the square root, whose derivative at 0 is taken as 0."""
    if transforms() or any(x.requires_grad for x in xs):
        return [safe_sqrt(x) for x in xs]
    return list(torch._foreach_sqrt(xs))


def safe_sqrt(x: Tensor) -> Tensor:
    """Return the square root of a tensor, whose derivative at 0 is taken as 0."""
    is_zero = x == 0
    # The ones keep an infinite derivative out of the graph: 0 * inf is nan.
    return torch.where(is_zero, torch.zeros_like(x), torch.where(is_zero, 1.0, x).sqrt())


def combine(op: Callable[..., Any], a: Factor, b: Factor) -> Factor:
    """Return `op(a, b)` of two factors."""
    lists = [factor for factor in (a, b) if isinstance(factor, list)]
    if not lists:
        return cast("Factor", op(a, b))
    return list(map(op, *(per_tensor(factor, len(lists[0])) for factor in (a, b))))


def is_zero(factor: Factor) -> bool:
    """Return whether a factor is the number 0; never for a tensor, which may have a gradient."""
    return not isinstance(factor, list) and factor == 0


def to_descend(params: Tensors, grads: Tensors, hyper: Settings, *, decay: bool = True) -> Tensors:
    """Return the gradients, negated with `maximize`, and with `decay` that of the weights added."""
    grads = scale(grads, -1.0) if hyper["maximize"] else grads
    is_added = decay and not is_zero(hyper["weight_decay"])
    return add(grads, params, hyper["weight_decay"]) if is_added else grads


def descend(params: Tensors, direction: Tensors, lr: Factor) -> Tensors:
    """Return params - lr * direction."""
    return add(params, direction, combine(operator.mul, lr, -1.0))


# A number, a tensor of one element, or a tree like params with one of these for each leaf.
Hyper: TypeAlias = Any
State: TypeAlias = dict[str, PyTree]
# The state of a list of tensors: by name of the entry, a value for each tensor.
StateLists: TypeAlias = dict[str, list[Any]]
Updated: TypeAlias = tuple[Tensors, StateLists]  # the new tensors and their new state
UpdateRule: TypeAlias = Callable[[Tensors, Tensors, StateLists, Settings], Updated]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as a pair of pure functions, `init` and `step`.

    Attributes:
        name: The name of the function or class that made it, for errors.
        hyper: Its hyper-parameters by name.
        entries: What the state holds for each leaf, and how an entry starts, from the leaf.
        rule: The update of a list of tensors that all have a gradient.
        scalar_hyperparams: Whether the rule gets a hyper-parameter as it is unless it is a dict or
            a list; otherwise, all that is no number is a tree with one value for each leaf, of
            which the rule gets a list.
        checks_ranges: Whether a number that torch.optim refuses raises `OptionError`: a negative
            one (but for `dampening`), or a beta of 1 or more. Tensors are not read.
        ndim: How many dimensions a leaf must have to take a step; None: any number.
    """

    name: str
    hyper: Mapping[str, Hyper]
    entries: Mapping[str, Callable[[Tensor], Any]]
    rule: UpdateRule
    scalar_hyperparams: bool = False
    checks_ranges: bool = False
    ndim: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers among the hyper-parameters."""
        if self.checks_ranges:
            _check_ranges(self.hyper)

    def init(self, params: PyTree) -> State:
        """Return the state before the first step.

        Args:
            params: A tree of tensors; a module stands for its named parameters.

        Returns:
            For each entry (`"step"`, `"exp_avg"`, ...) a tree like `params`.

        Raises:
            LeafTypeError: A leaf is not a tensor.
        """
        leaves, spec = expand_params(params, "params")
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor | None):
                where, fix = pytree.path(spec, index, "params"), "pass a tree of tensors"
                raise errors.LeafTypeError(message(where, "a tensor or None", describe(leaf), fix))
        return _to_trees(spec, initial_state(self, leaves))

    def step(
        self, params: PyTree, grads: PyTree, state: State, **hyper: Hyper
    ) -> tuple[PyTree, State]:
        """Return the parameters and the state after one step.

        Args:
            params: A tree of tensors; a module stands for its named parameters.
            grads: A tree like it of tensors of the same shapes; or None, which skips the leaf.
            state: What `init` or the last step returned.
            hyper: Hyper-parameters for this step, in place of those that the optimizer has.
                `amsgrad` and `centered` cannot be switched on: `init` has made no entry for them.

        Returns:
            New trees, which share no memory that could be written to with the old ones, and through
            which gradients flow to all arguments. A leaf without a gradient is the same tensor.

        Raises:
            LeafTypeError: A leaf of params or grads is not a floating-point tensor, or is complex
                where params are real; or a hyper-parameter is not a number or a tensor.
            OptionError: A hyper-parameter is unknown, out of range, or does not fit the state.
            StructureError: The trees, or the shapes in them, do not match.
        """
        check_names(self.name, hyper, self.hyper, "opt.step(params, grads, state, lr=lr)")
        if self.checks_ranges:
            _check_ranges(hyper)
        leaves, spec = expand_params(params, "params")
        by_leaf = pytree.flatten_up_to(spec, "params", grads, "grads")
        check_grads(leaves, by_leaf, spec, "grads")
        state_lists = read_state(self, state, leaves, spec)
        moving = [index for index, grad in enumerate(by_leaf) if grad is not None]
        if not moving:
            return pytree.unflatten(spec, leaves), state
        settings = read_settings(self, {**self.hyper, **hyper}, leaves, spec, moving)
        new, after = update(self, leaves, by_leaf, state_lists, settings)
        return pytree.unflatten(spec, new), _to_trees(spec, after)


def _to_trees(spec: Structure, state_lists: StateLists) -> State:
    return {name: pytree.unflatten(spec, column) for name, column in state_lists.items()}


def initial_state(opt: Optimizer, leaves: Leaves) -> StateLists:
    """Return the state before the first step of a list of tensors and None."""
    return {
        name: [None if leaf is None else start(leaf) for leaf in leaves]
        for name, start in opt.entries.items()
    }


def _go_on(spec: Structure) -> str:
    """Return the state that a `saved` state_dict of torch.optim is for params of this structure."""
    # Entries that torch's optimizer lacks, SGD's count of steps, are as at the start.
    rows = "zip(tree, saved['state'].values())"
    of_leaves = f"{spec.type and spec.type.__name__}(s.get(name, start) for start, s in {rows})"
    if spec.type is None:
        of_leaves = "saved['state'][0].get(name, tree)"
    elif spec.type is dict:
        of_leaves = f"{{key: s.get(name, tree[key]) for key, s in {rows}}}"
    return f"{{name: {of_leaves} for name, tree in opt.init(params).items()}}"


def read_state(opt: Optimizer, state: object, leaves: Leaves, spec: Structure) -> StateLists:
    """Open and check a state."""
    if not isinstance(state, Mapping) or set(state) != set(opt.entries):
        expected = f"a state of {opt.name}, with {', '.join(opt.entries) or 'no entries'}"
        got = str(list(state)) if isinstance(state, Mapping) else describe(state)
        fix = "state = opt.init(params)"
        is_live = isinstance(state, Mapping) and all(isinstance(key, Tensor) for key in state)
        if isinstance(state, Mapping) and (is_live or {"state", "param_groups"} <= set(state)):
            got = "one of torch.optim"
            fix = f"to go on from it, {_go_on(spec)}; to start anew, opt.init(params)"
            fix = f"saved = optimizer.state_dict(); {fix}" if is_live else fix
        raise errors.StructureError(message("state", expected, got, fix))
    columns = {
        name: pytree.flatten_up_to(spec, "params", state[name], f"state[{name!r}]")
        for name in opt.entries
    }
    if opt.checks_ranges:  # a written one: those of others have entries of any kind
        _check_entries(opt, columns, leaves, spec)
    misfit = getattr(opt.rule, "misfit", None)
    for index, leaf in enumerate(leaves) if misfit else ():
        unfit = misfit(leaf, columns["torch"][index]) if misfit and leaf is not None else None
        if unfit:
            key, expected, got = unfit
            where = pytree.path(spec, index, "state['torch']") + key
            fix = "state = opt.init(params), of these params and this optimizer"
            raise errors.StructureError(message(where, expected, got, fix))
    return columns


def _check_entries(opt: Optimizer, columns: StateLists, leaves: Leaves, spec: Structure) -> None:
    """Raise for an entry that is no count, and no tensor of its leaf's shape."""
    for name, column in columns.items():
        start = opt.entries[name]
        is_count, is_optional = name == "step", start not in (torch.zeros_like, torch.clone)
        for index, (leaf, entry) in enumerate(zip(leaves, column, strict=True)):
            if leaf is None:
                continue
            if isinstance(entry, Tensor):
                alike = entry.shape == leaf.shape and entry.device == leaf.device
                fits = entry.numel() == 1 if is_count else alike
                if not fits and is_optional:  # a tensor of another shape, such as the sums of rows
                    fits = isinstance(of_start := start(leaf), Tensor)
                    fits = fits and entry.shape == of_start.shape
            else:
                fits = entry is None and is_optional
                fits = is_number(entry) and entry >= 0 if is_count else fits
            if not fits:
                where = pytree.path(spec, index, f"state[{name!r}]")
                expected = "a count" if is_count else f"a tensor of shape {tuple(leaf.shape)}"
                expected += "" if is_count else f" on {leaf.device}"
                fix = "state = opt.init(params), of these params"
                raise errors.StructureError(message(where, expected, describe(entry), fix))


_FLAGS = ("nesterov", "maximize", "amsgrad", "centered")


def read_settings(
    opt: Optimizer, hyper: Settings, leaves: Leaves, spec: Structure, moving: Sequence[int]
) -> dict[str, Any]:
    """Open and check hyper-parameters: those that are trees become lists like `leaves`."""
    settings = dict(hyper)
    for index in moving:
        if opt.ndim not in (None, leaves[index].dim()):
            expected, fix = f"a {opt.ndim}-dimensional tensor", "None in place of its gradient, "
            fix += f"and another optimizer for it: {opt.name} is for others"
            where, got = pytree.path(spec, index, "params"), describe(leaves[index])
            raise errors.StructureError(message(where, f"{expected} for {opt.name}", got, fix))
    for name, value in hyper.items():
        if opt.scalar_hyperparams and not isinstance(value, Mapping | list):
            continue
        if name in _FLAGS:
            check_bool(name, value)
        else:
            settings[name] = _read_hyperparam(name, value, leaves, spec, set(moving))
    return settings


def _read_hyperparam(
    name: str, value: Hyper, leaves: Leaves, spec: Structure, moving: Collection[int]
) -> Any:
    """Return a number, or a list with a number or a tensor for each leaf; of `betas`, a pair."""
    if name == "betas":
        if not isinstance(value, tuple | list) or len(value) != 2:
            got, fix = describe(value), "betas=(0.9, 0.999)"
            raise errors.OptionError(message("betas", "a pair", got, fix))
        named = zip(("betas[0]", "betas[1]"), value, strict=True)
        return tuple(_read_hyperparam(one, beta, leaves, spec, moving) for one, beta in named)
    if is_number(value):
        return float(value)
    values = pytree.broadcast_prefix(value, name, pytree.unflatten(spec, leaves), "params")
    for index, (leaf, number) in enumerate(zip(leaves, values, strict=True)):
        if leaf is None or is_number(number):
            continue
        where = f"{name} of params"
        if not isinstance(number, Tensor):
            expected, fix = "a number or a tensor", f"{name}=0.1, or a tree like params"
            where = pytree.path(spec, index, where)
            raise errors.LeafTypeError(message(where, expected, describe(number), fix))
        if index not in moving:
            continue
        if number.is_complex() and not leaf.is_complex():
            where, expected = pytree.path(spec, index, where), "a real number: the leaf is real"
            raise errors.LeafTypeError(message(where, expected, describe(number), f"{name}.real"))
        is_plain = number.layout == torch.strided and (leaf.is_meta or not number.is_meta)
        if not is_plain or (number.numel() != 1 and number.shape != leaf.shape):
            expected = f"one number, or a dense tensor of shape {tuple(leaf.shape)} with values"
            where, fix = pytree.path(spec, index, where), "torch.full_like(leaf, 0.1)"
            raise errors.StructureError(message(where, expected, describe(number), fix))
    return values


_NONNEGATIVE = (lambda x: x >= 0, "numbers of at least 0", "0.1")
_RANGES: Mapping[str, tuple[Callable[[float], bool], str, str]] = {
    "dampening": (lambda x: True, "any number", "0.1"),
    "betas": (lambda x: 0 <= x < 1, "numbers of at least 0, below 1", "(0.9, 0.999)"),
    "beta2_decay": (lambda x: x <= 0, "numbers of at most 0", "-0.8"),
    "d": (lambda x: x >= 1, "numbers of at least 1", "1.0"),
}


def _check_ranges(hyper: Settings) -> None:
    """Raise for a number that torch.optim refuses; the value of a tensor is not read."""
    for name, value in hyper.items():
        is_in_range, expected, example = _RANGES.get(name, _NONNEGATIVE)
        for number in pytree.flatten(value)[0]:
            if is_number(number) and not is_in_range(number):
                raise errors.OptionError(message(name, expected, repr(number), f"{name}={example}"))


def require_optimizer(opt: object) -> None:
    """Raise if this is not an optimizer of gradkit.meta."""
    if not isinstance(opt, Optimizer):
        expected, fix = "an optimizer of gradkit.meta", "gradkit.meta.sgd(lr=0.1)"
        if isinstance(opt, torch.optim.Optimizer):
            fix = f"gradkit.meta.from_torch(torch.optim.{type(opt).__name__}, lr=0.1)"
        raise errors.UnsupportedOptimizerError(message("opt", expected, describe(opt), fix))


def update(
    opt: Optimizer, tensors: Leaves, grads: Leaves, state: StateLists, settings: Settings
) -> Updated:
    """Return tensors and state after one step; without a gradient they stay as they are."""
    moving = [index for index, grad in enumerate(grads) if grad is not None]
    after, after_state = list(tensors), {name: list(column) for name, column in state.items()}
    if not moving:
        return after, state
    old, of_moving = select(after, moving), select(list(grads), moving)
    columns = {name: select(column, moving) for name, column in after_state.items()}
    factors = {name: as_factor(select(value, moving)) for name, value in settings.items()}
    pairs = zip(of_moving, old, strict=True)
    cast_grads = [g if g.dtype == x.dtype else g.to(x.dtype) for g, x in pairs]
    given = list(zip(of_moving, *columns.values(), strict=True))
    counts = columns.get("step", ())
    is_read = any(isinstance(count, Tensor) for count in counts)
    if is_read:
        columns = {**columns, "step": list(map(_exact, counts))}
    new, entries = opt.rule(old, cast_grads, columns, factors)
    for i, index in enumerate(moving):
        after[index] = new[i] if new[i].dtype == old[i].dtype else new[i].to(old[i].dtype)
        for name, column in after_state.items():
            before, entry = column[index], entries[name][i]
            if is_read and isinstance(before, Tensor) and isinstance(entry, Tensor):
                dtype = before.dtype  # not that of the count, which has spread to 0-dim tensors
                if name == "step":
                    dtype = entry.dtype if before.is_floating_point() else torch.int64
                entry = entry.reshape(before.shape).to(dtype)
            is_tensor = isinstance(entry, Tensor)
            column[index] = _not_given(entry, given[i]) if is_tensor else entry
    return after, after_state


def _exact(count: Any) -> Any:
    """Return a count that may be a tensor of any dtype in float64, as exact as an int."""
    # A count in float32 gets 1 - 0.999 ** 1 wrong in the fifth digit; in bfloat16 it is 0.
    if not isinstance(count, Tensor):
        return count
    return count.reshape(()).to(torch.float32 if count.device.type == "mps" else torch.float64)


def _not_given(entry: Tensor, given: Sequence[Any]) -> Any:
    """Return an entry of a state, copied if the rule was given this tensor for its leaf."""
    # `is` compares: torch.compile guards on each id() that it has asked for, and traces again.
    for one in given:
        if entry is one:
            return entry.clone()
    return entry


def check_grads(leaves: Leaves, grads: Leaves, spec: Structure, root: str) -> None:
    """Raise if a gradient does not fit its parameter."""
    for index, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        if grad is None:
            continue
        if not isinstance(leaf, Tensor) or not isinstance(grad, Tensor):
            name, got = (root, grad) if isinstance(leaf, Tensor) else ("params", leaf)
            expected, fix = "a tensor or None", "pass a tensor"
            if type(got).__name__ == "ClippedGrads":
                fix = "gradkit.tree.clip_by_global_norm(grads, max_norm)[0]: it returns a pair"
        elif not leaf.is_floating_point() and not leaf.is_complex():
            name, got = "params", leaf
            expected, fix = "a floating-point tensor", "give None as grad"
        elif grad.is_complex() and not leaf.is_complex():
            name, got = root, grad
            expected, fix = "a real tensor, like its parameter", "pass grad.real"
        elif grad.shape != leaf.shape:
            expected = f"a gradient of shape {tuple(leaf.shape)}"
            fix = "pass the gradient with respect to this parameter"
            where = pytree.path(spec, index, root)
            raise errors.StructureError(message(where, expected, describe(grad), fix))
        else:
            continue
        where = pytree.path(spec, index, name)
        raise errors.LeafTypeError(message(where, expected, describe(got), fix))


def select(value: Any, indices: Sequence[int]) -> Any:
    """Return the part of a setting that is for the tensors of these indices."""
    if isinstance(value, tuple):
        return tuple(select(item, indices) for item in value)
    return [value[index] for index in indices] if isinstance(value, list) else value


def as_factor(value: Any) -> Any:
    """Return a setting with its tensors of one element 0-dim: they broadcast to any leaf."""
    if isinstance(value, tuple | list):
        return type(value)(map(as_factor, value))
    return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value


def check_names(owner: str, hyper: Iterable[str], known: Iterable[str], fix: str) -> None:
    """Raise if a hyper-parameter is unknown."""
    names = list(known)
    for name in hyper:
        if name not in names:
            text = f"{owner} has no hyperparameter {name!r}; it has {', '.join(names)}."
            raise errors.OptionError(f"{text}\n  What to do: {fix}")


F = TypeVar("F", bound=Callable[..., Optimizer])


def optimizer_function(make: F) -> F:
    """Let a function that makes an optimizer check the names of its options, and its flags."""
    defaults = {name: p.default for name, p in inspect.signature(make).parameters.items()}
    name = make.__name__

    @wraps(make)
    def checked(*args: Any, **hyper: Any) -> Optimizer:
        check_names(name, hyper, defaults, f"gradkit.meta.{name}(lr=0.1)")
        for key, value in hyper.items():
            if isinstance(defaults[key], bool):
                check_bool(key, value)
        return make(*args, **hyper)

    return cast("F", checked)
