"""Products with the Jacobian of a function, and with its Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradkit._checks.op_monitor import OpMonitor
from gradkit._compat.dynamo import functions_traced, inlined_function
from gradkit._compat.transforms import carries_graph, differentiated, level_of, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Losses, check_bool, check_function, check_optional_bool, read_losses
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import with_refused_derivatives
from gradkit._core.user_code import hooks_made, user_code_may_run
from gradkit.errors import DetachedLossError, UnsupportedGraphError, message
from gradkit.func._arguments import Arguments, copied, read_arguments
from gradkit.func._differentiate import (
    LevelPasses,
    OuterGraph,
    cast_to,
    cut_of,
    detached,
    detached_but_tangents,
    partition_aux,
    split_aux,
)
from gradkit.func._errors import independent, named_errors
from gradkit.func._grads import value_and_grads
from gradkit.func._hvp import check_direction, one_forward_level, read_directions, read_primals


def vjp(
    fn: Callable[..., Any],
    *primals: PyTree,
    has_aux: bool = False,
    create_graph: bool | None = None,
) -> Any:
    """Return a function's outputs, and a function that multiplies by its transposed Jacobian.

    Example:
        >>> import torch, gradkit
        >>> def predict(w):
        ...     return {"squares": w * w, "sum": w.sum()}
        >>> values, pull = gradkit.func.vjp(predict, torch.tensor([1.0, 2.0]))
        >>> pull({"squares": torch.tensor([1.0, 1.0]), "sum": None})
        (tensor([2., 4.]),)

    Args:
        fn: Takes the primals, and returns a tree of real floating-point tensors of any shapes; with
            `has_aux` a pair of that and a tree of anything.
        primals: Its positional arguments, all of them differentiated; their leaves are as in
            `value_and_grads`.
        has_aux: Whether `fn` returns something beside the outputs.
        create_graph: As in `value_and_grads`.

    Returns:
        `(values, pull)`, or `(values, pull, aux)`. `pull(cotangents)` takes a tree like `values` of
        tensors of the same shapes and dtypes, where None is zero, and returns a tuple of trees like
        the primals, as often as it is called. What `fn` has used stays as it is until then.

    Raises:
        OptionError: `fn` is not a function, or an option has no such value.
        UnsupportedGraphError: `pull` raises it if a primal was changed in place since the call.
        StructureError: `pull` raises it for cotangents that do not match the outputs.
        GradkitError: As in `value_and_grads`.

    Source:
        `torch.func.vjp`, https://pytorch.org/docs/stable/func.api.html
    """
    check_function(fn)
    check_bool("has_aux", has_aux)
    check_optional_bool("create_graph", create_graph)
    arguments = read_arguments(primals, tuple(range(len(primals))))
    cut = cut_of(create_graph)
    run = _FunctionRun(fn, arguments, has_aux, OpMonitor(), transposed=True)
    enabled = nullcontext() if cut is list else torch.enable_grad()  # as in `differentiate`
    with leave_inference_mode(record=True), enabled, INSIDE:
        point = cut(arguments.variables)
        results: Any = named_errors(lambda: torch.func.vjp(run, *point, has_aux=True))
        values, aux = (copied(cut(tensors)) for tensors in results[::2])
    torch_pull, versions = results[1], _versions(point)

    def pull(cotangents: PyTree) -> tuple[PyTree, ...]:
        _refuse_changed(arguments, point, versions)
        seeds = list(_read_cotangents(run.outputs, values, cotangents))
        with leave_inference_mode(record=True):
            pulled = partial(run.pulled, torch_pull, seeds, create_graph)
            grads, refused = named_errors(pulled)
        grads = cast_to(arguments.dtypes, grads)
        trees: tuple[PyTree, ...] = arguments.grads_to_tree(grads, losses=values, refused=refused)
        return trees

    tree = pytree.unflatten(run.outputs.spec, values)
    return (tree, pull, run.put_aux_back(aux)) if has_aux else (tree, pull)


def jvp(
    fn: Callable[..., Any],
    primals: PyTree,
    tangents: PyTree,
    *,
    has_aux: bool = False,
    create_graph: bool | None = None,
) -> Any:
    """Return a function's outputs, and its Jacobian times a direction, from one forward pass.

    Example:
        >>> import torch, gradkit
        >>> gradkit.func.jvp(lambda w: w * w, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
        (tensor([1., 4.]), tensor([2., 0.]))

    Args:
        fn: As in `vjp`.
        primals: As in `hvp`.
        tangents: As in `hvp`.
        has_aux: As in `vjp`.
        create_graph: As in `value_and_grads`.

    Returns:
        `(values, products)`, or `(values, products, aux)`: both are trees like the outputs of `fn`.

    Raises:
        LeafTypeError: A leaf is no tensor that has a gradient, or complex.
        OptionError: `fn` is not a function, or an option has no such value.
        StructureError: `tangents` do not match `primals`.
        GradkitError: As in `value_and_grads`.

    Source:
        `torch.func.jvp`, https://pytorch.org/docs/stable/func.api.html
    """
    check_function(fn)
    check_bool("has_aux", has_aux)
    check_optional_bool("create_graph", create_graph)
    arguments = read_primals(primals)
    directions = read_directions(arguments, tangents)
    run = _FunctionRun(fn, arguments, has_aux, OpMonitor(), transposed=False)
    cut = detached if create_graph is False else list
    with one_forward_level(), leave_inference_mode(record=True):
        # Copies, which fn may change, or return.
        point, along = (tuple(copied(cut(x))) for x in (arguments.variables, directions))
        results: Any = named_errors(lambda: torch.func.jvp(run, point, along, has_aux=True))
    values, tangents_out, aux = (cut(tensors) for tensors in results)
    # In forward mode, torch makes float64 of a 0-dim float32 times a number.
    products = cast_to([value.dtype for value in values], tangents_out)
    refused = run.why_not_differentiable(values)
    if refused is not None:
        products = with_refused_derivatives(products, values, refused)
    trees = [pytree.unflatten(run.outputs.spec, tensors) for tensors in (values, products)]
    return (*trees, run.put_aux_back(aux)) if has_aux else tuple(trees)


def ggn_vp(
    fn: Callable[[Any], Any],
    loss: Callable[[Any], Any],
    params: PyTree,
    v: PyTree,
    *,
    create_graph: bool | None = None,
) -> tuple[Tensor, PyTree]:
    """Return the loss, and the generalized Gauss-Newton matrix times a direction.

    The matrix is `J^T H J`, with the Jacobian J of `fn` and the Hessian H of `loss` at its outputs.
    For the negative logarithm of a likelihood of the exponential family in its natural parameters,
    such as cross entropy of logits or the squared error, it is the Fisher information matrix.

    Example:
        >>> import torch, gradkit
        >>> x, w = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2)
        >>> def half_square(out):
        ...     return (out**2).sum() / 2
        >>> gradkit.func.ggn_vp(lambda w: x @ w, half_square, w, torch.tensor([1.0, 0.0]))
        (tensor(0.), tensor([10., 14.]))

    Args:
        fn: The model, from `params` to a tree of real floating-point tensors. It runs once.
        loss: From these to a real loss of one element; it must be twice differentiable.
        params: A tree of tensors, as in `hvp`.
        v: The direction, as the `tangents` of `hvp`.
        create_graph: As in `value_and_grads`.

    Returns:
        `(value, product)`: the loss, and a tree like `params`.

    Raises:
        LeafTypeError: A leaf is no tensor that has a gradient, or complex.
        OptionError: `fn` or `loss` is not a function, or an option has no such value.
        StructureError: `v` does not match `params`.
        GradkitError: As in `value_and_grads`.

    Source:
        Schraudolph 2002, "Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent";
        Martens 2020, "New Insights and Perspectives on the Natural Gradient Method", section 8,
        https://arxiv.org/abs/1412.1193
    """
    check_function(fn)
    check_function(loss, "loss")
    check_optional_bool("create_graph", create_graph)
    arguments = read_arguments((params,), 0, "params")
    directions = read_directions(arguments, v, "v")
    outputs, pull, push = _linear_maps(fn, arguments)
    tangents = push(directions)

    def gradient(outputs: PyTree) -> tuple[PyTree, Tensor]:
        value, grads = value_and_grads(loss)(outputs)
        return grads, value

    _, multiply, value = vjp(gradient, outputs, has_aux=True)
    (cotangents,) = multiply(tangents)
    (product,) = pull(cotangents)
    if create_graph is False:
        value, product = pytree.map_tensors(Tensor.detach, (value, product))
    return value, product


def linearize(
    fn: Callable[..., Any], *primals: PyTree, create_graph: bool | None = None
) -> tuple[PyTree, Callable[..., PyTree]]:
    """Return a function's outputs, and a function that multiplies by its Jacobian there.

    For many directions at one point: `fn` runs once, and each product takes a backward pass through
    the graph that is kept, without forward-mode derivatives. For one direction take `jvp`.

    Example:
        >>> import torch, gradkit
        >>> values, push = gradkit.func.linearize(lambda w: w * w, torch.tensor([1.0, 2.0]))
        >>> push(torch.tensor([1.0, 0.0])), push(torch.tensor([0.0, 1.0]))
        (tensor([2., 0.]), tensor([0., 4.]))

    Args:
        fn: As in `vjp`; it is differentiated twice. Attention inside is as in `hvp`.
        primals: As in `vjp`, but real.
        create_graph: As in `value_and_grads`.

    Returns:
        `(values, push)`. `push(*tangents)` takes a tree like each of the primals, as the `tangents`
        of `hvp`, and returns a tree like `values`, as often as it is called, as `pull` in `vjp`.

    Raises:
        LeafTypeError: A leaf is no tensor that has a gradient, or complex.
        OptionError: `fn` is not a function, or `create_graph` has no such value.
        StructureError: `push` raises it for tangents that do not match the primals.
        UnsupportedGraphError: `push` raises it if a primal was changed in place since the call.
        GradkitError: As in `value_and_grads`.

    Source:
        `torch.func.linearize`, https://pytorch.org/docs/stable/func.api.html
    """
    check_function(fn)
    check_optional_bool("create_graph", create_graph)
    arguments = read_arguments(primals, tuple(range(len(primals))))
    zeros = pytree.map_tensors(torch.zeros_like, arguments.args)
    read_directions(arguments, zeros)  # raises for complex ones
    values, _, push = _linear_maps(fn, arguments)

    def cut(tree: PyTree) -> PyTree:
        return pytree.map_tensors(Tensor.detach, tree) if create_graph is False else tree

    return cut(values), lambda *tangents: cut(push(read_directions(arguments, tangents)))


def _linear_maps(
    fn: Callable[..., Any], arguments: Arguments
) -> tuple[PyTree, Callable[..., Any], Callable[[list[Tensor]], PyTree]]:
    """Return a function's outputs, and products with its transposed Jacobian and with itself."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        outputs, pull = vjp(fn, *arguments.args)

    def grads_of_variables(cotangents: PyTree) -> list[Tensor]:
        # Once each: what `pull` gives for all places of a tied tensor would be added up.
        leaves, _ = pytree.flatten(pull(cotangents))
        return arguments.params.per_variable(leaves)

    # A pullback is linear in the cotangents; its own pullback is the product with the Jacobian.
    with leave_inference_mode(record=True):
        ones = pytree.map_tensors(torch.ones_like, outputs)
    _, multiply = vjp(grads_of_variables, ones)
    versions = _versions(arguments.variables)

    def push(directions: list[Tensor]) -> PyTree:
        _refuse_changed(arguments, arguments.variables, versions)
        return multiply(directions)[0]

    return outputs, pull, push


