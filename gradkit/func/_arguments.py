"""The arguments of a function, and the variables in those that are differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, ValuesView
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradkit._core import pytree
from gradkit._core.ownership import grad_dtype
from gradkit._core.params import (
    Params,
    expand_params,
    require_tensor,
    why_empty,
    with_variables,
)
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, StructureError, UnreachedParamError, describe, message
from gradkit.func._results import copied, owned, zeros

ArgNums: TypeAlias = int | tuple[int, ...]


@dataclass(frozen=True)
class Arguments:
    """The positional arguments of a call, and which of them are differentiated.

    Attributes:
        args: All of them; the differentiated ones with modules and iterators expanded.
        positions: The indices of the differentiated ones.
        single: The caller named one position, not a tuple, so that its tree is the result.
        params: The tuple of the differentiated ones, flattened.
        dtypes: The dtype of the gradient of each variable.
        root: What errors call the one argument; None is `args[0]`.
    """

    args: tuple[Any, ...]
    positions: tuple[int, ...]
    single: bool
    params: Params
    dtypes: list[torch.dtype]
    root: str | None

    @property
    def variables(self) -> list[Tensor]:
        """The tensors to differentiate with respect to, each once."""
        return self.params.variables

    def with_variables(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments, with these tensors in all places of the variables."""
        args = list(self.args)
        trees = pytree.unflatten(self.params.spec, self.params.with_variables(tensors))
        for position, arg in zip(self.positions, trees, strict=True):
            args[position] = arg
        return tuple(args)

    def at(self, args: tuple[Any, ...]) -> Arguments:
        """Return the same variables of other arguments, of the same structure."""
        leaves, _ = pytree.flatten(tuple(args[position] for position in self.positions))
        variables = self.params.per_variable(leaves)
        return replace(
            self, args=args, params=replace(self.params, leaves=leaves, variables=variables)
        )

    def to_tree(
        self, grads: Sequence[Tensor | None], leading: tuple[int, ...] = (), unused: str = "zeros"
    ) -> PyTree:
        """Return gradients as the tree of the differentiated arguments; frozen leaves are zeros."""
        by_leaf = self.params.per_leaf(grads, copied)
        if unused != "none":
            for index, (leaf, slot) in enumerate(
                zip(self.params.leaves, self.params.slots, strict=True)
            ):
                if slot is None and leaf is not None:
                    by_leaf[index] = zeros(leaf, leading)
        trees = pytree.unflatten(self.params.spec, by_leaf)
        return trees[0] if self.single else trees

    def finish(
        self, grads: list[Tensor | None], unused: str, leading: tuple[int, ...] = ()
    ) -> PyTree:
        """Return the result tree of gradients that this list alone refers to; raise for `error`."""
        unreached = [index for index, grad in enumerate(grads) if grad is None]
        if unused == "error" and unreached:
            raise UnreachedParamError(self._unreached(unreached[0]))
        result = owned(grads, self.variables, leading)
        if unused != "none":
            for index in unreached:
                result[index] = zeros(self.variables[index], leading)
        return self.to_tree(result, leading, unused)

    def _unreached(self, variable: int) -> str:
        index = self.params.first_leaf_of_variable[variable]
        return message(
            _path(index, self.params.spec, self.positions, self.root),
            "a path from every loss, with unused='error'",
            "none: the loss was not computed from it, or the path is cut (detach(), .data, "
            ".item(), no_grad)",
            "compute the losses from it, or pass it as an argument that argnums does not name",
        )


def read_arguments(args: tuple[Any, ...], argnums: ArgNums, root: str | None = None) -> Arguments:
    """Check and flatten the arguments that a function is differentiated with respect to."""
    positions = _positions(argnums, len(args))
    given = tuple(args[position] for position in positions)
    leaves, spec = pytree.flatten(given)
    if any(isinstance(leaf, _EXPANDED) for leaf in leaves):
        args = _expanded(args, positions, root)
        leaves, spec = pytree.flatten(tuple(args[position] for position in positions))
    path = partial(_path, spec=spec, positions=positions, root=root)
    params = with_variables(leaves, spec, root or "args", path, _is_variable)
    if not params.variables:
        names = root or ", ".join(f"args[{position}]" for position in positions)
        raise UnreachedParamError(message(names, "a tensor to differentiate", *_why_none(given)))
    dtypes = [_grad_dtype(tensor) for tensor in params.variables]
    return Arguments(args, positions, isinstance(argnums, int), params, dtypes, root)


_EXPANDED = (nn.Module, Iterator, ValuesView, Optimizer)


def _expanded(
    args: tuple[Any, ...], positions: tuple[int, ...], root: str | None
) -> tuple[Any, ...]:
    expanded = list(args)
    for position in positions:
        leaves, spec = expand_params(args[position], root or f"args[{position}]")
        expanded[position] = pytree.unflatten(spec, leaves)
    return tuple(expanded)


def _why_none(given: tuple[Any, ...]) -> tuple[str, str]:
    if len(given) == 1 and isinstance(given[0], nn.Module | Iterator):
        got, fix = why_empty(given[0])
        if not isinstance(given[0], nn.Module) or not any(True for _ in given[0].parameters()):
            return got, fix
    return (
        "none (an empty tree, None, or frozen parameters)",
        "name the arguments with argnums, and leave one parameter unfrozen",
    )


def _positions(argnums: object, count: int) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise StructureError(
            message("argnums", "an int or a tuple of ints", describe(argnums), "argnums=0")
        )
    positions = tuple(n + count if n < 0 else n for n in numbers)
    in_range = all(0 <= position < count for position in positions)
    if not in_range or len(set(positions)) < len(positions):
        raise StructureError(
            message(
                "argnums",
                f"different positions among the {count} positional arguments of the call",
                repr(argnums),
                "pass what is differentiated by position, and name each position once",
            )
        )
    return positions


def _path(index: int, spec: Structure, positions: tuple[int, ...], root: str | None) -> str:
    # As the caller numbers them: the first of several differentiated arguments may be args[2].
    inside = pytree.path(spec, index, "")
    number, _, rest = inside.removeprefix("[").partition("]")
    return f"{root or f'args[{positions[int(number)]}]'}{rest}"


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    leaf = require_tensor(leaf, where)
    if isinstance(leaf, nn.Parameter) and not leaf.requires_grad:
        return False
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return True
    raise LeafTypeError(
        message(
            where(),
            "a floating-point or complex tensor",
            describe(leaf),
            "pass it as an argument that argnums does not name: integers have no gradient",
        )
    )


def _grad_dtype(tensor: Tensor) -> torch.dtype:
    # torch.compile cannot read the attribute, and in a transform the tensor is another one.
    return tensor.dtype if torch.compiler.is_compiling() else grad_dtype(tensor)
