"""What a function is differentiated by: its chosen arguments, each tensor once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, ValuesView
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.ownership import grad_dtype, own, zeros_for
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import (
    LeafTypeError,
    StructureError,
    UnreachedParamError,
    describe,
    message,
)

ArgNums: TypeAlias = int | tuple[int, ...]


@dataclass(frozen=True)
class Variables:
    """The differentiated arguments of a call.

    Attributes:
        args: All positional arguments, as they came.
        places: Which of them are differentiated.
        alone: The caller named one place by itself, so its tree is the result.
        leaves: The leaves of those, in order: tensors and None.
        spec: The structure of the tuple of those.
        tensors: Each tensor to differentiate by, once.
        slots: For each leaf its place in `tensors`; None for None and for a frozen parameter.
        dtypes: The dtype of the gradient by each of `tensors`.
    """

    args: tuple[Any, ...]
    places: tuple[int, ...]
    alone: bool
    leaves: list[Any]
    spec: Structure
    tensors: list[Tensor]
    slots: list[int | None]
    dtypes: list[torch.dtype]

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments, with these tensors in all places where the variables stand."""
        args = list(self.args)
        trees = pytree.unflatten(self.spec, self.placed(tensors))
        for place, arg in zip(self.places, trees, strict=True):
            args[place] = arg
        return tuple(args)

    def placed(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the leaves, with these in all places where the variables stand."""
        return [
            leaf if slot is None else tensors[slot]
            for leaf, slot in zip(self.leaves, self.slots, strict=True)
        ]

    def at(self, args: tuple[Any, ...]) -> Variables:
        """Return the same variables of other arguments, of the same structure."""
        leaves, _ = pytree.flatten(tuple(args[place] for place in self.places))
        tensors = [leaves[self.slots.index(slot)] for slot in range(len(self.tensors))]
        return replace(self, args=args, leaves=leaves, tensors=tensors)

    def to_tree(self, grads: Sequence[Tensor], leading: tuple[int, ...] = ()) -> PyTree:
        """Return gradients as the tree of the differentiated arguments.

        Args:
            grads: One for each of `tensors`, of shape `leading + tensor.shape`.
            leading: Sizes in front.

        Returns:
            The caller's structure: of one argument, or of a tuple of them. A further place of a
            tied tensor has a copy; a frozen parameter has zeros.
        """
        placed: list[Any] = []
        used: set[int] = set()
        further: list[int] = []
        for place, (leaf, slot) in enumerate(zip(self.leaves, self.slots, strict=True)):
            if slot is None:
                placed.append(None if leaf is None else _zeros(leaf, leading))
                continue
            placed.append(grads[slot])
            if slot in used:
                further.append(place)
            used.add(slot)
        copies = copied([placed[place] for place in further])
        for place, copy in zip(further, copies, strict=True):
            placed[place] = copy
        trees = pytree.unflatten(self.spec, placed)
        return trees[0] if self.alone else trees


def read_variables(args: tuple[Any, ...], argnums: ArgNums, root: str | None = None) -> Variables:
    """Check and flatten the arguments that a function is differentiated by.

    Args:
        args: The positional arguments of a call.
        argnums: Which of them, as in JAX: an int, or a tuple of ints; negative from the end.
        root: What errors call the one argument; None is `args[0]`.

    Returns:
        Their leaves and variables.

    Raises:
        StructureError: There is no such argument, or one stands in `argnums` twice.
        LeafTypeError: A leaf is nothing that can be differentiated.
        UnreachedParamError: There is nothing to differentiate by.
    """
    places = _places(argnums, len(args))
    leaves, spec = pytree.flatten(tuple(args[place] for place in places))
    tensors: list[Tensor] = []
    slots: list[int | None] = []
    find = _finder(tensors)
    for index, leaf in enumerate(leaves):
        if leaf is None or not _is_variable(leaf, partial(_path, spec, index, places, root)):
            slots.append(None)
            continue
        slot = find(leaf)
        if slot == len(tensors):
            tensors.append(leaf)
        slots.append(slot)
    if not tensors:
        raise UnreachedParamError(
            message(
                root or ", ".join(f"args[{place}]" for place in places),
                "a tensor to differentiate by",
                "none (an empty tree, None, or frozen parameters)",
                "name the arguments with argnums, and leave one parameter unfrozen",
            )
        )
    dtypes = [_grad_dtype(tensor) for tensor in tensors]
    return Variables(args, places, isinstance(argnums, int), leaves, spec, tensors, slots, dtypes)


def _finder(tensors: list[Tensor]) -> Callable[[Tensor], int]:
    """Return a function that tells where a tensor stands in a growing list, or would be added."""
    if torch.compiler.is_compiling():
        # An id would be a constant of the compiled function, and the next call compiled anew.
        return lambda leaf: next((i for i, t in enumerate(tensors) if t is leaf), len(tensors))
    seen: dict[int, int] = {}
    return lambda leaf: seen.setdefault(id(leaf), len(tensors))


def _places(argnums: object, count: int) -> tuple[int, ...]:
    asked = argnums if isinstance(argnums, tuple) else (argnums,)
    if not asked or not all(isinstance(n, int) and not isinstance(n, bool) for n in asked):
        raise StructureError(
            message("argnums", "an int or a tuple of ints", describe(argnums), "argnums=0")
        )
    places = tuple(n + count if n < 0 else n for n in asked)
    if not all(0 <= place < count for place in places) or len(set(places)) < len(places):
        raise StructureError(
            message(
                "argnums",
                f"different places among the {count} positional arguments of the call",
                repr(argnums),
                "pass what is differentiated by position, and name each place once",
            )
        )
    return places


def _path(spec: Structure, index: int, places: tuple[int, ...], root: str | None) -> str:
    # As the caller numbers them: the first of several differentiated arguments may be args[2].
    inside = pytree.path(spec, index, "")
    number, _, rest = inside.removeprefix("[").partition("]")
    return f"{root or f'args[{places[int(number)]}]'}{rest}"


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    if not isinstance(leaf, Tensor):
        raise LeafTypeError(message(where(), "a tensor or None", describe(leaf), _advice(leaf)))
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


def _advice(leaf: object) -> str:
    if isinstance(leaf, nn.Module):
        return "call, params, buffers = gradkit.func.make_functional(module), and pass the params"
    if isinstance(leaf, Iterator | ValuesView):
        return "list(model.parameters()): an iterator can be read only once"
    if isinstance(leaf, bool | int | float | complex):
        return "torch.tensor(value), or name other arguments with argnums"
    return "put a tensor or None in its place, or pass it as another argument"


def _zeros(leaf: Tensor, leading: tuple[int, ...]) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.zeros((*leading, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
    return zeros_for(leaf, leading)


def _grad_dtype(tensor: Tensor) -> torch.dtype:
    # torch.compile cannot read the attribute, and in a transform the tensor is another one.
    return tensor.dtype if torch.compiler.is_compiling() else grad_dtype(tensor)


def owned(
    grads: list[Tensor], variables: Sequence[Tensor], leading: tuple[int, ...] = ()
) -> list[Tensor]:
    """Return gradients that share memory with nothing, laid out like their variables.

    Args:
        grads: Gradients that nothing else refers to; changed in place.
        variables: What they are of.
        leading: Sizes in front of those of the variables.

    Returns:
        The same list, with copies of what was not the caller's yet. Inside of a transform, and
        while torch.compile traces, nobody can tell, and all are copies.
    """
    if transforms():
        return [grad.clone() for grad in grads]
    if torch.compiler.is_compiling():
        pairs = zip(grads, variables, strict=True)
        return copied(grads, [_room(grad, variable, leading) for grad, variable in pairs])
    own(grads, variables, leading)
    return grads


def _room(grad: Tensor, variable: Tensor, leading: tuple[int, ...]) -> Tensor:
    if leading:
        return torch.empty_like(grad, memory_format=torch.contiguous_format)
    return torch.empty_like(variable, dtype=grad.dtype)


def copied(tensors: Sequence[Tensor], rooms: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return copies, each in memory of its own, also under torch.compile (outside of transforms).

    Args:
        tensors: What to copy.
        rooms: New tensors to copy to; None is tensors of the same layout.

    Returns:
        The copies.
    """
    if not tensors or not torch.compiler.is_compiling() or transforms():
        return [tensor.clone() for tensor in tensors]
    # By one operation for all: of several clones of one tensor, inductor makes one.
    into = [torch.empty_like(tensor) for tensor in tensors] if rooms is None else list(rooms)
    torch._foreach_copy_(into, list(tensors))
    return into
