"""Optimizers as pure functions: `init(params)`, and `step(params, grads, state)`.

Each is written out, so that every hyper-parameter keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit import _pytree
from gradkit._inputs import open_up
from gradkit._pytree import PyTree
from gradkit._stack import transforms
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.meta import _arithmetic as a
from gradkit.meta._arithmetic import Factor, Tensors

# A number, a tensor of one element, or a tree like params with one of these for each leaf.
Hyper: TypeAlias = Any
State: TypeAlias = dict[str, PyTree]
# The new tensors, and the new state of each, from the old ones and the gradients.
Rule: TypeAlias = Callable[
    [Tensors, Tensors, list[dict[str, Any]], Mapping[str, Any]],
    tuple[Tensors, list[dict[str, Any]]],
]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as a pair of pure functions, `init` and `step`.

    Attributes:
        name: What made it, for errors.
        hyper: Its hyper-parameters by name.
        entries: What the state holds for each leaf, and how an entry starts, from the leaf.
        rule: The update of the leaves that have a gradient.
        one_for_all: A hyper-parameter is one value, and no tree with one for each leaf.
    """

    name: str
    hyper: Mapping[str, Hyper]
    entries: Mapping[str, Callable[[Tensor], Any]]
    rule: Rule
    one_for_all: bool = False

    def init(self, params: PyTree) -> State:
        """Return the state before the first step.

        Args:
            params: A tree of tensors; a module stands for its named parameters.

        Returns:
            For each entry (`"step"`, `"exp_avg"`, ...) a tree like `params`.
        """
        leaves, spec = open_up(params, "params")
        return {
            name: _pytree.unflatten(spec, [None if x is None else start(x) for x in leaves])
            for name, start in self.entries.items()
        }

    def step(
        self, params: PyTree, grads: PyTree, state: State, **hyper: Hyper
    ) -> tuple[PyTree, State]:
        """Return the parameters and the state after one step.

        Args:
            params: A tree of tensors; a module stands for its named parameters.
            grads: A tree like it of tensors of the same shapes, or None: that leaf is skipped, as
                torch's optimizers do.
            state: What `init` or the last step returned.
            hyper: Hyper-parameters for this step, in place of those that the optimizer has.

        Returns:
            New trees, which share nothing that could be written on with the old ones, and through
            which gradients flow to params, grads, state and hyper-parameters. A leaf without a
            gradient is the same tensor as before.

        Raises:
            LeafTypeError: What is to be moved, or a hyper-parameter, cannot be.
            StructureError: The trees do not match, or there is no such hyper-parameter.
        """
        leaves, spec = open_up(params, "params")
        by_leaf = _pytree.matching_leaves(spec, "params", grads, "grads")
        self._check(leaves, by_leaf, state, spec, hyper)
        columns = {
            name: _pytree.matching_leaves(spec, "params", state[name], f"state[{name!r}]")
            for name in self.entries
        }
        settings = {**self.hyper, **hyper}
        params = _pytree.unflatten(spec, leaves)  # an iterator can be read only once
        moving = [i for i, grad in enumerate(by_leaf) if grad is not None]
        if not moving:
            return _pytree.unflatten(spec, leaves), state
        new, entries = self.rule(
            [leaves[i] for i in moving],
            [by_leaf[i].to(leaves[i].dtype) for i in moving],
            [{name: column[i] for name, column in columns.items()} for i in moving],
            self.spread(settings, params, moving),
        )
        taken = {id(x) for x in [*by_leaf, *chain.from_iterable(columns.values())]}
        for place, leaf, entry in zip(moving, new, entries, strict=True):
            leaves[place] = leaf.to(leaves[place].dtype)
            for name, column in columns.items():
                column[place] = _own(entry[name], taken)
        after = {name: _pytree.unflatten(spec, column) for name, column in columns.items()}
        return _pytree.unflatten(spec, leaves), after

    def spread(
        self, hyper: Mapping[str, Hyper], params: PyTree, moving: Sequence[int]
    ) -> Mapping[str, Any]:
        """Return hyper-parameters as the rule takes them, and refuse what does not fit.

        Args:
            hyper: All of them, by name.
            params: A tree of tensors.
            moving: Which of its leaves the rule is to move.

        Returns:
            By name a number, or a list with a number or a tensor for each of these leaves.
        """
        if self.one_for_all:
            return hyper
        return {name: _spread(value, name, params, moving) for name, value in hyper.items()}

    def check_state(self, state: object) -> None:
        """Refuse what is no state of this optimizer.

        Args:
            state: What came.

        Raises:
            StructureError: It has not the entries that `init` makes.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.entries):
            raise StructureError(
                message(
                    "state",
                    f"a state of {self.name}, with {', '.join(self.entries) or 'no entries'}",
                    describe(state) if not isinstance(state, Mapping) else str(list(state)),
                    "state = opt.init(params)",
                )
            )

    def _check(
        self,
        leaves: list[Any],
        grads: list[Any],
        state: State,
        spec: _pytree.Structure,
        hyper: Mapping[str, Hyper],
    ) -> None:
        unknown = [name for name in hyper if name not in self.hyper]
        if unknown:
            raise StructureError(
                message(
                    unknown[0],
                    f"a hyper-parameter of {self.name}: {', '.join(self.hyper)}",
                    "another name",
                    "step(params, grads, state, lr=lr)",
                )
            )
        self.check_state(state)
        for index, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            if grad is None:
                continue
            if not isinstance(leaf, Tensor) or not isinstance(grad, Tensor):
                root, wrong = ("grads", grad) if isinstance(leaf, Tensor) else ("params", leaf)
                where = _pytree.path(spec, index, root)
                raise LeafTypeError(
                    message(where, "a tensor or None", describe(wrong), "pass a tensor")
                )
            if not leaf.is_floating_point() and not leaf.is_complex():
                where = _pytree.path(spec, index, "params")
                raise LeafTypeError(
                    message(where, "a floating-point tensor", describe(leaf), "give None as grad")
                )
            if grad.shape != leaf.shape:
                raise StructureError(
                    message(
                        _pytree.path(spec, index, "grads"),
                        f"a gradient of shape {tuple(leaf.shape)}",
                        describe(grad),
                        "pass the gradient by this parameter",
                    )
                )


def _own(entry: Any, taken: set[int]) -> Any:
    """Return an entry of a state that is not one of the tensors that the step was given."""
    return entry.clone() if isinstance(entry, Tensor) and id(entry) in taken else entry


def _spread(value: Hyper, name: str, params: PyTree, moving: Sequence[int]) -> Any:
    """Return a hyper-parameter as the rules take it: a number, or a list with one for each leaf."""
    if isinstance(value, bool):
        return value
    if name == "betas":
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise StructureError(message("betas", "a pair", describe(value), "betas=(0.9, 0.999)"))
        return tuple(_spread(beta, f"betas[{i}]", params, moving) for i, beta in enumerate(value))
    if isinstance(value, Real):
        return float(value)
    leaves, spec = _pytree.flatten(params)
    spread = _pytree.spread(value, name, params, "params")
    for index, one in enumerate(spread):
        if leaves[index] is not None and not isinstance(one, Real | Tensor):
            raise LeafTypeError(
                message(
                    f"{name} of {_pytree.path(spec, index, 'params')}",
                    "a number or a tensor",
                    describe(one),
                    f"{name}=0.1, or a tree like params",
                )
            )
    return [
        _fitting(spread[i], leaves[i], partial(_pytree.path, spec, i, f"{name} of params"))
        for i in moving
    ]


def _fitting(value: float | Tensor, leaf: Tensor, where: Callable[[], str]) -> float | Tensor:
    """Return a hyper-parameter that does not change the shape of what it multiplies."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.reshape(())
    if value.shape == leaf.shape:
        return value
    raise StructureError(
        message(
            where(),
            f"one number, or a tensor of shape {tuple(leaf.shape)}",
            describe(value),
            "torch.full_like(leaf, 0.1)",
        )
    )


