"""checkpoint: a function that keeps its arguments, and no graph, until it runs a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain, compress
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from gradkit._autograd.engine import inner_grads
from gradkit._autograd.passes import InnerPass
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import (
    carries_graph,
    carries_tangent,
    compiled_autograd_disabled,
    detached_leaf,
    forward_mode_on,
    function_modes,
    is_transform_tensor,
    memory_of,
    recording_levels,
    run_in_level,
    transforms,
    unbatched,
    without_ended_levels,
)
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit._core import pytree
from gradkit._core.call import check_function
from gradkit._core.graph import Subgraph, edge
from gradkit._core.params import Grads, Tensors, refuse_distributed
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import captured_by
from gradkit._state.copy_on_write import CopyOnWrite, CopyOnWriteMode
from gradkit._state.module_state import ModuleSnapshot, alone_with, modules_put_back
from gradkit._state.rerun import RerunState, recording_writes
from gradkit._torch_bugs.monitor import ForwardMonitor, OpMonitor, made_differentiable
from gradkit.errors import UnsupportedGraphError, message
from gradkit.func._differentiate import detached_but_tangents
from gradkit.func._errors import named_errors


def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `fn` does, and runs again where a backward pass needs it."""
    check_function(fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not transforms():
            again: Any = torch.utils.checkpoint.checkpoint
            return again(fn, *args, use_reentrant=False, **kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return fn(*args, **kwargs)  # nothing is kept
        return named_errors(lambda: _Rerun(fn, args, kwargs).first_run())

    return call


def _reachable(roots: Sequence[object]) -> tuple[list[nn.Module], Tensors]:
    """Return the modules and tensors that functions refer to, and the tensors of these modules."""
    captured = captured_by(*roots)
    modules = [one for one in captured if isinstance(one, nn.Module)]
    parts = {id(part): part for module in modules for part in module.modules()}
    tables = [t for part in parts.values() for t in _tables(part)]
    every = chain(captured, captured_by(*chain.from_iterable(t.values() for t in tables)))
    return modules, [*{id(x): x for x in every if isinstance(x, Tensor)}.values()]


def _tables(part: nn.Module) -> list[dict[str, Any]]:
    return [vars(part), part._parameters, part._buffers]


def _carries(tensor: Tensor) -> bool:
    return carries_graph(tensor) or carries_tangent(tensor)


class _Rerun:
    """One call of a function: what its first run had, and its second run."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.fn = fn
        self.given, self.rebuild = pytree.partition_tensors((args, kwargs))
        constants = [x for x in pytree.flatten((args, kwargs))[0] if not isinstance(x, Tensor)]
        self.roots = [fn, *constants]
        self.modules, tensors = _reachable(self.roots)
        for module in self.modules:
            refuse_distributed(module, lambda: "fn")
        # What a mode around gives in the stead of each: a checkpoint around, or a copy written on.
        pairs = [(x, x.to(x.dtype)) for x in tensors]
        pairs = [p for p in pairs if p[0] is not p[1] or _carries(p[1]) or is_transform_tensor(p[1])]
        self.captured, self.values = [x for x, _ in pairs], [x for _, x in pairs]
        watching = (ForwardMonitor, OpMonitor)
        self.is_watched = any(isinstance(mode, watching) for mode in function_modes())
        self.snapshots = list(map(ModuleSnapshot, self.modules))
        self.state = RerunState([*self.given, *self.values])

    def first_run(self) -> Any:
        inputs = [*self.given, *self.values]
        leaves = [detached_leaf(x) if _carries(x) else x for x in inputs]
        with alone_with(*self.modules), self.state.first_run(), recording_writes():
            with self.filled(leaves):
                out = self.run(leaves)
        outputs, self.rebuild_out = pytree.partition_tensors(out)
        self.spec = pytree.flatten(out)[1]
        self.differentiable = [carries_graph(x) for x in outputs]
        ends = {id(unbatched(leaf)) for leaf, x in zip(leaves, inputs) if leaf is not x}
        ours = [x for x, y in zip(leaves, inputs) if x is not y]
        used = self._check_graph(outputs, ours)
        # inputs that are kept: those given, and what else it used
        n = len(self.given)
        keep = [i for i, x in enumerate(leaves[n:]) if x is self.values[i] or id(unbatched(x)) in used]
        self.captured = [self.captured[i] for i in keep]
        values = [self.values[i] for i in keep]
        given, self.given, self.values = self.given, [], []
        self.recorded = not transforms()
        if self.recorded:
            self.state.record_outputs(outputs)
        outputs = [x.detach() if d else x for x, d in zip(outputs, self.differentiable)]
        if any(self.differentiable):
            self.count = len(given)
            picked = list(compress(outputs, self.differentiable))
            made = iter(_DIFFERENTIABLE.apply(self, len(picked), *picked, *given, *values))
            outputs = [next(made) if d else x for x, d in zip(outputs, self.differentiable)]
        return self.rebuild_out(outputs)

    def _check_graph(self, outputs, leaves):
        below = Subgraph([unbatched(x) for x in outputs])
        ids = {id(unbatched(x)) for x in leaves}
        levels = set().union(*map(recording_levels, leaves))
        foreign = [x for k, x in below.leaves.items() if k not in ids and x.requires_grad and (transforms() or not self.state.made(x))]
        if foreign or any(recording_levels(x) - levels for x in outputs):
            raise UnsupportedGraphError("foreign")
        return below.leaves.keys()

    def run(self, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = self.rebuild(tensors)
        return self.fn(*args, **kwargs)

    @contextmanager
    def filled(self, tensors):
        n = len(tensors) - len(self.captured)
        new = {id(x): y for x, y in zip(self.captured, tensors[n:], strict=True)}
        changed = []

        def put_back():
            for table, key, before, y in reversed(changed):
                if table.get(key) is y:
                    table[key] = before

        with undone(put_back):
            for module in self.modules:
                for part in module.modules():
                    for table in _tables(part):
                        for key, value in table.items():
                            if id(value) in new:
                                changed.append((table, key, value, new[id(value)]))
                                table[key] = new[id(value)]
            with _Replaced(new) if new else nullcontext(), INSIDE:
                yield

    @contextmanager
    def second_run(self, tensors):
        with undo_stack() as stack:
            second = stack.enter_context(self.state.second_run())
            stack.enter_context(modules_put_back(self.modules))
            for s in self.snapshots:
                s.restore()
            stack.enter_context(self.filled(tensors))
            if self.is_watched:
                stack.enter_context(ForwardMonitor())
            if transforms():
                outside = set(map(memory_of, _reachable(self.roots)[1]))
                stack.enter_context(CopyOnWriteMode(CopyOnWrite(lambda x: memory_of(x) in outside)))
            out = self.run(tensors)
            outputs, _ = pytree.partition_tensors(out)
            if pytree.flatten(out)[1] != self.spec:
                raise UnsupportedGraphError("structure")
            if self.recorded and not transforms():
                second.compare(outputs, "fn")
            yield list(compress(outputs, self.differentiable))

    def pull(self, tensors, needed, cotangents):
        tensors = list(map(without_ended_levels, tensors))
        sources = [*tensors, *(c for c in cotangents if c is not None)]
        create = torch.is_grad_enabled() and any(map(carries_graph, sources))
        if transforms():
            point = list(compress(tensors, needed))
            if not create:
                point = detached_but_tangents(point)
            def inside(variables, level):
                it = iter(variables)
                xs = [next(it) if n else x for x, n in zip(tensors, needed)]
                with self.second_run(xs) as outputs, compiled_autograd_disabled():
                    return [inner_grads(outputs, variables, cotangents, create_graph=create)]
            grads = run_in_level(inside, point)[0]
        else:
            with torch.enable_grad():
                if create:
                    xs = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_(n) for t, n in zip(tensors, needed)]
                else:
                    xs = [t.detach().requires_grad_(n) for t, n in zip(tensors, needed)]
                variables = list(compress(xs, needed))
                with self.second_run(xs) as outputs:
                    below = Subgraph(outputs, stop={edge(v).node for v in variables})
                    if create:
                        refuse_wrong_derivative(lambda: "fn", variables, below, by_formula=True)
                    one = InnerPass("fn", "its input {}".format, variables, below, cotangents)
                    grads = one.guarded(partial(inner_grads, outputs, variables, cotangents, create_graph=create), create_graph=create)
        it = iter(grads)
        return [next(it) if n else None for n in needed]

    def push(self, tensors, tangents):
        moved = [t is not None for t in tangents]
        def f(*variables):
            it = iter(variables)
            xs = [next(it) if n else x for x, n in zip(tensors, moved)]
            with self.second_run(xs) as outputs:
                return tuple(outputs)
        with forward_mode_on(), torch.enable_grad():
            return torch.func.jvp(f, tuple(compress(tensors, moved)), tuple(compress(tangents, moved)))[1]


class _Replaced(TorchFunctionMode):
    def __init__(self, new):
        super().__init__()
        self._new = new

    def _value(self, x):
        if isinstance(x, Tensor):
            return self._new.get(id(x), x)
        if type(x) in (list, tuple):
            return type(x)(map(self._value, x))
        return x

    @leave_uncompiled
    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(map(self._value, args))
        kwargs = {k: self._value(v) for k, v in kwargs.items()} if kwargs else {}
        return func(*args, **kwargs)


class _Checkpoint(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rerun, count, *tensors):
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rerun, ctx.count = inputs[:2]
        ctx.save_for_backward(*inputs[2 + ctx.count:])
        ctx.save_for_forward(*inputs[2 + ctx.count:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        grads = ctx.rerun.pull(ctx.saved_tensors, ctx.needs_input_grad[2 + ctx.count:], cotangents)
        return None, None, *[None] * ctx.count, *grads

    @staticmethod
    def jvp(ctx, _, __, *tangents):
        return ctx.rerun.push(ctx.saved_tensors, tangents[ctx.count:])


_DIFFERENTIABLE: Any = made_differentiable(_Checkpoint)
