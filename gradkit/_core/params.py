"""Params: a tree of tensors, modules, iterators and optimizers, flattened and checked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, count
from numbers import Number
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradkit._compat import distributed
from gradkit._compat.distributed import PROCESS_GROUPS
from gradkit._compat.modules import OF_TORCH_NN
from gradkit._core import modules, pytree
from gradkit._core.graph import refuse_lost_history
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, StructureError, UnsupportedGraphError, describe, message

_requires_grad, _is_leaf, _dtype = map(attrgetter, ("requires_grad", "is_leaf", "dtype"))
_PARAMETER = {nn.Parameter}  # a parameter is always a leaf
Tensors: TypeAlias = list[Tensor]
Grads: TypeAlias = list[Tensor | None]  # of each variable, None where it is not reached
CopyAll: TypeAlias = Callable[[list[Any]], Iterable[Any]]
_MODULE_OR_OPTIMIZER = (nn.Module, Optimizer)
EXPANDED = (nn.Module, Iterator, ValuesView, Optimizer)  # an object that stands for its tensors
DIFFERENTIABLE = "a floating-point or complex tensor"  # the words of errors for what they expect


@dataclass(slots=True)
class Params:
    """A tree of params, flattened."""

    leaves: list[Any]  # tensors and None in order, with modules and iterators expanded
    spec: Structure  # of the expanded tree, and of the gradients
    variables: list[Tensor]  # the tensors to differentiate with respect to, each once
    slots: Sequence[int | None]  # for each leaf its index in `variables`, if it is one
    root: str  # the name of the tree in error messages
    no_subclasses: bool  # no variable is of a subclass of torch's tensors and parameters
    only_leaves: bool  # no variable has been computed from others

    @property
    def all_variables(self) -> bool:
        """Whether each leaf is a variable, and no other leaf's."""
        # torch.compile in torch 2.11 does not trace whether two are one list.
        return len(self.variables) == len(self.leaves)

    @property
    def no_ties(self) -> bool:
        """Whether no variable is in two leaves; another leaf is frozen, or None."""
        others = len(self.leaves) - len(self.variables)
        return not others or others == self.slots.count(None)

    @property
    def first_leaf_of_variable(self) -> list[int]:
        """The index of the first leaf that is each variable; computed at every access."""
        first: dict[int, int] = {}
        for index, slot in enumerate(self.slots):
            if slot is not None:
                first.setdefault(slot, index)
        return list(first.values())  # variables are numbered in the order of their first leaves

    def per_leaf(self, values: Sequence[Any], copy: CopyAll | None = None) -> list[Any]:
        """Return for each leaf the value of its variable; `copy` is for further leaves of it."""
        by_leaf = [None if slot is None else values[slot] for slot in self.slots]
        if copy is not None:
            first = set(self.first_leaf_of_variable)
            tied = [i for i, value in enumerate(by_leaf) if value is not None and i not in first]
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

    def tree(self, tensors: Sequence[Any]) -> PyTree:
        """Return the tree, with these tensors in all places of the variables."""
        leaves = tensors if self.all_variables else self.with_variables(tensors)
        return pytree.unflatten(self.spec, leaves)

    def unflatten_each(self, rows: Sequence[Sequence[Tensor | None]]) -> list[PyTree]:
        """Return the tree for each row of gradients, which are not copied."""
        if not self.all_variables:
            rows = list(map(self.per_leaf, rows))
        return [pytree.rebuild(self.spec, row) for row in rows]

    def frozen_leaves(self) -> list[str]:
        """Return the paths of the leaves that could be variables if they required grad."""
        return [
            pytree.path(self.spec, index, self.root)
            for index, (leaf, slot) in enumerate(zip(self.leaves, self.slots, strict=True))
            if slot is None and leaf is not None
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex
        ]

    def path(self, variable: int) -> str:
        """Return the path of the first leaf that is this variable."""
        return pytree.path(self.spec, list(self.slots).index(variable), self.root)


# A call with these differentiates with respect to whatever leaves there are.
NO_PARAMS = Params(
    [], pytree.flatten(())[1], [], [], "params", no_subclasses=True, only_leaves=True
)


# Whether a leaf is a variable; raises, with its path, for what is none and no constant, either.
IsVariable: TypeAlias = Callable[[Any, Callable[[], str]], bool]


