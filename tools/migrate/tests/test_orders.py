"""Loops in any order of their statements: what is moved leaves the same weights as before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradkit_migrate import migrate
from loops import execute

HEAD = """
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

def first_of(group):
    return list(group.values())[0]

def change(module):
    module[0] = torch.nn.Linear(4, 6).to(device)

def run():
    model, log, i = new_model(), [], 1
    extra = torch.ones(1, device=device, requires_grad=True)
    optimizer = torch.optim.{optimizer}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    add, same = {add}, model
    x, y = batches[0]
    loss = model(x).sum()
    {early}
    for i, (x, y) in enumerate(batches):
        x.requires_grad_()  # the loss has a graph where all parameters are frozen
"""
OPTIMIZERS = [
    "SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)",
    "Adam(model.parameters(), lr=0.01)",
    "Adam(model[4].parameters(), lr=0.01)",
    "SGD([{'params': model[0].parameters()}, {'params': model[4].parameters()}], lr=0.1)",
]
ZEROS = ["optimizer.zero_grad()", "model.zero_grad()", "optimizer.zero_grad(set_to_none=False)"]
OTHERS = [
    "clip_grad_norm_(model.parameters(), 0.05)",
    "norm = clip_grad_norm_(model.parameters(), 0.05)",
    "log.append(loss.item())",
    "scheduler.step()",
    "if i == 1: continue",
    "model(x).sum().backward()",
    "for group in optimizer.param_groups: group['lr'] = 0.2",
    "loss = loss * 1",
    "optimizer.step()",
]
# What changes the parts of the model, the groups of the optimizer, or what is trained.
CHANGES = [
    "pass",
    "model.append(torch.nn.Linear(3, 3).to(device))",
    "same.insert(0, torch.nn.Linear(4, 4).to(device))",
    "model[0] = torch.nn.Linear(4, 6).to(device)",
    "del model[2]",
    "model.add_module('head', torch.nn.Linear(3, 3).to(device))",
    "change(model)",
    "(lambda module: change(module))(model)",
    "setattr(model, '0', torch.nn.Linear(4, 6).to(device))",
    "add({'params': [extra]})",
    "first_of(optimizer.param_groups[0]).append(extra)",
    "for p in model.parameters(): p.requires_grad_(i != 1)",
    "model.requires_grad_(False)",
]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Return a loop: forward, backward and step in this order, the other statements anywhere."""
    body = ["loss = cross_entropy(model(x) * extra, y)", "loss.backward()", "optimizer.step()"]
    if draw(st.integers(0, 4)) == 0:
        body[2] = f"if i % 2: {body[2]}"
    zero = draw(st.sampled_from([ZEROS[0], *ZEROS]))
    others = draw(st.lists(st.sampled_from(OTHERS), max_size=2))
    for statement in [zero, *others]:
        body.insert(draw(st.integers(0, len(body))), statement)
    change = draw(st.sampled_from(CHANGES))
    is_early = draw(st.booleans())
    if not is_early and change != "pass":
        lines = ["if i == 1:", f"    {change}"]
        place = draw(st.integers(0, len(body)))
        body[place:place] = lines
    add = "optimizer.add_param_group" if "add(" in change else "None"
    head = HEAD.format(
        optimizer=draw(st.sampled_from(OPTIMIZERS)), add=add, early=change if is_early else "pass"
    )
    return head + "".join(f"        {line}\n" for line in body) + "    return [model], log\n"


# torch's, of a loop whose scheduler steps first: one of the orders, and it runs on as written.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(source=programs())
def test_whatever_is_moved_leaves_the_same_weights(device: torch.device, source: str) -> None:
    result = migrate(source.encode())
    assert result.moved or result.skipped
    if not result.moved:
        assert result.source == source.encode()
        return
    (theirs, their_log), (ours, our_log) = execute(source, device), execute(result.source, device)
    assert our_log == their_log
    for theirs_one, ours_one in zip(theirs, ours, strict=True):
        assert torch.equal(theirs_one, ours_one)
