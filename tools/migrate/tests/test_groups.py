"""What gives an optimizer other parameters after it was made: it is read at each call, or left."""

from __future__ import annotations

import pytest
import torch

from gradkit_migrate import migrate
from loops import execute

LOOP = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy


HELPERS


def run():
    model, log = new_model(), []
    scale = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    CHANGE
    for i, (x, y) in enumerate(batches):
        FIRST
        optimizer.zero_grad()
        WITHIN
        loss = cross_entropy(model(x) * scale, y)
        loss.backward()
        optimizer.step()
        log += [loss.item(), scale.sum().item()]
    return [model], log
"""
GROUP = "({'params': [scale]})"
HELPERS = {
    "first_of": "def first_of(group):\n    return list(group.values())[0]\n",
    "thaw": "def thaw(one, parameter):\n    one.add_param_group({'params': [parameter]})\n",
}
CHANGES = {
    "a group": f"optimizer.add_param_group{GROUP}",
    "by another name": f"same = optimizer; same.add_param_group{GROUP}",
    "in a list": f"[one.add_param_group{GROUP} for one in [optimizer]]",
    "by getattr": f"getattr(optimizer, 'add_' + 'param_group'){GROUP}",
    "in a group": "optimizer.param_groups[0]['params'].append(scale)",
    "in a group, passed on": "first_of(optimizer.param_groups[0]).append(scale)",
    "a function of the file": "thaw(optimizer, scale)",
    "an unknown function": f"(lambda one: one.add_param_group{GROUP})(optimizer)",
}
# By a name under which it may be kept for later.
KEPT = {
    "a name for the method": f"add = optimizer.add_param_group; add{GROUP}",
    "the list of groups": "groups = optimizer.param_groups; first_of(groups[0]).append(scale)",
    "a list": f"calls = []; calls.append(optimizer.add_param_group); calls[0]{GROUP}",
    "a function": f"keeper = (lambda one: [one])(optimizer); keeper[0].add_param_group{GROUP}",
}
OPTIONS = {
    "a rate": "for g in optimizer.param_groups: g['lr'] = 0.05",
    "a rate that is read": "print(optimizer.param_groups[0]['lr'], len(optimizer.param_groups))",
    "a scheduler": "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()",
    "its state": "optimizer.load_state_dict(optimizer.state_dict())",
}


def program(change: str = "pass", first: str = "pass", within: str = "pass") -> str:
    used = "".join(text for name, text in HELPERS.items() if name in change + first + within)
    text = LOOP.replace("HELPERS", used).replace("CHANGE", change).replace("FIRST", first)
    return text.replace("WITHIN", within)


def cleared_late(source: str) -> str:
    late = source.replace("        optimizer.zero_grad()\n", "")
    step = "        optimizer.step()\n"
    return late.replace(step, f"{step}        optimizer.zero_grad()\n")


def assert_same(source: str, new: bytes, device: torch.device) -> None:
    (theirs, their_log), (ours, our_log) = execute(source, device), execute(new, device)
    assert our_log == their_log
    for theirs_one, ours_one in zip(theirs, ours, strict=True):
        assert torch.equal(theirs_one, ours_one)


@pytest.mark.parametrize("name", CHANGES)
def test_an_optimizer_with_other_groups_is_the_params(device: torch.device, name: str) -> None:
    for source in (program(CHANGES[name]), program(first=f"if i == 1: {CHANGES[name]}")):
        result = migrate(source.encode())
        assert (result.moved, result.skipped) == (1, [])
        assert b"gradkit.minimize_(optimizer, loss)" in result.source
        assert_same(source, result.source, device)


@pytest.mark.parametrize("name", CHANGES)
def test_a_group_that_joins_with_gradients_is_left(device: torch.device, name: str) -> None:
    late = cleared_late(program(first=f"if i == 1: {CHANGES[name]}"))
    for source in (late, program(within=f"if i == 1: {CHANGES[name]}")):
        result = migrate(source.encode())
        assert (result.source, result.moved) == (source.encode(), 0)
        said = result.skipped[0].reason
        assert "that have gradients already" in said or "runs backward() or step() itself" in said


@pytest.mark.parametrize("name", KEPT)
def test_a_change_that_may_be_kept_for_later_is_left(device: torch.device, name: str) -> None:
    for source in (program(KEPT[name]), program(first=f"if i == 1:\n            {KEPT[name]}")):
        result = migrate(source.encode())
        assert (result.source, result.moved) == (source.encode(), 0)
        assert "that have gradients already" in result.skipped[0].reason


def test_groups_that_are_complete_before_the_loop_may_be_cleared_late(device: torch.device) -> None:
    source = cleared_late(program(CHANGES["a group"]))
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    assert_same(source, result.source, device)


@pytest.mark.parametrize("name", [*CHANGES, *KEPT])
def test_clipping_with_other_groups_is_left(device: torch.device, name: str) -> None:
    source = program((CHANGES | KEPT)[name]).replace(
        "        optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n        optimizer.step()",
    )
    result = migrate(source.encode())
    assert (result.source, result.moved) == (source.encode(), 0)
    assert "may not be exactly what optimizer has" in result.skipped[0].reason


# torch's, of a scheduler that steps before the optimizer: it runs on as written.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_groups_leave_the_model_as_params(device: torch.device, name: str) -> None:
    source = program(OPTIONS[name], OPTIONS[name], OPTIONS[name]).replace(
        "        optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n        optimizer.step()",
    )
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    assert b"gradkit.minimize_(optimizer, loss, max_norm=1)" in result.source
    assert_same(source, result.source, device)
