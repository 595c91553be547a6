"""Params: a tree of tensors, modules, iterators and optimizers, flattened and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass
from functools import partial
from numbers import Number
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradkit._core import pytree
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.wrapped_modules import refuse_distributed
from gradkit.errors import LeafTypeError, StructureError, describe, message

_requires_grad, _is_leaf = attrgetter("requires_grad"), attrgetter("is_leaf")
Copy: TypeAlias = Callable[[list[Any]], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Params:
    """A tree of params, flattened.

    Attributes:
        leaves: Tensors and None in the order of the tree, with modules and iterators expanded.
        spec: The structure of the expanded tree, which is that of the gradients.
        variables: The tensors to differentiate with respect to, each once.
        slots: For each leaf its index in `variables`; None for a leaf without a gradient.
        root: The name of the tree in error messages.
        plain_leaves: Whether all variables are leaf tensors, and none is of a subclass.
    """

    leaves: list[Any]
    spec: Structure
    variables: list[Tensor]
    slots: Sequence[int | None]
    root: str
    plain_leaves: bool

    @property
    def first_leaf_of_variable(self) -> list[int]:
        """The index of the first leaf that is each variable; computed at every access."""
        first: dict[int, int] = {}
        for index, slot in enumerate(self.slots):
            if slot is not None:
                first.setdefault(slot, index)
        return list(first.values())  # variables are numbered in the order of their first leaves

    def per_leaf(self, values: Sequence[Any], copy: Copy | None = None) -> list[Any]:
        """Return for each leaf the value of its variable; `copy` is for further leaves of it."""
        by_leaf = [None if slot is None else values[slot] for slot in self.slots]
        if copy is not None:
            first = self.first_leaf_of_variable
            tied = [
                index
                for index, slot in enumerate(self.slots)
                if slot is not None and first[slot] != index and by_leaf[index] is not None
            ]
            for index, value in zip(tied, copy([by_leaf[i] for i in tied]), strict=True):
                by_leaf[index] = value
        return by_leaf

    def per_variable(self, by_leaf: Sequence[Any]) -> list[Any]:
        """Return for each variable the value of its first leaf."""
        return [by_leaf[index] for index in self.first_leaf_of_variable]

    def with_variables(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the leaves, with these tensors in place of the variables."""
        pairs = zip(self.leaves, self.slots, strict=True)
        return [leaf if slot is None else tensors[slot] for leaf, slot in pairs]

    def unflatten(self, grads: Sequence[Tensor | None], *, copy_ties: bool) -> PyTree:
        """Return the tree with each variable's gradient, copied or not, in all its places."""
        if len(grads) == len(self.leaves):
            return pytree.unflatten(self.spec, grads)
        return pytree.unflatten(self.spec, self.per_leaf(grads, _clones if copy_ties else None))

    def path(self, variable: int) -> str:
        """Return the path of the first leaf that is this variable."""
        return pytree.path(self.spec, list(self.slots).index(variable), self.root)


# Of a call that differentiates with respect to whatever leaves there are.
NO_PARAMS = Params([], pytree.flatten(())[1], [], [], "params", True)


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def read_params(tree: PyTree, root: str = "params", *, allow_distributed: bool = False) -> Params:
    """Expand and check a tree of params; every leaf that requires grad is a variable."""
    leaves, spec = expand_params(tree, root, allow_distributed=allow_distributed)
    if not leaves:
        raise StructureError(message(root, "at least one tensor", *why_empty(tree)))
    if (
        set(map(type, leaves)) <= PLAIN_TYPES
        and all(map(_requires_grad, leaves))
        and len(set(map(id, leaves))) == len(leaves)
    ):
        return Params(leaves, spec, leaves, range(len(leaves)), root, all(map(_is_leaf, leaves)))
    return with_variables(leaves, spec, root, partial(pytree.path, spec, root=root), _is_variable)


def with_variables(
    leaves: list[Any],
    spec: Structure,
    root: str,
    path: Callable[[int], str],
    is_variable: Callable[[Any, Callable[[], str]], bool],
) -> Params:
    """Return the params of these leaves; a tensor in several of them is one variable."""
    variables: list[Tensor] = []
    slots: list[int | None] = []
    find = _finder(variables)
    for index, leaf in enumerate(leaves):
        if leaf is None or not is_variable(leaf, partial(path, index)):
            slots.append(None)
            continue
        slot = find(leaf)
        if slot == len(variables):
            variables.append(leaf)
        slots.append(slot)
    plain_leaves = not torch.compiler.is_compiling() and _are_plain_leaves(variables)
    return Params(leaves, spec, variables, slots, root, plain_leaves)


