"""The arguments of a function, the variables in those that are differentiated, and their grads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradkit import errors
from gradkit._compat.transforms import carries_graph, transforms
from gradkit._core import pytree
from gradkit._core.call import (
    UNUSED,
    Unused,
    check_bool,
    check_function,
    check_option,
    check_optional_bool,
)
from gradkit._core.graph import refuse_lost_history
from gradkit._core.ownership import PLAIN_TYPES, grad_dtype, own, zeros_for
from gradkit._core.params import (
    DIFFERENTIABLE,
    EXPANDED,
    Params,
    expand_params,
    require_tensor,
    why_empty,
    with_variables,
)
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.results_without_graph import (
    with_refused_derivatives,
    with_zero_derivatives,
    without_ended_graph,
)
from gradkit.errors import describe, message

ArgNums: TypeAlias = int | tuple[int, ...]
_dtype, _layout, _is_leaf, _requires_grad = map(
    attrgetter, ("dtype", "layout", "is_leaf", "requires_grad")
)


@dataclass(frozen=True)
class Arguments:
    """The positional arguments of a call, and which of them are differentiated."""

    args: tuple[Any, ...]  # all; in the differentiated ones, modules and iterators are expanded
    positions: tuple[int, ...]  # of the differentiated ones
    single: bool  # the caller named one position, not a tuple: its tree is the result
    params: Params  # the tuple of the differentiated ones, flattened
    dtypes: list[torch.dtype]  # of the gradient of each variable
    root: str | None  # what errors call the one argument; None is `args[0]`
    unused: Unused  # the option: what stands for an unreached gradient

    @property
    def variables(self) -> list[Tensor]:
        """The tensors to differentiate with respect to, each once."""
        return self.params.variables

    def with_variables(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments, with these tensors in all places of the variables."""
        params = self.params
        leaves = tensors if params.all_variables else params.with_variables(tensors)
        trees = pytree.unflatten(params.spec, leaves)
        return _replaced(self.args, self.positions, trees)

    def at(self, args: tuple[Any, ...]) -> Arguments:
        """Return the same variables of other arguments, of the same structure."""
        leaves, _ = pytree.flatten(tuple(args[position] for position in self.positions))
        variables = leaves if self.params.all_variables else self.params.per_variable(leaves)
        params = replace(self.params, leaves=leaves, variables=variables)
        return replace(self, args=args, params=params)

    def to_tree(self, grads: Sequence[Tensor | None], leading: tuple[int, ...] = ()) -> PyTree:
        """Return gradients as the tree of the differentiated arguments; frozen leaves are zeros."""
        params, by_leaf = self.params, grads
        if not params.all_variables:
            by_leaf = by_place = params.per_leaf(grads, copied)
            for index, leaf in enumerate(params.leaves):
                if self.unused != "none" and leaf is not None and params.slots[index] is None:
                    by_place[index] = _zeros(leaf, leading)
        trees = pytree.unflatten(params.spec, by_leaf)
        return trees[0] if self.single else trees

    def grads_to_tree(
        self,
        grads: list[Tensor | None],
        leading: tuple[int, ...] = (),
        *,
        losses: Sequence[Tensor] = (),
        refused: str | None = None,
    ) -> PyTree:
        """Return the result tree of gradients that this list alone refers to."""
        unreached = [index for index, grad in enumerate(grads) if grad is None]
        if self.unused == "error" and unreached:
            raise errors.UnreachedParamError(self._why_unreached(unreached[0]))
        result = _owned(grads, self.variables, leading)
        for index in unreached if self.unused == "zeros" else ():
            result[index] = _zeros(self.variables[index], leading)
        return self.to_tree(self._with_graphs(result, losses, refused), leading)

    def _with_graphs(
        self, grads: list[Tensor | None], losses: Sequence[Tensor], refused: str | None
    ) -> list[Tensor | None]:
        if torch.compiler.is_compiling():
            return grads
        if not any(map(carries_graph, losses)):
            has_any = any(grad is not None and grad.requires_grad for grad in grads)
            return list(map(without_ended_graph, grads)) if has_any else grads
        if refused is not None:
            return with_refused_derivatives(grads, losses, refused)
        if not transforms() and all(grad is None or grad.requires_grad for grad in grads):
            return grads
        return with_zero_derivatives(grads, [*losses, *pytree.tensors(self.args)])

    def path(self, variable: int) -> str:
        """Return the path of the first leaf that is this variable, as the caller would write it."""
        index = self.params.first_leaf_of_variable[variable]
        return _path(index, self.params.spec, self.positions, self.root)

    def _why_unreached(self, variable: int) -> str:
        got = (
            "none: the loss was not computed from it, or the path is cut (detach(), .data, "
            ".item(), no_grad)"
        )
        fix = "compute the losses from it, or pass it as an argument that argnums does not name"
        return message(self.path(variable), "a path from every loss, with unused='error'", got, fix)


