"""Every call of gradkit on a program with a hazard is right by its twin, or names the hazard."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import eq
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import gradkit
from gradkit import func, meta
from tests.fuzz.calls import SMOOTH
from tests.fuzz.cases import Case, Op, Refused, draw, may_refuse
from tests.fuzz.company import MODULES, keeping, ways
from tests.fuzz.laws import Grads, assert_close
from tests.helpers import same_bits, unchanged

F64 = torch.float64
UNREACHED = (gradkit.DetachedLossError, gradkit.UnreachedParamError)


@dataclass
class Attempt:
    """A program, the leaves that it is run on, what its hooks keep, and its modules."""

    case: Case
    rng: Random
    leaves: list[Tensor]
    kept: list[Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)  # gradkit looks for them in functions

    def losses(self, leaves: Any = None) -> list[Tensor]:
        graph = self.case.build(self.leaves if leaves is None else leaves)
        self.kept = graph.kept
        return [element for loss in graph.losses for element in loss.reshape(-1).unbind()]

    def total(self, leaves: Any = None) -> Tensor:
        return torch.stack(self.losses(leaves)).sum()

    def detached(self) -> list[Tensor]:
        return [leaf.detach() for leaf in self.leaves]


Call: TypeAlias = Callable[[Attempt], Grads]


def flat(rows: Any) -> Grads:
    return [grad for row in rows for grad in row]


def given(params: list[Tensor], call: Callable[[], object]) -> Grads:
    """What a call adds to `.grad`; it may add to what is there."""
    held = [p.grad for p in params]
    for p in params:
        p.grad = None if p.grad is None else p.grad.clone()
    try:
        call()
        after = [p.grad for p in params]
    finally:
        for p, grad in zip(params, held, strict=True):
            p.grad = grad
    pairs = zip(after, held, strict=True)
    return [a if a is None or b is None else a - b for a, b in pairs]


def stepped(t: Attempt, step: Callable[[Any, list[Tensor]], object]) -> Grads:
    """What a step of length one has subtracted; `.grad` stays."""
    params = [leaf.detach().clone().requires_grad_() for leaf in t.leaves]
    for p, leaf in zip(params, t.leaves, strict=True):
        p.grad = None if leaf.grad is None else leaf.grad.clone()
    start, held = [p.detach().clone() for p in params], [p.grad for p in params]
    step(torch.optim.SGD(params, lr=1.0), params)
    assert all(p.grad is grad for p, grad in zip(params, held, strict=True)), ".grad is another"
    assert all(same_bits(p.grad, leaf.grad) for p, leaf in zip(params, t.leaves, strict=True)), (
        ".grad changed"
    )
    return [a - p.detach() for a, p in zip(start, params, strict=True)]


def with_step(t: Attempt) -> Grads:
    def step(optimizer: Any, params: list[Tensor]) -> None:
        gradkit.step_(optimizer, params, gradkit.value_and_grads(t.losses(params), params)[1])

    return stepped(t, step)


def with_minimize(t: Attempt) -> Grads:
    return stepped(t, lambda optimizer, params: gradkit.minimize_(optimizer, t.losses(params)))


def with_accumulator(t: Attempt) -> Grads:
    total = gradkit.Accumulator(t.leaves)
    total.add_(t.total(), 1)
    grads: Grads = total.mean()[1]
    return grads


def with_capture(t: Attempt) -> Grads:
    with gradkit.capture_grads(t.leaves) as captured:
        torch.autograd.backward(t.losses())
    grads: Grads = captured.grads
    return grads


def with_retain(t: Attempt) -> Grads:
    losses = t.losses()
    with gradkit.safe_retain(t.leaves) as kept:
        given(t.leaves, lambda: torch.autograd.backward(losses))
    grads: Grads = kept.grads
    return grads


def with_unroll(t: Attempt) -> Grads:
    memory: Any = t.rng.choice(("store", "recompute"))
    loss = lambda p, outer, batch: t.total(p)  # noqa: E731
    run = meta.unroll(loss, t.leaves, [None], meta.sgd(1.0), memory=memory)
    return [leaf - p for leaf, p in zip(t.detached(), run.params, strict=True)]


def with_staged(t: Attempt) -> Grads:
    encode = lambda p, x: t.total(p) * x  # noqa: E731
    step = func.staged_value_and_grads(encode, lambda out: out.sum(), create_graph=False)
    grads: Grads = step(t.detached(), torch.ones(1, dtype=F64))[1]
    return grads


def with_samples(t: Attempt) -> Grads:
    fn = func.per_sample_grads(lambda p, x: t.total(p) * x, randomness="same")
    rows = fn(t.detached(), torch.ones(2, dtype=F64))
    assert_close([row[0] for row in rows], [row[1] for row in rows])
    return [row[0] for row in rows]


def pulled(t: Attempt) -> Grads:
    _, pull = func.vjp(t.total, t.detached())
    grads: Grads = pull(torch.ones((), dtype=F64))[0]
    return grads


JOINT: dict[str, Call] = {
    "value_and_grads": lambda t: gradkit.value_and_grads(t.losses(), t.leaves)[1],
    "vjp": lambda t: gradkit.vjp(x := t.losses(), t.leaves, [torch.ones_like(y) for y in x]),
    "backward_": lambda t: given(t.leaves, lambda: gradkit.backward_(t.losses())),
    "backward_, params": lambda t: given(t.leaves, lambda: gradkit.backward_(t.losses(), t.leaves)),
    "step_": with_step,
    "minimize_": with_minimize,
    "Accumulator": with_accumulator,
    "capture_grads": with_capture,
    "safe_retain": with_retain,
}
FUNCTIONAL: dict[str, Call] = {
    "func.value_and_grads": lambda t: func.value_and_grads(t.total)(t.detached())[1],
    "func.value_and_grads, plain": lambda t: func.value_and_grads(t.total, create_graph=False)(
        t.detached()
    )[1],
    "func.vjp": pulled,
    "unroll": with_unroll,
    "staged": with_staged,
    "per_sample_grads": with_samples,
}


def rows_by(**options: Any) -> Call:
    return lambda t: flat(gradkit.per_loss_grads(t.losses(), t.leaves, **options))


ROWS: dict[str, Call] = {
    "per_loss_grads": rows_by(),
    "per_loss_grads, batched": rows_by(strategy="batched", chunk_size=2),
    "per_loss_grads, auto": rows_by(strategy="auto"),
}
FUNCTIONAL_ROWS: dict[str, Call] = {
    "func.per_loss_grads": lambda t: flat(func.per_loss_grads(t.losses)(t.detached()))
}
GRAM: dict[str, Call] = {"gram": lambda t: [gradkit.gram(t.losses(), t.leaves)]}
NORMS: dict[str, Call] = {
    "per_sample_norms": lambda t: [gradkit.per_sample_norms(torch.stack(t.losses()), t.leaves)],
    "per_loss_norms": lambda t: [gradkit.per_loss_norms(t.losses(), t.leaves)],
}


def penalty(grads: Grads) -> Tensor:
    return torch.stack([grad.sin().sum() for grad in grads if grad is not None]).sum()


def eager_penalty(t: Attempt) -> Grads:
    _, grads = gradkit.value_and_grads(t.losses(), t.leaves, create_graph=True)
    return along_ones(gradkit.value_and_grads(penalty(grads), t.leaves)[1])


def functional_penalty(t: Attempt) -> Grads:
    inner = lambda p: penalty(func.value_and_grads(t.total)(p)[1])  # noqa: E731
    return along_ones(func.value_and_grads(inner)(t.detached())[1])


def hvp_by(mode: Any) -> Call:
    def call(t: Attempt) -> Grads:
        primals = t.detached()
        second: Grads = func.hvp(t.total, primals, list(map(torch.ones_like, primals)), mode=mode)[
            1
        ]
        return second

    return call


PENALTY: dict[str, Call] = {"eager penalty": eager_penalty}
FUNCTIONAL_PENALTY: dict[str, Call] = {"func penalty": functional_penalty}
HVP: dict[str, Call] = {
    "hvp": hvp_by("forward-over-reverse"),
    "hvp, reverse": hvp_by("reverse-over-reverse"),
}


def first_of(t: Attempt) -> list[Grads]:
    options: Any = {"allow_unused": True, "retain_graph": True}
    return [
        torch.autograd.grad(loss, t.leaves, **options)
        if loss.requires_grad
        else [None] * len(t.leaves)
        for loss in t.losses()
    ]


def dense(grads: Grads, t: Attempt) -> list[Tensor]:
    pairs = zip(grads, t.leaves, strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


def joint_of(t: Attempt) -> list[Tensor]:
    rows = [dense(row, t) for row in first_of(t)]
    return [torch.stack(column).sum(0) for column in zip(*rows, strict=True)]


def matrix_of(t: Attempt) -> Tensor:
    rows = [dense(row, t) for row in first_of(t)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def change_of(t: Attempt) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient, and how it changes along ones: a hook's factor is in it once.

    In torch's second pass it would be there twice, so that forward mode is the oracle.
    """
    leaves = tuple(t.detached())
    slope = torch.func.grad(lambda *leaves: t.total(leaves), tuple(range(len(leaves))))
    grads, changes, *_ = torch.func.jvp(slope, leaves, tuple(map(torch.ones_like, leaves)))
    return list(grads), list(changes)


