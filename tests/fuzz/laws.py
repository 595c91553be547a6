"""The laws that a program is run for; `.backward()` and `torch.autograd.grad` are the oracles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from random import Random
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor

import gradkit
from gradkit._checks.checked import is_checked
from gradkit._core import user_code
from tests.fuzz.cases import WRITTEN, Case, Refused, may_refuse
from tests.helpers import assert_owned, assert_same_bits, same_bits, unchanged, writes_on_copies
from tests.strategies import Graph

Grads: TypeAlias = Sequence[Tensor | None]
Roots: TypeAlias = Callable[[Graph], tuple[list[Tensor], list[Tensor]]]  # losses, cotangents
Law: TypeAlias = Callable[[Case, Random], None]
UNREACHED = "UnreachedParamError: nothing is reached"


@contextmanager
def gradkit_runs(case: Case, raised: Exception | None, *, second: bool = False) -> Iterator[None]:
    """Let a call raise for a reason that the program has; or for any, if torch itself raises."""
    try:
        with may_refuse(case.reasons(second=second)):
            yield
    except (gradkit.GradkitError, RuntimeError) as error:
        if raised is None:
            raise
        raise Refused("torch raises, too") from error
    if raised is not None:
        raise AssertionError("torch raises, and gradkit returns") from raised


def oracle(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what torch gives, or its error."""
    try:
        return run(), None
    except RuntimeError as error:
        return None, error


def require_reached(expected: Grads, call: Callable[[], object]) -> None:
    """Leave a program in which nothing is reached, where the call has to raise."""
    if any(grad is not None for grad in expected):
        return
    try:
        call()
    except gradkit.UnreachedParamError as error:
        raise Refused(UNREACHED) from error
    raise AssertionError("nothing is reached, and nothing raised")


def hookless(case: Case, rng: Random) -> AbstractContextManager[Any]:
    """The shortcut of a process that never had a hook, for programs without."""
    if not case.is_clean() or rng.random() < 0.5:
        return nullcontext()
    return patch.object(user_code, "hooks_registered", return_value=False)


def backward(case: Case, roots: Roots) -> Graph:
    """Run `.backward()`; inside `checked()`, of a program that writes on copies of gradients."""
    graph = case.build()
    with writes_on_copies() if is_checked() else nullcontext():
        torch.autograd.backward(*roots(graph))
    return graph


def weighted(weights: Sequence[float]) -> Roots:
    return lambda graph: (
        graph.losses,
        [torch.full_like(loss, w) for loss, w in zip(graph.losses, weights, strict=True)],
    )


def one(index: int) -> Roots:
    return lambda graph: ([graph.losses[index]], [torch.ones_like(graph.losses[index])])


def assert_as_backward(case: Case, roots: Roots, grads: Grads, expected: Grads) -> None:
    """As `.backward()`; or, where a write spoils that, as it is without that write."""
    for index, (grad, reference) in enumerate(zip(grads, expected, strict=True)):
        right = same_bits(grad, reference)
        if not right and WRITTEN in case.reasons():
            right = same_bits(grad, unspoilt(case, roots)[index])
        assert right, f"leaf {index}: {grad} is not {reference}"


def unspoilt(case: Case, roots: Roots) -> Grads:
    """What `.backward()` leaves if hooks and Functions write on copies of their gradients."""
    with gradkit.checked():
        return [leaf.grad for leaf in backward(case, roots).leaves]


