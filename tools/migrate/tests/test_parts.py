"""What happens to a model after its optimizer was made: the moved loop trains the same weights."""

from __future__ import annotations

import re

import pytest
import torch

from gradkit_migrate import migrate
from loops import execute

LOOP = """
import copy
import functools
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.tail = nn.Linear(4, 5), nn.Linear(5, 3)

    def grow(self):
        self.tail = nn.Sequential(self.tail, nn.Linear(3, 3)).to(device)

    def encode(self, x):
        return self.body(x).relu()

    def forward(self, x):
        return self.tail(self.encode(x))


def new_head(module):
    module.tail = nn.Linear(5, 3).to(device)


def unlike(function):
    def run(module):
        new_head(module)
        return function(module)

    return run


@unlike
def show(module):
    print(module)


class Keeper:
    def __init__(self, module):
        self.kept = module

    def grow(self):
        self.kept.append(nn.Linear(3, 3).to(device))


LAZY


def count(module):
    return sum(p.numel() for p in module.parameters())


def run():
    extra = nn.Linear(3, 3).to(device)
    BEFORE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    CHANGE
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(FORWARD, y)
        loss.backward()
        optimizer.step()
    return [model, head, extra], [loss.item()]
"""
LAZY = """class Lazy(Net):
    def forward(self, x):
        if not hasattr(self, 'late'):
            self.late = nn.Linear(3, 3).to(device)
        return self.late(super().forward(x))"""
SEQUENTIAL = "model = new_model(); head = model[4]"
OWN = "model = Net().to(device); head = model.tail"
# By name: what is done before the optimizer is made, after it, and how the model is called.
CHANGED = {
    "a part is replaced": ("", "model[4] = nn.Identity()", "head(model(x))"),
    "a part is deleted": ("", "del model[4]", "head(model(x))"),
    "a part is popped": ("", "model.pop(4)", "head(model(x))"),
    "popped as a value": ("", "head = model.pop(4)", "head(model(x))"),
    "deleted from the dict": ("", "del model._modules['4']", "head(model(x))"),
    "replaced by a new part": ("", "model[4] = nn.Linear(6, 3).to(device)", "model(x)"),
    "a part is appended": ("", "model.append(extra)", "model(x)"),
    "by another name": ("", "same = model\n    same.append(extra)", "model(x)"),
    "by a name for the method": ("", "add = model.append\n    add(extra)", "model(x)"),
    "in a list": ("models = [model]", "models[0].append(extra)", "model(x)"),
    "in a loop over a list": ("", "for m in [model]: m.append(extra)", "model(x)"),
    "by what it was made from": (
        "model = nn.Sequential(part := nn.Sequential(nn.Linear(4, 3))).to(device); head = part",
        "part.append(extra)",
        "model(x)",
    ),
    "by a part of it": (
        "model = nn.Sequential(nn.Sequential(nn.Linear(4, 3))).to(device); head = part = model[0]",
        "part.append(extra)",
        "model(x)",
    ),
    "a method that grows": (OWN, "model.grow()", "model(x)"),
    "a function of the file": (OWN, "new_head(model)", "model(x)"),
    "a function under another name": (OWN, "renamed = new_head; renamed(model)", "model(x)"),
    "a lambda": (OWN, "(lambda m: new_head(m))(model)", "model(x)"),
    "setattr": (OWN, "setattr(model, 'tail', nn.Linear(5, 3).to(device))", "model(x)"),
    "add_module": ("", "model.add_module('extra', extra)", "model(x)"),
    "an attribute": (OWN, "model.tail = nn.Linear(5, 3).to(device)", "model(x)"),
    "vars": (OWN, "vars(model)['_modules']['tail'] = nn.Linear(5, 3).to(device)", "model(x)"),
    "weight_norm": ("", "torch.nn.utils.parametrizations.weight_norm(model[0])", "model(x)"),
    "apply": ("", "model.apply(lambda m: None)", "model(x)"),
    "assigned weights": (
        "",
        "model.load_state_dict({'4.bias': torch.ones(3).to(device)}, False, assign=True)",
        "model(x)",
    ),
    "by an object that keeps it": ("keeper = Keeper(model)", "keeper.grow()", "model(x)"),
    "by a bound argument": (
        f"{OWN}; grow = functools.partial(new_head, model)",
        "grow()",
        "model(x)",
    ),
    "by a decorator": (OWN, "show(model)", "model(x)"),
    "in place, by another name": ("", "same = model; same += nn.Sequential(extra)", "model(x)"),
    "in a closure": ("", "grow = lambda: model.append(extra)\n    grow()", "model(x)"),
    "of the class": ("", "nn.Sequential.append(model, extra)", "model(x)"),
    "lazily": ("model = Lazy().to(device); head = model.tail", "", "model(x)"),
    "within the loop": ("", "", "(model.append(nn.Linear(3, 3).to(device)), model(x))[1]"),
}  # fmt: skip
PLAIN = """
import copy
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.tail = nn.Linear(4, 5), nn.Linear(5, 3)
        self.calls, self.layers = 0, nn.ModuleList()
        self.layers.extend([self.body, self.tail])

    def forward(self, x):
        self.calls += 1
        return self.tail(self.body(x).relu())


def run():
    log = []
    BEFORE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    CHANGE
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        CLIP
        optimizer.step()
        log.append(loss.item())
    return [model], log
"""
NET = "model = Net().to(device)"
# By name: how the model is made, and what is done with it afterwards.
EVIDENT = {
    "nothing": (NET, "pass"),
    "of parts that are made in place": (
        "model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).to(device)", "pass"
    ),
    "moved before": ("model = Net(); model.to(device)", "pass"),
    "read": (NET, "model.train(); model.eval(); print(len(list(model.parameters())), f'{model}')"),
    "saved": (NET, "best = copy.deepcopy(model.state_dict()); model.load_state_dict(best)"),
    "lists": (NET, "kept = {}; kept['a'] = log; log.append(1.0); log.pop()"),
    "options": (NET, "for group in optimizer.param_groups: group['lr'] = 0.05"),
}  # fmt: skip
# Where the model may have other parts than the optimizer, as far as one can tell at a glance.
NOT_EVIDENT = {
    "another name": (NET, "same = model"),
    "a part": (NET, "tail = model.tail"),
    "made from another": ("body = nn.Linear(4, 3); model = nn.Sequential(body)", "pass"),
    "changed before": ("model = nn.Sequential(nn.Linear(4, 3)); model.append(nn.Tanh())", "pass"),
    "bound twice": ("model = Net(); model = model.to(device)", "pass"),
    "a function": (NET, "show = lambda module: None; show(model)"),
    "an item": (NET, "x = torch.zeros(2); x[0] = 1"),
    "an attribute": (NET, "model.kind = [1]"),
    "moved after": (NET, "model.to(device)"),
    "an optimizer in a list": (NET, "same = [optimizer]"),
    "an optimizer that is set up anew": (NET, "optimizer.__init__(model.parameters(), lr=0.1)"),
}  # fmt: skip


