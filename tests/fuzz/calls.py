"""Programs that differ in how gradkit is called: inside transforms, threads, steps, dual levels."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.optim import Optimizer

import gradkit
from gradkit import func, meta
from tests.func.test_graphs import PAIRS, UNARY, derivatives, inputs, program
from tests.fuzz.cases import CPU, WRITTEN, Case, Op, Refused, draw, may_refuse
from tests.fuzz.functions import Sevenfold
from tests.fuzz.laws import Grads, assert_close, backward, one, require_reached, weighted
from tests.helpers import assert_same_bits, unchanged, written_on
from tests.strategies import HOOKLESS, Graph

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
    leaves, reached = detached(case), expected_grads(case)
    losses = lambda leaves: case.build(leaves).losses  # noqa: E731
    call = func.value_and_grads(losses, create_graph=rng.choice((None, False)))
    require_differentiable(reached, lambda: call(leaves))
    with unchanged(*leaves):
        _, grads = call(leaves)
        rows = func.per_loss_grads(losses, chunk_size=rng.choice((None, 1, 2)))(leaves)
    assert_close(grads, reached)
    for index, grads in enumerate(rows):
        loss = lambda *leaves, index=index: losses(leaves)[index].sum()  # noqa: E731
        pairs = zip(grads, leaves, strict=True)
        row = [None if grad is None else grad.reshape(leaf.shape) for grad, leaf in pairs]
        assert_close(row, torch.func.grad(loss, tuple(range(len(leaves))))(*leaves))


def require_differentiable(expected: Grads, call: Callable[[], object]) -> None:
    """Leave a program that does not depend on its arguments, where the call has to raise."""
    if any(grad is not None for grad in expected):
        return
    try:
        call()
    except gradkit.DetachedLossError as error:
        raise Refused("DetachedLossError: nothing is reached") from error
    raise AssertionError("nothing is reached, and nothing raised")


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


def sevenfold_in_place(grad: Tensor) -> Tensor | None:
    return None if 0 in grad.stride() else written_on(grad).mul_(7)


def writing_hook(a: Tensor, b: Tensor, kept: list[Tensor]) -> Tensor:
    new = a * 1
    new.register_hook(sevenfold_in_place)
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
    shared, number = draw(rng), rng.randint(2, 4)
    leaves = shared.build().leaves
    cases = [shared if rng.random() < 0.3 else draw(rng) for _ in range(number)]
    graphs = [case.build(leaves if case is shared else None) for case in cases]
    results: list[Any] = [None] * number
    barrier = Barrier(number)

    def run(index: int) -> None:
        call = separately if index % 2 else jointly
        barrier.wait()
        try:
            results[index] = call(graphs[index])
        except Exception as error:
            results[index] = error

    running = [Thread(target=run, args=(index,)) for index in range(number)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for index, (case, result) in enumerate(zip(cases, results, strict=True)):
        roots = map(one, range(len(case.program.losses))) if index % 2 else [ones(case)]
        assert_thread(result, [leaf.grad for r in roots for leaf in backward(case, r).leaves])


def jointly(graph: Graph) -> Grads:
    grads: Grads = gradkit.value_and_grads(graph.losses, graph.leaves)[1]
    return grads


def separately(graph: Graph) -> Grads:
    scalars = [loss.reshape(()) for loss in graph.losses]
    return [grad for row in gradkit.per_loss_grads(scalars, graph.leaves) for grad in row]


def assert_thread(result: Any, expected: Grads) -> None:
    unreached = all(grad is None for grad in expected)
    if unreached and isinstance(result, gradkit.UnreachedParamError):
        return
    if isinstance(result, Exception):
        raise result
    assert_same_bits(result, expected)


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
    step = rng.choice(STEPS)
    call = lambda: gradkit.value_and_grads(case.build(ours).losses, ours)  # noqa: E731
    require_reached(expected_grads(case), call)
    for _ in range(count):
        losses = case.build(theirs).losses
        other.zero_grad()
        torch.autograd.backward(losses)
        if step is not with_backward:
            unshare(theirs)
        other.step()
        mine.zero_grad()
        step(mine, case.build(ours).losses, ours)
    assert_same_bits(ours, theirs)


def unshare(leaves: list[Tensor]) -> None:
    """Give each leaf a `.grad` of its own: `.backward()` may leave two views of one memory.

    An optimizer that writes on gradients (SGD with Nesterov's momentum and `foreach`) then writes
    twice. The gradients that gradkit returns share nothing; `backward_` leaves what torch leaves.
    """
    for leaf in leaves:
        leaf.grad = None if leaf.grad is None else leaf.grad.clone()


def with_step(optimizer: Optimizer, losses: list[Tensor], params: list[Tensor]) -> None:
    gradkit.step_(optimizer, params, gradkit.value_and_grads(losses, params)[1])
    assert all(param.grad is None for param in params)


def with_minimize(optimizer: Optimizer, losses: list[Tensor], params: list[Tensor]) -> None:
    gradkit.minimize_(optimizer, losses)
    assert all(param.grad is None for param in params)


def with_captured(optimizer: Optimizer, losses: list[Tensor], params: list[Tensor]) -> None:
    with gradkit.capture_grads(params) as captured:
        torch.autograd.backward(losses)
    gradkit.step_(optimizer, params, captured.grads)


def with_written(optimizer: Optimizer, losses: list[Tensor], params: list[Tensor]) -> None:
    gradkit.write_grads_(params, gradkit.value_and_grads(losses, params)[1])
    optimizer.step()


def with_added(optimizer: Optimizer, losses: list[Tensor], params: list[Tensor]) -> None:
    gradkit.add_grads_(params, gradkit.value_and_grads(losses, params)[1])
    optimizer.step()


def with_backward(optimizer: Optimizer, losses: list[Tensor], params: list[Tensor]) -> None:
    gradkit.backward_(losses)
    optimizer.step()


STEPS = (with_step, with_minimize, with_captured, with_written, with_added, with_backward)
