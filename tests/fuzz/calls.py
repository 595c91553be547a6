"""Programs that differ in how gradkit is called: inside transforms, threads, steps, dual levels."""

from __future__ import annotations

from random import Random
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import gradkit
from gradkit import func, meta
from tests.func.test_graphs import (
    PAIRS,
    UNARY,
    derivatives,
    inputs,
    program,
)
from tests.fuzz.cases import CPU, WRITTEN, Case, Op, Refused, draw, may_refuse
from tests.fuzz.functions import Sevenfold
from tests.fuzz.laws import Grads, assert_close, backward, require_reached, weighted
from tests.helpers import assert_same_bits, unchanged
from tests.strategies import HOOKLESS

SMOOTH = tuple(op for op in HOOKLESS if op != "halve")  # no old-style Function under torch.func
F64 = (torch.float64,)


def detached(case: Case) -> list[Tensor]:
    return [leaf.detach() for leaf in case.build().leaves]


def ones(case: Case) -> Any:
    return weighted([1.0] * len(case.program.losses))


def expected_grads(case: Case) -> Grads:
    """What `.backward()` of all losses leaves."""
    return [leaf.grad for leaf in backward(case, ones(case)).leaves]


def transforms(rng: Random) -> None:
    """The calls of gradkit.func on a program, against `.backward()` and torch.func."""
    case = draw(rng, SMOOTH, dtypes=F64)
    leaves = detached(case)
    losses = lambda leaves: case.build(leaves).losses  # noqa: E731
    reached = expected_grads(case)
    options: Any = {"create_graph": rng.choice((None, False))}
    call = lambda: func.value_and_grads(losses, **options)(leaves)  # noqa: E731
    if all(grad is None for grad in reached):
        try:
            call()
        except gradkit.DetachedLossError as error:
            raise Refused("DetachedLossError: nothing is reached") from error
        raise AssertionError("nothing is reached, and nothing raised")
    with unchanged(*leaves):
        _, grads = call()
        rows = func.per_loss_grads(losses, chunk_size=rng.choice((None, 1, 2)))(leaves)
    assert_close(grads, reached)
    for index, grads in enumerate(rows):
        loss = lambda *leaves, index=index: losses(leaves)[index].sum()  # noqa: E731
        pairs = zip(grads, leaves, strict=True)
        row = [None if grad is None else grad.reshape(leaf.shape) for grad, leaf in pairs]
        assert_close(row, torch.func.grad(loss, tuple(range(len(leaves))))(*leaves))


def penalties(rng: Random) -> None:
    """A call of gradkit.func inside an eager loss, to second order; torch.func in its place."""
    f = program(rng.choices(sorted(UNARY), k=rng.randint(1, 3)), rng.randint(1, 3))
    name = rng.choice(sorted(PAIRS))
    factors = torch.tensor([1.0, 2.0, -1.0])
    results = []
    for call in PAIRS[name]:
        w, x, s = inputs(CPU)
        results.append(derivatives(f(w, x, s) + (call(f, w, x, s) * factors).sum(), [w, x, s]))
    try:
        assert_close(*results)
    except AssertionError as error:
        error.add_note(name)
        raise


def writing_hook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a * 1
    new.register_hook(lambda grad: None if 0 in grad.stride() else grad.mul_(7))
    return new + b


TRACED_WRITES = {
    "writes": Op(lambda a, b, kept: Sevenfold.apply(a) + b, (WRITTEN,)),
    "hook that writes": Op(writing_hook, (WRITTEN,)),
}


def traced_writes(rng: Random) -> None:
    """A write on a cotangent inside gradkit.func or an inner step; refused, or as `.backward()`."""
    case = draw(rng, SMOOTH, more=TRACED_WRITES, dtypes=F64)
    expected = expected_grads(case)
    if all(grad is None for grad in expected):
        raise Refused("nothing is reached")
    leaves = detached(case)
    total = lambda leaves: sum(loss.sum() for loss in case.build(leaves).losses)  # noqa: E731
    memory: Any = rng.choice(("store", "recompute"))
    with may_refuse(case.reasons()):
        if rng.random() < 0.5:
            _, grads = func.value_and_grads(total)(leaves)
        else:
            start = [leaf.requires_grad_() for leaf in leaves]
            run = meta.unroll(lambda p, _, b: total(p), start, [None], meta.sgd(1.0), memory=memory)
            grads = [p - q for p, q in zip(start, run.params, strict=True)]
    assert_close(grads, expected)


