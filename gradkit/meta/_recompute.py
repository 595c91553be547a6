"""Steps that keep what they were given, and no graph: the backward pass runs them again.

A step that runs again must do the same: the random numbers are drawn from the same state, and what
it has written on (the statistics of batch norm) is put back to what it was for the while. That it
came out the same is checked by the inner losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradkit import _chance, _graph, _pytree
from gradkit._stack import transforms
from gradkit.errors import UnsupportedGraphError, message
from gradkit.meta._inner import Carry

# Takes a carry and reads, and whether to build a graph; gives the carry after and the losses.
Run = Callable[[Any, bool], tuple[Carry, list[Tensor], Any]]


def recomputed(run: Run, inputs: Any) -> tuple[Carry, list[Tensor], Any]:
    """Run steps without keeping their graph.

    Args:
        run: The steps, as a pure function of `inputs`.
        inputs: A tuple with every tensor that a gradient is to flow to, the variables first.

    Returns:
        What `run` returns; the gradients of the carry and the losses flow to `inputs`.
    """
    tensors, put_back = _tensors_of(inputs)
    segment = _Segment(run, put_back, variables=len(inputs[0]))
    flat = _Recomputed.apply(segment, *tensors)  # type: ignore[no-untyped-call]
    return segment.restore(flat)


def _tensors_of(tree: Any) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Any]]:
    leaves, spec = _pytree.flatten(tree)
    others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def put_back(tensors: Iterable[Tensor]) -> Any:
        rest = iter(tensors)
        return _pytree.unflatten(spec, [next(rest) if o is None else o[0] for o in others])

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], put_back


class _Segment:
    """Some steps, and what is needed to run them again."""

    def __init__(
        self, run: Run, put_back: Callable[[Iterable[Tensor]], Any], *, variables: int
    ) -> None:
        self._run = run
        self._variables = variables
        self._put_back = put_back
        self._written: list[tuple[ref[Tensor], Tensor]] = []
        self._random: _chance.States = []
        self._losses: list[Tensor] = []
        self._losses_now: list[Tensor] = []
        self._restore: Callable[[Sequence[Tensor]], Any]

    def restore(self, flat: Sequence[Tensor]) -> tuple[Carry, list[Tensor], Any]:
        """Put flat tensors together to what the steps return."""
        carry, losses, aux = self._restore(flat)
        return carry, losses, aux

    def _flat(self, tensors: Sequence[Tensor], create: bool) -> tuple[Tensor, ...]:
        carry, losses, aux = self._run(self._put_back(tensors), create)
        out, put_back = _tensors_of((carry.tensors, carry.state, losses, aux))

        def restore(flat: Sequence[Tensor]) -> Any:
            new, state, losses, aux = put_back(flat)
            return Carry(new, state), losses, aux

        self._restore = restore
        self._losses_now = losses
        return tuple(out)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the steps for their values."""
        if transforms():
            return tuple(x.clone() for x in self._flat(tensors, False))
        self._random = _chance.states(tensors)
        with torch.enable_grad(), _Writes() as writes:
            own = [
                t.detach().requires_grad_(t.requires_grad or i < self._variables)
                for i, t in enumerate(tensors)
            ]
            out = self._flat(own, False)
        self._refuse_captured(out, own)
        self._written = writes.outside()
        self._losses = [loss.detach() for loss in self._losses_now]
        self._losses_now = []
        return tuple(x.detach().clone() for x in out)

    def _refuse_captured(self, out: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        live = [x for x in [*out, *self._losses_now] if x.requires_grad]
        captured = _graph.leaves_of(_graph.nodes_below(live)) - set(map(id, own)) if live else ()
        if captured:
            raise UnsupportedGraphError(
                message(
                    "loss_fn",
                    "a function of its arguments, where its steps are recomputed",
                    "one that uses a tensor from outside that requires grad: its gradient would be "
                    "lost",
                    'pass it in outer: unroll(..., outer={"name": tensor}); or memory="store"',
                )
            )

    def backward(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Run the steps again, and through them backwards."""
        places = [i for i, need in enumerate(needed) if need]
        if transforms():
            return self._pulled(tensors, cotangents, places)
        again = torch.is_grad_enabled()  # the gradient is to be differentiated, too
        with torch.enable_grad(), self._as_then():
            own = list(tensors) if again else [t.detach() for t in tensors]
            if not again:
                for place in places:
                    own[place].requires_grad_()
            out = self._flat(own, True)
            self._refuse_changed()
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
        self._losses_now = []
        return self._placed(len(tensors), places, found)

    def _pulled(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None], places: list[int]
    ) -> list[Tensor | None]:
        def flat(*chosen: Tensor) -> tuple[Tensor, ...]:
            own = list(tensors)
            for place, tensor in zip(places, chosen, strict=True):
                own[place] = tensor
            return self._flat(own, True)

        out, pull = vjp(flat, *[tensors[place] for place in places])  # type: ignore[misc]
        full = [
            torch.zeros_like(x) if c is None else c for x, c in zip(out, cotangents, strict=True)
        ]
        return self._placed(len(tensors), places, pull(tuple(full)))

    @staticmethod
    def _placed(
        count: int, places: list[int], found: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * count
        for place, grad in zip(places, found, strict=True):
            grads[place] = grad
        return grads

    def _refuse_changed(self) -> None:
        for was, now in zip(self._losses, self._losses_now, strict=True):
            close = torch.finfo(was.dtype).eps ** 0.5
            if not torch.allclose(was, now.detach(), rtol=close, atol=close, equal_nan=True):
                raise UnsupportedGraphError(
                    message(
                        "loss_fn",
                        f"the inner loss that it gave before, {was.item():.6g}",
                        f"{now.item():.6g} when the step was recomputed: it reads something that "
                        "has changed since (a variable of a loop, a module, a list)",
                        'pass what changes in batches or outer; or memory="store"',
                    )
                )

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Put back, for the while, what the steps have written on, and the state of chance."""
        alive = [(tensor, before) for r, before in self._written if (tensor := r()) is not None]
        now = [tensor.detach().clone() for tensor, _ in alive]
        devices = [device for device, _ in self._random if device.type != "cpu"]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([d.index for d in devices]))
            _chance.restore(self._random)
            try:
                for tensor, before in alive:
                    tensor.data.copy_(before)  # unseen by version counters: it comes back as it was
                yield
            finally:
                for (tensor, _), value in zip(alive, now, strict=True):
                    tensor.data.copy_(value)


class _Writes(TorchFunctionMode):
    """Keeps what was in a tensor before it is first written on."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[ref[Tensor], Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in (functional.batch_norm, functional.instance_norm):
            for place, key in ((1, "running_mean"), (2, "running_var")):
                self._keep(args[place] if len(args) > place else kwargs.get(key))
        elif name.endswith("_") and not name.endswith("__") and args:
            self._keep(args[0])
        return func(*args, **kwargs)

    def _keep(self, tensor: object) -> None:
        # A value on the way to the loss has a graph: only what has none can be from outside.
        if not isinstance(tensor, Tensor) or tensor.requires_grad:
            return
        known = self._before.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._before[id(tensor)] = (ref(tensor), tensor.detach().clone())

    def outside(self) -> list[tuple[ref[Tensor], Tensor]]:
        """Return those tensors that have outlived the steps."""
        return [kept for kept in self._before.values() if kept[0]() is not None]


class _Recomputed(torch.autograd.Function):
    """A segment as one node of the graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(segment: _Segment, *tensors: Tensor) -> tuple[Tensor, ...]:
        return segment.forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.segment = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[1:]
        return (None, *ctx.segment.backward(ctx.saved_tensors, cotangents, needed))