def program(before: str, change: str, forward: str) -> str:
    before = before if before.startswith("model =") else f"{SEQUENTIAL}; {before or 'pass'}"
    text = (
        LOOP
        .replace("LAZY", LAZY if "Lazy" in before else "")
        .replace("BEFORE", before)
        .replace("CHANGE", change or "pass")
    )
    return text.replace("FORWARD", forward)


def outcome(source: str | bytes, device: torch.device) -> object:
    """Return the weights and the log, or the type of the error."""
    try:
        return execute(source, device)
    except Exception as error:  # the moved program must fail alike
        return type(error)


def assert_same(source: str, new: bytes, device: torch.device) -> None:
    theirs, ours = outcome(source, device), outcome(new, device)
    assert isinstance(theirs, tuple)
    assert isinstance(ours, tuple), ours
    assert ours[1] == theirs[1]
    for theirs_one, ours_one in zip(theirs[0], ours[0], strict=True):
        assert torch.equal(theirs_one, ours_one)


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_may_change_is_trained_as_its_optimizer(
    device: torch.device, name: str
) -> None:
    source = program(*CHANGED[name])
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    assert b"gradkit.minimize_(optimizer, loss)" in result.source
    if name != "within the loop":  # which fails as it is: a layer more for each call
        assert_same(source, result.source, device)


def plain(before: str, change: str, clip: str = "pass") -> str:
    return PLAIN.replace("BEFORE", before).replace("CHANGE", change).replace("CLIP", clip)


@pytest.mark.parametrize("name", EVIDENT)
def test_a_model_that_evidently_stays_as_it_is_is_the_params(
    device: torch.device, name: str
) -> None:
    for clip in ("pass", "norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)"):
        source = plain(*EVIDENT[name], clip)
        result = migrate(source.encode())
        assert (result.moved, result.skipped) == (1, [])
        becomes = "step_(optimizer, model, grads)" if clip == "pass" else "minimize_(optimizer, "
        assert f"gradkit.{becomes}" in result.source.decode()
        assert_same(source, result.source, device)


@pytest.mark.parametrize("name", NOT_EVIDENT)
def test_a_model_that_may_be_another_is_not_the_params(device: torch.device, name: str) -> None:
    source = plain(*NOT_EVIDENT[name]).replace("def run():", "def run():\n    i = 0")
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    assert b"gradkit.step_(optimizer, optimizer, grads)" in result.source
    assert_same(source, result.source, device)
    clipped = plain(*NOT_EVIDENT[name], "nn.utils.clip_grad_norm_(model.parameters(), 0.1)")
    assert migrate(clipped.encode()).moved == 0