def read_arguments(
    args: tuple[Any, ...],
    argnums: ArgNums,
    root: str | None = None,
    unused: Unused = "zeros",
    is_variable: Callable[[Any, Callable[[], str]], bool] | None = None,
) -> Arguments:
    """Check and flatten the arguments that a function is differentiated with respect to."""
    if unused != "zeros" and torch.compiler.is_compiling():
        expected = "'zeros' under torch.compile, which cannot tell what a loss reaches"
        raise errors.OptionError(message("unused", expected, repr(unused), "unused='zeros'"))
    positions = _positions(argnums, len(args))
    given = tuple(args[position] for position in positions)
    leaves, spec = pytree.flatten(given)
    kinds = set(map(type, leaves))
    if not kinds <= PLAIN_TYPES and any(issubclass(kind, EXPANDED) for kind in kinds):
        names = [root or f"args[{position}]" for position in positions]
        flat = [expand_params(tree, name) for tree, name in zip(given, names, strict=True)]
        expanded = tuple(pytree.unflatten(part_spec, part) for part, part_spec in flat)
        args = _replaced(args, positions, expanded)
        leaves, spec = pytree.flatten(expanded)
    path = partial(_path, spec=spec, positions=positions, root=root)
    if _are_plain_variables(leaves):
        try:
            only_leaves = all(map(_is_leaf, leaves))
        except RuntimeError:
            refuse_lost_history(leaves, path)
            raise
        slots = range(len(leaves))
        params = Params(leaves, spec, leaves, slots, root or "args", True, only_leaves)
    else:
        params = with_variables(leaves, spec, root or "args", path, is_variable or _is_variable)
    if not params.variables:
        where = root or ", ".join(f"args[{position}]" for position in positions)
        text = message(where, "a tensor to differentiate", *_why_none(given))
        raise errors.UnreachedParamError(text)
    # torch.compile cannot read `grad_dtype`, and in a transform the tensor is another one.
    is_traced = torch.compiler.is_compiling()
    dtypes = [x.dtype if is_traced else grad_dtype(x) for x in params.variables]
    arguments = Arguments(args, positions, isinstance(argnums, int), params, dtypes, root, unused)
    if not is_traced:
        expected = "a dense tensor, or a sparse one of layout torch.sparse_coo"
        fix = "pass tensor.to_sparse(); or compute the loss eagerly: "
        fix += "gradkit.value_and_grads(loss, w)"
        _refuse_other_layouts(arguments, _WRAPPED, expected, fix)
    return arguments


def refuse_sparse(arguments: Arguments) -> None:
    """Raise if an argument is a sparse tensor."""
    fix = "pass its values, and make the sparse tensor in fn"
    _refuse_other_layouts(arguments, _DENSE, "a dense tensor", fix)


def _refuse_other_layouts(
    arguments: Arguments, allowed: frozenset[torch.layout], expected: str, fix: str
) -> None:
    if not allowed.issuperset(map(_layout, arguments.variables)):
        index = [x.layout in allowed for x in arguments.variables].index(False)
        where, refused = arguments.path(index), arguments.variables[index]
        got = f"{describe(refused)}, {refused.layout}"
        raise errors.LeafTypeError(message(where, expected, got, fix))


_DENSE = frozenset({torch.strided})
# What torch.func can wrap.
_WRAPPED = _DENSE | {torch.sparse_coo}


def _are_plain_variables(leaves: list[Any]) -> bool:
    """Return whether every leaf is a tensor to differentiate, each another one; False if unsure."""
    # One attribute of all leaves at a time takes the least time; torch.compile cannot ask for ids.
    return (
        not torch.compiler.is_compiling()
        and set(map(type, leaves)) <= PLAIN_TYPES
        and all(x.is_floating_point or x.is_complex for x in set(map(_dtype, leaves)))
        and (nn.Parameter not in set(map(type, leaves)) or all(map(_requires_grad, leaves)))
        and len(set(map(id, leaves))) == len(leaves)
    )


