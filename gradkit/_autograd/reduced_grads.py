"""A tree of what a function makes of each gradient, as it arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd.consume_on_arrival import ConsumingRunner
from gradkit._autograd.gramian import weights_from_gramian
from gradkit._autograd.passes import run_jointly
from gradkit._checks.reachability import require_reached
from gradkit._compat.autograd import storage_address
from gradkit._core import pytree
from gradkit._core.call import Losses
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree
from gradkit._state.snapshot import put_back_on_error
from gradkit.errors import OptionError, UnsupportedGraphError, describe, message

Function: TypeAlias = Callable[[Tensor], Any]


def values_and_reduced_grads(
    losses: Losses, params: Params, fn: PyTree, weights: PyTree, retain: bool
) -> tuple[PyTree, PyTree]:
    """Return the losses' values, and the tree of what functions make of the gradients."""
    functions = _read_functions(fn, params)
    if weights is not None and callable(weights):
        weights = weights_from_gramian(losses, params, weights)
    results: list[Any] = [None] * len(params.variables)

    def consume(index: int, grad: Tensor) -> None:
        results[index] = _reduced(functions[index], grad, partial(params.path, index))

    with put_back_on_error(*functions):
        result = run_jointly(
            losses,
            params,
            weights,
            unused="none",
            create_graph=False,
            retain_graph=retain,
            runner=partial(ConsumingRunner, consume=consume),
        )
        require_reached(result.call, result.grads)
    copies = partial(map, partial(pytree.map_tensors, Tensor.clone))
    return result.values, pytree.unflatten(params.spec, params.per_leaf(results, copies))


def _read_functions(fn: PyTree, params: Params) -> list[Function]:
    """Return the function for each variable: that of its first leaf."""
    tree = pytree.unflatten(params.spec, params.leaves)
    by_leaf = pytree.broadcast_prefix(fn, "fn", tree, "params")
    functions: list[Any] = params.per_variable(by_leaf)
    for index, function in enumerate(functions):
        if not callable(function):
            fix = "fn=torch.Tensor.norm, or a tree of functions with the structure of params"
            expected = f"a function of the gradient of {params.path(index)}"
            raise OptionError(message("fn", expected, describe(function), fix))
    return functions


def _reduced(function: Function, grad: Tensor, path: Callable[[], str]) -> Any:
    """Return the result of a function, which shares no memory with the gradient."""
    if grad.is_sparse:
        grad = grad.coalesce()
    version = grad._version
    result = function(grad)
    if grad._version != version:
        expected, got = "a function that reads its gradient", "one that writes on it in place"
        fix = "return a new tensor: fn=lambda grad: grad.abs().max(), and not grad.abs_().max()"
        raise UnsupportedGraphError(message(f"fn at {path()}", expected, got, fix))
    return pytree.map_tensors(partial(_unshared, grad), result)


def _unshared(grad: Tensor, result: Tensor) -> Tensor:
    try:
        shares = storage_address(result) == storage_address(grad)
    except (RuntimeError, NotImplementedError):
        shares = result.layout != torch.strided  # which has no storage of its own
    return result.clone() if shares else result
