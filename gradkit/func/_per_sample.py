"""per_sample_grads of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradkit._checks.op_monitor import OpMonitor
from gradkit._compat.transforms import detached, transforms
from gradkit._core.inference_mode import leave_inference_mode
from gradkit._core.options import UNUSED, Unused, check_bool, check_chunk_size, check_option
from gradkit._core.pytree import PyTree
from gradkit.func._arguments import ArgNums, Arguments, read_arguments
from gradkit.func._aux import tensors_of
from gradkit.func._in_dims import read_batch
from gradkit.func._level import differentiate, gradient_of_the_sum
from gradkit.func._results import check_unused_can_be_known
from gradkit.func._sample_batch import SampleBatch

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
        DetachedLossError: No loss depends on the arguments (not noticed under torch.compile).
        LeafTypeError: A leaf of an argument or of the losses is no tensor that has a gradient.
        NotScalarLossError: A loss has not exactly one element.
        OptionError: `chunk_size`, `randomness` or `unused` has no such value.
        StructureError: `argnums`, `in_dims`, the sizes of the batch or what `fn` returned does not
            fit.
        UnreachedParamError: The arguments hold nothing to differentiate; or the loss does not reach
            a tensor, with `unused="error"`.
        UnsupportedGraphError: Batch norm in train mode; what torch.func cannot enter, or batches
            silently wrong.

    Source:
        `torch.func.vmap` over `torch.func.grad`,
        https://pytorch.org/tutorials/intermediate/per_sample_grads.html
    """
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
            grads, aux = _differentiate_sample(fn, sample, kwargs, has_aux=has_aux)
            tensors_of_aux, put_back = tensors_of(aux)
            constants[:] = [put_back]
            return grads, tensors_of_aux

        first = arguments.at(batch.first_sample())
        with leave_inference_mode(record=True):
            tensors = [detached(tensor) for tensor in batch.tensors]
            samples = SampleBatch(of_sample, tensors, batch.dims, batch.size)
            if _at_once(chunk_size, batch.size):
                grads, tensors_of_aux = samples.run(randomness, chunk_size)
            else:
                grads, tensors_of_aux = samples.run_in_chunks(
                    randomness, chunk_size or batch.size, first.variables
                )
        result = first.finish(grads, unused, (batch.size,))
        return (result, constants[0](tensors_of_aux)) if has_aux else result

    return call


def _differentiate_sample(
    fn: Callable[..., Any], arguments: Arguments, kwargs: dict[str, Any], *, has_aux: bool
) -> tuple[list[Tensor | None], PyTree]:
    result = differentiate(
        fn,
        arguments,
        kwargs,
        gradient_of_the_sum,
        has_aux=has_aux,
        scalar=True,
        monitor=OpMonitor(per_sample=True),
    )
    return result.grads[0], result.aux


def _at_once(chunk_size: int | None, size: int) -> bool:
    """Return whether torch's vmap takes the batch; with its chunks where gradkit cannot."""
    if chunk_size is None or chunk_size >= size:
        return True
    return bool(transforms()) or torch.compiler.is_compiling()
