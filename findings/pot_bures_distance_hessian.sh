#!/usr/bin/env bash
# POT 0.9.7.post1 with torch 2.13.0: the Hessian of the Bures-Wasserstein distance is wrong, silently.
#
# POT's torch backend has its own square root of a matrix, a Function whose backward is @once_differentiable. torch raises
# for a second derivative of such a Function only where its cotangent has a graph. Here a trace follows the root, so the
# cotangent is a constant: the gradient of the root is taken for a constant as well, nothing is raised, and the second
# derivative has all other terms.
#
# Seen: the gradient by the covariance agrees with differences, the Hessian times a vector is off by more than a tenth of
# its norm; the same formula with a root by torch.linalg.eigh agrees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 \
	scipy==1.17.1 POT==0.9.7.post1
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import ot
import torch

torch.manual_seed(0)
factor, other, along = (torch.randn(3, 3, dtype=torch.float64) for _ in range(3))
mean, eye = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
target = other @ other.T + eye


def by_pot(factor):
    return ot.gaussian.bures_wasserstein_distance(mean, mean, factor @ factor.T + eye, target).sum()


def root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.sqrt()) @ vectors.T


def written_out(factor):
    s = factor @ factor.T + eye
    half = root(s)
    return (torch.trace(s) + torch.trace(target) - 2 * torch.trace(root(half @ target @ half))).sqrt()


def slope(fn, at, create_graph=False):
    at = at.clone().requires_grad_()
    return at, torch.autograd.grad(fn(at), at, create_graph=create_graph)[0]


def offs(fn):
    at, grad = slope(fn, factor, create_graph=True)
    (product,) = torch.autograd.grad((grad * along).sum(), at)
    first = (fn(factor + 1e-5 * along) - fn(factor - 1e-5 * along)) / 2e-5
    second = (slope(fn, factor + 1e-5 * along)[1] - slope(fn, factor - 1e-5 * along)[1]) / 2e-5
    return abs((grad * along).sum() - first).item(), ((product - second).norm() / second.norm()).item()


pot, plain = offs(by_pot), offs(written_out)
print("POT: gradient off by %.1e, Hessian times a vector by %.3f of its norm" % pot)
print("written out: %.1e, %.1e" % plain)
assert torch.allclose(by_pot(factor), written_out(factor)) and max(pot[0], *plain) < 1e-5 and pot[1] > 0.1
PYTHON
