"""Runs a step by each method, always from the same state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradkit._core.losses import require_graph
from gradkit._state.dot_grad import grad_dtypes_put_back, grads_put_back
from gradkit._state.snapshot import Snapshot
from gradkit.report._compare import ablations
from gradkit.report._compare.ablations import NONE, Ablation
from gradkit.report._compare.methods import BACKWARD, FUNC, METHODS, RunResult
from gradkit.report._compare.step import Step, tensors_in
from gradkit.report._explain.closure import captured_by
from gradkit.report._explain.graphs import Graphs
from gradkit.report._explain.verdicts import checkpointed_tensors


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
class Runner:
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
        modules = [value for value in captured if isinstance(value, nn.Module)]
        arguments = [t for t in tensors_in(self.step.args) if t.requires_grad]  # others are copied
        attributes = [a for module in modules for m in module.modules() for a in vars(m).values()]
        generators = [v for v in (*captured, *attributes) if isinstance(v, torch.Generator)]
        tensors = tensors_in((self.step.params.leaves, arguments, modules))
        return Snapshot(modules, tensors, generators)

    @cached_property
    def forward(self) -> ForwardPass:
        """What one run of the forward pass shows."""
        with self.isolated():
            before = self.snapshot.random_states()
            losses = self.step.losses()
            differentiable = require_graph(losses, losses.leaves)
            graphs = Graphs(losses.leaves)
            hidden: dict[int, Tensor] = {}
            for index in differentiable:
                hidden |= checkpointed_tensors(graphs, index)
            return ForwardPass(
                node_types={kind.__name__ for i in differentiable for kind in graphs.kinds(i)},
                leaves={key: leaf for below in graphs.leaves for key, leaf in below.items()},
                checkpointed={key: tensor for key, tensor in hidden.items() if tensor.is_leaf},
                draws=self.snapshot.random_states() != before,
                writes_grad=self.snapshot.has_grads(),
                differentiable=len(differentiable),
            )

    def run(self, method: str, ablation: Ablation = NONE) -> RunResult:
        """Return what a method gives without what the ablation names."""
        if method == FUNC:  # the rest has no effect on it
            ablation &= {ablations.DROPOUT}
        if (method, ablation) not in self._results:
            self._results[method, ablation] = self._run(method, ablation)
        return self._results[method, ablation]

    @cached_property
    def repeated(self) -> RunResult:
        """What a second `.backward()` gives from the same state."""
        return self._run(BACKWARD, NONE)

    def _run(self, method: str, ablation: Ablation) -> RunResult:
        is_func = method == FUNC
        grads = nullcontext() if is_func else self._accumulating(self.forward, ablation)
        with self.isolated(ablation), grads:
            return METHODS[method](self.step)

    @contextmanager
    def isolated(self, ablation: Ablation = NONE) -> Iterator[None]:
        """Restore the state after a block; post-accumulate-grad hooks do not run in it.

        Often such hooks step an optimizer.
        """
        with self.snapshot.restored(), torch.enable_grad(), ExitStack() as stack:
            tables = [leaf._post_accumulate_grad_hooks for leaf in self.snapshot.leaves]
            stack.enter_context(ablations.without_hooks(tables))
            if ablations.DROPOUT in ablation:
                ablations.drop_nothing(self.snapshot.modules)
            if ablations.CACHE in ablation:
                stack.enter_context(ablations.without_autocast_cache())
            yield

    @contextmanager
    def _accumulating(self, forward: ForwardPass, ablation: Ablation) -> Iterator[None]:
        """Let a pass accumulate into `.grad`: of the params from what is stale, else from None."""
        params = list({id(leaf): leaf for leaf in self.leaves if leaf is not None}.values())
        others = forward.leaves | forward.checkpointed
        leaves = list({id(leaf): leaf for leaf in (*params, *others.values())}.values())
        with grads_put_back(leaves), grad_dtypes_put_back(leaves), ExitStack() as stack:
            tables: list[Any] = [leaf._post_accumulate_grad_hooks for leaf in leaves]
            if ablations.HOOKS in ablation:
                tables += [param._backward_hooks for param in params]
            stack.enter_context(ablations.without_hooks(tables))
            stale = [self.snapshot.grads.get(id(p)) for p in params]
            ablations.prepare_grads(params, stale, ablation)
            yield
