#!/usr/bin/env bash
# roma 1.8.0 with torch 2.13.0: the second derivative of `procrustes` is wrong, and that of `special_procrustes` right.
#
# roma.procrustes (the nearest orthonormal matrix) is a Function with a formula of its own for the gradient, which is
# computed from the singular vectors that forward has kept: without a graph. The second derivative has what goes
# through the cotangent, and lacks what goes through the vectors. special_procrustes (the nearest rotation), which
# differentiates the decomposition itself, is right.
#
# Seen: both gradients agree with differences; a Hessian times a vector agrees with differences of gradients for
# special_procrustes, and is off by its whole norm for procrustes.
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


def slope(nearest, at, create_graph=False):
    at = at.clone().requires_grad_()
    loss = (nearest(at) * weights).sum().exp()
    return at, torch.autograd.grad(loss, at, create_graph=create_graph)[0]


def offs(nearest):
    at, grad = slope(nearest, matrix, create_graph=True)
    (product,) = torch.autograd.grad((grad * along).sum(), at)
    after, before = matrix + 1e-5 * along, matrix - 1e-5 * along
    first = ((nearest(after) * weights).sum().exp() - (nearest(before) * weights).sum().exp()) / 2e-5
    second = (slope(nearest, after)[1] - slope(nearest, before)[1]) / 2e-5
    return abs((grad * along).sum() - first).item(), ((product - second).norm() / second.norm()).item()


maps = {"procrustes": lambda m: roma.procrustes(m)[0], "special_procrustes": roma.special_procrustes}
seen = {name: offs(nearest) for name, nearest in maps.items()}
print("off in the gradient, and of the Hessian times a vector:", seen)
assert all(first < 1e-6 for first, _ in seen.values())
assert seen["procrustes"][1] > 0.1 and seen["special_procrustes"][1] < 1e-5
PYTHON
