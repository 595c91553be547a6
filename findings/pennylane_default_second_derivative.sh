#!/usr/bin/env bash
# PennyLane 0.45.1 with torch 2.13.0: by parameter shifts or the adjoint method, a second derivative lacks a term.
#
# A QNode has max_diff=1 by default: its backward pass multiplies by a Jacobian of detached numbers. A loss that is not linear
# in the circuit still has a second derivative in torch, without a warning, but for the circuit's own curvature. Back-
# propagation (the default of default.qubit without shots), and max_diff=2 by parameter shifts, are right; adjoint has no other.
#
# Seen for the square of cos(w) at w = 0.3, whose second derivative is -2 cos(2 w) = -1.6507:
#   backprop -1.6507; parameter-shift 0.1747; adjoint 0.1747; parameter-shift with max_diff=2 -1.6507
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 pennylane==0.45.1
"$folder/venv/bin/python" - <<'PYTHON'
from math import cos, sin

import pennylane as qml
import torch

seen = {}
for name, options in {
    "backprop": {"diff_method": "backprop"},
    "parameter-shift": {"diff_method": "parameter-shift"},
    "adjoint": {"diff_method": "adjoint"},
    "parameter-shift, max_diff=2": {"diff_method": "parameter-shift", "max_diff": 2},
}.items():

    @qml.qnode(qml.device("default.qubit", wires=1), interface="torch", **options)
    def circuit(angle):
        qml.RX(angle, wires=0)
        return qml.expval(qml.PauliZ(0))

    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(circuit(w).square(), w, create_graph=True)
    (second,) = torch.autograd.grad(slope, w)
    seen[name] = second.item()
print({name: round(value, 4) for name, value in seen.items()})
right, wrong = -2 * cos(0.6), 2 * sin(0.3) ** 2
for name, expected in zip(seen, (right, wrong, wrong, right)):
    assert abs(seen[name] - expected) < 1e-6, name
PYTHON