def duals(rng: Random) -> None:
    """Gradients inside a dual level have the tangents of `torch.autograd.grad`, or raise."""
    case = draw(rng, SMOOTH, dtypes=F64, losses=("sum", "squares", "dot", "one"))
    leaves = [leaf.requires_grad_() for leaf in detached(case)]
    tangents = [torch.ones_like(leaf) for leaf in leaves]
    separately = rng.random() < 0.5

    def run(ours: bool) -> list[Any]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, tangents, strict=True)]
            losses = case.build(duals).losses
            if ours and separately:
                grads = gradkit.per_loss_grads(losses, leaves)[0]
            elif ours:
                grads = gradkit.value_and_grads(losses, leaves)[1]
            else:
                losses = [losses[0]] if separately else losses
                grads = torch.autograd.grad(losses, leaves, allow_unused=True)
            return [None if grad is None else forward_ad.unpack_dual(grad) for grad in grads]

    expected = run(False)
    if all(pair is None for pair in expected):
        raise Refused("nothing is reached")
    with may_refuse({"tangent", "forward_ad", "dual"}):
        pairs = run(True)
    for part in (0, 1):
        assert_close(
            [pair and pair[part] for pair in pairs], [pair and pair[part] for pair in expected]
        )


def threads(rng: Random) -> None:
    """Calls in several threads at once, some on leaves in common, are those of one thread."""
    number = rng.randint(2, 4)
    shared = draw(rng)
    leaves = shared.build().leaves
    cases = [shared if rng.random() < 0.3 else draw(rng) for _ in range(number)]
    expected = [expected_grads(case) for case in cases]
    graphs = [case.build(leaves if case is shared else None) for case in cases]
    results: list[Any] = [None] * number
    barrier = Barrier(number)

    def run(index: int) -> None:
        graph = graphs[index]
        barrier.wait()
        try:
            if index % 2:
                _, results[index] = gradkit.value_and_grads(graph.losses, graph.leaves)
            else:
                scalars = [loss.reshape(()) for loss in graph.losses]
                results[index] = gradkit.per_loss_grads(scalars, graph.leaves)
        except Exception as error:
            results[index] = error

    running = [Thread(target=run, args=(index,)) for index in range(number)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for index, (result, grads) in enumerate(zip(results, expected, strict=True)):
        if isinstance(result, gradkit.UnreachedParamError) and grads.count(None) == len(grads):
            continue
        if isinstance(result, Exception):
            raise result
        if index % 2:
            assert_same_bits(result, grads)
        else:
            assert_close(gradkit.tree.weighted_sum(result), grads)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p, kind: torch.optim.SGD(p, lr=0.01, foreach=kind),
    "momentum": lambda p, kind: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=kind),
    "nesterov": lambda p, kind: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, foreach=kind),
    "decay": lambda p, kind: torch.optim.SGD(p, lr=0.01, weight_decay=0.1, maximize=True),
    "adam": lambda p, kind: torch.optim.Adam(p, lr=0.01, foreach=kind),
    "amsgrad": lambda p, kind: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=kind),
    "rmsprop": lambda p, kind: torch.optim.RMSprop(p, lr=0.01, foreach=kind),
    "adagrad": lambda p, kind: torch.optim.Adagrad(p, lr=0.01, foreach=kind),
    "nadam": lambda p, kind: torch.optim.NAdam(p, lr=0.01, foreach=kind),
}


def steps(rng: Random) -> None:
    """Some steps with `step_`, or with `.grad` written, leave the weights of the usual loop."""
    case, count = draw(rng), rng.randint(1, 3)
    name, kind = rng.choice(sorted(OPTIMIZERS)), rng.choice((None, True, False))
    ours, theirs = (case.build().leaves for _ in range(2))
    mine, other = (OPTIMIZERS[name](leaves, kind) for leaves in (ours, theirs))
    written = rng.choice(("step_", "write_grads_", "add_grads_", "backward_", "capture_grads"))
    require_reached(
        expected_grads(case), lambda: gradkit.value_and_grads(case.build(ours).losses, ours)
    )
    for _ in range(count):
        losses = case.build(theirs).losses
        other.zero_grad()
        torch.autograd.backward(losses)
        other.step()
        losses = case.build(ours).losses
        if written == "backward_":
            mine.zero_grad()
            gradkit.backward_(losses)
            mine.step()
            continue
        if written == "capture_grads":
            with gradkit.capture_grads(ours) as captured:
                torch.autograd.backward(losses)
            grads = captured.grads
        else:
            _, grads = gradkit.value_and_grads(losses, ours)
        if written in ("write_grads_", "add_grads_"):
            mine.zero_grad()
            getattr(gradkit, written)(ours, grads)
            mine.step()
        else:
            gradkit.step_(mine, ours, grads)
            assert all(leaf.grad is None for leaf in ours)
    assert_same_bits(ours, theirs)
