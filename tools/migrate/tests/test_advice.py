"""What is advised for a loop that is left gives the same weights as the loop."""

from __future__ import annotations

import re
from textwrap import indent

import pytest
import torch

from gradkit_migrate import migrate
from loops import execute

PROGRAM = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
import gradkit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused = new_model(), nn.Linear(2, 2).to(device)

    def forward(self, x):
        return self.body(x)


def run():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    max_norm = 0.1
    for i, (x, y) in enumerate(batches * 2):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        STEP
    return [model], []
"""
BACKWARD = "loss.backward()\n"
GRADS = "_, grads = gradkit.value_and_grads(loss, {})\n"
WRITTEN = GRADS.format("optimizer") + "gradkit.add_grads_(optimizer, grads)\n"
INF_NORM = "clip_grad_norm_(model.parameters(), 0.1, norm_type=float('inf'))\noptimizer.step()"
PARTS = "".join(f"clip_grad_norm_(model.{part}.parameters(), 0.1)\n" for part in ("body", "unused"))
OVERFLOW = "loss = loss * (float('inf') if i == 3 else 1)\n"
IF_FINITE = "if torch.isfinite({}):\n    {}"
CLAMPED = "clip_grad_value_(model.parameters(), 0.01)\n"
CLIPPED = "clip_grad_norm_(model.parameters(), max_norm)"
SCALED = "scaler.scale(loss)"
UNSCALED = f"scaler.unscale_(optimizer)\n{CLAMPED}scaler.step(optimizer)\nscaler.update()\n"
SKIPPED = """try:
    if i == 3:
        raise RuntimeError
    {}
except RuntimeError:
    continue
"""
ATTACK = """x = x.detach().clone().requires_grad_()
loss = cross_entropy(model(x), y)
{}
adv = x + 0.1 * {}.sign()
optimizer.zero_grad()
loss = cross_entropy(model(adv.detach()), y)
"""
EVERY_OTHER = """if i % 2 == 0:
    for x, y in batches[i : i + 2]:
        loss = cross_entropy(model(x), y) / 2
        {}
        if i % 3: optimizer.step()
"""
INPUT_GRAD = "_, grad = gradkit.value_and_grads(loss, x)"
AFTER_ATTACK = """optimizer.zero_grad()
loss = cross_entropy(model(adv.detach()), y)
loss.backward()
optimizer.step()
"""
# By name: from backward() to step(), why it is left, and what takes its place.
ADVISED = {
    "clipped by value": (
        BACKWARD + CLAMPED + "optimizer.step()",
        "clip_grad_value_",
        WRITTEN + CLAMPED + "optimizer.step()",
    ),
    "clipped by value, with a scaler": (
        f"{SCALED}.backward()\n{UNSCALED}",
        "clip_grad_value_",
        WRITTEN.replace("(loss", f"({SCALED}") + UNSCALED,
    ),
    "clipped by value and by norm": (
        BACKWARD + "clip_grad_value_(model.parameters(), 0.1)\n" + INF_NORM,
        "clip_grad_value_",
        WRITTEN + "clip_grad_value_(model.parameters(), 0.1)\n" + INF_NORM,
    ),
    "clipped to another norm": (BACKWARD + INF_NORM, "norm_type.*has options", WRITTEN + INF_NORM),
    "clipped in parts": (
        BACKWARD + PARTS + "optimizer.step()",
        "unused.*between",
        WRITTEN + PARTS + "optimizer.step()",
    ),
    "clipped under a condition": (
        BACKWARD + f"if i > 2: {CLIPPED}\noptimizer.step()",
        "if i > 2.*between",
        WRITTEN + f"if i > 2: {CLIPPED}\noptimizer.step()",
    ),
    "clipped where the model is in a list": (
        f"models = [model]\n{BACKWARD}{CLIPPED}\noptimizer.step()",
        "may not be exactly what optimizer has",
        "models = [model]\n"
        + GRADS.format("optimizer")
        + "gradkit.step_(optimizer, optimizer, grads, max_norm=max_norm)",
    ),
    "the norm is a condition of the step": (
        OVERFLOW + BACKWARD + f"norm = {CLIPPED}\n" + IF_FINITE.format("norm", "optimizer.step()"),
        r"different blocks, and one may run without the other",
        OVERFLOW + WRITTEN + f"norm = {CLIPPED}\n" + IF_FINITE.format("norm", "optimizer.step()"),
    ),
    "clipped by value before a condition": (
        OVERFLOW + BACKWARD + CLAMPED + IF_FINITE.format("loss", "optimizer.step()"),
        r"different blocks",
        OVERFLOW + WRITTEN + CLAMPED + IF_FINITE.format("loss", "optimizer.step()"),
    ),
    "a step in try": (
        BACKWARD + SKIPPED.format("optimizer.step()"),
        r"different blocks",
        WRITTEN + SKIPPED.format("optimizer.step()"),
    ),
    "a backward call under a condition": (
        "if i != 3:\n    loss.backward()\noptimizer.step()",
        r"different blocks",
        f"if i != 3:\n{indent(WRITTEN, '    ')}optimizer.step()",
    ),
    "every other backward call is stepped": (
        EVERY_OTHER.format(BACKWARD.strip()),
        r"different blocks",
        EVERY_OTHER.format(WRITTEN.strip().replace("\n", "\n        ")),
    ),
    "the gradient of an input": (
        ATTACK.format("loss.backward()", "x.grad") + BACKWARD + "optimizer.step()",
        r"several backward calls before one step\(\)",
        ATTACK.format(INPUT_GRAD, "grad") + BACKWARD + "optimizer.step()",
    ),
    "the gradient of an input, in a loop": (
        f"for _ in range(2):\n{indent(ATTACK.format('loss.backward()', 'x.grad'), '    ')}"
        + AFTER_ATTACK,
        r"in a loop that step\(\) is outside of",
        f"for _ in range(2):\n{indent(ATTACK.format(INPUT_GRAD, 'grad'), '    ')}" + AFTER_ATTACK,
    ),
    "gradients are changed": (
        BACKWARD + "[p.grad.mul_(0.5) for p in model.body.parameters()]\noptimizer.step()",
        "mul_.*between",
        WRITTEN + "[p.grad.mul_(0.5) for p in model.body.parameters()]\noptimizer.step()",
    ),
}


def program(step: str) -> str:
    return PROGRAM.replace("        STEP\n", indent(f"{step.strip()}\n", "        "))


@pytest.mark.parametrize("name", ADVISED)
def test_what_is_advised_is_equal(device: torch.device, name: str) -> None:
    step, reason, other = ADVISED[name]
    left = migrate(program(step).encode()).skipped[0]
    assert re.search(reason, left.reason), left.reason
    new = [line.strip() for line in other.splitlines() if line.strip() not in step]
    for line in [line for line in new if "gradkit" in line]:
        assert line in left.by_hand
    (theirs, _), (ours, _) = execute(program(step), device), execute(program(other), device)
    for theirs_one, ours_one in zip(theirs, ours, strict=True):
        assert torch.equal(theirs_one, ours_one)