def read_params(
    tree: PyTree,
    root: str = "params",
    *,
    allow_distributed: bool = False,
    allow_whole_replicas: bool = False,
    is_variable: IsVariable | None = None,
) -> Params:
    """Expand and check a tree of params; by default, every leaf that requires grad is a variable.

    With `is_variable`, for a function of them, there may be none.
    """
    listed = modules.list_distinct(tree) if isinstance(tree, nn.Module) else None
    if listed is not None:
        leaves, spec, classes = listed
        if not (allow_distributed or classes <= OF_TORCH_NN):
            _refuse_distributed(classes, lambda: root)
        are_distinct = True
    else:
        if type(tree) is list and set(map(type, tree)) == _PARAMETER:  # as an optimizer has them
            leaves, spec = [*tree], pytree.spec_of_items(list, len(tree))
        else:
            leaves, spec = expand_params(tree, root, allow_distributed=allow_distributed)
        are_distinct = len(set(map(id, leaves))) == len(leaves)
    if not leaves and is_variable is None:
        raise StructureError(message(root, "at least one tensor", *why_empty(tree)))
    if PROCESS_GROUPS and not allow_distributed:
        path = partial(pytree.path, spec, root=root)
        _refuse_replicated(leaves, path, unless_whole=allow_whole_replicas)
    kinds = set(map(type, leaves))
    if are_distinct and kinds <= PLAIN_TYPES:
        if all(map(_requires_grad, leaves)) or (
            is_variable
            and nn.Parameter not in kinds
            and all(x.is_floating_point or x.is_complex for x in set(map(_dtype, leaves)))
        ):
            try:
                only_leaves = kinds == _PARAMETER or all(map(_is_leaf, leaves))
            except RuntimeError:
                refuse_lost_history(leaves, partial(pytree.path, spec, root=root))
                raise
            return Params(leaves, spec, leaves, range(len(leaves)), root, True, only_leaves)
        if kinds == _PARAMETER:  # some of them are frozen
            is_trained, numbers = list(map(_requires_grad, leaves)), count()
            slots = [next(numbers) if each else None for each in is_trained]
            return Params(leaves, spec, [*compress(leaves, is_trained)], slots, root, True, True)
    variables, slots = of_each(leaves, spec, root, is_variable or is_trained_leaf)
    no_subclasses = set(map(type, variables)) <= PLAIN_TYPES
    try:
        only_leaves = all(map(_is_leaf, variables))
    except RuntimeError:
        path = partial(pytree.path, spec, root=root)
        refuse_lost_history(variables, lambda slot: path(slots.index(slot)))
        raise
    return Params(leaves, spec, variables, slots, root, no_subclasses, only_leaves)


def of_each(
    leaves: list[Any], spec: Structure, root: str, is_variable: IsVariable
) -> tuple[Tensors, list[int | None]]:
    """Return the variables in leaves, and their slots; a tensor in several leaves is one."""
    variables: Tensors = []
    slots: list[int | None] = []
    seen: dict[Any, int] = {}
    is_traced = torch.compiler.is_compiling()
    if is_traced and False not in [type(x) is Tensor and x.is_floating_point() for x in leaves]:
        slots += [seen.setdefault(leaf, len(seen)) for leaf in leaves]
        return list(seen), slots
    for index, leaf in enumerate(leaves):
        if leaf is None or not is_variable(leaf, partial(pytree.path, spec, index, root)):
            slots.append(None)
            continue
        # An id would be a constant of what is compiled, and the next call's another one.
        slots.append(seen.setdefault(leaf if is_traced else id(leaf), len(seen)))
        if len(seen) > len(variables):
            variables.append(leaf)
    return variables, slots


def require_tensor(leaf: object, where: Callable[[], str]) -> Tensor:
    """Return a leaf of params that is a tensor with a shape, or raise."""
    if not isinstance(leaf, Tensor):
        expected = "a tensor, a module, an iterator of tensors, an optimizer or None"
        fixes = [fix for kind, fix in _ADVICE if isinstance(leaf, kind)]
        fix = (len(fixes) == 1 and pytree.as_known_tree(leaf, where())) or fixes[0]
        raise LeafTypeError(message(where(), expected, describe(leaf), fix))
    if not torch.compiler.is_compiling() and nn.parameter.is_lazy(leaf):
        got = "one of a lazy module that has not run yet"
        expected, fix = "a parameter with a shape", "run one forward pass first"
        raise LeafTypeError(message(where(), expected, got, fix))
    return leaf


def is_trained_leaf(leaf: object, where: Callable[[], str]) -> bool:
    """Return whether a leaf is a variable of losses that exist: it requires grad."""
    fix = (
        "leave it out, or put None in its place: integers have no gradient; a state_dict() "
        "holds buffers and detached tensors: pass the module"
    )
    return _is_variable(leaf, where, fix, plain_too=False)


def is_number_leaf(leaf: object, where: Callable[[], str]) -> bool:
    """Return whether a leaf is a variable of a function: a number, and no frozen parameter."""
    fix = "integers have no gradient: leave it out, as an argument that argnums does not name, or "
    fix += "as what fn refers to"
    return _is_variable(leaf, where, fix, plain_too=True)


