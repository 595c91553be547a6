"""Any class of torch.optim as a pure optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer
from torch.overrides import TorchFunctionMode

from gradkit import errors
from gradkit._compat import transforms as torch_func
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import is_differentiated_tensor, is_dual, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import check_bool, is_number
from gradkit._core.params import Tensors
from gradkit._state.grad_attribute import set_grad
from gradkit.errors import describe, first_line, message
from gradkit.meta import _optimizer
from gradkit.meta._builtin_optimizers import adam, adamw, rmsprop, sgd
from gradkit.meta._newer_optimizers import adafactor, muon
from gradkit.meta._optimizer import Optimizer, Settings, StateLists, Updated

_REIMPLEMENTED: Mapping[type, Callable[..., Optimizer]] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Adafactor: adafactor,
    torch.optim.Muon: muon,
}
# The options that choose the kernel, not the result.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_REFUSED = {
    "LBFGS": "it evaluates the loss itself, in a closure, any number of times",
    "SparseAdam": "it takes sparse gradients only, and updates only the rows that they hold",
}
# Hyper-parameters through which torch's own code keeps the gradient right.
_DIFFERENTIABLE = {"NAdam": {"lr", "momentum_decay"}, "RAdam": {"lr"}}
_CONSTANT = "a number: torch drops the gradient of this hyper-parameter, or gets it wrong"
_ANOTHER = "pass a number, or use sgd, adam, adamw or rmsprop, which keep every gradient"
_COUNT_DTYPE = torch.float64  # as exact as an int
_CONSTRUCTOR_ONLY = {"initial_accumulator_value"}  # read there alone, to make the first state
TorchState: TypeAlias = dict[str, Any]  # of one parameter, as torch's optimizers keep it


def from_torch(optimizer: type[torch.optim.Optimizer], **hyper: Any) -> Optimizer:
    """Return a class of torch.optim as a pure optimizer.

    SGD, Adam, AdamW, RMSprop, Adafactor and Muon are those of this package. Any other runs torch's
    own code on copies, differentiable where torch's class has `differentiable=True`.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.from_torch(torch.optim.NAdam, lr=0.1)
        >>> w = torch.tensor([1.0])
        >>> opt.step(w, torch.tensor([2.0]), opt.init(w))[0]
        tensor([0.8944])

    Args:
        optimizer: The class.
        hyper: Its arguments. `foreach`, `fused`, `capturable` and `differentiable` are ignored. A
            dict or a list is a tree like params, with a number or a tensor for each leaf.

    Returns:
        An `Optimizer` with the values of the class; the derivative of sqrt at 0 is taken as 0.

    Raises:
        OptionError: The class has no such argument, or refuses a number.
        UnsupportedOptimizerError: The class cannot be a pure function, or torch would drop the
            gradient of a hyper-parameter; in a step, if gradients flow through a class without
            `differentiable=True`, or a subclass of SGD.

    Source:
        `torch.optim`, https://pytorch.org/docs/stable/optim.html
    """
    _check_class(optimizer)
    rule, name = _TorchRule(optimizer), optimizer.__name__
    hyper = {key: value for key, value in hyper.items() if key not in _IMPLEMENTATION}
    defaults = {key: value for key, value in rule.arguments.items() if key not in _IMPLEMENTATION}
    _optimizer.check_names(name, hyper, defaults, f"from_torch(torch.optim.{name}, lr=0.1)")
    is_of_torch = optimizer.__module__.startswith("torch.optim.")  # the rest may take anything
    for key in (key for key in hyper if is_of_torch and isinstance(defaults[key], bool)):
        check_bool(key, hyper[key])
    if optimizer is torch.optim.Adam and hyper.pop("decoupled_weight_decay", False):
        optimizer = torch.optim.AdamW
        hyper = {"weight_decay": 0.0, **hyper}  # Adam's default; AdamW's differs
    if optimizer in _REIMPLEMENTED:
        return _REIMPLEMENTED[optimizer](**hyper)
    _check_hyper(name, hyper)
    for key in hyper if is_of_torch else ():
        _check_numbers(f"{key} of {name}", key, hyper[key], defaults[key])
    settings = {**defaults, **hyper}
    rule.check(settings)
    return Optimizer(name, settings, {"torch": lambda leaf: {}}, rule, scalar_hyperparams=True)


@dataclass(frozen=True)
class _TorchRule:
    """The update of a class of torch.optim: torch's step, with an optimizer that is thrown away."""

    optimizer: type[TorchOptimizer]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the constructor but `params`, and their defaults."""
        parameters = inspect.signature(self.optimizer).parameters
        return {name: p.default for name, p in parameters.items() if name != "params"}

    def __call__(
        self, params: Tensors, grads: Tensors, state: StateLists, hyper: Settings
    ) -> Updated:
        name = self.optimizer.__name__
        _check_hyper(name, hyper)
        tensors = pytree.tensors((params, grads, state, dict(hyper)))
        stack = transforms()
        create_graph = torch_func.FORWARD in stack or (not stack and any(map(is_dual, tensors)))
        if not create_graph and torch.is_grad_enabled():
            create_graph = torch_func.differentiated() or any(x.requires_grad for x in tensors)
        # A subclass of SGD has torch's first momentum step, which drops its gradient [T4].
        is_sgd = issubclass(self.optimizer, torch.optim.SGD)
        if create_graph and (is_sgd or "differentiable" not in self.arguments):
            expected = "an optimizer that torch can differentiate"
            got = "one without differentiable=True, or a subclass of SGD, whose first step torch "
            got += "cuts off; and gradients that require grad"
            fix = "call it under torch.no_grad(), or use another optimizer"
            raise errors.UnsupportedOptimizerError(message(name, expected, got, fix))
        calls = [(params, grads, state["torch"], hyper)]
        if any(isinstance(value, list) for value in hyper.values()):  # each leaf has its own step
            calls = [
                ([p], [g], [s], {k: v[i] if isinstance(v, list) else v for k, v in hyper.items()})
                for i, (p, g, s) in enumerate(zip(*calls[0][:3], strict=True))
            ]
        try:
            done = [self._step(*call, create_graph) for call in calls]
            new, states = (list(chain.from_iterable(parts)) for parts in zip(*done, strict=True))
            return new, {"torch": states}
        except KeyError as error:
            expected, got = f"the entry {error} of each leaf, for these hyper-parameters", "none"
            fix = "state = opt.init(params), of this optimizer"
            raise errors.StructureError(message("state", expected, got, fix)) from error
        except (RuntimeError, IndexError) as error:
            if not transforms() or isinstance(error, errors.GradkitError):
                raise
            expected = "an optimizer that runs inside torch.func's transforms"
            got, fix = f"one that does not: {first_line(error)}", "use sgd, adam, adamw or rmsprop"
            raise errors.UnsupportedOptimizerError(message(name, expected, got, fix)) from error

    def _step(
        self, params: Tensors, grads: Tensors, states: list[Any], hyper: Settings, graph: bool
    ) -> tuple[Tensors, list[TorchState]]:
        """Run torch's step on fresh copies, which carry a graph or not."""
        zeros = list(map(torch.zeros_like, grads))
        # p + 0 is a copy with the graph of p, and one that is batched if the gradient is.
        fresh = [p + z for p, z in zip(params, zeros, strict=True)]
        if not graph:
            fresh = [p.detach() for p in fresh]
        # torch writes in place for speed, for which a transform has no rule.
        opt = self._temporary(fresh, hyper, graph or bool(transforms()))
        for p, grad, zero, before in zip(fresh, grads, zeros, states, strict=True):
            set_grad(p, grad.clone() if graph else grad.detach().clone())
            opt.state[p] = dict(before or self._first_state(p, hyper))
            for key, x in opt.state[p].items():
                if key in self._counters:  # of a loaded state, a number or in float32
                    opt.state[p][key] = torch.as_tensor(x).reshape(()).to(_COUNT_DTYPE, copy=True)
                elif isinstance(x, Tensor):
                    # A counter is the same for all of a batch; torch reads it as a number.
                    is_shared = x.shape != zero.shape
                    opt.state[p][key] = x.clone() if is_shared else x + zero
        with warnings.catch_warnings(), _SafeSqrt(), INSIDE:
            warnings.simplefilter("ignore")  # torch warns of in-place writes, meant here
            opt.step()
        for p in fresh:
            set_grad(p, None)
        return fresh, [dict(opt.state[p]) for p in fresh]

    def _temporary(self, params: Tensors, hyper: Settings, differentiable: bool) -> TorchOptimizer:
        flags = {"foreach": False, "differentiable": differentiable}
        constants: dict[str, Any] = {k: flag for k, flag in flags.items() if k in self.arguments}
        # The constructor checks numbers; tensors, which it would read, are put in afterwards.
        for key, value in hyper.items():
            if key in _CONSTRUCTOR_ONLY:
                constants[key] = value.item() if isinstance(value, Tensor) else value
            elif all(map(is_number, value if isinstance(value, tuple) else (value,))):
                constants[key] = value
        try:
            opt = self.optimizer(params, **constants)
        except (TypeError, ValueError) as error:
            name = self.optimizer.__name__
            expected = f"parameters and hyper-parameters that {name} takes"
            text = message(name, expected, str(error), f"see help({name})")
            raise errors.OptionError(text) from error
        opt.param_groups[0].update(hyper)
        return opt

    def check(self, hyper: Settings) -> None:
        """Raise if the class refuses a hyper-parameter, or one of those for each leaf."""
        trees = {key: value for key, value in hyper.items() if isinstance(value, Mapping | list)}
        scalars = {key: value for key, value in hyper.items() if key not in trees}
        numbers = [{key: x} for key, tree in trees.items() for x in pytree.flatten(tree)[0]]
        for one in ({}, *numbers):
            self._temporary([torch.zeros(1, 1)], {**scalars, **one}, False)

    def misfit(self, leaf: Tensor, entries: object) -> tuple[str, str, str] | None:
        """Return where the state of a leaf is not one of the class, what it should be, and is."""
        if not isinstance(entries, Mapping):
            return "", "a dict, empty before the first step", describe(entries)
        for key, start in self._entries.items() if entries else ():
            entry = entries.get(key)
            if start.dim() == 0:
                expected = f"one number, as every {self.optimizer.__name__} has"
                fits = entry.numel() == 1 if isinstance(entry, Tensor) else is_number(entry)
            else:
                expected = f"a tensor of shape {tuple(leaf.shape)}"
                fits = isinstance(entry, Tensor) and entry.shape == leaf.shape
            if not fits:
                return f"[{key!r}]", expected, describe(entry)
        return None

    @cached_property
    def _entries(self) -> dict[str, Tensor]:
        """The entries that every tensor has: numbers, and tensors of its shape."""
        one, two = (self._torch_state(torch.zeros([2] * dim), {}) for dim in (1, 2))
        both = {key: x for key, x in two.items() if key in one and isinstance(x, Tensor)}
        return {key: x for key, x in both.items() if x.dim() == 0 or x.shape == (2, 2)}

    @cached_property
    def _counters(self) -> set[str]:
        """The names of the state entries that are one number for each leaf."""
        return {key for key, x in self._entries.items() if x.dim() == 0}

    def _first_state(self, param: Tensor, hyper: Settings) -> TorchState:
        """Return the state that torch starts with, its counters in float64."""
        stand_in = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        # Counters in float32, as torch has them, get 1 - 0.999 ** 1 wrong in the fifth digit [T6].
        return {
            key: value.double() if key in self._counters and value.is_floating_point() else value
            for key, value in self._torch_state(stand_in, hyper).items()
        }

    def _torch_state(self, stand_in: Tensor, hyper: Settings) -> TorchState:
        set_grad(stand_in, torch.zeros_like(stand_in))
        opt = self._temporary([stand_in], hyper, False)
        init_group: Callable[..., Any] | None = getattr(opt, "_init_group", None)
        if init_group is None:
            return {}
        with torch.no_grad(), INSIDE:
            lists = len(inspect.signature(init_group).parameters) - 1
            init_group(opt.param_groups[0], *[[] for _ in range(lists)])
        return dict(opt.state[stand_in])


