"""The methods that are compared: `.backward()`, `torch.autograd.grad` and `torch.func`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradkit._autograd import reference
from gradkit._core.losses import require_graph
from gradkit.report._compare.step import Step

BACKWARD, GRAD, FUNC, PER_LOSS = ".backward()", "autograd.grad", "torch.func", "loss by loss"


@dataclass(frozen=True)
class RunResult:
    """What a method gave: a gradient or None for each leaf and the losses, or why torch raised."""

    grads: Sequence[Tensor | None]
    values: tuple[float, ...] = ()
    refused: str = ""


def run_step(step: Step, method: str) -> RunResult:
    """Run a step by a method; all keep the graph, which may share a part with the caller's."""
    if method == FUNC:
        return _by_func(step)
    losses = step.losses()
    differentiable = [losses.leaves[index] for index in require_graph(losses, losses.leaves)]
    if method == GRAD:
        try:
            by_variable = reference.grad(differentiable, step.params.variables)
        except RuntimeError as error:
            return _refused(error)
        grads = step.params.per_leaf(by_variable)
    else:
        passes = [[loss] for loss in differentiable] if method == PER_LOSS else [differentiable]
        for outputs in passes:
            reference.accumulate(outputs)
        grads = [None if leaf is None else leaf.grad for leaf in step.params.leaves]
    return RunResult(grads, _values(losses.leaves))


def _by_func(step: Step) -> RunResult:
    leaves = step.leaves
    if not step.takes_params and not all(isinstance(leaf, nn.Module) for leaf in leaves):
        text = "it needs tensors outside of modules as arguments: loss_fn(params, *args)"
        return RunResult([], refused=text)
    in_modules = dict(step.container().named_parameters())
    given = {str(index): leaf for index, leaf in enumerate(leaves)}

    def total(named: dict[str, Tensor], tensors: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        losses = step.losses_at(named, list({**given, **tensors}.values())).leaves
        value = losses[0].reshape(())
        for loss in losses[1:]:
            value = value + loss.reshape(())
        return value, losses

    try:
        run = reference.func_grads(total, _detached(in_modules), _detached(given))
    except Exception as error:  # the losses could be computed without torch.func: it is the cause
        return _refused(error)
    (by_name, by_index), losses = run
    by_id = {id(in_modules[name]): grad for name, grad in by_name.items()}
    grads: list[Tensor | None] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            grads += [by_id.get(id(param)) for param in leaf.parameters()]
        else:
            grads.append(by_index.get(str(index)))
    return RunResult(grads, _values(losses))


def _detached(leaves: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the leaves that can be differentiated with respect to, without a graph."""
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _values(losses: Sequence[Tensor]) -> tuple[float, ...]:
    return tuple(float(loss.detach()) for loss in losses)


def _refused(error: Exception) -> RunResult:
    line = str(error).strip().partition("\n")[0]
    return RunResult([], refused=f"{type(error).__name__}: {line}")