def penalty_of(t: Attempt) -> Grads:
    """The derivative of the penalty along ones."""
    parts = [(grad.cos() * change).sum() for grad, change in zip(*change_of(t), strict=True)]
    return [torch.stack(parts).sum()]


def along_ones(grads: Grads) -> Grads:
    return [sum((grad.sum() for grad in grads if grad is not None), torch.zeros((), dtype=F64))]


# Each kind of result: of the twin, by torch alone.
KINDS: dict[str, tuple[Call, Mapping[str, Call], Mapping[str, Call]]] = {
    "joint": (joint_of, JOINT, FUNCTIONAL),
    "rows": (lambda t: flat(first_of(t)), ROWS, FUNCTIONAL_ROWS),
    "gram": (lambda t: [(m := matrix_of(t)) @ m.T], GRAM, {}),
    "norms": (lambda t: [matrix_of(t).norm(dim=1)], NORMS, {}),
    "penalty": (penalty_of, PENALTY, FUNCTIONAL_PENALTY),
    "hvp": (lambda t: change_of(t)[1], {}, HVP),
}
SECOND = ("penalty", "hvp", "unroll")  # kinds and calls that take, or allow, a derivative of one
EAGER = [(kind, name) for kind, (_, names, _) in KINDS.items() for name in names]
IN_FUNC = [(kind, name) for kind, (_, _, names) in KINDS.items() for name in names]


