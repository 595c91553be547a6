#!/usr/bin/env bash
# torch 2.13.0: inside torch.nn.utils.parametrize.cached(), torch.func.functional_call ignores its parameters.
#
# cached() keeps a parametrized weight by module and name. functional_call puts other parameters into the same module,
# so that its second call inside the block takes the weight that the first one has computed: the value is that of the
# first parameters, and torch.func.grad by the second is zero, without an error.
#
# Seen (a weight that is the square of a parameter, at 1 and at 3, input (1, 1)):
#   without cached()  2 and 18, gradient at 3: [6, 6]
#   inside cached()   2 and 2,  gradient at 3: [0, 0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import contextlib

import torch
from torch.func import functional_call, grad
from torch.nn.utils import parametrize


class Square(torch.nn.Module):
    def forward(self, weight):
        return weight * weight


layer = torch.nn.Linear(2, 1, bias=False)
parametrize.register_parametrization(layer, "weight", Square())
name = "parametrizations.weight.original"


def output(weight):
    return functional_call(layer, {name: weight}, (torch.ones(2),)).sum()


one, three = torch.ones(1, 2), torch.full((1, 2), 3.0)
seen = []
for block in (contextlib.nullcontext(), parametrize.cached()):
    with block:
        seen.append((output(one).item(), output(three).item(), grad(output)(three).tolist()))
print(seen)
assert seen == [(2.0, 18.0, [[6.0, 6.0]]), (2.0, 2.0, [[0.0, 0.0]])]
PYTHON
