"""Clipping of a list of parameters: moved where it is the list that the optimizer was made with."""

from __future__ import annotations

import re

import pytest
import torch

from gradkit_migrate import migrate
from loops import execute

PROGRAM = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

HELPERS

def run():
    rnn, head = nn.GRU(4, 3).to(device), nn.Linear(3, 3).to(device)
    LIST
    opt = torch.optim.RMSprop(params, lr=0.01)
    AFTER
    for x, y in batches:
        opt.zero_grad()
        loss = cross_entropy(head(rnn(x)[0]), y)
        loss.backward()
        clip_grad_norm_(params, .25)
        opt.step()
        LAST
    return [rnn, head], [loss.item()]
"""
BOTH = "params = [*rnn.parameters(), *head.parameters()]"
# By name: helpers, how the list is made, what is done with it after the optimizer is made, or last.
SAME = {
    "unpacked": ("", BOTH, "", ""),
    "added": ("", "params = list(rnn.parameters()) + list(head.parameters())", "", ""),
    "of several modules": (
        "", "params = [p for m in (rnn, head) for p in m.parameters()]", "", ""
    ),
    "with one more name": ("", f"{BOTH}; other = list(params)", "other.clear()", ""),
    "read": ("", BOTH, "print(len(params), sum(p.numel() for p in params), params[0].shape)", ""),
    "a name of other functions": (
        "def show(params):\n    params.append(1)\n\ndef make():\n    params = {}\n"
        "    params['a'] = params.copy()",
        BOTH,
        "make()",
        "",
    ),
}  # fmt: skip
GROW = "def grow(params, more):\n    params.append(more)"
# Here the word that is in the line that is named, too.
OTHER = {
    "filled before": (
        "", "params = []; params.extend(rnn.parameters())", "", "", "extend"
    ),
    "added in place before": (
        "", "params = list(rnn.parameters()); params += head.parameters()", "", "", "+="
    ),
    "extended after": ("", BOTH, "params.append(nn.Parameter(torch.ones(1)))", "", "append"),
    "replaced after": ("", BOTH, "params = params[:1]", "", "params[:1]"),
    "shortened in the loop": ("", BOTH, "", "params.pop()", "pop"),
    "an item is deleted": ("", BOTH, "del params[0]", "", "del"),
    "added in place after": ("", BOTH, "params += [nn.Parameter(torch.ones(1))]", "", "+="),
    "by another name": ("", BOTH, "same = params; same.pop()", "", "same = params"),
    "by two names at once": ("", f"same = {BOTH}", "same.pop()", "", "same ="),
    "in a function": (GROW, BOTH, "grow(params, nn.Parameter(torch.ones(1)))", "", "grow("),
    "in a closure": ("", BOTH, "cut = lambda: params.pop()\n    cut()", "", "lambda"),
    "by its method": ("", f"{BOTH}; pop = params.pop", "pop()", "", "pop = "),
    "by the names of the function": ("", BOTH, "locals()['params'].pop()", "", "locals()"),
    "not a new list": ("", "params = rnn._flat_weights", "", "", "_flat_weights"),
    "an iterator": ("", "params = rnn.parameters()", "", "", "rnn.parameters()"),
}  # fmt: skip


def program(helpers: str, made: str, after: str, last: str) -> str:
    text = PROGRAM.replace("HELPERS", helpers).replace("LIST", made)
    return text.replace("AFTER", after or "pass").replace("LAST", last or "pass")


@pytest.mark.parametrize("name", SAME)
def test_clipping_of_the_list_of_the_optimizer_is_moved(device: torch.device, name: str) -> None:
    source = program(*SAME[name])
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    assert b"gradkit.minimize_(opt, loss, max_norm=.25)" in result.source
    (theirs, their_log), (ours, our_log) = execute(source, device), execute(result.source, device)
    assert our_log == their_log
    for theirs_one, ours_one in zip(theirs, ours, strict=True):
        assert torch.equal(theirs_one, ours_one)


@pytest.mark.parametrize("name", OTHER)
def test_clipping_of_a_list_that_may_be_another_is_left(device: torch.device, name: str) -> None:
    *texts, word = OTHER[name]
    source = program(*texts)
    result = migrate(source.encode())
    assert (result.source, result.moved) == (source.encode(), 0)
    assert "params is clipped, and may not be exactly what opt has" in result.skipped[0].reason
    line = re.search(r"because of line (\d+):", result.skipped[0].reason)
    assert line is not None
    assert word in source.splitlines()[int(line[1]) - 1]


OF_OBJECT = """
import torch
from torch.nn.utils import clip_grad_norm_

class Trainer:
    def __init__(self, model):
        self.model = model
        params = list(model[0].parameters())
        self.opt = torch.optim.SGD(params, lr=0.1)

    def fit(self):
        params = list(self.model.parameters())
        for x in batches:
            self.opt.zero_grad()
            self.model(x).sum().backward()
            clip_grad_norm_(params, 1.0)
            self.opt.step()
"""
IN_LOOP = """
import torch
from torch.nn.utils import clip_grad_norm_

def fit(models, x):
    for model in models:
        params = list(model.parameters())
        if not params:
            break
        opt = torch.optim.SGD(params, lr=0.1)
    opt.zero_grad()
    models[0](x).sum().backward()
    clip_grad_norm_(params, 1.0)
    opt.step()
"""


@pytest.mark.parametrize("source", [OF_OBJECT, IN_LOOP], ids=["of two functions", "in a loop"])
def test_lists_of_the_same_name_may_be_different(device: torch.device, source: str) -> None:
    result = migrate(source.encode())
    assert result.moved == 0
    assert "params is clipped, and may not be exactly" in result.skipped[0].reason
