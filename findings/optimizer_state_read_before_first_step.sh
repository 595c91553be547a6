#!/usr/bin/env bash
# torch 2.13.0: reading an optimizer's state changes the training that follows.
#
# torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), called before the
# first step (a checkpoint of step 0, or of a fresh run), takes a step with gradients of zero and a rate
# of zero, so that the state exists. That step stays: Adam has counted it, and corrects its first real
# update for two steps (0.074 in place of 0.1); Rprop has taken its step sizes from the rate of zero and
# starts at its smallest (1e-6). SGD without dampening, Adagrad and RMSprop are not affected.
#
# Seen: the first update of a weight whose gradient is 1, at a rate of 0.1
#   Adam   -0.1 without the reading, -0.0744137 after it
#   Rprop  -0.1 without the reading, -1.0e-06 after it
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(optimizer_class, read):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    if read:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.item()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item() - before


seen = {c.__name__: [first_update(c, read) for read in (False, True)] for c in (torch.optim.Adam, torch.optim.Rprop)}
print(seen)
assert abs(seen["Adam"][0] + 0.1) < 1e-6 and abs(seen["Adam"][1] + 0.0744137) < 1e-5
assert abs(seen["Rprop"][0] + 0.1) < 1e-6 and abs(seen["Rprop"][1]) < 1e-5
PYTHON