def look(module: nn.Module) -> dict[str, Any]:
    """What a module keeps: objects by identity, and the values of what is written in place."""
    held = {**vars(module), **dict(module.named_buffers()), **dict(module.named_parameters())}
    return {
        name: (value, value.detach().clone() if isinstance(value, Tensor) else repr(value))
        for name, value in held.items()
    }


def assert_as_it_was(module: nn.Module, held: dict[str, Any]) -> None:
    now = look(module)
    assert now.keys() == held.keys(), f"attributes: {now.keys() ^ held.keys()}"
    for name, (value, copy) in now.items():
        assert value is held[name][0], f"{name} is another object"
        same = same_bits if isinstance(copy, Tensor) else eq
        assert same(copy, held[name][1]), f"{name} changed"


@contextmanager
def kept_as_is(case: Case, *, whole: bool) -> Iterator[None]:
    """Modules keep what they had, and random numbers go on as they would.

    After an error that is so of all modules, if the `whole` function is one call of gradkit.
    """
    ops = [op for op in case.ops.values() if op.module is not None]
    before, state = [look(op.module) for op in ops], torch.get_rng_state()
    raised = True
    try:
        yield
        raised = False
    finally:
        assert torch.equal(state, torch.get_rng_state()), "random numbers were drawn"
        for op, held in zip(ops, before, strict=True):
            if (raised and whole) or op.restored:
                assert_as_it_was(op.module, held)