def _check_class(optimizer: object) -> None:
    is_class = isinstance(optimizer, type) and issubclass(optimizer, TorchOptimizer)
    name = optimizer.__name__ if isinstance(optimizer, type) else ""
    if not is_class or name in _REFUSED:
        expected = "a class of torch.optim that is a function of gradients"
        got = f"{name}: {_REFUSED[name]}" if is_class else describe(optimizer)
        fix = "another class, such as torch.optim.Adam"
        if isinstance(optimizer, TorchOptimizer):
            fix = f"the class itself: from_torch(torch.optim.{type(optimizer).__name__}, lr=0.1)"
        raise errors.UnsupportedOptimizerError(message("optimizer", expected, got, fix))


def _check_numbers(where: str, key: str, value: Any, default: object) -> None:
    """Raise unless a hyper-parameter is a number, a tree of some, or as many as its default is."""
    expected = "a number, or a tensor of one element"
    if isinstance(default, tuple):
        expected = f"a tuple of {len(default)} numbers, or of tensors of one element"
        fits = isinstance(value, tuple) and len(value) == len(default)
        fits = fits and all(map(_is_like, value, default))
    elif isinstance(default, float | int) and not isinstance(default, bool):
        is_tree = isinstance(value, Mapping | list)  # with None for a leaf that is None
        parts = [x for x in pytree.flatten(value)[0] if x is not None] if is_tree else [value]
        fits = all(_is_like(part, default) for part in parts)
    else:
        return
    if not fits:
        raise errors.OptionError(message(where, expected, describe(value), f"{key}={default!r}"))


