"""`compare`: the same step through torch's methods of computing gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradkit._checks.reachability import refuse_no_variables
from gradkit._compat.autograd import post_accumulate_hooks, tensor_hooks
from gradkit._compat.transforms import transforms
from gradkit._core.call import Call, Pass, check_option
from gradkit._core.devices import available_devices
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, StructureError, UnsupportedGraphError, describe, message
from gradkit.func._check_grads import (
    APIS,
    Derivatives,
    Tensors,
    differentiate,
    dot,
    in_double,
    random_like,
)
from gradkit.report.charts import draw_differences
from gradkit.report.steps import (
    BACKWARD,
    FUNC,
    GRAD,
    PER_LOSS,
    Step,
    distance,
    moved,
    read_step,
    same_bits,
    why_refused,
)
from gradkit.report.tables import Block, Report, Table, folded, listed, plural, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DRAWS = (
    "loss_fn draws random numbers (dropout, say). Every run started from the same random state; in "
    "a training loop, every call draws new ones."
)
_WRITES_GRAD = (
    "loss_fn itself writes .grad (it calls .backward(), say), and .backward() added to that: let "
    "it return the losses, and leave out the rest of the step."
)
_POST_HOOKS = (
    "post-accumulate-grad hooks, which only .backward() runs, were left out: often they step an "
    "optimizer."
)
_NONE = "None against zero: no loss reaches it, which torch.func fills with zeros"
_STALE = "stale .grad: .backward() adds to what is already in .grad"
_TIED = (
    "tied: torch.func gives each place of the tensor its own part of the gradient; the parts add up"
)
_FROZEN = "frozen: torch.func differentiates with respect to whatever it is given"
_HOOK = "a tensor hook on the leaf: torch.func runs none, and a pass per loss runs it for each"
_DROPOUT = "dropout: under torch.func the same random numbers may fall on other places"
_ORDER = "rounding: a joint pass adds the losses in the graph, one pass per loss adds the gradients"
_ROUNDED = 1e-5  # what finite differences in float64 are sure of
_EPS = 1e-6
_SEED = 3  # of the direction of products: the Hessian is symmetric, so one serves all modes


@dataclass(frozen=True)
class Difference:
    """How a method differs from `.backward()` at one leaf.

    Attributes:
        same: Both gave the same bits, or both None.
        absolute: The largest absolute difference of an entry, where None is zero.
        ulps: The largest difference in units in the last place: how many numbers of the coarser of
            the two dtypes lie between two entries.
        reason: What is there and may be why; `"unknown"` if nothing is; empty if `same`.
    """

    same: bool
    absolute: float
    ulps: float
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """The same step by several methods, against `.backward()`.

    Attributes:
        called: How the function was called: `loss_fn(params, *args)` or `loss_fn(*args)`.
        values: The losses, for each method.
        refused: For each method that torch cannot run, why.
        differences: `differences[method][leaf]`, for all methods but `.backward()` and the refused.
        notes: What holds for all methods, a sentence each.
        products: With `order=2`, for each pair of modes and each leaf how far its Hessian-vector
            product along a random direction is from finite differences, both in float64, relative
            to the largest entry of the product.
    """

    called: str
    values: dict[str, tuple[float, ...]]
    refused: dict[str, str]
    differences: dict[str, dict[str, Difference]]
    notes: tuple[str, ...]
    products: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether all methods that ran gave the same bits at every leaf."""
        return not self.differing()

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the largest differences, where leaves differ, on `ax` or a new figure."""
        gaps = {
            method: {name: d.absolute for name, d in leaves.items() if not d.same}
            for method, leaves in self.differences.items()
        }
        return draw_differences(self.differing(), gaps, ax)

    def differing(self) -> list[str]:
        """Return the leaves at which some method differs."""
        methods = self.differences.values()
        return [n for n in self._names if not all(leaves[n].same for leaves in methods)]

    @property
    def _names(self) -> Collection[str]:
        return next(iter(self.differences.values()), {})

    def _blocks(self) -> Sequence[Block]:
        refused = [f"{method} cannot be compared: {why}" for method, why in self.refused.items()]
        if not self.differences:
            title = f"{self.called}: nothing can be compared with .backward()"
            return [title, *refused, *self.notes]
        params, differing = plural(len(self._names), "param"), len(self.differing())
        result = f"{differing} of {params} differ" if differing else f"the same bits in {params}"
        title = f"{self.called}: .backward() against {listed(list(self.differences))}: {result}"
        blocks = [title, _table(self.differences, _cell), *self._reasons(), *self._products()]
        return [*blocks, *refused, *self.notes]

    def _products(self) -> list[Block]:
        if not self.products:
            return []
        text = "Hessian-vector products in float64: how far each is from finite differences"
        return [text, _table(self.products, _error)]

    def _reasons(self) -> list[str]:
        names: dict[tuple[str, str], list[str]] = {}
        for method, leaves in self.differences.items():
            for name, difference in leaves.items():
                if not difference.same:
                    names.setdefault((method, difference.reason), []).append(name)
        return [f"{method} ({listed(some)}): {why}" for (method, why), some in names.items()]


def _table(columns: dict[str, dict[str, Any]], cell: Callable[[Any], str]) -> Table:
    """Return a column for each method, and a row for leaves that are alike in all."""
    names = next(iter(columns.values()))
    groups = folded({name: tuple(cell(of[name]) for of in columns.values()) for name in names})
    rows = [[label, str(len(some)), *cells] for label, some, cells in groups]
    return Table(["param", "count", *columns], rows)


def _error(relative: float) -> str:
    return styled("same", "green") if relative < _ROUNDED else styled(f"{relative:.2g}", "red")


def _cell(difference: Difference) -> str:
    if difference.same:
        return styled("same", "green")
    if difference.reason.startswith("None against zero"):
        return styled("0, not None", "red")
    ulps = f"{difference.ulps:,.0f}" if difference.ulps < 1e6 else f"{difference.ulps:.0e}"
    return styled(f"{difference.absolute:.2g} ({ulps} ulp)", "red")


def compare(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    *args: Any,
    other: PyTree = None,
    device: torch.device | str | None = None,
    order: int = 1,
) -> Comparison:
    """Return where `.backward()`, `torch.autograd.grad` and `torch.func` give other gradients.

    Each method runs the same step from the same weights, buffers, `.grad` and random states, which
    are as before afterwards. A reason is something that is there, and may be why: a stale `.grad`,
    a tied parameter, a hook, dropout.

    Example:
        >>> import torch, gradkit
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, x):
        ...     return model(x).square().mean()
        >>> loss_fn(model, torch.ones(2, 3)).backward()  # and no zero_grad() after it
        >>> comparison = gradkit.report.compare(loss_fn, model, torch.ones(2, 3))
        >>> comparison.differences["autograd.grad"]["weight"].reason
        'stale .grad: .backward() adds to what is already in .grad'

    Args:
        loss_fn: Called as `loss_fn(params, *args)` with params as given, several times; torch.func
            replaces a module's parameters during the call. One that takes only `(*args)` holds its
            modules itself, and params are theirs. It returns a tree of losses of one element each.
        params: A tree of leaf tensors, modules, None, and iterators or optimizers (as tuples).
        args: Further arguments. Tensors that do not require grad are copied for each run.
        other: A second tree of the same structure: `loss_fn(other, *args)` is compared, too, with
            args on its device.
        device: Run a copy of params and args there, and compare this, too.
        order: 2 compares Hessian-vector products, too: of every pair of modes, by torch.autograd
            and by torch.func, with finite differences of the gradient. `gradkit.func.check_grads`
            finds the operation that is wrong.

    Returns:
        For each method and leaf the largest difference from `.backward()` and the reason. Several
        losses are added; `"loss by loss"` is a `.backward()` for each. torch.func gets a tensor in
        two places twice. Hooks run, except post-accumulate-grad hooks: often they step an
        optimizer. What loss_fn or hooks do beyond modules, params and random states is not undone.

    Raises:
        DetachedLossError: No loss carries a graph.
        LeafTypeError: A leaf is no leaf tensor; a loss is no real floating-point tensor; an
            argument has a graph, or can be read only once.
        NotScalarLossError: A loss has not exactly one element.
        OptionError: `order` is neither 1 nor 2; `device` is not available here; `other` and
            `device` are both given, or one of them for a loss_fn of `(*args)`.
        StructureError: A tree is empty, `other` does not match, or loss_fn is no function of these
            arguments.
        UnreachedParamError: Nothing in params requires grad.
        UnsupportedGraphError: A module is wrapped for several processes; or the call is inside a
            torch.func transform.

    Source:
        https://pytorch.org/docs/stable/autograd.html and
        https://pytorch.org/docs/stable/func.api.html
    """
    if active := transforms():
        expected = "a call outside of torch.func's transforms"
        got = f"one inside of {listed(active)}, in which .backward() cannot run"
        fix = "call it outside of the transformed function"
        raise UnsupportedGraphError(message("compare", expected, got, fix))
    check_option("order", order, (1, 2))
    second_device = _read_device(device, other)
    with leave_inference_mode(record=True):
        step = read_step(loss_fn, params, args)
        second = _second(step, other, second_device)
        if not step.params.variables:
            with step.isolated():
                losses = step.losses()
            refuse_no_variables(Call(losses, losses.leaves, [Pass([0], step.params)]))
        methods = [GRAD, FUNC, *([PER_LOSS] if step.forward.differentiable > 1 else [])]
        results = {method: step.run(method) for method in [BACKWARD, *methods]}
        results |= {name: another.run(BACKWARD) for name, another in second.items()}
        products, refused = _errors_of_products(step) if order == 2 else ({}, {})
    ran = {name: result for name, result in results.items() if not result.refused}
    base = ran[BACKWARD].grads
    return Comparison(
        called="loss_fn(params, *args)" if step.takes_params else "loss_fn(*args)",
        values={name: result.values for name, result in ran.items()},
        refused={n: run.refused for n, run in results.items() if run.refused} | refused,
        differences={n: _differences(step, n, base, ran[n].grads) for n in ran if n != BACKWARD},
        notes=_notes(step),
        products=products,
    )


def _read_device(device: torch.device | str | None, other: PyTree) -> torch.device | None:
    """Return a device that holds numbers here; raise if it does not, or `other` is given, too."""
    if device is None:
        return None
    if other is not None:
        fix = "call compare once with other=, and once with device="
        raise OptionError(message("device", "None where other is given", repr(device), fix))
    try:
        checked = torch.device(device)
        torch.zeros((), device=checked).item()
    except Exception as error:  # what torch raises depends on the kind of device
        names = [repr(str(available)) for available in available_devices()]
        allowed, fix = " or ".join(["None", *names]), f"device={names[-1]}"
        raise OptionError(message("device", allowed, repr(device), fix)) from error
    return checked


def _second(step: Step, other: PyTree, device: torch.device | None) -> dict[str, Step]:
    if other is None and device is None:
        return {}
    if not step.takes_params:
        option, value = ("device", device) if other is None else ("other", other)
        expected = "None for a loss_fn(*args), which holds its modules itself"
        fix = "loss_fn=lambda model, x: ..., which can run with another model"
        raise OptionError(message(option, expected, describe(value), fix))
    if device is not None:
        return {f"on {device}": moved(step, device)}
    second = read_step(step.fn, other, step.args)
    devices = [leaf.device for leaf in second.params.leaves if leaf is not None]
    if devices:
        second = replace(second, args=moved(step, devices[0]).args)
    shapes, other_shapes = _shapes(step), _shapes(second)
    if other_shapes != shapes:
        expected = f"the names and shapes of params, {listed(shapes)}"
        fix = "pass a model of the same architecture"
        raise StructureError(message("other", expected, listed(other_shapes), fix))
    return {"other": second}


def _shapes(step: Step) -> list[str]:
    """Return the names of the leaves, each with its shape."""
    pairs = zip(step.names, step.params.leaves, strict=True)
    return [name if leaf is None else f"{name} {tuple(leaf.shape)}" for name, leaf in pairs]


def _differences(
    step: Step, method: str, base: Sequence[Tensor | None], other: Sequence[Tensor | None]
) -> dict[str, Difference]:
    differences = {}
    for index, pair in enumerate(zip(base, other, strict=True)):
        if step.params.leaves[index] is not None:
            is_same = same_bits(*pair)
            why = "" if is_same else _reason(step, method, index, *pair)
            far = (0.0, 0.0) if is_same else distance(*pair)
            differences[step.names[index]] = Difference(is_same, *far, why)
    return differences


def _reason(step: Step, method: str, index: int, base: Tensor | None, other: Tensor | None) -> str:
    """Return what is there at a leaf that may be why a method differs from `.backward()`."""
    leaf, is_func = step.params.leaves[index], method == FUNC
    is_zero = other is None or not other.detach().to_dense().count_nonzero()
    if is_func and base is None and is_zero and leaf.requires_grad:
        return _NONE
    there = {
        _STALE: leaf.grad is not None and method != PER_LOSS,
        _HOOK: bool(tensor_hooks(leaf)) and method in (FUNC, PER_LOSS),
        _TIED: is_func and sum(one is leaf for one in step.params.leaves) > 1,
        _FROZEN: is_func and not leaf.requires_grad,
        _DROPOUT: is_func and step.forward.draws,
    }
    reasons = [reason for reason, is_there in there.items() if is_there]
    return "; ".join(reasons) or (_ORDER if method == PER_LOSS else "unknown")


def _notes(step: Step) -> tuple[str, ...]:
    notes = [_DRAWS] if step.forward.draws else []
    notes += [_WRITES_GRAD] if step.forward.writes_grad else []
    leaves = zip(step.names, step.params.leaves, strict=True)
    hooked = [name for name, leaf in leaves if leaf is not None and post_accumulate_hooks(leaf)]
    return (*notes, *([f"{listed(hooked)}: {_POST_HOOKS}"] if hooked else []))


def _errors_of_products(step: Step) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return how far off each mode is at each leaf, relative to the product; and what raised."""
    inputs = step.inputs
    constants = {key: in_double(x) for key, x in inputs.items()}
    variables = {id(x): x for x in inputs.values() if x.requires_grad}
    slots = {key: list(variables).index(id(x)) for key, x in inputs.items() if id(x) in variables}

    def total(tensors: Tensors) -> Tensors:
        here = constants | {key: tensors[slot] for key, slot in slots.items()}
        losses = step.losses_at(here, copy=in_double).leaves
        return [torch.stack([loss.reshape(()) for loss in losses]).sum()]

    at = Derivatives(total, list(map(in_double, variables.values())), step.isolated)
    along = random_like(_SEED, at.point)
    eps = _EPS / math.sqrt(dot(along, along))
    errors: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    for api, mode in product(APIS, ("reverse", "forward")):
        name = f"{mode}-over-reverse ({api})"
        gradient = partial(differentiate, total, "reverse", api, partial(random_like, 1))
        try:
            values = at.evaluate(partial(differentiate, gradient, mode, api, lambda _: along))
            ahead, behind = (at.evaluate(gradient, [s * eps * x for x in along]) for s in (1, -1))
        except Exception as error:  # the losses could be computed: torch cannot run the mode
            refused[name] = why_refused(error)
            continue
        expected = [(a - b) / (2 * eps) for a, b in zip(ahead, behind, strict=True)]
        size = max((float(x.abs().max()) for x in expected if x.numel()), default=0.0) or 1.0
        gaps = [distance(a, b)[0] / size for a, b in zip(values, expected, strict=True)]
        by_id = dict(zip(variables, gaps, strict=True))
        leaves = zip(step.names, step.params.leaves, strict=True)
        errors[name] = {leaf: by_id[id(x)] for leaf, x in leaves if id(x) in by_id}
    return errors, refused
