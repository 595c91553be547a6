"""Results of tensors that a graph has without their computation: functions give their derivatives.

Or they are constant in the tensors, and only lead to their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node
from torch.func import jvp, vjp

from gradkit._compat.autograd import node_type
from gradkit._compat.transforms import (
    carries_graph,
    differentiated,
    forward_mode_on,
    transforms,
    without_default_hooks,
    without_ended_levels,
    without_innermost_tangent,
)
from gradkit._compat.undoing import INSIDE
from gradkit.errors import UnsupportedGraphError

Tensors: TypeAlias = tuple[Tensor, ...]
Grads: TypeAlias = Sequence[Any]  # some of them None, as tangents


@dataclass(frozen=True, slots=True)
class Rule:
    """How results are differentiated with respect to the tensors that they were computed from."""

    # The gradients of the tensors, from which of them need one, and the cotangents.
    grads: Callable[[Sequence[Tensor], Sequence[bool], Grads], Grads]
    # The tangents of the results, from those of the tensors.
    tangents: Callable[[Sequence[Tensor], Grads], Grads] | None = None
    run: Any = None  # computes the results from the tensors, if they do not exist


class Result(Function):
    """Results, of which a graph keeps what they were computed from, and a rule."""

    generate_vmap_rule = True

    @classmethod
    def of(cls, rule: Rule, tensors: Iterable[Tensor], values: Sequence[Tensor] = ()) -> Tensors:
        """Return what the rule computes from tensors, or copies of values, as results of these."""
        # Outside of transforms, the engine's own `apply` will do: `cls.apply` first looks up what
        # each argument is called, which takes two thirds of its time.
        apply: Any = cls.apply if transforms() else super(Function, cls).apply  # type: ignore[misc]
        given = map(without_ended_levels, (*values, *tensors))
        return cast("Tensors", apply(rule, len(values), *given))

    @staticmethod
    def forward(rule: Rule, count: int, *tensors: Tensor) -> Tensors:
        return tuple(map(Tensor.clone, tensors[:count]) if count else rule.run(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.rule, ctx.first = inputs[0], 2 + inputs[1]
        ctx.save_for_backward(*inputs[ctx.first :])
        ctx.save_for_forward(*inputs[ctx.first :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[ctx.first :]
        has_any = any(cotangent is not None for cotangent in cotangents)
        grads = ctx.rule.grads(ctx.saved_tensors, needed, cotangents) if has_any else ()
        return *[None] * ctx.first, *(grads or [None] * len(needed))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        if ctx.rule.tangents is None:
            return Function.jvp(ctx, *tangents)  # raises
        with forward_mode_on(), INSIDE:  # transforms around this one would lose theirs here
            primals = list(map(without_innermost_tangent, ctx.saved_tensors))
            return tuple(ctx.rule.tangents(primals, tangents[ctx.first :]))


def rule_of(fn: Callable[..., Tensors], *, transposes: bool = False) -> Rule:
    """Return the rule of a function of tensors, which runs again in a pass; so do derivatives."""
    # Forward mode may be what reverse mode does, transposed.
    return Rule(partial(_grads, fn, transposes), partial(_tangents, fn, transposes), fn)


def recomputed(fn: Callable[..., Tensors], *tensors: Tensor, transposes: bool = False) -> Tensors:
    """Return what a function of tensors does, of which a graph keeps nothing but the tensors."""
    if not transposes and not any(map(carries_graph, tensors)):
        return fn(*tensors)
    return Result.of(rule_of(fn, transposes=transposes), tensors)


def _grads(
    fn: Callable[..., Tensors],
    transposes: bool,
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    cotangents: Grads,
) -> Grads:
    count, arrived = len(tensors), [cotangent is not None for cotangent in cotangents]

    def pull(*every: Tensor) -> Tensors:
        def of(*variables: Tensor) -> Tensors:
            return tuple(compress(fn(*merged(every[:count], needed, variables)), arrived))

        with without_default_hooks():
            return tuple(vjp(of, *compress(every, needed))[1](every[count:]))

    given = *tensors, *compress(cotangents, arrived)
    grads = recomputed(pull, *given, transposes=transposes)
    return merged([None] * count, needed, grads)


def _tangents(
    fn: Callable[..., Tensors], transposes: bool, tensors: Sequence[Tensor], tangents: Grads
) -> Tensors:
    count, moves = len(tensors), [tangent is not None for tangent in tangents]

    def push(*every: Tensor) -> Tensors:
        def of(*variables: Tensor) -> Tensors:
            return fn(*merged(every[:count], moves, variables))

        primals = tuple(compress(every, moves))
        if transposes:
            outputs, pull, *_ = vjp(of, *primals)
            zeros = map(torch.zeros_like, outputs)
            return tuple(vjp(lambda *seeds: pull(seeds), *zeros)[1](every[count:]))
        with forward_mode_on(), INSIDE:
            return tuple(jvp(of, primals, every[count:])[1])

    return recomputed(push, *tensors, *compress(tangents, moves), transposes=transposes)


def merged(base: Sequence[Any], where: Iterable[object], values: Iterable[Any]) -> list[Any]:
    """Return a base with the values, in turn, in the places that `where` marks."""
    rest = iter(values)
    return [next(rest) if here else x for x, here in zip(base, where, strict=True)]


def attach(tensor: Tensor, sources: Sequence[Tensor], reason: str | None = None) -> Tensor:
    """Return a tensor that is constant in others; given a reason, its derivative raises it."""
    # `Result.of` applies its Function in the same way.
    apply: Any = _Constant.apply if transforms() else super(Function, _Constant).apply
    return cast("Tensor", apply(reason, tensor, *sources))


def accumulate_grad_nodes(leaves: Sequence[Tensor]) -> list[Node]:
    """Return the AccumulateGrad nodes of leaves without subclasses, outside of transforms."""
    # A constant function of all leads to them: a view of each would take four times as long.
    with torch.enable_grad(), INSIDE:
        result = attach(torch.empty(0), leaves)  # the tensor keeps its node alive
    return [cast("Node", child) for child, _ in cast("Node", result.grad_fn).next_functions[1:]]


class _Constant(Function):
    """The identity of a tensor, and a constant function of others."""

    generate_vmap_rule = True

    @staticmethod
    def forward(reason: str | None, tensor: Tensor, *sources: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.reason, ctx.sources = inputs[0], len(inputs) - 2
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        _refuse(ctx.reason)
        return None, cotangent, *[None] * ctx.sources

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor | None, *tangents: Tensor | None) -> Tensor | None:
        _refuse(ctx.reason)
        return tangent


def _refuse(reason: str | None) -> None:
    # The rule for vmap runs this inside of one; a transform that differentiates has asked before.
    if reason is not None and not differentiated():
        raise UnsupportedGraphError(reason)


ZERO_DERIVATIVE_NODE: type = node_type(_Constant)