@pytest.mark.parametrize("name", CHANGED)
def test_clipping_of_a_model_that_may_change_is_left(device: torch.device, name: str) -> None:
    source = program(*CHANGED[name]).replace(
        "        optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n        optimizer.step()",
    )
    result = migrate(source.encode())
    assert (result.source, result.moved) == (source.encode(), 0)
    doubt = re.search(
        r"may not be exactly what optimizer has, because of line (\d+): `(.{5})",
        result.skipped[0].reason,
    )
    assert doubt is not None
    assert doubt[2] in source.splitlines()[int(doubt[1]) - 1]


TRAINER = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Trainer:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def fit(self):
        for x, y in batches:
            self.opt.zero_grad()
            loss = cross_entropy(self.net(x), y)
            loss.backward()
            self.opt.step()


class Scaled(Trainer):
    def __init__(self, net):
        super().__init__(net)
        SUBCLASS


def run():
    model, extra = new_model(), nn.Linear(3, 3).to(device)
    trainer = Scaled(model)
    OUTSIDE
    trainer.fit()
    return [trainer.net, model, extra], []
"""
OF_TRAINERS = {
    "from outside": ("pass", "trainer.net = nn.Sequential(trainer.net, extra)"),
    "by a subclass": ("self.net = nn.Sequential(net, nn.Linear(3, 3).to(device))", ""),
    "another optimizer": ("self.opt = torch.optim.SGD(self.net[0].parameters(), lr=1)", ""),
    "by setattr": ("pass", "setattr(trainer, 'net', nn.Sequential(model, extra))"),
    "of its model": ("pass", "model.append(extra)"),
    "by its dict": ("pass", "trainer.__dict__['net'] = nn.Sequential(model, extra)"),
    "not at all": ("pass", ""),
}


@pytest.mark.parametrize("name", OF_TRAINERS)
def test_a_model_of_an_object(device: torch.device, name: str) -> None:
    subclass, outside = OF_TRAINERS[name]
    source = TRAINER.replace("SUBCLASS", subclass).replace("OUTSIDE", outside or "pass")
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    assert b"gradkit.minimize_(self.opt, loss)" in result.source
    assert_same(source, result.source, device)


def test_the_line_that_makes_the_parameters_unsure_is_named(device: torch.device) -> None:
    grown = "both = nn.ModuleList([model, model.tail])"
    source = plain(NET, grown, "nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    (left,) = migrate(source.encode()).skipped
    line = source.splitlines().index(f"    {grown}") + 1
    assert left.reason == (
        "model.parameters() is clipped, and may not be exactly what optimizer has, because of "
        f"line {line}: `{grown}`"
    )
    assert left.by_hand == (
        "if optimizer has exactly model.parameters(): _, grads = gradkit.value_and_grads(loss, "
        "optimizer); gradkit.step_(optimizer, optimizer, grads, max_norm=1.0)"
    )


REPEATED = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.dtype, self.tail = 3, torch.float32, nn.Linear(4, 3)

    def grown(self, part):
        return self

    def forward(self, x):
        out = self.tail(x)
        LINE
        return out


def fit(model, optimizer, times):
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    again(model, optimizer, times)


def again(model, optimizer, times):
    if times:
        fit(model, optimizer, times - 1)


def run():
    model = Net().to(device)
    MODEL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, 2)
    return [model], []
"""
# In `forward`: names that are given what their own methods make of attributes of `self`.
ANEW = (
    "out = out.view(out.shape[0], self.n)",
    "out = out.view(-1, self.n).view(-1, self.n)",
    "out += out.view(-1, self.n)",
    "a = out; out = a.view(-1, self.n); a = out.view(-1, self.n)",
    "a, b = out, x; a, b = b.to(self.dtype), a.view(-1, self.n); out = b",
    "out = torch.stack([out.view(-1, self.n) for out in out.split(1)]).flatten(0, 1)",
    "(out := out.view(-1, self.n))",
    "for out in [out.view(-1, self.n)]: out = out.view(-1, self.n)",
    "del x; out = out.view_as(out.view(-1, self.n))",
)
# And of the model itself, before its optimizer is made.
OF_MODEL = (
    "model = model.grown(model.tail)",
    "model = model.to(model.dtype)",
    "other = model; model = other.grown(other.tail); other = model.grown(model.tail)",
)


@pytest.mark.parametrize(
    ("line", "model"), [*((line, "") for line in ANEW), *(("", line) for line in OF_MODEL)]
)
def test_names_that_are_given_anew_by_their_own_methods(
    device: torch.device, line: str, model: str
) -> None:
    source = REPEATED.replace("LINE", line).replace("MODEL", model)
    result = migrate(source.encode())
    assert (result.moved, result.skipped) == (1, [])
    assert_same(source, result.source, device)
