"""Products with the Jacobian of a function, its Hessian, and its Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from gradkit import errors
from gradkit._autograd.engine import inner_grads
from gradkit._checks.hooks_in_passes import passes_changed
from gradkit._checks.modified_tensors import refuse_written_since
from gradkit._compat.transforms import carries_graph, derivatives_around, is_plain, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Losses, check_function, check_option
from gradkit._core.leaf_arithmetic import same_values
from gradkit._core.ownership import leave_inference_mode, overlaps_itself, zeros_of
from gradkit._core.params import Grads, Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import (
    with_refused_derivatives,
    with_zero_derivatives,
    without_ended_graph,
)
from gradkit._state.module_state import alone, state_now
from gradkit._state.snapshot import put_back
from gradkit._torch_bugs.missing import without_forward_mode
from gradkit._torch_bugs.monitor import OpMonitor
from gradkit.errors import describe, message, warn_fallback
from gradkit.func import _level as levels
from gradkit.func._arguments import Arguments, check_options, copied, read_arguments
from gradkit.func._differentiate import HeldCall, adds_up_right, differentiate, hold, own_code
from gradkit.func._errors import ZERO_TENSOR, named_errors
from gradkit.func._grads import value_and_grads

Mode: TypeAlias = Literal["forward-over-reverse", "reverse-over-reverse"]


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
        fn: Takes the primals, and returns a tree of real floating-point tensors of any shapes.
        primals: Its positional arguments, all differentiated; leaves as in `value_and_grads`.
        has_aux: As in `value_and_grads`.
        create_graph: As in `value_and_grads`.

    Returns:
        `(values, pull)`, or `(values, pull, aux)`. `pull(cotangents)` takes a tree like `values` of
        tensors of the same shapes and dtypes, where None is zero, and returns a tuple of trees like
        the primals, as often as it is called. What `fn` has used stays as it is until then. Hooks
        that `fn` registers on tensors run in `pull` alone.

    Raises:
        FreedGraphError: In `pull`, if a pass of the caller's through what an earlier call returned
            has freed the graph: `retain_graph=True` keeps it.
        UnsupportedGraphError: In `pull`, if a primal, or a tensor that `fn` refers to, was changed
            in place since the call, and its old value is needed.
        StructureError: In `pull`, for cotangents that do not match the outputs.
        GradkitError: As in `value_and_grads`.

    Source:
        `torch.func.vjp`, https://pytorch.org/docs/stable/func.api.html
    """
    check_options(fn, has_aux=has_aux, create_graph=create_graph)
    with put_back(fn):
        return _vjp(fn, _read_primals(primals), OpMonitor(), has_aux, create_graph)


def _vjp(
    fn: Callable[..., Any],
    arguments: Arguments,
    monitor: OpMonitor,
    has_aux: bool = False,
    create_graph: bool | None = None,
) -> Any:
    run = _call(fn, arguments, monitor, has_aux=has_aux, create_graph=create_graph)
    results = pytree.unflatten(run.outputs.spec, run.values), _pull_of(run, arguments)
    return (*results, run.aux) if has_aux else results


def _call(
    fn: Callable[..., Any],
    arguments: Arguments,
    monitor: OpMonitor,
    *,
    has_aux: bool = False,
    create_graph: bool | None = None,
    is_linear: bool = False,
) -> HeldCall | levels.LevelCall:
    """Call a function for passes to come: in eager code, or in a level."""
    flags: Any = {"has_aux": has_aux, "create_graph": create_graph, "is_linear": is_linear}
    if is_plain() and adds_up_right(arguments, create_graph):
        return hold(fn, arguments, monitor, **flags)
    run = levels.LevelCall(fn, arguments, monitor, **flags, transposed=True)
    run.hold()
    return run


