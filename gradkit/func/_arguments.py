"""The arguments of a function, the variables in those that are differentiated, and their grads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradkit._compat.dynamo import begin_trace
from gradkit._compat.transforms import carries_graph, transforms
from gradkit._core import call as options
from gradkit._core import params, pytree
from gradkit._core.call import Unused
from gradkit._core.ownership import grad_dtype, owned, zeros_for
from gradkit._core.params import Grads, IsVariable, Params, Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import (
    with_refused_derivatives,
    with_zero_derivatives,
    without_ended_graph,
)
from gradkit.errors import LeafTypeError, OptionError, UnreachedParamError, describe, message

ArgNums: TypeAlias = int | tuple[int, ...]
_layout, _grad_dtype = attrgetter("layout"), attrgetter("grad_dtype")


@dataclass(slots=True)
class Arguments(Params):
    """The differentiated arguments of a call: one tree, or a dictionary of trees by position."""

    given: tuple[Any, ...]  # all positional arguments
    positions: tuple[int, ...]  # of the differentiated ones
    single: bool  # the caller named one position, not a tuple: its tree is the result
    dtypes: list[torch.dtype]  # of the gradient of each variable
    unused: Unused  # the option: what stands for an unreached gradient

    @property
    def args(self) -> tuple[Any, ...]:
        """All arguments; in the differentiated ones, modules and iterators are expanded."""
        return self.args_with(self.variables)

    def args_with(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return all arguments, with these tensors in all places of the variables."""
        tree, given = self.tree(tensors), self.given
        if self.single:
            return *given[: self.positions[0]], tree, *given[self.positions[0] + 1 :]
        return tuple([tree.get(index, arg) for index, arg in enumerate(given)])

    def at(self, args: tuple[Any, ...], *, same: bool = False) -> Arguments:
        """Return other arguments, of the same structure; their variables may be the same."""
        leaves, variables = self.leaves, self.variables
        if not same:
            trees = {position: args[position] for position in self.positions}
            leaves, _ = pytree.flatten(trees[self.positions[0]] if self.single else trees)
            variables = leaves if self.all_variables else self.per_variable(leaves)
        # The constructor is called itself: a trace of `replace` takes long.
        facts: Any = self.slots, self.root, self.no_subclasses, self.only_leaves
        of_call: Any = args, self.positions, self.single, self.dtypes, self.unused
        return Arguments(leaves, self.spec, variables, *facts, *of_call)

    def to_tree(self, grads: Sequence[Tensor | None], leading: tuple[int, ...] = ()) -> PyTree:
        """Return gradients as the tree of the differentiated arguments; frozen leaves are zeros."""
        if not self.all_variables:
            by_leaf = self.per_leaf(grads, copied)
            for index, leaf in enumerate(self.leaves):
                if self.unused != "none" and leaf is not None and self.slots[index] is None:
                    by_leaf[index] = zeros_for(leaf, leading)
            grads = by_leaf
        trees = pytree.unflatten(self.spec, grads)
        return trees if self.single else tuple([trees[position] for position in self.positions])

    def grads_to_tree(
        self,
        grads: Grads,
        leading: tuple[int, ...] = (),
        *,
        losses: Sequence[Tensor] = (),
        refused: str | None = None,
        is_plain: bool = False,
    ) -> PyTree:
        """Return the result tree of gradients that this list alone refers to."""
        # `is_plain`: no gradient carries a graph, and no transform or trace is around.
        if torch.compiler.is_compiling():  # all gradients are there
            return self.to_tree(_owned(grads, self.variables, leading), leading)
        unreached = [index for index, grad in enumerate(grads) if grad is None]
        if self.unused == "error" and unreached:
            raise UnreachedParamError(message(self.path(unreached[0]), *_UNREACHED))
        result = (owned if is_plain else _owned)(grads, self.variables, leading)
        for index in unreached if self.unused == "zeros" else ():
            result[index] = zeros_for(self.variables[index], leading)
        if not is_plain:
            recorded = [grad.requires_grad for grad in result if grad is not None]
            if not any(map(carries_graph, losses)):
                result = list(map(without_ended_graph, result)) if any(recorded) else result
            elif refused is not None:
                result = with_refused_derivatives(result, losses, refused)
            elif transforms() or not all(recorded):
                result = with_zero_derivatives(result, [*losses, *pytree.tensors(self.args)])
        return self.to_tree(result, leading)

    def refuse_layouts(self, allowed: set[torch.layout], expected: str, fix: str) -> None:
        """Raise if a variable has none of these layouts."""
        if not allowed.issuperset(map(_layout, self.variables)):
            index = [x.layout in allowed for x in self.variables].index(False)
            refused = self.variables[index]
            got = f"{describe(refused)}, {refused.layout}"
            if refused.layout == torch.jagged:
                fix = "pass its values(), and nest them in fn; or compute the loss eagerly"
            raise LeafTypeError(message(self.path(index), expected, got, fix))