def _are_plain_leaves(variables: list[Tensor]) -> bool:
    return set(map(type, variables)) <= PLAIN_TYPES and all(map(_is_leaf, variables))


def _finder(tensors: list[Tensor]) -> Callable[[Tensor], int]:
    """Return a function that gives a tensor's index in a growing list, its length if absent."""
    if torch.compiler.is_compiling():
        # An id would be a constant of the compiled function, and the next call compiled anew.
        return lambda leaf: next((i for i, t in enumerate(tensors) if t is leaf), len(tensors))
    seen: dict[int, int] = {}
    return lambda leaf: seen.setdefault(id(leaf), len(tensors))


def require_tensor(leaf: object, where: Callable[[], str]) -> Tensor:
    """Return a leaf of params that is a tensor with a shape, or raise."""
    if not isinstance(leaf, Tensor):
        kinds = "a tensor, a module, an iterator of tensors, an optimizer or None"
        raise LeafTypeError(message(where(), kinds, describe(leaf), _advice_for_a_param(leaf)))
    if not torch.compiler.is_compiling() and nn.parameter.is_lazy(leaf):
        got = "one of a lazy module that has not run yet"
        fix = "run one forward pass first"
        raise LeafTypeError(message(where(), "a parameter with a shape", got, fix))
    return leaf


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    leaf = require_tensor(leaf, where)
    if leaf.requires_grad:
        return True
    # A quantized module has integer parameters that the caller did not pick.
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex or isinstance(leaf, nn.Parameter):
        return False
    raise LeafTypeError(
        message(
            where(),
            "a floating-point or complex tensor",
            describe(leaf),
            "leave it out, or put None in its place: integers have no gradient; a state_dict() "
            "holds buffers and detached tensors: pass the module",
        )
    )


def _advice_for_a_param(leaf: object) -> str:
    if isinstance(leaf, str):
        return "dict(model.named_parameters()), not its pairs"
    if isinstance(leaf, set | frozenset):
        return "list(params): a set has no order"
    if callable(leaf):
        return "call it: model.parameters(), not model.parameters"
    if isinstance(leaf, Number):
        return "torch.tensor(value), or leave it out"
    return "pass a tensor, or put None in its place"


def why_empty(tree: PyTree) -> tuple[str, str]:
    """Return what a tree without tensors is, and what to pass in its place."""
    if isinstance(tree, Iterator):
        return (
            "an iterator with nothing left in it: it can be read only once",
            "pass the module, or list(model.parameters())",
        )
    if not isinstance(tree, nn.Module):
        return "an empty tree", "pass the module, or list(model.parameters())"
    hidden = _unregistered(tree)
    if hidden is None:
        return "a module without parameters", "pass the module that the losses were computed with"
    return (
        f"a module without parameters: the layers in {hidden} are not registered",
        "nn.ModuleList(layers) or nn.ModuleDict(layers) in place of a plain list or dict",
    )


def _unregistered(module: nn.Module) -> str | None:
    """Return the path of a plain list or dictionary of modules inside a module, if there is one."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute == "_modules" or not isinstance(value, list | tuple | dict):
                continue
            items = value.values() if isinstance(value, dict) else value
            if any(isinstance(item, nn.Module) for item in items):
                return f"module.{name}.{attribute}" if name else f"module.{attribute}"
    return None


def expand_params(
    tree: PyTree, root: str, *, allow_distributed: bool = False
) -> tuple[list[Any], Structure]:
    """Flatten a tree in which every module, iterator and optimizer is replaced by its tensors."""
    leaves, spec = pytree.flatten(tree)
    expanders = {kind: _expander(kind) for kind in set(map(type, leaves)) - PLAIN_TYPES}
    if not any(expanders.values()):
        return leaves, spec
    expanded: list[Any] = []
    for index, leaf in enumerate(leaves):
        expander = expanders.get(type(leaf))
        if isinstance(leaf, nn.Module) and not allow_distributed:
            refuse_distributed(leaf, partial(pytree.path, spec, index, root))
        expanded.append(expander(leaf) if expander else leaf)
    return expand_params(pytree.unflatten(spec, expanded), root)


def _expander(kind: type) -> Callable[[Any], PyTree] | None:
    if issubclass(kind, nn.Module):
        return lambda module: dict(module.named_parameters())
    if issubclass(kind, (Iterator, ValuesView)):
        return tuple
    if issubclass(kind, Optimizer):
        return lambda opt: tuple(p for group in opt.param_groups for p in group["params"])
    return None
