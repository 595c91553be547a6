#!/usr/bin/env bash
# torchdeq 0.1.0 with torch 2.13.0: with ift=True, a second derivative is wrong, silently.
#
# get_deq(ift=True) gives the gradient of the fixed point by the implicit function theorem, in a backward hook: it solves
# a linear system with the vector-Jacobian product of a step that was made at the detached fixed point. The hook's
# result depends on the cotangent, and so has a graph; but the step is taken at a constant, so that the second
# derivative lacks how the fixed point itself moves. Unrolled (grad=80 steps), it is right.
#
# Seen: gradients agree with differences; a Hessian times a vector is off by more than a tenth of its norm with ift=True,
# and agrees when unrolled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 \
	torchdeq==0.1.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torchdeq import get_deq

torch.set_default_dtype(torch.float64)
point, along = torch.tensor([[0.7, 1.3]]), torch.tensor([[1.0, -0.5]])


def offs(**options):
    deq = get_deq(f_max_iter=80, b_max_iter=80, f_tol=1e-12, b_tol=1e-12, **options)

    def value(a):
        z, _ = deq(lambda z: (0.5 * z * a).cos(), torch.zeros_like(a))
        return z[-1].exp().sum()

    def slope(at, create_graph=False):
        at = at.clone().requires_grad_()
        return at, torch.autograd.grad(value(at), at, create_graph=create_graph)[0]

    at, grad = slope(point, create_graph=True)
    (product,) = torch.autograd.grad((grad * along).sum(), at)
    first = ((value(point + 1e-5 * along) - value(point - 1e-5 * along)) / 2e-5).item()
    second = (slope(point + 1e-5 * along)[1] - slope(point - 1e-5 * along)[1]) / 2e-5
    return abs((grad * along).sum().item() - first), ((product - second).norm() / second.norm()).item()


implicit, unrolled = offs(ift=True), offs(core="sliced", grad=80)
print("ift=True:", implicit, "unrolled:", unrolled)
assert implicit[0] < 1e-6 and implicit[1] > 0.1 and max(unrolled) < 1e-4
PYTHON