_UNREACHED = (
    "a path from every loss, with unused='error'",
    "none: the loss was not computed from it, or the path is cut (detach(), .data, .item(), "
    "no_grad)",
    "compute the losses from it, or pass it as an argument that argnums does not name",
)
# torch.func can wrap the first, and differentiate only the second through views.
_WRAPPED = (
    {torch.strided, torch.sparse_coo},
    "a dense tensor, or a sparse one of layout torch.sparse_coo",
    "pass tensor.to_sparse(); or compute the loss eagerly: gradkit.value_and_grads(loss, w)",
)
_DENSE = {torch.strided}, "a dense tensor", "pass its values, and make the sparse tensor in fn"


def read_arguments(
    args: tuple[Any, ...],
    argnums: ArgNums,
    root: str | None = None,
    unused: Unused = "zeros",
    is_variable: IsVariable = params.is_number_leaf,
    dense: bool = False,
    allow_distributed: bool = False,
) -> Arguments:
    """Check and flatten the arguments that a function is differentiated with respect to."""
    # `root`: what errors call the one argument; by default `args[0]`. `dense`: none may be sparse.
    slots: Sequence[int | None]
    is_traced = torch.compiler.is_compiling()
    if torch.compiler.is_dynamo_compiling():
        begin_trace()
    if unused != "zeros" and is_traced:
        expected = "'zeros' under torch.compile, which cannot tell what a loss reaches"
        raise OptionError(message("unused", expected, repr(unused), "unused='zeros'"))
    single, count = isinstance(argnums, int), len(args)
    positions: tuple[int, ...]
    if type(argnums) is int and 0 <= argnums < count:
        positions = (argnums,)
    else:
        positions = _positions(argnums, count)
    if is_traced:  # the given numbers are symbols with dynamic=True
        positions = tuple([i for position in positions for i in range(count) if i == position])
    given = args[positions[0]] if single else {position: args[position] for position in positions}
    root = root or (f"args[{positions[0]}]" if single else "args")
    if is_traced:  # each class of which a trace makes an instance takes long
        leaves, spec = params.expand_params(given, root)
        variables, slots = params.of_each(leaves, spec, root, is_variable)
        # torch.compile cannot read `grad_dtype`, and in a transform the tensor is another one.
        flags, dtypes = (False, False), [x.dtype for x in variables]
    else:
        flat = params.read_params(
            given, root, is_variable=is_variable, allow_distributed=allow_distributed
        )
        leaves, spec, variables, slots = flat.leaves, flat.spec, flat.variables, flat.slots
        flags = flat.no_subclasses, flat.only_leaves
        # `map` of an attribute takes no time.
        dtypes = list(map(_grad_dtype, variables)) if flat.only_leaves else []
        if not dtypes or None in dtypes:
            dtypes = list(map(grad_dtype, variables))
    if not variables:
        where = root if single else ", ".join(f"{root}[{position}]" for position in positions)
        why = _why_none(args[positions[0]], positions, by_number=root.startswith("args"))
        raise UnreachedParamError(message(where, "a tensor to differentiate", *why))
    facts = slots, root, *flags, args, positions, single, dtypes, unused
    arguments = Arguments(leaves, spec, variables, *facts)
    if not is_traced:
        arguments.refuse_layouts(*_WRAPPED)
    if dense:
        arguments.refuse_layouts(*_DENSE)
    return arguments


