"""What an optimizer is here: a pure function, with a state that is a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, TypeAlias

from torch import Tensor

from gradkit._core import pytree
from gradkit._core.params import expand_params
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.meta._arithmetic import Tensors

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
        scalar_hyperparams: A hyper-parameter is one value, and no tree with one for each leaf.
    """

    name: str
    hyper: Mapping[str, Hyper]
    entries: Mapping[str, Callable[[Tensor], Any]]
    rule: Rule
    scalar_hyperparams: bool = False

    def init(self, params: PyTree) -> State:
        """Return the state before the first step.

        Args:
            params: A tree of tensors; a module stands for its named parameters.

        Returns:
            For each entry (`"step"`, `"exp_avg"`, ...) a tree like `params`.
        """
        leaves, spec = expand_params(params, "params")
        return {
            name: pytree.unflatten(spec, [None if x is None else start(x) for x in leaves])
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
        leaves, spec = expand_params(params, "params")
        by_leaf = pytree.flatten_up_to(spec, "params", grads, "grads")
        self._check(leaves, by_leaf, state, spec, hyper)
        columns = {
            name: pytree.flatten_up_to(spec, "params", state[name], f"state[{name!r}]")
            for name in self.entries
        }
        settings = {**self.hyper, **hyper}
        params = pytree.unflatten(spec, leaves)  # an iterator can be read only once
        moving = [i for i, grad in enumerate(by_leaf) if grad is not None]
        if not moving:
            return pytree.unflatten(spec, leaves), state
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
        after = {name: pytree.unflatten(spec, column) for name, column in columns.items()}
        return pytree.unflatten(spec, leaves), after

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
        if self.scalar_hyperparams:
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
        spec: pytree.Structure,
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
                where = pytree.path(spec, index, root)
                raise LeafTypeError(
                    message(where, "a tensor or None", describe(wrong), "pass a tensor")
                )
            if not leaf.is_floating_point() and not leaf.is_complex():
                where = pytree.path(spec, index, "params")
                raise LeafTypeError(
                    message(where, "a floating-point tensor", describe(leaf), "give None as grad")
                )
            if grad.shape != leaf.shape:
                raise StructureError(
                    message(
                        pytree.path(spec, index, "grads"),
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
    leaves, spec = pytree.flatten(params)
    spread = pytree.broadcast_prefix(value, name, params, "params")
    for index, one in enumerate(spread):
        if leaves[index] is not None and not isinstance(one, Real | Tensor):
            raise LeafTypeError(
                message(
                    f"{name} of {pytree.path(spec, index, 'params')}",
                    "a number or a tensor",
                    describe(one),
                    f"{name}=0.1, or a tree like params",
                )
            )
    return [
        _fitting(spread[i], leaves[i], partial(pytree.path, spec, i, f"{name} of params"))
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
