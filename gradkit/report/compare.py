"""`compare`: the same step through torch's methods of computing gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradkit._checks.reachability import refuse_no_variables
from gradkit._compat.autograd import post_accumulate_hooks, tensor_hooks
from gradkit._compat.transforms import transforms
from gradkit._core.call import Call, Pass
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit._core.tables import Block, Report, Table, folded, listed, plural, styled
from gradkit.errors import UnsupportedGraphError, message
from gradkit.report.charts import draw_differences
from gradkit.report.steps import BACKWARD, FUNC, GRAD, Step, distance, read_step, same_bits

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
_NONE = "None against zero: no loss reaches it; .backward() leaves None, torch.func gives zeros"
_STALE = "stale .grad: .backward() adds to what is already in .grad"
_TIED = (
    "tied: torch.func gives each place of the tensor its own part of the gradient; the parts add up"
)
_FROZEN = "frozen: requires_grad is False, and torch.func differentiates it all the same"
_HOOK = "a tensor hook on the leaf: torch.func runs none"


@dataclass(frozen=True)
class Difference:
    """How a method differs from `.backward()` at one leaf.

    Attributes:
        same: Both gave the same bits, or both None.
        absolute: The largest absolute difference of an entry, where None is zero.
        reason: What is there and may be why; `"unknown"` if nothing is; empty if `same`.
    """

    same: bool
    absolute: float
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
    """

    called: str
    values: dict[str, tuple[float, ...]]
    refused: dict[str, str]
    differences: dict[str, dict[str, Difference]]
    notes: tuple[str, ...]

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
        return [name for name, row in self._by_leaf().items() if not all(d.same for d in row)]

    def _by_leaf(self) -> dict[str, tuple[Difference, ...]]:
        columns = list(self.differences.values())
        return {name: tuple(of[name] for of in columns) for name in (columns or [{}])[0]}

    def _blocks(self) -> Sequence[Block]:
        refused = [f"{method} cannot be compared: {why}" for method, why in self.refused.items()]
        if not self.differences:
            title = f"{self.called}: nothing can be compared with .backward()"
            return [title, *refused, *self.notes]
        by_leaf, differing = self._by_leaf(), len(self.differing())
        params = plural(len(by_leaf), "param")
        result = f"{differing} of {params} differ" if differing else f"the same bits in {params}"
        title = f"{self.called}: .backward() against {listed(list(self.differences))}: {result}"
        # A row for leaves that are alike in all columns.
        groups = folded({name: tuple(map(_cell, row)) for name, row in by_leaf.items()})
        rows = [[label, str(len(some)), *cells] for label, some, cells in groups]
        table = Table(["param", "count", *self.differences], rows)
        return [title, table, *self._reasons(), *refused, *self.notes]

    def _reasons(self) -> list[str]:
        names: dict[tuple[str, str], list[str]] = {}
        for method, leaves in self.differences.items():
            for name, difference in leaves.items():
                if not difference.same:
                    names.setdefault((method, difference.reason), []).append(name)
        return [f"{method} ({listed(some)}): {why}" for (method, why), some in names.items()]


def _cell(difference: Difference) -> str:
    if difference.same:
        return styled("same", "green")
    is_none = difference.reason == _NONE
    return styled("0, not None" if is_none else f"{difference.absolute:.2g}", "red")


def compare(loss_fn: Callable[..., PyTree], params: PyTree, *args: Any) -> Comparison:
    """Return where `.backward()`, `torch.autograd.grad` and `torch.func` give other gradients.

    Each method runs the same step from the same weights, buffers, `.grad` and random states, which
    are as before afterwards. A reason is something that is there, and may be why: a stale `.grad`,
    a tied parameter, a hook.

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

    Returns:
        For each method and leaf the largest difference from `.backward()` and the reason. Several
        losses are added. torch.func gets a tensor in two places twice. Hooks run, except
        post-accumulate-grad hooks: often they step an optimizer. What loss_fn or hooks do beyond
        modules, params and random states is not undone.

    Raises:
        DetachedLossError: No loss carries a graph.
        LeafTypeError: A leaf is no leaf tensor; a loss is no real floating-point tensor; an
            argument has a graph, or can be read only once.
        NotScalarLossError: A loss has not exactly one element.
        StructureError: A tree is empty, or loss_fn is no function of these arguments.
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
    with leave_inference_mode(record=True):
        step = read_step(loss_fn, params, args)
        if not step.params.variables:
            with step.isolated():
                losses = step.losses()
            refuse_no_variables(Call(losses, losses.leaves, [Pass([0], step.params)]))
        results = {method: step.run(method) for method in (BACKWARD, GRAD, FUNC)}
    ran = {name: result for name, result in results.items() if not result.refused}
    base = ran[BACKWARD].grads
    return Comparison(
        called="loss_fn(params, *args)" if step.takes_params else "loss_fn(*args)",
        values={name: result.values for name, result in ran.items()},
        refused={n: run.refused for n, run in results.items() if run.refused},
        differences={n: _differences(step, n, base, ran[n].grads) for n in ran if n != BACKWARD},
        notes=_notes(step),
    )


def _differences(
    step: Step, method: str, base: Sequence[Tensor | None], other: Sequence[Tensor | None]
) -> dict[str, Difference]:
    rows = zip(step.names, step.params.leaves, base, other, strict=True)
    return {
        name: Difference(same=True, absolute=0.0)
        if same_bits(a, b)
        else Difference(False, distance(a, b), _reason(step, method, leaf, a, b))
        for name, leaf, a, b in rows
        if leaf is not None
    }


def _reason(
    step: Step, method: str, leaf: Tensor, base: Tensor | None, other: Tensor | None
) -> str:
    """Return what is there at a leaf that may be why a method differs from `.backward()`."""
    is_func = method == FUNC
    is_zero = other is None or not other.detach().to_dense().count_nonzero()
    if is_func and base is None and is_zero and leaf.requires_grad:
        return _NONE
    there = {
        _STALE: leaf.grad is not None,
        _HOOK: is_func and bool(tensor_hooks(leaf)),
        _TIED: is_func and sum(one is leaf for one in step.params.leaves) > 1,
        _FROZEN: is_func and not leaf.requires_grad,
    }
    return "; ".join(reason for reason, is_there in there.items() if is_there) or "unknown"


def _notes(step: Step) -> tuple[str, ...]:
    notes = [_DRAWS] if step.forward.draws else []
    notes += [_WRITES_GRAD] if step.forward.writes_grad else []
    leaves = zip(step.names, step.params.leaves, strict=True)
    hooked = [name for name, leaf in leaves if leaf is not None and post_accumulate_hooks(leaf)]
    return (*notes, *([f"{listed(hooked)}: {_POST_HOOKS}"] if hooked else []))
