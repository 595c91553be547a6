"""`compare`: the same step through torch's methods of computing gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradkit._checks.reachability import refuse_no_variables
from gradkit._compat.transforms import transforms
from gradkit._core.call import Call, Pass, check_option
from gradkit._core.devices import available_devices
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, StructureError, UnsupportedGraphError, describe, message
from gradkit.report._compare.distance import distance, same_bits
from gradkit.report._compare.products import errors_of_products
from gradkit.report._compare.runner import BACKWARD, FUNC, GRAD, PER_LOSS, RunResult, StepRunner
from gradkit.report._compare.step import Step, moved, read_step
from gradkit.report._compare.why_different import model_reason, reason
from gradkit.report._view.charts import draw_differences
from gradkit.report._view.rendering import Block, Report, Styled, Table, folded, listed, plural

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

_ROUNDED = 1e-5  # what finite differences in float64 are sure of


@dataclass(frozen=True)
class Difference:
    """How a method differs from `.backward()` at one leaf.

    Attributes:
        same: Both gave the same bits, or both None.
        absolute: The largest absolute difference of an entry, where None is zero.
        ulps: The largest difference in units in the last place: how many numbers of the coarser of
            the two dtypes lie between two entries.
        reason: Why, as far as a check has shown; `"unknown"` otherwise; empty if `same`.
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
        blocks = [title, self._table(), *self._reasons(), *self._products()]
        return [*blocks, *refused, *self.notes]

    def _products(self) -> list[Block]:
        if not self.products:
            return []
        text = "Hessian-vector products in float64: how far each is from finite differences"
        modes = self.products.values()
        cells = {
            name: tuple(_error(leaves[name]) for leaves in modes) for name in next(iter(modes))
        }
        rows = [[label, str(len(group)), *kind] for label, group, kind in folded(cells)]
        return [text, Table(["param", "count", *self.products], rows)]

    def _table(self) -> Table:
        methods = self.differences.values()
        groups = folded({name: tuple(leaves[name] for leaves in methods) for name in self._names})
        rows = [[label, str(len(names)), *map(_cell, kind)] for label, names, kind in groups]
        return Table(["param", "count", *self.differences], rows)

    def _reasons(self) -> list[str]:
        names: dict[tuple[str, str], list[str]] = {}
        for method, leaves in self.differences.items():
            for name, difference in leaves.items():
                if not difference.same:
                    names.setdefault((method, difference.reason), []).append(name)
        return [f"{method} ({listed(some)}): {why}" for (method, why), some in names.items()]


def _error(relative: float) -> str:
    return Styled("same", "good") if relative < _ROUNDED else Styled(f"{relative:.2g}", "bad")


def _cell(difference: Difference) -> str:
    if difference.same:
        return Styled("same", "good")
    if difference.reason.startswith("None against zero"):
        return Styled("0, not None", "bad")
    ulps = f"{difference.ulps:,.0f}" if difference.ulps < 1e6 else f"{difference.ulps:.0e}"
    return Styled(f"{difference.absolute:.2g} ({ulps} ulp)", "bad")


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
    are as before afterwards. Each reason for a difference is one that a further run has shown.

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
        runner = StepRunner(step)
        if not step.params.variables:
            with runner.isolated():
                losses = step.losses()
            refuse_no_variables(Call(losses, losses.leaves, [Pass([0], step.params)]))
        methods = [GRAD, FUNC, *([PER_LOSS] if runner.forward.differentiable > 1 else [])]
        results = {method: runner.run(method) for method in [BACKWARD, *methods]}
        whys = {method: partial(reason, runner, method) for method in methods}
        for name, another in second.items():
            results[name] = another.run(BACKWARD)
            whys[name] = partial(model_reason, runner, another)
        products, refused = errors_of_products(runner) if order == 2 else ({}, {})
        ran = {name: result for name, result in results.items() if not result.refused}
        return Comparison(
            called=step.called,
            values={name: result.values for name, result in ran.items()},
            refused={n: run.refused for n, run in results.items() if run.refused} | refused,
            differences={n: _differences(runner, ran[n], whys[n]) for n in whys if n in ran},
            notes=_notes(runner),
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


def _second(step: Step, other: PyTree, device: torch.device | None) -> dict[str, StepRunner]:
    if other is None and device is None:
        return {}
    if not step.takes_params:
        option, value = ("device", device) if other is None else ("other", other)
        expected = "None for a loss_fn(*args), which holds its modules itself"
        fix = "loss_fn=lambda model, x: ..., which can run with another model"
        raise OptionError(message(option, expected, describe(value), fix))
    if device is not None:
        return {f"on {device}": StepRunner(moved(step, device))}
    second = read_step(step.fn, other, step.args)
    devices = [leaf.device for leaf in second.params.leaves if leaf is not None]
    if devices:
        second = replace(second, args=moved(step, devices[0]).args)
    shapes, other_shapes = _shapes(step), _shapes(second)
    if other_shapes != shapes:
        expected = f"the names and shapes of params, {listed(shapes)}"
        fix = "pass a model of the same architecture"
        raise StructureError(message("other", expected, listed(other_shapes), fix))
    return {"other": StepRunner(second)}


def _shapes(step: Step) -> list[str]:
    """Return the names of the leaves, each with its shape."""
    pairs = zip(step.names, step.params.leaves, strict=True)
    return [name if leaf is None else f"{name} {tuple(leaf.shape)}" for name, leaf in pairs]


def _differences(
    runner: StepRunner, result: RunResult, why: Callable[[int], str]
) -> dict[str, Difference]:
    base = runner.run(BACKWARD)
    differences = {}
    for index, name in enumerate(runner.step.names):
        if runner.leaves[index] is not None:
            pair = base.grads[index], result.grads[index]
            differences[name] = Difference(True, 0.0, 0.0)
            if not same_bits(*pair):
                differences[name] = Difference(False, *distance(*pair), why(index))
    return differences


def _notes(runner: StepRunner) -> tuple[str, ...]:
    notes = [_DRAWS] if runner.forward.draws else []
    notes += [_WRITES_GRAD] if runner.forward.writes_grad else []
    leaves = zip(runner.step.names, runner.leaves, strict=True)
    hooked = [name for name, leaf in leaves if getattr(leaf, "_post_accumulate_grad_hooks", None)]
    if hooked:
        notes.append(f"{listed(hooked)}: {_POST_HOOKS}")
    return tuple(notes)
