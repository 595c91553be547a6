"""Runs a step by each method, always from the same state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradkit._autograd import engine
from gradkit._compat.autograd import post_accumulate_hooks, tensor_hooks
from gradkit._compat.undoing import undo_stack
from gradkit._core.call import require_graph
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import captured_by
from gradkit._state.grad_attribute import copy_into_grads, grad_dtypes_put_back, grads_put_back
from gradkit._state.snapshot import Snapshot
from gradkit.errors import first_line
from gradkit.report._compare.step import Inputs, Step, tensors_in
from gradkit.report._explain.why_unreached import checkpointed_tensors

BACKWARD, GRAD, FUNC, PER_LOSS = ".backward()", "autograd.grad", "torch.func", "loss by loss"

# What a run can leave out, to see whether it is why two methods differ.
STALE, HOOKS, GRAD_DTYPE, DROPOUT, CACHE = "stale", "hooks", "grad_dtype", "dropout", "cache"
Ablation: TypeAlias = frozenset[str]
NONE: Ablation = frozenset()

# The attributes of torch's modules that hold the probability of dropout.
_DROPOUT_RATES: dict[str, tuple[type, ...]] = {
    "p": (
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
        nn.AlphaDropout, nn.FeatureAlphaDropout,
    ),
    "dropout": (nn.MultiheadAttention, nn.RNNBase),
}  # fmt: skip


@dataclass(frozen=True)
class RunResult:
    """What a method gave: a gradient or None for each leaf and the losses, or why torch raised."""

    grads: Sequence[Tensor | None]
    values: tuple[float, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class ForwardPass:
    """What one run of the forward pass shows; tensors are leaves, by id."""

    node_types: set[str]
    leaves: dict[int, Tensor]
    checkpointed: dict[int, Tensor]
    draws: bool
    writes_grad: bool
    differentiable: int


@dataclass
class StepRunner:
    """Runs a step by any method, and remembers the results."""

    step: Step
    _results: dict[tuple[str, Ablation], RunResult] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the params."""
        return self.step.params.leaves

    @cached_property
    def snapshot(self) -> Snapshot:
        """The state that every run starts from."""
        captured = captured_by((self.step.fn, self.step.args, self.step.modules))
        arguments = [t for t in tensors_in(self.step.args) if t.requires_grad]  # others are copied
        return Snapshot(captured, [*tensors_in(self.leaves), *arguments])

    @cached_property
    def forward(self) -> ForwardPass:
        """What one run of the forward pass shows."""
        with self.isolated():
            before = self.snapshot.random_states()
            losses = self.step.losses()
            differentiable = require_graph(losses, losses.leaves)
            graph = Subgraph(losses.leaves)
            checkpointed = checkpointed_tensors(graph)
            return ForwardPass(
                node_types={kind.__name__ for kind in graph.kinds},
                leaves=graph.leaves,
                checkpointed={key: x for key, x in checkpointed.items() if x.is_leaf},
                draws=self.snapshot.random_states() != before,
                writes_grad=self.snapshot.has_grads(),
                differentiable=len(differentiable),
            )

    def run(self, method: str, ablation: Ablation = NONE) -> RunResult:
        """Return what a method gives without what the ablation names."""
        if method == FUNC:  # the rest has no effect on it
            ablation &= {DROPOUT}
        if (method, ablation) not in self._results:
            self._results[method, ablation] = self._run(method, ablation)
        return self._results[method, ablation]

    @cached_property
    def repeated(self) -> RunResult:
        """What a second `.backward()` gives from the same state."""
        return self._run(BACKWARD, NONE)

    def _run(self, method: str, ablation: Ablation) -> RunResult:
        forward = None if method == FUNC else self.forward
        with self.isolated(ablation), undo_stack() as stack:
            if forward is not None:
                self._prepare_leaves(forward, ablation, stack)
            return _run_step(self.step, method)

    @contextmanager
    def isolated(self, ablation: Ablation = NONE) -> Iterator[None]:
        """Restore the state after a block, in which no post-accumulate-grad hooks run."""
        with self.snapshot.restored(), torch.enable_grad(), undo_stack() as stack:
            _empty(map(post_accumulate_hooks, self.snapshot.leaves), stack)
            if DROPOUT in ablation:
                _set_dropout_to_zero(self.snapshot.modules)
            if CACHE in ablation:
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            yield

    def _prepare_leaves(self, forward: ForwardPass, ablation: Ablation, stack: ExitStack) -> None:
        """Let a pass accumulate into `.grad`: of the params from what is stale, else from None."""
        by_id = {id(leaf): leaf for leaf in self.leaves if leaf is not None}
        params = list(by_id.values())
        leaves = list((by_id | forward.leaves | forward.checkpointed).values())
        stack.enter_context(grads_put_back(leaves))
        stack.enter_context(grad_dtypes_put_back(leaves))
        _empty(map(post_accumulate_hooks, leaves), stack)
        if HOOKS in ablation:
            _empty(map(tensor_hooks, params), stack)
        if GRAD_DTYPE in ablation:
            for param in params:
                param.grad_dtype = param.dtype
        elif STALE not in ablation:
            copy_into_grads(params, [self.snapshot.grads.get(key) for key in by_id])


