"""`parity`: the gradients of one step, in one process and in other layouts."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradkit._compat.dynamo import disable_compile
from gradkit._core.call import check_function, check_option, is_number, is_positive_int
from gradkit.errors import (
    CollectiveError,
    OptionError,
    StructureError,
    UnreachedParamError,
    describe,
    first_line,
    message,
)
from gradkit_parity.layout_run import BatchPart, Layout, Program, RankRun, ranks, run_parts
from gradkit_parity.report import (
    COARSE,
    FLOOR,
    TOLERANCE,
    Grads,
    ParityDifference,
    ParityReport,
    Suspects,
    difference,
)


def _ddp(module: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _fsdp(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)
    return module


def _compiled(module: nn.Module, mesh: Any) -> nn.Module:
    module.compile(backend="aot_eager")  # this backend needs no C++ compiler
    return module


def _checkpointed(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.utils.checkpoint import checkpoint

    for child in list(module.children()) or [module]:
        if type(child).forward is nn.Module.forward:  # nobody calls a container: a ModuleList, say
            _checkpointed(child, mesh)
        else:
            child.forward = partial(checkpoint, child.forward, use_reentrant=False)
    return module


_SINGLE = Layout("single", ranks="one")
_LAYOUTS = {
    "single": _SINGLE,
    "ddp": Layout("ddp", _ddp),
    "fsdp": Layout("fsdp", _fsdp),
    "accumulation": Layout("accumulation", ranks="one", micro_batches=2),
    "compiled": Layout("compiled", _compiled, ranks="one"),
    "checkpointed": Layout("checkpointed", _checkpointed, ranks="one"),
}


@disable_compile
def parity(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module, BatchPart], Any],
    layouts: Sequence[str | Layout] = ("ddp", "fsdp", "accumulation", "compiled", "checkpointed"),
    *,
    world_size: int = 2,
    seed: int = 0,
    rtol: float | None = None,
    timeout: float = 60.0,
) -> ParityReport:
    """Return which parameters get other gradients in a layout than in one process, and by what.

    A layout is a way to compute the same step: `"ddp"`, `"fsdp"` (`fully_shard` of the whole
    module), `"accumulation"` (two micro-batches), `"compiled"` (by the backend aot_eager),
    `"checkpointed"` (children recompute), or a `Layout` of your own, as for tensor parallelism. All
    run on the CPU, over gloo, on modules that are built for it.

    Example:
        >>> import gradkit, torch
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def build():
        ...     return torch.nn.Linear(3, 1)
        >>> def step(model, part):  # a sum, though losses of micro-batches are averaged
        ...     return (model(part.rows(x)) - part.rows(y)).square().sum()
        >>> report = gradkit.distributed.parity(build, step, ["accumulation"])
        >>> report.differences["accumulation"]["weight"].kind
        'x 0.5: 1 / the number of micro-batches'

    Args:
        build: Returns the module, with the same weights at each call; torch is seeded before. In
            float64 a factor is beyond doubt.
        step: Called with the module and a `BatchPart`, it computes that part of the batch. It
            returns the loss, which is divided by `part.micro_batches` and differentiated, or a dict
            of losses, which are added, and of which a missing one is named. Or None: then it has
            called `.backward()` itself, and `.grad` after the last part is compared. Other
            processes import both functions (where all layouts take one process, any will do).
        layouts: Names, and instances of `Layout`.
        world_size: The number of ranks.
        seed: Of the random numbers of `build` and `step`.
        rtol: The largest difference, relative to the norm of a parameter's gradient (or to a
            thousandth of that of all). None: 1e-9 for float64, 1e-4 for float32, 2e-2 for float16
            and bfloat16.
        timeout: Seconds until a collective fails in which a rank is missing.

    Returns:
        The report; `report.same` is whether no parameter differs.

    Raises:
        CollectiveError: This process is in a process group.
        OptionError: There is no such layout, or an option has no such value; or other processes
            cannot import a function.
        StructureError: `build` makes other weights each time, or a function returns something else.
        UnreachedParamError: No parameter has a gradient in one process.

    Source:
        `torch.nn.parallel.DistributedDataParallel`, `torch.distributed.fsdp.fully_shard`,
        `torch.distributed.tensor.parallel`, `torch.utils.checkpoint`, `torch.compile`.
    """
    chosen, program = _read_layouts(layouts), Program(build, step, seed)
    _check_options(program, world_size, rtol, timeout)
    skipped = {one.name: why for one in chosen if (why := _why_not(one))}
    chosen = [one for one in chosen if one.name not in skipped]
    in_group = [one for one in chosen if one.ranks != "one"]
    _check_importable(program, in_group)
    with ranks(world_size, timeout) if in_group else contextlib.nullcontext(_alone) as run:
        single = run_parts(program, _SINGLE, _SINGLE.parts())
        if not single.grads:
            expected, got = "a step that reaches parameters of the module", "no gradient"
            fix = "return the loss from step, or call .backward() in it"
            raise UnreachedParamError(message("parity", expected, got, fix))
        runs = {one.name: (run if one in in_group else _alone)(program, one) for one in chosen}
    compared = _Comparison(program, single, rtol)
    differences = {one.name: compared.of(one, runs[one.name]) for one in chosen}
    failed = {name: why for name, of in runs.items() if (why := _error(of))}
    unreached = tuple(name for name in single.trained or () if name not in single.grads)
    layouts_run = tuple(name for name in runs if name not in failed)
    return ParityReport(layouts_run, compared.params, differences, failed, skipped, unreached)


class _Comparison:
    """Compares what layouts have run with one process."""

    def __init__(self, program: Program, single: RankRun, rtol: float | None) -> None:
        self.program, self.single, self.rtol = program, single, rtol
        self.params = single.trained or ()
        self.floor = FLOOR * sum(float(g.norm()) ** 2 for g in single.grads.values()) ** 0.5

    def of(self, layout: Layout, runs: list[RankRun]) -> dict[str, ParityDifference]:
        """Return how the gradients of a layout differ, by parameter."""
        if any(run.weights not in ({}, self.single.weights) for run in runs):
            expected, got = "a module with the same weights at each call", "other weights"
            fix = "draw them with torch's random numbers, which parity seeds, or load a file"
            raise StructureError(message("build", expected, got, fix))
        suspects = Suspects({})
        if any(self._difference(name, runs, suspects) for name in self.params):
            suspects = self._suspects(layout, runs)
        differ = {name: self._difference(name, runs, suspects) for name in self.params}
        return {name: one for name, one in differ.items() if one}

    def _difference(
        self, param: str, runs: list[RankRun], suspects: Suspects
    ) -> ParityDifference | None:
        frozen = [i for i, run in enumerate(runs) if param not in (run.trained or self.params)]
        if frozen:
            why = _on("requires_grad is False", frozen)
            return ParityDifference("frozen", why, ranks=tuple(frozen))
        expected = self.single.grads.get(param)
        without = [
            i for i, r in enumerate(runs) if r.reached is not None and param not in r.reached
        ]
        if without and expected is not None:
            why = _on("no loss reaches it, or its gradient was dropped,", without)
            return ParityDifference("zero", why, 0.0, ranks=tuple(without))
        if _error(runs):
            return None
        rtol = self.rtol
        if rtol is None:
            rtol = TOLERANCE.get(self.single.dtypes[param], COARSE)
        grads = [run.grads.get(param) for run in runs]
        of_ranks = [difference(param, g, expected, suspects, rtol, self.floor) for g in grads]
        wrong = [rank for rank, one in enumerate(of_ranks) if one]
        first = next(filter(None, of_ranks), None)
        return first and replace(first, ranks=tuple(wrong))

    def _suspects(self, layout: Layout, runs: list[RankRun]) -> Suspects:
        """Compute what the gradients of a layout are compared with."""
        sizes = {"the world size": len(runs), "the number of micro-batches": layout.micro_batches}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        count = layout.parts(0, len(runs))[0].count
        alone: list[list[Grads]] = [[], []]
        with contextlib.suppress(Exception):  # the step may not take such a part
            for part in (BatchPart(index, count) for index in range(count)):
                alone[0].append(run_parts(self.program, _SINGLE, [part]).grads)
        for name in self.single.losses:
            alone[1].append(run_parts(self.program, _SINGLE, _SINGLE.parts(), only=name).grads)
        losses = dict(zip(self.single.losses, alone[1], strict=True))
        return Suspects(sizes, alone[0], losses, self._draws(layout, runs, divided=count > 1))

    def _draws(self, layout: Layout, runs: list[RankRun], *, divided: bool) -> str:
        """Say that a layout has drawn other random numbers than one process, if so."""
        states = [run.states for run in (self.single, *runs)]
        alike = len({*states}) == 1 and not divided
        if alike or all(len({*state}) <= 1 for state in states):
            return ""
        if layout.ranks == "repeat" and len({*states[1:]}) > 1:
            return "the seeds of the ranks differ (dropout)"
        return "this layout draws others than one process (dropout): in build, call module.eval()"


def _on(what: str, ranks: list[int]) -> str:
    return f"{what} on rank {', '.join(map(str, ranks))}"


def _alone(program: Program, layout: Layout) -> list[RankRun]:
    run = RankRun()
    try:
        run_parts(program, layout, layout.parts(), run=run)
    except Exception as error:
        run.error = f"{type(error).__name__}: {first_line(error)}"
    return [run]


def _error(runs: list[RankRun]) -> str:
    """Return what a rank raised, rather than what others did that waited for it."""
    errors = [_on(run.error, [rank]) for rank, run in enumerate(runs) if run.error]
    return min(errors, key=lambda text: "gloo" in text, default="")


def _read_layouts(layouts: Sequence[str | Layout]) -> list[Layout]:
    """Return the layouts that are to be compared with one process."""
    chosen: dict[str, Layout] = {}
    for index, one in enumerate([layouts] if isinstance(layouts, str | Layout) else layouts):
        where, layout = f"layouts[{index}]", _LAYOUTS.get(one) if isinstance(one, str) else one
        if not isinstance(layout, Layout):
            expected = f"{', '.join(map(repr, _LAYOUTS))} or a gradkit.distributed.Layout"
            fix = 'for tensor parallelism, Layout("tensor", plan, ranks="repeat"), where '
            fix += "plan(module, mesh) returns parallelize_module(module, mesh, {...})"
            raise OptionError(message(where, expected, describe(one), fix))
        check_function(layout.wrap, f"{where}.wrap")
        check_option(f"{where}.ranks", layout.ranks, ("divide", "repeat", "one"))
        _check_count(f"{where}.micro_batches", layout.micro_batches, 1)
        if layout.name in chosen:
            fix = f"Layout({layout.name + '2'!r}, ...)"
            raise OptionError(message(where, "a name of its own", repr(layout.name), fix))
        chosen[layout.name] = layout
    return [layout for layout in chosen.values() if layout is not _SINGLE]


def _check_count(name: str, value: Any, least: int) -> None:
    if not is_positive_int(value) or value < least:
        raise OptionError(message(name, f"an int of at least {least}", repr(value), f"{name}=2"))


def _check_options(program: Program, world_size: object, rtol: Any, timeout: Any) -> None:
    check_function(program.build, "build")
    check_function(program.step, "step")
    _check_count("world_size", world_size, 2)
    of_rtol = ("rtol", 1.0 if rtol is None else rtol, "rtol=1e-6, or None for that of the dtype")
    for name, value, fix in (of_rtol, ("timeout", timeout, "timeout=30.0")):
        if not is_number(value) or value <= 0:
            raise OptionError(message(name, "a positive number", repr(value), fix))
    if dist.is_available() and dist.is_initialized():
        fix = "call parity in one process, which starts the others"
        raise CollectiveError(message("parity", "no process group", "one", fix))


def _why_not(layout: Layout) -> str:
    """Return why this machine cannot run a layout; empty if it can."""
    if layout.ranks != "one" and not (dist.is_available() and dist.is_gloo_available()):
        return "this torch is built without gloo"
    if layout is _LAYOUTS["compiled"]:
        try:
            torch.compile(len, backend="aot_eager")
        except RuntimeError as error:
            return first_line(error)
    return ""


def _check_importable(program: Program, layouts: Sequence[Layout]) -> None:
    """Raise if other processes could not import the functions that they run."""
    functions = {"build": program.build, "step": program.step} if layouts else {}
    functions |= {f"wrap of {layout.name!r}": layout.wrap for layout in layouts}
    is_file = hasattr(sys.modules["__main__"], "__file__")
    for name, function in functions.items():
        why = "one typed into an interpreter or a notebook"
        try:
            if b"__main__" not in pickle.dumps(function) or is_file:
                continue
        except Exception as error:
            why = first_line(error)
        fix = f"def {name.split()[0]}(...) at the top of a module or script, and pass that"
        raise OptionError(message(name, "a function that other processes import", why, fix))
