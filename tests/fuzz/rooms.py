"""What is tried: each room draws a program of its kind, and runs a law on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from random import Random
from typing import TypeAlias

import gradkit
from tests.fuzz import (
    calls,
    company,
    eager_functions,
    formulas,
    functions,
    hooks,
    laws,
    training,
    twins,
)
from tests.fuzz.cases import WRITTEN, Case, Op, Refused, draw
from tests.fuzz.laws import Law
from tests.strategies import HOOKLESS, OPS, WRITING

Room: TypeAlias = Callable[[Random], None]  # returns if right, raises Refused, or anything if wrong
SMOOTH = calls.SMOOTH
LAWS: tuple[Law, ...] = (laws.joint, laws.product, laws.per_loss, laws.batched, laws.second)


def clean(law: Law) -> Room:
    """Programs of torch's own operations, and hooks that return a new gradient."""

    def run(rng: Random) -> None:
        vectors = law is laws.batched
        ops = SMOOTH if vectors else OPS
        options = {"losses": ("vector",)} if vectors else {}
        run_law(law, draw(rng, ops, leaf_hooks=rng.random() < 0.3, **options), rng)

    return run


def with_ops(more: Mapping[str, Op], among: tuple[Law, ...] = LAWS) -> Room:
    """Programs that have some of these operations."""

    def run(rng: Random) -> None:
        law = rng.choice(among)
        options = {"losses": ("vector",)} if law is laws.batched else {}
        run_law(law, draw(rng, HOOKLESS, more=more, **options), rng)

    return run


def run_law(law: Law, case: Case, rng: Random) -> None:
    try:
        law(case, rng)
    except Exception as error:
        error.add_note(f"{law.__name__}: {case.program}, {case.dtype}")
        raise


def writes(rng: Random) -> None:
    """Hooks and Functions that write on their cotangents."""
    law = rng.choice((laws.joint, laws.per_loss))
    run_law(law, draw(rng, (*HOOKLESS, *WRITING), more=functions.WRITES), rng)


def checked_writes(rng: Random) -> None:
    """The same inside `checked()`, where every gradient is right, and none is refused."""
    more = {**hooks.HOOKS, **hooks.WRITES} if rng.random() < 0.5 else functions.WRITES
    case = draw(rng, (*HOOKLESS, *WRITING), more=more)
    with gradkit.checked(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        try:
            run_law(rng.choice((laws.joint, laws.per_loss)), case, rng)
        except Refused as refusal:
            if WRITTEN in str(refusal):
                raise AssertionError("refused inside checked()") from refusal
            raise


CALLING = {"hook": hooks.changing(hooks.hook_calls_gradkit), **functions.REENTRANT}
ROOMS: dict[str, Room] = {
    "joint": clean(laws.joint),
    "products": clean(laws.product),
    "per loss": clean(laws.per_loss),
    "batched": clean(laws.batched),
    "second order": clean(laws.second),
    "hooks": with_ops(hooks.HOOKS),
    "AccumulateGrad pre-hooks": with_ops(hooks.ACCUMULATE_PREHOOKS),
    "functions": with_ops(functions.FUNCTIONS),
    "functions under vmap": with_ops(functions.VMAPPED),
    "hidden once_differentiable": with_ops(functions.HIDDEN_ONCE),
    "writes": writes,
    "checked writes": checked_writes,
    "writes under vmap": with_ops(functions.VMAPPED_WRITES, (laws.joint, laws.per_loss)),
    "sparse": with_ops(functions.SPARSE, (laws.joint, laws.per_loss, laws.second)),
    "sparse rows": with_ops(functions.SPARSE, (laws.batched,)),
    "formulas": formulas.sound,
    "doubtful formulas": formulas.doubtful,
    "transforms": calls.transforms,
    "penalties": calls.penalties,
    "traced writes": calls.traced_writes,
    "functions of eager code": eager_functions.functions,
    "duals": calls.duals,
    "threads": calls.threads,
    "re-entrancy": with_ops(CALLING),
    "steps": calls.steps,
    "Functions in company": twins.in_company(company.FUNCTIONS),
    "hooks in company": twins.in_company(company.HOOKS),
    "modules": twins.modules,
    "scripted": twins.in_company(training.scripted),
    "optimizers": training.optimizers,
    "scaled losses": training.scaled_losses,
    "scalers": training.unscaled,
    "stale graphs": training.stale,
    "captured": training.captured,
    "means": training.means,
}