def _is_variable(leaf: object, where: Callable[[], str], fix: str, *, plain_too: bool) -> bool:
    leaf = require_tensor(leaf, where)
    # A quantized module has integer parameters that the caller did not pick.
    if isinstance(leaf, nn.Parameter) and not leaf.requires_grad:
        return False
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return plain_too or leaf.requires_grad  # not read first: torch.compile guards on it
    raise LeafTypeError(message(where(), DIFFERENTIABLE, describe(leaf), fix))


_ADVICE: tuple[tuple[Any, str], ...] = (
    (str, "the tensor itself, and not its name; dict(model.named_parameters()), not its pairs"),
    (set | frozenset, "list(params): a set has no order"),
    (Callable, "call it: model.parameters(), not model.parameters"),
    (Number, "torch.tensor(value), or leave it out; for optimizer.param_groups, the optimizer"),
    (object, "pass a tensor, or put None in its place"),
)


def why_empty(tree: PyTree) -> tuple[str, str]:
    """Return what a tree without tensors is, and what to pass in its place."""
    if isinstance(tree, Iterator):
        return (
            "an iterator with nothing left in it: it can be read only once",
            "pass the module, or list(model.parameters())",
        )
    modules = [leaf for leaf in pytree.flatten(tree)[0] if isinstance(leaf, nn.Module)]
    if not modules:
        return "an empty tree", "pass the module, or list(model.parameters())"
    hidden = next(filter(None, map(_unregistered, modules)), None)
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
    if isinstance(tree, _MODULE_OR_OPTIMIZER):
        if isinstance(tree, Optimizer):
            return pytree.flatten(read_iterator(tree))
        params, classes = modules.named_parameters(tree)
        if not allow_distributed:
            _refuse_distributed(classes, lambda: root)
        return pytree.flatten(params)
    leaves, spec = pytree.flatten(tree)
    kinds = set(map(type, leaves))
    if kinds <= PLAIN_TYPES or not any(issubclass(kind, EXPANDED) for kind in kinds):
        return leaves, spec
    expanded: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            leaf, classes = modules.named_parameters(leaf)
            if not allow_distributed:
                _refuse_distributed(classes, partial(pytree.path, spec, index, root))
        expanded.append(read_iterator(leaf))
    return expand_params(
        pytree.unflatten(spec, expanded), root, allow_distributed=allow_distributed
    )


def read_iterator(leaf: Any) -> Any:
    """Return the tensors of an optimizer or an iterator, which is read; others as they are."""
    if isinstance(leaf, Optimizer):
        return tuple(chain.from_iterable(group["params"] for group in leaf.param_groups))
    return tuple(leaf) if isinstance(leaf, Iterator | ValuesView) else leaf


def refuse_distributed(module: nn.Module, where: Callable[[], str]) -> None:
    """Raise if a module, or a part of it, is one of DistributedDataParallel or FSDP."""
    _refuse_distributed(set(map(type, module.modules())), where)


def _refuse_distributed(classes: Iterable[type], where: Callable[[], str]) -> None:
    sharded = distributed.module_classes()
    for kind in classes:
        if DistributedDataParallel in kind.__mro__:  # issubclass takes longer: it has a metaclass
            got = "a DistributedDataParallel module: its gradients would not be reduced"
        elif issubclass(kind, sharded):
            got = "a module sharded by FSDP: its sharded parameters are not in the graph"
        else:
            continue
        fix = (
            "gradkit.distributed.value_and_grads(losses, module), or "
            "gradkit.distributed.per_loss_grads, or loss.backward()"
        )
        raise UnsupportedGraphError(message(where(), "a module of this process", got, fix))


def _refuse_replicated(
    leaves: Sequence[Any], path: Callable[[int], str], *, unless_whole: bool
) -> None:
    """Raise if a leaf is a parameter whose gradient DistributedDataParallel is to reduce."""
    if not distributed.replicas_of(leaves, now=True):
        return
    gc.collect()  # a replica that nobody uses any more may wait for that
    ids = set(map(id, leaves))
    for module in distributed.replicas_of(leaves, now=True):
        reduced = distributed.reduced_params([module]).keys()
        if unless_whole and ids.issuperset(reduced):
            continue  # the hooks of this one run, and reduce
        where = path(next(index for index, leaf in enumerate(leaves) if id(leaf) in reduced))
        got = "one that a DistributedDataParallel module has: its gradient would be this rank's, "
        got += "and not the mean over the ranks"
        raise UnsupportedGraphError(message(where, "a parameter of this process", got, _REDUCED))


_REDUCED = (
    "the same call of gradkit.distributed, as gradkit.distributed.value_and_grads(losses, params); "
    "or gradkit.minimize_(optimizer, losses), or loss.backward(). For this rank's gradient, which "
    "gradkit.distributed.all_reduce averages, make the call inside of ddp.no_sync()"
)
