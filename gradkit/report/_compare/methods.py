"""The methods that are compared: `.backward()`, `torch.autograd.grad` and `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradkit._autograd import reference
from gradkit._core.losses import Losses, require_graph
from gradkit._core.pytree import PyTree
from gradkit.report._compare.step import Step

BACKWARD, GRAD, FUNC, PER_LOSS = ".backward()", "autograd.grad", "torch.func", "loss by loss"


@dataclass(frozen=True)
class RunResult:
    """What a method gave: a gradient or None for each leaf and the losses, or why torch raised."""

    grads: Sequence[Tensor | None]
    values: tuple[float, ...] = ()
    refused: str = ""


def _by_backward(step: Step) -> RunResult:
    losses = step.losses()
    reference.backward(_differentiable(losses))
    return _accumulated(step, losses)


def _by_backward_per_loss(step: Step) -> RunResult:
    losses = step.losses()
    for loss in _differentiable(losses):
        reference.backward([loss])
    return _accumulated(step, losses)


def _accumulated(step: Step, losses: Losses) -> RunResult:
    return RunResult([None if p is None else p.grad for p in step.params.leaves], _values(losses))


def _by_grad(step: Step) -> RunResult:
    losses = step.losses()
    try:
        grads = reference.grad(_differentiable(losses), step.params.variables)
    except RuntimeError as error:
        return RunResult([], refused=_first_line(error))
    slots = step.params.slots
    return RunResult([None if slot is None else grads[slot] for slot in slots], _values(losses))


def _by_func(step: Step) -> RunResult:
    leaves = step.leaves
    if not step.takes_params and not all(isinstance(leaf, nn.Module) for leaf in leaves):
        text = "it needs tensors outside of modules as arguments: loss_fn(params, *args)"
        return RunResult([], refused=text)
    named = {name: p for name, p in step.container().named_parameters() if _is_number(p)}
    tensors = {str(index): leaf for index, leaf in enumerate(leaves) if _is_number(leaf)}

    def total(named: dict[str, Tensor], tensors: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        placed = [tensors.get(str(index), leaf) for index, leaf in enumerate(leaves)]
        losses = step.losses_at(named, placed).leaves
        value = losses[0].reshape(())
        for loss in losses[1:]:
            value = value + loss.reshape(())
        return value, losses

    try:
        run = reference.func_grads(total, _detached(named), _detached(tensors))
    except Exception as error:  # the losses could be computed without torch.func: it is the cause
        return RunResult([], refused=_first_line(error))
    (by_name, by_index), losses = run
    by_id = {id(p): by_name[name] for name, p in named.items()}
    grads: list[Tensor | None] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            grads += [by_id.get(id(p)) for p in leaf.parameters()]
        else:
            grads.append(by_index.get(str(index)))
    return RunResult(grads, tuple(map(_value, losses)))


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _is_number(leaf: PyTree) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _differentiable(losses: Losses) -> list[Tensor]:
    return [losses.leaves[index] for index in require_graph(losses, losses.leaves)]


def _values(losses: Losses) -> tuple[float, ...]:
    return tuple(map(_value, losses.leaves))


def _value(loss: Tensor) -> float:
    return float(loss.detach())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# Each keeps the graph, as loss_fn may use tensors that are part of another graph of the caller's.
METHODS: dict[str, Callable[[Step], RunResult]] = {
    BACKWARD: _by_backward,
    GRAD: _by_grad,
    FUNC: _by_func,
    PER_LOSS: _by_backward_per_loss,
}