def _pull_of(
    run: HeldCall | levels.LevelCall, arguments: Arguments, reasons: list[str] | None = None
) -> Callable[[PyTree], tuple[PyTree, ...]]:
    versions = write_counts(arguments.variables)

    def pull(cotangents: PyTree) -> tuple[PyTree, ...]:
        _refuse_changed(arguments, versions)
        refuse_written_since(run.saved)
        by_leaf = pytree.flatten_up_to(run.outputs.spec, "values", cotangents, "cotangents")
        seeds = []
        for index, (value, seed) in enumerate(zip(run.values, by_leaf, strict=True)):
            where = partial(pytree.path, run.outputs.spec, index, "cotangents")
            seeds.append(_read_direction(seed, value, where, "torch.ones_like(value)"))
        with leave_inference_mode(record=True):
            grads, refused = named_errors(partial(run.pulled, seeds))
        grads = levels.cast_to(arguments.dtypes, grads)
        # Those around differentiate by the cotangents.
        if refused and reasons is not None and derivatives_around():
            reasons.append(refused)
            refused = None
        flags: Any = {"losses": run.values, "refused": refused}
        trees: tuple[PyTree, ...] = arguments.grads_to_tree(grads, **flags)
        return trees

    return pull


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
        has_aux: As in `value_and_grads`.
        create_graph: As in `value_and_grads`.

    Returns:
        `(values, products)`, or `(values, products, aux)`: both are trees like the outputs of `fn`.

    Raises:
        GradkitError: As in `hvp`.

    Source:
        `torch.func.jvp`, https://pytorch.org/docs/stable/func.api.html
    """
    check_options(fn, has_aux=has_aux, create_graph=create_graph)
    arguments = _read_primals(primals)
    directions = _read_directions(arguments, tangents)
    run = levels.LevelCall(fn, arguments, OpMonitor(), has_aux, create_graph, transposed=False)
    cut = levels.detached if create_graph is False else list
    turn = INSIDE if torch.compiler.is_compiling() else alone()
    with put_back(fn), turn, leave_inference_mode(record=True):
        # Copies, which fn may change, or return.
        given, count = tuple(copied(cut([*arguments.variables, *directions]))), len(directions)
        point, along = given[:count], given[count:]
        results: Any = named_errors(lambda: torch.func.jvp(run, point, along, has_aux=True))
    values, tangents_out, aux = (_without_ended_graphs(cut(each)) for each in results)
    # In forward mode, torch makes float64 of a 0-dim float32 times a number.
    products = levels.cast_to([value.dtype for value in values], tangents_out)
    if not torch.compiler.is_compiling() and any(map(carries_graph, values)):
        passes = run.passes(None, None)
        if not passes.allows(lambda: run.monitor.check_derivative()):
            products = with_refused_derivatives(products, values, passes.refused or "")
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

    The matrix is `J^T H J`, with the Jacobian J of `fn` and the Hessian H of `loss` at its outputs;
    for cross entropy of logits or the squared error, it is the Fisher information matrix.

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
        GradkitError: As in `hvp`.

    Source:
        Schraudolph 2002, "Fast Curvature Matrix-Vector Products"; Martens 2020, "New Insights and
        Perspectives on the Natural Gradient Method", section 8, https://arxiv.org/abs/1412.1193
    """
    check_options(fn, create_graph=create_graph)
    check_function(loss, "loss")
    arguments = read_arguments((params,), 0, "params")
    directions = _read_directions(arguments, v, "v")

    def gradient_and_value(outputs: PyTree) -> tuple[PyTree, Tensor]:
        value, grads = value_and_grads(loss)(outputs)
        return grads, value

    with put_back(fn, loss):
        outputs, pull, push = _linear_maps(fn, arguments)
        tangents = push(directions)
        at = _read_primals((outputs,))
        _, multiply, value = _vjp(gradient_and_value, at, OpMonitor(), has_aux=True)
        (cotangents,) = multiply(tangents)
        products = value, *pull(cotangents)
    return cast("tuple[Tensor, PyTree]", _without_graph(create_graph, products))