def assert_close(ours: Grads, theirs: Grads, rtol: float | None = None) -> None:
    """That gradients are equal to rounding where they are finite; None is zero."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            present = b if a is None else a
            assert present is None or not present.any(), f"leaf {index}: {a} is not {b}"
        elif b.to_dense().isfinite().all():
            near = rtol or (1e-9 if b.dtype == torch.float64 else 1e-3)
            dense, reference = a.detach().to_dense(), b.detach().to_dense()
            size = max(1.0, float(reference.abs().max()))
            torch.testing.assert_close(dense, reference, rtol=near, atol=near * size)


def bare(items: list[Any] | None) -> Any:
    """Return a lone loss, or weight, by itself: such calls go a short way."""
    return items[0] if items and len(items) == 1 else items


def listed(values: Any) -> list[Tensor]:
    """Return the values of all losses."""
    return [values] if isinstance(values, Tensor) else values


def joint(case: Case, rng: Random) -> None:
    """One pass is `.backward()` of a list, bit for bit, and owns what it returns."""
    ours = case.build()
    weights = [rng.uniform(-3, 3) for _ in ours.losses] if rng.random() < 0.3 else None
    roots = weighted(weights or [1.0] * len(ours.losses))
    theirs, raised = oracle(lambda: backward(case, roots))
    expected = [leaf.grad for leaf in theirs.leaves] if theirs else []
    options: Any = {"weights": bare(weights), "retain_graph": rng.choice((None, True))}

    def call(graph: Graph) -> tuple[Any, Grads]:
        return gradkit.value_and_grads(bare(graph.losses), graph.leaves, **options)

    if theirs:
        require_reached(expected, lambda: call(ours))
    tensors = (*ours.leaves, *ours.losses)
    try:
        with hookless(case, rng), unchanged(*tensors), gradkit_runs(case, raised):
            values, grads = call(ours)
    except Refused as refusal:
        if WRITTEN in str(refusal):
            assert_same_bits(checked(case, call), unspoilt(case, roots))
        raise
    assert_same_bits(listed(values), theirs.losses)
    assert_as_backward(case, roots, grads, expected)
    assert_owned(grads, ours.leaves)
    assert_laid_out(grads, expected)
    if case.ops:  # their hooks keep copies of what they see
        assert_same_bits(ours.kept, theirs.kept)


def product(case: Case, rng: Random) -> None:
    """A product with cotangents of values and losses is `.backward()` with these, bit for bit."""
    seed, chosen = rng.randrange(1 << 16), [rng.random() < 0.5 for _ in range(30)]

    def roots(graph: Graph) -> tuple[list[Tensor], list[Tensor]]:
        source = torch.Generator().manual_seed(seed)
        every = zip((*graph.losses, *graph.values), chosen, strict=False)
        outputs = [x for x, is_chosen in every if is_chosen and x.requires_grad]
        outputs = outputs or graph.losses[:1]
        seeds = [torch.randn(x.shape, generator=source, dtype=x.dtype) for x in outputs]
        return outputs, [y[..., :1].expand_as(y) if y.dim() and y.sum() > 0 else y for y in seeds]

    ours = case.build()
    theirs, raised = oracle(lambda: backward(case, roots))
    expected = [leaf.grad for leaf in theirs.leaves] if theirs else []
    outputs, seeds = roots(ours)
    retain = rng.choice((None, True))
    call = lambda: gradkit.vjp(outputs, ours.leaves, seeds, retain_graph=retain)  # noqa: E731
    if theirs:
        require_reached(expected, call)
    with hookless(case, rng), unchanged(*ours.leaves, *outputs, *seeds), gradkit_runs(case, raised):
        grads = call()
    assert_as_backward(case, roots, grads, expected)
    assert_owned(grads, ours.leaves)
    assert_laid_out(grads, expected)
    with unchanged(*seeds):
        for grad in grads:
            if grad is not None:
                grad.zero_()


def assert_laid_out(grads: Grads, expected: Grads) -> None:
    for grad, reference in zip(grads, expected, strict=True):
        strided = grad is not None and grad.layout == torch.strided
        assert not strided or grad.stride() == reference.stride()


def checked(case: Case, call: Callable[[Graph], Any]) -> Grads:
    """Return the gradients of what writes on them, which are right there."""
    with gradkit.checked(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        grads: Grads = call(case.build())[1]
    return grads


def per_loss(case: Case, rng: Random) -> None:
    """One `.backward()` a loss, each with a graph of its own."""
    ours = case.build()
    every = range(len(ours.losses))

    def rows() -> list[Grads]:
        graphs = [backward(case, one(index)) for index in every]
        return [[leaf.grad for leaf in graph.leaves] for graph in graphs]

    expected, raised = oracle(rows)
    options: Any = {"retain_graph": rng.choice((None, True))}
    call = lambda: gradkit.per_loss_grads(ours.losses, ours.leaves, **options)  # noqa: E731
    if expected:
        require_reached([grad for row in expected for grad in row], call)
    tensors = (*ours.leaves, *ours.losses)
    with hookless(case, rng), unchanged(*tensors), gradkit_runs(case, raised):
        grads = call()
    for index, loss in enumerate(ours.losses):
        # A loss of shape [1] has gradients of one dimension more.
        row = [g[0] if g is not None and loss.dim() else g for g in grads[index]]
        assert_as_backward(case, one(index), row, expected[index])
        assert_owned(row, ours.leaves)


def batched(case: Case, rng: Random) -> None:
    """Vectors of losses, in batches or not, are `torch.autograd.grad` of each element."""
    ours, theirs = case.build(), case.build()

    def rows() -> list[Grads]:
        passes = [
            torch.autograd.grad(element, theirs.leaves, retain_graph=True, allow_unused=True)
            for loss in theirs.losses
            for element in loss
        ]
        return [list(row) for row in passes]

    expected, raised = oracle(rows)
    options: Any = {
        "strategy": rng.choice(("batched", "auto", "sequential")),
        "chunk_size": rng.choice((None, 1, 2, 3)),
    }
    call = lambda: gradkit.per_loss_grads(ours.losses, ours.leaves, **options)  # noqa: E731
    tensors = (*ours.leaves, *ours.losses)
    with warnings.catch_warnings():
        if case.ops or case.program.leaf_hooks:  # a reason to fall back
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
        if expected:
            require_reached([grad for row in expected for grad in row], call)
        with unchanged(*tensors), gradkit_runs(case, raised):
            grads = call()
    elements = [
        [None if g is None else g.to_dense()[index] for g in row]
        for loss, row in zip(ours.losses, grads, strict=True)
        for index in range(len(loss))
    ]
    for row, reference in zip(elements, expected, strict=True):
        dense = [None if g is None else g.to_dense() for g in reference]
        assert_close(row, dense, 1e-9 if case.dtype == torch.float64 else 1e-3)


def penalty(values: Sequence[Tensor], grads: Grads) -> Tensor:
    """A loss of a gradient: sines keep it in bounds."""
    parts = [grad.to_dense().sin().sum() for grad in grads if grad is not None]
    return torch.stack([value.reshape(()) for value in (*values, *parts)]).sum()


def second(case: Case, rng: Random) -> None:
    """Calls of calls are `torch.autograd.grad` with a graph, then `.backward()`."""
    ours = case.build()

    def twice() -> tuple[Grads, Grads]:
        graph = case.build()
        losses, seeds = weighted([1.0] * len(graph.losses))(graph)
        options: Any = {"create_graph": True, "allow_unused": True}
        first = torch.autograd.grad(losses, graph.leaves, seeds, **options)
        if any(grad is not None for grad in first):
            penalty(graph.losses, first).backward()
        return first, [leaf.grad for leaf in graph.leaves]

    expected, raised = oracle(twice)

    def call() -> tuple[Grads, Grads]:
        losses = bare(ours.losses)
        values, first = gradkit.value_and_grads(losses, ours.leaves, create_graph=True)
        return first, gradkit.value_and_grads(penalty(listed(values), first), ours.leaves)[1]

    if expected:
        require_reached(expected[0], call)
    with unchanged(*ours.leaves, *ours.losses), gradkit_runs(case, raised, second=True):
        first, grads = call()
    assert_close(first, expected[0])
    assert_close(grads, expected[1])
