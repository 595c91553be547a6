"""per_sample_grads: the gradient of every sample of a batch by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from gradkit._checks.op_monitor import OpMonitor
from gradkit._compat.transforms import detached, ordinary_mode, transforms
from gradkit._core import pytree
from gradkit._core.options import check_chunk_size, check_option
from gradkit._core.ownership import empty_for
from gradkit._core.pytree import PyTree, Structure
from gradkit._state import rng
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.func._level import differentiate, gradient_of_the_sum, is_constant, tensors_of
from gradkit.func._variables import ArgNums, Variables, owned, read_variables

Randomness: TypeAlias = Literal["error", "same", "different"]


def per_sample_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    in_dims: PyTree = None,
    has_aux: bool = False,
    chunk_size: int | None = None,
    randomness: Randomness = "error",
) -> Callable[..., Any]:
    """Return a function that gives the gradients of the loss of each sample of a batch.

    Equal, to rounding, to a loop over the samples.

    Example:
        >>> import torch, gradkit
        >>> def loss(w, x, y):  # of one sample
        ...     return ((w * x).sum() - y).square()
        >>> w, x, y = torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2)
        >>> gradkit.func.per_sample_grads(loss)(w, x, y)
        tensor([[ 6., 12.],
                [42., 56.]])

    Args:
        fn: As in `value_and_grads`, for one sample: its arguments come without the batch
            dimension. A module that wants one gets `x[None]`. Several losses are added.
        argnums: As in `value_and_grads`.
        in_dims: Where the batch dimension of the positional arguments is: as in `torch.vmap` an
            int, or a tuple with an entry for each argument, each an int, None (not batched), or a
            tree of these that begins the argument. None: every tensor of the arguments that
            `argnums` does not name has the batch first.
        has_aux: As in `value_and_grads`; the tensors of aux come stacked.
        chunk_size: How many samples are in memory at a time; None is all. It changes the results
            by rounding only, but for what is drawn at random.
        randomness: What random operations do, as in `torch.vmap`: `"error"`, `"same"` numbers for
            every sample, or `"different"` ones.

    Returns:
        A function of the arguments that returns what `grads` is in `value_and_grads`, or a pair of
        that and aux: of B samples, gradients of shape `(B,) + tensor.shape`. If the variables
        themselves are batched, `tensor.shape` is without that dimension. Tensors are passed by
        position; keyword arguments go to every sample as they are, and may not hold any.

    Raises:
        DetachedLossError: No loss depends on the arguments (not noticed under torch.compile).
        LeafTypeError: A leaf of an argument or of the losses is no tensor that has a gradient.
        NotScalarLossError: A loss has not exactly one element.
        StructureError: `argnums`, `in_dims`, `chunk_size`, `randomness`, the sizes of the batch or
            what `fn` returned does not fit.
        UnreachedParamError: The arguments hold nothing to differentiate by.
        UnsupportedGraphError: Batch norm in train mode; what torch.func cannot enter, or batches
            silently wrong.

    Source:
        `torch.func.vmap` over `torch.func.grad`,
        https://pytorch.org/tutorials/intermediate/per_sample_grads.html
    """
    check_chunk_size(chunk_size)
    check_option("randomness", randomness, ("error", "same", "different"))

    def call(*args: Any, **kwargs: Any) -> Any:
        given = read_variables(args, argnums)
        leaves, spec = pytree.flatten(args)
        dims = _read_dims(in_dims, args, given.places)
        size = _size_of_batch(leaves, dims, spec)
        _refuse_unbatched(leaves, dims, spec, kwargs)
        _refuse_two_dims(given, pytree.unflatten(spec, dims))
        outside: list[Any] = []

        def one(*batched: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            rest = iter(batched)
            sample = [
                leaf if dim is None else next(rest) for leaf, dim in zip(leaves, dims, strict=True)
            ]
            of_sample = given.at(pytree.unflatten(spec, sample))
            watch = OpMonitor(per_sample=True)
            out = differentiate(
                fn,
                of_sample,
                kwargs,
                gradient_of_the_sum,
                has_aux=has_aux,
                scalar=True,
                watch=watch,
            )
            tensors, put_back = tensors_of(out.aux)
            outside[:] = [put_back]
            return out.grads[0], tensors

        first = given.at(pytree.unflatten(spec, list(map(_first_of_batch, leaves, dims))))
        over = [(detached(x), dim) for x, dim in zip(leaves, dims, strict=True) if dim is not None]
        with ordinary_mode():
            batch = _Batch(one, [x for x, _ in over], tuple(dim for _, dim in over), size)
            if (
                chunk_size is None
                or chunk_size >= size
                or transforms()
                or torch.compiler.is_compiling()
            ):
                found, tensors_of_aux = batch.run(randomness, chunk_size)
                found = owned(found, first.tensors, (size,))
            else:
                found, tensors_of_aux = batch.run_in_chunks(randomness, chunk_size, first.tensors)
        result = first.to_tree(found, (size,))
        return (result, outside[0](tensors_of_aux)) if has_aux else result

    return call


@dataclass(frozen=True)
class _Batch:
    """A function of one sample, and the samples.

    Attributes:
        one: Returns lists of tensors: gradients, and those of aux.
        tensors: What is batched.
        dims: The batch dimension of each.
        size: The number of samples.
    """

    one: Callable[..., tuple[list[Tensor], list[Tensor]]]
    tensors: list[Tensor]
    dims: tuple[int, ...]
    size: int

    def run(self, randomness: str, chunk_size: int | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients and aux of all samples, stacked."""
        grads, aux = vmap(
            self.one, in_dims=self.dims, chunk_size=chunk_size, randomness=randomness
        )(*self.tensors)
        return list(grads), list(aux)

    def run_in_chunks(
        self, randomness: str, chunk_size: int, variables: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the same, with one chunk in memory beside the results.

        torch's own chunks are joined at the end, which takes the memory of the results twice, and
        draw other numbers for each chunk on CUDA where they are to be the same.
        """
        kept = rng.states(self.tensors)
        results: list[Tensor] = []
        aux_parts: list[list[Tensor]] = []
        for start in range(0, self.size, chunk_size):
            count = min(chunk_size, self.size - start)
            if randomness == "same":
                rng.restore(kept)
            some = [
                x.narrow(dim, start, count) for x, dim in zip(self.tensors, self.dims, strict=True)
            ]
            grads, aux = replace(self, tensors=some).run(randomness, None)
            if not results:
                results = [
                    empty_for(v, grad.dtype, (self.size,))
                    for v, grad in zip(variables, grads, strict=True)
                ]
            for result, grad in zip(results, grads, strict=True):
                result[start : start + count].copy_(grad)
            aux_parts.append(aux)
        return results, [torch.cat(parts) for parts in zip(*aux_parts, strict=True)]


def _refuse_unbatched(
    leaves: list[Any], dims: list[int | None], spec: Structure, kwargs: dict[str, Any]
) -> None:
    """Refuse what every sample would be given whole, though it may hold the batch."""
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None and not isinstance(leaf, Tensor) and not is_constant(leaf):
            raise LeafTypeError(
                message(
                    pytree.path(spec, index, "args"),
                    "a tensor, or a constant: a number, text, a function, a module",
                    f"{describe(leaf)}, which is no tree that optree knows",
                    "pass tensors; register the class: optree.register_pytree_node",
                )
            )
    for name, value in kwargs.items():
        if any(isinstance(leaf, Tensor) for leaf in pytree.flatten(value)[0]):
            raise StructureError(
                message(
                    name,
                    "tensors in positional arguments, where in_dims says how they are batched",
                    "a keyword argument with a tensor",
                    "per_sample_grads(fn, in_dims=...)(params, x, y), all by position",
                )
            )


def _refuse_two_dims(given: Variables, dims: PyTree) -> None:
    by_leaf, _ = pytree.flatten(tuple(dims[place] for place in given.places))
    first: dict[int, int | None] = {}
    for slot, dim in zip(given.slots, by_leaf, strict=True):
        if slot is not None and first.setdefault(slot, dim) != dim:
            raise StructureError(
                message(
                    "in_dims",
                    "one batch dimension for a tensor, wherever it stands",
                    f"{first[slot]} and {dim} for one tensor in two places",
                    "pass a copy: tensor.clone()",
                )
            )


def _first_of_batch(leaf: Any, dim: int | None) -> Any:
    return leaf if dim is None else leaf.select(dim, 0)


def _read_dims(in_dims: PyTree, args: tuple[Any, ...], places: tuple[int, ...]) -> list[int | None]:
    """Return for each leaf of the arguments its batch dimension, None for none."""
    if in_dims is None:
        return [
            0 if isinstance(leaf, Tensor) and place not in places else None
            for place, arg in enumerate(args)
            for leaf in pytree.flatten(arg)[0]
        ]
    by_arg = (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims
    if not isinstance(by_arg, tuple | list) or len(by_arg) != len(args):
        raise StructureError(
            message(
                "in_dims",
                f"an int, or a tuple of {len(args)}, one entry for each positional argument",
                describe(in_dims),
                f"in_dims={(None, *[0] * (len(args) - 1))}",
            )
        )
    return [
        None if leaf is None else dim
        for place, (entry, arg) in enumerate(zip(by_arg, args, strict=True))
        for leaf, dim in zip(
            pytree.flatten(arg)[0],
            pytree.broadcast_prefix(entry, f"in_dims[{place}]", arg, f"args[{place}]"),
            strict=True,
        )
    ]


def _size_of_batch(leaves: list[Any], dims: list[int | None], spec: Structure) -> int:
    sizes: dict[int, int] = {}
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        fits = isinstance(leaf, Tensor) and isinstance(dim, int) and not isinstance(dim, bool)
        if not fits or not -leaf.dim() <= dim < leaf.dim():
            raise StructureError(
                message(
                    pytree.path(spec, index, "args"),
                    f"a tensor with the batch dimension {dim!r}",
                    describe(leaf),
                    "give in_dims, with None for what is not batched: in_dims=(None, 0, None)",
                )
            )
        sizes.setdefault(leaf.shape[dim], index)
    if list(sizes) == [0]:
        raise StructureError(
            message(
                pytree.path(spec, sizes[0], "args"),
                "a batch of at least one sample",
                "an empty one",
                "skip it: it has no gradients",
            )
        )
    if len(sizes) == 1:
        return next(iter(sizes))
    if not sizes:
        raise StructureError(
            message(
                "args",
                "at least one batched tensor",
                "none",
                "pass the samples as an argument, or name their dimension in in_dims",
            )
        )
    (size, first), (other, index), *_ = sizes.items()
    raise StructureError(
        message(
            pytree.path(spec, index, "args"),
            f"a batch of {size}, as {pytree.path(spec, first, 'args')} has",
            f"one of {other}",
            "pass as many targets as inputs, or give in_dims, with None for what is not batched",
        )
    )
