"""Hessian-vector products of a step in float64, by torch's modes and by finite differences."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from gradkit.func._directional import (
    APIS,
    FORWARD,
    REVERSE,
    Directional,
    Directions,
    Function,
    Tensors,
    dot,
    normal_like,
)
from gradkit.report._compare.runner import StepRunner, why_refused
from gradkit.report._compare.step import in_double

_EPS = 1e-6
_SEED = 3  # of a derivative's cotangents: the Hessian is symmetric, so one direction serves both


def errors_of_products(runner: StepRunner) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return how far off each mode is at each leaf, relative to the product; and what raised."""
    directional, ids = _directional(runner)
    along = normal_like(directional.point, _SEED)
    errors: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    for api, derivatives in APIS.items():
        gradient = derivatives[REVERSE](directional.fn, Directions(0, (), is_constant=True))
        for mode in (REVERSE, FORWARD):
            name = f"{mode}-over-reverse ({api})"
            product = derivatives[mode](gradient, Directions(1, along, is_constant=True))
            try:
                values = directional.evaluate(product)
                expected = _differences(directional, gradient, along)
            except Exception as error:  # the losses could be computed: torch cannot run the mode
                refused[name] = why_refused(error)
                continue
            by_id = dict(zip(ids, _errors(values, expected), strict=True))
            leaves = zip(runner.step.names, runner.leaves, strict=True)
            errors[name] = {leaf: by_id[id(x)] for leaf, x in leaves if id(x) in by_id}
    return errors, refused


def _directional(runner: StepRunner) -> tuple[Directional, list[int]]:
    """Return the sum of the losses as a function of the variables, and the ids of these."""
    inputs = runner.step.inputs
    variables = {id(x): x for x in inputs.values() if x.requires_grad}
    constants = {key: in_double(x) for key, x in inputs.items()}
    slots = {key: list(variables).index(id(x)) for key, x in inputs.items() if id(x) in variables}

    def total(tensors: Tensors) -> Tensors:
        here = constants | {key: tensors[slot] for key, slot in slots.items()}
        losses = runner.step.losses_at(here, copy=in_double).leaves
        return [torch.stack([loss.reshape(()) for loss in losses]).sum()]

    point = [in_double(x) for x in variables.values()]
    return Directional(total, point, runner.isolated), list(variables)


def _differences(directional: Directional, gradient: Function, along: Tensors) -> list[Tensor]:
    step = _EPS / sqrt(dot(along, along))
    ahead, behind = (
        directional.evaluate(gradient, [sign * step * x for x in along]) for sign in (1, -1)
    )
    return [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def _errors(values: Tensors, expected: Tensors) -> list[float]:
    size = max((float(x.abs().max()) for x in expected if x.numel()), default=0.0) or 1.0
    pairs = zip(values, expected, strict=True)
    return [float((a - b).abs().max()) / size if a.numel() else 0.0 for a, b in pairs]