def _is_like(value: object, default: object) -> bool:
    """Return whether this is one number for torch, or the None that stands in its place."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.layout == torch.strided and not value.is_meta
    return is_number(value) or (value is None and default is None)


def _check_hyper(name: str, hyper: Settings) -> None:
    for key, value in hyper.items():
        where = f"{key} of {name}"
        if isinstance(value, tuple) and any(isinstance(x, Mapping | list) for x in value):
            expected, got = "one tuple for all leaves", "a tuple of trees"
            fix = "use adam or adamw, which take a tree for each of betas"
            raise errors.UnsupportedOptimizerError(message(where, expected, got, fix))
        for x in filter(Tensor.is_complex, pytree.tensors(value)):
            text = message(where, "a real number", describe(x), f"{key}.real")
            raise errors.LeafTypeError(text)
        for x in pytree.tensors(value) if key not in _DIFFERENTIABLE.get(name, ()) else ():
            if x.requires_grad or is_differentiated_tensor(x) or is_dual(x):
                got = describe(x)
                raise errors.UnsupportedOptimizerError(message(where, _CONSTANT, got, _ANOTHER))


class _SafeSqrt(TorchFunctionMode):
    """Takes the derivative of a square root at 0 as 0, where torch's is infinite [T5]."""

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.sqrt, Tensor.sqrt) and len(args) == 1 and not kwargs:
            return _optimizer.safe_sqrt(args[0])
        return func(*args, **(kwargs or {}))
