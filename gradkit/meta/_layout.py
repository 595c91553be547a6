"""Trees opened once into flat lists, and closed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradkit._core import pytree
from gradkit._core.inputs import expand_params
from gradkit._core.pytree import PyTree, Structure
from gradkit.func._variables import Variables, read_variables


@dataclass(frozen=True)
class ParamLayout:
    """Where the variables, each distinct tensor to adapt, stand in the tree of params.

    Attributes:
        spec: The structure of params.
        leaves: Its leaves as given, frozen parameters and None among them.
        slots: For each leaf the index of its variable; None for a fixed leaf.
        first: For each variable the index of its first leaf.
        variables: The variables, as the functional calls take them.
    """

    spec: Structure
    leaves: list[Any]
    slots: Sequence[int | None]
    first: list[int]
    variables: Variables

    @property
    def tensors(self) -> list[Tensor]:
        """The variables as given."""
        return self.variables.tensors

    def by_variable(self, by_leaf: Sequence[Any]) -> list[Any]:
        """Return the values of the variables, from one value for each leaf."""
        return [by_leaf[index] for index in self.first]

    def tree(self, by_variable: Sequence[Any], fixed: Sequence[Any] | None = None) -> PyTree:
        """Return params with new values of the variables; `fixed` replaces the fixed leaves."""
        others = self.leaves if fixed is None else fixed
        return pytree.unflatten(
            self.spec,
            [
                other if slot is None else by_variable[slot]
                for slot, other in zip(self.slots, others, strict=True)
            ],
        )

    def movable(self) -> list[Any]:
        """Return the leaves, with None in place of frozen parameters."""
        pairs = zip(self.slots, self.leaves, strict=True)
        return [None if slot is None else leaf for slot, leaf in pairs]

    def grads_tree(self, grads: Sequence[Tensor]) -> PyTree:
        """Return gradients as a tree like params: copies in tied places, zeros in frozen ones."""
        return self.variables.to_tree(grads)

    def flat_variables(self, tensors: Sequence[Tensor]) -> Variables:
        """Return tensors as the variables of a function of one list."""
        flat = read_variables((list(tensors),), 0, "params")
        return replace(flat, dtypes=self.variables.dtypes)


def read_params(params: PyTree) -> ParamLayout:
    """Open and check params."""
    leaves, spec = expand_params(params, "params")
    variables = read_variables((pytree.unflatten(spec, leaves),), 0, "params")
    first: dict[int, int] = {}
    for index, slot in enumerate(variables.slots):
        if slot is not None:
            first.setdefault(slot, index)
    return ParamLayout(spec, leaves, variables.slots, list(first.values()), variables)


def open_tensors(tree: PyTree) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], PyTree]]:
    """Return the tensors of a tree, and a function that puts others in their places."""
    leaves, spec = pytree.flatten(tree)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

    def close(tensors: Iterable[Tensor]) -> PyTree:
        rest = iter(tensors)
        return pytree.unflatten(
            spec, [next(rest) if t else leaf for t, leaf in zip(is_tensor, constants, strict=True)]
        )

    # Without the tensors: the function must not keep them alive.
    constants = [None if t else leaf for t, leaf in zip(is_tensor, leaves, strict=True)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], close