@dataclass
class _FunctionRun:
    """A function of a flat list of variables, and what is known once it has run."""

    fn: Callable[..., Any]
    arguments: Arguments
    has_aux: bool
    monitor: OpMonitor
    transposed: bool  # the pass that follows is a backward pass
    variables: list[Tensor] = field(init=False)
    hooked: bool = field(init=False)
    has_function: bool = field(init=False)  # while torch.compile traces
    outputs: Losses = field(init=False)
    put_aux_back: Callable[[Iterable[Tensor]], PyTree] = field(init=False)

    def __call__(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        is_traced = torch.compiler.is_compiling()
        if self.transposed and (is_traced or user_code_may_run()):
            # The pass comes after the level, where its own tensors show no nodes of the graph; and
            # torch.compile takes them for constants in a Function's `apply`.
            tensors = tuple(
                x.view_as(x) if x.layout == torch.strided else x.clone() for x in tensors
            )
        made = functions_traced() if is_traced else hooks_made()
        with self.monitor.noting():
            returned = self.fn(*self.arguments.with_variables(tensors))
        if is_traced:
            self.has_function = functions_traced() > made
        self.hooked = not is_traced and hooks_made() > made
        tree, aux = split_aux(returned) if self.has_aux else (returned, None)
        self.outputs = read_losses(tree, scalar=False, returned=True, may_be_aux=not self.has_aux)
        self.variables = list(tensors)
        if self.transposed and not torch.compiler.is_compiling():
            passes = self._passes(None, level_of(tensors[0]))
            if not passes.reaches_any(self.outputs.leaves):
                raise DetachedLossError(independent(self.outputs.first_paths()))
        tensors_of_aux, self.put_aux_back = partition_aux(aux)
        return tuple(self.outputs.leaves), tensors_of_aux

    def _passes(self, create_graph: bool | None, level: int) -> LevelPasses:
        eager = torch.is_grad_enabled()
        outer = OuterGraph(create_graph, differentiated(), eager, self.hooked)
        return LevelPasses(self.variables, level, outer, self.monitor, self.arguments.path)

    def pulled(
        self,
        pull: Callable[[tuple[Tensor, ...]], Iterable[Tensor]],
        seeds: Sequence[Tensor],
        create_graph: bool | None,
    ) -> tuple[list[Tensor | None], str | None]:
        """Return the gradients of a backward pass, and why their derivative would be wrong."""

        def run(create: bool) -> list[Tensor | None]:
            grads = pull(tuple(seeds))
            cut = detached if create_graph is False else detached_but_tangents
            return [*grads] if create else [*cut(grads)]

        if torch.compiler.is_compiling():
            if self.has_function and transforms():  # compiled, its second derivative would be 0
                raise UnsupportedGraphError(inlined_function())
            return run(create_graph is not False), None
        self.monitor.check()
        passes = self._passes(create_graph, _NO_LEVEL)
        roots = [output for output in self.outputs.leaves if output.grad_fn is not None]
        return passes.guarded(run, roots, list(seeds), self.variables), passes.outer.refused

    def why_not_differentiable(self, values: Iterable[Tensor]) -> str | None:
        """Return why a derivative that eager code takes of a jvp would be wrong."""
        if torch.compiler.is_compiling() or not any(map(carries_graph, values)):
            return None
        outer = OuterGraph(None, False, True)
        outer.allows(lambda: self.monitor.check_derivative(()), may_differentiate=False)
        return outer.refused


_NO_LEVEL = -1  # the level has ended; those around it are left


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was written on; none where nobody can tell."""
    if torch.compiler.is_compiling() or transforms():
        return []
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _refuse_changed(arguments: Arguments, point: Sequence[Tensor], versions: list[int]) -> None:
    """Raise if a primal, which the graph of the function refers to, was changed in place since."""
    for index, (before, after) in enumerate(zip(versions, _versions(point), strict=False)):
        if after != before:
            expected = "the primal as it was when the function ran"
            fix = "call it again after the change, or pass it a copy"
            got = "one that was changed in place since, or a tensor that shares its memory was"
            raise UnsupportedGraphError(message(arguments.path(index), expected, got, fix))


def _read_cotangents(
    outputs: Losses, values: Sequence[Tensor], cotangents: PyTree
) -> Iterable[Tensor]:
    by_leaf = pytree.flatten_up_to(outputs.spec, "values", cotangents, "cotangents")
    for index, (value, cotangent) in enumerate(zip(values, by_leaf, strict=True)):
        if cotangent is not None:
            where = partial(pytree.path, outputs.spec, index, "cotangents")
            check_direction(cotangent, value, where, "torch.ones_like(value)")
        yield torch.zeros_like(value) if cotangent is None else cotangent