def linearize(
    fn: Callable[..., Any], *primals: PyTree, create_graph: bool | None = None
) -> tuple[PyTree, Callable[..., PyTree]]:
    """Return a function's outputs, and a function that multiplies by its Jacobian there.

    `fn` runs once, and each product is a backward pass through its graph; for one, take `jvp`.

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
        GradkitError: As in `hvp`; and in `push`, as in the `pull` of `vjp`.

    Source:
        `torch.func.linearize`, https://pytorch.org/docs/stable/func.api.html
    """
    check_options(fn, create_graph=create_graph)
    arguments = _read_primals(primals)
    zeros = pytree.map_tensors(zeros_of, arguments.args)
    _read_directions(arguments, zeros)  # raises for complex ones
    cut = partial(_without_graph, create_graph)
    with put_back(fn):
        values, _, push = _linear_maps(fn, arguments)
    return cut(values), lambda *tangents: cut(push(_read_directions(arguments, tangents)))


def _without_graph(create_graph: bool | None, tree: PyTree) -> PyTree:
    return pytree.map_tensors(Tensor.detach, tree) if create_graph is False else tree


def _linear_maps(
    fn: Callable[..., Any], arguments: Arguments
) -> tuple[PyTree, Callable[..., Any], Callable[[Tensors], PyTree]]:
    """Return a function's outputs, and products with its transposed Jacobian and with itself."""
    reasons: list[str] = []  # why a derivative by the primals would be wrong
    primals = _read_primals(arguments.args)
    run = _call(fn, primals, OpMonitor(more=1))
    outputs, pull = pytree.unflatten(run.outputs.spec, run.values), _pull_of(run, primals, reasons)

    def grads_of_variables(cotangents: PyTree) -> Tensors:
        # Once each: what `pull` gives for all places of a tied tensor would be added up.
        leaves, _ = pytree.flatten(pull(cotangents))
        return arguments.per_variable(leaves)

    # A pullback is linear in the cotangents; its own pullback is the product with the Jacobian.
    with leave_inference_mode(record=True):
        ones = pytree.map_tensors(torch.ones_like, outputs)
    at = _read_primals((ones,))
    multiply = _pull_of(_call(grads_of_variables, at, OpMonitor(), is_linear=True), at)
    versions = write_counts(arguments.variables)

    def push(directions: Tensors) -> PyTree:
        _refuse_changed(arguments, versions)
        products = multiply(directions)[0]
        if not reasons:
            return products
        leaves, close = pytree.partition_tensors(products)
        refused = with_refused_derivatives(leaves, arguments.variables, reasons[0])
        return close(cast("Tensors", refused))

    return outputs, pull, push


