"""Steps that keep what they were given, and no graph: the backward pass runs them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradkit._checks import unsupported
from gradkit._core import graph, pytree
from gradkit._state.replay import Replay
from gradkit.errors import UnsupportedGraphError, message
from gradkit.meta._inner import Carry

# Takes inputs, and whether to build a graph; gives the carry after, the losses, and aux.
Run = Callable[[Any, bool], tuple[Carry, list[Tensor], Any]]


def recomputed(run: Run, inputs: Any) -> tuple[Carry, list[Tensor], Any]:
    """Run steps without keeping their graph.

    Args:
        run: The steps, as a function of `inputs`.
        inputs: A tuple with every tensor that a gradient is to flow to, the variables first.

    Returns:
        What `run` returns; the gradients of the carry and the losses flow to `inputs`.
    """
    tensors, put_back = _tensors_of(inputs)
    segment = _Segment(run, put_back, len(inputs[0]), tensors)
    flat = _Recomputed.apply(segment, *tensors)  # type: ignore[no-untyped-call]
    return segment.restore(flat)


def _tensors_of(tree: Any) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Any]]:
    leaves, spec = pytree.flatten(tree)
    others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def put_back(tensors: Iterable[Tensor]) -> Any:
        rest = iter(tensors)
        return pytree.unflatten(spec, [next(rest) if o is None else o[0] for o in others])

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], put_back


class _Segment:
    """Some steps, and what is needed to run them again.

    Args:
        run: The steps.
        put_back: Makes inputs of tensors.
        variables: How many of the tensors, at the front, are variables.
        tensors: The tensors.
    """

    def __init__(
        self,
        run: Run,
        put_back: Callable[[Iterable[Tensor]], Any],
        variables: int,
        tensors: Sequence[Tensor],
    ) -> None:
        self._run = run
        self._put_back = put_back
        self._variables = variables
        self._replay = Replay(tensors)
        self._restore: Callable[[Sequence[Tensor]], Any]

    def restore(self, flat: Sequence[Tensor]) -> tuple[Carry, list[Tensor], Any]:
        """Put flat tensors together to what the steps return."""
        carry, losses, aux = self._restore(flat)
        return carry, losses, aux

    def _flat(self, tensors: Sequence[Tensor], create: bool) -> list[Tensor]:
        carry, losses, aux = self._run(self._put_back(tensors), create)
        out, put_back = _tensors_of((carry.tensors, carry.state, losses, aux))

        def restore(flat: Sequence[Tensor]) -> Any:
            new, state, losses, aux = put_back(flat)
            return Carry(new, state), losses, aux

        self._restore = restore
        return out

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the steps for their values."""
        with torch.enable_grad(), self._replay.recording():
            own = [
                t.detach().requires_grad_(t.requires_grad or i < self._variables)
                for i, t in enumerate(tensors)
            ]
            out = self._flat(own, False)
        try:
            _refuse_captured(out, own)
        except UnsupportedGraphError:
            self._replay.undo()
            raise
        self._replay.record_outputs(out)
        return tuple(x.detach().clone() for x in out)

    def backward(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Run the steps again, and through them backwards."""
        places = [i for i, need in enumerate(needed) if need]
        again = torch.is_grad_enabled()  # the gradient is to be differentiated, too
        with torch.enable_grad(), self._replay.again():
            if again:
                # Views: the pass ends at these steps, and does not go on through those before.
                own = [t.view_as(t) if t.requires_grad else t for t in tensors]
            else:
                own = [t.detach() for t in tensors]
                for place in places:
                    own[place].requires_grad_()
            out = self._flat(own, True)
            self._replay.check(out, "loss_fn")
            if again:
                stop = {graph.edge(own[place]).node for place in places}
                nodes = graph.nodes_below([x for x in out if x.requires_grad], stop) | stop
                unsupported.refuse_wrong_derivative(
                    "loss_fn", [own[place] for place in places], nodes
                )
            pairs = [
                (x, c) for x, c in zip(out, cotangents, strict=True)
                if c is not None and x.requires_grad
            ]  # fmt: skip
            found = torch.autograd.grad(
                [x for x, _ in pairs],
                [own[place] for place in places],
                [c for _, c in pairs],
                create_graph=again,
                allow_unused=True,
            )
        grads: list[Tensor | None] = [None] * len(tensors)
        for place, grad in zip(places, found, strict=True):
            grads[place] = grad
        return grads


def _refuse_captured(out: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    live = [x for x in out if x.requires_grad]
    if live and graph.leaves_of(graph.nodes_below(live)) - set(map(id, own)):
        raise UnsupportedGraphError(
            message(
                "loss_fn",
                "a function of its arguments, where its steps are recomputed",
                "one that uses a tensor from outside that requires grad: its gradient would be "
                "lost",
                'pass it in outer, not inside of a module: unroll(..., outer={"name": tensor}); or '
                'memory="store"',
            )
        )


class _Recomputed(torch.autograd.Function):
    """A segment as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.segment = segment
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return segment.forward(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[1:]
        return (None, *ctx.segment.backward(ctx.saved_tensors, cotangents, needed))
