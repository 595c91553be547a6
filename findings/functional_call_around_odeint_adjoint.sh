#!/usr/bin/env bash
# torch.func.functional_call of torch 2.13.0 around torchdiffeq 0.2.5's odeint_adjoint: the gradient is zero.
#
# The adjoint method calls the vector field again in the backward pass. functional_call has put the module's own
# parameters back by then, so that the field does not depend on those that the caller gave; autograd.grad inside of the
# adjoint is called with allow_unused=True, and zeros are returned, not None. odeint in place of odeint_adjoint is right.
# It is the pattern of MAML, hypernetworks and meta-gradients, where an adjoint is used to save memory.
#
# Seen: a gradient by the given parameters of zeros with odeint_adjoint, and not with odeint; values agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 \
	scipy==1.17.1 torchdiffeq==0.2.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, t, y):
        return self.layer(y).tanh()


class Flow(nn.Module):
    def __init__(self, solve):
        super().__init__()
        self.field, self.solve = Field(), solve

    def forward(self, y):
        return self.solve(self.field, y, torch.tensor([0.0, 1.0]))[-1]


def gradient(solve):
    torch.manual_seed(0)
    flow = Flow(solve)
    given = {name: p.detach().clone().requires_grad_() for name, p in flow.named_parameters()}
    loss = torch.func.functional_call(flow, given, torch.ones(1, 2)).sum()
    loss.backward()
    return loss.item(), given["field.layer.weight"].grad


(value, right), (again, seen) = gradient(odeint), gradient(odeint_adjoint)
print("odeint", value, right.flatten().tolist(), "odeint_adjoint", again, seen.flatten().tolist())
assert abs(value - again) < 1e-5 and right.abs().min() > 0.1 and not seen.any()
PYTHON