def _why_none(first: object, positions: tuple[int, ...], *, by_number: bool) -> tuple[str, str]:
    is_empty_module = isinstance(first, nn.Module) and not list(first.parameters())
    if len(positions) == 1 and (isinstance(first, Iterator) or is_empty_module):
        return params.why_empty(first)
    return (
        "none (an empty tree, None, integers, or frozen parameters)",
        ("name the arguments with argnums, and " if by_number else "")
        + "leave one parameter unfrozen",
    )


def _positions(argnums: object, count: int) -> tuple[int, ...]:
    if count == 0:
        expected, fix = "positional arguments of the call", "pass the params by position"
        raise OptionError(message("argnums", expected, "none in it", fix))
    numbers = _check_argnums(argnums)
    positions = tuple(n + count if n < 0 else n for n in numbers)
    in_range = all(0 <= position < count for position in positions)
    if not in_range or len(set(positions)) < len(positions):
        expected = f"different positions among the {count} positional arguments of the call"
        fix = "pass what is differentiated by position, and name each position once"
        raise OptionError(message("argnums", expected, repr(argnums), fix))
    return positions


def _check_argnums(argnums: object) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if numbers and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        return numbers
    expected = "an int or a tuple of ints"
    fix = "argnums=0; the params go to the function that the call returns: value_and_grads(fn)(w)"
    if argnums and isinstance(argnums, list | range) and all(type(n) is int for n in argnums):
        fix = f"argnums={tuple(argnums)}"
    raise OptionError(message("argnums", expected, describe(argnums), fix))


def check_options(
    fn: object,
    argnums: object = 0,
    has_aux: object = False,
    unused: object = "zeros",
    create_graph: object = None,
) -> None:
    """Raise if what all functions of functions take is no function, or has no such value."""
    are_flags = type(has_aux) is bool and (create_graph is None or type(create_graph) is bool)
    if are_flags and type(argnums) is int and type(unused) is str and unused == "zeros":
        options.check_function(fn)
        return
    options.check_function(fn)
    _check_argnums(argnums)
    options.check_option("has_aux", has_aux, (False, True))
    options.check_option("unused", unused, options.UNUSED)
    options.check_option("create_graph", create_graph, (None, False, True))


def _owned(grads: Grads, variables: Sequence[Tensor], leading: tuple[int, ...]) -> Grads:
    """Return gradients that share memory with nothing; nothing but the list may refer to them."""
    # Nobody can tell what shares memory in a transform, or while torch.compile traces.
    is_traced = torch.compiler.is_compiling()
    if transforms() or True in [grad is not None and grad.requires_grad for grad in grads]:
        keep = not (transforms() or is_traced)
        return [g if g is None or (keep and g.requires_grad) else g.clone() for g in grads]
    if not is_traced:
        return owned(grads, variables, leading)
    given: Any = grads  # none is None there
    if leading:
        buffers = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    else:
        pairs = zip(given, variables, strict=True)
        buffers = [torch.empty_like(like, dtype=x.dtype) for x, like in pairs]
    torch._foreach_copy_(buffers, given)
    return [*buffers]


def copied(tensors: Sequence[Tensor]) -> Tensors:
    """Return copies that share no memory."""
    is_eager = not tensors or not torch.compiler.is_compiling()
    if is_eager or transforms() or True in [tensor.requires_grad for tensor in tensors]:
        return [tensor.clone() for tensor in tensors]
    # A single operation copies all: of several clones of one tensor, inductor makes one.
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(buffers, list(tensors))
    return buffers
