#!/usr/bin/env bash
# higher 0.2.1 with torch 2.13.0: an inner loop of an optimizer with maximize=True descends.
#
# higher.innerloop_ctx copies the options of a torch optimizer into its differentiable twin, and the twins of SGD and Adam
# know no `maximize` (torch has had it since 1.10): the option is kept in the parameter groups and never read. An
# inner loop that is meant to ascend (a policy's return, an adversary) goes the other way, without an error.
#
# Seen (w = 1, the objective 3 w, a rate of 0.1, one step):
#   torch.optim.SGD, Adam with maximize=True: 1.3, 1.1
#   higher's twins:                           0.7, 0.9
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 higher==0.2.1
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import higher
import torch


def stepped(optimizer_class, by_higher):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = optimizer_class(model.parameters(), lr=0.1, maximize=True)
    three = torch.full((1, 1), 3.0)
    if not by_higher:
        model(three).sum().backward()
        optimizer.step()
        return round(model.weight.item(), 4)
    with higher.innerloop_ctx(model, optimizer) as (inner, inner_optimizer):
        inner_optimizer.step(inner(three).sum())
        return round(inner.weight.item(), 4)


seen = {c.__name__: (stepped(c, False), stepped(c, True)) for c in (torch.optim.SGD, torch.optim.Adam)}
print(seen)
assert seen == {"SGD": (1.3, 0.7), "Adam": (1.1, 0.9)}
PYTHON
