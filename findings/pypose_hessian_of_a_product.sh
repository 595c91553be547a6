#!/usr/bin/env bash
# pypose 0.9.5 with torch 2.13.0: a Hessian through a product or an inverse of group elements is wrong, silently.
#
# The gradient by an element of SO3 (a quaternion) is a vector of the tangent space, padded by a zero, and the Functions
# of pypose pass it on among themselves. Their backward functions are formulas of the quaternion they have kept, which
# autograd differentiates entry by entry: the second derivative adds a gradient by four numbers to one by a tangent
# vector and a zero. Through Exp and Act alone the result is right.
#
# Seen: gradients agree with differences; the Hessian times a vector does for (Exp(v) @ p), and is off by more than a
# tenth of its norm for (Exp(v) @ Exp(w) @ p) by v and for (Exp(v).Inv() @ p).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 \
	pypose==0.9.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import pypose as pp
import torch

torch.manual_seed(0)
v, w, p, along = (0.5 * torch.randn(3, dtype=torch.float64) for _ in range(4))
functions = {
    "Exp(v) @ p": lambda v: pp.so3(v).Exp() @ p,
    "Exp(v).Inv() @ p": lambda v: pp.so3(v).Exp().Inv() @ p,
    "Exp(v) @ Exp(v reversed) @ p": lambda v: pp.so3(v).Exp() @ pp.so3(v.flip(0)).Exp() @ p,
}


def slope(fn, at, create_graph=False):
    at = at.clone().requires_grad_()
    return at, torch.autograd.grad(fn(at).exp().sum(), at, create_graph=create_graph)[0]


def offs(fn):
    at, grad = slope(fn, v, create_graph=True)
    (product,) = torch.autograd.grad((grad * along).sum(), at)
    first = ((fn(v + 1e-5 * along).exp() - fn(v - 1e-5 * along).exp()) / 2e-5).sum()
    second = (slope(fn, v + 1e-5 * along)[1] - slope(fn, v - 1e-5 * along)[1]) / 2e-5
    return abs((grad * along).sum() - first).item(), ((product - second).norm() / second.norm()).item()


seen = {name: offs(fn) for name, fn in functions.items()}
for name, (first, second) in seen.items():
    print(f"{name}: gradient off by {first:.1e}, Hessian times a vector by {second:.1e} of its norm")
    assert first < 1e-6
wrong = {name for name, (_, second) in seen.items() if second > 0.1}
assert wrong == {"Exp(v).Inv() @ p", "Exp(v) @ Exp(v reversed) @ p"} and seen["Exp(v) @ p"][1] < 1e-6
PYTHON
