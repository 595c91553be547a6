"""value_and_grads, per_loss_grads and per_sample_grads of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd import engine, jacobian
from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.call import STRATEGIES, Losses, Strategy, Unused, check_chunk_size, check_option
from gradkit._core.ownership import empty_for, leave_inference_mode, zeros_for
from gradkit._core.params import Grads, Tensors
from gradkit._core.pytree import PyTree, Structure
from gradkit._state.hook_tables import hooks_kept, same_hooks_in_each_pass
from gradkit._state.snapshot import put_back
from gradkit.errors import StructureError, UnsupportedGraphError, describe, first_line, message
from gradkit.func import _level as levels
from gradkit.func import _vmap_or_loop
from gradkit.func._arguments import ArgNums, Arguments, check_options, read_arguments
from gradkit.func._differentiate import differentiate, own_code
from gradkit.func._errors import named_errors
from gradkit.func._level import LevelPasses, gradient_of_the_sum
from gradkit.func._vmap_or_loop import Batch, Dims, OneByOne, Randomness, RunOne

_Gradients: TypeAlias = tuple[Grads, Tensors]


def value_and_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    has_aux: bool = False,
    weights: PyTree = None,
    unused: Unused = "zeros",
    create_graph: bool | None = None,
) -> Callable[..., Any]:
    """Return a function that gives the losses of `fn`, and the gradient of their weighted sum.

    What `gradkit.value_and_grads` does for losses that exist, with the same bits wherever
    torch.func has them (not for an LSTM on the CPU, for one). It may stand inside and around
    torch.func's transforms and torch.compile. What the modules of `fn` keep in attributes lasts
    until the outermost call of gradkit ends; if one raises, everything is as before.

    Example:
        >>> import torch, gradkit
        >>> def loss(params, x):
        ...     return ((params["w"] * x).sum() - 1).square()
        >>> gradkit.func.value_and_grads(loss)({"w": torch.ones(2)}, torch.tensor([1.0, 2.0]))
        (tensor(4.), {'w': tensor([4., 8.])})

    Args:
        fn: Takes any arguments, which it must not change, and returns a tree of real losses of one
            element each. A bare tuple of two raises without `weights`, as it may be (loss, aux). It
            may do what eager code may, but for `backward()`, where no transform, no forward mode
            and no torch.compile is around; hooks that it registers end with the call.
        argnums: The positional arguments to differentiate with respect to, an int or a tuple of
            ints: trees of floating-point or complex tensors and None. A module in them stands for
            `dict(module.named_parameters())`, an iterator or an optimizer for the tuple of its
            tensors, and `fn` is called with these. A tensor in several places is one variable. A
            plain tensor need not require grad; an `nn.Parameter` that does not is frozen.
        has_aux: Whether `fn` returns a pair of the losses and a tree of anything.
        weights: Real numbers or tensors of one element, a prefix tree of the losses; None is ones.
        unused: The result for a tensor that no loss reaches: `"zeros"`, `"none"` (None, also for a
            frozen parameter), or `"error"`. torch.compile, which cannot tell, takes `"zeros"` only.
        create_graph: Whether the results carry the graph of all that they were computed from. None:
            where that requires grad, as in torch.func, so that a logged value keeps it in memory; a
            derivative that torch would get wrong raises `UnsupportedGraphError` when it is taken.
            True: it raises in this call. False: no graph, inside a transform, too: for training.

    Returns:
        A function of `fn`'s arguments that returns `(values, grads)`, or `((values, aux), grads)`.
        `values` is a tree like the losses. `grads` is one like the argument, or a tuple of such
        trees: gradients of the shape and layout of their tensors and of their `grad_dtype` (of
        their dtype while torch.compile traces), dense zeros where they are not reached or frozen.
        They share memory with nothing, unless they carry a graph; the derivative of a constant
        gradient, that of a linear function, is zero.

    Raises:
        DetachedLossError: No loss depends on the arguments (not noticed under torch.compile).
        LeafTypeError: A leaf of an argument or of the losses is no tensor that has a gradient.
        NotScalarLossError: A loss has not exactly one element.
        OptionError: An option has no such value.
        StructureError: `weights` or what `fn` returned does not fit.
        UnreachedParamError: No variable; or, with `unused="error"`, one that no loss reaches.
        UnsupportedGraphError: torch gets what `fn` does silently wrong, or torch.func, where it is
            needed, cannot enter it; or `fn` writes on a tensor from outside.

    Source:
        `torch.func.grad_and_value`, https://pytorch.org/docs/stable/func.api.html; names and
        argument order follow `jax.value_and_grad`, `values` first.
    """
    check_options(fn, argnums, has_aux, unused, create_graph)

    def call(*args: Any, **kwargs: Any) -> Any:
        with own_code():
            arguments = read_arguments(args, argnums, unused=unused)
            run = partial(gradient_of_the_sum, weights=weights, may_be_aux=not has_aux)
            flags: Any = {"has_aux": has_aux, "create_graph": create_graph}
            with put_back(fn):
                out = differentiate(fn, arguments, kwargs, run, **flags)
            values = pytree.unflatten(out.spec, out.values)
            facts: Any = {"losses": out.values, "refused": out.refused, "is_plain": out.is_plain}
            grads = arguments.grads_to_tree(out.grads[0], **facts)
        return ((values, out.aux), grads) if has_aux else (values, grads)

    return call


def per_loss_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    has_aux: bool = False,
    unused: Unused = "zeros",
    strategy: Strategy | None = None,
    chunk_size: int | None = None,
    create_graph: bool | None = None,
) -> Callable[..., Any]:
    """Return a function that gives the gradients of every loss of `fn` separately.

    What `gradkit.per_loss_grads` does for losses that exist: an inf or NaN stays in its own loss.

    Example:
        >>> import torch, gradkit
        >>> def losses(w):
        ...     return {"sum": w.sum(), "squares": w * w}
        >>> gradkit.func.per_loss_grads(losses)(torch.tensor([1.0, 2.0]))["squares"]
        tensor([[2., 0.],
                [0., 4.]])

    Args:
        fn: As in `value_and_grads`; its losses may have any shape.
        argnums: As in `value_and_grads`.
        has_aux: As in `value_and_grads`.
        unused: As in `value_and_grads`, for each loss.
        strategy: `"sequential"`: a pass for each element of each loss. `"batched"`: the elements of
            each loss vmapped, equal to rounding; where torch would get that silently wrong, or
            fails at it, there is a pass for each, with one `GradkitWarning` that says why. `"auto"`
            picks by device and size. None is `"batched"` with a `chunk_size`, else `"sequential"`.
        chunk_size: The largest number of elements in one batched pass; None is all.
        create_graph: As in `value_and_grads`.

    Returns:
        A function of `fn`'s arguments that returns a tree like the losses, or a pair of that and
        aux. Each leaf is what `grads` is in `value_and_grads`; a loss of shape S has gradients of
        shape `S + tensor.shape`, as in `torch.func.jacrev`.

    Raises:
        GradkitError: As in `value_and_grads`, but a loss may have any number of elements.

    Source:
        `torch.func.jacrev`, https://pytorch.org/docs/stable/func.api.html
    """
    check_options(fn, argnums, has_aux, unused, create_graph)
    check_option("strategy", strategy, (*STRATEGIES, None))
    check_chunk_size(chunk_size)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = read_arguments(args, argnums, unused=unused)

        def run(losses: Losses, passes: LevelPasses) -> list[Grads]:
            if passes.hooked and not hooks_kept():
                with same_hooks_in_each_pass():
                    return run(losses, passes)
            # Nobody has asked for a batch where there is nothing to batch, and no warning is due.
            asked = chunk_size is not None and any(loss.numel() != 1 for loss in losses.leaves)
            chosen = strategy or ("batched" if asked else "sequential")
            why_not = passes.monitor.why_not_batched
            batch = jacobian.losses_to_batch(chosen, losses.leaves, why_not)
            last = max(i for i, loss in enumerate(losses.leaves) if passes.depends(loss))
            grads: list[Grads] = []
            for index, loss in enumerate(losses.leaves):
                one = passes, loss, passes.variables
                if not passes.depends(loss):
                    grads.append([None] * len(passes.variables))
                elif batch[index]:  # the graph goes with the level: no element is a separate last
                    grads.append(jacobian.batched(*one, retain=True, chunk_size=chunk_size))
                else:
                    grads.append(jacobian.sequential(*one, retain=index < last))
            return grads

        flags: Any = {"has_aux": has_aux, "create_graph": create_graph}
        with own_code(), put_back(fn):
            out = differentiate(fn, arguments, kwargs, run, scalar=False, **flags)
        facts: Any = {"refused": out.refused, "is_plain": out.is_plain}
        trees = [
            arguments.grads_to_tree(grads, tuple(loss.shape), losses=[loss], **facts)
            for grads, loss in zip(out.grads, out.values, strict=True)
        ]
        by_loss = pytree.unflatten(out.spec, trees)
        return (by_loss, out.aux) if has_aux else by_loss

    return call


def per_sample_grads(
    fn: Callable[..., Any],
    argnums: ArgNums = 0,
    *,
    in_dims: PyTree = None,
    has_aux: bool = False,
    chunk_size: int | None = None,
    randomness: Randomness = "error",
    unused: Unused = "zeros",
    create_graph: bool | None = None,
) -> Callable[..., Any]:
    """Return a function that gives the gradients of the loss of each sample of a batch.

    Equal, to rounding, to a loop over the samples. Buffers and attributes of modules are afterwards
    as before. What torch.vmap cannot batch, such as `.item()`, is a loop, with a `GradkitWarning`
    that says why; not in torch.compile.

    Example:
        >>> import torch, gradkit
        >>> def loss(w, x, y):  # of one sample
        ...     return ((w * x).sum() - y).square()
        >>> w, x, y = torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2)
        >>> gradkit.func.per_sample_grads(loss)(w, x, y)
        tensor([[ 6., 12.],
                [42., 56.]])

    Args:
        fn: As in `value_and_grads`, for one sample, without the batch dimension (a module that
            needs one gets `x[None]`). Several losses are added.
        argnums: As in `value_and_grads`.
        in_dims: The batch dimension of each positional argument, as in `torch.vmap`: an int, or a
            tuple of ints, None (not batched) and prefix trees of these. None: the first, of every
            tensor in the arguments that `argnums` does not name.
        has_aux: As in `value_and_grads`; the tensors of aux come stacked.
        chunk_size: How many samples are in memory at a time; None is all. It changes the results
            by rounding only, but for what is drawn at random.
        randomness: As in `torch.vmap`: `"error"`, `"same"` for every sample, or `"different"`.
        unused: As in `value_and_grads`.
        create_graph: As in `value_and_grads`.

    Returns:
        A function of the arguments that returns what `grads` is in `value_and_grads`, or a pair of
        that and aux: of B samples, gradients of shape `(B,) + tensor.shape`, without the batch
        dimension of a variable that has one. B may be 0. Tensors are passed by position; keyword
        arguments go to every sample as they are, and may not hold any.

    Raises:
        StructureError: `in_dims` or the sizes of the batch do not fit; aux cannot be stacked; or
            torch cannot tell what aux is, or what `fn` reaches, of an empty batch.
        UnsupportedGraphError: Batch norm in train mode; what vmap gets silently wrong; random
            operations with `randomness="error"`; a write on a part of a tensor from outside.
        GradkitError: As in `value_and_grads`.

    Source:
        `torch.func.vmap` over `torch.func.grad`,
        https://pytorch.org/tutorials/intermediate/per_sample_grads.html
    """
    check_options(fn, argnums, has_aux, unused, create_graph)
    check_chunk_size(chunk_size)
    check_option("randomness", randomness, _vmap_or_loop.RANDOMNESS)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = read_arguments(args, argnums, unused=unused)
        batch = _read_batch(arguments, in_dims, kwargs)
        of_one: list[Any] = []  # from the trace of one sample, or the last of a loop
        refused: list[str | None] = []
        attempt = _vmap_or_loop.VmapOrLoop("per_sample_grads", fn, randomness)
        run_pass = partial(gradient_of_the_sum, may_be_aux=not has_aux)
        flags: Any = {"has_aux": has_aux, "create_graph": create_graph}
        flags |= {"batched": True, "per_sample": True}

        def of_sample(*tensors: Tensor) -> _Gradients:
            here = arguments.at(batch.tree(tensors), same=in_dims is None)
            with attempt.of_one():
                out = differentiate(fn, here, kwargs, run_pass, **flags)
            attempt.check_aux((out.values, out.aux))
            tensors_of_aux, rebuild_aux = levels.partition_aux(out.aux, has_aux)
            of_one[:] = [len(out.values), rebuild_aux]
            refused.append(out.refused)
            return out.grads[0], [*out.values, *tensors_of_aux]

        # Without in_dims, no variable is batched.
        first = arguments if in_dims is None else arguments.at(_first_sample(batch))
        if not batch.size and not has_aux and unused == "zeros":
            return first.grads_to_tree([zeros_for(x, (0,)) for x in first.variables], (0,))
        with put_back(fn), leave_inference_mode(record=True):
            if create_graph is False:
                batch.tensors = levels.detached(batch.tensors)
            run = partial(_run, batch, of_sample, first.variables, randomness, chunk_size)
            of_all = attempt.run if batch.size else _run_of_none
            grads, others = named_errors(partial(of_all, run))
        count, rebuild_aux = of_one
        reason = next(filter(None, refused), None)
        result = first.grads_to_tree(grads, (batch.size,), losses=others[:count], refused=reason)
        return (result, rebuild_aux(others[count:])) if has_aux else result

    return call


def _run(
    batch: Batch,
    fn: RunOne,
    variables: Tensors,
    randomness: Randomness,
    chunk_size: int | None,
    one_by_one: OneByOne | None = None,
) -> _Gradients:
    """Return the gradients and aux of all samples, stacked."""
    vmap: Callable[..., _Gradients]
    vmap = partial(engine.vmapped_grads, fn, in_dims=batch.dims, randomness=randomness)
    traced = transforms() or torch.compiler.is_compiling()
    if one_by_one is not None:
        chunk_size, vmap = 1, one_by_one(fn, batch.dims)
    elif chunk_size is None or chunk_size >= batch.size or traced:
        return vmap(*batch.tensors, chunk_size=chunk_size if batch.size else None)
    # Only a chunk is in memory beside the results. torch's own chunks are joined at the end, which
    # takes the memory of the results twice, and draw other numbers for each chunk on CUDA where
    # they are to be the same.
    results: Grads = []
    parts: list[Grads] = []  # of gradients with a graph, which are joined
    aux_parts: list[Tensors] = []
    for start, chunk in batch.chunks(chunk_size, randomness):
        grads, aux = vmap(*chunk)
        aux_parts.append(aux)
        # Samples in a loop need not all reach the same.
        if one_by_one or any(grad is not None and grad.requires_grad for grad in grads):
            parts.append(grads)
            continue
        if not results:
            results = [
                None if grad is None else empty_for(variable, grad.dtype, (batch.size,))
                for variable, grad in zip(variables, grads, strict=True)
            ]
        for result, grad in zip(results, grads, strict=True):
            if result is not None and grad is not None:
                result[start : start + len(grad)].copy_(grad)
    if parts:
        results = [_joined(of_variable) for of_variable in zip(*parts, strict=True)]
    return results, [torch.cat(of_chunks) for of_chunks in zip(*aux_parts, strict=True)]


def _joined(grads: Sequence[Tensor | None]) -> Tensor | None:
    zero = next((torch.zeros_like(grad) for grad in grads if grad is not None), None)
    return None if zero is None else torch.cat([zero if g is None else g for g in grads])


def _read_batch(arguments: Arguments, in_dims: PyTree, kwargs: dict[str, Any]) -> Batch:
    """Check which arguments are batched, as in torch.vmap, and return them."""
    args = arguments.args
    leaves, spec = pytree.flatten(args)
    dims = _read_dims(in_dims, args, arguments.positions)
    size = _size_of_batch(leaves, dims, spec)
    _refuse_unbatched(leaves, dims, spec, kwargs)
    if not arguments.all_variables:
        _refuse_two_dims(arguments, pytree.unflatten(spec, dims))
    return Batch(leaves, dims, spec, size)


def _first_sample(batch: Batch) -> Any:
    """Return the arguments of the first sample, or, if there is none, ones of its shape."""
    pairs = list(zip(batch.tensors, batch.dims, strict=True))
    if not batch.size:
        return batch.tree(x.sum(dim).to(x.dtype) for x, dim in pairs)
    return batch.tree(x.select(dim, 0) for x, dim in pairs)


def _refuse_unbatched(
    leaves: list[Any], dims: Dims, spec: Structure, kwargs: dict[str, Any]
) -> None:
    """Raise for what every sample would get unbatched, though it may hold the batch."""
    fix = "pass tensors; register the class: optree.register_pytree_node"
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            levels.require_tensor_or_constant(leaf, partial(pytree.path, spec, index, "args"), fix)
    for name, value in kwargs.items():
        if any(isinstance(leaf, Tensor) for leaf in pytree.flatten(value)[0]):
            expected = "tensors in positional arguments, where in_dims says how they are batched"
            fix = "per_sample_grads(fn, in_dims=...)(params, x, y), all by position"
            raise StructureError(message(name, expected, "a keyword argument with a tensor", fix))


def _refuse_two_dims(arguments: Arguments, dims: PyTree) -> None:
    by_leaf, _ = pytree.flatten(tuple(dims[position] for position in arguments.positions))
    first: dict[int, int | None] = {}
    for slot, dim in zip(arguments.slots, by_leaf, strict=True):
        if slot is not None and first.setdefault(slot, dim) != dim:
            expected = "one batch dimension for a tensor, wherever it stands"
            got = f"{first[slot]} and {dim} for one tensor in two places"
            raise StructureError(message("in_dims", expected, got, "pass a copy: tensor.clone()"))


def _read_dims(in_dims: PyTree, args: tuple[Any, ...], differentiated: tuple[int, ...]) -> Dims:
    """Return for each leaf of the arguments its batch dimension, None for none."""
    if in_dims is None:
        return [
            0 if isinstance(leaf, Tensor) and position not in differentiated else None
            for position, arg in enumerate(args)
            for leaf in pytree.flatten(arg)[0]
        ]
    by_arg = (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims
    if not isinstance(by_arg, tuple | list) or len(by_arg) != len(args):
        expected = f"an int, or a tuple of {len(args)}, one entry for each positional argument"
        fix = f"in_dims={(None, *[0] * (len(args) - 1))}"
        raise StructureError(message("in_dims", expected, describe(in_dims), fix))
    by_leaf: Dims = []
    for position, (entry, arg) in enumerate(zip(by_arg, args, strict=True)):
        names = f"in_dims[{position}]", f"args[{position}]"
        dims = pytree.broadcast_prefix(entry, names[0], arg, names[1])
        pairs = zip(pytree.flatten(arg)[0], dims, strict=True)
        by_leaf += [None if leaf is None else dim for leaf, dim in pairs]
    return by_leaf


def _size_of_batch(leaves: list[Any], dims: Dims, spec: Structure) -> int:
    sizes: dict[int, int] = {}
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        where, is_int = partial(pytree.path, spec, index, "args"), type(dim) is int
        if not is_int or not isinstance(leaf, Tensor) or not -leaf.dim() <= dim < leaf.dim():
            expected, got = f"a tensor with the batch dimension {dim!r}", describe(leaf)
            if not is_int:
                expected, got = "an int or None in in_dims, and no bool", f"the dimension {dim!r}"
            fix = "give in_dims, with None for what is not batched: in_dims=(None, 0, None)"
            raise StructureError(message(where(), expected, got, fix))
        _vmap_or_loop.require_dense(leaf, where)
        sizes.setdefault(leaf.shape[dim], index)
    if not sizes:
        fix = "pass the samples as an argument, or name their dimension in in_dims"
        raise StructureError(message("args", "at least one batched tensor", "none", fix))
    (size, first), *others = sizes.items()
    if others:
        other, index = others[0]
        expected = f"a batch of {size}, as {pytree.path(spec, first, 'args')} has"
        fix = "pass as many targets as inputs, or give in_dims, with None for what is not batched"
        path = pytree.path(spec, index, "args")
        raise StructureError(message(path, expected, f"one of {other}", fix))
    return size


def _run_of_none(run: Callable[[], _Gradients]) -> _Gradients:
    """Run over an empty batch, for which some operations have no rule."""
    try:
        return run()
    except (UnsupportedGraphError, IndexError) as error:
        expected = "at least one sample, to know what fn returns as aux, and what it reaches"
        got = f"an empty batch: {first_line(error.__cause__ or error)}"
        fix = "skip the batch; or leave out has_aux and unused"
        raise StructureError(message("args", expected, got, fix)) from error