def hvp(
    fn: Callable[..., Any],
    primals: PyTree,
    tangents: PyTree,
    *,
    mode: Mode = "forward-over-reverse",
    create_graph: bool | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the gradient of a function, and its Hessian times a direction, in two passes.

    Attention runs by torch's plain formula: the fused kernels have no second derivative.

    Example:
        >>> import torch, gradkit
        >>> def loss(w):
        ...     return (w**3).sum()
        >>> gradkit.func.hvp(loss, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
        (tensor([ 3., 12.]), tensor([6., 0.]))

    Args:
        fn: Its losses, as in `value_and_grads`, are added.
        primals: Where to differentiate: a tuple (no named one) is the positional arguments of
            `fn`, any other tree its one argument. Its leaves are as in `value_and_grads`, but real.
        tangents: The direction, a tree like `primals` of tensors of the same shapes and dtypes, one
            for a tensor in several places. A None in it is zero.
        mode: `"forward-over-reverse"`, a forward pass through the gradient, keeps no graph of it;
            `"reverse-over-reverse"` takes 0.6 to 0.95 of the time on a CPU, is for what has no
            forward-mode derivative, and taken, with a `GradkitWarning`, where torch says so, or
            fails, as of `mse_loss`.
        create_graph: As in `value_and_grads`, for a third derivative.

    Returns:
        `(grads, hv)`, both like `primals`, their leaves as in `value_and_grads`.

    Raises:
        LeafTypeError: A leaf is no tensor that has a gradient, or complex.
        StructureError: The direction does not match its point.
        GradkitError: As in `value_and_grads`.

    Source:
        Pearlmutter 1994, "Fast Exact Multiplication by the Hessian"; arguments as in
        `torch.autograd.functional.hvp`, https://pytorch.org/docs/stable/autograd.html
    """
    check_options(fn, create_graph=create_graph)
    check_option("mode", mode, ("forward-over-reverse", "reverse-over-reverse"))
    arguments = _read_primals(primals)
    directions = _read_directions(arguments, tangents)
    refused: list[str | None] = []

    def grads_at(*args: Any) -> tuple[tuple[Tensor, ...], Tensors]:
        with own_code():
            here = arguments.at(args)
            run = partial(levels.gradient_of_the_sum, may_be_aux=True)
            # In eager code, no transform tells that the gradients are differentiated.
            record = True if is_plain() else None
            result = differentiate(fn, here, {}, run, has_aux=False, create_graph=record)
            refused[:] = [result.refused]
            grads: Any = _filled(result.grads[0], here.variables)
            if record:
                grads = tuple(with_zero_derivatives(grads, here.variables))
            return grads, result.values

    cut, enabled = levels.cut_of(create_graph)
    turn = INSIDE if torch.compiler.is_compiling() else alone()
    with put_back(fn), turn, leave_inference_mode(record=True), enabled, INSIDE:
        # An expanded tensor can have no tangent of its own.
        given = (cut(arguments.variables), cut(directions))
        point, along = (tuple(x.clone() if overlaps_itself(x) else x for x in xs) for xs in given)
        here = arguments.at(arguments.args_with(point))
        grads, products, losses = _grads_and_products(grads_at, here, along, mode, create_graph)
    grads, products, losses = map(_without_ended_graphs, (grads, products, losses))
    if cut is not list:
        grads, products, losses = cut(grads), cut(products), []
    # In forward mode, torch makes float64 of a 0-dim float32 times a number.
    to_tree = partial(arguments.grads_to_tree, losses=losses, refused=refused[0])
    grad_tree, hv = (to_tree(levels.cast_to(arguments.dtypes, list(x))) for x in (grads, products))
    return grad_tree, hv


def _grads_and_products(
    grads_at: Callable[..., Any],
    arguments: Arguments,
    along: tuple[Tensor, ...],
    mode: Mode,
    create_graph: bool | None,
) -> tuple[Any, Any, Tensors]:
    """Return the gradients at a point, their derivative along a direction, and the losses."""
    failed = ""  # what forward mode has failed on
    if mode == "forward-over-reverse":
        point = tuple(arguments.variables)

        def of_tensors(*tensors: Tensor) -> Any:
            return grads_at(*arguments.args_with(tensors))

        forward: Any = partial(torch.func.jvp, of_tensors, point, along, has_aux=True)
        try:
            return cast("tuple[Any, Any, Any]", named_errors(forward, nested=True))
        except errors.UnsupportedGraphError as error:
            if torch.compiler.is_compiling():  # which cannot read the text of an error
                raise
            # Some formulas of torch, that of mse_loss for one, write on the tangent of a constant.
            operator = without_forward_mode(error.__cause__)
            if ZERO_TENSOR not in str(error) and operator is None:
                raise
            failed = f"({ZERO_TENSOR}), as it does for mse_loss"
            if operator is not None:
                failed = f"on {operator}, of which it has no derivative"
        state = state_now()
        if state is not None:
            state.put_back()

    before = passes_changed()

    def run(gradients: Losses, passes: levels.LevelPasses) -> list[Grads]:
        grads, variables = gradients.leaves, passes.variables
        if passes_changed() == before:
            return [passes.grads(grads, along, variables, retain=False)]

        # A gradient that a hook has changed may have a Jacobian that is not symmetric: its product
        # with the direction is that of the transpose of the transpose.
        def pull(*seeds: Tensor) -> Any:
            return _filled(inner_grads(grads, variables, seeds, create_graph=True), variables)

        return [list(torch.func.vjp(pull, *map(torch.zeros_like, along))[1](along))]

    def reverse() -> tuple[Any, Any, Tensors]:
        flags: Any = {"has_aux": True, "create_graph": create_graph, "scalar": False}
        result = differentiate(grads_at, arguments, {}, run, **flags)
        return result.values, _filled(result.grads[0], result.values), result.aux

    results = named_errors(reverse, nested=True)
    if failed:
        warn_fallback(
            "hvp fell back from forward-over-reverse to reverse-over-reverse, and called fn again: "
            f"torch's forward mode failed {failed}. "
            'mode="reverse-over-reverse" saves the first call.'
        )
    return results


def _without_ended_graphs(tensors: Iterable[Tensor]) -> Tensors:
    return cast("Tensors", list(map(without_ended_graph, tensors)))


def _filled(grads: Iterable[Tensor | None], variables: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients with zeros in the place of None."""
    pairs = zip(grads, variables, strict=True)
    return tuple([torch.zeros_like(x) if grad is None else grad for grad, x in pairs])


def write_counts(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was written on; none where nobody can tell."""
    if torch.compiler.is_compiling() or transforms():
        return []
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _refuse_changed(arguments: Arguments, versions: list[int]) -> None:
    """Raise if a primal, which the graph of the function refers to, was changed in place since."""
    now = write_counts(arguments.variables)
    for index, (before, after) in enumerate(zip(versions, now, strict=False)):
        if after != before:
            expected = "the primal as it was when the function ran"
            fix = "call it again after the change, or pass it a copy"
            got = "one that was changed in place since, or a tensor that shares its memory was"
            raise errors.UnsupportedGraphError(message(arguments.path(index), expected, got, fix))


def _read_primals(primals: PyTree) -> Arguments:
    """Check and flatten primals: a tuple of arguments, or another tree, the only argument."""
    if type(primals) is tuple:
        return read_arguments(primals, tuple(range(len(primals))))
    return read_arguments((primals,), 0, "primals")


def _read_directions(arguments: Arguments, tangents: PyTree, root: str = "tangents") -> Tensors:
    """Return one direction for each variable."""
    of, spec = arguments.root, arguments.spec
    if not arguments.single:
        of, spec = "primals", pytree.flatten(arguments.args)[1]
    by_leaf = pytree.flatten_up_to(spec, of, tangents, root)
    if arguments.all_variables:  # a function that looks at each takes long in a trace
        fits = [
            isinstance(x, Tensor) and (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
            for x, y in zip(by_leaf, arguments.variables, strict=True)
        ]
        if False not in fits and True not in [x.is_complex() for x in by_leaf]:
            return by_leaf
    by_variable: dict[int, Tensor] = {}
    for index, (slot, tangent) in enumerate(zip(arguments.slots, by_leaf, strict=True)):
        if slot is None:
            continue
        variable = arguments.variables[slot]
        if variable.dtype.is_complex:
            path = pytree.path(spec, index, of)
            fix = "differentiate with respect to torch.view_as_real of it"
            raise errors.LeafTypeError(message(path, "a real tensor", describe(variable), fix))
        where = partial(pytree.path, spec, index, root)
        tangent = _read_direction(tangent, variable, where, "torch.randn_like(primal)")
        first = by_variable.setdefault(slot, tangent)
        if first is tangent:
            continue
        if torch.compiler.is_compiling() or not same_values(first, tangent):
            expected = "the direction that the same tensor has in its first place"
            fix = "give a tensor the same direction in all its places"
            raise errors.StructureError(message(where(), expected, "another one", fix))
    return list(by_variable.values())


def _read_direction(direction: object, like: Tensor, where: Callable[[], str], fix: str) -> Tensor:
    """Return a tangent or cotangent, zero for None; raise if it is not a tensor like this one."""
    if direction is None:
        return torch.zeros_like(like)
    if not isinstance(direction, Tensor):
        raise errors.LeafTypeError(message(where(), "a tensor or None", describe(direction), fix))
    here, there = ((x.shape, x.dtype, x.device) for x in (direction, like))
    if here != there:
        raise errors.StructureError(message(where(), describe(like), describe(direction), fix))
    return direction
