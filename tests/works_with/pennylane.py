"""A quantum node with two rotations, by its angles: backprop, and the default of `diff_method`."""

import pennylane as qml
import torch

from tests.works_with._oracles import of_function

PIP = "pennylane"


def node(method, **options):
    device = qml.device("default.qubit", wires=2)

    @qml.qnode(device, interface="torch", diff_method=method, **options)
    def circuit(v):
        qml.RX(v[0], wires=0)
        qml.RY(v[1], wires=1)
        qml.CNOT(wires=[0, 1])
        qml.RZ(v[0] * v[1], wires=1)
        qml.RX(v[1], wires=1)
        return qml.expval(qml.PauliZ(1))

    return lambda v: circuit(v).exp()


def tries():
    v = torch.tensor([0.4, 0.9], dtype=torch.float64)
    for name, fn in {
        "backprop": node("backprop"),
        "best": node("best"),
        "parameter-shift": node("parameter-shift"),
        "parameter-shift, max_diff=2": node("parameter-shift", max_diff=2),
        "adjoint": node("adjoint"),
        "finite-diff": node("finite-diff"),
    }.items():
        yield from of_function(fn, v, f"{name}: ", tol=1e-4)