def _replaced(
    args: tuple[Any, ...], positions: tuple[int, ...], trees: tuple[Any, ...]
) -> tuple[Any, ...]:
    new = list(args)
    for position, tree in zip(positions, trees, strict=True):
        new[position] = tree
    return tuple(new)


def _why_none(given: tuple[Any, ...]) -> tuple[str, str]:
    first = given[0]
    is_empty_module = isinstance(first, nn.Module) and not list(first.parameters())
    if len(given) == 1 and (isinstance(first, Iterator) or is_empty_module):
        return why_empty(first)
    return (
        "none (an empty tree, None, integers, or frozen parameters)",
        "name the arguments with argnums, and leave one parameter unfrozen",
    )


def _positions(argnums: object, count: int) -> tuple[int, ...]:
    if type(argnums) is int and 0 <= argnums < count:
        return (argnums,)
    if count == 0:
        expected, fix = "positional arguments of the call", "pass the params by position"
        raise errors.OptionError(message("argnums", expected, "none in it", fix))
    numbers = _check_argnums(argnums)
    positions = tuple(n + count if n < 0 else n for n in numbers)
    in_range = all(0 <= position < count for position in positions)
    if not in_range or len(set(positions)) < len(positions):
        expected = f"different positions among the {count} positional arguments of the call"
        fix = "pass what is differentiated by position, and name each position once"
        raise errors.OptionError(message("argnums", expected, repr(argnums), fix))
    return positions


def _check_argnums(argnums: object) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if numbers and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        return numbers
    expected = "an int or a tuple of ints"
    fix = "argnums=0; the params go to the function that the call returns: value_and_grads(fn)(w)"
    raise errors.OptionError(message("argnums", expected, describe(argnums), fix))


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
    fix = "pass it as an argument that argnums does not name: integers have no gradient"
    raise errors.LeafTypeError(message(where(), DIFFERENTIABLE, describe(leaf), fix))


def check_options(
    fn: object,
    argnums: object = 0,
    has_aux: object = False,
    unused: object = "zeros",
    create_graph: object = None,
) -> None:
    """Raise if what all functions of functions take is no function, or has no such value."""
    check_function(fn)
    _check_argnums(argnums)
    check_bool("has_aux", has_aux)
    check_option("unused", unused, UNUSED)
    check_optional_bool("create_graph", create_graph)


def _owned(
    grads: list[Tensor | None], variables: Sequence[Tensor], leading: tuple[int, ...] = ()
) -> list[Tensor | None]:
    """Return gradients that share memory with nothing; empties the list, which must be the last."""
    reached = [index for index, grad in enumerate(grads) if grad is not None]
    present = [grad for grad in grads if grad is not None]
    count = len(grads)
    grads.clear()  # `own` looks for further references
    likes = variables if len(reached) == count else [variables[index] for index in reached]
    # In a transform, and while torch.compile traces, nobody can tell what shares memory.
    if transforms():
        present = [grad.clone() for grad in present]
    elif torch.compiler.is_compiling():
        if leading:
            buffers = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in present]
        else:
            pairs = zip(present, likes, strict=True)
            buffers = [torch.empty_like(like, dtype=grad.dtype) for grad, like in pairs]
        present = copied(present, buffers)
    elif any(map(_requires_grad, present)):
        present = [grad if grad.requires_grad else grad.clone() for grad in present]
    else:
        own(present, likes, leading)
    if len(reached) == count:
        return list(present)
    by_variable = dict(zip(reached, present, strict=True))
    return [by_variable.get(index) for index in range(count)]


def copied(tensors: Sequence[Tensor], buffers: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return copies that share no memory, in these buffers where torch.compile traces."""
    if not tensors or not torch.compiler.is_compiling():
        return [tensor.clone() for tensor in tensors]
    if transforms() or any(tensor.requires_grad for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    # By one operation for all: of several clones of one tensor, inductor makes one.
    into = [torch.empty_like(tensor) for tensor in tensors] if buffers is None else list(buffers)
    torch._foreach_copy_(into, list(tensors))
    return into


def _zeros(variable: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return a dense zero gradient, also while torch.compile traces."""
    if torch.compiler.is_compiling():
        shape = (*leading, *variable.shape)
        return torch.zeros(shape, dtype=variable.dtype, device=variable.device)
    return zeros_for(variable, leading)
