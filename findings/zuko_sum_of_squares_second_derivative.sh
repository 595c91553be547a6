#!/usr/bin/env bash
# zuko 1.6.0 with torch 2.13.0: a second derivative through its sum-of-squares flow (SOSPF) is wrong, silently.
#
# The flow integrates a polynomial by a Function, GaussLegendre, whose backward integrates the derivative of the
# integrand by its parameters with detached tensors. The second derivative (a Hessian of log_prob, a score that is
# trained, a meta-gradient) lacks what goes through these, and raises nothing, as other paths lead to the parameters.
#
# Seen: the gradient of log_prob by the context agrees with differences, the Hessian times a vector is off by more than
# a third of its norm; for the affine flow MAF both agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 \
	zuko==1.6.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import zuko

torch.set_default_dtype(torch.float64)


def offs(flow_class):
    torch.manual_seed(0)
    flow = flow_class(features=1, context=1, transforms=1, hidden_features=(6,)).requires_grad_(False)
    for layer in flow.modules():
        if isinstance(layer, torch.nn.ReLU):
            layer.forward = torch.tanh  # smooth, so that differences say what the Hessian is
    x, context, along = torch.randn(3, 1), torch.randn(3, 1), torch.randn(3, 1)

    def value(context):
        return flow(context).log_prob(x).sum()

    def slope(at, create_graph=False):
        at = at.clone().requires_grad_()
        return at, torch.autograd.grad(value(at), at, create_graph=create_graph)[0]

    at, grad = slope(context, create_graph=True)
    (product,) = torch.autograd.grad((grad * along).sum(), at)
    first = (value(context + 1e-5 * along) - value(context - 1e-5 * along)) / 2e-5
    second = (slope(context + 1e-5 * along)[1] - slope(context - 1e-5 * along)[1]) / 2e-5
    return abs((grad * along).sum() - first).item(), ((product - second).norm() / second.norm()).item()


seen = {flow.__name__: offs(flow) for flow in (zuko.flows.SOSPF, zuko.flows.MAF)}
print("off in the gradient, and of the Hessian times a vector:", seen)
assert all(first < 1e-6 for first, _ in seen.values())
assert seen["SOSPF"][1] > 0.3 and seen["MAF"][1] < 1e-5
PYTHON