def sgd(
    lr: Hyper = 1e-3,
    *,
    momentum: Hyper = 0.0,
    dampening: Hyper = 0.0,
    weight_decay: Hyper = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return stochastic gradient descent as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.sgd(lr=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> state = opt.init(params)
        >>> params, state = opt.step(params, {"w": torch.tensor([1.0, 1.0])}, state)
        >>> params
        {'w': tensor([0.5000, 1.5000])}

    Args:
        lr: The learning rate: a number, a tensor of one element, or a tree like params with one of
            these, or a tensor of the leaf's shape, for each leaf. So may every other number here.
        momentum: How much of the last direction is kept.
        dampening: How much of the gradient is left out of the momentum, after the first step.
        weight_decay: This times the parameter is added to the gradient.
        nesterov: Look ahead along the momentum.
        maximize: Go up.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.SGD`.

    Source:
        `torch.optim.SGD`, https://pytorch.org/docs/stable/generated/torch.optim.SGD.html. Its own
        `differentiable=True` loses the gradient through the first momentum step; this keeps it.
    """
    hyper = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    return Optimizer("sgd", hyper, {"momentum_buffer": lambda leaf: None}, _sgd)


def _sgd(
    params: Tensors, grads: Tensors, state: list[dict[str, Any]], h: Mapping[str, Any]
) -> tuple[Tensors, list[dict[str, Any]]]:
    if h["nesterov"] and (a.is_zero(h["momentum"]) or not a.is_zero(h["dampening"])):
        raise StructureError(
            message(
                "nesterov",
                "a momentum, and no dampening, as in torch.optim.SGD",
                f"momentum={describe(h['momentum'])}, dampening={describe(h['dampening'])}",
                "sgd(lr=0.1, momentum=0.9, nesterov=True)",
            )
        )
    grads = _with_decay(params, grads, h)
    buffers: list[Any] = [entry["momentum_buffer"] for entry in state]
    if not a.is_zero(h["momentum"]):
        buffers = _momentum(buffers, grads, h["momentum"], h["dampening"])
        grads = a.plus(grads, buffers, h["momentum"]) if h["nesterov"] else buffers
    return _moved(params, grads, h["lr"]), [{"momentum_buffer": b} for b in buffers]


def _momentum(
    buffers: Sequence[Tensor | None], grads: Tensors, momentum: Factor, dampening: Factor
) -> Tensors:
    # The first step takes the gradient as it is; another leaf may have had its first before.
    old = [i for i, buffer in enumerate(buffers) if buffer is not None]
    new = list(grads)

    def of_old(factor: Factor) -> Factor:
        return [factor[i] for i in old] if isinstance(factor, list) else factor

    kept = a.scaled([b for b in buffers if b is not None], of_old(momentum)) if old else []
    fresh = a.complement(of_old(dampening))
    for i, buffer in zip(
        old, a.plus(kept, [grads[i] for i in old], fresh) if old else [], strict=True
    ):
        new[i] = buffer
    return new


def _with_decay(params: Tensors, grads: Tensors, h: Mapping[str, Any]) -> Tensors:
    if h["maximize"]:
        grads = a.scaled(grads, -1.0)
    return grads if a.is_zero(h["weight_decay"]) else a.plus(grads, params, h["weight_decay"])


def _moved(params: Tensors, direction: Tensors, lr: Factor) -> Tensors:
    return a.plus(params, direction, a.product(lr, -1.0))


def adam(
    lr: Hyper = 1e-3,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return Adam as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.adam(lr=0.1)
        >>> w = torch.tensor([1.0])
        >>> w, state = opt.step(w, torch.tensor([2.0]), opt.init(w))
        >>> w, state["step"]
        (tensor([0.9000]), 1)

    Args:
        lr: The learning rate; it and every other number may be a tensor or a tree, as in `sgd`.
        betas: How much of the averages of the gradient and of its square is kept.
        eps: Added to the root of the second average.
        weight_decay: This times the parameter is added to the gradient.
        amsgrad: Divide by the largest second average so far.
        maximize: Go up.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.Adam`. Where a second average is
        exactly 0 (a unit that is dead), the derivative of the update is taken as 0; torch's own
        `differentiable=True` gives nan.

    Source:
        Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1,
        https://arxiv.org/abs/1412.6980; `torch.optim.Adam`
    """
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=False)


def adamw(
    lr: Hyper = 1e-3,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return AdamW, Adam with decoupled weight decay, as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.adamw(lr=0.1, weight_decay=0.5)
        >>> w = torch.tensor([1.0])
        >>> opt.step(w, torch.tensor([0.0]), opt.init(w))[0]
        tensor([0.9500])

    Args:
        lr: As in `adam`.
        betas: As in `adam`.
        eps: As in `adam`.
        weight_decay: `lr` times this times the parameter is taken off the parameter.
        amsgrad: As in `adam`.
        maximize: As in `adam`.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.AdamW`; derivatives as in `adam`.

    Source:
        Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2,
        https://arxiv.org/abs/1711.05101; `torch.optim.AdamW`
    """
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=True)


def _adam(
    name: str,
    lr: Hyper,
    betas: tuple[Hyper, Hyper],
    eps: Hyper,
    weight_decay: Hyper,
    amsgrad: bool,
    maximize: bool,
    *,
    decoupled: bool,
) -> Optimizer:
    hyper = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    entries: dict[str, Callable[[Tensor], Any]] = {
        "step": lambda leaf: 0,
        "exp_avg": torch.zeros_like,
        "exp_avg_sq": torch.zeros_like,
    }
    if amsgrad:
        entries["max_exp_avg_sq"] = torch.zeros_like

    def rule(
        params: Tensors, grads: Tensors, state: list[dict[str, Any]], h: Mapping[str, Any]
    ) -> tuple[Tensors, list[dict[str, Any]]]:
        _refuse_complex(name, params)
        if decoupled:
            grads = a.scaled(grads, -1.0) if h["maximize"] else grads
            if not a.is_zero(h["weight_decay"]):
                params = a.plus(
                    params, params, a.product(a.product(h["lr"], h["weight_decay"]), -1.0)
                )
        else:
            grads = _with_decay(params, grads, h)
        beta, beta_sq = h["betas"]
        steps = [entry["step"] + 1 for entry in state]
        means = a.mixed([entry["exp_avg"] for entry in state], grads, beta)
        squares = a.mixed([entry["exp_avg_sq"] for entry in state], a.times(grads, grads), beta_sq)
        new = [
            {"step": t, "exp_avg": m, "exp_avg_sq": v}
            for t, m, v in zip(steps, means, squares, strict=True)
        ]
        if amsgrad:
            largest = [entry["max_exp_avg_sq"] for entry in state]
            squares = list(map(torch.maximum, largest, squares))
            for entry, square in zip(new, squares, strict=True):
                entry["max_exp_avg_sq"] = square
        first, second = _bias_correction(beta, steps), _bias_correction(beta_sq, steps)
        roots = a.scaled(a.root(squares), a.power(second, -0.5))
        direction = _ratio(means, a.shifted(roots, h["eps"]), squares)
        return _moved(params, direction, a.product(h["lr"], a.power(first, -1.0))), new

    return Optimizer(name, hyper, entries, rule)


def _refuse_complex(name: str, params: Tensors) -> None:
    if any(param.is_complex() for param in params):
        raise LeafTypeError(
            message(
                "params",
                f"real tensors, of which {name} squares the gradients",
                "a complex one",
                "torch.view_as_real(tensor), or sgd",
            )
        )


def _bias_correction(beta: Factor, steps: Sequence[int]) -> Factor:
    """Return 1 - beta ** step."""
    # The step is an int: the float32 that torch counts in costs 1 - beta ** t several digits.
    if not isinstance(beta, list) and len(set(steps)) == 1:
        return 1 - beta ** steps[0]
    return [1 - b**t for b, t in zip(a.each(beta, len(steps)), steps, strict=True)]


def _ratio(above: Tensors, below: Tensors, squares: Tensors) -> Tensors:
    """Return above / below, whose derivative is taken as 0 where the square is 0."""
    ratios = a.over(above, below)
    return [
        torch.where(square == 0, ratio.detach(), ratio)
        if ratio.requires_grad or transforms()
        else ratio
        for ratio, square in zip(ratios, squares, strict=True)
    ]


def rmsprop(
    lr: Hyper = 1e-2,
    *,
    alpha: Hyper = 0.99,
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 0.0,
    momentum: Hyper = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Return RMSprop as a pure optimizer.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.rmsprop(lr=0.1, alpha=0.75)
        >>> w = torch.tensor([1.0])
        >>> opt.step(w, torch.tensor([2.0]), opt.init(w))[0]
        tensor([0.8000])

    Args:
        lr: The learning rate; it and every other number may be a tensor or a tree, as in `sgd`.
        alpha: How much of the average of the squared gradient is kept.
        eps: Added to its root.
        weight_decay: This times the parameter is added to the gradient.
        momentum: How much of the last direction is kept.
        centered: Subtract the square of the average gradient.
        maximize: Go up.

    Returns:
        An `Optimizer` whose values are those of `torch.optim.RMSprop`; derivatives as in `adam`.

    Source:
        Tieleman and Hinton 2012, "Lecture 6.5: rmsprop"; Graves 2013 for `centered`,
        https://arxiv.org/abs/1308.0850; `torch.optim.RMSprop`
    """
    hyper = {
        "lr": lr,
        "alpha": alpha,
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "centered": centered,
        "maximize": maximize,
    }
    entries: dict[str, Callable[[Tensor], Any]] = {
        "square_avg": torch.zeros_like,
        "grad_avg": torch.zeros_like if centered else lambda leaf: None,
        "momentum_buffer": torch.zeros_like,
    }
    return Optimizer("rmsprop", hyper, entries, _rmsprop)


def _rmsprop(
    params: Tensors, grads: Tensors, state: list[dict[str, Any]], h: Mapping[str, Any]
) -> tuple[Tensors, list[dict[str, Any]]]:
    _refuse_complex("rmsprop", params)
    grads = _with_decay(params, grads, h)
    squares = a.mixed([entry["square_avg"] for entry in state], a.times(grads, grads), h["alpha"])
    means: list[Any] = [entry["grad_avg"] for entry in state]
    spread = squares
    if h["centered"]:
        means = a.mixed(means, grads, h["alpha"])
        spread = a.plus(squares, a.times(means, means), -1.0)
    direction = _ratio(grads, a.shifted(a.root(spread), h["eps"]), spread)
    buffers = [entry["momentum_buffer"] for entry in state]
    if not a.is_zero(h["momentum"]):
        direction = buffers = a.plus(direction, buffers, h["momentum"])
    new = [
        {"square_avg": s, "grad_avg": m, "momentum_buffer": b}
        for s, m, b in zip(squares, means, buffers, strict=True)
    ]
    return _moved(params, direction, h["lr"]), new
