"""Why two methods differ at a leaf: each reason is what a check has shown, else it is unknown."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from gradkit._compat.autograd import tensor_hooks
from gradkit._core.graph import Subgraph
from gradkit.report._compare.distance import distance, is_close, is_zero, same_bits
from gradkit.report._compare.runner import (
    BACKWARD,
    CACHE,
    DROPOUT,
    FUNC,
    GRAD,
    GRAD_DTYPE,
    HOOKS,
    PER_LOSS,
    STALE,
    StepRunner,
)

_FROZEN = "frozen: torch.func differentiates with respect to whatever it is given"
_NONE = "None against zero: no loss reaches it, which torch.func fills with zeros"
_CHECKPOINTED = "inside a reentrant checkpoint, which autograd.grad cannot see into"
_RANDOM = "loss_fn or a hook differs from run to run: .backward() twice from one state differs, too"
_TIED = (
    "tied: torch.func gives each place of the tensor its own part of the gradient; the parts add up"
)
_OUTSIDE = "loss_fn also uses the tensor itself, from outside, which is a constant for torch.func"
_ROUNDING = (
    "rounding: a joint pass adds the losses in the graph, one pass per loss adds the gradients"
)
_FORWARD = "the forward pass gives other numbers there: the losses differ, too"
_CAUSES = {
    STALE: "stale .grad: .backward() adds to what is already in .grad",
    HOOKS: "a tensor hook on the leaf, which torch.func does not run",
    GRAD_DTYPE: "grad_dtype, which torch.func ignores",
    DROPOUT: "dropout RNG: the same random numbers fall on other places there",
    CACHE: "autocast casts a parameter once for all uses, and adds their gradients in the lower "
    "precision; under torch.func it casts for each use",
}
_HOOKS_PER_LOSS = "a tensor hook on the leaf, which runs for every loss by itself"
_UNKNOWN = "unknown"
_SMALL = "; no larger than rounding can explain"


def reason(runner: StepRunner, method: str, index: int) -> str:
    """Return why a method differs from `.backward()` at a leaf, as far as a check has shown."""
    return _Difference(runner, method, index).reason()


@dataclass(frozen=True)
class _Difference:
    """A method that differs from `.backward()`, and the index of the leaf at which it does."""

    runner: StepRunner
    method: str
    index: int

    @property
    def leaf(self) -> Tensor:
        leaf: Tensor = self.runner.leaves[self.index]
        return leaf

    def grad(self, method: str, without: Collection[str] = ()) -> Tensor | None:
        """Return the gradient that a method gives at the leaf, without some causes."""
        return self.runner.run(method, frozenset(without)).grads[self.index]

    def reason(self) -> str:
        is_small = is_close(self.grad(BACKWARD), self.grad(self.method))
        shown = (
            self._explained_by_ablation()
            or self._structural()
            or self._tied()
            or _random(self.runner, self.index)
            or (_ROUNDING if self.method == PER_LOSS and is_small else "")
            or self._from_outside()
        )
        if shown:
            return shown
        base, other = self.runner.run(BACKWARD), self.runner.run(self.method)
        # As text, in which nan equals itself.
        last = _UNKNOWN if str(base.values) == str(other.values) else _FORWARD
        return last + (_SMALL if is_small else "")

    def _explained_by_ablation(self) -> str:
        """Leave out possible causes, one by one and then as few together as are needed."""
        causes = self._causes()
        if self.method == FUNC:
            forward = self.runner.forward
            causes += [DROPOUT] if forward.draws else []
            causes += [CACHE] if "ToCopyBackward0" in forward.node_types else []
        for cause in causes:
            if text := self._without([cause]):
                return text
        text = self._without(causes)
        for cause in list(causes) if text else ():
            others = [other for other in causes if other != cause]
            if shorter := self._without(others):
                causes, text = others, shorter
        return text

    def _causes(self) -> list[str]:
        """Return what may cause a difference at this leaf: not what both methods treat alike."""
        leaf, method = self.leaf, self.method
        present = {
            STALE: leaf.grad is not None and method != PER_LOSS,
            HOOKS: bool(tensor_hooks(leaf)) and method != GRAD,
            GRAD_DTYPE: leaf.grad_dtype not in (None, leaf.dtype) and method == FUNC,
        }
        return [cause for cause, is_present in present.items() if is_present]

    def _without(self, causes: Collection[str]) -> str:
        """Return the reason if a difference is gone, or small, without these causes."""
        if not causes:
            return ""
        base, other = self.grad(BACKWARD, causes), self.grad(self.method, causes)
        before, other_before = self.grad(BACKWARD), self.grad(self.method)
        text = " and ".join(map(self._text, causes))
        if same_bits(base, other):
            return text
        # A difference that was small before is not explained by one that is small now.
        if base is not None and is_close(base, other) and not is_close(before, other_before):
            return f"{text}; what remains is no larger than rounding can explain"
        if before is not None and base is None and is_zero(other):
            return f"{text}; {_NONE}"
        return ""

    def _text(self, cause: str) -> str:
        return _HOOKS_PER_LOSS if (cause, self.method) == (HOOKS, PER_LOSS) else _CAUSES[cause]

    def _structural(self) -> str:
        base, other = self.grad(BACKWARD, self._causes()), self.grad(self.method)
        if self.method == FUNC and base is None:
            if not self.leaf.requires_grad:
                return self._with_causes(_FROZEN)
            if is_zero(other):
                return _NONE
        is_checkpointed = id(self.leaf) in self.runner.forward.checkpointed
        is_blind = self.method != PER_LOSS and is_zero(other) and is_checkpointed
        return _CHECKPOINTED if is_blind else ""

    def _tied(self) -> str:
        indices = [i for i, leaf in enumerate(self.runner.leaves) if leaf is self.leaf]
        if self.method != FUNC or len(indices) < 2:
            return ""
        grads = self.runner.run(FUNC).grads
        parts = [grad.to_dense() for i in indices if (grad := grads[i]) is not None]
        whole = self.grad(BACKWARD, self._causes())
        if not parts or not is_close(torch.stack(parts).sum(0), whole):
            return ""
        return self._with_causes(_TIED)

    def _with_causes(self, text: str) -> str:
        """Put before a reason the causes that change what .backward() gives."""
        base = self.grad(BACKWARD)
        changing = [c for c in self._causes() if not same_bits(base, self.grad(BACKWARD, [c]))]
        return "; ".join([*map(self._text, changing), text])

    def _from_outside(self) -> str:
        """Call the function on copies, and check whether the tensor itself is in the graph."""
        if self.method != FUNC:
            return ""
        step = self.runner.step
        with self.runner.isolated():
            copies = {
                key: x.detach().clone().requires_grad_(x.requires_grad)
                for key, x in step.inputs.items()
            }
            graph = Subgraph(step.losses_at(copies).leaves)
            return _OUTSIDE if id(self.leaf) in graph.leaves else ""


def _random(runner: StepRunner, index: int) -> str:
    """Return the reason for a leaf at which `.backward()` differs from itself; else nothing."""
    first, second = runner.run(BACKWARD).grads[index], runner.repeated.grads[index]
    return "" if same_bits(first, second) else _RANDOM


def model_reason(first: StepRunner, second: StepRunner, index: int) -> str:
    """Return what differs between two models that may explain a difference at a leaf."""
    leaves, others = first.leaves[index], second.leaves[index]
    reasons = []
    if leaves.grad is not None or others.grad is not None:
        runs = (runner.run(BACKWARD, frozenset({STALE})) for runner in (first, second))
        if same_bits(*(run.grads[index] for run in runs)):
            return _CAUSES[STALE]
        reasons.append(_CAUSES[STALE])
    reasons += _settings(first, second)
    if reasons:
        return ", ".join(reasons)
    is_small = is_close(*(runner.run(BACKWARD).grads[index] for runner in (first, second)))
    return _random(first, index) or _UNKNOWN + (_SMALL if is_small else "")


def _settings(first: StepRunner, second: StepRunner) -> list[str]:
    """Return what differs in params, buffers, modes, dtypes, devices and random numbers."""
    pairs = zip(first.leaves, second.leaves, strict=True)
    leaves = [(a, b) for a, b in pairs if a is not None and b is not None]
    modules = list(zip(first.step.modules, second.step.modules, strict=False))
    buffers = [pair for a, b in modules for pair in zip(a.buffers(), b.buffers(), strict=False)]
    parts = [pair for a, b in modules for pair in zip(a.modules(), b.modules(), strict=False)]
    is_moved = any(a.device != b.device for a, b in leaves)
    changed = sum(distance(a, b)[0] != 0 for a, b in leaves)
    differences = {
        f"other numbers in {changed} of {len(leaves)} params": changed,
        "other numbers in buffers": any(not torch.equal(a.cpu(), b.cpu()) for a, b in buffers),
        "one is in train mode, the other in eval mode": any(
            a.training != b.training for a, b in parts
        ),
        "another dtype": any(a.dtype != b.dtype for a, b in leaves),
        "another device, which rounds in other places": is_moved,
        "random numbers, which differ between devices": is_moved and first.forward.draws,
    }
    return [text for text, is_different in differences.items() if is_different]
