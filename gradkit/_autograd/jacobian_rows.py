"""The elements of losses as rows of a matrix of gradients, which is never built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from gradkit._autograd.consume_on_arrival import Consume, ConsumingRunner
from gradkit._autograd.engine import numbered_roots
from gradkit._autograd.jacobian import one_hot, refuse_nested, why_not_batched
from gradkit._autograd.passes import PassRunner
from gradkit._autograd.release import release
from gradkit._checks.eager_graph import check_call
from gradkit._checks.modified_tensors import refuse_pre_hooks
from gradkit._checks.reachability import require_reached
from gradkit._compat.distributed import cotangent_for
from gradkit._compat.transforms import BATCH_FAILURES
from gradkit._core.call import Call, Grads, Losses, Pass, require_graph
from gradkit._core.grad_recorder import hidden_passes
from gradkit._core.leaf_arithmetic import common_dtype
from gradkit._core.ownership import grad_dtype
from gradkit._core.params import Params
from gradkit._state.hook_tables import put_hooks_back
from gradkit.errors import GradkitError, LeafTypeError, first_line, message, warn_fallback

ARRIVED = torch.empty(0)  # stands for a gradient that has arrived and is gone


@dataclass(slots=True)
class JacobianRows:
    """The elements of all losses in order: the rows of the matrix of gradients."""

    call: Call  # has a pass for each loss
    params: Params
    allowed: Collection[str] = ()  # kinds of nodes that raise otherwise; the caller sees to them
    elements: list[tuple[int, int]] = field(init=False)  # the number of a loss, and of an element
    arrived: Grads = field(init=False)  # not None if a gradient of some loss has arrived

    def __post_init__(self) -> None:
        leaves = self.call.losses.leaves
        self.elements = [(i, e) for i, loss in enumerate(leaves) for e in range(loss.numel())]
        self.arrived = [None] * len(self.params.variables)

    @property
    def differentiable(self) -> list[int]:
        """The rows that are not those of constants."""
        outputs = self.call.outputs
        return [row for row, (index, _) in enumerate(self.elements) if outputs[index].requires_grad]

    def run_one(self, runner: PassRunner, row: int, *, retain: bool = True) -> Grads:
        """Run the pass of one row."""
        index, element = self.elements[row]
        loss = self.call.outputs[index]
        seed = None
        if loss.dim():
            seed = cotangent_for(loss, one_hot(loss, element, element + 1)[0])
        with numbered_roots([loss]) as roots:
            grads = runner.grads(roots, [seed], self.params.variables, retain=retain)
        self.note(grads)
        return grads

    def run_batch(self, parts: Sequence[slice], consume: Consume) -> None:
        """Run the vmapped pass of some ranges of rows, which keeps the graph."""
        outputs: list[Tensor] = []
        seeds: list[Tensor] = []
        sizes = [loss.numel() for loss in self.call.outputs]
        for loss, stop, size in zip(self.call.outputs, accumulate(sizes), sizes, strict=True):
            start = stop - size
            if loss.requires_grad and any(p.start < stop and start < p.stop for p in parts):
                outputs.append(loss)
                shifted = [one_hot(loss, p.start - start, p.stop - start) for p in parts]
                seeds.append(torch.cat(shifted))
        if outputs:
            runner = ConsumingRunner(self.call, consume=consume)
            with numbered_roots(outputs) as roots:
                self.note(runner.batch(roots, seeds, self.params.variables))

    def note(self, grads: Grads) -> None:
        """Note which variables a pass has reached."""
        pairs = zip(self.arrived, grads, strict=True)
        self.arrived = [seen if grad is None else ARRIVED for seen, grad in pairs]

    def require_reached(self) -> None:
        """Raise if no gradient has arrived at all."""
        require_reached(self.call, [self.arrived] * len(self.call.passes))

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the common dtype of the gradients, real and float32 at least."""
        variables = self.params.variables
        dtypes = (grad_dtype(variable).to_real() for variable in variables)
        return torch.zeros(shape, dtype=common_dtype(*dtypes), device=variables[0].device)

    def why_not_batched(self, losses: Sequence[int]) -> str | None:
        """Return why batched passes for some losses are known to be wrong, or not to run."""
        if not self.call.no_subclasses:
            return "a tensor of a subclass cannot be batched"
        below = self.call.graph.below(losses)
        with hidden_passes():  # as they are
            return why_not_batched(below, self.allowed)

    def batched(self, run: Callable[[], Tensor], losses: Sequence[int]) -> Tensor | None:
        """Return what batched passes give; None, with a warning, where they are wrong or fail."""
        reason = self.why_not_batched(losses)
        if reason is None:
            try:
                result = run()
            except BATCH_FAILURES as error:
                if isinstance(error, GradkitError):
                    raise
                put_hooks_back()
                reason = f"the batched pass failed ({type(error).__name__}: {first_line(error)})"
            else:
                # The host has to wait for it. One loss's cotangents are zeros in another's graph.
                if len(losses) == 1 or result.is_meta or bool(torch.isfinite(result).all()):
                    return result
                reason = "a gradient is not finite, and 0 * inf is nan for all losses of a batch"
        warn_sequential(reason)
        return None

    def release(self, losses: Sequence[int]) -> None:
        """Free the graph of some losses, as a pass without `retain_graph` does."""
        below = self.call.graph.below(losses)
        release(below.leading_to(self.params.variables))


def warn_sequential(reason: str) -> None:
    """Warn that sequential passes run where a batched one would take less time."""
    warn_fallback(f"gradkit fell back from a batched pass to sequential passes: {reason}.")


def read_jacobian_rows(
    losses: Losses, params: Params, allowed: Collection[str] = ()
) -> JacobianRows:
    """Check a call whose gradients are to be consumed."""
    for index, loss in enumerate(losses.leaves):
        if loss.layout != torch.strided:
            got, fix = f"one of {loss.layout}", "loss.to_dense(); or gradkit.per_loss_grads"
            raise LeafTypeError(message(losses.path(index), "a dense loss", got, fix))
    group = require_graph(losses, losses.leaves, [params])
    passes = [Pass([index], params) for index in group]
    call = Call(losses, losses.leaves, passes, allowed=allowed)
    check_call(call)
    refuse_pre_hooks(call)  # before a warning that a batched pass is not run
    refuse_nested(params, "gradkit.tree.gram(gradkit.per_loss_grads(losses, params)), of scalars")
    return JacobianRows(call, params, allowed)
