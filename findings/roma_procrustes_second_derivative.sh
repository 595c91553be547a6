#!/usr/bin/env bash
# roma 1.8.0 with torch 2.13.0: the second derivative of `procrustes` is wrong, and that of `special_procrustes` right.
#
# roma.procrustes (the nearest orthonormal matrix) is a Function with a formula of its own for the gradient, which is
# computed from the singular vectors that forward has kept: without a graph. The second derivative has what goes
# through the cotangent, and lacks what goes through the vectors. special_procrustes (the nearest rotation), which
# differentiates the decomposition itself, is right.
#
# Seen: for a function of the nearest rotation of a matrix with a positive determinant, for which both maps are the
# same, equal gradients; a Hessian times a vector that agrees with differences for the one, and not for the other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 \
	roma==1.8.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import roma
import torch

torch.manual_seed(0)
matrix, along, weights = (torch.randn(3, 3, dtype=torch.float64) for _ in range(3))
matrix = matrix if torch.linalg.det(matrix) > 0 else -matrix


def slope(nearest, at, create_graph=False):
    at = at.clone().requires_grad_()
    loss = (nearest(at) * weights).sum().exp()
    return at, torch.autograd.grad(loss, at, create_graph=create_graph)[0]


def off(nearest):
    at, grad = slope(nearest, matrix, create_graph=True)
    (product,) = torch.autograd.grad((grad * along).sum(), at)
    right = (slope(nearest, matrix + 1e-5 * along)[1] - slope(nearest, matrix - 1e-5 * along)[1]) / 2e-5
    return ((product - right).norm() / right.norm()).item()


maps = {"procrustes": lambda m: roma.procrustes(m)[0], "special_procrustes": roma.special_procrustes}
assert torch.allclose(*(slope(nearest, matrix)[1] for nearest in maps.values()), rtol=1e-3)
offs = {name: off(nearest) for name, nearest in maps.items()}
print("off by", offs)
assert offs["procrustes"] > 0.02 and offs["special_procrustes"] < 1e-6
PYTHON