def _empty(tables: Iterable[Any], stack: ExitStack) -> None:
    """Empty tables of hooks, which torch reads in each pass, until the stack is unwound."""
    for table in filter(None, tables):
        stack.callback(table.update, dict(table))
        table.clear()


def _set_dropout_to_zero(modules: Iterable[nn.Module]) -> None:
    for part in (part for module in modules for part in module.modules()):
        for name, kinds in _DROPOUT_RATES.items():
            if isinstance(part, kinds):
                setattr(part, name, 0.0)


def _run_step(step: Step, method: str) -> RunResult:
    """Run a step by a method; all keep the graph, which may share a part with the caller's."""
    if method == FUNC:
        return _by_func(step)
    losses = step.losses()
    differentiable = [losses.leaves[index] for index in require_graph(losses, losses.leaves)]
    if method == GRAD:
        try:
            by_variable = engine.reference_grad(differentiable, step.params.variables)
        except RuntimeError as error:
            return _refused(error)
        grads = step.params.per_leaf(by_variable)
    else:
        passes = [[loss] for loss in differentiable] if method == PER_LOSS else [differentiable]
        for outputs in passes:
            engine.reference_backward(outputs)
        grads = [None if leaf is None else leaf.grad for leaf in step.params.leaves]
    return RunResult(grads, _values(losses.leaves))


def _by_func(step: Step) -> RunResult:
    leaves, inputs = step.leaves, step.inputs
    if not step.takes_params and not all(isinstance(leaf, nn.Module) for leaf in leaves):
        text = "it needs tensors outside of modules as arguments: loss_fn(params, *args)"
        return RunResult([], refused=text)

    def total(inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
        losses = step.losses_at(inputs).leaves
        first, *others = (loss.reshape(()) for loss in losses)
        return sum(others, start=first), losses

    try:
        detached = {key: x.detach() for key, x in inputs.items()}
        (by_input,), losses = engine.reference_func_grads(total, detached)
    except Exception as error:  # the losses could be computed without torch.func: it is the cause
        return _refused(error)
    by_id = {id(inputs[key]): grad for key, grad in by_input.items() if isinstance(key, str)}
    grads: list[Tensor | None] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            grads += [by_id.get(id(param)) for param in leaf.parameters()]
        else:
            grads.append(by_input.get(index))
    return RunResult(grads, _values(losses))


def _values(losses: Sequence[Tensor]) -> tuple[float, ...]:
    return tuple(float(loss.detach()) for loss in losses)


def _refused(error: Exception) -> RunResult:
    return RunResult([], refused=why_refused(error))


def why_refused(error: Exception) -> str:
    """Return the class of an error and its first line."""
    return f"{type(error).__name__}: {first_line(error)}"
