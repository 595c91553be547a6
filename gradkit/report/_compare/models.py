"""Why another model, or the same one on another device, differs at a leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from gradkit.report._compare.ablations import STALE
from gradkit.report._compare.distance import distance, is_close, same_bits
from gradkit.report._compare.methods import BACKWARD, RunResult
from gradkit.report._compare.reasons import CAUSES, SMALL, UNKNOWN, random_reason
from gradkit.report._compare.runner import Runner


def model_reason(first: Runner, second: Runner, index: int) -> str:
    """Return what differs between two models that may explain a difference at a leaf."""
    leaves, others = first.leaves[index], second.leaves[index]
    reasons = []
    if leaves.grad is not None or others.grad is not None:
        a, b = (runner.run(BACKWARD, frozenset({STALE})) for runner in (first, second))
        if not differs(a, b, index):
            return CAUSES[STALE]
        reasons.append(CAUSES[STALE])
    reasons += _settings(first, second)
    if reasons:
        return ", ".join(reasons)
    is_small = is_close(*(runner.run(BACKWARD).grads[index] for runner in (first, second)))
    return random_reason(first, index) or UNKNOWN + (SMALL if is_small else "")


def _settings(first: Runner, second: Runner) -> list[str]:
    """Return what differs in params, buffers, modes, dtypes, devices and random numbers."""
    leaves = list(zip(_tensors(first), _tensors(second), strict=True))
    modules = list(zip(first.step.modules, second.step.modules, strict=False))
    buffers = [pair for a, b in modules for pair in zip(a.buffers(), b.buffers(), strict=False)]
    parts = [pair for a, b in modules for pair in zip(a.modules(), b.modules(), strict=False)]
    is_moved = any(a.device != b.device for a, b in leaves)
    changed = sum(distance(a, b)[0] != 0 for a, b in leaves)
    differences = {
        f"other numbers in {changed} of {len(leaves)} params": changed,
        "other numbers in buffers": any(not torch.equal(a.cpu(), b.cpu()) for a, b in buffers),
        "one is in train mode, the other in eval mode": any(
            a.training != b.training for a, b in parts
        ),
        "another dtype": any(a.dtype != b.dtype for a, b in leaves),
        "another device, which rounds in other places": is_moved,
        "random numbers, which differ between devices": is_moved and first.forward.draws,
    }
    return [text for text, is_different in differences.items() if is_different]


def _tensors(runner: Runner) -> list[Tensor]:
    return [leaf for leaf in runner.leaves if leaf is not None]


def differs(a: RunResult, b: RunResult, index: int) -> bool:
    """Return whether two runs gave a leaf other bits, also across devices."""
    return not same_bits(_cpu(a.grads[index]), _cpu(b.grads[index]))


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()
