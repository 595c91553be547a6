"""Quantum circuits as layers, differentiated by back-propagation, parameter shifts and the adjoint method."""

import pennylane as qml
import torch
from torch import nn

from tests.works_with._oracles import of_module

PIP = "pennylane"
NOTE = "second derivatives: `max_diff=2` with parameter shifts; the adjoint method has none"


class Circuit(nn.Module):
    def __init__(self, **options):
        super().__init__()
        device = qml.device("default.qubit", wires=2)

        @qml.qnode(device, interface="torch", **options)
        def circuit(inputs, weights):
            qml.AngleEmbedding(inputs, wires=range(2))
            qml.BasicEntanglerLayers(weights, wires=range(2))
            return qml.expval(qml.PauliZ(0) @ qml.PauliX(1))

        self.weights = nn.Parameter(torch.tensor([[0.3, 0.5], [0.9, -0.4]], dtype=torch.float64))
        self.circuit = circuit

    def forward(self, x):
        return torch.stack([self.circuit(row, self.weights) for row in x])


def tries():
    x = torch.tensor([[0.2, 0.7], [0.5, -0.3]], dtype=torch.float64)
    for name, options in {
        "backprop (the default here): ": {},
        "parameter-shift (max_diff=1, its default): ": {"diff_method": "parameter-shift"},
        "parameter-shift, max_diff=2: ": {"diff_method": "parameter-shift", "max_diff": 2},
        "adjoint: ": {"diff_method": "adjoint"},
    }.items():
        yield from of_module(
            lambda options=options: Circuit(**options),
            (x,),
            lambda m, x: m(x).square().mean(),
            name,
            "steps gradient hvp functional",
            tol=1e-4,
        )