def attempted(case: Case, rng: Random) -> Attempt:
    leaves = case.twin().build().leaves
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf) if rng.random() < 0.3 else None
    modules = [op.module for op in case.ops.values() if op.module is not None]
    return Attempt(case, rng, leaves, modules=modules)


def as_twin(case: Case, rng: Random, among: list[tuple[str, str]]) -> None:
    """One call: its value is the twin's, or it refuses a hazard by name; nothing else changes."""
    kind, name = rng.choice(among)
    oracle, *tables = KINDS[kind]
    call = next(table[name] for table in tables if name in table)
    expected = oracle(attempted(case.twin(), Random(0)))
    ours = attempted(case, rng)
    try:
        around = gradkit.checked() if rng.random() < 0.2 else nullcontext()
        with (
            unchanged(*ours.leaves),
            kept_as_is(case, whole=call is not pulled),
            warnings.catch_warnings(),
            around,
        ):
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
            grads = run_or_refuse(
                lambda: call(ours), case, expected, not {kind, name}.isdisjoint(SECOND)
            )
        assert_close(grads, expected, 1e-7)
        if name in (*JOINT, *ROWS):  # gram, by rows, takes two of them at a time
            assert_calls_of_hooks(ours, each=kind != "joint")
    except Exception as error:
        error.add_note(f"{name}: {case.program}")
        raise


def assert_calls_of_hooks(ours: Attempt, *, each: bool) -> None:
    """Hooks have run in one pass, or in one for each loss: nowhere twice."""
    if any(name.startswith("once") for name in ours.case.present()):  # in torch's first pass only
        return
    theirs = attempted(ours.case, Random(0))
    losses = [loss for loss in theirs.losses() if loss.requires_grad]
    for part in [[loss] for loss in losses] if each else [losses]:
        torch.autograd.backward(part, retain_graph=True)
    assert len(ours.kept) <= len(theirs.kept), f"{len(ours.kept)} calls, not {len(theirs.kept)}"


def run_or_refuse(call: Callable[[], Grads], case: Case, expected: Grads, second: bool) -> Grads:
    try:
        with may_refuse(case.reasons(second=second)):
            return call()
    except UNREACHED as error:
        if any(grad is not None and grad.any() for grad in expected):
            raise
        raise Refused("nothing is reached") from error


def in_company(
    more: Mapping[str, Op] | Callable[[Random], Mapping[str, Op]],
) -> Callable[[Random], None]:
    def run(rng: Random) -> None:
        table = more(rng) if callable(more) else more
        ops = {name: table[name] for name in rng.sample(sorted(table), min(2, len(table)))}
        case = draw(rng, SMOOTH, more=ops, dtypes=(F64,), most=8)
        as_twin(case, rng, EAGER + IN_FUNC)

    return run


def modules(rng: Random) -> None:
    """Modules that keep something, called inside calls of gradkit.func."""
    more = {}
    for name in rng.sample(sorted(MODULES), 2):
        way, ran = rng.choice(ways(name)), rng.random() < 0.5
        more[f"{name} {way.__name__}{', ran' * ran}"] = keeping(name, way, ran=ran)
    as_twin(draw(rng, SMOOTH, more=more, dtypes=(F64,), most=8), rng, IN_FUNC)
