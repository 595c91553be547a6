"""Parameters that are frozen: before their optimizer is made, or, perhaps all of them, later."""

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
    BEFORE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    AFTER
    for i, (x, y) in enumerate(batches):
        x = x.clone().requires_grad_()
        WITHIN
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        log.append(loss.item())
    return [model], log
"""
HELPERS = {
    "set_trainable": """
def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag
""",
    "Frozen": """
class Frozen(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)

    def forward(self, x):
        return self.inner(x)
""",
    "build": """
def build():
    model = new_model()
    model[0].requires_grad_(False)
    return model
""",
}
FREEZE = {
    "a method": "model.requires_grad_(False)",
    "by keyword": "model.requires_grad_(requires_grad=i != 1)",
    "of each parameter": "for p in model.parameters(): p.requires_grad_(i != 1)",
    "an attribute": "for p in model.parameters(): p.requires_grad = False",
    "setattr": "for p in model.parameters(): setattr(p, 'requires_grad', False)",
    "a function": "set_trainable(model, i != 1)",
}
EARLY = {
    "a part": "model[0].requires_grad_(False)",
    "a function": "set_trainable(model[0], False)",
    "another function": "model = build()",
    "a constructor": "model = nn.Sequential(Frozen(model), nn.Linear(3, 3).to(device))",
    "all, and a new part": "set_trainable(model, False); model[4] = nn.Linear(6, 3).to(device)",
}


def program(before: str = "pass", after: str = "pass", within: str = "pass") -> str:
    used = "".join(text for name, text in HELPERS.items() if name in before + after + within)
    text = LOOP.replace("HELPERS", used).replace("BEFORE", before).replace("AFTER", after)
    return text.replace("WITHIN", within)


@pytest.mark.parametrize("name", FREEZE)
def test_a_phase_in_which_all_may_be_frozen_is_left(device: torch.device, name: str) -> None:
    after = f"i = 0; {FREEZE[name]}" if "for" not in FREEZE[name] else f"i = 0\n    {FREEZE[name]}"
    for source in (program(within=FREEZE[name]), program(after=after)):
        result = migrate(source.encode())
        assert (result.source, result.moved) == (source.encode(), 0)
        assert "may freeze all parameters" in result.skipped[0].reason


@pytest.mark.parametrize("name", EARLY)
def test_what_is_frozen_before_the_optimizer_is_made_is_moved(
    device: torch.device, name: str
) -> None:
    source = program(EARLY[name], within="x.requires_grad_(True)")
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    (theirs, their_log), (ours, our_log) = execute(source, device), execute(result.source, device)
    assert our_log == their_log
    for theirs_one, ours_one in zip(theirs, ours, strict=True):
        assert torch.equal(theirs_one, ours_one)
