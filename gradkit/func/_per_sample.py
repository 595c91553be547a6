"""per_sample_grads of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

from gradkit._compat.transforms import detached
from gradkit._core.options import (
    UNUSED,
    Unused,
    check_bool,
    check_chunk_size,
    check_function,
    check_option,
)
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit.func._arguments import ArgNums, read_arguments
from gradkit.func._batch import read_batch
from gradkit.func._level import differentiate, gradient_of_the_sum
from gradkit.func._results import check_unused_can_be_known, tensors_of

Randomness: TypeAlias = Literal["error", "same", "different"]


def per_sample_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    in_dims: PyTree = None,
    has_aux: bool = False,
    chunk_size: int | None = None,
    randomness: Randomness = "error",
    unused: Unused = "zeros",
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
            dimension. A module that needs one gets `x[None]`. Several losses are added.
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
        unused: As in `value_and_grads`.

    Returns:
        A function of the arguments that returns what `grads` is in `value_and_grads`, or a pair of
        that and aux: of B samples, gradients of shape `(B,) + tensor.shape`. If the variables
        themselves are batched, `tensor.shape` is without that dimension. Tensors are passed by
        position; keyword arguments go to every sample as they are, and may not hold any.

    Raises:
        OptionError: `chunk_size`, `randomness` or `unused` has no such value.
        StructureError: `in_dims` or the sizes of the batch do not fit.
        UnsupportedGraphError: Batch norm in train mode; what vmap gets silently wrong.
        GradkitError: As in `value_and_grads`.

    Source:
        `torch.func.vmap` over `torch.func.grad`,
        https://pytorch.org/tutorials/intermediate/per_sample_grads.html
    """
    check_function(fn)
    check_bool("has_aux", has_aux)
    check_chunk_size(chunk_size)
    check_option("randomness", randomness, ("error", "same", "different"))
    check_option("unused", unused, UNUSED)

    def call(*args: Any, **kwargs: Any) -> Any:
        check_unused_can_be_known(unused)
        arguments = read_arguments(args, argnums)
        batch = read_batch(arguments, in_dims, kwargs)
        constants: list[Any] = []  # of aux, from the trace of one sample

        def of_sample(*tensors: Tensor) -> tuple[list[Tensor | None], list[Tensor]]:
            sample = arguments.at(batch.with_tensors(tensors))
            result = differentiate(
                fn, sample, kwargs, gradient_of_the_sum, has_aux=has_aux, per_sample=True
            )
            tensors_of_aux, put_back = tensors_of(result.aux)
            constants[:] = [put_back]
            return result.grads[0], tensors_of_aux

        first = arguments.at(batch.first_sample())
        with leave_inference_mode(record=True):
            tensors = [detached(tensor) for tensor in batch.tensors]
            grads, tensors_of_aux = batch.run(
                of_sample, tensors, first.variables, randomness, chunk_size
            )
        result = first.finish(grads, unused, (batch.size,))
        return (result, constants[0](tensors_of_aux)) if has_aux else result

    return call
