"""Saved tensors that were changed in place since the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from torch.autograd.graph import Node

from gradkit._compat.autograd import forward_line, sequence_number
from gradkit._compat.nodes import WRITTEN_VIEW, changed_since_saved
from gradkit._core.call import Call
from gradkit._core.graph import OF_LOST_HISTORY
from gradkit.errors import message

Reason: TypeAlias = tuple[str, str, str]  # expected, got, what to do

_EXPECTED = "saved tensors as they were in the forward pass"
_FIX = (
    "take this loss's gradients before the write, which an optimizer's step is, too; or make a new "
    "tensor: label = torch.zeros_like(label), not label.zero_()"
)
_ANOMALY = "; under torch.autograd.detect_anomaly() this error names the line that saved it"


def modified_since_saved(nodes: Iterable[Node]) -> Reason | None:
    """Return why a pass through some nodes raises, if a tensor that one saved was changed since."""
    for node in sorted(nodes, key=sequence_number, reverse=True):  # as a pass executes them
        changed = changed_since_saved(node)
        if changed is not None:
            return _reason(node, *changed)
    return None


def _reason(node: Node, name: str, error: str) -> Reason:
    line = forward_line(node)
    saved_in = "" if line is None else f", saved in {line}"
    got = f"`{name}` of {node.name()} changed in place since{saved_in}: {without_hint(error)}"
    return _EXPECTED, got, _fix(error) if line else _fix(error) + _ANOMALY


def _fix(error: str) -> str:
    return OF_LOST_HISTORY if WRITTEN_VIEW in error else _FIX


def without_hint(error: str) -> str:
    """Return torch's error that a tensor was changed in place, without what it advises."""
    return error.partition(" Hint")[0].rstrip(".")


def modified_message(error: RuntimeError, call: Call) -> str:
    """Return the message for torch's error that a saved tensor was changed in place."""
    reasons: dict[int, Reason] = {}
    for group, params in call.passes:
        for index in group:
            below = call.graph.below([index])
            nodes = below.leading_to(params.variables) if params.variables else below.nodes
            reason = modified_since_saved(nodes)
            if reason is not None:
                reasons[index] = reason
    # A graph inside a backward function shows only in torch's own text.
    unknown = (
        _EXPECTED,
        f"one changed in place since: {without_hint(str(error))}",
        _fix(str(error)),
    )
    affected = list(reasons) or call.differentiated
    reason = next(iter(reasons.values()), unknown)
    return message(", ".join(map(call.losses.path, affected[:3])), *reason)
