"""Why two methods differ at a leaf: each reason is what a check has shown, else it is unknown."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from gradkit.report._compare.ablations import CACHE, DROPOUT, GRAD_DTYPE, HOOKS, NONE, STALE
from gradkit.report._compare.distance import is_close, is_zero, same_bits
from gradkit.report._compare.methods import BACKWARD, FUNC, GRAD, PER_LOSS
from gradkit.report._compare.runner import Runner
from gradkit.report._explain.graphs import Graphs

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
CAUSES = {
    STALE: "stale .grad: .backward() adds to what is already in .grad",
    HOOKS: "a tensor hook on the leaf, which torch.func does not run",
    GRAD_DTYPE: "grad_dtype, which torch.func ignores",
    DROPOUT: "dropout RNG: the same random numbers fall on other places there",
    CACHE: "autocast casts a parameter once for all uses, and adds their gradients in the lower "
    "precision; under torch.func it casts for each use",
}
_HOOKS_PER_LOSS = "a tensor hook on the leaf, which runs for every loss by itself"
UNKNOWN = "unknown"
SMALL = "; no larger than rounding can explain"


def reason(runner: Runner, method: str, index: int) -> str:
    """Return why a method differs from `.backward()` at a leaf, as far as a check has shown."""
    return _Difference(runner, method, index).reason()


@dataclass(frozen=True)
class _Difference:
    """A method that differs from `.backward()`, and the index of the leaf at which it does."""

    runner: Runner
    method: str
    index: int

    @property
    def leaf(self) -> Tensor:
        leaf: Tensor = self.runner.leaves[self.index]
        return leaf

    def backward_grad(self, ablation: frozenset[str] = NONE) -> Tensor | None:
        return self.runner.run(BACKWARD, ablation).grads[self.index]

    def method_grad(self, ablation: frozenset[str] = NONE) -> Tensor | None:
        return self.runner.run(self.method, ablation).grads[self.index]

    def reason(self) -> str:
        is_small = is_close(self.backward_grad(), self.method_grad())
        checks: tuple[Callable[[], str], ...] = (
            self._explained_by_ablation,
            self._structural,
            self._tied,
            lambda: random_reason(self.runner, self.index),
            lambda: _ROUNDING if self.method == PER_LOSS and is_small else "",
            self._from_outside,
        )
        shown = next(filter(None, (check() for check in checks)), "")
        base, other = self.runner.run(BACKWARD), self.runner.run(self.method)
        # As text, in which nan equals itself.
        last = UNKNOWN if str(base.values) == str(other.values) else _FORWARD
        return shown or last + (SMALL if is_small else "")

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
            HOOKS: bool(leaf._backward_hooks) and method != GRAD,
            GRAD_DTYPE: leaf.grad_dtype not in (None, leaf.dtype) and method == FUNC,
        }
        return [cause for cause, is_present in present.items() if is_present]

    def _without(self, causes: Collection[str]) -> str:
        """Return the reason if a difference is gone, or small, without these causes."""
        if not causes:
            return ""
        ablation = frozenset(causes)
        base, other = self.backward_grad(ablation), self.method_grad(ablation)
        before, other_before = self.backward_grad(), self.method_grad()
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
        return _HOOKS_PER_LOSS if (cause, self.method) == (HOOKS, PER_LOSS) else CAUSES[cause]

    def _structural(self) -> str:
        base, other = self.backward_grad(frozenset(self._causes())), self.method_grad()
        is_func = self.method == FUNC
        if is_func and not self.leaf.requires_grad and base is None:
            return self._with_causes(_FROZEN)
        if is_func and base is None and is_zero(other):
            return _NONE
        is_checkpointed = id(self.leaf) in self.runner.forward.checkpointed
        if self.method in (GRAD, FUNC) and is_zero(other) and is_checkpointed:
            return _CHECKPOINTED
        return ""

    def _tied(self) -> str:
        indices = [i for i, leaf in enumerate(self.runner.leaves) if leaf is self.leaf]
        if self.method != FUNC or len(indices) < 2:
            return ""
        grads = self.runner.run(FUNC).grads
        parts = [grad.to_dense() for i in indices if (grad := grads[i]) is not None]
        whole = self.backward_grad(frozenset(self._causes()))
        if not parts or not is_close(torch.stack(parts).sum(0), whole):
            return ""
        return self._with_causes(_TIED)

    def _with_causes(self, text: str) -> str:
        """Put before a reason the causes that change what .backward() gives."""
        base = self.backward_grad()
        causes = [
            self._text(cause)
            for cause in self._causes()
            if not same_bits(base, self.backward_grad(frozenset({cause})))
        ]
        return "; ".join([*causes, text])

    def _from_outside(self) -> str:
        """Call the function on copies, and check whether the tensor itself is in the graph."""
        if self.method != FUNC:
            return ""
        step = self.runner.step
        with self.runner.isolated():
            named = {name: _copy(p) for name, p in step.container().named_parameters()}
            leaves = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in step.leaves]
            graphs = Graphs(step.losses_at(named, leaves).leaves)
        return _OUTSIDE if any(id(self.leaf) in leaves for leaves in graphs.leaves) else ""


def random_reason(runner: Runner, index: int) -> str:
    """Return the reason for a leaf at which `.backward()` differs from itself; else nothing."""
    first, second = runner.run(BACKWARD).grads[index], runner.repeated.grads[index]
    return "" if same_bits(first, second) else _RANDOM


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
